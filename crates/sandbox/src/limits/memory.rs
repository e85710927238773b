//! The memory limit of one sandbox, and what of it is in force.

use std::io;

use super::Group;

/// The part of a sandbox' memory that is its reserve, and the least and the most of it in bytes. What
/// its processes take while one of them is being ended comes from there. Of version 2 the host slows
/// processes down only when they have some hundredths more than they may, so that there is no most.
const RESERVE_PART: u64 = 32;
const RESERVE_MIN: u64 = 1 << 20;
const RESERVE_MAX_V1: u64 = 8 << 20;

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
    /// Whether it has got that.
    pub is_lent: bool,
}

impl MemoryLimit {
    /// Most that it may have; 0: no limit.
    pub fn max(self) -> u64 {
        match self.wanted {
            0 => 0,
            wanted => wanted.saturating_add(self.for_twin),
        }
    }

    /// What it has to leave for now.
    pub fn reserve(self, group: &Group) -> u64 {
        if self.wanted == 0 || !self.has_reserve || self.is_lent {
            return 0;
        }
        let part = (self.wanted / RESERVE_PART).max(RESERVE_MIN);
        let part = if group.slows_down() { part } else { part.min(RESERVE_MAX_V1) };
        part.min(self.wanted / 2)
    }

    /// From so much on one of its processes is to be ended, as long as nothing is lent; 0: never. With
    /// version 1 it is less than what it may have: at the limit host calls of its kernel fail.
    pub fn is_short_from(self, group: &Group) -> u64 {
        let reserve = self.reserve(group);
        let ahead = if group.slows_down() { 0 } else { reserve };
        if reserve == 0 { 0 } else { self.max().saturating_sub(reserve + ahead) }
    }

    /// What it may have now; 0: no limit.
    pub fn usable(self, group: &Group) -> u64 {
        self.max() - self.reserve(group)
    }

    /// Puts it in force.
    ///
    /// # Errors
    /// The host kernel refuses, `EBUSY` if the sandbox has more than that.
    pub fn enforce(self, group: &Group) -> io::Result<()> {
        group.set_memory(self.max(), self.reserve(group))
    }
}
