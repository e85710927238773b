//! Nodes: the inodes of the overlay.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use super::directory::Entries;
use super::file::{MAX_FILE_SIZE, RegularFile, Seals};
use super::pages::Content;
use super::quota::Share;
use super::{DirectoryFile, Overlay, device_number};
use crate::errno::{Errno, Result};
use crate::fs::file::{File, OpenFlags};
use crate::fs::inode::{
    AttributeChanges, Attributes, FileType, FilesystemId, Inode, Link, NewInode, NewKind,
    RenameMode, S_ISGID, S_ISUID, Statfs, Timestamp,
};
use crate::fs::lower::{LowerId, LowerLayer};
use crate::fs::writing;
use crate::fs::xattr::ExtendedAttributes;
use crate::sync::KernelCell;
use crate::task::space::cut_off;

/// A file of an overlay.
pub struct Node {
    pub(super) fs: Arc<Overlay>,
    pub(super) ino: u64,
    device: u64,
    file_type: FileType,
    pub(super) meta: KernelCell<Meta>,
    pub(super) body: Body,
    extended: ExtendedAttributes,
    uses: Uses,
    /// Itself, among the files that there may be.
    _counted: Share,
}

/// Who uses a regular file.
#[derive(Default)]
struct Uses {
    /// Open file descriptions.
    opens: AtomicU32,
    /// Those of them that may write.
    writers: AtomicU32,
    /// Whether memory may show pages of it.
    mapped: AtomicBool,
    /// What a memory file no longer allows; `None` for all other files.
    seals: KernelCell<Option<Seals>>,
    /// Whether it never had a name and may never get one (`O_TMPFILE | O_EXCL`),
    /// or may although it has none.
    naming: KernelCell<Naming>,
}

/// Whether a file without a name may get one (linkat(2)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Naming {
    /// It may not: its names were removed, or it was asked to have none.
    #[default]
    Forbidden,
    /// It was made without a name (`O_TMPFILE`).
    Allowed,
}

/// Attributes that are not derived from the content.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Meta {
    pub permissions: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    pub rdev: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    pub btime: Timestamp,
    /// Differs from what the lower layer says, so the node must be kept.
    pub changed: bool,
}

/// What a node holds besides attributes.
pub(super) enum Body {
    Regular(KernelCell<Content>),
    Directory(KernelCell<Entries>),
    Symlink(Vec<u8>),
    /// Target in the lower layer, with its length.
    LowerSymlink(LowerId, u64),
    Special,
}

impl Node {
    /// A new file without a name; `ENOSPC` if there are as many files as there may be.
    pub(super) fn new(fs: Arc<Overlay>, new: &NewInode) -> Result<Arc<Self>> {
        let mut counted = Share::of(fs.inodes.as_ref());
        counted.take_one()?;
        Ok(Self::counted(fs, new, counted))
    }

    /// A new file without a name in a file system without limits.
    pub(super) fn unlimited(fs: Arc<Overlay>, new: &NewInode) -> Arc<Self> {
        Self::counted(fs, new, Share::default())
    }

    fn counted(fs: Arc<Overlay>, new: &NewInode, counted: Share) -> Arc<Self> {
        let now = Timestamp::now();
        let content = || Content::limited(Share::of(fs.pages.as_ref()));
        let (file_type, body, rdev) = match &new.kind {
            NewKind::Regular => (FileType::Regular, Body::Regular(KernelCell::new(content())), 0),
            NewKind::Directory => (FileType::Directory, Body::Directory(KernelCell::default()), 0),
            NewKind::Symlink(target) => (FileType::Symlink, Body::Symlink(target.clone()), 0),
            NewKind::Fifo => (FileType::Fifo, Body::Special, 0),
            NewKind::Socket => (FileType::Socket, Body::Special, 0),
            NewKind::CharacterDevice(rdev) => (FileType::CharacterDevice, Body::Special, *rdev),
        };
        let nlink = if file_type == FileType::Directory { 2 } else { 1 };
        let meta = Meta {
            permissions: new.permissions & 0o7777,
            uid: new.uid,
            gid: new.gid,
            nlink,
            rdev,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            changed: true,
        };
        let numbers = (fs.new_ino(), fs.device());
        let node = Self::build(fs, numbers, file_type, meta, body, ExtendedAttributes::default());
        Arc::new(Self { _counted: counted, ..node })
    }

    fn build(
        fs: Arc<Overlay>,
        (ino, device): (u64, u64),
        file_type: FileType,
        meta: Meta,
        body: Body,
        extended: ExtendedAttributes,
    ) -> Self {
        Self {
            fs,
            ino,
            device,
            file_type,
            meta: KernelCell::new(meta),
            body,
            extended,
            uses: Uses::default(),
            _counted: Share::default(),
        }
    }

    /// The node of a file of the lower layer.
    pub(super) fn from_lower(fs: Arc<Overlay>, id: LowerId) -> Result<Arc<Self>> {
        let lower = fs.lower.clone().ok_or(Errno::EIO)?.0;
        let below = lower.attributes(id)?;
        let file_type = FileType::from_mode(below.mode).ok_or(Errno::EIO)?;
        let body = match file_type {
            FileType::Regular => Body::Regular(KernelCell::new(Content::of_lower(id, below.size))),
            FileType::Directory => Body::Directory(KernelCell::new(Entries {
                lower: Some(id),
                changed: BTreeMap::new(),
            })),
            FileType::Symlink => Body::LowerSymlink(id, below.size),
            _ => Body::Special,
        };
        let meta = Meta {
            permissions: below.mode & 0o7777,
            uid: below.uid,
            gid: below.gid,
            nlink: below.nlink.max(1),
            rdev: below.rdev,
            atime: below.mtime,
            mtime: below.mtime,
            ctime: below.mtime,
            btime: below.mtime,
            changed: false,
        };
        let numbers = (below.ino, device_number(fs.id, below.device));
        let extended = ExtendedAttributes::of_lower(&*lower, id);
        Ok(Arc::new(Self::build(fs, numbers, file_type, meta, body, extended)))
    }

    /// Counts an open file description.
    pub(super) fn opened(&self, writable: bool) {
        self.uses.opens.fetch_add(1, Relaxed);
        if writable {
            self.uses.writers.fetch_add(1, Relaxed);
        }
    }

    /// An open file description is gone.
    pub(super) fn closed(self: &Arc<Self>, writable: bool) {
        self.uses.opens.fetch_sub(1, Relaxed);
        if writable {
            self.uses.writers.fetch_sub(1, Relaxed);
        }
        if self.meta.borrow_mut().nlink == 0 {
            let inode: Arc<dyn Inode> = self.clone();
            crate::fs::notify::gone_if_unused(&inode);
        }
    }

    /// Whether somebody has the file open for writing.
    pub fn is_written(&self) -> bool {
        self.uses.writers.load(Relaxed) > 0
    }

    /// Notes that memory is about to show pages of it.
    pub(super) fn note_mapped(&self) {
        self.uses.mapped.store(true, Relaxed);
    }

    /// Its pages behind a size go from all mappings.
    fn cut_off_mappings(&self, size: u64) {
        if self.uses.mapped.load(Relaxed) {
            self.uses.mapped.store(cut_off(self, size), Relaxed);
        }
    }

    /// What a memory file no longer allows; `None` for all other files.
    pub fn seals(&self) -> Option<Seals> {
        self.uses.seals.get()
    }

    /// Replaces the seals of a memory file.
    pub(super) fn set_seals(&self, seals: Seals) {
        self.uses.seals.set(Some(seals));
    }

    /// Whether one of these seals is in force.
    pub(super) fn is_sealed(&self, seals: Seals) -> bool {
        self.seals().is_some_and(|held| held.intersects(seals))
    }

    /// The file was made without a name and shall never get one.
    pub fn forbid_names(&self) {
        self.uses.naming.set(Naming::Forbidden);
    }

    pub(super) fn has_several_names_below(&self) -> bool {
        self.file_type != FileType::Directory && self.meta.borrow_mut().nlink > 1
    }

    pub(super) fn lower(&self) -> Option<&LowerLayer> {
        self.fs.lower.as_ref()
    }

    /// Notes a change of the content and, with it, of the attributes.
    pub(super) fn touch_content(&self) {
        let now = Timestamp::now();
        let mut meta = self.meta.borrow_mut();
        meta.mtime = now;
        meta.ctime = now;
        meta.changed = true;
    }

    /// Changes attributes and notes when.
    pub(super) fn update(&self, change: impl FnOnce(&mut Meta)) {
        let now = Timestamp::now();
        let mut meta = self.meta.borrow_mut();
        change(&mut meta);
        meta.ctime = now;
        meta.changed = true;
    }

    /// The content is about to change. A change by anyone but root takes set-user-ID
    /// and set-group-ID away, and Linux does that before it looks at the bytes
    /// (write(2), truncate(2), `file_remove_privs`). A change by anyone at all takes the file's
    /// capabilities away (`cap_inode_killpriv`).
    pub(super) fn begin_change(&self) {
        if self.extended.remove_capabilities() {
            self.update(|_| ());
        }
        if self.meta.borrow_mut().permissions & (S_ISUID | S_ISGID) == 0
            || writing::keeps_privilege_bits()
        {
            return;
        }
        self.update(|meta| {
            meta.permissions &= !S_ISUID;
            // Without execution by the group, the bit means something else (inode(7)).
            if meta.permissions & 0o010 != 0 {
                meta.permissions &= !S_ISGID;
            }
        });
    }

    /// The content of a regular file.
    pub(super) fn content(&self) -> Result<&KernelCell<Content>> {
        match &self.body {
            Body::Regular(content) => Ok(content),
            Body::Directory(_) => Err(Errno::EISDIR),
            _ => Err(Errno::EINVAL),
        }
    }

    pub(super) fn entries(&self) -> Result<&KernelCell<Entries>> {
        match &self.body {
            Body::Directory(entries) => Ok(entries),
            _ => Err(Errno::ENOTDIR),
        }
    }
}

impl Inode for Node {
    fn attributes(&self) -> Attributes {
        let meta = *self.meta.borrow_mut();
        let (size, blocks) = match &self.body {
            Body::Regular(content) => {
                let content = content.borrow_mut();
                (content.size(), content.blocks())
            }
            Body::Symlink(target) => (target.len() as u64, 0),
            Body::LowerSymlink(_, len) => (*len, 0),
            Body::Directory(_) => (4096, 8),
            Body::Special => (0, 0),
        };
        Attributes {
            dev: self.device,
            ino: self.ino,
            mode: self.file_type.mode_bits() | meta.permissions,
            uid: meta.uid,
            gid: meta.gid,
            nlink: meta.nlink,
            rdev: meta.rdev,
            size,
            blocks,
            atime: meta.atime,
            mtime: meta.mtime,
            ctime: meta.ctime,
            btime: meta.btime,
        }
    }

    fn file_type(&self) -> FileType {
        self.file_type
    }

    fn filesystem(&self) -> FilesystemId {
        self.fs.id
    }

    fn lookup(&self, name: &[u8]) -> Result<Option<Arc<dyn Inode>>> {
        Ok(self.lookup_node(name)?.map(|node| node as Arc<dyn Inode>))
    }

    fn open(self: Arc<Self>, flags: OpenFlags) -> Result<Arc<dyn File>> {
        match self.file_type {
            FileType::Regular => {
                let below = self.content()?.borrow_mut().untouched();
                if let (Some(below), Some(lower)) = (below, self.lower()) {
                    lower.0.prepare(below)?;
                }
                Ok(Arc::new(RegularFile::new(self, flags)))
            }
            FileType::Directory => Ok(Arc::new(DirectoryFile::new(self))),
            // Devices are opened by number and FIFOs by `ipc`, above.
            _ => Err(Errno::ENXIO),
        }
    }

    fn read_link(&self) -> Result<Link> {
        match &self.body {
            Body::Symlink(target) => Ok(Link::Text(target.clone())),
            Body::LowerSymlink(id, _) => {
                Ok(Link::Text(self.lower().ok_or(Errno::EIO)?.0.read_link(*id)?))
            }
            _ => Err(Errno::EINVAL),
        }
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], u64, FileType)) -> Result<()> {
        self.list_entries(emit)
    }

    fn create(&self, name: &[u8], new: &NewInode) -> Result<Arc<dyn Inode>> {
        let node = Node::new(self.fs.clone(), new)?;
        self.add_entry(name, node.clone())?;
        Ok(node)
    }

    fn create_unnamed(&self, new: &NewInode) -> Result<Arc<dyn Inode>> {
        let node = Node::new(self.fs.clone(), new)?;
        node.meta.borrow_mut().nlink = 0;
        node.uses.naming.set(Naming::Allowed);
        Ok(node)
    }

    fn link(&self, name: &[u8], target: &Arc<dyn Inode>) -> Result<()> {
        let target = super::node_of_inode(target)
            .filter(|node| node.fs.id == self.fs.id)
            .ok_or(Errno::EXDEV)?;
        let links = target.meta.borrow_mut().nlink;
        if links == 0 && target.uses.naming.get() == Naming::Forbidden {
            return Err(Errno::ENOENT);
        }
        if links >= 65000 {
            return Err(Errno::EMLINK);
        }
        self.add_entry(name, target.clone())?;
        target.forbid_names();
        target.update(|meta| meta.nlink += 1);
        Ok(())
    }

    fn remove(&self, name: &[u8]) -> Result<()> {
        let node = self.lookup_node(name)?.ok_or(Errno::ENOENT)?;
        if node.file_type == FileType::Directory && !node.is_empty_directory()? {
            return Err(Errno::ENOTEMPTY);
        }
        self.remove_entry(name, &node)?;
        node.lose_name();
        Ok(())
    }

    fn rename(
        &self,
        name: &[u8],
        new_directory: &Arc<dyn Inode>,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<()> {
        let to = super::node_of_inode(new_directory)
            .filter(|node| node.fs.id == self.fs.id)
            .ok_or(Errno::EXDEV)?;
        self.rename_entry(name, &to, new_name, mode)
    }

    fn change(&self, changes: &AttributeChanges) -> Result<()> {
        if let Some(bits) = changes.permissions
            && (bits ^ self.meta.borrow_mut().permissions) & 0o111 != 0
            && self.is_sealed(Seals::EXEC)
        {
            return Err(Errno::EPERM);
        }
        if changes.drops_capabilities {
            self.extended.remove_capabilities();
        }
        self.update(|meta| {
            meta.permissions = changes.permissions.map_or(meta.permissions, |bits| bits & 0o7777);
            meta.uid = changes.uid.unwrap_or(meta.uid);
            meta.gid = changes.gid.unwrap_or(meta.gid);
            meta.atime = changes.atime.unwrap_or(meta.atime);
            meta.mtime = changes.mtime.unwrap_or(meta.mtime);
        });
        Ok(())
    }

    fn truncate(&self, size: u64) -> Result<()> {
        let content = self.content()?;
        let old = content.borrow_mut().size();
        if size > MAX_FILE_SIZE {
            return Err(Errno::EFBIG);
        }
        writing::check_size(old, size)?;
        if size < old && self.is_sealed(Seals::SHRINK) || size > old && self.is_sealed(Seals::GROW)
        {
            return Err(Errno::EPERM);
        }
        self.begin_change();
        content.borrow_mut().truncate(size);
        if size < old {
            self.cut_off_mappings(size);
        }
        self.touch_content();
        Ok(())
    }

    fn extended_attributes(&self) -> Option<&ExtendedAttributes> {
        Some(&self.extended)
    }

    fn note_extended_change(&self) {
        self.update(|_| ());
    }

    fn is_open(&self) -> bool {
        self.uses.opens.load(Relaxed) > 0
    }

    fn statfs(&self) -> Statfs {
        self.fs.statfs()
    }
}

impl Node {
    /// One name less.
    pub(super) fn lose_name(&self) {
        let directory = self.file_type == FileType::Directory;
        self.update(|meta| meta.nlink = if directory { 0 } else { meta.nlink.saturating_sub(1) });
    }

    /// For files without a path.
    pub(super) fn describe(&self) -> String {
        alloc::format!("inode:[{}]", self.ino)
    }
}
