//! The table of system calls: number → handler → support note.
//!
//! `docs/syscalls.md` is generated from this table. A number without a row
//! returns `ENOSYS`, is counted, and is named in the trace.

use super::Support::{Full, Missing, Partial};
use super::{Entry, Support};
use crate::args::Kind::{Fd, Hex, Int, Str};
use crate::args::{Handler, Kind, Signature};
use crate::errno::Errno;
use crate::fs::syscalls as fs;
use crate::ipc::sysv;
use crate::mm::{lock, syscalls as mm};
use crate::task::signal::syscalls as signal;
use crate::task::syscalls as task;
use crate::task::timers::{posix, syscalls as time};
use crate::task::{clone, futex};
use crate::{ipc, net};

/// What extended attributes lack.
const XATTR: &str = "no access control lists; what the lower layer's files have is not shown";

/// What locking memory means.
const NOT_LOCKED: &str = "counted and limited; the host may still page the memory out";

/// What priorities and affinities mean.
const NOT_SCHEDULED: &str = "kept, inherited and given back, but not scheduled by";

/// What clone(2) refuses.
const NO_NAMESPACES: &str = "no new namespaces (EPERM); processes do not share signal handlers";

/// A row: number, handler, support. A call has the name of its handler, or that before the
/// `=`.
macro_rules! call {
    ($number:literal, $name:ident = $($handler:ident)::+, $support:expr $(,)?) => {
        row($number, stringify!($name), kinds(&$($handler)::+), |args| $($handler)::+.perform(args), $support)
    };
    ($number:literal, $($handler:ident)::+, $support:expr $(,)?) => {
        row(
            $number,
            last_part(concat!($("::", stringify!($handler)),+)),
            kinds(&$($handler)::+),
            |args| $($handler)::+.perform(args),
            $support,
        )
    };
}

/// Rows of the whole table, in any order; one block per subsystem.
pub const ENTRIES: &[Entry] = &[
    // fs
    call!(0, fs::io::read, Full),
    call!(1, fs::io::write, Full),
    call!(2, fs::descriptors::open, Full),
    call!(3, fs::descriptors::close, Full),
    call!(4, fs::stat::stat, Full),
    call!(5, fs::stat::fstat, Full),
    call!(6, fs::stat::lstat, Full),
    call!(8, fs::io::lseek, Full),
    call!(
        16,
        fs::control::ioctl,
        Partial("FIONREAD, FIONBIO, FIOCLEX, terminals and sockets; the rest is ENOTTY")
    ),
    call!(17, fs::io::pread64, Full),
    call!(18, fs::io::pwrite64, Full),
    call!(19, fs::io::readv, Full),
    call!(20, fs::io::writev, Full),
    call!(21, fs::stat::access, Full),
    call!(32, fs::descriptors::dup, Full),
    call!(33, fs::descriptors::dup2, Full),
    call!(40, fs::copy::sendfile, Full),
    call!(72, fs::control::fcntl, Partial("no leases, no F_NOTIFY")),
    call!(73, fs::locking::flock, Full),
    call!(74, fs::sync::fsync, Full),
    call!(75, fdatasync = fs::sync::fsync, Full),
    call!(76, fs::space::truncate, Full),
    call!(77, fs::space::ftruncate, Full),
    call!(78, fs::directory::getdents, Full),
    call!(79, fs::directory::getcwd, Full),
    call!(80, fs::directory::chdir, Full),
    call!(81, fs::directory::fchdir, Full),
    call!(82, fs::names::rename, Full),
    call!(83, fs::names::mkdir, Full),
    call!(84, fs::names::rmdir, Full),
    call!(85, fs::descriptors::creat, Full),
    call!(86, fs::names::link, Full),
    call!(87, fs::names::unlink, Full),
    call!(88, fs::names::symlink, Full),
    call!(89, fs::stat::readlink, Full),
    call!(90, fs::attributes::chmod, Full),
    call!(91, fs::attributes::fchmod, Full),
    call!(92, fs::attributes::chown, Full),
    call!(93, fs::attributes::fchown, Full),
    call!(94, fs::attributes::lchown, Full),
    call!(95, fs::attributes::umask, Full),
    call!(132, fs::attributes::utime, Full),
    call!(133, fs::names::mknod, Partial("no block devices")),
    row(
        136,
        "ustat",
        &[Hex, Hex],
        |_| Err(Errno::EINVAL),
        Missing("EINVAL, as for a device that is not mounted"),
    ),
    call!(137, fs::stat::statfs, Full),
    call!(138, fs::stat::fstatfs, Full),
    row(
        155,
        "pivot_root",
        &[Str, Str],
        |_| Err(Errno::EPERM),
        Missing("EPERM: the tree is put together at boot"),
    ),
    call!(161, fs::directory::chroot, Full),
    call!(162, fs::sync::sync, Full),
    row(
        165,
        "mount",
        &[Str, Str, Str, Hex, Hex],
        |_| Err(Errno::EPERM),
        Missing("EPERM: the tree is put together at boot"),
    ),
    row(
        166,
        "umount2",
        &[Str, Hex],
        |_| Err(Errno::EPERM),
        Missing("EPERM: the tree is put together at boot"),
    ),
    call!(187, fs::sync::readahead, Full),
    call!(188, fs::extended::setxattr, Partial(XATTR)),
    call!(189, fs::extended::lsetxattr, Partial(XATTR)),
    call!(190, fs::extended::fsetxattr, Partial(XATTR)),
    call!(191, fs::extended::getxattr, Partial(XATTR)),
    call!(192, fs::extended::lgetxattr, Partial(XATTR)),
    call!(193, fs::extended::fgetxattr, Partial(XATTR)),
    call!(194, fs::extended::listxattr, Full),
    call!(195, fs::extended::llistxattr, Full),
    call!(196, fs::extended::flistxattr, Full),
    call!(197, fs::extended::removexattr, Partial(XATTR)),
    call!(198, fs::extended::lremovexattr, Partial(XATTR)),
    call!(199, fs::extended::fremovexattr, Partial(XATTR)),
    call!(217, fs::directory::getdents64, Full),
    call!(221, fs::sync::fadvise64, Full),
    call!(235, fs::attributes::utimes, Full),
    call!(253, fs::watching::inotify_init, Full),
    call!(254, fs::watching::inotify_add_watch, Full),
    call!(255, fs::watching::inotify_rm_watch, Full),
    call!(257, fs::descriptors::openat, Full),
    call!(258, fs::names::mkdirat, Full),
    call!(259, fs::names::mknodat, Partial("no block devices")),
    call!(260, fs::attributes::fchownat, Full),
    call!(261, fs::attributes::futimesat, Full),
    call!(262, fs::stat::newfstatat, Full),
    call!(263, fs::names::unlinkat, Full),
    call!(264, fs::names::renameat, Full),
    call!(265, fs::names::linkat, Full),
    call!(266, fs::names::symlinkat, Full),
    call!(267, fs::stat::readlinkat, Full),
    call!(268, fs::attributes::fchmodat, Full),
    call!(269, fs::stat::faccessat, Full),
    call!(277, fs::sync::sync_file_range, Full),
    call!(280, fs::attributes::utimensat, Full),
    call!(
        285,
        fs::space::fallocate,
        Partial("as on tmpfs and with FALLOC_FL_ZERO_RANGE; no collapsing and inserting")
    ),
    call!(292, fs::descriptors::dup3, Full),
    call!(294, fs::watching::inotify_init1, Full),
    call!(295, fs::io::preadv, Full),
    call!(296, fs::io::pwritev, Full),
    row(
        300,
        "fanotify_init",
        &[Hex, Hex],
        |_| Err(Errno::ENOSYS),
        Missing("ENOSYS, as a kernel without fanotify"),
    ),
    row(
        301,
        "fanotify_mark",
        &[Fd, Hex, Hex, Fd, Str],
        |_| Err(Errno::ENOSYS),
        Missing("ENOSYS, as a kernel without fanotify"),
    ),
    row(
        303,
        "name_to_handle_at",
        &[Fd, Str, Hex, Hex, Hex],
        |_| Err(Errno::EOPNOTSUPP),
        Missing("EOPNOTSUPP, as for a file system without handles"),
    ),
    row(
        304,
        "open_by_handle_at",
        &[Fd, Hex, Hex],
        |_| Err(Errno::EOPNOTSUPP),
        Missing("EOPNOTSUPP, as for a file system without handles"),
    ),
    call!(306, fs::sync::syncfs, Full),
    call!(316, fs::names::renameat2, Partial("no RENAME_WHITEOUT")),
    call!(319, fs::descriptors::memfd_create, Partial("no huge pages")),
    call!(326, fs::copy::copy_file_range, Full),
    call!(327, fs::io::preadv2, Full),
    call!(328, fs::io::pwritev2, Full),
    call!(332, fs::stat::statx, Partial("no attribute flags, no mount id")),
    call!(436, fs::descriptors::close_range, Full),
    call!(437, fs::descriptors::openat2, Partial("RESOLVE_CACHED is always EAGAIN")),
    call!(439, fs::stat::faccessat2, Full),
    call!(452, fs::attributes::fchmodat2, Full),
    // ipc and net
    call!(7, ipc::poll::poll, Full),
    call!(22, ipc::pipe::pipe, Full),
    call!(23, ipc::select::select, Full),
    call!(
        41,
        net::syscalls::socket,
        Partial("AF_UNIX, AF_INET, AF_INET6, and NETLINK_ROUTE; no raw sockets")
    ),
    call!(
        42,
        net::syscalls::connect,
        Partial(
            "beyond loopback, the host connects what the egress policy allows: else EACCES, \
             or ENETUNREACH without a policy",
        ),
    ),
    call!(43, net::syscalls::accept, Full),
    call!(44, net::transfer::sendto, Partial("MSG_OOB over loopback TCP only")),
    call!(
        45,
        net::transfer::recvfrom,
        Partial("MSG_OOB over loopback TCP only; the error queue is always empty")
    ),
    call!(
        46,
        net::transfer::sendmsg,
        Partial("MSG_OOB over loopback TCP only; control messages of Unix sockets only")
    ),
    call!(
        47,
        net::transfer::recvmsg,
        Partial("MSG_OOB over loopback TCP only; control messages of Unix sockets only")
    ),
    call!(48, net::syscalls::shutdown, Full),
    call!(49, net::syscalls::bind, Full),
    call!(50, net::syscalls::listen, Full),
    call!(51, net::syscalls::getsockname, Full),
    call!(52, net::syscalls::getpeername, Full),
    call!(53, net::syscalls::socketpair, Full),
    call!(
        54,
        net::syscalls::setsockopt,
        Partial("options about the network itself are kept and given back")
    ),
    call!(
        55,
        net::syscalls::getsockopt,
        Partial("options about the network itself are kept and given back")
    ),
    call!(29, sysv::memory_calls::shmget, Partial("no huge pages")),
    call!(30, sysv::memory_calls::shmat, Full),
    call!(31, sysv::memory_calls::shmctl, Full),
    call!(64, sysv::semaphore_calls::semget, Full),
    call!(65, sysv::semaphore_calls::semop, Full),
    call!(66, sysv::semaphore_calls::semctl, Full),
    call!(67, sysv::memory_calls::shmdt, Full),
    call!(68, sysv::message_calls::msgget, Full),
    call!(69, sysv::message_calls::msgsnd, Full),
    call!(70, sysv::message_calls::msgrcv, Full),
    call!(71, sysv::message_calls::msgctl, Full),
    call!(220, sysv::semaphore_calls::semtimedop, Full),
    call!(213, ipc::epoll_syscalls::epoll_create, Full),
    call!(232, ipc::epoll_syscalls::epoll_wait, Full),
    call!(233, ipc::epoll_syscalls::epoll_ctl, Full),
    call!(270, ipc::select::pselect6, Full),
    call!(271, ipc::poll::ppoll, Full),
    call!(281, ipc::epoll_syscalls::epoll_pwait, Full),
    call!(275, ipc::splice::splice, Partial("bytes are copied, not pages")),
    call!(276, ipc::splice::tee, Partial("as splice")),
    call!(278, ipc::splice::vmsplice, Partial("as splice")),
    call!(282, ipc::signalfd::signalfd, Full),
    call!(
        283,
        ipc::timerfd::timerfd_create,
        Partial("no alarm clocks; a change of the clock is not noticed")
    ),
    call!(284, ipc::eventfd::eventfd, Full),
    call!(
        286,
        ipc::timerfd::timerfd_settime,
        Partial("TFD_TIMER_CANCEL_ON_SET is accepted: the clock cannot be set")
    ),
    call!(287, ipc::timerfd::timerfd_gettime, Full),
    call!(288, net::syscalls::accept4, Full),
    call!(289, ipc::signalfd::signalfd4, Full),
    call!(290, ipc::eventfd::eventfd2, Full),
    call!(291, ipc::epoll_syscalls::epoll_create1, Full),
    call!(293, ipc::pipe::pipe2, Full),
    call!(299, net::transfer::recvmmsg, Full),
    call!(307, net::transfer::sendmmsg, Full),
    call!(441, ipc::epoll_syscalls::epoll_pwait2, Full),
    // mm
    call!(9, mm::mmap, Partial("no huge pages; MAP_GROWSDOWN areas do not grow")),
    call!(10, mm::mprotect, Full),
    call!(11, mm::munmap, Full),
    call!(12, mm::brk, Full),
    call!(25, mm::mremap, Partial("shared mappings cannot be duplicated; no MREMAP_DONTUNMAP")),
    call!(26, mm::msync, Full),
    call!(27, mm::mincore, Partial("every mapped page counts as resident")),
    call!(28, mm::madvise, Full),
    call!(149, lock::mlock, Partial(NOT_LOCKED)),
    call!(150, lock::munlock, Full),
    call!(151, lock::mlockall, Partial(NOT_LOCKED)),
    call!(152, lock::munlockall, Full),
    call!(325, lock::mlock2, Partial(NOT_LOCKED)),
    // task, signals, time
    call!(13, signal::rt_sigaction, Full),
    call!(14, signal::rt_sigprocmask, Full),
    call!(15, signal::rt_sigreturn, Full),
    call!(24, task::sched_yield, Full),
    call!(34, signal::pause, Full),
    call!(35, time::nanosleep, Full),
    call!(36, time::getitimer, Full),
    call!(37, time::alarm, Full),
    call!(38, time::setitimer, Full),
    call!(39, task::getpid, Full),
    call!(59, task::execve, Full),
    call!(60, task::exit, Full),
    call!(56, clone::clone, Partial(NO_NAMESPACES)),
    call!(57, clone::fork, Full),
    call!(58, clone::vfork, Full),
    call!(61, task::wait4, Full),
    call!(62, signal::kill, Full),
    call!(63, task::uname, Full),
    call!(96, time::gettimeofday, Full),
    call!(97, task::getrlimit, Full),
    call!(98, time::getrusage, Partial("CPU time only")),
    call!(99, task::sysinfo, Full),
    call!(100, time::times, Full),
    call!(102, task::getuid, Full),
    call!(104, task::getgid, Full),
    call!(105, task::setuid, Full),
    call!(106, task::setgid, Full),
    call!(107, task::geteuid, Full),
    call!(108, task::getegid, Full),
    call!(109, task::setpgid, Full),
    call!(110, task::getppid, Full),
    call!(111, task::getpgrp, Full),
    call!(112, task::setsid, Full),
    call!(113, task::setreuid, Full),
    call!(114, task::setregid, Full),
    call!(115, task::getgroups, Full),
    call!(116, task::setgroups, Full),
    call!(117, task::setresuid, Full),
    call!(118, task::getresuid, Full),
    call!(119, task::setresgid, Full),
    call!(120, task::getresgid, Full),
    call!(121, task::getpgid, Full),
    call!(122, task::setfsuid, Full),
    call!(123, task::setfsgid, Full),
    call!(124, task::getsid, Full),
    call!(125, task::capget, Full),
    call!(126, task::capset, Full),
    call!(127, signal::rt_sigpending, Full),
    call!(128, signal::rt_sigtimedwait, Full),
    call!(129, signal::rt_sigqueueinfo, Full),
    call!(130, signal::rt_sigsuspend, Full),
    call!(131, signal::sigaltstack, Full),
    call!(135, task::personality, Partial("PER_LINUX only")),
    call!(140, task::getpriority, Full),
    call!(141, task::setpriority, Partial(NOT_SCHEDULED)),
    call!(142, task::sched_setparam, Partial(NOT_SCHEDULED)),
    call!(143, task::sched_getparam, Full),
    call!(144, task::sched_setscheduler, Partial(NOT_SCHEDULED)),
    call!(145, task::sched_getscheduler, Full),
    call!(146, task::sched_get_priority_max, Full),
    call!(147, task::sched_get_priority_min, Full),
    call!(148, task::sched_rr_get_interval, Full),
    call!(157, task::prctl, Partial("names, and what has nothing to do in a sandbox")),
    call!(158, task::arch_prctl, Full),
    call!(159, time::adjtimex, Partial("changes are EPERM: the clock is the host's")),
    call!(160, task::setrlimit, Full),
    row(
        164,
        "settimeofday",
        &[Hex, Hex],
        |_| Err(Errno::EPERM),
        Missing("EPERM: the clock is the host's"),
    ),
    call!(170, task::sethostname, Full),
    call!(186, task::gettid, Full),
    call!(200, signal::tkill, Full),
    call!(201, time::time, Full),
    call!(202, futex::futex, Partial("no requeueing to futexes with priority inheritance")),
    call!(203, task::sched_setaffinity, Partial(NOT_SCHEDULED)),
    call!(204, task::sched_getaffinity, Full),
    call!(218, task::set_tid_address, Full),
    call!(219, signal::restart_syscall, Full),
    row(
        227,
        "clock_settime",
        &[Int, Hex],
        |_| Err(Errno::EPERM),
        Missing("EPERM: the clock is the host's"),
    ),
    call!(222, posix::timer_create, Full),
    call!(223, posix::timer_settime, Full),
    call!(224, posix::timer_gettime, Full),
    call!(225, posix::timer_getoverrun, Full),
    call!(226, posix::timer_delete, Full),
    call!(228, time::clock_gettime, Full),
    call!(229, time::clock_getres, Full),
    call!(230, time::clock_nanosleep, Full),
    call!(231, task::exit_group, Full),
    call!(234, signal::tgkill, Full),
    call!(247, task::waitid, Full),
    call!(273, task::set_robust_list, Full),
    call!(274, task::get_robust_list, Full),
    call!(302, task::prlimit64, Full),
    call!(305, time::clock_adjtime, Partial("changes are EPERM: the clock is the host's")),
    call!(309, task::getcpu, Full),
    call!(
        314,
        task::sched_setattr,
        Partial("kept, but not scheduled by; no SCHED_DEADLINE (EPERM), no utilization clamps")
    ),
    call!(315, task::sched_getattr, Full),
    call!(318, task::getrandom, Full),
    call!(322, task::execveat, Full),
    call!(297, signal::rt_tgsigqueueinfo, Full),
    call!(424, ipc::pidfd::pidfd_send_signal, Full),
    call!(434, ipc::pidfd::pidfd_open, Full),
    call!(438, ipc::pidfd::pidfd_getfd, Full),
    call!(435, clone::clone3, Partial(NO_NAMESPACES)),
    call!(324, task::membarrier, Full),
    row(
        334,
        "rseq",
        &[Hex, Int, Hex, Hex],
        |_| Err(Errno::ENOSYS),
        Missing("ENOSYS: libraries do without"),
    ),
];

const fn row(
    number: u32,
    name: &'static str,
    args: &'static [Kind],
    handler: Handler,
    support: Support,
) -> Entry {
    Entry { number, name, args, handler, support }
}

const fn kinds<A, F: Signature<A>>(_: &F) -> &'static [Kind] {
    F::KINDS
}

/// The name at the end of a path.
const fn last_part(path: &'static str) -> &'static str {
    let mut start = path.len();
    while start > 0 && path.as_bytes()[start - 1] != b':' {
        start -= 1;
    }
    path.split_at(start).1
}

/// Numbers beyond this have never been assigned on x86-64.
pub const NUMBER_LIMIT: usize = 512;

/// [`ENTRIES`] by number.
pub static BY_NUMBER: [Option<&'static Entry>; NUMBER_LIMIT] = {
    let mut table: [Option<&'static Entry>; NUMBER_LIMIT] = [None; NUMBER_LIMIT];
    let mut i = 0;
    while i < ENTRIES.len() {
        let number = ENTRIES[i].number as usize;
        assert!(table[number].is_none(), "two rows for one system call");
        table[number] = Some(&ENTRIES[i]);
        i += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    /// `docs/syscalls.md`, from the table.
    fn document() -> String {
        let mut text = String::from(
            "# System calls\n\n\
             Generated from `crates/kernel/src/syscall/table.rs`; `THAW_BLESS=1 cargo test -p\n\
             thaw-kernel syscall` writes it anew. A call that is not listed returns `ENOSYS`, is\n\
             counted, and is named by `THAW_TRACE=syscalls`.\n\n",
        );
        let count =
            |wanted: fn(&Support) -> bool| ENTRIES.iter().filter(|e| wanted(&e.support)).count();
        text += &format!(
            "{} calls: {} as on Linux, {} with exceptions, {} that return an error.\n\n",
            ENTRIES.len(),
            count(|s| matches!(s, Full)),
            count(|s| matches!(s, Partial(_))),
            count(|s| matches!(s, Missing(_)))
        );
        text += "| number | name | support | note |\n| ---: | --- | --- | --- |\n";
        for entry in BY_NUMBER.iter().flatten() {
            let (support, note) = match entry.support {
                Full => ("full", ""),
                Partial(note) => ("partial", note),
                Missing(note) => ("missing", note),
            };
            text += &format!("| {} | {} | {support} | {note} |\n", entry.number, entry.name);
        }
        text
    }

    #[test]
    fn the_document_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/syscalls.md");
        if std::env::var_os("THAW_BLESS").is_some() {
            std::fs::write(path, document()).unwrap();
        }
        let written = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            written == document(),
            "docs/syscalls.md is stale: run THAW_BLESS=1 cargo test -p thaw-kernel syscall"
        );
    }

    /// The list of calls for the fuzzer that runs in a sandbox
    /// (`tests/guest/hostile/sysfuzz.c`), from the table.
    fn calls_to_fuzz() -> String {
        let mut text = String::from(
            "/* Generated from crates/kernel/src/syscall/table.rs; `THAW_BLESS=1 cargo test -p\n \
             * thaw-kernel syscall` writes it anew.\n \
             *\n \
             * Number, name, arguments: f a descriptor, i a number, x flags or an address,\n \
             * s a string, o a file mode. */\n\
             #define THAW_CALLS(CALL)",
        );
        for entry in BY_NUMBER.iter().flatten() {
            let letter = |arg: &Kind| match arg {
                Fd => 'f',
                Int => 'i',
                Hex => 'x',
                Str => 's',
                Kind::Octal => 'o',
            };
            let arguments: String = entry.args.iter().map(letter).collect();
            text += &format!(" \\\n    CALL({}, {}, \"{arguments}\")", entry.number, entry.name);
        }
        text + "\n"
    }

    #[test]
    fn the_fuzzer_knows_every_call() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/guest/hostile/calls.h");
        if std::env::var_os("THAW_BLESS").is_some() {
            std::fs::write(path, calls_to_fuzz()).unwrap();
        }
        let written = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            written == calls_to_fuzz(),
            "tests/guest/hostile/calls.h is stale: run THAW_BLESS=1 cargo test -p thaw-kernel syscall"
        );
    }

    #[test]
    fn every_row_has_at_most_six_arguments() {
        assert!(ENTRIES.iter().all(|entry| entry.args.len() <= 6));
    }
}
