//! Opening, closing and duplicating descriptors.

use alloc::borrow::Cow;
use alloc::sync::Arc;

use super::{descriptor_limit, start};
use crate::args::{Fd, Flags, Mode, UserPtr, UserString};
use crate::errno::{Errno, Result};
use crate::fs::context::{AT_FDCWD, Context};
use crate::fs::dentry::Dentry;
use crate::fs::fd_table::{NewDescriptor, OnExec, install};
use crate::fs::file::{OpenFile, OpenFlags};
use crate::fs::inode::{Inode, NewInode, NewKind};
use crate::fs::open::{How, open as open_path};
use crate::fs::overlay::{RegularFile, Seals, node_of_inode};
use crate::fs::path::Path;
use crate::fs::walk::Resolve;
use crate::ipc::mqueue::notification;
use crate::state::kernel;
use crate::task::current_process;

/// open(2).
pub fn open(path: UserString, flags: Flags, mode: Mode) -> Result<i32> {
    openat(AT_FDCWD, path, flags, mode)
}

/// creat(2).
pub fn creat(path: UserString, mode: Mode) -> Result<i32> {
    let flags = OpenFlags::CREAT | OpenFlags::WRONLY | OpenFlags::TRUNC;
    openat(AT_FDCWD, path, Flags(flags.bits()), mode)
}

/// openat(2).
pub fn openat(dirfd: Fd, path: UserString, Flags(flags): Flags, Mode(mode): Mode) -> Result<i32> {
    // open(2): unknown flags have always been ignored.
    let flags = OpenFlags::from_bits_retain(flags & KNOWN_FLAGS);
    let permissions = mode & 0o7777;
    finish_open(dirfd, path, How { flags, permissions, resolve: Resolve::empty() })
}

/// Every flag that open(2) documents.
const KNOWN_FLAGS: u32 = 0o37777703 & !0o74 | 0o3;

fn finish_open(dirfd: Fd, path: UserString, how: How) -> Result<i32> {
    let path = path.read_path()?;
    // Without a free descriptor nothing may be created or truncated.
    let descriptor = NewDescriptor::reserve()?;
    let context = Context::current();
    let start = start_for(&context, dirfd, &path, how.resolve)?;
    let open = open_path(&context, &start, &path, how)?;
    Ok(descriptor.install(open, OnExec::of(how.flags)))
}

fn start_for<'c>(
    context: &'c Context,
    dirfd: Fd,
    path: &[u8],
    resolve: Resolve,
) -> Result<Cow<'c, Path>> {
    // With RESOLVE_IN_ROOT an absolute path starts at the descriptor, too.
    if resolve.intersects(Resolve::IN_ROOT | Resolve::BENEATH) {
        context.start(dirfd)
    } else {
        start(context, dirfd, path)
    }
}

/// `struct open_how` (openat2(2)).
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct OpenHow {
    flags: u64,
    mode: u64,
    resolve: u64,
}

/// openat2(2).
pub fn openat2(dirfd: Fd, path: UserString, how: UserPtr<OpenHow>, size: usize) -> Result<i32> {
    if size < size_of::<OpenHow>() {
        return Err(Errno::EINVAL);
    }
    let how = how.read_extensible(size)?;
    if how.flags & !u64::from(KNOWN_FLAGS) != 0 || how.mode & !0o7777 != 0 {
        return Err(Errno::EINVAL);
    }
    let flags = OpenFlags::from_bits_retain(how.flags as u32);
    let creates = flags.contains(OpenFlags::CREAT) || flags.contains(OpenFlags::TMPFILE);
    if how.mode != 0 && !creates {
        return Err(Errno::EINVAL);
    }
    let resolve = Resolve::from_bits(how.resolve).ok_or(Errno::EINVAL)?;
    if resolve.contains(Resolve::BENEATH | Resolve::IN_ROOT) {
        return Err(Errno::EINVAL);
    }
    if resolve.contains(Resolve::CACHED) {
        // openat2(2): whoever asks for this must be ready to ask without it.
        return Err(Errno::EAGAIN);
    }
    finish_open(dirfd, path, How { flags, permissions: how.mode as u32, resolve })
}

/// Ends the use of a descriptor that has been taken out of the table.
fn closed(open: Arc<OpenFile>) {
    open.release_record_locks();
    notification::descriptor_closed(&current_process(), &open);
    drop(open);
}

/// close(2).
pub fn close(fd: Fd) -> Result<()> {
    let open = current_process().files.borrow_mut().borrow_mut().remove(fd.0)?;
    closed(open);
    Ok(())
}

const CLOSE_RANGE_UNSHARE: u32 = 2;
const CLOSE_RANGE_CLOEXEC: u32 = 4;

/// close_range(2).
pub fn close_range(first: u32, last: u32, Flags(flags): Flags) -> Result<()> {
    if first > last || flags & !(CLOSE_RANGE_UNSHARE | CLOSE_RANGE_CLOEXEC) != 0 {
        return Err(Errno::EINVAL);
    }
    if flags & CLOSE_RANGE_UNSHARE != 0 {
        current_process().unshare_files();
    }
    if flags & CLOSE_RANGE_CLOEXEC != 0 {
        current_process().files.borrow_mut().borrow_mut().close_range_on_exec(first, last);
        return Ok(());
    }
    let files = current_process().files.borrow_mut().borrow_mut().remove_range(first, last);
    files.into_iter().for_each(closed);
    Ok(())
}

/// dup(2).
pub fn dup(fd: Fd) -> Result<i32> {
    install(fd.file()?, OpenFlags::empty())
}

/// dup2(2).
pub fn dup2(old: Fd, new: Fd) -> Result<i32> {
    if old == new {
        old.file()?;
        return Ok(new.0);
    }
    duplicate_to(old, new, OnExec::Keep)
}

/// dup3(2).
pub fn dup3(old: Fd, new: Fd, Flags(flags): Flags) -> Result<i32> {
    let flags = OpenFlags::from_bits_retain(flags);
    if !(flags - OpenFlags::CLOEXEC).is_empty() || old == new {
        return Err(Errno::EINVAL);
    }
    duplicate_to(old, new, OnExec::of(flags))
}

fn duplicate_to(old: Fd, new: Fd, on_exec: OnExec) -> Result<i32> {
    let limit = descriptor_limit();
    let replaced = {
        let table = current_process().files.borrow_mut().clone();
        let mut files = table.borrow_mut();
        let open = files.get(old.0)?;
        files.replace(new.0, open, on_exec, limit)?
    };
    if let Some(open) = replaced {
        closed(open);
    }
    Ok(new.0)
}

const MFD_CLOEXEC: u32 = 0x01;
const MFD_ALLOW_SEALING: u32 = 0x02;
const MFD_HUGETLB: u32 = 0x04;
const MFD_NOEXEC_SEAL: u32 = 0x08;
const MFD_EXEC: u32 = 0x10;
/// `NAME_MAX` minus the length of `memfd:`.
const MFD_NAME_MAX: usize = 249;

/// memfd_create(2).
pub fn memfd_create(name: UserString, Flags(flags): Flags) -> Result<i32> {
    let known = MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB | MFD_NOEXEC_SEAL | MFD_EXEC;
    if flags & !known != 0 || flags & MFD_EXEC != 0 && flags & MFD_NOEXEC_SEAL != 0 {
        return Err(Errno::EINVAL);
    }
    if flags & MFD_HUGETLB != 0 {
        // As on a machine without huge pages set aside.
        return Err(Errno::ENOMEM);
    }
    let name = name.read_string(MFD_NAME_MAX).map_err(|error| match error {
        Errno::ENAMETOOLONG => Errno::EINVAL,
        error => error,
    })?;
    let context = Context::current();
    let no_exec = flags & MFD_NOEXEC_SEAL != 0;
    let seals = if no_exec {
        Seals::EXEC
    } else if flags & MFD_ALLOW_SEALING != 0 {
        Seals::empty()
    } else {
        Seals::SEAL
    };
    let new = NewInode {
        kind: NewKind::Regular,
        permissions: if no_exec { 0o666 } else { 0o777 },
        uid: context.identity.uid,
        gid: context.identity.gid,
    };
    let inode = kernel().fs.memory_files().create_unnamed(&new)?;
    let node = node_of_inode(&inode).ok_or(Errno::EIO)?;
    let shown = [b"/memfd:", name.as_slice()].concat();
    let dentry = Dentry::anonymous(inode, &shown);
    dentry.set_unlinked();
    let file = Arc::new(RegularFile::memory(node, seals));
    let flags_of_file = OpenFlags::RDWR | OpenFlags::LARGEFILE;
    let open = OpenFile::new(file, flags_of_file, Some(Path::anonymous(dentry)));
    let cloexec = flags & MFD_CLOEXEC != 0;
    install(open, if cloexec { OpenFlags::CLOEXEC } else { OpenFlags::empty() })
}
