//! A working set as the union of recordings of several requests.
//!
//! Requests of one function differ: another path, another argument, another branch. A page that one
//! of the last recordings has touched is in the set, and leaves it when [`RECORDINGS_MAX`] recordings
//! have not touched it. A page that is there for nothing costs less than one that is missing: a page
//! more of a sequential read takes 3 us, one that a cold boot does not find takes 64
//! (docs/decisions/0023), so one request of eight is enough to be worth a page. A private copy that
//! is made ahead costs half of the fault that it saves, so a page is copied ahead if at least half of the
//! recordings have written it.
//!
//! A recording is *whole*: of a copy without population that maps page by page, so that it shows what
//! is touched no more. Or it shows *misses* only: of a cold boot, which maps what it expects and takes
//! the rest page by page. Those add pages and take none away.

use std::ops::Range;

use thaw_abi::PAGE_SIZE;

use crate::working_set::{BLOBS_MAX, Run, Runs, Use, WorkingSet};

/// Recordings after which a page that was not touched leaves the set.
pub(crate) const RECORDINGS_MAX: u8 = 8;
/// Bytes that a union may have if no single recording has more: what fits into a prefetch file,
/// with the gaps that are stored along.
const UNION_MAX: u64 = 48 << 20;
/// Blobs that a union may have if no single recording has half as many.
const UNION_BLOBS: usize = 64;

/// In which of the last recordings pages were touched, and in which they were written; bit 0 stands
/// for the latest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Recent {
    touched: u8,
    written: u8,
}

impl Recent {
    /// In the only recording.
    pub(crate) fn once(how: Use) -> Self {
        Self { touched: 1, written: u8::from(how == Use::Written) }
    }

    /// How boots are to treat the pages after so many recordings.
    pub(crate) fn how(self, recordings: u8) -> Use {
        match self.written.count_ones() * 2 >= u32::from(recordings) {
            true => Use::Written,
            false => Use::Read,
        }
    }

    /// For pages that become one run, which is to be treated so.
    pub(crate) fn joined(self, other: Self, how: Use) -> Self {
        let written = match how {
            Use::Written => self.written | other.written,
            Use::Read => self.written & other.written,
        };
        Self { touched: self.touched | other.touched, written }
    }

    /// As it is stored.
    pub(crate) fn word(self) -> u64 {
        u64::from(self.touched) | u64::from(self.written) << 8
    }

    /// Reads [`Recent::word`]; `None`: no set of so many recordings has it.
    pub(crate) fn from_word(word: u64, recordings: u8) -> Option<Self> {
        let [touched, written] = u16::try_from(word).ok()?.to_le_bytes();
        let possible = u8::MAX >> (RECORDINGS_MAX - recordings);
        let is_one = touched != 0 && touched & !possible == 0 && written & !touched == 0;
        is_one.then_some(Self { touched, written })
    }

    /// After a recording that has `now`; `None`: it is long ago.
    fn after(self, now: Option<Self>) -> Option<Self> {
        let (touched, written) = now.map_or((0, 0), |now| (now.touched & 1, now.written & 1));
        let recent =
            Self { touched: self.touched << 1 | touched, written: self.written << 1 | written };
        (recent.touched != 0).then_some(recent)
    }

    /// The larger, the better a page is worth its place: touched often, then lately.
    fn worth(self) -> (u32, u8) {
        (self.touched.count_ones(), self.touched.reverse_bits())
    }
}

impl WorkingSet {
    /// The union with one more whole recording of the same image, the latest.
    pub fn after(&self, latest: &Self) -> Self {
        let recordings = (self.recordings + 1).min(RECORDINGS_MAX);
        let pieces = pieces(&self.runs, &latest.runs, |old, new| match (old, new) {
            (Some(old), new) => old.after(new),
            (None, new) => new,
        });
        let most = latest.bytes().max(UNION_MAX);
        self.united(pieces, recordings, most, &latest.blobs)
    }

    /// The union with pages that a boot has missed; `None`: it has missed none.
    pub fn with_misses(&self, seen: &Self) -> Option<Self> {
        let is_missing = |run: &Run| {
            let known = self.within(run.start, run.end).map(|known| known.end - known.start);
            known.sum::<u64>() < run.end - run.start
        };
        if !seen.runs.iter().any(is_missing) {
            return None;
        }
        let pieces = pieces(&self.runs, &seen.runs, |old, new| old.or(new));
        let most = self.bytes().max(UNION_MAX);
        let united = self.united(pieces, self.recordings, most, &seen.blobs);
        (!united.has_same_pages(self)).then_some(united)
    }

    /// Whether both have the same pages, whatever was done to them.
    pub fn has_same_pages(&self, other: &Self) -> bool {
        let pages = |set: &Self| {
            let mut ranges: Vec<Range<u64>> = Vec::new();
            for run in &set.runs {
                match ranges.last_mut() {
                    Some(last) if last.end == run.start => last.end = run.end,
                    _ => ranges.push(run.start..run.end),
                }
            }
            ranges
        };
        pages(self) == pages(other)
    }

    /// How many recordings it is the union of, [`RECORDINGS_MAX`] at most.
    pub fn recordings(&self) -> u8 {
        self.recordings
    }

    fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.end - run.start).sum()
    }

    fn united(
        &self,
        mut pieces: Vec<Piece>,
        recordings: u8,
        most: u64,
        latest_blobs: &[u32],
    ) -> Self {
        keep_worthiest(&mut pieces, most);
        let mut runs = Runs::default();
        for (range, recent) in pieces {
            let how = recent.how(recordings);
            runs.push(Run { start: range.start, end: range.end, recent, how });
        }
        let mut blobs = latest_blobs.to_vec();
        blobs.extend(self.blobs.iter().filter(|blob| !latest_blobs.contains(blob)));
        blobs.truncate((2 * latest_blobs.len()).clamp(UNION_BLOBS, BLOBS_MAX));
        Self { image_checksum: self.image_checksum, recordings, runs: runs.finish(), blobs }
    }
}

/// Pages that were used alike.
type Piece = (Range<u64>, Recent);

/// What becomes of the pages of two sorted lists of runs.
fn pieces(
    old: &[Run],
    new: &[Run],
    combine: impl Fn(Option<Recent>, Option<Recent>) -> Option<Recent>,
) -> Vec<Piece> {
    let mut bounds: Vec<u64> = old.iter().chain(new).flat_map(|run| [run.start, run.end]).collect();
    bounds.sort_unstable();
    bounds.dedup();
    let (mut old, mut new) = (old.iter().peekable(), new.iter().peekable());
    let mut pieces = Vec::with_capacity(bounds.len());
    for range in bounds.windows(2).map(|pair| pair[0]..pair[1]) {
        let [in_old, in_new] = [&mut old, &mut new].map(|runs| {
            while runs.next_if(|run| run.end <= range.start).is_some() {}
            runs.peek().filter(|run| run.start <= range.start).map(|run| run.recent)
        });
        pieces.extend(combine(in_old, in_new).map(|recent| (range, recent)));
    }
    pieces
}

/// Leaves out the pages that are worth least, until there are `most` bytes.
fn keep_worthiest(pieces: &mut Vec<Piece>, most: u64) {
    let len = |range: &Range<u64>| range.end - range.start;
    let mut excess = pieces.iter().map(|(range, _)| len(range)).sum::<u64>().saturating_sub(most);
    if excess == 0 {
        return;
    }
    pieces.sort_by_key(|(range, recent)| (std::cmp::Reverse(recent.worth()), range.start));
    while excess > 0 {
        let Some((range, _)) = pieces.last_mut() else { break };
        let cut = len(range).min(excess.next_multiple_of(PAGE_SIZE));
        range.end -= cut;
        excess = excess.saturating_sub(cut);
        if range.is_empty() {
            pieces.pop();
        }
    }
    pieces.sort_by_key(|(range, _)| range.start);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::working_set::RUNS_MAX;
    use crate::working_set::tests::set;

    const P: u64 = PAGE_SIZE;

    /// Page, pages, how, and in which recordings they were touched.
    fn seen(set: &WorkingSet) -> Vec<(u64, u64, Use, u8)> {
        let seen =
            |run: &Run| (run.start / P, (run.end - run.start) / P, run.how, run.recent.touched);
        set.runs.iter().map(seen).collect()
    }

    #[test]
    fn the_union_has_what_any_of_the_requests_has_touched() {
        let first = set(&[(10, 4, Use::Read), (20, 2, Use::Written)]);
        let second = set(&[(12, 4, Use::Read), (21, 1, Use::Written), (30, 1, Use::Written)]);
        let both = first.after(&second);
        let (read, written) = (Use::Read, Use::Written);
        let expected = [
            (10, 2, read, 0b10),
            (12, 2, read, 0b11),
            (14, 2, read, 0b01),
            (20, 1, written, 0b10),
            (21, 1, written, 0b11),
            (30, 1, written, 0b01),
        ];
        assert_eq!(seen(&both), expected);
        assert_eq!(both.recordings(), 2);
        assert_eq!(WorkingSet::from_bytes(&both.to_bytes()), Ok(both.clone()));
        // Written once in three is not worth a copy ahead, but it stays.
        let third = both.after(&set(&[(12, 1, Use::Read)]));
        let twentieth = third.within(20 * P, 22 * P).map(|run| run.how).collect::<Vec<_>>();
        assert_eq!(twentieth, [read, written]);
    }

    #[test]
    fn a_page_leaves_when_the_last_requests_have_not_touched_it() {
        let mut union = set(&[(10, 1, Use::Written), (50, 1, Use::Read)]);
        let usual = set(&[(50, 1, Use::Read)]);
        for recording in 1..RECORDINGS_MAX {
            union = union.after(&usual);
            assert!(union.touches(10 * P, 11 * P), "after {recording}");
        }
        union = union.after(&usual);
        assert_eq!(seen(&union), [(50, 1, Use::Read, 0xff)]);
        assert_eq!(union.recordings(), RECORDINGS_MAX);
        // One touch is enough to stay.
        let mut again = set(&[(10, 1, Use::Read)]).after(&usual).after(&set(&[(10, 1, Use::Read)]));
        for _ in 0..RECORDINGS_MAX - 1 {
            again = again.after(&usual);
        }
        assert!(again.touches(10 * P, 11 * P));
    }

    #[test]
    fn misses_add_pages_and_take_none_away() {
        let known = set(&[(10, 4, Use::Read)]);
        // What is known is not looked at: all of it was mapped, touched or not.
        assert_eq!(known.with_misses(&set(&[(11, 2, Use::Written)])), None);
        assert_eq!(known.with_misses(&set(&[])), None);
        let more = known.with_misses(&set(&[(12, 3, Use::Read), (40, 1, Use::Written)])).unwrap();
        assert_eq!(seen(&more), [(10, 5, Use::Read, 1), (40, 1, Use::Written, 1)]);
        assert_eq!(more.recordings(), 1);
        assert!(!more.has_same_pages(&known) && known.has_same_pages(&known.clone()));
    }

    #[test]
    fn a_union_has_so_much_memory_and_keeps_what_is_touched_often() {
        let most = UNION_MAX / P;
        let common = (0, most / 2, Use::Read);
        let mut union = set(&[common]);
        // Each request touches as much again, elsewhere.
        for request in 1..20 {
            union = union.after(&set(&[common, (request * most, most / 2, Use::Read)]));
            assert!(union.bytes() <= UNION_MAX, "{}", union.bytes());
            assert!(
                union.touches(0, P) && union.touches(request * most * P, P + request * most * P)
            );
        }
        assert_eq!(
            union.within(0, most / 2 * P).map(|run| run.end - run.start).sum::<u64>(),
            UNION_MAX / 2
        );
        // A function that needs more in each request has it.
        let large = set(&[(0, 2 * most, Use::Read)]);
        assert_eq!(union.after(&large).bytes(), 2 * UNION_MAX);
        // Misses do not push out what is known.
        let full = set(&[(0, most, Use::Read)]);
        assert_eq!(full.with_misses(&set(&[(9 * most, 5, Use::Read)])), None);
    }

    #[test]
    fn a_union_has_so_many_runs_and_blobs() {
        let count = RUNS_MAX as u64;
        let scattered = |first: u64| {
            let runs: Vec<_> = (0..count).map(|n| (first + 8 * n, 1, Use::Written)).collect();
            set(&runs)
        };
        let mut union = scattered(0);
        for number in 1..6 {
            let mut latest = scattered(number);
            latest.blobs = (number as u32 * 40..number as u32 * 40 + 40).collect();
            union = union.after(&latest);
            assert!(union.runs.len() <= RUNS_MAX);
            // Those of the last recording are there.
            assert_eq!(union.blobs[..40], latest.blobs[..]);
            assert!(union.blobs.len() <= 80);
            assert_eq!(
                WorkingSet::from_bytes(&union.to_bytes()).map(|set| set.runs.len()),
                Ok(union.runs.len())
            );
        }
    }

    #[test]
    fn unions_are_what_their_recordings_say_page_by_page() {
        for seed in 0..200_u64 {
            let mut state = seed;
            let mut random = |below: u64| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) % below
            };
            let mut recorded: Vec<Vec<bool>> = Vec::new();
            let mut union: Option<WorkingSet> = None;
            for _ in 0..12 {
                let touched: Vec<bool> = (0..64).map(|_| random(3) == 0).collect();
                let pages = touched.iter().enumerate().filter(|(_, touched)| **touched);
                let runs: Vec<_> = pages.map(|(page, _)| (page as u64, 1, Use::Read)).collect();
                let latest = set(&runs);
                union = Some(union.map_or_else(|| latest.clone(), |union| union.after(&latest)));
                recorded.push(touched);
                let last = &recorded[recorded.len().saturating_sub(usize::from(RECORDINGS_MAX))..];
                for page in 0..64 {
                    let expected = last.iter().any(|touched| touched[page as usize]);
                    let found = union.as_ref().unwrap().touches(page * P, (page + 1) * P);
                    assert_eq!(found, expected, "seed {seed}, page {page}");
                }
            }
        }
    }
}
