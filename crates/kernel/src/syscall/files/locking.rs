//! Advisory locks: flock(2) and the record locks of fcntl(2).

use alloc::sync::Arc;

use crate::args::Fd;
use crate::errno::{Errno, Result};
use crate::fs::file::OpenFile;
use crate::fs::locks::{Family, FileKey, HeldLock, LockKind, Owner, Patience, Range};
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::task::current_process;

const LOCK_SH: u32 = 1;
const LOCK_EX: u32 = 2;
const LOCK_NB: u32 = 4;
const LOCK_UN: u32 = 8;

/// flock(2).
pub fn flock(fd: Fd, operation: u32) -> Result<()> {
    let open = fd.usable_file()?;
    let locks = &kernel().fs.locks;
    let owner = Owner::Description(description_id(&open));
    let key = open.lock_key(Family::Flock)?;
    let kind = match operation & !LOCK_NB {
        LOCK_SH => LockKind::Read,
        LOCK_EX => LockKind::Write,
        LOCK_UN => {
            locks.release(key, owner, Range::ALL);
            return Ok(());
        }
        _ => return Err(Errno::EINVAL),
    };
    let patience = if operation & LOCK_NB != 0 { Patience::Refuse } else { Patience::Wait };
    if locks.held_by(key, owner).is_some_and(|held| held.kind != kind) {
        // flock(2): a conversion is a release and a new request, and what was
        // held is lost if the request fails.
        locks.release(key, owner, Range::ALL);
    }
    open.note_lock();
    show_to_others(&open, key);
    locks.acquire(key, HeldLock { owner, kind, range: Range::ALL }, patience)?;
    Ok(())
}

fn description_id(open: &Arc<OpenFile>) -> u64 {
    Arc::as_ptr(open) as u64
}

/// `struct flock` of the x86-64 ABI (fcntl(2)).
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Flock {
    kind: i16,
    whence: i16,
    pad: u32,
    start: i64,
    len: i64,
    pid: i32,
    pad2: u32,
}

const F_RDLCK: i16 = 0;
const F_WRLCK: i16 = 1;
const F_UNLCK: i16 = 2;

fn range(open: &OpenFile, flock: &Flock) -> Result<Range> {
    let base = match flock.whence {
        0 => 0,
        1 => open.position(),
        2 => match &open.path {
            Some(path) => path.inode().attributes().size,
            None => 0,
        },
        _ => return Err(Errno::EINVAL),
    };
    let start = i64::try_from(base)
        .ok()
        .and_then(|base| base.checked_add(flock.start))
        .ok_or(Errno::EOVERFLOW)?;
    let (first, last) = match flock.len {
        // Up to the end, however far the file grows.
        0 => (start, i64::MAX),
        len if len > 0 => (start, start.checked_add(len - 1).ok_or(Errno::EOVERFLOW)?),
        len => (start.checked_add(len).ok_or(Errno::EINVAL)?, start - 1),
    };
    let start = u64::try_from(first).map_err(|_| Errno::EINVAL)?;
    let end = if last == i64::MAX { u64::MAX } else { last as u64 + 1 };
    Ok(Range { start, end })
}

/// Who is to hold a record lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LockedBy {
    /// The process (`F_SETLK`).
    Process,
    /// The open file description (`F_OFD_SETLK`).
    Description,
}

fn owner(open: &Arc<OpenFile>, by: LockedBy) -> Owner {
    match by {
        LockedBy::Description => Owner::Description(description_id(open)),
        LockedBy::Process => Owner::Process(current_process().pid),
    }
}

fn wanted(open: &Arc<OpenFile>, flock: &Flock, by: LockedBy) -> Result<Option<HeldLock>> {
    if by == LockedBy::Description && flock.pid != 0 {
        return Err(Errno::EINVAL);
    }
    let kind = match flock.kind {
        F_RDLCK => LockKind::Read,
        F_WRLCK => LockKind::Write,
        F_UNLCK => return Ok(None),
        _ => return Err(Errno::EINVAL),
    };
    Ok(Some(HeldLock { owner: owner(open, by), kind, range: range(open, flock)? }))
}

/// `F_GETLK` and `F_OFD_GETLK`.
pub(super) fn get_record_lock(
    open: &Arc<OpenFile>,
    argument: UserAddress,
    by: LockedBy,
) -> Result<()> {
    let mut flock: Flock = argument.read()?;
    let wanted = wanted(open, &flock, by)?.ok_or(Errno::EINVAL)?;
    match conflict(open, &wanted)? {
        None => flock.kind = F_UNLCK,
        Some(held) => {
            flock.kind = if held.kind == LockKind::Write { F_WRLCK } else { F_RDLCK };
            flock.whence = 0;
            flock.start = held.range.start as i64;
            flock.len = if held.range.end == u64::MAX {
                0
            } else {
                (held.range.end - held.range.start) as i64
            };
            flock.pid = match held.owner {
                Owner::Process(pid) => pid.for_caller() as i32,
                Owner::Description(_) => -1,
            };
        }
    }
    argument.write(&flock)
}

/// `F_SETLK`, `F_SETLKW` and their relatives for open file descriptions.
pub(super) fn set_record_lock(
    open: &Arc<OpenFile>,
    argument: UserAddress,
    by: LockedBy,
    patience: Patience,
) -> Result<()> {
    let flock: Flock = argument.read()?;
    let key = open.lock_key(Family::Record)?;
    let Some(wanted) = wanted(open, &flock, by)? else {
        kernel().fs.locks.release(key, owner(open, by), range(open, &flock)?);
        return Ok(());
    };
    let allowed = match wanted.kind {
        LockKind::Read => open.flags().can_read(),
        LockKind::Write => open.flags().can_write(),
    };
    if !allowed {
        return Err(Errno::EBADF);
    }
    if by == LockedBy::Description {
        open.note_lock();
    }
    show_to_others(open, key);
    kernel().fs.locks.acquire(key, wanted, patience)
}

/// Locks of a volume's file are seen by other sandboxes.
fn show_to_others(open: &OpenFile, key: FileKey) {
    if let Some(host) = open.file.host_locks() {
        kernel().fs.locks.keep_at_host(key, host);
    }
}

/// The lock of this sandbox or another one that stands in the way.
fn conflict(open: &OpenFile, wanted: &HeldLock) -> Result<Option<HeldLock>> {
    let here = kernel().fs.locks.conflict(open.lock_key(Family::Record)?, wanted);
    match open.file.host_locks() {
        Some(host) if here.is_none() => host.test(wanted.range, wanted.kind),
        _ => Ok(here),
    }
}
