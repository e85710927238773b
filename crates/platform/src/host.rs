//! Host calls: the few system calls that the kernel makes itself.
//!
//! Every one of them goes through the single `syscall` instruction of
//! `thaw_hostcall`. The filter ([`crate::filter`]) lets system calls through
//! only from there, and checks the arguments of each.
#![allow(unsafe_code)]

use core::cell::Cell;
use core::sync::atomic::AtomicU32;

use crate::errno::{Errno, Result};
use crate::io::{IoSlice, IoSliceMut, IoVec};
use crate::memory::{GuestRange, Pages};
use crate::saved::OfHost;

core::arch::global_asm!(
    // u64 thaw_hostcall: rax = number, rdi rsi rdx r10 r8 r9 = arguments.
    ".pushsection .text.thaw_hostcall, \"ax\", @progbits",
    ".globl thaw_hostcall, thaw_hostcall_return",
    ".type thaw_hostcall, @function",
    "thaw_hostcall:",
    "syscall",
    "thaw_hostcall_return:",
    "ret",
    ".popsection",
);

unsafe extern "C" {
    /// Address right behind the `syscall` instruction: what seccomp sees as
    /// the instruction pointer of a host call.
    pub static thaw_hostcall_return: u8;
}

/// Makes a host call.
///
/// # Safety
/// As for the system call in question.
#[inline]
pub unsafe fn hostcall(number: u64, args: [u64; 6]) -> Result<u64> {
    let result: u64;
    // SAFETY: the caller's promise; the routine clobbers what the kernel's
    // system call convention clobbers, and uses no stack beyond its return
    // address.
    unsafe {
        core::arch::asm!(
            "call thaw_hostcall",
            inlateout("rax") number => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
            in("r10") args[3], in("r8") args[4], in("r9") args[5],
            lateout("rcx") _, lateout("r11") _,
        );
    }
    Errno::from_return(result)
}

/// Numbers of the host calls that the kernel makes (x86-64 ABI).
#[allow(missing_docs)]
pub mod nr {
    pub const READ: u64 = 0;
    pub const WRITE: u64 = 1;
    pub const CLOSE: u64 = 3;
    pub const MMAP: u64 = 9;
    pub const MPROTECT: u64 = 10;
    pub const MUNMAP: u64 = 11;
    pub const RT_SIGACTION: u64 = 13;
    pub const PREAD64: u64 = 17;
    pub const MREMAP: u64 = 25;
    pub const MADVISE: u64 = 28;
    pub const SENDTO: u64 = 44;
    pub const RECVFROM: u64 = 45;
    pub const RECVMSG: u64 = 47;
    pub const SHUTDOWN: u64 = 48;
    pub const SETITIMER: u64 = 38;
    pub const DUP2: u64 = 33;
    pub const CLONE: u64 = 56;
    pub const SETPGID: u64 = 109;
    pub const SETRESUID: u64 = 117;
    pub const SETRESGID: u64 = 119;
    pub const CAPSET: u64 = 126;
    pub const EXIT: u64 = 60;
    pub const FUTEX: u64 = 202;
    pub const TGKILL: u64 = 234;
    pub const EXIT_GROUP: u64 = 231;
    pub const PPOLL: u64 = 271;
    pub const PROCESS_MADVISE: u64 = 440;
    pub const SIGALTSTACK: u64 = 131;
    pub const PRCTL: u64 = 157;
    pub const SECCOMP: u64 = 317;
}

/// A descriptor of the host. It is of this boot, so that nothing that is saved can have one:
///
/// ```compile_fail
/// thaw_platform::saved::assert_saved::<thaw_platform::host::HostFd>();
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostFd(pub i32, OfHost);

impl HostFd {
    /// The descriptor with a number.
    pub const fn new(number: i32) -> Self {
        Self(number, OfHost::new())
    }
}

/// `POLLIN` and so on: `struct pollfd` (poll(2)).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PollFd {
    /// Descriptor; negative entries are ignored.
    pub fd: i32,
    /// Events asked for.
    pub events: i16,
    /// Events found.
    pub revents: i16,
}

/// `MSG_DONTWAIT | MSG_NOSIGNAL`, with which all sockets are used.
const SOCKET_FLAGS: u64 = 0x40 | 0x4000;

/// read(2) of a standard stream (the filter allows the numbers 0 to 2 only);
/// `EFAULT` is possible.
pub fn read(fd: HostFd, to: IoSliceMut<'_>) -> Result<usize> {
    let (at, len) = (to.address(), to.len() as u64);
    // SAFETY: `to` may be written to, and the host checks guest memory.
    unsafe { hostcall(nr::READ, [fd.0 as u64, at, len, 0, 0, 0]) }.map(|n| n as usize)
}

/// write(2); `EFAULT` is possible.
pub fn write(fd: HostFd, from: IoSlice<'_>) -> Result<usize> {
    let (at, len) = (from.address(), from.len() as u64);
    // SAFETY: the host only reads, and checks guest memory.
    unsafe { hostcall(nr::WRITE, [fd.0 as u64, at, len, 0, 0, 0]) }.map(|n| n as usize)
}

/// pread(2) of a blob or host file; `EFAULT` is possible.
pub fn pread(fd: HostFd, to: IoSliceMut<'_>, offset: u64) -> Result<usize> {
    let (at, len) = (to.address(), to.len() as u64);
    // SAFETY: as in `read`.
    unsafe { hostcall(nr::PREAD64, [fd.0 as u64, at, len, offset, 0, 0]) }.map(|n| n as usize)
}

/// recvfrom(2) without an address, never blocking. `peek` adds `MSG_PEEK`.
pub fn recv(fd: HostFd, to: IoSliceMut<'_>, peek: Peek) -> Result<usize> {
    let flags = SOCKET_FLAGS | if peek == Peek::Yes { 2 } else { 0 };
    let (at, len) = (to.address(), to.len() as u64);
    // SAFETY: as in `read`.
    unsafe { hostcall(nr::RECVFROM, [fd.0 as u64, at, len, flags, 0, 0]) }.map(|n| n as usize)
}

/// As [`recv`] into the kernel's own memory, for datagrams: returns the bytes
/// that the datagram has, of which those that fit were stored.
pub fn recv_datagram(fd: HostFd, buffer: &mut [u8], peek: Peek) -> Result<usize> {
    const MSG_TRUNC: u64 = 0x20;
    let flags = SOCKET_FLAGS | MSG_TRUNC | if peek == Peek::Yes { 2 } else { 0 };
    let (at, len) = (buffer.as_mut_ptr() as u64, buffer.len() as u64);
    // SAFETY: the host writes into `buffer` only.
    unsafe { hostcall(nr::RECVFROM, [fd.0 as u64, at, len, flags, 0, 0]) }.map(|n| n as usize)
}

/// Whether a receive leaves the data in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peek {
    /// `MSG_PEEK`.
    Yes,
    /// Consume.
    No,
}

/// sendto(2) without an address, never blocking, never raising `SIGPIPE`.
pub fn send(fd: HostFd, from: IoSlice<'_>) -> Result<usize> {
    let (at, len) = (from.address(), from.len() as u64);
    // SAFETY: as in `write`.
    unsafe { hostcall(nr::SENDTO, [fd.0 as u64, at, len, SOCKET_FLAGS, 0, 0]) }.map(|n| n as usize)
}

/// shutdown(2); `how` is `SHUT_RD` 0, `SHUT_WR` 1 or `SHUT_RDWR` 2.
pub fn shutdown(fd: HostFd, how: u32) -> Result<()> {
    // SAFETY: touches no memory.
    unsafe { hostcall(nr::SHUTDOWN, [fd.0 as u64, how as u64, 0, 0, 0, 0]) }.map(drop)
}

/// close(2).
pub fn close(fd: HostFd) {
    // SAFETY: touches no memory. An error leaves nothing to do.
    let _ = unsafe { hostcall(nr::CLOSE, [fd.0 as u64, 0, 0, 0, 0, 0]) };
}

/// ppoll(2) with a relative time-out; `None` waits for ever. Returns the
/// number of descriptors with events.
pub fn poll(fds: &mut [PollFd], timeout_ns: Option<u64>) -> Result<usize> {
    let timespec = timeout_ns.map(|ns| [ns / 1_000_000_000, ns % 1_000_000_000]);
    let at = timespec.as_ref().map_or(0, |t| t.as_ptr() as u64);
    // SAFETY: `fds` and `timespec` are valid for the call.
    unsafe { hostcall(nr::PPOLL, [fds.as_mut_ptr() as u64, fds.len() as u64, at, 0, 8, 0]) }
        .map(|n| n as usize)
}

/// What [`populate`] gives memory for, page by page, as if it were touched. The memory
/// keeps its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Populate {
    /// `MADV_POPULATE_READ`: as if it were read.
    Read,
    /// `MADV_POPULATE_WRITE`: as if it were written to.
    Write,
}

impl Populate {
    fn advice(self) -> u32 {
        match self {
            Populate::Read => MADV_POPULATE_READ,
            Populate::Write => MADV_POPULATE_WRITE,
        }
    }
}

/// madvise(2): gives all pages from `address` on, `len` bytes, their memory.
pub fn populate(address: u64, len: u64, how: Populate) -> Result<()> {
    // SAFETY: changes the content of no memory, and neither whether it is there.
    unsafe { advise(address, len, how.advice()) }
}

/// process_madvise(2) of this process: [`populate`] for many ranges in one call, from
/// Linux 6.13 on. Returns the bytes dealt with.
pub fn populate_ranges(ranges: &[Cell<IoVec>], how: Populate) -> Result<u64> {
    let (at, count) = (ranges.as_ptr() as u64, ranges.len() as u64);
    let this = thaw_abi::filter::PIDFD_SELF as u64;
    // SAFETY: as for `populate`; `ranges` is valid for the call.
    unsafe { hostcall(nr::PROCESS_MADVISE, [this, at, count, how.advice() as u64, 0, 0]) }
}

/// setitimer(2): asks for a `SIGALRM` in `ns` nanoseconds, once.
pub fn arm_alarm(ns: u64) {
    const ITIMER_REAL: u64 = 0;
    // At least a microsecond: zero would disarm the timer.
    let us = (ns / 1000).max(1);
    let value = [0u64, 0, us / 1_000_000, us % 1_000_000];
    // SAFETY: `value` is valid for the call. It fails for bad values only.
    let _ = unsafe { hostcall(nr::SETITIMER, [ITIMER_REAL, value.as_ptr() as u64, 0, 0, 0, 0]) };
}

/// futex(2), `FUTEX_WAIT`: sleeps while `word` is `expected`, for at most
/// `timeout_ns`. The word may lie in memory shared by several host processes.
pub fn futex_wait(word: &AtomicU32, expected: u32, timeout_ns: Option<u64>) {
    const FUTEX_WAIT: u64 = 0;
    let timespec = timeout_ns.map(|ns| [ns / 1_000_000_000, ns % 1_000_000_000]);
    let at = timespec.as_ref().map_or(0, |t| t.as_ptr() as u64);
    let args = [word.as_ptr() as u64, FUTEX_WAIT, expected as u64, at, 0, 0];
    // SAFETY: `word` and `timespec` are valid for the call. Whoever waits looks
    // again, so no outcome matters.
    let _ = unsafe { hostcall(nr::FUTEX, args) };
}

/// futex(2), `FUTEX_WAKE`.
pub fn futex_wake(word: &AtomicU32, count: u32) {
    const FUTEX_WAKE: u64 = 1;
    // SAFETY: reads no memory.
    let _ =
        unsafe { hostcall(nr::FUTEX, [word.as_ptr() as u64, FUTEX_WAKE, count as u64, 0, 0, 0]) };
}

/// Writes a message to the console: kernel panics and traces.
pub fn console_write(text: &[u8]) {
    let _ = write(HostFd::new(thaw_abi::layout::CONSOLE_FD), text.into());
}

/// `PROT_READ`.
pub const PROT_READ: u32 = 1;
/// `PROT_WRITE`.
pub const PROT_WRITE: u32 = 2;
/// `PROT_EXEC`.
pub const PROT_EXEC: u32 = 4;

const MAP_SHARED: u64 = 0x01;
const MAP_PRIVATE: u64 = 0x02;
const MAP_FIXED: u64 = 0x10;
const MAP_ANONYMOUS: u64 = 0x20;
/// All mappings are made without reserving: how much memory the sandbox may
/// use is limited by its control group, not by what it maps.
const MAP_NORESERVE: u64 = 0x4000;

/// Whether writes to a mapping are private.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// `MAP_PRIVATE`.
    Private,
    /// `MAP_SHARED`.
    Shared,
}

impl Sharing {
    fn flag(self) -> u64 {
        match self {
            Sharing::Private => MAP_PRIVATE,
            Sharing::Shared => MAP_SHARED,
        }
    }
}

/// Maps zeroed private memory, replacing what is there.
pub fn map_anonymous(at: impl Pages, protection: u32) -> Result<()> {
    map_anonymous_as(at, protection, Sharing::Private)
}

/// Maps zeroed memory, replacing what is there.
pub fn map_anonymous_as(at: impl Pages, protection: u32, sharing: Sharing) -> Result<()> {
    let flags = sharing.flag() | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE;
    let args = [at.start(), at.bytes(), protection as u64, flags, u64::MAX, 0];
    // SAFETY: pages that host calls may change.
    unsafe { hostcall(nr::MMAP, args) }.map(drop)
}

/// Maps a file, replacing what is there.
pub fn map_file(
    fd: HostFd,
    at: impl Pages,
    protection: u32,
    sharing: Sharing,
    offset: u64,
) -> Result<()> {
    let flags = sharing.flag() | MAP_FIXED | MAP_NORESERVE;
    let args = [at.start(), at.bytes(), protection as u64, flags, fd.0 as u64, offset];
    // SAFETY: as for `map_anonymous_as`.
    unsafe { hostcall(nr::MMAP, args) }.map(drop)
}

/// clone(2): a host process that shares descriptors and nothing else. Both
/// sides return here, on a copy of the same stack each.
pub fn fork(sibling: bool) -> Result<Forked> {
    use thaw_abi::filter::{CLONE_PROCESS, CLONE_SIBLING};
    let flags = if sibling { CLONE_SIBLING } else { CLONE_PROCESS };
    // SAFETY: no flag shares memory; the caller is on memory of its own process.
    match unsafe { hostcall(nr::CLONE, [flags as u64, 0, 0, 0, 0, 0]) }? {
        0 => Ok(Forked::Child),
        pid => Ok(Forked::Parent { pid: pid as u32 }),
    }
}

/// clone(2): a copy of the calling template, as its sibling, process 1 of a pid
/// namespace of its own, and with ipc and host-name namespaces of its own. Both sides return here, on a copy of the same stack each.
pub fn fork_copy() -> Result<Forked> {
    let flags = thaw_abi::filter::CLONE_COPY as u64;
    // SAFETY: as in `fork`; nothing at all is shared.
    match unsafe { hostcall(nr::CLONE, [flags, 0, 0, 0, 0, 0]) }? {
        0 => Ok(Forked::Child),
        pid => Ok(Forked::Parent { pid: pid as u32 }),
    }
}

/// dup2(2).
pub fn duplicate_to(fd: HostFd, number: HostFd) -> Result<()> {
    // SAFETY: touches no memory; the caller owns both descriptors.
    unsafe { hostcall(nr::DUP2, [fd.0 as u64, number.0 as u64, 0, 0, 0, 0]) }.map(drop)
}

/// setpgid(2): the process leads a process group of its own.
pub fn new_process_group() -> Result<()> {
    // SAFETY: touches no memory.
    unsafe { hostcall(nr::SETPGID, [0; 6]) }.map(drop)
}

/// setresgid(2) and setresuid(2): all ids become `id`.
pub fn set_ids(id: u32) -> Result<()> {
    let id = id as u64;
    for number in [nr::SETRESGID, nr::SETRESUID] {
        // SAFETY: touches no memory.
        unsafe { hostcall(number, [id, id, id, 0, 0, 0]) }?;
    }
    Ok(())
}

/// capset(2): the effective and permitted capabilities become `kept`, a bit set
/// of the first 32; no inheritable ones stay.
pub fn set_capabilities(kept: u32) -> Result<()> {
    const LINUX_CAPABILITY_VERSION_3: u32 = 0x2008_0522;
    let header = [LINUX_CAPABILITY_VERSION_3, 0];
    let data = [kept, kept, 0, 0, 0, 0];
    let args = [&raw const header as u64, &raw const data as u64, 0, 0, 0, 0];
    // SAFETY: both arrays have the layout that capset(2) reads (two halves of
    // three words), and live for the call.
    unsafe { hostcall(nr::CAPSET, args) }.map(drop)
}

/// Which side of a fork this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forked {
    /// The new process.
    Child,
    /// The old one.
    Parent {
        /// Host process id of the new one, in the sandbox's pid namespace.
        pid: u32,
    },
}

/// clone(2): a host thread for a virtual CPU, which begins in
/// [`crate::vcpu::start_of_vcpu`] with its stack pointer at `stack_top`.
/// Returns its thread id.
pub(crate) fn start_thread(stack_top: u64, vcpu: u32) -> Result<u32> {
    let entry = (stack_top - 16) as *mut u64;
    let tid: u64;
    // SAFETY: the stack is mapped and unused. The new thread shares all memory;
    // it returns from the host call on its own stack, to `thaw_vcpu_start`,
    // with the registers of the caller.
    unsafe {
        entry.write(&raw const thaw_vcpu_start as u64);
        core::arch::asm!(
            "call thaw_hostcall",
            inlateout("rax") nr::CLONE => tid,
            in("rdi") thaw_abi::filter::CLONE_VCPU as u64,
            in("rsi") entry as u64,
            in("rdx") 0, in("r10") 0, in("r8") 0,
            in("r9") vcpu as u64,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    Errno::from_return(tid).map(|tid| tid as u32)
}

core::arch::global_asm!(
    // A new host thread, with the number of its vCPU in r9 and an empty stack.
    ".globl thaw_vcpu_start",
    "thaw_vcpu_start:",
    "xor ebp, ebp",
    "mov edi, r9d",
    "and rsp, -16",
    "call {start}",
    "ud2",
    start = sym crate::vcpu::start_of_vcpu,
);

unsafe extern "C" {
    static thaw_vcpu_start: u8;
}

/// exit(2): ends this host thread, and with the last one the host process.
pub fn exit_thread() -> ! {
    loop {
        // SAFETY: does not return.
        let _ = unsafe { hostcall(nr::EXIT, [0; 6]) };
    }
}

/// tgkill(2): interrupts a virtual CPU.
pub fn interrupt(pid: u32, tid: u32) {
    // SAFETY: touches no memory. If it has ended, there is nothing to interrupt.
    let _ = unsafe {
        hostcall(nr::TGKILL, [pid as u64, tid as u64, crate::fault::SIGUSR1 as u64, 0, 0, 0])
    };
}

/// mprotect(2).
pub fn protect(at: impl Pages, protection: u32) -> Result<()> {
    let args = [at.start(), at.bytes(), protection as u64, 0, 0, 0];
    // SAFETY: as for `map_anonymous_as`.
    unsafe { hostcall(nr::MPROTECT, args) }.map(drop)
}

/// munmap(2).
pub fn unmap(at: impl Pages) -> Result<()> {
    // SAFETY: as for `map_anonymous_as`.
    unsafe { hostcall(nr::MUNMAP, [at.start(), at.bytes(), 0, 0, 0, 0]) }.map(drop)
}

/// mremap(2): moves guest memory to where other guest memory is, which it replaces.
///
/// # Errors
/// `EINVAL` if the ranges have not the same length, and those of mremap(2).
pub fn move_mapping(from: GuestRange, to: GuestRange) -> Result<()> {
    if from.bytes() != to.bytes() { Err(Errno::EINVAL) } else { move_pages(from, to) }
}

/// As [`move_mapping`]; both are of the length of `from`.
pub(crate) fn move_pages(from: impl Pages, to: impl Pages) -> Result<()> {
    const MREMAP_MAYMOVE_FIXED: u64 = 3;
    let len = from.bytes();
    // SAFETY: as for `map_anonymous_as`, both ranges.
    unsafe { hostcall(nr::MREMAP, [from.start(), len, len, MREMAP_MAYMOVE_FIXED, to.start(), 0]) }
        .map(drop)
}

const MADV_DONTNEED: u32 = 4;
const MADV_REMOVE: u32 = 9;
const MADV_POPULATE_READ: u32 = 22;
const MADV_POPULATE_WRITE: u32 = 23;

/// `MADV_DONTNEED`: the memory is again as it was when it was mapped.
pub fn discard(at: impl Pages) -> Result<()> {
    // SAFETY: as for `map_anonymous_as`.
    unsafe { advise(at.start(), at.bytes(), MADV_DONTNEED) }
}

/// `MADV_REMOVE`: frees the memory and that of the file it shows.
pub fn remove(at: impl Pages) -> Result<()> {
    // SAFETY: as for `map_anonymous_as`.
    unsafe { advise(at.start(), at.bytes(), MADV_REMOVE) }
}

/// madvise(2).
///
/// # Safety
/// Nobody refers to memory whose content the advice changes.
unsafe fn advise(address: u64, len: u64, advice: u32) -> Result<()> {
    // SAFETY: the caller's promise; the filter admits advice on the sandbox's own memory
    // only.
    unsafe { hostcall(nr::MADVISE, [address, len, advice as u64, 0, 0, 0]) }.map(drop)
}
