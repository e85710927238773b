//! Volumes that sandboxes have beside those of their functions: they are opened before a sandbox is
//! booted, mounted in it when it runs, and open again for its copies and when it wakes.

use super::Service;
use crate::instance::Launcher;
use crate::remote::files::FileProblem;
use crate::remote::volumes::{OwnVolumes, SandboxVolume, WantedVolumes, configs};
use std::sync::Arc;
use std::time::Duration;
use thaw_abi::bind::{MOUNT_VOLUME, MOUNT_VOLUME_WRITABLE};
use thaw_home::volumes::MayUse;
use thaw_store::Name;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// How long all volumes of a sandbox may take to be mounted in it.
const MOUNT_PATIENCE: Duration = Duration::from_secs(30);

/// What boots instances that have volumes of their own.
pub(super) struct Mounting {
    pub launcher: Arc<dyn Launcher>,
    /// Their volumes, open.
    pub own: OwnVolumes,
    /// The number of the mount of the first of them.
    first: u32,
}

impl Service {
    /// What boots instances with these volumes, besides what a launcher boots them with.
    ///
    /// # Errors
    /// One sentence for the operator: one is not there, may not be used, or cannot be mounted.
    pub(super) async fn mounting(
        self: &Arc<Self>,
        launcher: Arc<dyn Launcher>,
        wanted: &WantedVolumes,
    ) -> Result<Mounting, String> {
        let own = wanted.all();
        if own.is_empty() {
            return Ok(Mounting { launcher, own: OwnVolumes::default(), first: 0 });
        }
        let (service, granted) = (self.clone(), wanted.granted.clone());
        let opened = spawn_blocking(move || {
            let (function, domain) = (service.name(), service.config.sharing.domain.as_ref());
            let may_use = MayUse::Those { function, domain, granted: &granted };
            let own = service.open_volumes(own, &may_use)?;
            let (launcher, first) =
                launcher.mounting(&own.kept).map_err(|error| error.to_string())?;
            Ok(Mounting { launcher, own, first })
        });
        opened.await.map_err(|error| error.to_string())?
    }

    /// What boots an instance again that has volumes of its own, if it has some. Blocks.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub(super) fn with_own_volumes(
        &self,
        launcher: Arc<dyn Launcher>,
        id: u64,
        own: OwnVolumes,
    ) -> Result<Arc<dyn Launcher>, String> {
        if own.volumes.is_empty() {
            return Ok(launcher);
        }
        let OwnVolumes { kept, .. } = self.open_again(own)?;
        let (launcher, _) = launcher.mounting(&kept).map_err(|error| error.to_string())?;
        self.shared.own_volumes().keep(id, kept);
        Ok(launcher)
    }

    /// Opens volumes of an instance that is asleep, so that nobody removes them. Blocks.
    pub(crate) fn keep_own_volumes(&self, id: u64) {
        let own = self.shared.own_volumes().all_of(id);
        match self.open_again(own) {
            Ok(OwnVolumes { kept, .. }) => self.shared.own_volumes().keep(id, kept),
            // Who wakes it hears why, and that may be late.
            Err(why) => {
                let why = thaw_sandbox::escape(why.as_bytes());
                tracing::warn!(function = %self.name(), instance = id, "an instance that is asleep cannot wake without its volumes: {why}");
            }
        }
    }

    /// Opens the volumes that an instance had; others may have their names by now.
    fn open_again(&self, own: OwnVolumes) -> Result<OwnVolumes, String> {
        let (function, domain) = (self.name(), self.config.sharing.domain.as_ref());
        let may_use = MayUse::Same { function, domain, identities: &own.identities };
        self.open_volumes(own.volumes, &may_use)
    }

    fn open_volumes(
        &self,
        own: Vec<SandboxVolume>,
        may_use: &MayUse<'_>,
    ) -> Result<OwnVolumes, String> {
        let wanted = configs(&own, &self.config.volumes)?;
        let opened = self.shared.volumes()?.of_sandbox(&wanted, may_use, self.tenant.volumes());
        Ok(OwnVolumes::opened(own, opened.map_err(|error| error.to_string())?))
    }

    /// Mounts volumes in an instance that runs, for all of its processes.
    ///
    /// # Errors
    /// One sentence for the operator; some may be mounted.
    pub(super) async fn mount_own(
        self: &Arc<Self>,
        id: u64,
        mounting: &Mounting,
        wanted: &WantedVolumes,
    ) -> Result<(), String> {
        if wanted.new.is_empty() {
            return Ok(());
        }
        let mounted = timeout(MOUNT_PATIENCE, self.mount_all(id, mounting, wanted)).await;
        mounted.unwrap_or_else(|_| {
            let seconds = MOUNT_PATIENCE.as_secs();
            Err(format!("its volumes were not mounted within {seconds} s; try again"))
        })
    }

    async fn mount_all(
        self: &Arc<Self>,
        id: u64,
        mounting: &Mounting,
        wanted: &WantedVolumes,
    ) -> Result<(), String> {
        let mut session = self.files(id, "").await?;
        let numbered = (mounting.first..).zip(&mounting.own.volumes).skip(wanted.mounted.len());
        for (number, volume) in numbered {
            let kind = if volume.read_only { MOUNT_VOLUME } else { MOUNT_VOLUME_WRITABLE };
            let mounted = session.mount(&volume.path, number, kind).await;
            mounted.map_err(|problem| {
                let why = match problem {
                    FileProblem::Refused(libc::ENOSYS, _) => {
                        "its function was frozen by an older Thaw; build it again".to_owned()
                    }
                    problem => problem.to_string(),
                };
                format!("volume `{}` cannot be mounted in the sandbox: {why}", volume.name)
            })?;
        }
        Ok(())
    }

    /// The names of the volumes that an instance has, of its function and its own.
    pub(super) fn volumes_of(&self, id: u64) -> Vec<(Name, bool)> {
        let of_function = self.config.volumes.iter();
        let mut all: Vec<_> =
            of_function.map(|volume| (volume.name.clone(), volume.read_only)).collect();
        for own in self.shared.own_volumes().of(id) {
            all.extend(Name::new(&own.name).ok().map(|name| (name, own.read_only)));
        }
        all
    }
}
