//! The process that serves directories of the host to one sandbox.
//!
//! Its requests are hostile, and it has files: so it has no more rights than [`FileRights`]
//! say, no memory of anybody else, and no host call but for files and its sockets: the two that it
//! was given, and one for requests of the sandbox. It is this same executable. Its caller describes the directories and passes on
//! requests; it answers straight to the sandbox. It ends with its caller's socket, and the
//! sandbox with it.
//!
//! A daemon that has a monitor can execute nothing, and serves no directories of the host.

mod filter;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytemuck::{bytes_of, pod_read_unaligned};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use rustix::process::{Resource, getrlimit, setsid};
use rustix::thread::set_name;
use thaw_abi::control::{MESSAGE_MAX, MessageHeader};

use super::file_server::{FileServer, OwnSocketPair, QueueFull};
use super::files::{Directories, Setup};
use super::request::Question;
use crate::confine::{During, Failure, set_limits, set_oom_score};
use crate::event::Violation;
use crate::message::{self, is_readable};
use crate::sys::{self, CloseOnExec};
use crate::text::printable;

/// Hidden first argument that makes an executable serve files.
const FILES_ARGUMENT: &str = "--thaw-files";
/// How long the process may take to start.
const START_MAX: Duration = Duration::from_secs(10);
/// How long it may leave requests unread.
const UNREAD_MAX: Duration = Duration::from_secs(10);
/// Most requests that wait until it reads, as many as may wait when it has read them.
const BACKLOG_MAX: usize = 2048;
/// Most bytes of what it is told of directories.
const SETUP_MAX: usize = 128 * 1024;
/// Most files that it has open, if it may: as many as the sandbox has open of each bound directory, and
/// directories.
const FILES_MAX: u64 = 65_536;
/// Most descriptors in a packet.
const AT_ONCE: usize = 16;

/// The code that it exits with when a sandbox asks for too much at once.
const FLOODED: i32 = 3;

/// The process, from its caller's side. Dropping it ends it.
pub struct FileProcess {
    line: Arc<Line>,
}

/// What its caller's threads have of it.
struct Line {
    socket: OwnedFd,
    /// The caller's end of the sandbox' socket.
    control: OwnedFd,
    fate: AtomicU32,
    backlog: Mutex<Backlog>,
}

/// Requests for which its socket has no room.
#[derive(Default)]
struct Backlog {
    waiting: VecDeque<Vec<u8>>,
    /// A thread sends them, and all that come behind them.
    has_sender: bool,
}

/// What has become of the process: it serves.
const SERVES: u32 = 0;
/// It is dropped, and may end.
const DROPPED: u32 = 1;
/// It has ended because of a sandbox that asked for too much at once.
const ENDED_FLOODED: u32 = 2;
/// It has ended otherwise.
const ENDED: u32 = 3;

impl FileProcess {
    /// Starts the process; replies go to `control`, the caller's end of the sandbox' socket.
    /// If it ends by itself, the sandbox is ended.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(directories: &Directories, control: OwnedFd) -> io::Result<Self> {
        let (socket, remote) = message::control_pair()?;
        let mut child = spawn(remote)?;
        let server = Self::new(socket, control);
        let line = server.line.clone();
        let watch = move || {
            // A file system that does not answer may keep it even from dying.
            let status = child.wait();
            let is_flooded = status.is_ok_and(|status| status.code() == Some(FLOODED));
            line.end(if is_flooded { ENDED_FLOODED } else { ENDED });
        };
        std::thread::Builder::new().name("files-watch".into()).spawn(watch)?;
        tell(&server.line.socket, directories, &server.line.control)?;
        Ok(server)
    }

    fn new(socket: OwnedFd, control: OwnedFd) -> Self {
        let (fate, backlog) = (AtomicU32::new(SERVES), Mutex::default());
        Self { line: Arc::new(Line { socket, control, fate, backlog }) }
    }

    /// Waits until it serves. To be called before requests are passed on; the caller can do
    /// something else before.
    ///
    /// # Errors
    /// It has not the rights, or does not come up.
    pub fn wait_until_serving(&self) -> io::Result<()> {
        let socket = &self.line.socket;
        if !is_readable(socket, Instant::now() + START_MAX) {
            return Err(Errno::TIMEDOUT.into());
        }
        let mut answer = [0; 256];
        match message::receive(socket, &mut answer, None)?.len {
            // From now on, it may stop reading what it is sent.
            1 if answer[0] == 0 => Ok(rustix::io::ioctl_fionbio(socket, true)?),
            0 => Err(io::Error::other("the process that serves files has ended")),
            len => Err(io::Error::other(printable(&answer[1..len]))),
        }
    }

    /// Why it has ended, if it has.
    pub fn ended(&self) -> Option<Violation> {
        match self.line.fate.load(Acquire) {
            ENDED_FLOODED => Some(Violation::RepliesUnread),
            ENDED => Some(Violation::FilesUnserved),
            _ => None,
        }
    }

    /// Passes a request on, which is answered straight to the sandbox. Waits for nobody: the
    /// process may have no processor for a while, and its sandbox is one of many.
    ///
    /// # Errors
    /// More requests wait than a sandbox has reason to make.
    pub fn pass_on(&self, kind: u32, sequence: u64, body: &[u8]) -> Result<(), QueueFull> {
        let header = message::header(kind, body.len(), sequence);
        let parts = [IoSlice::new(bytes_of(&header)), IoSlice::new(body)];
        let mut backlog = self.line.backlog();
        if !backlog.has_sender {
            match message::send(&self.line.socket, &parts, &[]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // If it has ended, the sandbox is about to end, too.
                _ => return Ok(()),
            }
            let line = self.line.clone();
            let sender = std::thread::Builder::new().name("files-send".into());
            sender.spawn(move || line.send_backlog()).map_err(|_| QueueFull)?;
            backlog.has_sender = true;
        }
        if backlog.waiting.len() >= BACKLOG_MAX {
            return Err(QueueFull);
        }
        backlog.waiting.push_back([bytes_of(&header), body].concat());
        Ok(())
    }
}

impl Line {
    fn backlog(&self) -> MutexGuard<'_, Backlog> {
        self.backlog.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that nobody answers what the sandbox has asked for, and ends the sandbox.
    fn end(&self, how: u32) {
        if self.fate.compare_exchange(SERVES, how, AcqRel, Acquire).is_ok() {
            let _ = shutdown(&self.control, Shutdown::Both);
        }
    }

    /// Sends what waits, until nothing does.
    fn send_backlog(&self) {
        loop {
            let mut backlog = self.backlog();
            let Some(request) = backlog.waiting.pop_front() else {
                backlog.has_sender = false;
                return;
            };
            drop(backlog);
            let deadline = Instant::now() + UNREAD_MAX;
            let sent = message::send_until(&self.socket, &request, &[], deadline);
            let Err(error) = sent else { continue };
            *self.backlog() = Backlog::default();
            // Of its end another thread says how it came about.
            if error.kind() == io::ErrorKind::TimedOut {
                self.end(ENDED);
            }
            return;
        }
    }
}

impl Drop for FileProcess {
    fn drop(&mut self) {
        self.line.fate.store(DROPPED, Release);
        // Whoever else has the socket: it hears of the end.
        let _ = shutdown(&self.line.socket, Shutdown::Both);
    }
}

/// Starts the process: this executable, with the socket as its standard input.
fn spawn(socket: OwnedFd) -> io::Result<Child> {
    Command::new("/proc/self/exe")
        .arg(FILES_ARGUMENT)
        .env_clear()
        .stdin(Stdio::from(socket))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}

/// Tells the process what it serves.
fn tell(socket: &OwnedFd, directories: &Directories, control: &OwnedFd) -> io::Result<()> {
    let (setup, descriptors) = directories.setup();
    let text = serde_json::to_vec(&setup)?;
    if text.len() > SETUP_MAX {
        return Err(io::Error::other("the paths of its directories are too long"));
    }
    message::send(socket, &[IoSlice::new(&text)], &[control.as_fd()])?;
    let mut parts = descriptors.chunks(AT_ONCE);
    parts.try_for_each(|some| message::send(socket, &[IoSlice::new(&[0])], some))
}

/// The life of the process, if this one was spawned to be it.
pub fn main() -> Option<i32> {
    if std::env::args_os().nth(1)? != FILES_ARGUMENT {
        return None;
    }
    let Ok(socket) = take_descriptors() else { return Some(1) };
    let server = match confine(&socket) {
        Ok(server) => server,
        Err(Failure { step, source }) => {
            let why = format!("cannot {step}: {source}");
            // If the caller is gone, there is nobody left to tell.
            let _ =
                message::send(&socket, &[IoSlice::new(&[1]), IoSlice::new(why.as_bytes())], &[]);
            return Some(1);
        }
    };
    if message::send(&socket, &[IoSlice::new(&[0])], &[]).is_err() {
        return Some(1);
    }
    sys::exit_at_once(serve(&socket, &server))
}

/// Takes the socket that came as standard input, puts `/dev/null` there, and closes whatever
/// else came along.
fn take_descriptors() -> io::Result<OwnedFd> {
    // Nothing can own this number yet: this runs first in the process.
    let socket = sys::duplicate_to(io::stdin().as_fd(), 3)?;
    sys::close_descriptors(4, u32::MAX)?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    for standard in [0, 1, 2] {
        sys::place_descriptor(null.as_raw_fd(), standard, CloseOnExec::No)?;
    }
    Ok(socket)
}

/// Hears what to serve, and gives up everything else.
fn confine(socket: &OwnedFd) -> Result<FileServer, Failure> {
    setsid().during("start a session")?;
    set_name(c"thaw-files").during("take a name")?;
    set_oom_score().during("set the out-of-memory score")?;
    let (setup, control, descriptors) = receive_setup(socket).during("hear what to serve")?;
    let (rights, access) = (setup.rights, setup.access());
    let directories = Directories::told(setup, descriptors).during("look at its directories")?;
    let own = OwnSocketPair::new().during("make the sandbox' own socket")?;
    // A core dump would hold what is in files.
    let files = getrlimit(Resource::Nofile).maximum.unwrap_or(FILES_MAX).min(FILES_MAX);
    let limits = [(Resource::Core, 0), (Resource::Memlock, 0), (Resource::Nofile, files)];
    set_limits(&limits).during("set resource limits")?;
    rights.take_for_process().during("take the rights under which files are served")?;
    // Forbids new privileges, too.
    filter::install(access).during("install its filter")?;
    FileServer::start_with(directories, control, Some(own)).during("start its threads")
}

fn receive_setup(socket: &OwnedFd) -> io::Result<(Setup, OwnedFd, Vec<OwnedFd>)> {
    let mut text = vec![0; SETUP_MAX];
    let mut received = Vec::new();
    let len = message::receive(socket, &mut text, Some(&mut received))?.len;
    let setup: Setup = serde_json::from_slice(&text[..len])?;
    let control = received.pop().ok_or(Errno::INVAL)?;
    let mut descriptors = Vec::new();
    while descriptors.len() < setup.descriptors() {
        let before = descriptors.len();
        message::receive(socket, &mut [0], Some(&mut descriptors))?;
        if descriptors.len() == before {
            return Err(Errno::INVAL.into());
        }
    }
    Ok((setup, control, descriptors))
}

/// Serves requests until the caller closes its end. Returns the code to exit with.
fn serve(socket: &OwnedFd, server: &FileServer) -> i32 {
    let mut packet = vec![0; MESSAGE_MAX];
    loop {
        let len = match message::receive(socket, &mut packet, None) {
            Ok(received) if received.truncated => return 1,
            Ok(received) => received.len,
            Err(_) => return 1,
        };
        if len == 0 {
            return 0;
        }
        let Some((head, body)) = packet[..len].split_at_checked(size_of::<MessageHeader>()) else {
            return 1;
        };
        let header: MessageHeader = pod_read_unaligned(head);
        let Some(question) = Question::parse(header.kind, body) else { return 1 };
        match server.submit(header.sequence, &question) {
            Ok(true) => {}
            Ok(false) => return 1,
            Err(QueueFull) => return FLOODED,
        }
    }
}
