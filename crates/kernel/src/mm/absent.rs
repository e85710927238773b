//! Pages that private mappings of upper-layer files do not have.
//!
//! A private mapping is a copy of the file, which the mapping takes when it is made. Pages behind the
//! end of the file are absent: the host has nothing there, and a touch is a `SIGBUS` (mmap(2)).
//! A file that becomes shorter takes pages away, also those that the program has written
//! ([`AddressSpace::cut_off`]). One that becomes longer gives them back when they are touched
//! ([`super::shared::page_in`]).
//!
//! Only the host process that has the memory can unmap pages. For another one they are noted as
//! stale, and it unmaps them when it comes into the kernel ([`AddressSpace::settle`]).

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::backing::UpperPages;
use super::provenance::Provenance;
use super::shared::move_in;
use super::vma::{Vma, VmaFlags};
use super::{AddressSpace, arena, lazy};
use crate::errno::{Errno, Result};
use crate::io::Sink;
use crate::platform::machine::{Machine, Memory};
use crate::platform::memory::GuestRange;

/// Ranges of addresses that do not overlap and do not touch.
#[derive(Clone, Default)]
pub(super) struct Ranges {
    /// End by start.
    ends: BTreeMap<u64, u64>,
}

impl Ranges {
    /// Adds a range, which may overlap others.
    pub fn insert(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        self.remove(start, end);
        let (mut start, mut end) = (start, end);
        if let Some((&before, &before_end)) = self.ends.range(..start).next_back()
            && before_end == start
        {
            start = before;
        }
        if let Some(behind_end) = self.ends.remove(&end) {
            end = behind_end;
        }
        self.ends.insert(start, end);
    }

    /// Removes a range; the parts of it that were there.
    pub fn remove(&mut self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let parts = self.inside(start, end);
        for &(from, to) in &parts {
            let Some((&at, &at_end)) = self.ends.range(..=from).next_back() else { continue };
            self.ends.remove(&at);
            for (left, left_end) in [(at, from), (to, at_end)] {
                if left < left_end {
                    self.ends.insert(left, left_end);
                }
            }
        }
        parts
    }

    /// The parts of a range that are in, in order.
    pub fn inside(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let first = self.ends.range(..=start).next_back().map_or(start, |(&at, _)| at);
        let near = self.ends.range(first..end.max(first));
        let parts = near.map(|(&from, &to)| (from.max(start), to.min(end)));
        parts.filter(|(from, to)| from < to).collect()
    }

    /// The parts of a range that are not in, in order.
    pub fn outside(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut parts = Vec::new();
        let mut at = start;
        for (from, to) in self.inside(start, end) {
            parts.push((at, from));
            at = to;
        }
        parts.push((at, end));
        parts.retain(|(from, to)| from < to);
        parts
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

impl AddressSpace {
    /// The parts of a range of one area that the host has, in order.
    pub fn present(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        self.absent.borrow_mut().outside(start, end)
    }

    /// Notes that `file` is `len` bytes long now, which is less than before: its pages behind
    /// that are to go from all mappings. Whether any of it is mapped.
    pub fn cut_off(&self, file: &dyn UpperPages, len: u64) -> bool {
        let state = self.state.borrow_mut();
        let mut is_mapped = false;
        for vma in state.vmas.iter() {
            let is_of_file =
                |upper: &&Arc<dyn UpperPages>| core::ptr::addr_eq(Arc::as_ptr(upper), file);
            if vma.upper().filter(is_of_file).is_none() {
                continue;
            }
            is_mapped = true;
            let from = end_of_file(vma, len);
            if !vma.flags.contains(VmaFlags::SHARED) {
                let gone = self.absent.borrow_mut().outside(from, vma.end);
                gone.iter().for_each(|&(at, end)| self.stale.borrow_mut().insert(at, end));
                self.absent.borrow_mut().insert(from, vma.end);
            } else if arena::is_shared()
                && self.shown.borrow_mut().range(from..vma.end.max(from)).next().is_some()
            {
                self.stale.borrow_mut().insert(from, vma.end);
            }
        }
        is_mapped
    }

    /// Whether there are pages to unmap that files have cut off.
    pub fn is_unsettled(&self) -> bool {
        !self.stale.borrow_mut().is_empty()
    }

    /// Unmaps pages that files have cut off. Runs in the host process that has this memory, before
    /// anything else is mapped or unmapped in it.
    pub fn settle(&self) {
        if !self.is_unsettled() {
            return;
        }
        let stale = core::mem::take(&mut *self.stale.borrow_mut());
        for (&start, &end) in &stale.ends {
            self.hide(start, end);
            lazy::forget(start, end);
            // Without room for that on the host, the program sees what it has had.
            let _ = GuestRange::new(start, end - start).and_then(Machine::unmap);
        }
    }

    /// Notes that the host has the pages of a fresh area up to `end` only.
    pub(super) fn note_absent(&self, vma: &Vma, end: u64) {
        let mut absent = self.absent.borrow_mut();
        absent.remove(vma.start, vma.end);
        if vma.upper().is_some() && !vma.flags.contains(VmaFlags::SHARED) {
            absent.insert(end, vma.end);
        }
    }

    /// Has the host have nothing of an area of which it could not make a mapping: what was there before
    /// may be gone, or a part of the new one be there.
    pub(super) fn note_nothing_there(&self, vma: &Vma) {
        if vma.upper().is_some() && !vma.flags.contains(VmaFlags::SHARED) {
            let _ = vma.range().and_then(Machine::unmap);
            self.absent.borrow_mut().insert(vma.start, vma.end);
        }
    }

    /// Notes that mremap(2) has moved memory of one area.
    pub(super) fn move_absent(&self, from: u64, len: u64, to: u64) {
        let mut absent = self.absent.borrow_mut();
        absent.remove(to, to + len);
        for (start, end) in absent.remove(from, from + len) {
            absent.insert(start - from + to, end - from + to);
        }
    }

    /// Brings in the page at `at` of a private mapping; `false` if it lies behind the end of the
    /// file.
    pub(super) fn copy_in(&self, vma: &Vma, file: &dyn UpperPages, at: u64) -> Result<bool> {
        let offset = vma.offset + (at - vma.start);
        if self.absent.borrow_mut().inside(at, at + 4096).is_empty() {
            // Another vCPU has brought it in meanwhile.
            return Ok(true);
        }
        if offset >= file.len() {
            return Ok(false);
        }
        let mut page = alloc::boxed::Box::new([0; 4096]);
        let mut sink = Sink::kernel(&mut page[..]);
        while sink.remaining() > 0 {
            let done = (4096 - sink.remaining()) as u64;
            if file.read_at(&mut sink, offset + done)? == 0 {
                break;
            }
        }
        move_in(at, &page, vma.prot)?;
        self.absent.borrow_mut().remove(at, at + 4096);
        self.note_replaced(at, at + 4096, Provenance::Mapped);
        Ok(true)
    }

    /// Moves the memory of parts of one area, by `distance`, to where nothing is; on an error
    /// nothing has moved.
    pub(super) fn move_parts(&self, parts: &[(u64, u64)], distance: u64) -> Result<()> {
        for (at, &(start, end)) in parts.iter().enumerate() {
            let Err(error) = move_part(start, end, distance) else { continue };
            for &(start, end) in &parts[..at] {
                let back = distance.wrapping_neg();
                let _ = move_part(start.wrapping_add(distance), end.wrapping_add(distance), back);
            }
            return Err(error);
        }
        Ok(())
    }
}

/// Moves memory of the host; on an error nothing has moved. One call moves a part of a single mapping, and an
/// area may have many: pages that were brought in, those of an image. So what cannot be moved as one is halved.
fn move_part(start: u64, end: u64, distance: u64) -> Result<()> {
    let range = |at: u64| GuestRange::new(at, end - start);
    let moved = Machine::move_pages(range(start)?, range(start.wrapping_add(distance))?);
    if moved != Err(Errno::EFAULT) || end - start == 4096 {
        return moved;
    }
    let middle = start + ((end - start) / 2).next_multiple_of(4096);
    move_part(start, middle, distance)?;
    move_part(middle, end, distance).inspect_err(|_| {
        let back = distance.wrapping_neg();
        let _ = move_part(start.wrapping_add(distance), middle.wrapping_add(distance), back);
    })
}

/// The address in an area behind the last page of its file of `len` bytes.
pub(super) fn end_of_file(vma: &Vma, len: u64) -> u64 {
    let bytes = len.checked_next_multiple_of(4096).unwrap_or(len).saturating_sub(vma.offset);
    vma.end.min(vma.start.saturating_add(bytes)).max(vma.start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_merge_and_are_cut() {
        let mut ranges = Ranges::default();
        assert!(ranges.is_empty());
        ranges.insert(5, 5);
        assert!(ranges.is_empty());
        ranges.insert(10, 20);
        ranges.insert(30, 40);
        ranges.insert(20, 30);
        assert_eq!(ranges.inside(0, 100), [(10, 40)]);
        assert_eq!(ranges.ends.len(), 1);
        assert_eq!(ranges.remove(15, 20), [(15, 20)]);
        assert_eq!(ranges.inside(0, 100), [(10, 15), (20, 40)]);
        assert_eq!(ranges.inside(12, 25), [(12, 15), (20, 25)]);
        assert_eq!(ranges.outside(0, 50), [(0, 10), (15, 20), (40, 50)]);
        assert_eq!(ranges.outside(12, 14), []);
        ranges.insert(5, 35);
        assert_eq!(ranges.inside(0, 100), [(5, 40)]);
        assert_eq!(ranges.remove(0, 100), [(5, 40)]);
        assert!(ranges.is_empty());
    }
}
