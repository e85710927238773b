//! The control protocol between a sandbox and its host.
//!
//! The control socket is a `SOCK_SEQPACKET` Unix socket at
//! [`crate::layout::CONTROL_FD`]. One packet is one message: a
//! [`MessageHeader`], a body that depends on the kind, and a tail of variable
//! length that the body describes. Descriptors travel as `SCM_RIGHTS`, in the
//! order that the body's documentation gives.
//!
//! The host treats every message of a sandbox as hostile. The sandbox trusts
//! the host.

use bytemuck::{Pod, Zeroable};

/// Largest message, header included, in bytes.
pub const MESSAGE_MAX: usize = 160 * 1024;
/// Most descriptors in one message (`SCM_MAX_FD` of the host kernel is 253).
pub const MESSAGE_MAX_FDS: usize = 250;

/// Start of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MessageHeader {
    /// One of the `MSG_*` constants.
    pub kind: u32,
    /// Bytes after the header.
    pub len: u32,
    /// Number of the request that a [`MSG_REPLY`] answers; 0 otherwise. A
    /// sandbox numbers its requests from 1.
    pub sequence: u64,
}

// Host → sandbox.

/// Start a program in a fresh sandbox: [`Start`]. Descriptors: the rootfs index, if
/// it has one. [`MSG_STDIO`] follows.
pub const MSG_START: u32 = 1;
/// Become a copy of a frozen image: [`Thaw`].
pub const MSG_THAW: u32 = 2;
/// A client has connected: [`Connection`], one descriptor.
pub const MSG_CONNECTION: u32 = 3;
/// The answer to a request: [`Reply`].
pub const MSG_REPLY: u32 = 4;
/// Send a signal to the first guest process: [`Signal`].
pub const MSG_SIGNAL: u32 = 5;
/// Go on after [`MSG_ENTRY_POINT`]; no body.
pub const MSG_RESUME: u32 = 6;
/// The size of the controlling terminal changed: [`WindowSize`].
pub const MSG_WINDOW_SIZE: u32 = 7;
/// Come to rest and report with [`MSG_ENTRY_POINT`] as soon as possible; no body.
pub const MSG_FREEZE: u32 = 8;
/// Go on, to a copy that waits since [`THAW_AND_HOLD`] or [`MSG_FORK`]: [`Identity`].
pub const MSG_GO: u32 = 9;
/// Fork a copy, to a template ([`THAW_AS_TEMPLATE`]): [`Fork`]. The copy gives up
/// the template's rights, says [`MSG_READY`] on its own control socket and waits
/// for [`MSG_GO`] there.
pub const MSG_FORK: u32 = 10;
/// The standard streams of a program that [`MSG_START`] starts; no body. Three
/// descriptors, which take the numbers 0 to 2: a sandbox can use read(2) on these
/// numbers only, and until now it had `/dev/null` there.
pub const MSG_STDIO: u32 = 11;
/// Whoever has served the sandbox has ended, and somebody else serves it; no body. Requests
/// without an answer may be lost: ask again.
pub const MSG_RENEWED: u32 = 12;
/// Come to rest at once, whatever the threads are doing, and report with
/// [`MSG_ENTRY_POINT`]: [`Checkpoint`], or no body for one without flags. The sandbox goes on
/// afterwards as if nothing had been.
pub const MSG_CHECKPOINT: u32 = 13;
/// The memory of the twin ([`EntryPoint::process`]) has been read: end it. No body.
pub const MSG_TWIN_READ: u32 = 14;
/// Say what the program does ([`MSG_DESCRIBED`]); no body.
pub const MSG_DESCRIBE: u32 = 15;
/// The sandbox has other limits from now on: [`Limits`]. Kernels that do not know of it say the
/// old ones.
pub const MSG_LIMITS: u32 = 16;
/// The sandbox has used up its memory: end a process, as Linux does when memory runs out.
/// [`OutOfMemory`], then its [`ProcessMemory`], those with most memory first. The answer is
/// [`MSG_OOM_KILLED`], and the other processes wait until [`MSG_MEMORY_IS_BACK`], but no longer than
/// [`OOM_WAIT_NS`]. Kernels that do not know of it are not asked.
pub const MSG_OUT_OF_MEMORY: u32 = 17;
/// There is enough memory again; no body.
pub const MSG_MEMORY_IS_BACK: u32 = 18;
/// The sandbox has another host name from now on: [`HostName`]. `/etc/hosts` has it in the place of the
/// one before. Kernels that do not know of it keep that.
pub const MSG_HOST_NAME: u32 = 19;
/// The sandbox may have outgoing connections from now on, and so may copies of it: [`Outgoing`].
/// Kernels that do not know of it go on without.
pub const MSG_OUTGOING: u32 = 108;

// Host → sandbox, to hibernate it in place (Hibernate Container, §3.1).

/// Come to rest, when no thread can run, in order to be hibernated: [`Rest`]. The sandbox
/// answers with [`MSG_RESTING`].
pub const MSG_REST: u32 = 20;
/// Give up the memory that a swap file holds: [`Hibernate`]. One descriptor: that file,
/// read-only. The answer is [`MSG_HIBERNATED`], or [`MSG_AWAKE`] if the sandbox has gone on
/// meanwhile.
pub const MSG_HIBERNATE: u32 = 21;
/// Wake, or rest no more; no body. Every other message wakes, too.
pub const MSG_WAKE: u32 = 22;
/// As [`MSG_HIBERNATE`], with a second descriptor: the reading end of a pipe, the *gate*. The
/// host empties the file after [`MSG_HIBERNATED`]. Who wakes asks for its content
/// ([`MSG_UNSEAL`]) and waits until the gate has a byte; if it is closed instead there is none.
pub const MSG_HIBERNATE_SEALED: u32 = 90;
/// Give back pages that are equal to those of the files that they are private copies of: [`Trim`]. A
/// sandbox that has gone on since that rest ignores it.
pub const MSG_TRIM: u32 = 91;

// Sandbox → host.

/// The zygote is set up and waits for [`MSG_START`] or [`MSG_THAW`], the held
/// or forked copy for [`MSG_GO`], the template for [`MSG_FORK`]; no body.
pub const MSG_READY: u32 = 101;
/// Phases of a boot: [`Booted`]. Sent after the first response byte, or when
/// the sandbox first waits, whichever comes first.
pub const MSG_BOOTED: u32 = 102;
/// All guest threads wait at the entry point: [`EntryPoint`]. The sandbox does
/// nothing until [`MSG_RESUME`], unless it has a twin.
pub const MSG_ENTRY_POINT: u32 = 103;
/// The guest has closed a connection: [`ConnectionClosed`].
pub const MSG_CONNECTION_CLOSED: u32 = 104;
/// The first guest process has ended: [`Exit`]. The last message.
pub const MSG_EXIT: u32 = 105;
/// The host refused or the kernel failed to start or thaw: UTF-8 text, one sentence. If it is the program
/// that cannot be started, [`MSG_EXIT`] follows with [`EXIT_NOT_FOUND`] or [`EXIT_NOT_EXECUTABLE`].
pub const MSG_FAILED: u32 = 106;
/// What a shell says of a program that is not there (POSIX, Shell Command Language, 2.8.2).
pub const EXIT_NOT_FOUND: u8 = 127;
/// What a shell says of a program that is there and cannot be executed.
pub const EXIT_NOT_EXECUTABLE: u8 = 126;
/// What the program does, as [`MSG_DESCRIBE`] has asked: [`Described`].
pub const MSG_DESCRIBED: u32 = 107;
/// What the program has done since it was asked last, before [`MSG_DESCRIBED`]: [`Activity`], then
/// the names of the system calls that the thread in [`Described`] has made most, with commas
/// between them. Older kernels do not say it.
pub const MSG_ACTIVITY: u32 = 109;

/// What became of [`MSG_OUT_OF_MEMORY`]: [`OomKilled`].
pub const MSG_OOM_KILLED: u32 = 110;

/// All guest threads wait, as [`MSG_REST`] has asked: [`Resting`]. Nothing of the memory
/// changes until the sandbox says [`MSG_AWAKE`].
pub const MSG_RESTING: u32 = 120;
/// The sandbox has given up its memory; no body. It waits for a message, or for what else
/// may wake it.
pub const MSG_HIBERNATED: u32 = 121;
/// The sandbox goes on: [`Awake`].
pub const MSG_AWAKE: u32 = 122;
/// The sandbox wakes and needs the content of its file ([`MSG_HIBERNATE_SEALED`]); no body.
pub const MSG_UNSEAL: u32 = 190;

// Requests, sandbox → host, each answered by [`MSG_REPLY`].

/// Open a blob of the rootfs read-only: [`OpenBlob`]. The reply has one descriptor.
pub const MSG_OPEN_BLOB: u32 = 201;
/// Attributes of a file of the host directory: the tail is a path. The reply's
/// tail is a [`FileAttributes`].
pub const MSG_FS_STAT: u32 = 202;
/// Entries of a directory: [`ListDirectory`], then a path. The reply's tail is
/// a sequence of [`DirectoryEntry`] each followed by its name, padded to 8
/// bytes; an empty tail is the end.
pub const MSG_FS_LIST: u32 = 203;
/// Target of a symbolic link: the tail is a path; the reply's tail is the target.
pub const MSG_FS_READLINK: u32 = 204;
/// Open a regular file read-only: the tail is a path. The reply has one
/// descriptor and a [`FileAttributes`] tail.
pub const MSG_FS_OPEN: u32 = 205;
/// Give me memory that my processes can share: a memory file of [`crate::layout::ARENA_FILE_SIZE`]
/// bytes, all zeros. Without body; granted once. Reply: that file.
pub const MSG_MEMORY_FILE: u32 = 211;
/// Give me a wake socket, with which my processes wake each other: a pair of connected,
/// non-blocking stream sockets. Without body; granted twice. Reply: first the end
/// that sends, then the end that receives.
pub const MSG_WAKE_SOCKET: u32 = 212;
/// A socket to a destination outside: [`OpenSocket`]. The reply has one
/// descriptor: a non-blocking socket that is connected, or whose connection is
/// in progress (its outcome is what the socket's readiness and a receive tell), and
/// [`OpenedSocket`] as tail.
/// The reply may take a while, if the host must look up names first. Errors:
/// `ENETUNREACH` if the sandbox has no outgoing connections at all, `EACCES` if
/// its egress policy forbids the destination, `EAGAIN` if it has asked for too
/// many too fast, and those of socket(2) and connect(2).
pub const MSG_OPEN_SOCKET: u32 = 221;

/// Modes of the terminal behind the standard streams; no body. The reply's tail
/// is a [`TerminalMode`].
pub const MSG_TERMINAL_GET: u32 = 241;
/// Change the modes of the terminal behind the standard streams:
/// [`TerminalMode`]. The host puts the old ones back when the sandbox ends.
pub const MSG_TERMINAL_SET: u32 = 242;

/// A request on a directory of the host that is mounted in the sandbox; see
/// [`crate::bind`].
pub const MSG_BIND: u32 = 231;

/// The rootfs is an index file, which comes as a descriptor.
pub const ROOTFS_INDEX: u32 = 0;
/// The rootfs is a host directory, asked for through `MSG_FS_*`. Paths in these
/// messages have no leading slash, and the host follows no symbolic link.
pub const ROOTFS_HOST: u32 = 1;

/// Trace system calls to the console descriptor.
pub const FLAG_TRACE_SYSCALLS: u32 = 1 << 0;
/// Standard input is a terminal.
pub const FLAG_STDIN_TTY: u32 = 1 << 1;
/// Standard output is a terminal.
pub const FLAG_STDOUT_TTY: u32 = 1 << 2;
/// Standard error is a terminal.
pub const FLAG_STDERR_TTY: u32 = 1 << 3;
/// Send [`MSG_ENTRY_POINT`] when the program first waits for a client on
/// [`Start::port`].
pub const FLAG_FREEZE_AT_ENTRY: u32 = 1 << 4;
/// Never patch system call sites: every call takes the trap.
pub const FLAG_NO_PATCHING: u32 = 1 << 5;
/// Never map lazily at thaw: every mapping is eager.
pub const FLAG_NO_LAZY: u32 = 1 << 6;
/// Map lazily page by page, so that it can be seen from outside which pages are touched.
pub const FLAG_BY_PAGE: u32 = 1 << 7;
// Bits 8 and 9: [`crate::cpu::Baseline`].

/// The sandbox may have outgoing connections: [`MSG_OPEN_SOCKET`], and the
/// addresses of [`crate::network`].
pub const FLAG_EGRESS: u32 = 1 << 16;
/// The host has IPv6, too.
pub const FLAG_EGRESS_V6: u32 = 1 << 17;

/// Body of [`MSG_OUTGOING`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Outgoing {
    /// [`FLAG_EGRESS`], with or without [`FLAG_EGRESS_V6`].
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// Body of [`MSG_LIMITS`].
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

/// Clients of the function send datagrams: a [`MSG_CONNECTION`] brings a
/// `SOCK_SEQPACKET` socket over which one client's datagrams come and go.
pub const FLAG_ENTRY_UDP: u32 = 1 << 18;
/// The function reads its request from standard input: a [`MSG_CONNECTION`]
/// brings a stream socket that becomes standard input and output.
pub const FLAG_ENTRY_STDIN: u32 = 1 << 19;
/// That the program waits for a client is no reason to freeze it: only
/// `/dev/thaw`, [`Start::entry_signal`] and [`MSG_FREEZE`] are.
pub const FLAG_ENTRY_ASKED: u32 = 1 << 20;

/// The sandbox has a directory for secrets ([`SECRETS_DIRECTORY`]), which is empty until a copy
/// gets some.
pub const FLAG_SECRETS: u32 = 1 << 21;

/// The sandbox is to become a runtime template, with [`FLAG_FREEZE_AT_ENTRY`]: who looks for
/// [`START_PATH`] asks for the freeze, as by a write to `/dev/thaw`. In a copy, the call is made again.
/// Kernels that do not know of it are not asked for it.
pub const FLAG_START_PATH: u32 = 1 << 22;
/// The path of no file. An interpreter that takes the place of its program for this one is frozen
/// when it first looks for its program.
pub const START_PATH: &str = "/dev/thaw-start";

/// Where a program finds its secrets, one a file.
pub const SECRETS_DIRECTORY: &str = "/run/secrets";
/// Most bytes of the secrets of one copy, as they are said.
pub const SECRETS_MAX: usize = 32 << 10;

/// One secret. Its name and its value follow, without anything between them or behind them.
///
/// Secrets are the end of the tails of [`MSG_THAW`] and [`MSG_GO`]. Kernels that do not know of
/// them, which also do not know of [`FLAG_SECRETS`], do not look there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Secret {
    /// Bytes of the name.
    pub name_len: u32,
    /// Bytes of the value.
    pub value_len: u32,
}

/// There is no program, and no argument: the first process is the kernel's own. It asks to be
/// frozen, as a program does through `/dev/thaw`, and waits for ever. Kernels that do not know of
/// it refuse it, since they find no program.
pub const FLAG_INIT: u32 = 1 << 27;

/// Before [`MSG_ENTRY_POINT`], but for checkpoints, the sandbox says by [`MSG_LOSES`] which
/// connections copies will find reset, and by [`MSG_WRITTEN`] which files the program has written.
/// Kernels that do not know of it say nothing.
pub const FLAG_SAY_LOSSES: u32 = 1 << 28;

/// Sandbox to host: which connections to the outside copies of what is frozen next will find
/// reset, and which sockets of datagrams will have another port ([`Losses`]), if there are any.
pub const MSG_LOSES: u32 = 140;

/// Body of [`MSG_LOSES`].
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

/// The sandbox says by [`MSG_DENIED`] what it has no way to. Kernels that do not know of it say
/// nothing.
pub const FLAG_SAY_DENIALS: u32 = 1 << 29;

/// In an identity: the host says which processes that it had asked for go on in this copy
/// ([`crate::remote::MSG_EXECS_GO_ON`]). Their streams wait until then. Kernels that do not know of
/// it have all of them at their end.
pub const FLAG_EXECS_GO_ON: u32 = 1 << 30;

/// Sandbox to host: its program has wanted something outside to which it has no way, since it has
/// none at all ([`DeniedWay`]). Tail: the name that was looked up, if that was it.
pub const MSG_DENIED: u32 = 141;
/// Most bytes of the name in [`MSG_DENIED`] (RFC 1035, section 2.3.4).
pub const DENIED_NAME_MAX: usize = 255;
/// Most denials of which one [`MSG_DENIED`] tells.
pub const DENIALS_AT_ONCE_MAX: u32 = 64;

/// Body of [`MSG_DENIED`].
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

/// The sandbox says by [`MSG_LACKS`] what its program has asked for in vain. Kernels that do not know
/// of it say nothing.
pub const FLAG_SAY_LACKS: u32 = 1 << 31;

/// Sandbox to host: its program has asked for something that it does not have ([`Lack`]). Tail: the
/// program that was to be executed, for [`LACK_PROGRAM`].
pub const MSG_LACKS: u32 = 142;
/// Most bytes of the name in [`MSG_LACKS`]; what is longer is cut.
pub const LACK_NAME_MAX: usize = 255;
/// Most programs of which a sandbox tells in one boot.
pub const LACKS_TOLD_MAX: usize = 16;

/// Body of [`MSG_LACKS`].
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

/// Body of [`MSG_OUT_OF_MEMORY`].
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

/// Body of [`MSG_OOM_KILLED`].
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

/// Sandbox to host: what the program has written outside of volumes, if anything ([`Written`]).
/// Tail: the first [`WRITTEN_PATHS_MAX`] paths of [`WRITTEN_MAX`] bytes in all, each with a NUL
/// behind it; directories end with a slash.
pub const MSG_WRITTEN: u32 = 95;
/// See [`MSG_WRITTEN`].
pub const WRITTEN_PATHS_MAX: usize = 8;
/// See [`MSG_WRITTEN`].
pub const WRITTEN_MAX: usize = 4608;

/// Body of [`MSG_WRITTEN`]. Caches, and what lies in `/tmp` and its like, do not count.
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

/// Body of [`MSG_START`].
///
/// Descriptors: standard input, output and error, then, for [`ROOTFS_INDEX`],
/// the index file. Tail: NUL-terminated strings: host name, working directory,
/// program path (empty: look up `argv[0]` in `PATH`), then `argv_count`
/// arguments, then `env_count` environment strings, then `mount_count` strings,
/// each a `MOUNT_*` letter of [`crate::bind`] and the absolute path of the mount
/// point. After [`THAW_AND_START`], each [`MemoryWrite`] follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Start {
    /// Fresh randomness for this sandbox.
    pub seed: [u8; 32],
    /// Bytes of memory that the sandbox may use; 0 means no limit.
    pub memory_limit: u64,
    /// Bytes of the index file, for [`ROOTFS_INDEX`].
    pub index_len: u64,
    /// `FLAG_*`.
    pub flags: u32,
    /// `ROOTFS_*`.
    pub rootfs: u32,
    /// Port on which the function listens; 0 if it serves nobody.
    pub port: u32,
    /// Number of virtual CPUs, at least 1.
    pub cpus: u32,
    /// User id the program sees itself as.
    pub uid: u32,
    /// Group id the program sees itself as.
    pub gid: u32,
    /// Number of arguments.
    pub argv_count: u32,
    /// Number of environment strings.
    pub env_count: u32,
    /// Number of mounts besides those that every sandbox has.
    pub mount_count: u32,
    /// With [`FLAG_FREEZE_AT_ENTRY`]: the signal that freezes the program instead
    /// of being delivered; 0: none.
    pub entry_signal: u32,
    /// Size of the terminal, if there is one.
    pub window: WindowSize,
}

/// Bytes that a copy of a runtime template has in its memory when it goes on. They follow, without
/// anything between them or behind them.
///
/// Kernels that do not know of it are not asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MemoryWrite {
    /// Address of the first, in memory that the program can write to.
    pub address: u64,
    /// How many.
    pub len: u64,
}

/// Name (`argv[0]`) of a zygote that is to become a template: it has some
/// capabilities, and installs the filter that goes with them.
pub const TEMPLATE_NAME: &core::ffi::CStr = c"thaw-template";
/// Name (`argv[0]`) of a zygote that is to have one host process with one virtual CPU: it
/// installs the filter that allows no more.
pub const SINGLE_PROCESS_NAME: &core::ffi::CStr = c"thaw-single";

/// Go on at once.
pub const THAW_AND_RUN: u32 = 0;
/// Map the image and make everything ready that no identity is needed for, say
/// [`MSG_READY`], and wait for [`MSG_GO`].
pub const THAW_AND_HOLD: u32 = 1;
/// Map the image, read nothing of it, say [`MSG_READY`], and fork a copy for
/// each [`MSG_FORK`].
pub const THAW_AS_TEMPLATE: u32 = 2;
/// Become a copy of a runtime template, take the program of the [`MSG_START`] that follows
/// (without descriptors, and without mounts), and go on as that. The index is the program's
/// own; it has all inodes and blobs of the template's under the same numbers. Kernels that do
/// not know of it refuse it.
pub const THAW_AND_START: u32 = 3;
/// Go on at once with an image of several address spaces that is still being written (post-copy):
/// the memory of the kernel and of the first address space is there, and the reading end of a pipe
/// says by a byte when all is, and by its end without one that nothing more comes. Until then
/// nothing is mapped of the others. Kernels that do not know of it refuse it.
pub const THAW_POST_COPY: u32 = 4;

/// Body of [`MSG_THAW`].
///
/// Descriptors: image, index, the prefetch file if there is one, the pipe of [`THAW_POST_COPY`], then `blob_count` blobs, then those of
/// `identity`. Tail: `mapping_count`
/// [`crate::image::Mapping`], unless they are read from the image, `populate_count` [`PopulateRange`], the tail of
/// `identity`, then `blob_count` `u32` blob numbers, then each [`Secret`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Thaw {
    /// Bytes of the index file.
    pub index_len: u64,
    /// Where the mappings lie in the image; 0 if they come along.
    pub mappings_at: u64,
    /// `THAW_*`.
    pub mode: u32,
    /// Number of mappings.
    pub mapping_count: u32,
    /// Number of ranges to populate.
    pub populate_count: u32,
    /// Number of blobs whose descriptors come along.
    pub blob_count: u32,
    /// Number of blobs of the index.
    pub index_blobs: u32,
    /// Number of prefetch files that come along: 1 if mappings have
    /// [`crate::image::SOURCE_PREFETCH`], 0 otherwise.
    pub prefetch_count: u32,
    /// What makes it this copy. Only `flags` counts unless it is to go on at once.
    pub identity: Identity,
}

/// What one copy does not share with the others. Body of [`MSG_GO`].
///
/// Descriptors: `stream_count` standard streams, then one per connection. Tail: `connection_count` [`Connection`],
/// then `hostname_len` bytes of host name, padded with zeros to a multiple of 8, then, in
/// [`MSG_GO`], each [`Secret`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Identity {
    /// Fresh randomness for this copy.
    pub seed: [u8; 32],
    /// Bytes of memory that the sandbox may use; 0 means no limit.
    pub memory_limit: u64,
    /// `FLAG_*`.
    pub flags: u32,
    /// Number of connections handed in: those that go on ([`CONNECTION_GOES_ON`]), then 0 or 1.
    pub connection_count: u32,
    /// Bytes of the host name; 0 keeps the frozen one.
    pub hostname_len: u32,
    /// 2 if standard output and standard error come along; 0 if the copy keeps those
    /// that it got before. Until some came, both behave like `/dev/null`.
    pub stream_count: u32,
}

/// Body of [`MSG_FORK`]. Descriptors: the control socket; a file for each control group of
/// the copy's own, which moves the writing thread there; last, the write end of its
/// console.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Fork {
    /// User and group id of the copy, as the template's user namespace numbers them.
    pub id: u32,
    /// Zero.
    pub reserved: u32,
}

/// Populate for reading: map pages that are in the page cache.
pub const POPULATE_READ: u64 = 0;
/// Populate for writing: make private copies.
pub const POPULATE_WRITE: u64 = 1;

/// A range of the working set, populated in one call at boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PopulateRange {
    /// First byte, page aligned.
    pub start: u64,
    /// Bytes, a multiple of the page size.
    pub len: u64,
    /// [`POPULATE_READ`] or [`POPULATE_WRITE`].
    pub how: u64,
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

/// Body of [`MSG_CONNECTION`]; the descriptor is the connected socket,
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

/// Body of [`MSG_DESCRIBED`].
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

/// Body of [`MSG_ACTIVITY`].
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

/// Body of [`MSG_REPLY`], answering the request with the header's `sequence`.
/// A tail may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Reply {
    /// 0, or a positive `errno`.
    pub errno: i32,
    /// Zero.
    pub reserved: u32,
}

/// Body of [`MSG_SIGNAL`].
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

/// Body of [`MSG_HOST_NAME`].
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

/// Size of a terminal, in characters. Body of [`MSG_WINDOW_SIZE`].
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

/// Body of [`MSG_BOOTED`]: when each phase ended, in nanoseconds of the host's
/// `CLOCK_MONOTONIC`. 0: not reached yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Booted {
    /// The boot command was received.
    pub received_ns: u64,
    /// All eager mappings were in place.
    pub mapped_ns: u64,
    /// The guest's first instruction was about to run.
    pub first_instruction_ns: u64,
    /// The guest had sent its first response byte.
    pub first_byte_ns: u64,
}

/// Body of [`MSG_ENTRY_POINT`]: where the freeze report lies in the sandbox's
/// memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct EntryPoint {
    /// Address of the [`crate::freeze::ReportHeader`].
    pub report_address: u64,
    /// Bytes of the report.
    pub report_len: u64,
    /// Why: `CAUSE_*`.
    pub cause: u32,
    /// 0: the sandbox waits, and its memory does not change. Otherwise it has gone on, and a
    /// process with this number in the sandbox' pid namespace, its *twin*, holds a copy of its
    /// memory until [`MSG_TWIN_READ`].
    pub process: u32,
}

/// Body of [`MSG_CHECKPOINT`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Checkpoint {
    /// `CHECKPOINT_*`.
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// The sandbox may make a twin ([`EntryPoint::process`]), where it can, and go on at once.
pub const CHECKPOINT_TWIN: u32 = 1 << 0;

/// The program waits for its first client.
pub const CAUSE_WAITS: u32 = 1;
/// The program has written to `/dev/thaw`.
pub const CAUSE_ASKED: u32 = 2;
/// [`Start::entry_signal`] was sent.
pub const CAUSE_SIGNAL: u32 = 3;
/// The host has sent [`MSG_FREEZE`].
pub const CAUSE_HOST: u32 = 4;
/// The host has sent [`MSG_CHECKPOINT`].
pub const CAUSE_CHECKPOINT: u32 = 5;

/// A due timer of the guest ends the rest, or the hibernation. Without it, timers expire on
/// waking.
pub const REST_TIMERS: u32 = 1 << 0;
/// The rest is for [`MSG_TRIM`]: nothing is written, so that there is no report, and what was not
/// mapped yet stays so. A sandbox of several host processes goes on at once ([`AWAKE_UNANSWERED`]).
pub const REST_TO_TRIM: u32 = 1 << 1;

/// Body of [`MSG_REST`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Rest {
    /// The host's number for this rest, not 0.
    pub number: u64,
    /// `REST_*`.
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// Body of [`MSG_RESTING`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Resting {
    /// That of [`Rest`].
    pub number: u64,
    /// Address of the [`crate::freeze::ReportHeader`].
    pub report_address: u64,
    /// Bytes of the report.
    pub report_len: u64,
}

/// Body of [`MSG_TRIM`]; `count` [`TrimRange`]s follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Trim {
    /// The rest that the pages were compared in: that of [`Resting`].
    pub number: u64,
    /// Number of ranges.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

/// Most ranges in one [`Trim`].
pub const TRIM_RANGES_MAX: usize = 8192;

/// Pages of the guest, of the first process of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct TrimRange {
    /// First byte.
    pub start: u64,
    /// Bytes.
    pub len: u64,
}

/// Body of [`MSG_HIBERNATE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Hibernate {
    /// The rest that the file was written in: that of [`Resting`].
    pub number: u64,
    /// Bytes of the file.
    pub file_len: u64,
    /// Where the [`crate::image::Mapping`]s lie in the file.
    pub mappings_at: u64,
    /// Where the [`PopulateRange`]s lie in the file: what waking populates.
    pub ranges_at: u64,
    /// Number of mappings.
    pub mapping_count: u32,
    /// Number of ranges.
    pub range_count: u32,
    /// The depth of the image that the sandbox was thawed from, which is an ancestor of the
    /// file then; [`NO_DEPTH`]: the file has no ancestors.
    pub image_depth: u32,
    /// Zero.
    pub reserved: u32,
}

/// In [`Hibernate::image_depth`]: the file holds everything.
pub const NO_DEPTH: u32 = u32::MAX;

/// A message of the host is there.
pub const AWAKE_MESSAGE: u32 = 1;
/// A descriptor that the guest waits for has news: a client has sent something.
pub const AWAKE_DESCRIPTOR: u32 = 2;
/// A timer of the guest is due.
pub const AWAKE_TIMER: u32 = 3;
/// One of its host processes has not given up its memory in time.
pub const AWAKE_UNANSWERED: u32 = 4;

/// Body of [`MSG_AWAKE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Awake {
    /// The rest that it comes from: that of [`Rest`].
    pub number: u64,
    /// When it was woken, in nanoseconds of the host's `CLOCK_MONOTONIC`.
    pub woken_ns: u64,
    /// When its memory was in place again, the same.
    pub ready_ns: u64,
    /// When it had sent the first bytes of an answer, the same; 0 if it waits before it has
    /// answered anybody.
    pub answered_ns: u64,
    /// Why: `AWAKE_*`.
    pub cause: u32,
    /// Whether it had been hibernated, 0 or 1.
    pub was_hibernated: u32,
}

/// Body of [`MSG_CONNECTION_CLOSED`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ConnectionClosed {
    /// The number from [`Connection::id`].
    pub id: u64,
}

/// Body of [`MSG_EXIT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Exit {
    /// Exit code, if `signal` is 0.
    pub code: u32,
    /// Signal that ended the process, or 0.
    pub signal: u32,
}

/// Body of [`MSG_OPEN_BLOB`].
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

/// Body of [`MSG_OPEN_SOCKET`].
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

/// Tail of the reply to [`MSG_OPEN_SOCKET`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct OpenedSocket {
    /// `SOCKET_*`.
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// Body of [`MSG_FS_LIST`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ListDirectory {
    /// Number of entries to skip, in the host's sorted order.
    pub skip: u64,
}

/// One entry in the reply to [`MSG_FS_LIST`]; `name_len` bytes follow, padded
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_keep_the_tail_aligned() {
        for size in [
            size_of::<MessageHeader>(),
            size_of::<Start>(),
            size_of::<MemoryWrite>(),
            size_of::<Thaw>(),
            size_of::<Identity>(),
            size_of::<Fork>(),
            size_of::<Connection>(),
            size_of::<Reply>(),
            size_of::<Booted>(),
            size_of::<DirectoryEntry>(),
            size_of::<FileAttributes>(),
            size_of::<PopulateRange>(),
            size_of::<OpenSocket>(),
            size_of::<OpenedSocket>(),
            size_of::<TerminalMode>(),
            size_of::<Rest>(),
            size_of::<Resting>(),
            size_of::<Hibernate>(),
            size_of::<Awake>(),
        ] {
            assert_eq!(size % 8, 0);
        }
    }
}
