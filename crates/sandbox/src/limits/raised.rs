//! More memory than a sandbox' limit, as long as its twin holds a copy of what it has.

use std::fmt;
use std::io;
use std::sync::Arc;

use super::Limits;
use super::memory::MemoryLimit;

/// A raised memory limit. Give it back with [`RaisedMemory::lower`]; dropping it leaves the limit
/// as it is, as befits a sandbox that has ended.
pub struct RaisedMemory {
    limits: Arc<Limits>,
}

/// What became of a limit that was to be lowered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lowered {
    /// It is as before.
    Done,
    /// The sandbox has more than that, and keeps the raised limit.
    TooMuchInUse,
}

impl fmt::Debug for RaisedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RaisedMemory").finish_non_exhaustive()
    }
}

impl RaisedMemory {
    /// Lets a sandbox have all that it has now a second time.
    pub(crate) fn of(limits: &Arc<Limits>) -> io::Result<Self> {
        let usual = limits.memory_limit().wanted;
        if usual > 0 {
            let in_use = limits.group.memory()?.unwrap_or(usual);
            limits.change_memory(|memory| memory.for_twin = in_use.min(usual))?;
        }
        Ok(Self { limits: limits.clone() })
    }

    /// Puts the usual limit in force again, unless the sandbox has more than that: the host kernel
    /// would end it, and some of it may be that of a twin which is just ending.
    ///
    /// # Errors
    /// The host refuses.
    pub fn lower(&self) -> io::Result<Lowered> {
        let usual = MemoryLimit { for_twin: 0, ..self.limits.memory_limit() };
        let most = usual.usable(&self.limits.group);
        if most > 0 && self.limits.group.memory()?.is_some_and(|in_use| in_use > most) {
            return Ok(Lowered::TooMuchInUse);
        }
        match self.limits.change_memory(|memory| memory.for_twin = 0) {
            Ok(()) => Ok(Lowered::Done),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(Lowered::TooMuchInUse),
            Err(error) => Err(error),
        }
    }

    /// Notes that the sandbox is ended because it has not given back what it had too much.
    pub fn note_not_given_back(&self) {
        self.limits.note_memory_kept();
    }
}

#[cfg(test)]
mod tests {
    use super::super::group::{Group, GroupName};
    use super::super::hierarchy::{Controller, Hierarchy, Place, Version};
    use super::*;
    use crate::limits::{LimitReached, ResourceLimits};
    use std::fs;

    #[test]
    fn the_limit_is_raised_by_what_is_there_and_lowered_when_it_fits() {
        let tree = tempfile::tempdir().unwrap();
        let group = tree.path().join("group");
        fs::create_dir_all(&group).unwrap();
        let file = |name: &str| group.join(name);
        fs::write(file("memory.swappiness"), "").unwrap();
        fs::write(file("memory.limit_in_bytes"), "1000000\n").unwrap();
        fs::write(file("memory.usage_in_bytes"), "400000\n").unwrap();
        fs::write(file("memory.oom_control"), "oom_kill 0\n").unwrap();
        let controllers = vec![Controller::Memory];
        let place = Place { directory: tree.path().to_owned(), version: Version::V1, controllers };
        let hierarchy = Hierarchy::new(vec![place], Vec::new());
        let group =
            Group::set_up(vec![group.clone()], GroupName::of_first(0), hierarchy, None).unwrap();
        let limits = Arc::new(Limits::new(group));
        limits.expect(ResourceLimits { memory: 1_000_000, ..ResourceLimits::default() });
        // The file is longer than what is written to it: a control group's is not.
        let limit = || fs::read_to_string(file("memory.limit_in_bytes")).unwrap()[..7].to_owned();
        let raised = RaisedMemory::of(&limits).unwrap();
        assert_eq!(limit(), "1400000");
        fs::write(file("memory.usage_in_bytes"), "1000001\n").unwrap();
        assert_eq!(raised.lower().unwrap(), Lowered::TooMuchInUse);
        assert_eq!((limit().as_str(), limits.reached()), ("1400000", None));
        fs::write(file("memory.usage_in_bytes"), "1000000\n").unwrap();
        assert_eq!(raised.lower().unwrap(), Lowered::Done);
        assert_eq!(limit(), "1000000");
        raised.note_not_given_back();
        assert_eq!(limits.reached(), Some(LimitReached::Memory));
    }
}
