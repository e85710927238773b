//! Terminals: pseudo terminals (pty(7)) with a line discipline of their own,
//! and the host's terminal behind the standard streams.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`termios`] | modes, and the numbers of the ioctls |
//! | [`discipline`] | editing, echo, signals and output processing, without any I/O |
//! | [`job`] | sessions, foreground groups, and who is told by signal |
//! | [`pty`], [`devpts`] | the two ends of a pseudo terminal, `/dev/ptmx` and `/dev/pts` |
//! | [`host`] | the terminal of `thaw run` |

pub mod devpts;
pub mod discipline;
pub mod host;
pub mod ioctl;
pub mod job;
pub mod pty;
pub mod termios;

use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};

use crate::errno::{Errno, Result};
use crate::sync::KernelCell;
use crate::task::Process;
use crate::task::ids::{Pid, Sid};
use crate::task::pid_namespace::PidNamespace;

use host::HostTerminal;
use job::JobControl;
use pty::Pty;

/// `kernel.pty.max`.
pub const PTY_MAX: u32 = 4096;

/// All terminals of the sandbox.
#[derive(Default)]
pub struct Terminals {
    /// The terminal behind the standard streams.
    pub host: HostTerminal,
    ptys: KernelCell<BTreeMap<u32, Weak<Pty>>>,
}

/// The controlling terminal of a session.
pub enum Controlling {
    /// The host's.
    Host,
    /// A pseudo terminal.
    Pty(Arc<Pty>),
}

impl Terminals {
    /// The pseudo terminal with this number.
    pub fn pty(&self, number: u32) -> Option<Arc<Pty>> {
        self.ptys.borrow_mut().get(&number).and_then(Weak::upgrade)
    }

    /// The numbers of all pseudo terminals.
    pub fn numbers(&self) -> alloc::vec::Vec<u32> {
        self.ptys.borrow_mut().keys().copied().collect()
    }

    /// A new pseudo terminal with the lowest free number; `ENOSPC`.
    pub fn new_pty(&self, owner: (u32, u32)) -> Result<Arc<Pty>> {
        let mut ptys = self.ptys.borrow_mut();
        let mut numbers = if host::is_there() { devpts::HOST_NUMBER + 1 } else { 0 }..PTY_MAX;
        let number = numbers.find(|number| !ptys.contains_key(number)).ok_or(Errno::ENOSPC)?;
        let pty = Pty::new(number, owner);
        ptys.insert(number, Arc::downgrade(&pty));
        Ok(pty)
    }

    fn forget(&self, number: u32) {
        self.ptys.borrow_mut().remove(&number);
    }

    /// The controlling terminal of a process.
    pub fn controlling(&self, pid: Pid, session: Sid) -> Option<Controlling> {
        let holds = |job: &KernelCell<JobControl>| job.borrow_mut().controls(pid, session);
        if host::is_there() && holds(&self.host.job) {
            return Some(Controlling::Host);
        }
        let ptys: alloc::vec::Vec<Arc<Pty>> =
            self.ptys.borrow_mut().values().filter_map(Weak::upgrade).collect();
        ptys.into_iter().find(|pty| holds(&pty.job)).map(Controlling::Pty)
    }

    /// Number and foreground group of a process' controlling terminal, as
    /// `/proc/PID/stat` shows them; 0 and -1 without one.
    pub fn numbers_of(&self, process: &Process, namespace: &PidNamespace) -> (u64, i64) {
        match self.controlling(process.pid, process.session()) {
            None => (0, -1),
            Some(Controlling::Host) => {
                let foreground = job::foreground_number(&self.host.job, namespace);
                (super::dev::makedev(136, 0), foreground.into())
            }
            Some(Controlling::Pty(pty)) => (
                super::dev::makedev(136, u64::from(pty.number)),
                job::foreground_number(&pty.job, namespace).into(),
            ),
        }
    }
}
