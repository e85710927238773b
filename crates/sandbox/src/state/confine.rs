//! Everything that the state helper gives up before it looks at its first request.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};
use rustix::process::{Resource, Signal, set_parent_process_death_signal, setsid};
use rustix::thread::{CapabilitySet, set_name};

use super::filter::{self, List};
use super::protocol::Task;
use crate::confine::{
    During, Failure, copy_tree, drop_capabilities, enter_empty_root, hold_capabilities, set_limits,
    set_oom_score, take_id,
};
use crate::rewind;

/// What the helper keeps: to look into a process of another id, and to open its files in
/// `/proc`, which belong to that id and nobody else may read.
const KEPT: CapabilitySet = CapabilitySet::SYS_PTRACE.union(CapabilitySet::DAC_READ_SEARCH);

/// What a rewinder keeps besides: to write the memory of sandboxes, and to end one that cannot
/// be put back.
const KEPT_TO_REWIND: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::KILL);

/// Most bytes of its address space. A report of 64 MiB and the page runs of a sandbox of
/// many GiB take a part of it.
const ADDRESS_SPACE_MAX: u64 = 2 << 30;
/// Most open files: three for each address space of a sandbox, and the blobs of its rootfs.
const FILES_MAX: u64 = 8192;

/// Gives up everything but what is needed to look at the sandboxes of this pid namespace,
/// as user and group `id`. Returns `/proc`.
pub(super) fn confine(id: u32, task: Task) -> Result<OwnedFd, Failure> {
    let (name, kept) = match task {
        Task::Read => (c"thaw-state", KEPT),
        Task::Rewind => (c"thaw-rewind", KEPT.union(KEPT_TO_REWIND)),
    };
    setsid().during("start a session")?;
    set_name(name).during("take a name")?;
    set_oom_score().during("set the out-of-memory score")?;
    let proc = own_proc(task).during("make a /proc of the sandboxes")?;
    enter_empty_root().during("enter an empty root directory")?;
    let limits = [
        (Resource::As, ADDRESS_SPACE_MAX),
        (Resource::Nofile, FILES_MAX),
        // A core dump would hold memory of sandboxes.
        (Resource::Core, 0),
        (Resource::Memlock, 0),
    ];
    set_limits(&limits).during("set resource limits")?;
    take_id(id).during("take user ids")?;
    drop_capabilities(kept).during("drop capabilities")?;
    // Forbids new privileges, too.
    match task {
        Task::Read => filter::install(List::Helper),
        Task::Rewind => rewind::install_filter(),
    }
    .during("install its filter")?;
    Ok(proc)
}

/// Makes a fork of the helper a worker, which has no rights and ends with it.
pub(super) fn become_worker() -> io::Result<()> {
    hold_capabilities(CapabilitySet::empty())?;
    set_parent_process_death_signal(Some(Signal::KILL))?;
    filter::install(List::Worker)
}

/// A `/proc` without a mount point that shows the processes of this pid namespace and
/// nothing else. Who only reads gets it read-only.
fn own_proc(task: Task) -> io::Result<OwnedFd> {
    let read_only = match task {
        Task::Read => MountAttrFlags::MOUNT_ATTR_RDONLY,
        Task::Rewind => MountAttrFlags::empty(),
    };
    let made = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC).and_then(|context| {
        fsconfig_set_string(&context, "subset", "pid")?;
        fsconfig_create(&context)?;
        let attributes = read_only
            | MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    });
    match made {
        // In a container that covers parts of its own /proc, Linux allows no other, and some
        // filters forbid the calls. A copy of that one, as it is, without anything above it.
        Err(Errno::PERM | Errno::NOSYS) => Ok(copy_tree("/proc")?),
        made => Ok(made?),
    }
}
