//! Processes and threads.

pub mod clone;
pub mod credentials;
pub mod exit;
pub mod fork_id;
pub mod freeze_request;
pub mod futex;
pub mod hooks;
pub mod host_poll;
pub mod host_process;
pub mod ids;
pub mod memory_policy;
pub mod namespace;
pub mod oom;
pub mod oom_killer;
pub mod pid_namespace;
pub mod process;
pub mod ptrace;
pub mod sched_attributes;
pub mod scheduler;
pub mod seccomp;
pub mod signal;
pub mod space;
pub mod thread;
pub mod timers;
pub mod unshare;
pub mod usage;
pub mod user_namespace;
pub mod uts;
pub mod visit;
pub mod wait;
pub mod watched;
pub mod work;

pub use credentials::{Capabilities, Credentials};
pub use process::{Process, Tasks};
pub use space::Space;
pub use thread::{Thread, current, current_process};
