//! Freezing: writing a sandbox at rest to an image file.
//!
//! [`freeze`](fn@freeze) asks the state helper for it, a process without rights, which reads
//! the sandbox' memory and writes the image. The caller only hands over the files.

mod chart;
mod layout;
mod mate;
mod relatives;
pub(crate) mod report;
mod scan;
mod write;

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::{bytes_of, cast_slice};
use thaw_abi::control::EntryPoint;
use thaw_abi::cpu::Baseline;
use thaw_abi::image::{
    Ancestor, DEPTH_MAX, SOURCE_BLOB, SOURCE_ZERO, ancestor_depth, ancestor_number,
};

use crate::boot::Rootfs;
use crate::broker::BlobSource;
use crate::image::cpu_features_of;
use crate::image::parse::{Bytes, parse};
use crate::image::{AncestorFile, Ancestors, BlobsAndAncestors, Image, most_mappings};
use crate::sandbox::Sandbox;
use crate::state::protocol::{
    ABOUT_MAX, ANSWER_BLOB, ANSWER_DONE, ANSWER_FIRST, ANSWER_READ, Answer,
    BLOBS_MAX as BLOBS_ASKED_MAX, BlobReply, ERROR_BASE, ERROR_BLOB, ERROR_HOST, ERROR_MEMORY,
    ERROR_REPORT, ERROR_SANDBOX_ENDED, ERROR_TOO_LARGE, ERROR_TOO_MANY_MAPPINGS, ERROR_WRITE,
    FREEZE_IN_MEMORY, FREEZE_POST_COPY, FreezeRequest, NOT_A_COPY, REPLY_BLOB, REQUEST_FREEZE,
    errno_of, padded,
};
use crate::state::{Conversation, FIRST_PROCESS, StateError, Subject};
use chart::Chart;
use layout::{Scanned, lay_out};
use report::{Region, Report};
use scan::{Base, Scanner};
use write::write;

pub(crate) use mate::serve_mate;
pub(crate) use scan::Source;

/// What the image is to say about the function, and limits.
#[derive(Clone, Debug)]
pub struct FreezeSpec {
    /// BLAKE3 of the rootfs index file.
    pub index_hash: [u8; 32],
    /// Name of the program, for debuggers and `readelf`.
    pub program: String,
    /// Its arguments, for debuggers and `readelf`.
    pub arguments: String,
    /// JSON about the function, for people, 16 KiB at most; not read at boot.
    pub about: String,
    /// Most bytes of memory that the image may store.
    pub max_stored: u64,
    /// How runs of pages are merged into mappings.
    pub merge: MergePolicy,
    /// The image to store the difference to; `None`: the image is to hold everything.
    pub base: Option<FreezeBase>,
    /// `Some`: the image is a file in memory, for this host only. That is written faster: pages
    /// that the sandbox has written are stored without comparing them with anything, and these
    /// bytes, which no other image has, stand in it for a checksum. See [`Image::open_sealed`].
    pub identity: Option<[u8; 32]>,
    /// The image is thawed while it is being written: see [`Step::FirstWritten`].
    pub post_copy: bool,
}

/// The image that a new one is to store the difference to, its parent: the one that the
/// sandbox is a copy of, or an earlier image of the same sandbox. Any other will do, too, but
/// little will be equal.
#[derive(Clone, Debug)]
pub struct FreezeBase {
    /// The parent. If it has [`thaw_abi::image::DEPTH_MAX`], the new image holds everything.
    pub image: Arc<Image>,
    /// Its name, by which whoever opens the new image finds it.
    pub name: [u8; 32],
}

impl FreezeBase {
    /// The files that memory of a copy comes from: that of the image, and those of its ancestors, the
    /// nearest first.
    pub fn files(&self) -> Vec<Arc<File>> {
        let nearest_first = self.image.ancestors().iter().rev();
        let ancestors = nearest_first.filter_map(|ancestor| self.image.ancestor(&ancestor.name));
        let ancestors = ancestors.map(|ancestor| ancestor.file().clone());
        std::iter::once(self.image.file().clone()).chain(ancestors).collect()
    }

    /// The file of an image that a child of this one refers to; `None`: it is no ancestor of
    /// such a child.
    pub fn ancestor(&self, name: &[u8; 32]) -> Option<AncestorFile> {
        let is_own = *name == self.name;
        is_own.then(|| AncestorFile::from(&*self.image)).or_else(|| self.image.ancestor(name))
    }
}

/// How far a freeze is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The image has its tables, the kernel's memory and that of the first address space, which stay
    /// as they are: it can be thawed (`BootPlan::post_copy`). Only with [`FreezeSpec::post_copy`],
    /// and if the other address spaces have so much that it is worth while.
    FirstWritten,
    /// All memory has been read: the sandbox may go on, while the image is finished.
    Read,
}

/// How runs of pages are merged into mappings: a mapping costs one `mmap` at
/// boot (2 to 4 µs if it is touched), a merged clean gap costs room in the image
/// and in the page cache, once per function and not per instance.
///
/// What an ancestor of the image has counts as clean, too.
///
/// Measured with `examples/hello-python`, clean and zero gap in pages:
///
/// | gaps | mappings | stored |
/// | --- | --- | --- |
/// | 0, 0 | 256 | 9.2 MiB |
/// | 0, 16 | 152 | 9.2 MiB |
/// | 2, 16 | 132 | 9.3 MiB |
/// | 4, 4 | 143 | 9.3 MiB |
/// | 4, 16 | 125 | 9.3 MiB |
/// | 8, 16 | 122 | 9.4 MiB |
/// | 16, 16 | 117 | 9.5 MiB |
/// | 32, 64 | 113 | 9.5 MiB |
/// | 64, 16 | 107 | 9.7 MiB |
///
/// `examples/hello-c` goes from 20 to 14 mappings with 64 in place of 8, and its warm
/// boots take some 15 µs less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergePolicy {
    /// A clean gap of at most this many pages between two dirty runs of one
    /// blob mapping is stored.
    pub clean_gap_pages: u64,
    /// A zero gap of at most this many pages between two stored runs is mapped with
    /// them, from zeros or a hole in the image file.
    pub zero_gap_pages: u64,
}

impl Default for MergePolicy {
    fn default() -> Self {
        Self { clean_gap_pages: 64, zero_gap_pages: 16 }
    }
}

/// What a freeze did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FreezeReport {
    /// Bytes of the image file, holes included.
    pub file_len: u64,
    /// Bytes of memory stored in the image, holes not included.
    pub stored: u64,
    /// Bytes of memory that come from blobs.
    pub from_blobs: u64,
    /// Bytes of memory that come from ancestors.
    pub from_ancestors: u64,
    /// Bytes of memory that read as zero.
    pub zero: u64,
    /// Bytes stored although a blob or an ancestor has them, to save mappings.
    pub stored_clean: u64,
    /// Regions that the kernel reported.
    pub regions: usize,
    /// Entries of the mapping table.
    pub mappings: usize,
    /// Guest threads.
    pub threads: usize,
    /// Blobs in use.
    pub blobs: usize,
    /// Depth of the image: 0 if it needs no other.
    pub depth: u32,
    /// Checksum of the image.
    pub checksum: [u8; 32],
    /// How long it took.
    pub duration: Duration,
}

/// Why a sandbox could not be frozen.
#[derive(Debug, thiserror::Error)]
pub enum FreezeError {
    /// The sandbox has a host directory as its rootfs.
    #[error(
        "a sandbox over a host directory cannot be frozen; import the directory into the store first"
    )]
    HostDirectory,
    /// What the image is to say about the function is too long.
    #[error("the description of the function takes {len} bytes, more than the {limit} allowed")]
    About {
        /// Bytes of [`FreezeSpec::about`].
        len: usize,
        /// Most bytes.
        limit: usize,
    },
    /// The kernel's report makes no sense.
    #[error("the sandbox's freeze report is not usable: {0}")]
    Report(String),
    /// The sandbox has ended.
    #[error("the sandbox ended while it was frozen")]
    SandboxEnded,
    /// The process that reads the sandbox's memory is of no use.
    #[error(transparent)]
    Helper(StateError),
    /// More memory in use than the image may store.
    #[error(
        "the frozen program holds {needed} bytes of memory, more than the {limit} allowed; raise the memory limit or let the program hold less at its entry point"
    )]
    TooLarge {
        /// Bytes needed, at least.
        needed: u64,
        /// [`FreezeSpec::max_stored`].
        limit: u64,
    },
    /// More mappings than a boot command holds.
    #[error(
        "the frozen program has more than {limit} separate memory mappings; let it map less at its entry point"
    )]
    TooManyMappings {
        /// Most mappings of an image.
        limit: usize,
    },
    /// A blob could not be read.
    #[error("cannot read blob {blob} while freezing: {source}")]
    Blob {
        /// Its number.
        blob: u32,
        /// Why.
        source: std::io::Error,
    },
    /// The sandbox's memory could not be read.
    #[error("cannot read the sandbox's memory: {0}; `thaw doctor` says what forbids it")]
    Memory(#[source] std::io::Error),
    /// The image that the new one was to differ from is of no use.
    #[error("the image that the sandbox is compared with is not usable: {0}; freeze without it")]
    Base(String),
    /// The image could not be written.
    #[error("cannot write the image: {0}")]
    Write(#[source] std::io::Error),
}

impl From<StateError> for FreezeError {
    fn from(error: StateError) -> Self {
        match error {
            StateError::SandboxEnded => Self::SandboxEnded,
            error => Self::Helper(error),
        }
    }
}

/// How long a freeze may take, whatever the guest has made of its memory.
fn time_allowed(max_stored: u64) -> Duration {
    /// Bytes in a second that any disk of a host takes.
    const SLOWEST: u64 = 8 << 20;
    Duration::from_secs(60 + max_stored / SLOWEST)
}

/// Writes the memory of `sandbox`, at rest at `entry`, to `image` (open for
/// reading and writing; what it holds is lost). The caller syncs and renames the
/// file. Afterwards the sandbox may go on or be killed.
///
/// Another process reads the memory, one sandbox at a time. It takes as long as there is
/// memory to store, but a minute and a second for each 8 MiB of
/// [`FreezeSpec::max_stored`] at most.
///
/// # Errors
/// The image is of no use then.
pub fn freeze(
    sandbox: &Sandbox,
    entry: EntryPoint,
    spec: &FreezeSpec,
    image: &File,
) -> Result<FreezeReport, FreezeError> {
    freeze_live(sandbox, entry, spec, image, &mut |_| {})
}

/// The same, and says how far it is.
///
/// # Errors
/// The image is of no use then, whatever step was taken.
pub fn freeze_live(
    sandbox: &Sandbox,
    entry: EntryPoint,
    spec: &FreezeSpec,
    image: &File,
    on_step: &mut dyn FnMut(Step),
) -> Result<FreezeReport, FreezeError> {
    Freezer::new(sandbox)?.write(entry, spec, image, on_step)
}

/// Writes the memory of a sandbox from another thread than the one that serves the sandbox.
pub struct Freezer {
    subject: Subject,
    blobs: Arc<dyn BlobSource>,
    kernel_build: [u8; 32],
    baseline: Option<Baseline>,
    thawed: Option<[u8; 32]>,
}

impl Freezer {
    /// For a sandbox that is at rest, or has a twin.
    ///
    /// # Errors
    /// The sandbox has a host directory as its rootfs, or has ended.
    pub fn new(sandbox: &Sandbox) -> Result<Self, FreezeError> {
        let Rootfs::Index { blobs, .. } = sandbox.rootfs() else {
            return Err(FreezeError::HostDirectory);
        };
        Ok(Self {
            subject: sandbox.subject().map_err(FreezeError::Memory)?,
            blobs: blobs.clone(),
            kernel_build: sandbox.kernel_build_id(),
            baseline: sandbox.baseline(),
            thawed: sandbox.image_checksum(),
        })
    }

    /// Build of its kernel.
    pub fn kernel_build_id(&self) -> [u8; 32] {
        self.kernel_build
    }

    /// Writes its memory as [`freeze_live`] does.
    ///
    /// # Errors
    /// As there.
    pub fn write(
        &self,
        entry: EntryPoint,
        spec: &FreezeSpec,
        image: &File,
        on_step: &mut dyn FnMut(Step),
    ) -> Result<FreezeReport, FreezeError> {
        let (subject, blobs) = (&self.subject, Some(self.blobs.clone()));
        let Self { kernel_build, baseline, thawed, .. } = *self;
        Frozen { subject, blobs, kernel_build, baseline, thawed }.write(entry, spec, image, on_step)
    }
}

/// A sandbox at rest.
pub(crate) struct Frozen<'a> {
    pub subject: &'a Subject,
    /// The blobs of its rootfs; `None`: it has none.
    pub blobs: Option<Arc<dyn BlobSource>>,
    pub kernel_build: [u8; 32],
    /// The level of the instruction set that its program is held to.
    pub baseline: Option<Baseline>,
    /// Checksum of the image that it is a copy of.
    pub thawed: Option<[u8; 32]>,
}

impl Frozen<'_> {
    /// Writes its memory: see [`freeze_live`].
    pub fn write(
        &self,
        entry: EntryPoint,
        spec: &FreezeSpec,
        image: &File,
        on_step: &mut dyn FnMut(Step),
    ) -> Result<FreezeReport, FreezeError> {
        self.have_written(entry, spec, image, on_step).map_err(|error| match error {
            // The memory of a process that is ending can be gone, or forbidden, before the
            // process has ended.
            FreezeError::Memory(_) if self.subject.ends_within(ENDING) => FreezeError::SandboxEnded,
            error => error,
        })
    }

    fn have_written(
        &self,
        entry: EntryPoint,
        spec: &FreezeSpec,
        image: &File,
        on_step: &mut dyn FnMut(Step),
    ) -> Result<FreezeReport, FreezeError> {
        let started = Instant::now();
        if spec.about.len() > ABOUT_MAX {
            return Err(FreezeError::About { len: spec.about.len(), limit: ABOUT_MAX });
        }
        let ancestors = match &spec.base {
            Some(base) if base.image.header().depth < DEPTH_MAX => {
                Ancestors::of_child(&base.image, base.name)
            }
            _ => Ancestors::default(),
        };
        let is_thawed = |ancestor: &&Ancestor| Some(ancestor.checksum) == self.thawed;
        let thawed = ancestors.named().iter().find(is_thawed);
        let request = FreezeRequest {
            kind: REQUEST_FREEZE,
            about_len: spec.about.len() as u32,
            index_hash: spec.index_hash,
            kernel_build: self.kernel_build,
            cpu_features: cpu_features_of(self.baseline),
            program: padded(&spec.program),
            arguments: padded(&spec.arguments),
            report_address: entry.report_address,
            report_len: entry.report_len,
            max_stored: spec.max_stored,
            clean_gap_pages: spec.merge.clean_gap_pages,
            zero_gap_pages: spec.merge.zero_gap_pages,
            ancestor_count: ancestors.named().len() as u32,
            thawed_depth: thawed.map_or(NOT_A_COPY, |ancestor| ancestor.depth),
            process: if entry.process == 0 { FIRST_PROCESS } else { entry.process },
            flags: flags_of(spec),
            identity: spec.identity.unwrap_or_default(),
        };
        let named: &[u8] = cast_slice(ancestors.named());
        let packet = [bytes_of(&request), spec.about.as_bytes(), named].concat();
        let blobs = self.blobs.clone().unwrap_or_else(|| Arc::new(NoBlobs));
        let blobs = BlobsAndAncestors { ancestors, blobs };
        let time = time_allowed(spec.max_stored);
        let mut lender = Lender::new(&blobs, spec.post_copy, on_step);
        let (answer, text) =
            self.subject.ask(&packet, &[image.as_fd()], time, |helper| lender.serve(helper))?;
        if answer.kind != ANSWER_DONE {
            return Err(lender.error(&answer, &text));
        }
        let file_len = image.metadata().map_err(FreezeError::Write)?.len();
        let report = report_of(&answer, file_len, started.elapsed());
        report.ok_or(StateError::Nonsense("its report of the image has no sense").into())
    }
}

/// `FREEZE_*`.
fn flags_of(spec: &FreezeSpec) -> u32 {
    let in_memory = if spec.identity.is_some() { FREEZE_IN_MEMORY } else { 0 };
    let post_copy = if spec.post_copy { FREEZE_POST_COPY } else { 0 };
    in_memory | post_copy
}

/// How long it takes a killed process to be gone, at most, on a busy host.
const ENDING: Duration = Duration::from_millis(500);

/// The blobs of a sandbox that has none.
struct NoBlobs;

impl BlobSource for NoBlobs {
    fn open_blob(&self, _: u32) -> io::Result<OwnedFd> {
        Err(io::ErrorKind::NotFound.into())
    }
}

/// Opens blobs for the state helper while it freezes.
struct Lender<'a> {
    blobs: &'a dyn BlobSource,
    /// How many it has asked for.
    lent: usize,
    /// The last one that could not be opened.
    failed: Option<(u32, io::Error)>,
    /// Hears of each step once, in their order.
    on_step: &'a mut dyn FnMut(Step),
    /// [`FreezeSpec::post_copy`].
    post_copy: bool,
    /// The last step.
    step: Option<Step>,
}

impl<'a> Lender<'a> {
    fn new(blobs: &'a dyn BlobSource, post_copy: bool, on_step: &'a mut dyn FnMut(Step)) -> Self {
        Self { blobs, lent: 0, failed: None, on_step, post_copy, step: None }
    }

    /// The helper is so far.
    fn take_step(&mut self, step: Step) -> Result<(), StateError> {
        let is_next = match step {
            Step::FirstWritten => self.post_copy && self.step.is_none(),
            Step::Read => self.step != Some(Step::Read),
        };
        if !is_next {
            return Err(StateError::Nonsense("it takes a step twice, or one that nobody wants"));
        }
        self.step = Some(step);
        (self.on_step)(step);
        Ok(())
    }

    /// Answers the helper until it is done or has failed.
    fn serve(&mut self, helper: &mut Conversation<'_>) -> Result<(Answer, String), StateError> {
        loop {
            let (answer, text) = helper.next()?;
            match answer.kind {
                ANSWER_FIRST => self.take_step(Step::FirstWritten)?,
                ANSWER_READ => self.take_step(Step::Read)?,
                ANSWER_BLOB => self.lend(&answer, helper)?,
                _ => return Ok((answer, text)),
            }
        }
    }

    /// Opens the blobs that it asks for.
    fn lend(&mut self, answer: &Answer, helper: &mut Conversation<'_>) -> Result<(), StateError> {
        let numbers = answer.blobs().ok_or(StateError::Nonsense("it asks for too much"))?;
        self.lent += numbers.len();
        if self.lent > BLOBS_ASKED_MAX {
            return Err(StateError::Nonsense("it asks for too many blobs"));
        }
        let (reply, blobs) = self.open(numbers);
        let blobs: Vec<_> = blobs.iter().map(AsFd::as_fd).collect();
        helper.send(bytes_of(&reply), &blobs)
    }

    /// Opens blobs, up to the first that cannot be opened.
    fn open(&mut self, numbers: &[u32]) -> (BlobReply, Vec<OwnedFd>) {
        let mut reply = BlobReply { kind: REPLY_BLOB, errno: 0 };
        let mut blobs = Vec::with_capacity(numbers.len());
        for &number in numbers {
            match self.blobs.open_blob(number) {
                Ok(blob) => blobs.push(blob),
                Err(error) => {
                    reply.errno = match errno_of(&error) {
                        0 => libc::EIO,
                        errno => errno,
                    };
                    self.failed = Some((number, error));
                    break;
                }
            }
        }
        (reply, blobs)
    }

    /// The error that the helper has reported.
    fn error(&mut self, answer: &Answer, text: &str) -> FreezeError {
        let source = || answer.host_error(text);
        match answer.error {
            ERROR_REPORT => FreezeError::Report(text.to_owned()),
            ERROR_TOO_LARGE => {
                FreezeError::TooLarge { needed: answer.numbers[0], limit: answer.numbers[1] }
            }
            ERROR_TOO_MANY_MAPPINGS => {
                FreezeError::TooManyMappings { limit: answer.numbers[0] as usize }
            }
            ERROR_BLOB => {
                // Its own error says more than the number that was passed on.
                let own = self.failed.take().filter(|(number, _)| *number == answer.blob);
                let source = own.map_or_else(source, |(_, error)| error);
                FreezeError::Blob { blob: answer.blob, source }
            }
            ERROR_SANDBOX_ENDED => FreezeError::SandboxEnded,
            ERROR_BASE => FreezeError::Base(text.to_owned()),
            ERROR_WRITE => FreezeError::Write(source()),
            ERROR_HOST if answer.errno == libc::ESRCH => FreezeError::SandboxEnded,
            ERROR_HOST | ERROR_MEMORY => FreezeError::Memory(source()),
            _ => StateError::Nonsense("it failed at nothing that it was asked").into(),
        }
    }
}

/// The report behind an answer; `None` if it cannot be true of a file of `file_len` bytes.
fn report_of(answer: &Answer, file_len: u64, duration: Duration) -> Option<FreezeReport> {
    let [reported_len, stored, from_blobs, zero, stored_clean, found, tables, from_ancestors] =
        answer.numbers;
    let pair = |numbers: u64| [(numbers >> 32) as usize, (numbers & 0xffff_ffff) as usize];
    let ([regions, threads], [mappings, blobs]) = (pair(found), pair(tables));
    let counts = [regions, threads, mappings, blobs];
    let is_possible = reported_len == file_len
        && stored <= file_len
        && answer.blob <= DEPTH_MAX
        && counts.iter().all(|&count| count as u64 <= thaw_abi::freeze::REPORT_MAX);
    is_possible.then_some(FreezeReport {
        file_len,
        stored,
        from_blobs,
        from_ancestors,
        zero,
        stored_clean,
        regions,
        mappings,
        threads,
        blobs,
        depth: answer.blob,
        checksum: answer.checksum,
        duration,
    })
}

/// Takes an answer of the helper as [`freeze`] does, for the fuzzers.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn take_answer(answer: &Answer, text: &str) {
    if let Some(report) = report_of(answer, answer.numbers[0], Duration::ZERO) {
        assert!(report.stored <= report.file_len);
    }
    let mut on_step = |_| {};
    let mut lender = Lender::new(&NoBlobs, false, &mut on_step);
    assert!(!lender.error(answer, text).to_string().is_empty());
}

/// A freeze, as the state helper is asked for it.
pub(crate) struct Order<'a> {
    pub request: FreezeRequest,
    /// What the image says about the function.
    pub about: &'a [u8],
    /// Images that it may refer to, by rising depth; the last is its parent.
    pub ancestors: &'a [Ancestor],
}

impl Order<'_> {
    /// Whether the image is a file in memory, for this host only.
    pub fn is_in_memory(&self) -> bool {
        self.request.flags & FREEZE_IN_MEMORY != 0
    }

    /// Whether the caller is to hear when only the memory of other address spaces than the first is
    /// left to copy.
    pub fn is_post_copy(&self) -> bool {
        self.request.flags & FREEZE_POST_COPY != 0
    }
}

/// Writes the memory of a sandbox at rest to `image`: what the state helper does.
pub(crate) fn write_image(
    source: &mut dyn Source,
    order: &Order<'_>,
    image: &File,
) -> Result<FreezeReport, FreezeError> {
    let request = &order.request;
    let mut scanner = Scanner::open(source, request.process, request.max_stored)?;
    if order.is_in_memory() {
        scanner.trust_page_map();
    }
    let report = read_report(&scanner, request.report_address, request.report_len)?;
    scanner.take_spaces(&report.processes)?;
    let blobs = blobs_in_use(&report);
    if !order.is_in_memory() {
        scanner.open_blobs(&blobs)?;
    }
    // Otherwise few are compared with, each of which is opened then: to ask for all of them takes
    // dozens of questions to the daemon.
    let base = read_base(&mut scanner, order)?;
    scanner.compare_with(base, report.origins.clone());

    let scanned = scan(&mut scanner, &report.regions, RUNS_MAX)?;
    let merge = MergePolicy {
        clean_gap_pages: request.clean_gap_pages,
        zero_gap_pages: request.zero_gap_pages,
    };
    let is_of_several = report.regions.iter().any(|region| region.space > 0);
    let lay_out = |is_differential| {
        let limit = most_mappings(is_of_several, is_differential);
        lay_out(&scanned, merge, limit).ok_or(FreezeError::TooManyMappings { limit })
    };
    let mut layout = lay_out(!order.ancestors.is_empty())?;
    if !layout.refers_to_ancestors() {
        // After all it is a whole image, which may have fewer.
        layout = lay_out(false)?;
    }
    if layout.stored_clean > request.max_stored {
        let needed = layout.stored_clean;
        return Err(FreezeError::TooLarge { needed, limit: request.max_stored });
    }

    let mut summary = FreezeReport {
        stored_clean: layout.stored_clean,
        regions: report.regions.len(),
        mappings: layout.mappings.len(),
        threads: report.threads.len(),
        blobs: blobs.len(),
        ..FreezeReport::default()
    };
    for mapping in &layout.mappings {
        match mapping.source {
            SOURCE_BLOB if ancestor_depth(mapping.blob).is_some() => {
                summary.from_ancestors += mapping.len;
            }
            SOURCE_BLOB => summary.from_blobs += mapping.len,
            SOURCE_ZERO => summary.zero += mapping.len,
            _ => {}
        }
    }
    let in_image = layout.image_len;
    let written = write(image, &report, &blobs, layout, order, &mut scanner)?;
    summary.file_len = written.file_len;
    summary.stored = written.stored;
    summary.zero += in_image - written.stored;
    summary.depth = written.depth;
    summary.checksum = written.checksum;
    Ok(summary)
}

/// Most runs of pages of all regions together, some 160 MB of them. A hostile kernel could have the
/// pieces of one image counted for each of many address spaces.
const RUNS_MAX: usize = 4 << 20;

/// Finds out which pages of all regions must be stored.
fn scan(
    scanner: &mut Scanner<'_>,
    regions: &[Region],
    runs_max: usize,
) -> Result<Vec<Scanned>, FreezeError> {
    let mut scanned = Vec::with_capacity(regions.len());
    let mut left = runs_max;
    for region in regions {
        let runs = scanner.runs(region)?;
        let rest = left.checked_sub(runs.len());
        left = rest.ok_or(FreezeError::TooManyMappings { limit: runs_max })?;
        scanned.push(Scanned { region: region.clone(), runs });
    }
    Ok(scanned)
}

/// What the images say that the sandbox is compared with.
fn read_base(scanner: &mut Scanner<'_>, order: &Order<'_>) -> Result<Base, FreezeError> {
    let Some((parent, _)) = order.ancestors.split_last() else { return Ok(Base::default()) };
    let thawed_depth = order.request.thawed_depth;
    let thawed = order.ancestors.iter().find(|ancestor| ancestor.depth == thawed_depth);
    let mut chart_of = |image: &Ancestor| {
        let file = scanner.blob(ancestor_number(image.depth))?;
        // Whoever has asked for the image has verified its bytes.
        let parsed = parse(file, image.file_len, Bytes::Known)
            .map_err(|error| FreezeError::Base(error.to_string()))?;
        let is_known = |depth| order.ancestors.iter().any(|known| known.depth == depth);
        Ok::<_, FreezeError>(Chart::new(&parsed.mappings, image.depth, is_known))
    };
    let thawed = thawed.map(&mut chart_of).transpose()?;
    Ok(Base { parent: Some(chart_of(parent)?), thawed })
}

/// Most blobs of an image's I/O cache, which only saves requests at boot; those
/// that are mapped come first.
const BLOBS_MAX: usize = 1024;

fn read_report(scanner: &Scanner<'_>, address: u64, len: u64) -> Result<Report, FreezeError> {
    if !report::is_plausible_place(address, len) {
        return Err(FreezeError::Report("it lies where none can be, or is too long".to_owned()));
    }
    let mut bytes = vec![0; len as usize];
    scanner.read(0, address, &mut bytes).map_err(FreezeError::Memory)?;
    Report::parse(&bytes)
}

/// The blobs that the kernel has open and those that it maps, each once.
fn blobs_in_use(report: &Report) -> Vec<u32> {
    let mapped = report.regions.iter().filter_map(|region| region.blob.map(|(blob, _)| blob));
    let mut seen = HashSet::new();
    mapped
        .chain(report.blobs.iter().copied())
        .filter(|&blob| seen.insert(blob))
        .take(BLOBS_MAX)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message;
    use std::io::IoSlice;

    struct Null;

    impl BlobSource for Null {
        fn open_blob(&self, _: u32) -> io::Result<OwnedFd> {
            Ok(File::open("/dev/null")?.into())
        }
    }

    /// A helper that a sandbox has taken over could make the caller open files for ever.
    #[test]
    fn a_helper_that_asks_for_blobs_without_end_is_cut_off() {
        let (own, helper) = message::control_pair().unwrap();
        let asker = std::thread::spawn(move || {
            let question = Answer::asking_for(&[7; 16]).with_text("");
            let mut reply = [0; 64];
            let mut asked = 0;
            while message::send(&helper, &[IoSlice::new(&question)], &[]).is_ok()
                && message::receive(&helper, &mut reply, Some(&mut Vec::new()))
                    .is_ok_and(|packet| packet.len > 0)
            {
                asked += 16;
            }
            asked
        });
        let mut on_step = |_| {};
        let mut lender = Lender::new(&Null, false, &mut on_step);
        let mut helper = Conversation::new(&own, Duration::from_secs(60));
        let error = lender.serve(&mut helper).unwrap_err();
        assert!(matches!(error, StateError::Nonsense(_)), "{error}");
        drop(own);
        assert_eq!(asker.join().unwrap(), BLOBS_ASKED_MAX);
    }

    #[test]
    fn a_report_of_an_impossible_image_is_refused() {
        let numbers = [9000, 4096, 0, 0, 0, 5 << 32 | 8, 6 << 32 | 7, 4096];
        let answer = Answer { numbers, blob: DEPTH_MAX, ..Answer::new(ANSWER_DONE) };
        let report = report_of(&answer, 9000, Duration::ZERO).unwrap();
        assert_eq!((report.regions, report.mappings, report.blobs, report.threads), (5, 6, 7, 8));
        assert!(report_of(&answer, 9001, Duration::ZERO).is_none());
        assert_eq!((report.depth, report.from_ancestors), (DEPTH_MAX, 4096));
        let too_deep = Answer { blob: DEPTH_MAX + 1, ..answer };
        assert!(report_of(&too_deep, 9000, Duration::ZERO).is_none());
        for (at, value) in [(1, 9001), (5, u64::MAX), (6, u64::MAX)] {
            let mut wrong = answer;
            wrong.numbers[at] = value;
            assert!(report_of(&wrong, 9000, Duration::ZERO).is_none(), "{at}");
        }
    }
}
