//! `thaw serve`: everything together.

use crate::activation::{self, ActivationError};
use crate::admin::{
    Admin, AdminAddress, AdminToken, LocalListener, RemoteAccess, TokenError, listen_at,
};
use crate::asleep::AsleepSpace;
use crate::catalog::Catalog;
use crate::config::{ByteSize, EntryKind, FunctionName, QUOTAS_FILE, QuotasError};
use crate::dashboard::Dashboard;
use crate::deploy::take_out_failing;
use crate::e2b::{self, E2b, LiveSettings, NodeBackend};
use crate::edge::{GATEWAY_FILE, GatewayFileError};
use crate::gateway::{Gateway, GatewayConfig};
use crate::history::History;
use crate::home::{DaemonAddress, DaemonLock, Home, HomeError};
use crate::instance::WorkingSetUse;
use crate::legacy;
use crate::logs::{AccessFile, LogLimits, Logs};
use crate::node::NodeState;
use crate::pressure::watch_pressure;
use crate::pulls::keep_fetching;
use crate::sandboxes::Sandboxes;
use crate::secrets::SecretStore;
use crate::successor::watch_refusals;
use crate::swap::SwapSpace;
use crate::tenants::{CARRIED_FILE, read_periods, watch_cpu_time, write_down};
use crate::tls_listeners::{TlsListeners, watch_files};
use crate::traces::TraceSettings;
use crate::triggers::Triggers;
use crate::volumes::VolumeStore;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::{BTreeMap, HashMap};
use std::future::{Future, poll_fn};
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;
use thaw_sandbox::{
    Console, ConsoleOutput, CoreError, CoreScheduling, GuardedPort, KernelError, PoolConfig,
    PortGuard, Transport, WeakLimits, ZygoteConfig, ZygoteError, ZygotePool, limits, monitor,
};
use thaw_store::{Store, StoreError};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::{JoinError, JoinHandle};

/// How long sending the last spans may take.
const TRACES_PATIENCE: Duration = Duration::from_secs(2);
/// How long writing the last lines of functions may take.
const LOGS_PATIENCE: Duration = Duration::from_secs(3);

/// How a node serves.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Zygotes kept ready.
    pub zygotes: usize,
    /// Most instances of all functions together.
    pub max_instances: usize,
    /// Times of the gateway.
    pub gateway: GatewayConfig,
    /// How long busy instances may go on after `SIGTERM`.
    pub drain: Duration,
    /// Room on disk for images as they are booted; beyond, some are packed.
    pub unpacked: ByteSize,
    /// Whether and how working sets are used.
    pub working_set: WorkingSetUse,
    /// Whether to serve on a host that does not enforce the functions' limits.
    pub weak_limits: WeakLimits,
    /// Whether somebody else has the listeners, too, and another daemon will: clients that come
    /// while this one ends wait for that one.
    pub clients_wait: bool,
    /// Whether sandboxes of different tenants may share a core at a time.
    pub cores: CoreSharing,
    /// How much is kept of what functions log, and of the access log.
    pub logs: LogLimits,
    /// Where E2B's API is served, if it is.
    pub e2b: Option<SocketAddr>,
    /// Where traces go, if somebody wants them.
    pub traces: Option<TraceSettings>,
}

/// Who may share a core at a time, where cores have several hardware threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CoreSharing {
    /// Everybody.
    #[default]
    All,
    /// Sandboxes of one tenant.
    Tenant,
}

/// Where a node is reached.
#[derive(Clone, Debug)]
pub struct ListenOptions {
    /// Address of the shared gateway.
    pub gateway: SocketAddr,
    /// Where the admin API listens beside its Unix socket.
    pub admin: Option<AdminOptions>,
    /// Where the dashboard listens.
    pub dashboard: Option<AdminOptions>,
}

/// The admin API over TCP, or the dashboard.
#[derive(Clone, Debug)]
pub struct AdminOptions {
    /// Its address.
    pub address: SocketAddr,
    /// The file with the token that clients must show, made if missing.
    pub token_file: PathBuf,
    /// Names under which clients know it, beside addresses and `localhost`.
    pub names: Vec<String>,
}

/// Why the node cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The state directory is not usable.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The store is not usable.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is no kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// No zygotes can be made.
    #[error(transparent)]
    Zygote(#[from] ZygoteError),
    /// Tenants cannot be kept apart on cores.
    #[error(transparent)]
    Cores(#[from] CoreError),
    /// A monitor and its daemon do not find each other.
    #[error(transparent)]
    Rendezvous(#[from] crate::monitor::RendezvousError),
    /// An address is not available.
    #[error("cannot listen on {address} ({error}); choose another address with {option}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The option that changes it.
        option: &'static str,
        /// What the system said.
        error: io::Error,
    },
    /// The admin API's socket cannot be made.
    #[error("cannot make the socket {} ({error}); free the path, or set THAW_HOME to another directory", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// There is no token for the admin API.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// What is said of clients is not usable.
    #[error(transparent)]
    Gateway(#[from] GatewayFileError),
    /// The quotas of tenants are not usable.
    #[error(transparent)]
    Quotas(#[from] QuotasError),
    /// The settings of E2B's API are not usable.
    #[error(transparent)]
    E2b(#[from] e2b::SettingsError),
    /// The service manager has sockets that are of no use.
    #[error(transparent)]
    Activation(#[from] ActivationError),
    /// Traces cannot be sent as somebody has said.
    #[error("{0}")]
    Traces(String),
    /// The host refused something.
    #[error("cannot serve ({0}); `thaw doctor` says what this host lacks")]
    Io(#[from] io::Error),
}

/// What a daemon may need root's rights for: its lock, its listeners and its token.
#[derive(Debug)]
pub struct Prepared {
    lock: DaemonLock,
    gateway: TcpListener,
    admin: Option<(TcpListener, RemoteAccess)>,
    dashboard: Option<(TcpListener, RemoteAccess)>,
    /// The socket of the admin API, where the daemon may make none.
    local_admin: Option<OwnedFd>,
}

impl Prepared {
    /// Locks the directory and binds the addresses.
    ///
    /// # Errors
    /// Another daemon has them, or the token cannot be used.
    pub fn make(home: &Home, options: &ListenOptions) -> Result<Self, ServeError> {
        let lock = home.lock()?;
        let gateway = bind(options.gateway, "--listen")?;
        let with = |option| move |options| bind_admin(options, option);
        let admin = options.admin.as_ref().map(with("--admin")).transpose()?;
        let dashboard = options.dashboard.as_ref().map(with("--dashboard")).transpose()?;
        Ok(Self { lock, gateway, admin, dashboard, local_admin: None })
    }

    /// Listens for clients of the admin API, too.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub(crate) fn listen_locally(&mut self, home: &Home) -> Result<(), ServeError> {
        let path = home.admin_socket();
        let socket =
            listen_at(&path).map_err(|error| ServeError::Socket { path: path.clone(), error })?;
        self.local_admin = Some(socket);
        Ok(())
    }

    /// What clients of the admin API over TCP must show.
    pub(crate) fn access(&self) -> Option<&RemoteAccess> {
        self.admin.as_ref().map(|(_, access)| access)
    }

    /// What users of the dashboard must show.
    pub(crate) fn dashboard_access(&self) -> Option<&RemoteAccess> {
        self.dashboard.as_ref().map(|(_, access)| access)
    }

    /// Says which sockets of the service manager these listeners are.
    fn note_users(&self) -> io::Result<()> {
        let others = [("--admin", &self.admin), ("--dashboard", &self.dashboard)];
        activation::note_user(self.gateway.local_addr()?, "--listen");
        for (option, listener) in others {
            if let Some((listener, _)) = listener {
                activation::note_user(listener.local_addr()?, option);
            }
        }
        Ok(())
    }

    /// What [`Prepared::inherited`] takes.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let activated = activation::descriptors();
        let admin = self.admin.iter().map(|(listener, _)| listener.as_fd());
        let dashboard = self.dashboard.iter().map(|(listener, _)| listener.as_fd());
        let local_admin = self.local_admin.iter().map(AsFd::as_fd);
        let first = [self.lock.as_fd(), self.gateway.as_fd()];
        let own = first.into_iter().chain(admin).chain(dashboard).chain(local_admin);
        own.chain(activated).collect()
    }

    /// The same in another process, from its descriptors, of which the last `activated` are
    /// the service manager's, and what clients must show.
    ///
    /// # Errors
    /// Some are missing.
    pub(crate) fn inherited(
        home: &Home,
        mut descriptors: Vec<OwnedFd>,
        activated: usize,
        access: Option<RemoteAccess>,
        dashboard: Option<RemoteAccess>,
    ) -> io::Result<Self> {
        activation::inherit(descriptors.split_off(descriptors.len().saturating_sub(activated)))?;
        let mut descriptors = descriptors.into_iter();
        let mut next =
            || descriptors.next().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData));
        let lock = DaemonLock::inherited(home, next()?);
        let gateway: TcpListener = next()?.into();
        let mut with = |access: Option<RemoteAccess>| match access {
            Some(access) => Ok::<_, io::Error>(Some((next()?.into(), access))),
            None => Ok(None),
        };
        let (admin, dashboard) = (with(access)?, with(dashboard)?);
        let prepared = Self { lock, gateway, admin, dashboard, local_admin: descriptors.next() };
        prepared.note_users()?;
        Ok(prepared)
    }
}

/// Serves the functions in `home` until `SIGTERM` or `SIGINT`, then drains.
/// `on_ready` is called when clients are served.
///
/// # Errors
/// The node cannot start, or its listeners fail.
pub async fn serve(
    home: &Home,
    options: &ServeOptions,
    prepared: Prepared,
    on_ready: impl FnOnce(&DaemonAddress, &Catalog),
) -> Result<(), ServeError> {
    raise_file_limit();
    let Prepared { lock, gateway: gateway_listener, admin: remote_admin, dashboard, local_admin } =
        prepared;
    let gateway_address = gateway_listener.local_addr()?;
    let socket = home.admin_socket();
    let local_admin = local_admin
        .map_or_else(|| listen_at(&socket), Ok)
        .and_then(|listening| LocalListener::new(listening, &socket))
        .map_err(|error| ServeError::Socket { path: socket.clone(), error })?;
    let remote_admin =
        remote_admin.map(|(listener, access)| serving(listener, access)).transpose()?;
    let admin_tcp = remote_admin.as_ref().map(|(listener, _)| listener.local_addr()).transpose()?;
    let dashboard = dashboard.map(|(listener, access)| serving(listener, access)).transpose()?;
    let dashboard_address =
        dashboard.as_ref().map(|(listener, _)| listener.local_addr()).transpose()?;
    let _guarded = guarded(gateway_address, Transport::Tcp, PortGuard::IfWrittenOut);
    let _guarded_admin =
        admin_tcp.map(|address| guarded(address, Transport::Tcp, PortGuard::Never));
    let _guarded_dashboard =
        dashboard_address.map(|address| guarded(address, Transport::Tcp, PortGuard::Never));

    let store = Store::open(&home.store())?;
    let console = console()?;
    // Before there are others.
    let legacy = thaw_sandbox::take_over(&console)?;
    let pool = start_pool_with(home, console, options.zygotes, options.weak_limits)?;
    let shared = NodeState::new(options.max_instances);
    if options.cores == CoreSharing::Tenant {
        shared.tenants().keep_apart(CoreScheduling::start()?);
    }
    shared.tenants().read_from(home.root().join(QUOTAS_FILE))?;
    shared.edge().read_from(home.root().join(GATEWAY_FILE))?;
    shared.edge().log_to(AccessFile::start(&home.logs()?, options.logs)?);
    shared.hibernate_in(SwapSpace::begin(home.swap()?)?);
    let asleep = AsleepSpace::at(home.asleep()?);
    let left_asleep = asleep.left()?;
    shared.sleep_in(asleep);
    shared.read_secrets_from(SecretStore::of(home.clone()));
    if let Some(link) = monitor::of_this_process() {
        shared.number_life(link.grant().life());
    }
    shared.egress().keep_in(home.root())?;
    shared.limits().keep_in(home.root())?;
    let waiting = legacy::reserve(&shared, legacy);
    shared.wake_up_with(left_asleep);
    warn_of_uncounted_cpu_time(&shared, &pool);
    let logs = Arc::new(Logs::start(&home.logs()?, options.logs)?);
    let catalog = Catalog::new(store, logs.clone(), pool, shared.clone(), options.working_set);
    let (first, volumes) = (catalog.clone(), VolumeStore::of(home.clone()));
    let swept = tokio::task::spawn_blocking(move || volumes.sweep(first.store())).await;
    if let Err(error) = swept.map_err(io::Error::other)? {
        tracing::warn!("what was left of snapshots of volumes is there still: {error}");
    }
    let first = catalog.clone();
    tokio::task::spawn_blocking(move || first.reload()).await.map_err(io::Error::other)??;
    let periods = home.root().join(CARRIED_FILE);
    if let Err(error) = read_periods(shared.tenants(), &periods) {
        tracing::warn!("{}: {error}; periods of CPU time begin anew", periods.display());
    }
    legacy::take_over(&shared, waiting);
    shared.forget_left_asleep();
    shared.egress().forget_gone(|id| shared.may_have_instance(id));
    shared.limits().forget_gone(|id| shared.may_have_instance(id));

    let tracing = options.traces.clone().map(|settings| {
        let tracer = shared.trace_with(settings);
        (tracer.clone(), tokio::spawn(tracer.send_all(shared.clone())))
    });
    let triggers = Triggers::start(
        &home.triggers()?,
        &shared,
        reachable(gateway_address),
        options.max_instances,
    )?;
    let gateway = Gateway::new(shared.clone(), options.gateway);
    let mut tasks = vec![tokio::spawn(gateway.clone().listen(gateway_listener, None))];
    let gateway_task = tasks[0].abort_handle();
    let freshness = tokio::spawn(catalog.clone().keep_fresh());
    let room_watch = tokio::spawn(catalog.clone().keep_room(options.unpacked.bytes()));
    let cpu_watch = tokio::spawn(watch_cpu_time(shared.clone(), periods.clone()));
    let files_watch = tokio::spawn(watch_files(shared.clone()));
    let pressure_watch = tokio::spawn(watch_pressure(shared.clone()));
    let sandboxes = Sandboxes::load(shared.clone(), home.root())?;
    let sandboxes_watch = tokio::spawn(sandboxes.clone().watch());
    let sleepers_watch = tokio::spawn(shared.clone().end_old_sleepers());
    let refusals_watch = monitor::of_this_process().map(|link| tokio::spawn(watch_refusals(link)));
    let e2b =
        options.e2b.map(|address| serve_e2b(address, home, &catalog, &sandboxes)).transpose()?;
    let (e2b_address, e2b_task) = e2b.unzip();
    tasks.extend(e2b_task);
    let own = Arc::new(OwnListeners::new(gateway, shared.clone()));
    own.update();
    let updated = own.clone();
    let failures_watch = {
        let own = own.clone();
        let on_change = move || drop(own.update());
        tokio::spawn(take_out_failing(catalog.clone(), shared.clone(), on_change))
    };
    {
        let updated = own.clone();
        let on_reload = Arc::new(move || updated.update());
        keep_fetching(catalog.clone(), home.clone(), on_reload)?;
    }
    let history = History::new(shared.clone(), catalog.pool().clone());
    let history_watch = tokio::spawn(history.clone().watch());
    let admin = Admin {
        history,
        shared: shared.clone(),
        catalog: catalog.clone(),
        gateway: reachable(gateway_address),
        sandboxes,
        home: home.clone(),
        counting: Arc::default(),
        on_reload: Arc::new(move || updated.update()),
    };
    if let Some((listener, access)) = remote_admin {
        tasks.push(tokio::spawn(admin.clone().serve_remote(listener, access)));
    }
    if let Some((listener, access)) = dashboard {
        tasks.push(tokio::spawn(Dashboard::new(admin.clone(), access).serve(listener)));
    }
    tasks.push(tokio::spawn(admin.serve_local(local_admin)));

    let address = DaemonAddress {
        pid: monitor::own_pid(),
        admin: AdminAddress::Unix(socket),
        admin_tcp,
        gateway: gateway_address,
        e2b: e2b_address,
        dashboard: dashboard_address,
    };
    // From the announcement on, clients may send signals that end the daemon in order.
    let signals = Signals::listen()?;
    lock.announce(&address)?;
    on_ready(&address, &catalog);
    for address in activation::unused() {
        tracing::warn!(
            "the service manager listens on {address} and Thaw does not: clients wait there"
        );
    }

    wait_for_end(signals, &mut tasks, &catalog, &own).await?;
    tracing::info!("finishing what is being served");
    // Clients that come now wait in the backlog until the sockets close, and
    // those that were accepted are told to come back.
    own.stop();
    if options.clients_wait {
        gateway_task.abort();
    }
    shared.drain(options.drain).await;
    triggers.stop(&shared).await;
    if let Some((tracer, task)) = tracing {
        task.abort();
        let _ = task.await;
        // What is not sent by then is lost.
        let _ = tokio::time::timeout(TRACES_PATIENCE, tracer.finish(shared.boots())).await;
    }
    shared.pulls().stop();
    freshness.abort();
    failures_watch.abort();
    room_watch.abort();
    cpu_watch.abort();
    files_watch.abort();
    pressure_watch.abort();
    sleepers_watch.abort();
    sandboxes_watch.abort();
    history_watch.abort();
    let kept = shared.keep_asleep();
    if kept > 0 {
        tracing::info!(instances = kept, "left instances asleep for the next daemon");
    }
    if let Some(watch) = refusals_watch {
        watch.abort();
    }
    for task in tasks {
        task.abort();
        // Only then has it let go of what it used. One that has ended by itself
        // was asked for its result before.
        if !task.is_finished() {
            let _ = task.await;
        }
    }
    if shared.tenants().bound_cpu_time() {
        write_down(&shared, &periods);
    }
    // Services and the node refer to each other; the zygotes end, and what was
    // made for them is cleaned up, when the last service is gone.
    shared.forget_all();
    drop((catalog, own));
    // The last words of those that were ended just now.
    let written = tokio::task::spawn_blocking(move || {
        shared.edge().finish_log(LOGS_PATIENCE) & logs.finish(LOGS_PATIENCE)
    })
    .await;
    if !written.unwrap_or(false) {
        tracing::warn!("the last lines of functions may be missing from their logs");
    }
    drop(lock);
    Ok(())
}

/// Starts the zygote pool; the last words of sandboxes' kernels, and traces, go to
/// the log.
///
/// # Errors
/// This host cannot run sandboxes.
pub fn start_pool(
    home: &Home,
    size: usize,
    weak_limits: WeakLimits,
) -> Result<Arc<ZygotePool>, ServeError> {
    start_pool_with(home, console()?, size, weak_limits)
}

/// What takes the last words of sandboxes' kernels, and traces.
fn console() -> io::Result<Console> {
    Console::lines(crate::debug::console_rate(), log_console)
}

fn start_pool_with(
    home: &Home,
    console: Console,
    size: usize,
    weak_limits: WeakLimits,
) -> Result<Arc<ZygotePool>, ServeError> {
    let zygotes = ZygoteConfig {
        directory: Some(home.root().to_owned()),
        weak_limits,
        ..ZygoteConfig::new(crate::debug::kernel()?, console)
    };
    let pool = ZygotePool::new(PoolConfig { size, zygotes })?;
    let parent = pool.parent()?;
    if !parent.missing_controllers().is_empty() {
        let (limits, reason) = limits::describe(parent.missing_controllers());
        tracing::warn!("this host does not enforce limits of {limits}: {reason}");
    }
    Ok(Arc::new(pool))
}

/// Says so where quotas of CPU time are not kept.
fn warn_of_uncounted_cpu_time(shared: &NodeState, pool: &ZygotePool) {
    let is_missing =
        |missing: &limits::Missing| missing.controller == limits::Controller::CpuAccounting;
    if shared.tenants().bound_cpu_time()
        && let Ok(parent) = pool.parent()
        && let Some(missing) =
            parent.missing_controllers().iter().find(|missing| is_missing(missing))
    {
        tracing::warn!(
            "this host does not count CPU time, so `cpu_time` in {QUOTAS_FILE} bounds nothing: {}",
            missing.reason
        );
    }
}

/// Writes to the log what comes from a console.
fn log_console(output: &ConsoleOutput<'_>) {
    match *output {
        ConsoleOutput::Line { pid, label: Some(function), .. } => {
            tracing::warn!(function, pid, "{output}");
        }
        ConsoleOutput::Line { pid, label: None, .. } => tracing::warn!(pid, "{output}"),
        ConsoleOutput::Dropped { .. } => tracing::warn!("{output}"),
    }
}

/// The signals that tell the daemon what to do.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// From now on they do not end this process.
    fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }
}

async fn wait_for_end(
    signals: Signals,
    tasks: &mut [JoinHandle<io::Result<()>>],
    catalog: &Arc<Catalog>,
    own: &OwnListeners,
) -> Result<(), ServeError> {
    let Signals { mut terminate, mut interrupt, mut hangup } = signals;
    loop {
        tokio::select! {
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
            _ = hangup.recv() => {
                let catalog = catalog.clone();
                match tokio::task::spawn_blocking(move || catalog.reload()).await {
                    Ok(Ok(report)) => tracing::info!(?report, "reloaded"),
                    Ok(Err(error)) => tracing::error!("cannot reload: {error}"),
                    Err(error) => tracing::error!("cannot reload: {error}"),
                }
                own.update();
            }
            ended = first_to_end(tasks) => return Ok(ended.map_err(io::Error::other)??),
        }
    }
}

/// The result of the task that ends first; none does before its listener fails.
async fn first_to_end(tasks: &mut [ListenTask]) -> Result<io::Result<()>, JoinError> {
    poll_fn(|context| {
        let mut ended = tasks.iter_mut().map(|task| Pin::new(task).poll(context));
        ended.find(Poll::is_ready).unwrap_or(Poll::Pending)
    })
    .await
}

/// The listeners of functions that have an address of their own.
struct OwnListeners {
    gateway: Gateway,
    shared: Arc<NodeState>,
    tasks: Mutex<HashMap<SocketAddr, (Wanted, ListenTask)>>,
    tls: TlsListeners,
}

/// Who is to be reached at an address, and how.
type Wanted = (FunctionName, EntryKind);

type ListenTask = JoinHandle<io::Result<()>>;

impl OwnListeners {
    fn new(gateway: Gateway, shared: Arc<NodeState>) -> Self {
        let tls = TlsListeners::new(gateway.clone(), shared.clone());
        Self { gateway, shared, tasks: Mutex::default(), tls }
    }

    /// Listens where the present functions want it, and nowhere else. Functions for which that is
    /// not possible, with the reason.
    fn update(&self) -> BTreeMap<String, String> {
        self.tls.update();
        let mut problems = BTreeMap::new();
        let mut wanted: HashMap<SocketAddr, Wanted> = HashMap::new();
        for service in self.shared.functions() {
            let wants = (service.name().clone(), service.config().entry.kind);
            let Some(address) = service.config().listen else { continue };
            if let Some((other, _)) = wanted.insert(address, wants) {
                let name = service.name();
                let problem = format!(
                    "`{other}` and `{name}` both want {address}; change `listen` of one of them"
                );
                tracing::error!("{problem}");
                problems.insert(other.to_string(), problem);
            }
        }
        let mut tasks = self.tasks.lock().expect("no holder panics");
        tasks.retain(|address, (present, task)| {
            let stays = wanted.get(address) == Some(present) && !task.is_finished();
            if !stays {
                task.abort();
            }
            stays
        });
        for (address, wants) in wanted {
            if tasks.contains_key(&address) {
                continue;
            }
            match self.listen(address, &wants) {
                Ok(task) => {
                    tasks.insert(address, (wants, task));
                }
                // A function that speaks HTTP is still served by name.
                Err(error) => {
                    tracing::error!(function = %wants.0, "{error}");
                    problems.insert(wants.0.to_string(), error.to_string());
                }
            }
        }
        for service in self.shared.functions() {
            service.set_unreachable(problems.get(service.name().as_str()).cloned());
        }
        problems
    }

    fn listen(&self, address: SocketAddr, (name, kind): &Wanted) -> Result<ListenTask, ServeError> {
        let (gateway, name) = (self.gateway.clone(), name.to_string());
        let option = "`listen` in its thaw.toml";
        Ok(match kind {
            EntryKind::Http | EntryKind::Stdin | EntryKind::Sandbox => {
                let guarded = guarded(address, Transport::Tcp, PortGuard::IfWrittenOut);
                let listening = gateway.listen(bind(address, option)?, Some(name));
                tokio::spawn(with_guard(guarded, listening))
            }
            EntryKind::Tcp => {
                let guarded = guarded(address, Transport::Tcp, PortGuard::IfWrittenOut);
                let listening = gateway.listen_raw(bind(address, option)?, name);
                tokio::spawn(with_guard(guarded, listening))
            }
            EntryKind::Udp => {
                let socket = bind_datagrams(address, option);
                let socket =
                    socket.map_err(|error| ServeError::Listen { address, option, error })?;
                let guarded = guarded(address, Transport::Udp, PortGuard::IfWrittenOut);
                tokio::spawn(with_guard(guarded, gateway.receive(socket, name)))
            }
        })
    }

    fn stop(&self) {
        self.tls.stop();
        for (_, (_, task)) in self.tasks.lock().expect("no holder panics").drain() {
            task.abort();
        }
    }
}

/// Serves E2B's API; where it listens.
fn serve_e2b(
    address: SocketAddr,
    home: &Home,
    catalog: &Arc<Catalog>,
    sandboxes: &Arc<Sandboxes>,
) -> Result<(SocketAddr, ListenTask), ServeError> {
    let settings = LiveSettings::load(home.root().join(e2b::FILE))?;
    let backend = NodeBackend::new(catalog.node().clone(), sandboxes.clone(), catalog.clone());
    let api = E2b::new(backend, settings, home.root())?;
    let listener = bind(address, "--e2b")?;
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    let guarded = guarded(address, Transport::Tcp, PortGuard::IfWrittenOut);
    Ok((address, tokio::spawn(with_guard(guarded, api.serve(listener)))))
}

fn bind_admin(
    options: &AdminOptions,
    option: &'static str,
) -> Result<(TcpListener, RemoteAccess), ServeError> {
    let token = AdminToken::read_or_create(&options.token_file, "--admin-token-file")?;
    let access = RemoteAccess { token, names: options.names.clone() };
    Ok((bind(options.address, option)?, access))
}

fn serving(
    listener: TcpListener,
    access: RemoteAccess,
) -> io::Result<(tokio::net::TcpListener, RemoteAccess)> {
    listener.set_nonblocking(true)?;
    Ok((tokio::net::TcpListener::from_std(listener)?, access))
}

fn bind(address: SocketAddr, option: &'static str) -> Result<TcpListener, ServeError> {
    bind_connections(address, option).map_err(|error| ServeError::Listen { address, option, error })
}

fn bind_connections(address: SocketAddr, option: &'static str) -> io::Result<TcpListener> {
    match activation::find(address, Transport::Tcp, option)? {
        Some(socket) => Ok(socket.into()),
        None => TcpListener::bind(address)
            .or_else(|error| bind_for_us(address, Transport::Tcp, error).map(TcpListener::from)),
    }
}

fn bind_datagrams(address: SocketAddr, option: &'static str) -> io::Result<UdpSocket> {
    match activation::find(address, Transport::Udp, option)? {
        Some(socket) => Ok(socket.into()),
        None => UdpSocket::bind(address)
            .or_else(|error| bind_for_us(address, Transport::Udp, error).map(UdpSocket::from)),
    }
}

/// A listener at an address that `option` names, which sandboxes are kept from.
pub(crate) fn listen_for(
    address: SocketAddr,
    option: &'static str,
) -> Result<(TcpListener, GuardedPort), ServeError> {
    let guarded = guarded(address, Transport::Tcp, PortGuard::IfWrittenOut);
    Ok((bind(address, option)?, guarded))
}

/// Has the monitor bind what this process may not, if there is one.
fn bind_for_us(address: SocketAddr, transport: Transport, error: io::Error) -> io::Result<OwnedFd> {
    match monitor::of_this_process() {
        Some(link) if error.kind() == io::ErrorKind::PermissionDenied => {
            link.bind(address, transport)
        }
        _ => Err(error),
    }
}

/// Keeps sandboxes from the port of a listener of this process.
fn guarded(address: SocketAddr, transport: Transport, guard: PortGuard) -> GuardedPort {
    GuardedPort::new(transport, address.port(), guard)
}

/// Serves for as long as `serving` does, with a port guarded.
pub(crate) async fn with_guard(
    _guarded: GuardedPort,
    serving: impl Future<Output = io::Result<()>>,
) -> io::Result<()> {
    serving.await
}

/// The address at which this process itself reaches a listener.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        match address {
            SocketAddr::V4(_) => address.set_ip(std::net::Ipv4Addr::LOCALHOST.into()),
            SocketAddr::V6(_) => address.set_ip(std::net::Ipv6Addr::LOCALHOST.into()),
        }
    }
    address
}

/// Raises the limit of open files of this process as far as it may (`RLIMIT_NOFILE`,
/// getrlimit(2)), because every instance and every client takes descriptors. Logs why if it
/// cannot.
pub fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!("cannot raise the limit of open files: {error}");
    }
}
