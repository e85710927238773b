//! What is counted of triggers.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use serde::{Deserialize, Serialize};

/// A queue in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct QueueInfo {
    /// The function.
    pub function: String,
    /// Invocations that wait.
    pub queued: u64,
    /// Those that are attempted now.
    pub running: u64,
    /// Dead letters.
    pub dead: u64,
    /// Bytes of all but the dead letters.
    pub bytes: u64,
    /// Bytes of the dead letters.
    pub dead_bytes: u64,
    /// When the oldest one that is not dead was queued, in milliseconds since 1970.
    pub oldest_ms: Option<u64>,
}

/// Counters and gauges of queues and schedules.
#[derive(Debug)]
pub struct TriggerMetrics {
    invocations: Family<OutcomeLabels, Counter>,
    attempts: Family<OutcomeLabels, Counter>,
    schedules: Family<ScheduleLabels, Counter>,
    depth: Family<StateLabels, Gauge>,
    bytes: Family<FunctionLabels, Gauge>,
    oldest: Family<FunctionLabels, Gauge>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OutcomeLabels {
    function: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ScheduleLabels {
    function: String,
    schedule: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StateLabels {
    function: String,
    state: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FunctionLabels {
    function: String,
}

impl TriggerMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            invocations: Family::default(),
            attempts: Family::default(),
            schedules: Family::default(),
            depth: Family::default(),
            bytes: Family::default(),
            oldest: Family::default(),
        };
        registry.register(
            "queue_invocations",
            "Asynchronous invocations that were asked for",
            metrics.invocations.clone(),
        );
        registry.register(
            "queue_attempts",
            "Attempts of invocations in the queue",
            metrics.attempts.clone(),
        );
        registry.register(
            "schedule_times",
            "Times of schedules that have come",
            metrics.schedules.clone(),
        );
        registry.register("queue_depth", "Invocations in the queue", metrics.depth.clone());
        registry.register_with_unit(
            "queue",
            "Size of what is in the queue",
            Unit::Bytes,
            metrics.bytes.clone(),
        );
        registry.register_with_unit(
            "queue_oldest",
            "Age of the oldest invocation that is not done",
            Unit::Seconds,
            metrics.oldest.clone(),
        );
        metrics
    }

    /// An invocation was asked for: `queued`, `duplicate` or `refused`.
    pub fn queued(&self, function: &str, outcome: &'static str) {
        let labels = OutcomeLabels { function: function.to_owned(), outcome };
        self.invocations.get_or_create(&labels).inc();
    }

    /// An attempt is over: `done`, `failed`, `refused` or `deferred`.
    pub fn attempted(&self, function: &str, outcome: &'static str) {
        let labels = OutcomeLabels { function: function.to_owned(), outcome };
        self.attempts.get_or_create(&labels).inc();
    }

    /// A time of a schedule has come: `fired` or `skipped`.
    pub fn scheduled(&self, function: &str, schedule: &str, outcome: &'static str) {
        let (function, schedule) = (function.to_owned(), schedule.to_owned());
        self.schedules.get_or_create(&ScheduleLabels { function, schedule, outcome }).inc();
    }

    /// Sets what is in the queues at this time, in milliseconds since 1970.
    pub fn show(&self, queues: &[QueueInfo], now_ms: u64) {
        self.depth.clear();
        self.bytes.clear();
        self.oldest.clear();
        for queue in queues {
            let function = || FunctionLabels { function: queue.function.clone() };
            for (state, count) in
                [("queued", queue.queued), ("running", queue.running), ("dead", queue.dead)]
            {
                let labels = StateLabels { function: queue.function.clone(), state };
                self.depth.get_or_create(&labels).set(count as i64);
            }
            self.bytes.get_or_create(&function()).set((queue.bytes + queue.dead_bytes) as i64);
            let age = queue.oldest_ms.map_or(0, |oldest| now_ms.saturating_sub(oldest) / 1000);
            self.oldest.get_or_create(&function()).set(age as i64);
        }
    }
}
