//! The live instances of a function, as its service knows them: what each does, its connections, and
//! which of them have a free place.

use super::asleep::Sleepers;
use super::room::Claims;
use crate::instance::{Change, Command, ConnectionTable, InstanceState};
use crate::tenants::Ending;
use crate::upstream::{Shared, Upstream};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Instant;

/// The live instances, by number.
#[derive(Default)]
pub(super) struct Slots {
    pub all: BTreeMap<u64, Slot>,
    /// Those among which every free place is: boots beside a thousand busy
    /// instances must not look at each of them.
    pub perhaps_free: BTreeSet<u64>,
    /// Those that are asleep.
    pub asleep: Sleepers,
    /// Those that stay, awake or asleep, until they are told to end; no request reaches them.
    pub held: BTreeSet<u64>,
    /// The function is gone, and with it the reason to hold any.
    pub holds_none: bool,
    /// Those that are being made, and are none of these yet.
    pub claims: Claims,
    /// Those that are being put to sleep to make room for others.
    pub leaving: BTreeSet<u64>,
    /// Those that have all of the time to end by themselves that their function gives them: nobody has
    /// needed their room yet.
    pub in_grace: BTreeSet<u64>,
    /// Those that are paused and keep their memory, and why that could not be written.
    pub kept: BTreeMap<u64, String>,
}

impl Deref for Slots {
    type Target = BTreeMap<u64, Slot>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

impl DerefMut for Slots {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.all
    }
}

impl Slots {
    /// An instance that takes a connection where `most` may be at a time: the
    /// one that was used last.
    pub fn take_free(&mut self, most: u32) -> Option<(u64, &mut Slot)> {
        let Self { all, perhaps_free, held, .. } = self;
        perhaps_free
            .retain(|id| all.get(id).is_some_and(|slot| slot.is_free(most, held.contains(id))));
        let id = *perhaps_free.iter().max_by_key(|id| all.get(id).map(|slot| slot.idle_since))?;
        Some((id, all.get_mut(&id)?))
    }

    /// Has up to so many instances end soon that have all of their grace and no connection, since others
    /// need their room; how many there were.
    pub fn hurry(&mut self, most: usize) -> usize {
        let Self { all, in_grace, .. } = self;
        let unused = in_grace.iter().filter_map(|id| Some((*id, all.get(id)?)));
        let unused = unused.filter(|(_, slot)| slot.connections == 0).take(most);
        let hurried: Vec<_> = unused
            .map(|(id, slot)| {
                slot.table.tell(Command::StopForOthers);
                id
            })
            .collect();
        in_grace.retain(|id| !hurried.contains(id));
        hurried.len()
    }

    /// Takes an instance out. Where no instance serves twice, nobody else would ever tidy up
    /// behind it.
    pub fn remove(&mut self, id: &u64) -> Option<Slot> {
        self.perhaps_free.remove(id);
        self.leaving.remove(id);
        self.in_grace.remove(id);
        self.kept.remove(id);
        self.all.remove(id)
    }
}

/// What the service knows of an instance.
pub(super) struct Slot {
    pub state: InstanceState,
    pub connections: u32,
    /// All its places were taken at some time since its last probe began.
    pub was_full: bool,
    /// What keeps them, and tells the instance's supervisor.
    pub table: Arc<ConnectionTable>,
    pub pid: u32,
    pub started: Instant,
    pub served: u64,
    pub idle_since: Option<Instant>,
    /// Connections of the gateway on which no request is under way. Together with those
    /// that are in use they are never more than the instance serves at a time: a server
    /// that attends to one after the other must not wait for an idle one.
    pub upstreams: Vec<Upstream>,
    /// The connection of the gateway that several requests use; none with HTTP/1.1.
    pub shared: Option<Arc<Shared>>,
    /// Tells the tenant's room that it is about to end.
    pub ending: Ending,
    /// Somebody has told it to end: it does not sleep on.
    pub is_unwanted: bool,
    /// A connection has found that it had ended by itself.
    pub is_lost: bool,
}

impl Slot {
    pub fn change(&mut self, change: Change) {
        self.state = self.state.after(change);
        if !self.state.is_idle() {
            self.idle_since = None;
        }
    }

    pub fn end(&mut self) {
        self.change(Change::End);
        self.ending.announce(true);
    }

    /// It ends soon, since others want its room.
    pub fn end_for_others(&mut self) {
        self.end();
        self.table.tell(Command::StopForOthers);
    }

    /// It ends now if it is idle.
    pub fn retire(&mut self) {
        if self.connections == 0 {
            self.end();
            self.table.tell(Command::Stop);
        }
    }

    /// It was idle and about to end, and does not.
    pub fn reprieve(&mut self) {
        if self.connections == 0 && self.state == InstanceState::Ending {
            self.state = InstanceState::Idle;
            self.idle_since = Some(Instant::now());
            self.ending.announce(false);
        }
    }

    /// One connection less; says whether none is left.
    pub fn disconnected(&mut self) -> bool {
        self.connections = self.connections.saturating_sub(1);
        self.served += 1;
        self.change(Change::Connections { connections: self.connections });
        let is_idle = self.connections == 0;
        let may_wait = is_idle && self.state.takes_connections();
        self.idle_since = may_wait.then(Instant::now);
        is_idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_of_an_instance_that_is_gone() {
        let mut slots = Slots::default();
        slots.perhaps_free.insert(1);
        slots.in_grace.insert(1);
        assert!(slots.remove(&1).is_none());
        assert!(slots.perhaps_free.is_empty() && slots.in_grace.is_empty());
    }
}
