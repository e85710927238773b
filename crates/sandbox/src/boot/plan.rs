//! All that a thaw needs, prepared once per image.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_abi::control::{
    Connection, MESSAGE_MAX, MESSAGE_MAX_FDS, MessageHeader, PopulateRange, Thaw,
};
use thaw_abi::image::{MAPPING_EAGER, MAPPING_KERNEL, Mapping};

use crate::broker::BlobSource;
use crate::image::Image;
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

/// Most blobs whose descriptors travel with a boot command; the sandbox asks
/// for the others when it needs them.
const BLOBS_MAX: usize = MESSAGE_MAX_FDS - FIXED_DESCRIPTORS;
/// Bytes of a boot command besides mappings, ranges and blob numbers: headers,
/// a connection, a host name.
const FIXED_BYTES: usize =
    size_of::<MessageHeader>() + size_of::<Thaw>() + size_of::<Connection>() + 256;

impl BootPlan {
    pub(crate) fn new(
        image: &Image,
        index: Arc<File>,
        index_len: u64,
        blobs: Arc<dyn BlobSource>,
    ) -> Result<Self, PlanError> {
        let blob_numbers: Vec<u32> = image.blobs().iter().copied().take(BLOBS_MAX).collect();
        let blob_files = blob_numbers
            .iter()
            .map(|&blob| blobs.open_blob(blob).map_err(|source| PlanError::Blob { blob, source }))
            .collect::<Result<_, _>>()?;
        let plan = Self {
            image: image.file().clone(),
            image_checksum: image.header().checksum,
            index,
            index_len,
            blobs,
            mappings: image.mappings().to_vec(),
            populate: Vec::new(),
            blob_numbers,
            blob_files,
        };
        let bytes = plan.command_len();
        if bytes > MESSAGE_MAX {
            return Err(PlanError::TooLarge { bytes, limit: MESSAGE_MAX });
        }
        Ok(plan)
    }

    /// Bytes of the boot command, at most.
    fn command_len(&self) -> usize {
        FIXED_BYTES
            + size_of_val(&self.mappings[..])
            + size_of_val(&self.populate[..])
            + size_of_val(&self.blob_numbers[..])
    }

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
    /// Replaces what an earlier working set did.
    pub fn apply_working_set(
        &mut self,
        set: &WorkingSet,
        policy: PopulatePolicy,
    ) -> Result<(), PlanError> {
        if set.image_checksum() != self.image_checksum {
            return Err(PlanError::ForeignWorkingSet);
        }
        self.populate.clear();
        for mapping in &mut self.mappings {
            let eager = mapping.flags & MAPPING_KERNEL != 0
                || set.touches(mapping.start, mapping.start + mapping.len);
            mapping.flags &= !MAPPING_EAGER;
            if eager {
                mapping.flags |= MAPPING_EAGER;
            }
        }
        let room = MESSAGE_MAX.saturating_sub(self.command_len()) / size_of::<PopulateRange>();
        self.populate = set.populate(&self.mappings, policy, room);
        Ok(())
    }
}
