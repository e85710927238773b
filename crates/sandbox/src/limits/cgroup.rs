//! Control groups with the memory controller, version 2 or 1 (cgroups(7)).

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Version of the control group file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// One unified tree.
    V2,
    /// A tree for the memory controller alone.
    V1,
}

/// A group of this process in which sandboxes get groups of their own. Dropping
/// it removes it.
#[derive(Debug)]
pub struct Hierarchy {
    version: Version,
    directory: PathBuf,
}

/// The memory control group of one sandbox. Dropping it removes it.
#[derive(Debug)]
pub struct MemoryGroup {
    directory: PathBuf,
    limit: File,
    /// The limit in force, to save the host call when nothing changes.
    current: AtomicU64,
    /// Must not be removed before its groups are.
    hierarchy: Arc<Hierarchy>,
}

/// Prefix of the groups that a process of ours makes, followed by its process
/// id and start time: what is left by a dead one can be told and removed.
const PREFIX: &str = "thaw-";
/// A limit that could not be set: whatever comes next is written.
const UNKNOWN: u64 = u64::MAX;
/// Depth to which leftovers are looked for.
const SEARCH_DEPTH: usize = 6;

/// Why there is no memory controller to be used, in words.
pub type Unavailable = String;

/// Finds a writable tree with the memory controller, removes what dead
/// processes of ours left in it, and makes a group for this process.
pub fn discover() -> Result<Arc<Hierarchy>, Unavailable> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(|error| error.to_string())?;
    let groups = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
    let mut reasons = Vec::new();
    for (version, mount) in memory_mounts(&mounts) {
        match Hierarchy::make(version, &mount, &own_directory(version, &mount, &groups)) {
            Ok(hierarchy) => return Ok(hierarchy),
            Err(error) => reasons.push(format!("{}: {error}", mount.display())),
        }
    }
    if reasons.is_empty() {
        reasons.push("no control group tree with the memory controller is mounted".to_owned());
    }
    Err(reasons.join("; "))
}

/// Mount points of trees that may have the memory controller, version 2 first.
fn memory_mounts(mountinfo: &str) -> Vec<(Version, PathBuf)> {
    let mut found: Vec<(Version, PathBuf)> = mountinfo
        .lines()
        .filter_map(|line| {
            let (mount, kind) = line.split_once(" - ")?;
            let path = PathBuf::from(mount.split(' ').nth(4)?);
            let mut kind = kind.split(' ');
            match kind.next()? {
                "cgroup2" => Some((Version::V2, path)),
                "cgroup" if kind.nth(1)?.split(',').any(|option| option == "memory") => {
                    Some((Version::V1, path))
                }
                _ => None,
            }
        })
        .collect();
    found.sort_by_key(|(version, _)| *version == Version::V1);
    found
}

/// The directory of this process's own group; the mount point itself where that
/// is not visible, as in a container.
fn own_directory(version: Version, mount: &Path, groups: &str) -> PathBuf {
    let own = groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers) = (fields.next()?, fields.next()?);
        let fits = match version {
            Version::V2 => number == "0" && controllers.is_empty(),
            Version::V1 => controllers.split(',').any(|controller| controller == "memory"),
        };
        if fits { fields.next() } else { None }
    });
    let directory = mount.join(own.unwrap_or("/").trim_start_matches('/'));
    if directory.is_dir() { directory } else { mount.to_owned() }
}

impl Hierarchy {
    fn make(version: Version, mount: &Path, own: &Path) -> io::Result<Arc<Self>> {
        remove_leftovers(mount, SEARCH_DEPTH);
        let name = group_name(std::process::id())
            .ok_or_else(|| io::Error::other("cannot read /proc/self/stat"))?;
        if version == Version::V2 {
            enable_memory(mount, own)?;
        }
        // Several in one process: tests, or a pool beside another.
        let directory = (0..1000)
            .map(|number| own.join(format!("{PREFIX}{name}-{number}")))
            .find_map(|directory| match fs::create_dir(&directory) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => None,
                result => Some(result.map(|()| directory)),
            })
            .unwrap_or_else(|| Err(io::Error::from(io::ErrorKind::AlreadyExists)))?;
        let hierarchy = Arc::new(Self { version, directory });
        if version == Version::V2 {
            fs::write(hierarchy.directory.join("cgroup.subtree_control"), "+memory")?;
        }
        // Prove it now, not at the first zygote.
        drop(hierarchy.create(0)?);
        Ok(hierarchy)
    }

    /// Version of the tree.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The group that holds those of the sandboxes.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Makes the group of the sandbox with this number, which must be unique.
    pub fn create(self: &Arc<Self>, number: u64) -> io::Result<MemoryGroup> {
        let directory = self.directory.join(number.to_string());
        fs::create_dir(&directory)?;
        match MemoryGroup::set_up(&directory, self) {
            Ok(group) => Ok(group),
            Err(error) => {
                let _ = fs::remove_dir(&directory);
                Err(error)
            }
        }
    }
}

impl Drop for Hierarchy {
    fn drop(&mut self) {
        remove_tree(&self.directory);
    }
}

/// Makes the memory controller available in groups below `own`. Version 2
/// wants every process in a leaf, so this process moves into one of its own.
fn enable_memory(mount: &Path, own: &Path) -> io::Result<()> {
    let has_memory = |file: &str| {
        fs::read_to_string(own.join(file))
            .map(|controllers| controllers.split_whitespace().any(|name| name == "memory"))
    };
    if !has_memory("cgroup.controllers")? {
        return Err(io::Error::other("the memory controller is not available there"));
    }
    if has_memory("cgroup.subtree_control")? {
        return Ok(());
    }
    let is_root = own == mount;
    if !is_root {
        let others = fs::read_to_string(own.join("cgroup.procs"))?;
        let me = std::process::id().to_string();
        if others.lines().any(|pid| pid != me) {
            return Err(io::Error::other(
                "the group is shared with other processes; start Thaw in a delegated group of its own",
            ));
        }
        let leaf = own.join("thaw-host");
        if !leaf.is_dir() {
            fs::create_dir(&leaf)?;
        }
        fs::write(leaf.join("cgroup.procs"), "0")?;
    }
    fs::write(own.join("cgroup.subtree_control"), "+memory")
}

impl MemoryGroup {
    fn set_up(directory: &Path, hierarchy: &Arc<Hierarchy>) -> io::Result<Self> {
        let file = match hierarchy.version {
            Version::V2 => {
                // One process of a sandbox is no use without the others.
                fs::write(directory.join("memory.oom.group"), "1")?;
                write_if_present(&directory.join("memory.swap.max"), "0")?;
                "memory.max"
            }
            Version::V1 => "memory.limit_in_bytes",
        };
        let limit = File::options().write(true).open(directory.join(file))?;
        Ok(Self {
            directory: directory.to_owned(),
            limit,
            current: AtomicU64::new(0),
            hierarchy: hierarchy.clone(),
        })
    }

    /// The file whose write moves the writing, single-threaded process into the group.
    pub fn processes(&self) -> io::Result<OwnedFd> {
        let file = match self.hierarchy.version {
            Version::V2 => "cgroup.procs",
            // A thread that moves itself need not wait until every process of
            // the host has left fork and exit, as the move of a process must.
            Version::V1 => "tasks",
        };
        Ok(File::options().write(true).open(self.directory.join(file))?.into())
    }

    /// Sets the limit in bytes; 0: none.
    pub fn set_limit(&self, bytes: u64) -> io::Result<()> {
        if self.current.swap(bytes, Ordering::Relaxed) == bytes {
            return Ok(());
        }
        let text = match (bytes, self.hierarchy.version) {
            (0, Version::V2) => "max".to_owned(),
            (0, Version::V1) => "-1".to_owned(),
            (bytes, _) => bytes.to_string(),
        };
        let written = self.limit.write_all_at(text.as_bytes(), 0);
        if written.is_err() {
            self.current.store(UNKNOWN, Ordering::Relaxed);
        }
        written
    }

    /// The group's directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // Still occupied: the parent group's removal, or the next start, gets it.
        let _ = fs::remove_dir(&self.directory);
    }
}

fn write_if_present(path: &Path, text: &str) -> io::Result<()> {
    match fs::write(path, text) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// `PID-STARTTIME` of a live process.
fn group_name(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain anything; fields count from its end.
    let (_, fields) = stat.rsplit_once(')')?;
    let start_time = fields.split_whitespace().nth(19)?;
    Some(format!("{pid}-{start_time}"))
}

/// Removes the groups of processes of ours that no longer live.
fn remove_leftovers(directory: &Path, depth: usize) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let name = entry.file_name();
        match name.to_str().and_then(|name| name.strip_prefix(PREFIX)) {
            Some(owner) if is_leftover(owner) => remove_tree(&entry.path()),
            Some(_) => {}
            None if depth > 0 => remove_leftovers(&entry.path(), depth - 1),
            None => {}
        }
    }
}

/// Whether `PID-STARTTIME-NUMBER` names a process that has ended.
fn is_leftover(owner: &str) -> bool {
    let Some((process, _)) = owner.rsplit_once('-') else { return false };
    let Some(pid) = process.split('-').next().and_then(|pid| pid.parse().ok()) else {
        return false;
    };
    group_name(pid).as_deref() != Some(process)
}

/// Removes a group and the groups in it, as far as they are empty.
fn remove_tree(directory: &Path) {
    if let Ok(entries) = fs::read_dir(directory) {
        for entry in entries.flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let _ = fs::remove_dir(entry.path());
            }
        }
    }
    let _ = fs::remove_dir(directory);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
30 23 0:26 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw
31 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct
32 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
";

    #[test]
    fn trees_with_memory_are_found_newest_first() {
        assert_eq!(
            memory_mounts(MOUNTS),
            [
                (Version::V2, PathBuf::from("/sys/fs/cgroup/unified")),
                (Version::V1, PathBuf::from("/sys/fs/cgroup/memory")),
            ]
        );
    }

    #[test]
    fn a_group_of_another_namespace_falls_back_to_the_mount() {
        let mount = Path::new("/sys");
        let groups = "4:memory:/nowhere/at/all\n0::/\n";
        assert_eq!(own_directory(Version::V1, mount, groups), mount);
        assert_eq!(own_directory(Version::V2, mount, groups), mount);
    }

    #[test]
    fn only_groups_of_dead_processes_are_leftovers() {
        let live = group_name(std::process::id()).unwrap();
        assert!(!is_leftover(&format!("{live}-0")));
        assert!(is_leftover("4000000000-12-0"));
        assert!(is_leftover(&format!("{}-1-0", std::process::id())));
        assert!(!is_leftover("slice"));
    }

    #[test]
    fn leftovers_are_removed_at_any_depth() {
        let tree = tempfile::tempdir().unwrap();
        let stale = tree.path().join("a/b/thaw-4000000000-12-0");
        fs::create_dir_all(stale.join("7")).unwrap();
        let live = group_name(std::process::id()).unwrap();
        let live = tree.path().join(format!("a/thaw-{live}-0"));
        fs::create_dir_all(&live).unwrap();
        remove_leftovers(tree.path(), SEARCH_DEPTH);
        assert!(!stale.exists());
        assert!(live.exists());
    }
}
