//! The terminal of a process that the host has asked for: a pseudo terminal, whose master a thread
//! of the kernel's own passes on to a socket of the host.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::Ordering::Relaxed;

use thaw_abi::control::WindowSize;

use super::stream::StreamEnd;
use super::window_size;
use crate::errno::{Errno, Result};
use crate::fs::file::{File, OpenFile, OpenFlags};
use crate::fs::tty::devpts;
use crate::fs::tty::job::JobControl;
use crate::fs::tty::pty::{Master, Pty, Slave};
use crate::io::{Sink, Source};
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::Process;
use crate::task::ids::Sid;
use crate::task::scheduler;

/// Most bytes on their way in one direction.
const BUFFER: usize = 4096;

/// A terminal that nobody has yet.
pub struct Terminal {
    /// Both ends.
    pub pty: Arc<Pty>,
    master: Master,
}

impl Terminal {
    /// A terminal of a user with a window of this size; `ENOSPC` if there are too many.
    pub fn new(owner: (u32, u32), window: &WindowSize) -> Result<Self> {
        let pty = kernel().fs.terminals.new_pty(owner)?;
        pty.locked.store(false, Relaxed);
        pty.size.set(window_size(window));
        Ok(Self { master: Master::of(pty.clone()), pty })
    }

    /// Makes it the controlling terminal of a new session, and opens it for its leader.
    pub fn open_for(&self, session: Sid) -> Result<Arc<OpenFile>> {
        let flags = OpenFlags::RDWR | OpenFlags::NOCTTY;
        let slave = Slave::open(&self.pty, flags)?;
        *self.pty.job.borrow_mut() = JobControl::of_session(session);
        let path = devpts::path_of(&self.pty);
        Ok(OpenFile::new(slave, OpenFlags::RDWR | OpenFlags::LARGEFILE, Some(path)))
    }

    /// What has been shown.
    ///
    /// # Errors
    /// `EIO`: no process has the terminal open, and its leader has ended. As long as that lives it
    /// may open it again, and to hang up would end it by a signal.
    fn read(&self, sink: &mut Sink<'_>, leader: &Process) -> Result<usize> {
        match self.master.read(sink, 0) {
            Err(Errno::EIO) if !leader.is_zombie() => Err(Errno::EAGAIN),
            outcome => outcome,
        }
    }
}

/// A terminal that is passed on to the host.
pub struct Relay {
    /// Its both ends.
    pub terminal: Terminal,
    /// Where the host has it.
    pub end: Arc<StreamEnd>,
    /// The process that it was made for.
    pub leader: Arc<Process>,
}

impl Relay {
    /// Passes on what is typed and what is shown, until its leader has ended and no process has the
    /// terminal open, or the host has gone, which hangs it up.
    pub fn run(self) {
        let Self { terminal, end, leader } = self;
        let (typed, shown) = (Way::default(), Way::default());
        loop {
            let typed =
                typed.pass(|sink| end.read(sink), |source| terminal.master.write(source, 0));
            let shown = shown.pass(|sink| terminal.read(sink, &leader), |source| end.write(source));
            match (typed, shown) {
                (Passed::Closed, _) | (_, Passed::Closed) => return,
                (Passed::Waits, Passed::Waits) => {}
                _ => continue,
            }
            let master = terminal.master.wait_queue();
            let queues = [Some(end.queue()), Some(&leader.released), master];
            let queues = queues.into_iter().flatten().collect::<Vec<_>>();
            scheduler::block_uninterruptibly_on(&queues);
        }
    }
}

/// What came of looking at one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Passed {
    /// Some bytes went on.
    Some,
    /// There is nothing to read, or no room to write.
    Waits,
    /// One side has ended, and all that it said has been passed on.
    Closed,
}

/// Bytes on their way in one direction.
#[derive(Default)]
struct Way {
    bytes: KernelCell<Vec<u8>>,
}

impl Way {
    /// Reads if nothing waits, and writes what does.
    fn pass(
        &self,
        read: impl FnOnce(&mut Sink<'_>) -> Result<usize>,
        write: impl FnOnce(&mut Source<'_>) -> Result<usize>,
    ) -> Passed {
        let mut bytes = core::mem::take(&mut *self.bytes.borrow_mut());
        if bytes.is_empty() {
            bytes.resize(BUFFER, 0);
            match read(&mut Sink::kernel(&mut bytes)) {
                Ok(0) => return Passed::Closed,
                Ok(count) => bytes.truncate(count),
                Err(Errno::EAGAIN) => return Passed::Waits,
                Err(_) => return Passed::Closed,
            }
        }
        let outcome = write(&mut Source::kernel(&bytes));
        let passed = match outcome {
            Ok(count) => {
                bytes.drain(..count);
                Passed::Some
            }
            Err(Errno::EAGAIN) => Passed::Waits,
            Err(_) => Passed::Closed,
        };
        *self.bytes.borrow_mut() = bytes;
        passed
    }
}
