//! The guest's end of a stream that is a socket of the host: what clients that
//! were handed in and connections to the outside have in common.
//!
//! The bytes go straight between guest memory and the host's socket.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::socket::{IN, MessageFlags, OUT, Outgoing, Received, ShutdownHow};
use super::sockets::ConnectionState;
use crate::errno::{Errno, Result};
use crate::fs::file::Events;
use crate::io::{Sink, Source};
use crate::platform::machine::{HostFd, HostFiles, Machine, Peek};
use crate::state;
use crate::task::host_poll::{Handle, HostFile, Kind};
use crate::task::wait::WaitQueue;

/// A stream over a host descriptor.
pub struct HostStream {
    host: Arc<HostFile>,
    generation: AtomicU64,
    reading_shut: AtomicBool,
    writing_shut: AtomicBool,
    closed: AtomicBool,
    error_taken: AtomicBool,
    /// Something was sent since something was last received.
    awaits_answer: AtomicBool,
}

impl HostStream {
    /// A stream over a descriptor of this boot, whose changes wake `queue`.
    pub fn of_this_boot(fd: HostFd, kind: Kind, queue: Arc<WaitQueue>) -> Self {
        Self::of_boot(HostFile::of_this_boot(fd, kind, queue), state::generation())
    }

    /// A stream that was reset.
    pub fn lost(queue: Arc<WaitQueue>) -> Self {
        Self::of_boot(HostFile::new(Handle::Lost, Kind::Socket, queue), u64::MAX)
    }

    fn of_boot(host: Arc<HostFile>, generation: u64) -> Self {
        Self {
            host,
            generation: AtomicU64::new(generation),
            reading_shut: AtomicBool::new(false),
            writing_shut: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            error_taken: AtomicBool::new(false),
            awaits_answer: AtomicBool::new(false),
        }
    }

    /// Whether neither side is waited for: all that was sent was answered, and all
    /// that came was read, as far as a look at the host shows.
    pub fn is_at_rest(&self) -> bool {
        let silent = |fd| matches!(look(fd), Err(Errno::EAGAIN));
        !self.awaits_answer.load(Ordering::Relaxed)
            && !self.reading_shut.load(Ordering::Relaxed)
            && !self.writing_shut.load(Ordering::Relaxed)
            && self.host.fd().is_ok_and(silent)
    }

    /// Whether it belongs to this boot and is open.
    pub fn is_live(&self) -> bool {
        self.generation.load(Ordering::Relaxed) == state::generation()
            && !self.closed.load(Ordering::Relaxed)
    }

    /// The state of the connection; `None` if there is none any more.
    pub fn state(&self) -> Option<ConnectionState> {
        if !self.is_live() {
            return None;
        }
        Some(match self.writing_shut.load(Ordering::Relaxed) {
            true => ConnectionState::FinWait2,
            false if self.host.poll().contains(Events::RDHUP) => ConnectionState::CloseWait,
            false => ConnectionState::Established,
        })
    }

    /// The stream, which was live when the sandbox was frozen, is `fd` in this boot; `false` if it
    /// was not live.
    pub fn goes_on(&self, fd: HostFd) -> bool {
        let frozen = state::generation().wrapping_sub(1);
        if self.generation.load(Ordering::Relaxed) != frozen || self.closed.load(Ordering::Relaxed)
        {
            return false;
        }
        self.generation.store(state::generation(), Ordering::Relaxed);
        self.host.goes_on(fd);
        true
    }

    /// How the connect of a fresh socket has ended; `EAGAIN` if it has not.
    pub fn connect_outcome(&self) -> Result<()> {
        let fd = self.host.fd()?;
        if !self.host.poll().intersects(Events::OUT | Events::ERR | Events::HUP) {
            return Err(Errno::EAGAIN);
        }
        // The host's SO_ERROR cannot be asked for, but a receive reports it.
        match look(fd) {
            Ok(_) | Err(Errno::EAGAIN) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Sends.
    pub fn send(&self, source: &mut Source<'_>, message: &Outgoing) -> Result<usize> {
        if message.flags.contains(MessageFlags::OOB) {
            return Err(Errno::EOPNOTSUPP);
        }
        if self.writing_shut.load(Ordering::Relaxed) {
            return Err(Errno::EPIPE);
        }
        let outcome = self.host.write(source);
        if outcome.is_ok_and(|count| count > 0) {
            self.awaits_answer.store(true, Ordering::Relaxed);
        }
        self.note_reset(&outcome);
        outcome
    }

    /// Receives.
    pub fn receive(&self, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
        if flags.contains(MessageFlags::OOB) {
            return Err(Errno::EINVAL);
        }
        if self.reading_shut.load(Ordering::Relaxed) {
            return Ok(Received::default());
        }
        let peek = if flags.contains(MessageFlags::PEEK) { Peek::Yes } else { Peek::No };
        let outcome = self.host.read(sink, peek);
        if peek == Peek::No && outcome.is_ok_and(|count| count > 0) {
            self.awaits_answer.store(false, Ordering::Relaxed);
        }
        self.note_reset(&outcome);
        outcome.map(Received::stream)
    }

    /// What is not of this boot is reset once, and closed from then on.
    fn note_reset(&self, outcome: &Result<usize>) {
        if *outcome == Err(Errno::ECONNRESET) && !self.is_live() {
            self.reading_shut.store(true, Ordering::Relaxed);
            self.writing_shut.store(true, Ordering::Relaxed);
        }
    }

    /// shutdown(2).
    pub fn shutdown(&self, how: ShutdownHow) -> Result<()> {
        let fd = self.host.fd().map_err(|_| Errno::ENOTCONN)?;
        Machine::shutdown(fd, how as u32)?;
        if how.reads() {
            self.reading_shut.store(true, Ordering::Relaxed);
        }
        if how.writes() {
            self.writing_shut.store(true, Ordering::Relaxed);
        }
        self.host.queue().wake_all(IN | OUT | Events::RDHUP | Events::HUP);
        Ok(())
    }

    /// What is possible without waiting.
    pub fn poll(&self) -> Events {
        let mut events = self.host.poll();
        let reading = self.reading_shut.load(Ordering::Relaxed);
        let writing = self.writing_shut.load(Ordering::Relaxed);
        if reading {
            events |= IN | Events::RDHUP;
        }
        if writing {
            events |= OUT;
        }
        if reading && writing {
            events |= Events::HUP;
        }
        events
    }

    /// Bytes that can be read, as far as a look at them shows.
    pub fn readable_bytes(&self) -> usize {
        let Ok(fd) = self.host.fd() else { return 0 };
        // The host call for this is not on the list; a look at the data is.
        let mut buffer = [0u8; 4096];
        Machine::recv(fd, buffer[..].as_mut().into(), Peek::Yes).unwrap_or(0)
    }

    /// The pending error, once.
    pub fn take_error(&self) -> Option<Errno> {
        let failed = !self.is_live() || self.host.poll().contains(Events::ERR);
        if !failed || self.error_taken.swap(true, Ordering::Relaxed) {
            return None;
        }
        let found = self.host.fd().and_then(look);
        Some(found.err().filter(|error| *error != Errno::EAGAIN).unwrap_or(Errno::ECONNRESET))
    }

    /// Closes the descriptor; `false` if there was none any more.
    pub fn close(&self, ending: Ending) -> bool {
        if !self.is_live() {
            return false;
        }
        self.closed.store(true, Ordering::Relaxed);
        if let Ok(fd) = self.host.fd() {
            if ending == Ending::ForAll {
                let _ = Machine::shutdown(fd, ShutdownHow::Both as u32);
            }
            Machine::close(fd);
        }
        true
    }
}

impl Drop for HostStream {
    fn drop(&mut self) {
        self.close(Ending::OwnOnly);
    }
}

/// Whether closing a descriptor ends the connection by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Nobody else holds the socket.
    OwnOnly,
    /// Somebody does: the connection is shut down first.
    ForAll,
}

/// Peeks at one byte: what it says of the socket is what counts.
fn look(fd: HostFd) -> Result<usize> {
    Machine::recv(fd, [0u8; 1][..].as_mut().into(), Peek::Yes)
}
