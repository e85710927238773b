//! Room for instances: which idle ones end, give up their memory or fall asleep to make some for others.

use super::Services;
use super::asked::Asked;
use crate::service::Service;
use crate::tenants::Tenant;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::sleep;

/// How often it is looked for instances that have been asleep for too long.
const LOOK_FOR_OLD_SLEEPERS: Duration = Duration::from_secs(1);

impl Services {
    /// Whether each of those who wait for room of a tenant can hope for an instance that ends soon. Those
    /// that have all of their grace do not.
    pub(crate) fn is_room_coming_to(&self, tenant: &Arc<Tenant>) -> bool {
        let room = tenant.room();
        ending_soon(room.ending(), &self.all_of(tenant)) >= room.waiting()
    }

    /// The same of those who wait for room of the node.
    pub(crate) fn is_room_coming(&self) -> bool {
        ending_soon(self.shared.ending_count(), &self.everything())
            >= self.shared.waiting_for_room()
    }

    /// Makes room for one more instance: ends the one that has been idle longest, if any is idle;
    /// whether there was one. First come those that end already, and take their time.
    pub(crate) fn make_room(&self) -> bool {
        hurry_one_of(&self.everything()) || evict_idlest_of(&self.services(), Service::evict)
    }

    /// The same for one more instance of a tenant, of its own instances. First of all come those that
    /// are only kept ready.
    pub(crate) fn make_room_of(&self, tenant: &Arc<Tenant>) -> bool {
        let services = self.services_of(tenant);
        services.iter().any(|service| service.launcher().give_up_one())
            || hurry_one_of(&self.all_of(tenant))
            || evict_idlest_of(&services, Service::evict)
    }

    /// The same for an instance that no client waits for: `spared` stays, and so do those that are being
    /// booted. Whether something is about to give room back.
    pub(crate) fn make_room_beside_clients_of(
        &self,
        tenant: &Arc<Tenant>,
        spared: Option<u64>,
    ) -> bool {
        let services = self.services_of(tenant);
        services.iter().any(|service| service.launcher().give_up_one())
            || hurry_one_of(&self.all_of(tenant))
            || evict_idlest_of(&services, |service, id| evict_beside_clients(service, id, spared))
            || tenant.room().ending() > 0
    }

    /// The same for the room of the node.
    pub(crate) fn make_room_beside_clients(&self, spared: Option<u64>) -> bool {
        hurry_one_of(&self.everything())
            || evict_idlest_of(&self.services(), |service, id| {
                evict_beside_clients(service, id, spared)
            })
            || self.shared.ending_count() > 0
    }

    /// Ends what nobody uses of tenants that have more than they may, as after their quotas
    /// were lowered. What is busy ends when it is no more.
    pub fn shrink_to_quotas(&self) {
        for tenant in self.shared.tenants().all() {
            let room = tenant.room();
            while room.is_overdrawn() {
                let services = self.services_of(&tenant);
                // Ready instances give their room back at once.
                if services.iter().any(|service| service.launcher().give_up_one()) {
                    continue;
                }
                if !evict_idlest_of(&services, Service::evict_beyond_quota) {
                    break;
                }
            }
        }
    }

    /// Ends all instances of a tenant, whatever they do; how many there were.
    pub(crate) fn end_instances_of(&self, tenant: &Arc<Tenant>) -> usize {
        self.all_of(tenant).iter().map(|service| service.kill_all()).sum()
    }

    /// All services of a tenant, those included of which only the last instances are left.
    fn all_of(&self, tenant: &Arc<Tenant>) -> Vec<Arc<Service>> {
        let of_tenant = |service: &Arc<Service>| Arc::ptr_eq(service.tenant(), tenant);
        self.everything().into_iter().filter(of_tenant).collect()
    }

    /// Asks instances that are idle and have memory to give it up, those first that have been
    /// idle longest; how many were asked, `most` at most.
    pub(crate) fn hibernate_idlest(&self, most: usize) -> usize {
        let services = self.everything();
        let with_memory = services.iter().flat_map(|service| {
            let idle = service.idle_with_memory().into_iter();
            idle.map(move |(since, id)| (since, id, service))
        });
        ask(with_memory, &self.relieved, most, Service::relieve)
    }

    /// Puts hibernated instances to sleep, those first that have been idle longest; how many were
    /// asked, `most` at most.
    pub(crate) fn put_idlest_to_sleep(&self, most: usize) -> usize {
        let services = self.services();
        let hibernated = services.iter().flat_map(|service| {
            let idle = service.idle_hibernated().into_iter();
            idle.map(move |(since, id)| (since, id, service))
        });
        ask(hibernated, &self.sent_to_sleep, most, Service::send_to_sleep)
    }

    /// Ends instances that have been asleep for longer than their functions keep them, for as long
    /// as the node lives.
    pub async fn end_old_sleepers(self: Arc<Self>) {
        loop {
            sleep(LOOK_FOR_OLD_SLEEPERS).await;
            self.services().iter().for_each(|service| service.end_old_sleepers());
        }
    }
}

/// How many of those that are about to end do not take all of their grace.
fn ending_soon(ending: usize, services: &[Arc<Service>]) -> usize {
    let in_grace = services.iter().map(|service| service.count_in_grace()).sum();
    ending.saturating_sub(in_grace)
}

/// Has an instance end soon that has all of its grace; whether there was one.
fn hurry_one_of(services: &[Arc<Service>]) -> bool {
    services.iter().any(|service| service.hurry_one())
}

/// Ends an instance that is idle, unless it is the one that is spared; whether it was so.
fn evict_beside_clients(service: &Service, id: u64, spared: Option<u64>) -> bool {
    Some(id) != spared && service.evict_if_up(id)
}

/// Asks idle instances for something, those first that have been idle longest; how many were asked,
/// `most` at most.
fn ask<'a>(
    idle: impl Iterator<Item = (std::time::Instant, u64, &'a Arc<Service>)>,
    asked: &Mutex<Asked>,
    most: usize,
    ask: impl Fn(&Service, u64),
) -> usize {
    let mut idle: Vec<_> = idle.collect();
    idle.sort_by_key(|(since, id, _)| (*since, *id));
    let ids = idle.iter().map(|(_, id, _)| *id);
    let chosen =
        asked.lock().expect("no holder panics").choose(ids, most, std::time::Instant::now());
    for (_, id, service) in idle.iter().filter(|(_, id, _)| chosen.contains(id)) {
        ask(service, *id);
    }
    chosen.len()
}

/// Has `evict` end the instance that has been idle longest; whether there was one.
fn evict_idlest_of(services: &[Arc<Service>], evict: impl Fn(&Service, u64) -> bool) -> bool {
    let mut tried = None;
    loop {
        let idlest = services.iter().filter_map(|service| Some((service.idlest(tried)?, service)));
        let Some((found, service)) = idlest.min_by_key(|(found, _)| *found) else { return false };
        let (_, id) = found;
        // One that has just got a connection, or that comes to rest only now, stays: the next one
        // is tried.
        tried = Some(found);
        if evict(service, id) {
            tracing::debug!(function = %service.name(), instance = id, "ended an idle instance to make room");
            return true;
        }
    }
}
