//! The host calls of the state helper and its workers.

use std::io;

use crate::allowed::{
    ALLOCATOR, Call, Check, MAPS_ITS_OWN, O_LARGEFILE, Otherwise, call, install_list, is,
};
use crate::pagemap::PAGEMAP_SCAN;

/// To read a file, and to name a directory. Nothing is opened for writing, or made.
const OPEN_TO_READ: Check = Check {
    argument: 2,
    mask: 0xffff_ffff & !O_LARGEFILE,
    value: (libc::O_RDONLY | libc::O_CLOEXEC) as u64,
};
const OPEN_DIRECTORY: Check = Check {
    argument: 2,
    mask: 0xffff_ffff & !O_LARGEFILE,
    value: (libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC) as u64,
};

/// Which calls a process may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum List {
    /// Those of a worker, which parses what a sandbox has made.
    Worker,
    /// Those of the helper, which opens files for workers and makes them.
    Helper,
}

impl List {
    /// The calls on it; any other kills.
    fn calls(self) -> impl Iterator<Item = &'static Call> {
        let more: &[Call] = if self == Self::Helper { HELPER_CALLS } else { &[] };
        WORKER_CALLS.iter().chain(ALLOCATOR).chain(more)
    }
}

static WORKER_CALLS: &[Call] = &[
    call(libc::SYS_pread64, &[], "reads memory of sandboxes, blobs and the image"),
    call(libc::SYS_pwrite64, &[], "writes the image, the only file that is open for writing"),
    call(libc::SYS_ioctl, &[&[is(1, PAGEMAP_SCAN)]], "asks a page map for runs of pages"),
    call(libc::SYS_close, &[], "closes what a request has brought or opened"),
    call(
        libc::SYS_fcntl,
        &[&[is(1, libc::F_GETFD as u64)]],
        "the standard library asks, in debug builds, whether what it closes is open",
    ),
    call(libc::SYS_ftruncate, &[], "gives the image its length"),
    call(libc::SYS_recvmsg, &[], "takes requests, blobs and files from the caller's socket"),
    call(libc::SYS_sendmsg, &[], "answers; there is no socket but the caller's"),
    call(libc::SYS_poll, &[], "asks a pidfd whether its process runs"),
    call(libc::SYS_ppoll, &[], "as poll"),
    MAPS_ITS_OWN,
    call(libc::SYS_clock_gettime, &[], "looks at the clock where the vdso cannot"),
    call(libc::SYS_getrandom, &[], "seeds hash tables"),
    call(libc::SYS_exit_group, &[], "ends the process"),
];

static HELPER_CALLS: &[Call] = &[
    call(
        libc::SYS_openat,
        &[&[OPEN_TO_READ], &[OPEN_DIRECTORY]],
        "opens files in /proc of sandboxes; the root is empty, and the capabilities reach nothing \
         but processes of the sandboxes' user namespace",
    ),
    call(libc::SYS_read, &[], "reads small files of /proc"),
    call(libc::SYS_getdents64, &[], "lists the threads of a process of a sandbox"),
    call(
        libc::SYS_clone,
        &[&[is(0, libc::SIGCHLD as u64)]],
        "forks a worker, which inherits this filter and shares no memory",
    ),
    call(libc::SYS_wait4, &[], "waits for the worker"),
    call(
        libc::SYS_socketpair,
        &[&[
            is(0, libc::AF_UNIX as u64),
            is(1, (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as u64),
        ]],
        "connects a worker with its mate; the pair leads nowhere else",
    ),
    call(libc::SYS_capset, &[], "a worker gives up the capabilities; no call gives any"),
    call(
        libc::SYS_prctl,
        &[&[is(0, libc::PR_SET_PDEATHSIG as u64)], &[is(0, libc::PR_SET_NO_NEW_PRIVS as u64)]],
        "ends the worker with the helper; the other can only be set, and is",
    ),
    call(
        libc::SYS_seccomp,
        &[&[is(0, libc::SECCOMP_SET_MODE_FILTER as u64)]],
        "a worker installs the shorter list; a further filter can only forbid more",
    ),
];

/// Forbids new privileges and everything that is not on the list, for good.
pub(super) fn install(list: List) -> io::Result<()> {
    install_list(list.calls().copied(), Otherwise::Kill)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allowed::program;
    use seccompiler::apply_filter;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn every_entry_is_unique_and_has_a_reason() {
        for (at, call) in List::Helper.calls().enumerate() {
            assert!(call.reason.len() > 5, "{}", call.number);
            assert!(List::Helper.calls().take(at).all(|other| other.number != call.number));
        }
    }

    #[test]
    fn nothing_on_the_list_reaches_other_processes_or_the_network() {
        for forbidden in [
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_ptrace,
            libc::SYS_process_vm_writev,
            libc::SYS_clone3,
            libc::SYS_fork,
            libc::SYS_kill,
            libc::SYS_tgkill,
            libc::SYS_pidfd_getfd,
            libc::SYS_pidfd_send_signal,
            libc::SYS_setns,
            libc::SYS_mount,
            libc::SYS_open_by_handle_at,
            libc::SYS_bpf,
            libc::SYS_io_uring_setup,
            libc::SYS_write,
        ] {
            assert!(List::Helper.calls().all(|call| call.number != forbidden), "{forbidden}");
        }
        for forbidden in [libc::SYS_clone, libc::SYS_openat, libc::SYS_read, libc::SYS_prctl] {
            assert!(List::Worker.calls().all(|call| call.number != forbidden), "{forbidden}");
        }
    }

    /// How a process ends that installs the filter and makes one call.
    #[allow(unsafe_code)]
    fn fate(list: List, number: libc::c_long, arguments: [u64; 4]) -> std::process::ExitStatus {
        let program = program(list.calls().copied(), Otherwise::Kill).unwrap();
        let [a, b, c, d] = arguments;
        // SAFETY: the child makes nothing but system calls on memory that was there
        // before; no lock is taken.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = match apply_filter(&program) {
                Ok(()) => {
                    // SAFETY: the addresses are invalid, so that the call fails at most.
                    unsafe { libc::syscall(number, a, b, c, d) };
                    7
                }
                Err(_) => 8,
            };
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        std::process::ExitStatus::from_raw(status)
    }

    #[test]
    fn the_filter_kills_for_any_other_call_or_argument() {
        use List::{Helper, Worker};
        const SEQPACKET: u64 = (libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as u64;
        let at_cwd = libc::AT_FDCWD as u64;
        let (read, write) = (libc::O_CLOEXEC as u64, (libc::O_CLOEXEC | libc::O_RDWR) as u64);
        let anonymous = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
        let executable = (libc::PROT_READ | libc::PROT_EXEC) as u64;
        let read_write = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        for (list, number, arguments) in [
            (Helper, libc::SYS_openat, [at_cwd, 0, read, 0]),
            (Helper, libc::SYS_prctl, [libc::PR_SET_PDEATHSIG as u64, 0, 0, 0]),
            (Helper, libc::SYS_socketpair, [libc::AF_UNIX as u64, SEQPACKET, 0, 0]),
            (Worker, libc::SYS_ioctl, [9999, PAGEMAP_SCAN, 0, 0]),
            (Worker, libc::SYS_mmap, [0, 0, read_write, anonymous]),
            (Worker, libc::SYS_getrandom, [0, 0, 0, 0]),
        ] {
            assert_eq!(fate(list, number, arguments).code(), Some(7), "{number}");
        }
        for (list, number, arguments) in [
            (Worker, libc::SYS_openat, [at_cwd, 0, read, 0]),
            (Helper, libc::SYS_openat, [at_cwd, 0, write, 0]),
            (Helper, libc::SYS_openat, [at_cwd, 0, read | libc::O_CREAT as u64, 0]),
            (Helper, libc::SYS_clone, [libc::CLONE_NEWNS as u64, 0, 0, 0]),
            (Helper, libc::SYS_prctl, [libc::PR_SET_MM as u64, 0, 0, 0]),
            (
                Helper,
                libc::SYS_socketpair,
                [libc::AF_NETLINK as u64, libc::SOCK_DGRAM as u64, 0, 0],
            ),
            (Worker, libc::SYS_socketpair, [libc::AF_UNIX as u64, SEQPACKET, 0, 0]),
            (Helper, libc::SYS_seccomp, [libc::SECCOMP_GET_NOTIF_SIZES as u64, 0, 0, 0]),
            (Worker, libc::SYS_ioctl, [9999, libc::TIOCSTI, 0, 0]),
            (Worker, libc::SYS_mmap, [0, 0, executable, anonymous]),
            (Worker, libc::SYS_mmap, [0, 0, read_write, libc::MAP_SHARED as u64]),
            (Worker, libc::SYS_mprotect, [0, 0, executable, 0]),
            (Worker, libc::SYS_socket, [1, 1, 0, 0]),
            (Worker, libc::SYS_fcntl, [0, libc::F_SETFD as u64, 0, 0]),
            (Worker, libc::SYS_getpid, [0; 4]),
        ] {
            assert_eq!(fate(list, number, arguments).signal(), Some(libc::SIGSYS), "{number}");
        }
    }
}
