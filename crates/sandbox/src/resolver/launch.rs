//! Starting a resolver process.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::geteuid;

use super::confine::confine;
use super::protocol::{RESOLVER_ARGUMENT, Report, send};
use super::serve::serve;
use crate::confine::Failure;
use crate::monitor;
use crate::sys::{self, CloseOnExec};

/// The user and group id that root's programs without a monitor give the process: the one
/// before that of daemons. Nothing belongs to it.
const USUAL_ID: u32 = 1_999_998;

/// In which user namespace the process lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Namespaces {
    /// In that of who starts it, where it is root: it may change users and mount.
    Callers,
    /// In one that the caller, who is root, hands over as its standard error. The process
    /// joins it when it has its root directory: the owner of the namespace, a daemon, may look
    /// into whoever is in it (ptrace(2)).
    Joined,
    /// In a new one with one id, its caller's. Without such namespaces nobody but root has
    /// sandboxes.
    New,
}

impl Namespaces {
    /// As an argument.
    fn argument(self) -> &'static str {
        match self {
            Self::Callers => "stay",
            Self::Joined => "join-user-namespace",
            Self::New => "new-user-namespace",
        }
    }

    fn from_argument(argument: &str) -> Option<Self> {
        let all = [Self::Callers, Self::Joined, Self::New];
        all.into_iter().find(|namespaces| namespaces.argument() == argument)
    }
}

/// Starts a process that serves on `socket`. The child, if it is one of this process, is to
/// be reaped.
pub fn spawn(socket: OwnedFd) -> io::Result<Option<Child>> {
    if let Some(link) = monitor::of_this_process() {
        return link.start_resolver(socket).map(|()| None);
    }
    let (id, namespaces) = match geteuid().is_root() {
        true => (USUAL_ID, Namespaces::Callers),
        false => (0, Namespaces::New),
    };
    launcher(sys::OWN_PROGRAM.as_ref(), socket, id, namespaces).spawn().map(Some)
}

/// The command by which `program`, a Thaw, becomes a resolver process with this user and group id. For
/// [`Namespaces::Joined`], the namespace is to be made its standard error.
pub fn launcher(program: &Path, socket: OwnedFd, id: u32, namespaces: Namespaces) -> Command {
    let mut launcher = Command::new(program);
    launcher
        .args([RESOLVER_ARGUMENT, &id.to_string(), namespaces.argument()])
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(socket))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    launcher
}

/// The life of a resolver process, if this process was spawned as one.
pub fn main() -> Option<i32> {
    // Arguments of other programs need not be text.
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != RESOLVER_ARGUMENT {
        return None;
    }
    let mut next = || arguments.next()?.into_string().ok();
    let (id, namespaces) = (next()?.parse().ok()?, next()?);
    let namespaces = Namespaces::from_argument(&namespaces)?;
    let Ok((socket, namespace)) = take_descriptors() else { return Some(1) };
    match confine(id, namespaces, namespace) {
        Ok(filter) if send(&socket, &Report::serving(), &[]).is_ok() => {
            sys::exit_at_once(serve(socket, &filter))
        }
        // Nobody is left to be served.
        Ok(_) => Some(1),
        Err(Failure { step, source }) => {
            // If the caller is gone, there is nobody left to tell.
            let _ = send(&socket, &Report::failed(step, &source), &[]);
            Some(1)
        }
    }
}

/// Takes the socket that came as standard input, and the namespace that came as standard error
/// if one did, puts `/dev/null` there, and closes whatever else came along.
fn take_descriptors() -> io::Result<(OwnedFd, OwnedFd)> {
    // Nothing can own these numbers yet: this runs first in the process.
    let socket = sys::duplicate_to(io::stdin().as_fd(), 3)?;
    let namespace = sys::duplicate_to(io::stderr().as_fd(), 4)?;
    sys::close_descriptors(5, u32::MAX)?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    for standard in [0, 1, 2] {
        sys::place_descriptor(null.as_raw_fd(), standard, CloseOnExec::No)?;
    }
    Ok((socket, namespace))
}
