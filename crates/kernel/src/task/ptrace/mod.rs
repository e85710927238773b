//! Tracing of threads by others: debuggers, `strace`, leak checkers (ptrace(2)).
//!
//! ```text
//! tracer                                     tracee
//!                                            signal, system call, fork …
//!   wait4 ◀──── SIGCHLD, children_changed ── stop: waits in the kernel
//!   ptrace: registers, memory (`visit`)
//!   PTRACE_CONT … ── resumed ──────────────▶ goes on
//! ```
//!
//! A tracee that has stopped waits in the kernel, and its registers lie on its kernel stack, which all
//! host processes share. Its memory is reached by [`super::visit`]. Its code has its system call
//! instructions back as long as it is traced
//! ([`put_back`](crate::platform::machine::SystemCallSites::put_back)), so that a tracer sees and changes
//! the code of the program. All of it is saved state: a sandbox with tracees freezes as any other.

pub mod access;
pub mod calls;
pub mod events;
pub mod registers;
pub mod requests;
mod stop;
pub mod tracees;
mod watch;

use alloc::boxed::Box;
use alloc::sync::Arc;

use bitflags::bitflags;

pub use stop::{Group, before_return, deliver, handler_begins, wait_for_tracer};
pub(super) use stop::{continued, killed, stopped};
pub use tracees::{EndedTracee, Tracees};
pub use watch::{Stepped, stepped};

use super::ids::{Pid, Tid};
use super::process::Life;
use super::signal::{self, SI_KERNEL, SIGSTOP, Signal, SignalInfo};
use super::thread::{Thread, current};
use super::wait::WaitQueue;
use super::{Process, scheduler, visit};
use crate::errno::{Errno, Result};
use crate::platform::registers::{RETURN_FULL, TRAP_FLAG};
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::Capabilities;
use crate::task::wait::Events;

bitflags! {
    /// `PTRACE_O_*`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Options: u32 {
        /// Stops at system calls say so by bit 7 of the signal.
        const SYSGOOD = 0x01;
        /// Stop at fork(2), and trace the child.
        const FORK = 0x02;
        /// Stop at vfork(2), and trace the child.
        const VFORK = 0x04;
        /// Stop at clone(2), and trace the child.
        const CLONE = 0x08;
        /// Stop at execve(2).
        const EXEC = 0x10;
        /// Stop when a child has given its memory back.
        const VFORK_DONE = 0x20;
        /// Stop before the end.
        const EXIT = 0x40;
        /// Stop where seccomp(2) filters say so.
        const SECCOMP = 0x80;
        /// The tracee ends with its tracer.
        const EXITKILL = 0x10_0000;
    }
}

/// `PTRACE_EVENT_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Event {
    Fork = 1,
    Vfork = 2,
    Clone = 3,
    Exec = 4,
    VforkDone = 5,
    Exit = 6,
    Seccomp = 7,
    Stop = 128,
}

impl Event {
    /// The option that asks for it.
    fn option(self) -> Options {
        match self {
            Event::Fork => Options::FORK,
            Event::Vfork => Options::VFORK,
            Event::Clone => Options::CLONE,
            Event::Exec => Options::EXEC,
            Event::VforkDone => Options::VFORK_DONE,
            Event::Exit => Options::EXIT,
            Event::Seccomp => Options::SECCOMP,
            Event::Stop => Options::empty(),
        }
    }
}

/// Why a tracee has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A signal is to be delivered.
    Signal,
    /// Its process has been stopped.
    Group,
    /// It begins a system call.
    CallBegins,
    /// It has done a system call.
    CallEnds,
    /// Something else.
    Event(Event),
}

/// A stop.
#[derive(Clone, Copy, Debug)]
pub struct Stop {
    /// Why.
    pub reason: Reason,
    /// What wait(2) tells of it: signal, and event from bit 8 on.
    pub code: u32,
    /// What `PTRACE_GETSIGINFO` tells.
    pub info: Option<SignalInfo>,
    /// Whether the tracer has not waited for it yet.
    pub is_news: bool,
}

/// How a tracee goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// To the next signal or event.
    #[default]
    Free,
    /// To the next system call.
    ToCall,
    /// For one instruction.
    Step,
}

/// How a thread was attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// By `PTRACE_TRACEME` or `PTRACE_ATTACH`.
    Classic,
    /// By `PTRACE_SEIZE`.
    Seized,
}

/// How a thread is traced.
#[derive(Debug)]
struct Tracing {
    /// The thread that traces it.
    tracer: Tid,
    /// The process of that.
    by: Pid,
    attachment: Attachment,
    options: Options,
    mode: Mode,
    stop: Option<Stop>,
    /// What `PTRACE_GETEVENTMSG` tells.
    message: u64,
    /// `PTRACE_LISTEN`: it stands still, but its tracer may not do anything with it.
    is_listening: bool,
    /// It is to stop before it returns to the guest (`PTRACE_INTERRUPT` and its like).
    trap_is_due: bool,
    /// The signal that has stopped its process, which its tracer has not been told.
    group_stop: Option<Signal>,
    /// Whether the trap flag in its registers was set for a step.
    has_trap_flag: bool,
    /// Its debug registers, if its tracer has set any.
    debug: Option<Box<watch::DebugRegisters>>,
}

/// What a thread keeps for its tracer.
#[derive(Default)]
pub struct Tracee {
    tracing: KernelCell<Option<Box<Tracing>>>,
    /// Woken when it goes on.
    resumed: WaitQueue,
    /// The signal with which it goes on.
    injected: KernelCell<Option<SignalInfo>>,
    /// Nobody traces it any more, but it ran with a tracer's trap flag when that ended.
    still_steps: KernelCell<bool>,
}

impl Tracee {
    fn with<T>(&self, change: impl FnOnce(&mut Tracing) -> T) -> Option<T> {
        self.tracing.borrow_mut().as_deref_mut().map(change)
    }

    /// Whether it is traced.
    pub fn is_traced(&self) -> bool {
        self.tracing.borrow_mut().is_some()
    }

    /// The process that traces it.
    pub fn tracer(&self) -> Option<Pid> {
        self.with(|tracing| tracing.by)
    }

    /// The thread that traces it.
    pub fn tracing_thread(&self) -> Option<Tid> {
        self.with(|tracing| tracing.tracer)
    }

    /// Whether it has stopped for its tracer.
    pub fn has_stopped(&self) -> bool {
        self.with(|tracing| tracing.stop.is_some() || tracing.is_listening) == Some(true)
    }

    /// Whether it is to stop before it returns to the guest, whatever signals are pending.
    pub fn trap_is_due(&self) -> bool {
        self.with(|tracing| tracing.trap_is_due || tracing.group_stop.is_some()) == Some(true)
    }

    /// The code of a stop that the tracer has not waited for; `keeps`: it can wait for it again.
    pub fn take_news(&self, keeps: bool) -> Option<u32> {
        self.with(|tracing| {
            let stop = tracing.stop.as_mut().filter(|stop| stop.is_news)?;
            stop.is_news = keeps;
            Some(stop.code)
        })?
    }
}

/// `PTRACE_TRACEME`: the parent traces the running thread.
pub fn trace_me() -> Result<()> {
    let thread = super::thread::current_arc();
    if thread.tracee.is_traced() {
        return Err(Errno::EPERM);
    }
    let process = &thread.process;
    let parent = process.parent().ok_or(Errno::EPERM)?;
    let maker = process.family.get().maker.and_then(|maker| kernel().tasks.thread(maker));
    let maker = maker.filter(|maker| maker.process.pid == parent.pid);
    let tracer = maker.map_or(parent.pid.main_thread(), |maker| maker.tid());
    begin(&thread, tracer, parent.pid, Attachment::Classic, Options::empty());
    if !process.borrows_memory.get() {
        // Borrowed code is that of the maker. There will be another program.
        visit::put_back_sites(process);
    }
    Ok(())
}

/// Whether a thread must not get more rights by a program, since its tracer, who would have them, too, may not
/// trace everybody.
pub fn holds_back(thread: &Thread) -> bool {
    let Some(by) = thread.tracee.tracer() else { return false };
    let tracer = kernel().tasks.process(by);
    let users = thread.process.credentials.borrow_mut().user_namespace.clone();
    tracer.is_none_or(|tracer| {
        !tracer.credentials.borrow_mut().can_in(&users, Capabilities::SYS_PTRACE)
    })
}

/// `PTRACE_ATTACH`, `PTRACE_SEIZE`: the running thread traces another one.
pub fn attach(tracee: &Arc<Thread>, attachment: Attachment, options: Options) -> Result<()> {
    let (own, process) = (current(), tracee.process.clone());
    let is_own = process.pid == own.process.pid;
    if is_own || process.is_init.get() || kernel().tasks.process(process.pid).is_none() {
        return Err(Errno::EPERM);
    }
    access::check(&process)?;
    if tracee.tracee.is_traced() || tracee.is_dying() {
        return Err(Errno::EPERM);
    }
    begin(tracee, own.tid(), own.process.pid, attachment, options);
    if attachment == Attachment::Classic {
        signal::send_to_thread(tracee, SignalInfo::new(SIGSTOP, SI_KERNEL));
    }
    if let Life::Stopped(by) = process.life.get() {
        stop::stopped(tracee, by);
        process.resumed.wake_all(Events::IN);
    }
    visit::put_back_sites(&process);
    Ok(())
}

/// Makes a thread one that is traced.
fn begin(thread: &Arc<Thread>, tracer: Tid, by: Pid, attachment: Attachment, options: Options) {
    *thread.tracee.tracing.borrow_mut() = Some(Box::new(Tracing {
        tracer,
        by,
        attachment,
        options,
        mode: Mode::Free,
        stop: None,
        message: 0,
        is_listening: false,
        trap_is_due: false,
        group_stop: None,
        has_trap_flag: false,
        debug: None,
    }));
    kernel().tasks.tracees.add(thread);
}

/// Has a thread that has stopped go on. Its tracer says how, and with which signal.
fn resume(thread: &Thread, mode: Mode, signal: Option<Signal>) {
    let stop = thread.tracee.with(|tracing| {
        tracing.mode = mode;
        tracing.is_listening = false;
        tracing.stop.take()
    });
    let Some(stop) = stop.flatten() else { return };
    inject(thread, &stop, signal);
    if mode == Mode::Step {
        set_trap_flag(thread);
    }
    thread.tracee.resumed.wake_all(Events::IN);
}

/// Notes the signal with which a thread goes on: the one that it has stopped for, or one of its tracer.
fn inject(thread: &Thread, stop: &Stop, signal: Option<Signal>) {
    let info = signal.map(|signal| match stop.info {
        Some(info) if info.signal == signal && stop.reason == Reason::Signal => info,
        _ => SignalInfo::from_process(signal, signal::SI_USER, &current().process),
    });
    *thread.tracee.injected.borrow_mut() = info;
}

fn set_trap_flag(thread: &Thread) {
    let frame = thread.frame();
    let is_own = frame.rflags() & TRAP_FLAG != 0;
    frame.set_rflags(frame.rflags() | TRAP_FLAG);
    frame.set_how(RETURN_FULL);
    thread.tracee.with(|tracing| tracing.has_trap_flag = !is_own);
}

/// Takes the trap flag of a step out of the registers again.
pub(super) fn clear_trap_flag(thread: &Thread) {
    let is_set = thread.tracee.with(|tracing| core::mem::take(&mut tracing.has_trap_flag));
    if is_set == Some(true) {
        let frame = thread.frame();
        frame.set_rflags(frame.rflags() & !TRAP_FLAG);
    }
}

/// Ends the tracing of a thread, which goes on with a signal if it has stopped.
fn detach(thread: &Thread, signal: Option<Signal>) {
    let runs_with_flag =
        thread.tracee.with(|tracing| tracing.has_trap_flag && tracing.stop.is_none());
    thread.tracee.still_steps.set(runs_with_flag == Some(true));
    clear_trap_flag(thread);
    let tracing = thread.tracee.tracing.borrow_mut().take();
    kernel().tasks.tracees.remove(thread);
    if let Some(stop) = tracing.and_then(|tracing| tracing.stop) {
        inject(thread, &stop, signal);
    }
    thread.tracee.resumed.wake_all(Events::IN);
    thread.needs_attention();
    tracees::replace_sites_again(&thread.process);
}

/// Has a thread look soon at what is asked of it.
fn urge(thread: &Thread) {
    thread.needs_attention();
    scheduler::interrupt(thread);
}

/// Who traces a process that has ended, before its parent hears of it.
pub fn awaited_tracer(process: &Process) -> Option<Pid> {
    process.awaits_tracer.get()
}
