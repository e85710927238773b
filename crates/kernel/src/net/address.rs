//! Socket addresses (socket(7), ip(7), ipv6(7), unix(7)).

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::args::UserPtr;
use crate::errno::{Errno, Result};

/// `AF_UNSPEC`.
pub const AF_UNSPEC: u16 = 0;
/// `AF_UNIX`.
pub const AF_UNIX: u16 = 1;
/// `AF_INET`.
pub const AF_INET: u16 = 2;
/// `AF_NETLINK`.
pub const AF_NETLINK: u16 = 16;
/// `AF_INET6`.
pub const AF_INET6: u16 = 10;

/// Bytes of `struct sockaddr_storage`: no address is longer.
pub const ADDRESS_MAX: usize = 128;
/// Bytes of `sun_path`.
const UNIX_PATH_MAX: usize = 108;

/// An Internet address and port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Endpoint {
    /// The address; never a v4-mapped one.
    pub ip: IpAddr,
    /// The port, host byte order.
    pub port: u16,
}

/// The name of a Unix socket.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnixName {
    /// None.
    Unnamed,
    /// A path, as the program gave it.
    Path(Arc<[u8]>),
    /// A name in the abstract namespace, without the leading NUL.
    Abstract(Arc<[u8]>),
}

/// An address as system calls pass it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SocketAddress {
    /// `AF_UNSPEC`: connect(2) to it dissolves an association.
    Unspecified,
    /// `AF_INET`.
    V4(Endpoint),
    /// `AF_INET6`; holds an IPv4 address if that was v4-mapped.
    V6(Endpoint),
    /// `AF_UNIX`.
    Unix(UnixName),
    /// `AF_NETLINK`.
    Netlink {
        /// Who; 0 is the kernel.
        port: u32,
        /// Multicast groups.
        groups: u32,
    },
    /// Something else.
    Other(u16),
}

impl Endpoint {
    /// The wildcard address and port 0 of a family.
    pub fn wildcard(family: u16) -> Self {
        let ip = match family {
            AF_INET6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        };
        Self { ip, port: 0 }
    }

    /// The same address with another port.
    pub fn with_port(self, port: u16) -> Self {
        Self { port, ..self }
    }

    /// From the control protocol. A v4-mapped address becomes an IPv4 one.
    pub fn from_host(address: &thaw_abi::control::Address) -> Self {
        let [a, b, c, d, ..] = address.bytes;
        let ip = match address.family {
            AF_INET6 => unmap(Ipv6Addr::from(address.bytes)),
            _ => IpAddr::V4(Ipv4Addr::new(a, b, c, d)),
        };
        Self { ip, port: address.port }
    }

    /// As a socket of `family` reports it.
    pub fn for_family(self, family: u16) -> SocketAddress {
        if family == AF_INET6 { SocketAddress::V6(self) } else { SocketAddress::V4(self) }
    }

    /// Whether packets to it stay within the sandbox: loopback, wildcard and
    /// the sandbox's own address.
    pub fn is_local(self) -> bool {
        self.ip.is_loopback() || self.ip.is_unspecified() || super::outside::is_own(self.ip)
    }

    /// Where packets to it go: the wildcard address means this host.
    pub fn as_destination(self) -> Self {
        let ip = match self.ip {
            IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
            ip => ip,
        };
        Self { ip, ..self }
    }
}

fn unmap(ip: Ipv6Addr) -> IpAddr {
    ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4)
}

impl SocketAddress {
    /// Reads an address from guest memory.
    pub fn from_user(at: UserPtr<u8>, len: usize) -> Result<Self> {
        // `int` on Linux: a negative length is as wrong as one that is too long.
        if len > ADDRESS_MAX {
            return Err(Errno::EINVAL);
        }
        let mut bytes = [0; ADDRESS_MAX];
        at.read_slice(&mut bytes[..len])?;
        Self::parse(&bytes[..len])
    }

    /// Decodes `struct sockaddr_*`. `EINVAL` if it is too short for its family.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let [f0, f1, rest @ ..] = bytes else { return Err(Errno::EINVAL) };
        let family = u16::from_ne_bytes([*f0, *f1]);
        match family {
            AF_UNSPEC => Ok(Self::Unspecified),
            AF_INET => match rest {
                [p0, p1, a, b, c, d, ..] if bytes.len() >= 16 => Ok(Self::V4(Endpoint {
                    ip: IpAddr::V4(Ipv4Addr::new(*a, *b, *c, *d)),
                    port: u16::from_be_bytes([*p0, *p1]),
                })),
                _ => Err(Errno::EINVAL),
            },
            // SIN6_LEN_RFC2133: without the scope.
            AF_INET6 => match rest {
                [p0, p1, _, _, _, _, ip @ ..] if bytes.len() >= 24 => {
                    let mut octets = [0; 16];
                    octets.copy_from_slice(&ip[..16]);
                    let ip = unmap(Ipv6Addr::from(octets));
                    Ok(Self::V6(Endpoint { ip, port: u16::from_be_bytes([*p0, *p1]) }))
                }
                _ => Err(Errno::EINVAL),
            },
            AF_UNIX => match rest {
                [] => Ok(Self::Unix(UnixName::Unnamed)),
                path if path.len() > UNIX_PATH_MAX => Err(Errno::EINVAL),
                [0, name @ ..] => Ok(Self::Unix(UnixName::Abstract(name.into()))),
                path => {
                    let end = path.iter().position(|&byte| byte == 0).unwrap_or(path.len());
                    Ok(Self::Unix(UnixName::Path(path[..end].into())))
                }
            },
            AF_NETLINK => match rest {
                [_, _, p0, p1, p2, p3, g0, g1, g2, g3, ..] => Ok(Self::Netlink {
                    port: u32::from_ne_bytes([*p0, *p1, *p2, *p3]),
                    groups: u32::from_ne_bytes([*g0, *g1, *g2, *g3]),
                }),
                _ => Err(Errno::EINVAL),
            },
            other => Ok(Self::Other(other)),
        }
    }

    /// Encodes `struct sockaddr_*`.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(UNIX_PATH_MAX + 2);
        match self {
            Self::Unspecified => bytes.extend_from_slice(&AF_UNSPEC.to_ne_bytes()),
            Self::Other(family) => bytes.extend_from_slice(&family.to_ne_bytes()),
            Self::Netlink { port, groups } => {
                bytes.extend_from_slice(&AF_NETLINK.to_ne_bytes());
                bytes.extend_from_slice(&[0; 2]);
                bytes.extend_from_slice(&port.to_ne_bytes());
                bytes.extend_from_slice(&groups.to_ne_bytes());
            }
            Self::V4(endpoint) => {
                bytes.extend_from_slice(&AF_INET.to_ne_bytes());
                bytes.extend_from_slice(&endpoint.port.to_be_bytes());
                let ip = match endpoint.ip {
                    IpAddr::V4(ip) => ip,
                    // A client of another family on an IPv4 socket: its own
                    // address has no such form.
                    IpAddr::V6(ip) if ip.is_loopback() => Ipv4Addr::LOCALHOST,
                    IpAddr::V6(_) => Ipv4Addr::UNSPECIFIED,
                };
                bytes.extend_from_slice(&ip.octets());
                bytes.extend_from_slice(&[0; 8]);
            }
            Self::V6(endpoint) => {
                bytes.extend_from_slice(&AF_INET6.to_ne_bytes());
                bytes.extend_from_slice(&endpoint.port.to_be_bytes());
                bytes.extend_from_slice(&[0; 4]);
                let ip = match endpoint.ip {
                    IpAddr::V6(ip) => ip,
                    IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                };
                bytes.extend_from_slice(&ip.octets());
                bytes.extend_from_slice(&[0; 4]);
            }
            Self::Unix(name) => {
                bytes.extend_from_slice(&AF_UNIX.to_ne_bytes());
                match name {
                    UnixName::Unnamed => {}
                    UnixName::Path(path) => {
                        bytes.extend_from_slice(path);
                        bytes.push(0);
                    }
                    UnixName::Abstract(name) => {
                        bytes.push(0);
                        bytes.extend_from_slice(name);
                    }
                }
            }
        }
        bytes
    }

    /// Writes the address into a guest's buffer of `*len` bytes at `at`, cut
    /// to fit, and its whole length to `len` (accept(2)).
    pub fn to_user(&self, at: UserPtr<u8>, len: UserPtr<i32>) -> Result<()> {
        if at.is_null() {
            return Ok(());
        }
        store(&self.encode(), at, len)
    }

    /// Stores that there is none, as [`SocketAddress::to_user`] an address.
    pub fn none_to_user(at: UserPtr<u8>, len: UserPtr<i32>) -> Result<()> {
        if at.is_null() { Ok(()) } else { store(&[], at, len) }
    }
}

/// Stores as much of an encoded address as there is room for, which `len` says, and in `len` how long it is.
fn store(bytes: &[u8], at: UserPtr<u8>, len: UserPtr<i32>) -> Result<()> {
    let room = usize::try_from(len.read()?).map_err(|_| Errno::EINVAL)?;
    at.write_slice(&bytes[..bytes.len().min(room)])?;
    len.write(&(bytes.len() as i32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_encoding() {
        let v4 = SocketAddress::V4(Endpoint { ip: Ipv4Addr::new(127, 0, 0, 1).into(), port: 8080 });
        assert_eq!(v4.encode(), [2, 0, 0x1f, 0x90, 127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
        let v6 = SocketAddress::V6(Endpoint { ip: Ipv6Addr::LOCALHOST.into(), port: 1 });
        let mapped = SocketAddress::V6(Endpoint { ip: Ipv4Addr::LOCALHOST.into(), port: 1 });
        assert_eq!(
            mapped.encode()[8..24],
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1]
        );
        let path = SocketAddress::Unix(UnixName::Path(b"/tmp/x".as_slice().into()));
        assert_eq!(path.encode().len(), 2 + 7);
        let hidden = SocketAddress::Unix(UnixName::Abstract(b"a\0b".as_slice().into()));
        let unnamed = SocketAddress::Unix(UnixName::Unnamed);
        let netlink = SocketAddress::Netlink { port: 7, groups: 1 };
        for address in [v4, v6, mapped, path, hidden, unnamed, netlink] {
            assert_eq!(SocketAddress::parse(&address.encode()), Ok(address));
        }
    }

    #[test]
    fn short_and_long_addresses_are_refused() {
        assert_eq!(SocketAddress::parse(&[2]), Err(Errno::EINVAL));
        assert_eq!(SocketAddress::parse(&[2, 0, 0, 80, 127, 0, 0]), Err(Errno::EINVAL));
        let mut long = vec![1, 0];
        long.extend([b'x'; 109]);
        assert_eq!(SocketAddress::parse(&long), Err(Errno::EINVAL));
        long.pop();
        assert!(SocketAddress::parse(&long).is_ok());
        assert_eq!(SocketAddress::parse(&[40, 0]), Ok(SocketAddress::Other(40)));
    }
}
