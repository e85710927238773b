//! A stream of tar from a sandbox becomes a directory of this machine, for `thaw sandbox cp`.
//!
//! The sandbox decides nothing but what is in that directory: it is made anew, each file in it is
//! made anew, no symbolic link is followed on the way to one (openat2(2), `RESOLVE_BENEATH` and
//! `RESOLVE_NO_SYMLINKS`), and nothing is made that gives rights to whoever runs it. How many files
//! there are, and how large they are, has the bounds of the node.

use crate::failure::Failure;
use rustix::fs::{
    AtFlags, Mode, OFlags, ResolveFlags, Timespec, Timestamps, UTIME_OMIT, fchmod, futimens,
    mkdirat, openat, openat2, symlinkat, utimensat,
};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};
use tar::{Archive, Entry, EntryType};
use thaw_node::remote::tree::{FAILED_RECORD, LEFT_OUT_RECORD, TREE_BYTES_MAX, TREE_ENTRIES_MAX};
use thaw_oci::{Allowance, Metered, Trailing};
use thaw_sandbox::escape;

/// Most bytes of the headers of one entry.
const HEADERS_MAX: u64 = 1 << 20;
/// Most bytes of the paths of directories.
const DIRECTORIES_MAX: usize = 256 << 20;
/// Zeros at the end of an archive, at least.
const BLOCK: u64 = 512;
/// Zeros of a file that are not written, but left out as a hole.
const HOLE: usize = 4096;

/// Makes `to`, which is not there yet, with all that the stream has.
///
/// # Errors
/// One sentence; what has come until then stays.
pub fn unpack(stream: impl Read, to: &Path) -> Result<(), Failure> {
    let told = |error: io::Error| Failure::failed(format!("{}: {error}", to.display()));
    fs::create_dir(to).map_err(told)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = rustix::fs::open(to, flags, Mode::empty()).map_err(|errno| told(errno.into()))?;
    let (directories, held, bytes, entries) = Default::default();
    let mut download = Download { root, to, near: None, directories, held, bytes, entries };
    download.run(stream).map_err(|failure| {
        let reason = failure.message().unwrap_or_default().to_owned();
        Failure::failed(format!("{reason}; what has come until then is in {}", to.display()))
    })
}

/// A directory whose permissions and time are set when all is in it.
struct Directory {
    path: PathBuf,
    mode: Mode,
    mtime: i64,
}

struct Download<'a> {
    root: OwnedFd,
    to: &'a Path,
    /// The directory in which the last entry is: the next one is mostly there, too.
    near: Option<(PathBuf, OwnedFd)>,
    directories: Vec<Directory>,
    held: usize,
    bytes: u64,
    entries: u64,
}

fn stopped(error: &io::Error) -> Failure {
    Failure::failed(format!("the copy has stopped half-way ({error})"))
}

impl Download<'_> {
    fn run(&mut self, stream: impl Read) -> Result<(), Failure> {
        let allowance = Allowance::new(HEADERS_MAX);
        let (stream, zeros) = Trailing::new(stream);
        let mut archive = Archive::new(Metered::new(stream, allowance.clone()));
        let mut entries = archive.entries().map_err(|error| stopped(&error))?;
        loop {
            allowance.set(HEADERS_MAX);
            zeros.set(0);
            let Some(entry) = entries.next() else { break };
            let entry = entry.map_err(|error| stopped(&error))?;
            // A record is read into memory.
            let is_record = entry.header().entry_type().is_pax_global_extensions();
            let contents = if is_record { 0 } else { entry.size() };
            allowance.set(contents.saturating_add(HEADERS_MAX));
            self.entry(entry)?;
        }
        allowance.set(HEADERS_MAX);
        // Whether it has come to its end, and not just to the end of an entry.
        let rest = io::copy(&mut archive.into_inner(), &mut io::sink());
        rest.map_err(|error| stopped(&error))?;
        if zeros.get() < BLOCK {
            return Err(stopped(&io::Error::other("its end is missing")));
        }
        self.finish_directories()
    }

    fn entry<R: Read>(&mut self, mut entry: Entry<'_, R>) -> Result<(), Failure> {
        let kind = entry.header().entry_type();
        if kind.is_pax_global_extensions() {
            return self.record(&mut entry);
        }
        let path = inner_path(&entry.path_bytes())?;
        self.count(&entry)?;
        let header = entry.header();
        // Not what would give rights to whoever runs it.
        let mode = header.mode().map_err(|error| stopped(&error))? & 0o777;
        let mtime = header.mtime().map_err(|error| stopped(&error))?;
        let (mode, mtime) = (Mode::from_raw_mode(mode), i64::try_from(mtime).unwrap_or(i64::MAX));
        let made = match kind {
            EntryType::Directory => self.directory(path.clone(), mode, mtime),
            EntryType::Symlink => self.link(&path, &entry, mtime),
            EntryType::Regular => self.file(&path, &mut entry, mode, mtime),
            _ => Err(io::Error::other("the sandbox sends what a tree does not have")),
        };
        made.map_err(|error| {
            let path = escape(path.as_os_str().as_encoded_bytes());
            Failure::failed(format!("{}/{path}: {error}", self.to.display()))
        })
    }

    fn count<R: Read>(&mut self, entry: &Entry<'_, R>) -> Result<(), Failure> {
        self.entries += 1;
        self.bytes = self.bytes.saturating_add(entry.size());
        match self.entries > TREE_ENTRIES_MAX || self.bytes > TREE_BYTES_MAX {
            true => Err(Failure::failed("the sandbox sends more than a tree may have")),
            false => Ok(()),
        }
    }

    /// What the daemon says beside the files.
    fn record<R: Read>(&self, entry: &mut Entry<'_, R>) -> Result<(), Failure> {
        let records = entry.pax_extensions().map_err(|error| stopped(&error))?;
        for record in records.into_iter().flatten() {
            let record = record.map_err(|error| stopped(&error))?;
            let value = escape(record.value_bytes());
            match record.key() {
                Ok(FAILED_RECORD) => return Err(Failure::failed(value)),
                Ok(LEFT_OUT_RECORD) => {
                    let (count, names) = value.split_once(' ').unwrap_or((&value, ""));
                    eprintln!(
                        "thaw: {count} left out, which are no files or directories, or have gone: \
                         {names}"
                    );
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The directory in which a path is, and the name there.
    fn place<'p>(&mut self, path: &'p Path) -> io::Result<(&OwnedFd, &'p Path)> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let parent = path.parent().unwrap_or(Path::new(""));
        if self.near.as_ref().is_none_or(|(path, _)| path != parent) {
            let opened = open_beneath(&self.root, parent)?;
            self.near = Some((parent.to_owned(), opened));
        }
        let near = self.near.as_ref().map(|(_, opened)| opened);
        Ok((near.unwrap_or(&self.root), Path::new(name)))
    }

    fn directory(&mut self, path: PathBuf, mode: Mode, mtime: i64) -> io::Result<()> {
        if !path.as_os_str().is_empty() {
            let (place, name) = self.place(&path)?;
            mkdirat(place, name, Mode::RWXU)?;
        }
        self.held += path.as_os_str().len() + size_of::<Directory>();
        if self.held > DIRECTORIES_MAX {
            return Err(io::Error::other("the sandbox sends too many directories"));
        }
        self.directories.push(Directory { path, mode, mtime });
        Ok(())
    }

    fn link<R: Read>(&mut self, path: &Path, entry: &Entry<'_, R>, mtime: i64) -> io::Result<()> {
        let target = entry.link_name()?.ok_or(io::ErrorKind::InvalidData)?;
        let (place, name) = self.place(path)?;
        symlinkat(&*target, place, name)?;
        Ok(utimensat(place, name, &modified(mtime), AtFlags::SYMLINK_NOFOLLOW)?)
    }

    fn file<R: Read>(
        &mut self,
        path: &Path,
        entry: &mut Entry<'_, R>,
        mode: Mode,
        mtime: i64,
    ) -> io::Result<()> {
        let size = entry.size();
        let (place, name) = self.place(path)?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(openat(place, name, flags, Mode::RUSR | Mode::WUSR)?);
        if copy_with_holes(entry, &mut file)? != size {
            return Err(io::Error::other("the copy has stopped within this file"));
        }
        fchmod(&file, mode)?;
        Ok(futimens(&file, &modified(mtime))?)
    }

    /// Innermost ones first: a time changes when something is made in a directory.
    fn finish_directories(&mut self) -> Result<(), Failure> {
        while let Some(Directory { path, mode, mtime }) = self.directories.pop() {
            let set = || -> io::Result<()> {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let place = match path.as_os_str().is_empty() {
                    true => Path::new("."),
                    false => &path,
                };
                let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
                let opened = openat2(&self.root, place, flags, Mode::empty(), within)?;
                fchmod(&opened, mode)?;
                Ok(futimens(&opened, &modified(mtime))?)
            };
            let shown = self.to.join(&path);
            set().map_err(|error| Failure::failed(format!("{}: {error}", shown.display())))?;
        }
        Ok(())
    }
}

fn open_beneath(root: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    Ok(openat2(root, path, flags, Mode::empty(), within)?)
}

fn modified(seconds: i64) -> Timestamps {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    Timestamps { last_access: now, last_modification: Timespec { tv_sec: seconds, tv_nsec: 0 } }
}

/// Copies a file. Zeros become holes: a file of many gigabytes of them takes nothing in the
/// sandbox, and is to take as little here.
fn copy_with_holes(from: &mut impl Read, to: &mut File) -> io::Result<u64> {
    let mut buffer = vec![0; 16 * HOLE];
    let mut len = 0;
    loop {
        let count = fill(from, &mut buffer)?;
        for piece in buffer[..count].chunks(HOLE) {
            match piece.iter().all(|byte| *byte == 0) {
                true => drop(to.seek(SeekFrom::Current(piece.len() as i64))?),
                false => to.write_all(piece)?,
            }
        }
        len += count as u64;
        if count < buffer.len() {
            to.set_len(len)?;
            return Ok(len);
        }
    }
}

/// Reads until a buffer is full, or nothing more comes.
fn fill(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < buffer.len() {
        match from.read(&mut buffer[len..])? {
            0 => break,
            count => len += count,
        }
    }
    Ok(len)
}

/// A path of the stream as one below the directory; empty for the directory itself.
fn inner_path(path: &[u8]) -> Result<PathBuf, Failure> {
    use std::os::unix::ffi::OsStrExt;
    let mut inner = PathBuf::new();
    for component in Path::new(std::ffi::OsStr::from_bytes(path)).components() {
        match component {
            Component::Normal(part) => inner.push(part),
            Component::CurDir => {}
            _ => {
                let shown = escape(path);
                return Err(Failure::failed(format!("the sandbox sends {shown}, which leads out")));
            }
        }
    }
    Ok(inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use tar::{Builder, Header};

    /// An archive of entries: kind, path, contents or target, permissions.
    fn archive(entries: &[(EntryType, &str, &str, u32)]) -> Vec<u8> {
        let mut builder = Builder::new(Vec::new());
        for (kind, path, text, mode) in entries {
            let mut header = Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_mode(*mode);
            header.set_mtime(1_000_000);
            let is_link = [EntryType::Symlink, EntryType::Link].contains(kind);
            let contents = if is_link { "" } else { text };
            header.set_size(contents.len() as u64);
            if is_link {
                header.set_link_name(text).unwrap();
            }
            // As it is, with whatever a hostile sender may write.
            header.as_gnu_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
            header.set_cksum();
            builder.append(&header, contents.as_bytes()).unwrap();
        }
        builder.into_inner().unwrap()
    }

    use EntryType::{Directory as DIR, Link as HARD, Regular as FILE, Symlink as LINK};

    #[test]
    fn a_tree_comes_with_permissions_times_and_links() {
        let place = tempfile::tempdir().unwrap();
        let to = place.path().join("to");
        let stream = archive(&[
            (DIR, "./", "", 0o700),
            (DIR, "closed/", "", 0o500),
            (FILE, "closed/file", "content", 0o4755),
            (LINK, "link", "/etc/passwd", 0o777),
        ]);
        unpack(&stream[..], &to).unwrap();
        let file = to.join("closed/file").metadata().unwrap();
        assert_eq!((file.mode() & 0o7777, file.mtime()), (0o755, 1_000_000));
        let closed = to.join("closed").metadata().unwrap();
        assert_eq!((closed.mode() & 0o7777, closed.mtime()), (0o500, 1_000_000));
        assert_eq!(fs::read_link(to.join("link")).unwrap(), Path::new("/etc/passwd"));
        assert_eq!(fs::read_to_string(to.join("closed/file")).unwrap(), "content");
    }

    #[test]
    fn nothing_outside_the_directory_is_touched() {
        for hostile in [
            vec![(FILE, "../out", "x", 0o644)],
            vec![(FILE, "/tmp/thaw-out", "x", 0o644)],
            vec![(FILE, "a/../../out", "x", 0o644)],
            vec![(LINK, "a", "..", 0o777), (FILE, "a/out", "x", 0o644)],
            vec![(LINK, "a", "../out", 0o777), (FILE, "a", "x", 0o644)],
            vec![(LINK, "a", "..", 0o777), (DIR, "a", "", 0o777)],
            vec![(LINK, "a", "..", 0o777), (LINK, "a/out", "x", 0o777)],
            vec![(HARD, "a", "../secret", 0o777)],
            vec![(EntryType::Char, "a", "", 0o666)],
            vec![(EntryType::Fifo, "a", "", 0o666)],
            vec![(FILE, "a", "1", 0o644), (FILE, "a", "2", 0o644)],
        ] {
            let place = tempfile::tempdir().unwrap();
            fs::write(place.path().join("secret"), "secret").unwrap();
            let to = place.path().join("to");
            let stream = archive(&[&[(DIR, "./", "", 0o755)], &hostile[..]].concat());
            let failure = unpack(&stream[..], &to).unwrap_err();
            assert!(failure.message().unwrap().contains("what has come"), "{failure:?}");
            let names: Vec<_> = fs::read_dir(place.path()).unwrap().flatten().collect();
            assert_eq!(names.len(), 2, "{hostile:?} {names:?}");
        }
        assert!(!Path::new("/tmp/thaw-out").exists());
    }

    #[test]
    fn a_stream_that_stops_says_so() {
        let stream = archive(&[(DIR, "./", "", 0o755), (FILE, "file", &"x".repeat(2000), 0o644)]);
        for len in [700, 1024 + 512, 1024 + 1500] {
            let place = tempfile::tempdir().unwrap();
            let failure = unpack(&stream[..len], &place.path().join("to")).unwrap_err();
            assert!(failure.message().unwrap().contains("stopped"), "{len} {failure:?}");
        }
    }

    #[test]
    fn a_record_says_why_and_has_a_bound() {
        let told = format!("20 {FAILED_RECORD}=gone\n");
        let long = format!("2000016 comment={}\n", "x".repeat(2_000_000));
        for (text, word) in [(told, "gone"), (long, "longer than it may be")] {
            let place = tempfile::tempdir().unwrap();
            let stream = archive(&[(EntryType::XGlobalHeader, "pax_global_header", &text, 0)]);
            let failure = unpack(&stream[..], &place.path().join("to")).unwrap_err();
            assert!(failure.message().unwrap().contains(word), "{failure:?}");
        }
    }

    #[test]
    fn zeros_take_no_room() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("file");
        let mut file = File::create(&path).unwrap();
        let mut source = [&vec![0; 1 << 20][..], b"end"].concat();
        source.extend([0; 5000]);
        assert_eq!(copy_with_holes(&mut &source[..], &mut file).unwrap(), source.len() as u64);
        assert_eq!(fs::read(&path).unwrap(), source);
        assert!(path.metadata().unwrap().blocks() * 512 <= 64 << 10);
    }
}
