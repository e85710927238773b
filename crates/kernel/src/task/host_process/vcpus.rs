//! Virtual CPUs: adding host threads to a host process.

use core::cell::Cell;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::Relaxed};

use thaw_abi::control::FLAG_FREEZE_AT_ENTRY;

use super::cpu_time::CpuTime;
use super::{Activity, halt, own_host_process, wake_vcpu, wake_watcher};
use crate::errno::Result;
use crate::host::phases;
use crate::mm::{arena, lazy};
use crate::platform::kernel_lock;
use crate::platform::machine::{Machine, Processes, Vcpus};
use crate::state::kernel;
use crate::task::thread::Thread;

/// How many vCPUs have been given a wake word.
static WAKE_WORDS_GIVEN: AtomicU32 = AtomicU32::new(0);

/// A virtual CPU, in the table of host processes.
#[derive(bytemuck::Zeroable)]
#[repr(C)]
pub struct Vcpu {
    /// Host thread id in the sandbox' pid namespace.
    host_tid: AtomicU32,
    /// Number of the word whose change ends its sleep.
    wake_word: AtomicU32,
    /// The thread that it runs, or null.
    running: AtomicPtr<Thread>,
    /// How often threads have made system calls on it, wrapping.
    pub(super) calls: AtomicU32,
    /// The same when it was last judged.
    pub(super) calls_judged: AtomicU32,
    /// For how many judgements it counts as talkative, this one included.
    pub(super) talkative_for: AtomicU32,
    /// What it does.
    pub(super) activity: Cell<Activity>,
    /// It leaves the threads that can run to the vCPUs that are awake, if any are.
    parked: AtomicBool,
    /// An interruption is on its way, and the vCPU has not looked since. More
    /// of them would only pile up on its signal stack.
    interrupted: AtomicBool,
    /// What it has counted of its threads.
    pub(super) cpu_time: CpuTime,
}

impl Vcpu {
    /// Becomes a vCPU that is about to look for something to run.
    pub(super) fn begin(&self, host_tid: u32) {
        self.host_tid.store(host_tid, Relaxed);
        self.wake_word.store(WAKE_WORDS_GIVEN.fetch_add(1, Relaxed), Relaxed);
        self.running.store(core::ptr::null_mut(), Relaxed);
        self.calls.store(0, Relaxed);
        self.calls_judged.store(0, Relaxed);
        self.talkative_for.store(0, Relaxed);
        self.activity.set(Activity::Active);
        self.parked.store(false, Relaxed);
        self.interrupted.store(false, Relaxed);
        self.cpu_time.reset();
    }

    pub(super) fn set_host_tid(&self, host_tid: u32) {
        self.host_tid.store(host_tid, Relaxed);
    }

    /// Host thread id in the sandbox' pid namespace.
    pub(super) fn host_tid(&self) -> u32 {
        self.host_tid.load(Relaxed)
    }

    /// The word whose change ends its sleep. It sleeps only once the kernel lock is real.
    pub(super) fn wake_word(&self) -> &'static AtomicU32 {
        kernel_lock::wake_word(self.wake_word.load(Relaxed))
    }

    /// Whether it leaves threads to others.
    pub(super) fn is_parked(&self) -> bool {
        self.parked.load(Relaxed)
    }

    /// Whether it is to leave threads to others from now on.
    pub(super) fn park(&self, parked: bool) {
        self.parked.store(parked, Relaxed);
    }

    /// Makes it come into the kernel; `process` is its host process.
    pub(super) fn interrupt(&self, process: u32) {
        if !self.interrupted.swap(true, Relaxed) {
            Machine::interrupt(process, self.host_tid());
        }
    }

    /// It looks now at what an interruption was meant to show it.
    pub(super) fn attend_interruption(&self) {
        self.interrupted.store(false, Relaxed);
    }

    /// The thread that it runs, or null.
    pub(super) fn running(&self) -> *const Thread {
        self.running.load(Relaxed)
    }

    pub(super) fn set_running(&self, thread: Option<&Thread>) {
        let thread = thread.map_or(core::ptr::null(), core::ptr::from_ref);
        self.running.store(thread.cast_mut(), Relaxed);
    }
}

/// Threads of this host process have waited for a vCPU: wakes one that sleeps, or
/// adds one if the sandbox may have more. Whether somebody helps.
pub fn add_if_wanted() -> bool {
    if halt::is_asked() {
        return false;
    }
    let host_process = own_host_process();
    if let Some(sleeper) = host_process.with_activity(Activity::Sleeping) {
        sleeper.park(false);
        wake_vcpu(sleeper);
        return true;
    }
    if host_process.with_activity(Activity::Watching).is_some() {
        // It looks for threads when its wait ends.
        wake_watcher();
        return true;
    }
    // A sandbox that cannot have another vCPU goes on with what it has.
    may_grow() && become_several().and_then(|()| add()).is_ok()
}

/// Whether the sandbox' limit leaves room for another vCPU. A program that is to
/// be frozen has one, and so has one whose filter allows no other. One whose working set is
/// recorded has one until it has answered: for several, all of its memory is mapped.
pub fn may_grow() -> bool {
    if !Machine::may_fork() {
        return false;
    }
    let config = kernel().config.get();
    let is_recorded = lazy::maps_pages() && phases::may_be_in_first_request();
    let limit = match config.flags & FLAG_FREEZE_AT_ENTRY {
        0 if !is_recorded => config.cpus.min(Machine::MAX_VCPUS),
        _ => 1,
    };
    own_host_process().vcpu_count() < limit as usize
}

/// Prepares for there being several vCPUs.
fn become_several() -> Result<()> {
    arena::prepare_wake_socket()?;
    // Two vCPUs that touch the same page would both take its fault.
    lazy::map_all();
    kernel_lock::enable()
}

/// Adds a vCPU to this host process. The caller has the kernel lock.
fn add() -> Result<()> {
    let host_process = own_host_process();
    let index = host_process.free_index();
    let number = host_process.add_vcpu(index, 0);
    match Machine::start(index, number) {
        Ok(host_tid) => host_process.vcpu(index).set_host_tid(host_tid),
        Err(error) => {
            host_process.remove_vcpu(index);
            return Err(error);
        }
    }
    Ok(())
}
