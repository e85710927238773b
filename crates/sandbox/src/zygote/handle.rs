//! The library's side of the zygote parent.
//!
//! One thread per parent (the *parent thread*) spawns it, so that its parent-death
//! signal is tied to a thread that lives as long as it is wanted, and then
//! listens to it.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid};
use thaw_abi::control::{MSG_FAILED, MSG_READY, MessageHeader};

use super::id_range::IdRange;
use super::process::{ExitCell, KnownAs, Numbers, Process, affinity_of, pid_of};
use super::protocol::{
    Failure, PARENT_ARGUMENT, REPORT_COPY_EXITED, REPORT_CREATE_FAILED, REPORT_CREATED,
    REPORT_EXITED, REPORT_FAILED, REPORT_SERVING, REPORT_STARTED, REQUEST_CREATE,
    REQUEST_CREATE_MASKED, REQUEST_CREATE_SINGLE, REQUEST_CREATE_TEMPLATE, REQUEST_SETUP,
    REQUEST_SETUP_INSIDE, Report, Request, Step, UserIds, receive, send,
};
use super::verify::{verify, verify_template};
use super::{FIND_PARENT, Processes, Zygote, ZygoteConfig, ZygoteError, kernel_file};
use crate::host::{RESERVE_IDS, STORE_KERNEL};
use crate::limits::{self, Hierarchy, Limits, Missing, WeakLimits};
use crate::message;
use crate::monitor::{self, IdShare, Keep, MonitorLink};
use crate::rewind::{Rewinder, Rewinders};
use crate::state::StateHelper;

/// How long the parent may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Status of the sandboxes that die with their parent, as wait(2) would have it.
const KILLED: i32 = libc::SIGKILL;

/// A handle to the process that makes zygotes. All of them die with it; it ends
/// when this handle and all its zygotes and sandboxes have been dropped, and
/// when the process that holds the handle ends, however that happens.
pub struct ZygoteParent {
    pub(super) config: ZygoteConfig,
    pub(super) connected: Arc<Connected>,
}

impl fmt::Debug for ZygoteParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZygoteParent").field("pid", &self.pid()).finish_non_exhaustive()
    }
}

/// The connection to a running zygote parent. Dropping it ends the parent.
pub(crate) struct Connected {
    pub(super) control: OwnedFd,
    pub(super) pid: u32,
    pub(super) pidfd: OwnedFd,
    pub(super) user_ids: UserIds,
    /// See [`UserIds::of_slot`].
    pub(super) first_id: u32,
    /// [`ZygoteConfig::max_sandboxes`].
    pub(super) limit: u32,
    pub(super) groups: Arc<Hierarchy>,
    pub(super) kernel_build_id: [u8; 32],
    pub(super) registry: Arc<Mutex<Registry>>,
    pub(super) state: Arc<StateHelper>,
    pub(super) rewinders: Arc<Rewinders>,
    /// Whether a monitor has started it, and so keeps it for the next daemon if asked to.
    pub(super) has_monitor: bool,
    /// Whether the monitor keeps it for the next daemon.
    pub(super) kept: Mutex<Option<Keep>>,
}

impl fmt::Debug for Connected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connected").field("pid", &self.pid).finish_non_exhaustive()
    }
}

/// What the parent thread and the callers share.
#[derive(Default)]
pub(super) struct Registry {
    /// Number of the last request.
    last_id: u64,
    /// Requests that wait for an answer.
    requested: HashMap<u64, SyncSender<Result<OwnedFd, Failure>>>,
    /// Processes whose end has not been reported.
    pub(super) alive: HashMap<u64, Alive>,
    /// Those that templates have forked, by their number in the parent's pid
    /// namespace.
    pub(super) copies: HashMap<u32, Alive>,
    /// Such processes that have ended before anybody knew of them.
    pub(super) ended_copies: EndedCopies,
    /// Slots that no process has.
    free_slots: Vec<u32>,
    /// The parent has ended.
    gone: bool,
}

/// Copies that have ended before anybody knew of them: their numbers and wait
/// statuses, the latest last. Nobody will ever ask for some of them, so that only
/// the latest are kept: a fork asks a moment after the end.
#[derive(Default)]
pub(super) struct EndedCopies(VecDeque<(u32, i32)>);

impl EndedCopies {
    const MAX: usize = 256;

    fn insert(&mut self, number: u32, status: i32) {
        if self.0.len() == Self::MAX {
            self.0.pop_front();
        }
        self.0.push_back((number, status));
    }

    /// The wait status of the latest process that has had this number.
    pub fn remove(&mut self, number: u32) -> Option<i32> {
        let latest = self.0.iter().rev().find(|(ended, _)| *ended == number)?.1;
        self.0.retain(|(ended, _)| *ended != number);
        Some(latest)
    }
}

impl Registry {
    /// Takes a number for something new; `None`: the parent has ended.
    pub(super) fn next_id(&mut self) -> Option<u64> {
        if self.gone {
            return None;
        }
        self.last_id += 1;
        Some(self.last_id)
    }

    pub(super) fn take_slot(&mut self) -> Option<u32> {
        self.free_slots.pop()
    }

    pub(super) fn put_slot(&mut self, slot: Option<u32>) {
        self.free_slots.extend(slot);
    }
}

pub(super) struct Alive {
    /// The slot of a sandbox; templates have none.
    pub slot: Option<u32>,
    pub exit: Arc<ExitCell>,
    /// Held so that the control group is removed when the process has ended and
    /// the last handle is gone, whichever is later.
    pub _limits: Arc<Limits>,
}

fn lock(registry: &Mutex<Registry>) -> MutexGuard<'_, Registry> {
    registry.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the parent thread learns while the parent starts.
struct Started {
    pidfd: OwnedFd,
    user_ids: UserIds,
    first_id: u32,
    slots: u64,
}

impl ZygoteParent {
    /// Starts the process: this same executable, see [`super::zygote_parent_main`].
    pub fn start(config: ZygoteConfig) -> Result<Self, ZygoteError> {
        let during = |step| move |source| ZygoteError::Parent { step, source };
        let monitor = monitor::of_this_process();
        let groups = match &monitor {
            Some(link) => Hierarchy::granted(link.clone()),
            // Before there are children: this process may have to move to another group.
            None => limits::discover(),
        };
        if config.weak_limits == WeakLimits::Refuse {
            refuse_weak_limits(groups.missing())?;
        }
        let kernel = kernel_file::create(&config.kernel, config.directory.as_deref())
            .map_err(during(STORE_KERNEL))?;
        let (control, remote) = message::control_pair().map_err(during("make its socket"))?;
        let (ids, setup) = Ids::reserve(monitor, &config).map_err(during(RESERVE_IDS))?;
        let has_monitor = matches!(ids, Ids::Granted { .. });
        send(&control, &setup, &[]).map_err(during("configure it"))?;

        let listening = control.try_clone().map_err(during("make its socket"))?;
        let registry = Arc::new(Mutex::new(Registry::default()));
        let (started_to, started_from) = mpsc::sync_channel(1);
        let state = Arc::new(StateHelper::default());
        let rewinders = Arc::new(Rewinders::default());
        let helpers = (state.clone(), rewinders.clone());
        let own_registry = registry.clone();
        let thread_of_parent =
            ParentThread { control: listening, registry: own_registry, helpers, ids };
        std::thread::Builder::new()
            .name("zygote-parent".into())
            .spawn(move || thread_of_parent.run(remote, kernel, started_to))
            .map_err(during("start its thread"))?;
        let started = started_from.recv_timeout(START_TIMEOUT).map_err(|_| {
            let source = io::Error::from(io::ErrorKind::TimedOut);
            ZygoteError::Parent { step: "wait for it", source }
        })??;

        let pid = pid_of(started.pidfd.as_fd()).map_err(during(FIND_PARENT))?;
        let slots = match started.user_ids {
            UserIds::OnePerSandbox => {
                u32::try_from(started.slots).unwrap_or(u32::MAX).min(config.max_sandboxes)
            }
            UserIds::Shared => config.max_sandboxes,
        };
        // Taken from the end: low slots first.
        lock(&registry).free_slots = (0..slots).rev().collect();
        let connected = Connected {
            control,
            pid,
            pidfd: started.pidfd,
            user_ids: started.user_ids,
            first_id: started.first_id,
            limit: config.max_sandboxes,
            groups,
            kernel_build_id: config.kernel.build_id(),
            registry,
            state,
            rewinders,
            has_monitor,
            kept: Mutex::default(),
        };
        Ok(Self { config, connected: Arc::new(connected) })
    }

    /// Makes a zygote and verifies its isolation. Takes about a millisecond;
    /// take one from a [`super::ZygotePool`] where that matters.
    pub fn create(&self) -> Result<Zygote, ZygoteError> {
        self.create_with(Processes::default())
    }

    /// The same, with the filter that goes with `processes`.
    pub fn create_with(&self, processes: Processes) -> Result<Zygote, ZygoteError> {
        let zygote = self.create_for(match processes {
            Processes::Several => REQUEST_CREATE,
            Processes::One => REQUEST_CREATE_SINGLE,
        })?;
        zygote.verify()?;
        Ok(zygote)
    }

    /// Makes a zygote for a program that is held to a level of the instruction set
    /// ([`thaw_abi::cpu::Baseline::to_flags`]), which may have several processes.
    ///
    /// # Errors
    /// None can be made, as where the host cannot have `cpuid` answered ([`can_mask_cpuid`]).
    ///
    /// [`can_mask_cpuid`]: crate::can_mask_cpuid
    pub fn create_masked(&self) -> Result<Zygote, ZygoteError> {
        let zygote = self.create_for(REQUEST_CREATE_MASKED)?;
        zygote.verify()?;
        Ok(zygote)
    }

    /// Makes a zygote that can become a template, and verifies what it may do.
    pub(super) fn create_for_template(&self) -> Result<Zygote, ZygoteError> {
        let zygote = self.create_for(REQUEST_CREATE_TEMPLATE)?;
        let during = |step| move |source| ZygoteError::Create { step, source };
        // Of sandboxes that had its groups before.
        zygote.process.limits.reset().map_err(during("set its limits"))?;
        verify_template(&zygote.process)?;
        Ok(zygote)
    }

    fn create_for(&self, request: u32) -> Result<Zygote, ZygoteError> {
        let during = |step| move |source| ZygoteError::Create { step, source };
        let (host, sandbox) = message::control_pair().map_err(during("make its socket"))?;
        let (console, write_end) =
            self.config.console.open().map_err(during("make its console"))?;
        let process = self.fork(request, sandbox, write_end)?;
        console.set_pid(process.pid);
        let zygote = Zygote::new(process, host, console);
        zygote.wait_ready(self.config.ready_timeout)?;
        // From here on, nothing that the sandbox does may block its host.
        rustix::io::ioctl_fionbio(&zygote.control, true)
            .map_err(|errno| during("make its socket non-blocking")(errno.into()))?;
        Ok(zygote)
    }

    /// Has the parent fork a process with these descriptors.
    fn fork(
        &self,
        request: u32,
        control: OwnedFd,
        console: OwnedFd,
    ) -> Result<Process, ZygoteError> {
        let during = |step| move |source| ZygoteError::Create { step, source };
        let connected = &self.connected;
        let limit = self.config.max_sandboxes;
        let (answer_to, answer_from) = mpsc::sync_channel(1);
        let exit = Arc::new(ExitCell::default());
        let (id, slot) = {
            let mut registry = connected.registry();
            let id = registry.next_id().ok_or(ZygoteError::ParentDied)?;
            let slot = match request {
                // Its copies have slots of their own.
                REQUEST_CREATE_TEMPLATE => None,
                _ => Some(registry.take_slot().ok_or(ZygoteError::Full { limit })?),
            };
            (id, slot)
        };
        let limits = match connected.groups.create(id) {
            Ok(group) => Arc::new(Limits::new(group)),
            Err(source) => {
                connected.registry().put_slot(slot);
                return Err(ZygoteError::Create { step: "make its control group", source });
            }
        };
        let entrances = limits.group().entrances().map_err(during("open its control group"));
        let result = entrances.and_then(|entrances| {
            let mut descriptors = vec![control.as_fd(), console.as_fd()];
            descriptors.extend(entrances.iter().map(AsFd::as_fd));
            {
                let mut registry = lock(&connected.registry);
                // Noted before it is asked for: the answer may come at once.
                let alive = Alive { slot, exit: exit.clone(), _limits: limits.clone() };
                registry.alive.insert(id, alive);
                registry.requested.insert(id, answer_to);
            }
            let first = slot.unwrap_or(0);
            let request = Request { kind: request, first, count: 0, reserved: 0, id };
            send(&connected.control, &request, &descriptors)
                .map_err(|_| ZygoteError::ParentDied)?;
            match answer_from.recv() {
                Ok(Ok(pidfd)) => Ok(pidfd),
                Ok(Err(failure)) => {
                    Err(ZygoteError::Create { step: failure.step.text(), source: failure.source })
                }
                Err(_) => Err(ZygoteError::ParentDied),
            }
        });
        match result {
            Ok(pidfd) => {
                // A process that could not execute the kernel may be gone by now;
                // what it said before is still to be read. Number 0 has no files
                // in /proc, so nothing else can be mistaken for it.
                let Numbers { pid, own: own_number } =
                    Numbers::of(pidfd.as_fd()).unwrap_or(Numbers { pid: 0, own: None });
                let (parent, affinity) = (connected.clone(), affinity_of(own_number));
                let known_as = KnownAs::Created(id);
                Ok(Process {
                    pid,
                    own_number,
                    pidfd: Arc::new(pidfd),
                    exit,
                    limits,
                    parent,
                    affinity,
                    known_as,
                    slot,
                })
            }
            Err(error) => {
                let mut registry = lock(&connected.registry);
                registry.requested.remove(&id);
                registry.alive.remove(&id);
                registry.put_slot(slot);
                Err(error)
            }
        }
    }

    /// Process id of the zygote parent, as seen by the caller's `/proc`.
    pub fn pid(&self) -> u32 {
        self.connected.pid
    }

    /// Build id of the kernel that its zygotes run.
    pub fn kernel_build_id(&self) -> [u8; 32] {
        self.connected.kernel_build_id
    }

    /// Whether the parent has ended, and all sandboxes with it.
    pub fn has_ended(&self) -> bool {
        lock(&self.connected.registry).gone
    }

    /// Waits until its end is known, but not for ever: whoever is told by a closed socket
    /// may be told before the thread that listens.
    pub(super) fn wait_ended(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        while !self.has_ended() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether each sandbox has a user id of its own, or all share the caller's.
    pub fn user_ids(&self) -> UserIds {
        self.connected.user_ids
    }

    /// Controllers that this host lacks, so that the limits that need them are weak; see
    /// [`limits`].
    pub fn missing_controllers(&self) -> &[Missing] {
        self.connected.groups.missing()
    }
}

/// An error if there are limits that cannot be kept.
pub(crate) fn refuse_weak_limits(missing: &[Missing]) -> Result<(), ZygoteError> {
    if missing.is_empty() {
        return Ok(());
    }
    let (limits, reason) = limits::describe(missing);
    Err(ZygoteError::WeakLimits { limits, reason })
}

impl Connected {
    pub(super) fn registry(&self) -> MutexGuard<'_, Registry> {
        lock(&self.registry)
    }

    /// The user id of the sandbox in a slot, as the parent numbers it.
    pub(super) fn id_of_slot(&self, slot: u32) -> u32 {
        self.user_ids.of_slot(self.first_id, slot)
    }

    pub fn user_ids(&self) -> UserIds {
        self.user_ids
    }

    pub fn kernel_build_id(&self) -> [u8; 32] {
        self.kernel_build_id
    }

    /// The process that reads the memory of these sandboxes, and the user id for it: that
    /// of the parent in their user namespace, or the one that is reserved for the parent
    /// where they have none.
    pub fn state_helper(&self) -> (Arc<StateHelper>, u32) {
        (self.state.clone(), self.first_id)
    }
}

impl Connected {
    /// What puts the next of these sandboxes back into an earlier state.
    pub fn rewinder(&self) -> &Rewinder {
        self.rewinders.next()
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        // The parent thread notices and reaps it. The parent would also end by itself,
        // at the end of its control socket.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        let _ = rustix::net::shutdown(&self.control, rustix::net::Shutdown::Both);
    }
}

/// The thread that spawns the parent and listens to it.
pub(super) struct ParentThread {
    pub control: OwnedFd,
    pub registry: Arc<Mutex<Registry>>,
    /// What ends with the sandboxes.
    pub helpers: (Arc<StateHelper>, Arc<Rewinders>),
    /// Held until the parent has been reaped, and no sandbox has one any more.
    pub ids: Ids,
}

/// Where the ids of the sandboxes come from, and so who starts the parent.
pub(super) enum Ids {
    /// This process has locked them, if it has any.
    Own { _range: Option<IdRange> },
    /// Its monitor has.
    Granted { link: Arc<MonitorLink>, _share: IdShare },
    /// Its monitor has, for sandboxes that were adopted.
    Adopted { _each: Vec<IdShare> },
}

impl Ids {
    /// Takes ids, and says how the parent is to be told.
    fn reserve(
        monitor: Option<Arc<MonitorLink>>,
        config: &ZygoteConfig,
    ) -> io::Result<(Self, Request)> {
        let request = |kind, first, count| Request { kind, first, count, reserved: 0, id: 0 };
        if let Some(link) = monitor {
            let share = link.share_ids(config.max_sandboxes)?;
            let setup = request(REQUEST_SETUP_INSIDE, share.base(), share.slots());
            return Ok((Self::Granted { link, _share: share }, setup));
        }
        let range = IdRange::reserve(config.uid_base, config.max_sandboxes)?;
        let (first, count) = match &range {
            Some(range) => (range.first, range.slots),
            None => (config.uid_base, config.max_sandboxes),
        };
        Ok((Self::Own { _range: range }, request(REQUEST_SETUP, first, count)))
    }

    /// Starts the launcher of the parent, and waits for its end.
    fn start_parent(&self, remote: OwnedFd, kernel: OwnedFd) -> Result<(), ZygoteError> {
        match self {
            Self::Own { .. } => spawn(remote, kernel),
            Self::Adopted { .. } => Ok(()),
            Self::Granted { link, .. } => link
                .start_parent(remote, kernel)
                .map_err(|source| ZygoteError::Parent { step: "have it started", source }),
        }
    }
}

impl ParentThread {
    fn run(
        self,
        remote: OwnedFd,
        kernel: OwnedFd,
        started: SyncSender<Result<Started, ZygoteError>>,
    ) {
        let result = self.ids.start_parent(remote, kernel).and_then(|()| self.await_start());
        let pidfd = match result {
            Ok(parent) => match parent.pidfd.try_clone() {
                Ok(pidfd) => {
                    // The caller waits; if it has given up, the parent ends with the socket.
                    let _ = started.send(Ok(parent));
                    Some(pidfd)
                }
                Err(source) => {
                    let step = "duplicate its descriptor";
                    let _ = started.send(Err(ZygoteError::Parent { step, source }));
                    None
                }
            },
            Err(error) => {
                let _ = started.send(Err(error));
                None
            }
        };
        if pidfd.is_some() {
            self.listen();
        }
        self.parent_ended(pidfd);
    }

    /// The same for a parent that runs already.
    pub fn go_on(self, pidfd: OwnedFd) {
        self.listen();
        self.parent_ended(Some(pidfd));
    }

    fn await_start(&self) -> Result<Started, ZygoteError> {
        let mut parent = None;
        loop {
            let mut descriptors = Vec::new();
            let report = receive::<Report>(&self.control, &mut descriptors)
                .map_err(|source| ZygoteError::Parent { step: "listen to it", source })?
                .ok_or(ZygoteError::Parent {
                    step: "wait for it",
                    source: io::Error::from(io::ErrorKind::UnexpectedEof),
                })?;
            match report.kind {
                REPORT_STARTED => parent = descriptors.pop(),
                REPORT_SERVING => {
                    let pidfd = parent.ok_or(ZygoteError::Parent {
                        step: "get its descriptor",
                        source: io::Error::from(io::ErrorKind::InvalidData),
                    })?;
                    let user_ids = UserIds::from_number(report.value);
                    return Ok(Started {
                        pidfd,
                        user_ids,
                        first_id: report.base,
                        slots: report.id,
                    });
                }
                REPORT_FAILED => {
                    let step = Step::from_number(report.step).text();
                    let source = io::Error::from_raw_os_error(report.value);
                    return Err(ZygoteError::Parent { step, source });
                }
                _ => {}
            }
        }
    }

    /// Distributes reports until the parent ends.
    fn listen(&self) {
        loop {
            let mut descriptors = Vec::new();
            let Ok(Some(report)) = receive::<Report>(&self.control, &mut descriptors) else {
                return;
            };
            let mut registry = lock(&self.registry);
            match report.kind {
                REPORT_CREATED => {
                    if let (Some(answer), Some(pidfd)) =
                        (registry.requested.remove(&report.id), descriptors.pop())
                    {
                        // Nobody waits any more: dropping the pidfd leaves a zygote
                        // whose control socket is closed, so it ends by itself.
                        let _ = answer.send(Ok(pidfd));
                    }
                }
                REPORT_CREATE_FAILED => {
                    if let Some(answer) = registry.requested.remove(&report.id) {
                        let step = Step::from_number(report.step);
                        let source = io::Error::from_raw_os_error(report.value);
                        let _ = answer.send(Err(Failure { step, source }));
                    }
                }
                REPORT_EXITED => {
                    if let Some(alive) = registry.alive.remove(&report.id) {
                        registry.put_slot(alive.slot);
                        drop(registry);
                        alive.exit.fill(report.value);
                    }
                }
                REPORT_COPY_EXITED => {
                    let pid = report.id as u32;
                    let Some(alive) = registry.copies.remove(&pid) else {
                        registry.ended_copies.insert(pid, report.value);
                        continue;
                    };
                    registry.put_slot(alive.slot);
                    drop(registry);
                    alive.exit.fill(report.value);
                }
                _ => {}
            }
        }
    }

    /// Reaps the parent and settles what waits for it.
    fn parent_ended(&self, pidfd: Option<OwnedFd>) {
        if let Some(pidfd) = pidfd {
            // It may only have closed its socket.
            let _ = pidfd_send_signal(&pidfd, Signal::KILL);
            // It is in the same pid namespace; no other may be started there.
            self.helpers.0.stop();
            self.helpers.1.stop();
            // Process 1 of a pid namespace is dead only when all others in it are.
            match self.ids {
                Ids::Own { .. } => {
                    let parent = || waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED);
                    while matches!(parent(), Err(Errno::INTR)) {}
                }
                // The monitor reaps it.
                Ids::Granted { .. } | Ids::Adopted { .. } => {
                    let mut events = [PollFd::new(&pidfd, PollFlags::IN)];
                    while matches!(poll(&mut events, None), Err(Errno::INTR)) {}
                }
            }
        }
        let alive = {
            let mut registry = lock(&self.registry);
            registry.gone = true;
            registry.requested.clear();
            let copies = std::mem::take(&mut registry.copies);
            let alive = std::mem::take(&mut registry.alive);
            alive.into_values().chain(copies.into_values()).collect::<Vec<_>>()
        };
        for alive in alive {
            alive.exit.fill(KILLED);
        }
    }
}

/// Spawns the launcher of the parent and waits for its end; the parent itself
/// is then a child of the calling thread.
fn spawn(remote: OwnedFd, kernel: OwnedFd) -> Result<(), ZygoteError> {
    let during = |step| move |source| ZygoteError::Parent { step, source };
    Command::new("/proc/self/exe")
        .arg(PARENT_ARGUMENT)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(remote))
        .stdout(Stdio::from(kernel))
        .spawn()
        .map_err(during("execute it"))?
        .wait()
        .map_err(during("wait for its launcher"))?;
    // A failure was reported on the socket, or shows as its end.
    Ok(())
}

impl Zygote {
    /// Waits for [`MSG_READY`].
    fn wait_ready(&self, timeout: Duration) -> Result<(), ZygoteError> {
        let deadline = Instant::now() + timeout;
        let not_ready = |reason: String| Err(ZygoteError::NotReady(reason));
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let mut events = [PollFd::new(&self.control, PollFlags::IN)];
            match poll(&mut events, Some(&left)) {
                Ok(0) => return not_ready(format!("no sign of life within {timeout:?}")),
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(errno) => return not_ready(errno.to_string()),
            }
        }
        let mut buffer = [0; 1024];
        let packet = match message::receive(&self.control, &mut buffer, None) {
            Ok(packet) => packet,
            Err(error) => return not_ready(error.to_string()),
        };
        if packet.len == 0 {
            // It may only have closed its socket.
            let _ = self.process.kill();
            let status = self.process.exit.wait();
            if status.signal() == Some(libc::SIGKILL) {
                return Err(ZygoteError::Killed);
            }
            return not_ready(format!("it ended with {status}; see the console"));
        }
        let header = buffer
            .get(..size_of::<MessageHeader>())
            .filter(|_| packet.len >= size_of::<MessageHeader>())
            .map(bytemuck::pod_read_unaligned::<MessageHeader>);
        match header {
            Some(MessageHeader { kind: MSG_READY, len: 0, .. }) => Ok(()),
            Some(MessageHeader { kind: MSG_FAILED, .. }) => {
                let text = buffer[size_of::<MessageHeader>()..packet.len].to_vec();
                not_ready(crate::text::printable(&text))
            }
            _ => not_ready("it sent something else first".to_owned()),
        }
    }

    /// Checks from outside that the process is isolated: seccomp filter in
    /// force, no new privileges, no capabilities, no ids of the host's users.
    pub fn verify(&self) -> Result<(), ZygoteError> {
        verify(&self.process).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_copies_that_nobody_asks_for_are_forgotten() {
        let mut ended = EndedCopies::default();
        for number in 0..100_000 {
            ended.insert(number, number as i32);
        }
        assert_eq!(ended.0.len(), EndedCopies::MAX);
        assert_eq!((ended.remove(0), ended.remove(99_999)), (None, Some(99_999)));
        // A number can be had again.
        ended.insert(7, 1);
        ended.insert(7, 2);
        assert_eq!((ended.remove(7), ended.remove(7)), (Some(2), None));
    }
}
