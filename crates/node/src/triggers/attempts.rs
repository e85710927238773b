//! Attempts: a request from the queue to its function, by way of the gateway.

use super::Triggers;
use super::cloudevents;
use super::destinations::Called;
use super::record::{InvocationId, Job, Origin, Outcome, Terms};
use super::retry::judge;
use crate::edge::Addresses;
use crate::service::Services;
use crate::traces::Consuming;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{HOST, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use thaw_home::clock::wall_ms;
use thaw_http::head::{ATTEMPT_HEADER, INVOCATION_HEADER};
use thaw_http::message::ERROR;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

/// Most attempts of a node at a time.
const ATTEMPTS_MAX: usize = 64;
/// How long the longest wait of this task is: the clock may jump.
const LOOK: Duration = Duration::from_secs(2);
/// Bytes of a refusal that are read.
const REFUSAL_MAX: usize = 16 << 10;

/// Attempts what is due, until the task is dropped.
pub(super) async fn attempt_all(triggers: Arc<Triggers>, instances: usize) {
    let places = Arc::new(Semaphore::new((instances / 4).clamp(1, ATTEMPTS_MAX)));
    loop {
        let woken = triggers.wake.notified();
        let wait = match triggers.services.shared().is_draining() {
            true => LOOK,
            false => begin(&triggers, &places).await,
        };
        tokio::select! {
            () = woken => {}
            () = sleep(wait) => {}
        }
    }
}

/// Begins what is due and has room; how long nothing more will be.
async fn begin(triggers: &Arc<Triggers>, places: &Arc<Semaphore>) -> Duration {
    let (now, most) = (wall_ms(), places.available_permits());
    let (known, terms) = (triggers.services.clone(), triggers.services.clone());
    let taken = triggers.writer.ask(move |ledger| {
        ledger.expire(now, |name| {
            terms_of(&terms, name).map(|terms| terms.config).unwrap_or_default()
        });
        let taken =
            ledger.take(now, most, |name, running| room(&known, name).saturating_sub(running));
        (taken, ledger.call_destinations(now, |name| terms_of(&terms, name)))
    });
    // The log has it.
    let Ok((Ok(taken), called)) = taken.await else { return LOOK };
    note_called(triggers, &called);
    for job in taken.jobs {
        let place = places.clone().acquire_owned().await;
        let triggers = triggers.clone();
        tokio::spawn(async move {
            let _place = place;
            attempt(&triggers, job).await;
        });
    }
    let wait = taken.next_due_ms.map(|due| Duration::from_millis(due.saturating_sub(wall_ms())));
    wait.unwrap_or(LOOK).clamp(Duration::from_millis(10), LOOK)
}

/// Attempts of a function at a time: half of its places at most, so that clients who wait have
/// the others.
fn room(services: &Services, function: &str) -> usize {
    let Some(service) = services.route(function) else { return 0 };
    let config = service.config();
    let limits = &config.limits;
    let places = limits.instances.get() as usize * limits.concurrency.get() as usize;
    (places / 2).clamp(1, config.queue_terms().concurrency.get() as usize)
}

/// What holds for the invocations of a function that is served.
pub(super) fn terms_of(services: &Services, function: &str) -> Option<Terms> {
    let service = services.route(function)?;
    let config = service.config();
    Some(Terms {
        config: config.queue_terms(),
        domain: config.sharing.domain.as_ref().map(|domain| domain.name().to_string()),
        tenant_bytes: service.tenant().quota().queue,
    })
}

async fn attempt(triggers: &Triggers, job: Job) {
    let (id, function) = (job.id, job.record.function.clone());
    let (services, mut consuming) = (&triggers.services, None);
    // Its function may be gone by now.
    let patience =
        terms_of(services, &function).map(|terms| terms.config).unwrap_or_default().timeout.0;
    let outcome = match timeout(patience, call(triggers, job, &mut consuming)).await {
        Ok(outcome) => outcome,
        Err(_) => Outcome::Failed {
            reason: format!("it was not over after {} s (`async.timeout`)", patience.as_secs_f64()),
            retry_after_ms: None,
        },
    };
    let outcome = harmless(outcome);
    let name = match &outcome {
        Outcome::Done(_) => "done",
        Outcome::Failed { .. } => "failed",
        Outcome::Refused(_) => "refused",
        Outcome::Deferred(_) => "deferred",
    };
    services.shared().metrics().triggers().attempted(&function, name);
    if let Some(consuming) = consuming {
        consuming.finish(id, name);
    }
    tracing::debug!(function, invocation = %id, "an attempt is over: {outcome:?}");
    settle(triggers, id, &function, outcome).await;
    triggers.wake.notify_one();
}

/// Writes down what came of an attempt. If that cannot be done now, it is tried until it can:
/// otherwise the invocation would stay one that runs.
async fn settle(triggers: &Triggers, id: InvocationId, function: &str, outcome: Outcome) {
    let fallback = || Terms { config: Default::default(), domain: None, tenant_bytes: None };
    loop {
        let terms = terms_of(&triggers.services, function).unwrap_or_else(fallback);
        let (outcome, known) = (outcome.clone(), triggers.services.clone());
        let finished = triggers.writer.ask(move |ledger| {
            let now = wall_ms();
            ledger.finish(id, outcome, &terms, now);
            ledger.call_destinations(now, |name| terms_of(&known, name))
        });
        match finished.await {
            Ok(called) => return note_called(triggers, &called),
            Err(_) => sleep(LOOK).await,
        }
    }
}

fn note_called(triggers: &Triggers, called: &[Called]) {
    for Called { function, is_queued } in called {
        let outcome = if *is_queued { "queued" } else { "refused" };
        triggers.services.shared().metrics().triggers().queued(function, outcome);
    }
}

/// Sends the request and waits for the end of the answer.
async fn call(triggers: &Triggers, job: Job, consuming: &mut Option<Consuming>) -> Outcome {
    let shared = triggers.services.shared();
    let failed = |reason: String| Outcome::Failed { reason, retry_after_ms: None };
    let (function, attempt) = (job.record.function.clone(), job.record.attempts + 1);
    let Some(mut request) = request_of(job) else {
        return Outcome::Refused("its request cannot be sent".to_owned());
    };
    let about = (&*function, attempt);
    *consuming = Some(Consuming::begin(shared.tracer(), request.headers_mut(), about));
    let connected = async {
        let stream = TcpStream::connect(triggers.gateway).await?;
        stream.set_nodelay(true)?;
        let (client, gateway) = (stream.local_addr()?, stream.peer_addr()?);
        std::io::Result::Ok((stream, Addresses { client, gateway }))
    };
    let (stream, addresses) = match connected.await {
        Ok(connected) => connected,
        Err(error) => return Outcome::Deferred(format!("the gateway was not reached ({error})")),
    };
    // Its client was let in when it was queued.
    let _trusted = shared.edge().operators().trust(addresses);
    let (mut sender, connection) =
        match hyper::client::conn::http1::handshake(TokioIo::new(stream)).await {
            Ok(connected) => connected,
            Err(error) => return failed(format!("no answer ({error})")),
        };
    let driven = Driven(tokio::spawn(async move { drop(connection.await) }));
    let answer = match sender.send_request(request).await {
        Ok(answer) => answer,
        Err(error) => return failed(format!("no answer ({error})")),
    };
    let outcome = read(answer).await;
    drop(driven);
    outcome
}

/// A task that ends with this.
struct Driven(tokio::task::JoinHandle<()>);

impl Drop for Driven {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Takes out of what is logged and shown all that a terminal would act on.
fn harmless(outcome: Outcome) -> Outcome {
    let escape = |text: String| thaw_sandbox::escape(text.as_bytes());
    match outcome {
        Outcome::Done(status) => Outcome::Done(status),
        Outcome::Failed { reason, retry_after_ms } => {
            Outcome::Failed { reason: escape(reason), retry_after_ms }
        }
        Outcome::Refused(reason) => Outcome::Refused(escape(reason)),
        Outcome::Deferred(reason) => Outcome::Deferred(escape(reason)),
    }
}

/// What an answer says; its body is read to the end and forgotten.
async fn read(answer: Response<Incoming>) -> Outcome {
    let (head, mut body) = answer.into_parts();
    let is_refusal = head.headers.contains_key(ERROR);
    let mut kept = Vec::new();
    while let Some(frame) = body.frame().await {
        match frame.map(|frame| frame.into_data()) {
            Ok(Ok(data)) if is_refusal && kept.len() + data.len() <= REFUSAL_MAX => {
                kept.extend_from_slice(&data);
            }
            Ok(_) => {}
            Err(error) => {
                let reason = format!("the answer ended early ({error})");
                return Outcome::Failed { reason, retry_after_ms: None };
            }
        }
    }
    let refusal: Option<Value> = serde_json::from_slice(&kept).ok();
    let error = refusal.as_ref().and_then(|refusal| refusal["error"].as_str());
    judge(head.status.as_u16(), error, retry_after_ms(&head.headers))
}

/// `Retry-After` in seconds (RFC 9110 §10.2.3); dates are not heeded.
fn retry_after_ms(headers: &HeaderMap) -> Option<u64> {
    let seconds: u64 = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(seconds.saturating_mul(1000))
}

fn request_of(job: Job) -> Option<Request<Full<Bytes>>> {
    let queued = job.request;
    let mut request = Request::builder()
        .method(queued.method.as_str())
        .uri(&queued.path)
        .header(HOST, &*job.record.function);
    let headers = request.headers_mut()?;
    for (name, value) in &queued.headers {
        let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
        if is_carried(&name) {
            headers.append(name, HeaderValue::from_str(value).ok()?);
        }
    }
    headers.insert(INVOCATION_HEADER, HeaderValue::from_str(&job.id.to_string()).ok()?);
    headers.insert(ATTEMPT_HEADER, HeaderValue::from(job.record.attempts + 1));
    if !cloudevents::is_binary(headers)
        && !matches!(job.record.origin, Origin::Schedule(_) | Origin::Function(_))
    {
        let source = format!("/functions/{}/queue", job.record.function);
        let about = ("thaw.invocation", &*source, &*job.id.to_string());
        cloudevents::describe(headers, about, job.record.created_ms);
    }
    // The only copy: bodies are large.
    request.body(Full::new(Bytes::from(queued.body))).ok()
}

/// Whether a field of a request is part of it, not of the connection on which it came, nor an
/// answer to how it is to be done.
pub(super) fn is_carried(name: &HeaderName) -> bool {
    ![
        "host",
        "connection",
        "keep-alive",
        "proxy-connection",
        "transfer-encoding",
        "content-length",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "prefer",
        INVOCATION_HEADER,
        ATTEMPT_HEADER,
    ]
    .contains(&name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_forge_no_lines_of_the_log() {
        let text = || "x\n2026-11-23 INFO forged\u{1b}[2J".to_owned();
        for outcome in [
            Outcome::Failed { reason: text(), retry_after_ms: None },
            Outcome::Refused(text()),
            Outcome::Deferred(text()),
        ] {
            let (Outcome::Failed { reason, .. }
            | Outcome::Refused(reason)
            | Outcome::Deferred(reason)) = harmless(outcome)
            else {
                panic!("it has a reason")
            };
            assert!(!reason.contains(['\n', '\u{1b}']) && reason.contains("forged"), "{reason}");
        }
    }
}
