//! Netlink sockets (netlink(7)): `NETLINK_ROUTE`, for asking.
//!
//! Every request is answered while it is sent: the answers wait in the socket's
//! inbox. Nothing about the network ever changes, so those who subscribe to
//! changes hear of none.

use alloc::collections::BTreeSet;
use alloc::sync::Arc;

use super::address::{AF_NETLINK, SocketAddress};
use super::inbox::{Datagram, Inbox};
use super::route_messages;
use super::socket::{
    Ancillary, Blocking, Common, IN, MessageFlags, OUT, Outgoing, Protocol, Received, ShutdownHow,
    SocketType,
};
use crate::errno::{Errno, Result};
use crate::fs::anonymous::InodeNumbers;
use crate::fs::file::Events;
use crate::io::{Sink, Source};
use crate::net::socket::PeerCredentials;
use crate::sync::KernelCell;

/// `NETLINK_ROUTE`.
pub const NETLINK_ROUTE: u32 = 0;
/// Largest request that is read.
const REQUEST_MAX: usize = 64 << 10;

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

    /// A fresh socket.
    pub fn socket(self: &Arc<Self>, kind: SocketType, inodes: &InodeNumbers) -> Arc<NetlinkSocket> {
        Arc::new(NetlinkSocket {
            common: Common::new(AF_NETLINK, kind, NETLINK_ROUTE, inodes.next()),
            network: self.clone(),
            state: KernelCell::default(),
            inbox: KernelCell::default(),
        })
    }

    /// Takes the port `wanted`, or with 0 the process' number or another.
    fn take(&self, wanted: u32) -> Result<u32> {
        let mut ports = self.ports.borrow_mut();
        if wanted != 0 {
            return if ports.insert(wanted) { Ok(wanted) } else { Err(Errno::EADDRINUSE) };
        }
        let mut candidate = PeerCredentials::of_sender().pid;
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

    fn is_kernel(to: &SocketAddress) -> Result<()> {
        match to {
            SocketAddress::Netlink { port: 0, .. } => Ok(()),
            SocketAddress::Netlink { .. } => Err(Errno::ECONNREFUSED),
            _ => Err(Errno::EINVAL),
        }
    }
}

impl Protocol for NetlinkSocket {
    fn common(&self) -> &Common {
        &self.common
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
        let request = source.take_all(REQUEST_MAX)?;
        for bytes in route_messages::answer(&request, port) {
            let from = Some(SocketAddress::Netlink { port: 0, groups: 0 });
            let ancillary = Ancillary::default();
            self.inbox.borrow_mut().push(Datagram { bytes, from, ancillary, arrival: None });
        }
        self.common.queue.wake_all(IN);
        Ok(request.len())
    }

    fn receive(&self, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
        if flags.contains(MessageFlags::OOB) {
            return Err(Errno::EOPNOTSUPP);
        }
        self.inbox.borrow_mut().receive(sink, flags)
    }

    fn shutdown(&self, _how: ShutdownHow) -> Result<()> {
        Err(Errno::EOPNOTSUPP)
    }

    fn poll(&self) -> Events {
        let waiting = if self.inbox.borrow_mut().is_empty() { Events::empty() } else { IN };
        OUT | Events::WRBAND | waiting
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
    use crate::testing::Sandbox;

    #[test]
    fn the_first_socket_has_the_process_number() {
        let _sandbox = Sandbox::new();
        let (network, inodes) = (Arc::new(NetlinkNetwork::new()), InodeNumbers::new());
        let sockets: Vec<_> =
            (0..3).map(|_| network.socket(SocketType::Datagram, &inodes)).collect();
        let ports: Vec<u32> = sockets.iter().map(|socket| socket.port().unwrap()).collect();
        assert_eq!(ports[0], PeerCredentials::of_sender().pid);
        assert!(ports[1] >> 31 == 1 && ports[2] >> 31 == 1 && ports[1] != ports[2]);
        sockets[0].close();
        assert_eq!(network.take(0), Ok(PeerCredentials::of_sender().pid));
        let taken = SocketAddress::Netlink { port: ports[1], groups: 0 };
        assert_eq!(sockets[0].bind(&taken), Err(Errno::EADDRINUSE));
    }

    #[test]
    fn only_the_kernel_answers() {
        let (network, inodes) = (Arc::new(NetlinkNetwork::new()), InodeNumbers::new());
        let socket = network.socket(SocketType::Datagram, &inodes);
        let to = Some(SocketAddress::Netlink { port: 77, groups: 0 });
        let outcome =
            socket.send(&mut Source::kernel(b"x"), &mut Outgoing { to, ..Outgoing::default() });
        assert_eq!(outcome, Err(Errno::ECONNREFUSED));
    }
}
