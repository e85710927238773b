//! System calls on process groups and sessions (credentials(7)).

use crate::args::PidNumber;
use crate::errno::{Errno, Result};
use crate::state::kernel;
use crate::task::ids::{Pgid, Sid};
use crate::task::process::Family;
use crate::task::{Process, current_process, pid_namespace};

/// getppid(2): init has no parent.
pub fn getppid() -> Result<u32> {
    let own = current_process();
    Ok(own.parent_number(&own.pid_namespace))
}

/// getpgid(2).
pub fn getpgid(pid: PidNumber) -> Result<Pgid> {
    pid.process().map(|process| process.process_group())
}

/// getpgrp(2).
pub fn getpgrp() -> Result<Pgid> {
    Ok(current_process().process_group())
}

/// getsid(2).
pub fn getsid(pid: PidNumber) -> Result<Sid> {
    pid.process().map(|process| process.session())
}

/// setsid(2).
pub fn setsid() -> Result<Sid> {
    let own = current_process();
    let (group, session) = (own.pid.led_group(), own.pid.led_session());
    if !kernel().tasks.processes_where(|process| process.process_group() == group).is_empty() {
        return Err(Errno::EPERM);
    }
    let old = own.family.get();
    own.family.set(Family { session, group, ..old });
    left_group(&own, old.group);
    pid_namespace::has_left(&own, old.session.led_by());
    Ok(session)
}

/// A process has left a group, perhaps as the last one of it.
fn left_group(process: &Process, group: Pgid) {
    pid_namespace::has_left(process, group.led_by());
}

/// setpgid(2).
pub fn setpgid(pid: PidNumber, group: i32) -> Result<()> {
    let own = current_process();
    if group < 0 {
        return Err(Errno::EINVAL);
    }
    let target = pid.process()?;
    let family = target.family.get();
    if target.pid != own.pid {
        if family.parent != Some(own.pid) {
            return Err(Errno::ESRCH);
        }
        if family.has_executed {
            return Err(Errno::EACCES);
        }
    }
    if target.leads_session() || family.session != own.session() {
        return Err(Errno::EPERM);
    }
    let own_group = target.pid.led_group();
    let group = if group == 0 { own_group } else { Pgid::from_caller(group as u32) };
    let exists = group == own_group
        || !kernel()
            .tasks
            .processes_where(|p| p.process_group() == group && p.session() == family.session)
            .is_empty();
    if !exists {
        return Err(Errno::EPERM);
    }
    target.family.borrow_mut().group = group;
    left_group(&target, family.group);
    Ok(())
}
