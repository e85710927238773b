//! A second worker that copies memory into the image beside the first. Most of the time of a copy
//! in memory is copying, which two processors do in half the time.
//!
//! The first worker, which has read the report, says what lies where; the mate parses nothing of
//! the sandbox. Both have the same files and rights, and the same trust: none.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use bytemuck::{Pod, Zeroable, bytes_of, cast_slice, pod_read_unaligned};
use thaw_abi::PAGE_SIZE;

use super::FreezeError;
use super::write::{CHUNK, write_content};
use crate::message::{self, is_readable};
use crate::state::{Sandbox, Space};

/// Most chunks that the mate has not finished: one to work at, and one to go on with.
const UNDER_WAY_MAX: usize = 2;

/// A part of a chunk of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Part {
    /// Address of the first byte.
    pub address: u64,
    /// Where it comes in the chunk.
    pub at: u32,
    /// Bytes.
    pub len: u32,
    /// The process that has it, as the sandbox' pid namespace numbers it.
    pub process: u32,
    /// Zero.
    pub reserved: u32,
}

/// First worker → mate: copy this chunk. Its parts follow, a page at least each.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Chunk {
    /// Where it lies in the image.
    offset: u64,
    /// Bytes.
    len: u64,
}

/// Most bytes of a packet.
const PACKET_MAX: usize = size_of::<Chunk>() + (CHUNK / PAGE_SIZE) as usize * size_of::<Part>();

/// Mate → first worker: a chunk is copied, or not.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Copied {
    /// Bytes of it that are no holes.
    stored: u64,
    /// `FAILED_*`.
    failed: u32,
    /// Positive error number of the host.
    errno: i32,
}

const FAILED_NOTHING: u32 = 0;
const FAILED_READING: u32 = 1;
const FAILED_WRITING: u32 = 2;

/// The mate, as the first worker sees it. It ends when this is dropped.
pub(super) struct Mate {
    socket: OwnedFd,
    under_way: usize,
    stored: u64,
}

impl Mate {
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, under_way: 0, stored: 0 }
    }

    /// Whether it can have another chunk now.
    pub fn is_free(&mut self) -> Result<bool, FreezeError> {
        while self.under_way > 0 && is_readable(&self.socket, Instant::now()) {
            self.take_reply()?;
        }
        Ok(self.under_way < UNDER_WAY_MAX)
    }

    /// Has it copy what lies in the image from `offset` on. It must be free.
    pub fn copy(&mut self, offset: u64, len: u64, parts: &[Part]) -> Result<(), FreezeError> {
        let chunk = Chunk { offset, len };
        let packet = [IoSlice::new(bytes_of(&chunk)), IoSlice::new(cast_slice(parts))];
        message::send(&self.socket, &packet, &[]).map_err(FreezeError::Memory)?;
        self.under_way += 1;
        Ok(())
    }

    /// Waits until it has done everything; bytes that it has stored since it was asked last.
    pub fn finish(&mut self) -> Result<u64, FreezeError> {
        while self.under_way > 0 {
            self.take_reply()?;
        }
        Ok(std::mem::take(&mut self.stored))
    }

    fn take_reply(&mut self) -> Result<(), FreezeError> {
        let mut reply = [0; size_of::<Copied>()];
        let received = message::receive(&self.socket, &mut reply, None);
        let len = received.map_err(FreezeError::Memory)?.len;
        if len != reply.len() {
            return Err(FreezeError::Memory(io::ErrorKind::UnexpectedEof.into()));
        }
        let copied: Copied = pod_read_unaligned(&reply);
        self.under_way -= 1;
        self.stored += copied.stored;
        let error = || match copied.errno {
            // The memory of a process that has ended is empty (proc(5)).
            0 => io::ErrorKind::UnexpectedEof.into(),
            errno => io::Error::from_raw_os_error(errno),
        };
        match copied.failed {
            FAILED_NOTHING => Ok(()),
            FAILED_WRITING => Err(FreezeError::Write(error())),
            _ => Err(FreezeError::Memory(error())),
        }
    }
}

/// The life of the mate: copies what the first worker says until that closes its end.
///
/// # Errors
/// The first worker has sent what none sends.
pub(crate) fn serve_mate(socket: &OwnedFd, sandbox: Sandbox, image: &File) -> io::Result<()> {
    let mut memory = Memory { sandbox, taken: HashMap::new() };
    let (mut packet, mut buffer) = (vec![0; PACKET_MAX], Vec::new());
    loop {
        // A worker that has failed leaves without having read all replies.
        let Ok(received) = message::receive(socket, &mut packet, None) else { return Ok(()) };
        if received.len == 0 {
            return Ok(());
        }
        let (chunk, parts) = parse(&packet[..received.len]).ok_or(io::ErrorKind::InvalidData)?;
        let copied = match copy(&mut memory, &chunk, &parts, image, &mut buffer) {
            Ok(stored) => Copied { stored, failed: FAILED_NOTHING, errno: 0 },
            Err(FreezeError::Write(error)) => failed(FAILED_WRITING, &error),
            Err(FreezeError::Memory(error)) => failed(FAILED_READING, &error),
            Err(_) => failed(FAILED_READING, &io::ErrorKind::UnexpectedEof.into()),
        };
        if message::send(socket, &[IoSlice::new(bytes_of(&copied))], &[]).is_err() {
            return Ok(());
        }
    }
}

fn failed(failed: u32, error: &io::Error) -> Copied {
    Copied { stored: 0, failed, errno: error.raw_os_error().unwrap_or(0) }
}

/// A chunk and its parts, which lie in it.
fn parse(packet: &[u8]) -> Option<(Chunk, Vec<Part>)> {
    let (chunk, parts) = packet.split_at_checked(size_of::<Chunk>())?;
    let chunk: Chunk = pod_read_unaligned(chunk);
    let parts = parts.chunks_exact(size_of::<Part>());
    let is_whole = parts.remainder().is_empty() && chunk.len <= CHUNK;
    let parts: Vec<Part> = parts.map(pod_read_unaligned).collect();
    let lies_inside = |part: &Part| u64::from(part.at) + u64::from(part.len) <= chunk.len;
    (is_whole && parts.iter().all(lies_inside)).then_some((chunk, parts))
}

/// The memory of the sandbox' processes, which is taken when it is first read.
struct Memory {
    sandbox: Sandbox,
    taken: HashMap<u32, Space>,
}

impl Memory {
    fn read(&mut self, part: &Part, buffer: &mut [u8]) -> io::Result<()> {
        let space = match self.taken.entry(part.process) {
            Entry::Occupied(space) => space.into_mut(),
            Entry::Vacant(room) => room.insert(self.sandbox.take_space(part.process)?),
        };
        space.memory.read_exact_at(buffer, part.address)
    }
}

fn copy(
    memory: &mut Memory,
    chunk: &Chunk,
    parts: &[Part],
    image: &File,
    buffer: &mut Vec<u8>,
) -> Result<u64, FreezeError> {
    buffer.resize(chunk.len as usize, 0);
    for part in parts {
        let place = &mut buffer[part.at as usize..(part.at + part.len) as usize];
        memory.read(part, place).map_err(FreezeError::Memory)?;
    }
    write_content(image, buffer, chunk.offset)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    /// A mate that reads the memory of this process, and what comes of `act`.
    fn with_mate<T>(image: &File, act: impl FnOnce(Mate) -> T) -> (T, io::Result<()>) {
        let (own, remote) = message::control_pair().unwrap();
        let image = image.try_clone().unwrap();
        let mate = std::thread::spawn(move || {
            let proc: OwnedFd = File::open("/proc").unwrap().into();
            let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
            serve_mate(&remote, Sandbox::open(&proc, pidfd).unwrap(), &image)
        });
        let result = act(Mate::new(own));
        (result, mate.join().unwrap())
    }

    fn part(memory: &[u8], at: u32) -> Part {
        let address = memory.as_ptr() as u64;
        Part { address, at, len: memory.len() as u32, process: 1, reserved: 0 }
    }

    #[test]
    fn parts_of_chunks_are_copied_and_zeros_left_out() {
        const PAGE: usize = PAGE_SIZE as usize;
        let image = tempfile::tempfile().unwrap();
        let (one, two, zeros) = (vec![1; PAGE], vec![2; PAGE], vec![0; 20 * PAGE]);
        let chunk = PAGE as u64 * 22;
        let (stored, served) = with_mate(&image, |mut mate| {
            let parts = [part(&one, 0), part(&zeros, PAGE as u32), part(&two, 21 * PAGE as u32)];
            for number in 0..5 {
                while !mate.is_free().unwrap() {}
                mate.copy(number * chunk, chunk, &parts).unwrap();
            }
            mate.finish().unwrap()
        });
        served.unwrap();
        assert_eq!(stored, 10 * PAGE_SIZE);
        let mut found = vec![0; 5 * chunk as usize];
        image.read_exact_at(&mut found, 0).unwrap();
        let expected: Vec<u8> = [&one[..], &zeros, &two].concat().repeat(5);
        assert!(found == expected);
    }

    #[test]
    fn what_cannot_be_copied_is_an_error() {
        let image = tempfile::tempfile().unwrap();
        let page = vec![1; PAGE_SIZE as usize];
        for (wrong, written) in [
            (Part { process: 4711, ..part(&page, 0) }, true),
            (Part { address: 8, ..part(&page, 0) }, true),
            (part(&page, 0), false),
        ] {
            let file = match written {
                true => image.try_clone().unwrap(),
                false => File::open("/dev/null").unwrap(),
            };
            let (result, _) = with_mate(&file, |mut mate| {
                mate.copy(0, PAGE_SIZE, &[wrong]).unwrap();
                mate.finish()
            });
            let error = result.unwrap_err();
            assert_eq!(matches!(error, FreezeError::Memory(_)), written, "{error}");
        }
    }

    #[test]
    fn nonsense_ends_the_mate() {
        let image = tempfile::tempfile().unwrap();
        let page = vec![1; PAGE_SIZE as usize];
        for (len, wrong) in [
            (PAGE_SIZE, part(&page, 1)),
            (PAGE_SIZE, Part { at: u32::MAX, ..part(&page, 0) }),
            (CHUNK + PAGE_SIZE, part(&page, 0)),
        ] {
            let (result, served) = with_mate(&image, |mut mate| {
                mate.copy(0, len, &[wrong]).unwrap();
                mate.finish()
            });
            assert_eq!(served.unwrap_err().kind(), io::ErrorKind::InvalidData);
            assert!(result.is_err());
        }
    }
}
