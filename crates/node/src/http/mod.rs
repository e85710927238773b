//! HTTP/1.1 messages on their way through this node: reading heads (`head`), and passing messages
//! from one hop to the next (`message`). The gateway passes on requests of clients, the proxy of
//! `[[egress.inject]]` those of sandboxes.

pub mod head;
pub(crate) mod message;
