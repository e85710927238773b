//! The working set: which memory the first requests of thawed copies touched. It is the union of
//! the last recordings ([`crate::recordings`]).
//!
//! Read from outside, through the page map of a copy that was booted without
//! population. Written pages are exact. Read pages are more than were touched:
//! on a fault in a file mapping, the host kernel maps up to 16 pages around it
//! that are in the page cache (fault-around).

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use bytemuck::bytes_of;
use rustix::fs::{Advice, MemfdFlags, fadvise, memfd_create};
use thaw_abi::PAGE_SIZE;
use thaw_abi::control::{POPULATE_READ, POPULATE_WRITE, PopulateRange};
use thaw_abi::image::{
    Mapping, SOURCE_BLOB, SOURCE_IMAGE, SOURCE_PREFETCH, SOURCE_ZERO, ancestor_depth,
};
use thaw_abi::layout::{HEAP_BASE, HEAP_FRONT};

use crate::boot::BootPlan;
use crate::hibernate::Swapped;
use crate::image::Image;
use crate::pagemap::{PageKind, PageMap};
use crate::recordings::{RECORDINGS_MAX, Recent};
use crate::sandbox::Sandbox;
use crate::state::protocol::{ANSWER_DONE, REQUEST_RECORD, RecordRequest};
use crate::state::{StateError, Subject};

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
    /// How many recordings it is the union of: 1 to [`RECORDINGS_MAX`].
    pub(crate) recordings: u8,
    /// Sorted, not overlapping.
    pub(crate) runs: Vec<Run>,
    /// The I/O cache: blobs that were mapped or read, each once, those of the last recording first.
    pub(crate) blobs: Vec<u32>,
}

/// First bytes of a stored working set.
const MAGIC: [u8; 8] = *b"THAWWSET";
/// Version of the stored form: magic, version, number of runs, number of blobs
/// (each `u32`), recordings (`u32`), image checksum, runs (start, pages, use; each
/// `u64`), blobs (each `u32`), BLAKE3 of all before. The use: in which recordings the pages were
/// touched, and from bit 8 on in which they were written, bit 0 the latest.
const VERSION: u32 = 3;
const HEAD: usize = 8 + 4 + 4 + 4 + 4 + 32;
const RUN: usize = 24;
const BLOB: usize = 4;
const CHECKSUM: usize = 32;

/// Most runs of a set. A guest decides how many it makes; beyond this, those that are
/// nearest to each other become one.
pub(crate) const RUNS_MAX: usize = 4096;
/// Most bytes of memory in the runs of a set: more is not brought in faster at boot
/// than when it is needed.
const BYTES_MAX: u64 = 1 << 30;
/// Most blobs of a set.
pub(crate) const BLOBS_MAX: usize = 4096;
/// How long recording may take: a guest can have more pages than anybody has time for.
pub(crate) const RECORDING_MAX: Duration = Duration::from_secs(1);
/// How long the state helper may take for it.
const HELPER_MAX: Duration = Duration::from_secs(3);
/// Most bytes of a set.
const STORED_MAX: usize = HEAD + RUNS_MAX * RUN + BLOBS_MAX * BLOB + CHECKSUM;

/// Gaps in a file up to this are read rather than skipped when reading ahead.
const READ_AHEAD_GAP: u64 = 64 * 1024;

/// What is needed of a sandbox to record its working set, on another thread than the
/// one that serves it.
#[derive(Debug)]
pub struct Recorder {
    subject: Subject,
    /// Blobs that it was given on request.
    blobs: BTreeSet<u32>,
}

impl Recorder {
    /// Records the working set of the sandbox, which was thawed from `plan`. Another process
    /// does so, which has to be started the first time. Takes milliseconds, or longer if
    /// the guest has made it so, but a second at most ([`io::ErrorKind::TimedOut`]) once
    /// other sandboxes have been read.
    ///
    /// # Errors
    /// The sandbox has ended ([`io::ErrorKind::NotFound`]), or the host's error.
    pub fn record(self, plan: &BootPlan) -> io::Result<WorkingSet> {
        self.record_of(plan.mappings(), plan.image_checksum())
    }

    /// Records what the sandbox, which was booted cold, has touched beside the pages of its
    /// prefetch file.
    ///
    /// # Errors
    /// As [`Recorder::record`]; one that has written to nothing else counts as ended.
    pub fn record_misses(self, plan: &BootPlan) -> io::Result<WorkingSet> {
        let is_elsewhere = |mapping: &&Mapping| mapping.source != SOURCE_PREFETCH;
        let elsewhere: Vec<Mapping> =
            plan.mappings().iter().filter(is_elsewhere).copied().collect();
        self.record_of(&elsewhere, plan.image_checksum())
    }

    /// The same of a sandbox that has woken, once it has served a request: what it needs of its
    /// swap file.
    ///
    /// # Errors
    /// As [`Recorder::record`].
    pub fn record_swap(self, swapped: &Swapped) -> io::Result<WorkingSet> {
        self.record_of(&swapped.mappings, swapped.checksum)
    }

    fn record_of(self, mappings: &[Mapping], image_checksum: [u8; 32]) -> io::Result<WorkingSet> {
        let looked_at: Vec<Mapping> =
            mappings.iter().filter(|mapping| mapping.space() == 0).copied().collect();
        let request = RecordRequest {
            kind: REQUEST_RECORD,
            mappings: looked_at.len() as u32,
            image_checksum,
        };
        let file = memory_file(bytemuck::cast_slice(&looked_at))?;
        let recorded =
            self.subject.ask(bytes_of(&request), Some(file.as_fd()), HELPER_MAX, |helper| {
                let (answer, text) = helper.finish()?;
                if answer.kind != ANSWER_DONE {
                    return Ok(Err(answer.host_error(&text)));
                }
                let bytes = helper.bytes(answer.numbers[0], STORED_MAX)?;
                let set = WorkingSet::from_bytes(&bytes).ok();
                let set = set.filter(|set| set.image_checksum == image_checksum);
                set.map(Ok).ok_or(StateError::Nonsense("its working set is damaged"))
            });
        let mut set = recorded?.map_err(|error| match error.raw_os_error() {
            Some(libc::ESRCH) => io::ErrorKind::NotFound.into(),
            _ => error,
        })?;
        let mut blobs = self.blobs;
        // Ancestors travel with every boot command.
        let is_of_blob = |mapping: &&Mapping| {
            mapping.source == SOURCE_BLOB && ancestor_depth(mapping.blob).is_none()
        };
        for mapping in mappings.iter().filter(is_of_blob) {
            if set.touches(mapping.start, mapping.start + mapping.len) {
                blobs.insert(mapping.blob);
            }
        }
        set.blobs = blobs.into_iter().take(BLOBS_MAX).collect();
        Ok(set)
    }
}

/// A file in memory that holds these bytes.
fn memory_file(bytes: &[u8]) -> io::Result<File> {
    let file = File::from(memfd_create("mappings", MemfdFlags::CLOEXEC)?);
    file.write_all_at(bytes, 0)?;
    Ok(file)
}

/// Records which pages of `mappings` a process has touched, without the blobs: what the state
/// helper does.
///
/// # Errors
/// The process has ended ([`io::ErrorKind::NotFound`]), or the host's error.
pub(crate) fn record(
    pages: &mut PageMap,
    mappings: &[Mapping],
    image_checksum: [u8; 32],
) -> io::Result<WorkingSet> {
    let mut runs = Runs::default();
    for mapping in mappings {
        record_mapping(pages, mapping, &mut runs)?;
    }
    let runs = runs.finish();
    // The memory of a process that ends goes at once, perhaps in between: what was
    // written first is there as long as anything is.
    let witness = runs.iter().find(|run| run.how == Use::Written);
    let is_there = match witness {
        Some(run) => pages.first(run.start, run.start + PAGE_SIZE)?.is_some(),
        None => false,
    };
    match is_there {
        true => Ok(WorkingSet { image_checksum, recordings: 1, runs, blobs: Vec::new() }),
        false => Err(io::ErrorKind::NotFound.into()),
    }
}

fn record_mapping(map: &mut PageMap, mapping: &Mapping, runs: &mut Runs) -> io::Result<()> {
    let (first, end) = (mapping.start, mapping.start + mapping.len);
    let mut has_content = false;
    map.runs_with_content(first, end, |found| {
        let how = match found.kind {
            PageKind::Private => Use::Written,
            PageKind::File | PageKind::Zero => Use::Read,
        };
        has_content = true;
        runs.push(Run::recorded(found.start.max(first), found.end.min(end), how));
    })?;
    // Where only zeros were read there is nothing to bring in, but the mapping was used.
    if !has_content && let Some(zeros) = map.first(first, end)? {
        let start = zeros.start.max(first);
        runs.push(Run::recorded(start, start + PAGE_SIZE, Use::Read));
    }
    Ok(())
}

/// Runs that are being recorded: sorted, and never more than twice those of a set.
#[derive(Default)]
pub(crate) struct Runs(Vec<Run>);

impl Runs {
    pub(crate) fn push(&mut self, run: Run) {
        match self.0.last_mut() {
            _ if run.start >= run.end => {}
            Some(last) if last.end == run.start && last.recent == run.recent => last.end = run.end,
            _ => self.0.push(run),
        }
        if self.0.len() >= 2 * RUNS_MAX {
            self.join_nearest();
        }
    }

    pub(crate) fn finish(mut self) -> Vec<Run> {
        if self.0.len() > RUNS_MAX {
            self.join_nearest();
        }
        let mut left = BYTES_MAX;
        self.0.retain_mut(|run| {
            run.end = run.start + (run.end - run.start).min(left);
            left -= run.end - run.start;
            run.end > run.start
        });
        self.0
    }

    /// Makes one of the runs that have the smallest gaps between them, until there are
    /// no more than a set may have.
    fn join_nearest(&mut self) {
        let gap = |pair: &[Run]| pair[1].start - pair[0].end;
        let mut gaps: Vec<u64> = self.0.windows(2).map(gap).collect();
        let excess = self.0.len() - RUNS_MAX;
        let (_, &mut widest, _) = gaps.select_nth_unstable(excess - 1);
        let mut narrower = gaps.iter().filter(|&&gap| gap < widest).count();
        let mut as_wide = excess - narrower;
        let mut joined: Vec<Run> = Vec::with_capacity(2 * RUNS_MAX);
        for run in self.0.drain(..) {
            let Some(last) = joined.last_mut() else {
                joined.push(run);
                continue;
            };
            let gap = run.start - last.end;
            let left = if gap < widest { &mut narrower } else { &mut as_wide };
            if gap <= widest && *left > 0 {
                *left -= 1;
                // To copy what was only read costs memory; to fault in what was
                // written costs a fault.
                if run.how != last.how {
                    last.how = Use::Read;
                }
                last.recent = last.recent.joined(run.recent, last.how);
                last.end = run.end;
            } else {
                joined.push(run);
            }
        }
        self.0 = joined;
    }
}

impl WorkingSet {
    /// Begins to read from outside which pages `sandbox` has touched so far. Call it
    /// after the first request.
    pub fn recorder(sandbox: &Sandbox) -> io::Result<Recorder> {
        Ok(Recorder { subject: sandbox.subject()?, blobs: sandbox.blobs_asked().collect() })
    }

    /// The bytes to be stored.
    pub fn to_bytes(&self) -> Vec<u8> {
        let len = HEAD + self.runs.len() * RUN + self.blobs.len() * BLOB + CHECKSUM;
        let mut bytes = Vec::with_capacity(len);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(self.runs.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&(self.blobs.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&u32::from(self.recordings).to_le_bytes());
        bytes.extend_from_slice(&self.image_checksum);
        for run in &self.runs {
            for number in [run.start, (run.end - run.start) / PAGE_SIZE, run.recent.word()] {
                bytes.extend_from_slice(&number.to_le_bytes());
            }
        }
        for blob in &self.blobs {
            bytes.extend_from_slice(&blob.to_le_bytes());
        }
        let checksum = blake3::hash(&bytes);
        bytes.extend_from_slice(checksum.as_bytes());
        bytes
    }

    /// Reads what [`WorkingSet::to_bytes`] wrote.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, WorkingSetError> {
        let damaged = WorkingSetError::Damaged;
        if bytes.get(..8) != Some(&MAGIC) {
            return Err(damaged);
        }
        let word = |at: usize| {
            let bytes = bytes.get(at..at + 4)?;
            Some(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        };
        match word(8) {
            Some(VERSION) => {}
            Some(version) => return Err(WorkingSetError::Version(version)),
            None => return Err(damaged),
        }
        let run_count = word(12).ok_or(damaged)? as usize;
        let blob_count = word(16).ok_or(damaged)? as usize;
        let recordings = word(20).and_then(|count| u8::try_from(count).ok()).ok_or(damaged)?;
        if run_count > RUNS_MAX
            || blob_count > BLOBS_MAX
            || !(1..=RECORDINGS_MAX).contains(&recordings)
        {
            return Err(damaged);
        }
        let runs_end = HEAD + run_count * RUN;
        let body_end = runs_end + blob_count * BLOB;
        let (body, checksum) = bytes.split_at_checked(body_end).ok_or(damaged)?;
        if blake3::hash(body).as_bytes()[..] != *checksum {
            return Err(damaged);
        }
        let mut image_checksum = [0; 32];
        image_checksum.copy_from_slice(&body[24..HEAD]);
        let mut runs: Vec<Run> = Vec::with_capacity(run_count);
        for run in body[HEAD..runs_end].chunks_exact(RUN) {
            let [start, pages, recent] = [0, 8, 16].map(|at| {
                let mut number = [0; 8];
                number.copy_from_slice(&run[at..at + 8]);
                u64::from_le_bytes(number)
            });
            let recent = Recent::from_word(recent, recordings).ok_or(damaged)?;
            let how = recent.how(recordings);
            let end = pages.checked_mul(PAGE_SIZE).and_then(|len| len.checked_add(start));
            let end = end.filter(|&end| end > start && start % PAGE_SIZE == 0).ok_or(damaged)?;
            if runs.last().is_some_and(|last| last.end > start) {
                return Err(damaged);
            }
            runs.push(Run { start, end, recent, how });
        }
        let bytes = runs.iter().try_fold(0_u64, |sum, run| sum.checked_add(run.end - run.start));
        if bytes.is_none_or(|bytes| bytes > BYTES_MAX) {
            return Err(damaged);
        }
        let blobs = body[runs_end..]
            .chunks_exact(BLOB)
            .map(|blob| u32::from_le_bytes([blob[0], blob[1], blob[2], blob[3]]))
            .collect();
        Ok(Self { image_checksum, recordings, runs, blobs })
    }

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

    /// Brings the set's pages of the image file into the page cache in large
    /// requests, without waiting; returns the bytes asked for. For cold boots.
    pub fn read_ahead(&self, image: &Image) -> io::Result<u64> {
        let ranges = self.file_ranges(image.mappings(), |mapping| mapping.source == SOURCE_IMAGE);
        read_ahead(image.file(), ranges)
    }

    /// The same for the blobs that travel with the boot command.
    pub fn read_ahead_blobs(&self, plan: &BootPlan) -> io::Result<u64> {
        let mut total = 0;
        for (&number, file) in plan.blob_numbers.iter().zip(&plan.blob_files) {
            let ranges = self.file_ranges(plan.mappings(), |mapping| {
                mapping.source == SOURCE_BLOB && mapping.blob == number
            });
            total += read_ahead(file, ranges)?;
        }
        Ok(total)
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

impl Image {
    /// Brings the image's own pages into the page cache in large requests, `most` bytes at most,
    /// without waiting: what can be done at a boot of which no working set is known. Returns the
    /// bytes asked for.
    ///
    /// # Errors
    /// The host's error.
    pub fn read_ahead(&self, most: u64) -> io::Result<u64> {
        let own = self.mappings().iter().filter(|mapping| mapping.source == SOURCE_IMAGE);
        let mut ranges: Vec<_> = own.map(|own| own.offset..own.offset + own.len).collect();
        ranges.sort_by_key(|range| range.start);
        let mut left = most;
        let mut ranges = joined(ranges, READ_AHEAD_GAP);
        ranges.retain_mut(|range| {
            range.end = range.start + (range.end - range.start).min(left);
            left -= range.end - range.start;
            !range.is_empty()
        });
        read_ahead(self.file(), ranges)
    }
}

fn read_ahead(file: &impl std::os::fd::AsFd, ranges: Vec<Range<u64>>) -> io::Result<u64> {
    let mut total = 0;
    for range in ranges {
        read_range_ahead(file, range.clone())?;
        total += range.end - range.start;
    }
    Ok(total)
}

/// Brings a part of a file into the page cache, without waiting.
pub(crate) fn read_range_ahead(file: &impl std::os::fd::AsFd, range: Range<u64>) -> io::Result<()> {
    // The host kernel cuts off a longer request without a word (mm/readahead.c).
    const REQUEST: usize = 128 * 1024;
    for start in range.clone().step_by(REQUEST) {
        let len = std::num::NonZeroU64::new((range.end - start).min(REQUEST as u64));
        fadvise(file, start, len, Advice::WillNeed)?;
    }
    Ok(())
}

/// Drops a file's pages from the page cache, as far as no process maps them.
/// Writes dirty ones to disk first.
pub fn drop_from_page_cache(file: &File) -> io::Result<()> {
    file.sync_data()?;
    fadvise(file, 0, None, Advice::DontNeed)?;
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const P: u64 = PAGE_SIZE;

    pub(crate) fn set(runs: &[(u64, u64, Use)]) -> WorkingSet {
        let runs = runs
            .iter()
            .map(|&(page, pages, how)| Run::recorded(page * P, (page + pages) * P, how))
            .collect();
        WorkingSet { image_checksum: [7; 32], recordings: 1, runs, blobs: vec![3, 70_000] }
    }

    /// A set as one is recorded.
    pub(crate) fn sample() -> WorkingSet {
        set(&[(10, 3, Use::Read), (13, 1, Use::Written), (900, 7, Use::Read)])
    }

    fn mapping(page: u64, pages: u64, source: u32, prot: u32, offset: u64) -> Mapping {
        Mapping {
            start: page * P,
            len: pages * P,
            offset: offset * P,
            source,
            blob: 0,
            prot,
            flags: 0,
        }
    }

    fn pages(ranges: &[PopulateRange]) -> Vec<(u64, u64, u64)> {
        ranges.iter().map(|range| (range.start / P, range.len / P, range.how)).collect()
    }

    #[test]
    fn the_stored_form_is_read_back() {
        let set = set(&[(10, 3, Use::Read), (13, 1, Use::Written), (900, 7, Use::Read)]);
        assert_eq!(WorkingSet::from_bytes(&set.to_bytes()), Ok(set));
    }

    /// Runs of one page each with one page between them, `count` of them.
    fn alternating(count: u64) -> Runs {
        let mut runs = Runs::default();
        for page in 0..count {
            let start = 2 * page * P;
            runs.push(Run::recorded(start, start + P, Use::Written));
        }
        runs
    }

    #[test]
    fn a_set_has_so_many_runs_however_many_the_guest_makes() {
        let count = 20 * RUNS_MAX as u64;
        let runs = alternating(count).finish();
        assert_eq!(runs.len(), RUNS_MAX);
        // Nothing that was touched is left out.
        assert_eq!((runs[0].start, runs[RUNS_MAX - 1].end), (0, (2 * count - 1) * P));
        assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start));
        assert!(runs.iter().all(|run| run.how == Use::Written));
        assert_eq!(alternating(RUNS_MAX as u64).finish().len(), RUNS_MAX);
        let set = WorkingSet { image_checksum: [0; 32], recordings: 1, runs, blobs: Vec::new() };
        assert_eq!(WorkingSet::from_bytes(&set.to_bytes()), Ok(set));
    }

    #[test]
    fn the_nearest_runs_become_one_first() {
        let mut runs = Runs::default();
        let far = |page: u64| 1000 * page * P;
        for page in 0..RUNS_MAX as u64 {
            runs.push(Run::recorded(far(page), far(page) + P, Use::Written));
        }
        let last = far(RUNS_MAX as u64 - 1);
        for (page, how) in [(2, Use::Written), (4, Use::Read)] {
            let start = last + page * P;
            runs.push(Run::recorded(start, start + P, how));
        }
        let runs = runs.finish();
        assert_eq!(runs.len(), RUNS_MAX);
        assert_eq!(runs[RUNS_MAX - 1], Run::recorded(last, last + 5 * P, Use::Read));
        assert_eq!(runs[0], Run::recorded(0, P, Use::Written));
    }

    #[test]
    fn a_set_has_so_much_memory_however_much_the_guest_touches() {
        let mut runs = Runs::default();
        runs.push(Run::recorded(0, BYTES_MAX - P, Use::Written));
        runs.push(Run::recorded(BYTES_MAX, BYTES_MAX + 9 * P, Use::Written));
        runs.push(Run::recorded(2 * BYTES_MAX, 3 * BYTES_MAX, Use::Read));
        let runs = runs.finish();
        assert_eq!(runs.iter().map(|run| run.end - run.start).sum::<u64>(), BYTES_MAX);
        assert_eq!(runs.len(), 2);
    }

    #[test]
    fn a_stored_form_with_too_much_is_refused() {
        let too_many = RUNS_MAX as u64 + 1;
        let runs: Vec<_> = (0..too_many).map(|page| (2 * page, 1, Use::Read)).collect();
        assert_eq!(WorkingSet::from_bytes(&set(&runs).to_bytes()), Err(WorkingSetError::Damaged));
        let blobs = (0..=BLOBS_MAX as u32).collect();
        let many_blobs = WorkingSet { blobs, ..set(&[]) };
        assert_eq!(WorkingSet::from_bytes(&many_blobs.to_bytes()), Err(WorkingSetError::Damaged));
        let most = BYTES_MAX / P;
        let as_much = set(&[(10, most - 1, Use::Read), (2 * most, 1, Use::Written)]);
        assert_eq!(WorkingSet::from_bytes(&as_much.to_bytes()), Ok(as_much));
        let too_much = set(&[(10, most, Use::Read), (2 * most, 1, Use::Written)]);
        assert_eq!(WorkingSet::from_bytes(&too_much.to_bytes()), Err(WorkingSetError::Damaged));
    }

    #[test]
    fn a_damaged_stored_form_is_refused() {
        let bytes = set(&[(10, 3, Use::Read), (13, 1, Use::Written)]).to_bytes();
        for len in 0..bytes.len() {
            assert!(WorkingSet::from_bytes(&bytes[..len]).is_err());
        }
        for position in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[position] ^= 0x40;
            assert!(WorkingSet::from_bytes(&bytes).is_err(), "{position}");
        }
        let mut newer = bytes.clone();
        newer[8] = 4;
        assert_eq!(WorkingSet::from_bytes(&newer), Err(WorkingSetError::Version(4)));
    }

    #[test]
    fn format_tripwire() {
        assert_eq!((VERSION, HEAD, RUN, BLOB), (3, 56, 24, 4));
    }

    #[test]
    fn populated_is_what_the_policy_says() {
        let set = set(&[
            (10, 2, Use::Read),
            (12, 9, Use::Written),
            (30, 8, Use::Written),
            (40, 3, Use::Read),
            (50, 1, Use::Written),
            (60, 1, Use::Read),
        ]);
        let mappings = [
            mapping(10, 15, SOURCE_IMAGE, 3, 0),
            mapping(30, 8, SOURCE_ZERO, 3, 0),
            // Written by the kernel for a moment, as a patched page of code is.
            mapping(40, 15, SOURCE_IMAGE, 5, 5),
            mapping(60, 4, SOURCE_IMAGE, 0, 9),
        ];
        let populate = |policy| pages(&set.populate(&mappings, policy, 100));
        assert_eq!(populate(PopulatePolicy::None), []);
        assert_eq!(populate(PopulatePolicy::Write), [(12, 9, 1), (30, 8, 1)]);
        assert_eq!(populate(PopulatePolicy::Read), [(10, 2, 0), (40, 11, 0)]);
        assert_eq!(
            populate(PopulatePolicy::Both),
            [(12, 9, 1), (10, 2, 0), (30, 8, 1), (40, 11, 0)]
        );
    }

    #[test]
    fn too_many_ranges_keep_the_longest() {
        let set = set(&[(10, 8, Use::Written), (20, 10, Use::Written), (40, 9, Use::Written)]);
        let mappings = [mapping(10, 60, SOURCE_IMAGE, 3, 0)];
        let ranges = set.populate(&mappings, PopulatePolicy::Write, 2);
        assert_eq!(pages(&ranges), [(20, 10, 1), (40, 9, 1)]);
    }

    #[test]
    fn read_ahead_joins_what_is_near_in_the_file() {
        let set = set(&[(10, 2, Use::Read), (15, 1, Use::Written), (100, 1, Use::Read)]);
        let mappings = [mapping(10, 90, SOURCE_IMAGE, 3, 1), mapping(100, 5, SOURCE_IMAGE, 1, 500)];
        let ranges = set.file_ranges(&mappings, |_| true);
        assert_eq!(ranges, [P..7 * P, 500 * P..501 * P]);
    }
}
