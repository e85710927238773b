//! Bytes of a client, of which one takes records that are whole (RFC 8446 §5.1).

use super::broken::Broken;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, ReadBuf};

/// Bytes of the header of a record.
pub(super) const HEADER: usize = 5;
/// Most bytes of a record, with its header: those of TLS 1.2 may be longer than those of TLS 1.3
/// (RFC 5246 §6.2.3).
pub(super) const RECORD_MAX: usize = HEADER + (1 << 14) + 2048;
/// The kinds of records: change_cipher_spec, alert, handshake, application_data, heartbeat.
const KINDS: std::ops::RangeInclusive<u8> = 20..=24;

/// What was read of a socket and not taken yet: at most [`RECORD_MAX`] bytes.
#[derive(Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Inbox {
    /// With what somebody else has read; `None`: it is more than one reads ahead.
    pub fn with(held: &[u8]) -> Option<Self> {
        let is_bounded = held.len() <= RECORD_MAX;
        is_bounded.then(|| Self { bytes: held.to_vec(), start: 0, end: held.len() })
    }

    /// All of it.
    pub fn held(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Bytes of the record at the beginning, with its header; `None`: it is not whole.
    ///
    /// # Errors
    /// It is no record.
    pub fn first(&self) -> Result<Option<usize>, Broken> {
        match *self.held() {
            [kind, ..] if !KINDS.contains(&kind) => Err(Broken::NoRecord),
            [_, major, ..] if major != 3 => Err(Broken::NoRecord),
            [_, _, _, high, low, ..] => {
                let length = HEADER + usize::from(u16::from_be_bytes([high, low]));
                match length > RECORD_MAX {
                    true => Err(Broken::TooLong),
                    false => Ok((self.held().len() >= length).then_some(length)),
                }
            }
            _ => Ok(None),
        }
    }

    /// So many bytes at the beginning, which are there.
    pub fn peek_mut(&mut self, count: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.end][..count]
    }

    /// Takes so many bytes, which are there.
    pub fn consume(&mut self, count: usize) {
        self.start += count;
        debug_assert!(self.start <= self.end, "they are there");
    }

    /// Reads more, after a record that is not whole. Returns how many bytes; 0 at the end.
    pub fn poll_fill(
        &mut self,
        stream: &mut (impl AsyncRead + Unpin),
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        self.make_room();
        let mut buffer = ReadBuf::new(&mut self.bytes[self.end..]);
        let read = Pin::new(stream).poll_read(context, &mut buffer);
        let count = buffer.filled().len();
        self.end += count;
        if self.held().is_empty() {
            // A connection on which nothing comes needs no memory.
            *self = Self::default();
        }
        read.map_ok(|()| count)
    }

    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    fn make_room(&mut self) {
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        self.bytes.resize(RECORD_MAX, 0);
    }
}
