//! Instances that are to end: idle ones, to make room for others, and those that somebody ends.

use super::{Service, Slot};
use crate::instance::Command;
use crate::tenants::Ending;
use std::time::Instant;

impl Service {
    /// Which instance has been idle longest, and since when, of those after `after` in that order.
    pub(crate) fn idlest(&self, after: Option<(Instant, u64)>) -> Option<(Instant, u64)> {
        let slots = self.slots();
        let others =
            slots.iter().filter(|(id, _)| !slots.leaving.contains(id) && !slots.held.contains(id));
        let idle = others.filter_map(|(id, slot)| Some((slot.idle_since?, *id)));
        idle.filter(|found| after.is_none_or(|after| *found > after)).min()
    }

    /// Ends the instance for others if it is idle, or puts it to sleep where its function wants that in
    /// the end; says whether it was. It gets its stop signal, and a part of its grace.
    pub(crate) fn evict(&self, id: u64) -> bool {
        if self.config.limits.sleep_after.is_some() {
            return self.put_to_sleep_or_end(id);
        }
        let retired = self.retire_if_idle(id);
        if retired && let Some(slot) = self.slots().get(&id) {
            slot.table.tell(Command::StopForOthers);
        }
        retired
    }

    /// Has one instance end soon that has all of its grace, since others need its room; whether there
    /// was one.
    pub(crate) fn hurry_one(&self) -> bool {
        self.slots().hurry(1) > 0
    }

    /// How many instances have all of their grace, and take their time.
    pub(crate) fn count_in_grace(&self) -> usize {
        self.slots().in_grace.len()
    }

    /// An instance has got its stop signal, and all of its grace.
    pub(crate) fn has_grace(&self, id: u64) {
        let mut slots = self.slots();
        if !slots.contains_key(&id) {
            return;
        }
        slots.in_grace.insert(id);
        drop(slots);
        // Until now it was taken for one that ends soon.
        self.shared.instance_is_in_grace(&self.tenant);
    }

    /// An instance that has got its stop signal has a part of its grace only.
    pub(crate) fn is_hurried(&self, id: u64) {
        self.slots().in_grace.remove(&id);
    }

    /// The same if the tenant has more instances than it may, those that are about to end left out.
    pub(crate) fn evict_beyond_quota(&self, id: u64) -> bool {
        let ending = self.slots().get(&id).map(|slot| slot.ending.clone());
        let Some(ending) = ending.filter(Ending::announce_if_overdrawn) else { return false };
        let is_ending = self.evict(id);
        if !is_ending && self.slots().get(&id).is_some_and(|slot| slot.state.takes_connections()) {
            ending.announce(false);
        }
        is_ending
    }

    /// Gives an instance no more connections. It stays until it ends by itself.
    pub fn retire(&self, id: u64) {
        if let Some(slot) = self.slots().get_mut(&id) {
            slot.end();
        }
        // A client that waits may have another one from now on.
        self.freed.notify_waiters();
    }

    /// The same, only if it has no connections; says whether it is so.
    pub(crate) fn retire_if_idle(&self, id: u64) -> bool {
        let mut slots = self.slots();
        let is_held = slots.held.contains(&id);
        match slots.get_mut(&id) {
            Some(slot) if !is_held && slot.connections == 0 && slot.state.takes_connections() => {
                slot.end();
                drop(slots);
                self.freed.notify_waiters();
                true
            }
            _ => false,
        }
    }

    /// Ends all idle instances, those that are asleep, and every other one after its last connection.
    pub fn retire_all(&self) {
        self.end_all_asleep();
        self.slots().values_mut().for_each(Slot::retire);
    }

    /// Ends one instance, whatever it does.
    pub fn kill(&self, id: u64) {
        // At one look: it may fall asleep, or wake, meanwhile. One that is being woken ends when it runs.
        let mut slots = self.slots();
        if let Some(slot) = slots.get_mut(&id) {
            slot.is_unwanted = true;
            slot.end();
            slot.table.tell(Command::End);
            drop(slots);
            self.freed.notify_waiters();
            return;
        }
        let sleeper = slots.asleep.remove(id);
        drop(slots);
        if let Some(sleeper) = sleeper {
            self.forget_sleepers(vec![sleeper]);
            self.changed.notify_waiters();
        }
    }

    /// Ends one instance that did not take a connection, if it is not asleep. Mostly it has just ended
    /// by itself, and its supervisor has yet to find out how; `lives_on` says why it is ended if not. One
    /// that was just woken sleeps on, as one that is killed from outside does.
    pub(super) fn end_unreachable(&self, id: u64, lives_on: Option<String>) {
        if let Some(slot) = self.slots().get_mut(&id) {
            slot.connections = slot.connections.saturating_sub(1);
            slot.is_lost |= lives_on.is_none() && slot.state.takes_connections();
            slot.end();
            slot.table.tell(lives_on.map_or(Command::EndUnreachable, Command::EndLate));
        }
        self.freed.notify_waiters();
    }

    /// Whether an instance has more than one connection, or request on one.
    pub(crate) fn serves_others(&self, id: u64) -> bool {
        self.slots().get(&id).is_some_and(|slot| slot.connections > 1)
    }

    /// Ends one instance that has taken too long.
    pub(crate) fn kill_late(&self, id: u64, why: String) {
        if let Some(slot) = self.slots().get_mut(&id) {
            slot.end();
            slot.table.tell(Command::EndLate(why));
        }
        self.freed.notify_waiters();
    }

    /// Ends all instances but those that are asleep, whatever they do; how many there are.
    pub fn kill_all(&self) -> usize {
        let mut slots = self.slots();
        for slot in slots.values_mut() {
            slot.end();
            slot.table.tell(Command::End);
        }
        slots.len()
    }
}
