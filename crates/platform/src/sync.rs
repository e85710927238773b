//! Shared state under the kernel lock.
//!
//! Kernel code runs on one vCPU at a time and is not preempted: entering the
//! kernel takes the kernel lock, blocking or returning to the guest gives it
//! up. A [`KernelCell`] therefore never waits. It only checks, at run time, that no
//! reference into it lives twice, in particular not across a point where the
//! thread blocks; a violation is a kernel bug and panics.
#![allow(unsafe_code)]

use core::cell::{Cell, OnceCell, UnsafeCell};
use core::ops::{Deref, DerefMut};
use core::panic::RefUnwindSafe;

/// A value that kernel code may change, one borrower at a time.
#[derive(Default)]
pub struct KernelCell<T: ?Sized> {
    borrowed: Cell<bool>,
    value: UnsafeCell<T>,
}

// SAFETY: the kernel lock serializes all kernel code, which is why `borrowed` need
// not be atomic, and `borrowed` rejects a second reference.
unsafe impl<T: ?Sized + Send> Sync for KernelCell<T> {}
// SAFETY: owning the cell is owning the value.
unsafe impl<T: ?Sized + Send> Send for KernelCell<T> {}

/// Nothing unwinds here; see [`crate::saved`].
impl<T: ?Sized + RefUnwindSafe> RefUnwindSafe for KernelCell<T> {}

impl<T> KernelCell<T> {
    /// Wraps `value`.
    pub const fn new(value: T) -> Self {
        Self { borrowed: Cell::new(false), value: UnsafeCell::new(value) }
    }
}

impl<T: ?Sized> KernelCell<T> {
    /// Borrows the value. Panics if it is borrowed already.
    #[track_caller]
    pub fn borrow_mut(&self) -> Borrowed<'_, T> {
        if self.borrowed.replace(true) {
            panic!("kernel state borrowed twice");
        }
        Borrowed { cell: self }
    }
}

impl<T: Copy> KernelCell<T> {
    /// A copy of the value.
    #[track_caller]
    pub fn get(&self) -> T {
        *self.borrow_mut()
    }

    /// Replaces the value.
    #[track_caller]
    pub fn set(&self, value: T) {
        *self.borrow_mut() = value;
    }
}

/// A [`KernelCell`] that is a static. Statics hold what each boot makes anew, and images hold the heap:
/// so a static owns no memory of the heap. The compiler checks that by what need not be dropped.
///
/// ```
/// static NUMBER: thaw_platform::sync::StaticCell<Option<u32>> =
///     thaw_platform::sync::StaticCell::new(None);
/// ```
///
/// ```compile_fail
/// static NAME: thaw_platform::sync::StaticCell<Option<Vec<u8>>> =
///     thaw_platform::sync::StaticCell::new(None);
/// ```
pub struct StaticCell<T>(KernelCell<T>);

impl<T> StaticCell<T> {
    /// Wraps `value`.
    pub const fn new(value: T) -> Self {
        const { assert!(!core::mem::needs_drop::<T>(), "a static owns memory of the heap") };
        Self(KernelCell::new(value))
    }
}

impl<T> Deref for StaticCell<T> {
    type Target = KernelCell<T>;
    fn deref(&self) -> &KernelCell<T> {
        &self.0
    }
}

/// A borrowed value; the borrow ends when this is dropped.
pub struct Borrowed<'a, T: ?Sized> {
    cell: &'a KernelCell<T>,
}

impl<T: ?Sized> Deref for Borrowed<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: `borrowed` is set, so this is the only reference.
        unsafe { &*self.cell.value.get() }
    }
}

impl<T: ?Sized> DerefMut for Borrowed<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe { &mut *self.cell.value.get() }
    }
}

impl<T: ?Sized> Drop for Borrowed<'_, T> {
    fn drop(&mut self) {
        self.cell.borrowed.set(false);
    }
}

/// A value that is filled in while others are in use already.
pub struct Late<T> {
    value: OnceCell<T>,
}

// SAFETY: filled in once, under the kernel lock, before any guest runs.
unsafe impl<T: Sync + Send> Sync for Late<T> {}

/// Nothing unwinds here; see [`crate::saved`].
impl<T: RefUnwindSafe> RefUnwindSafe for Late<T> {}

impl<T> Late<T> {
    /// Not filled in yet.
    pub const fn empty() -> Self {
        Self { value: OnceCell::new() }
    }

    /// Fills it in; later calls change nothing.
    pub fn set(&self, value: T) {
        let _ = self.value.set(value);
    }

    /// The value, if it has been filled in.
    pub fn get(&self) -> Option<&T> {
        self.value.get()
    }
}

impl<T> Deref for Late<T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        match self.value.get() {
            Some(value) => value,
            None => panic!("kernel state used before it was filled in"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_borrow_panics() {
        let cell = KernelCell::new(1);
        *cell.borrow_mut() += 1;
        assert_eq!(cell.get(), 2);
        let _first = cell.borrow_mut();
        let second =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(cell.borrow_mut())));
        assert!(second.is_err());
    }
}
