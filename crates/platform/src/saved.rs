//! What may be part of saved state, and what may not, as the compiler checks it.
//!
//! A freeze saves the kernel's heap, and a thaw finds it again in another process, on
//! another host: a descriptor or a thread id of the host that lay in it would mean something
//! else there, or nothing. So all that is saved must be [`Saved`], and such things are not.
//!
//! [`Saved`] has to hold for each part of each type that is reached from the root of the
//! saved state, through any pointer: an auto trait. Stable Rust defines none anew, so this
//! borrows [`RefUnwindSafe`], which nothing here needs for what it was made for, since the
//! kernel never unwinds. Cells deny it, so [`crate::sync`]'s grant it for what they hold; so
//! does [`OfHost`], which makes a type one of a single boot; trait objects need it as a
//! supertrait.

use core::cell::UnsafeCell;
use core::marker::PhantomData;
use core::panic::RefUnwindSafe;

/// May be part of saved state. Not to be implemented by hand: see the module.
pub trait Saved: RefUnwindSafe {}

impl<T: RefUnwindSafe + ?Sized> Saved for T {}

/// A member that makes a type one of a single boot, which cannot be saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, bytemuck::Zeroable)]
pub struct OfHost(PhantomData<NotSaved>);

impl OfHost {
    /// The member.
    pub const fn new() -> Self {
        Self(PhantomData)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct NotSaved(PhantomData<UnsafeCell<()>>);

// SAFETY: there is nothing in it.
#[allow(unsafe_code)]
unsafe impl Sync for NotSaved {}

/// Fails to compile for what is not [`Saved`].
pub const fn assert_saved<T: Saved>() {}
