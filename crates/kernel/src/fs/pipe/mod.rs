//! Pipes (pipe(7)), with the buffer layout of Linux' `fs/pipe.c`: a ring of
//! page-sized slots, so that a full pipe is full at the same byte.

mod bytes;
pub mod fifo;

use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, Ordering};

use crate::errno::{Errno, Result};
use crate::fs::anonymous::pipe_stat;
use crate::fs::file::{Events, File, OpenFile, Stat};
use crate::fs::inode::Inode;
use crate::io::{Sink, Source};
use crate::mm::pages::{PageBox, alloc_page};
use crate::platform::user::UserAddress;
use crate::sync::KernelCell;
use crate::task::signal;
use crate::task::wait::WaitQueue;

const PAGE: usize = 4096;
/// Slots of a new pipe: 64 KiB (pipe(7), "Pipe capacity").
const DEFAULT_SLOTS: usize = 16;
/// Most bytes that `F_SETPIPE_SZ` gives (`/proc/sys/fs/pipe-max-size`).
pub const PIPE_MAX_SIZE: usize = 1 << 20;
/// Pages kept for the next write, as Linux keeps two per pipe.
const SPARE_PAGES: usize = 2;

const IN: Events = Events::IN.union(Events::RDNORM);
const OUT: Events = Events::OUT.union(Events::WRNORM);

/// `FIONREAD`: bytes that can be read (ioctl_tty(2)).
pub const FIONREAD: u32 = 0x541b;

pub(super) struct Slot {
    pub page: PageBox,
    pub offset: usize,
    pub len: usize,
    /// The slot is a packet (`O_DIRECT`): it is read at once and not added to.
    pub packet: bool,
}

pub(super) struct Ring {
    pub slots: VecDeque<Slot>,
    spare: VecDeque<PageBox>,
    /// Most slots.
    pub limit: usize,
    pub bytes: usize,
    pub readers: u32,
    pub writers: u32,
    /// Ends that read and write, which wait on the readers' queue.
    duplex_ends: u32,
    /// Number of times that a reading and a writing end was opened. A FIFO that
    /// never had a writer is not hung up.
    opened: (u64, u64),
}

impl Ring {
    pub fn is_full(&self) -> bool {
        self.slots.len() >= self.limit
    }

    fn take_page(&mut self) -> Result<PageBox> {
        match self.spare.pop_front() {
            Some(page) => Ok(page),
            None => alloc_page(),
        }
    }

    pub fn keep_page(&mut self, page: PageBox) {
        if self.spare.len() < SPARE_PAGES {
            self.spare.push_back(page);
        }
    }
}

/// What the ends of a pipe share.
pub struct Pipe {
    ino: u64,
    pub(super) ring: KernelCell<Ring>,
    readers_queue: WaitQueue,
    writers_queue: WaitQueue,
}

/// What an end may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The reading end.
    Read,
    /// The writing end.
    Write,
    /// A FIFO opened with `O_RDWR`.
    Both,
}

impl Access {
    fn reads(self) -> bool {
        self != Access::Write
    }
    fn writes(self) -> bool {
        self != Access::Read
    }
}

/// One end of a pipe or FIFO, as one open file description sees it.
pub struct PipeEnd {
    pub(super) pipe: Arc<Pipe>,
    access: Access,
    packets: AtomicBool,
    /// The file of a FIFO.
    file: Option<Arc<dyn Inode>>,
}

impl Pipe {
    /// A pipe without ends; `ino` is its inode number.
    pub fn new(ino: u64) -> Arc<Self> {
        Arc::new(Self {
            ino,
            ring: KernelCell::new(Ring {
                slots: VecDeque::new(),
                spare: VecDeque::new(),
                limit: DEFAULT_SLOTS,
                bytes: 0,
                readers: 0,
                writers: 0,
                duplex_ends: 0,
                opened: (0, 0),
            }),
            readers_queue: WaitQueue::new(),
            writers_queue: WaitQueue::new(),
        })
    }

    /// Opens an end.
    pub fn open(self: &Arc<Self>, access: Access) -> Arc<PipeEnd> {
        self.open_end(access, None)
    }

    /// Opens an end of the FIFO that `file` names.
    pub fn open_named(self: &Arc<Self>, access: Access, file: Arc<dyn Inode>) -> Arc<PipeEnd> {
        self.open_end(access, Some(file))
    }

    fn open_end(self: &Arc<Self>, access: Access, file: Option<Arc<dyn Inode>>) -> Arc<PipeEnd> {
        {
            let mut ring = self.ring.borrow_mut();
            ring.readers += access.reads() as u32;
            ring.writers += access.writes() as u32;
            ring.duplex_ends += (access == Access::Both) as u32;
            ring.opened.0 += access.reads() as u64;
            ring.opened.1 += access.writes() as u64;
        }
        // A FIFO's open(2) waits for the other side on the same queues.
        self.readers_queue.wake_all(Events::empty());
        self.writers_queue.wake_all(Events::empty());
        Arc::new(PipeEnd { pipe: self.clone(), access, packets: AtomicBool::new(false), file })
    }

    /// Both ends of a new pipe: reading, writing.
    pub fn pair(ino: u64) -> (Arc<PipeEnd>, Arc<PipeEnd>) {
        let pipe = Pipe::new(ino);
        (pipe.open(Access::Read), pipe.open(Access::Write))
    }

    /// Number of open reading and writing ends, for opening a FIFO.
    pub fn ends(&self) -> (u32, u32) {
        let ring = self.ring.borrow_mut();
        (ring.readers, ring.writers)
    }

    /// Number of times that reading and writing ends were opened.
    pub fn openings(&self) -> (u64, u64) {
        self.ring.borrow_mut().opened
    }

    /// Where the opening of a FIFO waits until the other side is open.
    pub fn open_queue(&self, access: Access) -> &WaitQueue {
        if access.reads() { &self.readers_queue } else { &self.writers_queue }
    }

    fn wake_readers(&self, events: Events) {
        self.readers_queue.wake_all(events);
    }

    pub(super) fn wake_writers(&self, events: Events) {
        self.writers_queue.wake_all(events);
        if self.ring.borrow_mut().duplex_ends > 0 {
            self.readers_queue.wake_all(events);
        }
    }
}

impl PipeEnd {
    /// Turns packet mode (`O_DIRECT` of pipe2(2)) on or off.
    pub fn set_packet_mode(&self, packets: PacketMode) {
        self.packets.store(packets == PacketMode::On, Ordering::Relaxed);
    }

    /// The capacity in bytes (`F_GETPIPE_SZ`).
    pub fn capacity(&self) -> usize {
        self.pipe.ring.borrow_mut().limit * PAGE
    }

    /// Changes the capacity (`F_SETPIPE_SZ`), rounded up to a power of two
    /// pages, and returns the new one. `EBUSY` if more is buffered, `EPERM`
    /// beyond [`PIPE_MAX_SIZE`].
    pub fn set_capacity(&self, bytes: usize) -> Result<usize> {
        if bytes > 1 << 31 {
            return Err(Errno::EINVAL);
        }
        if bytes > PIPE_MAX_SIZE {
            return Err(Errno::EPERM);
        }
        let limit = bytes.div_ceil(PAGE).max(1).next_power_of_two();
        let grown = {
            let mut ring = self.pipe.ring.borrow_mut();
            if ring.slots.len() > limit {
                return Err(Errno::EBUSY);
            }
            let was_full = ring.is_full();
            ring.limit = limit;
            was_full && !ring.is_full()
        };
        if grown {
            self.pipe.wake_writers(OUT);
        }
        Ok(limit * PAGE)
    }
}

/// Whether every write is a packet of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketMode {
    /// A stream of bytes.
    Off,
    /// Packets.
    On,
}

impl File for PipeEnd {
    fn read(&self, sink: &mut Sink<'_>, _offset: u64) -> Result<usize> {
        if sink.remaining() == 0 {
            return Ok(0);
        }
        let mut done = 0;
        let mut freed = false;
        let mut outcome = Ok(());
        {
            let mut ring = self.pipe.ring.borrow_mut();
            let ring = &mut *ring;
            let was_full = ring.is_full();
            while let Some(slot) = ring.slots.front_mut() {
                let step = slot.len.min(sink.remaining());
                let moved = match sink.put(&slot.page[slot.offset..slot.offset + step]) {
                    Ok(moved) => moved,
                    Err(error) => {
                        outcome = Err(error);
                        break;
                    }
                };
                done += moved;
                ring.bytes -= moved;
                slot.offset += moved;
                slot.len -= moved;
                let packet = slot.packet;
                if packet && moved == step {
                    // What did not fit is lost (pipe2(2)).
                    ring.bytes -= slot.len;
                    slot.len = 0;
                }
                if slot.len == 0 {
                    if let Some(slot) = ring.slots.pop_front() {
                        ring.keep_page(slot.page);
                    }
                    freed |= was_full;
                }
                if packet || moved < step || sink.remaining() == 0 {
                    break;
                }
            }
            if done == 0 && outcome.is_ok() && ring.writers > 0 {
                outcome = Err(Errno::EAGAIN);
            }
        }
        if freed {
            self.pipe.wake_writers(OUT);
        }
        if done > 0 { Ok(done) } else { outcome.map(|()| 0) }
    }

    fn write(&self, source: &mut Source<'_>, _offset: u64) -> Result<usize> {
        if source.remaining() == 0 {
            return Ok(0);
        }
        let packet = self.packets.load(Ordering::Relaxed);
        let mut done = 0;
        let mut outcome = Ok(());
        {
            let mut ring = self.pipe.ring.borrow_mut();
            let ring = &mut *ring;
            if ring.readers > 0 && !packet {
                // The odd part of a write joins the last slot if it fits whole:
                // this is what makes writes up to PIPE_BUF atomic.
                let odd = source.remaining() % PAGE;
                if let Some(last) = ring.slots.back_mut().filter(|slot| !slot.packet) {
                    let end = last.offset + last.len;
                    if odd > 0 && end + odd <= PAGE {
                        match source.take(&mut last.page[end..end + odd]) {
                            Ok(n) => {
                                last.len += n;
                                ring.bytes += n;
                                done += n;
                                if n < odd {
                                    outcome = Err(Errno::EFAULT);
                                }
                            }
                            Err(error) => outcome = Err(error),
                        }
                    }
                }
            }
            while outcome.is_ok() && source.remaining() > 0 {
                if ring.readers == 0 {
                    outcome = Err(Errno::EPIPE);
                } else if ring.is_full() {
                    outcome = Err(Errno::EAGAIN);
                } else {
                    let mut page = match ring.take_page() {
                        Ok(page) => page,
                        Err(error) => {
                            outcome = Err(error);
                            break;
                        }
                    };
                    let want = source.remaining().min(PAGE);
                    let taken = source.take(&mut page[..want]);
                    match taken {
                        Ok(len) if len > 0 => {
                            ring.slots.push_back(Slot { page, offset: 0, len, packet });
                            ring.bytes += len;
                            done += len;
                            if len < want {
                                outcome = Err(Errno::EFAULT);
                            }
                        }
                        _ => {
                            ring.keep_page(page);
                            outcome = Err(Errno::EFAULT);
                        }
                    }
                }
            }
        }
        if done > 0 {
            self.pipe.wake_readers(IN);
        }
        if outcome == Err(Errno::EPIPE) && done == 0 {
            signal::send_sigpipe();
        }
        if done > 0 { Ok(done) } else { outcome.map(|()| 0) }
    }

    fn poll(&self) -> Events {
        let ring = self.pipe.ring.borrow_mut();
        let mut events = Events::empty();
        if self.access.reads() {
            if !ring.slots.is_empty() {
                events |= IN;
            }
            if ring.writers == 0 && ring.opened.1 > 0 {
                events |= Events::HUP;
            }
        }
        if self.access.writes() {
            if !ring.is_full() {
                events |= OUT;
            }
            if ring.readers == 0 {
                events |= Events::ERR;
            }
        }
        events
    }

    fn wait_queue(&self) -> Option<&WaitQueue> {
        Some(self.pipe.open_queue(self.access))
    }

    fn stat(&self) -> Result<Stat> {
        match &self.file {
            Some(file) => Ok(file.attributes().to_stat()),
            None => Ok(pipe_stat(self.pipe.ino)),
        }
    }

    fn ioctl(&self, request: u32, argument: UserAddress) -> Result<u64> {
        match request {
            FIONREAD => {
                let bytes = self.pipe.ring.borrow_mut().bytes as i32;
                argument.write(&bytes).map(|()| 0)
            }
            _ => Err(Errno::ENOTTY),
        }
    }

    fn description(&self) -> String {
        format!("pipe:[{}]", self.pipe.ino)
    }
}

impl Drop for PipeEnd {
    fn drop(&mut self) {
        let (readers, writers) = {
            let mut ring = self.pipe.ring.borrow_mut();
            ring.readers -= self.access.reads() as u32;
            ring.writers -= self.access.writes() as u32;
            ring.duplex_ends -= (self.access == Access::Both) as u32;
            if ring.readers == 0 && ring.writers == 0 {
                ring.slots.clear();
                ring.bytes = 0;
                ring.opened.1 = 0;
            }
            (ring.readers, ring.writers)
        };
        if self.access.writes() && writers == 0 {
            self.pipe.wake_readers(Events::HUP);
        }
        if self.access.reads() && readers == 0 {
            self.pipe.wake_writers(OUT | Events::ERR);
        }
    }
}

/// `fcntl(F_GETPIPE_SZ)`; `EBADF` if the file is no pipe.
pub fn get_pipe_size(file: &OpenFile) -> Result<u64> {
    file.downcast::<PipeEnd>().map(|end| end.capacity() as u64).ok_or(Errno::EBADF)
}

/// `fcntl(F_SETPIPE_SZ)`; `EBADF` if the file is no pipe.
pub fn set_pipe_size(file: &OpenFile, bytes: u64) -> Result<u64> {
    let end = file.downcast::<PipeEnd>().ok_or(Errno::EBADF)?;
    end.set_capacity(bytes as u32 as usize).map(|capacity| capacity as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sandbox;

    fn write(end: &PipeEnd, bytes: &[u8]) -> Result<usize> {
        end.write(&mut Source::kernel(bytes), 0)
    }

    fn read(end: &PipeEnd, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let n = end.read(&mut Sink::kernel(&mut bytes), 0)?;
        bytes.truncate(n);
        Ok(bytes)
    }

    #[test]
    fn fills_to_64_kib_then_says_eagain() {
        let _sandbox = Sandbox::new();
        let (reader, writer) = Pipe::pair(1);
        assert_eq!(writer.capacity(), 65536);
        assert_eq!(write(&writer, &[7; 70_000]), Ok(65536));
        assert_eq!(write(&writer, b"x"), Err(Errno::EAGAIN));
        assert_eq!(writer.poll(), Events::empty());
        // A byte less frees no slot, as on Linux.
        assert_eq!(read(&reader, 1).unwrap().len(), 1);
        assert_eq!(write(&writer, b"x"), Err(Errno::EAGAIN));
        assert_eq!(read(&reader, 4095).unwrap().len(), 4095);
        assert_eq!(writer.poll(), OUT);
        assert_eq!(write(&writer, b"x"), Ok(1));
    }

    #[test]
    fn small_writes_are_atomic_and_large_ones_are_not() {
        let _sandbox = Sandbox::new();
        let (reader, writer) = Pipe::pair(1);
        for _ in 0..16 {
            // Two of these do not fit in one slot, and are not split.
            assert_eq!(write(&writer, &[1; 3000]), Ok(3000));
        }
        assert_eq!(write(&writer, &[1; 3000]), Err(Errno::EAGAIN));
        assert_eq!(write(&writer, &[1; 1000]), Ok(1000));
        assert_eq!(write(&writer, &[2; 1000]), Err(Errno::EAGAIN));
        assert_eq!(read(&reader, 100_000).unwrap().len(), 16 * 3000 + 1000);
        assert_eq!(read(&reader, 1), Err(Errno::EAGAIN));
    }

    #[test]
    fn end_of_file_and_broken_pipe() {
        let sandbox = Sandbox::new();
        let (reader, writer) = Pipe::pair(1);
        write(&writer, b"last").unwrap();
        drop(writer);
        assert_eq!(reader.poll(), IN | Events::HUP);
        assert_eq!(read(&reader, 10).unwrap(), b"last");
        assert_eq!(read(&reader, 10).unwrap(), b"");
        assert_eq!(reader.poll(), Events::HUP);

        let (reader, writer) = Pipe::pair(2);
        drop(reader);
        assert_eq!(sandbox.take_signals(), []);
        assert_eq!(write(&writer, b"x"), Err(Errno::EPIPE));
        assert_eq!(sandbox.take_signals(), [signal::SIGPIPE]);
        assert_eq!(writer.poll(), OUT | Events::ERR);
    }

    #[test]
    fn packets_keep_their_bounds() {
        let _sandbox = Sandbox::new();
        let (reader, writer) = Pipe::pair(1);
        writer.set_packet_mode(PacketMode::On);
        write(&writer, b"first").unwrap();
        write(&writer, b"second").unwrap();
        assert_eq!(read(&reader, 100).unwrap(), b"first");
        assert_eq!(read(&reader, 3).unwrap(), b"sec");
        assert_eq!(read(&reader, 3), Err(Errno::EAGAIN));
    }

    #[test]
    fn capacity_changes_in_powers_of_two_pages() {
        let _sandbox = Sandbox::new();
        let (reader, writer) = Pipe::pair(1);
        assert_eq!(writer.set_capacity(5000), Ok(8192));
        write(&writer, &[0; 8192]).unwrap();
        assert_eq!(writer.set_capacity(4096), Err(Errno::EBUSY));
        assert_eq!(reader.set_capacity(PIPE_MAX_SIZE), Ok(PIPE_MAX_SIZE));
        assert_eq!(reader.set_capacity(PIPE_MAX_SIZE + 1), Err(Errno::EPERM));
        assert_eq!(write(&writer, &[0; 100]), Ok(100));
    }

    #[test]
    fn a_read_write_fifo_end_is_woken_for_both() {
        let _sandbox = Sandbox::new();
        use core::sync::atomic::AtomicU32;
        struct Count(AtomicU32);
        impl crate::task::wait::Waiter for Count {
            fn wake(&self, _: Events) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let pipe = Pipe::new(1);
        let both = pipe.open(Access::Both);
        assert_eq!(pipe.ends(), (1, 1));
        let count = Arc::new(Count(AtomicU32::new(0)));
        both.wait_queue().unwrap().register(count.clone());
        both.write(&mut Source::kernel(&[1; 65536]), 0).unwrap();
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        read(&both, 4096).unwrap();
        assert_eq!(count.0.load(Ordering::Relaxed), 2);
    }
}
