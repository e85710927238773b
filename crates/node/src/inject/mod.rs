//! Headers with secrets that the node adds to requests of sandboxes, which never see them
//! (`[[egress.inject]]`).
//!
//! ```text
//! program ──TLS, by the node's authority──▶ proxy ──TLS, by the host's roots──▶ server
//!          10.0.2.4, a pair of Unix sockets        replaces the header
//! ```
//!
//! | module | what it does |
//! | --- | --- |
//! | `roots` | which servers the proxy trusts |
//! | `own` | headers of one sandbox, which change while it runs |
//! | `proxy` | takes connections of sandboxes, within bounds |
//! | `client` | one such connection: what is asked on it, and what is refused |
//! | `upstream` | the connection to the server |
//! | `watch` | ends those on which nothing moves |
//!
//! `thaw_build::authority` is the node's certificate authority, which `thaw_build::trust` has the programs
//! of a function trust.
//!
//! Decision: docs/decisions/0056-secrets-that-no-sandbox-sees.md.

mod client;
mod own;
mod proxy;
mod roots;
mod upstream;
mod watch;

pub use own::{OwnHeaders, WrongHeaders};
pub(crate) use proxy::Proxy;
pub use roots::read_roots;
