//! System calls on sockets that carry no data.

pub mod transfer;

use alloc::sync::Arc;

use crate::args::{Fd, Flags, UserPtr};
use crate::errno::{Errno, Result};
use crate::fs::fd_table;
use crate::fs::fd_table::{NewDescriptor, OnExec};
use crate::fs::file::{OpenFile, OpenFlags};
use crate::net::address::{AF_INET, AF_INET6, AF_NETLINK, AF_UNIX, SocketAddress};
use crate::net::namespace;
use crate::net::netlink::{NETLINK_ROUTE, NETLINK_SOCK_DIAG};
use crate::net::options;
use crate::net::socket::{Blocking, Protocol, ShutdownHow, Socket, SocketType};
use crate::net::udp::{IPPROTO_UDP, IPPROTO_UDPLITE};
use crate::platform::user::UserAddress;

/// `SOCK_NONBLOCK` and `SOCK_CLOEXEC` have the values of the open flags.
const TYPE_FLAGS: OpenFlags = OpenFlags::NONBLOCK.union(OpenFlags::CLOEXEC);
const TYPE_MASK: u32 = 0xf;
const SOCK_RAW: u32 = 3;

const IPPROTO_IP: u32 = 0;
const IPPROTO_TCP: u32 = 6;
/// Largest protocol family (`AF_MAX`).
const FAMILY_MAX: u32 = 46;

/// A descriptor of a socket. `ENOTSOCK` if it is something else.
pub struct SocketFd {
    /// The open file description.
    pub open: Arc<OpenFile>,
}

impl SocketFd {
    /// Looks up `fd`.
    pub fn get(fd: Fd) -> Result<Self> {
        let open = fd.usable_file()?;
        if open.downcast::<Socket>().is_none() {
            return Err(Errno::ENOTSOCK);
        }
        Ok(Self { open })
    }

    /// The protocol.
    pub fn protocol(&self) -> Result<&Arc<dyn Protocol>> {
        self.open.downcast::<Socket>().map(|socket| &socket.protocol).ok_or(Errno::ENOTSOCK)
    }

    fn blocking(&self) -> Blocking {
        if self.open.flags().contains(OpenFlags::NONBLOCK) { Blocking::No } else { Blocking::Yes }
    }
}

fn new_file(protocol: Arc<dyn Protocol>, flags: OpenFlags) -> Arc<OpenFile> {
    let status = OpenFlags::RDWR | (flags & OpenFlags::NONBLOCK);
    OpenFile::new(Socket::new(protocol), status, None)
}

/// Splits the type argument of socket(2).
fn split_type(raw: u32) -> Result<(u32, OpenFlags)> {
    let flags = OpenFlags::from_bits_retain(raw & !TYPE_MASK);
    if !TYPE_FLAGS.contains(flags) {
        return Err(Errno::EINVAL);
    }
    Ok((raw & TYPE_MASK, flags))
}

/// Makes a socket, as socket(2) says.
fn create(family: u32, kind: u32, protocol: u32) -> Result<Arc<dyn Protocol>> {
    const STREAM: u32 = SocketType::Stream as u32;
    const DATAGRAM: u32 = SocketType::Datagram as u32;
    if family >= FAMILY_MAX {
        return Err(Errno::EAFNOSUPPORT);
    }
    if kind > 10 {
        return Err(Errno::EINVAL);
    }
    let inodes = &crate::state::kernel().net.inodes;
    let net = namespace::own();
    let family = family as u16;
    match (family, kind) {
        (AF_INET | AF_INET6, STREAM) => match protocol {
            IPPROTO_IP | IPPROTO_TCP => Ok(net.tcp.socket(family, inodes)),
            _ => Err(Errno::EPROTONOSUPPORT),
        },
        (AF_INET | AF_INET6, DATAGRAM) => match protocol {
            IPPROTO_IP | IPPROTO_UDP => Ok(net.udp.socket(family, inodes)),
            IPPROTO_UDPLITE => Ok(net.udp_lite.socket(family, inodes)),
            _ => Err(Errno::EPROTONOSUPPORT),
        },
        // Of no protocol, or without CAP_NET_RAW.
        (AF_INET | AF_INET6, SOCK_RAW) if protocol == IPPROTO_IP => Err(Errno::EPROTONOSUPPORT),
        (AF_INET | AF_INET6, SOCK_RAW) => Err(Errno::EPERM),
        (AF_INET | AF_INET6, _) => Err(Errno::ESOCKTNOSUPPORT),
        (AF_UNIX, _) => match protocol {
            0 | 1 => Ok(net.unix.socket(unix_type(kind)?, inodes)),
            _ => Err(Errno::EPROTONOSUPPORT),
        },
        (AF_NETLINK, DATAGRAM | SOCK_RAW) => {
            let kind = if kind == DATAGRAM { SocketType::Datagram } else { SocketType::Raw };
            match protocol {
                NETLINK_ROUTE | NETLINK_SOCK_DIAG => Ok(net.netlink.socket(kind, protocol, inodes)),
                _ => Err(Errno::EPROTONOSUPPORT),
            }
        }
        (AF_NETLINK, _) => Err(Errno::ESOCKTNOSUPPORT),
        _ => Err(Errno::EAFNOSUPPORT),
    }
}

fn unix_type(kind: u32) -> Result<SocketType> {
    match kind {
        1 => Ok(SocketType::Stream),
        // As on Linux, raw means datagram here.
        2 | SOCK_RAW => Ok(SocketType::Datagram),
        5 => Ok(SocketType::SequencedPacket),
        _ => Err(Errno::ESOCKTNOSUPPORT),
    }
}

/// socket(2).
pub fn socket(family: u32, Flags(kind): Flags, protocol: u32) -> Result<i32> {
    let (kind, flags) = split_type(kind)?;
    let open = new_file(create(family, kind, protocol)?, flags);
    fd_table::install(open, flags)
}

/// socketpair(2).
pub fn socketpair(
    family: u32,
    Flags(kind): Flags,
    protocol: u32,
    at: UserPtr<[i32; 2]>,
) -> Result<()> {
    let (kind, flags) = split_type(kind)?;
    if family != AF_UNIX as u32 {
        // Whatever the family, there must be such a socket first.
        create(family, kind, protocol)?.close();
        return Err(Errno::EOPNOTSUPP);
    }
    if protocol > 1 {
        return Err(Errno::EPROTONOSUPPORT);
    }
    at.check(1)?;
    let inodes = &crate::state::kernel().net.inodes;
    let net = namespace::own();
    let (first, second) = net.unix.pair(unix_type(kind)?, inodes);
    fd_table::install_pair(at, [new_file(first, flags), new_file(second, flags)], flags)
}

/// bind(2).
pub fn bind(fd: Fd, address: UserPtr<u8>, len: u32) -> Result<()> {
    let socket = SocketFd::get(fd)?;
    let address = SocketAddress::from_user(address, len as usize)?;
    socket.protocol()?.bind(&address)?;
    crate::net::ready_for_clients();
    Ok(())
}

/// listen(2).
pub fn listen(fd: Fd, backlog: i32) -> Result<()> {
    SocketFd::get(fd)?.protocol()?.listen(backlog)?;
    crate::net::ready_for_clients();
    Ok(())
}

/// accept(2).
pub fn accept(fd: Fd, address: UserPtr<u8>, len: UserPtr<i32>) -> Result<i32> {
    accept4(fd, address, len, Flags(0))
}

/// accept4(2).
pub fn accept4(
    fd: Fd,
    address: UserPtr<u8>,
    len: UserPtr<i32>,
    Flags(flags): Flags,
) -> Result<i32> {
    let flags = OpenFlags::from_bits_retain(flags);
    if !TYPE_FLAGS.contains(flags) {
        return Err(Errno::EINVAL);
    }
    let socket = SocketFd::get(fd)?;
    let protocol = socket.protocol()?;
    if !address.is_null() {
        len.read()?;
    }
    let timeout = protocol.common().options.borrow_mut().receive_timeout_ns;
    // Without a free descriptor the connection goes on waiting.
    let descriptor = NewDescriptor::reserve()?;
    let accepted = socket.open.blocking(timeout, || protocol.accept())?;
    // The client may be gone already: its address is then the empty one.
    let peer = accepted.peer_address().unwrap_or(SocketAddress::Unspecified);
    let open = new_file(accepted, flags);
    // As on Linux, a connection whose address cannot be told is closed.
    peer.to_user(address, len)?;
    Ok(descriptor.install(open, OnExec::of(flags)))
}

/// connect(2).
pub fn connect(fd: Fd, address: UserPtr<u8>, len: u32) -> Result<()> {
    let socket = SocketFd::get(fd)?;
    connect_to(&socket, &SocketAddress::from_user(address, len as usize)?, socket.blocking())
}

/// Connects a socket, and waits for it if it may block.
fn connect_to(socket: &SocketFd, address: &SocketAddress, blocking: Blocking) -> Result<()> {
    let protocol = socket.protocol()?;
    let timeout = protocol.common().options.borrow_mut().send_timeout_ns;
    let outcome = match blocking {
        Blocking::Yes => socket.open.blocking(timeout, || protocol.connect(address, blocking)),
        Blocking::No => protocol.connect(address, blocking),
    };
    match outcome {
        Err(Errno::EINPROGRESS | Errno::EALREADY) if blocking == Blocking::Yes => {
            match socket.open.blocking(timeout, || protocol.finish_connect()) {
                // connect(2) with SO_SNDTIMEO: goes on in the background.
                Err(Errno::EAGAIN) => Err(Errno::EINPROGRESS),
                outcome => outcome,
            }
        }
        outcome => outcome,
    }
}

/// getsockname(2).
pub fn getsockname(fd: Fd, address: UserPtr<u8>, len: UserPtr<i32>) -> Result<()> {
    let socket = SocketFd::get(fd)?;
    name_to_user(&socket.protocol()?.local_address(), address, len)
}

/// getpeername(2).
pub fn getpeername(fd: Fd, address: UserPtr<u8>, len: UserPtr<i32>) -> Result<()> {
    let socket = SocketFd::get(fd)?;
    name_to_user(&socket.protocol()?.peer_address()?, address, len)
}

fn name_to_user(address: &SocketAddress, at: UserPtr<u8>, len: UserPtr<i32>) -> Result<()> {
    if at.is_null() {
        return Err(Errno::EFAULT);
    }
    address.to_user(at, len)
}

/// shutdown(2).
pub fn shutdown(fd: Fd, how: i32) -> Result<()> {
    let socket = SocketFd::get(fd)?;
    let how = ShutdownHow::from_raw(how)?;
    socket.protocol()?.shutdown(how)
}

/// setsockopt(2).
pub fn setsockopt(fd: Fd, level: i32, name: i32, value: UserAddress, len: i32) -> Result<()> {
    let socket = SocketFd::get(fd)?;
    let len = usize::try_from(len).map_err(|_| Errno::EINVAL)?;
    let protocol = socket.protocol()?;
    options::set(protocol.as_ref(), level, name, value, len)
}

/// getsockopt(2).
pub fn getsockopt(
    fd: Fd,
    level: i32,
    name: i32,
    value: UserAddress,
    len: UserAddress,
) -> Result<()> {
    let socket = SocketFd::get(fd)?;
    let protocol = socket.protocol()?;
    options::get(protocol.as_ref(), level, name, value, len)
}
