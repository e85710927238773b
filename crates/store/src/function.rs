//! Functions and named root file systems: the records that everything else in
//! the store is kept for.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Context, Kind, Result, StoreError};
use crate::id::{ImageId, IndexId, Name};
use crate::image::list;
use crate::lock::lock_exclusive;
use crate::session::{Session, parent};
use crate::stage::{Existing, SHARED_MODE, publish, sync_all, sync_directory};
use crate::store::Store;
use crate::version::{RolledBack, Share, Version};

/// Version of the JSON records, but those of functions.
pub(crate) const RECORD_VERSION: u32 = 1;
/// Version of the records of functions. The one before it had a present version and a previous
/// one, without numbers.
const FUNCTION_VERSION: u32 = 2;

/// What the store knows about a function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FunctionRecord {
    /// [`FUNCTION_VERSION`]; a later one is refused.
    version: u32,
    /// The function's name.
    pub name: Name,
    /// The configuration of the active version, of which the store understands nothing.
    pub config: serde_json::Value,
    /// Its root file system.
    pub index: IndexId,
    /// Its snapshot; `None` before the first freeze.
    pub image: Option<ImageId>,
    /// When it was stored, milliseconds since the epoch.
    pub created_ms: u64,
    /// Its number.
    #[serde(default)]
    pub number: u32,
    /// A name for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<Name>,
    /// Since when it is active, milliseconds since the epoch.
    #[serde(default)]
    pub activated_ms: u64,
    /// The other versions, by number; the garbage collector keeps them.
    #[serde(default)]
    pub others: Vec<Version>,
    /// Those of them that get requests, too.
    #[serde(default)]
    pub split: Vec<Share>,
    /// Versions that were active before, the last one last.
    #[serde(default)]
    pub(crate) history: Vec<u32>,
    /// The number of the next version.
    #[serde(default)]
    pub(crate) next: u32,
    /// What was taken out of service for its failures, since somebody last changed this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolled_back: Option<RolledBack>,
    /// The version before, in records of the version before.
    #[serde(default, skip_serializing)]
    previous: Option<Version>,
}

/// Which version of a function something was made from.
#[derive(Clone, Debug, PartialEq)]
pub struct FunctionVersion {
    number: u32,
    config: serde_json::Value,
    index: IndexId,
    image: Option<ImageId>,
    created_ms: u64,
}

impl FunctionRecord {
    /// Tells the active version of the function from all others, and from itself with another
    /// image or configuration.
    pub fn version(&self) -> FunctionVersion {
        (&self.active()).into()
    }

    /// A function without versions, which [`FunctionRecord::add`] changes at once.
    fn first(name: Name, version: Version) -> Self {
        let Version { label, config, index, image, created_ms, .. } = version;
        Self {
            version: FUNCTION_VERSION,
            name,
            config,
            index,
            image,
            created_ms,
            number: 1,
            label,
            activated_ms: now_ms(),
            others: Vec::new(),
            split: Vec::new(),
            history: Vec::new(),
            next: 2,
            rolled_back: None,
            previous: None,
        }
    }

    /// Numbers the versions of a record of the version before.
    pub(crate) fn upgrade(&mut self) {
        if self.version >= FUNCTION_VERSION {
            return;
        }
        self.version = FUNCTION_VERSION;
        self.activated_ms = self.created_ms;
        self.number = 1;
        if let Some(previous) = self.previous.take() {
            self.others = vec![Version { number: 1, ..previous }];
            self.history = vec![1];
            self.number = 2;
        }
        self.next = self.number + 1;
    }
}

impl From<&Version> for FunctionVersion {
    fn from(version: &Version) -> Self {
        let Version { number, config, index, image, created_ms, .. } = version.clone();
        Self { number, config, index, image, created_ms }
    }
}

/// What becomes of a version that is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// All requests go to it.
    #[default]
    Now,
    /// It gets none until it is activated. A function's first version is active in any case.
    Later,
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

impl FunctionRecord {
    /// A version that is to be added. Versions that are stored within one millisecond are told
    /// apart, too.
    fn newest(&self, new: NewFunction, label: Option<Name>) -> Version {
        let NewFunction { config, index, image, .. } = new;
        let created_ms = now_ms().max(self.newest_ms() + 1);
        Version { number: 0, label, config, index, image, created_ms, problem: None }
    }

    /// When the newest version was stored.
    fn newest_ms(&self) -> u64 {
        let others = self.others.iter().map(|other| other.created_ms);
        others.chain([self.created_ms]).max().unwrap_or_default()
    }

    /// Gives a version other contents.
    fn replace(&mut self, number: u32, new: NewFunction) {
        let Version { config, index, image, created_ms, .. } = self.newest(new, None);
        if number == self.number {
            (self.config, self.index) = (config, index);
            (self.image, self.created_ms) = (image, created_ms);
        } else if let Some(other) = self.others.iter_mut().find(|other| other.number == number) {
            (other.config, other.index) = (config, index);
            (other.image, other.created_ms) = (image, created_ms);
        }
    }
}

impl Session {
    /// Stores a function or a new version of it, to which all requests go.
    pub fn put_function(&mut self, new: NewFunction) -> Result<FunctionRecord> {
        self.put_version(new, None, Activation::Now)
    }

    /// Stores a function or a new version of it. The same files and image as those of the active
    /// version are that version, with another configuration; but one that is not to be active is
    /// another version then.
    ///
    /// # Errors
    /// Something that it needs is not there, or the record is that of a later program.
    pub fn put_version(
        &mut self,
        new: NewFunction,
        label: Option<Name>,
        activation: Activation,
    ) -> Result<FunctionRecord> {
        let _acting = self.layout.act()?;
        self.check_is_there(&new)?;
        let _lock = self.lock_function(&new.name)?;
        let name = new.name.clone();
        let record = match self.get_function(&name) {
            Ok(mut old) => {
                let is_same = old.index == new.index && old.image == new.image;
                let changes_active = activation == Activation::Later && old.config != new.config;
                if is_same && !changes_active || old.image.is_none() {
                    let number = old.number;
                    old.replace(number, new);
                    old.label = label.or(old.label);
                } else {
                    let version = old.newest(new, label);
                    let number = old.add(version);
                    if activation == Activation::Now {
                        old.activate(number).expect("it was added with its image");
                    }
                }
                old
            }
            // Storing the function again is the way out of a damaged record.
            Err(StoreError::NotFound { .. } | StoreError::Damaged { .. }) => {
                let NewFunction { config, index, image, .. } = new;
                let (created_ms, problem) = (now_ms(), None);
                let number = 1;
                let first = Version { number, label, config, index, image, created_ms, problem };
                FunctionRecord::first(name, first)
            }
            Err(error) => return Err(error),
        };
        self.write_function(record)
    }

    /// Gives a version another image or configuration; it keeps its number. If `old` is not in
    /// the record any more, nothing is stored and the error is [`StoreError::Replaced`].
    pub fn replace_function(
        &mut self,
        old: &FunctionVersion,
        new: NewFunction,
    ) -> Result<FunctionRecord> {
        let _acting = self.layout.act()?;
        self.check_is_there(&new)?;
        let _lock = self.lock_function(&new.name)?;
        let mut record = self.get_if_there(old, &new.name)?;
        record.replace(old.number, new);
        self.write_function(record)
    }

    /// Stores a version that was made from `old`, and makes it active in its place. If `old` is
    /// not active any more, nothing is stored and the error is [`StoreError::Replaced`].
    pub fn put_version_from(
        &mut self,
        old: &FunctionVersion,
        new: NewFunction,
    ) -> Result<FunctionRecord> {
        let _acting = self.layout.act()?;
        self.check_is_there(&new)?;
        let _lock = self.lock_function(&new.name)?;
        let mut record = self.get_if_there(old, &new.name)?;
        if record.number != old.number {
            return Err(StoreError::Replaced { name: new.name });
        }
        let version = record.newest(new, None);
        let number = record.add(version);
        record.activate(number).expect("it was added with its image");
        self.write_function(record)
    }

    /// Changes which versions of a function get its requests.
    ///
    /// # Errors
    /// There is no such function, or `change` refuses; the record is as before then.
    pub fn change_function<E: From<StoreError>>(
        &mut self,
        name: &Name,
        change: impl FnOnce(&mut FunctionRecord) -> std::result::Result<(), E>,
    ) -> std::result::Result<FunctionRecord, E> {
        let _acting = self.layout.act()?;
        let directory = self.layout.function(name);
        let Some(_lock) = lock_directory(&directory)? else {
            return Err(StoreError::not_found(Kind::Function, name).into());
        };
        let mut record = self.get_function(name)?;
        let before = record.clone();
        change(&mut record)?;
        match record == before {
            true => Ok(record),
            false => Ok(self.write_function(record)?),
        }
    }

    /// What a record refers to must be in the store.
    fn check_is_there(&self, new: &NewFunction) -> Result<()> {
        drop(self.open_index(new.index)?);
        if let Some(image) = new.image {
            drop(self.open_image(image)?);
            for ancestor in self.image_ancestors(image)? {
                drop(self.open_image(ancestor)?);
            }
        }
        Ok(())
    }

    /// The record of a function, under its lock, if it has this version still.
    fn get_if_there(&self, version: &FunctionVersion, name: &Name) -> Result<FunctionRecord> {
        let found = match self.get_function(name) {
            Err(StoreError::NotFound { .. }) => None,
            found => Some(found?),
        };
        let has_it = |record: &FunctionRecord| {
            record.versions().iter().any(|found| FunctionVersion::from(found) == *version)
        };
        found.filter(has_it).ok_or_else(|| StoreError::Replaced { name: name.clone() })
    }

    fn write_function(&mut self, record: FunctionRecord) -> Result<FunctionRecord> {
        let to = self.layout.function_record(&record.name);
        let json = to_json(&record);
        let reserve = self.reserve();
        reserve.spend(|| {
            let staged = self.stage.write_file(&[&json], SHARED_MODE)?;
            let published =
                sync_all(&[&staged]).and_then(|()| publish(&staged, &to, Existing::Replace));
            if published.is_err() {
                // Another try takes its own room.
                let _ = fs::remove_file(&staged);
            }
            published?;
            sync_all(&[parent(&to), &self.layout.functions()])
        })?;
        Ok(record)
    }

    /// Makes a function's directory and locks it, so that of two builds of one
    /// function each sees the other's version as previous.
    fn lock_function(&self, name: &Name) -> Result<File> {
        let path = self.layout.function(name);
        loop {
            self.reserve().spend(|| fs::create_dir_all(&path).context("create", &path))?;
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
        let known = 1..=FUNCTION_VERSION;
        let mut record: FunctionRecord =
            read_record_up_to(*known.end(), &path, Kind::Function, name)?;
        check_versions(record.version, &known, &record.name, Kind::Function, name)?;
        record.upgrade();
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
    read_record_up_to(RECORD_VERSION, path, kind, name)
}

/// What all records of all versions begin with.
#[derive(Deserialize)]
struct Versioned {
    version: u64,
}

/// Reads a record that has no later version than this one.
fn read_record_up_to<T: DeserializeOwned>(
    known: u32,
    path: &Path,
    kind: Kind,
    name: &Name,
) -> Result<T> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Err(StoreError::not_found(kind, name));
        }
        Err(error) => return Err(StoreError::io("read", path, error)),
    };
    let damaged = |error| StoreError::damaged(kind, name, error);
    let Versioned { version } = serde_json::from_slice(&bytes).map_err(damaged)?;
    if version > known.into() {
        let name = name.to_string();
        return Err(StoreError::LaterRecord { kind, name, version, known });
    }
    serde_json::from_slice(&bytes).map_err(damaged)
}

pub(crate) fn check_record(version: u32, found: &Name, kind: Kind, name: &Name) -> Result<()> {
    check_versions(version, &(RECORD_VERSION..=RECORD_VERSION), found, kind, name)
}

fn check_versions(
    version: u32,
    known: &RangeInclusive<u32>,
    found: &Name,
    kind: Kind,
    name: &Name,
) -> Result<()> {
    if !known.contains(&version) {
        let why = format!("its record has version {version}, this program knows {}", known.end());
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
