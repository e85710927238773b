//! The guest's clocks.
//!
//! `CLOCK_MONOTONIC` has suspend semantics: it stands still while the program
//! is frozen. `CLOCK_REALTIME` and `CLOCK_BOOTTIME` do not.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Offsets of the guest's clocks from the host's.
pub struct Clocks {
    /// Added to the host's monotonic clock, in nanoseconds, wrapping.
    monotonic_offset: AtomicU64,
    /// The same as seconds, rounded down, and nanoseconds.
    offset_parts: [AtomicU64; 2],
    /// What the monotonic clock read when the sandbox was frozen.
    frozen_at: AtomicU64,
}

impl Clocks {
    /// Clocks of a fresh sandbox, as the host's.
    pub const fn new() -> Self {
        Self {
            monotonic_offset: AtomicU64::new(0),
            offset_parts: [AtomicU64::new(0), AtomicU64::new(0)],
            frozen_at: AtomicU64::new(0),
        }
    }
}

impl Clocks {
    /// What is added to the host's monotonic clock, in nanoseconds, wrapping.
    pub fn offset(&self) -> u64 {
        self.monotonic_offset.load(Relaxed)
    }

    /// Where [`Clocks::offset`] is, for the guest's vdso: whole seconds, which may be
    /// negative, and nanoseconds.
    pub fn offset_parts(&self) -> &[AtomicU64; 2] {
        &self.offset_parts
    }

    /// Notes the time at which the clock stops.
    pub fn freeze(&self) {
        self.frozen_at.store(Instant::now().0, Relaxed);
    }

    /// Lets the monotonic clock go on from where it stopped.
    pub fn thaw(&self) {
        let host = crate::platform::clock::monotonic_ns();
        let offset = self.frozen_at.load(Relaxed).wrapping_sub(host);
        self.monotonic_offset.store(offset, Relaxed);
        let (seconds, nanoseconds) = parts(offset as i64);
        self.offset_parts[0].store(seconds as u64, Relaxed);
        self.offset_parts[1].store(nanoseconds as u64, Relaxed);
    }
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
        let host = crate::platform::clock::monotonic_ns();
        Instant(host.wrapping_add(crate::state::kernel().clocks.offset()))
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
    crate::platform::clock::realtime_ns()
}

/// The guest's `CLOCK_BOOTTIME`, in nanoseconds.
pub fn boottime_ns() -> u64 {
    crate::platform::clock::boottime_ns()
}

#[cfg(test)]
mod tests {
    use super::parts;

    #[test]
    fn an_offset_into_the_past_has_nanoseconds_that_are_added() {
        assert_eq!(parts(0), (0, 0));
        assert_eq!(parts(1_500_000_000), (1, 500_000_000));
        assert_eq!(parts(-1), (-1, 999_999_999));
        assert_eq!(parts(-2_000_000_000), (-2, 0));
    }
}
