//! Virtual CPUs: adding host threads to a carrier.
#![allow(unsafe_code)]

use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::Relaxed};

use thaw_abi::control::FLAG_SEVERAL_VCPUS;

use super::{Activity, own_space, put_registers_away, ring, ring_watcher, run};
use crate::boot::arena;
use crate::errno::Result;
use crate::platform::host::{self, PROT_READ, PROT_WRITE};
use crate::platform::{fault, kernel_lock, vcpu};
use crate::state::kernel;
use crate::sync::Lock;
use crate::task::thread::Thread;

/// A virtual CPU, as the others see it.
pub struct Vcpu {
    /// Number in its host process.
    index: u32,
    /// Host thread id in the sandbox' pid namespace.
    host_tid: AtomicU32,
    /// What it does.
    pub(super) activity: Lock<Activity>,
    /// Rung to end its sleep.
    pub(super) bell: AtomicU32,
    /// The thread that it runs, or null.
    running: AtomicPtr<Thread>,
    /// An interruption is on its way, and the vCPU has not looked since. More
    /// of them would only pile up on its signal stack.
    interrupted: AtomicBool,
}

impl Vcpu {
    /// A vCPU that is about to look for something to run.
    pub(super) fn new(index: u32, host_tid: u32) -> Self {
        Self {
            index,
            host_tid: AtomicU32::new(host_tid),
            activity: Lock::new(Activity::Active),
            bell: AtomicU32::new(0),
            running: AtomicPtr::new(core::ptr::null_mut()),
            interrupted: AtomicBool::new(false),
        }
    }

    /// Host thread id in the sandbox' pid namespace.
    pub(super) fn host_tid(&self) -> u32 {
        self.host_tid.load(Relaxed)
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

/// Threads of this carrier have waited for a vCPU: wakes one that sleeps, or
/// adds one if the sandbox may have more. Whether somebody helps.
pub fn add_if_wanted() -> bool {
    let carrier = &own_space().carrier;
    if let Some(sleeper) = carrier.with_activity(Activity::Sleeping) {
        ring(&sleeper);
        return true;
    }
    if carrier.with_activity(Activity::Watching).is_some() {
        ring_watcher();
        return true;
    }
    if !may_grow() {
        return false;
    }
    if !arena::is_shared() {
        // The arena moves while no thread of the guest runs.
        vcpu::block().wants_vcpu = true;
        return false;
    }
    add().is_ok()
}

/// Whether the sandbox' limit leaves room for another vCPU.
pub fn may_grow() -> bool {
    let config = kernel().config.get();
    let limit = match config.flags & FLAG_SEVERAL_VCPUS {
        0 => 1,
        _ => config.cpus.min(vcpu::MAX_VCPUS),
    };
    own_space().carrier.vcpu_count() < limit as usize
}

/// Adds a vCPU to this carrier. The caller has the kernel lock.
pub(super) fn add() -> Result<()> {
    let carrier = &own_space().carrier;
    put_registers_away();
    // Not 0: that area holds the tables of the process, too.
    let index = {
        let vcpus = carrier.vcpus.lock();
        (1..).find(|&index| vcpus.iter().all(|vcpu| vcpu.index != index)).unwrap_or(1)
    };
    // An area that a vCPU of this host process, or of the one that it was
    // forked from, has left is mapped anew.
    let area = vcpu::area(index);
    let guards = [vcpu::signal_stack(index) - 4096, vcpu::idle_stack(index) - 4096];
    host::map_anonymous(area, vcpu::AREA_SIZE, PROT_READ | PROT_WRITE)?;
    for guard in guards {
        host::protect(guard, 4096, 0)?;
    }
    let vcpu = Arc::new(Vcpu::new(index, 0));
    let top = vcpu::idle_stack(index) + vcpu::IDLE_STACK_SIZE;
    let block = area as *mut vcpu::VcpuBlock;
    // SAFETY: just mapped, zero, and used by nobody yet; the host process keeps
    // a reference to its address space through this vCPU, too.
    unsafe {
        (*block).own = Arc::into_raw(vcpu.clone());
        Arc::increment_strong_count(vcpu::block().space);
        (*block).space = vcpu::block().space;
    }
    let tid = host::start_thread(top, index)?;
    vcpu.host_tid.store(tid, Relaxed);
    carrier.vcpus.lock().push(vcpu);
    Ok(())
}

/// Where a new host thread begins, on its idle stack.
pub extern "C" fn start_of_vcpu(index: u32) -> ! {
    // SAFETY: the area was mapped for this thread.
    unsafe { vcpu::initialize(index) };
    if fault::use_signal_stack(index).is_err() {
        crate::platform::panic::die_with("a virtual CPU has no signal stack")
    }
    kernel_lock::acquire();
    run()
}
