//! Instances that are sandboxes.

use super::launch::{
    Client, Connector, End, FrozenInstance, Instance, LaunchError, Launched, Launcher, Report,
    StandbyInfo,
};
use super::options::{LaunchOptions, Techniques, WorkingSetUse};
use super::standby::Standby;
use crate::boots::BootKind;
use crate::build::freeze_instance;
use crate::clock::monotonic_ns;
use crate::config::{FunctionConfig, FunctionName};
use crate::logs::LogPipes;
use crate::reactor::watch_sandbox;
use crate::rootfs::StoredRootfs;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use thaw_abi::control::{Connection, EntryPoint};
use thaw_sandbox::{
    BootError, BootPlan, EgressPolicy, Event, Image, PlanError, PopulatePolicy, Progress, Sandbox,
    ThawOptions, WorkingSet, ZygotePool, connection,
};
use thaw_store::{ImageId, Store};
use tokio::io::unix::AsyncFd;

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
    image: Image,
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
    logs: LogPipes,
    memory_limit: u64,
    cpu_time_limit: Option<Duration>,
    port: u16,
    flags: u32,
    egress: Arc<EgressPolicy>,
    last_boot_ns: AtomicU64,
    /// Boots from the image so far.
    image_boots: AtomicU64,
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
        logs: LogPipes,
        config: &FunctionConfig,
        options: LaunchOptions,
    ) -> Result<Self, PlanError> {
        let new_plan = || image.plan(rootfs.file(), rootfs.file_len(), rootfs.blobs());
        let (mut plan, mut ready_plan) = (new_plan()?, new_plan()?);
        let LaunchOptions { working_set, policy, techniques } = options;
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
            image,
            rootfs,
            store: store.clone(),
            image_id,
            plan: RwLock::new(Arc::new(techniques.reduce(plan))),
            ready_plan: RwLock::new(Arc::new(techniques.reduce(ready_plan))),
            standby: Standby::new(policy),
            techniques,
            working_set: Mutex::new(working_set),
            logs,
            memory_limit: config.limits.memory.bytes(),
            cpu_time_limit: config.limits.cpu_time.map(|span| span.0),
            port: config.port_number(),
            flags: crate::debug::flags() | config.entry_flags() | techniques.flags(),
            egress: config.egress.policy(),
            last_boot_ns: AtomicU64::new(0),
            image_boots: AtomicU64::new(0),
        };
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
            BootKind::Ready => shared.standby.fill_ready(shared),
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
            (connection(client.id, client.peer, local), std::os::fd::AsFd::as_fd(&client.socket))
        });
        let boot = match shared.standby.boot(shared, handed) {
            Some(boot) => boot,
            None => shared.boot_from_image(handed)?,
        };
        shared.replenish();
        let Boot { sandbox, plan, kind, taken_ns } = boot;
        let sandbox = watch_sandbox(sandbox).map_err(|error| {
            LaunchError(format!(
                "cannot watch the new instance ({error}); raise the limit of open files"
            ))
        })?;
        let pid = sandbox.get_ref().pid();
        let shared = shared.clone();
        let instance = SandboxInstance {
            sandbox,
            pid,
            plan,
            shared,
            end: None,
            asked_to_rest: false,
            killed: false,
            gone: false,
        };
        Ok(Launched { instance: Box::new(instance), kind, zygote_ns: taken_ns })
    }

    fn is_ready(&self) -> bool {
        self.shared.standby.is_ready() || self.shared.pool.stats().ready > 0
    }

    fn standby(&self) -> StandbyInfo {
        self.shared.standby.info()
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
}

/// A client's socket on its way into a sandbox.
pub(super) type Handed<'a> = Option<(Connection, BorrowedFd<'a>)>;

impl Shared {
    fn boot_from_image(self: &Arc<Self>, handed: Handed<'_>) -> Result<Boot, LaunchError> {
        let plan = self.plan.read().expect("no holder panics").clone();
        let mut tried = 0;
        let booted = loop {
            let zygote = match self.pool.take_in_haste(self.memory_limit) {
                Ok(zygote) => zygote,
                Err(error) => break Err(LaunchError(error.to_string())),
            };
            let taken_ns = monotonic_ns();
            tried += 1;
            match zygote.thaw(&plan, handed, &self.options()) {
                Ok(sandbox) => break Ok((sandbox, taken_ns)),
                Err(BootError::ZygoteDied) if tried < ZYGOTES_TRIED => self.pool.discard_dead(),
                Err(error) => break Err(LaunchError(error.to_string())),
            }
        };
        self.pool.replenish();
        let (sandbox, taken_ns) = booted?;
        self.image_boots.fetch_add(1, Ordering::Relaxed);
        let is_cold = self.read_ahead_if_cold(taken_ns, &plan);
        let kind = if is_cold { BootKind::Cold } else { BootKind::Warm };
        Ok(Boot { sandbox, plan, kind, taken_ns })
    }

    /// What every boot is told.
    pub fn options(&self) -> ThawOptions<'_> {
        ThawOptions {
            stdout: self.logs.stdout(),
            stderr: self.logs.stderr(),
            memory_limit: self.memory_limit,
            cpu_time_limit: self.cpu_time_limit,
            flags: self.flags,
            hostname: "",
            egress: &self.egress,
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

    /// Lets the host read the working set in large requests while the sandbox
    /// already maps, if the image may have left the page cache; whether it may.
    fn read_ahead_if_cold(self: &Arc<Self>, now_ns: u64, plan: &Arc<BootPlan>) -> bool {
        let last = self.last_boot_ns.swap(now_ns, Ordering::Relaxed);
        if now_ns.saturating_sub(last) < COLD_AFTER.as_nanos() as u64 {
            return false;
        }
        let set = match &*self.working_set.lock().expect("no holder panics") {
            WorkingSetState::Known(set) => set.clone(),
            _ => return true,
        };
        let (shared, plan) = (self.clone(), plan.clone());
        let read = move || {
            let read = set.read_ahead(&shared.image).and_then(|_| set.read_ahead_blobs(&plan));
            if let Err(error) = read {
                tracing::debug!("could not read ahead: {error}");
            }
        };
        // Without a runtime there is nobody to do it meanwhile.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn_blocking(read);
        }
        true
    }

    /// Records what `sandbox`, booted from `plan`, has touched, stores it, and
    /// makes later boots use it.
    fn record(self: &Arc<Self>, sandbox: &Sandbox, plan: &BootPlan) {
        let policy = {
            let mut state = self.working_set.lock().expect("no holder panics");
            match *state {
                // Only one instance is asked; if it fails, boots go on without.
                WorkingSetState::Wanted(policy) => {
                    *state = WorkingSetState::Off;
                    policy
                }
                _ => return,
            }
        };
        let set = match WorkingSet::record(sandbox, plan) {
            Ok(set) => set,
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
        let new_plan = |policy| {
            let (file, len) = (self.rootfs.file(), self.rootfs.file_len());
            let mut plan = self.image.plan(file, len, self.rootfs.blobs())?;
            plan.apply_working_set(&set, policy)?;
            Ok::<_, PlanError>(Arc::new(self.techniques.reduce(plan)))
        };
        match new_plan(policy).and_then(|plan| Ok((plan, new_plan(PopulatePolicy::Both)?))) {
            Ok((plan, ready_plan)) => {
                tracing::debug!(ranges = plan.populate().len(), "recorded a working set");
                *self.plan.write().expect("no holder panics") = plan;
                *self.ready_plan.write().expect("no holder panics") = ready_plan;
                *self.working_set.lock().expect("no holder panics") =
                    WorkingSetState::Known(Arc::new(set));
            }
            Err(error) => tracing::warn!("a working set cannot be used: {error}"),
        }
        self.replenish();
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
    /// What it said about its end, if anything.
    end: Option<End>,
    /// It was asked to come to rest.
    asked_to_rest: bool,
    /// This node has ended it.
    killed: bool,
    gone: bool,
}

/// Hands connections to a sandbox.
struct SandboxConnector {
    connector: thaw_sandbox::Connector,
    port: u16,
}

impl Connector for SandboxConnector {
    fn connect(&self, client: &Client) -> io::Result<()> {
        let local = (client.local.ip(), self.port).into();
        let connection = connection(client.id, client.peer, local);
        self.connector.send_connection(&connection, std::os::fd::AsFd::as_fd(&client.socket))
    }
}

impl SandboxInstance {
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
        (denials.total > 0).then_some(Report::Denied(denials))
    }

    fn how_it_ended(&mut self) -> End {
        if let Some(end) = self.end.take() {
            return end;
        }
        let sandbox = self.sandbox.get_ref();
        let mut status = sandbox.try_wait();
        // The zygote parent tells a moment later how the process ended; only an
        // end that nobody here has wanted is worth that moment.
        for _ in 0..20 {
            if self.killed || status.is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
            status = sandbox.try_wait();
        }
        End::Killed(status.and_then(|status| status.signal()))
    }
}

impl Instance for SandboxInstance {
    fn pid(&self) -> u32 {
        self.pid
    }

    fn connector(&self) -> Arc<dyn Connector> {
        let connector = self.sandbox.get_ref().connector();
        Arc::new(SandboxConnector { connector, port: self.shared.port })
    }

    fn knock_if_unread(&mut self) {
        if let Err(error) = self.sandbox.get_ref().knock_if_unread() {
            tracing::warn!(pid = self.pid, "cannot knock at a sandbox: {error}");
        }
    }

    fn kill(&mut self) {
        self.killed = true;
        if let Err(error) = self.sandbox.get_ref().kill() {
            tracing::warn!(pid = self.pid, "cannot end a sandbox: {error}");
        }
    }

    fn poll_report(&mut self, context: &mut Context<'_>) -> Poll<Report> {
        if self.gone {
            return Poll::Pending;
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
                Progress::Event(Event::Booted(times)) => return Poll::Ready(Report::Booted(times)),
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
                Progress::Event(Event::Hangup) => {
                    self.gone = true;
                    return Poll::Ready(Report::Gone(self.how_it_ended()));
                }
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
        self.shared.record(self.sandbox.get_ref(), &self.plan);
    }

    fn request_rest(&mut self) -> io::Result<()> {
        self.asked_to_rest = true;
        self.sandbox.get_mut().request_freeze()
    }

    fn freeze(&mut self, rest: EntryPoint) -> Result<FrozenInstance, String> {
        let (shared, sandbox) = (&self.shared, self.sandbox.get_ref());
        let (image, report) =
            freeze_instance(&shared.store, shared.function.as_str(), sandbox, rest, &shared.rootfs)
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
