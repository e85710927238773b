//! Processes of one instance that were started from outside.

mod attached;
mod going_on;
mod streams;

pub use attached::Attached;
pub use going_on::ExecNote;
pub(crate) use going_on::NewStreams;

use super::output::{Output, Reader};
use crate::remote::RemoteChannel;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};
use streams::{Input, Sockets};
use thaw_abi::control::WindowSize;
use thaw_abi::remote::{EXECS_MAX, FILE_SESSIONS_MAX, PORT_CONNECTIONS_MAX};
use thaw_sandbox::{ExecSpec, GuestExit, RemoteEvent, RemoteMessage, SignalTo};
use tokio::sync::{Mutex as AsyncMutex, Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::timeout;

/// Processes that have ended and are still known, of one instance.
const ENDED_MAX: usize = 32;
/// How long a sandbox may take to start a process. One of an older kernel build never does.
const START_PATIENCE: Duration = Duration::from_secs(20);

/// A process that is wanted, as the API takes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ExecRequest {
    /// Arguments, the program first.
    pub argv: Vec<String>,
    /// Environment, each `NAME=value`, added to that of the sandbox.
    pub env: Vec<String>,
    /// Working directory; that of the sandbox if empty.
    pub workdir: String,
    /// User, and perhaps `:` and a group; that of the sandbox if empty.
    pub user: String,
    /// Rows and columns of its terminal, if it has one.
    pub terminal: Option<(u16, u16)>,
    /// Standard input stays open for those who attach; otherwise it is at its end.
    pub stdin: bool,
    /// Its sandbox ends when it has ended or is not started, and when the client goes away that stays
    /// with it from its start. The timeout of the sandbox counts no more.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub ends_sandbox: bool,
}

impl ExecRequest {
    /// Whether a sandbox takes so many arguments and so much environment.
    ///
    /// # Errors
    /// One sentence.
    pub fn check(&self) -> Result<(), String> {
        RemoteMessage::exec(0, &self.spec()).map(drop).map_err(|error| error.to_string())
    }

    fn spec(&self) -> ExecSpec {
        ExecSpec {
            argv: self.argv.clone(),
            env: self.env.clone(),
            workdir: self.workdir.clone(),
            user: self.user.clone(),
            terminal: self.terminal.map(window),
        }
    }
}

fn window((rows, columns): (u16, u16)) -> WindowSize {
    WindowSize { rows, columns, reserved: 0 }
}

/// What has become of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum ExecState {
    /// The sandbox was asked to start it.
    Starting,
    /// It runs.
    Running {
        /// Its process id in the sandbox.
        pid: u32,
    },
    /// It has ended.
    Ended {
        /// Its exit code, unless it was ended by a signal.
        code: Option<u8>,
        /// The signal that has ended it.
        signal: Option<u8>,
    },
    /// It was not started.
    Failed {
        /// One sentence.
        reason: String,
        /// 127 if there is no such program, 126 if it cannot be executed, as shells say it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        code: Option<u8>,
    },
}

impl fmt::Display for ExecState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starting => f.write_str("starting"),
            Self::Running { pid } => write!(f, "running as {pid}"),
            Self::Ended { code: Some(code), .. } => write!(f, "ended with {code}"),
            Self::Ended { signal: Some(signal), .. } => write!(f, "ended by signal {signal}"),
            Self::Ended { .. } => f.write_str("ended"),
            Self::Failed { .. } => f.write_str("not started"),
        }
    }
}

impl ExecState {
    /// Whether nothing more becomes of it.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Ended { .. } | Self::Failed { .. })
    }

    /// Its sandbox has ended, or knows nothing of it.
    fn lost() -> Self {
        Self::Ended { code: None, signal: Some(9) }
    }
}

/// A process, as the API shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ExecInfo {
    /// Its number on this node.
    pub id: u64,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Whether it has a terminal.
    pub terminal: bool,
    /// Its sandbox ends with it.
    #[serde(default)]
    pub ends_sandbox: bool,
    /// What has become of it.
    #[serde(flatten)]
    pub state: ExecState,
    /// Seconds since it was asked for.
    pub age_s: u64,
}

/// A process.
pub struct Exec {
    id: u64,
    argv: Vec<String>,
    has_terminal: bool,
    ends_sandbox: bool,
    began: Instant,
    state: watch::Sender<ExecState>,
    /// Its process id in the sandbox, which is known after it has ended, too.
    pid: OnceLock<u32>,
    /// Where standard input goes; `None`: it is at its end.
    stdin: AsyncMutex<Input>,
    /// What it prints.
    pub output: Arc<Output>,
    /// What reaches its sandbox; `None`: that is asleep.
    channel: Mutex<Option<Arc<dyn RemoteChannel>>>,
    /// How many are attached to it.
    attached: AtomicUsize,
    /// Somebody was, since its instance was asked to rest for its sleep.
    was_attached: AtomicBool,
    /// Its standard input was open when its sandbox fell asleep.
    has_input: AtomicBool,
    /// How often it has got streams.
    streams: watch::Sender<u64>,
    /// Held while some of them are read.
    reading: AsyncMutex<()>,
    /// Its instance has ended before it.
    is_cut_off: AtomicBool,
    /// It was started before the boot that its sandbox is in.
    goes_on: AtomicBool,
}

/// The instance is asleep, or is soon, or has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the instance is being put to sleep; try again")]
pub(crate) struct Shut;

/// Why there is no process: one sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExecProblem {
    /// The request makes no sense.
    #[error("{0}")]
    Wrong(String),
    /// There is no room now.
    #[error("{0}")]
    Full(String),
    /// The sandbox cannot, or has ended.
    #[error("{0}")]
    Refused(String),
    /// There is no such program, or it cannot be executed; the exit code of a shell.
    #[error("{0}")]
    NotRun(String, u8),
}

/// The processes of one instance.
pub struct Execs {
    all: Mutex<Known>,
    /// Places of those who look at its files. Its kernel has no more either.
    files: Arc<Semaphore>,
    /// Places of connections to its ports.
    ports: Arc<Semaphore>,
    /// Its sandbox waits for the next daemon.
    waiting: Notify,
}

impl Default for Execs {
    fn default() -> Self {
        let files = Arc::new(Semaphore::new(FILE_SESSIONS_MAX));
        let ports = Arc::new(Semaphore::new(PORT_CONNECTIONS_MAX));
        Self { all: Mutex::default(), files, ports, waiting: Notify::new() }
    }
}

#[derive(Default)]
struct Known {
    execs: BTreeMap<u64, Arc<Exec>>,
    is_closed: bool,
    /// Its sandbox was told that another daemon follows, and has not said that it waits.
    wait: bool,
    /// All places at files and ports, while nobody may begin anything.
    shut: Option<[OwnedSemaphorePermit; 2]>,
}

impl Execs {
    /// Starts a process, and waits until it runs. Nothing that it prints is dropped as long as the
    /// reader is there.
    ///
    /// # Errors
    /// See [`ExecProblem`].
    pub async fn start(
        &self,
        id: u64,
        request: &ExecRequest,
        channel: Arc<dyn RemoteChannel>,
    ) -> Result<(Attached, Reader), ExecProblem> {
        let message = RemoteMessage::exec(id, &request.spec())
            .map_err(|error| ExecProblem::Wrong(error.to_string()))?;
        let (exec, reader) = self.send(id, request, message, channel)?;
        let mut state = exec.state.subscribe();
        let started = state.wait_for(|state| *state != ExecState::Starting);
        let reached = timeout(START_PATIENCE, started).await;
        match reached {
            Ok(Ok(state)) => match &*state {
                ExecState::Failed { reason, code: Some(code) } => {
                    Err(ExecProblem::NotRun(reason.clone(), *code))
                }
                ExecState::Failed { reason, code: None } => {
                    Err(ExecProblem::Refused(reason.clone()))
                }
                _ if exec.is_cut_off() && exec.pid().is_none() => {
                    Err(ExecProblem::Refused("the instance has ended".to_owned()))
                }
                _ => Ok(()),
            },
            Ok(Err(_)) => Err(ExecProblem::Refused("the instance has ended".to_owned())),
            Err(_) => {
                let reason = format!(
                    "the sandbox did not start it within {} s; if its image was built by an older \
                     version of thaw, build it again",
                    START_PATIENCE.as_secs()
                );
                // Should it be started yet, it ends at once.
                exec.become_(ExecState::Failed { reason: reason.clone(), code: None });
                Err(ExecProblem::Refused(reason))
            }
        }?;
        Ok((exec, reader))
    }

    fn send(
        &self,
        id: u64,
        request: &ExecRequest,
        message: RemoteMessage,
        channel: Arc<dyn RemoteChannel>,
    ) -> Result<(Attached, Reader), ExecProblem> {
        let note = ExecNote {
            id,
            argv: request.argv.clone(),
            terminal: request.terminal.is_some(),
            stdin: request.stdin || request.terminal.is_some(),
            ends_sandbox: request.ends_sandbox,
            pid: None,
        };
        let sockets = Sockets::new(note.terminal, note.stdin);
        let (sockets, stdin) = sockets.map_err(|error| ExecProblem::Refused(error.to_string()))?;
        let exec = Attached::to(Arc::new(Exec::new(id, &note, stdin)));
        exec.reach_by(Some(channel.clone()));
        let reader = exec.output.reader().expect("it is the first one");
        self.insert(&exec)?;
        if let Err(error) = channel.send_remote(message, &sockets.lent()) {
            self.lock().execs.remove(&id);
            return Err(ExecProblem::Refused(format!("the instance takes no message: {error}")));
        }
        exec.collect(sockets.ours);
        Ok((exec, reader))
    }

    fn insert(&self, exec: &Arc<Exec>) -> Result<(), ExecProblem> {
        let mut known = self.lock();
        if known.is_closed || known.shut.is_some() {
            return Err(ExecProblem::Refused("the instance has ended".to_owned()));
        }
        let ended: Vec<u64> = known.ended().collect();
        if known.execs.len() - ended.len() >= EXECS_MAX {
            return Err(ExecProblem::Full(format!(
                "the instance has {EXECS_MAX} processes already that were started from outside; \
                 wait until one has ended, or end one"
            )));
        }
        let spare = (ended.len() + 1).saturating_sub(ENDED_MAX);
        for old in &ended[..spare] {
            known.execs.remove(old);
        }
        known.execs.insert(exec.id, exec.clone());
        Ok(())
    }

    /// A place for one who looks at the instance's files; `None`: all are taken.
    pub fn file_place(&self) -> Option<OwnedSemaphorePermit> {
        self.files.clone().try_acquire_owned().ok()
    }

    /// A place for a connection to a port of the instance; `None`: all are taken.
    pub fn port_place(&self) -> Option<OwnedSemaphorePermit> {
        self.ports.clone().try_acquire_owned().ok()
    }

    /// Whether somebody outside has something of the instance: a process that has not ended, a
    /// session over its files, or a connection to a port of it.
    pub fn in_use(&self) -> bool {
        self.alive() > 0
            || self.files.available_permits() < FILE_SESSIONS_MAX
            || self.ports.available_permits() < PORT_CONNECTIONS_MAX
    }

    /// Whether the instance can sleep: nobody looks at its files or is connected to its ports, and its
    /// processes wait without anybody. What they are told from now on keeps it awake.
    pub fn may_sleep(&self) -> bool {
        let known = self.lock();
        let all = known.execs.values();
        all.for_each(|exec| exec.was_attached.store(false, Ordering::Relaxed));
        self.files.available_permits() == FILE_SESSIONS_MAX
            && self.ports.available_permits() == PORT_CONNECTIONS_MAX
            && known.all_wait_alone()
    }

    /// Lets nobody begin anything from now on, since the instance is about to be asleep; `false` if
    /// somebody outside has something of it since [`Execs::may_sleep`], and all is as before.
    pub fn shut(&self) -> bool {
        let mut known = self.lock();
        let take = |places: &Arc<Semaphore>, all: usize| {
            places.clone().try_acquire_many_owned(all as u32).ok()
        };
        let places =
            take(&self.files, FILE_SESSIONS_MAX).zip(take(&self.ports, PORT_CONNECTIONS_MAX));
        let is_unused = known.all_wait_alone();
        known.shut = places.filter(|_| is_unused).map(|(files, ports)| [files, ports]);
        known.shut.is_some()
    }

    /// The instance stays awake after [`Execs::shut`], or is awake again.
    pub fn reopen(&self) {
        self.lock().shut = None;
    }

    /// Whether nobody may begin anything: the instance is asleep, or is soon.
    pub fn is_shut(&self) -> bool {
        self.lock().shut.is_some()
    }

    /// One of them.
    pub fn find(&self, id: u64) -> Option<Arc<Exec>> {
        self.lock().execs.get(&id).cloned()
    }

    /// Attaches to one of them: its instance does not sleep meanwhile.
    ///
    /// # Errors
    /// It sleeps, or is soon.
    pub(crate) fn attach(&self, id: u64) -> Result<Option<Attached>, Shut> {
        let known = self.lock();
        if known.shut.is_some() || known.is_closed {
            return Err(Shut);
        }
        Ok(known.execs.get(&id).cloned().map(Attached::to))
    }

    /// Attaches to all of them.
    ///
    /// # Errors
    /// The same.
    pub(crate) fn attach_all(&self) -> Result<Vec<Attached>, Shut> {
        let known = self.lock();
        if known.shut.is_some() || known.is_closed {
            return Err(Shut);
        }
        Ok(known.execs.values().cloned().map(Attached::to).collect())
    }

    /// All of them.
    pub fn list(&self) -> Vec<ExecInfo> {
        self.lock().execs.values().map(|exec| exec.info()).collect()
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<Exec>> {
        self.lock().execs.values().cloned().collect()
    }

    /// How many have not ended.
    fn alive(&self) -> usize {
        let known = self.lock();
        known.execs.len() - known.ended().count()
    }

    /// What the sandbox says of one. It may name any.
    pub fn heard(&self, event: RemoteEvent) {
        let (id, state) = match event {
            RemoteEvent::Started { id, pid } => (id, ExecState::Running { pid }),
            RemoteEvent::Ended { id, exit } => {
                let (code, signal) = match exit {
                    GuestExit::Code(code) => (Some(code), None),
                    GuestExit::Signal(signal) => (None, Some(signal)),
                };
                (id, ExecState::Ended { code, signal })
            }
            RemoteEvent::Failed { id, reason, code } => (id, ExecState::Failed { reason, code }),
            RemoteEvent::Waiting => {
                self.lock().wait = false;
                return self.waiting.notify_waiters();
            }
        };
        let Some(exec) = self.find(id) else { return };
        match state {
            ExecState::Running { .. } if exec.state().is_final() => {
                // It was asked for, and whoever wanted it has given up.
                if !exec.goes_on.load(Ordering::Relaxed) {
                    exec.end_unwanted();
                }
            }
            ExecState::Failed { .. } if exec.goes_on.load(Ordering::Relaxed) => {
                self.is_absent(&exec);
            }
            state => exec.become_(state),
        }
    }

    /// The instance is gone, and all of them with it.
    pub fn close(&self) {
        let mut known = self.lock();
        known.is_closed = true;
        self.waiting.notify_waiters();
        known.execs.values().for_each(|exec| exec.lose());
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.all.lock().expect("no holder panics")
    }
}

impl Known {
    fn all_wait_alone(&self) -> bool {
        self.execs.values().all(|exec| exec.state.borrow().is_final() || exec.waits_alone())
    }

    fn ended(&self) -> impl Iterator<Item = u64> {
        let is_final = |exec: &&Arc<Exec>| exec.state.borrow().is_final();
        self.execs.values().filter(is_final).map(|exec| exec.id)
    }
}

impl Exec {
    /// One of which the sandbox is about to be told.
    fn new(id: u64, note: &ExecNote, stdin: Input) -> Self {
        Self {
            id,
            argv: note.argv.clone(),
            has_terminal: note.terminal,
            ends_sandbox: note.ends_sandbox,
            began: Instant::now(),
            state: watch::channel(ExecState::Starting).0,
            pid: OnceLock::new(),
            stdin: AsyncMutex::new(stdin),
            output: Output::new(),
            channel: Mutex::default(),
            attached: AtomicUsize::new(0),
            was_attached: AtomicBool::new(false),
            has_input: AtomicBool::new(false),
            streams: watch::channel(0).0,
            reading: AsyncMutex::default(),
            is_cut_off: AtomicBool::new(false),
            goes_on: AtomicBool::new(false),
        }
    }

    /// As the API shows it.
    pub fn info(&self) -> ExecInfo {
        ExecInfo {
            id: self.id,
            argv: self.argv.clone(),
            terminal: self.has_terminal,
            ends_sandbox: self.ends_sandbox,
            state: self.state.borrow().clone(),
            age_s: self.began.elapsed().as_secs(),
        }
    }

    /// Its number.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Whether its sandbox ends with it.
    pub fn ends_sandbox(&self) -> bool {
        self.ends_sandbox
    }

    /// What has become of it.
    pub fn state(&self) -> ExecState {
        self.state.borrow().clone()
    }

    /// Its process id in the sandbox, if it has run.
    pub fn pid(&self) -> Option<u32> {
        self.pid.get().copied()
    }

    /// Its sandbox has ended, or nothing is known of it there any more. Nobody knows how it ended.
    fn lose(&self) {
        // Whoever learns of the end finds this, too.
        self.is_cut_off.fetch_or(!self.state().is_final(), Ordering::Release);
        self.become_(ExecState::lost());
        if *self.streams.borrow() == 0 {
            // Nobody reads what it prints.
            self.output.end();
        }
    }

    /// Nothing leads out of the last state: a sandbox may say what it likes.
    fn become_(&self, state: ExecState) {
        if let ExecState::Running { pid } = state {
            // Nobody has another one.
            let _ = self.pid.set(pid);
        }
        self.state.send_if_modified(|known| {
            let changes = !known.is_final();
            if changes {
                *known = state;
            }
            changes
        });
    }

    fn reach_by(&self, channel: Option<Arc<dyn RemoteChannel>>) {
        *self.channel.lock().expect("no holder panics") = channel;
    }

    fn send(&self, message: RemoteMessage) -> Result<(), String> {
        let channel = self.channel.lock().expect("no holder panics").clone();
        let channel = channel.ok_or_else(|| Shut.to_string())?;
        channel.send_remote(message, &[]).map_err(|error| error.to_string())
    }

    /// Whether it has ended with its instance, so that nobody knows how.
    pub fn is_cut_off(&self) -> bool {
        self.is_cut_off.load(Ordering::Acquire)
    }

    /// Waits until it has ended; how.
    pub async fn ended(&self) -> ExecState {
        let mut state = self.state.subscribe();
        match state.wait_for(ExecState::is_final).await {
            Ok(state) => state.clone(),
            Err(_) => self.state(),
        }
    }

    /// Whether it waits for nobody: its sandbox has read all that was written to it, and nobody is
    /// attached to it.
    fn waits_alone(&self) -> bool {
        let is_read = match self.stdin.try_lock() {
            Ok(stdin) => stdin.is_read(),
            // Somebody writes.
            Err(_) => false,
        };
        is_read
            && matches!(*self.state.borrow(), ExecState::Running { .. })
            && self.attached.load(Ordering::Relaxed) == 0
            && !self.was_attached.load(Ordering::Relaxed)
    }

    /// It has been started although whoever wanted it has given up.
    fn end_unwanted(&self) {
        const SIGKILL: u32 = 9;
        // One whose instance has ended needs none.
        let _ = self.send(RemoteMessage::signal(self.id, SIGKILL, SignalTo::Group));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_have_a_bound_that_is_named() {
        let of = |count| ExecRequest { argv: vec!["x".repeat(1000); count], ..Default::default() };
        assert_eq!(of(100).check(), Ok(()));
        let why = of(1000).check().unwrap_err();
        assert!(why.contains("at most") && why.contains("write them to a file"), "{why}");
    }
}
