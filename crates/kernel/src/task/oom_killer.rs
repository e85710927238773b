//! The out-of-memory killer: ends one process when the sandbox has used up its memory.
//!
//! Only the host knows what its processes have, so it asks
//! ([`thaw_abi::control::MSG_OUT_OF_MEMORY`]) and says what each has. The choice is Linux'
//! (`oom_badness` in mm/oom_kill.c). As on Linux, all others wait until the memory has been given back:
//! if they took what is left meanwhile, host calls of this kernel would fail.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use thaw_abi::control::{
    OOM_KILLED, OOM_NOBODY, OOM_UNDER_WAY, OOM_WAIT_NS, OomKilled, ProcessMemory,
};

use super::exit::begin_group_exit;
use super::oom::OOM_SCORE_ADJ_MIN;
use super::process::{ExitStatus, FIRST_PID, Process};
use super::ptrace;
use super::signal::SIGKILL;
use super::wait::Events;
use super::{current, host_process, scheduler};
use crate::errno::{Errno, Result};
use crate::platform::kernel_lock;
use crate::state::kernel;
use crate::time::Instant;

/// Until when threads wait for memory, on the guest's monotonic clock in nanoseconds; 0: none does.
static WAIT_UNTIL: AtomicU64 = AtomicU64::new(0);

/// Ends the process that has most memory, with those that share it, unless that is the first one, with
/// which the sandbox would end. The others wait until [`memory_is_back`].
pub fn kill_one(memory: &[ProcessMemory]) -> OomKilled {
    let killed = choose_and_kill(memory);
    if killed.outcome != OOM_NOBODY {
        WAIT_UNTIL.store(Instant::now().0 + OOM_WAIT_NS, Relaxed);
        kernel().tasks.all_threads().iter().for_each(|thread| thread.needs_attention());
        host_process::interrupt_everybody();
    }
    killed
}

/// There is enough memory again.
pub fn memory_is_back() {
    WAIT_UNTIL.store(0, Relaxed);
    kernel().tasks.memory_is_back.wake_all(Events::IN);
}

/// Has the running thread wait as long as memory is short, unless it is to end.
pub fn wait_for_memory() {
    loop {
        let until = Instant(WAIT_UNTIL.load(Relaxed));
        if until.0 == 0 || current().is_dying() || until <= Instant::now() {
            return;
        }
        scheduler::block_uninterruptibly_until(&kernel().tasks.memory_is_back, until);
    }
}

/// For how many nanoseconds what fails for want of memory is tried again.
const PATIENCE_NS: u64 = 1_000_000_000;
/// Pause between two attempts, in nanoseconds.
const PAUSE_NS: u64 = 5_000_000;

/// Does something for the running thread, and again if the host has no memory for it, as there may be some when
/// a process has been ended. What fails must leave nothing behind. Others run between two attempts.
///
/// # Errors
/// Those of `attempt`: `ENOMEM` also if that was for another reason than the sandbox' memory.
pub fn retry<T>(mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let first = attempt();
    // A single host process has nobody who could be ended in its place.
    if !matches!(first, Err(Errno::ENOMEM)) || !kernel_lock::is_enabled() {
        return first;
    }
    let until = Instant(Instant::now().0 + PATIENCE_NS);
    while !current().is_dying() && Instant::now() < until {
        let pause = Instant(Instant::now().0 + PAUSE_NS);
        scheduler::block_uninterruptibly_until(&kernel().tasks.memory_is_back, pause);
        wait_for_memory();
        let outcome = attempt();
        if !matches!(outcome, Err(Errno::ENOMEM)) {
            return outcome;
        }
    }
    Err(Errno::ENOMEM)
}

fn choose_and_kill(memory: &[ProcessMemory]) -> OomKilled {
    let sandbox_kib = (kernel().memory_total() >> 10) as i64;
    let mut worst: Option<(i64, u32, Arc<Process>)> = None;
    for process in kernel().tasks.processes_where(|process| !process.is_zombie()) {
        let Some(resident_kib) = resident_kib(&process, memory) else { continue };
        if process.exiting.borrow_mut().is_some() {
            // It may have stopped for its tracer.
            ptrace::killed(&process);
            return outcome(OOM_UNDER_WAY);
        }
        let adjustment = process.oom_score_adj();
        if process.is_init.get() || adjustment == OOM_SCORE_ADJ_MIN {
            continue;
        }
        let badness = badness(resident_kib, adjustment, sandbox_kib);
        if worst.as_ref().is_none_or(|(most, ..)| badness > *most) {
            worst = Some((badness, resident_kib, process));
        }
    }
    let Some((_, resident_kib, victim)) = worst else { return outcome(OOM_NOBODY) };
    let sharing = sharing_memory_of(&victim);
    if sharing.iter().any(|process| process.pid == FIRST_PID) {
        return outcome(OOM_NOBODY);
    }
    for process in &sharing {
        ptrace::killed(process);
        begin_group_exit(process, ExitStatus::Killed(SIGKILL));
    }
    *kernel().tasks.oom_kills.borrow_mut() += 1;
    let (pid, name) = (victim.pid.number(), name_of(&victim));
    OomKilled { pid, resident_kib, name, ..outcome(OOM_KILLED) }
}

fn outcome(outcome: u32) -> OomKilled {
    OomKilled { outcome, ..OomKilled::default() }
}

/// What the host has said of the memory of a process, if it has.
fn resident_kib(process: &Process, memory: &[ProcessMemory]) -> Option<u32> {
    let host_pid = process.mm().host_process()?.host_pid();
    let found = memory.iter().find(|process| process.host_pid == host_pid)?;
    Some(found.resident_kib)
}

/// How much speaks for ending a process, in KiB: `adjustment` adds or takes away thousandths of all memory.
fn badness(resident_kib: u32, adjustment: i32, sandbox_kib: i64) -> i64 {
    i64::from(resident_kib) + i64::from(adjustment) * (sandbox_kib / 1000)
}

/// A process and all others with the same memory, which would keep it.
fn sharing_memory_of(victim: &Process) -> Vec<Arc<Process>> {
    let memory = victim.mm();
    kernel().tasks.processes_where(|other| !other.is_zombie() && Arc::ptr_eq(&other.mm(), &memory))
}

/// The name of a process: that of its first thread, or of another one if that has ended.
fn name_of(process: &Process) -> [u8; 16] {
    let threads = process.threads.borrow_mut();
    let first = threads.iter().find(|thread| thread.tid() == process.pid.main_thread());
    first.or(threads.first()).map_or([0; 16], |thread| thread.name.get())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;

    #[test]
    fn the_choice_is_that_of_linux() {
        let gib = 1 << 20;
        assert_eq!(badness(500, 0, gib), 500);
        assert!(badness(gib as u32 / 2, 0, gib) < badness(0, 501, gib));
        assert!(badness(gib as u32 / 2, -501, gib) < 0);
    }

    #[test]
    fn the_first_process_is_never_ended() {
        let _sandbox = Sandbox::new();
        let first = kernel().tasks.process(FIRST_PID).unwrap();
        let host_pid = first.mm().host_process().unwrap().host_pid();
        let memory = [ProcessMemory { host_pid, resident_kib: 9 }];
        assert_eq!(kill_one(&memory), outcome(OOM_NOBODY));
        assert_eq!(kill_one(&[]), outcome(OOM_NOBODY));
        assert!(first.exiting.borrow_mut().is_none() && kernel().tasks.oom_kills.get() == 0);
        // Nor is anybody else while somebody is just ending.
        *first.exiting.borrow_mut() = Some(ExitStatus::Exited(0));
        assert_eq!(kill_one(&memory), outcome(OOM_UNDER_WAY));
    }
}
