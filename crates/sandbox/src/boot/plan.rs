//! All that a thaw needs, prepared once per image.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytemuck::Zeroable;
use thaw_abi::control::{
    Connection, MESSAGE_MAX, MESSAGE_MAX_FDS, MessageHeader, PopulateRange, SECRETS_MAX, Thaw,
};
use thaw_abi::image::{MAPPING_EAGER, MAPPING_KERNEL, Mapping, SOURCE_BLOB, ancestor_depth};
use thaw_abi::rootfs::{INDEX_MAGIC, IndexHeader};

use super::asked::{ASKED_MAX, AskedContents, Noting};
use super::post_copy::PostCopy;
use crate::broker::BlobSource;
use crate::image::{BlobsAndAncestors, Image};
use crate::prefetch::PrefetchLayout;
use crate::working_set::{PopulatePolicy, WorkingSet};

/// Descriptors of a boot command beside the blobs: image, index, prefetch file (of one address space)
/// or pipe of [`thaw_abi::control::THAW_POST_COPY`] (of several), standard output and error, a connection.
pub(super) const FIXED_DESCRIPTORS: usize = 6;

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
    /// The rootfs index cannot be read.
    #[error("cannot read the rootfs index: {0}; import the rootfs again")]
    Index(std::io::Error),
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
    /// Number of blobs of the index.
    pub(crate) index_blobs: u32,
    /// Of the rootfs, and the image's ancestors.
    pub(crate) blobs: Arc<dyn BlobSource>,
    /// Numbers of the ancestors.
    ancestors: Vec<u32>,
    pub(crate) mappings: Vec<Mapping>,
    /// Where the sandbox finds them in the image, if they are too many to travel.
    pub(crate) mappings_at: Option<u64>,
    pub(crate) populate: Vec<PopulateRange>,
    /// Numbers and descriptors of the blobs that travel with the boot command, and of all
    /// ancestors, which the sandbox cannot ask for later.
    pub(crate) blob_numbers: Vec<u32>,
    pub(crate) blob_files: Vec<OwnedFd>,
    /// Contents that earlier sandboxes have asked for, which travel, too.
    pub(super) asked: Option<Arc<AskedContents>>,
    /// The file that some of the mappings come from.
    pub(crate) prefetch: Option<Arc<File>>,
    /// The image is still being written, or was when this was made.
    pub(super) post_copy: Option<Arc<PostCopy>>,
    is_partial: bool,
}

/// Most blobs whose descriptors travel with a boot command; the sandbox asks
/// for the others when it needs them.
pub(super) const BLOBS_MAX: usize = MESSAGE_MAX_FDS - FIXED_DESCRIPTORS;
/// Bytes of a boot command besides mappings, ranges, the plan's own blob numbers and secrets:
/// headers, a connection, a host name, numbers of contents that were asked for.
const FIXED_BYTES: usize = size_of::<MessageHeader>()
    + size_of::<Thaw>()
    + size_of::<Connection>()
    + 256
    + ASKED_MAX * size_of::<u32>();

/// Number of blobs of a rootfs index, by its header.
fn blob_count(index: &File) -> std::io::Result<u32> {
    let mut header = IndexHeader::zeroed();
    index.read_exact_at(bytemuck::bytes_of_mut(&mut header), 0)?;
    if header.magic != INDEX_MAGIC {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    Ok(header.blob_count)
}

impl BootPlan {
    pub(crate) fn new(
        image: &Image,
        index: Arc<File>,
        index_len: u64,
        blobs: Arc<dyn BlobSource>,
    ) -> Result<Self, PlanError> {
        let mut plan = Self::bare(image, index, index_len, blobs)?;
        // Until the first request has shown which blobs it needs, all that are
        // mapped come along; what the program has only read until it was frozen,
        // it seldom reads again.
        let mapped: BTreeSet<u32> = image
            .mappings()
            .iter()
            .filter(|mapping| mapping.source == SOURCE_BLOB)
            .map(|mapping| mapping.blob)
            .collect();
        plan.carry_blobs(mapped)?;
        let bytes = plan.command_len();
        if bytes > MESSAGE_MAX {
            return Err(PlanError::TooLarge { bytes, limit: MESSAGE_MAX });
        }
        Ok(plan)
    }

    /// A plan without descriptors of blobs in the boot command.
    pub(crate) fn bare(
        image: &Image,
        index: Arc<File>,
        index_len: u64,
        blobs: Arc<dyn BlobSource>,
    ) -> Result<Self, PlanError> {
        let index_blobs = blob_count(&index).map_err(PlanError::Index)?;
        Ok(Self {
            image: image.file().clone(),
            image_checksum: image.header().checksum,
            index,
            index_len,
            index_blobs,
            blobs: Arc::new(BlobsAndAncestors { ancestors: image.ancestors.clone(), blobs }),
            ancestors: image.ancestors.numbers().collect(),
            mappings: image.mappings().to_vec(),
            mappings_at: image.mappings_at_if_many(),
            populate: Vec::new(),
            blob_numbers: Vec::new(),
            blob_files: Vec::new(),
            asked: None,
            prefetch: None,
            post_copy: None,
            is_partial: false,
        })
    }

    /// Gives numbers behind those of the contents to parts of files that are fetched.
    pub(crate) fn add_segments(&mut self, count: u32) {
        self.index_blobs = self.index_blobs.saturating_add(count);
        self.is_partial = true;
    }

    /// Why a part of it could not be fetched, if that has happened lately.
    pub fn fetch_failure(&self) -> Option<String> {
        self.blobs.failure()
    }

    /// Whether only a part of the image and the contents is here.
    pub fn is_partial(&self) -> bool {
        self.is_partial
    }

    /// Notes contents that sandboxes ask for, and sends those along that others have asked for.
    pub fn remember_asked(&mut self, asked: &Arc<AskedContents>) {
        let (blobs, asked) = (self.blobs.clone(), asked.clone());
        self.asked = Some(asked.clone());
        self.blobs = Arc::new(Noting { blobs, asked });
    }

    /// Opens the blobs that travel with the boot command.
    fn carry_blobs(&mut self, blobs: impl IntoIterator<Item = u32>) -> Result<(), PlanError> {
        let mut carried = Vec::new();
        let blobs = blobs.into_iter().filter(|&blob| ancestor_depth(blob).is_none());
        let all = self.ancestors.iter().copied().chain(blobs);
        for blob in all.take(BLOBS_MAX) {
            let file = self.blobs.open_blob(blob);
            carried.push((blob, file.map_err(|source| PlanError::Blob { blob, source })?));
        }
        (self.blob_numbers, self.blob_files) = carried.into_iter().unzip();
        Ok(())
    }

    /// The same plan without blobs in the boot command: the sandbox asks for
    /// each when it needs it.
    pub fn without_blobs(mut self) -> Self {
        // The ancestors come first.
        self.blob_numbers.truncate(self.ancestors.len());
        self.blob_files.truncate(self.ancestors.len());
        self.asked = None;
        self
    }

    /// The same for an image of several address spaces that is still being written. Until it is
    /// whole, nothing is booted ahead from it.
    pub fn post_copy(mut self, rest: Arc<PostCopy>) -> Self {
        self.post_copy = Some(rest);
        self
    }

    /// The mappings that travel with the boot command.
    pub(crate) fn carried_mappings(&self) -> &[u8] {
        if self.mappings_at.is_some() { &[] } else { bytemuck::cast_slice(&self.mappings) }
    }

    /// Bytes of the boot command, at most.
    fn command_len(&self) -> usize {
        FIXED_BYTES
            + self.carried_mappings().len()
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

    /// Numbers of the blobs, and of the ancestors, whose descriptors travel with the boot
    /// command.
    pub fn blobs(&self) -> &[u32] {
        &self.blob_numbers
    }

    /// Checksum of the image: what ties a [`WorkingSet`] to it.
    pub fn image_checksum(&self) -> [u8; 32] {
        self.image_checksum
    }

    /// Makes the touched mappings eager, populates pages as `policy` says, and
    /// sends the blobs along that were used. Replaces what an earlier working
    /// set did.
    pub fn apply_working_set(
        &mut self,
        set: &WorkingSet,
        policy: PopulatePolicy,
    ) -> Result<(), PlanError> {
        if set.image_checksum() != self.image_checksum {
            return Err(PlanError::ForeignWorkingSet);
        }
        self.carry_blobs(set.blobs().iter().copied())?;
        self.populate.clear();
        for mapping in &mut self.mappings {
            let eager = mapping.flags & MAPPING_KERNEL != 0
                || set.touches(mapping.start, mapping.start + mapping.len);
            mapping.flags &= !MAPPING_EAGER;
            if eager {
                mapping.flags |= MAPPING_EAGER;
            }
        }
        let room = MESSAGE_MAX.saturating_sub(self.command_len() + SECRETS_MAX)
            / size_of::<PopulateRange>();
        self.populate = set.populate(&self.mappings, policy, room);
        Ok(())
    }

    /// Takes pages of the working set from a prefetch file, whose order `layout` is; after
    /// [`BootPlan::apply_working_set`].
    ///
    /// # Errors
    /// The boot command would not fit into one message.
    pub fn prefetch(
        &mut self,
        file: Arc<File>,
        layout: PrefetchLayout,
        set: &WorkingSet,
        policy: PopulatePolicy,
    ) -> Result<(), PlanError> {
        let whole = std::mem::replace(&mut self.mappings, layout.into_mappings());
        self.prefetch = Some(file);
        self.populate.clear();
        let bytes = self.command_len();
        let room = MESSAGE_MAX
            .checked_sub(bytes)
            .ok_or(PlanError::TooLarge { bytes, limit: MESSAGE_MAX })?;
        let room = room.saturating_sub(SECRETS_MAX) / size_of::<PopulateRange>();
        self.populate = set.populate(&whole, policy, room);
        Ok(())
    }

    /// Whether pages come from a prefetch file.
    pub fn prefetches(&self) -> bool {
        self.prefetch.is_some()
    }
}
