//! A little room on the disk for what is small, and needed although the disk is full: where a daemon
//! is reached, which version of a function is active.
//!
//! A file holds the room. A write for which there is none gets some of it, a step at a time, and what
//! it has not used goes back. One writer at a time has the file locked, the last of all locks that it
//! takes, so that nobody gets the room of another one. Whoever does not ask (logs, builds) gets none
//! of it but by chance.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, OFlags, fallocate, fstatvfs};

use crate::error::StoreError;
use crate::layout::RESERVE_NAME;
use crate::lock::lock_exclusive;

/// Bytes that are held.
pub const RESERVE: u64 = 512 << 10;
/// Bytes that a write is given at a time.
const STEP: u64 = 128 << 10;
/// Smallest piece that is taken back.
const PIECE: u64 = 4 << 10;
/// Bytes that others have on a disk when the reserve is taken from it.
const LEFT_TO_OTHERS: u64 = 4 << 20;

/// The reserve of a store.
#[derive(Clone, Debug)]
pub struct Reserve {
    path: PathBuf,
}

/// How the room on a disk stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// The reserve is whole, and there is room beside it.
    Enough,
    /// The disk is full but for the reserve, or has too little even for that.
    Short,
}

/// An error by which a write says that the disk, or the quota of its owner, is full.
pub trait DiskFull {
    /// Whether it says so.
    fn is_disk_full(&self) -> bool;
}

impl DiskFull for io::Error {
    fn is_disk_full(&self) -> bool {
        matches!(self.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }
}

impl DiskFull for StoreError {
    fn is_disk_full(&self) -> bool {
        matches!(self, Self::NoSpace { .. })
    }
}

impl Reserve {
    /// That of the store at `root`, whether it is there or not.
    pub fn of(root: &Path) -> Self {
        Self { path: root.join(RESERVE_NAME) }
    }

    /// Takes the room that the reserve lacks, if the disk has enough.
    ///
    /// # Errors
    /// The host's, also if its file system cannot hold room for a file.
    pub fn fill(&self) -> io::Result<Room> {
        let file = self.open(OpenOptions::new().create(true))?;
        // A copy of a store may have the length without the room.
        let lacks = || {
            let found = file.metadata()?;
            let held = found.size().min(found.blocks() * 512);
            Ok::<_, io::Error>(RESERVE.saturating_sub(held))
        };
        if free(&file)? < LEFT_TO_OTHERS + lacks()? {
            return Ok(Room::Short);
        }
        if lacks()? > 0 {
            // Not while somebody uses it.
            lock_exclusive(&file, &self.path).map_err(io::Error::other)?;
            fallocate(&file, FallocateFlags::empty(), 0, RESERVE)?;
        }
        Ok(Room::Enough)
    }

    /// Does something that takes little room. Where the disk is full, it is done again with room of
    /// the reserve, as often as that has some; it must leave nothing behind when it fails.
    ///
    /// # Errors
    /// Those of `write`, also that the disk is full if the reserve has too little or is not there.
    pub fn spend<T, E: DiskFull>(&self, mut write: impl FnMut() -> Result<T, E>) -> Result<T, E> {
        let full = match write() {
            Err(error) if error.is_disk_full() => error,
            done => return done,
        };
        let Ok(file) = self.open(&mut OpenOptions::new()) else { return Err(full) };
        if lock_exclusive(&file, &self.path).is_err() {
            return Err(full);
        }
        let before = file.metadata().map_or(0, |metadata| metadata.size());
        let mut result = Err(full);
        let mut held = before;
        while held > 0 && result.as_ref().is_err_and(DiskFull::is_disk_full) {
            held = held.saturating_sub(STEP);
            if file.set_len(held).is_err() {
                break;
            }
            result = write();
        }
        take_back(&file, held, before);
        result
    }

    fn open(&self, options: &mut OpenOptions) -> io::Result<File> {
        // Whatever lies there is not waited for, nor shortened if it is somebody's file.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
        let file = options.write(true).mode(0o600).custom_flags(flags).open(&self.path)?;
        let found = file.metadata()?;
        match found.is_file() && found.nlink() == 1 {
            true => Ok(file),
            false => Err(io::Error::other("the reserve is no file of its own; remove it")),
        }
    }
}

/// Bytes that everybody may still take on the disk of a file.
fn free(file: &File) -> io::Result<u64> {
    let disk = fstatvfs(file)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// Takes back as much as there is, up to what was held before. What is left out was used, by this
/// writer or by somebody else.
fn take_back(file: &File, mut held: u64, before: u64) {
    let mut piece = STEP;
    while piece >= PIECE && held < before {
        let wanted = piece.min(before - held);
        match fallocate(file, FallocateFlags::empty(), held, wanted) {
            Ok(()) => held += wanted,
            Err(_) => {
                // A part may have been had.
                let _ = file.set_len(held);
                piece /= 2;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn full() -> io::Error {
        io::Error::from(io::ErrorKind::StorageFull)
    }

    fn filled() -> (tempfile::TempDir, Reserve) {
        let directory = tempfile::tempdir().unwrap();
        let reserve = Reserve::of(directory.path());
        assert_eq!(reserve.fill().unwrap(), Room::Enough);
        (directory, reserve)
    }

    fn held(reserve: &Reserve) -> (u64, u64) {
        let metadata = std::fs::metadata(&reserve.path).unwrap();
        (metadata.size(), metadata.blocks() * 512)
    }

    #[test]
    fn room_is_held_and_taken_back() {
        let (_directory, reserve) = filled();
        let (len, allocated) = held(&reserve);
        assert!(len == RESERVE && allocated >= RESERVE, "{allocated}");
        let tries = Cell::new(0);
        let done = reserve.spend(|| {
            tries.set(tries.get() + 1);
            // The third step is enough.
            if held(&reserve).0 > RESERVE - 3 * STEP { Err(full()) } else { Ok(5) }
        });
        assert_eq!((done.unwrap(), tries.get()), (5, 4));
        assert_eq!(held(&reserve).0, RESERVE, "this disk is not full");
    }

    #[test]
    fn room_that_a_copy_lacks_is_taken_and_what_is_no_reserve_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let reserve = Reserve::of(directory.path());
        File::create(&reserve.path).unwrap().set_len(RESERVE).unwrap();
        assert_eq!(held(&reserve), (RESERVE, 0));
        assert_eq!(reserve.fill().unwrap(), Room::Enough);
        assert!(held(&reserve).1 >= RESERVE);
        let other = directory.path().join("other");
        std::fs::rename(&reserve.path, &other).unwrap();
        std::fs::hard_link(&other, &reserve.path).unwrap();
        reserve.fill().unwrap_err();
        let done: io::Result<()> = reserve.spend(|| Err(full()));
        assert!(done.unwrap_err().is_disk_full());
        assert_eq!(std::fs::metadata(&other).unwrap().size(), RESERVE, "it is whole");
        std::fs::remove_file(&reserve.path).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &reserve.path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        reserve.fill().unwrap_err();
    }

    #[test]
    fn a_write_that_needs_more_than_there_is_fails_as_it_would() {
        let (_directory, reserve) = filled();
        let done: io::Result<()> = reserve.spend(|| Err(full()));
        assert!(done.unwrap_err().is_disk_full());
        assert_eq!(held(&reserve).0, RESERVE);
        // There is none.
        let none = Reserve::of(Path::new("/nonexistent"));
        let done: io::Result<()> = none.spend(|| Err(full()));
        assert!(done.unwrap_err().is_disk_full());
    }

    #[test]
    fn other_errors_cost_nothing() {
        let (_directory, reserve) = filled();
        let tries = Cell::new(0);
        let done: io::Result<()> = reserve.spend(|| {
            tries.set(tries.get() + 1);
            Err(io::ErrorKind::PermissionDenied.into())
        });
        assert_eq!(done.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(tries.get(), 1);
    }

    /// One writer at a time: what another one frees is for itself.
    #[test]
    fn many_who_write_at_once_wait_for_each_other() {
        let (_directory, reserve) = filled();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let first = Cell::new(true);
                    let done = reserve.spend(|| match first.replace(false) {
                        true => Err(full()),
                        false => Ok(held(&reserve).0),
                    });
                    assert_eq!(done.unwrap(), RESERVE - STEP);
                });
            }
        });
        assert_eq!(held(&reserve).0, RESERVE);
    }

    #[test]
    fn no_link_of_the_owners_is_followed() {
        let directory = tempfile::tempdir().unwrap();
        let elsewhere = directory.path().join("elsewhere");
        std::fs::write(&elsewhere, "content").unwrap();
        std::os::unix::fs::symlink(&elsewhere, directory.path().join("reserve")).unwrap();
        let reserve = Reserve::of(directory.path());
        reserve.fill().unwrap_err();
        let done: io::Result<()> = reserve.spend(|| Err(full()));
        done.unwrap_err();
        assert_eq!(std::fs::read(elsewhere).unwrap(), b"content");
    }
}
