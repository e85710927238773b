//! Netlink sockets (netlink(7)): `NETLINK_ROUTE` and `NETLINK_SOCK_DIAG`, for asking.
//!
//! Requests are answered while they are sent: the answers wait in the socket's inbox. Only dumps of
//! sockets are written when they are read. Nothing about the network ever changes, so those who
//! subscribe to changes hear of none.

use alloc::collections::BTreeSet;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::address::{AF_NETLINK, SocketAddress};
use super::inbox::{Datagram, Inbox};
use super::netlink_messages;
use super::route_messages;
use super::socket::{
    Ancillary, Blocking, Common, IN, MessageFlags, OUT, Outgoing, Protocol, Received, ShutdownHow,
    Socket, SocketType,
};
use super::socket_diagnosis::{self, Dump};
use crate::errno::{Errno, Result};
use crate::fs::anonymous::InodeNumbers;
use crate::fs::file::{Events, OpenFile};
use crate::io::{Sink, Source};
use crate::ipc::mqueue::notification::{COOKIE_LEN, CookieSocket};
use crate::net::socket::PeerCredentials;
use crate::sync::KernelCell;

/// `NETLINK_ROUTE`.
pub const NETLINK_ROUTE: u32 = 0;
/// `NETLINK_SOCK_DIAG`.
pub const NETLINK_SOCK_DIAG: u32 = 4;
/// Largest request that is read.
const REQUEST_MAX: usize = 64 << 10;

/// `net.core.rmem_default`.
const DEFAULT_RECEIVE_BUFFER: usize = 212_992;

/// Port numbers in use.
#[derive(Default)]
pub struct NetlinkNetwork {
    ports: KernelCell<BTreeSet<u32>>,
}

/// A netlink socket.
pub struct NetlinkSocket {
    common: Common,
    network: Arc<NetlinkNetwork>,
    state: KernelCell<State>,
    inbox: KernelCell<Inbox>,
    /// What comes when the inbox has been read; `None` also while somebody writes a part of it.
    dump: KernelCell<Option<Dump>>,
}

#[derive(Clone, Copy, Default)]
struct State {
    port: Option<u32>,
    groups: u32,
    peer: u32,
}

impl NetlinkNetwork {
    /// Without sockets.
    pub const fn new() -> Self {
        Self { ports: KernelCell::new(BTreeSet::new()) }
    }

    /// A fresh socket, to ask for what a protocol is about (`NETLINK_*`).
    pub fn socket(
        self: &Arc<Self>,
        kind: SocketType,
        protocol: u32,
        inodes: &InodeNumbers,
    ) -> Arc<NetlinkSocket> {
        Arc::new(NetlinkSocket {
            common: Common::new(AF_NETLINK, kind, protocol, inodes.next()),
            network: self.clone(),
            state: KernelCell::default(),
            inbox: KernelCell::default(),
            dump: KernelCell::default(),
        })
    }

    /// Takes the port `wanted`, or with 0 the process' number or another.
    fn take(&self, wanted: u32) -> Result<u32> {
        let mut ports = self.ports.borrow_mut();
        if wanted != 0 {
            return if ports.insert(wanted) { Ok(wanted) } else { Err(Errno::EADDRINUSE) };
        }
        let mut candidate = PeerCredentials::of_sender().shown().pid;
        while !ports.insert(candidate) {
            // Linux takes negative numbers next.
            candidate = candidate.wrapping_sub(4097) | 1 << 31;
        }
        Ok(candidate)
    }
}

impl NetlinkSocket {
    fn port(&self) -> Result<u32> {
        if let Some(port) = self.state.get().port {
            return Ok(port);
        }
        let port = self.network.take(0)?;
        self.state.borrow_mut().port = Some(port);
        Ok(port)
    }

    fn put(&self, bytes: Vec<u8>) {
        let from = Some(SocketAddress::Netlink { port: 0, groups: 0 });
        let ancillary = Ancillary::default();
        self.inbox.borrow_mut().push(Datagram { bytes, from, ancillary, arrival: None });
    }

    /// Bytes that answers may cost, until somebody reads.
    fn room(&self) -> usize {
        let limit = self.common.options.borrow_mut().receive_buffer;
        let limit = limit.map_or(DEFAULT_RECEIVE_BUFFER, |bytes| bytes as usize);
        limit.saturating_sub(self.inbox.borrow_mut().charge())
    }

    /// Writes the next part of a dump, if there is one and nothing else is to be read before.
    fn go_on_with_dump(&self) {
        if !self.inbox.borrow_mut().is_empty() {
            return;
        }
        // Others may go on while sockets are looked for.
        let Some(mut dump) = self.dump.borrow_mut().take() else { return };
        let (part, is_last) = dump.next();
        self.put(part);
        if !is_last {
            *self.dump.borrow_mut() = Some(dump);
        }
    }

    fn is_kernel(to: &SocketAddress) -> Result<()> {
        match to {
            SocketAddress::Netlink { port: 0, .. } => Ok(()),
            SocketAddress::Netlink { .. } => Err(Errno::ECONNREFUSED),
            _ => Err(Errno::EINVAL),
        }
    }
}

/// Most bytes, with what they cost, of cookies that nobody has read.
const COOKIES_MAX: usize = 64 << 10;

impl CookieSocket for NetlinkSocket {
    fn bring(&self, cookie: &[u8; COOKIE_LEN]) {
        if self.inbox.borrow_mut().charge() < COOKIES_MAX {
            self.put(cookie.to_vec());
            self.common.queue.wake_all(IN);
        }
    }
}

/// The netlink socket behind a descriptor, to bring cookies (mq_notify(3)); `ENOTSOCK`, and `EINVAL`
/// for another socket.
pub fn cookie_socket(open: &OpenFile) -> Result<Arc<dyn CookieSocket>> {
    let socket = open.downcast::<Socket>().ok_or(Errno::ENOTSOCK)?;
    socket.protocol.clone().cookie_socket().ok_or(Errno::EINVAL)
}

impl Protocol for NetlinkSocket {
    fn common(&self) -> &Common {
        &self.common
    }

    fn cookie_socket(self: Arc<Self>) -> Option<Arc<dyn CookieSocket>> {
        Some(self)
    }

    fn bind(&self, address: &SocketAddress) -> Result<()> {
        let SocketAddress::Netlink { port, groups } = *address else { return Err(Errno::EINVAL) };
        match self.state.get().port {
            // Once it has a port, zero is another one.
            Some(own) if port != own => return Err(Errno::EINVAL),
            Some(_) => {}
            None => {
                let port = self.network.take(port)?;
                self.state.borrow_mut().port = Some(port);
            }
        }
        self.state.borrow_mut().groups = groups;
        Ok(())
    }

    fn connect(&self, address: &SocketAddress, _blocking: Blocking) -> Result<()> {
        let peer = match *address {
            SocketAddress::Unspecified => 0,
            SocketAddress::Netlink { port, .. } => port,
            _ => return Err(Errno::EINVAL),
        };
        self.port()?;
        self.state.borrow_mut().peer = peer;
        Ok(())
    }

    fn local_address(&self) -> SocketAddress {
        let State { port, groups, .. } = self.state.get();
        SocketAddress::Netlink { port: port.unwrap_or(0), groups }
    }

    fn peer_address(&self) -> Result<SocketAddress> {
        Ok(SocketAddress::Netlink { port: self.state.get().peer, groups: 0 })
    }

    fn send(&self, source: &mut Source<'_>, message: &mut Outgoing) -> Result<usize> {
        if message.flags.contains(MessageFlags::OOB) {
            return Err(Errno::EOPNOTSUPP);
        }
        let peer = SocketAddress::Netlink { port: self.state.get().peer, groups: 0 };
        Self::is_kernel(message.to.as_ref().unwrap_or(&peer))?;
        if source.remaining() > REQUEST_MAX {
            return Err(Errno::EMSGSIZE);
        }
        let port = self.port()?;
        let room = self.room();
        if room == 0 {
            return Err(Errno::ENOBUFS);
        }
        let request = source.take_all(REQUEST_MAX)?;
        let service = match self.common.protocol {
            NETLINK_SOCK_DIAG => socket_diagnosis::carry_out,
            _ => route_messages::carry_out,
        };
        let answers = netlink_messages::answer(&request, port, room, service);
        answers.datagrams.into_iter().for_each(|bytes| self.put(bytes));
        if answers.dump.is_some() {
            *self.dump.borrow_mut() = answers.dump;
        }
        if answers.is_cut {
            *self.common.error.borrow_mut() = Some(Errno::ENOBUFS);
        }
        self.common.queue.wake_all(IN);
        Ok(request.len())
    }

    fn receive(&self, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
        if flags.contains(MessageFlags::OOB) {
            return Err(Errno::EOPNOTSUPP);
        }
        self.common.take_error()?;
        self.go_on_with_dump();
        self.inbox.borrow_mut().receive(sink, flags)
    }

    fn shutdown(&self, _how: ShutdownHow) -> Result<()> {
        Err(Errno::EOPNOTSUPP)
    }

    fn poll(&self) -> Events {
        let is_waiting = !self.inbox.borrow_mut().is_empty() || self.dump.borrow_mut().is_some();
        let has_failed = self.common.error.get().is_some();
        let waiting = if is_waiting { IN } else { Events::empty() };
        OUT | Events::WRBAND | waiting | if has_failed { Events::ERR } else { Events::empty() }
    }

    fn readable_bytes(&self) -> Result<usize> {
        Err(Errno::ENOTTY)
    }

    fn close(&self) {
        if let Some(port) = self.state.borrow_mut().port.take() {
            self.network.ports.borrow_mut().remove(&port);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::netlink_messages::NLM_F_DUMP;
    use crate::net::netlink_messages::tests::request;
    use crate::testing::Sandbox;

    #[test]
    fn the_first_socket_has_the_process_number() {
        let _sandbox = Sandbox::new();
        let (network, inodes) = (Arc::new(NetlinkNetwork::new()), InodeNumbers::new());
        let sockets: Vec<_> =
            (0..3).map(|_| network.socket(SocketType::Datagram, NETLINK_ROUTE, &inodes)).collect();
        let ports: Vec<u32> = sockets.iter().map(|socket| socket.port().unwrap()).collect();
        assert_eq!(ports[0], PeerCredentials::of_sender().pid);
        assert!(ports[1] >> 31 == 1 && ports[2] >> 31 == 1 && ports[1] != ports[2]);
        sockets[0].close();
        assert_eq!(network.take(0), Ok(PeerCredentials::of_sender().pid));
        let taken = SocketAddress::Netlink { port: ports[1], groups: 0 };
        assert_eq!(sockets[0].bind(&taken), Err(Errno::EADDRINUSE));
    }

    #[test]
    fn answers_that_nobody_reads_are_bounded() {
        let _sandbox = Sandbox::new();
        let (network, inodes) = (Arc::new(NetlinkNetwork::new()), InodeNumbers::new());
        let socket = network.socket(SocketType::Datagram, NETLINK_ROUTE, &inodes);
        // RTM_GETLINK.
        let requests = request(18, NLM_F_DUMP, &[0; 16]).repeat(1000);
        let ask = || socket.send(&mut Source::kernel(&requests), &mut Outgoing::default());
        assert_eq!(ask(), Ok(requests.len()));
        assert_eq!(ask(), Err(Errno::ENOBUFS));
        assert!(socket.inbox.borrow_mut().charge() < DEFAULT_RECEIVE_BUFFER + 8192);
        let mut bytes = [0; 4096];
        let mut read = || socket.receive(&mut Sink::kernel(&mut bytes), MessageFlags::empty());
        assert_eq!(socket.poll() & (IN | Events::ERR), IN | Events::ERR);
        assert_eq!(read().err(), Some(Errno::ENOBUFS));
        while read().is_ok() {}
        assert_eq!(ask(), Ok(requests.len()));
    }

    #[test]
    fn only_the_kernel_answers() {
        let (network, inodes) = (Arc::new(NetlinkNetwork::new()), InodeNumbers::new());
        let socket = network.socket(SocketType::Datagram, NETLINK_ROUTE, &inodes);
        let to = Some(SocketAddress::Netlink { port: 77, groups: 0 });
        let outcome =
            socket.send(&mut Source::kernel(b"x"), &mut Outgoing { to, ..Outgoing::default() });
        assert_eq!(outcome, Err(Errno::ECONNREFUSED));
    }
}
