//! inotify_init(2), inotify_add_watch(2), inotify_rm_watch(2), fanotify_init(2).

use alloc::sync::Arc;
use core::any::Any;

use super::resolve;
use crate::args::{Fd, Flags, UserString};
use crate::errno::{Errno, Result};
use crate::fs::context::{AT_FDCWD, Context};
use crate::fs::fd_table::install;
use crate::fs::file::{OpenFile, OpenFlags};
use crate::fs::inotify::{Inotify, Mask};
use crate::fs::permission::Access;
use crate::fs::walk::Follow;
use crate::state::kernel;

/// inotify_init(2).
pub fn inotify_init() -> Result<i32> {
    inotify_init1(Flags(0))
}

/// inotify_init1(2).
pub fn inotify_init1(Flags(flags): Flags) -> Result<i32> {
    let flags = OpenFlags::from_bits_retain(flags);
    if !(OpenFlags::CLOEXEC | OpenFlags::NONBLOCK).contains(flags) {
        return Err(Errno::EINVAL);
    }
    let instance = kernel().fs.watches.instance()?;
    install(OpenFile::new(instance, flags & OpenFlags::NONBLOCK, None), flags)
}

fn instance(open: &OpenFile) -> Result<Arc<Inotify>> {
    let file: Arc<dyn Any + Send + Sync> = open.file.clone();
    file.downcast().map_err(|_| Errno::EINVAL)
}

/// inotify_add_watch(2).
pub fn inotify_add_watch(fd: Fd, path: UserString, Flags(bits): Flags) -> Result<i32> {
    let mask = Mask::from_bits_truncate(bits);
    // Unknown bits are refused, and so is a mask that asks for nothing.
    if Mask::from_bits(bits).is_none() || mask.is_empty() {
        return Err(Errno::EINVAL);
    }
    let open = fd.file()?;
    if mask.contains(Mask::MASK_ADD | Mask::MASK_CREATE) {
        return Err(Errno::EINVAL);
    }
    let instance = instance(&open)?;
    let follow = if mask.contains(Mask::DONT_FOLLOW) { Follow::No } else { Follow::Yes };
    let context = Context::current();
    let path = resolve(&context, AT_FDCWD, path, follow)?;
    if mask.contains(Mask::ONLYDIR) && !path.is_directory() {
        return Err(Errno::ENOTDIR);
    }
    context.identity.check(&**path.inode(), Access::READ)?;
    kernel().fs.watches.add(&instance, path.inode(), mask)
}

/// inotify_rm_watch(2).
pub fn inotify_rm_watch(fd: Fd, watch: i32) -> Result<()> {
    let open = fd.file()?;
    kernel().fs.watches.remove(&*instance(&open)?, watch)
}
