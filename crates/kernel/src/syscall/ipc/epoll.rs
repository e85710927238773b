//! System calls of epoll(7).

use alloc::sync::Arc;

use crate::args::{Fd, Flags, UserPtr};
use crate::errno::{Errno, Result};
use crate::fs::fd_table;
use crate::fs::file::OpenFlags;
use crate::ipc::epoll::{Epoll, EpollEvent};
use crate::task::signal::{self, SignalSet};
use crate::task::wait::wait_until;
use crate::time::{Timeout, Timespec};

const EPOLL_CTL_ADD: i32 = 1;
const EPOLL_CTL_DEL: i32 = 2;
const EPOLL_CTL_MOD: i32 = 3;
/// Most events in one call: `INT_MAX / sizeof(struct epoll_event)`.
const MAX_EVENTS: i32 = i32::MAX / size_of::<EpollEvent>() as i32;

/// epoll_create(2): the size is a hint that must be positive.
pub fn epoll_create(size: i32) -> Result<i32> {
    if size <= 0 { Err(Errno::EINVAL) } else { epoll_create1(Flags(0)) }
}

/// epoll_create1(2).
pub fn epoll_create1(Flags(flags): Flags) -> Result<i32> {
    let flags = OpenFlags::from_bits_retain(flags);
    if !OpenFlags::CLOEXEC.contains(flags) {
        return Err(Errno::EINVAL);
    }
    fd_table::install_new(Arc::new(Epoll::new()), flags)
}

/// epoll_ctl(2).
pub fn epoll_ctl(set: Fd, operation: i32, fd: Fd, event: UserPtr<EpollEvent>) -> Result<()> {
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
        EPOLL_CTL_ADD => epoll.add(fd.0, &target, event),
        EPOLL_CTL_MOD => epoll.modify(fd.0, &target, event),
        EPOLL_CTL_DEL => epoll.remove(fd.0, &target),
        _ => Err(Errno::EINVAL),
    }
}

/// epoll_wait(2).
pub fn epoll_wait(
    set: Fd,
    events: UserPtr<EpollEvent>,
    max: i32,
    timeout_ms: i32,
) -> Result<usize> {
    wait(set, events, max, Timeout::from_ms(timeout_ms))
}

/// epoll_pwait(2).
pub fn epoll_pwait(
    set: Fd,
    events: UserPtr<EpollEvent>,
    max: i32,
    timeout_ms: i32,
    mask: UserPtr<SignalSet>,
    mask_size: usize,
) -> Result<usize> {
    under_mask(mask, mask_size, || wait(set, events, max, Timeout::from_ms(timeout_ms)))
}

/// epoll_pwait2(2).
pub fn epoll_pwait2(
    set: Fd,
    events: UserPtr<EpollEvent>,
    max: i32,
    timeout: UserPtr<Timespec>,
    mask: UserPtr<SignalSet>,
    mask_size: usize,
) -> Result<usize> {
    let timeout = Timeout::from_timespec(timeout)?;
    under_mask(mask, mask_size, || wait(set, events, max, timeout))
}

/// Makes a call under the signal mask at `at`, unless that is null. A signal that ends
/// the call is handled under this mask; a call that ends otherwise, by an error too,
/// takes its mask back at once (`restore_saved_sigmask_unless`).
pub fn under_mask<T>(
    at: UserPtr<SignalSet>,
    size: usize,
    call: impl FnOnce() -> Result<T>,
) -> Result<T> {
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

fn wait(set: Fd, events: UserPtr<EpollEvent>, max: i32, timeout: Timeout) -> Result<usize> {
    if !(1..=MAX_EVENTS).contains(&max) {
        return Err(Errno::EINVAL);
    }
    events.check(max as usize)?;
    let set = set.file()?;
    let epoll = set.downcast::<Epoll>().ok_or(Errno::EINVAL)?;
    let report = || epoll.report(max as usize, |index, event| events.at(index).write(&event));
    let first = report()?;
    if first > 0 {
        crate::task::host_poll::note_busy();
        return Ok(first);
    }
    if timeout == Timeout::Zero {
        // Only the host knows about its sockets, and nobody will ask it for us.
        crate::task::host_poll::check();
        return report();
    }
    let outcome = wait_until(&[epoll.queue()], timeout.deadline(), || match report() {
        Ok(0) => None,
        outcome => Some(outcome),
    });
    match outcome {
        Err(Errno::ETIMEDOUT) => Ok(0),
        // signal(7): never restarted after a handler has run.
        Err(Errno::ERESTARTSYS) => Err(Errno::EINTR),
        outcome => outcome,
    }
}
