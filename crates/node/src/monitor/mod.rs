//! Whose the daemon and `$THAW_HOME` are, as the monitor of the daemon decides it.

mod user;

pub use user::{DaemonUser, UserKind, give_home, linked_directories};
