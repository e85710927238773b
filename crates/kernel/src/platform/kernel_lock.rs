//! The kernel lock: one vCPU at a time is in the kernel.
//!
//! It is taken on entry and given up on the way back to the guest and while a
//! vCPU waits in the host. A sandbox with a single vCPU has no use for it and
//! pays nothing: the lock is inert until [`enable`] is called, which happens
//! before a second vCPU exists. The word lies in memory that all host processes
//! of the sandbox share by then.
#![allow(unsafe_code)]

use core::sync::atomic::{
    AtomicBool, AtomicU32, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

use super::host;

static ENABLED: AtomicBool = AtomicBool::new(false);
static WORD: AtomicU32 = AtomicU32::new(FREE);

const FREE: u32 = 0;
const TAKEN: u32 = 1;
/// Taken, and somebody waits in the host.
const CONTENDED: u32 = 2;

/// Looks at the word this often before waiting in the host: longer than most
/// stays in the kernel, shorter than a host call.
const SPINS: u32 = 200;

/// Whether there may be other vCPUs.
pub fn is_enabled() -> bool {
    ENABLED.load(Relaxed)
}

/// Makes the lock real; the caller holds it afterwards.
pub fn enable() {
    if !ENABLED.load(Relaxed) {
        WORD.store(TAKEN, Relaxed);
        ENABLED.store(true, Release);
    }
}

/// Takes the lock.
#[inline]
pub fn acquire() {
    if ENABLED.load(Relaxed) && WORD.compare_exchange(FREE, TAKEN, Acquire, Relaxed).is_err() {
        wait();
    }
}

#[cold]
fn wait() {
    for _ in 0..SPINS {
        core::hint::spin_loop();
        if WORD.load(Relaxed) == FREE
            && WORD.compare_exchange(FREE, TAKEN, Acquire, Relaxed).is_ok()
        {
            return;
        }
    }
    while WORD.swap(CONTENDED, Acquire) != FREE {
        host::futex_wait(&WORD, CONTENDED, None);
    }
}

/// Gives the lock up.
#[inline]
pub fn release() {
    if ENABLED.load(Relaxed) && WORD.swap(FREE, Release) == CONTENDED {
        host::futex_wake(&WORD, 1);
    }
}
