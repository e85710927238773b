//! unshare(2): a process has for itself what it has shared.

use alloc::sync::Arc;

use super::clone::{CloneFlags, NAMESPACES, check_may_make, credentials_for};
use super::process::Process;
use crate::errno::{Errno, Result};

/// New clocks: `CLONE_NEWTIME`, which clone(2) takes for a part of the signal.
const NEWTIME: u64 = 0x80;

/// All that unshare(2) knows.
const KNOWN: CloneFlags = CloneFlags::THREAD
    .union(CloneFlags::FS)
    .union(CloneFlags::SIGHAND)
    .union(CloneFlags::VM)
    .union(CloneFlags::FILES)
    .union(CloneFlags::SYSVSEM)
    .union(NAMESPACES);

/// What is shared as soon as there are several threads.
const OF_THREADS: CloneFlags = CloneFlags::THREAD.union(CloneFlags::SIGHAND).union(CloneFlags::VM);

impl Process {
    /// unshare(2) with flags: whether the process has its semaphore adjustments undone, too. All
    /// threads of a process have the same files and directories here, so one alone cannot leave
    /// them: `EINVAL`.
    pub fn unshare(&self, flags: u64) -> Result<bool> {
        let namespaces = flags & NEWTIME != 0;
        let flags = CloneFlags::from_bits(flags & !NEWTIME).ok_or(Errno::EINVAL)?;
        self.check_unshare(flags, namespaces)?;
        if flags.intersects(NAMESPACES) {
            self.unshare_namespaces(flags)?;
        }
        // Others with the same directories are in other users.
        if flags.intersects(CloneFlags::FS | CloneFlags::NEWUSER) {
            self.unshare_fs();
        }
        if flags.contains(CloneFlags::FILES) {
            self.unshare_files();
        }
        // What was done to semaphores is undone where they are known.
        let leaves = flags.intersects(CloneFlags::SYSVSEM | CloneFlags::NEWIPC);
        Ok(leaves && self.has_one_thread())
    }

    fn check_unshare(&self, flags: CloneFlags, new_time: bool) -> Result<()> {
        // New users are for a process with one thread.
        let needs_one_thread = flags.intersects(OF_THREADS | CloneFlags::NEWUSER);
        if !KNOWN.contains(flags) || needs_one_thread && !self.has_one_thread() {
            return Err(Errno::EINVAL);
        }
        if flags.contains(CloneFlags::VM) && self.mm().users() > 1 {
            return Err(Errno::EINVAL);
        }
        if new_time {
            return Err(Errno::EPERM);
        }
        if flags.intersects(NAMESPACES) {
            check_may_make(flags)?;
        }
        let of_process = CloneFlags::FS | CloneFlags::FILES | NAMESPACES;
        if flags.intersects(of_process) && !self.has_one_thread() {
            return Err(Errno::EINVAL);
        }
        Ok(())
    }

    /// Makes all that can fail, and gives it to the process then.
    fn unshare_namespaces(&self, flags: CloneFlags) -> Result<()> {
        let credentials = credentials_for(self, flags)?;
        let owner = &credentials.user_namespace;
        let namespaces = self.namespaces().unshared(flags, owner)?;
        let pids = flags.contains(CloneFlags::NEWPID).then(|| self.new_pid_namespace(owner));
        let pids = pids.transpose()?;
        if flags.contains(CloneFlags::NEWNS) {
            self.set_fs(self.copied_mounts(owner)?);
        }
        self.set_namespaces(Arc::new(namespaces));
        if let Some(pids) = pids {
            self.enter_pid_namespace(&pids);
        }
        let old = core::mem::replace(&mut *self.credentials.borrow_mut(), credentials);
        drop(old);
        Ok(())
    }

    fn has_one_thread(&self) -> bool {
        self.threads.borrow_mut().len() <= 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::current_process;
    use crate::testing::Sandbox;

    #[test]
    fn namespaces_need_privileges_and_unknown_flags_are_refused() {
        let _sandbox = Sandbox::new();
        let process = current_process();
        let unshare = |flags| process.unshare(flags);
        assert_eq!(unshare(0), Ok(false));
        assert_eq!(unshare(CloneFlags::SYSVSEM.bits()), Ok(true));
        assert_eq!(unshare((CloneFlags::VM | CloneFlags::SIGHAND).bits()), Ok(false));
        assert_eq!(unshare(NEWTIME), Err(Errno::EPERM));
        assert_eq!(unshare(CloneFlags::NEWUTS.bits()), Err(Errno::EPERM));
        assert_eq!(unshare(CloneFlags::PIDFD.bits()), Err(Errno::EINVAL));
        assert_eq!(unshare(1), Err(Errno::EINVAL));
    }

    #[test]
    fn directories_are_the_own_ones_afterwards() {
        let _sandbox = Sandbox::new();
        let process = current_process();
        let shared = process.fs();
        process.unshare(CloneFlags::FS.bits()).unwrap();
        process.fs().borrow_mut().umask = 0o77;
        assert_eq!(shared.borrow_mut().umask, 0o22);
    }
}
