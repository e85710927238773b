//! Making sockets for a sandbox.

use bytemuck::bytes_of;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, sockopt};
use thaw_abi::control::{OpenedSocket, SOCKET_RECONNECTS};
use thaw_abi::network::{RESOLVER_ADDRESS, RESOLVER_PORT};

use super::budget::{Share, sockets_present};
use super::dns::{self, lookup};
use super::events::EgressEvents;
use super::intercept;
use super::ledger::{Ledger, Written};
use super::local;
use super::names::{Names, Slot};
use super::policy::{AfterThaw, EgressPolicy, Permit, Verdict};
use super::pool::{Bounds, Overloaded, Pool};
use super::rule::Transport;
use crate::message;

/// How long a sandbox may leave an answer unread that came late.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(5);

/// Makes sockets. That takes host calls which may wait for the host: a question for a route
/// takes a lock that whoever makes or removes a network namespace holds. They never wait for a
/// sandbox or for a server, so that few threads are enough for all functions.
static POOL: LazyLock<Pool> = LazyLock::new(|| {
    Pool::new(Bounds {
        name: "thaw-connect",
        threads: 16,
        of_function: 4,
        shared: 8,
        waiting: 16 * 1024,
        waiting_of_function: 2048,
    })
});

/// The sockets of one sandbox.
#[derive(Clone, Debug)]
pub(crate) struct Sockets {
    names: Arc<Names>,
    share: Arc<Share>,
    /// The control socket, for answers that come late.
    control: Arc<OwnedFd>,
}

/// Sockets that a sandbox has from an earlier daemon.
#[derive(Debug)]
pub(crate) struct LeftSockets {
    ledger: Ledger,
    written: Written,
}

impl LeftSockets {
    /// Reads the file of [`Sockets::for_successor`].
    pub fn read(file: OwnedFd) -> io::Result<Self> {
        let (ledger, written) = Ledger::open(file)?;
        Ok(Self { ledger, written })
    }

    /// Forgets those of all that have been closed. Takes as long as the host needs to write
    /// down all sockets that there are.
    pub fn forget_closed<'a>(all: impl IntoIterator<Item = &'a mut Self>) {
        let mut all = all.into_iter().filter(|left| !left.written.sockets.is_empty()).peekable();
        if all.peek().is_none() {
            return;
        }
        // Without an answer they stay, as those of a live daemon do.
        let Some(present) = sockets_present() else { return };
        all.for_each(|left| left.written.sockets.retain(|one| present.contains(&one.inode)));
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
    /// Another thread makes it; the answer goes straight to the sandbox.
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
        share.count_for(policy.traffic());
        Self { names: Names::new(policy), share, control: Arc::new(control) }
    }

    /// The same under another policy, which shares the limits of the one before.
    pub fn under(self, policy: Arc<EgressPolicy>) -> Self {
        self.share.count_for(policy.traffic());
        Self { names: Names::new(policy), ..self }
    }

    /// What was made and denied since the last call.
    pub fn take_egress_events(&self) -> EgressEvents {
        self.names.take_egress_events()
    }

    /// Has the sockets written down for the next daemon; a descriptor of the file.
    pub fn for_successor(&self) -> io::Result<OwnedFd> {
        self.share.for_successor()
    }

    /// Counts the sockets that an earlier daemon has made for the sandbox.
    pub fn take_over(&self, left: LeftSockets) {
        self.share.take_over(left.ledger, &left.written);
    }

    /// Makes the socket that request `sequence` asks for. Waits for nothing.
    ///
    /// # Errors
    /// It may not be made, or too much waits already.
    pub fn open(&self, to: Destination, sequence: u64) -> Result<Opening, Errno> {
        if self.names.is_closed() {
            return Err(Errno::NETUNREACH);
        }
        self.share.ask(Instant::now())?;
        let resolver = SocketAddr::from((RESOLVER_ADDRESS, RESOLVER_PORT));
        if SocketAddr::new(to.address.ip().to_canonical(), to.address.port()) == resolver {
            return self.open_resolver(to.transport).map(Opening::Opened);
        }
        if self.names.is_intercepted(to.address, to.transport) {
            let socket =
                intercept::open(&self.names, &self.share, to.address.port(), to.transport)?;
            return Ok(Opening::Opened(Opened { socket, after_thaw: AfterThaw::Reset }));
        }
        let sockets = self.clone();
        let submitted = match self.names.judge(to.address, to.transport) {
            Verdict::Allowed(permit) => POOL.submit(self.names.function(), move || {
                sockets.open_with_room(permit, to, sequence);
            }),
            Verdict::Denied => return Err(self.names.deny(to.address, to.transport)),
            Verdict::IfNamed(names) => {
                let slot = self.names.lookup_slot().ok_or(Errno::AGAIN)?;
                let job = move || sockets.open_if_named(&names, slot, to, sequence);
                lookup::submit(self.names.function(), job)
            }
        };
        submitted.map(|()| Opening::Later).map_err(|Overloaded| Errno::AGAIN)
    }

    /// Makes a socket and answers. Where there may be no more, it is made on a thread that
    /// asks the host first which others are closed; where there are many, one asks meanwhile.
    fn open_with_room(self, permit: Permit, to: Destination, sequence: u64) {
        let function = self.names.function();
        if self.share.has_room().is_err() {
            let sockets = self.clone();
            let job = move || {
                sockets.share.wait_for_room();
                sockets.answer(sequence, sockets.open_permitted(&permit, to));
            };
            if lookup::submit(function, job).is_err() {
                self.answer(sequence, Err(Errno::AGAIN));
            }
            return;
        }
        self.answer(sequence, self.open_permitted(&permit, to));
        if self.share.is_in_doubt(Instant::now()) {
            let (asking, failed) = (self.share.budget(), self.share.budget());
            if lookup::submit(function, move || asking.forget_closed()).is_err() {
                failed.cannot_ask();
            }
        }
    }

    /// Looks names up first. A thawed copy knows addresses that its host has not told it in
    /// this life: they are allowed if they are still those of an allowed name.
    fn open_if_named(self, names: &[String], slot: Slot, to: Destination, sequence: u64) {
        for name in names {
            self.names.look_up(name);
        }
        drop(slot);
        let outcome = match self.names.judge(to.address, to.transport) {
            Verdict::Allowed(permit) => {
                self.share.wait_for_room();
                self.open_permitted(&permit, to)
            }
            _ => Err(self.names.deny(to.address, to.transport)),
        };
        self.answer(sequence, outcome);
    }

    /// Connects to the address that was judged, and to no other, if it is not one of this
    /// host that the sandbox may not reach.
    fn open_permitted(&self, permit: &Permit, to: Destination) -> Result<Opened, Errno> {
        if !local::is_permitted(permit, to.transport) {
            return Err(self.names.deny(to.address, to.transport));
        }
        self.share.has_room()?;
        let socket = connect(permit.address, to.transport)?;
        let connection = (to.transport == Transport::Tcp).then_some(permit.address);
        self.share.note_open(&socket, connection)?;
        self.names.reached(to.address, to.transport);
        Ok(Opened { socket, after_thaw: permit.after_thaw })
    }

    /// Sends an answer. One for which there is no room is sent by a thread that may wait for
    /// the sandbox.
    fn answer(&self, sequence: u64, outcome: Result<Opened, Errno>) {
        let answer = LateAnswer::new(sequence, outcome);
        if answer.send(&self.control) == Delivery::NoRoom {
            let control = self.control.clone();
            let job = move || answer.send_waiting(&control);
            if lookup::submit(self.names.function(), job).is_err() {
                end(&self.control);
            }
        }
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

/// An answer that another thread than the broker's sends.
struct LateAnswer {
    reply: Vec<u8>,
    socket: Option<OwnedFd>,
}

/// What became of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Delivery {
    /// It was sent, or nobody is left to read it.
    Done,
    /// The sandbox has to read others first.
    NoRoom,
}

impl LateAnswer {
    fn new(sequence: u64, outcome: Result<Opened, Errno>) -> Self {
        match outcome {
            Ok(opened) => Self {
                reply: message::reply(sequence, 0, bytes_of(&opened.tail())),
                socket: Some(opened.socket),
            },
            Err(errno) => {
                let reply = message::reply(sequence, errno.raw_os_error(), &[]);
                Self { reply, socket: None }
            }
        }
    }

    fn send(&self, control: &OwnedFd) -> Delivery {
        let descriptors: Vec<_> = self.socket.iter().map(AsFd::as_fd).collect();
        match message::send(control, &[IoSlice::new(&self.reply)], &descriptors) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Delivery::NoRoom,
            _ => Delivery::Done,
        }
    }

    /// Sends it when there is room. Ends a sandbox that makes none.
    fn send_waiting(&self, control: &OwnedFd) {
        let descriptors: Vec<_> = self.socket.iter().map(AsFd::as_fd).collect();
        let deadline = Instant::now() + UNREAD_TIMEOUT;
        if message::send_until(control, &self.reply, &descriptors, deadline).is_err() {
            end(control);
        }
    }
}

/// Ends a sandbox that does not read what it has asked for, as a violator would be.
fn end(control: &OwnedFd) {
    let _ = shutdown(control, Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    use super::super::local::{GuardedPort, PortGuard};

    use bytemuck::pod_read_unaligned;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::{RecvFlags, SendFlags, recv, send};
    use thaw_abi::control::{MessageHeader, Reply};
    use thaw_abi::network::HOST_ADDRESS;

    /// The sockets of a sandbox with these rules, and its end of the control socket.
    fn sockets(rules: &[String]) -> (Sockets, OwnedFd) {
        let rules = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        let (host, sandbox) = message::control_pair().unwrap();
        rustix::io::ioctl_fionbio(&host, true).unwrap();
        (Sockets::new(Arc::new(EgressPolicy::new(rules)), host), sandbox)
    }

    fn tcp(ip: [u8; 4], port: u16) -> Destination {
        Destination { address: (Ipv4Addr::from(ip), port).into(), transport: Transport::Tcp }
    }

    /// The socket, or the error number, that comes for a request sooner or later.
    fn open(sockets: &Sockets, sandbox: &OwnedFd, to: Destination) -> Result<OwnedFd, Errno> {
        match sockets.open(to, 1)? {
            Opening::Opened(opened) => Ok(opened.socket),
            Opening::Later => answered(sandbox, 1),
        }
    }

    /// The answer to request `sequence`, which is the next one.
    fn answered(sandbox: &OwnedFd, sequence: u64) -> Result<OwnedFd, Errno> {
        let (mut buffer, mut descriptors) = ([0; 64], Vec::new());
        let packet = message::receive(sandbox, &mut buffer, Some(&mut descriptors)).unwrap();
        let (header, body) = buffer[..packet.len].split_at(size_of::<MessageHeader>());
        assert_eq!(pod_read_unaligned::<MessageHeader>(header).sequence, sequence);
        let reply: Reply = pod_read_unaligned(&body[..size_of::<Reply>()]);
        descriptors.pop().ok_or_else(|| Errno::from_raw_os_error(reply.errno))
    }

    #[test]
    fn the_hosts_loopback_is_connected_where_it_is_allowed() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sockets, sandbox) = sockets(&[format!("host.thaw.internal:{port}")]);
        let socket = open(&sockets, &sandbox, tcp(HOST_ADDRESS, port)).unwrap();
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
        let (wide, of_wide) = sockets(&["host.thaw.internal:*".to_owned()]);
        let (written, of_written) = sockets(&[format!("host.thaw.internal:{port}")]);
        let to = tcp(HOST_ADDRESS, port);
        let gateway = GuardedPort::new(Transport::Tcp, port, PortGuard::IfWrittenOut);
        assert_eq!(open(&wide, &of_wide, to).unwrap_err(), Errno::ACCESS);
        assert_eq!(wide.take_egress_events().denied, 1);
        assert!(open(&written, &of_written, to).is_ok());
        let admin = GuardedPort::new(Transport::Tcp, port, PortGuard::Never);
        assert_eq!(open(&written, &of_written, to).unwrap_err(), Errno::ACCESS);
        drop((gateway, admin));
        assert!(open(&wide, &of_wide, to).is_ok());
    }

    #[test]
    fn who_asks_too_fast_is_slowed_down() {
        let (sockets, _sandbox) = sockets(&["192.0.2.1:1".to_owned()]);
        let refused = |_| sockets.open(tcp([192, 0, 2, 2], 1), 1).unwrap_err();
        let outcomes: Vec<Errno> = (0..5000).map(refused).collect();
        assert_eq!(outcomes[0], Errno::ACCESS);
        assert!(outcomes.contains(&Errno::AGAIN));
    }

    /// The name of the rule is one that getaddrinfo(3) takes for an address, so
    /// that no server is asked: another one than the sandbox wants.
    #[test]
    fn an_answer_that_waits_for_a_name_comes_by_itself() {
        let (sockets, sandbox) = sockets(&["1.0x7f:443".to_owned()]);
        // The name has been looked up by the time, whatever came of it.
        assert!(matches!(sockets.open(tcp([192, 0, 2, 1], 443), 77), Ok(Opening::Later)));
        assert_eq!(answered(&sandbox, 77).unwrap_err(), Errno::ACCESS);
        assert_eq!(sockets.open(tcp([192, 0, 2, 1], 443), 78).unwrap_err(), Errno::ACCESS);
    }

    #[test]
    fn the_resolver_answers_over_a_socket_that_keeps_bounds() {
        let (sockets, _sandbox) = sockets(&["host.thaw.internal:1".to_owned()]);
        let address = (Ipv4Addr::from(RESOLVER_ADDRESS), RESOLVER_PORT).into();
        let to = Destination { address, transport: Transport::Udp };
        let Ok(Opening::Opened(Opened { socket, .. })) = sockets.open(to, 1) else { panic!() };
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

    /// The threads that make sockets do not wait for a sandbox that does not read.
    #[test]
    fn who_reads_no_answers_holds_up_no_other() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let rules = [format!("host.thaw.internal:{port}")];
        // More functions, each with its own budget, than there are threads.
        let deaf: Vec<_> = (0..20)
            .map(|_| {
                let (sockets, sandbox) = sockets(&rules);
                let full = message::reply(0, 0, &[0; 4096]);
                while message::send(&*sockets.control, &[IoSlice::new(&full)], &[]).is_ok() {}
                for sequence in 0..4 {
                    let opening = sockets.open(tcp(HOST_ADDRESS, port), sequence);
                    assert!(matches!(opening, Ok(Opening::Later)));
                }
                (sockets, sandbox)
            })
            .collect();
        let (other, sandbox) = sockets(&rules);
        assert!(open(&other, &sandbox, tcp(HOST_ADDRESS, port)).is_ok());
        // In the end each of them is ended.
        for (_, sandbox) in &deaf {
            let mut ended = [PollFd::new(sandbox, PollFlags::RDHUP)];
            poll(&mut ended, Some(&Timespec { tv_sec: 60, tv_nsec: 0 })).unwrap();
            assert!(ended[0].revents().contains(PollFlags::RDHUP));
        }
    }
}
