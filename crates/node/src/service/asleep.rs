//! Instances that are asleep: who they are, and how they wake.
//!
//! A client is given to a live instance if one has a free place, else to one that is asleep, which
//! is booted from its file for that, and only then to a new one. So the instances of a function,
//! those that are asleep included, are never more than it may have. One that is asleep holds
//! nothing of the node's capacity, and nothing of its tenant's room but bytes on disk.

mod falling;
mod inherited;
mod memory;
mod sleepers;
mod waking;
mod wanted;

pub(super) use sleepers::Sleepers;
pub(super) use waking::Beginning;

use super::{Service, Slots};
use std::time::Instant;

impl Service {
    /// How many instances are asleep.
    pub fn asleep_count(&self) -> usize {
        self.slots().asleep.len()
    }

    /// Whether one that is asleep has this number.
    pub(crate) fn is_asleep(&self, id: u64) -> bool {
        self.slots().asleep.contains(id)
    }

    /// Ends all that are asleep.
    pub fn end_all_asleep(&self) {
        let ended = self.slots().asleep.take_all();
        drop(ended);
    }

    /// Ends all that are asleep and are no sandboxes.
    pub(super) fn end_others_asleep(&self) {
        let mut slots = self.slots();
        let Slots { asleep, held, .. } = &mut *slots;
        let ended = asleep.take_others(held);
        drop(slots);
        drop(ended);
    }

    /// Ends those that have been idle for longer than the function keeps them.
    pub(crate) fn end_old_sleepers(&self) {
        let Some(until) = Instant::now().checked_sub(self.keep_alive()) else { return };
        loop {
            let old = {
                let mut slots = self.slots();
                let Slots { asleep, held, .. } = &mut *slots;
                asleep.take_idle_since(until, held)
            };
            let Some(old) = old else { return };
            tracing::debug!(function = %self.name(), instance = old.asleep.id(), "ended an instance that was asleep for long");
            self.shared.ended(self.name(), true);
            drop(old);
        }
    }

    /// Ends one that is asleep; whether there was one.
    pub(super) fn end_asleep(&self, id: u64) -> bool {
        let mut slots = self.slots();
        let found = slots.asleep.remove(id);
        if found.is_some() {
            slots.held.remove(&id);
        }
        drop(slots);
        found.is_some()
    }
}
