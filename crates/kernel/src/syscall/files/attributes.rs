//! Changing permissions, owners and times.

use super::{AtFlags, place_of, resolve_at};
use crate::args::{Fd, Flags, Mode, UserPtr, UserString};
use crate::errno::{Errno, Result};
use crate::fs::context::{AT_FDCWD, Context};
use crate::fs::inode::{AttributeChanges, Attributes, FileType, S_ISGID, S_ISUID, Timestamp};
use crate::fs::notify;
use crate::fs::path::Path;
use crate::fs::permission::Access;
use crate::task::{Capabilities, current_process};
use crate::time::{Timespec, Timeval};

/// umask(2).
pub fn umask(Mode(mask): Mode) -> Result<u32> {
    let process = current_process();
    let fs = process.fs();
    let mut fs = fs.borrow_mut();
    Ok(core::mem::replace(&mut fs.umask, mask & 0o777))
}

/// Changes attributes, and tells those who watch.
pub fn change(path: &Path, changes: &AttributeChanges) -> Result<()> {
    path.inode().change(changes)?;
    notify::changed(path, changes);
    Ok(())
}

/// chmod(2), for a file that was found.
pub fn change_permissions(context: &Context, path: &Path, bits: u32) -> Result<()> {
    path.check_writable()?;
    let attributes = path.inode().attributes();
    if !context.identity.owns(&attributes) {
        return Err(Errno::EPERM);
    }
    if attributes.file_type() == FileType::Symlink {
        return Err(Errno::EOPNOTSUPP);
    }
    let mut bits = bits & 0o7777;
    let keeps = context.identity.can_with(&attributes, Capabilities::FSETID);
    if !keeps && !context.identity.in_group(attributes.gid) {
        // chmod(2): one cannot make files that run as a group one is not in.
        bits &= !S_ISGID;
    }
    change(path, &AttributeChanges { permissions: Some(bits), ..Default::default() })
}

/// chmod(2).
pub fn chmod(path: UserString, mode: Mode) -> Result<()> {
    fchmodat(AT_FDCWD, path, mode)
}

/// fchmod(2).
pub fn fchmod(fd: Fd, Mode(mode): Mode) -> Result<()> {
    fd.usable_file()?;
    let context = Context::current();
    change_permissions(&context, &place_of(&context, fd)?, mode)
}

/// fchmodat(2): the kernel's call has no flags.
pub fn fchmodat(dirfd: Fd, path: UserString, mode: Mode) -> Result<()> {
    fchmodat2(dirfd, path, mode, Flags(0))
}

/// fchmodat2(2).
pub fn fchmodat2(dirfd: Fd, path: UserString, Mode(mode): Mode, Flags(flags): Flags) -> Result<()> {
    let flags = AtFlags::parse(flags, AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH)?;
    let context = Context::current();
    let path = resolve_at(&context, dirfd, path, flags)?;
    change_permissions(&context, &path, mode)
}

/// An id argument: -1 leaves the id alone (chown(2)). `EINVAL` if it is none of the caller's user
/// namespace.
fn id(value: u32, find: impl Fn(u32) -> Option<u32>) -> Result<Option<u32>> {
    if value == u32::MAX { Ok(None) } else { find(value).ok_or(Errno::EINVAL).map(Some) }
}

fn change_owner(context: &Context, path: &Path, uid: u32, gid: u32) -> Result<()> {
    path.check_writable()?;
    let identity = &context.identity;
    let uid = id(uid, |uid| identity.users.user(uid))?;
    let gid = id(gid, |gid| identity.users.group(gid))?;
    let attributes = path.inode().attributes();
    if !identity.can_with(&attributes, Capabilities::CHOWN) {
        let same_uid = uid.is_none_or(|uid| uid == attributes.uid);
        let own_gid = gid.is_none_or(|gid| gid == attributes.gid || identity.in_group(gid));
        if attributes.uid != identity.uid && (uid.is_some() || gid.is_some())
            || !same_uid
            || !own_gid
        {
            return Err(Errno::EPERM);
        }
    }
    let mut permissions = None;
    if attributes.file_type() != FileType::Directory && attributes.mode & (S_ISUID | S_ISGID) != 0 {
        // chown(2): a new owner does not inherit the old one's powers. Without
        // group execute, set-group-id means mandatory locking and stays.
        let cleared = if attributes.mode & 0o010 != 0 { S_ISUID | S_ISGID } else { S_ISUID };
        permissions = Some(attributes.mode & 0o7777 & !cleared);
    }
    let drops_capabilities = attributes.file_type() != FileType::Directory;
    let changes =
        AttributeChanges { permissions, uid, gid, drops_capabilities, ..Default::default() };
    change(path, &changes)
}

/// chown(2).
pub fn chown(path: UserString, uid: u32, gid: u32) -> Result<()> {
    fchownat(AT_FDCWD, path, uid, gid, Flags(0))
}

/// lchown(2).
pub fn lchown(path: UserString, uid: u32, gid: u32) -> Result<()> {
    fchownat(AT_FDCWD, path, uid, gid, Flags(AtFlags::SYMLINK_NOFOLLOW.bits()))
}

/// fchown(2).
pub fn fchown(fd: Fd, uid: u32, gid: u32) -> Result<()> {
    fd.usable_file()?;
    let context = Context::current();
    change_owner(&context, &place_of(&context, fd)?, uid, gid)
}

/// fchownat(2).
pub fn fchownat(
    dirfd: Fd,
    path: UserString,
    uid: u32,
    gid: u32,
    Flags(flags): Flags,
) -> Result<()> {
    let flags = AtFlags::parse(flags, AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH)?;
    let context = Context::current();
    let path = resolve_at(&context, dirfd, path, flags)?;
    change_owner(&context, &path, uid, gid)
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NewTime {
    Now,
    Omit,
    At(Timestamp),
}

impl NewTime {
    fn value(self, now: Timestamp) -> Option<Timestamp> {
        match self {
            Self::Now => Some(now),
            Self::Omit => None,
            Self::At(time) => Some(time),
        }
    }
}

fn change_times(context: &Context, path: &Path, atime: NewTime, mtime: NewTime) -> Result<()> {
    if atime == NewTime::Omit && mtime == NewTime::Omit {
        return Ok(());
    }
    path.check_writable()?;
    let attributes: Attributes = path.inode().attributes();
    if !context.identity.owns(&attributes) {
        // utimensat(2), "Permissions requirements".
        if atime != NewTime::Now || mtime != NewTime::Now {
            return Err(Errno::EPERM);
        }
        context.identity.check_attributes(&attributes, Access::WRITE)?;
    }
    let now = Timestamp::now();
    let changes =
        AttributeChanges { atime: atime.value(now), mtime: mtime.value(now), ..Default::default() };
    change(path, &changes)
}

const UTIME_NOW: i64 = 0x3fff_ffff;
const UTIME_OMIT: i64 = 0x3fff_fffe;

fn from_timespec(time: Timespec) -> Result<NewTime> {
    match time.nanoseconds {
        UTIME_NOW => Ok(NewTime::Now),
        UTIME_OMIT => Ok(NewTime::Omit),
        0..=999_999_999 => {
            Ok(NewTime::At(Timestamp { sec: time.seconds, nsec: time.nanoseconds as u32 }))
        }
        _ => Err(Errno::EINVAL),
    }
}

fn from_timeval(time: Timeval) -> Result<NewTime> {
    match time.microseconds {
        0..=999_999 => {
            let nsec = time.microseconds as u32 * 1000;
            Ok(NewTime::At(Timestamp { sec: time.seconds, nsec }))
        }
        _ => Err(Errno::EINVAL),
    }
}

/// Sets the times of a file, or of the descriptor's own file for a null path (futimens(3)).
/// Without times, that is now.
fn set_times(
    dirfd: Fd,
    path: UserString,
    times: Option<[NewTime; 2]>,
    flags: AtFlags,
) -> Result<()> {
    let [atime, mtime] = times.unwrap_or([NewTime::Now; 2]);
    let context = Context::current();
    let place = if path.is_null() && dirfd != AT_FDCWD {
        dirfd.usable_file()?;
        place_of(&context, dirfd)?
    } else {
        resolve_at(&context, dirfd, path, flags)?
    };
    change_times(&context, &place, atime, mtime)
}

/// utimensat(2).
pub fn utimensat(
    dirfd: Fd,
    path: UserString,
    times: UserPtr<[Timespec; 2]>,
    Flags(flags): Flags,
) -> Result<()> {
    let times = match times.read_if_some()? {
        Some([atime, mtime]) => Some([from_timespec(atime)?, from_timespec(mtime)?]),
        None => None,
    };
    let flags = AtFlags::parse(flags, AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH)?;
    set_times(dirfd, path, times, flags)
}

/// utimes(2).
pub fn utimes(path: UserString, times: UserPtr<[Timeval; 2]>) -> Result<()> {
    futimesat(AT_FDCWD, path, times)
}

/// futimesat(2).
pub fn futimesat(dirfd: Fd, path: UserString, times: UserPtr<[Timeval; 2]>) -> Result<()> {
    let times = match times.read_if_some()? {
        Some([atime, mtime]) => Some([from_timeval(atime)?, from_timeval(mtime)?]),
        None => None,
    };
    set_times(dirfd, path, times, AtFlags::empty())
}

/// utime(2): whole seconds.
pub fn utime(path: UserString, times: UserPtr<[i64; 2]>) -> Result<()> {
    let at = |sec| NewTime::At(Timestamp { sec, nsec: 0 });
    set_times(AT_FDCWD, path, times.read_if_some()?.map(|times| times.map(at)), AtFlags::empty())
}
