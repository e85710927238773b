//! System calls on sockets that carry no data.

pub mod transfer;

use alloc::sync::Arc;

use crate::args::Args;
use crate::errno::{Errno, Result};
use crate::fs::fd_table;
use crate::fs::fd_table::NewDescriptor;
use crate::fs::fd_table::OnExec;
use crate::fs::file::{OpenFile, OpenFlags};
use crate::net::address::{AF_INET, AF_INET6, AF_NETLINK, AF_UNIX, SocketAddress};
use crate::net::netlink::NETLINK_ROUTE;
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
    pub fn get(fd: i32) -> Result<Self> {
        let open = fd_table::file(fd)?;
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
    let net = &crate::state::kernel().net;
    let family = family as u16;
    match (family, kind) {
        (AF_INET | AF_INET6, STREAM) => match protocol {
            IPPROTO_IP | IPPROTO_TCP => Ok(net.tcp.socket(family, &net.inodes)),
            _ => Err(Errno::EPROTONOSUPPORT),
        },
        (AF_INET | AF_INET6, DATAGRAM) => match protocol {
            IPPROTO_IP | IPPROTO_UDP => Ok(net.udp.socket(family, &net.inodes)),
            IPPROTO_UDPLITE => Ok(net.udp_lite.socket(family, &net.inodes)),
            _ => Err(Errno::EPROTONOSUPPORT),
        },
        // Without CAP_NET_RAW.
        (AF_INET | AF_INET6, SOCK_RAW) => Err(Errno::EPERM),
        (AF_INET | AF_INET6, _) => Err(Errno::ESOCKTNOSUPPORT),
        (AF_UNIX, _) => match protocol {
            0 | 1 => Ok(net.unix.socket(unix_type(kind)?, &net.inodes)),
            _ => Err(Errno::EPROTONOSUPPORT),
        },
        (AF_NETLINK, DATAGRAM | SOCK_RAW) => {
            let kind = if kind == DATAGRAM { SocketType::Datagram } else { SocketType::Raw };
            match protocol {
                NETLINK_ROUTE => Ok(net.netlink.socket(kind, &net.inodes)),
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
pub fn sys_socket(args: &Args) -> Result<u64> {
    let (kind, flags) = split_type(args.u32(1))?;
    let open = new_file(create(args.u32(0), kind, args.u32(2))?, flags);
    fd_table::install(open, flags).map(|fd| fd as u64)
}

/// socketpair(2).
pub fn sys_socketpair(args: &Args) -> Result<u64> {
    let (kind, flags) = split_type(args.u32(1))?;
    if args.u32(0) != AF_UNIX as u32 {
        // Whatever the family, there must be such a socket first.
        create(args.u32(0), kind, args.u32(2))?.close();
        return Err(Errno::EOPNOTSUPP);
    }
    if args.u32(2) > 1 {
        return Err(Errno::EPROTONOSUPPORT);
    }
    let at = args.address(3);
    at.check(8)?;
    let net = &crate::state::kernel().net;
    let (first, second) = net.unix.pair(unix_type(kind)?, &net.inodes);
    fd_table::install_pair(at, [new_file(first, flags), new_file(second, flags)], flags)
}

/// bind(2).
pub fn sys_bind(args: &Args) -> Result<u64> {
    let socket = SocketFd::get(args.fd(0))?;
    let address = SocketAddress::from_user(args.address(1), args.u32(2) as usize)?;
    socket.protocol()?.bind(&address)?;
    crate::net::ready_for_clients();
    Ok(0)
}

/// listen(2).
pub fn sys_listen(args: &Args) -> Result<u64> {
    SocketFd::get(args.fd(0))?.protocol()?.listen(args.i32(1))?;
    crate::net::ready_for_clients();
    Ok(0)
}

/// accept(2).
pub fn sys_accept(args: &Args) -> Result<u64> {
    accept(args, OpenFlags::empty())
}

/// accept4(2).
pub fn sys_accept4(args: &Args) -> Result<u64> {
    let flags = OpenFlags::from_bits_retain(args.u32(3));
    if !TYPE_FLAGS.contains(flags) {
        return Err(Errno::EINVAL);
    }
    accept(args, flags)
}

fn accept(args: &Args, flags: OpenFlags) -> Result<u64> {
    let socket = SocketFd::get(args.fd(0))?;
    let protocol = socket.protocol()?;
    if !args.address(1).is_null() {
        args.address(2).read::<i32>()?;
    }
    let timeout = protocol.common().options.lock().receive_timeout_ns;
    // Without a free descriptor the connection goes on waiting.
    let descriptor = NewDescriptor::reserve()?;
    let accepted = socket.open.blocking(timeout, || protocol.accept())?;
    // The client may be gone already: its address is then the empty one.
    let peer = accepted.peer_address().unwrap_or(SocketAddress::Unspecified);
    let open = new_file(accepted, flags);
    // As on Linux, a connection whose address cannot be told is closed.
    peer.to_user(args.address(1), args.address(2))?;
    Ok(descriptor.install(open, OnExec::of(flags)) as u64)
}

/// connect(2).
pub fn sys_connect(args: &Args) -> Result<u64> {
    let socket = SocketFd::get(args.fd(0))?;
    let address = SocketAddress::from_user(args.address(1), args.u32(2) as usize)?;
    let protocol = socket.protocol()?;
    let blocking = socket.blocking();
    let timeout = protocol.common().options.lock().send_timeout_ns;
    let outcome = socket.open.blocking(timeout, || protocol.connect(&address, blocking));
    match outcome {
        Err(Errno::EINPROGRESS | Errno::EALREADY) if blocking == Blocking::Yes => {
            match socket.open.blocking(timeout, || protocol.finish_connect()) {
                // connect(2) with SO_SNDTIMEO: goes on in the background.
                Err(Errno::EAGAIN) => Err(Errno::EINPROGRESS),
                outcome => outcome.map(|()| 0),
            }
        }
        outcome => outcome.map(|()| 0),
    }
}

/// getsockname(2).
pub fn sys_getsockname(args: &Args) -> Result<u64> {
    let socket = SocketFd::get(args.fd(0))?;
    name_to_user(&socket.protocol()?.local_address(), args)
}

/// getpeername(2).
pub fn sys_getpeername(args: &Args) -> Result<u64> {
    let socket = SocketFd::get(args.fd(0))?;
    name_to_user(&socket.protocol()?.peer_address()?, args)
}

fn name_to_user(address: &SocketAddress, args: &Args) -> Result<u64> {
    if args.address(1).is_null() {
        return Err(Errno::EFAULT);
    }
    address.to_user(args.address(1), args.address(2)).map(|()| 0)
}

/// shutdown(2).
pub fn sys_shutdown(args: &Args) -> Result<u64> {
    let socket = SocketFd::get(args.fd(0))?;
    let how = ShutdownHow::from_raw(args.i32(1))?;
    socket.protocol()?.shutdown(how).map(|()| 0)
}

/// setsockopt(2).
pub fn sys_setsockopt(args: &Args) -> Result<u64> {
    let socket = SocketFd::get(args.fd(0))?;
    let len = usize::try_from(args.i32(4)).map_err(|_| Errno::EINVAL)?;
    let protocol = socket.protocol()?;
    options::set(protocol.as_ref(), args.i32(1), args.i32(2), args.address(3), len).map(|()| 0)
}

/// getsockopt(2).
pub fn sys_getsockopt(args: &Args) -> Result<u64> {
    let socket = SocketFd::get(args.fd(0))?;
    let (at, len): (UserAddress, UserAddress) = (args.address(3), args.address(4));
    let protocol = socket.protocol()?;
    options::get(protocol.as_ref(), args.i32(1), args.i32(2), at, len).map(|()| 0)
}
