//! Limits on a sandbox that the host kernel enforces.
//!
//! Memory: a control group of its own where the memory controller is writable,
//! made with the zygote and not on the boot path. Without one, `RLIMIT_DATA`
//! (getrlimit(2)) bounds the private writable memory that the sandbox *maps*,
//! used or not, and bounds neither shared memory nor page cache: programs that
//! reserve much more than they use then need a higher limit.
//!
//! CPU time: `RLIMIT_CPU`.

mod cgroup;

pub use cgroup::{Hierarchy, MemoryGroup, Version, discover};

use std::io;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, prlimit};

/// Where a sandbox's limits are set.
#[derive(Debug)]
pub struct Limits {
    /// Its control group, if it has one.
    pub group: Option<MemoryGroup>,
}

impl Limits {
    /// Sets the memory limit in bytes (0: none) of the sandbox with this process.
    pub fn set_memory(&self, pid: u32, bytes: u64) -> io::Result<()> {
        match &self.group {
            Some(group) => group.set_limit(bytes),
            None if bytes == 0 => Ok(()),
            None => set_rlimit(pid, Resource::Data, bytes),
        }
    }

    /// Sets the CPU time after which the host kernel ends the sandbox.
    pub fn set_cpu_time(&self, pid: u32, limit: Option<Duration>) -> io::Result<()> {
        let Some(limit) = limit else { return Ok(()) };
        let seconds = limit.as_secs() + u64::from(limit.subsec_nanos() > 0);
        // At the hard limit comes SIGKILL, at the soft one SIGXCPU, which the guest could catch.
        set_rlimit(pid, Resource::Cpu, seconds.max(1))
    }
}

fn set_rlimit(pid: u32, resource: Resource, value: u64) -> io::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    prlimit(Some(pid), resource, Rlimit { current: Some(value), maximum: Some(value) })?;
    Ok(())
}
