//! Copies of what lies in a volume, for snapshots.
//!
//! Files are shared with the copy where the file system can do that (ioctl_ficlone(2)), and copied
//! elsewhere, holes and all. Nothing is followed, and nothing but regular files, directories and links
//! is copied. A copy counts as a volume does, and has a bound: programs of the host may make files of
//! their directory larger meanwhile.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, SeekFrom, Stat, Timespec, Timestamps, fstat, fsync,
    ftruncate, futimens, ioctl_ficlone, linkat, mkdirat, openat, readlinkat, seek, statat,
    symlinkat,
};
use rustix::io::Errno;

use super::tree::DEPTH_MAX;
use super::{NAME_COST, content};
use crate::sys;

/// Most files with several names that a copy can have, and most bytes of the paths that they are
/// found at first: to copy one for each of its names would take more room than the volume has.
const LINKED_MAX: usize = 1 << 14;
const LINKED_PATH_MAX: usize = 1024;

/// Most files and directories of a copy whose numbers are kept: 4 MiB of them.
pub const NUMBERED_MAX: usize = 1 << 18;
/// Most names of a copy without their numbers. Those of one directory are in memory at a time.
const NAMES_MAX: usize = 1 << 21;
/// Names after which it is looked at the clock.
const LOOK_EVERY: usize = 1 << 10;
/// Bytes that are copied before it is looked at the clock.
const CHUNK: u64 = 16 << 20;

/// What was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Regular files.
    pub files: u64,
    /// Those of them that share their blocks with the original.
    pub shared: u64,
}

/// Copies what lies in directory `from` into directory `to`, which is empty, and waits until it is
/// on disk. Nobody may change `from` meanwhile; whoever has a file of it open to be written is
/// found before anything is copied, and a file that has changed since is found when it is copied.
///
/// # Errors
/// A file is open to be written (`ETXTBSY`), has changed, is neither a regular file, a directory nor
/// a link, lies too deep, or cannot be read or written, or all of it counts for more than `most`
/// bytes or has too many names (`EDQUOT`); `to` holds a part then.
pub fn copy_volume(from: BorrowedFd<'_>, to: BorrowedFd<'_>, most: u64) -> io::Result<Copied> {
    let terms = CopyTerms { most, until: None, files: None, rests: &|_| false };
    let (copied, _) = copy_on_terms(from, to, &terms)?;
    settle_copy(to)?;
    Ok(copied)
}

/// Copies a snapshot of at most `most` bytes for the sandboxes of this process; with what became of
/// the files, by the numbers of the copy and of the snapshot.
///
/// # Errors
/// As [`copy_volume`].
pub fn copy_snapshot(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    most: u64,
) -> io::Result<(Copied, Vec<(u64, u64)>)> {
    let terms = CopyTerms { most, until: None, files: Some(NUMBERED_MAX), rests: &|_| false };
    let copied = copy_on_terms(from, to, &terms)?;
    settle_copy(to)?;
    Ok(copied)
}

/// Waits until a copy is on disk.
///
/// # Errors
/// The host refuses.
pub fn settle_copy(copy: BorrowedFd<'_>) -> io::Result<()> {
    let root = below(copy, c".")?;
    let terms = CopyTerms { most: u64::MAX, until: None, files: None, rests: &|_| false };
    walk(&root, 0, &mut Names::new(&terms), &mut |directory, name, found| match kind(found) {
        FileType::RegularFile | FileType::Directory => {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
            Ok(fsync(openat(directory, name, flags, Mode::empty())?)?)
        }
        _ => Ok(()),
    })?;
    Ok(fsync(root)?)
}

/// Within which bounds a copy is made.
pub(super) struct CopyTerms<'a> {
    /// Bytes that it may count for.
    pub most: u64,
    /// When it must be done.
    pub until: Option<Instant>,
    /// How many files and directories, and how many names, it may have at most, if its numbers are
    /// wanted.
    pub files: Option<usize>,
    /// Whether those who have this file open, by its number, are at rest.
    pub rests: &'a dyn Fn(u64) -> bool,
}

impl CopyTerms<'_> {
    /// How many names it may have.
    fn names(&self) -> usize {
        let room = usize::try_from(self.most / NAME_COST).unwrap_or(usize::MAX);
        self.files.unwrap_or(NAMES_MAX).min(room)
    }

    fn check_time(&self) -> io::Result<()> {
        match self.until {
            Some(until) if Instant::now() >= until => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "it takes too long; remove files, or copy it while nobody uses it",
            )),
            _ => Ok(()),
        }
    }
}

/// Copies as [`copy_volume`] does, but does not wait until it is on disk; with the numbers of each
/// copy and its original, if these are wanted.
///
/// # Errors
/// As [`copy_volume`], and it takes too long, or there are too many files.
pub(super) fn copy_on_terms(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    terms: &CopyTerms<'_>,
) -> io::Result<(Copied, Vec<(u64, u64)>)> {
    walk(&below(from, c".")?, 0, &mut Names::new(terms), &mut |directory, name, found| {
        terms.check_time()?;
        match kind(found) {
            FileType::RegularFile if (terms.rests)(found.st_ino) => Ok(()),
            FileType::RegularFile => is_unwritten(directory.as_fd(), name),
            FileType::Directory | FileType::Symlink => Ok(()),
            _ => Err(named(name, "is neither a file, a directory nor a link")),
        }
    })?;
    let (root, original) = (below(to, c".")?, below(from, c".")?);
    let (copied, linked) = (Copied::default(), BTreeMap::new());
    let (names, numbers) = (Names::new(terms), Vec::new());
    let mut copy = Copy { terms, root: &root, copied, linked, left: terms.most, names, numbers };
    copy.number(&root, fstat(&original)?.st_ino)?;
    copy.all(&original, &root, &Vec::new(), 0)?;
    Ok((copy.copied, copy.numbers))
}

struct Copy<'a> {
    terms: &'a CopyTerms<'a>,
    root: &'a OwnedFd,
    copied: Copied,
    /// Where the copy of each file with several names is, by inode number of the original.
    linked: BTreeMap<u64, Vec<u8>>,
    /// Bytes that the rest may count for.
    left: u64,
    names: Names<'a>,
    /// The numbers of copies and originals, if they are wanted.
    numbers: Vec<(u64, u64)>,
}

impl Copy<'_> {
    fn charge(&mut self, bytes: u64) -> io::Result<()> {
        self.left = self.left.checked_sub(bytes).ok_or_else(too_large)?;
        Ok(())
    }

    /// Notes which file the copy is of.
    fn number(&mut self, copy: &OwnedFd, original: u64) -> io::Result<()> {
        let Some(most) = self.terms.files else { return Ok(()) };
        if self.numbers.len() >= most {
            return Err(too_many(most));
        }
        self.numbers.push((fstat(copy)?.st_ino, original));
        Ok(())
    }

    fn all(&mut self, from: &OwnedFd, to: &OwnedFd, at: &[u8], depth: usize) -> io::Result<()> {
        for name in self.names.of(from)? {
            self.terms.check_time()?;
            let found = statat(from, &name, AtFlags::SYMLINK_NOFOLLOW)?;
            self.charge(NAME_COST)?;
            let path = match at {
                [] => name.to_bytes().to_vec(),
                _ => [at, b"/", name.to_bytes()].concat(),
            };
            match kind(&found) {
                FileType::Directory if depth < DEPTH_MAX => {
                    mkdirat(to, &name, Mode::RWXU)?;
                    let made = below(to.as_fd(), &name)?;
                    self.number(&made, found.st_ino)?;
                    self.all(&below(from.as_fd(), &name)?, &made, &path, depth + 1)?;
                    finish(&made, &found)?;
                }
                FileType::Directory => return Err(named(&name, "lies too deep")),
                FileType::Symlink => {
                    self.charge(content(found.st_mode, 0))?;
                    symlinkat(readlinkat(from, &name, Vec::new())?, to, &name)?;
                }
                FileType::RegularFile => self.file((from, to), path, &name, &found)?,
                _ => return Err(named(&name, "is neither a file, a directory nor a link")),
            }
        }
        Ok(())
    }

    fn file(
        &mut self,
        (from, to): (&OwnedFd, &OwnedFd),
        path: Vec<u8>,
        name: &CStr,
        found: &Stat,
    ) -> io::Result<()> {
        if found.st_nlink > 1 {
            if let Some(first) = self.linked.get(&found.st_ino) {
                return Ok(linkat(self.root, &first[..], to, name, AtFlags::empty())?);
            }
            if self.linked.len() >= LINKED_MAX || path.len() > LINKED_PATH_MAX {
                return Err(named(name, "has several names, as too many files have"));
            }
            self.linked.insert(found.st_ino, path);
        }
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let original = openat(from, name, OFlags::RDONLY | flags, Mode::empty())?;
        let new = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | flags;
        let made = openat(to, name, new, Mode::RUSR | Mode::WUSR)?;
        let opened = fstat(&original)?;
        if kind(&opened) != FileType::RegularFile || state(&opened) != state(found) {
            return Err(changed(name));
        }
        self.charge(content(opened.st_mode, opened.st_size as u64))?;
        self.copied.files += 1;
        match ioctl_ficlone(&made, &original) {
            Ok(()) => self.copied.shared += 1,
            Err(_) => self.data(&original, &made, opened.st_size as u64)?,
        }
        let (original, copy) = (fstat(&original)?, fstat(&made)?);
        if state(&original) != state(&opened) || copy.st_size != opened.st_size {
            return Err(changed(name));
        }
        self.number(&made, found.st_ino)?;
        finish(&made, found)
    }

    /// Copies the first `len` bytes of a file but for its holes (lseek(2), `SEEK_DATA`).
    fn data(&self, from: &OwnedFd, to: &OwnedFd, len: u64) -> io::Result<()> {
        let (mut from, mut to) = (File::from(from.try_clone()?), File::from(to.try_clone()?));
        ftruncate(&to, len)?;
        let mut at = 0;
        while at < len {
            self.terms.check_time()?;
            let start = match seek(&from, SeekFrom::Data(at)) {
                Ok(start) => start,
                // There is none from here on.
                Err(Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
            let end = seek(&from, SeekFrom::Hole(start))?.min(len).min(start.saturating_add(CHUNK));
            if end <= start {
                break;
            }
            seek(&from, SeekFrom::Start(start))?;
            seek(&to, SeekFrom::Start(start))?;
            let copied = io::copy(&mut Read::by_ref(&mut from).take(end - start), &mut to)?;
            if copied < end - start {
                // It is shorter by now, which is found.
                break;
            }
            at = end;
        }
        to.flush()
    }
}

/// What changes when somebody writes to a file.
fn state(found: &Stat) -> [i64; 6] {
    let inode = found.st_ino as i64;
    let [written, changed] = [found.st_mtime_nsec, found.st_ctime_nsec].map(|ns| ns as i64);
    [inode, found.st_size, found.st_mtime, written, found.st_ctime, changed]
}

fn changed(name: &CStr) -> io::Error {
    named(name, "has changed while it was copied; stop who writes to it, and try again")
}

/// Gives a copy the permissions and times of the original.
fn finish(made: &OwnedFd, found: &Stat) -> io::Result<()> {
    rustix::fs::fchmod(made, Mode::from_raw_mode(found.st_mode & 0o777))?;
    let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
    let times = Timestamps {
        last_access: time(found.st_atime, found.st_atime_nsec as i64),
        last_modification: time(found.st_mtime, found.st_mtime_nsec as i64),
    };
    Ok(futimens(made, &times)?)
}

/// Refuses a file that somebody has open to be written, or mapped so: fcntl(2), `F_SETLEASE`.
fn is_unwritten(directory: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = openat(directory, name, flags, Mode::empty())?;
    match sys::is_open_for_writing(&File::from(file)) {
        Ok(false) => Ok(()),
        Ok(true) => Err(io::Error::new(
            io::ErrorKind::ExecutableFileBusy,
            format!("{} is open to be written", name.to_string_lossy()),
        )),
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => Err(named(
            name,
            "belongs to another user than the volume, who alone can tell who writes to it; give it to the \
             volume's with chown(1)",
        )),
        Err(error) => Err(io::Error::other(format!(
            "its file system does not tell who writes to {} ({error})",
            name.to_string_lossy()
        ))),
    }
}

type Look<'a> = dyn FnMut(&OwnedFd, &CStr, &Stat) -> io::Result<()> + 'a;

fn walk(
    directory: &OwnedFd,
    depth: usize,
    names: &mut Names<'_>,
    look: &mut Look<'_>,
) -> io::Result<()> {
    for name in names.of(directory)? {
        let found = statat(directory, &name, AtFlags::SYMLINK_NOFOLLOW)?;
        look(directory, &name, &found)?;
        if kind(&found) == FileType::Directory {
            if depth >= DEPTH_MAX {
                return Err(named(&name, "lies too deep"));
            }
            walk(&below(directory.as_fd(), &name)?, depth + 1, names, look)?;
        }
    }
    Ok(())
}

/// Counts the names of a tree: whoever made them does not say how many there are.
struct Names<'a> {
    terms: &'a CopyTerms<'a>,
    found: usize,
}

impl<'a> Names<'a> {
    fn new(terms: &'a CopyTerms<'a>) -> Self {
        Self { terms, found: 0 }
    }

    /// Those of a directory.
    fn of(&mut self, directory: &OwnedFd) -> io::Result<Vec<CString>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(directory)? {
            let entry = entry?;
            if matches!(entry.file_name().to_bytes(), b"." | b"..") {
                continue;
            }
            if self.found >= self.terms.names() {
                return Err(match self.terms.files.unwrap_or(NAMES_MAX) {
                    most if self.found >= most => too_many(most),
                    _ => too_large(),
                });
            }
            self.found += 1;
            if self.found.is_multiple_of(LOOK_EVERY) {
                self.terms.check_time()?;
            }
            names.push(entry.file_name().to_owned());
        }
        Ok(names)
    }
}

fn too_many(most: usize) -> io::Error {
    let why = format!("it has more than {most} files and directories, or names of them");
    io::Error::new(io::ErrorKind::QuotaExceeded, why)
}

fn too_large() -> io::Error {
    let why = "it holds more than the volume may; remove files, or give it a larger size";
    io::Error::new(io::ErrorKind::QuotaExceeded, why)
}

fn below(directory: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(directory, name, flags, Mode::empty())?)
}

fn kind(found: &Stat) -> FileType {
    FileType::from_raw_mode(found.st_mode)
}

fn named(name: &CStr, what: &str) -> io::Error {
    io::Error::other(format!("{} {what}", name.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::Ordering::SeqCst;

    use super::*;

    fn copied(from: &std::path::Path, to: &std::path::Path) -> io::Result<Copied> {
        let (from, to) = (File::open(from).unwrap(), File::open(to).unwrap());
        copy_volume(from.as_fd(), to.as_fd(), 1 << 30)
    }

    #[test]
    fn a_copy_has_what_the_original_has() {
        let [from, to] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let (from, to) = (from.path(), to.path());
        fs::create_dir(from.join("d")).unwrap();
        fs::write(from.join("d/file"), [7; 10_000]).unwrap();
        fs::set_permissions(from.join("d/file"), fs::Permissions::from_mode(0o640)).unwrap();
        fs::hard_link(from.join("d/file"), from.join("twin")).unwrap();
        symlink("/etc/passwd", from.join("link")).unwrap();
        for number in 0..2000 {
            fs::write(from.join(format!("n{number}")), "n").unwrap();
            fs::hard_link(from.join(format!("n{number}")), from.join(format!("m{number}")))
                .unwrap();
        }
        assert_eq!(copied(from, to).unwrap().files, 2001);
        assert_eq!(fs::read(to.join("twin")).unwrap(), [7; 10_000]);
        let [one, twin] = ["d/file", "twin"].map(|name| fs::metadata(to.join(name)).unwrap());
        assert_eq!((one.ino(), one.mode() & 0o777), (twin.ino(), 0o640));
        assert_eq!(fs::read_link(to.join("link")).unwrap().to_str(), Some("/etc/passwd"));
        let old = fs::metadata(from.join("twin")).unwrap();
        assert_eq!((one.mtime(), one.mtime_nsec()), (old.mtime(), old.mtime_nsec()));
    }

    #[test]
    fn holes_stay_holes() {
        let [from, to] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let path = from.path().join("file");
        let file = File::create(&path).unwrap();
        file.write_all_at(b"begin", 0).unwrap();
        file.write_all_at(b"middle", 300 << 20).unwrap();
        file.set_len(900 << 20).unwrap();
        drop(file);
        copied(from.path(), to.path()).unwrap();
        let copy = File::open(to.path().join("file")).unwrap();
        let found = copy.metadata().unwrap();
        assert_eq!(found.len(), 900 << 20);
        assert!(found.blocks() * 512 < 1 << 20, "{} blocks", found.blocks());
        let mut middle = [0; 7];
        copy.read_exact_at(&mut middle, 300 << 20).unwrap();
        assert_eq!(&middle, b"middle\0");
    }

    #[test]
    fn a_copy_counts_as_a_volume_does_and_has_a_bound() {
        let [from, to] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        fs::create_dir(from.path().join("d")).unwrap();
        fs::write(from.path().join("d/file"), [7; 5000]).unwrap();
        fs::hard_link(from.path().join("d/file"), from.path().join("twin")).unwrap();
        symlink("d", from.path().join("link")).unwrap();
        let within = |most| {
            let [from, to] = [&from, &to].map(|at| File::open(at.path()).unwrap());
            copy_volume(from.as_fd(), to.as_fd(), most)
        };
        // Four names, a file of two pages, and the target of a link.
        let counted = 4 * 4096 + 8192 + 4096;
        let root = File::open(from.path()).unwrap();
        assert_eq!(super::super::tree::count(root.as_fd(), 1 << 20), counted);
        let refused = within(counted - 1).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::QuotaExceeded, "{refused}");
        fs::remove_dir_all(to.path()).unwrap();
        fs::create_dir(to.path()).unwrap();
        assert_eq!(within(counted).unwrap().files, 1);
    }

    #[test]
    fn names_are_counted_before_anything_is_copied() {
        let [from, to] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        fs::create_dir(from.path().join("d")).unwrap();
        for number in 0..2000 {
            symlink("d", from.path().join(format!("d/{number}"))).unwrap();
        }
        let copy = |most, files, until| {
            let [from, to] = [&from, &to].map(|at| File::open(at.path()).unwrap());
            let terms = CopyTerms { most, until, files, rests: &|_| false };
            copy_on_terms(from.as_fd(), to.as_fd(), &terms).unwrap_err()
        };
        let refused = copy(1 << 30, Some(2000), None);
        assert!(refused.to_string().contains("more than 2000 files"), "{refused}");
        let refused = copy(2000 * NAME_COST, None, None);
        assert!(refused.to_string().contains("more than the volume may"), "{refused}");
        let late = copy(1 << 30, None, Some(Instant::now()));
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_changes_while_it_is_copied_is_refused() {
        let [from, to] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        fs::write(from.path().join("file"), vec![7; 4 << 20]).unwrap();
        // Nobody has it open to be written, as when it is mapped.
        let file = File::open(from.path().join("file")).unwrap();
        let is_over = std::sync::atomic::AtomicBool::new(false);
        let refused = std::thread::scope(|threads| {
            threads.spawn(|| {
                while !is_over.load(SeqCst) {
                    file.set_modified(std::time::SystemTime::now()).unwrap();
                }
            });
            // Where copies share their blocks, one may be over before the clock of the file system
            // goes on.
            let refused = (0..1000).find_map(|number| {
                let to = to.path().join(number.to_string());
                fs::create_dir(&to).unwrap();
                let refused = copied(from.path(), &to).err();
                fs::remove_dir_all(&to).unwrap();
                refused
            });
            is_over.store(true, SeqCst);
            refused.expect("it changes all the time")
        });
        assert!(refused.to_string().contains("has changed while it was copied"), "{refused}");
        copied(from.path(), to.path()).unwrap();
    }

    #[test]
    fn a_file_that_changes_is_told_from_one_that_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, "a").unwrap();
        let look = || state(&fstat(File::open(&path).unwrap()).unwrap());
        let first = look();
        assert_eq!(look(), first);
        // Clocks of file systems may go in steps of some milliseconds.
        std::thread::sleep(std::time::Duration::from_millis(20));
        fs::write(&path, "b").unwrap();
        assert_ne!(look(), first);
    }

    #[test]
    fn files_that_are_written_or_special_are_refused_before_anything_is_copied() {
        let [from, to] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let (from, to) = (from.path(), to.path());
        fs::write(from.join("a"), "a").unwrap();
        let writer = fs::OpenOptions::new().write(true).open(from.join("a")).unwrap();
        let refused = copied(from, to).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ExecutableFileBusy, "{refused}");
        assert_eq!(fs::read_dir(to).unwrap().count(), 0);
        drop(writer);
        let socket = UnixListener::bind(from.join("socket")).unwrap();
        assert!(copied(from, to).unwrap_err().to_string().contains("socket is neither"));
        assert_eq!(fs::read_dir(to).unwrap().count(), 0);
        drop(socket);
    }
}
