//! `thaw serve`: everything together.
//!
//! | module | what it does |
//! | --- | --- |
//! | `prepared` | locks the home and binds the addresses of the node |
//! | `listeners` | binds all other addresses, and listens where functions want it |
//! | `lasting` | leaves those listeners to the next daemon |
//! | `opening` | opens what is in the home, and takes over what an earlier daemon has left |
//! | `serving` | begins all tasks of the daemon |
//! | `ending` | waits for the signal that ends it, and ends it in order |

mod ending;
mod error;
mod lasting;
mod listeners;
mod opening;
mod prepared;
mod serving;

pub use error::ServeError;
pub(crate) use listeners::{listen_for, with_held};
pub use opening::start_pool;
pub use prepared::Prepared;

use crate::activation;
use crate::notification;
use ending::{HandOver, Signals, Wish};
use prepared::Doors;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serving::Serving;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use thaw_home::config::ByteSize;
use thaw_home::home::{DaemonAddress, Home};
use thaw_node::catalog::Catalog;
use thaw_node::gateway::GatewayConfig;
use thaw_node::instance::WorkingSetUse;
use thaw_node::logs::LogLimits;
use thaw_node::traces::TraceSettings;
use thaw_sandbox::{WeakLimits, monitor};

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
    /// Whether another daemon comes after this one.
    pub successor: Successor,
    /// Whether sandboxes of different tenants may share a core at a time.
    pub cores: CoreSharing,
    /// How much is kept of what functions log, and of the access log.
    pub logs: LogLimits,
    /// Where E2B's API is served, if it is.
    pub e2b: Option<SocketAddr>,
    /// Where traces go, if somebody wants them.
    pub traces: Option<TraceSettings>,
}

/// Whether another daemon comes after one that ends in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Successor {
    /// Its listeners close, and all that it has ends.
    #[default]
    None,
    /// The monitor keeps the listeners, where clients wait, and the live instances, unless this one
    /// is told to end them (`SIGINT`).
    Comes,
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

/// Serves the functions in `home` until `SIGTERM` or `SIGINT`, then drains. If another daemon comes
/// ([`Successor::Comes`]), `SIGTERM` ends this process and leaves its live instances to that one.
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
    notification::status("Taking over what earlier daemons have left");
    let (lock, doors) = Doors::open(home, prepared)?;
    let node = opening::open(home, options).await?;
    let mut serving = Serving::begin(home, options, doors, node)?;
    // From the announcement on, clients may send signals that end the daemon in order.
    let mut signals = Signals::listen()?;
    lock.announce(serving.address())?;
    on_ready(serving.address(), serving.catalog());
    tell_service_manager(serving.address(), options.successor);
    warn_of_unused_sockets();
    let wish = serving.wait_for_end(&mut signals).await?;
    let until = Instant::now() + options.drain;
    if (wish, options.successor) == (Wish::HandOver, Successor::Comes) {
        match serving.hand_over(options, &mut signals).await {
            // Nothing is dropped: what is left to the next daemon would end.
            HandOver::Done => {
                drop(lock);
                monitor::exit_at_once(0);
            }
            HandOver::Interrupted => {}
        }
    }
    serving.end(options.successor, until.saturating_duration_since(Instant::now())).await;
    drop(lock);
    Ok(())
}

/// Says that clients are served: to the service manager, or to the monitor that has started this
/// process and tells it.
fn tell_service_manager(address: &DaemonAddress, successor: Successor) {
    match monitor::of_this_process() {
        Some(link) if successor == Successor::None => link.say_serving(),
        _ => notification::serving(address.gateway),
    }
}

fn warn_of_unused_sockets() {
    for address in activation::unused() {
        tracing::warn!(
            "the service manager listens on {address} and Thaw does not: clients wait there"
        );
    }
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
