//! The working set: which memory the first request of a thawed copy touched.

use std::fs::File;
use std::io;

use crate::boot::BootPlan;
use crate::image::Image;
use crate::sandbox::Sandbox;

/// Which pages of a working set a boot populates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PopulatePolicy {
    /// None: touched mappings are mapped at boot, pages fault in one by one.
    None,
    /// Pages that were read only.
    Read,
    /// Pages that were written.
    #[default]
    Write,
    /// Both.
    Both,
}

/// Why bytes are not a usable working set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkingSetError {
    /// Damaged, truncated or of another kind.
    #[error("the recorded working set is damaged; record it anew")]
    Damaged,
    /// Written by another version of Thaw.
    #[error(
        "the recorded working set has format version {0}, which this Thaw does not read; record it anew"
    )]
    Version(u32),
}

/// Which memory the first request of a thawed copy touched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkingSet {
    image_checksum: [u8; 32],
}

impl WorkingSet {
    /// Reads from outside which pages `sandbox`, thawed from `plan`, has
    /// touched so far. Call it after the first request.
    pub fn record(sandbox: &Sandbox, plan: &BootPlan) -> io::Result<Self> {
        let _ = (sandbox, plan);
        todo!()
    }

    /// The bytes to be stored.
    pub fn to_bytes(&self) -> Vec<u8> {
        todo!()
    }

    /// Reads what [`WorkingSet::to_bytes`] wrote.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, WorkingSetError> {
        let _ = bytes;
        todo!()
    }

    /// Checksum of the image that the set belongs to.
    pub fn image_checksum(&self) -> [u8; 32] {
        self.image_checksum
    }

    /// Brings the set's pages of the image file into the page cache in large
    /// requests; returns the bytes asked for. For cold boots.
    pub fn read_ahead(&self, image: &Image) -> io::Result<u64> {
        let _ = image;
        todo!()
    }
}

/// Drops a file's pages from the page cache, as far as no process maps them.
pub fn drop_from_page_cache(file: &File) -> io::Result<()> {
    let _ = file;
    todo!()
}
