//! Which of the guest's memory is still what a thaw has mapped there.
//!
//! A freeze of a copy stores only what differs from the image that the copy was made of. A page
//! that nobody has written need not even be looked at, as long as its mapping is the one that
//! the thaw has made. So every mapping that is made later is noted here. The notes are those of
//! one copy: in a copy of the copy, they are void.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// Where the pages of a range come from if nobody has written them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provenance {
    /// From the image, or the swap file, at these addresses.
    Image,
    /// From the file that was mapped, or they are zeros.
    Mapped,
    /// They were moved here (mremap(2)), from wherever.
    Moved,
}

/// The ranges of an address space that are not the image's any more.
#[derive(Clone, Default)]
pub struct Replaced {
    /// Of the copy that they are about; see [`crate::state::Kernel::generation`].
    generation: u64,
    /// End and provenance by start; not overlapping.
    ranges: BTreeMap<u64, (u64, Provenance)>,
}

impl Replaced {
    /// Notes that a range was mapped, or moved, in a copy of this generation.
    pub fn note(&mut self, generation: u64, start: u64, end: u64, provenance: Provenance) {
        // Before the first thaw nothing is an image's.
        if generation == 0 || start >= end {
            return;
        }
        if self.generation != generation {
            *self = Self { generation, ranges: BTreeMap::new() };
        }
        self.forget(start, end);
        let (mut start, mut end) = (start, end);
        if let Some((&before, &(before_end, same))) = self.ranges.range(..start).next_back()
            && (before_end, same) == (start, provenance)
        {
            start = before;
        }
        if let Some(&(after_end, same)) = self.ranges.get(&end)
            && same == provenance
        {
            self.ranges.remove(&end);
            end = after_end;
        }
        self.ranges.insert(start, (end, provenance));
    }

    /// Forgets a range in which nothing is mapped any more.
    pub fn forget(&mut self, start: u64, end: u64) {
        if let Some((&before, &(before_end, provenance))) = self.ranges.range(..start).next_back()
            && before_end > start
        {
            self.ranges.insert(before, (start, provenance));
            self.ranges.insert(start, (before_end, provenance));
        }
        while let Some((&at, &(at_end, provenance))) = self.ranges.range(start..end).next() {
            self.ranges.remove(&at);
            if at_end > end {
                self.ranges.insert(end, (at_end, provenance));
            }
        }
    }

    /// The parts of a range that is mapped, in order, as a copy of this generation has them:
    /// start, end and where they come from.
    pub fn parts(&self, generation: u64, start: u64, end: u64) -> Vec<(u64, u64, Provenance)> {
        if generation == 0 {
            return alloc::vec![(start, end, Provenance::Mapped)];
        }
        let mut parts = Vec::new();
        let mut at = start;
        if self.generation == generation {
            let first = self.ranges.range(..=start).next_back().map_or(start, |(&at, _)| at);
            for (&from, &(to, provenance)) in self.ranges.range(first..end) {
                let (from, to) = (from.max(start), to.min(end));
                if from >= to {
                    continue;
                }
                if at < from {
                    parts.push((at, from, Provenance::Image));
                }
                parts.push((from, to, provenance));
                at = to;
            }
        }
        if at < end {
            parts.push((at, end, Provenance::Image));
        }
        parts
    }
}

/// The numbers that an address space had when it was frozen: a freeze gives it the one that it
/// will have come from in the copies, while the original still needs its own.
#[derive(Clone, Copy, Default)]
pub struct ImageNumbers {
    /// Generation of the sandbox that was frozen, and the number.
    latest: Option<(u64, u32)>,
    /// That of an earlier generation.
    before: Option<(u64, u32)>,
}

impl ImageNumbers {
    /// Notes the number in an image of a sandbox of this generation.
    pub fn set(&mut self, generation: u64, number: u32) {
        if self.latest.is_some_and(|(latest, _)| latest != generation) {
            self.before = self.latest;
        }
        self.latest = Some((generation, number));
    }

    /// The number in the image that a copy of this generation was made of.
    pub fn of_copy(&self, generation: u64) -> Option<u32> {
        let all = [self.latest, self.before].into_iter().flatten();
        all.filter(|&(frozen, _)| frozen + 1 == generation).map(|(_, number)| number).next()
    }
}

#[cfg(test)]
mod tests {
    use super::Provenance::{Image, Mapped, Moved};
    use super::*;

    #[test]
    fn what_was_mapped_since_the_thaw_is_told_from_the_image() {
        let mut replaced = Replaced::default();
        assert_eq!(replaced.parts(1, 10, 90), [(10, 90, Image)]);
        replaced.note(1, 20, 30, Mapped);
        replaced.note(1, 30, 40, Mapped);
        replaced.note(1, 60, 70, Moved);
        let all =
            [(10, 20, Image), (20, 40, Mapped), (40, 60, Image), (60, 70, Moved), (70, 90, Image)];
        assert_eq!(replaced.parts(1, 10, 90), all);
        assert_eq!(replaced.parts(1, 25, 35), [(25, 35, Mapped)]);
        assert_eq!(replaced.parts(1, 65, 75), [(65, 70, Moved), (70, 75, Image)]);
    }

    #[test]
    fn a_range_is_what_it_became_last() {
        let mut replaced = Replaced::default();
        replaced.note(1, 10, 50, Mapped);
        replaced.note(1, 20, 30, Moved);
        assert_eq!(
            replaced.parts(1, 0, 60),
            [(0, 10, Image), (10, 20, Mapped), (20, 30, Moved), (30, 50, Mapped), (50, 60, Image)]
        );
        replaced.note(1, 15, 45, Mapped);
        assert_eq!(replaced.parts(1, 10, 50), [(10, 50, Mapped)]);
        assert_eq!(replaced.ranges.len(), 1);
        // Nothing is mapped there, so nobody asks; later mappings are noted anew.
        replaced.forget(20, 30);
        replaced.forget(0, 11);
        let parts = [(11, 20, Mapped), (20, 30, Image), (30, 50, Mapped)];
        assert_eq!(replaced.parts(1, 11, 50), parts);
        replaced.forget(0, 100);
        assert!(replaced.ranges.is_empty());
    }

    #[test]
    fn notes_are_those_of_one_copy() {
        let mut replaced = Replaced::default();
        replaced.note(0, 10, 20, Mapped);
        assert!(replaced.ranges.is_empty());
        assert_eq!(replaced.parts(0, 10, 20), [(10, 20, Mapped)]);
        replaced.note(1, 10, 20, Mapped);
        // All of it is the image's in a copy of the copy.
        assert_eq!(replaced.parts(2, 10, 20), [(10, 20, Image)]);
        replaced.note(2, 30, 40, Moved);
        assert_eq!(replaced.parts(2, 10, 40), [(10, 30, Image), (30, 40, Moved)]);
    }

    #[test]
    fn the_original_keeps_its_number_when_it_is_frozen() {
        let mut numbers = ImageNumbers::default();
        assert_eq!(numbers.of_copy(0), None);
        for (generation, number) in [(0, 7), (0, 4)] {
            numbers.set(generation, number);
            assert_eq!(numbers.of_copy(0), None);
            assert_eq!(numbers.of_copy(1), Some(number));
        }
        for number in [5, 6] {
            numbers.set(1, number);
            assert_eq!((numbers.of_copy(1), numbers.of_copy(2)), (Some(4), Some(number)));
        }
        numbers.set(2, 9);
        assert_eq!((numbers.of_copy(2), numbers.of_copy(3)), (Some(6), Some(9)));
        assert_eq!(numbers.of_copy(1), None);
    }
}
