//! What `thaw doctor` and errors say on hosts that forbid something.

use serde_json::Value;
use std::process::Command;
use thaw_e2e::{
    Daemon, DaemonOptions, Function, Linking, Outcome, User, built_home, compile, get, python, run,
    skip, thaw_binary,
};

/// Runs `thaw` under a restriction; none if this host does not know it.
fn restricted(restriction: &[&str], arguments: &[&str]) -> Option<Outcome> {
    let mut command = Command::new(compile("host/restrict", Linking::Dynamic));
    command.args(restriction).arg("--").arg(thaw_binary()).args(arguments);
    let outcome = run(&mut command);
    if outcome.code == Some(77) {
        skip(&format!("this host cannot be restricted so: {}", outcome.stderr));
        return None;
    }
    Some(outcome)
}

/// A finding of `thaw doctor --json` by its name.
fn finding(outcome: &Outcome, name: &str) -> (String, String, String) {
    let list: Value =
        serde_json::from_str(&outcome.stdout).unwrap_or_else(|_| panic!("{outcome:?}"));
    let probes = list.as_array().expect("a list");
    let probe = probes.iter().find(|probe| probe["name"] == name);
    let probe = probe.unwrap_or_else(|| panic!("no {name}: {}", outcome.stdout));
    let text = |key: &str| probe[key].as_str().unwrap_or_default().to_owned();
    (text("status"), text("found"), text("way_out"))
}

#[test]
fn memory_that_cannot_be_made_executable_is_named() {
    let Some(doctor) = restricted(&["mdwe"], &["doctor", "--json"]) else { return };
    let (status, _, way_out) = finding(&doctor, "executable memory");
    assert_eq!(status, "missing");
    assert!(way_out.contains("MemoryDenyWriteExecute="), "{way_out}");
    assert_eq!(doctor.code, Some(1));
}

#[test]
fn a_call_that_kills_is_named_by_a_doctor_that_lives() {
    for (number, name) in [("317", "seccomp"), ("165", "mount"), ("319", "memfd_create")] {
        let Some(doctor) = restricted(&["kill", number], &["doctor", "--json"]) else { return };
        let (status, found, way_out) = finding(&doctor, "host calls");
        assert_eq!(status, "missing");
        assert!(found.contains("kills") && found.contains(name), "{found}");
        assert!(way_out.contains("SystemCallFilter="), "{way_out}");
        assert_eq!(doctor.code, Some(1));
    }
}

#[test]
fn a_blocked_openat2_is_named() {
    let Some(doctor) = restricted(&["enosys", "437"], &["doctor", "--json"]) else { return };
    let (status, found, way_out) = finding(&doctor, "host calls");
    assert_eq!(status, "limited");
    assert!(found.contains("openat2") && way_out.contains("RestrictSUIDSGID="), "{way_out}");
    // Directories of the host are served without it.
    let run = restricted(&["enosys", "437"], &["run", "--rootfs", "/", "--", "true"]);
    let run = run.expect("as before");
    assert_eq!(run.code, Some(0), "{run:?}");
}

/// Makes a user namespace with the number of ids in the first argument, forbids further
/// ones in it, becomes the user of the second argument there and executes the rest.
const IN_A_NAMESPACE: &str = "\
import ctypes, os, sys
count, user = sys.argv[1:3]
ready, mapped = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    assert ctypes.CDLL(None).unshare(0x10000000) == 0  # CLONE_NEWUSER
    os.write(ready[1], b'x')
    os.read(mapped[0], 1)
    with open('/proc/sys/user/max_user_namespaces', 'w') as limit:
        limit.write('0')
    os.setgroups([])
    os.setresgid(*[int(user)] * 3)
    os.setresuid(*[int(user)] * 3)
    os.execv(sys.argv[3], sys.argv[3:])
os.read(ready[0], 1)
for kind in ['gid', 'uid']:
    with open(f'/proc/{child}/{kind}_map', 'w') as ids:
        ids.write(f'0 0 {count}')
os.write(mapped[1], b'x')
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
";

/// Runs `thaw run` in a user namespace with `count` ids as `user`.
fn in_a_namespace(count: &str, user: &str) -> Option<Outcome> {
    if !rustix::process::geteuid().is_root() {
        skip("it takes root to map user ids");
        return None;
    }
    // Has a copy of `thaw` that everybody may execute.
    let nobody = User::nobody();
    let mut command = Command::new(python());
    command.args(["-c", IN_A_NAMESPACE, count, user]).arg(nobody.thaw().get_program());
    Some(run(command.args(["run", "--rootfs", "/", "--weak-limits", "--", "true"])))
}

#[test]
fn used_up_namespaces_are_named() {
    let Some(outcome) = in_a_namespace("65535", "65534") else { return };
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains("sysctl user.max_user_namespaces="), "{outcome:?}");
}

#[test]
fn too_few_user_ids_are_named() {
    // As with PrivateUsers=yes: root, and nobody else.
    let Some(outcome) = in_a_namespace("1", "0") else { return };
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains("PrivateUsers="), "{outcome:?}");
}

#[test]
fn root_without_its_capabilities_is_told_so() {
    if !rustix::process::geteuid().is_root() {
        return skip("it takes root to give up capabilities");
    }
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-all", "--inh-caps=-all"]).arg(thaw_binary());
    let outcome = run(command.args(["doctor", "--json"]));
    let (status, _, way_out) = finding(&outcome, "capabilities");
    assert_eq!(status, "missing");
    assert!(way_out.contains("CapabilityBoundingSet="), "{way_out}");
}

#[test]
fn a_state_directory_without_programs_is_named() {
    if !rustix::process::geteuid().is_root() {
        return skip("it takes root to mount a file system");
    }
    let directory = tempfile::tempdir().expect("a directory");
    // Only in a mount namespace that ends with the command.
    let script = "mount -t tmpfs -o noexec none \"$THAW_HOME\" && exec \"$0\" doctor --json";
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script]).arg(thaw_binary());
    let outcome = run(command.env("THAW_HOME", directory.path()));
    let (status, found, way_out) = finding(&outcome, "state directory");
    assert_eq!(status, "missing", "{found}");
    assert!(found.contains("noexec") && way_out.contains("THAW_HOME"), "{found}; {way_out}");
}

/// Whatever this host can do, the daemon and the doctor say the same of it.
#[test]
fn tenants_are_kept_apart_on_cores_or_the_daemon_says_why_not() {
    let doctor = run(Command::new(thaw_binary()).args(["doctor", "--json"]));
    let (_, found, _) = finding(&doctor, "core scheduling");
    let home = built_home("cores", &[Function::Example("hello-c")]);
    let options = DaemonOptions { arguments: vec!["--core-scheduling".to_owned()] };
    match Daemon::try_start(&home, &options) {
        Ok(daemon) => {
            assert!(found.contains("keeps tenants apart"), "{found}");
            assert_eq!(get(daemon.gateway(), "hello-c", "/").status, 200, "{}", daemon.log());
        }
        Err(log) => {
            assert!(!found.contains("keeps tenants apart"), "{found}: {log}");
            let reasons = ["share a core of this host", "CONFIG_SCHED_CORE"];
            assert!(reasons.iter().any(|reason| log.contains(reason)), "{log}");
            assert!(log.contains("leave it out") || log.contains("leave --core-scheduling out"));
        }
    }
}
