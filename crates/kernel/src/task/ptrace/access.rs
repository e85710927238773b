//! Who may look into a process (ptrace(2), "Ptrace access mode checking").

use crate::errno::{Errno, Result};
use crate::task::{Capabilities, Process, current_process};

/// `EPERM` unless the running process may trace `target`, or look into its memory.
pub fn check(target: &Process) -> Result<()> {
    let own = current_process();
    if own.pid == target.pid {
        return Ok(());
    }
    let own = own.credentials.borrow_mut().clone();
    let theirs = target.credentials.borrow_mut();
    if own.can_in(&theirs.user_namespace, Capabilities::SYS_PTRACE) {
        return Ok(());
    }
    let may = theirs.users() == [own.uid; 3]
        && theirs.groups_of_process() == [own.gid; 3]
        && own.user_namespace == theirs.user_namespace
        && own.permitted.contains(theirs.permitted)
        && target.dumpable.get();
    if may { Ok(()) } else { Err(Errno::EPERM) }
}
