//! The rootfs index: one flat file that describes a root file system.
//!
//! ```text
//! IndexHeader
//! IndexExtension                    version 2 only
//! IndexInode     × inode_count      inode 0 is the root directory
//! IndexDirent    × dirent_count     those of one directory are contiguous, sorted by name bytes
//! IndexBlob      × blob_count       one per distinct file content
//! IndexAttribute × attribute_count  version 2 only; sorted by inode, then by name bytes
//! strings                           names, symbolic link targets, names and values of extended
//!                                   attributes, no terminators
//! ```
//!
//! An index is written as version 2 only if a file has extended attributes, so indexes without
//! are the same bytes as ever.
//!
//! Every table starts on an 8-byte boundary. File contents are not in the
//! index: a regular file names a blob, which the host's broker opens on
//! demand. The file is mapped read-only by every instance, so reading it costs
//! no host call.

use bytemuck::{Pod, Zeroable};

/// First bytes of a rootfs index.
pub const INDEX_MAGIC: [u8; 8] = *b"THAWIDX\0";
/// Version of an index without extended attributes.
pub const INDEX_VERSION: u32 = 1;
/// Version of an index with extended attributes.
pub const INDEX_VERSION_EXTENDED: u32 = 2;
/// Blob number of an empty regular file, which has no blob.
pub const NO_BLOB: u32 = u32::MAX;
/// Number of the root directory's inode.
pub const ROOT_INODE: u32 = 0;

/// Start of a rootfs index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct IndexHeader {
    /// [`INDEX_MAGIC`].
    pub magic: [u8; 8],
    /// [`INDEX_VERSION`] or [`INDEX_VERSION_EXTENDED`].
    pub version: u32,
    /// Number of inodes.
    pub inode_count: u32,
    /// Number of directory entries of all directories together.
    pub dirent_count: u32,
    /// Number of distinct file contents.
    pub blob_count: u32,
    /// Bytes of the whole file.
    pub total_len: u64,
    /// File offset of the inode table.
    pub inodes_offset: u64,
    /// File offset of the directory entries.
    pub dirents_offset: u64,
    /// File offset of the blob table.
    pub blobs_offset: u64,
    /// File offset of the strings.
    pub strings_offset: u64,
    /// Bytes of strings.
    pub strings_len: u64,
    /// BLAKE3 of everything after the header.
    pub checksum: [u8; 32],
}

/// What follows the header of an index of version [`INDEX_VERSION_EXTENDED`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct IndexExtension {
    /// File offset of the extended attributes.
    pub attributes_offset: u64,
    /// Number of extended attributes of all files together.
    pub attribute_count: u32,
    /// Zero.
    pub reserved: u32,
}

/// One file, directory, link or special file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct IndexInode {
    /// File type and permission bits as in `st_mode` (inode(7)).
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Number of hard links; for a directory 2 plus its subdirectories.
    pub nlink: u32,
    /// Bytes of a regular file or of a symbolic link's target.
    pub size: u64,
    /// Time of last modification, seconds since the epoch.
    pub mtime_sec: i64,
    /// Nanoseconds of the time of last modification.
    pub mtime_nsec: u32,
    /// Device number of a character or block special file, as in `st_rdev`.
    pub rdev: u32,
    /// Directory: first entry. Regular file: blob number or [`NO_BLOB`].
    /// Symbolic link: offset of the target in the strings.
    pub a: u32,
    /// Directory: number of entries. Symbolic link: bytes of the target.
    pub b: u32,
}

/// A name in a directory. `.` and `..` are not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct IndexDirent {
    /// Offset of the name in the strings.
    pub name_offset: u32,
    /// Bytes of the name, 1 to 255.
    pub name_len: u16,
    /// File type as in `d_type` (readdir(3)): `mode >> 12`.
    pub file_type: u8,
    /// Zero.
    pub reserved: u8,
    /// Number of the inode that the name refers to.
    pub inode: u32,
}

/// The content of one or more regular files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct IndexBlob {
    /// The blob's name in the store: BLAKE3 of the content, keyed if the file
    /// belongs to a sharing domain of its own.
    pub hash: [u8; 32],
    /// Bytes of the content.
    pub size: u64,
}

/// An extended attribute of a file ([`crate::extended`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct IndexAttribute {
    /// Number of the inode that has it.
    pub inode: u32,
    /// Offset of the name in the strings.
    pub name_offset: u32,
    /// Bytes of the name.
    pub name_len: u32,
    /// Offset of the value in the strings.
    pub value_offset: u32,
    /// Bytes of the value.
    pub value_len: u32,
}

/// Why bytes are not a usable rootfs index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexError {
    /// Shorter than its header says, or a table lies outside the file.
    Truncated,
    /// Does not begin with [`INDEX_MAGIC`].
    NotAnIndex,
    /// Written by another version of Thaw; holds the version found.
    Version(u32),
}

/// A read-only view of a rootfs index. All look-ups check their bounds: a
/// damaged index yields `None`, never a panic.
#[derive(Clone, Copy, Debug)]
pub struct Index<'a> {
    header: &'a IndexHeader,
    inodes: &'a [IndexInode],
    dirents: &'a [IndexDirent],
    blobs: &'a [IndexBlob],
    extended: &'a [IndexAttribute],
    strings: &'a [u8],
}

impl<'a> Index<'a> {
    /// Interprets `bytes`, which must be 8-byte aligned, as a rootfs index.
    /// Does not verify the checksum: whoever opens the file does, once.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, IndexError> {
        let head = bytes.get(..size_of::<IndexHeader>()).ok_or(IndexError::Truncated)?;
        let header: &IndexHeader =
            bytemuck::try_from_bytes(head).map_err(|_| IndexError::NotAnIndex)?;
        if header.magic != INDEX_MAGIC {
            return Err(IndexError::NotAnIndex);
        }
        if !matches!(header.version, INDEX_VERSION | INDEX_VERSION_EXTENDED) {
            return Err(IndexError::Version(header.version));
        }
        if header.total_len != bytes.len() as u64 {
            return Err(IndexError::Truncated);
        }
        let extended = match header.version {
            INDEX_VERSION => &[],
            _ => extended_attributes(bytes)?,
        };
        Ok(Self {
            header,
            inodes: table(bytes, header.inodes_offset, header.inode_count)?,
            dirents: table(bytes, header.dirents_offset, header.dirent_count)?,
            blobs: table(bytes, header.blobs_offset, header.blob_count)?,
            extended,
            strings: range(bytes, header.strings_offset, header.strings_len)?,
        })
    }

    /// The header.
    pub fn header(&self) -> &'a IndexHeader {
        self.header
    }

    /// All blobs, by blob number.
    pub fn blobs(&self) -> &'a [IndexBlob] {
        self.blobs
    }

    /// All inodes, by inode number.
    pub fn inodes(&self) -> &'a [IndexInode] {
        self.inodes
    }

    /// The extended attributes of all files, by inode and name.
    pub fn all_extended(&self) -> &'a [IndexAttribute] {
        self.extended
    }

    /// The extended attributes of the inode with this number, by name.
    pub fn extended(&self, inode: u32) -> &'a [IndexAttribute] {
        let first = self.extended.partition_point(|attribute| attribute.inode < inode);
        let rest = &self.extended[first..];
        &rest[..rest.partition_point(|attribute| attribute.inode <= inode)]
    }

    /// The name of an extended attribute.
    pub fn extended_name(&self, attribute: &IndexAttribute) -> &'a [u8] {
        self.string(attribute.name_offset, attribute.name_len)
    }

    /// The value of an extended attribute.
    pub fn extended_value(&self, attribute: &IndexAttribute) -> &'a [u8] {
        self.string(attribute.value_offset, attribute.value_len)
    }

    /// The inode with this number.
    pub fn inode(&self, number: u32) -> Option<&'a IndexInode> {
        self.inodes.get(number as usize)
    }

    /// The entries of a directory, sorted by name; empty for anything else.
    pub fn entries(&self, directory: &IndexInode) -> &'a [IndexDirent] {
        if directory.mode & 0o170000 != 0o040000 {
            return &[];
        }
        let first = directory.a as usize;
        first
            .checked_add(directory.b as usize)
            .and_then(|end| self.dirents.get(first..end))
            .unwrap_or(&[])
    }

    /// The name of a directory entry.
    pub fn name(&self, entry: &IndexDirent) -> &'a [u8] {
        self.string(entry.name_offset, entry.name_len.into())
    }

    /// The target of a symbolic link.
    pub fn link_target(&self, link: &IndexInode) -> &'a [u8] {
        self.string(link.a, link.b)
    }

    /// Bytes of the strings; empty outside of them.
    fn string(&self, offset: u32, len: u32) -> &'a [u8] {
        let first = offset as usize;
        self.strings.get(first..first + len as usize).unwrap_or(&[])
    }

    /// Finds `name` in a directory by binary search.
    pub fn lookup(&self, directory: &IndexInode, name: &[u8]) -> Option<&'a IndexDirent> {
        let entries = self.entries(directory);
        let at = entries.binary_search_by(|entry| self.name(entry).cmp(name)).ok()?;
        entries.get(at)
    }
}

/// The table that the extension behind the header names.
fn extended_attributes(bytes: &[u8]) -> Result<&[IndexAttribute], IndexError> {
    let extension: &[IndexExtension] = table(bytes, size_of::<IndexHeader>() as u64, 1)?;
    table(bytes, extension[0].attributes_offset, extension[0].attribute_count)
}

fn range(bytes: &[u8], offset: u64, len: u64) -> Result<&[u8], IndexError> {
    let end = offset.checked_add(len).ok_or(IndexError::Truncated)?;
    bytes.get(offset as usize..end as usize).ok_or(IndexError::Truncated)
}

fn table<T: Pod>(bytes: &[u8], offset: u64, count: u32) -> Result<&[T], IndexError> {
    let bytes = range(bytes, offset, count as u64 * size_of::<T>() as u64)?;
    bytemuck::try_cast_slice(bytes).map_err(|_| IndexError::Truncated)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_tripwire() {
        assert_eq!(INDEX_VERSION, 1);
        assert_eq!(size_of::<IndexHeader>(), 104);
        assert_eq!(size_of::<IndexInode>(), 48);
        assert_eq!(size_of::<IndexDirent>(), 12);
        assert_eq!(size_of::<IndexBlob>(), 40);
        assert_eq!(INDEX_VERSION_EXTENDED, 2);
        assert_eq!(size_of::<IndexExtension>(), 16);
        assert_eq!(size_of::<IndexAttribute>(), 20);
    }

    #[test]
    fn foreign_bytes_are_refused() {
        assert_eq!(Index::parse(&[]).unwrap_err(), IndexError::Truncated);
        let zeros = [0u64; 32];
        assert_eq!(Index::parse(bytemuck::cast_slice(&zeros)).unwrap_err(), IndexError::NotAnIndex);
    }
}
