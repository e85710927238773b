//! Standard streams that lead to the host: sockets of this boot, which programs see as pipes.
//!
//! In a copy the host gives them other sockets, or says that they are at their end
//! ([`Streams`]). Whoever reads or writes before that waits.

use alloc::string::String;
use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;

use crate::errno::{Errno, Result};
use crate::fs::anonymous::pipe_stat;
use crate::fs::dentry::Dentry;
use crate::fs::file::{Events, File, OpenFile, OpenFlags, Stat};
use crate::fs::inode::{Attributes, FileType, FilesystemId, Inode, Statfs};
use crate::fs::path::Path;
use crate::io::{Sink, Source};
use crate::platform::machine::{HostFd, HostFiles, Machine, Peek};
use crate::state::{OfBoot, kernel};
use crate::sync::KernelCell;
use crate::task::host_poll::{HostFile, Kind};
use crate::task::signal;
use crate::task::wait::WaitQueue;

/// `PIPEFS_MAGIC` (statfs(2)).
const MAGIC: i64 = 0x5049_5045;
/// `SHUT_RDWR` (shutdown(2)).
const BOTH: u32 = 2;

/// A socket that leads to the host. It is closed with this.
pub struct HostSocket {
    fd: OfBoot<HostFd>,
    host: Arc<HostFile>,
}

impl HostSocket {
    /// One that has come with a message.
    pub fn new(fd: HostFd) -> Self {
        Self::with_queue(fd, Arc::new(WaitQueue::new()))
    }

    /// The same, whose changes wake `queue`.
    fn with_queue(fd: HostFd, queue: Arc<WaitQueue>) -> Self {
        let host = HostFile::of_this_boot(fd, Kind::Socket, queue);
        Self { fd: OfBoot::new(fd), host }
    }

    fn is_of_this_boot(&self) -> bool {
        self.fd.get().is_some()
    }

    /// Reads; `EAGAIN`. In another boot it is at its end.
    pub fn read(&self, sink: &mut Sink<'_>) -> Result<usize> {
        match self.host.read(sink, Peek::No) {
            Err(Errno::ECONNRESET) => Ok(0),
            outcome => outcome,
        }
    }

    /// Writes; `EAGAIN`, or `EPIPE` once nobody reads.
    pub fn write(&self, source: &mut Source<'_>) -> Result<usize> {
        match self.host.write(source) {
            Err(Errno::ECONNRESET) => Err(Errno::EPIPE),
            outcome => outcome,
        }
    }

    /// What is possible.
    pub fn poll(&self) -> Events {
        self.host.poll()
    }

    /// Where to wait for that.
    pub fn queue(&self) -> &WaitQueue {
        self.host.queue()
    }
}

impl Drop for HostSocket {
    fn drop(&mut self) {
        if let Some(&fd) = self.fd.get() {
            // A twin may hold it, too.
            let _ = Machine::shutdown(fd, BOTH);
            Machine::close(fd);
        }
    }
}

/// The sandbox' end of a stream or a terminal, whatever socket that has in this boot.
pub struct StreamEnd {
    /// `None`: that has ended, while the host is about to give another one.
    socket: KernelCell<Option<Arc<HostSocket>>>,
    queue: Arc<WaitQueue>,
}

impl StreamEnd {
    /// One over a socket of this boot, which copies of the sandbox may get anew.
    pub fn new(fd: HostFd) -> Arc<Self> {
        let queue = Arc::new(WaitQueue::new());
        let socket = Arc::new(HostSocket::with_queue(fd, queue.clone()));
        let end = Arc::new(Self { socket: KernelCell::new(Some(socket)), queue });
        kernel().remote.streams.note(&end);
        end
    }

    /// It has this socket from now on.
    pub fn go_on(&self, fd: HostFd) {
        let socket = Arc::new(HostSocket::with_queue(fd, self.queue.clone()));
        let earlier = self.socket.borrow_mut().replace(socket);
        drop(earlier);
        self.queue.wake_all(Events::all());
    }

    /// The socket of this boot, if there is one; `EAGAIN` as long as the host may still give one.
    fn socket(&self) -> Result<Option<Arc<HostSocket>>> {
        let socket = self.socket.borrow_mut().clone().filter(|socket| socket.is_of_this_boot());
        match socket.is_none() && kernel().remote.streams.are_awaited() {
            true => Err(Errno::EAGAIN),
            false => Ok(socket),
        }
    }

    /// The socket has ended. That is no end if the host is about to give another one.
    fn ended<T>(&self, outcome: Result<T>) -> Result<T> {
        if !kernel().remote.streams.are_awaited() {
            return outcome;
        }
        let ended = self.socket.borrow_mut().take();
        drop(ended);
        Err(Errno::EAGAIN)
    }

    /// Reads; `EAGAIN`.
    pub fn read(&self, sink: &mut Sink<'_>) -> Result<usize> {
        let Some(socket) = self.socket()? else { return Ok(0) };
        let is_wanted = sink.remaining() > 0;
        match socket.read(sink) {
            Ok(0) if is_wanted => self.ended(Ok(0)),
            outcome => outcome,
        }
    }

    /// Writes; `EAGAIN`, or `EPIPE` once nobody reads.
    pub fn write(&self, source: &mut Source<'_>) -> Result<usize> {
        let Some(socket) = self.socket()? else { return Err(Errno::EPIPE) };
        match socket.write(source) {
            Err(Errno::EPIPE) => self.ended(Err(Errno::EPIPE)),
            outcome => outcome,
        }
    }

    fn poll(&self) -> Events {
        const END: Events = Events::HUP.union(Events::ERR).union(Events::RDHUP);
        match self.socket() {
            Err(_) => Events::empty(),
            Ok(None) => END | Events::IN | Events::RDNORM | Events::OUT | Events::WRNORM,
            Ok(Some(socket)) if kernel().remote.streams.are_awaited() => socket.poll() - END,
            Ok(Some(socket)) => socket.poll(),
        }
    }

    /// Where to wait for what is possible.
    pub fn queue(&self) -> &WaitQueue {
        &self.queue
    }
}

/// The ends of all streams and terminals. Saved.
#[derive(Default)]
pub struct Streams {
    ends: KernelCell<Vec<Weak<StreamEnd>>>,
    /// The host is about to say which of them go on: in a copy, and while one daemon follows another.
    awaited: KernelCell<Option<OfBoot<()>>>,
}

impl Streams {
    fn note(&self, end: &Arc<StreamEnd>) {
        let mut ends = self.ends.borrow_mut();
        ends.retain(|end| end.strong_count() > 0);
        ends.push(Arc::downgrade(end));
    }

    /// Has those of an earlier boot, and those whose sockets end, wait until the host has said which go
    /// on.
    pub fn wait_for_host(&self) {
        *self.awaited.borrow_mut() = Some(OfBoot::new(()));
    }

    /// Whether the host is still to say that.
    pub fn are_awaited(&self) -> bool {
        self.awaited.borrow_mut().as_ref().is_some_and(|of| of.get().is_some())
    }

    /// The host has said it: the others are at their end.
    pub fn end_others(&self) {
        *self.awaited.borrow_mut() = None;
        let ends: Vec<_> = self.ends.borrow_mut().iter().filter_map(Weak::upgrade).collect();
        ends.iter().for_each(|end| end.queue.wake_all(Events::all()));
    }
}

/// An open standard stream.
pub struct RemoteStream {
    end: Arc<StreamEnd>,
    ino: u64,
}

impl File for RemoteStream {
    fn read(&self, sink: &mut Sink<'_>, _: u64) -> Result<usize> {
        self.end.read(sink)
    }

    fn write(&self, source: &mut Source<'_>, _: u64) -> Result<usize> {
        let outcome = self.end.write(source);
        if outcome == Err(Errno::EPIPE) {
            signal::send_sigpipe();
        }
        outcome
    }

    fn poll(&self) -> Events {
        self.end.poll()
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(self.end.queue())
    }

    fn stat(&self) -> Result<Stat> {
        Ok(pipe_stat(self.ino))
    }

    fn description(&self) -> String {
        alloc::format!("pipe:[{}]", self.ino)
    }
}

/// The inode behind a stream, so that `/dev/stdout` and `/proc/self/fd/1` lead to it.
struct StreamInode(Arc<RemoteStream>);

impl Inode for StreamInode {
    fn attributes(&self) -> Attributes {
        Attributes::from_stat(&pipe_stat(self.0.ino))
    }
    fn file_type(&self) -> FileType {
        FileType::Fifo
    }
    fn filesystem(&self) -> FilesystemId {
        FilesystemId(u32::MAX)
    }
    fn open(self: Arc<Self>, _: OpenFlags) -> Result<Arc<dyn File>> {
        Ok(self.0.clone())
    }
    fn statfs(&self) -> Statfs {
        Statfs { kind: MAGIC, bsize: 4096, frsize: 4096, namelen: 255, ..Statfs::default() }
    }
}

/// Opens a stream that leads to the host, to be read or written by the guest.
pub fn open(end: Arc<StreamEnd>, flags: OpenFlags) -> Arc<OpenFile> {
    let stream = Arc::new(RemoteStream { end, ino: kernel().net.inodes.next() });
    let name = stream.description();
    let inode = Arc::new(StreamInode(stream.clone()));
    let path = Path::new(Dentry::anonymous(inode, name.as_bytes()));
    OpenFile::new(stream, flags | OpenFlags::LARGEFILE, Some(path))
}
