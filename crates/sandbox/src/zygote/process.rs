//! The host process of a zygote or sandbox, as the library sees it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, pidfd_send_signal};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity, sched_yield};
use serde::{Deserialize, Serialize};

use super::handle::Connected;
use crate::limits::{Limits, ResourceLimits};
use crate::state::Subject;

/// How a process ended, once it has. Filled in by the thread that listens to
/// the zygote parent.
#[derive(Debug, Default)]
pub(crate) struct ExitCell {
    status: Mutex<Option<ExitStatus>>,
    ended: Condvar,
}

impl ExitCell {
    /// Stores the wait status (wait(2)) and wakes all waiters.
    pub fn fill(&self, status: i32) {
        let mut stored = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        stored.get_or_insert(ExitStatus::from_raw(status));
        self.ended.notify_all();
    }

    pub fn get(&self) -> Option<ExitStatus> {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn wait(&self) -> ExitStatus {
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(status) = *status {
                return status;
            }
            status = self.ended.wait(status).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// How a zygote parent calls one of its children.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum KnownAs {
    /// By the number with which it was asked for.
    Created(u64),
    /// By its number in the parent's pid namespace: a template has forked it.
    Copy(u32),
}

/// A process forked by the zygote parent. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Process {
    /// As `/proc` and people number it.
    pub pid: u32,
    /// As the calls of this process number it; see [`Numbers`].
    pub own_number: Option<Pid>,
    pub pidfd: Arc<OwnedFd>,
    pub exit: Arc<ExitCell>,
    pub limits: Arc<Limits>,
    /// Keeps the zygote parent alive as long as one of its children is wanted.
    pub parent: Arc<Connected>,
    /// The processors that it may run on, if it is to be woken on one of them.
    pub affinity: Option<CpuSet>,
    pub known_as: KnownAs,
    /// Its slot at the parent; templates have none.
    pub slot: Option<u32>,
}

impl Process {
    /// Ends the process at once. Harmless if it has ended already.
    pub fn kill(&self) -> io::Result<()> {
        self.signal(Signal::KILL)
    }

    /// Makes a sandbox look at its control socket even if its guest computes
    /// and never waits. Harmless if it has ended already.
    pub fn ring(&self) -> io::Result<()> {
        self.signal(Signal::USR1)
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        if self.exit.get().is_some() {
            return Ok(());
        }
        match pidfd_send_signal(&self.pidfd, signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Runs `send`, which wakes the process, so that it wakes on the processor of
    /// the caller, who lets it go first: that is a switch of context, where an
    /// idle processor would have to be woken first, which takes tens of
    /// microseconds in a virtual machine. It may run anywhere again afterwards.
    /// In a burst the caller has more to do, and nothing special is done.
    pub fn woken_here<T>(&self, send: impl FnOnce() -> T) -> T {
        let Some(everywhere) = self.affinity.filter(|_| !is_burst()) else { return send() };
        let pid = self.own_number;
        let mut here = CpuSet::new();
        here.set(sched_getcpu());
        // Without the right to do so it wakes wherever it likes.
        let pinned = pid.is_some() && sched_setaffinity(pid, &here).is_ok();
        let result = send();
        if pinned {
            let _ = sched_setaffinity(pid, &everywhere);
            sched_yield();
        }
        result
    }

    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether the process runs: neither reaped nor a zombie.
    pub fn is_running(&self) -> io::Result<bool> {
        let mut events = [PollFd::new(&self.pidfd, PollFlags::IN)];
        Ok(poll(&mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? == 0)
    }

    /// Opens a file of the process in `/proc`. What is opened belongs to this
    /// process and not to one that has got its number since: a process that
    /// still runs after the file was opened has had the number all along.
    pub fn proc_file(&self, name: &str) -> io::Result<File> {
        let file = File::open(format!("/proc/{}/{name}", self.pid))?;
        if self.is_running()? { Ok(file) } else { Err(Errno::SRCH.into()) }
    }

    /// The process, for whoever asks the state helper about its memory.
    pub fn subject(&self) -> io::Result<Subject> {
        let (helper, helper_id) = self.parent.state_helper();
        Ok(Subject {
            helper,
            helper_id,
            pid: self.pid,
            pidfd: self.pidfd.try_clone()?,
            wanted: None,
        })
    }

    /// Sets the limits of the sandbox.
    pub fn set_limits(&self, limits: ResourceLimits, cpu_time: Option<Duration>) -> io::Result<()> {
        self.limits.set(self, limits)?;
        match cpu_time {
            Some(limit) => self.limits.set_cpu_time(self, limit),
            None => Ok(()),
        }
    }
}

/// Whether this was called very recently, too.
fn is_burst() -> bool {
    const BURST: Duration = Duration::from_millis(1);
    static LAST: Mutex<Option<Instant>> = Mutex::new(None);
    let now = Instant::now();
    let last = LAST.lock().unwrap_or_else(PoisonError::into_inner).replace(now);
    last.is_some_and(|last| now.duration_since(last) < BURST)
}

impl Drop for Process {
    fn drop(&mut self) {
        // The only error left is a missing right, which a test of the zygote
        // parent excludes; there is nobody to tell here.
        let _ = self.kill();
    }
}

/// The processors that a process may run on.
pub(crate) fn affinity_of(own_number: Option<Pid>) -> Option<CpuSet> {
    sched_getaffinity(Some(own_number?)).ok()
}

/// The numbers of another process. They are the same unless the caller is in a pid
/// namespace of its own and sees the `/proc` of another, as a monitored daemon does that
/// has the user id of whoever started it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Numbers {
    /// In the pid namespace of the caller's `/proc`: for files there, and for people.
    pub pid: u32,
    /// In the caller's own: for host calls. `None`: it is not to be seen there.
    pub own: Option<Pid>,
}

impl Numbers {
    /// Those of the process behind a pidfd.
    pub fn of(pidfd: BorrowedFd<'_>) -> io::Result<Self> {
        let information = information_of(pidfd)?;
        let pid = pid_in(&information)?;
        if levels_below_proc() == 0 {
            return Ok(Self { pid, own: number(pid) });
        }
        Ok(Self { pid, own: number_at_level(&information, levels_below_proc()) })
    }

    /// Those of the process behind a pidfd whose number in calls is known.
    pub fn of_own(own: Pid, pidfd: BorrowedFd<'_>) -> io::Result<Self> {
        let pid = match levels_below_proc() {
            0 => Pid::as_raw(Some(own)) as u32,
            _ => pid_of(pidfd)?,
        };
        Ok(Self { pid, own: Some(own) })
    }
}

/// How host calls number the process that `/proc` knows by this number now.
pub(crate) fn own_number_of(pid: u32) -> Option<Pid> {
    if levels_below_proc() == 0 {
        return number(pid);
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    number_at_level(&status, levels_below_proc())
}

fn number(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

/// How many levels the pid namespace of this process is below that of its `/proc`.
fn levels_below_proc() -> usize {
    static LEVELS: OnceLock<usize> = OnceLock::new();
    *LEVELS.get_or_init(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        numbers_in(&status).count().saturating_sub(1)
    })
}

/// The number of a process at a level, from the field `NSpid` (proc_pid_status(5)).
fn number_at_level(text: &str, level: usize) -> Option<Pid> {
    numbers_in(text).nth(level).and_then(number)
}

fn numbers_in(text: &str) -> impl Iterator<Item = u32> {
    let line = text.lines().find_map(|line| line.strip_prefix("NSpid:"));
    line.unwrap_or_default().split_whitespace().filter_map(|number| number.parse().ok())
}

/// The process id of this process as its `/proc` has it.
pub fn own_pid() -> u32 {
    let link = std::fs::read_link("/proc/self").ok();
    let pid = link.and_then(|link| link.to_str()?.parse().ok());
    pid.unwrap_or_else(std::process::id)
}

/// The process id behind a pidfd, in the pid namespace of the caller's `/proc`.
pub(crate) fn pid_of(pidfd: BorrowedFd<'_>) -> io::Result<u32> {
    pid_in(&information_of(pidfd)?)
}

/// Of the file that a pidfd is (proc_pid_fdinfo(5)).
fn information_of(pidfd: BorrowedFd<'_>) -> io::Result<String> {
    use std::os::fd::AsRawFd;
    std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))
}

fn pid_in(information: &str) -> io::Result<u32> {
    information
        .lines()
        .find_map(|line| line.strip_prefix("Pid:"))
        .and_then(|pid| pid.trim().parse().ok())
        .filter(|&pid| pid > 0)
        .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    #[test]
    fn numbers_are_those_of_the_namespaces_from_that_of_proc_on() {
        let information = "pos:\t0\nflags:\t02000002\nPid:\t4711\nNSpid:\t4711\t12\t7\t1\n";
        assert_eq!(pid_in(information).unwrap(), 4711);
        assert_eq!(number_at_level(information, 0), number(4711));
        assert_eq!(number_at_level(information, 1), number(12));
        assert_eq!(number_at_level(information, 4), None);
        // The process has ended.
        assert!(pid_in("Pid:\t-1\nNSpid:\t-1\n").is_err());
    }

    #[test]
    fn without_a_namespace_of_its_own_a_process_has_one_number() {
        let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        let numbers = Numbers::of(pidfd.as_fd()).unwrap();
        assert_eq!(numbers, Numbers { pid: own_pid(), own: Some(getpid()) });
        assert_eq!(numbers, Numbers::of_own(getpid(), pidfd.as_fd()).unwrap());
    }
}
