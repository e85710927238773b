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
}
