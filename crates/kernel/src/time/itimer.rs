//! Interval timers (setitimer(2)).

use alloc::sync::{Arc, Weak};

use super::Instant;
use super::timer::{self, TimerCallback, TimerId};
use crate::errno::{Errno, Result};
use crate::sync::Lock;
use crate::task::Process;
use crate::task::signal::{SI_KERNEL, SIGALRM, SIGPROF, SIGVTALRM, SignalInfo, send_to_process};

/// `struct itimerval`: seconds and microseconds.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct TimerValue {
    /// Period, 0 for a single shot.
    pub interval: [i64; 2],
    /// Time to the next expiry, 0 if disarmed.
    pub value: [i64; 2],
}

/// Which timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// `ITIMER_REAL`: wall-clock time, `SIGALRM`.
    Real = 0,
    /// `ITIMER_VIRTUAL`: CPU time of the program, `SIGVTALRM`.
    Virtual = 1,
    /// `ITIMER_PROF`: CPU time, `SIGPROF`.
    Profiling = 2,
}

impl Which {
    /// From the ABI's number.
    pub fn from_number(number: u32) -> Result<Self> {
        match number {
            0 => Ok(Which::Real),
            1 => Ok(Which::Virtual),
            2 => Ok(Which::Profiling),
            _ => Err(Errno::EINVAL),
        }
    }
}

#[derive(Clone, Copy)]
struct Armed {
    id: TimerId,
    deadline: Instant,
    interval_ns: u64,
}

/// The three timers of a process. The two that count CPU time run on
/// wall-clock time, which is ahead of it: they may fire early.
#[derive(Default)]
pub struct IntervalTimers {
    armed: [Lock<Option<Armed>>; 3],
}

struct Expiry {
    process: Weak<Process>,
    which: Which,
}

impl TimerCallback for Expiry {
    fn fire(&self, now: Instant) {
        let Some(process) = self.process.upgrade() else { return };
        let slot = &process.timers.armed[self.which as usize];
        let armed = slot.lock().take();
        if let Some(armed) = armed
            && armed.interval_ns > 0
        {
            // Periods do not drift, and missed ones are not made up for.
            let missed = now.0.saturating_sub(armed.deadline.0) / armed.interval_ns;
            let next = Instant(armed.deadline.0 + (missed + 1) * armed.interval_ns);
            arm(&process, self.which, next, armed.interval_ns);
        }
        let signal = match self.which {
            Which::Real => SIGALRM,
            Which::Virtual => SIGVTALRM,
            Which::Profiling => SIGPROF,
        };
        send_to_process(&process, SignalInfo::new(signal, SI_KERNEL));
    }
}

fn arm(process: &Arc<Process>, which: Which, deadline: Instant, interval_ns: u64) {
    let callback = Arc::new(Expiry { process: Arc::downgrade(process), which });
    let id = timer::add(deadline, callback);
    crate::task::sched::watch_clock();
    process.timers.armed[which as usize].set(Some(Armed { id, deadline, interval_ns }));
}

impl IntervalTimers {
    /// Disarms all timers: the process ends.
    pub fn disarm_all(&self) {
        for slot in &self.armed {
            if let Some(armed) = slot.lock().take() {
                timer::cancel(armed.id);
            }
        }
    }

    /// The state of a timer.
    pub fn get(&self, which: Which) -> TimerValue {
        match self.armed[which as usize].get() {
            None => TimerValue { interval: [0, 0], value: [0, 0] },
            Some(armed) => {
                let left = armed.deadline.0.saturating_sub(Instant::now().0).max(1000);
                TimerValue { interval: to_timeval(armed.interval_ns), value: to_timeval(left) }
            }
        }
    }
}

/// Arms or disarms a timer and returns what it was.
pub fn set(process: &Arc<Process>, which: Which, value: TimerValue) -> Result<TimerValue> {
    let (next_ns, interval_ns) = (from_timeval(value.value)?, from_timeval(value.interval)?);
    let old = process.timers.get(which);
    if let Some(armed) = process.timers.armed[which as usize].lock().take() {
        timer::cancel(armed.id);
    }
    if next_ns > 0 {
        arm(process, which, Instant::after_ns(next_ns), interval_ns);
    }
    Ok(old)
}

fn to_timeval(ns: u64) -> [i64; 2] {
    [(ns / 1_000_000_000) as i64, (ns % 1_000_000_000 / 1000) as i64]
}

fn from_timeval(value: [i64; 2]) -> Result<u64> {
    if value[0] < 0 || !(0..1_000_000).contains(&value[1]) {
        return Err(Errno::EINVAL);
    }
    Ok((value[0] as u64)
        .saturating_mul(1_000_000_000)
        .saturating_add(value[1] as u64 * 1000)
        .min(u64::MAX / 4))
}
