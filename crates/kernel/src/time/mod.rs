//! Clocks, timers and random numbers.

pub mod clock;
pub mod random;
pub mod timer;
mod timespec;

pub use clock::Instant;
pub use timespec::{Timespec, read_timespec};
