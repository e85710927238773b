//! The host calls of a process that serves files.

use std::io;

use crate::allowed::{
    ALLOCATOR, Call, Check, O_LARGEFILE, Otherwise, READ_WRITE, call, has_bits, has_no_bits_but,
    install_list, is, is_request, refuse_call,
};
use crate::broker::BoundAccess;

/// Threads: they share everything, and get no namespaces.
const NEW_THREAD: Check = has_bits(
    0,
    (libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD)
        as u64,
);
/// Nothing is opened for writing, or made.
const OPENS_TO_READ: Check = has_no_bits_but(
    2,
    O_LARGEFILE
        | (libc::O_PATH
            | libc::O_DIRECTORY
            | libc::O_NOFOLLOW
            | libc::O_NONBLOCK
            | libc::O_NOCTTY
            | libc::O_CLOEXEC) as u64,
);

static CALLS: &[Call] = &[
    // Files.
    call(libc::SYS_statx, &[], "looks at files without asking their server"),
    call(libc::SYS_newfstatat, &[], "attributes"),
    call(libc::SYS_fstat, &[], "attributes"),
    call(libc::SYS_statfs, &[], "room on a file system"),
    call(libc::SYS_fstatfs, &[], "room on a file system"),
    call(libc::SYS_readlinkat, &[], "targets of links"),
    call(libc::SYS_getdents64, &[], "entries of directories"),
    call(libc::SYS_read, &[], "the list of mounts"),
    call(libc::SYS_lseek, &[], "the list of mounts, directories"),
    call(libc::SYS_pread64, &[], "files of bound directories"),
    call(libc::SYS_fsync, &[], "a sandbox wants to know that its writes are stored"),
    call(libc::SYS_close, &[], "closes its own"),
    call(libc::SYS_fcntl, &[], "flags and copies of its own descriptors"),
    // The sandbox and the caller.
    call(libc::SYS_recvmsg, &[], "requests of the caller"),
    call(libc::SYS_sendmsg, &[], "replies to the sandbox, on a socket that it was given"),
    call(libc::SYS_poll, &[], "waits for them; whether there are new mounts"),
    call(libc::SYS_ppoll, &[], "as poll"),
    call(
        libc::SYS_ioctl,
        &[&[is_request(libc::TIOCOUTQ)]],
        "how much the sandbox has left unread; changes nothing",
    ),
    call(libc::SYS_shutdown, &[], "ends the sandbox' own socket"),
    // Itself.
    call(libc::SYS_clone, &[&[NEW_THREAD]], "threads, some of which a file system lets wait"),
    call(libc::SYS_set_robust_list, &[], "threads"),
    call(libc::SYS_rseq, &[], "threads"),
    call(libc::SYS_gettid, &[], "threads"),
    call(libc::SYS_sched_getaffinity, &[], "threads"),
    call(libc::SYS_sched_yield, &[], "threads"),
    call(libc::SYS_sigaltstack, &[], "stacks that overflow"),
    call(libc::SYS_rt_sigprocmask, &[], "threads"),
    call(libc::SYS_rt_sigreturn, &[], "signals"),
    call(libc::SYS_prctl, &[&[is(0, libc::PR_SET_NAME as u64)]], "names of threads"),
    call(libc::SYS_futex, &[], "threads wait for each other"),
    call(libc::SYS_mmap, &[&[READ_WRITE]], "memory, never to be executed"),
    call(libc::SYS_getrandom, &[], "seeds hash tables"),
    call(libc::SYS_clock_gettime, &[], "how long a request takes"),
    call(libc::SYS_getpid, &[], "itself"),
    call(libc::SYS_exit, &[], "ends threads"),
    call(libc::SYS_exit_group, &[], "its end"),
];

const READ_ONLY: Call =
    call(libc::SYS_openat, &[&[OPENS_TO_READ]], "opens files and directories to read them");

static WRITING: &[Call] = &[
    call(libc::SYS_openat, &[], "opens and makes files"),
    call(libc::SYS_pwrite64, &[], "writes files"),
    call(libc::SYS_ftruncate, &[], "changes their length"),
    call(libc::SYS_mkdirat, &[], "makes directories"),
    call(libc::SYS_unlinkat, &[], "removes files and directories"),
    call(libc::SYS_renameat2, &[], "moves files and directories"),
    call(libc::SYS_renameat, &[], "moves files and directories"),
    call(libc::SYS_linkat, &[], "makes links"),
    call(libc::SYS_symlinkat, &[], "makes links"),
    call(libc::SYS_fchmodat, &[], "permissions; set-user-id is never set"),
    call(libc::SYS_utimensat, &[], "times"),
];

/// The calls of a process that may do so much.
fn calls(access: BoundAccess) -> impl Iterator<Item = Call> {
    let more = match access {
        BoundAccess::Read => std::slice::from_ref(&READ_ONLY),
        BoundAccess::Write => WRITING,
    };
    CALLS.iter().chain(ALLOCATOR).chain(more).copied()
}

/// Let through by the filter of the list, and refused by another.
const CLONE3: Call = call(libc::SYS_clone3, &[], "is refused in such a way that clone(2) is used");

/// Forbids new privileges and everything that is not on the list, for good.
pub fn install(access: BoundAccess) -> io::Result<()> {
    // Its arguments lie in memory, where no filter sees them.
    refuse_call(libc::SYS_clone3, libc::ENOSYS as u32)?;
    install_list(calls(access).chain([CLONE3]), Otherwise::Fail(libc::EPERM as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_unique_and_has_a_reason() {
        for access in [BoundAccess::Read, BoundAccess::Write] {
            let all: Vec<Call> = calls(access).collect();
            for (at, call) in all.iter().enumerate() {
                assert!(call.reason.len() >= 5, "{}", call.number);
                assert!(all[..at].iter().all(|other| other.number != call.number));
            }
        }
    }

    #[test]
    fn nothing_on_the_list_reaches_other_processes_or_the_network() {
        for forbidden in [
            libc::SYS_socket,
            libc::SYS_socketpair,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_fork,
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_pidfd_open,
            libc::SYS_pidfd_getfd,
            libc::SYS_kill,
            libc::SYS_tgkill,
            libc::SYS_setfsuid,
            libc::SYS_setuid,
            libc::SYS_setresuid,
            libc::SYS_capset,
            libc::SYS_mount,
            libc::SYS_setns,
            libc::SYS_unshare,
            libc::SYS_mknodat,
            libc::SYS_fchownat,
            libc::SYS_open_by_handle_at,
            libc::SYS_io_uring_setup,
            libc::SYS_bpf,
        ] {
            let mut all = calls(BoundAccess::Write);
            assert!(all.all(|call| call.number != forbidden), "{forbidden}");
        }
        for ioctl in calls(BoundAccess::Write).filter(|call| call.number == libc::SYS_ioctl) {
            assert!(!ioctl.rules.is_empty(), "it changes devices");
        }
        for forbidden in WRITING.iter().skip(1) {
            let mut all = calls(BoundAccess::Read);
            assert!(all.all(|call| call.number != forbidden.number), "{}", forbidden.number);
        }
    }
}
