//! Processes and threads.

pub mod process;
pub mod sched;
pub mod thread;
pub mod wait;

pub use process::{Process, Tasks};
pub use thread::{Thread, current, current_process};
