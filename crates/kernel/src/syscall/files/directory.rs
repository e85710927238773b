//! Directories: reading them, and the working and root directory.

use alloc::vec::Vec;

use super::{place_of, resolve};
use crate::args::{Fd, UserString};
use crate::errno::{Errno, Result};
use crate::fs::context::{AT_FDCWD, Context};
use crate::fs::file::{Dirent, OpenFile};
use crate::fs::inode::FileType;
use crate::fs::inotify::Mask;
use crate::fs::notify;
use crate::fs::path::{AbsoluteName, Path};
use crate::fs::permission::Access;
use crate::fs::walk::Follow;
use crate::platform::user::UserAddress;
use crate::task::{Capabilities, current_process};

/// How entries are laid out in the guest's buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// `struct linux_dirent`: the type is the last byte.
    Old,
    /// `struct linux_dirent64`.
    New,
}

/// Appends an entry, if it fits into `room` bytes altogether.
fn append(buffer: &mut Vec<u8>, room: usize, entry: &Dirent, layout: Layout) -> bool {
    let fixed = if layout == Layout::New { 19 } else { 18 };
    // One byte for the terminator; the old layout has one more for the type.
    let extra = if layout == Layout::New { 1 } else { 2 };
    let len = (fixed + entry.name.len() + extra).next_multiple_of(8);
    if buffer.len() + len > room {
        return false;
    }
    let start = buffer.len();
    buffer.extend_from_slice(&entry.ino.to_le_bytes());
    buffer.extend_from_slice(&entry.next_offset.to_le_bytes());
    buffer.extend_from_slice(&(len as u16).to_le_bytes());
    if layout == Layout::New {
        buffer.push(entry.file_type);
    }
    buffer.extend_from_slice(&entry.name);
    buffer.resize(start + len, 0);
    if layout == Layout::Old {
        buffer[start + len - 1] = entry.file_type;
    }
    true
}

/// `.` and `..`, which no file system stores.
fn dot_entries(path: &Path, offset: u64) -> Vec<Dirent> {
    let here = path.inode().attributes().ino;
    let above = path.parent().topmost().inode().attributes().ino;
    let kind = FileType::Directory as u8;
    let all = [
        Dirent { ino: here, next_offset: 1, file_type: kind, name: b".".to_vec() },
        Dirent { ino: above, next_offset: 2, file_type: kind, name: b"..".to_vec() },
    ];
    all.into_iter().skip(usize::try_from(offset).unwrap_or(usize::MAX)).collect()
}

/// Fills a buffer of `room` bytes with entries from the current position on.
fn read_entries(open: &OpenFile, room: usize, layout: Layout) -> Result<(Vec<u8>, u64)> {
    let path = open.path.as_ref().ok_or(Errno::ENOTDIR)?;
    if !path.is_directory() {
        return Err(Errno::ENOTDIR);
    }
    if path.dentry().is_unlinked() {
        return Err(Errno::ENOENT);
    }
    let mut position = open.position();
    let mut buffer = Vec::with_capacity(room);
    let mut full = false;
    if position < 2 {
        for entry in dot_entries(path, position) {
            if !append(&mut buffer, room, &entry, layout) {
                full = true;
                break;
            }
            position = entry.next_offset;
        }
    }
    if !full {
        open.file.read_directory(position, &mut |entry| {
            full = !append(&mut buffer, room, &entry, layout);
            if !full {
                position = entry.next_offset;
            }
            !full
        })?;
    }
    if buffer.is_empty() && full {
        // Not even one entry fits.
        return Err(Errno::EINVAL);
    }
    Ok((buffer, position))
}

/// Most bytes of entries in one call: more than any C library asks for.
const ENTRIES_MAX: usize = 64 << 10;

fn get_entries(fd: Fd, to: UserAddress, len: u32, layout: Layout) -> Result<usize> {
    let open = fd.usable_file()?;
    let room = (len as usize).min(ENTRIES_MAX);
    let (buffer, position) = read_entries(&open, room, layout)?;
    notify::open_file(&open, Mask::ACCESS);
    to.write_bytes(&buffer)?;
    open.set_position(position);
    Ok(buffer.len())
}

/// getdents(2).
pub fn getdents(fd: Fd, entries: UserAddress, len: u32) -> Result<usize> {
    get_entries(fd, entries, len, Layout::Old)
}

/// getdents64(2).
pub fn getdents64(fd: Fd, entries: UserAddress, len: u32) -> Result<usize> {
    get_entries(fd, entries, len, Layout::New)
}

/// getcwd(2).
pub fn getcwd(buffer: UserAddress, size: usize) -> Result<usize> {
    let context = Context::current();
    let mut name = match context.cwd.absolute_name(&context.root) {
        AbsoluteName::Reachable(name) => name,
        AbsoluteName::Deleted(_) => return Err(Errno::ENOENT),
        AbsoluteName::Unreachable(name) => [&b"(unreachable)"[..], &name].concat(),
    };
    name.push(0);
    if size < name.len() {
        return Err(Errno::ERANGE);
    }
    buffer.write_bytes(&name)?;
    Ok(name.len())
}

fn enterable(context: &Context, path: Path) -> Result<Path> {
    if !path.is_directory() {
        return Err(Errno::ENOTDIR);
    }
    context.identity.check(&**path.inode(), Access::EXECUTE)?;
    Ok(path)
}

/// chdir(2).
pub fn chdir(path: UserString) -> Result<()> {
    let context = Context::current();
    set_cwd(enterable(&context, resolve(&context, AT_FDCWD, path, Follow::Yes)?)?);
    Ok(())
}

/// fchdir(2).
pub fn fchdir(fd: Fd) -> Result<()> {
    let context = Context::current();
    if fd == AT_FDCWD {
        return Err(Errno::EBADF);
    }
    let path = enterable(&context, place_of(&context, fd)?)?;
    set_cwd(path);
    Ok(())
}

fn set_cwd(path: Path) {
    let old = core::mem::replace(&mut current_process().fs().borrow_mut().cwd, path);
    drop(old);
}

/// chroot(2).
pub fn chroot(path: UserString) -> Result<()> {
    let context = Context::current();
    let path = enterable(&context, resolve(&context, AT_FDCWD, path, Follow::Yes)?)?;
    if !context.identity.can_in_own(Capabilities::SYS_CHROOT) {
        return Err(Errno::EPERM);
    }
    let old = core::mem::replace(&mut current_process().fs().borrow_mut().root, path);
    drop(old);
    Ok(())
}
