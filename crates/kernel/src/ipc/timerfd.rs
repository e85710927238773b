//! timerfd_create(2): timers that are read.
//!
//! As in Linux' `fs/timerfd.c`, a periodic timer that has expired is not set
//! again before it is read: what happened in between is computed then.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::{Arc, Weak};

use crate::args::ClockId;
use crate::errno::{Errno, Result};
use crate::fs::file::{Events, File};
use crate::io::Sink;
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::scheduler;
use crate::task::timers::clock::Clock;
use crate::task::wait::WaitQueue;
use crate::time::timer::{self, TimerCallback, TimerId};
use crate::time::{Instant, TimerSpec, Timespec};

/// What a timer does next; all times in nanoseconds of its clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Schedule {
    /// Next expiry; 0 if disarmed.
    next: u64,
    interval: u64,
    /// Expiries that were not read.
    ticks: u64,
    /// It has expired and is not set again yet.
    expired: bool,
}

impl Schedule {
    fn expire(&mut self) {
        self.ticks += 1;
        self.expired = true;
    }

    /// Counts what happened since the expiry, up to `now`. Returns the next
    /// expiry if there is one to be set.
    fn catch_up(&mut self, now: u64) -> Option<u64> {
        if !self.expired || self.interval == 0 {
            return None;
        }
        let periods = now.saturating_sub(self.next) / self.interval + 1;
        self.ticks += periods - 1;
        self.next = self.next.saturating_add(periods.saturating_mul(self.interval));
        self.expired = false;
        Some(self.next)
    }

    fn left(&self, now: u64) -> u64 {
        if self.next == 0 || self.expired { 0 } else { self.next.saturating_sub(now).max(1) }
    }
}

struct Shared {
    /// The clock by which the timer counts.
    clock: KernelCell<Clock>,
    schedule: KernelCell<Schedule>,
    timer: KernelCell<Option<TimerId>>,
    /// If a jump of the clock cancels the timer: which offset the clocks had when it was set.
    cancels: KernelCell<Option<u64>>,
    queue: WaitQueue,
}

impl Shared {
    fn now_ns(&self) -> u64 {
        self.clock.borrow_mut().now_ns()
    }

    fn arm(self: &Arc<Self>, next: u64) {
        let deadline = self.clock.borrow_mut().look_at(next);
        let id = timer::add(deadline, Arc::new(Expiry(Arc::downgrade(self))));
        self.timer.set(Some(id));
        // Somebody else may wait for it.
        scheduler::watch_clock();
    }

    /// Whether the clock has jumped: at a thaw, the real time has passed and the monotonic not.
    fn is_cancelled(&self) -> bool {
        self.cancels.get().is_some_and(|offset| offset != kernel().clocks.offset())
    }
}

/// A timer behind a descriptor.
pub struct TimerFd {
    clock: Clock,
    shared: Arc<Shared>,
}

struct Expiry(Weak<Shared>);

impl TimerCallback for Expiry {
    fn fire(&self, _now: Instant) {
        let Some(shared) = self.0.upgrade() else { return };
        let next = shared.schedule.get().next;
        if shared.now_ns() < next {
            // There was a thaw.
            shared.arm(next);
        } else {
            shared.schedule.borrow_mut().expire();
        }
        shared.queue.wake_all(Events::IN);
    }

    fn goes_on_frozen(&self) -> bool {
        self.0.upgrade().is_some_and(|shared| shared.clock.borrow_mut().goes_on_frozen())
    }
}

impl TimerFd {
    /// A timer that counts a clock other than of CPU time.
    pub fn new(clock: Clock) -> Self {
        let shared = Shared {
            clock: KernelCell::new(clock.clone()),
            schedule: KernelCell::default(),
            timer: KernelCell::default(),
            cancels: KernelCell::default(),
            queue: WaitQueue::new(),
        };
        Self { clock, shared: Arc::new(shared) }
    }

    fn disarm(&self) {
        if let Some(id) = self.shared.timer.borrow_mut().take() {
            timer::cancel(id);
        }
    }

    fn catch_up(&self) {
        let next = self.shared.schedule.borrow_mut().catch_up(self.shared.now_ns());
        if let Some(next) = next {
            self.shared.arm(next);
        }
    }

    /// The time to the next expiry, and the period.
    pub fn get(&self) -> TimerSpec {
        self.catch_up();
        let schedule = self.shared.schedule.get();
        TimerSpec {
            interval: Timespec::from_ns(schedule.interval),
            value: Timespec::from_ns(schedule.left(self.shared.now_ns())),
        }
    }

    /// Sets the timer: times in nanoseconds, `value_ns` of the clock if `absolute`; 0 disarms.
    /// `ECANCELED` if `cancels`, and the clock has jumped since it was set so the last time; it
    /// is set nevertheless.
    pub fn set(&self, value_ns: u64, interval: u64, absolute: bool, cancels: bool) -> Result<()> {
        self.disarm();
        let shared = &self.shared;
        *shared.clock.borrow_mut() = self.clock.of_timer(absolute);
        let next = match value_ns {
            0 => 0,
            value if absolute => value,
            value => shared.now_ns().saturating_add(value),
        };
        let cancels = cancels && absolute && matches!(self.clock, Clock::Realtime);
        let was_cancelled = cancels && next != 0 && shared.is_cancelled();
        shared.cancels.set(cancels.then(|| kernel().clocks.offset()));
        *shared.schedule.borrow_mut() = Schedule { next, interval, ticks: 0, expired: false };
        if next != 0 {
            shared.arm(next);
        }
        if was_cancelled { Err(Errno::ECANCELED) } else { Ok(()) }
    }
}

impl File for TimerFd {
    fn read(&self, sink: &mut Sink<'_>, _offset: u64) -> Result<usize> {
        if sink.remaining() < 8 {
            return Err(Errno::EINVAL);
        }
        if self.shared.is_cancelled() {
            self.shared.cancels.set(Some(kernel().clocks.offset()));
            let mut schedule = self.shared.schedule.borrow_mut();
            (schedule.ticks, schedule.expired) = (0, false);
            return Err(Errno::ECANCELED);
        }
        self.catch_up();
        let ticks = core::mem::take(&mut self.shared.schedule.borrow_mut().ticks);
        if ticks == 0 {
            return Err(Errno::EAGAIN);
        }
        if sink.put(&ticks.to_ne_bytes())? < 8 { Err(Errno::EFAULT) } else { Ok(8) }
    }

    fn poll(&self) -> Events {
        let is_ready = self.shared.schedule.get().ticks > 0 || self.shared.is_cancelled();
        if is_ready { Events::IN } else { Events::empty() }
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(&self.shared.queue)
    }

    fn details(&self) -> String {
        let TimerSpec { interval, value } = self.get();
        let clock = match self.clock {
            Clock::Realtime => ClockId::REALTIME,
            Clock::Boottime => ClockId::BOOTTIME,
            _ => ClockId::MONOTONIC,
        };
        format!(
            "clockid: {}\nticks: {}\nsettime flags: 00\nit_value: ({}, {})\nit_interval: ({}, {})\n",
            clock.0,
            self.shared.schedule.get().ticks,
            value.seconds,
            value.nanoseconds,
            interval.seconds,
            interval.nanoseconds
        )
    }

    fn description(&self) -> String {
        "anon_inode:[timerfd]".to_string()
    }
}

impl Drop for TimerFd {
    fn drop(&mut self) {
        self.disarm();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missed_periods_are_counted_when_read() {
        let mut schedule = Schedule { next: 100, interval: 10, ticks: 0, expired: false };
        assert_eq!(schedule.catch_up(95), None);
        assert_eq!(schedule.left(95), 5);
        schedule.expire();
        assert_eq!(schedule.catch_up(104), Some(110));
        assert_eq!(schedule.ticks, 1);
        schedule.expire();
        assert_eq!(schedule.catch_up(139), Some(140));
        assert_eq!(schedule.ticks, 4);
        assert_eq!(schedule.left(139), 1);
    }

    #[test]
    fn a_single_shot_is_over_after_it_expired() {
        let mut schedule = Schedule { next: 100, interval: 0, ticks: 0, expired: false };
        schedule.expire();
        assert_eq!(schedule.catch_up(1000), None);
        assert_eq!((schedule.ticks, schedule.left(1000)), (1, 0));
    }
}
