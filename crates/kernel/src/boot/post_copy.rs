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
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::errno::Result;
use crate::host::gate::Gate;
use crate::platform::kernel_lock;

/// How many host processes wait. It changes under the kernel lock.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// The memory of all address spaces but the first, which is on its way.
pub(super) struct Rest {
    /// All host processes share it, so it is closed once.
    gate: ManuallyDrop<Gate>,
}

impl Rest {
    /// What so many host processes are going to wait for, each once.
    pub fn awaited_by(count: usize, gate: Gate) -> Self {
        WAITING.store(count, Relaxed);
        let mut rest = Self { gate: ManuallyDrop::new(gate) };
        if count == 0 {
            rest.close();
        }
        rest
    }

    /// Waits, in a host process that has nothing of its memory yet. Others have the kernel lock
    /// meanwhile.
    ///
    /// # Errors
    /// It does not come.
    pub fn wait(&mut self) -> Result<()> {
        kernel_lock::release();
        let opened = self.gate.wait();
        kernel_lock::acquire();
        if WAITING.fetch_sub(1, Relaxed) == 1 {
            self.close();
        }
        opened
    }

    fn close(&mut self) {
        // SAFETY: it is done once: nobody waits any more, here or in another host process.
        unsafe { ManuallyDrop::drop(&mut self.gate) }
    }
}
