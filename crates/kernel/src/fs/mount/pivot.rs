//! Another root: pivot_root(2).

use alloc::sync::Arc;

use super::change::check_lasting;
use super::{MountFlags, MountNamespace, Place, check_in};
use crate::errno::{Errno, Result};
use crate::fs::dentry::Dentry;
use crate::fs::path::Path;
use crate::state::kernel;

/// Makes the mount at `new` the root, and puts the mount of the old one, `root`, at `put_old`
/// (`path_pivot_root`, fs/namespace.c). Processes whose root or working directory was the old root
/// have the new one.
pub fn pivot_root(
    namespace: &MountNamespace,
    root: &Path,
    new: &Path,
    put_old: Path,
) -> Result<()> {
    let put_old = put_old.topmost();
    if put_old.dentry().is_unlinked() {
        return Err(Errno::ENOENT);
    }
    check_lasting(put_old.dentry())?;
    let mount_of = |path: &Path| path.mount().cloned().ok_or(Errno::EINVAL);
    let (root_mount, new_mount, old_mount) = (mount_of(root)?, mount_of(new)?, mount_of(&put_old)?);
    check_in(namespace, &root_mount)?;
    check_in(namespace, &new_mount)?;
    if new.dentry().is_unlinked() {
        return Err(Errno::ENOENT);
    }
    if Arc::ptr_eq(&new_mount, &root_mount) || Arc::ptr_eq(&old_mount, &root_mount) {
        return Err(Errno::EBUSY);
    }
    let root_place = root_mount.place();
    if !root.is_mount_root() || root_place.is_none() {
        return Err(Errno::EINVAL);
    }
    if !new.is_mount_root() || new_mount.place().is_none() || new_mount.is_locked() {
        return Err(Errno::EINVAL);
    }
    if !is_reachable(&put_old, new) || !is_reachable(new, root) {
        return Err(Errno::EINVAL);
    }
    let places = (new_mount.detach(), root_mount.detach());
    if let Some(place) = root_place {
        new_mount.attach(place);
    }
    root_mount.attach(Place { parent: old_mount, point: put_old.dentry().clone() });
    drop(places);
    // The new root hides what the old one did.
    if root_mount.is_locked() {
        root_mount.flags.set(root_mount.flags() - MountFlags::LOCKED);
        new_mount.flags.set(new_mount.flags() | MountFlags::LOCKED);
    }
    follow(root, new);
    Ok(())
}

/// Whether a place is below another (`is_path_reachable`).
pub fn is_reachable(path: &Path, root: &Path) -> bool {
    let Some(top) = root.mount() else { return false };
    let Some(mut mount) = path.mount().cloned() else { return false };
    let mut dentry = path.dentry().clone();
    while !Arc::ptr_eq(&mount, top) {
        let Some(place) = mount.place() else { return false };
        (mount, dentry) = (place.parent, place.point);
    }
    Dentry::is_below(&dentry, root.dentry())
}

/// Processes whose root or working directory is `old` have `new` (`chroot_fs_refs`).
fn follow(old: &Path, new: &Path) {
    for process in kernel().tasks.all_processes() {
        let fs = process.fs();
        let mut before = (None, None);
        let mut fs = fs.borrow_mut();
        if fs.root.is(old) {
            before.0 = Some(core::mem::replace(&mut fs.root, new.clone()));
        }
        if fs.cwd.is(old) {
            before.1 = Some(core::mem::replace(&mut fs.cwd, new.clone()));
        }
        drop(fs);
    }
}
