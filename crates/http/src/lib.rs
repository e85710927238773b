#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod call;
mod frames;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod head;
pub mod linger;
pub mod message;
pub mod untrusted;
