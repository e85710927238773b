//! Instances that are asleep: who they are, and how they wake.
//!
//! A client is given to a live instance if one has a free place, else to one that is asleep, which
//! is booted from its file for that, and only then to a new one. So the instances of a function,
//! those that are asleep included, are never more than it may have. One that is asleep holds
//! nothing of the node's capacity, and nothing of its tenant's room but bytes on disk.

use super::held::use_egress;
use super::{Service, Slot, Slots};
use crate::asleep::{Asleep, AsleepNote, Going, Left};
use crate::boots::BootKind;
use crate::config::{ByteSize, QUOTAS_FILE};
use crate::instance::{
    Client, Command, ConnectionTable, Decrypted, Delivery, End, InstanceState, KeptConnections,
    Launched, Outcome, Place, Placed, SleepingInstance, Supervisor, WakeError,
};
use crate::reactor::watch;
use crate::service::place::PlaceError;
use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::mem;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout, timeout_at};

/// How long an instance may take to be put to sleep.
const SLEEP_PATIENCE: Duration = Duration::from_secs(60);
/// How long until it is looked again whether there is room for one that is wanted.
const ROOM_AGAIN: Duration = Duration::from_millis(50);
/// How long one may take to wake for the control plane.
const WAKE_PATIENCE: Duration = Duration::from_secs(30);

/// The instances of a function that are asleep.
#[derive(Default)]
pub(super) struct Sleepers {
    all: BTreeMap<u64, Sleeper>,
    /// Those of them that nobody is waking, by how long they have been idle.
    resting: BTreeSet<(Instant, u64)>,
    /// They are left to the next daemon: those that wake up in vain are lost.
    is_closed: bool,
}

/// An instance that is asleep, and the clients that are connected to it.
struct Sleeper {
    asleep: Arc<Asleep>,
    clients: KeptConnections,
    /// Waits for a byte of theirs; ends with this value.
    watch: Option<AbortHandle>,
}

impl Sleeper {
    fn new(asleep: Arc<Asleep>) -> Self {
        Self { asleep, clients: KeptConnections::default(), watch: None }
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        if let Some(watch) = &self.watch {
            watch.abort();
        }
    }
}

impl Sleepers {
    /// One more; gives it back if there may be none any more.
    fn insert(&mut self, sleeper: Sleeper) -> Result<(), Sleeper> {
        if self.is_closed {
            return Err(sleeper);
        }
        self.resting.insert((sleeper.asleep.idle_since, sleeper.asleep.id()));
        self.all.insert(sleeper.asleep.id(), sleeper);
        Ok(())
    }

    /// One that somebody is about to wake: the given one, or the one that was used last.
    fn begin_to_wake(&mut self, id: Option<u64>) -> Option<Arc<Asleep>> {
        let id = id.or_else(|| self.resting.last().map(|(_, id)| *id))?;
        let found = &self.all.get(&id)?.asleep;
        self.resting.remove(&(found.idle_since, id)).then(|| found.clone())
    }

    /// One that nobody is waking and that has room for one more client; those that are held have
    /// none.
    fn one_with_room(&self, most: u32, held: &BTreeSet<u64>) -> Option<u64> {
        let has_room = |id: &u64| {
            !held.contains(id)
                && self.all.get(id).is_some_and(|sleeper| sleeper.clients.len() < most as usize)
        };
        self.resting.iter().rev().map(|(_, id)| *id).find(has_room)
    }

    /// Whether some are being woken.
    fn are_waking(&self) -> bool {
        self.all.len() > self.resting.len()
    }

    /// The connections of clients to one, which has none from now on.
    fn take_clients(&mut self, id: u64) -> Option<KeptConnections> {
        self.all.get_mut(&id).map(|sleeper| mem::take(&mut sleeper.clients))
    }

    fn remove(&mut self, id: u64) -> Option<Sleeper> {
        let found = self.all.remove(&id)?;
        self.resting.remove(&(found.asleep.idle_since, id));
        Some(found)
    }

    /// Takes out one that nobody is waking and that has been idle since `until` or longer.
    fn take_idle_since(&mut self, until: Instant, held: &BTreeSet<u64>) -> Option<Sleeper> {
        let (since, id) = *self.resting.iter().find(|(_, id)| !held.contains(id))?;
        if since > until { None } else { self.remove(id) }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Asleep> {
        self.all.values().map(|sleeper| &*sleeper.asleep)
    }

    /// Connections of clients to one.
    pub fn connections(&self, id: u64) -> usize {
        self.all.get(&id).map_or(0, |sleeper| sleeper.clients.len())
    }

    pub fn contains(&self, id: u64) -> bool {
        self.all.contains_key(&id)
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    fn take_all(&mut self) -> Vec<Sleeper> {
        self.resting.clear();
        mem::take(&mut self.all).into_values().collect()
    }

    /// Takes out those that are none of these.
    fn take_others(&mut self, held: &BTreeSet<u64>) -> Vec<Sleeper> {
        let others: Vec<u64> = self.all.keys().filter(|id| !held.contains(id)).copied().collect();
        others.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    /// From now on there are none.
    fn close(&mut self) -> Vec<Sleeper> {
        self.is_closed = true;
        self.take_all()
    }
}

impl Slots {
    /// One that somebody is about to wake for a client that is not connected to it yet, where
    /// `most` may be.
    fn wake_for_one_more(&mut self, most: u32) -> Option<Arc<Asleep>> {
        let id = self.asleep.one_with_room(most, &self.held)?;
        self.asleep.begin_to_wake(Some(id))
    }
}

/// The right to wake an instance, which sleeps on if it is dropped.
pub(super) struct Waking {
    service: Arc<Service>,
    asleep: Option<Arc<Asleep>>,
}

impl Waking {
    pub fn asleep(&self) -> &Arc<Asleep> {
        self.asleep.as_ref().expect("it is taken when this is dropped")
    }

    /// It is none of those that are asleep any more.
    fn done(mut self) -> Option<Sleeper> {
        let asleep = self.asleep.take()?;
        self.service.slots().asleep.remove(asleep.id())
    }
}

impl Drop for Waking {
    fn drop(&mut self) {
        let Some(asleep) = self.asleep.take() else { return };
        let mut slots = self.service.slots();
        if slots.asleep.contains(asleep.id()) {
            slots.asleep.resting.insert((asleep.idle_since, asleep.id()));
        }
        drop(slots);
        self.service.freed.notify_waiters();
    }
}

/// Waits until one of the clients of an instance that is asleep sends something or goes away, and
/// wakes the instance.
async fn watch_clients(service: Arc<Service>, id: u64, clients: Vec<Arc<Client>>) {
    let mut watched = Vec::new();
    for client in clients {
        match client.socket.try_clone().and_then(watch) {
            Ok(socket) => watched.push(socket),
            // Nobody would hear of this client: that is taken for a byte of it.
            Err(_) => {
                watched.clear();
                break;
            }
        }
    }
    if !watched.is_empty() {
        poll_fn(|context| {
            let is_ready = |socket: &AsyncFd<OwnedFd>| socket.poll_read_ready(context).is_ready();
            if watched.iter().any(is_ready) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
    drop(watched);
    // This task ends with the sleep.
    tokio::spawn(async move { service.wake_for_client(id).await });
}

/// How a boot for a client is to begin.
pub(super) enum Beginning {
    /// From the image of the function.
    Image,
    /// From the file of an instance that is asleep.
    File(Waking),
    /// Not yet: an instance that is being woken will have a free place.
    Later,
}

impl Service {
    /// How many instances are asleep.
    pub fn asleep_count(&self) -> usize {
        self.slots().asleep.len()
    }

    /// Whether one that is asleep has this number.
    pub(crate) fn is_asleep(&self, id: u64) -> bool {
        self.slots().asleep.contains(id)
    }

    /// Whether one is hibernated.
    pub(crate) fn has_hibernated(&self) -> bool {
        self.slots().values().any(|slot| slot.state == InstanceState::Hibernated)
    }

    /// Whether its instances are left to the next daemon.
    pub(crate) fn persists(&self) -> bool {
        self.config.persist && !self.slots().asleep.is_closed
    }

    // On the way to sleep.

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
    pub(super) fn put_to_sleep_or_end(&self, id: u64) -> bool {
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
    ) -> Result<(), KeptConnections> {
        let mut slots = self.slots();
        let id = asleep.id();
        // Whoever is about to be connected is counted.
        let is_silent = |slot: &Slot| {
            slot.state.takes_connections()
                && slot.state != InstanceState::Booting
                && slot.connections as usize == clients.len()
        };
        let may_stay = !slots.asleep.is_closed && self.may_keep(&slots, id);
        if !may_stay || !slots.get(&id).is_some_and(is_silent) {
            drop(slots);
            return Err(clients);
        }
        let slot = slots.remove(&id);
        let mut sleeper = Sleeper::new(Arc::new(asleep));
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

    // On the way back.

    /// How a boot for a client is to begin, who has room for it.
    pub(super) fn beginning(self: &Arc<Self>) -> Beginning {
        let mut slots = self.slots();
        let most = self.config.limits.concurrency.get();
        match slots.wake_for_one_more(most) {
            Some(asleep) => Beginning::File(Waking { service: self.clone(), asleep: Some(asleep) }),
            // It has room for one more beside the client that wakes it.
            None if slots.asleep.are_waking() && most > 1 => Beginning::Later,
            None => Beginning::Image,
        }
    }

    /// Waits while instances are being woken that may have a free place then.
    pub(super) async fn wait_for_waking(&self, deadline: tokio::time::Instant) {
        if self.is_single_use() || self.config.limits.concurrency.get() == 1 {
            return;
        }
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // What happens from now on is noticed.
            freed.as_mut().enable();
            let will_be_free = {
                let slots = self.slots();
                let most = self.config.limits.concurrency.get();
                slots.asleep.are_waking() && slots.asleep.one_with_room(most, &slots.held).is_none()
            };
            if !will_be_free || timeout_at(deadline, freed).await.is_err() {
                return;
            }
        }
    }

    /// Bytes of memory that the boot for a client takes of the tenant: those of an instance, and
    /// those that decrypting the one takes that is to be woken for it.
    pub(super) fn memory_to_begin(&self) -> u64 {
        let asleep = {
            let slots = self.slots();
            let most = self.config.limits.concurrency.get();
            let id = slots.asleep.one_with_room(most, &slots.held);
            id.and_then(|id| slots.asleep.all.get(&id)).map(|sleeper| sleeper.asleep.clone())
        };
        asleep.map_or(self.memory(), |asleep| self.memory_to_wake(&asleep))
    }

    /// The same to wake this one. One that never wakes takes no more than a new instance.
    pub(super) fn memory_to_wake(&self, asleep: &Asleep) -> u64 {
        match self.never_wakes(asleep.id(), asleep.decrypted_len()) {
            None => self.needs_awake(asleep),
            Some(_) => self.memory(),
        }
    }

    /// What an instance that is asleep takes once it runs, its decrypted memory included.
    fn needs_awake(&self, asleep: &Asleep) -> u64 {
        let own = self.limits_of(asleep.id()).memory;
        own.saturating_add(asleep.decrypted_len().unwrap_or_default())
    }

    /// Why an instance cannot be woken with so many bytes of decrypted memory, even if the tenant
    /// has no other: one sentence for the operator.
    pub(crate) fn never_wakes(&self, id: u64, decrypted: Option<u64>) -> Option<String> {
        let (own, decrypted) = (self.limits_of(id).memory, decrypted?);
        self.tenant.room().never_keeps(own.saturating_add(decrypted)).then(|| {
            let (tenant, own, decrypted) = (self.tenant.name(), ByteSize(own), ByteSize(decrypted));
            format!(
                "the quota of {tenant} never has room for {own} of an instance and {decrypted} of \
                 decrypted memory, which it needs to wake; have the operator raise `memory` in \
                 {QUOTAS_FILE}, or lower `limits.memory`"
            )
        })
    }

    /// Boots an instance that is asleep, for a client or for nobody. The place has room for it and
    /// for its decrypted memory ([`Service::memory_to_wake`]).
    pub(super) async fn wake_up(
        self: &Arc<Self>,
        waking: Waking,
        first: Option<Delivery>,
        mut place: Place,
    ) -> Result<Placed, PlaceError> {
        let (launcher, asleep) = (self.launcher.clone(), waking.asleep().clone());
        let decrypted_len = asleep.decrypted_len();
        if place.lease.memory() < self.needs_awake(&asleep) {
            // The quota was lowered while it slept, or another one slept a moment ago.
            return Err(match self.never_wakes(asleep.id(), decrypted_len) {
                Some(why) => self.lose(waking, why),
                None => self.cannot_wake(
                    &waking,
                    "there is no room for its memory; it sleeps on, try again",
                ),
            });
        }
        let client = first.as_ref().map(|delivery| delivery.client.clone());
        let clients = self.slots().asleep.all.get(&asleep.id()).map(|one| one.clients.clients());
        let clients = clients.unwrap_or_default();
        if let Some(opening) = launcher.clone().opening() {
            // If it fails, waking does, and says why.
            let _ = opening.await;
        }
        let decrypted = decrypted_len.map(|bytes| Decrypted {
            memory: Arc::new(place.lease.split_off(bytes)),
            owner_key: asleep.owner_key(),
        });
        let limits = self.limits_of(asleep.id());
        place.lease.shrink_to(limits.memory);
        let unsealer = match &decrypted {
            Some(_) => Some(self.tenant.unsealer().await),
            None => None,
        };
        let egress = self.shared.egress().clone();
        let boot = move || {
            let later = |error: &dyn ToString| WakeError::Later(error.to_string());
            let function = launcher.egress();
            let own = egress.of(asleep.id(), function.as_deref()).map_err(WakeError::Later)?;
            let file = asleep.open().map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => WakeError::Lost("its file is gone".to_owned()),
                std::io::ErrorKind::InvalidData => WakeError::Lost(error.to_string()),
                _ => later(&error),
            })?;
            drop(unsealer);
            let launcher = launcher.waken(
                file,
                asleep.checksum(),
                asleep.base(),
                clients,
                decrypted,
                limits,
            )?;
            let mut launched = launcher.launch(client.as_deref()).map_err(|error| later(&error))?;
            if let Some(own) = own {
                use_egress(&mut launched, own).map_err(WakeError::Later)?;
            }
            Ok(Launched { kind: BootKind::Asleep, ..launched })
        };
        let launched = tokio::task::spawn_blocking(boot).await.expect("a launcher does not panic");
        match launched {
            Ok(launched) => Ok(self.adopt_woken(launched, waking, first, place)),
            Err(WakeError::Later(why)) => {
                Err(self.cannot_wake(&waking, &format!("{why}; it sleeps on, try again")))
            }
            Err(WakeError::Lost(why)) => Err(self.lose(waking, why)),
        }
    }

    /// An instance will never wake. Whoever comes next gets a new one.
    fn lose(&self, waking: Waking, why: String) -> PlaceError {
        let refused = self.cannot_wake(&waking, &format!("{why}; its state is lost"));
        if let Some(mut lost) = waking.done() {
            mem::take(&mut lost.clients).end(&Outcome::Gone(End::Failed(why)));
        }
        self.shared.metrics().lost_asleep(self.name());
        self.freed.notify_waiters();
        refused
    }

    fn cannot_wake(&self, waking: &Waking, why: &str) -> PlaceError {
        let instance = waking.asleep().id();
        tracing::error!(function = %self.name(), instance, "cannot wake an instance that is asleep: {why}");
        PlaceError::CannotWake(format!("instance {instance} was asleep and cannot be woken: {why}"))
    }

    /// Makes an instance that was asleep a live one of the same number.
    fn adopt_woken(
        self: &Arc<Self>,
        launched: Launched,
        waking: Waking,
        first: Option<Delivery>,
        place: Place,
    ) -> Placed {
        let asleep = waking.asleep().clone();
        let id = asleep.id();
        let placed = Placed { instance: id, waited: false };
        let (commands, receiver) = mpsc::unbounded_channel();
        let connector = launched.instance.connector();
        let table = Arc::new(ConnectionTable::new(connector, commands, &self.config));
        let booted = UNIX_EPOCH.checked_add(Duration::from_millis(asleep.booted_ms));
        let age = booted.and_then(|booted| booted.elapsed().ok()).unwrap_or_default();
        let now = Instant::now();
        let mut slot = Slot {
            state: InstanceState::Booting,
            connections: first.is_some().into(),
            table: table.clone(),
            pid: launched.instance.pid(),
            started: now.checked_sub(age).unwrap_or(now),
            served: asleep.served,
            idle_since: first.is_none().then_some(now),
            upstreams: Vec::new(),
            was_full: false,
            ending: place.lease.ending(),
            is_unwanted: false,
        };
        let client = first.as_ref().map(|delivery| delivery.client.clone());
        if let Some(first) = first {
            table.adopt(first, placed);
        }
        let (service, owned) = (self.clone(), table.clone());
        let supervisor = match client {
            Some(client) => Supervisor::new(id, service, launched, receiver, owned, &client, place),
            None => Supervisor::adopted(id, service, launched.instance, receiver, owned, place),
        };
        // It is never in both lists, nor in none, for anybody who looks.
        let mut slots = self.slots();
        if let Some(mut sleeper) = slots.asleep.remove(id) {
            slot.connections += sleeper.clients.len() as u32;
            slot.idle_since = slot.idle_since.filter(|_| slot.connections == 0);
            table.put_back(mem::take(&mut sleeper.clients));
        } else {
            // Its function was removed meanwhile, or it was to end.
            slot.is_unwanted = true;
            table.tell(Command::End);
        }
        slots.insert(id, slot);
        slots.perhaps_free.insert(id);
        drop(slots);
        drop(waking.done());
        self.shared.metrics().woken_from_sleep(self.name());
        tokio::spawn(supervisor.woken_from(asleep).run());
        self.freed.notify_waiters();
        placed
    }

    /// An instance that was asleep has ended before it was known to run. One that was killed is among
    /// those that are asleep again, if it may be.
    pub(super) fn sleeps_on(&self, slots: &mut Slots, asleep: Arc<Asleep>, end: &End) -> bool {
        let was_killed = matches!(
            end,
            End::Killed(None | Some(libc::SIGKILL)) | End::KilledInBoot(_) | End::TenantSpent
        );
        was_killed
            && self.may_keep(slots, asleep.id())
            && slots.asleep.insert(Sleeper::new(asleep)).is_ok()
    }

    /// Says what has become of an instance that was asleep and has ended before it was known to run.
    pub(super) fn did_not_wake(&self, id: u64, sleeps_on: bool, end: &End) {
        if sleeps_on {
            tracing::info!(function = %self.name(), instance = id, "an instance that was killed while it woke sleeps on");
        } else {
            tracing::warn!(function = %self.name(), instance = id, "an instance that was asleep is lost: {end}");
            self.shared.metrics().lost_asleep(self.name());
        }
    }

    /// Whether an instance may stay: of a version that is served no longer only sandboxes do.
    fn may_keep(&self, slots: &Slots, id: u64) -> bool {
        !self.is_retired() || slots.held.contains(&id)
    }

    /// Has an instance run if it is asleep; how long that took if it was.
    ///
    /// # Errors
    /// One sentence for the operator; it sleeps on, or is lost.
    pub async fn wake_if_asleep(
        self: &Arc<Self>,
        id: Option<u64>,
    ) -> Result<Option<(u64, Duration)>, String> {
        let began = Instant::now();
        let asleep = self.slots().asleep.begin_to_wake(id);
        let Some(asleep) = asleep else {
            return match id {
                // Somebody else is waking it.
                Some(id) if self.is_asleep(id) => {
                    self.wait_until_awake(id).await.map(|()| Some((id, began.elapsed())))
                }
                _ => Ok(None),
            };
        };
        let id = asleep.id();
        let waking = Waking { service: self.clone(), asleep: Some(asleep) };
        let capacity = self.shared.capacity().try_acquire_owned().map_err(|_| {
            "this node has no room for one instance more; see `thaw serve --instances`".to_owned()
        })?;
        let lease = self.tenant.room().try_enter(self.memory_to_wake(waking.asleep()));
        let lease = lease.ok_or_else(|| {
            format!("the quota of {} has no room for it; see `thaw tenants`", self.tenant.name())
        })?;
        let woken = self.wake_up(waking, None, Place { _capacity: capacity, lease }).await;
        woken.map_err(|error| match error {
            PlaceError::CannotWake(why) => why,
            error => format!("{error:?}"),
        })?;
        self.wait_until_awake(id).await?;
        Ok(Some((id, began.elapsed())))
    }

    /// Waits until an instance that is being woken runs.
    async fn wait_until_awake(&self, id: u64) -> Result<(), String> {
        let deadline = tokio::time::Instant::now() + WAKE_PATIENCE;
        loop {
            let changed = self.changed.notified();
            let freed = self.freed.notified();
            tokio::pin!(changed, freed);
            // What happens from now on is noticed.
            changed.as_mut().enable();
            freed.as_mut().enable();
            let state = {
                let slots = self.slots();
                match slots.get(&id) {
                    Some(slot) => slot.state,
                    None if slots.asleep.all.contains_key(&id)
                        && !slots.asleep.resting.iter().any(|(_, resting)| *resting == id) =>
                    {
                        InstanceState::Asleep
                    }
                    None => InstanceState::Ending,
                }
            };
            match state {
                InstanceState::Booting | InstanceState::Asleep => {}
                InstanceState::Ending => {
                    return Err(format!(
                        "instance {id} has ended while it woke; `thaw logs {}` may say why",
                        self.name()
                    ));
                }
                _ => return Ok(()),
            }
            let either = async {
                tokio::select! {
                    () = changed => {}
                    () = freed => {}
                }
            };
            if timeout_at(deadline, either).await.is_err() {
                return Err(format!("instance {id} does not run yet; see `thaw ps`"));
            }
        }
    }

    /// A client that is connected to an instance which is asleep has sent something, or has gone:
    /// wakes the instance as soon as there is room for it.
    async fn wake_for_client(self: &Arc<Self>, id: u64) {
        let deadline = tokio::time::Instant::now() + self.config.limits.queue.0;
        loop {
            match self.wake_if_asleep(Some(id)).await {
                Ok(_) => return,
                Err(_) if !self.is_asleep(id) => return,
                Err(why) if tokio::time::Instant::now() >= deadline => {
                    tracing::warn!(function = %self.name(), instance = id, "disconnected the clients of an instance that is asleep: {why}");
                    let clients = self.slots().asleep.take_clients(id);
                    if let Some(clients) = clients {
                        clients.end(&Outcome::Gone(End::Failed(why)));
                    }
                    return;
                }
                Err(_) => {}
            }
            self.shared.make_room_of(&self.tenant);
            self.shared.evict_idlest();
            sleep(ROOM_AGAIN).await;
        }
    }

    // From one daemon to the next.

    /// Whether an instance that an earlier daemon has put to sleep can be taken in.
    ///
    /// # Errors
    /// It is none of this version's: one sentence for the log.
    pub(crate) fn check_asleep(&self, note: &AsleepNote) -> Result<(), String> {
        if self.is_single_use() {
            return Err("its function has isolation = \"request\" by now".to_owned());
        }
        if self.launcher.index() != Some(note.index) {
            return Err("its function was built anew".to_owned());
        }
        if self.tenant.name().domain() != note.domain.as_ref() {
            return Err("its function is in another sharing domain by now".to_owned());
        }
        if note.kernel.is_some_and(|kernel| self.launcher.kernel_build() != Some(kernel)) {
            return Err("its function was frozen anew under another kernel build".to_owned());
        }
        Ok(())
    }

    /// Takes in an instance that an earlier daemon has put to sleep.
    ///
    /// # Errors
    /// It is none of this version's: one sentence for the log.
    pub(crate) fn take_over_asleep(&self, left: Left) -> Result<(), String> {
        self.check_asleep(&left.note)?;
        if self.slots().contains_key(&left.note.id) {
            return Err("it was awake already".to_owned());
        }
        let asleep = left.take_over(self.tenant.clone());
        let sleeper = Sleeper::new(Arc::new(asleep));
        self.slots().asleep.insert(sleeper).map_err(|_| "it is not served".to_owned())
    }

    /// Leaves all that are asleep to the next daemon; how many there are.
    pub(crate) fn keep_asleep(&self) -> usize {
        let kept = self.slots().asleep.close();
        for Sleeper { asleep, .. } in &kept {
            if let Err(error) = asleep.keep() {
                let (function, instance) = (self.name(), asleep.id());
                tracing::warn!(%function, instance, "an instance that is asleep may not outlive a loss of power: {error}");
            }
        }
        kept.len()
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
}
