//! What one sandbox uses.

use crate::service::Service;
use crate::usage::measure_instance;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a sandbox uses, and may use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SandboxUsage {
    /// CPU time of its processes since its host process was made, in milliseconds; none where
    /// the host does not count it, and of one that sleeps.
    pub cpu_ms: Option<u64>,
    /// Memory that counts in its limit, files included; none of one that sleeps. Where the host has no
    /// control groups for memory: pages that its processes have mapped, without other files.
    pub memory_bytes: Option<u64>,
    /// Bytes of its memory that are in a swap file as long as it is hibernated; they count in its
    /// limit, too.
    #[serde(default)]
    pub swapped_bytes: u64,
    /// Memory that it alone has.
    pub private_bytes: Option<u64>,
    /// Memory that it may have.
    pub memory_max_bytes: u64,
    /// Processors that it may use.
    pub cpus: u32,
}

/// What an instance of a service uses. Wakes nobody.
pub(super) async fn usage_of(service: &Service, instance: u64) -> SandboxUsage {
    let memory = measure_instance(service, instance).await;
    let used = service.use_of(instance).await.unwrap_or_default();
    let limits = service.limits_of(instance);
    SandboxUsage {
        cpu_ms: used.cpu_time.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        memory_bytes: used.memory.bytes.or(memory.map(|memory| memory.pss)),
        swapped_bytes: used.memory.swapped,
        private_bytes: memory.map(|memory| memory.private),
        memory_max_bytes: limits.memory,
        cpus: limits.cpus,
    }
}
