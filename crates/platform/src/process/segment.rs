//! The segments of the guest: `%fs`, its thread-local storage, and `%gs`.
//!
//! The kernel needs `%gs` for itself and few programs use it, so the guest's is kept
//! apart only once it has one: from then on all system calls of its process come
//! through the trapped entry, where the vCPU is known by the signal stack, and every
//! return to the thread sets what it had. Until then a guest that reads `%gs` sees the
//! kernel's, and may set it again.
#![allow(unsafe_code)]

use core::sync::atomic::Ordering::Relaxed;

use super::vcpu;
use crate::machine::ThreadState;

fn gs_base() -> u64 {
    let base: u64;
    // SAFETY: FSGSBASE is a requirement, checked by `thaw doctor`.
    unsafe { core::arch::asm!("rdgsbase {}", out(reg) base, options(nostack, preserves_flags)) };
    base
}

/// Points `%gs` to a block.
pub(super) fn set_gs_base(block: u64) {
    // SAFETY: as above.
    unsafe { core::arch::asm!("wrgsbase {}", in(reg) block, options(nostack, preserves_flags)) };
}

/// What a signal has interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Interrupted {
    /// The guest.
    Guest,
    /// The kernel, on a stack of its own.
    Kernel,
    /// Another signal's handler, which may not have come to [`take_gs`] yet.
    Handler,
}

/// First thing in the trapped entry, on the signal stack at `rsp`: takes `%gs` back from a
/// guest that has changed it, and notes what the guest has.
pub(super) fn take_gs(rsp: u64, interrupted: Interrupted) {
    let block = vcpu::block_of_signal_stack(rsp);
    let found = gs_base();
    if block.this.get() == 0 {
        // A vCPU that is just starting has that of its maker.
        return;
    }
    let is_own = found == block.this.get();
    if !is_own {
        set_gs_base(block.this.get());
        if interrupted == Interrupted::Handler {
            block.took_gs.store(true, Relaxed);
        }
    } else if interrupted == Interrupted::Handler || block.took_gs.swap(false, Relaxed) {
        // A handler in between has taken and noted it.
        return;
    } else if interrupted == Interrupted::Kernel {
        return;
    }
    // SAFETY: the running thread lives as long as it runs.
    if let Some(thread) = unsafe { block.thread.get().as_ref() } {
        thread.set_gs_base(if is_own { 0 } else { found });
    }
}
