//! Flags of [`super::Start`], [`super::Thaw`] and [`super::Identity`].

/// Trace system calls to the console descriptor.
pub const FLAG_TRACE_SYSCALLS: u32 = 1 << 0;
/// Standard input is a terminal.
pub const FLAG_STDIN_TTY: u32 = 1 << 1;
/// Standard output is a terminal.
pub const FLAG_STDOUT_TTY: u32 = 1 << 2;
/// Standard error is a terminal.
pub const FLAG_STDERR_TTY: u32 = 1 << 3;
/// Send [`super::MSG_ENTRY_POINT`] when the program first waits for a client on
/// [`super::Start::port`].
pub const FLAG_FREEZE_AT_ENTRY: u32 = 1 << 4;
/// Never patch system call sites: every call takes the trap.
pub const FLAG_NO_PATCHING: u32 = 1 << 5;
/// Never map lazily at thaw: every mapping is eager.
pub const FLAG_NO_LAZY: u32 = 1 << 6;
/// Map lazily page by page, so that it can be seen from outside which pages are touched.
pub const FLAG_BY_PAGE: u32 = 1 << 7;

// Bits 8 and 9: [`crate::cpu::Baseline`].

/// The sandbox may have outgoing connections: [`super::MSG_OPEN_SOCKET`], and the
/// addresses of [`crate::network`].
pub const FLAG_EGRESS: u32 = 1 << 16;
/// The host has IPv6, too.
pub const FLAG_EGRESS_V6: u32 = 1 << 17;
/// Clients of the function send datagrams: a [`super::MSG_CONNECTION`] brings a
/// `SOCK_SEQPACKET` socket over which one client's datagrams come and go.
pub const FLAG_ENTRY_UDP: u32 = 1 << 18;
/// The function reads its request from standard input: a [`super::MSG_CONNECTION`]
/// brings a stream socket that becomes standard input and output.
pub const FLAG_ENTRY_STDIN: u32 = 1 << 19;
/// That the program waits for a client is no reason to freeze it: only
/// `/dev/thaw`, [`super::Start::entry_signal`] and [`super::MSG_FREEZE`] are.
pub const FLAG_ENTRY_ASKED: u32 = 1 << 20;
/// The sandbox has a directory for secrets ([`super::SECRETS_DIRECTORY`]), which is empty until a copy
/// gets some.
pub const FLAG_SECRETS: u32 = 1 << 21;
/// The sandbox is to become a runtime template, with [`FLAG_FREEZE_AT_ENTRY`]: who looks for
/// [`START_PATH`] asks for the freeze, as by a write to `/dev/thaw`. In a copy, the call is made again.
/// Kernels that do not know of it are not asked for it.
pub const FLAG_START_PATH: u32 = 1 << 22;
/// The path of no file. An interpreter that takes the place of its program for this one is frozen
/// when it first looks for its program.
pub const START_PATH: &str = "/dev/thaw-start";
/// There is no program, and no argument: the first process is the kernel's own. It asks to be
/// frozen, as a program does through `/dev/thaw`, and waits for ever. Kernels that do not know of
/// it refuse it, since they find no program.
pub const FLAG_INIT: u32 = 1 << 27;
/// Before [`super::MSG_ENTRY_POINT`], but for checkpoints, the sandbox says by [`super::MSG_LOSES`] which
/// connections copies will find reset, and by [`super::MSG_WRITTEN`] which files the program has written.
/// Kernels that do not know of it say nothing.
pub const FLAG_SAY_LOSSES: u32 = 1 << 28;
/// The sandbox says by [`super::MSG_DENIED`] what it has no way to. Kernels that do not know of it say
/// nothing.
pub const FLAG_SAY_DENIALS: u32 = 1 << 29;
/// In an identity: the host says which processes that it had asked for go on in this copy
/// ([`crate::remote::MSG_EXECS_GO_ON`]). Their streams wait until then. Kernels that do not know of
/// it have all of them at their end.
pub const FLAG_EXECS_GO_ON: u32 = 1 << 30;
/// The sandbox says by [`super::MSG_LACKS`] what its program has asked for in vain. Kernels that do not know
/// of it say nothing.
pub const FLAG_SAY_LACKS: u32 = 1 << 31;
