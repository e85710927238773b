//! getsockopt(2) and setsockopt(2).
//!
//! Most options of a socket without a network are numbers that are kept and
//! given back; [`super::option_table`] lists them with their defaults, as Linux
//! reports them.
//! The others are matched by name.

use alloc::vec::Vec;

use super::address::{AF_INET, AF_INET6, AF_NETLINK, AF_UNIX, Endpoint, SocketAddress};
use super::group_options;
use super::option_table::{Name, Of, Range, applies, find};
use super::socket::{Common, PeerCredentials, Protocol, SocketType};
use super::sockets::ConnectionState;
use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;
use crate::time::Timeval;

const SOL_IP: i32 = 0;
const SOL_SOCKET: i32 = 1;
const SOL_TCP: i32 = 6;
const SOL_UDP: i32 = 17;
const SOL_IPV6: i32 = 41;
const SOL_UDPLITE: i32 = 136;
const SOL_NETLINK: i32 = 270;

/// `SO_REUSEADDR`.
pub const REUSEADDR: Name = (SOL_SOCKET, 2);
/// `SO_OOBINLINE`.
pub const OOBINLINE: Name = (SOL_SOCKET, 10);
/// `SO_REUSEPORT`.
pub const REUSEPORT: Name = (SOL_SOCKET, 15);
/// `SO_PASSCRED`.
pub const PASSCRED: Name = (SOL_SOCKET, 16);
/// `SO_BROADCAST`.
pub const BROADCAST: Name = (SOL_SOCKET, 6);
/// `IP_MULTICAST_LOOP`.
pub const MULTICAST_LOOP: Name = (SOL_IP, 34);
/// `IP_MULTICAST_ALL`.
pub const MULTICAST_ALL: Name = (SOL_IP, 49);
/// `IPV6_MULTICAST_LOOP`.
pub const MULTICAST_LOOP_V6: Name = (SOL_IPV6, 19);
/// `IPV6_MULTICAST_ALL`.
pub const MULTICAST_ALL_V6: Name = (SOL_IPV6, 29);
/// `IPV6_V6ONLY`.
pub const V6ONLY: Name = (SOL_IPV6, 26);
/// `UDP_CORK` (udp(7)).
pub const UDP_CORK: Name = (SOL_UDP, 1);

const SO_TYPE: i32 = 3;
const SO_ERROR: i32 = 4;
const SO_SNDBUF: i32 = 7;
const SO_RCVBUF: i32 = 8;
const SO_LINGER: i32 = 13;
const SO_PEERCRED: i32 = 17;
const SO_RCVTIMEO: i32 = 20;
const SO_SNDTIMEO: i32 = 21;
const SO_ACCEPTCONN: i32 = 30;
const SO_SNDBUFFORCE: i32 = 32;
const SO_RCVBUFFORCE: i32 = 33;
const SO_PROTOCOL: i32 = 38;
const SO_DOMAIN: i32 = 39;
/// As [`SO_RCVTIMEO`]: times have 64 bits here anyway.
const SO_RCVTIMEO_NEW: i32 = 66;
const SO_SNDTIMEO_NEW: i32 = 67;
const TCP_ULP: i32 = 31;
const IP_MTU: i32 = 14;
const TCP_INFO: i32 = 11;
const TCP_CONGESTION: i32 = 13;

/// What has been set on a socket.
#[derive(Clone, Default)]
pub struct Options {
    plain: Vec<(Name, i32)>,
    /// `SO_LINGER`: seconds, if it is on.
    pub linger: Option<i32>,
    /// `SO_RCVTIMEO`, nanoseconds.
    pub receive_timeout_ns: Option<u64>,
    /// `SO_SNDTIMEO`, nanoseconds.
    pub send_timeout_ns: Option<u64>,
    /// `SO_SNDBUF`, as Linux reports it: twice what was asked for.
    pub send_buffer: Option<u32>,
    /// `SO_RCVBUF`, likewise.
    pub receive_buffer: Option<u32>,
}

impl Options {
    /// Whether an option of the table is on.
    pub fn flag(&self, name: Name) -> bool {
        self.plain.iter().any(|(other, value)| *other == name && *value != 0)
    }

    /// The value of an option of the table, if it was set.
    pub fn value(&self, name: Name) -> Option<i32> {
        self.plain.iter().find(|(other, _)| *other == name).map(|(_, value)| *value)
    }

    pub(super) fn set_value(&mut self, name: Name, value: i32) {
        match self.plain.iter_mut().find(|(other, _)| *other == name) {
            Some((_, old)) => *old = value,
            None => self.plain.push((name, value)),
        }
    }
}

/// What is done with an option.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operation {
    Get,
    Set,
}

/// What Linux says to a level or option that a socket does not have. An
/// Internet socket passes levels that it does not know on to a layer that says
/// different things to the two calls.
fn unknown(common: &Common, level: i32, operation: Operation) -> Errno {
    let internet = matches!(common.family, AF_INET | AF_INET6);
    if common.family == AF_NETLINK {
        return Errno::ENOPROTOOPT;
    }
    let known = match level {
        SOL_SOCKET => true,
        SOL_IP => internet,
        SOL_TCP => applies(Of::Tcp, common),
        SOL_UDP => applies(Of::Udp, common),
        SOL_IPV6 => applies(Of::V6, common),
        SOL_UDPLITE => applies(Of::UdpLite, common),
        SOL_NETLINK => applies(Of::Netlink, common),
        _ => false,
    };
    if known || (internet && operation == Operation::Set) {
        Errno::ENOPROTOOPT
    } else {
        Errno::EOPNOTSUPP
    }
}

/// Doubled and bounded, as Linux does for its own bookkeeping (socket(7), `SO_SNDBUF`).
fn buffer_size(asked: i32, minimum: u32) -> u32 {
    /// `net.core.wmem_max` and `rmem_max`.
    const MAXIMUM: u32 = 4 << 20;
    let asked = if asked < 0 { MAXIMUM } else { (asked as u32).min(MAXIMUM) };
    (asked * 2).max(minimum)
}

/// setsockopt(2).
pub fn set(
    socket: &dyn Protocol,
    level: i32,
    number: i32,
    at: UserAddress,
    len: usize,
) -> Result<()> {
    let common = socket.common();
    let word = || if len < 4 { Err(Errno::EINVAL) } else { at.read::<i32>() };
    if level == SOL_SOCKET {
        match number {
            SO_TYPE | SO_PROTOCOL | SO_DOMAIN | SO_ERROR | SO_ACCEPTCONN | SO_PEERCRED => {
                return Err(Errno::ENOPROTOOPT);
            }
            // SO_BSDCOMPAT, which does nothing on Linux.
            14 => return word().map(drop),
            // SO_DETACH_FILTER: there is none.
            27 => return Err(Errno::ENOENT),
            SO_LINGER => {
                if len < 8 {
                    return Err(Errno::EINVAL);
                }
                let [on, seconds] = at.read::<[i32; 2]>()?;
                common.options.borrow_mut().linger = (on != 0).then_some(seconds);
                return Ok(());
            }
            SO_RCVTIMEO | SO_SNDTIMEO | SO_RCVTIMEO_NEW | SO_SNDTIMEO_NEW => {
                if len < size_of::<Timeval>() {
                    return Err(Errno::EINVAL);
                }
                let timeout = parse_timeout(at.read()?)?;
                let mut options = common.options.borrow_mut();
                let slot = if matches!(number, SO_RCVTIMEO | SO_RCVTIMEO_NEW) {
                    &mut options.receive_timeout_ns
                } else {
                    &mut options.send_timeout_ns
                };
                *slot = timeout;
                return Ok(());
            }
            SO_SNDBUF | SO_SNDBUFFORCE => {
                common.options.borrow_mut().send_buffer = Some(buffer_size(word()?, 4608));
                socket.options_changed();
                return Ok(());
            }
            SO_RCVBUF | SO_RCVBUFFORCE => {
                common.options.borrow_mut().receive_buffer = Some(buffer_size(word()?, 2304));
                return Ok(());
            }
            _ => {}
        }
    }
    if (level, number) == (SOL_TCP, TCP_CONGESTION) && applies(Of::Tcp, common) {
        let mut name = [0; 16];
        let len = len.min(15);
        at.read_bytes(&mut name[..len])?;
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(len);
        return if matches!(&name[..end], b"cubic" | b"reno") {
            Ok(())
        } else {
            Err(Errno::ENOENT)
        };
    }
    if let Some(outcome) = group_options::set(common, level, number, at, len) {
        return outcome;
    }
    // Of TLS in the kernel, a module; libraries do without.
    if (level, number) == (SOL_TCP, TCP_ULP) && applies(Of::Tcp, common) {
        return Err(Errno::ENOENT);
    }
    let option =
        find(common, (level, number)).ok_or_else(|| unknown(common, level, Operation::Set))?;
    // ip(7): the options of that level may be a single byte.
    let value = match level {
        SOL_IP if (1..4).contains(&len) => at.read::<u8>()? as i32,
        _ => word()?,
    };
    let value = match option.range {
        Range::Flag => (value != 0) as i32,
        Range::Bit if matches!(value, 0 | 1) => value,
        Range::Any => value,
        Range::Coverage if value == 0 => 0,
        Range::Coverage => value.clamp(8, i32::from(u16::MAX)),
        Range::Within(low, high) | Range::Reset(low, high) if (low..=high).contains(&value) => {
            value
        }
        Range::Reset(..) if value == -1 => option.default,
        Range::Bit | Range::Within(..) | Range::Reset(..) => return Err(Errno::EINVAL),
        Range::Fixed => return Err(Errno::ENOPROTOOPT),
    };
    if option.name == V6ONLY
        && socket.local_address() != Endpoint::wildcard(AF_INET6).for_family(AF_INET6)
    {
        return Err(Errno::EINVAL);
    }
    common.options.borrow_mut().set_value(option.name, value);
    if option.name == UDP_CORK && value == 0 {
        socket.uncork();
    }
    socket.options_changed();
    Ok(())
}

fn parse_timeout(time: Timeval) -> Result<Option<u64>> {
    if !(0..1_000_000).contains(&time.microseconds) {
        return Err(Errno::EDOM);
    }
    // socket(7): zero waits for ever; a negative time reads as "at once".
    if time.seconds < 0 {
        return Ok(Some(0));
    }
    Ok(Some(time.to_ns()?).filter(|ns| *ns != 0))
}

/// getsockopt(2).
pub fn get(
    socket: &dyn Protocol,
    level: i32,
    number: i32,
    at: UserAddress,
    len_at: UserAddress,
) -> Result<()> {
    let room = usize::try_from(len_at.read::<i32>()?).map_err(|_| Errno::EINVAL)?;
    let mut inline = [0u8; 256];
    let len = value(socket, level, number, room, &mut inline)?;
    let len = len.min(room);
    at.write_bytes(&inline[..len])?;
    len_at.write(&(len as u32))
}

/// Stores the value of an option and returns its length.
fn value(
    socket: &dyn Protocol,
    level: i32,
    number: i32,
    room: usize,
    out: &mut [u8; 256],
) -> Result<usize> {
    let common = socket.common();
    let mut store = |bytes: &[u8]| {
        out[..bytes.len()].copy_from_slice(bytes);
        Ok(bytes.len())
    };
    if level == SOL_SOCKET {
        let word = match number {
            SO_TYPE => common.kind as i32,
            SO_DOMAIN => common.family as i32,
            SO_PROTOCOL => common.protocol as i32,
            SO_ERROR => socket.take_error().map_or(0, |error| error.0),
            SO_ACCEPTCONN => socket.is_listening() as i32,
            SO_SNDBUF => {
                common.options.borrow_mut().send_buffer.unwrap_or(default_buffer(common).0) as i32
            }
            SO_RCVBUF => {
                common.options.borrow_mut().receive_buffer.unwrap_or(default_buffer(common).1)
                    as i32
            }
            SO_LINGER => {
                let linger = common.options.borrow_mut().linger;
                let value = [linger.is_some() as i32, linger.unwrap_or(0)];
                return store(bytemuck::bytes_of(&value));
            }
            SO_RCVTIMEO | SO_SNDTIMEO | SO_RCVTIMEO_NEW | SO_SNDTIMEO_NEW => {
                let options = common.options.borrow_mut();
                let ns = if matches!(number, SO_RCVTIMEO | SO_RCVTIMEO_NEW) {
                    options.receive_timeout_ns
                } else {
                    options.send_timeout_ns
                };
                return store(bytemuck::bytes_of(&Timeval::from_ns(ns.unwrap_or(0))));
            }
            SO_PEERCRED => {
                let nobody = PeerCredentials { pid: 0, uid: u32::MAX, gid: u32::MAX };
                return store(bytemuck::bytes_of(
                    &socket.peer_credentials().map_or(nobody, PeerCredentials::shown),
                ));
            }
            // SO_BSDCOMPAT, which does nothing on Linux; SO_LOCK_FILTER.
            14 | 44 => 0,
            // SO_BINDTODEVICE, SO_PEERSEC, SO_PEERGROUPS.
            25 => return Ok(0),
            // SO_COOKIE.
            57 => return store(&common.ino.to_ne_bytes()),
            _ => plain_value(common, (level, number))?,
        };
        return store(&word.to_ne_bytes());
    }
    if level == SOL_TCP && applies(Of::Tcp, common) {
        match number {
            TCP_CONGESTION => return store(b"cubic\0\0\0\0\0\0\0\0\0\0\0"),
            TCP_INFO => {
                // struct tcp_info: the state and zeros, for what is no network.
                let mut info = [0u8; 232];
                let state = socket.listed().map_or(ConnectionState::Close, |listed| listed.state);
                info[0] = state as u8;
                return store(&info);
            }
            _ => {}
        }
    }
    if let Some(bytes) = group_options::get(common, level, number) {
        return store(&bytes);
    }
    let word = match (level, number) {
        // IPV6_MTU, too.
        (SOL_IP, IP_MTU) | (SOL_IPV6, 24) if matches!(common.family, AF_INET | AF_INET6) => {
            path_mtu(socket)?
        }
        name => plain_value(common, name)?,
    };
    if level == SOL_IP && (1..4).contains(&room) && (0..256).contains(&word) {
        return store(&[word as u8]);
    }
    store(&word.to_ne_bytes())
}

/// Largest packet on the way to the peer.
fn path_mtu(socket: &dyn Protocol) -> Result<i32> {
    const LOOPBACK: i32 = 65536;
    const ETHERNET: i32 = 1500;
    match socket.peer_address()? {
        SocketAddress::V4(peer) | SocketAddress::V6(peer) if peer.is_local() => Ok(LOOPBACK),
        _ => Ok(ETHERNET),
    }
}

fn plain_value(common: &Common, name: Name) -> Result<i32> {
    // As Linux: the option exists, but not for this family.
    if name == PASSCRED && !applies(Of::Local, common) {
        return Err(Errno::EOPNOTSUPP);
    }
    let option = find(common, name).ok_or_else(|| unknown(common, name.0, Operation::Get))?;
    Ok(common.options.borrow_mut().value(name).unwrap_or(option.default))
}

/// `SO_SNDBUF` and `SO_RCVBUF` of a fresh socket (tcp(7), `net.core.*mem_default`).
fn default_buffer(common: &Common) -> (u32, u32) {
    match (common.family, common.kind) {
        (AF_UNIX | AF_NETLINK, _)
        | (_, SocketType::Datagram | SocketType::SequencedPacket | SocketType::Raw) => {
            (212_992, 212_992)
        }
        (_, SocketType::Stream) => (16_384, 131_072),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_sizes_double_within_bounds() {
        assert_eq!(buffer_size(100_000, 4608), 200_000);
        assert_eq!(buffer_size(100, 2304), 2304);
        assert_eq!(buffer_size(10_000_000, 2304), 8_388_608);
        assert_eq!(buffer_size(-1, 2304), 8_388_608);
    }

    #[test]
    fn timeouts_are_checked() {
        let time = |seconds, microseconds| parse_timeout(Timeval { seconds, microseconds });
        assert_eq!(time(0, 0), Ok(None));
        assert_eq!(time(1, 500_000), Ok(Some(1_500_000_000)));
        assert_eq!(time(0, 1_000_000), Err(Errno::EDOM));
        assert_eq!(time(-1, 0), Ok(Some(0)));
    }
}
