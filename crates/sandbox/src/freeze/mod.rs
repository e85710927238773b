//! Freezing: writing a sandbox at rest to an image file.

use std::fs::File;
use std::time::Duration;

use thaw_abi::control::EntryPoint;

use crate::sandbox::Sandbox;

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
/// boot, a merged gap costs room in the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergePolicy {
    /// A clean gap of at most this many pages between two dirty runs of one
    /// blob mapping is stored.
    pub clean_gap_pages: u64,
    /// A zero gap of at most this many pages between two stored runs becomes a
    /// hole in the image file.
    pub zero_gap_pages: u64,
}

impl Default for MergePolicy {
    fn default() -> Self {
        Self { clean_gap_pages: 4, zero_gap_pages: 16 }
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
    /// A blob could not be read.
    #[error("cannot read blob {blob} while freezing: {source}")]
    Blob {
        /// Its number.
        blob: u32,
        /// Why.
        source: std::io::Error,
    },
    /// The sandbox's memory could not be read.
    #[error(
        "cannot read the sandbox's memory: {0}; the daemon needs the right to trace its sandboxes"
    )]
    Memory(#[source] std::io::Error),
    /// The image could not be written.
    #[error("cannot write the image: {0}")]
    Write(#[source] std::io::Error),
}

/// Writes the memory of `sandbox`, at rest at `entry`, to `image` (empty, open
/// for reading and writing). The caller syncs and renames the file.
pub fn freeze(
    sandbox: &Sandbox,
    entry: EntryPoint,
    spec: &FreezeSpec,
    image: &File,
) -> Result<FreezeReport, FreezeError> {
    let _ = (sandbox, entry, spec, image);
    todo!()
}
