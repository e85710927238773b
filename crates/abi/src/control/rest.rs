//! How a sandbox comes to rest: to be frozen, copied or hibernated, or to give back pages.

use bytemuck::{Pod, Zeroable};

/// Body of [`super::MSG_ENTRY_POINT`]: where the freeze report lies in the sandbox's
/// memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct EntryPoint {
    /// Address of the [`crate::freeze::ReportHeader`].
    pub report_address: u64,
    /// Bytes of the report.
    pub report_len: u64,
    /// Why: `CAUSE_*`.
    pub cause: u32,
    /// 0: the sandbox waits, and its memory does not change. Otherwise it has gone on, and a
    /// process with this number in the sandbox' pid namespace, its *twin*, holds a copy of its
    /// memory until [`super::MSG_TWIN_READ`].
    pub process: u32,
}

/// Body of [`super::MSG_CHECKPOINT`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Checkpoint {
    /// `CHECKPOINT_*`.
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// The sandbox may make a twin ([`EntryPoint::process`]), where it can, and go on at once.
pub const CHECKPOINT_TWIN: u32 = 1 << 0;
/// The program waits for its first client.
pub const CAUSE_WAITS: u32 = 1;
/// The program has written to `/dev/thaw`.
pub const CAUSE_ASKED: u32 = 2;
/// [`super::Start::entry_signal`] was sent.
pub const CAUSE_SIGNAL: u32 = 3;
/// The host has sent [`super::MSG_FREEZE`].
pub const CAUSE_HOST: u32 = 4;
/// The host has sent [`super::MSG_CHECKPOINT`].
pub const CAUSE_CHECKPOINT: u32 = 5;
/// A due timer of the guest ends the rest, or the hibernation. Without it, timers expire on
/// waking.
pub const REST_TIMERS: u32 = 1 << 0;
/// The rest is for [`super::MSG_TRIM`]: nothing is written, so that there is no report, and what was not
/// mapped yet stays so. A sandbox of several host processes goes on at once ([`AWAKE_UNANSWERED`]).
pub const REST_TO_TRIM: u32 = 1 << 1;

/// Body of [`super::MSG_REST`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Rest {
    /// The host's number for this rest, not 0.
    pub number: u64,
    /// `REST_*`.
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// Body of [`super::MSG_RESTING`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Resting {
    /// That of [`Rest`].
    pub number: u64,
    /// Address of the [`crate::freeze::ReportHeader`].
    pub report_address: u64,
    /// Bytes of the report.
    pub report_len: u64,
}

/// Body of [`super::MSG_TRIM`]; `count` [`TrimRange`]s follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Trim {
    /// The rest that the pages were compared in: that of [`Resting`].
    pub number: u64,
    /// Number of ranges.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

/// Most ranges in one [`Trim`].
pub const TRIM_RANGES_MAX: usize = 8192;

/// Pages of the guest, of the first process of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct TrimRange {
    /// First byte.
    pub start: u64,
    /// Bytes.
    pub len: u64,
}

/// Body of [`super::MSG_HIBERNATE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Hibernate {
    /// The rest that the file was written in: that of [`Resting`].
    pub number: u64,
    /// Bytes of the file.
    pub file_len: u64,
    /// Where the [`crate::image::Mapping`]s lie in the file.
    pub mappings_at: u64,
    /// Where the [`super::PopulateRange`]s lie in the file: what waking populates.
    pub ranges_at: u64,
    /// Number of mappings.
    pub mapping_count: u32,
    /// Number of ranges.
    pub range_count: u32,
    /// The depth of the image that the sandbox was thawed from, which is an ancestor of the
    /// file then; [`NO_DEPTH`]: the file has no ancestors.
    pub image_depth: u32,
    /// Zero.
    pub reserved: u32,
}

/// In [`Hibernate::image_depth`]: the file holds everything.
pub const NO_DEPTH: u32 = u32::MAX;
/// A message of the host is there.
pub const AWAKE_MESSAGE: u32 = 1;
/// A descriptor that the guest waits for has news: a client has sent something.
pub const AWAKE_DESCRIPTOR: u32 = 2;
/// A timer of the guest is due.
pub const AWAKE_TIMER: u32 = 3;
/// One of its host processes has not given up its memory in time.
pub const AWAKE_UNANSWERED: u32 = 4;

/// Body of [`super::MSG_AWAKE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Awake {
    /// The rest that it comes from: that of [`Rest`].
    pub number: u64,
    /// When it was woken, in nanoseconds of the host's `CLOCK_MONOTONIC`.
    pub woken_ns: u64,
    /// When its memory was in place again, the same.
    pub ready_ns: u64,
    /// When it had sent the first bytes of an answer, the same; 0 if it waits before it has
    /// answered anybody.
    pub answered_ns: u64,
    /// Why: `AWAKE_*`.
    pub cause: u32,
    /// Whether it had been hibernated, 0 or 1.
    pub was_hibernated: u32,
}
