//! Connections that the host handed in.
//!
//! Addresses come from the host's message, options are kept here: the host
//! needs none.

use alloc::sync::{Arc, Weak};
use alloc::vec::Vec;

use super::address::{Endpoint, SocketAddress};
use super::host_stream::{Ending, HostStream};
use super::options::Options;
use super::socket::{
    Blocking, Common, MessageFlags, Outgoing, Protocol, Received, ShutdownHow, SocketType,
};
use super::sockets::Listed;
use super::tcp::IPPROTO_TCP;
use crate::errno::{Errno, Result};
use crate::fs::file::Events;
use crate::host::control;
use crate::host::phases;
use crate::io::{Sink, Source};
use crate::platform::machine::{HostFd, HostFiles, Machine};
use crate::state::kernel;
use crate::sync::KernelCell;
use crate::task::host_poll::Kind;

/// A client of the function.
pub struct HostConnection {
    common: Common,
    stream: HostStream,
    /// The host's number for the connection; none: the host sees its end by itself.
    id: Option<u64>,
    peer: Endpoint,
    local: Endpoint,
}

impl HostConnection {
    /// A connection that arrived in this boot, for a listener of `family`
    /// with these options.
    pub fn new(
        connection: &thaw_abi::control::Connection,
        fd: HostFd,
        family: u16,
        options: Options,
        ino: u64,
    ) -> Arc<Self> {
        let common = Common::new(family, SocketType::Stream, IPPROTO_TCP, ino);
        *common.options.borrow_mut() = options;
        let stream = HostStream::of_this_boot(fd, Kind::Socket, common.queue.clone());
        let connection = Arc::new(Self {
            common,
            stream,
            id: Some(connection.id),
            peer: Endpoint::from_host(&connection.peer),
            local: Endpoint::from_host(&connection.local),
        });
        kernel().net.clients.note(&connection);
        connection
    }

    /// A connection that the host has made to a port by itself, as from the sandbox's own loopback.
    pub fn of_port(
        local: Endpoint,
        fd: HostFd,
        family: u16,
        options: Options,
        ino: u64,
    ) -> Arc<Self> {
        let common = Common::new(family, SocketType::Stream, IPPROTO_TCP, ino);
        *common.options.borrow_mut() = options;
        let stream = HostStream::of_this_boot(fd, Kind::Socket, common.queue.clone());
        Arc::new(Self { common, stream, id: None, peer: local.with_port(HOST_PORT), local })
    }
}

/// The port that connections of the host seem to come from.
const HOST_PORT: u16 = 1;

/// The connections of clients that somebody has. Saved.
#[derive(Default)]
pub struct Clients(KernelCell<Vec<Weak<HostConnection>>>);

impl Clients {
    fn note(&self, connection: &Arc<HostConnection>) {
        let mut all = self.0.borrow_mut();
        // Each is looked at again when the list has doubled only.
        if all.len() == all.capacity() {
            all.retain(|other| other.strong_count() > 0);
        }
        all.push(Arc::downgrade(connection));
    }

    /// After a thaw: a connection that the sandbox had when it was frozen goes on over `fd`. If it
    /// was closed by then, the host hears of that.
    pub fn go_on(&self, id: u64, fd: HostFd) {
        let found = {
            let all = self.0.borrow_mut();
            all.iter()
                .filter_map(Weak::upgrade)
                .find(|one| one.id == Some(id) && one.stream.goes_on(fd))
        };
        if found.is_none() {
            let _ = Machine::shutdown(fd, ShutdownHow::Both as u32);
            Machine::close(fd);
            control::connection_closed(id);
        }
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
        if self.stream.is_live() {
            Ok(self.peer.for_family(self.common.family))
        } else {
            Err(Errno::ENOTCONN)
        }
    }

    fn listed(&self) -> Option<Listed> {
        let listed = Listed::new(self.stream.state()?);
        let receive_queue = self.stream.readable_bytes();
        Some(Listed { remote: Some(self.peer), receive_queue, ..listed })
    }

    fn send(&self, source: &mut Source<'_>, message: &mut Outgoing) -> Result<usize> {
        let outcome = self.stream.send(source, message);
        if self.id.is_some() && outcome.is_ok_and(|count| count > 0) {
            phases::first_byte();
        }
        outcome
    }

    fn receive(&self, sink: &mut Sink<'_>, flags: MessageFlags) -> Result<Received> {
        self.stream.receive(sink, flags)
    }

    fn shutdown(&self, how: ShutdownHow) -> Result<()> {
        self.stream.shutdown(how)
    }

    fn poll(&self) -> Events {
        self.stream.poll()
    }

    fn readable_bytes(&self) -> Result<usize> {
        Ok(self.stream.readable_bytes())
    }

    fn is_at_urgent(&self) -> Result<bool> {
        Ok(false)
    }

    fn take_error(&self) -> Option<Errno> {
        self.stream.take_error()
    }

    fn close(&self) {
        // The gateway still holds the socket: closing alone would not end the
        // connection.
        if let (true, Some(id)) = (self.stream.close(Ending::ForAll), self.id) {
            control::connection_closed(id);
        }
    }
}

impl Drop for HostConnection {
    fn drop(&mut self) {
        self.close();
    }
}
