//! Mounts: file systems put together to trees, as in fs/namespace.c of Linux.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`filesystem`] | what is mounted: an instance of a file system, its options and its number |
//! | [`tree`] | mount namespaces: trees of mounts, of which each process has one |
//! | [`change`] | what mount(2) does to a tree that is there: binds, moves, remounts, unmounts |
//! | [`kinds`], [`options`] | new file systems, by name |
//! | [`pivot`] | pivot_root(2) |
//!
//! A mount shows a directory of a file system (its root) at a directory of another mount (its
//! place). The same directory may show at several places, so a dentry alone does not say where in
//! the tree it is: a [`Path`](super::path::Path) is a mount and a dentry.
//!
//! A mount that is in a tree and its place hold each other. A namespace owns its mounts, and takes
//! them apart when they leave it and when it ends, so that this cycle never outlives it.

pub mod change;
pub mod filesystem;
pub mod kinds;
pub mod options;
pub mod pivot;
pub mod tree;

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use bitflags::bitflags;

use super::dentry::Dentry;
use super::inode::Statfs;
use crate::errno::{Errno, Result};
use crate::mm::backing::Holder;
use crate::sync::KernelCell;
pub use filesystem::{Filesystem, Registry};
pub use tree::MountNamespace;

/// Mounts that a sandbox may have, those of all namespaces together, and those that are in no
/// tree any more and still in use. Linux has 100,000 for each namespace (`fs.mount-max`). Here the
/// number bounds the kernel's memory, and the time that one look at `/proc/self/mountinfo` takes.
pub const MOUNTS_MAX: usize = 8192;

bitflags! {
    /// Properties of a mount, with the values of mount(2).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct MountFlags: u32 {
        /// Nothing can be changed here.
        const READ_ONLY = 1;
        /// Set-user-ID bits and capabilities of files have no effect.
        const NOSUID = 2;
        /// Devices cannot be opened.
        const NODEV = 4;
        /// Programs cannot be executed.
        const NOEXEC = 8;
        /// Symbolic links are not followed.
        const NOSYMFOLLOW = 0x100;
        /// Access times are not kept.
        const NOATIME = 0x400;
        /// Access times of directories are not kept.
        const NODIRATIME = 0x800;
        /// It cannot be bound elsewhere.
        const UNBINDABLE = 1 << 17;
        /// Access times are kept if they are older than others.
        const RELATIME = 1 << 21;
        /// It cannot be taken from its place alone: that would show what it hides.
        const LOCKED = 1 << 25;
        /// [`MountFlags::READ_ONLY`] stays.
        const LOCK_READ_ONLY = 1 << 26;
        /// [`MountFlags::NOSUID`] stays.
        const LOCK_NOSUID = 1 << 27;
        /// [`MountFlags::NODEV`] stays.
        const LOCK_NODEV = 1 << 28;
        /// [`MountFlags::NOEXEC`] stays.
        const LOCK_NOEXEC = 1 << 29;
        /// [`MountFlags::ATIME`] stays.
        const LOCK_ATIME = 1 << 30;
    }
}

impl MountFlags {
    /// Those that say how access times are kept.
    pub const ATIME: Self = Self::NOATIME.union(Self::NODIRATIME).union(Self::RELATIME);

    /// All locks.
    const LOCKS: Self = Self::LOCKED
        .union(Self::LOCK_READ_ONLY)
        .union(Self::LOCK_NOSUID)
        .union(Self::LOCK_NODEV)
        .union(Self::LOCK_NOEXEC)
        .union(Self::LOCK_ATIME);

    /// Properties, and the locks that keep them.
    const LOCKABLE: [(Self, Self); 4] = [
        (Self::READ_ONLY, Self::LOCK_READ_ONLY),
        (Self::NOSUID, Self::LOCK_NOSUID),
        (Self::NODEV, Self::LOCK_NODEV),
        (Self::NOEXEC, Self::LOCK_NOEXEC),
    ];

    /// The same for users with fewer rights, who cannot take away what is set, nor what hides
    /// something (`lock_mnt_tree`, fs/namespace.c).
    fn locked(self) -> Self {
        let set = Self::LOCKABLE.iter().filter(|(flag, _)| self.contains(*flag));
        set.fold(self | Self::LOCKED | Self::LOCK_ATIME, |all, (_, lock)| all | *lock)
    }

    /// `EPERM` if a lock forbids these properties instead (`can_change_locked_flags`).
    fn check_change(self, new: Self) -> Result<()> {
        let loses = |(flag, lock): &(Self, Self)| self.contains(*lock) && !new.contains(*flag);
        let changes_atime = self.contains(Self::LOCK_ATIME) && (self ^ new).intersects(Self::ATIME);
        let is_forbidden = changes_atime || Self::LOCKABLE.iter().any(loses);
        if is_forbidden { Err(Errno::EPERM) } else { Ok(()) }
    }

    /// As `/proc/self/mountinfo` lists them (`show_mnt_opts`, fs/proc_namespace.c).
    pub fn text(self) -> String {
        const NAMES: [(MountFlags, &str); 7] = [
            (MountFlags::NOSUID, ",nosuid"),
            (MountFlags::NODEV, ",nodev"),
            (MountFlags::NOEXEC, ",noexec"),
            (MountFlags::NOATIME, ",noatime"),
            (MountFlags::NODIRATIME, ",nodiratime"),
            (MountFlags::RELATIME, ",relatime"),
            (MountFlags::NOSYMFOLLOW, ",nosymfollow"),
        ];
        NAMES.iter().filter(|(flag, _)| self.contains(*flag)).map(|(_, name)| *name).collect()
    }

    /// As statfs(2) has them in `f_flags`.
    fn of_statfs(self) -> i64 {
        const NAMES: [(MountFlags, i64); 8] = [
            (MountFlags::READ_ONLY, 1),
            (MountFlags::NOSUID, 2),
            (MountFlags::NODEV, 4),
            (MountFlags::NOEXEC, 8),
            (MountFlags::NOATIME, 0x400),
            (MountFlags::NODIRATIME, 0x800),
            (MountFlags::RELATIME, 0x1000),
            (MountFlags::NOSYMFOLLOW, 0x2000),
        ];
        NAMES.iter().filter(|(flag, _)| self.contains(*flag)).map(|(_, bit)| bit).sum()
    }
}

/// Where a mount is: the directory of another mount that it hides.
#[derive(Clone)]
pub struct Place {
    /// The other mount.
    pub parent: Arc<Mount>,
    /// The directory.
    pub point: Arc<Dentry>,
}

/// A mounted file system, or a part of one.
pub struct Mount {
    /// Number, as in `/proc/self/mountinfo`; never used again.
    pub id: u64,
    /// What is mounted.
    pub filesystem: Arc<Filesystem>,
    /// The directory or file of it that shows.
    pub root: Arc<Dentry>,
    /// What was mounted, as in `/proc/mounts`: any text.
    pub source: Arc<[u8]>,
    flags: KernelCell<MountFlags>,
    place: KernelCell<Option<Place>>,
    /// What is mounted on directories of this one, by the address of their dentry, which the
    /// other's place holds.
    children: KernelCell<BTreeMap<usize, Arc<Mount>>>,
    /// The number of the namespace that it is in; 0: none.
    namespace: KernelCell<u64>,
    /// Open file descriptions, and mappings of such, that may write.
    writers: KernelCell<u32>,
}

impl Mount {
    /// A mount without a place; `ENOSPC` if there are too many.
    pub fn new(
        filesystem: Arc<Filesystem>,
        root: Arc<Dentry>,
        source: Arc<[u8]>,
        flags: MountFlags,
    ) -> Result<Arc<Self>> {
        let id = filesystem.registry.new_mount()?;
        Ok(Arc::new(Self {
            id,
            filesystem,
            root,
            source,
            flags: KernelCell::new(flags),
            place: KernelCell::default(),
            children: KernelCell::default(),
            namespace: KernelCell::new(0),
            writers: KernelCell::new(0),
        }))
    }

    /// Another mount of the same file system, which shows `root`.
    fn copy(&self, root: &Arc<Dentry>) -> Result<Arc<Self>> {
        Self::new(self.filesystem.clone(), root.clone(), self.source.clone(), self.flags())
    }

    /// Its properties.
    pub fn flags(&self) -> MountFlags {
        self.flags.get()
    }

    /// Where it is; `None`: at the top of a tree, or in none.
    pub fn place(&self) -> Option<Place> {
        self.place.borrow_mut().clone()
    }

    /// The number of the namespace that it is in; 0: none.
    pub fn namespace(&self) -> u64 {
        self.namespace.get()
    }

    /// Whether it cannot be taken from its place alone.
    fn is_locked(&self) -> bool {
        self.flags().contains(MountFlags::LOCKED)
    }

    /// Whether something mounted below a directory of it could not be taken from there alone. One that
    /// is too deep to be looked at counts.
    fn has_locked_children_below(&self, root: &Arc<Dentry>) -> bool {
        let mut steps = tree::STEPS_MAX;
        let mut is_below = |child: &Arc<Mount>| {
            let Some(place) = child.place() else { return false };
            Dentry::is_below_within(&place.point, root, &mut steps) != Some(false)
        };
        self.children().iter().any(|child| child.is_locked() && is_below(child))
    }

    /// Whether nothing can be changed through it.
    pub fn is_read_only(&self) -> bool {
        self.flags().contains(MountFlags::READ_ONLY) || self.filesystem.is_read_only()
    }

    /// What is mounted on a directory of this mount.
    pub fn child_at(&self, point: &Arc<Dentry>) -> Option<Arc<Mount>> {
        self.children.borrow_mut().get(&address(point)).cloned()
    }

    /// What is mounted on directories of this mount, in the order of their numbers.
    fn children(&self) -> Vec<Arc<Mount>> {
        let mut all: Vec<Arc<Mount>> = self.children.borrow_mut().values().cloned().collect();
        all.sort_unstable_by_key(|mount| mount.id);
        all
    }

    /// The mount and all below it, parents first.
    fn with_descendants(self: &Arc<Self>) -> Vec<Arc<Mount>> {
        let mut all = alloc::vec![self.clone()];
        let mut next = 0;
        while let Some(mount) = all.get(next).cloned() {
            all.extend(mount.children());
            next += 1;
        }
        all
    }

    /// Whether it is `other` or lies below it in the tree.
    fn is_below(self: &Arc<Self>, other: &Arc<Mount>) -> bool {
        let mut at = self.clone();
        while !Arc::ptr_eq(&at, other) {
            match at.place() {
                Some(place) => at = place.parent,
                None => return false,
            }
        }
        true
    }

    /// Puts it on a directory on which nothing is mounted.
    fn attach(self: &Arc<Self>, place: Place) {
        place.point.note_mounted();
        let old = place.parent.children.borrow_mut().insert(address(&place.point), self.clone());
        debug_assert!(old.is_none());
        let before = self.place.borrow_mut().replace(place);
        debug_assert!(before.is_none());
    }

    /// Takes it from where it is, and says where that was.
    fn detach(self: &Arc<Self>) -> Option<Place> {
        let place = self.place.borrow_mut().take()?;
        let own = place.parent.children.borrow_mut().remove(&address(&place.point));
        drop(own);
        place.point.note_unmounted();
        Some(place)
    }

    /// Whether somebody uses it besides its namespace, its parent and the caller, who each hold it
    /// once (`propagate_mount_busy`, fs/pnode.c).
    fn is_busy(self: &Arc<Self>) -> bool {
        const OWN: usize = 3;
        !self.children.borrow_mut().is_empty() || Arc::strong_count(self) > OWN
    }

    /// Counts an open file description that may write.
    pub fn add_writer(&self) {
        *self.writers.borrow_mut() += 1;
        *self.filesystem.writers.borrow_mut() += 1;
    }

    /// Such a description is gone.
    pub fn remove_writer(&self) {
        *self.writers.borrow_mut() -= 1;
        *self.filesystem.writers.borrow_mut() -= 1;
    }

    /// Adds what statfs(2) says of the mount to what it says of the file system.
    pub fn complete_statfs(&self, mut statfs: Statfs) -> Statfs {
        const ST_VALID: i64 = 0x20;
        let mut flags = self.flags();
        flags.set(MountFlags::READ_ONLY, self.is_read_only());
        statfs.flags = flags.of_statfs() | ST_VALID;
        statfs
    }

    /// Options as in `/proc/mounts`: those of the mount, then those of the file system.
    pub fn options(&self) -> String {
        let access = if self.is_read_only() { "ro" } else { "rw" };
        alloc::format!("{access}{}{}", self.flags().text(), self.filesystem.options())
    }
}

impl Holder for Mount {
    fn forbids_execution(&self) -> bool {
        self.flags().contains(MountFlags::NOEXEC)
    }
}

/// A mapping of a file that was opened for writing: its mount cannot become read-only.
pub struct Writer(Arc<Mount>);

impl Writer {
    /// Counts it.
    pub fn new(mount: Arc<Mount>) -> Arc<Self> {
        mount.add_writer();
        Arc::new(Self(mount))
    }
}

impl Holder for Writer {
    fn forbids_execution(&self) -> bool {
        self.0.forbids_execution()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.remove_writer();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.filesystem.registry.mount_is_gone();
    }
}

fn address(dentry: &Arc<Dentry>) -> usize {
    Arc::as_ptr(dentry) as usize
}

/// `EINVAL` unless a mount is in this namespace (`check_mnt`, fs/namespace.c).
fn check_in(namespace: &MountNamespace, mount: &Mount) -> Result<()> {
    if mount.namespace() == namespace.number { Ok(()) } else { Err(Errno::EINVAL) }
}
