//! The table of system calls: number → handler → support note.
//!
//! `docs/syscalls.md` is generated from this table. A number without a row
//! returns `ENOSYS`, is counted, and is named in the trace.

use super::Arg::{Fd, Hex, Int, Octal, Str};
use super::Support::{Full, Missing, Partial};
use super::{Arg, Entry, Handler, Support};
use crate::fs::syscalls as fs;

/// Why calls that need extended attributes fail.
const NO_XATTR: &str = "EOPNOTSUPP, as on a file system without extended attributes";

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
    row(16, "ioctl", &[Fd, Hex, Hex], fs::control::ioctl, Partial("FIONREAD, FIONBIO, FIOCLEX, terminals and sockets; the rest is ENOTTY")),
    row(17, "pread64", &[Fd, Hex, Int, Int], fs::io::pread64, Full),
    row(18, "pwrite64", &[Fd, Hex, Int, Int], fs::io::pwrite64, Full),
    row(19, "readv", &[Fd, Hex, Int], fs::io::readv, Full),
    row(20, "writev", &[Fd, Hex, Int], fs::io::writev, Full),
    row(21, "access", &[Str, Octal], fs::stat::access, Full),
    row(32, "dup", &[Fd], fs::descriptors::dup, Full),
    row(33, "dup2", &[Fd, Fd], fs::descriptors::dup2, Full),
    row(40, "sendfile", &[Fd, Fd, Hex, Int], fs::copy::sendfile, Full),
    row(72, "fcntl", &[Fd, Int, Hex], fs::control::fcntl, Partial("no leases, no F_NOTIFY, no signal-driven I/O")),
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
    row(136, "ustat", &[Hex, Hex], fs::extended::ustat, Missing("EINVAL, as for a device that is not mounted")),
    row(137, "statfs", &[Str, Hex], fs::stat::statfs, Full),
    row(138, "fstatfs", &[Fd, Hex], fs::stat::fstatfs, Full),
    row(155, "pivot_root", &[Str, Str], fs::extended::no_mounts, Missing("EPERM: the tree is put together at boot")),
    row(161, "chroot", &[Str], fs::directory::chroot, Full),
    row(162, "sync", &[], fs::sync::sync, Full),
    row(165, "mount", &[Str, Str, Str, Hex, Hex], fs::extended::no_mounts, Missing("EPERM: the tree is put together at boot")),
    row(166, "umount2", &[Str, Hex], fs::extended::no_mounts, Missing("EPERM: the tree is put together at boot")),
    row(187, "readahead", &[Fd, Int, Int], fs::sync::readahead, Full),
    row(188, "setxattr", &[Str, Str, Hex, Int, Hex], fs::extended::set, Missing(NO_XATTR)),
    row(189, "lsetxattr", &[Str, Str, Hex, Int, Hex], fs::extended::set_link, Missing(NO_XATTR)),
    row(190, "fsetxattr", &[Fd, Str, Hex, Int, Hex], fs::extended::set_descriptor, Missing(NO_XATTR)),
    row(191, "getxattr", &[Str, Str, Hex, Int], fs::extended::named, Missing(NO_XATTR)),
    row(192, "lgetxattr", &[Str, Str, Hex, Int], fs::extended::named_link, Missing(NO_XATTR)),
    row(193, "fgetxattr", &[Fd, Str, Hex, Int], fs::extended::named_descriptor, Missing(NO_XATTR)),
    row(194, "listxattr", &[Str, Hex, Int], fs::extended::list, Full),
    row(195, "llistxattr", &[Str, Hex, Int], fs::extended::list_link, Full),
    row(196, "flistxattr", &[Fd, Hex, Int], fs::extended::list_descriptor, Full),
    row(197, "removexattr", &[Str, Str], fs::extended::named, Missing(NO_XATTR)),
    row(198, "lremovexattr", &[Str, Str], fs::extended::named_link, Missing(NO_XATTR)),
    row(199, "fremovexattr", &[Fd, Str], fs::extended::named_descriptor, Missing(NO_XATTR)),
    row(217, "getdents64", &[Fd, Hex, Int], fs::directory::getdents64, Full),
    row(221, "fadvise64", &[Fd, Int, Int, Int], fs::sync::fadvise64, Full),
    row(235, "utimes", &[Str, Hex], fs::attributes::utimes, Full),
    row(253, "inotify_init", &[], fs::extended::no_inotify, Missing("ENOSYS")),
    row(254, "inotify_add_watch", &[Fd, Str, Hex], fs::extended::no_inotify, Missing("ENOSYS")),
    row(255, "inotify_rm_watch", &[Fd, Int], fs::extended::no_inotify, Missing("ENOSYS")),
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
    row(285, "fallocate", &[Fd, Hex, Int, Int], fs::space::fallocate, Partial("allocating and punching holes")),
    row(292, "dup3", &[Fd, Fd, Hex], fs::descriptors::dup3, Full),
    row(294, "inotify_init1", &[Hex], fs::extended::no_inotify, Missing("ENOSYS")),
    row(295, "preadv", &[Fd, Hex, Int, Int], fs::io::preadv, Full),
    row(296, "pwritev", &[Fd, Hex, Int, Int], fs::io::pwritev, Full),
    row(303, "name_to_handle_at", &[Fd, Str, Hex, Hex, Hex], fs::extended::no_handles, Missing("EOPNOTSUPP, as for a file system without handles")),
    row(304, "open_by_handle_at", &[Fd, Hex, Hex], fs::extended::no_handles, Missing("EOPNOTSUPP, as for a file system without handles")),
    row(306, "syncfs", &[Fd], fs::sync::syncfs, Full),
    row(316, "renameat2", &[Fd, Str, Fd, Str, Hex], fs::names::renameat2, Partial("no RENAME_WHITEOUT")),
    row(319, "memfd_create", &[Str, Hex], fs::descriptors::memfd_create, Partial("no huge pages")),
    row(326, "copy_file_range", &[Fd, Hex, Fd, Hex, Int, Hex], fs::copy::copy_file_range, Full),
    row(327, "preadv2", &[Fd, Hex, Int, Int, Int, Hex], fs::io::preadv2, Full),
    row(328, "pwritev2", &[Fd, Hex, Int, Int, Int, Hex], fs::io::pwritev2, Full),
    row(332, "statx", &[Fd, Str, Hex, Hex, Hex], fs::stat::statx, Partial("no attribute flags, no mount id")),
    row(436, "close_range", &[Int, Int, Hex], fs::descriptors::close_range, Full),
    row(437, "openat2", &[Fd, Str, Hex, Int], fs::descriptors::openat2, Partial("RESOLVE_CACHED is always EAGAIN")),
    row(439, "faccessat2", &[Fd, Str, Octal, Hex], fs::stat::faccessat2, Full),
    row(452, "fchmodat2", &[Fd, Str, Octal, Hex], fs::attributes::fchmodat2, Full),

    // ipc and net

    // mm

    // task, signals, time
];

const fn row(number: u32, name: &'static str, args: &'static [Arg], handler: Handler, support: Support) -> Entry {
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
