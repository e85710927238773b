//! Copies of a live instance.

use super::cold::ColdBoots;
use super::sandboxed::{ImageBoots, SandboxLauncher, WorkingSetState};
use super::standby::{BootPolicy, Standby};
use crate::build::about;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, RwLock};
use thaw_abi::control::EntryPoint;
use thaw_sandbox::{FreezeReport, FreezeSpec, Image, MergePolicy, Sandbox};
use thaw_store::ImageId;

impl ImageBoots {
    /// Copies the memory of an instance of these that is at rest into memory, and prepares
    /// boots from there.
    ///
    /// # Errors
    /// One sentence for the operator.
    pub fn copy(&self, sandbox: &Sandbox, rest: EntryPoint) -> Result<SandboxLauncher, String> {
        let cannot = |error: io::Error| format!("cannot keep its memory for copies ({error})");
        let file = memory_file().map_err(cannot)?;
        let report = self.write_checkpoint(sandbox, rest, &file)?;
        seal(&file).map_err(cannot)?;
        self.launcher_of(file, report.checksum.into())
    }

    /// Writes the memory of an instance of these that is at rest to `file`.
    fn write_checkpoint(
        &self,
        sandbox: &Sandbox,
        rest: EntryPoint,
        file: &File,
    ) -> Result<FreezeReport, String> {
        let terms = &self.terms;
        let spec = FreezeSpec {
            index_hash: *self.rootfs.id().as_bytes(),
            program: terms.command[0].clone(),
            arguments: terms.command.join(" "),
            about: about(terms.function.as_str()),
            max_stored: terms.limits.memory,
            merge: MergePolicy::default(),
        };
        thaw_sandbox::freeze(sandbox, rest, &spec, file).map_err(|error| error.to_string())
    }

    /// Boots of the image of an instance of these. Nothing is kept ready for them, and no
    /// working set is recorded.
    fn launcher_of(&self, file: File, image_id: ImageId) -> Result<SandboxLauncher, String> {
        let image = Image::open(file).map_err(|error| error.to_string())?;
        let rootfs = self.rootfs.clone();
        let plan = image.plan(rootfs.file(), rootfs.file_len(), rootfs.blobs());
        let plan = Arc::new(self.techniques.reduce(plan.map_err(|error| error.to_string())?));
        Ok(SandboxLauncher::from(Self {
            pool: self.pool.clone(),
            terms: self.terms.clone(),
            output: self.output.clone(),
            image: Arc::new(image),
            rootfs,
            store: self.store.clone(),
            image_id,
            ready_plan: RwLock::new(plan.clone()),
            plan: RwLock::new(plan),
            standby: Standby::new(BootPolicy::NONE),
            techniques: self.techniques,
            working_set: Mutex::new(WorkingSetState::Off),
            last_boot_ns: AtomicU64::new(0),
            cold: ColdBoots::default(),
            image_boots: AtomicU64::new(0),
            recordings_timed_out: AtomicU32::new(0),
        }))
    }
}

/// A file in memory for an image.
fn memory_file() -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    Ok(memfd_create("thaw-copy", flags)?.into())
}

/// From now on nobody changes the file: the copies map it, and each has a descriptor of it.
fn seal(file: &File) -> io::Result<()> {
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    Ok(fcntl_add_seals(file, seals)?)
}
