//! Freezing: writing a sandbox at rest to an image file.

mod layout;
pub(crate) mod report;
mod scan;
mod write;

use std::collections::HashSet;
use std::fs::File;
use std::time::{Duration, Instant};

use thaw_abi::control::EntryPoint;
use thaw_abi::image::{SOURCE_BLOB, SOURCE_ZERO};

use crate::boot::Rootfs;
use crate::image::most_mappings;
use crate::sandbox::Sandbox;
use layout::{Scanned, lay_out};
use report::Report;
use scan::Scanner;
use write::write;

/// What the image is to say about the function, and limits.
#[derive(Clone, Debug)]
pub struct FreezeSpec {
    /// BLAKE3 of the rootfs index file.
    pub index_hash: [u8; 32],
    /// Name of the program, for debuggers and `readelf`.
    pub program: String,
    /// Its arguments, for debuggers and `readelf`.
    pub arguments: String,
    /// JSON about the function, for people; not read at boot.
    pub about: String,
    /// Most bytes of memory that the image may store.
    pub max_stored: u64,
    /// How runs of pages are merged into mappings.
    pub merge: MergePolicy,
}

/// How runs of pages are merged into mappings: a mapping costs one `mmap` at
/// boot (2 to 4 µs if it is touched), a merged clean gap costs room in the image
/// and in the page cache, once per function and not per instance.
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
    /// Bytes of memory that read as zero.
    pub zero: u64,
    /// Bytes stored although a blob has them, to save mappings.
    pub stored_clean: u64,
    /// Regions that the kernel reported.
    pub regions: usize,
    /// Entries of the mapping table.
    pub mappings: usize,
    /// Guest threads.
    pub threads: usize,
    /// Blobs in use.
    pub blobs: usize,
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
    /// The kernel's report makes no sense.
    #[error("the sandbox's freeze report is not usable: {0}")]
    Report(&'static str),
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
    /// The image could not be written.
    #[error("cannot write the image: {0}")]
    Write(#[source] std::io::Error),
}

/// Writes the memory of `sandbox`, at rest at `entry`, to `image` (open for
/// reading and writing; what it holds is lost). The caller syncs and renames the
/// file. Afterwards the sandbox may go on or be killed.
pub fn freeze(
    sandbox: &Sandbox,
    entry: EntryPoint,
    spec: &FreezeSpec,
    image: &File,
) -> Result<FreezeReport, FreezeError> {
    let started = Instant::now();
    let Rootfs::Index { blobs: source, .. } = sandbox.rootfs() else {
        return Err(FreezeError::HostDirectory);
    };
    let mut scanner = Scanner::open(sandbox, &**source, spec.max_stored)?;
    let report = read_report(&scanner, entry)?;
    scanner.open_spaces(sandbox, &report.processes)?;
    let blobs = blobs_in_use(&report);
    for &blob in &blobs {
        scanner.check_blob(blob)?;
    }

    let mut scanned = Vec::with_capacity(report.regions.len());
    for region in &report.regions {
        let runs = scanner.runs(region)?;
        scanned.push(Scanned { region: region.clone(), runs });
    }
    let limit = most_mappings(report.regions.iter().any(|region| region.space > 0));
    let layout =
        lay_out(&scanned, spec.merge, limit).ok_or(FreezeError::TooManyMappings { limit })?;

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
            SOURCE_BLOB => summary.from_blobs += mapping.len,
            SOURCE_ZERO => summary.zero += mapping.len,
            _ => {}
        }
    }
    let in_image = layout.image_len;
    let written = write(image, &report, &blobs, layout, spec, sandbox.kernel_build_id(), &scanner)?;
    summary.file_len = written.file_len;
    summary.stored = written.stored;
    summary.zero += in_image - written.stored;
    summary.checksum = written.checksum;
    summary.duration = started.elapsed();
    Ok(summary)
}

/// Most blobs of an image's I/O cache, which only saves requests at boot; those
/// that are mapped come first.
const BLOBS_MAX: usize = 1024;

fn read_report(scanner: &Scanner<'_>, entry: EntryPoint) -> Result<Report, FreezeError> {
    if !report::is_plausible_place(entry.report_address, entry.report_len) {
        return Err(FreezeError::Report("it lies where none can be, or is too long"));
    }
    let mut bytes = vec![0; entry.report_len as usize];
    scanner.read(0, entry.report_address, &mut bytes).map_err(FreezeError::Memory)?;
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
