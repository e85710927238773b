//! The freeze report: how the kernel tells the host what to save.
//!
//! When the sandbox has come to rest at its entry point, the kernel builds a
//! report in its heap and sends its address ([`crate::control::EntryPoint`]).
//! The host reads the report and then the memory of the sandbox from outside,
//! through `/proc/PID/mem`, and treats every number in it as hostile.
//!
//! ```text
//! ReportHeader
//! u32          × space_count     host process of each address space
//! u32          × space_count     number of that address space in the image that the sandbox
//!                                is a copy of, or NO_ORIGIN
//! FrozenRegion × region_count    of each address space together, sorted by
//!                                address, not overlapping
//! FrozenThread × thread_count
//! u32          × blob_count      blobs in use: the image's I/O cache
//! (padding to 8 bytes)
//! auxv bytes                     as in /proc/PID/auxv, of the first process
//! strings                        paths of mapped files
//! ```

use bytemuck::{Pod, Zeroable};

/// First bytes of a freeze report.
pub const REPORT_MAGIC: [u8; 8] = *b"THAWFRZ\0";
/// Largest report that the host accepts, in bytes.
pub const REPORT_MAX: u64 = 64 << 20;

/// Start of a freeze report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ReportHeader {
    /// [`REPORT_MAGIC`].
    pub magic: [u8; 8],
    /// Number of memory regions.
    pub region_count: u32,
    /// Number of guest threads.
    pub thread_count: u32,
    /// Number of blobs in use.
    pub blob_count: u32,
    /// Bytes of the auxiliary vector.
    pub auxv_len: u32,
    /// Bytes of strings.
    pub strings_len: u32,
    /// Process id of the first process, as the guest sees it.
    pub pid: u32,
    /// Number of address spaces: 1 unless the guest has forked.
    pub space_count: u32,
    /// Zero.
    pub reserved: u32,
}

/// The region belongs to the kernel (heap, pages, gate), not to the guest.
pub const REGION_KERNEL: u32 = 1 << 0;
/// The guest mapped the region `MAP_SHARED`.
pub const REGION_SHARED: u32 = 1 << 1;
/// `MADV_WIPEONFORK`: the content must read as zeros in every copy.
pub const REGION_WIPE: u32 = 1 << 2;
/// Pages that are not present may still have content, because the region was
/// itself mapped from an image; the host must read all of it.
pub const REGION_FROM_IMAGE: u32 = 1 << 3;
/// The region is the main thread's stack.
pub const REGION_STACK: u32 = 1 << 4;

/// The region lies where the image that the sandbox is a copy of was mapped: a page that was
/// not written has the content that the image gives that address, and zeros where it maps
/// nothing.
pub const REGION_IN_PLACE: u32 = 1 << 5;

/// An address space was not in the image: nothing of it is [`REGION_IN_PLACE`].
pub const NO_ORIGIN: u32 = u32::MAX;

/// A range of the address space that the sandbox has mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FrozenRegion {
    /// First byte, page aligned.
    pub start: u64,
    /// Bytes, a multiple of the page size.
    pub len: u64,
    /// Offset in the blob of the first byte; meaningless without a blob.
    pub blob_offset: u64,
    /// The blob that the region maps, or [`crate::rootfs::NO_BLOB`].
    pub blob: u32,
    /// Protection, `PROT_*` of mmap(2).
    pub prot: u32,
    /// `REGION_*`.
    pub flags: u32,
    /// Offset of the mapped file's path in the strings.
    pub path_offset: u32,
    /// Bytes of the path; 0 for anonymous memory.
    pub path_len: u32,
    /// Number of the address space; memory that all share belongs to number 0.
    pub space: u32,
}

/// A guest thread at rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FrozenThread {
    /// Thread id, as the guest sees it.
    pub tid: u32,
    /// Zero.
    pub reserved: u32,
    /// General registers in the order of `struct user_regs_struct`
    /// (`sys/user.h`), as a debugger expects them in `NT_PRSTATUS`.
    pub registers: [u64; 27],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_tripwire() {
        assert_eq!(size_of::<ReportHeader>(), 40);
        assert_eq!(size_of::<FrozenRegion>(), 48);
        assert_eq!(size_of::<FrozenThread>(), 224);
    }
}
