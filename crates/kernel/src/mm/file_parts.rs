//! Parts of files of volumes that are mapped to be read and written.
//!
//! No host call writes to a file: the kernel copies to a mapping of it, which cannot make it
//! longer ([decisions/0041](../../../../docs/decisions/0041-volumes.md)). What is read often is
//! copied from there, too, which takes no host call. Each host process has
//! a table of the parts that it has mapped, which a fork copies together with the mappings.
#![allow(unsafe_code)]

use core::ops::Range as Span;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use thaw_abi::layout::{VOLUME_PART, VOLUME_PARTS as COUNT, VOLUMES_BASE};

use crate::errno::{Errno, Result};
use crate::io::{Sink, Source};
use crate::platform::boot_area::{MappedPart, PagesAhead, VOLUME_PARTS};
use crate::platform::machine::{HostFd, Machine, Memory, PROT_READ, PROT_WRITE, Populate, Sharing};
use crate::platform::memory::KernelRange;

const PAGE: u64 = 4096;
/// Bytes whose pages are made at once, at least: the host needs about as long for fewer, fault by fault.
const MADE_MIN: u64 = 16 << 10;
/// Bytes behind a write whose pages are made, at most.
const AHEAD_MAX: u64 = 1 << 20;
/// Which part of the bytes that writes have added one after the other is made ahead: as much may be
/// made in vain.
const AHEAD_PART: u64 = 8;

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

    /// Makes pages at once that a write of `bytes`, which lie behind the end of the file, is about to
    /// fill; and some more behind them, of the bytes before `limit` that the file may have, if such
    /// writes follow each other. Otherwise the host makes each when it is touched, which takes longer.
    pub fn make_pages(self, bytes: Span<u64>, limit: u64) {
        if bytes.is_empty() {
            return;
        }
        let Ok(place) = self.map(bytes.start / VOLUME_PART) else { return };
        let places = VOLUME_PARTS.cells(COUNT);
        let known = places[place].get();
        let end_of_part = known.part.saturating_add(1).saturating_mul(VOLUME_PART);
        let (ahead, pages) = next_ahead(known.ahead, bytes, limit.min(end_of_part));
        places[place].set(MappedPart { ahead, ..known });
        if !pages.is_empty() {
            let at = address(place) + pages.start % VOLUME_PART;
            // It is advice: where there is no room, the write hears of it.
            let _ = Machine::populate(at, pages.end - pages.start, Populate::Write);
        }
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
        let base = address(self.map(part)?) + within;
        Ok((base, len.min(VOLUME_PART - within) as usize))
    }

    /// The place where a part of the file is mapped; maps it in that of the one that was not used for
    /// longest.
    fn map(self, part: u64) -> Result<usize> {
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
        let ahead = places[place].get().ahead;
        places[place].set(MappedPart { file: self.number, part, used, ahead });
        Ok(place)
    }
}

/// What is known after a write of `bytes`, and the pages that are to be made before it, by their first
/// and last bytes.
fn next_ahead(known: PagesAhead, bytes: Span<u64>, limit: u64) -> (PagesAhead, Span<u64>) {
    let PagesAhead { from, to } = known;
    // Where the file was made shorter meanwhile, its pages are gone.
    let follows = (from..=to).contains(&bytes.start) && to - bytes.start <= AHEAD_MAX + PAGE;
    let (from, to) = if follows { (from, to) } else { (bytes.start, bytes.start) };
    let end = bytes.end.min(limit);
    if end <= to {
        return (PagesAhead { from, to }, 0..0);
    }
    let more = ((bytes.start - from) / AHEAD_PART).min(AHEAD_MAX);
    let pages =
        to.next_multiple_of(PAGE)..end.saturating_add(more).min(limit).next_multiple_of(PAGE);
    match pages.end.saturating_sub(pages.start) {
        MADE_MIN.. => (PagesAhead { from, to: pages.end }, pages),
        _ => (PagesAhead { from, to: end }, 0..0),
    }
}

fn address(place: usize) -> u64 {
    VOLUMES_BASE + place as u64 * VOLUME_PART
}

fn range(place: usize) -> KernelRange {
    // SAFETY: the area is this module's alone, which keeps no reference into it.
    unsafe { KernelRange::new(address(place), VOLUME_PART) }
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

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Writes pieces one after the other, and returns bytes that were made, and calls.
    fn write(known: &mut PagesAhead, bytes: Span<u64>, piece: u64, granted: u64) -> (u64, u64) {
        let (mut made, mut calls) = (0, 0);
        for at in bytes.step_by(piece as usize) {
            let (next, pages) = next_ahead(*known, at..at + piece, granted);
            *known = next;
            assert!(pages.end <= granted.next_multiple_of(PAGE));
            made += pages.end - pages.start;
            calls += u64::from(!pages.is_empty());
        }
        (made, calls)
    }

    #[test]
    fn a_long_write_has_its_pages_made_at_once_and_no_more() {
        let (known, pages) = next_ahead(PagesAhead::default(), 100..MIB, 2 * MIB);
        assert_eq!((known, pages), (PagesAhead { from: 100, to: MIB }, PAGE..MIB));
        // Up to where the file may be written.
        let (_, pages) = next_ahead(PagesAhead::default(), 0..MIB, MIB / 2 + 1);
        assert_eq!(pages, 0..MIB / 2 + PAGE);
        assert_eq!(next_ahead(PagesAhead::default(), MIB..2 * MIB, 10).1, 0..0);
    }

    #[test]
    fn short_writes_have_pages_made_when_many_have_followed_each_other() {
        let mut known = PagesAhead::default();
        assert_eq!(write(&mut known, 0..64 << 10, 4096, MIB), (0, 0));
        let (made, calls) = write(&mut known, 64 << 10..16 * MIB, 4096, 20 * MIB);
        // An eighth may be made in vain.
        assert!((14 * MIB..18 * MIB).contains(&made), "{made}");
        assert!(calls < 64, "{calls}");
        assert_eq!(known.from, 0);
        // Elsewhere nothing is known.
        assert_eq!(next_ahead(known, 30 * MIB..30 * MIB + PAGE, 40 * MIB).1, 0..0);
    }

    #[test]
    fn pages_of_a_file_that_was_made_shorter_are_made_again() {
        let mut known = PagesAhead::default();
        write(&mut known, 0..16 * MIB, 4096, 20 * MIB);
        let (known, pages) = next_ahead(known, MIB..2 * MIB, 20 * MIB);
        assert_eq!((known.from, pages), (MIB, MIB..2 * MIB));
    }
}
