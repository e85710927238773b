//! Inodes of bound directories.

use alloc::sync::Arc;
use alloc::vec::Vec;

use thaw_abi::bind::*;
use thaw_abi::control::{DirectoryEntry, FileAttributes};

use super::volume::{Opened, VolumeFile};
use super::{Bind, BoundFile, Moment, file, parse};
use crate::errno::{Errno, Result};
use crate::fs::file::{File, OpenFlags};
use crate::fs::inode::{
    AttributeChanges, Attributes, FileType, FilesystemId, Inode, Link, NewInode, NewKind,
    RenameMode, Statfs, Timestamp,
};
use crate::fs::overlay::{DirectoryFile, device_number};
use crate::fs::path::join;
use crate::state;
use crate::sync::KernelCell;

/// A file of the host.
pub struct BoundNode {
    pub(super) bind: Arc<Bind>,
    file_type: FileType,
    place: KernelCell<Place>,
    /// What the host said last, and when.
    known: KernelCell<(FileAttributes, Moment)>,
    /// A new file is open already, with the rights that its permissions may deny.
    fresh: KernelCell<Option<Fresh>>,
    /// Open files: they are there even if the name is not.
    pub(super) open: KernelCell<Vec<Handle>>,
}

/// The host's number for an open file. The host counts from 1 again in each boot, and so does each host
/// that takes the sandbox over: a number of another boot or host names another file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle {
    /// The boot that it belongs to.
    pub generation: u64,
    /// See [`Volumes::host`](super::Volumes::host).
    host: u64,
    /// The host's number.
    pub number: u64,
}

impl Handle {
    /// A number that the host has given in this boot.
    pub fn new(number: u64) -> Self {
        Self { generation: state::generation(), host: state::kernel().volumes.host(), number }
    }

    /// Whether the host has given it in this boot. One of before may have.
    pub fn is_of_this_boot(self) -> bool {
        self.generation == state::generation()
    }

    /// Whether the host that serves volumes now has given it.
    pub fn is_of_this_host(self) -> bool {
        self.is_of_this_boot() && self.host == state::kernel().volumes.host()
    }
}

/// A file that was made and is to be opened.
#[derive(Clone, Copy)]
enum Fresh {
    /// In a directory of the host: the host's number.
    Bound(u64),
    /// In a volume.
    Volume(Opened),
}

impl Fresh {
    /// The host's number.
    fn handle(&self) -> u64 {
        match self {
            Self::Bound(handle) => *handle,
            Self::Volume(opened) => opened.handle().number,
        }
    }

    fn close(self, bind: &Bind) {
        match self {
            // Nobody is left to hear of a failure.
            Self::Bound(handle) => drop(bind.ask(BIND_CLOSE, [handle, 0, 0], &[])),
            Self::Volume(opened) => opened.close(bind),
        }
    }
}

/// Where a file lies in the bound directory.
struct Place {
    parent: Option<Arc<BoundNode>>,
    name: Vec<u8>,
}

impl BoundNode {
    pub(super) fn new(
        bind: Arc<Bind>,
        parent: Option<Arc<BoundNode>>,
        name: &[u8],
        attributes: FileAttributes,
    ) -> Arc<Self> {
        let file_type = FileType::from_mode(attributes.mode).unwrap_or(FileType::Regular);
        let known = (attributes, bind.moment());
        Arc::new(Self {
            bind,
            file_type,
            place: KernelCell::new(Place { parent, name: name.to_vec() }),
            known: KernelCell::new(known),
            fresh: KernelCell::new(None),
            open: KernelCell::default(),
        })
    }

    /// The path below the bound directory.
    pub(super) fn path(&self) -> Vec<u8> {
        let mut names = Vec::new();
        let mut parent = {
            let place = self.place.borrow_mut();
            if place.parent.is_some() {
                names.push(place.name.clone());
            }
            place.parent.clone()
        };
        while let Some(node) = parent {
            let place = node.place.borrow_mut();
            if place.parent.is_some() {
                names.push(place.name.clone());
            }
            parent = place.parent.clone();
        }
        names.reverse();
        names.join(&b'/')
    }

    fn path_of(&self, name: &[u8]) -> Vec<u8> {
        join(&self.path(), name)
    }

    fn child(&self, name: &[u8]) -> Result<Arc<BoundNode>> {
        let path = self.path_of(name);
        let told = self.bind.told_ahead(&path);
        let attributes = told.unwrap_or_else(|| self.bind.stat(&path))?;
        let here = Self::new(self.bind.clone(), self.parent_of_child(), name, attributes);
        Ok(here)
    }

    /// This node, as children hold it: a node of its own that says the same.
    fn parent_of_child(&self) -> Option<Arc<BoundNode>> {
        let place = self.place.borrow_mut();
        let copy = Place { parent: place.parent.clone(), name: place.name.clone() };
        Some(Arc::new(Self {
            bind: self.bind.clone(),
            file_type: self.file_type,
            place: KernelCell::new(copy),
            known: KernelCell::new(self.known.get()),
            fresh: KernelCell::new(None),
            open: KernelCell::default(),
        }))
    }

    /// What the host says about the file since this system call began, or said last if it is gone.
    fn look_once(&self) -> FileAttributes {
        let (known, since) = self.known.get();
        if since == self.bind.moment() { known } else { self.look() }
    }

    /// What the host says about the file now, or said last if it is gone.
    fn look(&self) -> FileAttributes {
        let (known, _) = self.known.get();
        let found =
            self.ask_for_attributes().map_or(FileAttributes { nlink: 0, ..known }, |mut found| {
                self.bind.give_owner(&mut found);
                found
            });
        self.known.set((found, self.bind.moment()));
        found
    }

    fn ask_for_attributes(&self) -> Result<FileAttributes> {
        let handle = || {
            let open = self.open.borrow_mut();
            open.iter().rfind(|handle| self.is_known(**handle)).copied()
        };
        while let Some(handle) = handle() {
            match self.bind.ask(BIND_FSTAT, [handle.number, 0, 0], &[]) {
                // That was another host's.
                Err(Errno::ENOTCONN) if !self.is_known(handle) => {}
                reply => return parse(&reply?),
            }
        }
        let found = self.bind.stat(&self.path())?;
        // Opened in another boot: the file is there by its name, or not at all.
        let is_other = self.is_open() && found.inode != self.known.get().0.inode;
        if is_other { Err(Errno::ESTALE) } else { Ok(found) }
    }

    /// Whether the host knows an open file by this number.
    fn is_known(&self, handle: Handle) -> bool {
        match self.bind.is_volume() {
            true => handle.is_of_this_host(),
            false => handle.is_of_this_boot(),
        }
    }

    /// Bytes of the file now.
    pub(super) fn size(&self) -> u64 {
        self.look().size
    }

    /// The file, opened by the host.
    fn open_regular(self: Arc<Self>, flags: OpenFlags) -> Result<Arc<dyn File>> {
        let fresh = self.fresh.borrow_mut().take();
        let access = u64::from(flags.bits()) & 0o3;
        if self.bind.is_volume() {
            let opened = match fresh {
                Some(Fresh::Volume(opened)) => opened,
                _ => Opened::open(&self.bind, access, 0, &self.path())?,
            };
            return Ok(Arc::new(VolumeFile::new(self, opened, access != 0)));
        }
        let opened = match fresh {
            Some(Fresh::Bound(handle)) => file::Opened::made(handle),
            _ => file::Opened::open(&self.bind, access, &self.path())?,
        };
        Ok(Arc::new(BoundFile::new(self, opened)))
    }

    fn create_regular(&self, name: &[u8], path: &[u8], permissions: u64) -> Result<Arc<dyn Inode>> {
        const RDWR_CREAT_EXCL: u64 = 0o2 | 0o100 | 0o200;
        let (bind, flags) = (&self.bind, RDWR_CREAT_EXCL);
        let fresh = match bind.is_volume() {
            true => Fresh::Volume(Opened::open(bind, flags, permissions, path)?),
            false => Fresh::Bound(bind.ask_number(BIND_OPEN, [flags, permissions, 0], path)?),
        };
        // By its number: somebody may have removed the name by now.
        let found =
            bind.ask(BIND_FSTAT, [fresh.handle(), 0, 0], &[]).and_then(|found| parse(&found));
        let mut attributes = match found {
            // That was another host's.
            Err(Errno::ENOTCONN) => bind.stat(path)?,
            Ok(found) => found,
            Err(error) => {
                fresh.close(bind);
                return Err(error);
            }
        };
        bind.give_owner(&mut attributes);
        let node = Self::new(bind.clone(), self.parent_of_child(), name, attributes);
        *node.fresh.borrow_mut() = Some(fresh);
        Ok(node)
    }

    /// Forgets an open file.
    pub(super) fn forget_handle(&self, closed: Handle) {
        self.open.borrow_mut().retain(|&handle| handle != closed);
    }

    /// Has another path if it was at `from`, or below it, and that is at `to` now; whether it was.
    fn follow(&self, from: &[u8], to: &[u8]) -> bool {
        let path = self.path();
        let rest = path.strip_prefix(from).filter(|rest| rest.is_empty() || rest[0] == b'/');
        let Some(rest) = rest else { return false };
        let name = [to, rest].concat();
        let mut place = self.place.borrow_mut();
        let Some(mut root) = place.parent.clone() else { return false };
        while let Some(parent) = { root.place.borrow_mut().parent.clone() } {
            root = parent;
        }
        *place = Place { parent: Some(root), name };
        true
    }

    fn command(&self, operation: u32, arguments: [u64; 3]) -> Result<()> {
        self.bind.ask(operation, arguments, &self.path()).map(drop)
    }
}

/// The node behind an inode of this bound directory.
fn bound<'i>(inode: &'i Arc<dyn Inode>, bind: &Bind) -> Result<&'i BoundNode> {
    let inode: &dyn core::any::Any = &**inode;
    let node = inode.downcast_ref::<BoundNode>().ok_or(Errno::EXDEV)?;
    if node.bind.mount == bind.mount { Ok(node) } else { Err(Errno::EXDEV) }
}

fn nanoseconds(time: Option<Timestamp>) -> u64 {
    time.map_or(BIND_TIME_OMIT, |time| {
        (time.sec.saturating_mul(1_000_000_000).saturating_add(time.nsec.into())) as u64
    })
}

impl Inode for BoundNode {
    fn attributes(&self) -> Attributes {
        let found = self.look_once();
        let mtime = Timestamp { sec: found.mtime_sec, nsec: found.mtime_nsec };
        Attributes {
            dev: device_number(self.bind.id, 0),
            ino: found.inode,
            mode: found.mode,
            uid: found.uid,
            gid: found.gid,
            nlink: found.nlink,
            rdev: 0,
            size: found.size,
            blocks: found.size.div_ceil(4096) * 8,
            atime: mtime,
            mtime,
            ctime: mtime,
            btime: mtime,
        }
    }

    fn file_type(&self) -> FileType {
        self.file_type
    }

    fn filesystem(&self) -> FilesystemId {
        self.bind.id
    }

    fn caches_lookups(&self) -> bool {
        false
    }

    fn expect_walk(&self, path: &[u8]) {
        // One name alone is asked for when it is looked up.
        if path.contains(&b'/') {
            self.bind.ask_ahead(self.path(), path);
        }
    }

    fn lookup(&self, name: &[u8]) -> Result<Option<Arc<dyn Inode>>> {
        match self.child(name) {
            Ok(node) => Ok(Some(node)),
            Err(Errno::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn open(self: Arc<Self>, flags: OpenFlags) -> Result<Arc<dyn File>> {
        match self.file_type {
            FileType::Directory => Ok(Arc::new(DirectoryFile::new(self))),
            FileType::Regular => self.open_regular(flags),
            // FIFOs, sockets and devices of the host stay on the host.
            _ => Err(Errno::ENXIO),
        }
    }

    fn read_link(&self) -> Result<Link> {
        if self.file_type != FileType::Symlink {
            return Err(Errno::EINVAL);
        }
        Ok(Link::Text(self.bind.ask(BIND_READLINK, [0; 3], &self.path())?))
    }

    fn list(&self, emit: &mut dyn FnMut(&[u8], u64, FileType)) -> Result<()> {
        let path = self.path();
        let mut skip = 0;
        loop {
            let reply = self.bind.ask(BIND_LIST, [skip, 0, 0], &path)?;
            if reply.is_empty() {
                return Ok(());
            }
            let mut rest = reply.as_slice();
            while let Some((head, after)) = rest.split_at_checked(size_of::<DirectoryEntry>()) {
                let entry: DirectoryEntry = bytemuck::pod_read_unaligned(head);
                let name = after.get(..entry.name_len as usize).ok_or(Errno::EIO)?;
                let kind = FileType::from_mode(entry.file_type << 12).unwrap_or(FileType::Regular);
                emit(name, entry.inode, kind);
                skip += 1;
                rest = after.get((entry.name_len as usize).next_multiple_of(8)..).unwrap_or(&[]);
            }
        }
    }

    fn create(&self, name: &[u8], new: &NewInode) -> Result<Arc<dyn Inode>> {
        let path = self.path_of(name);
        let permissions = u64::from(new.permissions);
        match &new.kind {
            NewKind::Regular => return self.create_regular(name, &path, permissions),
            NewKind::Directory => {
                self.bind.ask(BIND_MKDIR, [permissions, 0, 0], &path)?;
            }
            NewKind::Symlink(target) => {
                let both = [&path[..], b"\0", target].concat();
                self.bind.ask(BIND_SYMLINK, [0; 3], &both)?;
            }
            NewKind::Fifo | NewKind::Socket | NewKind::CharacterDevice(_) => {
                return Err(Errno::EPERM);
            }
        }
        Ok(self.child(name)?)
    }

    fn link(&self, name: &[u8], target: &Arc<dyn Inode>) -> Result<()> {
        let target = bound(target, &self.bind)?;
        let both = [&target.path()[..], b"\0", &self.path_of(name)].concat();
        self.bind.ask(BIND_LINK, [0; 3], &both).map(drop)
    }

    fn remove(&self, name: &[u8]) -> Result<()> {
        let path = self.path_of(name);
        let directory = self.child(name)?.file_type == FileType::Directory;
        let operation = if directory { BIND_RMDIR } else { BIND_UNLINK };
        self.bind.ask(operation, [0; 3], &path).map(drop)
    }

    fn rename(
        &self,
        name: &[u8],
        new_directory: &Arc<dyn Inode>,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<()> {
        let to = bound(new_directory, &self.bind)?;
        let both = [&self.path_of(name)[..], b"\0", &to.path_of(new_name)].concat();
        let flags = if mode == RenameMode::Exchange { 2 } else { 0 };
        self.bind.ask(BIND_RENAME, [flags, 0, 0], &both)?;
        let (from, to) = (self.path_of(name), to.path_of(new_name));
        for file in self.bind.open_files() {
            let is_moved = file.node().follow(&from, &to);
            if !is_moved && mode == RenameMode::Exchange {
                file.node().follow(&to, &from);
            }
        }
        Ok(())
    }

    fn change(&self, changes: &AttributeChanges) -> Result<()> {
        let (known, _) = self.known.get();
        let other = |wanted: Option<u32>, now: u32| wanted.is_some_and(|id| id != now);
        if other(changes.uid, known.uid) || other(changes.gid, known.gid) {
            // Files belong to whoever runs the sandbox.
            if self.bind.is_volume() {
                return Err(Errno::EPERM);
            }
            let id = |wanted: Option<u32>| wanted.map_or(BIND_ID_OMIT, u64::from);
            self.command(BIND_CHOWN, [id(changes.uid), id(changes.gid), 0])?;
        }
        if let Some(bits) = changes.permissions {
            self.command(BIND_CHMOD, [bits.into(), 0, 0])?;
        }
        if changes.atime.is_some() || changes.mtime.is_some() {
            let times = [nanoseconds(changes.atime), nanoseconds(changes.mtime), 0];
            self.command(BIND_UTIMES, times)?;
        }
        Ok(())
    }

    fn truncate(&self, size: u64) -> Result<()> {
        crate::fs::writing::check_size(self.size(), size)?;
        self.command(BIND_TRUNCATE, [size, 0, 0])?;
        if self.bind.is_volume() {
            self.bind.set_size(self.known.get().0.inode, size);
        }
        Ok(())
    }

    fn is_open(&self) -> bool {
        !self.open.borrow_mut().is_empty()
    }

    fn statfs(&self) -> Statfs {
        self.bind.statfs(&self.path())
    }
}

impl Drop for BoundNode {
    fn drop(&mut self) {
        if let Some(fresh) = self.fresh.borrow_mut().take() {
            fresh.close(&self.bind);
        }
    }
}
