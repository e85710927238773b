//! A request to an instance, and its answer.
//!
//! With `isolation = "request"` each request has an instance of its own, which is told
//! that nothing follows. Otherwise the connection to the instance is kept for the next
//! request, whoever makes it. The times of a request are kept here, since the socket of
//! an instance has no counters.

use super::accept::Arrival;
use super::attend::{died, ended};
use super::refusal::Refusal;
use super::routed::{AnswerBody, Asked, too_large};
use super::ticket::{Seat, Ticket};
use super::upgrade;
use crate::clock::monotonic_ns;
use crate::config::EntryKind;
use crate::health::Verdict;
use crate::http::head::HeadError;
use crate::http::message::{self, Afterwards};
use crate::instance::{Client, End, LetGo, Outcome, Way};
use crate::node::NodeState;
use crate::service::{Reuse, Service};
use crate::upstream::{Line, Reply, RequestBody, Upload, UploadState, Upstream, UpstreamEnd};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::http::request::Parts;
use hyper::{Request, Response, StatusCode};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::future::{Future, poll_fn};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
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
        let Some(mut upstream) = self.upstream.take() else { return };
        if !self.service.is_single_use() && upstream.is_alive() {
            self.service.give_back(upstream);
        } else {
            self.let_go_of(upstream, LetGo::Answered);
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
            self.service.kill_late(upstream.instance, why);
        }
    }
}

impl Lease {
    /// The client has stopped in the middle of its request. An instance that has nobody
    /// else ends; another one sees where the request ends.
    fn end_cut_off(&mut self) {
        if self.service.is_single_use()
            && let Some(upstream) = self.upstream.take()
        {
            self.service.kill(upstream.instance);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(upstream) = self.upstream.take() {
            self.let_go_of(upstream, LetGo::Abandoned);
        }
    }
}

/// Why an instance has not answered.
enum Failure {
    /// It has read nothing of the request.
    Untouched,
    /// The connection had another answer on it, and the instance has read nothing of the
    /// request.
    Unasked,
    /// The client is to be told.
    Refused(Refusal),
}

/// Answers a request by an instance.
pub(super) async fn answer(
    asked: &Asked,
    mut request: Request<RequestBody>,
) -> Result<Response<AnswerBody>, Refusal> {
    let service = &asked.service;
    let afterwards =
        if service.is_single_use() { Afterwards::Close } else { Afterwards::KeepAlive };
    let switch = hyper::upgrade::on(&mut request);
    let (mut head, body) = request.into_parts();
    let wants_upgrade = message::wants_upgrade(&head);
    message::to_instance(&mut head, service.name().as_str(), afterwards)?;
    let (upload, state) = Upload::new(body, asked.body_max);
    let mut request = Request::from_parts(head.clone(), upload);
    let mut placements = 1;
    let mut reuse = Reuse::Any;
    loop {
        let (lease, reply) = send(asked, request, &head, &state, reuse).await?;
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
            Ok((response, lease)) => return Ok(respond(response, lease, state)),
            Err(Failure::Refused(_)) if state.is_too_large() => {
                return Err(too_large(service, asked.body_max.unwrap_or_default()));
            }
            Err(Failure::Refused(refusal)) => return Err(refusal),
            Err(Failure::Untouched) if placements < PLACEMENTS_MAX && state.is_replayable() => {
                placements += 1;
                reuse = Reuse::None;
                request = Request::from_parts(head.clone(), state.again());
                // The cause of its death may have killed all ready instances, too.
                let launcher = service.launcher();
                let given_up = tokio::task::spawn_blocking(move || launcher.give_up_ready());
                given_up.await.expect("a launcher does not panic");
            }
            Err(Failure::Unasked) if state.is_replayable() => {
                reuse = Reuse::None;
                request = Request::from_parts(head.clone(), state.again());
            }
            Err(Failure::Untouched) => {
                return Err(died(service, "it ended before it read the request".to_owned()));
            }
            Err(Failure::Unasked) => {
                return Err(bad_response(service, UNASKED));
            }
        }
    }
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
        let client =
            routed_client(shared, socket, (arrival.peer, arrival.local), arrival.accepted_ns);
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
pub(crate) fn own_connection(shared: &NodeState) -> io::Result<(UnixStream, Arc<Client>)> {
    let nobody = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let (ours, socket) = pair()?;
    Ok((ours.into(), routed_client(shared, socket, (nobody, nobody), monotonic_ns())))
}

/// The instance's end of a pair.
pub(super) fn routed_client(
    shared: &NodeState,
    socket: OwnedFd,
    (peer, local): (SocketAddr, SocketAddr),
    accepted_ns: u64,
) -> Arc<Client> {
    Arc::new(Client {
        id: shared.next_connection(),
        socket,
        peer,
        local,
        accepted_ns,
        wants_head_only: false,
        way: Way::Routed,
        admitted: None,
    })
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
    let lease = |upstream| Lease { service: service.clone(), upstream: Some(upstream) };
    if reuse == Reuse::Any
        && let Some(mut upstream) = service.idle_upstream()
    {
        let reply = upstream.send(request);
        return Ok((lease(upstream), reply));
    }
    let broken = |error: io::Error| died(service, format!("the host refused a socket ({error})"));
    let prepared = asked.client.take_prepared();
    if let Some(mut prepared) = prepared.filter(|found| Arc::ptr_eq(&found.service, service))
        && let Some((ours, client, ticket)) = prepared.parts.take()
    {
        let mut line = match Line::new(ours).await {
            Ok(line) => line,
            Err(error) => {
                service.kill(ticket.placed.instance);
                return Err(broken(error));
            }
        };
        let reply = line.send(request);
        return Ok((lease(ticket.upstream(line, client)), reply));
    }
    let (ours, socket) = pair().map_err(broken)?;
    let mut line = Line::new(ours).await.map_err(broken)?;
    let reply = line.send(request);
    line.send_ahead();
    let ends = (asked.client.peer, asked.client.local);
    let client = routed_client(asked.client.gateway.shared(), socket, ends, asked.since_ns);
    let reuse = if state.is_replayable() { reuse } else { Reuse::None };
    match Seat::find(service, &client, reuse).await? {
        Seat::Taken(ticket) => Ok((lease(ticket.upstream(line, client)), reply)),
        Seat::Other(mut upstream) => {
            let reply = upstream.send(Request::from_parts(head.clone(), state.again()));
            Ok((lease(upstream), reply))
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
    let mut news = pin!(tokio::time::sleep(NEWS));
    let upstream = lease.upstream();
    let end: Option<UpstreamEnd> = poll_fn(|context| {
        upstream.drive(context);
        match upstream.end() {
            Some(end) => Poll::Ready(Some(end.clone())),
            None => news.as_mut().poll(context).map(|()| None),
        }
    })
    .await;
    let waited = upstream.waited;
    lease.finish();
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

pub(super) fn bad_response(service: &Service, reason: &str) -> Refusal {
    let reason = format!("the function's answer is not HTTP ({reason})");
    Refusal::BadResponse { function: service.name().to_string(), reason }
}

fn respond(
    response: Response<Incoming>,
    mut lease: Lease,
    upload: UploadState,
) -> Response<AnswerBody> {
    let (mut head, incoming) = response.into_parts();
    if lease.service.is_single_use() || !message::keeps_alive(&head) {
        lease.upstream().is_last();
    }
    message::to_client(&mut head);
    let patience = lease.service.config().limits.timeout.0;
    let body = InstanceBody {
        verdict: Some(Verdict::of_status(head.status.as_u16())),
        incoming,
        lease,
        upload,
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
    lease: Lease,
    /// The rest of the request, which may still be on its way.
    upload: UploadState,
    /// How long the instance may take for a piece of it.
    patience: Duration,
    /// When it was last asked for a piece that was not there.
    begun: Instant,
    alarm: Option<Pin<Box<Sleep>>>,
    /// The instance has failed in the middle.
    failed: Option<io::Error>,
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
        self.failed = Some(error);
        context.waker().wake_by_ref();
    }

    /// Whether nothing has moved in either direction for too long.
    fn is_late(&mut self, context: &mut Context<'_>) -> bool {
        if self.alarm.is_none() {
            self.begun = Instant::now();
        }
        let until = self.begun + self.patience;
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep_until(until)));
        while alarm.as_mut().poll(context).is_ready() {
            let due = self.upload.last_progress().max(self.begun) + self.patience;
            if due <= Instant::now() {
                return true;
            }
            alarm.as_mut().reset(due);
        }
        false
    }
}

impl Body for InstanceBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = &mut *self;
        if let Some(error) = this.failed.take() {
            return Poll::Ready(Some(Err(error)));
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
                Poll::Ready(Some(Ok(frame))) => {
                    this.alarm = None;
                    return Poll::Ready(Some(Ok(frame)));
                }
                Poll::Ready(Some(Err(error))) => {
                    this.verdict = this.verdict.and(Some(Verdict::Failed));
                    this.fail(context, io::Error::other(error));
                    return Poll::Pending;
                }
                Poll::Pending => {}
            }
        }
        if this.is_late(context) {
            match this.upload.waits_for_client() {
                true => this.lease.end_cut_off(),
                false => {
                    this.verdict = this.verdict.and(Some(Verdict::Failed));
                    this.lease.end_late("piece of the answer");
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
