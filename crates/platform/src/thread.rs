//! Guest threads, as the kernel has them: their kernel stacks, and which one runs.
#![allow(unsafe_code)]

use alloc::sync::Arc;

use crate::machine::{Machine, ThreadContext, Threads};

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

    /// Address behind the last byte.
    pub fn top(&self) -> u64 {
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
/// ([`crate::machine::ThreadState::forget_fpu`]).
pub unsafe trait GuestThread: Sized + 'static {
    /// The platform's part.
    fn context(&self) -> &ThreadContext;
}

/// Runs a thread on this virtual CPU until it blocks or ends ([`Threads::switch_from_idle`]).
pub fn switch_from_idle<T: GuestThread>(thread: &Arc<T>, prepare: impl FnOnce()) {
    // SAFETY: the state is the thread's, and the thread lives long enough, as `GuestThread`
    // promises. A run queue has handed it to this vCPU only.
    unsafe { Machine::switch_from_idle(Arc::as_ptr(thread).cast(), thread.context(), prepare) };
}

/// As long as this is there, the kernel works as if on behalf of a thread, which must not
/// run yet.
pub struct Identity<T: GuestThread> {
    _thread: Arc<T>,
}

impl<T: GuestThread> Identity<T> {
    /// That of a thread.
    pub fn of(thread: Arc<T>) -> Self {
        Machine::set_running(Arc::as_ptr(&thread).cast(), thread.context());
        Self { _thread: thread }
    }
}

impl<T: GuestThread> Drop for Identity<T> {
    fn drop(&mut self) {
        Machine::set_running(core::ptr::null(), core::ptr::null());
    }
}

/// The running thread; `None` while the kernel works on its own behalf. The reference
/// must not be kept beyond the thread's end.
#[inline]
pub fn running<T: GuestThread>() -> Option<&'static T> {
    // SAFETY: `GuestThread` has one type and so has what `name` was given; the
    // running thread is not dropped.
    unsafe { Machine::running().cast::<T>().as_ref() }
}

/// The running thread, shared.
pub fn running_arc<T: GuestThread>() -> Option<Arc<T>> {
    let thread: *const T = running()?;
    // SAFETY: `switch_from_idle` and `Identity` were given an `Arc`, and the running thread is not dropped.
    unsafe {
        Arc::increment_strong_count(thread);
        Some(Arc::from_raw(thread))
    }
}
