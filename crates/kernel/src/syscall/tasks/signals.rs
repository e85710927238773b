//! System calls on signals.

use alloc::sync::Arc;

use crate::args::{PidNumber, SignalNumber, UserPtr};
use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::task::Process;
use crate::task::freeze_request::takes_signal;
use crate::task::ids::Processes;
use crate::task::ids::{Pid, Tid};
use crate::task::signal::frame::reported_stack;
use crate::task::signal::*;
use crate::task::thread::{current, current_process};
use crate::task::wait::wait_until;
use crate::time::Timespec;

fn check_set_size(size: usize) -> Result<()> {
    if size == 8 { Ok(()) } else { Err(Errno::EINVAL) }
}

/// rt_sigaction(2).
pub fn rt_sigaction(
    signal: SignalNumber,
    new: UserPtr<Action>,
    old_to: UserPtr<Action>,
    size: usize,
) -> Result<()> {
    check_set_size(size)?;
    let signal = signal.signal()?;
    let thread = current();
    if !new.is_null() && UNBLOCKABLE & bit(signal) != 0 {
        return Err(Errno::EINVAL);
    }
    let wanted = new.read_if_some()?;
    let mut signals = thread.process.signals.borrow_mut();
    let old = *signals.action(signal);
    if let Some(mut action) = wanted {
        action.mask &= !UNBLOCKABLE;
        *signals.action(signal) = action;
        if is_ignored(&action, signal) {
            // sigaction(2): pending signals that are now ignored are discarded.
            signals.pending.retain(|info| info.signal != signal);
            thread.signals.borrow_mut().pending.retain(|info| info.signal != signal);
        }
    }
    drop(signals);
    old_to.write_if_some(&old)
}

/// rt_sigprocmask(2).
pub fn rt_sigprocmask(
    how: u32,
    new: UserPtr<SignalSet>,
    old_to: UserPtr<SignalSet>,
    size: usize,
) -> Result<()> {
    check_set_size(size)?;
    let thread = current();
    let old = thread.signals.borrow_mut().mask;
    if let Some(set) = new.read_if_some()? {
        let new = match how {
            0 => old | set,
            1 => old & !set,
            2 => set,
            _ => return Err(Errno::EINVAL),
        };
        thread.signals.borrow_mut().mask = new & !UNBLOCKABLE;
        crate::task::signal::pass_on(&thread.process);
        thread.needs_attention();
    }
    old_to.write_if_some(&old)
}

/// rt_sigpending(2).
pub fn rt_sigpending(to: UserAddress, size: usize) -> Result<()> {
    if size > 8 {
        return Err(Errno::EINVAL);
    }
    let thread = current();
    let blocked = thread.signals.borrow_mut().mask;
    to.write_bytes(&(pending_set(&thread) & blocked).to_le_bytes()[..size])
}

/// rt_sigsuspend(2).
pub fn rt_sigsuspend(mask: UserPtr<SignalSet>, size: usize) -> Result<()> {
    check_set_size(size)?;
    set_temporary_mask(mask.read()?);
    pause()
}

/// pause(2).
pub fn pause() -> Result<()> {
    let _: Result<()> = wait_until(&[], None, || None);
    Err(Errno::ERESTARTNOHAND)
}

/// rt_sigtimedwait(2).
pub fn rt_sigtimedwait(
    set: UserPtr<SignalSet>,
    info_to: UserPtr<SignalInfo>,
    timeout: UserPtr<Timespec>,
    size: usize,
) -> Result<u32> {
    check_set_size(size)?;
    let set = set.read()?;
    let deadline = Timespec::deadline(timeout)?;
    let thread = current();
    // While waiting, the signals count as not blocked, so that they wake the thread.
    let old = {
        let mut signals = thread.signals.borrow_mut();
        let old = signals.mask;
        signals.mask = old & !set;
        signals.awaited = set;
        old
    };
    let outcome = wait_until(&[], deadline, || take_pending(&thread, set & !UNBLOCKABLE).map(Ok));
    {
        let mut signals = thread.signals.borrow_mut();
        signals.mask = old;
        signals.awaited = 0;
    }
    // What came for this thread meanwhile may be for another one that waits.
    pass_on(&thread.process);
    thread.needs_attention();
    match outcome {
        Ok(info) => {
            info_to.write_if_some(&info)?;
            Ok(info.signal.number())
        }
        Err(Errno::ETIMEDOUT) => Err(Errno::EAGAIN),
        Err(_) => Err(Errno::EINTR),
    }
}

/// sigaltstack(2).
pub fn sigaltstack(new: UserPtr<AlternateStack>, old_to: UserPtr<AlternateStack>) -> Result<()> {
    const MINSIGSTKSZ: u64 = 2048;
    let thread = current();
    let rsp = thread.frame().rsp();
    let old = thread.signals.borrow_mut().alternate_stack;
    let reported = reported_stack(&old, rsp);
    if let Some(new) = new.read_if_some()? {
        if reported.flags & SS_ONSTACK != 0 {
            return Err(Errno::EPERM);
        }
        let mode = new.flags & !SS_AUTODISARM;
        if mode != 0 && mode != SS_DISABLE && mode != SS_ONSTACK {
            return Err(Errno::EINVAL);
        }
        let stack = if mode == SS_DISABLE {
            AlternateStack { flags: SS_DISABLE, ..Default::default() }
        } else if new.size < MINSIGSTKSZ {
            return Err(Errno::ENOMEM);
        } else {
            AlternateStack { flags: new.flags & SS_AUTODISARM, pad: 0, ..new }
        };
        thread.signals.borrow_mut().alternate_stack = stack;
    }
    old_to.write_if_some(&reported)
}

/// rt_sigreturn(2).
pub fn rt_sigreturn() -> Result<u64> {
    sigreturn();
    // The dispatcher stores the result in rax, which the frame has just set.
    Ok(current().frame().rax())
}

/// restart_syscall(2): goes on with an interrupted sleep.
pub fn restart_syscall() -> Result<()> {
    let deadline = current().signals.borrow_mut().restart_deadline.take().ok_or(Errno::EINTR)?;
    super::timers::sleep_until(deadline, UserPtr::NULL)
}

/// kill(2).
pub fn kill(pid: PidNumber, signal: SignalNumber) -> Result<()> {
    let signal = signal.or_probe()?;
    let own = current_process();
    let tasks = &kernel().tasks;
    let targets = match pid.processes()? {
        // A process that has ended but was not waited for is still there.
        Processes::One(pid) => process_of(pid).into_iter().collect(),
        // kill(2): -1 is everybody in the namespace except the sender and init.
        Processes::All => {
            tasks.processes_where(|p| p.pid != own.pid && p.pid.number_in(&own.pid_namespace) > 1)
        }
        group => tasks.processes_where(|p| group.includes(p)),
    };
    if targets.is_empty() {
        return Err(Errno::ESRCH);
    }
    if signal.is_some_and(takes_signal) {
        return Ok(());
    }
    let mut outcome = Err(Errno::EPERM);
    for target in targets {
        if check_permission(&target, signal).is_ok() {
            outcome = Ok(());
            if let Some(signal) = signal {
                send_to_process(&target, SignalInfo::from_process(signal, SI_USER, &own));
            }
        }
    }
    outcome
}

/// The process with an id. As on Linux, the id of a thread stands for its process.
fn process_of(id: Pid) -> Option<Arc<Process>> {
    let tasks = &kernel().tasks;
    let of_thread = || tasks.thread(Tid::new(id.number())).map(|thread| thread.process.clone());
    tasks.process(id).or_else(of_thread)
}

/// Sends a signal, or nothing, to a thread, which must be one of the process `tgid` if that is
/// given.
fn send_to_tid(
    tgid: Option<Pid>,
    tid: Tid,
    signal: Option<Signal>,
    info: impl FnOnce(Signal) -> SignalInfo,
) -> Result<()> {
    let thread = kernel().tasks.thread(tid);
    // A main thread that has ended is there until its process is gone, but does nothing with
    // signals.
    let of_ended = || kernel().tasks.process(tid.process()).ok_or(Errno::ESRCH);
    let process = thread.as_ref().map_or_else(of_ended, |thread| Ok(thread.process.clone()))?;
    if tgid.is_some_and(|tgid| process.pid != tgid) {
        return Err(Errno::ESRCH);
    }
    check_permission(&process, signal)?;
    if let (Some(thread), Some(signal)) = (thread, signal)
        && !takes_signal(signal)
    {
        check_room(&process, Some(&thread), signal)?;
        send_to_thread(&thread, info(signal).written_for(&process));
    }
    Ok(())
}

/// The `siginfo_t` of tkill(2).
fn sent_by_own_process(signal: Signal) -> SignalInfo {
    SignalInfo::from_process(signal, SI_TKILL, &current_process())
}

/// tgkill(2).
pub fn tgkill(tgid: PidNumber, tid: PidNumber, signal: SignalNumber) -> Result<()> {
    let (tgid, tid) = (tgid.pid()?, tid.tid()?);
    send_to_tid(Some(tgid), tid, signal.or_probe()?, sent_by_own_process)
}

/// tkill(2).
pub fn tkill(tid: PidNumber, signal: SignalNumber) -> Result<()> {
    send_to_tid(None, tid.tid()?, signal.or_probe()?, sent_by_own_process)
}

/// rt_sigqueueinfo(2).
pub fn rt_sigqueueinfo(
    pid: PidNumber,
    signal: SignalNumber,
    info: UserPtr<SignalRecord>,
) -> Result<()> {
    let info = info.read()?;
    let signal = signal.or_probe()?;
    let target = process_of(Pid::from_caller(pid.0 as u32)).ok_or(Errno::ESRCH)?;
    if target.pid != current_process().pid && info.is_only_for_itself() {
        return Err(Errno::EPERM);
    }
    check_permission(&target, signal)?;
    if let Some(signal) = signal.filter(|&signal| !takes_signal(signal)) {
        check_room(&target, None, signal)?;
        send_to_process(&target, info.with_signal(signal).written_for(&target));
    }
    Ok(())
}

/// rt_tgsigqueueinfo(2).
pub fn rt_tgsigqueueinfo(
    tgid: PidNumber,
    tid: PidNumber,
    signal: SignalNumber,
    info: UserPtr<SignalRecord>,
) -> Result<()> {
    let info = info.read()?;
    let (tgid, tid, signal) = (tgid.pid()?, tid.tid()?, signal.or_probe()?);
    if tgid != current_process().pid && info.is_only_for_itself() {
        return Err(Errno::EPERM);
    }
    send_to_tid(Some(tgid), tid, signal, |signal| info.with_signal(signal))
}
