//! The end of a connection on which the client may still be sending.
//!
//! Closing a socket with unread bytes resets the connection, and the reset overtakes the answer (RFC 9112
//! §9.6): after this side has said all, what still comes is thrown away, within bounds.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// What is thrown away of one connection at most.
pub struct Linger {
    until: Pin<Box<Sleep>>,
    bytes: usize,
}

impl Linger {
    /// Waits for the client's end from now on, for so long and so many bytes.
    pub fn new(time: Duration, bytes: usize) -> Self {
        Self { until: Box::pin(sleep_until(Instant::now() + time)), bytes }
    }

    /// Whether the client has ended its side, or has had what it may have.
    pub fn poll(
        &mut self,
        stream: &mut (impl AsyncRead + Unpin),
        context: &mut Context<'_>,
    ) -> Poll<()> {
        let mut unread = [0; 4096];
        while self.bytes > 0 && self.until.as_mut().poll(context).is_pending() {
            let mut buffer = ReadBuf::new(&mut unread);
            match ready!(Pin::new(&mut *stream).poll_read(context, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {
                    self.bytes = self.bytes.saturating_sub(buffer.filled().len());
                }
                _ => break,
            }
        }
        Poll::Ready(())
    }
}

/// A connection of clients that send files: it lingers when it is shut down.
pub struct Lingering<S> {
    stream: S,
    linger: Option<Linger>,
}

impl<S> Lingering<S> {
    /// What a client of either API may still be sending: some of a file.
    const TIME: Duration = Duration::from_secs(5);
    const BYTES: usize = 64 << 20;

    /// One that lingers when this connection is shut down.
    pub fn new(stream: S) -> Self {
        Self { stream, linger: None }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Lingering<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Lingering<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { stream, linger } = &mut *self;
        if linger.is_none() {
            ready!(Pin::new(&mut *stream).poll_shutdown(context))?;
        }
        let linger = linger.get_or_insert_with(|| Linger::new(Self::TIME, Self::BYTES));
        linger.poll(stream, context).map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    async fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (client, listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn a_client_that_sends_on_has_its_answer() {
        let (mut client, server) = connected().await;
        let served = tokio::spawn(async move {
            let mut server = Lingering::new(server);
            server.write_all(b"no").await.unwrap();
            server.shutdown().await.unwrap();
        });
        // More than the buffers of both sides take.
        client.write_all(&vec![0; 32 << 20]).await.unwrap();
        client.shutdown().await.unwrap();
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, b"no");
        served.await.unwrap();
    }

    #[tokio::test]
    async fn a_client_that_never_ends_is_left() {
        let over = async |server: &mut TcpStream, mut linger: Linger| {
            poll_fn(|context| linger.poll(server, context)).await;
        };
        let (mut client, mut server) = connected().await;
        over(&mut server, Linger::new(Duration::from_millis(10), 1 << 20)).await;
        let sent = tokio::spawn(async move { while client.write_all(&[0; 4096]).await.is_ok() {} });
        over(&mut server, Linger::new(Duration::from_secs(3600), 1 << 20)).await;
        drop(server);
        sent.await.unwrap();
    }
}
