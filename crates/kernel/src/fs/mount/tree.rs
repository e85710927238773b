//! Mount namespaces: trees of mounts (mount_namespaces(7)).

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::filesystem::{Filesystem, Registry};
use super::{Mount, MountFlags, Place};
use crate::errno::{Errno, Result};
use crate::fs::dentry::Dentry;
use crate::fs::path::Path;
use crate::sync::KernelCell;
use crate::task::namespace::{Common, Kind};
use crate::task::user_namespace::UserNamespace;

/// Steps up in a file system that copying a tree takes at most: a program may nest directories as deep
/// as it likes.
pub(super) const STEPS_MAX: usize = 1 << 22;

/// A tree of mounts. It ends with the last process, or descriptor, that has it.
///
/// At its top is an empty file system that the root file system is mounted on, so that the root can
/// be moved like any other mount: Linux has its `rootfs` there.
pub struct MountNamespace {
    /// Number, from 1 on.
    pub number: u64,
    /// Its number as a file, and its owner.
    pub common: Common,
    top: Arc<Mount>,
    mounts: KernelCell<BTreeMap<u64, Arc<Mount>>>,
    registry: Arc<Registry>,
}

/// What is taken along when a tree is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copied {
    /// What a bind with `MS_REC` takes.
    Bindable,
    /// All.
    All,
}

/// A copy of a tree, in no namespace yet: originals and copies, parents first.
pub(super) struct Copies(Vec<(Arc<Mount>, Arc<Mount>)>);

impl Copies {
    /// Copies a mount, shown from `root` on, alone.
    pub(super) fn of_one(mount: &Arc<Mount>, root: &Arc<Dentry>) -> Result<Self> {
        Ok(Self(alloc::vec![(mount.clone(), mount.copy(root)?)]))
    }

    /// Copies a mount, shown from `root` on, and all below that. `ENOSPC` if these are too many, or
    /// their places too deep to be looked at. `EPERM`: what is not taken cannot be left out.
    pub(super) fn of_tree(mount: &Arc<Mount>, root: &Arc<Dentry>, what: Copied) -> Result<Self> {
        let is_taken = |child: &Arc<Mount>| match child.flags() {
            flags if what == Copied::All || !flags.contains(MountFlags::UNBINDABLE) => Ok(true),
            // What it hides would show.
            flags if flags.contains(MountFlags::LOCKED) => Err(Errno::EPERM),
            _ => Ok(false),
        };
        let mut steps = STEPS_MAX;
        let mut taken: Vec<(Arc<Mount>, usize)> = alloc::vec![(mount.clone(), 0)];
        let mut next = 0;
        while let Some((parent, _)) = taken.get(next).cloned() {
            for child in parent.children() {
                let Some(place) = child.place() else { continue };
                let shows = next > 0
                    || Dentry::is_below_within(&place.point, root, &mut steps)
                        .ok_or(Errno::ENOSPC)?;
                if shows && is_taken(&child)? {
                    taken.push((child, next));
                }
            }
            next += 1;
        }
        mount.filesystem.registry.check_room(taken.len())?;
        let mut copies: Vec<(Arc<Mount>, Arc<Mount>)> = Vec::with_capacity(taken.len());
        for (original, parent) in taken {
            let shown = if copies.is_empty() { root } else { &original.root };
            let copy = original.copy(shown)?;
            if let (Some((_, parent)), Some(place)) = (copies.get(parent), original.place()) {
                copy.attach(Place { parent: parent.clone(), point: place.point });
            }
            copies.push((original, copy));
        }
        Ok(Self(copies))
    }

    /// The copy of the mount at the top.
    pub(super) fn top(&self) -> &Arc<Mount> {
        &self.0[0].1
    }

    /// The same place in the copy; the place itself if its mount was not copied.
    fn translate(&self, path: &Path) -> Path {
        let copied = path.mount().and_then(|mount| {
            self.0.iter().find(|(original, _)| Arc::ptr_eq(original, mount)).map(|(_, copy)| copy)
        });
        match copied {
            Some(copy) => Path::new(copy.clone(), path.dentry().clone()),
            None => path.clone(),
        }
    }
}

impl MountNamespace {
    /// A namespace with an empty file system at its top.
    pub fn new(filesystem: Arc<Filesystem>) -> Result<Arc<Self>> {
        let root = filesystem.root.clone();
        let top = Mount::new(filesystem, root, b"rootfs"[..].into(), MountFlags::empty())?;
        Ok(Self::with_top(top, Common::first(Kind::Mounts)))
    }

    fn with_top(top: Arc<Mount>, common: Common) -> Arc<Self> {
        let registry = top.filesystem.registry.clone();
        let number = registry.new_namespace();
        let namespace = Arc::new(Self {
            number,
            common,
            top: top.clone(),
            mounts: KernelCell::default(),
            registry: registry.clone(),
        });
        namespace.adopt(&top);
        registry.namespaces.borrow_mut().insert(number, Arc::downgrade(&namespace));
        namespace
    }

    /// A copy of this namespace that has an owner, and where two places of it are in the copy
    /// (`copy_mnt_ns`, fs/namespace.c).
    pub fn copy(
        &self,
        owner: &UserNamespace,
        places: [&Path; 2],
    ) -> Result<(Arc<Self>, [Path; 2])> {
        let common = Common::new(Kind::Mounts, owner)?;
        let copies = Copies::of_tree(&self.top, &self.top.root, Copied::All)?;
        if common.owner() != self.common.owner() {
            copies.0.iter().for_each(|(_, copy)| copy.flags.set(copy.flags().locked()));
        }
        let namespace = Self::with_top(copies.top().clone(), common);
        Ok((namespace, places.map(|place| copies.translate(place))))
    }

    /// The place that all of the tree is below.
    pub(in crate::fs) fn top(&self) -> Path {
        Path::new(self.top.clone(), self.top.root.clone())
    }

    /// The root directory that processes begin with.
    pub fn root(&self) -> Path {
        self.top().topmost()
    }

    /// All mounts that show, in the order of their numbers.
    pub fn mounts(&self) -> Vec<Arc<Mount>> {
        self.mounts.borrow_mut().values().cloned().collect()
    }

    /// Whether something is mounted on this directory here.
    pub(super) fn has_mount_on(&self, dentry: &Arc<Dentry>) -> bool {
        !self.mounts_on(dentry).is_empty()
    }

    fn mounts_on(&self, dentry: &Arc<Dentry>) -> Vec<Arc<Mount>> {
        let is_there = |mount: &&Arc<Mount>| {
            mount.place.borrow_mut().as_ref().is_some_and(|at| Arc::ptr_eq(&at.point, dentry))
        };
        self.mounts.borrow_mut().values().filter(is_there).cloned().collect()
    }

    /// Unmounts what is mounted on a directory that is gone.
    pub(super) fn unmount_from(&self, dentry: &Arc<Dentry>) {
        self.mounts_on(dentry).iter().for_each(|mount| self.unmount_tree(mount));
    }

    /// Puts a tree on a directory.
    pub(in crate::fs) fn graft(&self, tree: &Arc<Mount>, place: Place) {
        tree.attach(place);
        self.adopt(tree);
    }

    fn adopt(&self, tree: &Arc<Mount>) {
        for mount in tree.with_descendants() {
            mount.namespace.set(self.number);
            self.mounts.borrow_mut().insert(mount.id, mount);
        }
    }

    /// Takes a mount and all below it from the tree, and apart (`umount_tree`, fs/namespace.c).
    pub(super) fn unmount_tree(&self, mount: &Arc<Mount>) {
        let gone = mount.with_descendants();
        for mount in &gone {
            mount.namespace.set(0);
            self.mounts.borrow_mut().remove(&mount.id);
        }
        take_apart(gone);
    }
}

/// Takes mounts from their places. What they hold goes afterwards, one by one.
fn take_apart(mounts: Vec<Arc<Mount>>) {
    let places: Vec<Option<Place>> = mounts.iter().map(Mount::detach).collect();
    drop(mounts);
    drop(places);
}

impl Drop for MountNamespace {
    fn drop(&mut self) {
        self.registry.namespaces.borrow_mut().remove(&self.number);
        let mounts = core::mem::take(&mut *self.mounts.borrow_mut());
        let mounts: Vec<Arc<Mount>> = mounts.into_values().collect();
        mounts.iter().for_each(|mount| mount.namespace.set(0));
        take_apart(mounts);
    }
}
