//! Instances that are sandboxes.

use super::cold::{ColdBoots, Plans, in_background};
use super::launch::{
    Client, Connector, End, FrozenInstance, Instance, LaunchError, Launched, Launcher, Report,
    StandbyInfo,
};
use super::options::{LaunchOptions, Techniques, WorkingSetUse};
use super::standby::{Standby, Unready};
use crate::boots::BootKind;
use crate::build::freeze_instance;
use crate::clock::monotonic_ns;
use crate::config::{FunctionConfig, FunctionName};
use crate::logs::{FunctionLog, InstanceLog, InstancePipes, Logs};
use crate::reactor::watch_sandbox;
use crate::rootfs::StoredRootfs;
use crate::tenants::{Lease, Tenant};
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use thaw_abi::control::{Connection, EntryPoint, FLAG_BY_PAGE};
use thaw_sandbox::{
    BootError, BootPlan, EgressPolicy, Event, Image, KeptForSuccessor, Orphan, PlanError,
    PopulatePolicy, Processes, Progress, Recorder, ResourceLimits, Sandbox, ThawOptions,
    WorkingSet, ZygotePool, connection,
};
use thaw_store::{ImageId, Store};
use tokio::io::unix::AsyncFd;
use tokio::task::JoinHandle;
use tokio::time::{Sleep, sleep};

/// Zygotes that are tried for one boot: they may die while they wait.
const ZYGOTES_TRIED: u32 = 3;
/// After so many boots from the image nobody waits for a working set any more.
const BOOTS_UNTIL_SETTLED: u64 = 3;
/// After this long without a boot, the image may have left the page cache.
const COLD_AFTER: Duration = Duration::from_secs(30);

/// Boots sandboxes from one image.
pub struct SandboxLauncher {
    shared: Arc<Shared>,
}

/// What a launcher and its instances share.
pub(super) struct Shared {
    pub pool: Arc<ZygotePool>,
    function: FunctionName,
    /// The function's name for the lines of its kernels.
    pub label: Arc<str>,
    image: Arc<Image>,
    rootfs: StoredRootfs,
    store: Store,
    image_id: ImageId,
    plan: RwLock<Arc<BootPlan>>,
    /// The same for instances that are booted ahead: all of the working set is
    /// populated, since nobody waits for it.
    ready_plan: RwLock<Arc<BootPlan>>,
    standby: Standby,
    techniques: Techniques,
    working_set: Mutex<WorkingSetState>,
    logs: Arc<Logs>,
    log: Arc<FunctionLog>,
    limits: ResourceLimits,
    cpu_time_limit: Option<Duration>,
    /// Which zygotes it is booted in.
    pub processes: Processes,
    port: u16,
    flags: u32,
    egress: Arc<EgressPolicy>,
    tenant: Arc<Tenant>,
    last_boot_ns: AtomicU64,
    cold: ColdBoots,
    /// Boots from the image so far.
    image_boots: AtomicU64,
    /// How often there was no time to record a working set.
    recordings_timed_out: AtomicU32,
}

enum WorkingSetState {
    /// The next instance that has served a request shows it.
    Wanted(PopulatePolicy),
    /// It is in the plan.
    Known(Arc<WorkingSet>),
    /// It is not used, or could not be recorded.
    Off,
}

impl SandboxLauncher {
    /// Prepares boots of `image` over `rootfs`, with the stored working set if
    /// there is one.
    ///
    /// # Errors
    /// A blob of the image cannot be opened.
    #[expect(clippy::too_many_arguments, reason = "each is a thing of its own, given once")]
    pub fn new(
        pool: Arc<ZygotePool>,
        store: &Store,
        rootfs: StoredRootfs,
        image_id: ImageId,
        image: Image,
        logs: Arc<Logs>,
        log: Arc<FunctionLog>,
        tenant: Arc<Tenant>,
        config: &FunctionConfig,
        options: LaunchOptions,
    ) -> Result<Self, PlanError> {
        let new_plan = || image.plan(rootfs.file(), rootfs.file_len(), rootfs.blobs());
        let (mut plan, mut ready_plan) = (new_plan()?, new_plan()?);
        let LaunchOptions { working_set, policy, techniques } = options;
        let working_set_use = working_set;
        let working_set = match working_set {
            WorkingSetUse::Off => WorkingSetState::Off,
            WorkingSetUse::Populate(policy) => match stored_working_set(store, image_id) {
                Some(set)
                    if plan.apply_working_set(&set, policy).is_ok()
                        && ready_plan.apply_working_set(&set, PopulatePolicy::Both).is_ok() =>
                {
                    WorkingSetState::Known(Arc::new(set))
                }
                _ => WorkingSetState::Wanted(policy),
            },
        };
        let shared = Shared {
            pool,
            function: config.name.clone(),
            label: config.name.as_str().into(),
            image: Arc::new(image),
            rootfs,
            store: store.clone(),
            image_id,
            plan: RwLock::new(Arc::new(techniques.reduce(plan))),
            ready_plan: RwLock::new(Arc::new(techniques.reduce(ready_plan))),
            standby: Standby::new(policy),
            techniques,
            working_set: Mutex::new(working_set),
            logs,
            log,
            limits: config.limits.of_an_instance(),
            cpu_time_limit: config.limits.cpu_time.map(|span| span.0),
            processes: config.processes(),
            port: config.port_number(),
            flags: crate::debug::flags() | config.entry_flags() | techniques.flags(),
            egress: config.egress.policy_within(tenant.egress()),
            tenant,
            last_boot_ns: AtomicU64::new(0),
            cold: ColdBoots::default(),
            image_boots: AtomicU64::new(0),
            recordings_timed_out: AtomicU32::new(0),
        };
        shared.pool.keep(shared.processes);
        if let Some((set, policy)) = shared.known_working_set(working_set_use) {
            shared.use_prefetch_file(&set, policy);
        }
        let launcher = Self { shared: Arc::new(shared) };
        launcher.shared.replenish();
        Ok(launcher)
    }

    /// Makes sure, blocking, that the next boot can be of this kind.
    ///
    /// # Errors
    /// What it would begin from cannot be made.
    pub fn prepare(&self, kind: BootKind) -> Result<(), LaunchError> {
        let shared = &self.shared;
        match kind {
            BootKind::Cold | BootKind::Warm => Ok(()),
            BootKind::Fork => shared.standby.fill_template(shared),
            BootKind::Ready => shared.standby.fill_ready(shared).map_err(|unready| match unready {
                Unready::Failed(error) => error,
                Unready::NoRoom => LaunchError("the tenant's quota is used up".to_owned()),
            }),
        }
    }

    /// Whether a working set is in use.
    pub fn has_working_set(&self) -> bool {
        let state = self.shared.working_set.lock().expect("no holder panics");
        matches!(*state, WorkingSetState::Known(_))
    }

    /// The image that is booted.
    pub fn image(&self) -> &Image {
        &self.shared.image
    }
}

impl Launcher for SandboxLauncher {
    fn launch(&self, client: Option<&Client>) -> Result<Launched, LaunchError> {
        let shared = &self.shared;
        let handed = client.map(|client| {
            // The guest listens on its own port, whatever the gateway's is.
            let local = (client.local.ip(), shared.port).into();
            (connection(client.id, client.peer, local), client.socket.as_fd())
        });
        let boot = match shared.standby.boot(shared, handed) {
            Some(boot) => boot,
            None => shared.boot_from_image(handed)?,
        };
        shared.replenish();
        let Boot { sandbox, plan, kind, taken_ns, output } = boot;
        let instance =
            SandboxInstance::new(sandbox, plan, shared.clone(), output.log).map_err(|error| {
                LaunchError(format!(
                    "cannot watch the new instance ({error}); raise the limit of open files"
                ))
            })?;
        let instance = SandboxInstance { pipes: output.pipes, ..instance };
        instance.sandbox.get_ref().count_by(shared.tenant.cpu().meter());
        Ok(Launched { instance: Box::new(instance), kind, zygote_ns: taken_ns })
    }

    fn take_over(&self, orphan: Orphan) -> Result<Box<dyn Instance>, LaunchError> {
        let failed = |error: &dyn std::fmt::Display| LaunchError(error.to_string());
        let shared = self.shared.clone();
        let plan = shared.plan();
        let adopted = orphan
            .adopt(&plan, shared.limits, shared.cpu_time_limit, &shared.egress)
            .map_err(|error| failed(&error))?;
        let readers = <[OwnedFd; 2]>::try_from(adopted.descriptors)
            .map_err(|_| failed(&"the pipes of its output are missing"))?;
        let log = shared.logs.adopt(&shared.log, readers).map_err(|error| failed(&error))?;
        let instance = SandboxInstance::new(adopted.sandbox, plan, shared.clone(), log)
            .map_err(|error| failed(&error))?;
        let instance = SandboxInstance { kept: Some(adopted.kept), ..instance };
        let counted = instance.sandbox.get_ref().count_from_now_by(shared.tenant.cpu().meter());
        counted.map_err(|error| failed(&error))?;
        Ok(Box::new(instance))
    }

    fn is_ready(&self) -> bool {
        self.shared.standby.is_ready() || self.shared.pool.has_ready(self.shared.processes)
    }

    fn standby(&self) -> StandbyInfo {
        self.shared.standby.info()
    }

    fn spare_room(&self) -> Option<Lease> {
        self.shared.standby.spare_room()
    }

    fn give_up_one(&self) -> bool {
        self.shared.standby.give_up_one()
    }

    fn give_up_ready(&self) {
        self.shared.standby.give_up_ready();
    }

    fn stand_down(&self) {
        self.shared.standby.stand_down();
    }
}

/// A sandbox whose boot has begun.
pub(super) struct Boot {
    pub sandbox: Sandbox,
    pub plan: Arc<BootPlan>,
    pub kind: BootKind,
    /// When what it begins from had been taken.
    pub taken_ns: u64,
    pub output: Output,
}

/// Where the output of a copy goes.
pub(super) struct Output {
    pub log: InstanceLog,
    /// This process's ends of the pipes, as long as it has them.
    pub pipes: Option<InstancePipes>,
}

impl From<InstancePipes> for Output {
    fn from(pipes: InstancePipes) -> Self {
        Self { log: pipes.log(), pipes: Some(pipes) }
    }
}

/// A client's socket on its way into a sandbox.
pub(super) type Handed<'a> = Option<(Connection, BorrowedFd<'a>)>;

impl Shared {
    fn boot_from_image(self: &Arc<Self>, handed: Handed<'_>) -> Result<Boot, LaunchError> {
        let may_be_gone = self.is_first_for_long();
        let cold = self.cold.wanted(may_be_gone);
        let plan = cold.as_ref().map_or_else(|| self.plan(), |cold| cold.plan());
        let pipes = self.pipes()?;
        let mut tried = 0;
        let booted = loop {
            let zygote = match self.pool.take_in_haste(self.limits) {
                Ok(zygote) => zygote,
                Err(error) => break Err(LaunchError(error.to_string())),
            };
            let taken_ns = monotonic_ns();
            tried += 1;
            zygote.label(&self.label);
            let options = self.options(Some(&pipes));
            let flags = options.flags | self.recording_flags();
            match zygote.thaw(&plan, handed, &ThawOptions { flags, ..options }) {
                Ok(sandbox) => break Ok((sandbox, taken_ns)),
                Err(BootError::ZygoteDied) if tried < ZYGOTES_TRIED => self.pool.discard_dead(),
                Err(error) => break Err(LaunchError(error.to_string())),
            }
        };
        // Not before: the thread that reads would take this one's processor.
        if let Some(cold) = &cold {
            cold.read_ahead();
        }
        self.pool.replenish();
        let (sandbox, taken_ns) = booted?;
        self.image_boots.fetch_add(1, Ordering::Relaxed);
        let is_cold = cold.is_some() || may_be_gone && self.read_ahead(&plan);
        let kind = if is_cold { BootKind::Cold } else { BootKind::Warm };
        Ok(Boot { sandbox, plan, kind, taken_ns, output: pipes.into() })
    }

    /// Room of the tenant for something that is kept ready.
    pub fn lease(&self) -> Option<Lease> {
        self.tenant.room().try_enter(self.limits.memory)
    }

    /// Pipes for the output of one copy.
    pub fn pipes(&self) -> Result<InstancePipes, LaunchError> {
        self.logs.pipes(&self.log).map_err(|error| {
            LaunchError(format!(
                "cannot make pipes for the output of an instance ({error}); raise the limit of open files"
            ))
        })
    }

    /// What every boot is told. A copy that was booted ahead has its pipes, and a
    /// template gets none.
    pub fn options<'a>(&'a self, pipes: Option<&'a InstancePipes>) -> ThawOptions<'a> {
        ThawOptions {
            streams: pipes.map(|pipes| [pipes.stdout(), pipes.stderr()]),
            limits: self.limits,
            cpu_time_limit: self.cpu_time_limit,
            flags: self.flags,
            hostname: "",
            egress: &self.egress,
            cores: self.tenant.cores(),
        }
    }

    /// What templates are made from.
    pub fn plan(&self) -> Arc<BootPlan> {
        self.plan.read().expect("no holder panics").clone()
    }

    /// What instances are made from that are booted ahead.
    pub fn ready_plan(&self) -> Arc<BootPlan> {
        self.ready_plan.read().expect("no holder panics").clone()
    }

    /// Whether no boot is likely to change the plans any more. A program that ends
    /// with its first request never shows its working set.
    pub fn is_settled(&self) -> bool {
        if self.image_boots.load(Ordering::Relaxed) >= BOOTS_UNTIL_SETTLED {
            return true;
        }
        let state = self.working_set.lock().expect("no holder panics");
        !matches!(*state, WorkingSetState::Wanted(_))
    }

    /// One of the first copies shows its working set, page by page: that takes its first
    /// request a few microseconds a page.
    fn recording_flags(&self) -> u32 {
        if self.is_settled() { 0 } else { FLAG_BY_PAGE }
    }

    /// Makes in the background what the next boots are to begin from.
    fn replenish(self: &Arc<Self>) {
        if !self.standby.is_wanting(self) {
            return;
        }
        // Without a runtime there is nobody to do it meanwhile.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let shared = self.clone();
            runtime.spawn_blocking(move || shared.standby.replenish(&shared));
        }
    }

    /// Whether the last boot is so long ago that the image may have left the page cache.
    fn is_first_for_long(&self) -> bool {
        let now_ns = monotonic_ns();
        let last_ns = self.last_boot_ns.swap(now_ns, Ordering::Relaxed);
        now_ns.saturating_sub(last_ns) >= COLD_AFTER.as_nanos() as u64
    }

    /// Lets the host read the working set in large requests while the sandbox already
    /// maps, where there is no prefetch file. Returns whether the boot counts as cold.
    fn read_ahead(self: &Arc<Self>, plan: &Arc<BootPlan>) -> bool {
        if self.cold.is_prepared() {
            return false;
        }
        let set = match &*self.working_set.lock().expect("no holder panics") {
            WorkingSetState::Known(set) => set.clone(),
            _ => return true,
        };
        let (image, plan) = (self.image.clone(), plan.clone());
        in_background(move || {
            set.read_ahead(&image).and_then(|_| set.read_ahead_blobs(&plan)).map(drop)
        });
        true
    }

    /// The stored working set that is in use, if there is one.
    fn known_working_set(
        &self,
        chosen: WorkingSetUse,
    ) -> Option<(Arc<WorkingSet>, PopulatePolicy)> {
        match (&*self.working_set.lock().expect("no holder panics"), chosen) {
            (WorkingSetState::Known(set), WorkingSetUse::Populate(policy)) => {
                Some((set.clone(), policy))
            }
            _ => None,
        }
    }

    /// Makes cold boots begin from the stored prefetch file, if there is one.
    fn use_prefetch_file(&self, set: &Arc<WorkingSet>, policy: PopulatePolicy) {
        let loaded = self.plan_with(set, policy).map_err(|error| error.to_string());
        let loaded = loaded.and_then(|cold| {
            let plans = Plans { warm: self.plan(), cold };
            self.cold.load(&self.store, self.image_id, plans, set, policy)
        });
        if let Err(error) = loaded {
            tracing::warn!("cold boots go on without a prefetch file: {error}");
        }
    }

    /// A plan that uses a working set.
    fn plan_with(&self, set: &WorkingSet, policy: PopulatePolicy) -> Result<BootPlan, PlanError> {
        let (file, len) = (self.rootfs.file(), self.rootfs.file_len());
        let mut plan = self.image.plan(file, len, self.rootfs.blobs())?;
        plan.apply_working_set(set, policy)?;
        Ok(self.techniques.reduce(plan))
    }

    /// Begins to record what `sandbox`, booted from `plan`, has touched, on a thread
    /// that may wait. `None`: nobody wants to know, or others are asked just now.
    fn begin_recording(
        self: &Arc<Self>,
        sandbox: &Sandbox,
        plan: &Arc<BootPlan>,
    ) -> Option<JoinHandle<()>> {
        let mut state = self.working_set.lock().expect("no holder panics");
        let WorkingSetState::Wanted(policy) = *state else { return None };
        let turn = RecordingTurn::take()?;
        let recorder = match WorkingSet::recorder(sandbox) {
            Ok(recorder) => recorder,
            Err(error) => {
                // The instance may just have ended; the next one will do.
                tracing::debug!("could not record a working set: {error}");
                return None;
            }
        };
        // Only one instance is asked; if it fails, boots go on without.
        *state = WorkingSetState::Off;
        drop(state);
        let (shared, plan) = (self.clone(), plan.clone());
        let record = move || {
            shared.record(recorder, &plan, policy);
            drop(turn);
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => Some(runtime.spawn_blocking(record)),
            // Without a runtime there is nobody whom this holds up.
            Err(_) => {
                record();
                None
            }
        }
    }

    /// Records a working set, stores it, and makes later boots use it.
    fn record(self: &Arc<Self>, recorder: Recorder, plan: &BootPlan, policy: PopulatePolicy) {
        let set = match recorder.record(plan) {
            Ok(set) => set,
            // Every instance would take as long, unless the host was busy.
            Err(error)
                if error.kind() == io::ErrorKind::TimedOut
                    && self.recordings_timed_out.fetch_add(1, Ordering::Relaxed)
                        == RECORDINGS_TRIED - 1 =>
            {
                let function = self.function.as_str();
                tracing::warn!(function, "it touches too much memory to record a working set");
                return;
            }
            Err(error) => {
                // The instance may just have ended; the next one will do.
                tracing::debug!("could not record a working set: {error}");
                *self.working_set.lock().expect("no holder panics") =
                    WorkingSetState::Wanted(policy);
                return;
            }
        };
        if let Err(error) = self.store.put_working_set(self.image_id, &set.to_bytes()) {
            tracing::warn!("could not store a working set: {error}");
        }
        let new_plan = |policy| self.plan_with(&set, policy).map(Arc::new);
        match new_plan(policy).and_then(|plan| Ok((plan, new_plan(PopulatePolicy::Both)?))) {
            Ok((plan, ready_plan)) => {
                tracing::debug!(ranges = plan.populate().len(), "recorded a working set");
                *self.plan.write().expect("no holder panics") = plan;
                *self.ready_plan.write().expect("no holder panics") = ready_plan;
                let set = Arc::new(set);
                *self.working_set.lock().expect("no holder panics") =
                    WorkingSetState::Known(set.clone());
                self.store_prefetch_file(&set, policy);
            }
            Err(error) => tracing::warn!("a working set cannot be used: {error}"),
        }
        self.replenish();
    }

    /// Writes the pages of a new working set to a file for cold boots.
    fn store_prefetch_file(&self, set: &Arc<WorkingSet>, policy: PopulatePolicy) {
        match ColdBoots::store(&self.store, self.image_id, &self.plan(), set) {
            Ok(true) => self.use_prefetch_file(set, policy),
            Ok(false) => {}
            Err(error) => tracing::warn!("could not store a prefetch file: {error}"),
        }
    }
}

/// How long an instance that is to end lives on for its working set to be recorded,
/// even if no thread has had time for that yet.
const RECORDING_PATIENCE: Duration = Duration::from_millis(1500);
/// How often it is tried to record the working set of a function that takes too long.
const RECORDINGS_TRIED: u32 = 3;
/// Most working sets that are recorded at a time: each takes a processor.
const RECORDINGS_MAX: usize = 2;
static RECORDINGS: AtomicUsize = AtomicUsize::new(0);

/// Leave to record a working set, given back when it is dropped.
struct RecordingTurn;

impl RecordingTurn {
    fn take() -> Option<Self> {
        let more = |count| (count < RECORDINGS_MAX).then_some(count + 1);
        let relaxed = Ordering::Relaxed;
        RECORDINGS.fetch_update(relaxed, relaxed, more).ok().map(|_| Self)
    }
}

impl Drop for RecordingTurn {
    fn drop(&mut self) {
        RECORDINGS.fetch_sub(1, Ordering::Relaxed);
    }
}

fn stored_working_set(store: &Store, image: ImageId) -> Option<WorkingSet> {
    let bytes = match store.working_set(image) {
        Ok(bytes) => bytes?,
        Err(error) => {
            tracing::warn!("{error}");
            return None;
        }
    };
    match WorkingSet::from_bytes(&bytes) {
        Ok(set) => Some(set),
        Err(error) => {
            tracing::warn!("{error}");
            None
        }
    }
}

struct SandboxInstance {
    sandbox: AsyncFd<Sandbox>,
    pid: u32,
    /// What it was booted from.
    plan: Arc<BootPlan>,
    shared: Arc<Shared>,
    /// This process's ends of the pipes for its output, until it has booted.
    pipes: Option<InstancePipes>,
    log: InstanceLog,
    /// What it said about its end, if anything.
    end: Option<End>,
    /// It was asked to come to rest.
    asked_to_rest: bool,
    /// This node has ended it, or does so after the recording.
    killed: bool,
    gone: bool,
    /// Its working set is being recorded.
    recording: Option<JoinHandle<()>>,
    /// When it is ended although its working set is still being recorded.
    last_moment: Option<Pin<Box<Sleep>>>,
    /// It has hung up, and how it ended is not known yet.
    parting: Option<Parting>,
    /// It outlives this daemon.
    kept: Option<KeptForSuccessor>,
}

/// The zygote parent tells a moment later how a process has ended.
struct Parting {
    next_look: Pin<Box<Sleep>>,
    looks_left: u32,
}

/// How often it is looked how a process has ended, and how long between two looks.
const PARTING_LOOKS: (u32, Duration) = (20, Duration::from_millis(1));

/// Hands connections to a sandbox.
struct SandboxConnector {
    connector: thaw_sandbox::Connector,
    port: u16,
}

impl Connector for SandboxConnector {
    fn connect(&self, client: &Client) -> io::Result<()> {
        let local = (client.local.ip(), self.port).into();
        let connection = connection(client.id, client.peer, local);
        self.connector.send_connection(&connection, client.socket.as_fd())
    }
}

impl SandboxInstance {
    /// One that runs, of the function whose things `shared` are.
    ///
    /// # Errors
    /// The host has no descriptors left to watch it.
    fn new(
        sandbox: Sandbox,
        plan: Arc<BootPlan>,
        shared: Arc<Shared>,
        log: InstanceLog,
    ) -> io::Result<Self> {
        let sandbox = watch_sandbox(sandbox)?;
        sandbox.get_ref().label(&shared.label);
        Ok(Self {
            pid: sandbox.get_ref().pid(),
            sandbox,
            plan,
            shared,
            pipes: None,
            log,
            end: None,
            asked_to_rest: false,
            killed: false,
            gone: false,
            recording: None,
            last_moment: None,
            parting: None,
            kept: None,
        })
    }

    /// Sends what waits for room, and has the task woken when there is some.
    fn flush(&mut self, context: &mut Context<'_>) {
        while let Poll::Ready(Ok(mut ready)) = self.sandbox.poll_write_ready_mut(context) {
            // That its process has ended is what the next read says.
            let ended = ready.get_inner_mut().flush().is_err();
            if ended || !ready.get_inner().wants_write() {
                return;
            }
            ready.clear_ready();
        }
    }

    /// What its policy has denied since the last call.
    fn denials(&self) -> Option<Report> {
        let denials = self.sandbox.get_ref().take_denials();
        (!denials.is_empty()).then_some(Report::Denied(denials))
    }

    /// How it ended; waits a moment for an end that nobody here has wanted.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<End> {
        if let Some(end) = self.end.take() {
            return Poll::Ready(end);
        }
        let (looks, between) = PARTING_LOOKS;
        loop {
            let status = self.sandbox.get_ref().try_wait();
            let left = self.parting.as_ref().map_or(looks, |parting| parting.looks_left);
            if self.killed || status.is_some() || left == 0 {
                // Why this node has ended it, it knows.
                let limit = if self.killed { None } else { self.sandbox.get_ref().limit_reached() };
                let killed = || End::Killed(status.and_then(|status| status.signal()));
                return Poll::Ready(limit.map_or_else(killed, End::LimitReached));
            }
            let parting = self.parting.get_or_insert_with(|| Parting {
                next_look: Box::pin(sleep(between)),
                looks_left: looks,
            });
            ready!(parting.next_look.as_mut().poll(context));
            parting.looks_left -= 1;
            parting.next_look = Box::pin(sleep(between));
        }
    }

    /// It has hung up: says how it ended, as soon as that is known.
    fn part(&mut self, context: &mut Context<'_>) -> Poll<Report> {
        let end = ready!(self.poll_end(context));
        self.gone = true;
        Poll::Ready(Report::Gone(end))
    }

    /// Ends it now if that has waited for the recording, which is over.
    fn poll_recording(&mut self, context: &mut Context<'_>) {
        let Some(recording) = &mut self.recording else { return };
        let is_late = |moment: &mut Pin<Box<Sleep>>| moment.as_mut().poll(context).is_ready();
        let is_late = self.last_moment.as_mut().is_some_and(is_late);
        if is_late || Pin::new(recording).poll(context).is_ready() {
            // One that is late finds that its process has ended.
            self.recording = None;
            if self.killed {
                self.end_process();
            }
        }
    }

    fn end_process(&self) {
        if let Err(error) = self.sandbox.get_ref().kill() {
            tracing::warn!(pid = self.pid, "cannot end a sandbox: {error}");
        }
    }
}

impl Instance for SandboxInstance {
    fn pid(&self) -> u32 {
        self.pid
    }

    fn identify(&mut self, id: u64) {
        self.log.identify(id, self.pid);
    }

    fn connector(&self) -> Arc<dyn Connector> {
        let connector = self.sandbox.get_ref().connector();
        Arc::new(SandboxConnector { connector, port: self.shared.port })
    }

    fn keep(&mut self, note: &str) -> io::Result<()> {
        // One that is about to be frozen would wait for this daemon for ever.
        if self.kept.is_none() && !self.asked_to_rest {
            let readers = self.log.for_successor()?;
            let readers = [readers[0].as_fd(), readers[1].as_fd()];
            self.kept = self.sandbox.get_ref().keep(note, &readers)?;
        }
        Ok(())
    }

    fn ring_if_unread(&mut self) {
        if let Err(error) = self.sandbox.get_ref().ring_if_unread() {
            tracing::warn!(pid = self.pid, "cannot ring the doorbell of a sandbox: {error}");
        }
    }

    fn kill(&mut self) {
        self.killed = true;
        // An instance that serves one request shows its working set before it ends.
        if self.recording.is_some() {
            self.last_moment.get_or_insert_with(|| Box::pin(sleep(RECORDING_PATIENCE)));
        } else {
            self.end_process();
        }
    }

    fn poll_report(&mut self, context: &mut Context<'_>) -> Poll<Report> {
        if self.gone {
            return Poll::Pending;
        }
        self.poll_recording(context);
        if self.parting.is_some() {
            return self.part(context);
        }
        if self.sandbox.get_ref().wants_write() {
            self.flush(context);
        }
        if let Some(report) = self.denials() {
            return Poll::Ready(report);
        }
        loop {
            // The runtime is shutting down if it fails.
            let Ok(mut ready) = ready!(self.sandbox.poll_read_ready_mut(context)) else {
                return Poll::Pending;
            };
            match ready.get_inner_mut().poll_event() {
                Progress::Event(Event::Booted(times)) => {
                    if let Some(pipes) = self.pipes.take() {
                        pipes.handed_over();
                    }
                    return Poll::Ready(Report::Booted(times));
                }
                Progress::Event(Event::ConnectionClosed { id }) => {
                    return Poll::Ready(Report::ConnectionClosed(id));
                }
                Progress::Event(Event::Exit(exit)) => self.end = Some(End::Exited(exit)),
                Progress::Event(Event::Failed(reason)) => self.end = Some(End::Failed(reason)),
                Progress::Event(Event::Violation(violation)) => {
                    self.end = Some(End::Violation(violation.to_string()));
                }
                Progress::Event(Event::Prepared) => {
                    self.end = Some(End::Violation("it was prepared twice".into()));
                    self.kill();
                }
                // A thawed copy reports its entry point only if asked to freeze.
                Progress::Event(Event::EntryPoint(rest)) if self.asked_to_rest => {
                    self.asked_to_rest = false;
                    return Poll::Ready(Report::AtRest(rest));
                }
                Progress::Event(Event::EntryPoint(_)) => {
                    self.end = Some(End::Violation("it reported an entry point unasked".into()));
                    self.kill();
                }
                Progress::Event(Event::Hangup) => return self.part(context),
                Progress::Busy => {
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Progress::Idle => {
                    ready.clear_ready();
                    if let Some(report) = self.denials() {
                        return Poll::Ready(report);
                    }
                    if self.sandbox.get_ref().wants_write() {
                        self.flush(context);
                    }
                }
            }
        }
    }

    fn first_request_done(&mut self) {
        self.recording = self.shared.begin_recording(self.sandbox.get_ref(), &self.plan);
        if self.plan.prefetches() {
            self.shared.cold.fill_behind(&self.shared.image);
        }
    }

    fn request_rest(&mut self) -> io::Result<()> {
        self.asked_to_rest = true;
        self.kept = None;
        self.sandbox.get_mut().request_freeze()
    }

    fn freeze(&mut self, rest: EntryPoint) -> Result<FrozenInstance, String> {
        let (shared, sandbox) = (&self.shared, self.sandbox.get_ref());
        let (image, report) = freeze_instance(
            &shared.store,
            shared.function.as_str(),
            sandbox,
            rest,
            &shared.rootfs,
            shared.image_id,
        )
        .map_err(|error| error.to_string())?;
        Ok(FrozenInstance {
            image: image.to_string(),
            file_len: report.file_len,
            stored: report.stored,
            mappings: report.mappings,
            freeze_ms: report.duration.as_secs_f64() * 1e3,
        })
    }
}
