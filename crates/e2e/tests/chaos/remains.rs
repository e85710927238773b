//! What must not be left: orphans, control groups, damage in the store, descriptors and
//! threads of the daemon.

use rustix::process::{getpid, set_child_subreaper};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use thaw_e2e::{Daemon, Process, descendants, run, thaw, wait_until};
use thaw_store::{Repair, Store};

/// Depth to which control groups are looked for.
const SEARCH_DEPTH: usize = 8;

/// Makes every orphan of what this process starts its child: prctl(2),
/// `PR_SET_CHILD_SUBREAPER`.
pub fn adopt_orphans() {
    set_child_subreaper(Some(getpid())).expect("prctl");
}

/// Checks that no process which this one has started, directly or not, lives.
pub fn check_no_orphans() {
    let left = || -> Vec<Process> { descendants(std::process::id()) };
    wait_until("no process is left", || left().is_empty());
}

/// Checks that no daemon with one of these process ids has left a control group.
pub fn check_no_groups(daemons: &BTreeSet<u32>) {
    let left = || {
        let mut found = Vec::new();
        find_groups(Path::new("/sys/fs/cgroup"), SEARCH_DEPTH, daemons, &mut found);
        found
    };
    wait_until("no control group is left", || left().is_empty());
}

fn find_groups(directory: &Path, depth: usize, daemons: &BTreeSet<u32>, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let name = entry.file_name();
        // `thaw-PID-STARTTIME-NUMBER`, as in crates/sandbox/src/limits.
        let maker = name.to_str().and_then(|name| name.strip_prefix("thaw-")?.split('-').next());
        if maker.and_then(|pid| pid.parse().ok()).is_some_and(|pid| daemons.contains(&pid)) {
            found.push(entry.path());
        } else if depth > 0 {
            find_groups(&entry.path(), depth - 1, daemons, found);
        }
    }
}

/// Checks every file of the store, and that the collector can work.
pub fn check_store(home: &Path) {
    let outcome = run(thaw().env("THAW_HOME", home).arg("gc"));
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let store = Store::open(&home.join("store")).expect("the store");
    let report = store.verify(Repair::Report, &mut |_| {}).expect("a check of the store");
    assert_eq!(report.problems, [], "of {} files", report.files);
}

/// What a daemon holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holdings {
    /// Open descriptors.
    pub descriptors: usize,
    /// Threads.
    pub threads: usize,
    /// Processes below it.
    pub processes: usize,
}

impl Holdings {
    /// Of a live daemon, now.
    pub fn of(daemon: &Daemon) -> Self {
        let count = |what| {
            let path = format!("/proc/{}/{what}", daemon.pid());
            fs::read_dir(path).expect("the daemon lives").count()
        };
        let processes = daemon.sandboxes().len();
        Self { descriptors: count("fd"), threads: count("task"), processes }
    }

    /// Whether these are no more than `before`, apart from what each further process takes:
    /// the pools grow in times of demand and shrink slowly.
    pub fn fit(self, before: Self) -> bool {
        /// Control socket, pidfd, console, control group and output of a sandbox.
        const FOR_EACH_PROCESS: usize = 6;
        /// Pairs of pipes for the output of the next sandboxes, both ends of each.
        const STOCK_OF_PIPES: usize = 4 * 32;
        /// Groups that templates keep for their next copies: templates, groups of each, and
        /// files of a group (control groups version 1 has a hierarchy for each controller).
        const SEATS: usize = 2 * 8 * 5;
        /// Threads of the runtime end after some idle seconds, and begin when needed.
        const SLACK: usize = 8;
        let more = self.processes.saturating_sub(before.processes);
        let kept = STOCK_OF_PIPES + SEATS + SLACK;
        self.descriptors <= before.descriptors + more * FOR_EACH_PROCESS + kept
            && self.threads <= before.threads + SLACK
    }
}
