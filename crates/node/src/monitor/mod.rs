//! The monitor: the privileged side of `thaw serve`.
//!
//! When root starts a daemon, this process stays root and does no more than
//! [`thaw_sandbox::monitor`] says. It keeps the listeners, starts the daemon as a process
//! of another user in a root directory with little in it ([`jail`]), passes signals on to
//! it, and starts it again if it crashes. Clients that connect meanwhile wait.
//!
//! When another user starts a daemon, it is the same, but that both have the caller's user
//! id: the daemon has user and pid namespaces of its own.

mod filter;
mod jail;
mod user;

pub use jail::{Inherited, become_daemon};
pub use user::{DaemonUser, UserKind, give_home, like_parent, linked_directories};

use crate::daemon::{Prepared, ServeError, ServeOptions, raise_file_limit};
use crate::home::Home;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, wait};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use thaw_sandbox::monitor::{self, Grant, Monitor, NoNamespaces};

/// The argument with which a monitor starts a daemon.
pub const MONITORED: &str = "--monitored";
/// How the names of the variables begin that the daemon inherits: its own, and those of
/// what it is made with.
const ENVIRONMENT: [&str; 4] = ["THAW_", "RUST_", "TOKIO_", "TZ"];
/// Pauses before a daemon that has crashed is started again: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// A daemon that has lived so long has not crashed because of how it was started.
const LONG_LIFE: Duration = Duration::from_secs(60);
/// After so many crashes in a row, each in a shorter life, the monitor gives up.
const CRASHES_MAX: u32 = 5;
/// How long the sandboxes of a daemon that has ended may take to be gone.
const SANDBOXES_PATIENCE: Duration = Duration::from_secs(10);

/// The text with which a daemon starts. Its descriptors are those of [`Prepared`].
#[derive(Debug, Serialize, Deserialize)]
struct Start {
    grant: Grant,
    user: DaemonUser,
    home: Home,
    /// Other directories that it may write to: those to which parts of the home are links.
    writable: Vec<PathBuf>,
    token: Option<String>,
}

/// Serves `home` with a daemon of this user. Returns the code to exit with, or `None` if this
/// host does not allow privileges to be separated: nothing has been done then.
///
/// # Errors
/// The daemon cannot be started.
pub fn run(
    home: &Home,
    options: &ServeOptions,
    user: DaemonUser,
) -> Result<Option<u8>, ServeError> {
    let signals = Signals::block()?;
    let monitor = match user.kind {
        UserKind::Other => Monitor::new(user.ids, options.weak_limits)?,
        UserKind::Caller => {
            let made = Monitor::of_caller(user.ids, options.weak_limits)?;
            made.inspect_err(warn_of_one_process).ok()
        }
    };
    let Some(monitor) = monitor else {
        // This process serves itself, and must hear when it is to end.
        monitor::unblock_signals();
        return Ok(None);
    };
    raise_file_limit();
    let mut writable = linked_directories(home, user)?;
    let mut prepared;
    match user.kind {
        UserKind::Other => {
            give_home(home, user.ids)?;
            prepared = Prepared::make(home, options)?;
        }
        UserKind::Caller => {
            // Of the control groups of the caller, those of its sandboxes and no others.
            writable.extend(monitor.grant().group_directories().map(Path::to_owned));
            prepared = Prepared::make(home, options)?;
            prepared.listen_locally(home)?;
        }
    }
    let mut watch = Watch { monitor, signals, home, writable, prepared, user, stopping: false };
    let (mut pause, mut crashes) = (PAUSES.0, 0);
    loop {
        let started = Instant::now();
        let status = watch.one_life()?;
        if let Some(code) = status.exit_status() {
            return Ok(Some(u8::try_from(code).unwrap_or(1)));
        }
        if watch.stopping {
            return Ok(Some(1));
        }
        if started.elapsed() > LONG_LIFE {
            (pause, crashes) = (PAUSES.0, 0);
        }
        let signal = status.terminating_signal().unwrap_or_default();
        // Somebody has killed it, or the host was out of memory: it is not its fault.
        crashes += u32::from(signal != libc::SIGKILL);
        if crashes == CRASHES_MAX {
            tracing::error!("the daemon has crashed {crashes} times in a row");
            return Ok(Some(1));
        }
        tracing::error!("the daemon was ended by signal {signal}; starting it again");
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSES.1);
    }
}

fn warn_of_one_process(reason: &NoNamespaces) {
    tracing::warn!(
        "this host does not let this user make namespaces for the daemon ({reason}), which keeps \
         all of the user's rights; `thaw doctor` says what the host lacks"
    );
}

/// A monitor at work.
struct Watch<'a> {
    monitor: Monitor,
    signals: Signals,
    home: &'a Home,
    writable: Vec<PathBuf>,
    prepared: Prepared,
    user: DaemonUser,
    /// Somebody has asked for the end.
    stopping: bool,
}

impl Watch<'_> {
    /// Starts a daemon, serves it until it ends, and removes what was made for it.
    fn one_life(&mut self) -> Result<WaitStatus, ServeError> {
        let (socket, remote) = monitor::socket_pair()?;
        // A daemon that does not read its answers is not waited for.
        rustix::io::ioctl_fionbio(&socket, true).map_err(io::Error::from)?;
        let daemon = self.monitor.spawn_daemon(|| Ok(command(remote.try_clone()?)))?;
        drop(remote);
        let start = Start {
            grant: self.monitor.grant(),
            user: self.user,
            home: self.home.clone(),
            writable: self.writable.clone(),
            token: self.prepared.token().map(str::to_owned),
        };
        let text = serde_json::to_vec(&start).expect("plain data");
        match monitor::send_start(&socket, &text, &self.prepared.descriptors()) {
            // It has ended already; its status says how.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            result => result?,
        }
        let status = self.serve(socket, daemon)?;
        self.await_sandboxes();
        self.monitor.forget_daemon();
        Ok(status)
    }

    /// Serves the daemon's requests and passes signals on, until it ends.
    fn serve(&mut self, socket: OwnedFd, daemon: Pid) -> io::Result<WaitStatus> {
        let mut socket = Some(socket);
        loop {
            let (asked, signalled) = {
                let mut events = vec![PollFd::new(&self.signals.0, PollFlags::IN)];
                events.extend(socket.iter().map(|socket| PollFd::new(socket, PollFlags::IN)));
                match poll(&mut events, None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
                let ready = |event: &PollFd<'_>| !event.revents().is_empty();
                (events.get(1).is_some_and(ready), ready(&events[0]))
            };
            if signalled {
                self.pass_on_signals(daemon);
                if let Some(status) = reap(daemon) {
                    return Ok(status);
                }
            }
            if asked
                && let Some(open) = &socket
                && !self.monitor.serve(open)
            {
                // It has ended, in which case this changes nothing. Or it sends nonsense, or
                // does not read: nobody knows whose it is now.
                let _ = kill_process(daemon, Signal::KILL);
                socket = None;
            }
        }
    }

    fn pass_on_signals(&mut self, daemon: Pid) {
        for signal in self.signals.take() {
            let passed_on = match signal {
                Signal::TERM | Signal::INT => {
                    self.stopping = true;
                    Signal::TERM
                }
                Signal::HUP => Signal::HUP,
                _ => continue,
            };
            // It is our child and has not been reaped.
            let _ = kill_process(daemon, passed_on);
        }
    }

    /// Waits for the zygote parents, which end with the daemon's sockets, and all
    /// sandboxes with them.
    fn await_sandboxes(&mut self) {
        let deadline = Instant::now() + SANDBOXES_PATIENCE;
        loop {
            match wait(WaitOptions::NOHANG) {
                Err(Errno::CHILD) => return,
                Ok(Some(_)) => continue,
                Ok(None) if !self.monitor.has_children() => return,
                Ok(None) | Err(_) => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!("some sandboxes of the daemon that has ended are still there");
                return;
            }
            let left =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let mut events = [PollFd::new(&self.signals.0, PollFlags::IN)];
            let _ = poll(&mut events, Some(&left));
            let ends = [Signal::TERM, Signal::INT];
            self.stopping |= self.signals.take().any(|signal| ends.contains(&signal));
        }
    }
}

/// Reaps all children that have ended; the status of the daemon, if it is among them.
fn reap(daemon: Pid) -> Option<WaitStatus> {
    let mut status = None;
    while let Ok(Some((pid, ended))) = wait(WaitOptions::NOHANG) {
        if pid == daemon {
            status = Some(ended);
        }
    }
    status
}

/// The daemon's command: this executable with the same arguments and one more, and the
/// socket as its standard input. Of the environment it gets what is meant for it; the rest
/// may be secrets.
fn command(socket: OwnedFd) -> Command {
    let mut daemon = Command::new("/proc/self/exe");
    let mut arguments = std::env::args_os();
    if let Some(name) = arguments.next() {
        daemon.arg0(name);
    }
    let is_for_daemon = |name: &OsString| {
        let name = name.as_encoded_bytes();
        ENVIRONMENT.iter().any(|prefix| name.starts_with(prefix.as_bytes()))
    };
    daemon
        .args(arguments)
        .arg(MONITORED)
        .stdin(Stdio::from(socket))
        .env_clear()
        .envs(std::env::vars_os().filter(|(name, _)| is_for_daemon(name)));
    daemon
}

/// The signals that a monitor reads instead of being interrupted by them.
struct Signals(OwnedFd);

impl Signals {
    fn block() -> io::Result<Self> {
        let signals = [libc::SIGCHLD, libc::SIGTERM, libc::SIGINT, libc::SIGHUP];
        Ok(Self(monitor::signal_descriptor(&signals)?))
    }

    /// Those that have come.
    fn take(&self) -> impl Iterator<Item = Signal> + use<'_> {
        std::iter::from_fn(|| {
            let mut information = [0; size_of::<libc::signalfd_siginfo>()];
            let read = rustix::io::read(self.0.as_fd(), &mut information).ok()?;
            let number = i32::from_ne_bytes(*information.first_chunk()?);
            (read == information.len()).then(|| Signal::from_named_raw(number)).flatten()
        })
    }
}
