//! What the node counts, in the form that Prometheus reads.

#[cfg(test)]
mod contrib_tests;
mod events;
mod names;
mod pulls;
mod requests;
mod tally;
mod tenants;
mod traces;
mod triggers;

use crate::boots::BootRecord;
use crate::instance::RewindInfo;
use crate::tenants::TenantReport;
pub(crate) use events::now_ms;
pub use events::{Event, EventKind, Events};
pub use names::NAMES;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
pub use pulls::PullMetrics;
use requests::RequestMetrics;
use std::sync::atomic::Ordering;
use std::time::Duration;
pub use tally::{FUNCTIONS_MAX, OTHERS};
pub(crate) use tally::{Reading, Tallies, TimesReading};
use tenants::TenantMetrics;
use thaw_home::config::FunctionName;
use thaw_sandbox::FunctionEgressBytes;
pub(crate) use traces::TraceCounters;
pub use triggers::{QueueInfo, TriggerMetrics};

/// Counters of a node.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    connections: Family<ConnectionLabels, Counter>,
    refusals: Family<RefusalLabels, Counter>,
    phases: Family<PhaseLabels, Histogram>,
    ended: Family<EndLabels, Counter>,
    egress_connections: Family<FunctionLabels, Counter>,
    egress_denied: Family<FunctionLabels, Counter>,
    egress_bytes: Family<DirectionLabels, Counter>,
    egress_uncounted: Family<FunctionLabels, Counter>,
    oom_kills: Family<FunctionLabels, Counter>,
    backoffs: Family<FunctionLabels, Counter>,
    liveness_failures: Family<FunctionLabels, Counter>,
    liveness_ends: Family<FunctionLabels, Counter>,
    rollbacks: Family<FunctionLabels, Counter>,
    hibernations: Family<FunctionLabels, Counter>,
    trims: Family<FunctionLabels, Counter>,
    trimmed_bytes: Family<FunctionLabels, Counter>,
    wakes: Family<FunctionLabels, Counter>,
    sleeps: Family<FunctionLabels, Counter>,
    sleep_wakes: Family<FunctionLabels, Counter>,
    sleep_losses: Family<FunctionLabels, Counter>,
    rewinds: Family<FunctionLabels, Counter>,
    rewinds_refused: Family<ReasonLabels, Counter>,
    instances: Family<InstanceLabels, Gauge>,
    instance_memory: Family<InstanceLabels, Gauge>,
    zygotes: Gauge,
    monitor_refusals: Counter,
    requests: RequestMetrics,
    tenants: TenantMetrics,
    tallies: Tallies,
    events: Events,
    triggers: TriggerMetrics,
    pulls: PullMetrics,
    traces: TraceCounters,
}

/// Memory of the instances of a function in one state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateMemory {
    /// The function.
    pub function: String,
    /// The state.
    pub state: &'static str,
    /// Their proportional shares, in bytes. Where not all were counted, those that were stand
    /// for the others.
    pub bytes: u64,
}

/// Counters of a function's connections, looked up once: there are many.
#[derive(Debug)]
pub struct ConnectionCounters {
    /// Connections for which an instance was booted.
    pub booted: Counter,
    /// Connections that went to a live instance.
    pub reused: Counter,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ConnectionLabels {
    function: String,
    /// `boot` or `reuse`.
    instance: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RefusalLabels {
    function: String,
    status: u16,
    error: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PhaseLabels {
    function: String,
    boot: &'static str,
    phase: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct EndLabels {
    function: String,
    /// `yes` if the node ended it or had given up on it.
    expected: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FunctionLabels {
    function: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct DirectionLabels {
    function: String,
    /// `sent` or `received`, as its programs see it.
    direction: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReasonLabels {
    function: String,
    reason: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct InstanceLabels {
    function: String,
    state: String,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("thaw");
        // A boot takes some hundred microseconds.
        let histogram = || Histogram::new(requests::BUCKETS);
        let phases = Family::new_with_constructor(histogram as fn() -> Histogram);
        let connections = Family::default();
        let refusals = Family::default();
        let ended = Family::default();
        let [egress_connections, egress_denied, egress_uncounted] =
            [(); 3].map(|()| Family::default());
        let egress_bytes = Family::default();
        let [oom_kills, backoffs] = [(); 2].map(|()| Family::default());
        let [liveness_failures, liveness_ends] = [(); 2].map(|()| Family::default());
        let rollbacks = Family::default();
        let (hibernations, wakes) = (Family::default(), Family::default());
        let (trims, trimmed_bytes) = (Family::default(), Family::default());
        let [sleeps, sleep_wakes, sleep_losses] = [(); 3].map(|()| Family::default());
        let rewinds = Family::default();
        let rewinds_refused = Family::default();
        let instances = Family::default();
        let instance_memory = Family::default();
        let zygotes = Gauge::default();
        let monitor_refusals = Counter::default();
        registry.register(
            "connections",
            "Connections given to instances, booted for them or used again",
            connections.clone(),
        );
        registry.register(
            "refusals",
            "Answers that the gateway gave in a function's place",
            refusals.clone(),
        );
        registry.register_with_unit(
            "boot_phase",
            "Time from the acceptance of the connection to the end of each phase of a boot",
            Unit::Seconds,
            phases.clone(),
        );
        registry.register("instances_ended", "Instances that have ended", ended.clone());
        registry.register(
            "egress_connections",
            "Outgoing connections that sandboxes of a function were given, UDP sockets included",
            egress_connections.clone(),
        );
        registry.register(
            "egress_denied",
            "Outgoing connections and names that a function's policy has denied",
            egress_denied.clone(),
        );
        registry.register_with_unit(
            "egress",
            "Bytes that TCP connections of a function's sandboxes have carried",
            Unit::Bytes,
            egress_bytes.clone(),
        );
        registry.register(
            "egress_uncounted",
            "TCP connections of a function's sandboxes whose bytes are not counted, or not all",
            egress_uncounted.clone(),
        );
        registry.register(
            "crash_backoffs",
            "Times that a function has backed off after many crashes",
            backoffs.clone(),
        );
        registry.register(
            "liveness_failures",
            "Liveness probes that have failed",
            liveness_failures.clone(),
        );
        registry.register(
            "liveness_ends",
            "Instances that were ended because their liveness probes have failed",
            liveness_ends.clone(),
        );
        registry.register(
            "rollbacks",
            "Times that a version of a function was taken out of service for its failures",
            rollbacks.clone(),
        );
        registry.register(
            "hibernations",
            "Times that an instance has given up its memory",
            hibernations.clone(),
        );
        registry.register(
            "trims",
            "Times that an idle instance was asked for pages that are equal to those of its image",
            trims.clone(),
        );
        registry.register_with_unit(
            "trimmed",
            "Bytes of such pages that idle instances have given back",
            Unit::Bytes,
            trimmed_bytes.clone(),
        );
        registry.register(
            "oom_kills",
            "Processes in a function's sandboxes that were ended since the sandbox had used up its memory",
            oom_kills.clone(),
        );
        registry.register("wakes", "Times that a hibernated instance has woken", wakes.clone());
        registry.register(
            "sleeps",
            "Times that an instance was put to sleep: its process ended, and a file was left",
            sleeps.clone(),
        );
        registry.register(
            "sleep_wakes",
            "Times that an instance that was asleep was booted again",
            sleep_wakes.clone(),
        );
        registry.register(
            "sleep_losses",
            "Instances that were asleep and could not be booted again",
            sleep_losses.clone(),
        );
        registry.register(
            "rewinds",
            "Instances that were put back into the state before their request",
            rewinds.clone(),
        );
        registry.register(
            "rewinds_refused",
            "Instances that were ended because they could not be put back",
            rewinds_refused.clone(),
        );
        registry.register("instances", "Live instances", instances.clone());
        registry.register_with_unit(
            "instance_memory",
            "Memory of live instances, and of what is kept for the next boots: proportional shares",
            Unit::Bytes,
            instance_memory.clone(),
        );
        registry.register("zygotes", "Zygotes ready", zygotes.clone());
        registry.register(
            "monitor_refusals",
            "Instances and connections that the monitor did not keep for the next daemon",
            monitor_refusals.clone(),
        );
        let requests = RequestMetrics::register(&mut registry);
        let tenants = TenantMetrics::register(&mut registry);
        let triggers = TriggerMetrics::register(&mut registry);
        let pulls = PullMetrics::register(&mut registry);
        let traces = TraceCounters::register(&mut registry);
        Self {
            registry,
            connections,
            refusals,
            phases,
            ended,
            egress_connections,
            egress_denied,
            egress_bytes,
            egress_uncounted,
            oom_kills,
            backoffs,
            liveness_failures,
            liveness_ends,
            rollbacks,
            hibernations,
            trims,
            trimmed_bytes,
            wakes,
            sleeps,
            sleep_wakes,
            sleep_losses,
            rewinds,
            rewinds_refused,
            instances,
            instance_memory,
            zygotes,
            monitor_refusals,
            requests,
            tenants,
            tallies: Tallies::default(),
            events: Events::default(),
            triggers,
            pulls,
            traces,
        }
    }
}

impl Metrics {
    /// The counters behind the charts of the last hour.
    pub(crate) fn tallies(&self) -> &Tallies {
        &self.tallies
    }

    /// What happened lately.
    pub fn events(&self) -> &Events {
        &self.events
    }

    fn note(&self, kind: EventKind, function: &FunctionName) {
        self.events.note(kind, function.as_str(), "", 1);
    }

    /// Those of queues and schedules.
    pub fn triggers(&self) -> &TriggerMetrics {
        &self.triggers
    }

    /// What is counted of pulls.
    pub fn pulls(&self) -> &PullMetrics {
        &self.pulls
    }

    /// Those of spans.
    pub(crate) fn traces(&self) -> &TraceCounters {
        &self.traces
    }

    /// Counters of the connections that a function's instances get.
    pub fn connected(&self, function: &FunctionName) -> ConnectionCounters {
        let counter = |instance| {
            let labels = ConnectionLabels { function: function.to_string(), instance };
            self.connections.get_or_create(&labels).clone()
        };
        ConnectionCounters { booted: counter("boot"), reused: counter("reuse") }
    }

    /// The gateway answered in the place of a function, or of none.
    pub fn refused(&self, function: Option<&FunctionName>, status: u16, error: &'static str) {
        self.tallies.refused(function.map(FunctionName::as_str));
        // Names that clients make up do not become labels.
        let function = function.map(ToString::to_string).unwrap_or_default();
        if status >= 500 {
            self.events.note(EventKind::Refused, &function, error, 1);
        }
        self.refusals.get_or_create(&RefusalLabels { function, status, error }).inc();
    }

    /// A routed request was answered, by a function or in its place, so long after it had come.
    pub fn responded(&self, function: Option<&FunctionName>, status: u16, duration: Duration) {
        self.tallies.responded(function.map(FunctionName::as_str), status, duration);
        self.requests.responded(function, status, duration);
    }

    /// An instance has a request, or a connection, so long after it had come.
    pub fn placed(&self, function: &FunctionName, waited: Duration) {
        self.tallies.placed(function.as_str(), waited);
        self.requests.placed(function, waited);
    }

    /// A boot is complete.
    pub fn booted(&self, boot: &BootRecord) {
        self.tallies.booted(boot);
        let phases = &boot.phases;
        for (phase, ns) in [
            ("zygote", Some(phases.zygote)),
            ("mapped", phases.mapped),
            ("first_instruction", phases.first_instruction),
            ("first_byte", phases.first_byte),
        ] {
            self.phase(boot, phase, ns);
        }
    }

    /// An instance has answered whose boot was observed before.
    pub fn answered(&self, boot: &BootRecord) {
        self.tallies.answered(boot);
        self.phase(boot, "first_byte", boot.phases.first_byte);
    }

    fn phase(&self, boot: &BootRecord, phase: &'static str, ns: Option<u64>) {
        let Some(ns) = ns else { return };
        let labels =
            PhaseLabels { function: boot.function.to_string(), boot: boot.kind.name(), phase };
        self.phases.get_or_create(&labels).observe(ns as f64 / 1e9);
    }

    /// An instance has ended.
    pub fn ended(&self, function: &FunctionName, expected: bool) {
        if !expected {
            self.note(EventKind::Ended, function);
        }
        let expected = if expected { "yes" } else { "no" };
        let labels = EndLabels { function: function.to_string(), expected };
        self.ended.get_or_create(&labels).inc();
    }

    /// A function was given `made` outgoing connections, and wanted to reach what it may not
    /// `denied` times.
    pub fn egress(&self, function: &FunctionName, made: u64, denied: u64) {
        let labels = FunctionLabels { function: function.to_string() };
        if made > 0 {
            self.egress_connections.get_or_create(&labels).inc_by(made);
        }
        if denied > 0 {
            self.events.note(EventKind::EgressDenied, function.as_str(), "", denied);
            self.egress_denied.get_or_create(&labels).inc_by(denied);
        }
    }

    /// A process of a function's sandbox was ended, since the memory of that was used up.
    pub fn oom_kill(&self, function: &FunctionName) {
        let labels = FunctionLabels { function: function.to_string() };
        self.oom_kills.get_or_create(&labels).inc();
    }

    /// Sets what connections of functions have carried since this process has begun to count.
    pub fn show_egress_bytes(&self, functions: &[FunctionEgressBytes]) {
        let set = |counter: &Counter, count| counter.inner().store(count, Ordering::Relaxed);
        for FunctionEgressBytes { function, bytes, uncounted } in functions {
            for (direction, count) in [("sent", bytes.sent), ("received", bytes.received)] {
                let labels = DirectionLabels { function: function.clone(), direction };
                set(&self.egress_bytes.get_or_create(&labels), count);
            }
            let labels = FunctionLabels { function: function.clone() };
            set(&self.egress_uncounted.get_or_create(&labels), *uncounted);
        }
    }

    /// An instance of a function has given up its memory.
    pub fn hibernated(&self, function: &FunctionName) {
        self.note(EventKind::Hibernated, function);
        let labels = FunctionLabels { function: function.to_string() };
        self.hibernations.get_or_create(&labels).inc();
    }

    /// An idle instance of a function has given back pages that are equal to those of its image.
    pub fn trimmed(&self, function: &FunctionName, bytes: u64) {
        let labels = FunctionLabels { function: function.to_string() };
        self.trims.get_or_create(&labels).inc();
        self.trimmed_bytes.get_or_create(&labels).inc_by(bytes);
    }

    /// An instance of a function was put to sleep.
    pub fn fell_asleep(&self, function: &FunctionName) {
        self.note(EventKind::FellAsleep, function);
        let labels = FunctionLabels { function: function.to_string() };
        self.sleeps.get_or_create(&labels).inc();
    }

    /// An instance of a function that was asleep is booted again.
    pub fn woken_from_sleep(&self, function: &FunctionName) {
        self.note(EventKind::WokeUp, function);
        let labels = FunctionLabels { function: function.to_string() };
        self.sleep_wakes.get_or_create(&labels).inc();
    }

    /// One could not be.
    pub fn lost_asleep(&self, function: &FunctionName) {
        self.note(EventKind::Lost, function);
        let labels = FunctionLabels { function: function.to_string() };
        self.sleep_losses.get_or_create(&labels).inc();
    }

    /// A hibernated instance of a function has woken.
    pub fn woken(&self, function: &FunctionName) {
        self.note(EventKind::Woken, function);
        let labels = FunctionLabels { function: function.to_string() };
        self.wakes.get_or_create(&labels).inc();
    }

    /// A function has begun to back off after many crashes.
    pub fn backed_off(&self, function: &FunctionName) {
        self.note(EventKind::BackedOff, function);
        let labels = FunctionLabels { function: function.to_string() };
        self.backoffs.get_or_create(&labels).inc();
    }

    /// A liveness probe of an instance of a function has failed.
    pub(crate) fn liveness_failed(&self, function: &FunctionName) {
        let labels = FunctionLabels { function: function.to_string() };
        self.liveness_failures.get_or_create(&labels).inc();
    }

    /// An instance of a function is ended since too many in a row have failed.
    pub(crate) fn liveness_ended(&self, function: &FunctionName) {
        self.events.note(EventKind::Ended, function.as_str(), "liveness probes failed", 1);
        let labels = FunctionLabels { function: function.to_string() };
        self.liveness_ends.get_or_create(&labels).inc();
    }

    /// A version of a function was taken out of service.
    pub fn rolled_back(&self, function: &FunctionName) {
        self.note(EventKind::RolledBack, function);
        let labels = FunctionLabels { function: function.to_string() };
        self.rollbacks.get_or_create(&labels).inc();
    }

    /// Sets how often the monitor of this process has refused to keep something so far.
    pub fn show_monitor_refusals(&self, so_far: u64) {
        self.monitor_refusals.inner().store(so_far, Ordering::Relaxed);
    }

    /// Sets how often instances of each function were put back since it is served as it is.
    pub fn show_rewinds(&self, functions: &[(&FunctionName, RewindInfo)]) {
        self.rewinds.clear();
        self.rewinds_refused.clear();
        for (function, info) in functions {
            let function = function.to_string();
            let set = |counter: &Counter, count| counter.inner().store(count, Ordering::Relaxed);
            for (reason, count) in &info.reasons {
                let (function, reason) = (function.clone(), reason.clone());
                let refused = ReasonLabels { function, reason };
                set(&self.rewinds_refused.get_or_create(&refused), *count);
            }
            set(&self.rewinds.get_or_create(&FunctionLabels { function }), info.done);
        }
    }

    /// Sets how much memory instances have.
    pub fn show_memory(&self, memory: &[StateMemory]) {
        self.instance_memory.clear();
        for StateMemory { function, state, bytes } in memory {
            let labels = InstanceLabels { function: function.clone(), state: (*state).to_owned() };
            let bytes = i64::try_from(*bytes).unwrap_or(i64::MAX);
            self.instance_memory.get_or_create(&labels).set(bytes);
        }
    }

    /// Sets what tenants use, in the order of their names.
    pub fn show_tenants(&self, tenants: &[TenantReport]) {
        self.tenants.show(tenants);
    }

    /// The text that Prometheus reads. `instances` are function, state and
    /// number; `zygotes` are those that are ready.
    pub fn text(&self, instances: &[(String, String, i64)], zygotes: i64) -> String {
        self.instances.clear();
        for (function, state, count) in instances {
            let labels = InstanceLabels { function: function.clone(), state: state.clone() };
            self.instances.get_or_create(&labels).set(*count);
        }
        self.zygotes.set(zygotes);
        let mut text = String::new();
        text::encode(&mut text, &self.registry).expect("writing to a string does not fail");
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_sandbox::EgressBytes;

    #[test]
    fn metrics_are_readable_text() {
        let metrics = Metrics::default();
        let name: FunctionName = "hello".parse().unwrap();
        metrics.connected(&name).booted.inc();
        metrics.refused(None, 404, "unknown_function");
        metrics.ended(&name, true);
        // A number that was counted elsewhere is not added to.
        metrics.show_monitor_refusals(4);
        metrics.show_monitor_refusals(5);
        let text = metrics.text(&[], 0);
        assert!(!text.contains("thaw_egress_bytes"), "nobody has said that bytes are counted");
        let bytes = EgressBytes { sent: 7, received: 8 };
        let all = FunctionEgressBytes { function: "hello".into(), bytes, uncounted: 1 };
        metrics.show_egress_bytes(std::slice::from_ref(&all));
        metrics.show_egress_bytes(&[FunctionEgressBytes {
            bytes: EgressBytes { sent: 9, ..bytes },
            ..all
        }]);
        let text = metrics.text(&[("hello".into(), "idle".into(), 2)], 3);
        for line in [
            "thaw_connections_total{function=\"hello\",instance=\"boot\"} 1",
            "thaw_refusals_total{function=\"\",status=\"404\",error=\"unknown_function\"} 1",
            "thaw_instances{function=\"hello\",state=\"idle\"} 2",
            "thaw_zygotes 3",
            "thaw_monitor_refusals_total 5",
            "thaw_egress_bytes_total{function=\"hello\",direction=\"sent\"} 9",
            "thaw_egress_bytes_total{function=\"hello\",direction=\"received\"} 8",
            "thaw_egress_uncounted_total{function=\"hello\"} 1",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
    }
}
