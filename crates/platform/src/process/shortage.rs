//! Host calls for which the host has no memory left in a sandbox of several processes.
//!
//! The host has one of these processes ended then, and there is memory again
//! ([`thaw_abi::control::MSG_OUT_OF_MEMORY`]). Who touches memory waits for that in a page fault, but a host call
//! fails, and is made again here.

use core::sync::atomic::AtomicU32;

use super::HostProcesses;
use crate::errno::{Errno, Result};
use crate::kernel_lock;
use crate::machine::Vcpus;

/// Pause between two attempts, in nanoseconds.
const PAUSE_NS: u64 = 1_000_000;

/// Makes a host call that fails with `ENOMEM` or `ENOBUFS` up to `attempts` times, with a millisecond
/// between them.
pub fn retry(attempts: u32, mut call: impl FnMut() -> Result<u64>) -> Result<u64> {
    match call() {
        Err(Errno::ENOMEM | Errno::ENOBUFS) if kernel_lock::is_enabled() => {
            retry_slowly(attempts, call)
        }
        outcome => outcome,
    }
}

#[cold]
fn retry_slowly(attempts: u32, mut call: impl FnMut() -> Result<u64>) -> Result<u64> {
    for _ in 1..attempts {
        HostProcesses::wait(&AtomicU32::new(0), 0, Some(PAUSE_NS));
        match call() {
            Err(Errno::ENOMEM | Errno::ENOBUFS) => {}
            outcome => return outcome,
        }
    }
    call()
}
