//! What one host process has to run: an address space, and the threads that can run in it.

use core::ops::Deref;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::host_process::{HostProcess, own_space};
use super::scheduler::{self, RunQueue};
use crate::errno::Result;
use crate::mm::AddressSpace;
use crate::mm::backing::UpperPages;
use crate::state::kernel;

/// The memory of a guest process, or of several after vfork(2), with their threads that can
/// run. Saved; the host process that has the memory is of one boot, and found by its number.
pub struct Space {
    memory: AddressSpace,
    id: u64,
    /// How many programs have begun in it (execve(2)).
    programs: AtomicU64,
    /// Number of processes that have this memory.
    users: AtomicU32,
    /// Threads that can run in it.
    pub run_queue: RunQueue,
    /// Number of its host process, if that serves this memory.
    pub(super) host_process: AtomicU32,
}

impl Deref for Space {
    type Target = AddressSpace;

    fn deref(&self) -> &AddressSpace {
        &self.memory
    }
}

impl Default for Space {
    fn default() -> Self {
        Self::new()
    }
}

impl Space {
    /// Empty memory.
    pub fn new() -> Self {
        Self::with(AddressSpace::new())
    }

    /// The book-keeping of a copy, for a new process ([`AddressSpace::fork`]).
    pub fn fork(&self) -> Result<Self> {
        Ok(Self::with(self.memory.fork()?))
    }

    fn with(memory: AddressSpace) -> Self {
        Self {
            memory,
            id: kernel().tasks.new_space_id(),
            programs: AtomicU64::new(0),
            users: AtomicU32::new(0),
            run_queue: RunQueue::new(),
            host_process: AtomicU32::new(0),
        }
    }

    /// The number of this memory, which no other has or will have.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Notes that another program begins in this memory.
    pub fn begin_program(&self) {
        self.programs.fetch_add(1, Relaxed);
    }

    /// The number of this memory, and that of the program in it.
    pub fn program(&self) -> (u64, u64) {
        (self.id, self.programs.load(Relaxed))
    }

    /// Notes that a process has this memory.
    pub fn attach(&self) {
        self.users.fetch_add(1, Relaxed);
    }

    /// Notes that a process has it no more.
    pub fn detach(&self) {
        self.users.fetch_sub(1, Relaxed);
    }

    /// Number of processes that have this memory.
    pub fn users(&self) -> u32 {
        self.users.load(Relaxed)
    }

    /// The host process that has this memory, if this boot has made one.
    pub fn host_process(&self) -> Option<&'static HostProcess> {
        HostProcess::of_space(self.host_process.load(Relaxed), self.id)
    }
}

/// Takes the pages of a file that has become shorter, `len` bytes, out of all mappings. The memory of
/// another host process has them until its threads come into the kernel, which they do at once.
/// Whether any of the file is mapped.
pub fn cut_off(file: &dyn UpperPages, len: u64) -> bool {
    let mut is_mapped = false;
    for space in kernel().tasks.spaces() {
        is_mapped |= space.cut_off(file, len);
        if !space.is_unsettled() {
            continue;
        }
        if core::ptr::eq(&*own_space(), &*space) {
            space.settle();
            continue;
        }
        for thread in kernel().tasks.all_threads() {
            if core::ptr::eq(&*thread.process.mm(), &*space) {
                thread.needs_attention();
                scheduler::kick(&thread);
            }
        }
    }
    is_mapped
}
