//! Memory: mappings of the host, and copies that catch its signals.
#![allow(unsafe_code)]

use core::cell::Cell;
use core::sync::atomic::AtomicU64;

use super::calls::{hostcall, nr};
use super::{HostProcesses, copies, shortage};
use crate::errno::{Errno, Result};
use crate::io::IoVec;
use crate::machine::{HostFd, Memory, PROT_READ, PROT_WRITE, Populate, Sharing};
use crate::memory::{KernelRange, Pages};

const MAP_SHARED: u64 = 0x01;
const MAP_PRIVATE: u64 = 0x02;
const MAP_FIXED: u64 = 0x10;
const MAP_ANONYMOUS: u64 = 0x20;
/// All mappings are made without reserving: how much memory the sandbox may
/// use is limited by its control group, not by what it maps.
const MAP_NORESERVE: u64 = 0x4000;

const MADV_DONTNEED: u32 = 4;
const MADV_REMOVE: u32 = 9;
const MADV_POPULATE_READ: u32 = 22;
const MADV_POPULATE_WRITE: u32 = 23;

/// A page of no use but for [`Memory::barrier`].
const BARRIER_PAGE: u64 = thaw_abi::layout::BOOT_BASE + 0x9_0000;

fn sharing_flag(sharing: Sharing) -> u64 {
    match sharing {
        Sharing::Private => MAP_PRIVATE,
        Sharing::Shared => MAP_SHARED,
    }
}

fn populate_advice(how: Populate) -> u32 {
    match how {
        Populate::Read => MADV_POPULATE_READ,
        Populate::Write => MADV_POPULATE_WRITE,
    }
}

/// madvise(2).
///
/// # Safety
/// Nobody refers to memory whose content the advice changes.
unsafe fn advise(address: u64, len: u64, advice: u32) -> Result<()> {
    // SAFETY: the caller's promise; the filter admits advice on the sandbox's own memory
    // only.
    unsafe { hostcall(nr::MADVISE, [address, len, advice as u64, 0, 0, 0]) }.map(drop)
}

/// Lets children have zeros where this process has a signal stack, which no fork is made on. A page that both
/// had would be copied when the host delivers a signal, which fails, and ends the process, where it has no
/// memory left. Before the filter; an older host shares the pages.
pub(super) fn keep_from_children(address: u64, len: u64) {
    const MADV_WIPEONFORK: u32 = 18;
    // SAFETY: changes the memory of children only, which have nothing there.
    let _ = unsafe { advise(address, len, MADV_WIPEONFORK) };
}

/// Attempts at a call that makes a mapping, which a program may ask for in vain: one that is refused since
/// there are too many of them, or by a limit of the process, fails after as many.
const ATTEMPTS_TO_MAP: u32 = 50;
/// Attempts at others, of which few may fail.
const ATTEMPTS: u32 = 300;

/// Changes mappings.
///
/// # Safety
/// Nobody refers to memory that goes or comes.
unsafe fn map(call: u64, args: [u64; 6]) -> Result<()> {
    let attempts = if call == nr::MMAP { ATTEMPTS_TO_MAP } else { ATTEMPTS };
    // SAFETY: the caller's promise.
    shortage::retry(attempts, || unsafe { hostcall(call, args) }).map(drop)
}

impl Memory for HostProcesses {
    fn map_anonymous(at: impl Pages, protection: u32, sharing: Sharing) -> Result<()> {
        let flags = sharing_flag(sharing) | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE;
        let args = [at.start(), at.bytes(), protection as u64, flags, u64::MAX, 0];
        // SAFETY: pages that host calls may change.
        unsafe { map(nr::MMAP, args) }
    }

    fn map_file(
        fd: HostFd,
        at: impl Pages,
        protection: u32,
        sharing: Sharing,
        offset: u64,
    ) -> Result<()> {
        let flags = sharing_flag(sharing) | MAP_FIXED | MAP_NORESERVE;
        let args = [at.start(), at.bytes(), protection as u64, flags, fd.0 as u64, offset];
        // SAFETY: as for `map_anonymous_as`.
        unsafe { map(nr::MMAP, args) }
    }

    fn protect(at: impl Pages, protection: u32) -> Result<()> {
        let args = [at.start(), at.bytes(), protection as u64, 0, 0, 0];
        // SAFETY: as for `map_anonymous_as`.
        unsafe { map(nr::MPROTECT, args) }
    }

    fn unmap(at: impl Pages) -> Result<()> {
        // SAFETY: as for `map_anonymous_as`.
        unsafe { map(nr::MUNMAP, [at.start(), at.bytes(), 0, 0, 0, 0]) }
    }

    fn move_pages(from: impl Pages, to: impl Pages) -> Result<()> {
        const MREMAP_MAYMOVE_FIXED: u64 = 3;
        let len = from.bytes();
        if len != to.bytes() {
            return Err(Errno::EINVAL);
        }
        // SAFETY: as for `map_anonymous_as`, both ranges.
        unsafe { map(nr::MREMAP, [from.start(), len, len, MREMAP_MAYMOVE_FIXED, to.start(), 0]) }
    }

    fn discard(at: impl Pages) -> Result<()> {
        // SAFETY: as for `map_anonymous_as`.
        unsafe { advise(at.start(), at.bytes(), MADV_DONTNEED) }
    }

    fn remove(at: impl Pages) -> Result<()> {
        // SAFETY: as for `map_anonymous_as`.
        unsafe { advise(at.start(), at.bytes(), MADV_REMOVE) }
    }

    fn populate(address: u64, len: u64, how: Populate) -> Result<()> {
        // SAFETY: changes the content of no memory, and neither whether it is there.
        unsafe { advise(address, len, populate_advice(how)) }
    }

    fn populate_ranges(ranges: &[Cell<IoVec>], how: Populate) -> Result<u64> {
        let (at, count) = (ranges.as_ptr() as u64, ranges.len() as u64);
        let this = thaw_abi::filter::PIDFD_SELF as u64;
        // SAFETY: as for `populate`; `ranges` is valid for the call.
        unsafe {
            hostcall(nr::PROCESS_MADVISE, [this, at, count, populate_advice(how) as u64, 0, 0])
        }
    }

    unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> usize {
        // SAFETY: the caller's promise; faults on the guest's side are resumed at
        // `thaw_copy_fault` by the fault handler.
        unsafe { copies::thaw_copy(to, from, len) }
    }

    unsafe fn copy_present(to: *mut u8, from: *const u8, len: usize) -> usize {
        // SAFETY: as in `copy`.
        unsafe { copies::thaw_copy_present(to, from, len) }
    }

    fn store_in_file(word: &AtomicU64, value: u64) -> Result<()> {
        // SAFETY: an aligned word that may change at any time; a fault is caught.
        match unsafe { copies::thaw_store(word.as_ptr(), value) } {
            0 => Ok(()),
            _ => Err(Errno::EFAULT),
        }
    }

    fn load_from_file(word: &AtomicU64) -> Result<u64> {
        let mut value = 0;
        // SAFETY: as above.
        match unsafe { copies::thaw_load(word.as_ptr(), &raw mut value) } {
            0 => Ok(value),
            _ => Err(Errno::EFAULT),
        }
    }

    unsafe fn compare_exchange(word: *mut u32, expected: u32, new: u32) -> Option<u32> {
        // SAFETY: the caller's promise; a fault is caught.
        u32::try_from(unsafe { copies::thaw_compare_exchange(word, expected, new) }).ok()
    }

    // Taking the right to write from a page that is in use makes the host interrupt all
    // processors, as membarrier(2) was done before it existed.
    fn barrier() -> Result<()> {
        // SAFETY: the page lies in the per-boot area, above the idle stack.
        unsafe { (BARRIER_PAGE as *mut u64).write_volatile(1) };
        // SAFETY: nobody refers to the page.
        let page = unsafe { KernelRange::new(BARRIER_PAGE, 4096) };
        Self::protect(page, PROT_READ)?;
        Self::protect(page, PROT_READ | PROT_WRITE)
    }
}
