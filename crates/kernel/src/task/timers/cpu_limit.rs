//! `RLIMIT_CPU` (getrlimit(2)): a process that has used so many seconds gets `SIGXCPU`, and each second
//! again, until it has used as many as its hard limit is and gets `SIGKILL`.

use alloc::sync::{Arc, Weak};

use super::clock::MIN_WAIT_NS;
use crate::sync::KernelCell;
use crate::task::Process;
use crate::task::process::RLIMIT_CPU;
use crate::task::signal::{SI_KERNEL, SIGKILL, SIGXCPU, SignalInfo, send_to_process};
use crate::time::Instant;
use crate::time::timer::{self, TimerCallback, TimerId};

const NS: u64 = 1_000_000_000;

/// What looks at the CPU time of a process, if that is limited.
#[derive(Default)]
pub struct CpuLimit {
    watch: KernelCell<Option<TimerId>>,
}

impl CpuLimit {
    /// Looks no more: the process ends.
    pub fn disarm(&self) {
        if let Some(id) = self.watch.borrow_mut().take() {
            timer::cancel(id);
        }
    }
}

/// Begins to look, or looks no more: the limit has been set, or the process is new. A limit of 0 is one of a
/// second.
pub fn watch(process: &Arc<Process>) {
    process.cpu_limit.disarm();
    let limit = process.limits.borrow_mut()[RLIMIT_CPU];
    let due_s = limit.current.min(limit.maximum).max(1);
    look_at(process, due_s.saturating_mul(NS));
}

/// Looks when the process has used so much CPU time, if that is ever.
fn look_at(process: &Arc<Process>, due_ns: u64) {
    if due_ns == u64::MAX {
        return;
    }
    let ahead = due_ns.saturating_sub(process.cpu_ns()).max(MIN_WAIT_NS);
    let look = Arc::new(Look { process: Arc::downgrade(process), due_ns });
    let id = timer::add(Instant::after_ns(ahead), look);
    crate::task::scheduler::watch_clock();
    process.cpu_limit.watch.set(Some(id));
}

struct Look {
    process: Weak<Process>,
    /// The CPU time at which something is to be done, in nanoseconds.
    due_ns: u64,
}

impl TimerCallback for Look {
    fn fire(&self, _now: Instant) {
        let Some(process) = self.process.upgrade() else { return };
        process.cpu_limit.watch.set(None);
        let used_ns = process.cpu_ns();
        if used_ns < self.due_ns {
            // CPU time passes slower than time.
            look_at(&process, self.due_ns);
            return;
        }
        let maximum_ns = process.limits.borrow_mut()[RLIMIT_CPU].maximum.max(1).saturating_mul(NS);
        let signal = if used_ns >= maximum_ns { SIGKILL } else { SIGXCPU };
        send_to_process(&process, SignalInfo::new(signal, SI_KERNEL));
        if signal == SIGXCPU {
            look_at(&process, (used_ns / NS + 1).saturating_mul(NS).min(maximum_ns));
        }
    }
}
