//! Virtual CPUs: host threads that run guest threads, one at a time each.
//!
//! The first one is the zygote's; the others of the same host process lie behind it in
//! the per-boot area, which every host process of the sandbox has for itself. `%gs`
//! points to the block of the vCPU while the kernel runs. Nothing here is saved.
#![allow(unsafe_code)]

use core::arch::asm;
use core::cell::Cell;
use core::mem::offset_of;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use thaw_abi::layout::BOOT_BASE;

use super::calls::{hostcall, nr};
use super::thread::ThreadContext;
use super::{HostProcesses, fault, segment};
use crate::boot_area::{FIRST_SIZE, OTHER_VCPUS, of_process};
use crate::errno::{Errno, Result};
use crate::machine::{Memory, PROT_READ, PROT_WRITE, Sharing, Vcpus};
use crate::memory::KernelRange;
use crate::{kernel_lock, upcalls};

/// What the entry code finds through `%gs`. Used by its vCPU and by the handlers of
/// signals that interrupt it, in short accesses.
#[repr(C)]
pub(super) struct VcpuBlock {
    /// Address of this block; 0 as long as the vCPU has not begun.
    pub this: Cell<u64>,
    /// Scratch: the guest's stack pointer during entry.
    user_rsp: Cell<u64>,
    /// Top of the running thread's kernel stack.
    pub kernel_stack_top: Cell<u64>,
    /// The running thread, or null while idle.
    pub thread: Cell<*const ThreadContext>,
    /// The same as the kernel knows it.
    pub thread_object: Cell<*const ()>,
    /// Saved stack pointer of the idle loop.
    pub idle_rsp: Cell<u64>,
    /// The thread whose vector state is in the registers, or null.
    pub fpu_owner: Cell<*const ThreadContext>,
    /// The kernel's number for this vCPU, or 0.
    pub number: Cell<usize>,
    /// Number of this vCPU in its host process.
    pub index: Cell<u32>,
    /// The host has rung the doorbell, and nobody has looked yet.
    pub doorbell_rang: AtomicBool,
    /// The alarm has gone off, and nobody has looked yet.
    pub alarmed: AtomicBool,
    /// A signal's handler has taken `%gs` back before the one that it interrupted could.
    pub took_gs: AtomicBool,
    /// [`ENTRY_OPEN`] if system calls may come through the direct entry.
    pub entry: AtomicU64,
    /// How often the doorbell has rung.
    pub rings: AtomicU32,
    /// The same just before this vCPU last forked: a fork knows by it what was meant for itself.
    pub rings_at_fork: AtomicU32,
}

/// In [`VcpuBlock::door`]: nobody else has this at that place behind `%gs`.
pub(super) const ENTRY_OPEN: u64 = 0x5468_6177;

// The entry code uses these offsets.
const _: () = assert!(offset_of!(VcpuBlock, user_rsp) == 8);
const _: () = assert!(offset_of!(VcpuBlock, kernel_stack_top) == 16);
const _: () = assert!(offset_of!(VcpuBlock, thread) == 24);

const _: () = assert!(size_of::<VcpuBlock>() <= 0x800);

/// Bytes of the signal stack: room for the host's largest signal frame
/// (AVX-512 and AMX state, about 11 KiB) several times over.
pub(super) const SIGNAL_STACK_SIZE: u64 = 128 * 1024;
/// Bytes of the stack of the idle loop and of boot.
pub(super) const IDLE_STACK_SIZE: u64 = 256 * 1024;

/// Bytes below the page of the stack pointer that [`Vcpus::discard_stacks`] leaves alone.
const DISCARD_BELOW: u64 = 4096;

/// Most virtual CPUs of a host process.
pub(super) const MAX_VCPUS: u32 = 64;
/// Offset of the signal stack in a vCPU's area; a guard page lies below.
const SIGNAL_STACK_OFFSET: u64 = 0x10_000;
/// Offset of the idle stack; a guard page lies below.
const IDLE_STACK_OFFSET: u64 = 0x50_000;
/// Bytes of a vCPU's area: block, signal stack, idle stack.
const AREA_SIZE: u64 = 0x10_0000;

/// The area of vCPU `index`.
pub(super) fn area(index: u32) -> u64 {
    if index == 0 { BOOT_BASE } else { OTHER_VCPUS + (index as u64 - 1) * AREA_SIZE }
}

/// Bottom of a vCPU's signal stack.
pub(super) fn signal_stack(index: u32) -> u64 {
    area(index) + SIGNAL_STACK_OFFSET
}

/// Bottom of a vCPU's idle stack.
pub(super) fn idle_stack(index: u32) -> u64 {
    area(index) + IDLE_STACK_OFFSET
}

/// Bytes of the signal stack that a few signals fill, each of which comes before the handler of the one before it
/// has left the stack.
const SIGNAL_STACK_USED: u64 = 24 << 10;

/// Touches what the next signals will fill, which the host could not do if it had no memory left: it then sends
/// `SIGSEGV` in their place.
pub(super) fn touch_signal_stack() {
    let top = signal_stack(block().index.get()) + SIGNAL_STACK_SIZE;
    for page in (top - SIGNAL_STACK_USED..top).step_by(4096) {
        // SAFETY: inside the stack, on which nothing is.
        unsafe { (page as *mut u64).write_volatile(0) };
    }
}

/// What the host does with signals that interrupt this host thread.
#[derive(Clone, Copy)]
pub(super) enum Interrupts {
    /// `SIG_BLOCK`.
    Held = 0,
    /// `SIG_UNBLOCK`.
    Delivered = 1,
}

/// rt_sigprocmask(2).
pub(super) fn set_interrupts(how: Interrupts) {
    let all = [fault::SIGUSR1, fault::SIGALRM, fault::SIGCHLD];
    let signals = all.iter().fold(0, |set, signal| set | 1u64 << (signal - 1));
    let args = [how as u64, &raw const signals as u64, 0, size_of_val(&signals) as u64, 0, 0];
    // SAFETY: `signals` lives for the call, and handlers may run at any time or later.
    let _ = unsafe { hostcall(nr::RT_SIGPROCMASK, args) };
}

/// Whether this code runs on the signal stack of its vCPU.
pub(super) fn handles_signal() -> bool {
    let here = 0u8;
    let bottom = signal_stack(block().index.get());
    (bottom..bottom + SIGNAL_STACK_SIZE).contains(&(&raw const here as u64))
}

/// Takes away the pages below the stacks.
fn guard_stacks(index: u32) -> Result<()> {
    let guards = [signal_stack(index) - 4096, idle_stack(index) - 4096];
    guards.into_iter().try_for_each(|guard| {
        // SAFETY: the area holds block and stacks, and leaves this page to nobody.
        HostProcesses::protect(unsafe { KernelRange::new(guard, 4096) }, 0)
    })
}

/// Points `%gs` to a vCPU's block.
///
/// # Safety
/// The vCPU's area must be mapped, and no other host thread may use it.
unsafe fn initialize(index: u32) {
    let at = area(index);
    // SAFETY: mapped by the caller's promise.
    let block = unsafe { &*(at as *const VcpuBlock) };
    block.this.set(at);
    block.index.set(index);
    segment::set_gs_base(at);
}

/// The block of the vCPU that this code runs on.
#[inline]
pub(super) fn block() -> &'static VcpuBlock {
    let this: *const VcpuBlock;
    // SAFETY: `%gs` points to the block from `initialize` on, and stays mapped as long as
    // the vCPU runs.
    unsafe {
        asm!("mov {}, gs:[0]", out(reg) this, options(nostack, preserves_flags, readonly));
        &*this
    }
}

/// The block of the vCPU that executes with this stack pointer. A new host
/// thread has `%gs` of the one that made it until it sets its own.
pub(super) fn block_of_stack(rsp: u64) -> &'static VcpuBlock {
    match area_of(rsp) {
        // SAFETY: a stack that is in use lies in an area that is mapped, and the area
        // begins with the block.
        Some(area) => unsafe { &*(area as *const VcpuBlock) },
        None => block(),
    }
}

/// The block of the vCPU whose signal stack `rsp` lies on, whatever `%gs` is.
pub(super) fn block_of_signal_stack(rsp: u64) -> &'static VcpuBlock {
    let area = area_of(rsp).unwrap_or(area(0));
    // SAFETY: as above.
    unsafe { &*(area as *const VcpuBlock) }
}

/// The area, other than the first, in which `address` lies.
fn area_of(address: u64) -> Option<u64> {
    let is_inside = (OTHER_VCPUS..area(MAX_VCPUS)).contains(&address);
    is_inside.then(|| address - (address - OTHER_VCPUS) % AREA_SIZE)
}

/// Whether `rsp` lies on the signal stack that `other` lies on.
pub(super) fn is_on_signal_stack(other: u64, rsp: u64) -> bool {
    let bottom = signal_stack(block_of_signal_stack(other).index.get());
    (bottom..bottom + SIGNAL_STACK_SIZE).contains(&rsp)
}

/// Where a new host thread begins, on its idle stack.
pub(super) extern "C" fn start_of_vcpu(index: u32) -> ! {
    // SAFETY: the area was mapped for this thread.
    unsafe { initialize(index) };
    touch_signal_stack();
    if fault::use_signal_stack(index).is_err() {
        crate::panic::die_with("a virtual CPU has no signal stack")
    }
    set_interrupts(Interrupts::Delivered);
    kernel_lock::acquire();
    upcalls::kernel().run_vcpu()
}

/// Opens or closes the direct entry of every vCPU of this host process.
pub(super) fn set_entry(word: u64) {
    let vcpus = of_process().vcpus.load(Relaxed);
    for index in (0..MAX_VCPUS).filter(|index| vcpus & (1 << index) != 0) {
        // SAFETY: the areas of the vCPUs of this host process are mapped.
        let block = unsafe { &*(area(index) as *const VcpuBlock) };
        block.entry.store(word, Relaxed);
    }
}

/// clone(2): a host thread for a virtual CPU, which begins in
/// [`start_of_vcpu`] with its stack pointer at `stack_top`.
/// Returns its thread id.
fn start_thread(stack_top: u64, vcpu: u32) -> Result<u32> {
    let entry = (stack_top - 16) as *mut u64;
    let tid: u64;
    // SAFETY: the stack is mapped and unused. The new thread shares all memory;
    // it returns from the host call on its own stack, to `thaw_vcpu_start`,
    // with the registers of the caller.
    unsafe {
        entry.write(&raw const thaw_vcpu_start as u64);
        core::arch::asm!(
            "call thaw_hostcall",
            inlateout("rax") nr::CLONE => tid,
            in("rdi") thaw_abi::filter::CLONE_VCPU as u64,
            in("rsi") entry as u64,
            in("rdx") 0, in("r10") 0, in("r8") 0,
            in("r9") vcpu as u64,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    Errno::from_return(tid).map(|tid| tid as u32)
}

core::arch::global_asm!(
    // A new host thread, with the number of its vCPU in r9 and an empty stack.
    ".globl thaw_vcpu_start",
    "thaw_vcpu_start:",
    "xor ebp, ebp",
    "mov edi, r9d",
    "and rsp, -16",
    "call {start}",
    "ud2",
    start = sym start_of_vcpu,
);

unsafe extern "C" {
    static thaw_vcpu_start: u8;
}

impl Vcpus for HostProcesses {
    const MAX_VCPUS: u32 = MAX_VCPUS;

    fn begin_first() -> Result<()> {
        // SAFETY: nothing is in the per-boot area before there is a vCPU.
        let first = unsafe { KernelRange::new(BOOT_BASE, FIRST_SIZE) };
        Self::map_anonymous(first, PROT_READ | PROT_WRITE, Sharing::Private)?;
        guard_stacks(0)?;
        // SAFETY: just mapped.
        unsafe { initialize(0) };
        block().entry.store(ENTRY_OPEN, Relaxed);
        of_process().vcpus.store(1, Relaxed);
        Ok(())
    }

    fn leave_first_stack(main: extern "C" fn() -> !) -> ! {
        // SAFETY: the idle stack is mapped and unused.
        unsafe {
            asm!(
                "mov rsp, {stack}",
                "xor ebp, ebp",
                "call {main}",
                "ud2",
                stack = in(reg) idle_stack(0) + IDLE_STACK_SIZE,
                main = in(reg) main,
                options(noreturn)
            )
        }
    }

    fn begin_forked() {
        let block = block();
        block.thread.set(core::ptr::null());
        block.thread_object.set(core::ptr::null());
        block.fpu_owner.set(core::ptr::null());
        block.alarmed.store(false, Relaxed);
        // A signal may have come before this: it is the only one that ends a twin.
        let rings = block.rings.load(Relaxed);
        block.doorbell_rang.store(rings != block.rings_at_fork.load(Relaxed), Relaxed);
        of_process().vcpus.store(1 << block.index.get(), Relaxed);
        of_process().ended.store(0, Relaxed);
        of_process().alarm_at.store(0, Relaxed);
        of_process().twin.store(0, Relaxed);
    }

    fn start(index: u32, number: usize) -> Result<u32> {
        assert!(0 < index && index < Self::MAX_VCPUS, "no vCPU has this number");
        let process = of_process();
        assert!(process.vcpus.load(Relaxed) & (1 << index) == 0, "the vCPU runs");
        if process.ended.load(Relaxed) & (1 << index) != 0 {
            return Err(Errno::EBUSY);
        }
        // SAFETY: no vCPU of this host process has or had the area; one of the host process that
        // it was forked from may have, and has left it here.
        let area_of_new = unsafe { KernelRange::new(area(index), AREA_SIZE) };
        Self::map_anonymous(area_of_new, PROT_READ | PROT_WRITE, Sharing::Private)?;
        guard_stacks(index)?;
        // SAFETY: just mapped, zero, and used by nobody yet.
        let new = unsafe { &*(area(index) as *const VcpuBlock) };
        new.number.set(number);
        new.entry.store(block().entry.load(Relaxed), Relaxed);
        set_interrupts(Interrupts::Held);
        let started = start_thread(idle_stack(index) + IDLE_STACK_SIZE, index);
        set_interrupts(Interrupts::Delivered);
        let tid = started?;
        process.vcpus.fetch_or(1 << index, Relaxed);
        Ok(tid)
    }

    fn end() -> ! {
        let bit = 1 << Self::index();
        of_process().vcpus.fetch_and(!bit, Relaxed);
        of_process().ended.fetch_or(bit, Relaxed);
        kernel_lock::release();
        Self::exit_thread()
    }

    fn index() -> u32 {
        block().index.get()
    }

    #[inline]
    fn number() -> usize {
        let number: usize;
        // SAFETY: as for `block`, in one access less.
        unsafe {
            asm!("mov {}, gs:[{number}]", out(reg) number, number = const offset_of!(VcpuBlock, number),
                options(nostack, preserves_flags, readonly));
        }
        number
    }

    fn set_number(number: usize) {
        block().number.set(number);
    }

    fn first_touched() -> [(u64, u64); 3] {
        const STACK_USED: u64 = 16 << 10;
        [
            (area(0), 4096),
            (signal_stack(0) + SIGNAL_STACK_SIZE - SIGNAL_STACK_USED, SIGNAL_STACK_USED),
            (idle_stack(0) + IDLE_STACK_SIZE - STACK_USED, STACK_USED),
        ]
    }

    fn discard_stacks() {
        let index = Self::index();
        let (idle, signal) = (idle_stack(index), signal_stack(index));
        let here = (&raw const index).expose_provenance() as u64;
        // What this function calls lies below its own frame.
        let unused = (here & !4095).saturating_sub(idle + DISCARD_BELOW);
        for (start, len) in [(idle, unused), (signal, SIGNAL_STACK_SIZE)] {
            if len > 0 {
                // SAFETY: the vCPU's own stacks: nothing is kept below the stack pointer, and no
                // handler of a signal runs, since this code would be interrupted by it.
                let _ = Self::discard(unsafe { KernelRange::new(start, len) });
            }
        }
    }

    fn has_signal() -> bool {
        let block = block();
        block.doorbell_rang.load(Relaxed) || block.alarmed.load(Relaxed)
    }

    fn take_doorbell() -> bool {
        let doorbell_rang = &block().doorbell_rang;
        doorbell_rang.load(Relaxed) && doorbell_rang.swap(false, Relaxed)
    }

    fn take_alarm() -> bool {
        let block = block();
        let alarmed = block.alarmed.load(Relaxed) && block.alarmed.swap(false, Relaxed);
        if alarmed {
            of_process().alarm_at.store(0, Relaxed);
        }
        alarmed
    }

    fn exit_thread() -> ! {
        loop {
            // SAFETY: does not return.
            let _ = unsafe { hostcall(nr::EXIT, [0; 6]) };
        }
    }

    fn interrupt(pid: u32, tid: u32) {
        // SAFETY: touches no memory. If it has ended, there is nothing to interrupt.
        let _ = unsafe {
            hostcall(nr::TGKILL, [pid as u64, tid as u64, fault::SIGUSR1 as u64, 0, 0, 0])
        };
    }

    fn wait(word: &AtomicU32, expected: u32, timeout_ns: Option<u64>) {
        const FUTEX_WAIT: u64 = 0;
        let timespec = timeout_ns.map(|ns| [ns / 1_000_000_000, ns % 1_000_000_000]);
        let at = timespec.as_ref().map_or(0, |t| t.as_ptr() as u64);
        let args = [word.as_ptr() as u64, FUTEX_WAIT, expected as u64, at, 0, 0];
        // SAFETY: `word` and `timespec` are valid for the call. Whoever waits looks
        // again, so no outcome matters.
        let _ = unsafe { hostcall(nr::FUTEX, args) };
    }

    fn wake(word: &AtomicU32, count: u32) {
        const FUTEX_WAKE: u64 = 1;
        // SAFETY: reads no memory.
        let _ = unsafe {
            hostcall(nr::FUTEX, [word.as_ptr() as u64, FUTEX_WAKE, count as u64, 0, 0, 0])
        };
    }

    fn arm_alarm(ns: u64) {
        const ITIMER_REAL: u64 = 0;
        // At least a microsecond: zero would disarm the timer.
        let us = (ns / 1000).max(1);
        let value = [0u64, 0, us / 1_000_000, us % 1_000_000];
        // SAFETY: `value` is valid for the call. It fails for bad values only.
        let _ =
            unsafe { hostcall(nr::SETITIMER, [ITIMER_REAL, value.as_ptr() as u64, 0, 0, 0, 0]) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The host may still run the thread of a vCPU that has ended, on the stack that lies there.
    #[test]
    fn the_area_of_a_vcpu_that_has_ended_is_not_given_to_another() {
        HostProcesses::begin_first().unwrap();
        // As `end` leaves it.
        of_process().ended.fetch_or(1 << 5, Relaxed);
        assert_eq!(HostProcesses::start(5, 7), Err(Errno::EBUSY));
        assert_eq!(of_process().vcpus.load(Relaxed), 1);
        // A host process that was forked off has no such thread.
        HostProcesses::begin_forked();
        assert_eq!(of_process().ended.load(Relaxed), 0);
    }

    #[test]
    fn the_areas_of_vcpus_do_not_overlap() {
        for index in 1..MAX_VCPUS {
            assert_eq!(area_of(idle_stack(index) + IDLE_STACK_SIZE - 1), Some(area(index)));
            assert_eq!(area_of(area(index)), Some(area(index)));
            assert!(signal_stack(index) + SIGNAL_STACK_SIZE < idle_stack(index));
            assert!(idle_stack(index) + IDLE_STACK_SIZE <= area(index) + AREA_SIZE);
        }
        assert_eq!(area_of(area(0)), None);
        assert_eq!(area_of(area(MAX_VCPUS)), None);
    }
}
