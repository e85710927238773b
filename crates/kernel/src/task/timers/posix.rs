//! POSIX timers (timer_create(2)).
//!
//! As in Linux, a timer has at most one signal pending. A periodic one is not
//! set again before that signal is taken: how many periods have passed is
//! computed then (timer_getoverrun(2)).

use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};

use super::cpu_clock::{CpuClock, MIN_WAIT_NS};
use crate::args::Flags;
use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::process::RLIMIT_SIGPENDING;
use crate::task::signal::{
    SI_TIMER, SIGALRM, SIGNAL_COUNT, SignalInfo, queue_to_process, queue_to_thread,
};
use crate::task::{Process, Thread, current};
use crate::time::timer::{self, TimerCallback, TimerId};
use crate::time::{Instant, Timespec, clock};

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

/// What a timer counts.
enum Clock {
    /// `CLOCK_REALTIME` and `CLOCK_TAI`.
    Realtime,
    Monotonic,
    Boottime,
    Cpu(CpuClock),
}

impl Clock {
    fn from_number(number: i32) -> Result<Self> {
        match number {
            0 | 11 => Ok(Self::Realtime),
            1 => Ok(Self::Monotonic),
            7 => Ok(Self::Boottime),
            // No timers run on the raw and coarse clocks; those of the alarm
            // clocks need a device that can wake the machine.
            4..=6 | 8 | 9 => Err(Errno::EOPNOTSUPP),
            number => CpuClock::from_number(number).map(Self::Cpu),
        }
    }

    fn now_ns(&self) -> u64 {
        match self {
            Self::Realtime => clock::realtime_ns(),
            Self::Monotonic => Instant::now().0,
            Self::Boottime => clock::boottime_ns(),
            Self::Cpu(cpu) => cpu.now_ns(),
        }
    }

    /// When to look whether this clock reads `ns`, on the monotonic one.
    fn look_at(&self, ns: u64) -> Instant {
        let ahead = ns.saturating_sub(self.now_ns());
        match self {
            Self::Monotonic => Instant(ns),
            Self::Cpu(_) => Instant::after_ns(ahead.max(MIN_WAIT_NS)),
            _ => Instant::after_ns(ahead),
        }
    }
}

/// What happens at an expiry (sigevent(3type)).
enum Notification {
    /// `SIGEV_NONE`.
    Nothing,
    /// `SIGEV_SIGNAL`.
    Process,
    /// `SIGEV_THREAD_ID`.
    Thread(Weak<Thread>),
}

struct PosixTimer {
    id: i32,
    process: Weak<Process>,
    clock: Clock,
    notification: Notification,
    signal: u32,
    value: u64,
    schedule: KernelCell<Schedule>,
}

/// Times are in nanoseconds of the timer's clock.
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

/// `struct itimerspec`.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct TimerSpec {
    interval: Timespec,
    value: Timespec,
}

/// `struct sigevent`, as far as the kernel reads it.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct SignalEvent {
    value: u64,
    signal: i32,
    notify: i32,
    tid: i32,
    pad: i32,
}

impl TimerCallback for PosixTimer {
    fn fire(&self, _now: Instant) {
        let Some(process) = self.process.upgrade() else { return };
        let Some(this) = process.posix_timers.find(self.id) else { return };
        let schedule = this.schedule.get();
        if this.clock.now_ns() < schedule.next {
            // CPU time passes slower than time.
            this.arm();
        } else {
            this.expire(&process);
        }
    }
}

impl PosixTimer {
    fn arm(self: &Arc<Self>) {
        let next = self.schedule.get().next;
        let id = timer::add(self.clock.look_at(next), self.clone());
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
            // Nobody will take the signal and set the timer again.
            self.go_on();
        }
    }

    /// Sets a periodic timer again; the expiries that were missed.
    fn go_on(self: &Arc<Self>) -> u64 {
        let now = self.clock.now_ns();
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

    fn get(&self) -> TimerSpec {
        let now = self.clock.now_ns();
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

    fn set(self: &Arc<Self>, value_ns: u64, interval: u64, is_absolute: bool) {
        self.disarm();
        let next = match value_ns {
            0 => 0,
            value if is_absolute => value,
            value => self.clock.now_ns().saturating_add(value),
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
    fn find(&self, id: i32) -> Option<Arc<PosixTimer>> {
        self.timers.borrow_mut().by_id.get(&id).cloned()
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
    let expired = timer.filter(|timer| {
        let schedule = timer.schedule.get();
        schedule.sequence == sequence && schedule.is_signal_pending
    });
    let Some(timer) = expired else { return false };
    let overrun = i32::try_from(timer.go_on()).unwrap_or(i32::MAX);
    timer.schedule.borrow_mut().last_overrun = overrun;
    info.payload[0] |= (overrun as u64) << 32;
    true
}

fn find(id: i32) -> Result<Arc<PosixTimer>> {
    current().process.posix_timers.find(id).ok_or(Errno::EINVAL)
}

/// timer_create(2).
pub fn timer_create(clock: i32, event: UserAddress, id_to: UserAddress) -> Result<u64> {
    const SIGEV_SIGNAL: i32 = 0;
    const SIGEV_NONE: i32 = 1;
    const SIGEV_THREAD: i32 = 2;
    const SIGEV_THREAD_ID: i32 = 4;
    let process = &current().process;
    let clock = Clock::from_number(clock)?;
    let event = match event {
        UserAddress::NULL => None,
        at => Some(at.read::<SignalEvent>()?),
    };
    let notification = match event.map_or(SIGEV_SIGNAL, |event| event.notify) {
        SIGEV_NONE => Notification::Nothing,
        // The C library makes a thread of the signal.
        SIGEV_SIGNAL | SIGEV_THREAD => Notification::Process,
        SIGEV_THREAD_ID => {
            let tid = event.map_or(0, |event| event.tid);
            let thread = kernel().tasks.thread(tid as u32).ok_or(Errno::EINVAL)?;
            if !Arc::ptr_eq(&thread.process, process) {
                return Err(Errno::EINVAL);
            }
            Notification::Thread(Arc::downgrade(&thread))
        }
        _ => return Err(Errno::EINVAL),
    };
    let signal = event.map_or(SIGALRM as i32, |event| event.signal);
    let has_signal = !matches!(notification, Notification::Nothing);
    if has_signal && !(1..=SIGNAL_COUNT as i32).contains(&signal) {
        return Err(Errno::EINVAL);
    }
    let limit = process.limits.borrow_mut()[RLIMIT_SIGPENDING].current;
    let id = {
        let table = process.posix_timers.timers.borrow_mut();
        if table.by_id.len() as u64 >= limit {
            return Err(Errno::EAGAIN);
        }
        let mut id = table.next_id;
        while table.by_id.contains_key(&id) {
            id = id.checked_add(1).unwrap_or(0);
        }
        id
    };
    id_to.write(&id)?;
    let timer = PosixTimer {
        id,
        process: Arc::downgrade(process),
        clock,
        notification,
        signal: signal as u32,
        value: event.map_or(id as u64, |event| event.value),
        schedule: KernelCell::default(),
    };
    let mut table = process.posix_timers.timers.borrow_mut();
    table.next_id = id.checked_add(1).unwrap_or(0);
    table.by_id.insert(id, Arc::new(timer));
    Ok(0)
}

/// timer_settime(2).
pub fn timer_settime(
    id: i32,
    Flags(flags): Flags,
    new: UserAddress,
    old_to: UserAddress,
) -> Result<u64> {
    const TIMER_ABSTIME: u32 = 1;
    if new.is_null() {
        return Err(Errno::EINVAL);
    }
    let new: TimerSpec = new.read()?;
    let (value, interval) = (new.value.to_ns()?, new.interval.to_ns()?);
    let timer = find(id)?;
    let old = timer.get();
    timer.set(value, interval, flags & TIMER_ABSTIME != 0);
    old_to.write_if_some(&old)?;
    Ok(0)
}

/// timer_gettime(2).
pub fn timer_gettime(id: i32, to: UserAddress) -> Result<u64> {
    let timer = find(id)?;
    to.write(&timer.get())?;
    Ok(0)
}

/// timer_getoverrun(2).
pub fn timer_getoverrun(id: i32) -> Result<u64> {
    Ok(find(id)?.schedule.get().last_overrun as u64)
}

/// timer_delete(2).
pub fn timer_delete(id: i32) -> Result<u64> {
    let removed = current().process.posix_timers.timers.borrow_mut().by_id.remove(&id);
    removed.ok_or(Errno::EINVAL)?.disarm();
    Ok(0)
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
