//! Images of instances that sleep: written to a file, and booted from it.

use super::copies::Prepared;
use super::launch::{Client, Launcher, WakeError};
use super::sandboxed::{Decrypted, ImageBoots};
use crate::asleep::{AsleepImage, NewAsleep};
use crate::tenants::AsleepBytes;
use std::fs::File;
use std::sync::Arc;
use thaw_abi::control::EntryPoint;
use thaw_build::build::open_ancestor;
use thaw_sandbox::{Fit, FreezeBase, Image, ImageError, ResourceLimits, Sandbox, cpu_features};
use thaw_store::{ImageId, KernelId};

impl ImageBoots {
    /// Writes the memory of an instance of these that is at rest, and that does not go on. What it
    /// differs from lies in the store.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub fn write_asleep(
        &self,
        sandbox: &Sandbox,
        rest: EntryPoint,
        memory: u64,
        new: &NewAsleep,
    ) -> Result<AsleepImage, String> {
        let base = self.stored.clone();
        let file = new.file();
        let report =
            self.write_difference(sandbox, rest, base.clone(), file, memory, &mut || {})?;
        let bytes = self.count(new)?;
        Ok(AsleepImage {
            bytes,
            stored: report.stored,
            checksum: ImageId(report.checksum),
            index: self.rootfs.id(),
            kernel: KernelId(sandbox.kernel_build_id()),
            base,
        })
    }

    /// Counts the file among those of the tenant, if it may have it.
    fn count(&self, new: &NewAsleep) -> Result<AsleepBytes, String> {
        let (tenant, bytes) = (&self.terms.tenant, new.bytes().map_err(|error| error.to_string())?);
        if tenant.quota().store.is_none() {
            return Ok(tenant.count_asleep(bytes));
        }
        // Nobody else finds room meanwhile that is there once.
        let _turn = self.store.counting_turn().map_err(|error| error.to_string())?;
        tenant
            .check_file(&self.store, "this sleeping instance", bytes)
            .map_err(|error| error.to_string())?;
        Ok(tenant.count_asleep(bytes))
    }

    /// Boots of an instance that sleeps in a file, with what its image differs from, if that is
    /// open.
    ///
    /// # Errors
    /// See [`Launcher::waken`].
    pub fn waken(
        &self,
        file: File,
        checksum: ImageId,
        base: Option<&FreezeBase>,
        clients: Vec<Arc<Client>>,
        decrypted: Option<Decrypted>,
        limits: ResourceLimits,
    ) -> Result<Arc<dyn Launcher>, WakeError> {
        let stored = base.unwrap_or(&self.stored);
        let image = Image::open_with(file, &mut |ancestor| {
            let open = stored.ancestor(&ancestor.name);
            open.map_or_else(|| open_ancestor(&self.store, ancestor), Ok)
        });
        let image = image.and_then(|image| self.check(&image, checksum).map(|()| image))?;
        let stored = stored.clone();
        let new = Prepared { resumed: clients, decrypted, limits, rest: None };
        let launcher = self.launcher_of(image, checksum.0, stored, new);
        Ok(Arc::new(launcher.map_err(WakeError::Later)?))
    }

    /// Checks that an image is the one that was written, and fits.
    fn check(&self, image: &Image, checksum: ImageId) -> Result<(), ImageError> {
        if image.header().checksum != checksum.0 {
            return Err(ImageError::Damaged("it is another image"));
        }
        image.check_fit(&Fit {
            // Zygotes are of the build that the function's image needs.
            kernel_build: self.image.header().kernel_build,
            index_hash: *self.rootfs.id().as_bytes(),
            cpu_features: cpu_features(),
        })
    }
}

impl From<ImageError> for WakeError {
    fn from(error: ImageError) -> Self {
        match error {
            // The host may be out of descriptors or memory.
            ImageError::Read(error) => Self::Later(format!("its file cannot be read: {error}")),
            error => Self::Lost(error.to_string()),
        }
    }
}
