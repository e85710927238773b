//! The instances of a function that are asleep, their clients, and who of them is being woken.

use crate::asleep::Asleep;
use crate::instance::KeptConnections;
use crate::remote::Execs;
use crate::service::Slots;
use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;
use std::time::Instant;
use tokio::task::AbortHandle;

/// The instances of a function that are asleep.
#[derive(Default)]
pub(in crate::service) struct Sleepers {
    all: BTreeMap<u64, Sleeper>,
    /// Those of them that nobody is waking, by how long they have been idle.
    resting: BTreeSet<(Instant, u64)>,
    /// They are left to the next daemon: those that wake up in vain are lost.
    is_closed: bool,
}

/// An instance that is asleep, and the clients that are connected to it.
pub(in crate::service) struct Sleeper {
    pub asleep: Arc<Asleep>,
    pub clients: KeptConnections,
    /// Processes in it that were started from outside; they end with this value.
    pub execs: Option<Arc<Execs>>,
    /// Waits for a byte of theirs; ends with this value.
    pub watch: Option<AbortHandle>,
}

impl Sleeper {
    pub(super) fn new(asleep: Arc<Asleep>, execs: Arc<Execs>) -> Self {
        Self { asleep, clients: KeptConnections::default(), execs: Some(execs), watch: None }
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        if let Some(watch) = &self.watch {
            watch.abort();
        }
        if let Some(execs) = &self.execs {
            execs.close();
        }
    }
}

impl Sleepers {
    /// One more; gives it back if there may be none any more.
    pub(super) fn insert(&mut self, sleeper: Sleeper) -> Result<(), Sleeper> {
        if self.is_closed {
            return Err(sleeper);
        }
        self.resting.insert((sleeper.asleep.idle_since, sleeper.asleep.id()));
        self.all.insert(sleeper.asleep.id(), sleeper);
        Ok(())
    }

    /// One that somebody is about to wake: the given one, or the one that was used last.
    pub(in crate::service) fn begin_to_wake(&mut self, id: Option<u64>) -> Option<Arc<Asleep>> {
        let id = id.or_else(|| self.resting.last().map(|(_, id)| *id))?;
        let found = &self.all.get(&id)?.asleep;
        self.resting.remove(&(found.idle_since, id)).then(|| found.clone())
    }

    /// One that nobody is waking and that has room for one more client; those that are held have
    /// none.
    pub(super) fn one_with_room(&self, most: u32, held: &BTreeSet<u64>) -> Option<u64> {
        let has_room = |id: &u64| {
            !held.contains(id)
                && self.all.get(id).is_some_and(|sleeper| sleeper.clients.len() < most as usize)
        };
        self.resting.iter().rev().map(|(_, id)| *id).find(has_room)
    }

    /// One that was to be woken rests again, if it is still among these.
    pub(super) fn rest_again(&mut self, asleep: &Asleep) {
        if self.contains(asleep.id()) {
            self.resting.insert((asleep.idle_since, asleep.id()));
        }
    }

    /// Whether somebody is waking one.
    pub(in crate::service) fn is_waking(&self, id: u64) -> bool {
        self.contains(id) && !self.resting.iter().any(|(_, resting)| *resting == id)
    }

    /// Whether some are being woken.
    pub(super) fn are_waking(&self) -> bool {
        self.all.len() > self.resting.len()
    }

    /// One of them.
    pub(super) fn get(&self, id: u64) -> Option<&Sleeper> {
        self.all.get(&id)
    }

    /// The connections of clients to one, which has none from now on.
    pub(super) fn take_clients(&mut self, id: u64) -> Option<KeptConnections> {
        self.all.get_mut(&id).map(|sleeper| mem::take(&mut sleeper.clients))
    }

    pub(in crate::service) fn remove(&mut self, id: u64) -> Option<Sleeper> {
        let found = self.all.remove(&id)?;
        self.resting.remove(&(found.asleep.idle_since, id));
        Some(found)
    }

    /// Takes out one that nobody is waking and that has been idle since `until` or longer.
    pub(super) fn take_idle_since(
        &mut self,
        until: Instant,
        held: &BTreeSet<u64>,
    ) -> Option<Sleeper> {
        let (since, id) = *self.resting.iter().find(|(_, id)| !held.contains(id))?;
        if since > until { None } else { self.remove(id) }
    }

    pub(in crate::service) fn iter(&self) -> impl Iterator<Item = &Asleep> {
        self.all.values().map(|sleeper| &*sleeper.asleep)
    }

    /// Processes in one that were started from outside.
    pub(in crate::service) fn execs(&self, id: u64) -> Option<Arc<Execs>> {
        self.all.get(&id)?.execs.clone()
    }

    /// Connections of clients to one.
    pub(in crate::service) fn connections(&self, id: u64) -> usize {
        self.all.get(&id).map_or(0, |sleeper| sleeper.clients.len())
    }

    pub(in crate::service) fn contains(&self, id: u64) -> bool {
        self.all.contains_key(&id)
    }

    pub(in crate::service) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn take_all(&mut self) -> Vec<Sleeper> {
        self.resting.clear();
        mem::take(&mut self.all).into_values().collect()
    }

    /// Takes out those that are none of these.
    pub(super) fn take_others(&mut self, held: &BTreeSet<u64>) -> Vec<Sleeper> {
        let others: Vec<u64> = self.all.keys().filter(|id| !held.contains(id)).copied().collect();
        others.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    /// Whether there may be none any more.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// From now on there are none.
    pub(super) fn close(&mut self) -> Vec<Sleeper> {
        self.is_closed = true;
        self.take_all()
    }
}

impl Slots {
    /// One that somebody is about to wake for a client that is not connected to it yet, where
    /// `most` may be.
    pub(super) fn wake_for_one_more(&mut self, most: u32) -> Option<Arc<Asleep>> {
        let id = self.asleep.one_with_room(most, &self.held)?;
        self.asleep.begin_to_wake(Some(id))
    }
}
