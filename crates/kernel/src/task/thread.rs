//! Threads: kernel objects with a kernel stack and a saved context.
#![allow(unsafe_code)]

use alloc::sync::Arc;

use super::Process;
use crate::sync::Lock;

/// A guest thread.
pub struct Thread {
    /// Thread id, as the guest sees it.
    pub tid: u32,
    /// The process it belongs to.
    pub process: Arc<Process>,
    /// Name (`PR_SET_NAME`), NUL-padded.
    pub name: Lock<[u8; 16]>,
}

/// The running thread.
pub fn current() -> &'static Thread {
    unimplemented!()
}

/// The running thread's process.
pub fn current_process() -> &'static Process {
    &current().process
}
