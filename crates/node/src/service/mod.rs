//! A function that is being served: its instances, and which of them gets a
//! connection.
//!
//! Capacity is counted by two semaphores. A connection holds a permit of its
//! function's (`instances × concurrency`), an instance holds one of the node's.
//! Whoever holds a function permit finds an instance with a free place or may
//! boot one: the places of the instances that may exist are exactly as many as
//! the permits. Semaphores are fair, so connections are served as they came.
//! A request that the gateway routes is such a connection while it is under way; the
//! connection on which it went to its instance may be kept for the next one, and is then
//! no share of anything.
//!
//! An instance also holds a lease of its tenant's room. Whoever wants to boot one takes that
//! first, and the permit of the node with it in hand: a tenant that waits for itself holds
//! nothing that others wait for.
//!
//! Lock order: `Service::slots` is the only lock here, and no other is taken
//! while it is held.

mod asleep;
mod copies;
mod crowding;
mod held;
mod leave;
mod liveness;
mod place;
mod request;
mod retire;
mod volumes;

pub use copies::{CheckpointOf, CheckpointTaken, Forked, Restored};
pub use place::Placement;
pub(crate) use place::{Found, PlaceError, Reuse};
pub use volumes::VolumeFiles;

use crate::admission::OUTPUT_SHARE;
use crate::asleep::Asleep;
use crate::boots::BootRecord;
use crate::clock::monotonic_ns;
use crate::config::{ByteSize, EntryKind, FunctionConfig, FunctionName, Isolation};
use crate::crashes::{Crashes, is_crash};
use crate::health::{Health, Verdict};
use crate::instance::{
    Change, Command, ConnectionTable, End, FrozenInstance, HibernatedInstance, InstanceState,
    Launcher, LimitSetting,
};
use crate::metrics::ConnectionCounters;
use crate::node::NodeState;
use crate::tenants::{Ending, Tenant, TenantName};
use crate::upstream::Upstream;
use asleep::Sleepers;
use crowding::Crowding;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use thaw_sandbox::{Awake, LimitReached, MemoryReader};
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::time::timeout;

/// How long an instance may take to come to rest and be frozen.
const REST_PATIENCE: Duration = Duration::from_secs(60);

/// How long an instance may take to be hibernated, or to wake.
const HIBERNATE_PATIENCE: Duration = Duration::from_secs(60);

/// How long the supervisor of an instance may take to say what counts its memory.
const MEMORY_PATIENCE: Duration = Duration::from_secs(1);

/// A function that is being served.
pub struct Service {
    config: FunctionConfig,
    /// The number of the version.
    version: u32,
    /// Identifies the image that instances are booted from.
    image: String,
    launcher: Arc<dyn Launcher>,
    shared: Arc<NodeState>,
    permits: Arc<Semaphore>,
    connected: ConnectionCounters,
    crashes: Arc<Crashes>,
    tenant: Arc<Tenant>,
    /// The function's share of the output that the node keeps for clients.
    output: Arc<Semaphore>,
    slots: Mutex<Slots>,
    crowding: Crowding,
    /// An instance of this function has a free place, or is gone.
    changed: Notify,
    /// An instance has a free place: for all who wait for one in particular.
    freed: Notify,
    /// Why nobody listens at its own address.
    unreachable: Mutex<Option<String>>,
    /// How its requests go.
    health: Health,
    /// A turn for each request that waits until the image is unpacked.
    waiting_for_image: Semaphore,
    /// It is served no longer.
    retired: AtomicBool,
}

/// The live instances, by number.
#[derive(Default)]
struct Slots {
    all: BTreeMap<u64, Slot>,
    /// Those among which every free place is: boots beside a thousand busy
    /// instances must not look at each of them.
    perhaps_free: BTreeSet<u64>,
    /// Those that are asleep.
    asleep: Sleepers,
    /// Those that stay, awake or asleep, until they are told to end; no request reaches them.
    held: BTreeSet<u64>,
    /// The function is gone, and with it the reason to hold any.
    holds_none: bool,
    /// Those that are being put to sleep to make room for others.
    leaving: BTreeSet<u64>,
    /// Those that are paused and keep their memory, and why that could not be written.
    kept: BTreeMap<u64, String>,
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
    fn take_free(&mut self, most: u32) -> Option<(u64, &mut Slot)> {
        let Self { all, perhaps_free, held, .. } = self;
        perhaps_free
            .retain(|id| all.get(id).is_some_and(|slot| slot.is_free(most, held.contains(id))));
        let id = *perhaps_free.iter().max_by_key(|id| all.get(id).map(|slot| slot.idle_since))?;
        Some((id, all.get_mut(&id)?))
    }

    /// Takes an instance out. Where no instance serves twice, nobody else would ever tidy up
    /// behind it.
    fn remove(&mut self, id: &u64) -> Option<Slot> {
        self.perhaps_free.remove(id);
        self.leaving.remove(id);
        self.kept.remove(id);
        self.all.remove(id)
    }
}

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

/// What the service knows of an instance.
struct Slot {
    state: InstanceState,
    connections: u32,
    /// All its places were taken at some time since its last probe began.
    was_full: bool,
    /// What keeps them, and tells the instance's supervisor.
    table: Arc<ConnectionTable>,
    pid: u32,
    started: Instant,
    served: u64,
    idle_since: Option<Instant>,
    /// Connections of the gateway on which no request is under way. Together with those
    /// that are in use they are never more than the instance serves at a time: a server
    /// that attends to one after the other must not wait for an idle one.
    upstreams: Vec<Upstream>,
    /// Tells the tenant's room that it is about to end.
    ending: Ending,
    /// Somebody has told it to end: it does not sleep on.
    is_unwanted: bool,
}

/// An instance as the admin API shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct InstanceInfo {
    /// Number of the instance on this node.
    pub id: u64,
    /// The function.
    pub function: FunctionName,
    /// The version of the function.
    #[serde(default)]
    pub version: u32,
    /// Process id on the host; 0: it is asleep and has no process.
    pub pid: u32,
    /// What it does.
    pub state: InstanceState,
    /// Connections that it has now; of those that the gateway keeps, the ones on which a
    /// request is under way.
    pub connections: u32,
    /// Connections, and requests on connections that the gateway keeps, that it has served.
    pub served: u64,
    /// Seconds since its boot.
    pub age_s: u64,
    /// Connections that outlive the daemon together with it; `None`: it does not itself, since
    /// it is too young or there is no monitor.
    pub kept: Option<usize>,
}

impl Service {
    /// Serves a function that has one version with instances from `launcher`.
    pub fn new(
        config: FunctionConfig,
        image: String,
        launcher: Arc<dyn Launcher>,
        shared: Arc<NodeState>,
    ) -> Arc<Self> {
        Self::of_version(config, 1, image, launcher, shared)
    }

    /// Serves a version of a function with instances from `launcher`.
    pub fn of_version(
        config: FunctionConfig,
        version: u32,
        image: String,
        launcher: Arc<dyn Launcher>,
        shared: Arc<NodeState>,
    ) -> Arc<Self> {
        let limits = &config.limits;
        let places = u64::from(limits.instances.get()) * u64::from(limits.concurrency.get());
        let places = (places as usize).min(Semaphore::MAX_PERMITS);
        let connected = shared.metrics().connected(&config.name);
        let crashes = shared.crashes_of(&config.name, version, limits.crashes);
        let tenant = shared.tenants().of(TenantName::of(config.sharing.domain.as_ref()));
        let health = Health::new(config.rollback);
        Arc::new(Self {
            config,
            version,
            image,
            launcher,
            shared,
            connected,
            crashes,
            tenant,
            output: Arc::new(Semaphore::new(OUTPUT_SHARE)),
            permits: Arc::new(Semaphore::new(places)),
            slots: Mutex::default(),
            crowding: Crowding::default(),
            changed: Notify::new(),
            freed: Notify::new(),
            waiting_for_image: Semaphore::new(place::WAITING_FOR_IMAGE_MAX),
            unreachable: Mutex::default(),
            health,
            retired: AtomicBool::new(false),
        })
    }

    /// The function's name.
    pub fn name(&self) -> &FunctionName {
        &self.config.name
    }

    /// The number of the version of the function.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Why nobody listens at the function's own address; `None`: somebody does, or it has none.
    pub fn unreachable(&self) -> Option<String> {
        self.unreachable.lock().expect("no holder panics").clone()
    }

    pub(crate) fn set_unreachable(&self, problem: Option<String>) {
        *self.unreachable.lock().expect("no holder panics") = problem;
    }

    /// What all functions of the node share.
    pub fn shared(&self) -> &Arc<NodeState> {
        &self.shared
    }

    /// The function's configuration.
    pub fn config(&self) -> &FunctionConfig {
        &self.config
    }

    /// Identifies the image that instances are booted from.
    pub fn image(&self) -> &str {
        &self.image
    }

    /// What boots its instances.
    pub fn launcher(&self) -> Arc<dyn Launcher> {
        self.launcher.clone()
    }

    /// All functions of its domain.
    pub fn tenant(&self) -> &Arc<Tenant> {
        &self.tenant
    }

    /// The function's share of the output that the node keeps for clients, in the
    /// gateway's units.
    pub(crate) fn output(&self) -> &Arc<Semaphore> {
        &self.output
    }

    /// How long an idle instance or connection is kept.
    pub fn keep_alive(&self) -> Duration {
        self.config.limits.keep_alive.0
    }

    /// Whether an instance serves only one connection.
    pub fn is_single_use(&self) -> bool {
        self.config.isolation == Isolation::Request
    }

    /// The live instances, and those that are asleep.
    pub fn instances(&self) -> Vec<InstanceInfo> {
        let slots = self.slots();
        let info = |(id, slot): (&u64, &Slot)| InstanceInfo {
            id: *id,
            function: self.name().clone(),
            version: self.version,
            pid: slot.pid,
            state: slot.state,
            connections: slot.connections,
            served: slot.served,
            age_s: slot.started.elapsed().as_secs(),
            kept: slot.table.kept(),
        };
        let asleep = |asleep: &Asleep| InstanceInfo {
            id: asleep.id(),
            function: self.name().clone(),
            version: self.version,
            pid: 0,
            state: InstanceState::Asleep,
            connections: slots.asleep.connections(asleep.id()) as u32,
            served: asleep.served,
            age_s: now_ms().saturating_sub(asleep.booted_ms) / 1000,
            kept: Some(0),
        };
        slots.iter().map(info).chain(slots.asleep.iter().map(asleep)).collect()
    }

    /// When an instance was booted, in milliseconds since 1970.
    pub(crate) fn booted_ms(&self, id: u64) -> u64 {
        let age = self.slots().get(&id).map_or(Duration::ZERO, |slot| slot.started.elapsed());
        let booted = SystemTime::now() - age;
        let since_epoch = booted.duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
    }

    /// Whether one of its live instances has this number.
    pub(crate) fn has_instance(&self, id: u64) -> bool {
        let slots = self.slots();
        slots.contains_key(&id) || slots.asleep.contains(id)
    }

    /// Number of live instances, without those that are asleep.
    pub fn instance_count(&self) -> usize {
        self.slots().len()
    }

    /// Which instance has been idle longest, and since when, of those after `after` in that order.
    pub(crate) fn idlest(&self, after: Option<(Instant, u64)>) -> Option<(Instant, u64)> {
        let slots = self.slots();
        let others =
            slots.iter().filter(|(id, _)| !slots.leaving.contains(id) && !slots.held.contains(id));
        let idle = others.filter_map(|(id, slot)| Some((slot.idle_since?, *id)));
        idle.filter(|found| after.is_none_or(|after| *found > after)).min()
    }

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

    /// Ends the instance if it is idle, or puts it to sleep where its function wants that in the
    /// end; says whether it was.
    pub(crate) fn evict(&self, id: u64) -> bool {
        if self.config.limits.sleep_after.is_some() {
            return self.put_to_sleep_or_end(id);
        }
        let retired = self.retire_if_idle(id);
        if retired && let Some(slot) = self.slots().get(&id) {
            slot.table.tell(Command::End);
        }
        retired
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

    /// Ends all idle instances, those that are asleep, and every other one after its last connection.
    pub fn retire_all(&self) {
        self.end_all_asleep();
        self.slots().values_mut().for_each(Slot::retire);
    }

    /// One that was to be frozen stays, if it has not ended.
    fn reprieve(&self, id: u64) {
        if let Some(slot) = self.slots().get_mut(&id) {
            slot.reprieve();
        }
        self.freed.notify_waiters();
    }

    /// Ends one instance, whatever it does.
    pub fn kill(&self, id: u64) {
        if self.end_asleep(id) {
            return;
        }
        if let Some(slot) = self.slots().get_mut(&id) {
            slot.is_unwanted = true;
            slot.end();
            slot.table.tell(Command::End);
        }
    }

    /// Ends one instance that has taken too long.
    pub(crate) fn kill_late(&self, id: u64, why: String) {
        if let Some(slot) = self.slots().get_mut(&id) {
            slot.end();
            slot.table.tell(Command::EndLate(why));
        }
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

    /// Freezes an idle instance, the given one or else the one that has served
    /// most: its memory becomes the function's image, and it ends.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub async fn freeze(&self, id: Option<u64>) -> Result<(u64, FrozenInstance), String> {
        let (reply, frozen) = oneshot::channel();
        let (id, upstreams) = {
            let mut slots = self.slots();
            let Slots { all, held, .. } = &mut *slots;
            let is_idle = |slot: &Slot| slot.state.is_idle();
            let found = match id {
                Some(id) => all.get_mut(&id).filter(|slot| is_idle(slot)).map(|slot| (id, slot)),
                // Sandboxes are ended by those only who name them.
                None => all
                    .iter_mut()
                    .filter(|(id, slot)| is_idle(slot) && !held.contains(id))
                    .max_by_key(|(_, slot)| slot.served)
                    .map(|(id, slot)| (*id, slot)),
            };
            let (id, slot) = found.ok_or_else(|| self.nothing_to_freeze(id))?;
            // It gets no more connections.
            slot.end();
            slot.table.tell(Command::Freeze(reply));
            (id, std::mem::take(&mut slot.upstreams))
        };
        // The image has no connection in it that the guest can see the end of.
        drop(upstreams);
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
    fn withdraw(&self, id: u64) {
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
    pub(crate) async fn memory_reader(&self, id: u64) -> Option<MemoryReader> {
        let (reply, reader) = oneshot::channel();
        self.slots().get(&id)?.table.tell(Command::Memory(reply));
        timeout(MEMORY_PATIENCE, reader).await.ok()?.ok()
    }

    /// Tells the given instance something, or the one that has been idle longest of those in a
    /// state that fits; which one.
    fn tell_idle(
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

    // What supervisors report.

    /// A boot is complete.
    pub(crate) fn booted(&self, boot: BootRecord) {
        let id = boot.instance;
        self.shared.booted(boot);
        self.is_up(id);
    }

    /// An instance that was booted for no client runs.
    pub(crate) fn came_up(&self, id: u64) {
        self.is_up(id);
        self.changed.notify_waiters();
    }

    /// An instance runs, perhaps after its client has gone: whoever waits can end it now.
    fn is_up(&self, id: u64) {
        let is_idle = self.slots().get_mut(&id).is_some_and(|slot| {
            slot.change(Change::Booted { connections: slot.connections });
            slot.state.is_idle()
        });
        if is_idle {
            self.place_freed(id, true);
        }
    }

    /// An instance whose boot is known has answered.
    pub(crate) fn answered(&self, boot: &BootRecord) {
        self.shared.answered(boot);
    }

    /// The egress policy has denied connections of an instance.
    pub(crate) fn count_egress(&self, made: u64, denied: u64) {
        self.shared.metrics().egress(self.name(), made, denied);
    }

    /// An instance has lost a connection.
    pub(crate) fn disconnected(&self, id: u64) {
        let mut slots = self.slots();
        let Some(slot) = slots.get_mut(&id) else { return };
        let is_idle = slot.disconnected();
        slots.perhaps_free.insert(id);
        drop(slots);
        self.place_freed(id, is_idle);
    }

    /// A place of an instance is free; perhaps it has no other work.
    fn place_freed(&self, id: u64, is_idle: bool) {
        self.changed.notify_one();
        self.freed.notify_waiters();
        if !is_idle {
            return;
        }
        if self.is_retired() {
            self.evict_retired(id);
        } else if self.evict_beyond_quota(id) {
            // The quota was lowered while it was busy.
        } else {
            self.tenant.room().stir();
            self.shared.instance_is_idle();
        }
    }

    /// Since when an instance has been idle, if it is.
    pub(crate) fn idle_since(&self, id: u64) -> Option<Instant> {
        self.slots().get(&id)?.idle_since
    }

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

    /// Gives an instance no more connections. It stays until it ends by itself.
    pub fn retire(&self, id: u64) {
        if let Some(slot) = self.slots().get_mut(&id) {
            slot.end();
        }
    }

    /// The same, only if it has no connections; says whether it is so.
    pub(crate) fn retire_if_idle(&self, id: u64) -> bool {
        let mut slots = self.slots();
        let is_held = slots.held.contains(&id);
        match slots.get_mut(&id) {
            Some(slot) if !is_held && slot.connections == 0 && slot.state.takes_connections() => {
                slot.end();
                true
            }
            _ => false,
        }
    }

    /// An instance is gone, which was just woken from sleep or not. Gives what there is to say if
    /// nobody has expected that.
    pub(crate) fn remove(
        &self,
        id: u64,
        end: &End,
        woken_from: Option<Arc<Asleep>>,
    ) -> Option<String> {
        let (slot, sleeps_on, was_woken) = {
            // It is never in none of both lists for anybody who looks.
            let mut slots = self.slots();
            let slot = slots.remove(&id);
            let is_unwanted = slot.as_ref().is_some_and(|slot| slot.is_unwanted);
            let woken_from = woken_from.filter(|_| !is_unwanted);
            let was_woken = woken_from.is_some();
            let sleeps_on =
                woken_from.is_some_and(|asleep| self.sleeps_on(&mut slots, asleep, end));
            if !sleeps_on {
                slots.held.remove(&id);
            }
            (slot, sleeps_on, was_woken)
        };
        if was_woken {
            self.did_not_wake(id, sleeps_on, end);
        }
        // A program that has read its standard input ends; how is its client's matter.
        let has_done_its_work =
            self.config.entry.kind == EntryKind::Stdin && matches!(end, End::Exited(_));
        // The failures of its connections are counted one by one.
        let is_unnoticed = slot.as_ref().is_none_or(|slot| slot.connections == 0);
        let expected = slot.is_none_or(|slot| !slot.state.takes_connections()) || has_done_its_work;
        let unexpected = (!expected).then(|| end.to_string());
        if let Some(why) = &unexpected {
            tracing::warn!(function = %self.name(), instance = id, "an instance ended: {why}");
        }
        self.shared.ended(self.name(), expected);
        if !expected && is_crash(end) {
            self.crashed();
            if is_unnoticed {
                self.note(Verdict::Failed);
            }
        }
        self.freed.notify_waiters();
        self.changed.notify_waiters();
        unexpected
    }

    /// Which setting an instance had for a limit, and its value.
    pub(crate) fn setting_of(&self, id: u64, limit: LimitReached) -> Option<LimitSetting> {
        match limit {
            LimitReached::Memory => Some(LimitSetting::Memory(ByteSize(self.limits_of(id).memory))),
            LimitReached::CpuTime => self.config.limits.cpu_time.map(LimitSetting::CpuTime),
        }
    }

    /// How long the function still backs off after many crashes, if it does.
    pub(crate) fn backs_off(&self) -> Option<Duration> {
        self.crashes.backs_off(monotonic_ns())
    }

    fn crashed(&self) {
        let Some(backoff) = self.crashes.note(monotonic_ns()) else { return };
        tracing::warn!(
            function = %self.name(),
            "{} instances crashed within a minute; the function backs off for {} s and is frozen anew",
            self.config.limits.crashes,
            backoff.as_secs()
        );
        self.shared.metrics().backed_off(self.name());
        self.shared.refreshes().want(self.name().clone(), self.version);
    }

    /// The function has been frozen anew: whoever was guessing its addresses begins again.
    pub(crate) fn end_backoff(&self) {
        self.crashes.end_backoff();
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().expect("no holder panics")
    }
}

/// Milliseconds since 1970.
fn now_ms() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
}

impl Slot {
    fn change(&mut self, change: Change) {
        self.state = self.state.after(change);
        if !self.state.is_idle() {
            self.idle_since = None;
        }
    }

    fn end(&mut self) {
        self.change(Change::End);
        self.ending.announce(true);
    }

    /// It ends now if it is idle.
    fn retire(&mut self) {
        if self.connections == 0 {
            self.end();
            self.table.tell(Command::Stop);
        }
    }

    /// It was idle and about to end, and does not.
    fn reprieve(&mut self) {
        if self.connections == 0 && self.state == InstanceState::Ending {
            self.state = InstanceState::Idle;
            self.idle_since = Some(Instant::now());
            self.ending.announce(false);
        }
    }

    /// One connection less; says whether none is left.
    fn disconnected(&mut self) -> bool {
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
        assert!(slots.remove(&1).is_none());
        assert!(slots.perhaps_free.is_empty());
    }
}
