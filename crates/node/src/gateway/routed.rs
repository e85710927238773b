//! One request of a client whose requests are routed: which function it is for, and what
//! answers it.

use super::client::{Active, Reading, RoutedClient};
use super::exchange::{self, InstanceBody};
use super::grpc::{self, Code};
use super::intake::{self, TakenIn};
use super::passing::{self, Admittance, Passed, Way};
use super::refusal::{Audience, Refusal};
use super::report::{self, Account};
use super::stdin::{self, OutputBody};
use crate::edge::{AccessRecord, RequestId};
use crate::health::Verdict;
use crate::service::Service;
use crate::traces::{Came, RequestTrace};
use http_body_util::Full;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{
    CONNECTION, CONTENT_TYPE, HeaderValue, LOCATION, ORIGIN, RETRY_AFTER, WWW_AUTHENTICATE,
};
use hyper::http::request::Parts;
use hyper::{Request, Response, StatusCode, Version};
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use thaw_home::clock::monotonic_ns;
use thaw_home::config::{EntryKind, FunctionName};
use thaw_http::head::HeadError;
use thaw_http::message::{ERROR, REQUEST_ID};

/// The body of an answer, and the request that it answers.
pub(super) struct Answer {
    body: AnswerBody,
    account: Account,
    reading: Reading,
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
    /// Most bytes of its body.
    pub body_max: Option<u64>,
    /// Its spans, if they are recorded.
    pub trace: Option<Arc<RequestTrace>>,
}

impl Asked {
    /// An instance has it.
    pub fn note_placed(&self, instance: u64) {
        if let Some(trace) = &self.trace {
            let (version, tenant) = (self.service.version(), self.service.tenant().name());
            trace.placed(instance, version, tenant);
        }
    }
}

/// What is known of a request from its head.
struct Course {
    id: RequestId,
    since_ns: u64,
    /// The page that has made it.
    origin: Option<HeaderValue>,
    passed: Option<Passed>,
    /// The answer says it already.
    is_preflight: bool,
    /// It is a call of gRPC, whose client reads what became of it in trailers.
    is_grpc: bool,
    /// The status of a refusal, whatever way it is told.
    refused: Option<u16>,
    account: Account,
}

/// Answers a request.
pub(super) async fn answer(
    client: Arc<RoutedClient>,
    request: Request<Incoming>,
) -> Result<Response<Answer>, Infallible> {
    let active = client.begin();
    let is_http1 = request.version() < Version::HTTP_2;
    let mut course = Course::new(&client, &request);
    let answered = match active.has_room {
        true => dispatch(&client, request, &mut course).await,
        false => Err(Refusal::NodeFull),
    };
    // The first request may not have wanted it.
    drop(client.take_prepared());
    let mut response = match answered {
        Ok(response) => response,
        Err(refusal) => course.refuse(&client, &refusal),
    };
    course.mark(&mut response);
    let shared = client.gateway.shared();
    if is_http1 && shared.is_draining() && response.status() != StatusCode::SWITCHING_PROTOCOLS {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    if !is_http1 && shared.is_draining() {
        client.go_away();
    }
    let service = course.passed.as_ref().map(|passed| &passed.service);
    let reading = client.answer(service.map(|service| service.config().limits.timeout.0));
    let account = course.account;
    Ok(response.map(|body| Answer { body, account, reading, _active: active }))
}

impl Course {
    fn new(client: &RoutedClient, request: &Request<Incoming>) -> Self {
        let since_ns = client.take_accepted_ns().unwrap_or_else(monotonic_ns);
        let shared = client.gateway.shared();
        let id = match shared.tracer() {
            Some(tracer) => tracer.begin(request.headers()),
            None => RequestId::of(request.headers()),
        };
        let came = Came { peer: client.peer, is_tls: client.secured.is_some(), since_ns };
        let is_traced = shared.tracer().is_some() && id.is_sampled();
        let record = shared.edge().logs_requests().then(|| Arc::new(record(client, id, request)));
        let mut account = Account::begin(shared, since_ns, record);
        account.trace = is_traced.then(|| RequestTrace::new(id, request, came));
        Self {
            id,
            since_ns,
            origin: request.headers().get(ORIGIN).cloned(),
            passed: None,
            is_preflight: false,
            is_grpc: request.version() == Version::HTTP_2 && grpc::is_grpc(request.headers()),
            refused: None,
            account,
        }
    }

    fn function(&self) -> Option<&FunctionName> {
        self.passed.as_ref().map(|passed| passed.service.name())
    }

    /// The answer to a request that no function answers.
    fn refuse(&mut self, client: &RoutedClient, refusal: &Refusal) -> Response<AnswerBody> {
        let shared = client.gateway.shared();
        report::refused(shared, self.id, client.peer, self.function(), refusal);
        self.account.passage.error = Some(refusal.error());
        self.refused = Some(refusal.status());
        let audience = report::audience(shared, client.addresses());
        let mut response = match self.is_grpc {
            true => told_by_grpc(refusal, audience),
            false => told_by_http(refusal, refusal.body(self.id, audience)),
        };
        let headers = response.headers_mut();
        headers.insert(ERROR, HeaderValue::from_static(refusal.public_error()));
        if let Some(seconds) = refusal.retry_after() {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(challenge) = refusal.challenge() {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
        }
        // Nobody knows where the next request of such a client begins.
        if refusal.ends_connection() && client.speaks_http1() {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    /// Says in an answer, whoever has given it, which request it is to and which pages may read it.
    fn mark(&mut self, response: &mut Response<AnswerBody>) {
        let policy = self.passed.as_ref().and_then(|passed| passed.policy.as_ref());
        if let Some(cors) = policy.and_then(|policy| policy.cors.as_ref())
            && !self.is_preflight
        {
            cors.mark(self.origin.as_ref(), response.headers_mut());
        }
        if let Ok(id) = HeaderValue::try_from(self.id.to_string()) {
            response.headers_mut().insert(REQUEST_ID, id);
        }
        self.account.passage.function = self.function().cloned();
        self.account.passage.status = Some(self.refused.unwrap_or(response.status().as_u16()));
    }
}

fn told_by_http(refusal: &Refusal, body: String) -> Response<AnswerBody> {
    let mut response = Response::new(AnswerBody::Own(Full::new(Bytes::from(body))));
    let status = StatusCode::from_u16(refusal.status());
    *response.status_mut() = status.unwrap_or(StatusCode::BAD_GATEWAY);
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

/// A head that is trailers at the same time ("Trailers-Only").
fn told_by_grpc(refusal: &Refusal, audience: Audience) -> Response<AnswerBody> {
    let message = match audience {
        Audience::Public => refusal.reason(),
        Audience::Operator => refusal.detail(),
    };
    let mut response = Response::new(AnswerBody::Own(Full::default()));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    grpc::tell(headers, Code::of(refusal), &message);
    response
}

/// A request, for the access log.
fn record(client: &RoutedClient, id: RequestId, request: &Request<Incoming>) -> AccessRecord {
    let version = match request.version() {
        Version::HTTP_2 => "HTTP/2.0",
        Version::HTTP_10 => "HTTP/1.0",
        _ => "HTTP/1.1",
    };
    let authority = request.uri().authority().map(|authority| authority.as_str());
    let host = request.headers().get(hyper::header::HOST).and_then(|host| host.to_str().ok());
    let target = request.uri().path_and_query().map_or("*", |target| target.as_str());
    let line = (request.method().as_str(), authority.or(host).unwrap_or_default(), target);
    let came = (client.peer, client.secured.is_some());
    AccessRecord::new(id, came, line, version, Some(request.headers()))
}

async fn dispatch(
    client: &Arc<RoutedClient>,
    request: Request<Incoming>,
    course: &mut Course,
) -> Result<Response<AnswerBody>, Refusal> {
    let (mut head, body) = request.into_parts();
    let host = passing::host_of(&head)?;
    let passed = match passing::way(client, &head, host.as_deref())? {
        Way::Service(passed) => course.passed.insert(passed),
        Way::Redirect { location, status } => return Ok(redirect(location, status)),
    };
    let service = passed.service.clone();
    let granted = match passed.admit(client, &head)? {
        Admittance::Granted(granted) => granted,
        Admittance::Preflight(headers) => {
            course.is_preflight = true;
            return Ok(preflight(headers));
        }
    };
    let body_max = passed.body_max();
    if let Some(most) = body_max
        && body.size_hint().lower() > most
    {
        return Err(too_large(&service, most));
    }
    passed.prepare(client, &mut head, granted.as_ref());
    intake::disarm(client, &mut head)?;
    let user = granted.and_then(|granted| granted.user);
    course.account.passage.user.clone_from(&user);
    let about = (user.as_deref(), body_max, course.id);
    let body = match service.config().looks_at_triggers() {
        true => match intake::take_in(client, &service, &mut head, body, about).await? {
            TakenIn::Queued(answer) => return Ok(answer),
            TakenIn::Passed(body) => body,
        },
        false => body.into(),
    };
    course.id.write(&mut head.headers);
    let (client, since_ns, trace) = (client.clone(), course.since_ns, course.account.trace.clone());
    let asked = Asked { client, service, since_ns, body_max, trace };
    let answered = match asked.service.config().entry.kind {
        EntryKind::Http => exchange::answer(&asked, Request::from_parts(head, body)).await,
        EntryKind::Stdin => stdin::answer(&asked, head, body).await,
        EntryKind::Tcp | EntryKind::Udp | EntryKind::Sandbox => Err(not_http(&asked.service)),
    };
    note(&asked.service, &answered);
    answered
}

/// Counts a request as served or failed.
fn note(service: &Service, answered: &Result<Response<AnswerBody>, Refusal>) {
    let verdict = match answered {
        // It counts when its body has ended: that may fail, too.
        Ok(response) if matches!(response.body(), AnswerBody::Instance(_)) => None,
        Ok(response) => Some(Verdict::of_status(response.status().as_u16())),
        Err(refusal) => refusal.verdict(),
    };
    if let Some(verdict) = verdict {
        service.note(verdict);
    }
}

fn redirect(location: HeaderValue, status: StatusCode) -> Response<AnswerBody> {
    let mut response = Response::new(AnswerBody::Own(Full::default()));
    *response.status_mut() = status;
    response.headers_mut().insert(LOCATION, location);
    response
}

fn preflight(headers: hyper::HeaderMap) -> Response<AnswerBody> {
    let mut response = Response::new(AnswerBody::Own(Full::default()));
    *response.status_mut() = StatusCode::NO_CONTENT;
    *response.headers_mut() = headers;
    response
}

/// The body of a request is larger than its function takes.
pub(super) fn too_large(service: &Service, most: u64) -> Refusal {
    Refusal::BodyTooLarge { function: service.name().to_string(), most }
}

/// The version of a function for a request: for the first one of a connection it was chosen when
/// that came.
pub(super) fn choose(client: &RoutedClient, name: &str, head: &Parts) -> Option<Arc<Service>> {
    let chosen = client.take_service().filter(|service| service.name().as_str() == name);
    if let Some(service) = chosen.filter(|service| !service.is_retired()) {
        return Some(service);
    }
    let served = client.gateway.services().served(name)?;
    Some(served.choose(|rule| {
        let mut values = head.headers.get_all(rule.name.as_str()).iter();
        values.any(|value| value.as_bytes() == rule.value.as_bytes())
    }))
}

fn not_http(service: &Service) -> Refusal {
    let kind = service.config().entry.kind;
    let address = service.config().listen.map(|address| address.to_string());
    let way = format!("{} at {}", kind.name(), address.unwrap_or_default());
    Refusal::NotHttp { function: service.name().to_string(), way }
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
        self.reading.has_taken();
        let frame = match &mut self.body {
            AnswerBody::Own(body) => {
                Pin::new(body).poll_frame(context).map_err(|never| match never {})
            }
            AnswerBody::Instance(body) => Pin::new(body.as_mut()).poll_frame(context),
            AnswerBody::Output(body) => body.poll_frame(),
        };
        if let Poll::Ready(Some(Ok(frame))) = &frame {
            self.account.passage.sent += frame.data_ref().map_or(0, |data| data.len() as u64);
            self.reading.is_to_take();
        }
        frame
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
