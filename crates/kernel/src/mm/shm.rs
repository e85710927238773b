//! Shared anonymous memory: `MAP_SHARED | MAP_ANONYMOUS`.
//!
//! Every piece has a range of offsets of its own, which names it wherever it is
//! mapped ([`super::vma::Vma::offset`]). As long as the sandbox has one host
//! process, the host's own shared memory does. Once several share the arena,
//! offset N lies in the arena's file, and every host process sees it at
//! `SHM_BASE + N`, whether the guest maps it there or not: so it can be saved.
#![allow(unsafe_code)]

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use thaw_abi::layout::{ARENA_SHM, SHM_BASE, SHM_MAX};

use crate::errno::{Errno, Result};
use crate::mm::arena;
use crate::mm::vma::{Vma, VmaFlags};
use crate::platform::machine::{Machine, Memory, Sharing};
use crate::platform::memory::KernelRange;
use crate::state::kernel;
use crate::sync::KernelCell;

/// Which offsets are in use.
#[derive(Default)]
pub struct SharedMemory {
    state: KernelCell<State>,
}

#[derive(Default)]
struct State {
    end: u64,
    /// Ranges before the end that are free: start and bytes.
    free: BTreeMap<u64, u64>,
    /// Ranges in use, by their start.
    used: BTreeMap<u64, Used>,
}

/// A range of offsets that is in use.
#[derive(Clone, Copy)]
struct Used {
    end: u64,
    /// Number of areas that show it, in all address spaces.
    areas: u32,
}

impl State {
    /// Makes `at` a boundary of ranges in use.
    fn split(&mut self, at: u64) {
        let Some((&start, &whole)) = self.used.range(..at).next_back() else { return };
        if at < whole.end {
            self.used.insert(start, Used { end: at, ..whole });
            self.used.insert(at, whole);
        }
    }

    /// Makes one of the range that ends at `at` and the one that begins there, if as many areas show both.
    fn merge(&mut self, at: u64) {
        let Some((&start, &before)) = self.used.range(..at).next_back() else { return };
        let Some(&behind) = self.used.get(&at) else { return };
        if before.end == at && before.areas == behind.areas {
            self.used.remove(&at);
            self.used.insert(start, Used { end: behind.end, ..before });
        }
    }

    /// Merges what can be in a range and at its ends.
    fn merge_within(&mut self, start: u64, end: u64) {
        let inside: Vec<u64> = self.used.range(start..=end).map(|(&at, _)| at).collect();
        inside.into_iter().for_each(|at| self.merge(at));
    }

    /// Takes the first free offsets that are enough.
    fn allocate(&mut self, len: u64) -> Result<u64> {
        let fitting =
            self.free.iter().find(|&(_, &free)| free >= len).map(|(&at, &free)| (at, free));
        if let Some((at, free)) = fitting {
            self.free.remove(&at);
            if free > len {
                self.free.insert(at + len, free - len);
            }
            return Ok(at);
        }
        let start = self.end;
        self.end = start.checked_add(len).filter(|&end| end <= SHM_MAX).ok_or(Errno::ENOMEM)?;
        Ok(start)
    }

    /// Gives offsets back.
    fn give_back(&mut self, start: u64, len: u64) {
        let (mut start, mut len) = (start, len);
        if let Some((&before, &bytes)) = self.free.range(..start).next_back()
            && before + bytes == start
        {
            self.free.remove(&before);
            (start, len) = (before, bytes + len);
        }
        if let Some(bytes) = self.free.remove(&(start + len)) {
            len += bytes;
        }
        if start + len == self.end {
            self.end = start;
        } else {
            self.free.insert(start, len);
        }
    }
}

impl SharedMemory {
    /// Takes `len` bytes of offsets, whole pages, for one area; `ENOMEM`.
    pub fn take(&self, len: u64) -> Result<u64> {
        let mut state = self.state.borrow_mut();
        let start = state.allocate(len)?;
        state.used.insert(start, Used { end: start + len, areas: 1 });
        Ok(start)
    }

    /// Notes one more area that shows a range in use.
    fn share(&self, start: u64, end: u64) {
        let mut state = self.state.borrow_mut();
        state.split(start);
        state.split(end);
        state.used.range_mut(start..end).for_each(|(_, used)| used.areas += 1);
        state.merge_within(start, end);
    }

    /// Notes that an area shows a range no more, and gives back the parts that no other one shows: start
    /// and end.
    fn release(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut state = self.state.borrow_mut();
        state.split(start);
        state.split(end);
        state.used.range_mut(start..end).for_each(|(_, used)| used.areas -= 1);
        state.merge_within(start, end);
        let unused = state.used.range(start..end).filter(|(_, used)| used.areas == 0);
        let unused: Vec<(u64, u64)> = unused.map(|(&start, used)| (start, used.end)).collect();
        for &(start, end) in &unused {
            state.used.remove(&start);
            state.give_back(start, end - start);
        }
        unused
    }

    /// All ranges in use, sorted, neighbours merged.
    pub fn ranges(&self) -> Vec<(u64, u64)> {
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for (&start, used) in &self.state.borrow_mut().used {
            match merged.last_mut() {
                Some(last) if start == last.1 => last.1 = used.end,
                _ => merged.push((start, used.end)),
            }
        }
        merged
    }

    /// The end of those in use.
    pub fn end(&self) -> u64 {
        self.state.borrow_mut().end
    }
}

/// Whether an area is shared anonymous memory.
pub fn is_shared_anonymous(vma: &Vma) -> bool {
    vma.file.is_none() && vma.flags.contains(VmaFlags::SHARED)
}

/// Maps an area of shared anonymous memory.
pub fn map(vma: &Vma) -> Result<()> {
    match arena::file() {
        Some(file) => {
            let offset = ARENA_SHM + vma.offset;
            Machine::map_file(file, vma.range()?, vma.prot, Sharing::Shared, offset)
        }
        None => Machine::map_anonymous(vma.range()?, vma.prot, Sharing::Shared),
    }
}

/// Notes that a copy of an area shows the same memory.
pub fn share(vma: &Vma) {
    kernel().shared_memory.share(vma.offset, vma.offset + vma.len());
}

/// Frees the parts of a removed area that nobody maps any more.
pub fn release(vma: &Vma) {
    for (start, end) in kernel().shared_memory.release(vma.offset, vma.offset + vma.len()) {
        if arena::is_shared() {
            // SAFETY: the kernel refers to no value in the shared memory of the guest.
            let pages = unsafe { KernelRange::new(SHM_BASE + start, end - start) };
            // Memory that cannot be freed now is freed with the sandbox.
            let _ = Machine::remove(pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_used_again() {
        let memory = SharedMemory::default();
        let first = memory.take(0x3000).unwrap();
        let second = memory.take(0x1000).unwrap();
        assert_eq!((first, second), (0, 0x3000));
        assert_eq!(memory.release(0, 0x1000), [(0, 0x1000)]);
        assert_eq!(memory.release(0x1000, 0x3000), [(0x1000, 0x3000)]);
        assert_eq!(memory.take(0x2000), Ok(0));
        assert_eq!(memory.take(0x2000), Ok(0x4000));
        assert_eq!(memory.take(0x1000), Ok(0x2000));
        assert_eq!(memory.take(SHM_MAX), Err(Errno::ENOMEM));
    }

    #[test]
    fn memory_is_free_when_the_last_area_that_shows_it_has_gone() {
        let memory = SharedMemory::default();
        memory.take(0x4000).unwrap();
        memory.share(0, 0x4000);
        memory.share(0x1000, 0x2000);
        assert_eq!(memory.release(0x1000, 0x4000), []);
        assert_eq!(memory.release(0, 0x4000), [(0x2000, 0x4000)]);
        assert_eq!(memory.release(0, 0x1000), [(0, 0x1000)]);
        assert_eq!(memory.ranges(), [(0x1000, 0x2000)]);
        assert_eq!(memory.take(0x1000), Ok(0));
        assert_eq!(memory.ranges(), [(0, 0x2000)]);
        assert_eq!(memory.release(0x1000, 0x2000), [(0x1000, 0x2000)]);
        assert_eq!(memory.end(), 0x1000);
    }
}
