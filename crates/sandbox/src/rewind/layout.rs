//! What a process has mapped where (`/proc/PID/maps`, proc_pid_maps(5)), by its meaning: the
//! host merges and splits mappings as it likes.

use std::io;
use std::ops::Range;

use thaw_abi::PAGE_SIZE;

/// The end of what programs can map (`TASK_SIZE_MAX` of Linux).
const ADDRESS_MAX: u64 = (1 << 47) - PAGE_SIZE;
/// Most bytes between two mappings that are looked at together.
const GAP_MAX: u64 = 1 << 30;

/// What stands behind a mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Memory that begins as zeros.
    Anonymous,
    /// A file.
    File {
        /// Its device, as `major:minor`.
        device: (u32, u32),
        /// Its number there.
        inode: u64,
    },
    /// What the host has put there: stack, vdso and such.
    Host(String),
}

/// A range of mapped memory that is the same everywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    pub start: u64,
    pub end: u64,
    pub access: Access,
    /// Of its first byte in the file; 0 without one.
    pub offset: u64,
    pub backing: Backing,
}

/// What a process may do there: `PROT_*` of mmap(2), and whether others see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    pub protection: u32,
    pub shared: bool,
}

impl Region {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.splitn(6, ' ');
        let (start, end) = fields.next()?.split_once('-')?;
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let access = Access::parse(fields.next()?)?;
        let offset = hex(fields.next()?)?;
        let (major, minor) = fields.next()?.split_once(':')?;
        let inode = fields.next()?.parse().ok()?;
        let name = fields.next().unwrap_or_default().trim();
        let backing = match (inode, name) {
            (0, "") => Backing::Anonymous,
            (0, name) => Backing::Host(name.to_owned()),
            (inode, _) => {
                let device = (hex(major)? as u32, hex(minor)? as u32);
                Backing::File { device, inode }
            }
        };
        let offset = if matches!(backing, Backing::File { .. }) { offset } else { 0 };
        Some(Self { start: hex(start)?, end: hex(end)?, access, offset, backing })
    }

    /// The one at `page`, within it.
    pub fn page(&self, page: u64) -> Self {
        self.from(page).until(page + PAGE_SIZE)
    }

    /// The part of it that begins at `start`, within it.
    fn from(&self, start: u64) -> Self {
        let offset = match self.backing {
            Backing::File { .. } => self.offset + (start - self.start),
            _ => 0,
        };
        Self { start, offset, ..self.clone() }
    }

    fn until(self, end: u64) -> Self {
        Self { end, ..self }
    }

    /// Whether `next` goes on where this ends, with the same.
    fn goes_on_in(&self, next: &Self) -> bool {
        self.end == next.start
            && self.access == next.access
            && self.from(self.end).offset == next.offset
            && self.backing == next.backing
    }

    /// Whether another range, of the same addresses, has the same content.
    fn has_content_of(&self, other: &Self) -> bool {
        let shared = (self.access.shared, other.access.shared);
        (self.offset, &self.backing) == (other.offset, &other.backing) && shared.0 == shared.1
    }
}

impl Access {
    fn parse(text: &str) -> Option<Self> {
        let bytes: [u8; 4] = text.as_bytes().try_into().ok()?;
        let bit = |at: usize, letter: u8, bit: i32| match bytes[at] {
            b'-' => Some(0),
            found if found == letter => Some(bit as u32),
            _ => None,
        };
        let protection = bit(0, b'r', libc::PROT_READ)?
            | bit(1, b'w', libc::PROT_WRITE)?
            | bit(2, b'x', libc::PROT_EXEC)?;
        Some(Self { protection, shared: bytes[3] == b's' })
    }
}

/// All that a process has mapped, sorted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout(Vec<Region>);

/// What makes one layout of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Repair {
    Unmap { start: u64, end: u64 },
    Protect { start: u64, end: u64, protection: u32 },
    Map(Region),
}

impl Layout {
    /// Reads the text of `/proc/PID/maps`.
    ///
    /// # Errors
    /// It is none.
    pub fn parse(text: &str) -> io::Result<Self> {
        let mut regions: Vec<Region> = Vec::new();
        for line in text.lines() {
            let region = Region::parse(line).ok_or(io::ErrorKind::InvalidData)?;
            match regions.last_mut() {
                Some(last) if last.goes_on_in(&region) => last.end = region.end,
                _ => regions.push(region),
            }
        }
        Ok(Self(regions))
    }

    /// The same of text as it was read.
    ///
    /// # Errors
    /// It is none.
    pub fn parse_bytes(text: &[u8]) -> io::Result<Self> {
        Self::parse(std::str::from_utf8(text).map_err(|_| io::ErrorKind::InvalidData)?)
    }

    pub fn regions(&self) -> &[Region] {
        &self.0
    }

    /// Ranges that hold all that is mapped, and no large gaps.
    pub fn spans(&self) -> Vec<Range<u64>> {
        let mut spans: Vec<Range<u64>> = Vec::new();
        for region in self.0.iter().filter(|region| region.end <= ADDRESS_MAX) {
            match spans.last_mut() {
                Some(last) if region.start - last.end <= GAP_MAX => last.end = region.end,
                _ => spans.push(region.start..region.end),
            }
        }
        spans
    }

    /// The region that holds an address.
    pub fn at(&self, address: u64) -> Option<&Region> {
        let at = self.0.partition_point(|region| region.end <= address);
        self.0.get(at).filter(|region| region.start <= address)
    }

    /// What makes this layout of `other`, by address.
    pub fn repairs_of(&self, other: &Self) -> Vec<Repair> {
        let mut repairs = Vec::new();
        let mut at = 0;
        while let Some((end, wanted, found)) = self.next_part(other, at) {
            match (wanted, found) {
                (None, None) => {}
                (Some(wanted), Some(found)) if wanted == found => {}
                (Some(wanted), Some(found)) if wanted.has_content_of(&found) => {
                    let (start, protection) = (wanted.start, wanted.access.protection);
                    push(&mut repairs, Repair::Protect { start, end, protection });
                }
                (wanted, found) => {
                    if let Some(Region { start, .. }) = found {
                        push(&mut repairs, Repair::Unmap { start, end });
                    }
                    if let Some(wanted) = wanted {
                        push(&mut repairs, Repair::Map(wanted));
                    }
                }
            }
            at = end;
        }
        // What is unmapped is out of the way before anything is mapped.
        repairs.sort_by_key(|repair| matches!(repair, Repair::Map(_)));
        repairs
    }

    /// The end of the part from `at` on that is the same throughout in both, and what each
    /// has there; `None`: neither has anything from there on.
    fn next_part(&self, other: &Self, at: u64) -> Option<(u64, Option<Region>, Option<Region>)> {
        let (mine, theirs) = (self.part(at), other.part(at));
        let end = mine.1.min(theirs.1);
        if end == u64::MAX {
            return None;
        }
        let cut = |region: Option<Region>| region.map(|region| region.until(end));
        Some((end, cut(mine.0), cut(theirs.0)))
    }

    /// What is there from `at` on, and where that ends.
    fn part(&self, at: u64) -> (Option<Region>, u64) {
        let next = self.0.partition_point(|region| region.end <= at);
        match self.0.get(next) {
            None => (None, u64::MAX),
            Some(region) if region.start > at => (None, region.start),
            Some(region) => (Some(region.from(at)), region.end),
        }
    }
}

/// Adds a repair, to the one before it if that is of the same kind.
fn push(repairs: &mut Vec<Repair>, repair: Repair) {
    // The last but one may be the mapping that the last, an unmapping, is for.
    match (repairs.last_mut(), &repair) {
        (Some(Repair::Unmap { end, .. }), Repair::Unmap { start, end: further })
            if end == start =>
        {
            *end = *further;
        }
        (
            Some(Repair::Protect { end, protection, .. }),
            Repair::Protect { start, end: further, protection: other },
        ) if end == start && protection == other => *end = *further,
        (Some(Repair::Map(last)), Repair::Map(next)) if last.goes_on_in(next) => {
            last.end = next.end
        }
        _ => repairs.push(repair),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
00010000-000a0000 r-xp 00001000 fd:01 77                 /memfd:x (deleted)
000a0000-000b0000 r-xp 00091000 fd:01 77                 /memfd:x (deleted)
000b0000-000c0000 rw-p 000a1000 fd:01 77                 /memfd:x (deleted)
7e1000000000-7e1000100000 rw-p 00000000 00:00 0
7ffff7fc0000-7ffff7fc2000 r-xp 00000000 00:00 0          [vdso]
";

    fn layout(text: &str) -> Layout {
        Layout::parse(text).unwrap()
    }

    #[test]
    fn neighbours_that_are_the_same_are_one() {
        let layout = layout(MAPS);
        assert_eq!(layout.regions().len(), 4);
        let first = &layout.regions()[0];
        assert_eq!((first.start, first.end, first.offset), (0x10000, 0xb0000, 0x1000));
        assert_eq!(layout.at(0xaffff), Some(first));
        assert_eq!(layout.at(0xc0000), None);
        assert_eq!(layout.regions()[3].backing, Backing::Host("[vdso]".to_owned()));
    }

    #[test]
    fn what_is_no_map_is_refused() {
        for text in ["x", "1-2 rw", "1-2 rwzp 0 0:0 0", "1-2 rw-p 0 00 0", "1-2 rw-p 0 0:0 x"] {
            assert!(Layout::parse(text).is_err(), "{text}");
        }
    }

    /// Does what the repairs say to a map of pages.
    fn repaired(mut pages: Vec<Region>, repairs: &[Repair]) -> Layout {
        for repair in repairs {
            let (start, end) = match repair {
                Repair::Unmap { start, end } | Repair::Protect { start, end, .. } => (*start, *end),
                Repair::Map(region) => (region.start, region.end),
            };
            let within = |page: &Region| page.start >= start && page.end <= end;
            match repair {
                Repair::Unmap { .. } => pages.retain(|page| !within(page)),
                Repair::Protect { protection, .. } => {
                    let inside = pages.iter_mut().filter(|page| within(page));
                    inside.for_each(|page| page.access.protection = *protection);
                }
                Repair::Map(region) => {
                    assert!(!pages.iter().any(within), "mapped over something");
                    pages.extend(pages_of(region));
                }
            }
        }
        pages.sort_by_key(|page| page.start);
        let mut merged: Vec<Region> = Vec::new();
        for page in pages {
            match merged.last_mut() {
                Some(last) if last.goes_on_in(&page) => last.end = page.end,
                _ => merged.push(page),
            }
        }
        Layout(merged)
    }

    fn pages_of(region: &Region) -> Vec<Region> {
        let starts = (region.start..region.end).step_by(4096);
        starts.map(|start| region.from(start).until(start + 4096)).collect()
    }

    #[test]
    fn repairs_make_one_layout_of_any_other() {
        let wanted = layout(MAPS);
        let others = [
            "",
            "00010000-000c0000 rw-p 00001000 fd:01 77 x\n",
            "00010000-000b0000 r-xp 00002000 fd:01 77 x\n000b0000-000c0000 rw-p 000a1000 fd:01 78 x\n",
            "00008000-000a8000 rwxp 00000000 00:00 0\n7e1000080000-7e1000200000 ---p 00000000 00:00 0\n",
            "7e0fffff0000-7e1000100000 rw-s 00000000 00:00 0\n7f0000000000-7f0000001000 r--p 0 00:00 0\n",
        ];
        for other in others.map(layout) {
            let pages = other.regions().iter().flat_map(pages_of).collect();
            assert_eq!(repaired(pages, &wanted.repairs_of(&other)), wanted, "{other:x?}");
            let pages = wanted.regions().iter().flat_map(pages_of).collect();
            assert_eq!(repaired(pages, &other.repairs_of(&wanted)), other);
        }
        assert_eq!(wanted.repairs_of(&wanted), []);
    }

    #[test]
    fn what_differs_in_protection_only_is_not_mapped_anew() {
        let wanted = layout("1000-3000 r--p 0 00:00 0\n3000-5000 rw-p 0 00:00 0\n");
        let other = layout("1000-4000 rw-p 0 00:00 0\n4000-5000 ---p 0 00:00 0\n");
        let (read, write) = (libc::PROT_READ as u32, libc::PROT_WRITE as u32);
        assert_eq!(
            wanted.repairs_of(&other),
            [
                Repair::Protect { start: 0x1000, end: 0x3000, protection: read },
                Repair::Protect { start: 0x4000, end: 0x5000, protection: read | write },
            ]
        );
    }
}
