//! POSIX timers (timer_create(2)).
//!
//! As in Linux, a timer has at most one signal pending. A periodic one is not
//! set again before that signal is taken: how many periods have passed is
//! computed then (timer_getoverrun(2)).

use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};

use super::clock::Clock;
use crate::errno::{Errno, Result};
use crate::sync::KernelCell;
use crate::task::process::RLIMIT_SIGPENDING;
use crate::task::signal::{SI_TIMER, Signal, SignalInfo, queue_to_process, queue_to_thread};
use crate::task::{Process, Thread};
use crate::time::timer::{self, TimerCallback, TimerId};
use crate::time::{Instant, TimerSpec, Timespec};

/// The timers of a process.
#[derive(Default)]
pub struct PosixTimers {
    timers: KernelCell<Table>,
}

#[derive(Default)]
struct Table {
    next_id: i32,
    by_id: BTreeMap<i32, Arc<PosixTimer>>,
}

impl Table {
    /// An id that no timer has; `EAGAIN` if there are as many timers as the limit allows.
    fn free_id(&self, limit: u64) -> Result<i32> {
        if self.by_id.len() as u64 >= limit {
            return Err(Errno::EAGAIN);
        }
        let mut id = self.next_id;
        while self.by_id.contains_key(&id) {
            id = id.checked_add(1).unwrap_or(0);
        }
        Ok(id)
    }
}

/// What happens at an expiry (sigevent(3type)).
pub enum Notification {
    /// `SIGEV_NONE`.
    Nothing,
    /// `SIGEV_SIGNAL`.
    Process,
    /// `SIGEV_THREAD_ID`.
    Thread(Weak<Thread>),
}

/// A timer as timer_create(2) asks for it.
pub struct Request {
    /// Its clock.
    pub clock: Clock,
    /// What an expiry does.
    pub notification: Notification,
    /// The signal of an expiry, unless it does nothing.
    pub signal: Signal,
    /// `si_value` of the signal; the timer's id if there is none.
    pub value: Option<u64>,
}

/// The least period of a timer that is set again by the kernel alone.
const TICK_NS: u64 = 1_000_000;

/// A timer of a process.
pub struct PosixTimer {
    id: i32,
    process: Weak<Process>,
    clock: Clock,
    /// The clock by which it counts.
    counts: KernelCell<Clock>,
    notification: Notification,
    signal: Signal,
    value: u64,
    schedule: KernelCell<Schedule>,
}

/// Times are in nanoseconds of the clock by which the timer counts.
#[derive(Clone, Copy, Default)]
struct Schedule {
    /// Next expiry, or the last one while its signal is pending; 0 if disarmed.
    next: u64,
    interval: u64,
    alarm: Option<TimerId>,
    /// Names the pending signal; a later setting makes it a stranger.
    sequence: u64,
    is_signal_pending: bool,
    last_overrun: i32,
}

impl Schedule {
    /// Moves `next` past `now`; the number of expiries skipped on the way.
    fn catch_up(&mut self, now: u64) -> u64 {
        if self.interval == 0 || self.next == 0 || self.next > now {
            return 0;
        }
        let periods = (now - self.next) / self.interval + 1;
        self.next = self.next.saturating_add(periods.saturating_mul(self.interval));
        periods
    }
}

impl TimerCallback for PosixTimer {
    fn fire(&self, _now: Instant) {
        let Some(process) = self.process.upgrade() else { return };
        let Ok(this) = process.posix_timers.find(self.id) else { return };
        let schedule = this.schedule.get();
        if this.now_ns() < schedule.next {
            // CPU time passes slower than time; and a thaw has all look that count real time.
            this.arm();
        } else {
            this.expire(&process);
        }
    }

    fn goes_on_frozen(&self) -> bool {
        self.counts.borrow_mut().goes_on_frozen()
    }
}

impl PosixTimer {
    fn now_ns(&self) -> u64 {
        self.counts.borrow_mut().now_ns()
    }

    fn arm(self: &Arc<Self>) {
        let next = self.schedule.get().next;
        let deadline = self.counts.borrow_mut().look_at(next);
        let id = timer::add(deadline, self.clone());
        self.schedule.borrow_mut().alarm = Some(id);
        crate::task::scheduler::watch_clock();
    }

    fn disarm(&self) {
        let alarm = self.schedule.borrow_mut().alarm.take();
        if let Some(alarm) = alarm {
            timer::cancel(alarm);
        }
    }

    fn expire(self: &Arc<Self>, process: &Process) {
        let sequence = {
            let mut schedule = self.schedule.borrow_mut();
            schedule.alarm = None;
            schedule.sequence += 1;
            schedule.is_signal_pending = true;
            schedule.sequence
        };
        let mut info = SignalInfo::new(self.signal, SI_TIMER);
        info.payload[0] = self.id as u32 as u64;
        info.payload[1] = self.value;
        info.payload[2] = sequence;
        let queued = match &self.notification {
            Notification::Nothing => false,
            Notification::Process => queue_to_process(process, info),
            Notification::Thread(thread) => {
                thread.upgrade().is_some_and(|thread| queue_to_thread(&thread, info))
            }
        };
        if !queued {
            // Nobody will take the signal and set the timer again. A short period must not keep the kernel
            // busy with that (`posix_timer_fn` in Linux' kernel/time/posix-timers.c).
            let is_short = self.schedule.get().interval < TICK_NS;
            self.go_on(self.now_ns() + if is_short { TICK_NS } else { 0 });
        }
    }

    /// Sets a periodic timer again, to expire after `now`; the expiries that were missed.
    fn go_on(self: &Arc<Self>, now: u64) -> u64 {
        let (periods, again) = {
            let mut schedule = self.schedule.borrow_mut();
            schedule.is_signal_pending = false;
            let periods = schedule.catch_up(now);
            if periods == 0 {
                schedule.next = 0;
            }
            (periods, periods > 0)
        };
        if again && !matches!(self.notification, Notification::Nothing) {
            self.arm();
        }
        periods.saturating_sub(1)
    }

    /// Expiries that were missed until the last signal was taken (timer_getoverrun(2)).
    pub fn overrun(&self) -> i32 {
        self.schedule.get().last_overrun
    }

    /// The time to the next expiry, and the period.
    pub fn get(&self) -> TimerSpec {
        let now = self.now_ns();
        let mut schedule = self.schedule.get();
        let has_no_signal = matches!(self.notification, Notification::Nothing);
        if has_no_signal || schedule.is_signal_pending {
            schedule.catch_up(now);
        }
        let left = match schedule.next {
            0 => 0,
            next if next <= now && (has_no_signal || schedule.is_signal_pending) => 0,
            next => next.saturating_sub(now).max(1),
        };
        TimerSpec { interval: Timespec::from_ns(schedule.interval), value: Timespec::from_ns(left) }
    }

    /// Sets the timer: times in nanoseconds, `value_ns` of the clock if `is_absolute`; 0
    /// disarms.
    pub fn set(self: &Arc<Self>, value_ns: u64, interval: u64, is_absolute: bool) {
        self.disarm();
        *self.counts.borrow_mut() = self.clock.of_timer(is_absolute);
        let next = match value_ns {
            0 => 0,
            value if is_absolute => value,
            value => self.now_ns().saturating_add(value),
        };
        {
            let mut schedule = self.schedule.borrow_mut();
            let sequence = schedule.sequence + 1;
            *schedule = Schedule { next, interval, sequence, ..Schedule::default() };
        }
        if next != 0 && !matches!(self.notification, Notification::Nothing) {
            self.arm();
        }
    }
}

impl PosixTimers {
    /// The timer with an id; `EINVAL`.
    pub fn find(&self, id: i32) -> Result<Arc<PosixTimer>> {
        self.timers.borrow_mut().by_id.get(&id).cloned().ok_or(Errno::EINVAL)
    }

    /// Makes a timer of `process`, whose timers these are. `tell` hears its id before it is
    /// there, and there will be none if that fails. `EAGAIN` at the limit.
    pub fn create(
        &self,
        process: &Arc<Process>,
        request: Request,
        tell: impl FnOnce(i32) -> Result<()>,
    ) -> Result<()> {
        let limit = process.limits.borrow_mut()[RLIMIT_SIGPENDING].current;
        let id = self.timers.borrow_mut().free_id(limit)?;
        tell(id)?;
        let timer = PosixTimer {
            id,
            process: Arc::downgrade(process),
            counts: KernelCell::new(request.clock.clone()),
            clock: request.clock,
            notification: request.notification,
            signal: request.signal,
            value: request.value.unwrap_or(id as u64),
            schedule: KernelCell::default(),
        };
        let mut table = self.timers.borrow_mut();
        table.next_id = id.checked_add(1).unwrap_or(0);
        table.by_id.insert(id, Arc::new(timer));
        Ok(())
    }

    /// Removes a timer; `EINVAL`.
    pub fn remove(&self, id: i32) -> Result<()> {
        let removed = self.timers.borrow_mut().by_id.remove(&id);
        removed.ok_or(Errno::EINVAL)?.disarm();
        Ok(())
    }

    /// Removes all timers: the process ends or executes a program.
    pub fn remove_all(&self) {
        let removed = core::mem::take(&mut self.timers.borrow_mut().by_id);
        for timer in removed.values() {
            timer.disarm();
        }
    }
}

/// Completes the information of a timer's signal that a thread has just taken,
/// and sets a periodic timer again. `false` if the timer has been deleted or set
/// since, which takes its signal back (as Linux does since 6.13).
pub fn signal_taken(thread: &Thread, info: &mut SignalInfo) -> bool {
    let sequence = core::mem::take(&mut info.payload[2]);
    if sequence == 0 {
        // Made by sigqueue(3).
        return true;
    }
    let timer = thread.process.posix_timers.find(info.payload[0] as u32 as i32);
    let Ok(timer) = timer else { return false };
    let schedule = timer.schedule.get();
    if schedule.sequence != sequence || !schedule.is_signal_pending {
        return false;
    }
    let overrun = i32::try_from(timer.go_on(timer.now_ns())).unwrap_or(i32::MAX);
    timer.schedule.borrow_mut().last_overrun = overrun;
    info.payload[0] |= (overrun as u64) << 32;
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_periods_are_counted() {
        let mut schedule = Schedule { next: 100, interval: 10, ..Schedule::default() };
        assert_eq!(schedule.catch_up(99), 0);
        assert_eq!(schedule.catch_up(100), 1);
        assert_eq!(schedule.next, 110);
        assert_eq!(schedule.catch_up(139), 3);
        assert_eq!(schedule.next, 140);
        let mut once = Schedule { next: 100, ..Schedule::default() };
        assert_eq!(once.catch_up(1000), 0);
    }
}
