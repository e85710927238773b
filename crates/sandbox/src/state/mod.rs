//! The state helper: the process that reads the memory of sandboxes, page maps and freeze
//! reports. All of that was made by hostile guests, so whoever parses it has no network, no
//! files and no rights but to look at sandboxes.
//!
//! ```text
//! caller (daemon, thaw build)
//!    │ asks: check, freeze, record; answers: blobs of the rootfs
//!  socket
//!    ▼
//! state helper   in the user and pid namespace of the sandboxes;
//!    │ forks     opens /proc/PID/{mem,pagemap} of a sandbox, and parses nothing of it
//!    ▼
//! worker         one for each request; has these files, and no rights at all
//! ```
//!
//! It is this same executable. A launcher joins the sandboxes' namespaces and forks the
//! helper, which gives up everything else ([`confine`]) and then serves one request after
//! the other ([`serve`]). Each zygote parent has one, started when it is first needed and
//! again after it has died ([`StateHelper`]). It ends with its socket, and with the
//! sandboxes' pid namespace.
//!
//! A sandbox that takes over the worker has won its own memory, and the image that is made
//! of it. Other sandboxes are out of its reach.

mod confine;
mod filter;
mod handle;
mod launch;
mod processes;
pub(crate) mod protocol;
mod serve;

pub use handle::StateError;
pub(crate) use handle::{Conversation, Running, StateHelper, Subject};
pub(crate) use launch::{helper_main, launcher};
pub(crate) use processes::{FIRST_PROCESS, Sandbox, Space, number_of};
pub(crate) use protocol::Task;
