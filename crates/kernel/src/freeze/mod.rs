//! Coming to rest at the entry point, and telling the host what to save.
//!
//! The host reads the sandbox's memory from outside. What the kernel does is
//! to recognize the moment (design: entry point by introspection; Metropolis
//! §3.2), to bring everything that lives in registers into memory, and to
//! describe the memory in a [`thaw_abi::freeze`] report.

mod hibernate;
mod report;

use alloc::vec::Vec;

use thaw_abi::control::{
    CAUSE_CHECKPOINT, CAUSE_WAITS, EntryPoint, FLAG_ENTRY_STDIN, FLAG_ENTRY_UDP,
    FLAG_FREEZE_AT_ENTRY, FLAG_SAY_LOSSES, MSG_ENTRY_POINT, MSG_LOSES, MSG_RESUME, MSG_WRITTEN,
};

use report::Use;

use crate::host::{control, phases};
use crate::mm::arena;
use crate::mm::vma::VmaFlags;
use crate::platform::machine::ThreadState;
use crate::state::kernel;
use crate::task::freeze_request;
use crate::task::host_process::{self, twins};
use crate::task::wait::Events;

/// Whether now, while no thread can run, is the moment to freeze, and why.
fn is_due() -> Option<u32> {
    match freeze_request::cause() {
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

/// Freezes the sandbox if this is the moment, or lets it rest if the host wants that; whether it
/// has. A freeze comes first: nobody would ask for it again, and what ends a rest may never come.
pub fn freeze_if_due() -> bool {
    let cause = is_due();
    let is_wanted = cause.is_some() || freeze_request::wants_rest();
    if !is_wanted || !host_process::has_all_memory() {
        return false;
    }
    if let Some(cause) = cause {
        freeze(cause);
        return true;
    }
    let rest = freeze_request::take_rest();
    rest.inspect(hibernate::rest).is_some()
}

/// Reports to the host and waits until it says how to go on. A copy does not
/// come back here: it begins in [`crate::boot::thaw`].
fn freeze(cause: u32) {
    phases::say_awake();
    let is_checkpoint = cause == CAUSE_CHECKPOINT;
    freeze_request::done(cause);
    if !is_checkpoint {
        kernel().config.borrow_mut().flags &= !FLAG_FREEZE_AT_ENTRY;
    }
    crate::net::prepare_freeze();
    if !is_checkpoint {
        say_losses();
        kernel().missing_programs.prepare_freeze();
        kernel().calls.recent.prepare_freeze();
        kernel().calls.unknown.prepare_freeze();
    }
    kernel().tasks.usage.prepare_freeze();
    let mut report = come_to_rest(Use::Copies);
    let may_go_on = is_checkpoint && freeze_request::may_have_twin();
    let name = |number, process| report::name_process(&mut report, number, process);
    let twin = may_go_on.then(|| twins::fork(name)).flatten();
    let entry = EntryPoint {
        report_address: report.as_ptr() as u64,
        report_len: report.len() as u64,
        cause,
        process: twin.unwrap_or(0),
    };
    let tell = || control::send(MSG_ENTRY_POINT, 0, bytemuck::bytes_of(&entry), &[]);
    match twin {
        Some(_) => tell(),
        None => control::wait_untouched(MSG_RESUME, tell),
    }
    if is_checkpoint {
        // Time has passed, and nothing else has happened here.
        host_process::go_on();
    } else {
        kernel().clocks.thaw();
        crate::time::timer::look_again();
        kernel().frozen.wake_all(Events::OUT);
    }
}

/// Tells whoever asked for it which connections copies will find reset, and which files will die
/// with them.
fn say_losses() {
    if kernel().config.get().flags & FLAG_SAY_LOSSES == 0 {
        return;
    }
    if let Some(losses) = crate::net::losses() {
        control::send(MSG_LOSES, 0, bytemuck::bytes_of(&losses), &[]);
    }
    let written = kernel().fs.written();
    if written.numbers.files + written.numbers.directories > 0 {
        control::send(MSG_WRITTEN, 0, bytemuck::bytes_of(&written.numbers), &written.paths);
    }
}

/// Brings all state into memory, notes the time, and describes what to save.
fn come_to_rest(saved_for: Use) -> Vec<u8> {
    host_process::complete_memory();
    crate::mm::file_parts::forget();
    let spaces = kernel().tasks.spaces();
    let threads = kernel().tasks.all_threads();
    if !arena::is_shared() {
        spaces.iter().for_each(|space| space.recall_shared(0, u64::MAX));
    }
    threads.iter().for_each(|thread| thread.context.save_fpu());
    for (number, space) in spaces.iter().enumerate() {
        space.set_number_in_next_image(number as u32);
        // In every copy this memory is mapped from the image.
        let all = thaw_abi::layout::GUEST_MAX;
        // No area is split, so this does not fail.
        let _ = space.change_flags(0, all, VmaFlags::FROM_IMAGE, VmaFlags::empty());
    }
    host_process::number(&spaces);
    // Nothing may be allocated from here on: the report says where the heap ends.
    let report = report::build(&spaces, &threads, saved_for);
    kernel().clocks.freeze();
    report
}
