//! The ranges of a file that a sandbox has locked, as the host's kernel keeps them.

use std::collections::BTreeMap;

use rustix::io::Errno;

use crate::sys::RecordLock;

/// Locked ranges of one file: the byte behind the end and the kind, by the first byte.
#[derive(Clone, Debug, Default)]
pub(super) struct Ranges(BTreeMap<u64, (u64, RecordLock)>);

impl Ranges {
    /// How many the host keeps. Neighbours of one kind are one (fcntl(2)).
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The ranges after `len` bytes (0: all) from `start` on are locked as `kind` says.
    ///
    /// # Errors
    /// `EINVAL`: it is no range.
    pub fn with(&self, kind: RecordLock, start: u64, len: u64) -> Result<Self, Errno> {
        let end = match len {
            0 => u64::MAX,
            len => match start.checked_add(len).ok_or(Errno::INVAL)? {
                // The last byte that a file can have.
                end if end > i64::MAX as u64 => u64::MAX,
                end => end,
            },
        };
        let mut changed = Self::default();
        for (&first, &(last, held)) in &self.0 {
            changed.add(first, last.min(start), held);
        }
        if kind != RecordLock::None {
            changed.add(start, end, kind);
        }
        for (&first, &(last, held)) in &self.0 {
            changed.add(first.max(end), last, held);
        }
        Ok(changed)
    }

    /// Adds a range behind all others.
    fn add(&mut self, start: u64, end: u64, kind: RecordLock) {
        if start >= end {
            return;
        }
        if let Some(mut before) = self.0.last_entry()
            && *before.get() == (start, kind)
        {
            before.get_mut().0 = end;
            return;
        }
        self.0.insert(start, (end, kind));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_split_and_joined_as_the_host_does() {
        use RecordLock::{None, Read, Write};
        let mut ranges = Ranges::default();
        for (kind, start, len, count) in [
            (Write, 0, 0, 1),
            (None, 5, 5, 2),
            (Read, 5, 5, 3),
            (Write, 5, 5, 1),
            (Read, 20, 1, 3),
            (None, 30, 0, 3),
            (None, 29, 0, 3),
            (None, 21, 0, 2),
            (Read, 21, 4, 2),
            (None, 0, 0, 0),
        ] {
            ranges = ranges.with(kind, start, len).unwrap();
            assert_eq!(ranges.count(), count, "{kind:?} {start} {len}");
        }
        assert_eq!(ranges.with(Write, u64::MAX, 2).err(), Some(Errno::INVAL));
    }
}
