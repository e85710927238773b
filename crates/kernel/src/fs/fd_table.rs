//! File descriptors: small numbers for open files.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::file::{File, OpenFile, OpenFlags};
use crate::args::{Fd, UserPtr};
use crate::errno::{Errno, Result};
use crate::sync::KernelCell;
use crate::task::current_process;
use crate::task::process::RLIMIT_NOFILE;

/// What happens to a descriptor at execve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnExec {
    /// It stays open.
    Keep,
    /// It is closed (`FD_CLOEXEC`).
    Close,
}

impl OnExec {
    /// What `O_CLOEXEC` says.
    pub fn of(flags: OpenFlags) -> Self {
        if flags.contains(OpenFlags::CLOEXEC) { Self::Close } else { Self::Keep }
    }
}

/// A descriptor that is in use.
#[derive(Clone)]
enum Slot {
    /// A call has reserved the number and will open it or give it back.
    Reserved,
    Open {
        file: Arc<OpenFile>,
        on_exec: OnExec,
    },
}

impl Slot {
    fn into_file(self) -> Option<Arc<OpenFile>> {
        match self {
            Self::Reserved => None,
            Self::Open { file, .. } => Some(file),
        }
    }
}

/// The descriptors of a process.
#[derive(Clone, Default)]
pub struct FdTable {
    slots: Vec<Option<Slot>>,
    /// No descriptor below this is free.
    lowest_free: usize,
    /// Processes that have this table and have not ended.
    users: u32,
}

/// `fs.nr_open`: no descriptor number reaches this, whatever the limits say.
pub const NR_OPEN: u64 = 1 << 20;

impl FdTable {
    /// An empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// A copy for a new process, which nobody has yet. Calls that are under way
    /// install what they open in this table only, so that the copy has no
    /// reserved descriptors.
    pub fn copy(&self) -> Self {
        let mut copy = Self { users: 0, ..self.clone() };
        for fd in 0..copy.slots.len() {
            if matches!(copy.slots[fd], Some(Slot::Reserved)) {
                copy.slots[fd] = None;
                copy.lowest_free = copy.lowest_free.min(fd);
            }
        }
        copy
    }

    /// Notes that a process has this table.
    pub fn attach(&mut self) {
        self.users += 1;
    }

    /// Notes that a process has it no more; returns what is to be closed if it was
    /// the last one.
    pub fn detach(&mut self) -> Option<Self> {
        self.users -= 1;
        (self.users == 0).then(|| core::mem::take(self))
    }

    /// Number of processes that have this table.
    pub fn users(&self) -> u32 {
        self.users
    }

    /// The open file behind a descriptor; `EBADF` if there is none.
    pub fn get(&self, fd: i32) -> Result<Arc<OpenFile>> {
        match self.slots.get(fd as usize) {
            Some(Some(Slot::Open { file, .. })) => Ok(file.clone()),
            _ => Err(Errno::EBADF),
        }
    }

    /// Gives `file` the lowest free descriptor that is at least `from`.
    /// `EMFILE` if it would not be below `limit` (`RLIMIT_NOFILE`).
    pub fn insert_from(
        &mut self,
        from: i32,
        file: Arc<OpenFile>,
        on_exec: OnExec,
        limit: u64,
    ) -> Result<i32> {
        self.take_lowest(from, Slot::Open { file, on_exec }, limit)
    }

    /// Reserves the lowest free descriptor for a file that has yet to be opened:
    /// until [`FdTable::fill`] it is neither free nor open. `EMFILE`.
    pub fn reserve(&mut self, limit: u64) -> Result<i32> {
        self.take_lowest(0, Slot::Reserved, limit)
    }

    /// Opens a reserved descriptor.
    pub fn fill(&mut self, fd: i32, file: Arc<OpenFile>, on_exec: OnExec) {
        debug_assert!(matches!(self.slots.get(fd as usize), Some(Some(Slot::Reserved))));
        self.put(fd as usize, Slot::Open { file, on_exec });
    }

    /// Gives a reserved descriptor back. The table may have been emptied since
    /// ([`FdTable::detach`]).
    pub fn cancel(&mut self, fd: i32) {
        if let Some(slot @ Some(Slot::Reserved)) = self.slots.get_mut(fd as usize) {
            *slot = None;
            self.lowest_free = self.lowest_free.min(fd as usize);
        }
    }

    fn take_lowest(&mut self, from: i32, slot: Slot, limit: u64) -> Result<i32> {
        let first = self.lowest_free.max(from.max(0) as usize);
        let mut at = first;
        while self.slots.get(at).is_some_and(Option::is_some) {
            at += 1;
        }
        if at as u64 >= limit.min(NR_OPEN) {
            return Err(Errno::EMFILE);
        }
        self.put(at, slot);
        if first == self.lowest_free {
            self.lowest_free = at + 1;
        }
        Ok(at as i32)
    }

    /// Gives `file` the lowest free descriptor.
    pub fn insert(&mut self, file: Arc<OpenFile>, on_exec: OnExec, limit: u64) -> Result<i32> {
        self.insert_from(0, file, on_exec, limit)
    }

    /// Puts `file` at `fd` and returns what was there (dup2(2)); drop it after
    /// giving up the table. `EBADF` if `fd` is not below `limit`; `EBUSY` if a call
    /// that is under way has reserved it.
    pub fn replace(
        &mut self,
        fd: i32,
        file: Arc<OpenFile>,
        on_exec: OnExec,
        limit: u64,
    ) -> Result<Option<Arc<OpenFile>>> {
        if fd < 0 || fd as u64 >= limit.min(NR_OPEN) {
            return Err(Errno::EBADF);
        }
        if matches!(self.slots.get(fd as usize), Some(Some(Slot::Reserved))) {
            return Err(Errno::EBUSY);
        }
        let old = self.put(fd as usize, Slot::Open { file, on_exec });
        if fd as usize == self.lowest_free {
            self.lowest_free += 1;
        }
        Ok(old.and_then(Slot::into_file))
    }

    fn put(&mut self, at: usize, slot: Slot) -> Option<Slot> {
        if at >= self.slots.len() {
            self.slots.resize(at + 1, None);
        }
        self.slots[at].replace(slot)
    }

    /// Frees a descriptor and returns the open file; drop it after giving up
    /// the table, since that may run anything.
    pub fn remove(&mut self, fd: i32) -> Result<Arc<OpenFile>> {
        let slot = self.slots.get_mut(fd as usize).ok_or(Errno::EBADF)?;
        let open = slot.take_if(|slot| matches!(slot, Slot::Open { .. })).ok_or(Errno::EBADF)?;
        self.lowest_free = self.lowest_free.min(fd as usize);
        open.into_file().ok_or(Errno::EBADF)
    }

    /// Frees all descriptors in `first..=last` and returns their files.
    pub fn remove_range(&mut self, first: u32, last: u32) -> Vec<Arc<OpenFile>> {
        self.open_in(first, last).into_iter().filter_map(|fd| self.remove(fd).ok()).collect()
    }

    /// Sets [`OnExec::Close`] on all descriptors in `first..=last`.
    pub fn close_range_on_exec(&mut self, first: u32, last: u32) {
        for fd in self.open_in(first, last) {
            // All of these are open.
            let _ = self.set_on_exec(fd, OnExec::Close);
        }
    }

    fn open_in(&self, first: u32, last: u32) -> Vec<i32> {
        self.numbers().filter(|&fd| (first..=last).contains(&(fd as u32))).collect()
    }

    /// Frees what must not survive an execve and returns the files.
    pub fn close_on_exec(&mut self) -> Vec<Arc<OpenFile>> {
        let closing: Vec<i32> =
            self.numbers().filter(|&fd| self.on_exec(fd) == Ok(OnExec::Close)).collect();
        closing.into_iter().filter_map(|fd| self.remove(fd).ok()).collect()
    }

    /// What happens to a descriptor at execve.
    pub fn on_exec(&self, fd: i32) -> Result<OnExec> {
        match self.slots.get(fd as usize) {
            Some(Some(Slot::Open { on_exec, .. })) => Ok(*on_exec),
            _ => Err(Errno::EBADF),
        }
    }

    /// Changes what happens to a descriptor at execve.
    pub fn set_on_exec(&mut self, fd: i32, on_exec: OnExec) -> Result<()> {
        match self.slots.get_mut(fd as usize) {
            Some(Some(Slot::Open { on_exec: now, .. })) => {
                *now = on_exec;
                Ok(())
            }
            _ => Err(Errno::EBADF),
        }
    }

    /// All open descriptors, in order.
    pub fn numbers(&self) -> impl Iterator<Item = i32> {
        let slots = self.slots.iter().enumerate();
        slots.filter(|(_, slot)| matches!(slot, Some(Slot::Open { .. }))).map(|(fd, _)| fd as i32)
    }

    /// All open files, once per descriptor.
    pub fn files(&self) -> impl Iterator<Item = &Arc<OpenFile>> {
        self.slots.iter().filter_map(|slot| match slot {
            Some(Slot::Open { file, .. }) => Some(file),
            _ => None,
        })
    }

    /// The descriptors from `first` on, with what is open there.
    pub fn slots_from(
        &self,
        first: usize,
    ) -> impl Iterator<Item = (usize, Option<&Arc<OpenFile>>)> {
        let slots = self.slots.iter().enumerate().skip(first);
        slots.map(|(fd, slot)| match slot {
            Some(Slot::Open { file, .. }) => (fd, Some(file)),
            _ => (fd, None),
        })
    }

    /// Number of slots, as `FDSize` in `/proc/self/status` counts them.
    pub fn capacity(&self) -> usize {
        self.slots.len().next_multiple_of(64)
    }
}

impl Fd {
    /// The open file behind a descriptor of the running process; `EBADF`.
    pub fn file(self) -> Result<Arc<OpenFile>> {
        current_process().files.borrow_mut().borrow_mut().get(self.0)
    }

    /// As [`Fd::file`], but not for descriptors that only name a place (`O_PATH`).
    pub fn usable_file(self) -> Result<Arc<OpenFile>> {
        let open = self.file()?;
        if open.flags().contains(OpenFlags::PATH) { Err(Errno::EBADF) } else { Ok(open) }
    }
}

/// Gives a file the lowest free descriptor of the running process; `EMFILE`. Only
/// `O_CLOEXEC` of `flags` is looked at.
pub fn install(file: Arc<OpenFile>, flags: OpenFlags) -> Result<i32> {
    let process = current_process();
    let limit = process.limits.borrow_mut()[RLIMIT_NOFILE].current;
    process.files.borrow_mut().borrow_mut().insert(file, OnExec::of(flags), limit)
}

/// Gives an anonymous file a descriptor; only `O_CLOEXEC` and `O_NONBLOCK` of `flags` are
/// looked at.
pub fn install_new(file: Arc<dyn File>, flags: OpenFlags) -> Result<i32> {
    let status = OpenFlags::RDWR | (flags & OpenFlags::NONBLOCK);
    install(OpenFile::new(file, status, None), flags)
}

/// Gives two files descriptors and writes the numbers to `at` (pipe(2), socketpair(2)).
pub fn install_pair(
    at: UserPtr<[i32; 2]>,
    files: [Arc<OpenFile>; 2],
    flags: OpenFlags,
) -> Result<()> {
    let descriptors = [NewDescriptor::reserve()?, NewDescriptor::reserve()?];
    at.write(&descriptors.each_ref().map(NewDescriptor::number))?;
    for (descriptor, file) in descriptors.into_iter().zip(files) {
        descriptor.install(file, OnExec::of(flags));
    }
    Ok(())
}

/// A descriptor that a call of the running process has reserved. Dropped, it is free
/// again: a call takes the number first, does what can fail, and installs the file
/// last.
pub struct NewDescriptor {
    table: Arc<KernelCell<FdTable>>,
    fd: i32,
    is_open: bool,
}

impl NewDescriptor {
    /// Reserves the lowest free descriptor; `EMFILE`.
    pub fn reserve() -> Result<Self> {
        let process = current_process();
        let limit = process.limits.borrow_mut()[RLIMIT_NOFILE].current;
        let table = process.files.borrow_mut().clone();
        let fd = table.borrow_mut().reserve(limit)?;
        Ok(Self { table, fd, is_open: false })
    }

    /// The number.
    pub fn number(&self) -> i32 {
        self.fd
    }

    /// Gives the number to a file.
    pub fn install(mut self, file: Arc<OpenFile>, on_exec: OnExec) -> i32 {
        self.table.borrow_mut().fill(self.fd, file, on_exec);
        self.is_open = true;
        self.fd
    }
}

impl Drop for NewDescriptor {
    fn drop(&mut self) {
        if !self.is_open {
            self.table.borrow_mut().cancel(self.fd);
        }
    }
}
