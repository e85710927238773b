//! A monitor that executes its program anew in its own place (execve(2)), as in an upgrade: the
//! process stays, with its children, descriptors and waiting signals, so that neither the daemon nor
//! what lives notices. `docs/decisions/0065-a-monitor-that-executes-itself-anew.md` says why.
//!
//! What is not in the process is in a [`State`], a text in a sealed file in memory. The program
//! that is to be executed is asked first, as another process, whether it understands that very
//! text. If it does not, or anything else is amiss, the monitor goes on as it is.

use super::rendezvous::{Apart, ApartState, Served};
use super::{DaemonUser, Parting, Present, Signals, Watch};
use crate::activation;
use crate::admin::RemoteAccess;
use crate::daemon::{Prepared, ServeError};
use crate::notification;
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use thaw_home::home::Home;
use thaw_sandbox::monitor::{self, Leaving, Left, Monitor, MonitorState, Number, Refused};

/// Version of [`State`]. Change it with that and all that it is made of ([`MonitorState`] above
/// all), and go on reading the two versions before.
const STATE_VERSION: u32 = 1;
/// The argument of `thaw monitor` with which a program is asked whether it understands a state,
/// which is its standard input.
const QUESTION: &str = "--can-take-over";
/// What it answers if it does.
const ANSWER: &str = "takes over\n";
/// The argument with which it is executed in the place of a monitor, with the number of the
/// descriptor of the state.
const TAKING_OVER: &str = "--taking-over=";
/// How long the answer may take. The daemon waits so long at most.
const PATIENCE: Duration = Duration::from_secs(10);
/// What the service manager hears if it does not.
const STAYS: &str = "Goes on as it was, and is not executed anew: its log says why";
/// How the host marks the path of a file that is not there any more (proc_pid_exe(5)).
const DELETED: &str = " (deleted)";

/// Why a program does not go on with what a monitor has.
#[derive(Debug, thiserror::Error)]
pub enum TakeOverError {
    /// There is no state.
    #[error("cannot read what a monitor has left ({0})")]
    Unreadable(#[from] io::Error),
    /// It is of another version.
    #[error(
        "what the monitor has is written down in version {found}, and this Thaw reads version \
         {STATE_VERSION}"
    )]
    Version {
        /// Which.
        found: u32,
    },
    /// It is not what its version says.
    #[error("what the monitor has is not written down as it should be ({0})")]
    Damaged(#[from] serde_json::Error),
    /// It is of no use here.
    #[error("{0}")]
    Useless(String),
}

/// Why a monitor goes on as it is.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("{} cannot be opened ({error})", path.display())]
    Missing { path: PathBuf, error: io::Error },
    #[error("others than root may change {}", path.display())]
    Changeable { path: PathBuf },
    #[error("{}: {refused}", path.display())]
    Refused { path: PathBuf, refused: Refused },
    #[error("{} cannot be executed ({error})", path.display())]
    Failed { path: PathBuf, error: io::Error },
    #[error("only `thaw monitor` does so, and this is `thaw serve`")]
    NotApart,
    #[error("it ends")]
    Ending,
    #[error(transparent)]
    Host(#[from] io::Error),
}

/// Where the file lies from which this monitor was started: by now it may be another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct ProgramPath(PathBuf);

impl ProgramPath {
    /// As this process was called, if that is a path that leads to its file, which may be a link
    /// that leads elsewhere after an upgrade; else where the file lies.
    ///
    /// # Errors
    /// The host does not tell.
    pub fn of_this_process() -> io::Result<Self> {
        let own = Path::new("/proc/self/exe");
        let called = std::env::args_os().next().map(PathBuf::from).filter(|name| {
            name.is_absolute() && is_same_file(fs::metadata(name), fs::metadata(own))
        });
        Ok(Self(match called {
            Some(called) => called,
            None => without_mark(fs::read_link(own)?),
        }))
    }

    /// Opens the file, which nobody but root may change or replace.
    fn open(&self) -> Result<File, Refusal> {
        let missing = |error| Refusal::Missing { path: self.0.clone(), error };
        let path = fs::canonicalize(&self.0).map_err(missing)?;
        let file = File::open(&path).map_err(missing)?;
        let attributes = file.metadata()?;
        if !attributes.is_file() || !is_roots_alone(&attributes) {
            return Err(Refusal::Changeable { path });
        }
        // The way there, and the way that links go.
        for directory in path.ancestors().chain(self.0.ancestors()).skip(1) {
            let attributes = fs::metadata(directory).map_err(missing)?;
            if attributes.is_dir() && !is_roots_alone(&attributes) {
                return Err(Refusal::Changeable { path: directory.to_owned() });
            }
        }
        Ok(file)
    }

    /// Asks the program, which is open, whether it can go on with a state.
    fn ask(&self, program: &File, state: BorrowedFd<'_>) -> Result<(), Refusal> {
        monitor::ask(program.as_fd(), &arguments(QUESTION), state, ANSWER, PATIENCE)
            .map_err(|refused| Refusal::Refused { path: self.0.clone(), refused })
    }

    /// Executes the program, which is open, in the place of this one. Returns only on failure.
    fn execute<'a>(
        &self,
        program: &File,
        state: BorrowedFd<'a>,
        mut leaving: Leaving<'a>,
    ) -> Refusal {
        let number = leaving.add(state);
        tracing::info!("executing {} in the place of this monitor", self.0.display());
        let arguments = arguments(&format!("{TAKING_OVER}{number}"));
        let error = leaving.execute(program.as_fd(), arguments, std::env::vars_os());
        Refusal::Failed { path: self.0.clone(), error }
    }
}

/// The path of a file that may have been replaced since it was executed.
fn without_mark(path: PathBuf) -> PathBuf {
    let unmarked = path.to_str().and_then(|path| path.strip_suffix(DELETED));
    unmarked.map(PathBuf::from).unwrap_or(path)
}

/// Whether only root may change a file, or what lies in a directory. In one with the sticky bit
/// others may not rename what is root's.
fn is_roots_alone(attributes: &Metadata) -> bool {
    let is_sticky = attributes.is_dir() && attributes.mode() & 0o1000 != 0;
    attributes.uid() == 0 && (attributes.mode() & 0o022 == 0 || is_sticky)
}

fn is_same_file(one: io::Result<Metadata>, other: io::Result<Metadata>) -> bool {
    let number = |attributes: io::Result<Metadata>| {
        attributes.ok().map(|attributes| (attributes.dev(), attributes.ino()))
    };
    number(one).is_some_and(|one| Some(one) == number(other))
}

/// What a monitor has besides what the host keeps for its process.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    version: u32,
    monitor: MonitorState,
    home: Home,
    linked: Vec<PathBuf>,
    user: DaemonUser,
    prepared: PreparedState,
    last: Option<PartingState>,
    apart: ApartState,
}

/// [`Prepared`], with the sockets of the service manager.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PreparedState {
    descriptors: Vec<Number>,
    activated: usize,
    access: Option<RemoteAccess>,
    dashboard: Option<RemoteAccess>,
}

/// [`Parting`]; times are how long ago.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PartingState {
    ago: Duration,
    in_order: bool,
}

/// The part of [`State`] that every version has.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl State {
    /// Reads one, if this program can go on with it.
    fn parse(text: &[u8]) -> Result<Self, TakeOverError> {
        let Version { version: found } = serde_json::from_slice(text)?;
        if found != STATE_VERSION {
            return Err(TakeOverError::Version { found });
        }
        let state: Self = serde_json::from_slice(text)?;
        state.monitor.check().map_err(TakeOverError::Useless)?;
        Ok(state)
    }

    fn resume(self, left: &mut Left) -> io::Result<(Watch, Option<Served>)> {
        let mut monitor = Monitor::resume(self.monitor, left)?;
        monitor.fetch_with(super::fetchers(&self.home, &self.linked, self.user));
        let prepared = self.prepared.resume(&self.home, left)?;
        let (apart, served) = self.apart.resume(self.user.ids, left)?;
        let last = self.last.map(|last| Parting { at: before(last.ago), in_order: last.in_order });
        let (home, linked, user) = (self.home, self.linked, self.user);
        let watch = Watch::with(monitor, home, linked, prepared, user)?;
        Ok((Watch { last, apart: Some(apart), ..watch }, served))
    }
}

impl PreparedState {
    fn of<'a>(prepared: &'a Prepared, leaving: &mut Leaving<'a>) -> Self {
        let descriptors = prepared.descriptors().into_iter();
        Self {
            descriptors: descriptors.map(|descriptor| leaving.add(descriptor)).collect(),
            activated: activation::descriptors().len(),
            access: prepared.access().cloned(),
            dashboard: prepared.dashboard_access().cloned(),
        }
    }

    fn resume(self, home: &Home, left: &mut Left) -> io::Result<Prepared> {
        let descriptors = self.descriptors.into_iter().map(|number| left.take(number));
        let descriptors = descriptors.collect::<io::Result<_>>()?;
        Prepared::inherited(home, descriptors, self.activated, self.access, self.dashboard)
    }
}

/// The instant that was so long ago, or the first that the host knows.
pub(super) fn before(ago: Duration) -> Instant {
    let now = Instant::now();
    now.checked_sub(ago).unwrap_or(now)
}

/// Says whether this program can go on with the state that is its standard input, and what it
/// answers then.
///
/// # Errors
/// Why it cannot.
pub fn can_take_over() -> Result<&'static str, TakeOverError> {
    State::parse(&monitor::read_sealed(io::stdin())?)?;
    Ok(ANSWER)
}

/// Goes on as the monitor that has executed this program, whose state has this descriptor. To be
/// called first, and once.
pub(super) fn resume(number: RawFd) -> Result<(Watch, Option<Served>), ServeError> {
    #[allow(unsafe_code)]
    // SAFETY: a program that is told to take over does this before all else, so that it owns no
    // descriptors yet but its standard streams.
    let (text, mut left) = unsafe { Left::arrive(number) }.map_err(TakeOverError::from)?;
    // Before there are threads: one that the program before this one did not block ends this process
    // until here.
    Signals::block()?;
    // Executing a descriptor may have named the process after that (execveat(2)).
    rustix::thread::set_name(c"thaw").map_err(io::Error::from)?;
    let state = State::parse(&text)?;
    Ok(state.resume(&mut left).map_err(TakeOverError::from)?)
}

impl Watch {
    /// Executes this monitor's program in its place if somebody has asked for that. Returns only if
    /// nobody has, or it cannot be.
    pub(super) fn heed_wish_for_another(&mut self, present: Option<Present<'_>>) {
        if !std::mem::take(&mut self.wants_another) {
            return;
        }
        let Err(refusal) = self.execute_another(present);
        tracing::error!("this monitor goes on as it is, and is not executed anew: {refusal}");
        if !self.stopping {
            notification::status(STAYS);
        }
    }

    fn execute_another(&self, present: Option<Present<'_>>) -> Result<Infallible, Refusal> {
        let apart = self.apart.as_ref().ok_or(Refusal::NotApart)?;
        if self.stopping {
            return Err(Refusal::Ending);
        }
        let program = apart.program.open()?;
        // A daemon speaks with helpers of its own version.
        let own = File::open("/proc/self/exe")?;
        let is_another = !is_same_file(own.metadata(), program.metadata());
        let helpers = (present.is_some() && is_another).then_some(own.as_fd());
        let mut leaving = Leaving::default();
        let state = self.state(apart, present, helpers, &mut leaving)?;
        let state = monitor::seal(&serde_json::to_vec(&state).map_err(io::Error::from)?)?;
        apart.program.ask(&program, state.as_fd())?;
        notification::reloading("Executing its program anew");
        let refusal = apart.program.execute(&program, state.as_fd(), leaving);
        notification::ready(STAYS);
        Err(refusal)
    }

    fn state<'a>(
        &'a self,
        apart: &'a Apart,
        present: Option<Present<'a>>,
        helpers: Option<BorrowedFd<'a>>,
        leaving: &mut Leaving<'a>,
    ) -> Result<State, Refusal> {
        Ok(State {
            version: STATE_VERSION,
            monitor: self.monitor.state(helpers, leaving).ok_or(Refusal::NotApart)?,
            home: self.home.clone(),
            linked: self.linked.clone(),
            user: self.user,
            prepared: PreparedState::of(&self.prepared, leaving),
            last: self
                .last
                .map(|last| PartingState { ago: last.at.elapsed(), in_order: last.in_order }),
            apart: apart.state(present, leaving),
        })
    }
}

/// The arguments of this process, and one more.
fn arguments(last: &str) -> Vec<OsString> {
    let is_own =
        |argument: &OsString| argument.as_encoded_bytes().starts_with(TAKING_OVER.as_bytes());
    let before = std::env::args_os().filter(|argument| !is_own(argument));
    before.chain([last.into()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    #[test]
    fn a_state_of_another_version_is_refused_whatever_else_it_says() {
        for (text, says) in [
            ("{\"version\":2,\"new\":[]}", "in version 2, and this Thaw reads version 1"),
            ("{\"version\":0}", "in version 0"),
            ("{\"version\":1,\"new\":[]}", "not written down as it should be"),
            ("{}", "not written down as it should be"),
            ("{\"version\":1", "not written down as it should be"),
        ] {
            let refused = State::parse(text.as_bytes()).err().expect(text).to_string();
            assert!(refused.contains(says), "{text}: {refused}");
        }
    }

    #[test]
    fn the_path_of_a_file_that_was_replaced_is_that_of_the_new_one() {
        let unmarked = |path: &str| without_mark(path.into());
        assert_eq!(unmarked("/usr/bin/thaw (deleted)"), Path::new("/usr/bin/thaw"));
        assert_eq!(unmarked("/usr/bin/thaw"), Path::new("/usr/bin/thaw"));
    }

    #[test]
    fn only_programs_that_root_alone_may_change_are_executed() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let all = tempfile::tempdir().unwrap();
        let (directory, link) = (all.path().join("bin"), all.path().join("link"));
        fs::create_dir(&directory).unwrap();
        let file = directory.join("thaw");
        let set = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode));
        let opens = |path: &Path| ProgramPath(path.to_owned()).open().map(drop).is_ok();
        assert!(!opens(&file), "there is none");
        fs::write(&file, "").unwrap();
        set(&file, 0o755).unwrap();
        set(&directory, 0o755).unwrap();
        symlink(&file, &link).unwrap();
        assert!(opens(&file) && opens(&link));
        for (path, bad, good) in [(&file, 0o775, 0o755), (&directory, 0o757, 0o755)] {
            set(path, bad).unwrap();
            assert!(!opens(&file) && !opens(&link), "{} {bad:o}", path.display());
            set(path, good).unwrap();
        }
        // What is root's stays where it is in a directory like /tmp.
        set(&directory, 0o1777).unwrap();
        assert!(opens(&file));
        chown(&file, Some(12_345), None).unwrap();
        assert!(!opens(&file));
        assert!(!opens(&directory), "no file");
    }

    #[test]
    fn what_was_long_ago_is_so_still() {
        let ago = before(Duration::from_secs(2)).elapsed();
        assert!((2..20).contains(&ago.as_secs()), "{ago:?}");
        // Longer than the host runs.
        before(Duration::from_secs(u64::MAX));
    }
}
