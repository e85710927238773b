//! The host's mapping of an area.

use super::absent::end_of_file;
use super::backing::MmapSource;
use super::shm;
use super::vma::{Vma, VmaFlags};
use crate::errno::Result;
use crate::io::Sink;
use crate::platform::machine::{Machine, Memory, PROT_READ, PROT_WRITE, Sharing};
use crate::platform::memory::GuestRange;
use crate::platform::user::UserAddress;

/// Makes the host mapping of an area, and returns the end of what it has now. Pages behind
/// the end of an upper-layer file are left out: touching them must be a `SIGBUS`.
pub fn map_on_host(vma: &mut Vma) -> Result<u64> {
    let sharing =
        if vma.flags.contains(VmaFlags::SHARED) { Sharing::Shared } else { Sharing::Private };
    if shm::is_shared_anonymous(vma) {
        return shm::map(vma).map(|()| vma.end);
    }
    let Some(file) = vma.file.clone() else {
        vma.flags.remove(VmaFlags::FROM_IMAGE);
        return Machine::map_anonymous(vma.range()?, vma.prot, sharing).map(|()| vma.end);
    };
    match &file.source {
        MmapSource::Zero => {
            vma.file = None;
            Machine::map_anonymous(vma.range()?, vma.prot, sharing)?;
        }
        MmapSource::Blob(blob) => {
            let fd = crate::host::blobs::descriptor(*blob)?;
            Machine::map_file(fd, vma.range()?, vma.prot, sharing, vma.offset)?;
        }
        MmapSource::HostFile(file) => {
            let fd = file.descriptor()?;
            Machine::map_file(fd, vma.range()?, vma.prot, sharing, vma.offset)?;
        }
        MmapSource::Upper(upper) => {
            if sharing == Sharing::Shared {
                // Pages come in when they are touched.
                return Ok(vma.start);
            }
            let end = end_of_file(vma, upper.len());
            if end < vma.end {
                // What an earlier mapping has there is behind the end of its file by now.
                Machine::unmap(GuestRange::new(end, vma.end - end)?)?;
            }
            if end == vma.start {
                return Ok(end);
            }
            let len = end - vma.start;
            let range = GuestRange::new(vma.start, len)?;
            Machine::map_anonymous(range, PROT_READ | PROT_WRITE, Sharing::Private)?;
            let mut sink = Sink::user(UserAddress(vma.start), len as usize)?;
            let mut at = vma.offset;
            while sink.remaining() > 0 {
                match upper.read_at(&mut sink, at)? {
                    0 => break,
                    count => at += count as u64,
                }
            }
            Machine::protect(range, vma.prot)?;
            return Ok(end);
        }
    }
    Ok(vma.end)
}
