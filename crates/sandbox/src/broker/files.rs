//! The threads that serve directories of the host to one sandbox.
//!
//! They belong to a process that does nothing else ([`super::process`]). They are threads
//! because a file system may let them wait (a server that does not answer). A
//! request that takes [`PATIENCE`] is answered with `ETIMEDOUT`; meanwhile others are
//! served by another thread, of which there are [`WORKERS_MAX`] at most.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use thaw_abi::bind::BindRequest;

use super::bound::{Bound, BoundAccess, BoundDirectory};
use super::host_directory::{Description, HostDirectory, Listing};
use super::rights::FileRights;
use super::volume::{MountedVolume, Share, Volume, VolumeMount};
use super::{Answer, Question, check_read_only};
use crate::message;

/// How long a request may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long one may keep others waiting.
const SLOW: Duration = Duration::from_millis(500);
/// Most threads of one sandbox.
const WORKERS_MAX: usize = 4;
/// Most requests that wait. A sandbox has one at a time for each virtual CPU of each
/// of its processes, of which it may have 1024.
const QUEUE_MAX: usize = 2048;

/// A question about files, without what it borrowed.
#[derive(Clone, Debug)]
enum FileQuestion {
    Stat(Vec<u8>),
    List { path: Vec<u8>, skip: u64 },
    ReadLink(Vec<u8>),
    Open(Vec<u8>),
    Bind(BindRequest, Vec<u8>),
}

impl FileQuestion {
    /// `None`: it is about something else.
    fn of(question: &Question<'_>) -> Option<Self> {
        Some(match *question {
            Question::Stat(path) => Self::Stat(path.to_vec()),
            Question::List { path, skip } => Self::List { path: path.to_vec(), skip },
            Question::ReadLink(path) => Self::ReadLink(path.to_vec()),
            Question::Open(path) => Self::Open(path.to_vec()),
            Question::Bind(request, tail) => Self::Bind(request, tail.to_vec()),
            _ => return None,
        })
    }
}

/// More requests wait than a sandbox can have.
#[derive(Debug)]
pub struct QueueFull;

/// The directories of the host that a sandbox uses.
#[derive(Default)]
pub struct Directories {
    /// Its root, if that is one.
    pub root: Option<Arc<HostDirectory>>,
    /// Those that are mounted, by number of the mount.
    bound: BTreeMap<u32, Bound>,
    /// Volumes that are mounted, by number of the mount.
    volumes: BTreeMap<u32, MountedVolume>,
    /// The directory that is being listed, so that a long one is read once.
    listing: Mutex<Option<Listing>>,
    restricted: bool,
}

impl Directories {
    /// Those of a sandbox with this root directory.
    pub fn new(root: Option<Arc<HostDirectory>>) -> Self {
        let restricted =
            root.as_ref().is_some_and(|root| root.rights() == FileRights::Unprivileged);
        Self { root, restricted, ..Self::default() }
    }

    /// Adds a mount.
    pub fn bind(&mut self, mount: u32, directory: &BoundDirectory) {
        self.restricted |= directory.directory().rights() == FileRights::Unprivileged;
        self.bound.insert(mount, Bound::new(directory));
    }

    /// Volumes by number of the mount.
    pub fn of_volumes<'a>(volumes: impl Iterator<Item = (u32, &'a VolumeMount)>) -> Self {
        let share = Share::default();
        let volumes =
            volumes.map(|(number, volume)| (number, MountedVolume::new(volume, share.clone())));
        Self { volumes: volumes.collect(), ..Self::default() }
    }

    /// What another process must know to serve them, and their descriptors in the order in
    /// which they are told of.
    pub(super) fn setup(&self) -> (Setup, Vec<BorrowedFd<'_>>) {
        let mut descriptors: Vec<_> = self.root.iter().map(|root| root.as_fd()).collect();
        descriptors.extend(self.bound.values().map(|bound| bound.directory().as_fd()));
        let described = |(number, bound): (&u32, &Bound)| {
            (*number, bound.access(), bound.directory().description())
        };
        let setup = Setup {
            rights: self.rights(),
            root: self.root.as_ref().map(|root| root.description()),
            bound: self.bound.iter().map(described).collect(),
        };
        (setup, descriptors)
    }

    /// Those that another process has told of. Whoever serves them has taken the rights for
    /// it before.
    pub(super) fn told(setup: Setup, descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or(io::ErrorKind::InvalidData);
        let root = setup.root.map(|root| HostDirectory::described(next()?, root)).transpose()?;
        let mut all = Self { root: root.map(Arc::new), ..Self::default() };
        for (number, access, directory) in setup.bound {
            let directory = HostDirectory::described(next()?, directory)?;
            all.bound.insert(number, Bound::new(&BoundDirectory::new(directory, access)));
        }
        Ok(all)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.root.is_none() && self.bound.is_empty()
    }

    /// The rights that are enough for none and too much for none.
    fn rights(&self) -> FileRights {
        if self.restricted { FileRights::Unprivileged } else { FileRights::Caller }
    }

    /// Answers on the calling thread; `None`: the question is about something else.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn answer_here(&self, question: &Question<'_>) -> Option<Result<Answer, Errno>> {
        FileQuestion::of(question).map(|question| self.answer(&question))
    }

    fn answer(&self, question: &FileQuestion) -> Result<Answer, Errno> {
        if let FileQuestion::Bind(request, tail) = question {
            if let Some(volume) = self.volumes.get(&request.mount) {
                return volume.serve(request, tail);
            }
            let bound = self.bound.get(&request.mount).ok_or(Errno::NODEV)?;
            return Ok(Answer::data(bound.serve(request, tail)?));
        }
        // The sandbox has the other kind of rootfs.
        let root = self.root.as_ref().ok_or(Errno::NOSYS)?;
        match question {
            FileQuestion::Stat(path) => Ok(Answer::data(root.stat(path)?)),
            FileQuestion::ReadLink(path) => Ok(Answer::data(root.read_link(path)?)),
            FileQuestion::Open(path) => {
                let (file, attributes) = root.open_file(path)?;
                check_read_only(file.as_fd())?;
                Ok(Answer::file(file, attributes))
            }
            FileQuestion::List { path, skip } => {
                let last = self.last_listing().take();
                let listing = match last {
                    Some(listing) if *skip > 0 && listing.is_of(path) => listing,
                    _ => root.list(path)?,
                };
                let tail = listing.page(*skip);
                // An empty page is the end; the listing is not asked for again.
                *self.last_listing() = (!tail.is_empty()).then_some(listing);
                Ok(Answer::data(tail))
            }
            FileQuestion::Bind(..) => Err(Errno::NOSYS),
        }
    }

    fn last_listing(&self) -> MutexGuard<'_, Option<Listing>> {
        self.listing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// [`Directories`] in the words that another process is told.
#[derive(Debug, Serialize, Deserialize)]
pub struct Setup {
    /// Under whose rights they are served.
    pub rights: FileRights,
    root: Option<Description>,
    bound: Vec<(u32, BoundAccess, Description)>,
}

impl Setup {
    /// How many descriptors belong to it.
    pub fn descriptors(&self) -> usize {
        usize::from(self.root.is_some()) + self.bound.len()
    }

    /// Whether any of the directories may be written to.
    pub fn access(&self) -> BoundAccess {
        let writable = self.bound.iter().any(|(_, access, _)| *access == BoundAccess::Write);
        if writable { BoundAccess::Write } else { BoundAccess::Read }
    }
}

/// Serves directories on threads of its own, which end with it.
pub struct FileServer {
    shared: Arc<Shared>,
}

struct Shared {
    directories: Directories,
    control: OwnedFd,
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
}

struct Job {
    sequence: u64,
    question: FileQuestion,
    since: Instant,
}

struct Running {
    sequence: u64,
    since: Instant,
    /// The sandbox has been told that it takes too long.
    given_up: bool,
}

impl FileServer {
    /// Starts serving, under the rights of the caller; replies go to `control`.
    ///
    /// # Errors
    /// There are no threads left.
    pub fn start(directories: Directories, control: OwnedFd) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            directories,
            control,
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
        let mounted = self.shared.directories.volumes.values();
        mounted.map(|mounted| mounted.open_files_of(volume)).sum()
    }

    /// Has a question answered, if it is about files; whether it is.
    pub fn submit(&self, sequence: u64, question: &Question<'_>) -> Result<bool, QueueFull> {
        let Some(question) = FileQuestion::of(question) else { return Ok(false) };
        let mut state = self.shared.state();
        if state.queue.len() >= QUEUE_MAX {
            return Err(QueueFull);
        }
        state.queue.push_back(Job { sequence, question, since: Instant::now() });
        let is_awaited = state.idle > 0;
        drop(state);
        if is_awaited {
            self.shared.work.notify_one();
        }
        Ok(true)
    }
}

impl Drop for FileServer {
    fn drop(&mut self) {
        self.shared.state().closed = true;
        self.shared.work.notify_all();
        self.shared.closing.notify_all();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn_worker(self: &Arc<Self>) -> io::Result<()> {
        let shared = self.clone();
        let work = move || {
            shared.work();
            shared.state().workers -= 1;
        };
        self.state().workers += 1;
        let spawned = std::thread::Builder::new().name("files".into()).spawn(work);
        spawned.map(drop).inspect_err(|_| self.state().workers -= 1)
    }

    /// A worker's life.
    fn work(&self) {
        let mut state = self.state();
        loop {
            let Some(job) = state.queue.pop_front() else {
                if state.closed {
                    return;
                }
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            if state.closed {
                return;
            }
            state.last += 1;
            let number = state.last;
            let Job { sequence, question, since } = job;
            state.running.insert(number, Running { sequence, since, given_up: false });
            drop(state);
            let answer = self.directories.answer(&question);
            state = self.state();
            let running = state.running.remove(&number);
            if running.is_some_and(|running| !running.given_up) {
                drop(state);
                self.reply(sequence, answer);
                state = self.state();
            }
        }
    }

    /// Sends a reply; waits while the sandbox does not read.
    fn reply(&self, sequence: u64, answer: Result<Answer, Errno>) {
        let (errno, answer) = match answer {
            Ok(answer) => (0, answer),
            Err(errno) => (errno.raw_os_error(), Answer::default()),
        };
        let bytes = message::reply(sequence, errno, &answer.tail);
        let descriptors: Vec<_> = answer.descriptor.iter().map(AsFd::as_fd).collect();
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

    /// Looks after the workers, from a thread that never touches a file.
    fn watch(self: &Arc<Self>) {
        let mut state = self.state();
        while !state.closed {
            (state, _) =
                self.closing.wait_timeout(state, SLOW).unwrap_or_else(PoisonError::into_inner);
            let late: Vec<u64> = give_up(&mut state, Instant::now());
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
            for sequence in late {
                let bytes = message::reply(sequence, Errno::TIMEDOUT.raw_os_error(), &[]);
                // One that does not read its replies gets no further ones.
                let _ = message::send(&self.control, &[IoSlice::new(&bytes)], &[]);
            }
            state = self.state();
        }
    }
}

/// Takes out the requests whose time has passed; their numbers.
fn give_up(state: &mut State, now: Instant) -> Vec<u64> {
    let is_late = |since: Instant| now.saturating_duration_since(since) >= PATIENCE;
    let mut late = Vec::new();
    for running in state.running.values_mut() {
        if !running.given_up && is_late(running.since) {
            running.given_up = true;
            late.push(running.sequence);
        }
    }
    while state.queue.front().is_some_and(|job| is_late(job.since)) {
        late.extend(state.queue.pop_front().map(|job| job.sequence));
    }
    late
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_requests_are_given_up_once() {
        let now = Instant::now();
        let mut state = State::default();
        let running = |sequence, since| Running { sequence, since, given_up: false };
        state.running.insert(1, running(11, now));
        state.running.insert(2, running(12, now + PATIENCE / 2));
        for (sequence, since) in [(13, now), (14, now + PATIENCE / 2)] {
            let question = FileQuestion::Stat(Vec::new());
            state.queue.push_back(Job { sequence, question, since });
        }
        assert_eq!(give_up(&mut state, now + PATIENCE), [11, 13]);
        assert!(give_up(&mut state, now + PATIENCE).is_empty());
        assert_eq!(state.queue.len(), 1);
    }

    #[test]
    fn answers_come_over_the_control_socket_and_the_queue_has_an_end() {
        let root = HostDirectory::open("/".as_ref()).unwrap();
        let (host, sandbox) = message::control_pair().unwrap();
        rustix::io::ioctl_fionbio(&host, true).unwrap();
        let directories = Directories::new(Some(Arc::new(root)));
        let server = FileServer::start(directories, host).unwrap();
        assert!(server.submit(7, &Question::Stat(b"etc")).unwrap());
        assert!(!server.submit(8, &Question::MemoryFile).unwrap());
        let mut buffer = [0; 1024];
        let packet = message::receive(&sandbox, &mut buffer, None).unwrap();
        let header: thaw_abi::control::MessageHeader = bytemuck::pod_read_unaligned(&buffer[..16]);
        assert_eq!((header.sequence, packet.len > 24), (7, true));
        // Nobody reads the replies: what waits is bounded.
        let fits = (0..100_000).take_while(|&n| server.submit(n, &Question::Stat(b"")).is_ok());
        let fits = fits.count();
        assert!((QUEUE_MAX..50_000).contains(&fits), "{fits}");
    }
}
