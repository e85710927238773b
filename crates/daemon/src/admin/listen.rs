//! Where the admin API listens: a Unix socket that only the daemon's user and root can
//! use, and TCP if somebody wants it.

use super::access::RemoteAccess;
use super::{Admin, routes};
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::fs::{FileType, Mode, fchmod};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with, sockopt,
};
use rustix::process::geteuid;
use std::future::Future;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use thaw_home::admin::with_short_path;
use thaw_http::linger::Lingering;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::Semaphore;

/// Most connections of each kind at a time; others wait in the backlog. Clients of one
/// kind cannot take the other's.
const CONNECTIONS: usize = 64;
/// How long the head of a request may take, and a connection may be idle.
const HEAD_PATIENCE: Duration = Duration::from_secs(10);
/// Most bytes of a request's head.
const HEAD_MAX: usize = 16 * 1024;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Of the Unix socket.
const PRIVATE: Mode = Mode::RUSR.union(Mode::WUSR);
/// How the host numbers a user who has no number in a user namespace (user_namespaces(7)).
const NOT_MAPPED: u32 = 65534;
/// After descriptors ran out, so long others can give some back.
const RESPITE: Duration = Duration::from_millis(100);
/// After so long without a sign of life the host asks whether the client is there.
const KEEP_ALIVE_IDLE: Duration = Duration::from_secs(60);

/// The Unix socket of an admin API, which is gone when this is dropped.
#[derive(Debug)]
pub struct LocalListener {
    listener: UnixListener,
    path: PathBuf,
}

/// Listens at `path`, for this user and root. A socket that a killed daemon has left is
/// replaced, so only the owner of the state directory's lock may call this.
///
/// # Errors
/// The socket cannot be made.
pub fn listen_at(path: &Path) -> io::Result<OwnedFd> {
    match rustix::fs::lstat(path) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Socket => {
            std::fs::remove_file(path)?;
        }
        // Of anything else, binding says that it is there.
        Ok(_) | Err(_) => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file gets the mode of the socket, so that there is no moment at which others
    // could connect.
    fchmod(&socket, PRIVATE)?;
    with_short_path(path, |path| Ok(bind(&socket, &SocketAddrUnix::new(path)?)?))?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

impl LocalListener {
    /// The listener of a socket that [`listen_at`] has made at `path`.
    ///
    /// # Errors
    /// The runtime cannot watch it.
    pub fn new(socket: OwnedFd, path: &Path) -> io::Result<Self> {
        let listener = UnixListener::from_std(socket.into())?;
        Ok(Self { listener, path: path.to_owned() })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LocalListener {
    fn drop(&mut self) {
        // The next daemon replaces it, too.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Admin {
    /// Serves clients of a Unix socket, who need to show nothing but their user id.
    ///
    /// # Errors
    /// The listener fails.
    pub async fn serve_local(self, listener: LocalListener) -> io::Result<()> {
        let router = routes::router(self, None);
        accept_all(router, || accept_local(&listener)).await
    }

    /// Serves clients over TCP, who need the token.
    ///
    /// # Errors
    /// The listener fails.
    pub async fn serve_remote(self, listener: TcpListener, access: RemoteAccess) -> io::Result<()> {
        let router = routes::router(self, Some(Arc::new(access)));
        serve_tcp(router, &listener).await
    }
}

/// Serves a limited number of clients over TCP at a time.
///
/// # Errors
/// The listener fails.
pub(crate) async fn serve_tcp(router: Router, listener: &TcpListener) -> io::Result<()> {
    accept_all(router, || accept_remote(listener)).await
}

/// The next connection of root or this process's user. The mode of the socket already
/// keeps others out; this holds where somebody has changed it.
async fn accept_local(listener: &LocalListener) -> io::Result<UnixStream> {
    loop {
        let (stream, _) = listener.listener.accept().await?;
        let user = stream.peer_cred()?.uid();
        // In a user namespace of its own the daemon cannot tell root from others.
        let is_roots = user == 0 || user == NOT_MAPPED && is_private(&listener.path);
        if is_roots || user == geteuid().as_raw() {
            return Ok(stream);
        }
        tracing::warn!(user, "refused a client of the admin API: it is of another user");
    }
}

/// Whether nobody but this user and root can connect to a socket.
fn is_private(path: &Path) -> bool {
    rustix::fs::lstat(path).is_ok_and(|attributes| {
        attributes.st_uid == geteuid().as_raw()
            && Mode::from_raw_mode(attributes.st_mode) == PRIVATE
    })
}

async fn accept_remote(listener: &TcpListener) -> io::Result<TcpStream> {
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    // A client that vanishes while it follows a log does not keep its place.
    sockopt::set_socket_keepalive(&stream, true)?;
    sockopt::set_tcp_keepidle(&stream, KEEP_ALIVE_IDLE)?;
    Ok(stream)
}

/// Serves the connections that `accept` gives, a limited number at a time.
async fn accept_all<F, S>(router: Router, mut accept: impl FnMut() -> F) -> io::Result<()>
where
    F: Future<Output = io::Result<S>>,
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let place = places.clone().acquire_owned().await.expect("the semaphore is never closed");
        match accept().await {
            Ok(stream) => {
                let router = router.clone();
                tokio::spawn(async move {
                    serve_connection(stream, router).await;
                    drop(place);
                });
            }
            Err(error) => {
                let is_of_one = [ErrorKind::ConnectionAborted, ErrorKind::ConnectionReset];
                if !is_of_one.contains(&error.kind()) {
                    tracing::warn!("the admin API cannot accept a connection ({error})");
                    tokio::time::sleep(RESPITE).await;
                }
            }
        }
    }
}

async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    router: Router,
) {
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_PATIENCE)
        .max_buf_size(HEAD_MAX)
        .serve_connection(TokioIo::new(Lingering::new(stream)), TowerToHyperService::new(router))
        .with_upgrades()
        .await;
    if let Err(error) = served {
        tracing::debug!("a connection to the admin API has failed: {error}");
    }
}
