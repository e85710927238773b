//! The gateway: accepts clients, looks at the head of their first request
//! without consuming it, and passes the connected socket on. It copies no byte
//! between a client and a function, with two exceptions: the datagrams of UDP
//! clients (`datagrams`), and functions that read standard input (`stdin`).

mod accept;
mod answer;
mod attend;
mod datagrams;
pub mod head;
pub mod refusal;
mod stdin;
mod ticket;

pub use accept::{Gateway, GatewayConfig};
pub use stdin::{EXIT_CODE_HEADER, SIGNAL_HEADER};
