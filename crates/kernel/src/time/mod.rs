//! Clocks, timers and random numbers.

pub mod clock;
pub mod random;
mod timeout;
pub mod timer;

pub use clock::Instant;
pub use timeout::{Timeout, TimerSpec, TimerValue, Timespec, Timeval};
