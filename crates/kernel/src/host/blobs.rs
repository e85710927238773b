//! Host descriptors of blobs, opened on demand and kept until there are too many; and those of
//! the image's ancestors, which come with the boot command and stay.

use core::cell::Cell;
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use alloc::vec::Vec;
use thaw_abi::control::{MSG_OPEN_BLOB, OpenBlob};
use thaw_abi::image::{DEPTH_MAX, ancestor_depth};

use crate::errno::{Errno, Result};
use crate::platform::boot_area::{BLOBS, MAPPED_BLOBS};
use crate::platform::machine::{HostFd, HostFiles, Machine};

/// Most files of the lower layer that are open on the host. The sandbox may have
/// 4096 descriptors; its connections need some, too.
pub const OPEN_MAX: usize = 1024;
/// Number of blobs in the table.
static COUNT: AtomicU64 = AtomicU64::new(0);
/// Number of them that are open.
static OPEN: AtomicU64 = AtomicU64::new(0);
/// The image's ancestors by depth; 0: not there.
static ANCESTORS: [AtomicI32; DEPTH_MAX as usize] = [const { AtomicI32::new(0) }; _];

/// Makes room for the blobs of an index; `EINVAL` if they are too many.
pub fn initialize(count: u32) -> Result<()> {
    if count as usize > BLOBS.capacity() {
        return Err(Errno::EINVAL);
    }
    if count as usize > MAPPED_BLOBS {
        BLOBS.map(count as usize)?;
    }
    COUNT.store(count as u64, Ordering::Relaxed);
    OPEN.store(0, Ordering::Relaxed);
    Ok(())
}

fn slots() -> &'static [Cell<i32>] {
    BLOBS.cells(COUNT.load(Ordering::Relaxed) as usize)
}

fn slot(blob: u32) -> Result<&'static Cell<i32>> {
    slots().get(blob as usize).ok_or(Errno::EIO)
}

/// Notes a descriptor that came with the boot command: one of the image's ancestors, or of its
/// I/O cache.
pub fn remember(blob: u32, fd: HostFd) -> Result<()> {
    if let Some(depth) = ancestor_depth(blob) {
        ANCESTORS[depth as usize].store(fd.0, Ordering::Relaxed);
        return Ok(());
    }
    slot(blob)?.set(fd.0);
    OPEN.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// The descriptor of a blob, asking the broker the first time. It is valid until
/// another one is asked for.
///
/// # Errors
/// `EIO`: there is no such blob, or an ancestor did not come with the boot command.
pub fn descriptor(blob: u32) -> Result<HostFd> {
    if let Some(depth) = ancestor_depth(blob) {
        return match ANCESTORS[depth as usize].load(Ordering::Relaxed) {
            0 => Err(Errno::EIO),
            fd => Ok(HostFd::new(fd)),
        };
    }
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
        Machine::close(HostFd::new(fd));
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
    BLOBS.range(COUNT.load(Ordering::Relaxed) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;

    #[test]
    fn the_table_has_a_bound_and_tells_of_it_before_it_changes() {
        let sandbox = Sandbox::new();
        let capacity = BLOBS.capacity() as u32;
        for too_many in [capacity + 1, u32::MAX] {
            assert_eq!(initialize(too_many), Err(Errno::EINVAL));
            assert!(slots().is_empty());
        }
        // Those in front are there from the beginning, all others are mapped now.
        initialize(MAPPED_BLOBS as u32).unwrap();
        initialize(capacity).unwrap();
        remember(capacity - 1, HostFd::new(7)).unwrap();
        assert_eq!(slot(capacity - 1).unwrap().replace(0), 7);
        for beyond in [capacity, u32::MAX] {
            assert_eq!(remember(beyond, HostFd::new(7)), Err(Errno::EIO));
            assert_eq!(descriptor(beyond).err(), Some(Errno::EIO));
        }
        initialize(0).unwrap();
        drop(sandbox);
    }

    #[test]
    fn ancestors_stay_and_are_never_asked_for() {
        use thaw_abi::image::ancestor_number;
        let sandbox = Sandbox::new();
        let number = ancestor_number(DEPTH_MAX - 1);
        assert_eq!(descriptor(number).err(), Some(Errno::EIO));
        remember(number, HostFd::new(7)).unwrap();
        close_all();
        assert_eq!(descriptor(number).unwrap().0, 7);
        // The next image has ancestors of its own.
        assert!(open_blobs().is_empty());
        assert_eq!(remember(ancestor_number(DEPTH_MAX), HostFd::new(7)), Err(Errno::EIO));
        ANCESTORS[DEPTH_MAX as usize - 1].store(0, Ordering::Relaxed);
        drop(sandbox);
    }
}
