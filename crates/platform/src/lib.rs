#![doc = include_str!("../README.md")]
#![cfg_attr(not(test), no_std)]

extern crate alloc;

pub mod boot_area;
pub mod clock;
pub mod entry;
pub mod errno;
pub mod fault;
pub mod filter;
pub mod fpu;
pub mod gate;
pub mod host;
pub mod io;
pub mod kernel_lock;
pub mod memory;
pub mod message;
pub mod panic;
pub mod saved;
pub mod segment;
pub mod start;
mod switch;
pub mod sync;
pub mod thread;
pub mod upcalls;
pub mod user;
pub mod vcpu;
