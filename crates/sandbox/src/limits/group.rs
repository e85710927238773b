//! The control groups of one sandbox.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};

use super::entrance::{self, Newcomers};
use super::hierarchy::{Controller, Hierarchy, Maker, Version};
use super::oom::{OomEvents, leave_to_host};
use super::stock::Reusable;
use super::{Meter, ResourceLimits, supervisor};

/// Time in which a sandbox has its processors' worth of CPU time. The host kernel's
/// default, long enough that a burst of short work is not cut into pieces.
pub const CPU_PERIOD: Duration = Duration::from_millis(100);
/// CPU time that a sandbox may save up and use beyond its share of a later period, in
/// microseconds: one processor's share of a period. No quota is smaller, as the host
/// kernel wants it (Documentation/scheduler/sched-bwc.rst).
const CPU_BURST_US: u128 = CPU_PERIOD.as_micros();

/// How the groups of a sandbox are called by their maker and whoever asked for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[repr(C)]
pub(crate) struct GroupName {
    /// A number that no other sandbox has, or 0.
    pub number: u64,
    /// That of the sandbox for which those groups were made that this one has after others.
    /// The same number if it is the first.
    pub first: u64,
    /// CPU time that those have counted for the others, in nanoseconds.
    pub counted_ns: u64,
}

impl GroupName {
    /// Groups that no other sandbox has had.
    pub fn of_first(number: u64) -> Self {
        Self { number, first: number, counted_ns: 0 }
    }

    fn counted(self) -> Duration {
        Duration::from_nanos(self.counted_ns)
    }
}

/// The limits in force in groups that somebody else has made, as [`Setting`] has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InForce {
    memory: u64,
    cpus: u64,
    processes: u64,
}

impl InForce {
    /// Of groups that have just been made.
    pub const FIRST: Self = Self { memory: 0, cpus: FIRST_CPUS, processes: 0 };
    /// Nobody knows.
    pub const UNKNOWN: Self = Self { memory: UNKNOWN, cpus: UNKNOWN, processes: UNKNOWN };
}

/// The control groups of one sandbox, one in each tree. Dropping it removes them, or leaves
/// them to the next sandbox.
#[derive(Debug)]
pub struct Group {
    /// One for each place of the hierarchy, in the same order.
    directories: Vec<PathBuf>,
    memory: Option<Setting>,
    /// From where on the host slows processes down; version 2 only.
    memory_high: Option<Setting>,
    cpu: Option<Setting>,
    processes: Option<Setting>,
    /// Where the host says that all memory is used, once somebody wants to know.
    oom: OnceLock<OomEvents>,
    /// What the hierarchy's maker knows them by.
    name: GroupName,
    /// Whether this process has made them, and prepared all of them.
    is_prepared: bool,
    /// The files that move a process into them, if somebody else has made the groups.
    given_entrances: Mutex<Vec<OwnedFd>>,
    /// Who counts what it has used.
    meter: OnceLock<Arc<Meter>>,
    /// Must not be removed before its groups are.
    hierarchy: Arc<Hierarchy>,
}

/// A file that holds a limit.
#[derive(Debug)]
pub(super) struct Setting {
    path: PathBuf,
    /// Kept open where another value than the expected one is common.
    file: Option<File>,
    /// The limit in force, 0: none. Saves the host call when nothing changes.
    current: AtomicU64,
    version: Version,
    /// Whether it belongs to the user for whom the groups are made.
    is_given: bool,
}

/// The settings of groups, as far as there are controllers for them.
#[derive(Debug, Default)]
pub(super) struct Settings {
    pub memory: Option<Setting>,
    pub cpu: Option<Setting>,
    pub processes: Option<Setting>,
}

/// A limit that could not be set: whatever comes next is written.
const UNKNOWN: u64 = u64::MAX;

impl Setting {
    pub fn new(directory: &Path, version: Version, v2: &str, v1: &str) -> Self {
        let name = if version == Version::V2 { v2 } else { v1 };
        let current = AtomicU64::new(0);
        Self { path: directory.join(name), file: None, current, version, is_given: false }
    }

    /// Has the next value written whatever it is.
    pub fn forget(&self) {
        self.current.store(UNKNOWN, Ordering::Relaxed);
    }

    /// The directory of the group.
    pub fn directory(&self) -> &Path {
        self.path.parent().unwrap_or(&self.path)
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
            self.forget();
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
    /// Prepares groups that have just been made, but for those that other sandboxes have
    /// had before, if there are such.
    pub(super) fn set_up(
        directories: Vec<PathBuf>,
        name: GroupName,
        hierarchy: Arc<Hierarchy>,
        reused: Option<Reusable>,
    ) -> io::Result<Self> {
        let mut group = Self::with_settings(directories, name, Vec::new(), hierarchy);
        let Settings { memory, cpu, processes } =
            reused.map(Reusable::into_settings).unwrap_or_default();
        let (memory_is_prepared, cpu_is_prepared) = (memory.is_some(), cpu.is_some());
        group.memory = memory.or(group.memory.take());
        group.cpu = cpu.or(group.cpu.take());
        group.processes = processes.or(group.processes.take());
        if let Some((directory, version)) = group.place_of(Controller::Memory)
            && !memory_is_prepared
        {
            prepare_memory(&directory, version)?;
            group.memory = group.memory.take().map(Setting::opened).transpose()?;
        }
        if let (Some(cpu), Some((directory, version))) =
            (&group.cpu, group.place_of(Controller::Cpu))
            && !cpu_is_prepared
        {
            prepare_cpu(cpu, &directory, version)?;
        }
        group.is_prepared = true;
        Ok(group)
    }

    /// Groups that somebody else has made and prepared.
    pub(super) fn given(
        directories: Vec<PathBuf>,
        name: GroupName,
        entrances: Vec<OwnedFd>,
        hierarchy: Arc<Hierarchy>,
        in_force: InForce,
    ) -> Self {
        let mut group = Self::with_settings(directories, name, entrances, hierarchy);
        let InForce { memory, cpus, processes } = in_force;
        let settings = [(&group.memory, memory), (&group.cpu, cpus), (&group.processes, processes)];
        for (setting, value) in settings {
            if let Some(setting) = setting {
                setting.current.store(value, Ordering::Relaxed);
            }
        }
        if memory == UNKNOWN {
            group.memory_high.iter().for_each(Setting::forget);
            // Another daemon may have watched, and this one may not be able to.
            if let Some((directory, Version::V1)) = group.place_of(Controller::Memory) {
                leave_to_host(&directory);
            }
        }
        // Without it the file is opened when a limit is set, which is seldom another one than
        // that of the sandbox before.
        if let Some(memory) = &mut group.memory
            && name.first == name.number
        {
            memory.file = File::options().write(true).open(&memory.path).ok();
        }
        group
    }

    /// Groups that this process has set up and given to a user before it executed another program.
    pub(super) fn restored(
        directories: Vec<PathBuf>,
        name: GroupName,
        hierarchy: Arc<Hierarchy>,
    ) -> Self {
        let mut group = Self::with_settings(directories, name, Vec::new(), hierarchy);
        let settings = group.settings_mut();
        for setting in settings.into_iter().flatten() {
            setting.is_given = true;
            setting.forget();
        }
        if let Some(high) = &mut group.memory_high {
            // An earlier monitor did not give it.
            high.is_given = false;
        }
        group.is_prepared = true;
        group
    }

    fn with_settings(
        directories: Vec<PathBuf>,
        name: GroupName,
        entrances: Vec<OwnedFd>,
        hierarchy: Arc<Hierarchy>,
    ) -> Self {
        let mut group = Self {
            directories,
            memory: None,
            memory_high: None,
            cpu: None,
            processes: None,
            oom: OnceLock::new(),
            name,
            is_prepared: false,
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
        let slowed =
            group.place_of(Controller::Memory).filter(|(_, version)| *version == Version::V2);
        group.memory_high =
            slowed.map(|(directory, version)| Setting::new(&directory, version, "memory.high", ""));
        (group.memory, group.cpu, group.processes) = (memory, cpu, processes);
        group
    }

    fn settings_mut(&mut self) -> [&mut Option<Setting>; 4] {
        [&mut self.memory, &mut self.memory_high, &mut self.cpu, &mut self.processes]
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
        let chown = |path: &Path| std::os::unix::fs::chown(path, Some(uid), Some(gid));
        if let Some(memory) = &self.memory {
            let directory = memory.directory();
            let mut files = OomEvents::files(memory.version).iter();
            files.try_for_each(|file| chown(&directory.join(file)))?;
        }
        let settings = self.settings_mut();
        settings.into_iter().flatten().filter(|setting| !setting.is_given).try_for_each(|setting| {
            setting.file = None;
            setting.is_given = true;
            chown(&setting.path)
        })
    }

    /// Whether the host slows processes down that have used nearly all memory, where it otherwise
    /// has them wait when they have used all of it.
    pub(super) fn slows_down(&self) -> bool {
        self.memory_high.is_some()
    }

    /// Has the host say when all memory is used, and end nobody then; the first time, `None` later.
    ///
    /// # Errors
    /// It does not, or nobody limits memory.
    pub(super) fn watch_oom(&self) -> io::Result<Option<&OomEvents>> {
        let place = self.place_of(Controller::Memory);
        let (directory, version) = place.ok_or(io::ErrorKind::Unsupported)?;
        if self.oom.get().is_some() {
            return Ok(None);
        }
        let events = OomEvents::watch(directory, version)?;
        Ok(self.oom.set(events).is_ok().then(|| self.oom.get()).flatten())
    }

    /// Where the host says that all memory is used, if somebody wants to know.
    pub(super) fn oom_events(&self) -> Option<&OomEvents> {
        self.oom.get()
    }

    /// Whether the group has this controller.
    pub fn has(&self, controller: Controller) -> bool {
        self.hierarchy.has(controller)
    }

    /// What the hierarchy's maker knows them by.
    pub(crate) fn name(&self) -> GroupName {
        self.name
    }

    /// The groups' directories.
    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// The directory of the group with this controller.
    pub fn directory_of(&self, controller: Controller) -> Option<&Path> {
        self.hierarchy.place_of(controller).map(|number| self.directories[number].as_path())
    }

    /// Sets the limits of processors and processes, as far as there are controllers.
    pub(super) fn set_others(&self, wanted: ResourceLimits) -> io::Result<()> {
        if let Some(cpu) = &self.cpu {
            cpu.set(wanted.cpus.into(), cpu_text)?;
        }
        if let Some(processes) = &self.processes {
            processes.set(wanted.processes.into(), processes_text)?;
        }
        Ok(())
    }

    /// The files whose writes move the writing, single-threaded process into the groups. The last
    /// is that of the group with the controller for processors: from there on it shares them
    /// with others as a sandbox does.
    ///
    /// # Errors
    /// One of them cannot be opened.
    pub fn entrances(&self) -> io::Result<Vec<OwnedFd>> {
        if let Maker::Monitor(_) = self.hierarchy.maker() {
            let mut given = self.given_entrances.lock().unwrap_or_else(PoisonError::into_inner);
            return Ok(std::mem::take(&mut given));
        }
        let open = |(directory, version)| entrance::open(directory, version);
        Ok(self.cpu_last(self.directories_with_versions().map(open).collect::<io::Result<_>>()?))
    }

    /// The same, for somebody who is to move nobody but these newcomers.
    ///
    /// # Errors
    /// One of them cannot be opened.
    pub(crate) fn entrances_of(&self, newcomers: &Newcomers) -> io::Result<Vec<OwnedFd>> {
        let groups: Vec<_> = self.directories_with_versions().collect();
        Ok(self.cpu_last(newcomers.open(&groups)?))
    }

    /// The groups' directories, with their versions.
    fn directories_with_versions(&self) -> impl Iterator<Item = (&Path, Version)> {
        let places = self.directories.iter().zip(self.hierarchy.places());
        places.map(|(directory, place)| (directory.as_path(), place.version))
    }

    fn cpu_last(&self, mut entrances: Vec<OwnedFd>) -> Vec<OwnedFd> {
        if let Some(cpu) = self.hierarchy.place_of(Controller::Cpu) {
            let cpu = entrances.remove(cpu);
            entrances.push(cpu);
        }
        entrances
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
        let (directory, place) = (self.directories.get(number)?, &self.hierarchy.places()[number]);
        let counter = CpuCounter::of(directory, place.version);
        Some(if place.is_reusable() { counter.from(self.name.counted()) } else { counter })
    }

    /// Takes those groups out that the next sandbox can have. `None`: there are none.
    fn take_reusable(&mut self) -> Option<Reusable> {
        let places = self.hierarchy.places();
        let is_reusable = |controller| {
            self.hierarchy.place_of(controller).is_some_and(|place| places[place].is_reusable())
        };
        let counter = self.counter().filter(|_| is_reusable(Controller::CpuAccounting));
        let settings = Settings {
            memory: self.memory.take().filter(|_| is_reusable(Controller::Memory)),
            cpu: self.cpu.take().filter(|_| is_reusable(Controller::Cpu)),
            processes: self.processes.take().filter(|_| is_reusable(Controller::Pids)),
        };
        let (mut reusable, mut others) = (Vec::new(), Vec::new());
        for (directory, place) in std::mem::take(&mut self.directories).into_iter().zip(places) {
            if place.is_reusable() { &mut reusable } else { &mut others }.push(directory);
        }
        self.directories = others;
        (!reusable.is_empty()).then(|| Reusable::new(self.name.first, reusable, settings, counter))
    }

    /// Bytes of memory that the group's processes have now, shared memory and page cache
    /// included. `None`: nothing counts it.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn memory(&self) -> io::Result<Option<u64>> {
        let place = self.place_of(Controller::Memory);
        place.map(|(directory, version)| memory_in_use(&directory, version)).transpose()
    }

    /// Most bytes that were ever charged to it; `None` if the host does not say that.
    pub(super) fn memory_peak(&self) -> Option<u64> {
        let (directory, version) = self.place_of(Controller::Memory)?;
        // The first has been there since Linux 5.19.
        let file = match version {
            Version::V2 => "memory.peak",
            Version::V1 => "memory.max_usage_in_bytes",
        };
        fs::read_to_string(directory.join(file)).ok()?.trim().parse().ok()
    }

    /// Bytes of memory that the group's processes have now and the host cannot take back: all but
    /// page cache. `None`: nothing counts it.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn memory_held(&self) -> io::Result<Option<u64>> {
        let Some((directory, version)) = self.place_of(Controller::Memory) else { return Ok(None) };
        let in_use = memory_in_use(&directory, version)?;
        let stat = fs::read_to_string(directory.join("memory.stat"))?;
        Ok(Some(in_use.saturating_sub(page_cache(&stat, version))))
    }

    /// Sets the memory limit, in bytes, if there is a controller for it; 0: none. The last `reserve`
    /// bytes of it are held back.
    ///
    /// # Errors
    /// The host kernel refuses.
    pub(super) fn set_memory(&self, max: u64, reserve: u64) -> io::Result<()> {
        let Some(memory) = &self.memory else { return Ok(()) };
        let usable = max.saturating_sub(reserve);
        match &self.memory_high {
            None => memory.set(usable, memory_text),
            Some(high) => {
                let slowed = high.set(if reserve == 0 { 0 } else { usable }, memory_text);
                memory.set(max, memory_text)?;
                // An older monitor lets nobody write it, and then nobody is slowed down.
                if reserve == 0 { Ok(()) } else { slowed }
            }
        }
    }

    /// Has `meter` told what the group has used when it is removed; whether it is the
    /// first meter, which stays.
    pub(super) fn count_by(&self, meter: &Arc<Meter>) -> bool {
        self.meter.set(meter.clone()).is_ok()
    }

    /// The limits in force.
    fn in_force(&self) -> InForce {
        let of = |setting: &Option<Setting>| {
            setting.as_ref().map_or(UNKNOWN, |setting| setting.current.load(Ordering::Relaxed))
        };
        InForce { memory: of(&self.memory), cpus: of(&self.cpu), processes: of(&self.processes) }
    }

    /// Whether the host kernel has killed a process of the group for want of memory.
    pub(super) fn has_run_out_of_memory(&self) -> bool {
        self.place_of(Controller::Memory).is_some_and(|(directory, version)| {
            has_run_out_of_memory(&directory, version).unwrap_or(false)
        })
    }
}

/// Whether the host kernel has ever killed a process of this group for want of memory.
///
/// # Errors
/// It cannot be read.
pub(super) fn has_run_out_of_memory(directory: &Path, version: Version) -> io::Result<bool> {
    let file = match version {
        Version::V2 => "memory.events",
        Version::V1 => "memory.oom_control",
    };
    let text = fs::read_to_string(directory.join(file))?;
    Ok(field(&text, "oom_kill").is_some_and(|count| count > 0))
}

/// Bytes that are charged to a group with the controller for memory.
///
/// # Errors
/// It cannot be read.
pub(super) fn memory_in_use(directory: &Path, version: Version) -> io::Result<u64> {
    let file = match version {
        Version::V2 => "memory.current",
        Version::V1 => "memory.usage_in_bytes",
    };
    let text = fs::read_to_string(directory.join(file))?;
    text.trim().parse().map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Bytes of files among what `memory.stat` of a group counts. Shared memory counts as file there
/// (Documentation/admin-guide/cgroup-v2.rst, "memory.stat"), and is the sandbox's own.
fn page_cache(stat: &str, version: Version) -> u64 {
    let all = if version == Version::V2 { "file" } else { "cache" };
    let count = |name| field(stat, name).unwrap_or(0);
    count(all).saturating_sub(count("shmem"))
}

/// The number after a name at the start of a line.
pub(super) fn field(text: &str, name: &str) -> Option<u64> {
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
pub(super) const FIRST_CPUS: u64 = 1;

/// A sandbox that has used no more CPU time in its life has left nearly all of the present
/// period's to the next one in its group. After others the quota is written again, which
/// fills it up.
pub(super) const SMALL_USE: Duration = Duration::from_millis(10);

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
    /// What others have used, which does not count.
    zero: Duration,
}

impl CpuCounter {
    pub fn of(directory: &Path, version: Version) -> Self {
        let file = match version {
            Version::V2 => "cpu.stat",
            Version::V1 => "cpuacct.usage",
        };
        Self { path: directory.join(file), version, zero: Duration::ZERO }
    }

    /// Leaves out what others have used before.
    pub fn from(self, zero: Duration) -> Self {
        Self { zero, ..self }
    }

    /// What does not count.
    pub fn zero(&self) -> Duration {
        self.zero
    }

    /// Begins anew at zero; what was used until now.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn restart(&mut self) -> io::Result<Duration> {
        let used = self.read()?;
        self.zero += used;
        Ok(used)
    }

    /// CPU time that the group's processes have used.
    pub fn read(&self) -> io::Result<Duration> {
        let text = fs::read_to_string(&self.path)?;
        let used = match self.version {
            Version::V2 => field(&text, "usage_usec").map(Duration::from_micros),
            Version::V1 => text.trim().parse().ok().map(Duration::from_nanos),
        };
        used.map(|used| used.saturating_sub(self.zero))
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
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
        // The next sandbox in these groups may have nobody who watches.
        drop(self.oom.take());
        let meter = self.meter.take();
        let account = meter.and_then(|meter| Some(Account { counter: self.counter()?, meter }));
        let hierarchy = self.hierarchy.clone();
        match hierarchy.maker() {
            Maker::Own => {
                // Others expect groups to be prepared.
                let reusable = if self.is_prepared { self.take_reusable() } else { None };
                let directories = std::mem::take(&mut self.directories);
                supervisor::retire(directories, reusable, hierarchy.stock(), account);
            }
            Maker::Monitor(link) => {
                // Nobody has been in it since before the handle was dropped.
                let used = account.as_ref().and_then(|account| account.counter.read().ok());
                if let Some(account) = account {
                    account.meter.ended(used.unwrap_or_default());
                }
                if used.is_none_or(|used| used > SMALL_USE) {
                    self.cpu.iter().for_each(Setting::forget);
                }
                // Before another sandbox can have them.
                link.settings().note(self.name.first, self.in_force());
                link.remove_group(self.name.number);
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

    #[test]
    fn shared_memory_is_no_page_cache() {
        assert_eq!(page_cache("cache 300\nrss 5\nshmem 100\n", Version::V1), 200);
        assert_eq!(page_cache("anon 7\nfile 300\nshmem 300\n", Version::V2), 0);
        assert_eq!(page_cache("", Version::V2), 0);
    }
}
