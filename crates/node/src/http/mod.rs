//! HTTP on its way through this node: reading heads of HTTP/1.1 (`head`), passing messages
//! from one hop to the next (`message`), ends of connections (`linger`), and HTTP/2 with programs that are not trusted (`untrusted`, `frames`, `call`).
//! The gateway passes on requests of clients, the proxy of `[[egress.inject]]` those of sandboxes.

pub mod call;
mod frames;
pub mod head;
pub mod linger;
pub mod message;
pub(crate) mod untrusted;
