//! The host calls of a rewinder.

use std::io;

use crate::allowed::{
    ALLOCATOR, Call, Check, MAPS_ITS_OWN, O_LARGEFILE, Otherwise, call, install_list, is,
};
use crate::pagemap::PAGEMAP_SCAN;

/// A file is opened with these flags, and never made.
const fn open_with(flags: i32) -> Check {
    Check { argument: 2, mask: 0xffff_ffff & !O_LARGEFILE, value: (flags | libc::O_CLOEXEC) as u64 }
}

static CALLS: &[Call] = &[
    call(
        libc::SYS_ptrace,
        &[],
        "stops sandboxes and sets their registers; its capabilities reach nothing but processes of \
         the sandboxes' user namespace",
    ),
    call(libc::SYS_wait4, &[], "waits until a sandbox has stopped"),
    call(
        libc::SYS_kill,
        &[&[is(1, libc::SIGKILL as u64)]],
        "ends a sandbox that cannot be put back",
    ),
    call(
        libc::SYS_openat,
        &[
            &[open_with(libc::O_RDONLY)],
            &[open_with(libc::O_RDWR)],
            &[open_with(libc::O_RDONLY | libc::O_DIRECTORY)],
            &[open_with(libc::O_PATH | libc::O_DIRECTORY)],
        ],
        "opens files in /proc of sandboxes, their memory for writing; the root is empty",
    ),
    call(libc::SYS_readlinkat, &[], "asks /proc for its own number"),
    call(libc::SYS_getpid, &[], "compares it with what the host says"),
    call(libc::SYS_read, &[], "reads files of /proc"),
    call(libc::SYS_lseek, &[], "lists the descriptors of a sandbox again"),
    call(libc::SYS_getdents64, &[], "lists the descriptors of a sandbox"),
    call(libc::SYS_newfstatat, &[], "asks what they stand for"),
    call(libc::SYS_statx, &[], "as newfstatat; the standard library sizes its buffers by it"),
    call(libc::SYS_pread64, &[], "reads memory of sandboxes"),
    call(libc::SYS_pwritev, &[], "writes memory of sandboxes, all that is open for writing"),
    call(
        libc::SYS_process_vm_writev,
        &[],
        "writes memory of sandboxes, with less copying; reaches what ptrace reaches",
    ),
    call(libc::SYS_ioctl, &[&[is(1, PAGEMAP_SCAN)]], "asks a page map for runs of pages"),
    call(libc::SYS_close, &[], "closes the files of a sandbox that has ended"),
    call(
        libc::SYS_fcntl,
        &[&[is(1, libc::F_GETFD as u64)]],
        "the standard library asks, in debug builds, whether what it closes is open",
    ),
    call(libc::SYS_recvmsg, &[], "takes requests from the caller's socket"),
    call(libc::SYS_sendmsg, &[], "answers; there is no socket but the caller's"),
    call(libc::SYS_poll, &[], "asks a pidfd whether its process runs"),
    call(libc::SYS_ppoll, &[], "as poll"),
    MAPS_ITS_OWN,
    call(
        libc::SYS_clock_gettime,
        &[],
        "says what a rewind took, and looks at the clock where the vdso cannot",
    ),
    call(libc::SYS_getrandom, &[], "seeds hash tables"),
    call(libc::SYS_exit_group, &[], "ends the process"),
];

/// Forbids new privileges and everything that is not on the list, for good.
pub(crate) fn install() -> io::Result<()> {
    install_list(CALLS.iter().chain(ALLOCATOR).copied(), Otherwise::Kill)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_unique_and_has_a_reason() {
        for (at, call) in CALLS.iter().enumerate() {
            assert!(call.reason.len() > 5, "{}", call.number);
            assert!(CALLS[..at].iter().all(|other| other.number != call.number));
        }
    }

    #[test]
    fn nothing_on_the_list_makes_processes_or_reaches_the_network() {
        for forbidden in [
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_execve,
            libc::SYS_clone,
            libc::SYS_clone3,
            libc::SYS_fork,
            libc::SYS_pidfd_getfd,
            libc::SYS_setns,
            libc::SYS_mount,
            libc::SYS_bpf,
            libc::SYS_write,
        ] {
            assert!(CALLS.iter().all(|call| call.number != forbidden), "{forbidden}");
        }
    }
}
