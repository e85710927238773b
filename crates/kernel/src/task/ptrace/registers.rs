//! Registers of a tracee (ptrace(2), `PTRACE_GETREGS`, `PTRACE_GETREGSET`, `PTRACE_PEEKUSER`).

use alloc::boxed::Box;
use alloc::vec::Vec;

use thaw_abi::layout::{GUEST_MAX, KERNEL_BASE};

use crate::errno::{Errno, Result};
use crate::platform::fpu::{self, FpuState, LEGACY_AND_HEADER};
use crate::platform::machine::{SystemCallSites, ThreadState};
use crate::platform::registers::{RETURN_FULL, USER_CS, USER_SS};
use crate::task::ptrace::watch::DebugRegisters;
use crate::task::signal::frame::checked_flags;
use crate::task::thread::Thread;

/// `struct user_regs_struct`.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
#[allow(missing_docs)]
pub struct UserRegisters {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rax: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub orig_rax: u64,
    pub rip: u64,
    pub cs: u64,
    pub rflags: u64,
    pub rsp: u64,
    pub ss: u64,
    pub fs_base: u64,
    pub gs_base: u64,
    /// ds, es, fs, gs.
    pub selectors: [u64; 4],
}

/// Bytes of `struct user_fpregs_struct`: the legacy area of the vector state.
const LEGACY: usize = 512;
/// Offset of xmm0 in the vector state.
const XMM: usize = 160;
/// Where the components that the system has enabled stand (`struct xstate_fx_sw_bytes`).
const SOFTWARE: usize = 464;
/// Where the components stand that are not in their initial state.
const PRESENT: usize = 512;
/// x87 and SSE.
const OF_LEGACY: u8 = 3;
const SSE: u8 = 2;

/// The general registers of a tracee that has stopped.
pub fn general(thread: &Thread) -> UserRegisters {
    let frame = thread.frame().get();
    UserRegisters {
        r15: frame.r15,
        r14: frame.r14,
        r13: frame.r13,
        r12: frame.r12,
        rbp: frame.rbp,
        rbx: frame.rbx,
        r11: frame.r11,
        r10: frame.r10,
        r9: frame.r9,
        r8: frame.r8,
        rax: frame.rax,
        rcx: frame.rcx,
        rdx: frame.rdx,
        rsi: frame.rsi,
        rdi: frame.rdi,
        orig_rax: frame.orig_rax,
        rip: thread.process.mm().gate.as_seen(frame.rip),
        cs: frame.cs,
        rflags: frame.rflags,
        rsp: frame.rsp,
        ss: frame.ss,
        fs_base: thread.context.fs_base(),
        gs_base: thread.context.gs_base(),
        selectors: [0; 4],
    }
}

/// Replaces them. `EIO` for what user code cannot have.
pub fn set_general(thread: &Thread, new: &UserRegisters) -> Result<()> {
    let old = general(thread);
    let selectors_fit = new.cs == USER_CS && new.ss == USER_SS && new.selectors == [0; 4];
    // The entries into the kernel would have to know of another base of `%gs`.
    let bases_fit = new.fs_base < GUEST_MAX && new.gs_base == old.gs_base;
    // A thread may have stopped in the kernel's part of the vdso.
    let may_be = |new: u64, old: u64| new == old || new < KERNEL_BASE;
    let is_of_guest = may_be(new.rip, old.rip) && may_be(new.rsp, old.rsp);
    if !selectors_fit || !bases_fit || !is_of_guest {
        return Err(Errno::EIO);
    }
    let frame = thread.frame();
    let mut registers = frame.get();
    if new.rip != old.rip {
        registers.rip = new.rip;
    }
    registers.r15 = new.r15;
    registers.r14 = new.r14;
    registers.r13 = new.r13;
    registers.r12 = new.r12;
    registers.rbp = new.rbp;
    registers.rbx = new.rbx;
    registers.r11 = new.r11;
    registers.r10 = new.r10;
    registers.r9 = new.r9;
    registers.r8 = new.r8;
    registers.rax = new.rax;
    registers.rcx = new.rcx;
    registers.rdx = new.rdx;
    registers.rsi = new.rsi;
    registers.rdi = new.rdi;
    registers.orig_rax = new.orig_rax;
    registers.rflags = checked_flags(new.rflags);
    registers.rsp = new.rsp;
    registers.how = RETURN_FULL;
    frame.set(registers);
    thread.context.set_fs_base(new.fs_base);
    Ok(())
}

/// The vector state of a tracee that has stopped, as `xsave` would write it.
pub fn vector(thread: &Thread) -> Vec<u8> {
    thread.context.save_fpu();
    let state = thread.context.fpu().borrow_mut();
    let mut bytes = state.bytes().to_vec();
    drop(state);
    bytes.resize(fpu::size().max(LEGACY_AND_HEADER), 0);
    // The low halves of xmm0–15 lie in the frame.
    let frame = thread.frame().get();
    bytes[XMM..XMM + 256].copy_from_slice(bytemuck::cast_slice(&frame.xmm));
    bytes[PRESENT] |= SSE;
    bytes[SOFTWARE..LEGACY].fill(0);
    bytes[SOFTWARE..SOFTWARE + 8].copy_from_slice(&fpu::components().to_le_bytes());
    bytes
}

/// The legacy part of it.
pub fn legacy_vector(thread: &Thread) -> Vec<u8> {
    let mut bytes = vector(thread);
    bytes.truncate(LEGACY);
    bytes[SOFTWARE..].fill(0);
    bytes
}

/// Replaces the vector state by what `xsave` would write, or by its legacy part; `EINVAL` for
/// anything shorter.
pub fn set_vector(thread: &Thread, new: &[u8]) -> Result<()> {
    let is_legacy = new.len() == LEGACY;
    if !is_legacy && new.len() < LEGACY_AND_HEADER {
        return Err(Errno::EINVAL);
    }
    let mut all = vector(thread);
    let len = new.len().min(all.len());
    all[..len].copy_from_slice(&new[..len]);
    if is_legacy {
        all[PRESENT] |= OF_LEGACY;
    }
    let mut state = FpuState::initial();
    let len = all.len().min(state.bytes().len());
    state.bytes_mut()[..len].copy_from_slice(&all[..len]);
    state.sanitize();
    let mut frame = thread.frame().get();
    match state.bytes()[PRESENT] & SSE {
        0 => frame.xmm = [[0; 2]; 16],
        _ => bytemuck::cast_slice_mut(&mut frame.xmm).copy_from_slice(&all[XMM..XMM + 256]),
    }
    *thread.context.fpu().borrow_mut() = state;
    thread.frame().set(frame);
    Ok(())
}

/// Bytes of `struct user`.
const USER_SIZE: u64 = 912;
/// Where the debug registers stand in it.
const DEBUG_REGISTERS: u64 = 848;

/// A word of `struct user`; `EIO` outside of it.
pub fn user_word(thread: &Thread, offset: u64) -> Result<u64> {
    let index = user_index(offset)?;
    if let Some(index) = debug_index(offset) {
        let word = thread.tracee.with(|tracing| Some(tracing.debug.as_deref()?.get(index)));
        return Ok(word.flatten().unwrap_or_else(|| DebugRegisters::new().get(index)));
    }
    let registers = general(thread);
    let words: &[u64] = bytemuck::cast_slice(core::slice::from_ref(&registers));
    Ok(words.get(index).copied().unwrap_or(0))
}

/// Replaces a word of `struct user`. Those that are no registers take nothing (`EIO`).
pub fn set_user_word(thread: &Thread, offset: u64, value: u64) -> Result<()> {
    let index = user_index(offset)?;
    let mut registers = general(thread);
    if let Some(word) =
        bytemuck::cast_slice_mut(core::slice::from_mut(&mut registers)).get_mut(index)
    {
        *word = value;
        return set_general(thread, &registers);
    }
    let index = debug_index(offset).ok_or(Errno::EIO)?;
    let outcome = thread.tracee.with(|tracing| {
        let debug = tracing.debug.get_or_insert_with(|| Box::new(DebugRegisters::new()));
        debug.set(index, value)
    });
    outcome.unwrap_or(Err(Errno::ESRCH))
}

fn debug_index(offset: u64) -> Option<usize> {
    Some((offset.checked_sub(DEBUG_REGISTERS)? / 8) as usize)
}

fn user_index(offset: u64) -> Result<usize> {
    let is_word = offset.is_multiple_of(8) && offset < USER_SIZE;
    if is_word { Ok((offset / 8) as usize) } else { Err(Errno::EIO) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::thread::current_arc;
    use crate::testing::Sandbox;

    #[test]
    fn what_user_code_cannot_have_is_refused() {
        let _sandbox = Sandbox::new();
        let thread = current_arc();
        let own = general(&thread);
        assert_eq!(set_general(&thread, &own), Ok(()));
        let refused = [
            UserRegisters { cs: 0x10, ..own },
            UserRegisters { selectors: [0x2b, 0, 0, 0], ..own },
            UserRegisters { rip: KERNEL_BASE, ..own },
            UserRegisters { rsp: u64::MAX, ..own },
            UserRegisters { fs_base: 1 << 63, ..own },
            UserRegisters { gs_base: own.gs_base + 8, ..own },
        ];
        for new in refused {
            assert_eq!(set_general(&thread, &new), Err(Errno::EIO), "{new:?}");
        }
        // Neither interrupts nor the rights of input and output can be taken.
        let flags = UserRegisters { rflags: u64::MAX, ..own };
        assert_eq!(set_general(&thread, &flags), Ok(()));
        assert_eq!(general(&thread).rflags & 0x3000, 0);
    }

    #[test]
    fn words_of_struct_user_are_registers_or_nothing() {
        let _sandbox = Sandbox::new();
        let thread = current_arc();
        let rbx = core::mem::offset_of!(UserRegisters, rbx) as u64;
        assert_eq!(set_user_word(&thread, rbx, 77), Ok(()));
        assert_eq!(user_word(&thread, rbx), Ok(77));
        assert_eq!(user_word(&thread, 3), Err(Errno::EIO));
        assert_eq!(user_word(&thread, USER_SIZE), Err(Errno::EIO));
        assert_eq!(user_word(&thread, DEBUG_REGISTERS), Ok(0));
        assert_eq!(set_user_word(&thread, DEBUG_REGISTERS, 0), Err(Errno::ESRCH), "nobody traces");
        assert_eq!(set_user_word(&thread, DEBUG_REGISTERS - 8, 1), Err(Errno::EIO));
    }

    #[test]
    fn vector_registers_come_back_as_they_were_written() {
        let _sandbox = Sandbox::new();
        let thread = current_arc();
        let mut all = vector(&thread);
        all[XMM..XMM + 256].fill(7);
        assert_eq!(set_vector(&thread, &all), Ok(()));
        assert_eq!(vector(&thread)[XMM..XMM + 256], [7; 256]);
        let legacy = legacy_vector(&thread);
        assert_eq!(legacy.len(), LEGACY);
        assert_eq!(set_vector(&thread, &legacy), Ok(()));
        assert_eq!(set_vector(&thread, &legacy[..500]), Err(Errno::EINVAL));
    }
}
