//! The host calls of a daemon that has a monitor.

use super::UserKind;
use std::io;
use thaw_sandbox::allowed::{
    Call, Check, Otherwise, call, has_bits, install_list, is, is_request, refuse_call,
};

/// Threads: they share everything, and get no namespaces.
const NEW_THREAD: Check = has_bits(
    0,
    (libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD)
        as u64,
);
/// `NS_GET_PARENT` (linux/nsfs.h).
const NS_GET_PARENT: u64 = 0xb702;
/// `FICLONE` (linux/fs.h).
const FICLONE: u64 = 0x4004_9409;
/// `PR_GET_AUXV` (linux/prctl.h).
const PR_GET_AUXV: u64 = 0x4155_5856;
/// `PR_SCHED_CORE` (linux/prctl.h).
const PR_SCHED_CORE: u64 = 62;
/// cachestat(2), Linux 6.5.
const SYS_CACHESTAT: i64 = 451;
const EXECUTABLE: u64 = libc::PROT_EXEC as u64;
/// Memory that is not executed.
const NOT_EXECUTABLE: Check = Check { argument: 2, mask: EXECUTABLE, value: 0 };

/// What a daemon may do. Other calls fail: among them all that execute, make processes or
/// namespaces, mount, trace, or change users.
static CALLS: &[Call] = &[
    // Clients, sandboxes, names.
    call(
        libc::SYS_socket,
        &[
            &[is(0, libc::AF_UNIX as u64)],
            &[is(0, libc::AF_INET as u64)],
            &[is(0, libc::AF_INET6 as u64)],
            &[is(0, libc::AF_NETLINK as u64)],
        ],
        "egress and its bytes, upstream connections, addresses of the host",
    ),
    call(libc::SYS_socketpair, &[], "control sockets of sandboxes"),
    call(libc::SYS_bind, &[], "listeners of functions, the admin API"),
    call(libc::SYS_listen, &[], "listeners of functions, the admin API"),
    call(libc::SYS_accept4, &[], "clients"),
    call(libc::SYS_accept, &[], "clients"),
    call(libc::SYS_connect, &[], "egress, sandboxes"),
    call(libc::SYS_shutdown, &[], "connections that end"),
    call(libc::SYS_getsockname, &[], "which address a listener has"),
    call(libc::SYS_getpeername, &[], "who a client is"),
    call(libc::SYS_setsockopt, &[], "options of sockets"),
    call(libc::SYS_getsockopt, &[], "options and counters of sockets"),
    call(libc::SYS_sendmsg, &[], "messages with descriptors"),
    call(libc::SYS_recvmsg, &[], "messages with descriptors"),
    call(libc::SYS_sendto, &[], "clients"),
    call(libc::SYS_recvfrom, &[], "clients"),
    // Files: those of the root directory that it was given.
    call(libc::SYS_read, &[], "files, pipes, sockets"),
    call(libc::SYS_write, &[], "files, pipes, sockets"),
    call(libc::SYS_readv, &[], "files, pipes, sockets"),
    call(libc::SYS_writev, &[], "files, pipes, sockets"),
    call(libc::SYS_pread64, &[], "the store"),
    call(libc::SYS_pwrite64, &[], "the store, control groups"),
    call(libc::SYS_preadv, &[], "the store"),
    call(libc::SYS_pwritev, &[], "the store"),
    call(libc::SYS_open, &[], "files"),
    call(libc::SYS_openat, &[], "files"),
    call(libc::SYS_openat2, &[], "files below a directory"),
    call(libc::SYS_close, &[], "descriptors"),
    call(libc::SYS_close_range, &[], "descriptors"),
    call(libc::SYS_lseek, &[], "holes of images"),
    call(libc::SYS_stat, &[], "files"),
    call(libc::SYS_lstat, &[], "files"),
    call(libc::SYS_fstat, &[], "files"),
    call(libc::SYS_newfstatat, &[], "files"),
    call(libc::SYS_statx, &[], "files"),
    call(libc::SYS_statfs, &[], "room on the store's disk"),
    call(libc::SYS_fstatfs, &[], "room on the store's disk"),
    call(libc::SYS_access, &[], "files"),
    call(libc::SYS_faccessat, &[], "files"),
    call(libc::SYS_faccessat2, &[], "files"),
    call(libc::SYS_readlink, &[], "files"),
    call(libc::SYS_readlinkat, &[], "files"),
    call(libc::SYS_getdents64, &[], "directories"),
    call(libc::SYS_getcwd, &[], "the working directory"),
    call(libc::SYS_mkdir, &[], "the store"),
    call(libc::SYS_mkdirat, &[], "the store"),
    call(libc::SYS_rmdir, &[], "the store"),
    call(libc::SYS_unlink, &[], "the store, the admin socket"),
    call(libc::SYS_unlinkat, &[], "the store"),
    call(libc::SYS_rename, &[], "the store, logs"),
    call(libc::SYS_renameat, &[], "the store"),
    call(libc::SYS_renameat2, &[], "the store"),
    call(libc::SYS_symlinkat, &[], "links in volumes"),
    call(libc::SYS_link, &[], "the store"),
    call(libc::SYS_linkat, &[], "the store"),
    call(libc::SYS_chmod, &[], "the store, the admin socket"),
    call(libc::SYS_fchmod, &[], "the store, the kernel"),
    call(libc::SYS_fchmodat, &[], "the store"),
    call(libc::SYS_umask, &[], "the admin socket"),
    call(libc::SYS_ftruncate, &[], "images"),
    call(libc::SYS_fallocate, &[], "images"),
    call(libc::SYS_fsync, &[], "the store"),
    call(libc::SYS_fdatasync, &[], "the store"),
    call(libc::SYS_sync_file_range, &[], "the store"),
    call(libc::SYS_fadvise64, &[], "reading ahead"),
    call(SYS_CACHESTAT, &[], "whether the memory of an image is in the page cache"),
    call(libc::SYS_readahead, &[], "reading ahead"),
    call(libc::SYS_copy_file_range, &[], "the store"),
    call(libc::SYS_sendfile, &[], "the standard library copies with it"),
    call(libc::SYS_splice, &[], "the standard library copies with it"),
    call(libc::SYS_utimensat, &[], "the store"),
    call(libc::SYS_flock, &[], "locks of the store"),
    call(libc::SYS_dup, &[], "descriptors"),
    call(libc::SYS_dup2, &[], "descriptors"),
    call(libc::SYS_dup3, &[], "descriptors"),
    call(libc::SYS_fcntl, &[], "flags, copies and seals of descriptors"),
    call(libc::SYS_pipe2, &[], "logs and consoles"),
    call(libc::SYS_memfd_create, &[], "the kernel, messages"),
    call(
        libc::SYS_ioctl,
        &[
            &[is_request(libc::FIONBIO)],
            &[is_request(libc::FIONREAD)],
            &[is_request(libc::TIOCOUTQ)],
            &[is_request(libc::FIOCLEX)],
            &[is_request(libc::TCGETS)],
            &[is_request(libc::TIOCGWINSZ)],
            &[is(1, NS_GET_PARENT)],
            &[is(1, FICLONE)],
        ],
        "what waits on a socket, whether something is a terminal (nothing that types there), \
         which namespace a state helper joins; copies of volumes that share their blocks",
    ),
    // Waiting.
    call(libc::SYS_poll, &[], "waiting"),
    call(libc::SYS_ppoll, &[], "waiting"),
    call(libc::SYS_epoll_create1, &[], "waiting"),
    call(libc::SYS_epoll_ctl, &[], "waiting"),
    call(libc::SYS_epoll_wait, &[], "waiting"),
    call(libc::SYS_epoll_pwait, &[], "waiting"),
    call(libc::SYS_epoll_pwait2, &[], "waiting"),
    call(libc::SYS_eventfd2, &[], "waking threads"),
    call(libc::SYS_futex, &[], "waiting"),
    call(libc::SYS_nanosleep, &[], "waiting"),
    call(libc::SYS_clock_nanosleep, &[], "waiting"),
    call(libc::SYS_restart_syscall, &[], "waiting again after a stop"),
    // Processes: its sandboxes, which are in its user namespace.
    call(libc::SYS_pidfd_open, &[], "copies of templates"),
    call(libc::SYS_pidfd_send_signal, &[], "ends sandboxes, makes them look"),
    call(libc::SYS_kill, &[], "whether a process is there"),
    call(libc::SYS_prlimit64, &[], "limits of sandboxes, its own of descriptors"),
    call(libc::SYS_sched_setaffinity, &[], "wakes a zygote on the processor of its client"),
    call(libc::SYS_getcpu, &[], "on which processor it runs"),
    call(libc::SYS_sched_getaffinity, &[], "how many processors there are"),
    call(libc::SYS_waitid, &[], "finds that it has no children"),
    // Itself.
    call(libc::SYS_clone, &[&[NEW_THREAD]], "threads; processes it has made for it"),
    call(libc::SYS_set_robust_list, &[], "threads"),
    call(libc::SYS_rseq, &[], "threads"),
    call(libc::SYS_gettid, &[], "threads"),
    call(libc::SYS_sched_yield, &[], "lets a zygote go first"),
    call(libc::SYS_setpriority, &[], "threads that may wait for others"),
    call(libc::SYS_getpriority, &[], "threads that may wait for others"),
    call(libc::SYS_membarrier, &[], "libraries' own synchronization"),
    call(libc::SYS_exit, &[], "threads"),
    call(libc::SYS_exit_group, &[], "its end"),
    call(libc::SYS_tgkill, &[], "abort(3)"),
    call(libc::SYS_rt_sigaction, &[], "signals"),
    call(libc::SYS_rt_sigprocmask, &[], "signals"),
    call(libc::SYS_rt_sigreturn, &[], "signals"),
    call(libc::SYS_sigaltstack, &[], "stacks that overflow"),
    call(
        libc::SYS_prctl,
        &[
            &[is(0, libc::PR_SET_NAME as u64)],
            &[is(0, libc::PR_GET_NAME as u64)],
            &[is(0, libc::PR_SET_TIMERSLACK as u64)],
            &[is(0, libc::PR_SET_VMA as u64)],
            &[is(0, PR_GET_AUXV)],
            &[is(0, PR_SCHED_CORE)],
        ],
        "names of threads and memory, exact timers, where the vdso is, who shares a core",
    ),
    call(libc::SYS_mmap, &[&[NOT_EXECUTABLE]], "memory; it loads no libraries"),
    call(libc::SYS_mprotect, &[&[NOT_EXECUTABLE]], "memory"),
    call(libc::SYS_munmap, &[], "memory"),
    call(libc::SYS_mremap, &[], "memory"),
    call(libc::SYS_madvise, &[], "memory"),
    call(libc::SYS_mincore, &[], "memory"),
    call(libc::SYS_brk, &[], "memory"),
    call(libc::SYS_getrandom, &[], "seeds"),
    call(libc::SYS_clock_gettime, &[], "clocks where the vdso cannot"),
    call(libc::SYS_clock_getres, &[], "clocks"),
    call(libc::SYS_gettimeofday, &[], "clocks"),
    call(libc::SYS_time, &[], "clocks"),
    call(libc::SYS_getrusage, &[], "its own use"),
    call(libc::SYS_times, &[], "its own use"),
    call(libc::SYS_sysinfo, &[], "memory of the machine"),
    call(libc::SYS_uname, &[], "the machine"),
    call(libc::SYS_getpid, &[], "itself"),
    call(libc::SYS_getppid, &[], "itself"),
    call(libc::SYS_getuid, &[], "itself"),
    call(libc::SYS_geteuid, &[], "itself"),
    call(libc::SYS_getgid, &[], "itself"),
    call(libc::SYS_getegid, &[], "itself"),
    call(libc::SYS_capget, &[], "itself"),
];

/// In place of the same calls on the list, for a daemon with the user id of whoever started
/// it: the servers of that user, and of its desktop, trust whoever reaches their sockets with
/// that id, and those in the abstract namespace are reached from everywhere (unix(7)). Pairs of
/// datagram sockets can be connected to others.
static CALLERS_SOCKETS: &[Call] = &[
    call(
        libc::SYS_socket,
        &[
            &[is(0, libc::AF_INET as u64)],
            &[is(0, libc::AF_INET6 as u64)],
            &[is(0, libc::AF_NETLINK as u64)],
        ],
        "egress and its bytes, upstream connections, looking up names and addresses of the host",
    ),
    call(
        libc::SYS_socketpair,
        &[&[is_of_type(libc::SOCK_SEQPACKET)], &[is_of_type(libc::SOCK_STREAM)]],
        "control sockets of sandboxes",
    ),
];

/// The type of a socket without the flags that come with it (`SOCK_TYPE_MASK`, linux/net.h).
const fn is_of_type(kind: libc::c_int) -> Check {
    Check { argument: 1, mask: 0xf, value: kind as u64 }
}

/// The calls of a daemon.
fn calls_of(kind: UserKind) -> impl Iterator<Item = Call> {
    let own = match kind {
        UserKind::Other => &[],
        UserKind::Caller => CALLERS_SOCKETS,
    };
    let replaced = |call: &&Call| own.iter().any(|own| own.number == call.number);
    CALLS.iter().filter(move |call| !replaced(call)).chain(own).copied()
}

/// Let through by the filter of the list, and refused by another: see [`install`].
const CLONE3: Call = call(libc::SYS_clone3, &[], "is refused in such a way that clone(2) is used");
/// What fetchers may do besides: the C library sends questions for names with it.
static FETCHERS_CALLS: &[Call] =
    &[call(libc::SYS_sendmmsg, &[], "looking up the names of registries")];

/// Forbids a fetcher what a daemon is forbidden. To be called before there are threads.
///
/// # Errors
/// The host has no filters.
pub(super) fn install_for_fetcher(kind: UserKind) -> io::Result<()> {
    install_calls(calls_of(kind).chain(FETCHERS_CALLS.iter().copied()))
}

/// Forbids everything else, for good. To be called before there are threads.
///
/// # Errors
/// The host has no filters.
pub(super) fn install(kind: UserKind) -> io::Result<()> {
    install_calls(calls_of(kind))
}

fn install_calls(calls: impl Iterator<Item = Call>) -> io::Result<()> {
    // Its arguments lie in memory, where no filter sees them. Libraries then make threads
    // with clone(2).
    refuse_call(libc::SYS_clone3, libc::ENOSYS as u32)?;
    install_list(calls.chain([CLONE3]), Otherwise::Fail(libc::EPERM as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_is_listed_once_and_for_a_reason() {
        for (at, call) in CALLS.iter().enumerate() {
            assert!(call.reason.len() >= 5, "{}", call.number);
            assert!(CALLS[..at].iter().all(|other| other.number != call.number));
        }
    }

    #[test]
    fn the_callers_daemon_has_the_same_calls_with_fewer_sockets() {
        let numbers = |kind| {
            let mut numbers: Vec<_> = calls_of(kind).map(|call| call.number).collect();
            numbers.sort_unstable();
            numbers
        };
        assert_eq!(numbers(UserKind::Other), numbers(UserKind::Caller));
        let socket = calls_of(UserKind::Caller).find(|call| call.number == libc::SYS_socket);
        let families = socket.expect("on the list").rules.iter().map(|rule| rule[0].value);
        assert!(families.into_iter().all(|family| family != libc::AF_UNIX as u64));
    }

    /// A filter holds for the thread that installs it, which is not the test's.
    #[test]
    fn the_callers_daemon_reaches_no_socket_with_a_path() {
        use rustix::io::Errno;
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socket, socketpair};
        let tried = std::thread::spawn(|| {
            install(UserKind::Caller).unwrap();
            let unix = |kind| socket(AddressFamily::UNIX, kind, None).map(drop);
            let pair =
                |kind| socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).map(drop);
            [
                unix(SocketType::STREAM),
                unix(SocketType::DGRAM),
                pair(SocketType::DGRAM),
                pair(SocketType::STREAM),
                pair(SocketType::SEQPACKET),
                socket(AddressFamily::INET, SocketType::STREAM, None).map(drop),
            ]
        });
        let refused = Err(Errno::PERM);
        assert_eq!(tried.join().unwrap(), [refused, refused, refused, Ok(()), Ok(()), Ok(())]);
    }

    #[test]
    fn nothing_on_the_list_makes_or_changes_other_processes() {
        for forbidden in [
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_fork,
            libc::SYS_vfork,
            libc::SYS_clone3,
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_pidfd_getfd,
            libc::SYS_setns,
            libc::SYS_unshare,
            libc::SYS_mount,
            libc::SYS_open_tree,
            libc::SYS_pivot_root,
            libc::SYS_chroot,
            libc::SYS_setresuid,
            libc::SYS_setuid,
            libc::SYS_capset,
            libc::SYS_bpf,
            libc::SYS_io_uring_setup,
            libc::SYS_userfaultfd,
            libc::SYS_perf_event_open,
            libc::SYS_keyctl,
            libc::SYS_init_module,
            libc::SYS_open_by_handle_at,
            libc::SYS_chown,
            libc::SYS_mknodat,
        ] {
            assert!(CALLS.iter().all(|call| call.number != forbidden), "{forbidden}");
        }
    }
}
