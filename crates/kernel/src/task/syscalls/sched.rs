//! System calls on scheduling. The host schedules; what can be asked is answered.

use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::syscall::Args;
use crate::task::sched;

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
    check_tid(args.i32(0))?;
    if args.usize(1) < 8 || !args.usize(1).is_multiple_of(8) {
        return Err(Errno::EINVAL);
    }
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

/// getpriority(2): nice value 0, as 20 minus nice.
pub fn getpriority(args: &Args) -> Result<u64> {
    if args.u32(0) > 2 { Err(Errno::EINVAL) } else { Ok(20) }
}

/// setpriority(2): higher nice values are accepted and left to the host.
pub fn setpriority(args: &Args) -> Result<u64> {
    match (args.u32(0), args.i32(2)) {
        (3.., _) => Err(Errno::EINVAL),
        (_, ..0) => Err(Errno::EACCES),
        _ => Ok(0),
    }
}
