//! Locked memory (mlock(2)). The kernel pages nothing out while a program runs, so
//! that to lock memory is to count it.

use thaw_abi::layout::GUEST_MAX;
use thaw_abi::page_align_up;

use super::AddressSpace;
use super::vma::VmaFlags;
use crate::args::Args;
use crate::errno::{Errno, Result};
use crate::task::process::RLIMIT_MEMLOCK;
use crate::task::{Capabilities, current_process};

/// How many bytes somebody may lock: `None` for as many as they like.
#[derive(Clone, Copy)]
pub struct LockLimit(pub Option<u64>);

impl LockLimit {
    /// `EPERM` for those who may lock nothing.
    pub fn check_right(self) -> Result<()> {
        if self.0 == Some(0) { Err(Errno::EPERM) } else { Ok(()) }
    }

    /// Whether so many bytes may be locked.
    fn allows(self, bytes: u64) -> bool {
        self.0.is_none_or(|limit| bytes <= limit & !4095)
    }

    /// Whether `more` bytes may be locked beside what is locked in `mm`.
    fn fits(self, mm: &AddressSpace, more: u64) -> bool {
        self.allows(mm.locked(0, GUEST_MAX).saturating_add(more))
    }

    /// `EAGAIN` if new memory that is to be locked is too much (mmap(2), mremap(2)).
    pub fn check_growth(self, mm: &AddressSpace, more: u64) -> Result<()> {
        let more = page_align_up(more).unwrap_or(u64::MAX);
        if self.fits(mm, more) { Ok(()) } else { Err(Errno::EAGAIN) }
    }
}

/// What the running process may lock: all it likes with `CAP_IPC_LOCK`.
pub fn own_limit() -> LockLimit {
    let process = current_process();
    let is_privileged = process.credentials.lock().can(Capabilities::IPC_LOCK);
    LockLimit((!is_privileged).then(|| process.limits.lock()[RLIMIT_MEMLOCK].current))
}

/// The pages of a range of bytes: start and bytes, which wrap around as on Linux.
fn pages(args: &Args) -> (u64, u64) {
    let start = args.u64(0) & !4095;
    (start, args.u64(1).wrapping_add(args.u64(0) - start).wrapping_add(4095) & !4095)
}

/// Changes whether a range is locked, as far as it is mapped.
fn mark(mm: &AddressSpace, (start, len): (u64, u64), set: VmaFlags) -> Result<u64> {
    let end = start.checked_add(len).ok_or(Errno::EINVAL)?;
    if start == end {
        return Ok(0);
    }
    let is_covered = mm.covers(start, end);
    mm.change_flags(start, end, set, VmaFlags::LOCKED - set);
    if is_covered { Ok(0) } else { Err(Errno::ENOMEM) }
}

/// mlock(2).
pub fn mlock(args: &Args) -> Result<u64> {
    own_limit().check_right()?;
    let (start, len) = pages(args);
    let mm = current_process().mm();
    if !own_limit().fits(&mm, len - mm.locked(start, start.saturating_add(len))) {
        return Err(Errno::ENOMEM);
    }
    mark(&mm, (start, len), VmaFlags::LOCKED)
}

/// mlock2(2).
pub fn mlock2(args: &Args) -> Result<u64> {
    const ONFAULT: u32 = 1;
    if args.u32(2) & !ONFAULT != 0 {
        return Err(Errno::EINVAL);
    }
    mlock(args)
}

/// munlock(2).
pub fn munlock(args: &Args) -> Result<u64> {
    mark(&current_process().mm(), pages(args), VmaFlags::empty())
}

/// mlockall(2).
pub fn mlockall(args: &Args) -> Result<u64> {
    const CURRENT: u32 = 1;
    const FUTURE: u32 = 2;
    const ONFAULT: u32 = 4;
    let flags = args.u32(0);
    if flags & (CURRENT | FUTURE) == 0 || flags & !(CURRENT | FUTURE | ONFAULT) != 0 {
        return Err(Errno::EINVAL);
    }
    own_limit().check_right()?;
    let mm = current_process().mm();
    let is_current = flags & CURRENT != 0;
    if is_current && !own_limit().allows(mm.total()) {
        return Err(Errno::ENOMEM);
    }
    mm.set_locks_new(flags & FUTURE != 0);
    if is_current {
        mm.change_flags(0, GUEST_MAX, VmaFlags::LOCKED, VmaFlags::empty());
    }
    Ok(0)
}

/// munlockall(2).
pub fn munlockall(_args: &Args) -> Result<u64> {
    let mm = current_process().mm();
    mm.set_locks_new(false);
    mm.change_flags(0, GUEST_MAX, VmaFlags::empty(), VmaFlags::LOCKED);
    Ok(0)
}
