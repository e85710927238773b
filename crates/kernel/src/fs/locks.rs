//! Advisory locks: fcntl(2) record locks, open file description locks, flock(2).

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::file::{Events, OpenFile};
use crate::errno::{Errno, Result};
use crate::platform::saved::Saved;
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::current_process;
use crate::task::ids::Pid;
use crate::task::wait::{WaitQueue, wait_until};
use crate::time::Instant;

impl OpenFile {
    /// Names the file for locks of a family.
    pub fn lock_key(&self, family: Family) -> Result<FileKey> {
        if let Some(host) = self.file.host_locks() {
            let (device, inode) = host.file();
            return Ok((device, inode, family));
        }
        let stat = match &self.path {
            Some(path) => path.inode().attributes().to_stat(),
            None => self.file.stat()?,
        };
        Ok((stat.dev, stat.ino, family))
    }

    /// fcntl(2): closing any descriptor of a file gives up the process' record locks on it. The
    /// running process has closed one.
    pub fn release_record_locks(&self) {
        let locks = &kernel().fs.locks;
        if locks.is_empty() {
            return;
        }
        if let Ok(key) = self.lock_key(Family::Record) {
            locks.release(key, Owner::Process(current_process().pid), Range::ALL);
        }
    }
}

/// Who holds a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A process (`F_SETLK`), by process id.
    Process(Pid),
    /// An open file description (`F_OFD_SETLK`, flock(2)), by address.
    Description(u64),
}

/// How a range is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// Shared with other readers.
    Read,
    /// Exclusive.
    Write,
}

/// Which of the two families of locks, which do not see each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// Record locks, by process or description.
    Record,
    /// flock(2).
    Flock,
}

/// A locked range of a file: `start..end`, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub start: u64,
    /// End; `u64::MAX` reaches however far the file grows.
    pub end: u64,
}

impl Range {
    /// The whole file.
    pub const ALL: Range = Range { start: 0, end: u64::MAX };

    fn overlaps(self, other: Range) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// A lock that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldLock {
    /// Who.
    pub owner: Owner,
    /// How.
    pub kind: LockKind,
    /// What.
    pub range: Range,
}

/// Names a file: device and inode number, and the family of locks.
pub type FileKey = (u64, u64, Family);

/// Locks of a file that other sandboxes see: the host keeps them for this sandbox as a whole.
pub trait HostLocks: Saved + Send + Sync {
    /// Device and inode number of the file that was opened, whatever its name leads to by now.
    fn file(&self) -> (u64, u64);
    /// Takes a lock, in the place of what the sandbox has of the range, or gives it up. `EAGAIN`
    /// if another sandbox stands in the way.
    fn set(&self, family: Family, range: Range, kind: Option<LockKind>) -> Result<()>;
    /// The lock of another sandbox that stands in the way of a record lock.
    fn test(&self, range: Range, kind: LockKind) -> Result<Option<HeldLock>>;
}

/// All advisory locks.
#[derive(Default)]
pub struct LockTable {
    files: KernelCell<BTreeMap<FileKey, Vec<HeldLock>>>,
    /// Those files of them whose locks other sandboxes see.
    at_host: KernelCell<BTreeMap<FileKey, Arc<dyn HostLocks>>>,
    released: Arc<WaitQueue>,
    /// Processes that wait for a record lock, and what for.
    waiting: KernelCell<BTreeMap<Pid, (FileKey, HeldLock)>>,
}

/// Whether to wait for a lock that somebody else holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// `EAGAIN`.
    Refuse,
    /// Wait.
    Wait,
}

/// Gives up the record locks of a process that ends (fcntl(2)).
pub fn release_process(process: &crate::task::Process) {
    crate::state::kernel().fs.locks.release_all(Owner::Process(process.pid));
}

impl LockTable {
    /// Whether nobody holds any lock.
    pub fn is_empty(&self) -> bool {
        self.files.borrow_mut().is_empty()
    }

    /// Shows every lock, file by file.
    pub fn for_each(&self, emit: &mut dyn FnMut(FileKey, &HeldLock)) {
        for (file, held) in self.files.borrow_mut().iter() {
            held.iter().for_each(|lock| emit(*file, lock));
        }
    }

    /// The lock that stands in the way of `wanted`, if there is one.
    pub fn conflict(&self, file: FileKey, wanted: &HeldLock) -> Option<HeldLock> {
        let files = self.files.borrow_mut();
        files.get(&file)?.iter().copied().find(|held| {
            held.owner != wanted.owner
                && held.range.overlaps(wanted.range)
                && (held.kind == LockKind::Write || wanted.kind == LockKind::Write)
        })
    }

    /// Takes a lock, replacing what the owner held of the range.
    pub fn acquire(&self, file: FileKey, wanted: HeldLock, patience: Patience) -> Result<()> {
        let outcome = self.try_acquire(file, wanted, patience);
        if outcome.is_err() {
            self.forget_host_if_unused(file);
        }
        outcome
    }

    fn try_acquire(&self, file: FileKey, wanted: HeldLock, patience: Patience) -> Result<()> {
        loop {
            if self.conflict(file, &wanted).is_some() {
                if patience == Patience::Refuse {
                    return Err(Errno::EAGAIN);
                }
                self.wait_for(file, &wanted)?;
            }
            match self.take_at_host(file, &wanted) {
                Err(Errno::EAGAIN) if patience == Patience::Wait => self.wait_for_others()?,
                outcome => break outcome?,
            }
        }
        self.carve(file, wanted.owner, wanted.range);
        self.insert(file, wanted);
        // Going from exclusive to shared lets others in.
        self.released.wake_all(Events::IN);
        Ok(())
    }

    /// Lets other sandboxes see the locks of a file that are taken from now on.
    pub fn keep_at_host(&self, file: FileKey, host: Arc<dyn HostLocks>) {
        self.at_host.borrow_mut().entry(file).or_insert(host);
    }

    fn host(&self, file: FileKey) -> Option<Arc<dyn HostLocks>> {
        self.at_host.borrow_mut().get(&file).cloned()
    }

    fn take_at_host(&self, file: FileKey, wanted: &HeldLock) -> Result<()> {
        match self.host(file) {
            Some(host) => host.set(file.2, wanted.range, Some(wanted.kind)),
            None => Ok(()),
        }
    }

    /// Lets go of a file of which nothing is locked.
    fn forget_host_if_unused(&self, file: FileKey) {
        if !self.files.borrow_mut().contains_key(&file) {
            // Dropped when the table is not in use any more: it may close the file.
            let unused = self.at_host.borrow_mut().remove(&file);
            drop(unused);
        }
    }

    /// Waits a while: the host does not say when another sandbox gives up a lock.
    fn wait_for_others(&self) -> Result<()> {
        const PAUSE_NS: u64 = 5_000_000;
        let deadline = Instant::after_ns(PAUSE_NS);
        match wait_until(&[&self.released], Some(deadline), || None::<Result<()>>) {
            Err(Errno::ETIMEDOUT) => Ok(()),
            outcome => outcome,
        }
    }

    /// Makes what the host keeps of a range what the owners in this sandbox hold together.
    fn settle_at_host(&self, file: FileKey, range: Range) {
        let Some(host) = self.host(file) else { return };
        let held = self.files.borrow_mut().get(&file).cloned().unwrap_or_default();
        // A lock that is given up cannot be refused; a file that is gone has none.
        if held.is_empty() {
            let _ = host.set(file.2, Range::ALL, None);
            self.forget_host_if_unused(file);
            return;
        }
        for part in parts(range, &held) {
            let kinds = held.iter().filter(|lock| lock.range.overlaps(part)).map(|lock| lock.kind);
            let _ = host.set(file.2, part, kinds.max_by_key(|&kind| kind == LockKind::Write));
        }
    }

    /// Takes the locks of a file again that were held when the program was frozen, or its host ended.
    ///
    /// # Errors
    /// `EAGAIN`: another sandbox has taken one of them meanwhile; the host's.
    pub fn take_again(&self, file: (u64, u64), host: &dyn HostLocks) -> Result<()> {
        for family in [Family::Record, Family::Flock] {
            let key = (file.0, file.1, family);
            let held = self.files.borrow_mut().get(&key).cloned().unwrap_or_default();
            for lock in held {
                host.set(family, lock.range, Some(lock.kind))?;
            }
        }
        Ok(())
    }

    /// Whether somebody holds a lock of a file.
    pub fn is_locked(&self, file: (u64, u64)) -> bool {
        let files = self.files.borrow_mut();
        [Family::Record, Family::Flock].iter().any(|&family| {
            files.get(&(file.0, file.1, family)).is_some_and(|held| !held.is_empty())
        })
    }

    /// Waits until nothing stands in the way; `EDEADLK` if that would never be.
    fn wait_for(&self, file: FileKey, wanted: &HeldLock) -> Result<()> {
        let process = match wanted.owner {
            Owner::Process(pid) => Some(pid),
            // Linux looks for deadlocks among processes only.
            Owner::Description(_) => None,
        };
        let outcome = wait_until(&[&self.released], None, || {
            let Some(held) = self.conflict(file, wanted) else { return Some(Ok(())) };
            if let Some(pid) = process {
                if self.would_wait_for_itself(pid, held.owner) {
                    return Some(Err(Errno::EDEADLK));
                }
                self.waiting.borrow_mut().insert(pid, (file, *wanted));
            }
            None
        });
        if let Some(pid) = process {
            self.waiting.borrow_mut().remove(&pid);
        }
        outcome
    }

    /// Whether `owner` waits, directly or through others, for process `pid`.
    fn would_wait_for_itself(&self, pid: Pid, owner: Owner) -> bool {
        let mut at = owner;
        // No chain of waits is longer than there are waiters.
        let longest = self.waiting.borrow_mut().len();
        for _ in 0..=longest {
            let Owner::Process(next) = at else { return false };
            if next == pid {
                return true;
            }
            let Some((file, wanted)) = self.waiting.borrow_mut().get(&next).copied() else {
                return false;
            };
            match self.conflict(file, &wanted) {
                Some(held) => at = held.owner,
                None => return false,
            }
        }
        false
    }

    /// Adds a lock to those of a file, in order. Record locks of one owner and
    /// kind that touch become one (fcntl(2)).
    fn insert(&self, file: FileKey, mut new: HeldLock) {
        let mut files = self.files.borrow_mut();
        let held = files.entry(file).or_default();
        held.retain(|lock| {
            let touches = lock.owner == new.owner
                && lock.kind == new.kind
                && lock.range.start <= new.range.end
                && new.range.start <= lock.range.end;
            if touches {
                new.range.start = new.range.start.min(lock.range.start);
                new.range.end = new.range.end.max(lock.range.end);
            }
            !touches
        });
        let at = held.partition_point(|lock| lock.range.start <= new.range.start);
        held.insert(at, new);
    }

    /// What an owner holds of a file.
    pub fn held_by(&self, file: FileKey, owner: Owner) -> Option<HeldLock> {
        self.files.borrow_mut().get(&file)?.iter().copied().find(|lock| lock.owner == owner)
    }

    /// Gives up what the owner holds of a range.
    pub fn release(&self, file: FileKey, owner: Owner, range: Range) {
        if self.carve(file, owner, range) {
            self.settle_at_host(file, range);
            self.released.wake_all(Events::IN);
        }
    }

    /// Gives up everything that an owner holds anywhere.
    pub fn release_all(&self, owner: Owner) {
        let mut changed = Vec::new();
        self.files.borrow_mut().retain(|file, held| {
            let before = held.len();
            held.retain(|lock| lock.owner != owner);
            if held.len() != before {
                changed.push(*file);
            }
            !held.is_empty()
        });
        if !changed.is_empty() {
            changed.iter().for_each(|&file| self.settle_at_host(file, Range::ALL));
            self.released.wake_all(Events::IN);
        }
    }

    /// Cuts a range out of an owner's locks.
    fn carve(&self, file: FileKey, owner: Owner, range: Range) -> bool {
        let mut files = self.files.borrow_mut();
        let Some(held) = files.get_mut(&file) else { return false };
        let mut changed = false;
        let mut kept = Vec::with_capacity(held.len() + 1);
        for lock in held.drain(..) {
            if lock.owner != owner || !lock.range.overlaps(range) {
                kept.push(lock);
                continue;
            }
            changed = true;
            if lock.range.start < range.start {
                kept.push(HeldLock {
                    range: Range { start: lock.range.start, end: range.start },
                    ..lock
                });
            }
            if lock.range.end > range.end {
                kept.push(HeldLock {
                    range: Range { start: range.end, end: lock.range.end },
                    ..lock
                });
            }
        }
        *held = kept;
        if held.is_empty() {
            files.remove(&file);
        }
        changed
    }
}

/// A range, cut where locks begin and end.
fn parts(range: Range, held: &[HeldLock]) -> Vec<Range> {
    let ends = held.iter().flat_map(|lock| [lock.range.start, lock.range.end]);
    let mut cuts: Vec<u64> = ends.filter(|&cut| range.start < cut && cut < range.end).collect();
    cuts.extend([range.start, range.end]);
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|pair| Range { start: pair[0], end: pair[1] }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileKey = (1, 2, Family::Record);

    fn lock(owner: u32, kind: LockKind, start: u64, end: u64) -> HeldLock {
        HeldLock { owner: Owner::Process(Pid::new(owner)), kind, range: Range { start, end } }
    }

    #[test]
    fn readers_share_and_writers_do_not() {
        let table = LockTable::default();
        table.acquire(FILE, lock(1, LockKind::Read, 0, 10), Patience::Refuse).unwrap();
        table.acquire(FILE, lock(2, LockKind::Read, 5, 15), Patience::Refuse).unwrap();
        assert_eq!(
            table.acquire(FILE, lock(3, LockKind::Write, 12, 13), Patience::Refuse),
            Err(Errno::EAGAIN)
        );
        assert_eq!(
            table.conflict(FILE, &lock(3, LockKind::Write, 12, 13)),
            Some(lock(2, LockKind::Read, 5, 15))
        );
        table.acquire(FILE, lock(3, LockKind::Write, 20, 30), Patience::Refuse).unwrap();
        table.release(FILE, Owner::Process(Pid::new(2)), Range::ALL);
        table.acquire(FILE, lock(3, LockKind::Write, 12, 13), Patience::Refuse).unwrap();
    }

    #[test]
    fn a_release_in_the_middle_splits() {
        let table = LockTable::default();
        table.acquire(FILE, lock(1, LockKind::Write, 0, 100), Patience::Refuse).unwrap();
        table.release(FILE, Owner::Process(Pid::new(1)), Range { start: 40, end: 60 });
        table.acquire(FILE, lock(2, LockKind::Write, 40, 60), Patience::Refuse).unwrap();
        assert!(table.conflict(FILE, &lock(2, LockKind::Write, 39, 40)).is_some());
        assert!(table.conflict(FILE, &lock(2, LockKind::Write, 60, 61)).is_some());
        table.release_all(Owner::Process(Pid::new(1)));
        assert!(table.conflict(FILE, &lock(2, LockKind::Write, 0, 100)).is_none());
    }

    #[test]
    fn locks_that_touch_become_one() {
        let table = LockTable::default();
        for (start, end) in [(20, 30), (0, 10), (10, 20)] {
            table.acquire(FILE, lock(1, LockKind::Write, start, end), Patience::Refuse).unwrap();
        }
        let found = table.conflict(FILE, &lock(2, LockKind::Read, 25, 26));
        assert_eq!(found, Some(lock(1, LockKind::Write, 0, 30)));
        table.acquire(FILE, lock(1, LockKind::Read, 5, 6), Patience::Refuse).unwrap();
        assert_eq!(
            table.conflict(FILE, &lock(2, LockKind::Read, 5, 30)),
            Some(lock(1, LockKind::Write, 6, 30))
        );
    }

    #[test]
    fn a_circle_of_waits_is_seen() {
        let table = LockTable::default();
        table.acquire(FILE, lock(1, LockKind::Write, 0, 1), Patience::Refuse).unwrap();
        table.acquire(FILE, lock(2, LockKind::Write, 1, 2), Patience::Refuse).unwrap();
        table.acquire(FILE, lock(3, LockKind::Write, 2, 3), Patience::Refuse).unwrap();
        table.waiting.borrow_mut().insert(Pid::new(1), (FILE, lock(1, LockKind::Write, 1, 2)));
        table.waiting.borrow_mut().insert(Pid::new(2), (FILE, lock(2, LockKind::Write, 2, 3)));
        assert!(table.would_wait_for_itself(Pid::new(3), Owner::Process(Pid::new(1))));
        assert!(!table.would_wait_for_itself(Pid::new(4), Owner::Process(Pid::new(1))));
        let wanted = lock(3, LockKind::Write, 0, 1);
        assert_eq!(table.acquire(FILE, wanted, Patience::Wait), Err(Errno::EDEADLK));
    }

    /// A host that knows the locks of another sandbox, and keeps this one's.
    #[derive(Default)]
    struct Host {
        others: KernelCell<Vec<HeldLock>>,
        own: KernelCell<Vec<(u64, u64, Option<LockKind>)>>,
    }

    impl HostLocks for Host {
        fn file(&self) -> (u64, u64) {
            (1, 1)
        }

        fn set(&self, _: Family, range: Range, kind: Option<LockKind>) -> Result<()> {
            let wanted = |kind| HeldLock { owner: Owner::Process(Pid::new(0)), kind, range };
            if let Some(wanted) = kind.map(wanted)
                && self.test(wanted.range, wanted.kind)?.is_some()
            {
                return Err(Errno::EAGAIN);
            }
            self.own.borrow_mut().push((range.start, range.end, kind));
            Ok(())
        }

        fn test(&self, range: Range, kind: LockKind) -> Result<Option<HeldLock>> {
            let others = self.others.borrow_mut();
            let in_the_way = |other: &&HeldLock| {
                other.range.overlaps(range)
                    && (other.kind == LockKind::Write || kind == LockKind::Write)
            };
            Ok(others.iter().find(in_the_way).copied())
        }
    }

    #[test]
    fn what_the_host_refuses_is_not_held_here() {
        let (table, host) = (LockTable::default(), Arc::new(Host::default()));
        host.others.borrow_mut().push(lock(9, LockKind::Write, 0, 10));
        for _ in 0..2 {
            table.keep_at_host(FILE, host.clone());
            let refused = table.acquire(FILE, lock(1, LockKind::Read, 5, 6), Patience::Refuse);
            assert_eq!(refused, Err(Errno::EAGAIN));
            assert!(table.is_empty());
        }
        assert_eq!(Arc::strong_count(&host), 1, "nothing keeps the file open");
        table.keep_at_host(FILE, host.clone());
        table.acquire(FILE, lock(1, LockKind::Write, 10, 20), Patience::Refuse).unwrap();
        // What is held stays, and at the host, when more is refused.
        let refused = table.acquire(FILE, lock(1, LockKind::Write, 5, 20), Patience::Refuse);
        assert_eq!(refused, Err(Errno::EAGAIN));
        assert_eq!(*host.own.borrow_mut(), [(10, 20, Some(LockKind::Write))]);
        assert!(table.host(FILE).is_some());
    }

    #[test]
    fn the_host_keeps_what_all_owners_hold_together() {
        let (table, host) = (LockTable::default(), Arc::new(Host::default()));
        table.keep_at_host(FILE, host.clone());
        for (owner, start, end) in [(1, 0, 10), (2, 5, 15)] {
            table.acquire(FILE, lock(owner, LockKind::Read, start, end), Patience::Refuse).unwrap();
        }
        host.own.borrow_mut().clear();
        table.release(FILE, Owner::Process(Pid::new(1)), Range::ALL);
        let read = Some(LockKind::Read);
        let expected = [(0, 5, None), (5, 15, read), (15, u64::MAX, None)];
        assert_eq!(*host.own.borrow_mut(), expected);
        host.own.borrow_mut().clear();
        table.release_all(Owner::Process(Pid::new(2)));
        assert_eq!(*host.own.borrow_mut(), [(0, u64::MAX, None)]);
        assert_eq!(Arc::strong_count(&host), 1);
    }
}
