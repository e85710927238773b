//! System calls on timers that are read (timerfd_create(2)).

use alloc::sync::Arc;

use crate::args::{ClockId, Fd, Flags, UserPtr};
use crate::errno::{Errno, Result};
use crate::fs::fd_table;
use crate::fs::file::OpenFlags;
use crate::ipc::timerfd::TimerFd;
use crate::task::timers::clock::Clock;
use crate::time::TimerSpec;

const TFD_TIMER_ABSTIME: u32 = 1;
const TFD_TIMER_CANCEL_ON_SET: u32 = 2;

/// timerfd_create(2).
pub fn timerfd_create(clock: ClockId, Flags(flags): Flags) -> Result<i32> {
    let flags = OpenFlags::from_bits_retain(flags);
    if !(OpenFlags::CLOEXEC | OpenFlags::NONBLOCK).contains(flags) {
        return Err(Errno::EINVAL);
    }
    let clock = match clock {
        ClockId::REALTIME | ClockId::MONOTONIC | ClockId::BOOTTIME => Clock::of(clock)?,
        // These need CAP_WAKE_ALARM.
        ClockId::REALTIME_ALARM | ClockId::BOOTTIME_ALARM => return Err(Errno::EPERM),
        _ => return Err(Errno::EINVAL),
    };
    fd_table::install_new(Arc::new(TimerFd::new(clock)), flags)
}

/// timerfd_settime(2).
pub fn timerfd_settime(
    fd: Fd,
    Flags(flags): Flags,
    new: UserPtr<TimerSpec>,
    old_to: UserPtr<TimerSpec>,
) -> Result<()> {
    if flags & !(TFD_TIMER_ABSTIME | TFD_TIMER_CANCEL_ON_SET) != 0 {
        return Err(Errno::EINVAL);
    }
    let new = new.read()?;
    let (value, interval) = (new.value.to_ns()?, new.interval.to_ns()?);
    let open = fd.file()?;
    let timer = open.downcast::<TimerFd>().ok_or(Errno::EINVAL)?;
    let old = timer.get();
    let has = |flag| flags & flag != 0;
    timer.set(value, interval, has(TFD_TIMER_ABSTIME), has(TFD_TIMER_CANCEL_ON_SET))?;
    old_to.write_if_some(&old)
}

/// timerfd_gettime(2).
pub fn timerfd_gettime(fd: Fd, to: UserPtr<TimerSpec>) -> Result<()> {
    let open = fd.file()?;
    to.write(&open.downcast::<TimerFd>().ok_or(Errno::EINVAL)?.get())
}
