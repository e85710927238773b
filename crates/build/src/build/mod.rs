//! From a function's directory to a frozen image in the store.
//!
//! Two stages: `import` makes a root file system of the function's files and
//! what they need; `freeze` runs the program over it to its entry point (`program`),
//! lets it answer training requests (`train`) and writes the image. The second can
//! be repeated without the first, when an image no longer fits the kernel or the
//! machine.

mod absent;
mod command;
mod compare;
mod contract;
mod doubt;
mod findings;
mod freeze;
mod ignore;
mod image;
mod import;
mod installed;
#[cfg(test)]
mod java_classes;
mod linked;
mod locked;
mod npm;
mod output;
mod packages;
mod poetry;
mod program;
mod template;
mod train;

pub use command::CommandFailure;
pub use freeze::open_image_file;
pub use freeze::{FreezeFailure, Frozen};
pub use freeze::{about, freeze_instance, store_kernel};
pub use freeze::{open_ancestor, open_image, open_image_of_any_build};
pub use image::ImageFailure;
pub use import::ImportFailure;
pub use import::PACKAGES;
pub(crate) use locked::{LOCK_MAX, LockFile, Locked, PYPI_DESTINATIONS};
pub(crate) use packages::dependencies;
pub use program::Awaited;
pub use train::Training;

use import::Imported;
use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};
use template::{Files, Template};
use thaw_home::beneath;
use thaw_home::config::{
    BaselineError, CONFIG_FILE, ConfigError, CpuBaseline, DomainName, FunctionConfig, QUOTAS_FILE,
    Quotas, QuotasError,
};
use thaw_home::function::{BuiltFunction, FunctionError, StoredFunction};
use thaw_home::home::{Home, HomeError};
use thaw_home::tenants::{Planned, StoreQuotaError, check_store};
use thaw_home::volumes::VolumeStore;
use thaw_sandbox::{CoreGroup, MergePolicy, WeakLimits};
use thaw_store::{
    Activation, FunctionRecord, FunctionVersion, ImageId, IndexId, Name, NewFunction, Session,
    Store, StoreError, Version, VersionError,
};

/// What happens during a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BuildEvent<'a> {
    /// A stage begins.
    Stage(&'a str),
    /// A file was imported; numbers so far.
    Imported {
        /// Files.
        files: u64,
        /// Bytes.
        bytes: u64,
    },
    /// The program has answered a training request.
    Trained {
        /// Requests that were answered.
        done: u64,
        /// Requests in all.
        total: u64,
    },
    /// Something that may matter.
    Note(&'a str),
    /// Something that copies will not like.
    Warning(&'a str),
    /// A line that the build command or the program printed.
    Output {
        /// Who printed it.
        from: &'a str,
        /// The line.
        line: &'a str,
    },
}

/// Receives the events of a build.
pub type OnEvent<'a> = dyn FnMut(BuildEvent<'_>) + 'a;

/// Whether whoever builds a function trusts its author.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// The author's commands run in a sandbox, and of this host's files the function
    /// gets those that every user may read.
    #[default]
    Untrusted,
    /// The author's commands run on the host, and the function gets every file that it
    /// names.
    Trusted,
}

/// How to build.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// How long the program may take to its entry point; `None`: a minute, and less if it is seen
    /// that it will not come there.
    pub entry_timeout: Option<Duration>,
    /// How long it may take to answer the requests of `[train]`.
    pub training_timeout: Duration,
    /// Whether the author of the function is trusted.
    pub trust: Trust,
    /// Directories of this host that commands of a build see, besides the usual ones:
    /// absolute paths of tools.
    pub tools: Vec<PathBuf>,
    /// The sharing domain, whatever `[sharing]` says.
    pub domain: Option<DomainName>,
    /// How runs of pages are merged into mappings.
    pub merge: MergePolicy,
    /// Whether to build on a host that does not enforce the function's limits.
    pub weak_limits: WeakLimits,
    /// With whom the program may share a core; `None`: with everybody.
    pub cores: Option<CoreGroup>,
    /// What the program sees of the processor. A function that is frozen anew keeps its own.
    pub cpu_baseline: CpuBaseline,
    /// A name for the version.
    pub label: Option<Name>,
    /// Whether requests go to the version at once.
    pub activation: Activation,
    /// Whether packages of an earlier build are used again.
    pub packages: Packages,
    /// Whether two copies are compared in what they draw.
    pub comparison: Comparison,
    /// Which functions are built from a runtime template.
    pub templates: Templates,
    /// Where the function's volumes are; [`build`] knows it.
    pub volumes: Option<VolumeStore>,
    /// The program is ended soon after this is false; an image that is being written is written to its end.
    pub wanted: Option<Arc<AtomicBool>>,
}

/// Whether packages of Python or npm that an earlier build has installed are used again, if the same are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packages {
    /// They are.
    #[default]
    Kept,
    /// They are installed anew.
    Fresh,
}

/// Whether a build compares two copies of the program in what their generators of random
/// numbers draw, for which the program is started a second time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Comparison {
    /// It does, if it can.
    #[default]
    Made,
    /// It does not.
    LeftOut,
}

/// Which functions are built from a runtime template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Templates {
    /// Those whose thaw.toml names one.
    #[default]
    Named,
    /// Those, and functions that share their runtime with another one of the store.
    Shared,
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self {
            entry_timeout: None,
            training_timeout: Duration::from_secs(15 * 60),
            trust: Trust::default(),
            tools: Vec::new(),
            domain: None,
            merge: MergePolicy::default(),
            weak_limits: WeakLimits::default(),
            cores: None,
            cpu_baseline: CpuBaseline::default(),
            label: None,
            activation: Activation::default(),
            packages: Packages::default(),
            comparison: Comparison::default(),
            templates: Templates::default(),
            volumes: None,
            wanted: None,
        }
    }
}

/// What a build made.
#[derive(Clone, Debug)]
pub struct Built {
    /// The function as it is stored.
    pub function: BuiltFunction,
    /// How the program was frozen.
    pub frozen: Frozen,
    /// Whether requests go to it.
    pub is_active: bool,
}

/// Why a build failed.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The function's configuration is not usable.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The function's directory does not exist.
    #[error("{} is not a directory; name the directory that has the function's {CONFIG_FILE}", .0.display())]
    NoDirectory(PathBuf),
    /// The state directory is not usable.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The store is not usable.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A stored function is not usable.
    #[error(transparent)]
    Function(#[from] FunctionError),
    /// The files could not be imported.
    #[error(transparent)]
    Import(#[from] ImportFailure),
    /// The program could not be frozen.
    #[error(transparent)]
    Freeze(#[from] FreezeFailure),
    /// The quotas of tenants are not usable.
    #[error(transparent)]
    Quotas(#[from] QuotasError),
    /// The program cannot be held to the level that was asked for.
    #[error(transparent)]
    Baseline(#[from] BaselineError),
    /// Somebody uses what the new image would end.
    #[error(
        "{0} instances live, which a new image would end; it is tried again when there are none"
    )]
    InUse(usize),
    /// The function's tenant may not have so much in the store.
    #[error(transparent)]
    StoreQuota(#[from] StoreQuotaError),
    /// Its container image cannot be used.
    #[error(transparent)]
    Image(#[from] ImageFailure),
    /// There is no such version.
    #[error(transparent)]
    Version(#[from] VersionError),
}

/// Builds the function in `directory` and stores it.
///
/// # Errors
/// The first stage that fails; nothing is stored then.
pub fn build(
    home: &Home,
    directory: &Path,
    options: &BuildOptions,
    on_event: &mut OnEvent<'_>,
) -> Result<Built, BuildError> {
    let directory = match directory.canonicalize() {
        Ok(directory) if directory.is_dir() => directory,
        _ => return Err(BuildError::NoDirectory(directory.to_owned())),
    };
    let mut config = FunctionConfig::load(&directory)?;
    if let Some(domain) = &options.domain {
        config.sharing.domain = Some(domain.clone());
    }
    options.cpu_baseline.check()?;
    let options = &BuildOptions { volumes: Some(VolumeStore::of(home.clone())), ..options.clone() };
    let quotas = Quotas::load(&home.root().join(QUOTAS_FILE))?;
    let store = Store::open(&home.store())?;
    let base = image::resolve(home, &store, &mut config, options.trust, on_event)?;
    if options.templates == Templates::Shared {
        template::share(&store, &mut config, on_event)?;
    }
    let mut session = store.session()?;
    let imported = {
        let open = || {
            let root = Path::new("/");
            let inside = directory.strip_prefix(root).map_err(io::Error::other)?;
            beneath::open_without_links(root, inside)
        };
        let _alone = alone_in(&directory, open, on_event);
        let import = import::Import::new(home, &directory, &config, options, base)?;
        import.run(&mut session, on_event)?
    };
    let Imported { tree, mut environment, runtime, libraries } = imported;
    on_event(BuildEvent::Stage("storing files"));
    // Names of users are looked up in the files; a function over a template extends its index.
    let plain = session.put_index(&tree)?;
    image::number_user(&session, plain, &mut config)?;
    contract::complete(&mut environment, &config, plain);
    let cpu_baseline = options.cpu_baseline;
    let function = StoredFunction {
        config,
        environment,
        source: directory,
        origin: None,
        cpu_baseline,
        findings: Vec::new(),
    };
    // Nothing runs for a build that cannot be stored.
    check_store(&store, &quotas, &planned(&function.config, plain, None))?;
    let place = Place::New(&quotas);
    let files = Files { tree: &tree, runtime: runtime.as_ref(), libraries: libraries.as_ref() };
    // A copy of a template has no mounts.
    if function.config.volumes.is_empty()
        && let Some((index, template)) =
            template::of_function(&mut session, &function, files, options, on_event)?
    {
        let way = Way::Template(&template);
        match freeze_and_store(&mut session, function.clone(), index, place, way, options, on_event)
        {
            Err(BuildError::Freeze(failure)) if failure.is_of_program() => {
                on_event(BuildEvent::Note(&format!(
                    "it cannot be built from its runtime template ({failure}); it is started from \
                     nothing instead"
                )));
            }
            outcome => return outcome,
        }
    }
    freeze_and_store(&mut session, function, plain, place, Way::Start, options, on_event)
}

/// Freezes a function over files that were pulled, and stores it.
///
/// # Errors
/// It cannot be frozen, or its tenant may not have so much.
pub(crate) fn freeze_pulled(
    home: &Home,
    session: &mut Session,
    function: StoredFunction,
    index: IndexId,
    options: &BuildOptions,
    on_event: &mut OnEvent<'_>,
) -> Result<Built, BuildError> {
    let quotas = Quotas::load(&home.root().join(QUOTAS_FILE))?;
    check_store(session, &quotas, &planned(&function.config, index, None))?;
    let place = Place::New(&quotas);
    freeze_and_store(session, function, index, place, Way::Start, options, on_event)
}

/// Stores a function whose image was pulled; what was stored, and whether requests go to it.
///
/// # Errors
/// Its tenant may not have so much.
pub(crate) fn store_pulled(
    home: &Home,
    session: &mut Session,
    function: StoredFunction,
    index: IndexId,
    image: ImageId,
    activation: Activation,
) -> Result<(BuiltFunction, bool), BuildError> {
    let quotas = Quotas::load(&home.root().join(QUOTAS_FILE))?;
    let options = BuildOptions { activation, ..BuildOptions::default() };
    let config = new_version(&function, index, image)?.config;
    let record = put_new(session, &function, index, image, &quotas, &options)?;
    just_stored(&record, image, &config)
}

/// The version of a function that was stored a moment ago, and whether requests go to it.
fn just_stored(
    record: &FunctionRecord,
    image: ImageId,
    config: &serde_json::Value,
) -> Result<(BuiltFunction, bool), BuildError> {
    let is_it = |version: &Version| version.image == Some(image) && version.config == *config;
    let stored = record.versions().into_iter().rev().find(is_it).expect("it was stored");
    let is_active = stored.number == record.number;
    Ok((BuiltFunction::from_version(&record.name, stored)?, is_active))
}

/// Stores a version of a function in the place of whatever is there, if its tenant may have so much.
fn put_new(
    session: &mut Session,
    function: &StoredFunction,
    index: IndexId,
    image: ImageId,
    quotas: &Quotas,
    options: &BuildOptions,
) -> Result<FunctionRecord, BuildError> {
    let _turn = session.counting_turn()?;
    check_store(session, quotas, &planned(&function.config, index, Some(image)))?;
    let new = new_version(function, index, image)?;
    Ok(session.put_version(new, options.label.clone(), options.activation)?)
}

fn new_version(
    function: &StoredFunction,
    index: IndexId,
    image: ImageId,
) -> Result<NewFunction, StoreError> {
    let name = Name::new(function.config.name.as_str())?;
    let config = serde_json::to_value(function).expect("a function is plain data");
    Ok(NewFunction { name, config, index, image: Some(image) })
}

fn planned(config: &FunctionConfig, index: IndexId, image: Option<ImageId>) -> Planned<'_> {
    let (name, domain) = (config.name.as_str(), config.sharing.domain.as_ref());
    Planned { name, domain, index, image }
}

/// Waits until no other build runs commands in `directory`: what one writes there
/// the other would import half done. The directory is free again when the file that
/// holds the lock, flock(2), is closed. A file system without such locks is built
/// from all the same.
fn alone_in(
    directory: &Path,
    open: impl FnOnce() -> io::Result<File>,
    on_event: &mut OnEvent<'_>,
) -> Option<File> {
    let locked = open().and_then(|file| match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            on_event(BuildEvent::Stage("waiting for another build of this directory"));
            file.lock().map(|()| file)
        }
        Err(TryLockError::Error(error)) => Err(error),
    });
    match locked {
        Ok(file) => Some(file),
        Err(error) => {
            on_event(BuildEvent::Note(&format!(
                "{} cannot be locked ({error}): another build of it must not run now",
                directory.display()
            )));
            None
        }
    }
}

/// Freezes a version of a stored function anew, over the files of its build. `may_replace` is asked when
/// the new image is there, which may be minutes later, and before it is the version's.
///
/// # Errors
/// The version is not in the store, cannot be frozen, was frozen anew meanwhile, or
/// `may_replace` refuses; the image that is there stays.
pub fn refreeze(
    store: &Store,
    name: &str,
    version: u32,
    options: &BuildOptions,
    may_replace: &dyn Fn() -> Result<(), BuildError>,
    on_event: &mut OnEvent<'_>,
) -> Result<Built, BuildError> {
    let record = store.get_function(&Name::new(name).map_err(StoreError::from)?)?;
    let number = record.find(&version.to_string())?;
    let found = record.versions().into_iter().find(|found| found.number == number);
    let found = found.expect("it was found");
    let version = FunctionVersion::from(&found);
    let old = BuiltFunction::from_version(&record.name, found)?;
    let mut session = store.session()?;
    let place = Place::Of(&version, may_replace);
    // From nothing, since a template would give it the addresses that its images had before.
    freeze_and_store(&mut session, old.function, old.index, place, Way::Start, options, on_event)
}

/// Freezes a stored function another way, for measuring: its own image stays,
/// and the new one is garbage as soon as nobody uses it.
///
/// # Errors
/// It cannot be frozen.
pub fn freeze_aside(
    store: &Store,
    function: &BuiltFunction,
    options: &BuildOptions,
) -> Result<BuiltFunction, BuildError> {
    let mut session = store.session()?;
    let (index, stored) = (function.index, &function.function);
    let way = Way::Start;
    let (image, _) = freeze::freeze(&mut session, stored, index, way, options, &mut |_| {})?;
    Ok(BuiltFunction { image, ..function.clone() })
}

/// Where a version of a function goes.
#[derive(Clone, Copy)]
enum Place<'a> {
    /// In the place of whatever is there, if the tenant may have so much.
    New(&'a Quotas),
    /// In the place of this version and no other. Its owner has not asked for it, so no
    /// quota refuses it. The function is asked first whether it may.
    Of(&'a FunctionVersion, &'a dyn Fn() -> Result<(), BuildError>),
}

/// What a program begins as.
#[derive(Clone, Copy)]
enum Way<'a> {
    /// It is started.
    Start,
    /// It is given to a copy of a runtime template.
    Template(&'a Template),
}

/// Freezes a function and stores it.
fn freeze_and_store(
    session: &mut Session,
    mut function: StoredFunction,
    index: IndexId,
    place: Place<'_>,
    way: Way<'_>,
    options: &BuildOptions,
    on_event: &mut OnEvent<'_>,
) -> Result<Built, BuildError> {
    let since = SystemTime::now();
    let is_compared = matches!(place, Place::New(_)) && options.comparison == Comparison::Made;
    let compared =
        if is_compared { compare::begin(session, &function, (index, way), options) } else { None };
    let (image, mut frozen) = freeze::freeze(session, &function, index, way, options, on_event)?;
    match place {
        Place::New(_) if is_compared => {
            let found = match compared {
                Some(begun) => begun.end(&function, &frozen, on_event),
                None => {
                    compare::compare(session, &function, (index, way), &frozen, options, on_event)
                }
            };
            frozen.findings.extend(found);
            frozen.findings.extend(compare::generators_of_go(session, &function, index));
            let times = compare::times_of_go(session, &function, (index, image), since);
            frozen.findings.extend(times);
            let dates = compare::dates_of_node(&function, &frozen);
            frozen.findings.extend(dates);
            frozen.findings.extend(compare::clock_of_erlang(session, image));
        }
        // It is the same program that was looked at when it was built.
        Place::New(_) | Place::Of(..) => {
            let old = function.findings.iter().filter(|old| old.is_of_program());
            frozen.findings.extend(old.cloned());
        }
    }
    function.findings.clone_from(&frozen.findings);
    on_event(BuildEvent::Stage("recording the version"));
    let config = new_version(&function, index, image)?.config;
    let record = match place {
        Place::Of(old, may_replace) => {
            may_replace()?;
            session.replace_function(old, new_version(&function, index, image)?)?
        }
        Place::New(quotas) => put_new(session, &function, index, image, quotas, options)?,
    };
    let (function, is_active) = just_stored(&record, image, &config)?;
    Ok(Built { function, frozen, is_active })
}
