//! Where the virtual file system reports what happens, for inotify(7).
//!
//! Nothing here costs more than a load while nobody watches.

use alloc::sync::Arc;

use super::dentry::Dentry;
use super::file::{OpenFile, OpenFlags};
use super::inode::{AttributeChanges, FileType, FilesystemId, Inode};
use super::inotify::{Mask, Name, Watches};
use super::path::Path;

/// The watches, if there are any.
fn watches() -> Option<&'static Watches> {
    let watches = &crate::state::kernel().fs.watches;
    (!watches.is_empty()).then_some(watches)
}

fn with_type(inode: &Arc<dyn Inode>, what: Mask) -> Mask {
    if inode.file_type() == FileType::Directory { what | Mask::ISDIR } else { what }
}

/// Something happened to a file that is reached by a name: its directory hears
/// of it, too.
pub fn at(path: &Path, what: Mask) {
    let Some(watches) = watches() else { return };
    let dentry = path.dentry();
    let what = with_type(&dentry.inode, what);
    if let Some(parent) = dentry.parent() {
        let name = dentry.name();
        let name = Name { name: &name, unlinked: dentry.is_unlinked() };
        watches.report(&parent.inode, what, 0, Some(name));
    }
    watches.report(&dentry.inode, what, 0, None);
}

/// Something happened to an open file.
pub fn open_file(open: &OpenFile, what: Mask) {
    if let Some(path) = &open.path
        && !open.flags().contains(OpenFlags::PATH)
    {
        at(path, what);
    }
}

/// The last descriptor of an open file is closed.
pub fn closed(open: &OpenFile) {
    let wrote = open.flags().can_write();
    open_file(open, if wrote { Mask::CLOSE_WRITE } else { Mask::CLOSE_NOWRITE });
}

/// Attributes have changed: what counts as which event is
/// `fsnotify_change` in include/linux/fsnotify.h.
pub fn changed(path: &Path, changes: &AttributeChanges) {
    let mut what = Mask::empty();
    let AttributeChanges { permissions, uid, gid, atime, mtime, drops_capabilities: _ } = changes;
    if permissions.is_some() || uid.is_some() || gid.is_some() {
        what |= Mask::ATTRIB;
    }
    what |= match (atime.is_some(), mtime.is_some()) {
        (true, true) => Mask::ATTRIB,
        (true, false) => Mask::ACCESS,
        (false, true) => Mask::MODIFY,
        (false, false) => Mask::empty(),
    };
    if !what.is_empty() {
        at(path, what);
    }
}

/// A directory has a new name in it.
pub fn created(directory: &Dentry, name: &[u8], inode: &Arc<dyn Inode>) {
    let Some(watches) = watches() else { return };
    let name = Name { name, unlinked: false };
    watches.report(&directory.inode, with_type(inode, Mask::CREATE), 0, Some(name));
}

/// A file has a name more or less.
pub fn link_count(inode: &Arc<dyn Inode>) {
    let Some(watches) = watches() else { return };
    watches.report(inode, with_type(inode, Mask::ATTRIB), 0, None);
}

/// A name was removed from a directory.
pub fn removed(directory: &Dentry, name: &[u8], inode: &Arc<dyn Inode>) {
    let Some(watches) = watches() else { return };
    if inode.file_type() != FileType::Directory {
        watches.report(inode, Mask::ATTRIB, 0, None);
    }
    gone_if_unused(inode);
    let name = Name { name, unlinked: false };
    watches.report(&directory.inode, with_type(inode, Mask::DELETE), 0, Some(name));
}

/// One side of a move: a directory and a name in it.
pub type Place<'a> = (&'a Dentry, &'a [u8]);

/// A file was moved, perhaps over another one.
pub fn moved(
    from: Place<'_>,
    to: Place<'_>,
    inode: &Arc<dyn Inode>,
    over: Option<&Arc<dyn Inode>>,
) {
    let Some(watches) = watches() else { return };
    let cookie = watches.new_cookie();
    let name = |name| Some(Name { name, unlinked: false });
    watches.report(&from.0.inode, with_type(inode, Mask::MOVED_FROM), cookie, name(from.1));
    watches.report(&to.0.inode, with_type(inode, Mask::MOVED_TO), cookie, name(to.1));
    if let Some(over) = over {
        link_count(over);
    }
    // Linux does not say of these that they are about a directory.
    watches.report(inode, Mask::MOVE_SELF, 0, None);
    if let Some(over) = over {
        gone_if_unused(over);
    }
}

/// A file without names that nobody has open any more is gone.
pub fn gone_if_unused(inode: &Arc<dyn Inode>) {
    let Some(watches) = watches() else { return };
    if inode.attributes().nlink == 0 && !inode.is_open() {
        watches.report(inode, Mask::DELETE_SELF, 0, None);
        watches.gone(inode);
    }
}

/// A file system is gone with its last mount.
pub fn unmounted(filesystem: FilesystemId) {
    let Some(watches) = watches() else { return };
    watches.unmounted(filesystem);
}
