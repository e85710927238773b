//! Opening what is in the home: the store, the functions, and what an earlier daemon has left.

use super::{CoreSharing, ServeError, ServeOptions, lasting};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use thaw_home::config::QUOTAS_FILE;
use thaw_home::home::Home;
use thaw_home::secrets::SecretStore;
use thaw_home::volumes::VolumeStore;
use thaw_node::asleep::AsleepSpace;
use thaw_node::catalog::Catalog;
use thaw_node::edge::GATEWAY_FILE;
use thaw_node::legacy;
use thaw_node::logs::{AccessFile, Logs};
use thaw_node::node::NodeState;
use thaw_node::sandboxes::registry::versions_of_sandboxes;
use thaw_node::service::Services;
use thaw_node::swap::SwapSpace;
use thaw_node::tenants::{CARRIED_FILE, read_periods};
use thaw_sandbox::{
    Console, ConsoleOutput, CoreScheduling, PoolConfig, WeakLimits, ZygoteConfig, ZygotePool,
    limits, monitor,
};
use thaw_store::Store;

/// What a daemon serves, and what it needs for that.
pub(super) struct Opened {
    pub services: Arc<Services>,
    pub catalog: Arc<Catalog>,
    pub logs: Arc<Logs>,
    /// Where the CPU time of tenants is written down.
    pub periods: PathBuf,
}

/// Opens what is in the home, and takes over what an earlier daemon has left.
///
/// # Errors
/// Something of it is not usable, or this host cannot run sandboxes.
pub(super) async fn open(home: &Home, options: &ServeOptions) -> Result<Opened, ServeError> {
    let store = Store::open(&home.store())?;
    let console = console()?;
    count_egress_bytes();
    // Before there are others.
    let mut legacy = thaw_sandbox::take_over(&console)?;
    lasting::inherit(legacy::take_listeners(&mut legacy));
    let pool = start_pool_with(home, console, options.zygotes, options.weak_limits)?;
    let shared = open_node(home, options)?;
    let asleep = AsleepSpace::at(home.asleep()?);
    let left_asleep = asleep.left()?;
    shared.sleep_in(asleep);
    shared.expect_sandboxes(versions_of_sandboxes(home.root()));
    let waiting = legacy::reserve(&shared, legacy);
    shared.wake_up_with(left_asleep);
    warn_of_uncounted_cpu_time(&shared, &pool);
    let logs = Arc::new(Logs::start(&home.logs()?, options.logs)?);
    let services = Services::new(shared.clone());
    let catalog = Catalog::new(store, logs.clone(), pool, services.clone(), options.working_set);
    sweep_volumes(home, &catalog).await?;
    let first = catalog.clone();
    tokio::task::spawn_blocking(move || first.reload()).await.map_err(io::Error::other)??;
    let periods = home.root().join(CARRIED_FILE);
    if let Err(error) = read_periods(shared.tenants(), &periods) {
        tracing::warn!("{}: {error}; periods of CPU time begin anew", periods.display());
    }
    legacy::take_over(&catalog, waiting);
    shared.forget_left_execs();
    shared.forget_left_asleep(|function| catalog.is_gone(function));
    let there = services.instance_ids();
    let gone = shared.ids_with_own().into_iter().filter(|id| !there.contains(id));
    gone.for_each(|id| shared.forget_own(id));
    let asleep = services.clone();
    let kept = move || asleep.keep_own_volumes();
    tokio::task::spawn_blocking(kept).await.map_err(io::Error::other)?;
    Ok(Opened { services, catalog, logs, periods })
}

/// Counts bytes of outgoing connections, before there are any.
fn count_egress_bytes() {
    if let Err(error) = thaw_sandbox::count_egress_bytes() {
        tracing::warn!(
            "bytes of outgoing connections are not counted: {error}; `thaw doctor` says more"
        );
    }
}

/// Removes what earlier daemons have left of snapshots of volumes.
async fn sweep_volumes(home: &Home, catalog: &Arc<Catalog>) -> Result<(), ServeError> {
    let (catalog, volumes) = (catalog.clone(), VolumeStore::of(home.clone()));
    let swept = tokio::task::spawn_blocking(move || volumes.sweep(catalog.store())).await;
    if let Err(error) = swept.map_err(io::Error::other)? {
        tracing::warn!("what was left of snapshots of volumes is there still: {error}");
    }
    Ok(())
}

/// A node without functions, with what is said in the home.
fn open_node(home: &Home, options: &ServeOptions) -> Result<Arc<NodeState>, ServeError> {
    let shared = NodeState::new(options.max_instances);
    if options.cores == CoreSharing::Tenant {
        shared.tenants().keep_apart(CoreScheduling::start()?);
    }
    shared.tenants().read_from(home.root().join(QUOTAS_FILE))?;
    shared.edge().read_from(home.root().join(GATEWAY_FILE))?;
    shared.edge().log_to(AccessFile::start(&home.logs()?, options.logs)?);
    shared.hibernate_in(SwapSpace::begin(home.swap()?)?);
    shared.read_secrets_from(SecretStore::of(home.clone()));
    if let Some(link) = monitor::of_this_process() {
        shared.number_life(link.grant().life());
    }
    shared.egress().keep_in(home.root())?;
    shared.limits().keep_in(home.root())?;
    shared.own_volumes().keep_in(home.root())?;
    shared.expect_execs(home.root());
    Ok(shared)
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
    Console::lines(thaw_home::debug::console_rate(), log_console)
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
        ..ZygoteConfig::new(thaw_home::debug::kernel()?, console)
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
