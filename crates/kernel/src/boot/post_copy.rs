//! Thawing an image that is still being written (post-copy, as live migration has it): the first
//! address space goes on at once, and every other one when the host says that all memory is there.
//!
//! ```text
//! first host process   maps the kernel's memory, forks the others, maps its own ─▶ runs
//! each other one       waits at the gate, without the kernel lock ──── byte ─▶ maps its own ─▶ runs
//! ```
//!
//! One that waits is active to the others, so that the sandbox does not come to rest meanwhile.

use core::mem::ManuallyDrop;

use thaw_abi::control::MSG_FAILED;

use crate::host::control;
use crate::host::gate::Gate;
use crate::platform::{kernel_lock, panic};
use crate::task::{freeze_request, host_process};

/// Why a copy ends that is not complete.
const NOT_COPIED: &str = "the rest of the memory of this copy has not been copied";

/// The memory of all address spaces but the first, which is on its way.
pub(super) struct Rest {
    /// All host processes share it, so it is closed once.
    gate: ManuallyDrop<Gate>,
}

impl Rest {
    /// What so many host processes are going to wait for, each once.
    pub fn awaited_by(count: usize, gate: Gate) -> Self {
        freeze_request::await_memory(count as u32);
        let mut rest = Self { gate: ManuallyDrop::new(gate) };
        if count == 0 {
            rest.close();
        }
        rest
    }

    /// Waits, in a host process that has nothing of its memory yet. Others have the kernel lock
    /// meanwhile. If it does not come, the sandbox ends.
    pub fn wait(&mut self) {
        kernel_lock::release();
        // The host closes its end if it gives up, or has gone.
        let opened = self.gate.wait(None);
        kernel_lock::acquire();
        if opened.is_err() {
            control::send(MSG_FAILED, 0, NOT_COPIED.as_bytes(), &[]);
            panic::die_with(NOT_COPIED)
        }
        if freeze_request::memory_has_come() {
            self.close();
            if freeze_request::is_at_once() {
                host_process::interrupt_everybody();
            }
        }
    }

    fn close(&mut self) {
        // SAFETY: it is done once: nobody waits any more, here or in another host process.
        unsafe { ManuallyDrop::drop(&mut self.gate) }
    }
}
