//! Changing the tree of mounts: mount(2), umount2(2), pivot_root(2).

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::{resolve, start};
use crate::args::{Flags, UserString, Word};
use crate::errno::{Errno, Result};
use crate::fs::context::{AT_FDCWD, Context};
use crate::fs::mount::change::{self, Arguments, Request, Unmount};
use crate::fs::mount::{MountNamespace, pivot};
use crate::fs::path::Path;
use crate::fs::walk::{Follow, PATH_MAX, walk};
use crate::platform::user::UserAddress;
use crate::task::{Capabilities, current_process};

/// Bytes of options that are read (`copy_mount_options`, fs/namespace.c).
const OPTIONS_MAX: usize = 4096;

/// `EPERM` unless the caller may change its tree of mounts (`may_mount`).
fn check_may_mount(context: &Context) -> Result<()> {
    let process = current_process();
    let credentials = process.credentials.borrow_mut();
    credentials.require_in(context.namespace.common.owner(), Capabilities::SYS_ADMIN)
}

fn own_namespace() -> Arc<MountNamespace> {
    current_process().fs().borrow_mut().namespace.clone()
}

/// A string that may be missing; `EINVAL` if it is too long (`strndup_user`, mm/util.c).
fn read_text(text: UserString) -> Result<Option<Vec<u8>>> {
    if text.is_null() {
        return Ok(None);
    }
    let read = text.read_string(PATH_MAX);
    read.map(Some).map_err(|error| match error {
        Errno::ENAMETOOLONG => Errno::EINVAL,
        error => error,
    })
}

/// A page of options at most, as much as can be read, up to its NUL; `EFAULT` if nothing can.
fn read_options(from: UserAddress) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut at = from;
    while bytes.len() < OPTIONS_MAX && !from.is_null() {
        let Ok(byte) = at.read::<u8>() else { break };
        if byte == 0 {
            return Ok(bytes);
        }
        bytes.push(byte);
        at = UserAddress(at.0.wrapping_add(1));
    }
    if bytes.is_empty() && !from.is_null() {
        return Err(Errno::EFAULT);
    }
    // The last byte of a page makes way for a NUL.
    bytes.truncate(OPTIONS_MAX - 1);
    Ok(bytes)
}

/// mount(2).
pub fn mount(
    source: UserString,
    target: UserString,
    kind: UserString,
    Word(flags): Word,
    options: UserAddress,
) -> Result<()> {
    let kind = read_text(kind)?;
    let source = read_text(source)?;
    let options = read_options(options)?;
    let context = Context::current();
    let at = resolve(&context, AT_FDCWD, target, Follow::Yes)?;
    let request = Request::from_bits_retain(flags).without_magic();
    if request.contains(Request::NOUSER) {
        return Err(Errno::EINVAL);
    }
    check_may_mount(&context)?;
    let (kind, source) = (kind.as_deref(), source.as_deref());
    let arguments = Arguments { request, kind, source, options: &options };
    let find = |path: &[u8]| walk(&context, &*start(&context, AT_FDCWD, path)?, path, Follow::Yes);
    change::mount(&own_namespace(), at, &arguments, find)
}

/// umount2(2).
pub fn umount2(target: UserString, Flags(flags): Flags) -> Result<()> {
    let how = Unmount::from_bits(flags).ok_or(Errno::EINVAL)?;
    let follow = if how.contains(Unmount::NOFOLLOW) { Follow::No } else { Follow::Yes };
    let context = Context::current();
    let at = resolve(&context, AT_FDCWD, target, follow)?;
    check_may_mount(&context)?;
    let root = context.root.clone();
    // What the caller holds for this call alone does not make a mount busy.
    drop(context);
    change::unmount(&own_namespace(), &root, at, how)
}

/// pivot_root(2).
pub fn pivot_root(new_root: UserString, put_old: UserString) -> Result<()> {
    let context = Context::current();
    check_may_mount(&context)?;
    let directory = |path: UserString| -> Result<Path> {
        let found = resolve(&context, AT_FDCWD, path, Follow::Yes)?;
        if found.is_directory() { Ok(found) } else { Err(Errno::ENOTDIR) }
    };
    let (new, put_old) = (directory(new_root)?, directory(put_old)?);
    pivot::pivot_root(&own_namespace(), &context.root, &new, put_old)
}
