//! A client's connection as bytes, plain or within TLS.

use super::client::RoutedClient;
use super::joined::Side;
use super::tls::{State, Tls};
use crate::edge::Addresses;
use rustix::net::RecvFlags;
use std::future::Future;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use thaw_http::linger::Linger;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

/// How long a client may take to end its side after the gateway has ended its own.
const LINGER: Duration = Duration::from_secs(1);
/// Most bytes that are thrown away meanwhile.
const DISCARD_MAX: usize = 1 << 20;

/// A client's socket.
pub(super) enum Wire {
    /// Its bytes are the client's own.
    Plain(TcpStream),
    /// They are TLS.
    Tls(Tls),
}

/// Does the same with either.
macro_rules! either {
    ($wire:expr, $stream:ident => $do:expr) => {
        match $wire {
            Wire::Plain($stream) => $do,
            Wire::Tls($stream) => $do,
        }
    };
}

impl Side for Wire {
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Plain(stream) => Some(stream.as_fd()),
            Self::Tls(tls) => tls.socket(),
        }
    }

    fn settle(&mut self) -> io::Result<Vec<u8>> {
        match self {
            Self::Plain(_) => Ok(Vec::new()),
            Self::Tls(tls) => tls.settle(),
        }
    }

    fn tls(&self) -> Option<&State> {
        match self {
            Self::Plain(_) => None,
            Self::Tls(tls) => tls.state(),
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(&mut *self, stream => Pin::new(stream).poll_read(context, buffer))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(&mut *self, stream => Pin::new(stream).poll_write(context, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(&mut *self, stream => Pin::new(stream).poll_write_vectored(context, bytes))
    }

    fn is_write_vectored(&self) -> bool {
        either!(self, stream => stream.is_write_vectored())
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(&mut *self, stream => Pin::new(stream).poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(&mut *self, stream => Pin::new(stream).poll_shutdown(context))
    }
}

/// A client's socket, whose use is noticed.
pub(super) struct ClientIo {
    wire: Wire,
    client: Arc<RoutedClient>,
    /// The runtime does not know yet that there is something to read.
    is_first_read: bool,
    /// Until when the client has to read something.
    stalled: Option<Pin<Box<Sleep>>>,
    /// The gateway has said all.
    linger: Option<Linger>,
    /// Somebody reads to the client's end all the same.
    is_joined: bool,
}

impl ClientIo {
    pub fn new(wire: Wire, client: Arc<RoutedClient>) -> Self {
        let (stalled, linger) = (None, None);
        Self { wire, client, is_first_read: true, stalled, linger, is_joined: false }
    }

    /// What the client says behind the gateway's end is not thrown away any more.
    pub fn join(&mut self) {
        self.is_joined = true;
    }

    /// The two ends of the connection.
    pub fn addresses(&self) -> Addresses {
        self.client.addresses()
    }

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
        let until = || Box::pin(sleep_until(Instant::now() + self.client.write_patience()));
        match self.stalled.get_or_insert_with(until).as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Side for ClientIo {
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.wire.socket()
    }

    fn settle(&mut self) -> io::Result<Vec<u8>> {
        self.wire.settle()
    }

    fn tls(&self) -> Option<&State> {
        self.wire.tls()
    }
}

impl AsyncRead for ClientIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        if std::mem::take(&mut self.is_first_read)
            && let Wire::Plain(stream) = &self.wire
        {
            // The head of the first request is there; to hear so from the runtime takes a
            // turn of its reactor.
            let read = rustix::net::recv(stream, buffer.initialize_unfilled(), RecvFlags::DONTWAIT);
            if let Ok((count @ 1.., _)) = read {
                buffer.advance(count);
                return Poll::Ready(Ok(()));
            }
        }
        let result = Pin::new(&mut self.wire).poll_read(context, buffer);
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
        let written = Pin::new(&mut self.wire).poll_write(context, bytes);
        self.judge(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.wire).poll_write_vectored(context, bytes);
        self.judge(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.wire.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.wire {
            // It keeps nothing: this says nothing of the client.
            Wire::Plain(stream) => Pin::new(stream).poll_flush(context),
            // Bytes that were taken may still wait to be sent.
            Wire::Tls(stream) => {
                let flushed = Pin::new(stream).poll_flush(context);
                self.judge(context, flushed)
            }
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.linger.is_none() {
            let ended = Pin::new(&mut self.wire).poll_shutdown(context);
            ready!(self.judge(context, ended))?;
        }
        if self.is_joined {
            return Poll::Ready(Ok(()));
        }
        let Self { wire, linger, .. } = &mut *self;
        let linger = linger.get_or_insert_with(|| Linger::new(LINGER, DISCARD_MAX));
        linger.poll(wire, context).map(Ok)
    }
}
