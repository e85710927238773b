//! Snapshots of volumes that are in use: whoever uses them is at rest meanwhile.
//!
//! Room for a copy is made before anybody rests. The files are copied while all sandboxes of this
//! daemon that have some of them open are at rest, and requests of others wait. That the copy gets to
//! the disk, and its name, nobody waits for. A snapshot that belongs to a checkpoint has the inode
//! numbers of its files beside it (`numbers/LABEL`), which also tells it from an operator's.

use super::snapshots::{UNDER_WAY, clear, clear_leftovers, private, publish, remove_tree, settle};
use super::{VolumeError, VolumeStore, failed, open_own};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use thaw_sandbox::{ClosedVolume, Copied, FileNumbers, Volume, settle_copy};
use thaw_store::{CheckpointRecord, Name, Store};

/// How long the files of all volumes may take to be copied while their users rest. Requests of others wait
/// for as long, which fail after ten seconds.
pub const COPY_PATIENCE: Duration = Duration::from_secs(8);
/// How long sandboxes that have ended may take to give their files back.
pub(super) const GONE_PATIENCE: Duration = Duration::from_secs(2);
/// How often it is looked for that.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// A snapshot of a volume that belongs to a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct VolumeSnapshot {
    /// The volume.
    #[schemars(with = "String")]
    pub volume: Name,
    /// The snapshot's label.
    #[schemars(with = "String")]
    pub label: Name,
}

impl VolumeSnapshot {
    /// Those of a checkpoint.
    pub fn of_checkpoint(record: &CheckpointRecord) -> Vec<Self> {
        let listed = record.config.get("volumes").cloned();
        listed.and_then(|listed| serde_json::from_value(listed).ok()).unwrap_or_default()
    }
}

/// What a snapshot is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A checkpoint, with whose memory its files are put back.
    Checkpoint,
    /// The operator.
    Operator,
}

/// Snapshots of volumes that are being made. Those that are not kept are removed with it.
pub struct SnapshotsAtRest {
    store: VolumeStore,
    purpose: Purpose,
    patience: Duration,
    parts: Vec<Part>,
    stage: Mutex<Stage>,
}

/// How far they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Begun,
    Copied,
    Kept,
}

struct Part {
    name: Name,
    label: Name,
    volume: Arc<Volume>,
    /// The volume's directory, that of its snapshots, and the snapshot there, before and after it is
    /// complete.
    directory: PathBuf,
    all: PathBuf,
    new: PathBuf,
    path: PathBuf,
    made: Mutex<(Copied, FileNumbers)>,
    _copying: File,
}

impl fmt::Debug for SnapshotsAtRest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.parts.iter().map(|part| &part.name).collect();
        f.debug_struct("SnapshotsAtRest").field("volumes", &names).finish_non_exhaustive()
    }
}

impl VolumeStore {
    /// Makes room for snapshots of volumes that this process uses.
    ///
    /// # Errors
    /// One is missing, is a directory of the host or is being copied, there are too many snapshots or
    /// one of that label, the tenant would have too much, or the host refuses; nothing is left then.
    pub fn begin_snapshots(
        &self,
        names: &[Name],
        label: &Name,
        purpose: Purpose,
    ) -> Result<SnapshotsAtRest, VolumeError> {
        let mut begun = SnapshotsAtRest {
            store: self.clone(),
            purpose,
            patience: COPY_PATIENCE,
            parts: Vec::new(),
            stage: Mutex::new(Stage::Begun),
        };
        for name in names {
            begun.parts.push(self.begin_snapshot(name, label)?);
        }
        Ok(begun)
    }

    fn begin_snapshot(&self, name: &Name, label: &Name) -> Result<Part, VolumeError> {
        let _acting = self.home.act()?;
        let note = self.read_note(name)?;
        if self.host(name)?.is_some() {
            return Err(VolumeError::HostFiles(name.clone()));
        }
        let volume = self.opened(name).ok_or_else(|| VolumeError::Missing(name.clone()))?;
        let copying = self.copying(name)?;
        let (new, path) = self.room_for_snapshot(name, label, &note)?;
        Ok(Part {
            name: name.clone(),
            label: label.clone(),
            volume,
            directory: self.directory(name),
            all: self.snapshots_of(name),
            new,
            path,
            made: Mutex::default(),
            _copying: copying,
        })
    }

    /// Where the numbers of a checkpoint's snapshot are.
    pub(super) fn numbers_of(&self, name: &Name, label: &Name) -> PathBuf {
        self.directory(name).join("numbers").join(label.as_str())
    }

    /// The checkpoint that needs a snapshot, if one does.
    pub(super) fn needed_by(&self, name: &Name, label: &Name) -> Option<Name> {
        if !self.numbers_of(name, label).exists() {
            return None;
        }
        let wanted = VolumeSnapshot { volume: name.clone(), label: label.clone() };
        let checkpoints = Store::open(&self.home.store()).ok()?.list_checkpoints().ok()?;
        let needs =
            |record: &CheckpointRecord| VolumeSnapshot::of_checkpoint(record).contains(&wanted);
        checkpoints.records.into_iter().find(needs).map(|record| record.name)
    }

    /// Removes what was left of volumes and snapshots whose remover or maker was killed, and snapshots of
    /// checkpoints that are there no more. Volumes that are copied just now are left alone.
    ///
    /// # Errors
    /// The host refuses with one of them, when the others are done, or the store cannot be read.
    pub fn sweep(&self, store: &Store) -> Result<(), VolumeError> {
        let mut swept = self.undo_unfinished().and(self.sweep_gone());
        for name in self.names()? {
            swept = swept.and(self.sweep_volume(store, &name));
        }
        swept
    }

    fn sweep_volume(&self, store: &Store, name: &Name) -> Result<(), VolumeError> {
        let _acting = self.home.act()?;
        // Whoever opens a volume that is locked for this would be refused.
        if self.read_note(name).is_err() || !self.has_leftovers(store, name)? {
            return Ok(());
        }
        if let Ok(_copying) = self.copying(name) {
            clear_leftovers(&self.snapshots_of(name))?;
            self.tidy_files(name)?;
            self.sweep_snapshots(store, name)?;
        }
        Ok(())
    }

    /// Whether there is something that may have to be removed.
    fn has_leftovers(&self, store: &Store, name: &Name) -> Result<bool, VolumeError> {
        let is_under_way = |entry: fs::DirEntry| {
            entry.file_name().as_encoded_bytes().starts_with(UNDER_WAY.as_bytes())
        };
        let copies = fs::read_dir(self.snapshots_of(name));
        let mut copies = copies.into_iter().flatten().flatten();
        Ok(copies.any(is_under_way)
            || self.has_left_files(name)
            || self.is_unfinished(name)?
            || !self.not_needed(store, name)?.is_empty())
    }

    /// Snapshots of checkpoints that are not there.
    fn not_needed(&self, store: &Store, name: &Name) -> Result<Vec<Name>, VolumeError> {
        let Ok(entries) = fs::read_dir(self.directory(name).join("numbers")) else {
            return Ok(Vec::new());
        };
        let labels = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let mut labels: Vec<_> = labels.filter_map(|label| Name::new(&label).ok()).collect();
        if labels.is_empty() {
            return Ok(labels);
        }
        let known = store.list_checkpoints().map_err(VolumeError::Store)?;
        if !known.damaged.is_empty() {
            // Nobody knows what they need.
            return Ok(Vec::new());
        }
        let needed: Vec<_> = known.records.iter().flat_map(VolumeSnapshot::of_checkpoint).collect();
        let is_needed = |label: &Name| {
            needed.iter().any(|needed| needed.volume == *name && needed.label == *label)
        };
        labels.retain(|label| !is_needed(label));
        Ok(labels)
    }

    fn sweep_snapshots(&self, store: &Store, name: &Name) -> Result<(), VolumeError> {
        // Looked up after the volume was locked: a checkpoint that is stored now is known.
        self.not_needed(store, name)?.iter().try_for_each(|label| self.drop_snapshot(name, label))
    }

    /// Removes a snapshot, if it is there, and its numbers. The volume must be locked.
    pub(super) fn drop_snapshot(&self, name: &Name, label: &Name) -> Result<(), VolumeError> {
        let all = self.snapshots_of(name);
        let (path, gone) = (all.join(label.as_str()), all.join(format!("{UNDER_WAY}{label}")));
        // What is removed in part is no snapshot.
        match fs::rename(&path, &gone) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(failed("remove", &path)(error));
            }
            _ => clear(&gone)?,
        }
        let numbers = self.numbers_of(name, label);
        match fs::remove_file(&numbers) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(failed("remove", &numbers)(error))
            }
            _ => Ok(()),
        }
    }
}

impl SnapshotsAtRest {
    /// The volumes.
    pub fn volumes(&self) -> Vec<Arc<Volume>> {
        self.parts.iter().map(|part| part.volume.clone()).collect()
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies the files of all volumes. `resting` says how many files of a volume the sandboxes have
    /// open that are at rest, which must stay so until this returns. It may take as long as
    /// `COPY_PATIENCE`.
    ///
    /// # Errors
    /// Others use one of the volumes, it takes too long, or the host refuses.
    pub fn copy(&self, resting: &dyn Fn(&Volume) -> usize) -> Result<(), VolumeError> {
        let _acting = self.store.home.act()?;
        let until = Instant::now() + self.patience;
        let mut stage = self.stage();
        let close = |part: &Part| {
            let closed = ClosedVolume::close(&part.volume, until);
            closed.map_err(failed("copy", &part.directory))
        };
        let closed: Vec<_> = self.parts.iter().map(close).collect::<Result<_, _>>()?;
        for (part, closed) in self.parts.iter().zip(&closed) {
            check_users(&part.name, closed.volume(), &|volume| resting(volume))?;
        }
        for (part, closed) in self.parts.iter().zip(&closed) {
            let made = File::open(&part.new).and_then(|to| closed.copy_to(to.as_fd(), until));
            let made = made.map_err(failed("copy", &part.directory.join("files")))?;
            *part.made.lock().unwrap_or_else(PoisonError::into_inner) = made;
        }
        *stage = Stage::Copied;
        Ok(())
    }

    /// Waits until the copies are on disk, gives them their names, and keeps them if `store` succeeds,
    /// which has somebody refer to them.
    ///
    /// # Errors
    /// They are not copied, the host refuses, or `store` fails.
    pub fn keep<T>(&self, store: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        let mut stage = self.stage();
        if *stage != Stage::Copied {
            return Err("its volumes were not copied".to_owned());
        }
        self.publish_all().map_err(|error| error.to_string())?;
        let stored = store()?;
        *stage = Stage::Kept;
        Ok(stored)
    }

    fn publish_all(&self) -> Result<(), VolumeError> {
        let _acting = self.store.home.act()?;
        for part in &self.parts {
            let settled = File::open(&part.new).and_then(|new| settle_copy(new.as_fd()));
            settled.map_err(failed("write", &part.new))?;
            if self.purpose == Purpose::Checkpoint {
                // A snapshot without them is an operator's, which stays.
                self.write_numbers(part)?;
            }
            publish(&part.new, &part.path)?;
            settle(&part.all)?;
        }
        Ok(())
    }

    fn write_numbers(&self, part: &Part) -> Result<(), VolumeError> {
        let path = self.store.numbers_of(&part.name, &part.label);
        let made = part.made.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = fs::metadata(&part.new).map_err(failed("read", &part.new))?.ino();
        write_whole(&path, &made.1.to_bytes(directory)).map_err(failed("write", &path))
    }

    /// What was copied of the first volume.
    pub fn copied(&self) -> Copied {
        let first = self.parts.first();
        let made = |part: &Part| part.made.lock().unwrap_or_else(PoisonError::into_inner).0;
        first.map(made).unwrap_or_default()
    }
}

impl Drop for SnapshotsAtRest {
    fn drop(&mut self) {
        if *self.stage() == Stage::Kept {
            return;
        }
        let Ok(_acting) = self.store.home.act() else { return };
        for part in &self.parts {
            // What cannot be removed now is removed when the daemon starts.
            let _ = remove_tree(&part.new);
            let _ = self.store.drop_snapshot(&part.name, &part.label);
        }
    }
}

/// Refuses to go on if others use a volume than the sandboxes at rest; those that have just ended are
/// waited for.
pub(super) fn check_users(
    name: &Name,
    volume: &Volume,
    resting: &dyn Fn(&Volume) -> usize,
) -> Result<(), VolumeError> {
    if volume.is_used_elsewhere().map_err(failed("look at", Path::new(name.as_str())))? {
        return Err(VolumeError::UsedElsewhere(name.clone()));
    }
    match wait_for_users(volume, resting, Instant::now() + GONE_PATIENCE) {
        true => Ok(()),
        false => Err(VolumeError::OthersOpen(name.clone())),
    }
}

/// Waits until nobody has files of a volume open but the sandboxes at rest; whether that is so.
pub(super) fn wait_for_users(
    volume: &Volume,
    resting: &dyn Fn(&Volume) -> usize,
    until: Instant,
) -> bool {
    while volume.open_files() > resting(volume) {
        if Instant::now() >= until {
            return false;
        }
        thread::sleep(LOOK_AGAIN);
    }
    true
}

/// Writes a file that is there as a whole, or not at all.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let directory = path.parent().ok_or(ErrorKind::InvalidInput)?;
    private(true).create(directory)?;
    let name = path.file_name().ok_or(ErrorKind::InvalidInput)?.display();
    let new = directory.join(format!(".{name}.new"));
    let mut file = open_own(&new)?;
    file.set_len(0)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, store, write};
    use super::*;
    use thaw_sandbox::{VolumeMount, VolumeShare};

    /// A store with volume `data` that this process uses, which has a file.
    fn used() -> (tempfile::TempDir, VolumeStore, Vec<VolumeMount>, Name) {
        let (directory, volumes) = store();
        let one = config("one", "data");
        volumes.of_new_function(&one).unwrap();
        let mounts = volumes.of_function(&one.name, &one.volumes, &VolumeShare::default()).unwrap();
        let name = Name::new("data").unwrap();
        write(volumes.show(&name).unwrap().path.join("file"), "first").unwrap();
        (directory, volumes, mounts, name)
    }

    fn begin(volumes: &VolumeStore, name: &Name, label: &str) -> SnapshotsAtRest {
        let label = Name::new(label).unwrap();
        volumes.begin_snapshots(std::slice::from_ref(name), &label, Purpose::Checkpoint).unwrap()
    }

    fn is_nothing_left(volumes: &VolumeStore, name: &Name) -> bool {
        let numbers = fs::read_dir(volumes.directory(name).join("numbers"));
        volumes.count_copies(name).unwrap() == 0 && numbers.map_or(0, Iterator::count) == 0
    }

    #[test]
    fn of_what_is_not_kept_nothing_is_left() {
        let (_directory, volumes, _mounts, name) = used();
        let begun = begin(&volumes, &name, "begun");
        let busy = volumes.begin_snapshots(std::slice::from_ref(&name), &name, Purpose::Operator);
        assert!(matches!(busy, Err(VolumeError::Busy(_))), "{busy:?}");
        drop(begun);
        assert!(is_nothing_left(&volumes, &name));
        let copied = begin(&volumes, &name, "copied");
        copied.copy(&|_| 0).unwrap();
        drop(copied);
        assert!(is_nothing_left(&volumes, &name));
        let not_stored = begin(&volumes, &name, "not-stored");
        not_stored.copy(&|_| 0).unwrap();
        not_stored.keep(|| Err::<(), _>("the store is full".to_owned())).unwrap_err();
        drop(not_stored);
        assert!(is_nothing_left(&volumes, &name));
        let mut late = begin(&volumes, &name, "late");
        late.patience = Duration::ZERO;
        let refused = late.copy(&|_| 0).unwrap_err();
        assert!(refused.to_string().contains("takes too long"), "{refused}");
        late.keep(|| Ok(())).unwrap_err();
        drop(late);
        assert!(is_nothing_left(&volumes, &name));
    }

    #[test]
    fn a_snapshot_that_no_checkpoint_needs_is_swept() {
        let (_directory, volumes, mounts, name) = used();
        let store = Store::open(&volumes.home.store()).unwrap();
        let label = Name::new("kept").unwrap();
        let kept = begin(&volumes, &name, "kept");
        kept.copy(&|_| 0).unwrap();
        // Whoever stores the checkpoint just now is left alone.
        volumes.sweep(&store).unwrap();
        kept.keep(|| Ok(())).unwrap();
        drop(kept);
        assert_eq!(volumes.show(&name).unwrap().snapshots.len(), 1);
        // An operator's stays.
        let own = Name::new("own").unwrap();
        drop(mounts);
        volumes.snapshot(&name, &own).unwrap();
        volumes.sweep(&store).unwrap();
        let left: Vec<_> = volumes.show(&name).unwrap().snapshots;
        assert_eq!(left.iter().map(|left| &left.label[..]).collect::<Vec<_>>(), ["own"]);
        assert!(!volumes.numbers_of(&name, &label).exists());
    }

    #[test]
    fn there_are_so_many_snapshots_with_those_of_checkpoints() {
        let (_directory, volumes, _mounts, name) = used();
        for number in 0..super::super::SNAPSHOTS_MAX {
            let made = begin(&volumes, &name, &format!("s{number}"));
            made.copy(&|_| 0).unwrap();
            made.keep(|| Ok(())).unwrap();
        }
        let more = volumes.begin_snapshots(std::slice::from_ref(&name), &name, Purpose::Checkpoint);
        assert!(matches!(more, Err(VolumeError::TooMany(_))), "{more:?}");
    }
}
