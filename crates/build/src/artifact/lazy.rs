//! Pulling a function that is served before all of it is here (docs/decisions/0035).

use super::ArtifactError;
use super::accept::Accepted;
use super::fetcher::{Fetched, Fetcher, SECTIONS};
use super::pieces::{self, Pieces};
use super::place::{Place, failed, write};
use super::policy::{Decision, KnownKernel};
use super::pull::{
    Installed, OnEvent, Prepared, PullEvent, PullOptions, Pulled, known_kernel, pull,
};
use super::written::Written;
use crate::build::BuildError;
use crate::container::ImageProgress;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thaw_home::config::{DomainName, QUOTAS_FILE, Quotas};
use thaw_home::function::{Origin, StoredFunction};
use thaw_home::home::Home;
use thaw_home::partial::{
    PartialFunction, PartialRecord, PieceSource, Rows, hash_of_run, is_partial, length_of, parts,
};
use thaw_home::tenants::check_partial;
use thaw_oci::artifact::{FunctionDocument, Section, unpacked, unpacked_run};
use thaw_oci::{
    Limits, Offer, PieceName, Pull, PullProgress, PulledFunction, Reference, Registries,
    RemoteFunction, check_piece,
};
use thaw_sandbox::Kernel;
use thaw_store::{ForeignIndex, Store, StoreError};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;

/// How often it is said how far the pull is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// How long it is waited for another pull that uses the pieces.
const PIECES_PATIENCE: Duration = Duration::from_secs(5);

/// Is told when something is to be served from now on: the partial function, and then the whole one.
pub type OnServed<'a> = dyn FnMut(&StoredFunction, Part) + 'a;

/// How much of a function is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// What a boot needs.
    Run,
    /// All of it.
    Whole,
}

/// Pulls a function as [`pull`] does, and has it served as soon as what a boot needs is here. What
/// cannot be pulled so is pulled as ever, with a note.
///
/// # Errors
/// As for [`pull`]. If the registry is lost in the middle, the function is left as it is: it boots,
/// and the same pull goes on.
pub fn pull_lazily(
    home: &Home,
    reference: &Reference,
    options: &PullOptions,
    on_event: &mut OnEvent<'_>,
    (on_served, listening): (&mut OnServed<'_>, Option<OwnedFd>),
) -> Result<Pulled, ArtifactError> {
    let store = Store::open(&home.store())?;
    let runtime = runtime()?;
    let registries = Registries::read(&home.registries())?;
    let asked = Pull {
        reference,
        registries: &registries,
        directory: home.root(),
        owner: home.owner()?,
        limits: options.limits,
    };
    let remote = runtime.block_on(asked.find_function())?;
    let whole = |why: &str, on_event: &mut OnEvent<'_>| {
        on_event(PullEvent::Note(&format!("it is served when all of it is here: {why}")));
        pull(home, reference, options, on_event)
    };
    let Some(remote) = remote else { return whole("it is a container image", on_event) };
    let offer = Offer { document: &remote.document, is_signed: remote.is_signed };
    let mut prepared = Prepared::new(home, &store, reference, options);
    let sections = prepared.choose(&offer).map_err(thaw_oci::OciError::Refused)?;
    let Some((accepted, Decision::Image { with_kernel })) = prepared.chosen() else {
        return whole("its image cannot be used here", on_event);
    };
    if remote.document.run.is_none() || remote.document.pieces.is_none() {
        return whole("it was pushed without what is needed for that", on_event);
    }
    let (mut function, with_kernel) = (accepted.function.clone(), *with_kernel);
    function.origin = Some(origin(reference, &remote));
    let remote = Arc::new(remote);
    // From here on nothing else is looked for.
    thaw_oci::credentials::forget();
    let domain = options.domain.as_ref();
    let lazy = Lazy { home, store: &store, runtime: &runtime, remote: &remote, domain };
    let name = function.config.name.as_str();
    let place = Place::take(home, name)?;
    let files_max = options.limits.entries;
    let begun = lazy.begin(&place, &function, (with_kernel, files_max, listening));
    let served = begun.inspect_err(|_| {
        // What an earlier pull has left is of use still, if it was not touched.
        if !is_partial(&home.partial(), name) {
            place.remove(home);
        }
    })?;
    let installed = lazy.finish((&place, served), (&prepared, &sections), on_event, on_served)?;
    Ok(Pulled::Function(Box::new(installed)))
}

/// Goes on with a function of which only a part is here, as the pull would have that has begun it: what
/// is here is not asked for again.
///
/// # Errors
/// It is being pulled by somebody else, the registry is lost, or what it sends is refused.
pub fn go_on(
    home: &Home,
    name: &str,
    on_event: &mut OnEvent<'_>,
    (on_served, listening): (&mut OnServed<'_>, Option<OwnedFd>),
) -> Result<Installed, ArtifactError> {
    let store = Store::open(&home.store())?;
    let runtime = runtime()?;
    if !is_partial(&home.partial(), name) {
        return Err(ArtifactError::refused("nothing of it is here to go on with"));
    }
    let place = Place::take(home, name)?;
    let partial = PartialFunction::open(&place.path).map_err(ArtifactError::refused)?;
    let record = &partial.record;
    let (origin, reference) = came_from(record)?;
    let manifest = place.path.join(parts::MANIFEST);
    let manifest = fs::read(&manifest)
        .map_err(|_| ArtifactError::refused("its manifest is missing; pull it again"))?;
    let registries = Registries::read(&home.registries())?;
    let options = PullOptions {
        domain: record.function.config.sharing.domain.clone(),
        limits: Limits { entries: record.from.files_max, ..Limits::default() },
        ..PullOptions::default()
    };
    let asked = Pull {
        reference: &reference,
        registries: &registries,
        directory: home.root(),
        owner: home.owner()?,
        limits: options.limits,
    };
    let known = (record.document.clone(), record.digest.clone(), origin.is_signed);
    let remote = Arc::new(asked.known_function(&record.from.host, manifest, known)?);
    thaw_oci::credentials::forget();
    let accepted = Accepted { function: record.function.clone(), notes: Vec::new() };
    let decision = Decision::Image { with_kernel: record.has_kernel };
    let sections = decision.sections();
    let prepared = Prepared::decided(home, &store, (&reference, &options), (accepted, decision));
    let domain = options.domain.as_ref();
    let lazy = Lazy { home, store: &store, runtime: &runtime, remote: &remote, domain };
    let listener = {
        let _acting = home.act()?;
        place.listen(listening)?
    };
    let served = lazy.fetch(&place, partial, listener)?;
    lazy.finish((&place, served), (&prepared, &sections), on_event, on_served)
}

/// From where a partial function was pulled.
fn came_from(record: &PartialRecord) -> Result<(Origin, Reference), ArtifactError> {
    let unknown = || ArtifactError::refused("nobody knows where it came from; pull it again");
    let origin = record.function.origin.clone().ok_or_else(unknown)?;
    let reference = origin.reference.parse().map_err(|_| unknown())?;
    Ok((origin, reference))
}

/// Removes what a pull has left of a function that did not come to its end; whether there was
/// something.
///
/// # Errors
/// It is being pulled.
pub fn remove_partial(home: &Home, function: &str) -> Result<bool, ArtifactError> {
    if !is_partial(&home.partial(), function) {
        return Ok(false);
    }
    Place::take(home, function)?.remove(home);
    Ok(true)
}

fn origin(reference: &Reference, remote: &RemoteFunction) -> Origin {
    let (reference, digest) = (reference.to_string(), remote.digest.clone());
    Origin { reference, digest, is_signed: remote.is_signed }
}

/// A thread of its own: pieces come while this one waits for a daemon, or stores the function.
fn runtime() -> Result<Runtime, ArtifactError> {
    let built = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    built.map_err(|error| StoreError::Source(error).into())
}

/// One pull.
struct Lazy<'a> {
    home: &'a Home,
    store: &'a Store,
    runtime: &'a Runtime,
    remote: &'a Arc<RemoteFunction>,
    domain: Option<&'a DomainName>,
}

/// What is being fetched.
struct Served {
    fetched: Arc<Fetched>,
    whole: tokio::sync::oneshot::Receiver<Result<(), String>>,
    of: u64,
    /// When the pull was begun, in milliseconds since 1970.
    created_ms: u64,
}

impl Lazy<'_> {
    /// Gets what a boot needs, and begins to fetch the rest.
    fn begin(
        &self,
        place: &Place,
        function: &StoredFunction,
        (with_kernel, files_max, listening): (bool, u64, Option<OwnedFd>),
    ) -> Result<Served, ArtifactError> {
        let document = &self.remote.document;
        self.check_quota(function)?;
        let directory = Pieces::make(self.home, self.domain)?;
        let kernel = with_kernel.then(|| self.kernel(&directory)).transpose()?;
        let run = Run::of(document, self.run()?)?;
        let most = usize::try_from(files_max).unwrap_or(usize::MAX);
        ForeignIndex::parse(&run.index, most)
            .map_err(|error| ArtifactError::refused(format!("of its index, {error}")))?;
        let _acting = self.home.act()?;
        place.empty()?;
        let listener = place.listen(listening)?;
        let hash = hash_of_run(&run.index, &run.head, &run.working_set, &run.pages);
        run.write(&place.path, document.image.size)?;
        write(&place.path.join(parts::MANIFEST), &self.remote.manifest_bytes)?;
        if let Some(kernel) = &kernel {
            write(&place.path.join(parts::KERNEL), kernel)?;
        }
        let created_ms = SystemTime::now().duration_since(UNIX_EPOCH);
        let created_ms = created_ms.map_or(0, |since| since.as_millis() as u64);
        let digest = self.remote.digest.clone();
        let (function, document_here) = (function.clone(), document.clone());
        let about = (hash, kernel.is_some());
        let from = PieceSource { host: self.remote.host().to_owned(), files_max };
        let record = PartialRecord::new(function, document_here, digest, created_ms, about, from);
        // Keeps the collector out until it finds the record, too.
        let _session = self.store.session()?;
        if !with_kernel && known_kernel(self.store, document.image.kernel) != KnownKernel::Usable {
            let reason = "the kernel build that it needs was removed meanwhile; pull it again";
            return Err(ArtifactError::refused(reason));
        }
        let new = place.path.join("record.new");
        write(&new, &record.to_bytes().0)?;
        // As a daemon reads it: what makes no sense is refused before one may find it.
        let partial = PartialFunction::open_as(&place.path, "record.new");
        let partial = partial.map_err(ArtifactError::refused)?;
        let named = place.path.join(parts::RECORD);
        fs::rename(&new, &named).map_err(failed("write", &named))?;
        self.fetch(place, partial, listener)
    }

    /// Whether its tenant may have all of it: nothing of it is moved before that.
    fn check_quota(&self, function: &StoredFunction) -> Result<(), ArtifactError> {
        let quotas = self.home.root().join(QUOTAS_FILE);
        let quotas = Quotas::load(&quotas).map_err(BuildError::from)?;
        let named = (function.config.name.as_str(), self.domain);
        let checked = check_partial(self.store, &quotas, named, length_of(&self.remote.document));
        Ok(checked.map_err(BuildError::from)?)
    }

    /// Begins to fetch what is missing of a function that can be booted.
    fn fetch(
        &self,
        place: &Place,
        partial: PartialFunction,
        listener: std::os::unix::net::UnixListener,
    ) -> Result<Served, ArtifactError> {
        let document = &self.remote.document;
        let created_ms = partial.record.created_ms;
        let PartialFunction { rows, layout, blobs, hash: record, .. } = partial;
        let directory = Pieces::make(self.home, self.domain)?;
        let segments = layout.segments().to_vec();
        let places = (place.path.clone(), directory, self.home.owner()?);
        let written = Written::new(places, blobs.into_iter(), &document.index.naming, segments);
        let written = written.map_err(ArtifactError::refused)?;
        let pieces = self.names(&rows)?;
        let of = pieces.iter().map(|piece| piece.size).sum();
        let fetched = Arc::new(Fetched::default());
        let remote = self.remote.clone();
        let (say, whole) = tokio::sync::oneshot::channel();
        let guard = self.runtime.enter();
        let listener =
            UnixListener::from_std(listener).map_err(failed("listen in", &place.path))?;
        let fetcher = Fetcher {
            remote,
            rows: rows.into(),
            pieces: pieces.into(),
            written: written.into(),
            listener,
            record,
            fetched: fetched.clone(),
        };
        self.runtime.spawn(fetcher.run(say));
        drop(guard);
        Ok(Served { fetched, whole, of, created_ms })
    }

    /// Waits until all is here, stores the function, and has it served in place of its part.
    fn finish(
        &self,
        (place, served): (&Place, Served),
        (prepared, sections): (&Prepared<'_>, &[Section]),
        on_event: &mut OnEvent<'_>,
        on_served: &mut OnServed<'_>,
    ) -> Result<Installed, ArtifactError> {
        let (accepted, _) = prepared.chosen().expect("it was chosen before");
        on_served(&accepted.function, Part::Run);
        let created_ms = served.created_ms;
        let of = served.of + self.length_of_others(sections)?;
        let mut last = self.wait(served, of, on_event)?;
        self.check_newest(accepted.function.config.name.as_str(), created_ms)?;
        self.complete(sections)?;
        last.bytes = of;
        on_event(PullEvent::Progress(ImageProgress::Pulling(last)));
        // One that pulls all of another function may use the pieces for as long as its registry likes. It
        // then prunes them. A piece that it prunes before that is fetched by the next try.
        let pieces = Pieces::open_within(self.home, self.domain, PIECES_PATIENCE)?;
        let pulled = self.pulled(sections, last.moved)?;
        let installed = prepared.install(&pulled, on_event);
        // The next try needs what is here, if there is one.
        let is_over = installed.as_ref().map_or_else(ArtifactError::is_refusal, |_| true);
        if let Some(pieces) = pieces.filter(|_| is_over) {
            pieces.prune(self.home);
        }
        let installed = installed?;
        self.end(place)?;
        on_served(&installed.function.function, Part::Whole);
        place.remove(self.home);
        Ok(installed)
    }

    /// Refuses what would take the place of a version that was stored since the pull was begun.
    fn check_newest(&self, name: &str, created_ms: u64) -> Result<(), ArtifactError> {
        let records = self.store.list_functions()?.records;
        let stored = records.iter().find(|record| record.name.as_str() == name);
        let versions = stored.map(|record| record.versions()).unwrap_or_default();
        if versions.iter().any(|version| version.created_ms >= created_ms) {
            let reason = "another version of it was stored meanwhile; pull it again";
            return Err(ArtifactError::refused(reason));
        }
        Ok(())
    }

    /// The names of all pieces of image and files.
    fn names(&self, rows: &Rows) -> Result<Vec<PieceName>, ArtifactError> {
        let mut names = Vec::new();
        for section in SECTIONS {
            let pieces = self.remote.pieces(section)?;
            if pieces.len() != rows.count(section) {
                return Err(ArtifactError::refused("its document counts its pieces wrong"));
            }
            names.extend(pieces);
        }
        Ok(names)
    }

    /// What a boot needs, in one request.
    fn run(&self) -> Result<Vec<u8>, ArtifactError> {
        let pieces = self.remote.pieces(Section::Run)?;
        let Some(piece) = pieces.first() else {
            return Err(ArtifactError::refused("it has no run, of which its document tells"));
        };
        let packed = self.runtime.block_on(self.remote.fetch(Section::Run, piece))?;
        let len = Run::len(&self.remote.document)
            .ok_or_else(|| ArtifactError::refused("the size of its run is impossible"))?;
        unpacked_run(&packed[..], len).map_err(ArtifactError::refused)
    }

    /// The kernel build, which is run only if somebody has signed it whom the operator trusts.
    fn kernel(&self, directory: &Path) -> Result<Vec<u8>, ArtifactError> {
        let mut elf = Vec::new();
        for piece in self.remote.pieces(Section::Kernel)? {
            let packed = match fs::read(directory.join(&piece.hex)) {
                Ok(bytes) if check_piece(&piece, &bytes).is_ok() => bytes,
                _ => self.runtime.block_on(self.remote.fetch(Section::Kernel, &piece))?,
            };
            elf.extend(unpacked(&packed[..]).map_err(ArtifactError::refused)?);
            if elf.len() as u64 > thaw_store::KERNEL_MAX {
                return Err(ArtifactError::refused("its kernel build is longer than 64 MiB"));
            }
        }
        Kernel::of_build(elf.clone(), self.remote.document.image.kernel.0)?;
        Ok(elf)
    }

    /// Bytes of the pieces that nobody may touch before all is here.
    fn length_of_others(&self, sections: &[Section]) -> Result<u64, ArtifactError> {
        let others = sections.iter().filter(|section| !SECTIONS.contains(section));
        let pieces = others.map(|&section| self.remote.pieces(section));
        let pieces = pieces.collect::<Result<Vec<_>, _>>()?;
        Ok(pieces.concat().iter().map(|piece| piece.size).sum())
    }

    /// Waits until all is here that somebody may touch before that, `of` bytes with the rest; how far the
    /// pull is then.
    fn wait(
        &self,
        served: Served,
        of: u64,
        on_event: &mut OnEvent<'_>,
    ) -> Result<PullProgress, ArtifactError> {
        let Served { fetched, mut whole, .. } = served;
        loop {
            let outcome = self
                .runtime
                .block_on(async { tokio::time::timeout(PROGRESS_INTERVAL, &mut whole).await });
            let (bytes, moved) =
                (fetched.here.load(Ordering::Relaxed), fetched.moved.load(Ordering::Relaxed));
            let failed = fetched.failed.load(Ordering::Relaxed);
            let progress = PullProgress { bytes, of, moved, failed };
            on_event(PullEvent::Progress(ImageProgress::Pulling(progress)));
            match outcome {
                Err(_) => {}
                Ok(Ok(Ok(()))) => return Ok(progress),
                Ok(Ok(Err(why))) => return Err(self.unpulled(&why)),
                Ok(Err(_)) => return Err(self.unpulled("whoever fetched it has ended")),
            }
        }
    }

    fn unpulled(&self, why: &str) -> ArtifactError {
        let name = self.remote.document.name.to_string();
        let reason = format!("{why}; run the same command again, it goes on where it ended");
        ArtifactError::Unpulled { name, reason }
    }

    /// Fetches the pieces that nobody may touch before all is here, and those that others have removed
    /// meanwhile, or that are damaged.
    fn complete(&self, sections: &[Section]) -> Result<(), ArtifactError> {
        let directory = Pieces::path(self.home, self.domain);
        for &section in sections {
            for piece in self.remote.pieces(section)? {
                if !self.has(&directory, &piece)? {
                    let bytes = self.runtime.block_on(self.remote.fetch(section, &piece))?;
                    let _acting = self.home.act()?;
                    let path = directory.join(&piece.hex);
                    pieces::keep(&directory, &piece, &bytes).map_err(failed("write", &path))?;
                }
            }
        }
        Ok(())
    }

    /// Whether a piece is here and whole, which counts as used.
    fn has(&self, directory: &Path, piece: &PieceName) -> Result<bool, ArtifactError> {
        let _acting = self.home.act()?;
        Ok(pieces::is_intact(directory, piece))
    }

    /// The function as a pull has it.
    fn pulled(&self, sections: &[Section], moved: u64) -> Result<PulledFunction, ArtifactError> {
        let _acting = self.home.act()?;
        let directory = Pieces::path(self.home, self.domain);
        let pulled = self.remote.pulled(sections, &directory, moved)?;
        pulled.ok_or_else(|| self.unpulled("a piece of it was removed"))
    }

    /// A daemon takes the whole function from now on.
    fn end(&self, place: &Place) -> Result<(), ArtifactError> {
        let _acting = self.home.act()?;
        let record = place.path.join(parts::RECORD);
        fs::remove_file(&record).map_err(failed("remove", &record))
    }
}

/// What a boot needs.
struct Run {
    working_set: Vec<u8>,
    index: Vec<u8>,
    head: Vec<u8>,
    pages: Vec<u8>,
}

impl Run {
    /// Bytes of it; `None`: it has none, or more than there are.
    fn len(document: &FunctionDocument) -> Option<u64> {
        let run = document.run.as_ref()?;
        let sizes = [document.index.size, run.head, run.pages];
        sizes.into_iter().try_fold(run.working_set, u64::checked_add)
    }

    fn of(document: &FunctionDocument, mut bytes: Vec<u8>) -> Result<Self, ArtifactError> {
        let run = document.run.as_ref().ok_or_else(|| ArtifactError::refused("it has no run"))?;
        let mut take = |len: u64| {
            let rest = bytes.split_off((len as usize).min(bytes.len()));
            std::mem::replace(&mut bytes, rest)
        };
        Ok(Self {
            working_set: take(run.working_set),
            index: take(document.index.size),
            head: take(run.head),
            pages: take(run.pages),
        })
    }

    fn write(&self, directory: &Path, image_len: u64) -> Result<(), ArtifactError> {
        write(&directory.join(parts::WORKING_SET), &self.working_set)?;
        write(&directory.join(parts::INDEX), &self.index)?;
        write(&directory.join(parts::PREFETCH), &self.pages)?;
        let path = directory.join(parts::IMAGE);
        let file = File::create(&path).map_err(failed("write", &path))?;
        let written = file.write_all_at(&self.head, 0).and_then(|()| file.set_len(image_len));
        written.map_err(failed("write", &path))
    }
}
