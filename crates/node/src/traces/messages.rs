//! Spans of invocations in the queue (semantic conventions of messaging): one of who has queued
//! it, and one of each attempt, which names the first by `traceparent`.

use super::span::{Kind, Span, unix_ns};
use super::{Record, Tracer};
use crate::edge::RequestId;
use hyper::header::HeaderMap;
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

/// A step of an invocation that is under way.
struct Step {
    tracer: Arc<Tracer>,
    span: Span,
    began: Instant,
}

impl Step {
    /// `None`: it is not recorded.
    fn begin(tracer: &Arc<Tracer>, id: RequestId, function: &str, kind: Kind) -> Option<Self> {
        if !id.is_sampled() {
            return None;
        }
        let verb = if kind == Kind::Producer { "send" } else { "process" };
        let now = unix_ns(SystemTime::now());
        let mut span = Span::begun(id, kind, format!("{verb} {function}"), now);
        span.set("messaging.system", "thaw");
        span.set("messaging.operation.type", verb);
        span.set("messaging.destination.name", function);
        Some(Self { tracer: tracer.clone(), span, began: Instant::now() })
    }

    fn finish(mut self, invocation: impl Display) {
        let took = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.span.end_ns = self.span.start_ns.saturating_add(took);
        self.span.set("messaging.message.id", &*invocation.to_string());
        self.tracer.record(Record::Span(Box::new(self.span)));
    }
}

/// Something is being queued.
pub(crate) struct Producing {
    id: RequestId,
    step: Option<Step>,
}

impl Producing {
    /// As a part of the request `of`.
    pub fn begin(tracer: Option<&Arc<Tracer>>, of: RequestId, function: &str) -> Self {
        let id = of.child();
        let step = tracer.and_then(|tracer| Step::begin(tracer, id, function, Kind::Producer));
        // A span that nobody has is nobody's parent.
        Self { id: if step.is_some() { id } else { of }, step }
    }

    /// By a schedule: a trace of its own.
    pub fn begin_trace(tracer: &Arc<Tracer>, function: &str) -> Self {
        let id = tracer.begin_trace();
        Self { id, step: Step::begin(tracer, id, function, Kind::Producer) }
    }

    /// What the request that is queued says in `traceparent`.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// It is queued.
    pub fn finish(self, invocation: impl Display) {
        if let Some(step) = self.step {
            step.finish(invocation);
        }
    }
}

/// An attempt.
pub(crate) struct Consuming(Option<Step>);

impl Consuming {
    /// Of a request from the queue, which says from now on that it belongs to the attempt.
    pub fn begin(
        tracer: Option<&Arc<Tracer>>,
        headers: &mut HeaderMap,
        (function, attempt): (&str, u32),
    ) -> Self {
        let Some(tracer) = tracer else { return Self(None) };
        let id = tracer.begin(headers);
        id.write(headers);
        let mut step = Step::begin(tracer, id, function, Kind::Consumer);
        if let Some(step) = &mut step {
            step.span.set("thaw.attempt", u64::from(attempt));
            step.span.link = id.of_parent();
        }
        Self(step)
    }

    /// It is over: `done`, or why not.
    pub fn finish(self, invocation: impl Display, outcome: &'static str) {
        let Some(mut step) = self.0 else { return };
        step.span.set("thaw.outcome", outcome);
        if outcome != "done" {
            step.span.set("error.type", outcome);
            step.span.error = Some(outcome.to_owned());
        }
        step.finish(invocation);
    }
}
