//! Sockets.
//!
//! The kernel is its own network: Unix sockets, and TCP and UDP over loopback,
//! connect inside the sandbox only. A listening socket on the function's port
//! also gets the connections that the host hands in
//! ([`deliver_connection`]), and what leads outside is a socket that the host
//! has connected ([`outside`]); the bytes of those go straight between guest
//! memory and the host's socket.

pub mod address;
mod arrival;
mod departure;
mod group_options;
mod groups;
pub mod host_connection;
pub mod host_stream;
mod in_flight;
pub mod inbox;
pub mod incoming;
mod interface_ioctls;
pub mod interfaces;
pub mod message;
pub mod namespace;
pub mod netlink;
mod netlink_messages;
mod option_table;
pub mod options;
pub mod outside;
pub mod own_name;
pub mod pair;
pub mod ports;
pub mod proc_counters;
pub mod proc_files;
pub mod resolver_files;
mod route_messages;
pub mod socket;
mod socket_diagnosis;
pub mod socket_tables;
pub mod sockets;
pub mod tcp;
mod tcp_outside;
pub mod udp;
mod udp_outside;
pub mod unix;
pub mod unix_datagram;
pub mod unix_names;
pub mod unix_stream;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::Ipv4Addr;

use thaw_abi::control::{FLAG_ENTRY_STDIN, FLAG_ENTRY_UDP};

use crate::fs::anonymous::InodeNumbers;
use crate::fs::pipe::fifo::Fifos;
use crate::host::control;
use crate::platform::machine::{HostFd, HostFiles, Machine};
use crate::state::OfBoot;
use crate::sync::KernelCell;
use address::Endpoint;
use host_connection::{Clients, HostConnection};
use netlink::NetlinkNetwork;
use socket::Protocol;
use tcp::TcpNetwork;
use udp::{IPPROTO_UDP, IPPROTO_UDPLITE, UdpNetwork};
use unix::UnixNetwork;

/// Sockets that others can find, and what is known about the host's. Saved.
pub struct Network {
    /// TCP.
    pub tcp: Arc<TcpNetwork>,
    /// UDP.
    pub udp: Arc<UdpNetwork>,
    /// UDP-Lite.
    pub udp_lite: Arc<UdpNetwork>,
    /// Multicast groups that sockets have joined.
    pub groups: groups::Joined,
    /// Unix sockets.
    pub unix: Arc<UnixNetwork>,
    /// Netlink.
    pub netlink: Arc<NetlinkNetwork>,
    /// FIFOs that are open.
    pub fifos: Fifos,
    /// Sockets that wait for a connection to the outside.
    pub outside: outside::Outside,
    /// Inode numbers of sockets and pipes.
    pub inodes: Arc<InodeNumbers>,
    /// Connections of clients.
    pub clients: Clients,
    closing: in_flight::Closing,
    early: KernelCell<Early>,
}

/// Connections that came before the program has listened on their port for the first time: it has
/// just been started, or was frozen earlier than that, through `/dev/thaw`.
#[derive(Default)]
struct Early {
    /// The ports of clients that somebody has listened on.
    listened: Vec<u16>,
    waiting: Vec<(thaw_abi::control::Connection, OfBoot<HostFd>)>,
}

impl Early {
    /// Keeps a connection to `port` if nobody has listened there yet; whether it does.
    fn keep(&mut self, connection: &thaw_abi::control::Connection, port: u16, fd: HostFd) -> bool {
        let keeps = port != 0 && !self.listened.contains(&port) && self.waiting.len() < EARLY_MAX;
        if keeps {
            self.waiting.push((*connection, OfBoot::new(fd)));
        }
        keeps
    }

    /// Who is waiting for ports that somebody listens on now: the function's `own` one or others
    /// that clients have come to.
    fn take(
        &mut self,
        own: u16,
        is_listening: impl Fn(u16) -> bool,
    ) -> Vec<(thaw_abi::control::Connection, OfBoot<HostFd>)> {
        let came_to = self.waiting.iter().map(|(connection, _)| connection.local.port);
        let mut new: Vec<u16> = core::iter::once(own).chain(came_to).collect();
        new.retain(|&port| port != 0 && !self.listened.contains(&port) && is_listening(port));
        new.sort_unstable();
        new.dedup();
        // No host has more ports for clients.
        let room = EARLY_MAX.saturating_sub(self.listened.len());
        self.listened.extend(new.iter().take(room));
        let (ready, waiting) = core::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|(connection, _)| new.contains(&connection.local.port));
        self.waiting = waiting;
        ready
    }
}

/// Those that are still there.
fn of_this_boot(
    waiting: &[(thaw_abi::control::Connection, OfBoot<HostFd>)],
) -> impl Iterator<Item = (&thaw_abi::control::Connection, HostFd)> {
    waiting.iter().filter_map(|(connection, fd)| Some((connection, *fd.get()?)))
}

/// Most connections that wait for the first listener.
const EARLY_MAX: usize = 128;

impl Default for Network {
    fn default() -> Self {
        Self::new()
    }
}

impl Network {
    /// Without sockets.
    pub fn new() -> Self {
        Self {
            tcp: Arc::new(TcpNetwork::new()),
            udp: Arc::new(UdpNetwork::new(IPPROTO_UDP)),
            udp_lite: Arc::new(UdpNetwork::new(IPPROTO_UDPLITE)),
            groups: groups::Joined::default(),
            unix: Arc::new(UnixNetwork::default()),
            netlink: Arc::new(NetlinkNetwork::new()),
            fifos: Fifos::new(),
            outside: outside::Outside::new(),
            inodes: Arc::new(InodeNumbers::new()),
            clients: Clients::default(),
            closing: in_flight::Closing::default(),
            early: KernelCell::default(),
        }
    }

    /// Puts a connection that the host handed in into the accept queue of the socket that listens
    /// on its port. Without one, it waits if there never was one, and is closed otherwise.
    pub fn deliver(&self, connection: &thaw_abi::control::Connection, fd: HostFd) {
        let port = connection.local.port;
        let local = Endpoint::from_host(&connection.local);
        let Some(listener) = self.tcp.ports.listener_at(local).filter(|_| port != 0) else {
            if !self.early.borrow_mut().keep(connection, port, fd) {
                let _ = Machine::shutdown(fd, socket::ShutdownHow::Both as u32);
                turn_away(connection, fd);
            }
            return;
        };
        let family = listener.common().family;
        let options = listener.inherited_options();
        let connection = HostConnection::new(connection, fd, family, options, self.inodes.next());
        // A listener that has just ended drops, and so closes, the connection.
        drop(listener.deliver(connection));
    }

    /// Puts a connection that the host has made to `port` by itself into the accept queue of the
    /// socket that listens there, after `accepted` was told. The host sees its end on `fd`, which
    /// stays the caller's after an error: `ECONNREFUSED` if nobody listens.
    pub fn connect_from_host(
        &self,
        port: u16,
        fd: HostFd,
        accepted: impl FnOnce(),
    ) -> crate::errno::Result<()> {
        let refused = crate::errno::Errno::ECONNREFUSED;
        let local = Endpoint { ip: Ipv4Addr::LOCALHOST.into(), port };
        let listener = self.tcp.ports.listener_at(local).ok_or(refused)?;
        accepted();
        let family = listener.common().family;
        let options = listener.inherited_options();
        let connection = HostConnection::of_port(local, fd, family, options, self.inodes.next());
        // A listener that has just ended drops, and so closes, the connection.
        drop(listener.deliver(connection));
        Ok(())
    }

    /// Gives a client whose datagrams come over `fd` to the socket that is bound to its port.
    /// Without one, it waits if there never was one, and is let go of otherwise.
    pub fn deliver_datagrams(&self, connection: &thaw_abi::control::Connection, fd: HostFd) {
        let port = connection.local.port;
        match self.udp.ports.bound_to(port).filter(|_| port != 0) {
            Some(socket) => socket.add_client(connection, fd),
            None if self.early.borrow_mut().keep(connection, port, fd) => {}
            None => turn_away(connection, fd),
        }
    }

    /// A UDP socket was bound: as [`Network::listening`].
    pub fn bound(&self, own: u16) {
        let is_bound = |port| self.udp.ports.bound_to(port).is_some();
        let ready = self.early.borrow_mut().take(own, is_bound);
        for (connection, fd) in of_this_boot(&ready) {
            self.deliver_datagrams(connection, fd);
        }
    }

    /// A socket has begun to listen: those who came early to its port have somebody to wait for.
    /// `own` is the function's port.
    pub fn listening(&self, own: u16) {
        let is_listening = |port| !self.tcp.ports.listeners_at(port).is_empty();
        let ready = self.early.borrow_mut().take(own, is_listening);
        for (connection, fd) in of_this_boot(&ready) {
            self.deliver(connection, fd);
        }
    }

    /// Whether a socket listens on `port` and nobody waits to be accepted, at none of those that
    /// listen there.
    pub fn waits_for_clients(&self, port: u16) -> bool {
        if port == 0 {
            return false;
        }
        let mut listeners = self.tcp.ports.listeners_at(port);
        // One that was shut down has its port still.
        listeners.retain(|listener| listener.is_listening());
        !listeners.is_empty() && listeners.iter().all(|listener| listener.waits_for_clients())
    }
}

/// Lets go of a client whom nobody waits for.
fn turn_away(connection: &thaw_abi::control::Connection, fd: HostFd) {
    Machine::close(fd);
    control::connection_closed(connection.id);
}

/// A client has come, in the way that the function's clients do.
pub fn deliver_connection(connection: &thaw_abi::control::Connection, fd: HostFd) {
    let kernel = crate::state::kernel();
    let config = kernel.config.get();
    match config.flags & (FLAG_ENTRY_UDP | FLAG_ENTRY_STDIN) {
        FLAG_ENTRY_UDP => kernel.net.deliver_datagrams(connection, fd),
        FLAG_ENTRY_STDIN => crate::fs::stdio::deliver_request(fd),
        _ => kernel.net.deliver(connection, fd),
    }
}

/// A socket has been bound or has begun to listen: those who came before have
/// somebody to wait for.
pub fn ready_for_clients() {
    let kernel = crate::state::kernel();
    let config = kernel.config.get();
    match config.flags & FLAG_ENTRY_UDP {
        0 => kernel.net.listening(config.port),
        _ => kernel.net.bound(config.port),
    }
}

/// The host has answered a request for a socket that nobody has waited for in
/// the kernel.
pub fn answered(message: &crate::host::control::Kept) {
    crate::state::kernel().net.outside.answered(message);
}

/// Whoever was asked for connections has ended, and somebody else serves the sandbox.
pub fn host_renewed() {
    crate::state::kernel().net.outside.ask_again();
}

/// Before a freeze: settles what copies make of connections to the outside.
pub fn prepare_freeze() {
    crate::state::kernel().net.outside.prepare_for_sleep();
}

/// Which connections copies of what is frozen now will find reset, after [`prepare_freeze`].
pub fn losses() -> Option<thaw_abi::control::Losses> {
    crate::state::kernel().net.outside.losses()
}

/// After a thaw: the connections of the frozen time are gone, but for those that
/// are made again when they are used, and those who wait for one hear of it.
pub fn reset_connections() {
    let net = &crate::state::kernel().net;
    net.early.borrow_mut().waiting.clear();
    net.outside.reset();
    crate::state::kernel().host_poll.wake_lost();
}

/// Whether the program is at its entry point as far as sockets can tell: it
/// listens on the function's port, nobody waits to be accepted, and no client
/// has sent anything that was not read.
pub fn waits_for_clients() -> bool {
    let kernel = crate::state::kernel();
    let port = kernel.config.borrow_mut().port;
    kernel.net.waits_for_clients(port) && !kernel.host_poll.has_unread_data()
}

/// As [`waits_for_clients`], for a function whose clients send datagrams: somebody
/// waits for one at the function's port.
pub fn waits_for_datagrams() -> bool {
    let kernel = crate::state::kernel();
    let port = kernel.config.get().port;
    port != 0 && kernel.net.udp.ports.bound_to(port).is_some_and(|udp| udp.waits_for_datagrams())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errno::Errno;
    use crate::fs::file::{Events, File};
    use crate::io::{Sink, Source};
    use crate::net::address::{AF_INET, AF_INET6, Endpoint, SocketAddress};
    use crate::net::socket::Socket;
    use crate::state::kernel;
    use crate::testing::Sandbox;
    use std::io::{Read, Write};
    use std::os::fd::IntoRawFd;
    use std::os::unix::net::UnixStream;
    use thaw_abi::control::{Address, Connection, ConnectionClosed, MSG_CONNECTION_CLOSED};

    fn connection() -> Connection {
        let address = |last, port| {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&[10, 0, 0, last]);
            Address { bytes, family: AF_INET, port, reserved: 0 }
        };
        Connection { id: 7, peer: address(1, 5000), local: address(2, 8080) }
    }

    /// The connection of which the host has heard that it is closed.
    fn closed(sandbox: &Sandbox) -> u64 {
        let body = sandbox.host.wait_for(MSG_CONNECTION_CLOSED);
        bytemuck::pod_read_unaligned::<ConnectionClosed>(&body).id
    }

    fn listening(network: &Network, port: u16) -> Arc<Socket> {
        let tcp = network.tcp.socket(AF_INET, &network.inodes);
        tcp.bind(&SocketAddress::V4(Endpoint::wildcard(AF_INET).with_port(port))).unwrap();
        tcp.listen(5).unwrap();
        Socket::new(tcp)
    }

    /// A client that was accepted, and what the program has of it.
    fn accepted(network: &Network) -> (Arc<Socket>, Arc<Socket>) {
        let listener = listening(network, 8080);
        let (_, ours) = UnixStream::pair().unwrap();
        network.deliver(&connection(), HostFd::new(ours.into_raw_fd()));
        let file = Socket::new(listener.protocol.accept().unwrap());
        (listener, file)
    }

    #[test]
    fn a_client_is_listed_with_its_address_until_it_is_closed() {
        let _sandbox = Sandbox::new();
        let (_listener, file) = accepted(&kernel().net);
        let listed = file.protocol.listed().unwrap();
        assert_eq!(listed.state, sockets::ConnectionState::CloseWait, "the client has gone");
        let client = Endpoint { ip: Ipv4Addr::new(10, 0, 0, 1).into(), port: 5000 };
        assert_eq!((listed.remote, listed.receive_queue), (Some(client), 0));
        file.protocol.close();
        assert!(file.protocol.listed().is_none());
    }

    #[test]
    fn the_host_connects_to_any_port_on_which_somebody_listens() {
        let sandbox = Sandbox::new();
        let network = &kernel().net;
        let tcp = network.tcp.socket(AF_INET, &network.inodes);
        let local = Endpoint { ip: core::net::Ipv4Addr::LOCALHOST.into(), port: 9000 };
        tcp.bind(&SocketAddress::V4(local)).unwrap();
        tcp.listen(5).unwrap();
        let listener = Socket::new(tcp);
        let (mut host, ours) = UnixStream::pair().unwrap();
        let mut said = 0;
        let fd = HostFd::new(ours.into_raw_fd());
        network.connect_from_host(9000, fd, || said += 1).unwrap();
        let file = Socket::new(listener.protocol.accept().unwrap());
        assert_eq!(file.protocol.local_address(), SocketAddress::V4(local));
        host.write_all(b"ask").unwrap();
        let mut buffer = [0; 8];
        assert_eq!(file.read(&mut Sink::kernel(&mut buffer), 0), Ok(3));
        assert_eq!(file.write(&mut Source::kernel(b"answer"), 0), Ok(6));
        drop(file);
        let mut answer = String::new();
        host.read_to_string(&mut answer).unwrap();
        assert_eq!((said, answer.as_str()), (1, "answer"));
        // Nobody listens there, and nobody is told that somebody does.
        let (_host, ours) = UnixStream::pair().unwrap();
        let fd = HostFd::new(ours.into_raw_fd());
        let refused = network.connect_from_host(9001, fd, || said += 1);
        assert_eq!((refused, said), (Err(Errno::ECONNREFUSED), 1));
        drop(sandbox);
    }

    /// A client asks, the program answers and closes.
    #[track_caller]
    fn exchange(mut client: UnixStream, file: Arc<Socket>) {
        client.write_all(b"GET").unwrap();
        kernel().host_poll.look(None);
        let mut bytes = [0; 10];
        assert_eq!(file.read(&mut Sink::kernel(&mut bytes), 0), Ok(3));
        assert_eq!(file.read(&mut Sink::kernel(&mut bytes), 0), Err(Errno::EAGAIN));
        assert_eq!(file.write(&mut Source::kernel(b"200"), 0), Ok(3));
        drop(file);
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "200");
    }

    #[test]
    fn a_client_goes_on_over_the_socket_of_the_next_boot() {
        let _sandbox = Sandbox::new();
        let network = &kernel().net;
        let (listener, file) = accepted(network);
        *kernel().generation.borrow_mut() += 1;
        let mut bytes = [0; 10];
        assert_eq!(file.read(&mut Sink::kernel(&mut bytes), 0), Err(Errno::ECONNRESET));
        drop((listener, file));

        let (_listener, file) = accepted(network);
        *kernel().generation.borrow_mut() += 1;
        let (client, ours) = UnixStream::pair().unwrap();
        network.clients.go_on(7, HostFd::new(ours.into_raw_fd()));
        reset_connections();
        assert!(file.protocol.peer_address().is_ok());
        assert_eq!(file.read(&mut Sink::kernel(&mut bytes), 0), Err(Errno::EAGAIN));
        exchange(client, file);
    }

    #[test]
    fn one_that_was_closed_does_not_go_on_and_the_host_is_told() {
        let sandbox = Sandbox::new();
        let network = &kernel().net;
        let (_listener, file) = accepted(network);
        drop(file);
        assert_eq!(closed(&sandbox), 7);
        *kernel().generation.borrow_mut() += 1;
        let (mut client, ours) = UnixStream::pair().unwrap();
        network.clients.go_on(7, HostFd::new(ours.into_raw_fd()));
        assert_eq!(closed(&sandbox), 7);
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_client_is_accepted_and_served_over_the_host_socket() {
        let _sandbox = Sandbox::new();
        let network = &kernel().net;
        let listener = listening(network, 8080);
        assert!(network.waits_for_clients(8080));
        let (client, ours) = UnixStream::pair().unwrap();
        network.deliver(&connection(), HostFd::new(ours.into_raw_fd()));
        assert!(listener.poll().contains(Events::IN));
        assert!(!network.waits_for_clients(8080));

        let accepted = listener.protocol.accept().unwrap();
        let SocketAddress::V4(peer) = accepted.peer_address().unwrap() else { panic!() };
        assert_eq!((peer.ip.to_string(), peer.port), ("10.0.0.1".to_string(), 5000));
        exchange(client, Socket::new(accepted));
    }

    /// As servers listen that have a socket for each family.
    #[test]
    fn a_client_gets_the_listener_of_its_family_and_is_waited_for() {
        let _sandbox = Sandbox::new();
        let network = &kernel().net;
        let only_v6 = network.tcp.socket(AF_INET6, &network.inodes);
        only_v6.common().options.borrow_mut().set_value(options::V6ONLY, 1);
        only_v6.bind(&SocketAddress::V6(Endpoint::wildcard(AF_INET6).with_port(8080))).unwrap();
        only_v6.listen(5).unwrap();
        let only_v6 = Socket::new(only_v6);
        let v4 = listening(network, 8080);
        assert!(network.waits_for_clients(8080));
        let (_client, ours) = UnixStream::pair().unwrap();
        network.deliver(&connection(), HostFd::new(ours.into_raw_fd()));
        assert!(v4.poll().contains(Events::IN) && !only_v6.poll().contains(Events::IN));
        assert!(!network.waits_for_clients(8080));
        drop(v4.protocol.accept().unwrap());
        assert!(network.waits_for_clients(8080));
        // Programs that listen for the other family only have clients all the same.
        drop(v4);
        let (_client, ours) = UnixStream::pair().unwrap();
        network.deliver(&connection(), HostFd::new(ours.into_raw_fd()));
        assert!(only_v6.poll().contains(Events::IN));
    }

    #[test]
    fn who_comes_before_the_first_listener_waits_for_it() {
        let _sandbox = Sandbox::new();
        let network = &kernel().net;
        let (_client, ours) = UnixStream::pair().unwrap();
        network.deliver(&connection(), HostFd::new(ours.into_raw_fd()));
        // Listening elsewhere changes nothing.
        let _other = listening(network, 8081);
        network.listening(8080);
        let listener = listening(network, 8080);
        network.listening(8080);
        assert!(!network.waits_for_clients(8080), "somebody waits to be accepted");
        listener.protocol.accept().unwrap();
        assert!(network.waits_for_clients(8080));
    }

    #[test]
    fn clients_of_several_ports_wait_for_their_own() {
        let sandbox = Sandbox::new();
        let network = &kernel().net;
        let mut second = connection();
        (second.id, second.local.port) = (8, 9090);
        let clients = [connection(), second].map(|connection| {
            let (client, ours) = UnixStream::pair().unwrap();
            network.deliver(&connection, HostFd::new(ours.into_raw_fd()));
            client
        });
        let listener = listening(network, 9090);
        network.listening(8080);
        assert!(!network.waits_for_clients(9090), "somebody waits to be accepted");
        listener.protocol.accept().unwrap();
        assert!(!network.early.borrow_mut().listened.contains(&8080));
        drop(listening(network, 8080));
        assert_eq!(network.early.borrow_mut().waiting.len(), 1);
        // Whoever comes when nobody listens any more is turned away.
        drop(listener);
        let (_client, ours) = UnixStream::pair().unwrap();
        network.deliver(&second, HostFd::new(ours.into_raw_fd()));
        assert_eq!(closed(&sandbox), 8);
        drop(clients);
    }

    #[test]
    fn without_a_listener_the_client_is_turned_away() {
        let sandbox = Sandbox::new();
        let network = &kernel().net;
        drop(listening(network, 8080));
        network.early.borrow_mut().listened.push(8080);
        let (mut client, ours) = UnixStream::pair().unwrap();
        network.deliver(&connection(), HostFd::new(ours.into_raw_fd()));
        assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
        assert_eq!(closed(&sandbox), 7);
    }

    #[test]
    fn a_client_that_sends_datagrams_gets_answers() {
        use crate::net::socket::{MessageFlags, Outgoing};
        let _sandbox = Sandbox::new();
        let network = &kernel().net;
        let (client, ours) = std::os::unix::net::UnixDatagram::pair().unwrap();
        client.send(b"question").unwrap();
        network.deliver_datagrams(&connection(), HostFd::new(ours.into_raw_fd()));
        let socket = network.udp.socket(AF_INET, &network.inodes);
        socket.bind(&SocketAddress::V4(Endpoint::wildcard(AF_INET).with_port(8080))).unwrap();
        network.bound(8080);
        let mut bytes = [0; 16];
        let received = socket.receive(&mut Sink::kernel(&mut bytes), MessageFlags::empty());
        let received = received.unwrap();
        assert_eq!(&bytes[..received.bytes], b"question");
        let SocketAddress::V4(from) = received.from.clone().unwrap() else { panic!() };
        assert_eq!((from.ip.to_string(), from.port), ("10.0.0.1".to_string(), 5000));
        let mut back = Outgoing { to: received.from, ..Outgoing::default() };
        assert_eq!(socket.send(&mut Source::kernel(b"answer"), &mut back), Ok(6));
        let count = client.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..count], b"answer");
        // To others there is no way.
        let mut other = connection().peer;
        other.port += 1;
        back.to = Some(SocketAddress::V4(Endpoint::from_host(&other)));
        assert_eq!(socket.send(&mut Source::kernel(b"x"), &mut back), Err(Errno::ENETUNREACH));
    }

    #[test]
    fn closing_the_listener_closes_who_was_not_accepted() {
        let sandbox = Sandbox::new();
        let network = &kernel().net;
        let listener = listening(network, 8080);
        let (mut client, ours) = UnixStream::pair().unwrap();
        network.deliver(&connection(), HostFd::new(ours.into_raw_fd()));
        drop(listener);
        assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
        assert_eq!(closed(&sandbox), 7);
        assert!(!network.waits_for_clients(8080));
    }
}
