//! Looking at files: attributes, access, link targets, file systems.

use super::{AtFlags, place_of, resolve, resolve_at, start};
use crate::args::{Fd, Flags, Mode, UserPtr, UserString};
use crate::errno::{Errno, Result};
use crate::fs::context::{AT_FDCWD, Context};
use crate::fs::file::{OpenFile, Stat};
use crate::fs::inode::{Attributes, FileType, Link, Statfs};
use crate::fs::mount::MountFlags;
use crate::fs::path::Path;
use crate::fs::permission::{Access, Identity};
use crate::fs::walk::{Follow, walk};
use crate::platform::user::UserAddress;
use crate::task::current_process;
use crate::task::user_namespace::UserNamespace;

/// The user namespace of the caller.
fn own_users() -> UserNamespace {
    current_process().credentials.borrow_mut().user_namespace.clone()
}

/// Writes attributes, with the ids of the caller's user namespace.
fn show(mut stat: Stat, to: UserPtr<Stat>) -> Result<()> {
    translate(&mut stat);
    to.write(&stat)
}

fn translate(stat: &mut Stat) {
    let process = current_process();
    let users = &process.credentials.borrow_mut().user_namespace;
    if !users.is_initial() {
        (stat.uid, stat.gid) = (users.shown_user(stat.uid), users.shown_group(stat.gid));
    }
}

/// stat(2).
pub fn stat(path: UserString, to: UserPtr<Stat>) -> Result<()> {
    let path = resolve(&Context::current(), AT_FDCWD, path, Follow::Yes)?;
    show(path.inode().attributes().to_stat(), to)
}

/// lstat(2).
pub fn lstat(path: UserString, to: UserPtr<Stat>) -> Result<()> {
    let path = resolve(&Context::current(), AT_FDCWD, path, Follow::No)?;
    show(path.inode().attributes().to_stat(), to)
}

/// Attributes of an open file.
fn stat_of(open: &OpenFile) -> Result<Stat> {
    match &open.path {
        Some(path) => Ok(path.inode().attributes().to_stat()),
        None => open.file.stat(),
    }
}

/// fstat(2).
pub fn fstat(fd: Fd, to: UserPtr<Stat>) -> Result<()> {
    show(stat_of(&*fd.file()?)?, to)
}

const STAT_FLAGS: AtFlags =
    AtFlags::SYMLINK_NOFOLLOW.union(AtFlags::NO_AUTOMOUNT).union(AtFlags::EMPTY_PATH);

/// newfstatat(2).
pub fn newfstatat(
    dirfd: Fd,
    path: UserString,
    to: UserPtr<Stat>,
    Flags(flags): Flags,
) -> Result<()> {
    let flags = AtFlags::parse(flags, STAT_FLAGS)?;
    show(find_at(dirfd, path, flags)?.attributes.to_stat(), to)
}

/// What is known of a file.
struct Found {
    attributes: Attributes,
    /// The number of its mount, if it has a place in a tree.
    mount: Option<u64>,
    is_mount_root: bool,
}

impl Found {
    fn at(path: &Path) -> Self {
        Self {
            attributes: path.inode().attributes(),
            mount: path.mount().map(|mount| mount.id),
            is_mount_root: path.is_mount_root(),
        }
    }

    fn without_place(stat: &Stat) -> Self {
        Self { attributes: Attributes::from_stat(stat), mount: None, is_mount_root: false }
    }
}

fn find_at(dirfd: Fd, path: UserString, flags: AtFlags) -> Result<Found> {
    // The usual way of glibc to call fstat.
    let empty = flags.contains(AtFlags::EMPTY_PATH) && (path.is_null() || path.read::<u8>()? == 0);
    if empty && dirfd != AT_FDCWD {
        let open = dirfd.file()?;
        return match &open.path {
            Some(path) => Ok(Found::at(path)),
            None => Ok(Found::without_place(&open.file.stat()?)),
        };
    }
    let context = Context::current();
    if empty {
        return Ok(Found::at(&context.cwd));
    }
    Ok(Found::at(&resolve_at(&context, dirfd, path, flags)?))
}

/// `struct statx_timestamp`.
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct StatxTimestamp {
    sec: i64,
    nsec: u32,
    reserved: i32,
}

impl From<crate::fs::inode::Timestamp> for StatxTimestamp {
    fn from(time: crate::fs::inode::Timestamp) -> Self {
        Self { sec: time.sec, nsec: time.nsec, reserved: 0 }
    }
}

/// `struct statx` (statx(2)).
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Statx {
    mask: u32,
    blksize: u32,
    attributes: u64,
    nlink: u32,
    uid: u32,
    gid: u32,
    mode: u16,
    spare: u16,
    ino: u64,
    size: u64,
    blocks: u64,
    attributes_mask: u64,
    atime: StatxTimestamp,
    btime: StatxTimestamp,
    ctime: StatxTimestamp,
    mtime: StatxTimestamp,
    rdev_major: u32,
    rdev_minor: u32,
    dev_major: u32,
    dev_minor: u32,
    mount_id: u64,
    rest: [u64; 13],
}

const _: () = assert!(size_of::<Statx>() == 256);

const STATX_BASIC_STATS: u32 = 0x7ff;
const STATX_BTIME: u32 = 0x800;
const STATX_MNT_ID: u32 = 0x1000;
const STATX_ATTR_MOUNT_ROOT: u64 = 0x2000;
const STATX_RESERVED: u32 = 0x8000_0000;

fn major(device: u64) -> u32 {
    (((device >> 8) & 0xfff) | ((device >> 32) & !0xfff)) as u32
}

fn minor(device: u64) -> u32 {
    ((device & 0xff) | ((device >> 12) & !0xff)) as u32
}

/// statx(2).
pub fn statx(
    dirfd: Fd,
    path: UserString,
    Flags(flags): Flags,
    Flags(mask): Flags,
    to: UserAddress,
) -> Result<()> {
    let flags = AtFlags::parse(flags, STAT_FLAGS | AtFlags::STATX_SYNC)?;
    if mask & STATX_RESERVED != 0 || flags.contains(AtFlags::STATX_SYNC) {
        return Err(Errno::EINVAL);
    }
    let Found { attributes: found, mount, is_mount_root } = find_at(dirfd, path, flags)?;
    let users = own_users();
    let statx = Statx {
        mask: STATX_BASIC_STATS | STATX_BTIME | mount.map_or(0, |_| STATX_MNT_ID),
        blksize: 4096,
        attributes: if is_mount_root { STATX_ATTR_MOUNT_ROOT } else { 0 },
        nlink: found.nlink,
        uid: users.shown_user(found.uid),
        gid: users.shown_group(found.gid),
        mode: found.mode as u16,
        spare: 0,
        ino: found.ino,
        size: found.size,
        blocks: found.blocks,
        attributes_mask: STATX_ATTR_MOUNT_ROOT,
        atime: found.atime.into(),
        btime: found.btime.into(),
        ctime: found.ctime.into(),
        mtime: found.mtime.into(),
        rdev_major: major(found.rdev),
        rdev_minor: minor(found.rdev),
        dev_major: major(found.dev),
        dev_minor: minor(found.dev),
        mount_id: mount.unwrap_or(0),
        rest: [0; 13],
    };
    to.write(&statx)
}

/// access(2).
pub fn access(path: UserString, Mode(mode): Mode) -> Result<()> {
    check_access(AT_FDCWD, path, mode, AtFlags::empty())
}

/// faccessat(2): the kernel's call has no flags.
pub fn faccessat(dirfd: Fd, path: UserString, Mode(mode): Mode) -> Result<()> {
    check_access(dirfd, path, mode, AtFlags::empty())
}

/// faccessat2(2).
pub fn faccessat2(
    dirfd: Fd,
    path: UserString,
    Mode(mode): Mode,
    Flags(flags): Flags,
) -> Result<()> {
    let allowed = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EACCESS_OR_REMOVEDIR | AtFlags::EMPTY_PATH;
    let flags = AtFlags::parse(flags, allowed)?;
    check_access(dirfd, path, mode, flags)
}

fn check_access(dirfd: Fd, path: UserString, mode: u32, flags: AtFlags) -> Result<()> {
    let access = Access::from_bits(mode).ok_or(Errno::EINVAL)?;
    let mut context = Context::current();
    if !flags.contains(AtFlags::EACCESS_OR_REMOVEDIR) {
        context.identity = Identity::real(&current_process().credentials.borrow_mut());
    }
    let path = resolve_at(&context, dirfd, path, flags)?;
    if access.is_empty() {
        return Ok(());
    }
    let kind = path.inode().file_type();
    if access.contains(Access::EXECUTE)
        && kind == FileType::Regular
        && path.mount_flags().contains(MountFlags::NOEXEC)
    {
        return Err(Errno::EACCES);
    }
    context.identity.check(&**path.inode(), access)?;
    let is_kept = matches!(kind, FileType::Regular | FileType::Directory | FileType::Symlink);
    if access.contains(Access::WRITE) && is_kept { path.check_writable() } else { Ok(()) }
}

/// readlink(2).
pub fn readlink(path: UserString, buffer: UserAddress, size: i32) -> Result<usize> {
    read_link_at(AT_FDCWD, path, buffer, size)
}

/// readlinkat(2).
pub fn readlinkat(dirfd: Fd, path: UserString, buffer: UserAddress, size: i32) -> Result<usize> {
    read_link_at(dirfd, path, buffer, size)
}

fn read_link_at(dirfd: Fd, path: UserString, buffer: UserAddress, size: i32) -> Result<usize> {
    let size = usize::try_from(size).ok().filter(|&size| size > 0).ok_or(Errno::EINVAL)?;
    let path = path.read_path()?;
    let context = Context::current();
    let link = if path.is_empty() && dirfd != AT_FDCWD {
        // readlinkat(2): an empty path means the link that the descriptor names.
        let link = place_of(&context, dirfd)?;
        if link.inode().file_type() != FileType::Symlink {
            return Err(Errno::ENOENT);
        }
        link
    } else {
        walk(&context, &*start(&context, dirfd, &path)?, &path, Follow::No)?
    };
    let target = match link.inode().read_link()? {
        Link::Text(target) => target,
        Link::Magic(target) => target.absolute_name(&context.root).display(),
    };
    let len = target.len().min(size);
    buffer.write_bytes(&target[..len])?;
    Ok(len)
}

/// statfs(2).
pub fn statfs(path: UserString, to: UserPtr<Statfs>) -> Result<()> {
    to.write(&statfs_of(&resolve(&Context::current(), AT_FDCWD, path, Follow::Yes)?))
}

/// fstatfs(2).
pub fn fstatfs(fd: Fd, to: UserPtr<Statfs>) -> Result<()> {
    to.write(&statfs_of(&place_of(&Context::current(), fd)?))
}

fn statfs_of(path: &Path) -> Statfs {
    let statfs = path.inode().statfs();
    path.mount().map_or(statfs, |mount| mount.complete_statfs(statfs))
}
