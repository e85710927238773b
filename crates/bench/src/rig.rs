//! A node of one function or several, made to be measured: the gateway, the life cycle and
//! the zygotes of `thaw serve`, without its listeners and its admin API.

use super::BenchError;
use super::client::{PATIENCE, eventually, exchange};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::num::NonZeroU32;
use std::sync::{Arc, Weak};
use std::time::Duration;
use thaw_daemon::daemon::{ServeError, start_pool};
use thaw_home::clock::monotonic_ns;
use thaw_home::config::{Connections, FunctionConfig, Isolation, TimeSpan};
use thaw_home::function::BuiltFunction;
use thaw_home::home::Home;
use thaw_home::tenants::TenantName;
use thaw_node::boots::{BootKind, BootRecord};
use thaw_node::gateway::{Gateway, GatewayConfig};
use thaw_node::instance::{BootPolicy, LaunchOptions, SandboxLauncher, Techniques, WorkingSetUse};
use thaw_node::logs::{LogLimits, Logs};
use thaw_node::node::NodeState;
use thaw_node::service::{Service, Services};
use thaw_node::tenants::Tenants;
use thaw_sandbox::{PopulatePolicy, WeakLimits, ZygotePool};
use thaw_store::Store;
use tokio::runtime::Runtime;

/// How long instances may take to end when a rig is taken down.
const DRAIN: Duration = Duration::from_secs(2);
/// Longer than any measurement.
const FOREVER: Duration = Duration::from_secs(24 * 60 * 60);

/// How a rig boots and keeps instances.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RigOptions {
    pub launch: LaunchOptions,
    pub isolation: Isolation,
    /// Zygotes kept ready.
    pub zygotes: usize,
    /// Most instances at a time.
    pub instances: u32,
    /// Most connections of an instance at a time.
    pub concurrency: u32,
    /// What becomes of connections that may carry several requests.
    pub connections: Connections,
}

impl RigOptions {
    /// One boot at a time, each prepared by hand, each for one request.
    pub(crate) fn single(kind: BootKind) -> Self {
        Self {
            launch: LaunchOptions {
                policy: BootPolicy::only(kind),
                working_set: WorkingSetUse::Populate(PopulatePolicy::Write),
                techniques: Techniques::default(),
            },
            isolation: Isolation::Request,
            zygotes: 4,
            instances: 64,
            concurrency: 1,
            connections: Connections::Routed,
        }
    }
}

/// A node, with nothing to serve at first.
pub(crate) struct Node {
    store: Store,
    logs: Arc<Logs>,
    pub runtime: Runtime,
    pub services: Arc<Services>,
    pub pool: Arc<ZygotePool>,
}

impl Node {
    /// A node that keeps so many zygotes ready and runs at most so many instances.
    pub(crate) fn start(
        home: &Home,
        store: &Store,
        zygotes: usize,
        instances: u32,
    ) -> Result<Self, BenchError> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let entered = runtime.enter();
        let pool = start_pool(home, zygotes, WeakLimits::Accept)?;
        // Some of an earlier service may still be ending when the next begins.
        let services = Services::new(NodeState::new(instances as usize + 64));
        let directory = home.logs().map_err(ServeError::from)?;
        let logs = Arc::new(Logs::start(&directory, LogLimits::default())?);
        drop(entered);
        Ok(Self { store: store.clone(), logs, runtime, services, pool })
    }

    /// Serves a function from now on.
    pub(crate) fn serve(
        &self,
        function: &BuiltFunction,
        options: RigOptions,
    ) -> Result<(Arc<Service>, Arc<SandboxLauncher>), BenchError> {
        let _entered = self.runtime.enter();
        let launcher = self.launcher(function, options)?;
        let image = function.image.to_string();
        let service =
            Service::new(options.config(function), image, launcher.clone(), self.services.clone());
        self.services.install(service.clone());
        Ok((service, launcher))
    }

    /// Begins to listen; `own`: for this function only.
    pub(crate) fn listen(&self, own: Option<String>) -> Result<SocketAddr, BenchError> {
        let _entered = self.runtime.enter();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let gateway = Gateway::new(self.services.clone(), Weak::new(), GatewayConfig::default());
        self.runtime.spawn(gateway.listen(listener, own));
        Ok(address)
    }

    fn launcher(
        &self,
        function: &BuiltFunction,
        options: RigOptions,
    ) -> Result<Arc<SandboxLauncher>, BenchError> {
        let load = |error: thaw_node::catalog::LoadError| BenchError::Load(error);
        let config = &function.function.config;
        let rootfs = function.rootfs(&self.store)?;
        let image = thaw_build::build::open_image(&self.store, function.image, &rootfs)
            .map_err(|error| load(error.into()))?;
        let log = self.logs.open(&format!("{}.bench", config.name));
        let launcher = SandboxLauncher::new(
            self.pool.clone(),
            &self.store,
            rootfs,
            function.image,
            image,
            self.logs.clone(),
            log,
            Tenants::default().of(TenantName::default()),
            config,
            options.launch,
        );
        Ok(Arc::new(launcher.map_err(|error| load(error.into()))?))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        for service in self.services.services() {
            service.kill_all();
        }
        self.runtime.block_on(self.services.drain(DRAIN));
        // Services and the node refer to each other.
        self.services.forget_all();
    }
}

/// A node of one function.
pub(crate) struct Rig {
    node: Node,
    pub services: Arc<Services>,
    pub pool: Arc<ZygotePool>,
    pub service: Arc<Service>,
    pub launcher: Arc<SandboxLauncher>,
    /// Where the gateway listens.
    pub address: SocketAddr,
}

impl Rig {
    pub(crate) fn start(
        home: &Home,
        store: &Store,
        function: &BuiltFunction,
        options: RigOptions,
    ) -> Result<Self, BenchError> {
        let node = Node::start(home, store, options.zygotes, options.instances)?;
        let (service, launcher) = node.serve(function, options)?;
        let handover = options.connections == Connections::Handover;
        let address = node.listen(handover.then(|| service.name().to_string()))?;
        let (services, pool) = (node.services.clone(), node.pool.clone());
        Ok(Self { node, services, pool, service, launcher, address })
    }

    /// Serves the function under other rules from now on; instances of before
    /// end.
    pub(crate) fn serve_as(&mut self, isolation: Isolation) {
        let mut config = self.service.config().clone();
        config.isolation = isolation;
        let image = self.service.image().to_owned();
        let launcher = self.service.launcher();
        self.service = Service::new(config, image, launcher, self.services.clone());
        self.services.install(self.service.clone());
    }

    /// One boot of this kind, begun when the system is at rest.
    pub(crate) fn boot(&self, kind: BootKind, request: &[u8]) -> Result<BootRecord, BenchError> {
        self.launcher.prepare(kind).map_err(BenchError::Launch)?;
        self.pool.wait_full().map_err(ServeError::from)?;
        let asked_ns = monotonic_ns();
        let (local, _) = exchange(self.address, request)?;
        let boot = || self.services.shared().boots().by_peer(local, asked_ns);
        let has_answered = || boot().filter(|boot| boot.phases.first_byte.is_some());
        let boot = eventually(has_answered).or_else(boot);
        let boot = boot.ok_or(BenchError::NoPhase("its boot"))?;
        // The rig decides which boots count as cold.
        let is_from_image = |kind| matches!(kind, BootKind::Cold | BootKind::Warm);
        match boot.kind == kind || is_from_image(boot.kind) && is_from_image(kind) {
            true => Ok(boot),
            false => Err(BenchError::OtherBoot { asked: kind, found: boot.kind }),
        }
    }

    /// Waits for something that the node does.
    pub(crate) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.node.runtime.block_on(future)
    }

    /// Waits until no instance lives.
    pub(crate) fn wait_empty(&self) -> Result<(), BenchError> {
        eventually(|| (self.service.instance_count() == 0).then_some(()))
            .ok_or(BenchError::NoPhase("its end"))
    }
}

impl RigOptions {
    fn config(&self, function: &BuiltFunction) -> FunctionConfig {
        let mut config = function.function.config.clone();
        config.isolation = self.isolation;
        config.entry.connections = self.connections;
        let limits = &mut config.limits;
        limits.instances = NonZeroU32::MIN.saturating_add(self.instances.saturating_sub(1));
        limits.concurrency = NonZeroU32::MIN.saturating_add(self.concurrency.saturating_sub(1));
        limits.timeout = TimeSpan(PATIENCE);
        limits.keep_alive = TimeSpan(FOREVER);
        limits.queue = TimeSpan(PATIENCE);
        config
    }
}
