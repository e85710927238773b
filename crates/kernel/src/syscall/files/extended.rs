//! Extended attributes (xattr(7)), and other calls that answer as Linux does
//! without the feature.

use alloc::vec::Vec;

use super::{place_of, resolve, usable_file};
use crate::args::Args;
use crate::errno::{Errno, Result};
use crate::fs::context::{AT_FDCWD, Context};
use crate::fs::inotify::Mask;
use crate::fs::notify;
use crate::fs::path::Path;
use crate::fs::walk::Follow;
use crate::fs::xattr::{Existing, NAME_MAX, SIZE_MAX, Use, attributes};
use crate::platform::user::UserAddress;

fn read_name(name: UserAddress) -> Result<Vec<u8>> {
    let name = name.read_string(NAME_MAX + 1).map_err(|error| match error {
        Errno::ENAMETOOLONG => Errno::ERANGE,
        error => error,
    })?;
    if name.is_empty() || name.len() > NAME_MAX { Err(Errno::ERANGE) } else { Ok(name) }
}

/// The file that the first argument names: by path, or by descriptor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Path(Follow),
    Descriptor,
}

fn place(context: &Context, args: &Args, by: By) -> Result<Path> {
    match by {
        By::Path(follow) => resolve(context, AT_FDCWD, args.address(0), follow),
        By::Descriptor => {
            usable_file(args.fd(0))?;
            place_of(context, args.fd(0))
        }
    }
}

/// Writes a value or list; a size of 0 asks how large it is.
fn give(bytes: &[u8], to: UserAddress, size: usize) -> Result<u64> {
    if size > 0 {
        if bytes.len() > size {
            return Err(Errno::ERANGE);
        }
        to.write_bytes(bytes)?;
    }
    Ok(bytes.len() as u64)
}

fn get_by(args: &Args, by: By) -> Result<u64> {
    let context = Context::current();
    // A path is looked at before the name, a descriptor before both.
    let path = place(&context, args, by)?;
    let name = read_name(args.address(1))?;
    let all = attributes(&context.identity, &**path.inode(), &name, Use::Read)?;
    give(&all.get(&name)?, args.address(2), args.usize(3))
}

fn set_by(args: &Args, by: By) -> Result<u64> {
    const XATTR_CREATE: u32 = 1;
    const XATTR_REPLACE: u32 = 2;
    let existing = match args.u32(4) {
        0 => Existing::Any,
        XATTR_CREATE => Existing::Absent,
        XATTR_REPLACE => Existing::Present,
        flags if flags == XATTR_CREATE | XATTR_REPLACE => Existing::Present,
        _ => return Err(Errno::EINVAL),
    };
    let name = read_name(args.address(1))?;
    let size = args.usize(3);
    if size > SIZE_MAX {
        return Err(Errno::E2BIG);
    }
    let mut value = alloc::vec![0; size];
    if size > 0 {
        args.address(2).read_bytes(&mut value)?;
    }
    let context = Context::current();
    let path = place(&context, args, by)?;
    let all = attributes(&context.identity, &**path.inode(), &name, Use::Write)?;
    if args.u32(4) == XATTR_CREATE | XATTR_REPLACE && all.get(&name).is_ok() {
        return Err(Errno::EEXIST);
    }
    all.set(&name, &value, existing)?;
    changed(&path);
    Ok(0)
}

fn remove_by(args: &Args, by: By) -> Result<u64> {
    let context = Context::current();
    let path = place(&context, args, by)?;
    let name = read_name(args.address(1))?;
    attributes(&context.identity, &**path.inode(), &name, Use::Write)?.remove(&name)?;
    changed(&path);
    Ok(0)
}

fn changed(path: &Path) {
    path.inode().note_extended_change();
    notify::at(path, Mask::ATTRIB);
}

fn list_by(args: &Args, by: By) -> Result<u64> {
    let context = Context::current();
    let path = place(&context, args, by)?;
    let names = path.inode().extended_attributes().map(|all| all.list(&context.identity));
    give(&names.unwrap_or_default(), args.address(1), args.usize(2))
}

/// getxattr(2).
pub fn get(args: &Args) -> Result<u64> {
    get_by(args, By::Path(Follow::Yes))
}

/// lgetxattr(2).
pub fn get_link(args: &Args) -> Result<u64> {
    get_by(args, By::Path(Follow::No))
}

/// fgetxattr(2).
pub fn get_descriptor(args: &Args) -> Result<u64> {
    get_by(args, By::Descriptor)
}

/// setxattr(2).
pub fn set(args: &Args) -> Result<u64> {
    set_by(args, By::Path(Follow::Yes))
}

/// lsetxattr(2).
pub fn set_link(args: &Args) -> Result<u64> {
    set_by(args, By::Path(Follow::No))
}

/// fsetxattr(2).
pub fn set_descriptor(args: &Args) -> Result<u64> {
    set_by(args, By::Descriptor)
}

/// removexattr(2).
pub fn remove(args: &Args) -> Result<u64> {
    remove_by(args, By::Path(Follow::Yes))
}

/// lremovexattr(2).
pub fn remove_link(args: &Args) -> Result<u64> {
    remove_by(args, By::Path(Follow::No))
}

/// fremovexattr(2).
pub fn remove_descriptor(args: &Args) -> Result<u64> {
    remove_by(args, By::Descriptor)
}

/// listxattr(2).
pub fn list(args: &Args) -> Result<u64> {
    list_by(args, By::Path(Follow::Yes))
}

/// llistxattr(2).
pub fn list_link(args: &Args) -> Result<u64> {
    list_by(args, By::Path(Follow::No))
}

/// flistxattr(2).
pub fn list_descriptor(args: &Args) -> Result<u64> {
    list_by(args, By::Descriptor)
}

/// name_to_handle_at(2), open_by_handle_at(2): file systems without handles.
pub fn no_handles(_: &Args) -> Result<u64> {
    Err(Errno::EOPNOTSUPP)
}

/// ustat(2): obsolete; only for devices that are mounted.
pub fn ustat(_: &Args) -> Result<u64> {
    Err(Errno::EINVAL)
}

/// mount(2), umount2(2), pivot_root(2): the tree is put together at boot.
pub fn no_mounts(_: &Args) -> Result<u64> {
    Err(Errno::EPERM)
}
