//! Calls about disks and caches, which a file system in memory does not have.

use crate::args::{Fd, Flags};
use crate::errno::{Errno, Result};
use crate::fs::file::OpenFile;
use crate::fs::inode::FileType;
use crate::fs::path::Path;

/// Nothing lies between a write and the file, so there is nothing to wait for,
/// unless the file is on the host. Devices, pipes and sockets are `EINVAL`.
pub fn synchronized(open: &OpenFile) -> Result<()> {
    if is_stored(open) { open.file.sync() } else { Err(Errno::EINVAL) }
}

/// Whether it has contents of its own, as regular files and directories do.
fn is_stored(open: &OpenFile) -> bool {
    let device = |path: &Path| path.inode().file_type() == FileType::CharacterDevice;
    open.file.seekable() && !open.path.as_ref().is_some_and(device)
}

/// fsync(2) and fdatasync(2).
pub fn fsync(fd: Fd) -> Result<()> {
    synchronized(&*fd.usable_file()?)
}

/// sync(2).
pub fn sync() -> Result<()> {
    Ok(())
}

/// syncfs(2).
pub fn syncfs(fd: Fd) -> Result<()> {
    fd.file().map(drop)
}

/// sync_file_range(2).
pub fn sync_file_range(fd: Fd, offset: i64, len: i64, Flags(flags): Flags) -> Result<()> {
    let open = fd.usable_file()?;
    if offset < 0 || len < 0 || flags & !7 != 0 {
        return Err(Errno::EINVAL);
    }
    if is_stored(&open) { Ok(()) } else { Err(Errno::ESPIPE) }
}

const POSIX_FADV_NOREUSE: u32 = 5;

/// fadvise64(2): advice, which may be ignored.
pub fn fadvise64(fd: Fd, _: u64, len: i64, advice: u32) -> Result<()> {
    let open = fd.usable_file()?;
    if advice > POSIX_FADV_NOREUSE || len < 0 {
        return Err(Errno::EINVAL);
    }
    if open.file.seekable() { Ok(()) } else { Err(Errno::ESPIPE) }
}

/// readahead(2): advice, too.
pub fn readahead(fd: Fd, _: u64, _: u64) -> Result<()> {
    let open = fd.usable_file()?;
    if !open.flags().can_read() {
        return Err(Errno::EBADF);
    }
    if is_stored(&open) && open.file.mmap_source().is_ok() { Ok(()) } else { Err(Errno::EINVAL) }
}
