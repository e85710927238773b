//! What lies where in the per-boot area, which every host process of the sandbox has for
//! itself and no image holds:
//!
//! ```text
//! 0x0000_0000  first vCPU: block, the process' block in the same page, stacks
//! 0x0009_0000  page of [`crate::machine::Memory::barrier`]
//! 0x000a_0000  words of [`crate::kernel_lock`]
//! 0x000b_0000  descriptors that a hibernated sandbox waits for
//! 0x000c_0000  parts of files of volumes that are mapped
//! 0x000e_0000  secrets
//! 0x0010_0000  buffers of [`crate::message`]
//! 0x0030_0000  tables
//! 0x1000_0000  the other vCPUs
//! 0x2000_0000  the kernel's table of host processes
//! ```
//!
//! The first [`FIRST_SIZE`] bytes are mapped from the beginning.
#![allow(unsafe_code)]

use core::cell::Cell;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use thaw_abi::bind::{EndsPage, LengthsPage};
use thaw_abi::image::Mapping;
use thaw_abi::layout::{BOOT_BASE, ENDS_BASE, LENGTHS_BASE, LENGTHS_MOUNTS};

use crate::io::IoVec;
use crate::machine::PollFd;
use crate::memory::Table;

/// Bytes of the area that are mapped from the beginning.
pub const FIRST_SIZE: u64 = 8 << 20;
const OF_PROCESS_AT: u64 = BOOT_BASE + 0x800;
const AWAITED_AT: u64 = BOOT_BASE + 0xb_0000;
const VOLUME_PARTS_AT: u64 = BOOT_BASE + 0xc_0000;
const SECRETS_AT: u64 = BOOT_BASE + 0xe_0000;
const MAPPINGS_AT: u64 = BOOT_BASE + 0x30_0000;
const RANGES_AT: u64 = BOOT_BASE + 0x38_0000;
const BLOBS_AT: u64 = BOOT_BASE + 0x40_0000;
/// Where the areas of the vCPUs other than the first begin.
pub(crate) const OTHER_VCPUS: u64 = BOOT_BASE + 0x1000_0000;

/// What all vCPUs of a host process have in common, behind the block of its first.
pub struct OfProcess {
    /// When the alarm goes off that the kernel has set; 0 if it is not set, or has gone off and
    /// was taken.
    pub alarm_at: AtomicU64,
    /// Bit n: vCPU n is there.
    pub(crate) vcpus: AtomicU64,
    /// Bit n: vCPU n is there no more. Its host thread uses the stack until the host has
    /// ended it, which nobody sees.
    pub(crate) ended: AtomicU64,
    /// Number of the twin, 0 if there is none, or [`TWIN_TO_BE`].
    pub(crate) twin: AtomicU32,
    /// There is a [`crate::memory::Window`].
    pub(crate) window_is_used: AtomicBool,
    /// Bit n: buffer n of [`crate::message`] is in use.
    pub(crate) messages_used: AtomicU32,
    /// Mappings in [`MAPPINGS`].
    pub planned: AtomicU64,
    /// How many of them are still to be made.
    pub pending: AtomicU64,
    /// Faults make single pages of them.
    pub maps_by_page: AtomicBool,
    /// Bit n: number n of [`LENGTHS`] and [`ENDS`] is mapped.
    pub lengths: AtomicU64,
    /// The host that has given these, by a number of the kernel's.
    pub lengths_of: AtomicU64,
}

/// A twin is being forked, whose number nobody knows yet.
pub(crate) const TWIN_TO_BE: u32 = u32::MAX;

/// That of the calling host process.
pub fn of_process() -> &'static OfProcess {
    // SAFETY: in the first page of the per-boot area, which is mapped from the beginning,
    // zero, and holds nothing else there.
    unsafe { &*(OF_PROCESS_AT as *const OfProcess) }
}

/// Where the kernel's table of host processes lies, and its most bytes.
pub const HOST_PROCESSES: (u64, u64) = (BOOT_BASE + 0x2000_0000, 1 << 28);

const fn room<T>(start: u64, end: u64) -> usize {
    (end - start) as usize / size_of::<T>()
}

/// Descriptors whose news wake a sandbox that has given up all other memory.
// SAFETY: this part of the area is the table's alone, and mapped from the beginning.
pub static AWAITED: Table<Cell<PollFd>> =
    unsafe { Table::new(AWAITED_AT, room::<PollFd>(AWAITED_AT, BOOT_BASE + 0xc_0000)) };

/// Parts of files of volumes that this host process has mapped ([`MappedPart`]).
// SAFETY: this part of the area is the table's alone, and mapped from the beginning.
pub static VOLUME_PARTS: Table<Cell<MappedPart>> =
    unsafe { Table::new(VOLUME_PARTS_AT, room::<MappedPart>(VOLUME_PARTS_AT, SECRETS_AT)) };

/// What lies in one of [`thaw_abi::layout::VOLUME_PARTS`] places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Zeroable)]
#[repr(C)]
pub struct MappedPart {
    /// Number of the open file, from 1 on; 0: nothing is mapped.
    pub file: u64,
    /// Number of the part in the file.
    pub part: u64,
    /// When it was used last, by a clock that counts uses.
    pub used: u64,
    /// Pages behind the end of the file that were made before they are written to.
    pub ahead: PagesAhead,
}

/// What is known of writes that make a file longer one after the other, in bytes of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Zeroable)]
#[repr(C)]
pub struct PagesAhead {
    /// Where the first of them began.
    pub from: u64,
    /// Up to where their pages were made.
    pub to: u64,
}

/// How long files of volumes are, as the host says, by number of the mount. Mapped if
/// [`OfProcess::lengths`] says so.
// SAFETY: the area is the table's alone. Its values are made of atomics, and each is mapped before it
// is used.
pub static LENGTHS: Table<LengthsPage> = unsafe { Table::new(LENGTHS_BASE, LENGTHS_MOUNTS) };

/// The same, as this sandbox says.
// SAFETY: as above.
pub static ENDS: Table<EndsPage> = unsafe { Table::new(ENDS_BASE, LENGTHS_MOUNTS) };

/// The secrets of this boot, as the host has said them, behind their length.
// SAFETY: this part of the area is the table's alone, and mapped from the beginning.
pub static SECRETS: Table<Cell<u8>> =
    unsafe { Table::new(SECRETS_AT, room::<u8>(SECRETS_AT, BOOT_BASE + 0x10_0000)) };

/// Mappings that a thaw has left out.
// SAFETY: this part of the area is the table's alone, and mapped from the beginning.
pub static MAPPINGS: Table<Cell<Mapping>> =
    unsafe { Table::new(MAPPINGS_AT, room::<Mapping>(MAPPINGS_AT, RANGES_AT)) };

/// Ranges of the guest that are to be populated.
// SAFETY: as above.
pub static RANGES: Table<Cell<IoVec>> =
    unsafe { Table::new(RANGES_AT, room::<IoVec>(RANGES_AT, BLOBS_AT)) };

/// Host descriptors of blobs, by number. [`MAPPED_BLOBS`] of them are mapped from the
/// beginning; [`Table::map`] maps more.
// SAFETY: this part of the area is the table's alone.
pub static BLOBS: Table<Cell<i32>> =
    unsafe { Table::new(BLOBS_AT, room::<i32>(BLOBS_AT, OTHER_VCPUS)) };

/// Blobs whose place in [`BLOBS`] is mapped from the beginning.
pub const MAPPED_BLOBS: usize = room::<i32>(BLOBS_AT, BOOT_BASE + FIRST_SIZE);

const _: () = assert!(crate::message::END <= MAPPINGS_AT);
const _: () = assert!(BLOBS_AT < BOOT_BASE + FIRST_SIZE);
