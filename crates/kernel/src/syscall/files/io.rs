//! Reading, writing and seeking.

use super::{file, usable_file};
use crate::args::Args;
use crate::errno::{Errno, Result};
use crate::fs::file::OpenFile;
use crate::fs::overlay::RegularFile;
use crate::io::{Sink, Source};

/// read(2).
pub fn read(args: &Args) -> Result<u64> {
    let open = file(args.fd(0))?;
    let mut sink = Sink::user(args.address(1), args.usize(2))?;
    open.read(&mut sink).map(|count| count as u64)
}

/// write(2).
pub fn write(args: &Args) -> Result<u64> {
    let open = file(args.fd(0))?;
    let mut source = Source::user(args.address(1), args.usize(2))?;
    open.write(&mut source).map(|count| count as u64)
}

/// readv(2).
pub fn readv(args: &Args) -> Result<u64> {
    let open = file(args.fd(0))?;
    let mut sink = Sink::user_vectors(args.address(1), vector_count(args)?)?;
    open.read(&mut sink).map(|count| count as u64)
}

/// writev(2).
pub fn writev(args: &Args) -> Result<u64> {
    let open = file(args.fd(0))?;
    let mut source = Source::user_vectors(args.address(1), vector_count(args)?)?;
    open.write(&mut source).map(|count| count as u64)
}

/// pread64(2).
pub fn pread64(args: &Args) -> Result<u64> {
    let offset = offset(args.i64(3))?;
    let open = file(args.fd(0))?;
    let mut sink = Sink::user(args.address(1), args.usize(2))?;
    open.read_at(&mut sink, offset).map(|count| count as u64)
}

/// pwrite64(2).
pub fn pwrite64(args: &Args) -> Result<u64> {
    let offset = offset(args.i64(3))?;
    let open = file(args.fd(0))?;
    let mut source = Source::user(args.address(1), args.usize(2))?;
    open.write_at(&mut source, offset).map(|count| count as u64)
}

/// preadv(2).
pub fn preadv(args: &Args) -> Result<u64> {
    let offset = offset(args.i64(3))?;
    let open = file(args.fd(0))?;
    let mut sink = Sink::user_vectors(args.address(1), vector_count(args)?)?;
    open.read_at(&mut sink, offset).map(|count| count as u64)
}

/// pwritev(2).
pub fn pwritev(args: &Args) -> Result<u64> {
    let offset = offset(args.i64(3))?;
    let open = file(args.fd(0))?;
    let mut source = Source::user_vectors(args.address(1), vector_count(args)?)?;
    open.write_at(&mut source, offset).map(|count| count as u64)
}

const RWF_HIPRI: u32 = 0x01;
const RWF_DSYNC: u32 = 0x02;
const RWF_SYNC: u32 = 0x04;
/// The flags that ask for nothing a file in memory does not do anyway.
const RWF_HARMLESS: u32 = RWF_HIPRI | RWF_DSYNC | RWF_SYNC;
const RWF_NOWAIT: u32 = 0x08;
const RWF_APPEND: u32 = 0x10;

/// preadv2(2).
pub fn preadv2(args: &Args) -> Result<u64> {
    let open = file(args.fd(0))?;
    let flags = args.u32(5);
    if flags & !(RWF_HARMLESS | RWF_NOWAIT) != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let mut sink = Sink::user_vectors(args.address(1), vector_count(args)?)?;
    if args.i64(3) != -1 {
        return open.read_at(&mut sink, offset(args.i64(3))?).map(|count| count as u64);
    }
    if flags & RWF_NOWAIT != 0 && !open.file.seekable() {
        if !open.flags().can_read() {
            return Err(Errno::EBADF);
        }
        return open.file.read(&mut sink, 0).map(|count| count as u64);
    }
    open.read(&mut sink).map(|count| count as u64)
}

/// pwritev2(2).
pub fn pwritev2(args: &Args) -> Result<u64> {
    let open = file(args.fd(0))?;
    let flags = args.u32(5);
    if flags & !(RWF_HARMLESS | RWF_APPEND) != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let mut source = Source::user_vectors(args.address(1), vector_count(args)?)?;
    if flags & RWF_APPEND != 0 && open.file.seekable() {
        let end = open.file.size();
        let written = open.write_at(&mut source, end)? as u64;
        if args.i64(3) == -1 {
            open.set_position(end + written);
        }
        return Ok(written);
    }
    let written = match args.i64(3) {
        -1 => open.write(&mut source)?,
        at => open.write_at(&mut source, offset(at)?)?,
    };
    Ok(written as u64)
}

fn vector_count(args: &Args) -> Result<usize> {
    usize::try_from(args.i64(2)).map_err(|_| Errno::EINVAL)
}

fn offset(value: i64) -> Result<u64> {
    u64::try_from(value).map_err(|_| Errno::EINVAL)
}

const SEEK_SET: u32 = 0;
const SEEK_CUR: u32 = 1;
const SEEK_END: u32 = 2;
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

/// lseek(2).
pub fn lseek(args: &Args) -> Result<u64> {
    let open = usable_file(args.fd(0))?;
    let (delta, whence) = (args.i64(1), args.u32(2));
    if whence > SEEK_HOLE {
        return Err(Errno::EINVAL);
    }
    if !open.file.seekable() {
        return Err(Errno::ESPIPE);
    }
    let base = match whence {
        SEEK_SET => 0,
        SEEK_CUR => open.position(),
        SEEK_END => open.file.size(),
        _ => return seek_data(&open, delta, whence == SEEK_DATA),
    };
    let position = i64::try_from(base)
        .ok()
        .and_then(|base| base.checked_add(delta))
        .ok_or(Errno::EOVERFLOW)?;
    let position = u64::try_from(position).map_err(|_| Errno::EINVAL)?;
    open.set_position(position);
    Ok(open.position())
}

fn seek_data(open: &OpenFile, from: i64, data: bool) -> Result<u64> {
    let from = u64::try_from(from).map_err(|_| Errno::ENXIO)?;
    let regular = open.downcast::<RegularFile>().ok_or(Errno::EINVAL)?;
    let position = if data { regular.next_data(from) } else { regular.next_hole(from) }?;
    open.set_position(position);
    Ok(position)
}
