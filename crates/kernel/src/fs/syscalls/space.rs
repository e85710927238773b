//! The size of files and the room they take.

use super::super::context::{AT_FDCWD, Context};
use super::super::inode::FileType;
use super::super::overlay::{Grow, RegularFile};
use super::super::permission::Access;
use super::super::walk::Follow;
use super::{resolve, usable_file};
use crate::errno::{Errno, Result};
use crate::syscall::Args;

/// The answer to a write beyond `RLIMIT_FSIZE`.
pub(super) fn file_too_big() -> Errno {
    super::super::signals::file_size_exceeded();
    Errno::EFBIG
}

fn checked_size(value: i64, context: &Context) -> Result<u64> {
    let size = u64::try_from(value).map_err(|_| Errno::EINVAL)?;
    if size > context.file_size_limit { Err(file_too_big()) } else { Ok(size) }
}

/// truncate(2).
pub fn truncate(args: &Args) -> Result<u64> {
    if args.i64(1) < 0 {
        return Err(Errno::EINVAL);
    }
    let context = Context::current();
    let path = resolve(&context, AT_FDCWD, args.address(0), Follow::Yes)?;
    match path.inode().file_type() {
        FileType::Regular => {}
        FileType::Directory => return Err(Errno::EISDIR),
        _ => return Err(Errno::EINVAL),
    }
    context.identity.check(&**path.inode(), Access::WRITE)?;
    path.inode().truncate(checked_size(args.i64(1), &context)?)?;
    Ok(0)
}

/// ftruncate(2).
pub fn ftruncate(args: &Args) -> Result<u64> {
    if args.i64(1) < 0 {
        return Err(Errno::EINVAL);
    }
    let open = usable_file(args.fd(0))?;
    if !open.flags().can_write() {
        return Err(Errno::EINVAL);
    }
    let size = checked_size(args.i64(1), &Context::current())?;
    open.file.truncate(size)?;
    Ok(0)
}

const FALLOC_FL_KEEP_SIZE: u32 = 0x01;
const FALLOC_FL_PUNCH_HOLE: u32 = 0x02;

/// fallocate(2).
pub fn fallocate(args: &Args) -> Result<u64> {
    let open = usable_file(args.fd(0))?;
    let (mode, offset, len) = (args.u32(1), args.i64(2), args.i64(3));
    if offset < 0 || len <= 0 {
        return Err(Errno::EINVAL);
    }
    if !open.flags().can_write() {
        return Err(Errno::EBADF);
    }
    let Some(regular) = open.downcast::<RegularFile>() else {
        return Err(if open.file.seekable() { Errno::ENODEV } else { Errno::ESPIPE });
    };
    let (offset, len) = (offset as u64, len as u64);
    match mode {
        0 => {
            let end = offset.checked_add(len).ok_or(Errno::EFBIG)?;
            if end > Context::current().file_size_limit {
                return Err(file_too_big());
            }
            regular.allocate(offset, len, Grow::Yes)?;
        }
        FALLOC_FL_KEEP_SIZE => regular.allocate(offset, len, Grow::No)?,
        mode if mode == FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE => regular.punch(offset, len)?,
        _ => return Err(Errno::EOPNOTSUPP),
    }
    Ok(0)
}
