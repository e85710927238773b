//! System calls on signals.

use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::task::process::FIRST_PID;
use crate::task::signal::frame::reported_stack;
use crate::task::signal::*;
use crate::task::thread::current;
use crate::task::wait::wait_until;
use crate::time::Instant;

fn check_set_size(size: usize) -> Result<()> {
    if size == 8 { Ok(()) } else { Err(Errno::EINVAL) }
}

fn check_signal(signal: u32) -> Result<u32> {
    if (1..=SIGNAL_COUNT).contains(&signal) { Ok(signal) } else { Err(Errno::EINVAL) }
}

/// rt_sigaction(2).
pub fn rt_sigaction(
    signal: u32,
    new: UserAddress,
    old_to: UserAddress,
    size: usize,
) -> Result<u64> {
    check_set_size(size)?;
    let signal = check_signal(signal)?;
    let thread = current();
    if !new.is_null() && UNBLOCKABLE & bit(signal) != 0 {
        return Err(Errno::EINVAL);
    }
    let wanted = if new.is_null() { None } else { Some(new.read::<Action>()?) };
    let mut signals = thread.process.signals.borrow_mut();
    let slot = &mut signals.actions[signal as usize - 1];
    let old = *slot;
    if let Some(mut action) = wanted {
        action.mask &= !UNBLOCKABLE;
        *slot = action;
        if is_ignored(&action, signal) {
            // sigaction(2): pending signals that are now ignored are discarded.
            signals.pending.retain(|info| info.number() != signal);
            drop(signals);
            thread.signals.borrow_mut().pending.retain(|info| info.number() != signal);
        }
    } else {
        drop(signals);
    }
    old_to.write_if_some(&old)?;
    Ok(0)
}

/// rt_sigprocmask(2).
pub fn rt_sigprocmask(how: u32, new: UserAddress, old_to: UserAddress, size: usize) -> Result<u64> {
    check_set_size(size)?;
    let thread = current();
    let old = thread.signals.borrow_mut().mask;
    if !new.is_null() {
        let set: SignalSet = new.read()?;
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
    old_to.write_if_some(&old)?;
    Ok(0)
}

/// rt_sigpending(2).
pub fn rt_sigpending(to: UserAddress, size: usize) -> Result<u64> {
    if size > 8 {
        return Err(Errno::EINVAL);
    }
    let thread = current();
    let blocked = thread.signals.borrow_mut().mask;
    to.write_bytes(&(pending_set(&thread) & blocked).to_le_bytes()[..size])?;
    Ok(0)
}

/// rt_sigsuspend(2).
pub fn rt_sigsuspend(mask: UserAddress, size: usize) -> Result<u64> {
    check_set_size(size)?;
    set_temporary_mask(mask.read()?);
    pause()
}

/// pause(2).
pub fn pause() -> Result<u64> {
    let _: Result<()> = wait_until(&[], None, || None);
    Err(Errno::ERESTARTNOHAND)
}

/// rt_sigtimedwait(2).
pub fn rt_sigtimedwait(
    set: UserAddress,
    info_to: UserAddress,
    timeout: UserAddress,
    size: usize,
) -> Result<u64> {
    check_set_size(size)?;
    let set: SignalSet = set.read()?;
    let deadline = match timeout {
        UserAddress::NULL => None,
        at => Some(Instant::after_ns(crate::time::read_timespec(at)?)),
    };
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
    thread.needs_attention();
    match outcome {
        Ok(info) => {
            info_to.write_if_some(&info)?;
            Ok(info.signal as u64)
        }
        Err(Errno::ETIMEDOUT) => Err(Errno::EAGAIN),
        Err(_) => Err(Errno::EINTR),
    }
}

/// sigaltstack(2).
pub fn sigaltstack(new: UserAddress, old_to: UserAddress) -> Result<u64> {
    const MINSIGSTKSZ: u64 = 2048;
    let thread = current();
    let rsp = thread.frame().rsp();
    let old = thread.signals.borrow_mut().alternate_stack;
    let reported = reported_stack(&old, rsp);
    if !new.is_null() {
        let new: AlternateStack = new.read()?;
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
    old_to.write_if_some(&reported)?;
    Ok(0)
}

/// rt_sigreturn(2).
pub fn rt_sigreturn() -> Result<u64> {
    sigreturn();
    // The dispatcher stores the result in rax, which the frame has just set.
    Ok(current().frame().rax())
}

/// restart_syscall(2): goes on with an interrupted sleep.
pub fn restart_syscall() -> Result<u64> {
    let deadline = current().signals.borrow_mut().restart_deadline.take().ok_or(Errno::EINTR)?;
    super::timers::sleep_until(deadline, UserAddress::NULL)
}

/// kill(2).
pub fn kill(pid: i32, signal: u32) -> Result<u64> {
    if signal > SIGNAL_COUNT {
        return Err(Errno::EINVAL);
    }
    let own = &current().process;
    let tasks = &kernel().tasks;
    let targets = match pid {
        // A process that has ended but was not waited for is still there.
        1.. => tasks.process(pid as u32).into_iter().collect(),
        0 => tasks.processes_where(|p| p.process_group() == own.process_group()),
        // kill(2): -1 is everybody except the sender and init.
        -1 => tasks.processes_where(|p| p.pid != own.pid && p.pid != FIRST_PID),
        i32::MIN => return Err(Errno::ESRCH),
        group => tasks.processes_where(|p| p.process_group() == group.unsigned_abs()),
    };
    if targets.is_empty() {
        return Err(Errno::ESRCH);
    }
    if crate::task::freeze_request::takes_signal(signal) {
        return Ok(0);
    }
    let uid = own.credentials.borrow_mut().uid;
    let mut outcome = Err(Errno::EPERM);
    for target in targets {
        if check_permission(&target, signal).is_ok() {
            outcome = Ok(0);
            if signal != 0 {
                send_to_process(&target, SignalInfo::from_process(signal, SI_USER, own.pid, uid));
            }
        }
    }
    outcome
}

fn send_to_tid(tgid: Option<u32>, tid: u32, signal: u32, info: SignalInfo) -> Result<u64> {
    let Some(thread) = kernel().tasks.thread(tid) else {
        // A main thread that has ended is there until its process is gone, but
        // does nothing with signals.
        let process = kernel().tasks.process(tid).ok_or(Errno::ESRCH)?;
        if tgid.is_some_and(|tgid| process.pid != tgid) {
            return Err(Errno::ESRCH);
        }
        return check_permission(&process, signal).map(|()| 0);
    };
    if tgid.is_some_and(|tgid| thread.process.pid != tgid) {
        return Err(Errno::ESRCH);
    }
    check_permission(&thread.process, signal)?;
    if signal != 0 && !crate::task::freeze_request::takes_signal(signal) {
        send_to_thread(&thread, info);
    }
    Ok(0)
}

/// tgkill(2).
pub fn tgkill(tgid: i32, tid: i32, signal: u32) -> Result<u64> {
    if tgid <= 0 || tid <= 0 || signal > SIGNAL_COUNT {
        return Err(Errno::EINVAL);
    }
    let own = &current().process;
    let info =
        SignalInfo::from_process(signal, SI_TKILL, own.pid, own.credentials.borrow_mut().uid);
    send_to_tid(Some(tgid as u32), tid as u32, signal, info)
}

/// tkill(2).
pub fn tkill(tid: i32, signal: u32) -> Result<u64> {
    if tid <= 0 || signal > SIGNAL_COUNT {
        return Err(Errno::EINVAL);
    }
    let own = &current().process;
    let info =
        SignalInfo::from_process(signal, SI_TKILL, own.pid, own.credentials.borrow_mut().uid);
    send_to_tid(None, tid as u32, signal, info)
}

/// rt_sigqueueinfo(2).
pub fn rt_sigqueueinfo(pid: i32, signal: u32, info: UserAddress) -> Result<u64> {
    let mut info: SignalInfo = info.read()?;
    if signal > SIGNAL_COUNT {
        return Err(Errno::EINVAL);
    }
    info.signal = signal as i32;
    let target = kernel().tasks.process(pid as u32).ok_or(Errno::ESRCH)?;
    let foreign = target.pid != current().process.pid;
    if foreign && (info.code >= 0 || info.code == SI_TKILL) {
        return Err(Errno::EPERM);
    }
    check_permission(&target, signal)?;
    if signal != 0 && !crate::task::freeze_request::takes_signal(signal) {
        send_to_process(&target, info);
    }
    Ok(0)
}

/// rt_tgsigqueueinfo(2).
pub fn rt_tgsigqueueinfo(tgid: i32, tid: i32, signal: u32, info: UserAddress) -> Result<u64> {
    let mut info: SignalInfo = info.read()?;
    if tgid <= 0 || tid <= 0 || signal > SIGNAL_COUNT {
        return Err(Errno::EINVAL);
    }
    info.signal = signal as i32;
    let foreign = tgid as u32 != current().process.pid;
    if foreign && (info.code >= 0 || info.code == SI_TKILL) {
        return Err(Errno::EPERM);
    }
    send_to_tid(Some(tgid as u32), tid as u32, signal, info)
}
