//! Privileges in a process of their own.
//!
//! A daemon of root's is two processes. The *monitor* keeps root's rights; it makes
//! control groups, starts zygote parents and other helpers, binds ports below 1024, and reads
//! nothing but messages of a fixed size from the other. The *daemon* has a user id of its own and
//! no capabilities. It owns the user namespace of its sandboxes, which gives it every
//! right over them and over nothing else (user_namespaces(7)).
//!
//! ```text
//!  monitor (root) ──── Request, Answer ────▶ daemon (own user id)
//!    │ forks                                    │ owns
//!    ▼                                          ▼
//!  zygote parent ── in the sandboxes' user namespace, where it is root
//! ```
//!
//! The daemon of another user is also two processes. They have the same user id, so the
//! daemon's has user and pid namespaces of its own, and the user namespace of its sandboxes
//! is below the former ([`caller`]).
//!
//! A monitor executes a later program in its own place without losing any of it ([`handover`]).
//!
//! This module has both ends. [`Monitor`] is the privileged one; in a process that has
//! been [`adopt`]ed, zygote parents and groups are asked for instead of being made.

mod caller;
mod client;
mod handover;
mod namespace;
mod protocol;
mod server;
mod store;

pub use client::{MonitorLink, adopt, has_monitor};
pub use handover::{Leaving, Left, Number, Refused, ask, read_sealed, seal};
pub use namespace::UserNamespace;
pub use protocol::{Grant, OLDEST_VERSION, VERSION, receive_start, send_start, socket_pair};
pub use server::{DaemonIds, FetcherCommand, Monitor, MonitorState, NoNamespaces};

pub use crate::confine::{
    copy_tree, drop_groups_if_allowed, enter_root, hold_capabilities, put_tree,
    shrink_bounding_set, unshare_mounts,
};
pub use crate::resolver::load_name_modules;
pub use crate::sys::{exit_at_once, signal_descriptor, unblock_signals};
pub use crate::zygote::own_pid;
pub use client::of_this_process;

pub(crate) use caller::init_main;
pub(crate) use client::{IdShare, Keep};
pub(crate) use protocol::{Kept, KeptKind};
pub(crate) use server::try_separation;
