//! wait4(2), waitid(2): hearing of children.

use alloc::sync::Arc;

use super::timers::ResourceUsage;
use crate::args::{Fd, Flags, PidNumber, UserPtr};
use crate::errno::{Errno, Result};
use crate::ipc::pidfd;
use crate::state::kernel;
use crate::task::ids::Processes;
use crate::task::ids::{Pgid, Pid};
use crate::task::process::{ExitStatus, Life, Process};
use crate::task::signal::{self, SIGCHLD, Signal, SignalRecord};
use crate::task::wait::wait_until;
use crate::task::{current, current_process, exit};

const WNOHANG: u32 = 0x1;
const WSTOPPED: u32 = 0x2;
const WEXITED: u32 = 0x4;
const WCONTINUED: u32 = 0x8;
const WNOWAIT: u32 = 0x0100_0000;
const WNOTHREAD: u32 = 0x2000_0000;
const WALL: u32 = 0x4000_0000;
const WCLONE: u32 = 0x8000_0000;

/// What a child has to tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum News {
    Ended(ExitStatus),
    Stopped(Signal),
    Continued,
}

impl News {
    /// As wait(2) stores it.
    fn to_wait_status(self) -> u32 {
        match self {
            News::Ended(status) => status.to_wait_status(),
            News::Stopped(signal) => signal.number() << 8 | 0x7f,
            News::Continued => 0xffff,
        }
    }
}

/// A child with news, taken from it unless `options` say otherwise.
fn take_news(process: &Process, options: u32) -> Option<News> {
    let keep = options & WNOWAIT != 0;
    if let Life::Zombie(status) = process.life.get() {
        return (options & WEXITED != 0).then_some(News::Ended(status));
    }
    let mut unreported = process.unreported.borrow_mut();
    if options & WSTOPPED != 0
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

/// Waits for news of a child; `None` with `WNOHANG` if there is none yet.
fn wait_for(which: Processes, options: u32) -> Result<Option<(Arc<Process>, News)>> {
    let own = current().process.clone();
    let waits_for_kind = |child: &Process| {
        // wait(2): "clone" children are those that do not send SIGCHLD.
        let is_clone = child.family.get().exit_signal != Some(SIGCHLD);
        options & WALL != 0 || is_clone == (options & WCLONE != 0)
    };
    let attempt = || {
        let children = kernel().tasks.processes_where(|child| {
            // One that has ended can have no other news.
            let may_tell = options & WEXITED != 0 || !child.is_zombie();
            child.parent_pid() == Some(own.pid)
                && may_tell
                && which.includes(child)
                && waits_for_kind(child)
        });
        if children.is_empty() {
            return Some(Err(Errno::ECHILD));
        }
        let found = children
            .into_iter()
            .find_map(|child| take_news(&child, options).map(|news| (child, news)));
        match found {
            Some(found) => Some(Ok(Some(found))),
            None if options & WNOHANG != 0 => Some(Ok(None)),
            None => None,
        }
    };
    let found = wait_until(&[&own.children_changed], None, attempt)?;
    if let Some((child, News::Ended(_))) = &found
        && options & WNOWAIT == 0
    {
        own.add_child(child);
        exit::forget(child);
    }
    Ok(found)
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
    let Some((child, news)) = wait_for(pid.processes()?, options | WEXITED)? else { return Ok(0) };
    status.write_if_some(&news.to_wait_status())?;
    usage.write_if_some(&ResourceUsage::of_child(&child))?;
    Ok(child.pid.number())
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
        (P_PID, 1..) => Processes::One(Pid::new(id as u32)),
        (P_PGID, 0) => Processes::Group(current_process().process_group()),
        (P_PGID, 1..) => Processes::Group(Pgid::new(id as u32)),
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
    let Some((child, news)) = found else {
        return info_to.write_if_some(&SignalRecord::EMPTY);
    };
    let info = match news {
        News::Ended(status) => signal::child_ended(&child, SIGCHLD, status),
        News::Stopped(signal) => signal::child_stopped(&child, signal),
        News::Continued => signal::child_continued(&child),
    };
    info_to.write_if_some(&info.into())?;
    usage.write_if_some(&ResourceUsage::of_child(&child))
}
