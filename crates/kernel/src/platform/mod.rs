//! All that touches the machine or the host.

pub mod clock;
pub mod context;
pub mod entry;
pub mod fault;
pub mod filter;
pub mod fpu;
pub mod gate;
pub mod host;
mod jumps;
pub mod kernel_lock;
pub mod panic;
pub mod segment;
mod site;
pub mod user;
pub mod vcpu;
