//! What a host asks of a sandbox that runs: processes and files inside it, from outside.
//!
//! Messages travel over the control socket, as those of [`crate::control`]. Numbers 80 to 99 go to
//! the sandbox, 180 to 199 come from there. Kernels that do not know of them do not answer.
//!
//! # Files
//!
//! [`MSG_FILES`] brings a connected stream socket, over which the host asks and the sandbox
//! answers, one request after the other, until the host closes it:
//!
//! ```text
//! request   FileRequest, path, other path; for FILE_WRITE then pieces
//! answer    FileAnswer; if its `errno` is 0, for FILE_READ and FILE_LIST then pieces
//! piece     u32 length, bytes; a length of 0 is the end, FILE_FAILED + errno an end before its time
//! ```
//!
//! A path is resolved in the sandbox, with the rights of the session's user.

use bytemuck::{Pod, Zeroable};

use crate::control::WindowSize;

// Host → sandbox.

/// Start a process: [`Exec`]. Descriptors: three connected stream sockets, which become standard
/// input, output and error; with [`EXEC_TERMINAL`] one, which is the other side of its terminal.
/// The answer is [`MSG_EXEC_STARTED`], [`MSG_EXEC_FAILED`], [`MSG_EXEC_NOT_FOUND`] or
/// [`MSG_EXEC_NOT_EXECUTABLE`].
pub const MSG_EXEC: u32 = 80;
/// Send a signal to such a process: [`ExecSignal`]. Nothing happens if it has ended.
pub const MSG_EXEC_SIGNAL: u32 = 81;
/// The window of its terminal has another size: [`ExecWindow`].
pub const MSG_EXEC_WINDOW: u32 = 82;
/// Serve files: [`Files`]. One descriptor: the connected stream socket of the session.
pub const MSG_FILES: u32 = 83;
/// Connect to a port on which something in the sandbox listens: [`Port`]. One descriptor: a
/// connected stream socket, which becomes the listener's client. The sandbox's first four bytes on
/// it are an `i32`: 0, or a positive `errno` before its end; `ECONNREFUSED` if nobody listens. The
/// bytes of the connection follow.
pub const MSG_PORT: u32 = 84;
/// In a copy that was thawed with [`FLAG_EXECS_GO_ON`], or after [`MSG_EXECS_WAIT`]: a process goes
/// on that the host has asked for in an earlier boot, or that the host before this one has:
/// [`ExecGoesOn`]. Descriptors as for [`MSG_EXEC`]; its streams lead to them from now on. The answer is [`MSG_EXEC_STARTED`], and [`MSG_EXEC_ENDED`] behind it if the process
/// has ended since the thaw; [`MSG_EXEC_FAILED`] if there is none of that number.
///
/// [`FLAG_EXECS_GO_ON`]: crate::control::FLAG_EXECS_GO_ON
pub const MSG_EXEC_GOES_ON: u32 = 85;
/// All that go on were named. The streams of others are at their end, and nobody hears of them any
/// more. No body.
pub const MSG_EXECS_GO_ON: u32 = 86;
/// This host goes, and another one comes, which says what goes on as in a copy. Streams that end
/// before that wait. No body. The answer is [`MSG_EXECS_WAITING`].
pub const MSG_EXECS_WAIT: u32 = 87;

// Sandbox → host.

/// The process is there: [`ExecStarted`].
pub const MSG_EXEC_STARTED: u32 = 180;
/// It has ended: [`ExecEnded`].
pub const MSG_EXEC_ENDED: u32 = 181;
/// It could not be started: [`ExecFailed`].
pub const MSG_EXEC_FAILED: u32 = 182;
/// The same, since there is no such program. A kernel that does not know of this kind says
/// [`MSG_EXEC_FAILED`].
pub const MSG_EXEC_NOT_FOUND: u32 = 183;
/// The same, since the program cannot be executed.
pub const MSG_EXEC_NOT_EXECUTABLE: u32 = 184;
/// From now on they wait ([`MSG_EXECS_WAIT`]). No body.
pub const MSG_EXECS_WAITING: u32 = 185;

/// Most processes of [`MSG_EXEC`] that live in a sandbox at a time.
pub const EXECS_MAX: usize = 256;
/// Most sessions of [`MSG_FILES`] of a sandbox at a time.
pub const FILE_SESSIONS_MAX: usize = 32;

/// Most connections of [`MSG_PORT`] of a sandbox at a time, which the host counts.
pub const PORT_CONNECTIONS_MAX: usize = 256;

/// It has a terminal of its own.
pub const EXEC_TERMINAL: u32 = 1 << 0;

/// Body of [`MSG_EXEC`]. Tail: NUL-terminated strings: user (empty: that of the first process; a
/// name or a number, and perhaps `:` and a group), working directory (empty: that of the first
/// process), then `argv_count` arguments, at least one, then `env_count` environment strings,
/// which are added to those that the first process was started with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Exec {
    /// The host's number for the process, by which messages name it.
    pub id: u64,
    /// `EXEC_*`.
    pub flags: u32,
    /// Number of arguments.
    pub argv_count: u32,
    /// Number of environment strings.
    pub env_count: u32,
    /// Zero.
    pub reserved: u32,
    /// Size of the terminal, if there is one.
    pub window: WindowSize,
}

/// Body of [`MSG_EXEC_SIGNAL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ExecSignal {
    /// That of [`Exec`].
    pub id: u64,
    /// Signal number, 1 to 64.
    pub number: u32,
    /// 0: to the process; 1: to its process group.
    pub group: u32,
}

/// Body of [`MSG_EXEC_WINDOW`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ExecWindow {
    /// That of [`Exec`].
    pub id: u64,
    /// The size.
    pub window: WindowSize,
}

/// Body of [`MSG_EXEC_GOES_ON`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ExecGoesOn {
    /// The number that the host had for it.
    pub earlier: u64,
    /// The number that it has from now on.
    pub id: u64,
}

/// Body of [`MSG_EXEC_STARTED`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ExecStarted {
    /// That of [`Exec`].
    pub id: u64,
    /// Process id in the sandbox.
    pub pid: u32,
    /// Zero.
    pub reserved: u32,
}

/// Body of [`MSG_EXEC_ENDED`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ExecEnded {
    /// That of [`Exec`].
    pub id: u64,
    /// Exit code, if `signal` is 0.
    pub code: u32,
    /// Signal that ended the process, or 0.
    pub signal: u32,
}

/// Body of [`MSG_EXEC_FAILED`] and of those that say more. Tail: UTF-8 text, one sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ExecFailed {
    /// That of [`Exec`].
    pub id: u64,
}

/// Body of [`MSG_FILES`]. Tail: the user, as for [`Exec`], NUL-terminated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Files {
    /// Zero.
    pub reserved: u64,
}

/// Body of [`MSG_PORT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Port {
    /// TCP port, 1 to 65,535, whatever address its listener has.
    pub port: u32,
    /// Zero.
    pub reserved: u32,
}

/// Attributes of the file, of a symbolic link itself with [`FILE_NO_FOLLOW`].
pub const FILE_STAT: u32 = 1;
/// Entries of a directory. Pieces: one [`FileAttributes`](crate::control::FileAttributes) and a
/// name each.
pub const FILE_LIST: u32 = 2;
/// Contents of a regular file, from [`FileRequest::offset`] on, at most [`FileRequest::len`] bytes.
pub const FILE_READ: u32 = 3;
/// Write a regular file, which is made or emptied first unless `FILE_*` flags say otherwise.
pub const FILE_WRITE: u32 = 4;
/// Make a directory, with those above it with [`FILE_PARENTS`].
pub const FILE_MAKE_DIRECTORY: u32 = 5;
/// Give a file the other path as its name.
pub const FILE_RENAME: u32 = 6;
/// Remove a file, or a directory, with all in it with [`FILE_RECURSIVE`].
pub const FILE_REMOVE: u32 = 7;
/// Make a symbolic link whose target is the other path.
pub const FILE_SYMLINK: u32 = 8;
/// Target of a symbolic link, as the answer's bytes.
pub const FILE_READ_LINK: u32 = 9;
/// Change permissions and times: what `FILE_SET_*` flags say.
pub const FILE_CHANGE: u32 = 10;
/// Watch a directory, with [`FILE_RECURSIVE`] with those in it. Pieces, until the host closes the
/// session: one [`WatchEvent`] and the path of the file in the directory each. The end comes
/// before its time when the directory is gone (`ENOENT`), or events were lost (`EOVERFLOW`).
pub const FILE_WATCH: u32 = 11;
/// Mount a volume at an absolute path, where directories are made that are missing, for all processes:
/// [`FileRequest::mode`] is [`MOUNT_VOLUME`](crate::bind::MOUNT_VOLUME) or
/// [`MOUNT_VOLUME_WRITABLE`](crate::bind::MOUNT_VOLUME_WRITABLE), [`FileRequest::offset`] the number of
/// the mount, which the host knows already. The answer comes when it is there. It stays in copies, for
/// which the host has to know it by the same number. Kernels that do not know of it say `ENOSYS`.
pub const FILE_MOUNT: u32 = 12;

/// Not to the file that a symbolic link leads to, but to the link.
pub const FILE_NO_FOLLOW: u32 = 1 << 0;
/// Make directories that are missing.
pub const FILE_PARENTS: u32 = 1 << 1;
/// With all that is in it.
pub const FILE_RECURSIVE: u32 = 1 << 2;
/// Write at the end of what is there.
pub const FILE_APPEND: u32 = 1 << 3;
/// Fail if the file exists.
pub const FILE_EXCLUSIVE: u32 = 1 << 4;
/// The permissions are [`FileRequest::mode`]; otherwise they are those of new files.
pub const FILE_SET_MODE: u32 = 1 << 5;
/// The time of the last modification is [`FileRequest::mtime`].
pub const FILE_SET_TIME: u32 = 1 << 6;

/// Longest path in a request, in bytes.
pub const FILE_PATH_MAX: usize = 4095;
/// Most bytes of a piece.
pub const FILE_PIECE_MAX: usize = 32 * 1024;
/// Added to an errno: a piece that is none, but says that the rest does not come.
pub const FILE_FAILED: u32 = 1 << 31;

/// A request of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FileRequest {
    /// `FILE_STAT` and others.
    pub operation: u32,
    /// `FILE_*` flags.
    pub flags: u32,
    /// Bytes of the path.
    pub path_len: u32,
    /// Bytes of the other path.
    pub other_len: u32,
    /// Where to begin.
    pub offset: u64,
    /// Most bytes to read; `u64::MAX`: all.
    pub len: u64,
    /// Permissions.
    pub mode: u32,
    /// Zero.
    pub reserved: u32,
    /// Last modification, in seconds since the epoch.
    pub mtime: i64,
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FileAnswer {
    /// 0, or a positive `errno`.
    pub errno: i32,
    /// Bytes that follow, before any pieces.
    pub len: u32,
    /// Attributes of the file, where the operation has one.
    pub attributes: crate::control::FileAttributes,
}

/// Something was created.
pub const WATCH_CREATED: u32 = 1;
/// Contents have changed.
pub const WATCH_WRITTEN: u32 = 2;
/// Something was removed.
pub const WATCH_REMOVED: u32 = 3;
/// Something has another name, or is elsewhere, from now on.
pub const WATCH_RENAMED: u32 = 4;
/// Attributes have changed.
pub const WATCH_CHANGED: u32 = 5;

/// Something that has happened in a directory which is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct WatchEvent {
    /// `WATCH_*`.
    pub what: u32,
    /// Zero.
    pub reserved: u32,
}
