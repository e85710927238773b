//! Virtual CPUs: the per-boot block that `%gs` points to.
#![allow(unsafe_code)]

use core::mem::offset_of;

use thaw_abi::layout::BOOT_BASE;

use crate::task::Thread;

/// What the entry code finds through `%gs`. Per boot, never saved.
#[repr(C)]
pub struct VcpuBlock {
    /// Address of this block.
    pub this: u64,
    /// Scratch: the guest's stack pointer during entry.
    pub user_rsp: u64,
    /// Top of the running thread's kernel stack.
    pub kernel_stack_top: u64,
    /// The running thread, or null while idle.
    pub thread: *const Thread,
    /// Saved stack pointer of the idle loop.
    pub idle_rsp: u64,
    /// The thread whose vector state is in the registers, or null.
    pub fpu_owner: *const Thread,
}

// The entry code uses these offsets.
const _: () = assert!(offset_of!(VcpuBlock, user_rsp) == 8);
const _: () = assert!(offset_of!(VcpuBlock, kernel_stack_top) == 16);
const _: () = assert!(offset_of!(VcpuBlock, thread) == 24);

/// Bytes of the signal stack: room for the host's largest signal frame
/// (AVX-512 and AMX state, about 11 KiB) several times over.
pub const SIGNAL_STACK_SIZE: u64 = 128 * 1024;
/// Bytes of the stack of the idle loop and of boot.
pub const IDLE_STACK_SIZE: u64 = 256 * 1024;

/// The block of vCPU 0.
pub const BLOCK: u64 = BOOT_BASE;
/// Bottom of vCPU 0's signal stack; a guard page lies below.
pub const SIGNAL_STACK: u64 = BOOT_BASE + 0x10_000;
/// Bottom of vCPU 0's idle stack; a guard page lies below.
pub const IDLE_STACK: u64 = BOOT_BASE + 0x50_000;
/// Buffers for control messages.
pub const MESSAGE_BUFFER: u64 = BOOT_BASE + 0x100_000;

/// Points `%gs` to vCPU 0's block, which is zero so far.
///
/// # Safety
/// The per-boot area must be mapped.
pub unsafe fn initialize() {
    let block = BLOCK as *mut VcpuBlock;
    // SAFETY: mapped by the caller's promise; nothing else refers to it yet.
    unsafe {
        (*block).this = BLOCK;
        core::arch::asm!("wrgsbase {}", in(reg) BLOCK);
    }
}

/// The block of the vCPU that this code runs on.
pub fn block() -> &'static mut VcpuBlock {
    let this: *mut VcpuBlock;
    // SAFETY: `%gs` points to the block from `initialize` on. The block is
    // used by this vCPU only, through short accesses that do not overlap.
    unsafe {
        core::arch::asm!("mov {}, gs:[0]", out(reg) this, options(nostack, preserves_flags, readonly));
        &mut *this
    }
}

/// Where the stack that `rsp` lies on ends: the idle stack, the signal stack
/// or the running thread's kernel stack.
pub fn stack_top_of(rsp: u64) -> u64 {
    for (bottom, size) in [(SIGNAL_STACK, SIGNAL_STACK_SIZE), (IDLE_STACK, IDLE_STACK_SIZE)] {
        if (bottom..bottom + size).contains(&rsp) {
            return bottom + size;
        }
    }
    let top = block().kernel_stack_top;
    if rsp < top && top - rsp <= crate::task::thread::KERNEL_STACK_SIZE as u64 { top } else { rsp }
}
