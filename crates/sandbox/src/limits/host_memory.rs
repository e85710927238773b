//! How much memory the host has for a sandbox that has no limit of its own.

use std::fs;
use std::path::Path;

use super::discover::trees;
use super::hierarchy::{Controller, Version};

/// Bytes of memory of the host, or the lowest limit of the control groups that hold this process if that
/// is lower. `None`: the host does not say (proc_meminfo(5)).
pub(crate) fn host_memory() -> Option<u64> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let of_machine = machine_memory(&read("/proc/meminfo"))?;
    let limit = lowest_limit(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"));
    Some(limit.map_or(of_machine, |limit| limit.min(of_machine)))
}

fn machine_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The lowest limit of memory of the process with these mounts and control groups.
fn lowest_limit(mountinfo: &str, groups: &str) -> Option<u64> {
    let trees = trees(mountinfo);
    let with_memory = trees.iter().filter(|tree| tree.controllers.contains(&Controller::Memory));
    let limits = with_memory.flat_map(|tree| {
        let file = match tree.version {
            Version::V2 => "memory.max",
            Version::V1 => "memory.limit_in_bytes",
        };
        limits_from(&tree.own_directory(groups), &tree.mount, file)
    });
    limits.min()
}

/// The limits of a group and of those above it, up to the root of its tree. Groups without a limit say
/// `max`, or a number that no machine has.
fn limits_from(own: &Path, root: &Path, file: &str) -> Vec<u64> {
    let groups = own.ancestors().take_while(|group| group.starts_with(root));
    groups
        .filter_map(|group| fs::read_to_string(group.join(file)).ok()?.trim().parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_a_machine_is_read() {
        let text = "MemTotal:       24684084 kB\nMemFree:        1 kB\n";
        assert_eq!(machine_memory(text), Some(24684084 << 10));
        for wrong in ["", "MemTotal: x kB\n", "MemTotal: 18446744073709551615 kB\n"] {
            assert_eq!(machine_memory(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_lowest_limit_of_all_groups_above_counts() {
        let root = tempfile::tempdir().unwrap();
        let own = root.path().join("a/b");
        fs::create_dir_all(&own).unwrap();
        let mounts = format!("30 20 0:26 / {} rw - cgroup2 none rw\n", root.path().display());
        let lowest = || lowest_limit(&mounts, "0::/a/b\n");
        assert_eq!(lowest(), None, "no group has a limit");
        fs::write(own.join("memory.max"), "max\n").unwrap();
        assert_eq!(lowest(), None, "nor has this one");
        fs::write(root.path().join("a/memory.max"), "3000\n").unwrap();
        assert_eq!(lowest(), Some(3000));
        fs::write(own.join("memory.max"), "2000\n").unwrap();
        assert_eq!(lowest(), Some(2000));
        fs::write(root.path().join("a/memory.max"), "1000\n").unwrap();
        assert_eq!(lowest(), Some(1000));
    }

    #[test]
    fn groups_of_version_1_have_a_file_of_another_name() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("a")).unwrap();
        fs::write(root.path().join("a/memory.limit_in_bytes"), "2000\n").unwrap();
        let mounts = format!("30 20 0:26 / {} rw - cgroup none rw,memory\n", root.path().display());
        assert_eq!(lowest_limit(&mounts, "4:memory:/a\n"), Some(2000));
    }
}
