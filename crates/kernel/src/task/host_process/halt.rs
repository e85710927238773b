//! Halting a host process: one vCPU makes the others rest while it does what nobody may
//! see half done.
#![allow(unsafe_code)]

use alloc::sync::Arc;
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use super::{
    Activity, Vcpu, interrupt_others, own_host_process, own_vcpu, sleep_until_woken, wake_vcpu,
};
use crate::platform::{host, kernel_lock};

/// The vCPU for which the others rest, or null. One host process halts at a time, since
/// only the first one does, before there are others.
static HALTED_BY: AtomicPtr<Vcpu> = AtomicPtr::new(core::ptr::null_mut());

/// Whether this vCPU is to rest instead of running threads.
pub fn is_asked() -> bool {
    let by = HALTED_BY.load(Relaxed);
    !by.is_null() && !core::ptr::eq(by, own_vcpu())
}

/// Does `work` while no other vCPU of the only host process uses the arena: they sleep,
/// watch, or wait for the kernel lock in their idle loops. To be called in the
/// idle loop.
pub(super) fn others_during<T>(work: impl FnOnce() -> T) -> T {
    while is_asked() {
        sleep_until_woken(own_vcpu().wake_word().load(Relaxed));
    }
    HALTED_BY.store(core::ptr::from_ref(own_vcpu()).cast_mut(), Relaxed);
    interrupt_others();
    while !own_host_process().is_alone() {
        let seen = own_vcpu().wake_word().load(Relaxed);
        kernel_lock::release();
        host::futex_wait(own_vcpu().wake_word(), seen, None);
        kernel_lock::acquire();
    }
    let outcome = work();
    HALTED_BY.store(core::ptr::null_mut(), Relaxed);
    wake_sleepers();
    outcome
}

/// This vCPU is about to sleep or to watch: tells the one that may wait for it.
pub(super) fn note_rest() {
    if is_asked() {
        // SAFETY: the vCPU that halts the others is there until it lets them go on.
        wake_vcpu(unsafe { &*HALTED_BY.load(Relaxed) });
    }
}

fn wake_sleepers() {
    let sleepers: alloc::vec::Vec<Arc<Vcpu>> = {
        let vcpus = own_host_process().vcpus.borrow_mut();
        vcpus.iter().filter(|vcpu| vcpu.activity.get() == Activity::Sleeping).cloned().collect()
    };
    for vcpu in &sleepers {
        vcpu.park(false);
        wake_vcpu(vcpu);
    }
}
