//! Changing the tree: creating, linking, removing and renaming.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::context::Context;
use super::dentry::Dentry;
use super::inode::{Attributes, FileType, Inode, NewInode, NewKind, RenameMode, S_ISGID};
use super::mount::{self, change::check_removable};
use super::notify;
use super::path::Path;
use super::permission::Access;
use super::walk::{Last, Parent, walk_parent};
use crate::errno::{Errno, Result};

/// What a new file in `directory` looks like (umask(2), inode(7) on set-group-id).
pub fn new_inode(
    context: &Context,
    directory: &Attributes,
    kind: NewKind,
    permissions: u32,
) -> NewInode {
    let inherits = directory.mode & S_ISGID != 0;
    let gid = if inherits { directory.gid } else { context.identity.gid };
    let mut permissions = match kind {
        NewKind::Symlink(_) => 0o777,
        _ => permissions & 0o7777 & !context.umask,
    };
    if inherits && matches!(kind, NewKind::Directory) {
        permissions |= S_ISGID;
    }
    NewInode { kind, permissions, uid: context.identity.uid, gid }
}

/// `EACCES` unless names in the directory may be changed.
pub fn check_may_change(context: &Context, directory: &Path) -> Result<()> {
    context.identity.check(&**directory.inode(), Access::WRITE | Access::EXECUTE)
}

/// Creates a file that is not a directory entry yet; `EEXIST` if it is.
pub fn create(
    context: &Context,
    start: &Path,
    path: &[u8],
    kind: NewKind,
    permissions: u32,
) -> Result<Path> {
    let parent = walk_parent(context, start, path)?;
    let Last::Name(name) = &parent.last else { return Err(Errno::EEXIST) };
    if parent.directory.dentry().child(name)?.is_some() {
        return Err(Errno::EEXIST);
    }
    // mkdir("new/") is fine; anything else cannot be a directory.
    if parent.trailing_slash && !matches!(kind, NewKind::Directory) {
        return Err(Errno::ENOENT);
    }
    create_in(context, &parent.directory, name, kind, permissions)
}

/// Creates a file in a directory that has no such name.
pub fn create_in(
    context: &Context,
    directory: &Path,
    name: &[u8],
    kind: NewKind,
    permissions: u32,
) -> Result<Path> {
    if directory.dentry().is_unlinked() {
        return Err(Errno::ENOENT);
    }
    directory.check_writable()?;
    check_may_change(context, directory)?;
    let holder = directory.inode();
    let new = new_inode(context, &holder.attributes(), kind, permissions);
    let inode = holder.create(name, &new)?;
    notify::created(directory.dentry(), name, &inode);
    if !directory.dentry().caches_lookups() {
        return Ok(directory.beside(Dentry::detached(inode, name, directory.dentry())));
    }
    Ok(directory.beside(directory.dentry().attach(name, inode)))
}

/// Gives the file at `target` another name (link(2)).
pub fn link(context: &Context, target: &Path, start: &Path, path: &[u8]) -> Result<()> {
    let parent = walk_parent(context, start, path)?;
    let Last::Name(name) = &parent.last else { return Err(Errno::EEXIST) };
    let directory = &parent.directory;
    if directory.dentry().child(name)?.is_some() {
        return Err(Errno::EEXIST);
    }
    if parent.trailing_slash {
        return Err(Errno::ENOENT);
    }
    directory.check_writable()?;
    let inode = target.inode();
    if !target.is_in_mount_of(directory) {
        return Err(Errno::EXDEV);
    }
    if inode.file_type() == FileType::Directory {
        return Err(Errno::EPERM);
    }
    if directory.dentry().is_unlinked() {
        return Err(Errno::ENOENT);
    }
    check_may_change(context, directory)?;
    directory.inode().link(name, inode)?;
    if directory.dentry().caches_lookups() {
        directory.dentry().attach(name, inode.clone());
    }
    notify::link_count(inode);
    notify::created(directory.dentry(), name, inode);
    Ok(())
}

/// What may be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// Anything but a directory (unlink(2)).
    File,
    /// An empty directory (rmdir(2)).
    Directory,
}

/// Removes a name.
pub fn remove(context: &Context, start: &Path, path: &[u8], removal: Removal) -> Result<()> {
    let Parent { directory, last, trailing_slash } = walk_parent(context, start, path)?;
    let name = match (last, removal) {
        (Last::Name(name), _) => name,
        (_, Removal::File) => return Err(Errno::EISDIR),
        (Last::Dot, _) => return Err(Errno::EINVAL),
        (Last::DotDot, _) => return Err(Errno::ENOTEMPTY),
        (Last::Root, _) => return Err(Errno::EBUSY),
    };
    directory.check_writable()?;
    let victim = directory.dentry().child(&name)?.ok_or(Errno::ENOENT)?;
    let is_directory = victim.inode.file_type() == FileType::Directory;
    if trailing_slash && !is_directory {
        return Err(Errno::ENOTDIR);
    }
    check_may_change(context, &directory)?;
    context.identity.check_sticky(&**directory.inode(), &*victim.inode)?;
    match removal {
        Removal::File if is_directory => return Err(Errno::EISDIR),
        Removal::Directory if !is_directory => return Err(Errno::ENOTDIR),
        _ => {}
    }
    check_removable(directory.mount(), &victim)?;
    directory.dentry().check_not_pinned(&name)?;
    directory.inode().remove(&name)?;
    directory.dentry().detach(&name);
    // With no cache the dentry in hand is the one that shows as deleted.
    victim.set_unlinked();
    mount::change::removed(directory.mount(), &victim);
    notify::removed(directory.dentry(), &name, &victim.inode);
    Ok(())
}

/// Whether a rename may replace what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameKind {
    /// An existing target is replaced.
    Replace,
    /// An existing target is an error (`RENAME_NOREPLACE`).
    NoReplace,
    /// Both must exist and change places (`RENAME_EXCHANGE`).
    Exchange,
}

/// One side of a rename.
struct Side {
    directory: Path,
    name: Vec<u8>,
    trailing_slash: bool,
    dentry: Option<Arc<Dentry>>,
}

fn side(parent: Parent) -> Result<Side> {
    let Last::Name(name) = parent.last else { return Err(Errno::EBUSY) };
    let dentry = parent.directory.dentry().child(&name)?;
    Ok(Side { directory: parent.directory, name, trailing_slash: parent.trailing_slash, dentry })
}

/// Moves a file (rename(2)).
pub fn rename(
    context: &Context,
    old: (&Path, &[u8]),
    new: (&Path, &[u8]),
    kind: RenameKind,
) -> Result<()> {
    let from = walk_parent(context, old.0, old.1)?;
    let to = walk_parent(context, new.0, new.1)?;
    if !from.directory.is_in_mount_of(&to.directory) {
        return Err(Errno::EXDEV);
    }
    if !matches!(from.last, Last::Name(_)) {
        return Err(Errno::EBUSY);
    }
    if kind == RenameKind::NoReplace && !matches!(to.last, Last::Name(_)) {
        return Err(Errno::EEXIST);
    }
    if matches!(to.last, Last::Name(_)) {
        from.directory.check_writable()?;
    }
    let from = side(from)?;
    let to = side(to)?;
    let moved = from.dentry.as_ref().ok_or(Errno::ENOENT)?;
    let moved_is_directory = moved.inode.file_type() == FileType::Directory;
    match (&to.dentry, kind) {
        (Some(_), RenameKind::NoReplace) => return Err(Errno::EEXIST),
        (None, RenameKind::Exchange) => return Err(Errno::ENOENT),
        _ => {}
    }
    if !moved_is_directory
        && (from.trailing_slash || kind != RenameKind::Exchange && to.trailing_slash)
    {
        return Err(Errno::ENOTDIR);
    }
    // A directory must not become its own descendant.
    if Dentry::is_below(to.directory.dentry(), moved) {
        return Err(Errno::EINVAL);
    }
    if let Some(target) = &to.dentry
        && Dentry::is_below(from.directory.dentry(), target)
    {
        let is_exchange = kind == RenameKind::Exchange;
        return Err(if is_exchange { Errno::EINVAL } else { Errno::ENOTEMPTY });
    }
    if to.directory.dentry().is_unlinked() {
        return Err(Errno::ENOENT);
    }
    check_rename(context, &from, &to, moved, kind)?;
    if let Some(target) = &to.dentry
        && same_inode(&target.inode, &moved.inode)
    {
        // Two names of one file: nothing happens (rename(2)).
        return Ok(());
    }
    let mode =
        if kind == RenameKind::Exchange { RenameMode::Exchange } else { RenameMode::Replace };
    from.directory.inode().rename(&from.name, to.directory.inode(), &to.name, mode)?;
    if mode == RenameMode::Exchange {
        Dentry::exchange(&from.name, from.directory.dentry(), &to.name, to.directory.dentry());
    } else {
        Dentry::transfer(&from.name, from.directory.dentry(), &to.name, to.directory.dentry());
        if let Some(target) = &to.dentry {
            mount::change::removed(to.directory.mount(), target);
        }
    }
    let old_place = (&**from.directory.dentry(), from.name.as_slice());
    let new_place = (&**to.directory.dentry(), to.name.as_slice());
    match (&to.dentry, mode) {
        (Some(other), RenameMode::Exchange) => {
            notify::moved(old_place, new_place, &moved.inode, None);
            notify::moved(new_place, old_place, &other.inode, None);
        }
        (target, _) => {
            let over = target.as_ref().map(|target| &target.inode);
            notify::moved(old_place, new_place, &moved.inode, over);
        }
    }
    Ok(())
}

fn check_rename(
    context: &Context,
    from: &Side,
    to: &Side,
    moved: &Arc<Dentry>,
    kind: RenameKind,
) -> Result<()> {
    let identity = &context.identity;
    check_may_change(context, &from.directory)?;
    identity.check_sticky(&**from.directory.inode(), &*moved.inode)?;
    check_may_change(context, &to.directory)?;
    let moved_is_directory = moved.inode.file_type() == FileType::Directory;
    if let Some(target) = &to.dentry {
        identity.check_sticky(&**to.directory.inode(), &*target.inode)?;
        let target_is_directory = target.inode.file_type() == FileType::Directory;
        if kind != RenameKind::Exchange {
            match (moved_is_directory, target_is_directory) {
                (true, false) => return Err(Errno::ENOTDIR),
                (false, true) => return Err(Errno::EISDIR),
                _ => {}
            }
        }
        check_removable(to.directory.mount(), target)?;
    }
    check_removable(from.directory.mount(), moved)?;
    from.directory.dentry().check_not_pinned(&from.name)?;
    to.directory.dentry().check_not_pinned(&to.name)?;
    // A directory that gets a new parent is itself changed: its `..`.
    let new_parent = !from.directory.is(&to.directory);
    if moved_is_directory && new_parent {
        identity.check(&*moved.inode, Access::WRITE)?;
    }
    Ok(())
}

fn same_inode(a: &Arc<dyn Inode>, b: &Arc<dyn Inode>) -> bool {
    core::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
}
