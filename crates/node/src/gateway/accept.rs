//! Accepting connections and finding their functions.

use super::answer::refuse;
use super::attend::attend;
use super::client::{self, First};
use super::exchange::Prepared;
use super::passing;
use super::refusal::Refusal;
use super::report;
use crate::admission::{Admission, Admitted, Entrance};
use crate::edge::{AccessRecord, Addresses, Asked, RequestId, Target};
use crate::instance::{Client, Way};
use crate::node::NodeState;
use crate::reactor::{watch, watch_listener};
use crate::service::{Service, Services};
use crate::socket::{defer_accept, peek, set_nodelay};
use crate::triggers::Triggers;
use rustix::net::{SocketFlags, acceptfrom_with};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::task::{Context, Waker};
use std::time::Duration;
use thaw_home::clock::monotonic_ns;
use thaw_home::config::{Connections, EntryKind, Protocol};
use thaw_http::head::{self, Announcement, HEAD_MAX, Head, HeadError, Progress};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};

/// Connections that may wait to be accepted; the host caps it (`somaxconn`).
const BACKLOG: i32 = 4096;
/// How long nobody is accepted after the host had no room for a connection, at first and
/// at most.
const REST_MIN: Duration = Duration::from_millis(20);
const REST_MAX: Duration = Duration::from_secs(1);

/// What the gateway can be told.
#[derive(Clone, Copy, Debug)]
pub struct GatewayConfig {
    /// How long a client may take to send the head of a request.
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
    services: Arc<Services>,
    triggers: Weak<Triggers>,
    config: GatewayConfig,
}

/// A connection of which nothing is known yet.
pub(super) struct Arrival {
    pub socket: OwnedFd,
    pub peer: SocketAddr,
    pub local: SocketAddr,
    pub accepted_ns: u64,
    pub admitted: Option<Admitted>,
}

impl Arrival {
    fn addresses(&self) -> Addresses {
        Addresses { client: self.peer, gateway: self.local }
    }

    fn into_client(self, shared: &NodeState, wants_head_only: bool) -> Arc<Client> {
        let Self { socket, peer, local, accepted_ns, admitted } = self;
        let (id, way) = (shared.next_connection(), Way::HandedOver);
        let shared = Weak::<()>::new();
        Arc::new(Client {
            id,
            socket,
            peer,
            local,
            accepted_ns,
            wants_head_only,
            way,
            admitted,
            shared,
        })
    }
}

impl Gateway {
    /// A gateway to these functions. Clients can queue invocations as long as there are
    /// triggers.
    pub fn new(services: Arc<Services>, triggers: Weak<Triggers>, config: GatewayConfig) -> Self {
        Self { services, triggers, config }
    }

    /// What all functions share.
    pub(super) fn shared(&self) -> &Arc<NodeState> {
        self.services.shared()
    }

    /// The functions.
    pub(super) fn services(&self) -> &Arc<Services> {
        &self.services
    }

    /// What calls functions without a client that waits; `None`: nothing does.
    pub(super) fn triggers(&self) -> Option<Arc<Triggers>> {
        self.triggers.upgrade()
    }

    pub(super) fn config(&self) -> GatewayConfig {
        self.config
    }

    /// Accepts clients that speak HTTP until the task is dropped. `function` is
    /// the one whose own listener this is; without it, the `Host` header decides.
    ///
    /// # Errors
    /// The listener cannot be used at all.
    pub async fn listen(self, listener: TcpListener, function: Option<String>) -> io::Result<()> {
        defer_accept(&listener, 1)?;
        let function: Option<Arc<str>> = function.map(Into::into);
        let entrance = function.clone().unwrap_or_else(|| "".into());
        let admission = self.shared().admission().clone();
        accept_all(listener, &admission, |arrival| {
            self.arrive(arrival, function.as_ref(), &entrance);
        })
        .await
    }

    /// Accepts clients of a function whose protocol is its own, until the task is
    /// dropped: each goes to an instance at once, which may speak first.
    ///
    /// # Errors
    /// The listener cannot be used at all.
    pub async fn listen_raw(self, listener: TcpListener, function: String) -> io::Result<()> {
        // It may have been that of a function whose clients speak first.
        defer_accept(&listener, 0)?;
        let admission = self.shared().admission().clone();
        accept_all(listener, &admission, |arrival| {
            // Otherwise the function has just been removed, and this listener with it.
            let Some(service) = self.services.route_by_chance(&function) else { return };
            match passing::admit_raw(self.shared(), &service, arrival.peer) {
                Ok(()) => self.place(arrival, &service, None),
                // Its client would not understand; that it is closed says enough.
                Err(refusal) => {
                    let (id, name) = (RequestId::new(), Some(service.name()));
                    report::refused(self.shared(), id, arrival.peer, name, &refusal);
                }
            }
        })
        .await
    }

    /// Accepts clients that speak TLS until the task is dropped.
    ///
    /// # Errors
    /// The listener cannot be used at all.
    pub async fn listen_tls(self, listener: TcpListener) -> io::Result<()> {
        defer_accept(&listener, 1)?;
        // No function can be called so.
        let entrance: Entrance = "(TLS)".into();
        let admission = self.shared().admission().clone();
        accept_all(listener, &admission, |arrival| {
            tokio::spawn(self.clone().shake_hands(arrival, entrance.clone()));
        })
        .await
    }

    /// The fast path: if the head is already there and an instance is at hand,
    /// the socket is on its way before anything else happens.
    fn arrive(&self, arrival: Arrival, function: Option<&Arc<str>>, entrance: &Entrance) {
        let mut buffer = [0; 4096];
        let parsed = match peek(&arrival.socket, &mut buffer) {
            Ok(count) if count > 0 => head::parse(&buffer[..count]),
            _ => Ok(Progress::Partial),
        };
        match parsed {
            Ok(Progress::Complete(head)) => self.begin(arrival, &head, function, entrance),
            Ok(Progress::Http2) => self.begin_http2(arrival, function, entrance),
            Ok(Progress::Partial) => {
                let (function, entrance) = (function.cloned(), entrance.clone());
                tokio::spawn(self.clone().await_head(arrival, function, entrance));
            }
            Err(error) => self.refuse(arrival, Refusal::BadHead(error)),
        }
    }

    /// Hands the connection over if nothing can follow its first request; otherwise each
    /// request finds its own way.
    fn begin(
        &self,
        arrival: Arrival,
        head: &Head,
        function: Option<&Arc<str>>,
        entrance: &Entrance,
    ) {
        let (service, is_plain) = self.destination(&arrival, head, function);
        let is_triggered = head.may_trigger
            && service.as_ref().is_some_and(|service| service.config().looks_at_triggers());
        let is_plain = is_plain && !is_triggered && !head.may_pretend;
        let is_whole = |service: &Arc<Service>| {
            let entry = service.config().entry;
            let is_http1 = service.config().protocol == Protocol::Http1;
            let is_own = function.is_some() && entry.connections == Connections::Handover;
            // What is handed over has no spans.
            let is_last = head.announces == Announcement::Last && self.shared().tracer().is_none();
            entry.kind == EntryKind::Http && is_http1 && (is_last || is_own)
        };
        match service {
            Some(service) if is_plain && is_whole(&service) => {
                self.place(arrival, &service, Some(head));
            }
            service => {
                // A boot goes on while the request is parsed.
                let prepared = service
                    .as_ref()
                    .filter(|_| is_plain)
                    .and_then(|service| Prepared::begin(self.shared(), service, &arrival));
                let (function, entrance) = (function.cloned(), entrance.clone());
                let first = First { service, prepared };
                let serving = client::serve(self.clone(), arrival, function, entrance, first);
                begin_at_once(serving);
            }
        }
    }

    /// The function that a request is for, and whether it may have the connection as it is:
    /// none of its requests has to be looked at or changed.
    fn destination(
        &self,
        arrival: &Arrival,
        head: &Head,
        own: Option<&Arc<str>>,
    ) -> (Option<Arc<Service>>, bool) {
        let rules = report::rules_for(self.shared(), arrival.addresses());
        let (name, is_whole) = match (own, &rules) {
            (Some(own), _) => (Some(own.to_string()), true),
            (None, None) => {
                let service = head.function().and_then(|name| self.choose(name, arrival));
                return (service, true);
            }
            (None, Some(rules)) => {
                let asked =
                    Asked { host: head.host.as_deref(), target: &head.target, is_tls: false };
                match rules.target(asked, head.function()) {
                    // A server may read on behind a request that is to be the last: what
                    // follows must not come to paths that no route leads to.
                    Target::Function { name, all_paths, .. } => (Some(name.to_string()), all_paths),
                    Target::Redirect { .. } | Target::None => (None, false),
                }
            }
        };
        let service = name.and_then(|name| self.choose(&name, arrival));
        let has_policy = service.as_ref().is_some_and(|service| {
            rules.as_ref().is_some_and(|rules| rules.policy(service.name()).is_some())
        });
        (service, is_whole && !has_policy)
    }

    /// The version of a function for the first request of a connection.
    fn choose(&self, name: &str, arrival: &Arrival) -> Option<Arc<Service>> {
        let served = self.services.served(name)?;
        if !served.looks_at_headers() {
            return Some(served.choose(|_| false));
        }
        // Nothing of the head was consumed.
        let mut buffer = vec![0; HEAD_MAX];
        let count = peek(&arrival.socket, &mut buffer).unwrap_or(0);
        Some(served.choose(|rule| head::has_field(&buffer[..count], &rule.name, &rule.value)))
    }

    fn begin_http2(&self, arrival: Arrival, function: Option<&Arc<str>>, entrance: &Entrance) {
        let (function, entrance) = (function.cloned(), entrance.clone());
        tokio::spawn(client::serve_http2(self.clone(), arrival, function, entrance));
    }

    /// Gives the connection to an instance, and follows it to its end.
    fn place(&self, arrival: Arrival, service: &Arc<Service>, head: Option<&Head>) {
        let record = head
            .filter(|_| self.shared().edge().logs_requests())
            .map(|head| Arc::new(record(&arrival, head)));
        let wants_head_only = head.is_some_and(Head::wants_head_only);
        attend(service, arrival.into_client(self.shared(), wants_head_only), record);
    }

    /// Waits for the rest of the head, without consuming any of it.
    async fn await_head(self, arrival: Arrival, function: Option<Arc<str>>, entrance: Entrance) {
        let Arrival { socket, peer, local, accepted_ns, admitted } = arrival;
        let Ok(watched) = watch(socket) else { return };
        let deadline = Instant::now() + self.config.head_timeout;
        let displaced = Arc::new(Notify::new());
        let number = self.shared().admission().wait(&entrance, &displaced);
        let found = tokio::select! {
            found = timeout_at(deadline, read_head(&watched)) => Some(found),
            () = displaced.notified() => None,
        };
        self.shared().admission().stop_waiting(&entrance, number);
        let socket = watched.into_inner();
        let arrival = Arrival { socket, peer, local, accepted_ns, admitted };
        match found {
            Some(Ok(Ok(Some(Ok(Some(head)))))) => {
                self.begin(arrival, &head, function.as_ref(), &entrance);
            }
            Some(Ok(Ok(Some(Ok(None))))) => {
                self.begin_http2(arrival, function.as_ref(), &entrance);
            }
            Some(Ok(Ok(Some(Err(error))))) => self.refuse(arrival, Refusal::BadHead(error)),
            // The client has gone away before it asked anything, or has to make room.
            Some(Ok(Ok(None) | Err(_))) | None => {}
            Some(Err(_)) => self.refuse(arrival, Refusal::HeadTooSlow(self.config.head_timeout)),
        }
    }

    fn refuse(&self, arrival: Arrival, refusal: Refusal) {
        let id = RequestId::new();
        report::refused(self.shared(), id, arrival.peer, None, &refusal);
        let audience = report::audience(self.shared(), arrival.addresses());
        let client = arrival.into_client(self.shared(), false);
        tokio::spawn(async move { refuse(&client, &refusal, id, audience).await });
    }
}

/// Goes as far as it goes without waiting, in the present task: until the first request
/// is on its way to an instance. The rest has a task of its own.
fn begin_at_once(serving: impl Future<Output = ()> + Send + 'static) {
    let mut serving = Box::pin(serving);
    // The task polls it once more before it waits for anything.
    let mut context = Context::from_waker(Waker::noop());
    if serving.as_mut().poll(&mut context).is_pending() {
        tokio::spawn(serving);
    }
}

/// Accepts everybody who comes to `listener` and for whom there is room.
async fn accept_all(
    listener: TcpListener,
    admission: &Arc<Admission>,
    take: impl Fn(Arrival),
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    // Bursts wait here, not in the clients' timeouts.
    rustix::net::listen(&listener, BACKLOG)?;
    // Accepted sockets inherit it.
    set_nodelay(&listener)?;
    let bound = listener.local_addr()?;
    let listener = watch_listener(listener)?;
    let mut rest = REST_MIN;
    loop {
        let mut ready = listener.readable().await?;
        loop {
            // The others wait in the backlog.
            let admitted = match admission.admit() {
                Some(admitted) => admitted,
                None => admission.make_room().await,
            };
            match accept(ready.get_inner(), bound, admitted) {
                Ok(arrival) => {
                    rest = REST_MIN;
                    take(arrival);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if is_clients_fault(&error) => {}
                Err(error) => {
                    // Out of descriptors or memory: connections wait in the
                    // backlog meanwhile.
                    tracing::error!(
                        "cannot accept a connection ({error}); raise the limit of open files"
                    );
                    sleep(rest).await;
                    rest = (rest * 2).min(REST_MAX);
                }
            }
        }
        ready.clear_ready();
    }
}

/// A request on a connection that is handed over, for the access log.
fn record(arrival: &Arrival, head: &Head) -> AccessRecord {
    let host = head.host.as_deref().unwrap_or_default();
    let line = (head.method.as_str(), host, head.target.as_str());
    let version = if head.is_1_1 { "HTTP/1.1" } else { "HTTP/1.0" };
    AccessRecord::new(RequestId::new(), (arrival.peer, false), line, version, None)
}

/// Peeks until the head is complete, or it is known to be HTTP/2, which has none. `None` if
/// the client sends nothing at all before it ends its side.
async fn read_head(
    socket: &AsyncFd<OwnedFd>,
) -> io::Result<Option<Result<Option<Head>, HeadError>>> {
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
            Ok(Progress::Complete(head)) => return Ok(Some(Ok(Some(head)))),
            Ok(Progress::Http2) => return Ok(Some(Ok(None))),
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

fn accept(listener: &TcpListener, bound: SocketAddr, admitted: Admitted) -> io::Result<Arrival> {
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
    Ok(Arrival { socket, peer, local, accepted_ns, admitted: Some(admitted) })
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
