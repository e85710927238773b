//! The memory of another process, which another host process has: a thread of the kernel's own goes
//! there, does what is to be done, and wakes who waits for it.
//!
//! The visitor runs wherever the memory is, so it does not matter what the threads of that process do
//! meanwhile: run, wait, or stand still for a tracer.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::host_process::own_space;
use super::process::{Resources, Sharing};
use super::thread::current;
use super::wait::{Events, WaitQueue, wait_uninterruptibly};
use super::work::{self, Next, Work};
use super::{Process, Space};
use crate::errno::{Errno, Result};
use crate::mm::force::Access;
use crate::platform::machine::SystemCallSites;
use crate::platform::user::UserAddress;
use crate::sync::KernelCell;

/// The memory of a process with the program that it has now: who may look into that must not see the next one.
pub struct Program {
    process: Arc<Process>,
    number: (u64, u64),
}

impl Program {
    /// That of a process. Nothing may wait between the check that one may look into it and this.
    pub fn of(process: Arc<Process>) -> Self {
        let number = process.mm().program();
        Self { process, number }
    }

    /// Whether the process has it still.
    pub fn is_there(&self) -> bool {
        !self.process.is_zombie() && self.process.mm().program() == self.number
    }
}

/// Most bytes that one visit copies.
const PIECE: usize = 64 << 10;

/// What is to be done in the memory.
enum Errand {
    /// Reads as much as there is, up to this many bytes.
    Read { from: UserAddress, len: usize },
    /// Writes as much as possible.
    Write { to: UserAddress, bytes: Vec<u8>, access: Access },
    /// Puts back the system call sites that were replaced.
    PutBackSites,
}

impl Errand {
    /// Does it in the memory of this host process; the bytes read.
    fn run(&self) -> Result<Outcome> {
        let space = own_space();
        match self {
            Self::Read { from, len } => {
                let mut bytes = alloc::vec![0; *len];
                let count = read_some(*from, &mut bytes);
                bytes.truncate(count);
                Ok(Outcome { count, bytes })
            }
            Self::Write { to, bytes, access } => {
                let count = space.write_some(*to, bytes, *access)?;
                Ok(Outcome { count, bytes: Vec::new() })
            }
            Self::PutBackSites => {
                space.gate.put_back(&**space);
                Ok(Outcome::default())
            }
        }
    }
}

/// Reads up to the first page that is not there; how many bytes.
fn read_some(from: UserAddress, bytes: &mut [u8]) -> usize {
    let mut done = 0;
    while done < bytes.len() {
        let at = from.offset(done as u64);
        let to_page_end = 4096 - (at.0 & 4095) as usize;
        let len = to_page_end.min(bytes.len() - done);
        if at.read_bytes(&mut bytes[done..done + len]).is_err() {
            break;
        }
        done += len;
    }
    done
}

/// What came of an errand.
#[derive(Clone, Default)]
struct Outcome {
    count: usize,
    bytes: Vec<u8>,
}

/// An errand under way.
struct Visit {
    errand: Errand,
    /// The program that it is for.
    program: (u64, u64),
    outcome: KernelCell<Option<Result<Outcome>>>,
    is_done: WaitQueue,
}

/// The thread that goes there.
struct Visitor(Arc<Visit>);

impl Work for Visitor {
    fn run(self: Box<Self>) -> Next {
        let visit = self.0;
        let is_there = own_space().program() == visit.program;
        let outcome = if is_there { visit.errand.run() } else { Err(Errno::ESRCH) };
        *visit.outcome.borrow_mut() = Some(outcome);
        visit.is_done.wake_all(Events::IN);
        let space = current().process.mm();
        space.detach();
        if space.users() == 0 {
            space.release_shared();
        }
        Next::End
    }
}

/// Has an errand done in the memory of a program; `ESRCH` if that has ended.
fn send(program: &Program, errand: Errand) -> Result<Outcome> {
    let space = program.process.mm();
    if !program.is_there() {
        return Err(Errno::ESRCH);
    }
    if core::ptr::eq(&**own_space(), &**space) {
        return errand.run();
    }
    if space.users() == 0 {
        return Err(Errno::ESRCH);
    }
    let visit = Arc::new(Visit {
        errand,
        program: program.number,
        outcome: KernelCell::new(None),
        is_done: WaitQueue::new(),
    });
    start(space, visit.clone());
    wait_uninterruptibly(&visit.is_done, || visit.outcome.borrow_mut().take())
}

fn start(space: Arc<Space>, visit: Arc<Visit>) {
    let own = current();
    let credentials = own.process.credentials.borrow_mut().clone();
    let files = own.process.for_child(Sharing { descriptors: true, directories: true });
    // The host process stays until the visitor has left.
    space.attach();
    work::start_in(space, b"visitor", credentials, files, Box::new(Visitor(visit)));
}

/// Reads memory of a program; how many bytes there are before the first page that is not there.
pub fn read(program: &Program, from: UserAddress, bytes: &mut [u8]) -> Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        let len = PIECE.min(bytes.len() - done);
        let outcome = send(program, Errand::Read { from: from.offset(done as u64), len })?;
        bytes[done..done + outcome.count].copy_from_slice(&outcome.bytes);
        done += outcome.count;
        if outcome.count < len {
            break;
        }
    }
    Ok(done)
}

/// Writes memory of a program; how many bytes could be written.
pub fn write(program: &Program, to: UserAddress, bytes: &[u8], access: Access) -> Result<usize> {
    let mut done = 0;
    for piece in bytes.chunks(PIECE) {
        let to = to.offset(done as u64);
        let outcome = send(program, Errand::Write { to, bytes: piece.to_vec(), access })?;
        done += outcome.count;
        if outcome.count < piece.len() {
            break;
        }
    }
    Ok(done)
}

/// Puts back the system call sites in the code of a process: somebody looks at it.
pub fn put_back_sites(process: &Arc<Process>) {
    // One that has ended has no code.
    let _: Result<Outcome> = send(&Program::of(process.clone()), Errand::PutBackSites);
}
