//! The platform of host processes: guest code runs in processes of the host, behind a seccomp
//! filter that turns its system calls into signals. The kernel lies in the same address spaces.

mod calls;
mod clock;
mod copies;
mod entry;
mod fault;
mod files;
mod filter;
mod gate;
mod host_code;
mod memory;
mod processes;
mod segment;
mod shortage;
mod switch;
mod thread;
mod vcpu;

use crate::machine::Platform;

/// The platform. All that it does is in the traits of [`crate::machine`].
pub struct HostProcesses;

impl Platform for HostProcesses {
    type SystemCallSites = gate::Gate;
}
