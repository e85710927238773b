//! Directories with all that is in them. Nothing here calls itself: trees are as deep as a guest
//! likes, and a kernel stack is not.

use alloc::vec::Vec;

use crate::errno::{Errno, Result};
use crate::fs::Context;
use crate::fs::file::OpenFlags;
use crate::fs::inode::{FileType, NewKind};
use crate::fs::namespace::{self, Removal};
use crate::fs::open::open_existing;
use crate::fs::path::Path;
use crate::fs::walk::{Follow, walk};
use crate::task::scheduler;

/// The directory at `path`; `ENOTDIR`.
pub fn directory(context: &Context, start: &Path, path: &[u8]) -> Result<Path> {
    let found = walk(context, start, path, Follow::Yes)?;
    if found.is_directory() { Ok(found) } else { Err(Errno::ENOTDIR) }
}

/// A directory, and the names in it but for `.` and `..`; `EACCES` if it may not be read.
pub fn names(context: &Context, directory: Path) -> Result<(Path, Vec<Vec<u8>>)> {
    let open = open_existing(context, directory.clone(), OpenFlags::DIRECTORY)?;
    let mut names = Vec::new();
    // Entries 0 and 1 are those that no file system stores.
    open.file.read_directory(2, &mut |entry| {
        names.push(entry.name);
        true
    })?;
    Ok((directory, names))
}

/// Makes a directory and those above it that are missing; one that is there is fine.
pub fn make_all(context: &Context, path: &[u8], mode: u32) -> Result<()> {
    make_parents(context, path)?;
    make_if_missing(context, path, mode)
}

/// Makes the directories above a path that are missing.
pub fn make_parents(context: &Context, path: &[u8]) -> Result<()> {
    let trimmed = path.len() - path.iter().rev().take_while(|&&byte| byte == b'/').count();
    for at in (1..trimmed).filter(|&at| path[at] == b'/' && path[at - 1] != b'/') {
        make_if_missing(context, &path[..at], 0o777)?;
    }
    Ok(())
}

fn make_if_missing(context: &Context, path: &[u8], mode: u32) -> Result<()> {
    match walk(context, &context.cwd, path, Follow::Yes) {
        Ok(found) if found.is_directory() => return Ok(()),
        Ok(_) => return Err(Errno::ENOTDIR),
        Err(Errno::ENOENT) => {}
        Err(error) => return Err(error),
    }
    namespace::create(context, &context.cwd, path, NewKind::Directory, mode).map(drop)
}

/// Removes a file, or an empty directory, or with `all` whatever is in it. After an error some of
/// it may be gone.
pub fn remove(context: &Context, path: &[u8], all: bool) -> Result<()> {
    let found = walk(context, &context.cwd, path, Follow::No)?;
    if found.inode().file_type() != FileType::Directory {
        return namespace::remove(context, &context.cwd, path, Removal::File);
    }
    if all {
        empty(context, found)?;
    }
    namespace::remove(context, &context.cwd, path, Removal::Directory)
}

/// Removes all that is in a directory.
fn empty(context: &Context, top: Path) -> Result<()> {
    // Each directory with its name in the one above, which comes before it.
    let mut directories: Vec<(Path, Vec<u8>)> = Vec::new();
    let mut unread = Vec::from([top]);
    while let Some(directory) = unread.pop() {
        let (directory, names) = names(context, directory)?;
        for name in names {
            let entry = walk(context, &directory, &name, Follow::No)?;
            if entry.inode().file_type() == FileType::Directory {
                directories.push((directory.clone(), name));
                unread.push(entry);
            } else {
                namespace::remove(context, &directory, &name, Removal::File)?;
            }
            scheduler::yield_if_due();
        }
    }
    for (above, name) in directories.iter().rev() {
        namespace::remove(context, above, name, Removal::Directory)?;
        scheduler::yield_if_due();
    }
    Ok(())
}
