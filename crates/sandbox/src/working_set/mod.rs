//! The working set: which memory the first requests of thawed copies touched. It is the union of
//! the last recordings ([`crate::recordings`]).
//!
//! Read from outside, through the page map of a copy that was booted without
//! population. Written pages are exact. Read pages are more than were touched:
//! on a fault in a file mapping, the host kernel maps up to 16 pages around it
//! that are in the page cache (fault-around).

mod read_ahead;
mod recorder;
mod stored;
#[cfg(test)]
pub(crate) mod tests;

pub use read_ahead::drop_from_page_cache;
pub(crate) use read_ahead::read_range_ahead;
pub use recorder::Recorder;
pub(crate) use recorder::{RECORDING_MAX, Runs, record};

use crate::recordings::Recent;
use read_ahead::READ_AHEAD_GAP;
use std::ops::Range;
use thaw_abi::PAGE_SIZE;
use thaw_abi::control::{POPULATE_READ, POPULATE_WRITE, PopulateRange};
use thaw_abi::image::{Mapping, SOURCE_ZERO};
use thaw_abi::layout::{HEAP_BASE, HEAP_FRONT};

/// `PROT_READ`.
const READABLE: u32 = 1;
/// `PROT_WRITE`.
const WRITABLE: u32 = 2;

/// Bytes between two runs of a writable mapping that are populated with them.
const READ_GAP: u64 = 16 * PAGE_SIZE;

/// Which pages of a working set a boot populates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PopulatePolicy {
    /// None: touched mappings are mapped at boot, pages fault in one by one.
    None,
    /// Pages that were read only.
    Read,
    /// Pages that were written.
    #[default]
    Write,
    /// Both.
    Both,
}

impl PopulatePolicy {
    fn includes(self, how: Use) -> bool {
        match how {
            Use::Read => matches!(self, Self::Read | Self::Both),
            Use::Written => matches!(self, Self::Write | Self::Both),
        }
    }
}

/// Why bytes are not a usable working set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkingSetError {
    /// Damaged, truncated or of another kind.
    #[error("the recorded working set is damaged; record it anew")]
    Damaged,
    /// Written by another version of Thaw.
    #[error(
        "the recorded working set has format version {0}, which this Thaw does not read; record it anew"
    )]
    Version(u32),
}

/// What was done to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Written,
}

/// Neighbouring pages with the same use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) recent: Recent,
    /// Follows from `recent` and the number of recordings.
    pub(crate) how: Use,
}

impl Run {
    /// As one recording has it.
    pub(crate) fn recorded(start: u64, end: u64, how: Use) -> Self {
        Self { start, end, recent: Recent::once(how), how }
    }
}

/// Which memory the first requests of thawed copies touched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkingSet {
    pub(crate) image_checksum: [u8; 32],
    /// How many recordings it is the union of: 1 to [`RECORDINGS_MAX`](crate::recordings::RECORDINGS_MAX).
    pub(crate) recordings: u8,
    /// Sorted, not overlapping.
    pub(crate) runs: Vec<Run>,
    /// The I/O cache: blobs that were mapped or read, each once, those of the last recording first.
    pub(crate) blobs: Vec<u32>,
}

/// Most runs of a set. A guest decides how many it makes; beyond this, those that are
/// nearest to each other become one.
pub(crate) const RUNS_MAX: usize = 4096;
/// Most bytes of memory in the runs of a set: more is not brought in faster at boot
/// than when it is needed.
const BYTES_MAX: u64 = 1 << 30;
/// Most blobs of a set.
pub(crate) const BLOBS_MAX: usize = 4096;

impl WorkingSet {
    /// One in which nothing was touched, of an image that nobody has seen serve a request.
    pub fn empty(image_checksum: [u8; 32]) -> Self {
        Self { image_checksum, recordings: 1, runs: Vec::new(), blobs: Vec::new() }
    }

    /// A set of runs: first byte, end, and what was done (`POPULATE_*`).
    #[cfg(test)]
    pub(crate) fn of_runs(runs: &[(u64, u64, u64)]) -> Self {
        let how = |how| if how == POPULATE_WRITE { Use::Written } else { Use::Read };
        let runs = runs.iter().map(|&(start, end, what)| Run::recorded(start, end, how(what)));
        let (recordings, blobs) = (1, Vec::new());
        Self { image_checksum: [0; 32], recordings, runs: runs.collect(), blobs }
    }

    /// Checksum of the image that the set belongs to.
    pub fn image_checksum(&self) -> [u8; 32] {
        self.image_checksum
    }

    /// Blobs that were mapped or read: the I/O cache.
    pub fn blobs(&self) -> &[u32] {
        &self.blobs
    }

    /// Pages that were read and pages that were written.
    pub fn pages(&self) -> (u64, u64) {
        let count = |how| {
            let runs = self.runs.iter().filter(|run| run.how == how);
            runs.map(|run| (run.end - run.start) / PAGE_SIZE).sum()
        };
        (count(Use::Read), count(Use::Written))
    }

    /// The runs that touch a range.
    pub(crate) fn within(&self, start: u64, end: u64) -> impl Iterator<Item = Run> {
        let first = self.runs.partition_point(|run| run.end <= start);
        self.runs[first..].iter().take_while(move |run| run.start < end).map(move |run| Run {
            start: run.start.max(start),
            end: run.end.min(end),
            ..*run
        })
    }

    /// The ranges to populate so that what was written of a range is there.
    pub(crate) fn written(&self, start: u64, end: u64) -> impl Iterator<Item = PopulateRange> {
        let written = self.within(start, end).filter(|run| run.how == Use::Written);
        written.map(|Run { start, end, .. }| PopulateRange {
            start,
            len: end - start,
            how: POPULATE_WRITE,
        })
    }

    /// The first page of a range that was touched.
    pub(crate) fn first_within(&self, start: u64, end: u64) -> Option<u64> {
        self.within(start, end).next().map(|run| run.start)
    }

    /// Whether any page of a range was touched.
    pub(crate) fn touches(&self, start: u64, end: u64) -> bool {
        self.first_within(start, end).is_some()
    }

    /// The ranges to populate in these mappings, `room` at most: the longest.
    ///
    /// Measured (`docs/performance.md`): the kernel makes private copies of all
    /// written runs in one call, at half the cost of the faults. Reads cost more
    /// than the faults that they save where files lie in the page cache in small
    /// pieces, so they are populated where nobody waits: read-only mappings in one
    /// call each, from the first page used to the last, of the others runs that are
    /// not far apart.
    pub(crate) fn populate(
        &self,
        mappings: &[Mapping],
        policy: PopulatePolicy,
        room: usize,
    ) -> Vec<PopulateRange> {
        let mut ranges: Vec<PopulateRange> = Vec::new();
        // The others are mapped in processes of their own.
        for mapping in mappings.iter().filter(|mapping| mapping.space() == 0) {
            let end = mapping.start + mapping.len;
            let runs =
                || self.within(if is_front(mapping) { FRONT_END } else { mapping.start }, end);
            let writable = mapping.prot & WRITABLE != 0;
            if writable && policy.includes(Use::Written) {
                let written = |run: &Run| run.how == Use::Written;
                ranges.extend(runs().filter(written).map(|run| PopulateRange {
                    start: run.start,
                    len: run.end - run.start,
                    how: POPULATE_WRITE,
                }));
            }
            // There is nothing to be read where nothing was written, and a page
            // without access cannot be populated.
            let readable = mapping.prot & READABLE != 0 && mapping.source != SOURCE_ZERO;
            if readable && policy.includes(Use::Read) {
                let gap = if writable { READ_GAP } else { u64::MAX };
                let read = runs().filter(|run| !writable || run.how == Use::Read);
                let read = joined(read.map(|run| run.start..run.end), gap);
                ranges.extend(read.into_iter().map(|range| PopulateRange {
                    start: range.start,
                    len: range.end - range.start,
                    how: POPULATE_READ,
                }));
            }
        }
        if ranges.len() > room {
            ranges.sort_by_key(|range| std::cmp::Reverse(range.len));
            ranges.truncate(room);
            ranges.sort_by_key(|range| range.start);
        }
        ranges
    }

    /// The parts of a file that the set touches through some of the mappings,
    /// sorted, with near ones joined.
    pub(crate) fn file_ranges(
        &self,
        mappings: &[Mapping],
        is_of_file: impl Fn(&Mapping) -> bool,
    ) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for mapping in mappings.iter().filter(|mapping| is_of_file(mapping)) {
            for run in self.within(mapping.start, mapping.start + mapping.len) {
                let start = mapping.offset + (run.start - mapping.start);
                ranges.push(start..start + (run.end - run.start));
            }
        }
        ranges.sort_by_key(|range| range.start);
        joined(ranges, READ_AHEAD_GAP)
    }
}

/// End of what a copy reads into memory that it has already.
pub(crate) const FRONT_END: u64 = HEAP_BASE + HEAP_FRONT;

/// Whether a mapping begins with the front of the kernel's heap.
pub(crate) fn is_front(mapping: &Mapping) -> bool {
    (HEAP_BASE..FRONT_END).contains(&mapping.start)
}

/// Sorted ranges, with those made one that are `gap` bytes apart at most.
pub(crate) fn joined(ranges: impl IntoIterator<Item = Range<u64>>, gap: u64) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(gap) => {
                last.end = last.end.max(range.end);
            }
            _ => joined.push(range),
        }
    }
    joined
}
