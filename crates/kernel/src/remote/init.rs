//! The first process of a sandbox that was started without a program.
//!
//! It is the kernel's own: it never enters the guest and has nothing in its memory. It takes over
//! processes whose parents have ended, which are gone when they end, since it ignores its
//! children. Nothing in the sandbox can end it.

use alloc::boxed::Box;
use alloc::sync::Arc;

use crate::errno::{Errno, Result};
use crate::exec::vdso;
use crate::platform::machine::SystemCallSites;
use crate::task::freeze_request;
use crate::task::signal::{Action, SIGCHLD};
use crate::task::wait::wait_uninterruptibly;
use crate::task::work::{Next, Work};
use crate::task::{Process, Thread, scheduler};

/// What `/proc/1/comm` shows.
const NAME: &[u8; 16] = b"init\0\0\0\0\0\0\0\0\0\0\0\0";

/// Makes the first process this one; its thread is to be started as any other.
pub fn become_init(process: &Process, thread: &Arc<Thread>) -> Result<()> {
    // Every address space has one, and images hold it.
    process.mm().gate.create(vdso::slots())?;
    thread.name.set(*NAME);
    *process.command_line.borrow_mut() = b"init\0".to_vec();
    process.signals.borrow_mut().action(SIGCHLD).handler = Action::IGNORE;
    process.is_init.set(true);
    *thread.work.borrow_mut() = Some(Box::new(Init));
    Ok(())
}

struct Init;

impl Work for Init {
    /// Asks for the freeze, if the host wants one, and waits for ever.
    fn run(self: Box<Self>) -> Next {
        // Only the end of the thread would make this fail.
        let _: Result<()> =
            wait_uninterruptibly(freeze_request::happened(), || match freeze_request::ask() {
                Err(Errno::EAGAIN) => None,
                outcome => Some(outcome),
            });
        loop {
            let process = crate::task::current_process();
            scheduler::block_uninterruptibly_on(&[&process.released]);
        }
    }
}
