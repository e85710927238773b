//! The memory of an image, as a thaw maps it.
#![allow(unsafe_code)]

use core::ops::Range;

use thaw_abi::control::{FLAG_BY_PAGE, FLAG_NO_LAZY, PopulateRange, Thaw};
use thaw_abi::image::{MAPPING_EAGER, MAPPING_KERNEL, Mapping, SOURCE_ZERO};
use thaw_abi::layout::{
    HEAP_BASE, HEAP_FRONT, MAPPINGS_BASE, MAPPINGS_MAX, PAGES_BASE, PAGES_MAX, SHM_BASE, SHM_MAX,
};
use thaw_abi::page_align_up;

use super::{lazy, pages};
use crate::errno::{Errno, Result};
use crate::host::control;
use crate::platform::machine::{HostFd, Machine, Memory as _, PROT_READ, PROT_WRITE, Sharing};
use crate::platform::memory::KernelRange;

/// The mappings of an image, as bytes: in a file they need not be aligned.
pub struct Mappings<'a> {
    bytes: &'a [u8],
    /// Pages at [`MAPPINGS_BASE`] that hold them; 0 if they are in the boot command.
    len: u64,
}

impl<'a> Mappings<'a> {
    /// Those that came along with the command, if they did, and what follows them.
    pub fn carried(tail: &'a [u8], command: &Thaw) -> Result<(Option<Self>, &'a [u8])> {
        if command.mappings_at != 0 {
            return Ok((None, tail));
        }
        let (mappings, tail) = control::array::<Mapping>(tail, command.mapping_count)?;
        Ok((Some(Self { bytes: bytemuck::cast_slice(mappings), len: 0 }), tail))
    }

    /// Those that are too many to come along.
    pub fn in_image(image: HostFd, command: &Thaw) -> Result<Self> {
        Ok(Self::in_file(image, command.mappings_at, command.mapping_count, 0)?.0)
    }

    /// `count` of them that lie in a file, and `behind` bytes that follow them there, which
    /// are gone with [`Mappings::forget`], too.
    pub fn in_file(
        file: HostFd,
        at: u64,
        count: u32,
        behind: usize,
    ) -> Result<(Self, &'static [u8])> {
        let bytes = count as usize * size_of::<Mapping>();
        let inside = at & 4095;
        let len = (inside + bytes as u64).checked_add(behind as u64).and_then(page_align_up);
        let len = len.filter(|&len| len <= MAPPINGS_MAX).ok_or(Errno::EINVAL)?;
        let area = area_of_mappings(len);
        Machine::map_file(file, area, PROT_READ, Sharing::Private, at - inside)?;
        let first = (MAPPINGS_BASE + inside) as *const u8;
        // SAFETY: just mapped, in an area of its own, and there until `forget`.
        let all = unsafe { core::slice::from_raw_parts(first, bytes + behind) };
        let (bytes, behind) = all.split_at(bytes);
        Ok((Self { bytes, len }, behind))
    }

    /// One after the other, by address.
    pub fn iter(&self) -> impl Iterator<Item = Mapping> {
        self.bytes.chunks_exact(size_of::<Mapping>()).map(bytemuck::pod_read_unaligned)
    }

    /// Those of an address space that overlap a range of addresses, in order.
    pub fn within(&self, space: u32, start: u64, end: u64) -> impl Iterator<Item = Mapping> {
        let (entries, _) = self.bytes.as_chunks::<{ size_of::<Mapping>() }>();
        let read =
            |entry: &[u8; size_of::<Mapping>()]| -> Mapping { bytemuck::pod_read_unaligned(entry) };
        let is_before =
            |mapping: Mapping| (mapping.space(), mapping.start + mapping.len) <= (space, start);
        let first = entries.partition_point(|entry| is_before(read(entry)));
        let is_inside = move |mapping: &Mapping| mapping.space() == space && mapping.start < end;
        entries[first..].iter().map(read).take_while(is_inside)
    }

    /// Unmaps them in this host process, which does not need them any more.
    pub fn forget(&mut self) -> Result<()> {
        self.bytes = &[];
        match core::mem::take(&mut self.len) {
            0 => Ok(()),
            len => Machine::unmap(area_of_mappings(len)),
        }
    }
}

/// The pages that hold mappings that did not come along.
fn area_of_mappings(len: u64) -> KernelRange {
    // SAFETY: the area holds the mappings of one thaw, and they are not mapped before
    // `in_image` nor used after `forget`.
    unsafe { KernelRange::new(MAPPINGS_BASE, len) }
}

/// The memory of an image.
pub struct Memory<'a> {
    /// Where it lies in the image.
    pub mappings: Mappings<'a>,
    /// The rootfs index, if there is one.
    pub index: Option<Mapping>,
    /// The recorded working set.
    pub ranges: &'a [PopulateRange],
    /// `FLAG_*`.
    pub flags: u32,
}

impl Memory<'_> {
    /// Whether it is that of several address spaces, or lies in a shared arena.
    pub fn is_of_several(&self) -> bool {
        self.mappings.iter().any(|mapping| mapping.space() > 0 || is_shm(&mapping))
    }

    /// Maps what can be mapped without reading any of it, but for the heap's front.
    pub fn map(&self) -> Result<()> {
        if self.is_of_several() {
            // Shared anonymous memory is read when there is a file for it.
            let of_all = |mapping: &Mapping| {
                mapping.space() == 0 && mapping.flags & MAPPING_KERNEL != 0 && !is_shm(mapping)
            };
            self.mappings.iter().filter(of_all).try_for_each(|mapping| lazy::map(&mapping))?;
            return self.index.iter().try_for_each(lazy::map);
        }
        self.require_front()?;
        let eager = |mapping: &Mapping| {
            mapping.flags & (MAPPING_EAGER | MAPPING_KERNEL) != 0 || self.flags & FLAG_NO_LAZY != 0
        };
        map_page_blocks(&self.mappings)?;
        let eagerly = self.mappings.iter().filter(|mapping| eager(mapping));
        eagerly.filter_map(behind_front).try_for_each(|mapping| lazy::map(&mapping))?;
        // The index lies above all that an image holds.
        let pending = self.mappings.iter().filter(|mapping| !eager(mapping));
        let granularity = match self.flags & FLAG_BY_PAGE {
            0 => lazy::Granularity::Mapping,
            _ => lazy::Granularity::Page,
        };
        lazy::initialize(pending.chain(self.index), granularity)
    }

    /// The front of the kernel's heap, in order; several parts if the image has ancestors.
    fn front(&self) -> impl Iterator<Item = Mapping> {
        self.mappings.iter().filter_map(of_front)
    }

    fn require_front(&self) -> Result<()> {
        self.front().next().map(|_| ()).ok_or(Errno::EINVAL)
    }

    /// Reads the front of the kernel's heap into the memory that is there.
    pub fn read_front(&self) -> Result<()> {
        if self.is_of_several() {
            return Ok(());
        }
        // The memory is that of a zygote which has never used it, or has just been mapped: zero.
        let with_content = self.front().filter(|part| part.source != SOURCE_ZERO);
        // SAFETY: the zygote has mapped the front, and nobody uses the heap before it holds
        // the image's.
        with_content.into_iter().try_for_each(|part| unsafe { lazy::read(&part) })
    }

    /// Maps the front, for a template, whose copies would have to touch it first.
    pub fn map_front(&self) -> Result<()> {
        if self.is_of_several() {
            return Ok(());
        }
        self.front().try_for_each(|part| lazy::map(&part))
    }
}

const FRONT: Range<u64> = HEAP_BASE..HEAP_BASE + HEAP_FRONT;

/// The part of a mapping that lies in the front of the kernel's heap.
fn of_front(mapping: Mapping) -> Option<Mapping> {
    let is_of_it = FRONT.contains(&mapping.start);
    is_of_it.then(|| Mapping { len: mapping.len.min(FRONT.end - mapping.start), ..mapping })
}

/// The part of a mapping that does not.
fn behind_front(mapping: Mapping) -> Option<Mapping> {
    let inside = of_front(mapping).map_or(0, |part| part.len);
    let (start, len) = (mapping.start + inside, mapping.len - inside);
    (len > 0).then(|| Mapping { start, len, offset: mapping.offset + inside, ..mapping })
}

/// Whether a mapping is of the shared anonymous memory of guest processes.
pub fn is_shm(mapping: &Mapping) -> bool {
    (SHM_BASE..SHM_BASE + SHM_MAX).contains(&mapping.start)
}

/// Maps the page allocator's blocks, under the pages in use, which are all that
/// an image holds of them. Every block has one of those, its control page.
fn map_page_blocks(mappings: &Mappings<'_>) -> Result<()> {
    let area = PAGES_BASE..PAGES_BASE + PAGES_MAX;
    let used = mappings.iter().filter(|mapping| area.contains(&mapping.start));
    let Some(end) = used.map(|mapping| mapping.start + mapping.len).max() else { return Ok(()) };
    let len = (end - PAGES_BASE).next_multiple_of(pages::BLOCK);
    // SAFETY: nobody has used the area before the kernel's state is there.
    let blocks = unsafe { KernelRange::new(PAGES_BASE, len) };
    Machine::map_anonymous(blocks, PROT_READ | PROT_WRITE, Sharing::Private)
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_abi::image::SOURCE_IMAGE;

    #[test]
    fn the_mappings_of_an_address_space_are_found() {
        let at = |space: u32, page: u64, pages: u64| Mapping {
            start: page << 12,
            len: pages << 12,
            flags: space << thaw_abi::image::MAPPING_SPACE_SHIFT,
            ..bytemuck::Zeroable::zeroed()
        };
        let all = [at(0, 16, 4), at(0, 30, 2), at(1, 16, 1), at(1, 17, 3), at(1, 40, 1)];
        let mappings = Mappings { bytes: bytemuck::cast_slice(&all), len: 0 };
        let found = |space, from: u64, to: u64| {
            mappings.within(space, from << 12, to << 12).collect::<alloc::vec::Vec<_>>()
        };
        assert_eq!(found(1, 17, 40), [all[3]]);
        assert_eq!(found(1, 0, 99), all[2..]);
        assert_eq!(found(0, 19, 31), all[..2]);
        assert_eq!((found(0, 20, 30), found(2, 0, 99)), (alloc::vec![], alloc::vec![]));
    }

    #[test]
    fn the_front_of_the_heap_is_cut_out_of_what_lies_across_its_end() {
        let at = |start, len, offset| Mapping {
            start,
            len,
            offset,
            source: SOURCE_IMAGE,
            blob: 0,
            prot: 3,
            flags: MAPPING_KERNEL,
        };
        let inside = at(HEAP_BASE, 0x1000, 0x5000);
        assert_eq!((of_front(inside), behind_front(inside)), (Some(inside), None));
        let across = at(FRONT.end - 0x1000, 0x3000, 0x5000);
        assert_eq!(of_front(across), Some(at(FRONT.end - 0x1000, 0x1000, 0x5000)));
        assert_eq!(behind_front(across), Some(at(FRONT.end, 0x2000, 0x6000)));
        let behind = at(FRONT.end, 0x1000, 0x5000);
        assert_eq!((of_front(behind), behind_front(behind)), (None, Some(behind)));
    }
}
