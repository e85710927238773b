//! One request of a client whose requests are routed: which function it is for, and what
//! answers it.

use super::client::{Active, RoutedClient};
use super::exchange::{self, InstanceBody};
use super::head::HeadError;
use super::message;
use super::refusal::Refusal;
use super::stdin::{self, OutputBody};
use crate::clock::monotonic_ns;
use crate::config::EntryKind;
use crate::config::FunctionName;
use crate::service::Service;
use http_body_util::Full;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Request, Response, StatusCode};
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// The body of an answer, and the request that it answers.
pub(super) struct Answer {
    body: AnswerBody,
    /// Declared last: the connection is idle when the body has let go of everything.
    _active: Active,
}

/// What an answer's body comes from.
pub(super) enum AnswerBody {
    /// The gateway.
    Own(Full<Bytes>),
    /// An instance that speaks HTTP.
    Instance(Box<InstanceBody>),
    /// What an instance has printed.
    Output(OutputBody),
}

/// A request on its way.
pub(super) struct Asked {
    pub client: Arc<RoutedClient>,
    pub service: Arc<Service>,
    /// When its connection was accepted, or when it was read, in nanoseconds of
    /// `CLOCK_MONOTONIC`.
    pub since_ns: u64,
}

/// Answers a request.
pub(super) async fn answer(
    client: Arc<RoutedClient>,
    request: Request<Incoming>,
) -> Result<Response<Answer>, Infallible> {
    let active = client.begin();
    let answered = dispatch(&client, request).await;
    // The first request may not have wanted it.
    drop(client.take_prepared());
    let mut response = match answered {
        Ok(response) => response,
        Err((function, refusal)) => {
            let metrics = client.gateway.shared().metrics();
            metrics.refused(function.as_ref(), refusal.status(), refusal.error());
            refuse(&refusal)
        }
    };
    if client.gateway.shared().is_draining() && response.status() != StatusCode::SWITCHING_PROTOCOLS
    {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Ok(response.map(|body| Answer { body, _active: active }))
}

async fn dispatch(
    client: &Arc<RoutedClient>,
    request: Request<Incoming>,
) -> Result<Response<AnswerBody>, (Option<FunctionName>, Refusal)> {
    let since_ns = client.take_accepted_ns().unwrap_or_else(monotonic_ns);
    let (head, body) = request.into_parts();
    let named = message::function_of(&head).map_err(|error| (None, Refusal::BadHead(error)))?;
    let name = client.function.as_deref().map(str::to_owned).or(named);
    let found = name.as_deref().and_then(|name| client.gateway.shared().route(name));
    let Some(service) = found else {
        return Err((None, Refusal::UnknownFunction(name)));
    };
    client.set_write_patience(service.config().limits.timeout.0);
    let function = Some(service.name().clone());
    let asked = Asked { client: client.clone(), service, since_ns };
    let answered = match asked.service.config().entry.kind {
        EntryKind::Http => exchange::answer(&asked, Request::from_parts(head, body)).await,
        EntryKind::Stdin => stdin::answer(&asked, head, body).await,
        EntryKind::Tcp | EntryKind::Udp | EntryKind::Sandbox => Err(not_http(&asked.service)),
    };
    answered.map_err(|refusal| (function, refusal))
}

fn not_http(service: &Service) -> Refusal {
    let kind = service.config().entry.kind;
    let address = service.config().listen.map(|address| address.to_string());
    let way = format!("{} at {}", kind.name(), address.unwrap_or_default());
    Refusal::NotHttp { function: service.name().to_string(), way }
}

fn refuse(refusal: &Refusal) -> Response<AnswerBody> {
    let body = Bytes::from(refusal.body());
    let mut response = Response::new(AnswerBody::Own(Full::new(body)));
    let status = StatusCode::from_u16(refusal.status());
    *response.status_mut() = status.unwrap_or(StatusCode::BAD_GATEWAY);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(seconds) = refusal.retry_after() {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    // Nobody knows where the next request of such a client begins.
    if matches!(refusal, Refusal::BadHead(_) | Refusal::BodyTooSlow(_)) {
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

impl From<HeadError> for Refusal {
    fn from(error: HeadError) -> Self {
        Self::BadHead(error)
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match &mut self.body {
            AnswerBody::Own(body) => {
                Pin::new(body).poll_frame(context).map_err(|never| match never {})
            }
            AnswerBody::Instance(body) => Pin::new(body.as_mut()).poll_frame(context),
            AnswerBody::Output(body) => body.poll_frame(),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.body {
            AnswerBody::Own(body) => body.is_end_stream(),
            AnswerBody::Instance(body) => body.is_end_stream(),
            AnswerBody::Output(body) => body.left() == 0,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.body {
            AnswerBody::Own(body) => body.size_hint(),
            AnswerBody::Instance(body) => body.size_hint(),
            AnswerBody::Output(body) => SizeHint::with_exact(body.left() as u64),
        }
    }
}
