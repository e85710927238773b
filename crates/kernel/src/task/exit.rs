//! The end of threads and processes.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering::Relaxed;

use thaw_abi::control::{Exit, MSG_EXIT};

use super::hooks::above;
use super::process::{ExitStatus, FIRST_PID, Life, Process, Remains, Resources};
use super::signal::{self, Signal, SignalInfo};
use super::thread::{Thread, current};
use super::{futex, pid_namespace, ptrace, scheduler, seccomp};
use crate::host::control;
use crate::platform::machine::ThreadState;
use crate::state::kernel;
use crate::task::ids::Pid;
use crate::task::wait::Events;

/// exit_group(2): ends the running process.
pub fn exit_group(code: u32) -> ! {
    begin_group_exit(&current().process, ExitStatus::Exited(code as u8));
    exit_thread(ExitStatus::Exited(code as u8))
}

/// Ends the running process by a signal.
pub fn killed_by(signal: Signal) -> ! {
    begin_group_exit(&current().process, ExitStatus::Killed(signal));
    exit_thread(ExitStatus::Killed(signal))
}

/// Makes all threads of a process end; the first status counts.
pub fn begin_group_exit(process: &Process, status: ExitStatus) {
    process.exiting.borrow_mut().get_or_insert(status);
    end_threads(process, None);
    process.resumed.wake_all(Events::IN);
}

/// Tells all threads of a process except `survivor` to end.
pub fn end_threads(process: &Process, survivor: Option<&Thread>) {
    let threads = process.threads.borrow_mut().clone();
    for thread in &threads {
        if survivor.is_some_and(|survivor| core::ptr::eq(survivor, Arc::as_ptr(thread))) {
            continue;
        }
        thread.dying.store(true, Relaxed);
        thread.needs_attention();
        scheduler::interrupt(thread);
    }
}

/// Ends a thread that has been told to.
pub fn exit_dying() -> ! {
    let status = current().process.exiting.get().unwrap_or(ExitStatus::Exited(0));
    exit_thread(status)
}

/// exit(2): ends the running thread, and with the last one the process.
pub fn exit_thread(status: ExitStatus) -> ! {
    ptrace::events::exits(status);
    leave(status);
    // Nothing on this stack is needed any more: the idle loop frees it.
    current().switch_to_idle();
    unreachable!("a thread that has ended was switched to")
}

fn leave(status: ExitStatus) {
    let thread = current();
    let process = thread.process.clone();
    leave_memory(&thread);
    if process.pid != FIRST_PID && process.threads.borrow_mut().len() == 1 {
        give_back(&thread, status);
    }
    // Nothing blocks from here on: otherwise two threads could both not be the last one.
    leave_remains(&thread);
    seccomp::release(&thread);
    process.ended_cpu_ns.fetch_add(thread.cpu_ns(), Relaxed);
    kernel().tasks.usage.ended(&thread);
    process.threads.borrow_mut().retain(|other| !core::ptr::eq(Arc::as_ptr(other), &*thread));
    let removed = kernel().tasks.threads.borrow_mut().remove(&thread.tid());
    // The idle loop keeps the thread until it is off its stack.
    drop(removed);
    thread.context.forget_fpu();
    ptrace::tracees::thread_ends(&thread, status);
    let is_main = thread.tid() == process.pid.main_thread();
    if !is_main && !kernel().tasks.tracees.is_unheard(thread.tid()) {
        process.pid_namespace.dismiss(thread.tid());
    }
    signal::pass_on(&process);
    process.thread_ended.wake_all(Events::IN);
    if process.threads.borrow_mut().is_empty() {
        // Without exit_group(2), the last thread's status counts (since Linux 5.17).
        let status = process.exiting.get().unwrap_or(status);
        end_process(&process, status);
    }
    thread.sched.borrow_mut().state = scheduler::RunState::Dead;
}

/// Keeps what `/proc` shows of a process until its parent has waited for it.
fn leave_remains(thread: &Thread) {
    if thread.tid() == thread.process.pid.main_thread() {
        thread.process.remains.set(Remains {
            name: thread.name.get(),
            scheduling: thread.scheduling.get(),
            blocked: thread.signals.borrow_mut().mask,
            tracer: thread.tracee.tracer(),
            seccomp: thread.seccomp.borrow_mut().shown(),
        });
    }
}

/// Tells those who share memory with a thread that it uses it no more: it ends, or executes another
/// program (`mm_release` in kernel/fork.c).
pub fn leave_memory(thread: &Thread) {
    futex::release_robust(thread);
    let process = &thread.process;
    let clear = crate::platform::user::UserAddress(thread.clear_child_tid.load(Relaxed));
    // Nobody could look if the memory goes with the thread.
    let is_shared = process.threads.borrow_mut().len() > 1 || process.mm().users() > 1;
    if is_shared && !clear.is_null() && clear.write(&0u32).is_ok() {
        let _ = futex::wake(clear, 1, u32::MAX, futex::Scope::Shared);
    }
}

/// The last thread of a process ends: gives back what others may wait for, and lets those go on that it
/// traces. Init of a PID namespace then waits for all processes there (`do_exit` in kernel/exit.c).
fn give_back(thread: &Thread, status: ExitStatus) {
    let process = &thread.process;
    process.exiting.borrow_mut().get_or_insert(status);
    process.timers.disarm_all();
    process.cpu_limit.disarm();
    process.posix_timers.remove_all();
    process.release();
    process.look_at_resident();
    release_memory(process);
    above().process_ends(process);
    ptrace::tracees::release(thread);
    pid_namespace::await_end(process);
}

/// Ends a process whose last thread has ended.
fn end_process(process: &Arc<Process>, status: ExitStatus) {
    if process.pid == FIRST_PID {
        end_sandbox(status);
    }
    process.mm().detach();
    process.life.set(Life::Zombie(status));
    if process.mm().users() == 0 {
        process.mm().release_shared();
    }
    above().process_ended(process);
    pid_namespace::process_ends(process);
    let children = leave_children(process);
    signal::hang_up_orphans(process, &children);
    process.released.wake_all(Events::IN);
    report_end(process, status);
}

/// Ends the loan of vfork(2): the maker goes on.
pub fn release_memory(process: &Process) {
    let borrowed = core::mem::take(&mut *process.borrows_memory.borrow_mut());
    if borrowed {
        process.released.wake_all(Events::IN);
    }
}

/// The children of a process that ends become those of its nearest ancestor in the same PID namespace
/// that is a subreaper (prctl(2)), or of init there; returns them.
fn leave_children(process: &Process) -> Vec<Arc<Process>> {
    let tasks = &kernel().tasks;
    let children = tasks.processes_where(|other| other.parent_pid() == Some(process.pid));
    if children.is_empty() {
        return children;
    }
    let heir_pid = heir_of(process);
    for child in &children {
        {
            let mut family = child.family.borrow_mut();
            family.parent = Some(heir_pid);
            // Whatever its maker wanted to hear: the heir waits for children.
            family.exit_signal = Some(signal::SIGCHLD);
        }
        if let Some(death) = child.parent_death_signal.get().filter(|_| !child.is_zombie()) {
            let info = SignalInfo::from_process(death, signal::SI_USER, process);
            signal::send_to_process(child, info);
        }
        if let Life::Zombie(status) = child.life.get()
            && ptrace::awaited_tracer(child).is_none()
        {
            tell_parent(child, status);
        }
    }
    children
}

/// Who gets the children of a process that ends.
fn heir_of(process: &Process) -> Pid {
    let namespace = &process.pid_namespace;
    let init = namespace.reaper();
    let mut heir = process.parent();
    while let Some(ancestor) = &heir
        && ancestor.pid != init
        && ancestor.pid_namespace.is(namespace)
    {
        if ancestor.is_subreaper.get() && !ancestor.is_zombie() {
            return ancestor.pid;
        }
        heir = ancestor.parent();
    }
    init
}

/// Tells who waits for a process that it has ended: first its tracer, then its parent.
fn report_end(process: &Arc<Process>, status: ExitStatus) {
    if !ptrace::tracees::tracer_hears_first(process, status) {
        tell_parent(process, status);
    }
}

/// Tells the parent of a process that has ended, of which its tracer has heard.
pub(super) fn report_end_to_parent(process: &Arc<Process>) {
    if let Life::Zombie(status) = process.life.get() {
        tell_parent(process, status);
    }
}

/// Tells the parent that a child has ended. One that ignores its children
/// (`SIG_IGN` or `SA_NOCLDWAIT` for `SIGCHLD`, sigaction(2)) need not wait for it.
fn tell_parent(process: &Arc<Process>, status: ExitStatus) {
    let Some(parent) = process.parent() else {
        forget(process);
        return;
    };
    let exit_signal = process.family.get().exit_signal;
    let is_ignored = exit_signal == Some(signal::SIGCHLD) && signal::ignores_children(&parent);
    if let Some(exit_signal) = exit_signal {
        signal::send_to_process(&parent, signal::child_ended(process, exit_signal, status));
    }
    // It has its numbers until the signal says which one.
    if is_ignored || parent.ends_pid_namespace() {
        forget(process);
    }
    parent.children_changed.wake_all(Events::IN);
}

/// Removes a process that nobody has to wait for any more.
pub fn forget(process: &Process) {
    let removed = kernel().tasks.processes.borrow_mut().remove(&process.pid);
    drop(removed);
    process.pid_namespace.process_is_gone(process);
}

fn end_sandbox(status: ExitStatus) -> ! {
    super::host_process::twins::await_reader();
    above().sandbox_ends();
    let exit = match status {
        ExitStatus::Exited(code) => Exit { code: code.into(), signal: 0 },
        ExitStatus::Killed(signal) => Exit { code: 0, signal: signal.number() },
    };
    control::send(MSG_EXIT, 0, bytemuck::bytes_of(&exit), &[]);
    let code = if exit.signal != 0 { 128 + exit.signal } else { exit.code };
    super::host_process::end_sandbox(code as u64)
}
