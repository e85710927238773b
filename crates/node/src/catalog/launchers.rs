//! What boots instances of functions.

use super::{Build, Catalog};
use crate::instance::{
    BootPolicy, LaunchOptions, RestingLauncher, RewindPolicy, SandboxLauncher, Techniques,
};
use std::sync::Arc;
use thaw_build::build::{FreezeFailure, open_image_of_any_build};
use thaw_home::function::{BuiltFunction, FunctionError};
use thaw_home::rootfs::StoredRootfs;
use thaw_home::tenants::TenantName;
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
    /// A checkpoint is encrypted, and there is no key.
    #[error(
        "checkpoint `{name}` cannot be restored: it is encrypted with key {key}; give that with \
         --key-file"
    )]
    Encrypted {
        /// The checkpoint.
        name: Name,
        /// The id of the key.
        key: String,
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
    /// Whether the store does not have something that it needs.
    pub(super) fn is_not_found(&self) -> bool {
        match self {
            Self::Store(error)
            | Self::Function(FunctionError::Store(error))
            | Self::Image(FreezeFailure::Store(error))
            | Self::Kernel(KernelBuildError::Read(error)) => error.is_not_found(),
            _ => false,
        }
    }

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
        self.with_zygotes(open_image_of_any_build(&self.store, id, rootfs)?)
    }

    /// An image with the zygotes of the kernel build that it needs.
    pub(super) fn with_zygotes(
        &self,
        image: Image,
    ) -> Result<(Image, Arc<ZygotePool>, Build), LoadError> {
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
                self.node().refreshes().want(name.clone(), function.number);
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
            self.node().tenants().serving(TenantName::of(config.sharing.domain.as_ref()))?,
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
        launcher.read_secrets_from(self.node().secrets());
        Ok((launcher, build))
    }
}
