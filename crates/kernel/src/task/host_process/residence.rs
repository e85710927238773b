//! Whether the memory of a host process is there: when a sandbox of several host processes
//! hibernates, each gives up its own, and takes it back when it next has something to do.
//!
//! ```text
//! collector: others_give_up ──asked──▶ a vCPU of each other host process: settle ─▶ unmaps, sleeps
//!     │                ◀──────given up──────┘
//!     └─ gives up its own, and the arena's ─▶ waits ─▶ takes both back
//!                                               others: settle, when somebody wakes them
//! ```
//!
//! A vCPU that has waited calls [`settle`] before it touches the heap or memory of the guest. All
//! of this is in the table of host processes and in the kernel's variables, which stay.

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

use super::{
    Activity, HostProcess, WATCHER, own_host_process, own_vcpu, table, twins, wake_idle, wake_vcpu,
};
use crate::errno::{Errno, Result};
use crate::mm::{arena, lazy, swap};
use crate::platform::kernel_lock;
use crate::platform::machine::{Clocks, Machine, Vcpus};
use crate::platform::panic;
use crate::state::kernel;

/// What a host process has of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Zeroable)]
#[repr(u8)]
pub(super) enum Held {
    /// All that its address space maps.
    All = 0,
    /// A part, and a plan of what is mapped when it is touched.
    Planned,
    /// Nothing. There is no heap, either.
    Nothing,
}

/// What a host process is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Zeroable)]
#[repr(u8)]
pub(super) enum Asked {
    Nothing = 0,
    GiveUp,
    /// To fork a twin.
    Fork,
    /// To map all of its memory.
    TakeBack,
}

/// How long the others have to give up their memory: unmapping gigabytes takes less than a second.
const COLLECT_NS: u64 = 5_000_000_000;

/// Whether a vCPU waits for others to give up their memory: nobody else goes on meanwhile.
static COLLECTING: AtomicU32 = AtomicU32::new(0);
/// The number of that vCPU.
static COLLECTOR: AtomicUsize = AtomicUsize::new(0);

/// Has all other host processes of a sandbox at rest give up their memory; whether they have.
/// Where one does not answer, some may have, and take it back when they need it.
pub fn others_give_up() -> bool {
    HostProcess::all().for_each(HostProcess::note_swap);
    others_do(Asked::GiveUp)
}

/// Has a vCPU of each other host process in the last report do something; whether all have.
/// Nothing is allocated.
pub(super) fn others_do(what: Asked) -> bool {
    let own = own_host_process();
    let others = HostProcess::all().filter(|&host_process| !core::ptr::eq(host_process, own));
    others.filter(|other| other.number_in_report().is_some()).for_each(|other| other.ask(what));
    COLLECTOR.store(Machine::number(), Relaxed);
    COLLECTING.store(1, Relaxed);
    let has_all = wait_for_answers(Machine::monotonic_ns() + COLLECT_NS);
    COLLECTING.store(0, Relaxed);
    Machine::wake(&COLLECTING, i32::MAX as u32);
    has_all
}

/// Waits until nobody is asked any more; whether all have answered.
fn wait_for_answers(deadline_ns: u64) -> bool {
    let is_asked = |host_process: &&HostProcess| {
        matches!(host_process.asked.get(), Asked::GiveUp | Asked::Fork)
    };
    while HostProcess::all().any(|host_process| is_asked(&host_process)) {
        let left = deadline_ns.saturating_sub(Machine::monotonic_ns());
        if left == 0 {
            HostProcess::all().filter(is_asked).for_each(|late| late.asked.set(Asked::Nothing));
            return false;
        }
        let seen = own_vcpu().wake_word().load(Relaxed);
        kernel_lock::release();
        Machine::wait(own_vcpu().wake_word(), seen, Some(left));
        kernel_lock::acquire();
    }
    true
}

/// Takes back the arena's memory, and then this host process' own. From then on there is a heap.
pub fn take_back_first() -> Result<()> {
    swap::take_back_arena()?;
    for space in kernel().tasks.spaces() {
        // Host processes have unmapped what they showed.
        space.forget_shown();
    }
    take_back_own()
}

/// Whether all host processes have all of their memory; those that have not are asked to. To be
/// asked again when they rest.
pub fn has_all_memory() -> bool {
    let own = own_host_process();
    let is_behind = |host_process: &&HostProcess| {
        !core::ptr::eq(*host_process, own) && host_process.held.get() != Held::All
    };
    let behind = HostProcess::all().filter(is_behind).map(|late| late.ask(Asked::TakeBack));
    behind.count() == 0
}

/// Maps all that is planned of this host process' memory.
pub fn complete_memory() {
    lazy::map_all();
    own_host_process().held.set(Held::All);
}

/// To be called by a vCPU that has waited, with the kernel lock, before it touches anything but
/// the per-boot area: it does what its host process is asked to do. Whether it has slept
/// meanwhile.
pub fn settle() -> bool {
    let own = own_host_process();
    let mut has_slept = false;
    loop {
        if own.asked.get() == Asked::GiveUp {
            give_up_own(own);
            has_slept = true;
            sleep_without_memory();
        } else if own.asked.get() == Asked::Fork {
            own.asked.set(Asked::Nothing);
            twins::fork_own();
            tell_collector();
        } else if COLLECTING.load(Relaxed) != 0 && COLLECTOR.load(Relaxed) != Machine::number() {
            // One that another vCPU has given up the memory of has nothing to do.
            if own.held.get() != Held::Nothing || !sleep_without_memory() {
                wait_for_collector();
            }
            has_slept = true;
        } else {
            break;
        }
    }
    if own.held.get() == Held::Nothing {
        let is_back =
            swap::is_whole().and_then(|()| arena::map_saved()).and_then(|()| take_back_own());
        if is_back.is_err() {
            panic::die_with("the swap file of a hibernated process cannot be read");
        }
    }
    if own.asked.replace(Asked::Nothing) == Asked::TakeBack {
        complete_memory();
    }
    has_slept
}

fn give_up_own(own: &HostProcess) {
    own.asked.set(Asked::Nothing);
    own.held.set(Held::Nothing);
    if swap::give_up().is_err() {
        panic::die_with("the memory of a process cannot be given up");
    }
    tell_collector();
}

fn tell_collector() {
    if let Some(collector) = table::vcpu(COLLECTOR.load(Relaxed)) {
        wake_vcpu(collector);
    }
}

/// The arena is there.
fn take_back_own() -> Result<()> {
    let own = own_host_process();
    let number = own.number_in_swap().ok_or(Errno::EINVAL)?;
    swap::take_back(&own.served(), number)?;
    own.held.set(Held::Planned);
    if own.vcpu_count() > 1 {
        // Two vCPUs that touch the same page would both take its fault.
        complete_memory();
    }
    Ok(())
}

/// Sleeps until somebody has something for this vCPU; whether it has slept. It does not watch any
/// more.
fn sleep_without_memory() -> bool {
    let own = own_vcpu();
    let seen = own.wake_word().load(Relaxed);
    let number = Machine::number();
    let _ = WATCHER.compare_exchange(number, 0, Relaxed, Relaxed);
    own.activity.set(Activity::Sleeping);
    own.park(true);
    let mut has_slept = false;
    while own.wake_word().load(Relaxed) == seen && !Machine::has_signal() {
        kernel_lock::release();
        Machine::wait(own.wake_word(), seen, None);
        kernel_lock::acquire();
        has_slept = true;
    }
    has_slept
}

fn wait_for_collector() {
    kernel_lock::release();
    Machine::wait(&COLLECTING, 1, None);
    kernel_lock::acquire();
}

impl HostProcess {
    /// Asks something of it, and wakes a vCPU that will do it.
    fn ask(&self, what: Asked) {
        self.asked.set(what);
        wake_idle(self);
    }
}
