//! The namespaces that all sandboxes share: user, pid, network, ipc, host name,
//! mounts and control groups.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;

use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount,
    mount_change, mount_move, mount_remount, move_mount, open_tree, unmount,
};
use rustix::thread::UnshareFlags;

use crate::sys::{Forked, fork_with};

/// Whether the parent has a user namespace of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserNamespace {
    /// It has.
    Own,
    /// It has not: it runs as root and the host does not allow user namespaces.
    Host,
}

const NAMESPACES: i32 = libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP;

/// Forks a sibling of the caller into new namespaces. It is process 1 of its
/// pid namespace. Even root gets a user namespace where the host allows it:
/// nothing in it has a right outside, and the daemon, who owns it, has every
/// right inside whatever its own capabilities are.
pub fn fork_sibling(is_inside: bool) -> io::Result<(Forked, UserNamespace)> {
    let flags = (NAMESPACES | libc::CLONE_PARENT) as u64;
    if is_inside {
        // SAFETY: as below.
        return Ok((unsafe { fork_with(flags) }?, UserNamespace::Own));
    }
    // SAFETY: the launcher has one thread; the flags share nothing.
    match unsafe { fork_with(flags | libc::CLONE_NEWUSER as u64) } {
        Ok(forked) => Ok((forked, UserNamespace::Own)),
        Err(_) if rustix::process::geteuid().is_root() => {
            // SAFETY: as above.
            let forked = unsafe { fork_with(flags) }?;
            Ok((forked, UserNamespace::Host))
        }
        Err(error) => Err(error),
    }
}

/// Makes an empty read-only directory the root, and detaches all other mounts.
pub fn enter_empty_root() -> io::Result<()> {
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    Ok(enter_root(c"size=4k,nr_inodes=2,mode=0555", || Ok(()))?)
}

/// Makes a read-only directory with `/proc` and `/dev/null` the root, and detaches all
/// other mounts: there is nothing else in it for whoever looks into this process, and
/// what comes next needs no more. The mount namespace is then this process's own.
pub fn enter_launcher_root() -> Result<(), Errno> {
    // SAFETY: a launcher has one thread, and no descriptors are unshared.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let copy = |path| {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_RECURSIVE;
        open_tree(CWD, path, flags)
    };
    let (proc, null) = (copy("/proc")?, copy("/dev/null")?);
    enter_root(c"size=16k,nr_inodes=8,mode=0755", || {
        for directory in ["proc", "dev"] {
            mkdirat(CWD, directory, Mode::from_raw_mode(0o755))?;
        }
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        openat(CWD, "dev/null", flags, Mode::from_raw_mode(0o444))?;
        for (tree, path) in [(proc, "proc"), (null, "dev/null")] {
            move_mount(tree, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        }
        Ok(())
    })
}

/// Makes a new directory the root, filled by `fill`, whose working directory it is, and
/// read-only from then on.
fn enter_root(options: &CStr, fill: impl FnOnce() -> Result<(), Errno>) -> Result<(), Errno> {
    // Any directory serves as the mount point; this one surely exists.
    let empty = "/proc";
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("none", empty, "tmpfs", flags, options)?;
    rustix::process::chdir(empty)?;
    fill()?;
    make_root_read_only(flags)
}

/// Makes the working directory, a mount point, the root directory, detaches all other
/// mounts, and forbids writing there.
pub fn make_root_read_only(flags: MountFlags) -> Result<(), Errno> {
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
