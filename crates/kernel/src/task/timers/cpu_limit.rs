//! `RLIMIT_CPU` (getrlimit(2)): a process that has used so many seconds gets `SIGXCPU`, and each second
//! again, until it has used as many as its hard limit is and gets `SIGKILL` (`check_process_timers` in
//! kernel/time/posix-cpu-timers.c).
//!
//! A timer looks at a process only while one of its threads may run: one that sleeps wakes nobody.

use alloc::sync::{Arc, Weak};

use super::clock::MIN_WAIT_NS;
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::Process;
use crate::task::process::RLIMIT_CPU;
use crate::task::scheduler::RunState;
use crate::task::signal::{SI_KERNEL, SIGKILL, SIGXCPU, SignalInfo, send_to_process};
use crate::time::Instant;
use crate::time::timer::{self, TimerCallback, TimerId};

const NS: u64 = 1_000_000_000;

/// What looks at the CPU time of a process, if that is limited.
#[derive(Default)]
pub struct CpuLimit {
    watch: KernelCell<Watch>,
}

#[derive(Clone, Copy, Default)]
enum Watch {
    /// There is no limit.
    #[default]
    None,
    /// Nothing looks, since no thread may run. Something is due at this CPU time in nanoseconds.
    Resting(u64),
    /// This timer looks.
    Armed(TimerId),
}

impl CpuLimit {
    /// Looks no more: the process ends.
    pub fn disarm(&self) {
        if let Watch::Armed(id) = core::mem::take(&mut *self.watch.borrow_mut()) {
            timer::cancel(id);
        }
    }
}

/// The limit has been set, or the process is new.
pub fn watch(process: &Arc<Process>) {
    process.cpu_limit.disarm();
    if process.is_zombie() {
        return;
    }
    let limit = process.limits.borrow_mut()[RLIMIT_CPU];
    look_at(process, limit.current.min(limit.maximum).saturating_mul(NS));
}

/// A thread of the process begins to run.
pub fn resume(process: &Arc<Process>) {
    if let Watch::Resting(due_ns) = process.cpu_limit.watch.get() {
        arm(process, due_ns);
    }
}

/// Looks when the process has used so much CPU time, if that is ever.
fn look_at(process: &Arc<Process>, due_ns: u64) {
    if due_ns == u64::MAX {
        return;
    }
    process.cpu_limit.watch.set(Watch::Resting(due_ns));
    let threads = process.threads.borrow_mut();
    let may_run = threads.iter().any(|thread| thread.sched.get().state == RunState::Runnable);
    drop(threads);
    if may_run {
        arm(process, due_ns);
    }
}

fn arm(process: &Arc<Process>, due_ns: u64) {
    // So many threads may use CPU time at once.
    let cpus = u64::from(kernel().config.get().cpus.max(1));
    let ahead = (due_ns.saturating_sub(process.cpu_ns()) / cpus).max(MIN_WAIT_NS);
    let look = Arc::new(Look { process: Arc::downgrade(process), due_ns });
    let id = timer::add(Instant::after_ns(ahead), look);
    process.cpu_limit.watch.set(Watch::Armed(id));
    crate::task::scheduler::watch_clock();
}

struct Look {
    process: Weak<Process>,
    /// The CPU time at which something is to be done, in nanoseconds.
    due_ns: u64,
}

impl TimerCallback for Look {
    fn fire(&self, _now: Instant) {
        let Some(process) = self.process.upgrade() else { return };
        process.cpu_limit.watch.set(Watch::None);
        let used_ns = process.cpu_ns();
        if used_ns < self.due_ns {
            // CPU time passes slower than time.
            look_at(&process, self.due_ns);
            return;
        }
        let (signal, due_s) = {
            let mut limits = process.limits.borrow_mut();
            let limit = &mut limits[RLIMIT_CPU];
            if used_ns >= limit.maximum.saturating_mul(NS) {
                (SIGKILL, u64::MAX)
            } else {
                limit.current = limit.current.saturating_add(1);
                (SIGXCPU, limit.current.min(limit.maximum))
            }
        };
        send_to_process(&process, SignalInfo::new(signal, SI_KERNEL));
        look_at(&process, due_s.saturating_mul(NS));
    }
}
