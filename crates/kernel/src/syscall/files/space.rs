//! The size of files and the room they take.

use super::resolve;
use crate::args::{Fd, Flags, UserString};
use crate::errno::{Errno, Result};
use crate::fs::bind::{BoundFile, VolumeFile};
use crate::fs::context::{AT_FDCWD, Context};
use crate::fs::inode::FileType;
use crate::fs::inotify::Mask;
use crate::fs::notify;
use crate::fs::open::check_not_running;
use crate::fs::overlay::{Grow, RegularFile};
use crate::fs::permission::Access;
use crate::fs::walk::Follow;

/// truncate(2).
pub fn truncate(path: UserString, len: i64) -> Result<()> {
    let size = u64::try_from(len).map_err(|_| Errno::EINVAL)?;
    let context = Context::current();
    let path = resolve(&context, AT_FDCWD, path, Follow::Yes)?;
    match path.inode().file_type() {
        FileType::Regular => {}
        FileType::Directory => return Err(Errno::EISDIR),
        _ => return Err(Errno::EINVAL),
    }
    path.check_writable()?;
    context.identity.check(&**path.inode(), Access::WRITE)?;
    check_not_running(path.inode())?;
    path.inode().truncate(size)?;
    notify::at(&path, Mask::MODIFY);
    Ok(())
}

/// ftruncate(2).
pub fn ftruncate(fd: Fd, len: i64) -> Result<()> {
    let size = u64::try_from(len).map_err(|_| Errno::EINVAL)?;
    let open = fd.usable_file()?;
    if !open.flags().can_write() {
        return Err(Errno::EINVAL);
    }
    open.file.truncate(size)?;
    notify::open_file(&open, Mask::MODIFY);
    Ok(())
}

const FALLOC_FL_KEEP_SIZE: u32 = 0x01;
const FALLOC_FL_PUNCH_HOLE: u32 = 0x02;
const FALLOC_FL_COLLAPSE_RANGE: u32 = 0x08;
const FALLOC_FL_ZERO_RANGE: u32 = 0x10;
const FALLOC_FL_INSERT_RANGE: u32 = 0x20;
const FALLOC_FL_UNSHARE_RANGE: u32 = 0x40;
/// Every mode that Linux knows.
const FALLOC_KNOWN: u32 = FALLOC_FL_KEEP_SIZE
    | FALLOC_FL_PUNCH_HOLE
    | FALLOC_FL_COLLAPSE_RANGE
    | FALLOC_FL_ZERO_RANGE
    | FALLOC_FL_INSERT_RANGE
    | FALLOC_FL_UNSHARE_RANGE;

/// Refuses combinations of modes as `vfs_fallocate` does (fs/open.c).
fn check_mode(mode: u32) -> Result<()> {
    let with = |flag: u32, allowed: u32| mode & flag == 0 || mode & !(flag | allowed) == 0;
    if mode & !FALLOC_KNOWN != 0
        || mode & FALLOC_FL_PUNCH_HOLE != 0 && mode & FALLOC_FL_ZERO_RANGE != 0
        || mode & FALLOC_FL_PUNCH_HOLE != 0 && mode & FALLOC_FL_KEEP_SIZE == 0
    {
        return Err(Errno::EOPNOTSUPP);
    }
    if !with(FALLOC_FL_COLLAPSE_RANGE, 0)
        || !with(FALLOC_FL_INSERT_RANGE, 0)
        || !with(FALLOC_FL_UNSHARE_RANGE, FALLOC_FL_KEEP_SIZE)
    {
        return Err(Errno::EINVAL);
    }
    Ok(())
}

/// fallocate(2).
pub fn fallocate(fd: Fd, Flags(mode): Flags, offset: i64, len: i64) -> Result<()> {
    let open = fd.usable_file()?;
    if offset < 0 || len <= 0 {
        return Err(Errno::EINVAL);
    }
    check_mode(mode)?;
    if !open.flags().can_write() {
        return Err(Errno::EBADF);
    }
    let (offset, len) = (offset as u64, len as u64);
    if offset + len > i64::MAX as u64 {
        return Err(Errno::EFBIG);
    }
    if let Some(file) = open.downcast::<VolumeFile>().filter(|_| mode == 0) {
        file.allocate(offset + len)?;
        notify::open_file(&open, Mask::MODIFY);
        return Ok(());
    }
    let Some(regular) = open.downcast::<RegularFile>() else {
        let is_of_host =
            open.downcast::<VolumeFile>().is_some() || open.downcast::<BoundFile>().is_some();
        return Err(match open.file.seekable() {
            true if is_of_host => Errno::EOPNOTSUPP,
            true => Errno::ENODEV,
            false => Errno::ESPIPE,
        });
    };
    let grow = if mode & FALLOC_FL_KEEP_SIZE != 0 { Grow::No } else { Grow::Yes };
    match mode & !FALLOC_FL_KEEP_SIZE {
        0 => regular.allocate(offset, len, grow)?,
        FALLOC_FL_PUNCH_HOLE => regular.punch(offset, len)?,
        FALLOC_FL_ZERO_RANGE => {
            regular.punch(offset, len)?;
            regular.allocate(offset, len, grow)?;
        }
        // As on tmpfs.
        _ => return Err(Errno::EOPNOTSUPP),
    }
    notify::open_file(&open, Mask::MODIFY);
    Ok(())
}
