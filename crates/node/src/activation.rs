//! Sockets that a service manager has opened for this process (systemd.socket(5),
//! sd_listen_fds(3)). They outlive it, so that clients wait while it is started again.
//!
//! A monitor keeps them and gives them to each of its daemons, as what they listen on at
//! their addresses.

use listenfd::ListenFd;
use rustix::net::sockopt::{socket_acceptconn, socket_type};
use rustix::net::{SocketType, getsockname};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use thaw_sandbox::egress::Transport;

/// Most that are taken: all of them go to a daemon in one packet, beside others.
pub const SOCKETS_MAX: usize = 8;

/// What this process was given.
static ACTIVATED: OnceLock<Vec<Activated>> = OnceLock::new();

/// A socket that listens, or receives datagrams.
#[derive(Debug)]
struct Activated {
    socket: OwnedFd,
    address: SocketAddr,
    transport: Transport,
}

/// Why sockets of a service manager cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ActivationError {
    /// One is of no use here.
    #[error(
        "socket {number} of the service manager is neither a TCP listener nor a UDP socket ({error}); \
         a unit for Thaw has `ListenStream=` or `ListenDatagram=` with an IP address and a port, and no `Accept=`"
    )]
    Useless {
        /// Its position, from 0.
        number: usize,
        /// What is wrong.
        error: io::Error,
    },
    /// There are too many.
    #[error(
        "the service manager has {0} sockets for Thaw, of which {SOCKETS_MAX} are the most; split the unit"
    )]
    TooMany(usize),
}

/// Takes the sockets that the environment names, and removes what names them. To be called
/// once, before there are threads.
///
/// # Errors
/// Some cannot be used.
pub fn take_from_environment() -> Result<(), ActivationError> {
    let mut given = ListenFd::from_env();
    if given.len() > SOCKETS_MAX {
        return Err(ActivationError::TooMany(given.len()));
    }
    let sockets = (0..given.len()).map(|number| {
        let useless = |error| ActivationError::Useless { number, error };
        let tcp = given.take_tcp_listener(number).map(|found| found.map(OwnedFd::from));
        let socket = match tcp {
            Ok(found) => Ok(found),
            Err(_) => given.take_udp_socket(number).map(|found| found.map(OwnedFd::from)),
        };
        let socket = socket.map_err(useless)?.expect("each is taken once");
        Activated::of(socket).map_err(useless)
    });
    keep(sockets.collect::<Result<_, _>>()?);
    Ok(())
}

/// Takes those of the monitor's process.
///
/// # Errors
/// One of them does not listen.
pub(crate) fn inherit(sockets: Vec<OwnedFd>) -> io::Result<()> {
    keep(sockets.into_iter().map(Activated::of).collect::<Result<_, _>>()?);
    Ok(())
}

fn keep(sockets: Vec<Activated>) {
    ACTIVATED.set(sockets).expect("sockets are taken once");
}

fn all() -> &'static [Activated] {
    ACTIVATED.get().map_or(&[], Vec::as_slice)
}

/// All of them, for [`inherit`] in another process.
pub(crate) fn descriptors<'a>() -> impl ExactSizeIterator<Item = BorrowedFd<'a>> {
    all().iter().map(|activated| activated.socket.as_fd())
}

/// The address of the first one for connections: the gateway's, if nobody has said which.
pub fn first_address() -> Option<SocketAddr> {
    let first = all().iter().find(|activated| activated.transport == Transport::Tcp);
    first.map(|activated| activated.address)
}

/// A further descriptor of the socket at `address`, if there is one.
///
/// # Errors
/// This process has no descriptors left.
pub(crate) fn find(address: SocketAddr, transport: Transport) -> io::Result<Option<OwnedFd>> {
    let found = all().iter().find(|activated| activated.serves(address, transport));
    found.map(|activated| activated.socket.try_clone()).transpose()
}

impl Activated {
    fn of(socket: OwnedFd) -> io::Result<Self> {
        let transport = match socket_type(&socket)? {
            SocketType::STREAM if socket_acceptconn(&socket)? => Transport::Tcp,
            SocketType::DGRAM => Transport::Udp,
            _ => return Err(io::Error::other("it does not listen")),
        };
        let address = SocketAddr::try_from(getsockname(&socket)?)?;
        Ok(Self { socket, address, transport })
    }

    /// Whether it is what one would get who binds `address`. One for all addresses of
    /// both families is that for all of IPv4, too.
    fn serves(&self, address: SocketAddr, transport: Transport) -> bool {
        let (own, asked) = (self.address.ip(), address.ip());
        let is_same_host = own == asked || own.is_unspecified() && asked.is_unspecified();
        self.transport == transport && self.address.port() == address.port() && is_same_host
    }
}
