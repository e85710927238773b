//! Address spaces: the guest's mappings, and the host mappings that follow.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use thaw_abi::layout::{GUEST_MAX, GUEST_MIN};
use thaw_abi::page_align_up;

use super::absent::Ranges;
use super::backing::FileBacking;
use super::host_mapping::map_on_host;
use super::provenance::{ImageNumbers, Provenance, Replaced};
use super::shm;
use super::swap;
use super::vma::{Vma, VmaFlags, VmaMap};
use crate::errno::{Errno, Result};
use crate::mm::backing::MmapSource;
use crate::mm::lazy;
use crate::platform::machine::{Gate, Machine, Memory, PROT_WRITE, SystemCallSites};
use crate::platform::memory::GuestRange;
use crate::sync::KernelCell;

/// `PROT_*` bits that mean something.
pub const PROT_MASK: u32 = 7;

/// Where the memory that `MAP_32BIT` asks for ends.
const LOW_END: u64 = 1 << 31;

/// Where a new mapping goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Anywhere, preferably here.
    Hint(u64),
    /// In the low 2 GiB (`MAP_32BIT`), preferably here.
    Low(u64),
    /// Exactly here, replacing what is there (`MAP_FIXED`).
    Fixed(u64),
    /// Exactly here, `EEXIST` if taken (`MAP_FIXED_NOREPLACE`).
    FixedNoReplace(u64),
}

/// What `mmap` asks for.
#[derive(Clone)]
pub struct MapRequest {
    /// Where.
    pub placement: Placement,
    /// Bytes; rounded up to whole pages.
    pub len: u64,
    /// `PROT_*`.
    pub prot: u32,
    /// Properties of the area.
    pub flags: VmaFlags,
    /// The file, or `None` for anonymous memory.
    pub file: Option<Arc<FileBacking>>,
    /// Offset in the file, page aligned.
    pub offset: u64,
}

/// The guest's mappings, as one host process has them.
pub struct AddressSpace {
    pub(super) state: KernelCell<State>,
    /// Pages of the page store that mappings show, by guest address. Each
    /// counts as a use of the page.
    pub(super) shown: KernelCell<BTreeMap<u64, u64>>,
    /// What private mappings of upper-layer files have not, of the host neither once it is
    /// settled ([`super::absent`]).
    pub(super) absent: KernelCell<Ranges>,
    /// What the host still has of the pages that files have cut off.
    pub(super) stale: KernelCell<Ranges>,
    /// Start and bytes of what a fork has left out, until the new host process has
    /// removed it.
    left_out: KernelCell<Vec<(u64, u64)>>,
    /// What is not mapped as a thaw has mapped it.
    replaced: KernelCell<Replaced>,
    /// What is not mapped as it was when the sandbox was hibernated last.
    replaced_awake: KernelCell<Replaced>,
    /// Its number in images.
    image_numbers: KernelCell<ImageNumbers>,
    /// What is known of code that has asked for the process id after a thaw.
    pub generator_callers: KnownCallers,
    /// Patched system call sites.
    pub gate: Gate,
}

impl Drop for AddressSpace {
    fn drop(&mut self) {
        for &page in self.shown.borrow_mut().values() {
            crate::state::kernel().pages.borrow_mut().release(page);
        }
        self.release_shared();
    }
}

#[derive(Clone)]
pub(super) struct State {
    pub(super) vmas: VmaMap,
    /// New mappings go below this address.
    mmap_top: u64,
    /// Where the heap begins, and the program break, at which it ends.
    pub(super) brk_start: u64,
    pub(super) brk: u64,
    /// What is mapped from now on is locked (mlockall(2), `MCL_FUTURE`).
    locks_new: bool,
}

/// Whether code is that of a random number generator (`task::fork_id`),
/// by its address.
#[derive(Default)]
pub struct KnownCallers {
    known: KernelCell<Vec<(u64, bool)>>,
}

impl KnownCallers {
    /// Callers that are remembered; all are forgotten for the next one.
    const MOST: usize = 32;

    /// What is known of an address.
    pub fn get(&self, address: u64) -> Option<bool> {
        let known = self.known.borrow_mut();
        known.iter().find(|(known, _)| *known == address).map(|&(_, is_generator)| is_generator)
    }

    /// Remembers an address.
    pub fn add(&self, address: u64, is_generator: bool) {
        let mut known = self.known.borrow_mut();
        if known.len() >= Self::MOST {
            known.clear();
        }
        known.push((address, is_generator));
    }

    fn forget(&self) {
        self.known.borrow_mut().clear();
    }
}

/// An area as `/proc/self/maps` shows it.
pub struct MappingView<'a> {
    /// The area.
    pub vma: &'a Vma,
    /// What stands in the last column.
    pub name: &'a [u8],
}

impl Default for AddressSpace {
    fn default() -> Self {
        Self::new()
    }
}

impl AddressSpace {
    /// An empty address space.
    pub fn new() -> Self {
        let vmas = VmaMap::empty();
        Self::with(State { vmas, mmap_top: GUEST_MAX, brk_start: 0, brk: 0, locks_new: false })
    }

    fn with(state: State) -> Self {
        Self {
            state: KernelCell::new(state),
            shown: KernelCell::new(BTreeMap::new()),
            absent: KernelCell::default(),
            stale: KernelCell::default(),
            left_out: KernelCell::default(),
            replaced: KernelCell::default(),
            replaced_awake: KernelCell::default(),
            image_numbers: KernelCell::default(),
            generator_callers: KnownCallers::default(),
            gate: Gate::default(),
        }
    }

    /// If an address lies in shared memory: what names the place, as device and
    /// inode number of the file, or zeros, and offset.
    pub fn shared_place(&self, address: u64) -> Option<(u64, u64, u64)> {
        let state = self.state.borrow_mut();
        let vma = state.vmas.find(address)?;
        if !vma.flags.contains(VmaFlags::SHARED) {
            return None;
        }
        let (device, inode) = vma.file.as_ref().map_or((0, 0), |file| (file.device, file.inode));
        Some((device, inode, vma.offset + (address - vma.start)))
    }

    /// The book-keeping of a copy, for a new process. The host copies the memory,
    /// that which the child is not to have (madvise(2), `MADV_DONTFORK`) too.
    pub fn fork(&self) -> Result<Self> {
        self.settle();
        let mut state = self.state.borrow_mut().clone();
        let dont_fork = state.vmas.iter().filter(|vma| vma.flags.contains(VmaFlags::DONT_FORK));
        let left_out: Vec<(u64, u64)> = dont_fork.map(|vma| (vma.start, vma.len())).collect();
        let mut absent = self.absent.borrow_mut().clone();
        for &(start, len) in &left_out {
            state.vmas.remove(start, start + len);
            absent.remove(start, start + len);
        }
        // mlock(2): locks are not inherited.
        state.locks_new = false;
        if state.vmas.iter().any(|vma| vma.flags.contains(VmaFlags::LOCKED)) {
            state.vmas.update(0, GUEST_MAX, |vma| vma.flags.remove(VmaFlags::LOCKED));
        }
        let mut copy = Self::with(state);
        copy.shared_anonymous().iter().for_each(shm::share);
        copy.gate = self.gate.copy();
        copy.absent = KernelCell::new(absent);
        for (&address, &page) in self.shown.borrow_mut().iter() {
            if copy.find(address).is_some() {
                copy.note_shown(address, page);
            }
        }
        copy.left_out = KernelCell::new(left_out);
        copy.replaced = KernelCell::new(self.replaced.borrow_mut().clone());
        copy.replaced_awake = KernelCell::new(self.replaced_awake.borrow_mut().clone());
        copy.image_numbers = KernelCell::new(*self.image_numbers.borrow_mut());
        Ok(copy)
    }

    /// Does what the host's fork does not: removes memory that the child is not to
    /// have, and wipes what it is to have empty (madvise(2), `MADV_WIPEONFORK`). Runs
    /// in the child.
    pub fn after_fork(&self) -> Result<()> {
        for (start, len) in core::mem::take(&mut *self.left_out.borrow_mut()) {
            Machine::unmap(GuestRange::new(start, len)?)?;
        }
        let wiped: Vec<Vma> = {
            let state = self.state.borrow_mut();
            let marked = state.vmas.iter().filter(|vma| vma.flags.contains(VmaFlags::WIPE_ON_FORK));
            marked.cloned().collect()
        };
        wiped.into_iter().try_for_each(|mut vma| self.map_on_host(&mut vma))
    }

    /// Notes that a mapping shows a page of the page store.
    pub fn note_shown(&self, address: u64, page: u64) {
        crate::state::kernel().pages.borrow_mut().share(page);
        let before = self.shown.borrow_mut().insert(address, page);
        if let Some(page) = before {
            crate::state::kernel().pages.borrow_mut().release(page);
        }
    }

    /// Forgets which pages mappings show, after a thaw: none is mapped.
    pub fn forget_shown(&self) {
        let shown = core::mem::take(&mut *self.shown.borrow_mut());
        for page in shown.into_values() {
            crate::state::kernel().pages.borrow_mut().release(page);
        }
    }

    /// Removes the pages of the page store from the mappings in a range.
    pub(super) fn hide(&self, start: u64, end: u64) {
        let hidden: Vec<(u64, u64)> = {
            let mut shown = self.shown.borrow_mut();
            let found: Vec<(u64, u64)> =
                shown.range(start..end).map(|(&at, &page)| (at, page)).collect();
            for (at, _) in &found {
                shown.remove(at);
            }
            found
        };
        for (address, page) in hidden {
            let _ = GuestRange::new(address, 4096).and_then(Machine::unmap);
            crate::state::kernel().pages.borrow_mut().release(page);
        }
    }

    /// The areas of shared anonymous memory.
    pub fn shared_anonymous(&self) -> Vec<Vma> {
        let state = self.state.borrow_mut();
        state.vmas.iter().filter(|vma| shm::is_shared_anonymous(vma)).cloned().collect()
    }

    /// Frees what nobody else maps of the shared anonymous memory, when the last process has ended or has left
    /// this memory.
    pub fn release_shared(&self) {
        for vma in self.shared_anonymous() {
            self.state.borrow_mut().vmas.remove(vma.start, vma.end);
            shm::release(&vma);
        }
    }

    /// Sets where mappings without a fixed address go: below `mmap_top`.
    pub fn set_mmap_top(&self, mmap_top: u64) {
        self.state.borrow_mut().mmap_top = mmap_top;
    }

    /// Removes everything (execve).
    pub fn clear(&self) -> Result<()> {
        self.settle();
        self.generator_callers.forget();
        self.hide(0, GUEST_MAX);
        let all = {
            let mut state = self.state.borrow_mut();
            state.locks_new = false;
            state.vmas.remove(0, GUEST_MAX)
        };
        for vma in all {
            recall(&vma, vma.start, vma.end);
            lazy::forget(vma.start, vma.end);
            Machine::unmap(vma.range()?)?;
            self.forget(&vma);
        }
        self.forget_provenance(0, GUEST_MAX);
        self.absent.borrow_mut().remove(0, GUEST_MAX);
        Ok(())
    }

    /// Frees what a removed area has used alone.
    pub(super) fn forget(&self, vma: &Vma) {
        if shm::is_shared_anonymous(vma) {
            shm::release(vma);
        }
        if let Some(pages) = vma.shared_upper() {
            pages.unmapped();
        }
    }

    /// Makes a mapping and returns its address.
    pub fn map(&self, request: MapRequest) -> Result<u64> {
        let len = page_align_up(request.len)
            .filter(|&len| len > 0 && len <= GUEST_MAX)
            .ok_or(Errno::ENOMEM)?;
        let start = self.place(request.placement, len)?;
        let end = start + len;
        let mut vma = Vma {
            start,
            end,
            prot: request.prot & PROT_MASK,
            flags: request.flags,
            file: request.file,
            offset: request.offset,
        };
        if self.locks_new() {
            vma.flags |= VmaFlags::LOCKED;
        }
        if vma.file.as_ref().is_some_and(|file| matches!(file.source, MmapSource::Zero)) {
            vma.file = None;
        }
        self.add(vma, matches!(request.placement, Placement::Fixed(_)))?;
        Ok(start)
    }

    /// Maps a new area, which replaces what is there, or comes where nothing is.
    pub(super) fn add(&self, mut vma: Vma, replaces: bool) -> Result<()> {
        self.state.borrow_mut().vmas.check_count(vma.start, vma.end, 1)?;
        let is_shared_anonymous = shm::is_shared_anonymous(&vma);
        if is_shared_anonymous {
            vma.offset = crate::state::kernel().shared_memory.take(vma.len())?;
        }
        let room = if replaces { self.make_room(&vma) } else { Ok(()) };
        let mapped = room.and_then(|()| self.map_on_host(&mut vma));
        if let Err(error) = mapped {
            if replaces {
                // What was there may be mapped on the host still.
                let _ = vma.range().and_then(Machine::unmap);
            }
            if is_shared_anonymous {
                shm::release(&vma);
            }
            return Err(error);
        }
        self.state.borrow_mut().vmas.insert(vma);
        Ok(())
    }

    /// Removes what a new area replaces. Other threads may use that until the new one is there (mmap(2):
    /// `MAP_FIXED` is atomic), so memory of the host is unmapped before only where the host's new mapping
    /// would not take its place, or somebody else may get it.
    fn make_room(&self, vma: &Vma) -> Result<()> {
        let is_whole = vma.upper().is_none();
        self.remove(vma.start, vma.end, &|replaced| is_whole && !shm::is_shared_anonymous(replaced))
    }

    pub(super) fn place(&self, placement: Placement, len: u64) -> Result<u64> {
        let mut state = self.state.borrow_mut();
        let mmap_top = state.mmap_top;
        let check_fixed = |at: u64| {
            if at & 4095 != 0 {
                Err(Errno::EINVAL)
            } else if at < GUEST_MIN {
                // As below vm.mmap_min_addr.
                Err(Errno::EPERM)
            } else if at.checked_add(len).is_none_or(|end| end > GUEST_MAX) {
                Err(Errno::ENOMEM)
            } else {
                Ok(at)
            }
        };
        let free_at = |hint: u64| {
            let at = hint & !4095;
            let is_free = at != 0 && check_fixed(at).is_ok() && state.vmas.is_free(at, at + len);
            is_free.then_some(at)
        };
        match placement {
            Placement::Fixed(at) => check_fixed(at),
            Placement::FixedNoReplace(at) => {
                let at = check_fixed(at)?;
                if state.vmas.is_free(at, at + len) { Ok(at) } else { Err(Errno::EEXIST) }
            }
            Placement::Low(hint) => free_at(hint)
                .filter(|at| at + len <= LOW_END)
                .or_else(|| state.vmas.find_free_below(LOW_END, len))
                .ok_or(Errno::ENOMEM),
            Placement::Hint(hint) => free_at(hint)
                .or_else(|| state.vmas.find_free_below(mmap_top, len))
                .or_else(|| state.vmas.find_free_below(GUEST_MAX, len))
                .ok_or(Errno::ENOMEM),
        }
    }

    /// Removes all mappings in a range; parts that are not mapped do not matter.
    pub fn unmap(&self, start: u64, len: u64) -> Result<()> {
        let end = check_range(start, len)?;
        self.state.borrow_mut().vmas.check_count(start, end, 0)?;
        self.remove(start, end, &|_| false)
    }

    /// Removes the areas of a range. The host keeps the mappings of those that `stays` says, for others that
    /// take their place at once.
    fn remove(&self, start: u64, end: u64, stays: &dyn Fn(&Vma) -> bool) -> Result<()> {
        self.settle();
        self.hide(start, end);
        let removed = self.state.borrow_mut().vmas.remove(start, end);
        for vma in &removed {
            recall(vma, vma.start, vma.end);
            lazy::forget(vma.start, vma.end);
            if !stays(vma) {
                Machine::unmap(vma.range()?)?;
            }
            self.forget(vma);
        }
        self.forget_provenance(start, end);
        self.absent.borrow_mut().remove(start, end);
        Ok(())
    }

    /// Makes the host mapping of an area.
    fn map_on_host(&self, vma: &mut Vma) -> Result<()> {
        self.settle();
        let end = map_on_host(vma).inspect_err(|_| self.note_nothing_there(vma))?;
        self.note_absent(vma, end);
        self.note_replaced(vma.start, vma.end, Provenance::Mapped);
        Ok(())
    }

    /// Notes that the host mapping of a range is not the one of the thaw any more. Whoever makes
    /// mappings from another file than the image, in this memory, says [`Provenance::Moved`]: a
    /// freeze would take pages that were not written since for the image's.
    pub fn note_replaced(&self, start: u64, end: u64, provenance: Provenance) {
        let generation = crate::state::generation();
        self.replaced.borrow_mut().note(generation, start, end, provenance);
        self.replaced_awake.borrow_mut().note(swap::epoch(), start, end, provenance);
    }

    pub(super) fn forget_provenance(&self, start: u64, end: u64) {
        self.replaced.borrow_mut().forget(start, end);
        self.replaced_awake.borrow_mut().forget(start, end);
    }

    /// The parts of an area, in order: start, end and where their pages come from.
    pub fn provenance(&self, vma: &Vma) -> Vec<(u64, u64, Provenance)> {
        self.replaced.borrow_mut().parts(crate::state::generation(), vma.start, vma.end)
    }

    /// The parts of an area of a sandbox that has been hibernated in this boot, as [`AddressSpace::provenance`],
    /// with the swap file in the image's place.
    pub fn provenance_awake(&self, vma: &Vma) -> Vec<(u64, u64, Provenance)> {
        self.replaced_awake.borrow_mut().parts(swap::epoch(), vma.start, vma.end)
    }

    /// Its number in the image that the sandbox is a copy of, if it was in that.
    pub fn number_in_image(&self) -> Option<u32> {
        self.image_numbers.borrow_mut().of_copy(crate::state::generation())
    }

    /// Notes its number in an image that is about to be made.
    pub fn set_number_in_next_image(&self, number: u32) {
        self.image_numbers.borrow_mut().set(crate::state::generation(), number);
    }

    /// mprotect(2).
    pub fn protect(&self, start: u64, len: u64, prot: u32) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let end = check_range(start, len)?;
        let covered_end;
        {
            let state = self.state.borrow_mut();
            state.vmas.check_change(start, end)?;
            covered_end = state.vmas.covered_end(start, end);
            for vma in state.vmas.overlapping(start, covered_end) {
                let shared_file =
                    vma.flags.contains(VmaFlags::SHARED).then_some(vma.file.as_ref()).flatten();
                if prot & PROT_WRITE != 0 && shared_file.is_some_and(|file| !file.writable) {
                    return Err(Errno::EACCES);
                }
            }
        }
        if covered_end > start {
            self.settle();
            lazy::map_range(start, covered_end);
            self.recall_shared(start, covered_end);
            for (from, to) in self.mapped_parts(start, covered_end) {
                Machine::protect(GuestRange::new(from, to - from)?, prot & PROT_MASK)?;
            }
            self.state
                .borrow_mut()
                .vmas
                .update(start, covered_end, |vma| vma.prot = prot & PROT_MASK);
        }
        // As Linux does: what lies before a hole has changed.
        if covered_end == end { Ok(()) } else { Err(Errno::ENOMEM) }
    }

    /// Takes the pages of shared mappings of upper-layer files in a range back
    /// into the page store.
    pub fn recall_shared(&self, start: u64, end: u64) {
        self.hide(start, end);
        let areas: Vec<Vma> = {
            let state = self.state.borrow_mut();
            let shared =
                state.vmas.overlapping(start, end).filter(|vma| vma.shared_upper().is_some());
            shared.cloned().collect()
        };
        areas.iter().for_each(|vma| recall(vma, start, end));
    }

    /// The parts of a range that exist on the host: everything except what is absent from
    /// mappings of an upper-layer file, or comes and goes by itself.
    pub(super) fn mapped_parts(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut parts: Vec<(u64, u64)> = Vec::new();
        let state = self.state.borrow_mut();
        for vma in state.vmas.overlapping(start, end).filter(|vma| vma.shared_upper().is_none()) {
            for (from, to) in self.present(vma.start.max(start), vma.end.min(end)) {
                match parts.last_mut() {
                    Some(last) if last.1 == from => last.1 = to,
                    _ => parts.push((from, to)),
                }
            }
        }
        parts
    }

    /// `MADV_DONTNEED` and `MADV_FREE`: anonymous memory reads as zeros again,
    /// file mappings show the file again.
    pub fn discard(&self, start: u64, end: u64) -> Result<()> {
        let areas: Vec<Vma> =
            self.state.borrow_mut().vmas.overlapping(start, end).cloned().collect();
        for vma in areas {
            let mut part =
                Vma { start: vma.start.max(start), end: vma.end.min(end), ..vma.clone() };
            part.offset += part.start - vma.start;
            if shm::is_shared_anonymous(&part) {
                // madvise(2): others still have the pages.
                continue;
            }
            lazy::forget(part.start, part.end);
            let replace = part.flags.contains(VmaFlags::FROM_IMAGE)
                || part
                    .file
                    .as_ref()
                    .is_some_and(|file| matches!(file.source, MmapSource::Upper(_)));
            if replace {
                self.map_on_host(&mut part)?;
            } else {
                Machine::discard(part.range()?)?;
            }
        }
        Ok(())
    }

    /// Whether any area that has pages in a range is such.
    pub fn any_in(&self, start: u64, end: u64, is_such: &dyn Fn(&Vma) -> bool) -> bool {
        self.state.borrow_mut().vmas.overlapping(start, end).any(is_such)
    }

    /// Whether every page of a range is mapped.
    pub fn covers(&self, start: u64, end: u64) -> bool {
        self.state.borrow_mut().vmas.covers(start, end)
    }

    /// Changes flags of all areas in a range; `EAGAIN` if there would be too many areas (madvise(2), mlock(2)).
    pub fn change_flags(&self, start: u64, end: u64, set: VmaFlags, clear: VmaFlags) -> Result<()> {
        let mut state = self.state.borrow_mut();
        state.vmas.check_change(start, end).map_err(|_| Errno::EAGAIN)?;
        state.vmas.update(start, end, |vma| vma.flags = (vma.flags | set) - clear);
        Ok(())
    }

    /// Locked bytes in a range (mlock(2)).
    pub fn locked(&self, start: u64, end: u64) -> u64 {
        let state = self.state.borrow_mut();
        let locked = state.vmas.overlapping(start, end);
        let locked = locked.filter(|vma| vma.flags.contains(VmaFlags::LOCKED));
        locked.map(|vma| vma.end.min(end) - vma.start.max(start)).sum()
    }

    /// Whether what is mapped from now on is locked.
    pub fn locks_new(&self) -> bool {
        self.state.borrow_mut().locks_new
    }

    /// Sets whether what is mapped from now on is locked.
    pub fn set_locks_new(&self, locks_new: bool) {
        self.state.borrow_mut().locks_new = locks_new;
    }

    /// The area that contains an address.
    pub fn find(&self, address: u64) -> Option<Vma> {
        self.state.borrow_mut().vmas.find(address).cloned()
    }

    /// Whether an address is in the vdso.
    pub fn is_in_vdso(&self, address: u64) -> bool {
        let state = self.state.borrow_mut();
        state.vmas.find(address).is_some_and(|vma| vma.flags.contains(VmaFlags::VDSO))
    }

    /// All areas.
    pub fn areas(&self) -> Vec<Vma> {
        self.state.borrow_mut().vmas.iter().cloned().collect()
    }

    /// Calls `emit` for every area, in order, as `/proc/self/maps` shows them.
    pub fn for_each_mapping(&self, emit: &mut dyn FnMut(&MappingView<'_>)) {
        let areas = self.areas();
        for parts in areas.chunk_by(Vma::goes_on_in) {
            let Some((first, last)) = parts.first().zip(parts.last()) else { continue };
            let vma = Vma { end: last.end, ..first.clone() };
            let name: &[u8] = match &vma.file {
                Some(file) => &file.path,
                None if vma.flags.contains(VmaFlags::STACK) => b"[stack]",
                None if vma.flags.contains(VmaFlags::HEAP) => b"[heap]",
                None if vma.flags.contains(VmaFlags::VDSO) => b"[vdso]",
                None => b"",
            };
            emit(&MappingView { vma: &vma, name });
        }
    }

    /// The sum of a number for each area.
    pub fn sum(&self, of: &dyn Fn(&Vma) -> u64) -> u64 {
        self.state.borrow_mut().vmas.iter().map(of).sum()
    }

    /// Bytes of areas that may be touched. Which pages are resident is known to the host alone, so these
    /// count as resident.
    pub fn resident(&self) -> u64 {
        self.sum(&|vma| if vma.prot == 0 { 0 } else { vma.len() })
    }

    /// Bytes of all areas.
    pub fn total(&self) -> u64 {
        self.state.borrow_mut().vmas.total()
    }
}

/// The end of a page range, `EINVAL` if it is not one of the guest's.
fn check_range(start: u64, len: u64) -> Result<u64> {
    if start & 4095 != 0 || len == 0 {
        return Err(Errno::EINVAL);
    }
    let end = page_align_up(len).and_then(|len| start.checked_add(len)).ok_or(Errno::EINVAL)?;
    if end > GUEST_MAX || start < GUEST_MIN { Err(Errno::EINVAL) } else { Ok(end) }
}

/// Takes back what a shared mapping of an upper-layer file has of a range.
fn recall(vma: &Vma, start: u64, end: u64) {
    if let Some(file) = vma.shared_upper() {
        file.recall(start.max(vma.start), end.min(vma.end));
    }
}
