//! What is counted of pulls that the daemon has begun, and of functions of which only a part is here.

use crate::far::PartCounters;
use crate::pulls::PullState;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

/// Counters and gauges of pulls.
#[derive(Debug)]
pub struct PullMetrics {
    fetchers: Family<OutcomeLabels, Counter>,
    failed_fetches: Counter,
    parts: PartCounters,
    moved: Counter,
    present: Family<StateLabels, Gauge>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

impl PullMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            fetchers: Family::default(),
            failed_fetches: Counter::default(),
            parts: PartCounters::default(),
            moved: Counter::default(),
            present: Family::default(),
        };
        registry.register(
            "pull_fetchers",
            "Fetchers of the daemon that have ended",
            metrics.fetchers.clone(),
        );
        registry.register(
            "pull_fetches_failed",
            "Fetches of pieces that have failed after all attempts, by fetchers of the daemon",
            metrics.failed_fetches.clone(),
        );
        registry.register(
            "partial_parts_failed",
            "Missing parts that sandboxes have waited for in vain",
            metrics.parts.failed.clone(),
        );
        registry.register(
            "partial_parts_waiting",
            "Sandboxes that wait for a part that is missing",
            metrics.parts.waiting.clone(),
        );
        registry.register_with_unit(
            "pull_moved",
            "Size of pieces that fetchers of the daemon have moved",
            Unit::Bytes,
            metrics.moved.clone(),
        );
        registry.register(
            "pulls",
            "Pulls that wait, that a fetcher of the daemon is at, or that a command is at",
            metrics.present.clone(),
        );
        metrics
    }

    /// A fetcher has ended: `done`, `failed`, `turn_over` or `refused`.
    pub fn ended(&self, outcome: &'static str) {
        self.fetchers.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    /// So many fetches of pieces have failed.
    pub fn failed_fetches(&self, count: u64) {
        self.failed_fetches.inc_by(count);
    }

    /// So many bytes were moved.
    pub fn moved(&self, bytes: u64) {
        self.moved.inc_by(bytes);
    }

    /// Counts those who wait for parts.
    pub(crate) fn parts(&self) -> PartCounters {
        self.parts.clone()
    }

    /// Sets how many pulls are in each state.
    pub fn show(&self, counts: &[(PullState, usize)]) {
        for (state, count) in counts {
            let state = match state {
                PullState::Waiting => "waiting",
                PullState::Fetching => "fetching",
                PullState::Command => "command",
                PullState::Done | PullState::Failed | PullState::Cancelled => continue,
            };
            self.present.get_or_create(&StateLabels { state }).set(*count as i64);
        }
    }
}
