//! Storing and opening rootfs indexes.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use thaw_abi::rootfs::{Index, IndexError};

use super::tree::Tree;
#[cfg(doc)]
use super::tree::TreeError;
use crate::blob::Blob;
use crate::error::{Context, Kind, Result, StoreError};
use crate::id::{BlobHash, IndexId};
use crate::lock::lock_shared;
use crate::session::{Session, parent};
use crate::stage::{Existing, sync_directory};
use crate::store::{Store, open_existing};

/// An index whose checksum has been verified. While it lives, or a descriptor
/// made from its file does, the garbage collector keeps the index and its blobs,
/// even if nothing in the store refers to them any more.
#[derive(Debug)]
pub struct OpenIndex {
    id: IndexId,
    file: File,
    len: usize,
    /// The file's content, in words so that it is aligned as the format wants.
    words: Vec<u64>,
}

impl OpenIndex {
    /// Its name.
    pub fn id(&self) -> IndexId {
        self.id
    }

    /// The index file, read-only and close-on-exec, to be handed to a sandbox.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Bytes of the index file.
    pub fn file_len(&self) -> u64 {
        self.len as u64
    }

    /// The content.
    pub fn index(&self) -> Index<'_> {
        Index::parse(self.bytes()).expect("the index was parsed when it was opened")
    }

    /// The blob with this number in the index; `None` if there is none, as when
    /// a hostile sandbox asks.
    pub fn blob(&self, number: u32) -> Option<Blob> {
        let blob = self.index().blobs().get(number as usize)?;
        Some(Blob { hash: BlobHash(blob.hash), size: blob.size })
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

impl AsFd for OpenIndex {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Session {
    /// Publishes all blobs of this session, then the tree as an index of them.
    pub fn put_index(&mut self, tree: &Tree) -> Result<IndexId> {
        self.put_index_bytes(&tree.to_index()?)
    }

    /// The same as an index that extends `base`: it has all inodes and blobs of that under the
    /// same numbers ([`Tree::to_index_over`]).
    ///
    /// # Errors
    /// [`TreeError::Extends`] if the tree lacks a file of `base`; nothing is stored then.
    pub fn put_index_over(&mut self, tree: &Tree, base: &OpenIndex) -> Result<IndexId> {
        self.put_index_bytes(&tree.to_index_over(&base.index())?)
    }

    fn put_index_bytes(&mut self, bytes: &[u8]) -> Result<IndexId> {
        let _acting = self.layout.act()?;
        self.publish_blobs()?;
        let id = IndexId::from(blake3::hash(bytes));
        let to = self.layout.index(id);
        // An intact file is kept, because sandboxes share its pages. Whoever has just made it may not
        // have come to make its name durable. A damaged one is replaced.
        match self.store.open_index(id) {
            Ok(_) => sync_directory(parent(&to))?,
            Err(_) => self.write_record(&to, &[bytes], Existing::Replace)?,
        }
        Ok(id)
    }
}

impl Store {
    /// Opens an index, verifies its checksum and keeps it from being collected.
    pub fn open_index(&self, id: IndexId) -> Result<OpenIndex> {
        let _acting = self.layout.act()?;
        let path = self.layout.index(id);
        let file = open_existing(&path, Kind::Index, id)?;
        lock_shared(&file, &path)?;
        let metadata = file.metadata().context("inspect", &path)?;
        if metadata.nlink() == 0 {
            // Collected between the opening and the lock.
            return Err(StoreError::not_found(Kind::Index, id));
        }
        let len = usize::try_from(metadata.len())
            .map_err(|_| StoreError::damaged(Kind::Index, id, "it is too large"))?;
        let mut words = vec![0u64; len.div_ceil(8)];
        let bytes = &mut bytemuck::cast_slice_mut(&mut words)[..len];
        (&file).read_exact(bytes).context("read", &path)?;
        if IndexId::from(blake3::hash(bytes)) != id {
            return Err(StoreError::damaged(Kind::Index, id, "its bytes do not match its name"));
        }
        match Index::parse(bytes) {
            Ok(_) => Ok(OpenIndex { id, file, len, words }),
            Err(IndexError::Version(version)) => Err(StoreError::damaged(
                Kind::Index,
                id,
                format!("it has version {version}, which this program does not know"),
            )),
            Err(error) => Err(StoreError::damaged(Kind::Index, id, format!("{error:?}"))),
        }
    }
}
