//! The locks of a sandbox on files of a volume, which hold against other sandboxes.

use std::collections::hash_map::Entry;
use std::os::fd::{AsFd, OwnedFd};

use bytemuck::bytes_of;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use thaw_abi::bind::VolumeLock;

use super::{Files, MountedVolume, OpenFile, number};
use crate::broker::Answer;
use crate::broker::bound::BoundAccess;
use crate::broker::volume::limits::Taken;
use crate::broker::volume::ranges::Ranges;
use crate::broker::volume::{Volume, open_again, size_of};
use crate::sys::{self, RecordLock};

/// A file with the locks of a sandbox: a description that the sandbox does not have, so that
/// its locks go when this goes.
pub(super) struct LockFile {
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

    pub(super) fn lock(
        &self,
        handle: u64,
        kind: RecordLock,
        start: u64,
        len: u64,
    ) -> Result<Answer, Errno> {
        self.with_locks(handle, |locks| locks.set(kind, start, len))?;
        self.length(handle)
    }

    /// Bytes of an open file.
    fn length(&self, handle: u64) -> Result<Answer, Errno> {
        let state = self.volume.state();
        let (inode, file) = self.file(handle)?;
        number(Volume::length(&state.open, inode, size_of(&file)?))
    }

    pub(super) fn test_lock(
        &self,
        handle: u64,
        start: u64,
        write: u64,
        tail: &[u8],
    ) -> Result<Answer, Errno> {
        let len = tail.try_into().map(u64::from_ne_bytes).map_err(|_| Errno::INVAL)?;
        let kind = if write == 1 { RecordLock::Write } else { RecordLock::Read };
        let found =
            self.with_locks(handle, |locks| sys::test_lock(locks.file.as_fd(), kind, start, len))?;
        let Some((kind, start, len)) = found else { return Ok(Answer::default()) };
        let is_write = u64::from(kind == RecordLock::Write);
        Ok(Answer::data(bytes_of(&VolumeLock { start, len, is_write }).to_vec()))
    }

    pub(super) fn flock(&self, handle: u64, operation: u64) -> Result<Answer, Errno> {
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
