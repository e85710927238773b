//! Directories of the host that are mounted in a sandbox, to be read or also to
//! be written to.
//!
//! No request leaves the directory: every path is resolved below it without
//! following any symbolic link ([`HostDirectory`]), and names are created, moved and removed in a
//! parent directory that was found that way. Only regular files are opened; no
//! device, FIFO or socket is opened or made; set-user-id and set-group-id are
//! never set; owners do not change. What belongs to whom the directory is served as appears as the
//! program's own ([`Owners`]).

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::{Zeroable, bytes_of, cast_slice};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, StatVfsMountFlags, Timespec, Timestamps,
    UTIME_OMIT, chmodat, fstat, fstatvfs, fsync, ftruncate, linkat, mkdirat, openat, renameat_with,
    symlinkat, unlinkat, utimensat,
};
use rustix::io::{Errno, pread, pwrite};
use serde::{Deserialize, Serialize};
use thaw_abi::bind::*;
use thaw_abi::control::FileAttributes;

use super::host_directory::{HostDirectory, HostPolicy, Listing, Place};
use super::owners::{Ids, Owners};
use super::path::is_harmless;
use super::{Answer, check_read_only};

/// Most files of one mount that a sandbox has open at a time.
const OPEN_MAX: usize = 512;

/// A directory of the host that is to be mounted.
#[derive(Clone, Debug)]
pub struct BoundDirectory {
    directory: Arc<HostDirectory>,
    access: BoundAccess,
    /// Whose files are the sandbox' own, if anybody's.
    served_as: Option<Ids>,
}

/// What a sandbox may do with a bound directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BoundAccess {
    /// Look and read.
    Read,
    /// Also write, create, move and remove.
    Write,
}

impl BoundDirectory {
    pub(super) fn new(directory: HostDirectory, access: BoundAccess) -> Self {
        Self { directory: Arc::new(directory), access, served_as: None }
    }

    /// Opens the directory, with the policy that gives the least.
    ///
    /// # Errors
    /// See [`HostDirectory::open_with`].
    pub fn open(path: &Path, access: BoundAccess) -> io::Result<Self> {
        Self::open_with(path, access, &HostPolicy::default())
    }

    /// Opens the directory; what lies in it is served as `policy` says.
    ///
    /// # Errors
    /// See [`HostDirectory::open_with`].
    pub fn open_with(path: &Path, access: BoundAccess, policy: &HostPolicy) -> io::Result<Self> {
        Self::of_directory(HostDirectory::open_with(path, policy)?, access, policy)
    }

    /// The same for a directory that the caller has found, wherever its path leads now.
    ///
    /// # Errors
    /// See [`HostDirectory::of_opened`].
    pub fn of_opened(
        directory: OwnedFd,
        access: BoundAccess,
        policy: &HostPolicy,
    ) -> io::Result<Self> {
        Self::of_directory(HostDirectory::of_opened(directory, policy)?, access, policy)
    }

    fn of_directory(
        directory: HostDirectory,
        access: BoundAccess,
        policy: &HostPolicy,
    ) -> io::Result<Self> {
        let served_as = Ids::served_as(&directory, policy)?;
        Ok(Self { directory: Arc::new(directory), access, served_as })
    }

    /// The directory.
    pub(super) fn directory(&self) -> &HostDirectory {
        &self.directory
    }

    /// What a sandbox may do with it.
    pub fn access(&self) -> BoundAccess {
        self.access
    }

    /// The same directory, with which a sandbox may do something else.
    pub(super) fn with_access(&self, access: BoundAccess) -> Self {
        Self { directory: self.directory.clone(), access, served_as: self.served_as }
    }

    /// Who owns what in it, as a sandbox sees it whose program runs as `own`.
    pub(super) fn owners(&self, own: Ids) -> Owners {
        Owners::new(self.served_as, own)
    }
}

/// A bound directory in use by one sandbox.
pub(super) struct Bound {
    directory: Arc<HostDirectory>,
    access: BoundAccess,
    owners: Owners,
    open: Mutex<OpenFiles>,
    /// The directory that is being listed.
    listing: Mutex<Option<Listing>>,
}

/// The files that the sandbox has open, by the number that it knows them by.
#[derive(Debug, Default)]
struct OpenFiles {
    files: BTreeMap<u64, Arc<OwnedFd>>,
    last: u64,
}

impl fmt::Debug for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bound").field("access", &self.access).finish_non_exhaustive()
    }
}

fn name(bytes: &[u8]) -> &OsStr {
    OsStr::from_bytes(bytes)
}

impl Bound {
    /// All files belong to whom they belong to on the host.
    pub fn new(directory: &BoundDirectory) -> Self {
        Self::with_owners(directory, Owners::default())
    }

    pub fn with_owners(directory: &BoundDirectory, owners: Owners) -> Self {
        Self {
            directory: directory.directory.clone(),
            access: directory.access,
            owners,
            open: Mutex::default(),
            listing: Mutex::default(),
        }
    }

    // Held for an instant: no file is touched meanwhile.
    fn open_files(&self) -> MutexGuard<'_, OpenFiles> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The directory.
    pub fn directory(&self) -> &HostDirectory {
        &self.directory
    }

    /// What the sandbox may do with it.
    pub fn access(&self) -> BoundAccess {
        self.access
    }

    /// Who owns what, as the sandbox sees it.
    pub fn owners(&self) -> Owners {
        self.owners
    }

    /// Serves a request.
    pub fn serve(&self, request: &BindRequest, tail: &[u8]) -> Result<Answer, Errno> {
        match request.operation {
            BIND_OPEN if is_harmless(tail) => self.open_file(tail, request),
            BIND_OPEN => Err(Errno::INVAL),
            _ => self.answer(request, tail).map(Answer::data),
        }
    }

    /// The tail of the reply to a request that is answered without a descriptor.
    pub fn answer(&self, request: &BindRequest, tail: &[u8]) -> Result<Vec<u8>, Errno> {
        let BindRequest { operation, a, b, c, .. } = *request;
        match operation {
            BIND_WRITE => self.write(a, b, tail),
            BIND_CLOSE => {
                let closed = self.open_files().files.remove(&a);
                closed.map(|_| Vec::new()).ok_or(Errno::BADF)
            }
            BIND_READ => self.read(a, b, c),
            BIND_FSTAT => Ok(bytes_of(&self.owners.show(&fstat(self.file(a)?)?)).to_vec()),
            BIND_FTRUNCATE => {
                self.check_writable()?;
                ftruncate(self.file(a)?, b).map(|()| Vec::new())
            }
            BIND_SYNC => fsync(self.file(a)?).map(|()| Vec::new()),
            BIND_RENAME | BIND_LINK | BIND_SYMLINK => {
                self.check_writable()?;
                let split = tail.iter().position(|&byte| byte == 0).ok_or(Errno::INVAL)?;
                self.with_two(operation, a, &tail[..split], &tail[split + 1..])?;
                Ok(Vec::new())
            }
            _ => {
                if !is_harmless(tail) {
                    return Err(Errno::INVAL);
                }
                self.with_path(request, tail)
            }
        }
    }

    fn with_path(&self, request: &BindRequest, path: &[u8]) -> Result<Vec<u8>, Errno> {
        let BindRequest { operation, a, b, .. } = *request;
        match operation {
            BIND_STAT => return self.stat(path),
            BIND_READLINK => return self.directory.read_link(path),
            BIND_LIST => return self.list(path, a),
            BIND_WALK => return Ok(self.walk(path, a)),
            BIND_STATFS => return self.statfs(path),
            _ => self.check_writable()?,
        }
        match operation {
            BIND_MKDIR => {
                let (parent, last) = self.parent(path)?;
                mkdirat(parent, name(last), permissions(a))?;
            }
            BIND_UNLINK => {
                let (parent, last) = self.parent(path)?;
                unlinkat(parent, name(last), AtFlags::empty())?;
            }
            BIND_RMDIR => {
                let (parent, last) = self.parent(path)?;
                self.spare_hidden(path)?;
                unlinkat(parent, name(last), AtFlags::REMOVEDIR)?;
            }
            BIND_CHMOD => self.chmod(path, a)?,
            BIND_CHOWN => self.chown(path, a, b)?,
            BIND_UTIMES => self.set_times(path, a as i64, b as i64)?,
            BIND_TRUNCATE => {
                let (file, _) = self.directory.open_regular(path, OFlags::WRONLY)?;
                ftruncate(file, a)?;
            }
            _ => return Err(Errno::NOSYS),
        }
        Ok(Vec::new())
    }

    fn stat(&self, path: &[u8]) -> Result<Vec<u8>, Errno> {
        let attributes = match self.directory.locate(path)? {
            Place::Seen(file) => self.owners.show(&fstat(&file)?),
            Place::Hidden(attributes) => attributes,
        };
        Ok(bytes_of(&attributes).to_vec())
    }

    fn walk(&self, path: &[u8], skip: u64) -> Vec<u8> {
        let (found, error) = self.directory.attributes_along(path, |stat| self.owners.show(stat));
        walked(&found, error, skip)
    }

    fn check_writable(&self) -> Result<(), Errno> {
        if self.access == BoundAccess::Write { Ok(()) } else { Err(Errno::ROFS) }
    }

    fn file(&self, number: u64) -> Result<Arc<OwnedFd>, Errno> {
        self.open_files().files.get(&number).cloned().ok_or(Errno::BADF)
    }

    /// The directory that holds the last name of a path, and that name.
    fn parent<'p>(&self, path: &'p [u8]) -> Result<(Arc<OwnedFd>, &'p [u8]), Errno> {
        if path.is_empty() || !is_harmless(path) {
            return Err(Errno::INVAL);
        }
        let (directory, last) = match path.iter().rposition(|&byte| byte == b'/') {
            Some(slash) => (&path[..slash], &path[slash + 1..]),
            None => (&b""[..], path),
        };
        match self.directory.locate(directory)? {
            Place::Seen(parent) => match FileType::from_raw_mode(fstat(&parent)?.st_mode) {
                FileType::Directory => Ok((parent, last)),
                FileType::Symlink => Err(Errno::LOOP),
                _ => Err(Errno::NOTDIR),
            },
            // Names in a pseudo file system are switches of the host.
            Place::Hidden(_) => Err(Errno::ROFS),
        }
    }

    /// Opens a file in the parent directory of a path, with the flags of openat(2) as they are.
    pub fn make(&self, path: &[u8], flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        let (parent, last) = self.parent(path)?;
        openat(parent, name(last), flags, mode)
    }

    /// Refuses to move or remove what the sandbox does not see, as if something were
    /// mounted there.
    fn spare_hidden(&self, path: &[u8]) -> Result<(), Errno> {
        match self.directory.locate(path) {
            Ok(Place::Hidden(_)) => Err(Errno::BUSY),
            _ => Ok(()),
        }
    }

    fn last_listing(&self) -> MutexGuard<'_, Option<Listing>> {
        self.listing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn list(&self, path: &[u8], skip: u64) -> Result<Vec<u8>, Errno> {
        let last = self.last_listing().take();
        let listing = match last {
            Some(listing) if skip > 0 && listing.is_of(path) => listing,
            _ => self.directory.list(path)?,
        };
        let tail = listing.page(skip);
        *self.last_listing() = (!tail.is_empty()).then_some(listing);
        Ok(tail)
    }

    fn open_file(&self, path: &[u8], request: &BindRequest) -> Result<Answer, Errno> {
        let BindRequest { a: flags, b: mode, c: form, .. } = *request;
        let flags = OFlags::from_bits_retain((flags & BIND_OPEN_FLAGS) as u32);
        if flags.intersects(OFlags::WRONLY | OFlags::RDWR | OFlags::CREATE) {
            self.check_writable()?;
        }
        if self.open_files().files.len() >= OPEN_MAX {
            return Err(Errno::MFILE);
        }
        let file = if flags.contains(OFlags::CREATE) {
            // Only new files: one that is there may be of any kind.
            let flags = flags | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::NOCTTY | OFlags::CLOEXEC;
            let (parent, last) = self.parent(path)?;
            openat(parent, name(last), flags, permissions(mode))?
        } else {
            self.directory.open_regular(path, flags)?.0
        };
        // Without it, reading is a request.
        let descriptor = match flags & OFlags::ACCMODE == OFlags::RDONLY {
            true => file.try_clone().ok().filter(|file| check_read_only(file.as_fd()).is_ok()),
            false => None,
        };
        let mut open = self.open_files();
        // Another request may have come in between.
        if open.files.len() >= OPEN_MAX {
            return Err(Errno::MFILE);
        }
        open.last += 1;
        let handle = open.last;
        let is_executable = form == 1 && descriptor.as_ref().is_some_and(may_be_executed);
        open.files.insert(handle, Arc::new(file));
        let opened = OpenedBoundFile { handle, is_executable: is_executable.into() };
        let tail = match form {
            1 => bytes_of(&opened).to_vec(),
            _ => bytes_of(&handle).to_vec(),
        };
        Ok(Answer { tail, descriptor })
    }

    fn read(&self, number: u64, offset: u64, len: u64) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; (len as usize).min(BIND_READ_MAX)];
        let count = pread(self.file(number)?, &mut bytes[..], offset)?;
        bytes.truncate(count);
        Ok(bytes)
    }

    fn write(&self, number: u64, offset: u64, bytes: &[u8]) -> Result<Vec<u8>, Errno> {
        self.check_writable()?;
        let count = pwrite(self.file(number)?, bytes, offset)? as u64;
        Ok(count.to_ne_bytes().to_vec())
    }

    fn with_two(&self, operation: u32, a: u64, first: &[u8], second: &[u8]) -> Result<(), Errno> {
        let (parent, last) = self.parent(first)?;
        if operation == BIND_SYMLINK {
            if second.is_empty() || second.contains(&0) {
                return Err(Errno::INVAL);
            }
            return symlinkat(name(second), parent, name(last));
        }
        let (new_parent, new_last) = self.parent(second)?;
        self.spare_hidden(first)?;
        self.spare_hidden(second)?;
        if operation == BIND_LINK {
            return linkat(parent, name(last), new_parent, name(new_last), AtFlags::empty());
        }
        let flags = match a {
            0 => RenameFlags::empty(),
            1 => RenameFlags::NOREPLACE,
            2 => RenameFlags::EXCHANGE,
            _ => return Err(Errno::INVAL),
        };
        renameat_with(parent, name(last), new_parent, name(new_last), flags)
    }

    /// A file whose attributes are to change.
    fn locate_to_change(&self, path: &[u8]) -> Result<Arc<OwnedFd>, Errno> {
        match self.directory.locate(path)? {
            Place::Seen(file) => Ok(file),
            Place::Hidden(_) => Err(Errno::ROFS),
        }
    }

    fn chmod(&self, path: &[u8], mode: u64) -> Result<(), Errno> {
        if mode & 0o6000 != 0 {
            return Err(Errno::PERM);
        }
        let located = self.locate_to_change(path)?;
        if FileType::from_raw_mode(fstat(&located)?.st_mode) == FileType::Symlink {
            return Err(Errno::OPNOTSUPP);
        }
        let same = format!("/proc/self/fd/{}", located.as_raw_fd());
        chmodat(CWD, same, permissions(mode), AtFlags::empty())
    }

    /// Owners do not change: it is enough if they are as wanted.
    fn chown(&self, path: &[u8], uid: u64, gid: u64) -> Result<(), Errno> {
        let id = |id: u64| match id {
            BIND_ID_OMIT => Ok(None),
            id => u32::try_from(id).map(Some).map_err(|_| Errno::INVAL),
        };
        let (uid, gid) = (id(uid)?, id(gid)?);
        let found = fstat(self.locate_to_change(path)?)?;
        if self.owners.are(&found, uid, gid) { Ok(()) } else { Err(Errno::PERM) }
    }

    fn set_times(&self, path: &[u8], atime: i64, mtime: i64) -> Result<(), Errno> {
        let located = self.locate_to_change(path)?;
        let time = |ns: i64| {
            if ns as u64 == BIND_TIME_OMIT {
                return Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
            }
            Timespec { tv_sec: ns.div_euclid(1_000_000_000), tv_nsec: ns.rem_euclid(1_000_000_000) }
        };
        let times = Timestamps { last_access: time(atime), last_modification: time(mtime) };
        utimensat(&located, c"", &times, AtFlags::EMPTY_PATH)
    }

    fn statfs(&self, path: &[u8]) -> Result<Vec<u8>, Errno> {
        let Place::Seen(located) = self.directory.locate(path)? else {
            return Ok(bytes_of(&BindStatfs::zeroed()).to_vec());
        };
        let found = fstatvfs(located.as_fd())?;
        let answer = BindStatfs {
            block_size: found.f_frsize,
            blocks: found.f_blocks,
            free: found.f_bavail,
            files: found.f_files,
            free_files: found.f_ffree,
        };
        Ok(bytes_of(&answer).to_vec())
    }
}

/// Whether the mount of a file lets it be mapped to be executed.
fn may_be_executed(file: &OwnedFd) -> bool {
    fstatvfs(file).is_ok_and(|found| !found.f_flag.contains(StatVfsMountFlags::NOEXEC))
}

/// The reply to a [`BIND_WALK`] that leaves `skip` names out.
pub(super) fn walked(found: &[FileAttributes], error: Option<Errno>, skip: u64) -> Vec<u8> {
    let errno = error.map_or(0, |error| error.raw_os_error());
    let skip = usize::try_from(skip).unwrap_or(usize::MAX).min(found.len());
    [bytes_of(&Walked { errno, reserved: 0 }), cast_slice(&found[skip..])].concat()
}

/// Permission bits that a sandbox may give.
fn permissions(mode: u64) -> Mode {
    Mode::from_raw_mode(mode as u32 & 0o1777)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    struct Tree {
        all: tempfile::TempDir,
        bound: Bound,
    }

    fn tree(access: BoundAccess) -> Tree {
        let all = tempfile::tempdir().unwrap();
        fs::create_dir_all(all.path().join("bound/sub")).unwrap();
        fs::create_dir(all.path().join("secret")).unwrap();
        fs::write(all.path().join("secret/key"), "secret").unwrap();
        fs::write(all.path().join("bound/file"), "content").unwrap();
        symlink("../secret", all.path().join("bound/away")).unwrap();
        symlink("../secret/key", all.path().join("bound/key")).unwrap();
        symlink("/", all.path().join("bound/root")).unwrap();
        let kind = FileType::Fifo;
        let mode = Mode::from_raw_mode(0o666);
        rustix::fs::mknodat(CWD, all.path().join("bound/fifo"), kind, mode, 0).unwrap();
        let directory = BoundDirectory::open(&all.path().join("bound"), access).unwrap();
        let bound = Bound::new(&directory);
        Tree { all, bound }
    }

    impl Tree {
        fn ask(&self, operation: u32, a: u64, b: u64, tail: &[u8]) -> Result<Vec<u8>, Errno> {
            let request = BindRequest { mount: 0, operation, a, b, c: 100 };
            self.bound.serve(&request, tail).map(|answer| answer.tail)
        }

        /// The error and the attributes that a walk along a path tells of.
        fn walk(&self, path: &str, skip: u64) -> (i32, Vec<FileAttributes>) {
            let reply = self.ask(BIND_WALK, skip, 0, path.as_bytes()).unwrap();
            let (head, found) = reply.split_at(size_of::<Walked>());
            let head: Walked = bytemuck::pod_read_unaligned(head);
            let found = found.chunks_exact(size_of::<FileAttributes>());
            (head.errno, found.map(bytemuck::pod_read_unaligned).collect())
        }

        fn open(&self, path: &str, flags: OFlags) -> Result<u64, Errno> {
            let reply = self.ask(BIND_OPEN, flags.bits().into(), 0o6666, path.as_bytes())?;
            Ok(u64::from_ne_bytes(reply.try_into().unwrap()))
        }
    }

    #[test]
    fn files_are_made_written_moved_and_removed() {
        let tree = tree(BoundAccess::Write);
        let new = tree.open("sub/new", OFlags::RDWR | OFlags::CREATE).unwrap();
        assert_eq!(tree.ask(BIND_WRITE, new, 3, b"abc").unwrap(), 3u64.to_ne_bytes());
        assert_eq!(tree.ask(BIND_READ, new, 2, b"").unwrap(), b"\0abc");
        tree.ask(BIND_FTRUNCATE, new, 4, b"").unwrap();
        tree.ask(BIND_RENAME, 0, 0, b"sub/new\0moved").unwrap();
        tree.ask(BIND_LINK, 0, 0, b"moved\0sub/twin").unwrap();
        tree.ask(BIND_CHMOD, 0o640, 0, b"moved").unwrap();
        tree.ask(BIND_UTIMES, BIND_TIME_OMIT, 1_500_000_000, b"moved").unwrap();
        let path = tree.all.path().join("bound/moved");
        assert_eq!(fs::read(&path).unwrap(), b"\0\0\0a");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o640);
        tree.ask(BIND_UNLINK, 0, 0, b"moved").unwrap();
        tree.ask(BIND_MKDIR, 0o755, 0, b"directory").unwrap();
        tree.ask(BIND_RMDIR, 0, 0, b"directory").unwrap();
        tree.ask(BIND_SYMLINK, 0, 0, b"link\0anywhere").unwrap();
        assert_eq!(tree.ask(BIND_READLINK, 0, 0, b"link").unwrap(), b"anywhere");
        tree.ask(BIND_CLOSE, new, 0, b"").unwrap();
        assert_eq!(tree.ask(BIND_READ, new, 0, b""), Err(Errno::BADF));
    }

    #[test]
    fn nothing_leads_out() {
        let tree = tree(BoundAccess::Write);
        for path in ["away/key", "key", "root/etc/passwd", "away"] {
            let error = tree.open(path, OFlags::RDWR).unwrap_err();
            assert!(matches!(error, Errno::LOOP), "{path}: {error}");
            let flags = OFlags::RDWR | OFlags::CREATE;
            let error = tree.open(path, flags).unwrap_err();
            assert!(matches!(error, Errno::LOOP | Errno::EXIST), "{path}: {error}");
            let error = tree.ask(BIND_TRUNCATE, 0, 0, path.as_bytes()).unwrap_err();
            assert!(matches!(error, Errno::LOOP), "{path}: {error}");
        }
        for path in ["../secret/key", "/etc/passwd", "sub/../../secret/key", "sub/..", "a//b"] {
            for operation in 1..=BIND_WALK {
                assert!(tree.ask(operation, 0, 0, path.as_bytes()).is_err(), "{operation} {path}");
                let two = [path.as_bytes(), b"\0file"].concat();
                assert!(tree.ask(operation, 0, 0, &two).is_err(), "{operation} {path}");
                let two = [b"file\0", path.as_bytes()].concat();
                if operation != BIND_SYMLINK {
                    assert!(tree.ask(operation, 0, 0, &two).is_err(), "{operation} {path}");
                }
            }
        }
        for request in ["away/new", "root/tmp/new"] {
            assert_eq!(tree.ask(BIND_MKDIR, 0o755, 0, request.as_bytes()), Err(Errno::LOOP));
            assert_eq!(tree.ask(BIND_UNLINK, 0, 0, request.as_bytes()), Err(Errno::LOOP));
            let moved = [b"file\0", request.as_bytes()].concat();
            assert_eq!(tree.ask(BIND_RENAME, 0, 0, &moved), Err(Errno::LOOP));
            assert_eq!(tree.ask(BIND_LINK, 0, 0, &moved), Err(Errno::LOOP));
        }
        // What is hard-linked is the link itself, not what it leads to.
        tree.ask(BIND_LINK, 0, 0, b"key\0twin").unwrap();
        assert_eq!(tree.open("twin", OFlags::RDONLY), Err(Errno::LOOP));
        assert_eq!(fs::read(tree.all.path().join("secret/key")).unwrap(), b"secret");
    }

    #[test]
    fn only_regular_files_and_harmless_permissions() {
        let tree = tree(BoundAccess::Write);
        assert_eq!(tree.open("fifo", OFlags::RDWR), Err(Errno::ACCESS));
        assert_eq!(tree.open("sub", OFlags::RDONLY), Err(Errno::ISDIR));
        assert_eq!(tree.ask(BIND_CHMOD, 0o4755, 0, b"file"), Err(Errno::PERM));
        tree.open("plain", OFlags::RDWR | OFlags::CREATE).unwrap();
        let mode = fs::metadata(tree.all.path().join("bound/plain")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7000, 0);
        let open = tree.bound.open_files().files.len();
        for _ in open..OPEN_MAX {
            tree.open("file", OFlags::RDONLY).unwrap();
        }
        assert_eq!(tree.open("file", OFlags::RDONLY), Err(Errno::MFILE));
    }

    #[test]
    fn a_walk_tells_what_each_name_stands_for() {
        let tree = tree(BoundAccess::Read);
        fs::create_dir(tree.all.path().join("bound/sub/deep")).unwrap();
        let stat = |path: &str| -> FileAttributes {
            bytemuck::pod_read_unaligned(&tree.ask(BIND_STAT, 0, 0, path.as_bytes()).unwrap())
        };
        let along = [stat("sub"), stat("sub/deep")];
        assert_eq!(tree.walk("sub/deep", 0), (0, along.to_vec()));
        assert_eq!(tree.walk("sub/deep", 1), (0, along[1..].to_vec()));
        assert_eq!(tree.walk("sub/deep", 9), (0, Vec::new()));
        assert_eq!(tree.walk("sub/deep/none/more", 0), (libc::ENOENT, along.to_vec()));
        assert_eq!(tree.walk("none", 0), (libc::ENOENT, Vec::new()));
        // Links and files end it, and are told of.
        assert_eq!(tree.walk("away/key", 0), (libc::ELOOP, vec![stat("away")]));
        assert_eq!(tree.walk("file/x", 0), (libc::ENOTDIR, vec![stat("file")]));
    }

    #[test]
    fn a_file_to_be_read_comes_with_a_descriptor() {
        let tree = tree(BoundAccess::Write);
        let open = |path: &str, flags: OFlags| {
            let a = flags.bits().into();
            let request = BindRequest { mount: 0, operation: BIND_OPEN, a, b: 0o600, c: 0 };
            tree.bound.serve(&request, path.as_bytes()).unwrap().descriptor
        };
        let file = open("file", OFlags::RDONLY).unwrap();
        assert_eq!(pwrite(&file, b"x", 0), Err(Errno::BADF));
        for (path, flags) in [
            ("file", OFlags::RDWR),
            ("file", OFlags::WRONLY),
            ("one", OFlags::RDWR | OFlags::CREATE),
        ] {
            assert!(open(path, flags).is_none(), "{flags:?}");
        }
    }

    #[test]
    fn hidden_directories_are_neither_read_nor_moved() {
        let all = tempfile::tempdir().unwrap();
        let home = all.path().join("home");
        fs::create_dir(&home).unwrap();
        fs::write(all.path().join("file"), "content").unwrap();
        let policy = HostPolicy { hidden: vec![home.clone()], ..HostPolicy::default() };
        let directory = BoundDirectory::open_with(all.path(), BoundAccess::Write, &policy).unwrap();
        let tree = Tree { all, bound: Bound::new(&directory) };
        for (operation, path) in [
            (BIND_RENAME, &b"home\0moved"[..]),
            (BIND_RENAME, b"file\0home"),
            (BIND_RMDIR, b"home"),
        ] {
            assert_eq!(tree.ask(operation, 0, 0, path), Err(Errno::BUSY), "{operation}");
        }
        for (operation, path) in [
            (BIND_MKDIR, &b"home/new"[..]),
            (BIND_CHMOD, b"home"),
            (BIND_UTIMES, b"home"),
            (BIND_RENAME, b"file\0home/file"),
        ] {
            assert_eq!(tree.ask(operation, 0o700, 0, path), Err(Errno::ROFS), "{operation}");
        }
        assert_eq!(tree.open("home/new", OFlags::RDWR | OFlags::CREATE), Err(Errno::ROFS));
        assert_eq!(fs::read_dir(&home).unwrap().count(), 0);
        fs::write(home.join("key"), "secret").unwrap();
        let (errno, found) = tree.walk("home/key", 0);
        assert_eq!((errno, found.len(), found[0].mode), (libc::ENOENT, 1, 0o40555));
    }

    #[test]
    fn what_the_user_owns_appears_as_the_programs() {
        let tree = tree(BoundAccess::Write);
        let found = fs::metadata(tree.all.path().join("bound/file")).unwrap();
        let host = Ids { uid: found.uid(), gid: found.gid() };
        let own = Ids { uid: host.uid + 7, gid: host.gid + 8 };
        let directory = tree.bound.directory.clone();
        let directory =
            BoundDirectory { directory, access: BoundAccess::Write, served_as: Some(host) };
        let bound = Bound::with_owners(&directory, directory.owners(own));
        let tree = Tree { bound, ..tree };
        let file = tree.open("file", OFlags::RDONLY).unwrap();
        for reply in [tree.ask(BIND_STAT, 0, 0, b"file"), tree.ask(BIND_FSTAT, file, 0, b"")] {
            let shown: FileAttributes = bytemuck::pod_read_unaligned(&reply.unwrap());
            assert_eq!((shown.uid, shown.gid), (own.uid, own.gid));
        }
        let chown = |uid: u32, gid: u64| tree.ask(BIND_CHOWN, uid.into(), gid, b"file");
        assert_eq!(chown(own.uid, own.gid.into()), Ok(Vec::new()));
        assert_eq!(chown(host.uid, BIND_ID_OMIT), Ok(Vec::new()));
        assert_eq!(chown(4711, BIND_ID_OMIT), Err(Errno::PERM));
        assert_eq!(chown(own.uid, 4711), Err(Errno::PERM));
        assert_eq!(chown(own.uid, 1 << 40), Err(Errno::INVAL));
        let after = fs::metadata(tree.all.path().join("bound/file")).unwrap();
        assert_eq!((after.uid(), after.gid()), (host.uid, host.gid));
    }

    #[test]
    fn a_directory_to_be_read_is_not_written_to() {
        let tree = tree(BoundAccess::Read);
        let file = tree.open("file", OFlags::RDONLY).unwrap();
        assert_eq!(tree.ask(BIND_READ, file, 3, b"").unwrap(), b"tent");
        assert_eq!(tree.ask(BIND_WRITE, file, 0, b"x"), Err(Errno::ROFS));
        assert_eq!(tree.ask(BIND_FTRUNCATE, file, 0, b""), Err(Errno::ROFS));
        assert_eq!(tree.open("file", OFlags::RDWR), Err(Errno::ROFS));
        assert_eq!(tree.open("new", OFlags::CREATE), Err(Errno::ROFS));
        for operation in [BIND_MKDIR, BIND_UNLINK, BIND_RMDIR, BIND_CHMOD, BIND_CHOWN, BIND_UTIMES]
        {
            assert_eq!(tree.ask(operation, 0, 0, b"file"), Err(Errno::ROFS));
        }
        for operation in [BIND_RENAME, BIND_LINK, BIND_SYMLINK] {
            assert_eq!(tree.ask(operation, 0, 0, b"file\0other"), Err(Errno::ROFS));
        }
    }

    /// Whatever a sandbox asks, the broker survives, and nothing outside changes.
    #[test]
    fn arbitrary_requests_are_survived() {
        let tree = tree(BoundAccess::Write);
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        let words: [&[u8]; 9] =
            [b"file", b"sub", b"away", b"..", b".", b"key", b"/", b"\0", b"\xff"];
        for _ in 0..20_000 {
            let mut tail = Vec::new();
            for _ in 0..next() % 5 {
                tail.extend_from_slice(words[(next() % words.len() as u64) as usize]);
            }
            let (a, b, c) = (next() % 5, next() % 5, next() % 5);
            let operation = (next() % 24) as u32;
            let _ = tree.bound.serve(&BindRequest { mount: 0, operation, a, b, c }, &tail);
        }
        assert_eq!(fs::read(tree.all.path().join("secret/key")).unwrap(), b"secret");
        assert_eq!(fs::read_dir(tree.all.path()).unwrap().count(), 2);
    }
}
