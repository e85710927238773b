//! Creating, linking, removing and renaming.

use super::{AtFlags, resolve_at, start};
use crate::args::Args;
use crate::errno::{Errno, Result};
use crate::fs::context::{AT_FDCWD, Context};
use crate::fs::inode::{FileType, NewKind, S_IFMT};
use crate::fs::namespace::{self, Removal, RenameKind};
use crate::platform::user::UserAddress;
use crate::task::Capabilities;

fn create(dirfd: i32, path: UserAddress, kind: NewKind, permissions: u32) -> Result<u64> {
    let path = path.read_path()?;
    let context = Context::current();
    namespace::create(&context, &start(&context, dirfd, &path)?, &path, kind, permissions)?;
    Ok(0)
}

/// mkdir(2).
pub fn mkdir(args: &Args) -> Result<u64> {
    create(AT_FDCWD, args.address(0), NewKind::Directory, args.u32(1) & 0o1777)
}

/// mkdirat(2).
pub fn mkdirat(args: &Args) -> Result<u64> {
    create(args.fd(0), args.address(1), NewKind::Directory, args.u32(2) & 0o1777)
}

/// mknod(2).
pub fn mknod(args: &Args) -> Result<u64> {
    make_node(AT_FDCWD, args.address(0), args.u32(1), args.u64(2))
}

/// mknodat(2).
pub fn mknodat(args: &Args) -> Result<u64> {
    make_node(args.fd(0), args.address(1), args.u32(2), args.u64(3))
}

fn make_node(dirfd: i32, path: UserAddress, mode: u32, device: u64) -> Result<u64> {
    let kind = match FileType::from_mode(mode) {
        Some(FileType::Regular) => NewKind::Regular,
        None if mode & S_IFMT == 0 => NewKind::Regular,
        Some(FileType::Fifo) => NewKind::Fifo,
        Some(FileType::Socket) => NewKind::Socket,
        Some(FileType::CharacterDevice) if Context::current().identity.can(Capabilities::MKNOD) => {
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
pub fn symlink(args: &Args) -> Result<u64> {
    make_link(args.address(0), AT_FDCWD, args.address(1))
}

/// symlinkat(2).
pub fn symlinkat(args: &Args) -> Result<u64> {
    make_link(args.address(0), args.fd(1), args.address(2))
}

fn make_link(target: UserAddress, dirfd: i32, path: UserAddress) -> Result<u64> {
    let target = target.read_path()?;
    if target.is_empty() {
        return Err(Errno::ENOENT);
    }
    create(dirfd, path, NewKind::Symlink(target), 0o777)
}

/// link(2).
pub fn link(args: &Args) -> Result<u64> {
    hard_link(AT_FDCWD, args.address(0), AT_FDCWD, args.address(1), AtFlags::empty())
}

/// linkat(2).
pub fn linkat(args: &Args) -> Result<u64> {
    let flags = AtFlags::parse(args.u32(4), AtFlags::SYMLINK_FOLLOW | AtFlags::EMPTY_PATH)?;
    hard_link(args.fd(0), args.address(1), args.fd(2), args.address(3), flags)
}

fn hard_link(
    old_dir: i32,
    old: UserAddress,
    new_dir: i32,
    new: UserAddress,
    flags: AtFlags,
) -> Result<u64> {
    let context = Context::current();
    // link(2) does not follow by default: the inverse of the other calls.
    let follow = if flags.contains(AtFlags::SYMLINK_FOLLOW) {
        AtFlags::empty()
    } else {
        AtFlags::SYMLINK_NOFOLLOW
    };
    let target = resolve_at(&context, old_dir, old, follow | (flags & AtFlags::EMPTY_PATH))?;
    let path = new.read_path()?;
    namespace::link(&context, &target, &start(&context, new_dir, &path)?, &path)?;
    Ok(0)
}

fn remove(dirfd: i32, path: UserAddress, removal: Removal) -> Result<u64> {
    let path = path.read_path()?;
    let context = Context::current();
    namespace::remove(&context, &start(&context, dirfd, &path)?, &path, removal)?;
    Ok(0)
}

/// unlink(2).
pub fn unlink(args: &Args) -> Result<u64> {
    remove(AT_FDCWD, args.address(0), Removal::File)
}

/// rmdir(2).
pub fn rmdir(args: &Args) -> Result<u64> {
    remove(AT_FDCWD, args.address(0), Removal::Directory)
}

/// unlinkat(2).
pub fn unlinkat(args: &Args) -> Result<u64> {
    let flags = AtFlags::parse(args.u32(2), AtFlags::EACCESS_OR_REMOVEDIR)?;
    let removal = if flags.is_empty() { Removal::File } else { Removal::Directory };
    remove(args.fd(0), args.address(1), removal)
}

/// rename(2).
pub fn rename(args: &Args) -> Result<u64> {
    rename_at(AT_FDCWD, args.address(0), AT_FDCWD, args.address(1), RenameKind::Replace)
}

/// renameat(2).
pub fn renameat(args: &Args) -> Result<u64> {
    rename_at(args.fd(0), args.address(1), args.fd(2), args.address(3), RenameKind::Replace)
}

const RENAME_NOREPLACE: u32 = 1;
const RENAME_EXCHANGE: u32 = 2;

/// renameat2(2).
pub fn renameat2(args: &Args) -> Result<u64> {
    let kind = match args.u32(4) {
        0 => RenameKind::Replace,
        RENAME_NOREPLACE => RenameKind::NoReplace,
        RENAME_EXCHANGE => RenameKind::Exchange,
        _ => return Err(Errno::EINVAL),
    };
    rename_at(args.fd(0), args.address(1), args.fd(2), args.address(3), kind)
}

fn rename_at(
    old_dir: i32,
    old: UserAddress,
    new_dir: i32,
    new: UserAddress,
    kind: RenameKind,
) -> Result<u64> {
    let (old, new) = (old.read_path()?, new.read_path()?);
    let context = Context::current();
    let from = start(&context, old_dir, &old)?;
    let to = start(&context, new_dir, &new)?;
    namespace::rename(&context, (&from, &old), (&to, &new), kind)?;
    Ok(0)
}
