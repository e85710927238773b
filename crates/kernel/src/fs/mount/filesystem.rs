//! Instances of file systems, and their numbers.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::sync::{Arc, Weak};

use super::MOUNTS_MAX;
use super::tree::MountNamespace;
use crate::errno::{Errno, Result};
use crate::fs::dentry::Dentry;
use crate::fs::inode::FilesystemId;
use crate::fs::notify;
use crate::fs::overlay::node_of_inode;
use crate::sync::KernelCell;
use crate::task::user_namespace::UserNamespace;

/// First number of file systems that programs mount: those of the host's start command are below.
const FIRST_NUMBER: u32 = 1024;

/// What exists of mounts, file systems and namespaces.
#[derive(Default)]
pub struct Registry {
    /// Number of the last mount that was made.
    last_mount: KernelCell<u64>,
    /// Mounts that exist.
    mounts: KernelCell<usize>,
    /// Numbers of file systems that programs have mounted.
    numbers: KernelCell<BTreeSet<u32>>,
    /// Number of the last namespace that was made.
    last_namespace: KernelCell<u64>,
    /// Namespaces that exist, by number.
    pub(super) namespaces: KernelCell<BTreeMap<u64, Weak<MountNamespace>>>,
}

impl Registry {
    /// Counts a mount; its number. `ENOSPC` if there are too many.
    pub(super) fn new_mount(&self) -> Result<u64> {
        self.check_room(1)?;
        *self.mounts.borrow_mut() += 1;
        let mut last = self.last_mount.borrow_mut();
        *last += 1;
        Ok(*last)
    }

    /// `ENOSPC` unless there may be so many mounts more.
    pub(super) fn check_room(&self, mounts: usize) -> Result<()> {
        if self.mounts.get() + mounts <= MOUNTS_MAX { Ok(()) } else { Err(Errno::ENOSPC) }
    }

    pub(super) fn mount_is_gone(&self) {
        *self.mounts.borrow_mut() -= 1;
    }

    /// Mounts that exist.
    pub fn mounts(&self) -> usize {
        self.mounts.get()
    }

    pub(super) fn new_namespace(&self) -> u64 {
        let mut last = self.last_namespace.borrow_mut();
        *last += 1;
        *last
    }

    /// The namespaces that exist.
    pub(super) fn all_namespaces(&self) -> alloc::vec::Vec<Arc<MountNamespace>> {
        self.namespaces.borrow_mut().values().filter_map(Weak::upgrade).collect()
    }

    /// The namespace of a number; `None`: it has ended, or the number is 0.
    pub fn namespace(&self, number: u64) -> Option<Arc<MountNamespace>> {
        self.namespaces.borrow_mut().get(&number)?.upgrade()
    }

    /// A number for a new file system: the lowest that is free, since device numbers follow from it
    /// and have few bits. There are never more file systems than mounts.
    pub(super) fn new_filesystem(self: &Arc<Self>) -> Number {
        let mut numbers = self.numbers.borrow_mut();
        let free = (FIRST_NUMBER..).zip(numbers.iter().copied().map(Some).chain([None]));
        let mut free = free.filter(|(number, taken)| *taken != Some(*number));
        let number = free.next().map_or(FIRST_NUMBER, |(number, _)| number);
        numbers.insert(number);
        Number { number, registry: self.clone() }
    }
}

/// The number of a file system that a program has mounted, which is free again afterwards.
pub(super) struct Number {
    number: u32,
    registry: Arc<Registry>,
}

impl Number {
    pub(super) fn id(&self) -> FilesystemId {
        FilesystemId(self.number)
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        self.registry.numbers.borrow_mut().remove(&self.number);
    }
}

/// An instance of a file system: Linux calls it a super block. It exists as long as mounts of it
/// do.
pub struct Filesystem {
    /// Type, such as `proc`.
    pub kind: &'static str,
    /// Its root directory.
    pub root: Arc<Dentry>,
    /// Options of its own, as in `/proc/mounts`: empty, or with a comma in front.
    options: KernelCell<String>,
    access: KernelCell<Access>,
    /// The users among whom it was mounted, over which its options are.
    pub owner: UserNamespace,
    /// Open file descriptions that may write, of all mounts.
    pub(super) writers: KernelCell<u32>,
    pub(super) registry: Arc<Registry>,
    /// Given back when the file system is gone.
    number: Option<Number>,
}

/// What may be done with the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// All.
    ReadWrite,
    /// Reading, until it is mounted again for writing.
    ReadOnly,
    /// Reading, for ever: the host allows no more.
    ReadOnlyForEver,
}

impl Filesystem {
    /// A file system that the sandbox begins with.
    pub fn new(
        registry: &Arc<Registry>,
        kind: &'static str,
        root: Arc<Dentry>,
        options: &str,
        access: Access,
    ) -> Arc<Self> {
        Self::build(registry, (kind, root), options, access, (UserNamespace::INITIAL, None))
    }

    /// A file system that a program mounts.
    pub(super) fn of_program(
        (number, owner): (Number, UserNamespace),
        kind: &'static str,
        root: Arc<Dentry>,
        options: &str,
        access: Access,
    ) -> Arc<Self> {
        let registry = number.registry.clone();
        Self::build(&registry, (kind, root), options, access, (owner, Some(number)))
    }

    fn build(
        registry: &Arc<Registry>,
        (kind, root): (&'static str, Arc<Dentry>),
        options: &str,
        access: Access,
        (owner, number): (UserNamespace, Option<Number>),
    ) -> Arc<Self> {
        Arc::new(Self {
            kind,
            root,
            options: KernelCell::new(options.into()),
            access: KernelCell::new(access),
            owner,
            writers: KernelCell::new(0),
            registry: registry.clone(),
            number,
        })
    }

    /// Options of its own: empty, or with a comma in front.
    pub fn options(&self) -> String {
        self.options.borrow_mut().clone()
    }

    pub(super) fn set_options(&self, options: String) {
        *self.options.borrow_mut() = options;
    }

    /// Whether nothing can be changed.
    pub fn is_read_only(&self) -> bool {
        self.access.get() != Access::ReadWrite
    }

    /// Allows or forbids changes. `EBUSY`: somebody may write. `EACCES`: the host forbids them.
    pub(super) fn set_access(&self, access: Access) -> Result<()> {
        match (self.access.get(), access) {
            (old, new) if old == new => return Ok(()),
            (Access::ReadOnlyForEver, Access::ReadOnly) => return Ok(()),
            (Access::ReadOnlyForEver, _) => return Err(Errno::EACCES),
            (Access::ReadWrite, _) if self.writers.get() > 0 => return Err(Errno::EBUSY),
            _ => {}
        }
        self.access.set(access);
        Ok(())
    }
}

impl Drop for Filesystem {
    /// No path leads to its files any more, so nothing is kept: directories that are known hold
    /// each other.
    fn drop(&mut self) {
        if let Some(number) = &self.number {
            notify::unmounted(number.id());
        }
        Dentry::dismantle(&self.root);
        if let Some(node) = node_of_inode(&self.root.inode) {
            node.dismantle();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_number_is_taken() {
        let registry = Arc::new(Registry::default());
        let mut taken: alloc::vec::Vec<Number> =
            (0..4).map(|_| registry.new_filesystem()).collect();
        assert_eq!(taken[3].number, FIRST_NUMBER + 3);
        drop(taken.remove(1));
        assert_eq!(registry.new_filesystem().number, FIRST_NUMBER + 1);
        let first = registry.new_filesystem();
        assert_eq!(first.number, FIRST_NUMBER + 1);
        assert_eq!(registry.new_filesystem().number, FIRST_NUMBER + 4);
    }
}
