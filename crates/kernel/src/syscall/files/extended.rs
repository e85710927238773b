//! Extended attributes (xattr(7)), and other calls that answer as Linux does
//! without the feature.

use alloc::vec::Vec;

use super::{place_of, resolve};
use crate::args::{Fd, Flags, UserPtr, UserString};
use crate::errno::{Errno, Result};
use crate::fs::context::{AT_FDCWD, Context};
use crate::fs::inotify::Mask;
use crate::fs::notify;
use crate::fs::path::Path;
use crate::fs::walk::Follow;
use crate::fs::xattr::{
    CAPABILITY, Existing, LIST_MAX, NAME_MAX, Use, VALUE_MAX, attributes, is_capability_value,
};

fn read_name(name: UserString) -> Result<Vec<u8>> {
    let name = name.read_string(NAME_MAX + 1).map_err(|error| match error {
        Errno::ENAMETOOLONG => Errno::ERANGE,
        error => error,
    })?;
    if name.is_empty() || name.len() > NAME_MAX { Err(Errno::ERANGE) } else { Ok(name) }
}

/// The file that the first argument names.
#[derive(Clone, Copy)]
enum Named {
    Path(UserString, Follow),
    Descriptor(Fd),
}

impl Named {
    fn place(self, context: &Context) -> Result<Path> {
        match self {
            Named::Path(path, follow) => resolve(context, AT_FDCWD, path, follow),
            Named::Descriptor(fd) => {
                fd.usable_file()?;
                place_of(context, fd)
            }
        }
    }
}

/// Writes a value or list; a size of 0 asks how large it is.
fn give(bytes: &[u8], to: UserPtr<u8>, size: usize) -> Result<usize> {
    if size > 0 {
        if bytes.len() > size {
            return Err(Errno::ERANGE);
        }
        to.write_slice(bytes)?;
    }
    Ok(bytes.len())
}

fn get(file: Named, name: UserString, value: UserPtr<u8>, size: usize) -> Result<usize> {
    let context = Context::current();
    // A path is looked at before the name, a descriptor before both.
    let path = file.place(&context)?;
    let name = read_name(name)?;
    let all = attributes(&context.identity, &**path.inode(), &name, Use::Read)?;
    give(&all.get(&name)?, value, size)
}

fn set(file: Named, name: UserString, value: UserPtr<u8>, size: usize, flags: u32) -> Result<()> {
    const XATTR_CREATE: u32 = 1;
    const XATTR_REPLACE: u32 = 2;
    let existing = match flags {
        0 => Existing::Any,
        XATTR_CREATE => Existing::Absent,
        XATTR_REPLACE => Existing::Present,
        both if both == XATTR_CREATE | XATTR_REPLACE => Existing::Present,
        _ => return Err(Errno::EINVAL),
    };
    let name = read_name(name)?;
    if size > VALUE_MAX {
        return Err(Errno::E2BIG);
    }
    let mut bytes = alloc::vec![0; size];
    if size > 0 {
        value.read_slice(&mut bytes)?;
    }
    let context = Context::current();
    let path = file.place(&context)?;
    path.check_writable()?;
    if name == CAPABILITY && !is_capability_value(&bytes) {
        return Err(Errno::EINVAL);
    }
    let all = attributes(&context.identity, &**path.inode(), &name, Use::Write)?;
    if flags == XATTR_CREATE | XATTR_REPLACE && all.get(&name).is_ok() {
        return Err(Errno::EEXIST);
    }
    all.set(&name, &bytes, existing)?;
    changed(&path);
    Ok(())
}

fn remove(file: Named, name: UserString) -> Result<()> {
    let context = Context::current();
    let path = file.place(&context)?;
    let name = read_name(name)?;
    path.check_writable()?;
    attributes(&context.identity, &**path.inode(), &name, Use::Write)?.remove(&name)?;
    changed(&path);
    Ok(())
}

fn changed(path: &Path) {
    path.inode().note_extended_change();
    notify::at(path, Mask::ATTRIB);
}

fn list_names(file: Named, list: UserPtr<u8>, size: usize) -> Result<usize> {
    let context = Context::current();
    let path = file.place(&context)?;
    let names = path.inode().extended_attributes().map(|all| all.list(&context.identity));
    let names = names.unwrap_or_default();
    check_list(names.len(), size)?;
    give(&names, list, size)
}

/// `E2BIG` if so many bytes of names are more than any list (`listxattr`, fs/xattr.c).
fn check_list(len: usize, size: usize) -> Result<()> {
    if len > LIST_MAX && size >= LIST_MAX { Err(Errno::E2BIG) } else { Ok(()) }
}

/// getxattr(2).
pub fn getxattr(
    path: UserString,
    name: UserString,
    value: UserPtr<u8>,
    size: usize,
) -> Result<usize> {
    get(Named::Path(path, Follow::Yes), name, value, size)
}

/// lgetxattr(2).
pub fn lgetxattr(
    path: UserString,
    name: UserString,
    value: UserPtr<u8>,
    size: usize,
) -> Result<usize> {
    get(Named::Path(path, Follow::No), name, value, size)
}

/// fgetxattr(2).
pub fn fgetxattr(fd: Fd, name: UserString, value: UserPtr<u8>, size: usize) -> Result<usize> {
    get(Named::Descriptor(fd), name, value, size)
}

/// setxattr(2).
pub fn setxattr(
    path: UserString,
    name: UserString,
    value: UserPtr<u8>,
    size: usize,
    Flags(flags): Flags,
) -> Result<()> {
    set(Named::Path(path, Follow::Yes), name, value, size, flags)
}

/// lsetxattr(2).
pub fn lsetxattr(
    path: UserString,
    name: UserString,
    value: UserPtr<u8>,
    size: usize,
    Flags(flags): Flags,
) -> Result<()> {
    set(Named::Path(path, Follow::No), name, value, size, flags)
}

/// fsetxattr(2).
pub fn fsetxattr(
    fd: Fd,
    name: UserString,
    value: UserPtr<u8>,
    size: usize,
    Flags(flags): Flags,
) -> Result<()> {
    set(Named::Descriptor(fd), name, value, size, flags)
}

/// removexattr(2).
pub fn removexattr(path: UserString, name: UserString) -> Result<()> {
    remove(Named::Path(path, Follow::Yes), name)
}

/// lremovexattr(2).
pub fn lremovexattr(path: UserString, name: UserString) -> Result<()> {
    remove(Named::Path(path, Follow::No), name)
}

/// fremovexattr(2).
pub fn fremovexattr(fd: Fd, name: UserString) -> Result<()> {
    remove(Named::Descriptor(fd), name)
}

/// listxattr(2).
pub fn listxattr(path: UserString, list: UserPtr<u8>, size: usize) -> Result<usize> {
    list_names(Named::Path(path, Follow::Yes), list, size)
}

/// llistxattr(2).
pub fn llistxattr(path: UserString, list: UserPtr<u8>, size: usize) -> Result<usize> {
    list_names(Named::Path(path, Follow::No), list, size)
}

/// flistxattr(2).
pub fn flistxattr(fd: Fd, list: UserPtr<u8>, size: usize) -> Result<usize> {
    list_names(Named::Descriptor(fd), list, size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_a_bound() {
        assert_eq!(check_list(LIST_MAX, LIST_MAX), Ok(()));
        assert_eq!(check_list(LIST_MAX + 1, LIST_MAX), Err(Errno::E2BIG));
        // Those who have less room hear that it is too little, and those who ask how much it is.
        assert_eq!(check_list(LIST_MAX + 1, LIST_MAX - 1), Ok(()));
        assert_eq!(check_list(LIST_MAX + 1, 0), Ok(()));
    }
}
