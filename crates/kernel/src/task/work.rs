//! What new threads do in the kernel first, and threads of the kernel's own.
//!
//! A thread of the kernel's own never enters the guest. It has a process, since files ask who is
//! calling, which nobody finds: it is in no table of processes, and has no memory. It runs where
//! the first host process does.

use alloc::boxed::Box;
use alloc::sync::Arc;

use super::process::Resources;
use super::thread::current;
use super::{Credentials, Process, Space, Thread, exit, scheduler, signal};
use crate::platform::machine::ThreadState;
use crate::platform::registers::TrapFrame;
use crate::platform::saved::Saved;
use crate::state::{ProcessFiles, kernel};

/// What a new thread does in the kernel. It may block.
pub trait Work: Saved + Send + Sync {
    /// Does it.
    fn run(self: Box<Self>) -> Next;
}

/// What a thread does after its [`Work`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It enters the guest, with the registers of its frame.
    EnterGuest,
    /// It ends. Only of the kernel's own.
    End,
    /// Its process is killed: there is no program to enter. Not of the kernel's own.
    Killed,
}

/// Starts a thread of the kernel's own, which acts as the given user.
pub fn start(name: &[u8], credentials: Credentials, files: ProcessFiles, work: Box<dyn Work>) {
    start_in(kernel().tasks.first_space(), name, credentials, files, work);
}

/// The same in the memory of another host process, which must stay until the work is done.
pub(super) fn start_in(
    space: Arc<Space>,
    name: &[u8],
    credentials: Credentials,
    files: ProcessFiles,
    work: Box<dyn Work>,
) {
    let tasks = &kernel().tasks;
    let tid = tasks.new_id();
    let process = Arc::new(Process::of_kernel(tid.process(), space, credentials, files));
    let thread = Thread::new(tid, process.clone(), TrapFrame::zeroed());
    let mut short = [0; 16];
    let len = name.len().min(15);
    short[..len].copy_from_slice(&name[..len]);
    thread.name.set(short);
    *thread.work.borrow_mut() = Some(work);
    process.threads.borrow_mut().push(thread.clone());
    tasks.threads.borrow_mut().insert(tid, thread.clone());
    tasks.usage.forked();
    scheduler::start(&thread);
}

/// Does the work of the running thread, if it has some.
pub(super) fn run() {
    let work = current().work.borrow_mut().take();
    match work.map(|work| work.run()) {
        None | Some(Next::EnterGuest) => {}
        Some(Next::End) => end(),
        Some(Next::Killed) => exit::killed_by(signal::SIGKILL),
    }
}

/// Ends a thread of the kernel's own.
fn end() -> ! {
    {
        let thread = current();
        let process = thread.process.clone();
        process.threads.borrow_mut().clear();
        // The idle loop keeps the thread until it is off its stack.
        kernel().tasks.usage.ended(&thread);
        drop(kernel().tasks.threads.borrow_mut().remove(&thread.tid()));
        thread.context.forget_fpu();
        process.release();
        thread.sched.borrow_mut().state = scheduler::RunState::Dead;
    }
    current().switch_to_idle();
    unreachable!("a thread that has ended was switched to")
}
