//! What memory is used for: of a process, and of the host.

use serde::Serialize;
use std::collections::BTreeMap;
use std::io;

/// Memory that a process has for itself, in KiB (proc_pid_smaps(5)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ProcessMemory {
    /// Proportional set size without pages of files.
    pub pss_kib: u64,
    /// Page tables of the process.
    pub page_tables_kib: u64,
}

impl ProcessMemory {
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let unsupported =
            || io::Error::new(io::ErrorKind::Unsupported, "this kernel does not tell Pss_File");
        let all = field(&rollup, "Pss").ok_or_else(unsupported)?;
        let files = field(&rollup, "Pss_File").ok_or_else(unsupported)?;
        Ok(Self {
            pss_kib: all.saturating_sub(files),
            page_tables_kib: field(&status, "VmPTE").unwrap_or(0),
        })
    }
}

/// Memory of the processes of one sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SandboxMemory(ProcessMemory);

impl SandboxMemory {
    /// Of the sandboxes among the processes that descend from one.
    pub fn below(pid: u32) -> io::Result<Self> {
        let mut sum = ProcessMemory::default();
        for pid in tree(pid, &parents()?) {
            // Processes of sandboxes run the kernel, which is a file in memory.
            let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            if program.to_string_lossy().starts_with("/memfd:thaw-kernel") {
                let own = ProcessMemory::of(pid)?;
                sum.pss_kib += own.pss_kib;
                sum.page_tables_kib += own.page_tables_kib;
            }
        }
        match sum == ProcessMemory::default() {
            true => Err(io::Error::other("there is no process of a sandbox")),
            false => Ok(Self(sum)),
        }
    }

    /// Own pages and page tables, in KiB.
    pub fn own_kib(self) -> u64 {
        self.0.pss_kib + self.0.page_tables_kib
    }
}

/// Memory of this process and of all that descend from it, in KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TreeMemory {
    /// Processes.
    pub processes: i64,
    /// Proportional set sizes without pages of files.
    pub pss_kib: i64,
    /// Page tables.
    pub page_tables_kib: i64,
}

impl TreeMemory {
    pub(crate) fn now() -> io::Result<Self> {
        let mut sum = Self::default();
        for pid in tree(std::process::id(), &parents()?) {
            // It may have ended meanwhile.
            let Ok(own) = ProcessMemory::of(pid) else { continue };
            sum.processes += 1;
            sum.pss_kib += own.pss_kib as i64;
            sum.page_tables_kib += own.page_tables_kib as i64;
        }
        Ok(sum)
    }

    /// What has been added since `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            processes: self.processes - before.processes,
            pss_kib: self.pss_kib - before.pss_kib,
            page_tables_kib: self.page_tables_kib - before.page_tables_kib,
        }
    }
}

/// The processes of this host, each with its parent (proc_pid_stat(5)).
fn parents() -> io::Result<Vec<(u32, u32)>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Ok(pid) = entry?.file_name().to_string_lossy().parse() else { continue };
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        all.extend(parent(&stat).map(|parent| (pid, parent)));
    }
    Ok(all)
}

/// The fourth field; the second is a name in parentheses, which may hold anything.
fn parent(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

/// A process and its descendants, of processes with their parents.
fn tree(root: u32, parents: &[(u32, u32)]) -> Vec<u32> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for &(pid, parent) in parents {
        children.entry(parent).or_default().push(pid);
    }
    let mut found = vec![root];
    let mut at = 0;
    while let Some(pid) = found.get(at) {
        found.extend(children.remove(pid).unwrap_or_default());
        at += 1;
    }
    found
}

/// What the host uses memory for, in KiB (proc_meminfo(5)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostMemory {
    /// Not available to others.
    pub used_kib: i64,
    /// Pages of processes without a file.
    pub anonymous_kib: i64,
    /// Pages of files that exist in memory only, such as those of sandboxes' memory.
    pub shmem_kib: i64,
    /// Page tables.
    pub page_tables_kib: i64,
    /// Kernel objects: mappings, processes, descriptors, sockets.
    pub slab_kib: i64,
    /// Kernel stacks.
    pub kernel_stacks_kib: i64,
    /// Counters of control groups and the like, one for each processor.
    pub per_cpu_kib: i64,
}

impl HostMemory {
    pub(crate) fn now() -> io::Result<Self> {
        Ok(Self::parse(&std::fs::read_to_string("/proc/meminfo")?))
    }

    fn parse(text: &str) -> Self {
        let field = |name| field(text, name).unwrap_or(0) as i64;
        Self {
            used_kib: field("MemTotal") - field("MemAvailable"),
            anonymous_kib: field("AnonPages"),
            shmem_kib: field("Shmem"),
            page_tables_kib: field("PageTables"),
            slab_kib: field("Slab"),
            kernel_stacks_kib: field("KernelStack"),
            per_cpu_kib: field("Percpu"),
        }
    }

    /// What has been added since `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            used_kib: self.used_kib - before.used_kib,
            anonymous_kib: self.anonymous_kib - before.anonymous_kib,
            shmem_kib: self.shmem_kib - before.shmem_kib,
            page_tables_kib: self.page_tables_kib - before.page_tables_kib,
            slab_kib: self.slab_kib - before.slab_kib,
            kernel_stacks_kib: self.kernel_stacks_kib - before.kernel_stacks_kib,
            per_cpu_kib: self.per_cpu_kib - before.per_cpu_kib,
        }
    }
}

/// A line `name:   123 kB`.
fn field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.trim().trim_end_matches(" kB").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_names() {
        let text = "Pss:   12 kB\nPss_File:    4 kB\nMemTotal: 100 kB\nMemAvailable: 40 kB\n";
        assert_eq!(field(text, "Pss"), Some(12));
        assert_eq!(field(text, "Pss_File"), Some(4));
        assert_eq!(field(text, "Ps"), None);
        let memory = HostMemory::parse(text);
        assert_eq!(memory.used_kib, 60);
        assert_eq!(memory.since(memory), HostMemory::default());
    }

    #[test]
    fn descendants_of_descendants_are_found() {
        let parents = [(7, 3), (3, 1), (9, 7), (4, 1), (1, 0), (8, 7)];
        assert_eq!(tree(3, &parents), [3, 7, 9, 8]);
        assert_eq!(tree(4, &parents), [4]);
        assert_eq!(parent("7 (a) b) S 3 7 7 0"), Some(3));
        assert_eq!(parent("7 (a"), None);
    }

    #[test]
    fn a_child_counts() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let found = tree(std::process::id(), &parents().unwrap());
        let sum = TreeMemory::now().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found.contains(&child.id()), "{found:?}");
        assert!(sum.processes >= 2 && sum.pss_kib > 0, "{sum:?}");
    }

    #[test]
    fn this_process_has_memory() {
        assert!(ProcessMemory::of(std::process::id()).unwrap().pss_kib > 0);
        assert!(HostMemory::now().unwrap().used_kib > 0);
    }
}
