//! What becomes of spans.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Spans that the collector has or has not.
#[derive(Clone, Debug)]
pub(crate) struct TraceCounters {
    /// It has taken them.
    pub sent: Counter,
    /// The queue was full.
    pub dropped: Counter,
    /// It was not reached, or refused the batch.
    pub failed: Counter,
    /// It has taken the batch without them.
    pub rejected: Counter,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

impl TraceCounters {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let spans = Family::<OutcomeLabels, Counter>::default();
        registry.register("trace_spans", "Spans for the collector of traces", spans.clone());
        let of = |outcome| spans.get_or_create(&OutcomeLabels { outcome }).clone();
        Self {
            sent: of("sent"),
            dropped: of("dropped"),
            failed: of("failed"),
            rejected: of("rejected"),
        }
    }
}
