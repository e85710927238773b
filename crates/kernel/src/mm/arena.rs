//! The arena that several host processes share.
//!
//! A sandbox with one guest process has its kernel's memory for itself, mapped
//! from the image: the cheapest boot. Before the first fork of a host process,
//! [`share`] moves it all (heap, page area, variables, tables of blobs and host processes) to
//! a memory file that every process maps at the same addresses. What belongs to
//! one process or virtual CPU lies in the rest of the per-boot area.
#![allow(unsafe_code)]

use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};

use thaw_abi::control::{MSG_MEMORY_FILE, MSG_WAKE_SOCKET};
use thaw_abi::image::{Mapping, SOURCE_ZERO};
use thaw_abi::layout::{
    ARENA_BLOBS, ARENA_HEAP, ARENA_HOST_PROCESSES, ARENA_PAGES, ARENA_SECRETS, ARENA_SHM,
    ARENA_VARIABLES, HEAP_BASE, HEAP_MAX, PAGES_BASE, PAGES_MAX, SHM_BASE, SHM_MAX,
};

use super::image::{Mappings, is_shm};
use super::lazy;
use crate::errno::{Errno, Result};
use crate::host::{blobs, broker};
use crate::mm::vma::Vma;
use crate::mm::{heap, shm};
use crate::platform::boot_area::{HOST_PROCESSES, SECRETS};
use crate::platform::kernel_lock;
use crate::platform::machine::{HostFd, Machine, Memory, PROT_READ, PROT_WRITE, Populate, Sharing};
use crate::platform::memory::{GuestRange, KernelRange, Window};
use crate::state::kernel;

static SHARED: AtomicBool = AtomicBool::new(false);
static FILE: AtomicI32 = AtomicI32::new(-1);
/// The file holds something that cannot be removed, so the arena never moves there.
static IS_SPOILT: AtomicBool = AtomicBool::new(false);
static WAKE_SOCKET: AtomicI32 = AtomicI32::new(-1);
static WAKE_SENDER: AtomicI32 = AtomicI32::new(-1);
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
    is_shared().then(|| HostFd::new(FILE.load(Relaxed)))
}

/// The descriptor at which the watcher hears that it is woken.
pub fn wake_socket() -> Option<HostFd> {
    present(&WAKE_SOCKET)
}

/// The descriptor with which the watcher is woken.
pub fn wake_sender() -> Option<HostFd> {
    present(&WAKE_SENDER)
}

fn present(slot: &AtomicI32) -> Option<HostFd> {
    match slot.load(Relaxed) {
        -1 => None,
        fd => Some(HostFd::new(fd)),
    }
}

/// Asks the host for what sharing needs. May allocate.
pub fn prepare() -> Result<()> {
    ask_once(&[(MSG_MEMORY_FILE, &FILE), WAKE_ENDS[0], WAKE_ENDS[1]])
}

/// Asks the host for the socket that wakes the watcher. May allocate.
pub fn prepare_wake_socket() -> Result<()> {
    ask_once(&WAKE_ENDS)
}

/// The end that sends comes first.
const WAKE_ENDS: [Wanted; 2] = [(MSG_WAKE_SOCKET, &WAKE_SENDER), (MSG_WAKE_SOCKET, &WAKE_SOCKET)];

/// The kind of a request, and where the descriptor is noted that answers it.
type Wanted = (u32, &'static AtomicI32);

/// Asks the host for what is not there yet.
fn ask_once(all: &[Wanted]) -> Result<()> {
    let is_missing = |(_, slot): &&Wanted| slot.load(Relaxed) < 0;
    let missing: Vec<Wanted> = all.iter().filter(is_missing).copied().collect();
    let kinds: Vec<u32> = missing.iter().map(|&(kind, _)| kind).collect();
    broker::request_all(&kinds, |at, fd| missing[at].1.store(fd.0, Relaxed))
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
    if IS_SPOILT.load(Relaxed) {
        return Err(Errno::ENOMEM);
    }
    kernel_lock::enable()?;
    let file = HostFd::new(FILE.load(Relaxed));
    lazy::map_all();
    for space in kernel().tasks.spaces() {
        space.recall_shared(0, u64::MAX);
    }
    *kernel().has_shared_arena.borrow_mut() = true;
    let areas: Vec<Vma> = match image {
        Some(_) => Vec::new(),
        None => kernel().tasks.spaces().iter().flat_map(|space| space.shared_anonymous()).collect(),
    };
    let mut runs: Vec<Area> = Vec::with_capacity(64);
    kernel().pages.borrow_mut().for_each_used_run(|start, len| {
        runs.push(((start, len), ARENA_PAGES + (start - PAGES_BASE)));
    });

    // From here to the last mapping nothing may be allocated or changed.
    let kept = [
        (blobs::table_range(), ARENA_BLOBS),
        (HOST_PROCESSES, ARENA_HOST_PROCESSES),
        ((VARIABLES_START.load(Relaxed), VARIABLES_LEN.load(Relaxed)), ARENA_VARIABLES),
        // A copy that was booted ahead gets them when it has all its host processes.
        (SECRETS.range(SECRETS.capacity()), ARENA_SECRETS),
    ];
    // The only host process so far has the first page of its table.
    let host_processes = ((HOST_PROCESSES.0, 4096), ARENA_HOST_PROCESSES);
    let used = [kept[0], host_processes, (heap::used_range(), ARENA_HEAP), kept[2], kept[3]];
    if let Some(mappings) = image {
        // Shared memory maps no file: a blob's number can only be that of an ancestor, which is
        // open.
        let is_stored = |mapping: &Mapping| is_shm(mapping) && mapping.source != SOURCE_ZERO;
        mappings.iter().filter(is_stored).try_for_each(|stored| read(file, stored))?;
    }
    let own = || runs.iter().chain(&used);
    let copied = areas.iter().try_for_each(|vma| copy_shared(file, vma));
    let copied = copied.and_then(|()| own().try_for_each(|&(memory, to)| copy(file, memory, to)));
    if let Err(error) = copied {
        // Zeros are not copied: what is in the file now would be in their place the next time.
        let of_areas = areas.iter().map(|vma| (vma.len(), ARENA_SHM + vma.offset));
        let mut all = own().map(|((_, len), to)| (*len, *to)).chain(of_areas);
        let emptied = all.try_for_each(|(len, to)| empty(file, len, to));
        IS_SPOILT.store(emptied.is_err(), Relaxed);
        return Err(error);
    }
    // SAFETY: the file holds the same bytes, so that whoever refers to a value finds
    // it unchanged; nothing has been changed since they were copied.
    let mapped = unsafe { map_areas(&SAVED_AREAS).and_then(|()| map_areas(&kept)) };
    mapped.inspect_err(|_| IS_SPOILT.store(true, Relaxed))?;
    heap::mapped_whole();
    SHARED.store(true, Relaxed);
    areas.iter().try_for_each(shm::map)
}

/// Memory of a start and a length, and where it lies in the file.
type Area = ((u64, u64), u64);

/// What images and swap files hold of the arena.
const SAVED_AREAS: [Area; 3] = [
    ((PAGES_BASE, PAGES_MAX), ARENA_PAGES),
    ((HEAP_BASE, HEAP_MAX), ARENA_HEAP),
    ((SHM_BASE, SHM_MAX), ARENA_SHM),
];

/// Maps areas of the file.
///
/// # Safety
/// Whoever refers to a value in them finds it unchanged.
unsafe fn map_areas(areas: &[Area]) -> Result<()> {
    let file = HostFd::new(FILE.load(Relaxed));
    for &((start, len), offset) in areas.iter().filter(|((_, len), _)| *len > 0) {
        // SAFETY: the caller's promise.
        let area = unsafe { KernelRange::new(start, len) };
        Machine::map_file(file, area, WRITABLE, Sharing::Shared, offset)?;
    }
    Ok(())
}

/// Maps what this host process has unmapped of a shared arena when it gave up its memory.
pub fn map_saved() -> Result<()> {
    // SAFETY: nothing is mapped there, and the file is what it was, or nobody uses it yet.
    unsafe { map_areas(&SAVED_AREAS) }
}

/// Unmaps what images and swap files hold of the arena in this host process.
pub fn unmap_saved() -> Result<()> {
    SAVED_AREAS.iter().try_for_each(|&((start, len), _)| {
        // SAFETY: a swap file holds all that anybody refers to in there, and it is back before
        // anybody of this host process uses it.
        Machine::unmap(unsafe { KernelRange::new(start, len) })
    })
}

/// The parts of the shared arena that may hold data: starts and bytes.
pub fn saved_in_use() -> [(u64, u64); 3] {
    let pages = kernel().pages.borrow_mut().end() - PAGES_BASE;
    let shared_memory = kernel().shared_memory.end();
    [(PAGES_BASE, pages), heap::used_range(), (SHM_BASE, shared_memory)]
}

/// Bytes of the shared arena that may hold data.
pub fn bytes_in_use() -> u64 {
    let pages = kernel().pages.borrow_mut().bytes_in_use();
    pages + heap::used_range().1 + kernel().shared_memory.end()
}

/// Gives this host process, a twin, a copy of the shared arena for itself, which nobody changes
/// meanwhile. Allocates nothing.
pub fn make_private() -> Result<()> {
    let file = HostFd::new(FILE.load(Relaxed));
    for ((start, len), offset) in SAVED_AREAS {
        // SAFETY: the file holds the same bytes.
        let area = unsafe { KernelRange::new(start, len) };
        Machine::map_file(file, area, WRITABLE, Sharing::Private, offset)?;
    }
    // A page that is written is copied, and so is one of which that is only said.
    let mut outcome = Ok(());
    let mut copy = |start, len| {
        if len > 0 {
            outcome = outcome.and_then(|()| Machine::populate(start, len, Populate::Write));
        }
    };
    let (heap, len) = heap::used_range();
    copy(heap, len);
    copy(SHM_BASE, kernel().shared_memory.end());
    kernel().pages.borrow_mut().for_each_used_run(&mut copy);
    outcome
}

/// Gives the memory of parts of the shared arena back to the host. They read as zeros then.
pub fn discard(parts: &[(u64, u64)]) -> Result<()> {
    parts.iter().filter(|(_, len)| *len > 0).try_for_each(|&(start, len)| {
        // SAFETY: a swap file holds all that anybody refers to in there, and it is back before
        // anybody uses it.
        Machine::remove(unsafe { KernelRange::new(start, len) })
    })
}

/// Reads shared anonymous memory from the image, or an ancestor, into the file.
fn read(file: HostFd, stored: Mapping) -> Result<()> {
    let offset = ARENA_SHM + (stored.start - SHM_BASE);
    let mut window = Window::of_file(file, stored.len, offset)?;
    Machine::populate(window.bytes_mut().as_ptr() as u64, stored.len, Populate::Write)?;
    lazy::read_into(window.bytes_mut(), &stored)
}

/// Copies memory, of a start and a length in whole pages, into the file, leaving out pages
/// of zeros.
fn copy(file: HostFd, memory: (u64, u64), offset: u64) -> Result<()> {
    copy_besides_zeros(file, memory, offset, |_, _| {})
}

/// Bytes of shared anonymous memory that are copied before zeros are given back.
const SHARED_CHUNK: u64 = 256 << 10;

/// Copies an area of shared anonymous memory, where the host has it, into the file. The host gives
/// memory to pages that are only read, and pages that nobody has touched are to have none.
fn copy_shared(file: HostFd, vma: &Vma) -> Result<()> {
    let range = vma.range()?;
    Machine::protect(range, WRITABLE)?;
    // In a copy of an image it is a private mapping, which has none of its own for zeros.
    let give_back = |start, len| {
        let _ = GuestRange::new(start, len).and_then(Machine::remove);
    };
    let mut chunks = (0..vma.len()).step_by(SHARED_CHUNK as usize);
    let copied = chunks.try_for_each(|at| {
        let chunk = (vma.start + at, SHARED_CHUNK.min(vma.len() - at));
        copy_besides_zeros(file, chunk, ARENA_SHM + vma.offset + at, give_back)
    });
    // Without a copy of all, the guest goes on with what it has.
    let restored = Machine::protect(range, vma.prot);
    copied.and(restored)
}

/// Removes what the file has there.
fn empty(file: HostFd, len: u64, offset: u64) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    Window::of_file(file, len, offset)?.empty()
}

/// As [`copy`]; `of_zeros` hears of the pages that are left out: a start and bytes.
fn copy_besides_zeros(
    file: HostFd,
    (start, len): (u64, u64),
    offset: u64,
    mut of_zeros: impl FnMut(u64, u64),
) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    let mut window = Window::of_file(file, len, offset)?;
    // SAFETY: all of the memory that `share` copies is mapped, and nobody changes it
    // meanwhile.
    let pages = unsafe { core::slice::from_raw_parts(start as *const Page, len as usize / 4096) };
    let to = bytemuck::cast_slice_mut(window.bytes_mut());
    copy_pages(pages, to, |at, count| of_zeros(start + at as u64 * 4096, count as u64 * 4096))
}

/// The words of a page.
type Page = [u64; 512];

/// Copies all pages that are not zero. Runs of them get their memory in one host
/// call instead of a fault a page. `of_zeros` hears of the others: the first and how many.
fn copy_pages(
    pages: &[Page],
    to: &mut [Page],
    mut of_zeros: impl FnMut(usize, usize),
) -> Result<()> {
    let is_zero = |page: &Page| page.iter().all(|&word| word == 0);
    let mut at = 0;
    while at < pages.len() {
        let rest = &pages[at..];
        let zeros = rest.iter().position(|page| !is_zero(page)).unwrap_or(rest.len());
        let run = rest[zeros..].iter().position(is_zero).unwrap_or(rest.len() - zeros);
        if zeros > 0 {
            of_zeros(at, zeros);
        }
        if run > 0 {
            let place = &mut to[at + zeros..at + zeros + run];
            Machine::populate(place.as_ptr() as u64, run as u64 * 4096, Populate::Write)?;
            place.copy_from_slice(&rest[zeros..zeros + run]);
        }
        at += zeros + run;
    }
    Ok(())
}

/// Maps a page of the page area at a guest address.
pub fn map_page(page: u64, address: u64, prot: u32) -> Result<()> {
    let file = HostFd::new(FILE.load(Relaxed));
    let (at, offset) = (GuestRange::new(address, 4096)?, ARENA_PAGES + (page - PAGES_BASE));
    Machine::map_file(file, at, prot, Sharing::Shared, offset)
}
