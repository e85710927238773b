//! Sending batches to a collector: OTLP over HTTP, binary protobuf ("OTLP Specification 1.9",
//! "OTLP/HTTP").

use super::request::Boots;
use super::span::message;
use super::{Record, Tracer};
use crate::boots::RecentBoots;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HOST, RETRY_AFTER};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prost::Message;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

/// Most tries for a batch.
const TRIES_MAX: u32 = 4;
/// The wait after the first try; it doubles each time.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest wait, also if the collector asks for more.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Most bytes of an answer that are read.
const ANSWER_MAX: usize = 64 << 10;
/// How long a try may take when the daemon ends.
const SHORT: Duration = Duration::from_secs(1);

/// How long it is tried to send a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// As the settings say, and again.
    Usual,
    /// Once: the daemon ends.
    Short,
}

/// Whether the collector has taken the last batch: the log hears of changes only.
#[derive(Debug, Default)]
pub(super) struct Health {
    is_failing: bool,
}

/// Why a batch was not taken.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// It may be next time, after this wait if the collector has said so.
    Again(String, Option<Duration>),
    /// It would not be next time.
    Final(String),
}

impl Tracer {
    /// Sends records; whether the collector has them.
    pub(super) async fn send(
        &self,
        batch: Vec<Record>,
        boots: &RecentBoots,
        patience: Patience,
        health: &mut Health,
    ) -> bool {
        if batch.is_empty() {
            return true;
        }
        let boots = Boots::of(&batch, boots);
        let spans: Vec<_> =
            batch.into_iter().flat_map(|record| record.into_spans(&boots)).collect();
        let count = spans.len() as u64;
        let body = message(&self.settings.resource, spans.into_iter()).encode_to_vec();
        match self.deliver(Bytes::from(body), patience).await {
            Ok(rejected) => {
                let rejected = rejected.min(count);
                self.counters.sent.inc_by(count - rejected);
                self.counters.rejected.inc_by(rejected);
                if std::mem::take(&mut health.is_failing) {
                    tracing::info!("the collector of traces takes spans again");
                }
                true
            }
            Err(reason) => {
                self.counters.failed.inc_by(count);
                if !std::mem::replace(&mut health.is_failing, true) {
                    let address = self.settings.address;
                    tracing::warn!(
                        "the collector of traces at {address} takes no spans: {reason}; requests go on"
                    );
                }
                false
            }
        }
    }

    /// Sends a batch, again if that may help; how many spans of it were rejected.
    async fn deliver(&self, body: Bytes, patience: Patience) -> Result<u64, String> {
        let limit = match patience {
            Patience::Usual => self.settings.timeout,
            Patience::Short => self.settings.timeout.min(SHORT),
        };
        let mut pause = PAUSE;
        let mut tries = 0;
        loop {
            tries += 1;
            let tried = timeout(limit, self.post(body.clone())).await;
            let failure = tried.unwrap_or_else(|_| {
                let why = format!("no answer within {} ms", limit.as_millis());
                Err(Failure::Again(why, None))
            });
            match failure {
                Ok(rejected) => return Ok(rejected),
                Err(Failure::Final(reason)) => return Err(reason),
                Err(Failure::Again(reason, _))
                    if tries == TRIES_MAX || patience == Patience::Short =>
                {
                    return Err(reason);
                }
                Err(Failure::Again(_, asked)) => sleep(asked.unwrap_or(pause).min(PAUSE_MAX)).await,
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// One request on a connection of its own.
    async fn post(&self, body: Bytes) -> Result<u64, Failure> {
        let again = |error: &dyn std::fmt::Display| Failure::Again(error.to_string(), None);
        let settings = &self.settings;
        let mut request = Request::post(&*settings.path)
            .header(HOST, &*settings.authority)
            .header(CONTENT_TYPE, "application/x-protobuf")
            .body(Full::new(body))
            .map_err(|error| Failure::Final(error.to_string()))?;
        for (name, value) in &settings.headers {
            request.headers_mut().append(name.clone(), value.clone());
        }
        let stream = TcpStream::connect(settings.address).await.map_err(|error| again(&error))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| again(&e))?;
        let exchange = async {
            let answer = sender.send_request(request).await.map_err(|error| again(&error))?;
            let (head, body) = answer.into_parts();
            let read = Limited::new(body, ANSWER_MAX).collect().await.map_err(|e| again(&e))?;
            let asked = head.headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok());
            let asked = asked.and_then(|value| value.trim().parse().ok()).map(Duration::from_secs);
            judge(head.status, asked, &read.to_bytes())
        };
        tokio::pin!(exchange, connection);
        tokio::select! {
            judged = &mut exchange => judged,
            ended = &mut connection => {
                ended.map_err(|error| again(&error))?;
                // The answer may have come with the end.
                exchange.await
            }
        }
    }
}

/// How many spans were rejected; or whether it makes sense to try again ("Failures").
pub(super) fn judge(
    status: StatusCode,
    asked: Option<Duration>,
    body: &[u8],
) -> Result<u64, Failure> {
    match status.as_u16() {
        200..300 => {
            // An answer that is none says nothing of rejected spans.
            let answer = ExportTraceServiceResponse::decode(body).unwrap_or_default();
            let rejected = answer.partial_success.map_or(0, |partial| partial.rejected_spans);
            Ok(u64::try_from(rejected).unwrap_or(0))
        }
        429 | 502 | 503 | 504 => Err(Failure::Again(format!("it answers {status}"), asked)),
        _ => Err(Failure::Final(format!("it answers {status}"))),
    }
}
