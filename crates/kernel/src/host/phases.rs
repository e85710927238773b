//! When each phase of this boot ended.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use thaw_abi::control::{Booted, MSG_BOOTED};

use super::control;
use crate::platform::machine::{Clocks, Machine};

static RECEIVED: AtomicU64 = AtomicU64::new(0);
static MAPPED: AtomicU64 = AtomicU64::new(0);
static FIRST_INSTRUCTION: AtomicU64 = AtomicU64::new(0);
static FIRST_BYTE: AtomicU64 = AtomicU64::new(0);
static REPORTED: AtomicBool = AtomicBool::new(false);
/// Nobody waits for an answer: the first instruction is what is reported.
static REPORTS_START: AtomicBool = AtomicBool::new(false);

fn note(phase: &AtomicU64) -> bool {
    let first = phase.load(Relaxed) == 0;
    if first {
        phase.store(Machine::monotonic_ns(), Relaxed);
    }
    first
}

/// The command is here that starts the copy; for one that was held or forked,
/// this is not the first.
pub fn received() {
    RECEIVED.store(Machine::monotonic_ns(), Relaxed);
}

/// All eager mappings are in place.
pub fn mapped() {
    note(&MAPPED);
}

/// The copy begins without a client: it is reported as soon as it runs, since it may never
/// wait nor answer.
pub fn report_start() {
    REPORTS_START.store(true, Relaxed);
}

/// The guest is about to run.
pub fn first_instruction() {
    if note(&FIRST_INSTRUCTION) && REPORTS_START.load(Relaxed) {
        report();
    }
}

/// The guest has sent its first response byte: report.
pub fn first_byte() {
    if note(&FIRST_BYTE) {
        report();
    }
}

/// Longest first request for which anything waits, in nanoseconds: some programs never
/// answer.
const FIRST_REQUEST_NS: u64 = 1_000_000_000;

/// Whether the guest has sent no response byte yet, and has not run for long.
pub fn may_be_in_first_request() -> bool {
    FIRST_BYTE.load(Relaxed) == 0
        && Machine::monotonic_ns().saturating_sub(FIRST_INSTRUCTION.load(Relaxed))
            < FIRST_REQUEST_NS
}

/// Reports the phases once, when the sandbox first waits if nothing was sent.
pub fn report_if_due() {
    if !REPORTED.load(Relaxed) && FIRST_INSTRUCTION.load(Relaxed) != 0 {
        report();
    }
}

fn report() {
    REPORTED.store(true, Relaxed);
    let booted = Booted {
        received_ns: RECEIVED.load(Relaxed),
        mapped_ns: MAPPED.load(Relaxed),
        first_instruction_ns: FIRST_INSTRUCTION.load(Relaxed),
        first_byte_ns: FIRST_BYTE.load(Relaxed),
    };
    control::send(MSG_BOOTED, 0, bytemuck::bytes_of(&booted), &[]);
}
