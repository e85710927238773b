//! Host descriptors of blobs, opened on demand and kept until there are too many.
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicU64, Ordering};

use alloc::vec::Vec;
use thaw_abi::control::{MSG_OPEN_BLOB, OpenBlob};
use thaw_abi::layout::BOOT_BASE;

use crate::errno::{Errno, Result};
use crate::platform::host::{self, HostFd};
use crate::platform::memory::KernelRange;
use crate::platform::vcpu::FIRST_SIZE;

/// The table: one `i32` for each blob of the index; 0 means not open.
pub const TABLE: u64 = BOOT_BASE + 0x40_0000;
/// Most files of the lower layer that are open on the host. The sandbox may have
/// 4096 descriptors; its connections need some, too.
pub const OPEN_MAX: usize = 1024;
/// Blobs for which the zygote has mapped the table already.
const MAPPED: u64 = (FIRST_SIZE - 0x40_0000) / 4;

/// Number of blobs in the table.
static COUNT: AtomicU64 = AtomicU64::new(0);
/// Number of them that are open.
static OPEN: AtomicU64 = AtomicU64::new(0);

/// Makes room for the blobs of an index.
pub fn initialize(count: u32) -> Result<()> {
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

fn slot(blob: u32) -> Result<*mut i32> {
    if blob as u64 >= COUNT.load(Ordering::Relaxed) {
        return Err(Errno::EIO);
    }
    Ok((TABLE as *mut i32).wrapping_add(blob as usize))
}

/// Notes a descriptor that came with the boot command: the image's I/O cache.
pub fn remember(blob: u32, fd: HostFd) -> Result<()> {
    let slot = slot(blob)?;
    // SAFETY: inside the table.
    unsafe { slot.write(fd.0) };
    OPEN.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// The descriptor of a blob, asking the broker the first time. It is valid until
/// another one is asked for.
pub fn descriptor(blob: u32) -> Result<HostFd> {
    let slot = slot(blob)?;
    // SAFETY: inside the table.
    let known = unsafe { slot.read() };
    if known != 0 {
        return Ok(HostFd(known));
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
    for slot in (0..COUNT.load(Ordering::Relaxed) as u32).filter_map(|blob| slot(blob).ok()) {
        // SAFETY: inside the table.
        let fd = unsafe { slot.replace(0) };
        if fd != 0 {
            host::close(HostFd(fd));
        }
    }
    OPEN.store(0, Ordering::Relaxed);
}

/// The blobs that are open: what the next boot's I/O cache should hold.
pub fn open_blobs() -> Vec<u32> {
    let count = COUNT.load(Ordering::Relaxed) as u32;
    (0..count)
        .filter(|&blob| {
            // SAFETY: inside the table.
            slot(blob).is_ok_and(|slot| unsafe { slot.read() } != 0)
        })
        .collect()
}

/// The table: address and bytes, whole pages.
pub fn table_range() -> (u64, u64) {
    (TABLE, (COUNT.load(Ordering::Relaxed) * 4).next_multiple_of(4096))
}
