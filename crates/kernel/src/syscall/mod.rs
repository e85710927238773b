//! System calls: the table, the arguments, the trace.

pub mod table;
pub mod trace;

use crate::errno::{Errno, Result};
use crate::platform::entry::TrapFrame;
use crate::platform::user::UserAddress;
use crate::task::carrier;

/// The six argument registers of a system call (syscall(2)).
#[derive(Clone, Copy, Debug)]
pub struct Args(pub [u64; 6]);

impl Args {
    /// An argument as the kernel's `long`.
    pub fn u64(&self, index: usize) -> u64 {
        self.0[index]
    }
    /// An argument as `off_t` or `ssize_t`.
    pub fn i64(&self, index: usize) -> i64 {
        self.0[index] as i64
    }
    /// An argument as `unsigned int`: the upper half is ignored, as Linux does.
    pub fn u32(&self, index: usize) -> u32 {
        self.0[index] as u32
    }
    /// An argument as `int`.
    pub fn i32(&self, index: usize) -> i32 {
        self.0[index] as i32
    }
    /// An argument as `size_t`.
    pub fn usize(&self, index: usize) -> usize {
        self.0[index] as usize
    }
    /// An argument as a guest pointer.
    pub fn address(&self, index: usize) -> UserAddress {
        UserAddress(self.0[index])
    }
    /// An argument as a file descriptor.
    pub fn fd(&self, index: usize) -> i32 {
        self.0[index] as i32
    }
}

/// A system call handler: check, fetch the object, call its method, return.
pub type Handler = fn(&Args) -> Result<u64>;

/// How an argument is shown in the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
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

/// How well a system call is supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// As on Linux.
    Full,
    /// As on Linux except for what the note says.
    Partial(&'static str),
    /// Returns the error that the note explains.
    Missing(&'static str),
}

/// A row of the table.
#[derive(Clone, Copy)]
pub struct Entry {
    /// Number in the x86-64 ABI.
    pub number: u32,
    /// Name.
    pub name: &'static str,
    /// How to show the arguments.
    pub args: &'static [Arg],
    /// The handler.
    pub handler: Handler,
    /// What works.
    pub support: Support,
}

/// Performs the system call of a frame.
pub fn perform(frame: &mut TrapFrame) {
    carrier::count_call();
    let entry = usize::try_from(frame.orig_rax)
        .ok()
        .and_then(|number| table::BY_NUMBER.get(number).copied().flatten());
    let tracing = trace::enabled();
    if tracing {
        trace::enter(entry, frame);
    }
    let result = match entry {
        Some(entry) => (entry.handler)(&Args(frame.arguments())),
        None => {
            trace::count_unknown(frame.orig_rax);
            Err(Errno::ENOSYS)
        }
    };
    frame.rax = match result {
        Ok(value) => value,
        Err(error) => error.to_return(),
    };
    if tracing {
        trace::leave(entry, frame);
    }
}
