//! Sockets of the sandbox' own: one thread of the host reads, serves and replies there.
//!
//! It looks for the next request before it sleeps, and here the reply is looked for before the
//! virtual CPU sleeps. So most requests wake nobody.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use thaw_abi::control::MSG_REPLY;

use super::broker;
use super::control::{self, Message};
use crate::errno::{Errno, Result};
use crate::platform::machine::{Clocks, HostFd, Machine};

/// How long a reply is looked for without sleep, in nanoseconds: to be woken takes as long on a
/// virtual machine.
const EAGERNESS_NS: u64 = 100_000;
/// Requests after which a reply is looked for again, if the last look was in vain: there may be
/// no processor for the host's thread as long as this one is used.
const SLEEPS: u32 = 16;

/// Whether a reply is worth to be looked for without sleep.
pub struct Pace {
    sleeps_left: AtomicU32,
}

/// Why there is no reply.
pub enum Ended {
    /// The host has not read the request, or not served it and said so.
    NotServed,
    /// It has read it.
    Perhaps,
}

/// A request.
pub struct Request<'a> {
    /// `MSG_*`.
    pub kind: u32,
    /// What follows the header, one after the other.
    pub parts: [&'a [u8]; 2],
    /// It waits for a disk, so its reply is not looked for.
    pub is_slow: bool,
}

impl Pace {
    /// It is.
    pub const fn new() -> Self {
        Self { sleeps_left: AtomicU32::new(0) }
    }

    /// The reply to a request over `socket`; an error within if it is that of another one.
    pub fn ask(
        &self,
        socket: HostFd,
        request: &Request<'_>,
    ) -> core::result::Result<Result<Message>, Ended> {
        let sequence = broker::next_sequence();
        control::send_to(socket, request.kind, sequence, request.parts)
            .map_err(|_| Ended::NotServed)?;
        let message = match request.is_slow {
            true => control::receive_from(socket, false),
            false => self.wait_for_reply(socket),
        };
        let message = message.map_err(|error| match error {
            // unix(7): what the other end has not read is lost.
            Errno::ECONNRESET => Ended::NotServed,
            _ => Ended::Perhaps,
        })?;
        let is_reply = message.kind == MSG_REPLY && message.sequence == sequence;
        Ok(if is_reply { Ok(message) } else { Err(Errno::EIO) })
    }

    fn wait_for_reply(&self, socket: HostFd) -> Result<Message> {
        match self.look_for_reply(socket) {
            Err(Errno::EAGAIN) => control::receive_from(socket, false),
            received => received,
        }
    }

    /// Looks without sleep; `EAGAIN` if nothing has come, or it is not worth while.
    fn look_for_reply(&self, socket: HostFd) -> Result<Message> {
        let sleeps = self.sleeps_left.load(Relaxed);
        if sleeps > 0 {
            self.sleeps_left.store(sleeps - 1, Relaxed);
            return Err(Errno::EAGAIN);
        }
        let begun = Machine::monotonic_ns();
        loop {
            match control::receive_from(socket, true) {
                Err(Errno::EAGAIN) if Machine::monotonic_ns() - begun < EAGERNESS_NS => {}
                Err(Errno::EAGAIN) => {
                    self.sleeps_left.store(SLEEPS, Relaxed);
                    return Err(Errno::EAGAIN);
                }
                received => return received,
            }
        }
    }
}
