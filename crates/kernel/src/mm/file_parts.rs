//! Parts of files of volumes that are mapped to be read and written.
//!
//! No host call writes to a file: the kernel copies to a mapping of it, which cannot make it
//! longer ([decisions/0041](../../../../docs/decisions/0041-volumes.md)). What is read often is
//! copied from there, too, which takes no host call. Each host process has
//! a table of the parts that it has mapped, which a fork copies together with the mappings.
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use thaw_abi::layout::{VOLUME_PART, VOLUME_PARTS as COUNT, VOLUMES_BASE};

use crate::errno::{Errno, Result};
use crate::io::{Sink, Source};
use crate::platform::boot_area::{MappedPart, VOLUME_PARTS};
use crate::platform::machine::{HostFd, Machine, Memory, PROT_READ, PROT_WRITE, Sharing};
use crate::platform::memory::KernelRange;

/// Counts uses.
static CLOCK: AtomicU64 = AtomicU64::new(0);
/// Number of the last file that was opened.
static LAST_FILE: AtomicU64 = AtomicU64::new(0);

/// A number for an open file that no other one of this boot has or gets.
pub fn new_number() -> u64 {
    LAST_FILE.fetch_add(1, Relaxed) + 1
}

/// An open file of a volume, whose parts are mapped.
#[derive(Clone, Copy)]
pub struct Parts {
    /// Its number ([`new_number`]).
    pub number: u64,
    /// The file.
    pub fd: i32,
    /// Whether it is open to be written.
    pub is_writable: bool,
}

/// Why a part of a file could not be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// The memory that the bytes come from is not there.
    Source,
    /// The file does not have these bytes any more, or its disk has no room for them.
    File,
    /// The host cannot map the file.
    Host(Errno),
}

impl Parts {
    /// Writes at `offset`, from where on the file has `room` bytes; fewer than `source` has where a copy
    /// faults. Maps no page of another file.
    ///
    /// # Errors
    /// No byte could be written.
    pub fn write(
        self,
        source: &mut Source<'_>,
        offset: u64,
        room: u64,
    ) -> core::result::Result<usize, Lost> {
        let len = room.min(source.remaining() as u64);
        let mut done = 0;
        while done < len {
            match self.write_in_part(source, offset + done, len - done) {
                Ok(count) => done += count as u64,
                Err(lost) if done == 0 => return Err(lost),
                Err(_) => break,
            }
        }
        Ok(done as usize)
    }

    fn write_in_part(
        self,
        source: &mut Source<'_>,
        offset: u64,
        len: u64,
    ) -> core::result::Result<usize, Lost> {
        let (base, len) = self.mapped(offset, len).map_err(Lost::Host)?;
        // SAFETY: the place is this module's alone; nobody has a reference into it, and a fault of
        // the copy is caught.
        match unsafe { source.copy_present_to(base as *mut u8, len) } {
            0 if !source.next_is_present() => Err(Lost::Source),
            0 => Err(Lost::File),
            copied => Ok(copied),
        }
    }

    /// Reads at `offset` at most `len` bytes, which the file has; fewer where a part ends, and where a
    /// copy faults or has to map a page of another file.
    pub fn read(self, sink: &mut Sink<'_>, offset: u64, len: u64) -> usize {
        match self.mapped(offset, len.min(sink.remaining() as u64)) {
            // SAFETY: as in `write`.
            Ok((base, len)) => unsafe { sink.copy_present_from(base as *const u8, len) },
            Err(_) => 0,
        }
    }

    /// Where the bytes from `offset` on are mapped, of `len` those that are in the same part.
    fn mapped(self, offset: u64, len: u64) -> Result<(u64, usize)> {
        let (part, within) = (offset / VOLUME_PART, offset % VOLUME_PART);
        let base = self.map(part)? + within;
        Ok((base, len.min(VOLUME_PART - within) as usize))
    }

    /// Where a part of the file is mapped; maps it in the place of the one that was not used for
    /// longest.
    fn map(self, part: u64) -> Result<u64> {
        let places = VOLUME_PARTS.cells(COUNT);
        let used = CLOCK.fetch_add(1, Relaxed) + 1;
        let is_it = |known: MappedPart| known.file == self.number && known.part == part;
        let found = places.iter().position(|place| is_it(place.get()));
        let place = match found {
            Some(place) => place,
            None => {
                let oldest = (0..COUNT).min_by_key(|&place| places[place].get().used);
                let place = oldest.unwrap_or_default();
                places[place].set(MappedPart::default());
                let at = part.checked_mul(VOLUME_PART).ok_or(Errno::EFBIG)?;
                let access = if self.is_writable { PROT_READ | PROT_WRITE } else { PROT_READ };
                let fd = HostFd::new(self.fd);
                Machine::map_file(fd, range(place), access, Sharing::Shared, at)?;
                place
            }
        };
        places[place].set(MappedPart { file: self.number, part, used });
        Ok(VOLUMES_BASE + place as u64 * VOLUME_PART)
    }
}

fn range(place: usize) -> KernelRange {
    // SAFETY: the area is this module's alone, which keeps no reference into it.
    unsafe { KernelRange::new(VOLUMES_BASE + place as u64 * VOLUME_PART, VOLUME_PART) }
}

/// Unmaps all parts of this host process.
pub fn forget() {
    forget_where(|file| file != 0);
}

/// Unmaps the parts of an open file that this host process has: as long as there are any, the file is
/// open to be written on the host.
pub fn forget_file(number: u64) {
    forget_where(|file| file == number);
}

fn forget_where(is_it: impl Fn(u64) -> bool) {
    for (number, place) in VOLUME_PARTS.cells(COUNT).iter().enumerate() {
        if is_it(place.get().file) {
            place.set(MappedPart::default());
            // What is not there needs not to be unmapped.
            let _ = Machine::unmap(range(number));
        }
    }
}
