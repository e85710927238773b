//! Traces for OpenTelemetry: what a request went through, as spans that a collector gets by OTLP
//! over HTTP ([decisions/0049](../../../docs/decisions/0049-traces.md)). Off unless asked for.
//!
//! | module | what it is |
//! | --- | --- |
//! | `settings` | the collector and the standard variables `OTEL_*` |
//! | `sampler` | which traces are recorded |
//! | `span` | a span, and its form in OTLP |
//! | `messages` | what queues and schedules produce, and their attempts |
//! | `request` | the spans of a request: queue, boot with its phases, execution |
//! | `export` | sending batches |
//!
//! Whoever records puts a finished record into a queue with a bound and goes on. A task sends batches. If
//! the collector is slow or gone, records are dropped and counted.

mod export;
mod messages;
mod request;
mod sampler;
mod settings;
mod span;
#[cfg(test)]
mod tests;

pub(crate) use messages::{Consuming, Producing};
pub use request::known;
pub(crate) use request::{Came, RequestTrace, Seen};
pub use settings::{Resolve, TraceSettings};
pub use span::{Kind, Span, Value, unix_ns};

use crate::boots::RecentBoots;
use crate::edge::RequestId;
use crate::metrics::TraceCounters;
use hyper::header::HeaderMap;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

/// What is finished.
pub(crate) enum Record {
    /// A request of the gateway.
    Request(Box<Seen>),
    /// Anything else.
    Span(Box<Span>),
}

impl Record {
    /// Spans that are known of it already.
    fn spans(&self) -> u64 {
        match self {
            Self::Request(seen) => seen.spans_at_least(),
            Self::Span(_) => 1,
        }
    }

    /// Its spans, where `boots` are looked up for requests.
    fn into_spans(self, boots: &request::Boots) -> Vec<Span> {
        match self {
            Self::Request(seen) => seen.spans(boots),
            Self::Span(span) => vec![*span],
        }
    }
}

/// Records traces, and sends them.
pub struct Tracer {
    settings: TraceSettings,
    queue: Mutex<VecDeque<Record>>,
    /// A batch is there.
    full: Notify,
    counters: TraceCounters,
}

impl Tracer {
    /// With these settings; what becomes of spans is counted there.
    pub(crate) fn new(settings: TraceSettings, counters: TraceCounters) -> Arc<Self> {
        let queue = Mutex::new(VecDeque::new());
        Arc::new(Self { settings, queue, full: Notify::new(), counters })
    }

    /// The name of a request with these headers, and whether its spans are recorded.
    pub fn begin(&self, headers: &HeaderMap) -> RequestId {
        self.decide(RequestId::of(headers))
    }

    /// The name of what begins a trace.
    pub(crate) fn begin_trace(&self) -> RequestId {
        self.decide(RequestId::new())
    }

    fn decide(&self, id: RequestId) -> RequestId {
        let parent = id.parent().map(|_| id.is_sampled());
        id.sampled(self.settings.sampler.records(id.trace_number(), parent))
    }

    /// Takes a record, unless the queue is full. Never waits for the collector.
    pub(crate) fn record(&self, record: Record) {
        let mut queue = self.queue.lock().expect("no holder panics");
        if queue.len() >= self.settings.queue_max {
            drop(queue);
            self.counters.dropped.inc_by(record.spans());
            return;
        }
        queue.push_back(record);
        let is_full = queue.len() >= self.settings.batch_max;
        drop(queue);
        if is_full {
            self.full.notify_one();
        }
    }

    /// The same for a span that belongs to no request of the gateway.
    pub fn record_span(&self, span: Span) {
        self.record(Record::Span(Box::new(span)));
    }

    /// The oldest records, as many as a batch has.
    fn take(&self) -> Vec<Record> {
        let mut queue = self.queue.lock().expect("no holder panics");
        let count = queue.len().min(self.settings.batch_max);
        queue.drain(..count).collect()
    }

    /// Sends what is recorded, with the boots among these, until the task is dropped.
    pub async fn send_all(self: Arc<Self>, boots: Arc<RecentBoots>) {
        let mut health = export::Health::default();
        loop {
            let _ = tokio::time::timeout(self.settings.delay, self.full.notified()).await;
            loop {
                let batch = self.take();
                let is_last = batch.len() < self.settings.batch_max;
                self.send(batch, &boots, export::Patience::Usual, &mut health).await;
                if is_last {
                    break;
                }
            }
        }
    }

    /// Sends what is left before the daemon ends: one try for each batch, as long as they succeed.
    pub async fn finish(&self, boots: &RecentBoots) {
        let mut health = export::Health::default();
        loop {
            let batch = self.take();
            if batch.is_empty()
                || !self.send(batch, boots, export::Patience::Short, &mut health).await
            {
                return;
            }
        }
    }
}

impl std::fmt::Debug for Tracer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tracer").field("settings", &self.settings).finish_non_exhaustive()
    }
}
