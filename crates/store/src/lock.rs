//! Advisory locks, flock(2). They belong to the open file, so they end with the
//! process that holds them, however it ends.
//!
//! Lock order: the store's lock, then a session's directory, then a function's
//! directory, then single index and image files, then the reserve.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::{Context, Result};

/// Waits for a shared lock.
pub(crate) fn lock_shared(file: impl AsFd, path: &Path) -> Result<()> {
    retry_on_signal(|| flock(file.as_fd(), FlockOperation::LockShared)).context("lock", path)
}

/// Waits for an exclusive lock.
pub(crate) fn lock_exclusive(file: impl AsFd, path: &Path) -> Result<()> {
    retry_on_signal(|| flock(file.as_fd(), FlockOperation::LockExclusive)).context("lock", path)
}

/// Takes an exclusive lock if nobody else holds one; says whether it did.
pub(crate) fn try_lock_exclusive(file: impl AsFd, path: &Path) -> Result<bool> {
    let locked = retry_on_signal(|| flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive));
    match locked {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error).context("lock", path),
    }
}

/// Tries for an exclusive lock until `patience` has passed; says whether it got it.
pub(crate) fn lock_exclusive_within(file: &File, path: &Path, patience: Duration) -> Result<bool> {
    let deadline = Instant::now() + patience;
    while !try_lock_exclusive(file, path)? {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(true)
}

fn retry_on_signal(mut call: impl FnMut() -> rustix::io::Result<()>) -> rustix::io::Result<()> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}
