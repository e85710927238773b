//! Reading, writing and seeking.

use crate::args::{Fd, Flags};
use crate::errno::{Errno, Result};
use crate::fs::file::OpenFile;
use crate::fs::overlay::RegularFile;
use crate::io::{Sink, Source};
use crate::platform::user::UserAddress;

/// read(2).
pub fn read(fd: Fd, buffer: UserAddress, len: usize) -> Result<usize> {
    let open = fd.file()?;
    let mut sink = Sink::user(buffer, len)?;
    open.read(&mut sink)
}

/// write(2).
pub fn write(fd: Fd, buffer: UserAddress, len: usize) -> Result<usize> {
    let open = fd.file()?;
    let mut source = Source::user(buffer, len)?;
    open.write(&mut source)
}

/// readv(2).
pub fn readv(fd: Fd, vectors: UserAddress, count: i64) -> Result<usize> {
    let open = fd.file()?;
    let mut sink = Sink::user_vectors(vectors, vector_count(count)?)?;
    open.read(&mut sink)
}

/// writev(2).
pub fn writev(fd: Fd, vectors: UserAddress, count: i64) -> Result<usize> {
    let open = fd.file()?;
    let mut source = Source::user_vectors(vectors, vector_count(count)?)?;
    open.write(&mut source)
}

/// pread64(2).
pub fn pread64(fd: Fd, buffer: UserAddress, len: usize, at: i64) -> Result<usize> {
    let offset = offset(at)?;
    let open = fd.file()?;
    let mut sink = Sink::user(buffer, len)?;
    open.read_at(&mut sink, offset)
}

/// pwrite64(2).
pub fn pwrite64(fd: Fd, buffer: UserAddress, len: usize, at: i64) -> Result<usize> {
    let offset = offset(at)?;
    let open = fd.file()?;
    let mut source = Source::user(buffer, len)?;
    open.write_at(&mut source, offset)
}

/// preadv(2).
pub fn preadv(fd: Fd, vectors: UserAddress, count: i64, at: i64) -> Result<usize> {
    let offset = offset(at)?;
    let open = fd.file()?;
    let mut sink = Sink::user_vectors(vectors, vector_count(count)?)?;
    open.read_at(&mut sink, offset)
}

/// pwritev(2).
pub fn pwritev(fd: Fd, vectors: UserAddress, count: i64, at: i64) -> Result<usize> {
    let offset = offset(at)?;
    let open = fd.file()?;
    let mut source = Source::user_vectors(vectors, vector_count(count)?)?;
    open.write_at(&mut source, offset)
}

const RWF_HIPRI: u32 = 0x01;
const RWF_DSYNC: u32 = 0x02;
const RWF_SYNC: u32 = 0x04;
/// The flags that ask for nothing a file in memory does not do anyway.
const RWF_HARMLESS: u32 = RWF_HIPRI | RWF_DSYNC | RWF_SYNC;
const RWF_NOWAIT: u32 = 0x08;
const RWF_APPEND: u32 = 0x10;

/// preadv2(2).
pub fn preadv2(
    fd: Fd,
    vectors: UserAddress,
    count: i64,
    at: i64,
    _: u64,
    Flags(flags): Flags,
) -> Result<usize> {
    let open = fd.file()?;
    if flags & !(RWF_HARMLESS | RWF_NOWAIT) != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let mut sink = Sink::user_vectors(vectors, vector_count(count)?)?;
    if at != -1 {
        return open.read_at(&mut sink, offset(at)?);
    }
    if flags & RWF_NOWAIT != 0 && !open.file.seekable() {
        if !open.flags().can_read() {
            return Err(Errno::EBADF);
        }
        return open.file.read(&mut sink, 0);
    }
    open.read(&mut sink)
}

/// pwritev2(2).
pub fn pwritev2(
    fd: Fd,
    vectors: UserAddress,
    count: i64,
    at: i64,
    _: u64,
    Flags(flags): Flags,
) -> Result<usize> {
    let open = fd.file()?;
    if flags & !(RWF_HARMLESS | RWF_APPEND) != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    let mut source = Source::user_vectors(vectors, vector_count(count)?)?;
    if flags & RWF_APPEND != 0 && open.file.seekable() {
        let end = open.file.size();
        let written = open.write_at(&mut source, end)?;
        if at == -1 {
            open.set_position(end + written as u64);
        }
        return Ok(written);
    }
    match at {
        -1 => open.write(&mut source),
        at => open.write_at(&mut source, offset(at)?),
    }
}

fn vector_count(count: i64) -> Result<usize> {
    usize::try_from(count).map_err(|_| Errno::EINVAL)
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
pub fn lseek(fd: Fd, delta: i64, whence: u32) -> Result<u64> {
    let open = fd.usable_file()?;
    if whence > SEEK_HOLE {
        return Err(Errno::EINVAL);
    }
    if !open.file.seekable() {
        return Err(Errno::ESPIPE);
    }
    if !open.file.keeps_position() {
        // Of a device (`null_lseek` in drivers/char/mem.c).
        return Ok(0);
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
