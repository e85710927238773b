//! What processes ask of the layers above theirs, which `boot` registers at start.

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::Process;
use crate::errno::Result;
use crate::platform::registers::Frame;
use crate::platform::user::UserAddress;
use crate::sync::Late;

/// The layers above processes. All is called with the kernel lock.
pub trait Hooks: Sync {
    /// No thread can run: freezes the sandbox if this is the moment; whether it has.
    fn freeze_if_due(&self) -> bool;

    /// The last thread of a process has ended, its descriptors are closed and its memory is
    /// given back; nobody has been told yet. What files and the like keep for it goes.
    fn process_ended(&self, process: &Process);

    /// Reserves a descriptor of the running process for one that is being made, and writes
    /// its number to `at`. It is there once the result is called (clone(2), `CLONE_PIDFD`).
    fn new_pidfd(&self, process: Arc<Process>, at: UserAddress) -> Result<Box<dyn FnOnce()>>;

    /// A fault ends the process of the running thread. `code` and `address` are those of
    /// the signal (sigaction(2)).
    fn fatal_fault(&self, frame: &Frame, signal: u32, code: i32, address: u64);

    /// The first process has ended, and so the sandbox does.
    fn sandbox_ends(&self);
}

static ABOVE: Late<&'static dyn Hooks> = Late::empty();

/// Names the layers above. To be called once, before there is a process.
pub fn register(hooks: &'static dyn Hooks) {
    ABOVE.set(hooks);
}

pub(super) fn above() -> &'static dyn Hooks {
    *ABOVE
}
