//! Connections that change their protocol (RFC 9110 §7.8), such as to WebSocket: after
//! the answer `101`, the gateway copies bytes in both directions.

use super::exchange::Lease;
use super::routed::AnswerBody;
use crate::http::message;
use http_body_util::Full;
use hyper::Response;
use hyper::body::Incoming;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional};
use tokio::time::{Instant, sleep_until};

/// Passes on an instance's answer `101`, and joins both connections.
pub(super) fn switch(
    mut response: Response<Incoming>,
    mut lease: Lease,
    client: OnUpgrade,
    keep_alive: Duration,
) -> Response<AnswerBody> {
    let instance = hyper::upgrade::on(&mut response);
    lease.upstream().is_last();
    tokio::spawn(async move {
        if let Err(error) = join(lease, client, instance, keep_alive).await {
            tracing::debug!("a connection of another protocol has ended: {error}");
        }
    });
    let (mut head, _) = response.into_parts();
    let upgrade = head.headers.get(hyper::header::UPGRADE).cloned();
    message::to_client(&mut head);
    if let Some(upgrade) = upgrade {
        head.headers.insert(hyper::header::UPGRADE, upgrade);
    }
    head.headers
        .insert(hyper::header::CONNECTION, hyper::header::HeaderValue::from_static("upgrade"));
    Response::from_parts(head, AnswerBody::Own(Full::default()))
}

/// Copies bytes until one side has ended, or nothing has moved for `keep_alive`.
async fn join(
    mut lease: Lease,
    client: OnUpgrade,
    mut instance: OnUpgrade,
    keep_alive: Duration,
) -> io::Result<()> {
    let instance = poll_fn(|context| {
        lease.drive(context);
        Pin::new(&mut instance).poll(context)
    });
    let instance = instance.await.map_err(io::Error::other)?;
    let client = client.await.map_err(io::Error::other)?;
    let clock = Arc::new(Activity { begun: Instant::now(), last_ms: AtomicU64::new(0) });
    let mut client = Noticed { io: TokioIo::new(client), activity: clock.clone() };
    let mut instance = Noticed { io: TokioIo::new(instance), activity: clock.clone() };
    let copied = {
        let mut copy = pin!(copy_bidirectional(&mut client, &mut instance));
        loop {
            let until = clock.last() + keep_alive;
            tokio::select! {
                copied = &mut copy => break copied.map(drop),
                () = sleep_until(until) => {
                    if clock.last() + keep_alive <= Instant::now() {
                        break Err(io::ErrorKind::TimedOut.into());
                    }
                }
            }
        }
    };
    // Both ends see the end before the instance is asked for its own.
    drop((client, instance));
    lease.finish();
    copied
}

/// When something moved.
struct Activity {
    begun: Instant,
    /// Milliseconds after that.
    last_ms: AtomicU64,
}

impl Activity {
    fn last(&self) -> Instant {
        self.begun + Duration::from_millis(self.last_ms.load(Relaxed))
    }

    fn note(&self) {
        let ms = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(ms, Relaxed);
    }
}

/// A connection whose use is noticed.
struct Noticed {
    io: TokioIo<Upgraded>,
    activity: Arc<Activity>,
}

impl AsyncRead for Noticed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.io).poll_read(context, buffer);
        if result.is_ready() {
            self.activity.note();
        }
        result
    }
}

impl AsyncWrite for Noticed {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write(context, bytes);
        if result.is_ready() {
            self.activity.note();
        }
        result
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
