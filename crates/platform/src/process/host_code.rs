//! Guest threads that are reading a clock, which they finish before anything is done with them.
//!
//! The guest's vdso calls the host's (vdso(7)) to read clocks, for some of them through the kernel's text. The
//! host's lies where the host has put it, in each host process that was not forked from the same one: a thread
//! that was interrupted in there, and went on in a copy, would go on in the void. One that had read the host's
//! clock, and added a copy's offset, would see time go backwards. So such a thread leaves all of this instruction
//! by instruction first.

use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use thaw_abi::layout::KERNEL_BASE;

use super::entry;
use super::fault::SIGUSR1;
use crate::registers::{Frame, TRAP_FLAG};

/// Instructions that a thread is given to leave: the host reads a clock with some fifty. One that is still in
/// there was not called by the guest's vdso, and nobody owes it anything.
const STEPS_MAX: u32 = 1000;

/// How far a thread is on its way out of such code.
pub(super) struct Leaving {
    /// It executes one instruction, and traps.
    is_stepping: AtomicBool,
    /// Instructions since it was last found elsewhere.
    steps: AtomicU32,
}

impl Leaving {
    pub(super) const fn new() -> Self {
        Self { is_stepping: AtomicBool::new(false), steps: AtomicU32::new(0) }
    }

    /// A thread is about to return, and something is to be done before: whether it returns at once, to execute
    /// one more instruction of reading a clock. `is_in_vdso` says whether it is in the guest's vdso.
    pub(super) fn steps(&self, frame: &Frame, is_in_vdso: bool) -> bool {
        let is_of_call = frame.orig_rax() != u64::MAX;
        if is_of_call || !is_in_vdso && !is_outside_of_guest(frame.rip()) {
            self.steps.store(0, Relaxed);
            return false;
        }
        let is_stepped_by_guest = frame.rflags() & TRAP_FLAG != 0;
        // One that has faulted would fault again.
        let is_interrupted = matches!(frame.signal(), 0 | SIGUSR1);
        if is_stepped_by_guest || !is_interrupted || self.steps.load(Relaxed) == STEPS_MAX {
            return false;
        }
        self.steps.fetch_add(1, Relaxed);
        self.is_stepping.store(true, Relaxed);
        frame.set_rflags(frame.rflags() | TRAP_FLAG);
        true
    }

    /// A thread has come into the kernel: whether it was to execute one instruction before, and needs attention
    /// as it did then.
    pub(super) fn end_step(&self, frame: &Frame) -> bool {
        let was_stepping = self.is_stepping.swap(false, Relaxed);
        if was_stepping {
            frame.set_rflags(frame.rflags() & !TRAP_FLAG);
        }
        was_stepping
    }
}

/// Whether `rip` is in the kernel's text or the host's vdso. The first instructions of a system call are not
/// meant: where these go on in a copy is known.
fn is_outside_of_guest(rip: u64) -> bool {
    rip >= KERNEL_BASE && !entry::is_in_guest_part(rip)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registers::{SIGSEGV, TrapFrame};
    use thaw_abi::layout::LAYOUT_END;

    #[test]
    fn a_thread_that_reads_a_clock_finishes_that_first() {
        let (leaving, frame) = (Leaving::new(), Frame::new(TrapFrame::at(0x1000, 0)));
        assert!(!leaving.steps(&frame, false));
        frame.set_rip(LAYOUT_END + 0x1234);
        assert!(leaving.steps(&frame, false) && frame.rflags() & TRAP_FLAG != 0);
        assert!(leaving.end_step(&frame) && frame.rflags() & TRAP_FLAG == 0);
        assert!(!leaving.end_step(&frame), "the next trap is the guest's");
        frame.set_rip(0x2000);
        assert!(leaving.steps(&frame, true) && leaving.end_step(&frame), "the guest's own goes on");
        assert!(!leaving.steps(&frame, false) && frame.rflags() & TRAP_FLAG == 0);
    }

    #[test]
    fn a_thread_that_does_not_leave_is_attended_to_all_the_same() {
        let (leaving, frame) = (Leaving::new(), Frame::new(TrapFrame::at(LAYOUT_END, 0)));
        let mut steps = 0;
        while leaving.steps(&frame, false) {
            steps += 1;
            leaving.end_step(&frame);
        }
        assert_eq!(steps, STEPS_MAX);
        assert!(!leaving.steps(&frame, false), "it stays in there");
        frame.set_rip(0x1000);
        assert!(!leaving.steps(&frame, false));
        frame.set_rip(LAYOUT_END);
        assert!(leaving.steps(&frame, false), "it has come again");
    }

    #[test]
    fn a_thread_that_returns_from_a_system_call_goes_nowhere_first() {
        let call = TrapFrame { orig_rax: 228, ..TrapFrame::at(0x1000, 0) };
        assert!(!Leaving::new().steps(&Frame::new(call), true));
    }

    #[test]
    fn a_thread_that_faults_meanwhile_is_told_once() {
        let (leaving, frame) = (Leaving::new(), Frame::new(TrapFrame::at(LAYOUT_END, 0)));
        assert!(leaving.steps(&frame, false) && leaving.end_step(&frame));
        frame.set_signal(SIGSEGV);
        assert!(!leaving.steps(&frame, false));
    }

    #[test]
    fn a_guest_that_steps_by_itself_goes_on_with_that() {
        let (leaving, frame) = (Leaving::new(), Frame::new(TrapFrame::at(LAYOUT_END, 0)));
        frame.set_rflags(TRAP_FLAG);
        assert!(!leaving.steps(&frame, false) && !leaving.end_step(&frame));
        assert_eq!(frame.rflags(), TRAP_FLAG);
    }
}
