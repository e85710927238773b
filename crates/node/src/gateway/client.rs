//! A client's connection on which the gateway itself speaks HTTP, from the first request
//! to the last. With HTTP/1.1 one request is under way at a time; with HTTP/2 several are, and
//! each beyond the first counts as a client of the node, since it has descriptors of its own.

use super::accept::{Arrival, Gateway};
use super::exchange::Prepared;
use super::routed;
use super::wire::{ClientIo, Wire};
use crate::admission::{Admission, Admitted, Busy, Entrance};
use crate::edge::{Addresses, Certificates};
use crate::service::Service;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::Duration;
use thaw_http::head::HEAD_MAX;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};

/// Most fields in the head of a request.
const FIELDS_MAX: usize = 128;
/// Most bytes of a body that are read at once.
const BUFFER: usize = 64 << 10;
/// How long a connection is kept on which the client asks nothing.
const IDLE: Duration = Duration::from_secs(60);
/// How long a client may take to read a piece of an answer, unless its function says
/// something else.
const WRITE_PATIENCE: Duration = Duration::from_secs(30);

/// Requests of an HTTP/2 connection that are under way at a time.
const STREAMS_MAX: u32 = 64;
/// Bytes that a client of HTTP/2 may send ahead on a stream, and on all of a connection.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;
/// Streams that a client has begun and given up, and that are not cleared away yet. More end
/// the connection (CVE-2023-44487).
const RESETS_MAX: usize = 32;
/// How often a silent client of HTTP/2 is asked whether it is there, and how long it may take
/// to say so.
const PING: Duration = Duration::from_secs(20);
/// How long a client of HTTP/2 may take to finish when it was told to go.
const LEAVING: Duration = Duration::from_secs(1);

/// A client whose requests are routed one by one.
pub(super) struct RoutedClient {
    pub gateway: Gateway,
    /// The function whose own listener this is; without it, each request says.
    pub function: Option<Arc<str>>,
    /// What was agreed on if its bytes are TLS.
    pub secured: Option<Secured>,
    protocol: Protocol,
    pub peer: SocketAddr,
    pub local: SocketAddr,
    /// When the connection was accepted, for the first request; 0 afterwards.
    accepted_ns: AtomicU64,
    /// What was begun for the first request, and where it is to go.
    first: Mutex<First>,
    entrance: Entrance,
    head_timeout: Duration,
    /// How long the client may take before its socket takes a piece, in milliseconds: with
    /// HTTP/1.1 as the present answer has it, with HTTP/2 as the most patient one so far.
    write_patience_ms: AtomicU64,
    /// Hears that the connection has to end while it waits for its client.
    displaced: Arc<Notify>,
    phase: Mutex<Phase>,
    /// Until when the client has to take the piece that it was given of an answer, by the number
    /// of that.
    untaken: Mutex<HashMap<u64, Instant>>,
    next_answer: AtomicU64,
    _admitted: Option<Admitted>,
}

/// What a client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

/// A client that was shown a certificate.
pub(super) struct Secured {
    pub certificates: Arc<Certificates>,
    /// The host that it has asked for.
    pub name: Option<String>,
}

/// The two ends of a connection.
pub(super) struct Ends {
    pub peer: SocketAddr,
    pub local: SocketAddr,
    pub accepted_ns: u64,
    pub admitted: Option<Admitted>,
}

/// How a client has come.
pub(super) struct Coming {
    pub protocol: Protocol,
    pub secured: Option<Secured>,
    pub entrance: Entrance,
}

/// What is known of the first request of a connection before it was parsed as a whole.
#[derive(Default)]
pub(super) struct First {
    /// The version of the function that is to have it.
    pub service: Option<Arc<Service>>,
    /// What was begun for it.
    pub prepared: Option<Prepared>,
}

/// What a connection does.
enum Phase {
    /// It waits for the first byte of a request.
    Idle { since: Instant, number: u64 },
    /// It waits for the rest of a head.
    Head { since: Instant, number: u64 },
    /// So many requests are under way.
    Busy(u32),
    /// It speaks another protocol: nobody here waits for its client any more.
    Switched,
}

/// A request that is under way. When it is dropped, the connection waits for its client.
pub(super) struct Active {
    client: Arc<RoutedClient>,
    /// The node has room for it.
    pub has_room: bool,
    _admitted: Option<Admitted>,
    _busy: Busy,
}

impl RoutedClient {
    fn admission(&self) -> &Arc<Admission> {
        self.gateway.shared().admission()
    }

    pub fn addresses(&self) -> Addresses {
        Addresses { client: self.peer, gateway: self.local }
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().expect("no holder panics")
    }

    pub fn speaks_http1(&self) -> bool {
        self.protocol == Protocol::Http1
    }

    /// When the connection was accepted, if this is asked for the first request.
    pub fn take_accepted_ns(&self) -> Option<u64> {
        Some(self.accepted_ns.swap(0, Relaxed)).filter(|ns| *ns != 0)
    }

    /// What was begun for the first request, if this is asked for it.
    pub fn take_prepared(&self) -> Option<Prepared> {
        self.first.lock().expect("no holder panics").prepared.take()
    }

    /// Where the first request is to go, if this is asked for it.
    pub fn take_service(&self) -> Option<Arc<Service>> {
        self.first.lock().expect("no holder panics").service.take()
    }

    /// An answer comes of which the client may take so long to read a piece.
    fn set_write_patience(&self, patience: Duration) {
        let ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        match self.protocol {
            Protocol::Http1 => self.write_patience_ms.store(ms, Relaxed),
            Protocol::Http2 => drop(self.write_patience_ms.fetch_max(ms, Relaxed)),
        }
    }

    /// How long the client may take before its socket takes a piece.
    pub fn write_patience(&self) -> Duration {
        Duration::from_millis(self.write_patience_ms.load(Relaxed))
    }

    /// A request begins.
    pub fn begin(self: &Arc<Self>) -> Active {
        let admission = self.admission();
        let (is_first, waited) = self.phase().begin();
        if let Some(number) = waited {
            admission.stop_waiting(&self.entrance, number);
        }
        // The connection itself was taken in with room for one.
        let admitted = if is_first { None } else { admission.admit() };
        let has_room = is_first || admitted.is_some();
        Active { client: self.clone(), has_room, _admitted: admitted, _busy: admission.begin() }
    }

    fn end(&self) {
        let mut phase = self.phase();
        match &mut *phase {
            Phase::Switched => {}
            Phase::Busy(count @ 2..) => *count -= 1,
            _ => {
                let number = self.admission().wait(&self.entrance, &self.displaced);
                *phase = Phase::Idle { since: Instant::now(), number };
            }
        }
    }

    /// The connection speaks another protocol from the present answer on.
    pub fn switch(&self) {
        *self.phase() = Phase::Switched;
    }

    /// The client has sent something.
    pub fn heard(&self) {
        let mut phase = self.phase();
        // Of HTTP/2 it need not be a request: the connection is as idle as before.
        if let (Phase::Idle { number, .. }, Protocol::Http1) = (&*phase, self.protocol) {
            *phase = Phase::Head { since: Instant::now(), number: *number };
        }
    }

    /// The connection begins no more requests, and ends after those that it has.
    pub fn go_away(&self) {
        self.displaced.notify_one();
    }

    /// An answer is there, of which the client may take so long to read a piece; without a word,
    /// as long as it may for those of the gateway.
    pub fn answer(self: &Arc<Self>, patience: Option<Duration>) -> Reading {
        let patience = patience.unwrap_or(WRITE_PATIENCE);
        self.set_write_patience(patience);
        // With HTTP/1.1 all that the client has not taken is in its socket.
        let number =
            (self.protocol == Protocol::Http2).then(|| self.next_answer.fetch_add(1, Relaxed));
        let reading = Reading { client: self.clone(), number, patience };
        reading.is_to_take();
        reading
    }

    fn untaken(&self) -> MutexGuard<'_, HashMap<u64, Instant>> {
        self.untaken.lock().expect("no holder panics")
    }

    /// When the client has been silent for too long.
    fn due(&self) -> Option<Instant> {
        match *self.phase() {
            Phase::Idle { since, .. } => Some(since + IDLE),
            Phase::Head { since, .. } => Some(since + self.head_timeout),
            Phase::Busy(_) | Phase::Switched => self.untaken().values().min().copied(),
        }
    }

    /// It has requests under way, and is to begin no others.
    fn is_to_leave(&self) -> bool {
        self.protocol == Protocol::Http2 && self.gateway.shared().is_draining()
    }

    /// It waits for its client.
    fn is_waiting(&self) -> bool {
        matches!(*self.phase(), Phase::Idle { .. } | Phase::Head { .. })
    }
}

/// An answer that the client reads.
pub(super) struct Reading {
    client: Arc<RoutedClient>,
    /// If it is looked at whether the client takes it.
    number: Option<u64>,
    patience: Duration,
}

impl Reading {
    /// A piece is there for the client.
    pub fn is_to_take(&self) {
        if let Some(number) = self.number {
            self.client.untaken().insert(number, Instant::now() + self.patience);
        }
    }

    /// The client has taken it.
    pub fn has_taken(&self) {
        if let Some(number) = self.number {
            self.client.untaken().remove(&number);
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.has_taken();
    }
}

impl Phase {
    /// One request more; whether it is the only one, and the number of the connection among
    /// those that waited if it did.
    fn begin(&mut self) -> (bool, Option<u64>) {
        match self {
            Self::Idle { number, .. } | Self::Head { number, .. } => {
                let number = *number;
                *self = Self::Busy(1);
                (true, Some(number))
            }
            Self::Busy(count) => {
                *count += 1;
                (*count == 1, None)
            }
            Self::Switched => (true, None),
        }
    }
}

impl Drop for RoutedClient {
    fn drop(&mut self) {
        if let Phase::Idle { number, .. } | Phase::Head { number, .. } = *self.phase() {
            self.admission().stop_waiting(&self.entrance, number);
        }
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.client.end();
    }
}

/// Serves a client of HTTP/1.1 to the end of its connection. The head of its first request
/// is there.
pub(super) async fn serve(
    gateway: Gateway,
    arrival: Arrival,
    function: Option<Arc<str>>,
    entrance: Entrance,
    first: First,
) {
    let Some((wire, ends)) = plain(arrival) else { return };
    let coming = Coming { protocol: Protocol::Http1, secured: None, entrance };
    let client = RoutedClient::new(gateway, ends, coming, (function, first));
    drive(wire, client).await;
}

/// The same for a client that has begun to speak HTTP/2.
pub(super) async fn serve_http2(
    gateway: Gateway,
    arrival: Arrival,
    function: Option<Arc<str>>,
    entrance: Entrance,
) {
    let Some((wire, ends)) = plain(arrival) else { return };
    let coming = Coming { protocol: Protocol::Http2, secured: None, entrance };
    let client = RoutedClient::new(gateway, ends, coming, (function, First::default()));
    client.await_first();
    drive(wire, client).await;
}

/// The same for a client of which nothing was read yet.
pub(super) async fn serve_wire(gateway: Gateway, wire: Wire, ends: Ends, coming: Coming) {
    let client = RoutedClient::new(gateway, ends, coming, (None, First::default()));
    client.await_first();
    drive(wire, client).await;
}

fn plain(arrival: Arrival) -> Option<(Wire, Ends)> {
    let Arrival { socket, peer, local, accepted_ns, admitted } = arrival;
    let stream = TcpStream::from_std(socket.into()).ok()?;
    Some((Wire::Plain(stream), Ends { peer, local, accepted_ns, admitted }))
}

impl RoutedClient {
    fn new(
        gateway: Gateway,
        ends: Ends,
        coming: Coming,
        (function, first): (Option<Arc<str>>, First),
    ) -> Arc<Self> {
        let Ends { peer, local, accepted_ns, admitted } = ends;
        let Coming { protocol, secured, entrance } = coming;
        Arc::new(Self {
            head_timeout: gateway.config().head_timeout,
            gateway,
            function,
            secured,
            protocol,
            peer,
            local,
            accepted_ns: AtomicU64::new(accepted_ns),
            first: Mutex::new(first),
            entrance,
            write_patience_ms: AtomicU64::new(WRITE_PATIENCE.as_millis() as u64),
            displaced: Arc::default(),
            // Nobody waits for a client whose first head is there.
            phase: Mutex::new(Phase::Busy(0)),
            untaken: Mutex::default(),
            next_answer: AtomicU64::new(0),
            _admitted: admitted,
        })
    }

    /// The first request is still to come.
    fn await_first(&self) {
        let number = self.admission().wait(&self.entrance, &self.displaced);
        *self.phase() = Phase::Head { since: Instant::now(), number };
    }
}

type Http2Connection<S> = http2::Connection<TokioIo<ClientIo>, S, TokioExecutor>;

/// Speaks HTTP with a client to the end of its connection.
async fn drive(wire: Wire, client: Arc<RoutedClient>) {
    let io = TokioIo::new(ClientIo::new(wire, client.clone()));
    let asked = client.clone();
    let service = service_fn(move |request| routed::answer(asked.clone(), request));
    match client.protocol {
        Protocol::Http1 => {
            let connection = http1_server().serve_connection(io, service).with_upgrades();
            let connection = std::pin::pin!(connection);
            // What is not answered yet has no place to go.
            let _ = attend(&client, connection).await;
        }
        Protocol::Http2 => {
            let connection: Http2Connection<_> = http2_server().serve_connection(io, service);
            let mut connection = std::pin::pin!(connection);
            loop {
                let ending = attend(&client, connection.as_mut()).await;
                if ending == Ending::Ended {
                    return;
                }
                // The client learns which requests were not begun (RFC 9113 §6.8).
                connection.as_mut().graceful_shutdown();
                if ending == Ending::Silent {
                    let _ = timeout(LEAVING, connection).await;
                    return;
                }
            }
        }
    }
}

fn http1_server() -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .half_close(true)
        .max_buf_size(BUFFER)
        .max_header_size(HEAD_MAX)
        .max_headers(FIELDS_MAX)
        .header_read_timeout(None)
        .preserve_header_case(true)
        .title_case_headers(true)
        .auto_date_header(false);
    builder
}

fn http2_server() -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEAD_MAX as u32)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(BUFFER)
        .max_pending_accept_reset_streams(RESETS_MAX)
        .max_local_error_reset_streams(RESETS_MAX)
        .keep_alive_interval(PING)
        .keep_alive_timeout(PING)
        .auto_date_header(false);
    builder
}

/// How a connection has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// One side has ended it.
    Ended,
    /// The client was silent for too long, or has to make room.
    Silent,
    /// The node takes no more requests on it.
    Leaving,
}

/// Follows a connection until it ends, or its client has been silent for too long.
async fn attend(
    client: &RoutedClient,
    mut connection: Pin<&mut impl Future<Output = hyper::Result<()>>>,
) -> Ending {
    let mut alarm = std::pin::pin!(sleep_until(Instant::now() + IDLE));
    let mut displaced = std::pin::pin!(client.displaced.notified());
    loop {
        let step = poll_fn(|context| {
            if let Poll::Ready(result) = connection.as_mut().poll(context) {
                return Poll::Ready(Step::Ended(result));
            }
            if displaced.as_mut().poll(context).is_ready() {
                return Poll::Ready(Step::Displaced);
            }
            if let Some(due) = client.due()
                && due < alarm.deadline()
            {
                alarm.as_mut().reset(due);
            }
            alarm.as_mut().poll(context).map(|()| Step::Alarm)
        });
        match step.await {
            Step::Ended(Ok(())) => return Ending::Ended,
            Step::Ended(Err(error)) => {
                tracing::debug!(peer = %client.peer, "a client's connection ended: {error}");
                return Ending::Ended;
            }
            Step::Displaced if client.is_waiting() => return Ending::Silent,
            Step::Displaced if client.is_to_leave() => return Ending::Leaving,
            // Its next request began at the same time.
            Step::Displaced => displaced.set(client.displaced.notified()),
            Step::Alarm => match client.due() {
                Some(due) if due <= Instant::now() => return Ending::Silent,
                Some(due) => alarm.as_mut().reset(due),
                None => alarm.as_mut().reset(Instant::now() + IDLE),
            },
        }
    }
}

enum Step {
    Ended(hyper::Result<()>),
    Displaced,
    Alarm,
}
