//! The signal frame on the guest's stack: `struct rt_sigframe` of the x86-64
//! ABI (arch/x86/include/asm/sigframe.h), and the way back from it.

use thaw_abi::layout::KERNEL_BASE;

use super::{
    Action, AlternateStack, SS_AUTODISARM, SS_DISABLE, SS_ONSTACK, SignalInfo, UNBLOCKABLE,
};
use crate::errno::{Errno, Result};
use crate::platform::fpu::{self, FpuState};
use crate::platform::machine::{SystemCallSites, ThreadState};
use crate::platform::registers::{
    Frame, INITIAL_RFLAGS, MachineContext, RETURN_FULL, TrapFrame, USER_CS, USER_SS,
};
use crate::platform::user::UserAddress;
use crate::task::host_process::own_space;
use crate::task::thread::{Thread, current};

/// `ucontext_t` with the kernel's 8-byte signal set.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct UserContext {
    machine: MachineContext,
    reserved: [u64; 8],
    mask: u64,
}

#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct SignalFrame {
    /// Return address of the handler: the restorer.
    restorer: u64,
    context: UserContext,
    info: SignalInfo,
}

const _: () = assert!(size_of::<UserContext>() == 304);
const _: () = assert!(size_of::<SignalFrame>() == 8 + 304 + 128);

/// `UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS`.
const CONTEXT_FLAGS: u64 = 7;
/// `FP_XSTATE_MAGIC1`, at offset 464 of the vector state.
const XSTATE_MAGIC1: u32 = 0x4650_5853;
/// `FP_XSTATE_MAGIC2`, behind the vector state.
const XSTATE_MAGIC2: u32 = 0x4650_5845;
/// Offset of xmm0 in the vector state.
const XMM_OFFSET: usize = 160;
/// Flags that sigreturn may change: CF PF AF ZF SF TF DF OF RF AC.
const USER_RFLAGS: u64 = 0x5_0dd5 | 0x1_0000;
/// DF, RF and TF are clear when a handler starts.
const HANDLER_CLEARS: u64 = 0x400 | 0x1_0000 | 0x100;
/// End of the addresses that user code can run at (`TASK_SIZE_MAX`); `iretq` to
/// what is no address would fault in the kernel.
const ADDRESSES_END: u64 = 0x7fff_ffff_f000;
/// Bytes below the stack pointer that the ABI lets functions use.
const RED_ZONE: u64 = 128;

fn is_on(stack: &AlternateStack, rsp: u64) -> bool {
    rsp > stack.base && rsp - stack.base <= stack.size
}

/// The alternate stack as sigaltstack(2) reports it.
pub fn reported_stack(stack: &AlternateStack, rsp: u64) -> AlternateStack {
    let mut reported = *stack;
    if stack.size == 0 || stack.flags & SS_DISABLE != 0 {
        reported.flags = SS_DISABLE;
    } else if is_on(stack, rsp) && stack.flags & SS_AUTODISARM == 0 {
        reported.flags = SS_ONSTACK;
    }
    reported
}

/// Saves the interrupted state on the guest's stack and makes the registers start the
/// handler.
pub fn push_frame(
    thread: &Thread,
    registers: &Frame,
    action: &Action,
    info: &SignalInfo,
    mask: u64,
) -> Result<()> {
    let mut frame = registers.get();
    let alternate = thread.signals.borrow_mut().alternate_stack;
    let enabled = alternate.size != 0 && alternate.flags & SS_DISABLE == 0;
    let already_there =
        enabled && is_on(&alternate, frame.rsp) && alternate.flags & SS_AUTODISARM == 0;
    let mut top = if action.flags & Action::ONSTACK != 0 && enabled && !already_there {
        alternate.base.wrapping_add(alternate.size)
    } else {
        frame.rsp.wrapping_sub(RED_ZONE)
    };

    // The vector state, then the frame so that the handler finds its stack
    // aligned as after a call.
    let size = fpu::size();
    top = (top.wrapping_sub(size as u64 + 4)) & !63;
    let fpstate = UserAddress(top);
    save_vector_state(thread, &mut frame, fpstate)?;
    let at = UserAddress((top.wrapping_sub(size_of::<SignalFrame>() as u64) & !15).wrapping_sub(8));
    let overflows = already_there && !is_on(&alternate, at.0);
    if overflows {
        return Err(Errno::EFAULT);
    }

    let machine = MachineContext {
        flags: CONTEXT_FLAGS,
        stack: bytemuck::cast(reported_stack(&alternate, frame.rsp)),
        rip: own_space().gate.as_seen(frame.rip),
        segments: USER_CS | USER_SS << 48,
        error: frame.error,
        trap: frame.trap,
        old_mask: mask,
        cr2: if frame.signal != 0 { frame.address } else { 0 },
        fpstate: fpstate.0,
        ..MachineContext::of(&frame)
    };
    let context = UserContext { machine, reserved: [0; 8], mask };
    at.write(&SignalFrame { restorer: action.restorer, context, info: *info })?;
    if alternate.flags & SS_AUTODISARM != 0 && action.flags & Action::ONSTACK != 0 {
        thread.signals.borrow_mut().alternate_stack =
            AlternateStack { flags: SS_DISABLE, ..Default::default() };
    }

    frame.rdi = info.signal.number() as u64;
    frame.rsi = at.offset(core::mem::offset_of!(SignalFrame, info) as u64).0;
    frame.rdx = at.offset(core::mem::offset_of!(SignalFrame, context) as u64).0;
    frame.rax = 0;
    frame.rsp = at.0;
    frame.rip = action.handler;
    frame.rflags &= !HANDLER_CLEARS;
    frame.orig_rax = u64::MAX;
    frame.how = RETURN_FULL;
    if frame.rip >= thaw_abi::layout::GUEST_MAX {
        return Err(Errno::EFAULT);
    }
    registers.set(frame);
    Ok(())
}

/// Writes the guest's vector state to guest memory and leaves the registers in
/// the initial state, as a handler finds them.
fn save_vector_state(thread: &Thread, frame: &mut TrapFrame, to: UserAddress) -> Result<()> {
    let mut state = thread.context.fpu().borrow_mut();
    state.save();
    let size = fpu::size();
    let bytes = state.bytes_mut();
    // The low halves of xmm0–15 are the kernel's at the moment.
    bytes[XMM_OFFSET..XMM_OFFSET + 256].copy_from_slice(bytemuck::cast_slice(&frame.xmm));
    bytes[512] |= 2;
    // struct _fpx_sw_bytes: what follows the legacy area.
    bytes[464..512].fill(0);
    bytes[464..468].copy_from_slice(&XSTATE_MAGIC1.to_le_bytes());
    bytes[468..472].copy_from_slice(&(size as u32 + 4).to_le_bytes());
    bytes[472..480].copy_from_slice(&fpu::components().to_le_bytes());
    bytes[480..484].copy_from_slice(&(size as u32).to_le_bytes());
    to.write_bytes(&bytes[..size])?;
    to.offset(size as u64).write(&XSTATE_MAGIC2)?;
    *state = FpuState::initial();
    state.load();
    frame.xmm = [[0; 2]; 16];
    Ok(())
}

/// Takes the vector state from guest memory into the registers.
fn restore_vector_state(thread: &Thread, frame: &mut TrapFrame, from: UserAddress) -> Result<()> {
    let mut state = thread.context.fpu().borrow_mut();
    *state = FpuState::initial();
    if !from.is_null() {
        let mut marks = [0u32; 2];
        from.offset(464).read_bytes(bytemuck::cast_slice_mut(&mut marks))?;
        // A frame that was frozen on a processor with fewer components is shorter.
        let size = (marks[1] as usize).saturating_sub(4);
        let extended = marks[0] == XSTATE_MAGIC1
            && (fpu::LEGACY_AND_HEADER..=fpu::size()).contains(&size)
            && from.offset(size as u64).read::<u32>() == Ok(XSTATE_MAGIC2);
        if extended {
            from.read_bytes(&mut state.bytes_mut()[..size])?;
        } else {
            // An fxsave image: x87 and SSE only.
            from.read_bytes(&mut state.bytes_mut()[..512])?;
            state.bytes_mut()[512] = 3;
        }
        state.sanitize();
    }
    let sse_in_use = state.bytes()[512] & 2 != 0;
    if sse_in_use {
        bytemuck::cast_slice_mut(&mut frame.xmm)
            .copy_from_slice(&state.bytes()[XMM_OFFSET..XMM_OFFSET + 256]);
    } else {
        frame.xmm = [[0; 2]; 16];
    }
    state.load();
    Ok(())
}

/// rt_sigreturn(2): takes everything back from the frame that `push_frame` made.
/// A frame that cannot be used ends the process with `SIGSEGV`.
pub fn sigreturn() {
    let thread = current();
    // The handler's `ret` has popped the restorer's address.
    let context = UserAddress(thread.frame().rsp().wrapping_sub(8))
        .offset(core::mem::offset_of!(SignalFrame, context) as u64);
    let Ok(context) = context.read::<UserContext>() else { bad_frame() };
    let machine = context.machine;
    let mut frame = machine.to_frame();
    // A guest may have been interrupted in kernel text: in the first
    // instructions of a system call, or in a function of the vdso, which goes on
    // into the host's. Its stack never lies where the kernel's do: a
    // fault with such a stack is one of the kernel.
    if machine.rip >= ADDRESSES_END
        || machine.rsp >= KERNEL_BASE
        || restore_vector_state(&thread, &mut frame, UserAddress(machine.fpstate)).is_err()
    {
        bad_frame()
    }
    frame.rip = own_space().gate.relocated(machine.rip);
    frame.rflags = checked_flags(machine.eflags);
    thread.frame().set(frame);
    let mut signals = thread.signals.borrow_mut();
    signals.mask = context.mask & !UNBLOCKABLE;
    let mut stack: AlternateStack = bytemuck::cast(machine.stack);
    if !is_on(&stack, machine.rsp) || stack.flags & SS_AUTODISARM != 0 {
        stack.flags &= SS_AUTODISARM | SS_DISABLE;
        signals.alternate_stack = stack;
    }
    drop(signals);
    thread.needs_attention();
}

/// Flags that a thread may have, of those that a tracer wants it to.
pub fn checked_flags(wanted: u64) -> u64 {
    (wanted & USER_RFLAGS) | INITIAL_RFLAGS
}

fn bad_frame() -> ! {
    crate::task::exit::killed_by(super::SIGSEGV)
}
