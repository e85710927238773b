//! What has arrived at a connected socket and waits to be read.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::socket::{Ancillary, MessageFlags, Outgoing, Received};
use crate::errno::{Errno, Result};
use crate::fs::page_queue::PageQueue;
use crate::io::{Sink, Source};

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
    /// The newest byte that was sent as urgent, until it is passed.
    urgent: Option<Urgent>,
    /// Urgent bytes are read with the others (`SO_OOBINLINE`).
    urgent_inline: bool,
}

/// A byte that was sent with `MSG_OOB` (tcp(7)).
struct Urgent {
    /// Its place in the stream.
    at: u64,
    byte: u8,
    /// It was received with `MSG_OOB`.
    taken: bool,
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
        Self::Stream(Stream {
            bytes,
            read: 0,
            written: 0,
            marks: VecDeque::new(),
            urgent: None,
            urgent_inline: false,
        })
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

    /// Whether a receive finds something: more than an urgent byte that it skips.
    pub fn is_readable(&self) -> bool {
        match self {
            Self::Stream(stream) => stream.bytes.len() > stream.hidden(),
            Self::Packets(packets) => !packets.queue.is_empty(),
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

    /// The stream, if it is one.
    pub fn as_stream(&mut self) -> Option<&mut Stream> {
        match self {
            Self::Stream(stream) => Some(stream),
            Self::Packets(_) => None,
        }
    }
}

impl Stream {
    /// Makes the last byte the urgent one.
    pub fn mark_urgent(&mut self) {
        // The one before becomes a byte like others, unless it is the next to
        // be read: then it is skipped (tcp_check_urg).
        self.skip_urgent();
        let mut byte = [0];
        let last = self.bytes.len().saturating_sub(1);
        if let Ok(1) = self.bytes.peek(&mut Sink::kernel(&mut byte), last, 1) {
            self.urgent = Some(Urgent { at: self.written - 1, byte: byte[0], taken: false });
        }
    }

    /// Receives the urgent byte (`MSG_OOB`); `EINVAL` if there is none.
    pub fn take_urgent(&mut self, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
        let inline = self.urgent_inline;
        let urgent = self.urgent.as_mut().filter(|urgent| !inline && !urgent.taken);
        let urgent = urgent.ok_or(Errno::EINVAL)?;
        let count = sink.put(&[urgent.byte])?;
        urgent.taken = !flags.contains(MessageFlags::PEEK);
        Ok(Received { flags: MessageFlags::OOB, ..Received::stream(count) })
    }

    /// Says whether urgent bytes are read with the others.
    pub fn set_urgent_inline(&mut self, inline: bool) {
        self.urgent_inline = inline;
    }

    /// Whether there is an urgent byte that was not received as one.
    pub fn has_urgent(&self) -> bool {
        self.urgent.as_ref().is_some_and(|urgent| !urgent.taken)
    }

    /// Whether the next byte is the urgent one (`SIOCATMARK`).
    pub fn is_at_urgent(&self) -> bool {
        self.urgent.as_ref().is_some_and(|urgent| urgent.at == self.read)
    }

    /// Drops the urgent byte if it comes next and is not to be read with the others.
    pub fn skip_urgent(&mut self) {
        let hidden = self.hidden();
        self.bytes.discard(hidden);
        self.advance(hidden);
    }

    /// Number of bytes that the next read leaves out: an urgent one or none.
    fn hidden(&self) -> usize {
        usize::from(!self.urgent_inline && self.is_at_urgent())
    }

    /// Bytes up to the urgent one, unless that is read with the others.
    pub fn before_urgent(&self) -> usize {
        match &self.urgent {
            Some(urgent) if !self.urgent_inline => (urgent.at - self.read) as usize,
            _ => usize::MAX,
        }
    }

    /// Notes that `count` bytes were read.
    fn advance(&mut self, count: usize) {
        self.read += count as u64;
        self.urgent.take_if(|urgent| urgent.at < self.read);
    }

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
        if flags.contains(MessageFlags::PEEK) {
            return self.peek(sink);
        }
        self.skip_urgent();
        let (max, marked) = self.piece(0);
        let count = self.bytes.pop(sink, max)?;
        self.advance(count);
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

    fn peek(&self, sink: &mut Sink<'_>) -> Result<Received> {
        let hidden = self.hidden();
        let (max, marked) = self.piece(hidden);
        let mut received = Received::stream(self.bytes.peek(sink, hidden, max)?);
        if let (true, Some(mark)) = (marked, self.marks.front()) {
            received.ancillary = mark.ancillary.clone();
        }
        Ok(received)
    }

    /// Most bytes that one receive gets from the front, without the first
    /// `hidden`, and whether something travels beside them.
    fn piece(&self, hidden: usize) -> (usize, bool) {
        let start = self.read + hidden as u64;
        let mut end = u64::MAX;
        let mut marked = false;
        if let Some(mark) = self.marks.front() {
            marked = mark.start <= start;
            end = if marked { mark.end } else { mark.start };
        }
        // A receive ends before the urgent byte, also if that is read like others.
        if let Some(urgent) = self.urgent.as_ref().filter(|urgent| urgent.at > start) {
            end = end.min(urgent.at);
        }
        ((end - start) as usize, marked)
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
