//! Tests of TCP over loopback.

use super::*;
use crate::net::address::{AF_INET, AF_INET6};
use crate::net::socket::Socket;
use crate::testing::Sandbox;
use std::net::{IpAddr, Ipv4Addr};

struct World {
    network: Arc<TcpNetwork>,
    inodes: Arc<InodeNumbers>,
}

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn v4(port: u16) -> SocketAddress {
    SocketAddress::V4(Endpoint { ip: LOCALHOST, port })
}

impl World {
    fn new() -> Self {
        Self { network: Arc::new(TcpNetwork::new()), inodes: Arc::new(InodeNumbers::new()) }
    }

    fn socket(&self) -> Arc<TcpSocket> {
        self.network.socket(AF_INET, &self.inodes)
    }

    fn listener(&self, port: u16, backlog: i32) -> Arc<TcpSocket> {
        let socket = self.socket();
        socket.bind(&v4(port)).unwrap();
        socket.listen(backlog).unwrap();
        socket
    }

    fn connected(&self) -> (Arc<TcpSocket>, Arc<dyn Protocol>) {
        let listener = self.listener(0, 1);
        let client = self.socket();
        client.connect(&listener.local_address(), Blocking::Yes).unwrap();
        (client, listener.accept().unwrap())
    }
}

fn send(socket: &dyn Protocol, bytes: &[u8]) -> Result<usize> {
    socket.send(&mut Source::kernel(bytes), &mut Outgoing::default())
}

fn receive(socket: &dyn Protocol, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let received = socket.receive(&mut Sink::kernel(&mut bytes), MessageFlags::empty())?;
    bytes.truncate(received.bytes);
    Ok(bytes)
}

#[test]
fn data_flows_both_ways() {
    let _sandbox = Sandbox::new();
    let world = World::new();
    let (client, server) = world.connected();
    assert_eq!(receive(&*server, 5), Err(Errno::EAGAIN));
    assert_eq!(send(&*client, b"hello"), Ok(5));
    assert_eq!(server.readable_bytes(), Ok(5));
    assert_eq!(client.unsent_bytes(), 5);
    assert_eq!(receive(&*server, 2).unwrap(), b"he");
    assert_eq!(receive(&*server, 9).unwrap(), b"llo");
    assert_eq!(send(&*server, b"hi"), Ok(2));
    assert_eq!(receive(&*client, 9).unwrap(), b"hi");
    assert_eq!(client.peer_address(), Ok(server.local_address()));
    assert_eq!(server.peer_address(), Ok(client.local_address()));
    assert_ne!(client.local_address(), server.local_address());
}

#[test]
fn a_half_closed_connection_still_carries_the_other_way() {
    let _sandbox = Sandbox::new();
    let world = World::new();
    let (client, server) = world.connected();
    send(&*client, b"last").unwrap();
    client.shutdown(ShutdownHow::Write).unwrap();
    assert_eq!(send(&*client, b"x"), Err(Errno::EPIPE));
    assert!(server.poll().contains(IN | OUT | Events::RDHUP));
    assert!(!server.poll().contains(Events::HUP));
    assert_eq!(receive(&*server, 9).unwrap(), b"last");
    assert_eq!(receive(&*server, 9).unwrap(), b"");
    send(&*server, b"answer").unwrap();
    assert_eq!(receive(&*client, 9).unwrap(), b"answer");
    server.shutdown(ShutdownHow::Write).unwrap();
    assert!(client.poll().contains(Events::HUP | Events::RDHUP));
}

#[test]
fn a_send_after_the_peer_closed_is_answered_by_a_reset() {
    let world = World::new();
    let (client, server) = world.connected();
    client.close();
    assert_eq!(server.poll(), IN | OUT | Events::RDHUP);
    assert_eq!(send(&*server, b"x"), Ok(1));
    assert_eq!(server.poll(), IN | OUT | Events::RDHUP | Events::HUP | Events::ERR);
    assert_eq!(receive(&*server, 1).unwrap(), b"");
    assert_eq!(send(&*server, b"x"), Err(Errno::EPIPE));
    assert_eq!(server.poll(), IN | OUT | Events::RDHUP | Events::HUP);
}

#[test]
fn data_for_who_has_shut_down_both_halves_resets() {
    let world = World::new();
    let (client, server) = world.connected();
    client.shutdown(ShutdownHow::Both).unwrap();
    assert_eq!(send(&*server, b"x"), Ok(1));
    assert_eq!(receive(&*client, 1), Err(Errno::ECONNRESET));
    assert_eq!(receive(&*server, 1).unwrap(), b"");
    assert_eq!(send(&*server, b"x"), Err(Errno::EPIPE));
    assert_eq!(client.shutdown(ShutdownHow::Both), Err(Errno::ENOTCONN));
}

#[test]
fn closing_with_unread_data_resets() {
    let _sandbox = Sandbox::new();
    let world = World::new();
    let (client, server) = world.connected();
    send(&*server, b"unread").unwrap();
    send(&*client, b"d").unwrap();
    client.close();
    assert_eq!(server.poll(), IN | OUT | Events::RDHUP | Events::HUP | Events::ERR);
    assert_eq!(receive(&*server, 1).unwrap(), b"d");
    assert_eq!(receive(&*server, 1), Err(Errno::ECONNRESET));
    assert_eq!(receive(&*server, 1).unwrap(), b"");
    assert_eq!(send(&*server, b"x"), Err(Errno::EPIPE));
}

#[test]
fn a_zero_linger_resets() {
    let world = World::new();
    let (client, server) = world.connected();
    client.common().options.borrow_mut().linger = Some(0);
    client.close();
    assert_eq!(receive(&*server, 1), Err(Errno::ECONNRESET));
}

#[test]
fn full_buffers_push_back() {
    let _sandbox = Sandbox::new();
    let world = World::new();
    let (client, server) = world.connected();
    client.common().options.borrow_mut().send_buffer = Some(4608);
    client.options_changed();
    let limit = 4608 + RECEIVE_SHARE;
    assert_eq!(send(&*client, &vec![1; limit + 10]), Ok(limit));
    assert_eq!(send(&*client, b"x"), Err(Errno::EAGAIN));
    assert_eq!(client.poll(), Events::empty());
    assert_eq!(receive(&*server, limit / 2).unwrap().len(), limit / 2);
    assert_eq!(client.poll(), OUT);
}

#[test]
fn nobody_listens() {
    let _sandbox = Sandbox::new();
    let world = World::new();
    let client = world.socket();
    assert_eq!(client.connect(&v4(9), Blocking::Yes), Err(Errno::ECONNREFUSED));
    assert_eq!(client.poll(), OUT | Events::HUP);
    // Without waiting, the refusal comes later, and once.
    assert_eq!(client.connect(&v4(9), Blocking::No), Err(Errno::EINPROGRESS));
    assert_eq!(client.connect(&v4(9), Blocking::No), Err(Errno::ECONNREFUSED));
    assert_eq!(client.connect(&v4(9), Blocking::No), Err(Errno::EINPROGRESS));
    assert_eq!(client.poll(), IN | OUT | Events::RDHUP | Events::HUP | Events::ERR);
    assert_eq!(client.take_error(), Some(Errno::ECONNREFUSED));
    assert_eq!(client.take_error(), None);
    let far = SocketAddress::V4(Endpoint { ip: Ipv4Addr::new(192, 0, 2, 1).into(), port: 80 });
    assert_eq!(world.socket().connect(&far, Blocking::Yes), Err(Errno::ENETUNREACH));
    assert_eq!(world.socket().bind(&far), Err(Errno::EADDRNOTAVAIL));
}

#[test]
fn a_connect_without_waiting_is_announced_once() {
    let world = World::new();
    let listener = world.listener(8080, 1);
    let client = world.socket();
    assert_eq!(client.connect(&v4(8080), Blocking::No), Err(Errno::EINPROGRESS));
    assert_eq!(client.poll(), OUT);
    assert_eq!(client.take_error(), None);
    assert_eq!(client.connect(&v4(8080), Blocking::No), Ok(()));
    assert_eq!(client.connect(&v4(8080), Blocking::No), Err(Errno::EISCONN));
    assert_eq!(listener.poll(), IN);
    listener.accept().unwrap();
    assert_eq!(listener.poll(), Events::empty());
    assert_eq!(listener.accept().err(), Some(Errno::EAGAIN));
}

#[test]
fn a_full_accept_queue_makes_connects_wait() {
    let world = World::new();
    let listener = world.listener(8080, 0);
    let clients: Vec<_> = (0..3).map(|_| world.socket()).collect();
    assert_eq!(clients[0].connect(&v4(8080), Blocking::Yes), Ok(()));
    assert_eq!(clients[1].connect(&v4(8080), Blocking::Yes), Err(Errno::EINPROGRESS));
    assert_eq!(clients[1].finish_connect(), Err(Errno::EAGAIN));
    assert_eq!(clients[1].poll(), Events::empty());
    assert_eq!(clients[2].connect(&v4(8080), Blocking::Yes), Err(Errno::EINPROGRESS));
    listener.accept().unwrap();
    assert_eq!(clients[1].finish_connect(), Ok(()));
    assert_eq!(clients[2].finish_connect(), Err(Errno::EAGAIN));
    listener.close();
    assert_eq!(clients[2].finish_connect(), Err(Errno::ECONNREFUSED));
    // Never accepted: reset.
    assert_eq!(receive(&*clients[1], 1), Err(Errno::ECONNRESET));
}

#[test]
fn states_are_checked() {
    let world = World::new();
    let socket = world.socket();
    assert_eq!(receive(&*socket, 1), Err(Errno::ENOTCONN));
    assert_eq!(send(&*socket, b"x"), Err(Errno::EPIPE));
    assert_eq!(socket.accept().err(), Some(Errno::EINVAL));
    assert_eq!(socket.peer_address(), Err(Errno::ENOTCONN));
    assert_eq!(socket.shutdown(ShutdownHow::Both), Err(Errno::ENOTCONN));
    socket.bind(&v4(0)).unwrap();
    assert_eq!(socket.bind(&v4(0)), Err(Errno::EINVAL));
    socket.listen(1).unwrap();
    assert_eq!(socket.listen(5), Ok(()));
    assert_eq!(socket.connect(&v4(1), Blocking::Yes), Err(Errno::EISCONN));
}

#[test]
fn a_dual_stack_listener_sees_mapped_addresses() {
    let world = World::new();
    let listener = world.network.socket(AF_INET6, &world.inodes);
    listener.bind(&SocketAddress::V6(Endpoint::wildcard(AF_INET6).with_port(80))).unwrap();
    listener.listen(1).unwrap();
    let client = world.socket();
    client.connect(&v4(80), Blocking::Yes).unwrap();
    let accepted = listener.accept().unwrap();
    let SocketAddress::V6(peer) = accepted.peer_address().unwrap() else { panic!() };
    assert_eq!(peer.ip, LOCALHOST);
}

#[test]
fn closing_frees_the_port_and_the_sockets() {
    let world = World::new();
    let file = Socket::new(world.listener(8080, 1));
    let weak = Arc::downgrade(&file.protocol);
    drop(file);
    assert!(weak.upgrade().is_none());
    world.listener(8080, 1);
}

#[test]
fn peeking_leaves_the_data() {
    let _sandbox = Sandbox::new();
    let world = World::new();
    let (client, server) = world.connected();
    send(&*client, b"abc").unwrap();
    let mut bytes = [0; 2];
    server.receive(&mut Sink::kernel(&mut bytes), MessageFlags::PEEK).unwrap();
    assert_eq!(&bytes, b"ab");
    assert_eq!(receive(&*server, 9).unwrap(), b"abc");
}
