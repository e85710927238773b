//! The guest's clocks.
//!
//! `CLOCK_MONOTONIC` has suspend semantics: it stands still while the program
//! is frozen. `CLOCK_REALTIME` and `CLOCK_BOOTTIME` do not.

use crate::sync::Lock;

/// Offsets of the guest's clocks from the host's.
pub struct Clocks {
    /// Added to the host's monotonic clock, in nanoseconds, wrapping.
    pub monotonic_offset: Lock<u64>,
}

impl Clocks {
    /// Clocks of a fresh sandbox, as the host's.
    pub const fn new() -> Self {
        Self { monotonic_offset: Lock::new(0) }
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

    /// `ns` nanoseconds from now.
    pub fn after_ns(ns: u64) -> Instant {
        Instant(Self::now().0.saturating_add(ns))
    }
}

/// The guest's `CLOCK_REALTIME`, in nanoseconds since the epoch.
pub fn realtime_ns() -> u64 {
    crate::platform::clock::realtime_ns()
}
