//! A rootfs index as lower layer. Everything but file content is read from the
//! mapped index, without a host call.

use alloc::vec::Vec;

use thaw_abi::rootfs::{Index, IndexInode, NO_BLOB, ROOT_INODE};

use super::{Lower, LowerAttributes, LowerId};
use crate::errno::{Errno, Result};
use crate::fs::inode::{FileType, Timestamp};
use crate::fs::lower::host_file;
use crate::io::Sink;
use crate::mm::backing::MmapSource;
use crate::mm::lazy;
use crate::sync::KernelCell;

/// Inode numbers start here: 0 is no inode, and 1 is what many expect of a root.
const FIRST_INO: u64 = 1;

/// The lower layer that an index describes. It points into the mapping of the
/// index, which lies at the same address in every boot.
pub struct IndexLower {
    index: KernelCell<Index<'static>>,
}

impl IndexLower {
    /// The index mapped at [`thaw_abi::layout::INDEX_BASE`], `len` bytes.
    pub fn mapped(len: u64) -> Result<Self> {
        Index::parse(lazy::index_bytes(len)?).map(Self::new).map_err(|_| Errno::EINVAL)
    }

    /// The lower layer of a parsed index.
    pub fn new(index: Index<'static>) -> Self {
        Self { index: KernelCell::new(index) }
    }

    fn index(&self) -> Index<'static> {
        self.index.get()
    }

    fn inode(&self, id: LowerId) -> Result<&'static IndexInode> {
        self.index().inode(id.0).ok_or(Errno::EIO)
    }
}

fn ino(number: u32) -> u64 {
    u64::from(number) + FIRST_INO
}

impl Lower for IndexLower {
    fn root(&self) -> LowerId {
        LowerId(ROOT_INODE)
    }

    fn attributes(&self, id: LowerId) -> Result<LowerAttributes> {
        let inode = self.inode(id)?;
        Ok(LowerAttributes {
            ino: ino(id.0),
            device: 0,
            mode: inode.mode,
            uid: inode.uid,
            gid: inode.gid,
            nlink: inode.nlink,
            rdev: inode.rdev.into(),
            size: inode.size,
            mtime: Timestamp { sec: inode.mtime_sec, nsec: inode.mtime_nsec },
        })
    }

    fn lookup(&self, directory: LowerId, name: &[u8]) -> Result<Option<LowerId>> {
        let directory = self.inode(directory)?;
        Ok(self.index().lookup(directory, name).map(|entry| LowerId(entry.inode)))
    }

    fn list(&self, directory: LowerId, emit: &mut dyn FnMut(&[u8], u64, FileType)) -> Result<()> {
        for entry in self.index().entries(self.inode(directory)?) {
            let kind = FileType::from_mode(u32::from(entry.file_type) << 12).ok_or(Errno::EIO)?;
            emit(self.index().name(entry), ino(entry.inode), kind);
        }
        Ok(())
    }

    fn read_link(&self, id: LowerId) -> Result<Vec<u8>> {
        Ok(self.index().link_target(self.inode(id)?).to_vec())
    }

    fn extended(&self, id: LowerId, emit: &mut dyn FnMut(&[u8], &[u8])) {
        let index = self.index();
        for attribute in index.extended(id.0) {
            emit(index.extended_name(attribute), index.extended_value(attribute));
        }
    }

    fn read(&self, id: LowerId, sink: &mut Sink<'_>, offset: u64, len: usize) -> Result<usize> {
        let inode = self.inode(id)?;
        let len = len.min(inode.size.saturating_sub(offset).try_into().unwrap_or(usize::MAX));
        if inode.a == NO_BLOB || len == 0 {
            return Ok(0);
        }
        host_file::read_blob(inode.a, sink, offset, len)
    }

    fn mmap_source(&self, id: LowerId) -> Result<MmapSource> {
        match self.inode(id)?.a {
            NO_BLOB => Ok(MmapSource::Zero),
            blob => Ok(MmapSource::Blob(blob)),
        }
    }

    fn rebase(&self, len: u64) -> Result<()> {
        let index = Index::parse(lazy::index_bytes(len)?).map_err(|_| Errno::EINVAL)?;
        self.index.set(index);
        Ok(())
    }
}
