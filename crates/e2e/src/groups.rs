//! Limits in the control groups of a process.

use std::fs;

/// The memory limit of a process's control group, in bytes, with what Thaw holds back of it as a reserve
/// of the sandbox, to the nearest 16 MiB.
pub fn memory_limit_of(pid: u32) -> Option<u64> {
    const TO_THE_NEAREST: u64 = 16 << 20;
    let bytes = limit_of(pid, "memory", "memory.limit_in_bytes", "memory.max")?;
    Some((bytes + TO_THE_NEAREST / 2) / TO_THE_NEAREST * TO_THE_NEAREST)
}

/// The first number in a file of a process's control group for a controller, which has this name in
/// version 1, and that one in version 2.
pub fn limit_of(pid: u32, controller: &str, v1: &str, v2: &str) -> Option<u64> {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let group_of = |name: &str| {
        let lines = groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let mut found = lines.filter(|(names, _)| names.split(',').any(|one| one == name));
        found.next().map(|(_, group)| group)
    };
    let text = match group_of(controller) {
        Some(group) => {
            let mounts = [controller, "cpu,cpuacct"].map(|mount| format!("/sys/fs/cgroup/{mount}"));
            mounts.iter().find_map(|mount| fs::read_to_string(format!("{mount}{group}/{v1}")).ok())
        }
        None => fs::read_to_string(format!("/sys/fs/cgroup{}/{v2}", group_of("")?)).ok(),
    };
    text?.split_whitespace().next()?.parse().ok()
}
