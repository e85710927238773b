//! Looking at the CPU time of tenants that have a quota of it.

use super::Services;
use crate::tenants::{Standing, Tenant, write_down};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use thaw_home::clock::monotonic_ns;
use tokio::time::{MissedTickBehavior, interval};

/// How often it is looked at. What a tenant can use beyond its quota until its instances
/// are ended is a tenth of the quota, and what they use in this time.
const LOOK: Duration = Duration::from_millis(250);

/// Looks between two times that the periods are written down.
const LOOKS_FOR_A_WRITE: u32 = 20;

/// Refuses requests of tenants that have spent their CPU time, and ends the instances of
/// those that go on, until the task is dropped. Writes the periods down in `file`.
pub async fn watch_cpu_time(services: Arc<Services>, file: PathBuf) {
    let shared = services.shared();
    let mut looks_until_write = LOOKS_FOR_A_WRITE;
    let mut ticks = interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let bounded = shared.tenants().with_cpu_quota();
        if bounded.is_empty() {
            continue;
        }
        looks_until_write -= 1;
        let written = (looks_until_write == 0).then(|| (shared.clone(), file.clone()));
        if written.is_some() {
            looks_until_write = LOOKS_FOR_A_WRITE;
        }
        let look = |tenant: Arc<Tenant>| (tenant.cpu().look(monotonic_ns()), tenant);
        // Reads a file of the host for each instance.
        let looks = move || {
            if let Some((shared, file)) = written {
                write_down(shared.tenants(), &file);
            }
            bounded.into_iter().map(look).collect::<Vec<_>>()
        };
        let Ok(standings) = tokio::task::spawn_blocking(looks).await else { continue };
        for (standing, tenant) in standings {
            act(&services, standing, &tenant);
        }
    }
}

fn act(services: &Services, standing: Standing, tenant: &Arc<Tenant>) {
    match standing {
        Standing::Solvent | Standing::Spent { already: true } => {}
        Standing::Spent { already: false } => {
            let quota = tenant.quota().cpu_time.map(|quota| quota.to_string());
            tracing::info!(quota, "the CPU time of {} is spent", tenant.name());
        }
        Standing::Overdrawn => {
            let ended = services.end_instances_of(tenant);
            if ended > 0 {
                tracing::warn!(
                    ended,
                    "ending the instances of {}, which go on although its CPU time is spent",
                    tenant.name()
                );
            }
        }
    }
}
