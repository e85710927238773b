//! Host descriptors of files of a host directory, asked for by path and kept until there
//! are too many.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use thaw_abi::control::MSG_FS_OPEN;

use super::blobs::OPEN_MAX;
use super::files_socket;
use crate::errno::{Errno, Result};
use crate::platform::machine::{HostFd, HostFiles, Machine};
use crate::state::{OfBoot, kernel};
use crate::sync::KernelCell;

/// Host descriptors by path, of each boot its own. Those of an earlier boot are dropped without
/// closing: the numbers mean nothing any more.
#[derive(Default)]
pub struct Descriptors {
    by_path: KernelCell<Option<OfBoot<ByPath>>>,
    /// How many there are of open files of bound directories.
    bound: KernelCell<Option<OfBoot<usize>>>,
}

/// Most descriptors of open files of bound directories. Those of further files are not kept: reading
/// them is a request.
const BOUND_MAX: usize = 256;

/// A descriptor of an open file of a bound directory.
pub struct BoundDescriptor(OfBoot<HostFd>);

impl BoundDescriptor {
    /// Keeps one that the host has given; `None`, and it is closed: there are too many.
    pub fn keep(descriptor: HostFd) -> Option<Self> {
        let mut bound = kernel().host_files.bound.borrow_mut();
        let count = OfBoot::of_this(&mut bound);
        if *count >= BOUND_MAX {
            Machine::close(descriptor);
            return None;
        }
        *count += 1;
        Some(Self(OfBoot::new(descriptor)))
    }

    /// It, in the boot that it was given in.
    pub fn get(&self) -> Option<HostFd> {
        self.0.get().copied()
    }
}

impl Drop for BoundDescriptor {
    fn drop(&mut self) {
        if let Some(descriptor) = self.get() {
            Machine::close(descriptor);
            *OfBoot::of_this(&mut kernel().host_files.bound.borrow_mut()) -= 1;
        }
    }
}

type ByPath = BTreeMap<Arc<[u8]>, HostFd>;

/// A host descriptor for a regular file of the host directory, for reading and
/// mapping. It is valid until another one is asked for.
pub fn descriptor(path: &Arc<[u8]>) -> Result<HostFd> {
    let cache = &kernel().host_files.by_path;
    {
        let mut cache = cache.borrow_mut();
        let by_path = OfBoot::of_this(&mut cache);
        if let Some(fd) = by_path.get(path) {
            return Ok(*fd);
        }
        if by_path.len() >= OPEN_MAX {
            // Those that are needed again are asked for again.
            core::mem::take(by_path).into_values().for_each(Machine::close);
        }
    }
    let mut reply = Vec::new();
    let fd = files_socket::request(MSG_FS_OPEN, &[], path, &mut reply)?.ok_or(Errno::EIO)?;
    OfBoot::of_this(&mut cache.borrow_mut()).insert(path.clone(), fd);
    Ok(fd)
}
