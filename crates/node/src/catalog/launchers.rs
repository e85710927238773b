//! What boots instances: of functions, and of checkpoints.

use super::{Build, Catalog};
use crate::build::{FreezeFailure, open_image_of_any_build};
use crate::config::FunctionConfig;
use crate::function::{BuiltFunction, FunctionError};
use crate::instance::{
    BootPolicy, LaunchOptions, Launcher, RestingLauncher, RewindPolicy, SandboxLauncher,
    Techniques, WorkingSetUse,
};
use crate::rootfs::StoredRootfs;
use crate::service::{CheckpointOf, Service};
use crate::tenants::TenantName;
use std::sync::Arc;
use thaw_sandbox::{
    BuildError as KernelBuildError, CoreError, Image, ImageError, PlanError, ZygotePool,
};
use thaw_store::{ImageId, KernelId, Kind, Name, StoreError};

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
    pub(super) fn is_mended_by_freezing(&self) -> bool {
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

impl Catalog {
    /// Opens an image, with the zygotes of the kernel build that it needs.
    pub(super) fn open(
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
    pub(super) fn resting(
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

    pub(super) fn launcher(
        &self,
        function: &BuiltFunction,
    ) -> Result<(SandboxLauncher, Build), LoadError> {
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
}
