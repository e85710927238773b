//! The scheduler: M guest threads on the virtual CPUs.
//!
//! A thread that blocks switches to the idle loop of its vCPU, which picks the
//! next one or waits in the host for descriptors, timers and messages.

use alloc::sync::Arc;

use thaw_abi::control::{
    Connection, MSG_CONNECTION, MSG_FREEZE, MSG_SIGNAL, MSG_WINDOW_SIZE, Signal, WindowSize,
};

use super::Thread;
use super::thread::{current, current_arc};
use super::wait::{WaitQueue, WaitToken, Waiter, Wake};
use crate::boot::{control, phases};
use crate::platform::host::HostFd;
use crate::state::kernel;
use crate::time::{Instant, timer};

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
    /// On a vCPU or in the run queue.
    Runnable,
    /// Waiting; signals interrupt it.
    Blocked,
    /// Ended.
    Dead,
}

impl Default for SchedState {
    fn default() -> Self {
        Self::new()
    }
}

impl SchedState {
    /// The state of a new thread, which is not in the run queue yet.
    pub const fn new() -> Self {
        Self { state: RunState::Blocked, reason: Wake::Woken }
    }
}

/// Makes a blocked thread runnable; the first reason to wake counts.
pub fn wake(thread: &Thread, reason: Wake) {
    let mut sched = thread.sched.lock();
    if sched.state != RunState::Blocked {
        return;
    }
    sched.state = RunState::Runnable;
    sched.reason = reason;
    drop(sched);
    let thread = kernel().tasks.threads.lock().get(&thread.tid).cloned();
    if let Some(thread) = thread {
        kernel().tasks.run_queue.lock().push_back(thread);
    }
}

/// Lets a new thread run.
pub fn start(thread: &Arc<Thread>) {
    wake(thread, Wake::Woken);
}

/// Blocks the running thread until one of `queues` is woken, `deadline`
/// passes or a signal arrives.
pub fn block_on(queues: &[&WaitQueue], deadline: Option<Instant>) -> Wake {
    let thread = current();
    if super::signal::is_pending(thread) {
        return Wake::Interrupted;
    }
    if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
        return Wake::TimedOut;
    }
    const INLINE: usize = 4;
    let mut inline = [WaitToken::NONE; INLINE];
    let mut spilled = alloc::vec::Vec::new();
    let waiter: Arc<dyn Waiter> = current_arc();
    for (i, queue) in queues.iter().enumerate() {
        let token = queue.register(waiter.clone());
        match inline.get_mut(i) {
            Some(slot) => *slot = token,
            None => spilled.push(token),
        }
    }
    let alarm = deadline.map(|deadline| timer::add(deadline, current_arc()));
    thread.sched.lock().state = RunState::Blocked;
    thread.switch_to_idle();
    if let Some(alarm) = alarm {
        timer::cancel(alarm);
    }
    for (token, queue) in inline.iter().chain(&spilled).zip(queues) {
        queue.unregister(*token);
    }
    thread.sched.lock().reason
}

/// Lets other runnable threads run first (sched_yield(2)).
pub fn yield_now() {
    if kernel().tasks.run_queue.lock().is_empty() {
        return;
    }
    kernel().tasks.run_queue.lock().push_back(current_arc());
    current().switch_to_idle();
}

/// The idle loop; never returns.
pub fn run() -> ! {
    loop {
        run_threads();
        if timer::fire_due() {
            continue;
        }
        if control::has_kept() {
            handle_messages();
            continue;
        }
        if crate::freeze::is_due() {
            crate::freeze::freeze();
            continue;
        }
        phases::report_if_due();
        let timeout = timer::time_to_next();
        let began = crate::platform::clock::monotonic_ns();
        let waited = crate::net::host_poll::wait(timeout, control::CONTROL);
        crate::platform::clock::add_idle(crate::platform::clock::monotonic_ns() - began);
        if waited.control {
            handle_messages();
        }
    }
}

/// Runs threads until none can run.
fn run_threads() {
    loop {
        let next = kernel().tasks.run_queue.lock().pop_front();
        let Some(thread) = next else { return };
        phases::first_instruction();
        if crate::boot::populate::is_pending() {
            thread.needs_attention();
        }
        thread.switch_from_idle();
        if thread.sched.lock().state == RunState::Dead {
            super::exit::reap(thread);
        }
    }
}

/// Handles everything that the host has sent.
pub fn handle_messages() {
    while let Some(message) = control::next_message() {
        match message.kind {
            MSG_CONNECTION => {
                let connection = bytemuck::pod_read_unaligned::<Connection>(
                    &message.body[..size_of::<Connection>()],
                );
                if let Some(&fd) = message.fds.first() {
                    crate::net::deliver_connection(&connection, HostFd(fd));
                }
            }
            MSG_SIGNAL => {
                let signal =
                    bytemuck::pod_read_unaligned::<Signal>(&message.body[..size_of::<Signal>()]);
                super::signal::send_from_host(signal.number);
            }
            MSG_WINDOW_SIZE => {
                let size = bytemuck::pod_read_unaligned::<WindowSize>(
                    &message.body[..size_of::<WindowSize>()],
                );
                kernel().window.set(size);
                super::signal::send_from_host(crate::task::signal::SIGWINCH);
            }
            MSG_FREEZE => crate::freeze::request(),
            kind => crate::console!("thaw kernel: the host sent a message of unknown kind {kind}"),
        }
    }
}
