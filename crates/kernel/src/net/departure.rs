//! What a sender may say about a single datagram (`IP_PKTINFO`, `IP_TTL` and
//! `IP_TOS` in ip(7), their relatives in ipv6(7)).

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::address::AF_INET6;
use super::message::{Control, SOL_SOCKET, split};
use crate::errno::{Errno, Result};

const SOL_IP: i32 = 0;
const IP_TOS: i32 = 1;
const IP_TTL: i32 = 2;
const IP_PKTINFO: i32 = 8;
const SOL_IPV6: i32 = 41;
const IPV6_PKTINFO: i32 = 50;
const IPV6_HOPLIMIT: i32 = 52;
const IPV6_DONTFRAG: i32 = 62;
const IPV6_TCLASS: i32 = 67;

/// How one datagram is to be sent; what is `None` is as the socket's options say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Departure {
    /// `IP_TTL` or the hop limit.
    pub hops: Option<u8>,
    /// `IP_TOS` or the traffic class.
    pub class: Option<u8>,
    /// The address that it comes from.
    pub source: Option<IpAddr>,
}

impl Departure {
    /// From the control messages of a sender on a socket of a family. `EINVAL` for
    /// what has the wrong size or value, or is not known; other levels are nobody's
    /// business (`ip_cmsg_send` and `ip6_datagram_send_ctl` of Linux).
    pub fn parse(bytes: &[u8], family: u16) -> Result<Self> {
        let mut departure = Self::default();
        for message in split(bytes)? {
            match message.level {
                SOL_SOCKET => check_socket_level(message.kind)?,
                SOL_IP if family != AF_INET6 => departure.add_v4(&message)?,
                SOL_IPV6 if family == AF_INET6 => departure.add_v6(&message)?,
                _ => {}
            }
        }
        Ok(departure)
    }

    fn add_v4(&mut self, message: &Control<'_>) -> Result<()> {
        match message.kind {
            IP_TTL => self.hops = Some(in_range(number(message.data)?, 1)?),
            IP_TOS => {
                let class = match message.data {
                    &[class] => i32::from(class),
                    data => number(data)?,
                };
                self.class = Some(in_range(class, 0)?);
            }
            IP_PKTINFO => {
                // struct in_pktinfo: interface, local address, address in the header.
                let info: [u8; 12] = message.data.try_into().map_err(|_| Errno::EINVAL)?;
                let source = Ipv4Addr::new(info[4], info[5], info[6], info[7]);
                self.source =
                    Some(source.into()).filter(|source: &IpAddr| !source.is_unspecified());
            }
            _ => return Err(Errno::EINVAL),
        }
        Ok(())
    }

    fn add_v6(&mut self, message: &Control<'_>) -> Result<()> {
        match message.kind {
            IPV6_HOPLIMIT => self.hops = default_or(number(message.data)?)?,
            IPV6_TCLASS => self.class = default_or(number(message.data)?)?,
            IPV6_DONTFRAG if matches!(number(message.data)?, 0 | 1) => {}
            IPV6_PKTINFO => {
                // struct in6_pktinfo: address, interface.
                let info = message.data.first_chunk::<16>().filter(|_| message.data.len() >= 20);
                let source = Ipv6Addr::from(*info.ok_or(Errno::EINVAL)?);
                self.source =
                    Some(source.into()).filter(|source: &IpAddr| !source.is_unspecified());
            }
            _ => return Err(Errno::EINVAL),
        }
        Ok(())
    }
}

/// `SCM_RIGHTS` and `SCM_CREDENTIALS` mean nothing to an Internet socket.
fn check_socket_level(kind: i32) -> Result<()> {
    if matches!(kind, 1 | 2) { Ok(()) } else { Err(Errno::EINVAL) }
}

fn number(data: &[u8]) -> Result<i32> {
    data.try_into().map(i32::from_ne_bytes).map_err(|_| Errno::EINVAL)
}

fn in_range(value: i32, least: u8) -> Result<u8> {
    u8::try_from(value).ok().filter(|&value| value >= least).ok_or(Errno::EINVAL)
}

/// A byte, or -1 for the default.
fn default_or(value: i32) -> Result<Option<u8>> {
    if value == -1 { Ok(None) } else { in_range(value, 0).map(Some) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::address::AF_INET;

    fn control(level: i32, kind: i32, data: &[u8]) -> Vec<u8> {
        let mut bytes = ((16 + data.len()) as u64).to_ne_bytes().to_vec();
        bytes.extend(level.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(data);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    #[test]
    fn what_is_said_of_a_datagram_is_checked() {
        let v4 = |kind, data: &[u8]| Departure::parse(&control(SOL_IP, kind, data), AF_INET);
        assert_eq!(v4(IP_TTL, &7i32.to_ne_bytes()).unwrap().hops, Some(7));
        assert_eq!(v4(IP_TTL, &0i32.to_ne_bytes()), Err(Errno::EINVAL));
        assert_eq!(v4(IP_TTL, &[7]), Err(Errno::EINVAL));
        assert_eq!(v4(IP_TOS, &[8]).unwrap().class, Some(8));
        assert_eq!(v4(99, &[8]), Err(Errno::EINVAL));
        let source = v4(IP_PKTINFO, &[0, 0, 0, 0, 127, 0, 0, 2, 0, 0, 0, 0]).unwrap().source;
        assert_eq!(source, Some(Ipv4Addr::new(127, 0, 0, 2).into()));
        let v6 = |kind, data: &[u8]| Departure::parse(&control(SOL_IPV6, kind, data), AF_INET6);
        assert_eq!(v6(IPV6_HOPLIMIT, &2i32.to_ne_bytes()).unwrap().hops, Some(2));
        assert_eq!(v6(IPV6_HOPLIMIT, &(-1i32).to_ne_bytes()), Ok(Departure::default()));
        assert_eq!(v6(IPV6_HOPLIMIT, &256i32.to_ne_bytes()), Err(Errno::EINVAL));
        assert_eq!(v6(IPV6_PKTINFO, &[0; 19]), Err(Errno::EINVAL));
        let elsewhere = control(SOL_IPV6, 99, &[1]);
        assert_eq!(Departure::parse(&elsewhere, AF_INET), Ok(Departure::default()));
    }
}
