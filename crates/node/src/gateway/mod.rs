//! The gateway: accepts clients, and brings their requests to the functions that they
//! name.
//!
//! A connection on which nothing can follow its first request is *handed over*: the
//! gateway looks at the head without consuming it and passes the connected socket on, so
//! that the instance talks to the client itself (`accept`, `attend`). On every other
//! connection the gateway speaks HTTP with the client and *routes* each request
//! (`client`, `routed`, `exchange`), since two requests of a connection may be two
//! people's. Datagrams (`datagrams`), and requests to functions that read standard input
//! (`stdin`), pass through it, too.

mod accept;
mod answer;
mod attend;
mod client;
mod datagrams;
mod exchange;
mod grpc;
mod handshake;
mod intake;
mod joined;
mod left;
mod passing;
pub mod refusal;
mod report;
mod routed;
mod stdin;
mod ticket;
mod tls;
mod upgrade;
mod wire;

pub use accept::{Gateway, GatewayConfig};
pub(crate) use attend::attend_inherited;
pub use exchange::own_connection;
pub(crate) use joined::join_inherited;
pub use stdin::{EXIT_CODE_HEADER, SIGNAL_HEADER};
