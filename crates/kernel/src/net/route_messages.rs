//! Answers to `NETLINK_ROUTE` requests (rtnetlink(7)).

use alloc::vec::Vec;
use core::net::IpAddr;

use super::address::{AF_INET, AF_INET6, AF_UNSPEC};
use super::interfaces::{Interface, LOOPBACK, Route, all, routes};
use super::namespace;
use super::netlink_messages::{Answer, Header, Message, NLM_F_DUMP, NLM_F_MULTI, attribute, done};
use crate::errno::{Errno, Result};

const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_SETLINK: u16 = 19;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
/// The last type of message that Linux knows, rounded up to its family of four.
const RTM_MAX: u16 = 123;

const AF_PACKET: u16 = 17;

/// What a request gets; nothing for one that is merely acknowledged.
pub fn carry_out(header: &Header, body: &[u8], port: u32) -> Result<Answer> {
    if header.kind > RTM_MAX {
        return Err(Errno::EOPNOTSUPP);
    }
    if matches!(header.kind, RTM_NEWLINK | RTM_SETLINK | RTM_NEWADDR) {
        return change(header.kind, body).map(|()| Answer::Nothing);
    }
    // Each family of messages is NEW, DEL, GET, SET.
    if header.kind & 3 != 2 {
        return Err(Errno::EPERM);
    }
    let Some(&family) = body.first() else { return Err(Errno::EINVAL) };
    let family = u16::from(family);
    if header.flags & NLM_F_DUMP != 0 {
        let parts = dump(header, family, port);
        // The end comes by itself, as on Linux when the rest fills a buffer.
        let found = if parts.is_empty() { Vec::new() } else { alloc::vec![parts.concat()] };
        return Ok(Answer::Messages(
            found.into_iter().chain([done(header, port, Ok(()))]).collect(),
        ));
    }
    let found = match header.kind {
        RTM_GETLINK => {
            let interface = find_link(body)?;
            link(header, 0, &interface, port)
        }
        RTM_GETROUTE => {
            let to = attribute(body, 12, RTA_DST).ok_or(Errno::EINVAL)?;
            let to = match (family, to.len()) {
                (AF_INET, 4) => IpAddr::from(<[u8; 4]>::try_from(to).map_err(|_| Errno::EINVAL)?),
                (AF_INET6, 16) => {
                    IpAddr::from(<[u8; 16]>::try_from(to).map_err(|_| Errno::EINVAL)?)
                }
                _ => return Err(Errno::EINVAL),
            };
            let found = routes().into_iter().find(|route| route.leads_to(to));
            let found = found.ok_or(Errno::ENETUNREACH)?;
            let full = if to.is_ipv4() { 32 } else { 128 };
            route(header, 0, &Route { destination: to, prefix_len: full, ..found }, port)
        }
        _ => return Err(Errno::EOPNOTSUPP),
    };
    Ok(Answer::Messages(alloc::vec![found]))
}

/// Changes the loopback interface of a namespace that has nothing else: it goes up and down. An address
/// that it has while it is up may be given to it before. `EPERM` for all else.
fn change(kind: u16, body: &[u8]) -> Result<()> {
    const IFF_UP: u32 = 1;
    let namespace = namespace::own();
    namespace::check_may_change(&namespace)?;
    if namespace.scope.is_of_sandbox() {
        return Err(Errno::EPERM);
    }
    let word = |at: usize| {
        let bytes = body.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map(u32::from_ne_bytes).ok_or(Errno::EINVAL)
    };
    if kind == RTM_NEWADDR {
        // struct ifaddrmsg: family, bits, flags, scope, index.
        let is_own = word(4)? == LOOPBACK
            && body[..2] == [AF_INET as u8, 8]
            && attribute(body, 8, IFA_LOCAL) == Some(&[127, 0, 0, 1]);
        return match is_own {
            true if namespace.scope.is_up() => Err(Errno::EEXIST),
            true => Ok(()),
            false => Err(Errno::EPERM),
        };
    }
    if find_link(body)?.index != LOOPBACK {
        return Err(Errno::ENODEV);
    }
    // struct ifinfomsg: which flags change is in the last word; all, if it says nothing.
    let (flags, changed) = (word(8)?, word(12)?);
    if changed == 0 || changed & IFF_UP != 0 {
        namespace::set_loopback_up(flags & IFF_UP != 0)?;
    }
    Ok(())
}

fn dump(header: &Header, family: u16, port: u32) -> Vec<Vec<u8>> {
    let wanted = |ip: IpAddr| match family {
        AF_UNSPEC => true,
        AF_INET => ip.is_ipv4(),
        AF_INET6 => ip.is_ipv6(),
        _ => false,
    };
    match header.kind {
        RTM_GETLINK if matches!(family, AF_UNSPEC | AF_PACKET | AF_INET | AF_INET6) => {
            all().iter().map(|interface| link(header, NLM_F_MULTI, interface, port)).collect()
        }
        RTM_GETADDR => {
            let mut found = Vec::new();
            // IPv4 goes first, whatever the interface.
            for v4 in [true, false] {
                for interface in all() {
                    for index in 0..interface.addresses.len() {
                        let ip = interface.addresses[index].ip;
                        if ip.is_ipv4() == v4 && wanted(ip) {
                            found.push(address(header, &interface, index, port));
                        }
                    }
                }
            }
            found
        }
        RTM_GETROUTE => routes()
            .iter()
            .filter(|found| wanted(found.destination))
            .map(|found| route(header, NLM_F_MULTI, found, port))
            .collect(),
        // Neighbours, rules, queues and what else there is: none.
        _ => Vec::new(),
    }
}

const IFLA_ADDRESS: u16 = 1;
const IFLA_BROADCAST: u16 = 2;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_QDISC: u16 = 6;
const IFLA_STATS: u16 = 7;
const IFLA_TXQLEN: u16 = 13;
const IFLA_OPERSTATE: u16 = 16;
const IFLA_LINKMODE: u16 = 17;
const IFLA_STATS64: u16 = 23;
const IFLA_GROUP: u16 = 27;
const IFLA_NUM_TX_QUEUES: u16 = 31;
const IFLA_NUM_RX_QUEUES: u16 = 32;
const IFLA_CARRIER: u16 = 33;
const IFLA_ALT_IFNAME: u16 = 53;
/// Sizes of `struct rtnl_link_stats` and `rtnl_link_stats64` (linux/if_link.h). Nothing is counted: packets
/// do not exist here.
const STATS_SIZE: usize = 24 * size_of::<u32>();
const STATS_64_SIZE: usize = 25 * size_of::<u64>();

fn link(header: &Header, flags: u16, interface: &Interface, port: u32) -> Vec<u8> {
    // struct ifinfomsg
    let mut body = [0; 16];
    body[2..4].copy_from_slice(&interface.kind.to_ne_bytes());
    body[4..8].copy_from_slice(&interface.index.to_ne_bytes());
    body[8..12].copy_from_slice(&interface.flags.to_ne_bytes());
    let mut name = interface.name.as_bytes().to_vec();
    name.push(0);
    Message::new(RTM_NEWLINK, flags, header, port)
        .body(&body)
        .attribute(IFLA_IFNAME, &name)
        .attribute(IFLA_TXQLEN, &1000u32.to_ne_bytes())
        .attribute(IFLA_OPERSTATE, &[interface.state])
        .attribute(IFLA_LINKMODE, &[0])
        .attribute(IFLA_MTU, &interface.mtu.to_ne_bytes())
        .attribute(IFLA_GROUP, &0u32.to_ne_bytes())
        .attribute(IFLA_NUM_TX_QUEUES, &1u32.to_ne_bytes())
        .attribute(IFLA_NUM_RX_QUEUES, &1u32.to_ne_bytes())
        .attribute(IFLA_CARRIER, &[1])
        .attribute(IFLA_QDISC, b"noqueue\0")
        .attribute(IFLA_ADDRESS, &interface.hardware)
        .attribute(IFLA_BROADCAST, &interface.hardware_broadcast)
        .attribute(IFLA_STATS64, &[0; STATS_64_SIZE])
        .attribute(IFLA_STATS, &[0; STATS_SIZE])
        .finish()
}

/// The interface that a `RTM_GETLINK` without dump names.
fn find_link(body: &[u8]) -> Result<Interface> {
    let index = body.get(4..8).ok_or(Errno::EINVAL)?;
    let index = u32::from_ne_bytes(index.try_into().map_err(|_| Errno::EINVAL)?);
    let name = attribute(body, 16, IFLA_IFNAME).or_else(|| attribute(body, 16, IFLA_ALT_IFNAME));
    let name = name.map(|name| name.split(|&byte| byte == 0).next().unwrap_or(&[]));
    let found = match (index, name) {
        (0, None) => return Err(Errno::EINVAL),
        (0, Some(name)) => all().into_iter().find(|found| found.name.as_bytes() == name),
        (index, _) => all().into_iter().find(|found| found.index == index),
    };
    found.ok_or(Errno::ENODEV)
}

const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_LABEL: u16 = 3;
const IFA_BROADCAST: u16 = 4;
const IFA_CACHEINFO: u16 = 6;
const IFA_FLAGS: u16 = 8;
/// `IFA_F_PERMANENT`.
const PERMANENT: u8 = 0x80;

fn family(ip: IpAddr) -> u8 {
    (if ip.is_ipv4() { AF_INET } else { AF_INET6 }) as u8
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

fn address(header: &Header, interface: &Interface, index: usize, port: u32) -> Vec<u8> {
    let address = &interface.addresses[index];
    // struct ifaddrmsg
    let mut body = [family(address.ip), address.prefix_len, PERMANENT, address.scope, 0, 0, 0, 0];
    body[4..8].copy_from_slice(&interface.index.to_ne_bytes());
    let mut message = Message::new(RTM_NEWADDR, NLM_F_MULTI, header, port)
        .body(&body)
        .attribute(IFA_ADDRESS, &octets(address.ip));
    if address.ip.is_ipv4() {
        let mut name = interface.name.as_bytes().to_vec();
        name.push(0);
        message = message.attribute(IFA_LOCAL, &octets(address.ip));
        if let Some(broadcast) = address.broadcast {
            message = message.attribute(IFA_BROADCAST, &broadcast.octets());
        }
        message = message.attribute(IFA_LABEL, &name);
    }
    // struct ifa_cacheinfo: preferred and valid for ever, then two times.
    let mut cache = [0xff; 16];
    cache[8..].fill(0);
    message
        .attribute(IFA_FLAGS, &u32::from(PERMANENT).to_ne_bytes())
        .attribute(IFA_CACHEINFO, &cache)
        .finish()
}

const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PREFSRC: u16 = 7;
const RTA_TABLE: u16 = 15;

fn route(header: &Header, flags: u16, found: &Route, port: u32) -> Vec<u8> {
    const TABLE_MAIN: u8 = 254;
    const TABLE_LOCAL: u8 = 255;
    const PROTOCOL_KERNEL: u8 = 2;
    const PROTOCOL_BOOT: u8 = 3;
    const TYPE_UNICAST: u8 = 1;
    const TYPE_LOCAL: u8 = 2;
    let (table, kind) =
        if found.local { (TABLE_LOCAL, TYPE_LOCAL) } else { (TABLE_MAIN, TYPE_UNICAST) };
    let protocol = if found.gateway.is_some() { PROTOCOL_BOOT } else { PROTOCOL_KERNEL };
    // struct rtmsg
    let ip = found.destination;
    let body = [family(ip), found.prefix_len, 0, 0, table, protocol, found.scope, kind, 0, 0, 0, 0];
    let mut message = Message::new(RTM_NEWROUTE, flags, header, port)
        .body(&body)
        .attribute(RTA_TABLE, &u32::from(table).to_ne_bytes());
    if found.prefix_len > 0 {
        message = message.attribute(RTA_DST, &octets(ip));
    }
    if let Some(gateway) = found.gateway {
        message = message.attribute(RTA_GATEWAY, &octets(gateway));
    }
    if let Some(source) = found.source {
        message = message.attribute(RTA_PREFSRC, &octets(source));
    }
    message.attribute(RTA_OIF, &found.interface.to_ne_bytes()).finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::netlink_messages::tests::{header, request};
    use crate::net::netlink_messages::{HEADER, NLM_F_ACK, NLMSG_DONE, NLMSG_ERROR};
    use crate::testing::Sandbox;

    fn answer(requests: &[u8], port: u32) -> Vec<Vec<u8>> {
        let room = usize::MAX;
        let answers = crate::net::netlink_messages::answer(requests, port, room, carry_out);
        assert!(answers.dump.is_none() && !answers.is_cut);
        answers.datagrams
    }

    fn error(answers: &[Vec<u8>]) -> i32 {
        assert_eq!((answers.len(), header(&answers[0]).kind), (1, NLMSG_ERROR));
        i32::from_ne_bytes(answers[0][HEADER..HEADER + 4].try_into().unwrap())
    }

    #[test]
    fn a_dump_ends_with_done() {
        let _sandbox = Sandbox::new();
        for kind in [RTM_GETLINK, RTM_GETADDR, RTM_GETROUTE] {
            let answers = answer(&request(kind, NLM_F_DUMP, &[0]), 5);
            assert_eq!(answers.len(), 2);
            let first = header(&answers[0]);
            assert_eq!((first.kind, first.flags), (kind - 2, NLM_F_MULTI));
            assert_eq!((first.sequence, first.port), (9, 5));
            assert_eq!(header(&answers[1]).kind, NLMSG_DONE);
        }
        // Neighbours: none.
        assert_eq!(answer(&request(30, NLM_F_DUMP, &[0]), 5).len(), 1);
    }

    #[test]
    fn one_interface_is_found_by_number_or_name() {
        let _sandbox = Sandbox::new();
        let mut body = [0; 16];
        assert_eq!(error(&answer(&request(RTM_GETLINK, 0, &body), 1)), -Errno::EINVAL.0);
        body[4] = 1;
        let answers = answer(&request(RTM_GETLINK, 0, &body), 1);
        assert_eq!(header(&answers[0]).kind, RTM_NEWLINK);
        assert_eq!(attribute(&answers[0][HEADER..], 16, IFLA_IFNAME), Some(&b"lo\0"[..]));
        body[4] = 9;
        assert_eq!(error(&answer(&request(RTM_GETLINK, 0, &body), 1)), -Errno::ENODEV.0);
        let named = [&[0; 16][..], &[7, 0, IFLA_IFNAME as u8, 0], b"lo\0\0"].concat();
        assert_eq!(header(&answer(&request(RTM_GETLINK, 0, &named), 1)[0]).kind, RTM_NEWLINK);
    }

    #[test]
    fn changes_are_refused_and_requests_acknowledged() {
        let _sandbox = Sandbox::new();
        assert_eq!(error(&answer(&request(RTM_NEWADDR, 0, &[0; 8]), 1)), -Errno::EPERM.0);
        assert_eq!(error(&answer(&request(0x7002, 0, &[0; 8]), 1)), -Errno::EOPNOTSUPP.0);
        assert_eq!(error(&answer(&request(1, NLM_F_ACK, &[]), 1)), 0);
        assert!(answer(&request(1, 0, &[]), 1).is_empty());
    }

    #[test]
    fn nonsense_is_survived() {
        let _sandbox = Sandbox::new();
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        for _ in 0..20_000 {
            let kind = [16, 18, 22, 26, 30, 34][next() as usize % 6];
            let body: Vec<u8> = (0..next() % 40).map(|_| next() as u8).collect();
            let mut bytes = request(kind, next() as u16, &body);
            if next() % 4 == 0 {
                bytes[0] = next() as u8;
            }
            answer(&bytes, 1);
        }
    }
}
