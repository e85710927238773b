#![doc = include_str!("../README.md")]
#![cfg_attr(not(test), no_std)]
// Some of the per-boot area is there for the platform of host processes.
#![cfg_attr(feature = "another-platform", allow(dead_code))]

extern crate alloc;
#[cfg(feature = "another-platform")]
extern crate self as thaw_platform;

pub mod boot_area;
pub mod cpu;
pub mod errno;
pub mod fpu;
pub mod io;
pub mod kernel_lock;
pub mod machine;
pub mod memory;
pub mod message;
#[cfg(feature = "another-platform")]
#[path = "../tests/nowhere/mod.rs"]
mod nowhere;
pub mod panic;
#[cfg(not(feature = "another-platform"))]
mod process;
pub mod registers;
pub mod saved;
pub mod start;
pub mod sync;
pub mod thread;
pub mod upcalls;
pub mod user;
