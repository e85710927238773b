//! Host calls for which the host has no memory left in a sandbox of several processes.
//!
//! The host has one of these processes ended then, and there is memory again
//! ([`thaw_abi::control::MSG_OUT_OF_MEMORY`]). Who touches memory waits for that in a page fault, but a host call
//! fails, and is made again here.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::{HostProcesses, vcpu};
use crate::errno::{Errno, Result};
use crate::kernel_lock;
use crate::machine::{Clocks, Vcpus};

/// Pause between two attempts, in nanoseconds.
const PAUSE_NS: u64 = 1_000_000;

/// Where the host refuses for another reason, such as too many mappings, each attempt is in vain: after that
/// nothing is tried again for so long.
const AFTER_VAIN_NS: u64 = 5_000_000_000;

/// Until when nothing is tried again, on the host's monotonic clock in nanoseconds.
static NOT_BEFORE: AtomicU64 = AtomicU64::new(0);

/// Makes a host call that fails with `ENOMEM` or `ENOBUFS` up to `attempts` times, with a millisecond
/// between them.
pub fn retry(attempts: u32, mut call: impl FnMut() -> Result<u64>) -> Result<u64> {
    match call() {
        // Who handles a signal does not wait: further signals would take more and more of the stack.
        Err(Errno::ENOMEM | Errno::ENOBUFS)
            if kernel_lock::is_enabled() && !vcpu::handles_signal() =>
        {
            retry_slowly(attempts, call)
        }
        outcome => outcome,
    }
}

#[cold]
fn retry_slowly(attempts: u32, mut call: impl FnMut() -> Result<u64>) -> Result<u64> {
    for _ in 1..attempts {
        if HostProcesses::monotonic_ns() < NOT_BEFORE.load(Relaxed) {
            break;
        }
        HostProcesses::wait(&AtomicU32::new(0), 0, Some(PAUSE_NS));
        match call() {
            Err(Errno::ENOMEM | Errno::ENOBUFS) => {}
            outcome => return outcome,
        }
    }
    let outcome = call();
    if outcome.is_err() {
        NOT_BEFORE.store(HostProcesses::monotonic_ns() + AFTER_VAIN_NS, Relaxed);
    }
    outcome
}
