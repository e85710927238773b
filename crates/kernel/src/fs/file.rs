//! Open files: what a file descriptor refers to.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::any::Any;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use bitflags::bitflags;

use super::inode::FileType;
use super::inotify::Mask;
use super::notify;
use crate::errno::{Errno, Result};
use crate::io::{Sink, Source};
use crate::mm::backing::{Holder, MmapSource};
use crate::platform::saved::Saved;
use crate::platform::user::UserAddress;
use crate::sync::KernelCell;
pub use crate::task::wait::Events;
use crate::task::wait::{WaitQueue, wait_until};
use crate::time::Instant;

bitflags! {
    /// Flags of an open file description, with the values of open(2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct OpenFlags: u32 {
        /// Write only.
        const WRONLY = 0o1;
        /// Read and write.
        const RDWR = 0o2;
        /// Create if missing.
        const CREAT = 0o100;
        /// Fail if it exists.
        const EXCL = 0o200;
        /// Do not become the controlling terminal.
        const NOCTTY = 0o400;
        /// Truncate.
        const TRUNC = 0o1000;
        /// Write at the end.
        const APPEND = 0o2000;
        /// Do not block.
        const NONBLOCK = 0o4000;
        /// Synchronous data writes.
        const DSYNC = 0o10000;
        /// Signal-driven I/O.
        const ASYNC = 0o20000;
        /// Direct I/O.
        const DIRECT = 0o40000;
        /// Accepted and meaningless on 64-bit systems.
        const LARGEFILE = 0o100000;
        /// Must be a directory.
        const DIRECTORY = 0o200000;
        /// Do not follow a final symbolic link.
        const NOFOLLOW = 0o400000;
        /// Do not update the access time.
        const NOATIME = 0o1000000;
        /// Close on execve; a flag of the descriptor, not the description.
        const CLOEXEC = 0o2000000;
        /// Synchronous writes.
        const SYNC = 0o4010000;
        /// A handle to a path only.
        const PATH = 0o10000000;
        /// Unnamed temporary file.
        const TMPFILE = 0o20200000;
        const _ = !0;
    }
}

impl OpenFlags {
    /// Whether the access mode allows reading.
    pub fn can_read(self) -> bool {
        self.bits() & 0o3 != 0o1 && !self.contains(Self::PATH)
    }

    /// Whether the access mode allows writing.
    pub fn can_write(self) -> bool {
        self.bits() & 0o3 != 0 && !self.contains(Self::PATH)
    }
}

/// `struct stat` of the x86-64 ABI (stat(2)).
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Stat {
    pub dev: u64,
    pub ino: u64,
    pub nlink: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub pad0: u32,
    pub rdev: u64,
    pub size: i64,
    pub blksize: i64,
    pub blocks: i64,
    pub atime_sec: i64,
    pub atime_nsec: i64,
    pub mtime_sec: i64,
    pub mtime_nsec: i64,
    pub ctime_sec: i64,
    pub ctime_nsec: i64,
    pub reserved: [i64; 3],
}

/// A directory entry as `getdents64` reports it.
pub struct Dirent {
    /// Inode number.
    pub ino: u64,
    /// Position after this entry, for `lseek`.
    pub next_offset: u64,
    /// `DT_*`.
    pub file_type: u8,
    /// Name.
    pub name: Vec<u8>,
}

/// The behaviour of an open file: a regular file, directory, pipe, socket…
///
/// No method blocks: what cannot be done now returns `EAGAIN`, and
/// [`OpenFile`] waits on [`File::wait_queue`] where the flags ask for that.
pub trait File: Any + Saved + Send + Sync {
    /// Reads. `offset` is meaningful for seekable files only. `Ok(0)` is the end.
    fn read(&self, _sink: &mut Sink<'_>, _offset: u64) -> Result<usize> {
        Err(Errno::EINVAL)
    }

    /// Writes. `offset` is meaningful for seekable files only.
    fn write(&self, _source: &mut Source<'_>, _offset: u64) -> Result<usize> {
        Err(Errno::EINVAL)
    }

    /// Writes at the end, wherever that is when others write there, too: where, and how much.
    /// `None`: [`File::write`] at [`File::size`] does.
    fn append(&self, _source: &mut Source<'_>) -> Option<Result<(u64, usize)>> {
        None
    }

    /// What takes locks of the file that other sandboxes see, if any can.
    fn host_locks(&self) -> Option<Arc<dyn super::locks::HostLocks>> {
        None
    }

    /// Whether the file has a position (lseek(2)).
    fn seekable(&self) -> bool {
        false
    }

    /// Whether using a seekable file moves its position. Devices such as
    /// `/dev/null` stay at 0 whatever is done.
    fn keeps_position(&self) -> bool {
        self.seekable()
    }

    /// The size that `SEEK_END` and `O_APPEND` refer to.
    fn size(&self) -> u64 {
        0
    }

    /// What is possible without blocking.
    fn poll(&self) -> Events {
        Events::IN | Events::OUT | Events::RDNORM | Events::WRNORM
    }

    /// Whether `O_ASYNC` has an effect (fcntl(2), F_SETFL). Signals never tell of signals.
    fn tells_async(&self) -> bool {
        true
    }

    /// Where to wait for [`File::poll`] to change; `None` if it never does
    /// (then epoll refuses the file with `EPERM`).
    fn wait_queue(&self) -> Option<&WaitQueue> {
        None
    }

    /// Attributes: those of a file without a place in any file system.
    fn stat(&self) -> Result<Stat> {
        Ok(super::anonymous::anonymous_stat())
    }

    /// ioctl(2).
    fn ioctl(&self, _request: u32, _argument: UserAddress) -> Result<u64> {
        Err(Errno::ENOTTY)
    }

    /// Whether shared mappings may be written to: seals forbid it.
    fn allows_shared_writes(&self) -> bool {
        true
    }

    /// Whether the file can be mapped `MAP_SHARED`.
    fn allows_shared_mappings(&self) -> bool {
        true
    }

    /// Waits until what was written is safe (fsync(2)).
    fn sync(&self) -> Result<()> {
        Ok(())
    }

    /// What `mmap` maps.
    fn mmap_source(&self) -> Result<MmapSource> {
        Err(Errno::ENODEV)
    }

    /// Directory entries from `offset` on, passed to `emit` until it returns `false`.
    fn read_directory(&self, _offset: u64, _emit: &mut dyn FnMut(Dirent) -> bool) -> Result<()> {
        Err(Errno::ENOTDIR)
    }

    /// Changes the size (ftruncate(2)).
    fn truncate(&self, _size: u64) -> Result<()> {
        Err(Errno::EINVAL)
    }

    /// Limits on waiting, from `SO_RCVTIMEO` and `SO_SNDTIMEO`, in nanoseconds.
    fn read_timeout_ns(&self) -> Option<u64> {
        None
    }

    /// Whether a read that runs into [`File::read_timeout_ns`] ends with
    /// nothing instead of `EAGAIN`: terminals (termios(3), `VTIME`).
    fn timeout_ends_read(&self) -> bool {
        false
    }

    /// Bytes that are there for a read that waits for more. Whenever there are others, the time
    /// for the next ones begins anew.
    fn bytes_waiting(&self) -> usize {
        0
    }

    /// Takes bytes for a read that waited for more and is to end.
    fn take_waiting(&self, _sink: &mut Sink<'_>) -> Result<usize> {
        Ok(0)
    }

    /// See [`File::read_timeout_ns`].
    fn write_timeout_ns(&self) -> Option<u64> {
        None
    }

    /// What `/proc/PID/fdinfo/N` says besides position and flags (proc_pid_fdinfo(5)): whole lines.
    fn details(&self) -> String {
        String::new()
    }

    /// What `/proc/self/fd/N` shows for files without a path, such as
    /// `pipe:[7]` or `anon_inode:[eventfd]`.
    fn description(&self) -> String;
}

/// An open file description (open(2)): shared by all descriptors made from it
/// by `dup` and `fork`.
pub struct OpenFile {
    /// The behaviour.
    pub file: Arc<dyn File>,
    /// Where it was opened, for `/proc`, `fchdir` and the `*at` calls.
    pub path: Option<super::path::Path>,
    flags: AtomicU32,
    position: KernelCell<u64>,
    /// Advisory locks may belong to this description, to be given up with it.
    has_locks: AtomicBool,
    /// Whether it counts among those that may write to its mount.
    is_writer: bool,
    /// `O_ASYNC`.
    pub(super) async_io: super::async_io::AsyncIo,
}

impl OpenFile {
    /// A new description at position 0.
    pub fn new(
        file: Arc<dyn File>,
        flags: OpenFlags,
        path: Option<super::path::Path>,
    ) -> Arc<Self> {
        let is_writer = flags.can_write() && mount_written_to(path.as_ref()).is_some();
        if let Some(mount) = mount_written_to(path.as_ref()).filter(|_| is_writer) {
            mount.add_writer();
        }
        Arc::new(Self {
            file,
            path,
            flags: AtomicU32::new(flags.bits()),
            position: KernelCell::new(0),
            has_locks: AtomicBool::new(false),
            is_writer,
            async_io: Default::default(),
        })
    }

    /// Access mode and status flags.
    pub fn flags(&self) -> OpenFlags {
        OpenFlags::from_bits_retain(self.flags.load(Ordering::Relaxed))
    }

    /// Replaces the status flags (`F_SETFL`).
    pub fn set_flags(&self, flags: OpenFlags) {
        self.flags.store(flags.bits(), Ordering::Relaxed);
    }

    /// The file position.
    pub fn position(&self) -> u64 {
        self.position.get()
    }

    /// Moves the file position.
    pub fn set_position(&self, position: u64) {
        if !self.file.keeps_position() {
            return;
        }
        self.position.set(position);
    }

    /// Notes that the description is about to hold advisory locks.
    pub fn note_lock(&self) {
        self.has_locks.store(true, Ordering::Relaxed);
    }

    /// What `/proc/self/maps` and `/proc/self/fd/N` call the file.
    pub fn display_path(&self) -> Vec<u8> {
        match &self.path {
            Some(path) => path.absolute_name(&super::context::own_root()).display(),
            None => self.file.description().into_bytes(),
        }
    }

    /// What a mapping of the file holds on to.
    pub fn holder(&self) -> Option<Arc<dyn Holder>> {
        let mount = self.path.as_ref()?.mount()?.clone();
        // As on Linux, where it holds the open file.
        if self.is_writer {
            return Some(super::mount::Writer::new(mount));
        }
        Some(mount)
    }

    /// The file as one particular kind.
    pub fn downcast<T: File>(&self) -> Option<&T> {
        let file: &dyn Any = &*self.file;
        file.downcast_ref()
    }

    /// read(2): from the current position, waiting for data if the flags say so.
    pub fn read(&self, sink: &mut Sink<'_>) -> Result<usize> {
        if !self.flags().can_read() {
            return Err(Errno::EBADF);
        }
        if self.file.seekable() {
            let at = self.position();
            let count = self.file.read(sink, at)?;
            self.set_position(at + count as u64);
            self.note_read(count);
            return Ok(count);
        }
        let count = loop {
            if let Some(count) = self.read_stream(sink)? {
                break count;
            }
        };
        self.note_read(count);
        Ok(count)
    }

    /// Reads from what is no seekable file; `None` if bytes have come that do not suffice.
    fn read_stream(&self, sink: &mut Sink<'_>) -> Result<Option<usize>> {
        let timeout = self.file.read_timeout_ns();
        let mut waiting = None;
        let outcome = self.blocking(timeout, || match self.file.read(sink, 0) {
            Err(Errno::EAGAIN) => {
                let now = self.file.bytes_waiting();
                let has_changed = waiting.replace(now).is_some_and(|before| before != now);
                if has_changed { Ok(None) } else { Err(Errno::EAGAIN) }
            }
            outcome => outcome.map(Some),
        });
        let error = match outcome {
            // It has waited, or would have.
            Err(error @ (Errno::EAGAIN | Errno::ERESTARTSYS)) if waiting.is_some() => error,
            outcome => return outcome,
        };
        let count = self.file.take_waiting(sink)?;
        let is_over = error == Errno::EAGAIN
            && timeout.is_some()
            && !self.flags().contains(OpenFlags::NONBLOCK)
            && self.file.timeout_ends_read();
        if count > 0 || is_over { Ok(Some(count)) } else { Err(error) }
    }

    /// pread(2).
    pub fn read_at(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        if !self.file.seekable() {
            return Err(Errno::ESPIPE);
        }
        if !self.flags().can_read() {
            return Err(Errno::EBADF);
        }
        let count = self.file.read(sink, offset)?;
        self.note_read(count);
        Ok(count)
    }

    /// Tells those who watch the file that it was read.
    fn note_read(&self, count: usize) {
        if count > 0 {
            notify::open_file(self, Mask::ACCESS);
        }
    }

    /// Tells those who watch the file that it was written to.
    fn note_write(&self, count: usize) {
        if count > 0 {
            notify::open_file(self, Mask::MODIFY);
        }
    }

    /// write(2): at the current position, or at the end with `O_APPEND`. A
    /// blocking stream takes everything before it returns.
    pub fn write(&self, source: &mut Source<'_>) -> Result<usize> {
        if !self.flags().can_write() {
            return Err(Errno::EBADF);
        }
        let count = self.write_all(source)?;
        self.note_write(count);
        Ok(count)
    }

    fn write_all(&self, source: &mut Source<'_>) -> Result<usize> {
        if self.file.seekable() {
            let append = self.flags().contains(OpenFlags::APPEND);
            if let Some(appended) = append.then(|| self.file.append(source)).flatten() {
                let (at, count) = appended?;
                self.set_position(at + count as u64);
                return Ok(count);
            }
            let at = if append { self.file.size() } else { self.position() };
            let count = self.blocking(None, || self.file.write(source, at))?;
            self.set_position(at + count as u64);
            return Ok(count);
        }
        let mut done = 0;
        loop {
            match self.blocking(self.file.write_timeout_ns(), || self.file.write(source, 0)) {
                Ok(count) => {
                    done += count;
                    if source.remaining() == 0
                        || self.flags().contains(OpenFlags::NONBLOCK)
                        || count == 0
                    {
                        return Ok(done);
                    }
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => return Ok(done),
            }
        }
    }

    /// One attempt to read, at `offset` of a seekable file, that does not wait (splice(2)).
    pub fn try_read(&self, sink: &mut Sink<'_>, offset: u64) -> Result<usize> {
        let count = self.file.read(sink, offset)?;
        self.note_read(count);
        Ok(count)
    }

    /// One attempt to write, at `offset` of a seekable file, that does not wait (splice(2)).
    pub fn try_write(&self, source: &mut Source<'_>, offset: u64) -> Result<usize> {
        let count = self.file.write(source, offset)?;
        self.note_write(count);
        Ok(count)
    }

    /// pwrite(2).
    pub fn write_at(&self, source: &mut Source<'_>, offset: u64) -> Result<usize> {
        if !self.file.seekable() {
            return Err(Errno::ESPIPE);
        }
        if !self.flags().can_write() {
            return Err(Errno::EBADF);
        }
        // pwrite(2), BUGS: O_APPEND wins over the offset.
        let append = self.flags().contains(OpenFlags::APPEND);
        if let Some(appended) = append.then(|| self.file.append(source)).flatten() {
            let (_, count) = appended?;
            self.note_write(count);
            return Ok(count);
        }
        let count = self.file.write(source, if append { self.file.size() } else { offset })?;
        self.note_write(count);
        Ok(count)
    }

    /// Runs `attempt`, and again whenever the file's readiness changes, for as
    /// long as it says `EAGAIN` and the description may block.
    pub fn blocking<T>(
        &self,
        timeout_ns: Option<u64>,
        mut attempt: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        let first = attempt();
        if !matches!(first, Err(Errno::EAGAIN)) || self.flags().contains(OpenFlags::NONBLOCK) {
            return first;
        }
        let Some(queue) = self.file.wait_queue() else { return first };
        let deadline = timeout_ns.map(Instant::after_ns);
        let outcome = wait_until(&[queue], deadline, || match attempt() {
            Err(Errno::EAGAIN) => None,
            outcome => Some(outcome),
        });
        match outcome {
            // socket(7): with SO_RCVTIMEO or SO_SNDTIMEO a time-out reads as EAGAIN.
            Err(Errno::ETIMEDOUT) if timeout_ns.is_some() => Err(Errno::EAGAIN),
            outcome => outcome,
        }
    }
}

/// The mount that writing to a file changes: devices, FIFOs and sockets change none.
fn mount_written_to(path: Option<&super::path::Path>) -> Option<&Arc<super::mount::Mount>> {
    let path = path.filter(|path| path.inode().file_type() == FileType::Regular);
    path.and_then(super::path::Path::mount)
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        if let Some(mount) = mount_written_to(self.path.as_ref()).filter(|_| self.is_writer) {
            mount.remove_writer();
        }
        self.end_async();
        notify::closed(self);
        if self.has_locks.load(Ordering::Relaxed) {
            let owner = super::locks::Owner::Description(self as *const Self as u64);
            crate::state::kernel().fs.locks.release_all(owner);
        }
    }
}
