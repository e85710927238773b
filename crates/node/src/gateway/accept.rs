//! Accepting connections and finding their functions.

use super::answer::refuse;
use super::attend::attend;
use super::head::{self, HEAD_MAX, Head, HeadError, Progress};
use super::refusal::Refusal;
use super::stdin;
use crate::clock::monotonic_ns;
use crate::config::EntryKind;
use crate::instance::Client;
use crate::node::Shared;
use crate::reactor::{watch, watch_listener};
use crate::service::Service;
use crate::socket::{defer_accept, peek, set_nodelay};
use rustix::net::{SocketFlags, acceptfrom_with};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep, timeout_at};

/// Connections that may wait to be accepted; the host caps it (`somaxconn`).
const BACKLOG: i32 = 4096;

/// What the gateway can be told.
#[derive(Clone, Copy, Debug)]
pub struct GatewayConfig {
    /// How long a client may take to send the head of its first request.
    pub head_timeout: Duration,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self { head_timeout: Duration::from_secs(10) }
    }
}

/// Accepts clients on any number of listeners.
#[derive(Clone)]
pub struct Gateway {
    shared: Arc<Shared>,
    config: GatewayConfig,
}

/// A connection of which nothing is known yet.
pub(super) struct Arrival {
    pub socket: OwnedFd,
    pub peer: SocketAddr,
    pub local: SocketAddr,
    pub accepted_ns: u64,
}

impl Arrival {
    fn into_client(self, shared: &Shared, wants_head_only: bool) -> Arc<Client> {
        let Self { socket, peer, local, accepted_ns } = self;
        Arc::new(Client { id: shared.next_id(), socket, peer, local, accepted_ns, wants_head_only })
    }
}

impl Gateway {
    /// A gateway to the functions of a node.
    pub fn new(shared: Arc<Shared>, config: GatewayConfig) -> Self {
        Self { shared, config }
    }

    /// What all functions share.
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Accepts clients that speak HTTP until the task is dropped. `function` is
    /// the one whose own listener this is; without it, the `Host` header decides.
    ///
    /// # Errors
    /// The listener cannot be used at all.
    pub async fn listen(self, listener: TcpListener, function: Option<String>) -> io::Result<()> {
        defer_accept(&listener, 1)?;
        let function: Option<Arc<str>> = function.map(Into::into);
        accept_all(listener, |arrival| self.arrive(arrival, function.clone())).await
    }

    /// Accepts clients of a function whose protocol is its own, until the task is
    /// dropped: each goes to an instance at once, which may speak first.
    ///
    /// # Errors
    /// The listener cannot be used at all.
    pub async fn listen_raw(self, listener: TcpListener, function: String) -> io::Result<()> {
        accept_all(listener, |arrival| match self.shared.route(&function) {
            Some(service) => self.place(arrival, &service, false),
            // The function has just been removed, and this listener with it.
            None => drop(arrival),
        })
        .await
    }

    /// The fast path: if the head is already there and an instance is at hand,
    /// the socket is on its way before anything else happens.
    fn arrive(&self, arrival: Arrival, function: Option<Arc<str>>) {
        let mut buffer = [0; 4096];
        let parsed = match peek(&arrival.socket, &mut buffer) {
            Ok(count) if count > 0 => head::parse(&buffer[..count]),
            _ => Ok(Progress::Partial),
        };
        match parsed {
            Ok(Progress::Complete(head)) => self.route(arrival, &head, function.as_deref()),
            Ok(Progress::Partial) => {
                tokio::spawn(self.clone().await_head(arrival, function));
            }
            Err(error) => self.refuse(arrival, Refusal::BadHead(error)),
        }
    }

    fn route(&self, arrival: Arrival, head: &Head, function: Option<&str>) {
        let name = function.or(head.function.as_deref());
        let Some(service) = name.and_then(|name| self.shared.route(name)) else {
            return self.refuse(arrival, Refusal::UnknownFunction(name.map(str::to_owned)));
        };
        match service.config().entry.kind {
            EntryKind::Http => self.place(arrival, &service, head.wants_head_only),
            EntryKind::Stdin => {
                tokio::spawn(stdin::serve(self.shared.clone(), service, arrival));
            }
            kind @ (EntryKind::Tcp | EntryKind::Udp) => {
                let address = service.config().listen.map(|address| address.to_string());
                let way = format!("{} at {}", kind.name(), address.unwrap_or_default());
                let function = service.name().to_string();
                self.refuse(arrival, Refusal::NotHttp { function, way });
            }
        }
    }

    /// Gives the connection to an instance, and follows it to its end.
    fn place(&self, arrival: Arrival, service: &Arc<Service>, wants_head_only: bool) {
        attend(service, arrival.into_client(&self.shared, wants_head_only));
    }

    /// Waits for the rest of the head, without consuming any of it.
    async fn await_head(self, arrival: Arrival, function: Option<Arc<str>>) {
        let Arrival { socket, peer, local, accepted_ns } = arrival;
        let Ok(watched) = watch(socket) else { return };
        let deadline = Instant::now() + self.config.head_timeout;
        let found = timeout_at(deadline, read_head(&watched)).await;
        let arrival = Arrival { socket: watched.into_inner(), peer, local, accepted_ns };
        match found {
            Ok(Ok(Some(Ok(head)))) => self.route(arrival, &head, function.as_deref()),
            Ok(Ok(Some(Err(error)))) => self.refuse(arrival, Refusal::BadHead(error)),
            // The client has gone away before it asked anything.
            Ok(Ok(None) | Err(_)) => {}
            Err(_) => self.refuse(arrival, Refusal::HeadTooSlow(self.config.head_timeout)),
        }
    }

    fn refuse(&self, arrival: Arrival, refusal: Refusal) {
        self.shared.metrics().refused(None, refusal.status(), refusal.error());
        let client = arrival.into_client(&self.shared, false);
        tokio::spawn(async move { refuse(&client, &refusal).await });
    }
}

/// Accepts everybody who comes to `listener`.
async fn accept_all(listener: TcpListener, take: impl Fn(Arrival)) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    // Bursts wait here, not in the clients' timeouts.
    rustix::net::listen(&listener, BACKLOG)?;
    // Accepted sockets inherit it.
    set_nodelay(&listener)?;
    let bound = listener.local_addr()?;
    let listener = watch_listener(listener)?;
    loop {
        let mut ready = listener.readable().await?;
        loop {
            match accept(ready.get_inner(), bound) {
                Ok(arrival) => take(arrival),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if is_clients_fault(&error) => {}
                Err(error) => {
                    // Out of descriptors or memory: connections wait in the
                    // backlog meanwhile.
                    tracing::error!(
                        "cannot accept a connection ({error}); raise the limit of open files"
                    );
                    sleep(Duration::from_millis(20)).await;
                }
            }
        }
        ready.clear_ready();
    }
}

/// Peeks until the head is complete; `None` if the client sends nothing at all
/// before it ends its side.
async fn read_head(socket: &AsyncFd<OwnedFd>) -> io::Result<Option<Result<Head, HeadError>>> {
    let mut buffer = vec![0; HEAD_MAX];
    let mut seen = 0;
    loop {
        // Peeked bytes stay in the socket, so readiness must be cleared before
        // each look, or the next wait would return at once.
        let mut ready = socket.readable().await?;
        let ended = ready.ready().is_read_closed();
        ready.clear_ready();
        let count = match peek(socket.get_ref(), &mut buffer) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        };
        match head::parse(&buffer[..count]) {
            Ok(Progress::Complete(head)) => return Ok(Some(Ok(head))),
            Err(error) => return Ok(Some(Err(error))),
            Ok(Progress::Partial) if count == 0 => return Ok(None),
            Ok(Progress::Partial) if ended && count == seen => {
                return Ok(Some(Err(HeadError::Malformed("it ends in the middle"))));
            }
            Ok(Progress::Partial) => {}
        }
        seen = count;
        if ended {
            // Nothing more will arrive; look once more at what came last.
            tokio::task::yield_now().await;
            let count = peek(socket.get_ref(), &mut buffer)?;
            if count == seen {
                return Ok(Some(Err(HeadError::Malformed("it ends in the middle"))));
            }
        }
    }
}

fn accept(listener: &TcpListener, bound: SocketAddr) -> io::Result<Arrival> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (socket, peer) = acceptfrom_with(listener, flags)?;
    let accepted_ns = monotonic_ns();
    let internet = |address: rustix::net::SocketAddrAny| SocketAddr::try_from(address).ok();
    let peer = peer.and_then(internet).ok_or(io::ErrorKind::InvalidData)?;
    // One call less where the listener's own address says it all.
    let local = match bound.ip().is_unspecified() {
        true => rustix::net::getsockname(&socket).ok().and_then(internet).unwrap_or(bound),
        false => bound,
    };
    Ok(Arrival { socket, peer, local, accepted_ns })
}

/// Errors that `accept` passes on from the connection: accept(2).
fn is_clients_fault(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::Interrupted
            | io::ErrorKind::InvalidData
            | io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::PermissionDenied
    )
}
