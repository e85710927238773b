//! Reading files of the host through descriptors that the broker has opened.

use crate::errno::{Errno, Result};
use crate::io::Sink;
use crate::platform::machine::{HostFd, HostFiles, Machine};

/// Reads a blob at `offset`, at most `len` bytes.
pub fn read_blob(blob: u32, sink: &mut Sink<'_>, offset: u64, len: usize) -> Result<usize> {
    read_file(|| crate::host::blobs::descriptor(blob), sink, offset, len)
}

/// Reads a host file at `offset`, at most `len` bytes. Its descriptor is asked for
/// anew for each piece: storing one can map a page of another file, which may be
/// what closes it.
pub fn read_file(
    descriptor: impl Fn() -> Result<HostFd>,
    sink: &mut Sink<'_>,
    offset: u64,
    len: usize,
) -> Result<usize> {
    let mut done = 0;
    while done < len {
        let Some(mut piece) = sink.next_piece() else { break };
        let fd = match descriptor() {
            Ok(fd) => fd,
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        };
        let step = piece.len().min(len - done);
        match Machine::pread(fd, piece.first(step), offset + done as u64) {
            Ok(0) => break,
            Ok(count) => {
                sink.advance(count);
                done += count;
            }
            // The host does not run our fault handler, so a page that the
            // kernel would map on first touch looks unmapped to it.
            Err(Errno::EFAULT) => match read_bounced(fd, sink, offset + done as u64, step) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            },
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
    }
    Ok(done)
}

fn read_bounced(fd: HostFd, sink: &mut Sink<'_>, offset: u64, len: usize) -> Result<usize> {
    let mut buffer = [0u8; 2048];
    let step = len.min(buffer.len());
    let count = Machine::pread(fd, buffer[..step].as_mut().into(), offset)?;
    sink.put(&buffer[..count])
}
