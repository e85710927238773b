//! Host descriptors of files of a host directory, asked for by path and kept until there
//! are too many.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;

use thaw_abi::control::MSG_FS_OPEN;

use super::blobs::OPEN_MAX;
use super::broker;
use crate::errno::{Errno, Result};
use crate::platform::machine::{HostFd, HostFiles, Machine};
use crate::state;
use crate::sync::KernelCell;

/// Host descriptors by path. Rebuilt in every boot.
static DESCRIPTORS: KernelCell<Descriptors> =
    KernelCell::new(Descriptors { generation: 0, by_path: BTreeMap::new() });

struct Descriptors {
    generation: u64,
    by_path: BTreeMap<Arc<[u8]>, HostFd>,
}

/// A host descriptor for a regular file of the host directory, for reading and
/// mapping. It is valid until another one is asked for.
pub fn descriptor(path: &Arc<[u8]>) -> Result<HostFd> {
    let generation = state::generation();
    {
        let mut cache = DESCRIPTORS.borrow_mut();
        if cache.generation != generation {
            // Dropped without closing: the numbers mean nothing in this boot.
            cache.by_path.clear();
            cache.generation = generation;
        }
        if let Some(fd) = cache.by_path.get(path) {
            return Ok(*fd);
        }
        if cache.by_path.len() >= OPEN_MAX {
            // Those that are needed again are asked for again.
            core::mem::take(&mut cache.by_path).into_values().for_each(Machine::close);
        }
    }
    let mut reply = Vec::new();
    let fd = broker::request(MSG_FS_OPEN, &[], path, &mut reply)?.ok_or(Errno::EIO)?;
    DESCRIPTORS.borrow_mut().by_path.insert(path.clone(), fd);
    Ok(fd)
}
