//! `thaw serve`: everything together.

use crate::admin::Admin;
use crate::catalog::Catalog;
use crate::config::{EntryKind, FunctionName};
use crate::gateway::{Gateway, GatewayConfig};
use crate::home::{DaemonAddress, Home, HomeError};
use crate::instance::WorkingSetUse;
use crate::node::Shared;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use thaw_sandbox::{
    Console, ConsoleOutput, KernelError, PoolConfig, ZygoteConfig, ZygoteError, ZygotePool,
};
use thaw_store::{Store, StoreError};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;

/// How a node serves.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Address of the shared gateway.
    pub listen: SocketAddr,
    /// Address of the admin API.
    pub admin: SocketAddr,
    /// Zygotes kept ready.
    pub zygotes: usize,
    /// Most instances of all functions together.
    pub max_instances: usize,
    /// Times of the gateway.
    pub gateway: GatewayConfig,
    /// How long busy instances may go on after `SIGTERM`.
    pub drain: Duration,
    /// Whether and how working sets are used.
    pub working_set: WorkingSetUse,
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
    /// The host refused something.
    #[error("cannot serve ({0}); `thaw doctor` says what this host lacks")]
    Io(#[from] io::Error),
}

/// Serves the functions in `home` until `SIGTERM` or `SIGINT`, then drains.
/// `on_ready` is called when clients are served.
///
/// # Errors
/// The node cannot start, or its listeners fail.
pub async fn serve(
    home: &Home,
    options: &ServeOptions,
    on_ready: impl FnOnce(&DaemonAddress, &Catalog),
) -> Result<(), ServeError> {
    let lock = home.lock()?;
    raise_file_limit();
    let gateway_listener = bind(options.listen, "--listen")?;
    let admin_listener = bind(options.admin, "--admin")?;
    let gateway_address = gateway_listener.local_addr()?;
    let admin_address = admin_listener.local_addr()?;

    let store = Store::open(&home.store())?;
    let pool = start_pool(home, options.zygotes)?;
    let shared = Shared::new(options.max_instances);
    let catalog = Catalog::new(store, home.logs()?, pool, shared.clone(), options.working_set);
    let first = catalog.clone();
    tokio::task::spawn_blocking(move || first.reload()).await.map_err(io::Error::other)??;

    let gateway = Gateway::new(shared.clone(), options.gateway);
    let mut tasks = vec![tokio::spawn(gateway.clone().listen(gateway_listener, None))];
    let own = Arc::new(OwnListeners::new(gateway, shared.clone()));
    own.update();
    let updated = own.clone();
    let admin = Admin {
        shared: shared.clone(),
        catalog: catalog.clone(),
        gateway: reachable(gateway_address),
        on_reload: Arc::new(move || updated.update()),
    };
    admin_listener.set_nonblocking(true)?;
    let admin_listener = tokio::net::TcpListener::from_std(admin_listener)?;
    let router = admin.router();
    tasks.push(tokio::spawn(async move { axum::serve(admin_listener, router).await }));

    let address =
        DaemonAddress { pid: std::process::id(), admin: admin_address, gateway: gateway_address };
    lock.announce(&address)?;
    on_ready(&address, &catalog);

    wait_for_end(&mut tasks, &catalog, &own).await?;
    tracing::info!("finishing what is being served");
    // Clients that come now wait in the backlog until the sockets close, and
    // those that were accepted are told to come back.
    own.stop();
    shared.drain(options.drain).await;
    for task in tasks {
        task.abort();
        // Only then has it let go of what it used. One that has ended by itself
        // was asked for its result before.
        if !task.is_finished() {
            let _ = task.await;
        }
    }
    // Services and the node refer to each other; the zygotes end, and what was
    // made for them is cleaned up, when the last service is gone.
    shared.forget_all();
    drop((catalog, own, lock));
    Ok(())
}

/// Starts the zygote pool; the last words of sandboxes' kernels, and traces, go to
/// the log.
///
/// # Errors
/// This host cannot run sandboxes.
pub fn start_pool(home: &Home, size: usize) -> Result<Arc<ZygotePool>, ServeError> {
    let console = Console::lines(crate::debug::console_rate(), log_console)?;
    let zygotes = ZygoteConfig {
        directory: Some(home.root().to_owned()),
        ..ZygoteConfig::new(crate::debug::kernel()?, console)
    };
    Ok(Arc::new(ZygotePool::new(PoolConfig { size, zygotes })?))
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

async fn wait_for_end(
    tasks: &mut [JoinHandle<io::Result<()>>],
    catalog: &Arc<Catalog>,
    own: &OwnListeners,
) -> Result<(), ServeError> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let [gateway, admin] = tasks else { unreachable!("two tasks were started") };
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
            ended = &mut *gateway => return Ok(ended.map_err(io::Error::other)??),
            ended = &mut *admin => return Ok(ended.map_err(io::Error::other)??),
        }
    }
}

/// The listeners of functions that have an address of their own.
struct OwnListeners {
    gateway: Gateway,
    shared: Arc<Shared>,
    tasks: Mutex<HashMap<SocketAddr, (Wanted, ListenTask)>>,
}

/// Who is to be reached at an address, and how.
type Wanted = (FunctionName, EntryKind);

type ListenTask = JoinHandle<io::Result<()>>;

impl OwnListeners {
    fn new(gateway: Gateway, shared: Arc<Shared>) -> Self {
        Self { gateway, shared, tasks: Mutex::default() }
    }

    /// Listens where the present functions want it, and nowhere else.
    fn update(&self) {
        let mut wanted = HashMap::new();
        for service in self.shared.services() {
            let wants = (service.name().clone(), service.config().entry.kind);
            if let Some(address) = service.config().listen
                && let Some((other, _)) = wanted.insert(address, wants)
            {
                tracing::error!(
                    "`{other}` and `{}` both want {address}; change `listen` of one of them",
                    service.name()
                );
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
                Err(error) => tracing::error!(function = %wants.0, "{error}"),
            }
        }
    }

    fn listen(&self, address: SocketAddr, (name, kind): &Wanted) -> Result<ListenTask, ServeError> {
        let (gateway, name) = (self.gateway.clone(), name.to_string());
        let option = "`listen` in its thaw.toml";
        Ok(match kind {
            EntryKind::Http | EntryKind::Stdin => {
                tokio::spawn(gateway.listen(bind(address, option)?, Some(name)))
            }
            EntryKind::Tcp => tokio::spawn(gateway.listen_raw(bind(address, option)?, name)),
            EntryKind::Udp => {
                let socket = UdpSocket::bind(address);
                let socket =
                    socket.map_err(|error| ServeError::Listen { address, option, error })?;
                tokio::spawn(gateway.receive(socket, name))
            }
        })
    }

    fn stop(&self) {
        for (_, (_, task)) in self.tasks.lock().expect("no holder panics").drain() {
            task.abort();
        }
    }
}

fn bind(address: SocketAddr, option: &'static str) -> Result<TcpListener, ServeError> {
    TcpListener::bind(address).map_err(|error| ServeError::Listen { address, option, error })
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

/// Every instance and every client takes descriptors.
pub(crate) fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!("cannot raise the limit of open files: {error}");
    }
}
