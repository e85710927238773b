//! Starting a state helper.
//!
//! The executable that [`spawn`] starts is a launcher. It joins the user and pid namespace
//! of the sandboxes and forks a process into the latter, which forks the helper, with
//! network, ipc, host-name, mount and control-group namespaces of its own, and ends. So the
//! helper becomes a child of the zygote parent, process 1 of that pid namespace, which reaps
//! it: the end of a pid namespace waits until all of its processes are reaped, and whoever
//! adopts the children of a daemon that was killed need not do that.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{WaitOptions, waitpid};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::confine::confine;
use super::protocol::{
    ANSWER_NOT_SERVING, ANSWER_SERVING, ANSWER_STARTED, Answer, HELPER_ARGUMENT, Task, errno_of,
};
use super::serve::serve;
use crate::confine::{During, Failure};
use crate::join::Join;
use crate::message;
use crate::monitor;
use crate::rewind;
use crate::sys::{self, CloseOnExec, Forked};

/// What the helper joins.
#[derive(Debug)]
pub(crate) struct Namespaces {
    /// `None`: the sandboxes are in that of the caller, who is root.
    user: Option<OwnedFd>,
    pid: OwnedFd,
}

impl Namespaces {
    /// Those that all sandboxes of a zygote parent share, as one of them has them. Whoever
    /// calls this knows that `pid` is a sandbox, before and after.
    pub fn of_sandbox(pid: u32) -> io::Result<Self> {
        let open = |name: &str| File::open(format!("/proc/{pid}/ns/{name}"));
        let user = open("user")?;
        let is_own = user.metadata()?.ino() == std::fs::metadata("/proc/self/ns/user")?.ino();
        // Its own is one below that of the zygote parent.
        let pid = sys::parent_namespace(open("pid")?.as_fd())?;
        Ok(Self { user: (!is_own).then(|| user.into()), pid })
    }
}

/// The namespaces that the helper has for itself, with nothing in them.
const OWN_NAMESPACES: i32 = libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP;

/// Starts a helper that serves requests on `socket` and has user and group `id` of the
/// namespaces. It says so there, with its pidfd. The zygote parent reaps it.
pub(crate) fn spawn(
    socket: OwnedFd,
    namespaces: Namespaces,
    id: u32,
    task: Task,
) -> io::Result<()> {
    if let Some(link) = monitor::of_this_process() {
        // It knows the user namespace itself.
        return link.start_state_helper(socket, namespaces.pid, id, task);
    }
    let (user, join) = match namespaces.user {
        Some(user) => (Stdio::from(user), Join::User),
        // Its rights would be rights over the host.
        None if task == Task::Rewind && is_in_first_user_namespace()? => {
            return Err(io::Error::other("the host allows no user namespaces"));
        }
        None => (Stdio::null(), Join::Nothing),
    };
    let program = sys::OWN_PROGRAM.as_ref();
    let mut launcher = launcher(program, socket, namespaces.pid, id, join, task);
    // The launcher's code says nothing that is not said on the socket, or by its end.
    launcher.stderr(user).spawn()?.wait().map(drop)
}

/// Whether this process has the ids of the host (user_namespaces(7)).
fn is_in_first_user_namespace() -> io::Result<bool> {
    let map = std::fs::read_to_string("/proc/self/uid_map")?;
    Ok(map.split_whitespace().eq(["0", "0", "4294967295"]))
}

/// The command by which `program`, a Thaw, starts a helper; see [`spawn`].
pub(crate) fn launcher(
    program: &Path,
    socket: OwnedFd,
    pid_namespace: OwnedFd,
    id: u32,
    join: Join,
    task: Task,
) -> Command {
    let mut launcher = Command::new(program);
    launcher
        .args([HELPER_ARGUMENT, &id.to_string(), join.argument(), &task.number().to_string()])
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(socket))
        .stdout(Stdio::from(pid_namespace))
        .stderr(Stdio::null());
    launcher
}

/// The life of a launcher or a helper, if this process was spawned as one.
pub(crate) fn helper_main() -> Option<i32> {
    // Arguments of other programs need not be text.
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != HELPER_ARGUMENT {
        return None;
    }
    let mut next = || arguments.next()?.into_string().ok();
    let (id, join) = (next()?.parse().ok()?, Join::from_argument(next()?.as_ref())?);
    let task = Task::from_number(next()?.parse().ok()?)?;
    let Ok((socket, pid, user)) = take_descriptors() else { return Some(1) };
    let joined = join.enter(&user).map_err(|(step, errno)| Failure { step, source: errno.into() });
    drop(user);
    Some(match joined.and_then(|()| launch(&socket, pid, id, task)) {
        Ok(Role::Helper { proc }) => sys::exit_at_once(match task {
            Task::Read => serve(socket, proc),
            Task::Rewind => rewind::serve(&socket, &proc),
        }),
        Ok(Role::Launcher) => 0,
        Err(Failure { step, source }) => {
            let answer = Answer { errno: errno_of(&source), ..Answer::new(ANSWER_NOT_SERVING) };
            // If the caller is gone, there is nobody left to tell.
            let _ = message::send(&socket, &[IoSlice::new(&answer.with_text(step))], &[]);
            1
        }
    })
}

/// What a process has become.
enum Role {
    /// The launcher, or the process between: it has done its work.
    Launcher,
    /// The helper, with everything given up.
    Helper {
        /// The `/proc` of the sandboxes.
        proc: OwnedFd,
    },
}

/// Takes the descriptors that came as the standard streams, puts `/dev/null` there, and
/// closes whatever else came along.
fn take_descriptors() -> io::Result<(OwnedFd, OwnedFd, OwnedFd)> {
    // Nothing can own these numbers yet: this runs first in the process.
    let socket = sys::duplicate_to(io::stdin().as_fd(), 3)?;
    let pid = sys::duplicate_to(io::stdout().as_fd(), 4)?;
    let user = sys::duplicate_to(io::stderr().as_fd(), 5)?;
    sys::close_descriptors(6, u32::MAX)?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    for standard in [0, 1, 2] {
        sys::place_descriptor(null.as_raw_fd(), standard, CloseOnExec::No)?;
    }
    Ok((socket, pid, user))
}

fn launch(socket: &OwnedFd, pid: OwnedFd, id: u32, task: Task) -> Result<Role, Failure> {
    move_into_link_name_space(pid.as_fd(), Some(LinkNameSpaceType::ProcessID))
        .during("join the sandboxes' pid namespace")?;
    drop(pid);
    // SAFETY: the launcher has one thread.
    match unsafe { sys::fork() }.during("create a process in the pid namespace")? {
        // It has said itself if it failed.
        Some(between) => waitpid(Some(between), WaitOptions::empty())
            .map(|_| Role::Launcher)
            .during("wait for the process between"),
        None => fork_helper(socket, id, task),
    }
}

/// Runs in the process between launcher and helper, and in the helper.
fn fork_helper(socket: &OwnedFd, id: u32, task: Task) -> Result<Role, Failure> {
    let (go, start) = pipe_with(PipeFlags::CLOEXEC).during("make a pipe")?;
    // SAFETY: this process has one thread; the flags share nothing.
    match unsafe { sys::fork_with(OWN_NAMESPACES as u64) }
        .during("create the process with its namespaces")?
    {
        Forked::Parent { pidfd, .. } => {
            let started = Answer::new(ANSWER_STARTED).with_text("");
            message::send(socket, &[IoSlice::new(&started)], &[pidfd.as_fd()])
                .during("hand over its descriptor")?;
            rustix::io::write(&start, &[1]).during("let it go on")?;
            Ok(Role::Launcher)
        }
        Forked::Child => {
            drop(start);
            // The caller must know of this process before it hears of it.
            if rustix::io::read(&go, &mut [0]).during("wait for its maker")? == 0 {
                return Err(Errno::PIPE).during("wait for its maker");
            }
            drop(go);
            let proc = confine(id, task)?;
            let serving = Answer::new(ANSWER_SERVING).with_text("");
            message::send(socket, &[IoSlice::new(&serving)], &[]).during("answer")?;
            Ok(Role::Helper { proc })
        }
    }
}
