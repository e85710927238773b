//! How busy the sandbox is, as `/proc/stat` and `/proc/loadavg` tell.
//!
//! Linux looks at its processors at every tick. A timer would wake a sandbox that is idle, so this looks
//! when somebody reads, and when a vCPU begins to run a thread [`LOOK_NS`] or more after the last look: a
//! sandbox that was idle is looked at as soon as it is idle no more. What is told of the time
//! between two looks is an estimate by the CPU time that threads have used meanwhile.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Thread;
use crate::platform::machine::{Clocks, Machine};
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::time::clock::boottime_ns;

/// Time between two samples of the load (`LOAD_FREQ` in Linux' include/linux/sched/loadavg.h).
const LOOK_NS: u64 = 5_000_000_000;
/// One, in numbers with [`LOAD_BITS`] binary places (`FIXED_1`).
pub const LOAD_ONE: u64 = 1 << LOAD_BITS;
/// Binary places of a load (`FSHIFT`).
pub const LOAD_BITS: u32 = 11;
/// What is left after a sample of averages over 1, 5 and 15 minutes (`EXP_1` and its like).
const DECAYS: [u64; 3] = [1884, 2014, 2037];

/// What has been counted since the sandbox began.
#[derive(Default)]
pub struct Usage {
    /// Threads that were made, those included that began a process.
    forks: AtomicU64,
    /// How many times a vCPU has begun to run a thread.
    switches: AtomicU64,
    /// CPU time of threads that have ended, in nanoseconds.
    ended_cpu_ns: AtomicU64,
    /// When a look is due, on the guest's monotonic clock in nanoseconds.
    due_ns: AtomicU64,
    shares: KernelCell<Shares>,
    averages: KernelCell<Averages>,
}

impl Usage {
    /// A thread has been made.
    pub fn forked(&self) {
        self.forks.fetch_add(1, Relaxed);
    }

    /// A thread ends.
    pub fn ended(&self, thread: &Thread) {
        self.ended_cpu_ns.fetch_add(thread.cpu_ns(), Relaxed);
    }

    /// The sandbox is being frozen: no copy looks at all of its threads right when it begins.
    pub fn prepare_freeze(&self) {
        let now_ns = Machine::monotonic_ns().wrapping_add(kernel().clocks.offset());
        self.due_ns.store(now_ns.saturating_add(LOOK_NS), Relaxed);
    }

    /// A vCPU has begun to run a thread.
    pub fn switched(&self, now_ns: u64) {
        // The kernel lock is held: nobody else counts.
        self.switches.store(self.switches.load(Relaxed) + 1, Relaxed);
        if now_ns.wrapping_add(kernel().clocks.offset()) >= self.due_ns.load(Relaxed) {
            self.look(kernel().tasks.runnable());
        }
    }

    /// Number of forks and clones since the sandbox began.
    pub fn forks(&self) -> u64 {
        self.forks.load(Relaxed)
    }

    /// Number of switches of threads since the sandbox began.
    pub fn switches(&self) -> u64 {
        self.switches.load(Relaxed)
    }

    /// What each processor has done up to now, and all that there ever were.
    pub fn shares(&self) -> (Vec<Share>, Share) {
        self.look_as_reader();
        let shares = self.shares.borrow_mut();
        let present = shares.of_cpus.iter().take(cpus()).copied().collect();
        (present, shares.total())
    }

    /// Averages of the load over 1, 5 and 15 minutes, in units of [`LOAD_ONE`].
    pub fn loads(&self) -> [u64; 3] {
        self.look_as_reader();
        self.averages.borrow_mut().loads
    }

    /// The running thread only reads: it is no load.
    fn look_as_reader(&self) {
        self.look(kernel().tasks.runnable().saturating_sub(1));
    }

    fn look(&self, runnable: usize) {
        let monotonic_ns = Machine::monotonic_ns().wrapping_add(kernel().clocks.offset());
        self.due_ns.store(monotonic_ns.saturating_add(LOOK_NS), Relaxed);
        let (now_ns, used_ns) = (boottime_ns(), self.cpu_ns());
        self.shares.borrow_mut().advance(now_ns, used_ns, cpus());
        let mut averages = self.averages.borrow_mut();
        let held_ns = held_ns(averages.since_look_ns(now_ns));
        let busy = Busy { used_ns, held_ns, runnable, cpus: cpus() };
        averages.advance(now_ns, &busy);
    }

    /// CPU time of all threads that there ever were, in nanoseconds.
    pub fn cpu_ns(&self) -> u64 {
        let threads = kernel().tasks.threads.borrow_mut();
        let living: u64 = threads.values().map(|thread| thread.cpu_ns()).sum();
        living + self.ended_cpu_ns.load(Relaxed)
    }
}

/// For how much of the last `passed_ns` threads have held vCPUs that still run them. Those whose host
/// runs something else meanwhile use less CPU time.
fn held_ns(passed_ns: u64) -> u64 {
    let threads = kernel().tasks.threads.borrow_mut();
    threads.values().map(|thread| thread.ran_ns().min(passed_ns)).sum()
}

fn cpus() -> usize {
    kernel().config.get().cpus.max(1) as usize
}

/// What a processor has done, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Time in which it ran threads.
    pub busy_ns: u64,
    /// Time in which it had none.
    pub idle_ns: u64,
}

/// What the processors have done. Which one a thread has used is not known: time counts for the
/// first, and for the next one only if that is more than has passed.
#[derive(Default)]
struct Shares {
    /// Up to when, on the clock of the time since boot in nanoseconds.
    until_ns: u64,
    /// CPU time up to then, in nanoseconds.
    used_ns: u64,
    /// By processor, those included that are there no more.
    of_cpus: Vec<Share>,
}

impl Shares {
    fn advance(&mut self, now_ns: u64, used_ns: u64, cpus: usize) {
        let passed_ns = now_ns.saturating_sub(self.until_ns);
        let mut left_ns = used_ns.saturating_sub(self.used_ns);
        self.until_ns = self.until_ns.max(now_ns);
        self.used_ns = self.used_ns.max(used_ns);
        let count = self.of_cpus.len().max(cpus);
        self.of_cpus.resize(count, Share::default());
        for share in &mut self.of_cpus[..cpus] {
            let busy_ns = left_ns.min(passed_ns);
            left_ns -= busy_ns;
            share.busy_ns += busy_ns;
            share.idle_ns += passed_ns - busy_ns;
        }
        // Host processes may together have more vCPUs than there are processors.
        self.of_cpus[0].busy_ns += left_ns;
    }

    fn total(&self) -> Share {
        self.of_cpus.iter().fold(Share::default(), |sum, share| Share {
            busy_ns: sum.busy_ns + share.busy_ns,
            idle_ns: sum.idle_ns + share.idle_ns,
        })
    }
}

/// Averages of the load, which decay as on Linux (kernel/sched/loadavg.c).
#[derive(Default)]
struct Averages {
    /// Up to when samples count, on the clock of the time since boot in nanoseconds.
    until_ns: u64,
    /// When CPU time was last looked at for a sample, and what it was, in nanoseconds.
    looked_ns: u64,
    used_ns: u64,
    loads: [u64; 3],
}

/// What a look has found.
struct Busy {
    /// CPU time of all threads that there ever were, in nanoseconds.
    used_ns: u64,
    /// See [`held_ns`].
    held_ns: u64,
    /// Threads that run or could run.
    runnable: usize,
    cpus: usize,
}

impl Averages {
    fn since_look_ns(&self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.looked_ns)
    }

    /// Counts the samples that Linux would have taken meanwhile, all of them as the same.
    fn advance(&mut self, now_ns: u64, busy: &Busy) {
        let samples = now_ns.saturating_sub(self.until_ns) / LOOK_NS;
        if samples == 0 {
            return;
        }
        let used_ns = busy.used_ns.saturating_sub(self.used_ns);
        let passed_ns = self.since_look_ns(now_ns);
        let active = active(&Busy { used_ns, ..*busy }, passed_ns);
        for (load, decay) in self.loads.iter_mut().zip(DECAYS) {
            *load = decayed(*load, power(decay, samples), active);
        }
        self.until_ns += samples * LOOK_NS;
        (self.looked_ns, self.used_ns) = (now_ns, busy.used_ns.max(self.used_ns));
    }
}

/// How many threads ran or could run, in units of [`LOAD_ONE`]: as many as have used the processors or
/// held vCPUs. If the processors were nearly all in use, threads waited for them, and those that can
/// run now count.
fn active(busy: &Busy, passed_ns: u64) -> u64 {
    let held_ns = u128::from(busy.used_ns.max(busy.held_ns));
    let running = held_ns * u128::from(LOAD_ONE) / u128::from(passed_ns.max(1));
    // CPU time of a moment, told late, is no load of millions.
    let running = running.min(u128::from(u32::MAX)) as u64;
    match running >= busy.cpus as u64 * LOAD_ONE * 7 / 8 {
        true => running.max(busy.runnable as u64 * LOAD_ONE),
        false => running,
    }
}

/// `calc_load` of Linux' kernel/sched/loadavg.c.
fn decayed(load: u64, decay: u64, active: u64) -> u64 {
    let round_up = if active >= load { LOAD_ONE - 1 } else { 0 };
    (load * decay + active * (LOAD_ONE - decay) + round_up) >> LOAD_BITS
}

/// A fraction in units of [`LOAD_ONE`], raised to a power (`fixed_power_int`).
fn power(mut base: u64, mut exponent: u64) -> u64 {
    let product = |a: u64, b: u64| (a * b + LOAD_ONE / 2) >> LOAD_BITS;
    let mut result = LOAD_ONE;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = product(result, base);
        }
        base = product(base, base);
        exponent >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;

    const S: u64 = 1_000_000_000;

    fn busy(used_ns: u64, held_ns: u64, runnable: usize) -> Busy {
        Busy { used_ns, held_ns, runnable, cpus: 2 }
    }

    #[test]
    fn time_that_threads_have_used_is_busy_and_the_rest_is_idle() {
        let mut shares = Shares::default();
        shares.advance(10 * S, 0, 2);
        shares.advance(20 * S, 15 * S, 2);
        let share = |busy, idle| Share { busy_ns: busy * S, idle_ns: idle * S };
        assert_eq!(shares.of_cpus, [share(10, 10), share(5, 15)]);
        shares.advance(19 * S, 14 * S, 2);
        assert_eq!(shares.total(), share(15, 25), "nothing goes back");
        shares.advance(21 * S, 16 * S, 1);
        shares.advance(22 * S, 16 * S, 3);
        assert_eq!(shares.of_cpus, [share(11, 11), share(5, 16), share(0, 1)]);
        shares.advance(23 * S, 26 * S, 2);
        assert_eq!(shares.total(), share(26, 28), "none of it is lost");
    }

    #[test]
    fn the_load_rises_and_falls_as_on_linux() {
        let mut averages = Averages::default();
        averages.advance(3600 * S, &busy(S, 0, 1));
        assert_eq!(averages.loads, [0; 3]);
        averages.advance(3604 * S, &busy(5 * S, 0, 9));
        assert_eq!(averages.loads, [0; 3], "no sample was due");
        averages.advance(3660 * S, &busy(121 * S, 0, 2));
        let near = |load: u64, hundredths: u64| (load * 100 / LOAD_ONE).abs_diff(hundredths) <= 3;
        assert!(
            near(averages.loads[0], 126) && near(averages.loads[2], 13),
            "{:?}",
            averages.loads
        );
        averages.advance(3720 * S, &busy(121 * S, 0, 1));
        assert!(near(averages.loads[0], 46), "{:?}", averages.loads);
        averages.advance(u64::MAX, &busy(121 * S, 0, 1));
        assert_eq!(averages.loads, [0; 3]);
    }

    #[test]
    fn threads_that_wait_for_busy_processors_are_load() {
        assert_eq!(active(&busy(S, 0, 7), 10 * S), LOAD_ONE / 10);
        assert_eq!(active(&busy(20 * S, 0, 7), 10 * S), 7 * LOAD_ONE);
        assert_eq!(active(&busy(20 * S, 0, 1), 10 * S), 2 * LOAD_ONE);
        assert_eq!(active(&busy(0, 0, 1), 0), 0);
        assert_eq!(active(&busy(S, 10 * S, 1), 10 * S), LOAD_ONE, "the host ran something else");
    }

    #[test]
    fn a_thread_that_ends_leaves_its_cpu_time() {
        let _sandbox = Sandbox::new();
        let usage = &kernel().tasks.usage;
        let (_, before) = usage.shares();
        let thread = crate::task::thread::current_arc();
        thread.count(3 * S);
        let (_, meanwhile) = usage.shares();
        assert!(meanwhile.busy_ns >= before.busy_ns + 3 * S);
        usage.ended(&thread);
        kernel().tasks.threads.borrow_mut().clear();
        let (cpus, after) = usage.shares();
        assert_eq!((after.busy_ns, cpus.len()), (meanwhile.busy_ns, self::cpus()));
        assert!(after.idle_ns >= meanwhile.idle_ns);
    }
}
