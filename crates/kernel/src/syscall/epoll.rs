//! System calls of epoll(7).

use alloc::sync::Arc;

use crate::args::{Fd, Flags};
use crate::errno::{Errno, Result};
use crate::fs::fd_table;
use crate::fs::file::{OpenFile, OpenFlags};
use crate::ipc::epoll::{Epoll, EpollEvent};
use crate::ipc::timeout::Timeout;
use crate::platform::user::UserAddress;
use crate::task::signal;
use crate::task::wait::wait_until;

const EPOLL_CTL_ADD: i32 = 1;
const EPOLL_CTL_DEL: i32 = 2;
const EPOLL_CTL_MOD: i32 = 3;
/// Most events in one call: `INT_MAX / sizeof(struct epoll_event)`.
const MAX_EVENTS: i32 = i32::MAX / size_of::<EpollEvent>() as i32;

/// epoll_create(2): the size is a hint that must be positive.
pub fn epoll_create(size: i32) -> Result<u64> {
    if size <= 0 {
        return Err(Errno::EINVAL);
    }
    make_epoll(OpenFlags::empty())
}

/// epoll_create1(2).
pub fn epoll_create1(Flags(flags): Flags) -> Result<u64> {
    make_epoll(OpenFlags::from_bits_retain(flags))
}

fn make_epoll(flags: OpenFlags) -> Result<u64> {
    if !OpenFlags::CLOEXEC.contains(flags) {
        return Err(Errno::EINVAL);
    }
    let file = OpenFile::new(Arc::new(Epoll::new()), OpenFlags::RDWR, None);
    fd_table::install(file, flags).map(|fd| fd as u64)
}

/// epoll_ctl(2).
pub fn epoll_ctl(set: Fd, operation: i32, fd: Fd, event: UserAddress) -> Result<u64> {
    // As on Linux, EFAULT comes before everything else.
    let event = if operation == EPOLL_CTL_DEL {
        EpollEvent { events: 0, data: 0 }
    } else {
        event.read()?
    };
    let set = set.file()?;
    let target = fd.file()?;
    if target.file.wait_queue().is_none() {
        return Err(Errno::EPERM);
    }
    let epoll = set.downcast::<Epoll>().ok_or(Errno::EINVAL)?;
    if Arc::ptr_eq(&set, &target) {
        return Err(Errno::EINVAL);
    }
    match operation {
        EPOLL_CTL_ADD => epoll.add(fd.0, &target, event)?,
        EPOLL_CTL_MOD => epoll.modify(fd.0, &target, event)?,
        EPOLL_CTL_DEL => epoll.remove(fd.0, &target)?,
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}

/// epoll_wait(2).
pub fn epoll_wait(set: Fd, events: UserAddress, max: i32, timeout_ms: i32) -> Result<u64> {
    wait(set, events, max, Timeout::from_ms(timeout_ms))
}

/// epoll_pwait(2).
pub fn epoll_pwait(
    set: Fd,
    events: UserAddress,
    max: i32,
    timeout_ms: i32,
    mask: UserAddress,
    mask_size: usize,
) -> Result<u64> {
    under_mask(mask, mask_size, || wait(set, events, max, Timeout::from_ms(timeout_ms)))
}

/// epoll_pwait2(2).
pub fn epoll_pwait2(
    set: Fd,
    events: UserAddress,
    max: i32,
    timeout: UserAddress,
    mask: UserAddress,
    mask_size: usize,
) -> Result<u64> {
    let timeout = Timeout::from_timespec(timeout)?;
    under_mask(mask, mask_size, || wait(set, events, max, timeout))
}

/// Makes a call under the signal mask at `at`, unless that is null. A signal that ends
/// the call is handled under this mask; a call that ends otherwise, by an error too,
/// takes its mask back at once (`restore_saved_sigmask_unless`).
pub fn under_mask(at: UserAddress, size: usize, call: impl FnOnce() -> Result<u64>) -> Result<u64> {
    if at.is_null() {
        return call();
    }
    if size != 8 {
        return Err(Errno::EINVAL);
    }
    signal::set_temporary_mask(at.read()?);
    let outcome = call();
    if !matches!(outcome, Err(Errno::EINTR | Errno::ERESTARTNOHAND)) {
        signal::restore_mask();
    }
    outcome
}

fn wait(set: Fd, events: UserAddress, max: i32, timeout: Timeout) -> Result<u64> {
    if !(1..=MAX_EVENTS).contains(&max) {
        return Err(Errno::EINVAL);
    }
    let size = size_of::<EpollEvent>();
    events.check(max as usize * size)?;
    let set = set.file()?;
    let epoll = set.downcast::<Epoll>().ok_or(Errno::EINVAL)?;
    let report = || {
        epoll
            .report(max as usize, |index, event| events.offset((index * size) as u64).write(&event))
    };
    let first = report()?;
    if first > 0 {
        crate::task::host_poll::note_busy();
        return Ok(first as u64);
    }
    if timeout == Timeout::Zero {
        // Only the host knows about its sockets, and nobody will ask it for us.
        crate::task::host_poll::check();
        return report().map(|count| count as u64);
    }
    let outcome = wait_until(&[epoll.queue()], timeout.deadline(), || match report() {
        Ok(0) => None,
        outcome => Some(outcome),
    });
    match outcome {
        Err(Errno::ETIMEDOUT) => Ok(0),
        // signal(7): never restarted after a handler has run.
        Err(Errno::ERESTARTSYS) => Err(Errno::EINTR),
        outcome => outcome.map(|count| count as u64),
    }
}
