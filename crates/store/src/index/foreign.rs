//! Indexes that come from another store, as bytes that nobody has checked.

use std::collections::VecDeque;

use thaw_abi::rootfs::{Index, IndexBlob, IndexError, IndexHeader, ROOT_INODE};

use super::check::{StructureError, check_structure};
use crate::blob::Blob;
use crate::error::{Kind, Result, StoreError};
use crate::id::{BlobHash, IndexId};
use crate::session::Session;
use crate::stage::Existing;

/// Most directories in each other. Paths of programs are 4096 bytes at most (`PATH_MAX`).
const DEPTH_MAX: usize = 2048;

/// Why bytes are no index that a program can be run over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForeignIndexError {
    /// The bytes are not an index, or are damaged.
    #[error("it is not a rootfs index that this version of Thaw knows")]
    Format,
    /// Its checksum is not that of its bytes.
    #[error("its checksum is wrong")]
    Checksum,
    /// Its tables contradict each other.
    #[error(transparent)]
    Structure(#[from] StructureError),
    /// It has more files or directories than allowed.
    #[error("it has more than {limit} {what}")]
    TooMany {
        /// The bound.
        limit: usize,
        /// Of what.
        what: &'static str,
    },
    /// A content has no bytes, or the sizes of all together cannot be.
    #[error("the size of content {0} is impossible")]
    Size(usize),
}

/// An index of another store whose structure was checked. Its contents need not be here.
#[derive(Clone, Debug)]
pub struct ForeignIndex {
    len: usize,
    /// In words, so that it is aligned as the format wants.
    words: Vec<u64>,
}

impl ForeignIndex {
    /// Checks bytes from elsewhere: checksum, structure, `files_max` files and contents at most.
    ///
    /// # Errors
    /// They do not describe a root file system.
    pub fn parse(bytes: &[u8], files_max: usize) -> std::result::Result<Self, ForeignIndexError> {
        let mut words = vec![0u64; bytes.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        let foreign = Self { len: bytes.len(), words };
        foreign.check(files_max)?;
        Ok(foreign)
    }

    fn check(&self, files_max: usize) -> std::result::Result<(), ForeignIndexError> {
        let index =
            Index::parse(self.bytes()).map_err(|_: IndexError| ForeignIndexError::Format)?;
        if checksum(self.bytes()) != index.header().checksum {
            return Err(ForeignIndexError::Checksum);
        }
        let counts = [index.inodes().len(), index.blobs().len()];
        if counts.into_iter().any(|count| count > files_max) {
            return Err(ForeignIndexError::TooMany { limit: files_max, what: "files" });
        }
        check_structure(&index)?;
        let mut sum = 0_u64;
        for (number, blob) in index.blobs().iter().enumerate() {
            let next = sum.checked_add(blob.size).filter(|_| blob.size > 0);
            sum = next.ok_or(ForeignIndexError::Size(number))?;
        }
        match is_deeper(&index, DEPTH_MAX) {
            true => Err(ForeignIndexError::TooMany {
                limit: DEPTH_MAX,
                what: "directories in each other",
            }),
            false => Ok(()),
        }
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    fn index(&self) -> Index<'_> {
        Index::parse(self.bytes()).expect("it was parsed before")
    }

    /// Its name.
    pub fn id(&self) -> IndexId {
        blake3::hash(self.bytes()).into()
    }

    /// The contents that it refers to, by their numbers.
    pub fn blobs(&self) -> impl ExactSizeIterator<Item = Blob> {
        self.index().blobs().iter().map(|blob| Blob { hash: blob.hash.into(), size: blob.size })
    }

    /// The same files with other names of their contents, which are those of another sharing
    /// domain. Numbers of contents stay the same.
    ///
    /// # Errors
    /// The names lie where something else does, too.
    ///
    /// # Panics
    /// There must be a name for each content.
    pub fn renamed(&self, names: &[BlobHash]) -> std::result::Result<Self, ForeignIndexError> {
        let header = *self.index().header();
        assert_eq!(names.len(), header.blob_count as usize, "a name for each content");
        let mut renamed = self.clone();
        let bytes: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut renamed.words)[..self.len];
        for (number, name) in names.iter().enumerate() {
            let at = header.blobs_offset as usize + number * size_of::<IndexBlob>();
            let hash = at + std::mem::offset_of!(IndexBlob, hash);
            bytes[hash..hash + 32].copy_from_slice(name.as_bytes());
        }
        let header = IndexHeader { checksum: checksum(bytes), ..header };
        bytes[..size_of::<IndexHeader>()].copy_from_slice(bytemuck::bytes_of(&header));
        // Tables of a hostile index may overlap.
        renamed.check(usize::MAX)?;
        Ok(renamed)
    }
}

/// BLAKE3 of all behind the header.
fn checksum(bytes: &[u8]) -> [u8; 32] {
    *blake3::hash(&bytes[size_of::<IndexHeader>()..]).as_bytes()
}

/// Whether directories lie in more than `most` others. The structure is that of a tree.
fn is_deeper(index: &Index<'_>, most: usize) -> bool {
    let mut ahead = VecDeque::from([(ROOT_INODE, 0)]);
    while let Some((number, depth)) = ahead.pop_front() {
        let Some(inode) = index.inode(number) else { continue };
        if depth > most {
            return true;
        }
        ahead.extend(index.entries(inode).iter().map(|entry| (entry.inode, depth + 1)));
    }
    false
}

impl Session {
    /// Publishes all blobs of this session, then an index of them that comes from another store.
    ///
    /// # Errors
    /// A content of it is neither here nor in this session.
    pub fn put_foreign_index(&mut self, index: &ForeignIndex) -> Result<IndexId> {
        let _acting = self.layout.act()?;
        for blob in index.blobs() {
            if !self.has(blob)? {
                return Err(StoreError::not_found(Kind::Blob, blob.hash));
            }
        }
        self.publish_blobs()?;
        let id = index.id();
        let existing =
            if self.store.open_index(id).is_ok() { Existing::Keep } else { Existing::Replace };
        let to = self.layout.index(id);
        self.write_record(&to, &[index.bytes()], existing)?;
        Ok(id)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::extended::Extended;
    use super::super::tree::{Attributes, Content, Node, Tree};
    use super::*;

    fn bytes_of(contents: u8) -> Vec<u8> {
        let mut tree = Tree::new();
        for number in 1..=contents {
            let blob = Blob { hash: BlobHash([number; 32]), size: u64::from(number) };
            let content = Content::Regular(Some(blob));
            let node = Node { content, attributes: Attributes::root(0o644) };
            let id = tree.add_at(Path::new(&format!("/d{number}/f")), node).unwrap();
            let mut extended = Extended::default();
            extended.insert(b"user.number", &[number]).unwrap();
            tree.set_extended(id, extended).unwrap();
        }
        tree.to_index().unwrap()
    }

    /// The same bytes with a change and a checksum that fits it.
    fn changed(change: impl FnOnce(&mut [u8])) -> Vec<u8> {
        let mut bytes = bytes_of(3);
        change(&mut bytes);
        let mut header: IndexHeader =
            bytemuck::pod_read_unaligned(&bytes[..size_of::<IndexHeader>()]);
        header.checksum = checksum(&bytes);
        bytes[..size_of::<IndexHeader>()].copy_from_slice(bytemuck::bytes_of(&header));
        bytes
    }

    #[test]
    fn what_the_writer_makes_is_read_and_renamed() {
        let bytes = bytes_of(3);
        let index = ForeignIndex::parse(&bytes, 100).unwrap();
        assert_eq!(index.id(), IndexId::from(blake3::hash(&bytes)));
        assert_eq!(index.blobs().len(), 3);
        let same: Vec<_> = index.blobs().map(|blob| blob.hash).collect();
        assert_eq!(index.renamed(&same).unwrap().id(), index.id());
        let names = [7, 8, 9].map(|byte| BlobHash([byte; 32]));
        let renamed = index.renamed(&names).unwrap();
        assert_ne!(renamed.id(), index.id());
        renamed.check(100).unwrap();
        let sizes = |index: &ForeignIndex| index.blobs().map(|blob| blob.size).collect::<Vec<_>>();
        assert_eq!(sizes(&renamed), sizes(&index));
        assert_eq!(renamed.blobs().map(|blob| blob.hash).collect::<Vec<_>>(), names);
    }

    #[test]
    fn other_bytes_are_refused() {
        let bytes = bytes_of(3);
        let refused = |bytes: &[u8]| ForeignIndex::parse(bytes, 100).unwrap_err();
        assert_eq!(refused(&[]), ForeignIndexError::Format);
        for len in 0..bytes.len() {
            refused(&bytes[..len]);
        }
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 4;
            refused(&flipped);
        }
        let few = ForeignIndex::parse(&bytes, 2).unwrap_err();
        assert!(matches!(few, ForeignIndexError::TooMany { limit: 2, .. }), "{few}");
    }

    #[test]
    fn sizes_and_depths_are_possible_ones() {
        let header: IndexHeader =
            bytemuck::pod_read_unaligned(&bytes_of(3)[..size_of::<IndexHeader>()]);
        // A file that is too large is one whose inode says so, too: this one is not.
        let size = header.blobs_offset as usize + std::mem::offset_of!(IndexBlob, size);
        let bytes = changed(|bytes| bytes[size..size + 8].fill(0xff));
        assert!(matches!(
            ForeignIndex::parse(&bytes, 100),
            Err(ForeignIndexError::Structure(StructureError::Size(_)))
        ));
        let mut tree = Tree::new();
        let deep = vec!["d"; DEPTH_MAX + 1].join("/");
        // The tree itself refuses a path that long at once, so it is made in two steps.
        let made = tree.make_directories(Path::new(&deep));
        let bytes = made.map(|_| tree.to_index().unwrap());
        if let Ok(bytes) = bytes {
            let refused = ForeignIndex::parse(&bytes, usize::MAX).unwrap_err();
            assert!(matches!(refused, ForeignIndexError::TooMany { limit: DEPTH_MAX, .. }));
        } else {
            panic!("{bytes:?}");
        }
    }

    #[test]
    fn indexes_of_any_bytes_are_survived() {
        let good = bytes_of(3);
        thaw_mutate::survive("foreign_index", &[&good[..]], 2000, |bytes| {
            let mended = match bytes.len() >= size_of::<IndexHeader>() {
                true => {
                    let mut bytes = bytes.to_vec();
                    let sum = checksum(&bytes);
                    let at = std::mem::offset_of!(IndexHeader, checksum);
                    bytes[at..at + 32].copy_from_slice(&sum);
                    bytes
                }
                false => bytes.to_vec(),
            };
            if let Ok(index) = ForeignIndex::parse(&mended, 1000) {
                let names: Vec<_> = index.blobs().map(|blob| blob.hash).collect();
                assert_eq!(index.renamed(&names).unwrap().id(), index.id());
            }
        });
    }
}
