#![doc = include_str!("../README.md")]
#![cfg_attr(not(test), no_std)]

extern crate alloc;

pub mod boot_area;
pub mod cpu;
pub mod errno;
pub mod fpu;
pub mod io;
pub mod kernel_lock;
pub mod machine;
pub mod memory;
pub mod message;
pub mod panic;
mod process;
pub mod registers;
pub mod saved;
pub mod start;
pub mod sync;
pub mod thread;
pub mod upcalls;
pub mod user;
