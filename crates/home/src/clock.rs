//! The clock that boot phases are measured with.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the host's `CLOCK_MONOTONIC`, the clock that sandboxes also
/// report their phases in.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Milliseconds since 1970 by the host's `CLOCK_REALTIME`, which may jump; `THAW_CLOCK` moves it
/// ([`debug::clock_ahead`](crate::debug::clock_ahead)).
pub fn wall_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = u64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(u64::MAX);
    now.saturating_add_signed(crate::debug::clock_ahead().saturating_mul(1000))
}
