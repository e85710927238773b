//! Mappings that a thaw leaves out until they are touched.
//!
//! Every `mmap` costs microseconds, and a copy touches few of its mappings. The
//! plan of a thaw is kept in the per-boot area, a plan for each host process; the fault handler maps an entry
//! when the guest, or the kernel on its behalf, first touches it, and every
//! operation on a range maps it first.
//!
//! A copy that is recorded ([`Granularity::Page`]) maps single pages instead. The host
//! kernel maps up to 16 cached pages around a fault, but none beyond the mapping, so only
//! then does the page map show exactly which pages were touched.
#![allow(unsafe_code)]

use core::cell::Cell;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};

use thaw_abi::image::{
    DEPTH_MAX, Mapping, SOURCE_BLOB, SOURCE_IMAGE, SOURCE_PREFETCH, ancestor_number,
};
use thaw_abi::layout::{INDEX_BASE, INDEX_MAX};
use thaw_abi::page_align_up;

use crate::errno::{Errno, Result};
use crate::host::blobs;
use crate::io::IoSliceMut;
use crate::platform::boot_area::{MAPPINGS, of_process};
use crate::platform::machine::{HostFd, HostFiles, Machine, Memory, PROT_READ, Processes, Sharing};
use crate::platform::memory::{GuestRange, KernelRange, Pages};

/// Most mappings in a plan.
pub const MAX_MAPPINGS: usize = 4096;
/// The mapping is in place, or no longer wanted.
const DONE: u32 = 1 << 31;

/// How much a fault maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granularity {
    /// The whole mapping.
    Mapping,
    /// The page, as long as the table has room for the pieces around it.
    Page,
}

static IMAGE: AtomicI32 = AtomicI32::new(-1);
static INDEX: AtomicI32 = AtomicI32::new(-1);
/// Bytes of the index; 0 if there is none.
static INDEX_LEN: AtomicU64 = AtomicU64::new(0);
static PREFETCH: AtomicI32 = AtomicI32::new(-1);

/// The image is a swap file.
static IS_SWAP: AtomicBool = AtomicBool::new(false);

/// Source of the mapping of the rootfs index, which is none of the image's.
const SOURCE_INDEX: u32 = u32::MAX;

/// The plan: mappings sorted by address; `flags` is [`DONE`] once mapped. A fault in the
/// middle of anything here changes it, too.
fn plan() -> &'static [Cell<Mapping>] {
    MAPPINGS.cells(of_process().planned.load(Relaxed) as usize)
}

/// Notes the mappings that are still to be made.
pub fn initialize(pending: impl Iterator<Item = Mapping>, granularity: Granularity) -> Result<()> {
    of_process().maps_by_page.store(granularity == Granularity::Page, Relaxed);
    let room = MAPPINGS.cells(MAX_MAPPINGS);
    let mut count = 0;
    for mapping in pending {
        if count == MAX_MAPPINGS {
            map(&mapping)?;
            continue;
        }
        room[count].set(mapping);
        count += 1;
    }
    of_process().planned.store(count as u64, Relaxed);
    of_process().pending.store(count as u64, Relaxed);
    Ok(())
}

/// Makes one mapping of a plan.
pub fn map(mapping: &Mapping) -> Result<()> {
    match GuestRange::new(mapping.start, mapping.len) {
        Ok(range) => map_at(range, mapping),
        // SAFETY: a mapping of the kernel's own memory is made before its state is there,
        // or when the first touch has found nothing.
        Err(_) => map_at(unsafe { KernelRange::new(mapping.start, mapping.len) }, mapping),
    }
}

fn map_at(at: impl Pages, mapping: &Mapping) -> Result<()> {
    let private = Sharing::Private;
    match mapping.source {
        SOURCE_IMAGE | SOURCE_PREFETCH | SOURCE_BLOB => {
            Machine::map_file(file_of(mapping)?, at, mapping.prot, private, mapping.offset)
        }
        SOURCE_INDEX => {
            let index = HostFd::new(INDEX.load(Relaxed));
            Machine::map_file(index, at, mapping.prot, Sharing::Shared, mapping.offset)
        }
        _ => Machine::map_anonymous(at, mapping.prot, Sharing::Private),
    }
}

/// The prefetch file, the image, a blob or one of the image's ancestors.
fn file_of(mapping: &Mapping) -> Result<HostFd> {
    match mapping.source {
        SOURCE_BLOB => blobs::descriptor(mapping.blob),
        SOURCE_PREFETCH => Ok(HostFd::new(PREFETCH.load(Relaxed))),
        _ => Ok(HostFd::new(IMAGE.load(Relaxed))),
    }
}

/// Reads the part of a file that a mapping names, which fills the memory.
pub fn read_into(memory: &mut [u8], mapping: &Mapping) -> Result<()> {
    read_file(file_of(mapping)?, memory.into(), mapping.offset)
}

/// Reads the part of a file that a mapping names into the memory that is there.
///
/// # Safety
/// The memory is mapped, and nobody refers to it.
pub unsafe fn read(mapping: &Mapping) -> Result<()> {
    // SAFETY: the caller's promise; an image makes sense to those who made it.
    let memory = unsafe { IoSliceMut::of_kernel(mapping.start, mapping.len as usize) };
    read_file(file_of(mapping)?, memory, mapping.offset)
}

fn read_file(file: HostFd, mut memory: IoSliceMut<'_>, mut offset: u64) -> Result<()> {
    while !memory.is_empty() {
        match Machine::pread(file, memory.first(usize::MAX), offset)? {
            0 => return Err(Errno::EIO),
            read => {
                memory.advance(read);
                offset += read as u64;
            }
        }
    }
    Ok(())
}

/// Sets the descriptors of the image and of the prefetch file, if there is one, before
/// anything is mapped from them.
pub fn set_files(image: HostFd, prefetch: Option<HostFd>) {
    IMAGE.store(image.0, Relaxed);
    PREFETCH.store(prefetch.map_or(-1, |file| file.0), Relaxed);
}

/// Whether the memory of a file can be mapped that refers to the image which the sandbox was
/// thawed from as an ancestor of this depth.
pub fn has_image_of(depth: u32) -> bool {
    let is_there = !IS_SWAP.load(Relaxed) && IMAGE.load(Relaxed) >= 0;
    depth < DEPTH_MAX && (is_there || blobs::descriptor(ancestor_number(depth)).is_ok())
}

/// Takes a swap file in place of the image, from which everything is mapped from now on. What
/// there was before is closed, but for the image itself if it is an ancestor of the file.
pub fn replace_files(swap: HostFd, image_depth: Option<u32>) {
    let old = [IMAGE.swap(swap.0, Relaxed), PREFETCH.swap(-1, Relaxed)];
    let is_image = !IS_SWAP.swap(true, Relaxed) && old[0] >= 0;
    let kept = image_depth.filter(|_| is_image).map(ancestor_number);
    // A depth that an image has is one that can be remembered.
    let is_kept = kept.is_some_and(|number| blobs::remember(number, HostFd::new(old[0])).is_ok());
    for file in old.into_iter().skip(is_kept.into()).filter(|&file| file >= 0) {
        Machine::close(HostFd::new(file));
    }
}

/// Forgets the plan of this host process, none of whose memory is mapped, and gives back the
/// memory of the table.
pub fn forget_plan() {
    of_process().planned.store(0, Relaxed);
    of_process().pending.store(0, Relaxed);
    let (start, len) = MAPPINGS.range(MAPPINGS.capacity());
    // SAFETY: the table is empty, and its values may change at any time.
    let _ = Machine::discard(unsafe { KernelRange::new(start, len) });
}

/// The image, or the swap file that has taken its place.
pub fn file() -> HostFd {
    HostFd::new(IMAGE.load(Relaxed))
}

/// Sets the index' descriptor; its mapping, of `len` bytes.
pub fn index(index: HostFd, len: u64) -> Result<Mapping> {
    INDEX.store(index.0, Relaxed);
    let len = page_align_up(len).filter(|&len| len > 0 && len <= INDEX_MAX).ok_or(Errno::EINVAL)?;
    INDEX_LEN.store(len, Relaxed);
    Ok(mapping_of_index(len))
}

/// The mapping of the index that this sandbox has, if it has one.
pub fn known_index() -> Option<Mapping> {
    let len = INDEX_LEN.load(Relaxed);
    (len > 0).then(|| mapping_of_index(len))
}

fn mapping_of_index(len: u64) -> Mapping {
    Mapping {
        start: INDEX_BASE,
        len,
        offset: 0,
        source: SOURCE_INDEX,
        blob: 0,
        prot: PROT_READ,
        flags: 0,
    }
}

/// The rootfs index, of which [`index`] has made the mapping.
///
/// # Errors
/// `EINVAL` if an index of `len` bytes cannot be mapped.
pub fn index_bytes(len: u64) -> Result<&'static [u8]> {
    if len == 0 || len > INDEX_MAX {
        return Err(Errno::EINVAL);
    }
    // SAFETY: the area holds nothing but the index, which is mapped before it is read or
    // when it is first touched, read-only and for as long as there is a sandbox; a thaw maps
    // the same one again, or one that whoever keeps such bytes takes anew (`Lower::rebase`). Bytes behind its end fault.
    Ok(unsafe { core::slice::from_raw_parts(INDEX_BASE as *const u8, len as usize) })
}

/// Maps what a fault at `address` waits for; `false` if nothing does.
pub fn map_page(address: u64) -> bool {
    let page = address & !4095;
    if of_process().maps_by_page.load(Relaxed) {
        cut_out(page);
    }
    map_range(page, page.saturating_add(4096))
}

/// Whether faults map single pages, and anything is left for them to map.
pub fn maps_pages() -> bool {
    of_process().maps_by_page.load(Relaxed) && of_process().pending.load(Relaxed) > 0
}

/// Makes an entry of its own of a page that is still to be mapped, if there is room.
fn cut_out(page: u64) {
    let plan = plan();
    let count = plan.len();
    let at = plan.partition_point(|entry| end_of(&entry.get()) <= page);
    let Some(whole) = plan.get(at).map(Cell::get) else { return };
    if whole.start > page || whole.flags & DONE != 0 || count + 2 > MAPPINGS.capacity() {
        return;
    }
    let (pieces, of_it) = cut(&whole, page);
    let room = MAPPINGS.cells(count + of_it - 1);
    for index in (at + 1..count).rev() {
        room[index + of_it - 1].set(room[index].get());
    }
    for (entry, piece) in room[at..].iter().zip(&pieces[..of_it]) {
        entry.set(*piece);
    }
    of_process().planned.store((count + of_it - 1) as u64, Relaxed);
    of_process().pending.fetch_add(of_it as u64 - 1, Relaxed);
}

/// The parts of a mapping before a page of it, the page, and after it; how many there are.
fn cut(whole: &Mapping, page: u64) -> ([Mapping; 3], usize) {
    let end = whole.start + whole.len;
    let mut pieces = [*whole; 3];
    let mut count = 0;
    for (start, end) in [(whole.start, page), (page, page + 4096), (page + 4096, end)] {
        if start < end {
            let offset = whole.offset + (start - whole.start);
            pieces[count] = Mapping { start, len: end - start, offset, ..*whole };
            count += 1;
        }
    }
    (pieces, count)
}

/// Maps everything pending that overlaps a range; `false` if nothing did.
pub fn map_range(start: u64, end: u64) -> bool {
    if of_process().pending.load(Relaxed) == 0 {
        return false;
    }
    let plan = plan();
    let first = plan.partition_point(|entry| end_of(&entry.get()) <= start);
    let mut any = false;
    for entry in plan[first..].iter().take_while(|entry| entry.get().start < end) {
        let mapping = entry.get();
        if mapping.flags & DONE != 0 {
            continue;
        }
        note_done(entry);
        if let Err(error) = map(&mapping) {
            crate::console!(
                "thaw kernel: the image's memory at {:#x} cannot be mapped: {error:?}",
                mapping.start
            );
            Machine::exit(crate::platform::panic::PANIC_EXIT_CODE)
        }
        any = true;
    }
    any
}

/// Makes a range ready to be replaced or removed: entries inside it need no
/// mapping any more, entries that reach beyond it are mapped.
pub fn forget(start: u64, end: u64) {
    if of_process().pending.load(Relaxed) == 0 {
        return;
    }
    for entry in plan() {
        let mapping = entry.get();
        if mapping.flags & DONE == 0 && mapping.start >= start && end_of(&mapping) <= end {
            note_done(entry);
        }
    }
    map_range(start, end);
}

fn note_done(entry: &Cell<Mapping>) {
    let mapping = entry.get();
    entry.set(Mapping { flags: mapping.flags | DONE, ..mapping });
    of_process().pending.fetch_sub(1, Relaxed);
}

fn end_of(mapping: &Mapping) -> u64 {
    mapping.start + mapping.len
}

/// The mappings of the plan that overlap a range, made or not, in order.
pub fn planned(start: u64, end: u64) -> impl Iterator<Item = Mapping> {
    let plan = plan();
    let first = plan.partition_point(|entry| end_of(&entry.get()) <= start);
    plan[first..].iter().map(Cell::get).take_while(move |mapping| mapping.start < end)
}

/// Maps everything that is left.
pub fn map_all() {
    map_range(0, u64::MAX);
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_abi::image::SOURCE_ZERO;

    fn cut_at(page: u64) -> alloc::vec::Vec<(u64, u64, u64)> {
        let whole = Mapping {
            start: 0x10_000,
            len: 0x4000,
            offset: 0x7000,
            source: SOURCE_IMAGE,
            blob: 0,
            prot: 5,
            flags: 2,
        };
        let (pieces, count) = cut(&whole, page);
        let same =
            |piece: &Mapping| (piece.source, piece.prot, piece.flags) == (SOURCE_IMAGE, 5, 2);
        assert!(pieces[..count].iter().all(same));
        pieces[..count].iter().map(|piece| (piece.start, piece.len, piece.offset)).collect()
    }

    #[test]
    fn a_page_is_cut_out_of_its_mapping() {
        let (first, rest) = ((0x10_000, 0x1000, 0x7000), (0x11_000, 0x3000, 0x8000));
        assert_eq!(cut_at(0x10_000), [first, rest]);
        let (before, page, after) =
            ((0x10_000, 0x2000, 0x7000), (0x12_000, 0x1000, 0x9000), (0x13_000, 0x1000, 0xa000));
        assert_eq!(cut_at(0x12_000), [before, page, after]);
        assert_eq!(cut_at(0x13_000), [(0x10_000, 0x3000, 0x7000), (0x13_000, 0x1000, 0xa000)]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "maps memory")]
    fn a_recorded_copy_maps_page_by_page_what_is_touched() {
        use crate::testing::{Sandbox, is_mapped};
        let _sandbox = Sandbox::new();
        let (start, len) = (0x10_0000_0000, 0x4000);
        let whole =
            Mapping { start, len, offset: 0, source: SOURCE_ZERO, blob: 0, prot: 3, flags: 0 };
        initialize([whole].into_iter(), Granularity::Page).unwrap();
        let mapped = || [0, 0x1000, 0x2000, 0x3000].map(|offset| is_mapped(start + offset));
        assert!(map_page(start + 0x2fff));
        assert_eq!(mapped(), [false, false, true, false]);
        assert!(!map_page(start + 0x2000), "it is there already");
        // The rest of the first piece is mapped, since it reaches beyond what is forgotten.
        forget(start, start + 0x1000);
        assert_eq!(mapped(), [true, true, true, false]);
        // What goes altogether is not.
        forget(start + 0x3000, start + 0x4000);
        map_all();
        assert_eq!(mapped(), [true, true, true, false]);
        Machine::unmap(GuestRange::new(start, len).unwrap()).unwrap();
        initialize(core::iter::empty(), Granularity::Mapping).unwrap();
    }

    #[test]
    fn a_mapping_of_one_page_stays_whole() {
        let (start, len) = (0x1000, 0x1000);
        let page =
            Mapping { start, len, offset: 0, source: SOURCE_BLOB, blob: 3, prot: 1, flags: 0 };
        assert_eq!(cut(&page, 0x1000), ([page; 3], 1));
    }
}
