//! Virtual CPUs: host threads that run guest threads, one at a time each.
//!
//! The first one is the zygote's; the others of the same host process lie behind it in
//! the per-boot area, which every host process of the sandbox has for itself. `%gs`
//! points to the block of the vCPU while the kernel runs. Nothing here is saved.
#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::arch::asm;
use core::cell::Cell;
use core::mem::offset_of;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use thaw_abi::layout::BOOT_BASE;

use crate::boot_area::OTHER_VCPUS;
use crate::errno::{Errno, Result};
use crate::host::{self, PROT_READ, PROT_WRITE};
use crate::memory::KernelRange;
use crate::thread::{GuestThread, KERNEL_STACK_SIZE, ThreadContext};
use crate::{fault, kernel_lock, segment, upcalls};

/// What the entry code finds through `%gs`. Used by its vCPU and by the handlers of
/// signals that interrupt it, in short accesses.
#[repr(C)]
pub(crate) struct VcpuBlock {
    /// Address of this block; 0 as long as the vCPU has not begun.
    pub this: Cell<u64>,
    /// Scratch: the guest's stack pointer during entry.
    user_rsp: Cell<u64>,
    /// Top of the running thread's kernel stack.
    pub kernel_stack_top: Cell<u64>,
    /// The running thread, or null while idle.
    pub thread: Cell<*const ThreadContext>,
    /// The same as the kernel knows it, in an `Arc`.
    pub thread_object: Cell<*const ()>,
    /// Saved stack pointer of the idle loop.
    pub idle_rsp: Cell<u64>,
    /// The thread whose vector state is in the registers, or null.
    pub fpu_owner: Cell<*const ThreadContext>,
    /// What the kernel has for this vCPU ([`install`]), or null.
    pub data: Cell<*const ()>,
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
}

/// In [`VcpuBlock::door`]: nobody else has this at that place behind `%gs`.
pub(crate) const ENTRY_OPEN: u64 = 0x5468_6177;

// The entry code uses these offsets.
const _: () = assert!(offset_of!(VcpuBlock, user_rsp) == 8);
const _: () = assert!(offset_of!(VcpuBlock, kernel_stack_top) == 16);
const _: () = assert!(offset_of!(VcpuBlock, thread) == 24);

impl VcpuBlock {
    #[inline]
    fn data<D: VcpuData>(&self) -> Option<&'static D> {
        // SAFETY: `VcpuData` has one type, which `install` and `start` were given.
        unsafe { self.data.get().cast::<D>().as_ref() }
    }

    fn set_data<D: VcpuData>(&self, data: Box<D>) {
        self.data.set(Box::into_raw(data).cast());
    }

    /// Takes out what `set_data` was given, and leaves nothing.
    ///
    /// # Safety
    /// Nobody refers to it any more.
    unsafe fn take_data<D: VcpuData>(&self) -> Option<Box<D>> {
        let data = self.data.replace(core::ptr::null()).cast_mut().cast::<D>();
        // SAFETY: from `set_data`, with the one type that there is, and nobody's any more.
        (!data.is_null()).then(|| unsafe { Box::from_raw(data) })
    }

    pub fn set_thread<T: GuestThread>(&self, thread: Option<&Arc<T>>) {
        let object = thread.map_or(core::ptr::null(), Arc::as_ptr);
        self.thread_object.set(object.cast());
        let context = thread.map(|thread| thread.context());
        self.thread.set(context.map_or(core::ptr::null(), core::ptr::from_ref));
    }
}

/// What all vCPUs of a host process have in common, behind the block of its first.
pub(crate) struct ProcessBlock {
    /// Bit n: vCPU n is there.
    vcpus: AtomicU64,
    /// Bit n: vCPU n is there no more. Its host thread uses the stack until the host has
    /// ended it, which nobody sees.
    ended: AtomicU64,
    /// When the alarm goes off that the kernel has set ([`alarm_at`]).
    alarm_at: AtomicU64,
    /// There is a [`crate::memory::Window`].
    window_is_used: AtomicBool,
    /// Bit n: buffer n of [`crate::message`] is in use.
    messages_used: AtomicU32,
}

const PROCESS_BLOCK: u64 = BOOT_BASE + 0x800;
const _: () = assert!(size_of::<VcpuBlock>() <= 0x800);

fn process() -> &'static ProcessBlock {
    // SAFETY: in the first page of the per-boot area, which is mapped from the beginning,
    // zero, and holds nothing else there.
    unsafe { &*(PROCESS_BLOCK as *const ProcessBlock) }
}

/// Bytes of the signal stack: room for the host's largest signal frame
/// (AVX-512 and AMX state, about 11 KiB) several times over.
pub const SIGNAL_STACK_SIZE: u64 = 128 * 1024;
/// Bytes of the stack of the idle loop and of boot.
pub const IDLE_STACK_SIZE: u64 = 256 * 1024;

/// Bytes of the per-boot area that are mapped from the beginning.
pub const FIRST_SIZE: u64 = 8 << 20;
/// Most virtual CPUs of a host process.
pub const MAX_VCPUS: u32 = 64;
/// Offset of the signal stack in a vCPU's area; a guard page lies below.
const SIGNAL_STACK_OFFSET: u64 = 0x10_000;
/// Offset of the idle stack; a guard page lies below.
const IDLE_STACK_OFFSET: u64 = 0x50_000;
/// Bytes of a vCPU's area: block, signal stack, idle stack.
const AREA_SIZE: u64 = 0x10_0000;

/// The area of vCPU `index`.
pub(crate) fn area(index: u32) -> u64 {
    if index == 0 { BOOT_BASE } else { OTHER_VCPUS + (index as u64 - 1) * AREA_SIZE }
}

/// Bottom of a vCPU's signal stack.
pub(crate) fn signal_stack(index: u32) -> u64 {
    area(index) + SIGNAL_STACK_OFFSET
}

/// Bottom of a vCPU's idle stack.
fn idle_stack(index: u32) -> u64 {
    area(index) + IDLE_STACK_OFFSET
}

/// The memory of the first vCPU that every boot uses, as start and bytes.
pub fn used_from_the_beginning() -> [(u64, u64); 3] {
    const STACK_USED: u64 = 32 << 10;
    [
        (area(0), 4096),
        (signal_stack(0) + SIGNAL_STACK_SIZE - STACK_USED, STACK_USED),
        (idle_stack(0) + IDLE_STACK_SIZE - STACK_USED, STACK_USED),
    ]
}

/// Makes the calling host thread the first vCPU of its host process, and maps the first
/// [`FIRST_SIZE`] bytes of the per-boot area for it.
///
/// # Errors
/// The host cannot map them.
pub fn begin_first() -> Result<()> {
    // SAFETY: nothing is in the per-boot area before there is a vCPU.
    let first = unsafe { KernelRange::new(BOOT_BASE, FIRST_SIZE) };
    host::map_anonymous(first, PROT_READ | PROT_WRITE)?;
    guard_stacks(0)?;
    // SAFETY: just mapped.
    unsafe { initialize(0) };
    block().entry.store(ENTRY_OPEN, Relaxed);
    process().vcpus.store(1, Relaxed);
    Ok(())
}

/// Takes away the pages below the stacks.
fn guard_stacks(index: u32) -> Result<()> {
    let guards = [signal_stack(index) - 4096, idle_stack(index) - 4096];
    guards.into_iter().try_for_each(|guard| {
        // SAFETY: the area holds block and stacks, and leaves this page to nobody.
        host::protect(unsafe { KernelRange::new(guard, 4096) }, 0)
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

/// Goes on with `main` on the idle stack of the first vCPU. Nothing on the stack in use
/// is needed again.
pub fn leave_first_stack(main: extern "C" fn() -> !) -> ! {
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

/// The block of the vCPU that this code runs on.
#[inline]
pub(crate) fn block() -> &'static VcpuBlock {
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
pub(crate) fn block_of_stack(rsp: u64) -> &'static VcpuBlock {
    match area_of(rsp) {
        // SAFETY: a stack that is in use lies in an area that is mapped, and the area
        // begins with the block.
        Some(area) => unsafe { &*(area as *const VcpuBlock) },
        None => block(),
    }
}

/// The block of the vCPU whose signal stack `rsp` lies on, whatever `%gs` is.
pub(crate) fn block_of_signal_stack(rsp: u64) -> &'static VcpuBlock {
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
pub(crate) fn is_on_signal_stack(other: u64, rsp: u64) -> bool {
    let bottom = signal_stack(block_of_signal_stack(other).index.get());
    (bottom..bottom + SIGNAL_STACK_SIZE).contains(&rsp)
}

/// Where the stack that `rsp` lies on ends: the idle stack, the signal stack
/// or the running thread's kernel stack.
pub(crate) fn stack_top_of(rsp: u64) -> u64 {
    let index = block().index.get();
    for (bottom, size) in
        [(signal_stack(index), SIGNAL_STACK_SIZE), (idle_stack(index), IDLE_STACK_SIZE)]
    {
        if (bottom..bottom + size).contains(&rsp) {
            return bottom + size;
        }
    }
    let top = block().kernel_stack_top.get();
    if rsp < top && top - rsp <= KERNEL_STACK_SIZE as u64 { top } else { rsp }
}

/// What the kernel has for each vCPU, of this boot.
///
/// # Safety
/// One type of a program implements this.
pub unsafe trait VcpuData: Sized + 'static {}

/// Gives the calling vCPU what the kernel has for it. That of before, if there was one,
/// belongs to the vCPU of another host process, which this one was forked from.
pub fn install<D: VcpuData>(data: Box<D>) {
    block().set_data(data);
}

/// What [`install`] or [`start`] was given for the calling vCPU. The reference must not be
/// kept beyond [`end`].
#[inline]
pub fn data<D: VcpuData>() -> Option<&'static D> {
    block().data()
}

/// A vCPU that waits, or is about to, or has just begun.
pub struct IdleVcpu(pub(crate) &'static VcpuBlock);

impl IdleVcpu {
    /// As [`data`], of this vCPU.
    pub fn data<D: VcpuData>(&self) -> Option<&'static D> {
        self.0.data()
    }
}

/// Number of the calling vCPU in its host process.
pub fn index() -> u32 {
    block().index.get()
}

/// Starts vCPU `index` of this host process, with `data`: a host thread that begins in
/// [`upcalls::Upcalls::run_vcpu`]. Returns its id. The caller has the kernel lock.
///
/// # Errors
/// The host has no memory or no thread for it; `EBUSY` if a vCPU with this number has ended
/// in this host process.
pub fn start<D: VcpuData>(index: u32, data: Box<D>) -> Result<u32> {
    assert!(0 < index && index < MAX_VCPUS, "no vCPU has this number");
    let process = process();
    assert!(process.vcpus.load(Relaxed) & (1 << index) == 0, "the vCPU runs");
    if process.ended.load(Relaxed) & (1 << index) != 0 {
        return Err(Errno::EBUSY);
    }
    // SAFETY: no vCPU of this host process has or had the area; one of the host process that
    // it was forked from may have, and has left it here.
    let area_of_new = unsafe { KernelRange::new(area(index), AREA_SIZE) };
    host::map_anonymous(area_of_new, PROT_READ | PROT_WRITE)?;
    guard_stacks(index)?;
    // SAFETY: just mapped, zero, and used by nobody yet.
    let new = unsafe { &*(area(index) as *const VcpuBlock) };
    new.set_data(data);
    new.entry.store(block().entry.load(Relaxed), Relaxed);
    let started = host::start_thread(idle_stack(index) + IDLE_STACK_SIZE, index);
    match started {
        Ok(_) => drop(process.vcpus.fetch_or(1 << index, Relaxed)),
        // SAFETY: no thread has taken it over.
        Err(_) => drop(unsafe { new.take_data::<D>() }),
    }
    started
}

/// Where a new host thread begins, on its idle stack.
pub(crate) extern "C" fn start_of_vcpu(index: u32) -> ! {
    // SAFETY: the area was mapped for this thread.
    unsafe { initialize(index) };
    if fault::use_signal_stack(index).is_err() {
        crate::panic::die_with("a virtual CPU has no signal stack")
    }
    kernel_lock::acquire();
    upcalls::kernel().run_vcpu()
}

/// Ends the calling vCPU, and with the last one the host process. The caller has the kernel
/// lock.
pub fn end<D: VcpuData>() -> ! {
    let block = block();
    let bit = 1 << block.index.get();
    process().vcpus.fetch_and(!bit, Relaxed);
    process().ended.fetch_or(bit, Relaxed);
    // SAFETY: nobody has it any more, since the vCPU does nothing else from here on.
    drop(unsafe { block.take_data::<D>() });
    kernel_lock::release();
    host::exit_thread()
}

/// A new host process begins: a copy of the one that has forked, with the calling vCPU
/// only, which is idle.
pub fn begin_forked() {
    let block = block();
    block.thread.set(core::ptr::null());
    block.thread_object.set(core::ptr::null());
    block.fpu_owner.set(core::ptr::null());
    block.alarmed.store(false, Relaxed);
    block.doorbell_rang.store(false, Relaxed);
    process().vcpus.store(1 << block.index.get(), Relaxed);
    process().ended.store(0, Relaxed);
    process().alarm_at.store(0, Relaxed);
}

/// Opens or closes the direct entry of every vCPU of this host process.
pub(crate) fn set_entry(word: u64) {
    let vcpus = process().vcpus.load(Relaxed);
    for index in (0..MAX_VCPUS).filter(|index| vcpus & (1 << index) != 0) {
        // SAFETY: the areas of the vCPUs of this host process are mapped.
        let block = unsafe { &*(area(index) as *const VcpuBlock) };
        block.entry.store(word, Relaxed);
    }
}

/// When the alarm of this host process goes off, as the kernel has noted it; 0 if it is
/// not set, or has gone off and was taken.
pub fn alarm_at() -> &'static AtomicU64 {
    &process().alarm_at
}

/// Whether there is a [`crate::memory::Window`] of this host process.
pub(crate) fn window_is_used() -> &'static AtomicBool {
    &process().window_is_used
}

/// Which buffers of [`crate::message`] are in use in this host process, a bit for each.
pub(crate) fn messages_used() -> &'static AtomicU32 {
    &process().messages_used
}

/// A page of no use but for [`barrier`].
const BARRIER_PAGE: u64 = BOOT_BASE + 0x9_0000;

/// Makes every processor that runs a vCPU of this host process execute a full
/// memory barrier: taking the right to write from a page that is in use makes
/// the host interrupt them all, as membarrier(2) was done before it existed.
///
/// # Errors
/// The host cannot change the page.
pub fn barrier() -> Result<()> {
    // SAFETY: the page lies in the per-boot area, above the idle stack.
    unsafe { (BARRIER_PAGE as *mut u64).write_volatile(1) };
    // SAFETY: nobody refers to the page.
    let page = unsafe { KernelRange::new(BARRIER_PAGE, 4096) };
    host::protect(page, PROT_READ)?;
    host::protect(page, PROT_READ | PROT_WRITE)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Data(Arc<()>);

    // SAFETY: the only type of this test program.
    unsafe impl VcpuData for Data {}

    fn zeroed_block() -> Box<VcpuBlock> {
        // SAFETY: all zeros is a block, as in memory that was just mapped.
        unsafe { Box::new_zeroed().assume_init() }
    }

    #[test]
    fn a_vcpu_whose_thread_did_not_start_leaves_nothing_behind() {
        let (block, object) = (zeroed_block(), Arc::new(()));
        block.set_data(Box::new(Data(object.clone())));
        assert!(Arc::ptr_eq(&block.data::<Data>().unwrap().0, &object));
        // As `start` does after a failure, and `end`.
        // SAFETY: nobody refers to the data.
        drop(unsafe { block.take_data::<Data>() });
        assert_eq!(Arc::strong_count(&object), 1);
        assert!(block.data::<Data>().is_none());
        // SAFETY: as above.
        assert!(unsafe { block.take_data::<Data>() }.is_none());
    }

    /// The host may still run the thread of a vCPU that has ended, on the stack that lies there.
    #[test]
    fn the_area_of_a_vcpu_that_has_ended_is_not_given_to_another() {
        begin_first().unwrap();
        let object = Arc::new(());
        // As `end` leaves it.
        process().ended.fetch_or(1 << 5, Relaxed);
        assert_eq!(start(5, Box::new(Data(object.clone()))), Err(Errno::EBUSY));
        assert_eq!(Arc::strong_count(&object), 1);
        assert_eq!(process().vcpus.load(Relaxed), 1);
        // A host process that was forked off has no such thread.
        begin_forked();
        assert_eq!(process().ended.load(Relaxed), 0);
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
