//! A connection to an instance on which the gateway speaks HTTP/2: several requests at a time, each on
//! a stream of its own (RFC 9113).
//!
//! The service keeps the connection beside its instance, and every request that is under way holds it, too.
//! It is closed when the last of them lets go; a GOAWAY would tell the instance nothing more, since no
//! stream is open then. Tasks of their own move its bytes, since nobody's request is the connection's.

use super::upload::Trace;
use super::{Reply, Upload, UpstreamEnd};
use crate::instance::{Client, Outcome};
use crate::socket::unread;
use hyper::Request;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper::rt::Executor;
use hyper_util::rt::TokioIo;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::task::{Context, Poll};
use std::time::Duration;
use thaw_http::untrusted::{CONNECTION_WINDOW, Leash, Meter, STREAM_WINDOW, TRAILERS_MAX, Wire};
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};

/// Most bytes of a body that wait to be sent on a stream.
const SEND_BUFFER: usize = 128 << 10;
/// Streams that the gateway has reset and still knows, and for how long, so that it ignores what comes
/// late.
const RESETS_KNOWN: usize = 1024;
const RESETS_KNOWN_FOR: Duration = Duration::from_secs(60);
/// Streams of a connection that the gateway may have to reset for errors of the instance, or since it
/// knows them no more.
const ERRORS_MAX: usize = 10_000;
/// Requests that are over and whose bodies the instance has not taken, besides as many as it serves
/// at a time.
const LEFT_MAX: usize = 64;
/// Requests that were given up and of which an instance that reads nothing has not heard: a few hundred
/// bytes each, and fewer than are written at a time.
const UNHEARD_MAX: u64 = 1_000;
/// Streams of a connection. Their numbers do not come again, and there are twice as many
/// (RFC 9113 §5.1.1).
const STREAMS_MAX: u64 = 1 << 29;

const HEARS_NOTHING: &str = "it does not read that requests were given up";
const READS_NOTHING: &str = "it does not take the bodies of requests that are over";

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
    /// Bodies of requests that are over, which wait for the instance, and how many there may be.
    left: Mutex<Vec<Arc<Trace>>>,
    left_max: usize,
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
            && !self.meter.is_deaf.load(Relaxed)
            && self.meter.requests.load(Relaxed) < STREAMS_MAX
    }

    fn send(&self, request: Request<Upload>) -> Reply {
        self.meter.asked();
        Box::pin(self.sender.clone().send_request(request))
    }

    /// A request is over: it was answered or given up. If its body waits for the instance, hyper
    /// keeps it, and the head of one that the instance takes no stream for.
    fn is_over(&self, body: Option<Arc<Trace>>) {
        // Its request and this know it.
        let Some(body) = body.filter(|body| body.is_there()) else { return };
        let mut left = self.left.lock().expect("no holder panics");
        if left.len() >= self.left_max {
            left.retain(|body| body.is_there());
        }
        left.push(body);
        if left.len() > self.left_max {
            self.end_for(READS_NOTHING);
        }
    }

    /// A request is given up: its stream is reset, if it has one.
    fn is_given_up(&self, body: Option<Arc<Trace>>) {
        let has_begun = body.as_ref().is_some_and(|body| body.has_begun());
        if has_begun && self.meter.unheard.fetch_add(1, Relaxed) >= UNHEARD_MAX {
            self.end_for(HEARS_NOTHING);
        }
        self.is_over(body);
    }

    fn end_for(&self, what: &'static str) {
        let _ = self.meter.complain(what);
        self.cut.send_replace(true);
    }

    /// Follows the connection until the instance is done with it.
    fn follow(&self, far_end: Arc<Client>, done: oneshot::Receiver<Outcome>) {
        let told = self.tell_end.lock().expect("no holder panics").take();
        let Some(tell) = told else { return };
        let (meter, mut cut) = (self.meter.clone(), self.cut.subscribe());
        tokio::spawn(async move {
            let outcome = tokio::select! {
                outcome = done => outcome.unwrap_or(Outcome::Closed),
                // The gateway has ended it, or nobody uses it any more: an instance that does not
                // close its end keeps no descriptor of the daemon's.
                _ = cut.wait_for(|is_cut| *is_cut) => Outcome::Closed,
            };
            // In this order: of what is sent meanwhile the instance counts as having read all.
            let unread = unread(&far_end.socket).ok();
            let written = meter.being_written.load(Relaxed);
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
    body: Option<Arc<Trace>>,
}

impl FirstUse {
    pub async fn new(ours: OwnedFd, concurrency: u32) -> io::Result<Self> {
        let stream = UnixStream::from_std(ours.into())?;
        let meter = Arc::new(Meter::default());
        let (cut, is_cut) = watch::channel(false);
        let leash = Leash::new(is_cut);
        let wire = Wire::new(stream, meter.clone());
        let (sender, driver) = Builder::new(leash.clone())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .initial_max_send_streams(concurrency as usize)
            .max_header_list_size(TRAILERS_MAX)
            .max_send_buf_size(SEND_BUFFER)
            .max_concurrent_reset_streams(RESETS_KNOWN)
            .reset_stream_duration(RESETS_KNOWN_FOR)
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
            left: Mutex::default(),
            left_max: concurrency as usize + LEFT_MAX,
            cut,
        };
        Ok(Self { shared: Arc::new(shared), before: 0, body: None })
    }

    pub fn shared(&self) -> Weak<Shared> {
        Arc::downgrade(&self.shared)
    }

    pub fn send(&mut self, request: Request<Upload>) -> Reply {
        self.before = self.shared.meter.written.load(Relaxed);
        self.body = Some(request.body().trace());
        self.shared.send(request)
    }

    /// An instance has the other end; `done` resolves when it is done with it.
    pub(super) fn placed(
        mut self,
        far_end: Arc<Client>,
        done: oneshot::Receiver<Outcome>,
    ) -> Stream {
        let _ = self.shared.connection.set(far_end.id);
        *self.shared.first() = First::Over;
        self.shared.follow(far_end, done);
        let (shared, body) = (self.shared.clone(), self.body.take());
        Stream { shared, before: self.before, body, ending: None }
    }
}

impl Drop for FirstUse {
    fn drop(&mut self) {
        let first = std::mem::replace(&mut *self.shared.first(), First::Over);
        if let First::Placed(release) = first {
            // Nobody follows it, and it ends with those who use it already.
            self.shared.goes_away.store(true, Relaxed);
            self.shared.is_given_up(self.body.take());
            release();
        }
    }
}

/// A request's part of a connection.
pub(super) struct Stream {
    shared: Arc<Shared>,
    /// What was sent before the request.
    before: u64,
    body: Option<Arc<Trace>>,
    ending: Option<Pin<Box<dyn Future<Output = SharedEnd> + Send>>>,
}

impl Stream {
    pub fn of(shared: &Arc<Shared>) -> Option<Self> {
        let shared = shared.is_alive().then(|| shared.clone())?;
        Some(Self { shared, before: 0, body: None, ending: None })
    }

    /// Number of the connection.
    pub fn connection(&self) -> Option<u64> {
        self.shared.connection()
    }

    pub fn send(&mut self, request: Request<Upload>) -> Reply {
        self.before = self.shared.meter.written.load(Relaxed);
        self.body = Some(request.body().trace());
        self.shared.send(request)
    }

    pub fn is_alive(&self) -> bool {
        self.shared.is_alive()
    }

    /// So many bytes of its answer were taken.
    pub fn took(&self, count: usize) {
        self.shared.meter.taken.fetch_add(count as u64, Relaxed);
    }

    /// Its request was answered, or has failed.
    pub fn is_over(&mut self) {
        self.shared.is_over(self.body.take());
    }

    /// Its request is given up.
    pub fn is_given_up(&mut self) {
        self.shared.is_given_up(self.body.take());
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
