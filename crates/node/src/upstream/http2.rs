//! A connection to an instance on which the gateway speaks HTTP/2: several requests at a time, each on
//! a stream of its own (RFC 9113).
//!
//! The service keeps the connection beside its instance, and every request that is under way holds it, too.
//! It is closed when the last of them lets go; a GOAWAY would tell the instance nothing more, since no
//! stream is open then. Tasks of their own move its bytes, since nobody's request is the connection's.

use super::frames::{Flood, Frames};
use super::{Reply, Upload, UpstreamEnd};
use crate::instance::{Client, Outcome};
use crate::socket::unread;
use hyper::Request;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper::rt::Executor;
use hyper_util::rt::TokioIo;
use std::future::Future;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

/// Bytes of a body that an instance may send ahead on a stream, and on all of a connection.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;
/// Most bytes of all fields of a head or of trailers, 32 for each field included (RFC 9113 §6.5.2).
const HEAD_MAX: u32 = 64 << 10;
/// Most bytes of a body that wait to be sent on a stream.
const SEND_BUFFER: usize = 128 << 10;
/// Streams that the gateway has reset and still knows, so that it ignores what comes late.
const RESETS_KNOWN: usize = 64;
/// Streams that the gateway may have to reset for errors of the instance.
const ERRORS_MAX: usize = 64;
/// Requests that were given up and of which the instance may not have heard yet.
const GIVEN_UP_MAX: u64 = 256;
/// Streams of a connection. Their numbers do not come again, and there are twice as many
/// (RFC 9113 §5.1.1).
const STREAMS_MAX: u64 = 1 << 29;

const FLOODS: &str = "it floods the gateway with frames of HTTP/2";
const TOO_MUCH: &str = "it sends bodies that nobody has asked for";
const READS_NOTHING: &str = "it does not read that requests were given up";

/// A connection that several requests use. It ends with this value.
pub(crate) struct Shared {
    sender: SendRequest<Upload>,
    meter: Arc<Meter>,
    /// Number of the connection, once an instance has it.
    connection: OnceLock<u64>,
    first: Mutex<First>,
    end: watch::Receiver<Option<SharedEnd>>,
    /// The instance has said that it takes no more requests on it.
    goes_away: AtomicBool,
    tell_end: Mutex<Option<watch::Sender<Option<SharedEnd>>>>,
    /// Ends all tasks of the connection, at the latest when it is dropped.
    cut: watch::Sender<bool>,
}

/// What became of the request that a connection was made for.
enum First {
    /// It waits for an instance.
    Wanted,
    /// An instance has the connection, and counts this request as its own. What frees its place.
    Placed(Box<dyn FnOnce() + Send>),
    /// It is under way, or was given up.
    Over,
}

/// How an instance's side of a connection has ended.
#[derive(Clone, Debug)]
struct SharedEnd {
    outcome: Outcome,
    /// Bytes that the instance had not read, and all bytes that were sent.
    unread: Option<u64>,
    written: u64,
}

/// What a connection has carried.
pub(super) struct Meter {
    frames: Mutex<Frames>,
    written: AtomicU64,
    requests: AtomicU64,
    /// Bytes of answers that were taken.
    taken: AtomicU64,
    /// Requests that were given up, less one for each frame that was sent since.
    given_up: AtomicU64,
    /// Why the gateway has ended the connection.
    complaint: OnceLock<&'static str>,
}

impl Meter {
    fn new() -> Self {
        Self {
            frames: Mutex::new(Frames::new(Instant::now())),
            written: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
            complaint: OnceLock::new(),
        }
    }

    /// Of a connection for one request, whose window alone bounds its answer.
    pub fn of_one() -> Self {
        Self { taken: AtomicU64::new(u64::MAX / 2), ..Self::new() }
    }

    fn frames(&self) -> MutexGuard<'_, Frames> {
        self.frames.lock().expect("no holder panics")
    }

    /// The instance has sent these bytes.
    fn read(&self, bytes: &[u8]) -> io::Result<()> {
        let mut frames = self.frames();
        let what = match frames.read(bytes, Instant::now()) {
            Err(Flood) => FLOODS,
            // No stream may have sent more than was taken of it and its window.
            Ok(()) if frames.data() > self.most_data() => TOO_MUCH,
            Ok(()) => return Ok(()),
        };
        drop(frames);
        Err(self.complain(what))
    }

    fn most_data(&self) -> u64 {
        let windows = self.requests.load(Relaxed) * u64::from(STREAM_WINDOW);
        // What was taken is counted a moment after its window was given back.
        self.taken.load(Relaxed) + windows + u64::from(CONNECTION_WINDOW)
    }

    fn complain(&self, what: &'static str) -> io::Error {
        io::Error::other(*self.complaint.get_or_init(|| what))
    }

    /// The instance was sent these bytes.
    fn sent(&self, bytes: &[u8]) {
        self.written.fetch_add(bytes.len() as u64, Relaxed);
        let frames = self.frames().sent(bytes);
        let less = |given_up: u64| Some(given_up.saturating_sub(frames));
        let _ = self.given_up.fetch_update(Relaxed, Relaxed, less);
    }
}

impl Shared {
    /// An instance gets the connection; `release` is called if its first request is given up before
    /// it was begun. Whether others may use it: not if that has happened already.
    pub fn place(&self, connection: u64, release: impl FnOnce() + Send + 'static) -> bool {
        let mut first = self.first();
        if matches!(*first, First::Over) {
            return false;
        }
        let _ = self.connection.set(connection);
        *first = First::Placed(Box::new(release));
        true
    }

    fn first(&self) -> MutexGuard<'_, First> {
        self.first.lock().expect("no holder panics")
    }

    /// Number of the connection, once an instance has it.
    pub fn connection(&self) -> Option<u64> {
        self.connection.get().copied()
    }

    /// Whether another request can be sent.
    pub fn is_alive(&self) -> bool {
        !self.goes_away.load(Relaxed)
            && !self.sender.is_closed()
            && self.end.borrow().is_none()
            && self.meter.complaint.get().is_none()
            && self.meter.requests.load(Relaxed) < STREAMS_MAX
    }

    fn send(&self, request: Request<Upload>) -> Reply {
        self.meter.requests.fetch_add(1, Relaxed);
        self.meter.frames().asked();
        Box::pin(self.sender.clone().send_request(request))
    }

    /// Follows the connection until the instance is done with it.
    fn follow(&self, far_end: Arc<Client>, done: oneshot::Receiver<Outcome>) {
        let told = self.tell_end.lock().expect("no holder panics").take();
        let Some(tell) = told else { return };
        let meter = self.meter.clone();
        tokio::spawn(async move {
            let outcome = done.await.unwrap_or(Outcome::Closed);
            let written = meter.written.load(Relaxed);
            let unread = unread(&far_end.socket).ok();
            tell.send_replace(Some(SharedEnd { outcome, unread, written }));
            // Only now its end is seen.
            drop(far_end);
        });
    }
}

/// A new connection, with the request that it is made for.
pub(crate) struct FirstUse {
    shared: Arc<Shared>,
    /// What was sent before the request.
    before: u64,
}

impl FirstUse {
    pub async fn new(ours: OwnedFd, concurrency: u32) -> io::Result<Self> {
        let stream = UnixStream::from_std(ours.into())?;
        let meter = Arc::new(Meter::new());
        let (cut, is_cut) = watch::channel(false);
        let leash = Leash::new(is_cut);
        let wire = Wire::new(stream, meter.clone());
        let (sender, driver) = Builder::new(leash.clone())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .initial_max_send_streams(concurrency as usize)
            .max_header_list_size(HEAD_MAX)
            .max_send_buf_size(SEND_BUFFER)
            .max_concurrent_reset_streams(RESETS_KNOWN)
            .max_local_error_reset_streams(ERRORS_MAX)
            .handshake(TokioIo::new(wire))
            .await
            .map_err(io::Error::other)?;
        leash.execute(driver);
        let (tell_end, end) = watch::channel(None);
        let shared = Shared {
            sender,
            meter,
            connection: OnceLock::new(),
            first: Mutex::new(First::Wanted),
            end,
            goes_away: AtomicBool::new(false),
            tell_end: Mutex::new(Some(tell_end)),
            cut,
        };
        Ok(Self { shared: Arc::new(shared), before: 0 })
    }

    pub fn shared(&self) -> Weak<Shared> {
        Arc::downgrade(&self.shared)
    }

    pub fn send(&mut self, request: Request<Upload>) -> Reply {
        self.before = self.shared.meter.written.load(Relaxed);
        self.shared.send(request)
    }

    /// An instance has the other end; `done` resolves when it is done with it.
    pub(super) fn placed(self, far_end: Arc<Client>, done: oneshot::Receiver<Outcome>) -> Stream {
        let _ = self.shared.connection.set(far_end.id);
        *self.shared.first() = First::Over;
        self.shared.follow(far_end, done);
        Stream { shared: self.shared.clone(), before: self.before, ending: None }
    }
}

impl Drop for FirstUse {
    fn drop(&mut self) {
        let first = std::mem::replace(&mut *self.shared.first(), First::Over);
        if let First::Placed(release) = first {
            release();
        }
    }
}

/// A request's part of a connection.
pub(super) struct Stream {
    shared: Arc<Shared>,
    /// What was sent before the request.
    before: u64,
    ending: Option<Pin<Box<dyn Future<Output = SharedEnd> + Send>>>,
}

impl Stream {
    pub fn of(shared: &Arc<Shared>) -> Option<Self> {
        shared.is_alive().then(|| Self { shared: shared.clone(), before: 0, ending: None })
    }

    /// Number of the connection.
    pub fn connection(&self) -> Option<u64> {
        self.shared.connection()
    }

    pub fn send(&mut self, request: Request<Upload>) -> Reply {
        self.before = self.shared.meter.written.load(Relaxed);
        self.shared.send(request)
    }

    pub fn is_alive(&self) -> bool {
        self.shared.is_alive()
    }

    /// So many bytes of its answer were taken.
    pub fn took(&self, count: usize) {
        self.shared.meter.taken.fetch_add(count as u64, Relaxed);
    }

    /// It was given up. An instance that reads nothing does not hear of it, and what it was to hear
    /// must not grow without end.
    pub fn give_up(&self) {
        let meter = &self.shared.meter;
        if meter.given_up.fetch_add(1, Relaxed) >= GIVEN_UP_MAX {
            let _ = meter.complain(READS_NOTHING);
            self.shared.cut.send_replace(true);
        }
    }

    /// The instance takes no more requests on its connection.
    pub fn goes_away(&self) {
        self.shared.goes_away.store(true, Relaxed);
    }

    pub fn complaint(&self) -> Option<&'static str> {
        self.shared.meter.complaint.get().copied()
    }

    pub fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<UpstreamEnd> {
        let mut end = self.shared.end.clone();
        let ending = self.ending.get_or_insert_with(|| {
            Box::pin(async move {
                let ended = end.wait_for(Option::is_some).await.map(|end| end.clone());
                let lost = SharedEnd { outcome: Outcome::Closed, unread: None, written: 0 };
                ended.ok().flatten().unwrap_or(lost)
            })
        });
        let end = std::task::ready!(ending.as_mut().poll(context));
        self.ending = None;
        let sent = end.written.saturating_sub(self.before);
        let is_untouched = end.unread.is_some_and(|unread| unread >= sent);
        Poll::Ready(UpstreamEnd { outcome: end.outcome, is_untouched })
    }
}

/// Runs the tasks of a connection until that is cut.
#[derive(Clone)]
pub(super) struct Leash(watch::Receiver<bool>);

impl Leash {
    pub fn new(is_cut: watch::Receiver<bool>) -> Self {
        Self(is_cut)
    }
}

impl<F: Future<Output: Send> + Send + 'static> Executor<F> for Leash {
    fn execute(&self, task: F) {
        let mut cut = self.0.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = cut.wait_for(|is_cut| *is_cut) => {}
                _ = task => {}
            }
        });
    }
}

/// The gateway's end of a connection.
pub(super) struct Wire<S> {
    stream: S,
    meter: Arc<Meter>,
}

impl<S> Wire<S> {
    pub fn new(stream: S, meter: Arc<Meter>) -> Self {
        Self { stream, meter }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Wire<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        std::task::ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        Poll::Ready(self.meter.read(&buffer.filled()[before..]))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Wire<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let count = std::task::ready!(Pin::new(&mut self.stream).poll_write(context, bytes))?;
        self.meter.sent(&bytes[..count]);
        Poll::Ready(Ok(count))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        let count = std::task::ready!(written)?;
        let mut left = count;
        for piece in bytes {
            let piece = &piece[..piece.len().min(left)];
            self.meter.sent(piece);
            left -= piece.len();
        }
        Poll::Ready(Ok(count))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
