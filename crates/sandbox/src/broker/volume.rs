//! Volumes: directories whose files a sandbox has open itself.
//!
//! Names are requests, as in a bound directory. A file that is opened goes to the sandbox as a
//! descriptor, which can read, map and so change the bytes that the file has. It cannot make the
//! file longer: sandboxes have no ftruncate(2), fallocate(2) or pwrite(2), and their
//! `RLIMIT_FSIZE` is 0. So whatever makes a volume larger is a request, and the quota holds on
//! every file system (decisions/0041). A file that one sandbox alone has open is made longer ahead, and
//! that sandbox says how long it is (decisions/0069).

mod alone;
mod client;
mod closed;
mod copy;
mod gate;
mod left;
mod lengths;
mod limits;
mod listings;
mod mounted;
mod numbers;
mod open_files;
mod ranges;
mod tree;

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use rustix::fs::{
    CWD, FallocateFlags, FileType, FlockOperation, Gid, Mode, OFlags, Uid, fallocate, flock, fstat,
    ftruncate, openat,
};
use rustix::io::{Errno, pread, pwrite};
use rustix::process::{getegid, geteuid, getgroups, getuid};
use rustix::thread::set_thread_groups;
use thaw_abi::bind::*;
use thaw_abi::control::FileAttributes;

pub use client::{ClientFile, VolumeClient};
pub use closed::ClosedVolume;
pub use copy::{Copied, NUMBERED_MAX, copy_snapshot, copy_volume, settle_copy};
pub use left::VolumeHolder;
pub use lengths::cut_to_lengths;
pub(super) use limits::Share;
pub use limits::{VolumeShare, volume_descriptors};
pub(super) use mounted::MountedVolume;
pub use numbers::FileNumbers;

use alone::{Lengths, wait_for_others};
use gate::Gate;
use left::Left;
use open_files::OpenFiles;

use super::bound::{BoundAccess, BoundDirectory};
use crate::sys::{self, RecordLock};

/// Bytes that a name counts for in a quota, so that no number of empty files is free.
const NAME_COST: u64 = 4096;

/// A volume, as all sandboxes of this process use it.
pub struct Volume {
    place: RwLock<Arc<Place>>,
    /// Closed while its files are copied or exchanged.
    gate: Gate,
    /// Who is left of the daemon before this one.
    left: Left,
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
    /// The daemon before this one may have left sandboxes that have the volume: nobody is served before
    /// [`Volume::go_on_with_left`] is called and these have taken back what they had.
    pub are_some_left: bool,
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
        let OwnFiles { usage, users, lengths, are_some_left } = own;
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
            Ok(()) if are_some_left => true,
            Ok(()) => begin().map(|()| true)?,
            Err(Errno::WOULDBLOCK) => false,
            Err(error) => return Err(error.into()),
        };
        // Nobody else comes in before those who are left have what is theirs.
        if !(is_first && are_some_left) {
            flock(&users, FlockOperation::LockShared)?;
        }
        sys::set_lock(users.as_fd(), RecordLock::Read, 0, 1)?;
        if lengths.is_some() {
            wait_for_others(&users)?;
        }
        // Who was first may have been killed meanwhile. The lock is not exchanged for that, since one that
        // cannot be had is lost (flock(2)).
        if !is_first
            && !are_some_left
            && sys::test_lock(users.as_fd(), RecordLock::Write, 0, 1)?.is_none()
        {
            begin()?;
        }
        let lengths = lengths.map(Lengths::new);
        let directory = BoundDirectory::open(directory, BoundAccess::Write)?;
        let place = RwLock::new(Arc::new(Place { directory, numbers }));
        let (gate, left, state) = (Gate::default(), Left::new(are_some_left), Mutex::default());
        Ok(Self { place, gate, left, owner, serves_as, quota, usage, users, lengths, state })
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

#[cfg(test)]
mod tests;
