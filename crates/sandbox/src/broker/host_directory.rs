//! Serves a directory of the host read-only to a sandbox.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bytemuck::bytes_of;
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, fstatfs, open, openat,
    openat2, readlinkat, statat,
};
use rustix::io::Errno;
use thaw_abi::control::{DirectoryEntry, FileAttributes};

use super::part::{Part, Sight};

/// A directory of the host that a sandbox sees as its root. No request leaves
/// it, whatever its path or the links on it: symbolic links are reported, not
/// followed. File systems that show the host's own state (`/proc`, `/sys` and
/// the like) look empty.
#[derive(Debug)]
pub struct HostDirectory {
    root: OwnedFd,
    /// What of it can be seen.
    part: Part,
}

/// Most bytes of a page of entries.
const PAGE_MAX: usize = 64 * 1024;
/// Most entries of a directory: a larger one is refused rather than read into
/// memory at a sandbox's wish.
const ENTRIES_MAX: usize = 1 << 20;

/// File systems that show or control the host's own state (statfs(2)).
const PSEUDO_FILE_SYSTEMS: [u64; 15] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x1cd1,      // devpts
    0x0027_e0eb, // cgroup
    0x6367_7270, // cgroup2
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0xf97c_ff8c, // selinuxfs
    0xcafe_4a11, // bpf
    0x6165_676c, // pstore
    0x6265_6570, // configfs
    0xde5e_81e4, // efivarfs
    0x1980_0202, // mqueue
    0x6e73_6673, // nsfs
];

impl HostDirectory {
    /// Opens the directory.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { root: open(path, flags, Mode::empty())?, part: Part::All })
    }

    /// Opens the directory and shows a part of it: files and directories at or
    /// below the paths `shown`, which are relative to it, and of these what every
    /// user of this host may read.
    pub fn open_part(path: &Path, shown: &[PathBuf]) -> io::Result<Self> {
        Ok(Self { part: Part::below(shown), ..Self::open(path)? })
    }

    /// The directory itself.
    pub(super) fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// A descriptor that stands for the file, without opening it.
    fn locate(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.resolve(path, flags)
    }

    fn resolve(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
        if !super::path::is_harmless(path) {
            return Err(Errno::INVAL);
        }
        if self.part.sight(path) == Sight::Hidden {
            return Err(Errno::NOENT);
        }
        let path = if path.is_empty() { OsStr::new(".") } else { OsStr::from_bytes(path) };
        let within =
            ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        openat2(&self.root, path, flags, Mode::empty(), within)
    }

    /// The file's attributes; those of a pseudo file system are its root's only.
    pub(super) fn attributes(file: &OwnedFd) -> Result<Stat, Errno> {
        let stat = fstat(file)?;
        // Root inodes have number 1 in all of them.
        if stat.st_ino != 1 && is_pseudo(file)? {
            return Err(Errno::NOENT);
        }
        Ok(stat)
    }

    /// The attributes of a file, as the tail of a reply.
    pub(super) fn stat(&self, path: &[u8]) -> Result<Vec<u8>, Errno> {
        let file = self.locate(path)?;
        Ok(bytes_of(&encode(&Self::attributes(&file)?)).to_vec())
    }

    /// The target of a symbolic link.
    pub(super) fn read_link(&self, path: &[u8]) -> Result<Vec<u8>, Errno> {
        let link = self.locate(path)?;
        if FileType::from_raw_mode(Self::attributes(&link)?.st_mode) != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        Ok(readlinkat(&link, c"", Vec::new())?.into_bytes())
    }

    /// Opens a regular file for reading; with its attributes.
    pub(super) fn open_file(&self, path: &[u8]) -> Result<(OwnedFd, Vec<u8>), Errno> {
        // Located first: opening a device or a FIFO has effects, looking has none.
        let located = self.locate(path)?;
        let stat = Self::attributes(&located)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {}
            FileType::Symlink => return Err(Errno::LOOP),
            FileType::Directory => return Err(Errno::ISDIR),
            _ => return Err(Errno::ACCESS),
        }
        self.check_public(path, &stat)?;
        // The same file, whatever the path leads to by now. A lease on it must
        // not block the daemon, hence non-blocking.
        let same = format!("/proc/self/fd/{}", located.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = openat(CWD, same, flags, Mode::empty())?;
        Ok((file, bytes_of(&encode(&stat)).to_vec()))
    }

    /// The entries of a directory, sorted by name.
    pub(super) fn list(&self, path: &[u8]) -> Result<Listing, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = self.resolve(path, flags)?;
        let mut listing = Listing { path: path.to_vec(), entries: Vec::new() };
        if is_pseudo(&directory)? {
            return Ok(listing);
        }
        self.check_public(path, &fstat(&directory)?)?;
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") || !self.part.shows(path, name.to_bytes()) {
                continue;
            }
            if listing.entries.len() == ENTRIES_MAX {
                return Err(Errno::OVERFLOW);
            }
            let kind = match entry.file_type() {
                FileType::Unknown => {
                    match statat(directory.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW) {
                        Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                        // Removed in the meantime.
                        Err(_) => continue,
                    }
                }
                kind => kind,
            };
            listing.entries.push((name.to_bytes().to_vec(), entry.ino(), kind));
        }
        listing.entries.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(listing)
    }
}

impl HostDirectory {
    /// Of a part, what every user of this host may read is read, and nothing else.
    fn check_public(&self, path: &[u8], stat: &Stat) -> Result<(), Errno> {
        let Some(parents) = self.part.parents_to_check(path) else { return Ok(()) };
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        let needed = if is_directory { 0o005 } else { 0o004 };
        if stat.st_mode & needed != needed {
            return Err(Errno::ACCESS);
        }
        for parent in parents {
            if fstat(self.locate(parent)?)?.st_mode & 0o001 == 0 {
                return Err(Errno::ACCESS);
            }
        }
        Ok(())
    }
}

pub(super) fn is_pseudo(file: &OwnedFd) -> Result<bool, Errno> {
    let kind = fstatfs(file)?.f_type as u64 & 0xffff_ffff;
    Ok(PSEUDO_FILE_SYSTEMS.contains(&kind))
}

/// The entries of one directory at one time.
#[derive(Debug)]
pub(super) struct Listing {
    path: Vec<u8>,
    entries: Vec<(Vec<u8>, u64, FileType)>,
}

impl Listing {
    /// Whether it is of this directory.
    pub fn is_of(&self, path: &[u8]) -> bool {
        self.path == path
    }

    /// Entries after the first `skip`, as many as fit the tail of one reply.
    pub fn page(&self, skip: u64) -> Vec<u8> {
        let mut tail = Vec::new();
        let skip = usize::try_from(skip).unwrap_or(usize::MAX);
        for (name, inode, kind) in self.entries.iter().skip(skip) {
            let entry = DirectoryEntry {
                inode: *inode,
                file_type: kind.as_raw_mode() >> 12,
                name_len: name.len() as u32,
            };
            let padded = name.len().next_multiple_of(8);
            if tail.len() + size_of_val(&entry) + padded > PAGE_MAX {
                break;
            }
            tail.extend_from_slice(bytes_of(&entry));
            tail.extend_from_slice(name);
            tail.resize(tail.len() + padded - name.len(), 0);
        }
        tail
    }
}

pub(super) fn encode(stat: &Stat) -> FileAttributes {
    FileAttributes {
        device: stat.st_dev,
        inode: stat.st_ino,
        size: stat.st_size as u64,
        mtime_sec: stat.st_mtime,
        mtime_nsec: stat.st_mtime_nsec as u32,
        mode: stat.st_mode,
        uid: stat.st_uid,
        gid: stat.st_gid,
        nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        rdev: u32::try_from(stat.st_rdev).unwrap_or(u32::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Read;
    use std::os::unix::fs::symlink;

    struct Tree {
        _all: tempfile::TempDir,
        directory: HostDirectory,
    }

    /// `served/` with an ordinary file, links of every hostile kind, a FIFO and
    /// a device; `secret` beside it.
    fn tree() -> Tree {
        let all = tempfile::tempdir().unwrap();
        let secret = all.path().join("secret");
        fs::create_dir(&secret).unwrap();
        fs::write(secret.join("key"), "secret").unwrap();
        let served = all.path().join("served");
        fs::create_dir_all(served.join("sub")).unwrap();
        fs::write(served.join("file"), "harmless").unwrap();
        symlink("file", served.join("inner")).unwrap();
        symlink("../secret/key", served.join("up")).unwrap();
        symlink(secret.join("key"), served.join("absolute")).unwrap();
        symlink(&secret, served.join("away")).unwrap();
        symlink("..", served.join("sub/parent")).unwrap();
        symlink("/proc/self/root", served.join("magic")).unwrap();
        rustix::fs::mknodat(
            CWD,
            served.join("fifo"),
            FileType::Fifo,
            Mode::from_raw_mode(0o666),
            0,
        )
        .unwrap();
        let directory = HostDirectory::open(&served).unwrap();
        Tree { _all: all, directory }
    }

    #[test]
    fn an_ordinary_file_is_opened_read_only() {
        let tree = tree();
        let (file, attributes) = tree.directory.open_file(b"file").unwrap();
        let attributes: FileAttributes = bytemuck::pod_read_unaligned(&attributes);
        assert_eq!(attributes.size, 8);
        let mut text = String::new();
        fs::File::from(file.try_clone().unwrap()).read_to_string(&mut text).unwrap();
        assert_eq!(text, "harmless");
        assert_eq!(rustix::io::write(&file, b"x"), Err(Errno::BADF));
    }

    #[test]
    fn nothing_leads_out() {
        let tree = tree();
        for path in [
            "up",
            "absolute",
            "away/key",
            "sub/parent/parent/secret/key",
            "sub/parent/file",
            "magic/etc/passwd",
            "magic",
            "away",
            "inner",
        ] {
            let error = tree.directory.open_file(path.as_bytes()).unwrap_err();
            assert_eq!(error, Errno::LOOP, "{path}");
            if path.contains('/') {
                assert_eq!(tree.directory.stat(path.as_bytes()).unwrap_err(), Errno::LOOP);
            }
            let error = tree.directory.list(path.as_bytes()).unwrap_err();
            assert!(matches!(error, Errno::LOOP | Errno::NOTDIR), "{path}: {error}");
        }
        for path in ["../secret/key", "/etc/passwd", "sub/../../secret/key", "sub/..", "file\0"] {
            assert_eq!(tree.directory.open_file(path.as_bytes()).unwrap_err(), Errno::INVAL);
            assert_eq!(tree.directory.stat(path.as_bytes()).unwrap_err(), Errno::INVAL);
            assert_eq!(tree.directory.list(path.as_bytes()).unwrap_err(), Errno::INVAL);
            assert_eq!(tree.directory.read_link(path.as_bytes()).unwrap_err(), Errno::INVAL);
        }
    }

    #[test]
    fn links_are_reported_and_not_followed() {
        let tree = tree();
        assert_eq!(tree.directory.read_link(b"up").unwrap(), b"../secret/key");
        let attributes: FileAttributes =
            bytemuck::pod_read_unaligned(&tree.directory.stat(b"up").unwrap());
        assert_eq!(attributes.mode >> 12, 0o12);
        assert_eq!(tree.directory.read_link(b"file").unwrap_err(), Errno::INVAL);
    }

    #[test]
    fn only_regular_files_are_opened() {
        let tree = tree();
        assert_eq!(tree.directory.open_file(b"fifo").unwrap_err(), Errno::ACCESS);
        assert_eq!(tree.directory.open_file(b"sub").unwrap_err(), Errno::ISDIR);
        assert_eq!(tree.directory.open_file(b"").unwrap_err(), Errno::ISDIR);
        assert_eq!(tree.directory.open_file(b"none").unwrap_err(), Errno::NOENT);
        let devices = HostDirectory::open(Path::new("/dev")).unwrap();
        assert_eq!(devices.open_file(b"zero").unwrap_err(), Errno::ACCESS);
    }

    #[test]
    fn the_state_of_the_host_looks_empty() {
        let host = HostDirectory::open(Path::new("/")).unwrap();
        host.stat(b"proc").unwrap();
        assert_eq!(host.stat(b"proc/self").unwrap_err(), Errno::NOENT);
        assert_eq!(host.open_file(b"proc/version").unwrap_err(), Errno::NOENT);
        assert_eq!(host.open_file(b"proc/1/environ").unwrap_err(), Errno::NOENT);
        assert!(host.list(b"proc").unwrap().page(0).is_empty());
        assert!(host.list(b"sys").unwrap().page(0).is_empty());
    }

    #[test]
    fn a_directory_is_listed_in_order_and_in_pages() {
        let all = tempfile::tempdir().unwrap();
        for number in 0..3000 {
            fs::write(all.path().join(format!("file-{number:04}")), "").unwrap();
        }
        let listing = HostDirectory::open(all.path()).unwrap().list(b"").unwrap();
        let mut names = Vec::new();
        let mut pages = 0;
        loop {
            let page = listing.page(names.len() as u64);
            if page.is_empty() {
                break;
            }
            pages += 1;
            let mut rest = page.as_slice();
            while !rest.is_empty() {
                let (entry, tail) = rest.split_at(size_of::<DirectoryEntry>());
                let entry: DirectoryEntry = bytemuck::pod_read_unaligned(entry);
                assert_eq!(entry.file_type, 8);
                let len = entry.name_len as usize;
                names.push(String::from_utf8(tail[..len].to_vec()).unwrap());
                rest = &tail[len.next_multiple_of(8)..];
            }
        }
        assert!(pages > 1);
        assert_eq!(names.len(), 3000);
        assert!(names.is_sorted());
        assert!(listing.page(u64::MAX).is_empty());
    }
}
