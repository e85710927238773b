//! How a process becomes the daemon, or a fetcher of the daemon's: what it keeps of root's rights and
//! of the host's files.

use super::{DaemonUser, Start, UserKind};
use crate::daemon::Prepared;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat, symlinkat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{
    DumpableBehavior, Gid, Resource, Rlimit, Signal, Uid, getppid, set_dumpable_behavior,
    set_parent_process_death_signal, setrlimit,
};
use rustix::thread::{
    CapabilitySet, clear_ambient_capability_set, set_no_new_privs, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use thaw_home::home::Home;
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
    let (text, descriptors) = monitor::receive_start(&socket)?;
    let mut start: Start = serde_json::from_slice(&text)?;
    let prepared = start.inherit(descriptors)?;
    enter_root(&start)?;
    shrink_bounding_set(CapabilitySet::empty())?;
    give_up_rights(start.user.ids, start.user.kind)?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if has_ended(&socket)? {
        // The monitor, before its end could be noticed.
        return Err(Errno::PIPE.into());
    }
    super::filter::install(start.user.kind)?;
    let watched = socket.try_clone()?;
    monitor::adopt(socket, start.grant);
    end_with(watched)?;
    Ok(Inherited { home: start.home, prepared })
}

/// Has a thread end this process when its monitor has ended: it can make no sandboxes any more,
/// and those that it has are ended with the monitor. A signal at the death of the parent is not
/// enough: the host asks then whether who dies may send it (prctl(2), kill(2)).
///
/// # Errors
/// There is no thread to be had.
pub(super) fn end_with(monitor: OwnedFd) -> io::Result<()> {
    let watch = move || loop {
        // The end of a connection is always reported (poll(2)); requests and answers are
        // others' business.
        let mut events = [PollFd::new(&monitor, PollFlags::empty())];
        if matches!(poll(&mut events, None), Ok(1..)) {
            tracing::error!("the monitor has ended, and the daemon ends with it");
            monitor::exit_at_once(1);
        }
    };
    std::thread::Builder::new().name("monitor-watch".to_owned()).spawn(watch)?;
    Ok(())
}

/// Whether the other end of a connection is closed.
fn has_ended(socket: impl AsFd) -> io::Result<bool> {
    let mut events = [PollFd::new(&socket, PollFlags::empty())];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    Ok(poll(&mut events, Some(&at_once))? > 0)
}

/// What a fetcher is told by whoever starts it, who is trusted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FetcherStart {
    /// The directory with the functions.
    pub home: Home,
    /// Directories elsewhere to which parts of the home are links.
    pub linked: Vec<PathBuf>,
    /// The daemon's user. `None`: there is no monitor, and the fetcher keeps its caller's rights.
    pub user: Option<DaemonUser>,
}

/// Makes this process, started by a monitor, one without rights that talks to a registry. To be called
/// before there are threads, and before it reads anything of the daemon's. Returns a socket that is to
/// listen for the daemon, where it may make none afterwards.
///
/// # Errors
/// The host refuses something; the process must end.
pub fn become_fetcher(start: &FetcherStart) -> io::Result<Option<OwnedFd>> {
    let null = fs::File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::thread::set_name(c"thaw-fetcher")?;
    // The terminal's signals are for the daemon.
    let _ = rustix::process::setsid();
    let parent = getppid();
    let Some(user) = start.user else {
        set_no_new_privs(true)?;
        confine_memory()?;
        return Ok(None);
    };
    monitor::load_name_modules();
    let listening = match user.kind {
        UserKind::Other => None,
        UserKind::Caller => Some(rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?),
    };
    enter_fetchers_root(start)?;
    match shrink_bounding_set(CapabilitySet::empty()) {
        // A monitor's unit leaves it no right to. It gains nothing by executing either, which its filter
        // forbids, and `no_new_privs`.
        Ok(()) | Err(Errno::PERM) => {}
        Err(errno) => return Err(errno.into()),
    }
    give_up_rights(user.ids, user.kind)?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid() != parent {
        return Err(Errno::PIPE.into());
    }
    confine_memory()?;
    super::filter::install_for_fetcher(user.kind)?;
    Ok(listening)
}

/// Keeps the memory of this process, which holds credentials, from others with its user id and out of core
/// files. To be called again after the user id has changed.
///
/// # Errors
/// The host refuses it.
pub fn confine_memory() -> io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    Ok(setrlimit(Resource::Core, none)?)
}

/// What a fetcher sees of the host, read-only, besides `$THAW_HOME` and what the daemon sees: how names
/// are looked up, whose certificates are trusted, and keys of registries that the operator has put there.
const SEEN_BY_FETCHERS: [&str; 11] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/host.conf",
    "/etc/gai.conf",
    "/etc/ssl",
    "/etc/pki",
    "/etc/ca-certificates",
    "/etc/thaw",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
];

/// Enters a root directory with the home and [`SEEN_BY_FETCHERS`].
fn enter_fetchers_root(start: &FetcherStart) -> io::Result<()> {
    unshare_mounts()?;
    let mut places = Vec::new();
    for (path, access) in [("/proc", Access::Read), ("/dev/null", Access::Write)] {
        places.extend(Place::take(Path::new(path), access)?);
    }
    for path in start.linked.iter().map(PathBuf::as_path).chain([start.home.root()]) {
        places.extend(Place::take(path, Access::Write)?);
    }
    let named = ["SSL_CERT_FILE", "SSL_CERT_DIR"].into_iter().filter_map(std::env::var_os);
    // The daemon may change what lies in the home, and it is there already.
    let is_own = |path: &Path| {
        let mut own = start.linked.iter().map(PathBuf::as_path).chain([start.home.root()]);
        own.any(|own| path.starts_with(own))
    };
    let named = named.map(PathBuf::from).filter(|path| path.is_absolute() && !is_own(path));
    let named: Vec<_> = named.collect();
    for path in SEEN_BY_FETCHERS.iter().map(Path::new).chain(named.iter().map(PathBuf::as_path)) {
        // What a link leads to is not there itself.
        let Ok(real) = fs::canonicalize(path) else { continue };
        if is_own(&real) {
            continue;
        }
        let place = Place::take(&real, Access::Read)?;
        places.extend(place.map(|place| Place { path: path.to_owned(), ..place }));
    }
    enter_new_root(c"size=64k,nr_inodes=128,mode=0755", || {
        let umask = rustix::process::umask(Mode::WGRP | Mode::WOTH);
        let outcome = places.iter().try_for_each(Place::put);
        rustix::process::umask(umask);
        outcome
    })
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
