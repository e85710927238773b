//! UDP and UDP-Lite over loopback (udp(7), udplite(7)); what leads outside is in
//! [`super::udp_outside`].

use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;
use core::net::IpAddr;

use super::address::{AF_INET6, Endpoint, SocketAddress};
use super::arrival::Arrival;
use super::departure::Departure;
use super::groups::{self, Audience};
use super::inbox::{Datagram, Inbox};
use super::interfaces::LOOPBACK;
use super::namespace::Scope;
use super::option_table::Name;
use super::options;
use super::outside::{DNS_PORT, looked_up};
use super::ports::{BindOptions, PortTable};
use super::socket::{
    Ancillary, Blocking, Common, IN, MessageFlags, Outgoing, Protocol, Received, ShutdownHow,
    SocketType,
};
use super::sockets::{ConnectionState, Listed};
use super::udp_outside::Flows;
use crate::errno::{Errno, Result};
use crate::fs::anonymous::InodeNumbers;
use crate::fs::file::Events;
use crate::io::{Sink, Source};
use crate::platform::machine::HostFd;
use crate::sync::KernelCell;

/// Writable, as datagram sockets report it.
const OUT: Events = super::socket::OUT.union(Events::WRBAND);

/// `IPPROTO_UDP`.
pub const IPPROTO_UDP: u32 = 17;
/// `IPPROTO_UDPLITE`: as UDP, with ports of its own, and never to the outside.
pub const IPPROTO_UDPLITE: u32 = 136;
/// Most bytes in a datagram: 65535 less the IP and UDP headers.
const DATAGRAM_MAX: usize = 65_507;
/// `net.core.rmem_default`: what does not fit is dropped, as UDP does.
const DEFAULT_RECEIVE_BUFFER: usize = 212_992;

/// What the sockets of a protocol share.
pub struct UdpNetwork {
    pub(super) ports: PortTable<UdpSocket>,
    protocol: u32,
    /// Where they reach.
    scope: Scope,
}

/// A UDP socket.
pub struct UdpSocket {
    this: Weak<UdpSocket>,
    common: Common,
    network: Arc<UdpNetwork>,
    inbox: KernelCell<Inbox>,
    /// What waits for the rest of its datagram.
    corked: KernelCell<Option<Corked>>,
    state: KernelCell<State>,
    /// Ways to the outside.
    flows: Flows,
}

/// The beginning of a datagram of which more will follow (`MSG_MORE` of send(2), `UDP_CORK` of udp(7)).
struct Corked {
    to: Endpoint,
    departure: Departure,
    bytes: Vec<u8>,
}

#[derive(Clone, Copy, Default)]
struct State {
    /// Bound address and port.
    bound: Option<Endpoint>,
    /// The address to which it was bound before a connect chose one.
    asked: Option<Endpoint>,
    peer: Option<Endpoint>,
    reading_shut: bool,
    writing_shut: bool,
}

impl UdpNetwork {
    /// Without sockets, of [`IPPROTO_UDP`] or [`IPPROTO_UDPLITE`].
    pub const fn new(protocol: u32) -> Self {
        Self::within(protocol, Scope::SANDBOX)
    }

    /// Without sockets, of a namespace.
    pub const fn within(protocol: u32, scope: Scope) -> Self {
        Self { ports: PortTable::new(), protocol, scope }
    }

    /// A fresh socket of `family`.
    pub fn socket(self: &Arc<Self>, family: u16, inodes: &InodeNumbers) -> Arc<UdpSocket> {
        Arc::new_cyclic(|this| UdpSocket {
            this: this.clone(),
            common: Common::new(family, SocketType::Datagram, self.protocol, inodes.next()),
            network: self.clone(),
            inbox: KernelCell::default(),
            corked: KernelCell::new(None),
            state: KernelCell::default(),
            flows: Flows::default(),
        })
    }
}

impl UdpSocket {
    fn destination(&self, address: &SocketAddress) -> Result<Endpoint> {
        let endpoint = match (address, self.common.family) {
            (SocketAddress::V4(endpoint), family) if family != AF_INET6 => *endpoint,
            (SocketAddress::V6(endpoint), AF_INET6) => *endpoint,
            // A dual-stack socket sends to either (ipv6(7)).
            (SocketAddress::V4(endpoint), _) => *endpoint,
            _ => return Err(Errno::EAFNOSUPPORT),
        };
        let endpoint = endpoint.as_destination();
        self.network.scope.check_destination(endpoint.ip)?;
        match groups::audience(endpoint.ip) {
            Some(Audience::Everybody) if !self.is_on(options::BROADCAST, false) => {
                return Err(Errno::EACCES);
            }
            Some(_) => return Ok(endpoint),
            None => {}
        }
        if !endpoint.is_local() && !self.flows.is_client(endpoint) {
            if self.common.protocol != IPPROTO_UDP {
                return Err(Errno::ENETUNREACH);
            }
            let source = super::outside::source_address(endpoint.ip);
            source.inspect_err(|_| {
                // The name would be in what is sent.
                if endpoint.port == DNS_PORT {
                    super::outside::no_way_to_look_up(None);
                }
            })?;
        }
        Ok(endpoint)
    }

    /// Whether an option is on; `default`: as long as nobody has set it.
    fn is_on(&self, option: Name, default: bool) -> bool {
        self.common.options.borrow_mut().value(option).map_or(default, |value| value != 0)
    }

    fn bind_to(&self, endpoint: Endpoint) -> Result<Endpoint> {
        let options = {
            let options = self.common.options.borrow_mut();
            BindOptions {
                reuse_address: options.flag(options::REUSEADDR),
                reuse_port: options.flag(options::REUSEPORT),
                v6_only: self.common.family == AF_INET6 && options.flag(options::V6ONLY),
                datagram: true,
            }
        };
        let endpoint = self.network.ports.bind(&self.this, endpoint, options)?;
        let mut state = self.state.borrow_mut();
        state.bound = Some(endpoint);
        state.asked = Some(endpoint);
        Ok(endpoint)
    }

    fn bound_or_any(&self) -> Result<Endpoint> {
        match self.state.get().bound {
            Some(endpoint) => Ok(endpoint),
            None => self.bind_to(Endpoint::wildcard(self.common.family)),
        }
    }

    /// Takes in a client of the function, which the host has handed in.
    pub fn add_client(&self, connection: &thaw_abi::control::Connection, fd: HostFd) {
        self.flows.add_client(connection, fd, &self.common.queue);
    }

    /// Whether somebody waits for a datagram, and none is there.
    pub fn waits_for_datagrams(&self) -> bool {
        !self.common.queue.is_empty() && !self.poll().contains(Events::IN)
    }

    /// The peer outside that the socket is connected to, if the socket has sent something there:
    /// copies send from another port. Resolvers ask again by themselves.
    pub(super) fn lost_peer(&self) -> Option<Endpoint> {
        let peer = self.state.get().peer?;
        (peer.port != super::outside::DNS_PORT && self.flows.leads_to(peer)).then_some(peer)
    }

    /// How much a datagram of this sender is this socket's: one that is connected to another peer gets
    /// none.
    fn rank_of(&self, from: Endpoint) -> Option<u8> {
        match self.state.get().peer {
            Some(peer) => (peer == from).then_some(1),
            None => Some(0),
        }
    }

    /// Takes a datagram in; `false` if this socket listens to another peer.
    fn deliver(&self, from: Endpoint, bytes: Vec<u8>, arrival: Arrival) -> bool {
        if self.rank_of(from).is_none() {
            return false;
        }
        if self.has_room() {
            let from = Some(from.for_family(self.common.family));
            let ancillary = Ancillary::default();
            let datagram = Datagram { bytes, from, ancillary, arrival: Some(arrival) };
            self.inbox.borrow_mut().push(datagram);
            self.common.queue.wake_all(IN);
        }
        true
    }

    /// Whether a datagram that comes now is kept.
    fn has_room(&self) -> bool {
        let limit = self.common.options.borrow_mut().receive_buffer;
        let limit = limit.map_or(DEFAULT_RECEIVE_BUFFER, |bytes| bytes as usize);
        self.inbox.borrow_mut().charge() <= limit
    }
}

/// What a socket sends to a group or to everybody.
impl UdpSocket {
    /// The address of datagrams to `to`.
    fn source_towards(&self, to: IpAddr) -> Result<IpAddr> {
        if groups::audience(to).is_some() {
            let own = Endpoint::wildcard(self.common.family).ip;
            let way = self.common.groups.borrow_mut().way_out(to, own);
            return way.map(|(_, source)| source).ok_or(Errno::ENETUNREACH);
        }
        let there = Endpoint { ip: to, port: 0 };
        if there.is_local() {
            return Ok(to);
        }
        super::outside::source_address(to)
    }

    /// Brings a copy to each socket of the sandbox that listens, and nowhere else.
    fn send_to_many(
        &self,
        audience: Audience,
        to: Endpoint,
        bytes: &[u8],
        departure: &Departure,
    ) -> Result<usize> {
        let own = self.bound_or_any()?;
        let own_ip = departure.source.unwrap_or(own.ip);
        let way = self.common.groups.borrow_mut().way_out(to.ip, own_ip);
        let (interface, ip) = way.ok_or(Errno::ENETUNREACH)?;
        let from = local_source(ip, own)?;
        if !self.comes_back(audience, to.ip, interface) {
            return Ok(bytes.len());
        }
        for socket in self.network.ports.receivers(to) {
            let is_heard =
                audience == Audience::Everybody || socket.hears(to.ip, from.ip, interface);
            // Bytes are copied for those only that keep them.
            if is_heard && socket.rank_of(from).is_some() && socket.has_room() {
                let arrival = Arrival::from_sender(to.ip, departure, &self.common, &socket.common);
                socket.deliver(from, bytes.to_vec(), arrival.over(interface));
            }
        }
        Ok(bytes.len())
    }

    /// Whether the sandbox hears what it sends over an interface.
    fn comes_back(&self, audience: Audience, to: IpAddr, interface: u32) -> bool {
        let option = match to {
            IpAddr::V4(_) => options::MULTICAST_LOOP,
            IpAddr::V6(_) => options::MULTICAST_LOOP_V6,
        };
        // What goes over the loopback interface comes in there, whatever the option says.
        audience == Audience::Everybody
            || (interface == LOOPBACK || self.is_on(option, true))
                && crate::state::kernel().net.groups.contains(interface, to)
    }

    /// Whether a datagram to a group is this socket's.
    fn hears(&self, group: IpAddr, source: IpAddr, interface: u32) -> bool {
        let option = match group {
            IpAddr::V4(_) => options::MULTICAST_ALL,
            IpAddr::V6(_) => options::MULTICAST_ALL_V6,
        };
        let hears_all = self.is_on(option, true);
        self.common.groups.borrow_mut().hears(group, source, interface, hears_all)
    }
}

impl UdpSocket {
    /// A datagram without bytes yet. The socket is bound from here on.
    fn begin(&self, message: &Outgoing) -> Result<Corked> {
        let state = self.state.get();
        let to = match (&message.to, state.peer) {
            (Some(to), _) => self.destination(to)?,
            (None, Some(peer)) => peer,
            (None, None) => return Err(Errno::EDESTADDRREQ),
        };
        if to.port == 0 {
            return Err(Errno::EINVAL);
        }
        if state.writing_shut {
            return Err(Errno::EPIPE);
        }
        self.bound_or_any()?;
        Ok(Corked { to, departure: message.departure, bytes: Vec::new() })
    }

    /// Sends a datagram.
    fn transmit(&self, Corked { to, departure, bytes }: Corked) -> Result<()> {
        let own = self.bound_or_any()?;
        if let Some(audience) = groups::audience(to.ip) {
            return self.send_to_many(audience, to, &bytes, &departure).map(drop);
        }
        let asked = if to.port == DNS_PORT { looked_up(&bytes) } else { None };
        if self.flows.is_client(to) {
            return self.flows.send_to_client(to, &bytes);
        }
        if !to.is_local() {
            return self.flows.send(to, &bytes, &self.common.queue);
        }
        let from = match departure.source {
            Some(ip) => {
                self.network.scope.check_source(ip).map_err(|_| Errno::EINVAL)?;
                local_source(ip, own)?
            }
            // An address of many is none that datagrams come from.
            None if own.ip.is_unspecified() || groups::audience(own.ip).is_some() => {
                Endpoint { ip: to.ip, ..own }
            }
            None => own,
        };
        let rank = |socket: &Self| socket.rank_of(from);
        let delivered = self.network.ports.receiver(to, rank).is_some_and(|socket| {
            let arrival = Arrival::from_sender(to.ip, &departure, &self.common, &socket.common);
            socket.deliver(from, bytes, arrival)
        });
        if !delivered && to.port == DNS_PORT {
            super::outside::no_way_to_look_up(asked.as_deref());
        }
        if !delivered && self.state.get().peer == Some(to) {
            // "Port unreachable" comes back, and a connected socket hears of it.
            *self.common.error.borrow_mut() = Some(Errno::ECONNREFUSED);
            self.common.queue.wake_all(IN | OUT | Events::ERR);
        }
        Ok(())
    }
}

/// Adds what is sent to a datagram; returns how much that is.
fn add(source: &mut Source<'_>, bytes: &mut Vec<u8>) -> Result<usize> {
    if source.remaining() > DATAGRAM_MAX - bytes.len() {
        return Err(Errno::EMSGSIZE);
    }
    let more = source.take_all(DATAGRAM_MAX)?;
    bytes.extend_from_slice(&more);
    Ok(more.len())
}

/// The endpoint of a datagram that says which address it comes from; `EINVAL` if
/// that is not an address of the sandbox.
fn local_source(ip: IpAddr, own: Endpoint) -> Result<Endpoint> {
    let from = Endpoint { ip, ..own };
    if from.is_local() { Ok(from) } else { Err(Errno::EINVAL) }
}

impl Protocol for UdpSocket {
    fn common(&self) -> &Common {
        &self.common
    }

    fn bind(&self, address: &SocketAddress) -> Result<()> {
        let endpoint = match (address, self.common.family) {
            (SocketAddress::V4(endpoint), family) if family != AF_INET6 => *endpoint,
            (SocketAddress::V6(endpoint), AF_INET6) => *endpoint,
            (SocketAddress::V4(_), _) => return Err(Errno::EINVAL),
            _ => return Err(Errno::EAFNOSUPPORT),
        };
        if self.state.get().bound.is_some() {
            return Err(Errno::EINVAL);
        }
        self.network.scope.check_source(endpoint.ip)?;
        if !endpoint.is_local() && groups::audience(endpoint.ip).is_none() {
            return Err(Errno::EADDRNOTAVAIL);
        }
        self.bind_to(endpoint).map(drop)
    }

    fn listed(&self) -> Option<Listed> {
        let State { bound: Some(_), peer, .. } = self.state.get() else { return None };
        let state = match peer {
            Some(_) => ConnectionState::Established,
            None => ConnectionState::Close,
        };
        let receive_queue = self.inbox.borrow_mut().charge();
        Some(Listed { remote: peer, receive_queue, ..Listed::new(state) })
    }

    fn connect(&self, address: &SocketAddress, _blocking: Blocking) -> Result<()> {
        if *address == SocketAddress::Unspecified {
            let mut state = self.state.borrow_mut();
            state.peer = None;
            state.bound = state.asked;
            return Ok(());
        }
        let peer = self.destination(address)?;
        let bound = self.bound_or_any()?;
        let mut state = self.state.borrow_mut();
        state.peer = Some(peer);
        if bound.ip.is_unspecified() {
            let ip = self.source_towards(peer.ip)?;
            state.bound = Some(Endpoint { ip, ..bound });
        }
        drop(state);
        self.flows.keep_only(peer);
        let is_outside = !peer.is_local() && groups::audience(peer.ip).is_none();
        if is_outside && !self.flows.is_client(peer) {
            crate::state::kernel().net.outside.note_connected(&self.this);
        }
        Ok(())
    }

    fn local_address(&self) -> SocketAddress {
        let bound = self.state.get().bound.unwrap_or(Endpoint::wildcard(self.common.family));
        bound.for_family(self.common.family)
    }

    fn peer_address(&self) -> Result<SocketAddress> {
        self.state.get().peer.map(|peer| peer.for_family(self.common.family)).ok_or(Errno::ENOTCONN)
    }

    fn send(&self, source: &mut Source<'_>, message: &mut Outgoing) -> Result<usize> {
        if message.flags.contains(MessageFlags::OOB) {
            return Err(Errno::EOPNOTSUPP);
        }
        if source.remaining() > DATAGRAM_MAX {
            return Err(Errno::EMSGSIZE);
        }
        self.common.take_error()?;
        // Where a datagram has begun, its address holds.
        let begun = self.corked.borrow_mut().take();
        let mut whole = match begun {
            Some(begun) => begun,
            None => self.begin(message)?,
        };
        // As on Linux, an error takes the beginning with it.
        let len = add(source, &mut whole.bytes)?;
        if message.flags.contains(MessageFlags::MORE) || self.is_on(options::UDP_CORK, false) {
            *self.corked.borrow_mut() = Some(whole);
        } else {
            self.transmit(whole)?;
        }
        Ok(len)
    }

    fn uncork(&self) {
        let begun = self.corked.borrow_mut().take();
        // As on Linux, nobody hears of an error.
        let _ = begun.map(|whole| self.transmit(whole));
    }

    fn receive(&self, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
        if flags.contains(MessageFlags::OOB) {
            return Err(Errno::EOPNOTSUPP);
        }
        self.common.take_error()?;
        let mut outcome = self.inbox.borrow_mut().receive(sink, flags);
        if outcome.as_ref().is_err_and(|error| *error == Errno::EAGAIN) {
            let peer = self.state.get().peer;
            outcome = self.flows.receive(sink, flags, peer, &self.common);
        }
        match outcome {
            // As on Linux, who does not wait is not told of the end.
            Err(Errno::EAGAIN)
                if self.state.get().reading_shut && !flags.contains(MessageFlags::DONTWAIT) =>
            {
                Ok(Received::default())
            }
            outcome => outcome,
        }
    }

    fn shutdown(&self, how: ShutdownHow) -> Result<()> {
        {
            let mut state = self.state.borrow_mut();
            if state.peer.is_none() {
                return Err(Errno::ENOTCONN);
            }
            state.reading_shut |= how.reads();
            state.writing_shut |= how.writes();
        }
        self.common.queue.wake_all(IN | OUT | Events::RDHUP | Events::HUP);
        Ok(())
    }

    fn poll(&self) -> Events {
        let state = self.state.get();
        let mut events = OUT;
        if !self.inbox.borrow_mut().is_empty() || self.flows.readable() {
            events |= IN;
        }
        if state.reading_shut {
            events |= IN | Events::RDHUP;
        }
        if state.reading_shut && state.writing_shut {
            events |= Events::HUP;
        }
        if self.common.error.get().is_some() {
            events |= Events::ERR;
        }
        events
    }

    fn readable_bytes(&self) -> Result<usize> {
        match self.inbox.borrow_mut().first_len() {
            0 => {}
            len => return Ok(len),
        }
        Ok(self.flows.first_len())
    }

    fn close(&self) {
        self.flows.clear();
        self.common.groups.borrow_mut().leave_all();
        if let Some(bound) = self.state.get().asked {
            self.network.ports.release(&self.this, bound.port);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::address::AF_INET;
    use crate::testing::Sandbox;

    fn send(socket: &UdpSocket, to: Option<SocketAddress>, bytes: &[u8]) -> Result<usize> {
        socket.send(&mut Source::kernel(bytes), &mut Outgoing { to, ..Outgoing::default() })
    }

    fn receive(socket: &UdpSocket, len: usize) -> Result<(Vec<u8>, usize, Option<SocketAddress>)> {
        let mut bytes = vec![0; len];
        let received = socket.receive(&mut Sink::kernel(&mut bytes), MessageFlags::empty())?;
        bytes.truncate(received.bytes);
        Ok((bytes, received.length, received.from))
    }

    fn sockets() -> (Arc<UdpSocket>, Arc<UdpSocket>) {
        let (network, inodes) = (Arc::new(UdpNetwork::new(IPPROTO_UDP)), InodeNumbers::new());
        let receiver = network.socket(AF_INET, &inodes);
        receiver.bind(&SocketAddress::V4(Endpoint::wildcard(AF_INET).as_destination())).unwrap();
        (receiver, network.socket(AF_INET, &inodes))
    }

    #[test]
    fn datagrams_keep_bounds_and_sender() {
        let (receiver, sender) = sockets();
        assert_eq!(send(&sender, None, b"x"), Err(Errno::EDESTADDRREQ));
        let to = receiver.local_address();
        assert_eq!(send(&sender, Some(to.clone()), b"datagram"), Ok(8));
        assert_eq!(send(&sender, Some(to), b""), Ok(0));
        let (bytes, length, from) = receive(&receiver, 4).unwrap();
        assert_eq!((bytes.as_slice(), length), (b"data".as_slice(), 8));
        let SocketAddress::V4(from) = from.unwrap() else { panic!() };
        assert!(from.ip.is_loopback() && from.port != 0);
        assert_eq!(receive(&receiver, 4).unwrap().1, 0);
        assert_eq!(receive(&receiver, 4), Err(Errno::EAGAIN));
        assert_eq!(send(&sender, None, &[0; 65_508]), Err(Errno::EMSGSIZE));
    }

    #[test]
    fn who_is_bound_to_a_group_sends_from_an_address_of_its_own() {
        let _sandbox = Sandbox::new();
        let (receiver, sender) = sockets();
        let group = Endpoint { ip: [239, 1, 2, 3].into(), port: 5353 };
        sender.bind(&SocketAddress::V4(group)).unwrap();
        let from = || {
            assert_eq!(send(&sender, Some(receiver.local_address()), b"x"), Ok(1));
            receive(&receiver, 1).unwrap().2
        };
        let own = Endpoint { ip: [127, 0, 0, 1].into(), port: 5353 };
        assert_eq!(from(), Some(SocketAddress::V4(own)));
        sender.connect(&receiver.local_address(), Blocking::Yes).unwrap();
        assert_eq!(from(), Some(SocketAddress::V4(own)));
        assert_eq!(sender.local_address(), SocketAddress::V4(group));
    }

    #[test]
    fn udp_lite_stays_inside_and_has_its_own_ports() {
        let _sandbox = Sandbox::new();
        let (udp, lite) = (UdpNetwork::new(IPPROTO_UDP), UdpNetwork::new(IPPROTO_UDPLITE));
        let inodes = InodeNumbers::new();
        let any = SocketAddress::V4(Endpoint::wildcard(AF_INET).with_port(5000));
        let (udp, lite) = (Arc::new(udp), Arc::new(lite));
        udp.socket(AF_INET, &inodes).bind(&any).unwrap();
        let receiver = lite.socket(AF_INET, &inodes);
        receiver.bind(&any).unwrap();
        let sender = lite.socket(AF_INET, &inodes);
        assert_eq!(send(&sender, Some(any.clone()), b"lite"), Ok(4));
        assert_eq!(receive(&receiver, 4).unwrap().0, b"lite");
        let outside = Endpoint { ip: [192, 0, 2, 1].into(), port: 9 };
        let outcome = send(&sender, Some(SocketAddress::V4(outside)), b"x");
        assert_eq!(outcome, Err(Errno::ENETUNREACH));
    }

    #[test]
    fn a_connected_socket_hears_of_refusals_and_of_its_peer_only() {
        let (receiver, sender) = sockets();
        sender.connect(&receiver.local_address(), Blocking::Yes).unwrap();
        let own = sender.local_address();
        assert_eq!(send(&receiver, Some(own.clone()), b"a"), Ok(1));
        assert_eq!(receive(&sender, 1).unwrap().0, b"a");
        let stranger = receiver.network.socket(AF_INET, &InodeNumbers::new());
        assert_eq!(send(&stranger, Some(own), b"b"), Ok(1));
        assert_eq!(receive(&sender, 1), Err(Errno::EAGAIN));
        receiver.close();
        assert_eq!(send(&sender, None, b"x"), Ok(1));
        assert_eq!(sender.poll(), OUT | Events::ERR);
        assert_eq!(send(&sender, None, b"x"), Err(Errno::ECONNREFUSED));
    }

    #[test]
    fn what_does_not_fit_is_dropped() {
        let (receiver, sender) = sockets();
        for _ in 0..1000 {
            assert_eq!(send(&sender, Some(receiver.local_address()), &[0; 1000]), Ok(1000));
        }
        assert!(receiver.inbox.borrow_mut().len() < 100);
    }
}
