//! The host calls of the resolver process and its workers.
//!
//! A worker runs the C library and whatever modules of it the host uses for names
//! (nsswitch.conf(5)). A call that is not on the list fails instead of killing: modules
//! try things and go on without.

use std::io;

use seccompiler::{BpfProgram, apply_filter};

use crate::allowed::{
    ALLOCATOR, Call, Check, O_LARGEFILE, Otherwise, READ_WRITE, call, has_no_bits_but, is,
    is_request, program,
};

/// To read a file; nothing is opened for writing, or made.
const fn opens_to_read(argument: u8) -> Check {
    const HARMLESS: u64 = (libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY) as u64;
    has_no_bits_but(argument, O_LARGEFILE | HARMLESS)
}
/// TCP and UDP, whatever the flags in the upper bits are (socket(2)).
const fn is_kind(kind: i32) -> Check {
    Check { argument: 1, mask: 0xf, value: kind as u64 }
}

const INTERNET: [[Check; 2]; 4] = [
    [is(0, libc::AF_INET as u64), is_kind(libc::SOCK_DGRAM)],
    [is(0, libc::AF_INET as u64), is_kind(libc::SOCK_STREAM)],
    [is(0, libc::AF_INET6 as u64), is_kind(libc::SOCK_DGRAM)],
    [is(0, libc::AF_INET6 as u64), is_kind(libc::SOCK_STREAM)],
];
const UNIX: [Check; 2] = [is(0, libc::AF_UNIX as u64), is_kind(libc::SOCK_STREAM)];
const SOCKETS: &str = "asks name servers; finds out which address a connection would come from";

/// Whether the host has a resolver that is asked over a Unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalService {
    /// It has: systemd-resolved.
    Reachable,
    /// It has not.
    None,
}

/// Which calls a process may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// Those of a worker, which parses what name servers say.
    Worker,
    /// Those of the resolver process, which makes workers.
    Resolver,
}

impl List {
    /// The calls on it.
    fn calls(self, service: LocalService) -> impl Iterator<Item = Call> {
        static WITHOUT: &[&[Check]] = &[&INTERNET[0], &INTERNET[1], &INTERNET[2], &INTERNET[3]];
        static WITH: &[&[Check]] = &[&INTERNET[0], &INTERNET[1], &INTERNET[2], &INTERNET[3], &UNIX];
        let kinds = if service == LocalService::Reachable { WITH } else { WITHOUT };
        let more: &[Call] = if self == Self::Resolver { RESOLVER_CALLS } else { &[] };
        let socket = call(libc::SYS_socket, kinds, SOCKETS);
        std::iter::once(socket).chain(WORKER_CALLS.iter().chain(ALLOCATOR).chain(more).copied())
    }
}

static WORKER_CALLS: &[Call] = &[
    // Name servers. There is no listen(2): nobody can be waited for. musl asks for the port
    // from which it asks, and would not ask without; other C libraries let the host choose.
    #[cfg(target_env = "musl")]
    call(libc::SYS_bind, &[], "asks name servers from a port that the host chooses"),
    call(libc::SYS_connect, &[], "asks name servers"),
    call(libc::SYS_sendto, &[], "questions to name servers"),
    call(libc::SYS_sendmmsg, &[], "two questions at once"),
    call(libc::SYS_sendmsg, &[], "the answer to the caller; questions"),
    call(libc::SYS_recvfrom, &[], "answers of name servers"),
    call(libc::SYS_recvmsg, &[], "the question; answers of name servers"),
    call(libc::SYS_recvmmsg, &[], "answers of name servers"),
    call(libc::SYS_setsockopt, &[], "options of its own sockets"),
    call(libc::SYS_getsockopt, &[], "options of its own sockets"),
    call(libc::SYS_getsockname, &[], "in which order addresses are best (RFC 6724)"),
    call(libc::SYS_getpeername, &[], "who answers"),
    call(libc::SYS_shutdown, &[], "ends connections"),
    call(
        libc::SYS_ioctl,
        &[&[is_request(libc::FIONREAD)], &[is_request(libc::FIONBIO)]],
        "how long an answer is",
    ),
    call(libc::SYS_poll, &[], "waits for answers"),
    call(libc::SYS_ppoll, &[], "waits for answers"),
    // The few files of its root directory.
    call(libc::SYS_open, &[&[opens_to_read(1)]], "reads files of its root directory"),
    call(
        libc::SYS_openat,
        &[&[opens_to_read(2)]],
        "reads files of its root directory, which has copies of public ones",
    ),
    call(libc::SYS_read, &[], "reads these files; answers over TCP"),
    call(libc::SYS_readv, &[], "answers over TCP"),
    call(libc::SYS_write, &[], "questions over TCP; there is no file to be written"),
    call(libc::SYS_writev, &[], "questions over TCP"),
    call(libc::SYS_lseek, &[], "reads files line by line"),
    call(libc::SYS_fstat, &[], "whether files have changed"),
    call(libc::SYS_stat, &[], "whether files have changed"),
    call(libc::SYS_newfstatat, &[], "whether files have changed"),
    call(libc::SYS_statx, &[], "whether files have changed"),
    call(libc::SYS_access, &[], "whether files are there"),
    call(libc::SYS_faccessat, &[], "whether files are there"),
    call(libc::SYS_close, &[], "closes its own"),
    call(libc::SYS_fcntl, &[], "flags of its own descriptors"),
    // Itself.
    call(
        libc::SYS_mmap,
        &[&[READ_WRITE]],
        "memory for the allocator; nothing that can be executed",
    ),
    call(libc::SYS_futex, &[], "locks, which nobody else holds"),
    call(libc::SYS_rt_sigprocmask, &[], "modules of systemd block signals for a moment"),
    call(libc::SYS_clock_gettime, &[], "time-outs where the vdso cannot"),
    call(libc::SYS_gettimeofday, &[], "time-outs where the vdso cannot"),
    call(libc::SYS_time, &[], "time-outs where the vdso cannot"),
    call(libc::SYS_clock_nanosleep, &[], "waits before it asks again"),
    call(libc::SYS_getrandom, &[], "numbers of questions, which nobody must guess"),
    call(libc::SYS_uname, &[], "the domain in the host's name"),
    call(libc::SYS_getpid, &[], "itself"),
    call(libc::SYS_gettid, &[], "itself"),
    call(libc::SYS_getuid, &[], "itself"),
    call(libc::SYS_geteuid, &[], "itself"),
    call(libc::SYS_getgid, &[], "itself"),
    call(libc::SYS_getegid, &[], "itself"),
    call(libc::SYS_exit_group, &[], "its end"),
];

static RESOLVER_CALLS: &[Call] = &[
    call(
        libc::SYS_clone,
        &[&[is(0, libc::SIGCHLD as u64)]],
        "forks a worker, which inherits this filter and shares no memory",
    ),
    call(libc::SYS_pidfd_open, &[], "knows a worker by its descriptor"),
    call(
        libc::SYS_pidfd_send_signal,
        &[&[is(1, libc::SIGKILL as u64)]],
        "ends workers that take too long",
    ),
    call(libc::SYS_waitid, &[], "reaps workers"),
    call(libc::SYS_getppid, &[], "a worker sees whether the resolver process is still there"),
    call(libc::SYS_prlimit64, &[], "a worker limits its own time; nobody raises a limit"),
    call(
        libc::SYS_prctl,
        &[&[is(0, libc::PR_SET_PDEATHSIG as u64)], &[is(0, libc::PR_SET_NO_NEW_PRIVS as u64)]],
        "ends the worker with the resolver process; the other can only be set, and is",
    ),
    call(
        libc::SYS_seccomp,
        &[&[is(0, libc::SECCOMP_SET_MODE_FILTER as u64)]],
        "a worker installs the shorter list; a further filter can only forbid more",
    ),
];

/// A list as a filter. Making it takes longer than installing it, so that each worker is
/// given one that was made before.
pub struct Filter(BpfProgram);

impl Filter {
    pub fn new(list: List, service: LocalService) -> io::Result<Self> {
        program(list.calls(service), Otherwise::Fail(libc::EPERM as u32))
            .map(Self)
            .map_err(io::Error::other)
    }

    /// Forbids new privileges and everything that is not on the list, for good.
    pub fn install(&self) -> io::Result<()> {
        apply_filter(&self.0).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_unique_and_has_a_reason() {
        let calls: Vec<Call> = List::Resolver.calls(LocalService::Reachable).collect();
        for (at, call) in calls.iter().enumerate() {
            assert!(call.reason.len() > 5, "{}", call.number);
            assert!(calls[..at].iter().all(|other| other.number != call.number), "{}", call.number);
        }
    }

    #[test]
    fn nothing_on_the_list_reaches_other_processes() {
        for forbidden in [
            libc::SYS_bind,
            libc::SYS_listen,
            libc::SYS_accept4,
            libc::SYS_socketpair,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_clone3,
            libc::SYS_fork,
            libc::SYS_vfork,
            libc::SYS_kill,
            libc::SYS_tgkill,
            libc::SYS_tkill,
            libc::SYS_pidfd_getfd,
            libc::SYS_setns,
            libc::SYS_unshare,
            libc::SYS_mount,
            libc::SYS_chroot,
            libc::SYS_pivot_root,
            libc::SYS_setuid,
            libc::SYS_setresuid,
            libc::SYS_capset,
            libc::SYS_open_by_handle_at,
            libc::SYS_openat2,
            libc::SYS_bpf,
            libc::SYS_io_uring_setup,
            libc::SYS_keyctl,
            libc::SYS_rt_sigaction,
            libc::SYS_shmget,
            libc::SYS_mq_open,
        ] {
            let mut calls = List::Resolver.calls(LocalService::Reachable);
            assert!(calls.all(|call| call.number != forbidden), "{forbidden}");
        }
        for forbidden in [
            libc::SYS_clone,
            libc::SYS_pidfd_open,
            libc::SYS_pidfd_send_signal,
            libc::SYS_prctl,
            libc::SYS_prlimit64,
            libc::SYS_seccomp,
        ] {
            let mut calls = List::Worker.calls(LocalService::Reachable);
            assert!(calls.all(|call| call.number != forbidden), "{forbidden}");
        }
    }
}
