//! System calls of eventfd(2).

use alloc::sync::Arc;

use crate::args::Flags;
use crate::errno::{Errno, Result};
use crate::fs::fd_table;
use crate::fs::file::OpenFlags;
use crate::ipc::eventfd::{EventFd, ReadMode};

/// `EFD_SEMAPHORE`; the other flags are `O_CLOEXEC` and `O_NONBLOCK`.
const EFD_SEMAPHORE: u32 = 1;

/// eventfd(2) without flags.
pub fn eventfd(value: u32) -> Result<i32> {
    eventfd2(value, Flags(0))
}

/// eventfd2: eventfd(2) with flags.
pub fn eventfd2(value: u32, Flags(flags): Flags) -> Result<i32> {
    let open_flags = OpenFlags::from_bits_retain(flags & !EFD_SEMAPHORE);
    if !(OpenFlags::CLOEXEC | OpenFlags::NONBLOCK).contains(open_flags) {
        return Err(Errno::EINVAL);
    }
    let mode = if flags & EFD_SEMAPHORE != 0 { ReadMode::One } else { ReadMode::Whole };
    fd_table::install_new(Arc::new(EventFd::new(value.into(), mode)), open_flags)
}
