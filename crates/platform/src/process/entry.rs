//! The two entries into the kernel and the way out.
//!
//! - The **direct entry** is reached by a patched site through the gate
//!   ([`super::gate`]): it switches to the thread's kernel stack, saves the
//!   registers in a [`TrapFrame`] and calls [`super::thread::dispatch`].
//! - The **trapped entry** is a signal of the host: `SIGSYS` for a system call that
//!   is not patched, `SIGSEGV` and its relatives for faults. The handler runs
//!   on the vCPU's signal stack only until the state of the interrupted code is
//!   in a [`TrapFrame`] on the kernel stack; from there on it goes as through
//!   the direct entry. The host's `rt_sigreturn` is never used.
//!
//! `%gs` points to the vCPU's block ([`super::vcpu`]) unless the guest has changed it,
//! as some runtimes do. The direct entry sees that by a word of the block, traps, and
//! leads through the trapped entry, which knows its vCPU by the stack ([`super::segment`]).
//!
//! The kernel's own code uses the low halves of the vector registers, so those
//! are in the frame. The upper halves and the x87 state stay in the registers
//! until another thread runs ([`crate::fpu`]).
#![allow(unsafe_code)]

use core::mem::offset_of;

use crate::registers::{ALIGNMENT_CHECK, INITIAL_RFLAGS, TrapFrame, USER_CS, USER_SS};

const FRAME: usize = size_of::<TrapFrame>();
const _: () = assert!(FRAME.is_multiple_of(16));

/// Puts the low halves of the vector registers back from the frame at `rsp`.
macro_rules! load_xmm {
    () => {
        concat!(
            "movaps xmm0, [rsp + {xmm} + 0x00]\n",
            "movaps xmm1, [rsp + {xmm} + 0x10]\n",
            "movaps xmm2, [rsp + {xmm} + 0x20]\n",
            "movaps xmm3, [rsp + {xmm} + 0x30]\n",
            "movaps xmm4, [rsp + {xmm} + 0x40]\n",
            "movaps xmm5, [rsp + {xmm} + 0x50]\n",
            "movaps xmm6, [rsp + {xmm} + 0x60]\n",
            "movaps xmm7, [rsp + {xmm} + 0x70]\n",
            "movaps xmm8, [rsp + {xmm} + 0x80]\n",
            "movaps xmm9, [rsp + {xmm} + 0x90]\n",
            "movaps xmm10, [rsp + {xmm} + 0xa0]\n",
            "movaps xmm11, [rsp + {xmm} + 0xb0]\n",
            "movaps xmm12, [rsp + {xmm} + 0xc0]\n",
            "movaps xmm13, [rsp + {xmm} + 0xd0]\n",
            "movaps xmm14, [rsp + {xmm} + 0xe0]\n",
            "movaps xmm15, [rsp + {xmm} + 0xf0]\n",
        )
    };
}

core::arch::global_asm!(
    ".globl thaw_syscall_entry, thaw_return, thaw_return_full, thaw_return_end",
    ".globl thaw_trap_entry, thaw_thread_start, thaw_syscall_entry_stack",
    ".globl thaw_syscall_open, thaw_syscall_closed, thaw_syscall_entry_flags",

    // Direct entry. rax = number, rcx = where the guest goes on, guest stack. It is
    // closed unless the block says otherwise; the flags must not change here.
    "thaw_syscall_entry:",
    "mov r11, gs:[{entry}]",
    "lea r11, [r11 - {open}]",
    "xchg rcx, r11",
    "jrcxz 2f",
    "mov rcx, r11",
    "thaw_syscall_closed:",
    "ud2",
    "2:",
    "mov rcx, r11",
    "thaw_syscall_open:",
    "mov gs:[8], rsp",
    "thaw_syscall_entry_stack:",
    "mov rsp, gs:[16]",
    // Nothing so far has changed the flags; like `syscall`, leave them in r11.
    "pushfq",
    "pop r11",
    "thaw_syscall_entry_flags:",
    "sub rsp, {frame}",
    "mov [rsp + {r15}], r15",
    "mov [rsp + {r14}], r14",
    "mov [rsp + {r13}], r13",
    "mov [rsp + {r12}], r12",
    "mov [rsp + {rbp}], rbp",
    "mov [rsp + {rbx}], rbx",
    "mov [rsp + {r10}], r10",
    "mov [rsp + {r9}], r9",
    "mov [rsp + {r8}], r8",
    "mov [rsp + {rax}], rax",
    "mov [rsp + {orig_rax}], rax",
    "mov [rsp + {rcx}], rcx",
    "mov [rsp + {rip}], rcx",
    "mov [rsp + {rdx}], rdx",
    "mov [rsp + {rsi}], rsi",
    "mov [rsp + {rdi}], rdi",
    "mov rax, gs:[8]",
    "mov [rsp + {rsp_}], rax",
    "mov qword ptr [rsp + {cs}], {user_cs}",
    "mov qword ptr [rsp + {ss}], {user_ss}",
    "mov [rsp + {rflags}], r11",
    "mov [rsp + {r11}], r11",
    "mov qword ptr [rsp + {how}], 0",
    "mov dword ptr [rsp + {signal}], 0",
    "movaps [rsp + {xmm} + 0x00], xmm0",
    "movaps [rsp + {xmm} + 0x10], xmm1",
    "movaps [rsp + {xmm} + 0x20], xmm2",
    "movaps [rsp + {xmm} + 0x30], xmm3",
    "movaps [rsp + {xmm} + 0x40], xmm4",
    "movaps [rsp + {xmm} + 0x50], xmm5",
    "movaps [rsp + {xmm} + 0x60], xmm6",
    "movaps [rsp + {xmm} + 0x70], xmm7",
    "movaps [rsp + {xmm} + 0x80], xmm8",
    "movaps [rsp + {xmm} + 0x90], xmm9",
    "movaps [rsp + {xmm} + 0xa0], xmm10",
    "movaps [rsp + {xmm} + 0xb0], xmm11",
    "movaps [rsp + {xmm} + 0xc0], xmm12",
    "movaps [rsp + {xmm} + 0xd0], xmm13",
    "movaps [rsp + {xmm} + 0xe0], xmm14",
    "movaps [rsp + {xmm} + 0xf0], xmm15",
    // The kernel's code is not aligned as the guest may want its own: alignment
    // checks are off in the kernel, as Linux has them.
    "test dword ptr [rsp + {rflags}], {alignment_check}",
    "jnz 4f",
    "3:",
    "cld",
    "mov rdi, rsp",
    "call {dispatch}",

    // The way out. rsp = the frame, which is the top of the kernel stack. A
    // signal of the host that arrives from here on begins the way out again,
    // one that arrives earlier has set `attention`: none is overlooked.
    "thaw_return:",
    "mov rax, gs:[24]",
    "cmp byte ptr [rax + {attention}], 0",
    "jne thaw_attend",
    "cmp qword ptr [rax + {gs_base}], 0",
    "jne thaw_return_gs",
    "cmp qword ptr [rsp + {how}], 0",
    "jne thaw_return_full",
    load_xmm!(),
    "mov r10, [rsp + {r10}]",
    "mov r9, [rsp + {r9}]",
    "mov r8, [rsp + {r8}]",
    "mov rax, [rsp + {rax}]",
    "mov rdx, [rsp + {rdx}]",
    "mov rsi, [rsp + {rsi}]",
    "mov rdi, [rsp + {rdi}]",
    "mov rcx, [rsp + {rip}]",
    "mov r11, [rsp + {rflags}]",
    "push r11",
    "popfq",
    "mov rsp, [rsp + {rsp_}]",
    "jmp rcx",

    // To a guest that has its own `%gs`.
    "thaw_return_gs:",
    "mov rax, [rax + {gs_base}]",
    "wrgsbase rax",

    // Everything, with iretq, without a look at `%gs`. rsp = the frame.
    "thaw_return_full:",
    load_xmm!(),
    "mov r11, rsp",
    "push qword ptr [r11 + {ss}]",
    "push qword ptr [r11 + {rsp_}]",
    "push qword ptr [r11 + {rflags}]",
    "push qword ptr [r11 + {cs}]",
    "push qword ptr [r11 + {rip}]",
    "mov r15, [r11 + {r15}]",
    "mov r14, [r11 + {r14}]",
    "mov r13, [r11 + {r13}]",
    "mov r12, [r11 + {r12}]",
    "mov rbp, [r11 + {rbp}]",
    "mov rbx, [r11 + {rbx}]",
    "mov r10, [r11 + {r10}]",
    "mov r9, [r11 + {r9}]",
    "mov r8, [r11 + {r8}]",
    "mov rax, [r11 + {rax}]",
    "mov rcx, [r11 + {rcx}]",
    "mov rdx, [r11 + {rdx}]",
    "mov rsi, [r11 + {rsi}]",
    "mov rdi, [r11 + {rdi}]",
    "mov r11, [r11 + {r11}]",
    "iretq",
    "thaw_return_end:",

    // Trapped entry: a host signal handler (rdi = signal, rsi = siginfo, rdx =
    // ucontext) on the vCPU's signal stack.
    // The host has cleared the trap flag, but not the one for alignment checks.
    "thaw_trap_entry:",
    "push {initial_rflags}",
    "popfq",
    "and rsp, -64",
    "sub rsp, {frame}",
    "mov rbx, rdx",
    "mov rcx, rsp",
    "call {prologue}",
    // rax = the frame to go on with, rdx = whether to handle it in the kernel
    // (1) or to resume (0). Put the interrupted code's vector state back into
    // the registers: entering the handler has reset it. fpstate is at offset
    // 224 of the ucontext, the mask of saved components at 472 of fpstate.
    // Until that is done the signal stack must not be left: the next signal of
    // the host would overwrite what lies on it.
    "mov r14, rax",
    "mov r12, rdx",
    "mov r13, [rbx + 224]",
    "mov eax, [r13 + 472]",
    "mov edx, [r13 + 476]",
    "xrstor64 [r13]",
    "mov rsp, r14",
    "test r12, r12",
    "jz thaw_return_full",
    "mov rdi, rsp",
    "call {trap}",
    "jmp thaw_return",

    "4:",
    "push {initial_rflags}",
    "popfq",
    "jmp 3b",

    "thaw_attend:",
    "mov rdi, rsp",
    "call {attend}",
    "jmp thaw_return",

    // First run of a new thread: its frame is at the top of its kernel stack,
    // where the context switch has left rsp.
    "thaw_thread_start:",
    "mov rdi, rsp",
    "call {begin}",
    "jmp thaw_return",

    frame = const FRAME,
    r15 = const offset_of!(TrapFrame, r15),
    r14 = const offset_of!(TrapFrame, r14),
    r13 = const offset_of!(TrapFrame, r13),
    r12 = const offset_of!(TrapFrame, r12),
    rbp = const offset_of!(TrapFrame, rbp),
    rbx = const offset_of!(TrapFrame, rbx),
    r11 = const offset_of!(TrapFrame, r11),
    r10 = const offset_of!(TrapFrame, r10),
    r9 = const offset_of!(TrapFrame, r9),
    r8 = const offset_of!(TrapFrame, r8),
    rax = const offset_of!(TrapFrame, rax),
    rcx = const offset_of!(TrapFrame, rcx),
    rdx = const offset_of!(TrapFrame, rdx),
    rsi = const offset_of!(TrapFrame, rsi),
    rdi = const offset_of!(TrapFrame, rdi),
    orig_rax = const offset_of!(TrapFrame, orig_rax),
    rip = const offset_of!(TrapFrame, rip),
    cs = const offset_of!(TrapFrame, cs),
    rflags = const offset_of!(TrapFrame, rflags),
    rsp_ = const offset_of!(TrapFrame, rsp),
    ss = const offset_of!(TrapFrame, ss),
    how = const offset_of!(TrapFrame, how),
    signal = const offset_of!(TrapFrame, signal),
    xmm = const offset_of!(TrapFrame, xmm),
    alignment_check = const ALIGNMENT_CHECK,
    initial_rflags = const INITIAL_RFLAGS,
    user_cs = const USER_CS,
    user_ss = const USER_SS,
    attention = const super::thread::ATTENTION,
    gs_base = const super::thread::GS_BASE,
    entry = const offset_of!(super::vcpu::VcpuBlock, entry),
    open = const super::vcpu::ENTRY_OPEN,
    dispatch = sym super::thread::dispatch,
    attend = sym super::thread::attend,
    begin = sym super::thread::begin,
    prologue = sym super::fault::prologue,
    trap = sym super::fault::handle,
);

unsafe extern "C" {
    /// The direct entry.
    pub static thaw_syscall_entry: u8;
    /// The trapped entry.
    pub static thaw_trap_entry: u8;
    /// Where a new thread begins to run.
    pub static thaw_thread_start: u8;
}

unsafe extern "C" {
    static thaw_return: u8;
    static thaw_return_end: u8;
    static thaw_syscall_entry_stack: u8;
    static thaw_syscall_entry_flags: u8;
    static thaw_syscall_open: u8;
    static thaw_syscall_closed: u8;
}

/// Where to resume code that was interrupted at `rip` in the guest's part of
/// the entry code: the guest's stack pointer must be noted anew, since another
/// thread may use the vCPU in between.
pub fn resumable(rip: u64) -> u64 {
    if rip == &raw const thaw_syscall_entry_stack as u64 {
        &raw const thaw_syscall_open as u64
    } else {
        rip
    }
}

/// Whether `rip` is where the direct entry still runs on the guest's stack, or where a system call goes on that
/// was interrupted there.
pub fn is_in_guest_part(rip: u64) -> bool {
    (&raw const thaw_syscall_entry as u64..&raw const thaw_syscall_entry_flags as u64)
        .contains(&rip)
}

/// Whether a fault at `rip` means that the direct entry is closed to a system call: its
/// word of the block was another one, or not there at all.
pub fn is_at_closed_entry(rip: u64) -> bool {
    rip == &raw const thaw_syscall_closed as u64 || rip == &raw const thaw_syscall_entry as u64
}

/// Whether the guest's flags are still in the register there, on the way in by the
/// direct entry.
pub fn is_before_flags_are_saved(rip: u64) -> bool {
    let range =
        &raw const thaw_syscall_entry_stack as u64..&raw const thaw_syscall_entry_flags as u64;
    range.contains(&rip)
}

/// Whether `rip` is in the code that restores a frame on the way out.
pub fn is_returning(rip: u64) -> bool {
    (&raw const thaw_return as u64..&raw const thaw_return_end as u64).contains(&rip)
}
