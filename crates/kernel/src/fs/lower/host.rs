//! A directory of the host as lower layer, asked for through the broker.
//!
//! What the broker says about a file that is looked at is kept: the layer counts as read-only,
//! and a program that looks twice must not pay twice. A file that changes on
//! the host while the sandbox runs shows its old attributes and its new content.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use bytemuck::Zeroable;
use thaw_abi::control::{
    DirectoryEntry, FileAttributes, ListDirectory, MSG_FS_LIST, MSG_FS_READLINK, MSG_FS_STAT,
};

use super::{Lower, LowerAttributes, LowerId};
use crate::errno::{Errno, Result};
use crate::fs::inode::{FileType, S_IFMT, Timestamp};
use crate::fs::lower::host_file;
use crate::fs::path::join;
use crate::host::{files, files_socket};
use crate::io::Sink;
use crate::mm::backing::{HostPages, MmapSource};
use crate::platform::machine::{Clocks, HostFd, Machine};
use crate::sync::KernelCell;

/// The lower layer that the broker serves.
pub struct HostLower {
    state: KernelCell<State>,
}

/// Most files whose attributes are kept although nobody has asked for them.
const LISTED_MAX: usize = 2048;
/// For how long, in nanoseconds: they are to be those of the first look.
const LISTED_NS: u64 = 1_000_000_000;

#[derive(Default)]
struct State {
    files: Vec<Entry>,
    by_path: BTreeMap<Arc<[u8]>, LowerId>,
    /// Targets of symbolic links.
    links: BTreeMap<LowerId, Vec<u8>>,
    /// Device numbers of the host, in order of appearance. The guest sees the
    /// position, since the number is none of its business.
    devices: Vec<u64>,
    /// Files with several names, by device and inode number: each is one file.
    linked: BTreeMap<(u64, u64), LowerId>,
    /// What came with the lists of directories, by path: whoever lists one often looks at what is in it.
    listed: BTreeMap<Vec<u8>, Listed>,
}

/// What a list says of an entry, and when it was asked for.
struct Listed {
    attributes: FileAttributes,
    since: u64,
}

impl Listed {
    fn is_fresh(&self) -> bool {
        let age = Machine::monotonic_ns().checked_sub(self.since);
        age.is_some_and(|age| age < LISTED_NS)
    }
}

#[derive(Clone)]
struct Entry {
    path: Arc<[u8]>,
    attributes: FileAttributes,
    device: u32,
}

impl HostLower {
    /// Asks for the root directory.
    pub fn new() -> Result<Self> {
        let layer = Self { state: KernelCell::default() };
        layer.find(b"")?.ok_or(Errno::ENOENT)?;
        Ok(layer)
    }

    fn entry(&self, id: LowerId) -> Result<Entry> {
        self.state.borrow_mut().files.get(id.0 as usize).cloned().ok_or(Errno::EIO)
    }

    /// The file with this path, if there is one.
    fn find(&self, path: &[u8]) -> Result<Option<LowerId>> {
        let listed = {
            let mut state = self.state.borrow_mut();
            if let Some(id) = state.by_path.get(path) {
                return Ok(Some(*id));
            }
            state.listed.remove(path).filter(Listed::is_fresh)
        };
        match listed {
            Some(listed) => self.add(path, listed.attributes).map(Some),
            None => self.ask(path),
        }
    }

    /// Asks for the file with this path, if there is one.
    fn ask(&self, path: &[u8]) -> Result<Option<LowerId>> {
        let mut reply = Vec::new();
        match files_socket::request(MSG_FS_STAT, &[], path, &mut reply) {
            Ok(_) => {}
            // What the host keeps from the broker does not exist for the guest.
            Err(
                Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EACCES | Errno::ENAMETOOLONG,
            ) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        self.add(path, parse(&reply)?).map(Some)
    }

    fn add(&self, path: &[u8], attributes: FileAttributes) -> Result<LowerId> {
        let mut state = self.state.borrow_mut();
        let device = match state.devices.iter().position(|&known| known == attributes.device) {
            Some(position) => position,
            None => {
                state.devices.push(attributes.device);
                state.devices.len() - 1
            }
        } as u32;
        let path: Arc<[u8]> = path.into();
        let has_links =
            attributes.nlink > 1 && attributes.mode & S_IFMT != FileType::Directory.mode_bits();
        let identity = (attributes.device, attributes.inode);
        if has_links && let Some(&id) = state.linked.get(&identity) {
            state.by_path.insert(path, id);
            return Ok(id);
        }
        let id = LowerId(u32::try_from(state.files.len()).map_err(|_| Errno::ENOMEM)?);
        if has_links {
            state.linked.insert(identity, id);
        }
        state.files.push(Entry { path: path.clone(), attributes, device });
        state.by_path.insert(path, id);
        Ok(id)
    }

    /// Keeps what a list says of an entry.
    fn keep_listed(&self, path: Vec<u8>, listed: Listed) {
        let mut state = self.state.borrow_mut();
        if state.by_path.contains_key(&*path) {
            return;
        }
        if state.listed.len() >= LISTED_MAX {
            state.listed.clear();
        }
        state.listed.insert(path, listed);
    }
}

fn parse(bytes: &[u8]) -> Result<FileAttributes> {
    let mut attributes = FileAttributes::zeroed();
    let bytes = bytes.get(..size_of::<FileAttributes>()).ok_or(Errno::EIO)?;
    bytemuck::bytes_of_mut(&mut attributes).copy_from_slice(bytes);
    Ok(attributes)
}

impl Lower for HostLower {
    fn root(&self) -> LowerId {
        LowerId(0)
    }

    fn attributes(&self, id: LowerId) -> Result<LowerAttributes> {
        let Entry { attributes, device, .. } = self.entry(id)?;
        Ok(LowerAttributes {
            ino: attributes.inode,
            device,
            mode: attributes.mode,
            uid: attributes.uid,
            gid: attributes.gid,
            nlink: attributes.nlink,
            rdev: attributes.rdev.into(),
            size: attributes.size,
            mtime: Timestamp { sec: attributes.mtime_sec, nsec: attributes.mtime_nsec },
        })
    }

    fn lookup(&self, directory: LowerId, name: &[u8]) -> Result<Option<LowerId>> {
        let path = join(&self.entry(directory)?.path, name);
        self.find(&path)
    }

    fn list(&self, directory: LowerId, emit: &mut dyn FnMut(&[u8], u64, FileType)) -> Result<()> {
        let path = self.entry(directory)?.path;
        let mut request = ListDirectory { skip: 0 };
        let mut reply = Vec::new();
        loop {
            reply.clear();
            let since = Machine::monotonic_ns();
            files_socket::request(MSG_FS_LIST, bytemuck::bytes_of(&request), &path, &mut reply)?;
            if reply.is_empty() {
                return Ok(());
            }
            let mut rest = reply.as_slice();
            while let Some((head, after)) = rest.split_at_checked(size_of::<DirectoryEntry>()) {
                let mut entry = DirectoryEntry::zeroed();
                bytemuck::bytes_of_mut(&mut entry).copy_from_slice(head);
                let name = after.get(..entry.name_len as usize).ok_or(Errno::EIO)?;
                let kind = FileType::from_mode(entry.file_type << 12).unwrap_or(FileType::Regular);
                emit(name, entry.inode, kind);
                request.skip += 1;
                rest = after.get(name.len().next_multiple_of(8)..).ok_or(Errno::EIO)?;
                let attributes = parse(rest)?;
                if attributes.mode != 0 {
                    self.keep_listed(join(&path, name), Listed { attributes, since });
                }
                rest = &rest[size_of::<FileAttributes>()..];
            }
        }
    }

    fn read_link(&self, id: LowerId) -> Result<Vec<u8>> {
        if let Some(target) = self.state.borrow_mut().links.get(&id) {
            return Ok(target.clone());
        }
        let path = self.entry(id)?.path;
        let mut target = Vec::new();
        files_socket::request(MSG_FS_READLINK, &[], &path, &mut target)?;
        self.state.borrow_mut().links.insert(id, target.clone());
        Ok(target)
    }

    fn prepare(&self, id: LowerId) -> Result<()> {
        files::descriptor(&self.entry(id)?.path).map(drop)
    }

    fn read(&self, id: LowerId, sink: &mut Sink<'_>, offset: u64, len: usize) -> Result<usize> {
        let path = self.entry(id)?.path;
        host_file::read_file(|| files::descriptor(&path), sink, offset, len)
    }

    fn mmap_source(&self, id: LowerId) -> Result<MmapSource> {
        Ok(MmapSource::HostFile(Arc::new(ByPath(self.entry(id)?.path))))
    }
}

/// A file of the layer, by its path.
struct ByPath(Arc<[u8]>);

impl HostPages for ByPath {
    fn descriptor(&self) -> Result<HostFd> {
        files::descriptor(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{HostFile, Sandbox};

    fn put(
        sandbox: &Sandbox,
        path: &str,
        mode: u32,
        nlink: u32,
        identity: (u64, u64),
        target: &str,
    ) {
        let attributes = FileAttributes {
            device: identity.0,
            inode: identity.1,
            mode,
            nlink,
            ..Zeroable::zeroed()
        };
        sandbox.host.put(path, HostFile { attributes, target: target.as_bytes().to_vec() });
    }

    fn names(layer: &HostLower, directory: LowerId) -> Vec<(Vec<u8>, u64)> {
        let mut found = Vec::new();
        layer.list(directory, &mut |name, ino, _| found.push((name.to_vec(), ino))).unwrap();
        found
    }

    #[test]
    fn a_host_directory_is_served_through_the_broker() {
        let sandbox = Sandbox::new();
        put(&sandbox, "", 0o040755, 3, (7, 1), "");
        put(&sandbox, "dir", 0o040755, 2, (7, 2), "");
        put(&sandbox, "dir/one", 0o100644, 2, (7, 10), "");
        put(&sandbox, "dir/two", 0o100644, 2, (7, 10), "");
        put(&sandbox, "dir/other", 0o100644, 1, (9, 10), "");
        put(&sandbox, "link", 0o120777, 1, (7, 11), "dir/one");
        let layer = HostLower::new().unwrap();
        let root = layer.root();
        let dir = layer.lookup(root, b"dir").unwrap().unwrap();
        assert_eq!(layer.lookup(root, b"none"), Ok(None));
        assert_eq!(names(&layer, root), [(b"dir".to_vec(), 2), (b"link".to_vec(), 11)]);
        assert_eq!(
            names(&layer, dir),
            [(b"one".to_vec(), 10), (b"other".to_vec(), 10), (b"two".to_vec(), 10)]
        );
        // Two names of one file are one file; equal inode numbers on two devices are not.
        let one = layer.lookup(dir, b"one").unwrap().unwrap();
        let two = layer.lookup(dir, b"two").unwrap().unwrap();
        let other = layer.lookup(dir, b"other").unwrap().unwrap();
        assert_eq!(one, two);
        assert_ne!(one, other);
        assert_eq!(layer.attributes(one).unwrap().device, 0);
        assert_eq!(layer.attributes(other).unwrap().device, 1);
        let link = layer.lookup(root, b"link").unwrap().unwrap();
        assert_eq!(layer.read_link(link).unwrap(), b"dir/one");
        // What has been looked at is remembered.
        sandbox.host.remove("dir/one");
        assert_eq!(layer.lookup(dir, b"one"), Ok(Some(one)));
    }

    #[test]
    fn what_a_list_tells_is_asked_for_no_more_and_bounded() {
        let sandbox = Sandbox::new();
        put(&sandbox, "", 0o040755, 3, (7, 1), "");
        put(&sandbox, "told", 0o100644, 1, (7, 2), "");
        put(&sandbox, "untold", 0, 1, (7, 3), "");
        let layer = HostLower::new().unwrap();
        let root = layer.root();
        assert_eq!(names(&layer, root).len(), 2);
        sandbox.host.remove("told");
        let told = layer.lookup(root, b"told").unwrap().unwrap();
        assert_eq!(layer.attributes(told).unwrap().ino, 2);
        assert!(!layer.state.borrow_mut().listed.contains_key(&b"told"[..]), "it is kept twice");
        // What a list has told long ago is asked for.
        put(&sandbox, "old", 0o100600, 1, (7, 4), "");
        let attributes = FileAttributes { inode: 9, mode: 0o100644, ..Zeroable::zeroed() };
        let since = Machine::monotonic_ns() - LISTED_NS;
        layer.keep_listed(b"old".to_vec(), Listed { attributes, since });
        let old = layer.lookup(root, b"old").unwrap().unwrap();
        assert_eq!(layer.attributes(old).unwrap().ino, 4);
        put(&sandbox, "untold", 0o100600, 1, (7, 3), "");
        let untold = layer.lookup(root, b"untold").unwrap().unwrap();
        assert_eq!(layer.attributes(untold).unwrap().mode, 0o100600);
        for number in 0..3 * LISTED_MAX {
            let attributes = FileAttributes { mode: 0o100600, ..Zeroable::zeroed() };
            let since = Machine::monotonic_ns();
            layer.keep_listed(number.to_ne_bytes().to_vec(), Listed { attributes, since });
            assert!(layer.state.borrow_mut().listed.len() <= LISTED_MAX);
        }
    }
}
