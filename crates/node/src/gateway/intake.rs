//! What the gateway does with requests that are for triggers: it checks events, makes those in
//! structured mode binary ones, and queues what its client does not want to wait for.

use super::client::RoutedClient;
use super::refusal::{Audience, Refusal};
use super::report;
use super::routed::{AnswerBody, too_large};
use crate::body_room::{Holder, NoRoom, Room};
use crate::edge::RequestId;
use crate::service::Service;
use crate::traces::Producing;
use crate::triggers::cloudevents::{self, Mode};
use crate::triggers::{
    InvocationId, KEY_MAX, NewInvocation, NotQueued, Origin, Queued, QueuedRequest, carried,
    prefers_async,
};
use crate::upstream::RequestBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{
    CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION,
    TRANSFER_ENCODING,
};
use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode};
use serde_json::json;
use std::time::Duration;
use thaw_home::config::FunctionConfig;
use thaw_http::head::{ATTEMPT_HEADER, HeadError, INVOCATION_HEADER};
use tokio::time::{Instant, timeout_at};

/// Most bytes of an event in structured mode.
const EVENT_MAX: u64 = 4 << 20;
/// How long a body may take as a whole, even if it never stops coming.
const BODY_PATIENCE: Duration = Duration::from_secs(60);
/// Bytes for which a body has room from its first one on.
const FIRST_ROOM: u64 = 16 << 10;

/// What becomes of a request.
pub(super) enum TakenIn {
    /// It goes to the function, with this body.
    Passed(RequestBody),
    /// It is queued, or asks about what is; this is the answer.
    Queued(Response<AnswerBody>),
}

/// Takes out of a client's request what only those of the node's own queue say.
///
/// # Errors
/// It passes for an event of the node.
pub(super) fn disarm(client: &RoutedClient, head: &mut Parts) -> Result<(), Refusal> {
    if is_operator(client) {
        return Ok(());
    }
    head.headers.remove(INVOCATION_HEADER);
    head.headers.remove(ATTEMPT_HEADER);
    cloudevents::check_foreign(&head.headers).map_err(Refusal::BadEvent)
}

/// Whether a request comes by the admin API, or from the queue.
fn is_operator(client: &RoutedClient) -> bool {
    report::audience(client.gateway.shared(), client.addresses()) == Audience::Operator
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
    (user, body_max, id): (Option<&str>, Option<u64>, RequestId),
) -> Result<TakenIn, Refusal> {
    let config = service.config();
    let mode = match config.cloudevents {
        true => cloudevents::mode(&head.headers).map_err(Refusal::BadEvent)?,
        false => Mode::None,
    };
    if config.r#async.is_some()
        && let Some(id) = invocation_asked_for(head)
    {
        return status_of(client, service, id).await.map(TakenIn::Queued);
    }
    let is_queued = config.r#async.is_some() && prefers_async(&head.headers);
    if mode == Mode::Binary {
        cloudevents::check(&head.headers).map_err(Refusal::BadEvent)?;
    }
    if mode != Mode::Structured && !is_queued {
        return Ok(TakenIn::Passed(body.into()));
    }
    let unavailable = || not_queued(service, NotQueued::Full("the node is stopping".to_owned()));
    let triggers = client.gateway.triggers().ok_or_else(unavailable)?;
    let most = most_bytes(config, is_queued).min(body_max.unwrap_or(u64::MAX));
    let mut room = triggers.room(holder(service));
    let patience = service.config().limits.timeout.0.min(BODY_PATIENCE);
    let read = read(&mut body, most, patience, &mut room).await;
    let mut bytes = read.map_err(|why| why.refusal(service))?;
    if mode == Mode::Structured {
        bytes = cloudevents::to_binary(&mut head.headers, &bytes).map_err(Refusal::BadEvent)?;
        cloudevents::check(&head.headers).map_err(Refusal::BadEvent)?;
        disarm(client, head)?;
        if bytes.len() as u64 > most {
            return Err(too_large(service, most));
        }
    }
    if !is_queued {
        head.headers.remove(TRANSFER_ENCODING);
        head.headers.insert(CONTENT_LENGTH, HeaderValue::from(bytes.len()));
        return Ok(TakenIn::Passed(RequestBody::read(body, bytes.into(), room)));
    }
    let origin = if is_operator(client) { Origin::Operator } else { Origin::Client };
    let tracer = client.gateway.shared().tracer();
    let producing = Producing::begin(tracer, id, service.name().as_str());
    producing.id().write(&mut head.headers);
    let new = invocation(service, (origin, user), head, bytes)?;
    let queued = triggers.queue(new, room).await.map_err(|why| not_queued(service, why))?;
    producing.finish(queued.id);
    Ok(TakenIn::Queued(answer(queued)))
}

/// The query of a request that asks about an invocation, before its id.
const STATUS_QUERY: &str = "thaw-invocation=";

/// The invocation that a request asks about.
fn invocation_asked_for(head: &Parts) -> Option<InvocationId> {
    let id = head.uri.query()?.strip_prefix(STATUS_QUERY)?;
    (head.method == Method::GET).then(|| id.parse().ok()).flatten()
}

/// Says how an invocation is. Who knows its name may know that: it is as hard to guess as a key.
async fn status_of(
    client: &RoutedClient,
    service: &Service,
    id: InvocationId,
) -> Result<Response<AnswerBody>, Refusal> {
    let unavailable = || not_queued(service, NotQueued::Full("the node is stopping".to_owned()));
    let triggers = client.gateway.triggers().ok_or_else(unavailable)?;
    let found = triggers.status(service.name().to_string(), id).await;
    let found = found.map_err(|why| not_queued(service, why.into()))?;
    let (code, body) = match found {
        Some(status) => (StatusCode::OK, json!(status)),
        None => {
            let reason = "no invocation of this name is known; those that are done are forgotten \
                          after a while";
            let error = json!({"error": "unknown_invocation", "reason": reason});
            (StatusCode::NOT_FOUND, error)
        }
    };
    let mut response = Response::new(AnswerBody::Own(Full::new(Bytes::from(format!("{body}\n")))));
    *response.status_mut() = code;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

fn most_bytes(config: &FunctionConfig, is_queued: bool) -> u64 {
    match (&config.r#async, is_queued) {
        // The envelope of an event may be somewhat larger than what is queued.
        (Some(terms), true) => terms.body_max.bytes().saturating_mul(2).min(EVENT_MAX),
        _ => EVENT_MAX,
    }
}

/// Whose bodies count together with those of a function.
fn holder(service: &Service) -> Holder {
    match &service.config().sharing.domain {
        Some(domain) => Holder::Tenant(domain.name().to_string()),
        None => Holder::Function(service.name().to_string()),
    }
}

/// Why a body was not read.
#[derive(Debug)]
enum Unread {
    TooSlow(Duration),
    TooLarge(u64),
    Broken,
    NoRoom(NoRoom),
}

impl Unread {
    fn refusal(self, service: &Service) -> Refusal {
        match self {
            Self::TooSlow(patience) => Refusal::BodyTooSlow(patience),
            Self::TooLarge(most) => too_large(service, most),
            Self::Broken => Refusal::BadHead(HeadError::Body),
            Self::NoRoom(NoRoom(reason)) => {
                Refusal::QueueFull { function: service.name().to_string(), reason }
            }
        }
    }
}

/// Reads a body to its end, which has to come within `patience`. It takes room as it comes: never
/// more than twice of what is there.
async fn read<B: Body<Data = Bytes> + Unpin>(
    body: &mut B,
    most: u64,
    patience: Duration,
    room: &mut Room,
) -> Result<Vec<u8>, Unread> {
    let deadline = Instant::now() + patience;
    let expected = body.size_hint();
    if expected.lower() > most {
        return Err(Unread::TooLarge(most));
    }
    let expected = expected.upper().unwrap_or(most).min(most);
    let mut bytes = Vec::new();
    loop {
        let frame = match timeout_at(deadline, body.frame()).await {
            // A piece that is there comes before the time.
            Ok(Some(_)) if Instant::now() >= deadline => return Err(Unread::TooSlow(patience)),
            Err(_) => return Err(Unread::TooSlow(patience)),
            Ok(None) => return Ok(bytes),
            Ok(Some(frame)) => frame.map_err(|_| Unread::Broken)?,
        };
        let Ok(data) = frame.into_data() else { continue };
        let len = (bytes.len() + data.len()) as u64;
        if len > most {
            return Err(Unread::TooLarge(most));
        }
        if len > bytes.capacity() as u64 {
            let wanted = (2 * bytes.capacity() as u64).max(FIRST_ROOM).min(expected).max(len);
            room.grow_to(wanted).map_err(Unread::NoRoom)?;
            bytes.reserve_exact(wanted as usize - bytes.len());
        }
        bytes.extend_from_slice(&data);
    }
}

fn invocation(
    service: &Service,
    (origin, user): (Origin, Option<&str>),
    head: &Parts,
    body: Vec<u8>,
) -> Result<NewInvocation, Refusal> {
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned();
    Ok(NewInvocation {
        function: service.name().to_string(),
        key: key(&head.headers)?.map(|key| key_of(&origin, user, &key)),
        origin,
        request: QueuedRequest {
            method: head.method.to_string(),
            path,
            headers: carried(&head.headers).map_err(Refusal::BadEvent)?,
            body,
        },
    })
}

/// A key of a client, which has nothing to do with the same key of another user.
fn key_of(origin: &Origin, user: Option<&str>, key: &[u8]) -> Vec<u8> {
    let who = match (origin, user) {
        (_, Some(user)) => format!("user {}\n{user}\n", user.len()),
        (Origin::Operator, None) => "operator\n".to_owned(),
        (Origin::Client | Origin::Schedule(_) | Origin::Function(_), None) => {
            "anybody\n".to_owned()
        }
    };
    [who.as_bytes(), key].concat()
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
        NotQueued::KeyReused => Refusal::KeyReused { function },
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
    // Relative to the client's own URL, whatever part of that the function sees.
    if let Ok(location) = HeaderValue::try_from(format!("?{STATUS_QUERY}{id}")) {
        headers.insert(LOCATION, location);
    }
    if let Ok(id) = HeaderValue::try_from(id) {
        headers.insert(INVOCATION_HEADER, id);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body_room::Rooms;
    use hyper::body::Frame;
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    /// A body that says its length, sends so many pieces of 1 KiB, and then nothing for ever.
    struct Stuck {
        says: u64,
        pieces: usize,
    }

    impl Body for Stuck {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            if self.pieces == 0 {
                return Poll::Pending;
            }
            self.pieces -= 1;
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[0; 1024])))))
        }

        fn size_hint(&self) -> hyper::body::SizeHint {
            hyper::body::SizeHint::with_exact(self.says)
        }
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn slow_bodies_take_no_more_room_than_what_has_come_and_end_in_time() {
        let rooms = Rooms::default();
        let holder = Holder::Function("f".to_owned());
        // They say 64 times 4 MiB, and each sends 20 KiB.
        let mut all: Vec<Room> = (0..64).map(|_| rooms.room(holder.clone())).collect();
        for room in &mut all {
            let mut body = Stuck { says: EVENT_MAX, pieces: 20 };
            let unread = run(read(&mut body, EVENT_MAX, Duration::from_millis(1), room));
            assert!(matches!(unread, Err(Unread::TooSlow(_))), "{unread:?}");
            assert!(room.bytes() <= 40 << 10, "{}", room.bytes());
        }
        let mut room = rooms.room(holder);
        let whole = Bytes::from(vec![7; 1 << 20]);
        let patience = Duration::from_secs(60);
        let bytes = run(read(&mut Full::new(whole.clone()), EVENT_MAX, patience, &mut room));
        assert_eq!((bytes.unwrap(), room.bytes()), (whole.to_vec(), 1 << 20));
        let large = run(read(&mut Full::new(whole), 1000, patience, &mut room));
        assert!(matches!(large, Err(Unread::TooLarge(1000))), "{large:?}");
    }

    #[test]
    fn keys_of_two_users_do_not_meet() {
        let all = [
            key_of(&Origin::Client, None, b"key\nk"),
            key_of(&Origin::Operator, None, b"key\nk"),
            key_of(&Origin::Client, Some("a"), b"key\nk"),
            key_of(&Origin::Client, Some("b"), b"key\nk"),
            key_of(&Origin::Client, Some("a\nkey"), b"k"),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(!all[..at].contains(one), "{at}");
        }
    }

    #[test]
    fn a_body_that_never_stops_coming_ends_all_the_same() {
        struct Drip;
        impl Body for Drip {
            type Data = Bytes;
            type Error = Infallible;
            fn poll_frame(
                self: Pin<&mut Self>,
                _: &mut Context<'_>,
            ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
                std::thread::sleep(Duration::from_millis(1));
                Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"x")))))
            }
        }
        let rooms = Rooms::default();
        let mut room = rooms.room(Holder::Function("f".to_owned()));
        let unread = run(read(&mut Drip, EVENT_MAX, Duration::from_millis(20), &mut room));
        assert!(matches!(unread, Err(Unread::TooSlow(_))), "{unread:?}");
    }
}
