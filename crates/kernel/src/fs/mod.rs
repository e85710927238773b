//! File systems.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`inode`], [`dentry`], [`mount`], [`path`] | the tree as every textbook has it |
//! | [`walk`], [`namespace`], [`open`], [`permission`] | path resolution, changing the tree, opening files |
//! | [`bind`] | directories of the host, mounted by `thaw run` |
//! | [`lower`], [`overlay`] | the read-only lower layer and the in-memory layer above it |
//! | [`dev`], [`stdio`] | what the kernel itself shows as files |
//! | [`file`], [`fd_table`], [`locks`] | open files, descriptors, advisory locks |
//! | [`tty`] | terminals |
//! | [`xattr`] | extended attributes |
//! | [`inotify`], [`notify`] | watches, and where events come from |

pub mod anonymous;
pub mod async_io;
pub mod bind;
pub mod context;
pub mod dentry;
pub mod dev;
pub mod fd_table;
pub mod file;
pub mod inode;
pub mod inotify;
pub mod locks;
pub mod lower;
pub mod mount;
pub mod namespace;
pub mod notify;
pub mod open;
pub mod overlay;
pub mod page_queue;
pub mod path;
pub mod permission;
pub mod pipe;
pub mod process;
pub mod pseudo;
pub mod stdio;
pub mod tty;
pub mod walk;
pub mod writing;
pub mod xattr;

#[cfg(test)]
pub(crate) mod tests;

use alloc::sync::Arc;
use alloc::vec::Vec;

pub use context::{Context, FsContext};
pub use lower::LowerLayer;

use dentry::Dentry;
use inode::{Attributes, FileType, FilesystemId, Inode, NewInode, NewKind};
use locks::LockTable;
use mount::{MountTable, NewMount};
use overlay::{Node, Overlay};
use path::Path;

use thaw_abi::bind::{
    MOUNT_BIND, MOUNT_BIND_WRITABLE, MOUNT_TMPFS, MOUNT_VOLUME, MOUNT_VOLUME_WRITABLE,
};

use crate::errno::{Errno, Result};
use crate::sync::KernelCell;

const ROOT_FS: FilesystemId = FilesystemId(1);
const DEV_FS: FilesystemId = FilesystemId(2);
const SHM_FS: FilesystemId = FilesystemId(3);
/// The number of `/proc`.
pub const PROC_FS: FilesystemId = FilesystemId(4);
/// The number of `/sys`.
pub const SYS_FS: FilesystemId = FilesystemId(5);
const MEMORY_FS: FilesystemId = FilesystemId(6);
/// The number of `/sys/fs/cgroup`.
pub const CGROUP_FS: FilesystemId = FilesystemId(7);

const DEVPTS_OPTIONS: &str = "rw,nosuid,noexec,relatime,gid=5,mode=620,ptmxmode=666";

/// The number of the directory for secrets.
pub const SECRETS_FS: FilesystemId = FilesystemId(8);

/// What `thaw run` mounts has numbers from here on.
const FIRST_EXTRA_FS: u32 = 16;

/// File systems that show the layers above these, by their root directories.
pub struct Views {
    /// `/proc`.
    pub proc: Arc<dyn Inode>,
    /// `/sys`.
    pub sys: Arc<dyn Inode>,
    /// `/sys/fs/cgroup`.
    pub cgroup: Arc<dyn Inode>,
}

/// All file systems of a sandbox.
pub struct FileSystems {
    /// The root of the tree.
    pub root: Path,
    /// What is mounted where.
    pub mounts: KernelCell<MountTable>,
    /// Advisory locks.
    pub locks: LockTable,
    /// Terminals.
    pub terminals: tty::Terminals,
    /// Watches of inotify(7).
    pub watches: inotify::Watches,
    /// The root directory as the overlay knows it.
    root_node: Arc<Node>,
    /// Where memory files live (memfd_create(2)).
    memory: Arc<Node>,
    /// `/proc/sys/kernel/random/boot_id`, new in every boot.
    boot_id: KernelCell<[u8; 16]>,
}

impl FileSystems {
    /// Puts the tree together: an overlay over `lower`, and the kernel's own
    /// file systems on `/proc`, `/sys` and `/dev`.
    pub fn new(lower: LowerLayer, views: Views) -> Result<Self> {
        let root_node = Overlay::over(lower, ROOT_FS)?;
        let root = Dentry::root(root_node.clone());
        let mut mounts = MountTable::default();
        mounts.mount(
            NewMount {
                kind: "overlay",
                source: "overlay",
                options: "rw,noatime",
                root: root.clone(),
            },
            None,
        );
        let dev = Dentry::root(dev::file_system(DEV_FS)?);
        let shm = Dentry::root(Overlay::empty(SHM_FS, 0o1777));
        let devpts = Dentry::root(tty::devpts::root());
        let proc = Dentry::root(views.proc);
        let sys = Dentry::root(views.sys);
        let cgroup = Dentry::root(views.cgroup);
        let sys_fs = sys.child(b"fs")?.ok_or(Errno::ENOENT)?;
        ensure(&root, b"tmp", 0o1777)?;
        let tree = [
            ("proc", "proc", "rw,nosuid,nodev,noexec,relatime", proc, &root, &b"proc"[..]),
            ("sysfs", "sysfs", "ro,nosuid,nodev,noexec,relatime", sys.clone(), &root, b"sys"),
            ("tmpfs", "tmpfs", "rw,nosuid,size=65536k,mode=755", dev.clone(), &root, b"dev"),
            ("cgroup2", "cgroup", "ro,nosuid,nodev,noexec,relatime", cgroup, &sys_fs, b"cgroup"),
            ("devpts", "devpts", DEVPTS_OPTIONS, devpts, &dev, b"pts"),
            ("tmpfs", "shm", "rw,nosuid,nodev,noexec,relatime", shm, &dev, b"shm"),
        ];
        for (kind, source, options, mounted, parent, name) in tree {
            let at = ensure(parent, name, 0o755)?;
            mounts.mount(NewMount { kind, source, options, root: mounted }, Some(at));
        }
        Ok(Self {
            root: Path::new(root),
            mounts: KernelCell::new(mounts),
            locks: LockTable::default(),
            terminals: Default::default(),
            watches: Default::default(),
            root_node,
            memory: Overlay::empty(MEMORY_FS, 0o700),
            boot_id: KernelCell::new([0; 16]),
        })
    }

    /// Mounts a directory of the host, by its number in the start command, or
    /// an empty file system in memory; makes the mount point if it is missing.
    /// Files of a volume are `owner`'s, a user and a group.
    pub fn mount_extra(&self, number: u32, kind: u8, at: &[u8], owner: (u32, u32)) -> Result<()> {
        let id = FilesystemId(FIRST_EXTRA_FS + number);
        let directory = bind::Kind::Directory;
        let volume = bind::Kind::Volume { uid: owner.0, gid: owner.1 };
        let (root, kind, options): (Arc<dyn Inode>, _, _) = match kind {
            MOUNT_BIND => (bind::Bind::root(number, id, directory)?, "host", "ro,relatime"),
            MOUNT_BIND_WRITABLE => {
                (bind::Bind::root(number, id, directory)?, "host", "rw,relatime")
            }
            MOUNT_VOLUME => (bind::Bind::root(number, id, volume)?, "volume", "ro,relatime"),
            MOUNT_VOLUME_WRITABLE => {
                (bind::Bind::root(number, id, volume)?, "volume", "rw,relatime")
            }
            MOUNT_TMPFS => (Overlay::empty(id, 0o1777), "tmpfs", "rw,relatime"),
            _ => return Err(Errno::EINVAL),
        };
        self.mount_at(at, NewMount { kind, source: kind, options, root: Dentry::root(root) })
    }

    /// Mounts a file system; makes the mount point if it is missing.
    pub fn mount_at(&self, at: &[u8], new: NewMount) -> Result<()> {
        let mut point = self.root.clone();
        for name in at.split(|&byte| byte == b'/').filter(|name| !name.is_empty()) {
            let dentry = match point.dentry().child(name)? {
                Some(found) if found.inode.file_type() == FileType::Directory => found,
                Some(_) => return Err(Errno::ENOTDIR),
                None => ensure(point.dentry(), name, 0o755)?,
            };
            point = Path::new(dentry).topmost();
        }
        self.mounts.borrow_mut().mount(new, Some(point.dentry().clone()));
        Ok(())
    }

    /// What the program has written that lives and dies with its copy.
    pub fn written(&self) -> overlay::WrittenFiles {
        let mounts = self.mounts.borrow_mut();
        let covered = mounts.iter().filter_map(|mount| mount.covers.as_ref());
        let covered: Vec<Arc<Node>> =
            covered.filter_map(|dentry| overlay::node_of_inode(&dentry.inode)).collect();
        drop(mounts);
        self.root_node.written(&|node| covered.iter().any(|other| Arc::ptr_eq(other, node)))
    }

    /// `/proc/sys/kernel/random/boot_id`.
    pub fn boot_id(&self) -> [u8; 16] {
        self.boot_id.get()
    }

    /// Gives the sandbox a new `boot_id`, from fresh randomness.
    pub fn set_boot_id(&self, random: [u8; 16]) {
        self.boot_id.set(random);
    }

    /// Forgets what can be looked up again, once in a while: a program that
    /// walks the whole tree must not fill the kernel's heap.
    pub fn prune_if_due(&self) {
        if self.root_node.should_prune() {
            self.prune();
        }
    }

    /// Goes over to another index: what was looked up in the old one and not found may be there.
    /// `EINVAL` if it is none, or the root file system was none.
    pub fn rebase(&self, index_len: u64) -> Result<()> {
        self.prune();
        self.root_node.rebase(index_len)
    }

    fn prune(&self) {
        self.root.dentry().prune();
        self.root_node.prune();
    }

    pub(crate) fn memory_files(&self) -> &Arc<Node> {
        &self.memory
    }

    /// A nameless file of `len` zeros in memory, and its attributes.
    pub(crate) fn memory_file(
        &self,
        permissions: u32,
        (uid, gid): (u32, u32),
        len: u64,
    ) -> Result<(Arc<Node>, Attributes)> {
        let new = NewInode { kind: NewKind::Regular, permissions, uid, gid };
        let inode = self.memory.create_unnamed(&new)?;
        inode.truncate(len)?;
        let node = overlay::node_of_inode(&inode).ok_or(Errno::EIO)?;
        Ok((node, inode.attributes()))
    }
}

/// The directory `name`, created if it is missing.
fn ensure(parent: &Arc<Dentry>, name: &[u8], permissions: u32) -> Result<Arc<Dentry>> {
    if let Some(found) = parent.child(name)? {
        if found.inode.file_type() == inode::FileType::Directory {
            return Ok(found);
        }
        // A link or file in the place of a mount point gives way.
        parent.inode.remove(name)?;
        parent.detach(name);
    }
    let new = NewInode { kind: NewKind::Directory, permissions, uid: 0, gid: 0 };
    let inode = parent.inode.create(name, &new)?;
    Ok(parent.attach(name, inode))
}
