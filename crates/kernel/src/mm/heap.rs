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
use core::cell::Cell;
use core::ptr::null_mut;

use thaw_abi::layout::{HEAP_BASE, HEAP_FRONT, HEAP_MAX};

use crate::errno::Result;
use crate::platform::machine::{Machine, Memory, PROT_READ, PROT_WRITE, Populate, Sharing};
use crate::platform::memory::KernelRange;
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

/// What leads to the rest of the heap. Whoever has a reference changes it, under the
/// kernel lock: its fields are cells.
#[repr(C)]
struct HeapHeader {
    /// [`HEAP_MAGIC`].
    magic: Cell<u64>,
    /// Address of the [`crate::state::Kernel`].
    root: Cell<u64>,
    /// End of the part that has ever been handed out.
    used_end: Cell<u64>,
    /// End of the part that is mapped.
    mapped_end: Cell<u64>,
    /// Start of what is free of the front's part that is in use: the early part
    /// in the original, the nursery in a copy.
    front_next: Cell<u64>,
    /// End of that part.
    front_end: Cell<u64>,
    /// The nursery has been in use.
    nursery_used: Cell<bool>,
    /// The first thread's stack is in use.
    first_stack_used: Cell<bool>,
    /// Rest of the current chunk of each class.
    chunk: [Cell<u64>; CLASSES.len()],
    chunk_end: [Cell<u64>; CLASSES.len()],
    free: [FreeList; CLASSES.len()],
    /// Blocks that were free in the original: taken last, since they lie in pages
    /// that copies share.
    frozen_free: [FreeList; CLASSES.len()],
    free_runs: [FreeList; RUN_ORDERS],
    /// Bytes handed out and not returned.
    in_use: Cell<u64>,
}

/// Blocks of one size that are free.
#[repr(transparent)]
struct FreeList(Cell<*mut FreeBlock>);

struct FreeBlock {
    next: *mut FreeBlock,
}

impl FreeList {
    /// Adds a block.
    ///
    /// # Safety
    /// The block is aligned and large enough for a link, and nobody's until it is taken.
    unsafe fn push(&self, block: *mut u8) {
        let block = block.cast::<FreeBlock>();
        // SAFETY: the caller's promise.
        unsafe { block.write(FreeBlock { next: self.0.get() }) };
        self.0.set(block);
    }

    fn pop(&self) -> Option<*mut u8> {
        let block = self.0.get();
        if block.is_null() {
            return None;
        }
        // SAFETY: blocks on a list are free and hold a link.
        self.0.set(unsafe { (*block).next });
        Some(block.cast())
    }
}

/// Memory that a heap grows into.
struct Area {
    end: u64,
    map: fn(u64, u64) -> Result<()>,
}

/// That of the kernel's heap.
const AREA: Area = Area { end: HEAP_BASE + HEAP_MAX, map };

fn header() -> &'static HeapHeader {
    // SAFETY: mapped by the zygote, filled in by `create` or by a thaw before the
    // first allocation, and of cells only, which the kernel lock gives to one vCPU.
    unsafe { &*(HEADER as *const HeapHeader) }
}

/// Maps zeroed memory of the heap that is not in use.
fn map(start: u64, len: u64) -> Result<()> {
    // SAFETY: nothing of the heap beyond `mapped_end` has been handed out, nor its front
    // before there is a heap.
    let range = unsafe { KernelRange::new(start, len) };
    Machine::map_anonymous(range, PROT_READ | PROT_WRITE, Sharing::Private)
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
        let _ = Machine::populate(start, end - start, Populate::Write);
    }
}

/// Makes an empty heap behind the front.
pub fn create() -> Result<()> {
    map(FRONT_END, GROWTH - HEAP_FRONT)?;
    let early = (HEADER + size_of::<HeapHeader>() as u64).next_multiple_of(64);
    header().begin(early, FRONT_END, HEAP_BASE + GROWTH);
    Ok(())
}

/// Makes the heap that of a copy: only its used part has been mapped (a thaw), and
/// what is allocated from now on comes from the nursery first.
pub fn restored() {
    header().begin_copy(HEAP_BASE, NURSERY_END);
}

/// The heap is back where it was, and only its used part is mapped.
pub fn mapped_again() {
    header().mapped_end.set(header().used_end.get());
}

/// Notes that the whole area is mapped: it is shared with other processes.
pub fn mapped_whole() {
    header().mapped_end.set(AREA.end);
}

/// Sets the address of the root object.
pub fn set_root(root: u64) {
    header().root.set(root);
}

/// The address of the root object.
pub fn root() -> u64 {
    header().root.get()
}

/// Whether there is a heap at all, as opposed to an idle zygote.
pub fn magic_is_right() -> bool {
    header().magic.get() == HEAP_MAGIC
}

/// The part of the heap that may hold data: start and bytes.
pub fn used_range() -> (u64, u64) {
    (HEAP_BASE, header().used_end.get() - HEAP_BASE)
}

/// The part of the heap that a freeze must save, start and bytes, if the first
/// stack is in use from `first_stack` on.
pub fn saved_range(first_stack: Option<u64>) -> (u64, u64) {
    let start = match first_stack {
        _ if header().nursery_used.get() => HEAP_BASE,
        Some(address) => address.clamp(NURSERY_END, HEADER) & !4095,
        None => HEADER,
    };
    (start, header().used_end.get() - start)
}

/// Memory for the kernel stack of a thread: that which lies in the front for the first.
pub fn kernel_stack() -> KernelStack {
    let bottom = match header().first_stack_used.replace(true) {
        false => NURSERY_END as *mut u8,
        // SAFETY: the size is not zero.
        true => unsafe { alloc::alloc::alloc(STACK_LAYOUT) },
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
        header().first_stack_used.set(false);
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
    header().in_use.get()
}

/// The allocator behind `alloc`.
pub struct KernelHeap;

// SAFETY: blocks do not overlap, are large enough and aligned: classes are
// multiples of 16, chunks begin at multiples of the next power of two or of a
// page, runs at page boundaries, and larger alignments are served by runs or by
// power-of-two classes.
unsafe impl GlobalAlloc for KernelHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        header().allocate(&AREA, &layout)
    }

    // A copy in each of a thousand places that drop something would be a tenth of the kernel's text
    // (docs/decisions/0009).
    #[inline(never)]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { header().free(block, &layout) };
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

impl HeapHeader {
    /// Begins with nothing handed out: small objects lie from `early` to `end` first, and
    /// what comes behind is mapped up to `mapped_end`.
    fn begin(&self, early: u64, end: u64, mapped_end: u64) {
        self.magic.set(HEAP_MAGIC);
        self.used_end.set(end);
        self.mapped_end.set(mapped_end);
        self.front_next.set(early);
        self.front_end.set(end);
    }

    /// Goes on as the heap of a copy, whose nursery this is: nothing beyond what is used is
    /// mapped.
    fn begin_copy(&self, nursery: u64, nursery_end: u64) {
        self.mapped_end.set(self.used_end.get());
        if !self.nursery_used.replace(true) {
            self.front_next.set(nursery);
            self.front_end.set(nursery_end);
            for class in 0..CLASSES.len() {
                // Of chunks that are in use, the rest is given up.
                self.chunk[class].set(0);
                self.chunk_end[class].set(0);
                self.frozen_free[class].0.set(self.free[class].0.replace(null_mut()));
            }
        }
    }

    /// A block; null if there is no memory.
    fn allocate(&self, area: &Area, layout: &Layout) -> *mut u8 {
        let (block, bytes) = match class_of(layout) {
            Some(class) => (self.allocate_small(area, class), CLASSES[class] as u64),
            None => {
                let Some(order) = order_of(layout) else { return null_mut() };
                let run = self.free_runs[order].pop();
                let bytes = 4096 << order;
                (run.unwrap_or_else(|| self.take(area, bytes) as *mut u8), bytes)
            }
        };
        if !block.is_null() {
            self.in_use.update(|in_use| in_use + bytes);
        }
        block
    }

    /// Takes a block back.
    ///
    /// # Safety
    /// It comes from [`HeapHeader::allocate`], for the same layout, and nobody uses it any
    /// more.
    unsafe fn free(&self, block: *mut u8, layout: &Layout) {
        let list = match class_of(layout) {
            Some(class) => {
                self.in_use.update(|bytes| bytes - CLASSES[class] as u64);
                &self.free[class]
            }
            None => {
                let Some(order) = order_of(layout) else { return };
                self.in_use.update(|bytes| bytes - (4096 << order));
                &self.free_runs[order]
            }
        };
        // SAFETY: the block is ours again; the smallest has room for a link.
        unsafe { list.push(block) };
    }

    fn allocate_small(&self, area: &Area, class: usize) -> *mut u8 {
        if let Some(block) = self.free[class].pop() {
            return block;
        }
        let size = CLASSES[class] as u64;
        if self.chunk[class].get() + size > self.chunk_end[class].get() {
            let (chunk, bytes) = match self.carve_front(size) {
                Some(carved) => carved,
                None => {
                    if let Some(block) = self.frozen_free[class].pop() {
                        return block;
                    }
                    let bytes = if size <= 512 { 4096 } else { CHUNK };
                    (self.take(area, bytes), bytes)
                }
            };
            if chunk == 0 {
                return null_mut();
            }
            self.chunk[class].set(chunk);
            self.chunk_end[class].set(chunk + bytes);
        }
        let block = self.chunk[class].get();
        self.chunk[class].set(block + size);
        block as *mut u8
    }

    /// Takes a small chunk from the front, so that objects of all classes lie close
    /// together: its start and bytes.
    fn carve_front(&self, size: u64) -> Option<(u64, u64)> {
        let bytes = if size <= 128 { 512 / size * size } else { size };
        let start = self.front_next.get().next_multiple_of(size.next_power_of_two());
        if start + bytes > self.front_end.get() {
            return None;
        }
        self.front_next.set(start + bytes);
        Some((start, bytes))
    }

    /// Takes `bytes`, a multiple of the page size, from the end of the heap; 0 if
    /// the host has no more memory.
    fn take(&self, area: &Area, bytes: u64) -> u64 {
        let start = self.used_end.get();
        let end = start + bytes;
        if end > area.end {
            return 0;
        }
        let mapped_end = self.mapped_end.get();
        if end > mapped_end {
            let grow = (end - mapped_end).next_multiple_of(GROWTH).min(area.end - mapped_end);
            if (area.map)(mapped_end, grow).is_err() {
                return 0;
            }
            self.mapped_end.set(mapped_end + grow);
        }
        self.used_end.set(end);
        start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the front's early part in a test.
    const EARLY: u64 = 8 << 10;
    /// Bytes of the nursery in a test.
    const NURSERY: u64 = 4 << 10;

    /// A heap in memory of its own, which holds a nursery, an early part and the rest.
    struct TestHeap {
        header: Box<HeapHeader>,
        area: Area,
        memory: *mut u8,
    }

    const MEMORY: Layout = match Layout::from_size_align(1 << 20, 4096) {
        Ok(layout) => layout,
        Err(_) => panic!("not a layout"),
    };

    impl TestHeap {
        fn new() -> Self {
            // SAFETY: the size is not zero.
            let memory = unsafe { std::alloc::alloc(MEMORY) };
            let start = memory.expose_provenance() as u64;
            // SAFETY: as in memory that has just been mapped: zeros are a header without
            // anything.
            let header: Box<HeapHeader> = unsafe { Box::new_zeroed().assume_init() };
            let end = start + MEMORY.size() as u64;
            // The area grows once in the middle.
            header.begin(start + NURSERY, start + NURSERY + EARLY, end - (256 << 10));
            Self { header, area: Area { end, map: |_, _| Ok(()) }, memory }
        }

        fn start(&self) -> u64 {
            self.memory.addr() as u64
        }

        /// Allocates and fills the block.
        fn take(&self, size: usize, align: usize, fill: u8) -> Option<Block> {
            let layout = Layout::from_size_align(size, align).unwrap();
            let at = self.header.allocate(&self.area, &layout);
            assert_eq!(at.addr() % align, 0);
            if at.is_null() {
                return None;
            }
            // SAFETY: the block is ours.
            unsafe { at.write_bytes(fill, size) };
            Some(Block { at, layout, fill })
        }

        /// Frees a block that nobody else has written to.
        fn give_back(&self, block: Block) {
            // SAFETY: the block is ours, and filled.
            let bytes = unsafe { core::slice::from_raw_parts(block.at, block.layout.size()) };
            assert!(bytes == vec![block.fill; bytes.len()], "a block was overwritten");
            // SAFETY: from `take`.
            unsafe { self.header.free(block.at, &block.layout) };
        }
    }

    impl Drop for TestHeap {
        fn drop(&mut self) {
            // SAFETY: allocated in `new`.
            unsafe { std::alloc::dealloc(self.memory, MEMORY) };
        }
    }

    struct Block {
        at: *mut u8,
        layout: Layout,
        fill: u8,
    }

    /// Numbers that look random (xorshift64).
    fn next(seed: &mut u64) -> usize {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        *seed as usize
    }

    #[test]
    fn blocks_never_overlap() {
        let heap = TestHeap::new();
        let (mut seed, mut blocks) = (0x2545_f491_4f6c_dd1d, Vec::new());
        // Miri takes its time.
        for round in 0..if cfg!(miri) { 300 } else { 2000 } {
            if next(&mut seed) % 5 < 3 {
                let align = 1 << (next(&mut seed) % 9);
                let size = 1 + next(&mut seed) % [64, 512, 5000][round % 3];
                blocks.extend(heap.take(size, align, round as u8));
            } else if !blocks.is_empty() {
                let block = blocks.swap_remove(next(&mut seed) % blocks.len());
                heap.give_back(block);
            }
            if round == 150 {
                // As a copy goes on: with what was allocated, and blocks that were free.
                let mapped_end = heap.header.mapped_end.get();
                heap.header.begin_copy(heap.start(), heap.start() + NURSERY);
                heap.header.mapped_end.set(mapped_end);
            }
        }
        blocks.into_iter().for_each(|block| heap.give_back(block));
        assert_eq!(heap.header.in_use.get(), 0);
    }

    #[test]
    fn freed_blocks_are_used_again() {
        let heap = TestHeap::new();
        for (size, align) in [(1, 1), (100, 8), (4096, 4096), (5000, 16), (40 << 10, 4096)] {
            let block = heap.take(size, align, 1).unwrap();
            let first = block.at;
            heap.give_back(block);
            assert_eq!(heap.take(size, align, 2).unwrap().at, first);
        }
    }

    #[test]
    fn a_copy_allocates_in_the_nursery_and_then_takes_what_was_free() {
        let heap = TestHeap::new();
        let early = heap.take(64, 8, 1).unwrap();
        let was_free = early.at;
        heap.give_back(early);
        heap.header.begin_copy(heap.start(), heap.start() + NURSERY);
        let in_nursery = NURSERY as usize / 64;
        for _ in 0..in_nursery {
            let block = heap.take(64, 8, 2).unwrap();
            assert!((block.at.addr() as u64) < heap.start() + NURSERY);
        }
        assert_eq!(heap.take(64, 8, 3).unwrap().at, was_free);
    }

    #[test]
    fn a_full_area_is_null() {
        let heap = TestHeap::new();
        assert!(heap.take(MEMORY.size(), 16, 0).is_none());
        assert!(heap.take(16, 8192, 0).is_none(), "no such alignment");
        assert_eq!(heap.header.in_use.get(), 0, "nothing was handed out");
        let mut blocks = Vec::new();
        blocks.extend(std::iter::from_fn(|| heap.take(64 << 10, 4096, 7)));
        assert!(blocks.len() >= 8, "only {}", blocks.len());
        // Small ones go on as long as there is room.
        while let Some(block) = heap.take(4096, 4096, 8) {
            blocks.push(block);
        }
        let bytes: usize = blocks.iter().map(|block| block.layout.size()).sum();
        assert_eq!(heap.header.in_use.get(), bytes as u64);
        assert!(heap.take(4096, 4096, 9).is_none() && heap.take(64 << 10, 4096, 9).is_none());
        assert_eq!(heap.header.in_use.get(), bytes as u64, "nothing more was handed out");
        blocks.into_iter().for_each(|block| heap.give_back(block));
        assert_eq!(heap.header.in_use.get(), 0);
    }

    #[test]
    fn an_area_that_cannot_be_mapped_is_null() {
        let mut heap = TestHeap::new();
        heap.area.map = |_, _| Err(crate::errno::Errno::ENOMEM);
        heap.header.mapped_end.set(heap.header.used_end.get());
        assert!(heap.take(64 << 10, 16, 0).is_none());
        assert_eq!(heap.header.in_use.get(), 0, "nothing was handed out");
        // What is there already is still handed out.
        assert!(heap.take(16, 16, 0).is_some());
    }

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
