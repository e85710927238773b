//! The functions of the store, made into services.

use crate::build::{self, BuildError, BuildOptions, FreezeFailure, open_image_of_any_build};
use crate::config::{FunctionConfig, FunctionName};
use crate::function::{BuiltFunction, FunctionError};
use crate::instance::{
    BootPolicy, Client, LaunchError, LaunchOptions, Launched, Launcher, RestingLauncher,
    RewindPolicy, SandboxLauncher, Techniques, WorkingSetUse, while_partial,
};
use crate::logs::{FunctionLog, Logs};
use crate::node::NodeState;
use crate::packing::{self, OpenImages};
use crate::partial::{self, FarContents, PartialFunction};
use crate::rollout::{Served, ShareOf};
use crate::rootfs::StoredRootfs;
use crate::service::{CheckpointOf, Service};
use crate::tenants::TenantName;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::num::NonZero;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thaw_sandbox::{
    BuildError as KernelBuildError, BuildPools, CoreError, Fit, Image, ImageError, PlanError,
    ZygotePool, cpu_features,
};
use thaw_store::{
    FunctionRecord, ImageId, KernelId, Kind, Name, RolledBack, Share, Store, StoreError,
};
use tokio::task::JoinSet;

/// How often the room that images take on disk is looked at.
const LOOK_FOR_ROOM: Duration = Duration::from_secs(10);
/// The number of a version that is still being pulled: the store gives it one when all is there.
const PARTIAL: u32 = 0;
/// How often the age of images is looked at.
const LOOK_FOR_OLD: Duration = Duration::from_secs(15);
/// Time between two attempts to freeze a function anew that is served from an image of an older
/// kernel build.
const OLDER_BUILD_PAUSE: Duration = Duration::from_secs(60);

/// Turns stored functions into services and keeps them so.
pub struct Catalog {
    store: Store,
    logs: Arc<Logs>,
    pools: BuildPools,
    shared: Arc<NodeState>,
    working_set: WorkingSetUse,
    known: Mutex<BTreeMap<FunctionName, KnownFunction>>,
    /// Held by the one who compares: what was read later from the store is installed later.
    reloading: Mutex<()>,
    function_logs: Mutex<HashMap<FunctionName, Arc<FunctionLog>>>,
    /// Contents of functions that were partial when they were last loaded.
    far: Mutex<HashMap<FunctionName, Far>>,
}

/// What instances of a partial function wait for.
struct Far {
    /// Digest of the function's manifest.
    digest: String,
    contents: Weak<FarContents>,
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
}

/// Why a function cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Its record or files are not usable.
    #[error(transparent)]
    Function(#[from] FunctionError),
    /// A checkpoint cannot be restored.
    #[error("checkpoint `{name}` cannot be restored: {reason}")]
    Checkpoint {
        /// The checkpoint.
        name: Name,
        /// Why.
        reason: String,
    },
    /// Its files are missing or damaged.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Its image cannot be used here.
    #[error(transparent)]
    Image(#[from] FreezeFailure),
    /// The kernel build that its image needs is not to be had.
    #[error("its image needs another build of the Thaw kernel: {0}")]
    Kernel(#[from] KernelBuildError<StoreError>),
    /// Its image cannot be booted.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Its instances cannot be kept apart from other tenants'.
    #[error(transparent)]
    Cores(#[from] CoreError),
}

impl LoadError {
    /// Whether freezing the function anew would mend it.
    fn is_mended_by_freezing(&self) -> bool {
        match self {
            Self::Image(FreezeFailure::Image(error)) => !matches!(error, ImageError::Read(_)),
            Self::Image(FreezeFailure::Store(error)) => {
                error.is_not_found()
                    || matches!(error, StoreError::Damaged { kind: Kind::Packed, .. })
            }
            Self::Kernel(error) => !matches!(error, KernelBuildError::Zygote(_)),
            _ => false,
        }
    }
}

/// Stands in for a function that cannot be served, so that its clients learn why.
struct Broken {
    reason: String,
}

impl Launcher for Broken {
    fn launch(&self, _client: Option<&Client>) -> Result<Launched, LaunchError> {
        Err(LaunchError(self.reason.clone()))
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
        shared: Arc<NodeState>,
        working_set: WorkingSetUse,
    ) -> Arc<Self> {
        Arc::new(Self {
            store,
            logs,
            pools: BuildPools::new(pool),
            shared,
            working_set,
            known: Mutex::default(),
            reloading: Mutex::default(),
            function_logs: Mutex::default(),
            far: Mutex::default(),
        })
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// What all services of the node share.
    pub fn node(&self) -> &Arc<NodeState> {
        &self.shared
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
        let gone: Vec<_> = known.keys().filter(|name| !present.contains(name)).cloned().collect();
        for name in gone {
            known.remove(&name);
            self.shared.remove(name.as_str());
            report.removed.push(name.to_string());
        }
        drop(known);
        self.shared.shrink_to_quotas();
        Ok(report)
    }

    /// Reads the quotas of tenants again; why not, if that failed.
    fn reload_quotas(&self) -> Option<String> {
        let problem = self.shared.tenants().reload().err()?;
        let problem = problem.to_string();
        tracing::error!("the quotas of tenants stay what they were: {problem}");
        Some(problem)
    }

    /// Reads again what is said of clients; why not, if that failed.
    fn reload_gateway(&self) -> Option<String> {
        let problem = self.shared.edge().reload().err()?.to_string();
        tracing::error!("what is said of clients stays what it was: {problem}");
        Some(problem)
    }

    /// Where functions are of which only a part is here.
    fn partial_directory(&self) -> PathBuf {
        self.store.root().parent().unwrap_or(self.store.root()).join("partial")
    }

    /// Serves functions of which only a part is here, unless a newer version is in the store, where
    /// functions were `stored` at these times. Their names.
    fn refresh_partial(
        self: &Arc<Self>,
        stored: &HashMap<String, u64>,
        report: &mut Reload,
    ) -> Vec<FunctionName> {
        let mut present = Vec::new();
        let directory = self.partial_directory();
        for name in partial::names(&directory) {
            let known = |name: &FunctionName| {
                let known = self.known.lock().expect("no holder panics");
                let known = known.get(name)?.versions.get(&PARTIAL)?;
                Some((known.image, known.created_ms))
            };
            match PartialFunction::open(&directory.join(&name)) {
                Ok(function)
                    if stored.get(&name).is_some_and(|at| *at >= function.record.created_ms) => {}
                Ok(function) => {
                    let name = function.record.function.config.name.clone();
                    let record = &function.record;
                    if known(&name) != Some((record.document.image.id, record.created_ms)) {
                        self.serve_partial(function, report);
                    }
                    present.push(name);
                }
                Err(reason) => {
                    tracing::error!(function = %name, "cannot serve the partial function: {reason}");
                    report.broken.insert(name.clone(), reason);
                    // What the store has of it goes on.
                    let is_stored = stored.contains_key(&name);
                    present.extend(name.parse::<FunctionName>().ok().filter(|_| !is_stored));
                }
            }
        }
        present
    }

    fn serve_partial(self: &Arc<Self>, function: PartialFunction, report: &mut Reload) {
        let record = &function.record;
        let config = while_partial(&record.function.config);
        let (name, image) = (config.name.clone(), record.document.image.id);
        let created_ms = record.created_ms;
        let (launcher, problem): (Arc<dyn Launcher>, _) =
            match self.launcher_of_partial(function, &config) {
                Ok(launcher) => (Arc::new(launcher), None),
                Err(error) => {
                    let reason = error.to_string();
                    tracing::error!(function = %name, "cannot serve the function: {reason}");
                    (Arc::new(Broken { reason: reason.clone() }), Some(reason))
                }
            };
        match &problem {
            Some(reason) => drop(report.broken.insert(name.to_string(), reason.clone())),
            None => report.loaded.push(name.to_string()),
        }
        let (image_name, shared) = (image.to_string(), self.shared.clone());
        self.shared.install(Service::of_version(config, PARTIAL, image_name, launcher, shared));
        let known = Known {
            image,
            created_ms,
            tried_ms: 0,
            problem,
            build: Build::Present,
            waits_for_instances: false,
        };
        let versions = BTreeMap::from([(PARTIAL, known)]);
        let known = KnownFunction { active: PARTIAL, versions, ..KnownFunction::default() };
        self.known.lock().expect("no holder panics").insert(name, known);
    }

    /// What instances of a partial function still miss is in the store, now that all of it is.
    fn complete_partial(&self, function: &BuiltFunction) {
        let far = self.far.lock().expect("no holder panics").remove(&function.function.config.name);
        let (Some(far), Some(origin)) = (far, &function.function.origin) else { return };
        let Some(contents) = far.contents.upgrade().filter(|_| far.digest == origin.digest) else {
            return;
        };
        let whole = function
            .rootfs(&self.store)
            .and_then(|rootfs| Ok((self.store.open_image(function.image)?, rootfs)));
        match whole {
            Ok((image, rootfs)) => contents.complete(image, rootfs.blobs()),
            Err(error) => {
                let function = &function.function.config.name;
                tracing::error!(%function, "instances of the time of its pull lack memory: {error}");
            }
        }
    }

    fn launcher_of_partial(
        &self,
        function: PartialFunction,
        config: &FunctionConfig,
    ) -> Result<SandboxLauncher, LoadError> {
        let header = *function.image.header();
        function
            .image
            .check_fit(&Fit {
                kernel_build: header.kernel_build,
                index_hash: *function.index_id().as_bytes(),
                cpu_features: cpu_features(),
            })
            .map_err(FreezeFailure::from)?;
        let kernel = function.directory.join(partial::parts::KERNEL);
        let pool = self.pools.of(header.kernel_build, || match function.record.has_kernel {
            true => std::fs::read(&kernel).map_err(StoreError::Source),
            false => self.store.kernel(KernelId(header.kernel_build)),
        })?;
        let tenant = TenantName::of(config.sharing.domain.as_ref());
        let contents = Arc::new(FarContents::new(&function).map_err(StoreError::Source)?);
        let far =
            Far { digest: function.record.digest.clone(), contents: Arc::downgrade(&contents) };
        self.far.lock().expect("no holder panics").insert(config.name.clone(), far);
        let launcher = SandboxLauncher::of_partial(
            pool,
            &self.store,
            (function, contents),
            (self.logs.clone(), self.log(&config.name)),
            self.shared.tenants().serving(tenant)?,
            config,
        )?;
        launcher.read_secrets_from(self.shared.secrets());
        Ok(launcher)
    }

    /// Serves the versions of a function that are to be served.
    fn refresh(
        self: &Arc<Self>,
        record: &FunctionRecord,
        active: &BuiltFunction,
        report: &mut Reload,
    ) {
        let name = active.function.config.name.clone();
        let before = self.shared.served(name.as_str());
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
            return;
        }
        if was_active.is_some_and(|was| was.version() != service.version()) {
            service.watch_anew();
        }
        self.shared.deploy(Served::split(service, shares));
        self.shared.forget_crashes_of_others(&name, &numbers);
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
                    self.shared.refreshes().want(name.clone(), number);
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
        Service::of_version(config, number, image.to_string(), launcher, self.shared.clone())
    }

    /// Opens an image, with the zygotes of the kernel build that it needs.
    fn open(
        &self,
        id: ImageId,
        rootfs: &StoredRootfs,
    ) -> Result<(Image, Arc<ZygotePool>, Build), LoadError> {
        let image = open_image_of_any_build(&self.store, id, rootfs)?;
        let build = image.header().kernel_build;
        let pool = self.pools.of(build, || self.store.kernel(KernelId(build)))?;
        let is_present = self.pools.is_present(build);
        Ok((image, pool, if is_present { Build::Present } else { Build::Older }))
    }

    /// What boots a function, and opens its image when it is needed. One that is not packed is
    /// opened now, so that it is known whether it can be used.
    fn resting(
        self: &Arc<Self>,
        function: &BuiltFunction,
    ) -> Result<(RestingLauncher, Build), LoadError> {
        let (catalog, opened) = (Arc::downgrade(self), function.clone());
        let open = Box::new(move || {
            let catalog = catalog.upgrade().ok_or("the daemon ends")?;
            catalog.open_again(&opened).map_err(|error| {
                let text = error.to_string();
                match error.is_mended_by_freezing() {
                    true => text + "; this is being done now",
                    false => text,
                }
            })
        });
        let config = &function.function.config;
        let keeps_something = config.template.fork || config.ready > 0;
        let kernel = match self.store.is_packed_only(function.image) && !keeps_something {
            true => self.store.image_kernel(function.image)?,
            false => None,
        };
        let Some(kernel) = kernel else {
            let (launcher, build) = self.launcher(function)?;
            return Ok((RestingLauncher::opened(launcher, function.index, open), build));
        };
        let is_present = self.pools.is_present(kernel.0);
        let build = if is_present { Build::Present } else { Build::Older };
        Ok((RestingLauncher::resting(function.index, kernel, open), build))
    }

    /// Opens the image of a function that was served without. One that is damaged is frozen anew.
    fn open_again(&self, function: &BuiltFunction) -> Result<SandboxLauncher, LoadError> {
        let opened = self.launcher(function).map(|(launcher, _)| launcher);
        if let Err(error) = &opened {
            let name = &function.function.config.name;
            tracing::error!(function = %name, "cannot open the image of the function: {error}");
            if error.is_mended_by_freezing() {
                self.shared.refreshes().want(name.clone(), function.number);
            }
        }
        opened
    }

    /// Packs images that were not used for long, if those that are not packed take more than
    /// `room` bytes on disk.
    fn make_room(&self, room: u64) {
        let made = packing::make_room(&self.store, room, &OfServices(&self.shared));
        match made {
            Ok(report) => {
                if report.packed > 0 {
                    let (packed, freed) = (report.packed, report.freed);
                    tracing::info!(packed, freed, "packed images that were not used for long");
                }
                report.failed.iter().for_each(|failure| tracing::warn!("{failure}"));
            }
            Err(error) => tracing::warn!("images stay as they are: {error}"),
        }
    }

    /// Keeps the images that are not packed within `room` bytes on disk, until the task is dropped.
    pub async fn keep_room(self: Arc<Self>, room: u64) {
        let mut ticks = tokio::time::interval(LOOK_FOR_ROOM);
        loop {
            ticks.tick().await;
            let catalog = self.clone();
            let done = tokio::task::spawn_blocking(move || catalog.make_room(room)).await;
            done.expect("packing does not panic");
        }
    }

    fn launcher(&self, function: &BuiltFunction) -> Result<(SandboxLauncher, Build), LoadError> {
        let config = &function.function.config;
        let rootfs = function.rootfs(&self.store)?;
        let (image, pool, build) = self.open(function.image, &rootfs)?;
        let launcher = SandboxLauncher::new(
            pool,
            &self.store,
            rootfs,
            function.image,
            image,
            self.logs.clone(),
            self.log(&config.name),
            self.shared.tenants().serving(TenantName::of(config.sharing.domain.as_ref()))?,
            config,
            LaunchOptions {
                working_set: self.working_set,
                policy: BootPolicy {
                    ready: config.ready.into(),
                    rewind: RewindPolicy::of(config),
                    template: config.template.fork,
                    automatic: true,
                },
                techniques: Techniques::default(),
            },
        )?;
        launcher.read_secrets_from(self.shared.secrets());
        Ok((launcher, build))
    }

    /// What boots instances of a checkpoint, and the function that they belong to. Reads the
    /// whole image, so it may take seconds.
    ///
    /// # Errors
    /// There is no such checkpoint, its function is not served, or its image does not fit.
    pub fn checkpoint(&self, name: &Name) -> Result<(Arc<Service>, Arc<dyn Launcher>), LoadError> {
        let record = self.store.get_checkpoint(name)?;
        let unusable = |reason: String| LoadError::Checkpoint { name: name.clone(), reason };
        let CheckpointOf { function, config } =
            serde_json::from_value(record.config).map_err(|error| unusable(error.to_string()))?;
        let service = self.shared.route(function.as_str()).ok_or_else(|| {
            unusable(format!("its function `{function}` is not served; build that again"))
        })?;
        // The memory of one tenant must not serve the clients of another.
        let domain = service.tenant().name().domain().map(|domain| domain.name().clone());
        if record.owner != domain {
            let reason =
                format!("`{function}` is in another sharing domain by now; restore it there");
            return Err(unusable(reason));
        }
        // What it may use and reach is what its function may now.
        let FunctionConfig { limits, egress, .. } = service.config().clone();
        let config = FunctionConfig { limits, egress, ..config };
        let rootfs = StoredRootfs::open(&self.store, record.index)?;
        let (image, pool, _) = self.open(record.image, &rootfs).map_err(|error| match error {
            error @ LoadError::Kernel(_) => unusable(error.to_string()),
            error => error,
        })?;
        let launcher = SandboxLauncher::new(
            pool,
            &self.store,
            rootfs,
            record.image,
            image,
            self.logs.clone(),
            self.log(&function),
            service.tenant().clone(),
            &config,
            LaunchOptions {
                working_set: WorkingSetUse::Off,
                policy: BootPolicy::NONE,
                techniques: Techniques::default(),
            },
        )?;
        launcher.read_secrets_from(self.shared.secrets());
        Ok((service, Arc::new(launcher)))
    }

    /// Freezes functions anew that cannot be served as they are, whose instances crash, or
    /// whose images are as old as their owners want them to become, until the task is
    /// dropped.
    pub async fn keep_fresh(self: Arc<Self>) {
        let most = std::thread::available_parallelism().map_or(1, NonZero::get);
        let mut ticks = tokio::time::interval(LOOK_FOR_OLD);
        let mut at_work = JoinSet::new();
        let mut in_work = BTreeSet::new();
        loop {
            tokio::select! {
                _ = ticks.tick() => {
                    self.want_old_ones_fresh();
                    self.want_older_builds_fresh();
                }
                (name, number) = self.shared.refreshes().next(), if at_work.len() < most => {
                    // One that is being frozen anew is not begun a second time.
                    if in_work.insert((name.clone(), number)) {
                        at_work.spawn(self.clone().refreeze(name, number));
                    }
                }
                Some(Ok(version)) = at_work.join_next() => {
                    in_work.remove(&version);
                }
            }
        }
    }

    /// Has the images frozen anew that have reached the age that `refresh` names. One that
    /// could not be frozen is tried again when it is as much older.
    fn want_old_ones_fresh(&self) {
        let now_ms = u128::from(now_ms());
        let mut known = self.known.lock().expect("no holder panics");
        for service in self.shared.services() {
            let known = known.get_mut(service.name());
            let known = known.and_then(|known| known.versions.get_mut(&service.version()));
            let (Some(age), Some(known)) = (service.config().refresh, known) else {
                continue;
            };
            let fresh_ms = u128::from(known.created_ms.max(known.tried_ms));
            if now_ms.saturating_sub(fresh_ms) >= age.0.as_millis() {
                known.tried_ms = now_ms as u64;
                known.waits_for_instances = false;
                self.shared.refreshes().want(service.name().clone(), service.version());
            }
        }
    }

    /// Has functions frozen anew that are served from images of older kernel builds. Where
    /// instances stay, a new image ends them, so it waits until there are none.
    fn want_older_builds_fresh(&self) {
        let now_ms = now_ms();
        let mut known = self.known.lock().expect("no holder panics");
        for service in self.shared.services() {
            let known = known.get_mut(service.name());
            let known = known.and_then(|known| known.versions.get_mut(&service.version()));
            let Some(known) = known else { continue };
            let pause_ms = OLDER_BUILD_PAUSE.as_millis() as u64;
            let is_due = now_ms.saturating_sub(known.tried_ms) >= pause_ms;
            if known.build == Build::Older && is_due && live_and_staying(&service) == 0 {
                known.tried_ms = now_ms;
                known.waits_for_instances = true;
                self.shared.refreshes().want(service.name().clone(), service.version());
            }
        }
    }

    /// Whether a version may have a new image now, which ends its instances.
    fn may_replace(&self, name: &FunctionName, number: u32) -> Result<(), BuildError> {
        let known = self.known.lock().expect("no holder panics");
        let version = known.get(name).and_then(|known| known.versions.get(&number));
        if !version.is_some_and(|known| known.waits_for_instances) {
            return Ok(());
        }
        drop(known);
        match self.served_version(name, number).map_or(0, |service| live_and_staying(&service)) {
            0 => Ok(()),
            live => Err(BuildError::InUse(live)),
        }
    }

    /// A version of a function, if it gets requests.
    fn served_version(&self, name: &FunctionName, number: u32) -> Option<Arc<Service>> {
        let served = self.shared.served(name.as_str())?;
        served.services().find(|service| service.version() == number).cloned()
    }

    /// Freezes a version of a function anew and serves the new image. Returns which it was.
    async fn refreeze(self: Arc<Self>, name: FunctionName, number: u32) -> (FunctionName, u32) {
        let (catalog, function) = (self.clone(), name.clone());
        let refrozen = tokio::task::spawn_blocking(move || {
            let weak_limits = catalog.pool().weak_limits();
            let service = catalog.served_version(&function, number);
            let cores = service.and_then(|service| service.tenant().cores().cloned());
            let volumes = catalog.shared.secrets().map(|secrets| secrets.volumes());
            let options = BuildOptions { weak_limits, cores, volumes, ..BuildOptions::default() };
            let may_replace = || catalog.may_replace(&function, number);
            let (store, name) = (&catalog.store, function.as_str());
            build::refreeze(store, name, number, &options, &may_replace, &mut |_| {})
                .map_err(|error| error.to_string())?;
            catalog.reload().map_err(|error| error.to_string())
        });
        match refrozen.await.map_err(|error| error.to_string()).flatten() {
            Ok(_) => {
                tracing::info!(function = %name, "froze the function anew");
                if let Some(service) = self.served_version(&name, number) {
                    service.end_backoff();
                }
            }
            Err(error) => {
                tracing::error!(function = %name, "could not freeze the function anew: {error}");
            }
        }
        (name, number)
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

/// The images that services have open.
struct OfServices<'a>(&'a NodeState);

impl OfServices<'_> {
    fn of(&self, image: ImageId) -> impl Iterator<Item = Arc<Service>> {
        let name = image.to_string();
        self.0.services().into_iter().filter(move |service| service.image() == name)
    }
}

impl OpenImages for OfServices<'_> {
    fn last_used(&self, image: ImageId) -> Option<SystemTime> {
        self.of(image).filter_map(|service| service.launcher().last_used()).max()
    }

    fn close(&self, image: ImageId) {
        self.of(image).for_each(|service| service.launcher().close_if_unused());
    }
}

/// Instances that more than one client may use, those that are asleep too: a new image ends them.
fn live_and_staying(service: &Service) -> usize {
    if service.is_single_use() { 0 } else { service.instance_count() + service.asleep_count() }
}

/// Milliseconds since the epoch.
fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
