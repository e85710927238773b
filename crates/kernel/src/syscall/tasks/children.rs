//! wait4(2), waitid(2): hearing of children.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::timers::ResourceUsage;
use crate::args::{Fd, Flags, PidNumber, UserPtr};
use crate::errno::{Errno, Result};
use crate::ipc::pidfd;
use crate::state::kernel;
use crate::task::ids::{Pgid, Pid, Processes, Tid};
use crate::task::process::{ExitStatus, Life, Process};
use crate::task::ptrace::{self, EndedTracee, tracees};
use crate::task::signal::{self, SIGCHLD, Signal, SignalRecord};
use crate::task::wait::wait_until;
use crate::task::{Thread, current, current_process, exit};

const WNOHANG: u32 = 0x1;
const WSTOPPED: u32 = 0x2;
const WEXITED: u32 = 0x4;
const WCONTINUED: u32 = 0x8;
const WNOWAIT: u32 = 0x0100_0000;
const WNOTHREAD: u32 = 0x2000_0000;
const WALL: u32 = 0x4000_0000;
const WCLONE: u32 = 0x8000_0000;

/// What a child has to tell, or a tracee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum News {
    Ended(ExitStatus),
    Stopped(Signal),
    Continued,
    /// A tracee has stopped; signal, and event from bit 8 on.
    Trapped(u32),
}

/// Who has news.
struct Found {
    /// Its id: that of a thread if it is a tracee.
    id: Tid,
    /// That id as the caller sees it, also once it is nobody's any more.
    number: u32,
    process: Arc<Process>,
    news: News,
}

impl Found {
    fn new(id: Tid, process: Arc<Process>, news: News) -> Self {
        Self { id, number: id.for_caller(), process, news }
    }

    fn of_process(process: Arc<Process>, news: News) -> Self {
        Self::new(process.pid.main_thread(), process, news)
    }
}

impl News {
    /// As wait(2) stores it.
    fn to_wait_status(self) -> u32 {
        match self {
            News::Ended(status) => status.to_wait_status(),
            News::Stopped(signal) => signal.number() << 8 | 0x7f,
            News::Continued => 0xffff,
            News::Trapped(code) => code << 8 | 0x7f,
        }
    }
}

/// The news of a child, taken from it unless `options` say otherwise.
fn take_news(process: &Process, options: u32) -> Option<News> {
    let keep = options & WNOWAIT != 0;
    if let Life::Zombie(status) = process.life.get() {
        return (options & WEXITED != 0).then_some(News::Ended(status));
    }
    let tells_as_tracee = tracees::is_traced_by_parent(process);
    let mut unreported = process.unreported.borrow_mut();
    if options & WSTOPPED != 0
        && !tells_as_tracee
        && let Some(signal) = unreported.stopped
    {
        if !keep {
            unreported.stopped = None;
        }
        return Some(News::Stopped(signal));
    }
    if options & WCONTINUED != 0 && unreported.continued {
        unreported.continued = keep;
        return Some(News::Continued);
    }
    None
}

/// Who could have news for a process.
#[derive(Default)]
struct Candidates {
    /// Children. Those that have ended and whose tracers have not heard of it cannot tell yet.
    children: Vec<Arc<Process>>,
    /// Processes that have ended, of which it hears before their parents do.
    traced: Vec<Arc<Process>>,
    tracees: Vec<Arc<Thread>>,
    /// Tracees that have ended.
    ended: Vec<EndedTracee>,
}

impl Candidates {
    fn of(own: &Process, which: Processes, options: u32) -> Self {
        let tasks = &kernel().tasks;
        let waits_for_kind = |child: &Process| {
            // wait(2): "clone" children are those that do not send SIGCHLD.
            let is_clone = child.family.get().exit_signal != Some(SIGCHLD);
            options & WALL != 0 || is_clone == (options & WCLONE != 0)
        };
        let children = tasks.processes_where(|child| {
            // One that has ended can have no other news.
            let may_tell = options & WEXITED != 0 || !child.is_zombie();
            child.parent_pid() == Some(own.pid)
                && may_tell
                && which.includes(child)
                && waits_for_kind(child)
        });
        if tasks.tracees.is_empty() {
            return Self { children, ..Self::default() };
        }
        let traced = tasks.processes_where(|other| {
            ptrace::awaited_tracer(other) == Some(own.pid) && which.includes(other)
        });
        let is_meant = |tid: Tid, process: &Process| match which {
            Processes::One(pid) => tid == pid.main_thread(),
            _ => which.includes(process),
        };
        let mut tracees = tasks.tracees.of(own.pid);
        tracees.retain(|thread| is_meant(thread.tid(), &thread.process));
        let mut ended = tasks.tracees.ended_of(own.pid);
        ended.retain(|ended| is_meant(ended.tid, &ended.process));
        Self { children, traced, tracees, ended }
    }

    fn is_empty(&self) -> bool {
        self.children.is_empty()
            && self.traced.is_empty()
            && self.tracees.is_empty()
            && self.ended.is_empty()
    }

    /// The first that has news.
    fn take(self, options: u32) -> Option<Found> {
        let hears_of_ends = options & WEXITED != 0;
        let of_child = self.children.into_iter().find_map(|child| {
            let may_tell = !child.is_zombie() || ptrace::awaited_tracer(&child).is_none();
            let news = may_tell.then(|| take_news(&child, options)).flatten()?;
            Some(Found::of_process(child, news))
        });
        let of_traced = || {
            let process = self.traced.into_iter().next().filter(|_| hears_of_ends)?;
            let news = take_news(&process, options)?;
            Some(Found::of_process(process, news))
        };
        let of_tracee = || {
            self.tracees.into_iter().find_map(|thread| {
                let code = thread.tracee.take_news(options & WNOWAIT != 0)?;
                Some(Found::new(thread.tid(), thread.process.clone(), News::Trapped(code)))
            })
        };
        let of_ended = || {
            let EndedTracee { tid, process, status, .. } =
                self.ended.into_iter().next().filter(|_| hears_of_ends)?;
            Some(Found::new(tid, process, News::Ended(status)))
        };
        of_child.or_else(of_traced).or_else(of_tracee).or_else(of_ended)
    }
}

/// Waits for news of a child or a tracee; `None` with `WNOHANG` if there is none yet.
fn wait_for(which: Processes, options: u32) -> Result<Option<Found>> {
    let own = current().process.clone();
    let attempt = || {
        let candidates = Candidates::of(&own, which, options);
        if candidates.is_empty() {
            return Some(Err(Errno::ECHILD));
        }
        match candidates.take(options) {
            Some(found) => Some(Ok(Some(found))),
            None if options & WNOHANG != 0 => Some(Ok(None)),
            None => None,
        }
    };
    let found = wait_until(&[&own.children_changed], None, attempt)?;
    if let Some(found) = &found
        && matches!(found.news, News::Ended(_))
        && options & WNOWAIT == 0
    {
        note_heard(&own, found);
    }
    Ok(found)
}

/// A process has heard that another one has ended, or that a tracee has.
fn note_heard(own: &Process, found: &Found) {
    let process = &found.process;
    if found.id != process.pid.main_thread() {
        kernel().tasks.tracees.forget_ended(found.id);
    } else if ptrace::awaited_tracer(process) == Some(own.pid) {
        tracees::heard_by_tracer(process);
    } else {
        own.add_child(process);
        exit::forget(process);
    }
}

/// wait4(2).
pub fn wait4(
    pid: PidNumber,
    status: UserPtr<u32>,
    Flags(options): Flags,
    usage: UserPtr<ResourceUsage>,
) -> Result<u32> {
    const KNOWN: u32 = WNOHANG | WSTOPPED | WCONTINUED | WNOTHREAD | WCLONE | WALL;
    if options & !KNOWN != 0 {
        return Err(Errno::EINVAL);
    }
    let Some(found) = wait_for(pid.processes()?, options | WEXITED)? else { return Ok(0) };
    status.write_if_some(&found.news.to_wait_status())?;
    usage.write_if_some(&ResourceUsage::of_child(&found.process))?;
    Ok(found.number)
}

/// waitid(2).
pub fn waitid(
    kind: u32,
    id: i32,
    info_to: UserPtr<SignalRecord>,
    Flags(asked): Flags,
    usage: UserPtr<ResourceUsage>,
) -> Result<()> {
    const P_ALL: u32 = 0;
    const P_PID: u32 = 1;
    const P_PGID: u32 = 2;
    const P_PIDFD: u32 = 3;
    const WHAT: u32 = WSTOPPED | WEXITED | WCONTINUED;
    if asked & !(WHAT | WNOHANG | WNOWAIT | WNOTHREAD | WCLONE | WALL) != 0 || asked & WHAT == 0 {
        return Err(Errno::EINVAL);
    }
    let mut options = asked;
    let which = match (kind, id) {
        (P_ALL, _) => Processes::All,
        (P_PID, 1..) => Processes::One(Pid::from_caller(id as u32)),
        (P_PGID, 0) => Processes::Group(current_process().process_group()),
        (P_PGID, 1..) => Processes::Group(Pgid::from_caller(id as u32)),
        (P_PIDFD, 0..) => {
            if Fd(id).file()?.flags().contains(crate::fs::file::OpenFlags::NONBLOCK) {
                options |= WNOHANG;
            }
            Processes::One(pidfd::process_of(Fd(id))?.pid)
        }
        _ => return Err(Errno::EINVAL),
    };
    let found = wait_for(which, options)?;
    if found.is_none() && options & WNOHANG != 0 && asked & WNOHANG == 0 {
        return Err(Errno::EAGAIN);
    }
    let Some(Found { id: _, number, process: child, news }) = found else {
        return info_to.write_if_some(&SignalRecord::EMPTY);
    };
    let mut info = match news {
        News::Ended(status) => signal::child_ended(&child, SIGCHLD, status),
        News::Stopped(signal) => signal::child_stopped(&child, signal),
        News::Continued => signal::child_continued(&child),
        News::Trapped(code) => signal::child_trapped(&child, code),
    }
    .seen_by(&current_process());
    info.set_number(number);
    info_to.write_if_some(&info.into())?;
    usage.write_if_some(&ResourceUsage::of_child(&child))
}
