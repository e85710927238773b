//! The two-level bitmap page allocator (Hibernate Container, §3.3).
//!
//! It serves 4 KiB pages for upper-layer files, pipes and socket buffers from
//! blocks of 4 MiB. The first page of a block is its control page with the free
//! bitmap and the reference counts; a page finds its control page by clearing
//! its low 22 bits. Free pages hold no data, so they can be given back to the
//! host at any time: an image stores none, hibernation drops them, and when the host
//! keeps memory for [`HELD_MAX`] of them, it gets that back.
#![allow(unsafe_code)]

use core::ops::{Deref, DerefMut, Range};

use thaw_abi::layout::PAGES_MAX;

use thaw_abi::layout::PAGES_BASE;

use super::arena;
use crate::errno::{Errno, Result};
use crate::platform::machine::{Machine, Memory, PROT_READ, PROT_WRITE, Populate, Sharing};
use crate::platform::memory::KernelRange;
use crate::state::kernel;

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Bytes of a block.
pub const BLOCK: u64 = 4 << 20;
const PAGES_PER_BLOCK: usize = 1024;
/// Pages that are made at once, in whatever block but the first: so many may be made in vain.
pub const PAGES_AT_ONCE: usize = 64;
/// Free pages for which the host may keep memory: with fewer, pipes and sockets that take and release
/// pages all the time find theirs made.
const HELD_MAX: u64 = 1024;

/// A page of a block that was taken.
struct Taken {
    index: usize,
    /// It may hold old data.
    was_touched: bool,
    /// The host may have kept memory for it.
    was_held: bool,
}

/// First page of a block.
#[repr(C)]
pub struct ControlPage {
    /// Bit n: word n of `free` has a free page.
    free_words: u16,
    /// Pages before this index have been handed out before and may hold old data.
    touched: u16,
    /// Number of pages in use.
    used: u32,
    /// The host has made no page from this index on, or was given it back.
    made: u16,
    /// Bit n of word w: page `64 w + n` is free.
    free: [u64; 16],
    /// The same: it is free, and the host may keep memory for it.
    held: [u64; 16],
    /// References to each page.
    references: [u16; PAGES_PER_BLOCK],
}

impl ControlPage {
    fn initialize(&mut self) {
        self.free_words = u16::MAX;
        self.touched = 1;
        self.made = 1;
        self.used = 0;
        self.free = [u64::MAX; 16];
        self.free[0] &= !1;
        self.held = [0; 16];
    }

    /// Takes a page.
    fn take(&mut self) -> Option<Taken> {
        if self.free_words == 0 {
            return None;
        }
        let word = self.free_words.trailing_zeros() as usize;
        let bit = self.free[word].trailing_zeros() as usize;
        self.free[word] &= !(1 << bit);
        let was_held = self.is_held(word * 64 + bit);
        self.held[word] &= !(1 << bit);
        if self.free[word] == 0 {
            self.free_words &= !(1 << word);
        }
        self.used += 1;
        let index = word * 64 + bit;
        self.references[index] = 1;
        let was_touched = index < self.touched as usize;
        self.touched = self.touched.max(index as u16 + 1);
        self.made = self.made.max(index as u16 + 1);
        Some(Taken { index, was_touched, was_held })
    }

    /// Of so many pages that are taken next those that the host has not made, by their indices. Pages
    /// before them that are free are taken before.
    fn fresh(&self, count: usize) -> Range<usize> {
        let (start, used) = (self.made as usize, self.used as usize);
        let count = count.saturating_sub(start - 1 - used);
        start..(start + count).min(PAGES_PER_BLOCK)
    }

    fn give_back(&mut self, index: usize) {
        self.free[index / 64] |= 1 << (index % 64);
        self.held[index / 64] |= 1 << (index % 64);
        self.free_words |= 1 << (index / 64);
        self.used -= 1;
    }

    fn is_free(&self, index: usize) -> bool {
        self.free[index / 64] & (1 << (index % 64)) != 0
    }

    fn is_held(&self, index: usize) -> bool {
        self.held[index / 64] & (1 << (index % 64)) != 0
    }

    /// The first run, from an index on, of free pages for which the host may keep memory.
    fn next_held(&self, from: usize) -> Option<Range<usize>> {
        let start = (from..PAGES_PER_BLOCK).find(|&index| self.is_held(index))?;
        let is_past = |&index: &usize| !self.is_held(index);
        let end = (start..PAGES_PER_BLOCK).find(is_past).unwrap_or(PAGES_PER_BLOCK);
        Some(start..end)
    }

    /// The host has free pages back.
    fn given_back(&mut self, run: Range<usize>) {
        run.for_each(|index| self.held[index / 64] &= !(1 << (index % 64)));
        let mut before = (0..self.made as usize).rev();
        let last = before.find(|&index| !self.is_free(index) || self.is_held(index));
        self.made = last.unwrap_or(0) as u16 + 1;
    }
}

/// The groups of [`PAGES_AT_ONCE`] that begin within some pages of a block.
fn groups(pages: Range<usize>) -> Range<usize> {
    // The control page is in the first one.
    let first = if pages.start == 1 { 1 } else { pages.start.next_multiple_of(PAGES_AT_ONCE) };
    match first < pages.end {
        true => first..pages.end.next_multiple_of(PAGES_AT_ONCE),
        false => first..first,
    }
}

/// A page of memory, zeroed when handed out, freed when dropped.
pub struct PageBox {
    at: *mut [u8; PAGE],
}

// SAFETY: an owned page.
unsafe impl Send for PageBox {}
// SAFETY: no interior mutability through `&`.
unsafe impl Sync for PageBox {}

impl Deref for PageBox {
    type Target = [u8; PAGE];
    fn deref(&self) -> &[u8; PAGE] {
        // SAFETY: an owned page.
        unsafe { &*self.at }
    }
}

impl DerefMut for PageBox {
    fn deref_mut(&mut self) -> &mut [u8; PAGE] {
        // SAFETY: an owned page, borrowed mutably.
        unsafe { &mut *self.at }
    }
}

impl PageBox {
    /// Address of the page.
    pub fn address(&self) -> u64 {
        self.at as u64
    }

    /// Whether mappings of the guest show it ([`PageAllocator::share`]).
    pub fn is_shown(&self) -> bool {
        kernel().pages.borrow_mut().is_shared(self.address())
    }
}

/// Maps a block of the sandbox's page store.
fn map_block(address: u64, len: u64) -> Result<()> {
    if arena::is_shared() {
        // All of it is mapped already.
        return Ok(());
    }
    // SAFETY: the allocator, which alone has this area, adds the block to its own when it is
    // there.
    let block = unsafe { KernelRange::new(address, len) };
    Machine::map_anonymous(block, PROT_READ | PROT_WRITE, Sharing::Private)
}

/// Gives free pages back to the host. Where an image is mapped, its content comes back.
fn discard_pages(address: u64, len: u64) -> Result<()> {
    // SAFETY: the allocator, which alone has this area, has handed the pages out to nobody.
    let pages = unsafe { KernelRange::new(address, len) };
    match arena::is_shared() {
        true => Machine::remove(pages),
        false => Machine::discard(pages),
    }
}

/// Where the memory of a page store comes from: functions of an address and bytes.
#[derive(Clone, Copy)]
pub struct Source {
    /// Maps zeroed memory.
    pub map: fn(u64, u64) -> Result<()>,
    /// Gives memory back that stays mapped. What it holds then does not matter.
    pub discard: fn(u64, u64) -> Result<()>,
}

/// Blocks that the allocator has, in the order of their addresses.
pub struct PageAllocator {
    base: u64,
    blocks: u64,
    /// No block before this one has a free page.
    first_candidate: u64,
    /// Free pages for which the host may keep memory.
    held: u64,
    /// Pages that were released since free pages were given back last.
    released: u64,
    /// The blocks that they are in.
    released_in: Range<u64>,
    source: Source,
}

impl PageAllocator {
    /// An empty allocator for the area at `base`.
    ///
    /// # Safety
    /// The area, aligned to a block, is the allocator's alone, and memory that the source has
    /// mapped stays.
    pub const unsafe fn new(base: u64, source: Source) -> Self {
        Self {
            base,
            blocks: 0,
            first_candidate: 0,
            held: 0,
            released: 0,
            released_in: 0..0,
            source,
        }
    }

    /// The page store of the sandbox, still empty.
    ///
    /// # Safety
    /// There is no other that is in use.
    pub const unsafe fn of_sandbox() -> Self {
        // SAFETY: the caller's promise; the area holds nothing else.
        unsafe { Self::new(PAGES_BASE, Source { map: map_block, discard: discard_pages }) }
    }

    fn control(&self, block: u64) -> &ControlPage {
        assert!(block < self.blocks, "no block of the page store");
        // SAFETY: blocks below `self.blocks` are mapped and initialized, control pages are
        // handed out to nobody, and changing one takes the allocator's exclusive borrow.
        unsafe { &*((self.base + block * BLOCK) as *const ControlPage) }
    }

    fn control_mut(&mut self, block: u64) -> &mut ControlPage {
        assert!(block < self.blocks, "no block of the page store");
        // SAFETY: as in `control`, and the allocator is borrowed exclusively.
        unsafe { &mut *((self.base + block * BLOCK) as *mut ControlPage) }
    }

    /// Takes a zeroed page.
    pub fn take(&mut self, limit: u64) -> Result<*mut [u8; PAGE]> {
        loop {
            while self.first_candidate < self.blocks {
                let control = self.control_mut(self.first_candidate);
                if let Some(Taken { index, was_touched, was_held }) = control.take() {
                    self.held -= u64::from(was_held);
                    let page = (self.base + self.first_candidate * BLOCK) as usize + index * PAGE;
                    let page = page as *mut [u8; PAGE];
                    if was_touched {
                        // SAFETY: the page is ours and mapped.
                        unsafe { page.write_bytes(0, 1) };
                    }
                    return Ok(page);
                }
                self.first_candidate += 1;
            }
            if (self.blocks + 1) * BLOCK > limit {
                return Err(Errno::ENOMEM);
            }
            (self.source.map)(self.base + self.blocks * BLOCK, BLOCK)?;
            self.blocks += 1;
            self.control_mut(self.blocks - 1).initialize();
        }
    }

    /// Pages to be made, of one block, before so many pages are taken: as a start and bytes. The first
    /// block has those that are taken, of which the host has made none; the others have theirs in groups,
    /// which the first one of each brings along.
    fn to_be_made(&self, count: usize) -> (u64, u64) {
        let mut blocks = self.first_candidate..self.blocks;
        let Some(block) = blocks.find(|&block| self.control(block).free_words != 0) else {
            return (0, 0);
        };
        let fresh = self.control(block).fresh(count);
        let fresh = if block == 0 { fresh } else { groups(fresh) };
        (self.base + block * BLOCK + (fresh.start * PAGE) as u64, (fresh.len() * PAGE) as u64)
    }

    /// Adds a reference to the page at `address`.
    pub fn share(&mut self, address: u64) {
        let (block, index) = self.locate(address);
        self.control_mut(block).references[index] += 1;
    }

    /// Whether somebody else refers to the page at `address`, too.
    fn is_shared(&mut self, address: u64) -> bool {
        let (block, index) = self.locate(address);
        self.control_mut(block).references[index] > 1
    }

    /// Drops a reference and frees the page with the last one.
    pub fn release(&mut self, address: u64) {
        let (block, index) = self.locate(address);
        let control = self.control_mut(block);
        control.references[index] -= 1;
        if control.references[index] == 0 {
            control.give_back(index);
            self.first_candidate = self.first_candidate.min(block);
            self.note_released(block);
        }
    }

    fn note_released(&mut self, block: u64) {
        let all = &self.released_in;
        self.released_in = match self.released {
            0 => block..block + 1,
            _ => all.start.min(block)..all.end.max(block + 1),
        };
        self.held += 1;
        self.released += 1;
        // The host may not have taken those of the last time.
        if self.held >= HELD_MAX && self.released >= HELD_MAX {
            self.released = 0;
            self.released_in.clone().for_each(|block| self.discard_held(block));
        }
    }

    /// Gives the free pages of a block back to the host. What it does not take is tried again.
    fn discard_held(&mut self, block: u64) {
        let (start, discard) = (self.base + block * BLOCK, self.source.discard);
        let control = self.control_mut(block);
        let (mut at, mut given_back) = (0, 0);
        while control.held != [0; 16]
            && let Some(run) = control.next_held(at)
        {
            at = run.end;
            if discard(start + (run.start * PAGE) as u64, (run.len() * PAGE) as u64).is_ok() {
                given_back += run.len() as u64;
                control.given_back(run);
            }
        }
        self.held -= given_back;
    }

    fn locate(&self, address: u64) -> (u64, usize) {
        let offset = address - self.base;
        (offset / BLOCK, (offset % BLOCK) as usize / PAGE)
    }

    /// Bytes in use.
    pub fn bytes_in_use(&self) -> u64 {
        (0..self.blocks).map(|block| self.control(block).used as u64 * PAGE as u64).sum()
    }

    /// Calls `emit` with address and bytes of every run of pages that hold
    /// data, control pages included.
    pub fn for_each_used_run(&self, mut emit: impl FnMut(u64, u64)) {
        for block in 0..self.blocks {
            let control = self.control(block);
            let start = self.base + block * BLOCK;
            let mut run = start;
            for index in 1..=PAGES_PER_BLOCK {
                let at = start + (index * PAGE) as u64;
                if index == PAGES_PER_BLOCK || control.is_free(index) {
                    if at > run {
                        emit(run, at - run);
                    }
                    run = at + PAGE as u64;
                }
            }
        }
    }

    /// End of the area that is mapped.
    pub fn end(&self) -> u64 {
        self.base + self.blocks * BLOCK
    }
}

/// Takes a zeroed page; `ENOMEM` when the sandbox's memory is used up.
pub fn alloc_page() -> Result<PageBox> {
    Ok(PageBox { at: kernel().pages.borrow_mut().take(PAGES_MAX)? })
}

/// Has the host make the pages at once of which so many are about to be taken and filled, as far as it
/// never made them, and up to [`PAGES_AT_ONCE`] more; otherwise it makes each when it is touched, which
/// takes longer.
pub fn make_ahead(count: usize) {
    let (start, len) = kernel().pages.borrow_mut().to_be_made(count);
    if len > 0 {
        // It is advice.
        let _ = Machine::populate(start, len, Populate::Write);
    }
}

impl Drop for PageBox {
    fn drop(&mut self) {
        kernel().pages.borrow_mut().release(self.at as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::alloc::Layout;

    /// A page store in memory of its own.
    struct TestStore {
        pages: PageAllocator,
        memory: *mut u8,
    }

    /// Four blocks.
    const MEMORY: Layout = match Layout::from_size_align(4 * BLOCK as usize, BLOCK as usize) {
        Ok(layout) => layout,
        Err(_) => panic!("not a layout"),
    };

    /// Pages that were given back are zeroed, as those of a memory file are.
    const SOURCE: Source = Source {
        map: |_, _| Ok(()),
        discard: |address, len| {
            // SAFETY: the allocator gives back pages of its memory that nobody has.
            unsafe { (address as *mut u8).write_bytes(0, len as usize) };
            Ok(())
        },
    };

    fn allocator() -> TestStore {
        // SAFETY: the size is not zero.
        let memory = unsafe { std::alloc::alloc_zeroed(MEMORY) };
        // SAFETY: nobody else has the memory.
        let pages = unsafe { PageAllocator::new(memory.expose_provenance() as u64, SOURCE) };
        TestStore { pages, memory }
    }

    impl Drop for TestStore {
        fn drop(&mut self) {
            // SAFETY: allocated in `allocator`.
            unsafe { std::alloc::dealloc(self.memory, MEMORY) };
        }
    }

    impl Deref for TestStore {
        type Target = PageAllocator;
        fn deref(&self) -> &PageAllocator {
            &self.pages
        }
    }

    impl DerefMut for TestStore {
        fn deref_mut(&mut self) -> &mut PageAllocator {
            &mut self.pages
        }
    }

    #[test]
    fn pages_are_distinct_zeroed_and_reused() {
        let mut pages = allocator();
        let mut seen = std::collections::BTreeSet::new();
        // More than a block has.
        for _ in 0..1200 {
            let page = pages.take(4 * BLOCK).unwrap();
            // SAFETY: the page is ours.
            unsafe {
                assert!(*page == [0; PAGE]);
                (*page)[7] = 7;
            }
            assert!(seen.insert(page as u64));
            assert_ne!(page as u64 % BLOCK, 0, "control pages are not handed out");
        }
        assert_eq!(pages.bytes_in_use(), 1200 * PAGE as u64);
        let first = *seen.first().unwrap();
        pages.release(first);
        let again = pages.take(4 * BLOCK).unwrap();
        assert_eq!(again as u64, first);
        // SAFETY: the page is ours.
        assert!(unsafe { *again == [0; PAGE] });
    }

    #[test]
    fn shared_pages_live_until_the_last_reference() {
        let mut pages = allocator();
        let page = pages.take(BLOCK).unwrap() as u64;
        pages.share(page);
        pages.release(page);
        assert_eq!(pages.bytes_in_use(), PAGE as u64);
        pages.release(page);
        assert_eq!(pages.bytes_in_use(), 0);
    }

    #[test]
    fn used_runs_skip_free_pages() {
        let mut pages = allocator();
        let taken: Vec<u64> = (0..5).map(|_| pages.take(BLOCK).unwrap() as u64).collect();
        pages.release(taken[2]);
        let mut runs = Vec::new();
        pages.for_each_used_run(|start, len| runs.push((start - pages.base, len)));
        assert_eq!(runs, [(0, 3 * 4096), (4 * 4096, 2 * 4096)]);
    }

    #[test]
    fn pages_that_are_made_ahead_are_those_that_are_taken_next() {
        let mut pages = allocator();
        let start = |pages: &TestStore, page: u64| pages.base + page * PAGE as u64;
        assert_eq!(pages.to_be_made(8).1, 0, "there is no block yet");
        let taken: Vec<u64> = (0..5).map(|_| pages.take(4 * BLOCK).unwrap() as u64).collect();
        assert_eq!(pages.to_be_made(8), (start(&pages, 6), 8 * PAGE as u64));
        // Two that were used before come first.
        pages.release(taken[1]);
        pages.release(taken[3]);
        assert_eq!(pages.to_be_made(8), (start(&pages, 6), 6 * PAGE as u64));
        assert_eq!(pages.to_be_made(2).1, 0);
        for _ in 0..2 + 3 {
            pages.take(4 * BLOCK).unwrap();
        }
        assert_eq!(pages.to_be_made(8), (start(&pages, 9), 8 * PAGE as u64));
        // No more than the block has.
        assert_eq!(pages.to_be_made(5000), (start(&pages, 9), (1024 - 9) * PAGE as u64));
        for _ in 9..1024 {
            pages.take(4 * BLOCK).unwrap();
        }
        assert_eq!(pages.to_be_made(8).1, 0);
    }

    #[test]
    fn later_blocks_are_made_in_groups_each_of_them_once() {
        let mut pages = allocator();
        for _ in 0..1023 + 1 {
            pages.take(4 * BLOCK).unwrap();
        }
        let (mut made, mut times) = (Vec::new(), 0);
        for _ in 0..100 {
            let (start, len) = pages.to_be_made(8);
            let first = (start - pages.base) / PAGE as u64;
            made.extend(first..first + len / PAGE as u64);
            times += usize::from(len > 0);
            for _ in 0..8 {
                pages.take(4 * BLOCK).unwrap();
            }
        }
        // The group in which a page was taken before is the only one that was not made.
        let expected: Vec<u64> = (1024 + 64..1024 + 832).collect();
        assert_eq!((made, times), (expected, 12));
        assert_eq!(groups(1..9), 1..64);
        assert_eq!(groups(60..200), 64..256);
        assert_eq!(groups(1020..1024), 1024..1024);
    }

    fn fill(page: *mut [u8; PAGE]) {
        // SAFETY: the caller has taken it.
        unsafe { page.write_bytes(7, 1) };
    }

    fn is_zeroed(page: *mut [u8; PAGE]) -> bool {
        // SAFETY: the caller has taken it.
        unsafe { *page == [0; PAGE] }
    }

    #[test]
    fn free_pages_are_given_back_to_the_host() {
        let mut pages = allocator();
        let taken: Vec<_> = (0..2000).map(|_| pages.take(4 * BLOCK).unwrap()).collect();
        taken.iter().for_each(|&page| fill(page));
        let (kept, freed) = (taken[3], taken.iter().filter(|&&page| page != taken[3]));
        // One less than is kept for those who take pages again.
        let freed: Vec<_> = freed.copied().collect();
        freed[..1023].iter().for_each(|&page| pages.release(page as u64));
        assert!(freed[..1023].iter().all(|&page| !is_zeroed(page)));
        pages.release(freed[1023] as u64);
        assert!(freed[..1024].iter().all(|&page| is_zeroed(page)) && !is_zeroed(kept));
        // It makes those of the first block behind the page that is kept anew.
        assert_eq!((pages.control(0).made, pages.control(0).held), (5, [0; 16]));
        assert_eq!(pages.to_be_made(8), (pages.base + 5 * PAGE as u64, 5 * PAGE as u64));
        assert!(freed[1024..].iter().all(|&page| !is_zeroed(page)));
        let again: Vec<_> = (0..1500).map(|_| pages.take(4 * BLOCK).unwrap()).collect();
        assert!(again.iter().all(|&page| is_zeroed(page)));
    }

    #[test]
    fn what_the_host_does_not_take_or_gives_as_it_was_is_zeroed_when_it_is_taken() {
        type Discard = fn(u64, u64) -> Result<()>;
        for discard in [(|_, _| Err(Errno::ENOMEM)) as Discard, |_, _| Ok(())] {
            let mut pages = allocator();
            pages.source.discard = discard;
            let taken: Vec<_> = (0..1024).map(|_| pages.take(4 * BLOCK).unwrap()).collect();
            taken.iter().for_each(|&page| fill(page));
            taken.iter().for_each(|&page| pages.release(page as u64));
            assert!(!is_zeroed(taken[0]));
            assert!((0..1024).all(|_| is_zeroed(pages.take(4 * BLOCK).unwrap())));
        }
    }

    #[test]
    fn the_limit_is_an_error() {
        let mut pages = allocator();
        for _ in 0..1023 {
            pages.take(BLOCK).unwrap();
        }
        assert_eq!(pages.take(BLOCK).unwrap_err(), Errno::ENOMEM);
    }
}
