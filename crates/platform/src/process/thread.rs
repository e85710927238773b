//! Guest threads: what the entry code needs of them, and switching between them.
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::host_code::Leaving;
use super::vcpu::{self, ENTRY_OPEN, VcpuBlock, block};
use super::{HostProcesses, entry, fault, switch};
use crate::errno::Result;
use crate::fpu::FpuState;
use crate::kernel_lock;
use crate::machine::{ThreadState, Threads};
use crate::registers::{Frame, TrapFrame};
use crate::sync::KernelCell;
use crate::thread::{KERNEL_STACK_SIZE, KernelStack};

/// The platform's part of a guest thread. All of it is saved.
pub struct ThreadContext {
    /// Set when something is to be done before the thread returns to the guest.
    attention: AtomicBool,
    /// Base of the `%fs` segment while the thread does not run.
    fs_base: AtomicU64,
    /// Base of `%gs` if the guest has one of its own ([`super::segment`]); 0 if not.
    gs_base: AtomicU64,
    /// Vector state while the registers belong to another thread.
    fpu: KernelCell<FpuState>,
    /// Stack pointer of the kernel while the thread does not run.
    stack_pointer: AtomicU64,
    stack: KernelStack,
    /// Its way out of reading a clock.
    pub(super) leaving: Leaving,
}

/// For the entry code.
pub(super) const ATTENTION: usize = core::mem::offset_of!(ThreadContext, attention);
/// For the entry code.
pub(super) const GS_BASE: usize = core::mem::offset_of!(ThreadContext, gs_base);

impl ThreadContext {
    fn frame_address(&self) -> *mut TrapFrame {
        (self.stack.top() as *mut TrapFrame).wrapping_sub(1)
    }
}

impl ThreadState for ThreadContext {
    fn new(stack: KernelStack, frame: TrapFrame) -> Self {
        let context = Self {
            attention: AtomicBool::new(false),
            fs_base: AtomicU64::new(0),
            gs_base: AtomicU64::new(0),
            fpu: KernelCell::new(FpuState::initial()),
            stack_pointer: AtomicU64::new(0),
            stack,
            leaving: Leaving::new(),
        };
        let at = context.frame_address();
        // SAFETY: the new stack is unused; the frame lies at its top and what the first
        // switch takes off below it.
        let stack_pointer = unsafe {
            at.write(frame);
            switch::prepare(at as u64, &raw const entry::thaw_thread_start as u64)
        };
        context.stack_pointer.store(stack_pointer, Relaxed);
        context
    }

    fn frame(&self) -> &Frame {
        // SAFETY: the frame lies at the top of the stack, where `new` has put one, as long
        // as the thread is in the kernel; it is a cell.
        unsafe { &*self.frame_address().cast::<Frame>() }
    }

    fn stack(&self) -> &KernelStack {
        &self.stack
    }

    fn stack_pointer(&self) -> u64 {
        self.stack_pointer.load(Relaxed)
    }

    #[inline]
    fn needs_attention(&self) {
        self.attention.store(true, Relaxed);
    }

    #[inline]
    fn is_attention_needed(&self) -> bool {
        self.attention.load(Relaxed)
    }

    fn attended(&self) {
        self.attention.store(false, Relaxed);
    }

    fn fs_base(&self) -> u64 {
        self.fs_base.load(Relaxed)
    }

    fn set_fs_base(&self, base: u64) {
        self.fs_base.store(base, Relaxed);
    }

    fn gs_base(&self) -> u64 {
        self.gs_base.load(Relaxed)
    }

    fn set_gs_base(&self, base: u64) {
        self.gs_base.store(base, Relaxed);
    }

    fn save_fpu(&self) {
        if core::ptr::eq(block().fpu_owner.get(), self) {
            self.fpu.borrow_mut().save();
            block().fpu_owner.set(core::ptr::null());
        }
    }

    fn copy_fpu(&self, running: &Self) {
        running.fpu.borrow_mut().save();
        self.fpu.borrow_mut().copy_from(&running.fpu.borrow_mut());
    }

    fn fpu(&self) -> &KernelCell<FpuState> {
        &self.fpu
    }

    fn reset_fpu(&self) {
        *self.fpu.borrow_mut() = FpuState::initial();
        self.fpu.borrow_mut().load();
    }

    fn forget_fpu(&self) {
        let block = block();
        if core::ptr::eq(block.fpu_owner.get(), self) {
            block.fpu_owner.set(core::ptr::null());
        }
    }

    fn switch_to_idle(&self) {
        self.fs_base.store(HostProcesses::fs_base(), Relaxed);
        // SAFETY: the idle loop has saved its stack pointer when it switched to us.
        unsafe { switch::thaw_switch(self.stack_pointer.as_ptr(), block().idle_rsp.get()) };
    }
}

/// Puts a thread's vector state into the registers.
fn take_fpu(block: &VcpuBlock, context: &ThreadContext) {
    let owner = block.fpu_owner.get();
    if core::ptr::eq(owner, context) {
        return;
    }
    // SAFETY: the owner is alive, as `switch_from_idle` was promised.
    if let Some(owner) = unsafe { owner.as_ref() } {
        owner.fpu.borrow_mut().save();
    }
    context.fpu.borrow_mut().load();
    block.fpu_owner.set(context);
}

impl Threads for HostProcesses {
    type State = ThreadContext;

    fn catch_guest() -> Result<()> {
        fault::install_handlers()
    }

    fn fault_on_cpuid() -> Result<()> {
        fault::on_cpuid()
    }

    fn put_registers_away() {
        // SAFETY: the owner is alive, as `switch_from_idle` was promised.
        if let Some(owner) = unsafe { block().fpu_owner.get().as_ref() } {
            owner.save_fpu();
        }
    }

    fn fs_base() -> u64 {
        let base: u64;
        // SAFETY: FSGSBASE is a requirement, checked by `thaw doctor`.
        unsafe {
            core::arch::asm!("rdfsbase {}", out(reg) base, options(nostack, preserves_flags, nomem))
        };
        base
    }

    fn set_fs_base(base: u64) {
        // SAFETY: as above; the kernel itself does not use `%fs`. Callers pass
        // canonical addresses.
        unsafe { core::arch::asm!("wrfsbase {}", in(reg) base, options(nostack, preserves_flags)) };
    }

    // Closes the direct entry if the thread has one.
    fn keep_own_gs(running: &ThreadContext) {
        if running.gs_base() != 0 && block().entry.load(Relaxed) == ENTRY_OPEN {
            vcpu::set_entry(0);
        }
    }

    fn forget_own_gs() {
        vcpu::set_entry(ENTRY_OPEN);
    }

    #[inline]
    fn running() -> *const () {
        block().thread_object.get()
    }

    unsafe fn set_running(thread: *const (), state: *const ThreadContext) {
        block().thread_object.set(thread);
        block().thread.set(state);
    }

    unsafe fn switch_from_idle(thread: *const (), state: &ThreadContext, prepare: impl FnOnce()) {
        let block = block();
        block.kernel_stack_top.set(state.stack.top());
        // SAFETY: the caller's promise.
        unsafe { Self::set_running(thread, state) };
        take_fpu(block, state);
        prepare();
        Self::set_fs_base(state.fs_base.load(Relaxed));
        // SAFETY: `new` or `switch_to_idle` has saved the stack pointer, which is used once.
        unsafe { switch::thaw_switch(block.idle_rsp.as_ptr(), state.stack_pointer.load(Relaxed)) };
        if kernel_lock::is_enabled() {
            // Another vCPU may run it next.
            state.save_fpu();
        }
        // SAFETY: none.
        unsafe { Self::set_running(core::ptr::null(), core::ptr::null()) };
    }

    fn stack_end(rsp: u64) -> u64 {
        let index = block().index.get();
        for (bottom, size) in [
            (vcpu::signal_stack(index), vcpu::SIGNAL_STACK_SIZE),
            (vcpu::idle_stack(index), vcpu::IDLE_STACK_SIZE),
        ] {
            if (bottom..bottom + size).contains(&rsp) {
                return bottom + size;
            }
        }
        let top = block().kernel_stack_top.get();
        if rsp < top && top - rsp <= KERNEL_STACK_SIZE as u64 { top } else { rsp }
    }
}

/// First thing that a new thread does, on its kernel stack.
pub(super) extern "C" fn begin(_frame: &Frame) {
    crate::upcalls::kernel().begin_thread();
    kernel_lock::release();
}

/// The way out calls this for as long as the thread needs attention.
pub(super) extern "C" fn attend(frame: &Frame) {
    kernel_lock::acquire();
    let kernel = crate::upcalls::kernel();
    // SAFETY: the running thread lives as long as it runs.
    let thread = unsafe { block().thread.get().as_ref() };
    match thread.filter(|thread| thread.leaving.steps(frame, kernel.is_in_vdso(frame.rip()))) {
        Some(thread) => thread.attended(),
        None => kernel.before_return(frame),
    }
    kernel_lock::release();
}

/// The direct entry: performs the system call of a frame. What is due before the thread
/// returns to the guest follows on the way out.
pub(super) extern "C" fn dispatch(frame: &Frame) {
    kernel_lock::acquire();
    crate::upcalls::kernel().system_call(frame);
    kernel_lock::release();
}
