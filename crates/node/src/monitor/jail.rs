//! How a process becomes the daemon: what it keeps of root's rights and of the host's
//! files.

use super::{Start, UserKind};
use crate::daemon::Prepared;
use crate::home::Home;
use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat, symlinkat};
use rustix::io::Errno;
use rustix::process::{Gid, Signal, Uid, getppid, set_parent_process_death_signal};
use rustix::thread::{
    CapabilitySet, clear_ambient_capability_set, set_no_new_privs, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use thaw_sandbox::monitor::{
    self, DaemonIds, copy_tree, drop_groups_if_allowed, enter_root as enter_new_root,
    hold_capabilities, put_tree, shrink_bounding_set, unshare_mounts,
};

/// What the daemon was given by its monitor.
#[derive(Debug)]
pub struct Inherited {
    /// The directory that it serves.
    pub home: Home,
    /// Its listeners and its lock.
    pub prepared: Prepared,
}

/// Makes this process, started by a monitor, the daemon: without root's rights, and in a
/// root directory that has what it needs. To be called before there are threads.
///
/// # Errors
/// The host refuses something; the process must end.
pub fn become_daemon() -> io::Result<Inherited> {
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    let null = fs::File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    let parent = getppid();
    let (text, descriptors) = monitor::receive_start(&socket)?;
    let mut start: Start = serde_json::from_slice(&text)?;
    let (access, dashboard) = (start.access.take(), start.dashboard.take());
    let prepared = Prepared::inherited(&start.home, descriptors, access, dashboard)?;
    enter_root(&start)?;
    give_up_rights(start.user.ids, start.user.kind)?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid() != parent {
        // The monitor has ended before it could be noticed.
        return Err(Errno::PIPE.into());
    }
    super::filter::install(start.user.kind)?;
    monitor::adopt(socket, start.grant);
    Ok(Inherited { home: start.home, prepared })
}

/// What the daemon sees of the host besides `$THAW_HOME`: processes, read-only, for the
/// sandboxes among them; control groups, of which it may write what is its own. It loads no
/// libraries, and names are looked up by processes of their own.
const SEEN: [(&str, Access); 3] =
    [("/proc", Access::Read), (CONTROL_GROUPS, Access::Write), ("/dev/null", Access::Write)];

const CONTROL_GROUPS: &str = "/sys/fs/cgroup";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

/// A place of the host that is to be seen at the same path.
struct Place {
    path: PathBuf,
    content: Content,
}

enum Content {
    Mount { tree: OwnedFd, is_directory: bool },
    Link(PathBuf),
}

impl Place {
    /// `None` if the host has no such place.
    fn take(path: &Path, access: Access) -> io::Result<Option<Self>> {
        let attributes = match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            result => result?,
        };
        let path = path.to_owned();
        if attributes.is_symlink() {
            return Ok(Some(Self { content: Content::Link(fs::read_link(&path)?), path }));
        }
        let tree = match copy_tree(&path) {
            // It was a control group, and has gone.
            Err(Errno::NOENT) => return Ok(None),
            result => result?,
        };
        restrict(&tree, access)?;
        let is_directory = attributes.is_dir();
        Ok(Some(Self { path, content: Content::Mount { tree, is_directory } }))
    }

    /// Puts it at its path below the working directory.
    fn put(&self) -> io::Result<()> {
        let inside: PathBuf =
            self.path.components().filter(|part| *part != Component::RootDir).collect();
        if let Some(above) = inside.parent() {
            fs::create_dir_all(above)?;
        }
        match &self.content {
            Content::Link(target) => Ok(symlinkat(target, CWD, &inside)?),
            Content::Mount { tree, is_directory } => {
                if *is_directory {
                    match mkdirat(CWD, &inside, Mode::from_raw_mode(0o755)) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(errno) => return Err(errno.into()),
                    }
                } else {
                    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
                    match openat(CWD, &inside, flags, Mode::from_raw_mode(0o444)) {
                        Ok(_) | Err(Errno::EXIST) => {}
                        Err(errno) => return Err(errno.into()),
                    }
                }
                Ok(put_tree(tree, &inside)?)
            }
        }
    }
}

/// Forbids what is not needed on all mounts of a tree (mount_setattr(2)). What is forbidden
/// there already stays so.
#[allow(unsafe_code)]
fn restrict(tree: &OwnedFd, access: Access) -> io::Result<()> {
    let read_only = if access == Access::Read { libc::MOUNT_ATTR_RDONLY } else { 0 };
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_NOSUID | read_only,
        attr_clr: 0,
        propagation: 0,
        userns_fd: 0,
    };
    // SAFETY: the call reads an empty path and the attributes, whose size it is told; both
    // outlive it.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | libc::AT_RECURSIVE,
            &raw const attributes,
            size_of_val(&attributes),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Of the caller's control groups, those of sandboxes can be written to: not those beside
/// them, nor the files of the group that all of these are in.
fn add_control_groups(places: &mut Vec<Place>, start: &Start) -> io::Result<()> {
    for directory in start.grant.group_directories() {
        places.extend(Place::take(directory, Access::Write)?);
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            if !start.grant.is_of_sandbox(&path) {
                places.extend(Place::take(&path, Access::Read)?);
            }
        }
    }
    Ok(())
}

/// Enters a root directory with the home and [`SEEN`].
fn enter_root(start: &Start) -> io::Result<()> {
    unshare_mounts()?;
    let seen = SEEN.iter().map(|(path, access)| {
        // All of the caller's control groups are this process's, too; it gets its own below.
        let is_callers = start.user.kind == UserKind::Caller && *path == CONTROL_GROUPS;
        (Path::new(path), if is_callers { Access::Read } else { *access })
    });
    let own = start.linked.iter().map(PathBuf::as_path).chain([start.home.root()]);
    let own = own.map(|path| (path, Access::Write));
    let mut places = Vec::new();
    for (path, access) in seen.chain(own) {
        places.extend(Place::take(path, access)?);
    }
    if start.user.kind == UserKind::Caller {
        add_control_groups(&mut places, start)?;
    }
    enter_new_root(c"size=64k,nr_inodes=128,mode=0755", || {
        // The daemon's user must find its way to the home, whatever root's umask hides.
        let umask = rustix::process::umask(Mode::WGRP | Mode::WOTH);
        let outcome = places.iter().try_for_each(Place::put);
        rustix::process::umask(umask);
        outcome
    })
}

/// Becomes `user`, without a capability and without a way to get one.
fn give_up_rights(user: DaemonIds, kind: UserKind) -> io::Result<()> {
    clear_ambient_capability_set()?;
    shrink_bounding_set(CapabilitySet::empty())?;
    match kind {
        UserKind::Caller => drop_groups_if_allowed()?,
        UserKind::Other => set_thread_groups(&[])?,
    }
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)?;
    hold_capabilities(CapabilitySet::empty())?;
    Ok(set_no_new_privs(true)?)
}
