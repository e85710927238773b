//! Coming to rest at the entry point, and telling the host what to save.
//!
//! The host reads the sandbox's memory from outside. What the kernel does is
//! to recognize the moment (design: entry point by introspection; Metropolis
//! §3.2), to bring everything that lives in registers into memory, and to
//! describe the memory in a [`thaw_abi::freeze`] report.

mod report;

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

use thaw_abi::control::{EntryPoint, FLAG_FREEZE_AT_ENTRY, MSG_ENTRY_POINT, MSG_RESUME};

use crate::boot::{arena, control, lazy};
use crate::errno::{Errno, Result};
use crate::fs::file::Events;
use crate::mm::vma::VmaFlags;
use crate::state::kernel;
use crate::task::wait::WaitQueue;

/// The host, the guest or a signal has asked for a freeze.
static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Asks for a freeze as soon as no thread can run.
pub fn request() {
    REQUESTED.store(true, Relaxed);
}

/// The program asks for a freeze (a write to `/dev/thaw`). `EAGAIN` until it has
/// happened; nothing to wait for if the host does not want one.
pub fn ask() -> Result<()> {
    if kernel().config.get().flags & FLAG_FREEZE_AT_ENTRY == 0 {
        return Ok(());
    }
    request();
    Err(Errno::EAGAIN)
}

/// Where to wait for a freeze to have happened.
pub fn happened() -> &'static WaitQueue {
    &kernel().frozen
}

/// Whether now, while no thread can run, is the moment to freeze.
pub fn is_due() -> bool {
    if REQUESTED.load(Relaxed) {
        return true;
    }
    let config = kernel().config.get();
    config.flags & FLAG_FREEZE_AT_ENTRY != 0 && crate::net::waits_for_clients()
}

/// Reports to the host and waits until it says how to go on. A copy does not
/// come back here: it begins in [`crate::boot::thaw`].
pub fn freeze() {
    REQUESTED.store(false, Relaxed);
    kernel().config.lock().flags &= !FLAG_FREEZE_AT_ENTRY;
    lazy::map_all();
    let spaces = kernel().tasks.spaces();
    let threads = kernel().tasks.all_threads();
    if !arena::is_shared() {
        spaces.iter().for_each(|space| space.recall_shared(0, u64::MAX));
    }
    threads.iter().for_each(|thread| thread.save_fpu());
    for space in &spaces {
        // In every copy this memory is mapped from the image.
        let all = thaw_abi::layout::GUEST_MAX;
        space.change_flags(0, all, VmaFlags::FROM_IMAGE, VmaFlags::empty());
    }
    // Nothing may be allocated from here on: the report says where the heap ends.
    let report = report::build(&spaces, &threads);
    kernel().clocks.freeze();
    let entry =
        EntryPoint { report_address: report.as_ptr() as u64, report_len: report.len() as u64 };
    control::send(MSG_ENTRY_POINT, 0, bytemuck::bytes_of(&entry), &[]);
    control::wait_for(MSG_RESUME);
    kernel().clocks.thaw();
    happened().wake_all(Events::OUT);
}
