//! What the node does at the moment, for `thaw top` and `GET /stats`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What happened in the last interval, and what is there now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Stats {
    /// When the interval ended, milliseconds since 1970.
    pub time_ms: u64,
    /// How long it was, in milliseconds.
    pub interval_ms: u64,
    /// Version of Thaw.
    pub version: String,
    /// Seconds since the daemon started.
    pub uptime_s: u64,
    /// The node as a whole.
    pub node: NodeStats,
    /// Functions, by name.
    pub functions: Vec<FunctionStats>,
}

/// The node as a whole.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeStats {
    /// Rates, times and instances of all functions.
    #[serde(flatten)]
    pub all: FunctionStats,
    /// Instances that may still be added.
    pub instances_free: usize,
    /// Zygotes that are ready.
    pub zygotes: usize,
    /// Zygotes that are to be ready.
    pub zygotes_target: usize,
    /// Memory of all sandboxes, in bytes.
    pub memory_bytes: u64,
    /// Processors' worth of CPU time of all sandboxes.
    pub cpus: f64,
    /// Outgoing connections.
    pub egress_connections: usize,
    /// Bytes that these have sent and received, per second; null: they are not counted.
    #[serde(default)]
    pub egress_sent: Option<f64>,
    /// The same.
    #[serde(default)]
    pub egress_received: Option<f64>,
}

/// A function. Rates are per second, times in milliseconds; null: there was none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FunctionStats {
    /// Its name; empty for the node.
    #[serde(default)]
    pub name: String,
    /// Requests that instances got.
    pub requests: f64,
    /// Responses of class 5.
    pub server_errors: f64,
    /// Answers of the gateway in its place.
    pub refusals: f64,
    /// Half of the routed requests took no longer.
    pub request_p50_ms: Option<f64>,
    /// 95 of 100 took no longer.
    pub request_p95_ms: Option<f64>,
    /// 95 of 100 waited no longer for an instance.
    pub queue_p95_ms: Option<f64>,
    /// Mean time of a boot, to the first instruction.
    pub boot_ms: Option<f64>,
    /// Boots, by kind.
    pub boots: BTreeMap<String, f64>,
    /// Instances, by state; `ready`: booted ahead.
    pub instances: BTreeMap<String, usize>,
}
