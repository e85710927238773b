//! Pages that host calls may map, change and take away.
//!
//! The kernel shares its address space with the guest, and its own memory is writable: a
//! host call over the wrong pages would break every promise of Rust. So the calls of
//! [`crate::machine`] that change mappings take no addresses but one of these:
//!
//! - [`GuestRange`]: pages of the guest. The kernel has no reference into guest memory
//!   ([`crate::user`] copies it and catches faults), so that they may be mapped, changed
//!   and taken away at any time. Making one is checked.
//! - [`KernelRange`]: pages of the kernel. Making one is `unsafe`: who does promises that
//!   nobody refers to what the calls replace.
//! - [`Window`]: memory of the kernel that is put together before it is moved to its
//!   place. It is in use once at a time, which is checked, too.
//!
//! A [`Table`] is memory of the per-boot area that holds plain values.
#![allow(unsafe_code)]

use core::marker::PhantomData;
use core::sync::atomic::Ordering::Relaxed;

use bytemuck::Zeroable;

use thaw_abi::layout::{GUEST_MAX, GUEST_MIN, WINDOW_BASE, WINDOW_END};
use thaw_abi::page_align_up;

use crate::boot_area::of_process;
use crate::errno::{Errno, Result};
use crate::machine::{HostFd, Machine, Memory, PROT_READ, PROT_WRITE, Sharing};

/// Bytes of a page.
const PAGE: u64 = 4096;

/// Whole pages that host calls may change.
pub trait Pages: Copy + sealed::Sealed {
    /// Address of the first byte.
    fn start(self) -> u64;
    /// Bytes.
    fn bytes(self) -> u64;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::GuestRange {}
    impl Sealed for super::KernelRange {}
}

/// Pages of the guest's part of the address space. Says nothing about whether they are
/// mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestRange {
    start: u64,
    len: u64,
}

impl GuestRange {
    /// All that a guest may map.
    pub const ALL: GuestRange = GuestRange { start: GUEST_MIN, len: GUEST_MAX - GUEST_MIN };

    /// The pages that hold `len` bytes from `start` on.
    ///
    /// # Errors
    /// `EINVAL` if `start` is not the beginning of a page, if there are no bytes, or if
    /// one of them is not the guest's.
    #[inline]
    pub fn new(start: u64, len: u64) -> Result<Self> {
        let len = page_align_up(len).filter(|&len| len > 0).ok_or(Errno::EINVAL)?;
        let end = start.checked_add(len).ok_or(Errno::EINVAL)?;
        if !start.is_multiple_of(PAGE) || start < GUEST_MIN || end > GUEST_MAX {
            return Err(Errno::EINVAL);
        }
        Ok(Self { start, len })
    }

    /// Address behind the last byte.
    pub fn end(self) -> u64 {
        self.start + self.len
    }
}

impl Pages for GuestRange {
    #[inline]
    fn start(self) -> u64 {
        self.start
    }

    #[inline]
    fn bytes(self) -> u64 {
        self.len
    }
}

/// Pages of the kernel's own ([`thaw_abi::layout`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelRange {
    start: u64,
    len: u64,
}

impl KernelRange {
    /// The pages that hold `len` bytes from `start` on.
    ///
    /// # Safety
    /// For as long as the range is used: the pages lie in an area of the layout that is the
    /// caller's, or hold the kernel's variables; and no reference to a value in them is in
    /// use while a host call takes the value away, replaces it by another one or changes
    /// whether it can be read and written.
    #[inline]
    pub const unsafe fn new(start: u64, len: u64) -> Self {
        Self { start, len }
    }
}

impl Pages for KernelRange {
    #[inline]
    fn start(self) -> u64 {
        self.start
    }

    #[inline]
    fn bytes(self) -> u64 {
        self.len
    }
}

/// A table in the per-boot area, or in one of its own, which stays there until the host process ends, so that
/// references to its values are good for ever. It is used under the kernel lock, and by the
/// handler of a fault in the middle of that: its values are cells, or made of cells. They begin
/// as zeros. Where the tables lie says [`crate::boot_area`].
pub struct Table<T> {
    address: u64,
    capacity: usize,
    values: PhantomData<T>,
}

// SAFETY: the kernel lock serializes all kernel code.
unsafe impl<T: Zeroable> Sync for Table<T> {}

impl<T: Zeroable> Table<T> {
    /// A table at `address`, with room for `capacity` values.
    ///
    /// # Safety
    /// The memory is aligned, in the per-boot area, and the table's alone; as many values as
    /// are used are mapped, zero at first, and stay so. Every `T` is a cell, or made of cells.
    pub const unsafe fn new(address: u64, capacity: usize) -> Self {
        Self { address, capacity, values: PhantomData }
    }

    /// Most values.
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Start and bytes, whole pages, of the first `count` values.
    pub const fn range(&self, count: usize) -> (u64, u64) {
        assert!(count <= self.capacity, "beyond the table");
        (self.address, ((count * size_of::<T>()) as u64).next_multiple_of(PAGE))
    }

    /// Maps the first `count` values, all of them zero, whatever was there.
    ///
    /// # Errors
    /// The host cannot map them.
    pub fn map(&self, count: usize) -> Result<()> {
        let (start, len) = self.range(count);
        // SAFETY: the memory is the table's, whose values may change at any time.
        let range = unsafe { KernelRange::new(start, len) };
        Machine::map_anonymous(range, PROT_READ | PROT_WRITE, Sharing::Private)
    }

    /// Maps value number `index`, which fills pages, to the beginning of a file, shared. It must not
    /// have been used before.
    ///
    /// # Errors
    /// The host cannot map it.
    pub fn map_to_file(&self, index: usize, fd: HostFd, protection: u32) -> Result<()> {
        const { assert!((size_of::<T>() as u64).is_multiple_of(PAGE), "values share a page") };
        assert!(index < self.capacity, "beyond the table");
        let start = self.address + (index * size_of::<T>()) as u64;
        // SAFETY: the memory is the table's, whose values may change at any time.
        let range = unsafe { KernelRange::new(start, size_of::<T>() as u64) };
        Machine::map_file(fd, range, protection, Sharing::Shared, 0)
    }

    /// Value number `index`, which has to be mapped.
    #[inline]
    pub fn cell(&self, index: usize) -> &'static T {
        assert!(index < self.capacity, "beyond the table");
        // SAFETY: as in `cells`.
        unsafe { &*(self.address as *const T).add(index) }
    }

    /// The first `count` values, which have to be mapped.
    #[inline]
    pub fn cells(&self, count: usize) -> &'static [T] {
        assert!(count <= self.capacity, "beyond the table");
        // SAFETY: inside the table, which nobody else refers to in another way; the zeros of
        // fresh memory make a value.
        unsafe { core::slice::from_raw_parts(self.address as *const T, count) }
    }
}

/// Memory of this host process that is put together, or taken apart, before anybody else
/// sees it. It is unmapped when this is dropped.
pub struct Window {
    len: u64,
    is_mapped: bool,
}

impl Window {
    /// `len` bytes of zeros.
    ///
    /// # Errors
    /// `ENOMEM` if they do not fit, and those of mmap(2).
    pub fn anonymous(len: u64) -> Result<Self> {
        let mut window = Self::take(len)?;
        Machine::map_anonymous(window.range(), PROT_READ | PROT_WRITE, Sharing::Private)?;
        window.is_mapped = true;
        Ok(window)
    }

    /// `len` bytes of a file that no other host process changes meanwhile: changes go to
    /// the file.
    ///
    /// # Errors
    /// As [`Window::anonymous`].
    pub fn of_file(file: HostFd, len: u64, offset: u64) -> Result<Self> {
        let mut window = Self::take(len)?;
        let protection = PROT_READ | PROT_WRITE;
        Machine::map_file(file, window.range(), protection, Sharing::Shared, offset)?;
        window.is_mapped = true;
        Ok(window)
    }

    /// Memory that is taken out of the guest's, which is left with a hole.
    ///
    /// # Errors
    /// As [`Window::anonymous`], and those of mremap(2): if the host has no memory there.
    pub fn of_guest(range: GuestRange) -> Result<Self> {
        let mut window = Self::take(range.len)?;
        Machine::move_pages(range, window.range())?;
        window.is_mapped = true;
        Machine::protect(window.range(), PROT_READ | PROT_WRITE)?;
        Ok(window)
    }

    /// Moves the memory to the guest's, where it replaces what is there.
    ///
    /// # Errors
    /// `EINVAL` if the guest's range has another length, and those of mremap(2).
    pub fn move_to(mut self, range: GuestRange, protection: u32) -> Result<()> {
        if protection != PROT_READ | PROT_WRITE {
            Machine::protect(self.range(), protection)?;
        }
        Machine::move_pages(self.range(), range)?;
        self.is_mapped = false;
        Ok(())
    }

    /// The memory.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: mapped, readable and writable, from when the window was made until it is
        // dropped, and there is one window at a time.
        unsafe { core::slice::from_raw_parts_mut(WINDOW_BASE as *mut u8, self.len as usize) }
    }

    fn take(len: u64) -> Result<Self> {
        let len = page_align_up(len).filter(|&len| 0 < len && len <= WINDOW_END - WINDOW_BASE);
        let len = len.ok_or(Errno::ENOMEM)?;
        assert!(!of_process().window_is_used.swap(true, Relaxed), "the window is in use");
        Ok(Self { len, is_mapped: false })
    }

    /// Frees what the file has there, which reads as zeros then.
    ///
    /// # Errors
    /// Those of [`Memory::remove`].
    pub fn empty(&mut self) -> Result<()> {
        Machine::remove(self.range())
    }

    fn range(&self) -> KernelRange {
        // SAFETY: the area is the window's, and whoever refers to its memory has borrowed
        // the window.
        unsafe { KernelRange::new(WINDOW_BASE, self.len) }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if self.is_mapped {
            // Memory that stays there is replaced by that of the next window.
            let _ = Machine::unmap(self.range());
        }
        of_process().window_is_used.store(false, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::Cell;
    use core::sync::atomic::AtomicU32;
    use thaw_abi::layout::{BOOT_BASE, GATE_BASE, HEAP_BASE, KERNEL_BASE, LAYOUT_END, PAGES_BASE};

    #[test]
    fn a_guest_range_never_reaches_memory_of_the_kernel() {
        let of_kernel = [
            0,
            GATE_BASE,
            GUEST_MIN - PAGE,
            GUEST_MAX,
            KERNEL_BASE,
            HEAP_BASE,
            PAGES_BASE,
            WINDOW_BASE,
            BOOT_BASE,
            LAYOUT_END,
            u64::MAX - (PAGE - 1),
        ];
        for start in of_kernel {
            assert_eq!(GuestRange::new(start, PAGE), Err(Errno::EINVAL), "{start:#x}");
        }
        // Nor by its length.
        assert_eq!(GuestRange::new(GUEST_MAX - PAGE, PAGE + 1), Err(Errno::EINVAL));
        assert_eq!(GuestRange::new(GUEST_MIN, HEAP_BASE - GUEST_MIN + 1), Err(Errno::EINVAL));
        assert_eq!(GuestRange::new(GUEST_MIN, u64::MAX), Err(Errno::EINVAL));
        assert_eq!(GuestRange::new(GUEST_MAX - PAGE, u64::MAX - GUEST_MAX), Err(Errno::EINVAL));
    }

    #[test]
    fn a_table_has_cells_up_to_its_end() {
        static MEMORY: [AtomicU32; 4] = [const { AtomicU32::new(0) }; 4];
        let address = MEMORY.as_ptr().expose_provenance() as u64;
        // SAFETY: the memory is the table's alone.
        let table = unsafe { Table::<Cell<u32>>::new(address, MEMORY.len()) };
        let (first, again) = (table.cells(4), table.cells(2));
        first[1].set(7);
        again[1].set(again[1].get() + 1);
        assert_eq!(first.iter().map(Cell::get).collect::<Vec<_>>(), [0, 8, 0, 0]);
        assert_eq!(table.range(3).1, PAGE);
        let beyond = std::panic::AssertUnwindSafe(|| table.cells(5).len());
        assert!(std::panic::catch_unwind(beyond).is_err());
    }

    #[test]
    fn a_guest_range_is_whole_pages() {
        assert_eq!(GuestRange::new(GUEST_MIN + 1, PAGE), Err(Errno::EINVAL));
        assert_eq!(GuestRange::new(GUEST_MIN, 0), Err(Errno::EINVAL));
        let range = GuestRange::new(GUEST_MIN, PAGE + 1).unwrap();
        assert_eq!((range.start(), range.bytes()), (GUEST_MIN, 2 * PAGE));
        assert_eq!(range.end(), GUEST_MIN + 2 * PAGE);
        let all = GuestRange::ALL;
        assert_eq!(GuestRange::new(all.start(), all.bytes()), Ok(all));
    }
}
