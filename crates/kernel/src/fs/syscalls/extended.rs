//! Extended attributes, which no file system here has (xattr(7)), and other
//! calls that answer as Linux does without the feature.

use super::super::walk::Follow;
use super::names::must_exist;
use super::usable_file;
use crate::errno::{Errno, Result};
use crate::platform::user::UserAddress;
use crate::syscall::Args;

/// `XATTR_NAME_MAX`.
const NAME_MAX: usize = 255;

fn check_name(name: UserAddress) -> Result<()> {
    let name = name.read_string(NAME_MAX).map_err(|error| match error {
        Errno::ENAMETOOLONG => Errno::ERANGE,
        error => error,
    })?;
    if name.is_empty() { Err(Errno::ERANGE) } else { Ok(()) }
}

/// getxattr(2) and removexattr(2).
pub fn named(args: &Args) -> Result<u64> {
    check_name(args.address(1))?;
    must_exist(args.address(0), Follow::Yes)?;
    Err(Errno::EOPNOTSUPP)
}

/// lgetxattr(2) and lremovexattr(2).
pub fn named_link(args: &Args) -> Result<u64> {
    check_name(args.address(1))?;
    must_exist(args.address(0), Follow::No)?;
    Err(Errno::EOPNOTSUPP)
}

/// fgetxattr(2) and fremovexattr(2).
pub fn named_descriptor(args: &Args) -> Result<u64> {
    check_name(args.address(1))?;
    usable_file(args.fd(0))?;
    Err(Errno::EOPNOTSUPP)
}

fn check_set(args: &Args) -> Result<()> {
    const XATTR_CREATE: u32 = 1;
    const XATTR_REPLACE: u32 = 2;
    if args.u32(4) & !(XATTR_CREATE | XATTR_REPLACE) != 0 {
        return Err(Errno::EINVAL);
    }
    check_name(args.address(1))?;
    if args.usize(3) > 65536 { Err(Errno::E2BIG) } else { Ok(()) }
}

/// setxattr(2).
pub fn set(args: &Args) -> Result<u64> {
    check_set(args)?;
    must_exist(args.address(0), Follow::Yes)?;
    Err(Errno::EOPNOTSUPP)
}

/// lsetxattr(2).
pub fn set_link(args: &Args) -> Result<u64> {
    check_set(args)?;
    must_exist(args.address(0), Follow::No)?;
    Err(Errno::EOPNOTSUPP)
}

/// fsetxattr(2).
pub fn set_descriptor(args: &Args) -> Result<u64> {
    check_set(args)?;
    usable_file(args.fd(0))?;
    Err(Errno::EOPNOTSUPP)
}

/// listxattr(2): an empty list.
pub fn list(args: &Args) -> Result<u64> {
    must_exist(args.address(0), Follow::Yes).map(|()| 0)
}

/// llistxattr(2).
pub fn list_link(args: &Args) -> Result<u64> {
    must_exist(args.address(0), Follow::No).map(|()| 0)
}

/// flistxattr(2).
pub fn list_descriptor(args: &Args) -> Result<u64> {
    usable_file(args.fd(0)).map(|_| 0)
}

/// inotify_init(2) and its relatives: not there yet.
pub fn no_inotify(_: &Args) -> Result<u64> {
    Err(Errno::ENOSYS)
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
