//! Groups that sandboxes have one after the other.
//!
//! To make and remove a group takes the host kernel more than all that a boot writes to it,
//! and holds up everybody who makes another one. A group of version 1 carries nothing of a
//! sandbox that has ended but the CPU time that it has counted, its limits, and memory that is
//! still charged to it: what the sandbox was the first to read of a file, and what the host
//! kernel has set aside for it or not given back yet. So the maker of groups keeps some of them
//! for the sandboxes to come ([`super::hierarchy::Place::is_reusable`] says which).
//!
//! A group is *vacant* when nobody is in it, nobody holds a file that leads into it, and no
//! more than [`RESIDUE_MAX`] is charged to it. Until then no other sandbox gets it. One in
//! which a process was killed for want of memory no other sandbox gets: the host kernel would
//! go on counting from there.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::entrance::entrance;
use super::group::{
    CpuCounter, GroupName, InForce, SMALL_USE, Setting, Settings, has_run_out_of_memory,
    memory_in_use,
};
use super::hierarchy::Version;
use super::oom::ends_nobody;
use crate::sys;

/// Sandboxes whose groups wait for others, at most: some more than end while a zygote is made.
pub const VACANT_MAX: usize = 128;
/// Memory, in bytes, that may be charged to the group of a sandbox that begins: it has so much
/// less. The host kernel counts no finer: it charges up to 64 pages ahead on each processor.
/// After a boot with all files in the page cache, 80 to 460 KiB are left.
pub const RESIDUE_MAX: u64 = 512 << 10;
/// Groups whose limits are remembered for the time when the monitor gives them again.
const REMEMBERED_MAX: usize = 4096;

/// Those groups of one sandbox that another one can have after it.
#[derive(Debug)]
pub struct Reusable {
    /// [`GroupName::first`].
    first: u64,
    directories: Vec<PathBuf>,
    settings: Settings,
    /// What counts the CPU time of the present sandbox, if one of these groups does.
    counter: Option<CpuCounter>,
}

impl Reusable {
    pub fn new(
        first: u64,
        directories: Vec<PathBuf>,
        settings: Settings,
        counter: Option<CpuCounter>,
    ) -> Self {
        Self { first, directories, settings, counter }
    }

    /// The name of the groups of the next sandbox, which has this number.
    pub fn name(&self, number: u64) -> GroupName {
        let counted = self.counter.as_ref().map_or(Duration::ZERO, CpuCounter::zero);
        let counted_ns = u64::try_from(counted.as_nanos()).unwrap_or(u64::MAX);
        GroupName { number, first: self.first, counted_ns }
    }

    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    pub fn into_directories(self) -> Vec<PathBuf> {
        self.directories
    }

    /// The files that hold the limits, and what is in force.
    pub fn into_settings(self) -> Settings {
        self.settings
    }

    /// Whether the CPU time of a sandbox is counted here.
    pub fn counts_cpu_time(&self) -> bool {
        self.counter.is_some()
    }

    /// Whether nobody is in the groups, nobody can come, and hardly any memory is charged.
    ///
    /// # Errors
    /// The host cannot tell, or no other sandbox may have these groups.
    pub fn is_vacant(&self) -> io::Result<bool> {
        for directory in &self.directories {
            let mut entrance = File::open(directory.join(entrance(Version::V1)))?;
            // Who could come is looked for before those who are there.
            if sys::is_open_for_writing(&entrance)? || entrance.read(&mut [0])? > 0 {
                return Ok(false);
            }
        }
        Ok(self.has_no_process()? && self.has_no_memory()?)
    }

    /// A process that nobody has waited for is on no list, but counts as one.
    fn has_no_process(&self) -> io::Result<bool> {
        let Some(processes) = &self.settings.processes else { return Ok(true) };
        Ok(fs::read_to_string(processes.directory().join("pids.current"))?.trim() == "0")
    }

    fn has_no_memory(&self) -> io::Result<bool> {
        let Some(memory) = &self.settings.memory else { return Ok(true) };
        let directory = memory.directory();
        if has_run_out_of_memory(directory, Version::V1)? {
            return Err(io::Error::other("a sandbox has run out of memory here"));
        }
        // The daemon that watched has been killed.
        if ends_nobody(directory)? {
            return Err(io::Error::other("who runs out of memory here would wait for ever"));
        }
        Ok(memory_in_use(directory, Version::V1)? <= RESIDUE_MAX)
    }

    /// Ends the account of the present sandbox; the next one's begins at zero. The CPU time
    /// that it has used, if it is counted here.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn close_account(&mut self) -> io::Result<Option<Duration>> {
        let used = self.counter.as_mut().map(CpuCounter::restart).transpose()?;
        if used.is_none_or(|used| used > SMALL_USE) {
            self.settings.cpu.iter().for_each(Setting::forget);
        }
        Ok(used)
    }
}

/// Groups that are vacant.
#[derive(Debug, Default)]
pub struct Stock(Mutex<Shelf>);

#[derive(Debug, Default)]
struct Shelf {
    vacant: Vec<Reusable>,
    is_closed: bool,
}

impl Stock {
    /// Takes groups, for a sandbox that is to have them alone.
    pub fn take(&self) -> Option<Reusable> {
        self.lock().vacant.pop()
    }

    /// Keeps groups, which must be vacant. Gives them back if there is no room.
    #[must_use]
    pub fn put(&self, reusable: Reusable) -> Option<Reusable> {
        let mut shelf = self.lock();
        if !shelf.has_room() {
            return Some(reusable);
        }
        shelf.vacant.push(reusable);
        None
    }

    pub fn has_room(&self) -> bool {
        self.lock().has_room()
    }

    /// Keeps nothing from now on; all that was kept.
    pub fn close(&self) -> Vec<Reusable> {
        let mut shelf = self.lock();
        shelf.is_closed = true;
        std::mem::take(&mut shelf.vacant)
    }

    fn lock(&self) -> MutexGuard<'_, Shelf> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shelf {
    fn has_room(&self) -> bool {
        !self.is_closed && self.vacant.len() < VACANT_MAX
    }
}

/// The limits that a daemon has left in force in groups which it has given back to its
/// monitor. The monitor does not know them.
#[derive(Debug, Default)]
pub(crate) struct InForceByGroup(Mutex<HashMap<u64, InForce>>);

impl InForceByGroup {
    /// Remembers those of the groups with this [`GroupName::first`].
    pub fn note(&self, first: u64, in_force: InForce) {
        let mut noted = self.lock();
        // The monitor may have removed some of these groups. A limit that is not remembered
        // is written once more.
        if noted.len() >= REMEMBERED_MAX {
            noted.clear();
        }
        noted.insert(first, in_force);
    }

    /// Those of groups that the monitor has given again.
    pub fn take(&self, first: u64) -> InForce {
        self.lock().remove(&first).unwrap_or(InForce::UNKNOWN)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, InForce>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reusable(first: u64, directory: PathBuf) -> Reusable {
        let counter = CpuCounter::of(&directory, Version::V1);
        Reusable::new(first, vec![directory], Settings::default(), Some(counter))
    }

    #[test]
    fn so_many_groups_are_kept_and_none_after_the_end() {
        let stock = Stock::default();
        for number in 0..VACANT_MAX as u64 {
            assert!(stock.put(reusable(number, PathBuf::new())).is_none());
        }
        assert!(!stock.has_room());
        assert_eq!(stock.put(reusable(1000, PathBuf::new())).unwrap().first, 1000);
        assert!(stock.take().is_some() && stock.has_room());
        assert_eq!(stock.close().len(), VACANT_MAX - 1);
        assert!(!stock.has_room() && stock.take().is_none());
        assert!(stock.put(reusable(1, PathBuf::new())).is_some());
    }

    #[test]
    fn each_sandbox_is_charged_what_it_has_used_itself() {
        let group = tempfile::tempdir().unwrap();
        let count = |ns: &str| fs::write(group.path().join("cpuacct.usage"), ns).unwrap();
        let mut groups = reusable(7, group.path().to_owned());
        count("5000");
        assert_eq!(groups.close_account().unwrap(), Some(Duration::from_micros(5)));
        assert_eq!(groups.name(9), GroupName { number: 9, first: 7, counted_ns: 5000 });
        count("5000");
        assert_eq!(groups.close_account().unwrap(), Some(Duration::ZERO));
        count("8000");
        assert_eq!(groups.close_account().unwrap(), Some(Duration::from_micros(3)));
        assert_eq!(groups.name(10).counted_ns, 8000);
        count("nonsense");
        assert!(groups.close_account().is_err());
    }

    #[test]
    fn a_group_that_is_not_there_is_not_vacant() {
        let nowhere = tempfile::tempdir().unwrap().path().join("nowhere");
        assert!(reusable(1, nowhere).is_vacant().is_err());
    }

    /// The rules of leases are the same for ordinary files, some file systems excepted.
    #[test]
    fn a_group_with_an_open_entrance_or_a_process_is_not_vacant() {
        let group = tempfile::tempdir().unwrap();
        let tasks = group.path().join("tasks");
        fs::write(&tasks, "").unwrap();
        let groups = reusable(1, group.path().to_owned());
        assert!(groups.is_vacant().unwrap());
        let entrance = File::options().write(true).open(&tasks).unwrap();
        let copy = entrance.try_clone().unwrap();
        assert!(!groups.is_vacant().unwrap());
        drop(entrance);
        assert!(!groups.is_vacant().unwrap(), "a copy of the descriptor is open");
        drop(copy);
        assert!(groups.is_vacant().unwrap());
        fs::write(&tasks, "42\n").unwrap();
        assert!(!groups.is_vacant().unwrap());
    }

    #[test]
    fn a_group_with_memory_or_without_enough_of_it_is_not_vacant() {
        let group = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| fs::write(group.path().join(file), text).unwrap();
        let memory = Setting::new(group.path(), Version::V1, "memory.max", "memory.limit_in_bytes");
        let settings = Settings { memory: Some(memory), ..Settings::default() };
        let directories = vec![group.path().to_owned()];
        let groups = Reusable::new(1, directories, settings, None);
        write("tasks", "");
        groups.is_vacant().unwrap_err();
        write("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n");
        for (charged, is_vacant) in [(0, true), (RESIDUE_MAX, true), (RESIDUE_MAX + 1, false)] {
            write("memory.usage_in_bytes", &format!("{charged}\n"));
            assert_eq!(groups.is_vacant().unwrap(), is_vacant, "{charged}");
        }
        write("memory.usage_in_bytes", "0\n");
        write("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n");
        groups.is_vacant().unwrap_err();
    }

    #[test]
    fn limits_in_force_are_remembered_once_and_not_for_ever() {
        let known = InForceByGroup::default();
        known.note(1, InForce::FIRST);
        assert_eq!(known.take(1), InForce::FIRST);
        assert_eq!(known.take(1), InForce::UNKNOWN);
        for first in 0..=REMEMBERED_MAX as u64 {
            known.note(first, InForce::FIRST);
        }
        assert!(known.lock().len() <= REMEMBERED_MAX);
        assert_eq!(known.take(0), InForce::UNKNOWN);
    }
}
