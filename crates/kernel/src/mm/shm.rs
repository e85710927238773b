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
use crate::mm::vma::{Vma, VmaFlags};
use crate::mm::{AddressSpace, arena};
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
}

impl SharedMemory {
    /// Takes `len` bytes of offsets, whole pages; `ENOMEM`.
    pub fn take(&self, len: u64) -> Result<u64> {
        let mut state = self.state.borrow_mut();
        let fitting =
            state.free.iter().find(|&(_, &free)| free >= len).map(|(&at, &free)| (at, free));
        if let Some((at, free)) = fitting {
            state.free.remove(&at);
            if free > len {
                state.free.insert(at + len, free - len);
            }
            return Ok(at);
        }
        let start = state.end;
        let end = start.checked_add(len).filter(|&end| end <= SHM_MAX).ok_or(Errno::ENOMEM)?;
        state.end = end;
        Ok(start)
    }

    /// The end of those in use.
    pub fn end(&self) -> u64 {
        self.state.borrow_mut().end
    }

    /// Gives offsets back.
    pub fn give_back(&self, start: u64, len: u64) {
        let mut state = self.state.borrow_mut();
        let (mut start, mut len) = (start, len);
        if let Some((&before, &bytes)) = state.free.range(..start).next_back()
            && before + bytes == start
        {
            state.free.remove(&before);
            (start, len) = (before, bytes + len);
        }
        if let Some(bytes) = state.free.remove(&(start + len)) {
            len += bytes;
        }
        if start + len == state.end {
            state.end = start;
        } else {
            state.free.insert(start, len);
        }
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

/// Frees the parts of a removed area that nobody maps any more.
pub fn release(vma: &Vma) {
    let mut parts = alloc::vec![(vma.offset, vma.offset + vma.len())];
    for (start, end) in ranges() {
        parts = parts.into_iter().flat_map(|part| cut(part, (start, end))).collect();
    }
    for (start, end) in parts {
        if arena::is_shared() {
            // SAFETY: the kernel refers to no value in the shared memory of the guest.
            let pages = unsafe { KernelRange::new(SHM_BASE + start, end - start) };
            // Memory that cannot be freed now is freed with the sandbox.
            let _ = Machine::remove(pages);
        }
        kernel().shared_memory.give_back(start, end - start);
    }
}

/// Frees what nobody maps any more of the areas of a space whose last process has ended, or has left
/// it.
pub fn release_all(space: &AddressSpace) {
    space.shared_anonymous().iter().for_each(release);
}

/// What is left of a range without another.
fn cut((start, end): (u64, u64), (from, to): (u64, u64)) -> impl Iterator<Item = (u64, u64)> {
    let before = (start, end.min(from));
    let behind = (start.max(to), end);
    let parts = if to <= start || end <= from { [(start, end), (0, 0)] } else { [before, behind] };
    parts.into_iter().filter(|(start, end)| start < end)
}

/// All ranges of offsets that some process maps, sorted, neighbours merged.
pub fn ranges() -> Vec<(u64, u64)> {
    let mut found: Vec<(u64, u64)> = Vec::new();
    for space in kernel().tasks.spaces() {
        for vma in space.areas().iter().filter(|vma| is_shared_anonymous(vma)) {
            found.push((vma.offset, vma.offset + vma.len()));
        }
    }
    found.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::new();
    for (start, end) in found {
        match merged.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => merged.push((start, end)),
        }
    }
    merged
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
        memory.give_back(first, 0x1000);
        memory.give_back(first + 0x1000, 0x2000);
        assert_eq!(memory.take(0x2000), Ok(0));
        assert_eq!(memory.take(0x2000), Ok(0x4000));
        assert_eq!(memory.take(0x1000), Ok(0x2000));
        assert_eq!(memory.take(SHM_MAX), Err(Errno::ENOMEM));
    }

    #[test]
    fn ranges_are_cut() {
        let left = |part, by| cut(part, by).collect::<Vec<_>>();
        assert_eq!(left((2, 8), (4, 6)), [(2, 4), (6, 8)]);
        assert_eq!(left((2, 8), (0, 6)), [(6, 8)]);
        assert_eq!(left((2, 8), (0, 9)), []);
        assert_eq!(left((2, 8), (8, 9)), [(2, 8)]);
    }
}
