//! Populating the recorded working set of an image.
//!
//! Pages of the kernel's own memory are populated before anything runs, pages
//! of the guest when it first comes back into the kernel: then it runs already,
//! and one call makes the private copies that would otherwise be a fault each.
#![allow(unsafe_code)]

use core::cell::Cell;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

use thaw_abi::control::{POPULATE_WRITE, PopulateRange};
use thaw_abi::layout::GUEST_MAX;

use crate::io::{IOV_MAX, IoVec};
use crate::platform::boot_area::RANGES;
use crate::platform::machine::{Machine, Memory, Populate};
use crate::platform::memory::KernelRange;

/// Most ranges that are remembered.
const MAX: usize = 4096;
/// Without the call for many ranges at once, shorter ones are not worth a call
/// each, in bytes (docs/decisions/0004).
const LONG: u64 = 8 * 4096;

/// Bytes that [`some`] populates: some 25 µs, since nobody is to wait for it.
const FEW: u64 = 8 * 4096;

static COUNT: AtomicUsize = AtomicUsize::new(0);
static DONE: AtomicUsize = AtomicUsize::new(0);
static STATE: AtomicU32 = AtomicU32::new(IDLE);

const IDLE: u32 = 0;
/// The frozen call has not returned yet.
const WAITING: u32 = 1;
/// The guest runs.
const DUE: u32 = 2;

/// Populates what concerns the kernel and the reads, and remembers the rest.
pub fn begin(ranges: &[PopulateRange]) {
    let plan = RANGES.cells(MAX);
    let mut count = 0;
    for range in ranges {
        if range.how != POPULATE_WRITE {
            // A range that cannot be populated is faulted in when it is touched.
            let _ = Machine::populate(range.start, range.len, Populate::Read);
        } else if count < MAX {
            plan[count].set(IoVec { base: range.start, len: range.len });
            count += 1;
        }
    }
    // Ranges are sorted, and the kernel's memory lies above the guest's.
    let guest = plan[..count].partition_point(|range| range.get().base < GUEST_MAX);
    copy_pages(&plan[guest..count]);
    COUNT.store(guest, Relaxed);
    DONE.store(0, Relaxed);
    STATE.store(if guest > 0 { WAITING } else { IDLE }, Relaxed);
}

/// Populates at once what is left: the copy is held, and nobody waits for it.
pub fn finish() {
    if STATE.swap(IDLE, Relaxed) != IDLE {
        copy_next(u64::MAX);
    }
}

/// Populates nothing more, and gives back the memory of the plan.
pub fn forget() {
    STATE.store(IDLE, Relaxed);
    let (start, len) = RANGES.range(MAX);
    // SAFETY: the plan is not used any more, and its values may change at any time.
    let _ = Machine::discard(unsafe { KernelRange::new(start, len) });
}

/// Populates a few of what is left, for a copy that waits. Returns whether there were any.
pub fn some() -> bool {
    let is_pending = is_pending();
    if is_pending && copy_next(FEW) == 0 {
        STATE.store(IDLE, Relaxed);
    }
    is_pending
}

/// Populates at most `bytes` of the ranges that are left, and returns how many are
/// left then.
fn copy_next(mut bytes: u64) -> usize {
    let left = &RANGES.cells(COUNT.load(Relaxed))[DONE.load(Relaxed)..];
    let fits = |range: &&Cell<IoVec>| {
        let rest = bytes.checked_sub(range.get().len);
        bytes = rest.unwrap_or(bytes);
        rest.is_some()
    };
    let whole = left.iter().take_while(fits).count();
    match left.get(whole) {
        // A long range goes bit by bit.
        Some(next) if whole == 0 => {
            let IoVec { base, len } = next.get();
            copy_pages(&[Cell::new(IoVec { base, len: bytes })]);
            next.set(IoVec { base: base + bytes, len: len - bytes });
        }
        _ => copy_pages(&left[..whole]),
    }
    DONE.fetch_add(whole, Relaxed);
    left.len() - whole
}

/// Whether something is left to do, for the thread that is about to run.
pub fn is_pending() -> bool {
    STATE.load(Relaxed) != IDLE
}

/// Called on every way back to the guest that needs attention: the second time
/// after a thaw, populates. Returns whether to be called again.
pub fn before_return() -> bool {
    match STATE.load(Relaxed) {
        WAITING => {
            STATE.store(DUE, Relaxed);
            true
        }
        DUE => {
            finish();
            false
        }
        _ => false,
    }
}

fn copy_pages(ranges: &[Cell<IoVec>]) {
    for chunk in ranges.chunks(IOV_MAX) {
        if Machine::populate_ranges(chunk, Populate::Write).is_err() {
            for range in chunk.iter().map(Cell::get).filter(|range| range.len >= LONG) {
                let _ = Machine::populate(range.base, range.len, Populate::Write);
            }
        }
    }
}
