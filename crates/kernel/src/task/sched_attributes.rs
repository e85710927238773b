//! What a thread has asked of the scheduler: its CPUs, policy, priority and nice
//! value (sched(7)). Kept, inherited and given back as Linux does; the threads
//! are scheduled without a look at it.

use crate::errno::{Errno, Result};

/// Lowest and highest nice value (setpriority(2)).
pub const NICE_RANGE: (i32, i32) = (-20, 19);
/// Highest priority of the real-time policies.
pub const PRIORITY_MAX: i32 = 99;

/// Scheduling policies (sched(7)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Policy {
    /// `SCHED_OTHER`.
    #[default]
    Other = 0,
    /// `SCHED_FIFO`.
    Fifo = 1,
    /// `SCHED_RR`.
    RoundRobin = 2,
    /// `SCHED_BATCH`.
    Batch = 3,
    /// `SCHED_IDLE`.
    Idle = 5,
}

impl Policy {
    /// The policy with a number; `EINVAL`.
    pub fn from_number(number: i32) -> Result<Self> {
        match number {
            0 => Ok(Self::Other),
            1 => Ok(Self::Fifo),
            2 => Ok(Self::RoundRobin),
            3 => Ok(Self::Batch),
            5 => Ok(Self::Idle),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Whether it has priorities: `SCHED_FIFO` and `SCHED_RR`.
    pub fn is_real_time(self) -> bool {
        matches!(self, Self::Fifo | Self::RoundRobin)
    }
}

/// How late timers of a thread may expire, in nanoseconds (`PR_SET_TIMERSLACK` of prctl(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimerSlack {
    /// What it is.
    pub current_ns: u64,
    /// What it becomes by 0.
    default_ns: u64,
}

impl Default for TimerSlack {
    fn default() -> Self {
        Self { current_ns: 50_000, default_ns: 50_000 }
    }
}

impl TimerSlack {
    /// The same with another value; 0: the default one.
    pub fn with(self, ns: u64) -> Self {
        Self { current_ns: if ns == 0 { self.default_ns } else { ns }, ..self }
    }

    /// That of a new thread of the same one.
    pub fn inherited(self) -> Self {
        Self { default_ns: self.current_ns, ..self }
    }
}

/// Class and priority of input and output (ioprio_set(2)): the class in the three highest of 16 bits, a
/// level of 0 to 7 in the three lowest, hints to a device between them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoPriority(u16);

impl IoPriority {
    /// `EINVAL`: there is no such class, or the class has no levels.
    pub fn new(value: u32) -> Result<Self> {
        // The others of its bits are nobody's.
        let new = Self(value as u16);
        match (new.class(), new.0 & 7) {
            (0, 0) | (1..=3, _) => Ok(new),
            _ => Err(Errno::EINVAL),
        }
    }

    fn class(self) -> u16 {
        self.0 >> 13
    }

    /// `IOPRIO_CLASS_RT`.
    pub fn is_real_time(self) -> bool {
        self.class() == 1
    }

    /// The value of the call.
    pub fn value(self) -> u32 {
        self.0.into()
    }

    /// Of two, the one that goes first: no class is that of the most programs, best effort.
    pub fn best(self, other: Self) -> Self {
        let rank = |one: Self| if one.class() == 0 { 2 << 13 | 4 } else { one.0 };
        if rank(other) < rank(self) { other } else { self }
    }
}

/// What a thread has asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scheduling {
    /// Policy.
    pub policy: Policy,
    /// 1 to [`PRIORITY_MAX`] with a real-time policy, else 0.
    pub priority: i32,
    /// Nice value, within [`NICE_RANGE`].
    pub nice: i32,
    /// `SCHED_FLAG_RESET_ON_FORK`.
    pub resets_on_fork: bool,
    /// CPUs that it may run on, a bit for each; `None` for all.
    pub affinity: Option<u64>,
    /// Class and priority of its input and output.
    pub io_priority: IoPriority,
}

impl Scheduling {
    /// What a new thread or process begins with (sched(7), "Resetting scheduling
    /// policy for child processes").
    pub fn inherited(self) -> Self {
        if !self.resets_on_fork {
            return self;
        }
        let policy = if self.policy.is_real_time() { Policy::Other } else { self.policy };
        let nice = if self.policy.is_real_time() { 0 } else { self.nice.max(0) };
        Self { policy, priority: 0, nice, resets_on_fork: false, ..self }
    }

    /// The CPUs of `present` that it may run on: all of them if what it has asked
    /// for are gone.
    pub fn cpus(self, present: u64) -> u64 {
        match self.affinity.map(|wanted| wanted & present) {
            None | Some(0) => present,
            Some(cpus) => cpus,
        }
    }

    /// Checks that a policy goes with a priority: real-time policies have one
    /// and the others do not.
    pub fn check(policy: Policy, priority: i32) -> Result<()> {
        let fits =
            (0..=PRIORITY_MAX).contains(&priority) && policy.is_real_time() == (priority != 0);
        if fits { Ok(()) } else { Err(Errno::EINVAL) }
    }

    /// Priority as `/proc/PID/stat` shows it (proc_pid_stat(5), field 18).
    pub fn shown_priority(self) -> i32 {
        if self.policy.is_real_time() { -1 - self.priority } else { 20 + self.nice }
    }
}

/// The sandbox's virtual CPUs, a bit for each.
pub fn present_cpus() -> u64 {
    match crate::state::kernel().config.get().cpus.clamp(1, 64) {
        64 => u64::MAX,
        cpus => (1 << cpus) - 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priorities_of_input_and_output_are_compared() {
        let [real_time, best_effort, idle] =
            [1, 2, 3].map(|class| IoPriority::new(class << 13 | 4));
        let (real_time, best_effort, idle) =
            (real_time.unwrap(), best_effort.unwrap(), idle.unwrap());
        assert_eq!(idle.best(best_effort).best(real_time), real_time);
        assert_eq!(idle.best(IoPriority::default()), IoPriority::default());
        assert_eq!(IoPriority::new(3), Err(Errno::EINVAL));
        assert_eq!(IoPriority::new(4 << 13), Err(Errno::EINVAL));
    }

    #[test]
    fn children_of_a_resetting_thread_are_ordinary() {
        let real_time = Scheduling {
            policy: Policy::Fifo,
            priority: 5,
            nice: -3,
            resets_on_fork: true,
            affinity: Some(2),
            io_priority: IoPriority::new(3 << 13).unwrap(),
        };
        let io_priority = real_time.io_priority;
        let ordinary = Scheduling { affinity: Some(2), io_priority, ..Scheduling::default() };
        assert_eq!(real_time.inherited(), ordinary);
        let batch = Scheduling { policy: Policy::Batch, priority: 0, ..real_time };
        assert_eq!(batch.inherited(), Scheduling { policy: Policy::Batch, ..ordinary });
        let polite = Scheduling { nice: 4, resets_on_fork: false, ..batch };
        assert_eq!(polite.inherited(), polite);
    }

    #[test]
    fn cpus_that_are_gone_do_not_count() {
        let on = |affinity| Scheduling { affinity, ..Scheduling::default() }.cpus(0b11);
        assert_eq!((on(None), on(Some(0b10)), on(Some(0b100))), (0b11, 0b10, 0b11));
    }
}
