//! The memory of live instances: it becomes an image, is given up, is taken back, and is counted.

use super::{Service, Slot, Slots};
use crate::instance::{Change, Command, FrozenInstance, HibernatedInstance, InstanceState};
use std::time::{Duration, Instant};
use thaw_sandbox::{Awake, MemoryReader};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// How long an instance may take to come to rest and be frozen.
pub const REST_PATIENCE: Duration = Duration::from_secs(60);

/// How long an instance may take to be hibernated, or to wake.
pub(super) const HIBERNATE_PATIENCE: Duration = Duration::from_secs(60);

/// How long the supervisor of an instance may take to say what counts its memory.
pub(super) const MEMORY_PATIENCE: Duration = Duration::from_secs(1);

/// Somebody who waits for an instance to be hibernated, and may lose interest.
struct Waiter<'a> {
    service: &'a Service,
    id: u64,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.service.withdraw(self.id);
    }
}

impl Service {
    /// Instances that are idle with memory to give up, and since when they are idle. Those that are
    /// paused are being written already, or cannot be.
    pub(crate) fn idle_with_memory(&self) -> Vec<(Instant, u64)> {
        if self.is_single_use() {
            // They end, or are put back into the state before their request.
            return Vec::new();
        }
        let slots = self.slots();
        let may = |state: InstanceState| state.may_hibernate() && state != InstanceState::Paused;
        let idle = slots.iter().filter(|(_, slot)| may(slot.state));
        idle.filter_map(|(id, slot)| Some((slot.idle_since?, *id))).collect()
    }

    /// Has an instance give up its memory, if it is still idle and can do so.
    pub(crate) fn relieve(&self, id: u64) {
        if let Some(slot) = self.slots().get(&id) {
            slot.table.tell(Command::Relieve);
        }
    }

    /// Freezes an idle instance, the given one or else the one that has served
    /// most: its memory becomes the function's image, and it ends.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub async fn freeze(&self, id: Option<u64>) -> Result<(u64, FrozenInstance), String> {
        let own_volumes = self.shared().own_volumes();
        if let Some(id) = id.filter(|id| own_volumes.has(*id)) {
            return Err(format!(
                "instance {id} has volumes of its own, which other instances of `{}` would not \
                 have; freeze another one",
                self.name()
            ));
        }
        let (reply, frozen) = oneshot::channel();
        let (id, upstreams, shared) = {
            let mut slots = self.slots();
            let Slots { all, held, .. } = &mut *slots;
            let is_idle = |slot: &Slot| slot.state.is_idle();
            let found = match id {
                Some(id) => all.get_mut(&id).filter(|slot| is_idle(slot)).map(|slot| (id, slot)),
                // Sandboxes are ended by those only who name them.
                None => all
                    .iter_mut()
                    .filter(|(id, slot)| is_idle(slot) && !held.contains(id))
                    .filter(|(id, _)| !own_volumes.has(**id))
                    .max_by_key(|(_, slot)| slot.served)
                    .map(|(id, slot)| (*id, slot)),
            };
            let (id, slot) = found.ok_or_else(|| self.nothing_to_freeze(id))?;
            // It gets no more connections.
            slot.end();
            slot.table.tell(Command::Freeze(reply));
            (id, std::mem::take(&mut slot.upstreams), slot.shared.take())
        };
        // The image has no connection in it that the guest can see the end of.
        drop((upstreams, shared));
        match timeout(REST_PATIENCE, frozen).await {
            Ok(Ok(Ok(frozen))) => Ok((id, frozen)),
            Ok(Ok(Err(why))) => {
                // If it has not ended, it is as it was.
                self.reprieve(id);
                Err(why)
            }
            Ok(Err(_)) => Err(format!("instance {id} has ended before it could be frozen")),
            Err(_) => {
                self.kill(id);
                Err(format!(
                    "instance {id} did not come to rest within {} s and was ended; a program that \
                     always computes cannot be frozen",
                    REST_PATIENCE.as_secs()
                ))
            }
        }
    }

    fn nothing_to_freeze(&self, id: Option<u64>) -> String {
        match id {
            Some(id) => format!("`{}` has no idle instance {id}; see `thaw ps`", self.name()),
            None if self.is_single_use() => format!(
                "instances of `{}` end with their connection, so none is left to freeze; set \
                 isolation = \"instance\", or use [train]",
                self.name()
            ),
            None => format!("`{}` has no idle instance to freeze; call it first", self.name()),
        }
    }

    /// One that was to be frozen stays, if it has not ended.
    fn reprieve(&self, id: u64) {
        let mut slots = self.slots();
        if let Some(slot) = slots.get_mut(&id) {
            slot.reprieve();
            slots.perhaps_free.insert(id);
        }
        drop(slots);
        self.freed.notify_waiters();
    }

    /// Has an idle instance give up its memory, the given one or else the one that has been idle
    /// longest.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub async fn hibernate(&self, id: Option<u64>) -> Result<(u64, HibernatedInstance), String> {
        let (reply, hibernated) = oneshot::channel();
        let may = |state: InstanceState| state.may_hibernate();
        let id = self.tell_idle(id, may, Command::Hibernate(reply)).ok_or_else(|| {
            let which =
                id.map_or_else(|| "idle instance".to_owned(), |id| format!("idle instance {id}"));
            format!("`{}` has no {which} with memory to give up; see `thaw ps`", self.name())
        })?;
        let waiter = Waiter { service: self, id };
        let outcome = timeout(HIBERNATE_PATIENCE, hibernated).await;
        std::mem::forget(waiter);
        match outcome {
            Ok(Ok(outcome)) => outcome.map(|hibernated| (id, hibernated)),
            Ok(Err(_)) => Err(format!("instance {id} has ended before it could be hibernated")),
            Err(_) => Err(self.lost_patience(id)),
        }
    }

    /// Nobody waits any more for an instance to be hibernated. It keeps its memory, unless it was
    /// paused: then it is written still. Why it took so long.
    fn lost_patience(&self, id: u64) -> String {
        self.withdraw(id);
        let patience = HIBERNATE_PATIENCE.as_secs();
        match self.state_of(id) {
            Some(InstanceState::Paused) => format!(
                "the memory of instance {id}, which is paused, is still being written after \
                 {patience} s; see `thaw ps`"
            ),
            _ => format!(
                "instance {id} did not come to rest within {patience} s; a program that always \
                 computes cannot be hibernated"
            ),
        }
    }

    /// Somebody does not wait any more who wanted an instance to be hibernated or paused.
    pub(super) fn withdraw(&self, id: u64) {
        if let Some(slot) = self.slots().get(&id) {
            slot.table.tell(Command::Withdraw);
        }
    }

    /// Has a hibernated instance take its memory back, the given one or else the one that has been
    /// idle longest; `None`: it was awake.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub async fn wake(&self, id: Option<u64>) -> Result<(u64, Option<Awake>), String> {
        let (reply, woken) = oneshot::channel();
        let may = |state: InstanceState| id.is_some() || state == InstanceState::Hibernated;
        let id = self.tell_idle(id, may, Command::Wake(reply)).ok_or_else(|| {
            format!("`{}` has no such hibernated instance; see `thaw ps`", self.name())
        })?;
        match timeout(HIBERNATE_PATIENCE, woken).await {
            Ok(Ok(outcome)) => outcome.map(|awake| (id, awake)),
            _ if self.is_asleep(id) => {
                Err(format!("instance {id} has just fallen asleep; try again"))
            }
            _ => Err(format!("instance {id} has ended, or did not wake")),
        }
    }

    /// What counts the memory of a live instance; `None`: it has ended, or nothing counts it.
    pub async fn memory_reader(&self, id: u64) -> Option<MemoryReader> {
        let (reply, reader) = oneshot::channel();
        self.slots().get(&id)?.table.tell(Command::Memory(reply));
        timeout(MEMORY_PATIENCE, reader).await.ok()?.ok()
    }

    /// Tells the given instance something, or the one that has been idle longest of those in a
    /// state that fits; which one.
    pub(super) fn tell_idle(
        &self,
        id: Option<u64>,
        fits: impl Fn(InstanceState) -> bool,
        command: Command,
    ) -> Option<u64> {
        let slots = self.slots();
        let fitting = slots.iter().filter(|(number, slot)| {
            id.is_none_or(|id| id == **number)
                && slot.state != InstanceState::Ending
                && fits(slot.state)
        });
        let (number, slot) = fitting.min_by_key(|(_, slot)| slot.idle_since)?;
        slot.table.tell(command);
        Some(*number)
    }

    // What supervisors report.

    /// Nothing in an instance runs, and its memory is being written.
    pub(crate) fn paused(&self, id: u64) {
        if let Some(slot) = self.slots().get_mut(&id) {
            slot.change(Change::Paused { connections: slot.connections });
        }
    }

    /// The memory of a paused instance could not be written.
    pub(crate) fn keeps_memory(&self, id: u64, why: &str) {
        self.slots().kept.insert(id, why.to_owned());
    }

    /// Why a paused instance keeps its memory, if that could not be written.
    pub(crate) fn why_memory_is_kept(&self, id: u64) -> Option<String> {
        self.slots().kept.get(&id).cloned()
    }

    /// An instance that was paused, and had its memory, goes on.
    pub(crate) fn unpaused(&self, id: u64) {
        let mut slots = self.slots();
        slots.kept.remove(&id);
        if let Some(slot) = slots.get_mut(&id) {
            slot.change(Change::Unpaused { connections: slot.connections });
        }
    }

    /// An instance has given up its memory.
    pub(crate) fn hibernated(&self, id: u64) {
        self.shared.metrics().hibernated(self.name());
        let mut slots = self.slots();
        slots.kept.remove(&id);
        if let Some(slot) = slots.get_mut(&id) {
            slot.change(Change::Hibernated { connections: slot.connections });
        }
    }

    /// An instance that was hibernated goes on.
    pub(crate) fn woken(&self, id: u64) {
        self.shared.metrics().woken(self.name());
        if let Some(slot) = self.slots().get_mut(&id) {
            slot.change(Change::Woken { connections: slot.connections });
        }
    }
}
