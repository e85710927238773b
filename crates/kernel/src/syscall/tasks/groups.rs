//! System calls on process groups and sessions (credentials(7)).

use alloc::sync::Arc;

use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::task::{Process, current, current_process};

/// getppid(2): the first process has no parent.
pub fn getppid() -> Result<u32> {
    Ok(current_process().parent_pid())
}

/// getpgid(2).
pub fn getpgid(pid: i32) -> Result<u64> {
    of_process(pid).map(|process| process.process_group() as u64)
}

/// getpgrp(2).
pub fn getpgrp() -> Result<u32> {
    Ok(current_process().process_group())
}

/// getsid(2).
pub fn getsid(pid: i32) -> Result<u64> {
    of_process(pid).map(|process| process.session() as u64)
}

/// A process by id, 0 being the caller; `ESRCH`.
pub(super) fn of_process(pid: i32) -> Result<Arc<Process>> {
    match pid {
        0 => Ok(current().process.clone()),
        1.. => kernel().tasks.process(pid as u32).ok_or(Errno::ESRCH),
        _ => Err(Errno::ESRCH),
    }
}

/// setsid(2).
pub fn setsid() -> Result<u32> {
    let own = current_process();
    let leads_a_group =
        !kernel().tasks.processes_where(|process| process.process_group() == own.pid).is_empty();
    if leads_a_group {
        return Err(Errno::EPERM);
    }
    let mut family = own.family.borrow_mut();
    family.session = own.pid;
    family.group = own.pid;
    Ok(own.pid)
}

/// setpgid(2).
pub fn setpgid(pid: i32, group: i32) -> Result<()> {
    let own = current_process();
    if group < 0 {
        return Err(Errno::EINVAL);
    }
    let target = of_process(pid)?;
    let family = target.family.get();
    if target.pid != own.pid {
        if family.parent != own.pid {
            return Err(Errno::ESRCH);
        }
        if family.has_executed {
            return Err(Errno::EACCES);
        }
    }
    if family.session == target.pid || family.session != own.session() {
        return Err(Errno::EPERM);
    }
    let group = if group == 0 { target.pid } else { group as u32 };
    let exists = group == target.pid
        || !kernel()
            .tasks
            .processes_where(|p| p.process_group() == group && p.session() == family.session)
            .is_empty();
    if !exists {
        return Err(Errno::EPERM);
    }
    target.family.borrow_mut().group = group;
    Ok(())
}
