//! Hibernating a sandbox in place: its memory goes to a swap file, its process stays
//! (Hibernate Container, §3).
//!
//! ```text
//! Sandbox::request_rest ──▶ Event::Resting ──▶ Hibernator::write ──▶ Sandbox::hibernate ──▶ Event::Hibernated
//!                                                                                             │
//!                    Event::Awake ◀── a connection, a byte of a client, a signal, Sandbox::wake
//! ```
//!
//! A sandbox at rest goes on by itself ([`Event::Awake`](crate::Event::Awake)) as soon as there
//! is something to do for it. Then the file that is being written is of no use, and
//! [`Sandbox::hibernate`] changes nothing.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use bytemuck::cast_slice;
use thaw_abi::control::{
    Awake as AwakeMessage, EntryPoint, Hibernate, MSG_HIBERNATE, MSG_HIBERNATE_SEALED, MSG_REST,
    MSG_WAKE, NO_DEPTH, POPULATE_READ, PopulateRange, REST_TIMERS, Rest, Resting,
};
use thaw_abi::image::{
    DEPTH_MAX, MAPPING_EAGER, Mapping, SOURCE_BLOB, SOURCE_IMAGE, ancestor_depth,
};
use thaw_abi::layout::HEAP_BASE;
use thaw_abi::{PAGE_SIZE, page_align_up};

use crate::boot::Rootfs;
use crate::broker::BlobSource;
use crate::freeze::{FreezeBase, FreezeError, FreezeSpec, Frozen, MergePolicy};
use crate::image::{Image, ImageError};
use crate::message;
use crate::sandbox::Sandbox;
use crate::state::Subject;
use crate::working_set::{FRONT_END, PopulatePolicy, WorkingSet};

/// Most ranges that waking populates: as many as a recording has.
const RANGES_MAX: usize = 4096;

/// Why a sandbox goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AwakeCause {
    /// The host has sent something: a connection, a signal, [`Sandbox::wake`].
    Message,
    /// Something has come on a connection that the program has open.
    Connection,
    /// A timer of the program is due.
    Timer,
    /// One of its host processes has not given up its memory in time.
    Unanswered,
}

/// A sandbox that was at rest, or hibernated, goes on. It comes from the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awake {
    /// The rest that has ended.
    pub rest: u64,
    /// Why.
    pub cause: AwakeCause,
    /// Whether it had given up its memory.
    pub was_hibernated: bool,
    /// When it was woken, in nanoseconds of `CLOCK_MONOTONIC`.
    pub woken_ns: u64,
    /// When its memory was in place again, the same.
    pub ready_ns: u64,
    /// When it had sent the first bytes of an answer, the same; `None`: it has answered nobody
    /// before it waits again.
    pub answered_ns: Option<u64>,
}

impl Awake {
    /// `None` if the sandbox has said what none says.
    pub(crate) fn of(message: &AwakeMessage) -> Option<Self> {
        use thaw_abi::control::{AWAKE_DESCRIPTOR, AWAKE_MESSAGE, AWAKE_TIMER, AWAKE_UNANSWERED};
        let cause = match message.cause {
            AWAKE_MESSAGE => AwakeCause::Message,
            AWAKE_DESCRIPTOR => AwakeCause::Connection,
            AWAKE_TIMER => AwakeCause::Timer,
            AWAKE_UNANSWERED => AwakeCause::Unanswered,
            _ => return None,
        };
        let was_hibernated = match message.was_hibernated {
            0 => false,
            1 => true,
            _ => return None,
        };
        let AwakeMessage { number: rest, woken_ns, ready_ns, answered_ns, .. } = *message;
        let answered_ns = (answered_ns != 0).then_some(answered_ns);
        Some(Self { rest, cause, was_hibernated, woken_ns, ready_ns, answered_ns })
    }
}

/// A file that an instance's memory goes to. Nobody else has it: make it without a name
/// (`O_TMPFILE`, open(2)), for its owner only.
#[derive(Debug)]
pub struct SwapFile {
    /// To be written.
    pub write: File,
    /// The same file, open for reading only: the sandbox gets this one.
    pub read: File,
    /// If the content of the file is to lie elsewhere, encrypted, while the sandbox is hibernated:
    /// the reading end of a pipe. After [`Event::Hibernated`](crate::Event::Hibernated) the file
    /// may be emptied, and after [`Event::Unseal`](crate::Event::Unseal) it is to be as it was;
    /// then a byte in the pipe lets the sandbox go on.
    pub gate: Option<OwnedFd>,
}

/// What due timers of the program do while it is at rest or hibernated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Timers {
    /// They wake it.
    Wake,
    /// They expire when something else wakes it.
    #[default]
    Wait,
}

/// How the memory of a sandbox is written.
#[derive(Clone, Debug)]
pub struct HibernateSpec {
    /// Most bytes of memory that the swap file may store.
    pub max_stored: u64,
    /// The image that the sandbox was thawed from, to which the file stores the difference;
    /// the same one each time. `None`, or another image: the file holds everything.
    pub base: Option<FreezeBase>,
}

/// Why a sandbox was not hibernated. It rests until it is told to go on, or has ended.
#[derive(Debug, thiserror::Error)]
pub enum HibernateError {
    /// Its memory could not be written.
    #[error(transparent)]
    Write(#[from] FreezeError),
    /// The swap file does not say what was written to it.
    #[error("the swap file cannot be read back ({0}); the disk may be failing")]
    Unreadable(#[source] ImageError),
    /// The host has refused something.
    #[error("cannot finish the swap file: {0}")]
    Host(#[from] io::Error),
}

impl HibernateError {
    /// Whether the sandbox' own description of its memory makes no sense: it has gone on meanwhile,
    /// or its kernel is hostile.
    pub fn is_torn(&self) -> bool {
        matches!(self, Self::Write(FreezeError::Report(_)))
    }

    /// Whether there is no room for the swap file: on the disk, or by a quota.
    pub fn is_no_room(&self) -> bool {
        let source = match self {
            Self::Write(FreezeError::Write(source)) | Self::Host(source) => source,
            _ => return false,
        };
        matches!(source.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG))
    }
}

/// Writes the memory of a sandbox that is at rest, on another thread than the one that serves
/// the sandbox.
pub struct Hibernator {
    subject: Subject,
    blobs: Option<Arc<dyn BlobSource>>,
    kernel_build: [u8; 32],
    thawed: Option<[u8; 32]>,
    resting: Resting,
    spec: HibernateSpec,
}

/// The written memory of a sandbox.
#[derive(Debug)]
pub struct Deflated {
    command: Hibernate,
    /// Open for reading only.
    file: OwnedFd,
    gate: Option<OwnedFd>,
    /// What [`WorkingSet::record`](crate::Recorder::record_swap) needs to know of the file.
    pub swapped: Swapped,
}

/// What is known of a swap file once the sandbox has it.
#[derive(Clone, Debug)]
pub struct Swapped {
    pub(crate) mappings: Arc<[Mapping]>,
    pub(crate) checksum: [u8; 32],
    /// Bytes of memory in the file.
    pub stored: u64,
    /// Bytes of the file, holes included.
    pub file_len: u64,
    /// How long it took to write.
    pub duration: Duration,
    /// Ranges that waking populates at once.
    pub populated: usize,
}

impl Swapped {
    /// Whether recorded pages come back at once.
    pub fn is_batch(&self) -> bool {
        self.populated > 0
    }
}

impl Sandbox {
    /// Asks the sandbox to come to rest as soon as none of its threads can run, and to say
    /// [`Event::Resting`](crate::Event::Resting) with `number`, which is not that of an earlier
    /// rest.
    pub fn request_rest(&mut self, number: u64, timers: Timers) -> io::Result<()> {
        // What it has written to since is not what it was thawed with.
        self.forget_held();
        let flags = if timers == Timers::Wake { REST_TIMERS } else { 0 };
        let rest = Rest { number, flags, reserved: 0 };
        self.send(message::message(MSG_REST, &rest), Vec::new())?;
        self.process().ring()
    }

    /// Begins to write the memory of the sandbox, which is at rest.
    ///
    /// # Errors
    /// It has ended.
    pub fn hibernator(&self, resting: Resting, spec: HibernateSpec) -> io::Result<Hibernator> {
        let blobs = match self.rootfs() {
            Rootfs::Index { blobs, .. } => Some(blobs.clone()),
            Rootfs::HostDirectory(_) => None,
        };
        let (subject, kernel_build) = (self.subject()?, self.kernel_build_id());
        let thawed = self.image_checksum();
        let is_own = |base: &FreezeBase| {
            let header = base.image.header();
            Some(header.checksum) == thawed && header.depth < DEPTH_MAX
        };
        let spec = HibernateSpec { base: spec.base.filter(is_own), ..spec };
        Ok(Hibernator { subject, blobs, kernel_build, thawed, resting, spec })
    }

    /// Lets the sandbox give up the memory that was written. It says
    /// [`Event::Hibernated`](crate::Event::Hibernated), unless it has gone on meanwhile.
    pub fn hibernate(&mut self, deflated: Deflated) -> io::Result<Swapped> {
        let Deflated { command, file, gate, swapped } = deflated;
        let kind = if gate.is_some() { MSG_HIBERNATE_SEALED } else { MSG_HIBERNATE };
        let files = [file].into_iter().chain(gate).collect();
        self.send_at_rest(message::message(kind, &command), files)?;
        Ok(swapped)
    }

    /// Wakes the sandbox if it is hibernated, lets it go on if it is at rest, and takes back
    /// [`Sandbox::request_rest`] if it is neither.
    pub fn wake(&mut self) -> io::Result<()> {
        self.send(message::message(MSG_WAKE, &()), Vec::new())
    }
}

impl Hibernator {
    /// The same, and writing ends with an error soon after this is false.
    pub fn while_wanted(mut self, wanted: Arc<AtomicBool>) -> Self {
        self.subject.wanted = Some(wanted);
        self
    }

    /// Writes the memory to `swap`. Takes as long as there is memory to store.
    /// With a working set, those pages come back at once on waking (REAP); without one, pages
    /// come back when they are touched.
    ///
    /// # Errors
    /// The file is of no use then. [`Sandbox::wake`] lets the sandbox go on.
    pub fn write(
        self,
        swap: SwapFile,
        working_set: Option<&WorkingSet>,
    ) -> Result<Deflated, HibernateError> {
        let started = Instant::now();
        let spec = FreezeSpec {
            index_hash: [0; 32],
            program: "hibernated".to_owned(),
            arguments: String::new(),
            about: String::new(),
            max_stored: self.spec.max_stored,
            merge: MergePolicy::default(),
            base: self.spec.base.clone(),
            identity: None,
            post_copy: false,
        };
        let Resting { number, report_address, report_len } = self.resting;
        let entry = EntryPoint { report_address, report_len, cause: 0, process: 0 };
        let frozen = Frozen {
            subject: &self.subject,
            blobs: self.blobs.clone(),
            kernel_build: self.kernel_build,
            baseline: None,
            thawed: self.thawed,
        };
        let report = frozen.write(entry, &spec, &swap.write, &mut |_| {})?;
        let image = swap.read.try_clone()?;
        let base = self.spec.base.as_ref();
        let image = Image::open_with(image, &mut |ancestor| {
            let found = base.and_then(|base| base.ancestor(&ancestor.name));
            found.ok_or(ImageError::Differential)
        });
        let image = image.map_err(HibernateError::Unreadable)?;
        let mut mappings = image.mappings().to_vec();
        // What was recorded is of the first process.
        let is_of_several = mappings.iter().any(|mapping| mapping.space() > 0);
        let ranges = populated(working_set.filter(|_| !is_of_several), &mut mappings);
        let mappings_at = page_align_up(report.file_len)
            .ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?;
        let table: &[u8] = cast_slice(&mappings);
        let ranges_at = mappings_at + table.len() as u64;
        let behind: &[u8] = cast_slice(&ranges);
        swap.write.write_all_at(table, mappings_at)?;
        swap.write.write_all_at(behind, ranges_at)?;
        let file_len = ranges_at + behind.len() as u64;
        let command = Hibernate {
            number,
            file_len,
            mappings_at,
            ranges_at,
            mapping_count: mappings.len() as u32,
            range_count: ranges.len() as u32,
            image_depth: base.map_or(NO_DEPTH, |base| base.image.header().depth),
            reserved: 0,
        };
        let swapped = Swapped {
            mappings: mappings.into(),
            checksum: image.header().checksum,
            stored: report.stored,
            file_len,
            duration: started.elapsed(),
            populated: ranges.len(),
        };
        Ok(Deflated { command, file: swap.read.into(), gate: swap.gate, swapped })
    }
}

/// The ranges that waking populates; marks the mappings that it makes at once.
///
/// Pages that were written are copied in one call. Mappings of the swap file that were used
/// and of the image are made before anything runs, which costs less than the fault that each would
/// take; those of blobs are made when the kernel can ask for the blob. Pages that were only read
/// are not brought in: they are in the page cache, where a fault maps 16 of them, and to bring in
/// all between the first and the last takes longer. Measured (`thaw bench hibernate`, median of
/// 40, µs, beside other work; by page faults and with pages that were read, one run; without, two
/// or three runs): Go 763, 835, 704 to 718; Node 2099, 2266, 1616 and 1694; Python 1911, 1512, 1392
/// to 1557.
fn populated(working_set: Option<&WorkingSet>, mappings: &mut [Mapping]) -> Vec<PopulateRange> {
    let Some(set) = working_set else { return Vec::new() };
    let mut used_blobs = Vec::new();
    for mapping in mappings.iter_mut() {
        let Some(first) = set.first_within(mapping.start, mapping.start + mapping.len) else {
            continue;
        };
        match mapping.source {
            SOURCE_BLOB if ancestor_depth(mapping.blob).is_none() => {
                used_blobs.push(PopulateRange { start: first, len: PAGE_SIZE, how: POPULATE_READ });
            }
            SOURCE_IMAGE | SOURCE_BLOB => mapping.flags |= MAPPING_EAGER,
            _ => {}
        }
    }
    let mut ranges: Vec<PopulateRange> = set.written(HEAP_BASE, FRONT_END).collect();
    let room = RANGES_MAX.saturating_sub(ranges.len());
    ranges.extend(set.populate(mappings, PopulatePolicy::Write, room));
    let room = RANGES_MAX.saturating_sub(ranges.len());
    ranges.extend(used_blobs.into_iter().take(room));
    ranges.sort_by_key(|range| range.start);
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_abi::control::POPULATE_WRITE;

    #[test]
    fn a_full_disk_and_a_quota_are_told_from_other_errors() {
        let is_no_room = |errno| {
            let error = || io::Error::from_raw_os_error(errno);
            let of_write = HibernateError::Write(FreezeError::Write(error())).is_no_room();
            assert_eq!(of_write, HibernateError::Host(error()).is_no_room());
            of_write
        };
        assert!([libc::ENOSPC, libc::EDQUOT].into_iter().all(is_no_room));
        assert!(!is_no_room(libc::EIO));
        assert!(!HibernateError::Write(FreezeError::SandboxEnded).is_no_room());
    }

    #[test]
    fn without_a_working_set_nothing_comes_back_before_it_is_touched() {
        let mapping = Mapping {
            start: 0x10_0000,
            len: 0x4000,
            offset: 0,
            source: SOURCE_IMAGE,
            blob: 0,
            prot: 3,
            flags: 0,
        };
        let mut mappings = [mapping];
        assert!(populated(None, &mut mappings).is_empty());
        assert_eq!(mappings[0].flags, 0);
    }

    #[test]
    fn what_was_used_comes_back_at_once() {
        let image = |start: u64| Mapping {
            start,
            len: 0x4000,
            offset: start,
            source: SOURCE_IMAGE,
            blob: 0,
            prot: 3,
            flags: 0,
        };
        let blob = Mapping { source: SOURCE_BLOB, prot: 1, ..image(0x30_0000) };
        let mut mappings = [image(0x10_0000), image(0x20_0000), blob];
        let set = WorkingSet::of_runs(&[
            (0x10_1000, 0x10_3000, POPULATE_WRITE),
            (0x30_2000, 0x30_3000, POPULATE_READ),
        ]);
        let ranges = populated(Some(&set), &mut mappings);
        let found: Vec<_> =
            ranges.iter().map(|range| (range.start, range.len, range.how)).collect();
        assert_eq!(
            found,
            [(0x10_1000, 0x2000, POPULATE_WRITE), (0x30_2000, 0x1000, POPULATE_READ)]
        );
        assert_eq!(mappings.map(|mapping| mapping.flags), [MAPPING_EAGER, 0, 0]);
    }
}
