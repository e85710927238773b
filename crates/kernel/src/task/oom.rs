//! Which process is to be ended first where memory is short (proc_pid_oom_score_adj(5)).

use alloc::sync::Arc;

use super::{Capabilities, Process, current_process};
use crate::errno::{Errno, Result};
use crate::state::kernel;

/// `oom_score_adj` of a process that is never ended for its memory.
pub const OOM_SCORE_ADJ_MIN: i32 = -1000;
/// `oom_score_adj` of a process that is ended first.
pub const OOM_SCORE_ADJ_MAX: i32 = 1000;

/// `oom_score_adj` of a process, which children inherit and execve(2) keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OomAdjustment {
    /// Thousandths of the memory that are added to what the process has.
    pub value: i32,
    /// The lowest value that may be set without `CAP_SYS_RESOURCE`: the last one that was set with it.
    lowest: i32,
}

impl OomAdjustment {
    /// The adjustment after somebody has set it, who is `privileged` if he has `CAP_SYS_RESOURCE`
    /// (`__set_oom_adj` in fs/proc/base.c).
    fn changed(self, value: i32, privileged: bool) -> Result<Self> {
        if !(OOM_SCORE_ADJ_MIN..=OOM_SCORE_ADJ_MAX).contains(&value) {
            return Err(Errno::EINVAL);
        }
        if privileged {
            return Ok(Self { value, lowest: value });
        }
        if value < self.lowest { Err(Errno::EACCES) } else { Ok(Self { value, ..self }) }
    }
}

impl Process {
    /// `oom_score_adj`: from [`OOM_SCORE_ADJ_MIN`] to [`OOM_SCORE_ADJ_MAX`].
    pub fn oom_score_adj(&self) -> i32 {
        self.oom_adjustment.get().value
    }

    /// Sets `oom_score_adj` on behalf of the running process: also that of the other processes with
    /// this memory, since it is freed only if all of them end. One that vfork(2) has made sets its own.
    pub fn set_oom_score_adj(&self, value: i32) -> Result<()> {
        let privileged = current_process().credentials.borrow_mut().can(Capabilities::SYS_RESOURCE);
        let adjustment = self.oom_adjustment.get().changed(value, privileged)?;
        self.oom_adjustment.set(adjustment);
        if !self.borrows_memory.get() && !self.is_zombie() && self.mm().users() > 1 {
            self.for_all_with_its_memory(|process| process.oom_adjustment.set(adjustment));
        }
        Ok(())
    }

    fn for_all_with_its_memory(&self, act: impl Fn(&Process)) {
        let mm = self.mm();
        let processes = kernel().tasks.processes_where(|process| {
            !process.is_zombie() && !process.is_init.get() && Arc::ptr_eq(&process.mm(), &mm)
        });
        processes.iter().for_each(|process| act(process));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::ProcessFiles;
    use crate::task::Credentials;
    use crate::task::ids::Pid;
    use crate::task::process::Shares;
    use crate::testing::Sandbox;

    /// A child of the running process, with memory of its own or the same.
    fn child(pid: u32, shares_memory: bool) -> Arc<Process> {
        let maker = current_process();
        let mm = if shares_memory { maker.mm() } else { Arc::new(crate::task::Space::new()) };
        let resources = ProcessFiles::new(kernel().fs.namespace.clone());
        let pid_namespace = Default::default();
        let shares = Shares { mm, resources, borrows_memory: false, pid_namespace };
        let child = Arc::new(maker.child(Pid::new(pid), Some(maker.pid), None, shares));
        kernel().tasks.processes.borrow_mut().insert(child.pid, child.clone());
        child
    }

    #[test]
    fn it_is_raised_by_everybody_and_lowered_by_the_privileged() {
        let start = OomAdjustment::default();
        let raised = start.changed(500, false).unwrap();
        assert_eq!(raised.changed(0, false), Ok(start), "as low as it was");
        assert_eq!(raised.changed(-1, false), Err(Errno::EACCES));
        let lowered = raised.changed(-300, true).unwrap();
        assert_eq!(lowered.changed(200, false).unwrap().changed(-300, false), Ok(lowered));
        assert_eq!(lowered.changed(-301, false), Err(Errno::EACCES));
        let fixed = lowered.changed(700, true).unwrap();
        assert_eq!(fixed.changed(699, false), Err(Errno::EACCES), "set with the capability");
        assert_eq!(start.changed(1001, true), Err(Errno::EINVAL));
        assert_eq!(start.changed(-1001, true), Err(Errno::EINVAL));
    }

    #[test]
    fn children_inherit_it_with_the_lowest_value() {
        let sandbox = Sandbox::new();
        let process = current_process();
        assert_eq!(process.set_oom_score_adj(-5), Err(Errno::EACCES));
        sandbox.become_user(Credentials::of_user(0, 0));
        process.set_oom_score_adj(-5).unwrap();
        let child = child(7, false);
        assert_eq!(child.oom_score_adj(), -5);
        sandbox.become_user(Credentials::of_user(1000, 1000));
        child.set_oom_score_adj(40).unwrap();
        child.set_oom_score_adj(-5).unwrap();
        assert_eq!(child.set_oom_score_adj(-6), Err(Errno::EACCES));
        child.set_oom_score_adj(40).unwrap();
        assert_eq!(process.oom_score_adj(), -5, "each has its own");
    }

    #[test]
    fn processes_with_the_same_memory_have_the_same() {
        let _sandbox = Sandbox::new();
        let (twin, other) = (child(7, true), child(8, false));
        twin.set_oom_score_adj(100).unwrap();
        assert_eq!(current_process().oom_score_adj(), 100);
        assert_eq!(other.oom_score_adj(), 0);
    }
}
