//! Connections to instances, on which the gateway speaks HTTP. The service keeps those that can carry
//! another request.

mod http1;
mod http2;
mod upload;

pub(crate) use http1::Tap;
pub(crate) use http2::{FirstUse, Shared};
pub(crate) use upload::{RequestBody, Upload, UploadState};

use crate::instance::{Client, Outcome, Placed};
use http1::{Alone, Http1Line};
use http2::Stream;
use hyper::body::Incoming;
use hyper::{Request, Response};
use std::any::Any;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use thaw_home::config::Protocol;
use tokio::sync::oneshot;

/// The answer to a request, as soon as its head is there.
pub(crate) type Reply = Pin<Box<dyn Future<Output = hyper::Result<Response<Incoming>>> + Send>>;

/// The gateway's end of a connection, whoever has the other one.
pub(crate) enum Line {
    /// It carries one request at a time.
    Http1(Http1Line),
    /// It carries several. If it is dropped, nobody uses it.
    Http2(FirstUse),
}

/// A request's way to an instance: a connection, or its part of one.
pub struct Upstream {
    /// Number of the connection.
    pub(crate) connection: u64,
    /// Number of the instance.
    pub(crate) instance: u64,
    /// The instance had been waiting, and may have ended meanwhile.
    pub(crate) waited: bool,
    carrier: Carrier,
}

enum Carrier {
    Alone(Box<Alone>),
    Stream(Stream),
}

/// How an instance's side of a connection has ended.
#[derive(Clone, Debug)]
pub(crate) struct UpstreamEnd {
    /// What became of it.
    pub outcome: Outcome,
    /// The instance has read nothing of what was sent since the last request began.
    pub is_untouched: bool,
}

impl Line {
    /// Begins to speak HTTP on a new socket to an instance that serves so many requests at a time.
    ///
    /// # Errors
    /// The host's reactor is out of resources.
    pub async fn new(ours: OwnedFd, protocol: Protocol, concurrency: u32) -> io::Result<Self> {
        match protocol {
            Protocol::Http1 => Http1Line::new(ours).await.map(Self::Http1),
            Protocol::H2c => FirstUse::new(ours, concurrency).await.map(Self::Http2),
        }
    }

    /// Begins to send a request.
    pub fn send(&mut self, request: Request<Upload>) -> Reply {
        match self {
            Self::Http1(line) => line.send(request),
            Self::Http2(line) => line.send(request),
        }
    }

    /// The same, and sends what can be sent now: an instance that is booted for a request finds
    /// it there.
    pub fn send_ahead(&mut self, request: Request<Upload>) -> Reply {
        let reply = self.send(request);
        if let Self::Http1(line) = self {
            line.send_ahead();
        }
        reply
    }

    /// Whether its bytes move without somebody who drives it.
    pub fn moves_by_itself(&self) -> bool {
        matches!(self, Self::Http2(_))
    }

    /// What others may use of it as soon as an instance has it.
    pub fn shared(&self) -> Weak<dyn Any + Send + Sync> {
        match self {
            Self::Http1(_) => Weak::<()>::new(),
            Self::Http2(line) => line.shared(),
        }
    }
}

impl Upstream {
    /// The connection whose other end an instance has got; `done` resolves when the
    /// instance is done with it.
    pub(crate) fn new(
        line: Line,
        far_end: Arc<Client>,
        placed: Placed,
        done: oneshot::Receiver<Outcome>,
    ) -> Self {
        let connection = far_end.id;
        let carrier = match line {
            Line::Http1(line) => Carrier::Alone(Box::new(Alone::new(line, far_end, done))),
            Line::Http2(line) => Carrier::Stream(line.placed(far_end, done)),
        };
        Self { connection, instance: placed.instance, waited: placed.waited, carrier }
    }

    /// A part of a connection that an instance has.
    pub(crate) fn of(shared: &Arc<Shared>, instance: u64) -> Option<Self> {
        let stream = Stream::of(shared)?;
        let connection = stream.connection()?;
        Some(Self { connection, instance, waited: true, carrier: Carrier::Stream(stream) })
    }

    /// Whether other requests may be under way on the same connection.
    pub(crate) fn is_stream(&self) -> bool {
        matches!(self.carrier, Carrier::Stream(_))
    }

    /// Begins to send a request. The answer comes while the connection is driven.
    pub(crate) fn send(&mut self, request: Request<Upload>) -> Reply {
        match &mut self.carrier {
            Carrier::Alone(alone) => alone.send(request),
            Carrier::Stream(stream) => stream.send(request),
        }
    }

    /// The head of the answer is there.
    pub(crate) fn head_is_complete(&self) {
        if let Carrier::Alone(alone) = &self.carrier {
            alone.head_is_complete();
        }
    }

    /// Nothing more will be asked here: the end of the connection is seen at once from
    /// now on.
    pub(crate) fn is_last(&mut self) {
        if let Carrier::Alone(alone) = &mut self.carrier {
            alone.is_last();
        }
    }

    /// So many bytes of the answer were taken.
    pub(crate) fn took(&self, count: usize) {
        if let Carrier::Stream(stream) = &self.carrier {
            stream.took(count);
        }
    }

    /// Its request was answered, or has failed.
    pub(crate) fn is_over(&mut self) {
        if let Carrier::Stream(stream) = &mut self.carrier {
            stream.is_over();
        }
    }

    /// Its request is given up.
    pub(crate) fn is_given_up(&mut self) {
        if let Carrier::Stream(stream) = &mut self.carrier {
            stream.is_given_up();
        }
    }

    /// The instance takes no more requests on the connection.
    pub(crate) fn goes_away(&self) {
        if let Carrier::Stream(stream) = &self.carrier {
            stream.goes_away();
        }
    }

    /// Moves bytes in both directions as far as they go now.
    pub(crate) fn drive(&mut self, context: &mut Context<'_>) {
        if let Carrier::Alone(alone) = &mut self.carrier {
            alone.drive(context);
        }
    }

    /// It waits for another request from now on, and the guest may close it meanwhile.
    pub(crate) fn rest(&mut self) {
        self.waited = true;
        if let Carrier::Alone(alone) = &mut self.carrier {
            alone.rest();
        }
    }

    /// See [`Alone::is_unasked`]. Streams have numbers, so that no answer is to another request.
    pub(crate) fn is_unasked(&self) -> bool {
        match &self.carrier {
            Carrier::Alone(alone) => alone.is_unasked(),
            Carrier::Stream(_) => false,
        }
    }

    /// See [`Alone::take_back`].
    pub(crate) fn take_back(&self) -> bool {
        match &self.carrier {
            Carrier::Alone(alone) => alone.take_back(),
            Carrier::Stream(_) => false,
        }
    }

    /// How the instance's side ends, as soon as it does.
    pub(crate) fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<UpstreamEnd> {
        match &mut self.carrier {
            Carrier::Alone(alone) => {
                alone.drive(context);
                alone.end().map_or(Poll::Pending, |end| Poll::Ready(end.clone()))
            }
            Carrier::Stream(stream) => stream.poll_end(context),
        }
    }

    /// What the gateway has ended the connection for, if it has.
    pub(crate) fn complaint(&self) -> Option<&'static str> {
        match &self.carrier {
            Carrier::Alone(_) => None,
            Carrier::Stream(stream) => stream.complaint(),
        }
    }

    /// Whether another request can be sent.
    pub(crate) fn is_alive(&mut self) -> bool {
        match &mut self.carrier {
            Carrier::Alone(alone) => alone.is_alive(),
            Carrier::Stream(stream) => stream.is_alive(),
        }
    }
}
