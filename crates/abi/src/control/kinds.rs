//! The kinds of messages, and what each is about.

// Host → sandbox.

/// Start a program in a fresh sandbox: [`super::Start`]. Descriptors: the rootfs index, if
/// it has one. [`MSG_STDIO`] follows.
pub const MSG_START: u32 = 1;
/// Become a copy of a frozen image: [`super::Thaw`].
pub const MSG_THAW: u32 = 2;
/// A client has connected: [`super::Connection`], one descriptor.
pub const MSG_CONNECTION: u32 = 3;
/// The answer to a request: [`super::Reply`].
pub const MSG_REPLY: u32 = 4;
/// Send a signal to the first guest process: [`super::Signal`].
pub const MSG_SIGNAL: u32 = 5;
/// Go on after [`MSG_ENTRY_POINT`]; no body.
pub const MSG_RESUME: u32 = 6;
/// The size of the controlling terminal changed: [`super::WindowSize`].
pub const MSG_WINDOW_SIZE: u32 = 7;
/// Come to rest and report with [`MSG_ENTRY_POINT`] as soon as possible; no body.
pub const MSG_FREEZE: u32 = 8;
/// Go on, to a copy that waits since [`super::THAW_AND_HOLD`] or [`MSG_FORK`]: [`super::Identity`].
pub const MSG_GO: u32 = 9;
/// Fork a copy, to a template ([`super::THAW_AS_TEMPLATE`]): [`super::Fork`]. The copy gives up
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
/// [`MSG_ENTRY_POINT`]: [`super::Checkpoint`], or no body for one without flags. The sandbox goes on
/// afterwards as if nothing had been.
pub const MSG_CHECKPOINT: u32 = 13;
/// The memory of the twin ([`super::EntryPoint::process`]) has been read: end it. No body.
pub const MSG_TWIN_READ: u32 = 14;
/// Say what the program does ([`MSG_DESCRIBED`]); no body.
pub const MSG_DESCRIBE: u32 = 15;
/// The sandbox has other limits from now on: [`super::Limits`]. Kernels that do not know of it say the
/// old ones.
pub const MSG_LIMITS: u32 = 16;
/// The sandbox has used up its memory: end a process, as Linux does when memory runs out.
/// [`super::OutOfMemory`], then its [`super::ProcessMemory`], those with most memory first. The answer is
/// [`MSG_OOM_KILLED`], and the other processes wait until [`MSG_MEMORY_IS_BACK`], but no longer than
/// [`super::OOM_WAIT_NS`]. Kernels that do not know of it are not asked.
pub const MSG_OUT_OF_MEMORY: u32 = 17;
/// There is enough memory again; no body.
pub const MSG_MEMORY_IS_BACK: u32 = 18;
/// The sandbox has another host name from now on: [`super::HostName`]. `/etc/hosts` has it in the place of the
/// one before. Kernels that do not know of it keep that.
pub const MSG_HOST_NAME: u32 = 19;
/// The sandbox may have outgoing connections from now on, and so may copies of it: [`super::Outgoing`].
/// Kernels that do not know of it go on without.
pub const MSG_OUTGOING: u32 = 108;

// Host → sandbox, to hibernate it in place (Hibernate Container, §3.1).

/// Come to rest, when no thread can run, in order to be hibernated: [`super::Rest`]. The sandbox
/// answers with [`MSG_RESTING`].
pub const MSG_REST: u32 = 20;
/// Give up the memory that a swap file holds: [`super::Hibernate`]. One descriptor: that file,
/// read-only. The answer is [`MSG_HIBERNATED`], or [`MSG_AWAKE`] if the sandbox has gone on
/// meanwhile.
pub const MSG_HIBERNATE: u32 = 21;
/// Wake, or rest no more; no body. Every other message wakes, too.
pub const MSG_WAKE: u32 = 22;
/// As [`MSG_HIBERNATE`], with a second descriptor: the reading end of a pipe, the *gate*. The
/// host empties the file after [`MSG_HIBERNATED`]. Who wakes asks for its content
/// ([`MSG_UNSEAL`]) and waits until the gate has a byte; if it is closed instead there is none.
pub const MSG_HIBERNATE_SEALED: u32 = 90;
/// Give back pages that are equal to those of the files that they are private copies of: [`super::Trim`]. A
/// sandbox that has gone on since that rest ignores it.
pub const MSG_TRIM: u32 = 91;

// Sandbox → host.

/// The zygote is set up and waits for [`MSG_START`] or [`MSG_THAW`], the held
/// or forked copy for [`MSG_GO`], the template for [`MSG_FORK`]; no body.
pub const MSG_READY: u32 = 101;
/// Phases of a boot: [`super::Booted`]. Sent after the first response byte, or when
/// the sandbox first waits, whichever comes first.
pub const MSG_BOOTED: u32 = 102;
/// All guest threads wait at the entry point: [`super::EntryPoint`]. The sandbox does
/// nothing until [`MSG_RESUME`], unless it has a twin.
pub const MSG_ENTRY_POINT: u32 = 103;
/// The guest has closed a connection: [`super::ConnectionClosed`].
pub const MSG_CONNECTION_CLOSED: u32 = 104;
/// The first guest process has ended: [`super::Exit`]. The last message.
pub const MSG_EXIT: u32 = 105;
/// The host refused or the kernel failed to start or thaw: UTF-8 text, one sentence. If it is the program
/// that cannot be started, [`MSG_EXIT`] follows with [`super::EXIT_NOT_FOUND`] or [`super::EXIT_NOT_EXECUTABLE`].
pub const MSG_FAILED: u32 = 106;
/// What the program does, as [`MSG_DESCRIBE`] has asked: [`super::Described`].
pub const MSG_DESCRIBED: u32 = 107;
/// What the program has done since it was asked last, before [`MSG_DESCRIBED`]: [`super::Activity`], then
/// the names of the system calls that the thread in [`super::Described`] has made most, with commas
/// between them. Older kernels do not say it.
pub const MSG_ACTIVITY: u32 = 109;
/// What became of [`MSG_OUT_OF_MEMORY`]: [`super::OomKilled`].
pub const MSG_OOM_KILLED: u32 = 110;
/// All guest threads wait, as [`MSG_REST`] has asked: [`super::Resting`]. Nothing of the memory
/// changes until the sandbox says [`MSG_AWAKE`].
pub const MSG_RESTING: u32 = 120;
/// The sandbox has given up its memory; no body. It waits for a message, or for what else
/// may wake it.
pub const MSG_HIBERNATED: u32 = 121;
/// The sandbox goes on: [`super::Awake`].
pub const MSG_AWAKE: u32 = 122;
/// The sandbox wakes and needs the content of its file ([`MSG_HIBERNATE_SEALED`]); no body.
pub const MSG_UNSEAL: u32 = 190;
/// Which connections to the outside copies of what is frozen next will find
/// reset, and which sockets of datagrams will have another port ([`super::Losses`]), if there are any.
pub const MSG_LOSES: u32 = 140;
/// Its program has wanted something outside to which it has no way, since it has
/// none at all ([`super::DeniedWay`]). Tail: the name that was looked up, if that was it.
pub const MSG_DENIED: u32 = 141;
/// Its program has asked for something that it does not have ([`super::Lack`]). Tail: the
/// program that was to be executed, for [`super::LACK_PROGRAM`].
pub const MSG_LACKS: u32 = 142;
/// What the program has written outside of volumes, if anything ([`super::Written`]).
/// Tail: the first [`super::WRITTEN_PATHS_MAX`] paths of [`super::WRITTEN_MAX`] bytes in all, each with a NUL
/// behind it; directories end with a slash.
pub const MSG_WRITTEN: u32 = 95;

// Requests, sandbox → host, each answered by [`MSG_REPLY`].

/// Open a blob of the rootfs read-only: [`super::OpenBlob`]. The reply has one descriptor.
pub const MSG_OPEN_BLOB: u32 = 201;
/// Attributes of a file of the host directory: the tail is a path. The reply's
/// tail is a [`super::FileAttributes`].
pub const MSG_FS_STAT: u32 = 202;
/// Entries of a directory: [`super::ListDirectory`], then a path. The reply's tail is
/// a sequence of [`super::DirectoryEntry`] each followed by its name, padded to 8
/// bytes, and a [`super::FileAttributes`]; of mode 0, if its attributes are to be asked for.
/// An empty tail is the end.
pub const MSG_FS_LIST: u32 = 203;
/// Target of a symbolic link: the tail is a path; the reply's tail is the target.
pub const MSG_FS_READLINK: u32 = 204;
/// Open a regular file read-only: the tail is a path. The reply has one
/// descriptor and a [`super::FileAttributes`] tail.
pub const MSG_FS_OPEN: u32 = 205;
/// Give me a socket of my own for requests about directories of the host, of the root and of bound
/// ones: as [`crate::bind::VOLUME_SOCKET`]. Without body; granted once. Reply: that socket.
pub const MSG_FS_SOCKET: u32 = 206;
/// Give me memory that my processes can share: a memory file of [`crate::layout::ARENA_FILE_SIZE`]
/// bytes, all zeros. Without body; granted once. Reply: that file.
pub const MSG_MEMORY_FILE: u32 = 211;
/// Give me a wake socket, with which my processes wake each other: a pair of connected,
/// non-blocking stream sockets. Without body; granted twice. Reply: first the end
/// that sends, then the end that receives.
pub const MSG_WAKE_SOCKET: u32 = 212;
/// A socket to a destination outside: [`super::OpenSocket`]. The reply has one
/// descriptor: a non-blocking socket that is connected, or whose connection is
/// in progress (its outcome is what the socket's readiness and a receive tell), and
/// [`super::OpenedSocket`] as tail.
/// The reply may take a while, if the host must look up names first. Errors:
/// `ENETUNREACH` if the sandbox has no outgoing connections at all, `EACCES` if
/// its egress policy forbids the destination, `EAGAIN` if it has asked for too
/// many too fast, and those of socket(2) and connect(2).
pub const MSG_OPEN_SOCKET: u32 = 221;
/// Modes of the terminal behind the standard streams; no body. The reply's tail
/// is a [`super::TerminalMode`].
pub const MSG_TERMINAL_GET: u32 = 241;
/// Change the modes of the terminal behind the standard streams:
/// [`super::TerminalMode`]. The host puts the old ones back when the sandbox ends.
pub const MSG_TERMINAL_SET: u32 = 242;
/// A request on a directory of the host that is mounted in the sandbox; see
/// [`crate::bind`].
pub const MSG_BIND: u32 = 231;
