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

use sleepers::Sleeper;
pub(super) use sleepers::Sleepers;
pub(super) use waking::Beginning;
#[cfg(test)]
pub(super) use waking::Waking;

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
        self.forget_sleepers(ended);
    }

    /// Sleepers that were taken out of the others have ended.
    pub(super) fn forget_sleepers(&self, ended: Vec<Sleeper>) {
        for sleeper in ended {
            let id = sleeper.asleep.id();
            drop(sleeper);
            let was_held = self.slots().held.remove(&id);
            self.shared.is_gone(id, was_held);
        }
        self.freed.notify_waiters();
    }

    /// Ends all that are asleep and are no sandboxes.
    pub(super) fn end_others_asleep(&self) {
        let mut slots = self.slots();
        let Slots { asleep, held, .. } = &mut *slots;
        let ended = asleep.take_others(held);
        drop(slots);
        self.forget_sleepers(ended);
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
            self.forget_sleepers(vec![old]);
        }
    }

    /// Ends one that is asleep, if it is.
    pub(super) fn end_asleep(&self, id: u64) {
        let found = self.slots().asleep.remove(id);
        if let Some(sleeper) = found {
            self.forget_sleepers(vec![sleeper]);
        }
    }
}
