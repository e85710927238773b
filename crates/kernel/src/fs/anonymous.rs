//! Attributes of files without a place in any file system.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::fs::file::Stat;

/// Type bits of a FIFO in `st_mode` (inode(7)).
pub const S_IFIFO: u32 = 0o010000;
/// Type bits of a socket in `st_mode` (inode(7)).
pub const S_IFSOCK: u32 = 0o140000;

/// Device number of the file systems that hold pipes, sockets and the like.
const PIPE_DEVICE: u64 = 14;
const SOCKET_DEVICE: u64 = 8;
const ANONYMOUS_DEVICE: u64 = 15;

/// Gives out inode numbers. Saved with the object that uses it.
#[derive(Default)]
pub struct InodeNumbers(AtomicU64);

impl InodeNumbers {
    /// Starts at 101: netstat(8) overlooks `socket:[N]` in `/proc/PID/fd` where N has one digit.
    pub const fn new() -> Self {
        Self(AtomicU64::new(100))
    }

    /// The next number.
    pub fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// Attributes of one end of a pipe.
pub fn pipe_stat(ino: u64) -> Stat {
    Stat {
        dev: PIPE_DEVICE,
        ino,
        nlink: 1,
        mode: S_IFIFO | 0o600,
        blksize: 4096,
        ..Stat::default()
    }
}

/// Attributes of a socket.
pub fn socket_stat(ino: u64) -> Stat {
    Stat {
        dev: SOCKET_DEVICE,
        ino,
        nlink: 1,
        mode: S_IFSOCK | 0o777,
        blksize: 4096,
        ..Stat::default()
    }
}

/// Attributes that eventfd, epoll, timerfd and signalfd share: one inode
/// without a type, as on Linux.
pub fn anonymous_stat() -> Stat {
    Stat { dev: ANONYMOUS_DEVICE, ino: 1, nlink: 1, mode: 0o600, blksize: 4096, ..Stat::default() }
}
