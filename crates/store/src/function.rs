//! Functions and named root file systems: the records that everything else in
//! the store is kept for.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Context, Kind, Result, StoreError};
use crate::id::{ImageId, IndexId, Name};
use crate::image::list;
use crate::lock::lock_exclusive;
use crate::session::Session;
use crate::stage::{Existing, sync_directory};
use crate::store::Store;

/// Version of the JSON records.
pub(crate) const RECORD_VERSION: u32 = 1;

/// What the store knows about a function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FunctionRecord {
    /// [`RECORD_VERSION`]; another one is refused.
    version: u32,
    /// The function's name.
    pub name: Name,
    /// Its configuration, of which the store understands nothing.
    pub config: serde_json::Value,
    /// Its root file system.
    pub index: IndexId,
    /// Its snapshot; `None` before the first freeze.
    pub image: Option<ImageId>,
    /// When this record was written, milliseconds since the epoch.
    pub created_ms: u64,
    /// What the function was before; the garbage collector keeps it.
    pub previous: Option<PreviousVersion>,
}

/// Which version of a function a record is.
#[derive(Clone, Debug, PartialEq)]
pub struct FunctionVersion {
    config: serde_json::Value,
    index: IndexId,
    image: Option<ImageId>,
    created_ms: u64,
}

impl FunctionRecord {
    /// Tells this version of the function from all others.
    pub fn version(&self) -> FunctionVersion {
        FunctionVersion {
            config: self.config.clone(),
            index: self.index,
            image: self.image,
            created_ms: self.created_ms,
        }
    }
}

/// The version of a function that the current one replaced.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PreviousVersion {
    /// Its configuration.
    pub config: serde_json::Value,
    /// Its root file system.
    pub index: IndexId,
    /// Its snapshot.
    pub image: Option<ImageId>,
    /// When it was written, milliseconds since the epoch.
    pub created_ms: u64,
}

/// What a caller says about a function in order to store it.
#[derive(Clone, Debug, PartialEq)]
pub struct NewFunction {
    /// The function's name.
    pub name: Name,
    /// Its configuration.
    pub config: serde_json::Value,
    /// Its root file system, which must be in the store.
    pub index: IndexId,
    /// Its snapshot, which must be in the store.
    pub image: Option<ImageId>,
}

/// All functions, and those whose records cannot be read.
#[derive(Debug, Default)]
pub struct FunctionList {
    /// Readable records, sorted by name.
    pub records: Vec<FunctionRecord>,
    /// Names of damaged records with what is wrong.
    pub damaged: Vec<(Name, StoreError)>,
}

/// A root file system with a name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RootfsRecord {
    version: u32,
    /// Its name.
    pub name: Name,
    /// Its index.
    pub index: IndexId,
    /// When this record was written, milliseconds since the epoch.
    pub created_ms: u64,
    /// What is known of the container image that it was made from, of which the store understands
    /// nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<serde_json::Value>,
}

impl Session {
    /// Stores a function or a new version of it. The version that it replaces is
    /// kept as `previous`, unless that was the same or never had an image.
    pub fn put_function(&mut self, new: NewFunction) -> Result<FunctionRecord> {
        self.put_function_over(new, None)
    }

    /// Stores a new version of a function, made from `old`. If that is not the
    /// function's version any more, nothing is stored and the error is
    /// [`StoreError::Replaced`].
    pub fn replace_function(
        &mut self,
        old: &FunctionVersion,
        new: NewFunction,
    ) -> Result<FunctionRecord> {
        self.put_function_over(new, Some(old))
    }

    fn put_function_over(
        &mut self,
        new: NewFunction,
        expected: Option<&FunctionVersion>,
    ) -> Result<FunctionRecord> {
        let _acting = self.layout.act()?;
        drop(self.open_index(new.index)?);
        if let Some(image) = new.image {
            drop(self.open_image(image)?);
            for ancestor in self.image_ancestors(image)? {
                drop(self.open_image(ancestor)?);
            }
        }
        let _lock = self.lock_function(&new.name)?;
        let found = self.get_function(&new.name);
        // Under the lock: nobody stores another version before this one.
        if let Some(expected) = expected {
            let is_same = match &found {
                Ok(found) => found.version() == *expected,
                Err(StoreError::NotFound { .. }) => false,
                Err(_) => return Err(found.expect_err("an error")),
            };
            if !is_same {
                return Err(StoreError::Replaced { name: new.name });
            }
        }
        let newest = found.as_ref().map_or(0, |old| old.created_ms + 1);
        let previous = match found {
            Ok(old) if old.index == new.index && old.image == new.image => old.previous,
            Ok(old) if old.image.is_none() => old.previous,
            Ok(old) => Some(PreviousVersion {
                config: old.config,
                index: old.index,
                image: old.image,
                created_ms: old.created_ms,
            }),
            // Storing the function again is the way out of a damaged record.
            Err(StoreError::NotFound { .. } | StoreError::Damaged { .. }) => None,
            Err(error) => return Err(error),
        };
        let record = FunctionRecord {
            version: RECORD_VERSION,
            name: new.name,
            config: new.config,
            index: new.index,
            image: new.image,
            // Versions that are stored within one millisecond are told apart, too.
            created_ms: now_ms().max(newest),
            previous,
        };
        let to = self.layout.function_record(&record.name);
        self.write_record(&to, &[&to_json(&record)], Existing::Replace)?;
        sync_directory(&self.layout.functions())?;
        Ok(record)
    }

    /// Makes a function's directory and locks it, so that of two builds of one
    /// function each sees the other's version as previous.
    fn lock_function(&self, name: &Name) -> Result<File> {
        let path = self.layout.function(name);
        loop {
            fs::create_dir_all(&path).context("create", &path)?;
            match lock_directory(&path)? {
                Some(lock) => return Ok(lock),
                None => continue, // The function was removed at this moment.
            }
        }
    }

    /// Gives an index a name, which it takes away from another index.
    pub fn put_rootfs(&mut self, name: &Name, index: IndexId) -> Result<RootfsRecord> {
        self.put_rootfs_of(name, index, None)
    }

    /// The same, with what is known of the container image that it was made from.
    pub fn put_rootfs_of(
        &mut self,
        name: &Name,
        index: IndexId,
        image: Option<serde_json::Value>,
    ) -> Result<RootfsRecord> {
        let _acting = self.layout.act()?;
        drop(self.open_index(index)?);
        let record = RootfsRecord {
            version: RECORD_VERSION,
            name: name.clone(),
            index,
            created_ms: now_ms(),
            image,
        };
        let to = self.layout.rootfs(name);
        self.write_record(&to, &[&to_json(&record)], Existing::Replace)?;
        Ok(record)
    }
}

impl Store {
    /// The record of a function.
    pub fn get_function(&self, name: &Name) -> Result<FunctionRecord> {
        let _acting = self.layout.act()?;
        let path = self.layout.function_record(name);
        let record: FunctionRecord = read_record(&path, Kind::Function, name)?;
        check_record(record.version, &record.name, Kind::Function, name)?;
        Ok(record)
    }

    /// All functions. One damaged record does not hide the others.
    pub fn list_functions(&self) -> Result<FunctionList> {
        let _acting = self.layout.act()?;
        let mut found = FunctionList::default();
        for name in names(&self.layout.functions())? {
            match self.get_function(&name) {
                Ok(record) => found.records.push(record),
                Err(error) if error.is_not_found() => {} // Being made or removed.
                Err(error) => found.damaged.push((name, error)),
            }
        }
        Ok(found)
    }

    /// Removes a function; its files go at the next garbage collection. Instances
    /// that run go on.
    pub fn remove_function(&self, name: &Name) -> Result<()> {
        let _acting = self.layout.act()?;
        let mut session = self.session()?;
        let directory = session.layout.function(name);
        let path = session.layout.function_record(name);
        let Some(_lock) = lock_directory(&directory)? else {
            return Err(StoreError::not_found(Kind::Function, name));
        };
        if !session.remove_record(&path)? {
            return Err(StoreError::not_found(Kind::Function, name));
        }
        match fs::remove_dir(&directory) {
            // Somebody else's file lies there; it is not ours to remove.
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {}
            result => result.context("remove", &directory)?,
        }
        sync_directory(&session.layout.functions())
    }

    /// The index that a named root file system stands for.
    pub fn get_rootfs(&self, name: &Name) -> Result<RootfsRecord> {
        let _acting = self.layout.act()?;
        let path = self.layout.rootfs(name);
        let record: RootfsRecord = read_record(&path, Kind::Rootfs, name)?;
        check_record(record.version, &record.name, Kind::Rootfs, name)?;
        Ok(record)
    }

    /// All named root file systems, sorted by name; fails at the first damaged one.
    pub fn list_rootfs(&self) -> Result<Vec<RootfsRecord>> {
        let _acting = self.layout.act()?;
        let mut records = Vec::new();
        for name in names(&self.layout.rootfs_names())? {
            match self.get_rootfs(&name) {
                Err(error) if error.is_not_found() => {}
                result => records.push(result?),
            }
        }
        Ok(records)
    }

    /// Takes the name from a root file system; its files go at the next garbage
    /// collection unless something else uses them.
    pub fn remove_rootfs(&self, name: &Name) -> Result<()> {
        let _acting = self.layout.act()?;
        let mut session = self.session()?;
        let path = session.layout.rootfs(name);
        match session.remove_record(&path)? {
            true => Ok(()),
            false => Err(StoreError::not_found(Kind::Rootfs, name)),
        }
    }
}

/// Opens a directory and waits for its lock; `None` if it is or goes away.
fn lock_directory(path: &Path) -> Result<Option<File>> {
    let lock = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        result => result.context("open", path)?,
    };
    lock_exclusive(&lock, path)?;
    let locked = lock.metadata().context("inspect", path)?;
    let still_there =
        fs::metadata(path).is_ok_and(|now| now.ino() == locked.ino() && now.dev() == locked.dev());
    Ok(still_there.then_some(lock))
}

/// The entries of a directory that are names of records.
pub(crate) fn names(directory: &Path) -> Result<Vec<Name>> {
    let paths = list(directory)?;
    Ok(paths.iter().filter_map(|path| Name::new(path.file_name()?.to_str()?).ok()).collect())
}

pub(crate) fn read_record<T: DeserializeOwned>(path: &Path, kind: Kind, name: &Name) -> Result<T> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Err(StoreError::not_found(kind, name));
        }
        Err(error) => return Err(StoreError::io("read", path, error)),
    };
    serde_json::from_slice(&bytes).map_err(|error| StoreError::damaged(kind, name, error))
}

pub(crate) fn check_record(version: u32, found: &Name, kind: Kind, name: &Name) -> Result<()> {
    if version != RECORD_VERSION {
        let why = format!("its record has version {version}, this program knows {RECORD_VERSION}");
        return Err(StoreError::damaged(kind, name, why));
    }
    if found != name {
        return Err(StoreError::damaged(kind, name, format!("its record is that of {found}")));
    }
    Ok(())
}

pub(crate) fn to_json(record: &impl Serialize) -> Vec<u8> {
    let mut json = serde_json::to_vec_pretty(record)
        .expect("records have text keys and no value that JSON cannot express");
    json.push(b'\n');
    json
}

pub(crate) fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |elapsed| elapsed.as_millis() as u64)
}
