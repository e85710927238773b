//! The gateway.

pub mod head;
pub mod refusal;
pub mod socket;
