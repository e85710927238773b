//! The units of `contrib/systemd`, and the two processes that two of them start apart: a
//! monitor with the rights that its unit leaves to it, and a daemon that has none.

use std::fs;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;
use thaw_e2e::{
    Apart, Function, Outcome, built_home, changed_kernel, children, descendants, exists, get, kill,
    request_local, run, run_within, setting, skip, unit, wait_until,
};

/// Where the units say that `thaw` is.
const INSTALLED: &str = "/usr/local/bin/thaw";
const UNITS: [&str; 4] =
    ["thaw.service", "thaw-monitor.service", "thaw.socket", "thaw-user.service"];

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
    // It looks at other units of the machine, too.
    let is_of_others = |line: &&str| line.starts_with('/') && !line.contains("thaw");
    let said: Vec<_> = outcome.stderr.lines().filter(|line| !is_of_others(line)).collect();
    assert_eq!((outcome.code, said), (Some(0), vec![]), "{outcome:?}");
}

/// A restart leaves what lives to the next daemon, and a stop ends it.
#[test]
fn the_daemons_unit_tells_a_restart_from_a_stop() {
    let unit = unit("thaw.service");
    assert_eq!(setting(&unit, "RestartKillSignal"), "SIGTERM");
    assert_eq!(setting(&unit, "KillSignal"), "SIGINT");
}

/// On a machine with the package, a user's daemon finds its address free.
#[test]
fn a_users_unit_has_another_address_than_the_machines() {
    let machines = unit("thaw.socket");
    let users = unit("thaw-user.service");
    let command = setting(&users, "ExecStart");
    let (_, address) = command.split_once("--listen ").expect("an address");
    assert_ne!(address.trim(), setting(&machines, "ListenStream"));
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

/// `None` where this user has no privileges to be separated.
fn node() -> Option<Apart> {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    let built = || HOME.get_or_init(|| built_home("units", &[Function::Example("hello-c")]));
    Apart::of(|| built().clone())
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
    let Some(node) = node() else { return };
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
    wait_until("there are some", || !children(monitor.pid()).is_empty());
    assert_eq!(daemon.stop(), Some(0));
    assert_eq!(monitor.stop(), Some(0));
    assert!(!Path::new(&node.socket()).exists());
}

#[test]
fn clients_wait_for_the_next_daemon() {
    let Some(node) = node() else { return };
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
    let Some(node) = node() else { return };
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
    // No sandbox has it. What the monitor has just forked has its descriptors for a moment.
    let inode = fs::read_link(format!("/proc/self/fd/{}", listener.as_raw_fd())).expect("a socket");
    wait_until("no sandbox has the listener", || {
        let has_it = |pid| {
            let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten();
            let links = descriptors.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
            links.into_iter().any(|link| link == inode)
        };
        !descendants(monitor.pid()).into_iter().any(|process| has_it(process.pid))
    });
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
    let Some(node) = Apart::of(|| built_home("units-upgrade", &[function])) else { return };
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
    wait_until("it says so", || second.log().contains("an image of an older build"));
}

#[test]
fn a_daemon_ends_with_its_monitor() {
    let Some(node) = node() else { return };
    let monitor = node.start_monitor();
    let mut daemon = node.start_daemon("daemon.log");
    wait_until("there are zygotes", || descendants(monitor.pid()).len() > 2);
    let all = descendants(monitor.pid());
    kill(monitor.pid());
    wait_until("the daemon has ended", || !exists(daemon.pid()) || is_zombie(daemon.pid()));
    assert_eq!(daemon.wait(), Some(1));
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
    let Some(node) = node() else { return };
    let socket = node.socket();
    let monitor = node.start_monitor();
    // The host lets root in, and the monitor sends it away.
    let root = run(Command::new("/usr/bin/python3").args(["-c", STRANGER, &socket]));
    assert!(root.stdout.starts_with("0\n"), "{root:?}");
    wait_until("it says so", || monitor.log().contains("sent away a process of user id 0"));
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
    let Some(node) = node() else { return };
    let _monitor = node.start_monitor();
    let daemon = node.start_daemon("daemon.log");
    let second = run_within(Duration::from_secs(60), &mut node.daemon(), b"");
    assert_eq!(second.code, Some(1), "{second:?}");
    assert!(second.stderr.contains("serves another daemon"), "{second:?}");
    assert_eq!(get(node.gateway(&daemon), "hello-c", "/").status, 200);
    // Neither can there be two monitors of a home.
    let beside = node.directory().join("other.sock");
    let second = run(&mut node.monitor(&["--socket", &beside.to_string_lossy()]));
    assert!(second.stderr.contains("another daemon already serves"), "{second:?}");
}

#[test]
fn a_monitors_socket_is_in_a_directory_of_roots() {
    let Some(node) = node() else { return };
    let open = node.directory().join("open");
    fs::create_dir(&open).expect("a directory");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).expect("its mode");
    let socket = open.join("monitor.sock");
    let outcome = run(&mut node.monitor(&["--socket", &socket.to_string_lossy()]));
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains("others than root may write to"), "{outcome:?}");
    // A file is not replaced.
    let file = node.directory().join("file");
    fs::write(&file, "content").expect("a file");
    let outcome = run(&mut node.monitor(&["--socket", &file.to_string_lossy()]));
    assert!(outcome.stderr.contains("cannot make the monitor's socket"), "{outcome:?}");
    assert_eq!(fs::read_to_string(&file).expect("still there"), "content");
}

#[test]
fn a_daemon_without_a_monitor_says_so() {
    let Some(node) = node() else { return };
    let outcome = run_within(Duration::from_secs(60), &mut node.daemon(), b"");
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains("no monitor listens on"), "{outcome:?}");
}
