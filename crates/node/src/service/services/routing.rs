//! Which versions of functions get requests here, and those that get none any more and of which the
//! last instances still work.

use super::{Served, Services};
use crate::service::Service;
use crate::tenants::Tenant;
use std::collections::HashSet;
use std::sync::Arc;
use thaw_home::config::FunctionName;
use tokio::runtime::Handle;

impl Services {
    /// The active version of the function that a client asks for.
    pub fn route(&self, name: &str) -> Option<Arc<Service>> {
        let services = self.served.read().expect("no holder panics");
        Some(services.get(name)?.active().clone())
    }

    /// The versions of a function that get requests.
    pub fn served(&self, name: &str) -> Option<Served> {
        self.served.read().expect("no holder panics").get(name).cloned()
    }

    /// The version of a function that gets a request of which nothing else is known.
    pub(crate) fn route_by_chance(&self, name: &str) -> Option<Arc<Service>> {
        let services = self.served.read().expect("no holder panics");
        Some(services.get(name)?.choose(|_| false))
    }

    /// The active versions of all functions, sorted by name.
    pub fn functions(&self) -> Vec<Arc<Service>> {
        let services = self.served.read().expect("no holder panics");
        let mut all: Vec<_> = services.values().map(|served| served.active().clone()).collect();
        all.sort_by(|a, b| a.name().cmp(b.name()));
        all
    }

    /// All versions of all functions that get requests, sorted by name.
    pub fn services(&self) -> Vec<Arc<Service>> {
        let services = self.served.read().expect("no holder panics");
        let mut all: Vec<_> = services.values().flat_map(Served::services).cloned().collect();
        all.sort_by_key(|service| (service.name().clone(), service.version()));
        all
    }

    /// Serves a function that has one version, in place of an older one of the same name.
    pub fn install(&self, service: Arc<Service>) {
        self.deploy(Served::whole(service));
    }

    /// Serves a function. Versions that were served before and are not now get no more requests;
    /// their instances end when they are idle, at the latest after the function's `limits.drain`, but
    /// for sandboxes.
    pub fn deploy(&self, served: Served) {
        let name = served.active().name().clone();
        self.take_over_asleep(&served);
        let new: Vec<_> = served.services().cloned().collect();
        let mut services = self.served.write().expect("no holder panics");
        let old = services.get(name.as_str()).into_iter().flat_map(Served::services);
        let old = old.filter(|old| !new.iter().any(|new| Arc::ptr_eq(new, old)));
        let old: Vec<_> = old.cloned().collect();
        self.keep_in_sight(&old);
        services.insert(name, served.clone());
        drop(services);
        self.take_in_sandboxes(&served);
        old.into_iter().for_each(|old| self.retire(old));
    }

    /// Serves a function no longer, and ends its sandboxes, those of older versions too.
    pub fn remove(&self, name: &str) {
        let mut services = self.served.write().expect("no holder panics");
        let old = services.get(name).into_iter().flat_map(Served::services);
        let old: Vec<_> = old.cloned().collect();
        self.keep_in_sight(&old);
        services.remove(name);
        drop(services);
        for service in self.versions_of(name) {
            service.hold_none();
        }
        self.shared.forget_crashes_of_others(name, &[]);
        for old in old {
            // Another function of this name may have other ones.
            old.launcher().withdraw_secrets();
            self.retire(old);
        }
    }

    /// Lets go of all functions, and so of what boots their instances.
    pub fn forget_all(&self) {
        self.served.write().expect("no holder panics").clear();
        self.retired.lock().expect("no holder panics").clear();
    }

    /// All versions of a function that are there, those included of which only sandboxes are left.
    pub fn versions_of(&self, name: &str) -> Vec<Arc<Service>> {
        let mut all = self.everything();
        all.retain(|service| service.name().as_str() == name);
        all
    }

    /// Keeps a version of which there are sandboxes of an earlier daemon, until they have ended.
    pub(crate) fn keep_for_sandboxes(&self, service: &Arc<Service>) {
        self.keep_in_sight(std::slice::from_ref(service));
        self.retire(service.clone());
    }

    /// Versions that are about to be served no longer stay among all that there are: whoever looked
    /// for their instances meanwhile would take them for gone. To be called while no other versions
    /// can be looked up.
    fn keep_in_sight(&self, old: &[Arc<Service>]) {
        self.retired.lock().expect("no holder panics").extend_from_slice(old);
    }

    fn retire(&self, old: Arc<Service>) {
        let sandboxes = old.held_count();
        if sandboxes > 0 {
            let (function, version) = (old.name(), old.version());
            tracing::info!(%function, version, sandboxes, "sandboxes of a version that is served no longer stay");
        }
        old.retire_from_service();
        let launcher = old.launcher();
        let is_in_use = self.services().iter().any(|new| Arc::ptr_eq(&new.launcher(), &launcher));
        if !is_in_use {
            launcher.stand_down();
        }
        let Ok(runtime) = Handle::try_current() else {
            // Without a runtime there are no connections to wait for.
            let mut retired = self.retired.lock().expect("no holder panics");
            return retired.retain(|service| service.instance_count() > 0);
        };
        let services = old.services.clone();
        runtime.spawn(async move {
            loop {
                // This task has it, and the list; a request that was on its way is a third.
                old.clone().wind_up(|service| Arc::strong_count(service) > 3).await;
                let mut retired = services.retired.lock().expect("no holder panics");
                // Who has found it in the list since then may make a sandbox of it.
                if old.instance_count() == 0 && Arc::strong_count(&old) <= 2 {
                    return retired.retain(|service| !Arc::ptr_eq(service, &old));
                }
                drop(retired);
                tokio::task::yield_now().await;
            }
        });
    }

    /// All services, those included of which only the last instances are left.
    pub fn everything(&self) -> Vec<Arc<Service>> {
        let mut all = self.services();
        let retired = self.retired.lock().expect("no holder panics");
        // One that has been replaced since is among both.
        let is_other = |old: &&Arc<Service>| !all.iter().any(|new| Arc::ptr_eq(new, old));
        let others: Vec<_> = retired.iter().filter(is_other).cloned().collect();
        all.extend(others);
        all
    }

    pub(super) fn services_of(&self, tenant: &Arc<Tenant>) -> Vec<Arc<Service>> {
        let services = self.served.read().expect("no holder panics");
        let of_tenant = |service: &&Arc<Service>| Arc::ptr_eq(service.tenant(), tenant);
        services.values().flat_map(Served::services).filter(of_tenant).cloned().collect()
    }

    /// The version of a function that has an instance, awake or asleep.
    pub(crate) fn service_with(
        &self,
        function: &FunctionName,
        instance: u64,
    ) -> Option<Arc<Service>> {
        let has_it = |service: &&Arc<Service>| service.has_instance(instance);
        let services = self.served.read().expect("no holder panics");
        let served = services.get(function.as_str());
        let found = served.and_then(|served| served.services().find(has_it)).cloned();
        drop(services);
        found.or_else(|| {
            let retired = self.retired.lock().expect("no holder panics");
            let mut own = retired.iter().filter(|service| service.name() == function);
            own.find(has_it).cloned()
        })
    }

    /// The service with this instance, be it of an older build of its function.
    pub fn service_of(&self, instance: u64) -> Option<Arc<Service>> {
        let has_it = |service: &&Arc<Service>| service.has_instance(instance);
        let services = self.served.read().expect("no holder panics");
        let found = services.values().flat_map(Served::services).find(has_it).cloned();
        drop(services);
        // One that is served no longer is there before it is missing above.
        found.or_else(|| {
            let retired = self.retired.lock().expect("no holder panics");
            retired.iter().find(has_it).cloned()
        })
    }

    /// All instances that are there, awake or asleep, or may be taken over yet.
    pub fn instance_ids(&self) -> HashSet<u64> {
        let mut ids = self.shared.left_ids();
        for service in self.everything() {
            service.add_ids(&mut ids);
        }
        ids
    }
}
