//! The stored form of a working set.

use super::{BLOBS_MAX, BYTES_MAX, RUNS_MAX, Run, WorkingSet, WorkingSetError};
use crate::recordings::{RECORDINGS_MAX, Recent};
use thaw_abi::PAGE_SIZE;

/// First bytes of a stored working set.
const MAGIC: [u8; 8] = *b"THAWWSET";
/// Version of the stored form: magic, version, number of runs, number of blobs
/// (each `u32`), recordings (`u32`), image checksum, runs (start, pages, use; each
/// `u64`), blobs (each `u32`), BLAKE3 of all before. The use: in which recordings the pages were
/// touched, and from bit 8 on in which they were written, bit 0 the latest.
pub(super) const VERSION: u32 = 3;
pub(super) const HEAD: usize = 8 + 4 + 4 + 4 + 4 + 32;
pub(super) const RUN: usize = 24;
pub(super) const BLOB: usize = 4;
const CHECKSUM: usize = 32;

/// Most bytes of a set.
pub(super) const STORED_MAX: usize = HEAD + RUNS_MAX * RUN + BLOBS_MAX * BLOB + CHECKSUM;

impl WorkingSet {
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
}
