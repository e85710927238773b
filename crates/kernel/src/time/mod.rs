//! Clocks, timers and random numbers.

pub mod clock;
pub mod random;

pub use clock::Instant;
