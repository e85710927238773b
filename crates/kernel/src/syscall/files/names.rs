//! Creating, linking, removing and renaming.

use super::{AtFlags, resolve_at, start};
use crate::args::{Fd, Flags, Mode, UserString, Word};
use crate::errno::{Errno, Result};
use crate::fs::context::{AT_FDCWD, Context};
use crate::fs::inode::{FileType, NewKind, S_IFMT};
use crate::fs::namespace::{self, Removal, RenameKind};
use crate::task::Capabilities;

fn create(dirfd: Fd, path: UserString, kind: NewKind, permissions: u32) -> Result<()> {
    let path = path.read_path()?;
    let context = Context::current();
    namespace::create(&context, &*start(&context, dirfd, &path)?, &path, kind, permissions)
        .map(drop)
}

/// mkdir(2).
pub fn mkdir(path: UserString, mode: Mode) -> Result<()> {
    mkdirat(AT_FDCWD, path, mode)
}

/// mkdirat(2).
pub fn mkdirat(dirfd: Fd, path: UserString, Mode(mode): Mode) -> Result<()> {
    create(dirfd, path, NewKind::Directory, mode & 0o1777)
}

/// mknod(2).
pub fn mknod(path: UserString, mode: Mode, device: Word) -> Result<()> {
    mknodat(AT_FDCWD, path, mode, device)
}

/// mknodat(2).
pub fn mknodat(dirfd: Fd, path: UserString, Mode(mode): Mode, Word(device): Word) -> Result<()> {
    let kind = match FileType::from_mode(mode) {
        Some(FileType::Regular) => NewKind::Regular,
        None if mode & S_IFMT == 0 => NewKind::Regular,
        Some(FileType::Fifo) => NewKind::Fifo,
        Some(FileType::Socket) => NewKind::Socket,
        // The device 0 is none: it says in an overlay that a file is gone.
        Some(FileType::CharacterDevice)
            if device & 0xffff_ffff == 0
                || Context::current().identity.can(Capabilities::MKNOD) =>
        {
            NewKind::CharacterDevice(device & 0xffff_ffff)
        }
        // There are no block devices in a sandbox.
        Some(FileType::CharacterDevice | FileType::BlockDevice | FileType::Directory) => {
            return Err(Errno::EPERM);
        }
        Some(FileType::Symlink) | None => return Err(Errno::EINVAL),
    };
    create(dirfd, path, kind, mode)
}

/// symlink(2).
pub fn symlink(target: UserString, path: UserString) -> Result<()> {
    symlinkat(target, AT_FDCWD, path)
}

/// symlinkat(2).
pub fn symlinkat(target: UserString, dirfd: Fd, path: UserString) -> Result<()> {
    let target = target.read_path()?;
    if target.is_empty() {
        return Err(Errno::ENOENT);
    }
    create(dirfd, path, NewKind::Symlink(target), 0o777)
}

/// link(2).
pub fn link(old: UserString, new: UserString) -> Result<()> {
    linkat(AT_FDCWD, old, AT_FDCWD, new, Flags(0))
}

/// linkat(2).
pub fn linkat(
    old_dirfd: Fd,
    old: UserString,
    new_dirfd: Fd,
    new: UserString,
    Flags(flags): Flags,
) -> Result<()> {
    let flags = AtFlags::parse(flags, AtFlags::SYMLINK_FOLLOW | AtFlags::EMPTY_PATH)?;
    let context = Context::current();
    // link(2) does not follow by default: the inverse of the other calls.
    let follow = if flags.contains(AtFlags::SYMLINK_FOLLOW) {
        AtFlags::empty()
    } else {
        AtFlags::SYMLINK_NOFOLLOW
    };
    let target = resolve_at(&context, old_dirfd, old, follow | (flags & AtFlags::EMPTY_PATH))?;
    let path = new.read_path()?;
    namespace::link(&context, &target, &*start(&context, new_dirfd, &path)?, &path)
}

fn remove(dirfd: Fd, path: UserString, removal: Removal) -> Result<()> {
    let path = path.read_path()?;
    let context = Context::current();
    namespace::remove(&context, &*start(&context, dirfd, &path)?, &path, removal)
}

/// unlink(2).
pub fn unlink(path: UserString) -> Result<()> {
    remove(AT_FDCWD, path, Removal::File)
}

/// rmdir(2).
pub fn rmdir(path: UserString) -> Result<()> {
    remove(AT_FDCWD, path, Removal::Directory)
}

/// unlinkat(2).
pub fn unlinkat(dirfd: Fd, path: UserString, Flags(flags): Flags) -> Result<()> {
    let flags = AtFlags::parse(flags, AtFlags::EACCESS_OR_REMOVEDIR)?;
    let removal = if flags.is_empty() { Removal::File } else { Removal::Directory };
    remove(dirfd, path, removal)
}

/// rename(2).
pub fn rename(old: UserString, new: UserString) -> Result<()> {
    renameat2(AT_FDCWD, old, AT_FDCWD, new, Flags(0))
}

/// renameat(2).
pub fn renameat(old_dirfd: Fd, old: UserString, new_dirfd: Fd, new: UserString) -> Result<()> {
    renameat2(old_dirfd, old, new_dirfd, new, Flags(0))
}

const RENAME_NOREPLACE: u32 = 1;
const RENAME_EXCHANGE: u32 = 2;

/// renameat2(2).
pub fn renameat2(
    old_dirfd: Fd,
    old: UserString,
    new_dirfd: Fd,
    new: UserString,
    Flags(flags): Flags,
) -> Result<()> {
    let kind = match flags {
        0 => RenameKind::Replace,
        RENAME_NOREPLACE => RenameKind::NoReplace,
        RENAME_EXCHANGE => RenameKind::Exchange,
        _ => return Err(Errno::EINVAL),
    };
    let (old, new) = (old.read_path()?, new.read_path()?);
    let context = Context::current();
    let from = start(&context, old_dirfd, &old)?;
    let to = start(&context, new_dirfd, &new)?;
    namespace::rename(&context, (&from, &old), (&to, &new), kind)
}
