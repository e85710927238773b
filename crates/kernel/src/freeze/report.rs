//! Building the freeze report.

use alloc::sync::Arc;
use alloc::vec::Vec;

use thaw_abi::freeze::{
    FrozenRegion, FrozenThread, NO_ORIGIN, REGION_FROM_IMAGE, REGION_IN_PLACE, REGION_KERNEL,
    REGION_SHARED, REGION_STACK, REGION_WIPE, REPORT_MAGIC, ReportHeader,
};
use thaw_abi::image::{Mapping, SOURCE_BLOB, SOURCE_ZERO};
use thaw_abi::layout::{HEAP_BASE, HEAP_FRONT, SHM_BASE};
use thaw_abi::rootfs::NO_BLOB;

use super::hibernate;
use crate::mm::arena;
use crate::mm::backing::MmapSource;
use crate::mm::image::Mappings;
use crate::mm::provenance::Provenance;
use crate::mm::vma::{Vma, VmaFlags};
use crate::mm::{heap, lazy, shm, swap};
use crate::platform::machine::{PROT_EXEC, PROT_READ, PROT_WRITE, SystemCallSites, ThreadState};
use crate::state::kernel;
use crate::task::Space;
use crate::task::Thread;

/// Who gets the memory that is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Copies of the sandbox: memory that is to be wiped in them is.
    Copies,
    /// The sandbox itself, byte for byte.
    Itself,
}

/// Describes everything that makes up the sandbox. `spaces` and `threads` begin
/// with those of the first process.
pub fn build(spaces: &[Arc<Space>], threads: &[Arc<Thread>], saved_for: Use) -> Vec<u8> {
    let process = &threads[0].process;
    let mut strings: Vec<u8> = Vec::new();
    let mut regions: Vec<FrozenRegion> = Vec::new();
    let mut others: Vec<FrozenRegion> = Vec::new();
    let plans = Plans::now();
    for (number, space) in spaces.iter().enumerate() {
        let list = if number == 0 { &mut regions } else { &mut others };
        add_space(list, space, number as u32, &plans, &mut strings);
    }
    plans.forget();
    if saved_for == Use::Itself {
        let all = regions.iter_mut().chain(&mut others);
        all.for_each(|region| region.flags &= !REGION_WIPE);
    }
    let shared_memory = match arena::is_shared() {
        true => kernel().shared_memory.ranges(),
        false => Vec::new(),
    };
    let processes: Vec<u32> = spaces
        .iter()
        .map(|space| space.host_process().map_or(0, |host_process| host_process.host_pid()))
        .collect();
    let origins: Vec<u32> =
        spaces.iter().map(|space| space.number_in_image().unwrap_or(NO_ORIGIN)).collect();
    let frozen: Vec<FrozenThread> = threads.iter().map(|thread| frozen_thread(thread)).collect();
    let blobs = crate::host::blobs::open_blobs();
    let auxv = process.auxiliary_vector.borrow_mut().clone();

    // The pages in use and the heap's end are read last, with room for
    // themselves set aside before: building the report moves them.
    let mut runs = 0;
    kernel().pages.borrow_mut().for_each_used_run(|_, _| runs += 1);
    let room = runs + shared_memory.len() + others.len() + 16;
    let capacity = size_of::<ReportHeader>()
        + (processes.len() + origins.len()) * 4
        + (regions.len() + room) * size_of::<FrozenRegion>()
        + frozen.len() * size_of::<FrozenThread>()
        + blobs.len() * 4
        + 8
        + auxv.len() * 8
        + strings.len();
    let mut report: Vec<u8> = Vec::with_capacity(capacity);
    regions.reserve(room);
    let writable = PROT_READ | PROT_WRITE;
    let first_stack = threads.iter().find_map(|thread| thread.first_stack_in_use());
    let (heap_start, heap_len) = heap::saved_range(first_stack);
    add_heap(&mut regions, heap_start, heap_start + heap_len);
    kernel().pages.borrow_mut().for_each_used_run(|start, len| {
        regions.push(kernel_region(start, len, writable));
    });
    for (start, end) in shared_memory {
        regions.push(kernel_region(SHM_BASE + start, end - start, writable));
    }
    regions.append(&mut others);

    let header = ReportHeader {
        magic: REPORT_MAGIC,
        region_count: regions.len() as u32,
        thread_count: frozen.len() as u32,
        blob_count: blobs.len() as u32,
        auxv_len: (auxv.len() * 8) as u32,
        strings_len: strings.len() as u32,
        pid: process.pid.number(),
        space_count: spaces.len() as u32,
        reserved: 0,
    };
    report.extend_from_slice(bytemuck::bytes_of(&header));
    report.extend_from_slice(bytemuck::cast_slice(&processes));
    report.extend_from_slice(bytemuck::cast_slice(&origins));
    report.extend_from_slice(bytemuck::cast_slice(&regions));
    report.extend_from_slice(bytemuck::cast_slice(&frozen));
    report.extend_from_slice(bytemuck::cast_slice(&blobs));
    report.resize(report.len().next_multiple_of(8), 0);
    report.extend_from_slice(bytemuck::cast_slice(&auxv));
    report.extend_from_slice(&strings);
    report
}

/// Names the host process that has an address space of a report.
pub fn name_process(report: &mut [u8], number: u32, process: u32) {
    let at = size_of::<ReportHeader>() + number as usize * 4;
    report[at..at + 4].copy_from_slice(&process.to_le_bytes());
}

/// Adds the kernel's heap. A thaw reads its front into other memory instead of mapping it.
fn add_heap(regions: &mut Vec<FrozenRegion>, start: u64, end: u64) {
    const FRONT_END: u64 = HEAP_BASE + HEAP_FRONT;
    let writable = PROT_READ | PROT_WRITE;
    let front = kernel_region(start, end.min(FRONT_END) - start, writable);
    regions.push(FrozenRegion { flags: front.flags & !REGION_IN_PLACE, ..front });
    if end > FRONT_END {
        regions.push(kernel_region(FRONT_END, end - FRONT_END, writable));
    }
}

/// Adds the gate and the guest's mappings of an address space.
fn add_space(
    regions: &mut Vec<FrozenRegion>,
    space: &Space,
    number: u32,
    plans: &Plans,
    strings: &mut Vec<u8>,
) {
    let (gate, gate_len) = space.gate.mapped_range();
    let gate = kernel_region(gate, gate_len, PROT_READ | PROT_EXEC);
    // Each host process has its own, and execve(2) makes a new one.
    let is_from_file = kernel().generation.get() > 0 || hibernate::has_been_hibernated();
    let flags = REGION_KERNEL | if is_from_file { REGION_FROM_IMAGE } else { 0 };
    // A process that is about to load its program has none yet.
    if gate_len > 0 {
        regions.push(FrozenRegion { space: number, flags, ..gate });
    }
    for vma in space.areas() {
        // Their pages are in the page store while the sandbox is at rest, or in
        // the arena.
        let elsewhere = arena::is_shared() && shm::is_shared_anonymous(&vma);
        if vma.shared_upper().is_some() || elsewhere {
            continue;
        }
        let whole = guest_region(&vma, strings);
        let is_awake = hibernate::has_been_hibernated();
        let parts = if is_awake { space.provenance_awake(&vma) } else { space.provenance(&vma) };
        let parts = parts.into_iter().flat_map(|(start, end, provenance)| {
            let present = space.present(start, end).into_iter();
            present.map(move |(start, end)| (start, end, provenance))
        });
        for (start, end, provenance) in parts {
            let part = FrozenRegion { space: number, ..part_of(&whole, start, end) };
            match provenance {
                Provenance::Image if is_awake => {
                    add_awake(regions, &part, &plans.within(space, start, end));
                }
                _ => regions.push(FrozenRegion {
                    flags: part.flags | flags_of(provenance, part.flags),
                    ..part
                }),
            }
        }
    }
}

fn part_of(whole: &FrozenRegion, start: u64, end: u64) -> FrozenRegion {
    let inside = if whole.blob == NO_BLOB { 0 } else { start - whole.start };
    FrozenRegion { start, len: end - start, blob_offset: whole.blob_offset + inside, ..*whole }
}

/// What the last swap file has where, which all memory has come from since.
enum Plans {
    /// That of the only host process.
    Own,
    /// Those of all.
    All(Mappings<'static>),
    /// It is not known, or nothing is.
    Unknown,
}

impl Plans {
    fn now() -> Self {
        if !hibernate::has_been_hibernated() {
            return Self::Unknown;
        }
        match arena::is_shared() {
            true => swap::table().map_or(Self::Unknown, Self::All),
            false => Self::Own,
        }
    }

    /// The mappings of a range of an address space, in order, unless the plan is not about it.
    fn within(&self, space: &Space, start: u64, end: u64) -> Vec<Mapping> {
        let number = || space.host_process()?.number_in_swap();
        match self {
            Self::Own => lazy::planned(start, end).collect(),
            Self::All(table) => {
                number().map_or(Vec::new(), |number| table.within(number, start, end).collect())
            }
            Self::Unknown => Vec::new(),
        }
    }

    fn forget(self) {
        if let Self::All(mut table) = self {
            // What stays mapped is mapped over by the next one.
            let _ = table.forget();
        }
    }
}

/// Adds a part of an area of a sandbox that has been hibernated. All memory has come from the
/// swap file since, but what that has as a blob's or zero can be told from
/// what was written, so that the host need not read it: programs reserve gigabytes. Nothing is
/// `planned` of pages that were moved.
fn add_awake(regions: &mut Vec<FrozenRegion>, part: &FrozenRegion, planned: &[Mapping]) {
    let end = part.start + part.len;
    let mut at = part.start;
    let mut add = |to: u64, flags: u32| {
        if to > at {
            regions.push(FrozenRegion { flags: part.flags | flags, ..part_of(part, at, to) });
            at = to;
        }
    };
    // Pages that others may have written are not what the plan says.
    if part.flags & REGION_SHARED == 0 {
        for mapping in planned.iter().filter(|mapping| is_known(mapping, part)) {
            add(mapping.start.min(end), REGION_FROM_IMAGE);
            add((mapping.start + mapping.len).min(end), 0);
        }
    }
    add(end, REGION_FROM_IMAGE);
}

/// Whether the pages of a mapping that nobody has written are what the host takes them for in
/// this part of an area: the blob's that the area shows, or zero if it shows none.
fn is_known(mapping: &Mapping, part: &FrozenRegion) -> bool {
    match mapping.source {
        SOURCE_ZERO => part.blob == NO_BLOB,
        SOURCE_BLOB => {
            let shown = part.blob_offset.wrapping_add(mapping.start).wrapping_sub(part.start);
            part.blob == mapping.blob && shown == mapping.offset
        }
        _ => false,
    }
}

/// The flags of a part of an area with these flags: pages that are not present have no content
/// of their own only where the mapping was made by this sandbox.
fn flags_of(provenance: Provenance, flags: u32) -> u32 {
    match provenance {
        // Pages that were shared may have been written through another mapping.
        Provenance::Image if flags & REGION_SHARED != 0 => REGION_FROM_IMAGE,
        Provenance::Image => REGION_FROM_IMAGE | REGION_IN_PLACE,
        Provenance::Moved => REGION_FROM_IMAGE,
        Provenance::Mapped => 0,
    }
}

fn kernel_region(start: u64, len: u64, prot: u32) -> FrozenRegion {
    FrozenRegion {
        start,
        len,
        blob_offset: 0,
        blob: NO_BLOB,
        prot,
        flags: REGION_KERNEL | kernel_flags(),
        path_offset: 0,
        path_len: 0,
        space: 0,
    }
}

/// Pages of the kernel that are not present may still have content: they lie in the arena's
/// file, in a swap file, or where a thaw has mapped them.
fn kernel_flags() -> u32 {
    if arena::is_shared() || hibernate::has_been_hibernated() {
        return REGION_FROM_IMAGE;
    }
    match kernel().generation.get() {
        0 => 0,
        _ => REGION_FROM_IMAGE | REGION_IN_PLACE,
    }
}

fn guest_region(vma: &Vma, strings: &mut Vec<u8>) -> FrozenRegion {
    let mut flags = 0;
    for (flag, bit) in [
        (VmaFlags::SHARED, REGION_SHARED),
        (VmaFlags::WIPE_ON_FORK, REGION_WIPE),
        (VmaFlags::STACK, REGION_STACK),
    ] {
        if vma.flags.contains(flag) {
            flags |= bit;
        }
    }
    let mut blob = NO_BLOB;
    let (mut path_offset, mut path_len) = (0, 0);
    if let Some(file) = &vma.file {
        path_offset = strings.len() as u32;
        path_len = file.path.len() as u32;
        strings.extend_from_slice(&file.path);
        match &file.source {
            MmapSource::Blob(number) => blob = *number,
            // What the host maps cannot be told from what the guest wrote.
            MmapSource::HostFile(_) => flags |= REGION_FROM_IMAGE,
            MmapSource::Upper(_) | MmapSource::Zero => {}
        }
    }
    FrozenRegion {
        start: vma.start,
        len: vma.len(),
        blob_offset: if blob == NO_BLOB { 0 } else { vma.offset },
        blob,
        prot: vma.prot,
        flags,
        path_offset,
        path_len,
        space: 0,
    }
}

fn frozen_thread(thread: &Thread) -> FrozenThread {
    let frame = thread.frame().get();
    let fs_base = thread.context.fs_base();
    let registers = [
        frame.r15,
        frame.r14,
        frame.r13,
        frame.r12,
        frame.rbp,
        frame.rbx,
        frame.r11,
        frame.r10,
        frame.r9,
        frame.r8,
        frame.rax,
        frame.rcx,
        frame.rdx,
        frame.rsi,
        frame.rdi,
        frame.orig_rax,
        frame.rip,
        frame.cs,
        frame.rflags,
        frame.rsp,
        frame.ss,
        fs_base,
        thread.context.gs_base(),
        0,
        0,
        0,
        0,
    ];
    FrozenThread { tid: thread.tid().number(), reserved: 0, registers }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errno::Result;
    use crate::io::{Sink, Source};
    use crate::mm::MapRequest;
    use crate::mm::backing::{FileBacking, UpperPages};
    use crate::mm::shared::Placed;
    use crate::mm::space::Placement;
    use crate::task::current_process;
    use crate::testing::Sandbox;
    use thaw_abi::image::SOURCE_IMAGE;

    #[test]
    fn a_part_of_a_mapped_file_keeps_its_place_in_the_file() {
        let whole = FrozenRegion {
            start: 0x10_0000,
            len: 0x4000,
            blob_offset: 0x7000,
            blob: 3,
            ..kernel_region_of_nobody()
        };
        let part = part_of(&whole, 0x10_1000, 0x10_3000);
        assert_eq!((part.start, part.len, part.blob_offset), (0x10_1000, 0x2000, 0x8000));
        let anonymous = FrozenRegion { blob: NO_BLOB, blob_offset: 0, ..whole };
        assert_eq!(part_of(&anonymous, 0x10_1000, 0x10_3000).blob_offset, 0);
    }

    fn kernel_region_of_nobody() -> FrozenRegion {
        bytemuck::Zeroable::zeroed()
    }

    /// A file of two pages of zeros.
    struct TwoPages;

    impl UpperPages for TwoPages {
        fn len(&self) -> u64 {
            5000
        }

        fn read_at(&self, _: &mut Sink<'_>, _: u64) -> Result<usize> {
            Ok(0)
        }

        fn write_at(&self, _: &mut Source<'_>, _: u64) -> Result<usize> {
            Ok(0)
        }

        fn lend(&self, _: u64, _: u64, _: u32) -> Result<Option<Placed>> {
            Ok(None)
        }

        fn recall(&self, _: u64, _: u64) {}
    }

    #[test]
    fn pages_behind_the_end_of_a_file_are_in_no_image() {
        const HERE: u64 = 0x1111_0000;
        let _sandbox = Sandbox::new();
        let space = current_process().mm();
        let backing = FileBacking {
            source: MmapSource::Upper(Arc::new(TwoPages)),
            path: Arc::from(&b"/f"[..]),
            device: 0,
            inode: 0,
            writable: false,
            holder: None,
        };
        let request = MapRequest {
            placement: Placement::FixedNoReplace(HERE),
            len: 0x4000,
            prot: 3,
            flags: VmaFlags::empty(),
            file: Some(Arc::new(backing)),
            offset: 0,
        };
        space.map(request).unwrap();
        let saved = || {
            let mut regions = Vec::new();
            add_space(&mut regions, &space, 0, &Plans::now(), &mut Vec::new());
            regions.iter().map(|region| (region.start, region.len)).collect::<Vec<_>>()
        };
        assert_eq!(saved(), [(HERE, 0x2000)]);
        let vma = space.find(HERE).unwrap();
        assert!(space.cut_off(&**vma.upper().unwrap(), 4096));
        assert_eq!(saved(), [(HERE, 0x1000)]);
        space.unmap(HERE, 0x4000).unwrap();
    }

    #[test]
    fn of_an_awakened_sandbox_zeros_and_blobs_need_not_be_read() {
        let _sandbox = Sandbox::new();
        let mapping = |start: u64, source, blob, offset| Mapping {
            start,
            len: 0x1000,
            offset,
            source,
            blob,
            prot: 3,
            flags: 0,
        };
        let plan = [
            mapping(0x10_1000, SOURCE_ZERO, 0, 0),
            mapping(0x10_2000, SOURCE_IMAGE, 0, 0x5000),
            mapping(0x10_3000, SOURCE_BLOB, 3, 0x3000),
            mapping(0x10_4000, SOURCE_BLOB, 3, 0x9000),
        ];
        let area = FrozenRegion { start: 0x10_0000, len: 0x6000, ..kernel_region_of_nobody() };
        let found = |area: &FrozenRegion, was_not_moved| {
            let mut regions = Vec::new();
            let end = area.start + area.len;
            let is_in = |mapping: &&Mapping| {
                mapping.start < end && mapping.start + mapping.len > area.start
            };
            let planned: Vec<Mapping> =
                plan.iter().filter(is_in).filter(|_| was_not_moved).copied().collect();
            add_awake(&mut regions, area, &planned);
            let about = |region: &FrozenRegion| {
                (region.start & 0xffff, region.len, region.flags & REGION_FROM_IMAGE == 0)
            };
            regions.iter().map(about).collect::<Vec<_>>()
        };
        let none = FrozenRegion { blob: NO_BLOB, ..area };
        assert_eq!(
            found(&none, true),
            [(0, 0x1000, false), (0x1000, 0x1000, true), (0x2000, 0x4000, false)]
        );
        let of_blob = FrozenRegion { blob: 3, ..area };
        assert_eq!(
            found(&of_blob, true),
            [(0, 0x3000, false), (0x3000, 0x1000, true), (0x4000, 0x2000, false)]
        );
        assert_eq!(found(&none, false), [(0, 0x6000, false)]);
        let shared = FrozenRegion { flags: REGION_SHARED, ..none };
        assert_eq!(found(&shared, true), [(0, 0x6000, false)]);
        let inside = FrozenRegion { start: 0x10_1000, len: 0x1000, ..none };
        assert_eq!(found(&inside, true), [(0x1000, 0x1000, true)]);
    }

    #[test]
    fn only_private_memory_where_the_thaw_has_mapped_it_is_in_place() {
        let all = [Provenance::Image, Provenance::Moved, Provenance::Mapped];
        let flags = |shared| all.map(|provenance| flags_of(provenance, shared));
        let from_image = REGION_FROM_IMAGE;
        assert_eq!(flags(0), [from_image | REGION_IN_PLACE, from_image, 0]);
        assert_eq!(flags(REGION_SHARED), [from_image, from_image, 0]);
    }
}
