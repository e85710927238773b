//! System calls on memory.

pub mod locking;
pub mod policy;

use alloc::sync::Arc;

use thaw_abi::page_align_up;

use crate::args::{Fd, Flags};
use crate::errno::{Errno, Result};
use crate::fs::file::OpenFlags;
use crate::mm::backing::{FileBacking, MmapSource};
use crate::mm::limits::{MapLimit, is_data};
use crate::mm::remap::Remap;
use crate::mm::space::{MapRequest, Placement};
use crate::mm::vma::{Vma, VmaFlags};
use crate::platform::machine::{Machine, Memory, PROT_EXEC, PROT_WRITE, Populate};
use crate::platform::memory::GuestRange;
use crate::platform::user::UserAddress;
use crate::task::current_process;

const MADV_DONTNEED: u32 = 4;
const MADV_FREE: u32 = 8;
const MADV_DONTNEED_LOCKED: u32 = 24;

const MAP_SHARED: u32 = 0x01;
const MAP_PRIVATE: u32 = 0x02;
const MAP_SHARED_VALIDATE: u32 = 0x03;
const MAP_TYPE: u32 = 0x0f;
const MAP_FIXED: u32 = 0x10;
const MAP_ANONYMOUS: u32 = 0x20;
const MAP_32BIT: u32 = 0x40;
const MAP_HUGETLB: u32 = 0x4_0000;
const MAP_SYNC: u32 = 0x8_0000;
const MAP_POPULATE: u32 = 0x8000;
const MAP_STACK: u32 = 0x2_0000;
const MAP_FIXED_NOREPLACE: u32 = 0x10_0000;
const MAP_LOCKED: u32 = 0x2000;
/// Flags that ask for nothing that would show: `MAP_GROWSDOWN` areas do not grow.
const MAP_IGNORED: u32 = 0x100 | 0x800 | 0x1000 | 0x4000 | 0x1_0000 | MAP_STACK;
const MAP_KNOWN: u32 = MAP_TYPE
    | MAP_FIXED
    | MAP_ANONYMOUS
    | MAP_32BIT
    | MAP_HUGETLB
    | MAP_SYNC
    | MAP_POPULATE
    | MAP_LOCKED
    | MAP_FIXED_NOREPLACE
    | MAP_IGNORED;

/// mmap(2).
pub fn mmap(
    UserAddress(hint): UserAddress,
    len: u64,
    Flags(prot): Flags,
    Flags(flags): Flags,
    fd: Fd,
    offset: u64,
) -> Result<u64> {
    if offset & 4095 != 0 {
        return Err(Errno::EINVAL);
    }
    if flags & MAP_ANONYMOUS == 0 {
        fd.usable_file()?;
    }
    if len == 0 {
        return Err(Errno::EINVAL);
    }
    let shared = match flags & MAP_TYPE {
        MAP_PRIVATE => false,
        MAP_SHARED => true,
        MAP_SHARED_VALIDATE if flags & !MAP_KNOWN == 0 && flags & MAP_SYNC == 0 => true,
        MAP_SHARED_VALIDATE => return Err(Errno::EOPNOTSUPP),
        _ => return Err(Errno::EINVAL),
    };
    if flags & MAP_HUGETLB != 0 {
        // As on a machine without huge pages set aside.
        return Err(Errno::ENOMEM);
    }
    let placement = if flags & MAP_FIXED_NOREPLACE != 0 {
        Placement::FixedNoReplace(hint)
    } else if flags & MAP_FIXED != 0 {
        Placement::Fixed(hint)
    } else if flags & MAP_32BIT != 0 {
        Placement::Low(hint)
    } else {
        Placement::Hint(hint)
    };
    let is_locked = flags & MAP_LOCKED != 0;
    if is_locked {
        locking::own_limit().check_right()?;
    }
    if is_locked || current_process().mm().locks_new() {
        locking::own_limit().check_growth(&current_process().mm(), len)?;
    }
    let (file, shared) = if flags & MAP_ANONYMOUS != 0 {
        (None, shared)
    } else {
        let (file, shared) = file_backing(fd, prot, shared)?;
        (Some(file), shared)
    };
    if file.is_some() && page_align_up(len).and_then(|len| offset.checked_add(len)).is_none() {
        return Err(Errno::EOVERFLOW);
    }
    const MAP_NORESERVE: u32 = 0x4000;
    let accounted =
        prot & PROT_WRITE != 0 && flags & MAP_NORESERVE == 0 && (file.is_none() || !shared);
    if accounted {
        crate::state::kernel().check_commit(len)?;
    }
    let mut vma_flags = if shared { VmaFlags::SHARED } else { VmaFlags::empty() };
    vma_flags.set(VmaFlags::LOCKED, is_locked);
    check_room(placement, len, is_data(prot, vma_flags))?;
    let request = MapRequest { placement, len, prot, flags: vma_flags, file, offset };
    let start = current_process().mm().map(request)?;
    if flags & MAP_POPULATE != 0 {
        let how = if prot & PROT_WRITE != 0 { Populate::Write } else { Populate::Read };
        // mmap(2): a failure to populate does not fail the call.
        let _ = Machine::populate(start, len.next_multiple_of(4096), how);
    }
    Ok(start)
}

/// `ENOMEM` if the running process may not map so much besides what it has; what a fixed mapping replaces
/// does not count (`mmap_region` in mm/mmap.c).
pub(super) fn check_room(placement: Placement, len: u64, is_data: bool) -> Result<()> {
    let limit = locking::map_limit();
    if limit == MapLimit::NONE {
        return Ok(());
    }
    let mm = current_process().mm();
    let len = page_align_up(len).ok_or(Errno::ENOMEM)?;
    let replaced = match placement {
        Placement::Fixed(start) => {
            let end = start.saturating_add(len);
            mm.sum(&|vma| vma.end.min(end).saturating_sub(vma.start.max(start)))
        }
        _ => 0,
    };
    limit.check(&mm, len.saturating_sub(replaced), is_data)
}

/// What a mapping of a file shows, and whether it is shared.
fn file_backing(fd: Fd, prot: u32, shared: bool) -> Result<(Arc<FileBacking>, bool)> {
    let open = fd.file()?;
    if open.flags().contains(OpenFlags::PATH) {
        return Err(Errno::EBADF);
    }
    if !open.flags().can_read() {
        return Err(Errno::EACCES);
    }
    let writable = open.flags().can_write() && open.file.allows_shared_writes();
    if shared && prot & PROT_WRITE != 0 && !writable {
        // fcntl(2), F_SEAL_WRITE; otherwise the descriptor is read-only.
        return Err(if open.flags().can_write() { Errno::EPERM } else { Errno::EACCES });
    }
    // Compilers map what they only read so (Go's cache, Rust's metadata). Such a mapping
    // copies: what others write to the file later is not seen, as on a network file
    // system. Nobody may write through the descriptor, so nothing written is lost.
    let copies = shared && !open.file.allows_shared_mappings();
    if copies && open.flags().can_write() {
        return Err(Errno::ENODEV);
    }
    let shared = shared && !copies;
    let holder = open.holder();
    if prot & PROT_EXEC != 0 && holder.as_ref().is_some_and(|mount| mount.forbids_execution()) {
        return Err(Errno::EPERM);
    }
    let source = open.file.mmap_source()?;
    let (path, stat) = if matches!(source, MmapSource::Zero) && !shared {
        (alloc::vec::Vec::new(), Default::default())
    } else {
        (open.display_path(), open.file.stat()?)
    };
    let (device, inode) = (stat.dev, stat.ino);
    let backing = FileBacking { source, path: path.into(), device, inode, writable, holder };
    Ok((Arc::new(backing), shared))
}

/// munmap(2).
pub fn munmap(UserAddress(start): UserAddress, len: u64) -> Result<()> {
    current_process().mm().unmap(start, len)?;
    Ok(())
}

/// mprotect(2).
pub fn mprotect(UserAddress(start): UserAddress, len: u64, Flags(prot): Flags) -> Result<()> {
    const PROT_GROWSDOWN: u32 = 0x0100_0000;
    const PROT_GROWSUP: u32 = 0x0200_0000;
    if start & 4095 != 0 || prot & !(7 | 8 | PROT_GROWSDOWN | PROT_GROWSUP) != 0 {
        return Err(Errno::EINVAL);
    }
    let mut from = start;
    let mut bytes = len;
    if prot & PROT_GROWSDOWN != 0 {
        // Extends the change to the beginning of the stack's area.
        let vma = current_process().mm().find(start).ok_or(Errno::ENOMEM)?;
        bytes += start - vma.start;
        from = vma.start;
    }
    check_writable(from, bytes, prot)?;
    check_executable(from, bytes, prot)?;
    match current_process().mm().protect(from, bytes, prot & 7) {
        Err(Errno::EINVAL) => Err(Errno::ENOMEM),
        outcome => outcome,
    }
}

/// `ENOMEM` if the running process may not have so much more memory of its own that it may write
/// (`mprotect_fixup` in mm/mprotect.c).
fn check_writable(start: u64, len: u64, prot: u32) -> Result<()> {
    let limit = locking::map_limit();
    if prot & PROT_WRITE == 0 || limit.data == u64::MAX {
        return Ok(());
    }
    let mm = current_process().mm();
    let end = start.saturating_add(page_align_up(len).unwrap_or(u64::MAX));
    let more = mm.sum(&|vma| match !is_data(vma.prot, vma.flags) && is_data(prot, vma.flags) {
        true => vma.end.min(end).saturating_sub(vma.start.max(start)),
        false => 0,
    });
    limit.check_data(&mm, more)
}

/// `EACCES` if files are mapped there that may not be executed (mount(2), `MS_NOEXEC`).
fn check_executable(start: u64, len: u64, prot: u32) -> Result<()> {
    if prot & PROT_EXEC == 0 {
        return Ok(());
    }
    let end = start.saturating_add(page_align_up(len).unwrap_or(u64::MAX));
    let forbids = |vma: &Vma| {
        let holder = vma.file.as_ref().and_then(|file| file.holder.as_ref());
        vma.prot & PROT_EXEC == 0 && holder.is_some_and(|mount| mount.forbids_execution())
    };
    let found = current_process()
        .mm()
        .sum(&|vma| u64::from(vma.start < end && vma.end > start && forbids(vma)));
    if found == 0 { Ok(()) } else { Err(Errno::EACCES) }
}

/// brk(2): the system call returns the break, whether or not it moved.
pub fn brk(UserAddress(wanted): UserAddress) -> Result<u64> {
    Ok(current_process().mm().brk(wanted, locking::growth_limits()))
}

/// mremap(2).
pub fn mremap(
    UserAddress(start): UserAddress,
    old_len: u64,
    new_len: u64,
    Flags(flags): Flags,
    UserAddress(new_start): UserAddress,
) -> Result<u64> {
    const MAYMOVE: u32 = 1;
    const FIXED: u32 = 2;
    if flags & !(MAYMOVE | FIXED) != 0 || flags & FIXED != 0 && flags & MAYMOVE == 0 {
        return Err(Errno::EINVAL);
    }
    let how = match flags {
        0 => Remap::InPlace,
        MAYMOVE => Remap::MayMove,
        _ => Remap::Fixed(new_start),
    };
    current_process().mm().remap(start, old_len, new_len, how, locking::growth_limits())
}

/// madvise(2).
pub fn madvise(UserAddress(start): UserAddress, len: u64, advice: u32) -> Result<()> {
    if start & 4095 != 0 {
        return Err(Errno::EINVAL);
    }
    let end = page_align_up(len).and_then(|len| start.checked_add(len)).ok_or(Errno::EINVAL)?;
    let mm = current_process().mm();
    // Linux checks the advice before the length.
    enum Act {
        Nothing,
        Discard,
        Populate(Populate),
        Flags(VmaFlags, VmaFlags),
    }
    let none = VmaFlags::empty();
    let act = match advice {
        // NORMAL, RANDOM, SEQUENTIAL, WILLNEED, HUGEPAGE, NOHUGEPAGE, DONTDUMP, DODUMP, COLD,
        // PAGEOUT: hints. MERGEABLE and UNMERGEABLE are unknown to a kernel that merges nothing.
        0..=3 | 14..=17 | 20 | 21 => Act::Nothing,
        // DONTNEED; FREE may drop at once.
        MADV_DONTNEED | MADV_FREE | MADV_DONTNEED_LOCKED => Act::Discard,
        10 => Act::Flags(VmaFlags::DONT_FORK, none),
        11 => Act::Flags(none, VmaFlags::DONT_FORK),
        18 => Act::Flags(VmaFlags::WIPE_ON_FORK, none),
        19 => Act::Flags(none, VmaFlags::WIPE_ON_FORK),
        22 => Act::Populate(Populate::Read),
        23 => Act::Populate(Populate::Write),
        _ => return Err(Errno::EINVAL),
    };
    if start == end {
        return Ok(());
    }
    let covered = mm.covers(start, end);
    match act {
        Act::Nothing => {}
        Act::Discard => {
            let is_of_others =
                |vma: &Vma| vma.file.is_some() || vma.flags.contains(VmaFlags::SHARED);
            let refuses = |vma: &Vma| {
                advice == MADV_FREE && is_of_others(vma)
                    || advice != MADV_DONTNEED_LOCKED && vma.flags.contains(VmaFlags::LOCKED)
            };
            if mm.any_in(start, end, &refuses) {
                return Err(Errno::EINVAL);
            }
            mm.discard(start, end)?;
        }
        Act::Populate(how) => {
            // Of the kernel's memory nothing is to be had.
            GuestRange::new(start, end - start).map_err(|_| Errno::ENOMEM)?;
            crate::mm::lazy::map_range(start, end);
            Machine::populate(start, end - start, how)?;
        }
        Act::Flags(set, clear) => {
            let is_of_others =
                |vma: &Vma| vma.file.is_some() || vma.flags.contains(VmaFlags::SHARED);
            let wipes = set.contains(VmaFlags::WIPE_ON_FORK);
            if wipes && mm.any_in(start, end, &is_of_others) {
                return Err(Errno::EINVAL);
            }
            mm.change_flags(start, end, set, clear)?;
        }
    }
    if covered { Ok(()) } else { Err(Errno::ENOMEM) }
}

/// msync(2): a shared mapping and its file are the same pages already.
pub fn msync(UserAddress(start): UserAddress, len: u64, Flags(flags): Flags) -> Result<()> {
    const ASYNC: u32 = 1;
    const INVALIDATE: u32 = 2;
    const SYNC: u32 = 4;
    if start & 4095 != 0
        || flags & !(ASYNC | INVALIDATE | SYNC) != 0
        || flags & (ASYNC | SYNC) == ASYNC | SYNC
    {
        return Err(Errno::EINVAL);
    }
    let end = page_align_up(len).and_then(|len| start.checked_add(len)).ok_or(Errno::ENOMEM)?;
    let mm = current_process().mm();
    if flags & INVALIDATE != 0 && mm.locked(start, end) > 0 {
        return Err(Errno::EBUSY);
    }
    if mm.covers(start, end) { Ok(()) } else { Err(Errno::ENOMEM) }
}

/// mincore(2): every mapped page counts as resident, since nothing is paged out.
pub fn mincore(UserAddress(start): UserAddress, len: u64, to: UserAddress) -> Result<()> {
    if start & 4095 != 0 {
        return Err(Errno::EINVAL);
    }
    let end = page_align_up(len).and_then(|len| start.checked_add(len)).ok_or(Errno::ENOMEM)?;
    if !current_process().mm().covers(start, end) {
        return Err(Errno::ENOMEM);
    }
    for page in 0..(end - start) / 4096 {
        to.offset(page).write(&1u8)?;
    }
    Ok(())
}
