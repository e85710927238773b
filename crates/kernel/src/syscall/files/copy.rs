//! Copying between descriptors inside the kernel.

use alloc::vec::Vec;

use crate::args::{Fd, Flags};
use crate::errno::{Errno, Result};
use crate::fs::file::{OpenFile, OpenFlags};
use crate::fs::inode::FileType;
use crate::fs::overlay::RegularFile;
use crate::fs::writing;
use crate::io::{MAX_RW_COUNT, Sink, Source};
use crate::platform::user::UserAddress;

/// Bytes moved at a time.
const CHUNK: usize = 64 << 10;

/// Copies up to `len` bytes from `offset` of one file to wherever `write`
/// puts them in `output`. Returns how many were written.
fn transfer(
    (input, offset): (&OpenFile, u64),
    output: &OpenFile,
    len: usize,
    mut write: impl FnMut(&mut Source<'_>, u64) -> Result<usize>,
) -> Result<u64> {
    let seekable = output.file.seekable();
    let mut buffer: Vec<u8> = alloc::vec![0; len.min(CHUNK)];
    let mut done = 0u64;
    while done < len as u64 {
        let step = buffer.len().min((len as u64 - done) as usize);
        let at = offset.checked_add(done).ok_or(Errno::EOVERFLOW)?;
        let moved = input.read_at(&mut Sink::kernel(&mut buffer[..step]), at).and_then(|count| {
            let mut source = Source::kernel(&buffer[..count]);
            if count == 0 {
                Ok((0, 0))
            } else {
                write(&mut source, done).map(|written| (count, written))
            }
        });
        match moved {
            Ok((_, 0)) => break,
            Ok((count, written)) => {
                done += written as u64;
                // A file that is full says so at the next attempt only.
                if written < count && !seekable {
                    break;
                }
            }
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
    }
    Ok(done)
}

/// Where a copy starts: at `*pointer`, or at the file's own position.
fn start_of(open: &OpenFile, pointer: UserAddress) -> Result<u64> {
    if pointer.is_null() {
        return Ok(open.position());
    }
    u64::try_from(pointer.read::<i64>()?).map_err(|_| Errno::EINVAL)
}

fn finish(open: &OpenFile, pointer: UserAddress, end: u64) -> Result<()> {
    if pointer.is_null() {
        open.set_position(end);
        return Ok(());
    }
    pointer.write(&end)
}

/// sendfile(2).
pub fn sendfile(output: Fd, input: Fd, offset: UserAddress, count: usize) -> Result<u64> {
    let input = input.usable_file()?;
    let output = output.usable_file()?;
    if !input.flags().can_read() || !output.flags().can_write() {
        return Err(Errno::EBADF);
    }
    if !input.file.seekable() {
        return Err(if offset.is_null() { Errno::EINVAL } else { Errno::ESPIPE });
    }
    if output.flags().contains(OpenFlags::APPEND) {
        return Err(Errno::EINVAL);
    }
    let start = start_of(&input, offset)?;
    let len = count.min(MAX_RW_COUNT);
    let count = transfer((&input, start), &output, len, |source, _| output.write(source))?;
    finish(&input, offset, start + count)?;
    Ok(count)
}

fn must_be_regular(open: &OpenFile) -> Result<()> {
    if open.downcast::<RegularFile>().is_some() {
        return Ok(());
    }
    let directory =
        open.path.as_ref().is_some_and(|path| path.inode().file_type() == FileType::Directory);
    Err(if directory { Errno::EISDIR } else { Errno::EINVAL })
}

/// copy_file_range(2).
pub fn copy_file_range(
    input: Fd,
    input_offset: UserAddress,
    output: Fd,
    output_offset: UserAddress,
    len: usize,
    Flags(flags): Flags,
) -> Result<u64> {
    let input = input.usable_file()?;
    let output = output.usable_file()?;
    if flags != 0 {
        return Err(Errno::EINVAL);
    }
    must_be_regular(&input)?;
    must_be_regular(&output)?;
    if !input.flags().can_read()
        || !output.flags().can_write()
        || output.flags().contains(OpenFlags::APPEND)
    {
        return Err(Errno::EBADF);
    }
    let from = start_of(&input, input_offset)?;
    let to = start_of(&output, output_offset)?;
    let len = len.min(MAX_RW_COUNT).min(input.file.size().saturating_sub(from) as usize);
    let len = writing::room(to, len as u64)? as usize;
    let same = match (input.downcast::<RegularFile>(), output.downcast::<RegularFile>()) {
        (Some(input), Some(output)) => alloc::sync::Arc::ptr_eq(input.node(), output.node()),
        _ => false,
    };
    let len_u64 = len as u64;
    if same && from < to.saturating_add(len_u64) && to < from.saturating_add(len_u64) {
        return Err(Errno::EINVAL);
    }
    let count = transfer((&input, from), &output, len, |source, done| {
        output.write_at(source, to.checked_add(done).ok_or(Errno::EFBIG)?)
    })?;
    finish(&input, input_offset, from + count)?;
    finish(&output, output_offset, to + count)?;
    Ok(count)
}
