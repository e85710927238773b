//! All that touches the machine or the host.

pub mod clock;
pub mod host;
pub mod user;
