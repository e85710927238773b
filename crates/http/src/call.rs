//! One request of this node's own by HTTP/2, on a connection of its own: to train a program, to ask
//! whether it is well, and to call one particular instance.

use super::untrusted::{Leash, Meter, TRAILERS_MAX, Wire};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::client::conn::http2::Builder;
use hyper::rt::Executor;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;

/// The body of an answer. The connection ends with it.
pub struct CallBody {
    incoming: Incoming,
    open: watch::Sender<bool>,
}

impl CallBody {
    /// Ends the connection, and waits until it is closed.
    pub async fn close(self) {
        self.open.send_replace(true);
        self.open.closed().await;
    }
}

/// Sends a request whose head [`to_http2`](super::message::to_http2) has made, and waits for
/// the head of the answer. If this is dropped, the connection ends.
///
/// # Errors
/// There is no answer.
pub async fn call<S, B>(stream: S, request: Request<B>) -> hyper::Result<Response<CallBody>>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    B: Body<Data: Send, Error: Into<Box<dyn Error + Send + Sync>>> + Unpin + Send + 'static,
{
    let (open, is_cut) = watch::channel(false);
    let leash = Leash::new(is_cut);
    let wire = Wire::new(stream, Arc::new(Meter::of_one()));
    let connecting = Builder::new(leash.clone())
        .max_header_list_size(TRAILERS_MAX)
        .handshake(TokioIo::new(wire));
    let (mut sender, driver) = connecting.await?;
    leash.execute(driver);
    let response = sender.send_request(request).await?;
    Ok(response.map(|incoming| CallBody { incoming, open }))
}

impl Body for CallBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        Pin::new(&mut self.incoming).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}
