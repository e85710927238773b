//! Building the freeze report.

use alloc::sync::Arc;
use alloc::vec::Vec;

use thaw_abi::freeze::{
    FrozenRegion, FrozenThread, REGION_FROM_IMAGE, REGION_KERNEL, REGION_SHARED, REGION_STACK,
    REGION_WIPE, REPORT_MAGIC, ReportHeader,
};
use thaw_abi::layout::SHM_BASE;
use thaw_abi::rootfs::NO_BLOB;

use super::hibernate;
use crate::mm::arena;
use crate::mm::backing::MmapSource;
use crate::mm::vma::{Vma, VmaFlags};
use crate::mm::{AddressSpace, heap, shm};
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
    for (number, space) in spaces.iter().enumerate() {
        let list = if number == 0 { &mut regions } else { &mut others };
        add_space(list, space, number as u32, &mut strings);
    }
    if saved_for == Use::Itself {
        let all = regions.iter_mut().chain(&mut others);
        all.for_each(|region| region.flags &= !REGION_WIPE);
    }
    let shared_memory = if arena::is_shared() { shm::ranges() } else { Vec::new() };
    let processes: Vec<u32> = spaces
        .iter()
        .map(|space| space.host_process().map_or(0, |host_process| host_process.host_pid()))
        .collect();
    let frozen: Vec<FrozenThread> = threads.iter().map(|thread| frozen_thread(thread)).collect();
    let blobs = crate::host::blobs::open_blobs();
    let auxv = process.auxiliary_vector.borrow_mut().clone();

    // The pages in use and the heap's end are read last, with room for
    // themselves set aside before: building the report moves them.
    let mut runs = 0;
    kernel().pages.borrow_mut().for_each_used_run(|_, _| runs += 1);
    let room = runs + shared_memory.len() + others.len() + 16;
    let capacity = size_of::<ReportHeader>()
        + 8
        + processes.len() * 4
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
    regions.push(kernel_region(heap_start, heap_len, writable));
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
        pid: process.pid,
        space_count: spaces.len() as u32,
        reserved: 0,
    };
    report.extend_from_slice(bytemuck::bytes_of(&header));
    report.extend_from_slice(bytemuck::cast_slice(&processes));
    report.resize(report.len().next_multiple_of(8), 0);
    report.extend_from_slice(bytemuck::cast_slice(&regions));
    report.extend_from_slice(bytemuck::cast_slice(&frozen));
    report.extend_from_slice(bytemuck::cast_slice(&blobs));
    report.resize(report.len().next_multiple_of(8), 0);
    report.extend_from_slice(bytemuck::cast_slice(&auxv));
    report.extend_from_slice(&strings);
    report
}

/// Adds the gate and the guest's mappings of an address space.
fn add_space(
    regions: &mut Vec<FrozenRegion>,
    space: &AddressSpace,
    number: u32,
    strings: &mut Vec<u8>,
) {
    let (gate, gate_len) = space.gate.mapped_range();
    let gate = kernel_region(gate, gate_len, PROT_READ | PROT_EXEC);
    // Each host process has its own.
    let flags = REGION_KERNEL | from_file();
    regions.push(FrozenRegion { space: number, flags, ..gate });
    for vma in space.areas() {
        // Their pages are in the page store while the sandbox is at rest, or in
        // the arena.
        let elsewhere = arena::is_shared() && shm::is_shared_anonymous(&vma);
        if vma.shared_upper().is_none() && !elsewhere {
            regions.push(FrozenRegion { space: number, ..guest_region(&vma, strings) });
        }
    }
}

/// Pages that are not present may still have content: they come from an image,
/// or lie in the arena's file.
fn from_image() -> u32 {
    if arena::is_shared() { REGION_FROM_IMAGE } else { from_file() }
}

/// As [`from_image`], for memory that is no part of the arena.
fn from_file() -> u32 {
    let is_from_file = kernel().generation.get() > 0 || hibernate::has_been_hibernated();
    if is_from_file { REGION_FROM_IMAGE } else { 0 }
}

fn kernel_region(start: u64, len: u64, prot: u32) -> FrozenRegion {
    FrozenRegion {
        start,
        len,
        blob_offset: 0,
        blob: NO_BLOB,
        prot,
        flags: REGION_KERNEL | from_image(),
        path_offset: 0,
        path_len: 0,
        space: 0,
    }
}

fn guest_region(vma: &Vma, strings: &mut Vec<u8>) -> FrozenRegion {
    let mut flags = from_file();
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
    FrozenThread { tid: thread.tid(), reserved: 0, registers }
}
