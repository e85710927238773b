//! Volumes: directories whose files a sandbox has open itself.
//!
//! Names are requests, as in a bound directory. A file that is opened goes to the sandbox as a
//! descriptor, which can read, map and so change the bytes that the file has. It cannot make the
//! file longer: sandboxes have no ftruncate(2), fallocate(2) or pwrite(2), and their
//! `RLIMIT_FSIZE` is 0. So whatever makes a volume larger is a request, and the quota holds on
//! every file system (decisions/0041). A file that one sandbox alone has open is made longer ahead, and
//! that sandbox says how long it is (decisions/0069).

mod alone;
mod closed;
mod copy;
mod gate;
mod lengths;
mod limits;
mod listings;
mod numbers;
mod open_files;
mod ranges;
mod tree;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use bytemuck::bytes_of;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, FlockOperation, Gid, Mode, OFlags, Uid, chownat,
    fallocate, flock, fstat, fstatvfs, fsync, ftruncate, openat,
};
use rustix::io::{Errno, pread, pwrite};
use rustix::process::{getegid, geteuid, getgroups, getuid};
use rustix::thread::set_thread_groups;
use thaw_abi::bind::*;
use thaw_abi::control::{DirectoryEntry, FileAttributes};

pub use closed::ClosedVolume;
pub use copy::{Copied, NUMBERED_MAX, copy_snapshot, copy_volume, settle_copy};
pub use lengths::cut_to_lengths;
pub(super) use limits::Share;
pub use limits::{VolumeShare, volume_descriptors};
pub use numbers::FileNumbers;

use alone::{Lengths, wait_for_others};
use gate::Gate;
use lengths::Pages;
use limits::Taken;
use listings::Listings;
use open_files::OpenFiles;
use ranges::Ranges;

use super::Answer;
use super::bound::{Bound, BoundAccess, BoundDirectory};
use super::host_directory::encode;
use super::path::is_harmless;
use crate::sys::{self, RecordLock};

/// Bytes that a name counts for in a quota, so that no number of empty files is free.
const NAME_COST: u64 = 4096;

/// A volume, as all sandboxes of this process use it.
pub struct Volume {
    place: RwLock<Arc<Place>>,
    /// Closed while its files are copied or exchanged.
    gate: Gate,
    /// To whom files belong that this process makes as root.
    owner: Option<(Uid, Gid)>,
    /// Under whose rights root serves it: those of the owner.
    serves_as: Option<(u32, u32)>,
    /// Bytes that it may hold.
    quota: u64,
    /// The bytes that it holds, a `u64`; locked while they change, by every process that has the
    /// volume.
    usage: File,
    /// Locked, shared, by every process that has the volume; and its first byte, as a record is, so
    /// that one can tell whether others have it.
    users: File,
    /// How sandboxes are told of lengths; none: others may change them at any time.
    lengths: Option<Lengths>,
    state: Mutex<State>,
}

/// Where the files of a volume lie.
struct Place {
    directory: BoundDirectory,
    /// The numbers that they are shown under.
    numbers: FileNumbers,
}

/// What this process knows of a volume's files.
#[derive(Default)]
struct State {
    open: OpenFiles,
}

/// Files beside a volume that are kept for it alone.
#[derive(Debug)]
pub struct OwnFiles {
    /// Its use is kept there.
    pub usage: File,
    /// Its lock tells who uses the volume.
    pub users: File,
    /// A directory, made when it is needed, in which sandboxes say how long files are; none: processes of
    /// the host may change files at any time.
    pub lengths: Option<PathBuf>,
}

impl fmt::Debug for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Volume").field("quota", &self.quota).finish_non_exhaustive()
    }
}

impl Volume {
    /// The volume whose files lie in `directory`. Whoever is the first to use it cuts files whose
    /// lengths a process was to say that was killed, and counts what is there. Files are shown under
    /// these `numbers`.
    ///
    /// # Errors
    /// One of its own files cannot be used, or another process that has it does not answer.
    pub fn open(
        directory: &Path,
        own: OwnFiles,
        quota: u64,
        numbers: FileNumbers,
    ) -> io::Result<Self> {
        let OwnFiles { usage, users, lengths } = own;
        let owner = fs::metadata(directory)?;
        // Who opens it as root may act as the owner of what it lies in just now; requests are
        // served by other threads.
        let serves_as = getuid().is_root().then(|| match geteuid().is_root() {
            true => (owner.uid(), owner.gid()),
            false => (geteuid().as_raw(), getegid().as_raw()),
        });
        let others = serves_as.filter(|&(uid, _)| uid != 0);
        let owner = others.map(|(uid, gid)| (Uid::from_raw(uid), Gid::from_raw(gid)));
        let begin = || -> io::Result<()> {
            if let Some(lengths) = &lengths {
                cut_to_lengths(directory, lengths)?;
            }
            let used = tree::count(File::open(directory)?.as_fd(), quota);
            pwrite(&usage, &used.to_ne_bytes(), 0)?;
            Ok(())
        };
        let is_first = match flock(&users, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => begin().map(|()| true)?,
            Err(Errno::WOULDBLOCK) => false,
            Err(error) => return Err(error.into()),
        };
        flock(&users, FlockOperation::LockShared)?;
        sys::set_lock(users.as_fd(), RecordLock::Read, 0, 1)?;
        if lengths.is_some() {
            wait_for_others(&users)?;
        }
        // Who was first may have been killed meanwhile. The lock is not exchanged for that, since one that
        // cannot be had is lost (flock(2)).
        if !is_first && sys::test_lock(users.as_fd(), RecordLock::Write, 0, 1)?.is_none() {
            begin()?;
        }
        let lengths = lengths.map(Lengths::new);
        let directory = BoundDirectory::open(directory, BoundAccess::Write)?;
        let place = RwLock::new(Arc::new(Place { directory, numbers }));
        let (gate, state) = (Gate::default(), Mutex::default());
        Ok(Self { place, gate, owner, serves_as, quota, usage, users, lengths, state })
    }

    fn place(&self) -> Arc<Place> {
        self.place.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How many files of it the sandboxes of this process have open; one counts as often as it is.
    pub fn open_files(&self) -> usize {
        self.state().open.values().map(|open| open.count()).sum()
    }

    /// Whether another process has it, too.
    ///
    /// # Errors
    /// The host refuses.
    pub fn is_used_elsewhere(&self) -> io::Result<bool> {
        Ok(sys::test_lock(self.users.as_fd(), RecordLock::Write, 0, 1)?.is_some())
    }

    /// Takes the rights of the volume's owner on this thread, if this process is root: files in a
    /// directory of the host may be others'.
    fn take_rights(&self) -> Result<(), Errno> {
        let Some((uid, gid)) = self.serves_as else { return Ok(()) };
        if !getgroups()?.is_empty() {
            // root's other groups may read what the owner may not.
            set_thread_groups(&[])?;
        }
        sys::set_filesystem_ids(uid, gid).map_err(|_| Errno::PERM)
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
        if found.nlink != 1 {
            return;
        }
        match state.open.get_mut(&found.inode) {
            Some(open) if is_regular(found.mode) => open.is_orphan = true,
            _ => self.refund(content(found.mode, found.size)),
        }
    }

    /// Changes the length of a file.
    fn resize(&self, state: &mut State, file: &OwnedFd, size: u64) -> Result<(), Errno> {
        let inode = fstat(file)?.st_ino;
        self.change_length(&mut state.open, (inode, file), || {
            let (old, new) = (blocks(size_of(file)?), blocks(size));
            match new > old {
                true => self.paid(new - old, || ftruncate(file, size)),
                false => {
                    ftruncate(file, size)?;
                    self.refund(old - new);
                    Ok(())
                }
            }
        })
    }

    /// Makes a file longer, with room on the disk for all of it.
    fn extend(&self, file: &OwnedFd, from: u64, to: u64) -> Result<(), Errno> {
        self.paid(blocks(to) - blocks(from), || {
            let extended = match fallocate(file, FallocateFlags::empty(), from, to - from) {
                Err(Errno::OPNOTSUPP) => ftruncate(file, to),
                outcome => outcome,
            };
            // It may have become longer in part.
            extended.inspect_err(|_| {
                let _ = ftruncate(file, from);
            })
        })
    }

    fn grow(&self, state: &mut State, inode: u64, file: &OwnedFd, size: u64) -> Result<u64, Errno> {
        self.change_length(&mut state.open, (inode, file), || {
            let old = size_of(file)?;
            if size > old {
                self.extend(file, old, size)?;
            }
            Ok(size.max(old))
        })
    }

    fn write(
        &self,
        state: &mut State,
        (inode, file): (u64, &OwnedFd),
        at: u64,
        bytes: &[u8],
    ) -> Result<u64, Errno> {
        if bytes.is_empty() {
            return Err(Errno::INVAL);
        }
        self.change_length(&mut state.open, (inode, file), || {
            let old = size_of(file)?;
            let at = if at == VOLUME_END { old } else { at };
            let end = at.checked_add(bytes.len() as u64).ok_or(Errno::FBIG)?;
            let write = || match pwrite(file, bytes, at)? == bytes.len() {
                true => Ok(at),
                false => Err(Errno::NOSPC),
            };
            if end <= old {
                return write();
            }
            self.paid(blocks(end) - blocks(old), || {
                let room = match fallocate(file, FallocateFlags::KEEP_SIZE, old, end - old) {
                    Err(Errno::OPNOTSUPP) => Ok(()),
                    room => room,
                };
                // Nobody is told of what was written in part, and room that nobody uses is none's.
                room.and_then(|()| write()).inspect_err(|_| {
                    let _ = ftruncate(file, old);
                })
            })
        })
    }

    fn append(
        &self,
        state: &mut State,
        inode: u64,
        file: &OwnedFd,
        more: u64,
    ) -> Result<u64, Errno> {
        self.change_length(&mut state.open, (inode, file), || {
            let old = size_of(file)?;
            let size = old.checked_add(more).ok_or(Errno::FBIG)?;
            if more > 0 {
                self.extend(file, old, size)?;
            }
            Ok(old)
        })
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

/// Bytes that what has a name counts for, besides its names.
fn content(mode: u32, size: u64) -> u64 {
    match FileType::from_raw_mode(mode) {
        FileType::RegularFile => blocks(size),
        // A target that does not fit in the inode takes a block.
        FileType::Symlink => NAME_COST,
        _ => 0,
    }
}

/// Opens the same file once more, whether or not it still has a name.
fn open_again(file: &OwnedFd, access: OFlags) -> Result<OwnedFd, Errno> {
    let same = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    openat(CWD, same, flags, Mode::empty())
}

/// A volume, as it is mounted in a sandbox.
#[derive(Clone, Debug)]
pub struct VolumeMount {
    /// The volume.
    pub volume: Arc<Volume>,
    /// What the sandbox may do with it.
    pub access: BoundAccess,
    /// What the sandboxes of its tenant may have open together.
    pub of_tenant: VolumeShare,
}

/// A volume in use by one sandbox.
pub(super) struct MountedVolume {
    /// Tells it from all others of this process.
    number: u64,
    volume: Arc<Volume>,
    access: BoundAccess,
    of_tenant: VolumeShare,
    share: Share,
    listings: Listings,
    /// What the sandbox is told of lengths, as soon as it has asked for that.
    pages: OnceLock<Option<Arc<Pages>>>,
    files: Mutex<Files>,
}

/// Numbers of mounts in this process.
static LAST_MOUNT: AtomicU64 = AtomicU64::new(0);

/// The files that a sandbox has open.
#[derive(Default)]
struct Files {
    open: BTreeMap<u64, OpenFile>,
    last: u64,
    /// Files that hold the sandbox' locks, by inode number.
    locks: HashMap<u64, LockFile>,
}

struct OpenFile {
    file: Arc<OwnedFd>,
    inode: u64,
    /// Its places among the sandbox' files and its tenant's descriptors.
    _places: [Taken; 2],
}

/// A file with the locks of a sandbox: a description that the sandbox does not have, so that
/// its locks go when this goes.
struct LockFile {
    file: OwnedFd,
    _place: Taken,
    /// What is locked.
    ranges: Ranges,
    /// Their places among the sandbox' ranges.
    range_places: Taken,
}

impl LockFile {
    fn set(&mut self, kind: RecordLock, start: u64, len: u64) -> Result<(), Errno> {
        let ranges = self.ranges.with(kind, start, len)?;
        let before = self.ranges.count();
        if !self.range_places.resize(ranges.count().max(before)) {
            return Err(Errno::NOLCK);
        }
        let outcome = sys::set_lock(self.file.as_fd(), kind, start, len);
        if outcome.is_ok() {
            self.ranges = ranges;
        }
        self.range_places.resize(self.ranges.count());
        outcome
    }
}

impl MountedVolume {
    /// The volume in a sandbox, whose volumes all have the same share.
    pub fn new(mount: &VolumeMount, share: Share) -> Self {
        let (volume, access) = (mount.volume.clone(), mount.access);
        let (listings, files) = (Listings::default(), Mutex::default());
        let of_tenant = mount.of_tenant.clone();
        let (number, pages) = (LAST_MOUNT.fetch_add(1, Relaxed), OnceLock::new());
        Self { number, volume, access, of_tenant, share, listings, pages, files }
    }

    /// The directory of its files, as it is now.
    fn bound(&self) -> Bound {
        Bound::new(&self.volume.place().directory.with_access(self.access))
    }

    /// How many files of `volume` the sandbox has open by this mount.
    pub fn open_files_of(&self, volume: &Volume) -> usize {
        match std::ptr::eq(&raw const *self.volume, volume) {
            true => self.files().open.len(),
            false => 0,
        }
    }

    /// Closes all files, of which nobody uses one any more: nothing runs in the sandbox.
    pub fn end(&self) {
        let pages = self.pages.get().and_then(Option::as_ref);
        pages.into_iter().for_each(|pages| pages.note_end());
        let open: Vec<u64> = self.files().open.keys().copied().collect();
        for handle in open {
            // A failure leaves bytes counted, which the next who counts finds.
            let _ = self.close(handle);
        }
        pages.into_iter().for_each(|pages| pages.remove_files());
    }

    fn files(&self) -> MutexGuard<'_, Files> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a request.
    pub fn serve(&self, request: &BindRequest, tail: &[u8]) -> Result<Answer, Errno> {
        self.volume.take_rights()?;
        // Who gives a file back changes nothing that is copied, and may be a sandbox that ends.
        let _passed = (request.operation != BIND_CLOSE).then(|| self.volume.gate.pass());
        let answer = match self.answer(request, tail) {
            // Files may be longer than they need be.
            Err(Errno::DQUOT | Errno::NOSPC)
                if self.volume.reclaim(&mut self.volume.state().open) =>
            {
                self.answer(request, tail)
            }
            answer => answer,
        }?;
        Ok(self.numbered(request.operation, answer))
    }

    /// An answer with the numbers that files are shown under.
    fn numbered(&self, operation: u32, mut answer: Answer) -> Answer {
        let numbers = &self.volume.place().numbers;
        match operation {
            BIND_STAT | BIND_FSTAT => {
                renumber::<FileAttributes>(&mut answer.tail, |found| &mut found.inode, numbers);
            }
            BIND_OPEN => {
                renumber::<OpenedVolumeFile>(&mut answer.tail, |found| &mut found.inode, numbers);
            }
            BIND_LIST => renumber_entries(&mut answer.tail, numbers),
            _ => {}
        }
        answer
    }

    fn answer(&self, request: &BindRequest, tail: &[u8]) -> Result<Answer, Errno> {
        let BindRequest { operation, a, b, c, .. } = *request;
        match operation {
            BIND_OPEN => self.open(tail, a, b),
            BIND_CLOSE => self.close(a).map(|()| Answer::default()),
            BIND_STATFS => self.statfs(),
            BIND_FSTAT => {
                let state = self.volume.state();
                let (inode, file) = self.file(a)?;
                Volume::note_written(&state.open, inode);
                let mut found = encode(&fstat(&file)?);
                found.size = Volume::length(&state.open, inode, found.size);
                Ok(Answer::data(bytes_of(&found).to_vec()))
            }
            BIND_SYNC => self.sync(a).map(|()| Answer::default()),
            BIND_FTRUNCATE => {
                self.check_writable()?;
                let mut state = self.volume.state();
                let (_, file) = self.file(a)?;
                self.volume.resize(&mut state, &file, b).map(|()| Answer::default())
            }
            VOLUME_GROW => {
                self.check_writable()?;
                let mut state = self.volume.state();
                let (inode, file) = self.file(a)?;
                number(self.volume.grow(&mut state, inode, &file, b)?)
            }
            VOLUME_APPEND => {
                self.check_writable()?;
                let mut state = self.volume.state();
                let (inode, file) = self.file(a)?;
                number(self.volume.append(&mut state, inode, &file, b)?)
            }
            VOLUME_WRITE => {
                self.check_writable()?;
                let mut state = self.volume.state();
                let (inode, file) = self.file(a)?;
                number(self.volume.write(&mut state, (inode, &file), b, tail)?)
            }
            VOLUME_GRANT => {
                self.check_writable()?;
                let mut state = self.volume.state();
                let (inode, file) = self.file(a)?;
                number(self.volume.grant(&mut state.open, (inode, &file), self.number, b)?)
            }
            VOLUME_LENGTHS => self.lengths(a == 1),
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

    /// An open file. Whoever makes it longer has locked the volume's state before, so that it
    /// is not closed meanwhile.
    fn file(&self, number: u64) -> Result<(u64, Arc<OwnedFd>), Errno> {
        let files = self.files();
        let open = files.open.get(&number).ok_or(Errno::BADF)?;
        Ok((open.inode, open.file.clone()))
    }

    fn sync(&self, handle: u64) -> Result<(), Errno> {
        let (inode, file) = self.file(handle)?;
        // After a power failure nobody knows which bytes were granted only.
        let mut state = self.volume.state();
        Volume::note_written(&state.open, inode);
        self.volume.cut_one(&mut state.open, inode)?;
        drop(state);
        fsync(file)
    }

    /// A page that tells of lengths: the sandbox' own, or the host's.
    fn lengths(&self, is_of_sandbox: bool) -> Result<Answer, Errno> {
        let lengths = self.volume.lengths.as_ref().ok_or(Errno::OPNOTSUPP)?;
        let make = || {
            let descriptors = self.of_tenant.descriptors.take(Pages::DESCRIPTORS)?;
            self.volume.watch_lengths().ok()?;
            // On a full disk the sandbox asks.
            Pages::new(&lengths.directory, descriptors).ok()
        };
        let pages = self.pages.get_or_init(make).as_ref().ok_or(Errno::OPNOTSUPP)?;
        let descriptor = pages.descriptor(is_of_sandbox).map_err(|_| Errno::MFILE)?;
        Ok(Answer::file(descriptor, Vec::new()))
    }

    /// Requests about names, whose cost is counted.
    fn with_names(&self, request: &BindRequest, tail: &[u8]) -> Result<Vec<u8>, Errno> {
        let bound = self.bound();
        let serve = |request: &BindRequest| bound.serve(request, tail);
        match request.operation {
            BIND_STAT => {
                // Nobody cuts it meanwhile.
                let state = self.volume.state();
                let found = self.stat(tail)?;
                let mut found = match state.open.contains_key(&found.inode) {
                    true => {
                        Volume::note_written(&state.open, found.inode);
                        self.stat(tail)?
                    }
                    false => found,
                };
                found.size = Volume::length(&state.open, found.inode, found.size);
                Ok(bytes_of(&found).to_vec())
            }
            BIND_UTIMES => {
                // What was written before changes the time no more.
                let state = self.volume.state();
                Volume::note_written(&state.open, self.stat(tail)?.inode);
                serve(request)
            }
            BIND_READLINK => serve(request),
            BIND_LIST => {
                let of_tenant = &self.of_tenant.listings;
                self.listings.page(bound.directory(), tail, request.a, of_tenant)
            }
            BIND_CHMOD => {
                // The daemon opens files again, by the rights of their owner.
                let kept = match is_regular(self.stat(tail)?.mode) {
                    true => 0o600,
                    false => 0o700,
                };
                serve(&BindRequest { a: request.a | kept, ..*request })
            }
            BIND_MKDIR => {
                tree::check_depth(tail)?;
                self.added(tail, NAME_COST, || {
                    serve(&BindRequest { a: request.a | 0o700, ..*request })
                })
            }
            BIND_SYMLINK => {
                let end = tail.iter().position(|&byte| byte == 0).ok_or(Errno::INVAL)?;
                self.added(&tail[..end], 2 * NAME_COST, || serve(request))
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
                // Held before it is opened: meanwhile nobody removes it.
                let mut state = self.volume.state();
                let (file, _) = bound.directory().open_regular(tail, OFlags::RDWR)?;
                self.volume.resize(&mut state, &file, request.a).map(|()| Vec::new())
            }
            _ => Err(Errno::NOSYS),
        }
    }

    fn stat(&self, path: &[u8]) -> Result<FileAttributes, Errno> {
        if !is_harmless(path) {
            return Err(Errno::INVAL);
        }
        let found = self.bound().directory().stat(path)?;
        bytemuck::try_pod_read_unaligned(&found).map_err(|_| Errno::IO)
    }

    /// Makes what has the name `path` then.
    fn added(
        &self,
        path: &[u8],
        cost: u64,
        make: impl FnOnce() -> Result<Vec<u8>, Errno>,
    ) -> Result<Vec<u8>, Errno> {
        self.check_writable()?;
        let _state = self.volume.state();
        self.volume.paid(cost, make)?;
        self.give_away(path)?;
        Ok(Vec::new())
    }

    /// Gives what root has made to whom the volume belongs.
    fn give_away(&self, path: &[u8]) -> Result<(), Errno> {
        let Some((uid, gid)) = self.volume.owner else { return Ok(()) };
        let made = self.bound().directory().locate(path)?.seen()?;
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
        self.check_move(from, to)?;
        if request.a == 2 {
            self.check_move(to, from)?;
        }
        self.bound().serve(request, tail)?;
        // rename(2): two names of one file both stay.
        if let Some(replaced) = replaced.filter(|replaced| replaced.inode != moved.inode) {
            self.volume.removed(&mut state, &replaced);
        }
        Ok(Vec::new())
    }

    /// Refuses to move a directory so that something in it would be too deep.
    fn check_move(&self, from: &[u8], to: &[u8]) -> Result<(), Errno> {
        let found = self.stat(from)?;
        let is_directory = FileType::from_raw_mode(found.mode) == FileType::Directory;
        if !is_directory || tree::depth(to) <= tree::depth(from) {
            return Ok(());
        }
        tree::check_depth(to)?;
        let directory = self.bound().directory().locate(from)?.seen()?;
        tree::check_move(directory.as_fd(), tree::depth(to))
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
        let of_tenant = self.of_tenant.descriptors.take(1).ok_or(Errno::NFILE)?;
        let places = [self.share.open.take(1).ok_or(Errno::MFILE)?, of_tenant];
        let file = match is_new {
            true => self.volume.paid(NAME_COST, || self.make(path, mode))?,
            false => self.bound().directory().open_regular(path, access)?.0,
        };
        let found = fstat(&file)?;
        let given = file.try_clone().map_err(|_| Errno::MFILE)?;
        let inode = found.st_ino;
        let pages = self.pages.get().and_then(Option::as_ref);
        let (user, file) = ((self.number, self.access == BoundAccess::Write), Arc::new(file));
        let place = self.volume.add_user(&mut state.open, (inode, &file), user, pages)?;
        let size = Volume::length(&state.open, inode, size_of(&file)?);
        let mut files = self.files();
        files.last += 1;
        let handle = files.last;
        files.open.insert(handle, OpenFile { file, inode, _places: places });
        let opened = OpenedVolumeFile { handle, inode, size, place };
        Ok(Answer::file(given, bytes_of(&opened).to_vec()))
    }

    /// Makes a file; one that is there may be of any kind.
    fn make(&self, path: &[u8], mode: u64) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let flags = flags | OFlags::NOCTTY | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(mode as u32 & 0o777 | 0o600);
        let file = self.bound().make(path, flags, mode)?;
        if let Some((uid, gid)) = self.volume.owner {
            rustix::fs::fchown(&file, Some(uid), Some(gid))?;
        }
        Ok(file)
    }

    fn close(&self, handle: u64) -> Result<(), Errno> {
        // In this order everywhere: the volume's state, then the sandbox' files.
        let mut state = self.volume.state();
        let mut files = self.files();
        let OpenFile { file, inode, .. } = files.open.remove(&handle).ok_or(Errno::BADF)?;
        if !files.open.values().any(|other| other.inode == inode) {
            files.locks.remove(&inode);
        }
        let known = self.volume.remove_user(&mut state.open, (inode, &file), self.number);
        let Some(known) = known else { return Ok(()) };
        let found = fstat(&file)?;
        let outcome = match found.st_nlink {
            // A sandbox that has kept the descriptor keeps nothing on the disk with it. The
            // last handle may be one to read, in a volume that is mounted to be read.
            0 => open_again(&file, OFlags::RDWR).and_then(|file| ftruncate(file, 0)),
            _ => Ok(()),
        };
        if known.is_orphan {
            self.volume.refund(blocks(found.st_size as u64));
        }
        outcome
    }

    fn statfs(&self) -> Result<Answer, Errno> {
        let disk = fstatvfs(self.volume.place().directory.directory().as_fd())?;
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

    /// Does something with the file that holds the sandbox' locks of an open file.
    fn with_locks<T>(
        &self,
        handle: u64,
        work: impl FnOnce(&mut LockFile) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let mut files = self.files();
        let Files { open, locks, .. } = &mut *files;
        let OpenFile { file, inode, .. } = open.get(&handle).ok_or(Errno::BADF)?;
        match locks.entry(*inode) {
            Entry::Occupied(known) => work(known.into_mut()),
            Entry::Vacant(place) => work(place.insert(self.lock_file(file)?)),
        }
    }

    fn lock_file(&self, file: &OwnedFd) -> Result<LockFile, Errno> {
        let access = match self.access {
            BoundAccess::Write => OFlags::RDWR,
            BoundAccess::Read => OFlags::RDONLY,
        };
        Ok(LockFile {
            _place: self.of_tenant.descriptors.take(1).ok_or(Errno::NOLCK)?,
            file: open_again(file, access)?,
            ranges: Ranges::default(),
            range_places: self.share.ranges.take(0).ok_or(Errno::NOLCK)?,
        })
    }

    fn lock(&self, handle: u64, kind: RecordLock, start: u64, len: u64) -> Result<Answer, Errno> {
        self.with_locks(handle, |locks| locks.set(kind, start, len))?;
        self.length(handle)
    }

    /// Bytes of an open file.
    fn length(&self, handle: u64) -> Result<Answer, Errno> {
        let state = self.volume.state();
        let (inode, file) = self.file(handle)?;
        number(Volume::length(&state.open, inode, size_of(&file)?))
    }

    fn test_lock(&self, handle: u64, start: u64, write: u64, tail: &[u8]) -> Result<Answer, Errno> {
        let len = tail.try_into().map(u64::from_ne_bytes).map_err(|_| Errno::INVAL)?;
        let kind = if write == 1 { RecordLock::Write } else { RecordLock::Read };
        let found =
            self.with_locks(handle, |locks| sys::test_lock(locks.file.as_fd(), kind, start, len))?;
        let Some((kind, start, len)) = found else { return Ok(Answer::default()) };
        let is_write = u64::from(kind == RecordLock::Write);
        Ok(Answer::data(bytes_of(&VolumeLock { start, len, is_write }).to_vec()))
    }

    fn flock(&self, handle: u64, operation: u64) -> Result<Answer, Errno> {
        let operation = match operation {
            1 => FlockOperation::NonBlockingLockShared,
            2 => FlockOperation::NonBlockingLockExclusive,
            8 => FlockOperation::Unlock,
            _ => return Err(Errno::INVAL),
        };
        self.with_locks(handle, |locks| flock(&locks.file, operation))?;
        self.length(handle)
    }
}

impl Drop for MountedVolume {
    fn drop(&mut self) {
        self.end();
    }
}

/// Replaces the inode number in an answer that is a `T`.
fn renumber<T: bytemuck::Pod>(
    tail: &mut [u8],
    inode: fn(&mut T) -> &mut u64,
    numbers: &FileNumbers,
) {
    if let Ok(mut found) = bytemuck::try_pod_read_unaligned::<T>(tail) {
        let inode = inode(&mut found);
        *inode = numbers.shown(*inode);
        tail.copy_from_slice(bytes_of(&found));
    }
}

/// Replaces the inode numbers in a page of a listing.
fn renumber_entries(tail: &mut [u8], numbers: &FileNumbers) {
    const HEAD: usize = std::mem::size_of::<DirectoryEntry>();
    let mut at = 0;
    while let Some(head) = tail.get_mut(at..at + HEAD) {
        renumber::<DirectoryEntry>(head, |entry| &mut entry.inode, numbers);
        let entry: DirectoryEntry = bytemuck::pod_read_unaligned(head);
        at += HEAD + (entry.name_len as usize).next_multiple_of(8);
    }
}

fn number(number: u64) -> Result<Answer, Errno> {
    Ok(Answer::data(number.to_ne_bytes().to_vec()))
}

#[cfg(test)]
mod tests;
