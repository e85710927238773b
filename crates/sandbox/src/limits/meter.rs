//! What many sandboxes use together, as the host counts it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::Limits;

/// The list of sandboxes is tidied up when it has grown to so many, and then to twice as
/// many as were left.
const TIDY_FROM: usize = 64;

/// Counts the CPU time and the memory of all sandboxes that were added to it, those that
/// have ended included. Where no control group counts them, it stays at zero.
#[derive(Default)]
pub struct Meter {
    /// CPU time of the sandboxes whose control groups are gone, in nanoseconds.
    ended_ns: AtomicU64,
    /// CPU time that sandboxes had used before they were taken over, in nanoseconds.
    inherited_ns: AtomicU64,
    /// The most that was ever reported: while a control group is being removed, its time
    /// is in neither of the others.
    reported_ns: AtomicU64,
    live: Mutex<Live>,
}

#[derive(Default)]
struct Live {
    sandboxes: Vec<Weak<Limits>>,
    tidy_at: usize,
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("reported_ns", &self.reported_ns).finish_non_exhaustive()
    }
}

impl Meter {
    /// Counts a sandbox from now on, with what it has used before. Takes no host call.
    pub(super) fn add(&self, limits: &Arc<Limits>) {
        let mut live = self.live();
        live.sandboxes.push(Arc::downgrade(limits));
        if live.sandboxes.len() >= live.tidy_at.max(TIDY_FROM) {
            live.sandboxes.retain(|sandbox| sandbox.strong_count() > 0);
            live.tidy_at = 2 * live.sandboxes.len();
        }
    }

    /// Leaves out what a sandbox has used that is to be added, and that was counted by
    /// somebody else so far.
    pub(super) fn leave_out(&self, cpu_time: Duration) {
        let ns = u64::try_from(cpu_time.as_nanos()).unwrap_or(u64::MAX);
        self.inherited_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Adds what a sandbox has used whose control groups are being removed.
    pub(super) fn ended(&self, cpu_time: Duration) {
        let ns = u64::try_from(cpu_time.as_nanos()).unwrap_or(u64::MAX);
        self.ended_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// CPU time that all of them have used. It never falls. Reads a file for each that is
    /// live.
    pub fn cpu_time(&self) -> Duration {
        let live: Duration = self
            .sandboxes()
            .iter()
            .filter_map(|limits| limits.group().cpu_time().ok().flatten())
            .sum();
        let ended = Duration::from_nanos(self.ended_ns.load(Ordering::Relaxed));
        let inherited = Duration::from_nanos(self.inherited_ns.load(Ordering::Relaxed));
        let used = (ended + live).saturating_sub(inherited);
        let ns = u64::try_from(used.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.reported_ns.fetch_max(ns, Ordering::Relaxed).max(ns))
    }

    /// Bytes of memory that those have now that are live. Reads a file for each.
    pub fn memory(&self) -> u64 {
        let of = |limits: &Arc<Limits>| limits.group().memory().ok().flatten();
        self.sandboxes().iter().filter_map(of).sum()
    }

    fn sandboxes(&self) -> Vec<Arc<Limits>> {
        self.live().sandboxes.iter().filter_map(Weak::upgrade).collect()
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::super::group::{Group, GroupName};
    use super::super::hierarchy::{Controller, Hierarchy, Place, Version};
    use super::*;
    use std::fs;
    use std::path::Path;

    /// Limits whose groups are ordinary directories.
    fn limits(directory: &Path, controllers: Vec<Controller>) -> Arc<Limits> {
        let place = Place { directory: directory.to_owned(), version: Version::V1, controllers };
        let hierarchy = Hierarchy::new(vec![place], Vec::new());
        let group = directory.join("group");
        fs::create_dir_all(&group).unwrap();
        Arc::new(Limits::new(
            Group::set_up(vec![group], GroupName::of_first(0), hierarchy, None).unwrap(),
        ))
    }

    #[test]
    fn what_live_and_ended_sandboxes_use_is_added_up_and_never_falls() {
        let tree = tempfile::tempdir().unwrap();
        let meter: Arc<Meter> = Arc::default();
        let limits = limits(tree.path(), vec![Controller::CpuAccounting]);
        let usage = tree.path().join("group/cpuacct.usage");
        fs::write(&usage, "7000").unwrap();
        limits.count_by(&meter);
        // Twice is once, and the first meter stays.
        limits.count_by(&meter);
        let other: Arc<Meter> = Arc::default();
        limits.count_by(&other);
        assert_eq!(meter.cpu_time(), Duration::from_micros(7));
        assert_eq!(other.cpu_time(), Duration::ZERO);
        meter.ended(Duration::from_micros(3));
        assert_eq!(meter.cpu_time(), Duration::from_micros(10));
        // As while its group is being removed.
        fs::write(&usage, "0").unwrap();
        assert_eq!(meter.cpu_time(), Duration::from_micros(10));
        assert_eq!(meter.memory(), 0, "nothing counts it here");
    }

    #[test]
    fn what_a_sandbox_had_used_before_it_was_taken_over_does_not_count() {
        let tree = tempfile::tempdir().unwrap();
        let meter: Arc<Meter> = Arc::default();
        let limits = limits(tree.path(), vec![Controller::CpuAccounting]);
        let usage = tree.path().join("group/cpuacct.usage");
        fs::write(&usage, "7000").unwrap();
        limits.count_from_now_by(&meter).unwrap();
        assert_eq!(meter.cpu_time(), Duration::ZERO);
        fs::write(&usage, "9000").unwrap();
        assert_eq!(meter.cpu_time(), Duration::from_micros(2));
    }

    #[test]
    fn sandboxes_that_are_gone_are_forgotten() {
        let tree = tempfile::tempdir().unwrap();
        let meter: Arc<Meter> = Arc::default();
        let kept = limits(&tree.path().join("kept"), Vec::new());
        meter.add(&kept);
        // Each removes its directory.
        for number in 0..1000 {
            meter.add(&limits(&tree.path().join(number.to_string()), Vec::new()));
        }
        assert!(meter.live().sandboxes.len() <= 2 * TIDY_FROM);
        assert_eq!(meter.sandboxes().len(), 1);
    }
}
