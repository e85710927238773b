#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod artifact;
pub mod authority;
pub mod build;
pub mod container;
pub mod init;
pub mod lacking;
pub mod lines;
pub mod script;
pub mod trust;
pub mod watch;

/// `PATH` of programs in sandboxes, unless their author sets another.
pub const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
