//! The table of system calls: number → handler → support note.
//!
//! `docs/syscalls.md` is generated from this table. A number without a row
//! returns `ENOSYS`, is counted, and is named in the trace.

use super::Support::{Full, Missing, Partial};
use super::memory::{locking, policy};
use super::sockets::transfer;
use super::{Entry, Support};
use super::{files, ipc, memory, sockets, tasks};
use crate::args::Kind::{Fd, Hex, Int, Str};
use crate::args::{Handler, Kind, Signature};
use crate::errno::Errno;

/// What extended attributes lack.
const XATTR: &str = "no access control lists; EOPNOTSUPP in bound directories";

/// What asynchronous input and output is.
const AIO: &str = "done at once, so what waits holds up the caller; no IOCB_CMD_POLL";

/// Why there are no keyrings.
const NO_KEYS: &str = "ENOSYS, as a kernel without keyrings: libraries do without";

/// What locking memory means.
const NOT_LOCKED: &str = "counted and limited; the host may still page the memory out";

/// What priorities and affinities mean.
const NOT_SCHEDULED: &str = "kept, inherited and given back, but not scheduled by";

/// What mount(2) lacks.
const MOUNTS: &str = "tmpfs, ramfs, proc, sysfs, cgroup2, devpts, devtmpfs; nothing is propagated: no MS_SHARED (EINVAL); nothing is mounted in a directory of a process in /proc (ENOENT)";

/// What clone(2) lacks.
const CLONE_GAPS: &str = "processes do not share signal handlers";

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
    call!(0, files::io::read, Full),
    call!(1, files::io::write, Full),
    call!(2, files::descriptors::open, Full),
    call!(3, files::descriptors::close, Full),
    call!(4, files::stat::stat, Full),
    call!(5, files::stat::fstat, Full),
    call!(6, files::stat::lstat, Full),
    call!(8, files::io::lseek, Full),
    call!(
        16,
        files::control::ioctl,
        Partial("FIONREAD, FIONBIO, FIOCLEX, terminals and sockets; the rest is ENOTTY")
    ),
    call!(17, files::io::pread64, Full),
    call!(18, files::io::pwrite64, Full),
    call!(19, files::io::readv, Full),
    call!(20, files::io::writev, Full),
    call!(21, files::stat::access, Full),
    call!(32, files::descriptors::dup, Full),
    call!(33, files::descriptors::dup2, Full),
    call!(40, files::copy::sendfile, Full),
    call!(72, files::control::fcntl, Partial("no leases, no F_NOTIFY")),
    call!(73, files::locking::flock, Full),
    call!(74, files::sync::fsync, Full),
    call!(75, fdatasync = files::sync::fsync, Full),
    call!(76, files::space::truncate, Full),
    call!(77, files::space::ftruncate, Full),
    call!(78, files::directory::getdents, Full),
    call!(79, files::directory::getcwd, Full),
    call!(80, files::directory::chdir, Full),
    call!(81, files::directory::fchdir, Full),
    call!(82, files::names::rename, Full),
    call!(83, files::names::mkdir, Full),
    call!(84, files::names::rmdir, Full),
    call!(85, files::descriptors::creat, Full),
    call!(86, files::names::link, Full),
    call!(87, files::names::unlink, Full),
    call!(88, files::names::symlink, Full),
    call!(89, files::stat::readlink, Full),
    call!(90, files::attributes::chmod, Full),
    call!(91, files::attributes::fchmod, Full),
    call!(92, files::attributes::chown, Full),
    call!(93, files::attributes::fchown, Full),
    call!(94, files::attributes::lchown, Full),
    call!(95, files::attributes::umask, Full),
    call!(132, files::attributes::utime, Full),
    call!(133, files::names::mknod, Partial("no block devices")),
    row(
        136,
        "ustat",
        &[Hex, Hex],
        |_| Err(Errno::EINVAL),
        Missing("EINVAL, as for a device that is not mounted"),
    ),
    call!(137, files::stat::statfs, Full),
    call!(138, files::stat::fstatfs, Full),
    call!(155, files::mounting::pivot_root, Full),
    call!(161, files::directory::chroot, Full),
    call!(162, files::sync::sync, Full),
    call!(165, files::mounting::mount, Partial(MOUNTS)),
    call!(166, files::mounting::umount2, Partial("no MNT_EXPIRE (EINVAL)")),
    call!(187, files::sync::readahead, Full),
    call!(188, files::extended::setxattr, Partial(XATTR)),
    call!(189, files::extended::lsetxattr, Partial(XATTR)),
    call!(190, files::extended::fsetxattr, Partial(XATTR)),
    call!(191, files::extended::getxattr, Partial(XATTR)),
    call!(192, files::extended::lgetxattr, Partial(XATTR)),
    call!(193, files::extended::fgetxattr, Partial(XATTR)),
    call!(194, files::extended::listxattr, Full),
    call!(195, files::extended::llistxattr, Full),
    call!(196, files::extended::flistxattr, Full),
    call!(197, files::extended::removexattr, Partial(XATTR)),
    call!(198, files::extended::lremovexattr, Partial(XATTR)),
    call!(199, files::extended::fremovexattr, Partial(XATTR)),
    call!(206, files::aio::io_setup, Partial(AIO)),
    call!(207, files::aio::io_destroy, Full),
    call!(208, files::aio::io_getevents, Full),
    call!(209, files::aio::io_submit, Partial(AIO)),
    call!(210, files::aio::io_cancel, Partial("all has been done: EINVAL")),
    call!(217, files::directory::getdents64, Full),
    call!(221, files::sync::fadvise64, Full),
    call!(235, files::attributes::utimes, Full),
    call!(251, tasks::ioprio_set, Partial(NOT_SCHEDULED)),
    call!(252, tasks::ioprio_get, Full),
    call!(253, files::watching::inotify_init, Full),
    call!(254, files::watching::inotify_add_watch, Full),
    call!(255, files::watching::inotify_rm_watch, Full),
    call!(257, files::descriptors::openat, Full),
    call!(258, files::names::mkdirat, Full),
    call!(259, files::names::mknodat, Partial("no block devices")),
    call!(260, files::attributes::fchownat, Full),
    call!(261, files::attributes::futimesat, Full),
    call!(262, files::stat::newfstatat, Full),
    call!(263, files::names::unlinkat, Full),
    call!(264, files::names::renameat, Full),
    call!(265, files::names::linkat, Full),
    call!(266, files::names::symlinkat, Full),
    call!(267, files::stat::readlinkat, Full),
    call!(268, files::attributes::fchmodat, Full),
    call!(269, files::stat::faccessat, Full),
    call!(277, files::sync::sync_file_range, Full),
    call!(280, files::attributes::utimensat, Full),
    call!(
        285,
        files::space::fallocate,
        Partial("as on tmpfs and with FALLOC_FL_ZERO_RANGE; no collapsing and inserting")
    ),
    call!(292, files::descriptors::dup3, Full),
    call!(294, files::watching::inotify_init1, Full),
    call!(295, files::io::preadv, Full),
    call!(296, files::io::pwritev, Full),
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
    call!(306, files::sync::syncfs, Full),
    call!(316, files::names::renameat2, Partial("no RENAME_WHITEOUT")),
    call!(319, files::descriptors::memfd_create, Partial("no huge pages")),
    call!(326, files::copy::copy_file_range, Full),
    call!(327, files::io::preadv2, Full),
    call!(328, files::io::pwritev2, Full),
    call!(333, files::aio::io_pgetevents, Full),
    call!(332, files::stat::statx, Partial("no attribute flags but that of mount roots")),
    call!(
        436,
        files::descriptors::close_range,
        Partial(
            "CLOSE_RANGE_UNSHARE takes the whole process out of a shared table, not one thread"
        )
    ),
    call!(437, files::descriptors::openat2, Partial("RESOLVE_CACHED is always EAGAIN")),
    call!(439, files::stat::faccessat2, Full),
    call!(452, files::attributes::fchmodat2, Full),
    // ipc and net
    call!(7, ipc::poll::poll, Full),
    call!(22, files::pipes::pipe, Full),
    call!(23, ipc::select::select, Full),
    call!(
        41,
        sockets::socket,
        Partial("AF_UNIX, AF_INET, AF_INET6, and NETLINK_ROUTE; no raw sockets")
    ),
    call!(
        42,
        sockets::connect,
        Partial(
            "beyond loopback, the host connects what the egress policy allows: else EACCES, \
             or ENETUNREACH without a policy",
        ),
    ),
    call!(43, sockets::accept, Full),
    call!(44, transfer::sendto, Partial("MSG_OOB over loopback TCP only")),
    call!(
        45,
        transfer::recvfrom,
        Partial("MSG_OOB over loopback TCP only; the error queue is always empty")
    ),
    call!(
        46,
        transfer::sendmsg,
        Partial("MSG_OOB over loopback TCP only; control messages of Unix sockets only")
    ),
    call!(
        47,
        transfer::recvmsg,
        Partial("MSG_OOB over loopback TCP only; control messages of Unix sockets only")
    ),
    call!(48, sockets::shutdown, Full),
    call!(49, sockets::bind, Full),
    call!(50, sockets::listen, Full),
    call!(51, sockets::getsockname, Full),
    call!(52, sockets::getpeername, Full),
    call!(53, sockets::socketpair, Full),
    call!(
        54,
        sockets::setsockopt,
        Partial("options about the network itself are kept and given back")
    ),
    call!(
        55,
        sockets::getsockopt,
        Partial("options about the network itself are kept and given back")
    ),
    call!(29, ipc::sysv::memory::shmget, Partial("no huge pages")),
    call!(30, ipc::sysv::memory::shmat, Full),
    call!(31, ipc::sysv::memory::shmctl, Full),
    call!(64, ipc::sysv::semaphores::semget, Full),
    call!(65, ipc::sysv::semaphores::semop, Full),
    call!(66, ipc::sysv::semaphores::semctl, Full),
    call!(67, ipc::sysv::memory::shmdt, Full),
    call!(68, ipc::sysv::messages::msgget, Full),
    call!(69, ipc::sysv::messages::msgsnd, Full),
    call!(70, ipc::sysv::messages::msgrcv, Full),
    call!(71, ipc::sysv::messages::msgctl, Full),
    call!(220, ipc::sysv::semaphores::semtimedop, Full),
    call!(240, ipc::mqueue::mq_open, Full),
    call!(241, ipc::mqueue::mq_unlink, Full),
    call!(242, ipc::mqueue::mq_timedsend, Full),
    call!(243, ipc::mqueue::mq_timedreceive, Full),
    call!(244, ipc::mqueue::mq_notify, Full),
    call!(245, ipc::mqueue::mq_getsetattr, Full),
    call!(213, ipc::epoll::epoll_create, Full),
    call!(232, ipc::epoll::epoll_wait, Full),
    call!(233, ipc::epoll::epoll_ctl, Full),
    call!(270, ipc::select::pselect6, Full),
    call!(271, ipc::poll::ppoll, Full),
    call!(281, ipc::epoll::epoll_pwait, Full),
    call!(275, files::splice::splice, Partial("bytes are copied, not pages")),
    call!(276, files::splice::tee, Partial("as splice")),
    call!(278, files::splice::vmsplice, Partial("as splice")),
    call!(282, ipc::signalfd::signalfd, Full),
    call!(283, ipc::timerfd::timerfd_create, Partial("no alarm clocks")),
    call!(284, ipc::eventfd::eventfd, Full),
    call!(
        286,
        ipc::timerfd::timerfd_settime,
        Partial("TFD_TIMER_CANCEL_ON_SET tells of thaws: nothing else sets the clock")
    ),
    call!(287, ipc::timerfd::timerfd_gettime, Full),
    call!(288, sockets::accept4, Full),
    call!(289, ipc::signalfd::signalfd4, Full),
    call!(290, ipc::eventfd::eventfd2, Full),
    call!(291, ipc::epoll::epoll_create1, Full),
    call!(293, files::pipes::pipe2, Full),
    call!(299, transfer::recvmmsg, Full),
    call!(307, transfer::sendmmsg, Full),
    call!(441, ipc::epoll::epoll_pwait2, Full),
    // mm
    call!(9, memory::mmap, Partial("no huge pages; MAP_GROWSDOWN areas do not grow")),
    call!(10, memory::mprotect, Full),
    call!(11, memory::munmap, Full),
    call!(12, memory::brk, Full),
    call!(25, memory::mremap, Partial("shared mappings cannot be duplicated; no MREMAP_DONTUNMAP")),
    call!(26, memory::msync, Full),
    call!(27, memory::mincore, Partial("every mapped page counts as resident")),
    call!(28, memory::madvise, Full),
    call!(149, locking::mlock, Partial(NOT_LOCKED)),
    call!(150, locking::munlock, Full),
    call!(151, locking::mlockall, Partial(NOT_LOCKED)),
    call!(152, locking::munlockall, Full),
    call!(325, locking::mlock2, Partial(NOT_LOCKED)),
    call!(
        237,
        policy::mbind,
        Partial("one node; what is asked of an area is checked and not kept")
    ),
    call!(238, policy::set_mempolicy, Full),
    call!(239, policy::get_mempolicy, Partial("an area has the policy of the thread")),
    // task, signals, time
    call!(13, tasks::signals::rt_sigaction, Full),
    call!(14, tasks::signals::rt_sigprocmask, Full),
    call!(15, tasks::signals::rt_sigreturn, Full),
    call!(24, tasks::sched_yield, Full),
    call!(34, tasks::signals::pause, Full),
    call!(35, tasks::timers::nanosleep, Full),
    call!(36, tasks::timers::getitimer, Full),
    call!(37, tasks::timers::alarm, Full),
    call!(38, tasks::timers::setitimer, Full),
    call!(39, tasks::getpid, Full),
    call!(59, tasks::execve, Full),
    call!(60, tasks::exit, Full),
    call!(56, tasks::clone::clone, Partial(CLONE_GAPS)),
    call!(57, tasks::clone::fork, Full),
    call!(58, tasks::clone::vfork, Full),
    call!(61, tasks::wait4, Partial("usage as getrusage")),
    call!(62, tasks::signals::kill, Full),
    call!(63, tasks::uname, Full),
    call!(96, tasks::timers::gettimeofday, Full),
    call!(97, tasks::getrlimit, Full),
    call!(
        98,
        tasks::timers::getrusage,
        Partial("CPU time and memory; what may be touched counts as memory")
    ),
    call!(99, tasks::sysinfo, Full),
    call!(100, tasks::timers::times, Full),
    call!(102, tasks::getuid, Full),
    call!(104, tasks::getgid, Full),
    call!(105, tasks::setuid, Full),
    call!(106, tasks::setgid, Full),
    call!(107, tasks::geteuid, Full),
    call!(108, tasks::getegid, Full),
    call!(109, tasks::setpgid, Full),
    call!(110, tasks::getppid, Full),
    call!(111, tasks::getpgrp, Full),
    call!(112, tasks::setsid, Full),
    call!(113, tasks::setreuid, Full),
    call!(114, tasks::setregid, Full),
    call!(115, tasks::getgroups, Full),
    call!(116, tasks::setgroups, Full),
    call!(117, tasks::setresuid, Full),
    call!(118, tasks::getresuid, Full),
    call!(119, tasks::setresgid, Full),
    call!(120, tasks::getresgid, Full),
    call!(121, tasks::getpgid, Full),
    call!(122, tasks::setfsuid, Full),
    call!(123, tasks::setfsgid, Full),
    call!(124, tasks::getsid, Full),
    call!(125, tasks::capget, Full),
    call!(126, tasks::capset, Full),
    call!(127, tasks::signals::rt_sigpending, Full),
    call!(128, tasks::signals::rt_sigtimedwait, Full),
    call!(129, tasks::signals::rt_sigqueueinfo, Full),
    call!(130, tasks::signals::rt_sigsuspend, Full),
    call!(131, tasks::signals::sigaltstack, Full),
    call!(
        135,
        tasks::personality,
        Partial("kept and inherited; of all, only ADDR_NO_RANDOMIZE changes anything")
    ),
    call!(140, tasks::getpriority, Full),
    call!(141, tasks::setpriority, Partial(NOT_SCHEDULED)),
    call!(142, tasks::sched_setparam, Partial(NOT_SCHEDULED)),
    call!(143, tasks::sched_getparam, Full),
    call!(144, tasks::sched_setscheduler, Partial(NOT_SCHEDULED)),
    call!(145, tasks::sched_getscheduler, Full),
    call!(146, tasks::sched_get_priority_max, Full),
    call!(147, tasks::sched_get_priority_min, Full),
    call!(148, tasks::sched_rr_get_interval, Full),
    call!(
        157,
        tasks::prctl,
        Partial("names, seccomp, and what has nothing to do in a sandbox; no PR_TSC_SIGSEGV")
    ),
    call!(158, tasks::arch_prctl, Full),
    call!(159, tasks::timers::adjtimex, Partial("changes are EPERM: the clock is the host's")),
    call!(160, tasks::setrlimit, Full),
    call!(164, tasks::timers::settimeofday, Missing("EPERM: the clock is the host's")),
    call!(170, tasks::sethostname, Full),
    call!(171, tasks::setdomainname, Full),
    call!(169, tasks::reboot, Missing("EPERM, as without CAP_SYS_BOOT")),
    call!(186, tasks::gettid, Full),
    call!(200, tasks::signals::tkill, Full),
    call!(201, tasks::timers::time, Full),
    call!(202, tasks::futex::futex, Partial("no requeueing to futexes with priority inheritance")),
    call!(203, tasks::sched_setaffinity, Partial(NOT_SCHEDULED)),
    call!(204, tasks::sched_getaffinity, Full),
    call!(218, tasks::set_tid_address, Full),
    call!(219, tasks::signals::restart_syscall, Full),
    call!(227, tasks::timers::clock_settime, Missing("EPERM: the clock is the host's")),
    call!(
        101,
        tasks::ptrace::ptrace,
        Partial("debug registers watch no reads (EINVAL); no PTRACE_SYSEMU (EIO)")
    ),
    call!(
        317,
        tasks::seccomp::seccomp,
        Partial(
            "no notifications: no SECCOMP_FILTER_FLAG_NEW_LISTENER (EINVAL); nothing is logged; strict mode leaves rdtsc"
        )
    ),
    call!(310, tasks::ptrace::process_vm_readv, Full),
    call!(311, tasks::ptrace::process_vm_writev, Full),
    call!(222, tasks::posix_timers::timer_create, Full),
    call!(223, tasks::posix_timers::timer_settime, Full),
    call!(224, tasks::posix_timers::timer_gettime, Full),
    call!(225, tasks::posix_timers::timer_getoverrun, Full),
    call!(226, tasks::posix_timers::timer_delete, Full),
    call!(228, tasks::timers::clock_gettime, Full),
    call!(229, tasks::timers::clock_getres, Full),
    call!(230, tasks::timers::clock_nanosleep, Full),
    call!(231, tasks::exit_group, Full),
    call!(234, tasks::signals::tgkill, Full),
    call!(247, tasks::waitid, Partial("usage as getrusage")),
    call!(
        272,
        tasks::namespaces::unshare,
        Partial(
            "no new namespaces of time (EPERM); one thread of several cannot leave files, directories and namespaces"
        )
    ),
    call!(308, tasks::namespaces::setns, Partial("EINVAL for one thread of several")),
    call!(273, tasks::set_robust_list, Full),
    call!(274, tasks::get_robust_list, Full),
    call!(302, tasks::prlimit64, Full),
    call!(305, tasks::timers::clock_adjtime, Partial("changes are EPERM: the clock is the host's")),
    call!(309, tasks::getcpu, Full),
    call!(
        314,
        tasks::sched_setattr,
        Partial("kept, but not scheduled by; no SCHED_DEADLINE (EPERM), no utilization clamps")
    ),
    call!(312, tasks::comparing::kcmp, Partial("no KCMP_EPOLL_TFD (EOPNOTSUPP)")),
    row(248, "add_key", &[Str, Str, Hex, Int, Int], |_| Err(Errno::ENOSYS), Missing(NO_KEYS)),
    row(249, "request_key", &[Str, Str, Str, Int], |_| Err(Errno::ENOSYS), Missing(NO_KEYS)),
    row(250, "keyctl", &[Int, Hex, Hex, Hex, Hex], |_| Err(Errno::ENOSYS), Missing(NO_KEYS)),
    row(
        103,
        "syslog",
        &[Int, Hex, Int],
        |_| Err(Errno::EPERM),
        Missing("EPERM, as without privileges: /proc/sys/kernel/dmesg_restrict is 1"),
    ),
    call!(315, tasks::sched_getattr, Full),
    call!(318, tasks::getrandom, Full),
    call!(322, tasks::execveat, Full),
    call!(297, tasks::signals::rt_tgsigqueueinfo, Full),
    call!(424, tasks::pidfd::pidfd_send_signal, Full),
    call!(434, tasks::pidfd::pidfd_open, Full),
    call!(438, tasks::pidfd::pidfd_getfd, Full),
    call!(435, tasks::clone::clone3, Partial(CLONE_GAPS)),
    call!(324, tasks::membarrier, Full),
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
