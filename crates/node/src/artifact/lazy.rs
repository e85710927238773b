//! Pulling a function that is served before all of it is here (docs/decisions/0035).

use super::ArtifactError;
use super::fetcher::{Fetched, Fetcher, SECTIONS};
use super::pieces::Pieces;
use super::policy::{Decision, KnownKernel};
use super::pull::{OnEvent, Prepared, PullEvent, PullOptions, Pulled, known_kernel, pull};
use super::written::Written;
use crate::container::ImageProgress;
use crate::function::{Origin, StoredFunction};
use crate::home::Home;
use crate::partial::{PartialRecord, Rows, hash_of_run, is_partial, parts};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thaw_oci::artifact::{FunctionDocument, Section, unpacked, unpacked_run};
use thaw_oci::{
    Offer, PieceName, Pull, PullProgress, PulledFunction, Reference, Registries, RemoteFunction,
    check_piece, has_piece, piece_directory,
};
use thaw_sandbox::Kernel;
use thaw_store::{ForeignIndex, Store, StoreError};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;

/// How often it is said how far the pull is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Is told when something is to be served from now on: the partial function, and then the whole one.
pub type OnServed<'a> = dyn FnMut(&StoredFunction, Part) + 'a;

/// How much of a function is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    on_served: &mut OnServed<'_>,
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
    let lazy = Lazy { home, store: &store, runtime: &runtime, remote: &remote, options };
    let place = Place::take(home, function.config.name.as_str())?;
    let served = lazy.begin(&place, &function, with_kernel).inspect_err(|_| {
        // What an earlier pull has left is of use still, if it was not touched.
        if !is_partial(&home.partial(), function.config.name.as_str()) {
            place.remove(home);
        }
    })?;
    on_served(&function, Part::Run);
    let moved = lazy.wait(served, on_event)?;
    let pulled = lazy.pulled(&sections, moved)?;
    let installed = prepared.install(&pulled, on_event)?;
    lazy.end(&place)?;
    on_served(&installed.function.function, Part::Whole);
    place.remove(home);
    Ok(Pulled::Function(Box::new(installed)))
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
    options: &'a PullOptions,
}

/// The directory of a partial function, which nobody else uses.
struct Place {
    path: PathBuf,
    _lock: File,
}

impl Place {
    /// Takes a function's directory. Nobody may be fetching it.
    fn take(home: &Home, name: &str) -> Result<Self, ArtifactError> {
        let path = home.partial_of(name)?;
        let _acting = home.act()?;
        let lock = path.join(parts::LOCK);
        let opened = File::options().create(true).append(true).open(&lock);
        let file = opened.map_err(failed("open", &lock))?;
        if file.try_lock().is_err() {
            let reason = "it is being pulled already; wait for that".to_owned();
            return Err(ArtifactError::Unpulled { name: name.to_owned(), reason });
        }
        Ok(Self { path, _lock: file })
    }

    fn remove(&self, home: &Home) {
        if let Ok(_acting) = home.act() {
            // What cannot be removed now is when the function is pulled the next time.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// What is being fetched.
struct Served {
    fetched: Arc<Fetched>,
    whole: tokio::sync::oneshot::Receiver<Result<(), String>>,
    of: u64,
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ArtifactError {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::StorageFull => StoreError::NoSpace { path }.into(),
        _ => StoreError::Io { action, path, source }.into(),
    }
}

impl Lazy<'_> {
    /// Gets what a boot needs, and begins to fetch the rest.
    fn begin(
        &self,
        place: &Place,
        function: &StoredFunction,
        with_kernel: bool,
    ) -> Result<Served, ArtifactError> {
        let document = &self.remote.document;
        let directory = Pieces::path(self.home, self.options.domain.as_ref());
        let directory = piece_directory(&directory, self.home.owner()?)?;
        let kernel = with_kernel.then(|| self.kernel(&directory)).transpose()?;
        let run = Run::of(document, self.run()?)?;
        let index = ForeignIndex::parse(&run.index, self.entries_max())
            .map_err(|error| ArtifactError::refused(format!("of its index, {error}")))?;
        let _acting = self.home.act()?;
        let listener = place.begin()?;
        let hash = hash_of_run(&run.index, &run.head, &run.working_set, &run.pages);
        run.write(&place.path, document.image.size)?;
        if let Some(kernel) = &kernel {
            write(&place.path.join(parts::KERNEL), kernel)?;
        }
        let image =
            File::open(place.path.join(parts::IMAGE)).map_err(failed("open", &place.path))?;
        let parsed = crate::partial::parse(document, image, &run.index, &run.working_set);
        let parsed = parsed.map_err(ArtifactError::refused)?;
        let created_ms = SystemTime::now().duration_since(UNIX_EPOCH);
        let created_ms = created_ms.map_or(0, |since| since.as_millis() as u64);
        let digest = self.remote.digest.clone();
        let (function, document_here) = (function.clone(), document.clone());
        let about = (hash, kernel.is_some());
        let record = PartialRecord::new(function, document_here, digest, created_ms, about);
        let (bytes, record) = record.to_bytes();
        let segments = parsed.layout.segments().to_vec();
        let places = (place.path.clone(), directory.clone(), self.home.owner()?);
        let written = Written::new(places, index.blobs(), &document.index.naming, segments);
        let written = written.map_err(ArtifactError::refused)?;
        // Keeps the collector out until it finds the record, too.
        let _session = self.store.session()?;
        if !with_kernel && known_kernel(self.store, document.image.kernel) != KnownKernel::Usable {
            let reason = "the kernel build that it needs was removed meanwhile; pull it again";
            return Err(ArtifactError::refused(reason));
        }
        // From here on a daemon may find it.
        let new = place.path.join("record.new");
        write(&new, &bytes)?;
        let named = place.path.join(parts::RECORD);
        fs::rename(&new, &named).map_err(failed("write", &named))?;
        let rows = parsed.rows;
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
            rows,
            pieces,
            written,
            directory,
            listener,
            record,
            fetched: fetched.clone(),
        };
        self.runtime.spawn(fetcher.run(say));
        drop(guard);
        Ok(Served { fetched, whole, of })
    }

    fn entries_max(&self) -> usize {
        usize::try_from(self.options.limits.entries).unwrap_or(usize::MAX)
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

    /// Waits until all is here; how many bytes were moved.
    fn wait(&self, served: Served, on_event: &mut OnEvent<'_>) -> Result<u64, ArtifactError> {
        let Served { fetched, mut whole, of } = served;
        loop {
            let outcome = self
                .runtime
                .block_on(async { tokio::time::timeout(PROGRESS_INTERVAL, &mut whole).await });
            let (bytes, moved) =
                (fetched.here.load(Ordering::Relaxed), fetched.moved.load(Ordering::Relaxed));
            let progress = PullProgress { bytes, of, moved };
            on_event(PullEvent::Progress(ImageProgress::Pulling(progress)));
            match outcome {
                Err(_) => {}
                Ok(Ok(Ok(()))) => return Ok(moved),
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

    /// The function as a pull has it. A piece that others have removed meanwhile is fetched again.
    fn pulled(&self, sections: &[Section], moved: u64) -> Result<PulledFunction, ArtifactError> {
        let directory = Pieces::path(self.home, self.options.domain.as_ref());
        for &section in sections {
            for piece in self.remote.pieces(section)? {
                if !has_piece(&directory, &piece) {
                    let bytes = self.runtime.block_on(self.remote.fetch(section, &piece))?;
                    let _acting = self.home.act()?;
                    write(&directory.join(&piece.hex), &bytes)?;
                }
            }
        }
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

impl Place {
    /// Removes what an earlier pull has left, and listens.
    fn begin(&self) -> Result<std::os::unix::net::UnixListener, ArtifactError> {
        let path = |name: &str| self.path.join(name);
        // First: whoever reads the directory now sees by it that the rest is about to change.
        let record = path(parts::RECORD);
        match fs::remove_file(&record) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed.map_err(failed("remove", &record))?,
        }
        let entries = fs::read_dir(&self.path).map_err(failed("read", &self.path))?;
        for entry in entries.flatten().filter(|entry| entry.file_name() != parts::LOCK) {
            let (path, is_directory) = (entry.path(), entry.path().is_dir());
            let removed =
                if is_directory { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(failed("remove", &path))?;
        }
        let contents = path(parts::CONTENTS);
        fs::create_dir(&contents).map_err(failed("make", &contents))?;
        let socket = path(parts::SOCKET);
        let listener = std::os::unix::net::UnixListener::bind(&socket);
        let listener = listener.map_err(failed("listen at", &socket))?;
        listener.set_nonblocking(true).map_err(failed("listen at", &socket))?;
        Ok(listener)
    }
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), ArtifactError> {
    fs::write(path, bytes).map_err(failed("write", path))
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
