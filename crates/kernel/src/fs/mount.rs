//! Mounts: file systems put together to one tree.
//!
//! Every file system is mounted once, at boot, so a dentry alone says where in
//! the tree it is.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::dentry::Dentry;

/// A mounted file system.
pub struct Mount {
    /// Number, as in `/proc/self/mountinfo`.
    pub id: u32,
    /// Number of the mount that holds the mount point.
    pub parent_id: u32,
    /// File system type, such as `proc`.
    pub kind: &'static str,
    /// What is mounted, as in `/proc/mounts`.
    pub source: &'static str,
    /// Options, as in `/proc/mounts`.
    pub options: &'static str,
    /// The root of the mounted file system.
    pub root: Arc<Dentry>,
    /// The directory that it hides; `None` for the root mount.
    pub covers: Option<Arc<Dentry>>,
}

/// What to mount.
pub struct NewMount {
    /// See [`Mount::kind`].
    pub kind: &'static str,
    /// See [`Mount::source`].
    pub source: &'static str,
    /// See [`Mount::options`].
    pub options: &'static str,
    /// See [`Mount::root`].
    pub root: Arc<Dentry>,
}

/// All mounts.
#[derive(Default)]
pub struct MountTable {
    mounts: Vec<Arc<Mount>>,
}

impl MountTable {
    /// Mounts a file system over a directory.
    pub fn mount(&mut self, new: NewMount, covers: Option<Arc<Dentry>>) -> Arc<Mount> {
        let mount = Arc::new(Mount {
            id: self.mounts.len() as u32 + 1,
            parent_id: covers.as_ref().map_or(0, |at| self.containing(at)),
            kind: new.kind,
            source: new.source,
            options: new.options,
            root: new.root,
            covers,
        });
        mount.root.set_root_of(mount.clone());
        if let Some(covered) = &mount.covers {
            covered.set_covered(mount.clone());
        }
        self.mounts.push(mount.clone());
        mount
    }

    /// All of them, in mount order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Mount>> {
        self.mounts.iter()
    }

    fn containing(&self, dentry: &Arc<Dentry>) -> u32 {
        mount_of(dentry).map_or(0, |mount| mount.id)
    }
}

/// The mount that a dentry lies in; `None` for files outside of the tree.
pub fn mount_of(dentry: &Arc<Dentry>) -> Option<Arc<Mount>> {
    let mut at = dentry.clone();
    loop {
        if let Some(mount) = at.root_of() {
            return Some(mount);
        }
        let parent = at.parent()?;
        at = parent;
    }
}
