//! The table of system calls: number → handler → support note.
//!
//! `docs/syscalls.md` is generated from this table. A number without a row
//! returns `ENOSYS`, is counted, and is named in the trace.

use super::Arg::{Fd, Hex, Int, Octal, Str};
use super::Support::{Full, Missing, Partial};
use super::memory::locking;
use super::sockets::transfer;
use super::{Arg, Entry, Handler, Support};
use super::{epoll, files, memory, poll, select, signals, sockets, splice, sysv, tasks, timers};
use crate::fs::pipe;
use crate::ipc::{eventfd, pidfd, signalfd, timerfd};
use crate::task::timers::posix;
use crate::task::{clone, futex};

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
    row(0, "read", &[Fd, Hex, Int], files::io::read, Full),
    row(1, "write", &[Fd, Hex, Int], files::io::write, Full),
    row(2, "open", &[Str, Hex, Octal], files::descriptors::open, Full),
    row(3, "close", &[Fd], files::descriptors::close, Full),
    row(4, "stat", &[Str, Hex], files::stat::stat, Full),
    row(5, "fstat", &[Fd, Hex], files::stat::fstat, Full),
    row(6, "lstat", &[Str, Hex], files::stat::lstat, Full),
    row(8, "lseek", &[Fd, Int, Int], files::io::lseek, Full),
    row(
        16,
        "ioctl",
        &[Fd, Hex, Hex],
        files::control::ioctl,
        Partial("FIONREAD, FIONBIO, FIOCLEX, terminals and sockets; the rest is ENOTTY"),
    ),
    row(17, "pread64", &[Fd, Hex, Int, Int], files::io::pread64, Full),
    row(18, "pwrite64", &[Fd, Hex, Int, Int], files::io::pwrite64, Full),
    row(19, "readv", &[Fd, Hex, Int], files::io::readv, Full),
    row(20, "writev", &[Fd, Hex, Int], files::io::writev, Full),
    row(21, "access", &[Str, Octal], files::stat::access, Full),
    row(32, "dup", &[Fd], files::descriptors::dup, Full),
    row(33, "dup2", &[Fd, Fd], files::descriptors::dup2, Full),
    row(40, "sendfile", &[Fd, Fd, Hex, Int], files::copy::sendfile, Full),
    row(72, "fcntl", &[Fd, Int, Hex], files::control::fcntl, Partial("no leases, no F_NOTIFY")),
    row(73, "flock", &[Fd, Int], files::locking::flock, Full),
    row(74, "fsync", &[Fd], files::sync::fsync, Full),
    row(75, "fdatasync", &[Fd], files::sync::fsync, Full),
    row(76, "truncate", &[Str, Int], files::space::truncate, Full),
    row(77, "ftruncate", &[Fd, Int], files::space::ftruncate, Full),
    row(78, "getdents", &[Fd, Hex, Int], files::directory::getdents, Full),
    row(79, "getcwd", &[Hex, Int], files::directory::getcwd, Full),
    row(80, "chdir", &[Str], files::directory::chdir, Full),
    row(81, "fchdir", &[Fd], files::directory::fchdir, Full),
    row(82, "rename", &[Str, Str], files::names::rename, Full),
    row(83, "mkdir", &[Str, Octal], files::names::mkdir, Full),
    row(84, "rmdir", &[Str], files::names::rmdir, Full),
    row(85, "creat", &[Str, Octal], files::descriptors::creat, Full),
    row(86, "link", &[Str, Str], files::names::link, Full),
    row(87, "unlink", &[Str], files::names::unlink, Full),
    row(88, "symlink", &[Str, Str], files::names::symlink, Full),
    row(89, "readlink", &[Str, Hex, Int], files::stat::readlink, Full),
    row(90, "chmod", &[Str, Octal], files::attributes::chmod, Full),
    row(91, "fchmod", &[Fd, Octal], files::attributes::fchmod, Full),
    row(92, "chown", &[Str, Int, Int], files::attributes::chown, Full),
    row(93, "fchown", &[Fd, Int, Int], files::attributes::fchown, Full),
    row(94, "lchown", &[Str, Int, Int], files::attributes::lchown, Full),
    row(95, "umask", &[Octal], files::attributes::umask, Full),
    row(132, "utime", &[Str, Hex], files::attributes::utime, Full),
    row(133, "mknod", &[Str, Octal, Hex], files::names::mknod, Partial("no block devices")),
    row(
        136,
        "ustat",
        &[Hex, Hex],
        files::extended::ustat,
        Missing("EINVAL, as for a device that is not mounted"),
    ),
    row(137, "statfs", &[Str, Hex], files::stat::statfs, Full),
    row(138, "fstatfs", &[Fd, Hex], files::stat::fstatfs, Full),
    row(
        155,
        "pivot_root",
        &[Str, Str],
        files::extended::no_mounts,
        Missing("EPERM: the tree is put together at boot"),
    ),
    row(161, "chroot", &[Str], files::directory::chroot, Full),
    row(162, "sync", &[], files::sync::sync, Full),
    row(
        165,
        "mount",
        &[Str, Str, Str, Hex, Hex],
        files::extended::no_mounts,
        Missing("EPERM: the tree is put together at boot"),
    ),
    row(
        166,
        "umount2",
        &[Str, Hex],
        files::extended::no_mounts,
        Missing("EPERM: the tree is put together at boot"),
    ),
    row(187, "readahead", &[Fd, Int, Int], files::sync::readahead, Full),
    row(188, "setxattr", &[Str, Str, Hex, Int, Hex], files::extended::set, Partial(XATTR)),
    row(189, "lsetxattr", &[Str, Str, Hex, Int, Hex], files::extended::set_link, Partial(XATTR)),
    row(
        190,
        "fsetxattr",
        &[Fd, Str, Hex, Int, Hex],
        files::extended::set_descriptor,
        Partial(XATTR),
    ),
    row(191, "getxattr", &[Str, Str, Hex, Int], files::extended::get, Partial(XATTR)),
    row(192, "lgetxattr", &[Str, Str, Hex, Int], files::extended::get_link, Partial(XATTR)),
    row(193, "fgetxattr", &[Fd, Str, Hex, Int], files::extended::get_descriptor, Partial(XATTR)),
    row(194, "listxattr", &[Str, Hex, Int], files::extended::list, Full),
    row(195, "llistxattr", &[Str, Hex, Int], files::extended::list_link, Full),
    row(196, "flistxattr", &[Fd, Hex, Int], files::extended::list_descriptor, Full),
    row(197, "removexattr", &[Str, Str], files::extended::remove, Partial(XATTR)),
    row(198, "lremovexattr", &[Str, Str], files::extended::remove_link, Partial(XATTR)),
    row(199, "fremovexattr", &[Fd, Str], files::extended::remove_descriptor, Partial(XATTR)),
    row(217, "getdents64", &[Fd, Hex, Int], files::directory::getdents64, Full),
    row(221, "fadvise64", &[Fd, Int, Int, Int], files::sync::fadvise64, Full),
    row(235, "utimes", &[Str, Hex], files::attributes::utimes, Full),
    row(253, "inotify_init", &[], files::watching::inotify_init, Full),
    row(254, "inotify_add_watch", &[Fd, Str, Hex], files::watching::inotify_add_watch, Full),
    row(255, "inotify_rm_watch", &[Fd, Int], files::watching::inotify_rm_watch, Full),
    row(257, "openat", &[Fd, Str, Hex, Octal], files::descriptors::openat, Full),
    row(258, "mkdirat", &[Fd, Str, Octal], files::names::mkdirat, Full),
    row(259, "mknodat", &[Fd, Str, Octal, Hex], files::names::mknodat, Partial("no block devices")),
    row(260, "fchownat", &[Fd, Str, Int, Int, Hex], files::attributes::fchownat, Full),
    row(261, "futimesat", &[Fd, Str, Hex], files::attributes::futimesat, Full),
    row(262, "newfstatat", &[Fd, Str, Hex, Hex], files::stat::newfstatat, Full),
    row(263, "unlinkat", &[Fd, Str, Hex], files::names::unlinkat, Full),
    row(264, "renameat", &[Fd, Str, Fd, Str], files::names::renameat, Full),
    row(265, "linkat", &[Fd, Str, Fd, Str, Hex], files::names::linkat, Full),
    row(266, "symlinkat", &[Str, Fd, Str], files::names::symlinkat, Full),
    row(267, "readlinkat", &[Fd, Str, Hex, Int], files::stat::readlinkat, Full),
    row(268, "fchmodat", &[Fd, Str, Octal], files::attributes::fchmodat, Full),
    row(269, "faccessat", &[Fd, Str, Octal], files::stat::faccessat, Full),
    row(277, "sync_file_range", &[Fd, Int, Int, Hex], files::sync::sync_file_range, Full),
    row(280, "utimensat", &[Fd, Str, Hex, Hex], files::attributes::utimensat, Full),
    row(
        285,
        "fallocate",
        &[Fd, Hex, Int, Int],
        files::space::fallocate,
        Partial("as on tmpfs and with FALLOC_FL_ZERO_RANGE; no collapsing and inserting"),
    ),
    row(292, "dup3", &[Fd, Fd, Hex], files::descriptors::dup3, Full),
    row(294, "inotify_init1", &[Hex], files::watching::inotify_init1, Full),
    row(295, "preadv", &[Fd, Hex, Int, Int], files::io::preadv, Full),
    row(296, "pwritev", &[Fd, Hex, Int, Int], files::io::pwritev, Full),
    row(
        300,
        "fanotify_init",
        &[Hex, Hex],
        tasks::not_configured,
        Missing("ENOSYS, as a kernel without fanotify"),
    ),
    row(
        301,
        "fanotify_mark",
        &[Fd, Hex, Hex, Fd, Str],
        tasks::not_configured,
        Missing("ENOSYS, as a kernel without fanotify"),
    ),
    row(
        303,
        "name_to_handle_at",
        &[Fd, Str, Hex, Hex, Hex],
        files::extended::no_handles,
        Missing("EOPNOTSUPP, as for a file system without handles"),
    ),
    row(
        304,
        "open_by_handle_at",
        &[Fd, Hex, Hex],
        files::extended::no_handles,
        Missing("EOPNOTSUPP, as for a file system without handles"),
    ),
    row(306, "syncfs", &[Fd], files::sync::syncfs, Full),
    row(
        316,
        "renameat2",
        &[Fd, Str, Fd, Str, Hex],
        files::names::renameat2,
        Partial("no RENAME_WHITEOUT"),
    ),
    row(
        319,
        "memfd_create",
        &[Str, Hex],
        files::descriptors::memfd_create,
        Partial("no huge pages"),
    ),
    row(326, "copy_file_range", &[Fd, Hex, Fd, Hex, Int, Hex], files::copy::copy_file_range, Full),
    row(327, "preadv2", &[Fd, Hex, Int, Int, Int, Hex], files::io::preadv2, Full),
    row(328, "pwritev2", &[Fd, Hex, Int, Int, Int, Hex], files::io::pwritev2, Full),
    row(
        332,
        "statx",
        &[Fd, Str, Hex, Hex, Hex],
        files::stat::statx,
        Partial("no attribute flags, no mount id"),
    ),
    row(436, "close_range", &[Int, Int, Hex], files::descriptors::close_range, Full),
    row(
        437,
        "openat2",
        &[Fd, Str, Hex, Int],
        files::descriptors::openat2,
        Partial("RESOLVE_CACHED is always EAGAIN"),
    ),
    row(439, "faccessat2", &[Fd, Str, Octal, Hex], files::stat::faccessat2, Full),
    row(452, "fchmodat2", &[Fd, Str, Octal, Hex], files::attributes::fchmodat2, Full),
    // ipc and net
    row(7, "poll", &[Hex, Int, Int], poll::sys_poll, Full),
    row(22, "pipe", &[Hex], pipe::sys_pipe, Full),
    row(23, "select", &[Int, Hex, Hex, Hex, Hex], select::sys_select, Full),
    row(
        41,
        "socket",
        &[Int, Hex, Int],
        sockets::sys_socket,
        Partial("AF_UNIX, AF_INET, AF_INET6, and NETLINK_ROUTE; no raw sockets"),
    ),
    row(
        42,
        "connect",
        &[Fd, Hex, Int],
        sockets::sys_connect,
        Partial(
            "beyond loopback, the host connects what the egress policy allows: else EACCES, \
             or ENETUNREACH without a policy",
        ),
    ),
    row(43, "accept", &[Fd, Hex, Hex], sockets::sys_accept, Full),
    row(
        44,
        "sendto",
        &[Fd, Hex, Int, Hex, Hex, Int],
        transfer::sys_sendto,
        Partial("MSG_OOB over loopback TCP only"),
    ),
    row(
        45,
        "recvfrom",
        &[Fd, Hex, Int, Hex, Hex, Hex],
        transfer::sys_recvfrom,
        Partial("MSG_OOB over loopback TCP only; the error queue is always empty"),
    ),
    row(
        46,
        "sendmsg",
        &[Fd, Hex, Hex],
        transfer::sys_sendmsg,
        Partial("MSG_OOB over loopback TCP only; control messages of Unix sockets only"),
    ),
    row(
        47,
        "recvmsg",
        &[Fd, Hex, Hex],
        transfer::sys_recvmsg,
        Partial("MSG_OOB over loopback TCP only; control messages of Unix sockets only"),
    ),
    row(48, "shutdown", &[Fd, Int], sockets::sys_shutdown, Full),
    row(49, "bind", &[Fd, Hex, Int], sockets::sys_bind, Full),
    row(50, "listen", &[Fd, Int], sockets::sys_listen, Full),
    row(51, "getsockname", &[Fd, Hex, Hex], sockets::sys_getsockname, Full),
    row(52, "getpeername", &[Fd, Hex, Hex], sockets::sys_getpeername, Full),
    row(53, "socketpair", &[Int, Hex, Int, Hex], sockets::sys_socketpair, Full),
    row(
        54,
        "setsockopt",
        &[Fd, Int, Int, Hex, Int],
        sockets::sys_setsockopt,
        Partial("options about the network itself are kept and given back"),
    ),
    row(
        55,
        "getsockopt",
        &[Fd, Int, Int, Hex, Hex],
        sockets::sys_getsockopt,
        Partial("options about the network itself are kept and given back"),
    ),
    row(29, "shmget", &[Int, Int, Octal], sysv::memory::shmget, Partial("no huge pages")),
    row(30, "shmat", &[Int, Hex, Octal], sysv::memory::shmat, Full),
    row(31, "shmctl", &[Int, Int, Hex], sysv::memory::shmctl, Full),
    row(64, "semget", &[Int, Int, Octal], sysv::semaphores::semget, Full),
    row(65, "semop", &[Int, Hex, Int], sysv::semaphores::semop, Full),
    row(66, "semctl", &[Int, Int, Int, Hex], sysv::semaphores::semctl, Full),
    row(67, "shmdt", &[Hex], sysv::memory::shmdt, Full),
    row(68, "msgget", &[Int, Octal], sysv::messages::msgget, Full),
    row(69, "msgsnd", &[Int, Hex, Int, Octal], sysv::messages::msgsnd, Full),
    row(70, "msgrcv", &[Int, Hex, Int, Int, Octal], sysv::messages::msgrcv, Full),
    row(71, "msgctl", &[Int, Int, Hex], sysv::messages::msgctl, Full),
    row(220, "semtimedop", &[Int, Hex, Int, Hex], sysv::semaphores::semtimedop, Full),
    row(213, "epoll_create", &[Int], epoll::sys_epoll_create, Full),
    row(232, "epoll_wait", &[Fd, Hex, Int, Int], epoll::sys_epoll_wait, Full),
    row(233, "epoll_ctl", &[Fd, Int, Fd, Hex], epoll::sys_epoll_ctl, Full),
    row(270, "pselect6", &[Int, Hex, Hex, Hex, Hex, Hex], select::sys_pselect6, Full),
    row(271, "ppoll", &[Hex, Int, Hex, Hex, Int], poll::sys_ppoll, Full),
    row(281, "epoll_pwait", &[Fd, Hex, Int, Int, Hex, Int], epoll::sys_epoll_pwait, Full),
    row(
        275,
        "splice",
        &[Fd, Hex, Fd, Hex, Int, Hex],
        splice::sys_splice,
        Partial("bytes are copied, not pages"),
    ),
    row(276, "tee", &[Fd, Fd, Int, Hex], splice::sys_tee, Partial("as splice")),
    row(278, "vmsplice", &[Fd, Hex, Int, Hex], splice::sys_vmsplice, Partial("as splice")),
    row(282, "signalfd", &[Fd, Hex, Int], signalfd::sys_signalfd, Full),
    row(
        283,
        "timerfd_create",
        &[Int, Hex],
        timerfd::sys_timerfd_create,
        Partial("no alarm clocks; a change of the clock is not noticed"),
    ),
    row(284, "eventfd", &[Int], eventfd::sys_eventfd, Full),
    row(
        286,
        "timerfd_settime",
        &[Fd, Hex, Hex, Hex],
        timerfd::sys_timerfd_settime,
        Partial("TFD_TIMER_CANCEL_ON_SET is accepted: the clock cannot be set"),
    ),
    row(287, "timerfd_gettime", &[Fd, Hex], timerfd::sys_timerfd_gettime, Full),
    row(288, "accept4", &[Fd, Hex, Hex, Hex], sockets::sys_accept4, Full),
    row(289, "signalfd4", &[Fd, Hex, Int, Hex], signalfd::sys_signalfd4, Full),
    row(290, "eventfd2", &[Int, Hex], eventfd::sys_eventfd2, Full),
    row(291, "epoll_create1", &[Hex], epoll::sys_epoll_create1, Full),
    row(293, "pipe2", &[Hex, Hex], pipe::sys_pipe2, Full),
    row(299, "recvmmsg", &[Fd, Hex, Int, Hex, Hex], transfer::sys_recvmmsg, Full),
    row(307, "sendmmsg", &[Fd, Hex, Int, Hex], transfer::sys_sendmmsg, Full),
    row(441, "epoll_pwait2", &[Fd, Hex, Int, Hex, Hex, Int], epoll::sys_epoll_pwait2, Full),
    // mm
    row(
        9,
        "mmap",
        &[Hex, Int, Hex, Hex, Fd, Int],
        memory::mmap,
        Partial("no huge pages; MAP_GROWSDOWN areas do not grow"),
    ),
    row(10, "mprotect", &[Hex, Int, Hex], memory::mprotect, Full),
    row(11, "munmap", &[Hex, Int], memory::munmap, Full),
    row(12, "brk", &[Hex], memory::brk, Full),
    row(
        25,
        "mremap",
        &[Hex, Int, Int, Hex, Hex],
        memory::mremap,
        Partial("shared mappings cannot be duplicated; no MREMAP_DONTUNMAP"),
    ),
    row(26, "msync", &[Hex, Int, Hex], memory::msync, Full),
    row(
        27,
        "mincore",
        &[Hex, Int, Hex],
        memory::mincore,
        Partial("every mapped page counts as resident"),
    ),
    row(28, "madvise", &[Hex, Int, Int], memory::madvise, Full),
    row(149, "mlock", &[Hex, Int], locking::mlock, Partial(NOT_LOCKED)),
    row(150, "munlock", &[Hex, Int], locking::munlock, Full),
    row(151, "mlockall", &[Hex], locking::mlockall, Partial(NOT_LOCKED)),
    row(152, "munlockall", &[], locking::munlockall, Full),
    row(325, "mlock2", &[Hex, Int, Hex], locking::mlock2, Partial(NOT_LOCKED)),
    // task, signals, time
    row(13, "rt_sigaction", &[Int, Hex, Hex, Int], signals::rt_sigaction, Full),
    row(14, "rt_sigprocmask", &[Int, Hex, Hex, Int], signals::rt_sigprocmask, Full),
    row(15, "rt_sigreturn", &[], signals::rt_sigreturn, Full),
    row(24, "sched_yield", &[], tasks::sched_yield, Full),
    row(34, "pause", &[], signals::pause, Full),
    row(35, "nanosleep", &[Hex, Hex], timers::nanosleep, Full),
    row(36, "getitimer", &[Int, Hex], timers::getitimer, Full),
    row(37, "alarm", &[Int], timers::alarm, Full),
    row(38, "setitimer", &[Int, Hex, Hex], timers::setitimer, Full),
    row(39, "getpid", &[], tasks::getpid, Full),
    row(59, "execve", &[Str, Hex, Hex], tasks::execve, Full),
    row(60, "exit", &[Int], tasks::exit, Full),
    row(56, "clone", &[Hex, Hex, Hex, Hex, Hex], clone::clone, Partial(NO_NAMESPACES)),
    row(57, "fork", &[], clone::fork, Full),
    row(58, "vfork", &[], clone::vfork, Full),
    row(61, "wait4", &[Int, Hex, Hex, Hex], tasks::wait4, Full),
    row(62, "kill", &[Int, Int], signals::kill, Full),
    row(63, "uname", &[Hex], tasks::uname, Full),
    row(96, "gettimeofday", &[Hex, Hex], timers::gettimeofday, Full),
    row(97, "getrlimit", &[Int, Hex], tasks::getrlimit, Full),
    row(98, "getrusage", &[Int, Hex], timers::getrusage, Partial("CPU time only")),
    row(99, "sysinfo", &[Hex], tasks::sysinfo, Full),
    row(100, "times", &[Hex], timers::times, Full),
    row(102, "getuid", &[], tasks::getuid, Full),
    row(104, "getgid", &[], tasks::getgid, Full),
    row(105, "setuid", &[Int], tasks::setuid, Full),
    row(106, "setgid", &[Int], tasks::setgid, Full),
    row(107, "geteuid", &[], tasks::geteuid, Full),
    row(108, "getegid", &[], tasks::getegid, Full),
    row(109, "setpgid", &[Int, Int], tasks::setpgid, Full),
    row(110, "getppid", &[], tasks::getppid, Full),
    row(111, "getpgrp", &[], tasks::getpgrp, Full),
    row(112, "setsid", &[], tasks::setsid, Full),
    row(113, "setreuid", &[Int, Int], tasks::setreuid, Full),
    row(114, "setregid", &[Int, Int], tasks::setregid, Full),
    row(115, "getgroups", &[Int, Hex], tasks::getgroups, Full),
    row(116, "setgroups", &[Int, Hex], tasks::setgroups, Full),
    row(117, "setresuid", &[Int, Int, Int], tasks::setresuid, Full),
    row(118, "getresuid", &[Hex, Hex, Hex], tasks::getresuid, Full),
    row(119, "setresgid", &[Int, Int, Int], tasks::setresgid, Full),
    row(120, "getresgid", &[Hex, Hex, Hex], tasks::getresgid, Full),
    row(121, "getpgid", &[Int], tasks::getpgid, Full),
    row(122, "setfsuid", &[Int], tasks::setfsuid, Full),
    row(123, "setfsgid", &[Int], tasks::setfsgid, Full),
    row(124, "getsid", &[Int], tasks::getsid, Full),
    row(125, "capget", &[Hex, Hex], tasks::capget, Full),
    row(126, "capset", &[Hex, Hex], tasks::capset, Full),
    row(127, "rt_sigpending", &[Hex, Int], signals::rt_sigpending, Full),
    row(128, "rt_sigtimedwait", &[Hex, Hex, Hex, Int], signals::rt_sigtimedwait, Full),
    row(129, "rt_sigqueueinfo", &[Int, Int, Hex], signals::rt_sigqueueinfo, Full),
    row(130, "rt_sigsuspend", &[Hex, Int], signals::rt_sigsuspend, Full),
    row(131, "sigaltstack", &[Hex, Hex], signals::sigaltstack, Full),
    row(135, "personality", &[Hex], tasks::personality, Partial("PER_LINUX only")),
    row(140, "getpriority", &[Int, Int], tasks::getpriority, Full),
    row(141, "setpriority", &[Int, Int, Int], tasks::setpriority, Partial(NOT_SCHEDULED)),
    row(142, "sched_setparam", &[Int, Hex], tasks::sched_setparam, Partial(NOT_SCHEDULED)),
    row(143, "sched_getparam", &[Int, Hex], tasks::sched_getparam, Full),
    row(
        144,
        "sched_setscheduler",
        &[Int, Int, Hex],
        tasks::sched_setscheduler,
        Partial(NOT_SCHEDULED),
    ),
    row(145, "sched_getscheduler", &[Int], tasks::sched_getscheduler, Full),
    row(146, "sched_get_priority_max", &[Int], tasks::sched_get_priority_max, Full),
    row(147, "sched_get_priority_min", &[Int], tasks::sched_get_priority_min, Full),
    row(148, "sched_rr_get_interval", &[Int, Hex], tasks::sched_rr_get_interval, Full),
    row(
        157,
        "prctl",
        &[Int, Hex, Hex, Hex, Hex],
        tasks::prctl,
        Partial("names, and what has nothing to do in a sandbox"),
    ),
    row(158, "arch_prctl", &[Hex, Hex], tasks::arch_prctl, Full),
    row(
        159,
        "adjtimex",
        &[Hex],
        timers::adjtimex,
        Partial("changes are EPERM: the clock is the host's"),
    ),
    row(160, "setrlimit", &[Int, Hex], tasks::setrlimit, Full),
    row(
        164,
        "settimeofday",
        &[Hex, Hex],
        timers::clock_settime,
        Missing("EPERM: the clock is the host's"),
    ),
    row(170, "sethostname", &[Str, Int], tasks::sethostname, Full),
    row(186, "gettid", &[], tasks::gettid, Full),
    row(200, "tkill", &[Int, Int], signals::tkill, Full),
    row(201, "time", &[Hex], timers::time, Full),
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
        tasks::sched_setaffinity,
        Partial(NOT_SCHEDULED),
    ),
    row(204, "sched_getaffinity", &[Int, Int, Hex], tasks::sched_getaffinity, Full),
    row(218, "set_tid_address", &[Hex], tasks::set_tid_address, Full),
    row(219, "restart_syscall", &[], signals::restart_syscall, Full),
    row(
        227,
        "clock_settime",
        &[Int, Hex],
        timers::clock_settime,
        Missing("EPERM: the clock is the host's"),
    ),
    row(222, "timer_create", &[Int, Hex, Hex], posix::timer_create, Full),
    row(223, "timer_settime", &[Int, Hex, Hex, Hex], posix::timer_settime, Full),
    row(224, "timer_gettime", &[Int, Hex], posix::timer_gettime, Full),
    row(225, "timer_getoverrun", &[Int], posix::timer_getoverrun, Full),
    row(226, "timer_delete", &[Int], posix::timer_delete, Full),
    row(228, "clock_gettime", &[Int, Hex], timers::clock_gettime, Full),
    row(229, "clock_getres", &[Int, Hex], timers::clock_getres, Full),
    row(230, "clock_nanosleep", &[Int, Hex, Hex, Hex], timers::clock_nanosleep, Full),
    row(231, "exit_group", &[Int], tasks::exit_group, Full),
    row(234, "tgkill", &[Int, Int, Int], signals::tgkill, Full),
    row(247, "waitid", &[Int, Int, Hex, Hex, Hex], tasks::waitid, Full),
    row(273, "set_robust_list", &[Hex, Int], tasks::set_robust_list, Full),
    row(274, "get_robust_list", &[Int, Hex, Hex], tasks::get_robust_list, Full),
    row(302, "prlimit64", &[Int, Int, Hex, Hex], tasks::prlimit64, Full),
    row(
        305,
        "clock_adjtime",
        &[Int, Hex],
        timers::clock_adjtime,
        Partial("changes are EPERM: the clock is the host's"),
    ),
    row(309, "getcpu", &[Hex, Hex, Hex], tasks::getcpu, Full),
    row(
        314,
        "sched_setattr",
        &[Int, Hex, Hex],
        tasks::sched_setattr,
        Partial("kept, but not scheduled by; no SCHED_DEADLINE (EPERM), no utilization clamps"),
    ),
    row(315, "sched_getattr", &[Int, Hex, Int, Hex], tasks::sched_getattr, Full),
    row(318, "getrandom", &[Hex, Int, Hex], tasks::getrandom, Full),
    row(322, "execveat", &[Fd, Str, Hex, Hex, Hex], tasks::execveat, Full),
    row(297, "rt_tgsigqueueinfo", &[Int, Int, Int, Hex], signals::rt_tgsigqueueinfo, Full),
    row(424, "pidfd_send_signal", &[Fd, Int, Hex, Int], pidfd::sys_pidfd_send_signal, Full),
    row(434, "pidfd_open", &[Int, Hex], pidfd::sys_pidfd_open, Full),
    row(438, "pidfd_getfd", &[Fd, Fd, Hex], pidfd::sys_pidfd_getfd, Full),
    row(435, "clone3", &[Hex, Int], clone::clone3, Partial(NO_NAMESPACES)),
    row(324, "membarrier", &[Int, Hex, Int], tasks::membarrier, Full),
    row(
        334,
        "rseq",
        &[Hex, Int, Hex, Hex],
        tasks::not_configured,
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
