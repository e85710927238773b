//! The clock that boot phases are measured with.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the host's `CLOCK_MONOTONIC`, the clock that sandboxes also
/// report their phases in.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
