//! System calls on POSIX timers (timer_create(2)).

use alloc::sync::Arc;

use crate::args::{ClockId, Flags, SignalNumber, UserPtr};
use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::task::current;
use crate::task::ids::Tid;
use crate::task::signal::SIGALRM;
use crate::task::timers::clock::Clock;
use crate::task::timers::posix::{Notification, PosixTimer, Request};
use crate::time::TimerSpec;

/// `struct sigevent`, as far as the kernel reads it.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct SignalEvent {
    value: u64,
    signal: SignalNumber,
    notify: i32,
    tid: i32,
    pad: i32,
}

impl SignalEvent {
    /// What an expiry does; `EINVAL`.
    fn notification(&self) -> Result<Notification> {
        const SIGEV_SIGNAL: i32 = 0;
        const SIGEV_NONE: i32 = 1;
        const SIGEV_THREAD: i32 = 2;
        const SIGEV_THREAD_ID: i32 = 4;
        match self.notify {
            SIGEV_NONE => Ok(Notification::Nothing),
            // The C library makes a thread of the signal.
            SIGEV_SIGNAL | SIGEV_THREAD => Ok(Notification::Process),
            SIGEV_THREAD_ID => {
                let thread = kernel().tasks.thread(Tid::from_caller(self.tid as u32));
                let own = thread.filter(|t| Arc::ptr_eq(&t.process, &current().process));
                Ok(Notification::Thread(Arc::downgrade(&own.ok_or(Errno::EINVAL)?)))
            }
            _ => Err(Errno::EINVAL),
        }
    }
}

fn find(id: i32) -> Result<Arc<PosixTimer>> {
    current().process.posix_timers.find(id)
}

/// timer_create(2).
pub fn timer_create(
    clock: ClockId,
    event: UserPtr<SignalEvent>,
    id_to: UserPtr<i32>,
) -> Result<()> {
    let clock = match clock {
        // No timers run on the raw and coarse clocks; those of the alarm clocks need a device
        // that can wake the machine.
        ClockId::MONOTONIC_RAW | ClockId::REALTIME_COARSE | ClockId::MONOTONIC_COARSE => {
            return Err(Errno::EOPNOTSUPP);
        }
        ClockId::REALTIME_ALARM | ClockId::BOOTTIME_ALARM => return Err(Errno::EOPNOTSUPP),
        clock => Clock::of(clock)?,
    };
    let event = event.read_if_some()?;
    let notification = event.map_or(Ok(Notification::Process), |event| event.notification())?;
    let signal = match event {
        Some(event) if !matches!(notification, Notification::Nothing) => event.signal.signal()?,
        _ => SIGALRM,
    };
    let value = event.map(|event| event.value);
    let request = Request { clock, notification, signal, value };
    let process = &current().process;
    process.posix_timers.create(process, request, |id| id_to.write(&id))
}

/// timer_settime(2).
pub fn timer_settime(
    id: i32,
    Flags(flags): Flags,
    new: UserPtr<TimerSpec>,
    old_to: UserPtr<TimerSpec>,
) -> Result<()> {
    const TIMER_ABSTIME: u32 = 1;
    let new = new.read_if_some()?.ok_or(Errno::EINVAL)?;
    let (value, interval) = (new.value.to_ns()?, new.interval.to_ns()?);
    let timer = find(id)?;
    let old = timer.get();
    timer.set(value, interval, flags & TIMER_ABSTIME != 0);
    old_to.write_if_some(&old)
}

/// timer_gettime(2).
pub fn timer_gettime(id: i32, to: UserPtr<TimerSpec>) -> Result<()> {
    to.write(&find(id)?.get())
}

/// timer_getoverrun(2).
pub fn timer_getoverrun(id: i32) -> Result<i32> {
    Ok(find(id)?.overrun())
}

/// timer_delete(2).
pub fn timer_delete(id: i32) -> Result<()> {
    current().process.posix_timers.remove(id)
}
