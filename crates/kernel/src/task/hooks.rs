//! What processes ask of the layers above theirs, which `boot` registers at start.

use super::Process;
use super::signal::Signal;
use crate::platform::registers::Frame;
use crate::sync::Late;

/// The layers above processes. All is called with the kernel lock.
pub trait Hooks: Sync {
    /// No thread can run: freezes the sandbox if this is the moment; whether it has.
    fn freeze_if_due(&self) -> bool;

    /// The last thread of a process ends, and its descriptors are closed. What others may wait for goes:
    /// locks and the like. It has its memory yet.
    fn process_ends(&self, process: &Process);

    /// The last thread of a process has ended, its descriptors are closed and its memory is
    /// given back; nobody has been told yet. What files and the like keep for it goes.
    fn process_ended(&self, process: &Process);

    /// A fault ends the process of the running thread. `code` and `address` are those of
    /// the signal (sigaction(2)).
    fn fatal_fault(&self, frame: &Frame, signal: Signal, code: i32, address: u64);

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
