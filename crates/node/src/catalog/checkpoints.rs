//! What boots instances of checkpoints, encrypted ones too.

use super::Catalog;
use super::launchers::LoadError;
use super::open_checkpoints::OpenFor;
use crate::instance::{
    BootPolicy, Checkpoint, Decrypted, LaunchOptions, Launcher, SandboxLauncher, StandsOn,
    Techniques, WorkingSetUse,
};
use crate::remote::{ExecNote, SandboxVolume};
use crate::service::{CheckpointOf, Service};
use crate::tenants::Tenant;
use std::fs::File;
use std::io;
use std::sync::Arc;
use thaw_build::build::{open_image_file, open_image_of_any_build};
use thaw_home::config::{FunctionConfig, FunctionName};
use thaw_home::rootfs::StoredRootfs;
use thaw_home::seal::memory_file;
use thaw_home::seal::owner::{Head, OwnerKey};
use thaw_home::volumes::VolumeSnapshot;
use thaw_sandbox::{FreezeBase, Image};
use thaw_store::{CheckpointRecord, ImageId, Name, StoreError};
use tokio::task::spawn_blocking;

/// A checkpoint that is about to be restored.
struct Found {
    record: CheckpointRecord,
    function: FunctionName,
    config: FunctionConfig,
    service: Arc<Service>,
    execs: Vec<ExecNote>,
    own_volumes: Vec<SandboxVolume>,
}

/// A checkpoint that is open.
#[derive(Clone)]
pub struct OpenedCheckpoint {
    /// The function that its instances belong to.
    pub service: Arc<Service>,
    /// What boots them.
    pub launcher: Arc<dyn Launcher>,
    /// The volumes that they have beside those of the function; the launcher does not know of them.
    pub volumes: Vec<SandboxVolume>,
}

impl Catalog {
    /// What boots instances of a checkpoint, and the function that they belong to. Reads the
    /// whole image, so it may take seconds; an encrypted one is decrypted into memory and verified
    /// before.
    ///
    /// # Errors
    /// There is no such checkpoint, its function is not served, its image does not fit, or the key
    /// is not the one that it is encrypted with.
    pub async fn checkpoint(
        self: &Arc<Self>,
        name: Name,
        key: Option<OwnerKey>,
    ) -> Result<OpenedCheckpoint, LoadError> {
        let (catalog, wanted) = (self.clone(), name.clone());
        let found = spawn_blocking(move || catalog.find_checkpoint(&wanted)).await;
        self.opened(found.map_err(|error| unusable(&name, error))??, key).await
    }

    /// What boots sandboxes of a plain checkpoint, and the version of its function that they belong
    /// to: the one with its files, as long as there is one, since only that can take them over from
    /// an earlier daemon. Else it is the active one.
    ///
    /// # Errors
    /// As [`Self::checkpoint`].
    pub async fn checkpoint_for_sandbox(
        self: &Arc<Self>,
        name: Name,
    ) -> Result<OpenedCheckpoint, LoadError> {
        let (catalog, wanted) = (self.clone(), name.clone());
        let find = move || {
            let found = catalog.find_checkpoint(&wanted);
            found.map(|found| catalog.of_its_files(found))
        };
        let found = spawn_blocking(find).await;
        let found = found.map_err(|error| unusable(&name, error))??;
        let (image, config) = (found.record.image, found.config.clone());
        let (for_what, service) = (OpenFor { name, image, config }, found.service.clone());
        if let Some(launcher) = self.open_checkpoints.get(&for_what, &service) {
            return Ok(OpenedCheckpoint { service, launcher, volumes: found.own_volumes });
        }
        let opened = self.opened(found, None).await?;
        self.open_checkpoints.keep(for_what, &opened.service, &opened.launcher);
        Ok(opened)
    }

    /// Closes a checkpoint that was removed.
    pub fn close_checkpoint(&self, name: &Name) {
        self.open_checkpoints.close(name);
    }

    /// Closes checkpoints that were removed or replaced by others than this daemon, or while they
    /// were being opened.
    pub(super) fn close_gone_checkpoints(&self) {
        self.open_checkpoints.close_unless(|name, image| {
            let found = self.store.get_checkpoint(name);
            found.is_ok_and(|record| record.image == image)
        });
    }

    async fn opened(
        self: &Arc<Self>,
        found: Found,
        key: Option<OwnerKey>,
    ) -> Result<OpenedCheckpoint, LoadError> {
        let name = found.record.name.clone();
        // Whoever gives no key decrypts nothing.
        let turn = match &key {
            Some(_) => Some(found.service.tenant().unsealer().await),
            None => None,
        };
        let catalog = self.clone();
        let opened = spawn_blocking(move || {
            let opened = catalog.open_checkpoint(found, key.as_ref());
            drop(turn);
            opened
        });
        opened.await.map_err(|error| unusable(&name, error))?
    }

    /// The snapshots of volumes that belong to a checkpoint.
    ///
    /// # Errors
    /// There is no such checkpoint, or it has none.
    pub async fn volumes_of_checkpoint(
        &self,
        name: &Name,
    ) -> Result<Vec<VolumeSnapshot>, LoadError> {
        let (store, wanted) = (self.store.clone(), name.clone());
        let record = spawn_blocking(move || store.get_checkpoint(&wanted)).await;
        let record = record.map_err(|error| unusable(name, error))??;
        match VolumeSnapshot::of_checkpoint(&record) {
            none if none.is_empty() => Err(unusable(
                name,
                "it has no files of volumes; leave --volumes out, or take one with `thaw checkpoint \
                 --volumes`",
            )),
            snapshots => Ok(snapshots),
        }
    }

    fn find_checkpoint(&self, name: &Name) -> Result<Found, LoadError> {
        let record = self.store.get_checkpoint(name)?;
        let of = serde_json::from_value(record.config.clone());
        let CheckpointOf { function, config, execs, own_volumes, .. } =
            of.map_err(|error| unusable(name, error))?;
        let service = self.services.route(function.as_str()).ok_or_else(|| {
            unusable(name, format!("its function `{function}` is not served; build that again"))
        })?;
        // The memory of one tenant must not serve the clients of another.
        let domain = service.tenant().name().domain().map(|domain| domain.name().clone());
        if record.owner != domain {
            let reason =
                format!("`{function}` is in another sharing domain by now; restore it there");
            return Err(unusable(name, reason));
        }
        if !own_volumes.is_empty() && config.volumes.len() != service.config().volumes.len() {
            let reason = format!(
                "it has volumes of its own, and `{function}` has another number of volumes by now"
            );
            return Err(unusable(name, reason));
        }
        // What it may use and reach is what its function may now.
        let FunctionConfig { limits, egress, secrets: now, .. } = service.config().clone();
        let mut config = FunctionConfig { limits, egress, ..config };
        config.secrets.names.retain(|name| now.names.contains(name));
        Ok(Found { record, function, config, service, execs, own_volumes })
    }

    /// The same of the version of its function that has its files, with the limits of that. Where
    /// there is none, or where it is another tenant's, nothing changes.
    fn of_its_files(self: &Arc<Self>, found: Found) -> Found {
        let index = found.record.index;
        if found.service.launcher().index() == Some(index) {
            return found;
        }
        // The function may not go meanwhile.
        let _reloading = self.reloading.lock().expect("no holder panics");
        let service = match self.version_with_files(&found.function, index) {
            Ok(service) if Arc::ptr_eq(service.tenant(), found.service.tenant()) => service,
            _ => return found,
        };
        let limits = service.config().limits.clone();
        Found { config: FunctionConfig { limits, ..found.config }, service, ..found }
    }

    fn open_checkpoint(
        &self,
        found: Found,
        key: Option<&OwnerKey>,
    ) -> Result<OpenedCheckpoint, LoadError> {
        let Found { record, function, config, service, execs, own_volumes } = found;
        let rootfs = StoredRootfs::open(&self.store, record.index)?;
        let (image, stands_on) = self.checkpoint_image(&record, &rootfs, &service, key)?;
        let (image, pool, _) = self.with_zygotes(image).map_err(|error| match error {
            error @ LoadError::Kernel(_) => unusable(&record.name, error),
            error => error,
        })?;
        let launcher = SandboxLauncher::standing_on(
            stands_on,
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
        launcher.read_secrets_from(self.node().secrets());
        launcher.go_on_with(execs);
        Ok(OpenedCheckpoint { service, launcher: Arc::new(launcher), volumes: own_volumes })
    }

    /// The image of a checkpoint, decrypted if it is encrypted.
    fn checkpoint_image(
        &self,
        record: &CheckpointRecord,
        rootfs: &StoredRootfs,
        service: &Service,
        key: Option<&OwnerKey>,
    ) -> Result<(Image, Option<StandsOn>), LoadError> {
        let file = self.store.open_image(record.image)?;
        let head = Head::read(&file).map_err(|error| unusable(&record.name, error))?;
        let why = match (head, key) {
            (None, None) => return Ok((open_image_file(&self.store, file, rootfs)?, None)),
            (Some(head), Some(key)) if head.key() == key.id() => {
                let sealed = Sealed { file, head, name: sealed_name(record) };
                let (plain, decrypted) = sealed
                    .decrypt(key, service.tenant())
                    .map_err(|reason| unusable(&record.name, reason))?;
                let image = open_image_file(&self.store, plain, rootfs)?;
                let base = self.base_in_store(&image, record, rootfs, service)?;
                return Ok((image, Some(StandsOn { base, decrypted })));
            }
            (None, Some(_)) => "it is not encrypted; leave the key out".to_owned(),
            (Some(head), None) => {
                let (name, key) = (record.name.clone(), head.key().to_string());
                return Err(LoadError::Encrypted { name, key });
            }
            (Some(head), Some(key)) => {
                format!("it is encrypted with key {}, and this is key {}", head.key(), key.id())
            }
        };
        Err(unusable(&record.name, why))
    }

    /// The image in the store that later images of its instances differ from: the one that it
    /// differs from itself, or if it has all of its memory, that of its function.
    fn base_in_store(
        &self,
        image: &Image,
        record: &CheckpointRecord,
        rootfs: &StoredRootfs,
        service: &Service,
    ) -> Result<FreezeBase, LoadError> {
        let parent = image.ancestors().last().map(|parent| ImageId(parent.name));
        let of_function = || {
            let name = Name::new(service.name().as_str())?;
            Ok::<_, StoreError>(self.store.get_function(&name)?.image)
        };
        let id = match parent {
            Some(parent) => parent,
            None => of_function()?.ok_or_else(|| {
                unusable(&record.name, "its function has no image; build it again")
            })?,
        };
        let image = open_image_of_any_build(&self.store, id, rootfs)?;
        Ok(FreezeBase { image: Arc::new(image), name: id.0 })
    }
}

/// The encrypted image of a checkpoint.
struct Sealed {
    file: File,
    head: Head,
    /// What it is authenticated as.
    name: String,
}

impl Sealed {
    /// Its content in a file in memory for reading only, which counts in the tenant's memory.
    ///
    /// # Errors
    /// It is damaged or another one, or there is no room: one sentence for the operator.
    fn decrypt(self, key: &OwnerKey, tenant: &Tenant) -> Result<(File, Decrypted), String> {
        let Self { file, head, name } = self;
        let failed = |error: io::Error| error.to_string();
        let memory = Arc::new(tenant.keep_memory(head.plain_len(&file).map_err(failed)?)?);
        let (write, read) = memory_file().map_err(failed)?;
        head.unseal(key, &name, &file, &write).map_err(failed)?;
        Ok((read, Decrypted { memory, owner_key: Some(key.id()) }))
    }
}

fn sealed_name(record: &CheckpointRecord) -> String {
    Checkpoint::sealed_name(&record.name, record.owner.as_ref())
}

fn unusable(name: &Name, reason: impl ToString) -> LoadError {
    LoadError::Checkpoint { name: name.clone(), reason: reason.to_string() }
}
