//! The CPU time of threads, as the host counts it.
//!
//! A vCPU reads the monotonic clock when it begins and stops to run a thread. The time between is more
//! than the thread had a processor if the host has run something else meanwhile: another host process
//! of the sandbox, or anything else on the machine. The host counts the CPU time of a vCPU, but to look
//! at that is a host call, with which a switch of threads takes twice as long. So a vCPU takes the time
//! that has passed for CPU time until it comes to [`LOOK_NS`], then looks, and takes off what was too
//! much: a program that computes beside it keeps the processor for longer than that.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::{HostProcess, Vcpu, own_host_process, own_vcpu};
use crate::platform::machine::{Clocks, Machine};
use crate::task::Thread;

/// How much CPU time a vCPU counts by the monotonic clock before it looks at what the host has
/// counted, in nanoseconds.
const LOOK_NS: u64 = 200_000;

/// What a vCPU has counted of the threads that it runs.
#[derive(bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct CpuTime {
    /// What the host had counted of the vCPU when that was last looked at, in nanoseconds.
    seen_ns: AtomicU64,
    /// From when on the time of the running thread is not counted, on the host's monotonic clock
    /// in nanoseconds; 0 if none runs.
    since_ns: AtomicU64,
    /// What has been counted since the last look, in nanoseconds: less than [`LOOK_NS`].
    guessed_ns: AtomicU32,
}

impl CpuTime {
    /// The vCPU is about to begin.
    pub(super) fn reset(&self) {
        self.seen_ns.store(0, Relaxed);
        self.since_ns.store(0, Relaxed);
        self.guessed_ns.store(0, Relaxed);
    }

    /// What has passed at `now_ns` of the time that is not counted.
    fn passed_ns(&self, now_ns: u64) -> u64 {
        match self.since_ns.load(Relaxed) {
            0 => 0,
            since => now_ns.saturating_sub(since),
        }
    }

    fn guessed_ns(&self) -> u64 {
        self.guessed_ns.load(Relaxed).into()
    }

    /// CPU time of a thread that has run for `passed_ns`. `look` says how much the host has
    /// counted since the last look.
    fn count(&self, passed_ns: u64, look: impl FnOnce() -> u64) -> u64 {
        let guessed_ns = self.guessed_ns() + passed_ns;
        if guessed_ns < LOOK_NS {
            self.guessed_ns.store(guessed_ns as u32, Relaxed);
            return passed_ns;
        }
        self.guessed_ns.store(0, Relaxed);
        let too_much_ns = guessed_ns.saturating_sub(look());
        passed_ns.saturating_sub(too_much_ns)
    }
}

/// This vCPU begins to run a thread.
pub fn begin_to_count(now_ns: u64) {
    own_vcpu().cpu_time.since_ns.store(now_ns, Relaxed);
}

/// This vCPU has stopped to run a thread: its CPU time since that was last counted, in nanoseconds.
pub fn end_to_count(now_ns: u64) -> u64 {
    let counted = count_until(now_ns);
    own_vcpu().cpu_time.since_ns.store(0, Relaxed);
    counted
}

/// CPU time of a thread that has not been counted, in nanoseconds. That of the thread which this vCPU
/// runs is counted with this.
#[inline(never)]
pub fn uncounted_ns(thread: &Thread) -> u64 {
    let now_ns = Machine::monotonic_ns();
    if core::ptr::eq(own_vcpu().running(), thread) {
        thread.count(count_until(now_ns));
        return 0;
    }
    let Some(host_process) = thread.process.mm().host_process() else { return 0 };
    let vcpu = host_process.vcpus().find(|vcpu| core::ptr::eq(vcpu.running(), thread));
    vcpu.map_or(0, |vcpu| host_process.uncounted_ns(vcpu, now_ns))
}

fn count_until(now_ns: u64) -> u64 {
    let time = &own_vcpu().cpu_time;
    let passed_ns = time.passed_ns(now_ns);
    time.since_ns.store(now_ns, Relaxed);
    time.count(passed_ns, look)
}

/// Looks at what the host counts of this vCPU; how much more that is than at the last look.
pub(super) fn look() -> u64 {
    let seen_ns = Machine::own_cpu_ns();
    let more_ns = seen_ns.saturating_sub(own_vcpu().cpu_time.seen_ns.swap(seen_ns, Relaxed));
    own_host_process().seen_cpu_ns.fetch_add(more_ns, Relaxed);
    more_ns
}

impl HostProcess {
    /// What a vCPU's thread has had of the CPU time that nobody has counted yet, in nanoseconds: of what
    /// the host has counted of all vCPUs since they looked, its part by the monotonic clock.
    fn uncounted_ns(&self, vcpu: &Vcpu, now_ns: u64) -> u64 {
        let passed_ns = vcpu.cpu_time.passed_ns(now_ns);
        if passed_ns < LOOK_NS {
            return passed_ns;
        }
        let of_one = |vcpu: &Vcpu| vcpu.cpu_time.guessed_ns() + vcpu.cpu_time.passed_ns(now_ns);
        let all_ns = self.vcpus().map(of_one).sum();
        let host_ns = Machine::process_cpu_ns(self.host_pid());
        part(passed_ns, all_ns, host_ns.saturating_sub(self.seen_cpu_ns.load(Relaxed)))
    }
}

/// What `part_ns` of `all_ns` is if these are `true_ns`, unless that is more.
fn part(part_ns: u64, all_ns: u64, true_ns: u64) -> u64 {
    match true_ns < all_ns {
        true => (u128::from(part_ns) * u128::from(true_ns) / u128::from(all_ns)) as u64,
        false => part_ns,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::thread::current;
    use crate::testing::Sandbox;
    use bytemuck::Zeroable;
    use std::time::{Duration, Instant};

    const MS: u64 = 1_000_000;

    #[test]
    fn the_host_is_asked_once_in_a_while_and_takes_off_what_was_too_much() {
        let time = CpuTime::zeroed();
        let never = || panic!("nothing is to be looked at yet");
        assert_eq!(time.count(LOOK_NS / 2, never), LOOK_NS / 2);
        assert_eq!(time.count(LOOK_NS / 2, || LOOK_NS), LOOK_NS / 2, "all of it was CPU time");
        assert_eq!(time.count(10 * MS, || 4 * MS), 4 * MS);
        assert_eq!(time.count(LOOK_NS / 2, never), LOOK_NS / 2);
        assert_eq!(time.count(10 * MS, || 0), 0, "not less than nothing");
        assert_eq!(time.count(MS, || 5 * MS), MS, "the kernel's own work is no thread's");
    }

    #[test]
    fn a_thread_that_another_vcpu_runs_has_its_part_of_what_the_host_has_counted() {
        assert_eq!(part(3 * MS, 3 * MS, 4 * MS), 3 * MS);
        assert_eq!(part(3 * MS, 6 * MS, 4 * MS), 2 * MS);
        assert_eq!(part(u64::MAX, u64::MAX, 7), 7);
        assert_eq!(part(0, 0, 0), 0);
    }

    #[test]
    fn time_in_which_the_host_ran_something_else_is_not_counted() {
        let _sandbox = Sandbox::new();
        let thread = current();
        own_vcpu().set_running(Some(&thread));
        let used = || Duration::from_nanos(Machine::own_cpu_ns());
        look();
        let (before, begun) = (used(), Instant::now());
        begin_to_count(Machine::monotonic_ns());
        std::thread::sleep(Duration::from_millis(20));
        let counted = Duration::from_nanos(thread.cpu_ns());
        assert!(counted <= used() - before && counted < begun.elapsed());
        let first = thread.cpu_ns();
        while used() - before < Duration::from_millis(3) {}
        assert!(thread.cpu_ns() >= first + MS, "it has computed for 3 ms");
        let (shown, last) = (thread.cpu_ns(), end_to_count(Machine::monotonic_ns()));
        own_vcpu().set_running(None);
        assert!(last < 10 * MS && thread.cpu_ns() >= shown, "it does not go back");
    }
}
