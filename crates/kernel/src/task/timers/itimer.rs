//! Interval timers (setitimer(2)).

use alloc::sync::{Arc, Weak};

use bytemuck::Zeroable;

use super::clock::MIN_WAIT_NS;
use crate::errno::{Errno, Result};
use crate::sync::KernelCell;
use crate::task::Process;
use crate::task::signal::{
    SI_KERNEL, SIGALRM, SIGPROF, SIGVTALRM, Signal, SignalInfo, send_to_process,
};
use crate::time::timer::{self, TimerCallback, TimerId};
use crate::time::{Instant, TimerValue, Timeval};

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

    fn signal(self) -> Signal {
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
            None => TimerValue::zeroed(),
            Some(armed) => TimerValue {
                interval: Timeval::from_ns(armed.interval_ns),
                value: Timeval::from_ns(armed.deadline_ns.saturating_sub(now_ns).max(1000)),
            },
        }
    }
}

/// The state of a timer.
pub fn get(process: &Process, which: Which) -> TimerValue {
    process.timers.get(which, which.now_ns(process))
}

/// Arms or disarms a timer and returns what it was.
pub fn set(process: &Arc<Process>, which: Which, value: TimerValue) -> Result<TimerValue> {
    let (next_ns, interval_ns) = (value.value.normalized_ns()?, value.interval.normalized_ns()?);
    let old = get(process, which);
    if let Some(armed) = process.timers.armed[which as usize].borrow_mut().take() {
        timer::cancel(armed.id);
    }
    if next_ns > 0 {
        arm(process, which, which.now_ns(process).saturating_add(next_ns), interval_ns);
    }
    Ok(old)
}
