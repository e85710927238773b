//! System calls of signalfd(2).

use alloc::sync::Arc;

use crate::args::{Fd, Flags, UserPtr};
use crate::errno::{Errno, Result};
use crate::fs::fd_table;
use crate::fs::file::OpenFlags;
use crate::ipc::signalfd::SignalFd;
use crate::task::signal::SignalSet;

/// signalfd(2) without flags.
pub fn signalfd(fd: Fd, mask: UserPtr<SignalSet>, size: usize) -> Result<i32> {
    signalfd4(fd, mask, size, Flags(0))
}

/// signalfd4: signalfd(2) with flags.
pub fn signalfd4(
    fd: Fd,
    mask: UserPtr<SignalSet>,
    size: usize,
    Flags(flags): Flags,
) -> Result<i32> {
    let flags = OpenFlags::from_bits_retain(flags);
    if !(OpenFlags::CLOEXEC | OpenFlags::NONBLOCK).contains(flags) || size != size_of::<SignalSet>()
    {
        return Err(Errno::EINVAL);
    }
    let mask = mask.read()?;
    if fd.0 == -1 {
        return fd_table::install_new(Arc::new(SignalFd::new(mask)), flags);
    }
    fd.file()?.downcast::<SignalFd>().ok_or(Errno::EINVAL)?.set_mask(mask);
    Ok(fd.0)
}
