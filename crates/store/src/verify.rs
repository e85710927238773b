//! Checking that everything in the store is what was once put there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::time::Duration;

use crate::blob::Blob;
use crate::error::{Context, Kind, Result, StoreError, way_out};
use crate::function::names;
use crate::id::{BlobHash, ImageId, IndexId, KernelId, Name};
use crate::index::check_structure;
use crate::layout::ImageFile;
use crate::pack::WholeSources;
use crate::sparse::image_id;
use crate::store::Store;
use crate::version::Version;

/// How long a repair waits for sessions to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// What to do with damaged files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Only report them.
    Report,
    /// Remove them, so that building what used them makes them anew. Records of
    /// functions and root file systems are never removed.
    RemoveDamaged,
}

/// Something in the store that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// What it is.
    pub kind: Kind,
    /// Its name or hash.
    pub name: String,
    /// What is wrong, to read after "is damaged: ".
    pub why: String,
    /// Functions, checkpoints and root file systems that need it.
    pub used_by: Vec<Name>,
    /// What to do.
    pub way_out: &'static str,
    /// Whether the damaged file was removed.
    pub removed: bool,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Files checked: contents, indexes, images, working sets and records.
    pub files: u64,
    /// Bytes read.
    pub bytes: u64,
    /// All that is wrong, in the order found.
    pub problems: Vec<Problem>,
}

/// Who refers to what.
#[derive(Default)]
struct Users {
    indexes: BTreeMap<IndexId, BTreeSet<Name>>,
    images: BTreeMap<ImageId, BTreeSet<Name>>,
    blobs: BTreeMap<BlobHash, BTreeSet<IndexId>>,
    kernels: BTreeMap<KernelId, BTreeSet<Name>>,
}

struct Check<'s> {
    store: &'s Store,
    repair: Repair,
    users: Users,
    report: VerifyReport,
}

impl Store {
    /// Reads everything in the store and compares it with its name or checksum.
    /// `progress` is called with the report so far, after each file.
    pub fn verify(
        &self,
        repair: Repair,
        progress: &mut dyn FnMut(&VerifyReport),
    ) -> Result<VerifyReport> {
        let _acting = self.layout.act()?;
        // Keeps the collector out, and for a repair everybody else too.
        let (_session, _lock) = match repair {
            Repair::Report => (Some(self.session()?), None),
            Repair::RemoveDamaged => (None, Some(self.lock_all(PATIENCE)?)),
        };
        let mut check =
            Check { store: self, repair, users: Users::default(), report: VerifyReport::default() };
        check.functions()?;
        check.checkpoints()?;
        check.rootfs_names()?;
        check.ancestors()?;
        check.indexes(progress)?;
        check.blobs(progress)?;
        check.images(progress)?;
        check.kernels(progress)?;
        Ok(check.report)
    }
}

impl Check<'_> {
    fn functions(&mut self) -> Result<()> {
        let functions = self.store.list_functions()?;
        for (name, error) in functions.damaged {
            self.report.files += 1;
            self.record_problem(Kind::Function, &name, &error);
        }
        for function in functions.records {
            self.report.files += 1;
            for Version { index, image, .. } in function.versions() {
                self.users.indexes.entry(index).or_default().insert(function.name.clone());
                if let Some(image) = image {
                    self.users.images.entry(image).or_default().insert(function.name.clone());
                }
            }
        }
        Ok(())
    }

    fn checkpoints(&mut self) -> Result<()> {
        let checkpoints = self.store.list_checkpoints()?;
        for (name, error) in checkpoints.damaged {
            self.report.files += 1;
            self.record_problem(Kind::Checkpoint, &name, &error);
        }
        for checkpoint in checkpoints.records {
            self.report.files += 1;
            let name = checkpoint.name;
            self.users.indexes.entry(checkpoint.index).or_default().insert(name.clone());
            self.users.images.entry(checkpoint.image).or_default().insert(name);
        }
        Ok(())
    }

    /// Who needs an image needs those that it refers to.
    fn ancestors(&mut self) -> Result<()> {
        for (id, users) in self.users.images.clone() {
            match self.store.image_ancestors(id) {
                Ok(ancestors) => {
                    for ancestor in ancestors {
                        let all = self.users.images.entry(ancestor).or_default();
                        all.extend(users.iter().cloned());
                    }
                }
                // It is told of with the files.
                Err(StoreError::Damaged { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn rootfs_names(&mut self) -> Result<()> {
        for name in names(&self.store.layout.rootfs_names())? {
            self.report.files += 1;
            match self.store.get_rootfs(&name) {
                Ok(rootfs) => {
                    self.users.indexes.entry(rootfs.index).or_default().insert(name);
                }
                Err(error) => self.record_problem(Kind::Rootfs, &name, &error),
            }
        }
        Ok(())
    }

    /// Indexes that are there, and those that should be.
    fn indexes(&mut self, progress: &mut dyn FnMut(&VerifyReport)) -> Result<()> {
        let mut ids: BTreeSet<IndexId> = self.users.indexes.keys().copied().collect();
        ids.extend(self.store.index_files()?.into_iter().map(|(id, _)| id));
        for id in ids {
            self.report.files += 1;
            match self.store.open_index(id) {
                Ok(open) => {
                    self.report.bytes += open.file_len();
                    for blob in open.index().blobs() {
                        let hash = BlobHash(blob.hash);
                        self.users.blobs.entry(hash).or_default().insert(id);
                        self.expect_blob(Blob { hash, size: blob.size })?;
                    }
                    if let Err(error) = check_structure(&open.index()) {
                        self.index_problem(id, &error.to_string())?;
                    }
                }
                Err(StoreError::Damaged { why, .. }) => self.index_problem(id, &why)?,
                Err(StoreError::NotFound { .. }) => {
                    let used_by = self.users_of_index(id);
                    self.problem(Kind::Index, id.to_string(), "it is missing", used_by, false);
                }
                Err(error) => return Err(error),
            }
            progress(&self.report);
        }
        Ok(())
    }

    fn index_problem(&mut self, id: IndexId, why: &str) -> Result<()> {
        let used_by = self.users_of_index(id);
        let removed = self.remove(&self.store.layout.index(id))?;
        self.problem(Kind::Index, id.to_string(), why, used_by, removed);
        Ok(())
    }

    /// Notes a blob that an index needs and that is not there. What is there is
    /// checked later, once each.
    fn expect_blob(&mut self, blob: Blob) -> Result<()> {
        let path = self.store.layout.blob(blob.hash);
        match fs::symlink_metadata(&path) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let name = blob.hash.to_string();
                if !self.report.problems.iter().any(|problem| problem.name == name) {
                    let used_by = self.users_of_blob(blob.hash);
                    self.problem(Kind::Blob, name, "it is missing", used_by, false);
                }
                Ok(())
            }
            Err(error) => Err(StoreError::io("inspect", &path, error)),
        }
    }

    fn blobs(&mut self, progress: &mut dyn FnMut(&VerifyReport)) -> Result<()> {
        let domains = self.store.domains()?;
        for hash in self.store.list_blobs()? {
            let path = self.store.layout.blob(hash);
            let file = self.store.open_blob(hash)?;
            let (matches, bytes) = self.store.check_blob(hash, &file, &domains)?;
            self.report.bytes += bytes;
            self.report.files += 1;
            if !matches {
                let used_by = self.users_of_blob(hash);
                let removed = self.remove(&path)?;
                let why = "its bytes do not match its name";
                self.problem(Kind::Blob, hash.to_string(), why, used_by, removed);
            }
            progress(&self.report);
        }
        Ok(())
    }

    /// Images that are there, and those that should be, with their working sets.
    fn images(&mut self, progress: &mut dyn FnMut(&VerifyReport)) -> Result<()> {
        let mut images: BTreeSet<ImageId> = self.users.images.keys().copied().collect();
        let (mut working_sets, mut prefetches) = (BTreeSet::new(), BTreeSet::new());
        let (mut ancestors, mut kernels) = (BTreeSet::new(), BTreeSet::new());
        let mut packed = BTreeSet::new();
        for (_, file) in self.store.image_files()? {
            match file {
                ImageFile::Image(id) => images.insert(id),
                ImageFile::Packed(id) => packed.insert(id),
                ImageFile::WorkingSet(id) => working_sets.insert(id),
                ImageFile::Prefetch(id) => prefetches.insert(id),
                ImageFile::Ancestors(id) => ancestors.insert(id),
                ImageFile::Kernel(id) => kernels.insert(id),
            };
        }
        for id in images {
            self.report.files += 1;
            let path = self.store.layout.image(id);
            let used_by = self.users_of_image(id);
            match self.store.open_unpacked(id) {
                Ok(file) => {
                    self.report.bytes += file.metadata().context("inspect", &path)?.len();
                    if image_id(&file).context("read", &path)? != id {
                        let removed = self.remove(&path)?;
                        let why = "its bytes do not match its name";
                        self.problem(Kind::Image, id.to_string(), why, used_by, removed);
                    }
                }
                Err(StoreError::NotFound { .. }) if packed.contains(&id) => {}
                Err(StoreError::NotFound { .. }) => {
                    self.problem(Kind::Image, id.to_string(), "it is missing", used_by, false);
                }
                Err(error) => return Err(error),
            }
            progress(&self.report);
        }
        let mut whole = WholeSources::default();
        for id in packed {
            self.report.files += 1;
            self.packed_image(id, &mut whole)?;
            progress(&self.report);
        }
        for id in working_sets {
            self.report.files += 1;
            match self.store.working_set(id) {
                Ok(_) => {}
                Err(StoreError::Damaged { why, .. }) => {
                    let used_by = self.users_of_image(id);
                    let removed = self.remove(&self.store.layout.working_set(id))?;
                    self.problem(Kind::WorkingSet, id.to_string(), &why, used_by, removed);
                }
                Err(error) => return Err(error),
            }
        }
        for id in ancestors {
            self.report.files += 1;
            match self.store.image_ancestors(id) {
                Ok(_) => {}
                Err(StoreError::Damaged { why, .. }) => {
                    // Without it the collector does not know what to keep, so it stays.
                    let used_by = self.users_of_image(id);
                    self.problem(Kind::Ancestors, id.to_string(), &why, used_by, false);
                }
                Err(error) => return Err(error),
            }
        }
        for id in kernels {
            self.report.files += 1;
            match self.store.image_kernel(id) {
                Ok(Some(kernel)) => {
                    let used_by = self.users_of_image(id);
                    self.users.kernels.entry(kernel).or_default().extend(used_by);
                }
                Ok(None) => {}
                Err(StoreError::Damaged { why, .. }) => {
                    // Without it the collector does not know what to keep, so it stays.
                    let used_by = self.users_of_image(id);
                    self.problem(Kind::ImageKernel, id.to_string(), &why, used_by, false);
                }
                Err(error) => return Err(error),
            }
        }
        for id in prefetches {
            self.report.files += 1;
            match self.store.open_prefetch(id) {
                Ok(found) => self.report.bytes += found.map_or(0, |found| found.len()),
                Err(StoreError::Damaged { why, .. }) => {
                    let used_by = self.users_of_image(id);
                    let removed = self.remove(&self.store.layout.prefetch(id))?;
                    self.problem(Kind::Prefetch, id.to_string(), &why, used_by, removed);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Unpacks an image and compares it with its name.
    fn packed_image(&mut self, id: ImageId, whole: &mut WholeSources) -> Result<()> {
        match self.store.open_verified(id, whole) {
            Ok((_, bytes)) => self.report.bytes += bytes,
            Err(StoreError::Damaged { kind: Kind::Packed, name, why, .. })
                if name == id.to_string() =>
            {
                let used_by = self.users_of_image(id);
                let removed = self.remove(&self.store.layout.packed_image(id))?;
                self.problem(Kind::Packed, id.to_string(), &why, used_by, removed);
            }
            // A source, which is told of itself. Once it is mended, this one may be whole.
            Err(StoreError::Damaged { .. }) => {}
            Err(StoreError::NotFound { kind, name }) => {
                let why = format!("{kind} {name}, which it differs from, is missing");
                let used_by = self.users_of_image(id);
                self.problem(Kind::Packed, id.to_string(), &why, used_by, false);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Kernel builds that are there, and those that should be.
    fn kernels(&mut self, progress: &mut dyn FnMut(&VerifyReport)) -> Result<()> {
        let mut ids: BTreeSet<KernelId> = self.users.kernels.keys().copied().collect();
        ids.extend(self.store.list_kernels()?.into_iter().map(|kernel| kernel.id));
        for id in ids {
            self.report.files += 1;
            let used_by = self.users.kernels.get(&id).cloned().unwrap_or_default();
            match self.store.kernel(id) {
                Ok(elf) => self.report.bytes += elf.len() as u64,
                Err(StoreError::Damaged { why, .. }) => {
                    let removed = self.remove(&self.store.layout.kernel(id))?;
                    self.problem(Kind::Kernel, id.to_string(), &why, used_by, removed);
                }
                Err(StoreError::NotFound { .. }) => {
                    self.problem(Kind::Kernel, id.to_string(), "it is missing", used_by, false);
                }
                Err(error) => return Err(error),
            }
            progress(&self.report);
        }
        Ok(())
    }

    fn record_problem(&mut self, kind: Kind, name: &Name, error: &StoreError) {
        let why = match error {
            StoreError::Damaged { why, .. } => why.clone(),
            other => other.to_string(),
        };
        self.problem(kind, name.to_string(), &why, BTreeSet::from([name.clone()]), false);
    }

    fn problem(
        &mut self,
        kind: Kind,
        name: String,
        why: &str,
        used_by: BTreeSet<Name>,
        removed: bool,
    ) {
        self.report.problems.push(Problem {
            kind,
            name,
            why: why.to_owned(),
            used_by: used_by.into_iter().collect(),
            way_out: way_out(kind),
            removed,
        });
    }

    fn remove(&self, path: &std::path::Path) -> Result<bool> {
        match self.repair {
            Repair::Report => Ok(false),
            Repair::RemoveDamaged => fs::remove_file(path).context("remove", path).map(|()| true),
        }
    }

    fn users_of_index(&self, id: IndexId) -> BTreeSet<Name> {
        self.users.indexes.get(&id).cloned().unwrap_or_default()
    }

    fn users_of_image(&self, id: ImageId) -> BTreeSet<Name> {
        self.users.images.get(&id).cloned().unwrap_or_default()
    }

    fn users_of_blob(&self, hash: BlobHash) -> BTreeSet<Name> {
        let indexes = self.users.blobs.get(&hash).into_iter().flatten();
        indexes.flat_map(|id| self.users_of_index(*id)).collect()
    }
}
