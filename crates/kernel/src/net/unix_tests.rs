//! Tests of Unix sockets.

use super::*;
use crate::fs::file::{File, OpenFile, OpenFlags};
use crate::fs::pipe::Pipe;
use crate::net::socket::{Ancillary, Socket};
use crate::net::unix_datagram::UnixDatagram;
use crate::testing::Sandbox;

fn world() -> (Arc<Names>, Arc<InodeNumbers>) {
    (Arc::new(Names::new()), Arc::new(InodeNumbers::new()))
}

fn pair(kind: SocketType) -> (Arc<UnixStream>, Arc<UnixStream>) {
    let (names, inodes) = world();
    UnixStream::pair(&names, &inodes, kind)
}

fn hidden(name: &[u8]) -> SocketAddress {
    SocketAddress::Unix(UnixName::Abstract(name.into()))
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

const UNIX_OUT: Events = OUT.union(Events::WRBAND);

#[test]
fn a_closed_peer_breaks_the_pipe_at_once() {
    let _sandbox = Sandbox::new();
    let (a, b) = pair(SocketType::Stream);
    assert_eq!(a.poll(), UNIX_OUT);
    b.close();
    assert_eq!(a.poll(), IN | UNIX_OUT | Events::HUP | Events::RDHUP);
    assert_eq!(send(&*a, b"x"), Err(Errno::EPIPE));
    assert_eq!(receive(&*a, 1).unwrap(), b"");

    let (a, b) = pair(SocketType::Stream);
    send(&*a, b"unread").unwrap();
    b.close();
    assert_eq!(a.poll(), IN | UNIX_OUT | Events::HUP | Events::RDHUP | Events::ERR);
    assert_eq!(receive(&*a, 1), Err(Errno::ECONNRESET));
    assert_eq!(receive(&*a, 1).unwrap(), b"");
}

#[test]
fn shutting_the_reader_stops_the_writer() {
    let _sandbox = Sandbox::new();
    let (a, b) = pair(SocketType::Stream);
    a.shutdown(ShutdownHow::Read).unwrap();
    assert_eq!(a.poll(), IN | UNIX_OUT | Events::RDHUP);
    assert_eq!(b.poll(), UNIX_OUT);
    assert_eq!(send(&*b, b"q"), Err(Errno::EPIPE));
}

#[test]
fn packets_keep_their_bounds() {
    let _sandbox = Sandbox::new();
    let (a, b) = pair(SocketType::SequencedPacket);
    send(&*a, b"first").unwrap();
    send(&*a, b"second").unwrap();
    assert_eq!(b.readable_bytes(), Ok(5));
    assert_eq!(receive(&*b, 3).unwrap(), b"fir");
    assert_eq!(receive(&*b, 9).unwrap(), b"second");
    assert_eq!(receive(&*b, 9), Err(Errno::EAGAIN));
    let mut sent = 0;
    while send(&*a, &[0; 1000]).is_ok() {
        sent += 1;
    }
    assert_eq!(sent, 93);
    assert_eq!(send(&*a, &vec![0; 300_000]), Err(Errno::EMSGSIZE));
}

#[test]
fn descriptors_travel_with_their_bytes() {
    let _sandbox = Sandbox::new();
    let (a, b) = pair(SocketType::Stream);
    let (reader, writer) = Pipe::pair(1);
    let file = OpenFile::new(reader, OpenFlags::empty(), None);
    send(&*a, b"before").unwrap();
    let ancillary = Ancillary { files: vec![file].into(), credentials: None };
    let mut message = Outgoing { ancillary, ..Outgoing::default() };
    assert_eq!(a.send(&mut Source::kernel(b"with"), &mut message), Ok(4));
    send(&*a, b"after").unwrap();

    // A receive stops before and behind the bytes that carry descriptors.
    let mut bytes = [0; 100];
    let first = b.receive(&mut Sink::kernel(&mut bytes), MessageFlags::empty()).unwrap();
    assert_eq!((first.bytes, first.ancillary.files.len()), (6, 0));
    let second = b.receive(&mut Sink::kernel(&mut bytes), MessageFlags::empty()).unwrap();
    assert_eq!((second.bytes, second.ancillary.files.len()), (4, 1));
    assert_eq!(receive(&*b, 100).unwrap(), b"after");

    writer.write(&mut Source::kernel(b"alive"), 0).unwrap();
    let mut bytes = [0; 9];
    assert_eq!(second.ancillary.files[0].file.read(&mut Sink::kernel(&mut bytes), 0), Ok(5));
}

#[test]
fn descriptors_that_nobody_received_are_closed() {
    let _sandbox = Sandbox::new();
    let (a, b) = pair(SocketType::Stream);
    let (reader, writer) = Pipe::pair(1);
    let ancillary = Ancillary {
        files: vec![OpenFile::new(reader, OpenFlags::empty(), None)].into(),
        credentials: None,
    };
    a.send(&mut Source::kernel(b"x"), &mut Outgoing { ancillary, ..Outgoing::default() }).unwrap();
    assert!(!writer.poll().contains(Events::ERR));
    b.close();
    assert!(writer.poll().contains(Events::ERR));
}

#[test]
fn a_socket_may_carry_itself() {
    let _sandbox = Sandbox::new();
    let (a, b) = pair(SocketType::Stream);
    let b_file = OpenFile::new(Socket::new(b.clone()), OpenFlags::RDWR, None);
    let ancillary = Ancillary { files: vec![b_file].into(), credentials: None };
    a.send(&mut Source::kernel(b"x"), &mut Outgoing { ancillary, ..Outgoing::default() }).unwrap();
    let mut bytes = [0; 1];
    let received = b.receive(&mut Sink::kernel(&mut bytes), MessageFlags::empty()).unwrap();
    drop(received);
    assert!(a.poll().contains(Events::HUP));
}

#[test]
fn abstract_names_connect() {
    let _sandbox = Sandbox::new();
    let (names, inodes) = world();
    let server = UnixStream::new(&names, &inodes, SocketType::Stream);
    assert_eq!(server.listen(1), Err(Errno::EINVAL));
    server.bind(&hidden(b"server")).unwrap();
    let client = UnixStream::new(&names, &inodes, SocketType::Stream);
    assert_eq!(client.bind(&hidden(b"server")), Err(Errno::EADDRINUSE));
    assert_eq!(client.connect(&hidden(b"server"), Blocking::Yes), Err(Errno::ECONNREFUSED));
    server.listen(0).unwrap();
    assert_eq!(server.poll(), Events::empty());
    client.connect(&hidden(b"server"), Blocking::Yes).unwrap();
    assert_eq!(client.connect(&hidden(b"server"), Blocking::Yes), Err(Errno::EISCONN));
    assert_eq!(server.poll(), IN);
    let late = UnixStream::new(&names, &inodes, SocketType::Stream);
    assert_eq!(late.connect(&hidden(b"server"), Blocking::No), Err(Errno::EAGAIN));
    let accepted = server.accept().unwrap();
    assert_eq!(late.connect(&hidden(b"server"), Blocking::No), Ok(()));
    send(&*client, b"hi").unwrap();
    assert_eq!(receive(&*accepted, 9).unwrap(), b"hi");
    assert_eq!(client.peer_address(), Ok(hidden(b"server")));
    assert_eq!(accepted.local_address(), hidden(b"server"));
    assert_eq!(accepted.peer_address(), Ok(SocketAddress::Unix(UnixName::Unnamed)));
    let packets = UnixStream::new(&names, &inodes, SocketType::SequencedPacket);
    assert_eq!(packets.connect(&hidden(b"server"), Blocking::Yes), Err(Errno::EPROTOTYPE));
    server.close();
    assert_eq!(receive(&*late, 1), Err(Errno::ECONNRESET));
    assert_eq!(packets.connect(&hidden(b"server"), Blocking::Yes), Err(Errno::ECONNREFUSED));
}

#[test]
fn autobind_chooses_a_free_name() {
    let (names, inodes) = world();
    let unnamed = SocketAddress::Unix(UnixName::Unnamed);
    let a = UnixStream::new(&names, &inodes, SocketType::Stream);
    let b = UnixStream::new(&names, &inodes, SocketType::Stream);
    a.bind(&unnamed).unwrap();
    b.bind(&unnamed).unwrap();
    assert_ne!(a.local_address(), b.local_address());
    let name = a.local_address();
    assert_eq!(a.bind(&unnamed), Ok(()));
    assert_eq!(a.local_address(), name);
}

#[test]
fn credentials_are_passed_to_who_asks() {
    let _sandbox = Sandbox::new();
    let (a, b) = pair(SocketType::Stream);
    let sender = PeerCredentials { pid: 7, uid: 1, gid: 2 };
    let message = || Outgoing { sender: Some(sender), ..Outgoing::default() };
    a.send(&mut Source::kernel(b"x"), &mut message()).unwrap();
    let mut bytes = [0; 9];
    let received = b.receive(&mut Sink::kernel(&mut bytes), MessageFlags::empty()).unwrap();
    assert_eq!(received.ancillary.credentials, None);
    b.ends().unwrap().0.set_wants_credentials(End::Second, true);
    a.send(&mut Source::kernel(b"x"), &mut message()).unwrap();
    a.send(&mut Source::kernel(b"y"), &mut message()).unwrap();
    let received = b.receive(&mut Sink::kernel(&mut bytes), MessageFlags::empty()).unwrap();
    assert_eq!((received.bytes, received.ancillary.credentials), (2, Some(sender)));
}

#[test]
fn datagram_pairs_keep_bounds_and_push_back() {
    let _sandbox = Sandbox::new();
    let (names, inodes) = world();
    let (a, b) = UnixDatagram::pair(&names, &inodes);
    send(&*a, b"first").unwrap();
    send(&*a, b"").unwrap();
    assert_eq!(receive(&*b, 3).unwrap(), b"fir");
    assert_eq!(receive(&*b, 3).unwrap(), b"");
    assert_eq!(receive(&*b, 3), Err(Errno::EAGAIN));
    let mut sent = 0;
    while send(&*a, &[0; 1000]).is_ok() {
        sent += 1;
    }
    assert_eq!(sent, 93);
    assert_eq!(a.poll(), Events::empty());
    receive(&*b, 1).unwrap();
    assert_eq!(a.poll(), UNIX_OUT);
    b.close();
    assert_eq!(send(&*a, b"x"), Err(Errno::ECONNREFUSED));
    assert_eq!(send(&*a, b"x"), Err(Errno::ENOTCONN));
}

#[test]
fn datagrams_find_names() {
    let (names, inodes) = world();
    let server = UnixDatagram::new(&names, &inodes);
    server.bind(&hidden(b"log")).unwrap();
    let client = UnixDatagram::new(&names, &inodes);
    client.bind(&hidden(b"client")).unwrap();
    let mut message = Outgoing { to: Some(hidden(b"log")), ..Outgoing::default() };
    client.send(&mut Source::kernel(b"line"), &mut message).unwrap();
    let mut bytes = [0; 9];
    let received = server.receive(&mut Sink::kernel(&mut bytes), MessageFlags::empty()).unwrap();
    assert_eq!(received.from, Some(hidden(b"client")));
    // A socket that is connected elsewhere takes nothing from others.
    client.connect(&hidden(b"log"), Blocking::Yes).unwrap();
    let third = UnixDatagram::new(&names, &inodes);
    assert_eq!(third.connect(&hidden(b"client"), Blocking::Yes), Err(Errno::EPERM));
    // Eleven wait at most, from those it is not connected to.
    let mut sent = 0;
    while send(&*client, b"x").is_ok() {
        sent += 1;
    }
    assert_eq!(sent, 11);
}
