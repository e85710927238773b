//! Arguments of system calls, as types.
//!
//! A handler is a function of what the call takes: `fn dup3(old: Fd, new: Fd, flags: Flags)`.
//! The table wraps it ([`Signature`]), so that every register becomes an [`Argument`] as
//! Linux would take it: the upper half of an `int` is ignored. That never fails; what is
//! allowed, and in which order that is looked at, is up to the handler.

mod user_ptr;

pub use user_ptr::UserPtr;

use core::ops::Deref;

use crate::errno::Result;
use crate::platform::user::UserAddress;

/// How an argument is shown in the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A descriptor.
    Fd,
    /// A signed number.
    Int,
    /// Flags or an address, in hexadecimal.
    Hex,
    /// A NUL-terminated string in guest memory.
    Str,
    /// Permissions, in octal.
    Octal,
}

/// What a system call can take.
pub trait Argument: Sized {
    /// How the trace shows it.
    const KIND: Kind;

    /// The argument that a register holds.
    fn from_register(register: u64) -> Self;
}

/// A file descriptor. What it stands for is found by the methods that file systems add.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fd(pub i32);

/// Flags, an `unsigned int`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags(pub u32);

/// Permission bits (inode(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode(pub u32);

/// An `unsigned long` that is neither a number nor an address, or whose meaning another
/// argument decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word(pub u64);

/// A signal number, not looked at yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct SignalNumber(pub u32);

/// A clock, or what Linux makes one of (clock_gettime(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockId(pub i32);

/// A process or thread, not looked at yet, by the rules of the call: 0 often is the caller, and a
/// negative number a process group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PidNumber(pub i32);

/// The address of a NUL-terminated string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserString(pub UserAddress);

impl Deref for UserString {
    type Target = UserAddress;

    fn deref(&self) -> &UserAddress {
        &self.0
    }
}

macro_rules! arguments {
    ($($kind:ident: $type:ty = |$register:ident| $value:expr;)*) => {
        $(impl Argument for $type {
            const KIND: Kind = Kind::$kind;

            #[inline]
            fn from_register($register: u64) -> Self {
                $value
            }
        })*
    };
}

arguments! {
    Int: i32 = |register| register as i32;
    Int: u32 = |register| register as u32;
    Int: i64 = |register| register as i64;
    Int: u64 = |register| register;
    Int: usize = |register| register as usize;
    Fd: Fd = |register| Self(register as i32);
    Int: SignalNumber = |register| Self(register as u32);
    Int: ClockId = |register| Self(register as i32);
    Int: PidNumber = |register| Self(register as i32);
    Hex: Flags = |register| Self(register as u32);
    Hex: Word = |register| Self(register);
    Octal: Mode = |register| Self(register as u32);
    Hex: UserAddress = |register| Self(register);
    Str: UserString = |register| Self(UserAddress(register));
}

/// The six argument registers of a system call (syscall(2)).
#[derive(Clone, Copy, Debug)]
pub struct Args(pub [u64; 6]);

/// A system call handler as the table has it.
pub type Handler = fn(&Args) -> Result<u64>;

/// A value that a system call returns.
pub trait Returned {
    /// The register that the guest finds it in.
    fn into_register(self) -> u64;
}

impl Returned for () {
    #[inline]
    fn into_register(self) -> u64 {
        0
    }
}

macro_rules! returned {
    ($($type:ty)*) => {
        $(impl Returned for $type {
            #[inline]
            fn into_register(self) -> u64 {
                self as u64
            }
        })*
    };
}

returned! { bool u32 i32 u64 i64 usize }

/// A system call handler as it is written; `A` is the tuple of its arguments.
pub trait Signature<A> {
    /// How the trace shows its arguments.
    const KINDS: &'static [Kind];

    /// Calls it with as many registers as it wants.
    fn perform(self, args: &Args) -> Result<u64>;
}

macro_rules! signatures {
    ($(($($argument:ident $index:literal),*))*) => {
        $(impl<F: Fn($($argument),*) -> Result<R>, R: Returned, $($argument: Argument),*>
            Signature<($($argument,)*)> for F
        {
            const KINDS: &'static [Kind] = &[$($argument::KIND),*];

            #[inline]
            fn perform(self, _args: &Args) -> Result<u64> {
                self($($argument::from_register(_args.0[$index])),*).map(Returned::into_register)
            }
        })*
    };
}

signatures! {
    ()
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, G 5)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: Args = Args([0xffff_ffff_ffff_ff9c, 0x1_0000_0002, 0x1_0000_0003, 0, 0, 0]);

    #[test]
    fn the_upper_half_of_an_int_is_ignored() {
        fn ints(fd: Fd, flags: Flags, number: i32) -> Result<u64> {
            assert_eq!((fd, flags, number), (Fd(-100), Flags(2), 3));
            Ok(7)
        }
        assert_eq!(ints.perform(&LARGE), Ok(7));
    }

    #[test]
    fn a_long_keeps_it() {
        fn longs(offset: i64, len: usize, at: UserAddress) -> Result<u64> {
            assert_eq!((offset, len, at.0), (-100, 0x1_0000_0002, 0x1_0000_0003));
            Ok(7)
        }
        assert_eq!(longs.perform(&LARGE), Ok(7));
    }

    #[test]
    fn a_result_fills_the_register() {
        fn nothing() -> Result<()> {
            Ok(())
        }
        fn negative() -> Result<i32> {
            Ok(-3)
        }
        assert_eq!((nothing.perform(&LARGE), negative.perform(&LARGE)), (Ok(0), Ok(-3i64 as u64)));
    }

    #[test]
    fn the_trace_follows_the_signature() {
        fn kinds<A, F: Signature<A>>(_: F) -> &'static [Kind] {
            F::KINDS
        }
        fn call(_: Fd, _: UserString, _: Flags, _: Mode, _: u64, _: UserAddress) -> Result<u64> {
            Ok(0)
        }
        use Kind::{Fd as D, Hex, Int, Octal, Str};
        assert_eq!(kinds(call), [D, Str, Hex, Octal, Int, Hex]);
    }
}
