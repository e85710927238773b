//! What every change of a file's content respects, whichever system call makes it.
//! The files themselves ask, so that no call can forget to.

use crate::errno::{Errno, Result};
use crate::task::Capabilities;
use crate::task::process::RLIMIT_FSIZE;
use crate::task::signal::{SI_KERNEL, SIGXFSZ, SignalInfo, send_to_thread};
use crate::task::thread::running;

/// How many of `wanted` bytes the running thread may write at `offset`, which is at
/// least one. `EFBIG` and `SIGXFSZ` if `offset` lies beyond `RLIMIT_FSIZE`
/// (setrlimit(2)).
pub fn room(offset: u64, wanted: u64) -> Result<u64> {
    match size_limit().saturating_sub(offset) {
        0 => Err(too_big()),
        room => Ok(room.min(wanted)),
    }
}

/// Whether there is a size that the running thread may not write beyond.
pub fn has_limit() -> bool {
    size_limit() != u64::MAX
}

/// Whether the running thread may change the size of a file: `EFBIG` and `SIGXFSZ` if
/// it would grow beyond `RLIMIT_FSIZE`. A file that is larger already may shrink.
pub fn check_size(old: u64, new: u64) -> Result<()> {
    if new > old && new > size_limit() { Err(too_big()) } else { Ok(()) }
}

/// Whether the running process may leave set-user-ID on a file that it writes to.
pub fn keeps_privilege_bits() -> bool {
    running().is_none_or(|t| t.process.credentials.borrow_mut().can(Capabilities::FSETID))
}

/// `RLIMIT_FSIZE` of the running process, in bytes. The kernel itself has no limit.
fn size_limit() -> u64 {
    running().map_or(u64::MAX, |thread| thread.process.limits.borrow_mut()[RLIMIT_FSIZE].current)
}

fn too_big() -> Errno {
    if let Some(thread) = running() {
        send_to_thread(&thread, SignalInfo::new(SIGXFSZ, SI_KERNEL));
    }
    Errno::EFBIG
}
