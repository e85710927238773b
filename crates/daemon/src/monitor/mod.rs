//! The monitor: the privileged side of `thaw serve`.
//!
//! When root starts a daemon, this process stays root and does no more than
//! [`thaw_sandbox::monitor`] says. It keeps the listeners, starts the daemon as a process
//! of another user in a root directory with little in it ([`jail`]), passes signals on to
//! it, and starts it again if it crashes. Clients that connect meanwhile wait. One that is started
//! apart from its daemon executes a later program in its own place when it is told to ([`again`]).
//!
//! When another user starts a daemon, it is the same, but that both have the caller's user
//! id: the daemon has user and pid namespaces of its own.

mod again;
mod filter;
mod jail;
mod rendezvous;

pub use again::{TakeOverError, can_take_over};
pub(crate) use jail::{FetcherStart, become_fetcher, confine_memory};
pub use jail::{Inherited, become_daemon};
pub use rendezvous::{RendezvousError, connect_daemon, resume_at, run_at};
use thaw_home::user::{DaemonUser, UserKind, give_home, linked_directories};

use crate::activation;
use crate::admin::RemoteAccess;
use crate::daemon::{ListenOptions, Prepared, ServeError, raise_file_limit};
use crate::notification;
use rendezvous::{Apart, Nobody};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, wait};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use thaw_home::home::Home;
use thaw_sandbox::WeakLimits;
use thaw_sandbox::monitor::{self, FetcherCommand, Grant, Monitor, NoNamespaces};

/// The argument with which a monitor starts a daemon.
pub const MONITORED: &str = "--monitored";
/// How the names of the variables begin that the daemon inherits: its own, and those of
/// what it is made with.
const ENVIRONMENT: [&str; 6] = ["THAW_", "RUST_", "TOKIO_", "TZ", "OTEL_", "SSL_CERT_"];
/// Pauses before a daemon that has crashed is started again: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// A daemon that has lived so long has not crashed because of how it was started.
const LONG_LIFE: Duration = Duration::from_secs(60);
/// After so many crashes in a row, each in a shorter life, the monitor gives up.
const CRASHES_MAX: u32 = 5;
/// From so many on, its instances are not taken over: it may be because of one of them.
const CRASHES_WITH_INSTANCES: u32 = 2;
/// The same for deaths of any kind: the host may be out of memory because of one of them.
const DEATHS_WITH_INSTANCES: u32 = 10;
/// How long the sandboxes of a daemon that has ended may take to be gone.
const SANDBOXES_PATIENCE: Duration = Duration::from_secs(10);

/// The text with which a daemon starts. Its descriptors are those of [`Prepared`].
#[derive(Debug, Serialize, Deserialize)]
struct Start {
    /// [`monitor::VERSION`] of the monitor.
    version: u32,
    grant: Grant,
    user: DaemonUser,
    home: Home,
    /// Directories elsewhere to which parts of the home are links.
    linked: Vec<PathBuf>,
    /// What clients of the admin API over TCP must show, if there is one.
    access: Option<RemoteAccess>,
    /// The same of the dashboard.
    dashboard: Option<RemoteAccess>,
    /// How many of the descriptors are sockets of the service manager, the last ones.
    activated: usize,
}

impl Start {
    /// What came with it.
    fn inherit(&mut self, descriptors: Vec<OwnedFd>) -> io::Result<Prepared> {
        let (access, dashboard) = (self.access.take(), self.dashboard.take());
        Prepared::inherited(&self.home, descriptors, self.activated, access, dashboard)
    }
}

/// The part of [`Start`] that every version has.
#[derive(Debug, Deserialize)]
struct Version {
    #[serde(default)]
    version: u32,
}

/// Serves `home` with a daemon of this user. Returns the code to exit with, or `None` if this
/// host does not allow privileges to be separated: nothing has been done then.
///
/// # Errors
/// The daemon cannot be started.
pub fn run(
    home: &Home,
    listening: &ListenOptions,
    weak_limits: WeakLimits,
    user: DaemonUser,
) -> Result<Option<u8>, ServeError> {
    let Some(mut watch) = Watch::make(home, listening, weak_limits, user)? else {
        return Ok(None);
    };
    let (mut pause, mut crashes, mut deaths) = (PAUSES.0, 0, 0);
    loop {
        let started = Instant::now();
        let has_inherited = watch.monitor.kept() > 0;
        let status = watch.one_life()?;
        if let Some(code) = status.exit_status() {
            if code != 0 && has_inherited && !watch.stopping {
                // It may be what it was to take over, which has ended now.
                tracing::error!(
                    "the daemon could not go on with what was left to it; starting one with nothing"
                );
                continue;
            }
            return Ok(Some(u8::try_from(code).unwrap_or(1)));
        }
        if watch.stopping {
            return Ok(Some(1));
        }
        if started.elapsed() > LONG_LIFE {
            (pause, crashes, deaths) = (PAUSES.0, 0, 0);
        }
        let signal = status.terminating_signal().unwrap_or_default();
        // Somebody has killed it, or the host was out of memory: it is not its fault.
        let has_crashed = signal != libc::SIGKILL;
        crashes += u32::from(has_crashed);
        deaths += 1;
        if crashes == CRASHES_MAX {
            tracing::error!("the daemon has crashed {crashes} times in a row");
            return Ok(Some(1));
        }
        tracing::error!("the daemon was ended by signal {signal}; starting it again");
        notification::status(&format!(
            "Starting the daemon again, which signal {signal} has ended"
        ));
        if has_crashed && crashes >= CRASHES_WITH_INSTANCES || deaths >= DEATHS_WITH_INSTANCES {
            watch.end_instances("it may have ended because of one of them");
        }
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
struct Watch {
    monitor: Monitor,
    signals: Signals,
    home: Home,
    linked: Vec<PathBuf>,
    prepared: Prepared,
    user: DaemonUser,
    /// Somebody has asked for the end.
    stopping: bool,
    /// Somebody has asked for another program in the place of this one.
    wants_another: bool,
    /// How the last daemon has ended.
    last: Option<Parting>,
    /// What it has besides if somebody else starts its daemons.
    apart: Option<Apart>,
}

/// How a daemon has ended, as far as its monitor knows.
#[derive(Clone, Copy, Debug)]
struct Parting {
    at: Instant,
    /// It has said that it ends in order, and leaves what it had to the next.
    in_order: bool,
}

/// The daemon that is served just now: its connection, if it has one still, and its process.
#[derive(Clone, Copy, Debug)]
struct Present<'a> {
    connection: Option<BorrowedFd<'a>>,
    process: BorrowedFd<'a>,
}

/// The process of a daemon, as its monitor knows it.
trait DaemonProcess {
    /// How it has ended.
    type End;

    /// The signal that ends it, and all that it has.
    const END: Signal;

    /// Sends it a signal.
    fn signal(&self, signal: Signal);

    /// Whether it has ended, and how. Reaps all children of this process that have ended.
    fn ended(&self) -> Option<Self::End>;

    /// Whether it has ended by itself, and not by a signal, as far as is known.
    fn has_exited(_end: &Self::End) -> bool {
        false
    }

    /// A descriptor that becomes readable when it ends, if no `SIGCHLD` says so.
    fn watched(&self) -> Option<BorrowedFd<'_>>;
}

/// A daemon that the monitor has started.
struct Child(Pid);

impl DaemonProcess for Child {
    type End = WaitStatus;
    const END: Signal = Signal::TERM;

    fn signal(&self, signal: Signal) {
        // It has not been reaped.
        let _ = kill_process(self.0, signal);
    }

    fn ended(&self) -> Option<WaitStatus> {
        reap().into_iter().find_map(|(pid, status)| (pid == self.0).then_some(status))
    }

    fn has_exited(end: &WaitStatus) -> bool {
        end.exit_status().is_some()
    }

    fn watched(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Watch {
    /// Makes what all daemons of `user` need; `None` if this host does not allow privileges
    /// to be separated: nothing has been done then.
    fn make(
        home: &Home,
        listening: &ListenOptions,
        weak_limits: WeakLimits,
        user: DaemonUser,
    ) -> Result<Option<Self>, ServeError> {
        // From here on none that comes ends this process.
        Signals::block()?;
        let monitor = match user.kind {
            UserKind::Other => Monitor::new(user.ids, weak_limits)?,
            UserKind::Caller => {
                Monitor::of_caller(user.ids, weak_limits)?.inspect_err(warn_of_one_process).ok()
            }
        };
        let Some(mut monitor) = monitor else {
            // This process serves itself, and must hear when it is to end.
            monitor::unblock_signals();
            return Ok(None);
        };
        if user.kind == UserKind::Other {
            give_home(home, user.ids)?;
        }
        let linked = linked_directories(home, user)?;
        monitor.fetch_with(fetchers(home, &linked, user));
        let mut prepared = Prepared::make(home, listening)?;
        if user.kind == UserKind::Caller {
            prepared.listen_locally(home)?;
        }
        Ok(Some(Self::with(monitor, home.clone(), linked, prepared, user)?))
    }

    fn with(
        monitor: Monitor,
        home: Home,
        linked: Vec<PathBuf>,
        prepared: Prepared,
        user: DaemonUser,
    ) -> io::Result<Self> {
        raise_file_limit();
        Ok(Self {
            monitor,
            signals: Signals::block()?,
            home,
            linked,
            prepared,
            user,
            stopping: false,
            wants_another: false,
            last: None,
            apart: None,
        })
    }

    /// Starts a daemon and serves it until it ends.
    fn one_life(&mut self) -> Result<WaitStatus, ServeError> {
        let (socket, remote) = monitor::socket_pair()?;
        let daemon = Child(self.monitor.spawn_daemon(|| Ok(command(remote.try_clone()?)))?);
        drop(remote);
        self.serve_life(socket, &daemon)
    }

    /// Tells a daemon what it begins with, serves it until it ends, and removes what was made for it.
    fn serve_life<D: DaemonProcess>(
        &mut self,
        socket: OwnedFd,
        daemon: &D,
    ) -> Result<D::End, ServeError> {
        self.greet(&socket)?;
        Ok(self.serve_to_end(Some(socket), daemon)?)
    }

    /// Tells a daemon what it begins with.
    fn greet(&self, socket: &OwnedFd) -> io::Result<()> {
        // A daemon that does not read its answers is not waited for.
        rustix::io::ioctl_fionbio(socket, true)?;
        let start = Start {
            version: monitor::VERSION,
            grant: self.monitor.grant(),
            user: self.user,
            home: self.home.clone(),
            linked: self.linked.clone(),
            access: self.prepared.access().cloned(),
            dashboard: self.prepared.dashboard_access().cloned(),
            activated: activation::descriptors().len(),
        };
        let text = serde_json::to_vec(&start).expect("plain data");
        match monitor::send_start(socket, &text, &self.prepared.descriptors()) {
            // It has ended already; its status says how.
            Err(error)
                if [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset]
                    .contains(&error.kind()) =>
            {
                Ok(())
            }
            result => result,
        }
    }

    /// Serves a daemon until it ends, and removes what was made for it.
    fn serve_to_end<D: DaemonProcess>(
        &mut self,
        socket: Option<OwnedFd>,
        daemon: &D,
    ) -> io::Result<D::End> {
        let end = self.serve(socket, daemon)?;
        if self.stopping || D::has_exited(&end) {
            // There is no next daemon, or this one has ended its instances itself.
            self.monitor.forget_kept();
        }
        self.await_sandboxes();
        if self.monitor.has_asked() {
            let in_order = self.monitor.has_left();
            self.last = Some(Parting { at: Instant::now(), in_order });
        }
        self.monitor.forget_daemon();
        Ok(end)
    }

    /// Serves the daemon's requests and passes signals on, until it ends.
    fn serve<D: DaemonProcess>(
        &mut self,
        socket: Option<OwnedFd>,
        daemon: &D,
    ) -> io::Result<D::End> {
        let (mut is_heard, mut is_known_to_serve) = (true, false);
        loop {
            let (asked, happened) = {
                let mut events = vec![PollFd::new(&self.signals.0, PollFlags::IN)];
                let ends = daemon.watched();
                events.extend(ends.iter().map(|ends| PollFd::new(ends, PollFlags::IN)));
                let others = events.len();
                let heard = socket.iter().filter(|_| is_heard);
                events.extend(heard.map(|socket| PollFd::new(socket, PollFlags::IN)));
                match poll(&mut events, None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
                let ready = |event: &PollFd<'_>| !event.revents().is_empty();
                (events.get(others).is_some_and(ready), events[..others].iter().any(ready))
            };
            if happened {
                self.pass_on_signals(daemon);
                if let Some(end) = daemon.ended() {
                    socket.iter().for_each(|socket| self.monitor.serve_last(socket));
                    return Ok(end);
                }
                let connection = socket.as_ref().filter(|_| is_heard).map(AsFd::as_fd);
                let present = daemon.watched().map(|process| Present { connection, process });
                self.heed_wish_for_another(present);
            }
            if asked
                && let Some(open) = &socket
                && !self.monitor.serve(open)
            {
                // It has ended, in which case this changes nothing, and the rest is read when that is
                // known. Or it sends nonsense, or does not read: nobody knows whose it is now.
                daemon.signal(Signal::KILL);
                is_heard = false;
            }
            if !is_known_to_serve && self.monitor.is_serving() {
                is_known_to_serve = true;
                notification::serving(self.prepared.gateway_address()?);
            }
        }
    }

    /// Ends what the daemon that has ended had kept for the next.
    fn end_instances(&mut self, why: &str) {
        if self.monitor.kept() == 0 {
            return;
        }
        tracing::warn!("its instances end, too: {why}");
        self.monitor.forget_kept();
        self.await_sandboxes();
    }

    fn pass_on_signals<D: DaemonProcess>(&mut self, daemon: &D) {
        for signal in self.signals.take() {
            let passed_on = match signal {
                Signal::TERM | Signal::INT => {
                    self.stopping = true;
                    notification::stopping("Ending when the daemon has ended");
                    D::END
                }
                Signal::HUP => Signal::HUP,
                Signal::USR2 => {
                    self.wants_another = true;
                    continue;
                }
                _ => continue,
            };
            daemon.signal(passed_on);
        }
    }

    /// Waits for the zygote parents that end with the daemon's sockets, and all sandboxes
    /// with them. Those that are kept for the next daemon stay.
    fn await_sandboxes(&mut self) {
        let deadline = Instant::now() + SANDBOXES_PATIENCE;
        loop {
            match wait(WaitOptions::NOHANG) {
                Err(Errno::CHILD) => return,
                Ok(Some(_)) => continue,
                Ok(None) if !self.monitor.has_ending_children() => return,
                Ok(None) | Err(_) => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!("some sandboxes of the daemon that has ended are still there");
                return;
            }
            let mut events = [PollFd::new(&self.signals.0, PollFlags::IN)];
            let _ = poll(&mut events, Some(&timespec(left)));
            // There is no daemon to pass them on to.
            self.pass_on_signals(&Nobody);
        }
    }
}

fn timespec(time: Duration) -> Timespec {
    let tv_sec = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    Timespec { tv_sec, tv_nsec: time.subsec_nanos().into() }
}

/// Reaps all children that have ended.
fn reap() -> Vec<(Pid, WaitStatus)> {
    std::iter::from_fn(|| wait(WaitOptions::NOHANG).ok().flatten()).collect()
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

/// How fetchers are started for this home.
fn fetchers(home: &Home, linked: &[PathBuf], user: DaemonUser) -> FetcherCommand {
    let (home, linked) = (home.clone(), linked.to_owned());
    crate::fetching::command(&FetcherStart { home, linked, user: Some(user) })
}

/// The signals that a monitor reads instead of being interrupted by them.
struct Signals(OwnedFd);

impl Signals {
    fn block() -> io::Result<Self> {
        let signals = [libc::SIGCHLD, libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGUSR2];
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
