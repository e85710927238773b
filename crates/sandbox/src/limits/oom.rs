//! Has one process of a sandbox ended when its memory is used up, instead of all.
//!
//! The host kernel knows nothing of guest processes. If it killed a host process, what that did in
//! the sandbox' kernel would stay half done, so that all would have to end. Instead:
//!
//! 1. A part of the sandbox' memory is its reserve ([`MemoryLimit::reserve`]).
//!    The host holds up who wants more than the rest: with version 1 it has them wait
//!    (`memory.oom_control`), with version 2 it slows them down (`memory.high`). With version 1
//!    it also says when little more than the reserve is left, so that hardly anybody has to wait.
//! 2. A thread of this library hears of it ([`OomEvents`]), and tells the kernel of the sandbox what each of
//!    its processes has ([`MSG_OUT_OF_MEMORY`]). It lends the reserve to whoever is held up.
//! 3. The kernel ends one, as Linux would choose it, and has the others wait. When memory has been
//!    given back, they go on ([`MSG_MEMORY_IS_BACK`]), and the reserve is no longer lent.
//!
//! A sandbox whose kernel does not do that is left to the host's own killer, after [`PATIENCE`].

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::process::{Signal, pidfd_send_signal};
use thaw_abi::control::{MSG_MEMORY_IS_BACK, MSG_OUT_OF_MEMORY, OutOfMemory, PROCESS_MEMORY_MAX};

use super::group::field;
use super::hierarchy::{Controller, Version};
use super::memory::{MemoryLimit, STEPS};
use super::processes::{descendants, members, memory_of, signal_members};
use super::{Group, Limits};
use crate::message;

/// A sandbox is watched when it has lived for so long: many end before, and a boot is not to wait.
const SETTLING: Duration = Duration::from_millis(20);
/// How long the thread goes on looking for new sandboxes by itself, so that who makes one does not
/// have to wake it.
const LINGERING: Duration = Duration::from_secs(2);
/// Pause between two looks at a sandbox whose memory is used up.
const LOOK: Duration = Duration::from_millis(5);
/// Shortest time between two looks at a sandbox.
const LOOK_MIN: Duration = Duration::from_millis(1);
/// Pause after processes were held up though there was memory.
const HELD_UP_LOOK: Duration = Duration::from_millis(50);
/// Pause after something went wrong that may pass.
const LOOK_AFTER_ERROR: Duration = Duration::from_millis(500);
/// Most processes of a sandbox whose memory is looked at.
const LOOKED_AT_MAX: usize = 1024;
/// So long after it was asked, a sandbox that has used its reserve as well is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(200);
/// So long after one step of its reserve it gets the next one.
const LEND_AGAIN: Duration = Duration::from_millis(50);
/// For so long a sandbox may answer nothing.
const PATIENCE: Duration = Duration::from_secs(3);
/// After one shortage of a sandbox its processes wait for so long in the next one, so that one tenant
/// cannot keep the thread from others.
const BREATHER: Duration = Duration::from_millis(20);
/// Most processes of a sandbox that are told to look at their messages.
const RUNG_MAX: usize = 64;
/// What the host may have charged ahead, or not counted yet.
const SLACK: u64 = 256 << 10;

/// Tells a sandbox something.
pub(crate) trait Tell: Send + Sync {
    /// Sends a message.
    ///
    /// # Errors
    /// It has ended, or takes nothing any more.
    fn tell(&self, message: Vec<u8>) -> io::Result<()>;
}

/// A sandbox to be watched, as long as it lives.
pub(crate) struct Guarded {
    /// Its limits.
    pub limits: Weak<Limits>,
    /// The way to its kernel.
    pub line: Weak<dyn Tell>,
    /// Its first process,
    pub pidfd: Weak<OwnedFd>,
    /// and the number of that in `/proc`.
    pub pid: u32,
    /// Whether this process numbers processes as `/proc` does.
    pub has_own_numbers: bool,
}

/// What the host says about the memory of a control group.
#[derive(Debug)]
pub(super) struct OomEvents {
    /// Becomes readable (version 1), or has something special (version 2), when memory is short.
    source: OwnedFd,
    /// With version 1: becomes readable when so much memory is in use.
    threshold: Mutex<Option<Threshold>>,
    /// `memory.oom_control` of version 1: to give up must not take another descriptor.
    control: Option<File>,
    directory: PathBuf,
    version: Version,
}

/// An amount of memory, in bytes, of which the host says when it is reached.
#[derive(Debug)]
struct Threshold {
    bytes: u64,
    /// To drop it is to want it no more.
    source: OwnedFd,
}

impl OomEvents {
    /// The files that whoever watches must be able to write.
    pub fn files(version: Version) -> &'static [&'static str] {
        match version {
            Version::V1 => &[OOM_CONTROL, "cgroup.event_control"],
            Version::V2 => &[],
        }
    }

    /// Begins to watch. With version 1 the host ends nobody from now on.
    pub fn watch(directory: PathBuf, version: Version) -> io::Result<Self> {
        if version == Version::V2 {
            let source = File::open(directory.join("memory.events"))?.into();
            let (threshold, control) = (Mutex::default(), None);
            return Ok(Self { source, threshold, control, directory, version });
        }
        // Documentation/admin-guide/cgroup-v1/memory.rst, "OOM Control".
        let source = event_of(&directory, OOM_CONTROL, "")?;
        let control = File::options().write(true).open(directory.join(OOM_CONTROL))?;
        control.write_all_at(b"1", 0)?;
        let (threshold, control) = (Mutex::default(), Some(control));
        Ok(Self { source, threshold, control, directory, version })
    }

    /// Has `epoll` hear, under `key`, when so many bytes are in use; 0: never.
    fn expect(&self, bytes: u64, epoll: &OwnedFd, key: u64) -> io::Result<()> {
        let mut threshold = self.threshold.lock().unwrap_or_else(PoisonError::into_inner);
        let known = threshold.as_ref().map_or(0, |threshold| threshold.bytes);
        if self.version == Version::V2 || known == bytes {
            return Ok(());
        }
        *threshold = None;
        if bytes > 0 {
            let source = event_of(&self.directory, "memory.usage_in_bytes", &format!(" {bytes}"))?;
            epoll::add(epoll, &source, EventData::new_u64(key), EventFlags::IN)?;
            *threshold = Some(Threshold { bytes, source });
        }
        Ok(())
    }

    fn interest(&self) -> EventFlags {
        match self.version {
            Version::V1 => EventFlags::IN,
            Version::V2 => EventFlags::PRI,
        }
    }

    /// Waits for the next event from now on.
    fn forget(&self) {
        let mut buffer = [0; 512];
        let threshold = self.threshold.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(threshold) = &*threshold {
            let _ = rustix::io::read(&threshold.source, &mut buffer);
        }
        let _ = match self.version {
            Version::V1 => rustix::io::read(&self.source, &mut buffer),
            Version::V2 => rustix::io::pread(&self.source, &mut buffer, 0),
        };
    }

    /// Whether the host holds processes up until there is memory.
    ///
    /// # Errors
    /// The group cannot be read.
    fn holds_somebody_up(&self) -> io::Result<bool> {
        if self.version == Version::V2 {
            return Ok(false);
        }
        let text = fs::read_to_string(self.directory.join(OOM_CONTROL))?;
        Ok(field(&text, "under_oom").is_some_and(|value| value > 0))
    }

    /// Has the host end somebody again when memory is used up.
    fn give_up(&self) {
        if let Some(control) = &self.control {
            let _ = control.write_all_at(b"0", 0);
        }
    }

    /// The same, and `epoll` hears of nothing any more.
    fn end(&self, epoll: &OwnedFd) {
        self.give_up();
        let _ = epoll::delete(epoll, &self.source);
        *self.threshold.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Drop for OomEvents {
    fn drop(&mut self) {
        self.give_up();
    }
}

const OOM_CONTROL: &str = "memory.oom_control";

/// Has the host end somebody when the memory of a group is used up, whoever has asked for something else
/// before. With version 2 it does anyway.
pub(super) fn leave_to_host(directory: &Path) {
    if let Ok(control) = File::options().write(true).open(directory.join(OOM_CONTROL)) {
        let _ = control.write_all_at(b"0", 0);
    }
}

/// What becomes readable when the host has something to say about a file of a group of version 1.
fn event_of(directory: &Path, file: &str, arguments: &str) -> io::Result<OwnedFd> {
    let source = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let file = File::open(directory.join(file))?;
    let wanted = format!("{} {}{arguments}", source.as_raw_fd(), file.as_raw_fd());
    fs::write(directory.join("cgroup.event_control"), wanted)?;
    Ok(source)
}

/// Whether the host ends nobody who wants more memory than this group of version 1 may have.
///
/// # Errors
/// It cannot be read.
pub(super) fn ends_nobody(directory: &Path) -> io::Result<bool> {
    let text = fs::read_to_string(directory.join(OOM_CONTROL))?;
    Ok(field(&text, "oom_kill_disable").is_some_and(|value| value > 0))
}

/// How much memory a sandbox has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    /// Enough for all to go on, also when one of its processes has just ended and not given back all.
    Enough,
    /// Enough, as long as nobody is being ended.
    Some,
    /// Little more than its reserve, or less.
    Little,
    /// So little that the host holds its processes up.
    Nothing,
}

impl Left {
    /// # Errors
    /// The group cannot be read.
    fn of(group: &Group, limit: MemoryLimit, is_held_up: bool) -> io::Result<Self> {
        if limit.wanted == 0 {
            return Ok(Self::Enough);
        }
        // It is held up, too, where a group above has used up its memory.
        if is_held_up && in_use(group)?.saturating_add(SLACK) >= limit.usable(group) {
            return Ok(Self::Nothing);
        }
        let short_from = limit.is_short_from(group);
        // What the host can take back does not count, though it may have been what it spoke of.
        let held = group.memory_held()?.unwrap_or(0).saturating_add(SLACK);
        Ok(match held {
            held if held >= short_from => Self::Little,
            held if held.saturating_add(limit.step(group)) >= short_from => Self::Some,
            _ => Self::Enough,
        })
    }
}

/// Bytes that count in the limit of a group, page cache included.
fn in_use(group: &Group) -> io::Result<u64> {
    Ok(group.memory()?.unwrap_or(0))
}

/// A sandbox that is watched.
struct Watched {
    key: u64,
    guarded: Guarded,
    /// Its memory is used up.
    shortage: Option<Shortage>,
    /// When the last shortage ended.
    ended: Option<Instant>,
    /// When it was looked at last.
    looked: Option<Instant>,
    /// When to look at it next, without an event.
    look: Option<Instant>,
}

/// A sandbox has used up its memory, and has not given it back yet.
#[derive(Clone, Copy)]
struct Shortage {
    /// Since when its kernel has answered nothing, if it has not answered the last time.
    unanswered: Instant,
    /// When it was asked last, or was seen to give memory back.
    asked: Instant,
    /// Bytes that it had then.
    held: u64,
    /// Whether much of that was its first process's, with which all of it ends.
    first_is_large: bool,
    /// When a step of its reserve was lent last, if one was.
    lent: Option<Instant>,
}

/// Why a sandbox is watched no longer.
struct Gone;

impl Watched {
    fn new(key: u64, guarded: Guarded) -> Self {
        Self { key, guarded, shortage: None, ended: None, looked: None, look: None }
    }

    /// Does what there is to do; to be called at each event, and when a look is due.
    fn attend(&mut self, now: Instant, epoll: &OwnedFd) -> Result<(), Gone> {
        let limits = self.guarded.limits.upgrade().ok_or(Gone)?;
        let events = limits.group.oom_events().ok_or(Gone)?;
        events.forget();
        if self.looked.is_some_and(|looked| now - looked < LOOK_MIN) {
            // Usage that goes up and down around the threshold is no reason to look at nothing else.
            self.look.get_or_insert(now + LOOK_MIN);
            return Ok(());
        }
        self.looked = Some(now);
        let done = self.do_what_is_due(&limits, events, now, epoll);
        match done {
            Ok(()) => Ok(()),
            // This process may have no descriptor left for the moment.
            Err(error) if !is_final(&error) && !self.is_out_of_patience(now) => {
                self.look = Some(now + LOOK_AFTER_ERROR);
                Ok(())
            }
            Err(_) => {
                events.end(epoll);
                // From here on the host ends it when it has used all of that.
                let _ = limits.change_memory(|memory| memory.lent = STEPS);
                Err(Gone)
            }
        }
    }

    fn do_what_is_due(
        &mut self,
        limits: &Limits,
        events: &OomEvents,
        now: Instant,
        epoll: &OwnedFd,
    ) -> io::Result<()> {
        if limits.can_end_nobody() && self.shortage.is_some_and(|shortage| shortage.first_is_large)
        {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let is_held_up = events.holds_somebody_up()?;
        let left = Left::of(&limits.group, limits.memory_limit(), is_held_up)?;
        match left {
            Left::Some if self.is_ending_one(now) => {}
            Left::Enough | Left::Some => self.take_back(limits, now)?,
            Left::Little => self.end_one(limits, now)?,
            Left::Nothing => {
                self.end_one(limits, now)?;
                self.lend(limits, now)?;
            }
        }
        let short_from = limits.memory_limit().is_short_from(&limits.group);
        events.expect(short_from, epoll, self.key)?;
        self.look = match left {
            Left::Little | Left::Nothing => Some(now + LOOK),
            _ if self.shortage.is_some() => Some(now + LOOK),
            _ if is_held_up => Some(now + HELD_UP_LOOK),
            // Page cache was in the way of what is lent.
            _ if limits.memory_limit().lent > 0 => Some(now + LOOK_AFTER_ERROR),
            _ => None,
        };
        if is_held_up && left != Left::Nothing {
            // The limit may stay a page higher, until it is written next.
            let _ = limits.have_host_look_again();
        }
        Ok(())
    }

    /// Has a process ended, unless that was asked for a moment ago.
    fn end_one(&mut self, limits: &Limits, now: Instant) -> io::Result<()> {
        let held = limits.group.memory_held()?.unwrap_or(0);
        let unanswered = match self.shortage {
            None if self.ended.is_some_and(|ended| now - ended < BREATHER) => return Ok(()),
            None => now,
            Some(_) if self.is_ending_one(now) => return Ok(()),
            Some(shortage) if held + limits.memory_limit().step(&limits.group) <= shortage.held => {
                // One that has ended takes its time to give its memory back, and is in no list any more.
                self.shortage = Some(Shortage { asked: now, held, ..shortage });
                return Ok(());
            }
            Some(_) if self.is_out_of_patience(now) => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Some(shortage) => {
                self.lend(limits, now)?;
                let is_obeyed = !limits.is_asked() && !limits.can_end_nobody();
                if is_obeyed { now } else { shortage.unanswered }
            }
        };
        let lent = self.shortage.and_then(|shortage| shortage.lent);
        let first_is_large = self.guarded.ask(limits)?;
        self.shortage = Some(Shortage { unanswered, asked: now, held, first_is_large, lent });
        Ok(())
    }

    fn is_out_of_patience(&self, now: Instant) -> bool {
        self.shortage.is_some_and(|shortage| now - shortage.unanswered >= PATIENCE)
    }

    /// Whether a process that was to end may still give memory back.
    fn is_ending_one(&self, now: Instant) -> bool {
        self.shortage.is_some_and(|shortage| now - shortage.asked < ASK_AGAIN)
    }

    /// Lends the next step of its reserve, unless the last one was lent a moment ago.
    fn lend(&mut self, limits: &Limits, now: Instant) -> io::Result<()> {
        let Some(shortage) = &mut self.shortage else { return Ok(()) };
        if shortage.lent.is_none_or(|lent| now - lent >= LEND_AGAIN) {
            shortage.lent = Some(now);
            self.guarded.lend(limits)?;
        }
        Ok(())
    }

    /// Lets the processes of the sandbox go on, and takes the reserve back as soon as nothing is in the
    /// way: the host would take page cache back first, for as long as that takes, while others wait.
    fn take_back(&mut self, limits: &Limits, now: Instant) -> io::Result<()> {
        if self.shortage.take().is_some() {
            self.ended = Some(now);
            self.guarded.tell(MSG_MEMORY_IS_BACK, &[])?;
        }
        let limit = limits.memory_limit();
        let usual = MemoryLimit { lent: 0, ..limit }.usable(&limits.group);
        if limit.lent > 0 && in_use(&limits.group)? <= usual {
            limits.change_memory(|memory| memory.lent = 0)?;
        }
        Ok(())
    }

    /// Gives it a reserve, which it has lent for the time being.
    fn reserve(limits: &Limits) -> io::Result<()> {
        limits.change_memory(|memory| (memory.has_reserve, memory.lent) = (true, STEPS))
    }
}

/// Whether nothing can be done for the sandbox any more.
fn is_final(error: &io::Error) -> bool {
    let errors = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EBUSY, libc::EAGAIN];
    !error.raw_os_error().is_some_and(|number| errors.contains(&number))
}

impl Guarded {
    /// Has the kernel of the sandbox end one of its processes. Whether its first process has a quarter of
    /// its memory.
    fn ask(&self, limits: &Limits) -> io::Result<bool> {
        let processes = memory_of(&self.processes(limits));
        if processes.is_empty() {
            // This process may have no descriptor left for the moment.
            return Ok(false);
        }
        let told = &processes[..processes.len().min(PROCESS_MEMORY_MAX)];
        let mut body =
            bytemuck::bytes_of(&OutOfMemory { count: told.len() as u32, reserved: 0 }).to_vec();
        told.iter().for_each(|(_, memory)| body.extend_from_slice(bytemuck::bytes_of(memory)));
        // Its answer may be here before this thread goes on.
        limits.note_asked_to_end_one();
        self.tell(MSG_OUT_OF_MEMORY, &body)?;
        self.ring(limits, processes.iter().map(|(pid, _)| *pid))?;
        let first = processes.iter().find(|(pid, _)| *pid == self.pid);
        let first_has = first.map_or(0, |(_, memory)| u64::from(memory.resident_kib) << 10);
        Ok(first_has >= limits.memory_limit().wanted / 4)
    }

    /// Lends a step of the reserve. Those who are held up take a page more, and look at their messages
    /// before anything else.
    fn lend(&self, limits: &Limits) -> io::Result<()> {
        self.ring(limits, self.processes(limits).into_iter())?;
        limits.change_memory(|memory| *memory = memory.with_next_step())
    }

    /// The processes of the sandbox.
    fn processes(&self, limits: &Limits) -> Vec<u32> {
        let mut processes = match limits.group.directory_of(Controller::Memory) {
            Some(group) if self.has_own_numbers => members(group),
            _ => descendants(self.pid),
        };
        processes.truncate(LOOKED_AT_MAX);
        processes
    }

    /// Has the sandbox look at its messages, also if its programs compute and never wait. Those who take
    /// memory are on a processor, where its first process may have to wait for a turn.
    fn ring(&self, limits: &Limits, processes: impl Iterator<Item = u32>) -> io::Result<()> {
        let pidfd = self.pidfd.upgrade().ok_or(io::ErrorKind::NotFound)?;
        pidfd_send_signal(&*pidfd, Signal::USR1)?;
        // A twin would take the signal for its end.
        if self.has_own_numbers
            && limits.memory_limit().for_twin == 0
            && let Some(group) = limits.group.directory_of(Controller::Memory)
        {
            signal_members(group, processes.take(RUNG_MAX), Signal::USR1);
        }
        Ok(())
    }

    fn tell(&self, kind: u32, body: &[u8]) -> io::Result<()> {
        let line = self.line.upgrade().ok_or(io::ErrorKind::NotFound)?;
        line.tell(message::with_body(kind, body))
    }
}

/// What the thread and the others share.
struct Shared {
    new: Vec<(Instant, Guarded)>,
    /// Wakes the thread.
    waker: Option<Arc<OwnedFd>>,
    /// The thread will look by itself before long.
    is_looking: bool,
}

static SHARED: Mutex<Shared> =
    Mutex::new(Shared { new: Vec::new(), waker: None, is_looking: false });

fn lock() -> MutexGuard<'static, Shared> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Watches a sandbox from soon on. Hardly takes the caller any time.
pub(crate) fn guard(guarded: Guarded) {
    let mut shared = lock();
    if shared.waker.is_none() {
        // Without the thread all of the sandbox is ended, as without control groups.
        let Ok(waker) = Watcher::start() else { return };
        shared.waker = Some(waker);
    }
    shared.new.push((Instant::now() + SETTLING, guarded));
    if !std::mem::replace(&mut shared.is_looking, true)
        && let Some(waker) = &shared.waker
    {
        let _ = rustix::io::write(waker, &1u64.to_ne_bytes());
    }
}

/// The thread.
struct Watcher {
    epoll: OwnedFd,
    waker: Arc<OwnedFd>,
    new: Vec<(Instant, Guarded)>,
    watched: HashMap<u64, Watched>,
    last_key: u64,
    /// When the last new sandbox was seen.
    seen_new: Instant,
}

/// The key of the waker.
const WAKER: u64 = 0;

impl Watcher {
    fn start() -> io::Result<Arc<OwnedFd>> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let waker = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        epoll::add(&epoll, &*waker, EventData::new_u64(WAKER), EventFlags::IN)?;
        let watcher = Self {
            epoll,
            waker: waker.clone(),
            new: Vec::new(),
            watched: HashMap::new(),
            last_key: WAKER,
            seen_new: Instant::now(),
        };
        std::thread::Builder::new().name("thaw-oom".into()).spawn(|| watcher.run())?;
        Ok(waker)
    }

    fn run(mut self) {
        let mut ready = [Event { flags: EventFlags::empty(), data: EventData::new_u64(WAKER) }; 64];
        loop {
            let timeout = self.prepare_to_wait();
            // It may have been interrupted.
            let waited = epoll::wait(&self.epoll, &mut ready[..], timeout.as_ref());
            let count = waited.unwrap_or_default();
            let now = Instant::now();
            for event in &ready[..count] {
                match event.data.u64() {
                    WAKER => drop(rustix::io::read(&self.waker, &mut [0; 8])),
                    key => self.attend(key, now),
                }
            }
            let is_due = |watched: &Watched| watched.look.is_some_and(|due| due <= now);
            let due = self.watched.iter().filter(|(_, watched)| is_due(watched));
            let due: Vec<u64> = due.map(|(&key, _)| key).collect();
            due.into_iter().for_each(|key| self.attend(key, now));
            self.begin_due(now);
        }
    }

    fn attend(&mut self, key: u64, now: Instant) {
        if let Some(watched) = self.watched.get_mut(&key)
            && watched.attend(now, &self.epoll).is_err()
        {
            self.watched.remove(&key);
        }
    }

    /// Takes the new sandboxes over; how long to wait for events.
    fn prepare_to_wait(&mut self) -> Option<Timespec> {
        let now = Instant::now();
        let mut shared = lock();
        if !shared.new.is_empty() {
            self.new.append(&mut shared.new);
            self.seen_new = now;
        }
        shared.is_looking = self.seen_new.elapsed() < LINGERING;
        let lingers = shared.is_looking.then(|| now + SETTLING);
        drop(shared);
        let looks = self.watched.values().filter_map(|watched| watched.look);
        let dues = looks.chain(self.new.iter().map(|(due, _)| *due));
        let next = dues.chain(lingers).min()?;
        Some(message::time_until(next))
    }

    /// Begins to watch those that have lived long enough, and forgets those that have ended.
    fn begin_due(&mut self, now: Instant) {
        let due: Vec<Guarded> =
            self.new.extract_if(.., |(due, _)| *due <= now).map(|(_, guarded)| guarded).collect();
        if due.is_empty() {
            return;
        }
        self.watched.retain(|_, watched| watched.guarded.limits.strong_count() > 0);
        for guarded in due {
            self.last_key += 1;
            let key = self.last_key;
            // One that cannot be watched is ended as a whole when its memory is used up.
            if let Some(limits) = guarded.limits.upgrade()
                && self.begin(key, &limits).is_ok()
            {
                self.watched.insert(key, Watched::new(key, guarded));
                // It may have been short before.
                self.attend(key, now);
            }
        }
    }

    fn begin(&self, key: u64, limits: &Limits) -> io::Result<()> {
        let Some(events) = limits.group.watch_oom()? else {
            return Err(io::ErrorKind::Other.into());
        };
        let event = EventData::new_u64(key);
        let begun = epoll::add(&self.epoll, &events.source, event, events.interest());
        begun.map_err(io::Error::from).and_then(|()| Watched::reserve(limits)).inspect_err(|_| {
            events.end(&self.epoll);
        })
    }
}
