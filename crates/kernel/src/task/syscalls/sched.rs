//! System calls on scheduling. The host schedules; what can be asked is answered.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::syscall::Args;
use crate::task::{Process, current_process, sched};

/// sched_yield(2).
pub fn sched_yield(_args: &Args) -> Result<u64> {
    sched::yield_now();
    Ok(0)
}

fn check_tid(tid: i32) -> Result<()> {
    let known = tid == 0 || tid > 0 && kernel().tasks.threads.lock().contains_key(&(tid as u32));
    if tid < 0 {
        Err(Errno::EINVAL)
    } else if known {
        Ok(())
    } else {
        Err(Errno::ESRCH)
    }
}

/// sched_getaffinity(2): the sandbox's virtual CPUs.
pub fn sched_getaffinity(args: &Args) -> Result<u64> {
    if args.usize(1) < 8 || !args.usize(1).is_multiple_of(8) {
        return Err(Errno::EINVAL);
    }
    // Unlike its relatives, this call takes negative ids for unknown ones.
    check_tid(args.i32(0)).map_err(|_| Errno::ESRCH)?;
    let cpus = kernel().config.get().cpus.clamp(1, 64);
    let mask = if cpus == 64 { u64::MAX } else { (1 << cpus) - 1 };
    args.address(2).write(&mask)?;
    Ok(8)
}

/// sched_setaffinity(2): accepted if it leaves a CPU; the host schedules.
pub fn sched_setaffinity(args: &Args) -> Result<u64> {
    check_tid(args.i32(0))?;
    let mut bytes = [0u8; 8];
    let len = args.usize(1).min(8);
    args.address(2).read_bytes(&mut bytes[..len])?;
    let cpus = kernel().config.get().cpus.clamp(1, 64);
    let mask = if cpus == 64 { u64::MAX } else { (1 << cpus) - 1 };
    if u64::from_le_bytes(bytes) & mask == 0 { Err(Errno::EINVAL) } else { Ok(0) }
}

/// sched_getscheduler(2): SCHED_OTHER.
pub fn sched_getscheduler(args: &Args) -> Result<u64> {
    check_tid(args.i32(0)).map(|()| 0)
}

/// sched_setparam(2): SCHED_OTHER has priority 0.
pub fn sched_setparam(args: &Args) -> Result<u64> {
    check_tid(args.i32(0))?;
    let priority: i32 = args.address(1).read()?;
    if priority == 0 { Ok(0) } else { Err(Errno::EINVAL) }
}

/// sched_setscheduler(2): only SCHED_OTHER, batch and idle with priority 0.
pub fn sched_setscheduler(args: &Args) -> Result<u64> {
    check_tid(args.i32(0))?;
    let priority: i32 = args.address(2).read()?;
    match (args.i32(1), priority) {
        (0 | 3 | 5, 0) => Ok(0),
        (1 | 2, 1..=99) => Err(Errno::EPERM),
        _ => Err(Errno::EINVAL),
    }
}

/// sched_rr_get_interval(2): a time slice of SCHED_OTHER.
pub fn sched_rr_get_interval(args: &Args) -> Result<u64> {
    const SLICE_NS: u64 = 4_000_000;
    check_tid(args.i32(0))?;
    args.address(1).write(&crate::time::syscalls::Timespec::from_ns(SLICE_NS))?;
    Ok(0)
}

/// sched_getparam(2).
pub fn sched_getparam(args: &Args) -> Result<u64> {
    check_tid(args.i32(0))?;
    args.address(1).write(&0i32)?;
    Ok(0)
}

/// sched_get_priority_max(2) and sched_get_priority_min(2).
pub fn sched_get_priority_max(args: &Args) -> Result<u64> {
    match args.i32(0) {
        1 | 2 => Ok(99),
        0 | 3 | 5 => Ok(0),
        _ => Err(Errno::EINVAL),
    }
}

/// See [`sched_get_priority_max`].
pub fn sched_get_priority_min(args: &Args) -> Result<u64> {
    match args.i32(0) {
        1 | 2 => Ok(1),
        0 | 3 | 5 => Ok(0),
        _ => Err(Errno::EINVAL),
    }
}

/// getcpu(2).
pub fn getcpu(args: &Args) -> Result<u64> {
    args.address(0).write_if_some(&0u32)?;
    args.address(1).write_if_some(&0u32)?;
    Ok(0)
}

/// The processes that `which` and `who` name (getpriority(2)); `ESRCH` if none.
fn named(which: u32, who: u32) -> Result<Vec<Arc<Process>>> {
    const PRIO_PROCESS: u32 = 0;
    const PRIO_PGRP: u32 = 1;
    const PRIO_USER: u32 = 2;
    let own = current_process();
    let tasks = &kernel().tasks;
    let found = match which {
        PRIO_PROCESS => {
            let tid = if who == 0 { own.pid } else { who };
            let of_thread = tasks.thread(tid).map(|thread| thread.process.clone());
            of_thread.or_else(|| tasks.process(tid)).into_iter().collect()
        }
        PRIO_PGRP => {
            let group = if who == 0 { own.process_group() } else { who };
            tasks.processes_where(|process| process.process_group() == group)
        }
        PRIO_USER => {
            let uid = if who == 0 { own.credentials.lock().uid } else { who };
            tasks.processes_where(|process| process.credentials.lock().uid == uid)
        }
        _ => return Err(Errno::EINVAL),
    };
    if found.is_empty() { Err(Errno::ESRCH) } else { Ok(found) }
}

/// getpriority(2): the highest priority of those named, as 20 minus nice.
pub fn getpriority(args: &Args) -> Result<u64> {
    let named = named(args.u32(0), args.u32(1))?;
    Ok(named.iter().map(|process| 20 - process.nice.get()).max().unwrap_or(20) as u64)
}

/// setpriority(2): the value is kept; the host schedules.
pub fn setpriority(args: &Args) -> Result<u64> {
    const HIGHEST: i32 = -20;
    const LOWEST: i32 = 19;
    let named = named(args.u32(0), args.u32(1))?;
    let nice = args.i32(2).clamp(HIGHEST, LOWEST);
    let euid = current_process().credentials.lock().euid;
    let mut outcome = Ok(0);
    for process in named {
        let is_stranger = {
            let theirs = process.credentials.lock();
            euid != 0 && euid != theirs.uid && euid != theirs.euid
        };
        if is_stranger {
            outcome = Err(Errno::EPERM);
        } else if euid != 0 && nice < process.nice.get() {
            outcome = Err(Errno::EACCES);
        } else {
            process.nice.set(nice);
        }
    }
    outcome
}
