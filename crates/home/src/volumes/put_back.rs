//! Putting snapshots of several volumes back, while this process has the volumes and nobody uses them.
//!
//! The snapshots are copied beside the files of their volumes. Then the directories are exchanged, one
//! after the other; a journal says so, so that whoever comes next undoes it if this process is killed
//! before all of it is done. What was there before is removed last.

use super::at_rest::{
    COPY_PATIENCE, GONE_PATIENCE, VolumeSnapshot, check_users, wait_for_users, write_whole,
};
use super::snapshots::{clear, private, remove_tree, settle};
use super::{VolumeError, VolumeStore, failed};
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use thaw_sandbox::{ClosedVolume, FileNumbers, NUMBERED_MAX, Volume, copy_snapshot};
use thaw_store::Name;

/// Most bytes of a journal.
const JOURNAL_MAX: u64 = 1 << 20;
/// Most bytes of the numbers of a volume's files.
const NUMBERS_BYTES_MAX: u64 = 8 + 16 * NUMBERED_MAX as u64;
/// How often a journal is begun that others look at.
const JOURNAL_TRIES: usize = 8;

/// A volume whose files are being exchanged.
#[derive(Debug, Serialize, Deserialize)]
struct Exchange {
    volume: Name,
    /// The number of the directory that takes the place of its files.
    inode: u64,
}

/// Snapshots that are being put back. Unless that is done, all is as before when this is dropped.
pub struct PutBack {
    store: VolumeStore,
    parts: Vec<Part>,
    journal: Option<File>,
}

struct Part {
    name: Name,
    volume: Arc<Volume>,
    directory: PathBuf,
    files: PathBuf,
    new: PathBuf,
    /// The number of the new directory, and those that its files are shown under.
    inode: u64,
    numbers: FileNumbers,
    closed: Option<ClosedVolume>,
    is_exchanged: bool,
    /// Whether it is on disk that it is not exchanged.
    is_settled: bool,
    _copying: File,
}

impl VolumeStore {
    fn journal(&self) -> PathBuf {
        self.all().join(".put-back")
    }

    /// Where the numbers of a volume's files are which lie in the directory of this number.
    fn numbers_in(&self, name: &Name, inode: u64) -> PathBuf {
        self.directory(name).join(format!("inodes-{inode}"))
    }

    /// The numbers that the files of a volume are shown under.
    pub(super) fn numbers(&self, name: &Name, files: &Path) -> io::Result<FileNumbers> {
        let inode = fs::metadata(files)?.ino();
        match read_numbers(&self.numbers_in(name, inode)) {
            Ok(bytes) => FileNumbers::from_bytes(&bytes, inode),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(FileNumbers::default()),
            Err(error) => Err(error),
        }
    }

    /// Removes what was left of files that were exchanged, or were to be. The volume must be locked.
    pub(super) fn tidy_files(&self, name: &Name) -> Result<(), VolumeError> {
        // What the volume had before might be all that there is of it.
        self.undo_unfinished_of(name)?;
        self.clear_files(name)
    }

    fn clear_files(&self, name: &Name) -> Result<(), VolumeError> {
        let _acting = self.home.act()?;
        let directory = self.directory(name);
        clear(&directory.join(".files.new"))?;
        // Another directory may get the number of one that is gone.
        self.forget_numbers(name).map_err(failed("tidy up", &directory))
    }

    /// Whether there is something of files that were exchanged, or were to be.
    pub(super) fn has_left_files(&self, name: &Name) -> bool {
        let directory = self.directory(name);
        let Ok(current) = fs::metadata(directory.join("files")) else { return true };
        let current = format!("inodes-{}", current.ino());
        let is_left = |entry: fs::DirEntry| {
            let file = entry.file_name();
            let file = file.as_encoded_bytes();
            file == b".files.new" || file.starts_with(b"inodes-") && file != current.as_bytes()
        };
        fs::read_dir(&directory).into_iter().flatten().flatten().any(is_left)
    }

    /// Removes numbers of directories that are not the files of a volume.
    fn forget_numbers(&self, name: &Name) -> io::Result<()> {
        let directory = self.directory(name);
        let current = match fs::metadata(directory.join("files")) {
            Ok(found) => found.ino(),
            // It is being removed.
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        for entry in fs::read_dir(&directory)?.flatten() {
            let file = entry.file_name();
            let of = file.to_str().and_then(|name| name.strip_prefix("inodes-"));
            if of.is_some_and(|of| of != current.to_string()) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Copies snapshots beside the files of their volumes, which this process uses.
    ///
    /// # Errors
    /// One is missing, or is being copied, or the host refuses; nothing is left then.
    pub fn begin_put_back(&self, snapshots: &[VolumeSnapshot]) -> Result<PutBack, VolumeError> {
        let _acting = self.home.act()?;
        let mut begun = PutBack { store: self.clone(), parts: Vec::new(), journal: None };
        for VolumeSnapshot { volume, label } in snapshots {
            begun.parts.push(self.copy_beside(volume, label)?);
        }
        Ok(begun)
    }

    fn copy_beside(&self, name: &Name, label: &Name) -> Result<Part, VolumeError> {
        let note = self.read_note(name)?;
        if self.host(name)?.is_some() {
            return Err(VolumeError::HostFiles(name.clone()));
        }
        let volume = self.opened(name).ok_or_else(|| VolumeError::Missing(name.clone()))?;
        let copying = self.copying(name)?;
        let snapshot = self.find(name, label)?;
        let directory = self.directory(name);
        let (files, new) = (directory.join("files"), directory.join(".files.new"));
        self.tidy_files(name)?;
        let copied = private(false).create(&new).and_then(|()| {
            let (from, to) = (File::open(&snapshot)?, File::open(&new)?);
            let (_, pairs) = copy_snapshot(from.as_fd(), to.as_fd(), note.size.bytes())?;
            let numbers = self.numbers_of(name, label);
            let numbers =
                FileNumbers::from_bytes(&read_numbers(&numbers)?, from.metadata()?.ino())?;
            let shown = pairs.into_iter().filter_map(|(new, old)| Some((new, numbers.get(old)?)));
            Ok((to.metadata()?.ino(), FileNumbers::new(shown)))
        });
        let (inode, numbers) = copied.map_err(|error| {
            // What is left is removed by the next attempt.
            let _ = remove_tree(&new);
            failed("copy", &snapshot)(error)
        })?;
        Ok(Part {
            name: name.clone(),
            volume,
            directory,
            files,
            new,
            inode,
            numbers,
            closed: None,
            is_exchanged: false,
            is_settled: true,
            _copying: copying,
        })
    }

    /// The exchanges that a journal names. One that was not written whole was written before anything
    /// was exchanged.
    fn read_journal(&self, mut journal: &File) -> Result<Vec<Exchange>, VolumeError> {
        let mut text = Vec::new();
        let read = journal.rewind().and_then(|()| journal.take(JOURNAL_MAX).read_to_end(&mut text));
        read.map_err(failed("read", &self.journal()))?;
        Ok(serde_json::from_slice(&text).unwrap_or_default())
    }

    /// Undoes what one has begun who was killed. One who goes on is left alone, and so are volumes that
    /// somebody has locked.
    ///
    /// # Errors
    /// The host refuses with one of them, when the others are done.
    pub(super) fn undo_unfinished(&self) -> Result<(), VolumeError> {
        let _acting = self.home.act()?;
        let path = self.journal();
        let Some(Journal { file, is_locked: true }) = Journal::open(&path)? else { return Ok(()) };
        let (mut left, mut undone) = (Vec::new(), Ok(()));
        for exchange in self.read_journal(&file)? {
            if !self.directory(&exchange.volume).exists() {
                continue;
            }
            match self.copying(&exchange.volume) {
                Ok(_copying) => {
                    if let Err(error) = self.undo_exchange(&exchange) {
                        left.push(exchange);
                        undone = undone.and(Err(error));
                    }
                }
                Err(_) => left.push(exchange),
            }
        }
        undone.and(self.end_journal(&left))
    }

    /// As [`VolumeStore::undo_unfinished`], of one volume that the caller has locked.
    ///
    /// # Errors
    /// The host refuses, or somebody else looks at what is to be undone.
    pub(super) fn undo_unfinished_of(&self, name: &Name) -> Result<(), VolumeError> {
        let _acting = self.home.act()?;
        let path = self.journal();
        let Some(Journal { file, is_locked }) = Journal::open(&path)? else { return Ok(()) };
        let (own, left): (Vec<_>, Vec<_>) =
            self.read_journal(&file)?.into_iter().partition(|exchange| exchange.volume == *name);
        if own.is_empty() {
            return Ok(());
        }
        if !is_locked {
            return Err(VolumeError::Busy(name.clone()));
        }
        own.iter().try_for_each(|exchange| self.undo_exchange(exchange))?;
        self.end_journal(&left)
    }

    /// Whether the files of a volume are being exchanged, or somebody was killed who did that.
    pub(super) fn is_unfinished(&self, name: &Name) -> Result<bool, VolumeError> {
        let path = self.journal();
        let journal = match open_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            opened => opened.map_err(failed("open", &path))?,
        };
        let exchanges = self.read_journal(&journal)?;
        Ok(exchanges.iter().any(|exchange| exchange.volume == *name))
    }

    /// Undoes one exchange, if it was made. The volume must be locked.
    fn undo_exchange(&self, Exchange { volume, inode }: &Exchange) -> Result<(), VolumeError> {
        let directory = self.directory(volume);
        let (files, new) = (directory.join("files"), directory.join(".files.new"));
        let is_exchanged = fs::metadata(&files).is_ok_and(|found| found.ino() == *inode);
        if is_exchanged && new.exists() {
            exchange(&new, &files)?;
            settle(&directory)?;
        }
        self.clear_files(volume)
    }

    /// Leaves of a locked journal what is not undone yet.
    fn end_journal(&self, left: &[Exchange]) -> Result<(), VolumeError> {
        let path = self.journal();
        let ended = match left {
            [] => fs::remove_file(&path),
            _ => serde_json::to_vec(left)
                .map_err(io::Error::from)
                .and_then(|text| write_whole(&path, &text)),
        };
        ended.map_err(failed("write", &path))
    }
}

/// A journal that was there when it was locked, if nobody else has it locked.
struct Journal {
    file: File,
    is_locked: bool,
}

impl Journal {
    /// None: there is none.
    fn open(path: &Path) -> Result<Option<Self>, VolumeError> {
        match Self::open_now(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            opened => opened.map_err(failed("open", path)),
        }
    }

    fn open_now(path: &Path) -> io::Result<Option<Self>> {
        let file = open_file(path)?;
        let is_locked = flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
        // Somebody may have ended it before it was locked.
        Ok((file.metadata()?.nlink() > 0).then_some(Self { file, is_locked }))
    }
}

impl PutBack {
    /// Exchanges the files of all volumes. Requests of sandboxes that would change something wait from
    /// then on until this is kept or dropped.
    ///
    /// # Errors
    /// Somebody uses one of the volumes, or the host refuses; all is as before.
    pub fn exchange(&mut self) -> Result<(), VolumeError> {
        let _acting = self.store.home.act()?;
        let until = Instant::now() + COPY_PATIENCE;
        for part in &mut self.parts {
            let closed = ClosedVolume::close(&part.volume, until);
            part.closed = Some(closed.map_err(failed("replace", &part.files))?);
            check_users(&part.name, &part.volume, &|_| 0)?;
        }
        self.journal = Some(self.begin_journal()?);
        let done = self.parts.iter_mut().try_for_each(|part| part.exchange(&self.store));
        if done.is_err() {
            self.undo();
        }
        done
    }

    fn begin_journal(&self) -> Result<File, VolumeError> {
        let path = self.store.journal();
        self.store.undo_unfinished()?;
        let entry = |part: &Part| Exchange { volume: part.name.clone(), inode: part.inode };
        let entries: Vec<_> = self.parts.iter().map(entry).collect();
        let write = || -> io::Result<Option<File>> {
            let mut new = OpenOptions::new();
            new.write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
            let mut journal = new.open(&path)?;
            // Somebody may take it for one of a process that was killed until it is locked.
            let mut tries = 0..JOURNAL_TRIES;
            while flock(&journal, FlockOperation::NonBlockingLockExclusive).is_err() {
                tries.next().ok_or(ErrorKind::ResourceBusy)?;
                thread::sleep(Duration::from_millis(1));
            }
            if journal.metadata()?.nlink() == 0 {
                return Ok(None);
            }
            journal.write_all(&serde_json::to_vec(&entries)?)?;
            journal.sync_all()?;
            Ok(Some(journal))
        };
        for _ in 0..JOURNAL_TRIES {
            match write() {
                Ok(Some(journal)) => {
                    settle(&self.store.all())?;
                    return Ok(journal);
                }
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::AlreadyExists => break,
                Err(error) => return Err(failed("write", &path)(error)),
            }
        }
        let why = "other snapshots are being put back; try again";
        Err(failed("write", &path)(io::Error::new(ErrorKind::ResourceBusy, why)))
    }

    /// All is done: what was there before is removed, and everybody may go on.
    ///
    /// # Errors
    /// The host refuses, and all is as before when this is dropped.
    pub fn keep(&mut self) -> Result<(), VolumeError> {
        let _acting = self.store.home.act()?;
        let journal = self.store.journal();
        // From now on nobody undoes it.
        fs::remove_file(&journal).map_err(failed("remove", &journal))?;
        self.journal = None;
        if let Err(error) = settle(&self.store.all()) {
            // It might be undone after all: what was there before stays until the next one.
            tracing::warn!("what was in volumes before is there still: {error}");
            self.parts.clear();
        }
        for part in std::mem::take(&mut self.parts) {
            drop(part.closed);
            let tidied =
                remove_tree(&part.new).and_then(|()| self.store.forget_numbers(&part.name));
            if let Err(error) = tidied {
                // The next one removes it.
                let name = &part.name;
                tracing::warn!("what was in volume `{name}` before is there still: {error}");
            }
        }
        Ok(())
    }

    fn undo(&mut self) {
        let mut is_undone = true;
        for part in &mut self.parts {
            if let Err(error) = part.undo() {
                is_undone = false;
                tracing::error!("volume `{}` is not as it was: {error}", part.name);
            }
        }
        if !is_undone {
            // Whoever comes next finds it unlocked, and tries again.
            return;
        }
        if self.journal.take().is_some() {
            // Whoever comes next finds nothing to undo.
            let _ = fs::remove_file(self.store.journal());
        }
    }
}

impl Drop for PutBack {
    fn drop(&mut self) {
        let Ok(_acting) = self.store.home.act() else { return };
        // Sandboxes that have just ended give their files back.
        let until = Instant::now() + GONE_PATIENCE;
        for part in self.parts.iter().filter(|part| part.is_exchanged) {
            wait_for_users(&part.volume, &|_| 0, until);
        }
        self.undo();
        for part in self.parts.iter().filter(|part| !part.is_exchanged) {
            // The next one removes what is left.
            let _ = self.store.tidy_files(&part.name);
        }
    }
}

impl Part {
    fn exchange(&mut self, store: &VolumeStore) -> Result<(), VolumeError> {
        let numbers = store.numbers_in(&self.name, self.inode);
        let bytes = self.numbers.to_bytes(self.inode);
        write_whole(&numbers, &bytes).map_err(failed("write", &numbers))?;
        // At every moment there is the one or the other.
        exchange(&self.new, &self.files)?;
        self.is_exchanged = true;
        settle(&self.directory)?;
        // Sandboxes find the files where they are now.
        let Some(closed) = &mut self.closed else { return Ok(()) };
        closed.move_to(&self.files, self.numbers.clone()).map_err(failed("open", &self.files))
    }

    fn undo(&mut self) -> Result<(), VolumeError> {
        if self.is_exchanged {
            exchange(&self.new, &self.files)?;
            (self.is_exchanged, self.is_settled) = (false, false);
            if let Some(closed) = &mut self.closed {
                closed.move_back();
            }
        }
        if !self.is_settled {
            settle(&self.directory)?;
            self.is_settled = true;
        }
        Ok(())
    }
}

/// Opens a file to be read, and nothing else that may be there.
fn open_file(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(ErrorKind::InvalidData, "it is no file; remove it")),
    }
}

/// What a file of numbers holds. More than that is none.
fn read_numbers(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_file(path)?.take(NUMBERS_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn exchange(one: &Path, other: &Path) -> Result<(), VolumeError> {
    let exchanged = renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE);
    exchanged.map_err(|error| failed("replace", other)(error.into()))
}

#[cfg(test)]
mod tests {
    use super::super::Purpose;
    use super::super::tests::{config, store};
    use super::*;
    use thaw_sandbox::{VolumeMount, VolumeShare};

    /// A store with volumes that this process uses, of each a snapshot `one` with other files.
    fn used() -> (tempfile::TempDir, VolumeStore, Vec<VolumeMount>, Vec<VolumeSnapshot>) {
        let (directory, volumes) = store();
        let (mut mounts, mut snapshots) = (Vec::new(), Vec::new());
        for volume in ["data", "more"] {
            let one = config("one", volume);
            volumes.of_new_function(&one).unwrap();
            let share = VolumeShare::default();
            mounts.extend(volumes.of_function(&one.name, &one.volumes, &share).unwrap());
            let [volume, label] = [volume, "one"].map(|name| Name::new(name).unwrap());
            write(&volumes, &volume, "first");
            let made =
                volumes.begin_snapshots(std::slice::from_ref(&volume), &label, Purpose::Checkpoint);
            let made = made.unwrap();
            made.copy(&|_| 0).unwrap();
            made.keep(|| Ok(())).unwrap();
            write(&volumes, &volume, "second");
            snapshots.push(VolumeSnapshot { volume, label });
        }
        (directory, volumes, mounts, snapshots)
    }

    fn write(volumes: &VolumeStore, name: &Name, text: &str) {
        super::super::tests::write(volumes.directory(name).join("files/file"), text).unwrap();
    }

    fn read(volumes: &VolumeStore) -> [String; 2] {
        ["data", "more"].map(|name| {
            let file = volumes.directory(&Name::new(name).unwrap()).join("files/file");
            fs::read_to_string(file).unwrap()
        })
    }

    /// Names that are there only while something is put back.
    fn left_over(volumes: &VolumeStore) -> Vec<String> {
        let mut left = Vec::new();
        for at in [volumes.all(), volumes.all().join("data"), volumes.all().join("more")] {
            let names = fs::read_dir(at).unwrap().map(|entry| entry.unwrap().file_name());
            let names = names.map(|name| name.into_string().unwrap());
            left.extend(names.filter(|name| name.starts_with('.') || name.starts_with("inodes-")));
        }
        left
    }

    #[test]
    fn what_is_not_kept_is_as_before() {
        let (_directory, volumes, mounts, snapshots) = used();
        let before = mounts[0].volume.usage().unwrap();
        drop(volumes.begin_put_back(&snapshots).unwrap());
        let mut exchanged = volumes.begin_put_back(&snapshots).unwrap();
        exchanged.exchange().unwrap();
        assert_eq!(read(&volumes), ["first", "first"]);
        drop(exchanged);
        assert_eq!(
            (read(&volumes), left_over(&volumes)),
            (["second", "second"].map(str::to_owned), vec![])
        );
        // One of several that is missing.
        let mut some = snapshots.clone();
        some[1].label = Name::new("two").unwrap();
        let missing = volumes.begin_put_back(&some).map(drop);
        assert!(matches!(missing, Err(VolumeError::NoSnapshot { .. })), "{missing:?}");
        assert!(left_over(&volumes).is_empty());
        assert_eq!(mounts[0].volume.usage().unwrap(), before);

        let mut kept = volumes.begin_put_back(&snapshots).unwrap();
        kept.exchange().unwrap();
        kept.keep().unwrap();
        assert_eq!(read(&volumes), ["first", "first"]);
        // The numbers of the files that are there now.
        let left = left_over(&volumes);
        assert!(left.len() == 2 && left.iter().all(|name| name.starts_with("inodes-")), "{left:?}");
        // Nobody has counted what was written beside it until then.
        assert_eq!(mounts[0].volume.usage().unwrap(), (2 * 4096, 1 << 20));
        // With the numbers of other files nothing is shown when they are restored without memory.
        drop(mounts);
        volumes.restore(&snapshots[0].volume, &snapshots[0].label).unwrap();
        assert_eq!(left_over(&volumes).len(), 1);
    }

    #[test]
    fn numbers_and_journals_are_files() {
        let (directory, volumes, _mounts, snapshots) = used();
        let other = directory.path().join("other");
        let owner = fs::metadata(volumes.directory(&snapshots[0].volume)).unwrap();
        let numbers = volumes.numbers_of(&snapshots[0].volume, &snapshots[0].label);
        for path in [volumes.journal(), numbers] {
            let _ = fs::remove_file(&path);
            fs::write(&other, "[]").unwrap();
            std::os::unix::fs::symlink(&other, &path).unwrap();
            std::os::unix::fs::lchown(&path, Some(owner.uid()), Some(owner.gid())).unwrap();
            assert!(matches!(volumes.begin_put_back(&snapshots), Err(VolumeError::Io { .. })));
            fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn whoever_comes_next_undoes_what_was_not_finished() {
        let (_directory, volumes, _mounts, snapshots) = used();
        let mut killed = volumes.begin_put_back(&snapshots).unwrap();
        killed.exchange().unwrap();
        // One who goes on is left alone.
        volumes.undo_unfinished().unwrap();
        assert_eq!(read(&volumes), ["first", "first"]);
        // Only one of them was exchanged when it was killed, and its locks have ended with it.
        exchange(&killed.parts[1].new, &killed.parts[1].files).unwrap();
        drop(killed.journal.take());
        volumes.undo_unfinished().unwrap();
        // They are locked still.
        assert_eq!(read(&volumes), ["first", "second"]);
        killed.parts.clear();
        volumes.undo_unfinished().unwrap();
        assert_eq!(
            (read(&volumes), left_over(&volumes)),
            (["second", "second"].map(str::to_owned), vec![])
        );
    }
}
