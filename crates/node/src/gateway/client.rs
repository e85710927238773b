//! A client's connection on which the gateway itself speaks HTTP, from the first request
//! to the last.

use super::accept::{Arrival, Gateway};
use super::exchange::Prepared;
use super::head::HEAD_MAX;
use super::routed;
use crate::admission::{Admission, Admitted, Busy, Entrance};
use crate::service::Service;
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustix::net::RecvFlags;
use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep, sleep_until};

/// Most fields in the head of a request.
const FIELDS_MAX: usize = 128;
/// Most bytes of a body that are read at once.
const BUFFER: usize = 64 << 10;
/// How long a connection is kept on which the client asks nothing.
const IDLE: Duration = Duration::from_secs(60);
/// How long a client may take to read a piece of an answer, unless its function says
/// something else.
const WRITE_PATIENCE: Duration = Duration::from_secs(30);

/// How long a client may take to end its side after the gateway has ended its own.
const LINGER: Duration = Duration::from_secs(1);
/// Most bytes that are thrown away meanwhile.
const DISCARD_MAX: usize = 1 << 20;

/// A client whose requests are routed one by one.
pub(super) struct RoutedClient {
    pub gateway: Gateway,
    /// The function whose own listener this is; without it, each request says.
    pub function: Option<Arc<str>>,
    pub peer: SocketAddr,
    pub local: SocketAddr,
    /// When the connection was accepted, for the first request; 0 afterwards.
    accepted_ns: AtomicU64,
    /// What was begun for the first request, and where it is to go.
    first: Mutex<First>,
    entrance: Entrance,
    head_timeout: Duration,
    /// How long the client may take to read a piece of an answer, in milliseconds.
    write_patience_ms: AtomicU64,
    /// Hears that the connection has to end while it waits for its client.
    displaced: Arc<Notify>,
    phase: Mutex<Phase>,
    _admitted: Option<Admitted>,
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
    /// A request is under way.
    Busy,
}

/// A request that is under way. When it is dropped, the connection waits for its client.
pub(super) struct Active {
    client: Arc<RoutedClient>,
    _busy: Busy,
}

impl RoutedClient {
    fn admission(&self) -> &Arc<Admission> {
        self.gateway.shared().admission()
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().expect("no holder panics")
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

    /// How long the client may take to read a piece of an answer.
    pub fn set_write_patience(&self, patience: Duration) {
        let ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
        self.write_patience_ms.store(ms, Relaxed);
    }

    /// A request begins.
    pub fn begin(self: &Arc<Self>) -> Active {
        let before = std::mem::replace(&mut *self.phase(), Phase::Busy);
        if let Phase::Idle { number, .. } | Phase::Head { number, .. } = before {
            self.admission().stop_waiting(&self.entrance, number);
        }
        Active { client: self.clone(), _busy: self.admission().begin() }
    }

    fn wait(&self) {
        let number = self.admission().wait(&self.entrance, &self.displaced);
        *self.phase() = Phase::Idle { since: Instant::now(), number };
    }

    /// The client has sent something.
    fn heard(&self) {
        let mut phase = self.phase();
        if let Phase::Idle { number, .. } = *phase {
            *phase = Phase::Head { since: Instant::now(), number };
        }
    }

    /// When the client has been silent for too long.
    fn due(&self) -> Option<Instant> {
        match *self.phase() {
            Phase::Idle { since, .. } => Some(since + IDLE),
            Phase::Head { since, .. } => Some(since + self.head_timeout),
            Phase::Busy => None,
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
        self.client.wait();
    }
}

/// Serves a client to the end of its connection.
pub(super) async fn serve(
    gateway: Gateway,
    arrival: Arrival,
    function: Option<Arc<str>>,
    entrance: Entrance,
    first: First,
) {
    let Arrival { socket, peer, local, accepted_ns, admitted } = arrival;
    let Ok(stream) = TcpStream::from_std(socket.into()) else { return };
    let head_timeout = gateway.config().head_timeout;
    let client = Arc::new(RoutedClient {
        gateway,
        function,
        peer,
        local,
        accepted_ns: AtomicU64::new(accepted_ns),
        first: Mutex::new(first),
        entrance,
        head_timeout,
        write_patience_ms: AtomicU64::new(WRITE_PATIENCE.as_millis() as u64),
        displaced: Arc::default(),
        phase: Mutex::new(Phase::Busy),
        _admitted: admitted,
    });
    // The first head is there: nobody waits for this client now.
    let io = ClientIo {
        stream,
        client: client.clone(),
        is_first_read: true,
        stalled: None,
        lingering: None,
    };
    let asked = client.clone();
    let connection = Builder::new()
        .half_close(true)
        .max_buf_size(BUFFER)
        .max_header_size(HEAD_MAX)
        .max_headers(FIELDS_MAX)
        .header_read_timeout(None)
        .preserve_header_case(true)
        .title_case_headers(true)
        .auto_date_header(false)
        .serve_connection(
            TokioIo::new(io),
            service_fn(move |request| routed::answer(asked.clone(), request)),
        )
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
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
            Step::Ended(Ok(())) => return,
            Step::Ended(Err(error)) => {
                tracing::debug!(%peer, "a client's connection ended: {error}");
                return;
            }
            Step::Displaced if client.due().is_some() => return,
            // Its next request began at the same time.
            Step::Displaced => displaced.set(client.displaced.notified()),
            Step::Alarm => match client.due() {
                Some(due) if due <= Instant::now() => return,
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

/// A client's socket, whose use is noticed.
struct ClientIo {
    stream: TcpStream,
    client: Arc<RoutedClient>,
    /// The runtime does not know yet that there is something to read.
    is_first_read: bool,
    /// Until when the client has to read something.
    stalled: Option<Pin<Box<Sleep>>>,
    /// The gateway has said all.
    lingering: Option<Lingering>,
}

/// The end of a connection on which the client may still be sending.
struct Lingering {
    until: Pin<Box<Sleep>>,
    /// Bytes that may still be thrown away.
    left: usize,
}

impl ClientIo {
    /// Ends a connection whose client does not read.
    fn judge<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let patience = Duration::from_millis(self.client.write_patience_ms.load(Relaxed));
        let until = || Box::pin(sleep_until(Instant::now() + patience));
        match self.stalled.get_or_insert_with(until).as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for ClientIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        if std::mem::take(&mut self.is_first_read) {
            // The head of the first request is there; to hear so from the runtime takes a
            // turn of its reactor.
            let read =
                rustix::net::recv(&self.stream, buffer.initialize_unfilled(), RecvFlags::DONTWAIT);
            if let Ok((count @ 1.., _)) = read {
                buffer.advance(count);
                return Poll::Ready(Ok(()));
            }
        }
        let result = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.client.heard();
        }
        result
    }
}

impl AsyncWrite for ClientIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.judge(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    /// Closing a socket with unread bytes resets the connection, and the reset overtakes
    /// the answer (RFC 9112 §9.6): what still comes is thrown away, within limits.
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.lingering.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
            let until = Box::pin(sleep_until(Instant::now() + LINGER));
            self.lingering = Some(Lingering { until, left: DISCARD_MAX });
        }
        let Self { stream, lingering: Some(lingering), .. } = &mut *self else {
            return Poll::Ready(Ok(()));
        };
        let mut bytes = [0; 4096];
        while lingering.left > 0 && lingering.until.as_mut().poll(context).is_pending() {
            let mut buffer = ReadBuf::new(&mut bytes);
            match ready!(Pin::new(&mut *stream).poll_read(context, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {
                    lingering.left = lingering.left.saturating_sub(buffer.filled().len());
                }
                _ => break,
            }
        }
        Poll::Ready(Ok(()))
    }
}
