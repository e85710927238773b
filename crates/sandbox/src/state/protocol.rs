//! Messages between the library, the state helper and its workers.
//!
//! The caller sends requests on the *control* socket, each with a socket of its own for the
//! worker that will serve it. All ends are this same executable, so there is no version. The
//! helper and its workers trust their caller. The caller does not trust a worker, which a
//! sandbox may have taken over.

use std::io;

use bytemuck::{Pod, Zeroable, bytes_of, cast_mut, cast_ref, pod_read_unaligned};

use crate::text::printable;
use crate::trim::{FILES_MAX, FileId};

/// Hidden first argument that makes an executable the launcher of a state helper.
pub const HELPER_ARGUMENT: &str = "--thaw-state-helper";

/// What a helper is for, as its launcher's last argument says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// To read the state of sandboxes.
    Read,
    /// To put sandboxes back into an earlier state ([`crate::rewind`]).
    Rewind,
}

impl Task {
    /// All of them, by number.
    const ALL: [Self; 2] = [Self::Read, Self::Rewind];

    /// Its number.
    pub fn number(self) -> u32 {
        self as u32
    }

    /// The task with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }
}

/// Most bytes of a packet, either way.
pub const PACKET_MAX: usize = 32 * 1024;
/// Most bytes of what an image says about its function.
pub const ABOUT_MAX: usize = 16 * 1024;
/// Most bytes of the text of an answer.
const TEXT_MAX: usize = 1024;
/// Most bytes of a piece of a longer answer.
pub const PIECE_MAX: usize = 16 * 1024;
/// Most blobs that one freeze may ask for: each is an open file of the helper.
pub const BLOBS_MAX: usize = 4096;
/// Most blobs that are asked for at once: as many descriptors as a packet may bring.
pub const BLOBS_AT_ONCE: usize = 16;

/// Caller → helper: can the memory of a process be read? With a socket and its pidfd, as
/// all requests.
pub const REQUEST_CHECK: u32 = 1;
/// Caller → helper: a [`FreezeRequest`] and the text about the function. With the image
/// file, open for reading and writing.
pub const REQUEST_FREEZE: u32 = 2;
/// Caller → helper: a [`RecordRequest`]. With a file that holds the mappings of the image.
pub const REQUEST_RECORD: u32 = 3;
/// Caller → helper: how much memory do the processes of the sandbox have?
pub const REQUEST_MEMORY: u32 = 5;
/// Caller → helper: an [`UnchangedRequest`]. With as many files.
pub const REQUEST_UNCHANGED: u32 = 6;
/// Caller → worker: a [`BlobReply`], with the blobs that were opened.
pub const REPLY_BLOB: u32 = 4;

/// A freeze: `about_len` bytes about the function follow, and behind them `ancestor_count`
/// [`thaw_abi::image::Ancestor`] that the image may refer to, by rising depth: the last is its
/// parent. The worker asks for their files as for blobs.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct FreezeRequest {
    /// [`REQUEST_FREEZE`].
    pub kind: u32,
    /// Bytes that follow.
    pub about_len: u32,
    /// BLAKE3 of the rootfs index file.
    pub index_hash: [u8; 32],
    /// Build id of the kernel that the sandbox runs.
    pub kernel_build: [u8; 32],
    /// What [`thaw_abi::image::ImageHeader::cpu_features`] is to say.
    pub cpu_features: [u32; 8],
    /// Name of the program, with a terminator.
    pub program: [u8; 16],
    /// Its arguments, with a terminator.
    pub arguments: [u8; 80],
    /// Address of the kernel's report.
    pub report_address: u64,
    /// Bytes of it.
    pub report_len: u64,
    /// Most bytes of memory that the image may store.
    pub max_stored: u64,
    /// See [`crate::MergePolicy`].
    pub clean_gap_pages: u64,
    /// See [`crate::MergePolicy`].
    pub zero_gap_pages: u64,
    /// Number of ancestors that follow.
    pub ancestor_count: u32,
    /// Depth of the one that the sandbox is a copy of, or [`NOT_A_COPY`].
    pub thawed_depth: u32,
    /// The process of the sandbox in whose memory the report lies, as the sandbox' pid namespace
    /// numbers it: the first, or its twin, whose memory is read in place of the first one's.
    pub process: u32,
    /// `FREEZE_*`.
    pub flags: u32,
    /// With [`FREEZE_IN_MEMORY`]: stands in the image for its checksum.
    pub identity: [u8; 32],
}

/// The image is a file in memory, for this host only: pages that were written are stored without
/// comparing them with anything, and nobody takes a checksum of it.
pub const FREEZE_IN_MEMORY: u32 = 1 << 0;

/// [`ANSWER_FIRST`] is wanted, if it comes long before the end.
pub const FREEZE_POST_COPY: u32 = 1 << 1;

/// The sandbox is not a copy of an ancestor of its image.
pub const NOT_A_COPY: u32 = u32::MAX;

/// A recording of a working set.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct RecordRequest {
    /// [`REQUEST_RECORD`].
    pub kind: u32,
    /// Number of mappings in the file.
    pub mappings: u32,
    /// Checksum of the image.
    pub image_checksum: [u8; 32],
}

/// Which pages of the sandbox' first process, which is at rest, are equal to those of files that they
/// are private copies of? The answer is [`thaw_abi::control::TrimRange`]s.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct UnchangedRequest {
    /// [`REQUEST_UNCHANGED`].
    pub kind: u32,
    /// Number of files.
    pub count: u32,
    /// What `/proc/PID/maps` calls them.
    pub ids: [FileId; FILES_MAX],
}

/// The reply to [`ANSWER_BLOB`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlobReply {
    /// [`REPLY_BLOB`].
    pub kind: u32,
    /// Why there are fewer descriptors than were asked for; 0: there are as many.
    pub errno: i32,
}

/// Launcher → caller: the helper's process exists; its pidfd is attached.
pub const ANSWER_STARTED: u32 = 1;
/// Helper → caller: requests are served.
pub const ANSWER_SERVING: u32 = 2;
/// Launcher or helper → caller: it could not be set up, and ends. The text says which step
/// failed, [`Answer::errno`] why.
pub const ANSWER_NOT_SERVING: u32 = 3;
/// Worker → caller: open the blobs [`Answer::blobs`], in this order, up to the first that
/// cannot be opened.
pub const ANSWER_BLOB: u32 = 4;
/// Worker → caller: done. [`Answer::numbers`] and [`Answer::checksum`] depend on the request.
pub const ANSWER_DONE: u32 = 5;
/// Worker or helper → caller: it failed; [`Answer::error`] says at what.
pub const ANSWER_FAILED: u32 = 6;
/// Helper → caller, on the control socket: the worker has ended, and with it everything
/// that it was given.
pub const ANSWER_IDLE: u32 = 7;
/// The memory of the sandbox that is being frozen has been read: it may go on. Once, before
/// [`ANSWER_DONE`].
pub const ANSWER_READ: u32 = 8;
/// The image has its tables, the kernel's memory and that of the first address space, and they do
/// not change any more; only with [`FREEZE_POST_COPY`]. Once, before [`ANSWER_READ`].
pub const ANSWER_FIRST: u32 = 9;

/// What failed: a host call, with [`Answer::errno`].
pub const ERROR_HOST: u32 = 0;
/// The kernel's report makes no sense; the text says why.
pub const ERROR_REPORT: u32 = 1;
/// More memory than allowed: numbers 0 (needed) and 1 (limit).
pub const ERROR_TOO_LARGE: u32 = 2;
/// More mappings than number 0.
pub const ERROR_TOO_MANY_MAPPINGS: u32 = 3;
/// Blob [`Answer::blob`] could not be read.
pub const ERROR_BLOB: u32 = 4;
/// Memory could not be read.
pub const ERROR_MEMORY: u32 = 5;
/// The image could not be written.
pub const ERROR_WRITE: u32 = 6;
/// The sandbox has ended meanwhile.
pub const ERROR_SANDBOX_ENDED: u32 = 7;
/// The worker has a bug; the text says where.
pub const ERROR_PANIC: u32 = 8;
/// An image that the sandbox is compared with is of no use; the text says why.
pub const ERROR_BASE: u32 = 9;

/// A packet from the helper or a worker; text follows.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Answer {
    /// `ANSWER_*`.
    pub kind: u32,
    /// `ERROR_*`.
    pub error: u32,
    /// Positive error number; 0: the text says it.
    pub errno: i32,
    /// Number of a blob, with [`ANSWER_BLOB`] how many, and with a finished freeze the depth of
    /// the image.
    pub blob: u32,
    /// See the kinds.
    pub numbers: [u64; 8],
    /// Of the image.
    pub checksum: [u8; 32],
}

impl Answer {
    /// An answer with nothing but its kind.
    pub fn new(kind: u32) -> Self {
        Self { kind, ..Self::zeroed() }
    }

    /// Asks for blobs, [`BLOBS_AT_ONCE`] at most.
    pub fn asking_for(blobs: &[u32]) -> Self {
        let mut answer = Self { blob: blobs.len() as u32, ..Self::new(ANSWER_BLOB) };
        let numbers: &mut [u32; BLOBS_AT_ONCE] = cast_mut(&mut answer.numbers);
        numbers[..blobs.len()].copy_from_slice(blobs);
        answer
    }

    /// The blobs that it asks for; `None`: more than fit.
    pub fn blobs(&self) -> Option<&[u32]> {
        let numbers: &[u32; BLOBS_AT_ONCE] = cast_ref(&self.numbers);
        numbers.get(..self.blob as usize)
    }

    /// The packet with some text, of which at most 1 KiB is kept.
    pub fn with_text(&self, text: &str) -> Vec<u8> {
        let text = &text.as_bytes()[..text.len().min(TEXT_MAX)];
        [bytes_of(self), text].concat()
    }

    /// Reads a packet, which is hostile.
    pub fn parse(packet: &[u8]) -> Option<(Self, String)> {
        let (head, text) = packet.split_at_checked(size_of::<Self>())?;
        let answer: Self = pod_read_unaligned(head);
        let is_known = (ANSWER_STARTED..=ANSWER_FIRST).contains(&answer.kind)
            && (ERROR_HOST..=ERROR_BASE).contains(&answer.error)
            && (0..=4095).contains(&answer.errno)
            && text.len() <= TEXT_MAX;
        is_known.then(|| (answer, printable(text)))
    }

    /// The host's error that it holds.
    pub fn host_error(&self, text: &str) -> io::Error {
        match self.errno {
            0 => io::Error::other(text.to_owned()),
            errno => io::Error::from_raw_os_error(errno),
        }
    }
}

/// The error number of an error; 0: it has none, and its text must do.
pub fn errno_of(error: &io::Error) -> i32 {
    match (error.raw_os_error(), error.kind()) {
        (Some(errno), _) => errno,
        (None, io::ErrorKind::NotFound) => libc::ENOENT,
        (None, io::ErrorKind::TimedOut) => libc::ETIMEDOUT,
        (None, io::ErrorKind::OutOfMemory) => libc::ENOMEM,
        (None, io::ErrorKind::PermissionDenied) => libc::EACCES,
        (None, io::ErrorKind::InvalidInput) => libc::EINVAL,
        (None, _) => 0,
    }
}

/// As much of `text` as fits before a terminator.
pub fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let len = text.len().min(N - 1);
    bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_back_with_its_text() {
        let answer = Answer { errno: 5, error: ERROR_MEMORY, ..Answer::new(ANSWER_FAILED) };
        let (read, text) = Answer::parse(&answer.with_text("why \x1b[2J")).unwrap();
        assert_eq!((read.kind, read.errno, read.error), (ANSWER_FAILED, 5, ERROR_MEMORY));
        assert_eq!(text, "why \\x1b[2J");
    }

    #[test]
    fn answers_that_no_helper_sends_are_refused() {
        let good = Answer::new(ANSWER_DONE);
        assert!(Answer::parse(&good.with_text("")).is_some());
        let packet = good.with_text("");
        for len in 0..packet.len() {
            assert!(Answer::parse(&packet[..len]).is_none());
        }
        for wrong in [
            Answer { kind: 0, ..good },
            Answer { kind: ANSWER_FIRST + 1, ..good },
            Answer { error: ERROR_BASE + 1, ..good },
            Answer { errno: -1, ..good },
            Answer { errno: i32::MAX, ..good },
        ] {
            assert!(Answer::parse(&wrong.with_text("")).is_none(), "{wrong:?}");
        }
        let long = [bytes_of(&good), &[b'x'; TEXT_MAX + 1]].concat();
        assert!(Answer::parse(&long).is_none());
        assert_eq!(good.with_text(&"x".repeat(5000)).len(), size_of::<Answer>() + TEXT_MAX);
    }

    #[test]
    fn blobs_are_asked_for_together() {
        for count in [0, 1, BLOBS_AT_ONCE as u32] {
            let blobs: Vec<u32> = (7..7 + count).collect();
            assert_eq!(Answer::asking_for(&blobs).blobs(), Some(&blobs[..]));
        }
        let too_many = Answer { blob: BLOBS_AT_ONCE as u32 + 1, ..Answer::new(ANSWER_BLOB) };
        assert_eq!(too_many.blobs(), None);
    }

    #[test]
    fn texts_are_cut_before_the_terminator() {
        assert_eq!(padded::<4>("abcdef"), *b"abc\0");
        assert_eq!(padded::<4>(""), [0; 4]);
    }
}
