//! A connection on which nothing moves for long is ended.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, sleep_until};

/// When a connection has last moved a byte.
#[derive(Clone, Debug)]
pub(super) struct Activity {
    begun: Instant,
    /// Milliseconds after that.
    last: Arc<AtomicU64>,
}

impl Activity {
    pub fn new() -> Self {
        Self { begun: Instant::now(), last: Arc::default() }
    }

    fn note(&self) {
        self.last.store(self.begun.elapsed().as_millis() as u64, Relaxed);
    }

    /// Returns when nothing has moved for `idle`.
    pub async fn ceases(&self, idle: Duration) {
        loop {
            let until = self.begun + Duration::from_millis(self.last.load(Relaxed)) + idle;
            if until <= Instant::now() {
                return;
            }
            sleep_until(until).await;
        }
    }
}

/// A stream whose use is noted.
pub(super) struct Watched<S> {
    pub stream: S,
    pub activity: Activity,
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_read(context, buffer);
        if result.is_ready() {
            self.activity.note();
        }
        result
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        if result.is_ready() {
            self.activity.note();
        }
        result
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        if result.is_ready() {
            self.activity.note();
        }
        result
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

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn a_connection_ceases_when_nothing_has_moved_for_long_and_not_before() {
        let (near, mut far) = tokio::io::duplex(64);
        let idle = Duration::from_millis(50);
        let activity = Activity::new();
        let mut watched = Watched { stream: near, activity: activity.clone() };
        let ceasing = activity.ceases(idle);
        let mut last = Instant::now();
        for _ in 0..3 {
            tokio::time::sleep(idle / 2).await;
            // The count is in whole milliseconds.
            last = Instant::now() - Duration::from_millis(1);
            far.write_all(b"x").await.unwrap();
            watched.read_u8().await.unwrap();
        }
        ceasing.await;
        assert!(last.elapsed() >= idle, "it was ended while bytes moved");
        far.write_all(b"x").await.unwrap();
    }
}
