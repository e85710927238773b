//! Datagrams that have arrived and wait to be read.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use super::address::SocketAddress;
use super::arrival::Arrival;
use super::incoming::message_charge;
use super::socket::{Ancillary, MessageFlags, Received};
use crate::errno::{Errno, Result};
use crate::io::Sink;

/// A datagram.
pub struct Datagram {
    /// Content.
    pub bytes: Vec<u8>,
    /// Address of the sender, if it has one.
    pub from: Option<SocketAddress>,
    /// What travels beside the bytes.
    pub ancillary: Ancillary,
    /// How it came, if that can be asked for.
    pub arrival: Option<Arrival>,
}

/// A queue of datagrams.
#[derive(Default)]
pub struct Inbox {
    queue: VecDeque<Datagram>,
    charge: usize,
}

impl Inbox {
    /// Number of datagrams.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Bytes of memory that count against limits.
    pub fn charge(&self) -> usize {
        self.charge
    }

    /// Bytes of the first datagram.
    pub fn first_len(&self) -> usize {
        self.queue.front().map_or(0, |datagram| datagram.bytes.len())
    }

    /// Appends a datagram.
    pub fn push(&mut self, datagram: Datagram) {
        self.charge += message_charge(datagram.bytes.len());
        self.queue.push_back(datagram);
    }

    /// Receives the first datagram; `EAGAIN` if there is none.
    pub fn receive(&mut self, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
        let Some(first) = self.queue.front() else { return Err(Errno::EAGAIN) };
        let length = first.bytes.len();
        let bytes = sink.put(&first.bytes)?;
        let cut = if bytes < length { MessageFlags::TRUNC } else { MessageFlags::empty() };
        let arrival = first.arrival;
        let (from, ancillary) = if flags.contains(MessageFlags::PEEK) {
            (first.from.clone(), first.ancillary.clone())
        } else {
            self.charge -= message_charge(length);
            match self.queue.pop_front() {
                Some(datagram) => (datagram.from, datagram.ancillary),
                None => (None, Ancillary::default()),
            }
        };
        Ok(Received { bytes, length, from, ancillary, arrival, flags: cut })
    }

    /// Moves everything out, to be dropped without holding a lock.
    pub fn take_all(&mut self) -> Inbox {
        core::mem::take(self)
    }
}
