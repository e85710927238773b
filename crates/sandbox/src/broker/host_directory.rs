//! Serves a directory of the host read-only to a sandbox.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytemuck::{Zeroable, bytes_of};
use rustix::fs::{
    CWD, Dir, FileType, Mode, OFlags, Stat, Statx, StatxFlags, fstat, makedev, open, openat,
    readlinkat,
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use thaw_abi::control::{DirectoryEntry, FileAttributes};

use super::file_systems::{Kind, Mounts, look};
use super::hidden::{FileId, Hidden};
use super::part::{Part, Sight};
use super::rights::FileRights;

/// A directory of the host that a sandbox sees as its root. No request leaves
/// it, whatever its path or the links on it: symbolic links are reported, not
/// followed. Paths are resolved name by name, and nothing is asked of a file
/// system before it is known to be one of those that may be seen: the others (the
/// host's own state such as `/proc` and `/sys`, FUSE unless it was asked for,
/// points where something would be mounted) look like empty directories, and so do
/// hidden directories.
#[derive(Debug)]
pub struct HostDirectory {
    root: Arc<OwnedFd>,
    /// The number of its mount.
    mount: u64,
    policy: HostPolicy,
    mounts: Mutex<Mounts>,
    hidden: Hidden,
    /// What of it can be seen.
    part: Part,
    /// The directories that the last path has passed, from the root on, as many as may be held.
    passed: Mutex<Vec<PassedDirectory>>,
    passed_max: usize,
}

/// A directory that a path has passed. The next path that passes its name only has to see that it is
/// still the same: as long as it is held, no other file gets its inode number.
#[derive(Debug)]
struct PassedDirectory {
    name: Vec<u8>,
    file: Arc<OwnedFd>,
    id: FileId,
}

/// How directories of the host are served to a sandbox.
#[derive(Clone, Debug, Default)]
pub struct HostPolicy {
    /// Under whose rights files are opened.
    pub rights: FileRights,
    /// Whether FUSE file systems are seen.
    pub fuse: FuseAccess,
    /// Directories that are not seen.
    pub hidden: Vec<PathBuf>,
    /// Whether root uses a bound directory in the place of the directory's owner: what is the
    /// owner's appears as the program's own. Without [`FileRights::Caller`] it means nothing.
    pub in_place_of_owner: bool,
}

/// Whether a sandbox sees file systems that a process answers for (FUSE).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FuseAccess {
    /// They look empty: any user may have mounted one, and its process may let every
    /// access wait for ever, so that not even `SIGKILL` ends who waits.
    #[default]
    Hidden,
    /// They are seen.
    Seen,
}

/// A directory in the words that another process is told.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Description {
    rights: FileRights,
    fuse: FuseAccess,
    /// Paths, which need not be text.
    hidden: Vec<Vec<u8>>,
    part: Part,
}

/// Most directories of a path that are held for the next one.
const PASSED_MAX: usize = 8;
/// How long the entries of a page are looked at: a request has to be answered some time.
const LOOKS_MAX: Duration = Duration::from_millis(50);
/// Most bytes of a page of entries.
const PAGE_MAX: usize = 64 * 1024;
/// Most entries of a directory: a larger one is refused rather than read into
/// memory at a sandbox's wish.
const ENTRIES_MAX: usize = 1 << 20;

/// Bytes of memory that an entry takes besides its name: an allocation, and an element of a
/// vector that has room for twice its elements.
const ENTRY_COST: usize = 16 + 2 * size_of::<(Vec<u8>, u64, FileType)>();

/// What a path leads to.
#[derive(Debug)]
pub(super) enum Place {
    /// A file that may be seen: a descriptor that stands for it without having
    /// opened it (`O_PATH`).
    Seen(Arc<OwnedFd>),
    /// Something that looks like an empty directory.
    Hidden(FileAttributes),
}

/// What a name on the way stands for, as [`Place`].
enum Passed<'a> {
    Seen(BorrowedFd<'a>),
    Hidden(FileAttributes),
}

impl Place {
    /// The file, if it may be seen.
    pub fn seen(self) -> Result<Arc<OwnedFd>, Errno> {
        match self {
            Self::Seen(file) => Ok(file),
            Self::Hidden(_) => Err(Errno::ISDIR),
        }
    }
}

impl HostDirectory {
    /// Opens the directory, with the policy that gives the least.
    ///
    /// # Errors
    /// See [`HostDirectory::open_with`].
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::open_with(path, &HostPolicy::default())
    }

    /// Opens the directory, under the rights of the caller; what lies in it is
    /// served as `policy` says.
    ///
    /// # Errors
    /// It cannot be opened, or is of a kind that sandboxes do not see.
    pub fn open_with(path: &Path, policy: &HostPolicy) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self::of_opened(open(path, flags, Mode::empty())?, policy)
    }

    /// The same for a directory that the caller has found; a descriptor that stands for it (`O_PATH`)
    /// is enough.
    ///
    /// # Errors
    /// It is of a kind that sandboxes do not see.
    pub fn of_opened(root: OwnedFd, policy: &HostPolicy) -> io::Result<Self> {
        let mounts = Mounts::of_this_process()?;
        let hidden = Hidden::new(&policy.hidden);
        let found = look(root.as_fd(), c"")?;
        match mounts.kind(found.stx_mnt_id) {
            Kind::Files => {}
            Kind::Fuse if policy.fuse == FuseAccess::Seen => {}
            Kind::Fuse => {
                return Err(io::Error::other(
                    "it is a FUSE file system, whose process may let every access wait for ever; \
                     add --allow-fuse if you trust it",
                ));
            }
            Kind::Pseudo => {
                return Err(io::Error::other(
                    "it shows the host's own state, which no sandbox sees",
                ));
            }
        }
        if is_within(&root, &hidden)? {
            return Err(io::Error::other("it holds Thaw's own state, which no sandbox sees"));
        }
        Ok(Self {
            root: Arc::new(root),
            mount: found.stx_mnt_id,
            policy: policy.clone(),
            mounts: Mutex::new(mounts),
            hidden,
            part: Part::All,
            passed: Mutex::default(),
            passed_max: 0,
        })
    }

    /// Opens the directory and shows a part of it: files and directories at or
    /// below the paths `shown`, which are relative to it, and of these what every
    /// user of this host may read.
    ///
    /// # Errors
    /// See [`HostDirectory::open_with`].
    pub fn open_part(path: &Path, shown: &[PathBuf], policy: &HostPolicy) -> io::Result<Self> {
        Ok(Self { part: Part::below(shown), ..Self::open_with(path, policy)? })
    }

    /// What another process must know to serve it, besides its descriptor.
    pub(super) fn description(&self) -> Description {
        let bytes = |path: &PathBuf| path.as_os_str().as_bytes().to_vec();
        Description {
            rights: self.policy.rights,
            fuse: self.policy.fuse,
            hidden: self.policy.hidden.iter().map(bytes).collect(),
            part: self.part.clone(),
        }
    }

    /// The directory that another process has described. Looks at the hidden ones under the
    /// rights of the caller.
    pub(super) fn described(root: OwnedFd, description: Description) -> io::Result<Self> {
        let Description { rights, fuse, hidden, part } = description;
        let path = |bytes: &Vec<u8>| PathBuf::from(OsStr::from_bytes(bytes));
        let hidden: Vec<PathBuf> = hidden.iter().map(path).collect();
        let mount = look(root.as_fd(), c"")?.stx_mnt_id;
        let mounts = Mutex::new(Mounts::of_this_process()?);
        let policy = HostPolicy { rights, fuse, hidden, ..HostPolicy::default() };
        let (hidden, root) = (Hidden::new(&policy.hidden), Arc::new(root));
        // This process has nothing but directories.
        let (passed, passed_max) = (Mutex::default(), PASSED_MAX);
        Ok(Self { root, mount, policy, mounts, hidden, part, passed, passed_max })
    }

    /// A descriptor of it.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// Under whose rights it is served.
    pub(super) fn rights(&self) -> FileRights {
        self.policy.rights
    }

    fn mounts(&self) -> MutexGuard<'_, Mounts> {
        self.mounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds a file without opening it, and without following any link.
    pub(super) fn locate(&self, path: &[u8]) -> Result<Place, Errno> {
        self.walk(path, |_| Ok(()))
    }

    /// What each name of a path stands for, as far as it leads, and the error of the name behind the last
    /// of these.
    pub(super) fn attributes_along(
        &self,
        path: &[u8],
        show: impl Fn(&Stat) -> FileAttributes,
    ) -> (Vec<FileAttributes>, Option<Errno>) {
        let mut found = Vec::new();
        let walked = self.walk(path, |place| {
            found.push(match place {
                Passed::Seen(file) => show(&fstat(file)?),
                Passed::Hidden(attributes) => attributes,
            });
            Ok(())
        });
        (found, walked.err())
    }

    /// As [`HostDirectory::locate`]; `pass` hears what each name stands for, the last one included.
    fn walk(
        &self,
        path: &[u8],
        mut pass: impl FnMut(Passed<'_>) -> Result<(), Errno>,
    ) -> Result<Place, Errno> {
        if !super::path::is_harmless(path) {
            return Err(Errno::INVAL);
        }
        if self.part.sight(path) == Sight::Hidden {
            return Err(Errno::NOENT);
        }
        self.mounts().refresh().map_err(|_| Errno::IO)?;
        self.hidden.refresh();
        // Whoever comes meanwhile finds none.
        let mut passed = std::mem::take(&mut *self.passed());
        let place = self.walk_from(&mut passed, path, &mut pass);
        *self.passed() = passed;
        place
    }

    fn walk_from(
        &self,
        passed: &mut Vec<PassedDirectory>,
        path: &[u8],
        pass: &mut dyn FnMut(Passed<'_>) -> Result<(), Errno>,
    ) -> Result<Place, Errno> {
        let mut here = self.root.clone();
        let mut mount = self.mount;
        let names = path.split(|&byte| byte == b'/').filter(|name| !name.is_empty());
        let mut names = names.enumerate().peekable();
        while let Some((depth, name)) = names.next() {
            let (file, found) = self.step(passed, depth, &here, name)?;
            let is_last = names.peek().is_none();
            if self.is_hidden(&found, &mut mount) {
                if !looks_like_a_directory(&found) {
                    return Err(Errno::NOENT);
                }
                pass(Passed::Hidden(empty(&found)))?;
                return if is_last { Ok(Place::Hidden(empty(&found))) } else { Err(Errno::NOENT) };
            }
            pass(Passed::Seen(file.as_fd()))?;
            match FileType::from_raw_mode(found.stx_mode.into()) {
                _ if is_last => {}
                FileType::Directory => {}
                FileType::Symlink => return Err(Errno::LOOP),
                _ => return Err(Errno::NOTDIR),
            }
            here = file;
        }
        Ok(Place::Seen(here))
    }

    /// What a name in a directory stands for. Directories that were passed there before are known again,
    /// and others noted; but none of another mount, which nobody could unmount.
    fn step(
        &self,
        passed: &mut Vec<PassedDirectory>,
        depth: usize,
        here: &OwnedFd,
        name: &[u8],
    ) -> Result<(Arc<OwnedFd>, Statx), Errno> {
        if let Some(known) = passed.get(depth).filter(|known| known.name == name) {
            let found = look(here.as_fd(), OsStr::from_bytes(name))?;
            if found.stx_mnt_id == self.mount && FileId::of(&found) == known.id {
                return Ok((known.file.clone(), found));
            }
        }
        passed.truncate(depth);
        // Without `O_DIRECTORY`, nothing is mounted where automount waits for
        // somebody to look (openat(2), `O_PATH`; path_resolution(7)).
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = Arc::new(openat(here, OsStr::from_bytes(name), flags, Mode::empty())?);
        let found = look(file.as_fd(), c"")?;
        let is_directory = FileType::from_raw_mode(found.stx_mode.into()) == FileType::Directory;
        let is_next = passed.len() == depth && depth < self.passed_max;
        if is_directory && is_next && found.stx_mnt_id == self.mount {
            let (name, id) = (name.to_vec(), FileId::of(&found));
            passed.push(PassedDirectory { name, file: file.clone(), id });
        }
        Ok((file, found))
    }

    fn passed(&self) -> MutexGuard<'_, Vec<PassedDirectory>> {
        self.passed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nothing may be asked of a file. `mount` is the one that the path has
    /// come to.
    fn is_hidden(&self, file: &Statx, mount: &mut u64) -> bool {
        if file.stx_mnt_id != *mount {
            *mount = file.stx_mnt_id;
            match self.mounts().kind(*mount) {
                Kind::Files => {}
                Kind::Fuse if self.policy.fuse == FuseAccess::Seen => {}
                Kind::Fuse | Kind::Pseudo => return true,
            }
        }
        self.hidden.contains(file)
    }

    /// The attributes of a file, as the tail of a reply.
    pub(super) fn stat(&self, path: &[u8]) -> Result<Vec<u8>, Errno> {
        let attributes = match self.locate(path)? {
            Place::Seen(file) => encode(&fstat(&file)?),
            Place::Hidden(attributes) => attributes,
        };
        Ok(bytes_of(&attributes).to_vec())
    }

    /// The target of a symbolic link.
    pub(super) fn read_link(&self, path: &[u8]) -> Result<Vec<u8>, Errno> {
        let Place::Seen(link) = self.locate(path)? else { return Err(Errno::INVAL) };
        if FileType::from_raw_mode(fstat(&link)?.st_mode) != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        Ok(readlinkat(&link, c"", Vec::new())?.into_bytes())
    }

    /// Opens a regular file for reading; with its attributes.
    pub(super) fn open_file(&self, path: &[u8]) -> Result<(OwnedFd, Vec<u8>), Errno> {
        let (file, stat) = self.open_regular(path, OFlags::RDONLY)?;
        Ok((file, bytes_of(&encode(&stat)).to_vec()))
    }

    /// Opens a regular file that exists. It is located first: opening a device
    /// or a FIFO has effects, looking has none.
    pub(super) fn open_regular(
        &self,
        path: &[u8],
        flags: OFlags,
    ) -> Result<(OwnedFd, Stat), Errno> {
        let located = self.locate(path)?.seen()?;
        let stat = fstat(&located)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {}
            FileType::Symlink => return Err(Errno::LOOP),
            FileType::Directory => return Err(Errno::ISDIR),
            _ => return Err(Errno::ACCESS),
        }
        self.check_public(path, &stat)?;
        // The same file, whatever the path leads to by now. A lease on it must
        // not block the broker, hence non-blocking.
        let same = format!("/proc/self/fd/{}", located.as_raw_fd());
        let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        Ok((openat(CWD, same, flags, Mode::empty())?, stat))
    }

    /// The entries of a directory, sorted by name.
    pub(super) fn list(&self, path: &[u8]) -> Result<Listing, Errno> {
        self.list_within(path, |_| Ok(()))
    }

    /// As [`HostDirectory::list`]; `grow` is told the bytes of memory that each entry takes
    /// before that is kept, and can refuse it.
    pub(super) fn list_within(
        &self,
        path: &[u8],
        mut grow: impl FnMut(usize) -> Result<(), Errno>,
    ) -> Result<Listing, Errno> {
        let mut listing = Listing { path: path.to_vec(), entries: Vec::new() };
        let Place::Seen(located) = self.locate(path)? else { return Ok(listing) };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat(&located, c".", flags, Mode::empty())?;
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
            grow(ENTRY_COST + name.to_bytes().len())?;
            let kind = match entry.file_type() {
                FileType::Unknown => match look(directory.as_fd(), name) {
                    Ok(found) => FileType::from_raw_mode(found.stx_mode.into()),
                    // Removed in the meantime.
                    Err(_) => continue,
                },
                kind => kind,
            };
            listing.entries.push((name.to_bytes().to_vec(), entry.ino(), kind));
        }
        listing.entries.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(listing)
    }

    /// A page of a list ([`Listing::page`]), with the attributes of each entry; of mode 0 where a look at
    /// the entry itself has to decide what is seen of it, or the file system is slow.
    pub(super) fn page_with_attributes(&self, listing: &Listing, skip: u64) -> Vec<u8> {
        let directory = self.locate(&listing.path).and_then(Place::seen).ok();
        let mount = directory.as_ref().and_then(|directory| look(directory.as_fd(), c"").ok());
        let mount = mount.map(|found| found.stx_mnt_id);
        let begun = Instant::now();
        listing.page_with(skip, |name, tail| {
            let directory = directory.as_ref().filter(|_| begun.elapsed() < LOOKS_MAX);
            let found = directory.and_then(|directory| self.look_at_entry(directory, mount, name));
            tail.extend_from_slice(bytes_of(&found.unwrap_or(FileAttributes::zeroed())));
        })
    }

    /// Attributes of an entry that lies on the mount of its directory and may be seen.
    fn look_at_entry(
        &self,
        directory: &OwnedFd,
        mount: Option<u64>,
        name: &[u8],
    ) -> Option<FileAttributes> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(directory, OsStr::from_bytes(name), flags, Mode::empty()).ok()?;
        let found = look(file.as_fd(), c"").ok()?;
        let is_seen = Some(found.stx_mnt_id) == mount && !self.hidden.contains(&found);
        Some(encode(&fstat(&file).ok().filter(|_| is_seen)?))
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
            if fstat(self.locate(parent)?.seen()?)?.st_mode & 0o001 == 0 {
                return Err(Errno::ACCESS);
            }
        }
        Ok(())
    }
}

/// Whether a directory is one of the hidden ones or lies in one.
fn is_within(directory: &OwnedFd, hidden: &Hidden) -> io::Result<bool> {
    let mut here = directory.try_clone()?;
    let mut before = None;
    loop {
        let found = look(here.as_fd(), c"")?;
        if hidden.contains(&found) {
            return Ok(true);
        }
        // The root directory is its own parent.
        let id = Some((FileId::of(&found), found.stx_mnt_id));
        if id == before {
            return Ok(false);
        }
        before = id;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        here = openat(&here, c"..", flags, Mode::empty())?;
    }
}

/// Whether something hidden stands for a directory. FUSE does not say of what
/// another user has mounted.
fn looks_like_a_directory(found: &Statx) -> bool {
    let is_known = found.stx_mask & StatxFlags::TYPE.bits() != 0;
    !is_known || FileType::from_raw_mode(found.stx_mode.into()) == FileType::Directory
}

/// The attributes of an empty directory in the place of something hidden.
fn empty(found: &Statx) -> FileAttributes {
    FileAttributes {
        device: makedev(found.stx_dev_major, found.stx_dev_minor),
        inode: found.stx_ino.max(1),
        size: 0,
        mtime_sec: 0,
        mtime_nsec: 0,
        mode: FileType::Directory.as_raw_mode() | 0o555,
        uid: 0,
        gid: 0,
        nlink: 2,
        rdev: 0,
    }
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
        self.page_with(skip, |_, _| {})
    }

    /// The same; `add` appends something to an entry by its name.
    fn page_with(&self, skip: u64, add: impl Fn(&[u8], &mut Vec<u8>)) -> Vec<u8> {
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
            add(name, &mut tail);
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
mod tests;
