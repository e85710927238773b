//! Limits of single processes (getrlimit(2)): for hosts without control groups.

use std::io;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, prlimit};

use crate::zygote::Process;

/// Bounds the bytes of private writable memory that each process maps.
pub fn set_memory(process: &Process, bytes: u64) -> io::Result<()> {
    set(process, Resource::Data, bytes)
}

/// Bounds the processes and threads of the sandbox's user id.
pub fn set_processes(process: &Process, count: u32) -> io::Result<()> {
    set(process, Resource::Nproc, count.into())
}

/// Bounds the CPU time of each process. The host kernel counts whole seconds.
pub fn set_cpu_time(process: &Process, limit: Duration) -> io::Result<()> {
    let seconds = limit.as_secs() + u64::from(limit.subsec_nanos() > 0);
    // At the hard limit comes SIGKILL, at the soft one SIGXCPU, which the guest could catch.
    set(process, Resource::Cpu, seconds.max(1))
}

/// No write(2) makes a file longer; a sandbox writes to pipes and sockets.
pub(crate) fn forbid_growing_files(process: &Process) -> io::Result<()> {
    set(process, Resource::Fsize, 0)
}

fn set(process: &Process, resource: Resource, value: u64) -> io::Result<()> {
    // There is no prlimit(2) by descriptor. The number cannot be given away
    // before the zygote parent has reaped the process, and hardly all others
    // are used up between this check and the call.
    let pid =
        process.own_number.filter(|_| process.is_running().unwrap_or(false)).ok_or(Errno::SRCH)?;
    prlimit(Some(pid), resource, Rlimit { current: Some(value), maximum: Some(value) })?;
    Ok(())
}
