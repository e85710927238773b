//! Virtual CPUs: the per-boot block that `%gs` points to.
//!
//! A virtual CPU is a host thread. The first one is the zygote's; the others of
//! the same host process lie behind it in the per-boot area, which every host
//! process of the sandbox has for itself.
#![allow(unsafe_code)]

use core::mem::offset_of;
use core::sync::atomic::{AtomicBool, AtomicU64};

use thaw_abi::layout::BOOT_BASE;

use crate::mm::AddressSpace;
use crate::task::Thread;
use crate::task::carrier::{Errand, Vcpu};

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
    /// The memory of the guest that this host process has.
    pub space: *const AddressSpace,
    /// What the thread that has just left the vCPU asks of the idle loop, or null.
    pub errand: *const Errand,
    /// This vCPU, as the others see it.
    pub own: *const Vcpu,
    /// Number of this vCPU in its host process.
    pub index: u32,
    /// The host has knocked, and nobody has looked yet.
    pub knocked: AtomicBool,
    /// The alarm has gone off, and nobody has looked yet.
    pub alarmed: AtomicBool,
    /// A signal's handler has taken `%gs` back before the one that it interrupted could.
    pub took_gs: AtomicBool,
    /// [`DOOR_OPEN`] if system calls may come through the fast door.
    pub door: AtomicU64,
}

/// What nobody else has at this place behind `%gs`.
pub const DOOR_OPEN: u64 = 0x5468_6177;

// The entry code uses these offsets.
const _: () = assert!(offset_of!(VcpuBlock, user_rsp) == 8);
const _: () = assert!(offset_of!(VcpuBlock, kernel_stack_top) == 16);
const _: () = assert!(offset_of!(VcpuBlock, thread) == 24);

/// Bytes of the signal stack: room for the host's largest signal frame
/// (AVX-512 and AMX state, about 11 KiB) several times over.
pub const SIGNAL_STACK_SIZE: u64 = 128 * 1024;
/// Bytes of the stack of the idle loop and of boot.
pub const IDLE_STACK_SIZE: u64 = 256 * 1024;

/// Most virtual CPUs of a host process.
pub const MAX_VCPUS: u32 = 64;
/// Offset of the signal stack in a vCPU's area; a guard page lies below.
const SIGNAL_STACK_OFFSET: u64 = 0x10_000;
/// Offset of the idle stack; a guard page lies below.
const IDLE_STACK_OFFSET: u64 = 0x50_000;
/// Bytes of a vCPU's area: block, signal stack, idle stack.
pub const AREA_SIZE: u64 = 0x10_0000;
/// Where the areas of the vCPUs other than the first begin.
const OTHERS: u64 = BOOT_BASE + 0x1000_0000;

/// Buffers for control messages.
pub const MESSAGE_BUFFER: u64 = BOOT_BASE + 0x100_000;
/// Buffers for the messages to a template, whose first message is still wanted.
pub const SECOND_MESSAGE_BUFFER: u64 = BOOT_BASE + 0x200_000;

/// The area of vCPU `index`.
pub fn area(index: u32) -> u64 {
    if index == 0 { BOOT_BASE } else { OTHERS + (index as u64 - 1) * AREA_SIZE }
}

/// Bottom of a vCPU's signal stack.
pub fn signal_stack(index: u32) -> u64 {
    area(index) + SIGNAL_STACK_OFFSET
}

/// Bottom of a vCPU's idle stack.
pub fn idle_stack(index: u32) -> u64 {
    area(index) + IDLE_STACK_OFFSET
}

/// Points `%gs` to a vCPU's block, which is zero so far.
///
/// # Safety
/// The vCPU's area must be mapped, and no other host thread may use it.
pub unsafe fn initialize(index: u32) {
    let at = area(index);
    let block = at as *mut VcpuBlock;
    // SAFETY: mapped by the caller's promise; nothing else refers to it yet.
    unsafe {
        (*block).this = at;
        (*block).index = index;
    }
    super::segment::set_gs_base(at);
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

/// The block of the vCPU that executes with this stack pointer. A new host
/// thread has `%gs` of the one that made it until it sets its own.
pub fn block_of_stack(rsp: u64) -> &'static mut VcpuBlock {
    let others_end = area(MAX_VCPUS);
    if (OTHERS..others_end).contains(&rsp) {
        let area = rsp - (rsp - OTHERS) % AREA_SIZE;
        // SAFETY: a stack that is in use lies in an area that is mapped, and the
        // area begins with the block.
        return unsafe { &mut *(area as *mut VcpuBlock) };
    }
    block()
}

/// Whether `rsp` lies on the signal stack that `other` lies on.
pub fn is_on_signal_stack(other: u64, rsp: u64) -> bool {
    let bottom = signal_stack(block_of_signal_stack(other).index);
    (bottom..bottom + SIGNAL_STACK_SIZE).contains(&rsp)
}

/// The block of the vCPU whose signal stack `rsp` lies on, whatever `%gs` is.
pub fn block_of_signal_stack(rsp: u64) -> &'static mut VcpuBlock {
    let others_end = area(MAX_VCPUS);
    let area = match (OTHERS..others_end).contains(&rsp) {
        true => rsp - (rsp - OTHERS) % AREA_SIZE,
        false => area(0),
    };
    // SAFETY: a stack that is in use lies in an area that is mapped, and the area
    // begins with the block.
    unsafe { &mut *(area as *mut VcpuBlock) }
}

/// Where the stack that `rsp` lies on ends: the idle stack, the signal stack
/// or the running thread's kernel stack.
pub fn stack_top_of(rsp: u64) -> u64 {
    let index = block().index;
    for (bottom, size) in
        [(signal_stack(index), SIGNAL_STACK_SIZE), (idle_stack(index), IDLE_STACK_SIZE)]
    {
        if (bottom..bottom + size).contains(&rsp) {
            return bottom + size;
        }
    }
    let top = block().kernel_stack_top;
    if rsp < top && top - rsp <= crate::task::thread::KERNEL_STACK_SIZE as u64 { top } else { rsp }
}

/// A page of no use but for [`barrier`].
const BARRIER_PAGE: u64 = BOOT_BASE + 0x9_0000;

/// Makes every processor that runs a vCPU of this host process execute a full
/// memory barrier: taking the right to write from a page that is in use makes
/// the host interrupt them all, as membarrier(2) was done before it existed.
pub fn barrier() -> crate::errno::Result<()> {
    use super::host::{PROT_READ, PROT_WRITE, protect};
    // SAFETY: the page lies in the per-boot area, above the idle stack.
    unsafe { (BARRIER_PAGE as *mut u64).write_volatile(1) };
    protect(BARRIER_PAGE, 4096, PROT_READ)?;
    protect(BARRIER_PAGE, 4096, PROT_READ | PROT_WRITE)
}
