//! What each process of a `thaw serve` may do that another user than root has started: the
//! monitor and the daemon have the same user id. With and without a range in /etc/subuid.

use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::OnceLock;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Process, User, built_home, check_has_no_rights,
    check_sees_its_home_only, children, descendants, ending_once_it_serves, exists, get, ids_of,
    kill, names_in_root, namespace, process, run, skip, status, wait_until,
};

const WARM: &str = "template = false";
const FORK: &str = "template = true";
/// Bytes of memory that functions have if they do not say.
const DEFAULT_LIMIT: u64 = 256 << 20;

/// A daemon of another user's. The daemon is dropped first.
struct Served {
    daemon: Daemon,
    user: User,
}

/// The users of this machine that tests can be made with.
fn users() -> Vec<User> {
    if !rustix::process::geteuid().is_root() {
        skip("it takes root to become another user");
        return Vec::new();
    }
    let other = User::with_subordinate_ids();
    if other.is_none() {
        skip("no user has a range in /etc/subuid and /etc/subgid, or uidmap is missing");
    }
    [User::nobody()].into_iter().chain(other).collect()
}

/// One daemon for each user.
fn served() -> Vec<Served> {
    users().into_iter().map(serve).collect()
}

fn serve(user: User) -> Served {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    let built = HOME.get_or_init(|| {
        let copies = |name, keys| Function::PythonVariant { program: "copies", name, keys };
        let survivor = Function::PythonVariant {
            program: "survivor",
            name: "survivor",
            keys: "isolation = \"instance\"\nlimits.keep_alive = \"10m\"",
        };
        let all =
            [Function::Example("hello-c"), copies("warm", WARM), copies("fork", FORK), survivor];
        built_home("rootless", &all)
    });
    let home = user.home().join("state");
    run(Command::new("cp").args(["-a", "--reflink=auto"]).arg(built).arg(&home)).success();
    fs::write(user.home().join("secret"), "secret").expect("a file");
    fs::set_permissions(user.home().join("secret"), fs::Permissions::from_mode(0o600))
        .expect("its mode");
    user.own(&user.home());
    let daemon = Daemon::try_start_as(Some(&user), &home, &DaemonOptions::default())
        .unwrap_or_else(|log| panic!("thaw serve did not come up; it said:\n{log}"));
    assert_ne!(daemon.pid(), daemon.main_pid(), "there is no monitor:\n{}", daemon.log());
    Served { daemon, user }
}

/// Process 1 of the daemon's pid namespace.
fn init(daemon: &Daemon) -> Process {
    let is_init = |process: &Process| process.name == "thaw-init";
    children(daemon.main_pid()).into_iter().find(is_init).expect("a process 1")
}

#[test]
fn the_daemon_has_the_callers_user_id_and_no_rights() {
    for Served { daemon, user } in served() {
        assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
        let (pid, uid, gid) = (daemon.pid(), user.uid().to_string(), user.gid().to_string());
        for pid in [pid, daemon.main_pid()] {
            assert_eq!(status(pid, "Uid"), [&uid[..]; 4]);
            assert_eq!(status(pid, "Gid"), [&gid[..]; 4]);
            assert_eq!(status(pid, "Groups"), [""; 0]);
        }
        for pid in [pid, init(&daemon).pid] {
            check_has_no_rights(pid);
        }
        for name in ["user", "pid", "mnt"] {
            assert_ne!(namespace(pid, name), namespace(daemon.main_pid(), name), "{name}");
        }
        // Those who use it see the numbers of their own pid namespace.
        assert_eq!(status(pid, "NSpid").len(), status(daemon.main_pid(), "NSpid").len() + 1);
        assert_eq!(daemon.stop(), Some(0));
    }
}

/// Each boot, and what the state helper records of the first.
#[test]
fn copies_are_booted_as_ever() {
    for Served { daemon, user } in served() {
        for (function, kind) in [("warm", "warm"), ("fork", "fork")] {
            let detail = || daemon.admin(&format!("/functions/{function}")).json();
            assert_eq!(get(daemon.gateway(), function, "/").status, 200, "{}", daemon.log());
            wait_until("there is a template", || {
                kind != "fork" || !detail()["standby"]["template"].is_null()
            });
            for _ in 0..4 {
                assert_eq!(get(daemon.gateway(), function, "/").status, 200, "{}", daemon.log());
            }
            let kinds = detail()["boots"].clone();
            let latest = kinds.as_array().and_then(|boots| boots.first()).expect("boots");
            assert_eq!(latest["kind"], kind, "{kinds}");
        }
        let images = daemon.home().join("store/images");
        wait_until("a working set is stored", || {
            assert_eq!(get(daemon.gateway(), "warm", "/").status, 200);
            let mut files = fs::read_dir(&images).expect("images").flatten();
            files.any(|file| file.path().extension().is_some_and(|e| e == "workingset"))
        });
        // People see the numbers of their own pid namespace.
        let detail = daemon.admin("/functions/fork").json();
        let template = detail["standby"]["template"].as_u64().expect("a template") as u32;
        let below = descendants(daemon.main_pid());
        assert!(below.iter().any(|process| process.pid == template), "{template}: {below:?}");
        let address = fs::read_to_string(daemon.home().join("daemon.json")).expect("an address");
        assert!(address.contains(&format!("\"pid\": {}", daemon.pid())), "{address}");
        let listed = run(user.thaw().arg("ps"));
        assert_eq!(listed.code, Some(0), "{listed:?}");
        assert_eq!(daemon.stop(), Some(0));
    }
}

/// What can be seen in the daemon's root directory, and whether it may be written to.
#[test]
fn the_daemon_sees_its_home_and_little_else() {
    for Served { daemon, user: _user } in served() {
        // There are no control groups of its own here.
        check_sees_its_home_only(&daemon, |point| point == "/dev/null");
        // And of the launchers' processes, which the daemon may look into, nothing.
        assert!(names_in_root(init(&daemon).pid).is_empty());
        assert_eq!(daemon.stop(), Some(0));
    }
}

/// A process of a user's, besides the daemon, with a file and a variable that are secret.
struct Victim(Child);

impl Victim {
    fn start(user: &User) -> Self {
        let mut sleep = Command::new("sleep");
        sleep.arg("600").env("SECRET", "secret").uid(user.uid()).gid(user.gid());
        Self(sleep.spawn().expect("a process"))
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// As the daemon, with its user id, namespaces and root directory, but without its filter.
#[test]
fn whoever_takes_over_the_daemon_reaches_nothing_else_of_the_callers() {
    for Served { daemon, user } in served() {
        let mut victim = Victim::start(&user);
        let (number, init) = (victim.0.id().to_string(), init(&daemon).pid.to_string());
        let pid = daemon.pid().to_string();
        let secret = user.home().join("secret").to_string_lossy().into_owned();
        let as_daemon = |script: &str| {
            let script = script
                .replace("VICTIM", &number)
                .replace("MONITOR", &daemon.main_pid().to_string())
                .replace("INIT", &init)
                .replace("SECRET", &secret)
                .replace("HOME", &daemon.home().to_string_lossy());
            let mut probe = Command::new("/usr/bin/python3");
            let ids = [user.uid().to_string(), user.gid().to_string()];
            let outcome = run(probe.args(["-c", PROBE, &pid]).args(ids).arg(&script));
            assert_eq!(outcome.code, Some(0), "{script}: {}", outcome.stderr);
            outcome.stdout.trim().to_owned()
        };
        for script in [
            "open('HOME/mine', 'w').write('x') and print('done')",
            "open('/proc/VICTIM/status').read() and print('done')",
        ] {
            assert_eq!(as_daemon(script), "done", "{script}");
        }
        for script in [
            "open('SECRET')",
            "open('/etc/hosts')",
            "open('/etc/shadow')",
            "open('/etc/thaw-was-here', 'w')",
            "open('/proc/VICTIM/environ').read()",
            "open('/proc/VICTIM/mem')",
            "open('/proc/VICTIM/fd/0')",
            "os.readlink('/proc/VICTIM/fd/0')",
            "open('/proc/VICTIM/rootSECRET')",
            "os.listdir('/proc/VICTIM/cwd')",
            "open('/proc/VICTIM/oom_score_adj', 'w').write('1000')",
            "open('/proc/MONITOR/rootSECRET')",
            "open('/proc/MONITOR/environ').read()",
            "open('/proc/MONITOR/mem')",
            "open('/proc/INIT/rootSECRET')",
            "open('/proc/INIT/mem')",
            "os.kill(VICTIM, 0)",
            "os.kill(MONITOR, 0)",
            "os.pidfd_open(VICTIM)",
            "os.sched_setaffinity(VICTIM, {0})",
            "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
            "resource.prlimit(VICTIM, resource.RLIMIT_CPU, (0, 0))",
            "os.setuid(0)",
            "os.setgid(0)",
            "os.setgroups([0])",
            "os.chroot('/etc')",
            "call(libc.unshare, 0x20000)",
            "call(libc.ptrace, 16, VICTIM, 0, 0)",
            "call(libc.mount, b'none', b'/etc', b'tmpfs', 0, 0)",
            "open(os.open('/proc/MONITOR/ns/user', 0))",
            "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
            // All that it may signal at once is in its own namespace, and it is the only one
            // there of this user but for process 1, which heeds nobody in it.
            "os.kill(1, 9) or os.kill(1, 0) or refuse()",
        ] {
            let said = as_daemon(script);
            assert!(said.starts_with("refused"), "{script}: {said}");
        }
        assert!(victim.0.try_wait().expect("our child").is_none(), "the victim has ended");
        assert!(exists(daemon.main_pid()) && exists(daemon.pid()));
        assert_eq!(daemon.stop(), Some(0));
    }
}

/// Becomes a process like another, without its filter, and tries something.
const PROBE: &str = r#"
import ctypes, os, resource, socket, sys
pid, uid, gid = map(int, sys.argv[1:4])
libc = ctypes.CDLL(None, use_errno=True)
# What is imported lazily must be there before the root directory changes.
import encodings.idna
def call(function, *arguments):
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
def refuse():
    raise OSError(0, "")
namespaces = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ["user", "pid", "mnt"]]
root = os.open(f"/proc/{pid}/root", os.O_PATH)
for namespace in namespaces:
    call(libc.setns, namespace, 0)
os.fchdir(root)
os.chroot(".")
os.closerange(3, 64)
try:
    os.setgroups([])
except PermissionError:
    pass
os.setresgid(gid, gid, gid)
os.setresuid(uid, uid, uid)
header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
CAPSET = 126
call(libc.syscall, CAPSET, header, none)
if os.fork() > 0:
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
try:
    exec(sys.argv[4])
except OSError as error:
    print("refused", error.errno)
"#;

/// The caller's variables may hold secrets.
#[test]
fn the_daemon_gets_no_variables_that_are_not_its_own() {
    for Served { daemon, user: _user } in served() {
        let variables = |pid: u32| {
            let text = fs::read(format!("/proc/{pid}/environ")).expect("it runs");
            let names = text.split(|&byte| byte == 0).filter(|entry| !entry.is_empty());
            names.map(|entry| String::from_utf8_lossy(entry).into_owned()).collect::<Vec<_>>()
        };
        assert!(variables(daemon.main_pid()).iter().any(|entry| entry.starts_with("PATH=")));
        for entry in variables(daemon.pid()) {
            // Those of rustls name the certificates that the daemon trusts.
            let own = ["THAW_", "RUST_", "SSL_CERT_"];
            let is_its_own = own.iter().any(|prefix| entry.starts_with(prefix));
            assert!(is_its_own, "{entry}");
        }
        assert_eq!(daemon.stop(), Some(0));
    }
}

#[test]
fn the_zygote_parent_is_nobody_outside_its_namespace() {
    for Served { daemon, user } in served() {
        assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
        let others = [daemon.pid(), init(&daemon).pid];
        // The first process of a pid namespace. Launchers and helpers of the monitor's come and go
        // beside it.
        let is_parent = |process: &Process| {
            let text = fs::read_to_string(format!("/proc/{}/status", process.pid));
            let text = text.unwrap_or_default();
            let inside = text.lines().find_map(|line| line.strip_prefix("NSpid:"));
            let is_first =
                inside.and_then(|inside| inside.split_whitespace().next_back()) == Some("1");
            is_first && !others.contains(&process.pid)
        };
        let parent = children(daemon.main_pid()).into_iter().find(is_parent).expect("a parent").pid;
        assert_ne!(namespace(parent, "user"), namespace(daemon.pid(), "user"));
        assert_eq!(status(parent, "CapEff"), ["00000000002001c0"]);
        assert!(names_in_root(parent).is_empty());
        // Where sandboxes have ids of their own, the caller's is not among theirs.
        let map = fs::read_to_string(format!("/proc/{parent}/uid_map")).expect("it runs");
        let ranges: Vec<_> = map
            .lines()
            .map(|line| {
                let numbers: Vec<u32> =
                    line.split_whitespace().filter_map(|number| number.parse().ok()).collect();
                let &[_inside, outside, count] = &numbers[..] else { panic!("{map}") };
                outside..outside + count
            })
            .collect();
        if ranges.len() > 1 {
            assert!(!ranges.iter().any(|range| range.contains(&user.uid())), "{map}");
            for process in descendants(daemon.main_pid()) {
                let is_sandbox = process.name.starts_with("thaw-kernel");
                let is_ours = ids_of(process.pid).first() == Some(&user.uid().to_string());
                assert!(!is_sandbox || !is_ours, "{process:?}");
            }
        } else {
            let own = user.uid()..user.uid() + 1;
            assert_eq!(ranges, std::slice::from_ref(&own));
        }
        assert_eq!(daemon.stop(), Some(0));
    }
}

#[test]
fn a_daemon_that_is_killed_is_started_again_and_no_client_is_refused() {
    for Served { daemon, user: _user } in served() {
        assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
        let first_init = init(&daemon).pid;
        kill(daemon.pid());
        assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
        assert_eq!(init(&daemon).pid, first_init);
        let log = daemon.log();
        assert!(log.contains("ended by signal 9; starting it again"), "{log}");
        // With process 1, everything in the pid namespace ends, and all of it is made anew.
        kill(first_init);
        wait_until("the daemon is gone", || !exists(first_init));
        assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
        assert_ne!(init(&daemon).pid, first_init);
        assert_eq!(daemon.stop(), Some(0));
    }
}

/// As with root's daemon (`takeover.rs`), unless process 1 ends.
#[test]
fn instances_go_on_under_the_next_daemon() {
    for Served { mut daemon, user: _user } in served() {
        let count = |daemon: &Daemon| get(daemon.gateway(), "survivor", "/count").text();
        assert_eq!(count(&daemon), "1\n");
        for expected in ["2\n", "3\n"] {
            daemon.wait_until_kept("survivor");
            daemon.kill_and_await_next();
            assert_eq!(count(&daemon), expected, "{}", daemon.log());
        }
        kill(init(&daemon).pid);
        wait_until("its daemon is gone", || !exists(daemon.pid()));
        assert_eq!(count(&daemon), "1\n", "{}", daemon.log());
        assert_eq!(daemon.stop(), Some(0));
    }
}

#[test]
fn a_signal_that_ends_the_monitor_ends_the_daemon_in_order() {
    for Served { daemon, user: _user } in served() {
        daemon.signal(Signal::INT);
        wait_until("the monitor is gone", || !exists(daemon.main_pid()));
        assert!(!daemon.home().join("daemon.json").exists(), "{}", daemon.log());
        assert!(!exists(daemon.pid()));
    }
}

#[test]
fn nothing_outlives_a_monitor_that_is_killed() {
    for Served { daemon, user: _user } in served() {
        assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200);
        // Some may be made after the first answer only.
        wait_until("a zygote and an instance live", || descendants(daemon.main_pid()).len() > 3);
        let all = descendants(daemon.main_pid());
        daemon.kill();
        wait_until("nothing is left", || all.iter().all(|process| !exists(process.pid)));
    }
}

#[test]
fn links_out_of_the_home_are_not_followed() {
    for user in users() {
        let home = user.home().join("state");
        fs::create_dir_all(&home).expect("a directory");
        fs::create_dir(user.home().join("elsewhere")).expect("a directory");
        std::os::unix::fs::symlink(user.home().join("elsewhere"), home.join("store"))
            .expect("a link");
        user.own(&user.home());
        std::os::unix::fs::lchown(home.join("store"), Some(user.uid()), Some(user.gid()))
            .expect("root may give it away");
        let mut serving = user.thaw();
        let outcome = run(serving.args(["serve", "--weak-limits", "--listen", "127.0.0.1:0"]));
        assert_eq!(outcome.code, Some(1), "{outcome:?}");
        assert!(outcome.stderr.contains("only if root has made it"), "{outcome:?}");
    }
}

/// Where the daemon's namespaces cannot be made, but those of sandboxes can, it is one process,
/// and says so once.
#[test]
fn without_nested_user_namespaces_there_is_one_process_and_a_warning() {
    if !rustix::process::geteuid().is_root() {
        return skip("it takes root to become another user");
    }
    let user = User::nobody();
    let home = user.home().join("state");
    let mut serving = Command::new("/usr/bin/python3");
    serving.args(["-c", &ending_once_it_serves(WITH_ONE_LEVEL)]).arg(user.binary()).arg(&home);
    let outcome = run(serving.uid(user.uid()).gid(user.gid()).current_dir("/"));
    let last = outcome.stdout.lines().last();
    assert_eq!((outcome.code, last), (Some(0), Some("0")), "{outcome:?}");
    let warnings = outcome.stderr.matches("keeps all of the user's rights").count();
    assert_eq!(warnings, 1, "{}", outcome.stderr);
    // The doctor has said so before.
    let doctor = fs::read_to_string(user.home().join("doctor.json")).expect("its findings");
    let (status, found, way_out) = daemon_finding(&doctor);
    assert_eq!(status, "limited", "{doctor}");
    assert!(found.contains("keeps all of your rights"), "{found}");
    assert!(way_out.contains("user.max_user_namespaces"), "{way_out}");
}

/// What `thaw doctor --json` has found about the daemon: status, finding and way out.
fn daemon_finding(json: &str) -> (String, String, String) {
    let all: serde_json::Value = serde_json::from_str(json).expect("JSON");
    let mut probes = all.as_array().expect("a list").iter();
    let daemon = probes.find(|probe| probe["name"] == "daemon").expect("a line for the daemon");
    let text = |key: &str| daemon[key].as_str().unwrap_or_default().to_owned();
    (text("status"), text("found"), text("way_out"))
}

/// The doctor says before what the daemon then does ([`serve`]).
#[test]
fn the_doctor_says_that_a_users_daemon_will_be_split() {
    for user in users() {
        let doctor = run(user.thaw().args(["doctor", "--json"]));
        let (status, found, _) = daemon_finding(&doctor.stdout);
        assert_eq!(status, "good", "{found}");
        assert!(found.contains("namespaces of its own"), "{found}");
        let Served { daemon, user: _user } = serve(user);
        assert_eq!(daemon.stop(), Some(0));
    }
}

/// Serves in a user namespace below which there is room for one level of others and no more
/// (user_namespaces(7)).
const WITH_ONE_LEVEL: &str = r#"
import ctypes, os, pathlib, signal, subprocess, sys, time
thaw, home = sys.argv[1:]
libc, uid, gid = ctypes.CDLL(None), os.getuid(), os.getgid()
def deeper():
    CLONE_NEWUSER = 0x10000000
    if libc.unshare(CLONE_NEWUSER) != 0:
        return False
    for file, line in [("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1"), ("uid_map", f"{uid} {uid} 1")]:
        pathlib.Path(f"/proc/self/{file}").write_text(line)
    return True
trial = os.fork()
if trial == 0:
    levels = 0
    while deeper():
        levels += 1
    os._exit(levels)
levels = os.waitstatus_to_exitcode(os.waitpid(trial, 0)[1])
pid = os.fork()
if pid == 0:
    for _ in range(levels - 1):
        assert deeper()
    os.environ["THAW_HOME"] = home
    with open(pathlib.Path(home).with_name("doctor.json"), "w") as findings:
        subprocess.run([thaw, "doctor", "--json"], stdout=findings)
    os.execv(thaw, [thaw, "serve", "--weak-limits", "--listen", "127.0.0.1:0"])
"#;

/// Control groups of version 1 that are a user's, in which the calling thread is for a while.
struct OwnGroups {
    name: String,
    before: Vec<(&'static str, String)>,
}

impl OwnGroups {
    const TREES: [&'static str; 4] = ["memory", "cpu", "cpuacct", "pids"];

    /// `None` where they cannot be made.
    fn enter(user: &User) -> Option<Self> {
        let directory = |tree: &str| Path::new("/sys/fs/cgroup").join(tree);
        if !Self::TREES.iter().all(|tree| directory(tree).join("tasks").exists()) {
            return None;
        }
        let groups = fs::read_to_string("/proc/thread-self/cgroup").expect("its groups");
        let own = |tree: &&'static str| {
            let line = groups.lines().find(|line| line.split(':').nth(1) == Some(tree));
            Some((*tree, line?.splitn(3, ':').nth(2)?.to_owned()))
        };
        let before = Self::TREES.iter().map(own).collect::<Option<Vec<_>>>()?;
        let name = format!("thaw-e2e-{}-{}", std::process::id(), user.uid());
        for tree in Self::TREES {
            let group = directory(tree).join(&name);
            fs::create_dir(&group).ok()?;
            user.own(&group);
            fs::write(group.join("tasks"), "0").ok()?;
        }
        Some(Self { name, before })
    }

    fn leave(&self) {
        for (tree, path) in &self.before {
            fs::write(format!("/sys/fs/cgroup/{tree}{path}/tasks"), "0").expect("its own group");
        }
    }

    fn directory(&self, tree: &str) -> PathBuf {
        Path::new("/sys/fs/cgroup").join(tree).join(&self.name)
    }
}

impl Drop for OwnGroups {
    fn drop(&mut self) {
        for tree in Self::TREES {
            let directory = self.directory(tree);
            for group in fs::read_dir(&directory).into_iter().flatten().flatten() {
                let _ = fs::remove_dir(group.path());
            }
            let _ = fs::remove_dir(directory);
        }
    }
}

/// The monitor makes the groups of sandboxes, the daemon sets their limits, and no others.
#[test]
fn the_daemon_writes_control_groups_of_its_sandboxes_only() {
    for user in users() {
        let Some(groups) = OwnGroups::enter(&user) else {
            return skip("there are no control groups of version 1 to be given to a user");
        };
        let Served { daemon, user: _user } = serve(user);
        groups.leave();
        assert_eq!(get(daemon.gateway(), "warm", "/").status, 200, "{}", daemon.log());
        assert!(!daemon.log().contains("does not enforce"), "{}", daemon.log());
        let limits = || -> Vec<u64> {
            let all = fs::read_dir(groups.directory("memory")).expect("groups").flatten();
            let texts = all.filter_map(|group| {
                fs::read_to_string(group.path().join("memory.limit_in_bytes")).ok()
            });
            texts.filter_map(|text| text.trim().parse().ok()).collect()
        };
        let has_limit = || limits().contains(&DEFAULT_LIMIT);
        wait_until("a sandbox has the limit of its function", || {
            let _ = get(daemon.gateway(), "fork", "/");
            has_limit()
        });
        let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", daemon.pid())).expect("it");
        for line in mounts.lines().filter(|line| line.contains(" /sys/fs/cgroup")) {
            let mut fields = line.split(' ').skip(4);
            let (point, options) = (fields.next().expect("a path"), fields.next().expect("it"));
            let is_writable = options.split(',').any(|option| option == "rw");
            assert_eq!(is_writable, point.ends_with(&groups.name), "{line}");
        }
        // The files of the group above would bound, freeze or end whatever else is in it.
        for file in ["memory.limit_in_bytes", "tasks"] {
            let path = groups.directory("memory").join(file);
            assert!(mounts.contains(&format!(" {} ro,", path.display())), "{file}: {mounts}");
        }
        assert_eq!(daemon.stop(), Some(0));
    }
}

/// Whether a process of the daemon's has ended and nobody has asked how.
#[test]
fn processes_between_are_reaped() {
    for Served { daemon, user: _user } in served() {
        for _ in 0..3 {
            assert_eq!(get(daemon.gateway(), "warm", "/").status, 200);
        }
        wait_until("nothing is left to be reaped", || {
            let all = fs::read_dir("/proc").expect("/proc").flatten();
            let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
            !pids
                .filter_map(process)
                .any(|process| process.parent == daemon.main_pid() && process.state == 'Z')
        });
        assert_eq!(daemon.stop(), Some(0));
    }
}
