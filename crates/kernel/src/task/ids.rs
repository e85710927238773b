//! Processes and threads by their ids, as system calls name them.

use alloc::sync::Arc;

use super::thread::{current, current_arc, current_process};
use super::{Process, Thread};
use crate::args::Pid;
use crate::errno::{Errno, Result};
use crate::state::kernel;

/// Processes that a call is about (kill(2), wait4(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Processes {
    /// All that there are.
    All,
    /// The one with this id.
    One(u32),
    /// Those of a process group.
    Group(u32),
}

impl Processes {
    /// Whether a process is one of them.
    pub fn includes(self, process: &Process) -> bool {
        match self {
            Self::All => true,
            Self::One(pid) => process.pid == pid,
            Self::Group(group) => process.process_group() == group,
        }
    }
}

impl Pid {
    /// The number of a process or thread; `EINVAL` if it cannot have one.
    pub fn positive(self) -> Result<u32> {
        u32::try_from(self.0).ok().filter(|&id| id != 0).ok_or(Errno::EINVAL)
    }

    /// The process, that of the caller for 0; `ESRCH`.
    pub fn process(self) -> Result<Arc<Process>> {
        match u32::try_from(self.0) {
            Ok(0) => Ok(current().process.clone()),
            Ok(pid) => kernel().tasks.process(pid).ok_or(Errno::ESRCH),
            Err(_) => Err(Errno::ESRCH),
        }
    }

    /// The thread, the caller for 0; `ESRCH`.
    pub fn thread(self) -> Result<Arc<Thread>> {
        match u32::try_from(self.0) {
            Ok(0) => Ok(current_arc()),
            Ok(tid) => kernel().tasks.thread(tid).ok_or(Errno::ESRCH),
            Err(_) => Err(Errno::ESRCH),
        }
    }

    /// As kill(2) and wait4(2) take it: 0 is the caller's group, -1 all processes, and other
    /// negative numbers are groups. `ESRCH` for the number that is none.
    pub fn processes(self) -> Result<Processes> {
        match self.0 {
            1.. => Ok(Processes::One(self.0 as u32)),
            0 => Ok(Processes::Group(current_process().process_group())),
            -1 => Ok(Processes::All),
            i32::MIN => Err(Errno::ESRCH),
            group => Ok(Processes::Group(group.unsigned_abs())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;

    #[test]
    fn a_number_names_a_process_a_group_or_all() {
        let _sandbox = Sandbox::new();
        let own = current_process();
        assert_eq!(Pid(7).processes(), Ok(Processes::One(7)));
        assert_eq!(Pid(-7).processes(), Ok(Processes::Group(7)));
        assert_eq!(Pid(0).processes(), Ok(Processes::Group(own.process_group())));
        assert_eq!(Pid(-1).processes(), Ok(Processes::All));
        assert_eq!(Pid(i32::MIN).processes(), Err(Errno::ESRCH));
        assert!(Processes::One(own.pid).includes(&own) && !Processes::One(77).includes(&own));
    }

    #[test]
    fn zero_is_the_caller_and_no_number_of_its_own() {
        let _sandbox = Sandbox::new();
        assert_eq!(Pid(0).process().map(|process| process.pid), Ok(current_process().pid));
        assert_eq!(Pid(0).thread().map(|thread| thread.tid()), Ok(current().tid()));
        assert_eq!(Pid(0).positive(), Err(Errno::EINVAL));
        assert_eq!(Pid(-5).positive(), Err(Errno::EINVAL));
        assert_eq!(Pid(-5).process().err(), Some(Errno::ESRCH));
        assert_eq!(Pid(77).thread().err(), Some(Errno::ESRCH));
    }
}
