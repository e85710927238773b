//! The functions of the store, made into services.

mod checkpoints;
mod freshness;
mod launchers;
mod older;
mod open_checkpoints;
mod partial;
mod restart;
mod room;

pub use checkpoints::OpenedCheckpoint;
pub use launchers::LoadError;
use open_checkpoints::OpenCheckpoints;
use partial::Far;
pub use partial::PARTIAL;
pub use restart::{RestartError, Restarted};

use crate::instance::{Client, LaunchError, Launched, Launcher, WorkingSetUse};
use crate::logs::{FunctionLog, Logs};
use crate::node::NodeState;
use crate::service::{Served, Service, Services, ShareOf};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use thaw_home::config::{FunctionConfig, FunctionName};
use thaw_home::function::BuiltFunction;
use thaw_sandbox::{BuildPools, ZygotePool};
use thaw_store::{FunctionRecord, ImageId, Name, RolledBack, Share, Store, StoreError};

/// Turns stored functions into services and keeps them so.
pub struct Catalog {
    store: Store,
    logs: Arc<Logs>,
    pools: BuildPools,
    services: Arc<Services>,
    working_set: WorkingSetUse,
    known: Mutex<BTreeMap<FunctionName, KnownFunction>>,
    /// Held by the one who compares: what was read later from the store is installed later.
    reloading: Mutex<()>,
    /// Checkpoints of which sandboxes were made last.
    open_checkpoints: OpenCheckpoints,
    function_logs: Mutex<HashMap<FunctionName, Arc<FunctionLog>>>,
    /// Contents of functions that were partial when they were last loaded.
    far: Mutex<HashMap<FunctionName, Far>>,
}

/// What the catalog has installed of a function.
#[derive(Default)]
struct KnownFunction {
    /// The number of the active version.
    active: u32,
    /// The versions that get requests, by number.
    versions: BTreeMap<u32, Known>,
    /// Who gets a share of them.
    split: Vec<Share>,
    /// Which version was taken out of service, and why.
    rolled_back: Option<String>,
}

/// What the catalog has installed of a version.
#[derive(Clone)]
struct Known {
    image: ImageId,
    created_ms: u64,
    /// When it was last to be frozen anew for its age, in milliseconds since the epoch.
    tried_ms: u64,
    /// Why it cannot be served, if so.
    problem: Option<String>,
    /// Which kernel build its image needs.
    build: Build,
    /// It was last to be frozen anew for its kernel's age only.
    waits_for_instances: bool,
}

/// The kernel build that an image needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Build {
    /// That of this program.
    Present,
    /// An older one, which the store has.
    Older,
}

/// What a reload changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Reload {
    /// Functions that are new or have a new version.
    pub loaded: Vec<String>,
    /// Functions that are gone.
    pub removed: Vec<String>,
    /// Functions that cannot be served, with the reason.
    pub broken: BTreeMap<String, String>,
    /// Functions that are not reached at the address that they want, with the reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unreachable: BTreeMap<String, String>,
    /// Why the quotas of tenants are still the old ones, if they should have changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quotas: Option<String>,
    /// Why what is said of clients (`gateway.toml`) is still the old, if it should have changed,
    /// or why nobody listens where it says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
    /// What `gateway.toml` says of functions that do not exist, a sentence each, of the first 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<String>,
}

impl Reload {
    /// What has changed and what is wrong, in one line.
    pub fn summary(&self) -> String {
        let mut parts = Vec::new();
        let mut list = |what: &str, names: &mut dyn Iterator<Item = String>| {
            let names: Vec<String> = names.collect();
            if !names.is_empty() {
                parts.push(format!("{what} {}", names.join(", ")));
            }
        };
        let with_reason = |(name, reason): (&String, &String)| format!("{name} ({reason})");
        list("new", &mut self.loaded.iter().cloned());
        list("gone", &mut self.removed.iter().cloned());
        list("cannot be served:", &mut self.broken.iter().map(with_reason));
        list("not reached at its address:", &mut self.unreachable.iter().map(with_reason));
        list("quotas are the old ones:", &mut self.quotas.iter().cloned());
        list("gateway.toml is the old one:", &mut self.gateway.iter().cloned());
        list("gateway.toml:", &mut self.unknown.iter().cloned());
        match parts.is_empty() {
            true => "no function has changed".to_owned(),
            // A reason may quote what somebody has written.
            false => thaw_sandbox::escape(parts.join("; ").as_bytes()),
        }
    }
}

/// Stands in for a function that cannot be served, so that its clients learn why.
struct Broken {
    reason: String,
}

impl Launcher for Broken {
    fn launch(&self, _client: Option<&Client>) -> Result<Launched, LaunchError> {
        Err(LaunchError::Failed(self.reason.clone()))
    }

    fn is_ready(&self) -> bool {
        true
    }
}

impl Catalog {
    /// A catalog of the functions in `store`, with nothing loaded yet.
    pub fn new(
        store: Store,
        logs: Arc<Logs>,
        pool: Arc<ZygotePool>,
        services: Arc<Services>,
        working_set: WorkingSetUse,
    ) -> Arc<Self> {
        Arc::new(Self {
            store,
            logs,
            pools: BuildPools::new(pool),
            services,
            working_set,
            known: Mutex::default(),
            reloading: Mutex::default(),
            function_logs: Mutex::default(),
            far: Mutex::default(),
            open_checkpoints: OpenCheckpoints::default(),
        })
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// What all services of the node share.
    pub fn node(&self) -> &Arc<NodeState> {
        self.services.shared()
    }

    /// What it makes of them.
    pub fn services(&self) -> &Arc<Services> {
        &self.services
    }

    /// The zygotes of the present kernel build.
    pub fn pool(&self) -> &Arc<ZygotePool> {
        self.pools.present()
    }

    /// What is wrong with a function, if something is: it cannot be served, or a version of it
    /// was taken out of service.
    pub fn problem(&self, name: &FunctionName) -> Option<String> {
        let known = self.known.lock().expect("no holder panics");
        let function = known.get(name)?;
        let active = function.versions.get(&function.active)?;
        active.problem.clone().or_else(|| function.rolled_back.clone())
    }

    /// The log of a function, opened if it was not.
    pub fn log(&self, name: &FunctionName) -> Arc<FunctionLog> {
        let mut logs = self.function_logs.lock().expect("no holder panics");
        logs.entry(name.clone()).or_insert_with(|| self.logs.open(name.as_str())).clone()
    }

    /// Compares what is served with the store, and serves what is new. Reads
    /// whole images, so it may take seconds. One broken function does not keep
    /// the others from being served.
    ///
    /// # Errors
    /// The store cannot be read at all.
    pub fn reload(self: &Arc<Self>) -> Result<Reload, StoreError> {
        let _reloading = self.reloading.lock().expect("no holder panics");
        // Functions that are loaded below come under the new quotas.
        let quotas = self.reload_quotas();
        let list = self.store.list_functions()?;
        let gateway = self.reload_gateway();
        let mut report = Reload { quotas, gateway, ..Reload::default() };
        for (name, error) in list.damaged {
            report.broken.insert(name.to_string(), error.to_string());
        }
        // Of all versions: one that was gone back to is older than what was pulled before that.
        let newest = |record: &FunctionRecord| {
            record.versions().iter().map(|version| version.created_ms).max().unwrap_or_default()
        };
        let stored = list.records.iter().map(|record| (record.name.to_string(), newest(record)));
        let mut present = self.refresh_partial(&stored.collect(), &mut report);
        for record in list.records {
            let name = record.name.to_string();
            // A newer version of it is being pulled.
            if present.iter().any(|partial| partial.as_str() == name) {
                continue;
            }
            match BuiltFunction::from_version(&record.name, record.active()) {
                Ok(function) => {
                    present.push(function.function.config.name.clone());
                    self.refresh(&record, &function, &mut report);
                }
                Err(error) => {
                    report.broken.insert(name, error.to_string());
                }
            }
        }
        let mut known = self.known.lock().expect("no holder panics");
        // What is served of one whose record cannot be read goes on.
        let is_gone = |name: &&FunctionName| {
            !present.contains(name) && !report.broken.contains_key(name.as_str())
        };
        let gone: Vec<_> = known.keys().filter(is_gone).cloned().collect();
        for name in gone {
            known.remove(&name);
            self.services.remove(name.as_str());
            report.removed.push(name.to_string());
        }
        drop(known);
        report.unknown = self.node().edge().name_strangers(|name| {
            present.contains(name) || report.broken.contains_key(name.as_str())
        });
        self.node().forget_left_asleep(|function| self.is_gone(function));
        self.services.shrink_to_quotas();
        Ok(report)
    }

    /// Whether there is no function of this name, not even one that cannot be read or served.
    pub fn is_gone(&self, function: &FunctionName) -> bool {
        let is_stored = || {
            let found = Name::new(function.as_str()).map(|name| self.store.get_function(&name));
            found.is_ok_and(|found| !matches!(found, Err(error) if error.is_not_found()))
        };
        self.services.route(function.as_str()).is_none()
            && !self.may_be_partial(function)
            && !is_stored()
    }

    /// Reads the quotas of tenants again; why not, if that failed.
    fn reload_quotas(&self) -> Option<String> {
        let problem = self.node().tenants().reload().err()?;
        let problem = problem.to_string();
        tracing::error!("the quotas of tenants stay what they were: {problem}");
        Some(problem)
    }

    /// Reads again what is said of clients; why not, if that failed.
    fn reload_gateway(&self) -> Option<String> {
        let problem = self.node().edge().reload().err()?.to_string();
        tracing::error!("what is said of clients stays what it was: {problem}");
        Some(problem)
    }

    /// Serves the versions of a function that are to be served.
    fn refresh(
        self: &Arc<Self>,
        record: &FunctionRecord,
        active: &BuiltFunction,
        report: &mut Reload,
    ) {
        let name = active.function.config.name.clone();
        let before = self.services.served(name.as_str());
        let was_active = before.as_ref().map(|served| served.active().clone());
        let service = self.version(active, before.as_ref(), report);
        let shares = self.shares(record, &service, before.as_ref(), report);
        let numbers: Vec<u32> =
            shares.iter().map(|share| share.service.version()).chain([active.number]).collect();
        let mut all_known = self.known.lock().expect("no holder panics");
        let known = all_known.entry(name.clone()).or_default();
        known.versions.retain(|number, _| *number == active.number || record.shares(*number));
        known.rolled_back = record.rolled_back.as_ref().map(describe);
        let new: Vec<_> = [&service].into_iter().chain(shares.iter().map(|s| &s.service)).collect();
        let old: Vec<_> = before.iter().flat_map(Served::services).collect();
        let is_same = known.split == record.split
            && old.len() == new.len()
            && old.iter().zip(&new).all(|(old, new)| Arc::ptr_eq(old, new));
        known.active = active.number;
        known.split = record.split.clone();
        drop(all_known);
        if is_same {
            // Those that could not be taken in the last time.
            self.take_in_older(&name);
            return;
        }
        if was_active.is_some_and(|was| was.version() != service.version()) {
            service.watch_anew();
        }
        self.services.deploy(Served::split(service, shares));
        self.take_in_older(&name);
        self.node().forget_crashes_of_others(name.as_str(), &numbers);
    }

    /// The versions that get a share, as far as they can be served.
    fn shares(
        self: &Arc<Self>,
        record: &FunctionRecord,
        active: &Service,
        before: Option<&Served>,
        report: &mut Reload,
    ) -> Vec<ShareOf> {
        let versions = record.versions();
        let mut shares = Vec::new();
        for Share { version, percent, header } in &record.split {
            let found = versions.iter().find(|found| found.number == *version).cloned();
            let Some(found) = found else { continue };
            let opened = BuiltFunction::from_version(&record.name, found)
                .map_err(|error| error.to_string())
                .and_then(|function| {
                    check_share(active.config(), &function.function.config)?;
                    Ok(self.version(&function, before, report))
                });
            match opened {
                // Its clients would be refused: the active one serves them.
                Ok(service) if service.launcher().index().is_none() => {}
                Ok(service) => {
                    shares.push(ShareOf { service, percent: *percent, header: header.clone() });
                }
                Err(error) => {
                    let reason = format!("version {version} gets no requests: {error}");
                    tracing::error!(function = %record.name, "{reason}");
                    report.broken.entry(record.name.to_string()).or_insert(reason);
                }
            }
        }
        shares
    }

    /// A version as a service: the one that is there, or a new one.
    fn version(
        self: &Arc<Self>,
        function: &BuiltFunction,
        before: Option<&Served>,
        report: &mut Reload,
    ) -> Arc<Service> {
        let (name, number) = (function.function.config.name.clone(), function.number);
        let is_served = |served: &Served| {
            served.services().find(|service| service.version() == number).cloned()
        };
        let all_known = self.known.lock().expect("no holder panics");
        if let Some(known) = all_known.get(&name).and_then(|known| known.versions.get(&number))
            && known.image == function.image
            && known.created_ms == function.created_ms
            && let Some(service) = before.and_then(is_served)
        {
            if let Some(problem) = &known.problem {
                report.broken.insert(name.to_string(), problem.clone());
            }
            return service;
        }
        drop(all_known);
        let (launcher, problem, build): (Arc<dyn Launcher>, _, _) = match self.resting(function) {
            Ok((launcher, build)) => (Arc::new(launcher), None, build),
            Err(error) => {
                let mut reason = error.to_string();
                if error.is_mended_by_freezing() {
                    reason.push_str("; this is being done now");
                    self.node().refreshes().want(name.clone(), number);
                }
                tracing::error!(function = %name, version = number, "cannot serve the function: {reason}");
                (Arc::new(Broken { reason: reason.clone() }), Some(reason), Build::Present)
            }
        };
        match &problem {
            Some(reason) => {
                report.broken.insert(name.to_string(), reason.clone());
            }
            None if report.loaded.last() == Some(&name.to_string()) => {}
            None => report.loaded.push(name.to_string()),
        }
        self.complete_partial(function);
        if build == Build::Older {
            tracing::info!(function = %name, "serves from an image of an older build of Thaw");
        }
        let (image, created_ms) = (function.image, function.created_ms);
        let known =
            Known { image, created_ms, tried_ms: 0, problem, build, waits_for_instances: false };
        let mut all_known = self.known.lock().expect("no holder panics");
        all_known.entry(name).or_default().versions.insert(number, known);
        drop(all_known);
        let config = function.function.config.clone();
        Service::of_version(config, number, image.to_string(), launcher, self.services.clone())
    }
}

/// Whether requests of a function can also go to this version: they come the same way.
fn check_share(active: &FunctionConfig, other: &FunctionConfig) -> Result<(), String> {
    match (active.entry.kind, active.listen) == (other.entry.kind, other.listen) {
        true => Ok(()),
        false => Err("its `kind` or `listen` is not that of the active version; activate it \
                      instead"
            .to_owned()),
    }
}

fn describe(rolled_back: &RolledBack) -> String {
    let RolledBack { version, to, reason, .. } = rolled_back;
    format!(
        "version {version} was taken out of service, and version {to} gets its requests: {reason}"
    )
}
