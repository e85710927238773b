//! The resolver of sandboxes: answers DNS questions for names that the egress
//! policy allows, with what the host's own resolver says.
//!
//! A sandbox talks to it over Unix sockets that stand for connections to the
//! resolver's address. One thread reads the questions of all sandboxes; those
//! that need the host's resolver go on in [`lookup`].

mod channel;
pub mod lookup;
pub(crate) mod message;
mod service;

pub use message::Outcome;
pub use service::{Framing, open};
