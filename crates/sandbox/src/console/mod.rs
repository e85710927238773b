//! Consoles: where the kernels of the sandboxes write panics and traces.
//!
//! A guest shares its address space with its kernel and so can write there what
//! it likes, as much as it likes. Each sandbox therefore has the write end of a
//! pipe of its own and nothing of the caller's; one thread reads all of them
//! ([`Console::lines`]), cuts what it reads into lines, escapes them, says which
//! process wrote them, and passes on no more than a fixed rate. A sandbox that
//! writes faster waits.

mod budget;
mod reader;

pub use reader::ConsoleReader;
use reader::Tag;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

/// Bytes of a pipe whose reader keeps to a rate: one page, so that many
/// sandboxes that are made to wait hold little of the host's memory.
const PIPE_BYTES: usize = 4096;

/// Where the kernels of the zygotes write traces and panics.
#[derive(Clone, Debug)]
pub enum Console {
    /// Each to a pipe of its own; [`crate::Sandbox::console`] is the read end.
    Pipe,
    /// Each to a pipe of its own, which a thread of this library reads.
    Lines(Arc<ConsoleReader>),
}

/// How much of what sandboxes write on their consoles is passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConsoleRate {
    /// So much that no sandbox fills a log: 4 KiB and 32 lines in a second after
    /// the first 16 KiB and 128 lines, 256 KiB and 2048 lines in a second for all
    /// together. A sandbox that writes more waits; when it ends, the rest is
    /// dropped and counted.
    Limited,
    /// Everything, as fast as it is taken: for traces.
    Lossless,
}

/// What comes from the consoles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConsoleOutput<'a> {
    /// A line, or a piece of a long one.
    Line {
        /// The process that wrote it or an ancestor of it, as seen by the caller's
        /// `/proc`; 0 before that is known.
        pid: u32,
        /// The name that [`crate::Sandbox::label`] gave it.
        label: Option<&'a str>,
        /// The text, without its end of line, fit for a terminal.
        text: &'a str,
    },
    /// So many bytes of sandboxes that ended were more than [`ConsoleRate::Limited`]
    /// lets pass, and are lost.
    Dropped {
        /// Number of bytes, before they would have been escaped.
        bytes: u64,
    },
}

impl fmt::Display for ConsoleOutput<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line { text, .. } => write!(f, "kernel: {text}"),
            Self::Dropped { bytes } => write!(
                f,
                "{bytes} bytes of the consoles of sandboxes that have ended were dropped: \
                 they wrote more than is passed on"
            ),
        }
    }
}

impl Console {
    /// Passes what sandboxes write to `sink`, line by line, on a thread that lives
    /// until this console, and every sandbox that has one of its pipes, are gone.
    /// While `sink` blocks, sandboxes that write much wait.
    ///
    /// # Errors
    /// There are no descriptors or threads left.
    pub fn lines(
        rate: ConsoleRate,
        sink: impl FnMut(&ConsoleOutput<'_>) + Send + 'static,
    ) -> io::Result<Self> {
        Ok(Self::Lines(Arc::new(ConsoleReader::start(rate, Box::new(sink))?)))
    }

    /// Waits until every sandbox that had one of its pipes has ended and what it
    /// wrote was passed on; false if `timeout` passes first.
    pub fn wait_ended(&self, timeout: Duration) -> bool {
        match self {
            Self::Pipe => true,
            Self::Lines(reader) => reader.wait_ended(timeout),
        }
    }

    /// Makes a pipe; the host's side of it, and the write end for the sandbox.
    pub(crate) fn open(&self) -> io::Result<(HostEnd, OwnedFd)> {
        // Closed on exec, so no other process inherits the read end, which would
        // let it read what the sandbox writes.
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&read, true)?;
        if let Self::Lines(reader) = self
            && reader.rate() == ConsoleRate::Limited
        {
            fcntl_setpipe_size(&read, PIPE_BYTES)?;
        }
        Ok((self.adopt(read)?, write))
    }

    /// The host's side of the console of a sandbox that another daemon has made, from the
    /// read end of its pipe.
    pub(crate) fn adopt(&self, read: OwnedFd) -> io::Result<HostEnd> {
        Ok(match self {
            Self::Pipe => HostEnd::Pipe(read),
            Self::Lines(reader) => HostEnd::Read(reader.register(read)?),
        })
    }
}

/// The host's side of the console of one sandbox.
#[derive(Debug)]
pub(crate) enum HostEnd {
    /// The read end of its pipe.
    Pipe(OwnedFd),
    /// A [`ConsoleReader`] has it.
    Read(Tag),
}

impl HostEnd {
    /// The read end, if nobody reads it yet.
    pub fn pipe(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Pipe(read) => Some(read.as_fd()),
            Self::Read(_) => None,
        }
    }

    /// The read end, whoever reads it, for the daemon that comes after this one.
    pub fn for_successor(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Pipe(read) => read.try_clone(),
            Self::Read(tag) => tag.pipe().ok_or(io::ErrorKind::BrokenPipe)?.try_clone(),
        }
    }

    /// Says which process it belongs to.
    pub fn set_pid(&self, pid: u32) {
        if let Self::Read(tag) = self {
            tag.set_pid(pid);
        }
    }

    /// What the process is called, if somebody has said so.
    pub fn label(&self) -> Option<&Arc<str>> {
        match self {
            Self::Pipe(_) => None,
            Self::Read(tag) => tag.label(),
        }
    }

    /// Says what the process is called.
    pub fn set_label(&self, label: &Arc<str>) {
        if let Self::Read(tag) = self {
            tag.set_label(label.clone());
        }
    }
}
