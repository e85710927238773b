//! What a sandbox hears and says while it runs.

use bytemuck::{Pod, Zeroable};

/// What a shell says of a program that is not there (POSIX, Shell Command Language, 2.8.2).
pub const EXIT_NOT_FOUND: u8 = 127;
/// What a shell says of a program that is there and cannot be executed.
pub const EXIT_NOT_EXECUTABLE: u8 = 126;

/// Body of [`super::MSG_OUTGOING`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Outgoing {
    /// [`super::FLAG_EGRESS`], with or without [`super::FLAG_EGRESS_V6`].
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// Body of [`super::MSG_LIMITS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Limits {
    /// Bytes of memory; 0 means no limit.
    pub memory: u64,
    /// Number of virtual CPUs.
    pub cpus: u32,
    /// Zero.
    pub reserved: u32,
}

/// An Internet address: `AF_INET` uses the first four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Address {
    /// The address, network byte order.
    pub bytes: [u8; 16],
    /// `AF_INET` (2) or `AF_INET6` (10).
    pub family: u16,
    /// Port, host byte order.
    pub port: u16,
    /// Zero.
    pub reserved: u32,
}

/// Added to [`Connection::id`] in a boot command: the sandbox had the connection of this number
/// when it was frozen, and has it still. The host's numbers never have this bit.
pub const CONNECTION_GOES_ON: u64 = 1 << 63;

/// Body of [`super::MSG_CONNECTION`]; the descriptor is the connected socket,
/// non-blocking.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Connection {
    /// The host's number for the connection.
    pub id: u64,
    /// Address of the client.
    pub peer: Address,
    /// Address that the client connected to; its port is the function's own.
    pub local: Address,
}

/// Body of [`super::MSG_DESCRIBED`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Described {
    /// TCP ports on which the program listens, the lowest ones in ascending order; 0 behind them.
    pub ports: [u16; 8],
    /// How many threads can run.
    pub runnable: u32,
    /// The process id of one of them.
    pub process: u32,
    /// Its own name (`comm`, proc_pid_comm(5)), with zeros behind it.
    pub name: [u8; 16],
}

/// Body of [`super::MSG_ACTIVITY`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Activity {
    /// System calls of all threads since the host has asked before.
    pub calls: u64,
    /// Timers that are to fire.
    pub timers: u32,
    /// Threads that wait for something that is sure to come.
    pub uninterruptible: u32,
    /// 1: it is the first description, and nothing was counted before.
    pub is_first: u32,
    /// Zero.
    pub reserved: u32,
}

/// Most bytes of names behind an [`Activity`].
pub const ACTIVITY_NAMES_MAX: usize = 128;

/// Body of [`super::MSG_REPLY`], answering the request with the header's `sequence`.
/// A tail may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Reply {
    /// 0, or a positive `errno`.
    pub errno: i32,
    /// Zero.
    pub reserved: u32,
}

/// Body of [`super::MSG_SIGNAL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Signal {
    /// Signal number, 1 to 64.
    pub number: u32,
    /// Zero.
    pub reserved: u32,
}

/// Most bytes of a host name (`HOST_NAME_MAX` of gethostname(2)).
pub const HOST_NAME_MAX: usize = 64;

/// Body of [`super::MSG_HOST_NAME`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct HostName {
    /// The name, and zeros behind it.
    pub bytes: [u8; HOST_NAME_MAX],
}

impl HostName {
    /// Of a name; `None`: it is empty or too long, or has zeros in it.
    pub fn new(name: &str) -> Option<Self> {
        let mut bytes = [0; HOST_NAME_MAX];
        bytes.get_mut(..name.len())?.copy_from_slice(name.as_bytes());
        (!name.is_empty() && !name.contains('\0')).then_some(Self { bytes })
    }

    /// The name.
    pub fn name(&self) -> &[u8] {
        self.bytes.split(|&byte| byte == 0).next().unwrap_or_default()
    }
}

/// Size of a terminal, in characters. Body of [`super::MSG_WINDOW_SIZE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct WindowSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
    /// Zero.
    pub reserved: u32,
}

/// Body of [`super::MSG_CONNECTION_CLOSED`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ConnectionClosed {
    /// The number from [`Connection::id`].
    pub id: u64,
}

/// Body of [`super::MSG_EXIT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Exit {
    /// Exit code, if `signal` is 0.
    pub code: u32,
    /// Signal that ended the process, or 0.
    pub signal: u32,
}
