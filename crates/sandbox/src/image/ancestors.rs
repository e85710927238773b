//! The images that an image refers to.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_abi::image::{Ancestor, ancestor_depth, ancestor_number};

use super::parse::{Bytes, len_of, parse};
use super::{Image, ImageError};
use crate::broker::{BlobSource, FetchAnswer};

/// A verified image file of which others only map the memory.
#[derive(Clone, Debug)]
pub struct AncestorFile {
    file: Arc<File>,
    file_len: u64,
    depth: u32,
    checksum: [u8; 32],
}

impl AncestorFile {
    /// The file.
    pub(crate) fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Verifies an image file as [`Image::open`] does, but for its own ancestors, which those
    /// that refer to it name themselves.
    ///
    /// # Errors
    /// It is not an image, or is damaged.
    pub fn open(file: File) -> Result<Self, ImageError> {
        let header = parse(&file, len_of(&file)?, Bytes::Checked)?.header;
        let (file_len, depth, checksum) = (header.file_len, header.depth, header.checksum);
        Ok(Self { file: Arc::new(file), file_len, depth, checksum })
    }

    /// One that passes for what an image names, without content.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn that_is(named: &Ancestor) -> Self {
        let file = Arc::new(File::open("/dev/null").expect("there is one"));
        let &Ancestor { depth, file_len, checksum, .. } = named;
        Self { file, file_len, depth, checksum }
    }

    /// Whether it is the one that an image names.
    fn is(&self, named: &Ancestor) -> bool {
        (self.depth, self.file_len, self.checksum) == (named.depth, named.file_len, named.checksum)
    }
}

impl From<&Image> for AncestorFile {
    fn from(image: &Image) -> Self {
        let header = image.header();
        Self {
            file: image.file().clone(),
            file_len: header.file_len,
            depth: header.depth,
            checksum: header.checksum,
        }
    }
}

/// The ancestors of an image, by rising depth.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ancestors {
    named: Vec<Ancestor>,
    files: Vec<AncestorFile>,
}

impl Ancestors {
    /// Finds those that an image names.
    pub fn find(
        named: Vec<Ancestor>,
        find: &mut dyn FnMut(&Ancestor) -> Result<AncestorFile, ImageError>,
    ) -> Result<Self, ImageError> {
        let mut files = Vec::with_capacity(named.len());
        for ancestor in &named {
            let found = find(ancestor)?;
            if !found.is(ancestor) {
                return Err(ImageError::WrongAncestor { depth: ancestor.depth });
            }
            files.push(found);
        }
        Ok(Self { named, files })
    }

    /// Those of a copy of `image`, whose name is `name`: its own, and the image itself.
    pub fn of_child(image: &Image, name: [u8; 32]) -> Self {
        let mut all = image.ancestors.clone();
        let own = AncestorFile::from(image);
        let (depth, file_len, checksum) = (own.depth, own.file_len, own.checksum);
        all.named.push(Ancestor { depth, reserved: 0, file_len, checksum, name });
        all.files.push(own);
        all
    }

    /// The file of one.
    pub fn file(&self, name: &[u8; 32]) -> Option<AncestorFile> {
        let mut all = self.named.iter().zip(&self.files);
        all.find(|(named, _)| named.name == *name).map(|(_, file)| file.clone())
    }

    /// What an image says of them.
    pub fn named(&self) -> &[Ancestor] {
        &self.named
    }

    /// Their numbers among the blobs of a mapping.
    pub fn numbers(&self) -> impl Iterator<Item = u32> {
        self.named.iter().map(|ancestor| ancestor_number(ancestor.depth))
    }

    /// A new descriptor of the one with this number.
    ///
    /// # Errors
    /// There is none, or the host's error.
    pub fn open(&self, number: u32) -> io::Result<OwnedFd> {
        let all = self.named.iter().zip(&self.files);
        let mut of_depth = all.filter(|(named, _)| Some(named.depth) == ancestor_depth(number));
        let (_, found) = of_depth.next().ok_or(io::ErrorKind::NotFound)?;
        Ok(found.file.try_clone()?.into())
    }
}

/// The blobs of a rootfs, and the ancestors of an image over it.
pub(crate) struct BlobsAndAncestors {
    pub ancestors: Ancestors,
    pub blobs: Arc<dyn BlobSource>,
}

impl BlobSource for BlobsAndAncestors {
    fn open_blob(&self, number: u32) -> io::Result<OwnedFd> {
        match ancestor_depth(number) {
            Some(_) => self.ancestors.open(number),
            None => self.blobs.open_blob(number),
        }
    }

    fn fetch(&self, number: u32, answer: FetchAnswer) -> Result<(), FetchAnswer> {
        match ancestor_depth(number) {
            Some(_) => Err(answer),
            None => self.blobs.fetch(number, answer),
        }
    }

    fn failure(&self) -> Option<String> {
        self.blobs.failure()
    }
}
