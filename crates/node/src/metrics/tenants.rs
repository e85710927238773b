//! What tenants use, and what they may use.

use crate::tenants::TenantReport;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use std::sync::atomic::AtomicU64;

/// Most tenants that have values of their own. Authors of functions can make up names of
/// domains, which must not make the metrics of a node arbitrarily large.
const TENANTS_MAX: usize = 256;
/// Stands for all others together; no domain has this name.
const OTHERS: &str = "*";

type TenantGauge = Family<TenantLabels, Gauge>;
type SecondsGauge = Family<TenantLabels, Gauge<f64, AtomicU64>>;

/// Values of tenants, set anew each time that somebody asks.
#[derive(Debug)]
pub(super) struct TenantMetrics {
    functions: TenantGauge,
    instances: TenantGauge,
    waiting: TenantGauge,
    memory_reserved: TenantGauge,
    memory_used: TenantGauge,
    cpu: SecondsGauge,
    store: TenantGauge,
    swap: TenantGauge,
    egress: TenantGauge,
    refused: Family<RefusedLabels, Gauge>,
    quotas: Family<QuotaLabels, Gauge<f64, AtomicU64>>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TenantLabels {
    domain: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RefusedLabels {
    domain: String,
    quota: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct QuotaLabels {
    domain: String,
    quota: &'static str,
}

impl TenantMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("tenant");
        let mut gauge = |name, help| {
            let family = TenantGauge::default();
            registry.register(name, help, family.clone());
            family
        };
        let functions = gauge("functions", "Functions in the store");
        let instances = gauge("instances", "Instances, those kept ready and templates included");
        let waiting = gauge("waiting", "Requests that wait for room for an instance");
        let egress = gauge("egress_connections", "Outgoing connections");
        let mut bytes = |name, help| {
            let family = TenantGauge::default();
            registry.register_with_unit(name, help, Unit::Bytes, family.clone());
            family
        };
        let memory_reserved = bytes("memory_reserved", "Sum of the instances' memory limits");
        let memory_used = bytes("memory_used", "Memory that the instances have");
        let store = bytes("store", "Files, indexes and images in the store");
        let swap = bytes("swap", "Swap files of hibernated instances");
        let (cpu, refused, quotas) =
            (SecondsGauge::default(), Family::default(), Family::default());
        let help = "CPU time used since the daemon started; never falls";
        registry.register_with_unit("cpu", help, Unit::Seconds, cpu.clone());
        let help = "Requests refused since the daemon started, by quota; never falls";
        registry.register("refused", help, Family::clone(&refused));
        let help = "What a tenant may use: a number, bytes, or seconds of CPU time in a second";
        registry.register("quota", help, Family::clone(&quotas));
        Self {
            functions,
            instances,
            waiting,
            memory_reserved,
            memory_used,
            cpu,
            store,
            swap,
            egress,
            refused,
            quotas,
        }
    }

    /// Shows the tenants, in the order of their names.
    pub fn show(&self, tenants: &[TenantReport]) {
        self.clear();
        for (number, tenant) in tenants.iter().enumerate() {
            let own = number < TENANTS_MAX;
            let name = tenant.domain.as_ref().map_or("", |domain| domain.name().as_str());
            self.add(tenant, if own { name } else { OTHERS });
            if own {
                self.show_quota(tenant, name);
            }
        }
    }

    fn clear(&self) {
        for family in [
            &self.functions,
            &self.instances,
            &self.waiting,
            &self.memory_reserved,
            &self.memory_used,
            &self.store,
            &self.swap,
            &self.egress,
        ] {
            family.clear();
        }
        self.cpu.clear();
        self.refused.clear();
        self.quotas.clear();
    }

    fn add(&self, tenant: &TenantReport, domain: &str) {
        let labels = TenantLabels { domain: domain.to_owned() };
        let add = |family: &TenantGauge, value: u64| {
            family.get_or_create(&labels).inc_by(i64::try_from(value).unwrap_or(i64::MAX));
        };
        add(&self.functions, tenant.functions as u64);
        add(&self.instances, tenant.instances.into());
        add(&self.waiting, tenant.waiting as u64);
        add(&self.memory_reserved, tenant.memory_reserved);
        add(&self.memory_used, tenant.memory_used);
        add(&self.store, tenant.store);
        add(&self.swap, tenant.swap);
        add(&self.egress, tenant.egress_connections as u64);
        self.cpu.get_or_create(&labels).inc_by(tenant.cpu_ms as f64 / 1e3);
        for (quota, count) in &tenant.refused {
            let labels = RefusedLabels { domain: domain.to_owned(), quota: quota.clone() };
            self.refused.get_or_create(&labels).inc_by(i64::try_from(*count).unwrap_or(i64::MAX));
        }
    }

    fn show_quota(&self, tenant: &TenantReport, domain: &str) {
        let quota = &tenant.quota;
        let cpu = quota.cpu_time.map(|cpu| cpu.time.0.as_secs_f64() / cpu.period.0.as_secs_f64());
        for (name, value) in [
            ("instances", quota.instances.map(f64::from)),
            ("memory", quota.memory.map(|size| size.bytes() as f64)),
            ("cpu_time", cpu),
            ("store", quota.store.map(|size| size.bytes() as f64)),
            ("swap", quota.swap.map(|size| size.bytes() as f64)),
            ("volumes", quota.volumes.map(|size| size.bytes() as f64)),
            ("egress_connections", quota.egress_connections.map(f64::from)),
            ("egress_per_second", quota.egress_per_second.map(f64::from)),
        ] {
            let Some(value) = value else { continue };
            let labels = QuotaLabels { domain: domain.to_owned(), quota: name };
            self.quotas.get_or_create(&labels).set(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;
    use std::collections::BTreeMap;
    use thaw_home::config::{ByteSize, Quota};

    fn report(domain: Option<&str>) -> TenantReport {
        TenantReport {
            domain: domain.map(|domain| domain.parse().unwrap()),
            functions: 1,
            instances: 2,
            waiting: 3,
            memory_reserved: 4,
            memory_used: 5,
            cpu_ms: 1500,
            cpu_period: None,
            store: 6,
            queue: 0,
            volumes: 0,
            swap: 10,
            egress_connections: 7,
            refused: BTreeMap::from([("memory".to_owned(), 8)]),
            quota: Quota { memory: Some(ByteSize(9)), ..Quota::default() },
        }
    }

    #[test]
    fn tenants_are_shown_with_what_they_may_use() {
        let metrics = Metrics::default();
        let reports = [report(None), report(Some("a"))];
        metrics.show_tenants(&reports);
        // Values are set, not added to.
        metrics.show_tenants(&reports);
        let text = metrics.text(&[], 0);
        for line in [
            "thaw_tenant_instances{domain=\"\"} 2",
            "thaw_tenant_instances{domain=\"a\"} 2",
            "thaw_tenant_memory_used_bytes{domain=\"a\"} 5",
            "thaw_tenant_swap_bytes{domain=\"a\"} 10",
            "thaw_tenant_cpu_seconds{domain=\"a\"} 1.5",
            "thaw_tenant_refused{domain=\"a\",quota=\"memory\"} 8",
            "thaw_tenant_quota{domain=\"a\",quota=\"memory\"} 9",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        metrics.show_tenants(&[]);
        assert!(!metrics.text(&[], 0).contains("domain="));
    }

    #[test]
    fn names_that_authors_make_up_do_not_make_the_text_grow() {
        let metrics = Metrics::default();
        let reports: Vec<_> =
            (0..1000).map(|number| report(Some(&format!("d{number:04}")))).collect();
        metrics.show_tenants(&reports);
        let text = metrics.text(&[], 0);
        let count = text.lines().filter(|line| line.starts_with("thaw_tenant_instances{")).count();
        assert_eq!(count, TENANTS_MAX + 1);
        let others = 2 * (1000 - TENANTS_MAX);
        assert!(text.contains(&format!("thaw_tenant_instances{{domain=\"*\"}} {others}")));
    }
}
