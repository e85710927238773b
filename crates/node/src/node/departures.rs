//! Instances that are gone, of which something is kept by their numbers: that they are sandboxes, their rules
//! and limits. Whoever keeps it hears of those alone, and does not look at all the others.

use super::{NodeState, Served};
use crate::service::Service;
use std::collections::HashSet;
use std::mem;
use std::sync::Arc;
use thaw_home::config::FunctionName;

impl NodeState {
    /// An instance is gone, or soon will be.
    pub(crate) fn departs(&self, id: u64) {
        self.departures.lock().expect("no holder panics").push(id);
    }

    /// An instance is gone that was a sandbox or not.
    pub(crate) fn is_gone(&self, id: u64, was_sandbox: bool) {
        if was_sandbox || self.egress.knows(id) || self.limits.of(id).is_some() {
            self.departs(id);
        }
    }

    /// Those that are gone, or soon will be, since this was called last.
    pub(crate) fn take_departures(&self) -> Vec<u64> {
        mem::take(&mut *self.departures.lock().expect("no holder panics"))
    }

    /// The version of a function that has an instance, awake or asleep.
    pub(crate) fn service_with(
        &self,
        function: &FunctionName,
        instance: u64,
    ) -> Option<Arc<Service>> {
        let has_it = |service: &&Arc<Service>| service.has_instance(instance);
        let services = self.services.read().expect("no holder panics");
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
        let services = self.services.read().expect("no holder panics");
        let found = services.values().flat_map(Served::services).find(has_it).cloned();
        drop(services);
        // One that is served no longer is there before it is missing above.
        found.or_else(|| {
            let retired = self.retired.lock().expect("no holder panics");
            retired.iter().find(has_it).cloned()
        })
    }

    /// Instances that an earlier daemon has put to sleep, and that are not taken in yet.
    pub(crate) fn left_ids(&self) -> HashSet<u64> {
        let left = self.left_asleep.lock().expect("no holder panics");
        left.iter().map(|one| one.note.id).collect()
    }

    /// All instances that are there, awake or asleep, or may be taken over yet.
    pub fn instance_ids(&self) -> HashSet<u64> {
        let mut ids = self.left_ids();
        for service in self.everything() {
            service.add_ids(&mut ids);
        }
        ids
    }
}
