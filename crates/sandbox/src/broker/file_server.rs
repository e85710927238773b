//! The threads that serve files of the host to one sandbox.
//!
//! Those of directories belong to a process that does nothing else ([`super::process`]). They are
//! threads because a file system may let them wait (a server that does not answer). A
//! request that takes [`PATIENCE`] is answered with `ETIMEDOUT`; meanwhile others are
//! served by another thread, of which there are [`WORKERS_MAX`] at most.
//!
//! Requests come over the control socket, through whoever reads that, or over a socket of the
//! sandbox' own ([`own_socket`]).

mod leaving;
mod own_socket;

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::files::{Directories, FileQuestion};
use super::volume::Volume;
use super::{Answer, Question};
use crate::message;
use leaving::Leaving;
pub use leaving::leave_requests_about_volumes;
use own_socket::OwnSocket;
pub(super) use own_socket::OwnSocketPair;

/// How long a request may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long one may keep others waiting.
const SLOW: Duration = Duration::from_millis(500);
/// Most threads of one sandbox that serve requests of the control socket.
const WORKERS_MAX: usize = 4;
/// Most requests that wait. A sandbox has one at a time for each virtual CPU of each
/// of its processes, of which it may have 1024.
const QUEUE_MAX: usize = 2048;

/// Whether this process serves any more.
static LEAVING: Leaving = Leaving::new();

/// More requests wait than a sandbox can have.
#[derive(Debug)]
pub struct QueueFull;

/// Serves files on threads of its own, which end with it. It is dropped when nothing runs in the sandbox
/// any more.
pub struct FileServer {
    shared: Arc<Shared>,
}

struct Shared {
    directories: Directories,
    control: OwnedFd,
    /// The host's end of the sandbox' own socket, if it has asked for one.
    own: OnceLock<OwnSocket>,
    /// One that was made before, for a process that makes none.
    made: Mutex<Option<OwnSocketPair>>,
    state: Mutex<State>,
    /// There is something to do.
    work: Condvar,
    /// The server is dropped.
    closing: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    /// What the threads are at, by number of the job.
    running: HashMap<u64, Running>,
    last: u64,
    workers: usize,
    idle: usize,
    closed: bool,
    /// Nothing more is served that comes over the sandbox' own socket.
    own_ended: bool,
}

struct Job {
    sequence: u64,
    question: FileQuestion,
    since: Instant,
}

struct Running {
    request: Asked,
    since: Instant,
    /// The sandbox has been told that it takes too long.
    given_up: bool,
}

/// A request, as its reply has to name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    socket: Socket,
    sequence: u64,
}

/// The socket over which a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Socket {
    Control,
    Own,
}

impl FileServer {
    /// Starts serving, under the rights of the caller; replies go to `control`.
    ///
    /// # Errors
    /// There are no threads left.
    pub fn start(directories: Directories, control: OwnedFd) -> io::Result<Self> {
        Self::start_with(directories, control, None)
    }

    /// The same in a process that makes no sockets: `own` is for the sandbox that asks for one.
    pub(super) fn start_with(
        directories: Directories,
        control: OwnedFd,
        own: Option<OwnSocketPair>,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            directories,
            control,
            own: OnceLock::new(),
            made: Mutex::new(own),
            state: Mutex::default(),
            work: Condvar::new(),
            closing: Condvar::new(),
        });
        // From here on the threads are told to end, whatever fails.
        let server = Self { shared };
        server.shared.spawn_worker()?;
        let watched = server.shared.clone();
        std::thread::Builder::new().name("files-watch".into()).spawn(move || watched.watch())?;
        Ok(server)
    }

    /// How many files of a volume are open.
    pub fn open_files_of(&self, volume: &Volume) -> usize {
        self.shared.directories.open_files_of(volume)
    }

    /// Has a question answered, if it is about files; whether it is.
    pub fn submit(&self, sequence: u64, question: &Question<'_>) -> Result<bool, QueueFull> {
        let Some(question) = FileQuestion::of(question) else { return Ok(false) };
        let mut state = self.shared.state();
        if state.queue.len() >= QUEUE_MAX {
            return Err(QueueFull);
        }
        state.queue.push_back(Job { sequence, question, since: Instant::now() });
        let (is_awaited, has_workers) = (state.idle > 0, state.workers > 0);
        drop(state);
        if is_awaited {
            self.shared.work.notify_one();
        }
        if !has_workers {
            // The first one serves the sandbox' own socket now. If there is no thread just now,
            // the watcher tries again.
            let _ = self.shared.spawn_worker();
        }
        Ok(true)
    }
}

impl Drop for FileServer {
    fn drop(&mut self) {
        self.shared.state().closed = true;
        self.shared.work.notify_all();
        self.shared.closing.notify_all();
        if let Some(own) = self.shared.own.get() {
            own.end();
        }
        // Not by a thread of the server, which may be left behind if this process ends now.
        self.shared.directories.end();
    }
}

impl State {
    /// Notes that a request is being served.
    fn begin(&mut self, request: Asked, since: Instant) -> u64 {
        self.last += 1;
        self.running.insert(self.last, Running { request, since, given_up: false });
        self.last
    }

    /// The same for one that came over the sandbox' own socket; `None` if none is served any more.
    fn begin_own(&mut self, sequence: u64) -> Option<u64> {
        let is_served = !self.closed && !self.own_ended;
        let request = Asked { socket: Socket::Own, sequence };
        is_served.then(|| self.begin(request, Instant::now()))
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn_worker(self: &Arc<Self>) -> io::Result<()> {
        let shared = self.clone();
        let work = move || {
            let has_granted_socket = shared.work();
            shared.state().workers -= 1;
            if let Some(own) = shared.own.get().filter(|_| has_granted_socket) {
                shared.serve_own(own);
            }
        };
        self.state().workers += 1;
        let spawned = std::thread::Builder::new().name("files".into()).spawn(work);
        spawned.map(drop).inspect_err(|_| self.state().workers -= 1)
    }

    /// A worker's life. Whether it has given the sandbox a socket of its own, which it has to serve
    /// from now on.
    fn work(&self) -> bool {
        let mut state = self.state();
        loop {
            let Some(job) = state.queue.pop_front() else {
                if state.closed {
                    return false;
                }
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            if state.closed {
                return false;
            }
            drop(state);
            let Job { sequence, question, since } = job;
            let request = Asked { socket: Socket::Control, sequence };
            let Some(_served) = LEAVING.begin(&question) else {
                self.reply(request, Err(Errno::NOTCONN));
                state = self.state();
                continue;
            };
            let number = self.state().begin(request, since);
            let is_about_socket = self.directories.is_about_socket(&question);
            let answer = match is_about_socket {
                true => self.grant_own_socket(),
                false => self.directories.answer(&question),
            };
            let is_granted = is_about_socket && answer.is_ok();
            if self.finish(number) {
                self.reply(request, answer);
            }
            if is_granted {
                return true;
            }
            state = self.state();
        }
    }

    /// Notes that it is done; whether it still waits for its reply.
    fn finish(&self, number: u64) -> bool {
        self.state().running.remove(&number).is_some_and(|running| !running.given_up)
    }

    /// Gives the sandbox a socket for its requests.
    fn grant_own_socket(&self) -> Result<Answer, Errno> {
        if self.own.get().is_some() {
            return Err(Errno::BUSY);
        }
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner).take();
        let pair = made.map_or_else(OwnSocketPair::new, Ok).map_err(|_| Errno::MFILE)?;
        match self.own.set(pair.host) {
            Ok(()) => Ok(Answer::file(pair.sandbox, Vec::new())),
            Err(_) => Err(Errno::BUSY),
        }
    }

    /// Serves the requests that come over the sandbox' own socket, until it is ended.
    fn serve_own(&self, own: &OwnSocket) {
        let mut requests = own.requests();
        while let Some((sequence, question)) = requests.next() {
            let Some(_served) = LEAVING.begin(&question) else {
                self.reply(Asked { socket: Socket::Own, sequence }, Err(Errno::NOTCONN));
                continue;
            };
            // What is still in the socket when it has ended can be received, and must not be served.
            let Some(number) = self.state().begin_own(sequence) else { break };
            let answer = self.directories.answer(&question);
            if self.finish(number) {
                self.reply(Asked { socket: Socket::Own, sequence }, answer);
            }
        }
        own.end();
    }

    /// Sends a reply; waits while the sandbox does not read its control socket.
    fn reply(&self, request: Asked, answer: Result<Answer, Errno>) {
        let (errno, answer) = match answer {
            Ok(answer) => (0, answer),
            Err(errno) => (errno.raw_os_error(), Answer::default()),
        };
        let bytes = message::reply(request.sequence, errno, &answer.tail);
        let descriptors: Vec<_> = answer.descriptor.iter().map(AsFd::as_fd).collect();
        if request.socket == Socket::Own {
            self.own.get().into_iter().for_each(|own| own.send(&bytes, &descriptors));
            return;
        }
        // A sandbox that has ended hears nothing more; its owner learns that elsewhere.
        while let Err(error) = message::send(&self.control, &[IoSlice::new(&bytes)], &descriptors) {
            if error.kind() != io::ErrorKind::WouldBlock || self.state().closed {
                return;
            }
            let second = Timespec { tv_sec: 1, tv_nsec: 0 };
            let mut events = [PollFd::new(&self.control, PollFlags::OUT)];
            // An error shows in the next attempt, too.
            let _ = poll(&mut events, Some(&second));
        }
    }

    /// Tells the sandbox that a request takes too long. One that does not read its replies gets no
    /// further ones.
    fn reply_late(&self, request: Asked) {
        let bytes = message::reply(request.sequence, Errno::TIMEDOUT.raw_os_error(), &[]);
        match request.socket {
            Socket::Control => {
                let _ = message::send(&self.control, &[IoSlice::new(&bytes)], &[]);
            }
            // Its only thread waits: what comes next goes over the control socket.
            Socket::Own => self.own.get().into_iter().for_each(|own| own.end_with(&bytes)),
        }
    }

    /// Looks after the workers, from a thread that never touches a file.
    fn watch(self: &Arc<Self>) {
        let mut state = self.state();
        while !state.closed {
            (state, _) =
                self.closing.wait_timeout(state, SLOW).unwrap_or_else(PoisonError::into_inner);
            let late = give_up(&mut state, Instant::now());
            let wants_worker = state.idle == 0
                && state.workers < WORKERS_MAX
                && state.queue.front().is_some_and(|job| job.since.elapsed() >= SLOW);
            if late.is_empty() && !wants_worker {
                continue;
            }
            drop(state);
            if wants_worker {
                // Without another thread the others wait for their time to pass.
                let _ = self.spawn_worker();
            }
            late.into_iter().for_each(|request| self.reply_late(request));
            state = self.state();
        }
    }
}

/// Takes out the requests whose time has passed.
fn give_up(state: &mut State, now: Instant) -> Vec<Asked> {
    let is_late = |since: Instant| now.saturating_duration_since(since) >= PATIENCE;
    let mut late = Vec::new();
    for running in state.running.values_mut() {
        if !running.given_up && is_late(running.since) {
            running.given_up = true;
            state.own_ended |= running.request.socket == Socket::Own;
            late.push(running.request);
        }
    }
    while state.queue.front().is_some_and(|job| is_late(job.since)) {
        let of_control = |job: Job| Asked { socket: Socket::Control, sequence: job.sequence };
        late.extend(state.queue.pop_front().map(of_control));
    }
    late
}

#[cfg(test)]
mod tests;
