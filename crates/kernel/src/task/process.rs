//! Processes: what the threads of one program share.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::Thread;
use crate::fs::fd_table::FdTable;
use crate::fs::path::Path;
use crate::fs::FsContext;
use crate::mm::AddressSpace;
use crate::sync::Lock;

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
}
