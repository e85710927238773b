//! How one process of a sandbox is ended when the sandbox' memory is used up.

use bytemuck::{Pod, Zeroable};

/// Body of [`super::MSG_OUT_OF_MEMORY`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct OutOfMemory {
    /// How many [`ProcessMemory`] follow, [`PROCESS_MEMORY_MAX`] at most; 0: the host does not know
    /// what each process has.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

/// Most host processes that [`OutOfMemory`] names.
pub const PROCESS_MEMORY_MAX: usize = 64;

/// The memory of a host process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ProcessMemory {
    /// Its number in the sandbox' pid namespace.
    pub host_pid: u32,
    /// Memory that it does not share with its file (`RssAnon` of proc_pid_status(5)), in KiB.
    pub resident_kib: u32,
}

/// Body of [`super::MSG_OOM_KILLED`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct OomKilled {
    /// One of `OOM_*`.
    pub outcome: u32,
    /// The guest's process id, with [`OOM_KILLED`]; as what follows, 0 otherwise.
    pub pid: u32,
    /// Its memory, as the host has said.
    pub resident_kib: u32,
    /// Zero.
    pub reserved: u32,
    /// Its name, with zeros behind it (`PR_SET_NAME`).
    pub name: [u8; 16],
}

/// How long the other processes wait for the memory of one that is being ended, in nanoseconds.
pub const OOM_WAIT_NS: u64 = 1_000_000_000;
/// A process was ended.
pub const OOM_KILLED: u32 = 1;
/// A process is just ending, which has memory.
pub const OOM_UNDER_WAY: u32 = 2;
/// No process can be ended but the first, with which the sandbox would end.
pub const OOM_NOBODY: u32 = 3;
