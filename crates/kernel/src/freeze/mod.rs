//! Coming to rest at the entry point, and telling the host what to save.
//!
//! The host reads the sandbox's memory from outside. What the kernel does is
//! to recognize the moment (design: entry point by introspection; Metropolis
//! §3.2), to bring everything that lives in registers into memory, and to
//! describe the memory in a [`thaw_abi::freeze`] report.

mod report;

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use thaw_abi::control::{
    CAUSE_ASKED, CAUSE_HOST, CAUSE_SIGNAL, CAUSE_WAITS, EntryPoint, FLAG_ENTRY_ASKED,
    FLAG_ENTRY_STDIN, FLAG_ENTRY_UDP, FLAG_FREEZE_AT_ENTRY, MSG_ENTRY_POINT, MSG_RESUME,
};

use crate::errno::{Errno, Result};
use crate::host::control;
use crate::mm::vma::VmaFlags;
use crate::mm::{arena, lazy};
use crate::state::{Config, kernel};
use crate::task::wait::Events;
use crate::task::wait::{WaitQueue, wait_uninterruptibly};

/// Why a freeze was asked for (`CAUSE_*`); 0 if none was.
static REQUESTED: AtomicU32 = AtomicU32::new(0);

/// The host asks for a freeze as soon as no thread can run.
pub fn request() {
    REQUESTED.store(CAUSE_HOST, Relaxed);
}

/// The program asks for a freeze (a write to `/dev/thaw`). `EAGAIN` until it has
/// happened; nothing to wait for if the host does not want one.
pub fn ask() -> Result<()> {
    ask_because(CAUSE_ASKED)
}

fn ask_because(cause: u32) -> Result<()> {
    if kernel().config.get().flags & FLAG_FREEZE_AT_ENTRY == 0 {
        return Ok(());
    }
    REQUESTED.store(cause, Relaxed);
    Err(Errno::EAGAIN)
}

/// The program sends `signal`. If that is what it is to be frozen at, waits until
/// it has happened, says so, and the signal is not delivered.
pub fn takes_signal(signal: u32) -> bool {
    if !kernel().config.get().freezes_at(signal) {
        return false;
    }
    // Only the end of the thread makes this fail.
    let _ = wait_uninterruptibly(happened(), || match ask_because(CAUSE_SIGNAL) {
        Err(Errno::EAGAIN) => None,
        outcome => Some(outcome),
    });
    true
}

/// The host sends `signal`: as [`takes_signal`], without waiting.
pub fn takes_signal_from_host(signal: u32) -> bool {
    let takes = kernel().config.get().freezes_at(signal);
    if takes {
        REQUESTED.store(CAUSE_SIGNAL, Relaxed);
    }
    takes
}

impl Config {
    /// Whether `signal` freezes the program.
    fn freezes_at(&self, signal: u32) -> bool {
        self.flags & FLAG_FREEZE_AT_ENTRY != 0 && signal != 0 && signal == self.entry_signal
    }

    /// Whether the first wait for a client freezes the program.
    fn freezes_when_waiting(&self) -> bool {
        self.flags & (FLAG_FREEZE_AT_ENTRY | FLAG_ENTRY_ASKED) == FLAG_FREEZE_AT_ENTRY
    }
}

/// Where to wait for a freeze to have happened.
pub fn happened() -> &'static WaitQueue {
    &kernel().frozen
}

/// Whether now, while no thread can run, is the moment to freeze, and why.
pub fn is_due() -> Option<u32> {
    match REQUESTED.load(Relaxed) {
        0 => (kernel().config.get().freezes_when_waiting() && waits_for_clients())
            .then_some(CAUSE_WAITS),
        cause => Some(cause),
    }
}

/// Whether the program waits for its first request, however those come.
fn waits_for_clients() -> bool {
    match kernel().config.get().flags & (FLAG_ENTRY_UDP | FLAG_ENTRY_STDIN) {
        FLAG_ENTRY_UDP => crate::net::waits_for_datagrams(),
        FLAG_ENTRY_STDIN => crate::fs::stdio::waits_for_input(),
        _ => crate::net::waits_for_clients(),
    }
}

/// Reports to the host and waits until it says how to go on. A copy does not
/// come back here: it begins in [`crate::boot::thaw`].
pub fn freeze(cause: u32) {
    REQUESTED.store(0, Relaxed);
    kernel().config.lock().flags &= !FLAG_FREEZE_AT_ENTRY;
    crate::net::prepare_freeze();
    lazy::map_all();
    let spaces = kernel().tasks.spaces();
    let threads = kernel().tasks.all_threads();
    if !arena::is_shared() {
        spaces.iter().for_each(|space| space.recall_shared(0, u64::MAX));
    }
    threads.iter().for_each(|thread| thread.context.save_fpu());
    for space in &spaces {
        // In every copy this memory is mapped from the image.
        let all = thaw_abi::layout::GUEST_MAX;
        space.change_flags(0, all, VmaFlags::FROM_IMAGE, VmaFlags::empty());
    }
    // Nothing may be allocated from here on: the report says where the heap ends.
    let report = report::build(&spaces, &threads);
    kernel().clocks.freeze();
    let entry = EntryPoint {
        report_address: report.as_ptr() as u64,
        report_len: report.len() as u64,
        cause,
        reserved: 0,
    };
    control::send(MSG_ENTRY_POINT, 0, bytemuck::bytes_of(&entry), &[]);
    control::wait_for(MSG_RESUME);
    kernel().clocks.thaw();
    happened().wake_all(Events::OUT);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_freezes_is_what_the_host_said() {
        let config = |flags, entry_signal| Config { flags, entry_signal, ..Config::default() };
        let waiting = config(FLAG_FREEZE_AT_ENTRY, 0);
        assert!(waiting.freezes_when_waiting());
        assert!(!waiting.freezes_at(0) && !waiting.freezes_at(12));
        let signal = config(FLAG_FREEZE_AT_ENTRY | FLAG_ENTRY_ASKED, 12);
        assert!(!signal.freezes_when_waiting());
        assert!(signal.freezes_at(12) && !signal.freezes_at(10));
        // A copy, and a program that nobody wants to freeze.
        let copy = config(0, 12);
        assert!(!copy.freezes_when_waiting() && !copy.freezes_at(12));
    }
}
