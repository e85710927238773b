//! Snapshots of volumes: copies of their files, made while nobody writes to them.
//!
//! Whoever makes one has the volume alone, so that no sandbox gets a file of it, and looks whether
//! somebody has one of its files open to be written still. So a snapshot is what a crash of all
//! writers would leave, at one moment.

use super::{Note, VolumeError, VolumeStore, failed, open_own};
use crate::config::ByteSize;
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use serde::Serialize;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;
use thaw_sandbox::{Copied, copy_volume};
use thaw_store::Name;

/// Most snapshots of a volume: together they hold so many times its size at most.
pub const SNAPSHOTS_MAX: usize = 8;

/// The beginning of names of copies that are not complete; no label begins so.
pub(super) const UNDER_WAY: &str = ".new-";

/// A snapshot, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// Its label.
    pub label: String,
    /// When it was made, milliseconds since the epoch.
    pub created_ms: u64,
    /// The checkpoint that it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
}

impl VolumeStore {
    pub(super) fn snapshots_of(&self, name: &Name) -> PathBuf {
        self.snapshots_directory(name.as_str())
    }

    /// The directory with the snapshots of the volume of this name, which need not be there.
    pub fn snapshots_directory(&self, name: &str) -> PathBuf {
        self.all().join(name).join("snapshots")
    }

    /// How many copies of a volume there are, those included that are being made.
    pub(super) fn count_copies(&self, name: &Name) -> Result<u64, VolumeError> {
        let all = self.snapshots_of(name);
        match fs::read_dir(&all) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
            entries => Ok(entries.map_err(failed("read", &all))?.count() as u64),
        }
    }

    /// The snapshots of a volume, by label.
    pub(super) fn snapshots(&self, name: &Name) -> Result<Vec<Snapshot>, VolumeError> {
        let all = self.snapshots_of(name);
        let entries = match fs::read_dir(&all) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed("read", &all))?,
        };
        let snapshot = |entry: fs::DirEntry| {
            let label = entry.file_name().into_string().ok()?;
            let made = entry.metadata().ok()?.modified().ok()?;
            let created_ms = made.duration_since(UNIX_EPOCH).ok()?.as_millis() as u64;
            (!label.starts_with('.')).then_some(Snapshot { label, created_ms, checkpoint: None })
        };
        let mut found: Vec<_> = entries.filter_map(|entry| snapshot(entry.ok()?)).collect();
        found.sort_by(|a, b| a.label.cmp(&b.label));
        Ok(found)
    }

    /// Makes a snapshot of a volume that nobody uses.
    ///
    /// # Errors
    /// There is no such volume, somebody uses it, there are too many snapshots or one of that
    /// label, or the host refuses; nothing is left then.
    pub fn snapshot(&self, name: &Name, label: &Name) -> Result<Copied, VolumeError> {
        let _acting = self.home.act()?;
        let note = self.read_note(name)?;
        let _alone = self.alone_to_copy(name)?;
        let all = self.snapshots_of(name);
        let (new, path) = self.room_for_snapshot(name, label, &note)?;
        let made = self.files(name).and_then(|files| {
            let copied = copy(&files, &new, note.size)?;
            publish(&new, &path)?;
            settle(&all)?;
            Ok(copied)
        });
        if made.is_err() {
            // It would count. Otherwise the next attempt removes it.
            let _ = (remove_tree(&new), remove_tree(&path));
        }
        made
    }

    /// Makes the directory of a snapshot of that label, and says what its name will be. The volume
    /// must be locked.
    pub(super) fn room_for_snapshot(
        &self,
        name: &Name,
        label: &Name,
        note: &Note,
    ) -> Result<(PathBuf, PathBuf), VolumeError> {
        let all = self.snapshots_of(name);
        clear_leftovers(&all)?;
        let known = self.snapshots(name)?;
        if known.iter().any(|known| known.label == label.as_str()) {
            let (name, label) = (name.clone(), label.clone());
            return Err(VolumeError::SnapshotExists { name, label });
        }
        if known.len() >= SNAPSHOTS_MAX {
            return Err(VolumeError::TooMany(format!("{SNAPSHOTS_MAX} snapshots of a volume")));
        }
        private(true).create(&all).map_err(failed("make", &all))?;
        let (new, path) = (all.join(format!("{UNDER_WAY}{label}")), all.join(label.as_str()));
        let _counting = self.counting()?;
        self.check_quota(note.domain.as_ref(), note.size)?;
        // From now on it counts.
        private(false).create(&new).map_err(failed("make", &new))?;
        Ok((new, path))
    }

    /// Puts a snapshot in the place of what is in a volume that nobody uses.
    ///
    /// # Errors
    /// There is no such volume or snapshot, somebody uses it, it is a directory of the host, or
    /// the host refuses; the volume is as it was then.
    pub fn restore(&self, name: &Name, label: &Name) -> Result<Copied, VolumeError> {
        let _acting = self.home.act()?;
        let note = self.read_note(name)?;
        let _alone = self.alone_to_copy(name)?;
        let snapshot = self.find(name, label)?;
        if let Some(host) = self.host(name)? {
            let reason = format!("it is the host's own; copy {} to it", snapshot.display());
            return Err(VolumeError::Host { path: host, reason });
        }
        let directory = self.directory(name);
        let (files, new) = (directory.join("files"), directory.join(".files.new"));
        self.tidy_files(name)?;
        private(false).create(&new).map_err(failed("make", &new))?;
        let copied = copy(&snapshot, &new, note.size)?;
        // At every moment there is the one or the other.
        renameat_with(CWD, &new, CWD, &files, RenameFlags::EXCHANGE)
            .map_err(|error| failed("replace", &files)(error.into()))?;
        settle(&directory)?;
        // Programs find other files than they knew.
        if let Err(error) = self.tidy_files(name) {
            // The next one removes it.
            tracing::warn!("what was in volume `{name}` before is there still: {error}");
        }
        Ok(copied)
    }

    /// Removes a snapshot.
    ///
    /// # Errors
    /// There is none, a checkpoint needs it, somebody copies it just now, or the host refuses.
    pub fn remove_snapshot(&self, name: &Name, label: &Name) -> Result<(), VolumeError> {
        let _acting = self.home.act()?;
        self.read_note(name)?;
        let _copying = self.copying(name)?;
        // Nobody else could remove them.
        clear_leftovers(&self.snapshots_of(name))?;
        self.find(name, label)?;
        if let Some(checkpoint) = self.needed_by(name, label) {
            let (name, label) = (name.clone(), label.clone());
            return Err(VolumeError::Needed { name, label, checkpoint });
        }
        self.drop_snapshot(name, label)
    }

    /// Keeps everybody else from a volume for as long as a copy takes; who wants it is told so.
    fn alone_to_copy(&self, name: &Name) -> Result<[File; 2], VolumeError> {
        let both = [self.copying(name)?, self.alone(name)?];
        self.undo_unfinished_of(name)?;
        self.cut_files(name)?;
        Ok(both)
    }

    /// Keeps others from copying a volume or its snapshots.
    pub(super) fn copying(&self, name: &Name) -> Result<File, VolumeError> {
        let path = self.directory(name).join("copying");
        let copying = open_own(&path).map_err(failed("open", &path))?;
        flock(&copying, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| VolumeError::Busy(name.clone()))?;
        Ok(copying)
    }

    pub(super) fn find(&self, name: &Name, label: &Name) -> Result<PathBuf, VolumeError> {
        let path = self.snapshots_of(name).join(label.as_str());
        match path.is_dir() {
            true => Ok(path),
            false => Err(VolumeError::NoSnapshot { name: name.clone(), label: label.clone() }),
        }
    }
}

pub(super) fn private(is_recursive: bool) -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.mode(0o700).recursive(is_recursive);
    builder
}

/// Copies all files, which may count for `most`, to an empty directory, which is gone if that fails.
fn copy(from: &Path, to: &Path, most: ByteSize) -> Result<Copied, VolumeError> {
    let copied = File::open(from)
        .and_then(|files| copy_volume(files.as_fd(), File::open(to)?.as_fd(), most.bytes()));
    copied.map_err(|error| {
        // What is left is removed by the next attempt.
        let _ = remove_tree(to);
        failed("copy", from)(error)
    })
}

/// Gives a copy that is complete its name. The time of the directory is that of the snapshot.
pub(super) fn publish(new: &Path, path: &Path) -> Result<(), VolumeError> {
    let touched = File::open(new).and_then(|new| new.set_modified(std::time::SystemTime::now()));
    touched.map_err(failed("write", new))?;
    fs::rename(new, path).map_err(failed("write", path))
}

pub(super) fn clear(path: &Path) -> Result<(), VolumeError> {
    match remove_tree(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Removes a directory of a volume that nobody uses, with all that is in it: directories that their
/// owner may not write, too.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            let mut left = vec![path.to_owned()];
            while let Some(directory) = left.pop() {
                fs::set_permissions(&directory, Permissions::from_mode(0o700))?;
                for entry in fs::read_dir(&directory)? {
                    let entry = entry?;
                    if entry.file_type()?.is_dir() {
                        left.push(entry.path());
                    }
                }
            }
            fs::remove_dir_all(path)
        }
        done => done,
    }
}

/// Removes what others have left that were killed: nobody else copies just now.
pub(super) fn clear_leftovers(all: &Path) -> Result<(), VolumeError> {
    let entries = match fs::read_dir(all) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(failed("read", all))?,
    };
    for entry in entries {
        let entry = entry.map_err(failed("read", all))?;
        if entry.file_name().as_encoded_bytes().starts_with(UNDER_WAY.as_bytes()) {
            clear(&entry.path())?;
        }
    }
    Ok(())
}

/// Waits until names of a directory are on disk.
pub(super) fn settle(directory: &Path) -> Result<(), VolumeError> {
    let settled: io::Result<()> = File::open(directory).and_then(|all| all.sync_all());
    settled.map_err(failed("write", directory))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{config, store, write};
    use super::*;
    use std::fs::OpenOptions;
    use std::os::unix::fs::{MetadataExt, chown};
    use thaw_sandbox::VolumeShare;

    fn names() -> (Name, impl Fn(&str) -> Name) {
        (Name::new("data").unwrap(), |label| Name::new(label).unwrap())
    }

    #[test]
    fn a_snapshot_is_put_back() {
        let (_directory, volumes) = store();
        let (name, label) = names();
        volumes.create(&name, "1MiB".parse().unwrap(), &[], None).unwrap();
        let files = volumes.show(&name).unwrap().path;
        write(files.join("a"), "first").unwrap();
        // A part of one whose maker was killed.
        let part = volumes.snapshots_of(&name).join(".new-other");
        fs::create_dir_all(part.join("d")).unwrap();
        let owner = fs::metadata(&files).unwrap();
        // One directory that its owner may not write.
        fs::write(part.join("d/file"), "").unwrap();
        fs::set_permissions(part.join("d"), Permissions::from_mode(0o555)).unwrap();
        for path in [volumes.snapshots_of(&name), part.clone(), part.join("d"), part.join("d/file")]
        {
            chown(path, Some(owner.uid()), Some(owner.gid())).unwrap();
        }
        assert_eq!(volumes.snapshot(&name, &label("one")).unwrap().files, 1);
        assert!(!part.exists());
        write(files.join("a"), "second").unwrap();
        write(files.join("b"), "new").unwrap();
        volumes.restore(&name, &label("one")).unwrap();
        assert_eq!(fs::read(files.join("a")).unwrap(), b"first");
        assert!(!files.join("b").exists() && !files.parent().unwrap().join(".files.new").exists());
        // The snapshot itself is as it was, and can be put back again.
        write(files.join("a"), "third").unwrap();
        volumes.restore(&name, &label("one")).unwrap();
        assert_eq!(fs::read(files.join("a")).unwrap(), b"first");
        let again = volumes.snapshot(&name, &label("one"));
        assert!(matches!(again, Err(VolumeError::SnapshotExists { .. })), "{again:?}");
        let missing = volumes.restore(&name, &label("two"));
        assert!(matches!(missing, Err(VolumeError::NoSnapshot { .. })), "{missing:?}");
        volumes.remove_snapshot(&name, &label("one")).unwrap();
        assert!(volumes.show(&name).unwrap().snapshots.is_empty());
    }

    #[test]
    fn what_was_left_of_others_counts_no_longer_than_until_the_next_verb() {
        let (_directory, volumes) = store();
        let (name, label) = names();
        volumes.create(&name, "1MiB".parse().unwrap(), &[], None).unwrap();
        let owner = fs::metadata(volumes.show(&name).unwrap().path).unwrap();
        let leave = || {
            let part = volumes.snapshots_of(&name).join(".new-left");
            fs::create_dir_all(&part).unwrap();
            for path in [volumes.snapshots_of(&name), part] {
                chown(path, Some(owner.uid()), Some(owner.gid())).unwrap();
            }
            assert!(volumes.count_copies(&name).unwrap() > 0);
        };
        leave();
        // There is no such snapshot, and yet it is gone.
        let missing = volumes.remove_snapshot(&name, &label("left"));
        assert!(matches!(missing, Err(VolumeError::NoSnapshot { .. })), "{missing:?}");
        assert_eq!(volumes.count_copies(&name).unwrap(), 0);
        for number in 0..SNAPSHOTS_MAX {
            volumes.snapshot(&name, &label(&format!("s{number}"))).unwrap();
        }
        leave();
        let refused = volumes.snapshot(&name, &label("more"));
        assert!(matches!(refused, Err(VolumeError::TooMany(_))), "{refused:?}");
        assert_eq!(volumes.count_copies(&name).unwrap(), SNAPSHOTS_MAX as u64);
        // One that fails leaves nothing.
        volumes.remove_snapshot(&name, &label("s0")).unwrap();
        let path = volumes.show(&name).unwrap().path.join("file");
        write(path.clone(), "file").unwrap();
        let writer = OpenOptions::new().write(true).open(path).unwrap();
        volumes.snapshot(&name, &label("more")).unwrap_err();
        drop(writer);
        assert_eq!(volumes.count_copies(&name).unwrap(), SNAPSHOTS_MAX as u64 - 1);
    }

    #[test]
    fn nobody_writes_meanwhile_and_there_are_only_so_many() {
        let (_directory, volumes) = store();
        let (name, label) = names();
        let one = config("one", "data");
        let mounts = volumes.of_new_function(&one).unwrap();
        let refused = volumes.snapshot(&name, &label("a"));
        assert!(matches!(refused, Err(VolumeError::InUse(_))), "{refused:?}");
        drop(mounts);
        // One that has a file open without having the volume, as a sandbox whose daemon was killed.
        let path = volumes.show(&name).unwrap().path.join("file");
        write(path.clone(), "file").unwrap();
        let writer = OpenOptions::new().write(true).open(path).unwrap();
        let refused = volumes.snapshot(&name, &label("a")).unwrap_err();
        assert!(refused.to_string().contains("file is open to be written"), "{refused}");
        assert!(volumes.show(&name).unwrap().snapshots.is_empty());
        drop(writer);
        let alone = volumes.alone_to_copy(&name).unwrap();
        let refused = volumes.of_function(&one.name, &one.volumes, &VolumeShare::default());
        assert!(matches!(refused, Err(VolumeError::Busy(_))), "{refused:?}");
        drop(alone);
        for number in 0..SNAPSHOTS_MAX {
            volumes.snapshot(&name, &label(&format!("s{number}"))).unwrap();
        }
        let refused = volumes.snapshot(&name, &label("more"));
        assert!(matches!(refused, Err(VolumeError::TooMany(_))), "{refused:?}");
        assert_eq!(volumes.show(&name).unwrap().snapshots.len(), SNAPSHOTS_MAX);
    }
}
