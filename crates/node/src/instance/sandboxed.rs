//! Instances that are sandboxes.

use super::launch::{Client, End, Instance, LaunchError, Launched, Launcher, Report};
use crate::clock::monotonic_ns;
use crate::config::{FunctionConfig, egress_policy};
use crate::logs::LogPipes;
use crate::reactor::watch_sandbox;
use crate::rootfs::StoredRootfs;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use thaw_sandbox::{
    BootError, BootPlan, EgressPolicy, Event, Image, PlanError, PopulatePolicy, Progress, Sandbox,
    ThawOptions, WorkingSet, ZygotePool, connection,
};
use thaw_store::{ImageId, Store};
use tokio::io::unix::AsyncFd;

/// Zygotes that are tried for one boot: they may die while they wait.
const ZYGOTES_TRIED: u32 = 3;
/// After this long without a boot, the image may have left the page cache.
const COLD_AFTER: Duration = Duration::from_secs(30);

/// Whether and how a working set is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkingSetUse {
    /// Recorded on the first request if there is none, and populated so.
    Populate(PopulatePolicy),
    /// Neither recorded nor used.
    Off,
}

/// Boots sandboxes from one image.
pub struct SandboxLauncher {
    shared: Arc<Shared>,
}

/// What a launcher and its instances share.
struct Shared {
    pool: Arc<ZygotePool>,
    image: Image,
    rootfs: StoredRootfs,
    store: Store,
    image_id: ImageId,
    plan: RwLock<Arc<BootPlan>>,
    working_set: Mutex<WorkingSetState>,
    logs: LogPipes,
    memory_limit: u64,
    cpu_time_limit: Option<Duration>,
    port: u16,
    flags: u32,
    egress: Arc<EgressPolicy>,
    last_boot_ns: AtomicU64,
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
        working_set: WorkingSetUse,
    ) -> Result<Self, PlanError> {
        let mut plan = image.plan(rootfs.file(), rootfs.file_len(), rootfs.blobs())?;
        let working_set = match working_set {
            WorkingSetUse::Off => WorkingSetState::Off,
            WorkingSetUse::Populate(policy) => match stored_working_set(store, image_id) {
                Some(set) if plan.apply_working_set(&set, policy).is_ok() => {
                    WorkingSetState::Known(Arc::new(set))
                }
                _ => WorkingSetState::Wanted(policy),
            },
        };
        let shared = Shared {
            pool,
            image,
            rootfs,
            store: store.clone(),
            image_id,
            plan: RwLock::new(Arc::new(plan)),
            working_set: Mutex::new(working_set),
            logs,
            memory_limit: config.limits.memory.bytes(),
            cpu_time_limit: config.limits.cpu_time.map(|span| span.0),
            port: config.port.get(),
            flags: crate::debug::flags(),
            egress: egress_policy(&config.egress.allow),
            last_boot_ns: AtomicU64::new(0),
        };
        Ok(Self { shared: Arc::new(shared) })
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
        let plan = shared.plan.read().expect("no holder panics").clone();
        let options = ThawOptions {
            stdout: shared.logs.stdout(),
            stderr: shared.logs.stderr(),
            memory_limit: shared.memory_limit,
            cpu_time_limit: shared.cpu_time_limit,
            flags: shared.flags,
            hostname: "",
            egress: &shared.egress,
        };
        let handed = client.map(|client| {
            // The guest listens on its own port, whatever the gateway's is.
            let local = (client.local.ip(), shared.port).into();
            (connection(client.id, client.peer, local), std::os::fd::AsFd::as_fd(&client.socket))
        });
        let mut tried = 0;
        let (sandbox, zygote_ns) = loop {
            let zygote = shared.pool.take().map_err(|error| LaunchError(error.to_string()))?;
            let zygote_ns = monotonic_ns();
            tried += 1;
            match zygote.thaw(&plan, handed, &options) {
                Ok(sandbox) => break (sandbox, zygote_ns),
                Err(BootError::ZygoteDied) if tried < ZYGOTES_TRIED => {}
                Err(error) => return Err(LaunchError(error.to_string())),
            }
        };
        shared.read_ahead_if_cold(zygote_ns);
        let sandbox = watch_sandbox(sandbox).map_err(|error| {
            LaunchError(format!(
                "cannot watch the new instance ({error}); raise the limit of open files"
            ))
        })?;
        let pid = sandbox.get_ref().pid();
        let instance = SandboxInstance {
            sandbox,
            pid,
            plan,
            shared: shared.clone(),
            end: None,
            killed: false,
            gone: false,
        };
        Ok(Launched { instance: Box::new(instance), zygote_ns })
    }

    fn is_ready(&self) -> bool {
        self.shared.pool.stats().ready > 0
    }
}

impl Shared {
    /// Lets the host read the working set in large requests while the sandbox
    /// already maps, if the image may have left the page cache.
    fn read_ahead_if_cold(self: &Arc<Self>, now_ns: u64) {
        let last = self.last_boot_ns.swap(now_ns, Ordering::Relaxed);
        if now_ns.saturating_sub(last) < COLD_AFTER.as_nanos() as u64 {
            return;
        }
        let set = match &*self.working_set.lock().expect("no holder panics") {
            WorkingSetState::Known(set) => set.clone(),
            _ => return,
        };
        let shared = self.clone();
        let read = move || {
            if let Err(error) = set.read_ahead(&shared.image) {
                tracing::debug!("could not read ahead: {error}");
            }
        };
        // Without a runtime there is nobody to do it meanwhile.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn_blocking(read);
        }
    }

    /// Records what `sandbox`, booted from `plan`, has touched, stores it, and
    /// makes later boots use it.
    fn record(&self, sandbox: &Sandbox, plan: &BootPlan) {
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
        let (file, len, blobs) = (self.rootfs.file(), self.rootfs.file_len(), self.rootfs.blobs());
        let new = self.image.plan(file, len, blobs).and_then(|mut plan| {
            plan.apply_working_set(&set, policy)?;
            Ok(plan)
        });
        match new {
            Ok(plan) => {
                tracing::debug!(ranges = plan.populate().len(), "recorded a working set");
                *self.plan.write().expect("no holder panics") = Arc::new(plan);
                *self.working_set.lock().expect("no holder panics") =
                    WorkingSetState::Known(Arc::new(set));
            }
            Err(error) => tracing::warn!("a working set cannot be used: {error}"),
        }
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
    /// This node has ended it.
    killed: bool,
    gone: bool,
}

impl SandboxInstance {
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

    fn connect(&mut self, client: &Client) -> io::Result<()> {
        let local = (client.local.ip(), self.shared.port).into();
        let connection = connection(client.id, client.peer, local);
        let socket = std::os::fd::AsFd::as_fd(&client.socket);
        self.sandbox.get_mut().send_connection(&connection, socket)
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
        loop {
            match self.sandbox.get_mut().poll_event() {
                Progress::Event(Event::Booted(times)) => return Poll::Ready(Report::Booted(times)),
                Progress::Event(Event::ConnectionClosed { id }) => {
                    return Poll::Ready(Report::ConnectionClosed(id));
                }
                Progress::Event(Event::Exit(exit)) => self.end = Some(End::Exited(exit)),
                Progress::Event(Event::Failed(reason)) => self.end = Some(End::Failed(reason)),
                Progress::Event(Event::Violation(violation)) => {
                    self.end = Some(End::Violation(violation.to_string()));
                }
                // A thawed copy reports its entry point only if asked to freeze.
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
                    let mut waits = true;
                    if self.sandbox.get_ref().wants_write()
                        && let Poll::Ready(ready) = self.sandbox.poll_write_ready(context)
                    {
                        match ready {
                            Ok(mut guard) => guard.clear_ready(),
                            Err(_) => return Poll::Pending,
                        }
                        waits = false;
                    }
                    if waits {
                        match ready!(self.sandbox.poll_read_ready(context)) {
                            Ok(mut guard) => guard.clear_ready(),
                            // The runtime is shutting down.
                            Err(_) => return Poll::Pending,
                        }
                    }
                }
            }
        }
    }

    fn first_request_done(&mut self) {
        self.shared.record(self.sandbox.get_ref(), &self.plan);
    }
}
