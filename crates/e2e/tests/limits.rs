//! Limits that the host enforces, whatever the program and its kernel do.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Linking, Outcome, User, built_home, compile, descendants, get,
    kernel_symbol, python, repository, run, skip, thaw, wait_until,
};

/// Exit code of what was killed.
const KILLED: Option<i32> = Some(128 + 9);

/// What `thaw doctor` says about each kind of limit, by its name.
fn doctor(mut thaw: Command) -> Vec<(String, String, String)> {
    let outcome = run(thaw.args(["doctor", "--json"]));
    let list: Value = serde_json::from_str(&outcome.stdout).expect("JSON");
    let text = |probe: &Value, key: &str| probe[key].as_str().unwrap_or_default().to_owned();
    let probes = list.as_array().expect("a list").iter();
    probes.map(|p| (text(p, "name"), text(p, "status"), text(p, "found"))).collect()
}

/// Whether the host enforces limits for the user of this test; the test is skipped if not.
fn limits_are_enforced() -> bool {
    let weak = doctor(thaw())
        .into_iter()
        .find(|(name, status, _)| name.ends_with("limits") && status != "good");
    match weak {
        None => true,
        Some((name, _, found)) => {
            skip(&format!("{name}: {found}"));
            false
        }
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn sandboxed(options: &[&str], script: &str) -> Outcome {
    let mut command = thaw();
    command.args(["run", "--as-root", "--rootfs", "/"]).args(options).arg("--").arg(python());
    run(command.args(["-c", script]))
}

const SPIN: &str = "\
import os
for _ in range(6):
    if os.fork() == 0:
        break
while True:
    pass
";

/// CPU time that the control group of a process has used.
fn cpu_time_of_group(pid: u32) -> Option<Duration> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    mounts.lines().find_map(|line| {
        let (fields, kind) = line.split_once(" - ")?;
        let mount = Path::new(fields.split(' ').nth(4)?);
        let is_v2 = kind.starts_with("cgroup2 ");
        let own = groups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, names, own) = (fields.next()?, fields.next()?, fields.next()?);
            let counts = names.split(',').any(|name| name == "cpuacct") && kind.contains("cpuacct");
            (counts || is_v2 && names.is_empty()).then(|| mount.join(own.trim_start_matches('/')))
        })?;
        if !own.to_string_lossy().contains("/thaw-") {
            return None;
        }
        let v1 = fs::read_to_string(own.join("cpuacct.usage")).ok();
        let v1 = v1.and_then(|text| text.trim().parse().ok()).map(Duration::from_nanos);
        v1.or_else(|| {
            let text = fs::read_to_string(own.join("cpu.stat")).ok()?;
            let used = text.lines().find_map(|line| line.strip_prefix("usage_usec "))?;
            Some(Duration::from_micros(used.parse().ok()?))
        })
    })
}

/// The most CPU time that was seen in the group of a sandbox while `command` ran.
fn watched(mut command: Command) -> (Option<i32>, Duration, Duration) {
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().expect("thaw runs");
    let (began, mut used, mut group) = (Instant::now(), Duration::ZERO, None);
    loop {
        if let Some(status) = child.try_wait().expect("our child") {
            return (status.code(), used, began.elapsed());
        }
        if began.elapsed() > Duration::from_secs(60) {
            let _ = child.kill();
            panic!("it was stuck");
        }
        // The same process from then on: only one of the groups is a sandbox's.
        group = group.or_else(|| {
            let is_sandbox = |process: &&thaw_e2e::Process| {
                let name = fs::read(format!("/proc/{}/cmdline", process.pid));
                name.is_ok_and(|name| name == b"thaw-kernel\0")
            };
            descendants(child.id()).iter().find(is_sandbox).map(|process| process.pid)
        });
        if let Some(now) = group.and_then(cpu_time_of_group) {
            used = used.max(now);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn cpu_time_counts_the_processes_together() {
    if !limits_are_enforced() {
        return;
    }
    let outcome = sandboxed(&["--cpus=2", "--cpu-time=1s"], SPIN);
    assert_eq!(outcome.code, KILLED, "{outcome:?}");
    assert!(outcome.stderr.contains("limit of CPU time"), "{outcome:?}");

    let mut command = thaw();
    command
        .args(["run", "--as-root", "--rootfs", "/", "--cpus=2", "--cpu-time=1s", "--"])
        .arg(python());
    command.args(["-c", SPIN]);
    let (code, used, _) = watched(command);
    assert_eq!(code, KILLED);
    // Seven processes with a second each would use seven.
    assert!(used > Duration::from_millis(500), "{used:?}");
    assert!(used < Duration::from_millis(3500), "{used:?}");
}

#[test]
fn processors_are_what_was_given() {
    if !limits_are_enforced() {
        return;
    }
    if std::thread::available_parallelism().expect("a number").get() < 2 {
        return skip("this machine has one processor");
    }
    let mut command = thaw();
    command
        .args(["run", "--as-root", "--rootfs", "/", "--cpus=1", "--cpu-time=2s", "--"])
        .arg(python());
    command.args(["-c", SPIN]);
    let (code, used, took) = watched(command);
    assert_eq!(code, KILLED);
    assert!(used > Duration::from_secs(1), "{used:?}");
    let ratio = used.as_secs_f64() / took.as_secs_f64();
    assert!(ratio < 1.3, "{used:?} in {took:?}");
}

#[test]
fn processes_are_bounded() {
    if !limits_are_enforced() {
        return;
    }
    let script = "\
import os, time, errno
made = 0
try:
    while made < 3000:
        if os.fork() == 0:
            time.sleep(100)
            os._exit(0)
        made += 1
except OSError as error:
    print(made, errno.errorcode[error.errno])
";
    assert_eq!(sandboxed(&["--processes=40"], script).success(), "39 EAGAIN\n");
    // Whatever else it did, the program goes on; and what it may not have is refused.
    assert_eq!(sandboxed(&["--processes=0"], "").code, Some(2));
    assert_eq!(sandboxed(&["--processes=5000"], "").code, Some(2));
}

/// A fork that the host refuses is no process, thread or descriptor of the sandbox, and
/// takes nothing from later ones.
#[test]
fn a_refused_fork_leaves_nothing_behind() {
    if !limits_are_enforced() {
        return;
    }
    let script = "\
import ctypes, os, signal, threading
CLONE_PIDFD, CLONE_PARENT_SETTID = 0x1000, 0x100000
libc = ctypes.CDLL(None, use_errno=True)
made, told = [], (ctypes.c_int * 1)(-7)

def clone(flags):
    pid = libc.syscall(56, flags | signal.SIGCHLD, 0, told, 0, 0)
    if pid == 0:
        signal.pause()
    return pid if pid > 0 else 0

def count(path):
    return len([name for name in os.listdir(path) if name.isdigit()])

def fill():
    while pid := clone(0):
        made.append(pid)

# With a second thread, the kernel halts the other virtual CPUs for the first fork.
done = threading.Event()
thread = threading.Thread(target=done.wait)
thread.start()
for attempt in range(3):
    fill()
    before = count('/proc/self/fd')
    refused = [clone(flags) for flags in (0, CLONE_PIDFD, CLONE_PARENT_SETTID)]
    new = len(made) - (count('/proc') - 1), count('/proc/self/fd') - before
    print(len(made) > 10, refused, new, count('/proc/self/task'), flush=True)
    for pid in made:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    made.clear()
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        print('no child', count('/proc'), flush=True)
done.set()
thread.join()
";
    let round = "True [0, 0, 0] (0, 0) 2\nno child 1\n";
    assert_eq!(sandboxed(&["--processes=40"], script).success(), round.repeat(3));
}

/// A guest that calls the host behind its kernel's back.
#[test]
fn a_hostile_program_has_no_more_than_others() {
    if !limits_are_enforced() {
        return;
    }
    let program = compile("hostile/hostile", Linking::Static);
    let mut command = thaw();
    command.args([
        "run",
        "--as-root",
        "--rootfs",
        "/",
        "--processes=25",
        "--cpu-time=1s",
        "--env=WATCH=x",
    ]);
    command.arg(format!("--env=THAW_TEST_HOSTCALL={:x}", kernel_symbol("thaw_hostcall")));
    let outcome = run(command.arg("--").arg(program).arg("explode"));
    assert_eq!(outcome.code, KILLED, "{outcome:?}");
    assert_eq!(outcome.stdout, "made 24 processes, then -11\n");
    assert!(outcome.stderr.contains("limit of CPU time"), "{outcome:?}");
}

#[test]
fn memory_of_all_processes_counts() {
    if !limits_are_enforced() {
        return;
    }
    // Each has 30 MiB, or shares 60 MiB, of 64.
    let private = "\
import os, sys, time
def child():
    b = bytearray(b'x') * (30 << 20)
    time.sleep(3)
    os._exit(0)
children = []
for _ in range(4):
    pid = os.fork()
    if pid == 0:
        child()
    children.append(pid)
sys.exit(any([os.waitpid(pid, 0)[1] for pid in children]))
";
    let shared = "\
import mmap, os, sys, time
# Nobody uses any of it before all have their part.
all_are_there = mmap.mmap(-1, 4096)
for _ in range(8):
    memory = mmap.mmap(-1, 60 << 20)
    if os.fork() == 0:
        while not all_are_there[0]:
            time.sleep(0.01)
        for at in range(0, 60 << 20, 4096):
            memory[at] = 1
        time.sleep(30)
        os._exit(0)
all_are_there[0] = 1
for _ in range(8):
    os.wait()
print('all of it was there')
sys.exit(3)
";
    // The first process hears that others were killed.
    let outcome = sandboxed(&["--memory=64MiB"], private);
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains("since the sandbox had used up its memory"), "{outcome:?}");
    // What they share goes with the last of them.
    let outcome = sandboxed(&["--memory=64MiB"], shared);
    assert_eq!(outcome.code, KILLED, "{outcome:?}");
    assert!(outcome.stderr.contains("memory limit"), "{outcome:?}");
}

/// What one process has of it is the host's shared memory; the first fork moves that to where several
/// host processes see it.
#[test]
fn shared_memory_that_nobody_has_touched_takes_none() {
    if !limits_are_enforced() {
        return;
    }
    // Nearly all that there is, of which a fiftieth is used.
    let script = "\
import mmap, os, sys
SIZE, STEP = 60 << 20, 50 << 12
memory = mmap.mmap(-1, SIZE)
for at in range(0, SIZE, STEP):
    memory[at:at + 4] = (at >> 12).to_bytes(4, 'big')
pid = os.fork()
if pid == 0:
    if any(int.from_bytes(memory[at:at + 4], 'big') != at >> 12 for at in range(0, SIZE, STEP)):
        os._exit(3)
    memory[4096] = 7
    os._exit(0)
ended = os.waitpid(pid, 0)[1]
print(ended, memory[4096])
";
    let outcome = sandboxed(&["--memory=64MiB"], script);
    assert_eq!((outcome.code, outcome.stdout.trim()), (Some(0), "0 7"), "{outcome:?}");
}

/// Two processes take all memory again and again, and are ended for it, while a third forks. Nothing of that
/// is its concern: no fork fails, and nobody waits for memory that is there.
#[test]
fn who_forks_while_others_are_ended_for_their_memory_goes_on() {
    if !limits_are_enforced() {
        return;
    }
    let script = "\
import os, signal
def eater():
    pid = os.fork()
    if pid == 0:
        taken = []
        while True:
            taken.append(bytearray(b'x') * (256 << 10))
    return pid
eaters, ended = {eater(), eater()}, 0
while ended < 100:
    child = os.fork()
    if child == 0:
        os._exit(0)
    while True:
        pid, status = os.wait()
        if pid == child:
            break
        eaters.remove(pid)
        assert status == signal.SIGKILL, status
        ended += 1
        eaters.add(eater())
    # It may have been taken for the largest.
    assert status in (0, signal.SIGKILL), status
print('went on')
for pid in eaters:
    os.kill(pid, signal.SIGKILL)
";
    let outcome = sandboxed(&["--memory=64MiB"], script);
    assert_eq!((outcome.code, outcome.stdout.trim()), (Some(0), "went on"), "{outcome:?}");
}

#[test]
fn memory_of_removed_files_can_be_used_again() {
    if !limits_are_enforced() {
        return;
    }
    // Each time 90 MiB of files, and then 90 of the program's own, of 128.
    let alone = "\
import os
for make_free in (os.remove, lambda path: os.truncate(path, 0)):
    with open('/tmp/file', 'wb') as file:
        for _ in range(90):
            file.write(b'x' * (1 << 20))
    make_free('/tmp/file')
    memory = bytearray(b'y') * (90 << 20)
    del memory
os.mkdir('/tmp/many')
for number in range(900):
    with open(f'/tmp/many/{number}', 'wb') as file:
        file.write(b'x' * 100000)
for number in range(900):
    os.remove(f'/tmp/many/{number}')
memory = bytearray(b'y') * (90 << 20)
print('all of it was there')
";
    let of_several = format!("import os\nif os.fork() == 0:\n    os._exit(0)\nos.wait()\n{alone}");
    for script in [alone, &of_several] {
        let outcome = sandboxed(&["--memory=128MiB"], script);
        assert_eq!(outcome.success(), "all of it was there\n");
    }
}

/// The groups that a process with this number has made for its sandboxes.
fn groups_of(pid: u32) -> Vec<PathBuf> {
    fn search(directory: &Path, prefix: &str, depth: u32, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_name().to_string_lossy().starts_with(prefix) {
                found.push(path);
            } else if depth > 0 && path.is_dir() && !path.is_symlink() {
                search(&path, prefix, depth - 1, found);
            }
        }
    }
    let mut found = Vec::new();
    search(Path::new("/sys/fs/cgroup"), &format!("thaw-{pid}-"), 6, &mut found);
    found
}

#[test]
fn no_groups_are_left_at_the_end() {
    if !limits_are_enforced() {
        return;
    }
    let mut command = thaw();
    command.args(["run", "--as-root", "--rootfs", "/", "--", "cat"]).stdin(Stdio::piped());
    let mut child = command.spawn().expect("thaw runs");
    wait_until("its groups are there", || !groups_of(child.id()).is_empty());
    drop(child.stdin.take());
    assert!(child.wait().expect("our child").success());
    assert_eq!(groups_of(child.id()), Vec::<PathBuf>::new());
}

#[test]
fn instances_of_every_boot_have_limits() {
    if !limits_are_enforced() {
        return;
    }
    let kinds = [
        ("warm", "template = false\nlimits.cpu_time = \"1s\""),
        ("fork", "template = true\nlimits.cpu_time = \"1s\""),
        ("ready", "template = false\nready = 1\nlimits.cpu_time = \"1s\""),
    ];
    let spinner = |name, keys| Function::PythonVariant { program: "spinner", name, keys };
    let home = built_home("limits", &kinds.map(|(name, keys)| spinner(name, keys)));
    let daemon = Daemon::start(&home, &DaemonOptions::default());
    for (kind, _) in kinds {
        let boots = || daemon.admin(&format!("/functions/{kind}")).json();
        assert_eq!(get(daemon.gateway(), kind, "/").text(), "hello\n");
        wait_until("the next boot is of its kind", || {
            assert_eq!(get(daemon.gateway(), kind, "/").text(), "hello\n");
            boots()["boots"].as_array().expect("boots").iter().any(|boot| boot["kind"] == kind)
        });
        let answer = get(daemon.gateway(), kind, "/spin");
        assert!(answer.status >= 500, "{kind}: {}", answer.status);
        let said = || daemon.log().matches("limit of CPU time").count();
        let expected = 1 + kinds.iter().position(|(name, _)| *name == kind).expect("it is one");
        wait_until("the log says why", || said() >= expected);
        // Neighbours and later copies are served.
        assert_eq!(get(daemon.gateway(), kind, "/").text(), "hello\n");
    }
}

/// Whether tests can be made as a user without control groups of its own.
fn is_without_groups(user: &User) -> bool {
    let enforced = doctor(user.thaw())
        .into_iter()
        .any(|(name, status, _)| name.ends_with("limits") && status == "good");
    if enforced {
        skip("every user may make control groups here");
    }
    !enforced
}

#[test]
fn limits_that_cannot_be_kept_are_refused() {
    if !is_root() {
        return skip("it takes root to become another user");
    }
    let user = User::nobody();
    if !is_without_groups(&user) {
        return;
    }
    for option in ["--memory=64MiB", "--cpus=1", "--processes=9", "--cpu-time=9s"] {
        let name = option.split('=').next().expect("an option");
        let run_with = |more: &[&str]| {
            let mut command = user.thaw();
            run(command.args(["run", "--rootfs", "/", option]).args(more).args(["--", "echo", "x"]))
        };
        let refused = run_with(&[]);
        assert_eq!((refused.code, refused.stdout.as_str()), (Some(1), ""), "{refused:?}");
        let expected = format!("does not enforce {name}");
        assert!(refused.stderr.contains(&expected), "{refused:?}");
        assert!(refused.stderr.contains("--weak-limits"), "{refused:?}");
        assert_eq!(refused.stderr.lines().count(), 1, "{refused:?}");
        let accepted = run_with(&["--weak-limits"]);
        assert_eq!((accepted.code, accepted.stderr.as_str()), (Some(0), ""), "{accepted:?}");
    }
    // Nobody has asked for the usual limits.
    let usual = run(user.thaw().args(["run", "--rootfs", "/", "--", "echo", "x"]));
    assert_eq!(usual.stderr.lines().count(), 1, "{usual:?}");
    assert_eq!(usual.success(), "x\n");

    let served = run(user.thaw().args(["serve", "--listen", "127.0.0.1:0"]));
    assert_eq!(served.code, Some(1), "{served:?}");
    assert!(served.stderr.contains("--weak-limits"), "{served:?}");
}

#[test]
fn weak_cpu_time_counts_the_processes_together() {
    if !is_root() {
        return skip("it takes root to become another user");
    }
    let user = User::nobody();
    if !is_without_groups(&user) {
        return;
    }
    let mut command = user.thaw();
    command.args(["run", "--rootfs", "/", "--weak-limits", "--cpus=2", "--cpu-time=1s", "--"]);
    let outcome = run(command.arg(python()).args(["-c", SPIN]));
    assert_eq!(outcome.code, KILLED, "{outcome:?}");
    assert!(outcome.stderr.contains("limit of CPU time"), "{outcome:?}");
}

/// `/proc/PID/mem` of such a user's sandboxes belongs to somebody else.
#[test]
fn a_user_with_subordinate_ids_builds_functions() {
    if !is_root() {
        return skip("it takes root to become another user");
    }
    let Some(user) = User::with_subordinate_ids() else {
        return skip("no user has a range in /etc/subuid and /etc/subgid, or uidmap is missing");
    };
    let ids = doctor(user.thaw()).into_iter().find(|(name, _, _)| name == "user ids");
    assert_eq!(ids.map(|(_, status, _)| status).as_deref(), Some("good"));
    let readable = doctor(user.thaw()).into_iter().find(|(name, _, _)| name == "zygote");
    assert_eq!(readable.map(|(_, status, _)| status).as_deref(), Some("good"));

    let function = user.home().join("function");
    fs::create_dir(&function).expect("a directory");
    for file in ["app.py", "thaw.toml"] {
        let from = repository().join("examples/hello-python").join(file);
        fs::copy(from, function.join(file)).expect("a copy");
    }
    user.own(&function);
    let mut build = user.thaw();
    run(build.args(["build", "--weak-limits", "--quiet"]).arg(&function)).success();
}

/// The daemon of root is another user, who must get at the groups that root's process makes.
#[test]
fn limits_hold_whatever_the_umask_hides() {
    if !limits_are_enforced() {
        return;
    }
    let keys = "template = false\nlimits.cpu_time = \"1s\"";
    let functions = [Function::PythonVariant { program: "spinner", name: "masked", keys }];
    let home = built_home("limits-umask", &functions);
    let strict = ["/bin/sh", "-c", "umask 077 && exec \"$@\"", "sh"].map(str::to_owned);
    let daemon = Daemon::start_by(&strict, &home, &DaemonOptions::default());
    let answer = get(daemon.gateway(), "masked", "/");
    assert_eq!(answer.text(), "hello\n", "{}", daemon.log());
    assert!(get(daemon.gateway(), "masked", "/spin").status >= 500);
    wait_until("the log says why", || daemon.log().contains("limit of CPU time"));
    assert_eq!(daemon.stop(), Some(0));
}
