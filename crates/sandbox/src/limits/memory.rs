//! The memory limit of one sandbox, and what of it is in force.

use std::io;

use super::Group;

/// The part of a sandbox' memory that is one step of its reserve, and the least of it, in bytes. With
/// version 2 a step is larger, since the host slows processes down only when they have some hundredths
/// more than they may.
const STEP_PART: u64 = 128;
const STEP_PART_V2: u64 = 64;
const STEP_MIN: u64 = 512 << 10;
/// Most of a step of version 1, where a process takes a page more and then looks at its messages.
const STEP_MAX_V1: u64 = 4 << 20;
/// Steps of a reserve.
pub(super) const STEPS: u64 = 2;

/// The memory limit of a sandbox. All in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryLimit {
    /// What it may have; 0: no limit.
    pub wanted: u64,
    /// So much more as long as it has a twin ([`super::RaisedMemory`]).
    pub for_twin: u64,
    /// Whether a part is its reserve, which it gets when it has used the rest
    /// ([`super::oom`]).
    pub has_reserve: bool,
    /// Steps of the reserve that it has got.
    pub lent: u64,
}

impl MemoryLimit {
    /// Most that it may have; 0: no limit.
    pub fn max(self) -> u64 {
        match self.wanted {
            0 => 0,
            wanted => wanted.saturating_add(self.for_twin),
        }
    }

    /// A step of its reserve, if it has one.
    pub fn step(self, group: &Group) -> u64 {
        if self.wanted == 0 || !self.has_reserve {
            return 0;
        }
        let step = match group.slows_down() {
            true => (self.wanted / STEP_PART_V2).max(STEP_MIN),
            false => (self.wanted / STEP_PART).clamp(STEP_MIN, STEP_MAX_V1),
        };
        step.min(self.wanted / 8)
    }

    /// The same limit with one more step of the reserve lent, if there is one.
    pub fn with_next_step(self) -> Self {
        Self { lent: (self.lent + 1).min(STEPS), ..self }
    }

    /// What it has to leave for now.
    fn reserve(self, group: &Group) -> u64 {
        let is_slow = group.slows_down() && self.lent > 0;
        if is_slow { 0 } else { (STEPS - self.lent) * self.step(group) }
    }

    /// From so much on one of its processes is to be ended. With version 1 it is less than what it may
    /// have: at the limit host calls of its kernel fail.
    pub fn is_short_from(self, group: &Group) -> u64 {
        let ahead = if group.slows_down() { 0 } else { self.step(group) };
        Self { lent: 0, ..self }.usable(group).saturating_sub(ahead)
    }

    /// What it may have now; 0: no limit.
    pub fn usable(self, group: &Group) -> u64 {
        self.max() - self.reserve(group)
    }

    /// What it cannot have for long.
    pub fn never_in_use(self, group: &Group) -> u64 {
        self.max() - self.is_short_from(group)
    }

    /// Puts it in force.
    ///
    /// # Errors
    /// The host kernel refuses, `EBUSY` if the sandbox has more than that.
    pub fn enforce(self, group: &Group) -> io::Result<()> {
        group.set_memory(self.max(), self.reserve(group))
    }

    /// Has the host of control groups of version 1 look again at processes that wait for memory, as it does
    /// when a limit is raised. It wakes them when others give memory back, and misses one that has just
    /// been refused and is about to wait (`mem_cgroup_oom_synchronize`, mm/memcontrol-v1.c).
    ///
    /// # Errors
    /// As [`MemoryLimit::enforce`].
    pub fn have_host_look_again(self, group: &Group) -> io::Result<()> {
        const PAGE: u64 = 4096;
        if self.wanted == 0 {
            return Ok(());
        }
        group.set_memory(self.max().saturating_add(PAGE), self.reserve(group))?;
        self.enforce(group)
    }
}

#[cfg(test)]
mod tests {
    use super::super::hierarchy::{Controller, Hierarchy, Place, Version};
    use super::*;
    use crate::limits::GroupName;
    use std::fs;

    const MIB: u64 = 1 << 20;

    /// A group whose files are ordinary ones.
    fn group(version: Version) -> (tempfile::TempDir, Group) {
        let tree = tempfile::tempdir().unwrap();
        let group = tree.path().join("group");
        fs::create_dir_all(&group).unwrap();
        for file in ["memory.oom.group", "memory.limit_in_bytes", "memory.max"] {
            fs::write(group.join(file), "").unwrap();
        }
        let controllers = vec![Controller::Memory];
        let place = Place { directory: tree.path().to_owned(), version, controllers };
        let hierarchy = Hierarchy::new(vec![place], Vec::new());
        let group = Group::set_up(vec![group], GroupName::of_first(0), hierarchy, None).unwrap();
        (tree, group)
    }

    #[test]
    fn a_reserve_is_lent_in_steps_within_the_limit() {
        let (_tree, group) = group(Version::V1);
        let mut limit = MemoryLimit { wanted: 256 * MIB, has_reserve: true, ..Default::default() };
        assert_eq!(limit.is_short_from(&group), 250 * MIB);
        let mut usable = Vec::new();
        for _ in 0..4 {
            usable.push(limit.usable(&group) / MIB);
            assert_eq!(limit.is_short_from(&group), 250 * MIB, "whatever is lent");
            limit = limit.with_next_step();
        }
        assert_eq!(usable, [252, 254, 256, 256]);
        let twin = MemoryLimit { for_twin: 100 * MIB, lent: 0, ..limit };
        assert_eq!(twin.usable(&group), 352 * MIB);
    }

    #[test]
    fn version_2_has_larger_steps_and_lends_all_at_once() {
        let (_tree, group) = group(Version::V2);
        let limit = MemoryLimit { wanted: 256 * MIB, has_reserve: true, ..Default::default() };
        assert_eq!((limit.usable(&group), limit.is_short_from(&group)), (248 * MIB, 248 * MIB));
        assert_eq!(limit.with_next_step().usable(&group), 256 * MIB);
    }

    #[test]
    fn no_limit_has_no_reserve_and_small_ones_keep_most() {
        let (_tree, group) = group(Version::V1);
        let none = MemoryLimit { has_reserve: true, ..Default::default() };
        assert_eq!((none.max(), none.usable(&group)), (0, 0));
        let unwatched = MemoryLimit { wanted: 8 * MIB, ..Default::default() };
        assert_eq!(unwatched.usable(&group), 8 * MIB);
        for mib in [1, 8, 64, 1024, 65536] {
            let limit = MemoryLimit { wanted: mib * MIB, has_reserve: true, ..Default::default() };
            let lost = limit.never_in_use(&group);
            assert!(lost <= limit.wanted * 3 / 8 && lost <= 12 * MIB, "{mib} MiB: {lost}");
        }
    }
}
