//! The overlay: an in-memory file system above an optional lower layer.
//!
//! There is one tree of nodes. A node that comes from the lower layer is made
//! when it is first looked up, with a reference to what it stands for; its
//! content stays below. Changing it changes the node: attributes at once,
//! content page by page ([`pages`]), directories entry by entry, with whiteouts
//! for names that the lower layer has and the guest removed. A directory keeps
//! its reference to the lower layer wherever it is moved, so that renaming one
//! needs no copying; a new directory has none, so that it is opaque by nature.
//!
//! Without a lower layer this is `tmpfs`.

mod directory;
mod file;
mod node;
mod pages;
mod quota;
mod written;

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

pub use directory::DirectoryFile;
pub use file::{Grow, RegularFile, Seals};
pub use node::Node;
pub use written::Found as WrittenFiles;

use super::inode::{FileType, FilesystemId, Inode, NewInode, NewKind, Statfs};
use super::lower::{LowerId, LowerLayer};
use crate::errno::{Errno, Result};
use crate::sync::KernelCell;
use quota::Quota;

/// First inode number of files that do not come from the lower layer: beyond
/// the inode numbers of any rootfs index.
const FIRST_OWN_INO: u64 = 1 << 33;

/// `TMPFS_MAGIC` (statfs(2)).
const TMPFS_MAGIC: i64 = 0x0102_1994;
/// `OVERLAYFS_SUPER_MAGIC` (statfs(2)).
const OVERLAYFS_MAGIC: i64 = 0x794c_7630;

/// Files that there may be, as statfs(2) says where there is no limit.
const FILES: u64 = 1 << 20;

/// Limits of a file system of a program; `None`: not said, 0: none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Pages of all files.
    pub pages: Option<u64>,
    /// Files.
    pub inodes: Option<u64>,
}

/// An instance of the file system.
pub struct Overlay {
    id: FilesystemId,
    lower: Option<LowerLayer>,
    next_ino: AtomicU64,
    /// Nodes made of lower files since the last look for some to forget.
    made: AtomicUsize,
    /// Pages that files may have.
    pages: Option<Arc<Quota>>,
    /// Files that there may be.
    inodes: Option<Arc<Quota>>,
    /// Nodes of lower files with more than one name, which must be the same
    /// node under each of them.
    linked: KernelCell<BTreeMap<LowerId, Arc<Node>>>,
}

impl Overlay {
    /// An overlay over `lower`; returns its root directory.
    pub fn over(lower: LowerLayer, id: FilesystemId) -> Result<Arc<Node>> {
        let root = lower.0.root();
        let fs = Self::instance(id, Some(lower));
        fs.node_of(root)
    }

    /// An empty file system; returns its root directory.
    pub fn empty(id: FilesystemId, permissions: u32) -> Arc<Node> {
        let fs = Self::instance(id, None);
        let new = NewInode { kind: NewKind::Directory, permissions, uid: 0, gid: 0 };
        Node::unlimited(fs, &new)
    }

    /// An empty file system of a program, with limits of its own that may be changed.
    pub fn limited(
        id: FilesystemId,
        permissions: u32,
        (uid, gid): (u32, u32),
        limits: Limits,
    ) -> Result<Arc<Node>> {
        let quota = |limit: Option<u64>| Some(Arc::new(Quota::new(limit.unwrap_or(0))));
        let fs = Self::build(id, None, quota(limits.pages), quota(limits.inodes));
        Node::new(fs, &NewInode { kind: NewKind::Directory, permissions, uid, gid })
    }

    fn instance(id: FilesystemId, lower: Option<LowerLayer>) -> Arc<Self> {
        Self::build(id, lower, None, None)
    }

    fn build(
        id: FilesystemId,
        lower: Option<LowerLayer>,
        pages: Option<Arc<Quota>>,
        inodes: Option<Arc<Quota>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            lower,
            pages,
            inodes,
            next_ino: AtomicU64::new(FIRST_OWN_INO),
            made: AtomicUsize::new(0),
            linked: KernelCell::default(),
        })
    }

    /// Device number of files that belong to the file system itself.
    fn device(&self) -> u64 {
        device_number(self.id, 0)
    }

    fn new_ino(&self) -> u64 {
        self.next_ino.fetch_add(1, Ordering::Relaxed)
    }

    /// The node that stands for a file of the lower layer.
    fn node_of(self: &Arc<Self>, lower: LowerId) -> Result<Arc<Node>> {
        if let Some(node) = self.linked.borrow_mut().get(&lower) {
            return Ok(node.clone());
        }
        let node = Node::from_lower(self.clone(), lower)?;
        self.made.fetch_add(1, Ordering::Relaxed);
        if node.has_several_names_below() {
            self.linked.borrow_mut().insert(lower, node.clone());
        }
        Ok(node)
    }

    fn statfs(&self) -> Statfs {
        let kind = if self.lower.is_some() { OVERLAYFS_MAGIC } else { TMPFS_MAGIC };
        let (mut total, mut free) = pages::page_counts();
        if let Some((limit, left)) = self.pages.as_ref().and_then(|quota| quota.limit_and_left()) {
            (total, free) = (limit, left.min(free));
        }
        let used = self.next_ino.load(Ordering::Relaxed) - FIRST_OWN_INO;
        let all = (FILES, FILES - used.min(FILES));
        let inodes = self.inodes.as_ref().and_then(|quota| quota.limit_and_left());
        let (files, free_files) = inodes.unwrap_or(all);
        Statfs {
            kind,
            bsize: 4096,
            blocks: total,
            bfree: free,
            bavail: free,
            files,
            ffree: free_files,
            fsid: [self.id.0 as i32, 0],
            namelen: 255,
            frsize: 4096,
            flags: 0x20, // ST_VALID
            ..Statfs::default()
        }
    }
}

impl Node {
    /// `EINVAL` if the file system of this node holds more than new limits allow.
    pub fn check_limits(&self, new: Limits) -> Result<()> {
        let fits = |quota: &Option<Arc<Quota>>, limit: Option<u64>| match (quota, limit) {
            (Some(quota), Some(limit)) => quota.fits(limit),
            _ => true,
        };
        let both = fits(&self.fs.pages, new.pages) && fits(&self.fs.inodes, new.inodes);
        if both { Ok(()) } else { Err(Errno::EINVAL) }
    }

    /// Changes the limits that are said.
    pub fn set_limits(&self, new: Limits) {
        for (quota, limit) in [(&self.fs.pages, new.pages), (&self.fs.inodes, new.inodes)] {
            if let (Some(quota), Some(limit)) = (quota, limit) {
                quota.set_limit(limit);
            }
        }
    }

    /// Lets go of all files below this root directory of a file system that is gone. Without
    /// recursion: a program may nest directories as deep as it likes.
    pub fn dismantle(self: &Arc<Self>) {
        let mut waiting = alloc::vec![self.clone()];
        while let Some(node) = waiting.pop() {
            let entries = match node.entries() {
                Ok(entries) => core::mem::take(&mut *entries.borrow_mut()),
                Err(_) => continue,
            };
            let nodes = entries.changed.into_values().filter_map(|entry| match entry {
                directory::Entry::Node(node) => Some(node),
                directory::Entry::Whiteout => None,
            });
            waiting.extend(nodes.filter(|node| node.file_type() == FileType::Directory));
        }
    }

    /// Whether so many nodes have been made of lower files that it is time to
    /// forget some.
    pub fn should_prune(&self) -> bool {
        self.fs.made.load(Ordering::Relaxed) > NODES_BETWEEN_PRUNES
    }

    /// Forgets nodes below this directory that nobody holds and that are as the
    /// lower layer has them.
    pub fn prune(&self) {
        self.fs.made.store(0, Ordering::Relaxed);
        self.prune_entries(PRUNE_DEPTH);
    }
}

impl Node {
    /// Goes over to another index below ([`Lower::rebase`](super::lower::Lower::rebase)): this
    /// is the root directory. Directories that are known may have more names there. `EINVAL`
    /// if there is no index below.
    pub fn rebase(self: &Arc<Self>, index_len: u64) -> Result<()> {
        self.fs.lower.as_ref().ok_or(Errno::EINVAL)?.0.rebase(index_len)?;
        self.follow_lower(PRUNE_DEPTH)
    }
}

/// Nodes of lower files that may be made before unused ones are looked for:
/// some megabytes of them.
const NODES_BETWEEN_PRUNES: usize = 16384;
/// How deep into the tree a look for what can be forgotten goes.
const PRUNE_DEPTH: usize = 64;

/// `makedev(0, …)`: every instance of a file system has a range of minor
/// numbers, one for each device below it.
pub fn device_number(id: FilesystemId, below: u32) -> u64 {
    let minor = u64::from(id.0 * 64 + below.min(63) + 1);
    (minor & 0xff) | ((minor & !0xff) << 12)
}

/// Finds the node behind an inode of any overlay.
pub fn node_of_inode(inode: &Arc<dyn Inode>) -> Option<Arc<Node>> {
    let inode: Arc<dyn core::any::Any + Send + Sync> = inode.clone();
    inode.downcast().ok()
}
