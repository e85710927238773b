//! Instances that are asleep from one daemon to the next: those that an earlier one has left are taken
//! over when their functions are served, and this one leaves its own to the next.

use super::{Served, Services};
use crate::asleep::Left;
use crate::service::Service;
use std::mem;
use std::sync::Arc;

impl Services {
    /// Those that are no sandboxes and belong to a function that can be served now are taken over, or
    /// end.
    pub(super) fn take_over_asleep(&self, served: &Served) {
        let active = served.active();
        if active.launcher().index().is_none() {
            // It may be served when it was frozen anew.
            return;
        }
        let mut left = self.shared.left_asleep();
        let is_its = |one: &mut Left| {
            one.note.function == *active.name() && !self.shared.is_sandbox(&one.note)
        };
        let own: Vec<Left> = left.extract_if(.., is_its).collect();
        drop(left);
        for one in own {
            let has_files =
                |service: &&Arc<Service>| service.launcher().index() == Some(one.note.index);
            let service = served.services().find(has_files).unwrap_or(active);
            self.take_in(service, one);
        }
    }

    /// Takes in the sandboxes that are of versions which are served now. Those of others stay what
    /// they are.
    pub(super) fn take_in_sandboxes(&self, served: &Served) {
        for note in self.shared.left_sandboxes_of(served.active().name()) {
            let number = self.shared.version_of_left(&note.function, note.id).unwrap_or_default();
            let is_its = |service: &&Arc<Service>| {
                [0, service.version()].contains(&number) && service.check_asleep(&note).is_ok()
            };
            if let Some(service) = served.services().find(is_its) {
                self.take_in_left(service, note.id);
            }
        }
    }

    /// Makes one of those that an earlier daemon has put to sleep an instance of a service that is
    /// among all that there are.
    pub(crate) fn take_in_left(&self, service: &Arc<Service>, instance: u64) {
        // Whoever looks for the instance meanwhile waits, and does not take it for gone.
        let mut left = self.shared.left_asleep();
        if let Some(at) = left.iter().position(|one| one.note.id == instance) {
            let one = left.swap_remove(at);
            self.take_in(service, one);
        }
    }

    /// Makes an instance that an earlier daemon has put to sleep one of a service, or ends it.
    fn take_in(&self, service: &Arc<Service>, one: Left) {
        let (function, instance) = (service.name(), one.note.id);
        if self.shared.is_sandbox(&one.note) {
            service.hold(instance);
        }
        match service.take_over_asleep(one) {
            Ok(()) => {
                tracing::info!(%function, instance, "an instance of an earlier daemon is asleep")
            }
            Err(why) => {
                self.shared.departs(instance);
                tracing::warn!(%function, instance, "ended an instance that was asleep: {why}");
            }
        }
    }

    /// Whether this instance is here, awake or asleep, or may be taken over yet.
    pub fn may_have_instance(&self, id: u64) -> bool {
        let left = self.shared.left_asleep();
        let is_left = left.iter().any(|one| one.note.id == id);
        drop(left);
        is_left || self.service_of(id).is_some()
    }

    /// Leaves instances that are asleep to the next daemon, where their functions want that; how
    /// many there are.
    pub fn keep_asleep(&self) -> usize {
        self.keep_asleep_of(Service::persists)
    }

    /// Leaves all instances that are asleep to the next daemon; how many there are.
    pub fn keep_all_asleep(&self) -> usize {
        self.keep_asleep_of(|_| true)
    }

    fn keep_asleep_of(&self, is_wanted: impl Fn(&Service) -> bool) -> usize {
        // First: what is taken in meanwhile is in one of the services.
        let left = mem::take(&mut *self.shared.left_asleep());
        left.iter().for_each(Left::keep);
        let services = self.everything();
        let wanted = services.iter().filter(|service| is_wanted(service));
        wanted.map(|service| service.keep_asleep()).sum::<usize>() + left.len()
    }
}
