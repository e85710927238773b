//! All tasks of a daemon.

use super::listeners::{ListenTask, OwnListeners, reachable, serve_e2b};
use super::opening::Opened;
use super::prepared::Doors;
use super::{ServeError, ServeOptions, lasting};
use crate::admin::Admin;
use crate::dashboard::Dashboard;
use crate::deploy::take_out_failing;
use crate::fetching::{OnReload, keep_fetching};
use crate::successor::watch_refusals;
use crate::tls_listeners::watch_files;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thaw_home::admin::AdminAddress;
use thaw_home::home::{DaemonAddress, Home};
use thaw_node::catalog::Catalog;
use thaw_node::gateway::Gateway;
use thaw_node::history::History;
use thaw_node::logs::Logs;
use thaw_node::node::NodeState;
use thaw_node::pressure::watch_pressure;
use thaw_node::sandboxes::Sandboxes;
use thaw_node::service::{Services, watch_cpu_time};
use thaw_node::traces::Tracer;
use thaw_node::triggers::{self, Triggers};
use thaw_sandbox::{GuardedPort, monitor};
use tokio::task::{AbortHandle, JoinHandle};

/// Which of the tasks that listen is the gateway.
pub(super) const GATEWAY: usize = 0;

/// A daemon that serves.
pub(super) struct Serving {
    pub services: Arc<Services>,
    pub catalog: Arc<Catalog>,
    pub logs: Arc<Logs>,
    /// Where the CPU time of tenants is written down.
    pub periods: PathBuf,
    /// Listeners of functions.
    pub own: Arc<OwnListeners>,
    /// Listeners of the node; the first one is the gateway's.
    pub listening: Vec<ListenTask>,
    /// What looks after something, until it is stopped.
    pub watching: Vec<AbortHandle>,
    pub triggers: Option<triggers::Running>,
    /// Until the last change of them is written down.
    pub sandboxes: Option<Arc<Sandboxes>>,
    pub tracing: Option<(Arc<Tracer>, JoinHandle<()>)>,
    address: DaemonAddress,
    _guarded: Vec<GuardedPort>,
}

impl Serving {
    /// Begins to serve.
    ///
    /// # Errors
    /// Something cannot be used or started.
    pub fn begin(
        home: &Home,
        options: &ServeOptions,
        doors: Doors,
        node: Opened,
    ) -> Result<Self, ServeError> {
        let Opened { services, catalog, logs, periods } = node;
        let gateway_address = reachable(doors.gateway_address);
        let tracing = options.traces.clone().map(|settings| {
            let tracer = services.shared().trace_with(settings);
            (tracer.clone(), tokio::spawn(tracer.send_all(services.shared().boots().clone())))
        });
        let (directory, most) = (home.triggers()?, options.max_instances);
        let triggers = Triggers::start(&directory, services.clone(), gateway_address, most)?;
        let gateway = Gateway::new(services.clone(), triggers.downgrade(), options.gateway);
        let mut listening = vec![tokio::spawn(gateway.clone().listen(doors.gateway, None))];
        let sandboxes = Sandboxes::load(services.clone(), home.root()).map_err(|error| {
            ServeError::File { path: home.root().join("sandboxes.json"), error }
        })?;
        let e2b = options.e2b.map(|address| serve_e2b(address, home, &catalog, &sandboxes));
        let (e2b, e2b_task) = e2b.transpose()?.unzip();
        listening.extend(e2b_task);
        let own = Arc::new(OwnListeners::new(gateway, services.clone()));
        own.update();
        lasting::close_unclaimed();
        let history = History::new(services.clone(), catalog.pool().clone());
        let mut watching = watch(&services, &catalog, options, &periods);
        watching.push(spawn(sandboxes.clone().watch()));
        watching.push(spawn(history.clone().watch()));
        watching.push(spawn(own.clone().keep_trying()));
        watching.push(take_out_failing_of(&catalog, &own));
        let on_reload = on_reload(&own);
        keep_fetching(catalog.clone(), home.clone(), on_reload.clone())?;
        let admin = Admin {
            history,
            services: services.clone(),
            triggers: triggers.downgrade(),
            catalog: catalog.clone(),
            gateway: gateway_address,
            sandboxes: sandboxes.clone(),
            home: home.clone(),
            counting: Arc::default(),
            on_reload,
        };
        let address = DaemonAddress {
            pid: monitor::own_pid(),
            admin: AdminAddress::Unix(doors.admin_socket),
            admin_tcp: doors.admin.as_ref().map(|door| door.address),
            gateway: doors.gateway_address,
            e2b,
            dashboard: doors.dashboard.as_ref().map(|door| door.address),
        };
        if let Some(door) = doors.admin {
            listening.push(tokio::spawn(admin.clone().serve_remote(door.listener, door.access)));
        }
        if let Some(door) = doors.dashboard {
            let dashboard = Dashboard::new(admin.clone(), door.access);
            listening.push(tokio::spawn(dashboard.serve(door.listener)));
        }
        listening.push(tokio::spawn(admin.serve_local(doors.local_admin)));
        Ok(Self {
            services,
            catalog,
            logs,
            periods,
            own,
            listening,
            watching,
            triggers: Some(triggers),
            sandboxes: Some(sandboxes),
            tracing,
            address,
            _guarded: doors.guarded,
        })
    }

    /// Where it is reached.
    pub fn address(&self) -> &DaemonAddress {
        &self.address
    }

    /// What all its functions share.
    pub fn shared(&self) -> &Arc<NodeState> {
        self.services.shared()
    }

    /// What it serves.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }
}

fn spawn(work: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
    tokio::spawn(work).abort_handle()
}

/// Begins to look after functions and instances.
fn watch(
    services: &Arc<Services>,
    catalog: &Arc<Catalog>,
    options: &ServeOptions,
    periods: &Path,
) -> Vec<AbortHandle> {
    let mut watching = vec![
        spawn(catalog.clone().keep_fresh()),
        spawn(catalog.clone().keep_room(options.unpacked.bytes())),
        spawn(watch_cpu_time(services.clone(), periods.to_owned())),
        spawn(watch_files(services.shared().clone())),
        spawn(watch_pressure(services.clone())),
        spawn(services.clone().end_old_sleepers()),
    ];
    watching.extend(monitor::of_this_process().map(|link| spawn(watch_refusals(link))));
    watching
}

fn take_out_failing_of(catalog: &Arc<Catalog>, own: &Arc<OwnListeners>) -> AbortHandle {
    let own = own.clone();
    let on_change = move || drop(own.update());
    spawn(take_out_failing(catalog.clone(), on_change))
}

/// Listens where functions want it by now.
fn on_reload(own: &Arc<OwnListeners>) -> OnReload {
    let own = own.clone();
    Arc::new(move || own.update())
}
