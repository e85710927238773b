//! Dentries: names in the tree, and the cache of what has been looked up.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::inode::Inode;
use crate::errno::{Errno, Result};
use crate::sync::KernelCell;

/// Negative entries that one directory may cache; beyond, they are forgotten.
const NEGATIVE_MAX: usize = 4096;
/// How deep into the tree a look for what can be forgotten goes: as deep as
/// trees are, but not deeper than the kernel stack.
const PRUNE_DEPTH: usize = 64;

/// A name, bound to an inode and to a place in the tree.
pub struct Dentry {
    /// What the name stands for.
    pub inode: Arc<dyn Inode>,
    name: KernelCell<Arc<[u8]>>,
    parent: KernelCell<Option<Arc<Dentry>>>,
    children: KernelCell<Children>,
    /// Mounts that hide it.
    mounts: AtomicU32,
    unlinked: AtomicBool,
    /// Whether a later walk can come to this dentry again, so that what it caches
    /// is of use. Without that, it and its children would only hold each other.
    can_be_found: bool,
}

#[derive(Default)]
struct Children {
    by_name: BTreeMap<Box<[u8]>, Option<Arc<Dentry>>>,
    negative: usize,
}

impl Dentry {
    /// The root of a tree of its own.
    pub fn root(inode: Arc<dyn Inode>) -> Arc<Self> {
        Self::build(inode, b"/", None, true)
    }

    /// A file outside of any tree, which shows as `name`: a pipe, a memory file.
    pub fn anonymous(inode: Arc<dyn Inode>, name: &[u8]) -> Arc<Self> {
        Self::build(inode, name, None, true)
    }

    /// A child that is not in the parent's cache.
    pub fn detached(inode: Arc<dyn Inode>, name: &[u8], parent: &Arc<Dentry>) -> Arc<Self> {
        Self::build(inode, name, Some(parent.clone()), false)
    }

    fn build(
        inode: Arc<dyn Inode>,
        name: &[u8],
        parent: Option<Arc<Dentry>>,
        can_be_found: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            inode,
            name: KernelCell::new(name.into()),
            parent: KernelCell::new(parent),
            children: KernelCell::default(),
            mounts: AtomicU32::new(0),
            unlinked: AtomicBool::new(false),
            can_be_found,
        })
    }

    /// The name in the parent.
    pub fn name(&self) -> Arc<[u8]> {
        self.name.borrow_mut().clone()
    }

    /// The parent in the same tree.
    pub fn parent(&self) -> Option<Arc<Dentry>> {
        self.parent.borrow_mut().clone()
    }

    /// Whether the name has been removed.
    pub fn is_unlinked(&self) -> bool {
        self.unlinked.load(Ordering::Relaxed)
    }

    /// Marks a file that never had a name (`O_TMPFILE`) or lost it.
    pub fn set_unlinked(&self) {
        self.unlinked.store(true, Ordering::Relaxed);
    }

    /// Whether children are kept for the next walk.
    pub fn caches_lookups(&self) -> bool {
        self.can_be_found && self.inode.caches_lookups()
    }

    /// Finds a child, asking the file system only if the answer is not cached.
    pub fn child(self: &Arc<Self>, name: &[u8]) -> Result<Option<Arc<Dentry>>> {
        if !self.caches_lookups() {
            let Some(inode) = self.inode.lookup(name)? else { return Ok(None) };
            let pinned = self.pinned(name).filter(|pinned| {
                pinned.inode.file_type() == inode.file_type() && !pinned.is_unlinked()
            });
            return Ok(Some(pinned.unwrap_or_else(|| Self::detached(inode, name, self))));
        }
        if let Some(cached) = self.children.borrow_mut().by_name.get(name) {
            return Ok(cached.clone());
        }
        match self.inode.lookup(name)? {
            Some(inode) => Ok(Some(self.attach(name, inode))),
            None => {
                self.attach_negative(name);
                Ok(None)
            }
        }
    }

    /// Adds a child for a file that now has this name.
    pub fn attach(self: &Arc<Self>, name: &[u8], inode: Arc<dyn Inode>) -> Arc<Dentry> {
        let child = Self::build(inode, name, Some(self.clone()), self.can_be_found);
        self.insert(name, child.clone());
        child
    }

    fn insert(&self, name: &[u8], child: Arc<Dentry>) {
        let old = {
            let mut children = self.children.borrow_mut();
            let old = children.by_name.insert(name.into(), Some(child));
            if matches!(old, Some(None)) {
                children.negative -= 1;
            }
            old
        };
        drop(old);
    }

    fn attach_negative(&self, name: &[u8]) {
        let mut children = self.children.borrow_mut();
        if children.negative >= NEGATIVE_MAX {
            children.by_name.retain(|_, child| child.is_some());
            children.negative = 0;
        }
        if children.by_name.insert(name.into(), None).is_none() {
            children.negative += 1;
        }
    }

    /// The name is gone: whoever holds the dentry sees it as deleted.
    pub fn detach(&self, name: &[u8]) {
        let old = {
            let mut children = self.children.borrow_mut();
            let old = children.by_name.remove(name);
            if matches!(old, Some(None)) {
                children.negative -= 1;
            }
            old
        };
        if let Some(Some(child)) = old {
            child.set_unlinked();
        }
    }

    /// Moves `name` to `new_name` below `to`, so that open files follow.
    pub fn transfer(name: &[u8], from: &Arc<Dentry>, new_name: &[u8], to: &Arc<Dentry>) {
        let moved = from.take(name);
        to.detach(new_name);
        if let Some(child) = moved {
            to.adopt(new_name, child);
        }
    }

    /// Exchanges two names.
    pub fn exchange(name: &[u8], from: &Arc<Dentry>, new_name: &[u8], to: &Arc<Dentry>) {
        let first = from.take(name);
        let second = to.take(new_name);
        if let Some(child) = first {
            to.adopt(new_name, child);
        }
        if let Some(child) = second {
            from.adopt(name, child);
        }
    }

    fn take(&self, name: &[u8]) -> Option<Arc<Dentry>> {
        let mut children = self.children.borrow_mut();
        let old = children.by_name.remove(name);
        if matches!(old, Some(None)) {
            children.negative -= 1;
        }
        old.flatten()
    }

    fn adopt(self: &Arc<Self>, name: &[u8], child: Arc<Dentry>) {
        *child.name.borrow_mut() = name.into();
        let old = child.parent.borrow_mut().replace(self.clone());
        drop(old);
        self.insert(name, child);
    }

    /// Forgets children that nobody holds, and what they have cached. The file
    /// system is asked again when they are next wanted.
    pub fn prune(&self) {
        self.prune_down(PRUNE_DEPTH);
    }

    fn prune_down(&self, depth: usize) {
        let children: Vec<Arc<Dentry>> =
            self.children.borrow_mut().by_name.values().flatten().cloned().collect();
        if depth > 0 {
            children.iter().for_each(|child| child.prune_down(depth - 1));
        }
        drop(children);
        let mut dropped = Vec::new();
        {
            let mut children = self.children.borrow_mut();
            children.negative = 0;
            children.by_name.retain(|_, slot| {
                let Some(child) = slot else { return false };
                // Held by the cache alone: not even by children of its own.
                let kept = Arc::strong_count(child) > 1 || child.is_mount_point();
                if !kept {
                    dropped.extend(slot.take());
                }
                kept
            });
        }
    }

    /// Whether something is mounted here, in any tree.
    pub fn is_mount_point(&self) -> bool {
        self.mounts.load(Ordering::Relaxed) > 0
    }

    /// Something is mounted here: from now on, walks have to come to this dentry and no other.
    pub fn note_mounted(self: &Arc<Self>) {
        self.mounts.fetch_add(1, Ordering::Relaxed);
        let mut at = self.clone();
        while let Some(parent) = at.parent().filter(|parent| !parent.caches_lookups()) {
            if !at.is_unlinked() && parent.pinned(&at.name()).is_none() {
                parent.insert(&at.name(), at);
            }
            at = parent;
        }
    }

    /// Something is mounted here no more.
    pub fn note_unmounted(self: &Arc<Self>) {
        self.mounts.fetch_sub(1, Ordering::Relaxed);
        let mut at = self.clone();
        while let Some(parent) = at.parent().filter(|parent| !parent.caches_lookups()) {
            if at.is_mount_point() || !at.children.borrow_mut().by_name.is_empty() {
                break;
            }
            let name = at.name();
            if parent.pinned(&name).is_some_and(|pinned| Arc::ptr_eq(&pinned, &at)) {
                drop(parent.take(&name));
            }
            at = parent;
        }
    }

    /// `EBUSY` if a name that is about to go or to move is kept because something is mounted on it
    /// or below it. The file system knows such files by their names, so what is kept would lead to
    /// other files afterwards.
    pub fn check_not_pinned(&self, name: &[u8]) -> Result<()> {
        match !self.caches_lookups() && self.pinned(name).is_some() {
            true => Err(Errno::EBUSY),
            false => Ok(()),
        }
    }

    /// The child that is kept because something is mounted on it or below it.
    fn pinned(&self, name: &[u8]) -> Option<Arc<Dentry>> {
        self.children.borrow_mut().by_name.get(name).cloned().flatten()
    }

    /// Whether `dentry` is `ancestor` or lies below it in the same file system.
    pub fn is_below(dentry: &Arc<Dentry>, ancestor: &Arc<Dentry>) -> bool {
        let mut steps = usize::MAX;
        Self::is_below_within(dentry, ancestor, &mut steps) == Some(true)
    }

    /// Whether a dentry or one above it in the same file system has a property.
    pub fn any_above(dentry: &Arc<Dentry>, has: &dyn Fn(&Dentry) -> bool) -> bool {
        let mut at = Some(dentry.clone());
        while let Some(dentry) = at {
            if has(&dentry) {
                return true;
            }
            at = dentry.parent();
        }
        false
    }

    /// The same, where a step up takes one of `steps`; `None` if these do not suffice.
    pub fn is_below_within(
        dentry: &Arc<Dentry>,
        ancestor: &Arc<Dentry>,
        steps: &mut usize,
    ) -> Option<bool> {
        let mut at = dentry.clone();
        while !Arc::ptr_eq(&at, ancestor) {
            *steps = steps.checked_sub(1)?;
            let Some(parent) = at.parent() else { return Some(false) };
            at = parent;
        }
        Some(true)
    }

    /// The name from the root of the file system. A step up takes one of `steps`, and each byte of
    /// the name does; `None` if these do not suffice.
    pub fn name_in_filesystem(self: &Arc<Self>, steps: &mut usize) -> Option<Vec<u8>> {
        let mut names = Vec::new();
        let mut at = self.clone();
        while let Some(parent) = at.parent() {
            let name = at.name();
            *steps = steps.checked_sub(1 + name.len())?;
            names.push(name);
            at = parent;
        }
        let mut path: Vec<u8> = Vec::new();
        for name in names.iter().rev() {
            path.push(b'/');
            path.extend_from_slice(name);
        }
        Some(if path.is_empty() { b"/".to_vec() } else { path })
    }

    /// Forgets all that is known below the root of a file system that is gone. Without recursion:
    /// a program may nest directories as deep as it likes.
    pub fn dismantle(root: &Arc<Dentry>) {
        let mut waiting = alloc::vec![root.clone()];
        while let Some(dentry) = waiting.pop() {
            let children = core::mem::take(&mut *dentry.children.borrow_mut());
            waiting.extend(children.by_name.into_values().flatten());
        }
    }
}

impl Drop for Dentry {
    /// Lets go of the ancestors in a loop: a long chain of removed directories
    /// must not become a deep recursion on the kernel stack.
    fn drop(&mut self) {
        let mut next = self.parent.borrow_mut().take();
        while let Some(dentry) = next {
            next = Arc::into_inner(dentry).and_then(|last| last.parent.borrow_mut().take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::inode::{FileType, FilesystemId};
    use super::super::pseudo::{Directory, Fixed, Item, Kind, Names, Place};
    use super::*;

    const ITEMS: &[Item] = &[Item { name: "leaf", kind: Kind::Text("text") }];

    /// A directory of directories, made anew at every look.
    struct MadeAnew;

    impl Names for MadeAnew {
        fn lookup(&self, name: &[u8], directory: &Place) -> Result<Option<Arc<dyn Inode>>> {
            Ok(Some(Directory::new(directory.below(name), Fixed(ITEMS))))
        }

        fn list(&self, _: &mut dyn FnMut(&[u8], FileType)) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_no_walk_finds_again_is_not_kept() {
        let place = Place { filesystem: FilesystemId(9), magic: 0, ino: 1, owner: (0, 0) };
        let root = Dentry::root(Directory::new(place, MadeAnew));
        let directory = root.child(b"directory").unwrap().unwrap();
        let gone = Arc::downgrade(&directory);
        let leaf = directory.child(b"leaf").unwrap().unwrap();
        drop((directory, leaf));
        assert!(gone.upgrade().is_none());

        let root = Dentry::root(Directory::new(place, Fixed(ITEMS)));
        let kept = Arc::downgrade(&root.child(b"leaf").unwrap().unwrap());
        assert!(kept.upgrade().is_some());
    }
}
