//! Copies of a live instance: in memory, for instances that are booted at once, and in the
//! store, by a name.

use super::launch::{Client, Launcher};
use super::live::{Checkpoint, Checkpointed, ReadingStep, Unread};
use super::sandboxed::{Decrypted, ImageBoots, SandboxLauncher};
use rustix::fs::{SealFlags, fcntl_add_seals};
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex};
use thaw_abi::control::EntryPoint;
use thaw_abi::image::{Ancestor, Mapping};
use thaw_build::build::{about, store_kernel};
use thaw_home::seal;
use thaw_sandbox::{
    AncestorFile, FreezeBase, FreezeError, FreezeReport, FreezeSpec, Freezer, Image, ImageError,
    MergePolicy, PostCopy, ResourceLimits, Sandbox, Step, freeze_live, kernel_build_id,
};
use thaw_store::{ImageId, NewCheckpoint, StoreError};

/// Few clean pages are stored to save mappings: what matters is how long reading takes.
const MERGE: MergePolicy = MergePolicy { clean_gap_pages: 2, zero_gap_pages: 4 };

/// What boots of the image of an instance have besides that.
pub(super) struct Prepared {
    /// Clients that the first of them has again.
    pub resumed: Vec<Arc<Client>>,
    /// What goes with the image.
    pub decrypted: Option<Decrypted>,
    /// What each of them gets.
    pub limits: ResourceLimits,
    /// What they wait for, if the image is still being written.
    pub rest: Option<Arc<PostCopy>>,
}

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
    /// Copies the memory of an instance of these, which is at rest or has a twin, into memory, and
    /// says how far it is. What is returned prepares boots from there.
    ///
    /// If a twin is read that has several processes, boots begin when the memory of the first one is
    /// there ([`ReadingStep::Usable`]); what the others have goes on being copied meanwhile.
    pub fn copy(
        self: &Arc<Self>,
        freezer: &Freezer,
        rest: EntryPoint,
        limits: ResourceLimits,
        on_step: &mut dyn FnMut(ReadingStep<Arc<dyn Launcher>>),
    ) -> Result<impl FnOnce() -> Result<Arc<dyn Launcher>, String> + Send + use<>, Unread> {
        let cannot = |error: io::Error| {
            Unread::Failed(format!("cannot keep its memory for copies ({error})"))
        };
        let (write, file) = seal::sealable_memory_file().map_err(cannot)?;
        let base = self.base();
        // A file in memory that is sealed has this in place of a checksum.
        let identity = random_bytes().map_err(cannot)?;
        // Kernels of other builds may not know how to wait for the rest.
        let post_copy = rest.process != 0 && freezer.kernel_build_id() == kernel_build_id();
        let spec = FreezeSpec {
            identity: Some(identity),
            post_copy,
            ..self.spec(base.clone(), limits.memory)
        };
        let new = NewCopies { boots: self, base: &base, file: &file, identity, limits };
        let mut early = None;
        let written = freezer.write(rest, &spec, &write, &mut |step| match step {
            Step::Read => on_step(ReadingStep::Read),
            // If it cannot be opened now, whoever opens the whole image hears why.
            Step::FirstWritten => early = new.early().ok().inspect(|early| on_step(early.usable())),
        });
        written.map_err(unread)?;
        seal(&write).map_err(cannot)?;
        let early = early.map(|early| early.complete(&new)).transpose().map_err(Unread::Failed)?;
        let boots = self.clone();
        Ok(move || match early {
            Some(launcher) => Ok(launcher),
            None => NewCopies { boots: &boots, base: &base, file: &file, identity, limits }.whole(),
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
        let spec = self.spec(base.clone(), memory);
        let written = plain.as_ref().unwrap_or(file.file());
        let written = freezer.write(rest, &spec, written, &mut when_read(is_read));
        let report: FreezeReport = written.map_err(|error| match error {
            FreezeError::Write(error) if plain.is_none() => {
                Unread::Failed(file.unwritten(error).to_string())
            }
            error => unread(error),
        })?;
        let index = self.rootfs.id();
        let (store, tenant) = (self.store.clone(), self.terms.tenant.clone());
        let build = freezer.kernel_build_id();
        let mut file = file;
        Ok(move || {
            let Checkpoint { name, owner, config, key, volumes } = new;
            if let (Some(key), Some(plain)) = (&key, &plain) {
                let name = Checkpoint::sealed_name(&name, owner.as_ref());
                seal::owner::seal(&key.key, &name, plain, file.file())
                    .map_err(|error| file.unwritten(error).to_string())?;
            }
            // Nobody else finds room meanwhile that is there once.
            let _turn = store.counting_turn().map_err(|error| error.to_string())?;
            let bytes = file.file().metadata().map_err(|error| error.to_string())?.blocks() * 512;
            tenant
                .check_file(&store, "this checkpoint", bytes)
                .map_err(|error| error.to_string())?;
            let opened = plain.map_or_else(|| file.file().try_clone(), Ok);
            let opened = opened.map_err(|error| error.to_string())?;
            let image = open_child(opened, &base)?;
            let ancestors: Vec<_> = image.ancestors().iter().map(|of| ImageId(of.name)).collect();
            let kernel = store_kernel(&mut session, build).map_err(|error| error.to_string())?;
            file.needs(kernel);
            let snapshots = volumes.as_ref().map(|volumes| volumes.snapshots());
            let images = store.clone();
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
            // The next one differs from this one. What is open is not collected, also if its record
            // goes; nobody collects anything meanwhile.
            let held = images.open_image(id).map_err(|error| error.to_string());
            match held.and_then(|held| open_child(held, &base)) {
                Ok(image) => last.set(FreezeBase { image: Arc::new(image), name: *id.as_bytes() }),
                Err(why) => {
                    tracing::warn!(%name, "the next checkpoint differs from an earlier one: {why}")
                }
            }
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
        let written =
            freeze_live(sandbox, rest, &self.spec(base, memory), file, &mut when_read(is_read));
        written.map_err(|error| error.to_string())
    }

    /// How to write what the memory of an instance of these has that `base` has not. It may have
    /// `memory` bytes.
    fn spec(&self, base: FreezeBase, memory: u64) -> FreezeSpec {
        let terms = &self.terms;
        FreezeSpec {
            index_hash: *self.rootfs.id().as_bytes(),
            program: terms.command.first().map_or("init", String::as_str).to_owned(),
            arguments: terms.command.join(" "),
            about: about(terms.function.as_str()),
            max_stored: memory,
            merge: MERGE,
            base: Some(base),
            identity: None,
            post_copy: false,
        }
    }

    /// Boots of an image of an instance of these, whose nearest image in the store is `stored`.
    /// Nothing is kept ready for them, and no working set is recorded.
    pub(super) fn launcher_of(
        &self,
        image: Image,
        name: [u8; 32],
        stored: FreezeBase,
        new: Prepared,
    ) -> Result<SandboxLauncher, String> {
        let Prepared { resumed, decrypted, limits, rest } = new;
        let rootfs = &self.rootfs;
        let plan = image.plan(rootfs.file(), rootfs.file_len(), rootfs.blobs());
        let plan = self.techniques.reduce(plan.map_err(|error| error.to_string())?);
        let plan = Arc::new(match rest {
            Some(rest) => plan.post_copy(rest),
            None => plan,
        });
        let terms = self.terms.clone().limited_to(limits);
        let mut new = self.of_plan(Arc::new(image), name, stored, (plan, terms, decrypted));
        new.resumed = Mutex::new(resumed);
        Ok(SandboxLauncher::from(new))
    }
}

/// A file in memory that becomes the image of copies of an instance.
struct NewCopies<'a> {
    boots: &'a Arc<ImageBoots>,
    /// The image that it differs from.
    base: &'a FreezeBase,
    /// Open for reading only: copies have it from there before it is sealed.
    file: &'a File,
    identity: [u8; 32],
    limits: ResourceLimits,
}

impl NewCopies<'_> {
    /// Opens the image, of which the part that is looked at does not change any more.
    fn open(&self) -> Result<Image, String> {
        self.open_as(self.clone_file()?)
    }

    fn clone_file(&self) -> Result<File, String> {
        self.file.try_clone().map_err(|error| error.to_string())
    }

    fn open_as(&self, file: File) -> Result<Image, String> {
        let find = &mut |named: &Ancestor| ancestor(self.base, named);
        Image::open_sealed(file, &self.identity, find).map_err(|error| error.to_string())
    }

    /// Boots of the image, which is whole and sealed.
    fn whole(&self) -> Result<Arc<dyn Launcher>, String> {
        Ok(Arc::new(self.launcher_of(self.open()?, None)?))
    }

    /// Boots of the image, which has only the memory of the first process so far.
    fn early(&self) -> Result<EarlyCopies, String> {
        let (rest, image) = (Arc::new(PostCopy::new()), self.open()?);
        let (mappings, again) = (image.mappings().to_vec(), self.clone_file()?);
        let launcher = Arc::new(self.launcher_of(image, Some(rest.clone()))?);
        Ok(EarlyCopies { launcher, mappings, again: Some(again), rest })
    }

    fn launcher_of(
        &self,
        image: Image,
        rest: Option<Arc<PostCopy>>,
    ) -> Result<SandboxLauncher, String> {
        let (stored, decrypted) = (self.boots.stored.clone(), self.boots.decrypted.clone());
        let new = Prepared { resumed: Vec::new(), decrypted, limits: self.limits, rest };
        self.boots.launcher_of(image, self.identity, stored, new)
    }
}

/// Boots of an image whose memory is not all there. If this is dropped before it is, those that were
/// booted end.
struct EarlyCopies {
    launcher: Arc<SandboxLauncher>,
    /// What the image said of its memory.
    mappings: Vec<Mapping>,
    /// To look at that once more; there may be no room for another descriptor then.
    again: Option<File>,
    rest: Arc<PostCopy>,
}

impl EarlyCopies {
    fn usable(&self) -> ReadingStep<Arc<dyn Launcher>> {
        ReadingStep::Usable(self.launcher.clone())
    }

    /// The image is sealed, with all of its memory. Nobody may have changed what it says since it was
    /// opened.
    fn complete(mut self, image: &NewCopies<'_>) -> Result<Arc<dyn Launcher>, String> {
        let again = self.again.take().map(|file| image.open_as(file)).transpose()?;
        if again.is_none_or(|again| again.mappings() != self.mappings) {
            return Err("the image of its copies has changed while it was written".to_owned());
        }
        self.rest.complete();
        Ok(self.launcher.clone())
    }
}

impl Drop for EarlyCopies {
    fn drop(&mut self) {
        self.rest.fail();
    }
}

/// Hears of the only step of an image that is not thawed while it is written.
fn when_read(is_read: &mut dyn FnMut()) -> impl FnMut(Step) {
    move |step| {
        if step == Step::Read {
            is_read();
        }
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

/// From now on nobody changes the file: the copies map it, and each has a descriptor of it.
fn seal(file: &File) -> io::Result<()> {
    /// How often it is tried while pages of it are in use, for which the host waits some 100 ms each
    /// time: copies that run take page faults for them.
    const TRIES: u32 = 20;
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let mut sealed = fcntl_add_seals(file, seals);
    for _ in 1..TRIES {
        if sealed != Err(Errno::BUSY) {
            break;
        }
        sealed = fcntl_add_seals(file, seals);
    }
    Ok(sealed?)
}
