//! The body of a client's request on its way to an instance.

use crate::body_room::Room;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker, ready};
use thaw_http::message;
use tokio::time::Instant;

/// Most bytes that are kept of a body until it is known that they have arrived.
const REPLAY_MAX: usize = 64 << 10;

/// The body of a request: as it comes from the client, or as the gateway has read it.
pub(crate) struct RequestBody {
    incoming: Incoming,
    read: Option<(Bytes, Room)>,
}

impl RequestBody {
    /// One that was read to its end, the bytes that are sent in its place, and their room.
    pub fn read(incoming: Incoming, bytes: Bytes, room: Room) -> Self {
        Self { incoming, read: Some((bytes, room)) }
    }
}

impl From<Incoming> for RequestBody {
    fn from(incoming: Incoming) -> Self {
        Self { incoming, read: None }
    }
}

/// One way of a body to an instance. Another begins where the body begins, as long as
/// all of it that was sent is kept.
pub(crate) struct Upload {
    source: Arc<Mutex<Source>>,
    /// Which way it is: the last one alone gets pieces.
    number: u32,
    /// Pieces of those that are kept which went this way.
    sent: usize,
    trace: Arc<Trace>,
}

/// What is known of a way without having it: whoever sends a body keeps it while it waits for the
/// instance, also if its request is over.
#[derive(Default)]
pub(crate) struct Trace {
    has_begun: AtomicBool,
}

impl Trace {
    /// Whether the request was begun.
    pub fn has_begun(&self) -> bool {
        self.has_begun.load(Relaxed)
    }

    /// Whether somebody has the body still, for the only one besides who knows of it.
    pub fn is_there(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > 1
    }
}

/// Where a body comes from, and how far it is.
struct Source {
    /// None: nobody wants more of it.
    body: Option<Incoming>,
    kept: Vec<Bytes>,
    kept_len: usize,
    is_replayable: bool,
    is_complete: bool,
    has_failed: bool,
    /// Bytes that may still come; `None`: any number.
    left: Option<u64>,
    is_too_large: bool,
    waits_for_client: bool,
    /// Number of the last way.
    last_way: u32,
    /// Who is to hear of that.
    waker: Option<Waker>,
    last_progress: Instant,
    /// The room of a body that was read, declared behind its bytes.
    _room: Option<Room>,
}

/// What a body looks like from outside.
#[derive(Clone)]
pub(crate) struct UploadState(Arc<Mutex<Source>>);

impl Upload {
    /// The first way of a body of at most so many bytes.
    pub fn new(body: RequestBody, most: Option<u64>) -> (Self, UploadState) {
        let RequestBody { incoming, read } = body;
        let is_read = read.is_some();
        let (bytes, room) = read.unzip();
        let kept: Vec<Bytes> = bytes.into_iter().filter(|bytes| !bytes.is_empty()).collect();
        let source = Source {
            is_complete: is_read || incoming.is_end_stream(),
            body: Some(incoming),
            kept_len: kept.iter().map(Bytes::len).sum(),
            kept,
            is_replayable: true,
            has_failed: false,
            left: most,
            is_too_large: false,
            waits_for_client: false,
            last_way: 0,
            waker: None,
            last_progress: Instant::now(),
            _room: room,
        };
        let source = Arc::new(Mutex::new(source));
        let trace = Arc::default();
        (Self { source: source.clone(), number: 0, sent: 0, trace }, UploadState(source))
    }

    /// What is known of it when another one has it.
    pub fn trace(&self) -> Arc<Trace> {
        self.trace.clone()
    }
}

impl UploadState {
    /// A way from the beginning, after which no other one goes on; see
    /// [`UploadState::is_replayable`].
    pub fn again(&self) -> Option<Upload> {
        let mut source = self.source();
        if !source.can_begin_again() {
            return None;
        }
        source.last_way += 1;
        source.wake();
        let (number, trace) = (source.last_way, Arc::default());
        Some(Upload { source: self.0.clone(), number, sent: 0, trace })
    }

    /// Whether all that was sent is still there.
    pub fn is_replayable(&self) -> bool {
        self.source().can_begin_again()
    }

    /// When it last came or went on.
    pub fn last_progress(&self) -> Instant {
        self.source().last_progress
    }

    /// Whether the next piece has to come from the client.
    pub fn waits_for_client(&self) -> bool {
        let source = self.source();
        source.waits_for_client && !source.is_complete
    }

    /// Whether the client has sent something else than a body, or has gone away.
    pub fn has_failed(&self) -> bool {
        self.source().has_failed
    }

    /// Whether there was more of it than the function takes.
    pub fn is_too_large(&self) -> bool {
        self.source().is_too_large
    }

    /// The answer is complete, or nobody waits for it: nothing more is sent of it, and nothing is
    /// kept.
    pub fn stop(&self) {
        let mut source = self.source();
        source.is_replayable = false;
        source.wake();
        // The client may have something to say about it.
        let rest = (source.body.take(), std::mem::take(&mut source.kept));
        drop(source);
        drop(rest);
    }

    fn source(&self) -> MutexGuard<'_, Source> {
        self.0.lock().expect("no holder panics")
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let shared = self.source.clone();
        let mut source = shared.lock().expect("no holder panics");
        if source.has_failed || self.number != source.last_way {
            return Poll::Ready(Some(Err(io::Error::other(Stopped::new()))));
        }
        if source.is_replayable
            && let Some(kept) = source.kept.get(self.sent)
        {
            self.sent += 1;
            return Poll::Ready(Some(Ok(Frame::data(kept.clone()))));
        }
        if source.is_complete {
            return Poll::Ready(None);
        }
        source.keep_waker(context);
        let Some(body) = &mut source.body else {
            return Poll::Ready(Some(Err(io::Error::other(Stopped::new()))));
        };
        let frame = Pin::new(body).poll_frame(context);
        source.waits_for_client = frame.is_pending();
        let frame = ready!(frame);
        source.last_progress = Instant::now();
        match frame {
            Some(Ok(frame)) if !source.has_room(&frame) => {
                (source.is_complete, source.has_failed) = (true, true);
                source.is_too_large = true;
                Poll::Ready(Some(Err(io::ErrorKind::FileTooLarge.into())))
            }
            Some(Ok(mut frame)) => {
                if let Some(trailers) = frame.trailers_mut() {
                    message::clean_request_trailers(trailers);
                }
                self.sent += 1;
                source.keep(&frame);
                source.is_complete = source.body.as_ref().is_none_or(Body::is_end_stream);
                Poll::Ready(Some(Ok(frame)))
            }
            end => {
                source.is_complete = true;
                source.has_failed = end.is_some();
                Poll::Ready(end.map(|end| end.map_err(io::Error::other)))
            }
        }
    }

    /// HTTP/2 asks when it opens the stream.
    fn is_end_stream(&self) -> bool {
        self.trace.has_begun.store(true, Relaxed);
        let source = self.source.lock().expect("no holder panics");
        source.is_complete && !source.has_failed && self.sent >= source.kept.len()
    }

    fn size_hint(&self) -> SizeHint {
        let source = self.source.lock().expect("no holder panics");
        let left = source.body.as_ref().map(Body::size_hint).unwrap_or_default();
        let unsent: usize = source.kept.iter().skip(self.sent).map(Bytes::len).sum();
        match left.exact() {
            _ if source.is_complete => SizeHint::with_exact(unsent as u64),
            Some(left) => SizeHint::with_exact(left + unsent as u64),
            None => left,
        }
    }
}

impl Source {
    /// Counts a piece, if the body may have it.
    fn has_room(&mut self, frame: &Frame<Bytes>) -> bool {
        let len = frame.data_ref().map_or(0, |data| data.len() as u64);
        match &mut self.left {
            None => true,
            Some(left) => left.checked_sub(len).map(|rest| *left = rest).is_some(),
        }
    }

    /// A body that has failed would look complete.
    fn can_begin_again(&self) -> bool {
        self.is_replayable && !self.has_failed
    }

    /// Has the way that waits for a piece look again.
    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn keep_waker(&mut self, context: &Context<'_>) {
        let waker = context.waker();
        if !self.waker.as_ref().is_some_and(|kept| kept.will_wake(waker)) {
            self.waker = Some(waker.clone());
        }
    }

    fn keep(&mut self, frame: &Frame<Bytes>) {
        match frame.data_ref() {
            Some(data) if self.is_replayable && self.kept_len + data.len() <= REPLAY_MAX => {
                self.kept_len += data.len();
                self.kept.push(data.clone());
            }
            _ => {
                self.is_replayable = false;
                self.kept.clear();
            }
        }
    }
}

/// What a body ends with of which nobody wants the rest: on HTTP/2 it resets its stream with the
/// reason that this names as its source.
#[derive(Debug, thiserror::Error)]
#[error("its request was given up")]
struct Stopped(#[source] h2::Error);

impl Stopped {
    fn new() -> Self {
        Self(h2::Reason::CANCEL.into())
    }
}
