//! Sockets that a service manager has opened for this process (systemd.socket(5),
//! sd_listen_fds(3)). They outlive it, so that clients wait while it is started again.
//!
//! A monitor keeps them and gives them to each of its daemons, as what they listen on at
//! their addresses.

use listenfd::ListenFd;
use rustix::io::Errno;
use rustix::net::sockopt::{ipv6_v6only, socket_acceptconn, socket_type};
use rustix::net::{SocketType, getsockname};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
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
    /// It takes connections of IPv4, too.
    is_dual: bool,
    /// The option by which somebody listens on it.
    user: OnceLock<&'static str>,
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

/// A further descriptor of the socket at `address`, if there is one. From then on it is for those
/// that `option` has listen, as long as this process lives: others would share their clients.
///
/// # Errors
/// It is somebody else's, or this process has no descriptors left.
pub(crate) fn find(
    address: SocketAddr,
    transport: Transport,
    option: &'static str,
) -> io::Result<Option<OwnedFd>> {
    let found = all().iter().find(|activated| activated.serves(address, transport));
    found.map(|activated| activated.used_by(option)).transpose()
}

/// Says that `option` takes connections at a socket that another process has found ([`find`]).
pub(crate) fn note_user(listening: SocketAddr, transport: Transport, option: &'static str) {
    let is_it =
        |activated: &&Activated| activated.address == listening && activated.transport == transport;
    for activated in all().iter().filter(is_it) {
        // The first one has it.
        let _ = activated.user.set(option);
    }
}

/// Whether a socket is what one would get who binds `address` and listens there.
///
/// # Errors
/// It does neither, or the host does not tell.
pub(crate) fn listens_at(
    socket: BorrowedFd<'_>,
    address: SocketAddr,
    transport: Transport,
) -> io::Result<bool> {
    Ok(Activated::of(socket.try_clone_to_owned()?)?.serves(address, transport))
}

/// The addresses at which nobody listens yet: their clients wait.
pub(crate) fn unused() -> impl Iterator<Item = SocketAddr> {
    all()
        .iter()
        .filter(|activated| activated.user.get().is_none())
        .map(|activated| activated.address)
}

impl Activated {
    fn of(socket: OwnedFd) -> io::Result<Self> {
        let transport = match socket_type(&socket)? {
            SocketType::STREAM if socket_acceptconn(&socket)? => Transport::Tcp,
            SocketType::DGRAM => Transport::Udp,
            _ => return Err(io::Error::other("it does not listen")),
        };
        let address = SocketAddr::try_from(getsockname(&socket)?)?;
        let is_for_all = address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        let is_dual = is_for_all && !ipv6_v6only(&socket)?;
        Ok(Self { socket, address, transport, is_dual, user: OnceLock::new() })
    }

    /// Whether it is what one would get who binds `address`. One for all addresses of
    /// both families is that for all of IPv4, too.
    fn serves(&self, address: SocketAddr, transport: Transport) -> bool {
        let asked = address.ip();
        let is_same_host = self.address.ip() == asked
            || self.is_dual && asked == IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        self.transport == transport && self.address.port() == address.port() && is_same_host
    }

    fn used_by(&self, option: &'static str) -> io::Result<OwnedFd> {
        match **self.user.get_or_init(|| option) == *option {
            true => self.socket.try_clone(),
            false => Err(Errno::ADDRINUSE.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, UdpSocket};

    fn activated(socket: impl Into<OwnedFd>) -> Activated {
        Activated::of(socket.into()).unwrap()
    }

    #[test]
    fn a_socket_says_itself_where_it_listens() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let listens = |socket: BorrowedFd<'_>, address, transport| {
            listens_at(socket, address, transport).unwrap_or(false)
        };
        assert!(listens(listener.as_fd(), address, Transport::Tcp));
        assert!(!listens(listener.as_fd(), address, Transport::Udp));
        assert!(!listens(listener.as_fd(), "127.0.0.1:9".parse().unwrap(), Transport::Tcp));
        let connected = std::net::TcpStream::connect(address).unwrap();
        assert!(!listens(connected.as_fd(), connected.local_addr().unwrap(), Transport::Tcp));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(!listens(file.as_fd(), address, Transport::Tcp));
    }

    #[test]
    fn a_socket_is_for_those_who_would_have_bound_its_address() {
        let (tcp, udp) = (Transport::Tcp, Transport::Udp);
        let one = activated(TcpListener::bind("127.0.0.1:0").unwrap());
        assert!(one.serves(one.address, tcp) && !one.serves(one.address, udp));
        let everywhere = SocketAddr::from((Ipv4Addr::UNSPECIFIED, one.address.port()));
        assert!(!one.serves(everywhere, tcp));
        let dual = activated(TcpListener::bind("[::]:0").unwrap());
        let of_four = SocketAddr::from((Ipv4Addr::UNSPECIFIED, dual.address.port()));
        assert!(dual.serves(of_four, tcp));
        let four = activated(TcpListener::bind("0.0.0.0:0").unwrap());
        let of_six = SocketAddr::from((Ipv6Addr::UNSPECIFIED, four.address.port()));
        assert!(!four.serves(of_six, tcp));
        let datagrams = activated(UdpSocket::bind("127.0.0.1:0").unwrap());
        assert!(datagrams.serves(datagrams.address, udp));
    }

    #[test]
    fn nobody_listens_on_a_socket_that_is_another_ones() {
        let socket = activated(TcpListener::bind("127.0.0.1:0").unwrap());
        socket.used_by("--listen").unwrap();
        socket.used_by("--listen").unwrap();
        let refused = socket.used_by("`listen` in its thaw.toml").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn a_socket_that_does_not_listen_is_refused() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        Activated::of(one.into()).unwrap_err();
    }
}
