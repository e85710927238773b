//! A request to an instance, and its answer.
//!
//! With `isolation = "request"` each request has an instance of its own, which is told
//! that nothing follows. Otherwise the connection to the instance is kept for the next
//! request, whoever makes it. The times of a request are kept here, since the socket of
//! an instance has no counters.

use super::accept::Arrival;
use super::attend::{died, ended};
use super::client::RoutedClient;
use super::grpc::{self, Code};
use super::refusal::Refusal;
use super::routed::{AnswerBody, Asked, too_large};
use super::ticket::{Seat, Ticket};
use super::upgrade;
use crate::health::Verdict;
use crate::instance::{Client, End, LetGo, Outcome, Way};
use crate::node::NodeState;
use crate::service::{Reuse, Service};
use crate::upstream::{Line, Reply, RequestBody, Upload, UploadState, Upstream, UpstreamEnd};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{HeaderMap, TRAILER};
use hyper::http::request::Parts;
use hyper::{Request, Response, StatusCode};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::error::Error as _;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;
use thaw_home::clock::monotonic_ns;
use thaw_home::config::{EntryKind, Protocol};
use thaw_http::head::HeadError;
use thaw_http::message::{self, Afterwards};
use tokio::time::{Instant, Sleep, sleep_until};

/// How often a request that no instance has touched is placed anew.
const PLACEMENTS_MAX: u32 = 3;
/// How long it may take to learn what became of an instance that has cut a connection.
const NEWS: Duration = Duration::from_millis(500);

/// What is wrong with an answer that came before its request was read.
const UNASKED: &str = "it has answered before it was asked";

/// A request's use of a connection to an instance.
pub(super) struct Lease {
    service: Arc<Service>,
    /// None when it has been let go of.
    upstream: Option<Upstream>,
    /// The request.
    upload: UploadState,
}

impl Lease {
    pub fn upstream(&mut self) -> &mut Upstream {
        self.upstream.as_mut().expect("a lease has its connection until it ends")
    }

    pub fn drive(&mut self, context: &mut Context<'_>) {
        if let Some(upstream) = &mut self.upstream {
            upstream.drive(context);
        }
    }

    /// The service, and the numbers of the instance and of the connection; `None`: it has ended.
    pub fn place(&self) -> Option<(&Arc<Service>, u64, u64)> {
        let upstream = self.upstream.as_ref()?;
        Some((&self.service, upstream.instance, upstream.connection))
    }

    /// The request was answered.
    pub fn finish(&mut self) {
        if self.upstream.as_ref().is_some_and(Upstream::is_stream) {
            // A server may answer before it has read everything.
            self.upload.stop();
        }
        self.release();
    }

    /// The request is over here, and may be sent again elsewhere.
    fn release(&mut self) {
        let Some(mut upstream) = self.upstream.take() else { return };
        upstream.is_over();
        if !self.service.is_single_use() && upstream.is_alive() {
            self.service.give_back(upstream);
        } else {
            self.let_go_of(upstream, LetGo::Answered);
        }
    }

    /// The request is given up. Where others go on beside it, the instance is told so, and its
    /// place is free; otherwise the instance sees the end of its connection.
    fn abandon(&mut self) {
        let Some(mut upstream) = self.upstream.take() else { return };
        if !upstream.is_stream() {
            return self.let_go_of(upstream, LetGo::Abandoned);
        }
        self.upload.stop();
        upstream.is_given_up();
        match self.service.is_single_use() {
            true => self.let_go_of(upstream, LetGo::Abandoned),
            false => self.service.give_back(upstream),
        }
    }

    /// The instance has not gone on with its answer in time: ends it, unless the answer is one of
    /// several, which ends alone.
    fn end_stalled(&mut self) {
        match self.upstream.as_ref().is_some_and(Upstream::is_stream) {
            true => self.abandon(),
            false => self.end_late("piece of the answer"),
        }
    }

    /// No other request may use the connection.
    fn close(&mut self) {
        if let Some(upstream) = self.upstream.take() {
            self.let_go_of(upstream, LetGo::Answered);
        }
    }

    fn let_go_of(&self, upstream: Upstream, why: LetGo) {
        let (instance, connection) = (upstream.instance, upstream.connection);
        // The guest sees the end of its connection.
        drop(upstream);
        self.service.let_go(instance, connection, why);
    }

    /// The instance has not kept a time: ends it.
    fn end_late(&mut self, what: &str) {
        if let Some(upstream) = self.upstream.take() {
            let limit = self.service.config().limits.timeout.0.as_secs_f64();
            let why = format!("no {what} within {limit} s, ending the instance");
            if upstream.is_stream() && self.service.serves_others(upstream.instance) {
                self.upstream = Some(upstream);
                return self.abandon();
            }
            self.service.kill_late(upstream.instance, why);
        }
    }
}

impl Lease {
    /// The client has stopped in the middle of its request. An instance that has nobody
    /// else ends; another one sees where the request ends.
    fn end_cut_off(&mut self) {
        match self.upstream.take() {
            Some(upstream) if self.service.is_single_use() => self.service.kill(upstream.instance),
            upstream => self.upstream = upstream,
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.abandon();
    }
}

/// Why an instance has not answered.
enum Failure {
    /// It has read nothing of the request.
    Untouched,
    /// The connection had another answer on it, and the instance has read nothing of the
    /// request.
    Unasked,
    /// It has said that it did not begin the request (RFC 9113 §8.7).
    Unprocessed(String),
    /// It has ended the call as one that nobody waits for.
    Cancelled(String),
    /// The client is to be told.
    Refused(Refusal),
}

/// Answers a request by an instance.
pub(super) async fn answer(
    asked: &Asked,
    mut request: Request<RequestBody>,
) -> Result<Response<AnswerBody>, Refusal> {
    let service = &asked.service;
    let protocol = service.config().protocol;
    let switch = hyper::upgrade::on(&mut request);
    let (mut head, body) = request.into_parts();
    let wants_upgrade = protocol == Protocol::Http1 && message::wants_upgrade(&head);
    translate(service, &mut head)?;
    let (upload, state) = Upload::new(body, asked.body_max);
    let mut request = Request::from_parts(head.clone(), upload);
    let mut placements = 1;
    let mut reuse = Reuse::Any;
    loop {
        let sent = send(asked, request, &head, &state, reuse).await;
        let (lease, reply) = match sent {
            Err(_) if state.is_too_large() => {
                return Err(too_large(service, asked.body_max.unwrap_or_default()));
            }
            sent => sent?,
        };
        let waited = Duration::from_nanos(monotonic_ns().saturating_sub(asked.since_ns));
        service.shared().metrics().placed(service.name(), waited);
        if let Some(upstream) = &lease.upstream {
            asked.note_placed(upstream.instance);
        }
        match ask(lease, reply, &state).await {
            Ok((response, lease)) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                if !wants_upgrade {
                    return Err(bad_response(service, "it switches protocols unasked"));
                }
                asked.client.switch();
                return Ok(upgrade::switch(response, lease, switch));
            }
            Ok((response, lease)) => return Ok(respond(response, lease, &asked.client)),
            Err(Failure::Refused(_)) if state.is_too_large() => {
                return Err(too_large(service, asked.body_max.unwrap_or_default()));
            }
            Err(Failure::Refused(refusal)) => return Err(refusal),
            Err(Failure::Cancelled(why)) => {
                let waited = Duration::from_nanos(monotonic_ns().saturating_sub(asked.since_ns));
                let is_past = grpc::timeout(&head.headers).is_some_and(|limit| waited >= limit);
                return Err(match is_past {
                    true => Refusal::DeadlinePassed { function: service.name().to_string() },
                    false => bad_response(service, &why),
                });
            }
            Err(Failure::Untouched) => {
                placements += 1;
                let again = state.again().filter(|_| placements <= PLACEMENTS_MAX);
                let unread = || died(service, "it ended before it read the request".to_owned());
                reuse = Reuse::None;
                request = Request::from_parts(head.clone(), again.ok_or_else(unread)?);
                // The cause of its death may have killed all ready instances, too.
                let launcher = service.launcher();
                let given_up = tokio::task::spawn_blocking(move || launcher.give_up_ready());
                given_up.await.expect("a launcher does not panic");
            }
            Err(Failure::Unprocessed(why)) => {
                placements += 1;
                let again = state.again().filter(|_| placements <= PLACEMENTS_MAX);
                let refused = || bad_response(service, &why);
                request = Request::from_parts(head.clone(), again.ok_or_else(refused)?);
            }
            Err(Failure::Unasked) => {
                let unasked = || bad_response(service, UNASKED);
                reuse = Reuse::None;
                request = Request::from_parts(head.clone(), state.again().ok_or_else(unasked)?);
            }
        }
    }
}

/// Makes the head of a client's request one for an instance.
fn translate(service: &Service, head: &mut Parts) -> Result<(), HeadError> {
    let function = service.name().as_str();
    match (service.config().protocol, service.is_single_use()) {
        (Protocol::H2c, _) => message::to_http2(head, function),
        (Protocol::Http1, true) => message::to_instance(head, function, Afterwards::Close),
        (Protocol::Http1, false) => message::to_instance(head, function, Afterwards::KeepAlive),
    }
}

/// Begins to speak HTTP on a new socket to an instance, in the version that its function speaks.
async fn line(service: &Service, ours: OwnedFd) -> io::Result<Line> {
    let config = service.config();
    Line::new(ours, config.protocol, config.limits.concurrency.get()).await
}

/// An instance that was booted for the first request of a client before that was parsed
/// as a whole. Dropping it ends it.
pub(super) struct Prepared {
    service: Arc<Service>,
    /// The gateway's end, the instance's, and who has it; none when they are taken.
    parts: Option<(OwnedFd, Arc<Client>, Ticket)>,
}

impl Prepared {
    /// Begins a boot if every request of the function has one, and it takes no waiting.
    pub fn begin(shared: &NodeState, service: &Arc<Service>, arrival: &Arrival) -> Option<Self> {
        if !service.is_single_use() || service.config().entry.kind != EntryKind::Http {
            return None;
        }
        let (ours, socket) = pair().ok()?;
        let ends = (arrival.peer, arrival.local);
        let client = Arc::new(routed_client(shared, socket, ends, arrival.accepted_ns));
        // A refusal now is a refusal of the request, too, and the client hears of it then.
        let ticket = Ticket::now(service, &client)?;
        Some(Self { service: service.clone(), parts: Some((ours, client, ticket)) })
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if let Some((_, _, ticket)) = &self.parts {
            self.service.kill(ticket.placed.instance);
        }
    }
}

fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// A connection of this node's own to an instance: this end, non-blocking, and the instance's.
///
/// # Errors
/// The host has no sockets left.
pub fn own_connection(shared: &NodeState) -> io::Result<(UnixStream, Arc<Client>)> {
    let nobody = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let (ours, socket) = pair()?;
    let client = routed_client(shared, socket, (nobody, nobody), monotonic_ns());
    Ok((ours.into(), Arc::new(client)))
}

/// The instance's end of a pair.
pub(super) fn routed_client(
    shared: &NodeState,
    socket: OwnedFd,
    (peer, local): (SocketAddr, SocketAddr),
    accepted_ns: u64,
) -> Client {
    Client {
        id: shared.next_connection(),
        socket,
        peer,
        local,
        accepted_ns,
        wants_head_only: false,
        way: Way::Routed,
        admitted: None,
        shared: Weak::<()>::new(),
    }
}

/// Sends a request to an instance: on a connection that is there, or with one for which
/// an instance is found.
async fn send(
    asked: &Asked,
    request: Request<Upload>,
    head: &Parts,
    state: &UploadState,
    reuse: Reuse,
) -> Result<(Lease, Reply), Refusal> {
    let service = &asked.service;
    let lease = |upstream| Lease {
        service: service.clone(),
        upstream: Some(upstream),
        upload: state.clone(),
    };
    if reuse == Reuse::Any
        && let Some(mut upstream) = service.idle_upstream()
    {
        let reply = upstream.send(request);
        return Ok((lease(upstream), reply));
    }
    let broken = |error: io::Error| died(service, format!("the host refused a socket ({error})"));
    let prepared = asked.client.take_prepared();
    if let Some(mut prepared) = prepared.filter(|found| Arc::ptr_eq(&found.service, service))
        && let Some((ours, ..)) = &prepared.parts
    {
        // The instance ends if the client goes away meanwhile.
        let ours = ours.try_clone().map_err(broken)?;
        let mut line = line(service, ours).await.map_err(broken)?;
        let (_, client, ticket) = prepared.parts.take().expect("they were there");
        let reply = line.send(request);
        return Ok((lease(ticket.upstream(line, client)), reply));
    }
    let (ours, socket) = pair().map_err(broken)?;
    let mut line = line(service, ours).await.map_err(broken)?;
    let mut request = Some(request);
    // An instance that is booted for it finds it there. A line that moves by itself would take of
    // the body what another one may have to send.
    let sent = request.take_if(|_| !line.moves_by_itself()).map(|request| line.send_ahead(request));
    let ends = (asked.client.peer, asked.client.local);
    let node = asked.client.gateway.shared();
    let client = routed_client(node, socket, ends, asked.since_ns);
    let client = Arc::new(Client { shared: line.shared(), ..client });
    let reuse = if state.is_replayable() { reuse } else { Reuse::None };
    match Seat::find(service, &client, reuse).await? {
        Seat::Taken(ticket) => {
            let mut upstream = ticket.upstream(line, client);
            let reply = sent.or_else(|| request.map(|request| upstream.send(request)));
            Ok((lease(upstream), reply.expect("it is sent once")))
        }
        Seat::Other(upstream) => {
            let mut lease = lease(upstream);
            let Some(again) = request.map(Request::into_body).or_else(|| state.again()) else {
                return Err(Refusal::BadHead(HeadError::Body));
            };
            let reply = lease.upstream().send(Request::from_parts(head.clone(), again));
            Ok((lease, reply))
        }
    }
}

/// Waits for the head of an answer.
async fn ask(
    mut lease: Lease,
    mut reply: Reply,
    state: &UploadState,
) -> Result<(Response<Incoming>, Lease), Failure> {
    let limit = lease.service.config().limits.timeout.0;
    let begun = Instant::now();
    let mut alarm = pin!(sleep_until(begun + limit));
    let answered = poll_fn(|context| {
        loop {
            lease.drive(context);
            if let Poll::Ready(response) = reply.as_mut().poll(context) {
                return Poll::Ready(Some(response));
            }
            if alarm.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            let due = state.last_progress().max(begun) + limit;
            if due <= Instant::now() {
                return Poll::Ready(None);
            }
            alarm.as_mut().reset(due);
        }
    });
    match answered.await {
        Some(Ok(_)) if lease.upstream().is_unasked() => {
            let is_untouched = lease.upstream().take_back();
            lease.close();
            match is_untouched {
                true => Err(Failure::Unasked),
                false => Err(Failure::Refused(bad_response(&lease.service, UNASKED))),
            }
        }
        Some(Ok(response)) => {
            lease.upstream().head_is_complete();
            Ok((response, lease))
        }
        Some(Err(error)) => Err(explain(lease, &error, state).await),
        None if state.waits_for_client() => {
            lease.end_cut_off();
            Err(Failure::Refused(Refusal::BodyTooSlow(limit)))
        }
        None => {
            lease.end_late("answer");
            let function = lease.service.name().to_string();
            Err(Failure::Refused(Refusal::Timeout { function, timeout: limit }))
        }
    }
}

/// What became of a request whose answer did not come.
async fn explain(mut lease: Lease, error: &hyper::Error, state: &UploadState) -> Failure {
    let service = lease.service.clone();
    if state.has_failed() {
        lease.end_cut_off();
        return Failure::Refused(Refusal::BadHead(HeadError::Body));
    }
    if error.is_parse() || error.is_parse_too_large() {
        lease.finish();
        return Failure::Refused(bad_response(&service, &error.to_string()));
    }
    if lease.upstream().is_stream()
        && let Some(failure) = explain_stream(&mut lease, error)
    {
        return failure;
    }
    let mut news = pin!(tokio::time::sleep(NEWS));
    let upstream = lease.upstream();
    let end: Option<UpstreamEnd> = poll_fn(|context| match upstream.poll_end(context) {
        Poll::Ready(end) => Poll::Ready(Some(end)),
        Poll::Pending => news.as_mut().poll(context).map(|()| None),
    })
    .await;
    let waited = upstream.waited;
    lease.release();
    match end {
        // Whoever asks for its state is told that it is gone, before another one answers.
        Some(UpstreamEnd { outcome: Outcome::Gone(end @ End::MemoryLost(_)), .. }) => {
            Failure::Refused(ended(&service, &end))
        }
        Some(UpstreamEnd { is_untouched: true, .. }) if waited => Failure::Untouched,
        // A zygote may be killed before it has become an instance.
        Some(UpstreamEnd {
            is_untouched: true,
            outcome: Outcome::Gone(End::KilledInBoot(_) | End::TenantSpent),
        }) => Failure::Untouched,
        Some(UpstreamEnd { outcome: Outcome::Gone(end), .. }) => {
            Failure::Refused(ended(&service, &end))
        }
        Some(UpstreamEnd { outcome: Outcome::Late, .. }) => {
            let (function, timeout) = (service.name().to_string(), service.config().limits.timeout);
            Failure::Refused(Refusal::Timeout { function, timeout: timeout.0 })
        }
        Some(UpstreamEnd { outcome: Outcome::Closed, .. }) => {
            Failure::Refused(bad_response(&service, "it closed the connection without an answer"))
        }
        None => Failure::Refused(bad_response(&service, &error.to_string())),
    }
}

/// The same for a request that was one of several; `None`: its connection has ended.
fn explain_stream(lease: &mut Lease, error: &hyper::Error) -> Option<Failure> {
    let service = lease.service.clone();
    let bad = |why: &str| Failure::Refused(bad_response(&service, why));
    let failure = match (lease.upstream().complaint(), stream_error(error)) {
        (Some(complaint), _) => bad(complaint),
        // It never left the gateway.
        (None, _) if error.is_canceled() => {
            lease.upstream().goes_away();
            Failure::Unprocessed("it takes no requests".to_owned())
        }
        (None, Some(error)) if is_unprocessed(error) => {
            if error.is_go_away() {
                lease.upstream().goes_away();
            }
            Failure::Unprocessed(error.to_string())
        }
        (None, Some(error)) if is_cancelled(error) => Failure::Cancelled(error.to_string()),
        (None, Some(error)) if !error.is_io() => bad(&error.to_string()),
        (None, _) => return None,
    };
    lease.release();
    Some(failure)
}

/// What HTTP/2 says of a request or its answer that has failed.
fn stream_error(error: &hyper::Error) -> Option<&h2::Error> {
    error.source()?.downcast_ref()
}

/// Whether an instance has said that it did nothing with a request: it refuses the stream, or goes
/// away and names an earlier one as the last that it has looked at (RFC 9113 §6.8, §8.7).
fn is_unprocessed(error: &h2::Error) -> bool {
    let is_refused = error.is_reset() && error.reason() == Some(h2::Reason::REFUSED_STREAM);
    error.is_remote() && (is_refused || error.is_go_away())
}

/// Whether an instance has ended a call that nobody waits for any more. Servers of gRPC do so at the deadline that
/// the client has set, maybe before the client does.
fn is_cancelled(error: &h2::Error) -> bool {
    error.is_remote() && error.is_reset() && error.reason() == Some(h2::Reason::CANCEL)
}

pub(super) fn bad_response(service: &Service, reason: &str) -> Refusal {
    let reason = format!("the function's answer is not HTTP ({reason})");
    Refusal::BadResponse { function: service.name().to_string(), reason }
}

fn respond(
    response: Response<Incoming>,
    mut lease: Lease,
    client: &RoutedClient,
) -> Response<AnswerBody> {
    let (mut head, incoming) = response.into_parts();
    if lease.service.is_single_use() || !message::keeps_alive(&head) {
        lease.upstream().is_last();
    }
    message::to_client(&mut head);
    let patience = lease.service.config().limits.timeout.0;
    let is_grpc = grpc::is_grpc(&head.headers);
    if is_grpc && client.speaks_http1() {
        // Otherwise it does not get the status of the call (RFC 9110 §6.5.1).
        head.headers.entry(TRAILER).or_insert(grpc::TRAILERS);
    }
    let body = InstanceBody {
        verdict: Some(verdict(head.status, &head.headers)),
        has_grpc_trailers: is_grpc && !client.speaks_http1(),
        incoming,
        lease,
        patience,
        begun: Instant::now(),
        alarm: None,
        failed: None,
    };
    Response::from_parts(head, AnswerBody::Instance(Box::new(body)))
}

/// The body of an answer on its way from an instance.
pub(super) struct InstanceBody {
    /// What the request counts as when this ends; none: it was counted.
    verdict: Option<Verdict>,
    incoming: Incoming,
    /// With the rest of the request, which may still be on its way.
    lease: Lease,
    /// The client expects trailers that say what became of its call.
    has_grpc_trailers: bool,
    /// How long the instance may take for a piece of it.
    patience: Duration,
    /// When it was last asked for a piece that was not there.
    begun: Instant,
    alarm: Option<Pin<Box<Sleep>>>,
    /// The instance has failed in the middle.
    failed: Option<Failed>,
}

/// How an answer ends that is not complete.
enum Failed {
    /// With the end of the client's stream, or connection.
    Error(io::Error),
    /// With trailers.
    Trailers(HeaderMap),
    /// It has ended so.
    Over,
}

/// What an answer with this head, or these trailers, says of the function.
fn verdict(status: StatusCode, headers: &HeaderMap) -> Verdict {
    Verdict::of_status(grpc::http_status(headers).unwrap_or(status).as_u16())
}

impl InstanceBody {
    /// Counts the request, once.
    fn count(&mut self) {
        if let Some(verdict) = self.verdict.take() {
            self.lease.service.note(verdict);
        }
    }

    /// Ends the client's connection, but not before it has got what there was of the
    /// answer: a failed body takes what is not sent yet with it.
    fn fail(&mut self, context: &mut Context<'_>, error: io::Error) {
        self.count();
        // A stream that the function has reset ends with its reason.
        let source = error.get_ref().and_then(|error| error.source());
        let is_reset = source
            .and_then(|source| source.downcast_ref::<h2::Error>())
            .is_some_and(h2::Error::is_reset);
        self.failed = Some(match self.has_grpc_trailers && !is_reset {
            true => Failed::Trailers(cut_off(&error)),
            false => Failed::Error(error),
        });
        context.waker().wake_by_ref();
    }

    /// Takes a part of the answer.
    fn note(&mut self, frame: &mut Frame<Bytes>) {
        if let (Some(data), Some(upstream)) = (frame.data_ref(), &self.lease.upstream) {
            upstream.took(data.len());
        }
        if let Some(trailers) = frame.trailers_mut() {
            message::clean_trailers(trailers);
            let of_call =
                grpc::http_status(trailers).map(|status| Verdict::of_status(status.as_u16()));
            self.verdict = self.verdict.map(|verdict| of_call.unwrap_or(verdict));
        }
    }

    /// Whether nothing has moved in either direction for too long.
    fn is_late(&mut self, context: &mut Context<'_>) -> bool {
        if self.alarm.is_none() {
            self.begun = Instant::now();
        }
        let until = self.begun + self.patience;
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep_until(until)));
        while alarm.as_mut().poll(context).is_ready() {
            let due = self.lease.upload.last_progress().max(self.begun) + self.patience;
            if due <= Instant::now() {
                return true;
            }
            alarm.as_mut().reset(due);
        }
        false
    }
}

/// Trailers of a call whose answer has ended in the middle.
fn cut_off(error: &io::Error) -> HeaderMap {
    let (code, message) = match error.kind() {
        io::ErrorKind::TimedOut => (Code::DeadlineExceeded, "the service did not go on in time"),
        _ => (Code::Unavailable, "the service failed while it answered"),
    };
    let mut trailers = HeaderMap::new();
    grpc::tell(&mut trailers, code, message);
    trailers
}

impl Body for InstanceBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = &mut *self;
        if let Some(failed) = &mut this.failed {
            return Poll::Ready(match std::mem::replace(failed, Failed::Over) {
                Failed::Error(error) => Some(Err(error)),
                Failed::Trailers(trailers) => Some(Ok(Frame::trailers(trailers))),
                Failed::Over => None,
            });
        }
        // That somebody wants a piece is news for the connection: it is driven twice.
        for _ in 0..2 {
            this.lease.drive(context);
            match Pin::new(&mut this.incoming).poll_frame(context) {
                Poll::Ready(None) => {
                    this.count();
                    this.lease.finish();
                    return Poll::Ready(None);
                }
                Poll::Ready(Some(Ok(mut frame))) => {
                    this.alarm = None;
                    this.note(&mut frame);
                    return Poll::Ready(Some(Ok(frame)));
                }
                Poll::Ready(Some(Err(error))) => {
                    if !stream_error(&error).is_some_and(is_cancelled) {
                        this.verdict = this.verdict.and(Some(Verdict::Failed));
                    }
                    this.fail(context, io::Error::other(error));
                    return Poll::Pending;
                }
                Poll::Pending => {}
            }
        }
        if this.is_late(context) {
            match this.lease.upload.waits_for_client() {
                true => this.lease.end_cut_off(),
                false => {
                    this.verdict = this.verdict.and(Some(Verdict::Failed));
                    this.lease.end_stalled();
                }
            }
            this.fail(context, io::ErrorKind::TimedOut.into());
        }
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

impl Drop for InstanceBody {
    fn drop(&mut self) {
        self.count();
        // A body that is complete, or empty, is not asked for its end.
        if self.incoming.is_end_stream() {
            self.lease.finish();
        }
    }
}
