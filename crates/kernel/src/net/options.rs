//! getsockopt(2) and setsockopt(2).
//!
//! Most options of a socket without a network are numbers that are kept and
//! given back; [`PLAIN`] lists them with their defaults, as Linux reports them.
//! The others are matched by name.

use alloc::vec::Vec;

use super::address::{AF_INET, AF_INET6, AF_NETLINK, AF_UNIX, Endpoint};
use super::socket::{Common, PeerCredentials, Protocol, SocketType};
use crate::errno::{Errno, Result};
use crate::ipc::timeout::Timeval;
use crate::platform::user::UserAddress;

const SOL_IP: i32 = 0;
const SOL_SOCKET: i32 = 1;
const SOL_TCP: i32 = 6;
const SOL_UDP: i32 = 17;
const SOL_IPV6: i32 = 41;
const SOL_NETLINK: i32 = 270;

/// An option's level and number.
pub type Name = (i32, i32);

/// `SO_REUSEADDR`.
pub const REUSEADDR: Name = (SOL_SOCKET, 2);
/// `SO_REUSEPORT`.
pub const REUSEPORT: Name = (SOL_SOCKET, 15);
/// `SO_PASSCRED`.
pub const PASSCRED: Name = (SOL_SOCKET, 16);
/// `IPV6_V6ONLY`.
pub const V6ONLY: Name = (SOL_IPV6, 26);

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
const TCP_INFO: i32 = 11;
const TCP_CONGESTION: i32 = 13;

/// What a number may be.
#[derive(Clone, Copy)]
enum Range {
    /// Zero or not; reads as 0 or 1.
    Flag,
    /// Any number.
    Any,
    /// These bounds, `EINVAL` outside.
    Within(i32, i32),
}

/// Sockets that have an option.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    All,
    /// Unix and netlink sockets.
    Local,
    Netlink,
    Internet,
    V6,
    Tcp,
    Udp,
}

struct Plain {
    name: Name,
    of: Of,
    range: Range,
    default: i32,
}

const fn plain(level: i32, number: i32, of: Of, range: Range, default: i32) -> Plain {
    Plain { name: (level, number), of, range, default }
}

/// Options that are kept and given back. Those that change what a socket does
/// are looked up with [`Options::flag`]; the others have nothing to act on
/// without a network (socket(7), ip(7), ipv6(7), tcp(7), udp(7)).
static PLAIN: &[Plain] = &[
    plain(1, 1, Of::All, Range::Flag, 0),                 // SO_DEBUG
    plain(1, 2, Of::All, Range::Flag, 0),                 // SO_REUSEADDR
    plain(1, 5, Of::All, Range::Flag, 0),                 // SO_DONTROUTE
    plain(1, 6, Of::All, Range::Flag, 0),                 // SO_BROADCAST
    plain(1, 9, Of::All, Range::Flag, 0),                 // SO_KEEPALIVE
    plain(1, 10, Of::All, Range::Flag, 0),                // SO_OOBINLINE
    plain(1, 12, Of::All, Range::Within(0, 6), 0),        // SO_PRIORITY
    plain(1, 15, Of::All, Range::Flag, 0),                // SO_REUSEPORT
    plain(1, 16, Of::Local, Range::Flag, 0),              // SO_PASSCRED
    plain(1, 18, Of::All, Range::Any, 1),                 // SO_RCVLOWAT
    plain(1, 29, Of::All, Range::Flag, 0),                // SO_TIMESTAMP
    plain(1, 35, Of::All, Range::Flag, 0),                // SO_TIMESTAMPNS
    plain(1, 46, Of::All, Range::Within(0, i32::MAX), 0), // SO_BUSY_POLL
    plain(0, 1, Of::Internet, Range::Any, 0),             // IP_TOS
    plain(0, 2, Of::Internet, Range::Within(1, 255), 64), // IP_TTL
    plain(0, 8, Of::Internet, Range::Flag, 0),            // IP_PKTINFO
    plain(0, 10, Of::Internet, Range::Within(0, 5), 1),   // IP_MTU_DISCOVER
    plain(0, 11, Of::Internet, Range::Flag, 0),           // IP_RECVERR
    plain(0, 15, Of::Internet, Range::Flag, 0),           // IP_FREEBIND
    plain(0, 24, Of::Internet, Range::Flag, 0),           // IP_BIND_ADDRESS_NO_PORT
    plain(0, 33, Of::Internet, Range::Within(0, 255), 1), // IP_MULTICAST_TTL
    plain(0, 34, Of::Internet, Range::Flag, 1),           // IP_MULTICAST_LOOP
    plain(41, 16, Of::V6, Range::Within(-1, 255), 64),    // IPV6_UNICAST_HOPS
    plain(41, 18, Of::V6, Range::Within(-1, 255), 1),     // IPV6_MULTICAST_HOPS
    plain(41, 19, Of::V6, Range::Flag, 1),                // IPV6_MULTICAST_LOOP
    plain(41, 25, Of::V6, Range::Flag, 0),                // IPV6_RECVERR
    plain(41, 26, Of::V6, Range::Flag, 0),                // IPV6_V6ONLY
    plain(41, 49, Of::V6, Range::Flag, 0),                // IPV6_RECVPKTINFO
    plain(41, 66, Of::V6, Range::Flag, 0),                // IPV6_RECVTCLASS
    plain(41, 67, Of::V6, Range::Within(-1, 255), 0),     // IPV6_TCLASS
    plain(6, 1, Of::Tcp, Range::Flag, 0),                 // TCP_NODELAY
    plain(6, 2, Of::Tcp, Range::Within(0, 32767), 536),   // TCP_MAXSEG
    plain(6, 3, Of::Tcp, Range::Flag, 0),                 // TCP_CORK
    plain(6, 4, Of::Tcp, Range::Within(1, 32767), 7200),  // TCP_KEEPIDLE
    plain(6, 5, Of::Tcp, Range::Within(1, 32767), 75),    // TCP_KEEPINTVL
    plain(6, 6, Of::Tcp, Range::Within(1, 127), 9),       // TCP_KEEPCNT
    plain(6, 7, Of::Tcp, Range::Any, 6),                  // TCP_SYNCNT
    plain(6, 8, Of::Tcp, Range::Any, 60),                 // TCP_LINGER2
    plain(6, 9, Of::Tcp, Range::Within(0, i32::MAX), 0),  // TCP_DEFER_ACCEPT
    plain(6, 10, Of::Tcp, Range::Any, 0),                 // TCP_WINDOW_CLAMP
    plain(6, 12, Of::Tcp, Range::Flag, 1),                // TCP_QUICKACK
    plain(6, 18, Of::Tcp, Range::Within(0, i32::MAX), 0), // TCP_USER_TIMEOUT
    plain(6, 23, Of::Tcp, Range::Within(0, i32::MAX), 0), // TCP_FASTOPEN
    plain(6, 25, Of::Tcp, Range::Any, 0),                 // TCP_NOTSENT_LOWAT
    plain(6, 30, Of::Tcp, Range::Flag, 0),                // TCP_FASTOPEN_CONNECT
    plain(17, 1, Of::Udp, Range::Flag, 0),                // UDP_CORK
    plain(270, 1, Of::Netlink, Range::Any, 0),            // NETLINK_ADD_MEMBERSHIP
    plain(270, 2, Of::Netlink, Range::Any, 0),            // NETLINK_DROP_MEMBERSHIP
    plain(270, 3, Of::Netlink, Range::Flag, 0),           // NETLINK_PKTINFO
    plain(270, 4, Of::Netlink, Range::Flag, 0),           // NETLINK_BROADCAST_ERROR
    plain(270, 5, Of::Netlink, Range::Flag, 0),           // NETLINK_NO_ENOBUFS
    plain(270, 10, Of::Netlink, Range::Flag, 0),          // NETLINK_CAP_ACK
    plain(270, 11, Of::Netlink, Range::Flag, 0),          // NETLINK_EXT_ACK
    plain(270, 12, Of::Netlink, Range::Flag, 0),          // NETLINK_GET_STRICT_CHK
];

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
    /// Whether an option of [`PLAIN`] is on.
    pub fn flag(&self, name: Name) -> bool {
        self.plain.iter().any(|(other, value)| *other == name && *value != 0)
    }

    /// The value of an option of [`PLAIN`], if it was set.
    fn value(&self, name: Name) -> Option<i32> {
        self.plain.iter().find(|(other, _)| *other == name).map(|(_, value)| *value)
    }

    fn set_value(&mut self, name: Name, value: i32) {
        match self.plain.iter_mut().find(|(other, _)| *other == name) {
            Some((_, old)) => *old = value,
            None => self.plain.push((name, value)),
        }
    }
}

fn applies(of: Of, common: &Common) -> bool {
    let internet = matches!(common.family, AF_INET | AF_INET6);
    match of {
        Of::All => true,
        Of::Local => !internet,
        Of::Netlink => common.family == AF_NETLINK,
        Of::Internet => internet,
        Of::V6 => common.family == AF_INET6,
        Of::Tcp => internet && common.kind == SocketType::Stream,
        Of::Udp => internet && common.kind == SocketType::Datagram,
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
    let known = match level {
        SOL_SOCKET => true,
        SOL_IP => internet,
        SOL_TCP => applies(Of::Tcp, common),
        SOL_UDP => applies(Of::Udp, common),
        SOL_IPV6 => applies(Of::V6, common),
        SOL_NETLINK => applies(Of::Netlink, common),
        _ => false,
    };
    if known || (internet && operation == Operation::Set) {
        Errno::ENOPROTOOPT
    } else {
        Errno::EOPNOTSUPP
    }
}

fn find(common: &Common, name: Name) -> Option<&'static Plain> {
    PLAIN.iter().find(|option| option.name == name && applies(option.of, common))
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
            SO_LINGER => {
                if len < 8 {
                    return Err(Errno::EINVAL);
                }
                let [on, seconds] = at.read::<[i32; 2]>()?;
                common.options.lock().linger = (on != 0).then_some(seconds);
                return Ok(());
            }
            SO_RCVTIMEO | SO_SNDTIMEO => {
                if len < size_of::<Timeval>() {
                    return Err(Errno::EINVAL);
                }
                let timeout = parse_timeout(at.read()?)?;
                let mut options = common.options.lock();
                let slot = if number == SO_RCVTIMEO {
                    &mut options.receive_timeout_ns
                } else {
                    &mut options.send_timeout_ns
                };
                *slot = timeout;
                return Ok(());
            }
            SO_SNDBUF | SO_SNDBUFFORCE => {
                common.options.lock().send_buffer = Some(buffer_size(word()?, 4608));
                socket.options_changed();
                return Ok(());
            }
            SO_RCVBUF | SO_RCVBUFFORCE => {
                common.options.lock().receive_buffer = Some(buffer_size(word()?, 2304));
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
    let option =
        find(common, (level, number)).ok_or_else(|| unknown(common, level, Operation::Set))?;
    // ip(7): the options of that level may be a single byte.
    let value = match level {
        SOL_IP if (1..4).contains(&len) => at.read::<u8>()? as i32,
        _ => word()?,
    };
    let value = match option.range {
        Range::Flag => (value != 0) as i32,
        Range::Any => value,
        Range::Within(low, high) if (low..=high).contains(&value) => value,
        // -1 gives back the default (ip(7), IP_TTL).
        Range::Within(..) if value == -1 => option.default,
        Range::Within(..) => return Err(Errno::EINVAL),
    };
    if option.name == V6ONLY
        && socket.local_address() != Endpoint::wildcard(AF_INET6).for_family(AF_INET6)
    {
        return Err(Errno::EINVAL);
    }
    common.options.lock().set_value(option.name, value);
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
                common.options.lock().send_buffer.unwrap_or(default_buffer(common).0) as i32
            }
            SO_RCVBUF => {
                common.options.lock().receive_buffer.unwrap_or(default_buffer(common).1) as i32
            }
            SO_LINGER => {
                let linger = common.options.lock().linger;
                let value = [linger.is_some() as i32, linger.unwrap_or(0)];
                return store(bytemuck::bytes_of(&value));
            }
            SO_RCVTIMEO | SO_SNDTIMEO => {
                let options = common.options.lock();
                let ns = if number == SO_RCVTIMEO {
                    options.receive_timeout_ns
                } else {
                    options.send_timeout_ns
                };
                return store(bytemuck::bytes_of(&Timeval::from_ns(ns.unwrap_or(0))));
            }
            SO_PEERCRED => {
                let nobody = PeerCredentials { pid: 0, uid: u32::MAX, gid: u32::MAX };
                return store(bytemuck::bytes_of(&socket.peer_credentials().unwrap_or(nobody)));
            }
            // SO_SNDLOWAT: cannot be changed on Linux.
            19 => 1,
            // SO_INCOMING_CPU, SO_INCOMING_NAPI_ID, SO_MARK, SO_RXQ_OVFL, SO_LOCK_FILTER.
            49 => -1,
            56 | 36 | 40 | 44 => 0,
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
                const ESTABLISHED: u8 = 1;
                const CLOSED: u8 = 7;
                const LISTEN: u8 = 10;
                let mut info = [0u8; 232];
                info[0] = match socket.peer_address() {
                    Ok(_) => ESTABLISHED,
                    Err(_) if socket.is_listening() => LISTEN,
                    Err(_) => CLOSED,
                };
                return store(&info);
            }
            _ => {}
        }
    }
    let word = plain_value(common, (level, number))?;
    if level == SOL_IP && (1..4).contains(&room) && (0..256).contains(&word) {
        return store(&[word as u8]);
    }
    store(&word.to_ne_bytes())
}

fn plain_value(common: &Common, name: Name) -> Result<i32> {
    // As Linux: the option exists, but not for this family.
    if name == PASSCRED && !applies(Of::Local, common) {
        return Err(Errno::EOPNOTSUPP);
    }
    let option = find(common, name).ok_or_else(|| unknown(common, name.0, Operation::Get))?;
    Ok(common.options.lock().value(name).unwrap_or(option.default))
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

    #[test]
    fn no_option_is_listed_twice() {
        for (index, option) in PLAIN.iter().enumerate() {
            assert!(
                PLAIN[..index].iter().all(|other| other.name != option.name),
                "{:?}",
                option.name
            );
        }
    }
}
