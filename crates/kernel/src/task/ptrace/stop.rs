//! Stopping, and telling the tracer (ptrace(2), "Stopped states").

use alloc::sync::Arc;

use super::{Attachment, Event, Mode, Reason, Stop, Tracing, clear_trap_flag, urge, watch};
use crate::state::kernel;
use crate::task::process::Life;
use crate::task::signal::{self, Action, SIGCHLD, SIGTRAP, Signal, SignalInfo, bit};
use crate::task::thread::{Thread, current};
use crate::task::wait::Events;
use crate::task::{Process, scheduler};

/// What a tracee does about the stop of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// It waits until its process goes on: nobody traces it.
    Waits,
    /// Its tracer decides.
    IsTraced,
}

impl Stop {
    pub(super) fn for_signal(info: SignalInfo) -> Self {
        let code = info.signal.number();
        Self { reason: Reason::Signal, code, info: Some(info), is_news: true }
    }

    /// A stop that the kernel makes up, with the information that Linux gives (`ptrace_do_notify` in
    /// kernel/signal.c).
    pub(super) fn notice(reason: Reason, signal: Signal, code: u32) -> Self {
        let mut info = SignalInfo::new(signal, code as i32);
        let thread = current();
        let uid = {
            let own = thread.process.credentials.borrow_mut();
            own.user_namespace.shown_user(own.uid)
        };
        info.payload[0] = u64::from(thread.own_number()) | u64::from(uid) << 32;
        Self { reason, code, info: Some(info), is_news: true }
    }

    pub(super) fn event(event: Event) -> Self {
        let code = SIGTRAP.number() | (event as u32) << 8;
        Self::notice(Reason::Event(event), SIGTRAP, code)
    }
}

/// Stops the running thread for its tracer, if it has one; the signal with which it goes on.
pub(super) fn stop(thread: &Thread, stop: Stop) -> Option<SignalInfo> {
    let outlasts_end = stop.reason == Reason::Event(Event::Exit);
    if thread.is_dying() && !outlasts_end {
        return None;
    }
    *thread.tracee.injected.borrow_mut() = None;
    thread.tracee.with(|tracing| tracing.stop = Some(stop))?;
    clear_trap_flag(thread);
    tell_tracer(thread, stop.code);
    while thread.tracee.has_stopped() && (!thread.is_dying() || outlasts_end) {
        scheduler::block_uninterruptibly(&thread.tracee.resumed);
    }
    thread.tracee.with(|tracing| tracing.stop = None);
    watch::begin(thread);
    thread.tracee.injected.borrow_mut().take()
}

/// A tracer hears of a stop by `SIGCHLD`, unless it does not want to, and by wait(2).
fn tell_tracer(thread: &Thread, code: u32) {
    let Some(by) = thread.tracee.tracer() else { return };
    let Some(tracer) = kernel().tasks.process(by) else { return };
    let action = *tracer.signals.borrow_mut().action(SIGCHLD);
    if action.flags & Action::NOCLDSTOP == 0 && action.handler != Action::IGNORE {
        let mut info = signal::child_trapped(&thread.process, code & 0x7f);
        info.set_sender(thread.tid());
        signal::send_to_process(&tracer, info);
    }
    tracer.children_changed.wake_all(Events::IN);
}

/// A signal is about to be delivered: what the tracer makes of it.
pub fn deliver(thread: &Thread, info: SignalInfo) -> Option<SignalInfo> {
    if !thread.tracee.is_traced() {
        return Some(info);
    }
    let info = stop(thread, Stop::for_signal(info))?;
    let is_blocked = thread.signals.borrow_mut().mask & bit(info.signal) != 0;
    if is_blocked {
        signal::send_to_thread(thread, info);
    }
    (!is_blocked).then_some(info)
}

/// The handler of a signal is about to run. A step ends at its first instruction.
pub fn handler_begins(thread: &Thread) {
    if thread.tracee.with(|tracing| tracing.mode) == Some(Mode::Step) {
        let code = SIGTRAP.number();
        stop(thread, Stop::notice(Reason::Signal, SIGTRAP, code));
    }
    watch::go_on(thread);
}

/// Whether a thread of a stopped process waits for its tracer rather than for `SIGCONT`.
pub fn wait_for_tracer(thread: &Thread) -> Group {
    if thread.tracee.is_traced() { Group::IsTraced } else { Group::Waits }
}

/// Makes the stops that are due before the running thread returns to the guest; whether there was one.
pub fn before_return(thread: &Thread) -> bool {
    let due = thread.tracee.with(|tracing| due_stop(tracing, &thread.process)).flatten();
    let Some((signal, code, is_event)) = due else { return false };
    if is_event {
        stop(thread, Stop::notice(Reason::Event(Event::Stop), signal, code));
    } else {
        stop(thread, Stop { reason: Reason::Group, code, info: None, is_news: true });
    }
    true
}

/// The signal and the code of the stop that is due, and whether it is an event.
fn due_stop(tracing: &mut Tracing, process: &Process) -> Option<(Signal, u32, bool)> {
    if core::mem::take(&mut tracing.trap_is_due) {
        let signal = match process.life.get() {
            Life::Stopped(by) => by,
            _ => SIGTRAP,
        };
        return Some((signal, signal.number() | (Event::Stop as u32) << 8, true));
    }
    let signal = tracing.group_stop.take()?;
    Some((signal, signal.number(), false))
}

/// The process of a thread has been stopped: its tracer hears of it.
pub(in crate::task) fn stopped(thread: &Thread, by: Signal) {
    let is_traced = thread.tracee.with(|tracing| match tracing.attachment {
        Attachment::Classic => tracing.group_stop = Some(by),
        Attachment::Seized => tracing.trap_is_due = true,
    });
    if is_traced.is_some() {
        urge(thread);
    }
}

/// `SIGCONT` has come: who was seized stops, to tell its tracer.
pub(in crate::task) fn continued(process: &Process) {
    if kernel().tasks.tracees.is_empty() {
        return;
    }
    let threads = process.threads.borrow_mut().clone();
    threads.iter().for_each(thread_continued);
}

fn thread_continued(thread: &Arc<Thread>) {
    let is_seized = thread.tracee.with(|tracing| {
        tracing.group_stop = None;
        let is_seized = tracing.attachment == Attachment::Seized;
        tracing.trap_is_due |= is_seized;
        if core::mem::take(&mut tracing.is_listening) {
            tracing.stop = None;
        }
        is_seized
    });
    if is_seized == Some(true) {
        thread.tracee.resumed.wake_all(Events::IN);
        urge(thread);
    }
}

/// `SIGKILL` has come: nobody stops any more.
pub(in crate::task) fn killed(process: &Process) {
    if kernel().tasks.tracees.is_empty() {
        return;
    }
    let threads = process.threads.borrow_mut().clone();
    for thread in threads {
        thread.tracee.with(|tracing| {
            (tracing.stop, tracing.is_listening) = (None, false);
            // Nor before it ends.
            tracing.options.remove(super::Options::EXIT);
        });
        thread.tracee.resumed.wake_all(Events::IN);
    }
}
