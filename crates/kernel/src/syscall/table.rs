//! The table of system calls: number → handler → support note.
//!
//! `docs/syscalls.md` is generated from this table. A number without a row
//! returns `ENOSYS`, is counted, and is named in the trace.

use super::Arg::{Fd, Hex, Int, Octal, Str};
use super::Support::{Full, Missing, Partial};
use super::{Arg, Entry, Handler, Support};
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

/// Rows of the whole table, in any order; one block per subsystem.
pub const ENTRIES: &[Entry] = &[
    // fs
    row(0, "read", &[Fd, Hex, Int], fs::io::read, Full),
    row(1, "write", &[Fd, Hex, Int], fs::io::write, Full),
    row(2, "open", &[Str, Hex, Octal], fs::descriptors::open, Full),
    row(3, "close", &[Fd], fs::descriptors::close, Full),
    row(4, "stat", &[Str, Hex], fs::stat::stat, Full),
    row(5, "fstat", &[Fd, Hex], fs::stat::fstat, Full),
    row(6, "lstat", &[Str, Hex], fs::stat::lstat, Full),
    row(8, "lseek", &[Fd, Int, Int], fs::io::lseek, Full),
    row(
        16,
        "ioctl",
        &[Fd, Hex, Hex],
        fs::control::ioctl,
        Partial("FIONREAD, FIONBIO, FIOCLEX, terminals and sockets; the rest is ENOTTY"),
    ),
    row(17, "pread64", &[Fd, Hex, Int, Int], fs::io::pread64, Full),
    row(18, "pwrite64", &[Fd, Hex, Int, Int], fs::io::pwrite64, Full),
    row(19, "readv", &[Fd, Hex, Int], fs::io::readv, Full),
    row(20, "writev", &[Fd, Hex, Int], fs::io::writev, Full),
    row(21, "access", &[Str, Octal], fs::stat::access, Full),
    row(32, "dup", &[Fd], fs::descriptors::dup, Full),
    row(33, "dup2", &[Fd, Fd], fs::descriptors::dup2, Full),
    row(40, "sendfile", &[Fd, Fd, Hex, Int], fs::copy::sendfile, Full),
    row(72, "fcntl", &[Fd, Int, Hex], fs::control::fcntl, Partial("no leases, no F_NOTIFY")),
    row(73, "flock", &[Fd, Int], fs::locking::flock, Full),
    row(74, "fsync", &[Fd], fs::sync::fsync, Full),
    row(75, "fdatasync", &[Fd], fs::sync::fsync, Full),
    row(76, "truncate", &[Str, Int], fs::space::truncate, Full),
    row(77, "ftruncate", &[Fd, Int], fs::space::ftruncate, Full),
    row(78, "getdents", &[Fd, Hex, Int], fs::directory::getdents, Full),
    row(79, "getcwd", &[Hex, Int], fs::directory::getcwd, Full),
    row(80, "chdir", &[Str], fs::directory::chdir, Full),
    row(81, "fchdir", &[Fd], fs::directory::fchdir, Full),
    row(82, "rename", &[Str, Str], fs::names::rename, Full),
    row(83, "mkdir", &[Str, Octal], fs::names::mkdir, Full),
    row(84, "rmdir", &[Str], fs::names::rmdir, Full),
    row(85, "creat", &[Str, Octal], fs::descriptors::creat, Full),
    row(86, "link", &[Str, Str], fs::names::link, Full),
    row(87, "unlink", &[Str], fs::names::unlink, Full),
    row(88, "symlink", &[Str, Str], fs::names::symlink, Full),
    row(89, "readlink", &[Str, Hex, Int], fs::stat::readlink, Full),
    row(90, "chmod", &[Str, Octal], fs::attributes::chmod, Full),
    row(91, "fchmod", &[Fd, Octal], fs::attributes::fchmod, Full),
    row(92, "chown", &[Str, Int, Int], fs::attributes::chown, Full),
    row(93, "fchown", &[Fd, Int, Int], fs::attributes::fchown, Full),
    row(94, "lchown", &[Str, Int, Int], fs::attributes::lchown, Full),
    row(95, "umask", &[Octal], fs::attributes::umask, Full),
    row(132, "utime", &[Str, Hex], fs::attributes::utime, Full),
    row(133, "mknod", &[Str, Octal, Hex], fs::names::mknod, Partial("no block devices")),
    row(
        136,
        "ustat",
        &[Hex, Hex],
        fs::extended::ustat,
        Missing("EINVAL, as for a device that is not mounted"),
    ),
    row(137, "statfs", &[Str, Hex], fs::stat::statfs, Full),
    row(138, "fstatfs", &[Fd, Hex], fs::stat::fstatfs, Full),
    row(
        155,
        "pivot_root",
        &[Str, Str],
        fs::extended::no_mounts,
        Missing("EPERM: the tree is put together at boot"),
    ),
    row(161, "chroot", &[Str], fs::directory::chroot, Full),
    row(162, "sync", &[], fs::sync::sync, Full),
    row(
        165,
        "mount",
        &[Str, Str, Str, Hex, Hex],
        fs::extended::no_mounts,
        Missing("EPERM: the tree is put together at boot"),
    ),
    row(
        166,
        "umount2",
        &[Str, Hex],
        fs::extended::no_mounts,
        Missing("EPERM: the tree is put together at boot"),
    ),
    row(187, "readahead", &[Fd, Int, Int], fs::sync::readahead, Full),
    row(188, "setxattr", &[Str, Str, Hex, Int, Hex], fs::extended::set, Partial(XATTR)),
    row(189, "lsetxattr", &[Str, Str, Hex, Int, Hex], fs::extended::set_link, Partial(XATTR)),
    row(190, "fsetxattr", &[Fd, Str, Hex, Int, Hex], fs::extended::set_descriptor, Partial(XATTR)),
    row(191, "getxattr", &[Str, Str, Hex, Int], fs::extended::get, Partial(XATTR)),
    row(192, "lgetxattr", &[Str, Str, Hex, Int], fs::extended::get_link, Partial(XATTR)),
    row(193, "fgetxattr", &[Fd, Str, Hex, Int], fs::extended::get_descriptor, Partial(XATTR)),
    row(194, "listxattr", &[Str, Hex, Int], fs::extended::list, Full),
    row(195, "llistxattr", &[Str, Hex, Int], fs::extended::list_link, Full),
    row(196, "flistxattr", &[Fd, Hex, Int], fs::extended::list_descriptor, Full),
    row(197, "removexattr", &[Str, Str], fs::extended::remove, Partial(XATTR)),
    row(198, "lremovexattr", &[Str, Str], fs::extended::remove_link, Partial(XATTR)),
    row(199, "fremovexattr", &[Fd, Str], fs::extended::remove_descriptor, Partial(XATTR)),
    row(217, "getdents64", &[Fd, Hex, Int], fs::directory::getdents64, Full),
    row(221, "fadvise64", &[Fd, Int, Int, Int], fs::sync::fadvise64, Full),
    row(235, "utimes", &[Str, Hex], fs::attributes::utimes, Full),
    row(253, "inotify_init", &[], fs::watching::inotify_init, Full),
    row(254, "inotify_add_watch", &[Fd, Str, Hex], fs::watching::inotify_add_watch, Full),
    row(255, "inotify_rm_watch", &[Fd, Int], fs::watching::inotify_rm_watch, Full),
    row(257, "openat", &[Fd, Str, Hex, Octal], fs::descriptors::openat, Full),
    row(258, "mkdirat", &[Fd, Str, Octal], fs::names::mkdirat, Full),
    row(259, "mknodat", &[Fd, Str, Octal, Hex], fs::names::mknodat, Partial("no block devices")),
    row(260, "fchownat", &[Fd, Str, Int, Int, Hex], fs::attributes::fchownat, Full),
    row(261, "futimesat", &[Fd, Str, Hex], fs::attributes::futimesat, Full),
    row(262, "newfstatat", &[Fd, Str, Hex, Hex], fs::stat::newfstatat, Full),
    row(263, "unlinkat", &[Fd, Str, Hex], fs::names::unlinkat, Full),
    row(264, "renameat", &[Fd, Str, Fd, Str], fs::names::renameat, Full),
    row(265, "linkat", &[Fd, Str, Fd, Str, Hex], fs::names::linkat, Full),
    row(266, "symlinkat", &[Str, Fd, Str], fs::names::symlinkat, Full),
    row(267, "readlinkat", &[Fd, Str, Hex, Int], fs::stat::readlinkat, Full),
    row(268, "fchmodat", &[Fd, Str, Octal], fs::attributes::fchmodat, Full),
    row(269, "faccessat", &[Fd, Str, Octal], fs::stat::faccessat, Full),
    row(277, "sync_file_range", &[Fd, Int, Int, Hex], fs::sync::sync_file_range, Full),
    row(280, "utimensat", &[Fd, Str, Hex, Hex], fs::attributes::utimensat, Full),
    row(
        285,
        "fallocate",
        &[Fd, Hex, Int, Int],
        fs::space::fallocate,
        Partial("as on tmpfs and with FALLOC_FL_ZERO_RANGE; no collapsing and inserting"),
    ),
    row(292, "dup3", &[Fd, Fd, Hex], fs::descriptors::dup3, Full),
    row(294, "inotify_init1", &[Hex], fs::watching::inotify_init1, Full),
    row(295, "preadv", &[Fd, Hex, Int, Int], fs::io::preadv, Full),
    row(296, "pwritev", &[Fd, Hex, Int, Int], fs::io::pwritev, Full),
    row(
        300,
        "fanotify_init",
        &[Hex, Hex],
        task::not_configured,
        Missing("ENOSYS, as a kernel without fanotify"),
    ),
    row(
        301,
        "fanotify_mark",
        &[Fd, Hex, Hex, Fd, Str],
        task::not_configured,
        Missing("ENOSYS, as a kernel without fanotify"),
    ),
    row(
        303,
        "name_to_handle_at",
        &[Fd, Str, Hex, Hex, Hex],
        fs::extended::no_handles,
        Missing("EOPNOTSUPP, as for a file system without handles"),
    ),
    row(
        304,
        "open_by_handle_at",
        &[Fd, Hex, Hex],
        fs::extended::no_handles,
        Missing("EOPNOTSUPP, as for a file system without handles"),
    ),
    row(306, "syncfs", &[Fd], fs::sync::syncfs, Full),
    row(
        316,
        "renameat2",
        &[Fd, Str, Fd, Str, Hex],
        fs::names::renameat2,
        Partial("no RENAME_WHITEOUT"),
    ),
    row(319, "memfd_create", &[Str, Hex], fs::descriptors::memfd_create, Partial("no huge pages")),
    row(326, "copy_file_range", &[Fd, Hex, Fd, Hex, Int, Hex], fs::copy::copy_file_range, Full),
    row(327, "preadv2", &[Fd, Hex, Int, Int, Int, Hex], fs::io::preadv2, Full),
    row(328, "pwritev2", &[Fd, Hex, Int, Int, Int, Hex], fs::io::pwritev2, Full),
    row(
        332,
        "statx",
        &[Fd, Str, Hex, Hex, Hex],
        fs::stat::statx,
        Partial("no attribute flags, no mount id"),
    ),
    row(436, "close_range", &[Int, Int, Hex], fs::descriptors::close_range, Full),
    row(
        437,
        "openat2",
        &[Fd, Str, Hex, Int],
        fs::descriptors::openat2,
        Partial("RESOLVE_CACHED is always EAGAIN"),
    ),
    row(439, "faccessat2", &[Fd, Str, Octal, Hex], fs::stat::faccessat2, Full),
    row(452, "fchmodat2", &[Fd, Str, Octal, Hex], fs::attributes::fchmodat2, Full),
    // ipc and net
    row(7, "poll", &[Hex, Int, Int], ipc::poll::sys_poll, Full),
    row(22, "pipe", &[Hex], crate::fs::pipe::sys_pipe, Full),
    row(23, "select", &[Int, Hex, Hex, Hex, Hex], ipc::select::sys_select, Full),
    row(
        41,
        "socket",
        &[Int, Hex, Int],
        net::syscalls::sys_socket,
        Partial("AF_UNIX, AF_INET, AF_INET6, and NETLINK_ROUTE; no raw sockets"),
    ),
    row(
        42,
        "connect",
        &[Fd, Hex, Int],
        net::syscalls::sys_connect,
        Partial(
            "beyond loopback, the host connects what the egress policy allows: else EACCES, \
             or ENETUNREACH without a policy",
        ),
    ),
    row(43, "accept", &[Fd, Hex, Hex], net::syscalls::sys_accept, Full),
    row(
        44,
        "sendto",
        &[Fd, Hex, Int, Hex, Hex, Int],
        net::transfer::sys_sendto,
        Partial("MSG_OOB over loopback TCP only"),
    ),
    row(
        45,
        "recvfrom",
        &[Fd, Hex, Int, Hex, Hex, Hex],
        net::transfer::sys_recvfrom,
        Partial("MSG_OOB over loopback TCP only; the error queue is always empty"),
    ),
    row(
        46,
        "sendmsg",
        &[Fd, Hex, Hex],
        net::transfer::sys_sendmsg,
        Partial("MSG_OOB over loopback TCP only; control messages of Unix sockets only"),
    ),
    row(
        47,
        "recvmsg",
        &[Fd, Hex, Hex],
        net::transfer::sys_recvmsg,
        Partial("MSG_OOB over loopback TCP only; control messages of Unix sockets only"),
    ),
    row(48, "shutdown", &[Fd, Int], net::syscalls::sys_shutdown, Full),
    row(49, "bind", &[Fd, Hex, Int], net::syscalls::sys_bind, Full),
    row(50, "listen", &[Fd, Int], net::syscalls::sys_listen, Full),
    row(51, "getsockname", &[Fd, Hex, Hex], net::syscalls::sys_getsockname, Full),
    row(52, "getpeername", &[Fd, Hex, Hex], net::syscalls::sys_getpeername, Full),
    row(53, "socketpair", &[Int, Hex, Int, Hex], net::syscalls::sys_socketpair, Full),
    row(
        54,
        "setsockopt",
        &[Fd, Int, Int, Hex, Int],
        net::syscalls::sys_setsockopt,
        Partial("options about the network itself are kept and given back"),
    ),
    row(
        55,
        "getsockopt",
        &[Fd, Int, Int, Hex, Hex],
        net::syscalls::sys_getsockopt,
        Partial("options about the network itself are kept and given back"),
    ),
    row(29, "shmget", &[Int, Int, Octal], sysv::memory_calls::shmget, Partial("no huge pages")),
    row(30, "shmat", &[Int, Hex, Octal], sysv::memory_calls::shmat, Full),
    row(31, "shmctl", &[Int, Int, Hex], sysv::memory_calls::shmctl, Full),
    row(64, "semget", &[Int, Int, Octal], sysv::semaphore_calls::semget, Full),
    row(65, "semop", &[Int, Hex, Int], sysv::semaphore_calls::semop, Full),
    row(66, "semctl", &[Int, Int, Int, Hex], sysv::semaphore_calls::semctl, Full),
    row(67, "shmdt", &[Hex], sysv::memory_calls::shmdt, Full),
    row(68, "msgget", &[Int, Octal], sysv::message_calls::msgget, Full),
    row(69, "msgsnd", &[Int, Hex, Int, Octal], sysv::message_calls::msgsnd, Full),
    row(70, "msgrcv", &[Int, Hex, Int, Int, Octal], sysv::message_calls::msgrcv, Full),
    row(71, "msgctl", &[Int, Int, Hex], sysv::message_calls::msgctl, Full),
    row(220, "semtimedop", &[Int, Hex, Int, Hex], sysv::semaphore_calls::semtimedop, Full),
    row(213, "epoll_create", &[Int], ipc::epoll_syscalls::sys_epoll_create, Full),
    row(232, "epoll_wait", &[Fd, Hex, Int, Int], ipc::epoll_syscalls::sys_epoll_wait, Full),
    row(233, "epoll_ctl", &[Fd, Int, Fd, Hex], ipc::epoll_syscalls::sys_epoll_ctl, Full),
    row(270, "pselect6", &[Int, Hex, Hex, Hex, Hex, Hex], ipc::select::sys_pselect6, Full),
    row(271, "ppoll", &[Hex, Int, Hex, Hex, Int], ipc::poll::sys_ppoll, Full),
    row(
        281,
        "epoll_pwait",
        &[Fd, Hex, Int, Int, Hex, Int],
        ipc::epoll_syscalls::sys_epoll_pwait,
        Full,
    ),
    row(
        275,
        "splice",
        &[Fd, Hex, Fd, Hex, Int, Hex],
        ipc::splice::sys_splice,
        Partial("bytes are copied, not pages"),
    ),
    row(276, "tee", &[Fd, Fd, Int, Hex], ipc::splice::sys_tee, Partial("as splice")),
    row(278, "vmsplice", &[Fd, Hex, Int, Hex], ipc::splice::sys_vmsplice, Partial("as splice")),
    row(282, "signalfd", &[Fd, Hex, Int], ipc::signalfd::sys_signalfd, Full),
    row(
        283,
        "timerfd_create",
        &[Int, Hex],
        ipc::timerfd::sys_timerfd_create,
        Partial("no alarm clocks; a change of the clock is not noticed"),
    ),
    row(284, "eventfd", &[Int], ipc::eventfd::sys_eventfd, Full),
    row(
        286,
        "timerfd_settime",
        &[Fd, Hex, Hex, Hex],
        ipc::timerfd::sys_timerfd_settime,
        Partial("TFD_TIMER_CANCEL_ON_SET is accepted: the clock cannot be set"),
    ),
    row(287, "timerfd_gettime", &[Fd, Hex], ipc::timerfd::sys_timerfd_gettime, Full),
    row(288, "accept4", &[Fd, Hex, Hex, Hex], net::syscalls::sys_accept4, Full),
    row(289, "signalfd4", &[Fd, Hex, Int, Hex], ipc::signalfd::sys_signalfd4, Full),
    row(290, "eventfd2", &[Int, Hex], ipc::eventfd::sys_eventfd2, Full),
    row(291, "epoll_create1", &[Hex], ipc::epoll_syscalls::sys_epoll_create1, Full),
    row(293, "pipe2", &[Hex, Hex], crate::fs::pipe::sys_pipe2, Full),
    row(299, "recvmmsg", &[Fd, Hex, Int, Hex, Hex], net::transfer::sys_recvmmsg, Full),
    row(307, "sendmmsg", &[Fd, Hex, Int, Hex], net::transfer::sys_sendmmsg, Full),
    row(
        441,
        "epoll_pwait2",
        &[Fd, Hex, Int, Hex, Hex, Int],
        ipc::epoll_syscalls::sys_epoll_pwait2,
        Full,
    ),
    // mm
    row(
        9,
        "mmap",
        &[Hex, Int, Hex, Hex, Fd, Int],
        mm::mmap,
        Partial("no huge pages; MAP_GROWSDOWN areas do not grow"),
    ),
    row(10, "mprotect", &[Hex, Int, Hex], mm::mprotect, Full),
    row(11, "munmap", &[Hex, Int], mm::munmap, Full),
    row(12, "brk", &[Hex], mm::brk, Full),
    row(
        25,
        "mremap",
        &[Hex, Int, Int, Hex, Hex],
        mm::mremap,
        Partial("shared mappings cannot be duplicated; no MREMAP_DONTUNMAP"),
    ),
    row(26, "msync", &[Hex, Int, Hex], mm::msync, Full),
    row(
        27,
        "mincore",
        &[Hex, Int, Hex],
        mm::mincore,
        Partial("every mapped page counts as resident"),
    ),
    row(28, "madvise", &[Hex, Int, Int], mm::madvise, Full),
    row(149, "mlock", &[Hex, Int], lock::mlock, Partial(NOT_LOCKED)),
    row(150, "munlock", &[Hex, Int], lock::munlock, Full),
    row(151, "mlockall", &[Hex], lock::mlockall, Partial(NOT_LOCKED)),
    row(152, "munlockall", &[], lock::munlockall, Full),
    row(325, "mlock2", &[Hex, Int, Hex], lock::mlock2, Partial(NOT_LOCKED)),
    // task, signals, time
    row(13, "rt_sigaction", &[Int, Hex, Hex, Int], signal::rt_sigaction, Full),
    row(14, "rt_sigprocmask", &[Int, Hex, Hex, Int], signal::rt_sigprocmask, Full),
    row(15, "rt_sigreturn", &[], signal::rt_sigreturn, Full),
    row(24, "sched_yield", &[], task::sched_yield, Full),
    row(34, "pause", &[], signal::pause, Full),
    row(35, "nanosleep", &[Hex, Hex], time::nanosleep, Full),
    row(36, "getitimer", &[Int, Hex], time::getitimer, Full),
    row(37, "alarm", &[Int], time::alarm, Full),
    row(38, "setitimer", &[Int, Hex, Hex], time::setitimer, Full),
    row(39, "getpid", &[], task::getpid, Full),
    row(59, "execve", &[Str, Hex, Hex], task::execve, Full),
    row(60, "exit", &[Int], task::exit, Full),
    row(56, "clone", &[Hex, Hex, Hex, Hex, Hex], clone::clone, Partial(NO_NAMESPACES)),
    row(57, "fork", &[], clone::fork, Full),
    row(58, "vfork", &[], clone::vfork, Full),
    row(61, "wait4", &[Int, Hex, Hex, Hex], task::wait4, Full),
    row(62, "kill", &[Int, Int], signal::kill, Full),
    row(63, "uname", &[Hex], task::uname, Full),
    row(96, "gettimeofday", &[Hex, Hex], time::gettimeofday, Full),
    row(97, "getrlimit", &[Int, Hex], task::getrlimit, Full),
    row(98, "getrusage", &[Int, Hex], time::getrusage, Partial("CPU time only")),
    row(99, "sysinfo", &[Hex], task::sysinfo, Full),
    row(100, "times", &[Hex], time::times, Full),
    row(102, "getuid", &[], task::getuid, Full),
    row(104, "getgid", &[], task::getgid, Full),
    row(105, "setuid", &[Int], task::setuid, Full),
    row(106, "setgid", &[Int], task::setgid, Full),
    row(107, "geteuid", &[], task::geteuid, Full),
    row(108, "getegid", &[], task::getegid, Full),
    row(109, "setpgid", &[Int, Int], task::setpgid, Full),
    row(110, "getppid", &[], task::getppid, Full),
    row(111, "getpgrp", &[], task::getpgrp, Full),
    row(112, "setsid", &[], task::setsid, Full),
    row(113, "setreuid", &[Int, Int], task::setreuid, Full),
    row(114, "setregid", &[Int, Int], task::setregid, Full),
    row(115, "getgroups", &[Int, Hex], task::getgroups, Full),
    row(116, "setgroups", &[Int, Hex], task::setgroups, Full),
    row(117, "setresuid", &[Int, Int, Int], task::setresuid, Full),
    row(118, "getresuid", &[Hex, Hex, Hex], task::getresuid, Full),
    row(119, "setresgid", &[Int, Int, Int], task::setresgid, Full),
    row(120, "getresgid", &[Hex, Hex, Hex], task::getresgid, Full),
    row(121, "getpgid", &[Int], task::getpgid, Full),
    row(122, "setfsuid", &[Int], task::setfsuid, Full),
    row(123, "setfsgid", &[Int], task::setfsgid, Full),
    row(124, "getsid", &[Int], task::getsid, Full),
    row(125, "capget", &[Hex, Hex], task::capget, Full),
    row(126, "capset", &[Hex, Hex], task::capset, Full),
    row(127, "rt_sigpending", &[Hex, Int], signal::rt_sigpending, Full),
    row(128, "rt_sigtimedwait", &[Hex, Hex, Hex, Int], signal::rt_sigtimedwait, Full),
    row(129, "rt_sigqueueinfo", &[Int, Int, Hex], signal::rt_sigqueueinfo, Full),
    row(130, "rt_sigsuspend", &[Hex, Int], signal::rt_sigsuspend, Full),
    row(131, "sigaltstack", &[Hex, Hex], signal::sigaltstack, Full),
    row(135, "personality", &[Hex], task::personality, Partial("PER_LINUX only")),
    row(140, "getpriority", &[Int, Int], task::getpriority, Full),
    row(141, "setpriority", &[Int, Int, Int], task::setpriority, Partial(NOT_SCHEDULED)),
    row(142, "sched_setparam", &[Int, Hex], task::sched_setparam, Partial(NOT_SCHEDULED)),
    row(143, "sched_getparam", &[Int, Hex], task::sched_getparam, Full),
    row(
        144,
        "sched_setscheduler",
        &[Int, Int, Hex],
        task::sched_setscheduler,
        Partial(NOT_SCHEDULED),
    ),
    row(145, "sched_getscheduler", &[Int], task::sched_getscheduler, Full),
    row(146, "sched_get_priority_max", &[Int], task::sched_get_priority_max, Full),
    row(147, "sched_get_priority_min", &[Int], task::sched_get_priority_min, Full),
    row(148, "sched_rr_get_interval", &[Int, Hex], task::sched_rr_get_interval, Full),
    row(
        157,
        "prctl",
        &[Int, Hex, Hex, Hex, Hex],
        task::prctl,
        Partial("names, and what has nothing to do in a sandbox"),
    ),
    row(158, "arch_prctl", &[Hex, Hex], task::arch_prctl, Full),
    row(
        159,
        "adjtimex",
        &[Hex],
        time::adjtimex,
        Partial("changes are EPERM: the clock is the host's"),
    ),
    row(160, "setrlimit", &[Int, Hex], task::setrlimit, Full),
    row(
        164,
        "settimeofday",
        &[Hex, Hex],
        time::clock_settime,
        Missing("EPERM: the clock is the host's"),
    ),
    row(170, "sethostname", &[Str, Int], task::sethostname, Full),
    row(186, "gettid", &[], task::gettid, Full),
    row(200, "tkill", &[Int, Int], signal::tkill, Full),
    row(201, "time", &[Hex], time::time, Full),
    row(
        202,
        "futex",
        &[Hex, Hex, Int, Hex, Hex, Int],
        futex::futex,
        Partial("no requeueing to futexes with priority inheritance"),
    ),
    row(
        203,
        "sched_setaffinity",
        &[Int, Int, Hex],
        task::sched_setaffinity,
        Partial(NOT_SCHEDULED),
    ),
    row(204, "sched_getaffinity", &[Int, Int, Hex], task::sched_getaffinity, Full),
    row(218, "set_tid_address", &[Hex], task::set_tid_address, Full),
    row(219, "restart_syscall", &[], signal::restart_syscall, Full),
    row(
        227,
        "clock_settime",
        &[Int, Hex],
        time::clock_settime,
        Missing("EPERM: the clock is the host's"),
    ),
    row(222, "timer_create", &[Int, Hex, Hex], posix::timer_create, Full),
    row(223, "timer_settime", &[Int, Hex, Hex, Hex], posix::timer_settime, Full),
    row(224, "timer_gettime", &[Int, Hex], posix::timer_gettime, Full),
    row(225, "timer_getoverrun", &[Int], posix::timer_getoverrun, Full),
    row(226, "timer_delete", &[Int], posix::timer_delete, Full),
    row(228, "clock_gettime", &[Int, Hex], time::clock_gettime, Full),
    row(229, "clock_getres", &[Int, Hex], time::clock_getres, Full),
    row(230, "clock_nanosleep", &[Int, Hex, Hex, Hex], time::clock_nanosleep, Full),
    row(231, "exit_group", &[Int], task::exit_group, Full),
    row(234, "tgkill", &[Int, Int, Int], signal::tgkill, Full),
    row(247, "waitid", &[Int, Int, Hex, Hex, Hex], task::waitid, Full),
    row(273, "set_robust_list", &[Hex, Int], task::set_robust_list, Full),
    row(274, "get_robust_list", &[Int, Hex, Hex], task::get_robust_list, Full),
    row(302, "prlimit64", &[Int, Int, Hex, Hex], task::prlimit64, Full),
    row(
        305,
        "clock_adjtime",
        &[Int, Hex],
        time::clock_adjtime,
        Partial("changes are EPERM: the clock is the host's"),
    ),
    row(309, "getcpu", &[Hex, Hex, Hex], task::getcpu, Full),
    row(
        314,
        "sched_setattr",
        &[Int, Hex, Hex],
        task::sched_setattr,
        Partial("kept, but not scheduled by; no SCHED_DEADLINE (EPERM), no utilization clamps"),
    ),
    row(315, "sched_getattr", &[Int, Hex, Int, Hex], task::sched_getattr, Full),
    row(318, "getrandom", &[Hex, Int, Hex], task::getrandom, Full),
    row(322, "execveat", &[Fd, Str, Hex, Hex, Hex], task::execveat, Full),
    row(297, "rt_tgsigqueueinfo", &[Int, Int, Int, Hex], signal::rt_tgsigqueueinfo, Full),
    row(424, "pidfd_send_signal", &[Fd, Int, Hex, Int], ipc::pidfd::sys_pidfd_send_signal, Full),
    row(434, "pidfd_open", &[Int, Hex], ipc::pidfd::sys_pidfd_open, Full),
    row(438, "pidfd_getfd", &[Fd, Fd, Hex], ipc::pidfd::sys_pidfd_getfd, Full),
    row(435, "clone3", &[Hex, Int], clone::clone3, Partial(NO_NAMESPACES)),
    row(324, "membarrier", &[Int, Hex, Int], task::membarrier, Full),
    row(
        334,
        "rseq",
        &[Hex, Int, Hex, Hex],
        task::not_configured,
        Missing("ENOSYS: libraries do without"),
    ),
];

const fn row(
    number: u32,
    name: &'static str,
    args: &'static [Arg],
    handler: Handler,
    support: Support,
) -> Entry {
    Entry { number, name, args, handler, support }
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
            let letter = |arg: &Arg| match arg {
                Fd => 'f',
                Int => 'i',
                Hex => 'x',
                Str => 's',
                Octal => 'o',
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
