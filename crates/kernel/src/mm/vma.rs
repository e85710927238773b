//! Virtual memory areas: what the guest has mapped where.
//!
//! This module is pure book-keeping: a sorted map of areas that do not overlap,
//! with splitting and merging. [`super::space`] makes the host follow.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use bitflags::bitflags;
use thaw_abi::layout::{GUEST_MAX, GUEST_MIN};

use super::backing::{FileBacking, MmapSource, UpperPages};
use crate::errno::{Errno, Result};
use crate::platform::memory::GuestRange;

bitflags! {
    /// Properties of an area.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct VmaFlags: u32 {
        /// `MAP_SHARED`.
        const SHARED = 1 << 0;
        /// The main thread's stack.
        const STACK = 1 << 1;
        /// The heap that `brk` moves.
        const HEAP = 1 << 2;
        /// `MADV_WIPEONFORK`.
        const WIPE_ON_FORK = 1 << 3;
        /// `MADV_DONTFORK`.
        const DONT_FORK = 1 << 4;
        /// Anonymous for the guest, but mapped from an image on the host:
        /// dropping its pages must not bring the image's content back.
        const FROM_IMAGE = 1 << 5;
        /// The kernel's vdso.
        const VDSO = 1 << 6;
        /// Locked (mlock(2)).
        const LOCKED = 1 << 7;
    }
}

/// A range of pages with the same properties.
#[derive(Clone)]
pub struct Vma {
    /// First byte.
    pub start: u64,
    /// End.
    pub end: u64,
    /// `PROT_*`.
    pub prot: u32,
    /// Properties.
    pub flags: VmaFlags,
    /// The file, or `None` for anonymous memory.
    pub file: Option<Arc<FileBacking>>,
    /// Offset in the file of the first byte.
    pub offset: u64,
}

impl Vma {
    /// Bytes.
    pub fn len(&self) -> u64 {
        self.end - self.start
    }

    /// The part of it that lies in a range, which overlaps it.
    pub fn part(&self, start: u64, end: u64) -> Vma {
        let (start, end) = (self.start.max(start), self.end.min(end));
        Vma { start, end, offset: self.offset + (start - self.start), ..self.clone() }
    }

    /// The area for a host call.
    ///
    /// # Errors
    /// `EINVAL` if it is not the guest's, which no area of a [`VmaMap`] is.
    pub fn range(&self) -> Result<GuestRange> {
        GuestRange::new(self.start, self.len())
    }

    /// Never: areas are not empty.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// The file of a mapping of the upper layer.
    pub fn upper(&self) -> Option<&Arc<dyn UpperPages>> {
        match self.file.as_deref() {
            Some(FileBacking { source: MmapSource::Upper(file), .. }) => Some(file),
            _ => None,
        }
    }

    /// The file of a shared mapping of the upper layer, whose pages come and go
    /// ([`super::shared`]).
    pub fn shared_upper(&self) -> Option<&Arc<dyn UpperPages>> {
        self.upper().filter(|_| self.flags.contains(VmaFlags::SHARED))
    }

    fn can_merge_with(&self, next: &Vma) -> bool {
        self.flags == next.flags && self.goes_on_in(next)
    }

    /// Whether an area is the rest of this one as a program sees them: they differ in nothing but where the
    /// host has their pages from.
    pub fn goes_on_in(&self, next: &Vma) -> bool {
        self.end == next.start
            && self.prot == next.prot
            && (self.flags ^ next.flags).difference(VmaFlags::FROM_IMAGE).is_empty()
            && !self.flags.contains(VmaFlags::SHARED)
            && match (&self.file, &next.file) {
                (None, None) => true,
                (Some(a), Some(b)) => Arc::ptr_eq(a, b) && self.offset + self.len() == next.offset,
                _ => false,
            }
    }
}

/// Most areas of an address space. Linux has `vm.max_map_count`, 65,530, for each process, and the kernel
/// of the sandbox needs some mappings of those of the host process.
pub const AREAS_MAX: usize = 64_000;

/// The areas of an address space, by address.
#[derive(Default, Clone)]
pub struct VmaMap {
    areas: BTreeMap<u64, Vma>,
    /// A range without a free page, where the search for one need not look.
    full: Range<u64>,
}

impl VmaMap {
    /// A map without areas.
    pub const fn empty() -> Self {
        Self { areas: BTreeMap::new(), full: 0..0 }
    }

    /// How many areas there are once a range was cut out.
    fn len_without(&self, start: u64, end: u64) -> usize {
        let is_whole = |vma: &&Vma| start <= vma.start && vma.end <= end;
        let whole = self.overlapping(start, end).filter(is_whole).count();
        let splits = self.find(start).is_some_and(|vma| vma.start < start && end < vma.end);
        self.areas.len() - whole + usize::from(splits)
    }

    /// `ENOMEM` if there would be too many areas with `added` ones in place of what is in a range.
    pub fn check_count(&self, start: u64, end: u64, added: usize) -> Result<()> {
        let is_too_much = self.len_without(start, end) + added > AREAS_MAX;
        if is_too_much { Err(Errno::ENOMEM) } else { Ok(()) }
    }

    /// The same for a change of what is in a range: parts of areas become areas of their own.
    pub fn check_change(&self, start: u64, end: u64) -> Result<()> {
        let is_within = |at| self.find(at).is_some_and(|vma| vma.start != at);
        let added = usize::from(is_within(start)) + usize::from(is_within(end));
        let is_too_much = added > 0 && self.areas.len() + added > AREAS_MAX;
        if is_too_much { Err(Errno::ENOMEM) } else { Ok(()) }
    }

    /// The area that contains `address`.
    pub fn find(&self, address: u64) -> Option<&Vma> {
        self.areas.range(..=address).next_back().map(|(_, vma)| vma).filter(|vma| address < vma.end)
    }

    /// All areas in order.
    pub fn iter(&self) -> impl Iterator<Item = &Vma> {
        self.areas.values()
    }

    /// The areas that overlap a range, in order.
    pub fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = &Vma> {
        let first = self.find(start).map_or(start, |vma| vma.start);
        self.areas.range(first..end.max(first)).map(|(_, vma)| vma)
    }

    /// Whether every page of a range is in some area.
    pub fn covers(&self, start: u64, end: u64) -> bool {
        self.covered_end(start, end) == end
    }

    /// Where the first hole of a range begins; `end` if there is none.
    pub fn covered_end(&self, start: u64, end: u64) -> u64 {
        let mut at = start;
        for vma in self.overlapping(start, end) {
            if vma.start > at {
                break;
            }
            at = vma.end;
        }
        at.min(end)
    }

    /// The areas of a range, cut to it, if a program sees them as a part of one.
    pub fn within_one(&self, start: u64, end: u64) -> Option<Vec<Vma>> {
        let parts: Vec<Vma> =
            self.overlapping(start, end).map(|vma| vma.part(start, end)).collect();
        let is_one = parts.windows(2).all(|pair| pair[0].goes_on_in(&pair[1]));
        let covers = parts.first()?.start == start && parts.last()?.end == end;
        (is_one && covers).then_some(parts)
    }

    /// Adds an area to a free range, merging it with its neighbours.
    pub fn insert(&mut self, mut vma: Vma) {
        self.note_full(vma.start, vma.end);
        if let Some((&start, before)) = self.areas.range(..vma.start).next_back()
            && before.can_merge_with(&vma)
        {
            let before_offset = before.offset;
            vma.start = start;
            vma.offset = before_offset;
            self.areas.remove(&start);
        }
        if let Some(after) = self.areas.get(&vma.end)
            && vma.can_merge_with(after)
        {
            let after_start = vma.end;
            vma.end = after.end;
            self.areas.remove(&after_start);
        }
        self.areas.insert(vma.start, vma);
    }

    fn note_full(&mut self, start: u64, end: u64) {
        if end == self.full.start {
            self.full.start = start;
        } else if start == self.full.end {
            self.full.end = end;
        }
    }

    /// Of the full range only the larger part beside what becomes free goes on.
    fn note_free(&mut self, start: u64, end: u64) {
        if start < self.full.end && self.full.start < end {
            let below = self.full.start..start.max(self.full.start);
            let above = end.min(self.full.end)..self.full.end;
            let len = |range: &Range<u64>| range.end - range.start;
            self.full = if len(&below) > len(&above) { below } else { above };
        }
    }

    /// Splits areas so that `at` is a boundary.
    fn split(&mut self, at: u64) {
        let Some(vma) = self.find(at) else { return };
        if vma.start == at {
            return;
        }
        let mut upper = vma.clone();
        let start = vma.start;
        upper.offset += at - start;
        upper.start = at;
        self.areas.insert(at, upper);
        if let Some(lower) = self.areas.get_mut(&start) {
            lower.end = at;
        }
    }

    /// Removes a range and returns what was there.
    pub fn remove(&mut self, start: u64, end: u64) -> Vec<Vma> {
        self.note_free(start, end);
        self.take(start, end)
    }

    fn take(&mut self, start: u64, end: u64) -> Vec<Vma> {
        self.split(start);
        self.split(end);
        let keys: Vec<u64> = self.areas.range(start..end).map(|(&key, _)| key).collect();
        keys.iter().filter_map(|key| self.areas.remove(key)).collect()
    }

    /// Changes the areas of a range, splitting and merging as needed.
    pub fn update(&mut self, start: u64, end: u64, mut change: impl FnMut(&mut Vma)) {
        for mut vma in self.take(start, end) {
            change(&mut vma);
            self.insert(vma);
        }
        // The first area after the range may have become mergeable.
        if let Some(vma) = self.areas.remove(&end) {
            self.insert(vma);
        }
    }

    /// The highest free range of `len` bytes below `ceiling`.
    pub fn find_free_below(&mut self, ceiling: u64, len: u64) -> Option<u64> {
        let mut end = ceiling.min(GUEST_MAX);
        loop {
            end = self.skip_full(end);
            let below = self.areas.range(..end).next_back().map_or(GUEST_MIN, |(_, vma)| vma.end);
            if end >= below && end - below >= len {
                return Some(end - len);
            }
            if below <= GUEST_MIN {
                return None;
            }
            end = below;
        }
    }

    /// Where the areas begin that follow each other without a free page up to `end`. The longest such range
    /// is remembered.
    fn skip_full(&mut self, end: u64) -> u64 {
        let mut at = end;
        loop {
            if self.full.start < at && at <= self.full.end {
                at = self.full.start;
            }
            match self.areas.range(..at).next_back() {
                Some((_, vma)) if vma.end >= at => at = vma.start,
                _ => break,
            }
        }
        if end - at > self.full.end - self.full.start {
            self.full = at..end;
        }
        at
    }

    /// Whether no area overlaps a range.
    pub fn is_free(&self, start: u64, end: u64) -> bool {
        self.overlapping(start, end).next().is_none()
    }

    /// Bytes of all areas.
    pub fn total(&self) -> u64 {
        self.iter().map(Vma::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn anonymous(start: u64, end: u64, prot: u32) -> Vma {
        Vma { start, end, prot, flags: VmaFlags::empty(), file: None, offset: 0 }
    }

    fn ranges(map: &VmaMap) -> Vec<(u64, u64, u32)> {
        map.iter().map(|v| (v.start, v.end, v.prot)).collect()
    }

    const BASE: u64 = 0x10_0000;

    #[test]
    fn neighbours_merge_and_split() {
        let mut map = VmaMap::default();
        map.insert(anonymous(BASE, BASE + 0x1000, 3));
        map.insert(anonymous(BASE + 0x2000, BASE + 0x3000, 3));
        map.insert(anonymous(BASE + 0x1000, BASE + 0x2000, 3));
        assert_eq!(ranges(&map), [(BASE, BASE + 0x3000, 3)]);
        map.update(BASE + 0x1000, BASE + 0x2000, |v| v.prot = 1);
        assert_eq!(map.iter().count(), 3);
        map.update(BASE + 0x1000, BASE + 0x2000, |v| v.prot = 3);
        assert_eq!(ranges(&map), [(BASE, BASE + 0x3000, 3)]);
        let removed = map.remove(BASE + 0x1000, BASE + 0x2000);
        assert_eq!(removed.len(), 1);
        assert!(map.find(BASE + 0x1000).is_none());
        assert!(!map.covers(BASE, BASE + 0x3000));
        assert!(map.covers(BASE + 0x2000, BASE + 0x3000));
    }

    #[test]
    fn file_offsets_follow_a_split() {
        let file = Arc::new(FileBacking {
            source: MmapSource::Blob(1),
            path: Arc::from(&b"/x"[..]),
            device: 1,
            inode: 2,
            writable: false,
            holder: None,
        });
        let mut map = VmaMap::default();
        map.insert(Vma { file: Some(file), offset: 0x4000, ..anonymous(BASE, BASE + 0x4000, 1) });
        map.update(BASE + 0x1000, BASE + 0x2000, |v| v.prot = 3);
        let offsets: Vec<_> = map.iter().map(|v| v.offset).collect();
        assert_eq!(offsets, [0x4000, 0x5000, 0x6000]);
        map.update(BASE + 0x1000, BASE + 0x2000, |v| v.prot = 1);
        assert_eq!(map.iter().count(), 1);
    }

    #[test]
    fn an_area_of_an_image_and_what_it_has_grown_by_are_one_to_a_program() {
        let mut map = VmaMap::default();
        let flags = VmaFlags::FROM_IMAGE;
        map.insert(Vma { flags, ..anonymous(BASE, BASE + 0x2000, 3) });
        map.insert(anonymous(BASE + 0x2000, BASE + 0x4000, 3));
        map.insert(anonymous(BASE + 0x4000, BASE + 0x5000, 1));
        assert_eq!(map.iter().count(), 3, "what is discarded differs");
        let parts = map.within_one(BASE + 0x1000, BASE + 0x3000).unwrap();
        let parts: Vec<_> = parts.iter().map(|part| (part.start, part.end, part.flags)).collect();
        let grown = (BASE + 0x2000, BASE + 0x3000, VmaFlags::empty());
        assert_eq!(parts, [(BASE + 0x1000, BASE + 0x2000, flags), grown]);
        assert!(map.within_one(BASE + 0x3000, BASE + 0x5000).is_none(), "another protection");
        assert!(map.within_one(BASE - 0x1000, BASE + 0x1000).is_none(), "a hole");
        assert!(map.within_one(BASE + 0x5000, BASE + 0x6000).is_none(), "nothing");
    }

    #[test]
    fn what_is_full_is_passed_over_and_what_became_free_is_found() {
        let mut map = VmaMap::default();
        let ceiling = BASE + 0x10_0000;
        let page = |n: u64| ceiling - n * 0x1000;
        for n in 1..=8 {
            // Neighbours do not merge.
            assert_eq!(map.find_free_below(ceiling, 0x1000), Some(page(n)));
            map.insert(anonymous(page(n), page(n - 1), (n % 2) as u32));
        }
        assert_eq!(map.full, page(8)..ceiling, "all that was found and taken");
        map.remove(page(3), page(2));
        assert_eq!(map.full, page(8)..page(3), "the larger part");
        assert_eq!(
            map.find_free_below(ceiling, 0x2000),
            Some(page(10)),
            "below a hole that is too small"
        );
        assert_eq!(map.find_free_below(ceiling, 0x1000), Some(page(3)));
        map.insert(anonymous(page(3), page(2), 1));
        assert_eq!(map.find_free_below(ceiling, 0x1000), Some(page(9)));
        map.remove(page(8), ceiling);
        assert!(map.full.is_empty());
        assert_eq!(map.find_free_below(ceiling, 0x1000), Some(page(1)));
    }

    #[test]
    fn no_address_space_has_more_areas_than_the_host_may_map() {
        let mut map = VmaMap::default();
        let areas = (AREAS_MAX - 1) as u64;
        (0..areas)
            .for_each(|n| map.insert(anonymous(BASE + n * 0x2000, BASE + n * 0x2000 + 0x1000, 3)));
        let hole = BASE + 0x1000;
        assert_eq!(map.check_count(hole, hole + 0x1000, 1), Ok(()));
        let last = BASE + areas * 0x2000;
        map.insert(anonymous(last, last + 0x3000, 3));
        assert_eq!(map.check_count(hole, hole + 0x1000, 1), Err(Errno::ENOMEM));
        assert_eq!(map.check_count(BASE, hole, 1), Ok(()), "in place of another one");
        assert_eq!(map.check_count(last + 0x1000, last + 0x2000, 0), Err(Errno::ENOMEM));
        assert_eq!(map.check_count(last + 0x1000, last + 0x3000, 0), Ok(()), "a shorter one");
        assert_eq!(map.check_change(last + 0x1000, last + 0x3000), Err(Errno::ENOMEM));
        assert_eq!(map.check_change(BASE, last + 0x3000), Ok(()));
    }

    #[test]
    fn free_ranges_are_found_from_the_top() {
        let mut map = VmaMap::default();
        let ceiling = BASE + 0x10_0000;
        assert_eq!(map.find_free_below(ceiling, 0x1000), Some(ceiling - 0x1000));
        map.insert(anonymous(ceiling - 0x2000, ceiling - 0x1000, 3));
        assert_eq!(map.find_free_below(ceiling, 0x1000), Some(ceiling - 0x1000));
        assert_eq!(map.find_free_below(ceiling, 0x2000), Some(ceiling - 0x4000));
        assert_eq!(map.find_free_below(ceiling, 0x20_0000), None);
    }
}
