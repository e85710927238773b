//! What sockets ask of the rest of the kernel, beside what pipes do. In unit tests there
//! is no guest and no boot, so there these do nothing.

use alloc::sync::{Arc, Weak};

use super::address::Endpoint;
use super::host_stream::HostStream;
use super::outside::Reach;
use super::socket::PeerCredentials;
use super::tcp::TcpSocket;
use crate::errno::{Errno, Result};
use crate::platform::host::HostFd;
use crate::state::OfBoot;
use crate::task::host_poll::{Handle, HostFile, Kind};
use crate::task::wait::WaitQueue;
use crate::task::{Capabilities, Credentials};

pub use crate::ipc::seam::*;

/// Process id, real user and real group of the running process: what it sends
/// (`SCM_CREDENTIALS`, unix(7)).
pub fn credentials() -> PeerCredentials {
    with_running(|pid, c| PeerCredentials { pid, uid: c.uid, gid: c.gid })
}

/// Process id, effective user and effective group of the running process: what its
/// peers see (`SO_PEERCRED`).
pub fn peer_credentials() -> PeerCredentials {
    with_running(|pid, c| PeerCredentials { pid, uid: c.euid, gid: c.egid })
}

/// `EPERM` unless the running process may claim to be this one (`scm_check_creds`,
/// net/core/scm.c).
pub fn check_claim(claimed: &PeerCredentials) -> Result<()> {
    with_running(|pid, c| {
        let may = (claimed.pid == pid || c.can(Capabilities::SYS_ADMIN))
            && (c.users().contains(&claimed.uid) || c.can(Capabilities::SETUID))
            && (c.groups_of_process().contains(&claimed.gid) || c.can(Capabilities::SETGID));
        if may { Ok(()) } else { Err(Errno::EPERM) }
    })
}

/// Of the process with the id 1 and the user 1000 in unit tests.
fn with_running<T>(see: impl FnOnce(u32, &Credentials) -> T) -> T {
    #[cfg(test)]
    return see(1, &Credentials::of_user(1000, 1000));
    #[cfg(not(test))]
    {
        let process = crate::task::current_process();
        let credentials = process.credentials.lock();
        see(process.pid, &credentials)
    }
}

/// Tells the host that the guest has closed a connection.
pub fn connection_closed(_id: u64) {
    #[cfg(not(test))]
    crate::host::control::connection_closed(_id);
}

/// What the host connects to for the sandbox.
pub fn reach() -> Reach {
    #[cfg(test)]
    return Reach::default();
    #[cfg(not(test))]
    Reach::from_flags(crate::state::kernel().config.get().flags)
}

/// What differs in every copy of an image.
pub fn boot_id() -> [u8; 16] {
    #[cfg(test)]
    return [1; 16];
    #[cfg(not(test))]
    crate::state::kernel().fs.boot_id()
}

/// A file over a descriptor of this boot, included in every look at the host.
pub fn host_file(fd: HostFd, kind: Kind, queue: Arc<WaitQueue>) -> Arc<HostFile> {
    let file = HostFile::new(Handle::OfBoot(OfBoot::new(fd)), kind, queue);
    #[cfg(not(test))]
    crate::state::kernel().host_poll.register(&file);
    file
}

/// A stream over a descriptor of this boot.
pub fn host_stream(fd: HostFd, kind: Kind, queue: Arc<WaitQueue>) -> Arc<HostStream> {
    Arc::new(HostStream::over(host_file(fd, kind, queue)))
}

/// Asks the host for a stream to `to`; `socket` hears of the answer. Returns the
/// number of the request.
pub fn ask_for_stream(to: Endpoint, socket: Weak<TcpSocket>) -> u64 {
    #[cfg(test)]
    return (to, socket).0.port.into();
    #[cfg(not(test))]
    {
        use thaw_abi::control::MSG_OPEN_SOCKET;
        let body = crate::net::outside::stream_to(to);
        let sequence = crate::host::broker::ask(MSG_OPEN_SOCKET, bytemuck::bytes_of(&body));
        crate::state::kernel().net.outside.wait(sequence, socket, body);
        sequence
    }
}

/// Copies of what is frozen make the connection of `socket` again.
pub fn may_sleep(socket: &Weak<TcpSocket>) {
    #[cfg(test)]
    let _ = socket;
    #[cfg(not(test))]
    crate::state::kernel().net.outside.may_sleep(socket);
}

/// Has the host make a socket that sends datagrams to `to`.
pub fn open_datagrams(to: Endpoint) -> Result<HostFd> {
    #[cfg(test)]
    return Err((to, Errno::EACCES).1);
    #[cfg(not(test))]
    {
        use thaw_abi::control::MSG_OPEN_SOCKET;
        let body = crate::net::outside::datagrams_to(to);
        let mut reply = alloc::vec::Vec::new();
        let body = bytemuck::bytes_of(&body);
        crate::host::broker::request(MSG_OPEN_SOCKET, body, &[], &mut reply)?.ok_or(Errno::EMFILE)
    }
}
