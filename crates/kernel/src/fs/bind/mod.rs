//! Directories of the host, mounted by `thaw run --bind`, and volumes.
//!
//! The host does everything: names, attributes and bytes travel as requests
//! ([`thaw_abi::bind`]), and nothing is remembered here but which file is meant,
//! so that the guest sees what others change: what the host has said is used again within one
//! system call only. Host descriptors are involved for files of volumes ([`volume`]), and for reading
//! files that are open for nothing else.

mod ahead;
mod file;
mod lengths;
mod node;
mod renewal;
mod volume;

use alloc::collections::BTreeMap;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;

use bytemuck::Zeroable;
use thaw_abi::bind::{
    BIND_FSTAT, BIND_LIST, BIND_READ, BIND_READLINK, BIND_STAT, BIND_STATFS, BIND_WALK,
    BindRequest, BindStatfs, VOLUME_RENEW,
};
use thaw_abi::control::{FileAttributes, MessageHeader};

use ahead::Ahead;
pub use file::BoundFile;
pub use node::BoundNode;
pub use renewal::Volumes;
pub use volume::VolumeFile;

use super::inode::{FilesystemId, Inode, Statfs};
use crate::errno::{Errno, Result};
use crate::host::control::REQUEST_MAX;
use crate::host::{files_socket, volume_socket};
use crate::platform::machine::{HostFd, HostFiles, Machine};
use crate::state;
use crate::sync::KernelCell;
use crate::task::host_process;
use volume::VolumePages;

/// A mounted directory of the host.
pub struct Bind {
    /// The host's number for it.
    mount: u32,
    id: FilesystemId,
    kind: Kind,
    /// Bytes of files of a volume that have been opened, by inode number, as the host has said
    /// last: nothing but the host makes them longer.
    sizes: KernelCell<BTreeMap<u64, u64>>,
    /// Requests that may have changed something.
    changes: KernelCell<u64>,
    /// Files of a volume that are open, some of them no more.
    open: KernelCell<Vec<Weak<VolumePages>>>,
    /// What the host has said of a path that is being looked up.
    ahead: KernelCell<Ahead>,
}

/// When the host has said something: as long as it is the same, the system call that is handled has
/// changed nothing since, and had begun before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Moment {
    /// The boot. What follows is counted from 0 in each.
    generation: u64,
    /// See [`host_process::requests_begun`].
    requests: u64,
    /// See [`Bind::changes`].
    changes: u64,
}

/// What is mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A directory of the host.
    Directory,
    /// A volume, whose files are the program's own user's.
    Volume {
        /// That user.
        uid: u32,
        /// The user's group.
        gid: u32,
    },
}

/// Most bytes behind a request: two paths may be longer than a packet.
const TAIL_MAX: usize = REQUEST_MAX - size_of::<MessageHeader>() - size_of::<BindRequest>();
/// Requests that change nothing.
const LOOKS: [u32; 7] =
    [BIND_STAT, BIND_FSTAT, BIND_LIST, BIND_READLINK, BIND_STATFS, BIND_READ, BIND_WALK];

/// Most files whose size is remembered. Without it, the host is asked.
const SIZES_MAX: usize = 4096;

impl Bind {
    /// The root directory of mount number `mount`.
    pub fn root(mount: u32, id: FilesystemId, kind: Kind) -> Result<Arc<dyn Inode>> {
        let bind = Arc::new(Bind {
            mount,
            id,
            kind,
            sizes: KernelCell::default(),
            changes: KernelCell::new(0),
            open: KernelCell::default(),
            ahead: KernelCell::default(),
        });
        if bind.is_volume() {
            state::kernel().volumes.add(&bind);
        }
        let attributes = bind.stat(b"")?;
        Ok(BoundNode::new(bind, None, b"", attributes))
    }

    /// Asks the host; the tail of its answer.
    fn ask(&self, operation: u32, arguments: [u64; 3], tail: &[u8]) -> Result<Vec<u8>> {
        let (fd, reply) = self.request(operation, arguments, tail)?;
        // The host gives none here.
        fd.into_iter().for_each(Machine::close);
        Ok(reply)
    }

    /// As [`Bind::ask`], for an answer that has a descriptor.
    fn ask_for_file(
        &self,
        operation: u32,
        arguments: [u64; 3],
        tail: &[u8],
    ) -> Result<(HostFd, Vec<u8>)> {
        let (fd, reply) = self.request(operation, arguments, tail)?;
        Ok((fd.ok_or(Errno::EIO)?, reply))
    }

    fn request(
        &self,
        operation: u32,
        arguments: [u64; 3],
        tail: &[u8],
    ) -> Result<(Option<HostFd>, Vec<u8>)> {
        if !LOOKS.contains(&operation) {
            *self.changes.borrow_mut() += 1;
        }
        if tail.len() > TAIL_MAX {
            return Err(Errno::ENAMETOOLONG);
        }
        let [a, b, c] = arguments;
        let request = BindRequest { mount: self.mount, operation, a, b, c };
        let mut reply = Vec::new();
        let fd = match self.is_volume() {
            true => self.request_of_volume(&request, tail, &mut reply)?,
            false => files_socket::request_of_bound(&request, tail, &mut reply)?,
        };
        Ok((fd, reply))
    }

    /// Asks about a volume; another host that serves meanwhile is asked once more. `ENOTCONN`: it does
    /// not know the open file that the request names.
    fn request_of_volume(
        &self,
        request: &BindRequest,
        tail: &[u8],
        reply: &mut Vec<u8>,
    ) -> Result<Option<HostFd>> {
        for _ in 0..renewal::HOSTS_MAX {
            let is_repeatable = renewal::is_repeatable(request);
            let asked = volume_socket::request(request, tail, is_repeatable, reply);
            let is_unknown = matches!(asked.answer, Err(Errno::ENOTCONN));
            if !is_unknown || request.operation == VOLUME_RENEW {
                return asked.answer;
            }
            let is_renewed = state::kernel().volumes.renew();
            if !is_renewed || asked.may_be_served && !is_repeatable {
                return Err(Errno::EIO);
            }
            if renewal::names_open_file(request.operation) {
                return Err(Errno::ENOTCONN);
            }
        }
        Err(Errno::EIO)
    }

    /// The files of a volume that are open.
    fn open_files(&self) -> Vec<Arc<VolumePages>> {
        self.open.borrow_mut().iter().filter_map(Weak::upgrade).collect()
    }

    fn add_open(&self, file: &Arc<VolumePages>) {
        let mut open = self.open.borrow_mut();
        open.retain(|file| file.strong_count() > 0);
        open.push(Arc::downgrade(file));
    }

    /// This moment.
    fn moment(&self) -> Moment {
        Moment {
            generation: state::generation(),
            requests: host_process::requests_begun(),
            changes: self.changes.get(),
        }
    }

    fn is_volume(&self) -> bool {
        self.kind != Kind::Directory
    }

    /// Bytes of an open file of a volume, as they are known here; 0: unknown.
    fn size(&self, inode: u64) -> u64 {
        self.sizes.borrow_mut().get(&inode).copied().unwrap_or_default()
    }

    fn set_size(&self, inode: u64, size: u64) {
        let mut sizes = self.sizes.borrow_mut();
        if sizes.len() >= SIZES_MAX && !sizes.contains_key(&inode) {
            sizes.clear();
        }
        sizes.insert(inode, size);
    }

    /// As [`Bind::ask`], for an answer that is a number.
    fn ask_number(&self, operation: u32, arguments: [u64; 3], tail: &[u8]) -> Result<u64> {
        number(self.ask(operation, arguments, tail)?)
    }

    fn stat(&self, path: &[u8]) -> Result<FileAttributes> {
        let mut found = parse(&self.ask(BIND_STAT, [0; 3], path)?)?;
        self.give_owner(&mut found);
        Ok(found)
    }

    fn give_owner(&self, found: &mut FileAttributes) {
        if let Kind::Volume { uid, gid } = self.kind {
            (found.uid, found.gid) = (uid, gid);
        }
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

fn number(reply: Vec<u8>) -> Result<u64> {
    Ok(u64::from_ne_bytes(reply.try_into().map_err(|_| Errno::EIO)?))
}

fn parse(reply: &[u8]) -> Result<FileAttributes> {
    let bytes = reply.get(..size_of::<FileAttributes>()).ok_or(Errno::EIO)?;
    Ok(bytemuck::pod_read_unaligned(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;

    /// Counts of requests begin at 0 in each boot, and what is known of a file is saved.
    #[test]
    fn a_moment_ends_with_a_request_with_a_change_and_with_the_boot() {
        let _sandbox = Sandbox::new();
        let bind = Bind {
            mount: 0,
            id: FilesystemId(7),
            kind: Kind::Directory,
            sizes: KernelCell::default(),
            changes: KernelCell::new(0),
            open: KernelCell::default(),
            ahead: KernelCell::default(),
        };
        let first = bind.moment();
        assert_eq!(bind.moment(), first);
        *bind.changes.borrow_mut() += 1;
        let second = bind.moment();
        assert_ne!(second, first);
        *state::kernel().generation.borrow_mut() += 1;
        let third = bind.moment();
        assert_ne!(third, second);
        host_process::count_request();
        assert_ne!(bind.moment(), third);
    }
}
