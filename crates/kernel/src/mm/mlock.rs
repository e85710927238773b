//! Locked memory (mlock(2)). The kernel pages nothing out while a program runs, so
//! that to lock memory is to count it.

use thaw_abi::layout::GUEST_MAX;
use thaw_abi::page_align_up;

use super::AddressSpace;
use crate::errno::{Errno, Result};

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
