//! All that a thaw needs, prepared once per image.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_abi::control::PopulateRange;
use thaw_abi::image::Mapping;

use crate::broker::BlobSource;
use crate::working_set::{PopulatePolicy, WorkingSet};

/// Descriptors of a boot command beside the blobs: image, index, standard
/// output and error, a connection.
pub(super) const FIXED_DESCRIPTORS: usize = 5;

/// Why an image cannot be made into a plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// A blob of the image cannot be opened.
    #[error("cannot open blob {blob} of the image: {source}; import the rootfs again")]
    Blob {
        /// Number of the blob in the rootfs index.
        blob: u32,
        /// Why.
        source: std::io::Error,
    },
    /// The boot command would not fit into one message.
    #[error(
        "the boot command takes {bytes} bytes, more than the {limit} of a message; freeze the function anew"
    )]
    TooLarge {
        /// Bytes of the command.
        bytes: usize,
        /// Largest command.
        limit: usize,
    },
    /// The working set was recorded from another image.
    #[error("the working set belongs to another image; record it anew")]
    ForeignWorkingSet,
}

/// All that [`crate::Zygote::thaw`] needs, prepared once per image and shared
/// by every boot of it. Made by [`crate::Image::plan`].
pub struct BootPlan {
    pub(crate) image: Arc<File>,
    pub(crate) image_checksum: [u8; 32],
    pub(crate) index: Arc<File>,
    pub(crate) index_len: u64,
    pub(crate) blobs: Arc<dyn BlobSource>,
    pub(crate) mappings: Vec<Mapping>,
    pub(crate) populate: Vec<PopulateRange>,
    /// Numbers and descriptors of the blobs that travel with the boot command.
    pub(crate) blob_numbers: Vec<u32>,
    pub(crate) blob_files: Vec<OwnedFd>,
}

impl BootPlan {
    /// The mappings, sorted by address.
    pub fn mappings(&self) -> &[Mapping] {
        &self.mappings
    }

    /// The ranges that are populated at boot.
    pub fn populate(&self) -> &[PopulateRange] {
        &self.populate
    }

    /// Numbers of the blobs whose descriptors travel with the boot command.
    pub fn blobs(&self) -> &[u32] {
        &self.blob_numbers
    }

    /// Checksum of the image: what ties a [`WorkingSet`] to it.
    pub fn image_checksum(&self) -> [u8; 32] {
        self.image_checksum
    }

    /// Makes the touched mappings eager and populates pages as `policy` says.
    /// Replaces what an earlier working set set.
    pub fn apply_working_set(
        &mut self,
        set: &WorkingSet,
        policy: PopulatePolicy,
    ) -> Result<(), PlanError> {
        let _ = (set, policy);
        todo!()
    }
}
