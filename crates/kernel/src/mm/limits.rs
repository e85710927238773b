//! What a process may map and lock (getrlimit(2)). The kernel pages nothing out while a program runs, so
//! that to lock memory (mlock(2)) is to count it.

use thaw_abi::layout::GUEST_MAX;
use thaw_abi::page_align_up;

use super::AddressSpace;
use super::vma::{Vma, VmaFlags};
use crate::errno::{Errno, Result};
use crate::platform::machine::PROT_WRITE;

/// How many bytes somebody may lock: `None` for as many as they like.
#[derive(Clone, Copy)]
pub struct LockLimit(pub Option<u64>);

impl LockLimit {
    /// `EPERM` for those who may lock nothing.
    pub fn check_right(self) -> Result<()> {
        if self.0 == Some(0) { Err(Errno::EPERM) } else { Ok(()) }
    }

    /// Whether so many bytes may be locked.
    pub fn allows(self, bytes: u64) -> bool {
        self.0.is_none_or(|limit| bytes <= limit & !4095)
    }

    /// Whether `more` bytes may be locked beside what is locked in `mm`.
    pub fn fits(self, mm: &AddressSpace, more: u64) -> bool {
        self.allows(mm.locked(0, GUEST_MAX).saturating_add(more))
    }

    /// `EAGAIN` if new memory that is to be locked is too much (mmap(2), mremap(2)).
    pub fn check_growth(self, mm: &AddressSpace, more: u64) -> Result<()> {
        let more = page_align_up(more).unwrap_or(u64::MAX);
        if self.fits(mm, more) { Ok(()) } else { Err(Errno::EAGAIN) }
    }
}

/// How many bytes somebody may map: `u64::MAX` for as many as they like.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct MapLimit {
    /// Of all kinds (`RLIMIT_AS`).
    pub all: u64,
    /// That are nobody else's and may be written (`RLIMIT_DATA`).
    pub data: u64,
}

impl MapLimit {
    /// No limit.
    pub const NONE: Self = Self { all: u64::MAX, data: u64::MAX };

    /// `ENOMEM` if `more` bytes are too much beside what is mapped in `mm`. Those that count in
    /// [`MapLimit::data`] do if they are `data`.
    pub fn check(self, mm: &AddressSpace, more: u64, data: bool) -> Result<()> {
        if self.all != u64::MAX && mm.total().saturating_add(more) > self.all {
            return Err(Errno::ENOMEM);
        }
        if data { self.check_data(mm, more) } else { Ok(()) }
    }

    /// `ENOMEM` if `more` bytes that count in [`MapLimit::data`] are too much.
    pub fn check_data(self, mm: &AddressSpace, more: u64) -> Result<()> {
        let mapped = || mm.sum(&|vma| if is_data(vma.prot, vma.flags) { vma.len() } else { 0 });
        match self.data != u64::MAX && mapped().saturating_add(more) > self.data {
            true => Err(Errno::ENOMEM),
            false => Ok(()),
        }
    }
}

/// Whether memory counts in `RLIMIT_DATA` (`is_data_mapping` in mm/internal.h).
pub fn is_data(prot: u32, flags: VmaFlags) -> bool {
    prot & PROT_WRITE != 0 && !flags.intersects(VmaFlags::SHARED | VmaFlags::STACK)
}

/// The limits of whoever lets memory grow.
#[derive(Clone, Copy)]
pub struct GrowthLimits {
    /// Of locked memory.
    pub locked: LockLimit,
    /// Of all.
    pub mapped: MapLimit,
    /// Of what brk(2) gives, in bytes.
    pub heap: u64,
}

impl GrowthLimits {
    /// No limits.
    pub const NONE: Self = Self { locked: LockLimit(None), mapped: MapLimit::NONE, heap: u64::MAX };

    /// `ENOMEM` or `EAGAIN` if an area may not grow by `more` bytes.
    pub fn check(self, mm: &AddressSpace, vma: &Vma, more: u64) -> Result<()> {
        self.mapped.check(mm, more, is_data(vma.prot, vma.flags))?;
        match vma.flags.contains(VmaFlags::LOCKED) {
            true => self.locked.check_growth(mm, more),
            false => Ok(()),
        }
    }
}
