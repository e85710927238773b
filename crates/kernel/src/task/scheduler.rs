//! The scheduler: M guest threads on the virtual CPUs.
//!
//! Every address space has a run queue, and a virtual CPU that serves it: the
//! host process that has this memory ([`super::host_process`]). A thread that blocks
//! switches to the idle loop of its vCPU, which picks the next one or waits.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::thread::{current, current_arc};
use super::wait::{Places, WaitQueue, Waiter, Wake};
use super::{Thread, host_process};
use crate::platform::boot_area::of_process;
use crate::platform::machine::{Clocks, Machine, Vcpus};
use crate::state::kernel;
use crate::sync::{Borrowed, KernelCell};
use crate::time::{Instant, timer};

/// How long a thread may run while others wait, in nanoseconds.
pub const SLICE_NS: u64 = 4_000_000;
/// How often the vCPUs of a host process are looked at while there could be more or fewer
/// of them, and how long threads wait at least before another one helps, in
/// nanoseconds. Short bursts of work beside a thread that computes, as those of Go's
/// collector, are not worth waking a vCPU.
pub const TICK_NS: u64 = 2_000_000;

/// Scheduling state of a thread.
#[derive(Clone, Copy, Debug)]
pub struct SchedState {
    /// Running, runnable or blocked.
    pub state: RunState,
    /// Why the last wait ended.
    reason: Wake,
}

/// Whether a thread can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunState {
    /// On a vCPU or in a run queue.
    Runnable,
    /// Waiting; signals interrupt it.
    Blocked,
    /// Waiting for something that is sure to come; signals do not interrupt it.
    Uninterruptible,
    /// Waiting until its host process has been forked, or another one has it: nobody but who does
    /// that wakes it, not even to end.
    Forking,
    /// Ended.
    Dead,
}

impl Default for SchedState {
    fn default() -> Self {
        Self::new()
    }
}

impl SchedState {
    /// The state of a new thread, which is not in a run queue yet.
    pub const fn new() -> Self {
        Self { state: RunState::Blocked, reason: Wake::Woken }
    }
}

/// The threads of an address space that can run, first come first served.
#[derive(Default)]
pub struct RunQueue {
    threads: KernelCell<VecDeque<Arc<Thread>>>,
    /// When it was first seen that a thread waits while none is taken, as
    /// [`Machine::monotonic_ns`] tells it; 0 if not yet.
    waiting_since: AtomicU64,
}

impl RunQueue {
    /// An empty queue.
    pub const fn new() -> Self {
        Self { threads: KernelCell::new(VecDeque::new()), waiting_since: AtomicU64::new(0) }
    }

    /// Number of threads in the queue.
    pub fn len(&self) -> usize {
        self.threads.borrow_mut().len()
    }

    /// Whether no thread waits for a vCPU.
    pub fn is_empty(&self) -> bool {
        self.threads.borrow_mut().is_empty()
    }

    pub(super) fn push(&self, thread: Arc<Thread>) {
        self.threads.borrow_mut().push_back(thread);
    }

    pub(super) fn pop(&self) -> Option<Arc<Thread>> {
        self.waiting_since.store(0, Relaxed);
        self.threads.borrow_mut().pop_front()
    }

    /// For how long threads have waited, none of them taken, in nanoseconds, as far as
    /// that has been looked at.
    fn waited_ns(&self) -> u64 {
        let now = Machine::monotonic_ns();
        match self.waiting_since.load(Relaxed) {
            _ if self.is_empty() => 0,
            0 => {
                self.waiting_since.store(now, Relaxed);
                0
            }
            since => now - since,
        }
    }
}

/// Makes a blocked thread runnable; the first reason to wake counts.
pub fn wake(thread: &Thread, reason: Wake) {
    let sched = thread.sched.borrow_mut();
    if matches!(sched.state, RunState::Blocked | RunState::Uninterruptible) {
        run(thread, sched, reason);
    }
}

/// Makes a thread runnable whose fork has been done, or has failed.
pub fn wake_forked(thread: &Thread) {
    let sched = thread.sched.borrow_mut();
    assert_eq!(sched.state, RunState::Forking, "nobody else wakes it");
    run(thread, sched, Wake::Woken);
}

fn run(thread: &Thread, mut sched: Borrowed<'_, SchedState>, reason: Wake) {
    sched.state = RunState::Runnable;
    sched.reason = reason;
    drop(sched);
    let Some(thread) = kernel().tasks.thread(thread.tid()) else { return };
    let space = thread.process.mm();
    space.run_queue.push(thread);
    host_process::notify(&space);
    watch_clock();
}

/// Wakes a thread because a signal is there for it, unless its wait is not to
/// be interrupted.
pub fn interrupt(thread: &Thread) {
    let state = thread.sched.borrow_mut().state;
    if state == RunState::Blocked || state == RunState::Uninterruptible && thread.is_dying() {
        wake(thread, Wake::Interrupted);
    } else {
        kick(thread);
    }
}

/// Makes a thread that runs on another vCPU come into the kernel soon.
pub fn kick(thread: &Thread) {
    if thread.sched.get().state == RunState::Runnable {
        host_process::interrupt(thread);
    }
}

/// Lets a new thread run.
pub fn start(thread: &Arc<Thread>) {
    wake(thread, Wake::Woken);
}

/// Blocks the running thread until one of `queues` is woken, `deadline`
/// passes or a signal arrives.
pub fn block_on(queues: &[&WaitQueue], deadline: Option<Instant>) -> Wake {
    block_in_turn(queues, deadline, &mut Places::default())
}

/// Like [`block_on`], and takes the same places as before.
pub fn block_in_turn(
    queues: &[&WaitQueue],
    deadline: Option<Instant>,
    places: &mut Places,
) -> Wake {
    let thread = current();
    if super::signal::is_pending(&thread) {
        return Wake::Interrupted;
    }
    if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
        return Wake::TimedOut;
    }
    let waiter: Arc<dyn Waiter> = current_arc();
    for (index, queue) in queues.iter().enumerate() {
        let place = places.of(index);
        *place = queue.register_at(*place, waiter.clone());
    }
    let alarm = deadline.map(|deadline| timer::add(deadline, current_arc()));
    thread.sched.borrow_mut().state = RunState::Blocked;
    thread.switch_to_idle();
    if let Some(alarm) = alarm {
        timer::cancel(alarm);
    }
    for (index, queue) in queues.iter().enumerate() {
        queue.unregister(*places.of(index));
    }
    thread.sched.borrow_mut().reason
}

/// Blocks the running thread until `queue` is woken.
pub fn block_uninterruptibly(queue: &WaitQueue) {
    let thread = current();
    let token = queue.register(current_arc());
    thread.sched.borrow_mut().state = RunState::Uninterruptible;
    thread.switch_to_idle();
    queue.unregister(token);
}

/// The same, but not for longer than until `deadline`.
pub fn block_uninterruptibly_until(queue: &WaitQueue, deadline: Instant) {
    let alarm = timer::add(deadline, current_arc());
    block_uninterruptibly(queue);
    timer::cancel(alarm);
}

/// Blocks the running thread until one of `queues` is woken. Signals do not end it.
pub fn block_uninterruptibly_on(queues: &[&WaitQueue]) {
    let thread = current();
    let waiter: Arc<dyn Waiter> = current_arc();
    let tokens: Vec<_> = queues.iter().map(|queue| queue.register(waiter.clone())).collect();
    thread.sched.borrow_mut().state = RunState::Uninterruptible;
    thread.switch_to_idle();
    for (queue, token) in queues.iter().zip(tokens) {
        queue.unregister(token);
    }
}

/// Lets other runnable threads run first (sched_yield(2)).
pub fn yield_now() {
    let thread = current_arc();
    let space = thread.process.mm();
    if space.run_queue.is_empty() {
        return;
    }
    drop(space);
    go_last();
}

/// Gives up the vCPU; the running thread comes last in the run queue.
fn go_last() {
    let thread = current_arc();
    thread.process.mm().run_queue.push(thread.clone());
    drop(thread);
    current().switch_to_idle();
}

/// Gives up the vCPU if it is not to run threads now.
pub fn rest_if_asked() {
    if !host_process::may_run_threads() {
        go_last();
    }
}

/// The alarm has gone off while a thread runs: fires timers, finds help for
/// threads that wait, and lets others run when the time slice is over.
pub fn tick() {
    let (space, own) = (host_process::own_space(), host_process::own_host_process());
    timer::fire_due();
    host_process::end_if_told();
    own.judge();
    if !own.has_looked() && !host_process::is_watched() {
        crate::task::host_poll::check();
    }
    // A timer may have been due long before threads have waited for long.
    let has_waited = space.run_queue.waited_ns() >= TICK_NS;
    let is_helped = || has_waited && own.wants_help() && host_process::add_if_wanted();
    if !space.run_queue.is_empty() && !is_helped() {
        // The host gives the alarm to one vCPU, whichever threads run too long.
        host_process::interrupt_others();
    }
    own.gather();
    if !yield_if_due() {
        watch_clock();
    }
}

/// Lets others run if the time slice of the running thread is over.
pub fn yield_if_due() -> bool {
    let due = !host_process::own_space().run_queue.is_empty() && current().ran_ns() >= SLICE_NS;
    if due {
        yield_now();
    }
    due
}

/// Makes sure that the running thread is interrupted when a timer is due or
/// others have waited for long enough. Does nothing while idle.
pub fn watch_clock() {
    if super::thread::running().is_none() {
        return;
    }
    // An alarm that went off while the vCPU was idle is not set any more.
    Machine::take_alarm();
    set_alarm(slice_ns());
}

/// Before a vCPU waits while others run threads, and leaves to them what can run or
/// what is to be watched.
pub fn watch_clock_asleep() {
    set_alarm(Some(TICK_NS));
}

/// Sets the alarm for the next timer and for `wait` nanoseconds from now, unless
/// it goes off earlier.
fn set_alarm(wait: Option<u64>) {
    let timer = timer::next_deadline();
    if timer.is_none() && wait.is_none() {
        return;
    }
    let now = Instant::now();
    let slice = wait.map(|wait| Instant(now.0 + wait));
    let wanted = [timer, slice].into_iter().flatten().min().unwrap_or(now);
    let alarm_at = &of_process().alarm_at;
    let set = alarm_at.load(Relaxed);
    if set == 0 || wanted.0 < set {
        alarm_at.store(wanted.0.max(1), Relaxed);
        Machine::arm_alarm(wanted.0.saturating_sub(now.0));
    }
}

/// How long the running thread may go on before somebody looks after others, in
/// nanoseconds; `None` if nobody waits.
fn slice_ns() -> Option<u64> {
    let (space, own) = (host_process::own_space(), host_process::own_host_process());
    if !space.run_queue.is_empty() {
        let can_help = own.has_idle() || host_process::may_grow();
        if !can_help {
            return Some(SLICE_NS);
        }
        if own.since_judged_ns() > TICK_NS {
            // What counts is what happens from now on.
            own.judge();
        }
        let waited_ns = space.run_queue.waited_ns();
        return Some(if waited_ns < TICK_NS { TICK_NS - waited_ns } else { TICK_NS });
    }
    if !own.is_alone() {
        return Some(TICK_NS);
    }
    host_process::needs_look().then_some(SLICE_NS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;

    #[test]
    fn a_thread_whose_host_process_is_being_forked_is_woken_by_nobody_else() {
        let _sandbox = Sandbox::new();
        let thread = current_arc();
        thread.dying.store(true, Relaxed);
        let become_ = |state| thread.sched.borrow_mut().state = state;
        let state = || thread.sched.get().state;
        become_(RunState::Uninterruptible);
        interrupt(&thread);
        assert_eq!(state(), RunState::Runnable, "to end");
        become_(RunState::Forking);
        interrupt(&thread);
        wake(&thread, Wake::Woken);
        assert_eq!(state(), RunState::Forking);
        wake_forked(&thread);
        assert_eq!(state(), RunState::Runnable);
    }
}
