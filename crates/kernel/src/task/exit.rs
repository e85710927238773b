//! The end of threads and processes.

use alloc::sync::Arc;

use thaw_abi::control::{Exit, MSG_EXIT};

use super::Thread;
use crate::boot::control;

/// Ends the running process, and with the first process the sandbox.
pub fn exit_group(code: u32) -> ! {
    end_sandbox(Exit { code: code & 0xff, signal: 0 })
}

/// Ends the running process by a signal.
pub fn killed_by(signal: u32) -> ! {
    end_sandbox(Exit { code: 0, signal })
}

fn end_sandbox(exit: Exit) -> ! {
    crate::syscall::trace::summary();
    control::send(MSG_EXIT, 0, bytemuck::bytes_of(&exit), &[]);
    let code = if exit.signal != 0 { 128 + exit.signal } else { exit.code };
    crate::platform::panic::exit(code as u64)
}

/// Frees a thread that has ended, once it is off its kernel stack.
pub fn reap(thread: Arc<Thread>) {
    crate::state::kernel().tasks.threads.lock().remove(&thread.tid);
}
