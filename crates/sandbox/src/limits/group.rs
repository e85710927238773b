//! The control groups of one sandbox.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::hierarchy::{Controller, Hierarchy, Maker, Version};
use super::{Meter, ResourceLimits, supervisor};

/// Time in which a sandbox has its processors' worth of CPU time. The host kernel's
/// default, long enough that a burst of short work is not cut into pieces.
pub const CPU_PERIOD: Duration = Duration::from_millis(100);
/// CPU time that a sandbox may save up and use beyond its share of a later period, in
/// microseconds: one processor's share of a period. No quota is smaller, as the host
/// kernel wants it (Documentation/scheduler/sched-bwc.rst).
const CPU_BURST_US: u128 = CPU_PERIOD.as_micros();

/// The control groups of one sandbox, one in each tree. Dropping it removes them.
#[derive(Debug)]
pub struct Group {
    /// One for each place of the hierarchy, in the same order.
    directories: Vec<PathBuf>,
    memory: Option<Setting>,
    cpu: Option<Setting>,
    processes: Option<Setting>,
    /// What the hierarchy's maker knows them by.
    number: u64,
    /// The files that move a process into them, if somebody else has made the groups.
    given_entrances: Mutex<Vec<OwnedFd>>,
    /// Who counts what it has used.
    meter: OnceLock<Arc<Meter>>,
    /// Must not be removed before its groups are.
    hierarchy: Arc<Hierarchy>,
}

/// A file that holds a limit.
#[derive(Debug)]
struct Setting {
    path: PathBuf,
    /// Kept open where another value than the expected one is common.
    file: Option<File>,
    /// The limit in force, 0: none. Saves the host call when nothing changes.
    current: AtomicU64,
    version: Version,
}

/// A limit that could not be set: whatever comes next is written.
const UNKNOWN: u64 = u64::MAX;

impl Setting {
    fn new(directory: &Path, version: Version, v2: &str, v1: &str) -> Self {
        let name = if version == Version::V2 { v2 } else { v1 };
        let current = AtomicU64::new(0);
        Self { path: directory.join(name), file: None, current, version }
    }

    /// Keeps the file open.
    fn opened(mut self) -> io::Result<Self> {
        self.file = Some(File::options().write(true).open(&self.path)?);
        Ok(self)
    }

    /// Writes `value` as `text` gives it, unless it is in force.
    fn set(&self, value: u64, text: impl FnOnce(u64, Version) -> String) -> io::Result<()> {
        if self.current.swap(value, Ordering::Relaxed) == value {
            return Ok(());
        }
        let text = text(value, self.version);
        let written = match &self.file {
            Some(file) => file.write_all_at(text.as_bytes(), 0),
            None => fs::write(&self.path, text),
        };
        if written.is_err() {
            self.current.store(UNKNOWN, Ordering::Relaxed);
        }
        written
    }
}

fn memory_text(bytes: u64, version: Version) -> String {
    match (bytes, version) {
        (0, Version::V2) => "max".to_owned(),
        (0, Version::V1) => "-1".to_owned(),
        (bytes, _) => bytes.to_string(),
    }
}

fn cpu_text(cpus: u64, version: Version) -> String {
    let quota_us = u128::from(cpus) * CPU_PERIOD.as_micros();
    match (cpus, version) {
        (0, Version::V2) => "max".to_owned(),
        (0, Version::V1) => "-1".to_owned(),
        _ => quota_us.to_string(),
    }
}

fn processes_text(count: u64, _: Version) -> String {
    if count == 0 { "max".to_owned() } else { count.to_string() }
}

impl Group {
    /// Prepares groups that have just been made.
    pub(super) fn set_up(
        directories: Vec<PathBuf>,
        number: u64,
        hierarchy: Arc<Hierarchy>,
    ) -> io::Result<Self> {
        let mut group = Self::with_settings(directories, number, Vec::new(), hierarchy);
        if let Some((directory, version)) = group.place_of(Controller::Memory) {
            prepare_memory(&directory, version)?;
            group.memory = group.memory.take().map(Setting::opened).transpose()?;
        }
        if let (Some(cpu), Some((directory, version))) =
            (&group.cpu, group.place_of(Controller::Cpu))
        {
            prepare_cpu(cpu, &directory, version)?;
        }
        Ok(group)
    }

    /// Groups that somebody else has made and prepared.
    pub(super) fn given(
        directories: Vec<PathBuf>,
        number: u64,
        entrances: Vec<OwnedFd>,
        hierarchy: Arc<Hierarchy>,
    ) -> Self {
        let mut group = Self::with_settings(directories, number, entrances, hierarchy);
        if let Some(cpu) = &group.cpu {
            cpu.current.store(FIRST_CPUS, Ordering::Relaxed);
        }
        // Without it the file is opened when a limit is set.
        if let Some(memory) = &mut group.memory {
            memory.file = File::options().write(true).open(&memory.path).ok();
        }
        group
    }

    fn with_settings(
        directories: Vec<PathBuf>,
        number: u64,
        entrances: Vec<OwnedFd>,
        hierarchy: Arc<Hierarchy>,
    ) -> Self {
        let mut group = Self {
            directories,
            memory: None,
            cpu: None,
            processes: None,
            number,
            given_entrances: Mutex::new(entrances),
            meter: OnceLock::new(),
            hierarchy,
        };
        let setting = |controller, v2, v1| {
            let (directory, version) = group.place_of(controller)?;
            Some(Setting::new(&directory, version, v2, v1))
        };
        let memory = setting(Controller::Memory, "memory.max", "memory.limit_in_bytes");
        let cpu = setting(Controller::Cpu, "cpu.max", "cpu.cfs_quota_us");
        let processes = setting(Controller::Pids, "pids.max", "pids.max");
        (group.memory, group.cpu, group.processes) = (memory, cpu, processes);
        group
    }

    fn place_of(&self, controller: Controller) -> Option<(PathBuf, Version)> {
        let number = self.hierarchy.place_of(controller)?;
        Some((self.directories[number].clone(), self.hierarchy.places()[number].version))
    }

    /// Lets a user change the limits, and nothing else of the groups. Whoever makes groups
    /// for another keeps no file of them open.
    ///
    /// # Errors
    /// The host kernel refuses.
    pub(crate) fn give_settings_to(&mut self, uid: u32, gid: u32) -> io::Result<()> {
        let settings = [&mut self.memory, &mut self.cpu, &mut self.processes];
        settings.into_iter().flatten().try_for_each(|setting| {
            setting.file = None;
            std::os::unix::fs::chown(&setting.path, Some(uid), Some(gid))
        })
    }

    /// Whether the group has this controller.
    pub fn has(&self, controller: Controller) -> bool {
        self.hierarchy.has(controller)
    }

    /// What the hierarchy's maker knows them by.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The groups' directories.
    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// The directory of the group with this controller.
    pub fn directory_of(&self, controller: Controller) -> Option<&Path> {
        self.hierarchy.place_of(controller).map(|number| self.directories[number].as_path())
    }

    /// Sets the limits for which there are controllers.
    pub(super) fn set(&self, wanted: ResourceLimits) -> io::Result<()> {
        if let Some(memory) = &self.memory {
            memory.set(wanted.memory, memory_text)?;
        }
        if let Some(cpu) = &self.cpu {
            cpu.set(wanted.cpus.into(), cpu_text)?;
        }
        if let Some(processes) = &self.processes {
            processes.set(wanted.processes.into(), processes_text)?;
        }
        Ok(())
    }

    /// The files whose writes move the writing, single-threaded process into the groups.
    ///
    /// # Errors
    /// One of them cannot be opened.
    pub fn entrances(&self) -> io::Result<Vec<OwnedFd>> {
        if let Maker::Monitor(_) = self.hierarchy.maker() {
            let mut given = self.given_entrances.lock().unwrap_or_else(PoisonError::into_inner);
            return Ok(std::mem::take(&mut given));
        }
        let open = |(directory, version): (&PathBuf, Version)| {
            let file = match version {
                Version::V2 => "cgroup.procs",
                // A thread that moves itself need not wait until every process of
                // the host has left fork and exit, as the move of a process must.
                Version::V1 => "tasks",
            };
            Ok(File::options().write(true).open(directory.join(file))?.into())
        };
        let versions = self.hierarchy.places().iter().map(|place| place.version);
        self.directories.iter().zip(versions).map(open).collect()
    }

    /// CPU time that the group's processes have used, those that have ended included.
    /// `None`: nothing counts it.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn cpu_time(&self) -> io::Result<Option<Duration>> {
        self.counter().map(|counter| counter.read()).transpose()
    }

    /// Where the CPU time is counted.
    fn counter(&self) -> Option<CpuCounter> {
        let number = self.hierarchy.place_of(Controller::CpuAccounting)?;
        let (directory, version) =
            (self.directories.get(number)?, self.hierarchy.places()[number].version);
        Some(CpuCounter::of(directory, version))
    }

    /// Bytes of memory that the group's processes have now, shared memory and page cache
    /// included. `None`: nothing counts it.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn memory(&self) -> io::Result<Option<u64>> {
        let Some(number) = self.hierarchy.place_of(Controller::Memory) else { return Ok(None) };
        let file = match self.hierarchy.places()[number].version {
            Version::V2 => "memory.current",
            Version::V1 => "memory.usage_in_bytes",
        };
        let text = fs::read_to_string(self.directories[number].join(file))?;
        text.trim().parse().map(Some).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// Has `meter` told what the group has used when it is removed; whether it is the
    /// first meter, which stays.
    pub(super) fn count_by(&self, meter: &Arc<Meter>) -> bool {
        self.meter.set(meter.clone()).is_ok()
    }

    /// Whether the host kernel has killed a process of the group for want of memory.
    pub(super) fn has_run_out_of_memory(&self) -> bool {
        let Some(directory) = self.directory_of(Controller::Memory) else { return false };
        // Version 2 has the first file, version 1 the second.
        ["memory.events", "memory.oom_control"].iter().any(|file| {
            let text = fs::read_to_string(directory.join(file)).unwrap_or_default();
            field(&text, "oom_kill").is_some_and(|count| count > 0)
        })
    }
}

/// The number after a name at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (found, value) = line.split_once(' ')?;
        (found == name).then(|| value.trim().parse().ok()).flatten()
    })
}

fn prepare_memory(directory: &Path, version: Version) -> io::Result<()> {
    match version {
        Version::V2 => {
            // One process of a sandbox is no use without the others.
            fs::write(directory.join("memory.oom.group"), "1")?;
            write_if_present(&directory.join("memory.swap.max"), "0")
        }
        // What is swapped out does not count against the limit.
        Version::V1 => write_if_present(&directory.join("memory.swappiness"), "0"),
    }
}

/// Weight of a group against processes beside it, as a multiple of theirs. A group has
/// its weight divided among the processors where it ran lately, and a zygote is woken on
/// another one: with the weight of one process, a boot on a busy machine waits for its turn
/// behind others (280 µs instead of 209 µs until the first response byte with ten times more
/// to do than there are processors, 198 µs instead of 188 µs on a quieter one).
const WEIGHT: u32 = 2;

/// Processors of a group that nobody has set a limit for.
const FIRST_CPUS: u64 = 1;

/// Sets the weight and allows bursts, which needs a quota to be set first. Linux has them
/// since 5.14.
fn prepare_cpu(setting: &Setting, directory: &Path, version: Version) -> io::Result<()> {
    let (period, burst, weight, of_process) = match version {
        // The period comes with the quota: it stays what it is when only that is written.
        Version::V2 => (None, "cpu.max.burst", "cpu.weight", 100),
        Version::V1 => (Some("cpu.cfs_period_us"), "cpu.cfs_burst_us", "cpu.shares", 1024),
    };
    fs::write(directory.join(weight), (WEIGHT * of_process).to_string())?;
    if let Some(period) = period {
        fs::write(directory.join(period), CPU_PERIOD.as_micros().to_string())?;
    }
    setting.set(FIRST_CPUS, cpu_text)?;
    // Without it the sandbox has its quota, and no more.
    let _ = fs::write(directory.join(burst), CPU_BURST_US.to_string());
    Ok(())
}

/// The file in which the host counts the CPU time of a group.
#[derive(Debug)]
pub(super) struct CpuCounter {
    path: PathBuf,
    version: Version,
}

impl CpuCounter {
    pub fn of(directory: &Path, version: Version) -> Self {
        let file = match version {
            Version::V2 => "cpu.stat",
            Version::V1 => "cpuacct.usage",
        };
        Self { path: directory.join(file), version }
    }

    /// CPU time that the group's processes have used.
    pub fn read(&self) -> io::Result<Duration> {
        let text = fs::read_to_string(&self.path)?;
        let used = match self.version {
            Version::V2 => field(&text, "usage_usec").map(Duration::from_micros),
            Version::V1 => text.trim().parse().ok().map(Duration::from_nanos),
        };
        used.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// The last account of a group: what it has used, and who wants to know.
#[derive(Debug)]
pub(super) struct Account {
    pub counter: CpuCounter,
    pub meter: Arc<Meter>,
}

impl Drop for Group {
    fn drop(&mut self) {
        let meter = self.meter.take();
        let account = meter.and_then(|meter| Some(Account { counter: self.counter()?, meter }));
        match self.hierarchy.maker() {
            Maker::Own => supervisor::remove(std::mem::take(&mut self.directories), account),
            Maker::Monitor(link) => {
                // Nobody has been in it since before the handle was dropped.
                if let Some(account) = account {
                    account.meter.ended(account.counter.read().unwrap_or_default());
                }
                link.remove_group(self.number);
            }
        }
    }
}

fn write_if_present(path: &Path, text: &str) -> io::Result<()> {
    match fs::write(path, text) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_written_as_the_host_kernel_reads_them() {
        assert_eq!(memory_text(0, Version::V2), "max");
        assert_eq!(memory_text(0, Version::V1), "-1");
        assert_eq!(memory_text(4096, Version::V1), "4096");
        assert_eq!(cpu_text(2, Version::V2), "200000");
        assert_eq!(cpu_text(0, Version::V1), "-1");
        assert_eq!(processes_text(0, Version::V2), "max");
        assert_eq!(processes_text(7, Version::V1), "7");
    }

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let events = "low 0\noom 3\noom_kill 2\noom_group_kill 1\n";
        assert_eq!(field(events, "oom_kill"), Some(2));
        assert_eq!(field(events, "oom_k"), None);
        assert_eq!(field("usage_usec 12\n", "usage_usec"), Some(12));
    }
}
