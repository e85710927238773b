//! What lies in a volume, counted by descriptors: no path is too long for that.

use std::collections::{BTreeSet, HashMap};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ftruncate, openat, statat};
use rustix::io::Errno;

use super::lengths::Cut;
use super::{NAME_COST, content};

/// Deepest directory that a volume has: the root has depth 0.
pub(super) const DEPTH_MAX: usize = 64;
/// Most names that are looked at before a directory is moved further down.
const LOOKED_AT_MAX: usize = 1 << 16;

fn directory_in(parent: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(parent, name, flags, Mode::empty())
}

fn is_name(name: &CStr) -> bool {
    !matches!(name.to_bytes(), b"." | b"..")
}

/// Bytes that all below `root` counts for; at least `quota` if it cannot be counted: a volume
/// whose use is not known is full, and what is in it can be read and removed.
pub(super) fn count(root: BorrowedFd<'_>, quota: u64) -> u64 {
    let mut count = Count::default();
    match directory_in(root, c".").and_then(|root| count.add(&root, 0)) {
        Ok(()) => count.used,
        Err(_) => count.used.max(quota),
    }
}

#[derive(Default)]
struct Count {
    used: u64,
    /// Files with several names that are counted already, by inode number.
    twice: BTreeSet<u64>,
}

impl Count {
    fn add(&mut self, directory: &OwnedFd, depth: usize) -> Result<(), Errno> {
        if depth > DEPTH_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        for entry in Dir::read_from(directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if !is_name(name) {
                continue;
            }
            let found = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
            self.used = self.used.saturating_add(NAME_COST);
            if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
                self.add(&directory_in(directory.as_fd(), name)?, depth + 1)?;
            } else if found.st_nlink == 1 || self.twice.insert(found.st_ino) {
                // A file with several names is one.
                let content = content(found.st_mode, found.st_size as u64);
                self.used = self.used.saturating_add(content);
            }
        }
        Ok(())
    }
}

/// Cuts regular files below `root`, by inode number, and takes out what is cut. One that has not the length
/// that was granted was changed by somebody else since.
pub(super) fn cut(root: BorrowedFd<'_>, cuts: &mut HashMap<u64, Cut>) -> io::Result<()> {
    Ok(cut_below(&directory_in(root, c".")?, 0, cuts)?)
}

fn cut_below(directory: &OwnedFd, depth: usize, cuts: &mut HashMap<u64, Cut>) -> Result<(), Errno> {
    if depth > DEPTH_MAX {
        return Ok(());
    }
    for entry in Dir::read_from(directory)? {
        if cuts.is_empty() {
            return Ok(());
        }
        let entry = entry?;
        let name = entry.file_name();
        if !is_name(name) {
            continue;
        }
        let found = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
        match FileType::from_raw_mode(found.st_mode) {
            FileType::Directory => {
                // What cannot be read holds no file that this process could have opened.
                if let Ok(below) = directory_in(directory.as_fd(), name) {
                    cut_below(&below, depth + 1, cuts)?;
                }
            }
            FileType::RegularFile => {
                let Some(cut) = cuts.remove(&found.st_ino) else { continue };
                let size = found.st_size as u64;
                if size > cut.length && cut.granted.contains(&size) {
                    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                    ftruncate(openat(directory, name, flags, Mode::empty())?, cut.length)?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Depth of what has the name `path`.
pub(super) fn depth(path: &[u8]) -> usize {
    path.split(|&byte| byte == b'/').filter(|name| !name.is_empty()).count()
}

/// Refuses a directory that would lie deeper than a volume is.
pub(super) fn check_depth(path: &[u8]) -> Result<(), Errno> {
    if depth(path) > DEPTH_MAX { Err(Errno::NAMETOOLONG) } else { Ok(()) }
}

/// Refuses to move `directory` to a place of that depth if what lies in it were too deep then.
/// One with so much in it that this is not looked at is `EXDEV`: it can be copied.
pub(super) fn check_move(directory: BorrowedFd<'_>, depth: usize) -> Result<(), Errno> {
    check_below(&directory_in(directory, c".")?, depth, &mut 0)
}

fn check_below(directory: &OwnedFd, depth: usize, looked_at: &mut usize) -> Result<(), Errno> {
    if depth > DEPTH_MAX {
        return Err(Errno::NAMETOOLONG);
    }
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        *looked_at += 1;
        if *looked_at > LOOKED_AT_MAX {
            return Err(Errno::XDEV);
        }
        let kind = match entry.file_type() {
            FileType::Unknown => {
                let found = statat(directory, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW)?;
                FileType::from_raw_mode(found.st_mode)
            }
            kind => kind,
        };
        if kind == FileType::Directory && is_name(entry.file_name()) {
            let below = directory_in(directory.as_fd(), entry.file_name())?;
            check_below(&below, depth + 1, looked_at)?;
        }
    }
    Ok(())
}
