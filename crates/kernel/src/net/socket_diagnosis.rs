//! `NETLINK_SOCK_DIAG` (sock_diag(7)): tables of sockets as messages, with which ss(8) asks.
//!
//! A dump is written while it is read, as the tables in `/proc/net` are ([`super::socket_tables`]).

use alloc::vec::Vec;
use core::net::IpAddr;

use super::address::{AF_INET, AF_INET6, AF_UNIX, Endpoint, SocketAddress, UnixName};
use super::netlink_messages::{Answer, Header, Message, NLM_F_DUMP, NLM_F_MULTI, done};
use super::options;
use super::socket::Protocol;
use super::sockets::{ConnectionState, Found, Walk};
use super::tcp::IPPROTO_TCP;
use super::udp::{IPPROTO_UDP, IPPROTO_UDPLITE};
use crate::errno::{Errno, Result};

/// `SOCK_DIAG_BY_FAMILY`.
const BY_FAMILY: u16 = 20;
/// How much of a dump is one datagram, in bytes: what the buffers of those who ask have room for.
const PIECE: usize = 7 << 10;

/// Which sockets somebody asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// `struct inet_diag_req_v2`: of a family and a protocol; ports that are not 0 must be the socket's.
    Inet { family: u16, protocol: u32, local_port: u16, remote_port: u16 },
    /// `struct unix_diag_req`, with what is to be told of each (`UDIAG_SHOW_*`).
    Unix { show: u32 },
}

/// A dump that somebody reads.
pub struct Dump {
    header: Header,
    port: u32,
    wanted: Wanted,
    /// Bit n: sockets whose state has the number n.
    states: u32,
    walk: Walk,
}

/// What a request gets.
pub fn carry_out(header: &Header, body: &[u8], port: u32) -> Result<Answer> {
    if header.kind != BY_FAMILY {
        return Err(Errno::EINVAL);
    }
    let (wanted, states) = read_request(body)?;
    if header.flags & NLM_F_DUMP == 0 {
        // Of a single socket nobody is told.
        return Err(Errno::EOPNOTSUPP);
    }
    if !wanted.is_known() {
        // Linux says so at the end of a dump that it has begun.
        return Ok(Answer::Messages(alloc::vec![done(header, port, Err(Errno::ENOENT))]));
    }
    Ok(Answer::Dump(Dump { header: *header, port, wanted, states, walk: Walk::default() }))
}

/// Which sockets a request is about, and in which states. `ENOENT`: of this family nothing is told.
fn read_request(body: &[u8]) -> Result<(Wanted, u32)> {
    const INET_REQUEST: usize = 56;
    const UNIX_REQUEST: usize = 24;
    /// `AF_MAX`.
    const FAMILY_END: u16 = 46;
    let word = |at: usize| u32::from_ne_bytes([body[at], body[at + 1], body[at + 2], body[at + 3]]);
    let port = |at: usize| u16::from_be_bytes([body[at], body[at + 1]]);
    let &[family, protocol, ..] = body else { return Err(Errno::EINVAL) };
    let (family, protocol) = (u16::from(family), u32::from(protocol));
    match family {
        AF_INET | AF_INET6 if body.len() < INET_REQUEST => Err(Errno::EINVAL),
        AF_INET | AF_INET6 => {
            let (local_port, remote_port) = (port(8), port(10));
            Ok((Wanted::Inet { family, protocol, local_port, remote_port }, word(4)))
        }
        AF_UNIX if body.len() < UNIX_REQUEST => Err(Errno::EINVAL),
        AF_UNIX => Ok((Wanted::Unix { show: word(12) }, word(4))),
        FAMILY_END.. => Err(Errno::EINVAL),
        _ => Err(Errno::ENOENT),
    }
}

impl Wanted {
    /// Whether there are sockets of the protocol.
    fn is_known(self) -> bool {
        match self {
            Self::Inet { protocol, .. } => {
                [IPPROTO_TCP, IPPROTO_UDP, IPPROTO_UDPLITE].contains(&protocol)
            }
            Self::Unix { .. } => true,
        }
    }

    fn has(self, socket: &dyn Protocol) -> bool {
        let common = socket.common();
        match self {
            Self::Inet { family, protocol, .. } => {
                (common.family, common.protocol) == (family, protocol)
            }
            Self::Unix { .. } => common.family == AF_UNIX,
        }
    }
}

impl Dump {
    /// The next datagram, and whether it is the last one.
    pub fn next(&mut self) -> (Vec<u8>, bool) {
        let mut piece = Vec::new();
        while piece.len() < PIECE {
            let wanted = self.wanted;
            let Some(found) = self.walk.next(|socket| wanted.has(socket)) else {
                piece.extend(done(&self.header, self.port, Ok(())));
                return (piece, true);
            };
            if self.states & (1 << found.listed.state as u8) != 0 {
                piece.extend(self.message(&found).unwrap_or_default());
            }
        }
        (piece, false)
    }

    fn message(&self, found: &Found) -> Option<Vec<u8>> {
        let message = Message::new(BY_FAMILY, NLM_F_MULTI, &self.header, self.port);
        match self.wanted {
            Wanted::Inet { family, local_port, remote_port, .. } => {
                let ends = Ends::of(found, family);
                let is_asked_for = |asked, port| asked == 0 || asked == port;
                (is_asked_for(local_port, ends.local.port)
                    && is_asked_for(remote_port, ends.remote.port))
                .then(|| inet_message(message, found, family, ends))
            }
            Wanted::Unix { show } => Some(unix_message(message, found, show)),
        }
    }
}

/// Both ends of a socket; one that there is not is the wildcard address.
#[derive(Clone, Copy)]
struct Ends {
    local: Endpoint,
    remote: Endpoint,
}

impl Ends {
    fn of(found: &Found, family: u16) -> Self {
        let nowhere = Endpoint::wildcard(family);
        let local = match found.socket.local_address() {
            SocketAddress::V4(local) | SocketAddress::V6(local) => local,
            _ => nowhere,
        };
        Self { local, remote: found.listed.remote.unwrap_or(nowhere) }
    }
}

/// `struct inet_diag_msg`.
fn inet_message(message: Message, found: &Found, family: u16, ends: Ends) -> Vec<u8> {
    const V6_ONLY: u16 = 11;
    let listed = &found.listed;
    let [local, remote] = [ends.local, ends.remote].map(|end| octets(end, family));
    let queues = [listed.receive_queue as u32, listed.send_queue as u32];
    let message = message
        .body(&[family as u8, listed.state as u8, 0, 0])
        .body(&ends.local.port.to_be_bytes())
        .body(&ends.remote.port.to_be_bytes())
        .body(&local)
        .body(&remote)
        // No interface.
        .body(&[0; 4])
        .body(&cookie(found))
        // A timer's expiry.
        .body(&[0; 4])
        .body(bytemuck::bytes_of(&queues))
        .body(&found.uid.to_ne_bytes())
        .body(&(found.ino as u32).to_ne_bytes());
    let is_unconnected = matches!(listed.state, ConnectionState::Listen | ConnectionState::Close);
    if family == AF_INET6 && is_unconnected {
        let only = found.socket.common().options.borrow_mut().flag(options::V6ONLY);
        return message.attribute(V6_ONLY, &[only.into()]).finish();
    }
    message.finish()
}

/// 16 bytes of an address, of which IPv4 takes four. A socket of IPv6 has addresses of IPv4 as mapped ones.
fn octets(end: Endpoint, family: u16) -> [u8; 16] {
    match end.ip {
        IpAddr::V4(ip) if family == AF_INET6 => ip.to_ipv6_mapped().octets(),
        IpAddr::V4(ip) => {
            let mut octets = [0; 16];
            octets[..4].copy_from_slice(&ip.octets());
            octets
        }
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// What stands for the socket as long as it lives.
fn cookie(found: &Found) -> [u8; 8] {
    found.socket.common().ino.to_ne_bytes()
}

/// `struct unix_diag_msg`.
fn unix_message(message: Message, found: &Found, show: u32) -> Vec<u8> {
    const SHOW_NAME: u32 = 1;
    const SHOW_PEER: u32 = 4;
    const SHOW_QUEUES: u32 = 0x10;
    const SHOW_UID: u32 = 0x40;
    const NAME: u16 = 0;
    const PEER: u16 = 2;
    const QUEUES: u16 = 4;
    const UID: u16 = 7;
    let listed = &found.listed;
    let mut message = message
        .body(&[AF_UNIX as u8, found.socket.common().kind as u8, listed.state as u8, 0])
        .body(&(found.ino as u32).to_ne_bytes())
        .body(&cookie(found));
    if show & SHOW_NAME != 0
        && let SocketAddress::Unix(name) = found.socket.local_address()
    {
        message = match name {
            UnixName::Unnamed => message,
            UnixName::Path(path) => message.attribute(NAME, &[&*path, b"\0"].concat()),
            UnixName::Abstract(name) => message.attribute(NAME, &[b"\0", &*name].concat()),
        };
    }
    if show & SHOW_PEER != 0 && listed.peer_ino != 0 {
        message = message.attribute(PEER, &(listed.peer_ino as u32).to_ne_bytes());
    }
    if show & SHOW_QUEUES != 0 {
        let queues = [listed.receive_queue as u32, listed.send_queue as u32];
        message = message.attribute(QUEUES, bytemuck::bytes_of(&queues));
    }
    if show & SHOW_UID != 0 {
        message = message.attribute(UID, &found.uid.to_ne_bytes());
    }
    message.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::fd_table;
    use crate::fs::file::OpenFlags;
    use crate::net::netlink_messages::tests::{header, request};
    use crate::net::netlink_messages::{Answers, HEADER, NLMSG_DONE, answer, attribute};
    use crate::net::socket::{Socket, SocketType};
    use crate::state::kernel;
    use crate::testing::Sandbox;
    use alloc::sync::Arc;

    fn install(protocol: Arc<dyn Protocol>) {
        fd_table::install_new(Socket::new(protocol), OpenFlags::empty()).unwrap();
    }

    /// The messages of a dump, without its end, and in how many datagrams they came.
    fn dump(body: &[u8]) -> (Vec<Vec<u8>>, usize) {
        let Answers { datagrams: answers, dump, .. } =
            answer(&request(BY_FAMILY, NLM_F_DUMP, body), 5, usize::MAX, carry_out);
        assert!(answers.is_empty());
        let (mut dump, mut messages, mut pieces) = (dump.unwrap(), Vec::new(), 0);
        loop {
            let (piece, is_last) = dump.next();
            pieces += 1;
            let mut rest = &piece[..];
            while !rest.is_empty() {
                let (message, others) = rest.split_at(header(rest).len as usize);
                messages.push(message.to_vec());
                rest = others;
            }
            if is_last {
                assert_eq!(header(&messages.pop().unwrap()).kind, NLMSG_DONE);
                return (messages, pieces);
            }
        }
    }

    fn inet_request(states: u32, port: u16) -> Vec<u8> {
        let mut body = vec![AF_INET as u8, IPPROTO_TCP as u8, 0, 0];
        body.extend_from_slice(&states.to_ne_bytes());
        body.extend_from_slice(&port.to_be_bytes());
        body.resize(56, 0);
        body
    }

    #[test]
    fn a_dump_has_the_sockets_in_the_states_and_at_the_ports_that_are_asked_for() {
        let _sandbox = Sandbox::new();
        for port in 1000..1200 {
            let tcp = kernel().net.tcp.socket(AF_INET, &kernel().net.inodes);
            let ip = core::net::Ipv4Addr::LOCALHOST.into();
            tcp.bind(&SocketAddress::V4(Endpoint { ip, port })).unwrap();
            tcp.listen(5).unwrap();
            install(tcp);
        }
        let listening = 1 << ConnectionState::Listen as u8;
        let (messages, pieces) = dump(&inet_request(listening, 0));
        assert!(messages.len() == 200 && pieces > 1, "{pieces}");
        assert_eq!(dump(&inet_request(!listening, 0)).0.len(), 0);
        let (messages, _) = dump(&inet_request(u32::MAX, 1007));
        let body = &messages[0][HEADER..];
        assert_eq!((messages.len(), body.len()), (1, 72));
        assert_eq!(body[..8], [2, 10, 0, 0, 3, 0xef, 0, 0]);
        assert_eq!(body[8..12], [127, 0, 0, 1]);
        assert_eq!(body[60..64], 5u32.to_ne_bytes(), "as many connections may wait");
    }

    #[test]
    fn ends_of_unix_sockets_know_each_other() {
        let _sandbox = Sandbox::new();
        let (first, second) = kernel().net.unix.pair(SocketType::Stream, &kernel().net.inodes);
        let inodes = [&first, &second].map(|socket| socket.common().ino as u32);
        install(first);
        install(second);
        let mut body = vec![AF_UNIX as u8, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
        body.resize(12, 0);
        body.extend_from_slice(&0x15u32.to_ne_bytes());
        body.resize(24, 0);
        let (messages, _) = dump(&body);
        let ends = messages.iter().map(|message| {
            let body = &message[HEADER..];
            assert_eq!(body[..4], [1, 1, 1, 0]);
            let number = |bytes: &[u8]| u32::from_ne_bytes(bytes.try_into().unwrap());
            (number(&body[4..8]), number(attribute(body, 16, 2).unwrap()))
        });
        let ends: Vec<_> = ends.collect();
        assert_eq!(ends, [(inodes[0], inodes[1]), (inodes[1], inodes[0])]);
    }

    #[test]
    fn what_there_is_not_is_refused_and_nonsense_survived() {
        let _sandbox = Sandbox::new();
        let refused = |kind, flags, body: &[u8]| {
            let answers = answer(&request(kind, flags, body), 5, usize::MAX, carry_out).datagrams;
            -i32::from_ne_bytes(answers[0][HEADER..HEADER + 4].try_into().unwrap())
        };
        assert_eq!(refused(18, NLM_F_DUMP, &[0; 72]), Errno::EINVAL.0);
        assert_eq!(refused(BY_FAMILY, NLM_F_DUMP, &[17; 56]), Errno::ENOENT.0);
        assert_eq!(refused(BY_FAMILY, NLM_F_DUMP, &[46; 56]), Errno::EINVAL.0);
        assert_eq!(refused(BY_FAMILY, NLM_F_DUMP, &[2, 132].repeat(28)), Errno::ENOENT.0);
        assert_eq!(refused(BY_FAMILY, 0, &inet_request(0, 0)), Errno::EOPNOTSUPP.0);
        for len in 0..60 {
            for family in [1, 2, 10, 16] {
                let mut body = vec![6; len];
                body.iter_mut().take(1).for_each(|first| *first = family);
                answer(&request(BY_FAMILY, NLM_F_DUMP, &body), 5, usize::MAX, carry_out);
            }
        }
    }
}
