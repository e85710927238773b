//! Changing a tree of mounts: what mount(2) and umount2(2) do to what is there.

use alloc::sync::Arc;

use bitflags::bitflags;

use super::filesystem::{Access, Filesystem};
use super::tree::Copied;
use super::tree::Copies;
use super::{Mount, MountFlags, MountNamespace, Place, check_in, kinds};
use crate::errno::{Errno, Result};
use crate::fs::dentry::Dentry;
use crate::fs::inode::FileType;
use crate::fs::path::Path;
use crate::task::{Capabilities, current_process};

bitflags! {
    /// Flags of mount(2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Request: u64 {
        /// See [`MountFlags::READ_ONLY`]; of the file system, too, unless with `BIND`.
        const RDONLY = 1;
        /// Changes a mount.
        const REMOUNT = 0x20;
        /// See [`MountFlags::NOATIME`].
        const NOATIME = 0x400;
        /// See [`MountFlags::NODIRATIME`].
        const NODIRATIME = 0x800;
        /// Shows a directory at another place.
        const BIND = 0x1000;
        /// Moves a mount.
        const MOVE = 0x2000;
        /// With all below it.
        const REC = 0x4000;
        /// Say nothing in the log of the kernel.
        const SILENT = 0x8000;
        /// Cannot be bound elsewhere.
        const UNBINDABLE = 1 << 17;
        /// Takes no part in what happens to others.
        const PRIVATE = 1 << 18;
        /// Takes part in what happens to others, and not they in what happens to it.
        const SLAVE = 1 << 19;
        /// Both ways.
        const SHARED = 1 << 20;
        /// See [`MountFlags::RELATIME`].
        const RELATIME = 1 << 21;
        /// Access times are always kept.
        const STRICTATIME = 1 << 24;
        /// For the kernel's own mounts.
        const NOUSER = 1 << 31;
        const _ = !0;
    }
}

impl Request {
    const PROPAGATION: Self =
        Self::UNBINDABLE.union(Self::PRIVATE).union(Self::SLAVE).union(Self::SHARED);
    const ATIME: Self =
        Self::NOATIME.union(Self::NODIRATIME).union(Self::RELATIME).union(Self::STRICTATIME);

    /// Without the number that old programs put into the upper half (`MS_MGC_VAL`).
    pub fn without_magic(self) -> Self {
        const MASK: u64 = 0xffff_0000;
        const VALUE: u64 = 0xc0ed_0000;
        if self.bits() & MASK == VALUE { Self::from_bits_retain(self.bits() & !MASK) } else { self }
    }

    /// The properties of a mount that it asks for (`path_mount`, fs/namespace.c).
    fn properties(self, old: MountFlags) -> MountFlags {
        const KEPT: MountFlags = MountFlags::READ_ONLY
            .union(MountFlags::NOSUID)
            .union(MountFlags::NODEV)
            .union(MountFlags::NOEXEC)
            .union(MountFlags::NOSYMFOLLOW)
            .union(MountFlags::NOATIME)
            .union(MountFlags::NODIRATIME);
        let mut flags = MountFlags::from_bits_truncate(self.bits() as u32) & KEPT;
        let is_strict = self.intersects(Self::STRICTATIME | Self::NOATIME);
        flags.set(MountFlags::RELATIME, !is_strict);
        if self.contains(Self::STRICTATIME) {
            flags -= MountFlags::NOATIME;
        }
        if self.contains(Self::REMOUNT) && !self.intersects(Self::ATIME) {
            flags = (flags - MountFlags::ATIME) | (old & MountFlags::ATIME);
        }
        flags | old & (MountFlags::UNBINDABLE | MountFlags::LOCKS)
    }

    fn access(self) -> Access {
        if self.contains(Self::RDONLY) { Access::ReadOnly } else { Access::ReadWrite }
    }
}

/// The arguments of mount(2), but for the place.
pub struct Arguments<'a> {
    /// What to do.
    pub request: Request,
    /// The type of a new file system; `None`: not said.
    pub kind: Option<&'a [u8]>,
    /// Where it comes from, which is any text for a new file system.
    pub source: Option<&'a [u8]>,
    /// Options of the file system.
    pub options: &'a [u8],
}

/// Carries mount(2) out, once the caller may. `find` looks up a path.
pub fn mount(
    namespace: &MountNamespace,
    at: Path,
    arguments: &Arguments<'_>,
    find: impl Fn(&[u8]) -> Result<Path>,
) -> Result<()> {
    let request = arguments.request;
    // An empty source is none where it is a path.
    let from = || find(arguments.source.filter(|path| !path.is_empty()).ok_or(Errno::EINVAL)?);
    if request.contains(Request::REMOUNT | Request::BIND) {
        reconfigure(namespace, &at, request)
    } else if request.contains(Request::REMOUNT) {
        remount(namespace, &at, request, arguments.options)
    } else if request.contains(Request::BIND) {
        bind(namespace, &from()?, at, request)
    } else if request.intersects(Request::PROPAGATION) {
        change_propagation(namespace, &at, request)
    } else if request.contains(Request::MOVE) {
        move_mount(namespace, &from()?, at)
    } else {
        mount_new(namespace, at, arguments)
    }
}

/// Where something is to be mounted: on top of what is mounted there (`lock_mount`).
fn place_at(namespace: &MountNamespace, at: Path) -> Result<Place> {
    let at = at.topmost();
    let parent = at.mount().ok_or(Errno::EINVAL)?.clone();
    if at.dentry().is_unlinked() || parent.namespace() == 0 {
        return Err(Errno::ENOENT);
    }
    check_in(namespace, &parent)?;
    check_lasting(at.dentry())?;
    Ok(Place { parent, point: at.dentry().clone() })
}

/// `ENOENT` in the directory of a process in `/proc`: that goes with the process, and the mount would
/// have no name any more. Linux refuses `fd`, `fdinfo` and `map_files` alone there (`dont_mount`).
pub(super) fn check_lasting(point: &Arc<Dentry>) -> Result<()> {
    match Dentry::any_above(point, &|dentry| dentry.inode.process().is_some()) {
        true => Err(Errno::ENOENT),
        false => Ok(()),
    }
}

fn is_directory(dentry: &Dentry) -> bool {
    dentry.inode.file_type() == FileType::Directory
}

/// The mount whose root this is; `EINVAL` if it is none, or in another namespace.
fn mount_at<'a>(namespace: &MountNamespace, at: &'a Path) -> Result<&'a Arc<Mount>> {
    let mount = at.mount().ok_or(Errno::EINVAL)?;
    check_in(namespace, mount)?;
    if at.is_mount_root() { Ok(mount) } else { Err(Errno::EINVAL) }
}

/// `do_loopback`: shows what is at `from` at another place, too.
fn bind(namespace: &MountNamespace, from: &Path, at: Path, request: Request) -> Result<()> {
    let place = place_at(namespace, at)?;
    let mount = from.mount().ok_or(Errno::EINVAL)?;
    if mount.flags().contains(MountFlags::UNBINDABLE) {
        return Err(Errno::EINVAL);
    }
    check_in(namespace, mount)?;
    // Before anything is copied: a copy that has no place would hold itself.
    if is_directory(&place.point) != from.is_directory() {
        return Err(Errno::ENOTDIR);
    }
    let copies = match request.contains(Request::REC) {
        true => Copies::of_tree(mount, from.dentry(), Copied::Bindable)?,
        false if mount.has_locked_children_below(from.dentry()) => return Err(Errno::EINVAL),
        false => Copies::of_one(mount, from.dentry())?,
    };
    let top = copies.top();
    top.flags.set(top.flags() - MountFlags::LOCKED);
    namespace.graft(copies.top(), place);
    Ok(())
}

/// `do_new_mount`.
fn mount_new(namespace: &MountNamespace, at: Path, arguments: &Arguments<'_>) -> Result<()> {
    let kind = arguments.kind.ok_or(Errno::EINVAL)?;
    let request = arguments.request;
    let filesystem = kinds::open(kind, arguments.options, request.access())?;
    let root = filesystem.root.clone();
    let source = arguments.source.unwrap_or(b"none").into();
    let flags = properties_of_new(namespace, &filesystem, request)?;
    let mount = Mount::new(filesystem, root, source, flags)?;
    let place = place_at(namespace, at)?;
    if is_same_mounted(&place, &mount.filesystem) {
        return Err(Errno::EBUSY);
    }
    if is_directory(&place.point) != is_directory(&mount.root) {
        return Err(Errno::ENOTDIR);
    }
    namespace.graft(&mount, place);
    Ok(())
}

/// The properties of a new mount. Those outside of the initial user namespace have no devices of their
/// own (`sget_fc`, fs/super.c), and see no more of `/proc` and `/sys` than what their tree shows
/// already (`mount_too_revealing`, fs/namespace.c): `EPERM` if that does not show all of it.
fn properties_of_new(
    namespace: &MountNamespace,
    filesystem: &Arc<Filesystem>,
    request: Request,
) -> Result<MountFlags> {
    const DEVPTS: &str = "devpts";
    let flags = request.properties(MountFlags::empty());
    let users = current_process().credentials.borrow_mut().user_namespace.clone();
    if users.is_initial() {
        return Ok(flags);
    }
    if filesystem.owner == users {
        let no_devices = MountFlags::NODEV | MountFlags::LOCK_NODEV;
        return Ok(if filesystem.kind == DEVPTS { flags } else { flags | no_devices });
    }
    let shows_all = |mount: &&Arc<Mount>| {
        Arc::ptr_eq(&mount.filesystem, filesystem)
            && Arc::ptr_eq(&mount.root, &filesystem.root)
            && mount.flags().check_change(flags).is_ok()
            && !mount.children().iter().any(|child| child.is_locked() && !hides_nothing(child))
    };
    let mounts = namespace.mounts();
    let seen = mounts.iter().find(shows_all).ok_or(Errno::EPERM)?;
    Ok(flags | seen.flags() & (MountFlags::LOCKS - MountFlags::LOCKED))
}

/// Whether the directory that a mount is on is one of the kernel's own that are empty.
fn hides_nothing(mount: &Mount) -> bool {
    const CGROUPS: &str = "cgroup2";
    mount.filesystem.kind == CGROUPS
}

/// Whether the very file system is what is mounted there (`do_add_mount`).
fn is_same_mounted(place: &Place, filesystem: &Arc<Filesystem>) -> bool {
    Arc::ptr_eq(&place.parent.filesystem, filesystem)
        && Arc::ptr_eq(&place.parent.root, &place.point)
}

/// `do_reconfigure_mnt`: changes the properties of a mount, and not of its file system.
fn reconfigure(namespace: &MountNamespace, at: &Path, request: Request) -> Result<()> {
    let mount = mount_at(namespace, at)?;
    let flags = request.properties(mount.flags());
    mount.flags().check_change(flags)?;
    let becomes_read_only = (flags - mount.flags()).contains(MountFlags::READ_ONLY);
    if becomes_read_only && *mount.writers.borrow_mut() > 0 {
        return Err(Errno::EBUSY);
    }
    mount.flags.set(flags);
    Ok(())
}

/// `do_remount`: changes the file system, for all of its mounts, and the properties of this one.
fn remount(namespace: &MountNamespace, at: &Path, request: Request, options: &[u8]) -> Result<()> {
    let mount = mount_at(namespace, at)?;
    let flags = request.properties(mount.flags());
    check_owner(&mount.filesystem)?;
    mount.flags().check_change(flags)?;
    kinds::reconfigure(&mount.filesystem, options, request.access())?;
    mount.flags.set(flags);
    Ok(())
}

/// `EPERM` unless the caller has capabilities over a file system.
fn check_owner(filesystem: &Filesystem) -> Result<()> {
    let process = current_process();
    let credentials = process.credentials.borrow_mut();
    credentials.require_in(&filesystem.owner, Capabilities::SYS_ADMIN)
}

/// `do_change_type`: nothing that happens to a mount happens to others, so `MS_PRIVATE` and
/// `MS_SLAVE` change nothing, and `MS_SHARED` is refused.
fn change_propagation(namespace: &MountNamespace, at: &Path, request: Request) -> Result<()> {
    if !at.is_mount_root() {
        return Err(Errno::EINVAL);
    }
    let wanted = request - Request::REC - Request::SILENT;
    let is_one = Request::PROPAGATION.contains(wanted) && wanted.bits().is_power_of_two();
    if !is_one || wanted == Request::SHARED {
        return Err(Errno::EINVAL);
    }
    let mount = mount_at(namespace, at)?;
    let changed = match request.contains(Request::REC) {
        true => mount.with_descendants(),
        false => alloc::vec![mount.clone()],
    };
    for mount in changed {
        let mut flags = mount.flags();
        flags.set(MountFlags::UNBINDABLE, wanted == Request::UNBINDABLE);
        mount.flags.set(flags);
    }
    Ok(())
}

/// `do_move_mount`.
fn move_mount(namespace: &MountNamespace, from: &Path, at: Path) -> Result<()> {
    let place = place_at(namespace, at)?;
    let mount = mount_at(namespace, from)?;
    // The top of a tree stays there.
    if mount.place().is_none()
        || mount.is_locked()
        || is_directory(&place.point) != is_directory(&mount.root)
    {
        return Err(Errno::EINVAL);
    }
    if place.parent.is_below(mount) {
        return Err(Errno::ELOOP);
    }
    let old = mount.detach();
    mount.attach(place);
    drop(old);
    Ok(())
}

bitflags! {
    /// Flags of umount2(2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Unmount: u32 {
        /// Also while requests to the file system wait.
        const FORCE = 1;
        /// Now, although it is used: it ends with the last user.
        const DETACH = 2;
        /// If nobody has used it since the last such call.
        const EXPIRE = 4;
        /// The last part of the path is not followed.
        const NOFOLLOW = 8;
    }
}

/// Carries umount2(2) out, once the caller may, whose root directory is `root`.
pub fn unmount(namespace: &MountNamespace, root: &Path, at: Path, how: Unmount) -> Result<()> {
    if !at.is_mount_root() {
        return Err(Errno::EINVAL);
    }
    // From here on, the mount is held once.
    let mount = at.into_mount().ok_or(Errno::EINVAL)?;
    check_in(namespace, &mount)?;
    // Nobody notes when a mount was last used.
    if how.contains(Unmount::EXPIRE) || mount.place().is_none() || mount.is_locked() {
        return Err(Errno::EINVAL);
    }
    if !how.contains(Unmount::DETACH) {
        // The root stays, and becomes read-only (`do_umount_root`).
        if root.mount().is_some_and(|own| Arc::ptr_eq(own, &mount)) {
            check_owner(&mount.filesystem)?;
            return mount.filesystem.set_access(Access::ReadOnly);
        }
        if mount.is_busy() {
            return Err(Errno::EBUSY);
        }
    }
    namespace.unmount_tree(&mount);
    Ok(())
}

/// `EBUSY` if something is mounted on a name that is about to go, in the namespace of the mount
/// that it is reached by (`is_local_mountpoint`, fs/namespace.c).
pub fn check_removable(mount: Option<&Arc<Mount>>, dentry: &Arc<Dentry>) -> Result<()> {
    let Some(mount) = mount.filter(|_| dentry.is_mount_point()) else { return Ok(()) };
    let namespace = mount.filesystem.registry.namespace(mount.namespace());
    match namespace.is_some_and(|namespace| namespace.has_mount_on(dentry)) {
        true => Err(Errno::EBUSY),
        false => Ok(()),
    }
}

/// A name is gone: what other namespaces have mounted on it goes with it (`detach_mounts`).
pub fn removed(mount: Option<&Arc<Mount>>, dentry: &Arc<Dentry>) {
    let Some(mount) = mount.filter(|_| dentry.is_mount_point()) else { return };
    for namespace in mount.filesystem.registry.all_namespaces() {
        namespace.unmount_from(dentry);
    }
}
