//! Looking at processes of the host through `/proc`.

use rustix::process::{Pid, Signal};
use std::collections::BTreeMap;
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

/// Bytes of memory that a process has now (`VmRSS`, proc_pid_status(5)).
///
/// # Panics
/// There is no such process.
pub fn resident_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    let kibibytes: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kibibytes << 10
}

/// Whether a process exists and has not ended: while some of its threads are left it still has its
/// files, also when its first one has gone.
pub fn exists(pid: u32) -> bool {
    let threads = || fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    process(pid).is_some_and(|process| !has_gone(&process) || threads() > 1)
}

fn has_gone(process: &Process) -> bool {
    matches!(process.state, 'Z' | 'X')
}

/// All processes that have not ended.
fn living() -> Vec<Process> {
    let entries = fs::read_dir("/proc").expect("/proc");
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(process)
        .filter(|process| !has_gone(process))
        .collect()
}

/// The state helper of the sandboxes among which `pid` is one, if it works for one of them: in the
/// same user namespace.
pub fn state_helper_at_work(pid: u32) -> Option<u32> {
    let namespace = |of: u32| fs::read_link(format!("/proc/{of}/ns/user")).ok();
    let own = namespace(pid)?;
    let is_of_them =
        |found: &Process| found.name == "thaw-state" && namespace(found.pid) == Some(own.clone());
    let found: Vec<_> = living().into_iter().filter(is_of_them).collect();
    let has_worker = |helper: &&Process| found.iter().any(|worker| worker.parent == helper.pid);
    found.iter().find(has_worker).map(|helper| helper.pid)
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

/// What a process and all below it do at this moment, a line for each: state, CPU time in seconds,
/// where the host holds it (`wchan`) and the host call that it is in (`syscall`, proc(5)).
pub fn activity(pid: u32) -> String {
    let line = |process: Process| {
        let Process { pid, state, name, .. } = process;
        let read =
            |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        // In nanoseconds, of the first thread (Documentation/scheduler/sched-stats.rst).
        let on_cpu = read("schedstat").split(' ').next().and_then(|text| text.parse().ok());
        let seconds = on_cpu.unwrap_or(0_u64) as f64 / 1e9;
        let (wchan, call) = (read("wchan"), read("syscall"));
        format!("  {pid} {name} {state} {seconds:.2} s of CPU, {wchan}, {}\n", call.trim_end())
    };
    process(pid).into_iter().chain(descendants(pid)).map(line).collect()
}

/// Kills a process as `kill -9` does; it may have ended already.
pub fn kill(pid: u32) {
    if let Some(pid) = Pid::from_raw(pid as i32) {
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}

/// An open descriptor of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// What it leads to, as `/proc/PID/fd` shows it: a path, `pipe:[…]`, `socket:[…]`.
    pub target: String,
    /// The flags of open(2), with the access mode.
    pub flags: u32,
}

impl Descriptor {
    /// Whether it can be read only.
    pub fn is_read_only(&self) -> bool {
        self.flags & 3 == 0
    }

    /// Whether it can be written only.
    pub fn is_write_only(&self) -> bool {
        self.flags & 3 == 1
    }

    /// Whether it is a pipe to be written to.
    pub fn is_pipe_to_write(&self) -> bool {
        self.target.starts_with("pipe:") && self.is_write_only()
    }
}

/// What a process has open, by number; empty if it has ended.
pub fn descriptors(pid: u32) -> BTreeMap<u32, Descriptor> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let descriptor = |entry: fs::DirEntry| {
        let number: u32 = entry.file_name().to_str()?.parse().ok()?;
        let target = fs::read_link(entry.path()).ok()?.to_string_lossy().into_owned();
        let information = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
        let flags = information.lines().find_map(|line| line.strip_prefix("flags:"))?;
        let flags = u32::from_str_radix(flags.trim(), 8).ok()?;
        Some((number, Descriptor { target, flags }))
    };
    entries.filter_map(descriptor).collect()
}
