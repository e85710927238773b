//! Copies of a live instance: in memory, for instances that are booted at once, and in the
//! store, by a name.

use super::cold::ColdBoots;
use super::launch::{Checkpoint, Checkpointed, Client, Launcher, Unread};
use super::recording::{Recordings, WorkingSetState};
use super::sandboxed::{Decrypted, ImageBoots, SandboxLauncher};
use super::standby::{BootPolicy, Standby};
use crate::build::{about, store_kernel};
use crate::seal;
use crate::tenants::check_file;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::rand::GetRandomFlags;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, RwLock};
use thaw_abi::control::EntryPoint;
use thaw_abi::image::Ancestor;
use thaw_sandbox::{
    AncestorFile, FreezeBase, FreezeError, FreezeReport, FreezeSpec, Freezer, Image, ImageError,
    MergePolicy, ResourceLimits, Sandbox, freeze_live,
};
use thaw_store::{ImageId, NewCheckpoint, StoreError};

/// Few clean pages are stored to save mappings: what matters is how long reading takes.
const MERGE: MergePolicy = MergePolicy { clean_gap_pages: 2, zero_gap_pages: 4 };

/// The last image of an instance in the store: the next one holds what differs from it.
#[derive(Clone, Default)]
pub(super) struct LastCheckpoint(Arc<Mutex<Option<FreezeBase>>>);

impl LastCheckpoint {
    fn get(&self) -> Option<FreezeBase> {
        self.0.lock().expect("no holder panics").clone()
    }

    fn set(&self, image: FreezeBase) {
        *self.0.lock().expect("no holder panics") = Some(image);
    }
}

impl ImageBoots {
    /// Copies the memory of an instance of these, which is at rest or has a twin, into memory;
    /// calls `is_read` as soon as that has been read. What is returned prepares boots from there.
    pub fn copy(
        self: &Arc<Self>,
        freezer: &Freezer,
        rest: EntryPoint,
        limits: ResourceLimits,
        is_read: &mut dyn FnMut(),
    ) -> Result<impl FnOnce() -> Result<Arc<dyn Launcher>, String> + Send + use<>, Unread> {
        let cannot = |error: io::Error| {
            Unread::Failed(format!("cannot keep its memory for copies ({error})"))
        };
        let file = memory_file().map_err(cannot)?;
        let base = self.base();
        // A file in memory that is sealed has this in place of a checksum.
        let identity = random_bytes().map_err(cannot)?;
        let spec = self.spec(base.clone(), Some(identity), limits.memory);
        freezer.write(rest, &spec, &file, is_read).map_err(unread)?;
        seal(&file).map_err(cannot)?;
        let boots = self.clone();
        Ok(move || {
            let image = Image::open_sealed(file, &identity, &mut |named| ancestor(&base, named));
            let image = image.map_err(|error| error.to_string())?;
            let (stored, decrypted) = (boots.stored.clone(), boots.decrypted.clone());
            let launcher =
                boots.launcher_of(image, identity, stored, Vec::new(), decrypted, limits)?;
            Ok(Arc::new(launcher) as Arc<dyn Launcher>)
        })
    }

    /// Writes the memory of an instance of these, which is at rest or has a twin, to the store;
    /// calls `is_read` as soon as that has been read. What is returned encrypts the image, if it is
    /// to be, makes it durable and names it.
    ///
    /// An encrypted image differs from what its instance was booted from, and nothing differs from
    /// it: whoever has no key would need it.
    pub fn checkpoint(
        &self,
        freezer: &Freezer,
        rest: EntryPoint,
        last: &LastCheckpoint,
        new: Checkpoint,
        memory: u64,
        is_read: &mut dyn FnMut(),
    ) -> Result<impl FnOnce() -> Result<Checkpointed, String> + Send + use<>, Unread> {
        let failed = |error: StoreError| Unread::Failed(error.to_string());
        let mut session = self.store.session().map_err(failed)?;
        let file = session.new_image_file().map_err(failed)?;
        let plain = new.key.as_ref().map(|_| unsealed_file()).transpose();
        let plain = plain.map_err(|error| {
            Unread::Failed(format!("cannot keep its memory until it is encrypted ({error})"))
        })?;
        let last = if plain.is_some() { LastCheckpoint::default() } else { last.clone() };
        let base = last.get().unwrap_or_else(|| self.stored.clone());
        let spec = self.spec(base.clone(), None, memory);
        let written = plain.as_ref().unwrap_or(file.file());
        let report: FreezeReport = freezer.write(rest, &spec, written, is_read).map_err(unread)?;
        let index = self.rootfs.id();
        let (store, tenant) = (self.store.clone(), self.terms.tenant.clone());
        let build = freezer.kernel_build_id();
        let mut file = file;
        Ok(move || {
            let Checkpoint { name, owner, config, key, volumes } = new;
            if let (Some(key), Some(plain)) = (&key, &plain) {
                let name = Checkpoint::sealed_name(&name, owner.as_ref());
                seal::owner::seal(&key.key, &name, plain, file.file())
                    .map_err(|error| error.to_string())?;
            }
            // Nobody else finds room meanwhile that is there once.
            let _turn = store.counting_turn().map_err(|error| error.to_string())?;
            let bytes = file.file().metadata().map_err(|error| error.to_string())?.blocks() * 512;
            check_file(&store, &tenant, "this checkpoint", bytes)
                .map_err(|error| error.to_string())?;
            let opened = plain.map_or_else(|| file.file().try_clone(), Ok);
            let opened = opened.map_err(|error| error.to_string())?;
            let image = open_child(opened, &base)?;
            let ancestors: Vec<_> = image.ancestors().iter().map(|of| ImageId(of.name)).collect();
            let kernel = store_kernel(&mut session, build).map_err(|error| error.to_string())?;
            file.needs(kernel);
            let snapshots = volumes.as_ref().map(|volumes| volumes.snapshots());
            let store = || {
                let stored = session.commit_checkpoint_image(file, &ancestors).and_then(|id| {
                    let new = NewCheckpoint { name: name.clone(), owner, config, index, image: id };
                    session.put_checkpoint(new).map(|_| id)
                });
                stored.map_err(|error| error.to_string())
            };
            let id = match &volumes {
                Some(volumes) => volumes.keep(store).map(|(id, _)| id),
                None => store(),
            }?;
            last.set(FreezeBase { image: Arc::new(image), name: *id.as_bytes() });
            Ok(Checkpointed {
                name: name.to_string(),
                image: id.to_string(),
                ancestors: ancestors.len(),
                stored: report.stored,
                mappings: report.mappings,
                key: key.map(|key| key.key.id()),
                volumes: snapshots.unwrap_or_default(),
            })
        })
    }

    /// The image that instances of these are thawed from.
    pub fn base(&self) -> FreezeBase {
        FreezeBase { image: self.image.clone(), name: self.image_name }
    }

    /// Writes how the memory of an instance of these that is at rest differs from `base`.
    pub(super) fn write_difference(
        &self,
        sandbox: &Sandbox,
        rest: EntryPoint,
        base: FreezeBase,
        file: &File,
        memory: u64,
        is_read: &mut dyn FnMut(),
    ) -> Result<FreezeReport, String> {
        let written = freeze_live(sandbox, rest, &self.spec(base, None, memory), file, is_read);
        written.map_err(|error| error.to_string())
    }

    /// How to write what the memory of an instance of these has that `base` has not. It may have
    /// `memory` bytes.
    fn spec(&self, base: FreezeBase, identity: Option<[u8; 32]>, memory: u64) -> FreezeSpec {
        let terms = &self.terms;
        FreezeSpec {
            index_hash: *self.rootfs.id().as_bytes(),
            program: terms.command.first().map_or("init", String::as_str).to_owned(),
            arguments: terms.command.join(" "),
            about: about(terms.function.as_str()),
            max_stored: memory,
            merge: MERGE,
            base: Some(base),
            identity,
        }
    }

    /// Boots of an image of an instance of these, whose nearest image in the store is `stored`; the
    /// first of them has these clients again. `decrypted` is what goes with the image.
    /// Nothing is kept ready for them, and no working set is recorded. They get these limits.
    pub(super) fn launcher_of(
        &self,
        image: Image,
        name: [u8; 32],
        stored: FreezeBase,
        resumed: Vec<Arc<Client>>,
        decrypted: Option<Decrypted>,
        limits: ResourceLimits,
    ) -> Result<SandboxLauncher, String> {
        let rootfs = self.rootfs.clone();
        let plan = image.plan(rootfs.file(), rootfs.file_len(), rootfs.blobs());
        let plan = Arc::new(self.techniques.reduce(plan.map_err(|error| error.to_string())?));
        Ok(SandboxLauncher::from(Self {
            pool: self.pool.clone(),
            terms: self.terms.clone().limited_to(limits),
            output: self.output.clone(),
            image: Arc::new(image),
            image_name: name,
            stored,
            rootfs,
            store: self.store.clone(),
            image_id: self.image_id,
            ready_plan: RwLock::new(plan.clone()),
            plan: RwLock::new(plan),
            standby: Standby::new(BootPolicy::NONE),
            techniques: self.techniques,
            working_set: Mutex::new(WorkingSetState::Off),
            last_boot_ns: AtomicU64::new(0),
            cold: ColdBoots::default(),
            image_boots: AtomicU64::new(0),
            recordings: Recordings::default(),
            resumed: Mutex::new(resumed),
            decrypted,
        }))
    }
}

/// Opens an image that holds how something differs from `base`.
fn open_child(file: File, base: &FreezeBase) -> Result<Image, String> {
    let image = Image::open_with(file, &mut |named| ancestor(base, named));
    image.map_err(|error| error.to_string())
}

/// An image that one refers to which holds how something differs from `base`.
fn ancestor(base: &FreezeBase, named: &Ancestor) -> Result<AncestorFile, ImageError> {
    base.ancestor(&named.name).ok_or_else(|| ImageError::NoAncestor {
        depth: named.depth,
        why: "it is none of those that the image was made from".to_owned(),
    })
}

/// Why the memory of an instance was not read.
fn unread(error: FreezeError) -> Unread {
    let why = error.to_string();
    match error {
        // The memory of a process that is ending can be forbidden before the process has ended.
        FreezeError::SandboxEnded | FreezeError::Memory(_) => Unread::Ended(why),
        _ => Unread::Failed(why),
    }
}

/// Bytes that nobody has had before.
fn random_bytes() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    // So few come at once (getrandom(2)).
    rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(bytes)
}

/// A file in memory for an image that is to be encrypted.
fn unsealed_file() -> io::Result<File> {
    seal::memory_file().map(|(write, _)| write)
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
