//! Paths: places in the tree, as open files and processes hold them.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::dentry::Dentry;
use super::inode::{FileType, Inode};

/// A place in the tree. Cheap to clone; follows its file through renames.
#[derive(Clone)]
pub struct Path {
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
    /// The path of a dentry.
    pub fn new(dentry: Arc<Dentry>) -> Self {
        Self { dentry }
    }

    /// The name.
    pub fn dentry(&self) -> &Arc<Dentry> {
        &self.dentry
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
        Arc::ptr_eq(&self.dentry, &other.dentry)
    }

    /// The directory that holds this one, across mounts; itself at the top of
    /// the tree.
    pub fn parent(&self) -> Path {
        let mut at = self.dentry.clone();
        // The root of a mounted file system: go on from the directory that it hides.
        while let Some(covered) = at.root_of().and_then(|mount| mount.covers.clone()) {
            at = covered;
        }
        let parent = at.parent();
        Path::new(parent.unwrap_or(at))
    }

    /// The file system mounted here, if there is one, or this path.
    pub fn topmost(self) -> Path {
        let mut path = self;
        while let Some(mount) = path.dentry.covered_by() {
            path = Path::new(mount.root.clone());
        }
        path
    }

    /// Whether `self` lies below `ancestor` or is it.
    pub fn is_below(&self, ancestor: &Path) -> bool {
        let mut at = self.clone();
        loop {
            if at.is(ancestor) {
                return true;
            }
            let up = at.parent();
            if up.is(&at) {
                return false;
            }
            at = up;
        }
    }

    /// The name from `root`.
    pub fn absolute_name(&self, root: &Path) -> AbsoluteName {
        let mut names: Vec<Arc<[u8]>> = Vec::new();
        let mut at = self.dentry.clone();
        let mut reachable = true;
        let mut anonymous = false;
        loop {
            if Arc::ptr_eq(&at, &root.dentry) {
                break;
            }
            if let Some(covered) = at.root_of().and_then(|mount| mount.covers.clone()) {
                at = covered;
                continue;
            }
            match at.parent() {
                Some(parent) => {
                    names.push(at.name());
                    at = parent;
                }
                None => {
                    reachable = false;
                    if at.root_of().is_none() {
                        anonymous = true;
                        names.push(at.name());
                    }
                    break;
                }
            }
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
        if self.dentry.is_unlinked() {
            AbsoluteName::Deleted(name)
        } else if reachable || anonymous {
            AbsoluteName::Reachable(name)
        } else {
            AbsoluteName::Unreachable(name)
        }
    }
}
