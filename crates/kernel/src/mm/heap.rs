//! The kernel's heap: every small object of the kernel.
//!
//! The heap begins at a fixed address with a [`HeapHeader`], which also leads
//! to the root of the kernel's state, so that a thaw finds everything by
//! mapping the heap. Blocks come from size classes with a free list each, and
//! beyond the largest class from runs of whole pages.
#![allow(unsafe_code)]

use core::alloc::{GlobalAlloc, Layout};
use core::ptr::null_mut;

use thaw_abi::layout::{HEAP_BASE, HEAP_MAX};
use thaw_abi::page_align_up;

use crate::platform::host;

/// First bytes of the heap of a running or frozen sandbox.
pub const HEAP_MAGIC: u64 = u64::from_le_bytes(*b"THAWHEAP");

/// Sizes of small blocks, in bytes. All are multiples of 16.
const CLASSES: [usize; 24] = [
    16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024,
    1280, 1536, 2048, 4096,
];
/// Free lists of runs of `1 << n` pages.
const RUN_ORDERS: usize = 24;
/// The heap grows by this many bytes at a time.
const GROWTH: u64 = 16 << 20;
/// Small blocks are carved from chunks of this many bytes.
const CHUNK: u64 = 16 << 10;

/// Start of the heap.
#[repr(C)]
pub struct HeapHeader {
    /// [`HEAP_MAGIC`].
    pub magic: u64,
    /// Address of the [`crate::state::Kernel`].
    pub root: u64,
    /// End of the part that has ever been handed out.
    pub used_end: u64,
    /// End of the part that is mapped.
    mapped_end: u64,
    /// Rest of the current chunk of each class.
    chunk: [u64; CLASSES.len()],
    chunk_end: [u64; CLASSES.len()],
    free: [*mut FreeBlock; CLASSES.len()],
    free_runs: [*mut FreeBlock; RUN_ORDERS],
    /// Bytes handed out and not returned.
    pub in_use: u64,
}

struct FreeBlock {
    next: *mut FreeBlock,
}

fn header() -> &'static mut HeapHeader {
    // SAFETY: mapped by `create` or by a thaw before the first allocation; used
    // under the kernel lock in short, non-overlapping accesses.
    unsafe { &mut *(HEAP_BASE as *mut HeapHeader) }
}

/// Makes an empty heap.
pub fn create() -> crate::errno::Result<()> {
    host::map_anonymous(HEAP_BASE, GROWTH, host::PROT_READ | host::PROT_WRITE)?;
    let first = HEAP_BASE + page_align_up(size_of::<HeapHeader>() as u64).unwrap_or(0);
    // SAFETY: just mapped; an all-zero header is valid.
    unsafe {
        let header = HEAP_BASE as *mut HeapHeader;
        (*header).magic = HEAP_MAGIC;
        (*header).used_end = first;
        (*header).mapped_end = HEAP_BASE + GROWTH;
    }
    Ok(())
}

/// Notes that only the heap's used part has been mapped (a thaw).
pub fn restored() {
    let header = header();
    header.mapped_end = header.used_end;
}

/// Notes that the whole area is mapped: it is shared with other processes.
pub fn mapped_whole() {
    header().mapped_end = HEAP_BASE + HEAP_MAX;
}

/// Sets the address of the root object.
pub fn set_root(root: u64) {
    header().root = root;
}

/// The address of the root object.
pub fn root() -> u64 {
    header().root
}

/// Whether there is a heap at all, as opposed to an idle zygote.
pub fn magic_is_right() -> bool {
    header().magic == HEAP_MAGIC
}

/// The part of the heap that a freeze must save: start and bytes.
pub fn used_range() -> (u64, u64) {
    (HEAP_BASE, header().used_end - HEAP_BASE)
}

/// Bytes handed out and not returned.
pub fn bytes_in_use() -> u64 {
    header().in_use
}

/// The allocator behind `alloc`.
pub struct KernelHeap;

// SAFETY: blocks do not overlap, are large enough and aligned: classes are
// multiples of 16, chunks and runs begin at page boundaries, and larger
// alignments are served by runs or by power-of-two classes.
unsafe impl GlobalAlloc for KernelHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match class_of(&layout) {
            Some(class) => {
                header().in_use += CLASSES[class] as u64;
                allocate_small(class)
            }
            None => {
                let Some(order) = order_of(&layout) else { return null_mut() };
                header().in_use += 4096 << order;
                allocate_run(order)
            }
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        let block = block.cast::<FreeBlock>();
        let header = header();
        let list = match class_of(&layout) {
            Some(class) => {
                header.in_use -= CLASSES[class] as u64;
                &mut header.free[class]
            }
            None => {
                let Some(order) = order_of(&layout) else { return };
                header.in_use -= 4096 << order;
                &mut header.free_runs[order]
            }
        };
        // SAFETY: the block is ours again and large enough for a link.
        unsafe { (*block).next = *list };
        *list = block;
    }
}

/// The smallest class that fits. Alignments beyond 16 need a size that is a
/// multiple of the alignment, which chunks at page boundaries then keep.
fn class_of(layout: &Layout) -> Option<usize> {
    CLASSES.iter().position(|&size| {
        size >= layout.size()
            && (layout.align() <= 16 || size % layout.align() == 0 && 4096 % size == 0)
    })
}

fn order_of(layout: &Layout) -> Option<usize> {
    if layout.align() > 4096 {
        return None;
    }
    let pages = layout.size().div_ceil(4096).max(1);
    let order = pages.next_power_of_two().trailing_zeros() as usize;
    (order < RUN_ORDERS).then_some(order)
}

fn allocate_small(class: usize) -> *mut u8 {
    let header = header();
    let block = header.free[class];
    if !block.is_null() {
        // SAFETY: blocks on the list are free and hold a link.
        header.free[class] = unsafe { (*block).next };
        return block.cast();
    }
    let size = CLASSES[class] as u64;
    if header.chunk[class] + size > header.chunk_end[class] {
        let bytes = if size <= 512 { 4096 } else { CHUNK };
        let chunk = take(bytes);
        if chunk == 0 {
            return null_mut();
        }
        header.chunk[class] = chunk;
        header.chunk_end[class] = chunk + bytes;
    }
    let block = header.chunk[class];
    header.chunk[class] += size;
    block as *mut u8
}

fn allocate_run(order: usize) -> *mut u8 {
    let header = header();
    let block = header.free_runs[order];
    if !block.is_null() {
        // SAFETY: as in `allocate_small`.
        header.free_runs[order] = unsafe { (*block).next };
        return block.cast();
    }
    take(4096 << order) as *mut u8
}

/// Takes `bytes`, a multiple of the page size, from the end of the heap; 0 if
/// the host has no more memory.
fn take(bytes: u64) -> u64 {
    let header = header();
    let start = header.used_end;
    let end = start + bytes;
    if end > HEAP_BASE + HEAP_MAX {
        return 0;
    }
    if end > header.mapped_end {
        let grow = (end - header.mapped_end).next_multiple_of(GROWTH);
        if host::map_anonymous(header.mapped_end, grow, host::PROT_READ | host::PROT_WRITE).is_err()
        {
            return 0;
        }
        header.mapped_end += grow;
    }
    header.used_end = end;
    start
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_respect_size_and_alignment() {
        for (size, align) in
            [(1, 1), (16, 16), (17, 8), (64, 64), (100, 64), (4096, 4096), (2000, 1024)]
        {
            let layout = Layout::from_size_align(size, align).unwrap();
            if let Some(class) = class_of(&layout) {
                assert!(CLASSES[class] >= size);
                if align > 16 {
                    assert_eq!(CLASSES[class] % align, 0);
                }
            }
        }
        assert_eq!(class_of(&Layout::from_size_align(4097, 8).unwrap()), None);
        assert_eq!(order_of(&Layout::from_size_align(4097, 8).unwrap()), Some(1));
        assert_eq!(order_of(&Layout::from_size_align(32 << 10, 16).unwrap()), Some(3));
    }
}
