//! Liveness probes: which instances are asked, and which silence means something.
//!
//! A probe is no connection of its instance: it takes no place, and an instance stays idle under it.
//! But a program that attends to one connection after the other answers a probe only when it
//! attends to nobody else. So an instance is asked while it has a free place, an idle connection of
//! the gateway ends where the probe needs its place, and a probe that was not answered says nothing
//! if requests have taken all places meanwhile.

use super::{InstanceState, Service};

impl Service {
    /// Makes room for a probe of an instance. Whether it can be asked: it has its memory and a free
    /// place, and no operator keeps it.
    pub(crate) fn begin_probe(&self, id: u64) -> bool {
        let most = self.config.limits.concurrency.get();
        let mut slots = self.slots();
        let is_held = slots.held.contains(&id);
        let Some(slot) = slots.get_mut(&id) else { return false };
        if !slot.state.has_memory() || !slot.is_free(most, is_held) {
            return false;
        }
        slot.was_full = false;
        let is_crowded = slot.connections as usize + slot.upstreams.len() >= most as usize;
        let crowded_out = if is_crowded { slot.upstreams.pop() } else { None };
        drop(slots);
        drop(crowded_out);
        true
    }

    /// Whether an instance that was asked has had a free place since then.
    pub(crate) fn was_never_full(&self, id: u64) -> bool {
        self.slots().get(&id).is_some_and(|slot| !slot.was_full)
    }

    /// Whether an instance is about to end.
    pub(crate) fn is_ending(&self, id: u64) -> bool {
        self.slots().get(&id).is_none_or(|slot| slot.state == InstanceState::Ending)
    }
}
