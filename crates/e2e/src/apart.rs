//! A monitor and a daemon that are started apart from each other, as two units of systemd's do.

use crate::{User, repository, request_local, run, skip, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;

/// A file of `contrib/systemd`.
pub fn unit(name: &str) -> String {
    let path = repository().join("contrib/systemd").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The value of a setting that a unit has once.
pub fn setting(unit: &str, name: &str) -> String {
    let mut values = unit.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    let value = values.next().unwrap_or_else(|| panic!("no {name}=")).to_owned();
    assert_eq!(values.next(), None, "{name}= twice");
    value
}

/// A process in the background, killed when this is dropped or the test process dies.
#[derive(Debug)]
pub struct Background {
    child: Child,
    log: PathBuf,
}

impl Background {
    /// Starts a command that writes to this file.
    pub fn start(command: &mut Command, log: PathBuf) -> Self {
        Self::start_with(command, Stdio::null(), log)
    }

    /// The same with a standard input.
    fn start_with(command: &mut Command, stdin: Stdio, log: PathBuf) -> Self {
        let stderr = File::create(&log).expect("a log file");
        let stdout = stderr.try_clone().expect("a descriptor");
        let child = command.stdin(stdin).stdout(stdout).stderr(stderr).spawn();
        Self { child: child.expect("it starts"), log }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has written so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Ends it as a service manager does; its exit code.
    pub fn stop(&mut self) -> Option<i32> {
        self.signal(Signal::TERM);
        self.wait()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
    }

    /// Waits for its end; its exit code.
    pub fn wait(&mut self) -> Option<i32> {
        self.child.wait().expect("our child").code()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{}:\n{}", self.log.display(), self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A home, the copy of `thaw` that its owner may execute, and a socket's directory.
#[derive(Debug)]
pub struct Apart {
    directory: tempfile::TempDir,
    user: User,
    /// The daemon's user id.
    pub uid: u32,
    /// The daemon's group id.
    pub gid: u32,
}

impl Apart {
    /// With a copy of a built home. `None` where this user has no privileges to be separated.
    pub fn of(built: impl FnOnce() -> PathBuf) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skip("only root has rights that a monitor could keep");
            return None;
        }
        let built = built();
        // Nobody but root can look for it in root's directories.
        let directory = tempfile::Builder::new().prefix("thaw-units-").tempdir().expect("/tmp");
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(directory.path(), mode).expect("its mode");
        let home = directory.path().join("home");
        let copied = run(Command::new("cp").arg("-a").args([&built, &home]));
        assert_eq!(copied.code, Some(0), "{}", copied.stderr);
        let (uid, gid) = (54_321, 54_322);
        let given = run(Command::new("chown").arg("-R").arg(format!("{uid}:{gid}")).arg(&home));
        assert_eq!(given.code, Some(0), "{}", given.stderr);
        Some(Self { directory, user: User::nobody(), uid, gid })
    }

    /// A directory of root's that all may read.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The home that is served.
    pub fn home(&self) -> PathBuf {
        self.directory.path().join("home")
    }

    /// The monitor's socket.
    pub fn socket(&self) -> String {
        self.directory.path().join("monitor.sock").to_string_lossy().into_owned()
    }

    /// The program, where its user may execute it.
    pub fn thaw(&self) -> PathBuf {
        self.user.thaw().get_program().into()
    }

    /// A monitor with the capabilities of its unit.
    pub fn monitor(&self, arguments: &[&str]) -> Command {
        let rights = setting(&unit("thaw-monitor.service"), "CapabilityBoundingSet");
        let kept: String =
            rights.split(' ').map(|right| format!(",+{}", right.to_lowercase())).collect();
        let kept = kept.replace("cap_", "");
        let mut command = Command::new("setpriv");
        command.arg(format!("--bounding-set=-all{kept}")).args(["--inh-caps=-all"]);
        command.args(["--pdeathsig", "KILL"]).arg(self.thaw()).arg("monitor").args(arguments);
        command.arg("--weak-limits");
        command.env("THAW_HOME", self.home()).env_remove("THAW_TRACE");
        command
    }

    /// Starts a monitor that listens on a free port.
    pub fn start_monitor(&self) -> Background {
        self.start_monitor_with(&[])
    }

    /// The same with further arguments.
    pub fn start_monitor_with(&self, more: &[&str]) -> Background {
        let socket = self.socket();
        let arguments = [&["--socket", &socket, "--listen", "127.0.0.1:0"], more].concat();
        self.start_as_monitor(&mut self.monitor(&arguments), "monitor.log")
    }

    /// A monitor whose service manager has a socket for it (sd_listen_fds(3)).
    pub fn start_activated_monitor(&self, listener: &TcpListener, name: &str) -> Background {
        let monitor = self.monitor(&["--socket", &self.socket()]);
        // Its standard input is the only one that no other test's child can inherit, too.
        let script = "export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$@\" 3<&0 </dev/null";
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh"]);
        command.arg(monitor.get_program()).args(monitor.get_args());
        for (variable, value) in monitor.get_envs() {
            match value {
                Some(value) => command.env(variable, value),
                None => command.env_remove(variable),
            };
        }
        let listener = listener.try_clone().expect("a descriptor");
        self.await_monitor(&mut command, OwnedFd::from(listener).into(), name)
    }

    /// Starts a command that is a monitor, and waits until it waits for a daemon.
    pub fn start_as_monitor(&self, command: &mut Command, name: &str) -> Background {
        self.await_monitor(command, Stdio::null(), name)
    }

    fn await_monitor(&self, command: &mut Command, stdin: Stdio, name: &str) -> Background {
        let log = self.directory.path().join(name);
        let monitor = Background::start_with(command, stdin, log);
        wait_until("the monitor waits", || monitor.log().contains("waiting for a daemon"));
        monitor
    }

    /// A command of a user with these ids and no rights.
    pub fn as_user(&self, uid: u32, gid: u32) -> Command {
        let mut command = Command::new("setpriv");
        command.arg(format!("--reuid={uid}")).arg(format!("--regid={gid}"));
        command.args(["--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]);
        command.arg("--no-new-privs").current_dir("/");
        command
    }

    /// The command of a daemon.
    pub fn daemon(&self) -> Command {
        let mut command = self.as_user(self.uid, self.gid);
        command.arg(self.thaw()).args(["serve", "--monitor", &self.socket()]);
        command
    }

    /// Starts a daemon, and waits until it serves.
    pub fn start_daemon(&self, name: &str) -> Background {
        self.start_as_daemon(&mut self.daemon(), name)
    }

    /// The same by a command of one's own.
    pub fn start_as_daemon(&self, command: &mut Command, name: &str) -> Background {
        let log = self.directory.path().join(name);
        let daemon = Background::start(command, log);
        wait_until("the daemon serves", || daemon.log().contains(" functions on http://"));
        daemon
    }

    /// The address of a daemon's gateway.
    pub fn gateway(&self, daemon: &Background) -> SocketAddr {
        let log = daemon.log();
        let (_, rest) = log.split_once("http://").expect("an address");
        rest.split_once(',').expect("its end").0.parse().expect("an address")
    }

    /// The instances that there are.
    ///
    /// # Panics
    /// No daemon answers.
    pub fn instances(&self) -> Vec<Value> {
        let all = request_local(&self.home().join("admin.sock"), "/instances").expect("an answer");
        all.json().as_array().expect("a list").clone()
    }
}
