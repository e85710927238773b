//! Standard streams that lead to the host: sockets of this boot, which programs see as pipes.
//!
//! In a copy, and under the next daemon, the host gives them other sockets, or says that they are at
//! their end ([`Streams`]). Whoever reads or writes before that waits.

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

    /// Whether nothing more can be read of it.
    fn has_ended(&self) -> bool {
        const GONE: Events = Events::HUP.union(Events::RDHUP);
        let looked = || self.host.read(&mut Sink::kernel(&mut [0]), Peek::Yes);
        self.poll().intersects(GONE) && matches!(looked(), Ok(0) | Err(Errno::ECONNRESET))
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

/// How many sockets of earlier hosts are kept at most for what was not read of them.
const EARLIER_MAX: usize = 4;

/// The sandbox' end of a stream or a terminal, whatever socket that has in this boot.
pub struct StreamEnd {
    /// The newest last; those before it may have bytes that were not read. Those of an earlier boot
    /// count as none.
    sockets: KernelCell<Vec<Arc<HostSocket>>>,
    queue: Arc<WaitQueue>,
    /// Whether the sandbox reads from it.
    is_input: bool,
}

impl StreamEnd {
    /// One over a socket of this boot, which copies of the sandbox may get anew.
    pub fn new(fd: HostFd, is_input: bool) -> Arc<Self> {
        let queue = Arc::new(WaitQueue::new());
        let socket = Arc::new(HostSocket::with_queue(fd, queue.clone()));
        let end = Arc::new(Self { sockets: KernelCell::new(Vec::from([socket])), queue, is_input });
        kernel().remote.streams.note(&end);
        end
    }

    /// It has this socket from now on, behind what was not read yet.
    pub fn go_on(&self, fd: HostFd) {
        let socket = Arc::new(HostSocket::with_queue(fd, self.queue.clone()));
        let mut sockets = core::mem::take(&mut *self.sockets.borrow_mut());
        sockets.retain(|socket| self.is_input && socket.is_of_this_boot());
        sockets.drain(..sockets.len().saturating_sub(EARLIER_MAX));
        sockets.push(socket);
        *self.sockets.borrow_mut() = sockets;
        self.queue.wake_all(Events::all());
    }

    /// The first and the last socket of this boot, if there are some; `EAGAIN` as long as the host may
    /// still give one.
    fn sockets(&self) -> Result<Option<[Arc<HostSocket>; 2]>> {
        let sockets = self.sockets.borrow_mut();
        let mut of_this_boot = sockets.iter().filter(|socket| socket.is_of_this_boot());
        match (of_this_boot.next(), kernel().remote.streams.are_awaited()) {
            (None, true) => Err(Errno::EAGAIN),
            (None, false) => Ok(None),
            (Some(first), _) => {
                Ok(Some([first.clone(), of_this_boot.next_back().unwrap_or(first).clone()]))
            }
        }
    }

    /// A socket has ended; whether that is the end of the stream. It is not, if the host has given
    /// another one or will.
    fn is_over(&self, socket: &Arc<HostSocket>) -> bool {
        let mut sockets = self.sockets.borrow_mut();
        let is_last = sockets.last().is_some_and(|last| Arc::ptr_eq(last, socket));
        if is_last && !kernel().remote.streams.are_awaited() {
            return true;
        }
        sockets.retain(|other| !Arc::ptr_eq(other, socket));
        false
    }

    /// Forgets sockets that have ended, so that nobody is told of bytes that do not come.
    fn forget_ended(&self) {
        while let Ok(Some([first, last])) = self.sockets() {
            let may_end = !Arc::ptr_eq(&first, &last) || kernel().remote.streams.are_awaited();
            if !self.is_input || !may_end || !first.has_ended() || self.is_over(&first) {
                return;
            }
        }
    }

    /// Reads; `EAGAIN`.
    pub fn read(&self, sink: &mut Sink<'_>) -> Result<usize> {
        while let Some([socket, _]) = self.sockets()? {
            let is_wanted = sink.remaining() > 0;
            match socket.read(sink) {
                Ok(0) if is_wanted && !self.is_over(&socket) => {}
                outcome => return outcome,
            }
        }
        Ok(0)
    }

    /// Writes; `EAGAIN`, or `EPIPE` once nobody reads.
    pub fn write(&self, source: &mut Source<'_>) -> Result<usize> {
        while let Some([_, socket]) = self.sockets()? {
            match socket.write(source) {
                // A terminal's may have bytes that were not read.
                Err(Errno::EPIPE) if self.is_input && kernel().remote.streams.are_awaited() => {
                    return Err(Errno::EAGAIN);
                }
                Err(Errno::EPIPE) if !self.is_over(&socket) => {}
                outcome => return outcome,
            }
        }
        Err(Errno::EPIPE)
    }

    fn poll(&self) -> Events {
        const END: Events = Events::HUP.union(Events::ERR).union(Events::RDHUP);
        const IN: Events = Events::IN.union(Events::RDNORM);
        const OUT: Events = Events::OUT.union(Events::WRNORM);
        self.forget_ended();
        match self.sockets() {
            Err(_) => Events::empty(),
            Ok(None) => END | IN | OUT,
            Ok(Some([first, last])) if !Arc::ptr_eq(&first, &last) => {
                first.poll() & IN | last.poll() & OUT
            }
            Ok(Some([socket, _])) if kernel().remote.streams.are_awaited() => socket.poll() - END,
            Ok(Some([socket, _])) => socket.poll(),
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
    let path = Path::anonymous(Dentry::anonymous(inode, name.as_bytes()));
    OpenFile::new(stream, flags | OpenFlags::LARGEFILE, Some(path))
}
