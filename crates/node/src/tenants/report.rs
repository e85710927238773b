//! What tenants use, to be shown.

use super::{REFUSED_NAMES, Tenant, Tenants};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thaw_home::config::{DomainName, Quota};
use thaw_home::tenants::TenantStore;
use thaw_store::{Store, StoreError};

/// A tenant as the admin API shows it. Sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct TenantReport {
    /// The sharing domain; none: all functions without one.
    pub domain: Option<DomainName>,
    /// Functions in the store.
    pub functions: usize,
    /// Live instances, with those that are kept ready, and templates.
    pub instances: u32,
    /// Requests that wait for room for an instance.
    pub waiting: usize,
    /// Sum of the memory limits of the instances.
    pub memory_reserved: u64,
    /// Memory that they have now; 0 where the host does not count it.
    pub memory_used: u64,
    /// CPU time that was used since the daemon started, in milliseconds; 0 where the host
    /// does not count it.
    pub cpu_ms: u64,
    /// The present period, if CPU time has a quota.
    pub cpu_period: Option<CpuPeriod>,
    /// Files, indexes and images in the store, and the files of instances that are asleep.
    pub store: u64,
    /// Swap files of its hibernated instances.
    #[serde(default)]
    pub swap: u64,
    /// Invocations in the queues of triggers, without dead letters.
    #[serde(default)]
    pub queue: u64,
    /// Sizes of its volumes, and again for each of their snapshots.
    #[serde(default)]
    pub volumes: u64,
    /// Outgoing connections.
    pub egress_connections: usize,
    /// Requests that were refused, by the quota that was reached.
    pub refused: BTreeMap<String, u64>,
    /// What it may use.
    pub quota: Quota,
}

/// A period of a quota of CPU time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct CpuPeriod {
    /// CPU time used in it, in milliseconds.
    pub used_ms: u64,
    /// Milliseconds until the next one.
    pub left_ms: u64,
    /// Whether the quota is spent.
    pub is_spent: bool,
}

impl TenantReport {
    /// What one tenant uses. Reads a few files for each of its instances.
    fn new(tenant: &Tenant, store: TenantStore) -> Self {
        let taken = tenant.room().taken();
        let meter = tenant.cpu().meter();
        let period = tenant.cpu().period_use().map(|period| CpuPeriod {
            used_ms: period.used.as_millis() as u64,
            left_ms: period.left.as_millis() as u64,
            is_spent: period.is_spent,
        });
        let counted = tenant.refused.iter().map(|count| count.load(Ordering::Relaxed));
        let refused = REFUSED_NAMES.iter().map(ToString::to_string).zip(counted).collect();
        Self {
            domain: tenant.name().domain().cloned(),
            functions: store.functions,
            instances: taken.instances,
            waiting: tenant.room().waiting(),
            memory_reserved: taken.memory,
            memory_used: meter.memory(),
            cpu_ms: meter.cpu_time().as_millis() as u64,
            cpu_period: period,
            store: store.bytes + tenant.asleep_bytes(),
            swap: tenant.swap().taken(),
            queue: 0,
            volumes: 0,
            egress_connections: tenant.egress().connections(),
            refused,
            quota: tenant.quota(),
        }
    }

    /// What all tenants of a node use, in the order of their names. Reads files of the host
    /// and of the store.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn all(tenants: &Tenants, store: &Store) -> Result<Vec<Self>, StoreError> {
        let stored = tenants.store().measure(store)?;
        let of = |tenant: &Arc<Tenant>| stored.get(tenant.name()).copied().unwrap_or_default();
        let all = tenants.all();
        Ok(all.iter().map(|tenant| Self::new(tenant, of(tenant))).collect())
    }
}
