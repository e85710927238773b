//! Reading the host's clocks without a host call.

/// The host's `CLOCK_MONOTONIC`, in nanoseconds.
pub fn monotonic_ns() -> u64 {
    unimplemented!()
}

/// The host's `CLOCK_REALTIME`, in nanoseconds since the epoch.
pub fn realtime_ns() -> u64 {
    unimplemented!()
}
