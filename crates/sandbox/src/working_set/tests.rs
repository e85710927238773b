//! Sets that are recorded, stored and asked.

use super::stored::{BLOB, HEAD, RUN, VERSION};
use super::*;
use thaw_abi::image::SOURCE_IMAGE;

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
    Mapping { start: page * P, len: pages * P, offset: offset * P, source, blob: 0, prot, flags: 0 }
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
    // Miri takes long for a checksum: it looks at some.
    let step = if cfg!(miri) { 7 } else { 1 };
    let bytes = set(&[(10, 3, Use::Read), (13, 1, Use::Written)]).to_bytes();
    for len in (0..bytes.len()).step_by(step) {
        assert!(WorkingSet::from_bytes(&bytes[..len]).is_err());
    }
    for position in (0..bytes.len()).step_by(step) {
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
    assert_eq!(populate(PopulatePolicy::Both), [(12, 9, 1), (10, 2, 0), (30, 8, 1), (40, 11, 0)]);
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
