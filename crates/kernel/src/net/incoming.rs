//! What has arrived at a connected socket and waits to be read.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::socket::{Ancillary, MessageFlags, Outgoing, Received};
use crate::errno::{Errno, Result};
use crate::io::{Sink, Source};
use crate::ipc::page_queue::PageQueue;

/// Bytes that Linux charges a sender for a message of `len` bytes: its buffer
/// comes in powers of two, and its descriptor is charged too. What matters is
/// that about as many small messages fit as there.
pub fn message_charge(len: usize) -> usize {
    const BUFFER_END: usize = 320;
    const DESCRIPTOR: usize = 256;
    (len + BUFFER_END).next_power_of_two().max(512) + DESCRIPTOR
}

/// A queue of bytes or of packets.
pub enum Incoming {
    /// `SOCK_STREAM`.
    Stream(Stream),
    /// `SOCK_SEQPACKET`.
    Packets(Packets),
}

/// Bytes, some of which have something travelling beside them.
pub struct Stream {
    bytes: PageQueue,
    /// Number of bytes ever read, and ever written.
    read: u64,
    written: u64,
    /// In order; a receive never crosses the border of one.
    marks: VecDeque<Mark>,
}

struct Mark {
    start: u64,
    end: u64,
    ancillary: Ancillary,
}

/// Packets with their bounds.
#[derive(Default)]
pub struct Packets {
    queue: VecDeque<Packet>,
    charge: usize,
}

struct Packet {
    bytes: Vec<u8>,
    ancillary: Ancillary,
}

impl Incoming {
    /// An empty stream.
    pub fn stream() -> Self {
        let bytes = PageQueue::new(usize::MAX);
        Self::Stream(Stream { bytes, read: 0, written: 0, marks: VecDeque::new() })
    }

    /// An empty queue of packets.
    pub fn packets() -> Self {
        Self::Packets(Packets::default())
    }

    /// Whether there is nothing to read.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Stream(stream) => stream.bytes.is_empty(),
            Self::Packets(packets) => packets.queue.is_empty(),
        }
    }

    /// Bytes that count against the sender's limit.
    pub fn charge(&self) -> usize {
        match self {
            Self::Stream(stream) => stream.bytes.len(),
            Self::Packets(packets) => packets.charge,
        }
    }

    /// Bytes that one receive can get, or more for a stream.
    pub fn readable_bytes(&self) -> usize {
        match self {
            Self::Stream(stream) => stream.bytes.len(),
            Self::Packets(packets) => packets.queue.front().map_or(0, |packet| packet.bytes.len()),
        }
    }

    /// Moves everything out, to be dropped without holding a lock.
    pub fn take_all(&mut self) -> Incoming {
        match self {
            Self::Stream(_) => core::mem::replace(self, Self::stream()),
            Self::Packets(_) => core::mem::replace(self, Self::packets()),
        }
    }

    /// Appends what fits below `limit`: a part of a stream's bytes, or a whole
    /// packet. `EAGAIN` if nothing fits, `EMSGSIZE` if the packet never would.
    pub fn push(
        &mut self,
        source: &mut Source<'_>,
        message: &mut Outgoing,
        limit: usize,
    ) -> Result<usize> {
        match self {
            Self::Stream(stream) => stream.push(source, message, limit),
            Self::Packets(packets) => packets.push(source, message, limit),
        }
    }

    /// Takes from the front, which must not be empty.
    pub fn pop(&mut self, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
        match self {
            Self::Stream(stream) => stream.pop(sink, flags),
            Self::Packets(packets) => packets.pop(sink, flags),
        }
    }
}

impl Stream {
    fn push(
        &mut self,
        source: &mut Source<'_>,
        message: &mut Outgoing,
        limit: usize,
    ) -> Result<usize> {
        if source.remaining() == 0 {
            return Ok(0);
        }
        let room = limit.saturating_sub(self.bytes.len());
        if room == 0 {
            return Err(Errno::EAGAIN);
        }
        let count = self.bytes.push(source, room)?;
        let start = self.written;
        self.written += count as u64;
        if !message.ancillary.is_empty() {
            let ancillary = core::mem::take(&mut message.ancillary);
            // Bytes of one sender are one piece, however they were written.
            if let Some(last) = self.marks.back_mut() {
                let plain = ancillary.files.is_empty() && last.ancillary.files.is_empty();
                if plain && last.end == start && last.ancillary.credentials == ancillary.credentials
                {
                    last.end = self.written;
                    return Ok(count);
                }
            }
            self.marks.push_back(Mark { start, end: self.written, ancillary });
        }
        Ok(count)
    }

    fn pop(&mut self, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
        let mut max = usize::MAX;
        let mut marked = false;
        if let Some(mark) = self.marks.front() {
            marked = mark.start <= self.read;
            let border = if marked { mark.end } else { mark.start };
            max = (border - self.read) as usize;
        }
        if flags.contains(MessageFlags::PEEK) {
            let count = self.bytes.peek(sink, 0, max)?;
            let mut received = Received::stream(count);
            if let (true, Some(mark)) = (marked, self.marks.front()) {
                received.ancillary = mark.ancillary.clone();
            }
            return Ok(received);
        }
        let count = self.bytes.pop(sink, max)?;
        self.read += count as u64;
        let mut received = Received::stream(count);
        if let (true, Some(mark)) = (marked, self.marks.front_mut()) {
            received.ancillary.credentials = mark.ancillary.credentials;
            received.ancillary.files = core::mem::take(&mut mark.ancillary.files);
            if mark.end == self.read {
                self.marks.pop_front();
            }
        }
        Ok(received)
    }
}

impl Packets {
    fn push(
        &mut self,
        source: &mut Source<'_>,
        message: &mut Outgoing,
        limit: usize,
    ) -> Result<usize> {
        let len = source.remaining();
        if len > limit.saturating_sub(32) {
            return Err(Errno::EMSGSIZE);
        }
        if self.charge >= limit {
            return Err(Errno::EAGAIN);
        }
        let bytes = source.take_all(len)?;
        self.charge += message_charge(len);
        self.queue.push_back(Packet { bytes, ancillary: core::mem::take(&mut message.ancillary) });
        Ok(len)
    }

    fn pop(&mut self, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
        let Some(packet) = self.queue.front() else { return Err(Errno::EAGAIN) };
        let length = packet.bytes.len();
        let bytes = sink.put(&packet.bytes)?;
        let cut = if bytes < length { MessageFlags::TRUNC } else { MessageFlags::empty() };
        let mut received = Received { bytes, length, flags: cut, ..Received::default() };
        if flags.contains(MessageFlags::PEEK) {
            received.ancillary = packet.ancillary.clone();
        } else if let Some(packet) = self.queue.pop_front() {
            self.charge -= message_charge(length);
            received.ancillary = packet.ancillary;
        }
        Ok(received)
    }
}
