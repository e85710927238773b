//! Recording a working set from outside, and the runs that are being recorded.

use super::stored::STORED_MAX;
use super::{BLOBS_MAX, BYTES_MAX, RUNS_MAX, Run, Use, WorkingSet};
use crate::boot::BootPlan;
use crate::hibernate::Swapped;
use crate::pagemap::{PageKind, PageMap};
use crate::sandbox::Sandbox;
use crate::state::protocol::{ANSWER_DONE, REQUEST_RECORD, RecordRequest};
use crate::state::{StateError, Subject};
use bytemuck::bytes_of;
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use thaw_abi::PAGE_SIZE;
use thaw_abi::image::{Mapping, SOURCE_BLOB, SOURCE_PREFETCH, ancestor_depth};

/// How long recording may take: a guest can have more pages than anybody has time for.
pub(crate) const RECORDING_MAX: Duration = Duration::from_secs(1);
/// How long the state helper may take for it.
const HELPER_MAX: Duration = Duration::from_secs(3);
/// What is needed of a sandbox to record its working set, on another thread than the
/// one that serves it.
#[derive(Debug)]
pub struct Recorder {
    subject: Subject,
    /// Blobs that it was given on request.
    blobs: BTreeSet<u32>,
}

impl Recorder {
    /// The same, and recording ends with an error soon after this is false.
    pub fn while_wanted(mut self, wanted: Arc<AtomicBool>) -> Self {
        self.subject.wanted = Some(wanted);
        self
    }

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
            self.subject.ask(bytes_of(&request), &[file.as_fd()], HELPER_MAX, |helper| {
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
}
