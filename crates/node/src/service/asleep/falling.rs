//! On the way to sleep: who is told to, and who falls asleep if nobody has come meanwhile.

use super::sleepers::Sleeper;
use super::wanted::watch_clients;
use crate::asleep::{Asleep, Going};
use crate::instance::{Command, InstanceState, KeptConnections, SleepingInstance};
use crate::remote::Execs;
use crate::service::{Service, Slot, Slots};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// How long an instance may take to be put to sleep.
const SLEEP_PATIENCE: Duration = Duration::from_secs(60);

impl Service {
    /// Puts an idle instance to sleep, the given one or else the one that has been idle longest.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub async fn put_to_sleep(&self, id: Option<u64>) -> Result<(u64, SleepingInstance), String> {
        let (reply, asleep) = oneshot::channel();
        let no_such = || {
            let which =
                id.map_or_else(|| "idle instance".to_owned(), |id| format!("idle instance {id}"));
            format!("`{}` has no {which} to put to sleep; see `thaw ps`", self.name())
        };
        if self.is_single_use() {
            return Err(no_such());
        }
        let command = Command::Sleep(Some(reply));
        // One that is named may have clients that are connected to it and silent.
        let may = |state: InstanceState| {
            state.is_idle() || id.is_some() && state != InstanceState::Booting
        };
        let id = self.tell_idle(id, may, command).ok_or_else(no_such)?;
        match timeout(SLEEP_PATIENCE, asleep).await {
            Ok(Ok(outcome)) => outcome.map(|asleep| (id, asleep)),
            Ok(Err(_)) => Err(format!("instance {id} has ended before it could be put to sleep")),
            Err(_) => Err(format!(
                "instance {id} was not put to sleep within {} s; see the log of the daemon",
                SLEEP_PATIENCE.as_secs()
            )),
        }
    }

    /// Has an instance sleep, if it is idle and can do so.
    pub(crate) fn send_to_sleep(&self, id: u64) {
        if let Some(slot) = self.slots().get(&id) {
            slot.table.tell(Command::Sleep(None));
        }
    }

    /// Has an instance sleep to make room for others, or end if it cannot; whether it is idle.
    pub(in crate::service) fn put_to_sleep_or_end(&self, id: u64) -> bool {
        let mut slots = self.slots();
        let Slots { all, leaving, held, .. } = &mut *slots;
        if held.contains(&id) {
            return false;
        }
        let Some(slot) = all.get(&id).filter(|slot| slot.state.is_idle()) else { return false };
        leaving.insert(id);
        slot.ending.announce(true);
        slot.table.tell(Command::SleepOrEnd);
        true
    }

    /// An instance is not put to sleep after all.
    pub(crate) fn stays(&self, id: u64) {
        let mut slots = self.slots();
        slots.leaving.remove(&id);
        if let Some(slot) = slots.get(&id).filter(|slot| slot.state.takes_connections()) {
            slot.ending.announce(false);
        }
    }

    /// Has all idle instances sleep.
    pub(crate) fn send_all_to_sleep(&self) {
        for slot in self.slots().values().filter(|slot| slot.state.is_idle()) {
            slot.table.tell(Command::Sleep(None));
        }
    }

    /// What there is to say of an instance that is to sleep and has had nothing to do for so long;
    /// `None`: it has ended.
    pub(crate) fn going_to_sleep(&self, id: u64, silent_for: Duration) -> Option<Going> {
        let slots = self.slots();
        let slot = slots.get(&id).filter(|slot| slot.state.takes_connections())?;
        let booted = SystemTime::now() - slot.started.elapsed();
        let booted_ms = booted.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        Some(Going {
            id,
            function: self.name().clone(),
            tenant: self.tenant.clone(),
            booted_ms: u64::try_from(booted_ms).unwrap_or(u64::MAX),
            idle_since: slot.idle_since.or_else(|| Instant::now().checked_sub(silent_for))?,
            served: slot.served,
        })
    }

    /// An instance that rests sleeps from now on, if nobody has come meanwhile. Its supervisor
    /// ends its process, and knows it no more.
    ///
    /// # Errors
    /// It is wanted and has to go on, with these clients; its files are gone.
    pub(crate) fn falls_asleep(
        self: &Arc<Self>,
        asleep: Asleep,
        clients: KeptConnections,
        execs: &Arc<Execs>,
    ) -> Result<(), KeptConnections> {
        let mut slots = self.slots();
        let id = asleep.id();
        // Whoever is about to be connected is counted.
        let is_silent = |slot: &Slot| {
            slot.state.takes_connections()
                && slot.state != InstanceState::Booting
                && slot.connections as usize == clients.len()
        };
        let may_stay = !slots.asleep.is_closed() && self.may_keep(&slots, id);
        if !may_stay || !slots.get(&id).is_some_and(is_silent) {
            drop(slots);
            return Err(clients);
        }
        let slot = slots.remove(&id);
        execs.fall_asleep();
        let mut sleeper = Sleeper::new(Arc::new(asleep), execs.clone());
        if clients.len() > 0 {
            let watch = watch_clients(self.clone(), id, clients.clients());
            sleeper.watch = Some(tokio::spawn(watch).abort_handle());
        }
        sleeper.clients = clients;
        let refused = slots.asleep.insert(sleeper);
        drop(slots);
        // The gateway's connections to it, which the guest has no part of any more.
        drop((slot, refused));
        self.shared.metrics().fell_asleep(self.name());
        self.freed.notify_waiters();
        self.changed.notify_waiters();
        Ok(())
    }

    /// Whether an instance may stay: of a version that is served no longer only sandboxes do.
    pub(super) fn may_keep(&self, slots: &Slots, id: u64) -> bool {
        !self.is_retired() || slots.held.contains(&id)
    }

    /// Instances that have been idle longest of those that are hibernated, since when, for the
    /// node to put to sleep.
    pub(crate) fn idle_hibernated(&self) -> Vec<(Instant, u64)> {
        let slots = self.slots();
        let is_hibernated = |(id, slot): &(&u64, &Slot)| {
            slot.state == InstanceState::Hibernated && !slots.held.contains(id)
        };
        let hibernated = slots.iter().filter(is_hibernated);
        hibernated.filter_map(|(id, slot)| Some((slot.idle_since?, *id))).collect()
    }

    /// Whether one is hibernated.
    pub fn has_hibernated(&self) -> bool {
        self.slots().values().any(|slot| slot.state == InstanceState::Hibernated)
    }
}
