//! Threads: kernel objects with a kernel stack and a saved context.
#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::ops::Deref;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use super::Process;
use super::host_process::{self, ForkRequest};
use super::ids::Tid;
use super::memory_policy::MemoryPolicy;
use super::ptrace::Tracee;
use super::sched_attributes::{Scheduling, TimerSlack};
use super::scheduler::{RunState, SchedState};
use super::seccomp::Seccomp;
use super::signal::ThreadSignals;
use super::work::{self, Work};
use crate::mm::heap;
use crate::platform::machine::{Clocks, Machine, ThreadContext, ThreadState};
use crate::platform::registers::{Frame, TrapFrame};
use crate::platform::thread::{self, GuestThread, Running};
use crate::platform::user::UserAddress;
use crate::sync::KernelCell;
use crate::task::wait::Events;

/// A guest thread.
pub struct Thread {
    /// See [`Thread::tid`].
    tid: AtomicU32,
    /// The process it belongs to.
    pub process: Arc<Process>,
    /// Name (`PR_SET_NAME`), NUL-padded.
    pub name: KernelCell<[u8; 16]>,
    /// Whether it runs, could run or waits.
    pub sched: KernelCell<SchedState>,
    /// CPUs, policy, priority and nice value that it has asked for.
    pub scheduling: KernelCell<Scheduling>,
    /// How late its timers may expire; the host chooses.
    pub timer_slack: KernelCell<TimerSlack>,
    /// On which nodes it wants its memory.
    pub memory_policy: KernelCell<MemoryPolicy>,
    /// Signal mask, pending signals, alternate stack.
    pub signals: KernelCell<ThreadSignals>,
    /// Set when the thread has to end: its process exits or executes a program.
    pub dying: AtomicBool,
    /// Where to write the thread id before the thread first runs
    /// (`CLONE_CHILD_SETTID`); 0 for nowhere.
    pub set_child_tid: AtomicU64,
    /// Where to write 0 and wake a futex at exit (set_tid_address(2)).
    pub clear_child_tid: AtomicU64,
    /// Head of the list of robust futexes (set_robust_list(2)).
    pub robust_list: AtomicU64,
    /// Whether and how it is traced.
    pub tracee: Tracee,
    /// What restricts its system calls.
    pub seccomp: KernelCell<Seccomp>,
    /// What it does in the kernel before it first enters the guest.
    pub work: KernelCell<Option<Box<dyn Work>>>,
    /// What it asks of the idle loop when it gives up the vCPU.
    pub(super) fork_request: KernelCell<Option<Arc<ForkRequest>>>,
    /// Its registers and kernel stack.
    pub context: ThreadContext,
    /// CPU time that has been counted ([`host_process::uncounted_ns`]), in nanoseconds.
    cpu_ns: AtomicU64,
    /// The largest CPU time that anybody was told, in nanoseconds.
    told_cpu_ns: AtomicU64,
    /// Since when it has been running, on the host's monotonic clock in
    /// nanoseconds; 0 if it does not run.
    running_since_ns: AtomicU64,
}

impl Thread {
    /// A thread that begins with these registers. It runs once the scheduler
    /// is told to.
    pub fn new(tid: Tid, process: Arc<Process>, frame: TrapFrame) -> Arc<Self> {
        Arc::new(Self {
            tid: AtomicU32::new(tid.number()),
            process,
            name: KernelCell::new([0; 16]),
            sched: KernelCell::new(SchedState::new()),
            scheduling: KernelCell::default(),
            timer_slack: KernelCell::default(),
            memory_policy: KernelCell::default(),
            signals: KernelCell::new(ThreadSignals::default()),
            dying: AtomicBool::new(false),
            set_child_tid: AtomicU64::new(0),
            clear_child_tid: AtomicU64::new(0),
            robust_list: AtomicU64::new(0),
            tracee: Tracee::default(),
            seccomp: KernelCell::new(Seccomp::Disabled),
            work: KernelCell::new(None),
            fork_request: KernelCell::new(None),
            context: ThreadContext::new(heap::kernel_stack(), frame),
            cpu_ns: AtomicU64::new(0),
            told_cpu_ns: AtomicU64::new(0),
            running_since_ns: AtomicU64::new(0),
        })
    }

    /// Thread id.
    pub fn tid(&self) -> Tid {
        Tid::new(self.tid.load(Relaxed))
    }

    /// Thread id as the thread itself sees it.
    pub fn own_number(&self) -> u32 {
        self.tid().number_in(&self.process.pid_namespace)
    }

    /// Gives the thread another id: that of the main thread, which it becomes
    /// by execve(2).
    pub fn set_tid(&self, tid: Tid) {
        self.tid.store(tid.number(), Relaxed);
    }

    /// Whether the thread has to end before it returns to the guest.
    pub fn is_dying(&self) -> bool {
        self.dying.load(Relaxed)
    }

    /// CPU time, in nanoseconds. It does not go back, although it may have been taken for more than it was.
    pub fn cpu_ns(&self) -> u64 {
        let uncounted = match self.sched.get().state {
            RunState::Runnable => host_process::uncounted_ns(self),
            _ => 0,
        };
        let ns = self.cpu_ns.load(Relaxed) + uncounted;
        ns.max(self.told_cpu_ns.fetch_max(ns, Relaxed))
    }

    /// Counts CPU time, in nanoseconds.
    pub(crate) fn count(&self, cpu_ns: u64) {
        self.cpu_ns.fetch_add(cpu_ns, Relaxed);
    }

    /// How long it has been running without a switch, in nanoseconds.
    pub fn ran_ns(&self) -> u64 {
        match self.running_since_ns.load(Relaxed) {
            0 => 0,
            since => Machine::monotonic_ns().saturating_sub(since),
        }
    }

    /// The registers with which the thread entered the kernel and will leave it.
    pub fn frame(&self) -> &Frame {
        self.context.frame()
    }

    /// Where the part of the heap's first stack begins that is in use, if the thread,
    /// which does not run, has that stack.
    pub fn first_stack_in_use(&self) -> Option<u64> {
        let context = &self.context;
        heap::is_first_stack(context.stack().bottom()).then(|| context.stack_pointer())
    }

    /// Runs the thread on this vCPU until it blocks or ends.
    pub(super) fn switch_from_idle(self: &Arc<Self>) {
        thread::switch_from_idle(self, || {
            let now_ns = Machine::monotonic_ns();
            self.running_since_ns.store(now_ns, Relaxed);
            host_process::begin_to_count(now_ns);
            super::scheduler::watch_clock();
            crate::state::kernel().tasks.usage.switched(now_ns);
            super::timers::cpu_limit::resume(&self.process);
        });
        self.count(host_process::end_to_count(Machine::monotonic_ns()));
        self.running_since_ns.store(0, Relaxed);
    }

    /// Runs `work` as if on behalf of this thread, which must not run yet.
    pub fn with_identity<T: Send>(self: &Arc<Self>, work: impl FnOnce() -> T + Send) -> T {
        thread::with_identity(self, work)
    }

    /// Gives the vCPU back to the idle loop; returns when the thread is chosen again.
    pub(super) fn switch_to_idle(&self) {
        self.context.switch_to_idle();
    }

    /// Marks that there is something to do before the thread returns to the guest.
    pub fn needs_attention(&self) {
        self.context.needs_attention();
    }
}

// SAFETY: all threads of the kernel have this type. The task table keeps a thread until it
// has given up its vector state and its vCPU (`exit`).
unsafe impl GuestThread for Thread {
    fn context(&self) -> &ThreadContext {
        &self.context
    }
}

impl super::wait::Waiter for Thread {
    fn wake(&self, _events: Events) {
        super::scheduler::wake(self, super::wait::Wake::Woken);
    }
}

impl crate::time::timer::TimerCallback for Thread {
    fn fire(&self, _now: crate::time::Instant) {
        super::scheduler::wake(self, super::wait::Wake::TimedOut);
    }
}

/// First thing that a new thread does.
pub fn begin() {
    let thread = current();
    let at = UserAddress(thread.set_child_tid.load(Relaxed));
    // clone(2): an address that cannot be written to does not fail the call.
    let _ = at.write_if_some(&thread.own_number());
    work::run();
}

/// The running thread.
pub type Current = Running<Thread>;

/// The running thread.
#[inline]
pub fn current() -> Current {
    match running() {
        Some(thread) => thread,
        None => panic!("no thread is running"),
    }
}

/// The running thread; `None` while the kernel works on its own behalf.
#[inline]
pub fn running() -> Option<Current> {
    Current::get()
}

/// The running thread, shared.
pub fn current_arc() -> Arc<Thread> {
    current().to_arc()
}

/// The running thread's process.
pub struct CurrentProcess(Current);

impl Deref for CurrentProcess {
    type Target = Process;

    #[inline]
    fn deref(&self) -> &Process {
        &self.0.process
    }
}

/// The running thread's process.
#[inline]
pub fn current_process() -> CurrentProcess {
    CurrentProcess(current())
}
