//! What each process of `thaw serve` may do, looked at from outside, and how the monitor
//! and the daemon live without each other.

use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Process, built_home, check_has_no_rights,
    check_sees_its_home_only, children, copy_home, descendants, descriptors, ending_once_it_serves,
    exists, free_privileged_port, get, has_controller, ids_of, kill, memory_limit_of,
    names_in_root, namespace, run, skip, status, wait_until,
};

const C: Function = Function::Example("hello-c");

/// A daemon of root's with a function, or `None` where this user has no privileges to be
/// separated.
fn daemon(label: &str) -> Option<Daemon> {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    daemon_of(label, || HOME.get_or_init(|| built_home("privileges", &[C])).clone())
}

fn daemon_of(label: &str, home: impl FnOnce() -> PathBuf) -> Option<Daemon> {
    if !rustix::process::geteuid().is_root() {
        skip("only root's daemon is another user than its monitor");
        return None;
    }
    let home = copy_home(&home(), &format!("privileges-{label}"));
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    assert_ne!(daemon.pid(), daemon.main_pid(), "there is no monitor:\n{}", daemon.log());
    Some(daemon)
}

/// The child of the monitor that makes the sandboxes, once it has made one: the first process of
/// a pid namespace. Launchers and helpers of the monitor's come and go beside it.
fn zygote_parent(daemon: &Daemon) -> Process {
    assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
    let is_parent = |process: &Process| {
        let text = fs::read_to_string(format!("/proc/{}/status", process.pid)).unwrap_or_default();
        let inside = text.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
        let inside: Vec<_> = inside.split_whitespace().collect();
        inside.len() > 1 && inside.last() == Some(&"1")
    };
    children(daemon.main_pid()).into_iter().find(is_parent).expect("a zygote parent")
}

#[test]
fn the_daemon_has_a_user_of_its_own_and_no_rights() {
    let Some(daemon) = daemon("daemon") else { return };
    assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
    let pid = daemon.pid();
    let owner = fs::metadata(daemon.home()).expect("the home");
    assert_ne!(owner.uid(), 0);
    let (uid, gid) = (owner.uid().to_string(), owner.gid().to_string());
    assert_eq!(status(pid, "Uid"), [&uid[..]; 4]);
    assert_eq!(status(pid, "Gid"), [&gid[..]; 4]);
    check_has_no_rights(pid);
    assert_eq!(status(pid, "Groups"), [""; 0]);
    // One for the list, and one for a call that is refused in another way.
    assert_eq!(status(pid, "Seccomp_filters"), ["2"]);
    // Its own zygote parent and sandboxes have others' ids.
    // A launcher of the monitor's is root until it has joined their user namespace.
    wait_until("all processes but two are somebody else's", || {
        descendants(daemon.main_pid()).iter().filter(|process| process.pid != pid).all(|process| {
            let ids = ids_of(process.pid);
            !ids.contains(&uid) && !ids.contains(&"0".to_owned())
        })
    });
    assert_eq!(daemon.stop(), Some(0));
}

/// What can be seen in the daemon's root directory, and whether it may be written to.
#[test]
fn the_daemon_sees_its_home_and_little_else() {
    let Some(daemon) = daemon("files") else { return };
    let pid = daemon.pid();
    check_sees_its_home_only(&daemon, |point| {
        point == "/dev/null" || point.starts_with("/sys/fs/cgroup")
    });
    let home = daemon.home().canonicalize().expect("the home");
    let inside = |path: &str| PathBuf::from(format!("/proc/{pid}/root{path}"));
    // Looking up names took /etc and libraries once.
    for absent in ["/root", "/boot", "/dev/kmsg", "/usr", "/lib", "/lib64", "/etc", "/run"] {
        // The home may be below one of them.
        if home.starts_with(absent) {
            continue;
        }
        assert!(!inside(absent).exists(), "{absent}");
    }
    assert_eq!(daemon.stop(), Some(0));
}

/// As the daemon, with its user and its root directory, but without its filter.
#[test]
fn whoever_takes_over_the_daemon_reads_no_secret_of_the_hosts() {
    let Some(daemon) = daemon("takeover") else { return };
    let (uid, pid) = (status(daemon.pid(), "Uid")[0].clone(), daemon.pid().to_string());
    let as_daemon = |script: &str| {
        let mut probe = Command::new("python3");
        probe.args(["-c", PROBE, &pid, &uid, script]);
        let outcome = run(&mut probe);
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        outcome.stdout.trim().to_owned()
    };
    let own = format!("open('{}/daemon.json').read() and print('read')", daemon.home().display());
    assert_eq!(as_daemon(&own), "read");
    for script in [
        "open('/etc/hosts')",
        "open('/etc/resolv.conf')",
        "open('/etc/shadow')",
        "open('/root/.profile')",
        "open('/etc/thaw-was-here', 'w')",
        "open('/proc/1/environ')",
        "open('/proc/sysrq-trigger', 'w')",
        "os.kill(1, 0)",
        "os.kill(MONITOR, 0)",
        "os.setuid(0)",
        "os.chroot('/proc')",
        "os.mknod('/dev/mem', 0o20600, os.makedev(1, 1))",
        "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    ] {
        let script = script.replace("MONITOR", &daemon.main_pid().to_string());
        assert!(as_daemon(&script).starts_with("refused"), "{script}: {}", as_daemon(&script));
    }
    assert_eq!(daemon.stop(), Some(0));
}

/// Becomes a user in the root directory of a process, and tries something.
const PROBE: &str = r#"
import os, socket, sys
pid, uid = int(sys.argv[1]), int(sys.argv[2])
# What is imported lazily must be there before the root directory changes.
import encodings.idna
os.chroot(f"/proc/{pid}/root")
os.chdir("/")
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
try:
    exec(sys.argv[3])
except OSError as error:
    print("refused", error.errno)
"#;

/// A template's daemon has the files by which its next copies enter their groups.
#[test]
fn whoever_takes_over_the_daemon_moves_no_process_of_the_hosts_into_a_group() {
    if !has_controller("memory") {
        return skip("no control groups");
    }
    let keys = "template = true\nisolation = \"instance\"".to_owned();
    let limits = "memory = \"96MiB\"";
    let function = Function::Variant { example: "hello-c", name: "forked", keys, limits };
    let home = || built_home("privileges-forked", &[function]);
    let Some(daemon) = daemon_of("groups", home) else { return };
    let leads_into_group = |entry: std::io::Result<fs::DirEntry>| {
        let link = fs::read_link(entry.ok()?.path()).ok()?;
        let name = link.file_name()?.to_str()?;
        ["tasks", "cgroup.procs"].contains(&name).then_some(())
    };
    wait_until("there is a template", || {
        let all = fs::read_dir(format!("/proc/{}/fd", daemon.pid())).expect("the daemon runs");
        get(daemon.gateway(), "forked", "/").status == 200
            && all.filter_map(leads_into_group).count() > 0
    });
    let mut victims = [0, 65_534].map(|uid| {
        let mut victim = Command::new("sleep");
        victim.arg("1000").uid(uid).gid(uid).spawn().expect("a process")
    });
    let mut taking = Command::new("python3");
    taking.args(["-c", MOVE_OTHERS, &daemon.pid().to_string()]);
    let others = [daemon.main_pid(), daemon.pid()].into_iter();
    let others = others.chain(victims.each_ref().map(Child::id));
    let outcome = run(taking.args(others.map(|pid| pid.to_string())));
    victims.iter_mut().for_each(|victim| {
        victim.kill().and_then(|()| victim.wait()).map(drop).expect("our child")
    });
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let tried = outcome.stdout.lines().count();
    assert!(tried > 0 && outcome.stdout.lines().all(|line| line.ends_with(" 13")), "{outcome:?}");
    let (_, pid, _) = daemon.instance("forked");
    assert_eq!(memory_limit_of(pid), Some(96 << 20));
    assert_eq!(daemon.stop(), Some(0));
}

/// Takes the files that lead into groups from a process, and writes the numbers of others there.
const MOVE_OTHERS: &str = r#"
import ctypes, os, sys
PIDFD_GETFD = 438
daemon, *others = map(int, sys.argv[1:])
pidfd = os.pidfd_open(daemon)
for name in os.listdir(f"/proc/{daemon}/fd"):
    try:
        path = os.readlink(f"/proc/{daemon}/fd/{name}")
    except FileNotFoundError:
        continue
    if os.path.basename(path) not in ["tasks", "cgroup.procs"]:
        continue
    file = ctypes.CDLL(None).syscall(PIDFD_GETFD, pidfd, int(name), 0)
    for pid in [1, *others]:
        try:
            os.write(file, str(pid).encode())
            print(path, pid, "was moved")
        except OSError as error:
            # Groups and their files come and go.
            if error.errno not in [9, 19]:
                print(path, pid, error.errno)
"#;

#[test]
fn the_zygote_parent_is_nobody_outside_its_namespace() {
    let Some(daemon) = daemon("parent") else { return };
    let parent = zygote_parent(&daemon);
    assert_eq!(status(parent.pid, "NoNewPrivs"), ["0"], "templates keep rights over exec");
    assert_ne!(namespace(parent.pid, "user"), namespace(daemon.pid(), "user"));
    // Of its capabilities, all in that namespace: SETGID, SETUID, SETPCAP, SYS_ADMIN.
    assert_eq!(status(parent.pid, "CapEff"), ["00000000002001c0"]);
    assert_eq!(status(parent.pid, "CapBnd"), ["00000000002001c0"]);
    assert!(names_in_root(parent.pid).is_empty());
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn the_monitor_holds_listeners_and_nothing_of_clients() {
    let Some(daemon) = daemon("monitor") else { return };
    let count = || {
        let all = fs::read_dir(format!("/proc/{}/fd", daemon.main_pid())).expect("it runs");
        all.count()
    };
    let before = count();
    let clients: Vec<_> = (0..50)
        .map(|_| {
            let gateway = daemon.gateway();
            thread::spawn(move || get(gateway, "hello-c", "/").status)
        })
        .collect();
    // Established ones of the gateway's port (proc_pid_net(5)).
    let holds_connection_of_client = || {
        let port = format!(":{:04X}", daemon.gateway().port());
        let table = fs::read_to_string("/proc/net/tcp").expect("connections");
        let of_clients: Vec<_> = table
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>())
            .filter(|fields| fields[1].ends_with(&port) && fields[3] == "01")
            .map(|fields| format!("socket:[{}]", fields[9]))
            .collect();
        let held = descriptors(daemon.main_pid()).into_values();
        held.map(|descriptor| descriptor.target).any(|target| of_clients.contains(&target))
    };
    for client in clients {
        assert_eq!(client.join().expect("a client"), 200);
        assert!(!holds_connection_of_client());
    }
    // Those with which it is just making a sandbox's groups come and go, as do those of instances that
    // have lived for so long that they were kept: on a busy machine, many at a time.
    wait_until("it holds no more than before", || count() <= before + 16);
    let sockets = || {
        let all = fs::read_dir(format!("/proc/{}/fd", daemon.main_pid())).expect("it runs");
        let links = all.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
    };
    // The zygote parent's stays once an instance has lived for so long that it was kept for the
    // next daemon, as some do on a busy machine.
    wait_until("only the listener's, the daemon's and the zygote parent's are left", || {
        (2..=3).contains(&sockets())
    });
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn a_daemon_that_is_killed_is_started_again_and_no_client_is_refused() {
    let Some(daemon) = daemon("again") else { return };
    assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
    let sandboxes = daemon.sandboxes();
    kill(daemon.pid());
    // Not one is refused: the monitor has the listener, and the next daemon accepts.
    assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
    wait_until("what the first one had is gone", || sandboxes.iter().all(|s| !exists(s.pid)));
    let log = daemon.log();
    assert!(log.contains("ended by signal 9; starting it again"), "{log}");
    assert_eq!(daemon.stop(), Some(0));
}

#[test]
fn a_daemon_that_crashes_again_and_again_is_given_up() {
    let Some(daemon) = daemon("crashes") else { return };
    let main = daemon.main_pid();
    let mut last = 0;
    while exists(main) {
        if let Some(pid) = daemon.live_pid().filter(|pid| *pid != last) {
            last = pid;
            let pid = rustix::process::Pid::from_raw(last as i32).expect("a process id");
            let _ = rustix::process::kill_process(pid, Signal::ABORT);
        }
        thread::sleep(Duration::from_millis(10));
    }
    let log = daemon.log();
    assert!(log.contains("the daemon has crashed 5 times in a row"), "{log}");
}

#[test]
fn nothing_outlives_a_monitor_that_is_killed() {
    let Some(daemon) = daemon("orphans") else { return };
    assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
    // Daemon, zygote parent, zygote, instances: some may be made after the first answer only.
    wait_until("a zygote and an instance live", || descendants(daemon.main_pid()).len() > 3);
    let all = descendants(daemon.main_pid());
    daemon.kill();
    wait_until("nothing is left", || all.iter().all(|process| !exists(process.pid)));
}

/// A port below 1024, which the daemon itself may not bind.
#[test]
fn a_function_may_have_a_privileged_port() {
    if !rustix::process::geteuid().is_root() {
        return skip("a port below 1024 takes root");
    }
    let port = free_privileged_port();
    let keys = format!("listen = \"127.0.0.1:{port}\"").leak();
    let function = Function::PythonVariant { program: "tenant", name: "low", keys };
    let Some(daemon) = daemon_of("low", || built_home("privileges-ports", &[function])) else {
        return;
    };
    let address = (std::net::Ipv4Addr::LOCALHOST, port).into();
    assert_eq!(get(address, "low", "/hold/0").status, 200, "{}", daemon.log());
    assert_eq!(daemon.stop(), Some(0));
}

/// Where nobody can own the sandboxes' user namespace, the daemon stays root, says so, and
/// still hears when it is to end.
#[test]
fn without_user_namespaces_the_daemon_keeps_its_rights_and_says_so() {
    if !rustix::process::geteuid().is_root() {
        skip("only root's daemon is another user than its monitor");
        return;
    }
    let home = tempfile::tempdir().expect("a directory");
    let mut serving = Command::new("python3");
    serving
        .args(["-c", &ending_once_it_serves(WITHOUT_NAMESPACES)])
        .arg(thaw_e2e::thaw_binary())
        .arg(home.path());
    let outcome = run(&mut serving);
    let last = outcome.stdout.lines().last();
    assert_eq!((outcome.code, last), (Some(0), Some("0")), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("keeps all of root's rights"), "{}", outcome.stderr);
}

/// Serves in a user namespace with all ids that may have no other below it.
const WITHOUT_NAMESPACES: &str = r#"
import ctypes, os, pathlib, signal, sys, time
thaw, home = sys.argv[1:]
made, make = os.pipe()
mapped, map = os.pipe()
pid = os.fork()
if pid == 0:
    CLONE_NEWUSER = 0x10000000
    assert ctypes.CDLL(None).unshare(CLONE_NEWUSER) == 0
    os.write(make, b"x")
    os.read(mapped, 1)
    os.setgid(0)
    os.setuid(0)
    pathlib.Path("/proc/sys/user/max_user_namespaces").write_text("0")
    os.environ["THAW_HOME"] = home
    os.execv(thaw, [thaw, "serve", "--weak-limits", "--listen", "127.0.0.1:0"])
os.read(made, 1)
for ids in ["uid_map", "gid_map"]:
    first, _, count = pathlib.Path(f"/proc/self/{ids}").read_text().split()[:3]
    pathlib.Path(f"/proc/{pid}/{ids}").write_text(f"{first} {first} {count}")
os.write(map, b"x")
"#;
