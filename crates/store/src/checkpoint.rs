//! Checkpoints: images of running sandboxes, by names that their owners choose.
//!
//! A checkpoint holds whatever its program held, secrets too, so only the store's owner can
//! read its files.

use std::fs::File;

use serde::{Deserialize, Serialize};

use crate::error::{Context, Kind, Result, StoreError};
use crate::function::{RECORD_VERSION, check_record, names, now_ms, read_record, to_json};
use crate::id::{ImageId, IndexId, Name};
use crate::lock::lock_exclusive;
use crate::session::Session;
use crate::stage::{Existing, RECORD_MODE};
use crate::store::Store;

/// What the store knows about a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointRecord {
    /// [`RECORD_VERSION`]; another one is refused.
    version: u32,
    /// Its name.
    pub name: Name,
    /// Whose it is: the tenant; `None`: nobody's but the store's owner's.
    pub owner: Option<Name>,
    /// What is needed to run it, of which the store understands nothing.
    pub config: serde_json::Value,
    /// Its root file system.
    pub index: IndexId,
    /// Its image.
    pub image: ImageId,
    /// When this record was written, milliseconds since the epoch.
    pub created_ms: u64,
}

/// What a caller says about a checkpoint in order to store it.
#[derive(Clone, Debug, PartialEq)]
pub struct NewCheckpoint {
    /// Its name.
    pub name: Name,
    /// Whose it is.
    pub owner: Option<Name>,
    /// What is needed to run it.
    pub config: serde_json::Value,
    /// Its root file system, which must be in the store.
    pub index: IndexId,
    /// Its image, which must be in the store.
    pub image: ImageId,
}

/// All checkpoints, and those whose records cannot be read.
#[derive(Debug, Default)]
pub struct CheckpointList {
    /// Readable records, sorted by name.
    pub records: Vec<CheckpointRecord>,
    /// Names of damaged records with what is wrong.
    pub damaged: Vec<(Name, StoreError)>,
}

impl Session {
    /// Stores a checkpoint. One of that name and owner is replaced; its image stays as long as
    /// others refer to it.
    ///
    /// # Errors
    /// The name is somebody else's ([`StoreError::Owned`]), or the index or the image, or one of
    /// its ancestors, is not there.
    pub fn put_checkpoint(&mut self, new: NewCheckpoint) -> Result<CheckpointRecord> {
        let _acting = self.layout.act()?;
        drop(self.open_index(new.index)?);
        drop(self.open_image(new.image)?);
        for ancestor in self.image_ancestors(new.image)? {
            drop(self.open_image(ancestor)?);
        }
        let _lock = self.lock_checkpoints()?;
        match self.get_checkpoint(&new.name) {
            Ok(old) if old.owner != new.owner => {
                return Err(StoreError::Owned { kind: Kind::Checkpoint, name: new.name });
            }
            Ok(_) => {}
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
        let record = CheckpointRecord {
            version: RECORD_VERSION,
            name: new.name,
            owner: new.owner,
            config: new.config,
            index: new.index,
            image: new.image,
            created_ms: now_ms(),
        };
        let to = self.layout.checkpoint(&record.name);
        self.write_record_as(&to, &[&to_json(&record)], Existing::Replace, RECORD_MODE)?;
        Ok(record)
    }
}

impl Store {
    /// Keeps others from storing and removing checkpoints.
    fn lock_checkpoints(&self) -> Result<File> {
        let path = self.layout.checkpoints();
        let directory = File::open(&path).context("open", &path)?;
        lock_exclusive(&directory, &path)?;
        Ok(directory)
    }

    /// The record of a checkpoint.
    pub fn get_checkpoint(&self, name: &Name) -> Result<CheckpointRecord> {
        let _acting = self.layout.act()?;
        let path = self.layout.checkpoint(name);
        let record: CheckpointRecord = read_record(&path, Kind::Checkpoint, name)?;
        check_record(record.version, &record.name, Kind::Checkpoint, name)?;
        Ok(record)
    }

    /// All checkpoints. One damaged record does not hide the others.
    pub fn list_checkpoints(&self) -> Result<CheckpointList> {
        let _acting = self.layout.act()?;
        let mut found = CheckpointList::default();
        for name in names(&self.layout.checkpoints())? {
            match self.get_checkpoint(&name) {
                Ok(record) => found.records.push(record),
                Err(error) if error.is_not_found() => {} // Being removed.
                Err(error) => found.damaged.push((name, error)),
            }
        }
        Ok(found)
    }

    /// Removes a checkpoint; its files go at the next garbage collection. Sandboxes that were
    /// made of it go on.
    ///
    /// # Errors
    /// Other checkpoints or functions hold only how they differ from it
    /// ([`StoreError::InUse`]): what it holds could not be erased.
    pub fn remove_checkpoint(&self, name: &Name) -> Result<()> {
        let _acting = self.layout.act()?;
        let mut session = self.session()?;
        let _lock = self.lock_checkpoints()?;
        let image = match self.get_checkpoint(name) {
            Ok(record) => Some(record.image),
            // A damaged one can only be removed.
            Err(StoreError::Damaged { .. }) => None,
            Err(error) => return Err(error),
        };
        let by = image.map_or(Ok(Vec::new()), |image| self.descendants(image))?;
        if !by.is_empty() {
            return Err(StoreError::InUse { kind: Kind::Checkpoint, name: name.clone(), by });
        }
        let path = session.layout.checkpoint(name);
        match session.remove_record(&path)? {
            true => Ok(()),
            false => Err(StoreError::not_found(Kind::Checkpoint, name)),
        }
    }

    /// The checkpoints and functions whose images refer to an image.
    ///
    /// # Errors
    /// A record is damaged, so that nobody knows.
    pub fn descendants(&self, image: ImageId) -> Result<Vec<Name>> {
        let _acting = self.layout.act()?;
        let mut all: Vec<(Name, ImageId)> = Vec::new();
        for checkpoint in self.list_checkpoints()?.records {
            all.push((checkpoint.name, checkpoint.image));
        }
        for function in self.list_functions()?.records {
            let images = function.versions().into_iter().filter_map(|version| version.image);
            all.extend(images.map(|image| (function.name.clone(), image)));
        }
        let mut found = Vec::new();
        for (name, other) in all.into_iter().filter(|(_, other)| *other != image) {
            if self.image_ancestors(other)?.contains(&image) {
                found.push(name);
            }
        }
        found.sort();
        found.dedup();
        Ok(found)
    }
}
