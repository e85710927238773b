//! Limits of sandboxes that were changed while they run.
//!
//! A sandbox begins with `[limits]` of its function. What it has otherwise is in a table by the
//! number of its instance, and in a file for the next daemon, which reads it before it takes
//! instances over: one that uses more than its function's would be ended by the function's limit.

use super::own_file::{OwnFile, Subject};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use thaw_home::config::{ByteSize, Limits};
use thaw_sandbox::ResourceLimits;
use tokio::sync::MutexGuard as Turn;

/// Memory of an instance that counts in its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryHeld {
    /// Bytes that it has, files in it included; none where nobody counts them.
    pub bytes: Option<u64>,
    /// Bytes that are in a swap file and come back.
    pub swapped: u64,
}

/// The file.
const ABOUT: Subject = Subject {
    file: "sandbox-limits.json",
    of_all: "what sandboxes may use",
    of_one: "what the sandbox may use",
};
const MIB: u64 = 1 << 20;

/// Limits that are wanted of a sandbox; what is missing stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsChange {
    /// Bytes of memory, files included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Processors' worth of CPU time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
}

/// What a sandbox may use, and what it may be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LimitsInfo {
    /// Bytes of memory that it may have.
    pub memory_bytes: u64,
    /// Processors that it may use.
    pub cpus: u32,
    /// Most bytes that it may be given: its function allows them, and the node has them.
    pub memory_most_bytes: u64,
    /// Most processors that it may be given.
    pub cpus_most: u32,
    /// Bytes of memory that it has now, files included; none of one that sleeps, and where the host
    /// counts none.
    #[serde(default)]
    pub memory_used_bytes: Option<u64>,
    /// Bytes of its memory that are in a swap file, as long as it is hibernated.
    #[serde(default)]
    pub swapped_bytes: u64,
}

/// Why limits are as they were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unchanged {
    /// It is being copied or written: it may be tried again.
    Busy,
    /// One sentence for whoever has asked.
    Refused(String),
}

/// The limits of one sandbox that are its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OwnLimits {
    memory: u64,
    cpus: u32,
}

impl OwnLimits {
    /// With what a function says of all else.
    pub fn within(self, function: &Limits) -> ResourceLimits {
        let Self { memory, cpus } = self;
        ResourceLimits { memory, cpus, ..function.of_an_instance() }
    }

    /// Bytes of memory.
    pub fn memory(self) -> u64 {
        self.memory
    }
}

impl From<ResourceLimits> for OwnLimits {
    fn from(limits: ResourceLimits) -> Self {
        Self { memory: limits.memory, cpus: limits.cpus }
    }
}

impl LimitsChange {
    /// Whether nothing is wanted.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether a new sandbox of a function with these limits may have them.
    ///
    /// # Errors
    /// One sentence: neither function nor host allows so much, or it is too little.
    pub fn check(self, function: &Limits) -> Result<(), String> {
        let first = function.of_an_instance();
        check_host(first, self.of(first, function)?, of_host())
    }

    /// The limits that one gets which has `now`, of a function with these limits.
    ///
    /// # Errors
    /// One sentence: neither function nor host allows so much, or it is too little.
    pub(crate) fn of(
        self,
        now: ResourceLimits,
        function: &Limits,
    ) -> Result<ResourceLimits, String> {
        let memory = self.memory_bytes.unwrap_or(now.memory);
        let cpus = self.cpus.unwrap_or(now.cpus);
        ByteSize(memory).check_memory()?;
        if cpus == 0 {
            return Err("a sandbox needs a processor; give at least 1".to_owned());
        }
        // One that has it already keeps it.
        let (most_memory, most_cpus) = most(function);
        if memory > most_memory.max(now.memory) {
            return Err(format!(
                "its function allows {} of memory, and {} are wanted; raise `memory_max` in \
                 [limits] of its thaw.toml if it was built from one",
                ByteSize(most_memory),
                ByteSize(memory)
            ));
        }
        if cpus > most_cpus.max(now.cpus) {
            return Err(format!(
                "its function allows {most_cpus} processors, and {cpus} are wanted; raise \
                 `cpu_max` in [limits] of its thaw.toml if it was built from one"
            ));
        }
        Ok(ResourceLimits { memory, cpus, ..now })
    }
}

/// Refuses more than a host has.
///
/// # Errors
/// One sentence.
pub(crate) fn check_host(
    now: ResourceLimits,
    wanted: ResourceLimits,
    (memory, cpus): (u64, u32),
) -> Result<(), String> {
    if wanted.memory > now.memory && wanted.memory > memory {
        return Err(format!(
            "this node has {} of memory, and {} are wanted; give less",
            ByteSize(memory),
            ByteSize(wanted.memory)
        ));
    }
    if wanted.cpus > now.cpus && wanted.cpus > cpus {
        let wanted = wanted.cpus;
        return Err(format!(
            "this node has {cpus} processors, and {wanted} are wanted; give fewer"
        ));
    }
    Ok(())
}

/// What the host has: bytes of memory, processors. What cannot be read bounds nothing.
pub(crate) fn of_host() -> (u64, u32) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    let cpus = std::thread::available_parallelism();
    let cpus = cpus.map_or(u32::MAX, |cpus| u32::try_from(cpus.get()).unwrap_or(u32::MAX));
    (kib.map_or(u64::MAX, |kib| kib.saturating_mul(1024)), cpus)
}

/// Most memory and processors that a function allows.
fn most(function: &Limits) -> (u64, u32) {
    let memory = function.memory_max.unwrap_or(function.memory).bytes();
    (memory, function.cpu_max.map_or(function.cpu, NonZeroU32::from).get())
}

impl LimitsInfo {
    /// Of a sandbox that may use `now` and has `held`, of a function with these limits, on a host with
    /// so much memory, of which whole MiB count, and so many processors.
    pub(crate) fn new(
        now: ResourceLimits,
        held: MemoryHeld,
        function: &Limits,
        (memory, cpus): (u64, u32),
    ) -> Self {
        let (memory_most, cpus_most) = most(function);
        Self {
            memory_bytes: now.memory,
            cpus: now.cpus,
            // One that has more keeps it.
            memory_most_bytes: memory_most.min(memory - memory % MIB).max(now.memory),
            cpus_most: cpus_most.min(cpus).max(now.cpus),
            memory_used_bytes: held.bytes,
            swapped_bytes: held.swapped,
        }
    }
}

/// The limits of the instances that have some of their own.
pub struct LimitsTable {
    known: Mutex<BTreeMap<u64, OwnLimits>>,
    file: OwnFile,
    /// Held while the limits of an instance change, of one at a time.
    changing: tokio::sync::Mutex<()>,
}

impl Default for LimitsTable {
    fn default() -> Self {
        let file = OwnFile::about(&ABOUT);
        Self { known: Mutex::default(), file, changing: tokio::sync::Mutex::default() }
    }
}

impl LimitsTable {
    /// Reads what an earlier daemon has written in a directory, and writes there from now on. To
    /// be called before instances are taken over.
    ///
    /// # Errors
    /// The file is there and cannot be read: some instances may have more than their function's.
    pub fn keep_in(&self, directory: &Path) -> io::Result<()> {
        *self.known() = self.file.read(directory)?;
        Ok(())
    }

    /// A turn to change some.
    pub(crate) async fn turn(&self) -> Turn<'_, ()> {
        self.changing.lock().await
    }

    /// Those of an instance, if it has its own.
    pub(crate) fn of(&self, instance: u64) -> Option<OwnLimits> {
        self.known().get(&instance).copied()
    }

    /// Instances have these from now on, as this daemon and the next one know.
    ///
    /// # Errors
    /// One sentence: the next daemon would not know; nothing changes.
    pub(crate) async fn set(self: &Arc<Self>, new: &[(u64, OwnLimits)]) -> Result<(), String> {
        if new.iter().all(|(id, limits)| self.of(*id) == Some(*limits)) {
            return Ok(());
        }
        let before: Vec<_> = {
            let mut known = self.known();
            new.iter().map(|(id, limits)| (*id, known.insert(*id, *limits))).collect()
        };
        let written = self.file.written(self, Self::write).await;
        if written.is_err() {
            let mut known = self.known();
            for (id, limits) in before {
                match limits {
                    Some(limits) => drop(known.insert(id, limits)),
                    None => drop(known.remove(&id)),
                }
            }
        }
        written
    }

    /// The instances that have some.
    pub fn ids(&self) -> Vec<u64> {
        self.known().keys().copied().collect()
    }

    /// Forgets those of an instance that is there no more. The file loses them with the next change.
    pub fn forget(&self, id: u64) {
        self.known().remove(&id);
    }

    fn write(&self) -> io::Result<()> {
        self.file.write(|| self.known().clone())?;
        self.file.settle()
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<u64, OwnLimits>> {
        self.known.lock().expect("no holder panics")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(memory_max: Option<u64>, cpu_max: Option<u32>) -> Limits {
        Limits {
            memory_max: memory_max.map(ByteSize::mebibytes),
            cpu_max: cpu_max.and_then(NonZeroU32::new),
            ..Limits::default()
        }
    }

    fn change(memory_mib: Option<u64>, cpus: Option<u32>) -> LimitsChange {
        LimitsChange { memory_bytes: memory_mib.map(|mib| mib * MIB), cpus }
    }

    #[test]
    fn a_function_says_how_much_its_sandboxes_may_be_given() {
        let narrow = function(None, None);
        let now = narrow.of_an_instance();
        let lower = change(Some(64), None).of(now, &narrow).unwrap();
        assert_eq!(lower, ResourceLimits { memory: 64 * MIB, ..now });
        let refused = change(Some(257), None).of(now, &narrow).unwrap_err();
        assert!(refused.contains("256MiB") && refused.contains("257MiB"), "{refused}");
        assert!(change(None, Some(2)).of(now, &narrow).unwrap_err().contains("`cpu_max`"));
        assert!(change(Some(7), None).of(now, &narrow).is_err());
        assert!(change(None, Some(0)).of(now, &narrow).is_err());
        let wide = function(Some(1024), Some(4));
        let raised = change(Some(1024), Some(4)).of(now, &wide).unwrap();
        assert_eq!((raised.memory, raised.cpus), (1024 * MIB, 4));
        // The function was built anew with less: what there is may stay, and be lowered.
        assert_eq!(change(None, Some(3)).of(raised, &narrow).unwrap().memory, 1024 * MIB);
        assert!(change(Some(1025), None).of(raised, &narrow).is_err());
    }

    #[test]
    fn what_a_sandbox_may_be_given_is_no_more_than_the_host_has() {
        let (now, held) = (Limits::default().of_an_instance(), MemoryHeld::default());
        let most = |now, host| {
            let info = LimitsInfo::new(now, held, &function(Some(1024), Some(4)), host);
            (info.memory_most_bytes / MIB, info.cpus_most)
        };
        assert_eq!(most(now, (4096 * MIB, 8)), (1024, 4));
        assert_eq!(most(now, (512 * MIB, 2)), (512, 2));
        // What it has already stays.
        let large = ResourceLimits { memory: 768 * MIB, cpus: 3, ..now };
        assert_eq!(most(large, (512 * MIB, 2)), (768, 3));
    }

    #[test]
    fn no_host_gives_what_it_has_not() {
        let now = Limits::default().of_an_instance();
        let wanted = ResourceLimits { memory: 513 * MIB, cpus: 3, ..now };
        assert!(check_host(now, wanted, (513 * MIB, 3)).is_ok());
        let refused = check_host(now, wanted, (512 * MIB, 3)).unwrap_err();
        assert!(refused.contains("512MiB") && refused.contains("513MiB"), "{refused}");
        assert!(check_host(now, wanted, (u64::MAX, 2)).is_err());
        assert!(check_host(wanted, wanted, (1, 1)).is_ok(), "nothing is raised");
        let (memory, cpus) = of_host();
        assert!(memory > MIB && cpus > 0);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn the_next_daemon_knows_what_was_changed() {
        let directory = tempfile::tempdir().unwrap();
        let table = Arc::new(LimitsTable::default());
        table.keep_in(directory.path()).unwrap();
        let own = |memory| OwnLimits { memory, cpus: 2 };
        table.set(&[(7, own(64 * MIB)), (8, own(32 * MIB))]).await.unwrap();
        table.forget(8);
        table.set(&[(7, own(65 * MIB))]).await.unwrap();
        let next = LimitsTable::default();
        next.keep_in(directory.path()).unwrap();
        assert_eq!((next.of(7), next.of(8)), (Some(own(65 * MIB)), None));
        let limits = next.of(7).unwrap().within(&Limits::default());
        assert_eq!((limits.memory, limits.cpus, limits.processes), (65 * MIB, 2, 512));
        // What cannot be written down is not changed.
        let file = directory.path().join(ABOUT.file);
        drop(directory);
        assert!(
            table.set(&[(7, own(MIB)), (9, own(MIB))]).await.unwrap_err().contains("make room")
        );
        assert_eq!((table.of(7), table.of(9)), (Some(own(65 * MIB)), None));
        let damaged = tempfile::tempdir().unwrap();
        std::fs::write(damaged.path().join(file.file_name().unwrap()), "{").unwrap();
        let error = LimitsTable::default().keep_in(damaged.path()).unwrap_err().to_string();
        assert!(error.contains("restore it"), "{error}");
    }
}
