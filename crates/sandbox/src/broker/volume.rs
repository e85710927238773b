//! Volumes: directories whose files a sandbox has open itself.
//!
//! Names are requests, as in a bound directory. A file that is opened goes to the sandbox as a
//! descriptor, which can read, map and so change the bytes that the file has. It cannot make the
//! file longer: sandboxes have no ftruncate(2), fallocate(2) or pwrite(2), and their
//! `RLIMIT_FSIZE` is 0. So whatever makes a volume larger is a request, and the quota holds on
//! every file system (decisions/0041).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::bytes_of;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, FlockOperation, Gid, Mode, OFlags, Uid, chownat,
    fallocate, flock, fstat, fstatvfs, fsync, ftruncate, openat,
};
use rustix::io::{Errno, pread, pwrite};
use rustix::process::geteuid;
use thaw_abi::bind::*;
use thaw_abi::control::FileAttributes;

use super::Answer;
use super::bound::{Bound, BoundAccess, BoundDirectory};
use super::host_directory::encode;
use super::path::is_harmless;
use crate::sys::{self, RecordLock};

/// Most files of one volume that a sandbox has open at a time.
const OPEN_MAX: usize = 256;
/// Most files of one volume that all sandboxes of this process have open at a time.
const OPEN_OF_ALL_MAX: usize = 4096;
/// Bytes that a name counts for in a quota, so that no number of empty files is free.
const NAME_COST: u64 = 4096;
/// Deepest directory that is counted.
const DEPTH_MAX: usize = 64;

/// A volume, as all sandboxes of this process use it.
pub struct Volume {
    directory: BoundDirectory,
    /// To whom files belong that this process makes as root.
    owner: Option<(Uid, Gid)>,
    /// Bytes that it may hold.
    quota: u64,
    /// The bytes that it holds, a `u64`; locked while they change, by every process that has the
    /// volume.
    usage: File,
    /// Locked, shared, by every process that has the volume.
    _users: File,
    state: Mutex<State>,
}

/// What this process knows of a volume's files.
#[derive(Default)]
struct State {
    /// Open files by inode number.
    open: HashMap<u64, OpenInode>,
    /// How many times they are open.
    count: usize,
}

#[derive(Default)]
struct OpenInode {
    count: usize,
    /// Its last name was removed here: its bytes count until it is closed.
    is_orphan: bool,
}

impl fmt::Debug for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Volume").field("quota", &self.quota).finish_non_exhaustive()
    }
}

impl Volume {
    /// The volume whose files lie in `directory`. `usage` is a file in which its use is kept,
    /// `users` one whose lock tells who uses it; both are kept for it alone. Whoever is the first
    /// to use it counts what is there.
    ///
    /// # Errors
    /// One of them cannot be used.
    pub fn open(directory: &Path, usage: File, users: File, quota: u64) -> io::Result<Self> {
        let owner = fs::metadata(directory)?;
        let is_others = geteuid().is_root() && owner.uid() != 0;
        let owner = is_others.then(|| (Uid::from_raw(owner.uid()), Gid::from_raw(owner.gid())));
        match flock(&users, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let used = count(directory)?;
                pwrite(&usage, &used.to_ne_bytes(), 0)?;
            }
            Err(Errno::WOULDBLOCK) => {}
            Err(error) => return Err(error.into()),
        }
        flock(&users, FlockOperation::LockShared)?;
        let directory = BoundDirectory::open(directory, BoundAccess::Write)?;
        Ok(Self { directory, owner, quota, usage, _users: users, state: Mutex::default() })
    }

    // Names change and files grow under this lock, so that what is counted is what happens.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that it holds, and bytes that it may.
    ///
    /// # Errors
    /// The file with its use cannot be read.
    pub fn usage(&self) -> io::Result<(u64, u64)> {
        Ok((self.used()?, self.quota))
    }

    fn used(&self) -> Result<u64, Errno> {
        let mut used = [0; 8];
        let len = pread(&self.usage, &mut used, 0)?;
        if len == used.len() { Ok(u64::from_ne_bytes(used)) } else { Err(Errno::IO) }
    }

    /// Counts `more` bytes; `EDQUOT` if they are too many.
    fn charge(&self, more: u64) -> Result<(), Errno> {
        self.change_usage(|used| {
            used.checked_add(more).filter(|&used| used <= self.quota).ok_or(Errno::DQUOT)
        })
    }

    /// Counts `fewer` bytes. What cannot be given back is found by the next who counts.
    fn refund(&self, fewer: u64) {
        let _ = self.change_usage(|used| Ok(used.saturating_sub(fewer)));
    }

    fn change_usage(&self, change: impl FnOnce(u64) -> Result<u64, Errno>) -> Result<(), Errno> {
        flock(&self.usage, FlockOperation::LockExclusive)?;
        let outcome = self
            .used()
            .and_then(change)
            .and_then(|used| pwrite(&self.usage, &used.to_ne_bytes(), 0).map(drop));
        flock(&self.usage, FlockOperation::Unlock)?;
        outcome
    }

    /// Charges for what `work` adds, and gives it back if that fails.
    fn paid<T>(&self, cost: u64, work: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
        self.charge(cost)?;
        work().inspect_err(|_| self.refund(cost))
    }

    /// Notes that a name is gone, of a file that was as `found` says.
    fn removed(&self, state: &mut State, found: &FileAttributes) {
        self.refund(NAME_COST);
        let is_last = found.nlink == 1 && is_regular(found.mode);
        match state.open.get_mut(&found.inode) {
            Some(open) if is_last => open.is_orphan = true,
            None if is_last => self.refund(blocks(found.size)),
            _ => {}
        }
    }

    /// Changes the length of a file.
    fn resize(&self, file: &OwnedFd, size: u64) -> Result<(), Errno> {
        let _state = self.state();
        let (old, new) = (blocks(size_of(file)?), blocks(size));
        match new > old {
            true => self.paid(new - old, || ftruncate(file, size)),
            false => {
                ftruncate(file, size)?;
                self.refund(old - new);
                Ok(())
            }
        }
    }

    /// Makes a file longer, with room on the disk for all of it.
    fn extend(&self, file: &OwnedFd, from: u64, to: u64) -> Result<(), Errno> {
        self.paid(blocks(to) - blocks(from), || {
            match fallocate(file, FallocateFlags::empty(), from, to - from) {
                Err(Errno::OPNOTSUPP) => ftruncate(file, to),
                outcome => outcome,
            }
        })
    }

    fn grow(&self, file: &OwnedFd, size: u64) -> Result<u64, Errno> {
        let _state = self.state();
        let old = size_of(file)?;
        if size > old {
            self.extend(file, old, size)?;
        }
        Ok(size.max(old))
    }

    fn append(&self, file: &OwnedFd, more: u64) -> Result<u64, Errno> {
        let _state = self.state();
        let old = size_of(file)?;
        let size = old.checked_add(more).ok_or(Errno::FBIG)?;
        if more > 0 {
            self.extend(file, old, size)?;
        }
        Ok(old)
    }
}

fn is_regular(mode: u32) -> bool {
    FileType::from_raw_mode(mode) == FileType::RegularFile
}

fn size_of(file: &OwnedFd) -> Result<u64, Errno> {
    Ok(fstat(file)?.st_size as u64)
}

/// Bytes that a file of `size` bytes counts for, holes and all.
fn blocks(size: u64) -> u64 {
    size.checked_next_multiple_of(4096).unwrap_or(u64::MAX)
}

/// Bytes that all below a directory counts for.
fn count(directory: &Path) -> io::Result<u64> {
    let (mut used, mut twice) = (0_u64, BTreeSet::new());
    let mut left = vec![(directory.to_path_buf(), 0)];
    while let Some((directory, depth)) = left.pop() {
        for entry in fs::read_dir(&directory)? {
            let entry = entry?;
            let found = entry.metadata()?;
            used = used.saturating_add(NAME_COST);
            if found.is_dir() && depth < DEPTH_MAX {
                left.push((entry.path(), depth + 1));
            }
            // A file with several names is one.
            if found.is_file() && (found.nlink() == 1 || twice.insert(found.ino())) {
                used = used.saturating_add(blocks(found.size()));
            }
        }
    }
    Ok(used)
}

/// A volume, as it is mounted in a sandbox.
#[derive(Clone, Debug)]
pub struct VolumeMount {
    /// The volume.
    pub volume: Arc<Volume>,
    /// What the sandbox may do with it.
    pub access: BoundAccess,
}

/// A volume in use by one sandbox.
pub(super) struct MountedVolume {
    volume: Arc<Volume>,
    access: BoundAccess,
    bound: Bound,
    files: Mutex<Files>,
}

/// The files that a sandbox has open.
#[derive(Default)]
struct Files {
    open: BTreeMap<u64, (Arc<OwnedFd>, u64)>,
    last: u64,
    /// Files that hold the sandbox' locks, by inode number: descriptions that the sandbox does
    /// not have, so that its locks go when this goes.
    locks: HashMap<u64, Arc<OwnedFd>>,
}

impl MountedVolume {
    pub fn new(mount: &VolumeMount) -> Self {
        let bound = Bound::new(&mount.volume.directory.with_access(mount.access));
        let (volume, access) = (mount.volume.clone(), mount.access);
        Self { volume, access, bound, files: Mutex::default() }
    }

    fn files(&self) -> MutexGuard<'_, Files> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a request.
    pub fn serve(&self, request: &BindRequest, tail: &[u8]) -> Result<Answer, Errno> {
        let BindRequest { operation, a, b, c, .. } = *request;
        match operation {
            BIND_OPEN => self.open(tail, a, b),
            BIND_CLOSE => self.close(a).map(|()| Answer::default()),
            BIND_STATFS => self.statfs(),
            BIND_FSTAT => {
                let found = encode(&fstat(&self.file(a)?.0)?);
                Ok(Answer::data(bytes_of(&found).to_vec()))
            }
            BIND_SYNC => fsync(&self.file(a)?.0).map(|()| Answer::default()),
            BIND_FTRUNCATE => {
                self.check_writable()?;
                self.volume.resize(&self.file(a)?.0, b).map(|()| Answer::default())
            }
            VOLUME_GROW => {
                self.check_writable()?;
                number(self.volume.grow(&self.file(a)?.0, b)?)
            }
            VOLUME_APPEND => {
                self.check_writable()?;
                number(self.volume.append(&self.file(a)?.0, b)?)
            }
            VOLUME_LOCK_READ => self.lock(a, RecordLock::Read, b, c),
            VOLUME_LOCK_WRITE => self.lock(a, RecordLock::Write, b, c),
            VOLUME_UNLOCK => self.lock(a, RecordLock::None, b, c),
            VOLUME_TEST_LOCK => self.test_lock(a, b, c, tail),
            VOLUME_FLOCK => self.flock(a, b),
            BIND_READ | BIND_WRITE => Err(Errno::NOSYS),
            _ => self.with_names(request, tail).map(Answer::data),
        }
    }

    fn check_writable(&self) -> Result<(), Errno> {
        if self.access == BoundAccess::Write { Ok(()) } else { Err(Errno::ROFS) }
    }

    /// An open file, and its inode number.
    fn file(&self, number: u64) -> Result<(Arc<OwnedFd>, u64), Errno> {
        self.files().open.get(&number).cloned().ok_or(Errno::BADF)
    }

    /// Requests about names, whose cost is counted.
    fn with_names(&self, request: &BindRequest, tail: &[u8]) -> Result<Vec<u8>, Errno> {
        let serve = |request: &BindRequest| self.bound.serve(request, tail);
        match request.operation {
            BIND_STAT | BIND_LIST | BIND_READLINK | BIND_UTIMES => serve(request),
            BIND_CHMOD => {
                // The daemon opens files again, by the rights of their owner.
                let kept = match is_regular(self.stat(tail)?.mode) {
                    true => 0o600,
                    false => 0o700,
                };
                serve(&BindRequest { a: request.a | kept, ..*request })
            }
            BIND_MKDIR => {
                self.added(tail, || serve(&BindRequest { a: request.a | 0o700, ..*request }))
            }
            BIND_SYMLINK => {
                let end = tail.iter().position(|&byte| byte == 0).ok_or(Errno::INVAL)?;
                self.added(&tail[..end], || serve(request))
            }
            BIND_LINK => {
                self.check_writable()?;
                let _state = self.volume.state();
                self.volume.paid(NAME_COST, || serve(request))
            }
            BIND_UNLINK | BIND_RMDIR => {
                self.check_writable()?;
                let mut state = self.volume.state();
                let found = self.stat(tail)?;
                serve(request)?;
                self.volume.removed(&mut state, &found);
                Ok(Vec::new())
            }
            BIND_RENAME => self.rename(request, tail),
            BIND_TRUNCATE => {
                self.check_writable()?;
                let (file, _) = self.bound.directory().open_regular(tail, OFlags::RDWR)?;
                self.volume.resize(&file, request.a).map(|()| Vec::new())
            }
            _ => Err(Errno::NOSYS),
        }
    }

    fn stat(&self, path: &[u8]) -> Result<FileAttributes, Errno> {
        if !is_harmless(path) {
            return Err(Errno::INVAL);
        }
        let found = self.bound.directory().stat(path)?;
        bytemuck::try_pod_read_unaligned(&found).map_err(|_| Errno::IO)
    }

    /// Makes what has the name `path` then.
    fn added(
        &self,
        path: &[u8],
        make: impl FnOnce() -> Result<Vec<u8>, Errno>,
    ) -> Result<Vec<u8>, Errno> {
        self.check_writable()?;
        let _state = self.volume.state();
        self.volume.paid(NAME_COST, make)?;
        self.give_away(path)?;
        Ok(Vec::new())
    }

    /// Gives what root has made to whom the volume belongs.
    fn give_away(&self, path: &[u8]) -> Result<(), Errno> {
        let Some((uid, gid)) = self.volume.owner else { return Ok(()) };
        let made = self.bound.directory().locate(path)?.seen()?;
        chownat(&made, c"", Some(uid), Some(gid), AtFlags::EMPTY_PATH)
    }

    fn rename(&self, request: &BindRequest, tail: &[u8]) -> Result<Vec<u8>, Errno> {
        self.check_writable()?;
        let mut state = self.volume.state();
        let end = tail.iter().position(|&byte| byte == 0).ok_or(Errno::INVAL)?;
        let (from, to) = (&tail[..end], &tail[end + 1..]);
        let replaced = match request.a {
            0 => self.stat(to).ok(),
            _ => None,
        };
        let moved = self.stat(from)?;
        self.bound.serve(request, tail)?;
        // rename(2): two names of one file both stay.
        if let Some(replaced) = replaced.filter(|replaced| replaced.inode != moved.inode) {
            self.volume.removed(&mut state, &replaced);
        }
        Ok(Vec::new())
    }

    fn open(&self, path: &[u8], flags: u64, mode: u64) -> Result<Answer, Errno> {
        if !is_harmless(path) {
            return Err(Errno::INVAL);
        }
        let flags = OFlags::from_bits_retain((flags & BIND_OPEN_FLAGS) as u32);
        let is_new = flags.contains(OFlags::CREATE);
        let writes = is_new || flags.intersects(OFlags::WRONLY | OFlags::RDWR);
        if writes {
            self.check_writable()?;
        }
        // Without reading, a file cannot be mapped to be written to.
        let access = if writes { OFlags::RDWR } else { OFlags::RDONLY };
        // Held until it is known as open: meanwhile nobody removes it.
        let mut state = self.volume.state();
        if state.count >= OPEN_OF_ALL_MAX {
            return Err(Errno::NFILE);
        }
        if self.files().open.len() >= OPEN_MAX {
            return Err(Errno::MFILE);
        }
        let file = match is_new {
            true => self.volume.paid(NAME_COST, || self.make(path, mode))?,
            false => self.bound.directory().open_regular(path, access)?.0,
        };
        let found = fstat(&file)?;
        let given = file.try_clone().map_err(|_| Errno::MFILE)?;
        state.count += 1;
        state.open.entry(found.st_ino).or_default().count += 1;
        let mut files = self.files();
        files.last += 1;
        let handle = files.last;
        files.open.insert(handle, (Arc::new(file), found.st_ino));
        let opened = OpenedVolumeFile { handle, inode: found.st_ino, size: found.st_size as u64 };
        Ok(Answer::file(given, bytes_of(&opened).to_vec()))
    }

    /// Makes a file; one that is there may be of any kind.
    fn make(&self, path: &[u8], mode: u64) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let flags = flags | OFlags::NOCTTY | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(mode as u32 & 0o777 | 0o600);
        let file = self.bound.make(path, flags, mode)?;
        if let Some((uid, gid)) = self.volume.owner {
            rustix::fs::fchown(&file, Some(uid), Some(gid))?;
        }
        Ok(file)
    }

    fn close(&self, handle: u64) -> Result<(), Errno> {
        // In this order everywhere: the volume's state, then the sandbox' files.
        let mut state = self.volume.state();
        let mut files = self.files();
        let (file, inode) = files.open.remove(&handle).ok_or(Errno::BADF)?;
        if !files.open.values().any(|(_, other)| *other == inode) {
            files.locks.remove(&inode);
        }
        state.count -= 1;
        let Some(open) = state.open.get_mut(&inode) else { return Ok(()) };
        open.count -= 1;
        if open.count > 0 {
            return Ok(());
        }
        let is_orphan = open.is_orphan;
        state.open.remove(&inode);
        let found = fstat(&file)?;
        if found.st_nlink == 0 && self.access == BoundAccess::Write {
            // A sandbox that has kept the descriptor keeps nothing on the disk with it.
            ftruncate(&file, 0)?;
        }
        if is_orphan {
            self.volume.refund(blocks(found.st_size as u64));
        }
        Ok(())
    }

    fn statfs(&self) -> Result<Answer, Errno> {
        let disk = fstatvfs(self.volume.directory.directory().as_fd())?;
        let left = self.volume.quota.saturating_sub(self.volume.used()?) / NAME_COST;
        let on_disk = disk.f_bavail.saturating_mul(disk.f_frsize) / NAME_COST;
        let (blocks, free) = (self.volume.quota / NAME_COST, left.min(on_disk));
        let answer = BindStatfs {
            block_size: NAME_COST,
            blocks,
            free,
            files: blocks,
            free_files: free.min(disk.f_favail),
        };
        Ok(Answer::data(bytes_of(&answer).to_vec()))
    }

    /// The file that holds the sandbox' locks of an open file.
    fn lock_file(&self, handle: u64) -> Result<Arc<OwnedFd>, Errno> {
        let mut files = self.files();
        let (file, inode) = files.open.get(&handle).cloned().ok_or(Errno::BADF)?;
        if let Some(known) = files.locks.get(&inode) {
            return Ok(known.clone());
        }
        let access = match self.access {
            BoundAccess::Write => OFlags::RDWR,
            BoundAccess::Read => OFlags::RDONLY,
        };
        let same = format!("/proc/self/fd/{}", file.as_raw_fd());
        let flags = access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let own = Arc::new(openat(CWD, same, flags, Mode::empty())?);
        files.locks.insert(inode, own.clone());
        Ok(own)
    }

    fn lock(&self, handle: u64, kind: RecordLock, start: u64, len: u64) -> Result<Answer, Errno> {
        let file = self.lock_file(handle)?;
        sys::set_lock(file.as_fd(), kind, start, len)?;
        number(size_of(&file)?)
    }

    fn test_lock(&self, handle: u64, start: u64, write: u64, tail: &[u8]) -> Result<Answer, Errno> {
        let file = self.lock_file(handle)?;
        let len = tail.try_into().map(u64::from_ne_bytes).map_err(|_| Errno::INVAL)?;
        let kind = if write == 1 { RecordLock::Write } else { RecordLock::Read };
        let Some((kind, start, len)) = sys::test_lock(file.as_fd(), kind, start, len)? else {
            return Ok(Answer::default());
        };
        let is_write = u64::from(kind == RecordLock::Write);
        Ok(Answer::data(bytes_of(&VolumeLock { start, len, is_write }).to_vec()))
    }

    fn flock(&self, handle: u64, operation: u64) -> Result<Answer, Errno> {
        let file = self.lock_file(handle)?;
        let operation = match operation {
            1 => FlockOperation::NonBlockingLockShared,
            2 => FlockOperation::NonBlockingLockExclusive,
            8 => FlockOperation::Unlock,
            _ => return Err(Errno::INVAL),
        };
        flock(&file, operation)?;
        number(size_of(&file)?)
    }
}

impl Drop for MountedVolume {
    fn drop(&mut self) {
        let open: Vec<u64> = self.files().open.keys().copied().collect();
        for handle in open {
            // A failure leaves bytes counted, which the next who counts finds.
            let _ = self.close(handle);
        }
    }
}

fn number(number: u64) -> Result<Answer, Errno> {
    Ok(Answer::data(number.to_ne_bytes().to_vec()))
}

#[cfg(test)]
mod tests;
