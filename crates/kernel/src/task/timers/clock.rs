//! The clocks that can be read, waited on and timed by (clock_gettime(2)).

use alloc::sync::{Arc, Weak};

use crate::args::ClockId;
use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::task::ids::{Pid, Tid};
use crate::task::thread::current_arc;
use crate::task::{Process, Thread, current};
use crate::time::Instant;
use crate::time::clock::{boottime_ns, realtime_ns};

/// Timers on CPU time look at their clock no earlier than this after the last
/// look, in nanoseconds: as often as a kernel with 250 ticks a second.
pub const MIN_WAIT_NS: u64 = 4_000_000;

#[allow(missing_docs)]
impl ClockId {
    pub const REALTIME: Self = Self(0);
    pub const MONOTONIC: Self = Self(1);
    pub const PROCESS_CPUTIME: Self = Self(2);
    pub const THREAD_CPUTIME: Self = Self(3);
    pub const MONOTONIC_RAW: Self = Self(4);
    pub const REALTIME_COARSE: Self = Self(5);
    pub const MONOTONIC_COARSE: Self = Self(6);
    pub const BOOTTIME: Self = Self(7);
    pub const REALTIME_ALARM: Self = Self(8);
    pub const BOOTTIME_ALARM: Self = Self(9);
    pub const TAI: Self = Self(11);
}

/// What a clock counts.
#[derive(Clone)]
pub enum Clock {
    /// Time since the epoch.
    Realtime,
    /// Time since boot in which the sandbox was not frozen.
    Monotonic,
    /// Time since boot.
    Boottime,
    /// CPU time of all threads of a process.
    Process(Weak<Process>),
    /// CPU time of one thread.
    Thread(Weak<Thread>),
}

impl Clock {
    /// The clock of an id; `EINVAL` if there is none.
    pub fn of(id: ClockId) -> Result<Self> {
        match id {
            ClockId::REALTIME | ClockId::REALTIME_COARSE => Ok(Self::Realtime),
            ClockId::REALTIME_ALARM | ClockId::TAI => Ok(Self::Realtime),
            ClockId::MONOTONIC | ClockId::MONOTONIC_RAW => Ok(Self::Monotonic),
            ClockId::MONOTONIC_COARSE => Ok(Self::Monotonic),
            ClockId::BOOTTIME | ClockId::BOOTTIME_ALARM => Ok(Self::Boottime),
            ClockId::PROCESS_CPUTIME => Ok(Self::Process(Arc::downgrade(&current().process))),
            ClockId::THREAD_CPUTIME => Ok(Self::Thread(Arc::downgrade(&current_arc()))),
            ClockId(number) => Self::of_cpu_time(number),
        }
    }

    /// What clock_getcpuclockid(3) and pthread_getcpuclockid(3) make.
    fn of_cpu_time(number: i32) -> Result<Self> {
        // Bits 0 and 1 say which time, 3 being a descriptor's clock; bit 2 says
        // that it is a thread's; the id stands above, inverted.
        const OF_DESCRIPTOR: i32 = 3;
        const OF_THREAD: i32 = 4;
        if number >= 0 || number & 3 == OF_DESCRIPTOR {
            return Err(Errno::EINVAL);
        }
        let id = !(number >> 3) as u32;
        let own = &current().process;
        if number & OF_THREAD != 0 {
            let thread = if id == 0 {
                Some(current_arc())
            } else {
                kernel().tasks.thread(Tid::from_caller(id))
            };
            let thread = thread.filter(|thread| Arc::ptr_eq(&thread.process, own));
            return Ok(Self::Thread(Arc::downgrade(&thread.ok_or(Errno::EINVAL)?)));
        }
        let process =
            if id == 0 { Some(own.clone()) } else { kernel().tasks.process(Pid::from_caller(id)) };
        Ok(Self::Process(Arc::downgrade(&process.ok_or(Errno::EINVAL)?)))
    }

    /// What the clock reads, in nanoseconds; that of CPU time 0 once its owner is gone.
    pub fn now_ns(&self) -> u64 {
        match self {
            Self::Realtime => realtime_ns(),
            Self::Monotonic => Instant::now().0,
            Self::Boottime => boottime_ns(),
            Self::Process(process) => process.upgrade().map_or(0, |process| process.cpu_ns()),
            Self::Thread(thread) => thread.upgrade().map_or(0, |thread| thread.cpu_ns()),
        }
    }

    /// The clock by which a timer of this clock counts. A relative time of the real-time clock is one
    /// of the monotonic clock, which does not jump (`__hrtimer_setup` in Linux'
    /// `kernel/time/hrtimer.c`).
    pub fn of_timer(&self, is_absolute: bool) -> Self {
        match self {
            Self::Realtime if !is_absolute => Self::Monotonic,
            clock => clock.clone(),
        }
    }

    /// Whether it goes on while the sandbox is frozen.
    pub fn goes_on_frozen(&self) -> bool {
        matches!(self, Self::Realtime | Self::Boottime)
    }

    /// When to look whether this clock reads `ns`.
    pub fn look_at(&self, ns: u64) -> Instant {
        let ahead = ns.saturating_sub(self.now_ns());
        match self {
            Self::Monotonic => Instant(ns),
            Self::Realtime | Self::Boottime => Instant::after_ns(ahead),
            Self::Process(_) | Self::Thread(_) => Instant::after_ns(ahead.max(MIN_WAIT_NS)),
        }
    }
}
