//! A `thaw serve` for tests, which never outlives them.

use crate::binary::{thaw, thaw_binary};
use crate::http::{Response, request_local};
use crate::outcome::{Outcome, run};
use crate::processes::{Process, children, descendants, exists, kill};
use crate::user::User;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::cell::RefCell;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long the daemon may take to start, and to stop.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the daemon until standard input ends: the test process holds the other
/// end, so that the daemon ends even if the test process is killed.
const LIFELINE: &str = r#"
exec 3<&0
"$@" </dev/null 3<&- &
daemon=$!
cat <&3 >/dev/null
kill -TERM $daemon 2>/dev/null
wait $daemon
"#;

/// How to start a daemon.
#[derive(Clone, Debug, Default)]
pub struct DaemonOptions {
    /// Further arguments of `thaw serve`.
    pub arguments: Vec<String>,
}

/// The shell around a daemon; its end is the daemon's.
#[derive(Debug)]
struct Lifeline {
    shell: Child,
    stdin: Option<ChildStdin>,
}

impl Lifeline {
    /// Starts `command` in the shell.
    fn start(home: &Path, command: &[String], log: &Path, user: Option<&User>) -> Self {
        let stderr = File::create(log).expect("a log file");
        let stdout = stderr.try_clone().expect("a descriptor");
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", LIFELINE, "thaw-lifeline"]).args(command).env("THAW_HOME", home);
        shell.env_remove("THAW_TRACE").stdin(Stdio::piped()).stdout(stdout).stderr(stderr);
        if let Some(user) = user {
            shell.uid(user.uid()).gid(user.gid()).current_dir(user.home());
        }
        let mut shell = shell.spawn().expect("a shell");
        let stdin = shell.stdin.take();
        Self { shell, stdin }
    }

    /// Whether the command has ended: the shell has started it before what waits for its input.
    fn is_idle(&self) -> bool {
        let children = children(self.shell.id());
        !children.is_empty() && children.iter().all(|child| child.name == "cat")
    }

    /// Ends the command with `SIGTERM`; its exit code, if it ends in time.
    fn cut(&mut self) -> Option<i32> {
        self.stdin = None;
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.shell.try_wait().expect("our child") {
                return status.code();
            }
            thread::sleep(Duration::from_millis(10));
        }
        None
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        self.stdin = None;
        let _ = self.shell.wait();
    }
}

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    lifeline: Lifeline,
    home: PathBuf,
    log: PathBuf,
    main: u32,
    pid: u32,
    gateway: SocketAddr,
    admin: PathBuf,
    admin_tcp: Option<SocketAddr>,
}

impl Daemon {
    /// Serves a home on free ports.
    pub fn start(home: &Path, options: &DaemonOptions) -> Self {
        match Self::try_start(home, options) {
            Ok(daemon) => daemon,
            Err(log) => panic!("thaw serve did not come up; it said:\n{log}"),
        }
    }

    /// Serves a home on free ports.
    ///
    /// # Errors
    /// It ended, or did not listen in time: what it said.
    pub fn try_start(home: &Path, options: &DaemonOptions) -> Result<Self, String> {
        Self::try_start_by(&[], None, home, options)
    }

    /// As [`Daemon::start`], by a program that changes something of its own process and then
    /// executes what its further arguments say.
    pub fn start_by(program: &[String], home: &Path, options: &DaemonOptions) -> Self {
        match Self::try_start_by(program, None, home, options) {
            Ok(daemon) => daemon,
            Err(log) => panic!("thaw serve did not come up; it said:\n{log}"),
        }
    }

    /// The same as another user, which takes root.
    ///
    /// # Errors
    /// It ended, or did not listen in time: what it said.
    pub fn try_start_as(
        user: Option<&User>,
        home: &Path,
        options: &DaemonOptions,
    ) -> Result<Self, String> {
        Self::try_start_by(&[], user, home, options)
    }

    fn try_start_by(
        program: &[String],
        user: Option<&User>,
        home: &Path,
        options: &DaemonOptions,
    ) -> Result<Self, String> {
        let log = home.with_extension("daemon.log");
        let thaw = user.map_or_else(|| thaw_binary().to_owned(), User::binary);
        let thaw = thaw.to_string_lossy().into_owned();
        let mut command = program.to_vec();
        command.extend([thaw, "serve".to_owned(), "--weak-limits".to_owned()]);
        command.extend(["--listen", "127.0.0.1:0"].map(str::to_owned));
        command.extend_from_slice(&options.arguments);
        let lifeline = Lifeline::start(home, &command, &log, user);
        let started = Instant::now();
        loop {
            if let Some(address) = address(home, lifeline.shell.id())
                && request_local(&address.admin, "/healthz").is_ok_and(|r| r.status == 200)
            {
                let Address { main, pid, gateway, admin, admin_tcp } = address;
                let home = home.to_owned();
                return Ok(Self { lifeline, home, log, main, pid, gateway, admin, admin_tcp });
            }
            if lifeline.is_idle() || started.elapsed() > PATIENCE {
                drop(lifeline);
                return Err(fs::read_to_string(&log).unwrap_or_default());
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// The shared gateway.
    pub fn gateway(&self) -> SocketAddr {
        self.gateway
    }

    /// The Unix socket of the admin API.
    pub fn admin_socket(&self) -> &Path {
        &self.admin
    }

    /// The admin API over TCP, if there is one.
    pub fn admin_tcp(&self) -> Option<SocketAddr> {
        self.admin_tcp
    }

    /// The daemon's process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The daemon that runs just now, of those that the monitor has started.
    pub fn live_pid(&self) -> Option<u32> {
        let is_daemon = |child: &Process| {
            let line = fs::read(format!("/proc/{}/cmdline", child.pid)).unwrap_or_default();
            line.ends_with(b"--monitored\0")
        };
        Some(children(self.main).into_iter().find(is_daemon)?.pid)
    }

    /// Kills the daemon as `kill -9` does, without its monitor, and waits until there is
    /// another that answers.
    pub fn kill_and_await_next(&mut self) {
        self.end_and_await_next(Signal::KILL);
    }

    /// The same with a signal that ends it.
    pub fn end_and_await_next(&mut self, signal: Signal) {
        let before = self.pid;
        let pid = Pid::from_raw(before as i32).expect("a process id");
        kill_process(pid, signal).expect("the daemon runs");
        wait_until("there is another daemon", || {
            let now = address(&self.home, self.lifeline.shell.id());
            now.is_some_and(|now| {
                now.pid != before
                    && request_local(&now.admin, "/healthz").is_ok_and(|r| r.status == 200)
            })
        });
        let now = address(&self.home, self.lifeline.shell.id()).expect("it has one");
        self.pid = now.pid;
    }

    /// The process that was started: the daemon's monitor, or where there is none, the
    /// daemon. All others are below it.
    pub fn main_pid(&self) -> u32 {
        self.main
    }

    /// The home that it serves.
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// What it has written.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The line of its log about a request that it has refused: a client is told only the id.
    #[track_caller]
    pub fn explain(&self, refused: &Response) -> String {
        let body = refused.json();
        let id = body["request_id"].as_str().unwrap_or_else(|| panic!("no id in {body}"));
        let deadline = Instant::now() + PATIENCE;
        loop {
            let log = self.log();
            if let Some(line) = log.lines().find(|line| line.contains(id)) {
                return line.to_owned();
            }
            assert!(Instant::now() < deadline, "nothing of request {id} in\n{log}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asks the admin API.
    #[track_caller]
    pub fn admin(&self, path: &str) -> Response {
        request_local(&self.admin, path)
            .unwrap_or_else(|error| panic!("admin {path}: {error}\n{}", self.log()))
    }

    /// The live instances of a function.
    pub fn instances(&self, function: &str) -> Vec<Value> {
        let all = self.admin("/instances").json();
        let of = |instance: &&Value| instance["function"] == function;
        all.as_array().expect("an array").iter().filter(of).cloned().collect()
    }

    /// The first live instance of a function, once there is one: a client that was answered may be
    /// earlier than the daemon's list.
    #[track_caller]
    pub fn first_instance(&self, function: &str) -> Value {
        self.listed(function).swap_remove(0)
    }

    /// The live instances of a function, once there are any.
    #[track_caller]
    fn listed(&self, function: &str) -> Vec<Value> {
        let found = RefCell::default();
        wait_until(&format!("an instance of {function} is listed"), || {
            let instances = self.instances(function);
            let is_listed = !instances.is_empty();
            found.replace(instances);
            is_listed
        });
        found.into_inner()
    }

    /// Waits until a function has instances awake, and all of them would outlive this daemon: they are
    /// kept for the next one when they are a fraction of a second old.
    #[track_caller]
    pub fn wait_until_kept(&self, function: &str) {
        wait_until("they are kept for the next daemon", || {
            let all = self.instances(function);
            let mut awake = all.iter().filter(|one| one["state"] != "asleep").peekable();
            awake.peek().is_some() && awake.all(|one| !one["kept"].is_null())
        });
    }

    /// Number, process id and state of the only live instance of a function, once there is one, as
    /// with [`Daemon::first_instance`].
    #[track_caller]
    pub fn instance(&self, function: &str) -> (u64, u32, String) {
        let instances = self.listed(function);
        let [only] = &instances[..] else { panic!("{instances:?}\n{}", self.log()) };
        let number = |name: &str| only[name].as_u64().expect("a number");
        (number("id"), number("pid") as u32, only["state"].as_str().expect("a state").to_owned())
    }

    /// All processes besides the daemon and its monitor: the zygote parent, zygotes,
    /// instances, helpers.
    pub fn sandboxes(&self) -> Vec<Process> {
        descendants(self.main).into_iter().filter(|process| process.pid != self.pid).collect()
    }

    /// Sends a signal to the process that was started.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.main as i32).expect("a process id");
        kill_process(pid, signal).expect("the daemon runs");
    }

    /// Kills the process that was started as `kill -9` does, and waits until it is gone,
    /// and the daemon with it.
    pub fn kill(&self) {
        kill(self.main);
        wait_until("the daemon is gone", || !exists(self.main) && !exists(self.pid));
    }

    /// Asks the daemon to stop and returns its exit code, if it does in time.
    pub fn stop(mut self) -> Option<i32> {
        self.lifeline.cut()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("the daemon's log:\n{}", self.log());
        }
        kill(self.main);
    }
}

/// What `daemon.json` says.
struct Address {
    main: u32,
    pid: u32,
    gateway: SocketAddr,
    admin: PathBuf,
    admin_tcp: Option<SocketAddr>,
}

/// How the daemon that `shell` has started is reached.
fn address(home: &Path, shell: u32) -> Option<Address> {
    let text = fs::read(home.join("daemon.json")).ok()?;
    let value: Value = serde_json::from_slice(&text).ok()?;
    let pid = value["pid"].as_u64()? as u32;
    let parent = |pid| Some(crate::processes::process(pid)?.parent);
    let main = [pid, parent(pid)?].into_iter().find(|&pid| parent(pid) == Some(shell))?;
    let socket = |key: &str| value[key].as_str()?.parse().ok();
    let admin = PathBuf::from(value["admin"].as_str()?.strip_prefix("unix:")?);
    Some(Address { main, pid, gateway: socket("gateway")?, admin, admin_tcp: socket("admin_tcp") })
}

/// Waits until something holds.
///
/// # Panics
/// It does not within a minute.
#[track_caller]
pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Runs `thaw` for a home.
pub fn call(home: &Path, arguments: &[&str]) -> Outcome {
    run(thaw().args(arguments).env("THAW_HOME", home))
}

/// The same, which has to succeed; what it has printed.
#[track_caller]
pub fn ok(home: &Path, arguments: &[&str]) -> String {
    call(home, arguments).success()
}

/// Pauses a sandbox, and waits until it has given up its memory.
///
/// # Panics
/// It is not paused, or keeps its memory for a minute.
#[track_caller]
pub fn pause_until_hibernated(home: &Path, name: &str) {
    ok(home, &["sandbox", "pause", name]);
    let shown = || ok(home, &["sandbox", "show", name, "--json"]);
    let state = || serde_json::from_str::<Value>(&shown()).expect("JSON")["state"].clone();
    wait_until(&format!("{name} is hibernated"), || state() == "hibernated");
}

/// A Python script that begins as `script` does, which forks a process `pid` that is a daemon of
/// `home` soon: it tells the daemon to end when that serves, and prints how it ended. Three minutes are
/// enough for all of it.
pub fn ending_once_it_serves(script: &str) -> String {
    format!("{script}{ENDING}")
}

const ENDING: &str = r#"
until = time.monotonic() + 180
while not os.path.exists(f"{home}/daemon.json") and time.monotonic() < until:
    time.sleep(0.01)
os.kill(pid, signal.SIGTERM)
while time.monotonic() < until:
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
        print(os.waitstatus_to_exitcode(status))
        sys.exit()
    time.sleep(0.01)
os.kill(pid, signal.SIGKILL)
print("it did not end")
"#;
