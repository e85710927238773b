//! What a sandbox asks its host for.

use bytemuck::{Pod, Zeroable};

use super::running::Address;

/// Modes of a terminal: `struct termios` of the kernel ABI (ioctl_tty(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct TerminalMode {
    /// Input modes.
    pub input: u32,
    /// Output modes.
    pub output: u32,
    /// Control modes; the host's terminal keeps its own.
    pub control: u32,
    /// Local modes.
    pub local: u32,
    /// Line discipline; the host's terminal keeps its own.
    pub line: u8,
    /// Special characters.
    pub characters: [u8; 19],
    /// When to change: at once (0), after output (1), or after output and
    /// dropping input (2), as `TCSANOW`, `TCSADRAIN` and `TCSAFLUSH`.
    pub when: u32,
}

/// Body of [`super::MSG_OPEN_BLOB`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct OpenBlob {
    /// Number of the blob in the sandbox's rootfs index.
    pub blob: u32,
    /// Zero.
    pub reserved: u32,
}

/// Bytes in both directions, in order (`SOCK_STREAM`, TCP).
pub const TRANSPORT_STREAM: u32 = 1;
/// Datagrams (`SOCK_DGRAM`, UDP).
pub const TRANSPORT_DATAGRAM: u32 = 2;

/// Body of [`super::MSG_OPEN_SOCKET`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct OpenSocket {
    /// The destination.
    pub to: Address,
    /// `TRANSPORT_*`.
    pub transport: u32,
    /// Zero.
    pub reserved: u32,
}

/// The connection is to be made again, when it is first used, in copies of what
/// is frozen while it is open.
pub const SOCKET_RECONNECTS: u32 = 1 << 0;

/// Tail of the reply to [`super::MSG_OPEN_SOCKET`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct OpenedSocket {
    /// `SOCKET_*`.
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// Body of [`super::MSG_FS_LIST`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ListDirectory {
    /// Number of entries to skip, in the host's sorted order.
    pub skip: u64,
}

/// One entry in the reply to [`super::MSG_FS_LIST`]; `name_len` bytes follow, padded
/// with zeros to a multiple of 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct DirectoryEntry {
    /// Inode number on the host.
    pub inode: u64,
    /// File type as in `d_type` (readdir(3)).
    pub file_type: u32,
    /// Bytes of the name.
    pub name_len: u32,
}

/// Attributes of a host file, as in `struct stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FileAttributes {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Bytes.
    pub size: u64,
    /// Last modification, seconds since the epoch.
    pub mtime_sec: i64,
    /// Nanoseconds of the last modification.
    pub mtime_nsec: u32,
    /// Type and permissions (inode(7)).
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Hard links.
    pub nlink: u32,
    /// Device number of a special file.
    pub rdev: u32,
}
