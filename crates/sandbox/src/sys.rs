//! Host calls that no safe wrapper offers.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use bytemuck::Zeroable;
use rustix::process::Pid;
use thaw_abi::bind::LengthsPage;
use thaw_abi::control::TerminalMode;

/// The program of this process, as it executes itself for helpers.
pub(crate) const OWN_PROGRAM: &str = "/proc/self/exe";

/// How many pages of a part of a file are in the page cache: `cachestat`, Linux 6.5. No
/// page is read for it. `len` 0: up to the end.
///
/// # Errors
/// An older kernel, or a file that this process may not write and does not own.
pub(crate) fn cached_pages(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<u64> {
    const SYS_CACHESTAT: libc::c_long = 451;
    let range = [offset, len];
    // `struct cachestat`: cached, dirty, under writeback, evicted, recently evicted.
    let mut found = [0_u64; 5];
    // SAFETY: the kernel reads two numbers and writes five.
    let result = unsafe {
        libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0)
    };
    if result == 0 { Ok(found[0]) } else { Err(io::Error::last_os_error()) }
}

/// Has a socket receive only what a program of the classic BPF lets through, in place of the one
/// before (`SO_ATTACH_FILTER`, socket(7)).
///
/// # Errors
/// The host's.
pub(crate) fn attach_filter(
    socket: BorrowedFd<'_>,
    program: &[libc::sock_filter],
) -> io::Result<()> {
    let len = program.len().try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
    // The kernel does not write there.
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    // SAFETY: the kernel reads one `sock_fprog`, and the `len` steps that it points to, which
    // outlive the call. It checks the program before it runs it.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of_val(&program) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Processor time of this thread, in nanoseconds. The wrapper of `rustix` asks prctl(2) for a vdso,
/// which processes behind a filter may not.
pub(crate) fn thread_processor_time() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one `timespec`. It cannot fail for this clock, clock_gettime(2).
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The modes of a terminal, as the kernel has them.
pub fn terminal_mode(terminal: BorrowedFd<'_>) -> io::Result<TerminalMode> {
    let mut mode = TerminalMode::zeroed();
    // SAFETY: `TCGETS` stores a `struct termios` of the kernel ABI, 36 bytes,
    // which is how `TerminalMode` begins (asserted below).
    let result = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TCGETS, &raw mut mode) };
    if result == 0 { Ok(mode) } else { Err(io::Error::last_os_error()) }
}

const _: () = assert!(std::mem::offset_of!(TerminalMode, when) == 36);

/// How a range of a file is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordLock {
    /// Not at all.
    None,
    /// Shared with other readers.
    Read,
    /// Exclusive.
    Write,
}

fn record_lock(kind: RecordLock, start: u64, len: u64) -> Result<libc::flock, Errno> {
    let kind = match kind {
        RecordLock::None => libc::F_UNLCK,
        RecordLock::Read => libc::F_RDLCK,
        RecordLock::Write => libc::F_WRLCK,
    };
    let start = start.try_into().map_err(|_| Errno::INVAL)?;
    let len = len.try_into().map_err(|_| Errno::INVAL)?;
    Ok(libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start,
        l_len: len,
        l_pid: 0,
    })
}

/// Locks `len` bytes of a file (0: all) from `start` on for its description, in the place of what
/// that has of them (`F_OFD_SETLK`, fcntl(2)).
///
/// # Errors
/// `EAGAIN` if somebody else stands in the way.
pub fn set_lock(file: BorrowedFd<'_>, kind: RecordLock, start: u64, len: u64) -> Result<(), Errno> {
    let lock = record_lock(kind, start, len)?;
    // SAFETY: the call reads a `struct flock`, which outlives it.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    match result {
        0 => Ok(()),
        _ => match errno() {
            Errno::ACCESS => Err(Errno::AGAIN),
            other => Err(other),
        },
    }
}

/// The lock that stands in the way of one, with its first byte and its bytes (0: all).
///
/// # Errors
/// As fcntl(2).
pub fn test_lock(
    file: BorrowedFd<'_>,
    kind: RecordLock,
    start: u64,
    len: u64,
) -> Result<Option<(RecordLock, u64, u64)>, Errno> {
    let mut lock = record_lock(kind, start, len)?;
    // SAFETY: the call reads and writes a `struct flock`, which outlives it.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    if result != 0 {
        return Err(errno());
    }
    let kind = match i32::from(lock.l_type) {
        libc::F_UNLCK => return Ok(None),
        libc::F_WRLCK => RecordLock::Write,
        _ => RecordLock::Read,
    };
    Ok(Some((kind, lock.l_start as u64, lock.l_len as u64)))
}

fn errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Changes the modes of a terminal; its speed and line discipline stay. A
/// caller in the background is not stopped for it.
pub fn set_terminal_mode(terminal: BorrowedFd<'_>, wanted: &TerminalMode) -> io::Result<()> {
    let TerminalMode { control, line, .. } = terminal_mode(terminal)?;
    let mode = TerminalMode { control, line, ..*wanted };
    let request = [libc::TCSETS, libc::TCSETSW, libc::TCSETSF][wanted.when.min(2) as usize];
    // SAFETY: all zero is a valid signal set; both sets outlive the calls.
    let mut old: libc::sigset_t = unsafe { std::mem::zeroed() };
    let mut blocked = old;
    // SAFETY: as above; only this thread's mask changes, and it is put back.
    unsafe {
        libc::sigaddset(&raw mut blocked, libc::SIGTTOU);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const blocked, &raw mut old);
    }
    // SAFETY: the request reads the 36 bytes that `TerminalMode` begins with.
    let result = unsafe { libc::ioctl(terminal.as_raw_fd(), request, &raw const mode) };
    let error = io::Error::last_os_error();
    // SAFETY: `old` was filled in above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, ptr::null_mut()) };
    if result == 0 { Ok(()) } else { Err(error) }
}

/// Whether somebody has a file open for writing, whose descriptor may also be on its way in a
/// message. The caller, who must own the file and has it open for reading only, finds out by
/// asking for a lease (fcntl(2), `F_SETLEASE`), and gives it back at once.
///
/// # Errors
/// The host grants no leases, or not of this file.
pub fn is_open_for_writing(file: &std::fs::File) -> io::Result<bool> {
    /// `F_SETSIG` (fcntl(2)).
    const F_SETSIG: c_int = 10;
    // Whoever opens the file meanwhile has the host send a signal: one that is ignored, unless
    // somebody wants it, instead of `SIGIO`, which ends the process.
    // SAFETY: these calls read numbers only.
    let asked = unsafe {
        match libc::fcntl(file.as_raw_fd(), F_SETSIG, libc::SIGURG) {
            0 => libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK),
            error => error,
        }
    };
    if asked != 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == io::ErrorKind::WouldBlock { Ok(true) } else { Err(error) };
    }
    // SAFETY: as above.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) } {
        0 => Ok(false),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What came of [`lock_range`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeLock {
    /// The range is locked.
    Taken,
    /// Another has locked some of it, up to this byte.
    HeldUntil(u64),
}

/// A lock of bytes, as fcntl(2) takes it.
fn range_lock(kind: c_int, start: u64, len: u64) -> io::Result<libc::flock> {
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    Ok(libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: libc::off_t::try_from(start).map_err(invalid)?,
        l_len: libc::off_t::try_from(len).map_err(invalid)?,
        l_pid: 0,
    })
}

/// Gives back what [`lock_range`] has taken.
pub fn unlock_range(file: &std::fs::File, start: u64, len: u64) -> io::Result<()> {
    let given_back = range_lock(libc::F_UNLCK, start, len)?;
    // SAFETY: the call reads a lock that outlives it.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const given_back) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Locks bytes of a file for its open file description (`F_OFD_SETLK`, fcntl(2)),
/// without waiting. They need not exist.
pub fn lock_range(file: &std::fs::File, start: u64, len: u64) -> io::Result<RangeLock> {
    let wanted = range_lock(libc::F_WRLCK, start, len)?;
    loop {
        // SAFETY: the call reads a lock that outlives it.
        let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const wanted) };
        if result == 0 {
            return Ok(RangeLock::Taken);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => {}
            Some(libc::EINTR) => continue,
            _ => return Err(error),
        }
        let mut held = wanted;
        // SAFETY: the call overwrites a lock that outlives it.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut held) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // Given back in between: it is tried again.
        if held.l_type != libc::F_UNLCK as libc::c_short {
            // A length of 0 reaches to the end of all files.
            let end = if held.l_len == 0 { i64::MAX } else { held.l_start + held.l_len };
            return Ok(RangeLock::HeldUntil(end as u64));
        }
    }
}

/// Which side of a [`fork_with`] the caller finds itself on.
pub enum Forked {
    /// The new process.
    Child,
    /// The old one.
    Parent {
        /// Process id of the child in the caller's pid namespace.
        pid: i32,
        /// A descriptor of the child.
        pidfd: OwnedFd,
    },
}

/// Forks with the namespaces and options of `flags` (`CLONE_*`, clone3(2)).
/// With `CLONE_PARENT` the child becomes the caller's sibling.
///
/// # Safety
///
/// The calling process must be single-threaded, and `flags` must not share
/// memory, signal handlers or descriptors (`CLONE_VM`, `CLONE_SIGHAND`,
/// `CLONE_FILES`), nor set a thread pointer or a stack.
pub unsafe fn fork_with(flags: u64) -> io::Result<Forked> {
    let mut pidfd: c_int = -1;
    let sibling = flags & libc::CLONE_PARENT as u64 != 0;
    // SAFETY: all zero is a valid `clone_args`.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = flags | libc::CLONE_PIDFD as u64;
    args.pidfd = &raw mut pidfd as u64;
    args.exit_signal = if sibling { 0 } else { libc::SIGCHLD as u64 };
    // SAFETY: `args` is initialized and its size is passed; `pidfd` outlives the call.
    // The child has a copy of the address space, where every Rust value is valid; no
    // other thread can hold a lock, since the caller promises that there is none.
    let result =
        unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) };
    match result {
        0 => Ok(Forked::Child),
        pid if pid > 0 => {
            // SAFETY: the kernel has just stored a new descriptor, which nobody else owns.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            Ok(Forked::Parent { pid: pid as i32, pidfd })
        }
        _ => Err(io::Error::last_os_error()),
    }
}

/// The stack of a child that runs in the memory of its parent: see [`vfork_with`].
#[derive(Debug)]
pub struct ChildStack(*mut u8);

impl ChildStack {
    const LEN: usize = 256 << 10;
    /// Below the stack: a child that needs more ends instead of overwriting something.
    const GUARD_LEN: usize = 4096;

    /// # Errors
    /// The host has no memory.
    pub fn new() -> io::Result<Self> {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address that the host chooses; nobody else knows it.
        let lowest = unsafe { libc::mmap(ptr::null_mut(), Self::LEN, protection, flags, -1, 0) };
        if lowest == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let stack = Self(lowest.cast());
        // SAFETY: the page is the first of the mapping from above, which nobody uses yet.
        match unsafe { libc::mprotect(lowest, Self::GUARD_LEN, libc::PROT_NONE) } {
            0 => Ok(stack),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for ChildStack {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no child runs on it any more: its
        // parent has waited until the child had memory of its own.
        unsafe { libc::munmap(self.0.cast(), Self::LEN) };
    }
}

/// Makes a child that runs `child` in the memory of its parent, and waits until that has
/// executed a program or ended (`CLONE_VM | CLONE_VFORK`, clone(2)); `flags` may add
/// namespaces. To copy the memory of this program and to give the copy up at once takes half
/// of what making a zygote takes. The child ends with the status that `child` returns.
///
/// # Errors
/// The host's.
///
/// # Safety
///
/// The calling process must be single-threaded. `child` may leave nothing behind in memory
/// that the caller does not expect: above all it drops nothing that the caller owns, whose
/// descriptors it has copies of. `flags` must not share signal handlers or descriptors
/// (`CLONE_SIGHAND`, `CLONE_FILES`), nor set a thread pointer.
pub unsafe fn vfork_with(
    flags: c_int,
    stack: &mut ChildStack,
    child: &mut dyn FnMut() -> c_int,
) -> io::Result<(i32, OwnedFd)> {
    extern "C" fn run(child: *mut c_void) -> c_int {
        // SAFETY: the parent has passed a pointer to such a reference, which lies on its
        // stack and stays there, since the parent waits.
        let child = unsafe { &mut *child.cast::<&mut dyn FnMut() -> c_int>() };
        exit_at_once(child())
    }
    let mut child = child;
    let mut pidfd: c_int = -1;
    let flags = flags | libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
    // SAFETY: the child runs on a stack of its own, whose end this is (16-byte aligned, as
    // all pages are), and which nobody else uses, since the reference to it is exclusive.
    // What it is given outlives the call, which returns when the child has left this memory.
    // Everything else the caller promises.
    let pid = unsafe {
        let top = stack.0.add(ChildStack::LEN).cast();
        libc::clone(run, top, flags, (&raw mut child).cast(), &raw mut pidfd)
    };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just stored a new descriptor, which nobody else owns.
    Ok((pid, unsafe { OwnedFd::from_raw_fd(pidfd) }))
}

/// Forks, with a call whose flags a filter can check; `None` in the new process.
///
/// # Safety
///
/// The calling process must be single-threaded.
pub unsafe fn fork() -> io::Result<Option<Pid>> {
    // SAFETY: no flag shares anything, and without a new stack the child goes on on its copy
    // of this one. No other thread can hold a lock, since the caller promises that there is
    // none.
    let result = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
    match result {
        0 => Ok(None),
        pid if pid > 0 => Ok(Pid::from_raw(pid as i32)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Ends the process at once (`_exit`, exit(2)): nothing is flushed, and the runtime makes no
/// calls to clean up, which a filter may forbid.
pub fn exit_at_once(code: i32) -> ! {
    // SAFETY: the call does not return.
    unsafe { libc::_exit(code) }
}

/// Executes the file behind `file` with one argument, its name, and an environment of one variable
/// or none. Returns only on failure. Allocates nothing.
pub fn execute(file: BorrowedFd<'_>, name: &CStr, variable: Option<&CStr>) -> io::Error {
    let argv: [*const c_char; 2] = [name.as_ptr(), ptr::null()];
    let environment: [*const c_char; 2] = [variable.map_or(ptr::null(), CStr::as_ptr), ptr::null()];
    // SAFETY: the path is an empty C string, both arrays end with a null pointer
    // and all strings outlive the call.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            file.as_raw_fd(),
            c"".as_ptr(),
            argv.as_ptr(),
            environment.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
    }
    io::Error::last_os_error()
}

/// Executes the file behind `file` in the place of this program. Returns only on failure, and
/// then everything is as it was.
pub fn execute_with(
    file: BorrowedFd<'_>,
    arguments: &[CString],
    environment: &[CString],
) -> io::Error {
    let pointers = |strings: &[CString]| -> Vec<*const c_char> {
        strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
    };
    let (argv, envp) = (pointers(arguments), pointers(environment));
    // SAFETY: the path is an empty C string, both arrays end with a null pointer, and all strings
    // and arrays outlive the call.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            file.as_raw_fd(),
            c"".as_ptr(),
            argv.as_ptr(),
            envp.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
    }
    io::Error::last_os_error()
}

/// Has a descriptor stay open over exec.
pub fn keep_over_exec(file: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::io::fcntl_setfd(file, rustix::io::FdFlags::empty())?)
}

/// Takes possession of an open descriptor by its number.
///
/// # Errors
/// `EBADF` if there is no such descriptor.
///
/// # Safety
///
/// Nothing else in this process owns that number.
pub unsafe fn own_descriptor(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: takes no pointers, and changes nothing.
    match unsafe { libc::fcntl(number, libc::F_GETFD) } {
        // SAFETY: it is open, and the caller promises that nobody else owns it.
        0.. => Ok(unsafe { OwnedFd::from_raw_fd(number) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes `number` refer to what `file` refers to, inherited over exec or not.
/// Whatever `number` was is closed, so the caller must know that nothing owns it.
pub fn place_descriptor(file: RawFd, number: RawFd, close_on_exec: CloseOnExec) -> io::Result<()> {
    let flags = match close_on_exec {
        CloseOnExec::Yes => libc::O_CLOEXEC,
        CloseOnExec::No => 0,
    };
    // SAFETY: takes no pointers. Closing `number` is what the caller asks for.
    let result = unsafe { libc::dup3(file, number, flags) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Duplicates `file` to exactly `number`, closed on exec. As with
/// [`place_descriptor`], the caller must know that nothing owns `number`.
pub fn duplicate_to(file: BorrowedFd<'_>, number: RawFd) -> io::Result<OwnedFd> {
    place_descriptor(file.as_raw_fd(), number, CloseOnExec::Yes)?;
    // SAFETY: the number was just made, and the caller knows that nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Sets the user and group ids of the calling thread for access to files
/// (setfsuid(2)), and thereby takes the capabilities for it away.
pub fn set_filesystem_ids(user_id: u32, group_id: u32) -> io::Result<()> {
    // SAFETY: the calls take no pointers and change the calling thread only. They say
    // which id was set before and not whether they worked, so each is made twice.
    let (group, user) = unsafe {
        libc::setfsgid(group_id);
        libc::setfsuid(user_id);
        (libc::setfsgid(group_id), libc::setfsuid(user_id))
    };
    if group as u32 == group_id && user as u32 == user_id {
        return Ok(());
    }
    Err(io::Error::other(format!("this user namespace has no user {user_id} and group {group_id}")))
}

/// Whether a descriptor stays open over exec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseOnExec {
    /// It is closed.
    Yes,
    /// It stays open.
    No,
}

/// Duplicates `file` to a free number of at least `lowest`, closed on exec.
pub fn duplicate_above(file: BorrowedFd<'_>, lowest: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: takes no pointers.
    let number = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, lowest) };
    if number < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// The namespace that one of the kinds that have a hierarchy lies in (`NS_GET_PARENT`,
/// ioctl_nsfs(2)).
pub fn parent_namespace(namespace: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const NS_GET_PARENT: libc::Ioctl = 0xb702;
    // SAFETY: the ioctl takes no argument.
    let parent = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_PARENT) };
    if parent < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(parent) })
}

/// Closes all descriptors from `first` to `last`, both included. The caller
/// must know that nothing uses them any more.
pub fn close_descriptors(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: takes no pointers. Closing is what the caller asks for.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Has all descriptors from `first` on closed at exec: for descriptors that came from
/// outside, and whose owners were careless.
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: takes no pointers, and closes nothing now.
    let result =
        unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Blocks `SIGCHLD` and returns a non-blocking descriptor that becomes readable when a
/// child has ended.
pub fn child_signal_descriptor() -> io::Result<OwnedFd> {
    signal_descriptor(&[libc::SIGCHLD])
}

/// Blocks signals for the calling thread, and returns a non-blocking descriptor from which
/// those that come can be read (signalfd(2)).
pub fn signal_descriptor(signals: &[c_int]) -> io::Result<OwnedFd> {
    // SAFETY: all zero is a valid `sigset_t`, which the calls then set up.
    let descriptor = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for &signal in signals {
            libc::sigaddset(&mut set, signal);
        }
        if libc::sigprocmask(libc::SIG_BLOCK, &set, ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
        libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Unblocks all signals for the calling thread.
pub fn unblock_signals() {
    // SAFETY: all zero is a valid `sigset_t`, which is then emptied; the call cannot fail
    // with these arguments.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigprocmask(libc::SIG_SETMASK, &set, ptr::null_mut());
    }
}

/// Gives every signal its default action. What is ignored would stay so over exec; what has a
/// handler would not.
pub fn reset_signal_actions() {
    /// `struct kernel_sigaction` of this architecture: the default action, no flags, no mask.
    const DEFAULT: [u64; 4] = [libc::SIG_DFL as u64, 0, 0, 0];
    const SET_LEN: usize = 8;
    for signal in 1..=64 {
        // SAFETY: resetting an action to the default leaves no handler that could run. The
        // call reads the structure. Failures (SIGKILL, SIGSTOP) leave the default, which is
        // wanted. libc keeps two numbers for itself, which posix_spawn(3) has ignored; hence
        // not by libc.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                DEFAULT.as_ptr(),
                ptr::null_mut::<u64>(),
                SET_LEN,
            )
        };
    }
}

/// The same, and unblocks all signals: before another program is executed.
pub fn reset_signals() {
    reset_signal_actions();
    unblock_signals();
}

/// Whether writing to a pipe or socket without a reader ends the process with `SIGPIPE`; it
/// is an error otherwise, as in all Rust programs.
pub fn set_pipe_signal(ends: PipeSignal) {
    let action = match ends {
        PipeSignal::Ends => libc::SIG_DFL,
        PipeSignal::Ignored => libc::SIG_IGN,
    };
    // SAFETY: neither action is a handler that could run.
    unsafe { libc::signal(libc::SIGPIPE, action) };
}

/// See [`set_pipe_signal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PipeSignal {
    /// It ends the process: the default.
    Ends,
    /// It is ignored.
    Ignored,
}

/// Bytes sent on a socket that its peer has not read yet (`SIOCOUTQ`, unix(7)).
pub fn unread_by_peer(socket: BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: c_int = 0;
    // SAFETY: the ioctl stores one `int` at the pointer, which is valid for the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(bytes.max(0) as usize) }
}

/// Asks whether this kernel knows a seccomp action (`SECCOMP_GET_ACTION_AVAIL`, seccomp(2)).
pub fn seccomp_action_available(action: u32) -> bool {
    // SAFETY: the call reads one `u32` at the pointer, which is valid for the call.
    let result = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action)
    };
    result == 0
}

/// Whether the host refuses to make memory executable that was writable
/// (`PR_SET_MDWE`, PR_SET_MDWE(2const), or a filter).
pub fn refuses_executable_memory() -> bool {
    let (read_write, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address that the host chooses; nobody else knows it.
    let page = unsafe { libc::mmap(ptr::null_mut(), 4096, read_write, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: changes, and then removes, the mapping from above only.
    unsafe {
        let refused = libc::mprotect(page, 4096, libc::PROT_READ | libc::PROT_EXEC) != 0;
        libc::munmap(page, 4096);
        refused
    }
}

/// A [`LengthsPage`] that sandboxes map to read it.
pub(crate) struct SharedLengths {
    address: ptr::NonNull<LengthsPage>,
}

// SAFETY: the memory is there until this is dropped, and holds atomics only.
unsafe impl Send for SharedLengths {}
// SAFETY: as above.
unsafe impl Sync for SharedLengths {}

impl SharedLengths {
    /// Zeros, and the descriptor of their memory, which nobody else can change, map to be written, or make
    /// shorter.
    ///
    /// # Errors
    /// The host's.
    pub fn new() -> io::Result<(Self, OwnedFd)> {
        const LEN: usize = size_of::<LengthsPage>();
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = memfd_create("thaw-lengths", flags)?;
        ftruncate(&memory, LEN as u64)?;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping at an address that the host chooses.
        let address =
            unsafe { libc::mmap(ptr::null_mut(), LEN, protection, flags, memory.as_raw_fd(), 0) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = ptr::NonNull::new(address.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let shared = Self { address };
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE)?;
        Ok((shared, memory))
    }

    /// The page.
    pub fn get(&self) -> &LengthsPage {
        // SAFETY: mapped and aligned, and zeros make one.
        unsafe { self.address.as_ref() }
    }
}

impl Drop for SharedLengths {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and nobody refers to it any more.
        unsafe { libc::munmap(self.address.as_ptr().cast(), size_of::<LengthsPage>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    use std::os::fd::AsFd;

    #[test]
    fn a_child_in_the_memory_of_its_parent_is_waited_for() {
        let mut stack = ChildStack::new().unwrap();
        for round in 0..3 {
            let mut seen = 0;
            let mut child = || {
                seen = round + 1;
                40 + round
            };
            // SAFETY: the child writes one number that is expected here, and takes no lock that
            // other threads of the test could hold.
            let (pid, pidfd) = unsafe { vfork_with(0, &mut stack, &mut child) }.unwrap();
            assert_eq!(seen, round + 1);
            let ended = waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED).unwrap();
            assert_eq!(ended.and_then(|ended| ended.exit_status()), Some(40 + round));
            assert!(pid > 0);
        }
    }

    #[test]
    fn a_child_that_cannot_be_made_is_an_error() {
        let mut stack = ChildStack::new().unwrap();
        // SAFETY: the host refuses this: two threads cannot be in different pid namespaces.
        let made =
            unsafe { vfork_with(libc::CLONE_NEWPID | libc::CLONE_THREAD, &mut stack, &mut || 1) };
        made.unwrap_err();
    }
}
