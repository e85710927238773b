//! The platform's part of a guest thread: its kernel stack, the registers with which it
//! entered the kernel, its vector state, and where it goes on when it runs again.
#![allow(unsafe_code)]

use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use crate::entry::{self, Frame, TrapFrame};
use crate::fpu::FpuState;
use crate::sync::KernelCell;
use crate::{kernel_lock, segment, switch, vcpu};

/// Bytes of a kernel stack.
pub const KERNEL_STACK_SIZE: usize = 64 << 10;

/// The kernel stack of a guest thread.
pub struct KernelStack {
    bottom: *mut u8,
    release: unsafe fn(*mut u8),
}

// SAFETY: owned memory.
unsafe impl Send for KernelStack {}
// SAFETY: only its address is used through `&`.
unsafe impl Sync for KernelStack {}

impl KernelStack {
    /// A stack in memory that begins at `bottom`, and which `release` gives back.
    ///
    /// # Safety
    /// [`KERNEL_STACK_SIZE`] bytes, aligned to 16, must be the stack's alone until
    /// `release` is called with `bottom`.
    pub unsafe fn in_memory(bottom: *mut u8, release: unsafe fn(*mut u8)) -> Self {
        Self { bottom, release }
    }

    /// Address of the first byte.
    pub fn bottom(&self) -> *mut u8 {
        self.bottom
    }

    fn top(&self) -> u64 {
        self.bottom as u64 + KERNEL_STACK_SIZE as u64
    }
}

impl Drop for KernelStack {
    fn drop(&mut self) {
        // SAFETY: the promise of whoever called `in_memory`.
        unsafe { (self.release)(self.bottom) };
    }
}

/// A guest thread of the kernel, which has a [`ThreadContext`].
///
/// # Safety
/// One type of a program implements this: the one that all its threads have. A thread
/// must not be dropped while it runs or while its vector state is in the registers
/// ([`ThreadContext::forget_fpu`]).
pub unsafe trait GuestThread: Sized + 'static {
    /// The platform's part.
    fn context(&self) -> &ThreadContext;
}

/// The platform's part of a guest thread. All of it is saved.
pub struct ThreadContext {
    /// Set when something is to be done before the thread returns to the guest.
    attention: AtomicBool,
    /// Base of the `%fs` segment while the thread does not run.
    fs_base: AtomicU64,
    /// Base of `%gs` if the guest has one of its own ([`crate::segment`]); 0 if not.
    gs_base: AtomicU64,
    /// Vector state while the registers belong to another thread.
    fpu: KernelCell<FpuState>,
    /// Stack pointer of the kernel while the thread does not run.
    stack_pointer: AtomicU64,
    stack: KernelStack,
}

/// For the entry code.
pub(crate) const ATTENTION: usize = core::mem::offset_of!(ThreadContext, attention);
/// For the entry code.
pub(crate) const GS_BASE: usize = core::mem::offset_of!(ThreadContext, gs_base);

impl ThreadContext {
    /// A thread that begins with the registers `frame`, and with [`begin`] in the kernel.
    pub fn new(stack: KernelStack, frame: TrapFrame) -> Self {
        let context = Self {
            attention: AtomicBool::new(false),
            fs_base: AtomicU64::new(0),
            gs_base: AtomicU64::new(0),
            fpu: KernelCell::new(FpuState::initial()),
            stack_pointer: AtomicU64::new(0),
            stack,
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

    fn frame_address(&self) -> *mut TrapFrame {
        (self.stack.top() as *mut TrapFrame).wrapping_sub(1)
    }

    /// The registers with which the thread entered the kernel and will leave it.
    pub fn frame(&self) -> &Frame {
        // SAFETY: the frame lies at the top of the stack, where `new` has put one, as long
        // as the thread is in the kernel; it is a cell.
        unsafe { &*self.frame_address().cast::<Frame>() }
    }

    /// The kernel stack.
    pub fn stack(&self) -> &KernelStack {
        &self.stack
    }

    /// Where the part of the kernel stack begins that is in use, of a thread that does
    /// not run.
    pub fn stack_pointer(&self) -> u64 {
        self.stack_pointer.load(Relaxed)
    }

    /// Marks that there is something to do before the thread returns to the guest.
    #[inline]
    pub fn needs_attention(&self) {
        self.attention.store(true, Relaxed);
    }

    /// Whether there is.
    #[inline]
    pub fn is_attention_needed(&self) -> bool {
        self.attention.load(Relaxed)
    }

    /// What there was to do is being done.
    pub fn attended(&self) {
        self.attention.store(false, Relaxed);
    }

    /// Base of `%fs` of a thread that does not run.
    pub fn fs_base(&self) -> u64 {
        self.fs_base.load(Relaxed)
    }

    /// Sets the base of `%fs` of a thread that does not run.
    pub fn set_fs_base(&self, base: u64) {
        self.fs_base.store(base, Relaxed);
    }

    /// Base of the guest's own `%gs`; 0 if it has none.
    pub fn gs_base(&self) -> u64 {
        self.gs_base.load(Relaxed)
    }

    /// Gives the guest a `%gs` of its own from its next return on; 0 takes it away.
    pub fn set_gs_base(&self, base: u64) {
        self.gs_base.store(base, Relaxed);
    }

    /// Saves the vector state if it is in this virtual CPU's registers, so that memory
    /// holds all of the thread.
    pub fn save_fpu(&self) {
        if core::ptr::eq(vcpu::block().fpu_owner.get(), self) {
            self.fpu.borrow_mut().save();
            vcpu::block().fpu_owner.set(core::ptr::null());
        }
    }

    /// Takes over the vector state of the running thread.
    pub fn copy_fpu(&self, running: &Self) {
        running.fpu.borrow_mut().save();
        self.fpu.borrow_mut().copy_from(&running.fpu.borrow_mut());
    }

    /// The vector state in memory: that of the registers for the running thread is only
    /// there after [`ThreadContext::save_fpu`] or [`FpuState::save`].
    pub fn fpu(&self) -> &KernelCell<FpuState> {
        &self.fpu
    }

    /// Puts the vector state of the running thread back to that of a new program.
    pub fn reset_fpu(&self) {
        *self.fpu.borrow_mut() = FpuState::initial();
        self.fpu.borrow_mut().load();
    }

    /// Gives up the vector state in the registers: the thread has ended.
    pub fn forget_fpu(&self) {
        let block = vcpu::block();
        if core::ptr::eq(block.fpu_owner.get(), self) {
            block.fpu_owner.set(core::ptr::null());
        }
    }

    /// Gives the virtual CPU back to the idle loop; returns when the thread is chosen
    /// again. To be called by the running thread.
    pub fn switch_to_idle(&self) {
        self.fs_base.store(segment::fs_base(), Relaxed);
        // SAFETY: the idle loop has saved its stack pointer when it switched to us.
        unsafe { switch::thaw_switch(self.stack_pointer.as_ptr(), vcpu::block().idle_rsp.get()) };
    }
}

/// Runs a thread on this virtual CPU until it blocks or ends. To be called by the idle
/// loop. `prepare` is called as soon as signals of the host count for the thread, so that
/// none that it asks for is overlooked.
pub fn switch_from_idle<T: GuestThread>(thread: &Arc<T>, prepare: impl FnOnce()) {
    let (block, context) = (vcpu::block(), thread.context());
    block.kernel_stack_top.set(context.stack.top());
    block.set_thread(Some(thread));
    take_fpu(block, context);
    prepare();
    segment::set_fs_base(context.fs_base.load(Relaxed));
    // SAFETY: `new` or `switch_to_idle` has saved the stack pointer, which is used once.
    unsafe { switch::thaw_switch(block.idle_rsp.as_ptr(), context.stack_pointer.load(Relaxed)) };
    let block = vcpu::block();
    if kernel_lock::is_enabled() {
        // Another vCPU may run it next.
        context.save_fpu();
    }
    block.set_thread::<T>(None);
}

/// Puts a thread's vector state into the registers.
fn take_fpu(block: &vcpu::VcpuBlock, context: &ThreadContext) {
    let owner = block.fpu_owner.get();
    if core::ptr::eq(owner, context) {
        return;
    }
    // SAFETY: the owner is alive, as `GuestThread` promises.
    if let Some(owner) = unsafe { owner.as_ref() } {
        owner.fpu.borrow_mut().save();
    }
    context.fpu.borrow_mut().load();
    block.fpu_owner.set(context);
}

/// Saves the vector state in the registers of this virtual CPU, which is idle, so that
/// memory holds all of every thread.
pub fn put_registers_away() {
    // SAFETY: the owner is alive, as `GuestThread` promises.
    if let Some(owner) = unsafe { vcpu::block().fpu_owner.get().as_ref() } {
        owner.save_fpu();
    }
}

/// As long as this is there, the kernel works as if on behalf of a thread, which must not
/// run yet.
pub struct Identity<T: GuestThread> {
    _thread: Arc<T>,
}

impl<T: GuestThread> Identity<T> {
    /// That of a thread.
    pub fn of(thread: Arc<T>) -> Self {
        vcpu::block().set_thread(Some(&thread));
        Self { _thread: thread }
    }
}

impl<T: GuestThread> Drop for Identity<T> {
    fn drop(&mut self) {
        vcpu::block().set_thread::<T>(None);
    }
}

/// The running thread; `None` while the kernel works on its own behalf. The reference
/// must not be kept beyond the thread's end.
#[inline]
pub fn running<T: GuestThread>() -> Option<&'static T> {
    // SAFETY: `GuestThread` has one type and so has what `set_thread` was given; the
    // running thread is not dropped.
    unsafe { vcpu::block().thread_object.get().cast::<T>().as_ref() }
}

/// The running thread, shared.
pub fn running_arc<T: GuestThread>() -> Option<Arc<T>> {
    let thread: *const T = running()?;
    // SAFETY: `set_thread` was given an `Arc`, and the running thread is not dropped.
    unsafe {
        Arc::increment_strong_count(thread);
        Some(Arc::from_raw(thread))
    }
}

/// First thing that a new thread does, on its kernel stack.
pub(crate) extern "C" fn begin(_frame: &Frame) {
    crate::upcalls::kernel().begin_thread();
    kernel_lock::release();
}

/// The way out calls this for as long as the thread needs attention.
pub(crate) extern "C" fn attend(frame: &Frame) {
    kernel_lock::acquire();
    crate::upcalls::kernel().before_return(frame);
    kernel_lock::release();
}

/// The direct entry: performs the system call of a frame. What is due before the thread
/// returns to the guest follows on the way out.
pub(crate) extern "C" fn dispatch(frame: &Frame) {
    kernel_lock::acquire();
    crate::upcalls::kernel().system_call(frame);
    kernel_lock::release();
}
