//! The units of `contrib/systemd`, and the two processes that two of them start apart: a
//! monitor with the rights that its unit leaves to it, and a daemon that has none.

use rustix::io::{FdFlags, fcntl_setfd};
use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;
use thaw_e2e::{
    Function, Outcome, User, built_home, changed_kernel, children, descendants, exists, get, kill,
    repository, request_local, run, run_within, skip, wait_until,
};

/// Where the units say that `thaw` is.
const INSTALLED: &str = "/usr/local/bin/thaw";
const UNITS: [&str; 4] =
    ["thaw.service", "thaw-monitor.service", "thaw.socket", "thaw-user.service"];

fn unit(name: &str) -> String {
    let path = repository().join("contrib/systemd").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The value of a setting that a unit has once.
fn setting(unit: &str, name: &str) -> String {
    let mut values = unit.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    let value = values.next().unwrap_or_else(|| panic!("no {name}=")).to_owned();
    assert_eq!(values.next(), None, "{name}= twice");
    value
}

/// Asks `systemd-analyze` about the units; none without it, and without an installed `thaw`
/// another program takes its place.
fn analyze(arguments: &[&str], units: &[&str]) -> Option<Outcome> {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        skip("systemd-analyze is missing (Debian: systemd)");
        return None;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let mut command = Command::new("systemd-analyze");
    command.args(arguments);
    for name in UNITS {
        let path = directory.path().join(name);
        fs::write(&path, unit(name).replace(INSTALLED, "/bin/true")).expect("a copy");
        if units.contains(&name) {
            command.arg(path);
        }
    }
    Some(run(command.env("SYSTEMD_UNIT_PATH", format!("{}:", directory.path().display()))))
}

#[test]
fn the_units_have_no_mistakes() {
    let Some(outcome) = analyze(&["verify", "--man=no"], &UNITS) else { return };
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
}

/// The threshold is in tenths.
#[test]
fn the_daemons_unit_is_exposed_little() {
    let arguments = ["security", "--offline=true", "--threshold=19", "--no-pager"];
    let Some(outcome) = analyze(&arguments, &["thaw.service"]) else { return };
    assert_eq!(outcome.code, Some(0), "{}", outcome.stdout);
    assert_eq!(outcome.stderr, "");
}

#[test]
fn every_right_of_the_monitor_has_its_reason() {
    let unit = unit("thaw-monitor.service");
    let comments: Vec<&str> = unit.lines().filter(|line| line.starts_with('#')).collect();
    let rights = setting(&unit, "CapabilityBoundingSet");
    assert!(rights.split(' ').count() < 10, "{rights}");
    for right in rights.split(' ') {
        let is_reason = |line: &&&str| line.split([' ', ',']).any(|word| word == right);
        let reason = comments.iter().find(is_reason).unwrap_or_else(|| panic!("{right}"));
        assert!(reason.len() > right.len() + 20, "{reason}");
    }
}

/// A process in the background, killed when this is dropped or the test process dies.
struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    fn start(command: &mut Command, log: PathBuf) -> Self {
        let stderr = File::create(&log).expect("a log file");
        let stdout = stderr.try_clone().expect("a descriptor");
        let child = command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).spawn();
        Self { child: child.expect("it starts"), log }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Ends it as a service manager does; its exit code.
    fn stop(&mut self) -> Option<i32> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it runs");
        self.child.wait().expect("our child").code()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{}:\n{}", self.log.display(), self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A home, the copy of `thaw` that its owner may execute, and a socket's directory.
struct Node {
    directory: tempfile::TempDir,
    user: User,
    uid: u32,
    gid: u32,
}

impl Node {
    /// `None` where this user has no privileges to be separated.
    fn new() -> Option<Self> {
        static HOME: OnceLock<PathBuf> = OnceLock::new();
        Self::of(|| {
            HOME.get_or_init(|| built_home("units", &[Function::Example("hello-c")])).clone()
        })
    }

    /// The same with a copy of another home.
    fn of(built: impl FnOnce() -> PathBuf) -> Option<Self> {
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

    fn home(&self) -> PathBuf {
        self.directory.path().join("home")
    }

    fn socket(&self) -> String {
        self.directory.path().join("monitor.sock").to_string_lossy().into_owned()
    }

    fn thaw(&self) -> PathBuf {
        self.user.thaw().get_program().into()
    }

    /// A monitor with the capabilities of its unit.
    fn monitor(&self, arguments: &[&str]) -> Command {
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

    fn start_monitor(&self) -> Process {
        let arguments = ["--socket", &self.socket(), "--listen", "127.0.0.1:0"];
        self.start_as_monitor(&mut self.monitor(&arguments), "monitor.log")
    }

    /// A monitor whose service manager has a socket for it (sd_listen_fds(3)).
    fn start_activated_monitor(&self, listener: &TcpListener, name: &str) -> Process {
        fcntl_setfd(listener, FdFlags::empty()).expect("it can be inherited");
        let monitor = self.monitor(&["--socket", &self.socket()]);
        let script = "export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$@\" 3<&$0";
        let mut command = Command::new("sh");
        command.args(["-c", script, &listener.as_raw_fd().to_string()]);
        command.arg(monitor.get_program()).args(monitor.get_args());
        for (variable, value) in monitor.get_envs() {
            match value {
                Some(value) => command.env(variable, value),
                None => command.env_remove(variable),
            };
        }
        self.start_as_monitor(&mut command, name)
    }

    fn start_as_monitor(&self, command: &mut Command, name: &str) -> Process {
        let monitor = Process::start(command, self.directory.path().join(name));
        wait_until("the monitor waits", || monitor.log().contains("waiting for a daemon"));
        monitor
    }

    /// A command of a user with these ids and no rights.
    fn as_user(&self, uid: u32, gid: u32) -> Command {
        let mut command = Command::new("setpriv");
        command.arg(format!("--reuid={uid}")).arg(format!("--regid={gid}"));
        command.args(["--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]);
        command.arg("--no-new-privs").current_dir("/");
        command
    }

    fn daemon(&self) -> Command {
        let mut command = self.as_user(self.uid, self.gid);
        command.arg(self.thaw()).args(["serve", "--monitor", &self.socket()]);
        command
    }

    fn start_daemon(&self, name: &str) -> Process {
        self.start_as_daemon(&mut self.daemon(), name)
    }

    fn start_as_daemon(&self, command: &mut Command, name: &str) -> Process {
        let log = self.directory.path().join(name);
        let daemon = Process::start(command, log);
        wait_until("the daemon serves", || daemon.log().contains("serving 1 functions on"));
        daemon
    }

    fn gateway(&self, daemon: &Process) -> SocketAddr {
        let log = daemon.log();
        let (_, rest) = log.split_once("http://").expect("an address");
        rest.split_once(',').expect("its end").0.parse().expect("an address")
    }
}

#[track_caller]
fn status(pid: u32, field: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{field}:")));
    line.expect(field).trim().to_owned()
}

/// Also shows that the rights of the monitor's unit are enough.
#[test]
fn a_daemon_that_never_had_rights_serves() {
    let Some(node) = Node::new() else { return };
    let mut monitor = node.start_monitor();
    let mut daemon = node.start_daemon("daemon.log");
    let gateway = node.gateway(&daemon);
    assert_eq!(get(gateway, "hello-c", "/").status, 200, "{}", monitor.log());
    for field in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status(daemon.pid(), field), "0000000000000000", "{field}");
    }
    let uid = node.uid.to_string();
    assert!(status(daemon.pid(), "Uid").split_whitespace().all(|id| id == uid));
    assert_eq!(status(daemon.pid(), "Seccomp"), "2");
    // Sandboxes are the monitor's.
    assert_eq!(children(daemon.pid()).len(), 0);
    assert!(!children(monitor.pid()).is_empty());
    assert_eq!(daemon.stop(), Some(0));
    assert_eq!(monitor.stop(), Some(0));
    assert!(!Path::new(&node.socket()).exists());
}

#[test]
fn clients_wait_for_the_next_daemon() {
    let Some(node) = Node::new() else { return };
    let monitor = node.start_monitor();
    let first = node.start_daemon("first.log");
    let gateway = node.gateway(&first);
    assert_eq!(get(gateway, "hello-c", "/").status, 200);
    let sandboxes = descendants(monitor.pid());
    drop(first);
    let client = thread::spawn(move || get(gateway, "hello-c", "/").status);
    wait_until("what the first one had is gone", || {
        sandboxes.iter().all(|process| !exists(process.pid))
    });
    let second = node.start_daemon("second.log");
    assert_eq!(node.gateway(&second), gateway);
    assert_eq!(client.join().expect("a client"), 200);
}

/// As in an upgrade: the monitor is another process afterwards.
#[test]
fn clients_wait_for_the_next_monitor_if_systemd_has_the_socket() {
    let Some(node) = Node::new() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    let start = |number| {
        let monitor = node.start_activated_monitor(&listener, &format!("monitor-{number}.log"));
        let daemon = node.start_daemon(&format!("daemon-{number}.log"));
        assert_eq!(node.gateway(&daemon), address, "{}", monitor.log());
        (monitor, daemon)
    };
    let (mut monitor, mut daemon) = start(1);
    assert_eq!(get(address, "hello-c", "/").status, 200);
    assert!(!daemon.log().contains("clients wait there"), "{}", daemon.log());
    // No sandbox has it.
    let inode = fs::read_link(format!("/proc/self/fd/{}", listener.as_raw_fd())).expect("a socket");
    for process in descendants(monitor.pid()) {
        let Ok(descriptors) = fs::read_dir(format!("/proc/{}/fd", process.pid)) else { continue };
        let mut links = descriptors.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
        assert!(!links.any(|link| link == inode), "{}", process.pid);
    }
    assert_eq!(daemon.stop(), Some(0));
    assert_eq!(monitor.stop(), Some(0));
    let client = thread::spawn(move || get(address, "hello-c", "/").status);
    let (_monitor, _daemon) = start(2);
    assert_eq!(client.join().expect("a client"), 200);
}

/// An upgrade under live instances: the monitor stays, and the next daemon has another kernel.
#[test]
fn a_newer_daemon_goes_on_with_what_lives_under_the_monitor() {
    let function = Function::PythonVariant {
        program: "survivor",
        name: "survivor",
        keys: "isolation = \"instance\"\n[limits]\nkeep_alive = \"10m\"",
    };
    let Some(node) = Node::of(|| built_home("units-upgrade", &[function])) else { return };
    // In the linker's name of the build.
    let newer = changed_kernel(3, b"GNU\0", |id| id[0] = !id[0]);
    let path = node.home().join("newer.elf");
    fs::write(&path, newer).expect("a kernel");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("its mode");
    let count = |gateway| {
        let response = get(gateway, "survivor", "/count");
        assert_eq!(response.status, 200, "{}", response.text());
        response.text().trim().parse::<u32>().expect("a number")
    };

    let _monitor = node.start_monitor();
    let first = node.start_daemon("first.log");
    let gateway = node.gateway(&first);
    let counted = [count(gateway), count(gateway)];
    assert_eq!(counted[1], counted[0] + 1);
    // What is younger ends with its daemon.
    wait_until("it is kept for the next daemon", || {
        let instances = request_local(&node.home().join("admin.sock"), "/instances");
        !instances.expect("an answer").json()[0]["kept"].is_null()
    });
    drop(first);
    let second = node.start_as_daemon(node.daemon().env("THAW_KERNEL", &path), "second.log");
    assert_eq!(node.gateway(&second), gateway);
    assert!(second.log().contains("took over 1 of 1 instances"), "{}", second.log());
    assert_eq!(count(gateway), counted[1] + 1, "the same instance, with its memory");
    assert!(second.log().contains("an image of an older build"), "{}", second.log());
}

#[test]
fn a_daemon_ends_with_its_monitor() {
    let Some(node) = Node::new() else { return };
    let monitor = node.start_monitor();
    let mut daemon = node.start_daemon("daemon.log");
    wait_until("there are zygotes", || descendants(monitor.pid()).len() > 2);
    let all = descendants(monitor.pid());
    kill(monitor.pid());
    wait_until("the daemon has ended", || !exists(daemon.pid()) || is_zombie(daemon.pid()));
    assert_eq!(daemon.child.wait().expect("our child").code(), Some(1));
    assert!(daemon.log().contains("the monitor has ended"), "{}", daemon.log());
    wait_until("nothing is left", || all.iter().all(|process| !exists(process.pid)));
}

fn is_zombie(pid: u32) -> bool {
    status(pid, "State").starts_with('Z')
}

/// Connects, sends some bytes, and prints what comes back.
const STRANGER: &str = "\
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.settimeout(30)
s.connect(sys.argv[1])
print(len(s.recv(100000)), flush=True)
s.send(b'nonsense')
s.recv(10)
import time
time.sleep(30)
";

#[test]
fn nobody_but_the_daemons_user_has_the_monitor() {
    let Some(node) = Node::new() else { return };
    let socket = node.socket();
    let monitor = node.start_monitor();
    // The host lets root in, and the monitor sends it away.
    let root = run(Command::new("/usr/bin/python3").args(["-c", STRANGER, &socket]));
    assert!(root.stdout.starts_with("0\n"), "{root:?}");
    assert!(monitor.log().contains("sent away a process of user id 0"), "{}", monitor.log());
    // Others not even the host.
    let mut other = node.as_user(65_534, 65_534);
    let other = run(other.args(["/usr/bin/python3", "-c", STRANGER, &socket]));
    assert!(other.stderr.contains("PermissionError"), "{other:?}");
    for (uid, gid) in [(0, 0), (65_534, 65_534)] {
        let mut daemon = node.as_user(uid, gid);
        let outcome = run(daemon.arg(node.thaw()).args(["serve", "--monitor", &socket]));
        let wanted = format!("serves a daemon of user id {}", node.uid);
        assert_eq!(outcome.code, Some(1), "{outcome:?}");
        assert!(outcome.stderr.contains(&wanted), "{outcome:?}");
    }
    // One of the daemon's user that sends nonsense is ended, and the next is served.
    let mut nonsense = node.as_user(node.uid, node.gid);
    let nonsense = run(nonsense.args(["/usr/bin/python3", "-c", STRANGER, &socket]));
    assert_ne!(nonsense.stdout, "0\n", "{nonsense:?}");
    assert_eq!(nonsense.code, Some(128 + 9), "{nonsense:?}");
    let daemon = node.start_daemon("daemon.log");
    assert_eq!(get(node.gateway(&daemon), "hello-c", "/").status, 200);
}

#[test]
fn a_monitor_has_one_daemon_at_a_time() {
    let Some(node) = Node::new() else { return };
    let _monitor = node.start_monitor();
    let daemon = node.start_daemon("daemon.log");
    let second = run_within(Duration::from_secs(60), &mut node.daemon(), b"");
    assert_eq!(second.code, Some(1), "{second:?}");
    assert!(second.stderr.contains("serves another daemon"), "{second:?}");
    assert_eq!(get(node.gateway(&daemon), "hello-c", "/").status, 200);
    // Neither can there be two monitors of a home.
    let beside = node.directory.path().join("other.sock");
    let second = run(&mut node.monitor(&["--socket", &beside.to_string_lossy()]));
    assert!(second.stderr.contains("another daemon already serves"), "{second:?}");
}

#[test]
fn a_monitors_socket_is_in_a_directory_of_roots() {
    let Some(node) = Node::new() else { return };
    let open = node.directory.path().join("open");
    fs::create_dir(&open).expect("a directory");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).expect("its mode");
    let socket = open.join("monitor.sock");
    let outcome = run(&mut node.monitor(&["--socket", &socket.to_string_lossy()]));
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains("others than root may write to"), "{outcome:?}");
    // A file is not replaced.
    let file = node.directory.path().join("file");
    fs::write(&file, "content").expect("a file");
    let outcome = run(&mut node.monitor(&["--socket", &file.to_string_lossy()]));
    assert!(outcome.stderr.contains("cannot make the monitor's socket"), "{outcome:?}");
    assert_eq!(fs::read_to_string(&file).expect("still there"), "content");
}

#[test]
fn a_daemon_without_a_monitor_says_so() {
    let Some(node) = Node::new() else { return };
    let outcome = run_within(Duration::from_secs(60), &mut node.daemon(), b"");
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains("no monitor listens on"), "{outcome:?}");
}
