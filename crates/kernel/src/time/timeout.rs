//! Times and time-outs as system calls pass them.

use super::Instant;
use crate::args::UserPtr;
use crate::errno::{Errno, Result};

const NS_PER_S: u64 = 1_000_000_000;
/// Longest time, in nanoseconds: some 292 years, which can be added to any clock.
const NS_MAX: u64 = u64::MAX / 2;

/// `struct timespec` (timespec(3type)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Timespec {
    /// Seconds.
    pub seconds: i64,
    /// Nanoseconds, below 10⁹.
    pub nanoseconds: i64,
}

/// `struct timeval` (timeval(3type)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Timeval {
    /// Seconds.
    pub seconds: i64,
    /// Microseconds, below 10⁶.
    pub microseconds: i64,
}

impl Timespec {
    /// In nanoseconds, at most [`NS_MAX`]; `EINVAL` if negative or not normalized.
    pub fn to_ns(self) -> Result<u64> {
        if self.seconds < 0 || !(0..NS_PER_S as i64).contains(&self.nanoseconds) {
            return Err(Errno::EINVAL);
        }
        Ok(nanoseconds(self.seconds, self.nanoseconds as u64))
    }

    /// The end of a relative time-out; a null pointer means that there is none.
    pub fn deadline(at: UserPtr<Self>) -> Result<Option<Instant>> {
        at.read_if_some()?.map(|time| time.to_ns().map(Instant::after_ns)).transpose()
    }

    /// From nanoseconds.
    pub fn from_ns(ns: u64) -> Self {
        Self { seconds: (ns / NS_PER_S) as i64, nanoseconds: (ns % NS_PER_S) as i64 }
    }
}

impl Timeval {
    /// In nanoseconds, at most [`NS_MAX`]; `EINVAL` if negative. Like select(2) on Linux,
    /// whole seconds in the microseconds are accepted.
    pub fn to_ns(self) -> Result<u64> {
        if self.seconds < 0 || self.microseconds < 0 {
            return Err(Errno::EINVAL);
        }
        Ok(nanoseconds(self.seconds, (self.microseconds as u64).saturating_mul(1000)))
    }

    /// As [`Timeval::to_ns`]; `EINVAL` also for microseconds of a second or more.
    pub fn normalized_ns(self) -> Result<u64> {
        if self.microseconds >= 1_000_000 { Err(Errno::EINVAL) } else { self.to_ns() }
    }

    /// From nanoseconds, rounded down.
    pub fn from_ns(ns: u64) -> Self {
        Self { seconds: (ns / NS_PER_S) as i64, microseconds: (ns % NS_PER_S / 1000) as i64 }
    }
}

/// The time of a number of seconds, which is not negative, and nanoseconds.
fn nanoseconds(seconds: i64, nanoseconds: u64) -> u64 {
    (seconds as u64).saturating_mul(NS_PER_S).saturating_add(nanoseconds).min(NS_MAX)
}

/// `struct itimerspec` (timer_settime(2), timerfd_settime(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct TimerSpec {
    /// Period; zero for a single expiry.
    pub interval: Timespec,
    /// First expiry; zero disarms.
    pub value: Timespec,
}

/// `struct itimerval` (setitimer(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct TimerValue {
    /// Period; zero for a single expiry.
    pub interval: Timeval,
    /// Time to the next expiry; zero if disarmed.
    pub value: Timeval,
}

/// How long a call may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timeout {
    /// Not at all.
    Zero,
    /// Until then.
    At(Instant),
    /// For ever.
    Never,
}

impl Timeout {
    /// From a relative time.
    pub fn after_ns(ns: u64) -> Self {
        if ns == 0 { Self::Zero } else { Self::At(Instant::after_ns(ns)) }
    }

    /// From milliseconds; negative means for ever (poll(2), epoll_wait(2)).
    pub fn from_ms(ms: i32) -> Self {
        match u64::try_from(ms) {
            Ok(ms) => Self::after_ns(ms * 1_000_000),
            Err(_) => Self::Never,
        }
    }

    /// From a guest's `struct timespec`; a null pointer means for ever.
    pub fn from_timespec(at: UserPtr<Timespec>) -> Result<Self> {
        let Some(time) = at.read_if_some()? else { return Ok(Self::Never) };
        time.to_ns().map(Self::after_ns)
    }

    /// From a guest's `struct timeval`; a null pointer means for ever.
    pub fn from_timeval(at: UserPtr<Timeval>) -> Result<Self> {
        let Some(time) = at.read_if_some()? else { return Ok(Self::Never) };
        time.to_ns().map(Self::after_ns)
    }

    /// The deadline for the scheduler.
    pub fn deadline(self) -> Option<Instant> {
        match self {
            Self::Zero => Some(Instant(0)),
            Self::At(deadline) => Some(deadline),
            Self::Never => None,
        }
    }

    /// Nanoseconds left, which select(2) and ppoll(2) report; `None` for ever.
    pub fn left_ns(self) -> Option<u64> {
        match self {
            Self::Zero => Some(0),
            Self::At(deadline) => Some(deadline.0.saturating_sub(Instant::now().0)),
            Self::Never => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_times_are_refused_or_capped() {
        assert_eq!(Timespec { seconds: 1, nanoseconds: 5 }.to_ns(), Ok(1_000_000_005));
        assert_eq!(Timespec { seconds: -1, nanoseconds: 0 }.to_ns(), Err(Errno::EINVAL));
        assert_eq!(Timespec { seconds: 0, nanoseconds: 1_000_000_000 }.to_ns(), Err(Errno::EINVAL));
        assert_eq!(Timespec { seconds: i64::MAX, nanoseconds: 0 }.to_ns(), Ok(NS_MAX));
        assert_eq!(Timeval { seconds: 0, microseconds: 2_000_000 }.to_ns(), Ok(2_000_000_000));
        assert_eq!(Timeval { seconds: 0, microseconds: -1 }.to_ns(), Err(Errno::EINVAL));
        assert_eq!(Timespec::from_ns(1_000_000_005), Timespec { seconds: 1, nanoseconds: 5 });
    }
}
