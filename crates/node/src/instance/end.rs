//! How instances end, for programs and for people.

use std::fmt;
use thaw_home::config::{ByteSize, TimeSpan};
use thaw_sandbox::{GuestExit, LimitReached};

/// Signals by which a program ends that has read or written where it should not, or has
/// noticed so itself (signal(7)).
const CRASH_SIGNALS: [i32; 7] = [
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGSEGV,
    libc::SIGSYS,
];

/// How an instance ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    /// The program ended by itself.
    #[error("the program ended {}", describe(*.0))]
    Exited(GuestExit),
    /// The kernel could not thaw the image.
    #[error("the image could not be thawed: {0}")]
    Failed(String),
    /// The sandbox broke the protocol.
    #[error("the sandbox was ended: {0}")]
    Violation(String),
    /// A part of its memory or files is elsewhere and could not be fetched.
    #[error("a part of the function could not be fetched: {0}")]
    NotFetched(String),
    /// It was hibernated, and its memory cannot be brought back: nothing of it has run.
    #[error("{0}")]
    MemoryLost(String),
    /// It has used up what its limits allow.
    #[error("the sandbox was ended because {0}")]
    LimitReached(Overrun),
    /// It has gone on after its tenant's CPU time was spent.
    #[error("the sandbox was ended because its tenant has spent its CPU time")]
    TenantSpent,
    /// The host ended the process, and the signal if it is known.
    #[error("the sandbox was killed{}", .0.map(explain_signal).unwrap_or_default())]
    Killed(Option<i32>),
    /// The same, before the sandbox has reported its boot, which it does when the program
    /// first waits or answers. If a connection is untouched, another instance can have it.
    #[error("the sandbox was killed{}", .0.map(explain_signal).unwrap_or_default())]
    KilledInBoot(Option<i32>),
    /// It has served its request, and is another instance from now on.
    #[error("the sandbox was put back into the state before its request")]
    Rewound,
}

impl End {
    /// Whether the program has crashed.
    pub fn is_crash(&self) -> bool {
        match self {
            Self::Exited(GuestExit::Signal(signal)) => CRASH_SIGNALS.contains(&i32::from(*signal)),
            Self::Killed(Some(signal)) | Self::KilledInBoot(Some(signal)) => {
                CRASH_SIGNALS.contains(signal)
            }
            Self::Violation(_) => true,
            Self::Exited(GuestExit::Code(_))
            | Self::Failed(_)
            | Self::MemoryLost(_)
            | Self::LimitReached(_)
            | Self::NotFetched(_)
            | Self::TenantSpent
            | Self::Killed(None)
            | Self::KilledInBoot(None)
            | Self::Rewound => false,
        }
    }
}

/// A limit that an instance has reached, for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overrun {
    /// Which one.
    pub limit: LimitReached,
    /// The most bytes of memory that it has used, if it is the limit of memory and the host counts
    /// them. The group may have been another sandbox's before.
    pub memory_peak: Option<u64>,
    /// The setting that has the limit and its value, when they are known.
    pub setting: Option<LimitSetting>,
}

/// A setting of `thaw.toml` that limits instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitSetting {
    /// `limits.memory`.
    Memory(ByteSize),
    /// `limits.cpu_time`.
    CpuTime(TimeSpan),
}

impl fmt::Display for Overrun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.limit)?;
        match &self.setting {
            Some(LimitSetting::Memory(most)) => {
                write!(f, ", `limits.memory` of {most}")?;
                if let Some(peak) = self.memory_peak {
                    write!(f, ", and used {}", ByteSize(peak).min(*most).approximate())?;
                }
                write!(f, "; raise `limits.memory` in thaw.toml")
            }
            Some(LimitSetting::CpuTime(most)) => {
                write!(f, ", `limits.cpu_time` of {most}; raise `limits.cpu_time` in thaw.toml")
            }
            None => Ok(()),
        }
    }
}

fn describe(exit: GuestExit) -> String {
    match exit {
        GuestExit::Code(code) => format!("with exit code {code}"),
        GuestExit::Signal(signal) => format!("by signal {signal}"),
    }
}

fn explain_signal(signal: i32) -> String {
    let why = match signal {
        libc::SIGKILL => ", because somebody or the host killed it",
        libc::SIGSYS => ", because it made a host call that its filter forbids",
        _ => "",
    };
    format!(" by signal {signal}{why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_by_faults_are_crashes() {
        assert!(End::Exited(GuestExit::Signal(11)).is_crash());
        assert!(End::Killed(Some(libc::SIGSYS)).is_crash());
        assert!(!End::Exited(GuestExit::Signal(15)).is_crash());
        assert!(!End::Exited(GuestExit::Code(1)).is_crash());
        assert!(!End::Killed(Some(libc::SIGKILL)).is_crash(), "memory, time, or an operator");
    }

    #[test]
    fn a_limit_that_was_reached_says_what_to_do() {
        let overrun = |memory_peak, setting| {
            let overrun = Overrun { limit: LimitReached::Memory, memory_peak, setting };
            End::LimitReached(overrun).to_string()
        };
        let begin = "the sandbox was ended because it reached its memory limit";
        assert_eq!(overrun(Some(1), None), begin);
        let most = || Some(LimitSetting::Memory(ByteSize::mebibytes(128)));
        let end = "; raise `limits.memory` in thaw.toml";
        assert_eq!(overrun(None, most()), format!("{begin}, `limits.memory` of 128MiB{end}"));
        // The second peak is that of another sandbox in the same control group.
        for (peak, used) in [(100 << 20, "100.0MiB"), (200 << 20, "128.0MiB")] {
            let expected = format!("{begin}, `limits.memory` of 128MiB, and used {used}{end}");
            assert_eq!(overrun(Some(peak), most()), expected);
        }
    }
}
