//! The files that a packed image differs from.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;

use super::WRONG_CONTENT;
use super::codec::read_padded;
use super::format::Source;
use crate::error::{Context, Kind, Result, StoreError};
use crate::sparse::image_id;
use crate::store::Store;

/// Sources whose bytes were found to match their names.
#[derive(Debug, Default)]
pub(crate) struct WholeSources(BTreeSet<Source>);

/// The files that a packed image refers to, opened when they are needed.
pub(super) struct Sources<'a> {
    store: &'a Store,
    depth: u32,
    open: HashMap<Source, File>,
    /// Those that are known to be whole. The others are hashed when they are opened; without it,
    /// none is.
    whole: Option<&'a mut WholeSources>,
    /// Why the last one could not be opened.
    pub failed: Option<StoreError>,
}

impl<'a> Sources<'a> {
    /// For an image that is the `depth`th one that is being unpacked, each because of the one
    /// before it.
    pub fn new(store: &'a Store, depth: u32, whole: Option<&'a mut WholeSources>) -> Self {
        Self { store, depth, open: HashMap::new(), whole, failed: None }
    }

    /// How many images are being unpacked.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Reads from a source; bytes behind its end are zero.
    ///
    /// # Errors
    /// The host's; of one that cannot be used, with the reason in `failed`.
    pub fn read(&mut self, source: Source, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        if !self.open.contains_key(&source) {
            match self.open(source) {
                Ok(file) => drop(self.open.insert(source, file)),
                Err(error) => {
                    self.failed = Some(error);
                    return Err(io::ErrorKind::NotFound.into());
                }
            }
        }
        read_padded(&self.open[&source], buffer, at)
    }

    fn open(&mut self, source: Source) -> Result<File> {
        let file = match source {
            Source::Image(id) => self.store.open_image_beneath(id, self.depth),
            Source::Blob(hash) => self.store.open_blob(hash),
        }?;
        if let Some(whole) = &mut self.whole
            && !whole.0.contains(&source)
        {
            check(self.store, source, &file)?;
            whole.0.insert(source);
        }
        Ok(file)
    }
}

/// Compares a source with its name.
fn check(store: &Store, source: Source, file: &File) -> Result<()> {
    match source {
        Source::Image(id) => {
            let found = image_id(file).context("read", &store.layout.image(id))?;
            match found == id {
                true => Ok(()),
                false => Err(StoreError::damaged(Kind::Image, id, WRONG_CONTENT)),
            }
        }
        Source::Blob(hash) => match store.check_blob(hash, file, &store.domains()?)? {
            (true, _) => Ok(()),
            (false, _) => Err(StoreError::damaged(Kind::Blob, hash, WRONG_CONTENT)),
        },
    }
}
