//! The node: all functions that are served here, and what they share.

use crate::admission::Admission;
use crate::asleep::{AsleepNote, AsleepSpace, Left};
use crate::boots::{BootRecord, RecentBoots};
use crate::config::FunctionName;
use crate::crashes::{Crashes, Refreshes};
use crate::edge::Edge;
use crate::health::Failures;
use crate::joined::Joined;
use crate::metrics::Metrics;
use crate::pressure::Asked;
use crate::pulls::Pulls;
use crate::rollout::Served;
use crate::sandboxes::egress::EgressTable;
use crate::sandboxes::limits::LimitsTable;
use crate::secrets::SecretStore;
use crate::service::{InstanceInfo, Service};
use crate::swap::SwapSpace;
use crate::tenants::{Tenant, Tenants};
use crate::traces::{TraceSettings, Tracer};
use crate::triggers::Triggers;
use crate::usage::MemoryByState;
use std::collections::HashMap;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout};

/// Most liveness probes that are under way at a time on a node.
const PROBES_MAX: usize = 64;

/// What all functions of a node share.
pub struct NodeState {
    capacity: Arc<Semaphore>,
    /// Connections that wait until an instance more may run.
    waiting: AtomicUsize,
    /// An instance has become idle while somebody waits.
    idle: Notify,
    admission: Arc<Admission>,
    /// Connections of which the gateway only copies the bytes.
    joined: Joined,
    /// Liveness probes that may be under way.
    probes: Arc<Semaphore>,
    next_connection: AtomicU64,
    next_instance: AtomicU64,
    boots: RecentBoots,
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
    /// Those that were asked to give up their memory.
    relieved: Mutex<Asked>,
    /// Those that were asked to fall asleep.
    sent_to_sleep: Mutex<Asked>,
    /// Which instances of earlier daemons are sandboxes, of which functions and which versions of them.
    left_sandboxes: OnceLock<HashMap<u64, (FunctionName, u32)>>,
    /// Where secrets of functions are.
    secrets: OnceLock<Arc<SecretStore>>,
    /// Where instances sleep.
    asleep_space: OnceLock<Arc<AsleepSpace>>,
    /// What calls functions without a client that waits.
    triggers: RwLock<Option<Arc<Triggers>>>,
    /// Where sandboxes connect to.
    egress: Arc<EgressTable>,
    limits: Arc<LimitsTable>,
    /// Pulls that this daemon has begun.
    pulls: Pulls,
    /// Memory of instances, as it was counted last.
    memory: MemoryByState,
    /// Records traces, if somebody wants them.
    tracer: OnceLock<Arc<Tracer>>,
    services: RwLock<HashMap<FunctionName, Served>>,
    /// Replaced or removed services whose last instances still work.
    retired: Mutex<Vec<Arc<Service>>>,
}

/// Each daemon has so many bits of numbers for connections.
const CONNECTIONS_OF_A_LIFE: u32 = 40;
/// How often a daemon that leaves its instances to the next one looks whether it can go.
const LEAVING_LOOK: Duration = Duration::from_millis(20);
/// How often in a row nobody has to be waited for: between two states a client is in no list.
const QUIET_LOOKS: u32 = 2;
/// How long clients that are connected may take for their next request before such a daemon
/// disconnects them.
const CLIENTS_PATIENCE: Duration = Duration::from_millis(500);
/// How long the connections may take whose bytes the gateway copies, until the monitor has them.
const JOINED_PATIENCE: Duration = Duration::from_secs(2);
/// How often it is looked for instances that have been asleep for too long.
const LOOK_FOR_OLD_SLEEPERS: Duration = Duration::from_secs(1);
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

    /// A node without functions that runs at most `instances` instances.
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
            admission,
            joined: Joined::default(),
            probes: Arc::new(Semaphore::new(PROBES_MAX)),
            next_connection: AtomicU64::new(1),
            next_instance: AtomicU64::new(1),
            boots: RecentBoots::default(),
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
            relieved: Mutex::default(),
            sent_to_sleep: Mutex::default(),
            left_sandboxes: OnceLock::new(),
            secrets: OnceLock::new(),
            asleep_space: OnceLock::new(),
            triggers: RwLock::default(),
            egress: Arc::default(),
            limits: Arc::default(),
            pulls: Pulls::default(),
            memory: MemoryByState::default(),
            tracer: OnceLock::new(),
            services: RwLock::default(),
            retired: Mutex::default(),
        })
    }

    /// A number that no other connection of this node has.
    pub fn next_connection(&self) -> u64 {
        self.next_connection.fetch_add(1, Ordering::Relaxed)
    }

    /// A number that no other live instance of this node has.
    pub fn next_instance(&self) -> u64 {
        self.next_instance.fetch_add(1, Ordering::Relaxed)
    }

    /// Begins to count where no daemon before this one can have come, as the `life`-th of its
    /// monitor: sandboxes that are taken over may still name connections of that time.
    pub(crate) fn number_life(&self, life: u32) {
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
    pub(crate) fn egress(&self) -> &Arc<EgressTable> {
        &self.egress
    }

    /// What sandboxes may use whose limits were changed.
    pub(crate) fn limits(&self) -> &Arc<LimitsTable> {
        &self.limits
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
    pub fn boots(&self) -> &RecentBoots {
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
    pub(crate) fn failures(&self) -> &Failures {
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
    pub(crate) fn secrets(&self) -> Option<&Arc<SecretStore>> {
        self.secrets.get()
    }

    /// Records traces from now on. The first recorder stays.
    pub fn trace_with(&self, settings: TraceSettings) -> Arc<Tracer> {
        let tracer = || Tracer::new(settings, self.metrics.traces().clone());
        self.tracer.get_or_init(tracer).clone()
    }

    /// What records traces; `None`: nothing does.
    pub(crate) fn tracer(&self) -> Option<&Arc<Tracer>> {
        self.tracer.get()
    }

    /// Lets clients queue invocations.
    pub(crate) fn trigger_by(&self, triggers: Arc<Triggers>) {
        *self.triggers.write().expect("no holder panics") = Some(triggers);
    }

    /// Lets nobody queue anything more.
    pub(crate) fn forget_triggers(&self) {
        *self.triggers.write().expect("no holder panics") = None;
    }

    /// What calls functions without a client that waits; `None`: nothing does.
    pub(crate) fn triggers(&self) -> Option<Arc<Triggers>> {
        self.triggers.read().expect("no holder panics").clone()
    }

    /// Where instances sleep; `None`: they cannot.
    pub(crate) fn asleep_space(&self) -> Option<&Arc<AsleepSpace>> {
        self.asleep_space.get()
    }

    /// The active version of the function that a client asks for.
    pub fn route(&self, name: &str) -> Option<Arc<Service>> {
        let services = self.services.read().expect("no holder panics");
        Some(services.get(name)?.active().clone())
    }

    /// The versions of a function that get requests.
    pub fn served(&self, name: &str) -> Option<Served> {
        self.services.read().expect("no holder panics").get(name).cloned()
    }

    /// The version of a function that gets a request of which nothing else is known.
    pub(crate) fn route_by_chance(&self, name: &str) -> Option<Arc<Service>> {
        let services = self.services.read().expect("no holder panics");
        Some(services.get(name)?.choose(|_| false))
    }

    /// The active versions of all functions, sorted by name.
    pub fn functions(&self) -> Vec<Arc<Service>> {
        let services = self.services.read().expect("no holder panics");
        let mut all: Vec<_> = services.values().map(|served| served.active().clone()).collect();
        all.sort_by(|a, b| a.name().cmp(b.name()));
        all
    }

    /// All versions of all functions that get requests, sorted by name.
    pub fn services(&self) -> Vec<Arc<Service>> {
        let services = self.services.read().expect("no holder panics");
        let mut all: Vec<_> = services.values().flat_map(Served::services).cloned().collect();
        all.sort_by_key(|service| (service.name().clone(), service.version()));
        all
    }

    /// Serves a function that has one version, in place of an older one of the same name.
    pub fn install(&self, service: Arc<Service>) {
        self.deploy(Served::whole(service));
    }

    /// Serves a function. Versions that were served before and are not now get no more requests;
    /// their instances end when they are idle, at the latest after the function's `limits.drain`, but
    /// for sandboxes.
    pub fn deploy(&self, served: Served) {
        let name = served.active().name().clone();
        self.take_over_asleep(&served);
        let new: Vec<_> = served.services().cloned().collect();
        let mut services = self.services.write().expect("no holder panics");
        let old = services.get(name.as_str()).into_iter().flat_map(Served::services);
        let old = old.filter(|old| !new.iter().any(|new| Arc::ptr_eq(new, old)));
        let old: Vec<_> = old.cloned().collect();
        self.keep_in_sight(&old);
        services.insert(name, served.clone());
        drop(services);
        self.take_in_sandboxes(&served);
        old.into_iter().for_each(|old| self.retire(old));
    }

    /// Serves a function no longer, and ends its sandboxes, those of older versions too.
    pub fn remove(&self, name: &str) {
        let mut services = self.services.write().expect("no holder panics");
        let old = services.get(name).into_iter().flat_map(Served::services);
        let old: Vec<_> = old.cloned().collect();
        self.keep_in_sight(&old);
        services.remove(name);
        drop(services);
        for service in self.versions_of(name) {
            service.hold_none();
        }
        let mut crashes = self.crashes.lock().expect("no holder panics");
        crashes.retain(|(function, _), _| function.as_str() != name);
        drop(crashes);
        for old in old {
            // Another function of this name may have other ones.
            old.launcher().withdraw_secrets();
            self.retire(old);
        }
    }

    /// Versions that are about to be served no longer stay among all that there are: whoever looked
    /// for their instances meanwhile would take them for gone. To be called while no other versions
    /// can be looked up.
    fn keep_in_sight(&self, old: &[Arc<Service>]) {
        self.retired.lock().expect("no holder panics").extend_from_slice(old);
    }

    /// Lets go of all functions, and so of what boots their instances.
    pub fn forget_all(&self) {
        self.services.write().expect("no holder panics").clear();
        self.retired.lock().expect("no holder panics").clear();
    }

    /// All versions of a function that are there, those included of which only sandboxes are left.
    pub(crate) fn versions_of(&self, name: &str) -> Vec<Arc<Service>> {
        let mut all = self.everything();
        all.retain(|service| service.name().as_str() == name);
        all
    }

    /// Keeps a version of which there are sandboxes of an earlier daemon, until they have ended.
    pub(crate) fn keep_for_sandboxes(&self, service: &Arc<Service>) {
        self.keep_in_sight(std::slice::from_ref(service));
        self.retire(service.clone());
    }

    fn retire(&self, old: Arc<Service>) {
        let sandboxes = old.held_count();
        if sandboxes > 0 {
            let (function, version) = (old.name(), old.version());
            tracing::info!(%function, version, sandboxes, "sandboxes of a version that is served no longer stay");
        }
        old.retire_from_service();
        let launcher = old.launcher();
        let is_in_use = self.services().iter().any(|new| Arc::ptr_eq(&new.launcher(), &launcher));
        if !is_in_use {
            launcher.stand_down();
        }
        let Ok(runtime) = Handle::try_current() else {
            // Without a runtime there are no connections to wait for.
            let mut retired = self.retired.lock().expect("no holder panics");
            return retired.retain(|service| service.instance_count() > 0);
        };
        let shared = old.shared().clone();
        runtime.spawn(async move {
            // This task has it, and the list; a request that was on its way is a third.
            old.clone().wind_up(|service| Arc::strong_count(service) > 3).await;
            let mut retired = shared.retired.lock().expect("no holder panics");
            retired.retain(|service| !Arc::ptr_eq(service, &old));
        });
    }

    /// Forgets the crashes of versions that are not served any more.
    pub(crate) fn forget_crashes_of_others(&self, name: &FunctionName, served: &[u32]) {
        let mut crashes = self.crashes.lock().expect("no holder panics");
        crashes.retain(|(function, version), _| function != name || served.contains(version));
    }

    /// All live instances.
    pub fn instances(&self) -> Vec<InstanceInfo> {
        self.everything().iter().flat_map(|service| service.instances()).collect()
    }

    /// The service with this instance, be it of an older build of its function.
    pub fn service_of(&self, instance: u64) -> Option<Arc<Service>> {
        self.everything().into_iter().find(|service| service.has_instance(instance))
    }

    /// All services, those included of which only the last instances are left.
    pub(crate) fn everything(&self) -> Vec<Arc<Service>> {
        let mut all = self.services();
        let retired = self.retired.lock().expect("no holder panics");
        // One that has been replaced since is among both.
        let is_other = |old: &&Arc<Service>| !all.iter().any(|new| Arc::ptr_eq(new, old));
        let others: Vec<_> = retired.iter().filter(is_other).cloned().collect();
        all.extend(others);
        all
    }

    /// Whether the node takes no more clients.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Whether it also refuses the requests of those that it has, and ends its instances.
    pub(crate) fn is_ending(&self) -> bool {
        self.is_draining() && !self.is_leaving()
    }

    /// Whether its instances are about to be left to the next daemon.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// Instances that an earlier daemon has put to sleep; each is taken over when its function is
    /// served. To be called before that.
    pub(crate) fn wake_up_with(&self, left: Vec<Left>) {
        left.iter().for_each(|one| self.note_instance(one.note.id));
        *self.left_asleep.lock().expect("no holder panics") = left;
    }

    /// Says which instances of an earlier daemon are sandboxes, of which functions and which versions
    /// of them (0: nobody knows), and numbers no other instance like one of them. To be called before
    /// functions are served; the first call counts.
    pub(crate) fn expect_sandboxes(&self, versions: HashMap<u64, (FunctionName, u32)>) {
        versions.keys().for_each(|instance| self.note_instance(*instance));
        // Only a daemon that begins twice says it again.
        let _ = self.left_sandboxes.set(versions);
    }

    /// The version of its function that a sandbox of an earlier daemon is of; `None`: the instance is
    /// none. Another instance may have had its number since.
    pub(crate) fn version_of_left(&self, function: &FunctionName, instance: u64) -> Option<u32> {
        let (of, version) = self.left_sandboxes.get()?.get(&instance)?;
        (of == function).then_some(*version)
    }

    /// Whether an instance that an earlier daemon has put to sleep is a sandbox.
    fn is_sandbox(&self, note: &AsleepNote) -> bool {
        self.version_of_left(&note.function, note.id).is_some()
    }

    /// The sandboxes of a function that an earlier daemon has put to sleep, and that are not taken in
    /// yet.
    pub(crate) fn left_sandboxes_of(&self, function: &FunctionName) -> Vec<AsleepNote> {
        let left = self.left_asleep.lock().expect("no holder panics");
        let notes = left.iter().map(|one| &one.note);
        notes.filter(|note| note.function == *function && self.is_sandbox(note)).cloned().collect()
    }

    /// Those that are no sandboxes and belong to a function that can be served now are taken over, or
    /// end.
    fn take_over_asleep(&self, served: &Served) {
        let active = served.active();
        if active.launcher().index().is_none() {
            // It may be served when it was frozen anew.
            return;
        }
        let mut left = self.left_asleep.lock().expect("no holder panics");
        let is_its =
            |one: &mut Left| one.note.function == *active.name() && !self.is_sandbox(&one.note);
        let own: Vec<Left> = left.extract_if(.., is_its).collect();
        drop(left);
        for one in own {
            let has_files =
                |service: &&Arc<Service>| service.launcher().index() == Some(one.note.index);
            let service = served.services().find(has_files).unwrap_or(active);
            self.take_in(service, one);
        }
    }

    /// Takes in the sandboxes that are of versions which are served now. Those of others stay what
    /// they are.
    fn take_in_sandboxes(&self, served: &Served) {
        for note in self.left_sandboxes_of(served.active().name()) {
            let number = self.version_of_left(&note.function, note.id).unwrap_or_default();
            let is_its = |service: &&Arc<Service>| {
                [0, service.version()].contains(&number) && service.check_asleep(&note).is_ok()
            };
            if let Some(service) = served.services().find(is_its) {
                self.take_in_left(service, note.id);
            }
        }
    }

    /// Makes one of those that an earlier daemon has put to sleep an instance of a service that is
    /// among all that there are.
    pub(crate) fn take_in_left(&self, service: &Service, instance: u64) {
        // Whoever looks for the instance meanwhile waits, and does not take it for gone.
        let mut left = self.left_asleep.lock().expect("no holder panics");
        if let Some(at) = left.iter().position(|one| one.note.id == instance) {
            let one = left.swap_remove(at);
            self.take_in(service, one);
        }
    }

    /// Ends one of them.
    pub(crate) fn end_left(&self, instance: u64) {
        let mut left = self.left_asleep.lock().expect("no holder panics");
        left.retain(|one| one.note.id != instance);
    }

    /// Makes an instance that an earlier daemon has put to sleep one of a service, or ends it.
    fn take_in(&self, service: &Service, one: Left) {
        let (function, instance) = (service.name(), one.note.id);
        if self.is_sandbox(&one.note) {
            service.hold(instance);
        }
        match service.take_over_asleep(one) {
            Ok(()) => {
                tracing::info!(%function, instance, "an instance of an earlier daemon is asleep")
            }
            Err(why) => {
                tracing::warn!(%function, instance, "ended an instance that was asleep: {why}")
            }
        }
    }

    /// Whether this instance is here, awake or asleep, or may be taken over yet.
    pub(crate) fn may_have_instance(&self, id: u64) -> bool {
        let left = self.left_asleep.lock().expect("no holder panics");
        let is_left = left.iter().any(|one| one.note.id == id);
        drop(left);
        is_left || self.service_of(id).is_some()
    }

    /// Ends those of functions that are gone.
    pub(crate) fn forget_left_asleep(&self, is_gone: impl Fn(&FunctionName) -> bool) {
        let mut left = self.left_asleep.lock().expect("no holder panics");
        left.retain(|one| {
            let is_gone = is_gone(&one.note.function);
            if is_gone {
                let (function, instance) = (&one.note.function, one.note.id);
                tracing::warn!(%function, instance, "ended an instance that was asleep: its function is gone");
            }
            !is_gone
        });
    }

    /// Leaves instances that are asleep to the next daemon, where their functions want that; how
    /// many there are.
    pub(crate) fn keep_asleep(&self) -> usize {
        self.keep_asleep_of(Service::persists)
    }

    /// Leaves all instances that are asleep to the next daemon; how many there are.
    pub(crate) fn keep_all_asleep(&self) -> usize {
        self.keep_asleep_of(|_| true)
    }

    fn keep_asleep_of(&self, is_wanted: impl Fn(&Service) -> bool) -> usize {
        // First: what is taken in meanwhile is in one of the services.
        let left = mem::take(&mut *self.left_asleep.lock().expect("no holder panics"));
        left.iter().for_each(Left::keep);
        let services = self.everything();
        let wanted = services.iter().filter(|service| is_wanted(service));
        wanted.map(|service| service.keep_asleep()).sum::<usize>() + left.len()
    }

    /// Ends instances that have been asleep for longer than their functions keep them, for as long
    /// as the node lives.
    pub(crate) async fn end_old_sleepers(self: Arc<Self>) {
        loop {
            sleep(LOOK_FOR_OLD_SLEEPERS).await;
            self.services().iter().for_each(|service| service.end_old_sleepers());
        }
    }

    /// Takes no more requests, lets instances finish for at most `patience`,
    /// and ends them all.
    pub async fn drain(&self, patience: Duration) {
        self.leaving.store(false, Ordering::SeqCst);
        self.joined.stay();
        self.draining.store(true, Ordering::SeqCst);
        let deadline = Instant::now() + patience;
        loop {
            // Clients that ask nothing now will not be served.
            self.admission.let_go_of_waiting();
            let services = self.everything();
            for service in &services {
                match service.persists() {
                    true => service.send_all_to_sleep(),
                    false => service.retire_all(),
                }
                if service.is_retired() {
                    service.retire_others();
                }
            }
            let instances: usize = services.iter().map(|service| service.instance_count()).sum();
            // Answers may still be on their way when the instances are gone.
            let left = instances + self.admission.busy();
            if left == 0 {
                return;
            }
            if Instant::now() >= deadline {
                tracing::warn!(instances, "ending instances that are still busy");
                for service in &services {
                    service.kill_all();
                }
                sleep(Duration::from_millis(50)).await;
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Takes no more clients, answers those that it has for at most `patience`, and has the
    /// instances outlive this daemon that can. The others end.
    pub(crate) async fn leave(&self, patience: Duration) {
        self.leaving.store(true, Ordering::SeqCst);
        self.draining.store(true, Ordering::SeqCst);
        if timeout(patience, self.until_left(patience)).await.is_err() {
            tracing::warn!("ending what is still busy and cannot be left");
            self.everything().iter().for_each(|service| service.kill_those_that_stay());
            sleep(LEAVING_LOOK).await;
        }
        // Last: their bytes stand still until the next daemon has them.
        self.joined.leave();
        let _ = timeout(JOINED_PATIENCE, async {
            while self.joined.moving() > 0 {
                sleep(LEAVING_LOOK).await;
            }
        })
        .await;
    }

    /// Waits until no client is served here, and each instance is kept or has ended.
    async fn until_left(&self, patience: Duration) {
        let began = Instant::now();
        let mut quiet_looks = 0;
        while quiet_looks < QUIET_LOOKS {
            sleep(LEAVING_LOOK).await;
            // A client that has connected a moment ago is about to ask something.
            let mut clients = self.admission.busy();
            match began.elapsed() < CLIENTS_PATIENCE {
                true => clients += self.admission.waiting_count(),
                false => self.admission.let_go_of_waiting(),
            }
            // What is not asleep by then lives on: writing many to disk takes long.
            let may_sleep = began.elapsed() < patience / 2;
            let services = self.everything();
            let instances: usize =
                services.iter().map(|service| service.leave_all(may_sleep)).sum();
            quiet_looks = if instances + clients == 0 { quiet_looks + 1 } else { 0 };
        }
    }

    pub(crate) fn capacity(&self) -> Arc<Semaphore> {
        self.capacity.clone()
    }

    /// A place among the liveness probes of the node; `None`: all are taken.
    pub(crate) fn probe_place(&self) -> Option<OwnedSemaphorePermit> {
        self.probes.clone().try_acquire_owned().ok()
    }

    /// Connections of which the gateway only copies the bytes.
    pub(crate) fn joined(&self) -> &Joined {
        &self.joined
    }

    /// Whom the gateway takes in.
    pub(crate) fn admission(&self) -> &Arc<Admission> {
        &self.admission
    }

    /// Somebody waits until an instance more may run, as long as the value lives.
    pub(crate) fn wait_for_room(&self) -> impl Drop + Send + '_ {
        struct Waiting<'a>(&'a AtomicUsize);
        impl Drop for Waiting<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::SeqCst);
            }
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        Waiting(&self.waiting)
    }

    /// An instance has become idle, and can make room for another. One of those who wait
    /// hears of it; a wake-up that comes too late for it goes to the next.
    pub(crate) fn instance_is_idle(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.idle.notify_one();
        }
    }

    /// Resolves when an instance of any function has become idle.
    pub(crate) fn idle_instance(&self) -> Notified<'_> {
        self.idle.notified()
    }

    /// Ends the instance of the node that has been idle longest, if any is idle.
    pub(crate) fn evict_idlest(&self) {
        evict_idlest_of(&self.services(), Service::evict);
    }

    /// Asks instances that are idle and have memory to give it up, those first that have been
    /// idle longest; how many were asked, `most` at most.
    pub(crate) fn hibernate_idlest(&self, most: usize) -> usize {
        let services = self.everything();
        let with_memory = services.iter().flat_map(|service| {
            let idle = service.idle_with_memory().into_iter();
            idle.map(move |(since, id)| (since, id, service))
        });
        ask(with_memory, &self.relieved, most, Service::relieve)
    }

    /// Puts hibernated instances to sleep, those first that have been idle longest; how many were
    /// asked, `most` at most.
    pub(crate) fn put_idlest_to_sleep(&self, most: usize) -> usize {
        let services = self.services();
        let hibernated = services.iter().flat_map(|service| {
            let idle = service.idle_hibernated().into_iter();
            idle.map(move |(since, id)| (since, id, service))
        });
        ask(hibernated, &self.sent_to_sleep, most, Service::send_to_sleep)
    }

    /// Makes room for one more instance of a tenant: ends one of its own that nobody uses,
    /// if there is one. First come those that are only kept ready.
    pub(crate) fn make_room_of(&self, tenant: &Arc<Tenant>) {
        let services = self.services_of(tenant);
        if !services.iter().any(|service| service.launcher().give_up_one()) {
            evict_idlest_of(&services, Service::evict);
        }
    }

    /// Ends what nobody uses of tenants that have more than they may, as after their quotas
    /// were lowered. What is busy ends when it is no more.
    pub fn shrink_to_quotas(&self) {
        for tenant in self.tenants.all() {
            let room = tenant.room();
            while room.is_overdrawn() {
                let services = self.services_of(&tenant);
                // Ready instances give their room back at once.
                if services.iter().any(|service| service.launcher().give_up_one()) {
                    continue;
                }
                if !evict_idlest_of(&services, Service::evict_beyond_quota) {
                    break;
                }
            }
        }
    }

    /// Ends all instances of a tenant, whatever they do; how many there were.
    pub(crate) fn end_instances_of(&self, tenant: &Arc<Tenant>) -> usize {
        let of_tenant = |service: &Arc<Service>| Arc::ptr_eq(service.tenant(), tenant);
        let services = self.everything().into_iter().filter(of_tenant);
        services.map(|service| service.kill_all()).sum()
    }

    fn services_of(&self, tenant: &Arc<Tenant>) -> Vec<Arc<Service>> {
        let services = self.services.read().expect("no holder panics");
        let of_tenant = |service: &&Arc<Service>| Arc::ptr_eq(service.tenant(), tenant);
        services.values().flat_map(Served::services).filter(of_tenant).cloned().collect()
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

/// Asks idle instances for something, those first that have been idle longest; how many were asked,
/// `most` at most.
fn ask<'a>(
    idle: impl Iterator<Item = (std::time::Instant, u64, &'a Arc<Service>)>,
    asked: &Mutex<Asked>,
    most: usize,
    ask: impl Fn(&Service, u64),
) -> usize {
    let mut idle: Vec<_> = idle.collect();
    idle.sort_by_key(|(since, id, _)| (*since, *id));
    let ids = idle.iter().map(|(_, id, _)| *id);
    let chosen =
        asked.lock().expect("no holder panics").choose(ids, most, std::time::Instant::now());
    for (_, id, service) in idle.iter().filter(|(_, id, _)| chosen.contains(id)) {
        ask(service, *id);
    }
    chosen.len()
}

/// Has `evict` end the instance that has been idle longest; whether there was one.
fn evict_idlest_of(services: &[Arc<Service>], evict: impl Fn(&Service, u64) -> bool) -> bool {
    let mut tried = None;
    loop {
        let idlest = services.iter().filter_map(|service| Some((service.idlest(tried)?, service)));
        let Some((found, service)) = idlest.min_by_key(|(found, _)| *found) else { return false };
        let (_, id) = found;
        // One that has just got a connection, or that comes to rest only now, stays: the next one
        // is tried.
        tried = Some(found);
        if evict(service, id) {
            tracing::debug!(function = %service.name(), instance = id, "ended an idle instance to make room");
            return true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_makes_an_instance_of_another_function_no_sandbox() {
        let [own, other]: [FunctionName; 2] = ["own", "other"].map(|name| name.parse().unwrap());
        let node = NodeState::new(1);
        assert_eq!(node.version_of_left(&own, 3), None);
        node.expect_sandboxes(HashMap::from([(3, (own.clone(), 2))]));
        assert_eq!(node.version_of_left(&own, 3), Some(2));
        assert_eq!(node.version_of_left(&other, 3), None);
        assert_eq!(node.version_of_left(&own, 4), None);
        assert_eq!(node.next_instance(), 4);
    }
}
