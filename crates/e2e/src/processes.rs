//! Looking at processes of the host through `/proc`.

use rustix::process::{Pid, Signal};
use std::fs;

/// A process of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// Its parent's id.
    pub parent: u32,
    /// One letter, as in `/proc/PID/stat`.
    pub state: char,
    /// Its name.
    pub name: String,
}

/// A process, if it exists.
pub fn process(pid: u32) -> Option<Process> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (before, after) = stat.rsplit_once(')')?;
    let name = before.split_once('(')?.1.to_owned();
    let mut fields = after.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some(Process { pid, parent: fields.next()?.parse().ok()?, state, name })
}

/// Whether a process exists and has not ended.
pub fn exists(pid: u32) -> bool {
    process(pid).is_some_and(|process| process.state != 'Z' && process.state != 'X')
}

/// All processes that have not ended.
fn living() -> Vec<Process> {
    let entries = fs::read_dir("/proc").expect("/proc");
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(process)
        .filter(|process| process.state != 'Z' && process.state != 'X')
        .collect()
}

/// The children of a process that have not ended.
pub fn children(pid: u32) -> Vec<Process> {
    let mut found = living();
    found.retain(|process| process.parent == pid);
    found
}

/// All processes below a process, those nearest to it first.
pub fn descendants(pid: u32) -> Vec<Process> {
    let (mut found, mut left) = (Vec::new(), living());
    let mut parents = vec![pid];
    while !parents.is_empty() {
        let (below, others): (Vec<_>, Vec<_>) =
            left.into_iter().partition(|process| parents.contains(&process.parent));
        parents = below.iter().map(|process| process.pid).collect();
        found.extend(below);
        left = others;
    }
    found
}

/// Kills a process as `kill -9` does; it may have ended already.
pub fn kill(pid: u32) {
    if let Some(pid) = Pid::from_raw(pid as i32) {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}
