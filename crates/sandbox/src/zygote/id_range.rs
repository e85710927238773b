//! User ids that belong to one zygote parent of the machine and to no other.
//!
//! The ids of its sandboxes keep them from each other's processes and files, and
//! limits such as `RLIMIT_NPROC` count by them: two daemons, or a daemon and a
//! `thaw run`, must not give the same ones away. Whoever wants ids locks their
//! numbers, as bytes of a file that all parents of one user see. The lock goes with
//! the process that holds it. Containers that have the host's ids but not its
//! `/run` do not see each other's locks.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, fstat, mkdir, openat};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::parent::{subordinate_window, window_of_namespace};
use crate::sys::{self, RangeLock};

/// A range of ids, locked until this is dropped.
#[derive(Debug)]
pub struct IdRange {
    /// The first id.
    pub first: u32,
    /// How many sandboxes can have one of their own.
    pub slots: u32,
    locks: Vec<File>,
}

/// How many parents a window of ids is large enough for, if it is smaller than all
/// that they want.
const PARENTS_MIN: u64 = 4;

impl IdRange {
    /// Reserves ids for `slots` sandboxes, or as many as there are for each of
    /// several parents. Root gets them from `first` on, with one more for the parent;
    /// others from their range of `/etc/subuid`, or none if they have no range.
    ///
    /// # Errors
    /// All are taken, or they cannot be locked.
    pub fn reserve(first: u32, slots: u32) -> io::Result<Option<Self>> {
        let (window, own) = if geteuid().is_root() {
            (window_of_namespace(first, slots)?, 1)
        } else {
            match subordinate_window() {
                Some(window) => (window, 0),
                None => return Ok(None),
            }
        };
        let files = lock_files()?;
        let ids = size(&window, u64::from(slots) + own);
        let first = take(&files, window, ids)?;
        let too_large = |_| io::Error::from(Errno::OVERFLOW);
        Ok(Some(Self {
            first: u32::try_from(first).map_err(too_large)?,
            slots: u32::try_from(ids - own).map_err(too_large)?,
            locks: files,
        }))
    }

    /// The files whose locks keep the ids from others, to be handed over ([`IdRange::restore`]).
    pub fn locks(&self) -> &[File] {
        &self.locks
    }

    /// The range that this process had before it executed another program, whose locks are those
    /// of the same open files (fcntl(2), "Open file description locks").
    pub fn restore(first: u32, slots: u32, locks: Vec<File>) -> Self {
        Self { first, slots, locks }
    }
}

/// How many ids of a window one parent gets.
fn size(window: &Range<u64>, wanted: u64) -> u64 {
    let len = window.end - window.start;
    // One for a sandbox and one for the parent, at least.
    wanted.min((len / PARENTS_MIN).max(2)).min(len)
}

/// Locks the first `count` ids of the window that are free in all files.
fn take(files: &[File], window: Range<u64>, count: u64) -> io::Result<u64> {
    let mut first = window.start;
    while first + count <= window.end {
        match lock_in_all(files, first, count)? {
            RangeLock::Taken => return Ok(first),
            RangeLock::HeldUntil(end) => first = end.max(first + 1),
        }
    }
    Err(io::Error::other(format!(
        "all user ids from {} to {} are those of other sandboxes on this machine; end some of \
         them, or make the range larger (subuid(5))",
        window.start,
        window.end - 1
    )))
}

fn lock_in_all(files: &[File], first: u64, count: u64) -> io::Result<RangeLock> {
    for (number, file) in files.iter().enumerate() {
        let outcome = sys::lock_range(file, first, count)?;
        if outcome != RangeLock::Taken {
            for locked in &files[..number] {
                sys::unlock_range(locked, first, count)?;
            }
            return Ok(outcome);
        }
    }
    Ok(RangeLock::Taken)
}

/// The files whose bytes stand for ids: those of [`directories`] that this process can
/// use, at least one. A service may see fewer of them than others do, and shares what
/// it sees with them.
fn lock_files() -> io::Result<Vec<File>> {
    let uid = geteuid().as_raw();
    let mut files = Vec::new();
    let mut refusals = Vec::new();
    for directory in directories(uid) {
        match open_lock_file(&directory, uid) {
            Ok(file) => files.push(file),
            Err(error) => refusals.push(format!("{} ({error})", directory.display())),
        }
    }
    match files.is_empty() {
        false => Ok(files),
        true => Err(io::Error::other(format!(
            "they cannot be locked in {}; let one of these be written to",
            refusals.join(" nor in ")
        ))),
    }
}

/// Where the files may be: places that exist as long as the machine runs.
fn directories(uid: u32) -> [PathBuf; 2] {
    let first = match uid {
        0 => PathBuf::from("/run/thaw/ids"),
        _ => PathBuf::from(format!("/run/user/{uid}/thaw-ids")),
    };
    [first, PathBuf::from(format!("/dev/shm/thaw-ids-{uid}"))]
}

/// Opens the file, in a directory that nobody else can look into: whoever could open
/// it could lock all ids.
fn open_lock_file(directory: &Path, uid: u32) -> io::Result<File> {
    let make = |path: &Path, mode| match mkdir(path, mode) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno),
    };
    if let Some(above) = directory.parent()
        && above == Path::new("/run/thaw")
    {
        make(above, Mode::from_raw_mode(0o755))?;
    }
    make(directory, Mode::RWXU)?;
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::PATH;
    let opened = openat(CWD, directory, flags, Mode::empty())?;
    let attributes = fstat(&opened)?;
    if attributes.st_uid != uid || attributes.st_mode & 0o077 != 0 {
        return Err(io::Error::other("it is somebody else's"));
    }
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(&opened, "lock", flags, Mode::RUSR | Mode::WUSR)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn opened(path: &Path) -> File {
        File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
    }

    #[test]
    fn nobody_gets_what_another_has() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let files = [(); 4].map(|()| [opened(&path)]);
        let window = 2_000_000..2_000_030;
        let firsts: Vec<u64> =
            files[..3].iter().map(|files| take(files, window.clone(), 10).unwrap()).collect();
        assert_eq!(firsts, [2_000_000, 2_000_010, 2_000_020]);
        let error = take(&files[3], window.clone(), 10).unwrap_err().to_string();
        assert!(error.contains("2000000 to 2000029"), "{error}");
        // The lock goes with the last descriptor; a gap may be too small.
        let [_first, second, _third, fourth] = files;
        drop(second);
        assert!(take(&fourth, window.clone(), 11).is_err());
        assert_eq!(take(&fourth, window, 10).unwrap(), 2_000_010);
    }

    #[test]
    fn whoever_sees_fewer_places_shares_what_it_sees() {
        let directory = tempfile::tempdir().unwrap();
        let [run, shm] = ["run", "shm"].map(|name| directory.path().join(name));
        let window = 100..130;
        let all = || [opened(&run), opened(&shm)];
        let (first, confined, second) = (all(), [opened(&shm)], all());
        assert_eq!(take(&first, window.clone(), 10).unwrap(), 100);
        assert_eq!(take(&confined, window.clone(), 10).unwrap(), 110);
        assert_eq!(take(&second, window.clone(), 10).unwrap(), 120);
        // What was locked in one place and not in the other was given back.
        drop(confined);
        assert_eq!(take(&all(), window, 10).unwrap(), 110);
    }

    #[test]
    fn ids_beyond_those_of_a_signed_number_can_be_locked() {
        let files = [tempfile::tempfile().unwrap()];
        let last = u64::from(u32::MAX);
        assert_eq!(take(&files, last - 10..last, 10).unwrap(), last - 10);
    }

    #[test]
    fn a_small_window_is_for_several_parents() {
        assert_eq!(size(&(100_000..165_536), 16_384), 16_384);
        assert_eq!(size(&(100_000..165_536), 100), 100);
        assert_eq!(size(&(100_000..110_000), 16_384), 2500);
        assert_eq!(size(&(5..8), 16_384), 2);
        assert_eq!(size(&(5..6), 16_384), 1);
    }

    #[test]
    fn ids_of_this_machine_are_reserved_once() {
        let Ok(Some(first)) = IdRange::reserve(3_000_000_000, 5) else {
            // A user without a range of ids has nothing to lock.
            assert!(!geteuid().is_root());
            return;
        };
        let second = IdRange::reserve(3_000_000_000, 5).unwrap().unwrap();
        assert!(first.first.abs_diff(second.first) > 5, "{first:?} {second:?}");
    }

    #[test]
    fn a_directory_that_others_can_use_is_not_trusted() {
        let directory = tempfile::tempdir().unwrap();
        let (uid, ids) = (geteuid().as_raw(), directory.path().join("ids"));
        open_lock_file(&ids, uid).unwrap();
        assert!(open_lock_file(&ids, uid + 1).is_err());
        std::fs::set_permissions(&ids, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(open_lock_file(&ids, uid).is_err());
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/tmp", &link).unwrap();
        assert!(open_lock_file(&link, uid).is_err());
    }
}
