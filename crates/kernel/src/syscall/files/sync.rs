//! Calls about disks and caches, which a file system in memory does not have.

use super::{file, usable_file};
use crate::args::Args;
use crate::errno::{Errno, Result};
use crate::fs::file::OpenFile;

/// Nothing lies between a write and the file, so there is nothing to wait for,
/// unless the file is on the host.
fn synchronized(open: &OpenFile) -> Result<u64> {
    if open.file.seekable() { open.file.sync().map(|()| 0) } else { Err(Errno::EINVAL) }
}

/// fsync(2) and fdatasync(2).
pub fn fsync(args: &Args) -> Result<u64> {
    synchronized(&*usable_file(args.fd(0))?)
}

/// sync(2).
pub fn sync(_: &Args) -> Result<u64> {
    Ok(0)
}

/// syncfs(2).
pub fn syncfs(args: &Args) -> Result<u64> {
    file(args.fd(0)).map(|_| 0)
}

/// sync_file_range(2).
pub fn sync_file_range(args: &Args) -> Result<u64> {
    let open = usable_file(args.fd(0))?;
    if args.i64(1) < 0 || args.i64(2) < 0 || args.u32(3) & !7 != 0 {
        return Err(Errno::EINVAL);
    }
    if open.file.seekable() { Ok(0) } else { Err(Errno::ESPIPE) }
}

const POSIX_FADV_NOREUSE: u32 = 5;

/// fadvise64(2): advice, which may be ignored.
pub fn fadvise64(args: &Args) -> Result<u64> {
    let open = usable_file(args.fd(0))?;
    if args.u32(3) > POSIX_FADV_NOREUSE || args.i64(2) < 0 {
        return Err(Errno::EINVAL);
    }
    if open.file.seekable() { Ok(0) } else { Err(Errno::ESPIPE) }
}

/// readahead(2): advice, too.
pub fn readahead(args: &Args) -> Result<u64> {
    let open = usable_file(args.fd(0))?;
    if !open.flags().can_read() {
        return Err(Errno::EBADF);
    }
    if open.file.mmap_source().is_ok() { Ok(0) } else { Err(Errno::EINVAL) }
}
