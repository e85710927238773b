//! The second stage of a build: running the program to its entry point and
//! writing the image.

use super::findings::{of_losses, of_written};
use super::program::{Awaited, Program};
use super::train::{Course, Training};
use super::{BuildError, BuildEvent, BuildOptions, OnEvent, Way};
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use thaw_abi::control::EntryPoint;
use thaw_abi::image::Ancestor;
use thaw_home::config::{ByteSize, FreezeAt};
use thaw_home::function::Finding;
use thaw_home::function::{BuiltFunction, StoredFunction};
use thaw_home::rootfs::StoredRootfs;
use thaw_sandbox::{
    AncestorFile, BootError, Fit, FreezeBase, FreezeError, FreezeReport, FreezeSpec, Image,
    ImageError, KernelError, MergePolicy, PlanError, Sandbox, ZygoteError, cpu_features,
};
use thaw_store::{
    ImageId, IndexId, KernelId, Name, NewFunction, NewImage, Session, Store, StoreError,
};

/// How a program was frozen.
#[derive(Clone, Debug)]
pub struct Frozen {
    /// Time from the start of the program to its entry point.
    pub start: Duration,
    /// What was sent before it was frozen, if anything.
    pub training: Option<Training>,
    /// What the image holds.
    pub report: FreezeReport,
    /// What copies will not like.
    pub findings: Vec<Finding>,
}

/// Why a program could not be frozen.
#[derive(Debug, thiserror::Error)]
pub enum FreezeFailure {
    /// The program ended instead of serving.
    #[error("the program ended {how} before it {}; {}", .awaited.past, last(.output))]
    Ended {
        /// With which code or signal.
        how: String,
        /// What it should have done.
        awaited: Awaited,
        /// Its last lines of output.
        output: Vec<String>,
    },
    /// The program does not come to its entry point.
    #[error("the program did not {awaited} within {:.0} s: {why}; {}", waited.as_secs_f64(), last(.output))]
    NoEntryPoint {
        /// What it should have done.
        awaited: String,
        /// How long it had.
        waited: Duration,
        /// What it did instead, or what to look at.
        why: String,
        /// Its last lines of output.
        output: Vec<String>,
    },
    /// The program could not be trained.
    #[error("{reason}; {}", last(.output))]
    Training {
        /// Which request, and what came of it.
        reason: String,
        /// Its last lines of output.
        output: Vec<String>,
    },
    /// The body of a training request cannot be read.
    #[error("cannot read {} ({error}); correct `file` in [train] of thaw.toml", path.display())]
    TrainingFile {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The sandbox could not start the program.
    #[error("the program could not be started: {reason}; {}", last(.output))]
    NotStarted {
        /// Why.
        reason: String,
        /// What was printed.
        output: Vec<String>,
    },
    /// The sandbox ended unexpectedly.
    #[error("the sandbox ended unexpectedly ({reason}); {}", last(.output))]
    Died {
        /// How.
        reason: String,
        /// What was printed.
        output: Vec<String>,
    },
    /// The program needs more memory than it may have.
    #[error("the program reached `limits.memory` of {memory} before it {awaited}{used}; raise that in thaw.toml; {}", last(.output))]
    OutOfMemory {
        /// What it should have done.
        awaited: String,
        /// What it may have.
        memory: ByteSize,
        /// What it has used, for people; empty if that is not known.
        used: String,
        /// Its last lines of output.
        output: Vec<String>,
    },
    /// There is no kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// No sandbox could be made.
    #[error(transparent)]
    Zygote(#[from] ZygoteError),
    /// No program could be started in it.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The image could not be written.
    #[error(transparent)]
    Freeze(#[from] FreezeError),
    /// The image that was written is not usable.
    #[error("the new image is not usable: {0}")]
    Image(#[from] ImageError),
    /// The image that was written cannot be booted.
    #[error("the new image cannot be booted: {0}")]
    Plan(#[from] PlanError),
    /// The store refused something.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A live instance is of an older build.
    #[error(
        "`{function}` has been built anew since the instance was started; call it once, and freeze a newer one"
    )]
    BuiltAnew {
        /// The function.
        function: String,
    },
    /// One of its volumes cannot be used.
    #[error(transparent)]
    Volume(#[from] thaw_home::volumes::VolumeError),
    /// Nobody knows where its volumes are.
    #[error("the function has volumes, which are not used here; build it with `thaw build`")]
    NoVolumes,
    /// Whoever waited for it has turned away.
    #[error("nobody waits for it any more")]
    Unwanted,
    /// The host refused something.
    #[error("cannot talk to the sandbox ({0}); try again")]
    Io(#[from] io::Error),
}

impl FreezeFailure {
    /// Whether the program has not come to its entry point: another way there may work.
    pub(super) fn is_of_program(&self) -> bool {
        matches!(
            self,
            Self::Ended { .. }
                | Self::NoEntryPoint { .. }
                | Self::Training { .. }
                | Self::NotStarted { .. }
                | Self::Died { .. }
                | Self::OutOfMemory { .. }
                // In a copy of a template, its memory is written to besides.
                | Self::Boot(BootError::TooLong { .. })
                | Self::Freeze(FreezeError::TooLarge { .. } | FreezeError::TooManyMappings { .. })
        )
    }
}

fn last(output: &[String]) -> String {
    match output {
        [] => "it printed nothing".to_owned(),
        lines => format!("its last output was:\n  {}", lines.join("\n  ")),
    }
}

/// Runs the function's program over `index` to its entry point, and stores its
/// image.
pub(super) fn freeze(
    session: &mut Session,
    function: &StoredFunction,
    index: IndexId,
    way: Way<'_>,
    options: &BuildOptions,
    on_event: &mut OnEvent<'_>,
) -> Result<(ImageId, Frozen), FreezeFailure> {
    let rootfs = StoredRootfs::open(session, index)?;
    let config = &function.config;
    // What cannot be sent is noticed before anything runs.
    let course =
        config.train.as_ref().map(|train| Course::prepare(train, config, &function.source));
    let course = course.transpose()?;
    on_event(BuildEvent::Stage("running the program to its entry point"));
    let started = Instant::now();
    let (mut program, base) = match way {
        Way::Start => (Program::start(function, &rootfs, options)?, None),
        Way::Template(template) => {
            let program = Program::start_in(template, function, &rootfs, options)?;
            (program, Some(template.base()))
        }
    };
    if let FreezeAt::Signal(signal) = config.entry.freeze {
        let (name, pid) = (signal.name(), std::process::id());
        on_event(BuildEvent::Note(&format!(
            "it is frozen when it sends itself {name}, or when you do: kill -{} {pid}",
            name.trim_start_matches("SIG")
        )));
    }
    let run = |program: &mut Program, on_event: &mut OnEvent<'_>| {
        let entry = program.run_to_entry(options.entry_timeout, on_event)?;
        let start = started.elapsed();
        match &course {
            None => Ok((entry, start, None)),
            Some(course) => {
                let (entry, training) = course.hold(program, entry, options, on_event)?;
                Ok((entry, start, Some(training)))
            }
        }
    };
    let (entry, start, training) = match run(&mut program, on_event) {
        Ok(done) => done,
        Err(stop) => return Err(program.fail(stop, on_event)),
    };
    let losses = program.losses().map(of_losses).unwrap_or_default();
    let written = program.written().and_then(of_written);
    let findings = losses.into_iter().chain(written).collect();
    let (sandbox, _parent) = program.into_sandbox(on_event);

    on_event(BuildEvent::Stage("freezing"));
    let order = ImageOrder { entry, function, rootfs: &rootfs, merge: options.merge, base };
    let (id, report) = write_image(session, &sandbox, &order)?;
    Ok((id, Frozen { start, training, report, findings }))
}

/// What is to become an image.
pub(super) struct ImageOrder<'a> {
    /// Where the sandbox rests.
    pub entry: EntryPoint,
    pub function: &'a StoredFunction,
    pub rootfs: &'a StoredRootfs,
    pub merge: MergePolicy,
    /// The image to store the difference to.
    pub base: Option<FreezeBase>,
}

/// Writes the memory of a sandbox that is at rest as an image of a function.
pub(super) fn write_image(
    session: &mut Session,
    sandbox: &Sandbox,
    order: &ImageOrder<'_>,
) -> Result<(ImageId, FreezeReport), FreezeFailure> {
    let ImageOrder { entry, function, rootfs, .. } = *order;
    let config = &function.config;
    let spec = FreezeSpec {
        index_hash: *rootfs.id().as_bytes(),
        program: config.command.first().map_or("init", String::as_str).to_owned(),
        arguments: config.command.join(" "),
        about: about(config.name.as_str()),
        max_stored: config.limits.memory.bytes(),
        // Pages of an ancestor that are stored to save mappings take no room once it is packed.
        merge: order.merge,
        base: order.base.clone(),
        identity: None,
        post_copy: false,
    };
    let kernel = store_kernel(session, sandbox.kernel_build_id())?;
    let mut new = session.new_image_file()?;
    new.needs(kernel);
    let report = thaw_sandbox::freeze(sandbox, entry, &spec, new.file());
    let report = report.map_err(|error| match error {
        FreezeError::Write(error) => FreezeFailure::from(new.unwritten(error)),
        error => error.into(),
    })?;
    // What cannot be booted must not be stored as a function.
    let image = open_new(&new, order)?;
    image.plan(rootfs.file(), rootfs.file_len(), rootfs.blobs())?;
    let ancestors: Vec<ImageId> = image.ancestors().iter().map(|of| ImageId(of.name)).collect();
    let id = session.commit_image_over(new, &ancestors)?;
    Ok((id, report))
}

/// Opens an image that was just written, and checks that it can be booted here.
fn open_new(new: &NewImage, order: &ImageOrder<'_>) -> Result<Image, FreezeFailure> {
    let file = new.file().try_clone().map_err(ImageError::Read)?;
    let image = Image::open_with(file, &mut |named| {
        let found = order.base.as_ref().and_then(|base| base.ancestor(&named.name));
        found.ok_or_else(|| ImageError::NoAncestor {
            depth: named.depth,
            why: "it is none of those that the image was made from".to_owned(),
        })
    })?;
    check_fit(&image, order.rootfs)?;
    Ok(image)
}

/// Checks that an image can be booted over these files on this machine, by the kernel build that it was frozen under.
fn check_fit(image: &Image, rootfs: &StoredRootfs) -> Result<(), ImageError> {
    image.check_fit(&Fit {
        kernel_build: image.header().kernel_build,
        index_hash: *rootfs.id().as_bytes(),
        cpu_features: cpu_features(),
    })
}

/// Stores the kernel build of a sandbox that is to be frozen, unless it is there: the image can
/// be run by no other.
///
/// # Errors
/// The store is full, or it is an older build, which the store has lost.
pub fn store_kernel(session: &mut Session, build: [u8; 32]) -> Result<KernelId, StoreError> {
    let id = KernelId(build);
    match thaw_home::debug::kernel() {
        // Written again where it is damaged.
        Ok(present) if present.build_id() == build => session.put_kernel(present.elf()),
        _ => session.kernel(id).map(|_| id),
    }
}

/// What an image says of its function to people. Instances map the image and can read
/// all of it, so it holds nothing of the configuration: variables may be secrets, and
/// paths of the host are none of their business.
pub fn about(function: &str) -> String {
    serde_json::json!({ "function": function, "thaw": env!("CARGO_PKG_VERSION") }).to_string()
}

/// Makes the image of a live instance, which is at rest and was booted from `image`,
/// that of its function.
///
/// # Errors
/// The image cannot be written, or the function was built anew meanwhile.
pub fn freeze_instance(
    store: &Store,
    name: &str,
    sandbox: &Sandbox,
    entry: EntryPoint,
    rootfs: &StoredRootfs,
    image: ImageId,
) -> Result<(ImageId, FreezeReport), BuildError> {
    let built_anew = || FreezeFailure::BuiltAnew { function: name.to_owned() };
    let built_name = Name::new(name).map_err(StoreError::from)?;
    let record = store.get_function(&built_name)?;
    let version = record.version();
    // Of a version that has a share of the requests only, nobody wants an image for all.
    let built = BuiltFunction::from_record(record)?;
    if built.index != rootfs.id() || built.image != image {
        return Err(built_anew().into());
    }
    let mut session = store.session()?;
    let function = built.function;
    let merge = MergePolicy::default();
    let order = ImageOrder { entry, function: &function, rootfs, merge, base: None };
    let (image, report) = write_image(&mut session, sandbox, &order)?;
    let config = serde_json::to_value(&function).expect("a function is plain data");
    let new = NewFunction { name: built_name, config, index: built.index, image: Some(image) };
    // Writing the image has taken a while.
    match session.put_version_from(&version, new) {
        Ok(_) => Ok((image, report)),
        Err(StoreError::Replaced { .. }) => Err(built_anew().into()),
        Err(error) => Err(error.into()),
    }
}

/// Opens a stored image that another one refers to.
///
/// # Errors
/// It is missing or damaged.
pub fn open_ancestor(
    store: &thaw_store::Store,
    ancestor: &Ancestor,
) -> Result<AncestorFile, ImageError> {
    let failed = |why: String| ImageError::NoAncestor { depth: ancestor.depth, why };
    let file = store.open_image(ImageId(ancestor.name)).map_err(|error| match error {
        // The host may be out of descriptors: that passes.
        StoreError::Io { source, .. } => ImageError::Read(source),
        error => failed(error.to_string()),
    })?;
    AncestorFile::open(file).map_err(|error| match error {
        ImageError::Read(_) => error,
        error => failed(error.to_string()),
    })
}

/// Opens a stored image and checks that it can be booted here by the present kernel build.
///
/// # Errors
/// It is missing, damaged, or does not fit the kernel, the machine or the files.
pub fn open_image(
    store: &thaw_store::Store,
    id: ImageId,
    rootfs: &StoredRootfs,
) -> Result<Image, FreezeFailure> {
    let image = open_image_of_any_build(store, id, rootfs)?;
    let present = thaw_home::debug::kernel()?.build_id();
    match image.header().kernel_build == present {
        true => Ok(image),
        false => Err(ImageError::OtherKernel.into()),
    }
}

/// Opens a stored image and checks that it can be booted here by the kernel build that it was
/// frozen under.
///
/// # Errors
/// It is missing, damaged, or does not fit the machine or the files.
pub fn open_image_of_any_build(
    store: &thaw_store::Store,
    id: ImageId,
    rootfs: &StoredRootfs,
) -> Result<Image, FreezeFailure> {
    open_image_file(store, store.open_image(id)?, rootfs)
}

/// The same with an image that is open already.
///
/// # Errors
/// As above.
pub fn open_image_file(
    store: &thaw_store::Store,
    file: std::fs::File,
    rootfs: &StoredRootfs,
) -> Result<Image, FreezeFailure> {
    let image = Image::open_with(file, &mut |ancestor| open_ancestor(store, ancestor))?;
    check_fit(&image, rootfs)?;
    Ok(image)
}
