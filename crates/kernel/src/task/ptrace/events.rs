//! Stops at the births, programs and ends of threads (ptrace(2), "PTRACE_EVENT stops").

use alloc::sync::Arc;

use super::stop::stop;
use super::{Attachment, Event, Options, Stop, begin};
use crate::state::kernel;
use crate::task::clone::CloneFlags;
use crate::task::ids::Tid;
use crate::task::process::ExitStatus;
use crate::task::signal::{self, SI_USER, SIGCHLD, SIGSTOP, SIGTRAP, Signal, SignalInfo};
use crate::task::thread::{Thread, current};
use crate::task::visit;

/// A thread's id as the running thread's tracer sees it, for the message of an event.
pub fn for_tracer(tid: Tid) -> u64 {
    let tracer = current().tracee.tracer().and_then(|by| kernel().tasks.process(by));
    tracer.map_or(0, |tracer| tid.number_in(&tracer.pid_namespace)).into()
}

/// Stops the running thread for an event that its tracer has asked for; whether it has.
pub fn report(event: Event, message: u64) -> bool {
    let thread = current();
    let is_wanted = thread.tracee.with(|tracing| {
        let is_wanted = tracing.options.contains(event.option());
        if is_wanted {
            tracing.message = message;
        }
        is_wanted
    });
    let is_wanted = is_wanted == Some(true);
    if is_wanted {
        stop(&thread, Stop::event(event));
    }
    is_wanted
}

/// The event that a clone(2) of the running thread is, if its tracer has asked for that
/// (`kernel_clone` in Linux' kernel/fork.c).
pub fn of_clone(flags: CloneFlags, exit_signal: Option<Signal>) -> Option<Event> {
    let options = current().tracee.with(|tracing| tracing.options)?;
    if flags.contains(CloneFlags::UNTRACED) {
        return None;
    }
    let is_thread = flags.contains(CloneFlags::THREAD);
    let event = match exit_signal {
        _ if flags.contains(CloneFlags::VFORK) => Event::Vfork,
        Some(SIGCHLD) if !is_thread => Event::Fork,
        _ => Event::Clone,
    };
    options.contains(event.option()).then_some(event)
}

/// Has the tracer of the running thread trace a new one, which nobody knows yet: it begins with a stop.
pub(in crate::task) fn inherit(child: &Arc<Thread>) {
    let own = current();
    let Some((tracer, by, attachment, options)) = own
        .tracee
        .with(|tracing| (tracing.tracer, tracing.by, tracing.attachment, tracing.options))
    else {
        return;
    };
    begin(child, tracer, by, attachment, options);
    match attachment {
        Attachment::Seized => {
            child.tracee.with(|tracing| tracing.trap_is_due = true);
        }
        Attachment::Classic => {
            let info = SignalInfo::new(SIGSTOP, SI_USER);
            child.signals.borrow_mut().pending.push_back(info);
        }
    }
    child.needs_attention();
}

/// A new thread, which was not published, is not traced after all.
pub(in crate::task) fn disinherit(child: &Thread) {
    if child.tracee.is_traced() {
        super::detach(child, None);
    }
}

/// The running thread, which its tracer knew by a number, has a new program. Without an option for that it gets a `SIGTRAP`,
/// if it was not seized.
pub fn executed(old: u64) {
    let thread = current();
    let Some((attachment, options)) =
        thread.tracee.with(|tracing| (tracing.attachment, tracing.options))
    else {
        return;
    };
    visit::put_back_sites(&thread.process);
    thread.tracee.with(|tracing| tracing.debug = None);
    if options.contains(Options::EXEC) {
        report(Event::Exec, old);
    } else if attachment == Attachment::Classic {
        let info = SignalInfo::from_process(SIGTRAP, SI_USER, &thread.process);
        signal::send_to_thread(&thread, info);
    }
}

/// The running thread is about to end.
pub fn exits(status: ExitStatus) {
    report(Event::Exit, status.to_wait_status().into());
}
