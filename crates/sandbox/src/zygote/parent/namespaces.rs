//! The namespaces that all sandboxes share: user, pid, network, ipc, host name,
//! mounts and control groups.
#![allow(unsafe_code)]

use std::io;

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
