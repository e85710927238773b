//! The state helper: the process that reads the memory of sandboxes, page maps and freeze
//! reports. All of that was made by hostile guests, so whoever parses it has no network, no
//! files and no rights but to look at sandboxes.
//!
//! ```text
//! caller (daemon, thaw build) ──socket──▶ state helper
//!    asks: check, freeze, record              in the user and pid namespace of the sandboxes
//!    answers: blobs of the rootfs             reads /proc/PID/{mem,pagemap} of theirs
//! ```
//!
//! It is this same executable. A launcher joins the sandboxes' namespaces and forks the
//! helper, which gives up everything else ([`confine`]) and then serves one request after
//! the other ([`serve`]). Each zygote parent has one, started when it is first needed and
//! again after it has died ([`StateHelper`]). It ends with its socket, and with the
//! sandboxes' pid namespace.

mod confine;
mod filter;
mod handle;
mod launch;
mod processes;
pub(crate) mod protocol;
mod serve;

pub use handle::StateError;
pub(crate) use handle::{Conversation, StateHelper, Subject};
pub(crate) use launch::{Join, helper_main, launcher};
pub(crate) use processes::Space;
