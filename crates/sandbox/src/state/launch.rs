//! Starting a state helper.
//!
//! The executable that [`spawn`] starts is a launcher. It joins the user and pid namespace
//! of the sandboxes and forks its own *sibling* (`CLONE_PARENT`) into the latter, with
//! network, ipc, host-name, mount and control-group namespaces of its own. The sibling is
//! the helper.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::confine::{During, Failure, confine};
use super::protocol::{
    ANSWER_NOT_SERVING, ANSWER_SERVING, ANSWER_STARTED, Answer, HELPER_ARGUMENT, errno_of,
};
use super::serve::{serve, tell_of_panics};
use crate::message;
use crate::monitor;
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
/// namespaces. It says so there, with its pidfd. It is a child of the calling process, or
/// of its monitor, which must reap it before or when the pid namespace ends: that end waits
/// for it.
pub(crate) fn spawn(socket: OwnedFd, namespaces: Namespaces, id: u32) -> io::Result<()> {
    if let Some(link) = monitor::of_this_process() {
        // It knows the user namespace itself.
        return link.start_state_helper(socket, namespaces.pid, id);
    }
    let (user, join) = match namespaces.user {
        Some(user) => (Stdio::from(user), Join::User),
        None => (Stdio::null(), Join::Nothing),
    };
    let mut launcher = launcher(socket, namespaces.pid, id, join);
    // The launcher's code says nothing that is not said on the socket, or by its end.
    launcher.stderr(user).spawn()?.wait().map(drop)
}

/// Whether the launcher joins a user namespace, which is then its standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Join {
    User,
    Nothing,
}

impl Join {
    /// As an argument of the launcher.
    fn argument(self) -> &'static str {
        match self {
            Self::User => "join-user-namespace",
            Self::Nothing => "stay",
        }
    }
}

/// The command that starts a helper; see [`spawn`].
pub(crate) fn launcher(socket: OwnedFd, pid_namespace: OwnedFd, id: u32, join: Join) -> Command {
    let mut launcher = Command::new("/proc/self/exe");
    launcher
        .args([HELPER_ARGUMENT, &id.to_string(), join.argument()])
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
    let (id, join) = (next()?.parse().ok()?, next()?);
    let Ok((socket, pid, user)) = take_descriptors() else { return Some(1) };
    let user = (join == Join::User.argument()).then_some(user);
    Some(match launch(&socket, pid, user, id) {
        Ok(code) => code,
        Err(Failure { step, source }) => {
            let answer = Answer { errno: errno_of(&source), ..Answer::new(ANSWER_NOT_SERVING) };
            // If the caller is gone, there is nobody left to tell.
            let _ = message::send(&socket, &[IoSlice::new(&answer.with_text(step))], &[]);
            1
        }
    })
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

/// Returns the exit code of the launcher, and of the helper at its end.
fn launch(socket: &OwnedFd, pid: OwnedFd, user: Option<OwnedFd>, id: u32) -> Result<i32, Failure> {
    if let Some(user) = user {
        move_into_link_name_space(user.as_fd(), Some(LinkNameSpaceType::User))
            .during("join the sandboxes' user namespace")?;
    }
    move_into_link_name_space(pid.as_fd(), Some(LinkNameSpaceType::ProcessID))
        .during("join the sandboxes' pid namespace")?;
    drop(pid);
    let (go, start) = pipe_with(PipeFlags::CLOEXEC).during("make a pipe")?;
    let flags = (OWN_NAMESPACES | libc::CLONE_PARENT) as u64;
    // SAFETY: the launcher has one thread; the flags share nothing.
    match unsafe { sys::fork_with(flags) }.during("create the process with its namespaces")? {
        Forked::Parent { pidfd, .. } => {
            let started = Answer::new(ANSWER_STARTED).with_text("");
            message::send(socket, &[IoSlice::new(&started)], &[pidfd.as_fd()])
                .during("hand over its descriptor")?;
            rustix::io::write(&start, &[1]).during("let it go on")?;
            Ok(0)
        }
        Forked::Child => {
            drop(start);
            // The caller must know of this process before it hears of it.
            if rustix::io::read(&go, &mut [0]).during("wait for its launcher")? == 0 {
                return Ok(1);
            }
            drop(go);
            tell_of_panics(socket);
            let proc = confine(id)?;
            let serving = Answer::new(ANSWER_SERVING).with_text("");
            message::send(socket, &[IoSlice::new(&serving)], &[]).during("answer")?;
            Ok(serve(socket, &proc))
        }
    }
}
