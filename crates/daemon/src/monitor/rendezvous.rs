//! A monitor and a daemon that are started apart from each other, as by two units of
//! systemd's: the daemon comes to the monitor's Unix socket.
//!
//! The daemon is given the same as one that its monitor has started. But it has never had
//! root's rights, so it cannot make itself a root directory ([`super::jail`]): whoever
//! starts it does (`contrib/systemd/thaw.service`).

use super::again::{self, ProgramPath, before};
use super::{
    CRASHES_WITH_INSTANCES, DaemonProcess, Inherited, LONG_LIFE, Present, Start, Version, Watch,
    reap, timespec,
};
use crate::daemon::{ListenOptions, ServeError};
use crate::notification;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, FileType, Mode, chownat, fchmod};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, acceptfrom_with, bind, connect, listen,
    socket_with,
};
use rustix::process::{
    DumpableBehavior, Gid, Pid, PidfdFlags, Signal, Uid, geteuid, pidfd_open, pidfd_send_signal,
    set_dumpable_behavior,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, set_capabilities,
    set_no_new_privs,
};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use thaw_home::home::Home;
use thaw_sandbox::WeakLimits;
use thaw_sandbox::monitor::{self, DaemonIds, Leaving, Left, Number};

/// Daemons that wait until the one before them is gone.
const BACKLOG: i32 = 4;
/// How long a daemon waits for a monitor that is just being started, and for its answer:
/// it may still have to remove what it made for the daemon before.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long the monitor pauses between two daemons, so that one which ends at once keeps
/// no processor busy.
const PAUSE: Duration = Duration::from_millis(50);

/// What the service manager hears while there is no daemon.
const WAITING: &str = "Waiting for a daemon";
/// The same while there is one.
const SERVING: &str = "A daemon is served";

/// Why a monitor and its daemon do not find each other.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// Only root has rights to separate.
    #[error("`thaw monitor` keeps root's rights for a daemon that has none: start it as root")]
    NotRoot,
    /// Nobody but root would have rights over the sandboxes.
    #[error(
        "this host has no user namespaces, or too few user ids, so a daemon without root's \
         rights cannot have sandboxes; `thaw doctor` says what is missing"
    )]
    NoNamespaces,
    /// The socket's directory is writable for others than root.
    #[error(
        "others than root may write to {}, where the monitor's socket is to be; name one in \
         a directory of root's with --socket, such as /run/thaw/monitor.sock",
        directory.display()
    )]
    Directory {
        /// The directory.
        directory: PathBuf,
    },
    /// The socket cannot be made.
    #[error("cannot make the monitor's socket {} ({error}); name another with --socket", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The host's error.
        error: io::Error,
    },
    /// There is no monitor.
    #[error(
        "no monitor listens on {} ({error}); start `thaw monitor --socket {}` as root first",
        path.display(), path.display()
    )]
    NoMonitor {
        /// The socket.
        path: PathBuf,
        /// The host's error.
        error: io::Error,
    },
    /// The daemon has the wrong user.
    #[error(
        "the monitor on {} serves a daemon of user id {wanted}, and this process has {own}; \
         start it as that user (`User=` in its unit)",
        path.display()
    )]
    OtherUser {
        /// The socket.
        path: PathBuf,
        /// The socket's owner.
        wanted: u32,
        /// The caller's id.
        own: u32,
    },
    /// Another user's process listens there.
    #[error("the process that listens on {} is not root's, so it is no monitor", path.display())]
    NotRoots {
        /// The socket.
        path: PathBuf,
    },
    /// The monitor does not answer.
    #[error("the monitor on {} serves another daemon; stop that one first", path.display())]
    Busy {
        /// The socket.
        path: PathBuf,
    },
    /// The monitor has closed the connection.
    #[error("the monitor on {} has not taken this daemon ({error}); its log says why", path.display())]
    Refused {
        /// The socket.
        path: PathBuf,
        /// The host's error.
        error: io::Error,
    },
    /// The monitor is of another version of Thaw.
    #[error(
        "the monitor on {} is of another version of Thaw (it speaks version {found}, this daemon \
         {}); have it execute this one (`systemctl reload thaw-monitor`), or start it again, which ends \
         the instances that it keeps: those that are to go on need a checkpoint first",
        path.display(), monitor::VERSION
    )]
    Version {
        /// The socket.
        path: PathBuf,
        /// What it speaks.
        found: u32,
    },
    /// This process cannot become what the daemon has to be.
    #[error("cannot give up what rights are left ({0}); `thaw doctor` says what this host lacks")]
    Rights(io::Error),
}

/// Waits on the socket `path` for a daemon of `user`, serves it until it ends, and waits
/// for the next, until `SIGTERM` or `SIGINT`. Listeners stay open all the time. Instances that a
/// daemon has left live on for `keep_for`, in which the next one has to come.
///
/// # Errors
/// The host does not allow privileges to be separated, or something cannot be made.
pub fn run_at(
    path: &Path,
    home: &Home,
    listening: &ListenOptions,
    weak_limits: WeakLimits,
    user: super::DaemonUser,
    keep_for: Duration,
) -> Result<(), ServeError> {
    let program = ProgramPath::of_this_process()?;
    let Some(mut watch) = Watch::make(home, listening, weak_limits, user)? else {
        return Err(RendezvousError::NoNamespaces.into());
    };
    let socket = MonitorSocket::make(path, user.ids)?;
    tracing::info!("waiting for a daemon of user id {} on {}", user.ids.uid, path.display());
    watch.apart = Some(Apart { socket, program, short_lives: 0, began: Instant::now() });
    notification::ready(WAITING);
    watch.serve_daemons(None, keep_for)
}

/// Goes on as the monitor that has executed this program in its own place, with what has this
/// descriptor. To be called before all else.
///
/// # Errors
/// It is no such thing, or something has failed since.
pub fn resume_at(state: RawFd, keep_for: Duration) -> Result<(), ServeError> {
    let (mut watch, served) = again::resume(state)?;
    let has_daemon = if served.is_some() { "a daemon" } else { "no daemon" };
    let kept = watch.monitor.kept();
    tracing::info!("goes on in the place of the monitor before it, with {has_daemon}, {kept} kept");
    notification::ready(if served.is_some() { SERVING } else { WAITING });
    watch.serve_daemons(served, keep_for)
}

/// A daemon that is served already, and its connection, if it has one still.
pub(super) type Served = (Option<OwnedFd>, Connected);

impl Watch {
    /// Serves one daemon after the other, the first of which may be `served` already.
    fn serve_daemons(
        &mut self,
        mut served: Option<Served>,
        keep_for: Duration,
    ) -> Result<(), ServeError> {
        loop {
            if let Some((connection, daemon)) = served.take() {
                self.serve_to_end(connection, &daemon)?;
            } else {
                let Some((connection, daemon)) = self.next_daemon(keep_for)? else { break };
                self.apart().began = Instant::now();
                notification::status(SERVING);
                self.serve_life(connection, &daemon)?;
            }
            if self.stopping {
                break;
            }
            self.judge_last();
            notification::status(WAITING);
            thread::sleep(PAUSE);
        }
        self.end_instances("the monitor ends");
        Ok(())
    }

    fn apart(&mut self) -> &mut Apart {
        self.apart.as_mut().expect("others start the daemons")
    }

    fn socket(&self) -> &MonitorSocket {
        &self.apart.as_ref().expect("others start the daemons").socket
    }

    /// Says how the last daemon has ended, and ends its instances if it may be because of them.
    fn judge_last(&mut self) {
        let last = self.last;
        let apart = self.apart();
        let Some(parting) = last.filter(|last| last.at >= apart.began) else {
            return tracing::warn!("a daemon has turned away; waiting for the next");
        };
        apart.short_lives = match parting.in_order {
            // A daemon that was restarted is none that crashes, however often that happens.
            true => 0,
            false if apart.began.elapsed() > LONG_LIFE => 0,
            false => apart.short_lives + 1,
        };
        match parting.in_order {
            true => tracing::info!("the daemon has ended in order; waiting for the next"),
            false => tracing::warn!("the daemon has ended; waiting for the next"),
        }
        if apart.short_lives >= CRASHES_WITH_INSTANCES {
            self.end_instances("it may have ended because of one of them");
        }
    }

    /// The next daemon that may have this monitor; `None` if somebody has asked for the end. What
    /// the one before has left ends if none has come after `keep_for`.
    fn next_daemon(&mut self, keep_for: Duration) -> io::Result<Option<(OwnedFd, Connected)>> {
        // Those that have turned away meanwhile do not prolong it.
        let deadline = self.last.and_then(|last| last.at.checked_add(keep_for));
        loop {
            self.pass_on_signals(&Nobody);
            if self.stopping {
                return Ok(None);
            }
            self.heed_wish_for_another(None);
            let socket = self.socket();
            if let Some(found) = socket.accept()? {
                return Ok(Some(found));
            }
            let mut events = [
                PollFd::new(&self.signals.0, PollFlags::IN),
                PollFd::new(&socket.listener, PollFlags::IN),
            ];
            let left = deadline
                .filter(|_| self.monitor.kept() > 0)
                .map(|deadline| deadline.saturating_duration_since(Instant::now()));
            match poll(&mut events, left.map(timespec).as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            if left.is_some_and(|left| left.is_zero()) {
                let waited = keep_for.as_secs_f64();
                self.end_instances(&format!("no daemon has come within {waited} s"));
            }
        }
    }
}

/// What a monitor has whose daemons somebody else starts.
#[derive(Debug)]
pub(super) struct Apart {
    socket: MonitorSocket,
    /// What it executes when it is to execute itself anew.
    pub(super) program: ProgramPath,
    /// Daemons in a row that have ended early.
    short_lives: u32,
    /// When the last daemon began.
    began: Instant,
}

/// [`Apart`] and the daemon that is served, for the program that the process is about to execute.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ApartState {
    listener: Number,
    path: PathBuf,
    program: ProgramPath,
    short_lives: u32,
    /// How long ago.
    began: Duration,
    served: Option<ServedState>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ServedState {
    connection: Option<Number>,
    process: Number,
}

impl Apart {
    /// Writes it down.
    pub fn state<'a>(
        &'a self,
        present: Option<Present<'a>>,
        leaving: &mut Leaving<'a>,
    ) -> ApartState {
        ApartState {
            listener: leaving.add(self.socket.listener.as_fd()),
            path: self.socket.path.clone(),
            program: self.program.clone(),
            short_lives: self.short_lives,
            began: self.began.elapsed(),
            served: present.map(|present| ServedState {
                connection: present.connection.map(|connection| leaving.add(connection)),
                process: leaving.add(present.process),
            }),
        }
    }
}

impl ApartState {
    /// Goes on with it.
    ///
    /// # Errors
    /// A descriptor is missing.
    pub fn resume(self, user: DaemonIds, left: &mut Left) -> io::Result<(Apart, Option<Served>)> {
        let (listener, path) = (left.take(self.listener)?, self.path);
        let apart = Apart {
            socket: MonitorSocket { listener, path, user },
            program: self.program,
            short_lives: self.short_lives,
            began: before(self.began),
        };
        Ok((apart, self.served.map(|served| served.resume(left)).transpose()?))
    }
}

impl ServedState {
    fn resume(self, left: &mut Left) -> io::Result<Served> {
        let connection = self.connection.map(|connection| left.take(connection)).transpose()?;
        Ok((connection, Connected(left.take(self.process)?)))
    }
}

/// The monitor's socket, which is gone when this is dropped.
#[derive(Debug)]
struct MonitorSocket {
    listener: OwnedFd,
    path: PathBuf,
    user: DaemonIds,
}

impl MonitorSocket {
    /// Listens at `path` for processes of `user`. A socket that a killed monitor has left
    /// is replaced; the home's lock is what keeps a second monitor away.
    fn make(path: &Path, user: DaemonIds) -> Result<Self, RendezvousError> {
        let failed = |error: io::Error| RendezvousError::Socket { path: path.to_owned(), error };
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = directory.unwrap_or(Path::new("."));
        let attributes = fs::metadata(directory).map_err(failed)?;
        if attributes.uid() != 0 || attributes.mode() & 0o022 != 0 {
            return Err(RendezvousError::Directory { directory: directory.to_owned() });
        }
        let listener = Self::listen(path, user).map_err(failed)?;
        Ok(Self { listener, path: path.to_owned(), user })
    }

    fn listen(path: &Path, user: DaemonIds) -> io::Result<OwnedFd> {
        match rustix::fs::lstat(path) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Socket => {
                fs::remove_file(path)?;
            }
            // Of anything else, binding says that it is there.
            Ok(_) | Err(_) => {}
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // The file gets the mode of the socket, so that there is no moment at which
        // others could connect.
        fchmod(&socket, Mode::from_raw_mode(0o600))?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
        chownat(CWD, path, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        listen(&socket, BACKLOG)?;
        Ok(socket)
    }

    /// A daemon that waits; `None` if there is none, or it has been sent away.
    fn accept(&self) -> io::Result<Option<(OwnedFd, Connected)>> {
        let connection = match acceptfrom_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok((connection, _)) => connection,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let peer = socket_peercred(&connection)?;
        if peer.uid.as_raw() != self.user.uid {
            // Root may connect whatever the socket's mode.
            tracing::warn!("sent away a process of user id {}", peer.uid.as_raw());
            return Ok(None);
        }
        Ok(Connected::find(peer.pid, self.user.uid).map(|daemon| (connection, daemon)))
    }
}

impl Drop for MonitorSocket {
    fn drop(&mut self) {
        // The next monitor replaces it, too.
        let _ = fs::remove_file(&self.path);
    }
}

/// A daemon that has connected.
#[derive(Debug)]
pub(super) struct Connected(OwnedFd);

impl Connected {
    /// The process that had this id when it connected; `None` if it has ended. If the id
    /// is another process's by now, that is one of the daemon's user, too: no other is
    /// ever signalled.
    fn find(pid: Pid, uid: u32) -> Option<Self> {
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Read after it was opened: the answer is about that process, or it has ended.
        let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).ok()?;
        let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
        let is_users = ids.split_whitespace().all(|id| id.parse() == Ok(uid));
        let found = Self(pidfd);
        (is_users && found.ended().is_none()).then_some(found)
    }
}

impl DaemonProcess for Connected {
    type End = ();
    // `SIGTERM` has it leave its instances to the next daemon.
    const END: Signal = Signal::INT;

    fn signal(&self, signal: Signal) {
        // If it has ended, nobody gets the signal.
        let _ = pidfd_send_signal(&self.0, signal);
    }

    fn ended(&self) -> Option<()> {
        // Zygote parents and helpers: the monitor's children all the same.
        reap();
        let mut events = [PollFd::new(&self.0, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut events, Some(&at_once)), Ok(1..)).then_some(())
    }

    fn watched(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

/// While no daemon has connected, signals are for the monitor only.
pub(super) struct Nobody;

impl DaemonProcess for Nobody {
    type End = ();
    const END: Signal = Signal::INT;

    fn signal(&self, _: Signal) {}

    fn ended(&self) -> Option<()> {
        None
    }

    fn watched(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Makes this process, which has no rights but those of its user, the daemon of the
/// monitor that listens on `path`. It ends when the monitor does. To be called before there
/// are threads.
///
/// # Errors
/// There is no such monitor, or it has another daemon; or the host refuses something.
pub fn connect_daemon(path: &Path) -> Result<Inherited, ServeError> {
    let socket = connect_to(path)?;
    let refused = |error| RendezvousError::Refused { path: path.to_owned(), error };
    if !is_readable_within(&socket, PATIENCE).map_err(refused)? {
        return Err(RendezvousError::Busy { path: path.to_owned() }.into());
    }
    let (text, descriptors) = monitor::receive_start(&socket).map_err(refused)?;
    check_version(&text, path)?;
    let mut start: Start = serde_json::from_slice(&text).map_err(io::Error::from)?;
    let watched = socket.try_clone()?;
    let prepared = start.inherit(descriptors)?;
    // Stays open from here on until this process has ended, so that the monitor does not
    // take an error for the silence of somebody else.
    monitor::adopt(socket, start.grant);
    give_up_rights().map_err(RendezvousError::Rights)?;
    super::filter::install(super::UserKind::Other).map_err(RendezvousError::Rights)?;
    super::jail::end_with(watched)?;
    Ok(Inherited { home: start.home, prepared })
}

/// Refuses a monitor with which this daemon cannot talk, by what it says first.
fn check_version(text: &[u8], path: &Path) -> Result<(), ServeError> {
    let Version { version: found } = serde_json::from_slice(text).map_err(io::Error::from)?;
    match found == monitor::VERSION {
        true => Ok(()),
        false => Err(RendezvousError::Version { path: path.to_owned(), found }.into()),
    }
}

/// A connection to the monitor at `path`, which may be just being started.
fn connect_to(path: &Path) -> Result<OwnedFd, RendezvousError> {
    let no_monitor = |error: io::Error| RendezvousError::NoMonitor { path: path.to_owned(), error };
    let deadline = Instant::now() + PATIENCE;
    loop {
        let own = geteuid().as_raw();
        match fs::symlink_metadata(path).map(|attributes| attributes.uid()) {
            // A monitor makes it, and gives it away a moment later.
            Ok(0) if own != 0 && Instant::now() < deadline => {
                thread::sleep(PAUSE);
                continue;
            }
            // The host would let root in, and the monitor send it away.
            Ok(wanted) if wanted != own => {
                return Err(RendezvousError::OtherUser { path: path.to_owned(), wanted, own });
            }
            Ok(_) | Err(_) => {}
        }
        match try_connect(path) {
            Ok(socket) => return check_is_roots(socket, path),
            Err(Errno::NOENT | Errno::CONNREFUSED) if Instant::now() < deadline => {
                thread::sleep(PAUSE);
            }
            Err(errno) => return Err(no_monitor(errno.into())),
        }
    }
}

fn try_connect(path: &Path) -> Result<OwnedFd, Errno> {
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// The ids of whoever listens are those that it had when it began to (unix(7)).
fn check_is_roots(socket: OwnedFd, path: &Path) -> Result<OwnedFd, RendezvousError> {
    match socket_peercred(&socket) {
        Ok(peer) if peer.uid.is_root() => Ok(socket),
        _ => Err(RendezvousError::NotRoots { path: path.to_owned() }),
    }
}

fn is_readable_within(socket: &OwnedFd, patience: Duration) -> io::Result<bool> {
    let left = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: 0 };
    loop {
        let mut events = [PollFd::new(socket, PollFlags::IN)];
        match poll(&mut events, Some(&left)) {
            Err(Errno::INTR) => {}
            result => return Ok(result? > 0),
        }
    }
}

/// Gives up what a unit may have left to this process. Its user has never been root, so
/// no capabilities are to be feared but those that somebody gave it on purpose; without
/// them none can be got back, as it gets none by executing a file either.
fn give_up_rights() -> io::Result<()> {
    set_no_new_privs(true)?;
    let none = CapabilitySet::empty();
    let no_sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    // Where there are none, a unit's own filter may forbid to change them.
    if capabilities(None)? != no_sets {
        clear_ambient_capability_set()?;
        set_capabilities(None, no_sets)?;
    }
    // As for a process that has changed its user: others of the user's cannot read its
    // memory, and no core file gets it.
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_monitor_of_another_version_is_refused_whatever_else_it_says() {
        let path = Path::new("/run/monitor.sock");
        let own = format!("{{\"version\":{},\"grant\":{{}}}}", monitor::VERSION);
        check_version(own.as_bytes(), path).unwrap();
        // Those that did not say so yet, and later ones.
        for (text, found) in [("{\"grant\":{}}", "0"), ("{\"version\":77,\"new\":[]}", "77")] {
            let refused = check_version(text.as_bytes(), path).unwrap_err().to_string();
            assert!(refused.contains(&format!("it speaks version {found}, this")), "{refused}");
        }
        check_version(b"not JSON", path).unwrap_err();
    }
}
