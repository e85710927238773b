//! The guest's clocks.
//!
//! `CLOCK_MONOTONIC` has suspend semantics: it stands still while the program
//! is frozen. `CLOCK_REALTIME` and `CLOCK_BOOTTIME` do not.

use crate::sync::Lock;

/// Offsets of the guest's clocks from the host's.
pub struct Clocks {
    /// Added to the host's monotonic clock, in nanoseconds, wrapping.
    pub monotonic_offset: Lock<u64>,
    /// What the monotonic clock read when the sandbox was frozen.
    pub frozen_at: Lock<u64>,
}

impl Clocks {
    /// Clocks of a fresh sandbox, as the host's.
    pub const fn new() -> Self {
        Self { monotonic_offset: Lock::new(0), frozen_at: Lock::new(0) }
    }
}

impl Clocks {
    /// Notes the time at which the clock stops.
    pub fn freeze(&self) {
        self.frozen_at.set(Instant::now().0);
    }

    /// Lets the monotonic clock go on from where it stopped.
    pub fn thaw(&self) {
        let host = crate::platform::clock::monotonic_ns();
        self.monotonic_offset.set(self.frozen_at.get().wrapping_sub(host));
    }
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
        Instant(host.wrapping_add(crate::state::kernel().clocks.monotonic_offset.get()))
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
