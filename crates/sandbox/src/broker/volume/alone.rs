//! Whether this process alone has a volume: only then it knows how long all files are without a look.
//!
//! Whoever has a volume has a lock of one byte of its file of users, to read; whoever has it alone,
//! to write. Who comes second waits for the lock: the first one looks now and then whether somebody else
//! has the volume, too.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::Volume;
use crate::sys::{self, RecordLock};

/// The byte that tells who has the volume alone.
const BYTE: u64 = 1;
/// The byte that is locked while a process that has not the volume alone changes a length.
const LOCK_BYTE: u64 = 2;
/// How long that lock is waited for, and between two looks.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
const LOCK_PAUSE: Duration = Duration::from_micros(50);
/// How often somebody looks whether others want the volume, and which lengths nobody changes any more.
const TICK: Duration = Duration::from_millis(250);
/// How long another process may take to see that it is not alone.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where sandboxes are told of lengths, and whether they are.
pub(super) struct Lengths {
    /// Where their pages lie.
    pub directory: PathBuf,
    is_alone: AtomicBool,
    /// Somebody looks after them.
    is_watched: AtomicBool,
}

impl Lengths {
    /// Those of a volume, with pages in a directory.
    pub fn new(directory: PathBuf) -> Self {
        let (is_alone, is_watched) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { directory, is_alone, is_watched }
    }
}

/// Waits until nobody takes the volume for its own, and keeps everybody from it.
///
/// # Errors
/// Another process that has it does not answer.
pub(super) fn wait_for_others(users: &File) -> io::Result<()> {
    let until = Instant::now() + PATIENCE;
    while let Err(error) = sys::set_lock(users.as_fd(), RecordLock::Read, BYTE, 1) {
        if error != Errno::AGAIN {
            return Err(error.into());
        }
        if Instant::now() > until {
            let reason = "another process that has it does not answer; end it, and try again";
            return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// See [`Volume::lock_others`].
pub(super) struct OthersLocked<'a>(&'a File);

impl Drop for OthersLocked<'_> {
    fn drop(&mut self) {
        // To give up a lock that one has does not fail.
        let _ = sys::set_lock(self.0.as_fd(), RecordLock::None, LOCK_BYTE, 1);
    }
}

impl Volume {
    /// Whether all changes of lengths are this process' own.
    pub(super) fn is_alone(&self) -> bool {
        self.lengths.as_ref().is_some_and(|lengths| lengths.is_alone.load(Relaxed))
    }

    /// Keeps other processes from changing the length of a file until the result is dropped, if there
    /// may be some.
    ///
    /// # Errors
    /// `ETIMEDOUT`: one of them does not come on.
    pub(super) fn lock_others(&self) -> Result<Option<OthersLocked<'_>>, Errno> {
        if self.is_alone() {
            return Ok(None);
        }
        let until = Instant::now() + LOCK_PATIENCE;
        while let Err(error) = sys::set_lock(self.users.as_fd(), RecordLock::Write, LOCK_BYTE, 1) {
            if error != Errno::AGAIN {
                return Err(error);
            }
            if Instant::now() > until {
                return Err(Errno::TIMEDOUT);
            }
            std::thread::sleep(LOCK_PAUSE);
        }
        Ok(Some(OthersLocked(&self.users)))
    }

    /// Has somebody look after lengths from now on, as long as the volume is in use.
    pub(super) fn watch_lengths(self: &Arc<Self>) -> io::Result<()> {
        let Some(lengths) = &self.lengths else { return Ok(()) };
        if lengths.is_watched.swap(true, Relaxed) {
            return Ok(());
        }
        let volume = Arc::downgrade(self);
        let watcher = std::thread::Builder::new().name("volume-lengths".into());
        let started = watcher.spawn(move || watch(&volume));
        started.inspect_err(|_| lengths.is_watched.store(false, Relaxed))?;
        // What is not so by now is tried again.
        let _ = self.look_after_lengths();
        Ok(())
    }

    fn look_after_lengths(&self) -> Result<(), Errno> {
        let Some(lengths) = &self.lengths else { return Ok(()) };
        let mut state = self.state();
        if self.gate.is_closed() {
            // Whoever copies the files has settled all, and finds what changes meanwhile.
            return Ok(());
        }
        // An older program knows nothing of the other lock.
        let is_used_elsewhere = self.is_used_elsewhere().unwrap_or(true);
        if !lengths.is_alone.load(Relaxed) {
            let is_alone = !is_used_elsewhere
                && sys::set_lock(self.users.as_fd(), RecordLock::Write, BYTE, 1).is_ok();
            lengths.is_alone.store(is_alone, Relaxed);
            return Ok(());
        }
        if !is_used_elsewhere {
            self.cut_unused(&mut state.open);
            return Ok(());
        }
        lengths.is_alone.store(false, Relaxed);
        let taken = self.take_all_back(&mut state.open);
        if taken.is_err() {
            // Some are said by sandboxes still, and whoever waits goes on to wait.
            lengths.is_alone.store(true, Relaxed);
            return taken;
        }
        sys::set_lock(self.users.as_fd(), RecordLock::Read, BYTE, 1)
    }
}

fn watch(volume: &Weak<Volume>) {
    loop {
        std::thread::sleep(TICK);
        let Some(volume) = volume.upgrade() else { return };
        // What is not so by now is tried again.
        let _ = volume.look_after_lengths();
    }
}
