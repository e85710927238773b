//! The program break (brk(2)): the end of a process' heap.

use thaw_abi::layout::GUEST_MAX;

use super::AddressSpace;
use super::limits::GrowthLimits;
use super::space::{MapRequest, Placement};
use super::vma::VmaFlags;
use crate::platform::machine::{PROT_READ, PROT_WRITE};

impl AddressSpace {
    /// Sets where the heap begins.
    pub fn set_brk_start(&self, start: u64) {
        let mut state = self.state.borrow_mut();
        state.brk_start = start;
        state.brk = start;
    }

    /// Moves the program break; returns the break that is in force.
    pub fn brk(&self, wanted: u64, limits: GrowthLimits) -> u64 {
        let (start, old) = {
            let state = self.state.borrow_mut();
            (state.brk_start, state.brk)
        };
        let is_refused = |len| crate::state::kernel().check_commit(len).is_err();
        if wanted < start || wanted > GUEST_MAX || is_refused(wanted - start) {
            return old;
        }
        let (old_end, new_end) = (old.next_multiple_of(4096), wanted.next_multiple_of(4096));
        if new_end > old_end {
            let more = new_end - old_end;
            let is_too_much = wanted - start > limits.heap
                || limits.mapped.check(self, more, true).is_err()
                || self.locks_new() && limits.locked.check_growth(self, more).is_err();
            if is_too_much {
                return old;
            }
            let request = MapRequest {
                placement: Placement::FixedNoReplace(old_end),
                len: new_end - old_end,
                prot: PROT_READ | PROT_WRITE,
                flags: VmaFlags::HEAP,
                file: None,
                offset: 0,
            };
            if self.map(request).is_err() {
                return old;
            }
        } else if new_end < old_end && self.unmap(new_end, old_end - new_end).is_err() {
            return old;
        }
        self.state.borrow_mut().brk = wanted;
        wanted
    }
}
