//! System calls on files: they translate arguments and delegate.

pub mod aio;
pub mod attributes;
pub mod control;
pub mod copy;
pub mod descriptors;
pub mod directory;
pub mod extended;
pub mod io;
pub mod locking;
pub mod mounting;
pub mod names;
pub mod pipes;
pub mod space;
pub mod splice;
pub mod stat;
pub mod sync;
pub mod watching;

use bitflags::bitflags;

use alloc::borrow::Cow;

use crate::args::{Fd, UserString};
use crate::errno::{Errno, Result};
use crate::fs::context::Context;
use crate::fs::open::OpenFileInode;
use crate::fs::path::Path;
use crate::fs::walk::{Follow, walk};
use crate::task::current_process;
use crate::task::process::RLIMIT_NOFILE;

bitflags! {
    /// Flags of the `*at` calls (`AT_*` in linux/fcntl.h).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct AtFlags: u32 {
        const SYMLINK_NOFOLLOW = 0x100;
        /// `AT_EACCESS` of faccessat2(2), `AT_REMOVEDIR` of unlinkat(2).
        const EACCESS_OR_REMOVEDIR = 0x200;
        const SYMLINK_FOLLOW = 0x400;
        const NO_AUTOMOUNT = 0x800;
        const EMPTY_PATH = 0x1000;
        /// `AT_STATX_SYNC_TYPE`.
        const STATX_SYNC = 0x6000;
    }
}

impl AtFlags {
    /// `EINVAL` for flags beyond `allowed`.
    pub(super) fn parse(bits: u32, allowed: AtFlags) -> Result<Self> {
        Self::from_bits(bits).filter(|flags| allowed.contains(*flags)).ok_or(Errno::EINVAL)
    }

    /// What to do with a link at the end, for calls that follow by default.
    pub(super) fn follow(self) -> Follow {
        if self.contains(Self::SYMLINK_NOFOLLOW) { Follow::No } else { Follow::Yes }
    }
}

/// `RLIMIT_NOFILE`.
pub(super) fn descriptor_limit() -> u64 {
    current_process().limits.borrow_mut()[RLIMIT_NOFILE].current
}

/// Resolves the path argument of a call.
pub(super) fn resolve(
    context: &Context,
    dirfd: Fd,
    path: UserString,
    follow: Follow,
) -> Result<Path> {
    let path = path.read_path()?;
    walk(context, &*start(context, dirfd, &path)?, &path, follow)
}

/// Where `path` starts. An absolute one needs no valid descriptor.
pub(super) fn start<'c>(context: &'c Context, dirfd: Fd, path: &[u8]) -> Result<Cow<'c, Path>> {
    if path.first() == Some(&b'/') {
        Ok(Cow::Borrowed(&context.root))
    } else {
        context.start(dirfd)
    }
}

/// As [`resolve`], but an empty path with `AT_EMPTY_PATH` means the descriptor itself.
pub(super) fn resolve_at(
    context: &Context,
    dirfd: Fd,
    path: UserString,
    flags: AtFlags,
) -> Result<Path> {
    let path = path.read_path()?;
    if path.is_empty() && flags.contains(AtFlags::EMPTY_PATH) {
        return place_of(context, dirfd);
    }
    walk(context, &*start(context, dirfd, &path)?, &path, flags.follow())
}

/// The place that a descriptor stands for, `AT_FDCWD` included.
pub(super) fn place_of(context: &Context, fd: Fd) -> Result<Path> {
    if fd == crate::fs::context::AT_FDCWD {
        return Ok(context.cwd.clone());
    }
    Ok(OpenFileInode::path(&*fd.file()?))
}
