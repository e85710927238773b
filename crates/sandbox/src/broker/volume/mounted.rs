//! A volume in use by one sandbox: its requests, and the files that it has open.

mod locks;
mod names;
mod renumber;

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bytemuck::bytes_of;
use rustix::fs::{Mode, OFlags, fstat, fstatvfs, fsync, ftruncate};
use rustix::io::Errno;
use thaw_abi::bind::*;
use thaw_abi::control::FileAttributes;

use super::lengths::Pages;
use super::limits::{Share, Taken};
use super::listings::Listings;
use super::{
    NAME_COST, Volume, VolumeHolder, VolumeMount, VolumeShare, blocks, open_again, size_of,
};
use crate::broker::Answer;
use crate::broker::bound::{Bound, BoundAccess};
use crate::broker::host_directory::encode;
use crate::broker::path::is_harmless;
use crate::sys::RecordLock;
use locks::LockFile;
use renumber::{renumber, renumber_entries, renumber_walked};

/// A volume in use by one sandbox.
pub(in crate::broker) struct MountedVolume {
    /// Tells it from all others of this process.
    number: u64,
    /// The sandbox.
    holder: VolumeHolder,
    /// The daemon before this one has left it, and it has not let go of what it had there.
    is_left: AtomicBool,
    /// Nothing runs in it any more.
    has_ended: AtomicBool,
    volume: Arc<Volume>,
    access: BoundAccess,
    of_tenant: VolumeShare,
    share: Share,
    listings: Listings,
    /// What the sandbox is told of lengths, as soon as it has asked for that.
    pages: OnceLock<Option<Arc<Pages>>>,
    /// Whether it has got the host's page of them, and its own.
    has_page: [AtomicBool; 2],
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

impl MountedVolume {
    /// The volume in a sandbox, whose volumes all have the same share.
    pub fn new(mount: &VolumeMount, share: Share, holder: VolumeHolder) -> Self {
        let (volume, access) = (mount.volume.clone(), mount.access);
        let (listings, files) = (Listings::default(), Mutex::default());
        let of_tenant = mount.of_tenant.clone();
        let (number, pages) = (LAST_MOUNT.fetch_add(1, Relaxed), OnceLock::new());
        Self {
            number,
            holder,
            is_left: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            volume,
            access,
            of_tenant,
            share,
            listings,
            pages,
            has_page: Default::default(),
            files,
        }
    }

    /// The same of a sandbox that the daemon before this one has left, whose first process this is.
    pub fn left(mount: &VolumeMount, share: Share, holder: VolumeHolder, process: OwnedFd) -> Self {
        mount.volume.left.add(holder, process);
        let mounted = Self::new(mount, share, holder);
        mounted.is_left.store(true, Relaxed);
        mounted
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
        self.has_ended.store(true, Relaxed);
        self.volume.left.forget(self.holder);
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
        if request.operation == VOLUME_RENEW {
            return self.renew(request.a);
        }
        if self.is_left() {
            return Err(Errno::NOTCONN);
        }
        self.volume.left.pass(self.holder, &self.has_ended);
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
            BIND_WALK => renumber_walked(&mut answer.tail, numbers),
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

    /// Whether the sandbox has not let go of what it had under the daemon before this one.
    pub fn is_left(&self) -> bool {
        self.is_left.load(Relaxed)
    }

    /// Says how far the sandbox is with what it had under the daemon before this one.
    fn renew(&self, step: u64) -> Result<Answer, Errno> {
        let left = &self.volume.left;
        match step {
            RENEW_ASK => return number(self.is_left().into()),
            RENEW_LET_GO => {
                self.is_left.store(false, Relaxed);
                left.let_go(self.holder);
            }
            RENEW_DONE => left.done(self.holder),
            // That was said of a host of before, which has ended meanwhile.
            RENEW_LOST if self.is_left() => {}
            RENEW_LOST => left.end(self.holder),
            _ => return Err(Errno::INVAL),
        }
        Ok(Answer::default())
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

    /// A page that tells of lengths: the sandbox' own, or the host's. Each is given once.
    fn lengths(&self, is_of_sandbox: bool) -> Result<Answer, Errno> {
        let lengths = self.volume.lengths.as_ref().ok_or(Errno::OPNOTSUPP)?;
        let make = || {
            let descriptors = self.of_tenant.descriptors.take(Pages::DESCRIPTORS)?;
            self.volume.watch_lengths().ok()?;
            // On a full disk the sandbox asks.
            Pages::new(&lengths.directory, self.holder, descriptors).ok()
        };
        let pages = self.pages.get_or_init(make).as_ref().ok_or(Errno::OPNOTSUPP)?;
        // Descriptors that nobody reads are kept on their way, at the expense of all.
        if self.has_page[usize::from(is_of_sandbox)].swap(true, Relaxed) {
            return Err(Errno::BUSY);
        }
        let descriptor = pages.descriptor(is_of_sandbox).map_err(|_| Errno::MFILE)?;
        Ok(Answer::file(descriptor, Vec::new()))
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
}

impl Drop for MountedVolume {
    fn drop(&mut self) {
        self.end();
    }
}

fn number(number: u64) -> Result<Answer, Errno> {
    Ok(Answer::data(number.to_ne_bytes().to_vec()))
}
