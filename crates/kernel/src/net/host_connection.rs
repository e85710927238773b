//! Connections that the host handed in.
//!
//! The bytes go straight between guest memory and the host's socket. Addresses
//! come from the host's message, options are kept here: the host needs none.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, Ordering};

use super::address::{Endpoint, SocketAddress};
use super::host_poll::{Handle, HostFile, HostPoll, Kind};
use super::options::Options;
use super::socket::{
    Blocking, Common, IN, MessageFlags, OUT, Outgoing, Protocol, Received, ShutdownHow, SocketType,
};
use super::tcp::IPPROTO_TCP;
use crate::errno::{Errno, Result};
use crate::fs::file::Events;
use crate::io::{Sink, Source};
use crate::ipc::seam;
use crate::platform::host::{self, HostFd, Peek};

/// A client of the function.
pub struct HostConnection {
    common: Common,
    host: Arc<HostFile>,
    /// The host's number for the connection.
    id: u64,
    generation: u64,
    peer: Endpoint,
    local: Endpoint,
    reading_shut: AtomicBool,
    writing_shut: AtomicBool,
    closed: AtomicBool,
    error_taken: AtomicBool,
}

impl HostConnection {
    /// A connection that arrived in this boot, for a listener of `family`
    /// with these options.
    pub fn new(
        polls: &HostPoll,
        connection: &thaw_abi::control::Connection,
        fd: HostFd,
        family: u16,
        options: Options,
        ino: u64,
    ) -> Arc<Self> {
        let common = Common::new(family, SocketType::Stream, IPPROTO_TCP, ino);
        *common.options.lock() = options;
        let generation = seam::boot_generation();
        let host =
            HostFile::new(Handle::OfBoot { fd, generation }, Kind::Socket, common.queue.clone());
        polls.register(&host);
        Arc::new(Self {
            common,
            host,
            id: connection.id,
            generation,
            peer: Endpoint::from_host(&connection.peer),
            local: Endpoint::from_host(&connection.local),
            reading_shut: AtomicBool::new(false),
            writing_shut: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            error_taken: AtomicBool::new(false),
        })
    }

    /// Whether it belongs to this boot and is open.
    fn is_live(&self) -> bool {
        self.generation == seam::boot_generation() && !self.closed.load(Ordering::Relaxed)
    }

    fn check_shut(&self, half: &AtomicBool) -> bool {
        half.load(Ordering::Relaxed)
    }
}

impl Protocol for HostConnection {
    fn common(&self) -> &Common {
        &self.common
    }

    fn bind(&self, _address: &SocketAddress) -> Result<()> {
        Err(Errno::EINVAL)
    }

    fn connect(&self, _address: &SocketAddress, _blocking: Blocking) -> Result<()> {
        Err(Errno::EISCONN)
    }

    fn local_address(&self) -> SocketAddress {
        self.local.for_family(self.common.family)
    }

    fn peer_address(&self) -> Result<SocketAddress> {
        if self.is_live() {
            Ok(self.peer.for_family(self.common.family))
        } else {
            Err(Errno::ENOTCONN)
        }
    }

    fn send(&self, source: &mut Source<'_>, message: &mut Outgoing) -> Result<usize> {
        if message.flags.contains(MessageFlags::OOB) {
            return Err(Errno::EOPNOTSUPP);
        }
        if self.check_shut(&self.writing_shut) {
            return Err(Errno::EPIPE);
        }
        let outcome = self.host.write(source);
        match outcome {
            Ok(count) if count > 0 => seam::first_byte(),
            // What is not of this boot is reset once, and closed from then on.
            Err(Errno::ECONNRESET) => self.writing_shut.store(true, Ordering::Relaxed),
            _ => {}
        }
        outcome
    }

    fn receive(&self, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
        if flags.contains(MessageFlags::OOB) {
            return Err(Errno::EINVAL);
        }
        if self.check_shut(&self.reading_shut) {
            return Ok(Received::default());
        }
        let peek = if flags.contains(MessageFlags::PEEK) { Peek::Yes } else { Peek::No };
        let outcome = self.host.read(sink, peek);
        if outcome == Err(Errno::ECONNRESET) && !self.is_live() {
            self.reading_shut.store(true, Ordering::Relaxed);
        }
        outcome.map(Received::stream)
    }

    fn shutdown(&self, how: ShutdownHow) -> Result<()> {
        let fd = self.host.fd().map_err(|_| Errno::ENOTCONN)?;
        host::shutdown(fd, how as u32)?;
        if how.reads() {
            self.reading_shut.store(true, Ordering::Relaxed);
        }
        if how.writes() {
            self.writing_shut.store(true, Ordering::Relaxed);
        }
        self.common.queue.wake_all(IN | OUT | Events::RDHUP | Events::HUP);
        Ok(())
    }

    fn poll(&self) -> Events {
        let mut events = self.host.poll();
        let (reading, writing) =
            (self.check_shut(&self.reading_shut), self.check_shut(&self.writing_shut));
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

    fn readable_bytes(&self) -> Result<usize> {
        let Ok(fd) = self.host.fd() else { return Ok(0) };
        // The host call for this is not on the list; a look at the data is.
        let mut buffer = [0u8; 4096];
        match host::recv(fd, buffer.as_mut_ptr() as u64, buffer.len(), Peek::Yes) {
            Ok(count) => Ok(count),
            Err(_) => Ok(0),
        }
    }

    fn take_error(&self) -> Option<Errno> {
        // The host's pending error cannot be asked for; that there is one can.
        let failed = !self.is_live() || self.host.poll().contains(Events::ERR);
        let first = failed && !self.error_taken.swap(true, Ordering::Relaxed);
        first.then_some(Errno::ECONNRESET)
    }

    fn close(&self) {
        if !self.is_live() {
            return;
        }
        self.closed.store(true, Ordering::Relaxed);
        if let Ok(fd) = self.host.fd() {
            // The gateway still holds the socket: closing alone would not end
            // the connection.
            let _ = host::shutdown(fd, ShutdownHow::Both as u32);
            host::close(fd);
        }
        seam::connection_closed(self.id);
    }
}

impl Drop for HostConnection {
    fn drop(&mut self) {
        self.close();
    }
}
