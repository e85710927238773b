//! Interval timers (setitimer(2)).

use alloc::sync::{Arc, Weak};

use super::cpu_clock::MIN_WAIT_NS;
use crate::errno::{Errno, Result};
use crate::sync::KernelCell;
use crate::task::Process;
use crate::task::signal::{SI_KERNEL, SIGALRM, SIGPROF, SIGVTALRM, SignalInfo, send_to_process};
use crate::time::Instant;
use crate::time::timer::{self, TimerCallback, TimerId};

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

impl Which {
    /// What the timer counts, in nanoseconds: the monotonic clock, or CPU time.
    /// That is not split into the program's and the kernel's.
    fn now_ns(self, process: &Process) -> u64 {
        match self {
            Which::Real => Instant::now().0,
            Which::Virtual | Which::Profiling => process.cpu_ns(),
        }
    }

    /// When to look whether `ns` more have been counted.
    fn look_after(self, ns: u64) -> Instant {
        match self {
            Which::Real => Instant::after_ns(ns),
            Which::Virtual | Which::Profiling => Instant::after_ns(ns.max(MIN_WAIT_NS)),
        }
    }

    fn signal(self) -> u32 {
        match self {
            Which::Real => SIGALRM,
            Which::Virtual => SIGVTALRM,
            Which::Profiling => SIGPROF,
        }
    }
}

#[derive(Clone, Copy)]
struct Armed {
    id: TimerId,
    /// Next expiry, in nanoseconds of what the timer counts.
    deadline_ns: u64,
    interval_ns: u64,
}

/// The three timers of a process.
#[derive(Default)]
pub struct IntervalTimers {
    armed: [KernelCell<Option<Armed>>; 3],
}

struct Expiry {
    process: Weak<Process>,
    which: Which,
}

impl TimerCallback for Expiry {
    fn fire(&self, _now: Instant) {
        let Some(process) = self.process.upgrade() else { return };
        let armed = process.timers.armed[self.which as usize].borrow_mut().take();
        let Some(armed) = armed else { return };
        let now = self.which.now_ns(&process);
        if now < armed.deadline_ns {
            // CPU time passes slower than time.
            arm(&process, self.which, armed.deadline_ns, armed.interval_ns);
            return;
        }
        // Periods do not drift, and missed ones are not made up for.
        let missed = (now - armed.deadline_ns).checked_div(armed.interval_ns);
        if let Some(missed) = missed {
            let next = armed.deadline_ns + (missed + 1) * armed.interval_ns;
            arm(&process, self.which, next, armed.interval_ns);
        }
        send_to_process(&process, SignalInfo::new(self.which.signal(), SI_KERNEL));
    }
}

fn arm(process: &Arc<Process>, which: Which, deadline_ns: u64, interval_ns: u64) {
    let ahead = deadline_ns.saturating_sub(which.now_ns(process));
    let callback = Arc::new(Expiry { process: Arc::downgrade(process), which });
    let id = timer::add(which.look_after(ahead), callback);
    crate::task::scheduler::watch_clock();
    process.timers.armed[which as usize].set(Some(Armed { id, deadline_ns, interval_ns }));
}

impl IntervalTimers {
    /// Disarms all timers: the process ends.
    pub fn disarm_all(&self) {
        for slot in &self.armed {
            if let Some(armed) = slot.borrow_mut().take() {
                timer::cancel(armed.id);
            }
        }
    }

    fn get(&self, which: Which, now_ns: u64) -> TimerValue {
        match self.armed[which as usize].get() {
            None => TimerValue { interval: [0, 0], value: [0, 0] },
            Some(armed) => {
                let left = armed.deadline_ns.saturating_sub(now_ns).max(1000);
                TimerValue { interval: to_timeval(armed.interval_ns), value: to_timeval(left) }
            }
        }
    }
}

/// The state of a timer.
pub fn get(process: &Process, which: Which) -> TimerValue {
    process.timers.get(which, which.now_ns(process))
}

/// Arms or disarms a timer and returns what it was.
pub fn set(process: &Arc<Process>, which: Which, value: TimerValue) -> Result<TimerValue> {
    let (next_ns, interval_ns) = (from_timeval(value.value)?, from_timeval(value.interval)?);
    let old = get(process, which);
    if let Some(armed) = process.timers.armed[which as usize].borrow_mut().take() {
        timer::cancel(armed.id);
    }
    if next_ns > 0 {
        arm(process, which, which.now_ns(process).saturating_add(next_ns), interval_ns);
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
