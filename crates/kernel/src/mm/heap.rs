//! The kernel's heap: every small object of the kernel.
//!
//! It begins at a fixed address with its *front*, which a thaw reads into memory
//! that the zygote has touched before, since nearly every copy writes there:
//!
//! ```text
//! HEAP_BASE   nursery       what a copy allocates first
//!             first stack   kernel stack of the first thread; its top is in use
//!             header        [`HeapHeader`], which leads to all of the kernel's state
//!             early         small objects that the kernel allocated first
//! HEAP_FRONT  everything else, which a thaw maps
//! ```
//!
//! Blocks come from size classes with a free list each, and beyond the largest
//! class from runs of whole pages.
#![allow(unsafe_code)]

use core::alloc::{GlobalAlloc, Layout};
use core::ptr::null_mut;

use thaw_abi::layout::{HEAP_BASE, HEAP_FRONT, HEAP_MAX};

use crate::errno::Result;
use crate::platform::host;
use crate::platform::thread::{KERNEL_STACK_SIZE, KernelStack};

/// First bytes of the header of a running or frozen sandbox.
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

/// End of the nursery.
const NURSERY_END: u64 = HEAP_BASE + (16 << 10);
/// Bytes of the first thread's kernel stack.
pub const FIRST_STACK_SIZE: u64 = 64 << 10;
/// Bytes of it that are touched ahead.
const FIRST_STACK_USED: u64 = 8 << 10;
const FIRST_STACK_END: u64 = NURSERY_END + FIRST_STACK_SIZE;
const HEADER: u64 = FIRST_STACK_END;
const FRONT_END: u64 = HEAP_BASE + HEAP_FRONT;

/// What leads to the rest of the heap.
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
    /// Start of what is free of the front's part that is in use: the early part
    /// in the original, the nursery in a copy.
    front_next: u64,
    /// End of that part.
    front_end: u64,
    /// The nursery has been in use.
    nursery_used: bool,
    /// The first thread's stack is in use.
    first_stack_used: bool,
    /// Rest of the current chunk of each class.
    chunk: [u64; CLASSES.len()],
    chunk_end: [u64; CLASSES.len()],
    free: [*mut FreeBlock; CLASSES.len()],
    /// Blocks that were free in the original: taken last, since they lie in pages
    /// that copies share.
    frozen_free: [*mut FreeBlock; CLASSES.len()],
    free_runs: [*mut FreeBlock; RUN_ORDERS],
    /// Bytes handed out and not returned.
    pub in_use: u64,
}

struct FreeBlock {
    next: *mut FreeBlock,
}

fn header() -> &'static mut HeapHeader {
    // SAFETY: mapped by the zygote, filled in by `create` or by a thaw before the
    // first allocation; used under the kernel lock in short, non-overlapping
    // accesses.
    unsafe { &mut *(HEADER as *mut HeapHeader) }
}

/// Maps the front, for a zygote.
pub fn map_front() -> Result<()> {
    map(HEAP_BASE, HEAP_FRONT)
}

/// Gives the front its memory, so that no boot waits for it.
pub fn touch_front() {
    for (start, end) in [(HEAP_BASE, NURSERY_END), (FIRST_STACK_END - FIRST_STACK_USED, FRONT_END)]
    {
        // Whatever cannot be populated is faulted in when it is touched.
        let _ = host::populate(start, end - start, Populate::Write);
    }
}

/// Makes an empty heap behind the front.
pub fn create() -> Result<()> {
    map(FRONT_END, GROWTH - HEAP_FRONT)?;
    let header = header();
    header.magic = HEAP_MAGIC;
    header.used_end = FRONT_END;
    header.mapped_end = HEAP_BASE + GROWTH;
    header.front_next = (HEADER + size_of::<HeapHeader>() as u64).next_multiple_of(64);
    header.front_end = FRONT_END;
    Ok(())
}

/// Makes the heap that of a copy: only its used part has been mapped (a thaw), and
/// what is allocated from now on comes from the nursery first.
pub fn restored() {
    let header = header();
    header.mapped_end = header.used_end;
    if !header.nursery_used {
        header.nursery_used = true;
        header.front_next = HEAP_BASE;
        header.front_end = NURSERY_END;
        // Of chunks that are in use, the rest is given up.
        header.chunk = [0; CLASSES.len()];
        header.chunk_end = [0; CLASSES.len()];
        header.frozen_free = core::mem::replace(&mut header.free, [null_mut(); CLASSES.len()]);
    }
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

/// The part of the heap that may hold data: start and bytes.
pub fn used_range() -> (u64, u64) {
    (HEAP_BASE, header().used_end - HEAP_BASE)
}

/// The part of the heap that a freeze must save, start and bytes, if the first
/// stack is in use from `first_stack` on.
pub fn saved_range(first_stack: Option<u64>) -> (u64, u64) {
    let start = match first_stack {
        _ if header().nursery_used => HEAP_BASE,
        Some(address) => address.clamp(NURSERY_END, HEADER) & !4095,
        None => HEADER,
    };
    (start, header().used_end - start)
}

/// Memory for the kernel stack of a thread: that which lies in the front for the first.
pub fn kernel_stack() -> KernelStack {
    let is_first = !core::mem::replace(&mut header().first_stack_used, true);
    let bottom = match is_first {
        true => NURSERY_END as *mut u8,
        // SAFETY: the size is not zero.
        false => unsafe { alloc::alloc::alloc(STACK_LAYOUT) },
    };
    assert!(!bottom.is_null(), "out of kernel memory");
    // SAFETY: just taken, and `release_stack` gives it back.
    unsafe { KernelStack::in_memory(bottom, release_stack) }
}

const STACK_LAYOUT: Layout = match Layout::from_size_align(KERNEL_STACK_SIZE, 4096) {
    Ok(layout) => layout,
    Err(_) => panic!("not the layout of a stack"),
};

/// # Safety
/// `bottom` must come from [`kernel_stack`], and nobody may use the stack any more.
unsafe fn release_stack(bottom: *mut u8) {
    if is_first_stack(bottom) {
        header().first_stack_used = false;
    } else {
        // SAFETY: the caller's promise.
        unsafe { alloc::alloc::dealloc(bottom, STACK_LAYOUT) };
    }
}

/// Whether a stack is the one that lies in the front.
pub fn is_first_stack(stack: *mut u8) -> bool {
    stack as u64 == NURSERY_END
}

/// Bytes handed out and not returned.
pub fn bytes_in_use() -> u64 {
    header().in_use
}

/// The allocator behind `alloc`.
pub struct KernelHeap;

// SAFETY: blocks do not overlap, are large enough and aligned: classes are
// multiples of 16, chunks begin at multiples of the next power of two or of a
// page, runs at page boundaries, and larger alignments are served by runs or by
// power-of-two classes.
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
    if let Some(block) = pop(&mut header.free[class]) {
        return block;
    }
    let size = CLASSES[class] as u64;
    if header.chunk[class] + size > header.chunk_end[class] {
        let (chunk, bytes) = match carve_front(size) {
            Some(carved) => carved,
            None => {
                if let Some(block) = pop(&mut header.frozen_free[class]) {
                    return block;
                }
                let bytes = if size <= 512 { 4096 } else { CHUNK };
                (take(bytes), bytes)
            }
        };
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

fn pop(list: &mut *mut FreeBlock) -> Option<*mut u8> {
    let block = *list;
    if block.is_null() {
        return None;
    }
    // SAFETY: blocks on a list are free and hold a link.
    *list = unsafe { (*block).next };
    Some(block.cast())
}

/// Takes a small chunk from the front, so that objects of all classes lie close
/// together: its start and bytes.
fn carve_front(size: u64) -> Option<(u64, u64)> {
    let header = header();
    let bytes = if size <= 128 { 512 / size * size } else { size };
    let start = header.front_next.next_multiple_of(size.next_power_of_two());
    if start + bytes > header.front_end {
        return None;
    }
    header.front_next = start + bytes;
    Some((start, bytes))
}

fn allocate_run(order: usize) -> *mut u8 {
    pop(&mut header().free_runs[order]).unwrap_or_else(|| take(4096 << order) as *mut u8)
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
