//! Instances that are asleep from one daemon to the next: those that an earlier one has left are taken
//! over when their functions are served, and this one leaves its own to the next.

use super::{NodeState, Served};
use crate::asleep::{AsleepNote, Left};
use crate::service::Service;
use std::collections::HashMap;
use std::mem;
use std::sync::Arc;
use thaw_home::config::FunctionName;

impl NodeState {
    /// Instances that an earlier daemon has put to sleep; each is taken over when its function is
    /// served. To be called before that.
    pub fn wake_up_with(&self, left: Vec<Left>) {
        left.iter().for_each(|one| self.note_instance(one.note.id));
        *self.left_asleep.lock().expect("no holder panics") = left;
    }

    /// Says which instances of an earlier daemon are sandboxes, of which functions and which versions
    /// of them (0: nobody knows), and numbers no other instance like one of them. To be called before
    /// functions are served; the first call counts.
    pub fn expect_sandboxes(&self, versions: HashMap<u64, (FunctionName, u32)>) {
        versions.keys().for_each(|instance| self.note_instance(*instance));
        // Only a daemon that begins twice says it again.
        let _ = self.left_sandboxes.set(versions);
    }

    /// The version of its function that a sandbox of an earlier daemon is of; `None`: the instance is
    /// none. Another instance may have had its number since.
    pub(crate) fn version_of_left(&self, function: &FunctionName, instance: u64) -> Option<u32> {
        let (of, version) = self.left_sandboxes.get()?.get(&instance)?;
        (of == function).then_some(*version)
    }

    /// Whether an instance that an earlier daemon has put to sleep is a sandbox.
    fn is_sandbox(&self, note: &AsleepNote) -> bool {
        self.version_of_left(&note.function, note.id).is_some()
    }

    /// The sandboxes of a function that an earlier daemon has put to sleep, and that are not taken in
    /// yet.
    pub(crate) fn left_sandboxes_of(&self, function: &FunctionName) -> Vec<AsleepNote> {
        let left = self.left_asleep.lock().expect("no holder panics");
        let notes = left.iter().map(|one| &one.note);
        notes.filter(|note| note.function == *function && self.is_sandbox(note)).cloned().collect()
    }

    /// Those that are no sandboxes and belong to a function that can be served now are taken over, or
    /// end.
    pub(super) fn take_over_asleep(&self, served: &Served) {
        let active = served.active();
        if active.launcher().index().is_none() {
            // It may be served when it was frozen anew.
            return;
        }
        let mut left = self.left_asleep.lock().expect("no holder panics");
        let is_its =
            |one: &mut Left| one.note.function == *active.name() && !self.is_sandbox(&one.note);
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
        for note in self.left_sandboxes_of(served.active().name()) {
            let number = self.version_of_left(&note.function, note.id).unwrap_or_default();
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
        let mut left = self.left_asleep.lock().expect("no holder panics");
        if let Some(at) = left.iter().position(|one| one.note.id == instance) {
            let one = left.swap_remove(at);
            self.take_in(service, one);
        }
    }

    /// Ends one of them.
    pub(crate) fn end_left(&self, instance: u64) {
        let mut left = self.left_asleep.lock().expect("no holder panics");
        let before = left.len();
        left.retain(|one| one.note.id != instance);
        if left.len() < before {
            self.departs(instance);
        }
    }

    /// Makes an instance that an earlier daemon has put to sleep one of a service, or ends it.
    fn take_in(&self, service: &Arc<Service>, one: Left) {
        let (function, instance) = (service.name(), one.note.id);
        if self.is_sandbox(&one.note) {
            service.hold(instance);
        }
        match service.take_over_asleep(one) {
            Ok(()) => {
                tracing::info!(%function, instance, "an instance of an earlier daemon is asleep")
            }
            Err(why) => {
                self.departs(instance);
                tracing::warn!(%function, instance, "ended an instance that was asleep: {why}");
            }
        }
    }

    /// Whether this instance is here, awake or asleep, or may be taken over yet.
    pub fn may_have_instance(&self, id: u64) -> bool {
        let left = self.left_asleep.lock().expect("no holder panics");
        let is_left = left.iter().any(|one| one.note.id == id);
        drop(left);
        is_left || self.service_of(id).is_some()
    }

    /// Ends those of functions that are gone.
    pub fn forget_left_asleep(&self, is_gone: impl Fn(&FunctionName) -> bool) {
        let mut left = self.left_asleep.lock().expect("no holder panics");
        left.retain(|one| {
            let is_gone = is_gone(&one.note.function);
            if is_gone {
                let (function, instance) = (&one.note.function, one.note.id);
                self.departs(instance);
                tracing::warn!(%function, instance, "ended an instance that was asleep: its function is gone");
            }
            !is_gone
        });
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
        let left = mem::take(&mut *self.left_asleep.lock().expect("no holder panics"));
        left.iter().for_each(Left::keep);
        let services = self.everything();
        let wanted = services.iter().filter(|service| is_wanted(service));
        wanted.map(|service| service.keep_asleep()).sum::<usize>() + left.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_makes_an_instance_of_another_function_no_sandbox() {
        let [own, other]: [FunctionName; 2] = ["own", "other"].map(|name| name.parse().unwrap());
        let node = NodeState::new(1);
        assert_eq!(node.version_of_left(&own, 3), None);
        node.expect_sandboxes(HashMap::from([(3, (own.clone(), 2))]));
        assert_eq!(node.version_of_left(&own, 3), Some(2));
        assert_eq!(node.version_of_left(&other, 3), None);
        assert_eq!(node.version_of_left(&own, 4), None);
        assert_eq!(node.next_instance(), 4);
    }
}
