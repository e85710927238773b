//! Processes of one instance that were started from outside.

mod going_on;

pub use going_on::ExecNote;

use super::output::{Output, Reader, Stream};
use crate::instance::Connector;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};
use thaw_abi::control::WindowSize;
use thaw_abi::remote::{EXECS_MAX, FILE_SESSIONS_MAX, PORT_CONNECTIONS_MAX};
use thaw_sandbox::{ExecSpec, GuestExit, RemoteEvent, RemoteMessage, SignalTo};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{Mutex as AsyncMutex, OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::timeout;

/// Processes that have ended and are still known, of one instance.
const ENDED_MAX: usize = 32;
/// How long a sandbox may take to start a process. One of an older kernel build never does.
const START_PATIENCE: Duration = Duration::from_secs(20);
/// How long output is waited for when a process has ended and others have its streams still.
const LAST_OUTPUT: Duration = Duration::from_millis(100);
/// How long, and for how many bytes, its streams are read in all once it has ended: what it has printed
/// itself lies in the buffers of two sockets.
const LAST_PATIENCE: Duration = Duration::from_secs(5);
const LAST_BYTES: usize = 4 << 20;
/// How long a terminal's hang-up waits for those who type.
const HANG_UP_PATIENCE: Duration = Duration::from_secs(5);
/// SIGHUP (signal(7)).
const HANGUP: u32 = 1;
/// Bytes read at a time.
const CHUNK: usize = 16 << 10;

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
pub(crate) struct Exec {
    id: u64,
    argv: Vec<String>,
    has_terminal: bool,
    ends_sandbox: bool,
    began: Instant,
    state: watch::Sender<ExecState>,
    /// Its process id in the sandbox, which is known after it has ended, too.
    pid: OnceLock<u32>,
    /// Where standard input goes; `None`: it is at its end.
    stdin: AsyncMutex<Option<OwnedWriteHalf>>,
    /// What it prints.
    pub output: Arc<Output>,
    connector: Arc<dyn Connector>,
    /// Its instance has ended before it.
    is_cut_off: AtomicBool,
    /// It was started in the sandbox that this one is a copy of.
    goes_on: AtomicBool,
}

/// Why there is no process: one sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ExecProblem {
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
pub(crate) struct Execs {
    all: Mutex<Known>,
    /// Places of those who look at its files. Its kernel has no more either.
    files: Arc<Semaphore>,
    /// Places of connections to its ports.
    ports: Arc<Semaphore>,
}

impl Default for Execs {
    fn default() -> Self {
        let files = Arc::new(Semaphore::new(FILE_SESSIONS_MAX));
        let ports = Arc::new(Semaphore::new(PORT_CONNECTIONS_MAX));
        Self { all: Mutex::default(), files, ports }
    }
}

#[derive(Default)]
struct Known {
    execs: BTreeMap<u64, Arc<Exec>>,
    is_closed: bool,
    /// All places at files and ports, while nobody may begin anything.
    shut: Option<[OwnedSemaphorePermit; 2]>,
}

/// The sockets of a process: this daemon's, from which it reads, and the sandbox'.
struct Sockets {
    ours: Vec<(Stream, Box<dyn AsyncRead + Send + Unpin>)>,
    theirs: Vec<OwnedFd>,
}

impl Sockets {
    /// Those of one with a terminal, or with three streams; and where its standard input goes, if it is
    /// open.
    fn new(has_terminal: bool, stdin: bool) -> io::Result<(Self, Option<OwnedWriteHalf>)> {
        let (input, their_input) = pair()?;
        let (from_terminal, to_stdin) = input.into_split();
        let mut sockets = Self { ours: Vec::new(), theirs: vec![their_input] };
        if has_terminal {
            sockets.ours.push((Stream::Stdout, Box::new(from_terminal)));
        } else {
            for stream in [Stream::Stdout, Stream::Stderr] {
                let (reader, writer) = pair()?;
                sockets.ours.push((stream, Box::new(reader)));
                sockets.theirs.push(writer);
            }
        }
        Ok((sockets, (has_terminal || stdin).then_some(to_stdin)))
    }

    fn lent(&self) -> Vec<BorrowedFd<'_>> {
        self.theirs.iter().map(AsFd::as_fd).collect()
    }
}

/// Two connected, non-blocking sockets: this daemon's, and the sandbox's.
fn pair() -> io::Result<(UnixStream, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok((UnixStream::from_std(StdUnixStream::from(ours))?, theirs))
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
        connector: Arc<dyn Connector>,
    ) -> Result<(Arc<Exec>, Reader), ExecProblem> {
        let message = RemoteMessage::exec(id, &request.spec())
            .map_err(|error| ExecProblem::Wrong(error.to_string()))?;
        let (exec, reader) = self.send(id, request, message, connector)?;
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
        connector: Arc<dyn Connector>,
    ) -> Result<(Arc<Exec>, Reader), ExecProblem> {
        let note = ExecNote {
            id,
            argv: request.argv.clone(),
            terminal: request.terminal.is_some(),
            stdin: request.stdin,
            ends_sandbox: request.ends_sandbox,
        };
        let sockets = Sockets::new(note.terminal, note.stdin);
        let (sockets, stdin) = sockets.map_err(|error| ExecProblem::Refused(error.to_string()))?;
        let exec = Arc::new(Exec::new(id, &note, stdin, connector.clone()));
        let reader = exec.output.reader().expect("it is the first one");
        self.insert(&exec)?;
        if let Err(error) = connector.send_remote(message, &sockets.lent()) {
            self.lock().execs.remove(&id);
            return Err(ExecProblem::Refused(format!("the instance takes no message: {error}")));
        }
        tokio::spawn(exec.clone().collect(sockets.ours));
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

    /// Lets nobody begin anything from now on, since the instance is about to be asleep; `false` if
    /// somebody outside has something of it, and all is as before.
    pub fn shut(&self) -> bool {
        let mut known = self.lock();
        let take = |places: &Arc<Semaphore>, all: usize| {
            places.clone().try_acquire_many_owned(all as u32).ok()
        };
        let places =
            take(&self.files, FILE_SESSIONS_MAX).zip(take(&self.ports, PORT_CONNECTIONS_MAX));
        let is_unused = known.execs.len() == known.ended().count();
        known.shut = places.filter(|_| is_unused).map(|(files, ports)| [files, ports]);
        known.shut.is_some()
    }

    /// The instance stays awake after [`Execs::shut`].
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

    /// All of them.
    pub fn list(&self) -> Vec<ExecInfo> {
        self.lock().execs.values().map(|exec| exec.info()).collect()
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
        };
        let Some(exec) = self.find(id) else { return };
        match state {
            ExecState::Running { .. } if exec.state().is_final() => exec.end_unwanted(),
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
        for exec in known.execs.values() {
            // Whoever learns of the end finds this, too.
            exec.is_cut_off.fetch_or(!exec.state().is_final(), Ordering::Release);
            exec.become_(ExecState::lost());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.all.lock().expect("no holder panics")
    }
}

impl Known {
    fn ended(&self) -> impl Iterator<Item = u64> {
        let is_final = |exec: &&Arc<Exec>| exec.state.borrow().is_final();
        self.execs.values().filter(is_final).map(|exec| exec.id)
    }
}

impl Exec {
    /// One of which the sandbox is about to be told.
    fn new(
        id: u64,
        note: &ExecNote,
        stdin: Option<OwnedWriteHalf>,
        connector: Arc<dyn Connector>,
    ) -> Self {
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
            connector,
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

    /// Keeps what it prints, until nobody has its streams any more, or it has ended and nothing
    /// more comes for a moment.
    async fn collect(self: Arc<Self>, streams: Vec<(Stream, Box<dyn AsyncRead + Send + Unpin>)>) {
        let readers = streams.into_iter().map(|(stream, reader)| {
            let exec = self.clone();
            tokio::spawn(async move { exec.read_to_end(stream, reader).await })
        });
        for reader in readers.collect::<Vec<_>>() {
            // They do not panic.
            let _ = reader.await;
        }
        // Whoever reads to the end wants to know how it ended.
        let _ = self.ended().await;
        *self.stdin.lock().await = None;
        self.output.end();
    }

    async fn read_to_end(&self, stream: Stream, mut reader: Box<dyn AsyncRead + Send + Unpin>) {
        let mut buffer = vec![0; CHUNK];
        let (mut patience, mut room) = (LAST_PATIENCE, LAST_BYTES);
        loop {
            let (began, has_ended) = (Instant::now(), self.state().is_final());
            let read = tokio::select! {
                biased;
                read = reader.read(&mut buffer) => read,
                () = self.is_over(LAST_OUTPUT.min(patience)) => return,
            };
            let Ok(count @ 1..) = read else { return };
            if has_ended {
                // Whoever else holds its streams may go on printing for ever.
                patience = patience.saturating_sub(began.elapsed());
                room = room.saturating_sub(count);
            }
            self.output.put(stream, &buffer[..count]).await;
            if patience.is_zero() || room == 0 {
                return;
            }
        }
    }

    /// Waits until it has ended, and a moment more.
    async fn is_over(&self, moment: Duration) {
        let _ = self.ended().await;
        tokio::time::sleep(moment).await;
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

    /// Passes bytes to its standard input, or its terminal; nothing closes standard input. What
    /// comes after that is dropped, as is what it does not read once it has ended.
    pub async fn write(&self, bytes: &[u8]) {
        let mut stdin = self.stdin.lock().await;
        let Some(open) = stdin.as_mut() else { return };
        let is_closed = match bytes.is_empty() {
            // A terminal has no end of its own: a program sees the character for it.
            true => !self.has_terminal,
            false => tokio::select! {
                written = open.write_all(bytes) => written.is_err(),
                _ = self.ended() => true,
            },
        };
        if is_closed {
            *stdin = None;
        }
    }

    /// Hangs up its terminal, as the end of a connection does with a real one: its session hears
    /// SIGHUP, and whoever reads the terminal gets its end. A signal alone would be lost on a
    /// program that waits for a line already.
    pub async fn hang_up(&self) {
        let close = async { *self.stdin.lock().await = None };
        tokio::select! {
            () = close => {}
            _ = self.ended() => {}
            // Somebody else types what it does not read.
            () = tokio::time::sleep(HANG_UP_PATIENCE) => drop(self.signal(HANGUP, SignalTo::Group)),
        }
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// One sentence.
    pub fn signal(&self, number: u32, to: SignalTo) -> Result<(), String> {
        if !(1..=64).contains(&number) {
            return Err(format!("{number} is no signal; give 1 to 64"));
        }
        let message = RemoteMessage::signal(self.id, number, to);
        self.connector.send_remote(message, &[]).map_err(|error| error.to_string())
    }

    /// It has been started although whoever wanted it has given up.
    fn end_unwanted(&self) {
        const SIGKILL: u32 = 9;
        // One whose instance has ended needs none.
        let _ = self.signal(SIGKILL, SignalTo::Group);
    }

    /// Its terminal has another size.
    pub fn resize(&self, size: (u16, u16)) {
        // One that has ended needs none.
        let _ = self.connector.send_remote(RemoteMessage::window(self.id, window(size)), &[]);
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
