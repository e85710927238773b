#![doc = include_str!("../README.md")]
#![cfg_attr(not(test), no_std)]

extern crate alloc;

mod args;
pub mod boot;
pub mod exec;
pub mod freeze;
pub mod fs;
pub mod host;
pub mod ipc;
mod messages;
pub mod mm;
pub mod net;
pub mod procfs;
pub mod remote;
pub mod state;
pub mod syscall;
pub mod sysfs;
pub mod task;
#[cfg(test)]
mod testing;
pub mod time;
mod upcalls;

pub(crate) use thaw_platform as platform;
pub(crate) use thaw_platform::{console, errno, io, sync};
