//! Room for instances: who waits for it, and which idle ones end, give up their memory or fall asleep to
//! make some.

use super::NodeState;
use super::asked::Asked;
use crate::service::Service;
use crate::tenants::Tenant;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::sync::futures::Notified;
use tokio::time::sleep;

/// How often it is looked for instances that have been asleep for too long.
const LOOK_FOR_OLD_SLEEPERS: Duration = Duration::from_secs(1);
/// How long somebody who waits for room relies on an instance that is about to end, or to sleep, before
/// another one does.
const COMING_PATIENCE: Duration = Duration::from_secs(1);

impl NodeState {
    pub(crate) fn capacity(&self) -> Arc<Semaphore> {
        self.capacity.clone()
    }

    /// Somebody waits until an instance more may run, as long as the value lives.
    pub(crate) fn wait_for_room(&self) -> impl Drop + Send + '_ {
        struct Waiting<'a>(&'a NodeState);
        impl Drop for Waiting<'_> {
            fn drop(&mut self) {
                self.0.waiting.fetch_sub(1, Ordering::SeqCst);
                // It may have heard of an instance that it does not need, or has got the room on which
                // another one relies.
                self.0.instance_is_idle();
            }
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        Waiting(self)
    }

    /// An instance has become idle, and can make room for another. One of those who wait
    /// hears of it; a wake-up that comes too late for it goes to the next.
    pub(crate) fn instance_is_idle(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.idle.notify_one();
        }
    }

    /// Resolves when an instance of any function has become idle.
    pub(crate) fn idle_instance(&self) -> Notified<'_> {
        self.idle.notified()
    }

    /// An instance takes its time to end, and can be hurried by those who wait for room.
    pub(crate) fn instance_is_in_grace(&self, tenant: &Tenant) {
        tenant.room().stir();
        self.instance_is_idle();
    }

    /// Has those who wait for room rely for so long on what is about to make some, before they look for
    /// something else. The first one stays.
    pub fn rely_on_coming_room_for(&self, patience: Duration) {
        // The first one stays.
        let _ = self.coming_patience.set(patience);
    }

    pub(crate) fn coming_patience(&self) -> Duration {
        self.coming_patience.get().copied().unwrap_or(COMING_PATIENCE)
    }

    /// Whether each of those who wait for room of a tenant can hope for an instance that ends soon. Those
    /// that have all of their grace do not.
    pub(crate) fn is_room_coming_to(&self, tenant: &Arc<Tenant>) -> bool {
        let room = tenant.room();
        ending_soon(room.ending(), &self.all_of(tenant)) >= room.waiting()
    }

    /// The same of those who wait for room of the node.
    pub(crate) fn is_room_coming(&self) -> bool {
        ending_soon(self.ending(), &self.everything()) >= self.waiting.load(Ordering::SeqCst)
    }

    /// How many instances are about to give their room back.
    fn ending(&self) -> usize {
        self.tenants.all().iter().map(|tenant| tenant.room().ending()).sum()
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
            || self.ending() > 0
    }

    /// Ends what nobody uses of tenants that have more than they may, as after their quotas
    /// were lowered. What is busy ends when it is no more.
    pub fn shrink_to_quotas(&self) {
        for tenant in self.tenants.all() {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    #[tokio::test]
    async fn who_waits_no_more_passes_on_what_it_has_heard() {
        let node = NodeState::new(1);
        let (first, _second) = (node.wait_for_room(), node.wait_for_room());
        node.instance_is_idle();
        node.idle_instance().await;
        assert!(!pin!(node.idle_instance()).enable());
        drop(first);
        assert!(pin!(node.idle_instance()).enable());
    }
}
