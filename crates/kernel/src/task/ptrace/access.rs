//! Who may look into a process (ptrace(2), "Ptrace access mode checking").

use crate::errno::{Errno, Result};
use crate::task::{Capabilities, Credentials, Process, current_process};

/// `EPERM` unless the running process may trace `target`, or look into its memory.
pub fn check(target: &Process) -> Result<()> {
    let ids = |own: &Credentials| (own.uid, own.gid, own.permitted);
    if may_access(target, ids) { Ok(()) } else { Err(Errno::EPERM) }
}

/// `EACCES` unless the running process may read in `/proc` what `target` has: what counts is who it
/// is for files (`PTRACE_MODE_READ_FSCREDS`).
pub fn check_read(target: &Process) -> Result<()> {
    let ids = |own: &Credentials| (own.fsuid, own.fsgid, own.effective);
    if may_access(target, ids) { Ok(()) } else { Err(Errno::EACCES) }
}

/// User, group and capabilities that count.
type Ids = fn(&Credentials) -> (u32, u32, Capabilities);

/// `__ptrace_may_access` (kernel/ptrace.c) and `cap_ptrace_access_check` (security/commoncap.c).
fn may_access(target: &Process, ids: Ids) -> bool {
    let own = current_process();
    if own.pid == target.pid {
        return true;
    }
    let own = own.credentials.borrow_mut().clone();
    // Those who have executed nothing since they came into a namespace still hold what they had outside.
    let looks_into = target.dumpable.get()
        || own.can_in(&target.program_users.borrow_mut(), Capabilities::SYS_PTRACE);
    let theirs = target.credentials.borrow_mut();
    let (uid, gid, capabilities) = ids(&own);
    let is_same = theirs.users() == [uid; 3]
        && theirs.groups_of_process() == [gid; 3]
        && own.user_namespace == theirs.user_namespace
        && capabilities.contains(theirs.permitted);
    looks_into && (is_same || own.can_in(&theirs.user_namespace, Capabilities::SYS_PTRACE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{ProcessFiles, kernel};
    use crate::task::ids::Pid;
    use crate::task::user_namespace::UserNamespace;
    use crate::testing::Sandbox;

    /// Whether the running process may trace another one, once with these credentials.
    fn may(target: &Process, own: &Credentials) -> bool {
        *current_process().credentials.borrow_mut() = own.clone();
        assert_eq!(check(target).is_ok(), check_read(target).is_ok());
        check(target).is_ok()
    }

    #[test]
    fn who_comes_into_a_namespace_is_hidden_from_its_root() {
        let sandbox = Sandbox::new();
        let maker = Credentials::of_user(1000, 1000);
        let inside = maker.clone().in_namespace(UserNamespace::create(&maker).unwrap());
        sandbox.become_user(Credentials::of_user(0, 0));
        let files = ProcessFiles::new(kernel().fs.namespace.clone());
        let target = Process::from_outside(Pid::new(7), Credentials::of_user(0, 0), files);
        let (root, entered) = (Credentials::of_user(0, 0), inside.user_namespace.clone());
        assert!(may(&target, &root) && !may(&target, &inside) && !may(&target, &maker));
        target.take_user_namespace(root.clone().in_namespace(entered.clone()));
        assert!(!target.dumpable.get());
        assert!(may(&target, &root) && !may(&target, &inside) && !may(&target, &maker));
        // A program that it executes there belongs there.
        crate::exec::take_credentials(&target, root.clone().in_namespace(entered));
        assert!(may(&target, &root) && may(&target, &inside) && may(&target, &maker));
        // Who has made a namespace hides nothing in it.
        *target.credentials.borrow_mut() = maker.clone();
        target.take_user_namespace(inside.clone());
        assert!(target.dumpable.get());
    }
}
