//! What occupies the disk, and who shares it.
//!
//! Everything that is kept for somebody is a *user*: a function with its versions, a checkpoint, a
//! named root file system, and whoever the caller names. A user needs *parts*: images, indexes and
//! blobs, each of which lies in the store once. A part that one user alone needs is its own; removing
//! the user frees it. All sizes are of blocks on disk (`st_blocks`), holes are free.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::error::{Result, StoreError};
use crate::function::FunctionRecord;
use crate::id::{BlobHash, ImageId, IndexId, KernelId, Name};
use crate::layout::ImageFile;
use crate::store::Store;

/// What needs files of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UserKind {
    /// A function, with its present version and the one before.
    Function,
    /// A checkpoint.
    Checkpoint,
    /// A root file system with a name.
    Rootfs,
    /// What the caller has named.
    Other,
}

/// Somebody who needs files of the store beside its records, such as an instance that is asleep.
#[derive(Clone, Debug)]
pub struct OtherUser {
    /// What the caller calls it.
    pub name: Name,
    /// Its root file system.
    pub index: IndexId,
    /// Its image, or the one that its own image differs from.
    pub image: Option<ImageId>,
}

/// One user.
#[derive(Clone, Debug)]
pub struct User {
    /// What it is.
    pub kind: UserKind,
    /// Its name.
    pub name: Name,
    /// What its record holds that the store does not understand.
    pub config: serde_json::Value,
    /// The image that its present image differs from; `None`: it has all of its memory itself.
    pub base: Option<ImageId>,
    /// Bytes of its record.
    record: u64,
    /// Numbers of all parts that it needs, each once.
    parts: BTreeSet<u32>,
    /// Those of them that are images which others of its images differ from.
    ancestors: BTreeSet<u32>,
}

/// Bytes on disk that some users need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Needed by nobody else: removing them frees it.
    pub own: u64,
    /// Needed by others, too.
    pub shared: u64,
    /// What of both lies in images that theirs differ from.
    pub base: u64,
}

/// A build of the Thaw kernel in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelUse {
    /// Its name.
    pub id: KernelId,
    /// Bytes on disk.
    pub bytes: u64,
    /// Images of users that need it.
    pub images: usize,
}

/// Bytes on disk of all that is in the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredBytes {
    /// Images.
    pub images: u64,
    /// Working sets, and their pages in prefetch files.
    pub working_sets: u64,
    /// Contents of regular files.
    pub blobs: u64,
    /// Indexes of root file systems.
    pub indexes: u64,
    /// Builds of the Thaw kernel.
    pub kernels: u64,
    /// Records of functions, checkpoints, root file systems and images, the table of known files, and
    /// the reserve for records on a full disk.
    pub records: u64,
    /// What sessions have not published yet.
    pub unpublished: u64,
    /// What of all this nobody needs.
    pub unused: u64,
}

impl StoredBytes {
    /// All of it.
    pub fn total(&self) -> u64 {
        let Self { images, working_sets, blobs, indexes, kernels, records, unpublished, unused: _ } =
            *self;
        images + working_sets + blobs + indexes + kernels + records + unpublished
    }
}

/// What occupies the disk, and who shares it.
#[derive(Clone, Debug, Default)]
pub struct StoreUsage {
    users: Vec<User>,
    parts: Vec<Part>,
    kernels: Vec<KernelUse>,
    stored: StoredBytes,
    damaged: Vec<String>,
}

/// A file, or an image with the files beside it.
#[derive(Clone, Copy, Debug)]
struct Part {
    bytes: u64,
    /// How many users need it.
    users: u32,
}

/// What a part is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    Image(ImageId),
    Index(IndexId),
    Blob(BlobHash),
    /// Record of the runtime template with this image.
    Template(ImageId),
}

impl StoreUsage {
    /// All users: functions by name, then checkpoints, root file systems and the others.
    pub fn users(&self) -> &[User] {
        &self.users
    }

    /// What some users need together, by their numbers in [`StoreUsage::users`], each once.
    pub fn sizes(&self, users: &[usize]) -> Sizes {
        let mut sizes = Sizes::default();
        let mut needed: HashMap<u32, u32> = HashMap::new();
        let mut ancestors: BTreeSet<u32> = BTreeSet::new();
        for user in users.iter().map(|&number| &self.users[number]) {
            sizes.own += user.record;
            ancestors.extend(&user.ancestors);
            user.parts.iter().for_each(|part| *needed.entry(*part).or_default() += 1);
        }
        for (number, by_these) in needed {
            let part = self.parts[number as usize];
            match part.users == by_these {
                true => sizes.own += part.bytes,
                false => sizes.shared += part.bytes,
            }
            if ancestors.contains(&number) {
                sizes.base += part.bytes;
            }
        }
        sizes
    }

    /// The builds of the Thaw kernel, by name.
    pub fn kernels(&self) -> &[KernelUse] {
        &self.kernels
    }

    /// What is in the store in all.
    pub fn stored(&self) -> StoredBytes {
        self.stored
    }

    /// What could not be read and is counted as unused, one sentence each.
    pub fn damaged(&self) -> &[String] {
        &self.damaged
    }
}

impl Store {
    /// Finds out what occupies the disk and who shares it. Reads all records and the indexes of
    /// all users, and asks the host for the size of every file.
    ///
    /// # Errors
    /// The store cannot be read; single damaged files are no error.
    pub fn usage(&self, others: &[OtherUser]) -> Result<StoreUsage> {
        let _acting = self.layout.act()?;
        let mut census = Census::new(self);
        census.find_templates()?;
        census.add_functions()?;
        census.add_checkpoints()?;
        census.add_rootfs()?;
        for other in others {
            let mut user = new_user(UserKind::Other, &other.name, serde_json::Value::Null, 0);
            census.need(&mut user, other.index, other.image)?;
            census.finish(user);
        }
        census.count_stored()?;
        Ok(census.usage)
    }
}

fn new_user(kind: UserKind, name: &Name, config: serde_json::Value, record: u64) -> User {
    let (parts, ancestors) = (BTreeSet::new(), BTreeSet::new());
    User { kind, name: name.clone(), config, base: None, record, parts, ancestors }
}

/// The numbers of parts, as they are found.
struct Census<'a> {
    store: &'a Store,
    usage: StoreUsage,
    numbers: HashMap<Key, u32>,
    /// The parts of root file systems that were read, by index: of versions and copies they are
    /// the same.
    indexes: HashMap<IndexId, Vec<u32>>,
    /// Runtime templates, by image: their indexes, and bytes of their records.
    templates: HashMap<ImageId, (IndexId, u64)>,
}

impl<'a> Census<'a> {
    fn new(store: &'a Store) -> Self {
        let (usage, numbers, indexes, templates) = Default::default();
        Self { store, usage, numbers, indexes, templates }
    }

    fn find_templates(&mut self) -> Result<()> {
        for template in self.store.list_templates()? {
            let record = allocated(&self.store.layout.template(&template.name))?;
            self.templates.insert(template.image, (template.index, record));
        }
        Ok(())
    }

    fn add_functions(&mut self) -> Result<()> {
        let functions = self.store.list_functions()?;
        self.usage.damaged.extend(functions.damaged.iter().map(|(_, error)| error.to_string()));
        for function in functions.records {
            let record = allocated(&self.store.layout.function_record(&function.name))?;
            let FunctionRecord { name, config, index, image, others, .. } = function;
            let mut user = new_user(UserKind::Function, &name, config, record);
            for other in others {
                self.need(&mut user, other.index, other.image)?;
            }
            user.base = None;
            self.need(&mut user, index, image)?;
            self.finish(user);
        }
        Ok(())
    }

    fn add_checkpoints(&mut self) -> Result<()> {
        let checkpoints = self.store.list_checkpoints()?;
        self.usage.damaged.extend(checkpoints.damaged.iter().map(|(_, error)| error.to_string()));
        for checkpoint in checkpoints.records {
            let record = allocated(&self.store.layout.checkpoint(&checkpoint.name))?;
            let (kind, config) = (UserKind::Checkpoint, checkpoint.config);
            let mut user = new_user(kind, &checkpoint.name, config, record);
            self.need(&mut user, checkpoint.index, Some(checkpoint.image))?;
            self.finish(user);
        }
        Ok(())
    }

    fn add_rootfs(&mut self) -> Result<()> {
        for name in crate::function::names(&self.store.layout.rootfs_names())? {
            let rootfs = match self.store.get_rootfs(&name) {
                Ok(rootfs) => rootfs,
                Err(error) if error.is_not_found() => continue,
                Err(error @ StoreError::Damaged { .. }) => {
                    self.usage.damaged.push(error.to_string());
                    continue;
                }
                Err(error) => return Err(error),
            };
            let record = allocated(&self.store.layout.rootfs(&name))?;
            let mut user = new_user(UserKind::Rootfs, &name, serde_json::Value::Null, record);
            self.need(&mut user, rootfs.index, None)?;
            self.finish(user);
        }
        Ok(())
    }

    /// Counts a user where it is complete: every part of it once.
    fn finish(&mut self, user: User) {
        for &part in &user.parts {
            self.usage.parts[part as usize].users += 1;
        }
        self.usage.users.push(user);
    }

    /// Adds what a version of a user needs.
    fn need(&mut self, user: &mut User, index: IndexId, image: Option<ImageId>) -> Result<()> {
        user.parts.extend(self.parts_of(index)?);
        let Some(image) = image else { return Ok(()) };
        user.parts.insert(self.image(image)?);
        let ancestors = match self.store.image_ancestors(image) {
            Ok(ancestors) => ancestors,
            Err(error @ StoreError::Damaged { .. }) => {
                self.usage.damaged.push(error.to_string());
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        user.base = ancestors.last().copied();
        for ancestor in ancestors {
            let number = self.image(ancestor)?;
            user.parts.insert(number);
            user.ancestors.insert(number);
            self.need_template(user, ancestor)?;
        }
        Ok(())
    }

    /// A runtime template stays, with its index, as long as an image differs from its own.
    fn need_template(&mut self, user: &mut User, image: ImageId) -> Result<()> {
        let Some(&(index, record)) = self.templates.get(&image) else { return Ok(()) };
        user.parts.extend(self.parts_of(index)?);
        user.parts.insert(self.part(Key::Template(image), || Ok(record))?);
        Ok(())
    }

    /// The parts of a root file system: its index and its blobs.
    fn parts_of(&mut self, id: IndexId) -> Result<Vec<u32>> {
        if let Some(known) = self.indexes.get(&id) {
            return Ok(known.clone());
        }
        let store = self.store;
        let layout = &store.layout;
        let mut parts = vec![self.part(Key::Index(id), || allocated(&layout.index(id)))?];
        match self.store.open_index(id) {
            Ok(open) => {
                for blob in open.index().blobs() {
                    let hash = BlobHash(blob.hash);
                    parts.push(self.part(Key::Blob(hash), || allocated(&layout.blob(hash)))?);
                }
            }
            // Nobody can say what it needs, and building anew is what mends it.
            Err(error @ (StoreError::NotFound { .. } | StoreError::Damaged { .. })) => {
                self.usage.damaged.push(error.to_string());
            }
            Err(error) => return Err(error),
        }
        self.indexes.insert(id, parts.clone());
        Ok(parts)
    }

    /// An image with what lies beside it.
    fn image(&mut self, id: ImageId) -> Result<u32> {
        let store = self.store;
        let layout = &store.layout;
        self.part(Key::Image(id), || {
            let files = [
                layout.image(id),
                layout.packed_image(id),
                layout.working_set(id),
                layout.prefetch(id),
                layout.ancestors(id),
                layout.image_kernel(id),
            ];
            files.iter().map(|path| allocated(path)).sum()
        })
    }

    fn part(&mut self, key: Key, bytes: impl FnOnce() -> Result<u64>) -> Result<u32> {
        if let Some(&number) = self.numbers.get(&key) {
            return Ok(number);
        }
        let number = self.usage.parts.len() as u32;
        self.usage.parts.push(Part { bytes: bytes()?, users: 0 });
        self.numbers.insert(key, number);
        Ok(number)
    }

    /// Counts every file of the store, needed or not.
    fn count_stored(&mut self) -> Result<()> {
        let mut stored = StoredBytes::default();
        let mut unused = 0;
        let mut images = BTreeSet::new();
        for (path, file) in self.store.image_files()? {
            let bytes = allocated(&path)?;
            let (id, sum) = match file {
                ImageFile::Image(id) | ImageFile::Packed(id) => (id, &mut stored.images),
                ImageFile::WorkingSet(id) | ImageFile::Prefetch(id) => {
                    (id, &mut stored.working_sets)
                }
                ImageFile::Ancestors(id) | ImageFile::Kernel(id) => (id, &mut stored.records),
            };
            *sum += bytes;
            match self.numbers.contains_key(&Key::Image(id)) {
                true => drop(images.insert(id)),
                false => unused += bytes,
            }
        }
        for (id, path) in self.store.index_files()? {
            let bytes = allocated(&path)?;
            stored.indexes += bytes;
            unused += if self.numbers.contains_key(&Key::Index(id)) { 0 } else { bytes };
        }
        for hash in self.store.list_blobs()? {
            let number = self.numbers.get(&Key::Blob(hash));
            let known = number.map(|&number| self.usage.parts[number as usize].bytes);
            let bytes = known.map_or_else(|| allocated(&self.store.layout.blob(hash)), Ok)?;
            stored.blobs += bytes;
            unused += if known.is_some() { 0 } else { bytes };
        }
        self.count_kernels(&images, &mut stored, &mut unused)?;
        stored.records += self.usage.users.iter().map(|user| user.record).sum::<u64>();
        for (image, (_, record)) in &self.templates {
            stored.records += record;
            unused += if self.numbers.contains_key(&Key::Template(*image)) { 0 } else { *record };
        }
        stored.records += allocated(&self.store.layout.known_files())?;
        stored.records += allocated(&self.store.layout.reserve())?;
        stored.unpublished = below(&self.store.layout.temporary())?;
        self.usage.stored = StoredBytes { unused, ..stored };
        Ok(())
    }

    fn count_kernels(
        &mut self,
        images: &BTreeSet<ImageId>,
        stored: &mut StoredBytes,
        unused: &mut u64,
    ) -> Result<()> {
        let mut needed: BTreeMap<KernelId, usize> = BTreeMap::new();
        for &image in images {
            match self.store.image_kernel(image) {
                Ok(kernel) => {
                    kernel.into_iter().for_each(|id| *needed.entry(id).or_default() += 1);
                }
                Err(error @ StoreError::Damaged { .. }) => {
                    self.usage.damaged.push(error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        for kernel in self.store.list_kernels()? {
            let images = needed.get(&kernel.id).copied().unwrap_or_default();
            let bytes = kernel.allocated;
            stored.kernels += bytes;
            *unused += if images == 0 { bytes } else { 0 };
            self.usage.kernels.push(KernelUse { id: kernel.id, bytes, images });
        }
        Ok(())
    }
}

/// Bytes that a file occupies on disk; none if it is not there.
pub(crate) fn allocated(path: &Path) -> Result<u64> {
    match fs::symlink_metadata(path) {
        Ok(metadata) => Ok(metadata.blocks() * 512),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
        Err(error) => Err(StoreError::io("inspect", path, error)),
    }
}

/// Bytes of the regular files of sessions: each has a directory of its own without others in it.
fn below(directory: &Path) -> Result<u64> {
    let mut bytes = 0;
    for session in crate::image::list(directory)? {
        // Sessions end meanwhile.
        let Ok(files) = fs::read_dir(&session) else { continue };
        for file in files.flatten() {
            bytes += allocated(&file.path())?;
        }
    }
    Ok(bytes)
}
