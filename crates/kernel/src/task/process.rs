//! Processes: what the threads of one program share.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::Thread;
use crate::fs::FsContext;
use crate::fs::fd_table::FdTable;
use crate::fs::path::Path;
use crate::mm::AddressSpace;
use crate::sync::Lock;

use super::signal::ProcessSignals;

/// All processes and threads of the sandbox.
#[derive(Default)]
pub struct Tasks {
    /// Threads by thread id. A process is in here as its main thread.
    pub threads: Lock<BTreeMap<u32, Arc<Thread>>>,
    /// Threads that can run, first come first served.
    pub run_queue: Lock<alloc::collections::VecDeque<Arc<Thread>>>,
}

/// User and group ids (credentials(7)).
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct Credentials {
    pub uid: u32,
    pub euid: u32,
    pub suid: u32,
    pub fsuid: u32,
    pub gid: u32,
    pub egid: u32,
    pub sgid: u32,
    pub fsgid: u32,
    pub groups: Vec<u32>,
}

/// A resource limit: `struct rlimit64` (getrlimit(2)).
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct ResourceLimit {
    /// Soft limit.
    pub current: u64,
    /// Hard limit.
    pub maximum: u64,
}

/// Index of `RLIMIT_NOFILE` in [`Process::limits`].
pub const RLIMIT_NOFILE: usize = 7;
/// Index of `RLIMIT_FSIZE` in [`Process::limits`].
pub const RLIMIT_FSIZE: usize = 1;
/// Index of `RLIMIT_STACK` in [`Process::limits`].
pub const RLIMIT_STACK: usize = 3;

/// A guest process.
pub struct Process {
    /// Process id, as the guest sees it.
    pub pid: u32,
    /// Memory.
    pub mm: AddressSpace,
    /// Open descriptors.
    pub files: Lock<FdTable>,
    /// Working directory, root directory, umask.
    pub fs: Lock<FsContext>,
    /// User and group ids.
    pub credentials: Lock<Credentials>,
    /// Resource limits by `RLIMIT_*`.
    pub limits: Lock<[ResourceLimit; 16]>,
    /// The program being run, for `/proc/self/exe`.
    pub executable: Lock<Option<Path>>,
    /// Arguments, each NUL-terminated, for `/proc/self/cmdline`.
    pub command_line: Lock<Vec<u8>>,
    /// Environment at start, each NUL-terminated, for `/proc/self/environ`.
    pub environment: Lock<Vec<u8>>,
    /// Auxiliary vector at start, for `/proc/self/auxv`.
    pub auxiliary_vector: Lock<Vec<u64>>,
    /// Signal actions, and signals for any thread of the process.
    pub signals: Lock<ProcessSignals>,
    /// Interval timers (setitimer(2)).
    pub timers: crate::time::itimer::IntervalTimers,
    /// `PR_SET_DUMPABLE` (prctl(2)); nothing is ever dumped.
    pub dumpable: Lock<bool>,
    /// When it started, on the guest's monotonic clock, in nanoseconds.
    pub start_ns: u64,
}

impl Process {
    /// Process id of the parent; the first process has none.
    pub fn parent_pid(&self) -> u32 {
        0
    }

    /// Process group (setpgid(2)).
    pub fn process_group(&self) -> u32 {
        self.pid
    }

    /// Session (setsid(2)).
    pub fn session(&self) -> u32 {
        self.pid
    }
}

/// No limit.
pub const RLIM_INFINITY: u64 = u64::MAX;

impl ResourceLimit {
    /// The same soft and hard limit.
    pub const fn both(limit: u64) -> Self {
        Self { current: limit, maximum: limit }
    }
}

/// The limits a program starts with, by `RLIMIT_*`: as a login session on an
/// ordinary machine.
pub const DEFAULT_LIMITS: [ResourceLimit; 16] = {
    let mut limits = [ResourceLimit::both(RLIM_INFINITY); 16];
    limits[RLIMIT_STACK] = ResourceLimit { current: 8 << 20, maximum: RLIM_INFINITY };
    // RLIMIT_CORE, RLIMIT_NPROC, RLIMIT_NOFILE, RLIMIT_MEMLOCK,
    // RLIMIT_SIGPENDING, RLIMIT_MSGQUEUE, RLIMIT_NICE, RLIMIT_RTPRIO.
    limits[4] = ResourceLimit { current: 0, maximum: RLIM_INFINITY };
    limits[6] = ResourceLimit::both(32768);
    limits[RLIMIT_NOFILE] = ResourceLimit { current: 1024, maximum: 1 << 20 };
    limits[8] = ResourceLimit::both(8 << 20);
    limits[11] = ResourceLimit::both(32768);
    limits[12] = ResourceLimit::both(819200);
    limits[13] = ResourceLimit::both(0);
    limits[14] = ResourceLimit::both(0);
    limits
};
