//! System calls on process groups and sessions (credentials(7)).

use crate::args::Pid;
use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::task::current_process;

/// getppid(2): the first process has no parent.
pub fn getppid() -> Result<u32> {
    Ok(current_process().parent_pid())
}

/// getpgid(2).
pub fn getpgid(pid: Pid) -> Result<u32> {
    pid.process().map(|process| process.process_group())
}

/// getpgrp(2).
pub fn getpgrp() -> Result<u32> {
    Ok(current_process().process_group())
}

/// getsid(2).
pub fn getsid(pid: Pid) -> Result<u32> {
    pid.process().map(|process| process.session())
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
pub fn setpgid(pid: Pid, group: i32) -> Result<()> {
    let own = current_process();
    if group < 0 {
        return Err(Errno::EINVAL);
    }
    let target = pid.process()?;
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
