//! Debug registers of a tracee (`PTRACE_POKEUSER`; Intel SDM vol. 3, 18.2): watchpoints and breakpoints.
//!
//! The host gives its own to nobody without ptrace(2). So a tracee that has some steps through its
//! instructions, and after each of them it is looked whether what is watched has another value, or whether
//! the next instruction is one to stop at. Its tracer hears of nothing else.

use thaw_abi::layout::GUEST_MAX;

use super::Mode;
use crate::errno::{Errno, Result};
use crate::platform::registers::{Frame, RETURN_FULL, TRAP_FLAG};
use crate::platform::user::UserAddress;
use crate::task::thread::Thread;

/// Registers with addresses.
const COUNT: usize = 4;
const STATUS: usize = 6;
const CONTROL: usize = 7;
/// Bits of the status that are always set.
const STATUS_RESERVED: u64 = 0xffff_0ff0;
/// A step has ended.
const STATUS_STEP: u64 = 1 << 14;
/// What the first register watches starts here in the control register, four bits for each.
const CONTROL_KINDS: usize = 16;
/// `TRAP_HWBKPT`.
const TRAP_HARDWARE: i32 = 4;

#[derive(Debug)]
pub(super) struct DebugRegisters {
    words: [u64; 8],
    /// What was watched had this value.
    seen: [u64; COUNT],
}

/// What a register watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Watch {
    Instruction(u64),
    Value { at: u64, len: usize },
}

impl DebugRegisters {
    pub(super) const fn new() -> Self {
        let mut words = [0; 8];
        words[STATUS] = STATUS_RESERVED;
        Self { words, seen: [0; COUNT] }
    }

    pub(super) fn get(&self, index: usize) -> u64 {
        self.words[index]
    }

    /// Replaces a register; `EINVAL` for what cannot be watched, reads among it.
    pub(super) fn set(&mut self, index: usize, value: u64) -> Result<()> {
        match index {
            0..COUNT if value >= GUEST_MAX => return Err(Errno::EINVAL),
            0..COUNT | STATUS | CONTROL => {}
            _ => return Err(Errno::EIO),
        }
        let before = core::mem::replace(&mut self.words[index], value);
        let outcome = (0..COUNT).try_for_each(|index| self.watch(index).map(drop));
        if outcome.is_err() {
            self.words[index] = before;
        }
        outcome
    }

    fn is_in_use(&self) -> bool {
        (0..COUNT).any(|index| self.is_enabled(index))
    }

    fn is_enabled(&self, index: usize) -> bool {
        self.words[CONTROL] >> (2 * index) & 3 != 0
    }

    /// What a register watches, if it is enabled.
    fn watch(&self, index: usize) -> Result<Option<Watch>> {
        if !self.is_enabled(index) {
            return Ok(None);
        }
        let kind = self.words[CONTROL] >> (CONTROL_KINDS + 4 * index) & 15;
        let at = self.words[index];
        let len = [1, 2, 8, 4][kind as usize >> 2];
        match kind & 3 {
            0 if len == 1 => Ok(Some(Watch::Instruction(at))),
            1 if at.is_multiple_of(len as u64) => Ok(Some(Watch::Value { at, len })),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Looks at what is watched, with the running thread at an instruction. The bits of the registers for
    /// which there is news.
    fn look(&mut self, rip: u64) -> u64 {
        let mut news = 0;
        for index in 0..COUNT {
            let has_news = match self.watch(index) {
                Ok(Some(Watch::Instruction(at))) => at == rip,
                Ok(Some(Watch::Value { at, len })) => self.has_changed(index, at, len),
                _ => false,
            };
            news |= u64::from(has_news) << index;
        }
        news
    }

    fn has_changed(&mut self, index: usize, at: u64, len: usize) -> bool {
        let mut bytes = [0; 8];
        if UserAddress(at).read_bytes(&mut bytes[..len]).is_err() {
            return false;
        }
        let value = u64::from_ne_bytes(bytes);
        core::mem::replace(&mut self.seen[index], value) != value
    }
}

/// The running thread goes on, its tracer may have changed what it watches: it steps if it watches
/// anything.
pub(super) fn begin(thread: &Thread) {
    let rip = thread.frame().rip();
    let watches = thread.tracee.with(|tracing| {
        let debug = tracing.debug.as_deref_mut().filter(|debug| debug.is_in_use())?;
        Some(debug.look(rip))
    });
    if watches.flatten().is_some() {
        go_on(thread);
    }
}

/// The running thread, which may have lost its trap flag, goes on to step if it watches anything.
pub(super) fn go_on(thread: &Thread) {
    let frame = thread.frame();
    if frame.rflags() & TRAP_FLAG != 0 {
        return;
    }
    let watches = thread.tracee.with(|tracing| {
        let watches = tracing.debug.as_deref().is_some_and(DebugRegisters::is_in_use);
        tracing.has_trap_flag |= watches;
        watches
    });
    if watches == Some(true) {
        frame.set_rflags(frame.rflags() | TRAP_FLAG);
        frame.set_how(RETURN_FULL);
    }
}

/// What a traced thread does about an instruction that it has executed with the trap flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stepped {
    /// Its tracer hears of it, with this code.
    Stops(i32),
    /// It goes on.
    GoesOn,
}

/// The running thread has executed an instruction with the trap flag, which the host tells with a code.
pub fn stepped(thread: &Thread, frame: &Frame, code: i32) -> Stepped {
    let has_flag = thread.tracee.with(|tracing| tracing.has_trap_flag) == Some(true);
    if core::mem::take(&mut *thread.tracee.still_steps.borrow_mut()) && !has_flag {
        frame.set_rflags(frame.rflags() & !TRAP_FLAG);
        return Stepped::GoesOn;
    }
    let outcome = thread.tracee.with(|tracing| {
        let is_step = tracing.mode == Mode::Step || !tracing.has_trap_flag;
        let Some(debug) = tracing.debug.as_deref_mut() else { return Stepped::Stops(code) };
        let news = debug.look(frame.rip());
        match (news, is_step) {
            (0, false) => return Stepped::GoesOn,
            (_, true) => debug.words[STATUS] = STATUS_RESERVED | STATUS_STEP | news,
            (_, false) => debug.words[STATUS] = STATUS_RESERVED | news,
        }
        Stepped::Stops(if is_step { code } else { TRAP_HARDWARE })
    });
    if outcome == Some(Stepped::GoesOn) {
        // popf may have taken the flag away.
        go_on(thread);
    }
    outcome.unwrap_or(Stepped::Stops(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_register_watches_an_instruction_or_a_value() {
        let mut debug = DebugRegisters::new();
        assert_eq!((debug.set(1, 0x2008), debug.set(0, 0x1001)), (Ok(()), Ok(())));
        assert!(!debug.is_in_use());
        // The first one an instruction, the second one eight bytes.
        assert_eq!(debug.set(CONTROL, 0b1001 << 20 | 0b101), Ok(()));
        assert!(debug.is_in_use());
        assert_eq!(debug.watch(0), Ok(Some(Watch::Instruction(0x1001))));
        assert_eq!(debug.watch(1), Ok(Some(Watch::Value { at: 0x2008, len: 8 })));
        assert_eq!((debug.watch(2), debug.set(1, 0x2004)), (Ok(None), Err(Errno::EINVAL)));
        assert_eq!((debug.get(1), debug.get(STATUS)), (0x2008, STATUS_RESERVED));
    }

    #[test]
    fn what_cannot_be_watched_is_refused() {
        let mut debug = DebugRegisters::new();
        assert_eq!(debug.set(0, GUEST_MAX), Err(Errno::EINVAL));
        assert_eq!((debug.set(4, 0), debug.set(5, 0)), (Err(Errno::EIO), Err(Errno::EIO)));
        assert_eq!(debug.set(0, 0x1001), Ok(()));
        // Reads, ports, long instructions, values that are not aligned.
        for kind in [0b0011, 0b0010, 0b1100, 0b1101] {
            assert_eq!(debug.set(CONTROL, kind << 16 | 1), Err(Errno::EINVAL), "{kind:#b}");
        }
        assert_eq!(debug.get(CONTROL), 0);
        assert_eq!(debug.set(CONTROL, 0b0001 << 16 | 1), Ok(()), "one byte");
        assert_eq!(debug.set(CONTROL, 0), Ok(()));
    }
}
