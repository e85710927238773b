//! What starts a program, or thaws a frozen one.

use bytemuck::{Pod, Zeroable};

use super::running::WindowSize;

/// The rootfs is an index file, which comes as a descriptor.
pub const ROOTFS_INDEX: u32 = 0;
/// The rootfs is a host directory, asked for through `MSG_FS_*`. Paths in these
/// messages have no leading slash, and the host follows no symbolic link.
pub const ROOTFS_HOST: u32 = 1;
/// Where a program finds its secrets, one a file.
pub const SECRETS_DIRECTORY: &str = "/run/secrets";
/// Most bytes of the secrets of one copy, as they are said.
pub const SECRETS_MAX: usize = 32 << 10;

/// One secret. Its name and its value follow, without anything between them or behind them.
///
/// Secrets are the end of the tails of [`super::MSG_THAW`] and [`super::MSG_GO`]. Kernels that do not know of
/// them, which also do not know of [`super::FLAG_SECRETS`], do not look there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Secret {
    /// Bytes of the name.
    pub name_len: u32,
    /// Bytes of the value.
    pub value_len: u32,
}

/// Body of [`super::MSG_START`].
///
/// Descriptors: standard input, output and error, then, for [`ROOTFS_INDEX`],
/// the index file. Tail: NUL-terminated strings: host name, working directory,
/// program path (empty: look up `argv[0]` in `PATH`), then `argv_count`
/// arguments, then `env_count` environment strings, then `mount_count` strings,
/// each a `MOUNT_*` letter of [`crate::bind`] and the absolute path of the mount
/// point. After [`THAW_AND_START`], each [`MemoryWrite`] follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Start {
    /// Fresh randomness for this sandbox.
    pub seed: [u8; 32],
    /// Bytes of memory that the sandbox may use; 0 means no limit.
    pub memory_limit: u64,
    /// Bytes of the index file, for [`ROOTFS_INDEX`].
    pub index_len: u64,
    /// `FLAG_*`.
    pub flags: u32,
    /// `ROOTFS_*`.
    pub rootfs: u32,
    /// Port on which the function listens; 0 if it serves nobody.
    pub port: u32,
    /// Number of virtual CPUs, at least 1.
    pub cpus: u32,
    /// User id the program sees itself as.
    pub uid: u32,
    /// Group id the program sees itself as.
    pub gid: u32,
    /// Number of arguments.
    pub argv_count: u32,
    /// Number of environment strings.
    pub env_count: u32,
    /// Number of mounts besides those that every sandbox has.
    pub mount_count: u32,
    /// With [`super::FLAG_FREEZE_AT_ENTRY`]: the signal that freezes the program instead
    /// of being delivered; 0: none.
    pub entry_signal: u32,
    /// Size of the terminal, if there is one.
    pub window: WindowSize,
}

/// Bytes that a copy of a runtime template has in its memory when it goes on. They follow, without
/// anything between them or behind them.
///
/// Kernels that do not know of it are not asked for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MemoryWrite {
    /// Address of the first, in memory that the program can write to.
    pub address: u64,
    /// How many.
    pub len: u64,
}

/// Name (`argv[0]`) of a zygote that is to become a template: it has some
/// capabilities, and installs the filter that goes with them.
pub const TEMPLATE_NAME: &core::ffi::CStr = c"thaw-template";
/// Name (`argv[0]`) of a zygote that is to have one host process with one virtual CPU: it
/// installs the filter that allows no more.
pub const SINGLE_PROCESS_NAME: &core::ffi::CStr = c"thaw-single";
/// Name of the variable in a zygote's environment with the bytes of memory that the host has for all
/// sandboxes, in decimal. It is missing where the host cannot say; kernels that do not know of it do not
/// look for it.
pub const HOST_MEMORY_VARIABLE: &str = "HOST_MEMORY";
/// Go on at once.
pub const THAW_AND_RUN: u32 = 0;
/// Map the image and make everything ready that no identity is needed for, say
/// [`super::MSG_READY`], and wait for [`super::MSG_GO`].
pub const THAW_AND_HOLD: u32 = 1;
/// Map the image, read nothing of it, say [`super::MSG_READY`], and fork a copy for
/// each [`super::MSG_FORK`].
pub const THAW_AS_TEMPLATE: u32 = 2;
/// Become a copy of a runtime template, take the program of the [`super::MSG_START`] that follows
/// (without descriptors, and without mounts), and go on as that. The index is the program's
/// own; it has all inodes and blobs of the template's under the same numbers. Kernels that do
/// not know of it refuse it.
pub const THAW_AND_START: u32 = 3;
/// Go on at once with an image of several address spaces that is still being written (post-copy):
/// the memory of the kernel and of the first address space is there, and the reading end of a pipe
/// says by a byte when all is, and by its end without one that nothing more comes. Until then
/// nothing is mapped of the others. Kernels that do not know of it refuse it.
pub const THAW_POST_COPY: u32 = 4;

/// Body of [`super::MSG_THAW`].
///
/// Descriptors: image, index, the prefetch file if there is one, the pipe of [`THAW_POST_COPY`], then `blob_count` blobs, then those of
/// `identity`. Tail: `mapping_count`
/// [`crate::image::Mapping`], unless they are read from the image, `populate_count` [`PopulateRange`], the tail of
/// `identity`, then `blob_count` `u32` blob numbers, then each [`Secret`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Thaw {
    /// Bytes of the index file.
    pub index_len: u64,
    /// Where the mappings lie in the image; 0 if they come along.
    pub mappings_at: u64,
    /// `THAW_*`.
    pub mode: u32,
    /// Number of mappings.
    pub mapping_count: u32,
    /// Number of ranges to populate.
    pub populate_count: u32,
    /// Number of blobs whose descriptors come along.
    pub blob_count: u32,
    /// Number of blobs of the index.
    pub index_blobs: u32,
    /// Number of prefetch files that come along: 1 if mappings have
    /// [`crate::image::SOURCE_PREFETCH`], 0 otherwise.
    pub prefetch_count: u32,
    /// What makes it this copy. Only `flags` counts unless it is to go on at once.
    pub identity: Identity,
}

/// What one copy does not share with the others. Body of [`super::MSG_GO`].
///
/// Descriptors: `stream_count` standard streams, then one per connection. Tail: `connection_count` [`super::Connection`],
/// then `hostname_len` bytes of host name, padded with zeros to a multiple of 8, then, in
/// [`super::MSG_GO`], each [`Secret`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Identity {
    /// Fresh randomness for this copy.
    pub seed: [u8; 32],
    /// Bytes of memory that the sandbox may use; 0 means no limit.
    pub memory_limit: u64,
    /// `FLAG_*`.
    pub flags: u32,
    /// Number of connections handed in: those that go on ([`super::CONNECTION_GOES_ON`]), then 0 or 1.
    pub connection_count: u32,
    /// Bytes of the host name; 0 keeps the frozen one.
    pub hostname_len: u32,
    /// 2 if standard output and standard error come along; 0 if the copy keeps those
    /// that it got before. Until some came, both behave like `/dev/null`.
    pub stream_count: u32,
}

/// Body of [`super::MSG_FORK`]. Descriptors: the control socket; a file for each control group of
/// the copy's own, which moves the writing thread there; last, the write end of its
/// console.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Fork {
    /// User and group id of the copy, as the template's user namespace numbers them.
    pub id: u32,
    /// Zero.
    pub reserved: u32,
}

/// Populate for reading: map pages that are in the page cache.
pub const POPULATE_READ: u64 = 0;
/// Populate for writing: make private copies.
pub const POPULATE_WRITE: u64 = 1;

/// A range of the working set, populated in one call at boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PopulateRange {
    /// First byte, page aligned.
    pub start: u64,
    /// Bytes, a multiple of the page size.
    pub len: u64,
    /// [`POPULATE_READ`] or [`POPULATE_WRITE`].
    pub how: u64,
}

/// Body of [`super::MSG_BOOTED`]: when each phase ended, in nanoseconds of the host's
/// `CLOCK_MONOTONIC`. 0: not reached yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Booted {
    /// The boot command was received.
    pub received_ns: u64,
    /// All eager mappings were in place.
    pub mapped_ns: u64,
    /// The guest's first instruction was about to run.
    pub first_instruction_ns: u64,
    /// The guest had sent its first response byte.
    pub first_byte_ns: u64,
}
