//! Core scheduling: hardware threads of one core run processes of one group at a time, so
//! that no sandbox of another tenant shares a core's caches and buffers with one of this
//! tenant's while it runs (Documentation/admin-guide/hw-vuln/core-scheduling.rst).
//!
//! The host kernel marks a group by a cookie that its members have. A cookie lives as long as
//! somebody has it, so each group has a thread that does nothing else. A cookie can be
//! given to another process by a thread that has it (`PR_SCHED_CORE_SHARE_TO`). Threads that
//! boot sandboxes take it for that moment only, and put it back by taking that of a
//! thread without one.
//!
//! Children inherit it (fork(2), clone(2)), so copies of a template and the processes of a
//! guest are in the group of the sandbox. The right to give it is the one to read the
//! process (ptrace(2), `PTRACE_MODE_READ_REALCREDS`), which the owner of the sandboxes' user
//! namespace has. Sandboxes cannot change it: no filter of theirs allows prctl(2) to.
#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use crate::zygote::Process;

/// `PR_SCHED_CORE` (linux/prctl.h), and what it can do.
const PR_SCHED_CORE: libc::c_int = 62;
const CREATE: libc::c_ulong = 1;
const SHARE_TO: libc::c_ulong = 2;
const SHARE_FROM: libc::c_ulong = 3;
/// Whom it is done to: one thread, or all of a process.
const SCOPE_THREAD: libc::c_ulong = 0;
const SCOPE_PROCESS: libc::c_ulong = 1;
/// A thread that only waits needs little.
const STACK: usize = 64 << 10;

/// Why there is no core scheduling.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// No core has two hardware threads that are in use.
    #[error(
        "no two hardware threads share a core of this host, as far as it can tell, so there is \
         nothing for --core-scheduling to keep apart: leave it out (in a virtual machine, ask \
         whoever schedules it)"
    )]
    NoThreads,
    /// The host kernel cannot do it.
    #[error(
        "the host kernel has no core scheduling (CONFIG_SCHED_CORE, Linux 5.14): use one that \
         has, or turn hardware threads off with `echo off > /sys/devices/system/cpu/smt/control` \
         and leave --core-scheduling out"
    )]
    NoKernel,
    /// Something else.
    #[error("core scheduling does not work ({0}); leave --core-scheduling out")]
    Host(io::Error),
}

impl From<io::Error> for CoreError {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENODEV) => Self::NoThreads,
            Some(libc::EINVAL) => Self::NoKernel,
            _ => Self::Host(error),
        }
    }
}

/// Core scheduling on this host.
#[derive(Clone, Debug)]
pub struct CoreScheduling {
    /// A thread without a cookie.
    plain: Arc<Holder>,
}

impl CoreScheduling {
    /// Finds out whether the host has it, by making a group.
    ///
    /// # Errors
    /// It has not.
    pub fn start() -> Result<Self, CoreError> {
        let scheduling = Self { plain: Arc::new(Holder::start(|| Ok(()))?) };
        scheduling.group()?;
        Ok(scheduling)
    }

    /// A new group, with nobody in it.
    ///
    /// # Errors
    /// The host refuses a thread or a cookie.
    pub fn group(&self) -> Result<CoreGroup, CoreError> {
        let holder = Holder::start(|| act(CREATE, 0, SCOPE_THREAD))?;
        Ok(CoreGroup { plain: self.plain.clone(), holder: Arc::new(holder) })
    }
}

/// Sandboxes that may run on one core at a time.
#[derive(Clone, Debug)]
pub struct CoreGroup {
    plain: Arc<Holder>,
    holder: Arc<Holder>,
}

impl CoreGroup {
    /// Takes a process into the group, before what it is not to share a core with others
    /// runs in it. Three host calls.
    ///
    /// # Errors
    /// `ESRCH` if it has ended; the host's.
    pub(crate) fn take_in(&self, process: &Process) -> io::Result<()> {
        let result = match self.give(process.pid) {
            // Hardware threads were turned off since: nobody shares a core.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            result => result,
        };
        // Its number might be another process's by now, and then it has not been taken in.
        if !process.is_running()? {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        result
    }

    fn give(&self, pid: u32) -> io::Result<()> {
        act(SHARE_FROM, self.holder.thread, SCOPE_THREAD)?;
        let given = act(SHARE_TO, pid, SCOPE_PROCESS);
        // The thread goes on with work for everybody.
        act(SHARE_FROM, self.plain.thread, SCOPE_THREAD)?;
        given
    }
}

/// A thread that does one thing, and then waits until this is dropped.
#[derive(Debug)]
struct Holder {
    thread: u32,
    _alive: Sender<()>,
}

impl Holder {
    fn start(first: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<Self> {
        let (tell, told) = channel();
        let (alive, ended) = channel::<()>();
        let waiting = move || {
            let started = first().map(|()| rustix::thread::gettid().as_raw_nonzero().get());
            let is_wanted = started.is_ok();
            // If nobody hears it, nobody wants the thread.
            if tell.send(started).is_ok() && is_wanted {
                let _ = ended.recv();
            }
        };
        thread::Builder::new().name("core-group".into()).stack_size(STACK).spawn(waiting)?;
        let thread = told.recv().map_err(io::Error::other)??;
        Ok(Self { thread: thread.unsigned_abs(), _alive: alive })
    }
}

fn act(what: libc::c_ulong, pid: u32, scope: libc::c_ulong) -> io::Result<()> {
    // SAFETY: with these arguments the call takes no pointer and changes nothing but how
    // threads are scheduled.
    let result = unsafe { libc::prctl(PR_SCHED_CORE, what, libc::c_ulong::from(pid), scope, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cookie of a thread of this process; 0: none.
    fn cookie(thread: u32) -> io::Result<u64> {
        const GET: libc::c_ulong = 0;
        let mut cookie = 0u64;
        // SAFETY: the call stores 8 bytes at the pointer, which is valid for them.
        let result = unsafe {
            let thread = libc::c_ulong::from(thread);
            libc::prctl(PR_SCHED_CORE, GET, thread, SCOPE_THREAD, &raw mut cookie)
        };
        if result == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
    }

    #[test]
    fn members_of_a_group_have_its_cookie_and_whoever_takes_them_in_has_none() {
        let scheduling = match CoreScheduling::start() {
            Ok(scheduling) => scheduling,
            Err(error) => {
                assert!(matches!(error, CoreError::NoThreads | CoreError::NoKernel), "{error}");
                assert!(error.to_string().contains("--core-scheduling"), "{error}");
                return eprintln!("SKIPPED: {error}");
            }
        };
        let groups = [scheduling.group().unwrap(), scheduling.group().unwrap()];
        let mut children: Vec<_> = (0..3)
            .map(|_| std::process::Command::new("sleep").arg("60").spawn().unwrap())
            .collect();
        let cookies: Vec<u64> = [0, 0, 1]
            .into_iter()
            .zip(&children)
            .map(|(group, child): (usize, _)| {
                groups[group].give(child.id()).unwrap();
                cookie(child.id()).unwrap()
            })
            .collect();
        assert!(cookies.iter().all(|cookie| *cookie != 0), "{cookies:?}");
        assert_eq!(cookies[0], cookies[1]);
        assert_ne!(cookies[0], cookies[2]);
        assert_eq!(cookie(0).unwrap(), 0);
        for child in &mut children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    #[test]
    fn a_host_that_cannot_do_it_is_told_apart() {
        let error = |errno| CoreError::from(io::Error::from_raw_os_error(errno)).to_string();
        assert!(error(libc::ENODEV).contains("no two hardware threads share a core"));
        assert!(error(libc::EINVAL).contains("CONFIG_SCHED_CORE"));
        assert!(error(libc::EPERM).contains("Operation not permitted"));
    }

    #[test]
    fn a_holder_ends_with_its_owner_and_reports_what_failed() {
        let failed = Holder::start(|| Err(io::Error::from_raw_os_error(libc::ENODEV)));
        assert_eq!(failed.unwrap_err().raw_os_error(), Some(libc::ENODEV));
        let holder = Holder::start(|| Ok(())).unwrap();
        let path = format!("/proc/self/task/{}", holder.thread);
        assert!(std::path::Path::new(&path).exists());
        drop(holder);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while std::path::Path::new(&path).exists() {
            assert!(std::time::Instant::now() < deadline, "the thread is still there");
            thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}
