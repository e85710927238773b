//! Clocks, timers and random numbers.

pub mod clock;
pub mod cpu_clock;
pub mod itimer;
pub mod posix;
pub mod random;
pub mod syscalls;
pub mod timer;

pub use clock::Instant;
