//! Directories that no sandbox sees, by whatever path.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Statx, StatxFlags, statx};

/// How long a hidden directory that is made anew may go unnoticed.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A file by device and inode number: the same by every path and bind mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    device: (u32, u32),
    inode: u64,
}

impl FileId {
    /// That of a file.
    pub fn of(file: &Statx) -> Self {
        Self { device: (file.stx_dev_major, file.stx_dev_minor), inode: file.stx_ino }
    }

    fn at(path: &Path) -> Option<Self> {
        // Nothing can be said of a path that this thread may not reach; but then the
        // sandbox, for which it looks, cannot reach it either.
        let flags = AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
        // A link to the directory is not what is to be hidden.
        statx(CWD, path, flags, StatxFlags::INO).ok().map(|file| Self::of(&file))
    }
}

/// The directories to hide.
#[derive(Debug)]
pub struct Hidden {
    paths: Vec<PathBuf>,
    known: Mutex<Known>,
}

#[derive(Debug)]
struct Known {
    /// As they were at first.
    first: Vec<FileId>,
    /// As they are now.
    present: Vec<FileId>,
    looked: Instant,
}

impl Hidden {
    /// Hides the directories at these paths, and what is mounted elsewhere of what
    /// lies directly in them. One that does not exist yet is hidden when it does.
    pub fn new(paths: &[PathBuf]) -> Self {
        let within = |path: &PathBuf| {
            let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
            let directories = entries.filter(|entry| entry.file_type().is_ok_and(|t| t.is_dir()));
            directories.map(|entry| entry.path()).collect::<Vec<_>>()
        };
        let all = paths.iter().cloned().chain(paths.iter().flat_map(within));
        let paths: Vec<PathBuf> = all.filter_map(|path| std::path::absolute(path).ok()).collect();
        let first: Vec<FileId> = paths.iter().filter_map(|path| FileId::at(path)).collect();
        let known = Known { present: first.clone(), first, looked: Instant::now() };
        Self { paths, known: Mutex::new(known) }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks whether there are others at their paths.
    pub fn refresh(&self) {
        if self.known().looked.elapsed() < LOOK_AGAIN {
            return;
        }
        let present = self.paths.iter().filter_map(|path| FileId::at(path)).collect();
        let mut known = self.known();
        known.present = present;
        known.looked = Instant::now();
    }

    /// Whether a file is one of them.
    pub fn contains(&self, file: &Statx) -> bool {
        let file = FileId::of(file);
        let known = self.known();
        known.first.contains(&file) || known.present.contains(&file)
    }
}
