//! The guest's clocks.
//!
//! `CLOCK_MONOTONIC` has suspend semantics: it stands still while the program
//! is frozen. `CLOCK_REALTIME` and `CLOCK_BOOTTIME` do not; but the host that thaws
//! may have booted later than the one that froze, and `CLOCK_BOOTTIME` must not go
//! back.

use crate::platform::machine::{Clocks as _, Machine};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Offsets of the guest's clocks from the host's.
pub struct Clocks {
    /// Added to the host's monotonic clock, in nanoseconds, wrapping.
    monotonic_offset: AtomicU64,
    /// The same as seconds, rounded down, and nanoseconds.
    offset_parts: [AtomicU64; 2],
    /// Added to the host's clock of the time since its boot, in nanoseconds, wrapping.
    boottime_offset: AtomicU64,
    /// What the monotonic clock, that of the time since boot, and the host's real-time
    /// clock read when the sandbox was frozen.
    frozen_at: [AtomicU64; 3],
}

impl Clocks {
    /// Clocks of a fresh sandbox, as the host's.
    pub const fn new() -> Self {
        Self {
            monotonic_offset: AtomicU64::new(0),
            offset_parts: [const { AtomicU64::new(0) }; 2],
            boottime_offset: AtomicU64::new(0),
            frozen_at: [const { AtomicU64::new(0) }; 3],
        }
    }
}

impl Clocks {
    /// What is added to the host's monotonic clock, in nanoseconds, wrapping.
    pub fn offset(&self) -> u64 {
        self.monotonic_offset.load(Relaxed)
    }

    /// What is added to the host's time since boot, in nanoseconds, wrapping.
    pub fn boottime_offset(&self) -> u64 {
        self.boottime_offset.load(Relaxed)
    }

    /// Where [`Clocks::offset`] is, for the guest's vdso: whole seconds, which may be
    /// negative, and nanoseconds.
    pub fn offset_parts(&self) -> &[AtomicU64; 2] {
        &self.offset_parts
    }

    /// Notes the time at which the clocks stop.
    pub fn freeze(&self) {
        for (kept, now) in
            self.frozen_at.iter().zip([Instant::now().0, boottime_ns(), realtime_ns()])
        {
            kept.store(now, Relaxed);
        }
    }

    /// Lets the monotonic clock go on from where it stopped, and that of the time since
    /// boot from there, too, with the time that has passed.
    pub fn thaw(&self) {
        let [monotonic, boottime, realtime] = self.frozen_at.each_ref().map(|at| at.load(Relaxed));
        let offset = monotonic.wrapping_sub(Machine::monotonic_ns());
        self.monotonic_offset.store(offset, Relaxed);
        let (seconds, nanoseconds) = parts(offset as i64);
        self.offset_parts[0].store(seconds as u64, Relaxed);
        self.offset_parts[1].store(nanoseconds as u64, Relaxed);
        let boottime = boottime + passed(realtime, realtime_ns());
        self.boottime_offset.store(boottime.wrapping_sub(Machine::boottime_ns()), Relaxed);
    }
}

/// Time between two readings of real-time clocks, in nanoseconds. A host whose clock is
/// behind that of the one that froze cannot tell.
fn passed(frozen: u64, now: u64) -> u64 {
    now.saturating_sub(frozen)
}

/// Nanoseconds as seconds, rounded down, and nanoseconds.
fn parts(ns: i64) -> (i64, i64) {
    const NS: i64 = 1_000_000_000;
    (ns.div_euclid(NS), ns.rem_euclid(NS))
}

impl Default for Clocks {
    fn default() -> Self {
        Self::new()
    }
}

/// A point of the guest's monotonic clock, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(pub u64);

impl Instant {
    /// Now.
    pub fn now() -> Instant {
        Instant(Machine::monotonic_ns().wrapping_add(crate::state::kernel().clocks.offset()))
    }

    /// The point at which `CLOCK_REALTIME` reads `ns`.
    pub fn from_realtime(ns: u64) -> Instant {
        let ahead = ns.saturating_sub(realtime_ns());
        Instant(Self::now().0.saturating_add(ahead))
    }

    /// `ns` nanoseconds from now.
    pub fn after_ns(ns: u64) -> Instant {
        Instant(Self::now().0.saturating_add(ns))
    }
}

/// The guest's `CLOCK_REALTIME`, in nanoseconds since the epoch.
pub fn realtime_ns() -> u64 {
    Machine::realtime_ns()
}

/// The guest's `CLOCK_BOOTTIME`, in nanoseconds.
pub fn boottime_ns() -> u64 {
    Machine::boottime_ns().wrapping_add(crate::state::kernel().clocks.boottime_offset())
}

#[cfg(test)]
mod tests {
    use super::{parts, passed};

    #[test]
    fn an_offset_into_the_past_has_nanoseconds_that_are_added() {
        assert_eq!(parts(0), (0, 0));
        assert_eq!(parts(1_500_000_000), (1, 500_000_000));
        assert_eq!(parts(-1), (-1, 999_999_999));
        assert_eq!(parts(-2_000_000_000), (-2, 0));
    }

    #[test]
    fn the_time_since_boot_does_not_go_back() {
        assert_eq!(passed(5, 7), 2);
        assert_eq!(passed(7, 5), 0, "the clock of the host that thaws is behind");
    }
}
