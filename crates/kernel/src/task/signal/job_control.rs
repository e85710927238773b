//! Signals between processes: permissions, stopping and continuing, and what
//! parents hear of their children.

use alloc::collections::BTreeSet;
use alloc::sync::Arc;

use super::*;
use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::task::exit::begin_group_exit;
use crate::task::ids::Pgid;
use crate::task::process::{ExitStatus, Life};
use crate::task::{Capabilities, Process, ptrace};

const STOPPING: SignalSet = bit(SIGSTOP) | bit(SIGTSTP) | bit(SIGTTIN) | bit(SIGTTOU);

/// Whether anything is left to do for a signal after [`prepare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prepared {
    /// Nothing.
    Done,
    /// It is to be queued.
    Queue,
}

/// What a signal does the moment it is sent, whatever the process does with it
/// (signal(7), kill(2)): `SIGKILL` ends, `SIGCONT` continues, and a stop and a
/// continue signal discard each other.
pub(super) fn prepare(process: &Process, info: &SignalInfo) -> Prepared {
    let signal = info.signal;
    let cannot_be_caught = bit(signal) & UNBLOCKABLE != 0;
    if process.is_init.get() || cannot_be_caught && process.is_shielded_from(info) {
        return Prepared::Done;
    }
    if signal == SIGKILL {
        begin_group_exit(process, ExitStatus::Killed(SIGKILL));
        ptrace::killed(process);
        return Prepared::Done;
    }
    if signal == SIGCONT {
        discard(process, STOPPING);
        resume(process);
        ptrace::continued(process);
    } else if STOPPING & bit(signal) != 0 {
        discard(process, bit(SIGCONT));
    }
    Prepared::Queue
}

fn discard(process: &Process, signals: SignalSet) {
    let keep = |info: &SignalInfo| signals & bit(info.signal) == 0;
    process.signals.borrow_mut().pending.retain(keep);
    let threads = process.threads.borrow_mut().clone();
    for thread in threads {
        thread.signals.borrow_mut().pending.retain(keep);
    }
}

fn resume(process: &Process) {
    if !matches!(process.life.get(), Life::Stopped(_)) {
        return;
    }
    process.life.set(Life::Running);
    {
        let mut unreported = process.unreported.borrow_mut();
        unreported.stopped = None;
        unreported.continued = true;
    }
    process.resumed.wake_all(Events::IN);
    tell_parent(process, child_continued(process));
}

/// Stops the running process by a signal whose action is to stop. Its threads
/// wait on their way back to the guest.
pub(super) fn stop(process: &Process, signal: Signal) {
    // setpgid(2), "orphaned": nobody could continue it.
    if signal != SIGSTOP && is_orphaned(process.process_group()) {
        return;
    }
    process.life.set(Life::Stopped(signal));
    {
        let mut unreported = process.unreported.borrow_mut();
        unreported.stopped = Some(signal);
        unreported.continued = false;
    }
    let threads = process.threads.borrow_mut().clone();
    for thread in &threads {
        thread.needs_attention();
        crate::task::scheduler::kick(thread);
        ptrace::stopped(thread, signal);
    }
    if !ptrace::tracees::is_traced_by_parent(process) {
        tell_parent(process, child_stopped(process, signal));
    }
}

/// A parent hears of stopped and continued children unless it has set
/// `SA_NOCLDSTOP`; wait(2) tells it in any case.
fn tell_parent(process: &Process, info: SignalInfo) {
    let Some(parent) = process.parent() else { return };
    let action = *parent.signals.borrow_mut().action(SIGCHLD);
    if action.flags & Action::NOCLDSTOP == 0 {
        send_to_process(&parent, info);
    }
    parent.children_changed.wake_all(Events::IN);
}

/// Whether no process of a group has a parent in the same session but another
/// group.
pub fn is_orphaned(group: Pgid) -> bool {
    let members = kernel().tasks.processes_where(|p| p.process_group() == group && !p.is_zombie());
    !members.iter().any(|member| {
        member.parent().is_some_and(|parent| {
            parent.process_group() != group && parent.session() == member.session()
        })
    })
}

/// When a process ends, groups that become orphaned by that and have stopped
/// members get `SIGHUP` and `SIGCONT` (setpgid(2), `_exit(3)`): its own, which it
/// may have tied to its parent's, and those of its `children`, which it may have
/// tied to its own. Groups that were orphaned before hear nothing.
pub fn hang_up_orphans(ended: &Process, children: &[Arc<Process>]) {
    let (own, session) = (ended.process_group(), ended.session());
    let tied_to = |parent: &Process| parent.process_group() != own && parent.session() == session;
    let own_group = ended.parent().is_some_and(|parent| tied_to(&parent)).then_some(own);
    let tied = children.iter().filter(|child| {
        child.session() == session && child.process_group() != own && !child.is_zombie()
    });
    let groups: BTreeSet<Pgid> =
        own_group.into_iter().chain(tied.map(|child| child.process_group())).collect();
    for group in groups {
        let stopped = kernel().tasks.processes_where(|p| {
            p.process_group() == group && matches!(p.life.get(), Life::Stopped(_))
        });
        if !stopped.is_empty() && is_orphaned(group) {
            send_to_group(group, SignalInfo::new(SIGHUP, SI_KERNEL));
            send_to_group(group, SignalInfo::new(SIGCONT, SI_KERNEL));
        }
    }
}

/// Sends a signal to all processes of a group; whether there were any.
pub fn send_to_group(group: Pgid, info: SignalInfo) -> bool {
    let members = kernel().tasks.processes_where(|p| p.process_group() == group && !p.is_zombie());
    for member in &members {
        send_to_process(member, info);
    }
    !members.is_empty()
}

/// `EPERM` unless the running process may send `signal`, or nothing, to `target` (kill(2)).
pub fn check_permission(target: &Process, signal: Option<Signal>) -> Result<()> {
    let own = crate::task::current_process();
    if target.pid == own.pid {
        return Ok(());
    }
    let (uid, euid, may_kill) = {
        let own = own.credentials.borrow_mut();
        let theirs = target.credentials.borrow_mut();
        (own.uid, own.euid, own.can_in(&theirs.user_namespace, Capabilities::KILL))
    };
    let theirs = target.credentials.borrow_mut();
    let matches = [uid, euid].iter().any(|&id| id == theirs.uid || id == theirs.suid);
    let same_session = signal == Some(SIGCONT) && target.session() == own.session();
    if may_kill || matches || same_session { Ok(()) } else { Err(Errno::EPERM) }
}

/// Whether a process does not want to wait for its children (sigaction(2)).
pub fn ignores_children(process: &Process) -> bool {
    let action = *process.signals.borrow_mut().action(SIGCHLD);
    action.handler == Action::IGNORE || action.flags & Action::NOCLDWAIT != 0
}

const CLD_EXITED: i32 = 1;
const CLD_KILLED: i32 = 2;
const CLD_TRAPPED: i32 = 4;
const CLD_STOPPED: i32 = 5;
const CLD_CONTINUED: i32 = 6;

/// `siginfo_t` of `SIGCHLD`: `si_pid`, `si_uid`, `si_status`, times in ticks.
fn child_info(process: &Process, signal: Signal, code: i32, status: u32) -> SignalInfo {
    const TICK_NS: u64 = 10_000_000;
    let mut info = SignalInfo::from_process(signal, code, process);
    info.payload[1] = status as u64;
    info.payload[2] = process.cpu_ns() / TICK_NS;
    info
}

/// A child has ended.
pub fn child_ended(process: &Process, signal: Signal, status: ExitStatus) -> SignalInfo {
    match status {
        ExitStatus::Exited(code) => child_info(process, signal, CLD_EXITED, code.into()),
        ExitStatus::Killed(by) => child_info(process, signal, CLD_KILLED, by.number()),
    }
}

/// A child has been stopped.
pub fn child_stopped(process: &Process, by: Signal) -> SignalInfo {
    child_info(process, SIGCHLD, CLD_STOPPED, by.number())
}

/// A tracee, of which this is the process, has stopped.
pub fn child_trapped(process: &Process, code: u32) -> SignalInfo {
    child_info(process, SIGCHLD, CLD_TRAPPED, code)
}

/// A child goes on.
pub fn child_continued(process: &Process) -> SignalInfo {
    child_info(process, SIGCHLD, CLD_CONTINUED, SIGCONT.number())
}
