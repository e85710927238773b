//! The gateway: accepts clients, looks at the head of their first request
//! without consuming it, and passes the connected socket on. It copies no byte
//! between a client and a function.

mod accept;
mod answer;
mod attend;
pub mod head;
pub mod refusal;
pub mod socket;

pub use accept::{Gateway, GatewayConfig};
