//! Paths: places in the tree, as open files and processes hold them.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::dentry::Dentry;
use super::inode::{FileType, Inode};
use super::mount::{Mount, MountFlags};
use crate::errno::{Errno, Result};
use crate::task::thread::running;
use crate::task::user_namespace::UserNamespace;

/// A place in a tree: a directory or file, and the mount that it is reached by. Cheap to clone;
/// follows its file through renames.
#[derive(Clone)]
pub struct Path {
    /// `None` for files outside of every tree.
    mount: Option<Arc<Mount>>,
    dentry: Arc<Dentry>,
}

/// A name for a path, as seen from a root directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AbsoluteName {
    /// Reached from the root.
    Reachable(Vec<u8>),
    /// The name was removed; as above, without the ` (deleted)`.
    Deleted(Vec<u8>),
    /// Outside of the root directory.
    Unreachable(Vec<u8>),
}

impl AbsoluteName {
    /// As `/proc/self/fd/N` shows it.
    pub fn display(self) -> Vec<u8> {
        match self {
            Self::Reachable(name) | Self::Unreachable(name) => name,
            Self::Deleted(mut name) => {
                name.extend_from_slice(b" (deleted)");
                name
            }
        }
    }
}

impl Path {
    /// The place of a dentry in a mount.
    pub fn new(mount: Arc<Mount>, dentry: Arc<Dentry>) -> Self {
        Self { mount: Some(mount), dentry }
    }

    /// The root of a mount.
    fn root_of(mount: Arc<Mount>) -> Self {
        let dentry = mount.root.clone();
        Self::new(mount, dentry)
    }

    /// The place of a file outside of every tree: a pipe, a memory file.
    pub fn anonymous(dentry: Arc<Dentry>) -> Self {
        Self { mount: None, dentry }
    }

    /// Another place in the same mount.
    pub fn beside(&self, dentry: Arc<Dentry>) -> Self {
        Self { mount: self.mount.clone(), dentry }
    }

    /// The same place, which becomes another one of its mount.
    pub fn moved_to(self, dentry: Arc<Dentry>) -> Self {
        Self { mount: self.mount, dentry }
    }

    /// The name.
    pub fn dentry(&self) -> &Arc<Dentry> {
        &self.dentry
    }

    /// The mount; `None` for files outside of every tree.
    pub fn mount(&self) -> Option<&Arc<Mount>> {
        self.mount.as_ref()
    }

    /// The mount alone.
    pub fn into_mount(self) -> Option<Arc<Mount>> {
        self.mount
    }

    /// The file.
    pub fn inode(&self) -> &Arc<dyn Inode> {
        &self.dentry.inode
    }

    /// Whether this is a directory.
    pub fn is_directory(&self) -> bool {
        self.inode().file_type() == FileType::Directory
    }

    /// Whether two paths are the same place.
    pub fn is(&self, other: &Path) -> bool {
        Arc::ptr_eq(&self.dentry, &other.dentry) && self.is_in_mount_of(other)
    }

    /// Whether two paths lie in the same mount.
    pub fn is_in_mount_of(&self, other: &Path) -> bool {
        match (&self.mount, &other.mount) {
            (Some(own), Some(other)) => Arc::ptr_eq(own, other),
            (None, None) => true,
            _ => false,
        }
    }

    /// Whether this is the root of a mount.
    pub fn is_mount_root(&self) -> bool {
        self.mount.as_ref().is_some_and(|mount| Arc::ptr_eq(&mount.root, &self.dentry))
    }

    /// The properties of the mount.
    pub fn mount_flags(&self) -> MountFlags {
        self.mount.as_ref().map_or(MountFlags::empty(), |mount| mount.flags())
    }

    /// Whether set-user-ID bits and capabilities of files have an effect here for the running process, which
    /// is in `users` (`mnt_may_suid`, fs/namespace.c): the mount is one of its own tree, of a file system
    /// that these users or those above have mounted.
    pub fn may_give_privileges(&self, users: &UserNamespace) -> bool {
        let Some(mount) = &self.mount else { return true };
        // The first program is executed before a thread runs.
        let own = running().map(|thread| thread.process.with_fs(|fs| fs.namespace.number));
        own.is_none_or(|own| own == mount.namespace())
            && users.is_within(&mount.filesystem.owner)
            && !mount.flags().contains(MountFlags::NOSUID)
    }

    /// `EROFS` if nothing can be changed here (`mnt_want_write`, fs/namespace.c).
    pub fn check_writable(&self) -> Result<()> {
        match &self.mount {
            Some(mount) if mount.is_read_only() => Err(Errno::EROFS),
            _ => Ok(()),
        }
    }

    /// The directory that the root of a mount hides, and through mounts on top of each other: the
    /// first that is no such root. `None` at the top of a tree, and above `root`.
    fn below_mounts(&self, root: Option<&Path>) -> Option<Path> {
        let mut at = self.clone();
        while at.is_mount_root() {
            let place = at.mount.as_ref().and_then(|mount| mount.place())?;
            at = Path::new(place.parent, place.point);
            if root.is_some_and(|root| at.is(root)) {
                return None;
            }
        }
        Some(at)
    }

    /// The directory that holds this one, across mounts; itself at the top of
    /// the tree.
    pub fn parent(&self) -> Path {
        self.parent_below(None).unwrap_or_else(|| self.clone())
    }

    /// The directory that holds this one, across mounts, for those whose root directory is
    /// `root`; `None` if that lies above.
    pub fn parent_below(&self, root: Option<&Path>) -> Option<Path> {
        let at = self.below_mounts(root)?;
        let parent = at.dentry.parent()?;
        Some(at.moved_to(parent))
    }

    /// Whether the mount shows the file: a directory of which a part is mounted may have been moved
    /// out of that part (`path_connected`, fs/namei.c).
    /// A step up takes one of `steps`; `None` if these do not suffice.
    pub fn is_connected(&self, steps: &mut usize) -> Option<bool> {
        match &self.mount {
            Some(mount) if !Arc::ptr_eq(&mount.root, &mount.filesystem.root) => {
                Dentry::is_below_within(&self.dentry, &mount.root, steps)
            }
            _ => Some(true),
        }
    }

    /// The file system mounted here, if there is one, or this path.
    pub fn topmost(self) -> Path {
        let mut path = self;
        while path.dentry.is_mount_point()
            && let Some(mount) = path.mount.as_ref().and_then(|mount| mount.child_at(&path.dentry))
        {
            path = Self::root_of(mount);
        }
        path
    }

    /// The name from `root`.
    pub fn absolute_name(&self, root: &Path) -> AbsoluteName {
        let anonymous = self.mount.is_none();
        let mut steps = usize::MAX;
        let (name, is_reachable) = self.name_from(root, &mut steps).unwrap_or_default();
        if self.dentry.is_unlinked() {
            AbsoluteName::Deleted(name)
        } else if is_reachable || anonymous {
            AbsoluteName::Reachable(name)
        } else {
            AbsoluteName::Unreachable(name)
        }
    }

    /// The name from `root`, or from the top if that is not above, and whether it is. A step up takes
    /// one of `steps`, and each byte of the name does; `None` if these do not suffice.
    pub fn name_from(&self, root: &Path, steps: &mut usize) -> Option<(Vec<u8>, bool)> {
        let mut names: Vec<Arc<[u8]>> = Vec::new();
        let mut at = self.clone();
        let anonymous = self.mount.is_none();
        let mut is_reachable = true;
        while !at.is(root) {
            *steps = steps.checked_sub(1)?;
            let above = match at.is_mount_root() {
                true => at.mount.as_ref().and_then(|mount| mount.place()),
                false => None,
            };
            if let Some(place) = above {
                at = Path::new(place.parent, place.point);
                continue;
            }
            let parent = at.dentry.parent().filter(|_| !at.is_mount_root());
            if parent.is_some() || anonymous {
                let name = at.dentry.name();
                *steps = steps.checked_sub(name.len())?;
                names.push(name);
            }
            let Some(parent) = parent else {
                is_reachable = false;
                break;
            };
            at = at.moved_to(parent);
        }
        let mut name = Vec::new();
        for part in names.iter().rev() {
            if !(anonymous && name.is_empty()) {
                name.push(b'/');
            }
            name.extend_from_slice(part);
        }
        if name.is_empty() {
            name.push(b'/');
        }
        Some((name, is_reachable))
    }
}

/// The path of a name in a directory; without a slash before it, if that is the empty path.
pub fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    match directory {
        b"" => name.to_vec(),
        directory => [directory, b"/", name].concat(),
    }
}
