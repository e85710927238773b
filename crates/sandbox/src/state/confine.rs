//! Everything that the state helper gives up before it looks at its first request.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;

use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_string,
    fsmount, fsopen, open_tree,
};
use rustix::process::{
    Resource, Rlimit, Signal, getrlimit, set_parent_process_death_signal, setrlimit, setsid,
};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, clear_ambient_capability_set,
    set_capabilities, set_capabilities_secure_bits, set_name, set_thread_groups,
};

use super::filter::{self, List};
use crate::zygote::{enter_empty_root, set_ids, shrink_bounding_set};

/// What the helper keeps: to look into a process of another id, and to open its files in
/// `/proc`, which belong to that id and nobody else may read.
const KEPT: CapabilitySet = CapabilitySet::SYS_PTRACE.union(CapabilitySet::DAC_READ_SEARCH);

/// Most bytes of its address space. A report of 64 MiB and the page runs of a sandbox of
/// many GiB take a part of it.
const ADDRESS_SPACE_MAX: u64 = 2 << 30;
/// Most open files: three for each address space of a sandbox, and the blobs of its rootfs.
const FILES_MAX: u64 = 8192;

/// A step of the confinement that failed.
pub(super) struct Failure {
    /// In words, after "cannot".
    pub step: &'static str,
    pub source: io::Error,
}

/// Names the step that an error belongs to.
pub(super) trait During<T> {
    fn during(self, step: &'static str) -> Result<T, Failure>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, step: &'static str) -> Result<T, Failure> {
        self.map_err(|source| Failure { step, source: source.into() })
    }
}

/// Gives up everything but what is needed to look at the sandboxes of this pid namespace,
/// as user and group `id`. Returns `/proc`.
pub(super) fn confine(id: u32) -> Result<OwnedFd, Failure> {
    setsid().during("start a session")?;
    set_name(c"thaw-state").during("take a name")?;
    // Killed after the sandboxes and before the daemon.
    File::options()
        .write(true)
        .open("/proc/self/oom_score_adj")
        .and_then(|mut score| score.write_all(b"900"))
        .during("set the out-of-memory score")?;
    let proc = own_proc().during("make a /proc of the sandboxes")?;
    enter_empty_root().during("enter an empty root directory")?;
    set_limits().during("set resource limits")?;
    take_id(id).during("take user ids")?;
    drop_capabilities().during("drop capabilities")?;
    // Forbids new privileges, too.
    filter::install(List::Helper).during("install its filter")?;
    Ok(proc)
}

/// Makes a fork of the helper a worker, which has no rights and ends with it.
pub(super) fn become_worker() -> io::Result<()> {
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    filter::install(List::Worker)
}

/// A `/proc` without a mount point that shows the processes of this pid namespace and
/// nothing else, read-only.
fn own_proc() -> io::Result<OwnedFd> {
    let made = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC).and_then(|context| {
        fsconfig_set_string(&context, "subset", "pid")?;
        fsconfig_create(&context)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
            | MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    });
    match made {
        // In a container that covers parts of its own /proc, Linux allows no other, and some
        // filters forbid the calls. A copy of that one, as it is, without anything above it.
        Err(Errno::PERM | Errno::NOSYS) => {
            let flags = OpenTreeFlags::OPEN_TREE_CLONE
                | OpenTreeFlags::OPEN_TREE_CLOEXEC
                | OpenTreeFlags::AT_RECURSIVE;
            Ok(open_tree(CWD, "/proc", flags)?)
        }
        made => Ok(made?),
    }
}

fn set_limits() -> io::Result<()> {
    let limits = [
        (Resource::As, ADDRESS_SPACE_MAX),
        (Resource::Nofile, FILES_MAX),
        // A core dump would hold memory of sandboxes.
        (Resource::Core, 0),
        (Resource::Memlock, 0),
    ];
    for (resource, wanted) in limits {
        let allowed = getrlimit(resource).maximum.map_or(wanted, |maximum| maximum.min(wanted));
        setrlimit(resource, Rlimit { current: Some(allowed), maximum: Some(allowed) })?;
    }
    Ok(())
}

/// Takes the id, keeping capabilities until [`drop_capabilities`].
fn take_id(id: u32) -> io::Result<()> {
    set_capabilities_secure_bits(
        CapabilitiesSecureBits::NO_ROOT
            | CapabilitiesSecureBits::NO_ROOT_LOCKED
            | CapabilitiesSecureBits::NO_SETUID_FIXUP
            | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
            | CapabilitiesSecureBits::KEEP_CAPS_LOCKED
            | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
            | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED,
    )?;
    match set_thread_groups(&[]) {
        // A user without a range in /etc/subuid cannot drop groups (user_namespaces(7)).
        Ok(()) | Err(Errno::PERM) => {}
        Err(errno) => return Err(errno.into()),
    }
    set_ids(id)
}

fn drop_capabilities() -> io::Result<()> {
    shrink_bounding_set(CapabilitySet::empty())?;
    clear_ambient_capability_set()?;
    let sets =
        CapabilitySets { effective: KEPT, permitted: KEPT, inheritable: CapabilitySet::empty() };
    Ok(set_capabilities(None, sets)?)
}
