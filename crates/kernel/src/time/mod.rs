//! Clocks, timers and random numbers.

pub mod clock;
pub mod itimer;
pub mod random;
pub mod syscalls;
pub mod timer;

pub use clock::Instant;
