//! A function that is being served: its instances, and which of them gets a
//! connection. `services` has all of them: which versions get requests, and which instances end to make
//! room for others.
//!
//! Capacity is counted by two semaphores. A connection holds a permit of its
//! function's (`instances × concurrency`), an instance holds one of the node's.
//! Whoever holds a function permit finds an instance with a free place, or may
//! boot one, or waits for one that is being made: the places of the instances that may exist are
//! exactly as many as the permits. Semaphores are fair, so connections are served as they came.
//! A request that the gateway routes is such a connection while it is under way; the
//! connection on which it went to its instance may be kept for the next one, and is then
//! no share of anything.
//!
//! An instance also holds a lease of its tenant's room. Whoever wants to boot one takes that
//! first, and the permit of the node with it in hand: a tenant that waits for itself holds
//! nothing that others wait for.
//!
//! Whoever boots an instance claims its place among those that there may be, before all else (`room`).
//! Sandboxes, and others that no client waits for, have no permits, and clients that come at once may have
//! several permits for the places of one instance.
//!
//! Lock order: `Service::slots` comes first. Under it those of an instance's connections, of the tenant's
//! room (an instance that ends says so there) and of a shared connection's first use (`upstream`) are
//! taken, one at a time.

mod adopt;
mod asleep;
mod coming;
mod copies;
mod crowding;
mod ending;
mod held;
mod leave;
mod liveness;
mod memory;
mod missing;
mod own_volumes;
mod place;
mod reports;
mod request;
mod retire;
mod reuse;
mod room;
mod services;
mod slots;
mod supervisor;
mod volumes;
mod waiting;

pub use copies::{CheckpointOf, CheckpointTaken, Forked, Restored};
pub use memory::REST_PATIENCE;
pub use place::Placement;
pub(crate) use place::{Found, PlaceError};
pub(crate) use reuse::Reuse;
pub use services::{Served, Services, ShareOf, watch_cpu_time};
pub use volumes::VolumeFiles;

use crate::admission::OUTPUT_SHARE;
use crate::asleep::Asleep;
use crate::crashes::Crashes;
use crate::health::Health;
use crate::instance::{InstanceState, Launcher};
use crate::metrics::ConnectionCounters;
use crate::node::NodeState;
use crate::tenants::Tenant;
use crowding::Crowding;
use missing::MissingPrograms;
use serde::{Deserialize, Serialize};
use slots::{Slot, Slots};
use std::collections::HashSet;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thaw_home::config::{FunctionConfig, FunctionName, Isolation};
use thaw_home::tenants::TenantName;
use tokio::sync::{Notify, Semaphore};

/// A function that is being served.
pub struct Service {
    config: FunctionConfig,
    /// The number of the version.
    version: u32,
    /// Identifies the image that instances are booted from.
    image: String,
    launcher: Arc<dyn Launcher>,
    shared: Arc<NodeState>,
    /// All that are served on the node: they make room for each other, and may have the same volumes.
    services: Arc<Services>,
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
    /// An instance has a free place, or there may be one more: for all who wait for one in particular, and
    /// for those who claim a place.
    freed: Notify,
    /// Whose turn it is to find a place, or to claim one, as soon as something is freed.
    claiming: Semaphore,
    /// Why nobody listens at its own address.
    unreachable: Mutex<Option<String>>,
    /// How its requests go.
    health: Health,
    /// Programs that its log says do not exist.
    missing_programs: MissingPrograms,
    /// A turn for each request that waits until the image is unpacked.
    waiting_for_image: Semaphore,
    /// It is served no longer.
    retired: AtomicBool,
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
        services: Arc<Services>,
    ) -> Arc<Self> {
        Self::of_version(config, 1, image, launcher, services)
    }

    /// Serves a version of a function with instances from `launcher`.
    pub fn of_version(
        config: FunctionConfig,
        version: u32,
        image: String,
        launcher: Arc<dyn Launcher>,
        services: Arc<Services>,
    ) -> Arc<Self> {
        let limits = &config.limits;
        let places = u64::from(limits.instances.get()) * u64::from(limits.concurrency.get());
        let places = (places as usize).min(Semaphore::MAX_PERMITS);
        let shared = services.shared().clone();
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
            services,
            connected,
            crashes,
            tenant,
            output: Arc::new(Semaphore::new(OUTPUT_SHARE)),
            permits: Arc::new(Semaphore::new(places)),
            slots: Mutex::default(),
            crowding: Crowding::default(),
            changed: Notify::new(),
            freed: Notify::new(),
            claiming: Semaphore::new(1),
            waiting_for_image: Semaphore::new(place::WAITING_FOR_IMAGE_MAX),
            unreachable: Mutex::default(),
            health,
            missing_programs: MissingPrograms::default(),
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

    /// Says why nobody listens at the function's own address, or that somebody does.
    pub fn set_unreachable(&self, problem: Option<String>) {
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

    /// Adds the numbers of its instances, those included that are asleep.
    pub(crate) fn add_ids(&self, ids: &mut HashSet<u64>) {
        let slots = self.slots();
        ids.extend(slots.keys().copied().chain(slots.asleep.iter().map(Asleep::id)));
    }

    /// Number of live instances, without those that are asleep.
    pub fn instance_count(&self) -> usize {
        self.slots().len()
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
