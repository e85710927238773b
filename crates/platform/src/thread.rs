//! Guest threads, as the kernel has them: their kernel stacks, and which one runs.
#![allow(unsafe_code)]

use alloc::sync::Arc;
use core::ops::Deref;
use core::ptr::NonNull;

use crate::machine::{Machine, ThreadContext, Threads};
use crate::saved::OfHost;

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
/// One type of a program implements this: the one that all its threads have. A thread that
/// runs is in an `Arc`, and must not be dropped while it runs or while its vector state is in the registers
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

/// Does `work` as if on behalf of a thread, which must not run yet. Nothing that refers to the
/// thread gets out of it: a [`Running`] cannot be sent.
pub fn with_identity<T: GuestThread, R: Send>(
    thread: &Arc<T>,
    work: impl FnOnce() -> R + Send,
) -> R {
    // SAFETY: `thread` is there until `work` is done.
    unsafe { assume_identity(thread) };
    let outcome = work();
    forget_identity();
    outcome
}

/// Makes a thread the running one of a vCPU that never runs any, as those of unit tests.
///
/// # Safety
/// The thread is there for as long as anybody asks for the running one.
pub unsafe fn assume_identity<T: GuestThread>(thread: &Arc<T>) {
    // SAFETY: the caller's promise.
    unsafe { Machine::set_running(Arc::as_ptr(thread).cast(), thread.context()) };
}

/// Undoes [`assume_identity`]: the kernel works on its own behalf.
pub fn forget_identity() {
    // SAFETY: none is there for as long as anybody likes.
    unsafe { Machine::set_running(core::ptr::null(), core::ptr::null()) };
}

/// The running thread, for code that works on its behalf, on its kernel stack.
///
/// The thread is there for as long as its stack is in use, and this never leaves the stack. It
/// cannot be sent:
///
/// ```compile_fail
/// fn send(_: impl Send) {}
/// fn elsewhere(thread: thaw_platform::thread::Running<u32>) {
///     send(thread)
/// }
/// ```
///
/// nor be part of saved state:
///
/// ```compile_fail
/// thaw_platform::saved::assert_saved::<thaw_platform::thread::Running<u32>>();
/// ```
///
/// The one way around that is to leak it, which no line of the kernel does (the kernel's
/// `tests/layers.rs` looks).
pub struct Running<T> {
    thread: NonNull<T>,
    _of_host: OfHost,
}

impl<T> Clone for Running<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Running<T> {}

impl<T> Deref for Running<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the thread is there, as `Running` says.
        unsafe { self.thread.as_ref() }
    }
}

impl<T: GuestThread> Running<T> {
    /// The running thread; `None` while the kernel works on its own behalf.
    #[inline]
    pub fn get() -> Option<Self> {
        let thread = NonNull::new(Machine::running().cast_mut().cast())?;
        Some(Self { thread, _of_host: OfHost::new() })
    }

    /// The thread, shared.
    pub fn to_arc(self) -> Arc<T> {
        // SAFETY: all threads that run are in an `Arc`, and this one is there.
        unsafe {
            Arc::increment_strong_count(self.thread.as_ptr());
            Arc::from_raw(self.thread.as_ptr())
        }
    }
}
