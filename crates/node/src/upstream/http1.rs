//! A connection to an instance on which the gateway speaks HTTP/1.1: one request at a time.
//!
//! Nothing here has a task of its own: whoever uses the connection drives it, so that a
//! request needs no switch between tasks.

use super::{Reply, Upload, UpstreamEnd};
use crate::instance::{Client, Outcome};
use crate::socket::unread;
use hyper::Request;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use rustix::net::{RecvFlags, SendFlags, recv};
use std::future::Future;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::oneshot;

/// Most bytes of one head of an answer.
const HEAD_MAX: usize = 64 << 10;
/// Most fields in it.
const FIELDS_MAX: usize = 128;
/// Most bytes of all heads of one answer, interim ones included.
const HEADS_MAX: i64 = 256 << 10;
/// Most bytes of a body that are read at once.
const BUFFER: usize = 128 << 10;

/// The gateway's end of a connection, whoever has the other one.
pub(crate) struct Http1Line {
    sender: SendRequest<Upload>,
    /// Ends with the connection, or when its protocol changes.
    driver: Option<Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>>,
    meter: Arc<Meter>,
}

/// A connection that an instance has, for one request at a time.
pub(super) struct Alone {
    /// Another request was answered on it.
    is_reused: bool,
    line: Http1Line,
    /// The instance's end. As long as the gateway has a descriptor of it, it can be asked
    /// how much of what was sent is unread; only without is the instance's end of the
    /// connection seen at once.
    far_end: Option<Arc<Client>>,
    done: oneshot::Receiver<Outcome>,
    end: Option<UpstreamEnd>,
}

/// What a connection has carried.
struct Meter {
    written: AtomicU64,
    /// Written before the present request.
    before: AtomicU64,
    /// How much more may be read until the head of the answer is complete; the largest
    /// number while nobody waits for one.
    head_left: AtomicI64,
}

impl Meter {
    /// Bytes of the present request that were sent.
    fn sent(&self) -> u64 {
        self.written.load(Relaxed) - self.before.load(Relaxed)
    }
}

/// Counts the bytes of a connection.
pub(crate) struct Tap {
    stream: UnixStream,
    meter: Arc<Meter>,
    is_first_write: bool,
}

impl Http1Line {
    /// Begins to speak HTTP on a new socket.
    ///
    /// # Errors
    /// The host's reactor is out of resources.
    pub async fn new(ours: OwnedFd) -> io::Result<Self> {
        let stream = UnixStream::from_std(ours.into())?;
        let meter = Arc::new(Meter {
            written: AtomicU64::new(0),
            before: AtomicU64::new(0),
            head_left: AtomicI64::new(i64::MAX),
        });
        let tap = Tap { stream, meter: meter.clone(), is_first_write: true };
        let (sender, driver) = Builder::new()
            .max_buf_size(BUFFER)
            .max_header_size(HEAD_MAX)
            .max_headers(FIELDS_MAX)
            .preserve_header_case(true)
            .title_case_headers(true)
            .handshake(TokioIo::new(tap))
            .await
            .map_err(io::Error::other)?;
        Ok(Self { sender, driver: Some(Box::pin(driver.with_upgrades())), meter })
    }

    /// Begins to send a request. The answer comes while the connection is driven.
    pub fn send(&mut self, request: Request<Upload>) -> Reply {
        let meter = &self.meter;
        meter.before.store(meter.written.load(Relaxed), Relaxed);
        meter.head_left.store(HEADS_MAX, Relaxed);
        Box::pin(self.sender.send_request(request))
    }

    /// Sends what can be sent now: an instance that is booted for a request finds it
    /// there.
    pub fn send_ahead(&mut self) {
        // Nobody waits; whoever drives it next does.
        self.drive(&mut Context::from_waker(Waker::noop()));
    }

    fn drive(&mut self, context: &mut Context<'_>) {
        if let Some(driver) = &mut self.driver
            && driver.as_mut().poll(context).is_ready()
        {
            // An error reaches the task that waits for the answer through the answer.
            self.driver = None;
        }
    }
}

impl Alone {
    /// `done` resolves when the instance is done with it.
    pub fn new(line: Http1Line, far_end: Arc<Client>, done: oneshot::Receiver<Outcome>) -> Self {
        Self { is_reused: false, line, far_end: Some(far_end), done, end: None }
    }

    /// Begins to send a request. The answer comes while the connection is driven.
    pub fn send(&mut self, request: Request<Upload>) -> Reply {
        self.line.send(request)
    }

    /// The head of the answer is there.
    pub fn head_is_complete(&self) {
        self.line.meter.head_left.store(i64::MAX, Relaxed);
    }

    /// Nothing more will be asked here: the end of the connection is seen at once from
    /// now on.
    pub fn is_last(&mut self) {
        self.far_end = None;
    }

    /// Moves bytes in both directions as far as they go now.
    pub fn drive(&mut self, context: &mut Context<'_>) {
        self.line.drive(context);
        if self.end.is_none()
            && let Poll::Ready(outcome) = Pin::new(&mut self.done).poll(context)
        {
            let is_untouched = self.unread().is_some_and(|unread| unread == self.line.meter.sent());
            self.far_end = None;
            let outcome = outcome.unwrap_or(Outcome::Closed);
            self.end = Some(UpstreamEnd { outcome, is_untouched });
            // Its end is to be seen now, and not at the next opportunity.
            context.waker().wake_by_ref();
        }
    }

    /// It waits for another request from now on, and the guest may close it meanwhile.
    pub fn rest(&mut self) {
        self.is_reused = true;
    }

    /// The answer that has begun is to nothing that was asked: it came after the one to an
    /// earlier request, and the instance has read nothing of the present one (RFC 9112
    /// §9.2). A server may say so that it closes an idle connection.
    pub fn is_unasked(&self) -> bool {
        let is_untouched = match &self.end {
            Some(end) => end.is_untouched,
            None => self.unread().is_some_and(|unread| unread >= self.line.meter.sent()),
        };
        self.is_reused && is_untouched
    }

    /// Takes back what was sent of the present request; whether the instance got nothing of it,
    /// and never will.
    pub fn take_back(&self) -> bool {
        // An instance that has closed the connection reads no more.
        let Some(far_end) = &self.far_end else { return true };
        let mut buffer = [0; 16 << 10];
        let mut taken = 0;
        while let Ok((count @ 1.., _)) = recv(&far_end.socket, &mut buffer, RecvFlags::DONTWAIT) {
            taken += count as u64;
        }
        taken >= self.line.meter.sent()
    }

    /// How much of what was sent the instance has not read, as long as it can be asked.
    fn unread(&self) -> Option<u64> {
        unread(&self.far_end.as_ref()?.socket).ok()
    }

    /// How the instance's side has ended, if it has.
    pub fn end(&self) -> Option<&UpstreamEnd> {
        self.end.as_ref()
    }

    /// Whether another request can be sent.
    pub fn is_alive(&mut self) -> bool {
        // Nobody waits; the next one who drives it will.
        self.drive(&mut Context::from_waker(Waker::noop()));
        self.line.driver.is_some() && self.end.is_none() && self.line.sender.is_ready()
    }
}

impl AsyncRead for Tap {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let left = self.meter.head_left.load(Relaxed);
        if left <= 0 {
            return Poll::Ready(Err(io::Error::other("the heads of its answer are too long")));
        }
        let before = buffer.filled().len();
        let result = Pin::new(&mut self.stream).poll_read(context, buffer);
        if left < i64::MAX {
            let count = buffer.filled().len() - before;
            self.meter.head_left.store(left - count as i64, Relaxed);
        }
        result
    }
}

impl Tap {
    /// The gateway's end.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// A new pair of sockets has room; to hear so from the runtime takes a turn of its
    /// reactor.
    fn write_at_once(&self, bytes: &[u8]) -> Option<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        rustix::net::send(&self.stream, bytes, flags).ok()
    }

    fn count(&self, written: &Poll<io::Result<usize>>) {
        if let Poll::Ready(Ok(count)) = written {
            self.meter.written.fetch_add(*count as u64, Relaxed);
        }
    }
}

impl AsyncWrite for Tap {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = match std::mem::take(&mut self.is_first_write) {
            true => self.write_at_once(bytes),
            false => None,
        };
        let written = match written {
            Some(count) => Poll::Ready(Ok(count)),
            None => Pin::new(&mut self.stream).poll_write(context, bytes),
        };
        self.count(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.is_first_write {
            let first = bytes.iter().find(|bytes| !bytes.is_empty()).map_or(&[][..], |bytes| bytes);
            return self.poll_write(context, first);
        }
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.count(&written);
        written
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
