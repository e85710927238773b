//! Groups that sandboxes have one after the other.
//!
//! To make and remove a group takes the host kernel more than all that a boot writes to it,
//! and holds up everybody who makes another one. A group of version 1 for processors, CPU time
//! or processes carries nothing of a sandbox that has ended but the CPU time that it has
//! counted, and its limits. So the maker of groups keeps some of them for the sandboxes to come
//! ([`super::hierarchy::Place::is_reusable`] says which).
//!
//! A group is *vacant* when nobody is in it and nobody holds a file that leads into it. Until
//! then no other sandbox gets it.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::group::{CpuCounter, GroupName, InForce, SMALL_USE, Setting, entrance};
use super::hierarchy::Version;
use crate::sys;

/// Sandboxes whose groups wait for others, at most: some more than end while a zygote is made.
pub const VACANT_MAX: usize = 128;
/// Groups whose limits are remembered for the time when the monitor gives them again.
const REMEMBERED_MAX: usize = 4096;

/// Those groups of one sandbox that another one can have after it.
#[derive(Debug)]
pub struct Reusable {
    /// [`GroupName::first`].
    first: u64,
    directories: Vec<PathBuf>,
    cpu: Option<Setting>,
    processes: Option<Setting>,
    /// What counts the CPU time of the present sandbox, if one of these groups does.
    counter: Option<CpuCounter>,
}

impl Reusable {
    pub fn new(
        first: u64,
        directories: Vec<PathBuf>,
        cpu: Option<Setting>,
        processes: Option<Setting>,
        counter: Option<CpuCounter>,
    ) -> Self {
        Self { first, directories, cpu, processes, counter }
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

    /// The settings for processors and for processes.
    pub fn into_settings(self) -> (Option<Setting>, Option<Setting>) {
        (self.cpu, self.processes)
    }

    /// Whether the CPU time of a sandbox is counted here.
    pub fn counts_cpu_time(&self) -> bool {
        self.counter.is_some()
    }

    /// Whether nobody is in the groups, and nobody can come.
    ///
    /// # Errors
    /// The host cannot tell.
    pub fn is_vacant(&self) -> io::Result<bool> {
        for directory in &self.directories {
            let mut entrance = File::open(directory.join(entrance(Version::V1)))?;
            // Who could come is looked for before those who are there.
            if sys::is_open_for_writing(&entrance)? || entrance.read(&mut [0])? > 0 {
                return Ok(false);
            }
        }
        // A process that nobody has waited for is on no list, but counts as one.
        let Some(processes) = &self.processes else { return Ok(true) };
        Ok(fs::read_to_string(processes.directory().join("pids.current"))?.trim() == "0")
    }

    /// Ends the account of the present sandbox; the next one's begins at zero. The CPU time
    /// that it has used, if it is counted here.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn close_account(&mut self) -> io::Result<Option<Duration>> {
        let used = self.counter.as_mut().map(CpuCounter::restart).transpose()?;
        if used.is_none_or(|used| used > SMALL_USE) {
            self.cpu.iter().for_each(Setting::forget);
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
        self.lock().remove(&first).unwrap_or(InForce::UNKNOWN).with_new_memory_group()
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
        Reusable::new(first, vec![directory], None, None, Some(counter))
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
    fn limits_in_force_are_remembered_once_and_not_for_ever() {
        let known = InForceByGroup::default();
        known.note(1, InForce::FIRST);
        assert_eq!(known.take(1), InForce::FIRST);
        let unknown = InForce::UNKNOWN.with_new_memory_group();
        assert_eq!(known.take(1), unknown);
        for first in 0..=REMEMBERED_MAX as u64 {
            known.note(first, InForce::FIRST);
        }
        assert!(known.lock().len() <= REMEMBERED_MAX);
        assert_eq!(known.take(0), unknown);
    }
}
