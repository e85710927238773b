//! Delivery: what happens to pending signals when a thread is about to return
//! to the guest.

use super::frame::push_frame;
use super::{
    Action, DefaultAction, SI_KERNEL, SIGSEGV, SIGTRAP, SYNCHRONOUS, Signal, SignalInfo,
    UNBLOCKABLE, bit, default_action, take_pending,
};
use crate::errno::{Errno, Result};
use crate::host::control;
use crate::mm::shared::{SEGV_MAPERR, page_in};
use crate::platform::machine::{Machine, SystemCallSites, ThreadState, Vcpus};
use crate::platform::registers::{DEBUG_EXCEPTION, Frame, RETURN_FULL};
use crate::task::hooks::above;
use crate::task::process::Life;
use crate::task::ptrace::{self, Group, Stepped};
use crate::task::thread::{Thread, current};
use crate::task::wait::wait_uninterruptibly;
use crate::task::{exit, host_process, oom_killer, scheduler};

/// `restart_syscall` (restart_syscall(2)).
const SYS_RESTART: u64 = 219;

/// Does what is to be done before the running thread returns to the guest.
pub fn before_return(frame: &Frame) {
    let thread = current();
    thread.context.attended();
    host_process::attend_interruption();
    host_process::own_space().settle();
    scheduler::rest_if_asked();
    if Machine::take_doorbell() {
        control::handle_messages();
        scheduler::rest_if_asked();
        if !scheduler::yield_if_due() {
            scheduler::watch_clock();
        }
    }
    if Machine::take_alarm() {
        scheduler::tick();
    }
    if crate::mm::populate::before_return() {
        thread.needs_attention();
    }
    loop {
        wait_while_stopped(&thread);
        if !ptrace::before_return(&thread) {
            break;
        }
    }
    oom_killer::wait_for_memory();
    if thread.is_dying() {
        exit::exit_dying();
    }
    deliver(&thread, frame);
}

/// Waits as long as the process is stopped, unless a tracer decides when the thread goes on.
fn wait_while_stopped(thread: &Thread) {
    let process = &thread.process;
    let _: Result<()> = wait_uninterruptibly(&process.resumed, || {
        let is_stopped = matches!(process.life.get(), Life::Stopped(_));
        let waits = is_stopped && ptrace::wait_for_tracer(thread) == Group::Waits;
        (!waits).then_some(Ok(()))
    });
}

fn deliver(thread: &Thread, frame: &Frame) {
    let mut handled = false;
    loop {
        let mask = thread.signals.borrow_mut().mask;
        let Some(info) = take_pending(thread, !mask) else { break };
        let Some(info) = ptrace::deliver(thread, info) else { continue };
        handled |= act(thread, frame, info);
        if matches!(thread.process.life.get(), Life::Stopped(_)) {
            // The rest has to wait until the process goes on.
            thread.needs_attention();
            return;
        }
    }
    if !handled {
        restart_without_handler(frame);
    }
    let mut signals = thread.signals.borrow_mut();
    if let Some(saved) = signals.saved_mask.take() {
        signals.mask = saved;
    }
    drop(signals);
    // The old mask may let through what the temporary one blocked.
    let mask = thread.signals.borrow_mut().mask;
    if super::pending_set(thread) & !mask != 0 {
        thread.needs_attention();
    }
}

/// Does what the signal's action says; whether a handler was set up.
fn act(thread: &Thread, frame: &Frame, info: SignalInfo) -> bool {
    let signal = info.signal;
    let action = *thread.process.signals.borrow_mut().action(signal);
    match action.handler {
        Action::IGNORE => false,
        Action::DEFAULT if is_unwanted(thread, &info) => false,
        Action::DEFAULT => {
            match default_action(signal) {
                DefaultAction::Terminate => exit::killed_by(signal),
                DefaultAction::Stop => {
                    super::job_control::stop(&thread.process, signal);
                    thread.needs_attention();
                }
                DefaultAction::Ignore => {}
            }
            false
        }
        _ => {
            restart_with_handler(frame, &action);
            call_handler(thread, frame, &action, info)
        }
    }
}

/// Whether init of a PID namespace has no handler for a signal that was blocked when it came: then only
/// faults and what cannot be caught count (`get_signal` in kernel/signal.c).
fn is_unwanted(thread: &Thread, info: &SignalInfo) -> bool {
    let is_fault = info.code > 0 && bit(info.signal) & SYNCHRONOUS != 0;
    let must_act = is_fault || bit(info.signal) & UNBLOCKABLE != 0;
    !must_act && thread.process.leads_pid_namespace()
}

/// Has the thread go on in a handler; `false` if there is no room for its frame. That is a SIGSEGV in place
/// of the signal, which may have a handler with another stack (`signal_setup_done` in Linux'
/// kernel/signal.c).
fn call_handler(thread: &Thread, frame: &Frame, action: &Action, info: SignalInfo) -> bool {
    let signal = info.signal;
    let (current, mask) = {
        let signals = thread.signals.borrow_mut();
        (signals.mask, signals.saved_mask.unwrap_or(signals.mask))
    };
    ptrace::clear_trap_flag(thread);
    if push_frame(thread, frame, action, &info, mask).is_err() {
        if signal == SIGSEGV {
            exit::killed_by(SIGSEGV);
        }
        force(thread, SignalInfo::new(SIGSEGV, SI_KERNEL));
        return false;
    }
    thread.signals.borrow_mut().saved_mask = None;
    // A temporary mask (sigsuspend(2)) goes on in the handler.
    let mut blocked = current | action.mask;
    if action.flags & Action::NODEFER == 0 {
        blocked |= bit(signal);
    }
    thread.signals.borrow_mut().mask = blocked & !UNBLOCKABLE;
    super::pass_on(&thread.process);
    ptrace::handler_begins(thread);
    if action.flags & Action::RESETHAND != 0 {
        // Its flags stay, as on Linux.
        thread.process.signals.borrow_mut().action(signal).handler = Action::default().handler;
    }
    true
}

/// The error that an interrupted system call has left, if it has.
fn interrupted(frame: &Frame) -> Option<Errno> {
    if frame.orig_rax() == u64::MAX {
        return None;
    }
    Errno::from_return(frame.rax()).err()
}

/// Before a handler runs: `EINTR`, or again (signal(7), "Interruption of system
/// calls and library functions by signal handlers").
fn restart_with_handler(frame: &Frame, action: &Action) {
    match interrupted(frame) {
        Some(Errno::ERESTARTNOHAND | Errno::ERESTART_RESTARTBLOCK) => {
            frame.set_rax(Errno::EINTR.to_return())
        }
        Some(Errno::ERESTARTSYS) if action.flags & Action::RESTART == 0 => {
            frame.set_rax(Errno::EINTR.to_return())
        }
        Some(Errno::ERESTARTSYS | Errno::ERESTARTNOINTR) => restart(frame, frame.orig_rax()),
        _ => {}
    }
}

fn restart_without_handler(frame: &Frame) {
    match interrupted(frame) {
        Some(Errno::ERESTARTSYS | Errno::ERESTARTNOINTR | Errno::ERESTARTNOHAND) => {
            restart(frame, frame.orig_rax())
        }
        Some(Errno::ERESTART_RESTARTBLOCK) => restart(frame, SYS_RESTART),
        _ => {}
    }
}

/// Sends the thread back to its `syscall` instruction, or to what replaced it.
fn restart(frame: &Frame, number: u64) {
    frame.set_rax(number);
    frame.set_rip(host_process::own_space().gate.restart_address(frame.rip()));
    frame.set_how(RETURN_FULL);
    // Only once, even if several signals are handled.
    frame.set_orig_rax(u64::MAX);
}

/// A fault of the guest becomes its signal. If that is blocked or ignored, the
/// process ends (sigprocmask(2), NOTES).
pub fn guest_fault(frame: &Frame) {
    let thread = current();
    if frame.signal() == SIGSEGV.number()
        && page_in(&host_process::own_space(), frame.address(), frame.code())
    {
        return;
    }
    let (mut code, address) = classify(&thread, frame);
    if frame.signal() == SIGTRAP.number() && frame.trap() == DEBUG_EXCEPTION {
        match ptrace::stepped(&thread, frame, code) {
            Stepped::Stops(as_code) => code = as_code,
            Stepped::GoesOn => return,
        }
    }
    // The host has no others either.
    let Some(signal) = Signal::from_number(frame.signal()) else { return };
    let mut info = SignalInfo::fault(signal, code, address);
    if signal == SIGTRAP && code == SI_KERNEL {
        info.payload[0] = 0;
    }
    let action = *thread.process.signals.borrow_mut().action(signal);
    let blocked = thread.signals.borrow_mut().mask & bit(signal) != 0;
    let is_fatal = blocked || action.handler == Action::IGNORE || action.handler == Action::DEFAULT;
    // A tracer hears of it before it ends anything.
    if is_fatal && !thread.tracee.is_traced() {
        above().fatal_fault(frame, signal, code, address);
        exit::killed_by(signal);
    }
    force(&thread, info);
}

/// A signal that the running thread must not overlook: if it is blocked or ignored, its default action is
/// done (`force_sig_info_to_task` in Linux' kernel/signal.c).
pub fn force(thread: &Thread, info: SignalInfo) {
    let signal = info.signal;
    let action = *thread.process.signals.borrow_mut().action(signal);
    let is_blocked = thread.signals.borrow_mut().mask & bit(signal) != 0;
    if is_blocked || action.handler == Action::IGNORE {
        *thread.process.signals.borrow_mut().action(signal) = Action::default();
        thread.signals.borrow_mut().mask &= !bit(signal);
    }
    thread.signals.borrow_mut().pending.push_front(info);
    thread.needs_attention();
}

/// `si_code` and `si_addr` as on Linux, where what the host saw differs from
/// what the guest has mapped.
fn classify(thread: &Thread, frame: &Frame) -> (i32, u64) {
    const SEGV_ACCERR: i32 = 2;
    const BUS_ADRERR: i32 = 2;
    if frame.signal() != SIGSEGV.number() || frame.code() != SEGV_MAPERR {
        return (frame.code(), frame.address());
    }
    match thread.process.mm().find(frame.address()) {
        None => (SEGV_MAPERR, frame.address()),
        // Pages of shared mappings that may not be touched have never come.
        Some(area) if area.prot == 0 => (SEGV_ACCERR, frame.address()),
        Some(_) => {
            // A page of the area that the host does not have: it lies behind the
            // end of the mapped file.
            frame.set_signal(super::SIGBUS.number());
            (BUS_ADRERR, frame.address())
        }
    }
}
