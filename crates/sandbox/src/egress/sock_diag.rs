//! What the host says of TCP sockets (sock_diag(7)): how many bytes one had when it was destroyed,
//! which the host tells by itself, and how many one that is open has so far, which it is asked for.
//!
//! Structures are those of linux/inet_diag.h and linux/tcp.h. None of it takes a capability.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytemuck::{Pod, Zeroable, bytes_of, pod_read_unaligned};
use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, getsockname, recv, sendto,
    socket_with, sockopt,
};

use super::traffic::EgressBytes;
use crate::sys;

/// `SOCK_DIAG_BY_FAMILY`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// `NLMSG_ERROR` (linux/netlink.h).
const NLMSG_ERROR: u16 = 2;
/// `NLM_F_REQUEST`.
const NLM_F_REQUEST: u16 = 1;
/// `INET_DIAG_INFO`, an attribute with a `struct tcp_info`.
const INET_DIAG_INFO: u16 = 2;
/// `NLA_TYPE_MASK`: the bits of an attribute's type without flags.
const NLA_TYPE_MASK: u16 = 0x3fff;
/// `IPPROTO_TCP`.
const TCP: u8 = 6;
/// The bit of `SKNLGRP_INET_TCP_DESTROY` (1) and `SKNLGRP_INET6_TCP_DESTROY` (3).
const DESTROYED: u32 = 1 << 0 | 1 << 2;
/// `struct nlmsghdr`.
const HEADER: usize = 16;
/// `struct inet_diag_msg`.
const MESSAGE: usize = 72;
/// Where `struct inet_diag_sockid` is in it, behind four numbers of a byte.
const ID: usize = 4;
/// Where `tcpi_bytes_acked` and `tcpi_bytes_received` are in `struct tcp_info`.
const BYTES_ACKED: usize = 120;
const BYTES_RECEIVED: usize = 128;
/// Enough for an answer or a notice, which is one socket with one attribute.
pub const MESSAGE_MAX: usize = 2048;
/// What the host may keep of notices that nobody has read, if it lets us
/// (`net.core.rmem_max`). A notice takes some 1.5 KiB there.
const UNREAD_MAX: usize = 4 << 20;

/// A TCP socket of this network namespace, as the host is asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SocketId {
    /// `struct inet_diag_sockid`: ports and addresses in the order of the network.
    local_port: [u8; 2],
    remote_port: [u8; 2],
    local: [u8; 16],
    remote: [u8; 16],
    interface: u32,
    cookie: [u32; 2],
    /// `AF_INET` or `AF_INET6`.
    family: u32,
}

/// Bytes of its `struct inet_diag_sockid`.
const ID_LEN: usize = size_of::<SocketId>() - size_of::<u32>();

const _: () = assert!(ID_LEN == 48);

impl SocketId {
    /// That of a socket which is connected to `remote`, or is about to be.
    ///
    /// # Errors
    /// The host's.
    pub fn of(socket: impl AsFd, remote: SocketAddr) -> Result<Self, Errno> {
        let cookie = sockopt::socket_cookie(&socket)?;
        let local = SocketAddr::try_from(getsockname(&socket)?)?;
        let interface = match remote {
            SocketAddr::V6(remote) => remote.scope_id(),
            SocketAddr::V4(_) => 0,
        };
        let family = if remote.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        Ok(Self {
            local_port: local.port().to_be_bytes(),
            remote_port: remote.port().to_be_bytes(),
            local: address_bytes(local.ip()),
            remote: address_bytes(remote.ip()),
            interface,
            cookie: [cookie as u32, (cookie >> 32) as u32],
            family: u32::from(family.as_raw()),
        })
    }

    /// Tells the socket from all others since the host was booted (socket(7), `SO_COOKIE`).
    pub fn cookie(&self) -> u64 {
        u64::from(self.cookie[0]) | u64::from(self.cookie[1]) << 32
    }

    #[cfg(test)]
    pub fn set_cookie(&mut self, cookie: u64) {
        self.cookie = [cookie as u32, (cookie >> 32) as u32];
    }

    /// The socket's own port.
    pub fn local_port(&self) -> u16 {
        u16::from_be_bytes(self.local_port)
    }
}

/// The address as the host writes it: of IPv4 the first four bytes.
fn address_bytes(ip: IpAddr) -> [u8; 16] {
    let mut bytes = [0; 16];
    match ip {
        IpAddr::V4(ip) => bytes[..4].copy_from_slice(&ip.octets()),
        IpAddr::V6(ip) => bytes = ip.octets(),
    }
    bytes
}

/// What the host has said of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    pub cookie: u64,
    /// Missing of one that only waits for late packets (`TIME_WAIT`).
    pub bytes: Option<EgressBytes>,
}

/// Reads an answer or a notice.
///
/// # Errors
/// The answer is an error; `EBADMSG`: it is none of both.
pub fn read_message(message: &[u8]) -> Result<Said, Errno> {
    let kind = u16_at(message, 4).ok_or(Errno::BADMSG)?;
    if kind == NLMSG_ERROR {
        let code = message.get(HEADER..HEADER + 4).ok_or(Errno::BADMSG)?;
        let code = i32::from_ne_bytes(code.try_into().expect("four bytes"));
        return Err(Errno::from_raw_os_error(code.saturating_neg()));
    }
    let body = message.get(HEADER..HEADER + MESSAGE).filter(|_| kind == SOCK_DIAG_BY_FAMILY);
    let body = body.ok_or(Errno::BADMSG)?;
    // The last 8 bytes of the id.
    let cookie = pod_read_unaligned::<[u32; 2]>(&body[ID + ID_LEN - 8..ID + ID_LEN]);
    let cookie = u64::from(cookie[0]) | u64::from(cookie[1]) << 32;
    let bytes = attribute(&message[HEADER + MESSAGE..], INET_DIAG_INFO).and_then(bytes_of_info);
    Ok(Said { cookie, bytes })
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at + 2)?;
    Some(u16::from_ne_bytes(bytes.try_into().expect("two bytes")))
}

/// The content of the first attribute of a kind (`struct nlattr`, netlink(7)).
fn attribute(mut rest: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let len = usize::from(u16_at(rest, 0)?);
        let kind = u16_at(rest, 2)? & NLA_TYPE_MASK;
        let content = rest.get(4..len)?;
        if kind == wanted {
            return Some(content);
        }
        rest = rest.get(len.next_multiple_of(4)..)?;
    }
}

/// Bytes of a connection as its `struct tcp_info` has them. The start of a connection counts as a
/// byte that was sent there (RFC 793, SYN), and does not here. Its end does in both directions.
fn bytes_of_info(info: &[u8]) -> Option<EgressBytes> {
    let number = |at: usize| {
        let bytes = info.get(at..at + 8)?;
        Some(u64::from_ne_bytes(bytes.try_into().expect("eight bytes")))
    };
    Some(EgressBytes {
        sent: number(BYTES_ACKED)?.saturating_sub(1),
        received: number(BYTES_RECEIVED)?,
    })
}

fn open() -> Result<OwnedFd, Errno> {
    let (family, protocol) = (AddressFamily::NETLINK, Some(netlink::SOCK_DIAG));
    socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, protocol)
}

/// Asks the host for sockets.
#[derive(Debug)]
pub struct Asker(OwnedFd);

impl Asker {
    /// # Errors
    /// The host has no such sockets, or forbids them.
    pub fn open() -> Result<Self, Errno> {
        open().map(Self)
    }

    /// What the host says of a socket. Takes some microseconds.
    ///
    /// # Errors
    /// `ENOENT`: it is neither connected nor about to be. Others are the host's.
    pub fn ask(&self, id: &SocketId) -> Result<Said, Errno> {
        let to = SocketAddrNetlink::new(0, 0);
        sendto(&self.0, &request(id), SendFlags::empty(), &to)?;
        let mut answer = [0; MESSAGE_MAX];
        // The host kernel answers before sendto(2) returns.
        let (len, _) = recv(&self.0, &mut answer, RecvFlags::DONTWAIT)?;
        let said = read_message(&answer[..len])?;
        if said.cookie == id.cookie() { Ok(said) } else { Err(Errno::BADMSG) }
    }
}

/// `struct inet_diag_req_v2` for one socket, with its `struct tcp_info`.
fn request(id: &SocketId) -> Vec<u8> {
    const LEN: usize = HEADER + 8 + ID_LEN;
    let mut request = Vec::with_capacity(LEN);
    request.extend((LEN as u32).to_ne_bytes());
    request.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request.extend(NLM_F_REQUEST.to_ne_bytes());
    // Sequence number and sender, of whom there is one.
    request.extend([0; 8]);
    let family = id.family as u8;
    request.extend([family, TCP, 1 << (INET_DIAG_INFO - 1), 0]);
    // Sockets in all states.
    request.extend(u32::MAX.to_ne_bytes());
    request.extend(&bytes_of(id)[..ID_LEN]);
    request
}

/// Hears from the host of TCP sockets that were destroyed, of all that have one of some ports.
#[derive(Debug)]
pub struct Notices(OwnedFd);

/// Ports of sockets that are heard of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    pub first: u16,
    pub last: u16,
}

impl PortRange {
    /// No port: no socket has number 0.
    pub const NONE: Self = Self { first: 0, last: 0 };
    /// It grows in steps, so that it seldom does.
    const STEP: u16 = 4096;

    /// The same with this port; `None`: it has it already.
    pub fn with(self, port: u16) -> Option<Self> {
        if (self.first..=self.last).contains(&port) {
            return None;
        }
        let first = port / Self::STEP * Self::STEP;
        let last = first + (Self::STEP - 1);
        Some(match self {
            Self::NONE => Self { first, last },
            Self { first: own_first, last: own_last } => {
                Self { first: own_first.min(first), last: own_last.max(last) }
            }
        })
    }
}

impl Notices {
    /// Hears of no port yet.
    ///
    /// # Errors
    /// The host has no such sockets, or forbids them.
    pub fn open() -> Result<Self, Errno> {
        let notices = Self(open()?);
        // The host takes what it allows.
        let _ = sockopt::set_socket_recv_buffer_size(&notices.0, UNREAD_MAX);
        notices.hear_of(PortRange::NONE)?;
        bind(&notices.0, &SocketAddrNetlink::new(0, DESTROYED))?;
        Ok(notices)
    }

    /// Has the host drop notices of sockets with other ports before they take room: those of the
    /// host's servers, and of clients that it has given other ports.
    ///
    /// # Errors
    /// The host's.
    pub fn hear_of(&self, ports: PortRange) -> Result<(), Errno> {
        sys::attach_filter(self.0.as_fd(), &filter(ports))
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }

    /// The next notice, as it came; waits for one.
    ///
    /// # Errors
    /// `ENOBUFS`: some were lost. Others are the host's.
    pub fn receive<'a>(&self, buffer: &'a mut [u8; MESSAGE_MAX]) -> Result<&'a [u8], Errno> {
        // Only the host kernel may send to such a socket, and who has `CAP_NET_ADMIN` (netlink(7)).
        let (len, _) = recv(&self.0, &mut buffer[..], RecvFlags::empty())?;
        Ok(&buffer[..len.min(MESSAGE_MAX)])
    }
}

impl AsFd for Notices {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A program of the classic BPF (bpf(2), linux/filter.h): passes messages whose socket has one of
/// these ports. It sees the message from its header on.
fn filter(ports: PortRange) -> [libc::sock_filter; 5] {
    let step = |code: u32, jump_true, jump_false, value: u32| libc::sock_filter {
        code: code as u16,
        jt: jump_true,
        jf: jump_false,
        k: value,
    };
    let load_port = libc::BPF_LD | libc::BPF_H | libc::BPF_ABS;
    let jump = libc::BPF_JMP | libc::BPF_K;
    [
        step(load_port, 0, 0, (HEADER + ID) as u32),
        step(jump | libc::BPF_JGE, 0, 2, ports.first.into()),
        step(jump | libc::BPF_JGT, 1, 0, ports.last.into()),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, u32::MAX),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, 0),
    ]
}

/// Whether the host counts bytes of sockets and tells them: tries it with a connection to itself.
///
/// # Errors
/// Why not.
pub fn check() -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    let stream = TcpStream::connect(address)?;
    let id = SocketId::of(&stream, address)?;
    drop(Notices::open()?);
    match Asker::open()?.ask(&id) {
        Ok(Said { bytes: Some(_), .. }) => Ok(()),
        Ok(_) | Err(Errno::NOENT) => {
            Err(io::Error::other("the host says nothing of a connection to itself"))
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    /// A message of the host about a socket, with attributes.
    fn message(cookie: u64, attributes: &[(u16, Vec<u8>)]) -> Vec<u8> {
        let mut message = vec![0; HEADER + MESSAGE];
        message[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        let at = HEADER + ID + ID_LEN - 8;
        message[at..at + 4].copy_from_slice(&(cookie as u32).to_ne_bytes());
        message[at + 4..at + 8].copy_from_slice(&((cookie >> 32) as u32).to_ne_bytes());
        for (kind, content) in attributes {
            message.extend((content.len() as u16 + 4).to_ne_bytes());
            message.extend(kind.to_ne_bytes());
            message.extend(content);
            message.resize(message.len().next_multiple_of(4), 0);
        }
        message
    }

    fn info(acked: u64, received: u64) -> Vec<u8> {
        let mut info = vec![0; 232];
        info[BYTES_ACKED..][..8].copy_from_slice(&acked.to_ne_bytes());
        info[BYTES_RECEIVED..][..8].copy_from_slice(&received.to_ne_bytes());
        info
    }

    #[test]
    fn bytes_stand_in_the_attribute_that_has_them() {
        let attributes = [(8, vec![1]), (INET_DIAG_INFO, info(1001, 77))];
        let said = read_message(&message(0x1_0000_0002, &attributes)).unwrap();
        assert_eq!(said.cookie, 0x1_0000_0002);
        assert_eq!(said.bytes, Some(EgressBytes { sent: 1000, received: 77 }));
        assert_eq!(read_message(&message(7, &[(8, vec![1])])).unwrap().bytes, None);
    }

    #[test]
    fn messages_that_are_cut_or_no_answers_are_refused() {
        let whole = message(7, &[(INET_DIAG_INFO, info(1, 1))]);
        for len in 0..HEADER + MESSAGE {
            assert_eq!(read_message(&whole[..len]), Err(Errno::BADMSG), "{len}");
        }
        // A piece of an attribute is none, and one without a length ends the search.
        for len in HEADER + MESSAGE..whole.len() {
            assert_eq!(read_message(&whole[..len]).unwrap().bytes, None, "{len}");
        }
        let mut empty = message(7, &[(8, vec![])]);
        empty[HEADER + MESSAGE] = 0;
        assert_eq!(read_message(&empty).unwrap().bytes, None);
        let short = message(7, &[(INET_DIAG_INFO, vec![0; BYTES_RECEIVED])]);
        assert_eq!(read_message(&short).unwrap().bytes, None);
        let mut error = vec![0; HEADER + 4];
        error[4..6].copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
        error[HEADER..].copy_from_slice(&(-2_i32).to_ne_bytes());
        assert_eq!(read_message(&error), Err(Errno::NOENT));
    }

    #[test]
    fn ports_are_heard_of_in_steps() {
        let some = PortRange::NONE.with(33000).unwrap();
        assert_eq!(some, PortRange { first: 32768, last: 36863 });
        assert_eq!(some.with(32768), None);
        assert_eq!(some.with(36864), Some(PortRange { first: 32768, last: 40959 }));
        assert_eq!(some.with(65535), Some(PortRange { first: 32768, last: 65535 }));
        assert_eq!(some.with(1), Some(PortRange { first: 0, last: 36863 }));
    }

    /// Sockets with other ports are destroyed first, so that their notices would come first.
    #[test]
    fn other_ports_are_not_heard_of() {
        if let Err(error) = check() {
            eprintln!("skipped: {error}");
            return;
        }
        let notices = Notices::open().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let connect = || (TcpStream::connect(address).unwrap(), listener.accept().unwrap());
        let others: Vec<_> = (0..50).map(|_| connect()).collect();
        let own = connect();
        let id = SocketId::of(&own.0, address).unwrap();
        let port = id.local_port();
        notices.hear_of(PortRange { first: port, last: port }).unwrap();
        drop(others);
        drop(own);
        let mut buffer = [0; MESSAGE_MAX];
        let said = read_message(notices.receive(&mut buffer).unwrap()).unwrap();
        assert_eq!(said.cookie, id.cookie());
    }

    /// The host's own words, if it has any here.
    #[test]
    fn the_host_tells_the_bytes_of_open_sockets_and_of_destroyed_ones() {
        if let Err(error) = check() {
            eprintln!("skipped: {error}");
            return;
        }
        let (notices, asker) = (Notices::open().unwrap(), Asker::open().unwrap());
        for ip in ["127.0.0.1", "::1"] {
            let Ok(listener) = TcpListener::bind((ip, 0)) else { continue };
            let address = listener.local_addr().unwrap();
            let mut stream = TcpStream::connect(address).unwrap();
            let (mut peer, _) = listener.accept().unwrap();
            let id = SocketId::of(&stream, address).unwrap();
            notices.hear_of(PortRange::NONE.with(id.local_port()).unwrap()).unwrap();
            stream.write_all(&[1; 1000]).unwrap();
            peer.write_all(&[2; 300]).unwrap();
            peer.read_exact(&mut [0; 1000]).unwrap();
            stream.read_exact(&mut [0; 300]).unwrap();
            let said = asker.ask(&id).unwrap();
            assert_eq!(said.cookie, id.cookie());
            assert_eq!(said.bytes, Some(EgressBytes { sent: 1000, received: 300 }));
            drop(stream);
            drop(peer);
            let mut buffer = [0; MESSAGE_MAX];
            let end = std::iter::repeat_with(|| {
                read_message(notices.receive(&mut buffer).unwrap()).unwrap()
            });
            let own = end.into_iter().find(|said| said.cookie == id.cookie()).unwrap();
            let bytes = own.bytes.unwrap();
            assert!((1000..=1001).contains(&bytes.sent), "{bytes:?}");
            assert!((300..=301).contains(&bytes.received), "{bytes:?}");
            assert!(
                asker.ask(&id).is_ok_and(|said| said.bytes.is_none()) || asker.ask(&id).is_err()
            );
        }
    }
}
