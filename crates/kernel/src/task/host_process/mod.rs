//! Host processes: the host processes that carry the sandbox' address spaces.
//!
//! A host process has virtual CPUs, each a host thread with an idle loop ([`run`])
//! that runs the threads of the address space. A sandbox begins with one host process
//! with one vCPU. fork(2) makes host processes ([`fork`]), which share the arena
//! ([`crate::mm::arena`]) and all descriptors; a vCPU is added when threads
//! have waited for one, up to the sandbox' limit ([`vcpus`]).
//!
//! One idle vCPU of the sandbox is the *watcher*: it waits in the host for
//! descriptors, messages and the nearest timer on behalf of all. The others
//! sleep until there is something for them to run. There may be none for a while,
//! as long as a host process that is busy has the host looked at at its ticks.
mod cpu_time;
mod fork;
mod halt;
mod load;
mod residence;
mod table;
pub mod twins;
mod vcpus;

pub use cpu_time::{begin_to_count, end_to_count, uncounted_ns};
pub use fork::{ForkRequest, begin_others, fork, fork_empty, move_to_new_space, prepare_fork};
pub use load::{count_call, count_request, requests_begun};
pub use residence::{complete_memory, has_all_memory, others_give_up, settle, take_back_first};
pub use table::{HostProcess, Served, first_range, map_first, number};
pub use vcpus::{Vcpu, add_if_wanted, may_grow};

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use super::hooks::above;
use super::thread::Thread;
use super::{Space, freeze_request, scheduler};
use crate::host::{control, phases};
use crate::mm::{arena, populate};
use crate::platform::boot_area::of_process;
use crate::platform::kernel_lock;
use crate::platform::machine::{Clocks, Forked, Machine, Processes, Threads, Vcpus};
use crate::state::kernel;
use crate::task::host_poll;
use crate::time::timer;

/// What a vCPU does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Zeroable)]
#[repr(u8)]
pub(super) enum Activity {
    /// Runs threads, or is about to look for some.
    Active = 0,
    /// Waits in the host for everybody.
    Watching,
    /// Waits for its wake word to change.
    Sleeping,
}

/// The number of the vCPU that watches, or 0.
static WATCHER: AtomicUsize = AtomicUsize::new(0);
/// Until when it watches at most, on the guest's monotonic clock in nanoseconds.
static WATCHES_UNTIL: AtomicU64 = AtomicU64::new(u64::MAX);
/// The exit code of the sandbox plus 1, once it is to end.
static ENDING: AtomicU64 = AtomicU64::new(0);

/// The space that this vCPU serves.
#[inline]
pub fn own_space() -> Served {
    own_host_process().served()
}

/// This host process.
#[inline]
pub fn own_host_process() -> &'static HostProcess {
    match table::of_vcpu(Machine::number()) {
        Some(host_process) => host_process,
        None => panic!("this vCPU serves no address space"),
    }
}

/// This vCPU.
#[inline]
fn own_vcpu() -> &'static Vcpu {
    match table::vcpu(Machine::number()) {
        Some(vcpu) => vcpu,
        None => panic!("this vCPU serves no address space"),
    }
}

fn is_own(vcpu: &Vcpu) -> bool {
    table::vcpu(Machine::number()).is_some_and(|own| core::ptr::eq(own, vcpu))
}

/// Makes the first host process of a sandbox serve a space.
pub fn begin(space: Arc<Space>) {
    const FIRST_HOST_PID: u32 = 1;
    WATCHER.store(0, Relaxed);
    let host_process = HostProcess::begin_first(&space);
    host_process.host_pid.store(FIRST_HOST_PID, Relaxed);
    serve(host_process);
}

/// Makes the calling host thread the first vCPU of a host process.
fn serve(host_process: &HostProcess) {
    of_process().alarm_at.store(0, Relaxed);
    Machine::set_number(host_process.add_vcpu(Machine::index(), host_process.host_pid()));
    // What the host has counted until now is no thread's.
    cpu_time::look();
}

fn is_first() -> bool {
    table::of_vcpu(Machine::number()).is_some_and(HostProcess::is_first)
}

/// Whether a vCPU watches.
fn is_somebody_watching() -> bool {
    WATCHER.load(Relaxed) != 0
}

/// Tells the vCPUs of a space that there is something in its queue.
pub fn notify(space: &Space) {
    let Some(host_process) = space.host_process() else { return };
    if core::ptr::eq(host_process, own_host_process()) {
        // This vCPU looks at the queue before it rests. If that takes long,
        // the alarm finds help.
        return;
    }
    if host_process.with_activity(Activity::Active).is_some() {
        if space.run_queue.len() == 1 {
            // They look at their queue when the threads that they run stop; should
            // that not be soon, an alarm of their own has to find help or end a
            // time slice.
            interrupt_all(host_process);
        }
    } else {
        wake_idle(host_process);
    }
}

/// Makes all vCPUs of another host process come into the kernel.
fn interrupt_all(host_process: &HostProcess) {
    for vcpu in host_process.vcpus() {
        if vcpu.activity.get() == Activity::Active {
            vcpu.interrupt(host_process.host_pid());
        }
    }
}

/// Makes the other vCPUs of this host process look whether their time slices are over.
pub fn interrupt_others() {
    let host_process = own_host_process();
    for vcpu in host_process.vcpus() {
        if !is_own(vcpu) && vcpu.activity.get() == Activity::Active {
            vcpu.interrupt(host_process.host_pid());
        }
    }
}

/// Makes all other vCPUs come into the kernel, to see what is asked of everybody.
pub fn interrupt_everybody() {
    for host_process in HostProcess::all() {
        for vcpu in host_process.vcpus().filter(|vcpu| !is_own(vcpu)) {
            if vcpu.activity.get() == Activity::Active {
                vcpu.interrupt(host_process.host_pid());
            }
        }
    }
}

/// After a freeze at once: has the threads run that could before.
pub fn go_on() {
    let spaces = HostProcess::all().map(HostProcess::served);
    spaces.filter(|space| !space.run_queue.is_empty()).for_each(|space| notify(&space));
}

/// The last process of a space has left it for another one: its host process looks whether it is
/// needed.
fn wake_to_retire(space: &Space) {
    space.release_shared();
    if let Some(host_process) = space.host_process() {
        wake_idle(host_process);
    }
}

/// Makes an idle vCPU of another host process look for what there is to do.
fn wake_idle(host_process: &HostProcess) {
    if let Some(sleeper) = host_process.with_activity(Activity::Sleeping) {
        wake_vcpu(sleeper);
    } else {
        wake_watcher();
    }
}

/// Makes a thread that runs on another vCPU come into the kernel.
pub fn interrupt(thread: &Thread) {
    let Some(host_process) = thread.process.mm().host_process() else { return };
    for vcpu in host_process.vcpus() {
        if core::ptr::eq(vcpu.running(), thread) && !is_own(vcpu) {
            vcpu.interrupt(host_process.host_pid());
        }
    }
}

/// A signal has come for an idle vCPU, in its handler: lets its wait end, if it
/// waits or is about to. One that has not said so yet looks for signals once it
/// has ([`Machine::has_signal`]).
pub fn end_wait(number: usize) {
    if let Some(vcpu) = table::vcpu(number).filter(|_| kernel_lock::is_enabled()) {
        vcpu.wake_word().fetch_add(1, Relaxed);
        if WATCHER.load(Relaxed) == number
            && let Some(wake_sender) = arena::wake_sender()
        {
            // The lock may be another one's.
            kernel_lock::send_now(wake_sender);
        }
    }
}

/// This vCPU looks now at what an interruption was meant to show it.
pub fn attend_interruption() {
    own_vcpu().attend_interruption();
}

fn wake_vcpu(vcpu: &Vcpu) {
    vcpu.wake_word().fetch_add(1, Relaxed);
    kernel_lock::wake_later(vcpu.wake_word());
}

fn wake_watcher() {
    if let Some(wake_sender) = arena::wake_sender() {
        kernel_lock::send_later(wake_sender);
    }
}

/// The idle loop; never returns. Holds the kernel lock except while it waits.
pub fn run() -> ! {
    loop {
        run_threads();
        end_if_told();
        if own_space().users() == 0 && !is_first() {
            retire();
        }
        if timer::fire_due() {
            continue;
        }
        // Whoever watches sees the message that the host has rung for.
        if Machine::take_doorbell() && !is_somebody_watching() {
            control::handle_messages();
            // A thread that can run now would wait for the next tick of the clock.
            continue;
        }
        if Machine::take_alarm() {
            // It was for a vCPU that is busy; the timers have been fired.
            interrupt_others();
            if load::helps() {
                continue;
            }
        }
        if control::has_kept() {
            control::handle_messages();
            continue;
        }
        if others_rest() && above().freeze_if_due() {
            continue;
        }
        phases::report_if_due();
        if !own_space().run_queue.is_empty() {
            scheduler::watch_clock_asleep();
        }
        if !is_somebody_watching() && !others_look() {
            watch();
        } else {
            sleep();
        }
    }
}

/// Runs threads until none can run.
fn run_threads() {
    while may_run_threads() {
        let Some(thread) = own_space().run_queue.pop() else { return };
        phases::first_instruction();
        attend_interruption();
        if populate::is_pending() {
            thread.needs_attention();
        }
        own_vcpu().set_running(Some(&thread));
        thread.switch_from_idle();
        own_vcpu().set_running(None);
        if fork::run_fork_request(&thread) == Some(Forked::Child) {
            // This reference is the parent's.
            core::mem::forget(thread);
        }
    }
}

/// Whether this vCPU is to run threads now, if there are any.
pub fn may_run_threads() -> bool {
    let rests = halt::is_asked()
        || freeze_request::is_at_once()
        || own_vcpu().is_parked() && !own_host_process().is_alone();
    !rests
}

/// Whether all other vCPUs wait, and there is nothing to do for them before a freeze.
fn others_rest() -> bool {
    if !kernel_lock::is_enabled() {
        return true;
    }
    let has_nothing_to_do = |host_process: &HostProcess| {
        host_process.served().run_queue.is_empty() || freeze_request::is_at_once()
    };
    !fork::is_under_way() && HostProcess::all().all(|all| all.rests() && has_nothing_to_do(all))
}

/// Waits in the host for descriptors, messages, the nearest timer and the wake socket.
fn watch() {
    WATCHER.store(Machine::number(), Relaxed);
    WATCHES_UNTIL.store(timer::next_deadline().map_or(u64::MAX, |next| next.0), Relaxed);
    own_vcpu().activity.set(Activity::Watching);
    own_vcpu().park(true);
    put_registers_away();
    halt::note_rest();
    // A signal that came before the watcher was known has ended nothing.
    let timeout = if Machine::has_signal() { Some(0) } else { timer::time_to_next() };
    let has_message = host_poll::watch(timeout);
    own_vcpu().activity.set(Activity::Active);
    // What has been found to run is at hand here.
    own_vcpu().park(Machine::has_signal() || !own_host_process().wants_own_help());
    // Somebody else may watch by now.
    let _ = WATCHER.compare_exchange(Machine::number(), 0, Relaxed, Relaxed);
    if has_message {
        control::handle_messages();
    }
}

/// Another vCPU may freeze the sandbox while this one waits: all of its threads
/// must be in memory.
fn put_registers_away() {
    if kernel_lock::is_enabled() {
        Machine::put_registers_away();
    }
}

/// Sleeps until somebody wakes this vCPU. Whoever looks at the host meanwhile must know what
/// is waited for.
fn sleep() {
    if is_somebody_watching() {
        let deadline = timer::next_deadline().map_or(u64::MAX, |next| next.0);
        if deadline < WATCHES_UNTIL.load(Relaxed) || host_poll::has_unwatched() {
            wake_watcher();
        }
    } else {
        scheduler::watch_clock_asleep();
    }
    let seen = own_vcpu().wake_word().load(Relaxed);
    if Machine::has_signal() {
        // It came before the wake word was looked at. An alarm, above all, must not be
        // slept on: nobody sets another one before somebody has seen it.
        return;
    }
    sleep_until_woken(seen);
}

/// Sleeps unless the wake word has changed since it was `seen`.
fn sleep_until_woken(seen: u32) {
    let own = own_vcpu();
    own.activity.set(Activity::Sleeping);
    own.park(true);
    put_registers_away();
    halt::note_rest();
    kernel_lock::release();
    Machine::wait(own.wake_word(), seen, None);
    kernel_lock::acquire();
    settle();
    own.activity.set(Activity::Active);
}

/// Whether another vCPU of this host process has the host looked at often enough for
/// nobody to watch: by polling, or at its ticks because it is talkative. Each wake-up
/// of a watcher would take processor time from it.
fn others_look() -> bool {
    let host_process = own_host_process();
    !host_process.is_alone() && (host_process.has_looked() || !host_process.wants_own_help())
}

/// The host is looked at beside the running thread.
pub fn note_look() {
    if kernel_lock::is_enabled() {
        own_host_process().looked_at.store(Machine::monotonic_ns(), Relaxed);
    }
}

/// At a tick: whether somebody watches, who may have to be woken for it. A talkative
/// vCPU looks itself.
pub fn is_watched() -> bool {
    is_somebody_watching() || own_host_process().wants_help() && hand_over_watch()
}

/// Wakes somebody to watch; whether there is anybody.
fn hand_over_watch() -> bool {
    let sleeper = HostProcess::all().find_map(|all| all.with_activity(Activity::Sleeping));
    if let Some(sleeper) = sleeper {
        wake_vcpu(sleeper);
    }
    sleeper.is_some()
}

/// Whether nobody watches although there are threads that may wait for the host.
pub fn needs_look() -> bool {
    !is_somebody_watching() && kernel().tasks.threads.borrow_mut().len() > 1
}

/// Ends a vCPU whose guest processes have ended; the host process ends with the
/// last one.
fn retire() -> ! {
    if !is_somebody_watching() {
        hand_over_watch();
    } else if freeze_request::may_be_awaited() {
        // This may be the last one that does not rest.
        wake_watcher();
    }
    cpu_time::look();
    let host_process = own_host_process();
    let is_last = host_process.remove_vcpu(Machine::index());
    for vcpu in host_process.vcpus() {
        match vcpu.activity.get() {
            Activity::Sleeping => wake_vcpu(vcpu),
            Activity::Watching => wake_watcher(),
            Activity::Active => {}
        }
    }
    if is_last {
        host_process.end();
    }
    Machine::set_number(0);
    Machine::end()
}

/// Ends the sandbox: the first host process does, since all others end with it.
pub fn end_sandbox(code: u64) -> ! {
    if is_first() {
        Machine::exit(code)
    }
    ENDING.store(code + 1, Relaxed);
    wake_first();
    kernel_lock::release();
    Machine::exit_thread()
}

/// Makes the first host process end the sandbox after a panic in this one. It would
/// not hear of the end of a process that is not its child, and `SIGCHLD` of two that
/// end at the same time arrives once.
pub fn tell_of_panic() {
    let is_alone = !kernel_lock::is_enabled() || Machine::number() == 0 || is_first();
    // What follows may panic, too.
    if is_alone || ENDING.swap(crate::platform::panic::PANIC_EXIT_CODE + 1, Relaxed) != 0 {
        return;
    }
    // The first process finds the lock abandoned.
    kernel_lock::abandon();
    wake_first();
    kernel_lock::wake_at_once();
}

/// Makes the first host process look whether the sandbox ends.
fn wake_first() {
    let first = table::first();
    if let Some(sleeper) = first.with_activity(Activity::Sleeping) {
        wake_vcpu(sleeper);
    }
    wake_watcher();
    interrupt_all(first);
}

/// Ends the first host process if another one has ended the sandbox.
pub fn end_if_told() {
    let ending = ENDING.load(Relaxed);
    if ending != 0 && is_first() {
        Machine::exit(ending - 1)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixDatagram;

    use super::*;
    use crate::platform::machine::HostFd;
    use crate::testing::Sandbox;

    #[test]
    fn whoever_is_woken_finds_the_lock_free() {
        let _sandbox = Sandbox::new();
        kernel_lock::enable().unwrap();
        let (sender, watcher) = UnixDatagram::pair().unwrap();
        watcher.set_nonblocking(true).unwrap();
        let is_woken = || watcher.recv(&mut [0; 8]).is_ok();
        kernel_lock::send_later(HostFd::new(sender.as_raw_fd()));
        // Another wake-up loses none.
        wake_vcpu(own_vcpu());
        assert!(!is_woken(), "it would wait for the lock");
        kernel_lock::release();
        assert!(is_woken());
        kernel_lock::acquire();
        kernel_lock::release();
        assert!(!is_woken(), "once is enough");
        kernel_lock::acquire();
    }
}
