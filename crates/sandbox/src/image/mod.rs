//! Reading snapshot images. Nothing of an image is executed or mapped before
//! all checks have passed.

mod ancestors;
mod cpu;
pub(crate) mod elf;
pub(crate) mod parse;

pub use ancestors::AncestorFile;
pub(crate) use ancestors::{Ancestors, BlobsAndAncestors};
pub use cpu::{can_mask_cpuid, cpu_features, cpu_features_of, lacking, level_of, missing_here};

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use thaw_abi::image::{
    Ancestor, IMAGE_VERSION, IMAGE_VERSION_DIFFERENTIAL, ImageHeader, Mapping, SOURCE_BLOB,
    SOURCE_IMAGE, ancestor_depth,
};

use crate::boot::{BootPlan, PlanError};
use crate::broker::BlobSource;

/// Why an image is refused.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file could not be read.
    #[error("cannot read the image: {0}")]
    Read(#[source] std::io::Error),
    /// Not an ELF core file with Thaw notes.
    #[error("the file is not a Thaw image: {0}")]
    NotAnImage(&'static str),
    /// The file is shorter than it says.
    #[error("the image is truncated: {found} bytes of {expected}; freeze the function anew")]
    Truncated {
        /// Bytes of the file.
        found: u64,
        /// Bytes it should have.
        expected: u64,
    },
    /// The checksum does not fit, or a table makes no sense.
    #[error("the image is damaged: {0}; freeze the function anew")]
    Damaged(&'static str),
    /// Written by another version of Thaw.
    #[error(
        "the image has format version {found}, this Thaw reads versions {IMAGE_VERSION} to {IMAGE_VERSION_DIFFERENTIAL}; freeze the function anew"
    )]
    Version {
        /// Version of the image.
        found: u32,
    },
    /// It was opened without the images that hold the rest of its memory.
    #[error("the image holds only what differs from other images; open it together with those")]
    Differential,
    /// An image that holds a part of its memory cannot be opened.
    #[error("the image differs from another one, of depth {depth}, that cannot be opened: {why}")]
    NoAncestor {
        /// Depth of the other one.
        depth: u32,
        /// What is wrong with it.
        why: String,
    },
    /// An image that holds a part of its memory is not what it was.
    #[error(
        "the image differs from another one, of depth {depth}, that is not what it was; restore that file, or freeze anew"
    )]
    WrongAncestor {
        /// Depth of the other one.
        depth: u32,
    },
    /// Frozen under another build of the kernel.
    #[error(
        "the image is out of date: it was frozen under another build of the Thaw kernel; freeze the function anew"
    )]
    OtherKernel,
    /// Frozen over another rootfs.
    #[error(
        "the image is out of date: it was frozen over another rootfs; freeze the function anew"
    )]
    OtherRootfs,
    /// The CPU lacks features that the frozen program may use.
    #[error(
        "the image needs CPU features that this machine lacks ({0}); freeze the function on this machine"
    )]
    Cpu(String),
}

/// What an image must fit to be booted here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fit {
    /// Build id of the kernel that will run it.
    pub kernel_build: [u8; 32],
    /// BLAKE3 of the function's rootfs index file.
    pub index_hash: [u8; 32],
    /// CPU features of this machine; [`cpu_features`].
    pub cpu_features: [u32; 8],
}

/// A verified image.
#[derive(Debug)]
pub struct Image {
    file: Arc<File>,
    header: ImageHeader,
    mappings: Vec<Mapping>,
    mappings_at: u64,
    blobs: Vec<u32>,
    about: String,
    pub(crate) ancestors: Ancestors,
}

/// Most mappings that fit a boot command together with the ranges to populate. More are read
/// from the image.
const CARRIED_MAX: usize = 3000;

/// Most mappings of an image, each of which is a segment of the ELF file. A whole one of one
/// process fits a boot command. A differential one has more rather than store again what its
/// ancestors have; the host lets a process have 65,530 mappings (`vm.max_map_count`), and the
/// program makes some itself.
pub(crate) fn most_mappings(is_of_several: bool, is_differential: bool) -> usize {
    match (is_of_several, is_differential) {
        (true, _) => 60_000,
        (false, true) => 16_000,
        (false, false) => CARRIED_MAX,
    }
}

impl Image {
    /// Reads and verifies an image: structure, length, version, checksum.
    /// Whether it can be booted here says [`Image::check_fit`].
    ///
    /// # Errors
    /// It is not an image, is damaged, or stores only how it differs from others:
    /// [`Image::open_with`].
    pub fn open(file: File) -> Result<Self, ImageError> {
        Self::open_with(file, &mut |_| Err(ImageError::Differential))
    }

    /// The same with an image that may have ancestors, which `find` opens.
    ///
    /// # Errors
    /// It is not an image, is damaged, or an ancestor is not to be had.
    pub fn open_with(
        file: File,
        find: &mut dyn FnMut(&Ancestor) -> Result<AncestorFile, ImageError>,
    ) -> Result<Self, ImageError> {
        Self::open_as(file, parse::Bytes::Checked, find)
    }

    /// The same for a file in memory that was written with [`crate::FreezeSpec::identity`] and
    /// then sealed against writing. Its bytes are not compared with a checksum, which guards
    /// against disks that fail and files that were replaced: since it was written, nobody could
    /// change it. One that is thawed while it is written ([`crate::PostCopy`]) is opened again when it
    /// is sealed, to see whether it says the same.
    ///
    /// # Errors
    /// It is not an image, is not the one with this identity, or an ancestor is not to be had.
    pub fn open_sealed(
        file: File,
        identity: &[u8; 32],
        find: &mut dyn FnMut(&Ancestor) -> Result<AncestorFile, ImageError>,
    ) -> Result<Self, ImageError> {
        let image = Self::open_as(file, parse::Bytes::Known, find)?;
        match image.header.checksum == *identity {
            true => Ok(image),
            false => Err(ImageError::Damaged(parse::WRONG_CHECKSUM)),
        }
    }

    /// The same for an image of which nothing but the part before its memory is here, and holes in
    /// place of that. Its bytes were verified piece by piece, or will be.
    ///
    /// # Errors
    /// It is not an image, or has ancestors.
    pub fn open_partial(file: File) -> Result<Self, ImageError> {
        Self::open_as(file, parse::Bytes::Known, &mut |_| Err(ImageError::Differential))
    }

    /// Bytes before its memory: the headers and notes.
    pub fn head_len(&self) -> u64 {
        let stored = self.mappings.iter().filter(|mapping| mapping.source == SOURCE_IMAGE);
        stored.map(|mapping| mapping.offset).min().unwrap_or(self.header.file_len)
    }

    fn open_as(
        file: File,
        bytes: parse::Bytes,
        find: &mut dyn FnMut(&Ancestor) -> Result<AncestorFile, ImageError>,
    ) -> Result<Self, ImageError> {
        let parsed = parse::parse(&file, parse::len_of(&file)?, bytes)?;
        Ok(Self {
            ancestors: Ancestors::find(parsed.ancestors, find)?,
            file: Arc::new(file),
            header: parsed.header,
            mappings: parsed.mappings,
            mappings_at: parsed.mappings_at,
            blobs: parsed.blobs,
            about: parsed.about,
        })
    }

    /// Checks that the image can be booted here.
    pub fn check_fit(&self, fit: &Fit) -> Result<(), ImageError> {
        if self.header.kernel_build != fit.kernel_build {
            return Err(ImageError::OtherKernel);
        }
        if self.header.index != fit.index_hash {
            return Err(ImageError::OtherRootfs);
        }
        match cpu::missing(&self.header.cpu_features, &fit.cpu_features) {
            None => Ok(()),
            Some(missing) => Err(ImageError::Cpu(missing)),
        }
    }

    /// Writes into the file of a verified image that it belongs over another index, which has the
    /// same files with the same numbers of their contents, under other names. The image has to be
    /// opened anew.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn move_to_index(self, index: [u8; 32]) -> Result<(), ImageError> {
        parse::write_index(&self.file, &index)
    }

    /// Checks that all contents of its rootfs that it names are among the first `count`.
    ///
    /// # Errors
    /// It names others.
    pub fn check_contents(&self, count: usize) -> Result<(), ImageError> {
        let mapped = self.mappings.iter().filter(|mapping| mapping.source == SOURCE_BLOB);
        let named = mapped.map(|mapping| mapping.blob).chain(self.blobs.iter().copied());
        let is_there = |number: u32| match ancestor_depth(number) {
            Some(_) => true,
            None => (number as usize) < count,
        };
        match named.into_iter().all(is_there) {
            true => Ok(()),
            false => Err(ImageError::Damaged("it names a content that its rootfs does not have")),
        }
    }

    /// The header.
    pub fn header(&self) -> &ImageHeader {
        &self.header
    }

    /// The mapping table, sorted by address.
    pub fn mappings(&self) -> &[Mapping] {
        &self.mappings
    }

    /// Where the table lies in the image, if it is too long for a boot command.
    pub(crate) fn mappings_at_if_many(&self) -> Option<u64> {
        (self.mappings.len() > CARRIED_MAX).then_some(self.mappings_at)
    }

    /// Numbers of the blobs that the program had used when it was frozen.
    pub fn blobs(&self) -> &[u32] {
        &self.blobs
    }

    /// JSON about the function, as given to the freeze.
    pub fn about(&self) -> &str {
        &self.about
    }

    /// The images that hold the rest of its memory, by rising depth.
    pub fn ancestors(&self) -> &[Ancestor] {
        self.ancestors.named()
    }

    /// One of its ancestors, by its name.
    pub fn ancestor(&self, name: &[u8; 32]) -> Option<AncestorFile> {
        self.ancestors.file(name)
    }

    /// The file.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Prepares boots of this image over the given rootfs index. Opens the
    /// blobs that it maps.
    pub fn plan(
        &self,
        index: Arc<File>,
        index_len: u64,
        blobs: Arc<dyn BlobSource>,
    ) -> Result<BootPlan, PlanError> {
        BootPlan::new(self, index, index_len, blobs)
    }
}

/// BLAKE3 of the first `len` bytes of an image, with the 32 bytes of the
/// checksum itself taken as zero.
pub(crate) fn checksum(file: &File, len: u64, checksum_offset: u64) -> io::Result<[u8; 32]> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while at < len {
        let count = (len - at).min(buffer.len() as u64) as usize;
        let buffer = &mut buffer[..count];
        file.read_exact_at(buffer, at)?;
        for position in checksum_offset..checksum_offset + 32 {
            if let Some(byte) =
                position.checked_sub(at).and_then(|position| buffer.get_mut(position as usize))
            {
                *byte = 0;
            }
        }
        hasher.update(buffer);
        at += count as u64;
    }
    Ok(*hasher.finalize().as_bytes())
}
