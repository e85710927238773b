//! Registers of guest threads, and their layout in memory.
#![allow(unsafe_code)]

use core::cell::Cell;

/// Registers of interrupted code. The first 21 words are in the order of
/// `struct user_regs_struct`.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct TrapFrame {
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
    /// System call number, or -1 if the frame is not of a system call.
    pub orig_rax: u64,
    pub rip: u64,
    pub cs: u64,
    pub rflags: u64,
    pub rsp: u64,
    pub ss: u64,
    /// [`RETURN_FAST`] or [`RETURN_FULL`].
    pub how: u64,
    /// Host signal that brought us here, 0 for the direct entry.
    pub signal: u32,
    /// `si_code` of the host signal.
    pub code: i32,
    /// `si_addr` of the host signal.
    pub address: u64,
    /// Trap number of the processor.
    pub trap: u64,
    /// Error code of the processor.
    pub error: u64,
    pub xmm: [[u64; 2]; 16],
}

/// Return as from `syscall`: rcx and r11 hold where and with which flags.
pub const RETURN_FAST: u64 = 0;
/// Restore every register, with `iretq`.
pub const RETURN_FULL: u64 = 1;

/// Code segment of 64-bit user mode.
pub const USER_CS: u64 = 0x33;
/// Stack segment of user mode.
pub const USER_SS: u64 = 0x2b;
/// Flag of alignment checks (`AC`, Intel SDM vol. 1, 3.4.3.3).
pub const ALIGNMENT_CHECK: u64 = 1 << 18;
/// Flag with which the processor traps after every instruction (`TF`).
pub const TRAP_FLAG: u64 = 1 << 8;
/// Trap number of a step (`#DB`).
pub const DEBUG_EXCEPTION: u64 = 1;
/// The architecture, as seccomp(2) and ptrace(2) name it (`AUDIT_ARCH_X86_64`).
pub const AUDIT_ARCH: u32 = 0xc000_003e;
/// Flags of a new thread: interrupts enabled, as user code always sees them.
pub const INITIAL_RFLAGS: u64 = 0x202;

impl TrapFrame {
    /// All registers zero.
    pub const fn zeroed() -> Self {
        TrapFrame {
            r15: 0,
            r14: 0,
            r13: 0,
            r12: 0,
            rbp: 0,
            rbx: 0,
            r11: 0,
            r10: 0,
            r9: 0,
            r8: 0,
            rax: 0,
            rcx: 0,
            rdx: 0,
            rsi: 0,
            rdi: 0,
            orig_rax: u64::MAX,
            rip: 0,
            cs: USER_CS,
            rflags: INITIAL_RFLAGS,
            rsp: 0,
            ss: USER_SS,
            how: RETURN_FULL,
            signal: 0,
            code: 0,
            address: 0,
            trap: 0,
            error: 0,
            xmm: [[0; 2]; 16],
        }
    }

    /// A frame that starts a program at `rip` with `rsp`.
    pub const fn at(rip: u64, rsp: u64) -> Self {
        TrapFrame { rip, rsp, ..Self::zeroed() }
    }
}

/// The registers of a thread that is in the kernel, at the top of its kernel stack: from
/// there the way out restores them. Whoever refers to them may change them, as in a cell;
/// none but the thread's virtual CPU and those with the kernel lock have a reference.
#[repr(transparent)]
pub struct Frame(Cell<TrapFrame>);

/// Accessors of single registers, which are cheaper than to copy the whole frame.
macro_rules! registers {
    ($($field:ident, $set:ident: $type:ty;)*) => {
        impl Frame {
            $(
                #[doc = concat!("[`TrapFrame::", stringify!($field), "`].")]
                #[inline]
                pub fn $field(&self) -> $type {
                    // SAFETY: inside the cell, whose content nobody has a reference to.
                    unsafe { (&raw const (*self.0.as_ptr()).$field).read() }
                }

                #[doc = concat!("Sets [`TrapFrame::", stringify!($field), "`].")]
                #[inline]
                pub fn $set(&self, value: $type) {
                    // SAFETY: as above.
                    unsafe { (&raw mut (*self.0.as_ptr()).$field).write(value) }
                }
            )*
        }
    };
}

registers! {
    rax, set_rax: u64;
    rbx, set_rbx: u64;
    rcx, set_rcx: u64;
    rdx, set_rdx: u64;
    rsi, set_rsi: u64;
    rdi, set_rdi: u64;
    r8, set_r8: u64;
    r9, set_r9: u64;
    r10, set_r10: u64;
    r11, set_r11: u64;
    orig_rax, set_orig_rax: u64;
    rip, set_rip: u64;
    rsp, set_rsp: u64;
    rflags, set_rflags: u64;
    how, set_how: u64;
    signal, set_signal: u32;
    code, set_code: i32;
    address, set_address: u64;
    trap, set_trap: u64;
    error, set_error: u64;
}

impl Frame {
    /// Registers that no thread has yet.
    pub const fn new(registers: TrapFrame) -> Self {
        Self(Cell::new(registers))
    }

    /// All registers.
    pub fn get(&self) -> TrapFrame {
        self.0.get()
    }

    /// Replaces all registers.
    pub fn set(&self, registers: TrapFrame) {
        self.0.set(registers);
    }

    /// Arguments of the system call.
    #[inline]
    pub fn arguments(&self) -> [u64; 6] {
        [self.rdi(), self.rsi(), self.rdx(), self.r10(), self.r8(), self.r9()]
    }
}

/// `ucontext_t` of the x86-64 ABI up to the end of the machine context: what the host hands
/// to its handlers, and the kernel to the guest's.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
#[allow(missing_docs)]
pub struct MachineContext {
    pub flags: u64,
    pub link: u64,
    /// `stack_t`: address, flags, bytes.
    pub stack: [u64; 3],
    pub r8: u64,
    pub r9: u64,
    pub r10: u64,
    pub r11: u64,
    pub r12: u64,
    pub r13: u64,
    pub r14: u64,
    pub r15: u64,
    pub rdi: u64,
    pub rsi: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub rdx: u64,
    pub rax: u64,
    pub rcx: u64,
    pub rsp: u64,
    pub rip: u64,
    pub eflags: u64,
    /// cs, gs, fs, ss from the low half up.
    pub segments: u64,
    pub error: u64,
    pub trap: u64,
    pub old_mask: u64,
    pub cr2: u64,
    /// Address of the vector state.
    pub fpstate: u64,
}

// The entry code finds the vector state there.
const _: () = assert!(core::mem::offset_of!(MachineContext, fpstate) == 224);

impl MachineContext {
    /// The general registers of a frame; all else is zero.
    pub fn of(frame: &TrapFrame) -> Self {
        Self {
            r8: frame.r8,
            r9: frame.r9,
            r10: frame.r10,
            r11: frame.r11,
            r12: frame.r12,
            r13: frame.r13,
            r14: frame.r14,
            r15: frame.r15,
            rdi: frame.rdi,
            rsi: frame.rsi,
            rbp: frame.rbp,
            rbx: frame.rbx,
            rdx: frame.rdx,
            rax: frame.rax,
            rcx: frame.rcx,
            rsp: frame.rsp,
            rip: frame.rip,
            eflags: frame.rflags,
            ..bytemuck::Zeroable::zeroed()
        }
    }

    /// A frame with these general registers.
    pub fn to_frame(&self) -> TrapFrame {
        TrapFrame {
            r15: self.r15,
            r14: self.r14,
            r13: self.r13,
            r12: self.r12,
            rbp: self.rbp,
            rbx: self.rbx,
            r11: self.r11,
            r10: self.r10,
            r9: self.r9,
            r8: self.r8,
            rax: self.rax,
            rcx: self.rcx,
            rdx: self.rdx,
            rsi: self.rsi,
            rdi: self.rdi,
            rip: self.rip,
            rsp: self.rsp,
            rflags: self.eflags,
            ..TrapFrame::zeroed()
        }
    }
}

/// A breakpoint, or a step.
pub const SIGTRAP: u32 = 5;
/// Memory is not there (`si_signo` of a fault).
pub const SIGBUS: u32 = 7;
/// Memory is not there, or must not be used so.
pub const SIGSEGV: u32 = 11;

/// Whether a signal says that memory is not there or must not be used so.
pub fn is_memory_fault(signal: u32) -> bool {
    signal == SIGSEGV || signal == SIGBUS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_changed_through_any_reference() {
        let frame = Frame::new(TrapFrame::at(0x1000, 0x2000));
        let (handler, kernel) = (&frame, &frame);
        handler.set_orig_rax(39);
        kernel.set_rip(kernel.rip() + 2);
        assert_eq!((handler.rip(), handler.rsp(), kernel.orig_rax()), (0x1002, 0x2000, 39));
        let saved = handler.get();
        kernel.set(TrapFrame { rdi: 1, rsi: 2, rdx: 3, r10: 4, r8: 5, r9: 6, ..saved });
        assert_eq!(handler.arguments(), [1, 2, 3, 4, 5, 6]);
        assert_eq!(handler.rip(), 0x1002);
    }

    #[test]
    fn a_context_and_a_frame_have_the_same_registers() {
        // Bytes that all differ: every register has a place of its own.
        let words: [u64; size_of::<MachineContext>() / 8] = core::array::from_fn(|n| n as u64 + 1);
        let context: MachineContext = bytemuck::cast(words);
        let frame = context.to_frame();
        let back = MachineContext::of(&frame);
        let registers = |context: &MachineContext| {
            bytemuck::cast::<_, [u64; size_of::<MachineContext>() / 8]>(*context)[5..23].to_vec()
        };
        assert_eq!(registers(&back), registers(&context));
        assert_eq!(
            (frame.rip, frame.rsp, frame.rflags),
            (context.rip, context.rsp, context.eflags)
        );
        // The order of `struct sigcontext` (bits/sigcontext.h).
        assert_eq!((context.r8, context.rdi, context.rax, context.rip), (6, 14, 19, 22));
    }
}
