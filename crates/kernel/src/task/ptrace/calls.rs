//! Stops at system calls (ptrace(2), "Syscall-stops").

use super::stop::stop;
use super::{Mode, Options, Reason, Stop, watch};
use crate::platform::registers::{Frame, TRAP_FLAG};
use crate::task::signal::{self, SI_USER, SIGTRAP, SignalInfo};
use crate::task::thread::{Thread, current};

/// What `PTRACE_GETEVENTMSG` tells at the two stops.
const MESSAGE_BEGINS: u64 = 1;
const MESSAGE_ENDS: u64 = 2;
/// `TRAP_BRKPT`: the code of a step over a system call (`user_single_step_report` in Linux).
const TRAP_BREAKPOINT: i32 = 1;

/// What becomes of a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entered {
    /// It is to be performed.
    Perform,
    /// It is not; its result stands in the registers.
    Skip,
}

/// The running thread begins a system call, which its tracer may change.
pub fn enter(frame: &Frame) -> Entered {
    let thread = current();
    if thread.tracee.with(|tracing| tracing.has_trap_flag) == Some(true) {
        frame.set_r11(frame.r11() & !TRAP_FLAG);
    }
    if mode(&thread) != Some(Mode::ToCall) {
        return Entered::Perform;
    }
    stop_at(&thread, Reason::CallBegins, MESSAGE_BEGINS);
    if thread.is_dying() { Entered::Skip } else { Entered::Perform }
}

/// ptrace(2): a call number of -1 leaves the call out.
pub fn is_left_out(frame: &Frame) -> bool {
    frame.orig_rax() as i32 == -1
}

/// The running thread has done a system call.
pub fn leave(frame: &Frame) {
    let thread = current();
    match mode(&thread) {
        None => {}
        // After rt_sigreturn(2) it has the flags of before.
        Some(Mode::Free) => watch::go_on(&thread),
        Some(Mode::ToCall) => stop_at(&thread, Reason::CallEnds, MESSAGE_ENDS),
        Some(Mode::Step) => end_step(&thread, frame),
    }
}

fn mode(thread: &Thread) -> Option<Mode> {
    thread.tracee.with(|tracing| tracing.mode)
}

fn stop_at(thread: &Thread, reason: Reason, message: u64) {
    let is_marked = thread.tracee.with(|tracing| {
        tracing.message = message;
        tracing.options.contains(Options::SYSGOOD)
    });
    let mark = if is_marked == Some(true) { 0x80 } else { 0 };
    let injected = stop(thread, Stop::notice(reason, SIGTRAP, SIGTRAP.number() | mark));
    if let Some(info) = injected {
        signal::send_to_thread(thread, SignalInfo { code: SI_USER, ..info });
    }
}

/// A step over a system call ends behind it.
fn end_step(thread: &Thread, frame: &Frame) {
    let info = SignalInfo::fault(SIGTRAP, TRAP_BREAKPOINT, frame.rip());
    thread.signals.borrow_mut().pending.push_front(info);
    thread.needs_attention();
}
