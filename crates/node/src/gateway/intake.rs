//! What the gateway does with requests that are for triggers: it checks events, makes those in
//! structured mode binary ones, and queues what its client does not want to wait for.

use super::client::RoutedClient;
use super::head::HeadError;
use super::refusal::{Audience, Refusal};
use super::report;
use super::routed::{AnswerBody, too_large};
use crate::config::FunctionConfig;
use crate::service::Service;
use crate::triggers::cloudevents::{self, Mode};
use crate::triggers::{
    INVOCATION_HEADER, KEY_MAX, NewInvocation, NotQueued, Origin, Queued, QueuedRequest, Triggers,
    carried, prefers_async,
};
use crate::upstream::RequestBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue, TRANSFER_ENCODING};
use hyper::http::request::Parts;
use hyper::{Response, StatusCode};
use serde_json::json;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

/// Most bytes of an event in structured mode.
const EVENT_MAX: u64 = 4 << 20;

/// What becomes of a request.
pub(super) enum TakenIn {
    /// It goes to the function, with this body. The room of one that was read is given back with
    /// the request.
    Passed(RequestBody, Option<OwnedSemaphorePermit>),
    /// It is queued.
    Queued(Response<AnswerBody>),
}

/// Looks at a request to a function that takes events, or invocations for its queue.
///
/// # Errors
/// It is neither passed on nor queued.
pub(super) async fn take_in(
    client: &RoutedClient,
    service: &Service,
    head: &mut Parts,
    mut body: Incoming,
    body_max: Option<u64>,
) -> Result<TakenIn, Refusal> {
    let config = service.config();
    let mode = match config.cloudevents {
        true => cloudevents::mode(&head.headers).map_err(Refusal::BadEvent)?,
        false => Mode::None,
    };
    let is_queued = config.r#async.is_some() && prefers_async(&head.headers);
    if mode == Mode::Binary {
        cloudevents::check(&head.headers).map_err(Refusal::BadEvent)?;
    }
    if mode != Mode::Structured && !is_queued {
        return Ok(TakenIn::Passed(body.into(), None));
    }
    let shared = client.gateway.shared();
    let unavailable = || not_queued(service, NotQueued::Full("the node is stopping".to_owned()));
    let triggers = shared.triggers().ok_or_else(unavailable)?;
    let most = most_bytes(config, is_queued).min(body_max.unwrap_or(u64::MAX));
    let room = room(&triggers, service, &body, most)?;
    let mut bytes = read(service, &mut body, most).await?;
    if mode == Mode::Structured {
        bytes = cloudevents::to_binary(&mut head.headers, &bytes).map_err(Refusal::BadEvent)?;
        cloudevents::check(&head.headers).map_err(Refusal::BadEvent)?;
    }
    if !is_queued {
        head.headers.remove(TRANSFER_ENCODING);
        head.headers.insert(CONTENT_LENGTH, HeaderValue::from(bytes.len()));
        return Ok(TakenIn::Passed(RequestBody::read(body, bytes.into()), Some(room)));
    }
    let is_operator = report::audience(shared, client.addresses()) == Audience::Operator;
    let origin = if is_operator { Origin::Operator } else { Origin::Client };
    let new = invocation(service, origin, head, bytes)?;
    let queued = triggers.queue(shared, new).await.map_err(|why| not_queued(service, why))?;
    Ok(TakenIn::Queued(answer(queued)))
}

fn most_bytes(config: &FunctionConfig, is_queued: bool) -> u64 {
    match (&config.r#async, is_queued) {
        // The envelope of an event may be somewhat larger than what is queued.
        (Some(terms), true) => terms.body_max.bytes().saturating_mul(2).min(EVENT_MAX),
        _ => EVENT_MAX,
    }
}

/// Room for the body while it is read.
fn room(
    triggers: &Arc<Triggers>,
    service: &Service,
    body: &Incoming,
    most: u64,
) -> Result<OwnedSemaphorePermit, Refusal> {
    let size = body.size_hint();
    if size.lower() > most {
        return Err(too_large(service, most));
    }
    triggers.admit_body(size.exact().unwrap_or(most)).map_err(|why| not_queued(service, why))
}

async fn read(service: &Service, body: &mut Incoming, most: u64) -> Result<Vec<u8>, Refusal> {
    let patience = service.config().limits.timeout.0;
    let mut bytes = Vec::new();
    loop {
        match timeout(patience, body.frame()).await {
            Err(_) => return Err(Refusal::BodyTooSlow(patience)),
            Ok(None) => return Ok(bytes),
            Ok(Some(Err(_))) => return Err(Refusal::BadHead(HeadError::Body)),
            Ok(Some(Ok(frame))) => {
                let Ok(data) = frame.into_data() else { continue };
                if (bytes.len() + data.len()) as u64 > most {
                    return Err(too_large(service, most));
                }
                bytes.extend_from_slice(&data);
            }
        }
    }
}

fn invocation(
    service: &Service,
    origin: Origin,
    head: &Parts,
    body: Vec<u8>,
) -> Result<NewInvocation, Refusal> {
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    Ok(NewInvocation {
        function: service.name().to_string(),
        origin,
        key: key(&head.headers)?,
        request: QueuedRequest {
            method: head.method.to_string(),
            path,
            headers: carried(&head.headers).map_err(Refusal::BadEvent)?,
            body,
        },
    })
}

/// What tells an invocation from all others: what its client says, or the event that it is.
fn key(headers: &HeaderMap) -> Result<Option<Vec<u8>>, Refusal> {
    let mut values = headers.get_all("idempotency-key").iter();
    let said = values.next().map(|value| [b"key\n", value.as_bytes()].concat());
    if values.next().is_some() {
        let why = "the request has two Idempotency-Key headers; send one";
        return Err(Refusal::BadEvent(why.to_owned()));
    }
    let key = said.or_else(|| {
        cloudevents::identity(headers).map(|identity| [&b"event\n"[..], &identity].concat())
    });
    match key {
        Some(key) if key.len() > KEY_MAX => {
            Err(Refusal::BadEvent(format!("an idempotency key has {KEY_MAX} bytes at most")))
        }
        key => Ok(key),
    }
}

fn not_queued(service: &Service, why: NotQueued) -> Refusal {
    let function = service.name().to_string();
    match why {
        NotQueued::TooLarge(most) => Refusal::BodyTooLarge { function, most },
        NotQueued::Full(reason) => Refusal::QueueFull { function, reason },
        NotQueued::Unavailable(why) => {
            Refusal::QueueUnavailable { function, reason: why.to_string() }
        }
    }
}

fn answer(queued: Queued) -> Response<AnswerBody> {
    let id = queued.id.to_string();
    let body = json!({"id": id, "duplicate": queued.is_duplicate});
    let mut response = Response::new(AnswerBody::Own(Full::new(Bytes::from(format!("{body}\n")))));
    *response.status_mut() = StatusCode::ACCEPTED;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert("preference-applied", HeaderValue::from_static("respond-async"));
    if let Ok(id) = HeaderValue::try_from(id) {
        headers.insert(INVOCATION_HEADER, id);
    }
    response
}
