//! What the node counts of requests. The labels are functions, which the operator makes, and
//! known status codes: clients make up neither.

use hyper::StatusCode;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use std::time::Duration;
use thaw_home::config::FunctionName;

/// Upper bounds of the buckets of times in seconds, four to each power of ten. They are
/// written out: computed ones are not round, and nobody finds `0.00009999999999999999`.
#[rustfmt::skip]
pub(super) const BUCKETS: [f64; 25] = [
    0.00001, 0.000018, 0.000032, 0.000056,
    0.0001,  0.00018,  0.00032,  0.00056,
    0.001,   0.0018,   0.0032,   0.0056,
    0.01,    0.018,    0.032,    0.056,
    0.1,     0.18,     0.32,     0.56,
    1.0,     1.8,      3.2,      5.6,
    10.0,
];

/// Counters of requests.
#[derive(Debug)]
pub(super) struct RequestMetrics {
    responses: Family<ResponseLabels, Counter>,
    durations: Family<FunctionLabels, Histogram>,
    queued: Family<FunctionLabels, Histogram>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ResponseLabels {
    function: String,
    code: Code,
}

/// The code of a response, or the class of one that has no name: a function can make up
/// hundreds.
type Code = String;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FunctionLabels {
    function: String,
}

impl RequestMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let histogram = (|| Histogram::new(BUCKETS)) as fn() -> Histogram;
        let responses = Family::default();
        let durations = Family::new_with_constructor(histogram);
        let queued = Family::new_with_constructor(histogram);
        registry.register(
            "responses",
            "Responses to requests that were routed, by their status code",
            responses.clone(),
        );
        registry.register_with_unit(
            "request_duration",
            "Time from the arrival of a routed request to the end of its response",
            Unit::Seconds,
            durations.clone(),
        );
        registry.register_with_unit(
            "request_queue",
            "Time from the arrival of a request, or a connection that was handed over, until an instance had it",
            Unit::Seconds,
            queued.clone(),
        );
        Self { responses, durations, queued }
    }

    pub fn responded(&self, function: Option<&FunctionName>, status: u16, duration: Duration) {
        // Names that clients make up do not become labels.
        let function = function.map(ToString::to_string).unwrap_or_default();
        let labels = ResponseLabels { function: function.clone(), code: code(status) };
        self.responses.get_or_create(&labels).inc();
        let labels = FunctionLabels { function };
        self.durations.get_or_create(&labels).observe(duration.as_secs_f64());
    }

    pub fn placed(&self, function: &FunctionName, waited: Duration) {
        let labels = FunctionLabels { function: function.to_string() };
        self.queued.get_or_create(&labels).observe(waited.as_secs_f64());
    }
}

fn code(status: u16) -> Code {
    let is_known = StatusCode::from_u16(status).is_ok_and(|code| code.canonical_reason().is_some());
    match is_known {
        true => status.to_string(),
        false => format!("{}xx", status / 100),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Metrics;
    use super::*;

    #[test]
    fn buckets_are_round_and_rise() {
        assert!(BUCKETS.is_sorted_by(|a, b| a < b));
        let metrics = Metrics::default();
        let name: FunctionName = "f".parse().unwrap();
        metrics.responded(Some(&name), 200, Duration::from_micros(70));
        metrics.placed(&name, Duration::from_micros(5));
        let text = metrics.text(&[], 0);
        for line in [
            "thaw_responses_total{function=\"f\",code=\"200\"} 1",
            "thaw_request_duration_seconds_bucket{le=\"0.000056\",function=\"f\"} 0",
            "thaw_request_duration_seconds_bucket{le=\"0.0001\",function=\"f\"} 1",
            "thaw_request_queue_seconds_count{function=\"f\"} 1",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        let long = |line: &&str| line.contains("le=\"") && line.contains("99999");
        assert_eq!(text.lines().find(long), None);
    }

    #[test]
    fn made_up_codes_are_one_for_each_class() {
        let metrics = Metrics::default();
        let name: FunctionName = "f".parse().unwrap();
        for status in 100..1000 {
            metrics.responded(Some(&name), status, Duration::ZERO);
        }
        let text = metrics.text(&[], 0);
        let series = text.lines().filter(|line| line.starts_with("thaw_responses_total{")).count();
        assert!(series < 80, "{series}");
        assert!(text.contains("thaw_responses_total{function=\"f\",code=\"9xx\"} 100"), "{text}");
    }
}
