//! What a process may do, looked at from outside.

use crate::daemon::Daemon;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The words of a field of `/proc/PID/status` (proc_pid_status(5)).
///
/// # Panics
/// There is no such process, or no such field.
#[track_caller]
pub fn status(pid: u32, field: &str) -> Vec<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{field}:")));
    line.expect(field).split_whitespace().map(str::to_owned).collect()
}

/// The user ids of a process, none if it has ended.
pub fn ids_of(pid: u32) -> Vec<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    line.split_whitespace().map(str::to_owned).collect()
}

/// A namespace of a process, as `/proc/PID/ns` has it.
///
/// # Panics
/// There is no such process.
#[track_caller]
pub fn namespace(pid: u32, name: &str) -> PathBuf {
    fs::read_link(format!("/proc/{pid}/ns/{name}")).expect("the process runs")
}

/// The names in the root directory of a process.
///
/// # Panics
/// There is no such process.
#[track_caller]
pub fn names_in_root(pid: u32) -> BTreeSet<String> {
    fs::read_dir(format!("/proc/{pid}/root"))
        .expect("its root")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect()
}

/// Checks that a process has no capabilities, can get none, and has a filter of host calls.
///
/// # Panics
/// It has some.
#[track_caller]
pub fn check_has_no_rights(pid: u32) {
    for field in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status(pid, field), ["0000000000000000"], "{field}");
    }
    assert_eq!(status(pid, "NoNewPrivs"), ["1"]);
    assert_eq!(status(pid, "Seccomp"), ["2"]);
}

/// Checks that a daemon sees its home and little else, and writes to its home and to mounts for
/// which `may_write` holds only.
///
/// # Panics
/// It sees or may write more.
#[track_caller]
pub fn check_sees_its_home_only(daemon: &Daemon, may_write: impl Fn(&str) -> bool) {
    let root = PathBuf::from(format!("/proc/{}/root", daemon.pid()));
    let inside = |path: &Path| root.join(path.strip_prefix("/").expect("an absolute path"));
    let names = names_in_root(daemon.pid());
    let home = daemon.home().canonicalize().expect("the home");
    let top = home.components().nth(1).expect("not the root").as_os_str().to_string_lossy();
    let allowed = ["dev", "proc", "sys", &top];
    assert!(names.iter().all(|name| allowed.contains(&&name[..])), "{names:?}");
    assert!(inside(&home).join("store").is_dir());
    // Nothing beside the home, though it is in the same directory.
    let beside = home.parent().expect("not the root");
    assert_eq!(fs::read_dir(inside(beside)).expect("its parent").count(), 1);
    let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", daemon.pid()));
    for line in mounts.expect("its mounts").lines() {
        let mut fields = line.split(' ').skip(4);
        let (point, options) = (fields.next().expect("a path"), fields.next().expect("options"));
        let is_writable = options.split(',').any(|option| option == "rw");
        assert!(!is_writable || Path::new(point) == home || may_write(point), "{line}");
    }
}
