//! Pulling whatever a reference names: a container image, or a frozen function.

use super::ArtifactError;
use super::accept::{Accepted, accept, has_files};
use super::pieces::Pieces;
use super::policy::{Decision, Facts, KnownKernel, Refreeze, decide};
use super::receive::{self, ReceivedFiles};
use crate::build::{
    BuildEvent, BuildOptions, freeze_pulled, open_image_of_any_build, store_pulled,
};
use crate::container::{self, Awaited, Fetched, ImageProgress, StoredImage};
use std::cell::RefCell;
use thaw_home::config::DomainName;
use thaw_home::function::{BuiltFunction, FunctionError, Origin, StoredFunction};
use thaw_home::home::Home;
use thaw_home::rootfs::StoredRootfs;
use thaw_oci::artifact::Section;
use thaw_oci::{FunctionPull, Limits, Offer, PulledFunction, Reference, UnpackReport};
use thaw_sandbox::{Kernel, WeakLimits, WorkingSet, missing_here};
use thaw_store::{Activation, ImageId, KernelId, Name, Session, Store, StoreError};

/// How to pull.
#[derive(Clone, Debug, Default)]
pub struct PullOptions {
    /// A name of one's own for what is pulled.
    pub name: Option<Name>,
    /// The sharing domain of a function, whatever it says.
    pub domain: Option<DomainName>,
    /// When a function is frozen anew.
    pub refreeze: Refreeze,
    /// Whether a function that nobody has signed may have outgoing connections.
    pub allow_egress: bool,
    /// Whether to freeze on a host that does not enforce the function's limits.
    pub weak_limits: WeakLimits,
    /// What it may take.
    pub limits: Limits,
    /// Whether requests of a function go to what is pulled.
    pub activation: Activation,
}

/// What happens during a pull.
#[derive(Clone, Debug)]
pub enum PullEvent<'a> {
    /// Something is downloaded or unpacked.
    Progress(ImageProgress),
    /// A function is being frozen anew.
    Build(BuildEvent<'a>),
    /// Something that may matter.
    Note(&'a str),
}

/// Receives the events of a pull.
pub type OnEvent<'a> = dyn FnMut(PullEvent<'_>) + 'a;

/// What was pulled.
#[derive(Debug)]
pub enum Pulled {
    /// A container image.
    Image(Box<StoredImage>, UnpackReport),
    /// A function.
    Function(Box<Installed>),
}

/// A function that was pulled and stored.
#[derive(Debug)]
pub struct Installed {
    /// The function as it is stored.
    pub function: BuiltFunction,
    /// Whether requests go to this version.
    pub is_active: bool,
    /// Digest of its manifest.
    pub digest: String,
    /// Whether a key has signed it that registries.toml names for its registry.
    pub is_signed: bool,
    /// Bytes of its pieces, compressed.
    pub bytes: u64,
    /// Bytes that were moved.
    pub moved: u64,
    /// Why it was frozen anew, if it was.
    pub refrozen: Option<String>,
}

/// Pulls what a reference names and stores it.
///
/// # Errors
/// It cannot be had, is not what it should be, or may not be stored; nothing is stored then.
pub fn pull(
    home: &Home,
    reference: &Reference,
    options: &PullOptions,
    on_event: &mut OnEvent<'_>,
) -> Result<Pulled, ArtifactError> {
    let store = Store::open(&home.store())?;
    let mut offered =
        Offered { home, store: &store, reference, options, chosen: None, pieces: None };
    let pulled = fetch(home, reference, options, &mut offered, on_event);
    let Offered { chosen, pieces, .. } = offered;
    let stored = pulled.and_then(|fetched| match fetched {
        Fetched::Image(image) => {
            let name = options.name.clone().unwrap_or_else(|| reference.store_name());
            let progress = &mut |progress| on_event(PullEvent::Progress(progress));
            let (image, report) = image.unpack(&store, &name, options.limits, progress)?;
            Ok(Pulled::Image(Box::new(image), report))
        }
        Fetched::Function(pulled) => {
            let (accepted, decision) = chosen.expect("whoever pulls a function has chosen");
            let install = Install { home, reference, store: &store, options, pulled: &pulled };
            let installed = install.run(accepted, decision, on_event);
            if installed.as_ref().is_err_and(ArtifactError::is_refusal)
                && let Ok(_acting) = home.act()
            {
                pulled.forget();
            }
            Ok(Pulled::Function(Box::new(installed?)))
        }
    });
    // Whatever became of it: nobody fills the disk with pieces of what is refused.
    if let Some(pieces) = pieces {
        pieces.prune(home);
    }
    stored
}

/// Downloads what a reference names.
fn fetch(
    home: &Home,
    reference: &Reference,
    options: &PullOptions,
    offered: &mut Offered<'_>,
    on_event: &mut OnEvent<'_>,
) -> Result<Fetched, ArtifactError> {
    let path = Pieces::path(home, options.domain.as_ref());
    let on_event = RefCell::new(on_event);
    let say = |progress| (on_event.borrow_mut())(PullEvent::Progress(progress));
    let mut choose = |offer: &Offer<'_>| offered.choose(offer, &say);
    let function = FunctionPull { pieces: &path, choose: &mut choose };
    let progress = &mut |progress| say(progress);
    Ok(container::fetch(home, reference, options.limits, Some(function), progress)?)
}

/// What becomes of a function that a registry offers.
struct Offered<'a> {
    home: &'a Home,
    store: &'a Store,
    reference: &'a Reference,
    options: &'a PullOptions,
    chosen: Option<(Accepted, Decision)>,
    /// Nobody else uses its pieces.
    pieces: Option<Pieces>,
}

impl Offered<'_> {
    /// Decides what to take of it, and keeps others from its pieces.
    fn choose(
        &mut self,
        offer: &Offer<'_>,
        say: &dyn Fn(ImageProgress),
    ) -> Result<Vec<Section>, String> {
        let sections = self.decide(offer)?;
        // A mirror may have offered it before.
        if self.pieces.is_none() {
            let on_wait = || say(ImageProgress::Waiting(Awaited::SamePieces));
            let pieces = Pieces::open(self.home, self.options.domain.as_ref(), on_wait);
            self.pieces = Some(pieces.map_err(|error| error.to_string())?);
        }
        Ok(sections)
    }

    fn decide(&mut self, offer: &Offer<'_>) -> Result<Vec<Section>, String> {
        let accepted = accept(offer, self.options)?;
        if self.options.name.is_none() {
            self.check_replaces_its_own(&accepted.function)?;
        }
        let decision = decide(self.options.refreeze, &facts(self.store, offer))?;
        if let Decision::Freeze(why) = &decision {
            if has_files(&accepted.function) {
                return Err(format!(
                    "{why}, and the function cannot be frozen anew, since bodies of its training requests are \
                     files, which do not come along; build it here"
                ));
            }
            let baseline = accepted.function.cpu_baseline.check();
            baseline.map_err(|error| format!("the function cannot be frozen anew: {error}"))?;
        }
        let sections = decision.sections();
        self.chosen = Some((accepted, decision));
        Ok(sections)
    }

    /// The name is whoever's who has pushed the function: it takes the place of none but an earlier
    /// version from the same repository.
    fn check_replaces_its_own(&self, function: &StoredFunction) -> Result<(), String> {
        let name = function.config.name.as_str();
        let present = match BuiltFunction::read(self.store, name) {
            Ok(present) => present.function,
            Err(FunctionError::Store(StoreError::NotFound { .. })) => return Ok(()),
            Err(error) => return Err(error.to_string()),
        };
        let from = present.origin.and_then(|origin| origin.reference.parse::<Reference>().ok());
        let is_its_own = from.is_some_and(|from| from.repository() == self.reference.repository())
            && present.config.sharing.domain == function.config.sharing.domain;
        match is_its_own {
            true => Ok(()),
            false => Err(format!(
                "there is a function `{name}` already, which was not pulled from there into this \
                 sharing domain; give --name {name} to replace it, or another name"
            )),
        }
    }
}

/// What is known here of what a function needs.
fn facts(store: &Store, offer: &Offer<'_>) -> Facts {
    let image = &offer.document.image;
    let kernel = match known_kernel(store, image.kernel) {
        KnownKernel::Absent if offer.document.kernel.is_some() => KnownKernel::Offered,
        known => known,
    };
    let lacking = missing_here(&image.cpu_features);
    Facts { kernel, is_signed: offer.is_signed, lacking }
}

pub(super) fn known_kernel(store: &Store, id: KernelId) -> KnownKernel {
    if thaw_home::debug::kernel().is_ok_and(|present| present.build_id() == id.0) {
        return KnownKernel::Usable;
    }
    match store.kernel(id) {
        Err(_) => KnownKernel::Absent,
        Ok(elf) => match Kernel::of_build(elf, id.0) {
            Ok(_) => KnownKernel::Usable,
            Err(error) => KnownKernel::Unusable(error.to_string()),
        },
    }
}

/// A pull of a function whose pieces somebody else fetches.
pub(super) struct Prepared<'a>(Offered<'a>);

impl<'a> Prepared<'a> {
    pub fn new(
        home: &'a Home,
        store: &'a Store,
        reference: &'a Reference,
        options: &'a PullOptions,
    ) -> Self {
        Self(Offered { home, store, reference, options, chosen: None, pieces: None })
    }

    /// One of which an earlier pull has decided what to take.
    pub fn decided(
        home: &'a Home,
        store: &'a Store,
        (reference, options): (&'a Reference, &'a PullOptions),
        chosen: (Accepted, Decision),
    ) -> Self {
        let chosen = Some(chosen);
        Self(Offered { home, store, reference, options, chosen, pieces: None })
    }

    /// Decides what to take of it, as every pull does. Others may pull meanwhile.
    pub fn choose(&mut self, offer: &Offer<'_>) -> Result<Vec<Section>, String> {
        self.0.decide(offer)
    }

    /// What was decided.
    pub fn chosen(&self) -> Option<(&Accepted, &Decision)> {
        self.0.chosen.as_ref().map(|(accepted, decision)| (accepted, decision))
    }

    /// Verifies and stores the function, whose pieces are all here.
    pub fn install(
        &self,
        pulled: &PulledFunction,
        on_event: &mut OnEvent<'_>,
    ) -> Result<Installed, ArtifactError> {
        let Offered { home, store, reference, options, chosen, .. } = &self.0;
        let (accepted, decision) = chosen.clone().expect("it was chosen before");
        Install { home, reference, store, options, pulled }.run(accepted, decision, on_event)
    }
}

/// Storing a function whose pieces are here.
struct Install<'a> {
    home: &'a Home,
    reference: &'a Reference,
    store: &'a Store,
    options: &'a PullOptions,
    pulled: &'a PulledFunction,
}

impl Install<'_> {
    fn run(
        &self,
        accepted: Accepted,
        decision: Decision,
        on_event: &mut OnEvent<'_>,
    ) -> Result<Installed, ArtifactError> {
        let Accepted { mut function, notes } = accepted;
        function.origin = Some(Origin {
            reference: self.reference.to_string(),
            digest: self.pulled.digest.clone(),
            is_signed: self.pulled.is_signed,
        });
        for note in &notes {
            on_event(PullEvent::Note(note));
        }
        let mut session = self.store.session()?;
        let most = usize::try_from(self.options.limits.entries).unwrap_or(usize::MAX);
        let files = receive::files(&mut session, self.pulled, &function.config, most)?;
        let ((function, is_active), refrozen) = match decision {
            Decision::Image { with_kernel } => {
                (self.with_image(&mut session, function, &files, with_kernel)?, None)
            }
            Decision::Freeze(why) => {
                on_event(PullEvent::Note(&format!(
                    "the function is frozen anew on this machine: {why}"
                )));
                (self.frozen_anew(&mut session, function, &files, on_event)?, Some(why))
            }
        };
        let PulledFunction { digest, is_signed, bytes, moved, .. } = self.pulled;
        let (digest, is_signed) = (digest.clone(), *is_signed);
        let (bytes, moved) = (*bytes, *moved);
        Ok(Installed { function, is_active, digest, is_signed, bytes, moved, refrozen })
    }

    fn with_image(
        &self,
        session: &mut Session,
        function: StoredFunction,
        files: &ReceivedFiles,
        with_kernel: bool,
    ) -> Result<(BuiltFunction, bool), ArtifactError> {
        let build = self.pulled.document.image.kernel;
        let offered = with_kernel.then(|| receive::kernel(self.pulled)).transpose()?;
        if let Some(kernel) = &offered {
            // It is the one that its name says, and this program can talk to it.
            Kernel::of_build(kernel.elf().to_vec(), build.0)?;
        }
        let mut image = receive::image(session, self.pulled, files)?;
        // All of it is verified. From here on it is published.
        let index = session.put_foreign_index(&files.index)?;
        match &offered {
            Some(kernel) => session.put_kernel(kernel.elf())?,
            None => crate::build::store_kernel(session, build.0)?,
        };
        image.needs(build);
        let id = session.commit_image(image)?;
        self.put_working_set(session, id)?;
        self.check_boot(session, id, index)?;
        Ok(store_pulled(self.home, session, function, index, id, self.options.activation)?)
    }

    /// Stores what requests touch where it was pushed, so that the first boot here is not slower. It
    /// is a hint: one that fits no longer, since the image was renamed, is left out.
    fn put_working_set(&self, session: &Session, id: ImageId) -> Result<(), ArtifactError> {
        let Some(bytes) = receive::working_set(self.pulled)? else { return Ok(()) };
        let set = WorkingSet::from_bytes(&bytes)
            .map_err(|error| ArtifactError::refused(format!("of its working set, {error}")))?;
        let image = thaw_sandbox::Image::open(session.open_image(id)?)?;
        if set.image_checksum() == image.header().checksum {
            session.put_working_set(id, &bytes)?;
        }
        Ok(())
    }

    /// What cannot be booted must not be stored as a function.
    fn check_boot(
        &self,
        session: &Session,
        id: ImageId,
        index: thaw_store::IndexId,
    ) -> Result<(), ArtifactError> {
        let rootfs = StoredRootfs::open(session, index)?;
        let image = open_image_of_any_build(session, id, &rootfs)?;
        image.plan(rootfs.file(), rootfs.file_len(), rootfs.blobs())?;
        Ok(())
    }

    fn frozen_anew(
        &self,
        session: &mut Session,
        function: StoredFunction,
        files: &ReceivedFiles,
        on_event: &mut OnEvent<'_>,
    ) -> Result<(BuiltFunction, bool), ArtifactError> {
        let index = session.put_foreign_index(&files.index)?;
        let options = BuildOptions {
            weak_limits: self.options.weak_limits,
            cpu_baseline: function.cpu_baseline,
            activation: self.options.activation,
            ..BuildOptions::default()
        };
        let on_event = &mut |event: BuildEvent<'_>| on_event(PullEvent::Build(event));
        let built = freeze_pulled(self.home, session, function, index, &options, on_event)?;
        Ok((built.function, built.is_active))
    }
}
