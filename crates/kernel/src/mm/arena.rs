//! The arena that several host processes share.
//!
//! A sandbox with one guest process has its kernel's memory for itself, mapped
//! from the image: the cheapest boot. Before the first fork of a host process,
//! [`share`] moves it all (heap, page area, variables, table of open blobs) to
//! a memory file that every process maps at the same addresses. What belongs to
//! one process or virtual CPU lies in the rest of the per-boot area.
#![allow(unsafe_code)]

use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};

use thaw_abi::control::{MSG_BELL, MSG_MEMORY_FILE};
use thaw_abi::image::{Mapping, SOURCE_IMAGE};
use thaw_abi::layout::{
    ARENA_BLOBS, ARENA_HEAP, ARENA_PAGES, ARENA_SHM, ARENA_VARIABLES, HEAP_BASE, HEAP_MAX,
    PAGES_BASE, PAGES_MAX, SHM_BASE, SHM_MAX, WINDOW_BASE,
};

use super::image::{Mappings, is_shm};
use super::lazy;
use crate::errno::{Errno, Result};
use crate::host::{blobs, broker};
use crate::mm::vma::Vma;
use crate::mm::{heap, shm};
use crate::platform::host::{self, HostFd, MADV_POPULATE_WRITE, PROT_READ, PROT_WRITE, Sharing};
use crate::platform::kernel_lock;
use crate::state::kernel;

static SHARED: AtomicBool = AtomicBool::new(false);
static FILE: AtomicI32 = AtomicI32::new(-1);
static BELL: AtomicI32 = AtomicI32::new(-1);
static CLAPPER: AtomicI32 = AtomicI32::new(-1);
/// Where the kernel's own variables lie: `.data` and `.bss`.
static VARIABLES_START: AtomicU64 = AtomicU64::new(0);
static VARIABLES_LEN: AtomicU64 = AtomicU64::new(0);

const WRITABLE: u32 = PROT_READ | PROT_WRITE;

/// Notes where the kernel's own variables lie, as its program headers say.
pub fn set_variables(start: u64, len: u64) {
    VARIABLES_START.store(start, Relaxed);
    VARIABLES_LEN.store(len, Relaxed);
}

/// Whether the arena lies in memory that host processes can share.
pub fn is_shared() -> bool {
    SHARED.load(Relaxed)
}

/// The file, if the arena lies in it.
pub fn file() -> Option<HostFd> {
    is_shared().then(|| HostFd(FILE.load(Relaxed)))
}

/// The descriptor at which the watcher hears that it is woken.
pub fn bell() -> Option<HostFd> {
    present(&BELL)
}

/// The descriptor with which the watcher is woken.
pub fn clapper() -> Option<HostFd> {
    present(&CLAPPER)
}

fn present(slot: &AtomicI32) -> Option<HostFd> {
    match slot.load(Relaxed) {
        -1 => None,
        fd => Some(HostFd(fd)),
    }
}

/// Asks the host for what sharing needs. May allocate.
pub fn prepare() -> Result<()> {
    ask_once(MSG_MEMORY_FILE, &FILE)?;
    prepare_bell()
}

/// Asks the host for the bell of the watcher. May allocate.
pub fn prepare_bell() -> Result<()> {
    // The end that is rung comes first.
    ask_once(MSG_BELL, &CLAPPER)?;
    ask_once(MSG_BELL, &BELL)
}

fn ask_once(kind: u32, slot: &AtomicI32) -> Result<()> {
    if slot.load(Relaxed) < 0 {
        let fd = broker::request(kind, &[], &[], &mut Vec::new())?.ok_or(Errno::EIO)?;
        slot.store(fd.0, Relaxed);
    }
    Ok(())
}

/// Moves the arena to shared memory. To be called after [`prepare`], on the
/// idle stack, which stays where it is, while no other vCPU uses the arena.
///
/// The shared anonymous memory of guest processes is where they have it, or, in a
/// thaw, in the `image` only.
pub fn share(image: Option<&Mappings<'_>>) -> Result<()> {
    if is_shared() {
        return Ok(());
    }
    kernel_lock::enable()?;
    let file = HostFd(FILE.load(Relaxed));
    lazy::map_all();
    for space in kernel().tasks.spaces() {
        space.recall_shared(0, u64::MAX);
    }
    *kernel().has_shared_arena.lock() = true;
    let areas: Vec<Vma> = match image {
        Some(_) => Vec::new(),
        None => kernel().tasks.spaces().iter().flat_map(|space| space.shared_anonymous()).collect(),
    };
    let mut runs: Vec<(u64, u64)> = Vec::with_capacity(64);
    kernel().pages.lock().for_each_used_run(|start, len| runs.push((start, len)));
    let (blob_table, blob_len) = blobs::table_range();

    // From here to the last mapping nothing may be allocated or changed.
    for &(start, len) in &runs {
        copy(file, start, len, ARENA_PAGES + (start - PAGES_BASE))?;
    }
    if let Some(mappings) = image {
        let is_stored = |mapping: &Mapping| is_shm(mapping) && mapping.source == SOURCE_IMAGE;
        mappings.iter().filter(is_stored).try_for_each(|stored| read(file, stored))?;
    }
    for vma in &areas {
        host::protect(vma.start, vma.len(), PROT_READ)?;
        copy(file, vma.start, vma.len(), ARENA_SHM + vma.offset)?;
    }
    copy(file, blob_table, blob_len, ARENA_BLOBS)?;
    let (variables, variables_len) = (VARIABLES_START.load(Relaxed), VARIABLES_LEN.load(Relaxed));
    let (heap_start, heap_len) = heap::used_range();
    copy(file, heap_start, heap_len, ARENA_HEAP)?;
    copy(file, variables, variables_len, ARENA_VARIABLES)?;
    let shared = Sharing::Shared;
    host::map_file(file, PAGES_BASE, PAGES_MAX, WRITABLE, shared, ARENA_PAGES)?;
    if blob_len > 0 {
        host::map_file(file, blob_table, blob_len, WRITABLE, shared, ARENA_BLOBS)?;
    }
    host::map_file(file, HEAP_BASE, HEAP_MAX, WRITABLE, shared, ARENA_HEAP)?;
    host::map_file(file, variables, variables_len, WRITABLE, shared, ARENA_VARIABLES)?;
    host::map_file(file, SHM_BASE, SHM_MAX, WRITABLE, shared, ARENA_SHM)?;
    heap::mapped_whole();
    SHARED.store(true, Relaxed);
    areas.iter().try_for_each(shm::map)
}

/// Reads shared anonymous memory from the image into the file.
fn read(file: HostFd, stored: Mapping) -> Result<()> {
    let offset = ARENA_SHM + (stored.start - SHM_BASE);
    host::map_file(file, WINDOW_BASE, stored.len, WRITABLE, Sharing::Shared, offset)?;
    host::advise(WINDOW_BASE, stored.len, MADV_POPULATE_WRITE)?;
    lazy::read(&Mapping { start: WINDOW_BASE, ..stored })?;
    host::unmap(WINDOW_BASE, stored.len)
}

/// Copies memory into the file, leaving out pages of zeros.
fn copy(file: HostFd, start: u64, len: u64, offset: u64) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    host::map_file(file, WINDOW_BASE, len, WRITABLE, Sharing::Shared, offset)?;
    // SAFETY: both ranges are mapped; the window is used by nobody else.
    unsafe { copy_pages(start, WINDOW_BASE, len)? };
    host::unmap(WINDOW_BASE, len)
}

/// Copies all pages that are not zero. Runs of them get their memory in one host
/// call instead of a fault a page.
///
/// # Safety
/// Both ranges must be mapped, the second writable, and whole pages.
unsafe fn copy_pages(from: u64, to: u64, len: u64) -> Result<()> {
    // SAFETY: the caller's promise.
    let pages =
        unsafe { core::slice::from_raw_parts(from as *const [u64; 512], (len / 4096) as usize) };
    let is_zero = |page: &[u64; 512]| page.iter().all(|&word| word == 0);
    let mut at = 0;
    while let Some(zeros) = pages[at..].iter().position(|page| !is_zero(page)) {
        at += zeros;
        let run = pages[at..].iter().position(is_zero).unwrap_or(pages.len() - at);
        let place = to + at as u64 * 4096;
        host::advise(place, run as u64 * 4096, MADV_POPULATE_WRITE)?;
        // SAFETY: the caller's promise.
        unsafe {
            core::ptr::copy_nonoverlapping(&pages[at], place as *mut [u64; 512], run);
        }
        at += run;
    }
    Ok(())
}

/// Maps a page of the page area at a guest address.
pub fn map_page(page: u64, address: u64, prot: u32) -> Result<()> {
    let file = HostFd(FILE.load(Relaxed));
    host::map_file(file, address, 4096, prot, Sharing::Shared, ARENA_PAGES + (page - PAGES_BASE))
}
