//! Halting a host process: one vCPU makes the others rest while it does what nobody may
//! see half done.

use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::{
    Activity, Vcpu, interrupt_others, own_host_process, own_vcpu, sleep_until_woken, table,
    wake_vcpu,
};
use crate::platform::kernel_lock;
use crate::platform::machine::{Machine, Vcpus};

/// The number of the vCPU for which the others rest, or 0. One host process halts at a time, since
/// only the first one does, before there are others.
static HALTED_BY: AtomicUsize = AtomicUsize::new(0);

/// Whether this vCPU is to rest instead of running threads.
pub fn is_asked() -> bool {
    let by = HALTED_BY.load(Relaxed);
    by != 0 && by != Machine::number()
}

/// Does `work` while no other vCPU of the only host process uses the arena: they sleep,
/// watch, or wait for the kernel lock in their idle loops. To be called in the
/// idle loop.
pub(super) fn others_during<T>(work: impl FnOnce() -> T) -> T {
    while is_asked() {
        sleep_until_woken(own_vcpu().wake_word().load(Relaxed));
    }
    HALTED_BY.store(Machine::number(), Relaxed);
    interrupt_others();
    while !own_host_process().is_alone() {
        let seen = own_vcpu().wake_word().load(Relaxed);
        kernel_lock::release();
        Machine::wait(own_vcpu().wake_word(), seen, None);
        kernel_lock::acquire();
    }
    let outcome = work();
    HALTED_BY.store(0, Relaxed);
    wake_sleepers();
    outcome
}

/// This vCPU is about to sleep or to watch: tells the one that may wait for it.
pub(super) fn note_rest() {
    if is_asked()
        && let Some(by) = table::vcpu(HALTED_BY.load(Relaxed))
    {
        wake_vcpu(by);
    }
}

fn wake_sleepers() {
    let is_asleep = |vcpu: &&Vcpu| vcpu.activity.get() == Activity::Sleeping;
    for vcpu in own_host_process().vcpus().filter(is_asleep) {
        vcpu.park(false);
        wake_vcpu(vcpu);
    }
}
