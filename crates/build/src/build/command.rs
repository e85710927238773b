//! Commands of a build: the author's own, `pip`, and interpreters that are asked
//! where their files are.
//!
//! Whoever wrote the function chose them, so they run in a sandbox of their own. It
//! sees the tools of this host (read-only, and of them what every user may read), the
//! function's directory, a home directory that is kept from build to build, and the
//! network as far as `[build] egress` allows. Only who trusts a build has them run on
//! the host.

use super::output::{Flow, Output};
use super::program::{TICK, TICK_IN_A_FLOOD, start_parent};
use super::{BuildEvent, BuildOptions, OnEvent, Trust};
use crate::DEFAULT_PATH;
use crate::lacking::Lacking;
use rustix::process::geteuid;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use thaw_home::beneath;
use thaw_home::config::{BuildConfig, Egress, EgressRule, FunctionConfig};
use thaw_home::home::Home;
use thaw_sandbox::{
    BoundAccess, BoundDirectory, EgressEvents, Event, FileRights, GuestExit, HostDirectory,
    HostPolicy, Mount, MountKind, Rootfs, Sandbox, StartSpec,
};

/// What a sandbox of a build sees of the host, besides the function's directory and
/// the operator's `--tools`.
const TOOLS: [&str; 11] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc",
    "/opt",
    "/nix/store",
    "/gnu/store",
];
/// Where the home directory of a build lies in its sandbox.
const SANDBOX_HOME: &str = "/tmp/home";
/// Variables of this process that a build sees, too: where the certificates lie that
/// this host trusts. They are paths, and secrets of nobody.
const PASSED_ON: [&str; 8] = [
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "NODE_EXTRA_CA_CERTS",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "TZ",
];
/// Host processes that a command of a build may have.
const BUILD_PROCESSES: u32 = 1024;
/// How long an interpreter may take to say where its files are.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// How a directory below another one is opened.
type Opening = fn(&Path, &Path) -> io::Result<File>;

/// Why a command did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum CommandFailure {
    /// It could not be started.
    #[error("it could not be started: {0}")]
    NotStarted(String),
    /// It ended with an error.
    #[error("it ended {0}")]
    Ended(String),
    /// It took too long.
    #[error("it took longer than {} s", .0.as_secs_f64())]
    TimedOut(Duration),
}

impl CommandFailure {
    /// The same with what helps if a program is missing.
    fn explained(self) -> Self {
        match self {
            Self::NotStarted(why) => {
                Self::NotStarted(Lacking::Command.explain(&why).unwrap_or(why))
            }
            other => other,
        }
    }
}

impl From<io::Error> for CommandFailure {
    fn from(error: io::Error) -> Self {
        Self::NotStarted(error.to_string())
    }
}

/// Where the commands of one build run, and what all of them may use.
pub(super) struct Commands<'a> {
    pub home: &'a Home,
    pub directory: &'a Path,
    pub config: &'a FunctionConfig,
    pub options: &'a BuildOptions,
}

/// One command.
pub(super) struct Task<'a> {
    /// Who prints, for people.
    pub from: &'static str,
    pub arguments: Vec<OsString>,
    /// Where it runs: a path of the host that is the same in the sandbox.
    pub cwd: &'a Path,
    /// Destinations that it may connect to.
    pub egress: &'a [EgressRule],
    /// Paths of the host that it sees besides the usual ones.
    pub shown: Vec<PathBuf>,
    /// Directories of the host that it sees at their own paths, and what it may do
    /// there.
    pub bound: Vec<(&'a Path, BoundAccess)>,
    pub timeout: Duration,
}

impl Commands<'_> {
    /// What `[build]` says, or what holds without it.
    pub fn settings(&self) -> BuildConfig {
        self.config.build.clone().unwrap_or_default()
    }

    /// Runs a command and passes on what it prints.
    pub fn run(&self, task: &Task<'_>, on_event: &mut OnEvent<'_>) -> Result<(), CommandFailure> {
        let mut output = Output::new(task.from);
        let ended = match self.options.trust {
            Trust::Untrusted => self.run_in_sandbox(task, &mut output, on_event),
            Trust::Trusted => self.run_on_host(task, &mut output, on_event),
        };
        output.finish(on_event);
        ended
    }

    /// Runs a command that is asked something, in a sandbox whoever trusts it; its
    /// standard output. What it prints as errors is part of the failure.
    pub fn ask(&self, task: &Task<'_>) -> io::Result<std::process::Output> {
        let mut output = Output::capturing(task.from);
        let ended = self.run_in_sandbox(task, &mut output, &mut |_| {});
        let (stdout, stderr) = output.captured();
        let status = match ended {
            Ok(()) => ExitStatus::from_raw(0),
            Err(CommandFailure::Ended(_)) => ExitStatus::from_raw(1 << 8),
            Err(other) => return Err(io::Error::other(other.to_string())),
        };
        Ok(std::process::Output { status, stdout, stderr })
    }

    /// The same for an interpreter with a question.
    pub fn ask_interpreter(
        &self,
        interpreter: &Path,
        arguments: &[&str],
    ) -> io::Result<std::process::Output> {
        let words = arguments.iter().map(OsString::from);
        self.ask(&Task {
            from: "interpreter",
            arguments: [interpreter.into()].into_iter().chain(words).collect(),
            cwd: Path::new("/"),
            egress: &[],
            shown: Vec::new(),
            bound: vec![(self.directory, BoundAccess::Read)],
            timeout: ANSWER_TIMEOUT,
        })
    }

    fn run_in_sandbox(
        &self,
        task: &Task<'_>,
        output: &mut Output,
        on_event: &mut OnEvent<'_>,
    ) -> Result<(), CommandFailure> {
        let deadline = Instant::now() + task.timeout;
        let (stdout, stderr, console) = (output.pipe()?, output.pipe()?, output.pipe()?);
        let stdin = File::open("/dev/null")?;
        let not_started =
            |error: &dyn std::error::Error| CommandFailure::NotStarted(error.to_string());
        let settings = self.settings();
        let egress = Egress { allow: task.egress.to_vec(), ..Egress::default() }.policy();
        let parent =
            start_parent(console, self.options.weak_limits).map_err(|error| not_started(&error))?;
        let spec = StartSpec {
            program: None,
            argv: task.arguments.clone(),
            env: self.environment(),
            cwd: task.cwd.into(),
            hostname: "build".into(),
            uid: 0,
            gid: 0,
            port: 0,
            entry_signal: 0,
            cpus: thread::available_parallelism().map_or(1, |count| count.get() as u32),
            memory_limit: settings.memory.bytes(),
            process_limit: BUILD_PROCESSES,
            cpu_time_limit: None,
            flags: thaw_home::debug::flags(),
            rootfs: self.rootfs(task)?,
            egress: egress.clone(),
            mounts: self.mounts(task)?,
            stdio: [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
            window: None,
        };
        let zygote = parent.create().map_err(|error| not_started(&error))?;
        let mut sandbox = zygote.start(&spec).map_err(|error| not_started(&error))?;
        drop((stdout, stderr));
        let mut flow = Flow::Calm;
        loop {
            let patience = match flow {
                Flow::Calm => TICK,
                Flow::Flood => TICK_IN_A_FLOOD,
            };
            let event = sandbox.wait_event(Some(patience))?;
            flow = output.pass_on(on_event);
            if let Some(end) = end_of(&sandbox, event) {
                let end = end.map_err(CommandFailure::explained);
                let events = sandbox.take_egress_events();
                note_denials(&events, "`egress` in [build]", on_event);
                return end;
            }
            if Instant::now() >= deadline {
                return Err(CommandFailure::TimedOut(task.timeout));
            }
        }
    }

    /// The tools of this host, as a root file system.
    fn rootfs(&self, task: &Task<'_>) -> io::Result<Rootfs> {
        let operators = &self.options.tools;
        let shown: Vec<PathBuf> = TOOLS
            .iter()
            .map(PathBuf::from)
            .chain(operators.iter().cloned())
            .chain(task.shown.iter().cloned())
            .collect();
        let policy = self.policy(Path::new("/"));
        let tools = HostDirectory::open_part(Path::new("/"), &shown, &policy)?;
        Ok(Rootfs::HostDirectory(Arc::new(tools)))
    }

    /// How `directory` is served. The caller's rights are the measure, since its own
    /// directories are written to; Thaw's state is not seen but for what is bound of it.
    /// Root builds in directories of other users: the home's, and the author's.
    fn policy(&self, directory: &Path) -> HostPolicy {
        let state = self.home.root();
        let hidden = if directory.starts_with(state) { Vec::new() } else { vec![state.to_owned()] };
        HostPolicy {
            rights: FileRights::Caller,
            hidden,
            in_place_of_owner: true,
            ..HostPolicy::default()
        }
    }

    /// What is written elsewhere, such as in `/tmp`, stays in the sandbox's memory.
    fn mounts(&self, task: &Task<'_>) -> io::Result<Vec<Mount>> {
        let bind = |host: &Path, at: &OsStr, access| {
            let found = self.reach(host, beneath::find_without_links)?;
            let directory = BoundDirectory::of_opened(found.into(), access, &self.policy(host))?;
            Ok::<_, io::Error>(Mount { at: at.into(), kind: MountKind::Bind(directory) })
        };
        let home = self.kept("home")?;
        let mut mounts = vec![bind(&home, SANDBOX_HOME.as_ref(), BoundAccess::Write)?];
        for (directory, access) in &task.bound {
            mounts.push(bind(directory, directory.as_os_str(), *access)?);
        }
        Ok(mounts)
    }

    /// Opens a directory of this build: one that is kept from build to build, or one of the function's.
    ///
    /// # Errors
    /// There is a link in the place of a part of its path, or it is kept and belongs to a third user.
    pub fn open(&self, directory: &Path) -> io::Result<File> {
        self.reach(directory, beneath::open_without_links)
    }

    /// Opens a directory of this build, whose path had no links when the build began: those of the
    /// author's and of the home's were followed then. Root may build for others, who could put a link in
    /// the place of a part of the path at any time, so none is followed now.
    fn reach(&self, directory: &Path, open: Opening) -> io::Result<File> {
        let work = self.home.root().join("work");
        let is_kept = directory.starts_with(&work);
        let root = if is_kept { self.home.root() } else { Path::new("/") };
        let inside = directory.strip_prefix(root).map_err(io::Error::other)?;
        let opened = open(root, inside).map_err(|error| match beneath::is_by_link(&error) {
            true => io::Error::other(format!(
                "a link has taken the place of a part of {}, and no build goes through it: put the \
                 directory back",
                directory.display()
            )),
            false => io::Error::new(error.kind(), format!("{}: {error}", directory.display())),
        })?;
        if is_kept {
            self.check_owner(&opened, directory)?;
        }
        Ok(opened)
    }

    /// Refuses a directory of somebody who is neither the home's owner nor this user.
    fn check_owner(&self, opened: &File, directory: &Path) -> io::Result<()> {
        let home = beneath::find_without_links(self.home.root(), Path::new(""))?.metadata()?.uid();
        let owner = opened.metadata()?.uid();
        match owner == home || owner == geteuid().as_raw() {
            true => Ok(()),
            false => Err(io::Error::other(format!(
                "{} belongs to user {owner}, and {} to user {home}: remove it, and build again",
                directory.display(),
                self.home.root().display()
            ))),
        }
    }

    /// A directory of the function that is kept from build to build.
    pub fn kept(&self, name: &str) -> io::Result<PathBuf> {
        let kept = self.home.kept(self.config.name.as_str(), name);
        kept.map_err(|error| io::Error::other(error.to_string()))
    }

    fn environment(&self) -> Vec<OsString> {
        let set = |name: &str, value: &OsStr| {
            let mut variable = OsString::from(format!("{name}="));
            variable.push(value);
            variable
        };
        let mut variables = vec![
            set("PATH", &self.search_path()),
            set("HOME", SANDBOX_HOME.as_ref()),
            set("LANG", "C.UTF-8".as_ref()),
            set("TERM", "dumb".as_ref()),
        ];
        // Its `cargo` looks for the toolchains below its home directory, which is another one here.
        if let Some(rustup) = self.tools().find(|tools| tools.join("toolchains").is_dir()) {
            variables.push(set("RUSTUP_HOME", rustup.as_os_str()));
        }
        for name in PASSED_ON {
            if let Some(value) = std::env::var_os(name) {
                variables.push(set(name, &value));
            }
        }
        variables
    }

    /// The operator's search path as far as the sandbox sees it, then the usual one.
    pub fn search_path(&self) -> OsString {
        let own = std::env::var_os("PATH").unwrap_or_default();
        let is_seen = |directory: &PathBuf| {
            let mut tools = TOOLS.iter().map(Path::new).chain(self.tools());
            tools.any(|tools| directory.starts_with(tools))
        };
        let usual = std::env::split_paths(DEFAULT_PATH);
        let mut all: Vec<PathBuf> = Vec::new();
        for directory in std::env::split_paths(&own).filter(is_seen).chain(usual) {
            if !all.contains(&directory) {
                all.push(directory);
            }
        }
        // Parts of a search path can be joined again.
        std::env::join_paths(all).unwrap_or_else(|_| DEFAULT_PATH.into())
    }

    fn tools(&self) -> impl Iterator<Item = &Path> {
        self.options.tools.iter().map(PathBuf::as_path)
    }

    /// Runs a command on the host, with all rights and variables of this process.
    fn run_on_host(
        &self,
        task: &Task<'_>,
        output: &mut Output,
        on_event: &mut OnEvent<'_>,
    ) -> Result<(), CommandFailure> {
        let deadline = Instant::now() + task.timeout;
        let mut command = Command::new(&task.arguments[0]);
        command.args(&task.arguments[1..]).current_dir(task.cwd).stdin(Stdio::null());
        command.stdout(output.pipe()?).stderr(output.pipe()?);
        let mut child = command.spawn()?;
        // The command holds write ends, too.
        drop(command);
        loop {
            output.wait(TICK)?;
            output.pass_on(on_event);
            // What it has started in the background may print on.
            if let Some(status) = child.try_wait()? {
                return of_status(status);
            }
            if Instant::now() >= deadline {
                child.kill()?;
                child.wait()?;
                return Err(CommandFailure::TimedOut(task.timeout));
            }
        }
    }
}

/// How the command has ended, if it has.
fn end_of(sandbox: &Sandbox, event: Option<Event>) -> Option<Result<(), CommandFailure>> {
    let ended = |how: String| Some(Err(CommandFailure::Ended(how)));
    match event? {
        Event::Exit(GuestExit::Code(0)) => Some(Ok(())),
        Event::Exit(GuestExit::Code(code)) => ended(format!("with exit code {code}")),
        Event::Exit(GuestExit::Signal(signal)) => ended(format!("by signal {signal}")),
        Event::Failed(reason) => Some(Err(CommandFailure::NotStarted(reason))),
        Event::Violation(violation) => ended(format!("because {violation}")),
        Event::Hangup => ended(died(sandbox.wait())),
        _ => None,
    }
}

/// How the process of a sandbox ended that did not say so itself.
fn died(status: ExitStatus) -> String {
    match status.signal() {
        Some(libc::SIGKILL) => {
            "by signal 9: it reached its limit of memory, see `memory` in [build], or somebody \
             killed it"
                .to_owned()
        }
        _ => format!("unexpectedly ({status})"),
    }
}

fn of_status(status: ExitStatus) -> Result<(), CommandFailure> {
    match (status.code(), status.signal()) {
        (Some(0), _) => Ok(()),
        (Some(code), _) => Err(CommandFailure::Ended(format!("with exit code {code}"))),
        (None, signal) => {
            Err(CommandFailure::Ended(format!("by signal {}", signal.unwrap_or_default())))
        }
    }
}

/// Says what a program wanted to connect to and was not allowed to, and which `rules` allow it.
pub(super) fn note_denials(events: &EgressEvents, rules: &str, on_event: &mut OnEvent<'_>) {
    for denied in &events.recent {
        on_event(BuildEvent::Note(&format!(
            "it may not connect to {denied}; if it should, add the destination to {rules} of \
             thaw.toml"
        )));
    }
    for failure in &events.failures {
        on_event(BuildEvent::Note(&format!("could not look up {failure}")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{chown, symlink};

    /// Directories of a build that root makes for the owner of the home.
    struct Place {
        all: tempfile::TempDir,
        home: Home,
        config: FunctionConfig,
        options: BuildOptions,
    }

    impl Place {
        fn new() -> Self {
            let all = tempfile::tempdir().unwrap();
            let path = all.path().canonicalize().unwrap();
            for directory in ["home", "up/project", "victim/project", "victim/packages"] {
                fs::create_dir_all(path.join(directory)).unwrap();
            }
            let text = "name = \"f\"\ncommand = [\"x\"]\nrootfs = \"./r\"\nport = 81\n";
            let config = FunctionConfig::parse("thaw.toml".as_ref(), text).unwrap();
            let home = Home::at(path.join("home")).unwrap();
            Self { all, home, config, options: BuildOptions::default() }
        }

        fn path(&self, path: &str) -> PathBuf {
            self.all.path().canonicalize().unwrap().join(path)
        }

        fn commands(&self) -> Commands<'_> {
            let (home, config, options) = (&self.home, &self.config, &self.options);
            Commands { home, directory: Path::new("/"), config, options }
        }

        /// How many mounts a command has that may write in `directory`, or why it has none.
        fn mounts(&self, directory: &Path) -> Result<usize, String> {
            let mounts = self.commands().mounts(&Task {
                from: "test",
                arguments: Vec::new(),
                cwd: Path::new("/"),
                egress: &[],
                shown: Vec::new(),
                bound: vec![(directory, BoundAccess::Write)],
                timeout: ANSWER_TIMEOUT,
            });
            mounts.map(|mounts| mounts.len()).map_err(|error| error.to_string())
        }
    }

    #[test]
    fn a_link_in_the_place_of_a_part_of_the_path_is_not_followed() {
        let place = Place::new();
        let kept = place.home.kept("f", "packages").unwrap();
        let project = place.path("up/project");
        assert_eq!((place.mounts(&kept), place.mounts(&project)), (Ok(2), Ok(2)));
        // After the build has looked at them, as somebody else does who owns what is above.
        fs::remove_dir(&kept).unwrap();
        symlink(place.path("victim/packages"), &kept).unwrap();
        fs::rename(place.path("up"), place.path("away")).unwrap();
        symlink(place.path("victim"), place.path("up")).unwrap();
        for directory in [&kept, &project] {
            let path = directory.display();
            let refused = format!(
                "a link has taken the place of a part of {path}, and no build goes through it: put the \
                 directory back"
            );
            assert_eq!(place.mounts(directory), Err(refused));
        }
        // The same one level higher, where the home directory of builds lies, too.
        fs::rename(place.path("home/work"), place.path("home/work-")).unwrap();
        fs::create_dir_all(place.path("victim/f/home")).unwrap();
        symlink(place.path("victim"), place.path("home/work")).unwrap();
        let home = place.path("home/work/f/home");
        for open in [beneath::find_without_links, beneath::open_without_links] {
            let refused = place.commands().reach(&home, open).unwrap_err().to_string();
            assert!(refused.starts_with("a link has taken the place"), "{refused}");
        }
    }

    #[test]
    fn directories_of_a_third_user_are_not_used() {
        let place = Place::new();
        let kept = place.home.kept("f", "packages").unwrap();
        if !geteuid().is_root() {
            return;
        }
        chown(&kept, Some(4711), None).unwrap();
        assert!(place.mounts(&kept).unwrap_err().contains("belongs to user 4711"));
        chown(place.home.root(), Some(4711), None).unwrap();
        // It is the home's owner's then.
        chown(place.home.root(), Some(4711), None).unwrap();
        place.commands().open(&kept).unwrap();
    }
}
