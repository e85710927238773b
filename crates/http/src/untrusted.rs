//! A connection of HTTP/2 to a program that is not trusted: what it may send, and the tasks that move
//! its bytes.

use super::frames::{Flood, Frames};
use hyper::rt::Executor;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::Instant;

/// Bytes of a body that an instance may send ahead on a stream.
pub const STREAM_WINDOW: u32 = 64 << 10;
/// The same on all of a connection. Half of it is what h2 allows for frames of less than 256 bytes that
/// nobody has taken yet, each of which counts with what it lacks: some 16,000 of a byte.
pub const CONNECTION_WINDOW: u32 = 8 << 20;
/// Most bytes of all fields of a head or of trailers, 32 for each field included (RFC 9113 §6.5.2).
pub const TRAILERS_MAX: u32 = 64 << 10;

/// Bytes of bodies that an instance may send besides.
const DATA_SLACK: u64 = 1 << 20;

const FLOODS: &str = "it floods the gateway with frames of HTTP/2";
const TOO_MUCH: &str = "it sends bodies that nobody has asked for";

/// What a connection has carried.
pub struct Meter {
    frames: Mutex<Frames>,
    /// Bytes that the instance was sent, at least.
    pub written: AtomicU64,
    /// The same, with those that are just being sent.
    pub being_written: AtomicU64,
    /// Requests that were sent.
    pub requests: AtomicU64,
    /// Bytes of answers that were taken.
    pub taken: AtomicU64,
    /// Requests that were given up since all that was ready to be sent has been sent.
    pub unheard: AtomicU64,
    /// The program reads no more. What it has said before is still to be read, such as which requests
    /// it did not begin: what is written goes nowhere.
    pub is_deaf: AtomicBool,
    /// Why the gateway has ended the connection.
    pub complaint: OnceLock<&'static str>,
}

impl Default for Meter {
    /// That of a new connection.
    fn default() -> Self {
        Self {
            frames: Mutex::new(Frames::new(Instant::now())),
            written: AtomicU64::new(0),
            being_written: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            unheard: AtomicU64::new(0),
            is_deaf: AtomicBool::new(false),
            complaint: OnceLock::new(),
        }
    }
}

impl Meter {
    /// Of a connection for one request, whose window alone bounds its answer.
    pub fn of_one() -> Self {
        Self { taken: AtomicU64::new(u64::MAX / 2), ..Self::default() }
    }

    /// A request is about to be sent.
    pub fn asked(&self) {
        self.requests.fetch_add(1, Relaxed);
        self.frames().asked();
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
        self.taken.load(Relaxed) + windows + DATA_SLACK
    }

    /// The error that ends the connection; the first complaint stays.
    pub fn complain(&self, what: &'static str) -> io::Error {
        io::Error::other(*self.complaint.get_or_init(|| what))
    }

    /// The instance was sent these bytes.
    fn sent(&self, bytes: &[u8]) {
        self.written.fetch_add(bytes.len() as u64, Relaxed);
        self.frames().sent(bytes);
    }

    /// Sends some of so many bytes.
    fn writing(
        &self,
        all: usize,
        write: impl FnOnce() -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        self.being_written.fetch_add(all as u64, Relaxed);
        let written = write();
        let count = match &written {
            Poll::Ready(Ok(count)) => *count,
            _ => 0,
        };
        self.being_written.fetch_sub((all - count) as u64, Relaxed);
        written
    }
}

/// Runs the tasks of a connection until that is cut.
#[derive(Clone)]
pub struct Leash(watch::Receiver<bool>);

impl Leash {
    /// Cut when this becomes true, or when nobody can say so any more.
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
pub struct Wire<S> {
    stream: S,
    meter: Arc<Meter>,
}

impl<S> Wire<S> {
    /// Measures what passes on this stream.
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
        if self.meter.is_deaf.load(Relaxed) {
            return Poll::Ready(Ok(bytes.len()));
        }
        let Self { stream, meter } = &mut *self;
        let written = meter.writing(bytes.len(), || Pin::new(stream).poll_write(context, bytes));
        match std::task::ready!(written) {
            Ok(count) => {
                self.meter.sent(&bytes[..count]);
                Poll::Ready(Ok(count))
            }
            Err(error) if is_closed(&error) => {
                self.meter.is_deaf.store(true, Relaxed);
                Poll::Ready(Ok(bytes.len()))
            }
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let all = bytes.iter().map(|piece| piece.len()).sum();
        if self.meter.is_deaf.load(Relaxed) {
            return Poll::Ready(Ok(all));
        }
        let Self { stream, meter } = &mut *self;
        let written = meter.writing(all, || Pin::new(stream).poll_write_vectored(context, bytes));
        let count = match std::task::ready!(written) {
            Err(error) if is_closed(&error) => {
                self.meter.is_deaf.store(true, Relaxed);
                return Poll::Ready(Ok(all));
            }
            written => written?,
        };
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

    /// h2 asks when it has written its buffer, of 16 KiB: more than a thousand resets.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.meter.unheard.store(0, Relaxed);
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Whether the other end reads no more.
fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
    matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected)
}
