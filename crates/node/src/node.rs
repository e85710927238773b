//! The node: what all functions that are served here share.

mod counted;
mod departures;
mod ending;
mod left_asleep;
mod left_execs;
mod room;

use crate::admission::Admission;
use crate::asleep::{AsleepSpace, Left};
use crate::boots::{BootRecord, RecentBoots};
use crate::crashes::{Crashes, Refreshes};
use crate::edge::Edge;
use crate::health::Failures;
use crate::joined::Joined;
use crate::metrics::Metrics;
use crate::pulls::Pulls;
use crate::remote::egress::EgressTable;
use crate::remote::limits::LimitsTable;
use crate::remote::volumes::VolumesTable;
use crate::swap::SwapSpace;
use crate::tenants::Tenants;
use crate::traces::{TraceSettings, Tracer};
use counted::MemoryByState;
use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use thaw_home::config::FunctionName;
use thaw_home::secrets::SecretStore;
use thaw_home::volumes::VolumeStore;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Most liveness probes that are under way at a time on a node.
const PROBES_MAX: usize = 64;

/// What all functions of a node share.
pub struct NodeState {
    capacity: Arc<Semaphore>,
    /// Connections that wait until an instance more may run.
    waiting: AtomicUsize,
    /// An instance has become idle while somebody waits.
    idle: Notify,
    /// How long those who wait rely on what is about to make room, if not as long as ever.
    coming_patience: OnceLock<Duration>,
    admission: Arc<Admission>,
    /// Connections of which the gateway only copies the bytes.
    joined: Arc<Joined>,
    /// Liveness probes that may be under way.
    probes: Arc<Semaphore>,
    next_connection: AtomicU64,
    next_instance: AtomicU64,
    boots: Arc<RecentBoots>,
    metrics: Metrics,
    draining: AtomicBool,
    /// Instances are left to the next daemon, and take requests until then.
    leaving: AtomicBool,
    /// What is said of clients.
    edge: Edge,
    /// Crashes outlast the service: a new image does not make them undone.
    crashes: Mutex<HashMap<(FunctionName, u32), Arc<Crashes>>>,
    refreshes: Refreshes,
    failures: Failures,
    tenants: Tenants,
    /// Where the memory of hibernated instances goes.
    swap_space: OnceLock<Arc<SwapSpace>>,
    /// Instances that an earlier daemon has put to sleep, of functions that cannot be served yet.
    left_asleep: Mutex<Vec<Left>>,
    left_execs: left_execs::LeftExecs,
    /// Numbers of instances that are gone, of which others have to be told.
    departures: Mutex<Vec<u64>>,
    /// Which instances of earlier daemons are sandboxes, of which functions and which versions of them.
    left_sandboxes: OnceLock<HashMap<u64, (FunctionName, u32)>>,
    /// Where secrets of functions are.
    secrets: OnceLock<Arc<SecretStore>>,
    /// Where instances sleep.
    asleep_space: OnceLock<Arc<AsleepSpace>>,
    /// Where sandboxes connect to.
    egress: Arc<EgressTable>,
    limits: Arc<LimitsTable>,
    /// Which volumes sandboxes have beside those of their functions.
    own_volumes: Arc<VolumesTable>,
    /// Pulls that this daemon has begun.
    pulls: Pulls,
    /// Memory of instances, as it was counted last.
    memory: MemoryByState,
    /// Records traces, if somebody wants them.
    tracer: OnceLock<Arc<Tracer>>,
}

/// Each daemon has so many bits of numbers for connections.
const CONNECTIONS_OF_A_LIFE: u32 = 40;
/// Each daemon has so many numbers for instances.
const INSTANCES_OF_A_LIFE: u64 = 1_000_000;

impl NodeState {
    /// Pulls that this daemon has begun.
    pub fn pulls(&self) -> &Pulls {
        &self.pulls
    }

    /// Memory of instances by their state, as it was counted last.
    pub(crate) fn memory_by_state(&self) -> &MemoryByState {
        &self.memory
    }

    /// A node that runs at most `instances` instances.
    pub fn new(instances: usize) -> Arc<Self> {
        Self::admitting(instances, Admission::new(instances))
    }

    /// The same with room for at most so many clients.
    pub fn with_clients(instances: usize, clients: usize) -> Arc<Self> {
        Self::admitting(instances, Admission::of(clients))
    }

    fn admitting(instances: usize, admission: Arc<Admission>) -> Arc<Self> {
        Arc::new(Self {
            capacity: Arc::new(Semaphore::new(instances.min(Semaphore::MAX_PERMITS))),
            waiting: AtomicUsize::new(0),
            idle: Notify::new(),
            coming_patience: OnceLock::new(),
            admission,
            joined: Arc::default(),
            probes: Arc::new(Semaphore::new(PROBES_MAX)),
            next_connection: AtomicU64::new(1),
            next_instance: AtomicU64::new(1),
            boots: Arc::default(),
            metrics: Metrics::default(),
            draining: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            edge: Edge::default(),
            crashes: Mutex::default(),
            refreshes: Refreshes::default(),
            failures: Failures::default(),
            tenants: Tenants::default(),
            swap_space: OnceLock::new(),
            left_asleep: Mutex::default(),
            left_execs: left_execs::LeftExecs::default(),
            departures: Mutex::default(),
            left_sandboxes: OnceLock::new(),
            secrets: OnceLock::new(),
            asleep_space: OnceLock::new(),
            egress: Arc::default(),
            limits: Arc::default(),
            own_volumes: Arc::default(),
            pulls: Pulls::default(),
            memory: MemoryByState::default(),
            tracer: OnceLock::new(),
        })
    }

    /// A number that no other connection of this node has.
    pub fn next_connection(&self) -> u64 {
        self.next_connection.fetch_add(1, Ordering::Relaxed)
    }

    /// A connection or process of an earlier daemon has this number: no new one gets it.
    pub fn number_is_taken(&self, number: u64) {
        self.next_connection.fetch_max(number.saturating_add(1), Ordering::Relaxed);
    }

    /// A number that no other live instance of this node has.
    pub fn next_instance(&self) -> u64 {
        self.next_instance.fetch_add(1, Ordering::Relaxed)
    }

    /// Begins to count where no daemon before this one can have come, as the `life`-th of its
    /// monitor: sandboxes that are taken over may still name connections of that time.
    pub fn number_life(&self, life: u32) {
        let life = u64::from(life);
        self.next_connection.fetch_max((life << CONNECTIONS_OF_A_LIFE) + 1, Ordering::Relaxed);
        // People read and type these. A daemon that had more of them shares numbers with the
        // next one in its logs.
        self.next_instance.fetch_max(life * INSTANCES_OF_A_LIFE + 1, Ordering::Relaxed);
    }

    /// An instance with this number is taken over.
    pub(crate) fn note_instance(&self, id: u64) {
        self.next_instance.fetch_max(id.saturating_add(1), Ordering::Relaxed);
    }

    /// Where sandboxes connect to.
    pub fn egress(&self) -> &Arc<EgressTable> {
        &self.egress
    }

    /// What sandboxes may use whose limits were changed.
    pub fn limits(&self) -> &Arc<LimitsTable> {
        &self.limits
    }

    /// Which volumes sandboxes have beside those of their functions.
    pub fn own_volumes(&self) -> &Arc<VolumesTable> {
        &self.own_volumes
    }

    /// The instances that have rules, limits or volumes of their own.
    pub fn ids_with_own(&self) -> BTreeSet<u64> {
        let (rules, limits, volumes) =
            (self.egress.ids(), self.limits.ids(), self.own_volumes.ids());
        rules.into_iter().chain(limits).chain(volumes).collect()
    }

    /// Forgets what an instance that is there no more had of its own.
    pub fn forget_own(&self, id: u64) {
        self.egress.forget(id);
        self.limits.forget(id);
        self.own_volumes.forget(id);
    }

    /// Counters for the outside.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// What is said of clients, and what is written down of them.
    pub fn edge(&self) -> &Edge {
        &self.edge
    }

    /// What is known of recent boots.
    pub fn boots(&self) -> &Arc<RecentBoots> {
        &self.boots
    }

    /// The crashes of a version of a function that backs off after `limit` of them in a minute.
    pub fn crashes_of(&self, function: &FunctionName, version: u32, limit: u32) -> Arc<Crashes> {
        let mut all = self.crashes.lock().expect("no holder panics");
        let version = (function.clone(), version);
        let known = all.get(&version).filter(|crashes| crashes.limit() == limit);
        let crashes = known.cloned().unwrap_or_else(|| Arc::new(Crashes::new(limit)));
        all.insert(version, crashes.clone());
        crashes
    }

    /// Versions of functions that are to be frozen anew.
    pub fn refreshes(&self) -> &Refreshes {
        &self.refreshes
    }

    /// Versions of functions that fail.
    pub fn failures(&self) -> &Failures {
        &self.failures
    }

    /// Those who share functions' quotas.
    pub fn tenants(&self) -> &Tenants {
        &self.tenants
    }

    /// Lets instances hibernate, in this directory. The first one stays.
    pub fn hibernate_in(&self, space: SwapSpace) {
        // Only a daemon that begins twice has two.
        let _ = self.swap_space.set(Arc::new(space));
    }

    /// Where the memory of hibernated instances goes; `None`: they cannot hibernate.
    pub(crate) fn swap_space(&self) -> Option<Arc<SwapSpace>> {
        self.swap_space.get().cloned()
    }

    /// Lets instances sleep, in this directory. The first one stays.
    pub fn sleep_in(&self, space: Arc<AsleepSpace>) {
        // Only a daemon that begins twice has two.
        let _ = self.asleep_space.set(space);
    }

    /// Lets functions have these secrets. The first store stays.
    pub fn read_secrets_from(&self, store: SecretStore) {
        // Only a daemon that begins twice has two.
        let _ = self.secrets.set(Arc::new(store));
    }

    /// Where secrets of functions are; `None`: there are none.
    pub fn secrets(&self) -> Option<&Arc<SecretStore>> {
        self.secrets.get()
    }

    /// The volumes of its home.
    ///
    /// # Errors
    /// One sentence: it is no daemon's.
    pub fn volumes(&self) -> Result<VolumeStore, String> {
        let secrets = self.secrets().ok_or("only a daemon has volumes")?;
        Ok(secrets.volumes())
    }

    /// Records traces from now on. The first recorder stays.
    pub fn trace_with(&self, settings: TraceSettings) -> Arc<Tracer> {
        let tracer = || Tracer::new(settings, self.metrics.traces().clone());
        self.tracer.get_or_init(tracer).clone()
    }

    /// What records traces; `None`: nothing does.
    pub fn tracer(&self) -> Option<&Arc<Tracer>> {
        self.tracer.get()
    }

    /// Where instances sleep; `None`: they cannot.
    pub(crate) fn asleep_space(&self) -> Option<&Arc<AsleepSpace>> {
        self.asleep_space.get()
    }

    /// Forgets the crashes of versions that are not served any more.
    pub(crate) fn forget_crashes_of_others(&self, name: &str, served: &[u32]) {
        let mut crashes = self.crashes.lock().expect("no holder panics");
        crashes
            .retain(|(function, version), _| function.as_str() != name || served.contains(version));
    }

    /// A place among the liveness probes of the node; `None`: all are taken.
    pub(crate) fn probe_place(&self) -> Option<OwnedSemaphorePermit> {
        self.probes.clone().try_acquire_owned().ok()
    }

    /// Connections of which the gateway only copies the bytes.
    pub(crate) fn joined(&self) -> &Arc<Joined> {
        &self.joined
    }

    /// Whom the gateway takes in.
    pub(crate) fn admission(&self) -> &Arc<Admission> {
        &self.admission
    }

    pub(crate) fn booted(&self, boot: BootRecord) {
        self.metrics.booted(&boot);
        self.boots.add(boot);
    }

    pub(crate) fn answered(&self, boot: &BootRecord) {
        self.metrics.answered(boot);
        self.boots.answered(boot);
    }

    pub(crate) fn ended(&self, function: &FunctionName, expected: bool) {
        self.metrics.ended(function, expected);
    }
}
