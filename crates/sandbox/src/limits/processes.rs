//! The host processes of a sandbox, as `/proc` shows them.

use std::fs;

use thaw_abi::control::ProcessMemory;

/// Most processes of a sandbox that are looked for.
const PROCESSES_MAX: usize = 20_000;

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

/// The memory of a process and of each of its descendants, the largest first, `most` at most.
pub(super) fn memory_of_descendants(first: u32, most: usize) -> Vec<ProcessMemory> {
    let mut all = Vec::new();
    for_descendants(first, |pid| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        all.extend(parse_status(&status));
    });
    all.sort_by_key(|process| std::cmp::Reverse(process.resident_kib));
    all.truncate(most);
    all
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
        let own = memory_of_descendants(std::process::id(), 1);
        assert!(own.len() == 1 && own[0].resident_kib > 0, "{own:?}");
    }
}
