//! Host descriptors of blobs, opened on demand and kept until there are too many.
#![allow(unsafe_code)]

use core::cell::Cell;
use core::sync::atomic::{AtomicU64, Ordering};

use alloc::vec::Vec;
use thaw_abi::control::{MSG_OPEN_BLOB, OpenBlob};
use thaw_abi::layout::BOOT_BASE;

use crate::errno::{Errno, Result};
use crate::platform::host::{self, HostFd};
use crate::platform::memory::{KernelRange, Table};
use crate::platform::vcpu::{FIRST_SIZE, OTHER_VCPUS};

/// The table: one `i32` for each blob of the index; 0 means not open.
pub const TABLE: u64 = BOOT_BASE + 0x40_0000;
/// Most files of the lower layer that are open on the host. The sandbox may have
/// 4096 descriptors; its connections need some, too.
pub const OPEN_MAX: usize = 1024;
/// Blobs for which the zygote has mapped the table already.
const MAPPED: u64 = (FIRST_SIZE - 0x40_0000) / 4;

/// Blobs that the table has room for, below the areas of the vCPUs.
const CAPACITY: usize = ((OTHER_VCPUS - TABLE) / 4) as usize;

// SAFETY: this part of the per-boot area is the table's alone, and `initialize` maps what
// the zygote has not.
static DESCRIPTORS: Table<i32> = unsafe { Table::new(TABLE, CAPACITY) };

/// Number of blobs in the table.
static COUNT: AtomicU64 = AtomicU64::new(0);
/// Number of them that are open.
static OPEN: AtomicU64 = AtomicU64::new(0);

/// Makes room for the blobs of an index; `EINVAL` if they are too many.
pub fn initialize(count: u32) -> Result<()> {
    if count as usize > CAPACITY {
        return Err(Errno::EINVAL);
    }
    if count as u64 > MAPPED {
        let len = (count as u64 * 4).next_multiple_of(4096);
        // SAFETY: the table's own, which nobody refers to beyond a call of this module.
        let table = unsafe { KernelRange::new(TABLE, len) };
        host::map_anonymous(table, host::PROT_READ | host::PROT_WRITE)?;
    }
    COUNT.store(count as u64, Ordering::Relaxed);
    OPEN.store(0, Ordering::Relaxed);
    Ok(())
}

fn slots() -> &'static [Cell<i32>] {
    DESCRIPTORS.cells(COUNT.load(Ordering::Relaxed) as usize)
}

fn slot(blob: u32) -> Result<&'static Cell<i32>> {
    slots().get(blob as usize).ok_or(Errno::EIO)
}

/// Notes a descriptor that came with the boot command: the image's I/O cache.
pub fn remember(blob: u32, fd: HostFd) -> Result<()> {
    slot(blob)?.set(fd.0);
    OPEN.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// The descriptor of a blob, asking the broker the first time. It is valid until
/// another one is asked for.
pub fn descriptor(blob: u32) -> Result<HostFd> {
    let known = slot(blob)?.get();
    if known != 0 {
        return Ok(HostFd::new(known));
    }
    if OPEN.load(Ordering::Relaxed) >= OPEN_MAX as u64 {
        close_all();
    }
    let mut reply = Vec::new();
    let body = OpenBlob { blob, reserved: 0 };
    let fd = super::broker::request(MSG_OPEN_BLOB, bytemuck::bytes_of(&body), &[], &mut reply)?
        .ok_or(Errno::EIO)?;
    remember(blob, fd)?;
    Ok(fd)
}

/// Makes room: those that are needed again are asked for again.
fn close_all() {
    for fd in slots().iter().map(|slot| slot.replace(0)).filter(|&fd| fd != 0) {
        host::close(HostFd::new(fd));
    }
    OPEN.store(0, Ordering::Relaxed);
}

/// The blobs that are open: what the next boot's I/O cache should hold.
pub fn open_blobs() -> Vec<u32> {
    let open = slots().iter().enumerate().filter(|(_, slot)| slot.get() != 0);
    open.map(|(blob, _)| blob as u32).collect()
}

/// The table: address and bytes, whole pages.
pub fn table_range() -> (u64, u64) {
    (TABLE, (COUNT.load(Ordering::Relaxed) * 4).next_multiple_of(4096))
}
