//! Forking host processes: for fork(2), for execve(2) after vfork(2), and for
//! the other address spaces of an image.
#![allow(unsafe_code)]

use alloc::sync::Arc;
use core::sync::atomic::Ordering::Relaxed;

use super::{HostProcess, halt, is_first, own, own_space, run, serve};
use crate::errno::{Errno, Result};
use crate::mm::arena;
use crate::platform::host::{self, Forked};
use crate::platform::memory::GuestRange;
use crate::platform::{kernel_lock, vcpu};
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::Space;
use crate::task::clone;
use crate::task::scheduler::{self, RunState};
use crate::task::thread::{Thread, current, current_arc};
use crate::task::wait::Wake;

/// Something that only the idle loop can do for a thread, since it forks the
/// host process: both sides go on from there.
pub struct ForkRequest {
    thread: Arc<Thread>,
    space: Arc<Space>,
    /// Whether the thread itself moves to the new host process.
    moves: bool,
    /// The thread to publish once the new host process is there and before it runs.
    newborn: Option<Arc<Thread>>,
    outcome: KernelCell<Option<Result<()>>>,
}

/// Gives `space`, a copy of the running process' memory, to a host process of
/// its own, which runs `thread`, and publishes the thread.
pub fn fork(space: Arc<Space>, thread: &Arc<Thread>) -> Result<()> {
    arena::prepare()?;
    space.run_queue.push(thread.clone());
    thread.sched.borrow_mut().state = RunState::Runnable;
    let outcome = perform(ForkRequest {
        thread: current_arc(),
        space: space.clone(),
        moves: false,
        newborn: Some(thread.clone()),
        outcome: KernelCell::new(None),
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
    thread.context.save_fpu();
    let space = Arc::new(Space::new());
    perform(ForkRequest {
        thread,
        space,
        moves: true,
        newborn: None,
        outcome: KernelCell::new(None),
    })
}

fn perform(fork_request: ForkRequest) -> Result<()> {
    let thread = current();
    own().fork_request.set(&raw const fork_request);
    thread.sched.borrow_mut().state = RunState::Uninterruptible;
    thread.switch_to_idle();
    fork_request.outcome.get().unwrap_or(Err(Errno::EAGAIN))
}

/// Does what the thread that has just left the vCPU has asked for; which side
/// of the fork this is, if there was one.
pub(super) fn run_fork_request() -> Option<Forked> {
    let fork_request = own().fork_request.replace(core::ptr::null());
    if fork_request.is_null() {
        return None;
    }
    // SAFETY: the request lies on the stack of a thread that waits for its outcome.
    let fork_request = unsafe { &*fork_request };
    let thread = fork_request.thread.clone();
    // The child's references: its side of the fork lets go of them.
    let for_child = Newborn {
        host_process: fork_request.space.begin_host_process(),
        space: fork_request.space.clone(),
        thread: fork_request.thread.clone(),
    };
    let moves = fork_request.moves;
    let outcome = share_arena().and_then(|()| host::fork(!is_first()));
    match outcome {
        Ok(Forked::Child) => {
            core::mem::forget(thread);
            begin_child(for_child, moves, fork_request);
            return Some(Forked::Child);
        }
        Ok(Forked::Parent { pid }) => {
            for_child.host_process.host_pid.store(pid, Relaxed);
            core::mem::forget(for_child);
            if let Some(thread) = &fork_request.newborn {
                clone::publish(thread);
            }
        }
        Err(_) => {}
    }
    if !moves || outcome.is_err() {
        fork_request.outcome.set(Some(outcome.map(drop)));
        scheduler::wake(&thread, Wake::Woken);
    }
    outcome.ok()
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
        let for_child = (space.clone(), space.begin_host_process());
        match host::fork(!is_first())? {
            Forked::Parent { pid } => {
                for_child.1.host_pid.store(pid, Relaxed);
                core::mem::forget(for_child);
            }
            Forked::Child => {
                vcpu::begin_forked();
                kernel_lock::acquire();
                let (space, host_process) = for_child;
                serve(space, host_process);
                if fill(number as u32, own_space()).is_err() {
                    crate::platform::panic::die_with("the image of a process cannot be mapped")
                }
                run()
            }
        }
    }
    Ok(())
}

/// What a new host process has for itself.
struct Newborn {
    host_process: Arc<HostProcess>,
    space: Arc<Space>,
    thread: Arc<Thread>,
}

/// The new host process: becomes the host process of its space.
fn begin_child(own: Newborn, moves: bool, fork_request: &ForkRequest) {
    vcpu::begin_forked();
    kernel_lock::acquire();
    let Newborn { host_process, space, thread } = own;
    // The parent has noted the process id before it gave up the lock.
    serve(space.clone(), host_process);
    let outcome = if moves { empty() } else { space.after_fork() };
    if outcome.is_err() {
        crate::platform::panic::die_with("the memory of a new process cannot be set up")
    }
    if moves {
        fork_request.outcome.set(Some(Ok(())));
        thread.process.set_mm(space);
        scheduler::wake(&thread, Wake::Woken);
    }
}

/// Removes all guest memory of this host process.
fn empty() -> Result<()> {
    host::unmap(GuestRange::ALL)
}
