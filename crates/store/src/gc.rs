//! The garbage collector: removes what no record leads to.
//!
//! Roots are the functions (those of their versions that stay), the checkpoints, the
//! named root file systems, and every index and image that some process has open: those
//! carry a shared flock(2), which also travels with a descriptor into a sandbox.
//! Nothing of what a crash leaves behind is ever referred to, so a collection
//! that is cut short just leaves work for the next one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Context, Result, StoreError};
use crate::function::{FunctionRecord, names, to_json};
use crate::id::{BlobHash, ImageId, IndexId, KernelId, Name};
use crate::image::list;
use crate::layout::ImageFile;
use crate::lock::{lock_exclusive_within, try_lock_exclusive};
use crate::session::Session;
use crate::stage::{Existing, Removal, SHARED_MODE, Stage, clean};
use crate::store::Store;
use crate::version::VERSIONS_KEPT;

/// How long to wait for sessions to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a collection removed, or would remove.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GcReport {
    /// Images.
    pub images: Vec<ImageId>,
    /// Rootfs indexes.
    pub indexes: Vec<IndexId>,
    /// Contents of regular files.
    pub blobs: Vec<BlobHash>,
    /// Builds of the Thaw kernel.
    pub kernels: Vec<KernelId>,
    /// Images that are gone, of which working sets, the files of their pages, lists of
    /// ancestors or records of their kernels were left.
    pub working_sets: Vec<ImageId>,
    /// Runtime templates: nothing was built from them, or it is gone.
    pub templates: Vec<Name>,
    /// Versions of functions: neither among the newest nor in use.
    pub versions: Vec<(Name, u32)>,
    /// Directories of sessions that did not end well.
    pub left_overs: Vec<PathBuf>,
    /// Bytes on disk that all of it occupied.
    pub bytes: u64,
}

impl GcReport {
    /// Whether there was nothing to remove.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// What stays besides all that records lead to. It is asked once sessions are kept out: whoever
/// comes to need something while a session of his lasts keeps it.
pub struct Kept<'a> {
    /// Images, with all that they need.
    pub images: &'a dyn Fn() -> io::Result<Vec<ImageId>>,
    /// Kernel builds.
    pub kernels: &'a dyn Fn() -> BTreeSet<KernelId>,
    /// How many of the newest versions of each function, besides those in use.
    pub versions: usize,
    /// Versions of functions that are in use though they get no requests.
    pub in_use: &'a dyn Fn() -> io::Result<Vec<(Name, u32)>>,
}

impl Default for Kept<'_> {
    fn default() -> Self {
        Self {
            images: &|| Ok(Vec::new()),
            kernels: &BTreeSet::new,
            versions: VERSIONS_KEPT,
            in_use: &|| Ok(Vec::new()),
        }
    }
}

/// What must stay.
#[derive(Default)]
struct Live {
    indexes: BTreeSet<IndexId>,
    images: BTreeSet<ImageId>,
}

impl Session {
    /// Removes an image that was for this session alone, so that no record leads to it, unless somebody
    /// has it open; says whether it is gone.
    pub fn discard_image(&self, id: ImageId) -> Result<bool> {
        let _acting = self.store.layout.act()?;
        let mut removed = UnusedImages::new();
        for (path, file) in self.store.image_files()? {
            if !matches!(file, ImageFile::Image(of) | ImageFile::Packed(of) if of == id) {
                continue;
            }
            match lock_if_unused(&path)? {
                Some(lock) => removed.entry(id).or_default().push((path, lock)),
                None => return Ok(false),
            }
        }
        for (path, _in_use_check) in removed.values().flatten() {
            remove(path, Removal::Remove)?;
        }
        for (of, path) in self.store.records_without(&removed)? {
            if of == id {
                remove(&path, Removal::Remove)?;
            }
        }
        Ok(true)
    }
}

/// Nobody has a session while this lasts.
#[derive(Debug)]
pub struct KeptOut {
    _lock: File,
}

/// Images that nobody needs, with the files that hold them, locked.
type UnusedImages = BTreeMap<ImageId, Vec<(PathBuf, File)>>;

impl Store {
    /// Removes everything that nothing refers to, or only says what that is.
    /// Waits for sessions to end and fails with [`StoreError::Busy`] if they do
    /// not. Removes nothing when a record or an index in use is damaged, because
    /// then it is not known what they refer to.
    pub fn gc(&self, removal: Removal) -> Result<GcReport> {
        self.gc_keeping(removal, &Kept::default())
    }

    /// The same, but more stays.
    pub fn gc_keeping(&self, removal: Removal, kept: &Kept<'_>) -> Result<GcReport> {
        self.gc_as(removal, PATIENCE, kept)
    }

    /// The same, waiting for sessions no longer than `patience`.
    pub fn gc_within(&self, removal: Removal, patience: Duration) -> Result<GcReport> {
        self.gc_as(removal, patience, &Kept::default())
    }

    fn gc_as(&self, removal: Removal, patience: Duration, kept: &Kept<'_>) -> Result<GcReport> {
        let _acting = self.layout.act()?;
        let _lock = self.lock_all(patience)?;
        let mut report = GcReport::default();
        let records = self.records_without_surplus(kept, &mut report)?;
        let mut live = self.live(&records)?;
        let images = (kept.images)().map_err(StoreError::Source)?;
        live.images.extend(images.into_iter().filter(|id| self.layout.has_image(*id)));
        let images = self.unused_images(&mut live)?;
        let templates = self.unused_templates(&mut live)?;
        let indexes = self.unused_indexes(&mut live)?;
        // Everything that could fail for damage is read before the first removal.
        let blobs = self.unused_blobs(&live)?;
        let kernels = self.unused_kernels(&live, kept)?;
        if removal == Removal::Remove {
            self.forget_versions(&records, &report.versions)?;
        }
        for left_over in clean(&self.layout, removal)? {
            report.left_overs.push(left_over.path);
            report.bytes += left_over.bytes;
        }
        for name in templates {
            report.bytes += remove(&self.layout.template(&name), removal)?;
            report.templates.push(name);
        }
        for (id, forms) in &images {
            for (path, _in_use_check) in forms {
                report.bytes += remove(path, removal)?;
            }
            report.images.push(*id);
        }
        for (id, path) in self.records_without(&images)? {
            report.bytes += remove(&path, removal)?;
            if !report.working_sets.contains(&id) {
                report.working_sets.push(id);
            }
        }
        for (id, _in_use_check) in &indexes {
            report.bytes += remove(&self.layout.index(*id), removal)?;
            report.indexes.push(*id);
        }
        for hash in blobs {
            report.bytes += remove(&self.layout.blob(hash), removal)?;
            report.blobs.push(hash);
        }
        for id in kernels {
            report.bytes += remove(&self.layout.kernel(id), removal)?;
            report.kernels.push(id);
        }
        if removal == Removal::Remove {
            self.remove_empty_functions()?;
        }
        Ok(report)
    }

    /// Keeps all sessions of all processes out.
    /// Keeps sessions out, and with them builds and collections, until the result is dropped.
    pub fn keep_sessions_out(&self, patience: Duration) -> Result<KeptOut> {
        Ok(KeptOut { _lock: self.lock_all(patience)? })
    }

    pub(crate) fn lock_all(&self, patience: Duration) -> Result<File> {
        let _acting = self.layout.act()?;
        let path = self.layout.lock();
        let lock = File::open(&path).context("open", &path)?;
        if lock_exclusive_within(&lock, &path, patience)? {
            return Ok(lock);
        }
        Err(StoreError::Busy { path: self.root().to_owned() })
    }

    /// The functions without the versions that go; which those are joins the report.
    fn records_without_surplus(
        &self,
        kept: &Kept<'_>,
        report: &mut GcReport,
    ) -> Result<Vec<FunctionRecord>> {
        let functions = self.list_functions()?;
        if let Some((_, error)) = functions.damaged.into_iter().next() {
            return Err(error);
        }
        let in_use = (kept.in_use)().map_err(StoreError::Source)?;
        let mut records = functions.records;
        for record in &mut records {
            let mut surplus = record.surplus(kept.versions);
            let is_in_use = |number: u32| {
                in_use.iter().any(|(name, used)| *name == record.name && *used == number)
            };
            surplus.retain(|number| !is_in_use(*number));
            record.forget(&surplus);
            report.versions.extend(surplus.into_iter().map(|number| (record.name.clone(), number)));
        }
        Ok(records)
    }

    /// Writes the records that have lost versions. Sessions are kept out, so nobody else changes
    /// them.
    fn forget_versions(&self, records: &[FunctionRecord], gone: &[(Name, u32)]) -> Result<()> {
        for record in records {
            if gone.iter().any(|(name, _)| *name == record.name) {
                let path = self.layout.function_record(&record.name);
                let json = to_json(record);
                let mut stage = Stage::create(&self.layout)?;
                stage.write_record(&path, &[&json], Existing::Replace, SHARED_MODE)?;
            }
        }
        Ok(())
    }

    fn live(&self, functions: &[FunctionRecord]) -> Result<Live> {
        let mut live = Live::default();
        for version in functions.iter().flat_map(FunctionRecord::versions) {
            live.indexes.insert(version.index);
            live.images.extend(version.image);
        }
        let checkpoints = self.list_checkpoints()?;
        if let Some((_, error)) = checkpoints.damaged.into_iter().next() {
            return Err(error);
        }
        for checkpoint in checkpoints.records {
            live.indexes.insert(checkpoint.index);
            live.images.insert(checkpoint.image);
        }
        for rootfs in self.list_rootfs()? {
            live.indexes.insert(rootfs.index);
        }
        self.add_ancestors(&mut live.images)?;
        Ok(live)
    }

    /// Images that are neither referred to nor open, locked so that nobody opens
    /// them from now on. Those that are open join the live ones, with their ancestors, which
    /// whoever has opened them is about to open.
    fn unused_images(&self, live: &mut Live) -> Result<UnusedImages> {
        let mut unused = UnusedImages::new();
        for (path, file) in self.image_files()? {
            let (ImageFile::Image(id) | ImageFile::Packed(id)) = file else { continue };
            if live.images.contains(&id) {
                continue;
            }
            match lock_if_unused(&path)? {
                Some(lock) => unused.entry(id).or_default().push((path, lock)),
                None => {
                    live.images.insert(id);
                }
            }
        }
        self.add_ancestors(&mut live.images)?;
        unused.retain(|id, _| !live.images.contains(id));
        Ok(unused)
    }

    /// Templates whose images no other image refers to, and those whose records are damaged. The
    /// root file systems of the others join the live ones: what is built next extends them.
    fn unused_templates(&self, live: &mut Live) -> Result<Vec<Name>> {
        let mut kept = BTreeSet::new();
        for template in self.list_templates()? {
            if live.images.contains(&template.image) {
                live.indexes.insert(template.index);
                kept.insert(template.name);
            }
        }
        let all = names(&self.layout.templates())?;
        Ok(all.into_iter().filter(|name| !kept.contains(name)).collect())
    }

    /// The same for indexes; those that are open join the live ones.
    fn unused_indexes(&self, live: &mut Live) -> Result<Vec<(IndexId, File)>> {
        let mut unused = Vec::new();
        for (id, path) in self.index_files()? {
            if live.indexes.contains(&id) {
                continue;
            }
            match lock_if_unused(&path)? {
                Some(lock) => unused.push((id, lock)),
                None => {
                    live.indexes.insert(id);
                }
            }
        }
        Ok(unused)
    }

    fn unused_blobs(&self, live: &Live) -> Result<Vec<BlobHash>> {
        let mut used = BTreeSet::new();
        for id in &live.indexes {
            let index = self.open_index(*id)?;
            used.extend(index.index().blobs().iter().map(|blob| BlobHash(blob.hash)));
        }
        let mut unused = self.list_blobs()?;
        unused.retain(|hash| !used.contains(hash));
        Ok(unused)
    }

    /// Kernel builds that no image needs which is in use. Sessions are kept out, so nobody is
    /// about to store an image of one of them; zygotes of one have a file of their own.
    fn unused_kernels(&self, live: &Live, kept: &Kept<'_>) -> Result<Vec<KernelId>> {
        let used = self.kernels_of(&live.images)?;
        let kept = (kept.kernels)();
        let all = self.list_kernels()?.into_iter().map(|kernel| kernel.id);
        Ok(all.filter(|id| !used.contains_key(id) && !kept.contains(id)).collect())
    }

    /// Files of working sets, lists of ancestors and records of kernels without their images.
    fn records_without(&self, removed: &UnusedImages) -> Result<Vec<(ImageId, PathBuf)>> {
        let mut orphans = Vec::new();
        for (path, file) in self.image_files()? {
            let id = match file {
                ImageFile::Image(_) | ImageFile::Packed(_) => continue,
                ImageFile::WorkingSet(id) | ImageFile::Prefetch(id) => id,
                ImageFile::Ancestors(id) | ImageFile::Kernel(id) => id,
            };
            if removed.contains_key(&id) || !self.layout.has_image(id) {
                orphans.push((id, path));
            }
        }
        Ok(orphans)
    }

    /// Directories whose record was never written, or was the last to be removed.
    fn remove_empty_functions(&self) -> Result<()> {
        for name in names(&self.layout.functions())? {
            let path = self.layout.function(&name);
            match fs::remove_dir(&path) {
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::DirectoryNotEmpty | ErrorKind::NotADirectory
                    ) => {}
                result => result.context("remove", &path)?,
            }
        }
        Ok(())
    }

    /// Every file in the index directory that the store put there.
    pub(crate) fn index_files(&self) -> Result<Vec<(IndexId, PathBuf)>> {
        let paths = list(&self.layout.indexes())?;
        Ok(paths
            .into_iter()
            .filter_map(|path| Some((path.file_name()?.to_str()?.parse().ok()?, path)))
            .collect())
    }

    /// Every blob that is stored.
    pub(crate) fn list_blobs(&self) -> Result<Vec<BlobHash>> {
        let mut blobs = Vec::new();
        for shard in list(&self.layout.blobs())? {
            let Some(first) = shard.file_name().and_then(|name| name.to_str()) else { continue };
            if first.len() != 2 || !shard.is_dir() {
                continue;
            }
            for path in list(&shard)? {
                let Some(rest) = path.file_name().and_then(|name| name.to_str()) else { continue };
                blobs.extend(format!("{first}{rest}").parse::<BlobHash>());
            }
        }
        Ok(blobs)
    }
}

/// Locks a file that nobody has open through the store; `None` if somebody has.
fn lock_if_unused(path: &Path) -> Result<Option<File>> {
    let file = File::open(path).context("open", path)?;
    Ok(try_lock_exclusive(&file, path)?.then_some(file))
}

/// Removes a file; returns the bytes that it occupied on disk.
fn remove(path: &Path, removal: Removal) -> Result<u64> {
    let bytes = fs::symlink_metadata(path).context("inspect", path)?.blocks() * 512;
    if removal == Removal::Remove {
        fs::remove_file(path).context("remove", path)?;
    }
    Ok(bytes)
}
