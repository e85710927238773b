//! The directories of this process in which sandboxes get control groups of their own.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use super::group::{Group, GroupName, InForce};
use super::stock::{Reusable, Stock};
use super::supervisor;
use crate::monitor::MonitorLink;

/// Version of the control group file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Version {
    /// One unified tree.
    V2,
    /// A tree for each controller, or for some of them together.
    V1,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V2 => "2",
            Self::V1 => "1",
        })
    }
}

/// What a control group counts or bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Controller {
    /// Memory.
    Memory,
    /// CPU time in each period.
    Cpu,
    /// Processes and threads.
    Pids,
    /// CPU time in all, of processes that have ended, too. Every group of version 2
    /// counts it.
    CpuAccounting,
}

impl Controller {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Memory, Self::Cpu, Self::Pids, Self::CpuAccounting];

    /// Name in a tree of version 1, and, but for the accounting, of version 2.
    pub fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
            Self::Pids => "pids",
            Self::CpuAccounting => "cpuacct",
        }
    }

    /// The limit that depends on it, in words.
    pub fn limit(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "processors",
            Self::Pids => "processes",
            Self::CpuAccounting => "CPU time",
        }
    }
}

/// A controller that cannot be used, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// Which.
    pub controller: Controller,
    /// A phrase for the operator.
    pub reason: String,
}

/// Where the groups of the sandboxes are made in one tree: by the version, beside an empty group
/// that stands for this process, or in it.
///
/// In a tree of version 1 no group holds them all: it would count as one with those beside it, so
/// that a sandbox that wakes up would have to wait for what another had too much (200 µs became
/// 320 µs until the first response byte on a machine with ten times more to do than it could).
///
/// In a tree of version 2 one does, with more weight ([`super::discover`]): who may write to its
/// `cgroup.procs` moves processes within it, and nobody into it or out of it (cgroups(7), "Cgroups
/// delegation: delegation containment").
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Version of the tree.
    pub version: Version,
    /// The directory of the group that stands for this process.
    pub directory: PathBuf,
    /// The controllers that the groups of the sandboxes have.
    pub controllers: Vec<Controller>,
}

impl Place {
    /// Whether a sandbox can have groups here that another one has had. In a tree of version 2
    /// the host kernel keeps more accounts of a group (pressure, events), which cannot be told
    /// from those of the next sandbox.
    pub(super) fn is_reusable(&self) -> bool {
        self.version == Version::V1
    }

    /// The directory in which those of the sandboxes' groups are.
    pub(crate) fn above_sandboxes(&self) -> &Path {
        match self.version {
            Version::V1 => self.directory.parent().unwrap_or(&self.directory),
            Version::V2 => &self.directory,
        }
    }

    /// Whether this is the directory of a sandbox's group.
    pub(crate) fn is_of_sandbox(&self, directory: &Path) -> bool {
        let prefix = self.of_sandbox_prefix();
        let rest = directory.as_os_str().as_encoded_bytes().strip_prefix(prefix.as_encoded_bytes());
        rest.is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit))
    }

    /// The directories of all groups of sandboxes that are there.
    fn sandboxes(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.above_sandboxes()).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| self.is_of_sandbox(path)).collect()
    }

    /// How the directories of sandboxes' groups begin.
    fn of_sandbox_prefix(&self) -> OsString {
        let mut prefix = self.directory.clone().into_os_string();
        prefix.push(if self.version == Version::V1 { "." } else { "/" });
        prefix
    }

    /// The directory of a sandbox's group.
    pub(crate) fn of_sandbox(&self, number: u64) -> PathBuf {
        let mut directory = self.of_sandbox_prefix();
        directory.push(number.to_string());
        directory.into()
    }

    /// The group of the zygote parents of a monitor, from which processes move into those of
    /// sandboxes. `None`: they may be anywhere.
    pub(super) fn of_zygote_parents(&self) -> Option<PathBuf> {
        (self.version == Version::V2).then(|| self.directory.join("zygote-parents"))
    }
}

/// Where the sandboxes of this process get their groups: a place for each tree that
/// has a controller. There may be none. Dropping it removes the places.
#[derive(Debug)]
pub struct Hierarchy {
    places: Vec<Place>,
    missing: Vec<Missing>,
    maker: Maker,
    /// Where this process is the maker: groups of sandboxes that have ended.
    stock: Arc<Stock>,
}

/// Who makes and removes the groups.
#[derive(Debug)]
pub(super) enum Maker {
    /// This process.
    Own,
    /// Its monitor.
    Monitor(Arc<MonitorLink>),
}

impl Hierarchy {
    pub(super) fn new(places: Vec<Place>, missing: Vec<Missing>) -> Arc<Self> {
        supervisor::note_hierarchy();
        Arc::new(Self { places, missing, maker: Maker::Own, stock: Arc::default() })
    }

    /// The places of a monitor, which makes the groups.
    pub fn granted(link: Arc<MonitorLink>) -> Arc<Self> {
        let (places, missing) = (link.grant().places.clone(), link.grant().missing.clone());
        supervisor::note_hierarchy();
        Arc::new(Self { places, missing, maker: Maker::Monitor(link), stock: Arc::default() })
    }

    /// The places that this process had before it executed another program.
    pub(crate) fn restored(places: Vec<Place>, missing: Vec<Missing>) -> Arc<Self> {
        Self::new(places, missing)
    }

    pub(super) fn maker(&self) -> &Maker {
        &self.maker
    }

    pub(super) fn stock(&self) -> &Arc<Stock> {
        &self.stock
    }

    /// Where the groups of the sandboxes are made.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// Controllers that cannot be used.
    pub fn missing(&self) -> &[Missing] {
        &self.missing
    }

    /// Whether this controller can be used.
    pub fn has(&self, controller: Controller) -> bool {
        self.place_of(controller).is_some()
    }

    /// The place, by its number, of the tree with this controller.
    pub(super) fn place_of(&self, controller: Controller) -> Option<usize> {
        self.places.iter().position(|place| place.controllers.contains(&controller))
    }

    /// Makes the groups of the sandbox with this number, which must be unique, or takes
    /// them from the stock. A monitor numbers them itself. Limits are in force that an earlier
    /// sandbox had, until others are set.
    ///
    /// # Errors
    /// The host kernel refuses; nothing is left behind.
    pub fn create(self: &Arc<Self>, number: u64) -> io::Result<Group> {
        if let Maker::Monitor(link) = &self.maker {
            let (name, entrances) = link.make_group()?;
            let in_force = match name.first == name.number {
                true => InForce::FIRST,
                false => link.settings().take(name.first),
            };
            let directories = self.directories(name);
            return Ok(Group::given(directories, name, entrances, self.clone(), in_force));
        }
        let reused = self.stock.take();
        let name =
            reused.as_ref().map_or(GroupName::of_first(number), |reused| reused.name(number));
        let directories = self.directories(name);
        let is_there = |place: &Place| reused.is_some() && place.is_reusable();
        let wanted = directories.iter().zip(&self.places);
        let wanted = wanted.filter(|(_, place)| !is_there(place)).map(|(directory, _)| directory);
        if let Err(error) = create_all(wanted) {
            if let Some(refused) = reused.and_then(|reused| self.stock.put(reused)) {
                remove_all(refused.directories());
            }
            return Err(error);
        }
        Group::set_up(directories, name, self.clone(), reused)
    }

    /// The groups with this name, which a monitor has made for an earlier daemon.
    pub(crate) fn adopt(self: &Arc<Self>, name: GroupName) -> Group {
        let directories = self.directories(name);
        Group::given(directories, name, Vec::new(), self.clone(), InForce::UNKNOWN)
    }

    /// The groups with this name, which this process had before it executed another program.
    pub(crate) fn restore(self: &Arc<Self>, name: GroupName) -> Group {
        Group::restored(self.directories(name), name, self.clone())
    }

    /// Removes all groups of sandboxes of this process but these: what another program in this
    /// process was about to remove, or kept for other sandboxes.
    pub(crate) fn remove_others<'a>(&self, groups: impl Iterator<Item = &'a Group>) {
        let known: HashSet<&Path> =
            groups.flat_map(Group::directories).map(PathBuf::as_path).collect();
        let found = self.places.iter().flat_map(Place::sandboxes);
        supervisor::remove(found.filter(|found| !known.contains(found.as_path())).collect());
    }

    /// The directories of the groups with this name.
    fn directories(&self, name: GroupName) -> Vec<PathBuf> {
        let directory = |place: &Place| {
            place.of_sandbox(if place.is_reusable() { name.first } else { name.number })
        };
        self.places.iter().map(directory).collect()
    }
}

/// Makes a group that every user may look into, whatever this process's umask hides: a
/// daemon without rights sets limits in groups that its monitor has made.
pub(super) fn make_directory(directory: &Path) -> io::Result<()> {
    fs::create_dir(directory)?;
    // Asked for once, since each sandbox has several groups.
    static IS_HIDDEN: OnceLock<bool> = OnceLock::new();
    if !*IS_HIDDEN.get_or_init(|| umask().is_none_or(|umask| umask & 0o055 != 0)) {
        return Ok(());
    }
    fs::set_permissions(directory, Permissions::from_mode(0o755)).inspect_err(|_| {
        let _ = fs::remove_dir(directory);
    })
}

/// The permissions that new files of this process lack: proc_pid_status(5). `None`: it
/// cannot be read.
fn umask() -> Option<u32> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let text = status.lines().find_map(|line| line.strip_prefix("Umask:"))?;
    u32::from_str_radix(text.trim(), 8).ok()
}

impl Drop for Hierarchy {
    fn drop(&mut self) {
        if let Maker::Own = self.maker {
            let own = self.places.iter().flat_map(|place| {
                place.of_zygote_parents().into_iter().chain([place.directory.clone()])
            });
            let vacant = self.stock.close().into_iter().flat_map(Reusable::into_directories);
            supervisor::remove(vacant.chain(own).collect());
        }
        supervisor::forget_hierarchy();
    }
}

/// Makes groups: all, or none.
fn create_all<'a>(directories: impl Iterator<Item = &'a PathBuf>) -> io::Result<()> {
    let mut made = Vec::new();
    for directory in directories {
        if let Err(error) = make_directory(directory) {
            remove_all(&made);
            return Err(error);
        }
        made.push(directory);
    }
    Ok(())
}

/// Removes groups that nobody is in yet.
fn remove_all(directories: &[impl AsRef<Path>]) {
    for directory in directories {
        let _ = fs::remove_dir(directory);
    }
}
