//! The files of a volume that sandboxes of this process have open, and who says how long they are.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, fstat, ftruncate, futimens};
use rustix::io::Errno;

use super::lengths::{Granted, Pages, Place};
use super::{Volume, blocks, size_of};

/// Bytes that a sandbox may write behind what it has asked for, when it asks once more.
const AHEAD_MIN: u64 = 128 << 10;
/// The same at most.
const AHEAD_MAX: u64 = 1 << 20;
/// The part of a volume's free room that may be granted ahead.
const AHEAD_PART: u64 = 8;

/// Open files by inode number.
pub(super) type OpenFiles = HashMap<u64, OpenInode>;

/// An open file.
#[derive(Default)]
pub(super) struct OpenInode {
    /// Its last name was removed here: its bytes count until it is closed.
    pub is_orphan: bool,
    /// The sandboxes that have it open.
    users: Vec<User>,
    /// Its only user says how long it is.
    is_delegated: bool,
    grant: Option<Grant>,
    /// How much more the next grant has than what is asked for.
    ahead: u64,
}

/// A sandbox that has a file open.
struct User {
    /// The number of its mount.
    mount: u64,
    /// Whether it may change files of the volume.
    may_write: bool,
    /// How often it has it open.
    count: usize,
    /// It, as it was opened first.
    file: Arc<OwnedFd>,
    /// What it is told of the file's length; none: it asks.
    place: Option<Place>,
}

/// A file is longer on the host than its user has said so far.
struct Grant {
    /// It, open to be written.
    file: Arc<OwnedFd>,
    granted: Granted,
    /// What its user had said when somebody looked last.
    seen: Option<u64>,
}

impl OpenInode {
    /// How often it is open.
    pub fn count(&self) -> usize {
        self.users.iter().map(|user| user.count).sum()
    }

    /// Where its only user finds its length, or its first one.
    fn place(&self) -> Option<&Place> {
        self.users.first()?.place.as_ref()
    }

    /// Bytes that it has, of `size` on the host.
    pub fn length(&self, size: u64) -> u64 {
        match (&self.grant, self.place().map(Place::said_end)) {
            (Some(grant), Some(Ok(end))) if size == grant.granted.granted => grant.granted.cut(end),
            _ => size,
        }
    }

    /// Takes its length back from who says it, and cuts it there: the bytes that it had on the host, and
    /// those that it has. `None`: they are the same. Its user takes it for as long as it has said until
    /// it is told.
    fn take_back(&mut self) -> Result<Option<(u64, u64)>, Errno> {
        let Some(place) = self.users.first().and_then(|user| user.place.as_ref()) else {
            return Ok(None);
        };
        if self.is_delegated {
            place.withdraw()?;
            self.is_delegated = false;
        }
        let Some(Grant { file, granted, .. }) = &self.grant else { return Ok(None) };
        let (size, length) = (granted.granted, granted.cut(place.said_end()?));
        // Somebody else has made it longer or shorter: an older program, which knows nothing of this.
        let found = fstat(file)?;
        let is_its_own = found.st_size as u64 == size;
        if is_its_own && length < size {
            ftruncate(file, length)?;
            // Nobody has written to it.
            set_time(
                file,
                Timespec { tv_sec: found.st_mtime, tv_nsec: found.st_mtime_nsec as i64 },
            );
        }
        // It has room on the disk.
        let _ = place.record(Granted::default());
        (self.grant, self.ahead) = (None, 0);
        Ok(is_its_own.then_some((size, length)))
    }

    /// Tells its users how long it is, if that is known, or lets the only one say so.
    fn tell(&mut self, length: Option<u64>) {
        self.is_delegated = match (&self.users[..], length) {
            ([User { may_write: true, place: Some(place), .. }], Some(length)) => {
                place.delegate(length).is_ok()
            }
            _ => false,
        };
        if !self.is_delegated {
            for user in &self.users {
                user.place.iter().for_each(|place| place.tell(length));
            }
        }
    }
}

/// Sets when a file was changed. One that this process may not do that to keeps its time.
fn set_time(file: &OwnedFd, last_modification: Timespec) {
    let last_access = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    let _ = futimens(file, &Timestamps { last_access, last_modification });
}

impl Volume {
    /// Sets the time of a file that sandboxes have written to since the last look; whether one has.
    pub(super) fn note_written(open: &OpenFiles, inode: u64) -> bool {
        let users = open.get(&inode).into_iter().flat_map(|open| &open.users);
        let mut is_written = false;
        for user in users {
            if user.place.as_ref().is_some_and(Place::take_written) {
                set_time(&user.file, Timespec { tv_sec: 0, tv_nsec: UTIME_NOW });
                is_written = true;
            }
        }
        is_written
    }

    /// The same with all files.
    fn note_all_written(open: &OpenFiles) {
        for &inode in open.keys() {
            Self::note_written(open, inode);
        }
    }

    /// Bytes of a file, of `size` on the host.
    pub(super) fn length(open: &OpenFiles, inode: u64, size: u64) -> u64 {
        open.get(&inode).map_or(size, |open| open.length(size))
    }

    /// Takes the length of a file back from the sandbox that says it, so that it is on the host what
    /// everybody takes it for.
    ///
    /// # Errors
    /// The sandbox is busy for too long, or the host refuses.
    pub(super) fn take_back(&self, open: &mut OpenFiles, inode: u64) -> Result<(), Errno> {
        let Some(open) = open.get_mut(&inode) else { return Ok(()) };
        if let Some((size, length)) = open.take_back()? {
            self.refund(blocks(size) - blocks(length));
        }
        Ok(())
    }

    /// Tells all who have a file open how long it is.
    pub(super) fn tell(&self, open: &mut OpenFiles, inode: u64, file: &OwnedFd) {
        let Some(open) = open.get_mut(&inode) else { return };
        let length = if self.is_alone() { size_of(file).ok() } else { None };
        open.tell(length);
    }

    /// Does what may change the length of a file, whoever has it open.
    pub(super) fn change_length<T>(
        &self,
        open: &mut OpenFiles,
        (inode, file): (u64, &OwnedFd),
        work: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let _lock = self.lock_others()?;
        self.take_back(open, inode)?;
        let outcome = work();
        self.tell(open, inode, file);
        outcome
    }

    /// Cuts all files to their lengths, which go on to be delegated.
    ///
    /// # Errors
    /// One cannot be cut.
    pub(super) fn cut_all(&self, open: &mut OpenFiles) -> Result<(), Errno> {
        let inodes: Vec<u64> = open.keys().copied().collect();
        inodes.iter().try_for_each(|&inode| self.cut_one(open, inode))
    }

    /// The same, and sets the times of what sandboxes have written.
    ///
    /// # Errors
    /// As there.
    pub(super) fn settle(&self, open: &mut OpenFiles) -> Result<(), Errno> {
        Self::note_all_written(open);
        self.cut_all(open)
    }

    /// Cuts one file to its length, which goes on to be delegated.
    ///
    /// # Errors
    /// It cannot be cut.
    pub(super) fn cut_one(&self, open: &mut OpenFiles, inode: u64) -> Result<(), Errno> {
        let grant = open.get(&inode).and_then(|open| open.grant.as_ref());
        let Some(file) = grant.map(|grant| grant.file.clone()) else { return Ok(()) };
        self.change_length(open, (inode, &file), || Ok(()))
    }

    /// Cuts those whose users have written nothing since this was called last, and sets the times of the
    /// others.
    pub(super) fn cut_unused(&self, open: &mut OpenFiles) {
        Self::note_all_written(open);
        let mut unused = Vec::new();
        for (&inode, open) in open.iter_mut() {
            let Some(place) = open.users.first().and_then(|user| user.place.as_ref()) else {
                continue;
            };
            let Some(grant) = &mut open.grant else { continue };
            let end = place.said_end().ok();
            if end.is_some() && grant.seen == end && !place.is_busy() {
                unused.push(inode);
            }
            grant.seen = end;
        }
        for inode in unused {
            // Whoever needs the length hears of an error.
            let _ = self.cut_one(open, inode);
        }
    }

    /// Cuts all files to their lengths: whether there may be more room then.
    pub(super) fn reclaim(&self, open: &mut OpenFiles) -> bool {
        let has_grants = open.values().any(|open| open.grant.is_some());
        if has_grants {
            // What cannot be cut now leaves as much room as there was.
            let _ = self.cut_all(open);
        }
        has_grants
    }

    /// Takes all lengths back, and tells nobody of any: others may change them.
    ///
    /// # Errors
    /// Those of [`Volume::take_back`], for one of them; the others are taken back all the same.
    pub(super) fn take_all_back(&self, open: &mut OpenFiles) -> Result<(), Errno> {
        let inodes: Vec<u64> = open.keys().copied().collect();
        let mut outcome = Ok(());
        for inode in inodes {
            match self.take_back(open, inode) {
                Ok(()) => open.get_mut(&inode).into_iter().for_each(|open| open.tell(None)),
                Err(error) => outcome = Err(error),
            }
        }
        outcome
    }

    /// Adds a sandbox to those that have a file open, or has it have it once more. `pages` tell it of
    /// lengths. The file's place there.
    ///
    /// # Errors
    /// Those of [`Volume::take_back`]; nothing is added.
    pub(super) fn add_user(
        &self,
        open: &mut OpenFiles,
        (inode, file): (u64, &Arc<OwnedFd>),
        (mount, may_write): (u64, bool),
        pages: Option<&Arc<Pages>>,
    ) -> Result<u64, Errno> {
        let known = open.get_mut(&inode);
        if let Some(user) =
            known.and_then(|open| open.users.iter_mut().find(|user| user.mount == mount))
        {
            user.count += 1;
            return Ok(user.place.as_ref().map_or(0, Place::number));
        }
        self.take_back(open, inode)?;
        let place = pages.and_then(Pages::take_place);
        let number = place.as_ref().map_or(0, Place::number);
        open.entry(inode).or_default().users.push(User {
            mount,
            may_write,
            count: 1,
            file: file.clone(),
            place,
        });
        self.tell(open, inode, file);
        Ok(number)
    }

    /// Notes that a sandbox has closed a file once. What the file was, if nobody has it open any more.
    pub(super) fn remove_user(
        &self,
        open: &mut OpenFiles,
        (inode, file): (u64, &OwnedFd),
        mount: u64,
    ) -> Option<OpenInode> {
        let known = open.get_mut(&inode)?;
        let index = known.users.iter().position(|user| user.mount == mount)?;
        known.users[index].count -= 1;
        if known.users[index].count > 0 {
            return None;
        }
        Self::note_written(open, inode);
        // Its sandbox asks for this, or has ended, so that it is not busy. A file that cannot be cut stays as
        // long as it is.
        let _ = self.take_back(open, inode);
        let known = open.get_mut(&inode)?;
        if known.grant.take().is_some() {
            // Its place is another file's from now on.
            let _ = known.users[index].place.as_ref().map(|place| place.record(Granted::default()));
        }
        known.users.remove(index);
        if known.users.is_empty() {
            return open.remove(&inode);
        }
        self.tell(open, inode, file);
        None
    }

    /// Lets a sandbox write up to byte `end` of a file whose length is delegated to it. How far it may
    /// write now.
    ///
    /// # Errors
    /// `EAGAIN`: the length is not delegated to it; those of [`Volume::extend`].
    pub(super) fn grant(
        &self,
        open: &mut OpenFiles,
        (inode, file): (u64, &Arc<OwnedFd>),
        mount: u64,
        end: u64,
    ) -> Result<u64, Errno> {
        let open = open.get_mut(&inode).filter(|open| open.is_delegated).ok_or(Errno::AGAIN)?;
        let user = open.users.first().filter(|user| user.mount == mount).ok_or(Errno::AGAIN)?;
        let place = user.place.as_ref().ok_or(Errno::AGAIN)?;
        let known = open.grant.as_ref().map(|grant| grant.granted);
        let size = match known {
            Some(known) => known.granted,
            None => size_of(file)?,
        };
        if end <= size {
            return Ok(size);
        }
        let base = known.map_or(size, |known| known.base);
        let new = |granted| Granted { inode, base, granted, before: size };
        let extend = |granted| {
            place.record(new(granted))?;
            self.extend(file, size, granted).map(|()| granted)
        };
        let free = self.quota.saturating_sub(self.used()?) / AHEAD_PART;
        let ahead = open.ahead.min(free);
        let further = end.checked_add(ahead).filter(|_| ahead > 0);
        let extended = further.map_or(Err(Errno::AGAIN), extend).or_else(|_| extend(end));
        let granted = extended.inspect_err(|_| {
            // What was granted before is granted still.
            let _ = place.record(known.unwrap_or_default());
        })?;
        place.grant(granted);
        let file = file.clone();
        open.grant = Some(Grant { file, granted: new(granted), seen: None });
        open.ahead = (open.ahead * 2).clamp(AHEAD_MIN, AHEAD_MAX);
        Ok(granted)
    }
}
