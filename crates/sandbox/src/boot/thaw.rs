//! Thawing an image in a zygote.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::BootFlags;

/// What may differ from one thaw of an image to the next.
#[derive(Clone, Copy, Debug)]
pub struct ThawOptions<'a> {
    /// Standard output; duplicated, not consumed.
    pub stdout: BorrowedFd<'a>,
    /// Standard error; duplicated, not consumed.
    pub stderr: BorrowedFd<'a>,
    /// Bytes of memory the sandbox may use; 0: no limit.
    pub memory_limit: u64,
    /// CPU time after which the host kernel ends the sandbox, in whole seconds
    /// rounded up; `None`: no limit.
    pub cpu_time_limit: Option<Duration>,
    /// `FLAG_*` of [`thaw_abi::control`].
    pub flags: BootFlags,
    /// Host name; empty keeps the frozen one.
    pub hostname: &'a str,
}
