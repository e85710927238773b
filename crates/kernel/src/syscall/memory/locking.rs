//! Locking memory (mlock(2)), and what the running process may map and lock.

use thaw_abi::layout::GUEST_MAX;

use crate::args::Flags;
use crate::errno::{Errno, Result};
use crate::mm::AddressSpace;
use crate::mm::limits::{GrowthLimits, LockLimit, MapLimit};
use crate::mm::vma::VmaFlags;
use crate::platform::user::UserAddress;
use crate::task::process::{RLIMIT_AS, RLIMIT_DATA, RLIMIT_MEMLOCK};
use crate::task::{Capabilities, current_process};

/// What the running process may lock: all it likes with `CAP_IPC_LOCK`.
pub fn own_limit() -> LockLimit {
    let process = current_process();
    let is_privileged = process.credentials.borrow_mut().can(Capabilities::IPC_LOCK);
    LockLimit((!is_privileged).then(|| process.limits.borrow_mut()[RLIMIT_MEMLOCK].current))
}

/// What the running process may map.
pub fn map_limit() -> MapLimit {
    let process = current_process();
    let limits = process.limits.borrow_mut();
    let data = limits[RLIMIT_DATA];
    // Valgrind sets 0, and means brk(2) only (`may_expand_vm` in mm/mmap.c).
    let data = if data.current == 0 { data.maximum } else { data.current };
    MapLimit { all: limits[RLIMIT_AS].current, data }
}

/// How far the running process may let its memory grow.
pub fn growth_limits() -> GrowthLimits {
    let heap = current_process().limits.borrow_mut()[RLIMIT_DATA].current;
    GrowthLimits { locked: own_limit(), mapped: map_limit(), heap }
}

/// The pages of a range of bytes: start and bytes, which wrap around as on Linux.
fn pages(UserAddress(at): UserAddress, len: u64) -> (u64, u64) {
    let start = at & !4095;
    (start, len.wrapping_add(at - start).wrapping_add(4095) & !4095)
}

/// Changes whether a range is locked, as far as it is mapped.
fn mark(mm: &AddressSpace, (start, len): (u64, u64), set: VmaFlags) -> Result<()> {
    let end = start.checked_add(len).ok_or(Errno::EINVAL)?;
    if start == end {
        return Ok(());
    }
    let is_covered = mm.covers(start, end);
    mm.change_flags(start, end, set, VmaFlags::LOCKED - set)?;
    if is_covered { Ok(()) } else { Err(Errno::ENOMEM) }
}

/// mlock(2).
pub fn mlock(start: UserAddress, len: u64) -> Result<()> {
    own_limit().check_right()?;
    let (start, len) = pages(start, len);
    let mm = current_process().mm();
    if !own_limit().fits(&mm, len - mm.locked(start, start.saturating_add(len))) {
        return Err(Errno::ENOMEM);
    }
    mark(&mm, (start, len), VmaFlags::LOCKED)
}

/// mlock2(2).
pub fn mlock2(start: UserAddress, len: u64, Flags(flags): Flags) -> Result<()> {
    const ONFAULT: u32 = 1;
    if flags & !ONFAULT != 0 {
        return Err(Errno::EINVAL);
    }
    mlock(start, len)
}

/// munlock(2).
pub fn munlock(start: UserAddress, len: u64) -> Result<()> {
    mark(&current_process().mm(), pages(start, len), VmaFlags::empty())
}

/// mlockall(2).
pub fn mlockall(Flags(flags): Flags) -> Result<()> {
    const CURRENT: u32 = 1;
    const FUTURE: u32 = 2;
    const ONFAULT: u32 = 4;
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
        mm.change_flags(0, GUEST_MAX, VmaFlags::LOCKED, VmaFlags::empty())?;
    }
    Ok(())
}

/// munlockall(2).
pub fn munlockall() -> Result<()> {
    let mm = current_process().mm();
    mm.set_locks_new(false);
    mm.change_flags(0, GUEST_MAX, VmaFlags::empty(), VmaFlags::LOCKED)?;
    Ok(())
}
