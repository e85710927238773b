//! The host processes of a sandbox, as `/proc` shows them.

use std::fs;
use std::path::Path;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use thaw_abi::control::ProcessMemory;

/// Most processes of a sandbox that are looked for.
const PROCESSES_MAX: usize = 20_000;

/// A process and its descendants, by their numbers in `/proc`.
pub(super) fn descendants(first: u32) -> Vec<u32> {
    let mut all = Vec::new();
    for_descendants(first, |pid| all.push(pid));
    all
}

/// Calls `see` for a process and its descendants.
pub(super) fn for_descendants(first: u32, mut see: impl FnMut(u32)) {
    let mut found = vec![first];
    let mut next = 0;
    while let Some(&pid) = found.get(next).filter(|_| found.len() < PROCESSES_MAX) {
        next += 1;
        see(pid);
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for task in tasks.flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
    }
}

/// The memory of each of these processes that has any, by its number in `/proc`, the largest first.
pub(super) fn memory_of(pids: &[u32]) -> Vec<(u32, ProcessMemory)> {
    let memory_of = |&pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        Some((pid, parse_status(&status)?))
    };
    let mut all: Vec<_> = pids.iter().filter_map(memory_of).collect();
    all.sort_by_key(|(_, memory)| std::cmp::Reverse(memory.resident_kib));
    all
}

/// The processes of a control group, as the caller numbers them.
pub(super) fn members(group: &Path) -> Vec<u32> {
    let listed = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    listed.lines().filter_map(|line| line.parse().ok()).take(PROCESSES_MAX).collect()
}

/// Sends a signal to those of these processes that are in a control group. None of them is taken for
/// another one that has got its number since.
pub(super) fn signal_members(group: &Path, pids: impl Iterator<Item = u32>, signal: Signal) {
    let open = |pid: u32| {
        let opened = pidfd_open(Pid::from_raw(i32::try_from(pid).ok()?)?, PidfdFlags::empty());
        Some((pid, opened.ok()?))
    };
    let opened: Vec<_> = pids.filter_map(open).collect();
    // Who has the number of a member now was opened above, or a member has ended meanwhile.
    let members = members(group);
    for (_, pidfd) in opened.iter().filter(|(pid, _)| members.contains(pid)) {
        let _ = pidfd_send_signal(pidfd, signal);
    }
}

/// The number of a process in its own pid namespace, and its memory (proc_pid_status(5)). One that
/// has ended has none.
fn parse_status(status: &str) -> Option<ProcessMemory> {
    let field =
        |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let host_pid = field("NSpid")?.split_whitespace().last()?.parse().ok()?;
    let resident_kib = field("RssAnon")?.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(ProcessMemory { host_pid, resident_kib })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_the_innermost_number() {
        let status = "Name:\tRssAnon: 1 kB\nPid:\t812\nNSpid:\t812\t40\t7\nRssAnon:\t    1234 kB\n";
        let expected = ProcessMemory { host_pid: 7, resident_kib: 1234 };
        assert_eq!(parse_status(status), Some(expected));
        // A zombie has no memory.
        assert_eq!(parse_status("Name:\tx\nNSpid:\t812\n"), None);
    }

    #[test]
    fn this_process_has_memory() {
        let own = memory_of(&[std::process::id(), u32::MAX]);
        assert!(own.len() == 1 && own[0].1.resident_kib > 0, "{own:?}");
    }
}
