//! How much is on disk below a directory that builds have filled.

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, openat, statat};
use rustix::io::Errno;
use std::collections::HashSet;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// Most entries that are looked at below one directory: a build makes as many as it likes.
const ENTRIES_MAX: usize = 200_000;
/// Most directories that lie in each other and are looked at: each is open meanwhile.
const DEPTH_MAX: usize = 64;

/// What lies below a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DirectoryUse {
    /// Bytes on disk; a file with several names counts once, and links are not followed.
    pub bytes: u64,
    /// There is more than was looked at.
    pub is_partial: bool,
}

impl DirectoryUse {
    /// Counts what lies below `path`; nothing if there is no such directory.
    ///
    /// # Errors
    /// The directory itself cannot be read.
    pub fn of(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(top) => Walk::new(ENTRIES_MAX).run(top),
            Err(Errno::NOENT) => Ok(Self::default()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// A walk through a tree that others may change meanwhile.
struct Walk {
    found: DirectoryUse,
    entries_left: usize,
    /// Device and number of files with several names.
    linked: HashSet<(u64, u64)>,
}

/// An open directory, and the directories in it that are still to be looked at.
struct Level {
    directory: OwnedFd,
    ahead: Vec<CString>,
}

impl Walk {
    fn new(entries_left: usize) -> Self {
        Self { found: DirectoryUse::default(), entries_left, linked: HashSet::new() }
    }

    fn run(mut self, top: OwnedFd) -> io::Result<DirectoryUse> {
        let ahead = self.look_at(&top)?;
        let mut levels = vec![Level { directory: top, ahead }];
        while let Some(level) = levels.last_mut() {
            let Some(name) = level.ahead.pop() else {
                levels.pop();
                continue;
            };
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            // What has gone meanwhile, or is nobody's to read, is left out.
            let opened = openat(&level.directory, &name, flags, Mode::empty());
            let looked_at = opened.map_err(io::Error::from).and_then(|directory| {
                let ahead = self.look_at(&directory)?;
                Ok(Level { directory, ahead })
            });
            match looked_at {
                Ok(below) if levels.len() < DEPTH_MAX => levels.push(below),
                Ok(below) => self.found.is_partial |= !below.ahead.is_empty(),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(_) => self.found.is_partial = true,
            }
        }
        Ok(self.found)
    }

    /// Counts the entries of a directory; the directories among them.
    fn look_at(&mut self, directory: &OwnedFd) -> io::Result<Vec<CString>> {
        let mut ahead = Vec::new();
        for entry in Dir::read_from(directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            if self.entries_left == 0 {
                self.found.is_partial = true;
                break;
            }
            self.entries_left -= 1;
            let Ok(stat) = statat(directory.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
            if is_directory {
                ahead.push(name.to_owned());
            }
            if is_directory || stat.st_nlink < 2 || self.linked.insert((stat.st_dev, stat.st_ino)) {
                self.found.bytes += stat.st_blocks as u64 * 512;
            }
        }
        Ok(ahead)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;

    fn walk(path: &Path, entries: usize) -> DirectoryUse {
        Walk::new(entries).run(File::open(path).unwrap().into()).unwrap()
    }

    #[test]
    fn a_file_counts_once_and_links_lead_nowhere() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        fs::create_dir_all(path("a/b")).unwrap();
        let empty = DirectoryUse::of(directory.path()).unwrap().bytes;
        fs::write(path("a/b/file"), vec![1; 1 << 20]).unwrap();
        fs::hard_link(path("a/b/file"), path("again")).unwrap();
        File::create(path("a/hole")).unwrap().set_len(1 << 30).unwrap();
        symlink("/usr", path("elsewhere")).unwrap();
        symlink("..", path("a/b/up")).unwrap();
        let found = DirectoryUse::of(directory.path()).unwrap();
        let bytes = found.bytes - empty;
        assert!((1 << 20..(1 << 20) + 16_384).contains(&bytes), "{bytes}");
        assert!(!found.is_partial);
        assert_eq!(DirectoryUse::of(&path("missing")).unwrap(), DirectoryUse::default());
        assert!(DirectoryUse::of(&path("again")).is_err());
    }

    #[test]
    fn a_tree_is_walked_so_far_and_no_further() {
        let directory = tempfile::tempdir().unwrap();
        for number in 0..100 {
            fs::write(directory.path().join(number.to_string()), vec![1; 4096]).unwrap();
        }
        assert!(!walk(directory.path(), 100).is_partial);
        let some = walk(directory.path(), 30);
        assert_eq!(some, DirectoryUse { bytes: 30 * 4096, is_partial: true });
        let mut deep = directory.path().to_owned();
        (0..DEPTH_MAX).for_each(|_| deep.push("d"));
        fs::create_dir_all(&deep).unwrap();
        assert!(!walk(directory.path(), ENTRIES_MAX).is_partial);
        fs::create_dir_all(deep.join("d/d")).unwrap();
        assert!(walk(directory.path(), ENTRIES_MAX).is_partial);
    }
}
