//! mremap(2): mappings that move, grow and shrink.

use alloc::vec::Vec;

use thaw_abi::layout::{GUEST_MAX, GUEST_MIN};
use thaw_abi::page_align_up;

use super::AddressSpace;
use super::lazy;
use super::limits::GrowthLimits;
use super::provenance::Provenance;
use super::space::Placement;
use super::vma::Vma;
use crate::errno::{Errno, Result};
use crate::platform::machine::{Machine, Memory};
use crate::platform::memory::GuestRange;

/// How `mremap` may move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remap {
    /// Grow or shrink where it is.
    InPlace,
    /// `MREMAP_MAYMOVE`.
    MayMove,
    /// `MREMAP_FIXED`.
    Fixed(u64),
}

/// Where memory is that is asked to have another place or length; whole pages.
#[derive(Clone, Copy)]
struct Old {
    start: u64,
    len: u64,
}

impl Old {
    fn new(start: u64, len: u64) -> Result<Self> {
        let len = page_align_up(len).filter(|_| start & 4095 == 0).ok_or(Errno::EINVAL)?;
        start.checked_add(len).ok_or(Errno::EINVAL)?;
        Ok(Self { start, len })
    }

    fn end(self) -> u64 {
        self.start + self.len
    }

    /// `EINVAL` for a place that mremap(2) does not move it to.
    fn check_place(self, to: u64, len: u64) -> Result<()> {
        let is_guest = to >= GUEST_MIN && to.checked_add(len).is_some_and(|end| end <= GUEST_MAX);
        let overlaps = is_guest && to < self.end() && self.start < to + len;
        if to & 4095 == 0 && is_guest && !overlaps { Ok(()) } else { Err(Errno::EINVAL) }
    }
}

impl AddressSpace {
    /// mremap(2) for somebody who may lock as much as `limit` says.
    pub fn remap(
        &self,
        old: u64,
        old_len: u64,
        new_len: u64,
        how: Remap,
        limits: GrowthLimits,
    ) -> Result<u64> {
        let old = Old::new(old, old_len)?;
        let new_len = page_align_up(new_len).filter(|&len| len > 0 && len <= GUEST_MAX);
        let new_len = new_len.ok_or(Errno::EINVAL)?;
        let first = self.find(old.start).ok_or(Errno::EFAULT)?;
        if old.len == 0 {
            // Duplicating a shared mapping needs pages that two mappings share.
            return Err(Errno::EINVAL);
        }
        let parts = self.state.borrow_mut().vmas.within_one(old.start, old.end());
        let parts = parts.ok_or(Errno::EFAULT)?;
        if new_len > old.len {
            limits.check(self, &first, new_len - old.len)?;
        }
        let to = match how {
            Remap::Fixed(to) => {
                old.check_place(to, new_len)?;
                self.check_parts(old, &parts)?;
                self.unmap(to, new_len)?;
                to
            }
            _ if self.resize_in_place(old, new_len)? => return Ok(old.start),
            Remap::InPlace => return Err(Errno::ENOMEM),
            Remap::MayMove => {
                self.check_parts(old, &parts)?;
                self.place(Placement::Hint(0), new_len)?
            }
        };
        let kept = old.len.min(new_len);
        if let Some(last) = parts.last().filter(|_| new_len > kept) {
            // First of all, since it may fail.
            self.extend(&moved(last, old.start, to), to + kept, to + new_len)?;
        }
        self.relocate(old, parts, to, kept)?;
        Ok(to)
    }

    /// `ENOMEM` if there would be too many areas once parts have moved, and one was added.
    fn check_parts(&self, old: Old, parts: &[Vma]) -> Result<()> {
        self.state.borrow_mut().vmas.check_count(old.start, old.end(), parts.len() + 1)
    }

    /// Makes memory as long as it is to be where it is; `false`: it cannot grow there.
    fn resize_in_place(&self, old: Old, new_len: u64) -> Result<bool> {
        let new_end = old.start + new_len;
        if new_len < old.len {
            self.unmap(new_end, old.end() - new_end)?;
        }
        if new_len > old.len {
            let last = self.find(old.end() - 1).ok_or(Errno::EFAULT)?;
            if old.end() != last.end || !self.can_extend(old.end(), new_end) {
                return Ok(false);
            }
            self.extend(&last, old.end(), new_end)?;
        }
        Ok(true)
    }

    /// Moves the first `kept` bytes of memory, of which `parts` are the areas, to where nothing is, and
    /// removes the others.
    fn relocate(&self, old: Old, parts: Vec<Vma>, to: u64, kept: u64) -> Result<()> {
        let (start, cut) = (old.start, old.start + kept);
        self.settle();
        lazy::map_range(start, old.end());
        self.recall_shared(start, old.end());
        self.move_parts(&self.mapped_parts(start, cut), to.wrapping_sub(start))?;
        self.move_absent(start, kept, to);
        self.absent.borrow_mut().remove(start, old.end());
        self.state.borrow_mut().vmas.remove(start, old.end());
        self.forget_provenance(start, old.end());
        self.note_replaced(to, to + kept, Provenance::Moved);
        if old.end() > cut {
            Machine::unmap(GuestRange::new(cut, old.end() - cut)?)?;
        }
        for part in parts {
            if part.start < cut {
                let moved = moved(&part.part(start, cut), start, to);
                self.state.borrow_mut().vmas.insert(moved);
            }
            if part.end > cut {
                self.forget(&part.part(cut, old.end()));
            }
        }
        Ok(())
    }

    fn can_extend(&self, from: u64, to: u64) -> bool {
        to <= GUEST_MAX && self.state.borrow_mut().vmas.is_free(from, to)
    }

    /// Lets an area grow: more of the same file, or zeros.
    fn extend(&self, vma: &Vma, from: u64, to: u64) -> Result<()> {
        // Of shared anonymous memory, what lies behind the old offsets belongs to others.
        let offset = vma.offset + (from - vma.start);
        self.add(Vma { start: from, end: to, offset, ..vma.clone() }, false)
    }
}

/// An area that has moved with its range, from `start` to `to`.
fn moved(area: &Vma, start: u64, to: u64) -> Vma {
    Vma { start: area.start - start + to, end: area.end - start + to, ..area.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mm::space::MapRequest;
    use crate::mm::vma::{AREAS_MAX, VmaFlags};
    use crate::platform::user::UserAddress;
    use crate::testing::Sandbox;

    const HERE: u64 = 0x7000_0000_0000;
    const PAGE: u64 = 4096;

    #[test]
    fn what_cannot_move_at_the_bound_stays_as_it_is() {
        let _sandbox = Sandbox::new();
        let mm = AddressSpace::new();
        let request = MapRequest {
            placement: Placement::FixedNoReplace(HERE),
            len: 2 * PAGE,
            prot: 3,
            flags: VmaFlags::empty(),
            file: None,
            offset: 0,
        };
        assert_eq!(mm.map(request), Ok(HERE));
        UserAddress(HERE).write(b"kept").unwrap();
        let vma = mm.find(HERE).unwrap();
        // The host knows nothing of these.
        for n in 2..AREAS_MAX as u64 {
            let start = HERE + n * 4 * PAGE;
            let other = Vma { start, end: start + PAGE, prot: 0, ..vma.clone() };
            mm.state.borrow_mut().vmas.insert(other);
        }
        // In the way of what would grow.
        let next = Vma { start: HERE + 2 * PAGE, end: HERE + 3 * PAGE, prot: 1, ..vma };
        mm.state.borrow_mut().vmas.insert(next);
        let limits = GrowthLimits::NONE;
        let moved = mm.remap(HERE, 2 * PAGE, 4 * PAGE, Remap::MayMove, limits);
        assert_eq!(moved, Err(Errno::ENOMEM));
        assert_eq!(UserAddress(HERE).read::<[u8; 4]>().unwrap(), *b"kept");
        assert_eq!(mm.remap(HERE, 2 * PAGE, PAGE, Remap::MayMove, limits), Ok(HERE), "shorter");
        assert_eq!(mm.unmap(HERE, PAGE), Ok(()));
    }
}
