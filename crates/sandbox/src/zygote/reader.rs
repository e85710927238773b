//! Opening files of a sandbox's processes in `/proc` where the caller itself may not.
//!
//! `/proc/PID/mem` and `pagemap` belong to the user id that the process runs as. A
//! caller that is not root, whose sandboxes have ids of its range in `/etc/subuid`, has
//! every right over them but not that id (proc(5), user_namespaces(7)). So a process is
//! spawned that joins their user namespace, where it may open the files, hands over the
//! descriptors and ends.

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::message;
use crate::sys;

/// Hidden first argument that makes an executable a reader.
const READER_ARGUMENT: &str = "--thaw-proc-reader";
/// The files that it opens.
const FILES: [&str; 2] = ["mem", "pagemap"];

/// What the reader answers with, in the first four bytes: an errno, or 0 and the descriptor.
const ANSWER: usize = 4;

/// Opens a file in `/proc` of a process, if need be with the help of a process in its
/// user namespace.
pub(super) fn open(pid: u32, name: &str) -> io::Result<File> {
    match File::open(format!("/proc/{pid}/{name}")) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && FILES.contains(&name) => {
            // The first error names the cause if even that fails.
            open_inside(pid, name).map_err(|_| error)
        }
        result => result,
    }
}

fn open_inside(pid: u32, name: &str) -> io::Result<File> {
    let (own, remote) = message::control_pair()?;
    // In the caller's place: only it knows whose namespaces these are.
    let namespace = File::open(format!("/proc/{pid}/ns/user"))?;
    let mut reader = Command::new("/proc/self/exe")
        .args([READER_ARGUMENT, &pid.to_string(), name])
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(remote))
        .stdout(Stdio::from(namespace))
        .spawn()?;
    let mut answer = [0; ANSWER];
    let mut descriptors = Vec::new();
    let received = message::receive(&own, &mut answer, Some(&mut descriptors));
    reader.wait()?;
    if received?.len != ANSWER {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match (i32::from_le_bytes(answer), descriptors.pop()) {
        (0, Some(file)) => Ok(file.into()),
        (errno, _) => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// The reader's life, if this process was spawned as one. Its standard input is the
/// socket to answer on, its standard output the user namespace to join.
pub(super) fn reader_main() -> Option<i32> {
    // Arguments of other programs need not be text.
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != READER_ARGUMENT {
        return None;
    }
    let mut next = || arguments.next()?.into_string().ok();
    let (pid, name) = (next()?, next()?);
    let socket = sys::duplicate_above(io::stdin().as_fd(), 3).ok()?;
    let opened = open_as_root_inside(&pid, &name);
    let errno = opened.as_ref().err().map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
    let descriptors: Vec<_> = opened.iter().map(AsFd::as_fd).collect();
    let sent = message::send(&socket, &[IoSlice::new(&errno.to_le_bytes())], &descriptors);
    Some(i32::from(sent.is_err()))
}

fn open_as_root_inside(pid: &str, name: &str) -> io::Result<OwnedFd> {
    let is_known = pid.parse::<u32>().is_ok() && FILES.contains(&name);
    if !is_known {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    move_into_link_name_space(io::stdout().as_fd(), Some(LinkNameSpaceType::User))?;
    Ok(File::open(format!("/proc/{pid}/{name}"))?.into())
}
