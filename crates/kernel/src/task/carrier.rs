//! Carriers: the host processes that carry the sandbox' address spaces.
//!
//! Each has one virtual CPU, which runs the threads of its address space from
//! the idle loop ([`run`]). A sandbox begins with one carrier; fork(2) makes
//! more, which share the arena ([`crate::boot::arena`]) and all descriptors.
//!
//! One idle carrier is the *watcher*: it waits in the host for descriptors,
//! messages and the nearest timer on behalf of all. The others sleep until
//! there is something in their queue.
#![allow(unsafe_code)]

use alloc::sync::Arc;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering::Relaxed};

use super::sched::{self, RunState};
use super::thread::{Thread, current, current_arc};
use super::wait::Wake;
use crate::boot::{arena, control, phases, populate};
use crate::errno::{Errno, Result};
use crate::mm::AddressSpace;
use crate::net::host_poll;
use crate::platform::host::{self, Forked};
use crate::platform::{fault, kernel_lock, vcpu};
use crate::state::kernel;
use crate::sync::Lock;
use crate::time::timer;

/// The carrier of an address space. What it does is of this boot.
#[derive(Default)]
pub struct Carrier {
    /// Host process id in the sandbox' pid namespace; 0 if there is none.
    host_pid: AtomicU32,
    /// What the vCPU does.
    activity: Lock<Activity>,
    /// Rung to end its sleep.
    bell: AtomicU32,
}

impl Carrier {
    /// Host process id in the sandbox' pid namespace; 0 if there is none.
    pub fn host_pid(&self) -> u32 {
        self.host_pid.load(Relaxed)
    }
}

/// What a carrier's vCPU does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Activity {
    /// Runs threads, or is about to look for some.
    #[default]
    Active,
    /// Waits in the host for everybody.
    Watching,
    /// Waits for its bell.
    Sleeping,
}

/// The address space whose carrier watches, or null.
static WATCHER: AtomicPtr<AddressSpace> = AtomicPtr::new(core::ptr::null_mut());
/// Until when it watches at most, on the guest's monotonic clock in nanoseconds.
static WATCHES_UNTIL: AtomicU64 = AtomicU64::new(u64::MAX);
/// The address space of the first host process, which ends the sandbox.
static FIRST: AtomicPtr<AddressSpace> = AtomicPtr::new(core::ptr::null_mut());
/// The exit code of the sandbox plus 1, once it is to end.
static ENDING: AtomicU64 = AtomicU64::new(0);

/// The address space that this vCPU serves.
pub fn own_space() -> &'static AddressSpace {
    let space = vcpu::block().space;
    assert!(!space.is_null(), "this vCPU serves no address space");
    // SAFETY: set by `serve`, which holds a reference until the carrier retires.
    unsafe { &*space }
}

/// Makes the first host process of a sandbox serve an address space.
pub fn begin(space: Arc<AddressSpace>) {
    const FIRST_HOST_PID: u32 = 1;
    FIRST.store(Arc::as_ptr(&space).cast_mut(), Relaxed);
    WATCHER.store(core::ptr::null_mut(), Relaxed);
    serve(space, FIRST_HOST_PID);
}

fn serve(space: Arc<AddressSpace>, host_pid: u32) {
    space.carrier.host_pid.store(host_pid, Relaxed);
    space.carrier.activity.set(Activity::Active);
    vcpu::block().space = Arc::into_raw(space);
}

fn is_first() -> bool {
    core::ptr::eq(vcpu::block().space, FIRST.load(Relaxed))
}

/// Tells the carrier of an address space that there is something in its queue.
pub fn notify(space: &AddressSpace) {
    if core::ptr::eq(space, vcpu::block().space) {
        return;
    }
    match space.carrier.activity.get() {
        Activity::Sleeping => ring(space),
        Activity::Watching => ring_watcher(),
        // It looks at its queue when the thread that it runs stops; should that
        // not be soon, an alarm of its own has to end its time slice.
        Activity::Active if space.run_queue.len() == 1 => interrupt(space),
        Activity::Active => {}
    }
}

/// Makes the thread that runs on another carrier come into the kernel.
pub fn interrupt(space: &AddressSpace) {
    let pid = space.carrier.host_pid.load(Relaxed);
    if pid != 0 && !core::ptr::eq(space, vcpu::block().space) {
        host::interrupt(pid, pid);
    }
}

fn ring(space: &AddressSpace) {
    space.carrier.bell.fetch_add(1, Relaxed);
    host::futex_wake(&space.carrier.bell, 1);
}

fn ring_watcher() {
    if let Some(bell) = arena::bell() {
        let one = 1u64;
        // Full means that it has been rung already.
        let _ = host::write(bell, &raw const one as u64, 8);
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
        // Whoever watches sees the message that the host knocks for.
        fault::take_knock();
        if control::has_kept() {
            sched::handle_messages();
            continue;
        }
        if others_rest() && crate::freeze::is_due() {
            crate::freeze::freeze();
            continue;
        }
        phases::report_if_due();
        if WATCHER.load(Relaxed).is_null() {
            watch();
        } else {
            sleep();
        }
    }
}

/// Runs threads until none can run.
fn run_threads() {
    loop {
        let Some(thread) = own_space().run_queue.pop() else { return };
        phases::first_instruction();
        if populate::is_pending() {
            thread.needs_attention();
        }
        thread.switch_from_idle();
        if run_errand() == Some(Forked::Child) {
            // This reference is the parent's.
            core::mem::forget(thread);
        }
    }
}

/// Whether all other carriers wait and have nothing to do.
fn others_rest() -> bool {
    if !arena::is_shared() {
        return true;
    }
    kernel().tasks.spaces().iter().all(|space| {
        let is_own = core::ptr::eq(Arc::as_ptr(space), vcpu::block().space);
        let rests = is_own || space.carrier.activity.get() != Activity::Active;
        rests && space.run_queue.is_empty()
    })
}

/// Waits in the host for descriptors, messages, the nearest timer and the bell.
fn watch() {
    let this = vcpu::block().space;
    WATCHER.store(this.cast_mut(), Relaxed);
    WATCHES_UNTIL.store(timer::next_deadline().map_or(u64::MAX, |next| next.0), Relaxed);
    own_space().carrier.activity.set(Activity::Watching);
    put_registers_away();
    let has_message = host_poll::watch(timer::time_to_next());
    own_space().carrier.activity.set(Activity::Active);
    WATCHER.store(core::ptr::null_mut(), Relaxed);
    if has_message {
        sched::handle_messages();
    }
}

/// Another carrier may freeze the sandbox while this one waits: all of its
/// threads must be in memory.
fn put_registers_away() {
    let owner = vcpu::block().fpu_owner;
    if arena::is_shared() && !owner.is_null() {
        // SAFETY: the owner is alive: threads clear the field when they end.
        unsafe { (*owner).save_fpu() };
    }
}

/// Sleeps until the bell rings. The watcher must know what is waited for.
fn sleep() {
    let deadline = timer::next_deadline().map_or(u64::MAX, |next| next.0);
    if deadline < WATCHES_UNTIL.load(Relaxed) || host_poll::has_unwatched() {
        ring_watcher();
    }
    let carrier = &own_space().carrier;
    let rung = carrier.bell.load(Relaxed);
    carrier.activity.set(Activity::Sleeping);
    put_registers_away();
    kernel_lock::release();
    host::futex_wait(&carrier.bell, rung, None);
    kernel_lock::acquire();
    carrier.activity.set(Activity::Active);
}

/// Before a carrier becomes busy for long or ends: somebody should watch.
pub fn hand_over_watch() {
    if !arena::is_shared() || !WATCHER.load(Relaxed).is_null() {
        return;
    }
    let sleeper = kernel()
        .tasks
        .spaces()
        .into_iter()
        .find(|space| space.carrier.activity.get() == Activity::Sleeping);
    if let Some(sleeper) = sleeper {
        ring(&sleeper);
    }
}

/// Whether a carrier sleeps that could watch while others run.
pub fn needs_watcher() -> bool {
    arena::is_shared() && WATCHER.load(Relaxed).is_null()
}

/// Ends a carrier whose guest processes have ended.
fn retire() -> ! {
    hand_over_watch();
    let space = vcpu::block().space;
    vcpu::block().space = core::ptr::null();
    // SAFETY: the reference that `serve` has kept.
    drop(unsafe { Arc::from_raw(space) });
    kernel_lock::release();
    crate::platform::panic::exit(0)
}

/// Ends the sandbox: the first host process does, since all others end with it.
pub fn end_sandbox(code: u64) -> ! {
    if is_first() {
        crate::platform::panic::exit(code)
    }
    ENDING.store(code + 1, Relaxed);
    // SAFETY: the first host process never retires.
    let first = unsafe { &*FIRST.load(Relaxed) };
    ring(first);
    ring_watcher();
    interrupt(first);
    kernel_lock::release();
    crate::platform::panic::exit(0)
}

/// Ends the first host process if another one has ended the sandbox.
pub fn end_if_told() {
    let ending = ENDING.load(Relaxed);
    if ending != 0 && is_first() {
        crate::platform::panic::exit(ending - 1)
    }
}

/// Something that only the idle loop can do for a thread, since it forks the
/// host process: both sides go on from there.
pub struct Errand {
    thread: Arc<Thread>,
    space: Arc<AddressSpace>,
    /// Whether the thread itself moves to the new host process.
    moves: bool,
    outcome: Lock<Option<Result<()>>>,
}

/// Gives `space`, a copy of the running process' memory, to a host process of
/// its own, which runs `thread`.
pub fn fork(space: Arc<AddressSpace>, thread: &Arc<Thread>) -> Result<()> {
    arena::prepare()?;
    space.run_queue.push(thread.clone());
    thread.sched.lock().state = RunState::Runnable;
    let outcome = perform(Errand {
        thread: current_arc(),
        space: space.clone(),
        moves: false,
        outcome: Lock::new(None),
    });
    if outcome.is_err() {
        drop(space.run_queue.pop());
    }
    outcome
}

/// Gives a process that has borrowed its memory (vfork(2)) an empty address
/// space, and its only thread, the running one, the host process for it.
pub fn move_to_new_space() -> Result<()> {
    arena::prepare()?;
    let thread = current_arc();
    thread.save_fpu();
    let space = Arc::new(AddressSpace::new());
    perform(Errand { thread, space, moves: true, outcome: Lock::new(None) })
}

fn perform(errand: Errand) -> Result<()> {
    let thread = current();
    vcpu::block().errand = &raw const errand;
    thread.sched.lock().state = RunState::Uninterruptible;
    thread.switch_to_idle();
    errand.outcome.get().unwrap_or(Err(Errno::EAGAIN))
}

/// Does what the thread that has just left the vCPU has asked for; which side
/// of the fork this is, if there was one.
fn run_errand() -> Option<Forked> {
    let errand = core::mem::replace(&mut vcpu::block().errand, core::ptr::null());
    if errand.is_null() {
        return None;
    }
    // SAFETY: the errand lies on the stack of a thread that waits for its outcome.
    let errand = unsafe { &*errand };
    let thread = errand.thread.clone();
    // The child's references: its side of the fork lets go of them.
    let for_child = (errand.space.clone(), errand.thread.clone());
    let moves = errand.moves;
    let outcome = arena::share().and_then(|()| host::fork(!is_first()));
    match outcome {
        Ok(Forked::Child) => {
            core::mem::forget(thread);
            begin_child(for_child, moves, errand);
            return Some(Forked::Child);
        }
        Ok(Forked::Parent { pid }) => {
            for_child.0.carrier.host_pid.store(pid, Relaxed);
            core::mem::forget(for_child);
        }
        Err(_) => {}
    }
    if !moves || outcome.is_err() {
        errand.outcome.set(Some(outcome.map(drop)));
        sched::wake(&thread, Wake::Woken);
    }
    outcome.ok()
}

/// Makes host processes for the address spaces of an image other than the
/// first, which this one has. `fill` maps the memory of the space with a number.
pub fn begin_others(fill: impl Fn(u32, &AddressSpace) -> Result<()>) -> Result<()> {
    let spaces = kernel().tasks.spaces();
    for (number, space) in spaces.iter().enumerate().skip(1) {
        let for_child = space.clone();
        match host::fork(!is_first())? {
            Forked::Parent { pid } => {
                space.carrier.host_pid.store(pid, Relaxed);
                space.carrier.activity.set(Activity::Active);
                core::mem::forget(for_child);
            }
            Forked::Child => {
                kernel_lock::acquire();
                vcpu::block().space = Arc::into_raw(for_child);
                if fill(number as u32, own_space()).is_err() {
                    crate::platform::panic::die_with("the image of a process cannot be mapped")
                }
                run()
            }
        }
    }
    Ok(())
}

/// The new host process: becomes the carrier of its address space.
fn begin_child(own: (Arc<AddressSpace>, Arc<Thread>), moves: bool, errand: &Errand) {
    let block = vcpu::block();
    block.thread = core::ptr::null();
    block.fpu_owner = core::ptr::null();
    block.alarm_at.store(0, Relaxed);
    block.alarmed.store(false, Relaxed);
    block.knocked.store(false, Relaxed);
    kernel_lock::acquire();
    let (space, thread) = own;
    block.space = Arc::into_raw(space.clone());
    let outcome = if moves { empty() } else { space.after_fork() };
    if outcome.is_err() {
        crate::platform::panic::die_with("the memory of a new process cannot be set up")
    }
    if moves {
        errand.outcome.set(Some(Ok(())));
        thread.process.set_mm(space);
        sched::wake(&thread, Wake::Woken);
    }
}

/// Removes all guest memory of this host process.
fn empty() -> Result<()> {
    use thaw_abi::layout::{GUEST_MAX, GUEST_MIN};
    host::unmap(GUEST_MIN, GUEST_MAX - GUEST_MIN)
}
