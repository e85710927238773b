//! Rewinding: an instance that has served its request is put back into the state in which it
//! waited to be wanted, with its memory already there.
//!
//! ```text
//! caller (daemon)
//!    │ take down (pidfd), rewind, forget
//!  socket
//!    ▼
//! rewinder   in the user and pid namespace of the sandboxes; stops a sandbox, compares and
//!            repairs, writes memory back, lets it go on
//! ```
//!
//! [`held`] says what is put back and why the guest cannot prevent it. The rewinder parses
//! nothing that a guest has made: it moves pages, and reads files of `/proc` that the host's
//! kernel writes. It has no network, no files, and rights over sandboxes only; each zygote
//! parent has four, started when they are first needed.

mod filter;
mod handle;
mod held;
mod layout;
mod process;
mod protocol;
mod serve;
mod trace;

pub(crate) use filter::install as install_filter;
pub use handle::RewindError;
pub(crate) use handle::{Rewinder, Rewinders, TakenDown};
pub use held::Effort;
pub use protocol::Reason;
pub(crate) use serve::serve;
