#![doc = include_str!("../README.md")]
#![cfg_attr(not(test), no_std)]

extern crate alloc;

pub mod boot;
pub mod errno;
pub mod freeze;
pub mod fs;
pub mod io;
pub mod ipc;
pub mod mm;
pub mod net;
pub mod platform;
pub mod state;
pub mod sync;
pub mod syscall;
pub mod task;
pub mod time;
