//! Socket options that are plain numbers.

use super::address::{AF_INET, AF_INET6, AF_NETLINK, AF_UNIX};
use super::socket::{Common, SocketType};
use super::udp::IPPROTO_UDPLITE;

/// An option's level and number.
pub type Name = (i32, i32);

/// What a number may be.
#[derive(Clone, Copy)]
pub enum Range {
    /// Zero or not; reads as 0 or 1.
    Flag,
    /// Zero or one, `EINVAL` otherwise.
    Bit,
    /// Any number.
    Any,
    /// These bounds, `EINVAL` outside.
    Within(i32, i32),
    /// As [`Range::Within`], and -1 gives back the default (ip(7), `IP_TTL`).
    Reset(i32, i32),
    /// Bytes of a UDP-Lite packet: 0, or at least its header (udplite(7)).
    Coverage,
    /// Can be asked for only: `ENOPROTOOPT`.
    Fixed,
}

/// Sockets that have an option.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Of {
    /// All.
    All,
    /// Unix and netlink sockets.
    Local,
    /// Netlink sockets.
    Netlink,
    /// IPv4 and IPv6 sockets.
    Internet,
    /// IPv6 sockets.
    V6,
    /// TCP sockets.
    Tcp,
    /// UDP sockets, of UDP-Lite, too.
    Udp,
    /// UDP-Lite sockets.
    UdpLite,
}

/// An option.
pub struct Plain {
    /// Level and number.
    pub name: Name,
    /// Who has it.
    pub of: Of,
    /// What it may be.
    pub range: Range,
    /// What it is at first.
    pub default: i32,
}

const fn plain(level: i32, number: i32, of: Of, range: Range, default: i32) -> Plain {
    Plain { name: (level, number), of, range, default }
}

const MAX: i32 = i32::MAX;

/// Options that are kept and given back. Those that change what a socket does
/// are looked up with [`super::options::Options::flag`]; the others have nothing
/// to act on without a network (socket(7), ip(7), ipv6(7), tcp(7), udp(7)).
///
/// Options that would have to add something to what a program receives, and do
/// not, are not here: they are refused.
pub static PLAIN: &[Plain] = &[
    plain(1, 1, Of::All, Range::Flag, 0),                 // SO_DEBUG
    plain(1, 2, Of::All, Range::Flag, 0),                 // SO_REUSEADDR
    plain(1, 5, Of::All, Range::Flag, 0),                 // SO_DONTROUTE
    plain(1, 6, Of::All, Range::Flag, 0),                 // SO_BROADCAST
    plain(1, 9, Of::All, Range::Flag, 0),                 // SO_KEEPALIVE
    plain(1, 10, Of::All, Range::Flag, 0),                // SO_OOBINLINE
    plain(1, 11, Of::All, Range::Flag, 0),                // SO_NO_CHECK
    plain(1, 12, Of::All, Range::Within(0, 6), 0),        // SO_PRIORITY
    plain(1, 15, Of::All, Range::Flag, 0),                // SO_REUSEPORT
    plain(1, 16, Of::Local, Range::Flag, 0),              // SO_PASSCRED
    plain(1, 18, Of::All, Range::Any, 1),                 // SO_RCVLOWAT
    plain(1, 19, Of::All, Range::Fixed, 1),               // SO_SNDLOWAT
    plain(1, 29, Of::All, Range::Flag, 0),                // SO_TIMESTAMP
    plain(1, 34, Of::Local, Range::Flag, 0),              // SO_PASSSEC
    plain(1, 35, Of::All, Range::Flag, 0),                // SO_TIMESTAMPNS
    plain(1, 36, Of::All, Range::Any, 0),                 // SO_MARK
    plain(1, 40, Of::All, Range::Flag, 0),                // SO_RXQ_OVFL
    plain(1, 43, Of::All, Range::Flag, 0),                // SO_NOFCS
    plain(1, 45, Of::All, Range::Flag, 0),                // SO_SELECT_ERR_QUEUE
    plain(1, 46, Of::All, Range::Within(0, MAX), 0),      // SO_BUSY_POLL
    plain(1, 48, Of::All, Range::Fixed, 64),              // SO_BPF_EXTENSIONS
    plain(1, 49, Of::All, Range::Any, -1),                // SO_INCOMING_CPU
    plain(1, 56, Of::All, Range::Fixed, 0),               // SO_INCOMING_NAPI_ID
    plain(1, 69, Of::All, Range::Flag, 0),                // SO_PREFER_BUSY_POLL
    plain(1, 74, Of::Internet, Range::Any, 1),            // SO_TXREHASH
    plain(1, 75, Of::All, Range::Flag, 0),                // SO_RCVMARK
    plain(0, 1, Of::Internet, Range::Any, 0),             // IP_TOS
    plain(0, 2, Of::Internet, Range::Reset(1, 255), 64),  // IP_TTL
    plain(0, 8, Of::Internet, Range::Flag, 0),            // IP_PKTINFO
    plain(0, 10, Of::Internet, Range::Within(0, 5), 1),   // IP_MTU_DISCOVER
    plain(0, 11, Of::Internet, Range::Flag, 0),           // IP_RECVERR
    plain(0, 12, Of::Internet, Range::Flag, 0),           // IP_RECVTTL
    plain(0, 13, Of::Internet, Range::Flag, 0),           // IP_RECVTOS
    plain(0, 15, Of::Internet, Range::Flag, 0),           // IP_FREEBIND
    plain(0, 21, Of::Internet, Range::Within(0, 255), 0), // IP_MINTTL
    plain(0, 24, Of::Internet, Range::Flag, 0),           // IP_BIND_ADDRESS_NO_PORT
    plain(0, 33, Of::Udp, Range::Reset(0, 255), 1),       // IP_MULTICAST_TTL
    plain(0, 34, Of::Internet, Range::Flag, 1),           // IP_MULTICAST_LOOP
    plain(0, 49, Of::Internet, Range::Bit, 1),            // IP_MULTICAST_ALL
    plain(41, 16, Of::V6, Range::Reset(0, 255), 64),      // IPV6_UNICAST_HOPS
    plain(41, 18, Of::V6, Range::Reset(0, 255), 1),       // IPV6_MULTICAST_HOPS
    plain(41, 19, Of::V6, Range::Bit, 1),                 // IPV6_MULTICAST_LOOP
    plain(41, 23, Of::V6, Range::Within(0, 5), 1),        // IPV6_MTU_DISCOVER
    plain(41, 25, Of::V6, Range::Flag, 0),                // IPV6_RECVERR
    plain(41, 26, Of::V6, Range::Flag, 0),                // IPV6_V6ONLY
    plain(41, 29, Of::V6, Range::Flag, 1),                // IPV6_MULTICAST_ALL
    plain(41, 49, Of::V6, Range::Flag, 0),                // IPV6_RECVPKTINFO
    plain(41, 51, Of::V6, Range::Flag, 0),                // IPV6_RECVHOPLIMIT
    plain(41, 62, Of::V6, Range::Flag, 0),                // IPV6_DONTFRAG
    plain(41, 66, Of::V6, Range::Flag, 0),                // IPV6_RECVTCLASS
    plain(41, 67, Of::V6, Range::Reset(0, 255), 0),       // IPV6_TCLASS
    plain(41, 70, Of::V6, Range::Flag, 1),                // IPV6_AUTOFLOWLABEL
    plain(41, 72, Of::V6, Range::Any, 0),                 // IPV6_ADDR_PREFERENCES
    plain(41, 73, Of::V6, Range::Within(0, 255), 0),      // IPV6_MINHOPCOUNT
    plain(41, 78, Of::V6, Range::Flag, 0),                // IPV6_FREEBIND
    plain(6, 1, Of::Tcp, Range::Flag, 0),                 // TCP_NODELAY
    plain(6, 2, Of::Tcp, Range::Within(0, 32767), 536),   // TCP_MAXSEG
    plain(6, 3, Of::Tcp, Range::Flag, 0),                 // TCP_CORK
    plain(6, 4, Of::Tcp, Range::Within(1, 32767), 7200),  // TCP_KEEPIDLE
    plain(6, 5, Of::Tcp, Range::Within(1, 32767), 75),    // TCP_KEEPINTVL
    plain(6, 6, Of::Tcp, Range::Within(1, 127), 9),       // TCP_KEEPCNT
    plain(6, 7, Of::Tcp, Range::Within(1, 127), 6),       // TCP_SYNCNT
    plain(6, 8, Of::Tcp, Range::Any, 60),                 // TCP_LINGER2
    plain(6, 9, Of::Tcp, Range::Any, 0),                  // TCP_DEFER_ACCEPT
    plain(6, 10, Of::Tcp, Range::Any, 0),                 // TCP_WINDOW_CLAMP
    plain(6, 12, Of::Tcp, Range::Flag, 1),                // TCP_QUICKACK
    plain(6, 16, Of::Tcp, Range::Bit, 0),                 // TCP_THIN_LINEAR_TIMEOUTS
    plain(6, 17, Of::Tcp, Range::Bit, 0),                 // TCP_THIN_DUPACK
    plain(6, 18, Of::Tcp, Range::Within(0, MAX), 0),      // TCP_USER_TIMEOUT
    plain(6, 23, Of::Tcp, Range::Within(0, MAX), 0),      // TCP_FASTOPEN
    plain(6, 25, Of::Tcp, Range::Any, 0),                 // TCP_NOTSENT_LOWAT
    plain(6, 30, Of::Tcp, Range::Bit, 0),                 // TCP_FASTOPEN_CONNECT
    plain(6, 34, Of::Tcp, Range::Bit, 0),                 // TCP_FASTOPEN_NO_COOKIE
    plain(6, 37, Of::Tcp, Range::Within(0, MAX), 0),      // TCP_TX_DELAY
    plain(17, 1, Of::Udp, Range::Flag, 0),                // UDP_CORK
    plain(136, 10, Of::UdpLite, Range::Coverage, 0),      // UDPLITE_SEND_CSCOV
    plain(136, 11, Of::UdpLite, Range::Coverage, 0),      // UDPLITE_RECV_CSCOV
    plain(270, 1, Of::Netlink, Range::Any, 0),            // NETLINK_ADD_MEMBERSHIP
    plain(270, 2, Of::Netlink, Range::Any, 0),            // NETLINK_DROP_MEMBERSHIP
    plain(270, 3, Of::Netlink, Range::Flag, 0),           // NETLINK_PKTINFO
    plain(270, 4, Of::Netlink, Range::Flag, 0),           // NETLINK_BROADCAST_ERROR
    plain(270, 5, Of::Netlink, Range::Flag, 0),           // NETLINK_NO_ENOBUFS
    plain(270, 10, Of::Netlink, Range::Flag, 0),          // NETLINK_CAP_ACK
    plain(270, 11, Of::Netlink, Range::Flag, 0),          // NETLINK_EXT_ACK
    plain(270, 12, Of::Netlink, Range::Flag, 0),          // NETLINK_GET_STRICT_CHK
];

/// Whether a socket has the options of `of`.
pub fn applies(of: Of, common: &Common) -> bool {
    let internet = matches!(common.family, AF_INET | AF_INET6);
    match of {
        Of::All => true,
        Of::Local => matches!(common.family, AF_UNIX | AF_NETLINK),
        Of::Netlink => common.family == AF_NETLINK,
        Of::Internet => internet,
        Of::V6 => common.family == AF_INET6,
        Of::Tcp => internet && common.kind == SocketType::Stream,
        Of::Udp => internet && common.kind == SocketType::Datagram,
        Of::UdpLite => internet && common.protocol == IPPROTO_UDPLITE,
    }
}

/// The option of this name, if the socket has it.
pub fn find(common: &Common, name: Name) -> Option<&'static Plain> {
    PLAIN.iter().find(|option| option.name == name && applies(option.of, common))
}

#[cfg(test)]
mod tests {
    use super::*;

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
