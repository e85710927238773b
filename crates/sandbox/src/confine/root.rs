//! Root directories with little in them.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount,
    mount_change, mount_move, mount_remount, move_mount, open_tree, unmount,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Makes an empty read-only directory the root, and detaches all other mounts. The caller has
/// a mount namespace of its own.
pub fn enter_empty_root() -> io::Result<()> {
    separate_mounts()?;
    enter_root(c"size=4k,nr_inodes=2,mode=0555", || Ok(()))
}

/// Makes a read-only directory with `/proc` and `/dev/null` the root, and detaches all
/// other mounts: there is nothing else in it for whoever looks into this process, and
/// what comes next needs no more. The mount namespace is then this process's own.
pub fn enter_launcher_root() -> Result<(), Errno> {
    unshare_mounts()?;
    let (proc, null) = (copy_tree("/proc")?, copy_tree("/dev/null")?);
    enter_root(c"size=16k,nr_inodes=8,mode=0755", || {
        for directory in ["proc", "dev"] {
            mkdirat(CWD, directory, Mode::from_raw_mode(0o755))?;
        }
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        openat(CWD, "dev/null", flags, Mode::from_raw_mode(0o444))?;
        put_tree(&proc, "proc")?;
        put_tree(&null, "dev/null")
    })
}

/// Gives the calling process, which has one thread, a mount namespace of its own.
///
/// # Errors
/// Those of unshare(2).
pub fn unshare_mounts() -> Result<(), Errno> {
    // SAFETY: there is one thread, and no descriptors are unshared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    separate_mounts()
}

/// What is mounted here from now on is mounted nowhere else, and the other way round
/// (mount_namespaces(7)). The caller has a mount namespace of its own.
pub fn separate_mounts() -> Result<(), Errno> {
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
}

/// A copy of what is mounted at a path and below it, mounted nowhere.
///
/// # Errors
/// Those of open_tree(2).
pub fn copy_tree(path: impl AsRef<Path>) -> Result<OwnedFd, Errno> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    open_tree(CWD, path.as_ref(), flags)
}

/// Mounts such a copy on a file or a directory below the working directory.
///
/// # Errors
/// Those of move_mount(2).
pub fn put_tree(tree: &OwnedFd, inside: impl AsRef<Path>) -> Result<(), Errno> {
    move_mount(tree, "", CWD, inside.as_ref(), MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

/// Makes a new directory the root, filled by `fill`, whose working directory it is, and
/// read-only from then on; detaches all other mounts. `options` are those of tmpfs(5). The
/// caller has a mount namespace of its own ([`separate_mounts`]).
///
/// # Errors
/// Those of `fill`, or of the host.
pub fn enter_root<E: From<Errno>>(
    options: &CStr,
    fill: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    // Any directory serves as the mount point; this one surely exists.
    let empty = "/proc";
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("none", empty, "tmpfs", flags, options)?;
    rustix::process::chdir(empty)?;
    fill()?;
    Ok(make_root_read_only(flags)?)
}

/// Makes the working directory, a mount point, the root directory, detaches all other
/// mounts, and forbids writing there.
fn make_root_read_only(flags: MountFlags) -> Result<(), Errno> {
    match rustix::process::pivot_root(".", ".") {
        // The old root now lies over the new one.
        Ok(()) => unmount(".", UnmountFlags::DETACH)?,
        // The old root is the initial ramfs, which cannot be pivoted away.
        Err(Errno::INVAL) => {
            mount_move(".", "/")?;
            rustix::process::chroot(".")?;
        }
        Err(errno) => return Err(errno),
    }
    rustix::process::chdir("/")?;
    mount_remount("/", flags | MountFlags::RDONLY, c"")
}
