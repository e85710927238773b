//! Sockets as files, and what every protocol offers.

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use bitflags::bitflags;

use super::address::{AF_UNIX, SocketAddress};
use super::arrival::Arrival;
use super::departure::Departure;
use super::groups::Groups;
use super::in_flight::InFlight;
use super::options::Options;
use super::sockets::Listed;
use crate::errno::{Errno, Result};
use crate::fs::anonymous::socket_stat;
use crate::fs::file::{Events, File, Stat};
use crate::fs::pipe::FIONREAD;
use crate::io::{Sink, Source};
use crate::ipc::mqueue::notification::CookieSocket;
use crate::platform::saved::Saved;
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::ids::Pid;
use crate::task::signal;
use crate::task::wait::WaitQueue;
use crate::task::{Capabilities, current_process};

/// Readable, as sockets report it.
pub const IN: Events = Events::IN.union(Events::RDNORM);
/// Writable, as Internet sockets report it.
pub const OUT: Events = Events::OUT.union(Events::WRNORM);

/// Type of a socket (socket(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SocketType {
    /// `SOCK_STREAM`.
    Stream = 1,
    /// `SOCK_DGRAM`.
    Datagram = 2,
    /// `SOCK_RAW`.
    Raw = 3,
    /// `SOCK_SEQPACKET`.
    SequencedPacket = 5,
}

bitflags! {
    /// `MSG_*` (send(2), recv(2)).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct MessageFlags: u32 {
        /// Urgent data.
        const OOB = 0x1;
        /// Leave the data in the queue.
        const PEEK = 0x2;
        /// Control data was cut.
        const CTRUNC = 0x8;
        /// The datagram was cut; on input, report its whole length.
        const TRUNC = 0x20;
        /// Do not wait.
        const DONTWAIT = 0x40;
        /// End of a record.
        const EOR = 0x80;
        /// Wait until the buffer is full.
        const WAITALL = 0x100;
        /// Receive from the error queue.
        const ERRQUEUE = 0x2000;
        /// No `SIGPIPE`.
        const NOSIGNAL = 0x4000;
        /// More will follow.
        const MORE = 0x8000;
        /// recvmmsg(2): wait for the first message only.
        const WAITFORONE = 0x10000;
        /// Connect first.
        const FASTOPEN = 0x2000_0000;
        /// Received descriptors are closed on execve.
        const CMSG_CLOEXEC = 0x4000_0000;
        const _ = !0;
    }
}

/// Which halves shutdown(2) closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShutdownHow {
    /// `SHUT_RD`.
    Read,
    /// `SHUT_WR`.
    Write,
    /// `SHUT_RDWR`.
    Both,
}

impl ShutdownHow {
    /// From the argument of shutdown(2).
    pub fn from_raw(how: i32) -> Result<Self> {
        match how {
            0 => Ok(Self::Read),
            1 => Ok(Self::Write),
            2 => Ok(Self::Both),
            _ => Err(Errno::EINVAL),
        }
    }
    /// Whether the reading half is closed.
    pub fn reads(self) -> bool {
        self != Self::Write
    }
    /// Whether the writing half is closed.
    pub fn writes(self) -> bool {
        self != Self::Read
    }
}

/// Whether a connect may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocking {
    /// It may.
    Yes,
    /// `O_NONBLOCK`.
    No,
}

/// `struct ucred` (unix(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct PeerCredentials {
    /// Process.
    pub pid: u32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

impl PeerCredentials {
    /// What Linux reports when the sender is not known: no process, and the
    /// overflow user and group.
    pub const UNKNOWN: Self = Self { pid: 0, uid: 65534, gid: 65534 };

    /// Process id, real user and real group of the running process: what it sends
    /// (`SCM_CREDENTIALS`, unix(7)).
    pub fn of_sender() -> Self {
        let process = current_process();
        let c = process.credentials.borrow_mut();
        Self { pid: process.pid.number(), uid: c.uid, gid: c.gid }
    }

    /// Process id, effective user and effective group of the running process: what its
    /// peers see (`SO_PEERCRED`).
    pub fn of_peer() -> Self {
        let process = current_process();
        let c = process.credentials.borrow_mut();
        Self { pid: process.pid.number(), uid: c.euid, gid: c.egid }
    }

    /// As the running process sees it, with the ids of its namespaces.
    pub fn shown(self) -> Self {
        let process = current_process();
        let users = &process.credentials.borrow_mut().user_namespace;
        Self {
            pid: Pid::new(self.pid).for_caller(),
            uid: users.shown_user(self.uid),
            gid: users.shown_group(self.gid),
        }
    }

    /// What a program says it is, which has ids of its namespaces. `EINVAL`: they are none.
    /// `ESRCH`: there is no such process.
    /// `EPERM` unless the running process may claim to be that (`scm_check_creds`, net/core/scm.c).
    pub fn claimed(mut self) -> Result<Self> {
        let process = current_process();
        let c = process.credentials.borrow_mut();
        self.pid = Pid::from_caller(self.pid).number();
        self.uid = c.user_namespace.user(self.uid).ok_or(Errno::EINVAL)?;
        self.gid = c.user_namespace.group(self.gid).ok_or(Errno::EINVAL)?;
        let may = (self.pid == process.pid.number() || c.can(Capabilities::SYS_ADMIN))
            && (c.users().contains(&self.uid) || c.can_in_own(Capabilities::SETUID))
            && (c.groups_of_process().contains(&self.gid) || c.can_in_own(Capabilities::SETGID));
        match may {
            false => Err(Errno::EPERM),
            true if self.pid == 0 || !kernel().tasks.is_in_use(self.pid) => Err(Errno::ESRCH),
            true => Ok(self),
        }
    }
}

/// What travels beside the bytes of a message.
#[derive(Clone, Default)]
pub struct Ancillary {
    /// `SCM_RIGHTS`.
    pub files: InFlight,
    /// `SCM_CREDENTIALS`.
    pub credentials: Option<PeerCredentials>,
}

impl Ancillary {
    /// Whether nothing travels.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && self.credentials.is_none()
    }
}

/// A message on its way out, without its bytes.
#[derive(Default)]
pub struct Outgoing {
    /// Destination, if the call names one.
    pub to: Option<SocketAddress>,
    /// What travels beside the bytes; taken by the first piece that is sent.
    pub ancillary: Ancillary,
    /// How a datagram is sent.
    pub departure: Departure,
    /// Who sends, for `SO_PASSCRED`.
    pub sender: Option<PeerCredentials>,
    /// `MSG_*`.
    pub flags: MessageFlags,
}

/// A message that has come in, without its bytes.
#[derive(Default)]
pub struct Received {
    /// Bytes that were stored.
    pub bytes: usize,
    /// Bytes that the datagram had; as `bytes` for a stream.
    pub length: usize,
    /// Source, if the protocol reports one.
    pub from: Option<SocketAddress>,
    /// What travelled beside the bytes.
    pub ancillary: Ancillary,
    /// How a datagram came.
    pub arrival: Option<Arrival>,
    /// `MSG_TRUNC`.
    pub flags: MessageFlags,
}

impl Received {
    /// `bytes` of a stream.
    pub fn stream(bytes: usize) -> Self {
        Self { bytes, length: bytes, ..Self::default() }
    }
}

/// What all sockets have.
pub struct Common {
    /// `AF_*`.
    pub family: u16,
    /// Type.
    pub kind: SocketType,
    /// `IPPROTO_*`; 0 for Unix sockets.
    pub protocol: u32,
    /// Inode number.
    pub ino: u64,
    /// What setsockopt(2) has set.
    pub options: KernelCell<Options>,
    /// Multicast groups: UDP only.
    pub groups: KernelCell<Groups>,
    /// Where to wait for changes.
    pub queue: Arc<WaitQueue>,
    /// `SO_ERROR`: reported once, by whatever comes first.
    pub error: KernelCell<Option<Errno>>,
}

impl Common {
    /// A fresh socket's.
    pub fn new(family: u16, kind: SocketType, protocol: u32, ino: u64) -> Self {
        Self {
            family,
            kind,
            protocol,
            ino,
            options: KernelCell::default(),
            groups: KernelCell::default(),
            queue: Arc::new(WaitQueue::new()),
            error: KernelCell::new(None),
        }
    }

    /// The running process, if those who receive what it sends may ask who it is.
    pub fn sender(&self) -> Option<PeerCredentials> {
        (self.family == AF_UNIX).then(PeerCredentials::of_sender)
    }

    /// Takes the pending error.
    pub fn take_error(&self) -> Result<()> {
        match self.error.borrow_mut().take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// A protocol's side of a socket. No method waits: `EAGAIN` says that waiting
/// on [`Common::queue`] and calling again may help.
pub trait Protocol: Saved + Send + Sync {
    /// What all sockets have.
    fn common(&self) -> &Common;

    /// Where cookies of mq_notify(3) go: netlink sockets only.
    fn cookie_socket(self: Arc<Self>) -> Option<Arc<dyn CookieSocket>> {
        None
    }

    /// bind(2).
    fn bind(&self, address: &SocketAddress) -> Result<()>;

    /// listen(2).
    fn listen(&self, _backlog: i32) -> Result<()> {
        Err(Errno::EOPNOTSUPP)
    }

    /// Whether the socket listens (`SO_ACCEPTCONN`).
    fn is_listening(&self) -> bool {
        false
    }

    /// What tables of sockets say of it; `None` if it stands in none.
    fn listed(&self) -> Option<Listed> {
        None
    }

    /// The connections that wait to be accepted.
    fn waiting_connections(&self) -> Vec<Arc<dyn Protocol>> {
        Vec::new()
    }

    /// accept(2).
    fn accept(&self) -> Result<Arc<dyn Protocol>> {
        Err(Errno::EOPNOTSUPP)
    }

    /// connect(2). `EINPROGRESS`: see [`Protocol::finish_connect`].
    fn connect(&self, address: &SocketAddress, blocking: Blocking) -> Result<()>;

    /// How a connect that is in progress has ended; `EAGAIN` if it has not.
    fn finish_connect(&self) -> Result<()> {
        Err(Errno::EINVAL)
    }

    /// getsockname(2).
    fn local_address(&self) -> SocketAddress;

    /// getpeername(2).
    fn peer_address(&self) -> Result<SocketAddress>;

    /// Sends. `EPIPE` makes the caller raise `SIGPIPE`.
    fn send(&self, source: &mut Source<'_>, message: &mut Outgoing) -> Result<usize>;

    /// Receives.
    fn receive(&self, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received>;

    /// shutdown(2).
    fn shutdown(&self, how: ShutdownHow) -> Result<()>;

    /// What is possible without waiting.
    fn poll(&self) -> Events;

    /// Bytes that can be read (`FIONREAD`).
    fn readable_bytes(&self) -> Result<usize>;

    /// Whether the next byte to be read is urgent (`SIOCATMARK`).
    fn is_at_urgent(&self) -> Result<bool> {
        Err(Errno::ENOTTY)
    }

    /// Bytes sent and not yet read (`SIOCOUTQ`).
    fn unsent_bytes(&self) -> usize {
        0
    }

    /// Credentials of the process at the other end (`SO_PEERCRED`).
    fn peer_credentials(&self) -> Option<PeerCredentials> {
        None
    }

    /// Takes the pending error (`SO_ERROR`).
    fn take_error(&self) -> Option<Errno> {
        self.common().error.borrow_mut().take()
    }

    /// An option that the protocol may care about was set.
    fn options_changed(&self) {}

    /// Sends what has waited for more (`UDP_CORK` of udp(7)).
    fn uncork(&self) {}

    /// The last descriptor has been closed.
    fn close(&self);

    /// The connection will never be accepted.
    fn abort(&self) {
        self.close();
    }
}

/// A socket as an open file.
pub struct Socket {
    /// The protocol.
    pub protocol: Arc<dyn Protocol>,
}

impl Socket {
    /// A file over a protocol's socket.
    pub fn new(protocol: Arc<dyn Protocol>) -> Arc<Self> {
        Arc::new(Self { protocol })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.protocol.close();
    }
}

impl File for Socket {
    fn read(&self, sink: &mut Sink<'_>, _offset: u64) -> Result<usize> {
        // A read of nothing does nothing; a receive of nothing takes a datagram.
        if sink.remaining() == 0 {
            return Ok(0);
        }
        self.protocol.receive(sink, MessageFlags::empty()).map(|received| received.bytes)
    }

    fn write(&self, source: &mut Source<'_>, _offset: u64) -> Result<usize> {
        let sender = self.protocol.common().sender();
        let mut message = Outgoing { sender, ..Outgoing::default() };
        let outcome = self.protocol.send(source, &mut message);
        if outcome == Err(Errno::EPIPE) && self.protocol.common().kind != SocketType::Datagram {
            signal::send_sigpipe();
        }
        outcome
    }

    fn poll(&self) -> Events {
        self.protocol.poll()
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(&self.protocol.common().queue)
    }

    fn stat(&self) -> Result<Stat> {
        Ok(socket_stat(self.protocol.common().ino))
    }

    fn ioctl(&self, request: u32, argument: UserAddress) -> Result<u64> {
        /// `SIOCOUTQ`: bytes sent and not yet taken (tcp(7)).
        const SIOCOUTQ: u32 = 0x5411;
        /// `SIOCATMARK`: whether the next byte is urgent (tcp(7), sockatmark(3)).
        const SIOCATMARK: u32 = 0x8905;
        let value = match request {
            SIOCATMARK => self.protocol.is_at_urgent()?.into(),
            FIONREAD => self.protocol.readable_bytes()?,
            SIOCOUTQ => self.protocol.unsent_bytes(),
            _ => return super::interface_ioctls::ioctl(request, argument),
        };
        argument.write(&(value as i32)).map(|()| 0)
    }

    fn read_timeout_ns(&self) -> Option<u64> {
        self.protocol.common().options.borrow_mut().receive_timeout_ns
    }

    fn write_timeout_ns(&self) -> Option<u64> {
        self.protocol.common().options.borrow_mut().send_timeout_ns
    }

    fn description(&self) -> String {
        format!("socket:[{}]", self.protocol.common().ino)
    }
}
