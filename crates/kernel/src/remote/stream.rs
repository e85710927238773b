//! Standard streams that lead to the host: sockets of this boot, which programs see as pipes.

use alloc::string::String;
use alloc::sync::Arc;

use crate::errno::{Errno, Result};
use crate::fs::anonymous::pipe_stat;
use crate::fs::dentry::Dentry;
use crate::fs::file::{Events, File, OpenFile, OpenFlags, Stat};
use crate::fs::inode::{Attributes, FileType, FilesystemId, Inode, Statfs};
use crate::fs::path::Path;
use crate::io::{Sink, Source};
use crate::platform::machine::{HostFd, HostFiles, Machine, Peek};
use crate::state::{OfBoot, kernel};
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
        let host = HostFile::of_this_boot(fd, Kind::Socket, Arc::new(WaitQueue::new()));
        Self { fd: OfBoot::new(fd), host }
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

/// An open standard stream.
pub struct RemoteStream {
    socket: HostSocket,
    ino: u64,
}

impl File for RemoteStream {
    fn read(&self, sink: &mut Sink<'_>, _: u64) -> Result<usize> {
        self.socket.read(sink)
    }

    fn write(&self, source: &mut Source<'_>, _: u64) -> Result<usize> {
        let outcome = self.socket.write(source);
        if outcome == Err(Errno::EPIPE) {
            signal::send_sigpipe();
        }
        outcome
    }

    fn poll(&self) -> Events {
        self.socket.poll()
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(self.socket.queue())
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

/// Opens a stream over a socket of the host, to be read or written by the guest.
pub fn open(socket: HostSocket, flags: OpenFlags) -> Arc<OpenFile> {
    let stream = Arc::new(RemoteStream { socket, ino: kernel().net.inodes.next() });
    let name = stream.description();
    let inode = Arc::new(StreamInode(stream.clone()));
    let path = Path::new(Dentry::anonymous(inode, name.as_bytes()));
    OpenFile::new(stream, flags | OpenFlags::LARGEFILE, Some(path))
}
