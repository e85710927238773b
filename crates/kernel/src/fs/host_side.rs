//! The seam between file systems and the rest of the kernel.
//!
//! Everything that file systems want from outside their folder and that a unit
//! test on the host has to replace: the clock, pages, who writes, descriptors of blobs,
//! the broker.

pub use imp::*;

#[cfg(not(test))]
mod imp {
    use alloc::vec::Vec;

    use crate::errno::{Errno, Result};
    use crate::io::Sink;
    use crate::platform::host::{self, HostFd};
    use crate::task::Capabilities;
    use crate::task::process::RLIMIT_FSIZE;
    use crate::task::signal::{SignalInfo, send_to_thread};
    use crate::task::thread::running;

    pub use crate::mm::pages::PageBox;
    pub use crate::mm::shared::{place_page, take_page};

    /// The guest's `CLOCK_REALTIME`, in nanoseconds since the epoch.
    pub fn realtime_ns() -> u64 {
        crate::time::clock::realtime_ns()
    }

    /// `SIGXFSZ` (signal(7)).
    const SIGXFSZ: u32 = 25;
    /// `SI_KERNEL`: sent by the kernel (sigaction(2)).
    const SI_KERNEL: i32 = 0x80;

    /// `RLIMIT_FSIZE` of the running process, in bytes. The kernel itself has no limit.
    pub fn file_size_limit() -> u64 {
        running().map_or(u64::MAX, |thread| thread.process.limits.lock()[RLIMIT_FSIZE].current)
    }

    /// Whether the running process may leave set-user-ID on a file that it writes to.
    pub fn keeps_privilege_bits() -> bool {
        running().is_none_or(|t| t.process.credentials.lock().can(Capabilities::FSETID))
    }

    /// Tells the running thread that a file would have grown beyond `RLIMIT_FSIZE`.
    pub fn file_size_exceeded() {
        if let Some(thread) = running() {
            send_to_thread(thread, SignalInfo::new(SIGXFSZ, SI_KERNEL));
        }
    }

    /// Asks the broker; the tail of its answer goes to `reply`.
    pub fn broker_request(
        kind: u32,
        body: &[u8],
        tail: &[u8],
        reply: &mut Vec<u8>,
    ) -> Result<Option<HostFd>> {
        crate::host::broker::request(kind, body, tail, reply)
    }

    /// Pages that the sandbox may use for files: in all, and left. Files get
    /// three quarters of its memory at most, so that one that is filled up is
    /// an error and not the end of the sandbox (tmpfs(5) has half).
    pub fn page_counts() -> (u64, u64) {
        let kernel = crate::state::kernel();
        let limit = kernel.memory_total() / 4 * 3;
        let used = kernel.pages.lock().bytes_in_use();
        (limit / 4096, limit.saturating_sub(used) / 4096)
    }

    /// A page of zeros for a file; `ENOSPC`.
    pub fn alloc_page() -> Result<PageBox> {
        let limited = crate::state::kernel().config.get().memory_limit > 0;
        if limited && page_counts().1 == 0 {
            return Err(Errno::ENOSPC);
        }
        crate::mm::pages::alloc_page().map_err(|_| Errno::ENOSPC)
    }

    /// Number of the current boot: what was learnt from the host in an earlier
    /// one is void.
    pub fn boot_generation() -> u64 {
        crate::state::generation()
    }

    /// Reads a blob at `offset`, at most `len` bytes.
    pub fn read_blob(blob: u32, sink: &mut Sink<'_>, offset: u64, len: usize) -> Result<usize> {
        read_file(|| crate::host::blobs::descriptor(blob), sink, offset, len)
    }

    /// Closes a host file.
    pub fn close(fd: HostFd) {
        host::close(fd);
    }

    /// Reads a host file at `offset`, at most `len` bytes. Its descriptor is asked for
    /// anew for each piece: storing one can map a page of another file, which may be
    /// what closes it.
    pub fn read_file(
        descriptor: impl Fn() -> Result<HostFd>,
        sink: &mut Sink<'_>,
        offset: u64,
        len: usize,
    ) -> Result<usize> {
        let mut done = 0;
        while done < len {
            let Some(mut piece) = sink.next_piece() else { break };
            let fd = match descriptor() {
                Ok(fd) => fd,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            };
            let step = piece.len().min(len - done);
            match host::pread(fd, piece.first(step), offset + done as u64) {
                Ok(0) => break,
                Ok(count) => {
                    sink.advance(count);
                    done += count;
                }
                // The host does not run our fault handler, so a page that the
                // kernel would map on first touch looks unmapped to it.
                Err(crate::errno::Errno::EFAULT) => {
                    match read_bounced(fd, sink, offset + done as u64, step) {
                        Ok(0) => break,
                        Ok(count) => done += count,
                        Err(error) if done == 0 => return Err(error),
                        Err(_) => break,
                    }
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    fn read_bounced(fd: HostFd, sink: &mut Sink<'_>, offset: u64, len: usize) -> Result<usize> {
        let mut buffer = [0u8; 2048];
        let step = len.min(buffer.len());
        let count = host::pread(fd, buffer[..step].as_mut().into(), offset)?;
        sink.put(&buffer[..count])
    }
}

#[cfg(test)]
mod imp {
    use std::boxed::Box;
    use std::collections::BTreeMap;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::vec::Vec;

    use thaw_abi::control::{
        DirectoryEntry, FileAttributes, ListDirectory, MSG_FS_LIST, MSG_FS_READLINK, MSG_FS_STAT,
    };

    use crate::errno::{Errno, Result};
    use crate::io::Sink;
    use crate::platform::host::HostFd;

    pub type PageBox = Box<[u8; 4096]>;

    pub fn alloc_page() -> Result<PageBox> {
        Ok(Box::new([0; 4096]))
    }

    /// A clock that moves on by a microsecond whenever somebody looks.
    pub fn realtime_ns() -> u64 {
        static CLOCK: AtomicU64 = AtomicU64::new(1_700_000_000_000_000_000);
        CLOCK.fetch_add(1000, Ordering::Relaxed)
    }

    /// Who writes in a test: its limit, whether it keeps the bits, its signals.
    #[derive(Clone, Copy)]
    pub struct FakeWriter {
        pub file_size_limit: u64,
        pub keeps_privilege_bits: bool,
        pub signals: u32,
    }

    std::thread_local! {
        /// Every test has a thread of its own.
        pub static WRITER: core::cell::Cell<FakeWriter> = const {
            core::cell::Cell::new(FakeWriter {
                file_size_limit: u64::MAX,
                keeps_privilege_bits: true,
                signals: 0,
            })
        };
    }

    pub fn file_size_limit() -> u64 {
        WRITER.get().file_size_limit
    }

    pub fn keeps_privilege_bits() -> bool {
        WRITER.get().keeps_privilege_bits
    }

    pub fn file_size_exceeded() {
        let writer = WRITER.get();
        WRITER.set(FakeWriter { signals: writer.signals + 1, ..writer });
    }

    /// A file of the fake host directory.
    pub struct FakeFile {
        pub attributes: FileAttributes,
        pub target: Vec<u8>,
    }

    /// The fake host directory, by path.
    pub static FAKE_HOST: Mutex<BTreeMap<Vec<u8>, FakeFile>> = Mutex::new(BTreeMap::new());

    /// A broker over the fake host directory. It lists one name at a time.
    pub fn broker_request(
        kind: u32,
        body: &[u8],
        tail: &[u8],
        reply: &mut Vec<u8>,
    ) -> Result<Option<HostFd>> {
        let files = FAKE_HOST.lock().unwrap();
        let file = files.get(tail).ok_or(Errno::ENOENT)?;
        match kind {
            MSG_FS_STAT => reply.extend_from_slice(bytemuck::bytes_of(&file.attributes)),
            MSG_FS_READLINK => reply.extend_from_slice(&file.target),
            MSG_FS_LIST => {
                let skip = bytemuck::pod_read_unaligned::<ListDirectory>(body).skip as usize;
                let prefix = if tail.is_empty() { Vec::new() } else { [tail, b"/"].concat() };
                let mut inside = files.iter().filter_map(|(path, file)| {
                    let name = path.strip_prefix(&prefix[..])?;
                    (!name.is_empty() && !name.contains(&b'/')).then_some((name, file))
                });
                if let Some((name, file)) = inside.nth(skip) {
                    let entry = DirectoryEntry {
                        inode: file.attributes.inode,
                        file_type: (file.attributes.mode >> 12) & 15,
                        name_len: name.len() as u32,
                    };
                    reply.extend_from_slice(bytemuck::bytes_of(&entry));
                    reply.extend_from_slice(name);
                    reply.resize(reply.len().next_multiple_of(8), 0);
                }
            }
            _ => return Err(Errno::EIO),
        }
        Ok(None)
    }

    use crate::mm::shared::Placed;

    /// "Guest memory" of tests: ordinary memory.
    pub fn place_page(address: u64, bytes: &[u8; 4096], _prot: u32) -> Result<Placed> {
        GUEST.lock().unwrap().insert(address, *bytes);
        Ok(Placed::Moved)
    }

    pub fn take_page(address: u64, bytes: &mut [u8; 4096]) {
        *bytes = GUEST.lock().unwrap().remove(&address).expect("a page is mapped");
    }

    /// What is mapped where. Every test uses addresses of its own.
    pub static GUEST: Mutex<BTreeMap<u64, [u8; 4096]>> = Mutex::new(BTreeMap::new());

    pub fn page_counts() -> (u64, u64) {
        (1000, 900)
    }

    pub fn boot_generation() -> u64 {
        1
    }

    /// Blobs that tests have put there. Every test uses numbers of its own.
    pub static BLOBS: Mutex<BTreeMap<u32, Vec<u8>>> = Mutex::new(BTreeMap::new());

    pub fn read_blob(blob: u32, sink: &mut Sink<'_>, offset: u64, len: usize) -> Result<usize> {
        let blobs = BLOBS.lock().unwrap();
        let bytes = blobs.get(&blob).ok_or(Errno::EIO)?;
        let rest = bytes.get(offset as usize..).unwrap_or(&[]);
        sink.put(&rest[..rest.len().min(len)])
    }

    pub fn close(_fd: HostFd) {}

    pub fn read_file(
        _descriptor: impl Fn() -> Result<HostFd>,
        _sink: &mut Sink<'_>,
        _offset: u64,
        _len: usize,
    ) -> Result<usize> {
        Err(Errno::EIO)
    }
}
