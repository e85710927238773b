//! Forking host processes: for fork(2), for execve(2) after vfork(2), and for
//! the other address spaces of an image.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::{
    HostProcess, complete_memory, halt, is_first, own_host_process, own_space, run, serve,
};
use crate::errno::{Errno, Result};
use crate::mm::arena;
use crate::platform::kernel_lock;
use crate::platform::machine::{Forked, Kinship, Machine, Memory, Processes, ThreadState, Vcpus};
use crate::platform::memory::GuestRange;
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::Space;
use crate::task::clone;
use crate::task::oom_killer;
use crate::task::scheduler::{self, RunState};
use crate::task::thread::{Thread, current};

/// Something that only the idle loop can do for a thread, since it forks the
/// host process: both sides go on from there.
pub struct ForkRequest {
    /// `None`: only the arena is to be shared.
    new: Option<NewHostProcess>,
    outcome: KernelCell<Option<Result<()>>>,
}

/// A host process to be made.
struct NewHostProcess {
    space: Arc<Space>,
    /// What it has in its memory, and whether the thread itself moves there.
    memory: NewMemory,
    /// The thread to publish once it is there and before it runs.
    newborn: Option<Arc<Thread>>,
}

/// The guest memory of a new host process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NewMemory {
    /// A copy of that of the running process.
    Copied,
    /// None, for a new process.
    Empty,
    /// None, for the process of the thread that asks.
    EmptyForAsker,
}

/// To be called before a space is copied for [`fork`]: has done what lets other threads run meanwhile. They
/// would change what is copied, and the copy would not know.
///
/// # Errors
/// The host has no memory for it.
pub fn prepare_fork() -> Result<()> {
    arena::prepare()?;
    if kernel_lock::is_enabled() && !arena::is_shared() {
        return perform(None);
    }
    Ok(())
}

/// Gives `space`, a copy of the running process' memory, to a host process of
/// its own, which runs `thread`, and publishes the thread.
pub fn fork(space: Arc<Space>, thread: &Arc<Thread>) -> Result<()> {
    fork_with(space, thread, NewMemory::Copied)
}

/// The same with a space in which nothing is mapped.
pub fn fork_empty(space: Arc<Space>, thread: &Arc<Thread>) -> Result<()> {
    fork_with(space, thread, NewMemory::Empty)
}

fn fork_with(space: Arc<Space>, thread: &Arc<Thread>, memory: NewMemory) -> Result<()> {
    arena::prepare()?;
    space.run_queue.push(thread.clone());
    thread.sched.borrow_mut().state = RunState::Runnable;
    let newborn = Some(thread.clone());
    let outcome = perform(Some(NewHostProcess { space: space.clone(), memory, newborn }));
    if outcome.is_err() {
        drop(space.run_queue.pop());
    }
    outcome
}

/// Gives a process that has borrowed its memory (vfork(2)) an empty address
/// space, and its only thread, the running one, the host process for it.
pub fn move_to_new_space() -> Result<()> {
    oom_killer::retry(|| {
        arena::prepare()?;
        current().context.save_fpu();
        let (space, memory) = (Arc::new(Space::new()), NewMemory::EmptyForAsker);
        perform(Some(NewHostProcess { space, memory, newborn: None }))
    })
}

fn perform(new: Option<NewHostProcess>) -> Result<()> {
    let fork_request = Arc::new(ForkRequest { new, outcome: KernelCell::new(None) });
    let thread = current();
    *thread.fork_request.borrow_mut() = Some(fork_request.clone());
    thread.sched.borrow_mut().state = RunState::Forking;
    UNDER_WAY.fetch_add(1, Relaxed);
    thread.switch_to_idle();
    fork_request.outcome.get().unwrap_or(Err(Errno::EAGAIN))
}

/// How many requests have no answer yet.
static UNDER_WAY: AtomicU32 = AtomicU32::new(0);

/// Whether a host process is being forked for a thread, or is about to take a thread over.
pub(super) fn is_under_way() -> bool {
    UNDER_WAY.load(Relaxed) != 0
}

/// Answers a thread, which goes on.
fn answer(thread: &Thread, fork_request: &ForkRequest, outcome: Result<()>) {
    fork_request.outcome.set(Some(outcome));
    UNDER_WAY.fetch_sub(1, Relaxed);
    scheduler::wake_forked(thread);
}

/// Does what a thread that has just left the vCPU has asked for; which side
/// of the fork this is, if there was one.
pub(super) fn run_fork_request(thread: &Arc<Thread>) -> Option<Forked> {
    let fork_request = thread.fork_request.borrow_mut().take()?;
    let shared = share_arena();
    let Some(new) = &fork_request.new else {
        answer(thread, &fork_request, shared);
        return None;
    };
    let (memory, moves) = (new.memory, new.memory == NewMemory::EmptyForAsker);
    let outcome = shared.and_then(|()| fork_host_process(&new.space));
    match outcome {
        Ok(Forked::Child) => {
            begin_child(memory, moves.then_some((thread, &fork_request)));
            // This reference is the parent's. The request itself may be gone unless the thread
            // moves, which waits for this side's answer.
            core::mem::forget(fork_request);
            return Some(Forked::Child);
        }
        Ok(Forked::Parent { .. }) => {
            if let Some(thread) = &new.newborn {
                clone::publish(thread);
            }
        }
        Err(_) => {}
    }
    if !moves || outcome.is_err() {
        answer(thread, &fork_request, outcome.map(drop));
    }
    outcome.ok()
}

/// Forks the host process of a space. The new one serves it; the old one has noted its id
/// before anybody else comes into the kernel.
fn fork_host_process(space: &Arc<Space>) -> Result<Forked> {
    // The new one has no plan of what is to be mapped.
    complete_memory();
    let host_process = HostProcess::begin(space)?;
    let kinship = if is_first() { Kinship::Child } else { Kinship::Sibling };
    let forked = Machine::fork(kinship).inspect_err(|_| host_process.end())?;
    match forked {
        Forked::Parent { pid } => host_process.host_pid.store(pid, Relaxed),
        Forked::Child => {
            Machine::begin_forked();
            kernel_lock::acquire();
            serve(host_process);
        }
    }
    Ok(forked)
}

fn share_arena() -> Result<()> {
    if kernel_lock::is_enabled() && !arena::is_shared() {
        halt::others_during(|| arena::share(None))
    } else {
        arena::share(None)
    }
}

/// Makes host processes for the address spaces of an image other than the
/// first, which this one has. `fill` maps the memory of the space with a number.
pub fn begin_others(mut fill: impl FnMut(u32, &Space) -> Result<()>) -> Result<()> {
    let spaces = kernel().tasks.spaces();
    for (number, space) in spaces.iter().enumerate().skip(1) {
        if fork_host_process(space)? == Forked::Child {
            if fill(number as u32, &own_space()).is_err() {
                crate::platform::panic::die_with("the image of a process cannot be mapped")
            }
            run()
        }
    }
    Ok(())
}

/// The new host process: gets the memory of its space ready, for the thread that has asked if
/// that moves here.
fn begin_child(memory: NewMemory, moving: Option<(&Arc<Thread>, &ForkRequest)>) {
    let space = own_host_process().space();
    let outcome = match memory {
        NewMemory::Empty | NewMemory::EmptyForAsker => Machine::unmap(GuestRange::ALL),
        NewMemory::Copied => space.after_fork(),
    };
    if outcome.is_err() {
        crate::platform::panic::die_with("the memory of a new process cannot be set up")
    }
    if let Some((thread, fork_request)) = moving {
        let old = thread.process.set_mm(space);
        if old.users() == 0 {
            super::wake_to_retire(&old);
        }
        answer(thread, fork_request, Ok(()));
    }
}
