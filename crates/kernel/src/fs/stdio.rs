//! The standard streams: files over host descriptors that come with the boot.
//!
//! The file itself is saved; the descriptor is asked for anew at every use,
//! since each boot brings its own. A stream without one in this boot behaves
//! like `/dev/null`. For a function that reads its request from standard input,
//! a client brings standard input and output; until then reading waits.

use alloc::string::String;
use alloc::sync::Arc;

use thaw_abi::control::{FLAG_STDERR_TTY, FLAG_STDIN_TTY, FLAG_STDOUT_TTY};

use super::dentry::Dentry;
use super::file::{Events, File, OpenFile, OpenFlags, Stat};
use super::inode::{Attributes, FileType, FilesystemId, Inode, Statfs};
use super::path::Path;
use super::tty::host::HostTerminal;
use super::tty::job;
use crate::errno::{Errno, Result};
use crate::host::phases;
use crate::io::{Sink, Source};
use crate::platform::machine::{HostFd, HostFiles, Machine, Peek};
use crate::platform::user::UserAddress;
use crate::task::host_poll::{Handle, HostFile, Kind as HostKind};
use crate::task::signal;
use crate::task::wait::WaitQueue;

/// Number of a standard stream: 0, 1 or 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub usize);

impl Stream {
    fn is_terminal(self) -> bool {
        let flag = [FLAG_STDIN_TTY, FLAG_STDOUT_TTY, FLAG_STDERR_TTY][self.0.min(2)];
        crate::state::kernel().config.borrow_mut().flags & flag != 0
    }

    fn descriptor(self) -> Option<HostFd> {
        crate::host::stdio::descriptor(self.0)
    }

    /// Whether it has no descriptor yet, but will.
    fn waits_for_request(self) -> bool {
        self.0 == 0 && self.descriptor().is_none() && is_way_of_requests()
    }
}

fn is_way_of_requests() -> bool {
    crate::state::kernel().config.get().reads_requests()
}

/// A request has come: standard input and output lead to its client.
pub fn deliver_request(fd: HostFd) {
    let polls = &crate::state::kernel().host_poll;
    if crate::host::stdio::descriptor(0).is_some() {
        // One copy serves one request; the host knows that.
        crate::console!("thaw kernel: a second request for standard input is dropped");
        return Machine::close(fd);
    }
    for stream in [0, 1] {
        crate::host::stdio::set(stream.into(), fd.0);
        polls.renewed(stream);
    }
}

/// Whether the program waits for its request.
pub fn waits_for_input() -> bool {
    Stream(0).waits_for_request() && crate::state::kernel().host_poll.is_awaited(0)
}

/// An open standard stream.
pub struct StandardStream {
    stream: Stream,
    host: Arc<HostFile>,
}

impl StandardStream {
    fn new(stream: Stream) -> Arc<Self> {
        let queue = Arc::new(WaitQueue::new());
        let host = HostFile::new(Handle::Standard(stream.0 as u8), HostKind::MayBlock, queue);
        crate::state::kernel().host_poll.register(&host);
        Arc::new(Self { stream, host })
    }

    fn is_terminal(&self) -> bool {
        self.stream.is_terminal()
    }

    fn attributes(&self) -> Attributes {
        if self.is_terminal() {
            return super::tty::devpts::host_attributes();
        }
        Attributes {
            dev: 14,
            ino: 3 + self.stream.0 as u64,
            mode: 0o010600,
            nlink: 1,
            ..Attributes::default()
        }
    }
}

/// The host's terminal, as far as the kernel knows it.
fn host_terminal() -> &'static HostTerminal {
    &crate::state::kernel().fs.terminals.host
}

impl File for StandardStream {
    fn read(&self, sink: &mut Sink<'_>, _: u64) -> Result<usize> {
        if self.stream.waits_for_request() {
            return Err(Errno::EAGAIN);
        }
        if self.stream.descriptor().is_none() {
            return Ok(0);
        }
        if self.is_terminal() {
            job::check_read(&host_terminal().job)?;
        }
        self.host.read(sink, Peek::No)
    }

    fn write(&self, source: &mut Source<'_>, _: u64) -> Result<usize> {
        if self.stream.descriptor().is_none() {
            let count = source.remaining();
            source.advance(count);
            return Ok(count);
        }
        let outcome = self.host.write(source);
        if outcome == Err(Errno::EPIPE) {
            signal::send_sigpipe();
        }
        if self.stream.0 == 1 && is_way_of_requests() {
            phases::first_byte();
        }
        outcome
    }

    fn poll(&self) -> Events {
        if self.stream.waits_for_request() {
            return Events::empty();
        }
        match self.stream.descriptor() {
            Some(_) => self.host.poll(),
            None => Events::IN | Events::OUT | Events::RDNORM | Events::WRNORM,
        }
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(self.host.queue())
    }

    fn stat(&self) -> Result<Stat> {
        Ok(self.attributes().to_stat())
    }

    fn ioctl(&self, request: u32, argument: UserAddress) -> Result<u64> {
        if !self.is_terminal() {
            return Err(Errno::ENOTTY);
        }
        host_terminal().ioctl(request, argument)
    }

    fn description(&self) -> String {
        if self.is_terminal() {
            String::from("/dev/pts/0")
        } else {
            alloc::format!("pipe:[{}]", 3 + self.stream.0)
        }
    }
}

/// The inode behind a standard stream, so that `/dev/stdout` and
/// `/proc/self/fd/1` lead to it.
struct StreamInode {
    file: Arc<StandardStream>,
}

impl Inode for StreamInode {
    fn attributes(&self) -> Attributes {
        self.file.attributes()
    }
    fn file_type(&self) -> FileType {
        if self.file.is_terminal() { FileType::CharacterDevice } else { FileType::Fifo }
    }
    fn filesystem(&self) -> FilesystemId {
        FilesystemId(u32::MAX)
    }
    fn open(self: Arc<Self>, _: OpenFlags) -> Result<Arc<dyn File>> {
        Ok(self.file.clone())
    }
    fn statfs(&self) -> Statfs {
        Statfs { kind: 0x5049_5045, bsize: 4096, frsize: 4096, namelen: 255, ..Statfs::default() }
    }
}

/// Opens a standard stream for the first process of a sandbox.
pub fn open(stream: Stream) -> Arc<OpenFile> {
    let file = StandardStream::new(stream);
    let flags = if file.is_terminal() {
        OpenFlags::RDWR
    } else if stream.0 == 0 {
        OpenFlags::empty()
    } else {
        OpenFlags::WRONLY
    };
    let name = file.description();
    let inode = Arc::new(StreamInode { file: file.clone() });
    let path = Path::anonymous(Dentry::anonymous(inode, name.as_bytes()));
    OpenFile::new(file, flags | OpenFlags::LARGEFILE, Some(path))
}

/// `/dev/console`: standard error, wherever the host has put it.
pub fn console() -> Option<Arc<dyn File>> {
    Some(StandardStream::new(Stream(2)))
}

/// The first standard stream that is a terminal, opened anew.
pub fn terminal() -> Option<Arc<dyn File>> {
    let stream = [0, 1, 2].map(Stream).into_iter().find(|stream| stream.is_terminal())?;
    Some(StandardStream::new(stream))
}
