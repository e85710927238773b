//! Whether this process alone has a volume: only then it knows how long all files are without a look.
//!
//! Whoever has a volume has a lock of one byte of its file of users, to read; whoever has it alone,
//! to write. Who comes second leaves word in that file, and waits for the lock.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::{Errno, pread, pwrite};

use super::Volume;
use crate::sys::{self, RecordLock};

/// The byte that tells who has the volume alone.
const BYTE: u64 = 1;
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
    /// Those of a volume that this process has from now on. `users` is its file of users.
    ///
    /// # Errors
    /// Another process that has it does not answer.
    pub fn new(directory: PathBuf, users: &File) -> io::Result<Self> {
        wait_for_others(users)?;
        let (is_alone, is_watched) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { directory, is_alone, is_watched })
    }
}

/// Waits until nobody takes the volume for its own, and keeps everybody from it.
fn wait_for_others(users: &File) -> io::Result<()> {
    let until = Instant::now() + PATIENCE;
    while let Err(error) = sys::set_lock(users.as_fd(), RecordLock::Read, BYTE, 1) {
        if error != Errno::AGAIN {
            return Err(error.into());
        }
        if Instant::now() > until {
            let reason = "another process that has it does not answer; end it, and try again";
            return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
        }
        pwrite(users, &[1], 0)?;
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

impl Volume {
    /// Whether all changes of lengths are this process' own.
    pub(super) fn is_alone(&self) -> bool {
        self.lengths.as_ref().is_some_and(|lengths| lengths.is_alone.load(Relaxed))
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
        if !lengths.is_alone.load(Relaxed) {
            // Who has come first may be older, and know nothing of this.
            let is_alone = !self.is_used_elsewhere().unwrap_or(true)
                && sys::set_lock(self.users.as_fd(), RecordLock::Write, BYTE, 1).is_ok();
            lengths.is_alone.store(is_alone, Relaxed);
            return Ok(());
        }
        let mut word = [0];
        if pread(&self.users, &mut word, 0)? == 0 || word == [0] {
            self.settle_unused(&mut state.open);
            return Ok(());
        }
        lengths.is_alone.store(false, Relaxed);
        let settled = self.take_all_back(&mut state.open);
        if settled.is_err() {
            // They are this process' own still, and whoever waits goes on to wait.
            lengths.is_alone.store(true, Relaxed);
            return settled;
        }
        pwrite(&self.users, &[0], 0)?;
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
