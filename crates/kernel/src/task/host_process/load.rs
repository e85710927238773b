//! How many vCPUs a host process uses: as many as there are threads that compute, and one
//! for all those that make system calls in quick succession.
//!
//! The calls of the latter go through one kernel lock, and they wake each other.
//! What runs next on the vCPU that woke it needs no wake-up across processors, which
//! costs more than most calls do.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use super::{Activity, HostProcess, Vcpu, is_own, own_host_process, own_space, own_vcpu};
use crate::platform::machine::{Clocks, Machine};
use crate::task::scheduler::TICK_NS;

/// A vCPU on which system calls follow each other faster than this, in nanoseconds on
/// average, is talkative.
const TALKATIVE_NS: u64 = 100_000;
/// It stays so for this many judgements that find few calls: the host may not have
/// run it.
const TALKATIVE_FOR: u32 = 2;

fn is_talkative(calls: u64, within_ns: u64) -> bool {
    calls.saturating_mul(TALKATIVE_NS) > within_ns
}

/// See [`requests_begun`]. Changes under the kernel lock.
static REQUESTS_BEGUN: AtomicU64 = AtomicU64::new(0);

/// A thread makes a system call.
#[inline]
pub fn count_call() {
    let calls = &own_vcpu().calls;
    calls.store(calls.load(Relaxed).wrapping_add(1), Relaxed);
    add_one(&REQUESTS_BEGUN);
}

/// The host asks for something.
pub fn count_request() {
    add_one(&REQUESTS_BEGUN);
}

/// By the only one who changes it.
#[inline]
fn add_one(count: &AtomicU64) {
    count.store(count.load(Relaxed) + 1, Relaxed);
}

/// How many system calls and requests of the host have begun to be handled in this boot. Whoever
/// handles one: what was learnt when there were as many was learnt since that began.
pub fn requests_begun() -> u64 {
    REQUESTS_BEGUN.load(Relaxed)
}

impl HostProcess {
    /// Judges the vCPUs by their system calls since this was last done, unless that
    /// is too short a time.
    pub fn judge(&self) {
        let passed_ns = self.since_judged_ns();
        if passed_ns < TICK_NS / 2 {
            return;
        }
        self.judged_at.store(Machine::monotonic_ns(), Relaxed);
        for vcpu in self.vcpus() {
            let calls = vcpu.calls.load(Relaxed);
            let made = calls.wrapping_sub(vcpu.calls_judged.swap(calls, Relaxed));
            let left = match is_talkative(made.into(), passed_ns) {
                true => TALKATIVE_FOR + 1,
                false => vcpu.talkative_for.load(Relaxed).saturating_sub(1),
            };
            vcpu.talkative_for.store(left, Relaxed);
        }
    }

    /// For how long the vCPUs have not been judged, in nanoseconds.
    pub fn since_judged_ns(&self) -> u64 {
        Machine::monotonic_ns() - self.judged_at.load(Relaxed)
    }

    /// Whether threads that wait are to have another vCPU: those in use compute.
    pub fn wants_help(&self) -> bool {
        self.talkative().count() == 0
    }

    /// As [`HostProcess::wants_help`], for a vCPU that is idle itself.
    pub(super) fn wants_own_help(&self) -> bool {
        !self.talkative().any(|vcpu| !is_own(vcpu))
    }

    /// Lets only one vCPU go on with threads that are talkative.
    pub fn gather(&self) {
        for vcpu in self.talkative().skip(1) {
            vcpu.park(true);
            vcpu.interrupt(self.host_pid());
        }
    }

    fn talkative(&self) -> impl Iterator<Item = &Vcpu> {
        self.vcpus().filter(|vcpu| {
            vcpu.activity.get() == Activity::Active && vcpu.talkative_for.load(Relaxed) > 0
        })
    }
}

/// The alarm has gone off while this vCPU was idle: whether it helps those that are
/// not.
pub(super) fn helps() -> bool {
    let host_process = own_host_process();
    host_process.judge();
    let helps = !own_space().run_queue.is_empty() && host_process.wants_own_help();
    if helps {
        own_vcpu().park(false);
    }
    helps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_successions_of_calls_are_talkative() {
        const MS: u64 = 1_000_000;
        assert!(!is_talkative(0, 0) && !is_talkative(0, MS));
        assert!(!is_talkative(5, MS) && is_talkative(50, MS));
        // A server that is asked once in a while computes, as far as that goes.
        assert!(!is_talkative(1000, 1000 * MS));
    }
}
