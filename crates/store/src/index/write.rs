//! Writes a tree as a rootfs index (format: `thaw_abi::rootfs`). Equal trees
//! give equal bytes.

use std::collections::{HashMap, VecDeque};

use bytemuck::Zeroable;
use thaw_abi::rootfs::{
    INDEX_MAGIC, INDEX_VERSION, INDEX_VERSION_EXTENDED, Index, IndexAttribute, IndexBlob,
    IndexDirent, IndexExtension, IndexHeader, IndexInode, NO_BLOB,
};

use super::extension;
use super::tree::{Content, DeviceNumber, NodeId, Tree, TreeError};
use crate::blob::Blob;

pub(super) const S_IFIFO: u32 = 0o010000;
pub(super) const S_IFCHR: u32 = 0o020000;
pub(super) const S_IFDIR: u32 = 0o040000;
pub(super) const S_IFBLK: u32 = 0o060000;
pub(super) const S_IFREG: u32 = 0o100000;
pub(super) const S_IFLNK: u32 = 0o120000;
pub(super) const S_IFSOCK: u32 = 0o140000;

impl Tree {
    /// The tree as the bytes of a rootfs index.
    pub fn to_index(&self) -> Result<Vec<u8>, TreeError> {
        let mut writer = Writer::new(self);
        writer.walk()?;
        writer.finish()
    }

    /// The tree as the bytes of an index that has all inodes and blobs of `base` under the same
    /// numbers: whoever knows the files of `base` by number finds them there.
    ///
    /// # Errors
    /// [`TreeError::Extends`] if the tree does not have a file of `base`, or has another one in
    /// its place. Only the times of directories, and what is in them besides, may differ.
    pub fn to_index_over(&self, base: &Index<'_>) -> Result<Vec<u8>, TreeError> {
        let mut writer = Writer::new(self);
        writer.reserved = extension::match_files(self, base)?;
        writer.inodes = vec![IndexInode::zeroed(); base.inodes().len()];
        for blob in base.blobs() {
            writer.add_blob(Blob { hash: blob.hash.into(), size: blob.size })?;
        }
        writer.walk()?;
        extension::check_links(&writer.inodes, base)?;
        writer.finish()
    }

    /// Every distinct content that the tree refers to.
    pub fn blobs(&self) -> Result<Vec<Blob>, TreeError> {
        let mut writer = Writer::new(self);
        writer.walk()?;
        Ok(writer.blobs.iter().map(|b| Blob { hash: b.hash.into(), size: b.size }).collect())
    }
}

struct Writer<'t> {
    tree: &'t Tree,
    inodes: Vec<IndexInode>,
    dirents: Vec<IndexDirent>,
    blobs: Vec<IndexBlob>,
    strings: Vec<u8>,
    /// Inode number of a node; `u32::MAX` if it has none yet.
    numbers: Vec<u32>,
    blob_numbers: HashMap<Blob, u32>,
    /// Inode numbers that nodes must get; those below the table's length when it begins.
    reserved: HashMap<NodeId, u32>,
    /// Where a string lies: `__init__.py` is stored once.
    string_offsets: HashMap<&'t [u8], u32>,
}

impl<'t> Writer<'t> {
    fn new(tree: &'t Tree) -> Self {
        Self {
            tree,
            inodes: Vec::new(),
            dirents: Vec::new(),
            blobs: Vec::new(),
            strings: Vec::new(),
            numbers: vec![u32::MAX; tree.capacity()],
            blob_numbers: HashMap::new(),
            reserved: HashMap::new(),
            string_offsets: HashMap::new(),
        }
    }

    /// Breadth first, so that the entries of a directory are neighbours.
    fn walk(&mut self) -> Result<(), TreeError> {
        let tree = self.tree;
        let mut queue = VecDeque::from([Tree::ROOT]);
        self.add_inode(Tree::ROOT)?;
        while let Some(directory) = queue.pop_front() {
            let Content::Directory(entries) = &tree.node(directory).content else { continue };
            let first = count(self.dirents.len(), "names")?;
            let mut subdirectories = 0;
            for (name, &child) in entries {
                let seen = self.numbers[child.0 as usize] != u32::MAX;
                let number =
                    if seen { self.numbers[child.0 as usize] } else { self.add_inode(child)? };
                let inode = &mut self.inodes[number as usize];
                if inode.mode & 0o170000 == S_IFDIR {
                    subdirectories += 1;
                    queue.push_back(child);
                } else {
                    inode.nlink += 1;
                }
                let file_type = (inode.mode >> 12) as u8;
                let name_offset = self.add_string(name)?;
                self.dirents.push(IndexDirent {
                    name_offset,
                    name_len: name.len() as u16,
                    file_type,
                    reserved: 0,
                    inode: number,
                });
            }
            let number = self.numbers[directory.0 as usize];
            let inode = &mut self.inodes[number as usize];
            inode.a = first;
            inode.b = count(entries.len(), "names")?;
            inode.nlink = 2 + subdirectories;
        }
        count(self.dirents.len(), "names").map(|_| ())
    }

    fn add_inode(&mut self, id: NodeId) -> Result<u32, TreeError> {
        let reserved = self.reserved.get(&id).copied();
        let number = reserved.map_or_else(|| count(self.inodes.len(), "files"), Ok)?;
        let tree = self.tree;
        let node = tree.node(id);
        let mut inode = IndexInode {
            mode: node.attributes.permissions & 0o7777,
            uid: node.attributes.uid,
            gid: node.attributes.gid,
            mtime_sec: node.attributes.modified.seconds,
            mtime_nsec: node.attributes.modified.nanoseconds,
            ..IndexInode::zeroed()
        };
        inode.mode |= match &node.content {
            Content::Directory(_) => S_IFDIR,
            Content::Regular(blob) => {
                inode.size = blob.map_or(0, |blob| blob.size);
                inode.a = blob.map_or(Ok(NO_BLOB), |blob| self.add_blob(blob))?;
                S_IFREG
            }
            Content::Symlink(target) => {
                inode.size = target.len() as u64;
                inode.a = self.add_string(target)?;
                inode.b = target.len() as u32;
                S_IFLNK
            }
            Content::Fifo => S_IFIFO,
            Content::Socket => S_IFSOCK,
            Content::CharacterDevice(number) => {
                inode.rdev = encode_device(*number);
                S_IFCHR
            }
            Content::BlockDevice(number) => {
                inode.rdev = encode_device(*number);
                S_IFBLK
            }
        };
        match reserved {
            Some(number) => self.inodes[number as usize] = inode,
            None => self.inodes.push(inode),
        }
        self.numbers[id.0 as usize] = number;
        Ok(number)
    }

    fn add_blob(&mut self, blob: Blob) -> Result<u32, TreeError> {
        if let Some(&number) = self.blob_numbers.get(&blob) {
            return Ok(number);
        }
        let number = count(self.blobs.len(), "different contents")?;
        self.blobs.push(IndexBlob { hash: *blob.hash.as_bytes(), size: blob.size });
        self.blob_numbers.insert(blob, number);
        Ok(number)
    }

    fn add_string(&mut self, string: &'t [u8]) -> Result<u32, TreeError> {
        if let Some(&offset) = self.string_offsets.get(string) {
            return Ok(offset);
        }
        let offset = count(self.strings.len(), "bytes of names")?;
        self.strings.extend_from_slice(string);
        self.string_offsets.insert(string, offset);
        Ok(offset)
    }

    /// The extended attributes of all files that are written, in order.
    fn extended(&mut self) -> Result<Vec<IndexAttribute>, TreeError> {
        let tree = self.tree;
        let number = |id: NodeId| self.numbers[id.0 as usize];
        let mut files: Vec<_> = tree.all_extended().map(|(id, all)| (number(id), all)).collect();
        files.retain(|(number, _)| *number != u32::MAX);
        files.sort_unstable_by_key(|(number, _)| *number);
        let mut attributes = Vec::new();
        for (inode, all) in files {
            for (name, value) in all.iter() {
                attributes.push(IndexAttribute {
                    inode,
                    name_offset: self.add_string(name)?,
                    name_len: name.len() as u32,
                    value_offset: self.add_string(value)?,
                    value_len: value.len() as u32,
                });
            }
        }
        Ok(attributes)
    }

    fn finish(mut self) -> Result<Vec<u8>, TreeError> {
        let attributes = self.extended()?;
        let is_extended = !attributes.is_empty();
        let extension_len = if is_extended { size_of::<IndexExtension>() } else { 0 };
        let mut bytes = vec![0; size_of::<IndexHeader>() + extension_len];
        let inodes_offset = append(&mut bytes, bytemuck::cast_slice(&self.inodes));
        let dirents_offset = append(&mut bytes, bytemuck::cast_slice(&self.dirents));
        let blobs_offset = append(&mut bytes, bytemuck::cast_slice(&self.blobs));
        if is_extended {
            let extension = IndexExtension {
                attributes_offset: append(&mut bytes, bytemuck::cast_slice(&attributes)),
                attribute_count: count(attributes.len(), "extended attributes")?,
                reserved: 0,
            };
            bytes[size_of::<IndexHeader>()..][..extension_len]
                .copy_from_slice(bytemuck::bytes_of(&extension));
        }
        let strings_offset = append(&mut bytes, &self.strings);
        let header = IndexHeader {
            magic: INDEX_MAGIC,
            version: if is_extended { INDEX_VERSION_EXTENDED } else { INDEX_VERSION },
            inode_count: count(self.inodes.len(), "files")?,
            dirent_count: count(self.dirents.len(), "names")?,
            blob_count: count(self.blobs.len(), "different contents")?,
            total_len: bytes.len() as u64,
            inodes_offset,
            dirents_offset,
            blobs_offset,
            strings_offset,
            strings_len: self.strings.len() as u64,
            checksum: *blake3::hash(&bytes[size_of::<IndexHeader>()..]).as_bytes(),
        };
        bytes[..size_of::<IndexHeader>()].copy_from_slice(bytemuck::bytes_of(&header));
        Ok(bytes)
    }
}

/// Appends a table on an 8-byte boundary; returns its offset.
fn append(bytes: &mut Vec<u8>, table: &[u8]) -> u64 {
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    let offset = bytes.len() as u64;
    bytes.extend_from_slice(table);
    offset
}

/// `u32::MAX` is not a number of anything: it is [`NO_BLOB`].
fn count(value: usize, what: &'static str) -> Result<u32, TreeError> {
    match u32::try_from(value) {
        Ok(number) if number != u32::MAX => Ok(number),
        _ => Err(TreeError::TooMany(what)),
    }
}

/// The kernel's 32-bit encoding (`new_encode_dev`), which is also the low half
/// of glibc's `dev_t` for numbers of this size.
pub(super) fn encode_device(number: DeviceNumber) -> u32 {
    (number.minor & 0xff) | (number.major << 8) | ((number.minor & !0xff) << 12)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_are_encoded_as_the_host_does() {
        for (major, minor) in [(1, 3), (5, 0), (8, 17), (259, 300), (4095, 0xfffff)] {
            let host = rustix::fs::makedev(major, minor);
            assert_eq!(encode_device(DeviceNumber { major, minor }) as u64, host);
        }
    }
}
