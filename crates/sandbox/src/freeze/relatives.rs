//! What processes of a sandbox have in common since one was forked from another: a page that is
//! stored for one of them need not be stored again for the other, which has the same at the same
//! address.

use std::ops::Range;

use thaw_abi::PAGE_SIZE;

use super::scan::{Content, Run};

/// The address spaces before one that it was probably forked from: the first process or its child,
/// where a shell has started the server, or else the one before.
pub fn relatives(space: u32) -> impl Iterator<Item = u32> {
    let last = space.checked_sub(1).filter(|&last| last > 1);
    (0..space.min(2)).chain(last)
}

/// Private memory of the guest that is stored: ranges by address space, in order.
#[derive(Default)]
pub(super) struct StoredBySpace(Vec<Vec<Range<u64>>>);

impl StoredBySpace {
    /// Adds the runs of a region behind all that came before of its address space.
    pub fn add(&mut self, space: u32, runs: &[Run]) {
        let missing = (space as usize + 1).saturating_sub(self.0.len());
        self.0.extend(std::iter::repeat_n(Vec::new(), missing));
        let ranges = &mut self.0[space as usize];
        for run in runs.iter().filter(|run| run.content == Content::Own) {
            match ranges.last_mut() {
                Some(last) if last.end == run.start => last.end = run.end,
                _ => ranges.push(run.start..run.end),
            }
        }
    }

    /// The ranges that overlap one.
    pub fn within<'a>(
        &'a self,
        space: u32,
        part: &'a Range<u64>,
    ) -> impl Iterator<Item = &'a Range<u64>> {
        let all = self.0.get(space as usize).map_or(&[][..], Vec::as_slice);
        let first = all.partition_point(|range| range.end <= part.start);
        all[first..].iter().take_while(|range| range.start < part.end)
    }

    /// Whether a relative of an address space has stored some of a range.
    pub fn may_have(&self, space: u32, part: &Range<u64>) -> bool {
        relatives(space).any(|relative| self.within(relative, part).next().is_some())
    }
}

/// What an earlier address space has at some addresses.
pub(super) struct Earlier {
    pub space: u32,
    /// Address of the first byte.
    pub at: u64,
    /// What is stored of it.
    pub stored: Vec<Range<u64>>,
    pub memory: Vec<u8>,
}

impl Earlier {
    /// Whether its page of this number is stored, and is the same.
    pub fn has(&self, number: usize, page: &[u8]) -> bool {
        let first = number * PAGE_SIZE as usize;
        let address = self.at + first as u64;
        let after = self.stored.partition_point(|range| range.end <= address);
        let is_stored = self.stored.get(after).is_some_and(|range| range.start <= address);
        is_stored && self.memory[first..first + page.len()] == *page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: u64 = PAGE_SIZE;

    #[test]
    fn relatives_are_the_first_two_and_the_one_before() {
        let of = |space| relatives(space).collect::<Vec<_>>();
        assert_eq!((of(0), of(1), of(2)), (vec![], vec![0], vec![0, 1]));
        assert_eq!((of(3), of(9)), (vec![0, 1, 2], vec![0, 1, 8]));
    }

    #[test]
    fn what_is_stored_is_found_by_address() {
        let run = |start: u64, end: u64, content| Run { start: start * P, end: end * P, content };
        let mut stored = StoredBySpace::default();
        stored.add(1, &[run(4, 6, Content::Own), run(6, 7, Content::Zero)]);
        stored.add(1, &[run(7, 8, Content::Own), run(8, 9, Content::Own)]);
        let within = |space, start, end| {
            let part = start * P..end * P;
            stored
                .within(space, &part)
                .map(|range| (range.start / P, range.end / P))
                .collect::<Vec<_>>()
        };
        assert_eq!(within(1, 0, 99), [(4, 6), (7, 9)]);
        assert_eq!((within(1, 6, 7), within(0, 0, 99), within(2, 0, 99)), (vec![], vec![], vec![]));
        assert!(stored.may_have(2, &(5 * P..6 * P)) && !stored.may_have(1, &(5 * P..6 * P)));
        let page = [7; P as usize];
        let earlier = Earlier {
            space: 1,
            at: 5 * P,
            stored: vec![5 * P..6 * P, 8 * P..9 * P],
            memory: page.repeat(2),
        };
        assert!(earlier.has(0, &page) && !earlier.has(1, &page), "the second one is not stored");
        assert!(!earlier.has(0, &[8; P as usize]));
    }
}
