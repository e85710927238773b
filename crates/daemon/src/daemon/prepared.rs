//! The addresses of the node itself: the gateway's, the admin API's and the dashboard's.

use super::listeners::{bind, guard};
use super::{AdminOptions, ListenOptions, ServeError};
use crate::activation;
use crate::admin::{LocalListener, RemoteAccess, listen_at};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use thaw_home::admin::AdminToken;
use thaw_home::home::{DaemonLock, Home};
use thaw_sandbox::{GuardedPort, PortGuard, Transport};

/// What a daemon may need root's rights for: its lock, its listeners and its token.
#[derive(Debug)]
pub struct Prepared {
    lock: DaemonLock,
    gateway: TcpListener,
    admin: Option<(TcpListener, RemoteAccess)>,
    dashboard: Option<(TcpListener, RemoteAccess)>,
    /// The socket of the admin API, where the daemon may make none.
    local_admin: Option<OwnedFd>,
}

impl Prepared {
    /// Locks the directory and binds the addresses.
    ///
    /// # Errors
    /// Another daemon has them, or the token cannot be used.
    pub fn make(home: &Home, options: &ListenOptions) -> Result<Self, ServeError> {
        let lock = home.lock()?;
        let gateway = bind(options.gateway, "--listen")?;
        let with = |option| move |options| bind_admin(options, option);
        let admin = options.admin.as_ref().map(with("--admin")).transpose()?;
        let dashboard = options.dashboard.as_ref().map(with("--dashboard")).transpose()?;
        Ok(Self { lock, gateway, admin, dashboard, local_admin: None })
    }

    /// Listens for clients of the admin API, too.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub(crate) fn listen_locally(&mut self, home: &Home) -> Result<(), ServeError> {
        let path = home.admin_socket();
        let socket =
            listen_at(&path).map_err(|error| ServeError::Socket { path: path.clone(), error })?;
        self.local_admin = Some(socket);
        Ok(())
    }

    /// What clients of the admin API over TCP must show.
    pub(crate) fn access(&self) -> Option<&RemoteAccess> {
        self.admin.as_ref().map(|(_, access)| access)
    }

    /// What users of the dashboard must show.
    pub(crate) fn dashboard_access(&self) -> Option<&RemoteAccess> {
        self.dashboard.as_ref().map(|(_, access)| access)
    }

    /// Where the gateway listens.
    pub(crate) fn gateway_address(&self) -> io::Result<SocketAddr> {
        self.gateway.local_addr()
    }

    /// Says which sockets of the service manager these listeners are.
    fn note_users(&self) -> io::Result<()> {
        let others = [("--admin", &self.admin), ("--dashboard", &self.dashboard)];
        activation::note_user(self.gateway.local_addr()?, Transport::Tcp, "--listen");
        for (option, listener) in others {
            if let Some((listener, _)) = listener {
                activation::note_user(listener.local_addr()?, Transport::Tcp, option);
            }
        }
        Ok(())
    }

    /// What [`Prepared::inherited`] takes.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let activated = activation::descriptors();
        let admin = self.admin.iter().map(|(listener, _)| listener.as_fd());
        let dashboard = self.dashboard.iter().map(|(listener, _)| listener.as_fd());
        let local_admin = self.local_admin.iter().map(AsFd::as_fd);
        let first = [self.lock.as_fd(), self.gateway.as_fd()];
        let own = first.into_iter().chain(admin).chain(dashboard).chain(local_admin);
        own.chain(activated).collect()
    }

    /// The same in another process, from its descriptors, of which the last `activated` are
    /// the service manager's, and what clients must show.
    ///
    /// # Errors
    /// Some are missing.
    pub(crate) fn inherited(
        home: &Home,
        mut descriptors: Vec<OwnedFd>,
        activated: usize,
        access: Option<RemoteAccess>,
        dashboard: Option<RemoteAccess>,
    ) -> io::Result<Self> {
        activation::inherit(descriptors.split_off(descriptors.len().saturating_sub(activated)))?;
        let mut descriptors = descriptors.into_iter();
        let mut next =
            || descriptors.next().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData));
        let lock = DaemonLock::inherited(home, next()?);
        let gateway: TcpListener = next()?.into();
        let mut with = |access: Option<RemoteAccess>| match access {
            Some(access) => Ok::<_, io::Error>(Some((next()?.into(), access))),
            None => Ok(None),
        };
        let (admin, dashboard) = (with(access)?, with(dashboard)?);
        let prepared = Self { lock, gateway, admin, dashboard, local_admin: descriptors.next() };
        prepared.note_users()?;
        Ok(prepared)
    }
}

/// The listeners of a daemon that is about to serve, and what sandboxes are kept from for them.
pub(super) struct Doors {
    pub gateway: TcpListener,
    pub gateway_address: SocketAddr,
    pub admin: Option<Door>,
    pub dashboard: Option<Door>,
    pub local_admin: LocalListener,
    /// Where the last one listens.
    pub admin_socket: PathBuf,
    pub guarded: Vec<GuardedPort>,
}

/// A listener whose clients must show something.
pub(super) struct Door {
    pub listener: tokio::net::TcpListener,
    pub access: RemoteAccess,
    pub address: SocketAddr,
}

impl Doors {
    /// Makes what was prepared listeners of this process; to be called in its runtime.
    ///
    /// # Errors
    /// The socket of the admin API cannot be made.
    pub fn open(home: &Home, prepared: Prepared) -> Result<(DaemonLock, Self), ServeError> {
        let Prepared { lock, gateway, admin, dashboard, local_admin } = prepared;
        let gateway_address = gateway.local_addr()?;
        let admin_socket = home.admin_socket();
        let local_admin = local_admin
            .map_or_else(|| listen_at(&admin_socket), Ok)
            .and_then(|listening| LocalListener::new(listening, &admin_socket))
            .map_err(|error| ServeError::Socket { path: admin_socket.clone(), error })?;
        let admin = admin.map(Door::open).transpose()?;
        let dashboard = dashboard.map(Door::open).transpose()?;
        let mut guarded = vec![guard(gateway_address, Transport::Tcp, PortGuard::IfWrittenOut)];
        for door in admin.iter().chain(&dashboard) {
            guarded.push(guard(door.address, Transport::Tcp, PortGuard::Never));
        }
        let doors =
            Self { gateway, gateway_address, admin, dashboard, local_admin, admin_socket, guarded };
        Ok((lock, doors))
    }
}

impl Door {
    fn open((listener, access): (TcpListener, RemoteAccess)) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let address = listener.local_addr()?;
        Ok(Self { listener, access, address })
    }
}

fn bind_admin(
    options: &AdminOptions,
    option: &'static str,
) -> Result<(TcpListener, RemoteAccess), ServeError> {
    let token = AdminToken::read_or_create(&options.token_file, "--admin-token-file")?;
    let access = RemoteAccess { token, names: options.names.clone() };
    Ok((bind(options.address, option)?, access))
}
