//! The names of all metrics. The text of a node has those that have series.

/// Name and type of each metric (OpenMetrics 1.0).
pub const NAMES: &[(&str, &str)] = &[
    ("thaw_boot_phase_seconds", "histogram"),
    ("thaw_connections", "counter"),
    ("thaw_crash_backoffs", "counter"),
    ("thaw_egress_bytes", "counter"),
    ("thaw_egress_connections", "counter"),
    ("thaw_egress_denied", "counter"),
    ("thaw_egress_uncounted", "counter"),
    ("thaw_hibernations", "counter"),
    ("thaw_instance_memory_bytes", "gauge"),
    ("thaw_instances", "gauge"),
    ("thaw_instances_ended", "counter"),
    ("thaw_liveness_ends", "counter"),
    ("thaw_liveness_failures", "counter"),
    ("thaw_monitor_refusals", "counter"),
    ("thaw_oom_kills", "counter"),
    ("thaw_partial_parts_failed", "counter"),
    ("thaw_partial_parts_waiting", "gauge"),
    ("thaw_pull_fetchers", "counter"),
    ("thaw_pull_fetches_failed", "counter"),
    ("thaw_pull_moved_bytes", "counter"),
    ("thaw_pulls", "gauge"),
    ("thaw_queue_attempts", "counter"),
    ("thaw_queue_bytes", "gauge"),
    ("thaw_queue_depth", "gauge"),
    ("thaw_queue_invocations", "counter"),
    ("thaw_queue_oldest_seconds", "gauge"),
    ("thaw_refusals", "counter"),
    ("thaw_request_duration_seconds", "histogram"),
    ("thaw_request_queue_seconds", "histogram"),
    ("thaw_responses", "counter"),
    ("thaw_rewinds", "counter"),
    ("thaw_rewinds_refused", "counter"),
    ("thaw_rollbacks", "counter"),
    ("thaw_schedule_times", "counter"),
    ("thaw_sleep_losses", "counter"),
    ("thaw_sleep_wakes", "counter"),
    ("thaw_sleeps", "counter"),
    ("thaw_tenant_cpu_seconds", "gauge"),
    ("thaw_tenant_egress_connections", "gauge"),
    ("thaw_tenant_functions", "gauge"),
    ("thaw_tenant_instances", "gauge"),
    ("thaw_tenant_memory_reserved_bytes", "gauge"),
    ("thaw_tenant_memory_used_bytes", "gauge"),
    ("thaw_tenant_quota", "gauge"),
    ("thaw_tenant_refused", "gauge"),
    ("thaw_tenant_store_bytes", "gauge"),
    ("thaw_tenant_swap_bytes", "gauge"),
    ("thaw_tenant_waiting", "gauge"),
    ("thaw_trace_spans", "counter"),
    ("thaw_trimmed_bytes", "counter"),
    ("thaw_trims", "counter"),
    ("thaw_wakes", "counter"),
    ("thaw_zygotes", "gauge"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Names as the sources register them: without prefixes and units.
    fn registered() -> BTreeSet<String> {
        let sources = [
            include_str!("../metrics.rs"),
            include_str!("pulls.rs"),
            include_str!("requests.rs"),
            include_str!("tenants.rs"),
            include_str!("traces.rs"),
            include_str!("triggers.rs"),
        ];
        let mut names = BTreeSet::new();
        for call in ["register(", "register_with_unit(", " gauge(", " bytes("] {
            for source in sources {
                for after in source.split(call).skip(1) {
                    let name = after.trim_start().strip_prefix('"');
                    names.extend(name.and_then(|name| name.split('"').next()).map(str::to_owned));
                }
            }
        }
        names
    }

    fn bare(name: &str) -> String {
        let name = name.strip_prefix("thaw_").unwrap();
        let name = name.strip_prefix("tenant_").unwrap_or(name);
        let without = ["_seconds", "_bytes"].iter().find_map(|unit| name.strip_suffix(unit));
        without.unwrap_or(name).to_owned()
    }

    #[test]
    fn every_metric_has_its_name_here_and_nothing_else() {
        let listed: BTreeSet<_> = NAMES.iter().map(|(name, _)| bare(name)).collect();
        assert_eq!(listed, registered());
        let text = crate::metrics::Metrics::default().text(&[], 0);
        for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
            assert!(NAMES.iter().any(|(name, kind)| line == format!("{name} {kind}")), "{line}");
        }
    }
}
