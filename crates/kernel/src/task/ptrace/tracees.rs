//! All tracees, and what becomes of them when they or their tracers end.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::{Options, Reason, detach};
use crate::platform::machine::SystemCallSites;
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::ids::{Pid, Tid};
use crate::task::process::ExitStatus;
use crate::task::signal::{self, SI_KERNEL, SIGCHLD, SIGKILL, SignalInfo};
use crate::task::thread::Thread;
use crate::task::wait::Events;
use crate::task::watched::{self, Watchers};
use crate::task::{Process, exit};

/// How many threads are kept whose tracers have not heard that they have ended. Of the others they never hear.
const ENDED_MAX: usize = 4096;

/// All threads that are traced, and those that were to their end.
#[derive(Default)]
pub struct Tracees {
    living: KernelCell<Vec<Arc<Thread>>>,
    ended: KernelCell<Vec<EndedTracee>>,
    /// Number of processes that have ended, and whose tracers have not heard of it.
    awaiting: KernelCell<usize>,
}

/// A thread, not the main one of its process, whose tracer has not heard that it has ended.
#[derive(Clone)]
pub struct EndedTracee {
    /// Its id.
    pub tid: Tid,
    /// Its process.
    pub process: Arc<Process>,
    /// How it has ended.
    pub status: ExitStatus,
    by: Pid,
}

impl Tracees {
    pub(super) fn add(&self, thread: &Arc<Thread>) {
        self.living.borrow_mut().push(thread.clone());
        watched::add(Watchers::TRACED);
    }

    pub(super) fn remove(&self, thread: &Thread) {
        let mut living = self.living.borrow_mut();
        let at = living.iter().position(|known| core::ptr::eq(&**known, thread));
        let removed = at.map(|at| living.swap_remove(at));
        let is_empty = living.is_empty();
        drop(living);
        drop(removed);
        if is_empty {
            watched::remove(Watchers::TRACED);
        }
    }

    /// After a thaw: calls are watched if somebody is traced.
    pub fn watch_calls(&self) {
        if !self.living.borrow_mut().is_empty() {
            watched::add(Watchers::TRACED);
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        let none_lives = self.living.borrow_mut().is_empty();
        none_lives && self.ended.borrow_mut().is_empty() && self.awaiting.get() == 0
    }

    /// Those of a process.
    pub fn of(&self, tracer: Pid) -> Vec<Arc<Thread>> {
        let living = self.living.borrow_mut();
        living.iter().filter(|thread| thread.tracee.tracer() == Some(tracer)).cloned().collect()
    }

    fn of_thread(&self, tracer: Tid) -> Vec<Arc<Thread>> {
        let by = |thread: &&Arc<Thread>| thread.tracee.tracing_thread() == Some(tracer);
        self.living.borrow_mut().iter().filter(by).cloned().collect()
    }

    /// Those of a process that have ended.
    pub fn ended_of(&self, tracer: Pid) -> Vec<EndedTracee> {
        self.ended.borrow_mut().iter().filter(|ended| ended.by == tracer).cloned().collect()
    }

    fn note_ended(&self, tracee: EndedTracee) {
        let mut ended = self.ended.borrow_mut();
        let forgotten = (ended.len() >= ENDED_MAX).then(|| ended.remove(0));
        ended.push(tracee);
        drop(ended);
        if let Some(EndedTracee { tid, process, .. }) = forgotten {
            process.pid_namespace.dismiss(tid);
        }
    }

    /// The tracer of a thread has heard that it has ended.
    pub fn forget_ended(&self, tid: Tid) {
        let mut ended = self.ended.borrow_mut();
        if let Some(at) = ended.iter().position(|ended| ended.tid == tid) {
            let tracee = ended.remove(at);
            drop(ended);
            tracee.process.pid_namespace.dismiss(tid);
        }
    }

    /// Whether the tracer of a thread has not heard that it has ended.
    pub fn is_unheard(&self, tid: Tid) -> bool {
        self.ended.borrow_mut().iter().any(|ended| ended.tid == tid)
    }

    /// A tracer has another id: execve(2).
    pub fn rename_tracer(&self, old: Tid, new: Tid) {
        for thread in self.of_thread(old) {
            thread.tracee.with(|tracing| tracing.tracer = new);
        }
    }
}

/// Sites in the code of a process are replaced again if none of its threads is traced any more.
pub(super) fn replace_sites_again(process: &Process) {
    let space = process.mm();
    let living = kernel().tasks.tracees.living.borrow_mut().clone();
    if !living.iter().any(|other| Arc::ptr_eq(&other.process.mm(), &space)) {
        space.gate.replace_again();
    }
}

/// A thread ends: who traces it hears of it, unless it is the main one, whose process tells later.
pub(in crate::task) fn thread_ends(thread: &Thread, status: ExitStatus) {
    let tasks = &kernel().tasks;
    if tasks.tracees.living.borrow_mut().is_empty() {
        return;
    }
    release_tracees(thread);
    let Some(by) = thread.tracee.tracer() else { return };
    detach(thread, None);
    let (process, tid) = (thread.process.clone(), thread.tid());
    if tid == process.pid.main_thread() {
        return;
    }
    let Some(tracer) = tasks.process(by) else { return };
    if hears_of_no_ends(&tracer) {
        // Who waits for it hears that there is none.
        tracer.children_changed.wake_all(Events::IN);
        return;
    }
    let mut info = signal::child_ended(&process, SIGCHLD, status);
    info.set_sender(tid);
    tasks.tracees.note_ended(EndedTracee { tid, process, status, by });
    signal::send_to_process(&tracer, info);
    tracer.children_changed.wake_all(Events::IN);
}

/// A thread that ends traces nobody any more. Who was stopped for a signal gets it.
fn release_tracees(tracer: &Thread) {
    for thread in kernel().tasks.tracees.of_thread(tracer.tid()) {
        let (options, signal) = thread
            .tracee
            .with(|tracing| {
                let stop = tracing.stop.filter(|stop| stop.reason == Reason::Signal);
                (tracing.options, stop.and_then(|stop| stop.info).map(|info| info.signal))
            })
            .unwrap_or_default();
        if options.contains(Options::EXITKILL) {
            signal::send_to_process(&thread.process, SignalInfo::new(SIGKILL, SI_KERNEL));
        }
        detach(&thread, signal);
    }
}

/// The last thread of a process ends: it traces nobody any more, and has no claims to hear of others first.
pub(in crate::task) fn release(thread: &Thread) {
    let (process, tasks) = (&thread.process, &kernel().tasks);
    if tasks.tracees.is_empty() {
        return;
    }
    release_tracees(thread);
    let forgotten = tasks.tracees.ended_of(process.pid);
    forgotten.iter().for_each(|ended| tasks.tracees.forget_ended(ended.tid));
    for other in tasks.processes_where(|other| other.awaits_tracer.get() == Some(process.pid)) {
        heard_by_tracer(&other);
    }
}

/// The tracer of a process that has ended has heard of it: now the parent does.
pub fn heard_by_tracer(process: &Arc<Process>) {
    process.awaits_tracer.set(None);
    *kernel().tasks.tracees.awaiting.borrow_mut() -= 1;
    exit::report_end_to_parent(process);
}

/// Whether a tracer will not wait for those that have ended: it does not want to, or ends itself.
fn hears_of_no_ends(tracer: &Process) -> bool {
    signal::ignores_children(tracer) || tracer.ends_pid_namespace()
}

/// A process has ended: whether its tracer, who is not its parent, hears of it first.
pub(in crate::task) fn tracer_hears_first(process: &Arc<Process>, status: ExitStatus) -> bool {
    let Some(by) = process.remains.get().tracer.filter(|&by| process.parent_pid() != Some(by))
    else {
        return false;
    };
    let Some(tracer) = kernel().tasks.process(by).filter(|tracer| !tracer.is_zombie()) else {
        return false;
    };
    if hears_of_no_ends(&tracer) {
        tracer.children_changed.wake_all(Events::IN);
        return false;
    }
    process.awaits_tracer.set(Some(by));
    *kernel().tasks.tracees.awaiting.borrow_mut() += 1;
    signal::send_to_process(&tracer, signal::child_ended(process, SIGCHLD, status));
    tracer.children_changed.wake_all(Events::IN);
    true
}

/// Whether the parent of a process hears of its stops as its tracer, and so not as its parent.
pub fn is_traced_by_parent(process: &Process) -> bool {
    if kernel().tasks.tracees.living.borrow_mut().is_empty() {
        return false;
    }
    let main = kernel().tasks.thread(process.pid.main_thread());
    main.and_then(|main| main.tracee.tracer()).is_some_and(|by| process.parent_pid() == Some(by))
}
