//! Directories of the host, mounted by `thaw run --bind`.
//!
//! The host does everything: names, attributes and bytes travel as requests
//! ([`thaw_abi::bind`]), and nothing is remembered here but which file is meant,
//! so that the guest sees what others change. No host descriptor is involved.

mod file;
mod node;

use alloc::sync::Arc;
use alloc::vec::Vec;

use bytemuck::Zeroable;
use thaw_abi::bind::{BIND_STAT, BIND_STATFS, BindRequest, BindStatfs};
use thaw_abi::control::{FileAttributes, MSG_BIND};

pub use file::BoundFile;
pub use node::BoundNode;

use super::inode::{FilesystemId, Inode, Statfs};
use crate::errno::{Errno, Result};
use crate::host::broker;

/// A mounted directory of the host.
pub struct Bind {
    /// The host's number for it.
    mount: u32,
    id: FilesystemId,
}

impl Bind {
    /// The root directory of mount number `mount`.
    pub fn root(mount: u32, id: FilesystemId) -> Result<Arc<dyn Inode>> {
        let bind = Arc::new(Bind { mount, id });
        let attributes = bind.stat(b"")?;
        Ok(BoundNode::new(bind, None, b"", attributes))
    }

    /// Asks the host; the tail of its answer.
    fn ask(&self, operation: u32, arguments: [u64; 3], tail: &[u8]) -> Result<Vec<u8>> {
        let [a, b, c] = arguments;
        let request = BindRequest { mount: self.mount, operation, a, b, c };
        let mut reply = Vec::new();
        broker::request(MSG_BIND, bytemuck::bytes_of(&request), tail, &mut reply)?;
        Ok(reply)
    }

    /// As [`Bind::ask`], for an answer that is a number.
    fn ask_number(&self, operation: u32, arguments: [u64; 3], tail: &[u8]) -> Result<u64> {
        let reply = self.ask(operation, arguments, tail)?;
        Ok(u64::from_ne_bytes(reply.try_into().map_err(|_| Errno::EIO)?))
    }

    fn stat(&self, path: &[u8]) -> Result<FileAttributes> {
        parse(&self.ask(BIND_STAT, [0; 3], path)?)
    }

    fn statfs(&self, path: &[u8]) -> Statfs {
        let reply = self.ask(BIND_STATFS, [0; 3], path).unwrap_or_default();
        let found = match reply.get(..size_of::<BindStatfs>()) {
            Some(bytes) => bytemuck::pod_read_unaligned(bytes),
            None => BindStatfs::zeroed(),
        };
        /// `EXT4_SUPER_MAGIC` (statfs(2)): an ordinary file system.
        const KIND: i64 = 0xef53;
        Statfs {
            kind: KIND,
            bsize: found.block_size as i64,
            frsize: found.block_size as i64,
            blocks: found.blocks,
            bfree: found.free,
            bavail: found.free,
            files: found.files,
            ffree: found.free_files,
            namelen: 255,
            flags: 0x20, // ST_VALID
            ..Statfs::default()
        }
    }
}

fn parse(reply: &[u8]) -> Result<FileAttributes> {
    let bytes = reply.get(..size_of::<FileAttributes>()).ok_or(Errno::EIO)?;
    Ok(bytemuck::pod_read_unaligned(bytes))
}
