//! Instances that an earlier daemon has put to sleep, until their functions are served.

use super::NodeState;
use crate::asleep::{AsleepNote, Left};
use std::collections::{HashMap, HashSet};
use std::sync::MutexGuard;
use thaw_home::config::FunctionName;

impl NodeState {
    /// Instances that an earlier daemon has put to sleep; each is taken over when its function is
    /// served. To be called before that.
    pub fn wake_up_with(&self, left: Vec<Left>) {
        left.iter().for_each(|one| self.note_instance(one.note.id));
        *self.left_asleep() = left;
    }

    /// Those of them that are not taken over yet.
    pub(crate) fn left_asleep(&self) -> MutexGuard<'_, Vec<Left>> {
        self.left_asleep.lock().expect("no holder panics")
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
    pub(crate) fn is_sandbox(&self, note: &AsleepNote) -> bool {
        self.version_of_left(&note.function, note.id).is_some()
    }

    /// The sandboxes of a function that an earlier daemon has put to sleep, and that are not taken in
    /// yet.
    pub(crate) fn left_sandboxes_of(&self, function: &FunctionName) -> Vec<AsleepNote> {
        let left = self.left_asleep();
        let notes = left.iter().map(|one| &one.note);
        notes.filter(|note| note.function == *function && self.is_sandbox(note)).cloned().collect()
    }

    /// Instances that an earlier daemon has put to sleep, and that are not taken in yet.
    pub(crate) fn left_ids(&self) -> HashSet<u64> {
        let left = self.left_asleep();
        left.iter().map(|one| one.note.id).collect()
    }

    /// Ends one of them.
    pub(crate) fn end_left(&self, instance: u64) {
        let mut left = self.left_asleep();
        let before = left.len();
        left.retain(|one| one.note.id != instance);
        if left.len() < before {
            self.departs(instance);
        }
    }

    /// Ends those of functions that are gone.
    pub fn forget_left_asleep(&self, is_gone: impl Fn(&FunctionName) -> bool) {
        let mut left = self.left_asleep();
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
