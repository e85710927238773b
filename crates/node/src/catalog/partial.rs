//! Functions of which only a part is here: they are served while the rest is fetched.

use super::{Broken, Build, Catalog, Known, KnownFunction, LoadError, Reload};
use crate::far::FarContents;
use crate::instance::{Launcher, SandboxLauncher, while_partial};
use crate::service::Service;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use thaw_build::build::FreezeFailure;
use thaw_home::config::{FunctionConfig, FunctionName};
use thaw_home::function::BuiltFunction;
use thaw_home::partial::{self, PartialFunction};
use thaw_home::tenants::TenantName;
use thaw_sandbox::{Fit, cpu_features};
use thaw_store::{KernelId, StoreError};

/// The number of a version that is still being pulled: the store gives it one when all is there.
pub const PARTIAL: u32 = 0;

/// What instances of a partial function wait for.
pub(super) struct Far {
    /// Digest of the function's manifest.
    digest: String,
    contents: Weak<FarContents>,
}

impl Catalog {
    /// Where functions are of which only a part is here.
    fn partial_directory(&self) -> PathBuf {
        partial::directory_beside(&self.store)
    }

    /// Whether a part of a function is here, if only one that cannot be used.
    pub(super) fn may_be_partial(&self, function: &FunctionName) -> bool {
        self.partial_directory().join(function.as_str()).exists()
    }

    /// The functions of which a part is served.
    pub fn partial_functions(&self) -> BTreeSet<String> {
        let known = self.known.lock().expect("no holder panics");
        let is_partial = |known: &KnownFunction| known.versions.contains_key(&PARTIAL);
        let partial = known.iter().filter(|(_, known)| is_partial(known));
        partial.map(|(name, _)| name.to_string()).collect()
    }

    /// Serves functions of which only a part is here, unless a newer version is in the store, where
    /// functions were `stored` at these times. Their names.
    pub(super) fn refresh_partial(
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
        let (image_name, services) = (image.to_string(), self.services.clone());
        self.services.install(Service::of_version(config, PARTIAL, image_name, launcher, services));
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
    pub(super) fn complete_partial(&self, function: &BuiltFunction) {
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

    fn far_contents(&self, function: &PartialFunction) -> std::io::Result<FarContents> {
        let (shared, name) =
            (Arc::downgrade(self.node()), function.record.function.config.name.clone());
        let problem = move || shared.upgrade()?.pulls().fetching(name.as_str())?.problem;
        FarContents::new(function, self.node().metrics().pulls().parts(), Box::new(problem))
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
        let contents = Arc::new(self.far_contents(&function).map_err(StoreError::Source)?);
        let far =
            Far { digest: function.record.digest.clone(), contents: Arc::downgrade(&contents) };
        self.far.lock().expect("no holder panics").insert(config.name.clone(), far);
        let launcher = SandboxLauncher::of_partial(
            pool,
            &self.store,
            (function, contents),
            (self.logs.clone(), self.log(&config.name)),
            self.node().tenants().serving(tenant)?,
            config,
        )?;
        launcher.read_secrets_from(self.node().secrets());
        Ok(launcher)
    }
}
