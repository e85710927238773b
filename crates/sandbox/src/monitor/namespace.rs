//! The user namespace of a daemon's sandboxes, made by somebody with more rights.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::process::{
    Gid, Signal, Uid, WaitId, WaitIdOptions, pidfd_send_signal, set_parent_process_death_signal,
    waitid,
};
use rustix::thread::{
    CapabilitySet, UnshareFlags, set_keep_capabilities, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

use super::DaemonIds;
use crate::confine::hold_capabilities;
use crate::sys::{self, Forked};

/// A user namespace whose owner is the daemon's user id, which is not in it: the daemon
/// has every right inside, and nobody inside is the daemon.
#[derive(Debug)]
pub struct UserNamespace(OwnedFd);

impl UserNamespace {
    /// Makes one with `count` ids, which are those of the host from `first` on.
    ///
    /// To be called in a process with one thread.
    ///
    /// # Errors
    /// The caller is not root, or the host forbids user namespaces.
    pub fn make(owner: DaemonIds, first: u32, count: u32) -> io::Result<Self> {
        let (told, tell) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        // SAFETY: the caller promises that there is one thread; nothing is shared.
        match unsafe { sys::fork_with(0) }? {
            Forked::Child => {
                drop(told);
                let errno =
                    enter(owner).err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
                let _ = rustix::io::write(&tell, &errno.to_le_bytes());
                // Lives until the other side has what it needs, and kills it.
                loop {
                    // SAFETY: takes no arguments.
                    unsafe { libc::pause() };
                }
            }
            Forked::Parent { pid, pidfd } => {
                drop(tell);
                let made = wait_and_map(&told, pid, first, count);
                pidfd_send_signal(&pidfd, Signal::KILL)?;
                waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED)?;
                made.map(Self)
            }
        }
    }
}

impl From<OwnedFd> for UserNamespace {
    /// The one that the program before this one has made in this process.
    fn from(namespace: OwnedFd) -> Self {
        Self(namespace)
    }
}

impl AsFd for UserNamespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Becomes the owner and makes the namespace. Some hosts allow that to the privileged
/// only, so the capability for it is kept until then.
fn enter(owner: DaemonIds) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
    set_thread_groups(&[])?;
    set_thread_res_gid(gid, gid, gid)?;
    set_keep_capabilities(true)?;
    set_thread_res_uid(uid, uid, uid)?;
    hold_capabilities(CapabilitySet::SYS_ADMIN)?;
    // After the change of users, which clears it.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // SAFETY: there is one thread, and no descriptors are shared or unshared.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) }?;
    Ok(())
}

fn wait_and_map(told: &OwnedFd, pid: i32, first: u32, count: u32) -> io::Result<OwnedFd> {
    let mut errno = [0; 4];
    if rustix::io::read(told, &mut errno)? != errno.len() {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
    }
    match i32::from_le_bytes(errno) {
        0 => {}
        errno => return Err(io::Error::from_raw_os_error(errno)),
    }
    let map = format!("0 {first} {count}");
    fs::write(format!("/proc/{pid}/gid_map"), &map)?;
    fs::write(format!("/proc/{pid}/uid_map"), &map)?;
    Ok(File::open(format!("/proc/{pid}/ns/user"))?.into())
}
