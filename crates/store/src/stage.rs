//! Temporary files. Everything is written below `tmp/`, in a directory that its
//! session keeps locked, and moved to its place when it is complete and on disk.
//! A directory that nobody has locked belongs to a dead process and is removed.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use rustix::fs::{CWD, Mode, OFlags, RenameFlags, open, renameat_with};
use rustix::io::Errno;

use crate::error::{Context, Result, StoreError};
use crate::layout::Layout;
use crate::lock::try_lock_exclusive;
use crate::owner::Owner;

/// What to do when the place of a finished file is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Existing {
    /// Put the new file in its place (records).
    Replace,
    /// Leave it, drop the new file (content-addressed files: they are equal,
    /// and other processes have the old one mapped).
    Keep,
}

/// A locked directory of temporary files; removed when dropped.
#[derive(Debug)]
pub(crate) struct Stage {
    path: PathBuf,
    /// Holds the lock that tells others that this directory is in use.
    _directory: OwnedFd,
    owner: Owner,
    next: u64,
}

impl Stage {
    pub(crate) fn create(layout: &Layout) -> Result<Self> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let parent = layout.temporary();
        loop {
            let count = COUNTER.fetch_add(1, Ordering::Relaxed);
            let nanos = SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |elapsed| elapsed.subsec_nanos());
            let path = parent.join(format!("{}-{count}-{nanos}", std::process::id()));
            match fs::create_dir(&path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                result => result.context("create", &path)?,
            }
            if let Some(directory) = lock_directory(&path)? {
                return Ok(Self { path, _directory: directory, owner: layout.owner(), next: 0 });
            }
            // A collector took the directory between its creation and the lock.
        }
    }

    /// A new empty file, open for reading and writing.
    pub(crate) fn create_file(&mut self) -> Result<(File, PathBuf)> {
        let path = self.path.join(self.next.to_string());
        self.next += 1;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .context("create", &path)?;
        Ok((file, path))
    }

    /// Writes a small file so that its name stands for either its old or its
    /// whole new content, whenever the machine stops.
    pub(crate) fn write_record(
        &mut self,
        to: &Path,
        content: &[&[u8]],
        existing: Existing,
        mode: u32,
    ) -> Result<()> {
        let from = self.write_file(content, mode)?;
        sync(&from)?;
        publish(&from, to, existing)?;
        sync(to.parent().expect("every file of the store lies below its root"))
    }

    /// Writes a small file with its final permissions, which is neither on disk nor in its place.
    pub(crate) fn write_file(&mut self, content: &[&[u8]], mode: u32) -> Result<PathBuf> {
        let (file, path) = self.create_file()?;
        let written = write_all(&file, &path, content).and_then(|()| seal_as(&file, &path, mode));
        if written.is_err() {
            // On a full disk it would take room from the next.
            let _ = fs::remove_file(&path);
        }
        written.map(|()| path)
    }
}

fn write_all(mut file: &File, path: &Path, content: &[&[u8]]) -> Result<()> {
    content.iter().try_for_each(|part| file.write_all(part)).context("write", path)
}

impl Drop for Stage {
    fn drop(&mut self) {
        let Ok(_acting) = self.owner.act() else { return };
        // What cannot be removed now is removed when the store is next opened.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Opens and locks a session's directory; `None` if somebody else has it or it
/// is gone.
fn lock_directory(path: &Path) -> Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = match open(path, flags, Mode::empty()) {
        Ok(directory) => directory,
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(StoreError::io("open", path, error)),
    };
    if !try_lock_exclusive(&directory, path)? {
        return Ok(None);
    }
    let locked = rustix::fs::fstat(&directory).context("inspect", path)?;
    let still_there = fs::symlink_metadata(path)
        .is_ok_and(|now| now.ino() == locked.st_ino && now.dev() == locked.st_dev);
    Ok(still_there.then_some(directory))
}

/// A left-over of a process that ended in the middle of its work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOver {
    /// Its directory below `tmp/`.
    pub path: PathBuf,
    /// Bytes that it occupies.
    pub bytes: u64,
}

/// Finds the temporary directories of dead processes and removes them if `remove`
/// says so.
pub(crate) fn clean(layout: &Layout, remove: Removal) -> Result<Vec<LeftOver>> {
    let parent = layout.temporary();
    let mut found = Vec::new();
    for entry in fs::read_dir(&parent).context("read", &parent)? {
        let path = entry.context("read", &parent)?.path();
        if path.symlink_metadata().is_ok_and(|metadata| !metadata.is_dir()) {
            continue; // Not made by a session; it is not ours to remove.
        }
        let Some(_lock) = lock_directory(&path)? else { continue };
        let bytes = allocated_below(&path);
        if remove == Removal::Remove {
            match fs::remove_dir_all(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                result => result.context("remove", &path)?,
            }
        }
        found.push(LeftOver { path, bytes });
    }
    Ok(found)
}

/// Whether to remove what was found or only to report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Remove it.
    Remove,
    /// Say what would be removed.
    DryRun,
}

fn allocated_below(path: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(path) else { return 0 };
    entries.flatten().filter_map(|entry| entry.metadata().ok()).map(|m| m.blocks() * 512).sum()
}

/// Files that are made durable at once.
const SYNC_THREADS: usize = 16;
/// Permissions of most files: everybody who reaches them may read them.
pub(crate) const SHARED_MODE: u32 = 0o444;
/// Permissions of records that nobody but the store's owner may read.
pub(crate) const RECORD_MODE: u32 = 0o600;

/// Gives a finished file its final permissions: readable, never written again.
pub(crate) fn seal(file: &File, path: &Path) -> Result<()> {
    seal_as(file, path, SHARED_MODE)
}

/// The same with other permissions.
pub(crate) fn seal_as(file: &File, path: &Path, mode: u32) -> Result<()> {
    file.set_permissions(Permissions::from_mode(mode)).context("set the permissions of", path)
}

/// Moves a finished file to its place. Durable once the directory is synced.
pub(crate) fn publish(from: &Path, to: &Path, existing: Existing) -> Result<()> {
    if existing == Existing::Keep {
        match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
            Ok(()) => return Ok(()),
            Err(Errno::EXIST) => return fs::remove_file(from).context("remove", from),
            // Some file systems do not know the flag; replacing is right too.
            Err(Errno::INVAL | Errno::NOSYS) => {}
            Err(error) => return Err(StoreError::io("publish", to, error)),
        }
    }
    fs::rename(from, to).context("publish", to)
}

/// Makes the names in a directory durable.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    sync(path)
}

/// Makes files or directories of the store durable, some at a time: a file system writes its journal
/// once for all that wait for it.
pub(crate) fn sync_all(paths: &[&Path]) -> Result<()> {
    let sync_some = |part: &[&Path]| part.iter().try_for_each(|path| sync(path));
    if paths.len() < 2 {
        return sync_some(paths);
    }
    std::thread::scope(|scope| {
        let parts = paths.chunks(paths.len().div_ceil(SYNC_THREADS));
        let threads: Vec<_> = parts.map(|part| scope.spawn(move || sync_some(part))).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })
}

/// Makes the bytes of a file, or the names in a directory, durable.
pub(crate) fn sync(path: &Path) -> Result<()> {
    let file = File::open(path).context("open", path)?;
    file.sync_all().context("sync", path)
}
