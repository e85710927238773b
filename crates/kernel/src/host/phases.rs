//! When each phase of this boot ended, and of waking up.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use thaw_abi::control::{AWAKE_DESCRIPTOR, Awake, Booted, MSG_AWAKE, MSG_BOOTED};

use super::control;
use crate::platform::machine::{Clocks, Machine};

static RECEIVED: AtomicU64 = AtomicU64::new(0);
static MAPPED: AtomicU64 = AtomicU64::new(0);
static FIRST_INSTRUCTION: AtomicU64 = AtomicU64::new(0);
static FIRST_BYTE: AtomicU64 = AtomicU64::new(0);
static REPORTED: AtomicBool = AtomicBool::new(false);
/// Nobody waits for an answer: the first instruction is what is reported.
static REPORTS_START: AtomicBool = AtomicBool::new(false);

/// How the sandbox woke: number, times, cause and whether it was hibernated.
static AWAKE: [AtomicU64; 5] = [const { AtomicU64::new(0) }; 5];
static IS_AWAKE_TO_BE_SAID: AtomicBool = AtomicBool::new(false);
/// What has woken the sandbox is only found by its next wait.
static IS_TO_LOOK: AtomicBool = AtomicBool::new(false);

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
    say_awake_at(Machine::monotonic_ns);
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
    if REPORTS_START.load(Relaxed) {
        // All of its threads wait: it is as far as it gets by itself.
        first_instruction();
    }
    if !IS_TO_LOOK.swap(false, Relaxed) {
        say_awake();
    }
    if !REPORTED.load(Relaxed) && FIRST_INSTRUCTION.load(Relaxed) != 0 {
        report();
    }
}

/// The sandbox goes on. It says so when it has sent the first bytes of an answer, or when it
/// first waits: whoever hears of it would take the processor that the answer needs.
pub fn awake(awake: Awake) {
    let Awake { number, woken_ns, ready_ns, cause, was_hibernated, .. } = awake;
    let all = [number, woken_ns, ready_ns, cause.into(), was_hibernated.into()];
    for (noted, value) in AWAKE.iter().zip(all) {
        noted.store(value, Relaxed);
    }
    IS_TO_LOOK.store(cause == AWAKE_DESCRIPTOR, Relaxed);
    IS_AWAKE_TO_BE_SAID.store(true, Relaxed);
}

/// Says that the sandbox goes on, if it has not said so yet. It has answered nobody.
pub fn say_awake() {
    say_awake_at(|| 0);
}

fn say_awake_at(answered_ns: impl Fn() -> u64) {
    if !IS_AWAKE_TO_BE_SAID.load(Relaxed) {
        return;
    }
    IS_AWAKE_TO_BE_SAID.store(false, Relaxed);
    let [number, woken_ns, ready_ns, cause, was_hibernated] =
        AWAKE.each_ref().map(|noted| noted.load(Relaxed));
    let (cause, was_hibernated) = (cause as u32, was_hibernated as u32);
    let answered_ns = answered_ns();
    let awake = Awake { number, woken_ns, ready_ns, answered_ns, cause, was_hibernated };
    control::send(MSG_AWAKE, 0, bytemuck::bytes_of(&awake), &[]);
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
