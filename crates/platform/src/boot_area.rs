//! What lies where in the per-boot area, which every host process of the sandbox has for
//! itself and no image holds:
//!
//! ```text
//! 0x0000_0000  first vCPU: block, the process' block in the same page, stacks
//! 0x0009_0000  page of [`crate::vcpu::barrier`]
//! 0x000a_0000  words of [`crate::kernel_lock`]
//! 0x0010_0000  buffers of [`crate::message`]
//! 0x0030_0000  tables
//! 0x1000_0000  the other vCPUs
//! ```
//!
//! The first [`crate::vcpu::FIRST_SIZE`] bytes are mapped from the beginning.
#![allow(unsafe_code)]

use thaw_abi::image::Mapping;
use thaw_abi::layout::BOOT_BASE;

use crate::io::IoVec;
use crate::memory::Table;

const MAPPINGS_AT: u64 = BOOT_BASE + 0x30_0000;
const RANGES_AT: u64 = BOOT_BASE + 0x38_0000;
const BLOBS_AT: u64 = BOOT_BASE + 0x40_0000;
/// Where the areas of the vCPUs other than the first begin.
pub(crate) const OTHER_VCPUS: u64 = BOOT_BASE + 0x1000_0000;

const fn room<T>(start: u64, end: u64) -> usize {
    (end - start) as usize / size_of::<T>()
}

/// Mappings that a thaw has left out.
// SAFETY: this part of the area is the table's alone, and mapped from the beginning.
pub static MAPPINGS: Table<Mapping> =
    unsafe { Table::new(MAPPINGS_AT, room::<Mapping>(MAPPINGS_AT, RANGES_AT)) };

/// Ranges of the guest that are to be populated.
// SAFETY: as above.
pub static RANGES: Table<IoVec> =
    unsafe { Table::new(RANGES_AT, room::<IoVec>(RANGES_AT, BLOBS_AT)) };

/// Host descriptors of blobs, by number. [`MAPPED_BLOBS`] of them are mapped from the
/// beginning; [`Table::map`] maps more.
// SAFETY: this part of the area is the table's alone.
pub static BLOBS: Table<i32> = unsafe { Table::new(BLOBS_AT, room::<i32>(BLOBS_AT, OTHER_VCPUS)) };

/// Blobs whose place in [`BLOBS`] is mapped from the beginning.
pub const MAPPED_BLOBS: usize = room::<i32>(BLOBS_AT, BOOT_BASE + crate::vcpu::FIRST_SIZE);

const _: () = assert!(crate::message::END <= MAPPINGS_AT);
const _: () = assert!(BLOBS_AT < BOOT_BASE + crate::vcpu::FIRST_SIZE);
