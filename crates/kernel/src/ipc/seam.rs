//! What pipes and sockets ask of the rest of the kernel. In unit tests there is
//! no guest and no boot, so there these do nothing.

use alloc::sync::{Arc, Weak};

use crate::errno::{Errno, Result};
use crate::fs::fd_table::{NewDescriptor, OnExec};
use crate::fs::file::{OpenFile, OpenFlags};
use crate::net::address::Endpoint;
use crate::net::host_poll::{Handle, HostFile, Kind};
use crate::net::host_stream::HostStream;
use crate::net::outside::Reach;
use crate::net::socket::PeerCredentials;
use crate::net::tcp::TcpSocket;
use crate::platform::host::HostFd;
use crate::platform::user::UserAddress;
use crate::task::process::RLIMIT_NOFILE;
use crate::task::wait::WaitQueue;
use crate::task::{Capabilities, Credentials, current_process};

pub use crate::mm::pages::{PageBox, alloc_page};

/// The open file behind a descriptor of the running process; `EBADF`.
pub fn file(fd: i32) -> Result<Arc<OpenFile>> {
    current_process().files.lock().get(fd)
}

/// Number of descriptors that the running process' table has room for. A
/// program that a shell starts finds room for 256 on Linux.
pub fn descriptor_capacity() -> usize {
    current_process().files.lock().capacity().max(256)
}

/// Gives a file the lowest free descriptor; `EMFILE`. Only `O_CLOEXEC` of
/// `flags` is looked at.
pub fn install(file: Arc<OpenFile>, flags: OpenFlags) -> Result<i32> {
    let process = current_process();
    let limit = process.limits.lock()[RLIMIT_NOFILE].current;
    process.files.lock().insert(file, on_exec(flags), limit)
}

/// What `O_CLOEXEC` says.
pub fn on_exec(flags: OpenFlags) -> OnExec {
    if flags.contains(OpenFlags::CLOEXEC) { OnExec::Close } else { OnExec::Keep }
}

/// Gives two files descriptors and writes the numbers to `at` (pipe(2), socketpair(2)).
pub fn install_pair(at: UserAddress, files: [Arc<OpenFile>; 2], flags: OpenFlags) -> Result<u64> {
    let descriptors = [NewDescriptor::reserve()?, NewDescriptor::reserve()?];
    at.write(&descriptors.each_ref().map(NewDescriptor::number))?;
    for (descriptor, file) in descriptors.into_iter().zip(files) {
        descriptor.install(file, on_exec(flags));
    }
    Ok(0)
}

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
        let process = current_process();
        let credentials = process.credentials.lock();
        see(process.pid, &credentials)
    }
}

/// Whether a signal waits for the running thread.
pub fn signal_is_pending() -> bool {
    #[cfg(test)]
    return false;
    #[cfg(not(test))]
    crate::task::signal::is_pending(crate::task::thread::current())
}

/// Sends `SIGPIPE` to the running thread.
pub fn send_sigpipe() {
    #[cfg(not(test))]
    crate::task::signal::send_sigpipe();
}

/// Ends the time of a temporary signal mask of the running thread.
pub fn restore_mask() {
    #[cfg(not(test))]
    crate::task::signal::restore_mask();
}

/// Replaces the running thread's signal mask until the call returns to the guest.
pub fn set_temporary_mask(_mask: u64) {
    #[cfg(not(test))]
    crate::task::signal::set_temporary_mask(_mask);
}

/// Number of this boot.
pub fn boot_generation() -> u64 {
    #[cfg(test)]
    return 0;
    #[cfg(not(test))]
    crate::boot::generation()
}

/// Tells the host that the guest has closed a connection.
pub fn connection_closed(_id: u64) {
    #[cfg(not(test))]
    crate::boot::control::connection_closed(_id);
}

/// What the host connects to for the sandbox.
pub fn reach() -> Reach {
    #[cfg(test)]
    return Reach::default();
    #[cfg(not(test))]
    Reach::from_flags(crate::state::kernel().config.get().flags)
}

/// Nanoseconds since the epoch.
pub fn realtime_ns() -> u64 {
    #[cfg(test)]
    return 1;
    #[cfg(not(test))]
    crate::time::clock::realtime_ns()
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
    let file = HostFile::new(Handle::OfBoot { fd, generation: boot_generation() }, kind, queue);
    #[cfg(not(test))]
    crate::state::kernel().net.host_poll.register(&file);
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
        let sequence = crate::boot::broker::ask(MSG_OPEN_SOCKET, bytemuck::bytes_of(&body));
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
        crate::boot::broker::request(MSG_OPEN_SOCKET, body, &[], &mut reply)?.ok_or(Errno::EMFILE)
    }
}

/// Notes that the first response byte has been sent.
pub fn first_byte() {
    #[cfg(not(test))]
    crate::boot::phases::first_byte();
}
