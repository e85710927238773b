//! Making sockets for a sandbox.

use bytemuck::bytes_of;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use thaw_abi::control::{OpenedSocket, SOCKET_RECONNECTS};
use thaw_abi::network::{RESOLVER_ADDRESS, RESOLVER_PORT};

use super::budget::{Share, sockets_present};
use super::denials::Denials;
use super::dns::{self, lookup};
use super::ledger::Ledger;
use super::local;
use super::names::Names;
use super::policy::{AfterThaw, EgressPolicy, Permit, Verdict};
use super::rule::Transport;
use crate::message;

/// How long a sandbox may leave an answer unread that came late.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(5);

/// The sockets of one sandbox.
#[derive(Debug)]
pub(crate) struct Sockets {
    names: Arc<Names>,
    share: Arc<Share>,
    /// The control socket, for answers that come late.
    control: OwnedFd,
}

/// Sockets that a sandbox has from an earlier daemon.
#[derive(Debug)]
pub(crate) struct LeftSockets {
    ledger: Ledger,
    inodes: Vec<u64>,
}

impl LeftSockets {
    /// Reads the file of [`Sockets::for_successor`].
    pub fn read(file: OwnedFd) -> io::Result<Self> {
        let (ledger, inodes) = Ledger::open(file)?;
        Ok(Self { ledger, inodes })
    }

    /// Forgets those of all that have been closed. Takes as long as the host needs to write
    /// down all sockets that there are.
    pub fn forget_closed<'a>(all: impl IntoIterator<Item = &'a mut Self>) {
        let mut all = all.into_iter().filter(|left| !left.inodes.is_empty()).peekable();
        if all.peek().is_none() {
            return;
        }
        // Without an answer they stay, as those of a live daemon do.
        let Some(present) = sockets_present() else { return };
        all.for_each(|left| left.inodes.retain(|inode| present.contains(inode)));
    }
}

/// A socket whose connection is made or in progress.
#[derive(Debug)]
pub(crate) struct Opened {
    pub socket: OwnedFd,
    after_thaw: AfterThaw,
}

impl Opened {
    /// What the sandbox is told about it.
    pub fn tail(&self) -> OpenedSocket {
        let flags = match self.after_thaw {
            AfterThaw::Reset => 0,
            AfterThaw::Reconnect => SOCKET_RECONNECTS,
        };
        OpenedSocket { flags, reserved: 0 }
    }
}

/// What became of a request for a socket.
#[derive(Debug)]
pub(crate) enum Opening {
    /// Here it is.
    Opened(Opened),
    /// Names are looked up first; the answer goes straight to the sandbox.
    Later,
}

/// A destination that a sandbox has asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Destination {
    pub address: SocketAddr,
    pub transport: Transport,
}

impl Sockets {
    /// For a sandbox with this policy and this (host's end of the) control socket.
    pub fn new(policy: Arc<EgressPolicy>, control: OwnedFd) -> Self {
        let share = Arc::new(Share::new(policy.budget.clone()));
        Self { names: Names::new(policy), share, control }
    }

    /// What was denied since the last call.
    pub fn take_denials(&self) -> Denials {
        self.names.take_denials()
    }

    /// Has the sockets written down for the next daemon; a descriptor of the file.
    pub fn for_successor(&self) -> io::Result<OwnedFd> {
        self.share.for_successor()
    }

    /// Counts the sockets that an earlier daemon has made for the sandbox.
    pub fn take_over(&self, left: LeftSockets) {
        self.share.take_over(left.ledger, &left.inodes);
    }

    /// Makes the socket that request `sequence` asks for. Never blocks.
    pub fn open(&mut self, to: Destination, sequence: u64) -> Result<Opening, Errno> {
        self.share.ask(Instant::now())?;
        let resolver = SocketAddr::from((RESOLVER_ADDRESS, RESOLVER_PORT));
        if SocketAddr::new(to.address.ip().to_canonical(), to.address.port()) == resolver {
            return self.open_resolver(to.transport).map(Opening::Opened);
        }
        let names = match self.names.judge(to.address, to.transport) {
            Verdict::Allowed(permit) => return self.open_permitted(permit, to, sequence),
            Verdict::Denied => return Err(self.names.deny(to.address, to.transport)),
            Verdict::IfNamed(names) => names,
        };
        // A thawed copy knows addresses that its host has not told it in this
        // life: they are allowed if they are still those of an allowed name.
        let slot = self.names.lookup_slot().ok_or(Errno::AGAIN)?;
        let control = rustix::io::dup(&self.control)?;
        let (known, share) = (self.names.clone(), self.share.clone());
        let job = move || {
            for name in names {
                known.look_up(&name);
            }
            drop(slot);
            let outcome = match known.judge(to.address, to.transport) {
                Verdict::Allowed(permit) => {
                    share.wait_for_room();
                    open_permitted(&known, &share, &permit, to)
                }
                _ => Err(known.deny(to.address, to.transport)),
            };
            answer_late(&control, sequence, outcome);
        };
        lookup::submit(self.names.function(), job).map_err(|_| Errno::AGAIN)?;
        Ok(Opening::Later)
    }

    /// Makes a socket. Where there may be no more the host is asked first which others are
    /// closed, and where there are many it is asked meanwhile.
    fn open_permitted(
        &self,
        permit: Permit,
        to: Destination,
        sequence: u64,
    ) -> Result<Opening, Errno> {
        if self.share.has_room().is_err() {
            let control = rustix::io::dup(&self.control)?;
            let (names, share) = (self.names.clone(), self.share.clone());
            let job = move || {
                share.wait_for_room();
                answer_late(&control, sequence, open_permitted(&names, &share, &permit, to));
            };
            lookup::submit(self.names.function(), job).map_err(|_| Errno::AGAIN)?;
            return Ok(Opening::Later);
        }
        let opened = open_permitted(&self.names, &self.share, &permit, to)?;
        if self.share.is_in_doubt(Instant::now()) {
            let (asking, failed) = (self.share.budget(), self.share.budget());
            let job = move || asking.forget_closed();
            if lookup::submit(self.names.function(), job).is_err() {
                failed.cannot_ask();
            }
        }
        Ok(Opening::Opened(opened))
    }

    fn open_resolver(&self, transport: Transport) -> Result<Opened, Errno> {
        let framing = match transport {
            Transport::Tcp => dns::Framing::Stream,
            Transport::Udp => dns::Framing::Packets,
        };
        let slot = self.names.channel_slot().ok_or(Errno::AGAIN)?;
        let socket = dns::open(framing, &self.names, slot)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        Ok(Opened { socket, after_thaw: AfterThaw::Reset })
    }
}

/// Connects to the address that was judged, and to no other, if it is not one of
/// this host that the sandbox may not reach.
fn open_permitted(
    names: &Names,
    share: &Share,
    permit: &Permit,
    to: Destination,
) -> Result<Opened, Errno> {
    if !local::is_permitted(permit, to.transport) {
        return Err(names.deny(to.address, to.transport));
    }
    share.has_room()?;
    let socket = connect(permit.address, to.transport)?;
    share.note_open(&socket)?;
    Ok(Opened { socket, after_thaw: permit.after_thaw })
}

/// Makes a socket and begins to connect it. Never blocks.
pub(super) fn connect(to: SocketAddr, transport: Transport) -> Result<OwnedFd, Errno> {
    let family = match to {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let kind = match transport {
        Transport::Tcp => SocketType::STREAM,
        Transport::Udp => SocketType::DGRAM,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, kind, flags, None)?;
    if transport == Transport::Tcp {
        // The sandbox cannot set options. Its kernel gathers small writes where
        // that is wanted, and a dead peer must not hold an instance for ever.
        sockopt::set_tcp_nodelay(&socket, true)?;
        sockopt::set_socket_keepalive(&socket, true)?;
    }
    match rustix::net::connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno),
    }
}

/// Sends an answer from a thread that may wait.
fn answer_late(control: &OwnedFd, sequence: u64, outcome: Result<Opened, Errno>) {
    let (reply, socket) = match outcome {
        Ok(opened) => (message::reply(sequence, 0, bytes_of(&opened.tail())), Some(opened.socket)),
        Err(errno) => (message::reply(sequence, errno.raw_os_error(), &[]), None),
    };
    let deadline = Instant::now() + UNREAD_TIMEOUT;
    loop {
        let descriptors: Vec<_> = socket.iter().map(AsFd::as_fd).collect();
        match message::send(control, &[IoSlice::new(&reply)], &descriptors) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            // Sent, or nobody is left to read it.
            _ => return,
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        if matches!(poll(&mut [PollFd::new(control, PollFlags::OUT)], Some(&left)), Ok(0)) {
            // It does not read what it has asked for: end it as a violator would be.
            let _ = rustix::net::shutdown(control, rustix::net::Shutdown::Both);
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    use super::super::local::{GuardedPort, PortGuard};

    use rustix::net::{RecvFlags, SendFlags, recv, send};
    use thaw_abi::network::HOST_ADDRESS;

    /// The sockets of a sandbox with these rules, and its end of the control socket.
    fn sockets(rules: &[String]) -> (Sockets, OwnedFd) {
        let rules = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        let (host, sandbox) = message::control_pair().unwrap();
        (Sockets::new(Arc::new(EgressPolicy::new(rules)), host), sandbox)
    }

    fn tcp(ip: [u8; 4], port: u16) -> Destination {
        Destination { address: (Ipv4Addr::from(ip), port).into(), transport: Transport::Tcp }
    }

    fn opened(outcome: Result<Opening, Errno>) -> OwnedFd {
        match outcome.unwrap() {
            Opening::Opened(opened) => opened.socket,
            Opening::Later => panic!("no name is in question"),
        }
    }

    #[test]
    fn the_hosts_loopback_is_connected_where_it_is_allowed() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (mut sockets, _sandbox) = sockets(&[format!("host.thaw.internal:{port}")]);
        let socket = opened(sockets.open(tcp(HOST_ADDRESS, port), 1));
        let (mut accepted, _) = listener.accept().unwrap();
        accepted.write_all(b"hello").unwrap();
        rustix::io::ioctl_fionbio(&socket, false).unwrap();
        let mut ours = TcpStream::from(socket);
        let mut bytes = [0; 5];
        ours.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"hello");
        for to in [tcp([127, 0, 0, 1], port), tcp([0, 0, 0, 0], port), tcp(HOST_ADDRESS, 1)] {
            assert_eq!(sockets.open(to, 2).unwrap_err(), Errno::ACCESS);
        }
    }

    #[test]
    fn ports_of_this_process_are_reached_where_they_are_written_out_or_never() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (mut wide, _sandbox) = sockets(&["host.thaw.internal:*".to_owned()]);
        let (mut written, _sandbox) = sockets(&[format!("host.thaw.internal:{port}")]);
        let to = tcp(HOST_ADDRESS, port);
        let gateway = GuardedPort::new(Transport::Tcp, port, PortGuard::IfWrittenOut);
        assert_eq!(wide.open(to, 1).unwrap_err(), Errno::ACCESS);
        assert_eq!(wide.take_denials().total, 1);
        assert!(written.open(to, 1).is_ok());
        let admin = GuardedPort::new(Transport::Tcp, port, PortGuard::Never);
        assert_eq!(written.open(to, 2).unwrap_err(), Errno::ACCESS);
        drop((gateway, admin));
        assert!(wide.open(to, 2).is_ok());
    }

    #[test]
    fn who_asks_too_fast_is_slowed_down() {
        let (mut sockets, _sandbox) = sockets(&["192.0.2.1:1".to_owned()]);
        let refused = |_| sockets.open(tcp([192, 0, 2, 2], 1), 1).unwrap_err();
        let outcomes: Vec<Errno> = (0..5000).map(refused).collect();
        assert_eq!(outcomes[0], Errno::ACCESS);
        assert!(outcomes.contains(&Errno::AGAIN));
    }

    /// The name of the rule is one that getaddrinfo(3) takes for an address, so
    /// that no server is asked: another one than the sandbox wants.
    #[test]
    fn an_answer_that_waits_for_a_name_comes_by_itself() {
        let (mut sockets, sandbox) = sockets(&["1.0x7f:443".to_owned()]);
        // The name has been looked up by the time, whatever came of it.
        assert!(matches!(sockets.open(tcp([192, 0, 2, 1], 443), 77), Ok(Opening::Later)));
        let mut buffer = [0; 64];
        let packet = message::receive(&sandbox, &mut buffer, None).unwrap();
        assert_eq!(&buffer[..packet.len], &message::reply(77, libc::EACCES, &[])[..]);
        assert_eq!(sockets.open(tcp([192, 0, 2, 1], 443), 78).unwrap_err(), Errno::ACCESS);
    }

    #[test]
    fn the_resolver_answers_over_a_socket_that_keeps_bounds() {
        let (mut sockets, _sandbox) = sockets(&["host.thaw.internal:1".to_owned()]);
        let address = (Ipv4Addr::from(RESOLVER_ADDRESS), RESOLVER_PORT).into();
        let to = Destination { address, transport: Transport::Udp };
        let socket = opened(sockets.open(to, 1));
        rustix::io::ioctl_fionbio(&socket, false).unwrap();
        let mut question = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0".to_vec();
        question.extend(b"\x04host\x04thaw\x08internal\0\0\x01\0\x01");
        send(&socket, &question, SendFlags::empty()).unwrap();
        let mut answer = [0; 512];
        let (len, _) = recv(&socket, &mut answer, RecvFlags::empty()).unwrap();
        assert_eq!(answer[len - 4..len], HOST_ADDRESS);
        // Each sandbox has so many of them, and no more.
        let outcomes: Vec<_> = (0..100).map(|_| sockets.open(to, 2)).collect();
        assert!(outcomes.iter().any(|outcome| matches!(outcome, Err(Errno::AGAIN))));
        drop(socket);
    }
}
