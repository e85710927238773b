//! The lower layer: the read-only file system that a function starts from.

pub mod host;
pub mod host_file;
pub mod index;

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::inode::{FileType, Timestamp};
use crate::errno::{Errno, Result};
use crate::io::Sink;
use crate::mm::backing::MmapSource;
use crate::platform::saved::Saved;

/// Names a file of the lower layer. What the number means is up to the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LowerId(pub u32);

/// Attributes of a file of the lower layer.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct LowerAttributes {
    /// Inode number for the guest.
    pub ino: u64,
    /// Tells apart files of equal inode number; 0 for most.
    pub device: u32,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    pub rdev: u64,
    pub size: u64,
    pub mtime: Timestamp,
}

/// A read-only file system.
pub trait Lower: Saved + Send + Sync {
    /// The root directory.
    fn root(&self) -> LowerId;

    /// Attributes.
    fn attributes(&self, id: LowerId) -> Result<LowerAttributes>;

    /// Finds a name in a directory.
    fn lookup(&self, directory: LowerId, name: &[u8]) -> Result<Option<LowerId>>;

    /// Names in a directory with their inode numbers, in a fixed order.
    fn list(&self, directory: LowerId, emit: &mut dyn FnMut(&[u8], u64, FileType)) -> Result<()>;

    /// Target of a symbolic link.
    fn read_link(&self, id: LowerId) -> Result<Vec<u8>>;

    /// Names and values of a file's extended attributes. Of directories of the host, none are
    /// taken over.
    fn extended(&self, _id: LowerId, _emit: &mut dyn FnMut(&[u8], &[u8])) {}

    /// Makes sure that a regular file can be read: what can fail about that
    /// fails in open(2), not in read(2).
    fn prepare(&self, _id: LowerId) -> Result<()> {
        Ok(())
    }

    /// Reads from a regular file, at most `len` bytes.
    fn read(&self, id: LowerId, sink: &mut Sink<'_>, offset: u64, len: usize) -> Result<usize>;

    /// What a memory mapping of a regular file is made of.
    fn mmap_source(&self, id: LowerId) -> Result<MmapSource>;

    /// Goes over to the index that is mapped now, `len` bytes, which has all files of the one
    /// before under the same numbers, and maybe more. `EINVAL` if the layer is no index.
    fn rebase(&self, _len: u64) -> Result<()> {
        Err(Errno::EINVAL)
    }
}

/// The lower layer of a sandbox.
#[derive(Clone)]
pub struct LowerLayer(pub Arc<dyn Lower>);

impl LowerLayer {
    /// The rootfs index that is mapped at [`thaw_abi::layout::INDEX_BASE`],
    /// `len` bytes. `EINVAL` if that is no index.
    pub fn index(len: u64) -> Result<Self> {
        Ok(Self(Arc::new(index::IndexLower::mapped(len)?)))
    }

    /// The host directory that the broker serves.
    pub fn host() -> Result<Self> {
        Ok(Self(Arc::new(host::HostLower::new()?)))
    }

    /// No files at all: an empty root directory.
    pub fn empty() -> Self {
        Self(Arc::new(Empty))
    }
}

/// A lower layer with nothing in it.
struct Empty;

impl Lower for Empty {
    fn root(&self) -> LowerId {
        LowerId(0)
    }
    fn attributes(&self, _: LowerId) -> Result<LowerAttributes> {
        let mtime = Timestamp { sec: 0, nsec: 0 };
        Ok(LowerAttributes {
            ino: 1,
            device: 0,
            mode: 0o040755,
            uid: 0,
            gid: 0,
            nlink: 2,
            rdev: 0,
            size: 0,
            mtime,
        })
    }
    fn lookup(&self, _: LowerId, _: &[u8]) -> Result<Option<LowerId>> {
        Ok(None)
    }
    fn list(&self, _: LowerId, _: &mut dyn FnMut(&[u8], u64, FileType)) -> Result<()> {
        Ok(())
    }
    fn read_link(&self, _: LowerId) -> Result<Vec<u8>> {
        Err(Errno::EINVAL)
    }
    fn read(&self, _: LowerId, _: &mut Sink<'_>, _: u64, _: usize) -> Result<usize> {
        Err(Errno::EINVAL)
    }
    fn mmap_source(&self, _: LowerId) -> Result<MmapSource> {
        Err(Errno::ENODEV)
    }
}
