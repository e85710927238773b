//! What a sandbox reports of its program to those who build functions: what copies lose, what was denied,
//! what it lacks, what it has written.

use bytemuck::{Pod, Zeroable};

use super::running::Address;

/// Body of [`super::MSG_LOSES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Losses {
    /// How many connections.
    pub connections: u32,
    /// How many connected sockets of datagrams that have sent something. Kernels that do not
    /// know of it say 0.
    pub datagrams: u32,
    /// Where the first connection leads; without connections, the first socket of datagrams.
    pub peer: Address,
}

/// Most bytes of the name in [`super::MSG_DENIED`] (RFC 1035, section 2.3.4).
pub const DENIED_NAME_MAX: usize = 255;
/// Most denials of which one [`super::MSG_DENIED`] tells.
pub const DENIALS_AT_ONCE_MAX: u32 = 64;

/// Body of [`super::MSG_DENIED`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DeniedWay {
    /// Where it leads; of no family, if a name was looked up.
    pub to: Address,
    /// How many were denied since the last message, with this one; [`DENIALS_AT_ONCE_MAX`] at most,
    /// and not 0.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

/// Most bytes of the name in [`super::MSG_LACKS`]; what is longer is cut.
pub const LACK_NAME_MAX: usize = 255;
/// Most programs of which a sandbox tells in one boot.
pub const LACKS_TOLD_MAX: usize = 16;

/// Body of [`super::MSG_LACKS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Lack {
    /// One of `LACK_*`.
    pub kind: u32,
    /// Zero.
    pub reserved: u32,
    /// Bytes, as the kind says; 0 with [`LACK_PROGRAM`].
    pub bytes: u64,
}

/// A program that does not exist: a path, or a name without a slash that was looked for in several
/// directories.
pub const LACK_PROGRAM: u32 = 1;
/// So many bytes of memory at once, which are more than the sandbox may have at all.
pub const LACK_MEMORY: u32 = 2;
/// Room for more files beside those that take so many bytes.
pub const LACK_FILE_ROOM: u32 = 3;
/// Most paths that [`super::MSG_WRITTEN`] names.
pub const WRITTEN_PATHS_MAX: usize = 8;
/// Most bytes of these paths.
pub const WRITTEN_MAX: usize = 4608;

/// Body of [`super::MSG_WRITTEN`]. Caches, and what lies in `/tmp` and its like, do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Written {
    /// Regular files that are new or changed.
    pub files: u32,
    /// New directories that are empty.
    pub directories: u32,
    /// 1: there are so many that not all were looked at.
    pub is_partial: u32,
    /// Zero.
    pub reserved: u32,
}
