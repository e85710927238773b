//! A volume that nobody of this process changes, because it is copied or its files are exchanged.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use rustix::io::pwrite;

use super::copy::{CopyTerms, NUMBERED_MAX, copy_on_terms};
use super::{BoundAccess, BoundDirectory, Copied, FileNumbers, Place, Volume, tree};

/// Holds back all requests of sandboxes of this process that change a volume, or open a file of it,
/// until it is dropped. A sandbox that has files open can still write what they have.
pub struct ClosedVolume {
    volume: Arc<Volume>,
    /// Where its files lay before they were moved, and the bytes that they counted for.
    former: Option<(Arc<Place>, u64)>,
}

impl ClosedVolume {
    /// Closes a volume when all requests that are under way are done.
    ///
    /// Files are as long then as their users say, and have the times of what these have written.
    ///
    /// # Errors
    /// They are not by then, it is closed, a file cannot be cut, or not all who are left of the daemon before
    /// this one have taken their files back.
    pub fn close(volume: &Arc<Volume>, until: Instant) -> io::Result<Self> {
        if !volume.left.is_over() {
            let reason = "instances of the daemon before this one take back what they had open; \
                          try again";
            return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
        }
        if !volume.gate.close(until) {
            let reason = "a request of a program takes too long; try again";
            return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
        }
        // Opens the gate again if it is dropped.
        let closed = Self { volume: volume.clone(), former: None };
        volume.settle(&mut volume.state().open)?;
        Ok(closed)
    }

    /// The volume.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Copies its files to a directory that is empty; with the numbers that the copies are to be
    /// shown under, of each by its own. All who have one of them open must be at rest, but for
    /// processes of the host, which are found. Nobody waits until the copy is on disk.
    ///
    /// # Errors
    /// As [`super::copy_volume`], and it is not done by then, or there are too many files.
    pub fn copy_to(&self, to: BorrowedFd<'_>, until: Instant) -> io::Result<(Copied, FileNumbers)> {
        let open: HashSet<u64> = self.volume.state().open.keys().copied().collect();
        let terms = CopyTerms {
            most: self.volume.quota,
            until: Some(until),
            files: Some(NUMBERED_MAX),
            rests: &|inode| open.contains(&inode),
        };
        let place = self.volume.place();
        let (copied, pairs) = copy_on_terms(place.directory.directory().as_fd(), to, &terms)?;
        let shown = |(copy, original)| (copy, place.numbers.shown(original));
        Ok((copied, FileNumbers::new(pairs.into_iter().map(shown))))
    }

    /// Has the files lie in another directory from now on, under these numbers. Nobody may have one
    /// open.
    ///
    /// # Errors
    /// The host refuses; they lie where they did.
    pub fn move_to(&mut self, directory: &Path, numbers: FileNumbers) -> io::Result<()> {
        let used = tree::count(File::open(directory)?.as_fd(), self.volume.quota);
        let directory = BoundDirectory::open(directory, BoundAccess::Write)?;
        let former = (self.volume.place(), self.volume.used()?);
        pwrite(&self.volume.usage, &used.to_ne_bytes(), 0)?;
        self.set_place(Arc::new(Place { directory, numbers }));
        self.former.get_or_insert(former);
        Ok(())
    }

    /// Has the files lie where they did before they were moved, if they were.
    pub fn move_back(&mut self) {
        if let Some((place, used)) = self.former.take() {
            // They lie there, whether that can be counted or not. The next one who opens the volume
            // counts anew.
            let _ = pwrite(&self.volume.usage, &used.to_ne_bytes(), 0);
            self.set_place(place);
        }
    }

    fn set_place(&self, place: Arc<Place>) {
        *self.volume.place.write().unwrap_or_else(PoisonError::into_inner) = place;
    }
}

impl fmt::Debug for ClosedVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ClosedVolume").field(&self.volume).finish()
    }
}

impl Drop for ClosedVolume {
    fn drop(&mut self) {
        self.volume.gate.open();
    }
}
