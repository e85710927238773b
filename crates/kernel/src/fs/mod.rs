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
//! | [`nsfs`] | namespaces as files |

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
pub mod nsfs;
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

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;

pub use context::{Context, FsContext};
pub use lower::LowerLayer;

use dentry::Dentry;
use inode::{Attributes, FileType, FilesystemId, Inode, NewInode, NewKind};
use locks::LockTable;
use mount::filesystem::Access;
use mount::{Filesystem, Mount, MountFlags, MountNamespace, Place, Registry};
use overlay::{Node, Overlay};
use path::Path;

use thaw_abi::bind::{
    MOUNT_BIND, MOUNT_BIND_WRITABLE, MOUNT_TMPFS, MOUNT_VOLUME, MOUNT_VOLUME_WRITABLE,
};

use crate::errno::{Errno, Result};
use crate::sync::KernelCell;
use crate::task::pid_namespace::PidNamespace;
use crate::task::user_namespace::UserNamespace;

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

/// What each tree of mounts begins with.
const TOP_FS: FilesystemId = FilesystemId(9);
/// Devices that programs mount.
const DEVTMPFS: FilesystemId = FilesystemId(10);

const DEVPTS_OPTIONS: &str = ",gid=5,mode=620,ptmxmode=000";

const NOSUID: MountFlags = MountFlags::NOSUID;
const NODEV: MountFlags = MountFlags::NODEV;
const NOEXEC: MountFlags = MountFlags::NOEXEC;
const RELATIME: MountFlags = MountFlags::RELATIME;
/// Nothing of it has effects of its own.
const PLAIN: MountFlags = NOSUID.union(NODEV).union(NOEXEC).union(RELATIME);

/// The number of the directory for secrets.
pub const SECRETS_FS: FilesystemId = FilesystemId(8);

/// What `thaw run` mounts has numbers from here on.
const FIRST_EXTRA_FS: u32 = 16;

/// File systems that show the layers above these, by their root directories.
pub struct Views {
    /// `/proc`.
    pub proc: ProcRoot,
    /// `/sys`.
    pub sys: Arc<dyn Inode>,
    /// `/sys/fs/cgroup`.
    pub cgroup: Arc<dyn Inode>,
}

/// Makes the root directory of a `/proc` that shows the processes of a PID namespace.
pub type ProcRoot = fn(FilesystemId, PidNamespace) -> Arc<dyn Inode>;

/// What to mount.
struct NewMount {
    filesystem: Arc<Filesystem>,
    /// What `/proc/mounts` says was mounted.
    source: &'static str,
    flags: MountFlags,
}

/// All file systems of a sandbox.
pub struct FileSystems {
    /// The tree of mounts of the first process.
    pub namespace: Arc<MountNamespace>,
    /// The mounts, file systems and namespaces that exist.
    pub registry: Arc<Registry>,
    /// Makes a `/proc`.
    proc_root: ProcRoot,
    /// File systems of which there is one, by the name that mount(2) has for them.
    shared: KernelCell<BTreeMap<&'static str, Arc<Filesystem>>>,
    /// Advisory locks.
    pub locks: LockTable,
    /// Terminals.
    pub terminals: tty::Terminals,
    /// Watches of inotify(7).
    pub watches: inotify::Watches,
    /// The root directory of the first file system.
    root_dentry: Arc<Dentry>,
    /// The same as the overlay knows it.
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
        let registry = Arc::new(Registry::default());
        let system = |kind, root, options| {
            Filesystem::new(&registry, kind, Dentry::root(root), options, Access::ReadWrite)
        };
        let root_node = Overlay::over(lower, ROOT_FS)?;
        let root = Dentry::root(root_node.clone());
        let top = system("rootfs", Overlay::empty(TOP_FS, 0o755), "");
        let namespace = MountNamespace::new(top)?;
        let dev = dev::file_system(DEV_FS)?;
        let proc = system("proc", (views.proc)(PROC_FS, PidNamespace::default()), "");
        let sys = system("sysfs", views.sys, "");
        let cgroup = system("cgroup2", views.cgroup, "");
        let shared = [proc.clone(), sys.clone(), cgroup.clone()];
        let files = Self {
            proc_root: views.proc,
            shared: KernelCell::new(shared.into_iter().map(|it| (it.kind, it)).collect()),
            namespace,
            registry: registry.clone(),
            locks: LockTable::default(),
            terminals: Default::default(),
            watches: Default::default(),
            root_dentry: root.clone(),
            root_node,
            memory: Overlay::empty(MEMORY_FS, 0o700),
            boot_id: KernelCell::new([0; 16]),
        };
        let flags = MountFlags::NOATIME;
        let filesystem = Filesystem::new(&registry, "overlay", root.clone(), "", Access::ReadWrite);
        files.mount_at(b"", NewMount { filesystem, source: "overlay", flags })?;
        ensure(&root, b"tmp", 0o1777)?;
        for name in [&b"proc"[..], b"sys", b"dev"] {
            ensure(&root, name, 0o755)?;
        }
        let shm = system("tmpfs", Overlay::empty(SHM_FS, 0o1777), "");
        let devpts = system("devpts", tty::devpts::root(0, UserNamespace::INITIAL), DEVPTS_OPTIONS);
        let dev = system("tmpfs", dev, ",size=65536k,mode=755");
        let read_only = PLAIN | MountFlags::READ_ONLY;
        let tree = [
            (&b"proc"[..], "proc", PLAIN, proc),
            (b"sys", "sysfs", read_only, sys),
            (b"dev", "tmpfs", NOSUID, dev),
            (b"sys/fs/cgroup", "cgroup", read_only, cgroup),
            (b"dev/pts", "devpts", NOSUID | NOEXEC | RELATIME, devpts),
            (b"dev/shm", "shm", PLAIN, shm),
        ];
        for (at, source, flags, filesystem) in tree {
            files.mount_at(at, NewMount { filesystem, source, flags })?;
        }
        Ok(files)
    }

    /// The root directory that processes begin with.
    pub fn root(&self) -> Path {
        self.namespace.root()
    }

    /// A file system of which there is one, by the name that mount(2) has for it.
    pub(crate) fn shared(&self, kind: &[u8]) -> Option<Arc<Filesystem>> {
        let kind = core::str::from_utf8(kind).ok()?;
        self.shared.borrow_mut().get(kind).cloned()
    }

    /// The root directory of a new `/proc` for a PID namespace.
    pub(crate) fn proc_root(&self, id: FilesystemId, namespace: PidNamespace) -> Arc<dyn Inode> {
        (self.proc_root)(id, namespace)
    }

    /// The devices that programs mount (`devtmpfs`): all mounts show the same directory.
    pub(crate) fn devices(&self) -> Result<Arc<Filesystem>> {
        const KIND: &str = "devtmpfs";
        if let Some(known) = self.shared(KIND.as_bytes()) {
            return Ok(known);
        }
        let root = Dentry::root(dev::file_system(DEVTMPFS)?);
        let new = Filesystem::new(&self.registry, KIND, root, ",mode=755", Access::ReadWrite);
        self.shared.borrow_mut().insert(KIND, new.clone());
        Ok(new)
    }

    /// Mounts a directory of the host, by its number in the start command, or
    /// an empty file system in memory; makes the mount point if it is missing.
    /// Files of a volume are `owner`'s, a user and a group.
    pub fn mount_extra(&self, number: u32, kind: u8, at: &[u8], owner: (u32, u32)) -> Result<()> {
        let id = FilesystemId(FIRST_EXTRA_FS + number);
        let directory = bind::Kind::Directory;
        let volume = bind::Kind::Volume { uid: owner.0, gid: owner.1 };
        let (read_only, read_write) = (Access::ReadOnlyForEver, Access::ReadWrite);
        let (root, kind, access): (Arc<dyn Inode>, _, _) = match kind {
            MOUNT_BIND => (bind::Bind::root(number, id, directory)?, "host", read_only),
            MOUNT_BIND_WRITABLE => (bind::Bind::root(number, id, directory)?, "host", read_write),
            MOUNT_VOLUME => (bind::Bind::root(number, id, volume)?, "volume", read_only),
            MOUNT_VOLUME_WRITABLE => (bind::Bind::root(number, id, volume)?, "volume", read_write),
            MOUNT_TMPFS => (Overlay::empty(id, 0o1777), "tmpfs", read_write),
            _ => return Err(Errno::EINVAL),
        };
        let filesystem = Filesystem::new(&self.registry, kind, Dentry::root(root), "", access);
        self.mount_at(at, NewMount { filesystem, source: kind, flags: RELATIME })
    }

    /// Mounts a read-only file system of the kernel's own, of which nothing has effects of its own.
    pub fn mount_view(
        &self,
        at: &[u8],
        (kind, source): (&'static str, &'static str),
        root: Arc<dyn Inode>,
    ) -> Result<()> {
        let root = Dentry::root(root);
        let filesystem = Filesystem::new(&self.registry, kind, root, "", Access::ReadOnlyForEver);
        self.mount_at(at, NewMount { filesystem, source, flags: PLAIN })
    }

    /// Mounts a file system; makes the mount point if it is missing.
    fn mount_at(&self, at: &[u8], new: NewMount) -> Result<()> {
        let mut point = self.root();
        for name in at.split(|&byte| byte == b'/').filter(|name| !name.is_empty()) {
            let dentry = match point.dentry().child(name)? {
                Some(found) if found.inode.file_type() == FileType::Directory => found,
                Some(_) => return Err(Errno::ENOTDIR),
                None => ensure(point.dentry(), name, 0o755)?,
            };
            point = point.beside(dentry).topmost();
        }
        let root = new.filesystem.root.clone();
        let source = new.source.as_bytes().into();
        let mount = Mount::new(new.filesystem, root, source, new.flags)?;
        let parent = point.mount().ok_or(Errno::EINVAL)?.clone();
        self.namespace.graft(&mount, Place { parent, point: point.dentry().clone() });
        Ok(())
    }

    /// What the program has written that lives and dies with its copy.
    pub fn written(&self) -> overlay::WrittenFiles {
        // By address: the places hold them.
        let mut covered: BTreeSet<usize> = BTreeSet::new();
        for mount in self.namespace.mounts() {
            // A bind of a part of the same file system hides nothing that is not written there.
            let place = mount
                .place()
                .filter(|place| !Arc::ptr_eq(&place.parent.filesystem, &mount.filesystem));
            let node = place.and_then(|place| overlay::node_of_inode(&place.point.inode));
            covered.extend(node.map(|node| Arc::as_ptr(&node) as usize));
        }
        self.root_node.written(&|node| covered.contains(&(Arc::as_ptr(node) as usize)))
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
        self.root_dentry.prune();
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
