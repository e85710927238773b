//! How much some versions of functions occupy in the store together.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;

use crate::error::{Context, Result, StoreError};
use crate::id::{BlobHash, ImageId, IndexId};
use crate::lock::lock_exclusive;
use crate::store::Store;
use crate::usage::allocated;

/// What versions of functions need, each file once: equal files are one blob, and versions
/// may have an index or an image in common.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    indexes: BTreeMap<IndexId, u64>,
    images: BTreeMap<ImageId, u64>,
    blobs: BTreeMap<BlobHash, u64>,
}

impl Footprint {
    /// Adds a version of a function, or a checkpoint, with what its image refers to. What is not in the store occupies nothing.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn add(&mut self, store: &Store, index: IndexId, image: Option<ImageId>) -> Result<()> {
        let _acting = store.layout.act()?;
        if let Entry::Vacant(vacant) = self.indexes.entry(index) {
            vacant.insert(allocated(&store.layout.index(index))?);
            match store.open_index(index) {
                Ok(open) => {
                    let blobs = open.index().blobs().iter();
                    self.blobs.extend(blobs.map(|blob| (BlobHash(blob.hash), blob.size)));
                }
                // Nobody can say what it needs, and building anew is what mends it.
                Err(StoreError::NotFound { .. } | StoreError::Damaged { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let Some(image) = image else { return Ok(()) };
        self.add_image(store, image)?;
        match store.image_ancestors(image) {
            Ok(ancestors) => {
                ancestors.into_iter().try_for_each(|ancestor| self.add_image(store, ancestor))
            }
            // Nobody can say what it needs, and it cannot be booted.
            Err(StoreError::Damaged { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn add_image(&mut self, store: &Store, image: ImageId) -> Result<()> {
        if let Entry::Vacant(vacant) = self.images.entry(image) {
            vacant.insert(store.image_bytes(image)?);
        }
        Ok(())
    }

    /// Bytes in all: of images and indexes what they occupy on disk, of other files their
    /// length.
    pub fn bytes(&self) -> u64 {
        let all = self.indexes.values().chain(self.images.values()).chain(self.blobs.values());
        all.fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }
}

impl Store {
    /// Bytes that an image, its working set and its prefetch file occupy on disk: of an image that is
    /// packed what it occupies when it is booted, so that a tenant's bill does not depend on what
    /// others have the host unpack.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn image_bytes(&self, image: ImageId) -> Result<u64> {
        let layout = &self.layout;
        let files = [layout.image(image), layout.working_set(image), layout.prefetch(image)];
        let bytes = files.iter().map(|path| allocated(path)).sum::<Result<u64>>()?;
        if layout.image(image).exists() {
            return Ok(bytes);
        }
        match self.packed_sizes(image) {
            Ok(packed) => Ok(bytes + packed.stored),
            // What cannot be booted occupies what lies there.
            Err(StoreError::NotFound { .. } | StoreError::Damaged { .. }) => {
                Ok(bytes + allocated(&layout.packed_image(image))?)
            }
            Err(error) => Err(error),
        }
    }

    /// Waits for its turn among all that count what functions occupy before they store one:
    /// two must not both find room that is there once. The turn ends with the file.
    ///
    /// # Errors
    /// The lock cannot be taken.
    pub fn counting_turn(&self) -> Result<fs::File> {
        let _acting = self.layout.act()?;
        let path = self.layout.functions();
        let directory = fs::File::open(&path).context("open", &path)?;
        lock_exclusive(&directory, &path)?;
        Ok(directory)
    }
}
