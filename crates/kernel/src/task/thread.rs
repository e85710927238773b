//! Threads: kernel objects with a kernel stack and a saved context.
#![allow(unsafe_code)]

use alloc::alloc::{Layout, alloc, dealloc};
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use super::Process;
use super::sched::SchedState;
use super::scheduling::Scheduling;
use super::signal::ThreadSignals;
use crate::fs::file::Events;
use crate::mm::heap;
use crate::platform::entry::TrapFrame;
use crate::platform::fpu::FpuState;
use crate::platform::user::UserAddress;
use crate::platform::{clock, context, entry, kernel_lock, vcpu};
use crate::sync::Lock;

/// Bytes of a kernel stack.
pub const KERNEL_STACK_SIZE: usize = 64 << 10;

/// A guest thread.
pub struct Thread {
    /// See [`Thread::tid`].
    tid: AtomicU32,
    /// The process it belongs to.
    pub process: Arc<Process>,
    /// Name (`PR_SET_NAME`), NUL-padded.
    pub name: Lock<[u8; 16]>,
    /// Whether it runs, could run or waits.
    pub sched: Lock<SchedState>,
    /// CPUs, policy, priority and nice value that it has asked for.
    pub scheduling: Lock<Scheduling>,
    /// Signal mask, pending signals, alternate stack.
    pub signals: Lock<ThreadSignals>,
    /// Set when something is to be done before the thread returns to the guest.
    pub attention: AtomicBool,
    /// Set when the thread has to end: its process exits or executes a program.
    pub dying: AtomicBool,
    /// Where to write the thread id before the thread first runs
    /// (`CLONE_CHILD_SETTID`); 0 for nowhere.
    pub set_child_tid: AtomicU64,
    /// Where to write 0 and wake a futex at exit (set_tid_address(2)).
    pub clear_child_tid: AtomicU64,
    /// Head of the list of robust futexes (set_robust_list(2)).
    pub robust_list: AtomicU64,
    /// Base of the `%fs` segment while the thread does not run.
    pub fs_base: AtomicU64,
    /// Base of `%gs` if the guest has one of its own ([`crate::platform::segment`]); 0
    /// if not.
    pub gs_base: AtomicU64,
    /// Vector state while the registers belong to another thread.
    pub fpu: Lock<FpuState>,
    /// CPU time up to the last switch, in nanoseconds.
    cpu_ns: AtomicU64,
    /// Since when it has been running, on the host's monotonic clock in
    /// nanoseconds; 0 if it does not run.
    running_since_ns: AtomicU64,
    /// Saved stack pointer of the kernel context while it does not run.
    context: AtomicU64,
    stack: KernelStack,
}

struct KernelStack(*mut u8);

// SAFETY: owned memory.
unsafe impl Send for KernelStack {}
// SAFETY: only its address is used through `&`.
unsafe impl Sync for KernelStack {}

impl KernelStack {
    fn layout() -> Layout {
        Layout::from_size_align(KERNEL_STACK_SIZE, 4096).unwrap_or(Layout::new::<u64>())
    }

    fn new() -> Self {
        if let Some(memory) = heap::take_first_stack() {
            return Self(memory);
        }
        // SAFETY: the size is not zero.
        let memory = unsafe { alloc(Self::layout()) };
        assert!(!memory.is_null(), "out of kernel memory");
        Self(memory)
    }

    fn top(&self) -> u64 {
        self.0 as u64 + KERNEL_STACK_SIZE as u64
    }
}

impl Drop for KernelStack {
    fn drop(&mut self) {
        if !heap::put_first_stack(self.0) {
            // SAFETY: allocated in `new`.
            unsafe { dealloc(self.0, Self::layout()) };
        }
    }
}

impl Thread {
    /// A thread that begins with these registers. It runs once the scheduler
    /// is told to.
    pub fn new(tid: u32, process: Arc<Process>, frame: TrapFrame) -> Arc<Self> {
        let stack = KernelStack::new();
        let thread = Self {
            tid: AtomicU32::new(tid),
            process,
            name: Lock::new([0; 16]),
            sched: Lock::new(SchedState::new()),
            scheduling: Lock::default(),
            signals: Lock::new(ThreadSignals::default()),
            attention: AtomicBool::new(false),
            dying: AtomicBool::new(false),
            set_child_tid: AtomicU64::new(0),
            clear_child_tid: AtomicU64::new(0),
            robust_list: AtomicU64::new(0),
            fs_base: AtomicU64::new(0),
            gs_base: AtomicU64::new(0),
            fpu: Lock::new(FpuState::initial()),
            cpu_ns: AtomicU64::new(0),
            running_since_ns: AtomicU64::new(0),
            context: AtomicU64::new(0),
            stack,
        };
        let at = thread.frame_address();
        // SAFETY: the new stack is unused; the frame lies at its top and the
        // first context below it.
        unsafe {
            at.write(frame);
            let start = &raw const entry::thaw_thread_start as u64;
            thread.context.store(context::prepare(at as u64, start), Relaxed);
        }
        Arc::new(thread)
    }

    /// Thread id, as the guest sees it.
    pub fn tid(&self) -> u32 {
        self.tid.load(Relaxed)
    }

    /// Gives the thread another id: that of the main thread, which it becomes
    /// by execve(2).
    pub fn set_tid(&self, tid: u32) {
        self.tid.store(tid, Relaxed);
    }

    /// Whether the thread has to end before it returns to the guest.
    pub fn is_dying(&self) -> bool {
        self.dying.load(Relaxed)
    }

    /// CPU time, in nanoseconds.
    pub fn cpu_ns(&self) -> u64 {
        self.cpu_ns.load(Relaxed) + self.ran_ns()
    }

    /// How long it has been running without a switch, in nanoseconds.
    pub fn ran_ns(&self) -> u64 {
        match self.running_since_ns.load(Relaxed) {
            0 => 0,
            since => clock::monotonic_ns().saturating_sub(since),
        }
    }

    fn frame_address(&self) -> *mut TrapFrame {
        (self.stack.top() as *mut TrapFrame).wrapping_sub(1)
    }

    /// The registers with which the thread entered the kernel and will leave it.
    #[allow(clippy::mut_from_ref)]
    pub fn frame(&self) -> &mut TrapFrame {
        // SAFETY: the frame lies at the top of the stack whenever the thread is
        // in the kernel; it is used in short accesses under the kernel lock.
        unsafe { &mut *self.frame_address() }
    }

    /// Top of the kernel stack.
    pub fn kernel_stack_top(&self) -> u64 {
        self.stack.top()
    }

    /// Where the part of the heap's first stack begins that is in use, if the thread,
    /// which does not run, has that stack.
    pub fn first_stack_in_use(&self) -> Option<u64> {
        heap::is_first_stack(self.stack.0).then(|| self.context.load(Relaxed))
    }

    /// Runs the thread on this vCPU until it blocks or ends.
    pub(super) fn switch_from_idle(self: &Arc<Self>) {
        let block = vcpu::block();
        block.kernel_stack_top = self.stack.top();
        let thread = Arc::as_ptr(self);
        block.thread = thread;
        if block.fpu_owner != thread {
            if !block.fpu_owner.is_null() {
                // SAFETY: the owner is alive: threads clear the field when they end.
                unsafe { (*block.fpu_owner).fpu.lock().save() };
            }
            self.fpu.lock().load();
            block.fpu_owner = thread;
        }
        self.running_since_ns.store(clock::monotonic_ns(), Relaxed);
        super::sched::watch_clock();
        // SAFETY: FSGSBASE is a requirement, checked by `thaw doctor`; the
        // kernel itself does not use `%fs`.
        unsafe {
            core::arch::asm!("wrfsbase {}", in(reg) self.fs_base.load(Relaxed), options(nostack, preserves_flags));
            context::thaw_switch(&raw mut block.idle_rsp, self.context.load(Relaxed));
        }
        let block = vcpu::block();
        if kernel_lock::is_enabled() {
            // Another vCPU may run it next.
            self.save_fpu();
        }
        block.thread = core::ptr::null();
        self.cpu_ns.fetch_add(self.ran_ns(), Relaxed);
        self.running_since_ns.store(0, Relaxed);
    }

    /// Runs `work` as if on behalf of this thread, which must not run yet.
    pub fn with_identity<T>(&self, work: impl FnOnce() -> T) -> T {
        let block = vcpu::block();
        block.thread = self;
        let result = work();
        vcpu::block().thread = core::ptr::null();
        result
    }

    /// Gives the vCPU back to the idle loop; returns when the thread is chosen again.
    pub(super) fn switch_to_idle(&self) {
        let fs_base: u64;
        // SAFETY: as above.
        unsafe {
            core::arch::asm!("rdfsbase {}", out(reg) fs_base, options(nostack, preserves_flags, nomem))
        };
        self.fs_base.store(fs_base, Relaxed);
        // SAFETY: the idle loop has saved its context when it switched to us.
        unsafe { context::thaw_switch(self.context.as_ptr(), vcpu::block().idle_rsp) };
    }

    /// Saves the vector state if it is in this vCPU's registers, so that memory
    /// holds all of the thread.
    pub fn save_fpu(&self) {
        if core::ptr::eq(vcpu::block().fpu_owner, self) {
            self.fpu.lock().save();
            vcpu::block().fpu_owner = core::ptr::null();
        }
    }

    /// Takes over the vector state of the running thread.
    pub fn copy_fpu(&self, running: &Thread) {
        running.fpu.lock().save();
        self.fpu.lock().copy_from(&running.fpu.lock());
    }

    /// Puts the vector state of the running thread back to that of a new program.
    pub fn reset_fpu(&self) {
        *self.fpu.lock() = FpuState::initial();
        self.fpu.lock().load();
    }

    /// Gives up the vector state in the registers: the thread has ended.
    pub fn forget_fpu(&self) {
        let block = vcpu::block();
        if core::ptr::eq(block.fpu_owner, self) {
            block.fpu_owner = core::ptr::null();
        }
    }

    /// Marks that there is something to do before the thread returns to the guest.
    pub fn needs_attention(&self) {
        self.attention.store(true, Relaxed);
    }
}

impl super::wait::Waiter for Thread {
    fn wake(&self, _events: Events) {
        super::sched::wake(self, super::wait::Wake::Woken);
    }
}

impl crate::time::timer::TimerCallback for Thread {
    fn fire(&self, _now: crate::time::Instant) {
        super::sched::wake(self, super::wait::Wake::TimedOut);
    }
}

/// First thing that a new thread does, on its kernel stack, with the kernel
/// lock that the idle loop has handed over.
pub extern "C" fn begin(_frame: &mut TrapFrame) {
    let thread = current();
    let at = UserAddress(thread.set_child_tid.load(Relaxed));
    // clone(2): an address that cannot be written to does not fail the call.
    let _ = at.write_if_some(&thread.tid());
    kernel_lock::release();
}

/// The running thread.
pub fn current() -> &'static Thread {
    let thread = vcpu::block().thread;
    assert!(!thread.is_null(), "no thread is running");
    // SAFETY: the running thread is kept alive by the task table, and nobody
    // holds the reference beyond its end.
    unsafe { &*thread }
}

/// The running thread; `None` while the kernel works on its own behalf.
pub fn running() -> Option<&'static Thread> {
    (!vcpu::block().thread.is_null()).then(current)
}

/// The running thread, shared.
pub fn current_arc() -> Arc<Thread> {
    let thread: *const Thread = current();
    // SAFETY: the pointer comes from an `Arc` that is alive.
    unsafe {
        Arc::increment_strong_count(thread);
        Arc::from_raw(thread)
    }
}

/// The running thread's process.
pub fn current_process() -> &'static Process {
    &current().process
}
