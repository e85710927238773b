//! Processes, threads, process groups and sessions by their ids (credentials(7)).
//!
//! Linux draws all of them from one set of numbers: a process has that of its main thread, and
//! leads a group and a session that have its own. Here they are different types, of which one
//! becomes another only by a method that says so.
//!
//! An id has one number in the whole sandbox, and one in each PID namespace that knows it
//! ([`super::pid_namespace`]). A system call takes and returns those of the caller's namespace.

use alloc::sync::Arc;
use core::fmt;

use super::pid_namespace::PidNamespace;
use super::sched_attributes::Scheduling;
use super::thread::{current, current_arc, current_process, running};
use super::{Process, Thread};
use crate::args::{PidNumber, Returned};
use crate::errno::{Errno, Result};
use crate::state::kernel;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub struct $name(u32);

        impl $name {
            /// The id with a number in the initial namespace.
            pub const fn new(number: u32) -> Self {
                Self(number)
            }

            /// The id with a number in the caller's namespace. It is nobody's if there is none.
            pub fn from_caller(number: u32) -> Self {
                Self(from_caller(number))
            }

            /// Its number in the initial namespace.
            pub const fn number(self) -> u32 {
                self.0
            }

            /// Its number in a namespace; 0 if it has none there.
            #[inline]
            pub fn number_in(self, namespace: &PidNamespace) -> u32 {
                namespace.number_of(self.0)
            }

            /// Its number in the caller's namespace; 0 if it has none there.
            pub fn for_caller(self) -> u32 {
                for_caller(self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl Returned for $name {
            #[inline]
            fn into_register(self) -> u64 {
                self.for_caller().into()
            }
        }
    )*};
}

ids! {
    /// The id of a process.
    Pid;
    /// The id of a thread.
    Tid;
    /// The id of a process group (setpgid(2)).
    Pgid;
    /// The id of a session (setsid(2)).
    Sid;
}

// Out of line, since system calls have many of them.

/// The number in the running process' namespace of the id with a number in the initial one.
#[inline(never)]
fn for_caller(id: u32) -> u32 {
    running().map_or(id, |thread| thread.process.pid_namespace.number_of(id))
}

/// The number in the initial namespace of the id with a number in the running process' namespace.
#[inline(never)]
fn from_caller(number: u32) -> u32 {
    running().map_or(number, |thread| thread.process.pid_namespace.id_of(number))
}

impl Tid {
    /// The process whose main thread it is.
    pub const fn process(self) -> Pid {
        Pid(self.0)
    }
}

impl Pid {
    /// Its main thread.
    pub const fn main_thread(self) -> Tid {
        Tid(self.0)
    }

    /// The group that it leads, if it leads one.
    pub const fn led_group(self) -> Pgid {
        Pgid(self.0)
    }

    /// The session that it leads, if it leads one.
    pub const fn led_session(self) -> Sid {
        Sid(self.0)
    }
}

impl Pgid {
    /// The process that leads it, if that is still there.
    pub const fn led_by(self) -> Pid {
        Pid(self.0)
    }
}

impl Sid {
    /// The process that leads it, if that is still there.
    pub const fn led_by(self) -> Pid {
        Pid(self.0)
    }

    /// The group of its leader.
    pub const fn first_group(self) -> Pgid {
        Pgid(self.0)
    }
}

/// Processes that a call is about (kill(2), wait4(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Processes {
    /// All that there are.
    All,
    /// The one with this id.
    One(Pid),
    /// Those of a process group.
    Group(Pgid),
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

impl PidNumber {
    /// The id of a process; `EINVAL` if no process can have it.
    pub fn pid(self) -> Result<Pid> {
        self.tid().map(Tid::process)
    }

    /// The id of a thread; `EINVAL` if no thread can have it.
    pub fn tid(self) -> Result<Tid> {
        let number = u32::try_from(self.0).ok().filter(|&number| number != 0);
        number.map(Tid::from_caller).ok_or(Errno::EINVAL)
    }

    /// The process, that of the caller for 0; `ESRCH`.
    #[inline(never)]
    pub fn process(self) -> Result<Arc<Process>> {
        match self.0 {
            0 => Ok(current().process.clone()),
            _ => kernel().tasks.process(Pid::from_caller(self.0 as u32)).ok_or(Errno::ESRCH),
        }
    }

    /// The thread, the caller for 0; `ESRCH`.
    #[inline(never)]
    pub fn thread(self) -> Result<Arc<Thread>> {
        match self.0 {
            0 => Ok(current_arc()),
            _ => kernel().tasks.thread(Tid::from_caller(self.0 as u32)).ok_or(Errno::ESRCH),
        }
    }

    /// What the thread of this number has asked of the scheduler: also a main thread that has ended
    /// and that nobody has waited for.
    pub fn scheduling(self) -> Result<Scheduling> {
        match self.thread() {
            Ok(thread) => Ok(thread.scheduling.get()),
            Err(error) => {
                let process = kernel().tasks.process(Pid::from_caller(self.0 as u32));
                let ended = process.filter(|process| process.is_zombie()).ok_or(error)?;
                Ok(ended.remains.get().scheduling)
            }
        }
    }

    /// As kill(2) and wait4(2) take it: 0 is the caller's group, -1 all processes, and other
    /// negative numbers are groups. `ESRCH` for the number that is none.
    pub fn processes(self) -> Result<Processes> {
        match self.0 {
            1.. => Ok(Processes::One(Pid::from_caller(self.0 as u32))),
            0 => Ok(Processes::Group(current_process().process_group())),
            -1 => Ok(Processes::All),
            i32::MIN => Err(Errno::ESRCH),
            group => Ok(Processes::Group(Pgid::from_caller(group.unsigned_abs()))),
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
        assert_eq!(PidNumber(7).processes(), Ok(Processes::One(Pid(7))));
        assert_eq!(PidNumber(-7).processes(), Ok(Processes::Group(Pgid(7))));
        assert_eq!(PidNumber(0).processes(), Ok(Processes::Group(own.process_group())));
        assert_eq!(PidNumber(-1).processes(), Ok(Processes::All));
        assert_eq!(PidNumber(i32::MIN).processes(), Err(Errno::ESRCH));
        assert!(Processes::One(own.pid).includes(&own) && !Processes::One(Pid(77)).includes(&own));
    }

    #[test]
    fn zero_is_the_caller_and_no_number_of_its_own() {
        let _sandbox = Sandbox::new();
        assert_eq!(PidNumber(0).process().map(|process| process.pid), Ok(current_process().pid));
        assert_eq!(PidNumber(0).thread().map(|thread| thread.tid()), Ok(current().tid()));
        assert_eq!(PidNumber(0).pid(), Err(Errno::EINVAL));
        assert_eq!(PidNumber(-5).tid(), Err(Errno::EINVAL));
        assert_eq!(PidNumber(-5).process().err(), Some(Errno::ESRCH));
        assert_eq!(PidNumber(77).thread().err(), Some(Errno::ESRCH));
    }
}
