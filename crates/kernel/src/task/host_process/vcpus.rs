//! Virtual CPUs: adding host threads to a host process.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed};

use thaw_abi::control::FLAG_FREEZE_AT_ENTRY;

use super::{Activity, OwnVcpu, halt, own, own_host_process, wake_vcpu, wake_watcher};
use crate::errno::Result;
use crate::host::phases;
use crate::mm::{arena, lazy};
use crate::platform::saved::OfHost;
use crate::platform::{filter, host, kernel_lock, vcpu};
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::thread::Thread;

/// How many vCPUs have been given a wake word.
static WAKE_WORDS_GIVEN: AtomicU32 = AtomicU32::new(0);

/// A virtual CPU, as the others see it.
pub struct Vcpu {
    /// Number in its host process.
    index: u32,
    /// Host thread id in the sandbox' pid namespace.
    host_tid: AtomicU32,
    /// What it does.
    pub(super) activity: KernelCell<Activity>,
    /// Number of the word whose change ends its sleep.
    wake_word: u32,
    /// The thread that it runs, or null.
    running: AtomicPtr<Thread>,
    /// It leaves the threads that can run to the vCPUs that are awake, if any are.
    parked: AtomicBool,
    /// How often threads have made system calls on it.
    pub(super) calls: AtomicU64,
    /// The same when it was last judged.
    pub(super) calls_judged: AtomicU64,
    /// For how many judgements it counts as talkative, this one included.
    pub(super) talkative_for: AtomicU32,
    /// An interruption is on its way, and the vCPU has not looked since. More
    /// of them would only pile up on its signal stack.
    interrupted: AtomicBool,
    _of_host: OfHost,
}

impl Vcpu {
    /// A vCPU that is about to look for something to run.
    pub(super) fn new(index: u32, host_tid: u32) -> Self {
        Self {
            index,
            host_tid: AtomicU32::new(host_tid),
            activity: KernelCell::new(Activity::Active),
            wake_word: WAKE_WORDS_GIVEN.fetch_add(1, Relaxed),
            running: AtomicPtr::new(core::ptr::null_mut()),
            parked: AtomicBool::new(false),
            calls: AtomicU64::new(0),
            calls_judged: AtomicU64::new(0),
            talkative_for: AtomicU32::new(0),
            interrupted: AtomicBool::new(false),
            _of_host: OfHost::default(),
        }
    }

    /// Host thread id in the sandbox' pid namespace.
    pub(super) fn host_tid(&self) -> u32 {
        self.host_tid.load(Relaxed)
    }

    /// The word whose change ends its sleep. It sleeps only once the kernel lock is real.
    pub(super) fn wake_word(&self) -> &'static AtomicU32 {
        kernel_lock::wake_word(self.wake_word)
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
            host::interrupt(process, self.host_tid());
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
        wake_vcpu(&sleeper);
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
    if !filter::may_clone() {
        return false;
    }
    let config = kernel().config.get();
    let is_recorded = lazy::maps_pages() && phases::may_be_in_first_request();
    let limit = match config.flags & FLAG_FREEZE_AT_ENTRY {
        0 if !is_recorded => config.cpus.min(vcpu::MAX_VCPUS),
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
    // Not 0: that area holds the tables of the process, too.
    let index = {
        let vcpus = host_process.vcpus.borrow_mut();
        (1..).find(|&index| vcpus.iter().all(|vcpu| vcpu.index != index)).unwrap_or(1)
    };
    let vcpu = Arc::new(Vcpu::new(index, 0));
    // The host process keeps a reference to its address space through this vCPU, too.
    let own = OwnVcpu::new(own().space.clone(), own().host_process.clone(), vcpu.clone());
    vcpu.host_tid.store(vcpu::start(index, own)?, Relaxed);
    host_process.vcpus.borrow_mut().push(vcpu);
    Ok(())
}
