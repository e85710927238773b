//! Everything that the resolver process gives up before it forks its first worker.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::process::{
    DumpableBehavior, Pid, Resource, Signal, getegid, geteuid, getppid, set_dumpable_behavior,
    set_parent_process_death_signal, setsid,
};
use rustix::thread::{
    CapabilitySet, LinkNameSpaceType, UnshareFlags, move_into_link_name_space, set_name,
    unshare_unsafe,
};

use super::files::Files;
use super::filter::{Filter, List};
use super::launch::Namespaces;
use crate::confine::{
    During, Failure, drop_capabilities, drop_groups_if_allowed, set_limits, set_oom_score, take_id,
};
use crate::zygote::set_ids;

/// Most bytes of its address space: libraries, and a few megabytes.
const ADDRESS_SPACE_MAX: u64 = 1 << 30;
/// Most open files: one for each worker, and a few.
const FILES_MAX: u64 = 512;
/// Processor time of a worker, in seconds. One look-up takes some microseconds of it.
const WORKER_CPU_MAX: u64 = 10;

/// Gives up everything but the network, as user and group `id` of the user namespace.
/// Returns the filter of its workers.
pub fn confine(id: u32, namespaces: Namespaces, joined: OwnedFd) -> Result<Filter, Failure> {
    setsid().during("start a session")?;
    set_name(c"thaw-resolver").during("take a name")?;
    set_oom_score().during("set the out-of-memory score")?;
    let files = Files::read()?;
    files.load_modules();
    make_namespaces(namespaces).during("make its namespaces")?;
    let service = files.enter_root()?;
    drop(files);
    if namespaces == Namespaces::Joined {
        join_as_root(&joined).during("join the sandboxes' user namespace")?;
    }
    drop(joined);
    let limits = [
        (Resource::As, ADDRESS_SPACE_MAX),
        (Resource::Nofile, FILES_MAX),
        (Resource::Fsize, 0),
        (Resource::Core, 0),
        (Resource::Memlock, 0),
    ];
    set_limits(&limits).during("set resource limits")?;
    match take_id(id) {
        // A container may have so few ids that this is none of them. The root directory and
        // the filter keep it apart then.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
        result => result.during("take user ids")?,
    }
    drop_capabilities(CapabilitySet::empty()).during("drop capabilities")?;
    // Workers have the same user: none can look at another.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).during("forbid to be looked at")?;
    let of_workers = Filter::new(List::Worker, service).during("make the filter of workers")?;
    // Forbids new privileges, too.
    Filter::new(List::Resolver, service)
        .and_then(|filter| filter.install())
        .during("install its filter")?;
    Ok(of_workers)
}

/// Makes a fork of the resolver process a worker, which ends with it.
pub fn become_worker(resolver: Pid, filter: &Filter) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid() != Some(resolver) {
        return Err(Errno::PIPE.into());
    }
    set_limits(&[(Resource::Cpu, WORKER_CPU_MAX)])?;
    filter.install()
}

/// Becomes root of a user namespace, and nobody outside.
fn join_as_root(namespace: &OwnedFd) -> io::Result<()> {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::User))?;
    drop_groups_if_allowed()?;
    set_ids(0)
}

/// All namespaces but that of the network are the process's own.
fn make_namespaces(namespaces: Namespaces) -> io::Result<()> {
    let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
    let mut own =
        UnshareFlags::NEWNS | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS | UnshareFlags::NEWCGROUP;
    own.set(UnshareFlags::NEWUSER, namespaces == Namespaces::New);
    // SAFETY: there is one thread, and no descriptors are unshared.
    unsafe { unshare_unsafe(own) }?;
    if namespaces == Namespaces::New {
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/gid_map", format!("0 {gid} 1"))?;
        fs::write("/proc/self/uid_map", format!("0 {uid} 1"))?;
    }
    Ok(())
}
