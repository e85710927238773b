//! What every change of a file's content respects, whichever system call makes it.
//! The files themselves ask, so that no call can forget to.

use super::host_side;
use crate::errno::{Errno, Result};

/// How many of `wanted` bytes the running thread may write at `offset`, which is at
/// least one. `EFBIG` and `SIGXFSZ` if `offset` lies beyond `RLIMIT_FSIZE`
/// (setrlimit(2)).
pub fn room(offset: u64, wanted: u64) -> Result<u64> {
    match host_side::file_size_limit().saturating_sub(offset) {
        0 => Err(too_big()),
        room => Ok(room.min(wanted)),
    }
}

/// Whether the running thread may change the size of a file: `EFBIG` and `SIGXFSZ` if
/// it would grow beyond `RLIMIT_FSIZE`. A file that is larger already may shrink.
pub fn check_size(old: u64, new: u64) -> Result<()> {
    if new > old && new > host_side::file_size_limit() { Err(too_big()) } else { Ok(()) }
}

fn too_big() -> Errno {
    host_side::file_size_exceeded();
    Errno::EFBIG
}
