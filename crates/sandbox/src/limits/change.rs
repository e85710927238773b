//! Limits of a sandbox that change while it runs.

use std::io;

use super::hierarchy::Controller;
use super::memory::MemoryLimit;
use super::{Limits, ResourceLimits};

/// Why the limits of a sandbox that runs are as they were.
#[derive(Debug, thiserror::Error)]
pub enum NotChanged {
    /// It has more memory than it is to have.
    #[error("it has {held} bytes of memory, and was to have {wanted}")]
    InUse {
        /// Bytes that it has.
        held: u64,
        /// Bytes that it was to have.
        wanted: u64,
    },
    /// Nothing enforces the limit over all of its processes.
    #[error("this host has no control groups that limit {}", .0.limit())]
    NotEnforced(Controller),
    /// The host refuses.
    #[error(transparent)]
    Host(#[from] io::Error),
}

impl Limits {
    /// Changes memory and processors from what they are, `before`, to `wanted`. Of the sandbox'
    /// memory `elsewhere` bytes are in a file at the moment, and come back.
    ///
    /// # Errors
    /// See [`NotChanged`]; nothing has changed then.
    pub(crate) fn change(
        &self,
        before: ResourceLimits,
        wanted: ResourceLimits,
        elsewhere: u64,
    ) -> Result<(), NotChanged> {
        let changes = [
            (before.cpus != wanted.cpus, Controller::Cpu),
            (before.memory != wanted.memory, Controller::Memory),
        ];
        for (is_other, controller) in changes {
            if is_other && !self.group.has(controller) {
                return Err(NotChanged::NotEnforced(controller));
            }
        }
        if wanted.memory < before.memory {
            let reserve = MemoryLimit { wanted: wanted.memory, ..self.memory_limit() };
            let held = self.group.memory_held()?.unwrap_or(0).saturating_add(elsewhere);
            let held = held.saturating_add(reserve.never_in_use(&self.group));
            // The host would end it (version 2), or refuse (version 1).
            if held > wanted.memory {
                return Err(NotChanged::InUse { held, wanted: wanted.memory });
            }
        }
        let changed = self.set_in_groups(wanted);
        changed.map_err(|error| {
            // What was changed first was not refused a moment ago.
            let _ = self.set_in_groups(before);
            match error.raw_os_error() {
                Some(libc::EBUSY) => {
                    let held = self.group.memory().ok().flatten().unwrap_or(wanted.memory);
                    NotChanged::InUse { held, wanted: wanted.memory }
                }
                _ => NotChanged::Host(error),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::group::{Group, GroupName};
    use super::super::hierarchy::{Hierarchy, Place, Version};
    use super::*;
    use std::fs;
    use std::path::Path;

    const BEFORE: ResourceLimits = ResourceLimits { memory: 4_000_000, cpus: 1, processes: 9 };

    /// Files as those of control groups. What is written to them is as long as before.
    fn limits(version: Version, files: &[(&str, &str)]) -> (tempfile::TempDir, Limits) {
        let tree = tempfile::tempdir().unwrap();
        let group = tree.path().join("group");
        fs::create_dir_all(&group).unwrap();
        for (name, content) in files {
            fs::write(group.join(name), content).unwrap();
        }
        let controllers = vec![Controller::Memory, Controller::Cpu];
        let place = Place { directory: tree.path().to_owned(), version, controllers };
        let hierarchy = Hierarchy::new(vec![place], Vec::new());
        let group = Group::set_up(vec![group], GroupName::of_first(0), hierarchy, None).unwrap();
        let limits = Limits::new(group);
        limits.set_in_groups(BEFORE).unwrap();
        (tree, limits)
    }

    fn read(tree: &Path, name: &str) -> String {
        fs::read_to_string(tree.join("group").join(name)).unwrap()
    }

    #[test]
    fn limits_are_written_in_both_versions_and_never_below_what_is_held() {
        let v1 = [
            ("memory.limit_in_bytes", "0000000"),
            ("memory.usage_in_bytes", "3000000\n"),
            ("memory.stat", "cache 900000\nshmem 100000\n"),
            ("cpu.cfs_quota_us", "000000"),
            ("cpu.cfs_period_us", ""),
        ];
        let v2 = [
            ("memory.max", "0000000"),
            ("memory.current", "3000000\n"),
            ("memory.stat", "anon 1\nfile 900000\nshmem 100000\n"),
            ("cpu.max", "000000"),
            ("memory.oom.group", ""),
        ];
        for (version, files) in [(Version::V1, v1), (Version::V2, v2)] {
            let (tree, limits) = limits(version, &files);
            let (memory, cpu) = (files[0].0, files[3].0);
            let wanted = ResourceLimits { memory: 2_200_000, cpus: 3, ..BEFORE };
            limits.change(BEFORE, wanted, 0).unwrap();
            assert_eq!(&read(tree.path(), memory)[..7], "2200000");
            assert_eq!(&read(tree.path(), cpu)[..6], "300000");
            let less = ResourceLimits { memory: 2_199_999, ..wanted };
            let refused = limits.change(wanted, less, 0).unwrap_err();
            assert!(matches!(refused, NotChanged::InUse { held: 2_200_000, wanted: 2_199_999 }));
            // What is in a swap file comes back.
            assert!(limits.change(BEFORE, wanted, 1).is_err());
            assert_eq!(&read(tree.path(), memory)[..7], "2200000");
            limits.change(wanted, BEFORE, u64::MAX).unwrap();
            assert_eq!(&read(tree.path(), memory)[..7], "4000000");
        }
    }

    #[test]
    fn a_limit_that_nothing_enforces_is_not_changed() {
        let hierarchy = Hierarchy::new(Vec::new(), Vec::new());
        let group = Group::set_up(Vec::new(), GroupName::of_first(0), hierarchy, None).unwrap();
        let limits = Limits::new(group);
        let wanted = ResourceLimits { memory: BEFORE.memory + 1, ..BEFORE };
        let refused = limits.change(BEFORE, wanted, 0).unwrap_err();
        assert!(matches!(refused, NotChanged::NotEnforced(Controller::Memory)));
        limits.change(BEFORE, BEFORE, 0).unwrap();
    }
}
