//! Opening, closing and duplicating descriptors.

use alloc::sync::Arc;

use super::{descriptor_limit, install, start};
use crate::args::{Fd, Flags, Mode, UserString};
use crate::errno::{Errno, Result};
use crate::fs::context::{AT_FDCWD, Context};
use crate::fs::dentry::Dentry;
use crate::fs::fd_table::{NewDescriptor, OnExec};
use crate::fs::file::{OpenFile, OpenFlags};
use crate::fs::inode::{Inode, NewInode, NewKind};
use crate::fs::locks::{Owner, Range};
use crate::fs::open::{How, open as open_path};
use crate::fs::overlay::{RegularFile, Seals, node_of_inode};
use crate::fs::path::Path;
use crate::fs::walk::Resolve;
use crate::platform::user::UserAddress;
use crate::state::kernel;
use crate::task::current_process;

/// open(2).
pub fn open(path: UserString, Flags(flags): Flags, Mode(mode): Mode) -> Result<u64> {
    open_at(AT_FDCWD, path, flags, mode)
}

/// openat(2).
pub fn openat(dirfd: Fd, path: UserString, Flags(flags): Flags, Mode(mode): Mode) -> Result<u64> {
    open_at(dirfd, path, flags, mode)
}

/// creat(2).
pub fn creat(path: UserString, Mode(mode): Mode) -> Result<u64> {
    let flags = OpenFlags::CREAT | OpenFlags::WRONLY | OpenFlags::TRUNC;
    open_at(AT_FDCWD, path, flags.bits(), mode)
}

fn open_at(dirfd: Fd, path: UserString, flags: u32, permissions: u32) -> Result<u64> {
    // open(2): unknown flags have always been ignored.
    let flags = OpenFlags::from_bits_retain(flags & KNOWN_FLAGS);
    finish_open(
        dirfd,
        path,
        How { flags, permissions: permissions & 0o7777, resolve: Resolve::empty() },
    )
}

/// Every flag that open(2) documents.
const KNOWN_FLAGS: u32 = 0o37777703 & !0o74 | 0o3;

fn finish_open(dirfd: Fd, path: UserString, how: How) -> Result<u64> {
    let path = path.read_path()?;
    // Without a free descriptor nothing may be created or truncated.
    let descriptor = NewDescriptor::reserve()?;
    let context = Context::current();
    let start = start_for(&context, dirfd, &path, how.resolve)?;
    let open = open_path(&context, &start, &path, how)?;
    Ok(descriptor.install(open, on_exec(how.flags)) as u64)
}

fn start_for(context: &Context, dirfd: Fd, path: &[u8], resolve: Resolve) -> Result<Path> {
    // With RESOLVE_IN_ROOT an absolute path starts at the descriptor, too.
    if resolve.intersects(Resolve::IN_ROOT | Resolve::BENEATH) {
        context.start(dirfd)
    } else {
        start(context, dirfd, path)
    }
}

fn on_exec(flags: OpenFlags) -> OnExec {
    if flags.contains(OpenFlags::CLOEXEC) { OnExec::Close } else { OnExec::Keep }
}

/// `struct open_how` (openat2(2)).
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct OpenHow {
    flags: u64,
    mode: u64,
    resolve: u64,
}

/// openat2(2).
pub fn openat2(dirfd: Fd, path: UserString, how: UserAddress, size: usize) -> Result<u64> {
    if size < size_of::<OpenHow>() {
        return Err(Errno::EINVAL);
    }
    if size > 4096 {
        return Err(Errno::E2BIG);
    }
    let mut bytes = alloc::vec![0u8; size];
    how.read_bytes(&mut bytes)?;
    if bytes[size_of::<OpenHow>()..].iter().any(|&byte| byte != 0) {
        return Err(Errno::E2BIG);
    }
    let how: OpenHow = how.read()?;
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
    release_record_locks(&open);
    drop(open);
}

/// fcntl(2): closing any descriptor of a file gives up the process' record
/// locks on it.
fn release_record_locks(open: &OpenFile) {
    let locks = &kernel().fs.locks;
    if locks.is_empty() {
        return;
    }
    if let Ok(key) = super::locking::record_key(open) {
        locks.release(key, Owner::Process(current_process().pid), Range::ALL);
    }
}

/// close(2).
pub fn close(fd: Fd) -> Result<u64> {
    let open = current_process().files.borrow_mut().remove(fd.0)?;
    closed(open);
    Ok(0)
}

const CLOSE_RANGE_UNSHARE: u32 = 2;
const CLOSE_RANGE_CLOEXEC: u32 = 4;

/// close_range(2).
pub fn close_range(first: u32, last: u32, Flags(flags): Flags) -> Result<u64> {
    if first > last || flags & !(CLOSE_RANGE_UNSHARE | CLOSE_RANGE_CLOEXEC) != 0 {
        return Err(Errno::EINVAL);
    }
    // Tables are never shared between processes, so there is nothing to unshare.
    if flags & CLOSE_RANGE_CLOEXEC != 0 {
        current_process().files.borrow_mut().close_range_on_exec(first, last);
        return Ok(0);
    }
    let files = current_process().files.borrow_mut().remove_range(first, last);
    files.into_iter().for_each(closed);
    Ok(0)
}

/// dup(2).
pub fn dup(fd: Fd) -> Result<u64> {
    install(fd.file()?, OnExec::Keep)
}

/// dup2(2).
pub fn dup2(old: Fd, new: Fd) -> Result<u64> {
    if old == new {
        old.file()?;
        return Ok(new.0 as u64);
    }
    duplicate_to(old, new, OnExec::Keep)
}

/// dup3(2).
pub fn dup3(old: Fd, new: Fd, Flags(flags): Flags) -> Result<u64> {
    let flags = OpenFlags::from_bits_retain(flags);
    if !(flags - OpenFlags::CLOEXEC).is_empty() || old == new {
        return Err(Errno::EINVAL);
    }
    duplicate_to(old, new, on_exec(flags))
}

fn duplicate_to(old: Fd, new: Fd, on_exec: OnExec) -> Result<u64> {
    let limit = descriptor_limit();
    let replaced = {
        let process = current_process();
        let mut files = process.files.borrow_mut();
        let open = files.get(old.0)?;
        files.replace(new.0, open, on_exec, limit)?
    };
    if let Some(open) = replaced {
        closed(open);
    }
    Ok(new.0 as u64)
}

const MFD_CLOEXEC: u32 = 0x01;
const MFD_ALLOW_SEALING: u32 = 0x02;
const MFD_HUGETLB: u32 = 0x04;
const MFD_NOEXEC_SEAL: u32 = 0x08;
const MFD_EXEC: u32 = 0x10;
/// `NAME_MAX` minus the length of `memfd:`.
const MFD_NAME_MAX: usize = 249;

/// memfd_create(2).
pub fn memfd_create(name: UserString, Flags(flags): Flags) -> Result<u64> {
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
    let open = OpenFile::new(file, flags_of_file, Some(Path::new(dentry)));
    install(open, if flags & MFD_CLOEXEC != 0 { OnExec::Close } else { OnExec::Keep })
}
