//! A span, and its form in OTLP.

use crate::edge::{RequestId, beginning};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{
    AnyValue, InstrumentationScope, KeyValue, any_value::Value as AnyKind,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{
    ResourceSpans, ScopeSpans, Span as OtlpSpan, Status, span::Link, span::SpanKind,
    status::StatusCode,
};
use std::time::{SystemTime, UNIX_EPOCH};

/// Most bytes of a value: clients choose many of them.
const VALUE_MAX: usize = 256;

/// What a span is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A request that somebody has made.
    Server,
    /// A step within another one.
    Internal,
    /// The making of a message.
    Producer,
    /// What a message has led to.
    Consumer,
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A text.
    Text(String),
    /// A number.
    Number(i64),
    /// Whether something holds.
    Truth(bool),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(beginning(text, VALUE_MAX).to_owned())
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Number(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<bool> for Value {
    fn from(truth: bool) -> Self {
        Self::Truth(truth)
    }
}

/// A step of a trace that is over. Times are nanoseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its place in the trace.
    pub id: RequestId,
    /// What is done.
    pub name: String,
    /// What it is of.
    pub kind: Kind,
    /// When it began.
    pub start_ns: u64,
    /// When it was over.
    pub end_ns: u64,
    /// What else is known of it.
    pub attributes: Vec<(&'static str, Value)>,
    /// A span of which it is a consequence.
    pub link: Option<RequestId>,
    /// It has failed, and how.
    pub error: Option<String>,
}

/// A time of the wall clock.
pub fn unix_ns(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

impl Span {
    /// One that has begun, and is not over yet.
    pub fn begun(id: RequestId, kind: Kind, name: String, start_ns: u64) -> Self {
        let (end_ns, attributes) = (start_ns, Vec::new());
        Self { id, name, kind, start_ns, end_ns, attributes, link: None, error: None }
    }

    /// A step within a span.
    pub fn child(of: RequestId, name: &str, (start_ns, end_ns): (u64, u64)) -> Self {
        let begun = Self::begun(of.child(), Kind::Internal, name.to_owned(), start_ns);
        Self { end_ns: end_ns.max(start_ns), ..begun }
    }

    /// Adds an attribute; an empty text is none.
    pub fn set(&mut self, name: &'static str, value: impl Into<Value>) {
        let value = value.into();
        if value != Value::Text(String::new()) {
            self.attributes.push((name, value));
        }
    }

    fn into_otlp(self) -> OtlpSpan {
        let kind = match self.kind {
            Kind::Server => SpanKind::Server,
            Kind::Internal => SpanKind::Internal,
            Kind::Producer => SpanKind::Producer,
            Kind::Consumer => SpanKind::Consumer,
        };
        let link = |id: RequestId| Link {
            trace_id: id.trace_number().to_be_bytes().to_vec(),
            span_id: id.span().to_be_bytes().to_vec(),
            flags: 1,
            ..Link::default()
        };
        let failed = |message| Status { message, code: StatusCode::Error as i32 };
        OtlpSpan {
            trace_id: self.id.trace_number().to_be_bytes().to_vec(),
            span_id: self.id.span().to_be_bytes().to_vec(),
            parent_span_id: self.id.parent().map_or(Vec::new(), |id| id.to_be_bytes().to_vec()),
            flags: 1,
            name: self.name,
            kind: kind as i32,
            start_time_unix_nano: self.start_ns,
            end_time_unix_nano: self.end_ns,
            attributes: self.attributes.into_iter().map(|(key, value)| pair(key, value)).collect(),
            links: self.link.map(link).into_iter().collect(),
            status: self.error.map(failed),
            ..OtlpSpan::default()
        }
    }
}

fn pair(key: &str, value: Value) -> KeyValue {
    let value = match value {
        Value::Text(text) => AnyKind::StringValue(text),
        Value::Number(number) => AnyKind::IntValue(number),
        Value::Truth(truth) => AnyKind::BoolValue(truth),
    };
    let value = Some(AnyValue { value: Some(value) });
    KeyValue { key: key.to_owned(), value, ..KeyValue::default() }
}

/// A batch, as it is sent.
pub(super) fn message(
    resource: &[(String, String)],
    spans: impl Iterator<Item = Span>,
) -> ExportTraceServiceRequest {
    let attribute = |(key, value): &(String, String)| pair(key, Value::Text(value.clone()));
    let scope = InstrumentationScope {
        name: "thaw".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    };
    let spans = spans.map(Span::into_otlp).collect();
    let of_scope = ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() };
    let resource =
        Resource { attributes: resource.iter().map(attribute).collect(), ..Resource::default() };
    let of_resource = ResourceSpans {
        resource: Some(resource),
        scope_spans: vec![of_scope],
        ..ResourceSpans::default()
    };
    ExportTraceServiceRequest { resource_spans: vec![of_resource] }
}
