//! The files by which processes enter control groups, as a monitor opens them for a daemon.
//!
//! Whoever has such a file open can write the number of any process there. The host kernel then
//! asks whom the user that *opened* the file may move, and not the one that writes (since Linux
//! 5.17 and its stable branches, CVE-2021-4197; earlier ones ask about the one that writes). A file
//! that root has opened moves every process of the host. So the monitor opens them as
//! [`Newcomers`], the user that processes have while they enter: root of the sandboxes' user
//! namespace, which no other process of the host is.
//!
//! | version | whom such a file moves |
//! | --- | --- |
//! | 1 | processes of this user (`__cgroup1_procs_write` in kernel/cgroup/cgroup-v1.c) |
//! | 2 | processes in the group that holds all sandboxes' groups and that of the zygote parents: its `cgroup.procs` is this user's for that, and of no group above it (`cgroup_procs_write_permission` in kernel/cgroup/cgroup.c) |

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::chown;
use std::path::Path;

use rustix::process::{Uid, getegid, parent_process_death_signal, set_parent_process_death_signal};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_res_uid,
};
use serde::{Deserialize, Serialize};

use super::hierarchy::{Hierarchy, Version, make_directory};
use crate::sys;

/// The file of a group that moves whoever writes to it there.
pub(super) fn entrance(version: Version) -> &'static str {
    match version {
        Version::V2 => "cgroup.procs",
        // A thread that moves itself need not wait until every process of
        // the host has left fork and exit, as the move of a process must.
        Version::V1 => "tasks",
    }
}

/// Opens the file that leads into a group.
pub(super) fn open(directory: &Path, version: Version) -> io::Result<OwnedFd> {
    Ok(File::options().write(true).open(directory.join(entrance(version)))?.into())
}

/// The user that processes have while they enter groups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Newcomers {
    uid: u32,
}

impl Newcomers {
    /// The user with this id, who is let into the groups of `hierarchy`. To be called as root.
    ///
    /// # Errors
    /// The host's.
    pub fn let_in(hierarchy: &Hierarchy, uid: u32) -> io::Result<Self> {
        for place in hierarchy.places() {
            if let Some(parents) = place.of_zygote_parents() {
                make_directory(&parents)?;
                chown(place.directory.join(entrance(place.version)), Some(uid), None)?;
            }
        }
        Ok(Self { uid })
    }

    /// The files by which a zygote parent enters the groups from which newcomers come. They move
    /// every process: they are for root only.
    ///
    /// # Errors
    /// The host's.
    pub(crate) fn origins(hierarchy: &Hierarchy) -> io::Result<Vec<OwnedFd>> {
        let groups = hierarchy.places().iter().filter_map(super::Place::of_zygote_parents);
        groups.map(|group| open(&group, Version::V2)).collect()
    }

    /// Opens the files that lead into the groups of one sandbox, one of each place.
    ///
    /// # Errors
    /// The host's.
    pub(super) fn open(&self, groups: &[(&Path, Version)]) -> io::Result<Vec<OwnedFd>> {
        let open_one = |&(directory, version): &(&Path, Version)| open(directory, version);
        if groups.iter().all(|(_, version)| *version == Version::V1) {
            // Root's rights find the files. Whom they move does not depend on them.
            let open_all = || groups.iter().map(open_one).collect();
            return as_user(self.uid, FileUser::Root, open_all);
        }
        groups.iter().map(|group| self.open_as(group)).collect()
    }

    fn open_as(&self, &(directory, version): &(&Path, Version)) -> io::Result<OwnedFd> {
        match version {
            Version::V1 => as_user(self.uid, FileUser::Root, || open(directory, version)),
            Version::V2 => {
                chown(directory.join(entrance(version)), Some(self.uid), None)?;
                as_user(self.uid, FileUser::Same, || open(directory, version))
            }
        }
    }
}

/// With whose rights files are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileUser {
    /// Root's.
    Root,
    /// Those of the effective user.
    Same,
}

/// Does something with another effective user id. To be called as root.
fn as_user<T>(uid: u32, files: FileUser, action: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    // Forgotten when the effective user changes (prctl(2), "PR_SET_PDEATHSIG").
    let death_signal = parent_process_death_signal()?;
    // Of this thread only (setresuid(2), "C library/kernel differences").
    set_thread_res_uid(Uid::ROOT, Uid::from_raw(uid), Uid::ROOT)?;
    let result = keep_right_to_kill().and_then(|()| match files {
        FileUser::Same => Ok(()),
        FileUser::Root => sys::set_filesystem_ids(Uid::ROOT.as_raw(), getegid().as_raw()),
    });
    let result = result.and_then(|()| action());
    // Sets the user id for files, too, and gives root's rights back.
    set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
    set_parent_process_death_signal(death_signal)?;
    result
}

/// Lets children of other users end with this thread, should it be killed just now: the host asks
/// whether who dies may send them the signal that they have asked for (`reparent_leader` in
/// kernel/exit.c, kill(2)). Comes after the user id has changed, which takes all rights.
fn keep_right_to_kill() -> io::Result<()> {
    let sets = capabilities(None)?;
    let effective = sets.permitted & CapabilitySet::KILL;
    Ok(set_capabilities(None, CapabilitySets { effective, ..sets })?)
}

#[cfg(test)]
mod tests {
    use super::super::discover::make_group;
    use super::super::{Controller, Place};
    use super::*;
    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::io::Errno;
    use rustix::process::{Pid, Signal, geteuid, getpid, kill_process, test_kill_process, waitpid};
    use std::convert::Infallible;
    use std::io::Read;
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    const USER: u32 = 65_533;
    const OTHER_USER: u32 = 65_532;

    /// A place in the first tree of version 2 that is mounted here, which may have no controllers.
    fn place_of_version_2() -> Option<Place> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mut mounts = mounts.lines().filter(|line| line.contains(" - cgroup2 "));
        let mount = Path::new(mounts.next()?.split(' ').nth(4)?);
        // Under another name it would be a leftover, which any daemon that starts meanwhile removes.
        let directory = make_group(mount).ok()?;
        Some(Place {
            version: Version::V2,
            directory,
            controllers: vec![Controller::CpuAccounting],
        })
    }

    /// A process of this user that waits, in the group that this file leads into.
    fn waiting(uid: u32, entrance: Option<&OwnedFd>) -> Child {
        let child = Command::new("sleep").arg("1000").uid(uid).gid(uid).spawn().unwrap();
        if let Some(entrance) = entrance {
            rustix::io::write(entrance, child.id().to_string().as_bytes()).unwrap();
        }
        child
    }

    #[test]
    fn in_a_tree_of_version_2_only_processes_of_zygote_parents_are_moved() {
        if !geteuid().is_root() {
            eprintln!("skipped: only root acts as others");
            return;
        }
        let Some(place) = place_of_version_2() else {
            eprintln!("skipped: no control groups of version 2 that can be written");
            return;
        };
        let own = place.directory.clone();
        let hierarchy = Hierarchy::new(vec![place], Vec::new());
        let newcomers = Newcomers::let_in(&hierarchy, USER).unwrap();
        let origins = Newcomers::origins(&hierarchy).unwrap();
        let group = hierarchy.create(1).unwrap();
        let [entrance] = <[OwnedFd; 1]>::try_from(group.entrances_of(&newcomers).unwrap()).unwrap();
        let mut others = [0, USER, OTHER_USER].map(|uid| waiting(uid, None));
        let mut newcomer = waiting(USER, Some(&origins[0]));
        let ids = others.iter().map(Child::id).chain([std::process::id(), 1]);
        let moved: Vec<_> =
            ids.map(|id| rustix::io::write(&entrance, id.to_string().as_bytes())).collect();
        let entered = rustix::io::write(&entrance, newcomer.id().to_string().as_bytes());
        let members = std::fs::read_to_string(group.directories()[0].join("cgroup.procs")).unwrap();
        for child in others.iter_mut().chain([&mut newcomer]) {
            child.kill().and_then(|()| child.wait()).unwrap();
        }
        assert_eq!(moved, [Err(Errno::ACCESS); 5]);
        assert!(entered.is_ok(), "{entered:?}");
        assert_eq!(members.trim(), newcomer.id().to_string());
        drop((entrance, origins, group, hierarchy));
        let deadline = Instant::now() + Duration::from_secs(20);
        while own.exists() {
            assert!(Instant::now() < deadline, "{} is still there", own.display());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    #[allow(unsafe_code)]
    fn who_is_killed_as_another_user_takes_its_children_along() {
        if !geteuid().is_root() {
            eprintln!("skipped: only root acts as others");
            return;
        }
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        // A process with one thread: none with root's rights is left to end after it.
        // SAFETY: the child makes system calls only.
        let parent = unsafe { libc::fork() };
        if parent == 0 {
            let Err(_) = die_as_another(&reader, &writer);
            // SAFETY: ends this process.
            unsafe { libc::_exit(1) };
        }
        let parent = Pid::from_raw(parent).expect("a child");
        let (_, status) =
            waitpid(Some(parent), rustix::process::WaitOptions::empty()).unwrap().unwrap();
        assert_eq!(status.terminating_signal(), Some(libc::SIGKILL));
        let mut child = [0; 4];
        File::from(reader).read_exact(&mut child).unwrap();
        let child = Pid::from_raw(i32::from_ne_bytes(child)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while test_kill_process(child).is_ok() {
            assert!(Instant::now() < deadline, "process {child:?} has outlived its parent");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts a process of a user that ends with this one, and is killed while it acts as another.
    #[allow(unsafe_code)]
    fn die_as_another(reader: &OwnedFd, writer: &OwnedFd) -> io::Result<Infallible> {
        // SAFETY: the child makes system calls only.
        if unsafe { libc::fork() } == 0 {
            let Err(_) = end_with_parent(writer);
            // SAFETY: ends this process.
            unsafe { libc::_exit(1) };
        }
        poll(&mut [PollFd::new(reader, PollFlags::IN)], None)?;
        as_user(OTHER_USER, FileUser::Same, || {
            kill_process(getpid(), Signal::KILL)?;
            Err(Errno::SRCH.into())
        })
    }

    fn end_with_parent(writer: &OwnedFd) -> io::Result<Infallible> {
        let user = Uid::from_raw(USER);
        set_thread_res_uid(user, user, user)?;
        set_parent_process_death_signal(Some(Signal::KILL))?;
        rustix::io::write(writer, &getpid().as_raw_nonzero().get().to_ne_bytes())?;
        std::thread::sleep(Duration::from_secs(60));
        Err(Errno::TIMEDOUT.into())
    }
}
