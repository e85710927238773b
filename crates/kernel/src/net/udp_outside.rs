//! Datagrams to and from the outside.
//!
//! A sandbox cannot address datagrams on the host, so each destination of a
//! socket has a connected socket of the host: a flow. A flow that a thaw or the
//! resolver has ended is made anew by the next datagram. A client of the function
//! is a flow, too, which the host has handed in.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::IpAddr;

use super::address::Endpoint;
use super::arrival::Arrival;
use super::outside::source_address;
use super::socket::{Common, MessageFlags, Received};
use crate::errno::{Errno, Result};
use crate::fs::file::Events;
use crate::host::control;
use crate::host::phases;
use crate::io::Sink;
use crate::net::outside;
use crate::platform::machine::{HostFd, HostFiles, Machine};
use crate::sync::KernelCell;
use crate::task::host_poll::{HostFile, Kind};
use crate::task::wait::WaitQueue;

/// Most flows of one socket that are no clients; the one that was used least
/// recently goes.
const FLOWS_MAX: usize = 64;

/// A socket of the host for one destination.
struct Flow {
    peer: Endpoint,
    host: Arc<HostFile>,
    client: Option<Client>,
}

/// What makes a flow that of a client.
#[derive(Clone, Copy)]
struct Client {
    /// The host's number for it.
    id: u64,
    /// The address that it sends to.
    local: Endpoint,
}

impl Flow {
    /// The address of the sandbox that datagrams come to.
    fn local_address(&self) -> Option<IpAddr> {
        match self.client {
            Some(client) => Some(client.local.ip),
            None => source_address(self.peer.ip).ok(),
        }
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        if let Ok(fd) = self.host.fd() {
            Machine::close(fd);
            if let Some(client) = self.client {
                control::connection_closed(client.id);
            }
        }
    }
}

/// The flows of one socket, those used last at the end.
#[derive(Default)]
pub struct Flows {
    flows: KernelCell<Vec<Arc<Flow>>>,
}

impl Flows {
    /// Adds a client of the function, whose datagrams come and go over `fd`.
    pub fn add_client(
        &self,
        connection: &thaw_abi::control::Connection,
        fd: HostFd,
        queue: &Arc<WaitQueue>,
    ) {
        let host = HostFile::of_this_boot(fd, Kind::Datagram, queue.clone());
        let client = Client { id: connection.id, local: Endpoint::from_host(&connection.local) };
        let peer = Endpoint::from_host(&connection.peer);
        let flow = Arc::new(Flow { peer, host, client: Some(client) });
        let old = {
            let mut flows = self.flows.borrow_mut();
            let old = flows.iter().position(|flow| flow.peer == peer).map(|at| flows.remove(at));
            flows.push(flow);
            old
        };
        drop(old);
        queue.wake_all(Events::IN | Events::RDNORM);
    }

    /// Whether `peer` is a client.
    pub fn is_client(&self, peer: Endpoint) -> bool {
        let flows = self.flows.borrow_mut();
        let mut clients = flows.iter().filter(|flow| flow.client.is_some());
        clients.any(|flow| flow.peer == peer && flow.host.fd().is_ok())
    }

    /// Whether there is a flow to `peer`, which is no client.
    pub fn leads_to(&self, peer: Endpoint) -> bool {
        let flows = self.flows.borrow_mut();
        let mut own = flows.iter().filter(|flow| flow.client.is_none());
        own.any(|flow| flow.peer == peer && flow.host.fd().is_ok())
    }

    /// Sends a datagram to a client; `ECONNRESET` if it is gone.
    pub fn send_to_client(&self, to: Endpoint, bytes: &[u8]) -> Result<()> {
        let flows = self.snapshot();
        let found = flows.iter().find(|flow| flow.client.is_some() && flow.peer == to);
        let flow = found.ok_or(Errno::ECONNRESET)?;
        match flow.host.send_datagram(bytes) {
            // UDP promises nothing: neither that there is room nor that anybody is there.
            Ok(()) | Err(Errno::EAGAIN | Errno::EPIPE | Errno::ECONNRESET) => {
                phases::first_byte();
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Sends a datagram; `queue` is woken when an answer comes.
    pub fn send(&self, to: Endpoint, bytes: &[u8], queue: &Arc<WaitQueue>) -> Result<()> {
        let mut again = true;
        loop {
            let flow = self.flow_to(to, queue)?;
            match flow.host.send_datagram(bytes) {
                // Its other end has gone: the resolver does so.
                Err(Errno::EPIPE | Errno::ECONNRESET | Errno::ENOTCONN) if again => {
                    again = false;
                    self.remove(&flow);
                }
                // UDP promises nothing; a full buffer loses what comes.
                Err(Errno::EAGAIN) => return Ok(()),
                outcome => return outcome,
            }
        }
    }

    fn flow_to(&self, to: Endpoint, queue: &Arc<WaitQueue>) -> Result<Arc<Flow>> {
        let found = {
            let mut flows = self.flows.borrow_mut();
            flows.retain(|flow| flow.host.fd().is_ok());
            let found = flows.iter().position(|flow| flow.peer == to).map(|at| flows.remove(at));
            if let Some(flow) = &found {
                flows.push(flow.clone());
            }
            found
        };
        if let Some(flow) = found {
            return Ok(flow);
        }
        let fd = outside::open_datagrams(to).map_err(|error| match error {
            Errno::EAGAIN => Errno::ENOBUFS,
            error => error,
        })?;
        let host = HostFile::of_this_boot(fd, Kind::Datagram, queue.clone());
        let flow = Arc::new(Flow { peer: to, host, client: None });
        let oldest = {
            let mut flows = self.flows.borrow_mut();
            flows.push(flow.clone());
            let own = flows.iter().filter(|flow| flow.client.is_none()).count();
            let oldest = flows.iter().position(|flow| flow.client.is_none());
            oldest.filter(|_| own > FLOWS_MAX).map(|at| flows.remove(at))
        };
        drop(oldest);
        Ok(flow)
    }

    fn remove(&self, flow: &Arc<Flow>) {
        self.flows.borrow_mut().retain(|other| !Arc::ptr_eq(flow, other));
    }

    /// Forgets all flows but the one to `peer`.
    pub fn keep_only(&self, peer: Endpoint) {
        let flows = core::mem::take(&mut *self.flows.borrow_mut());
        let kept = flows.into_iter().filter(|flow| flow.peer == peer).collect();
        *self.flows.borrow_mut() = kept;
    }

    /// Ends all flows.
    pub fn clear(&self) {
        let flows = core::mem::take(&mut *self.flows.borrow_mut());
        drop(flows);
    }

    fn snapshot(&self) -> Vec<Arc<Flow>> {
        self.flows.borrow_mut().clone()
    }

    /// Receives a datagram from whichever flow has one; `EAGAIN` if none has.
    /// Errors, such as a refusal, are those of the flow to `connected` only.
    pub fn receive(
        &self,
        sink: &mut Sink<'_>,
        flags: MessageFlags,
        connected: Option<Endpoint>,
        common: &Common,
    ) -> Result<Received> {
        for flow in self.snapshot() {
            if !flow.host.poll().intersects(Events::IN | Events::HUP) {
                continue;
            }
            match flow.host.receive_datagram(sink, flags.contains(MessageFlags::PEEK)) {
                Ok((bytes, length)) => {
                    if length == 0 && flow.host.poll().contains(Events::HUP) {
                        self.remove(&flow);
                        continue;
                    }
                    let cut =
                        if bytes < length { MessageFlags::TRUNC } else { MessageFlags::empty() };
                    let from = Some(flow.peer.for_family(common.family));
                    let to = flow.local_address();
                    return Ok(Received {
                        bytes,
                        length,
                        from,
                        flags: cut,
                        arrival: to.map(|to| Arrival::from_outside(to, common)),
                        ..Received::default()
                    });
                }
                Err(Errno::EFAULT) => return Err(Errno::EFAULT),
                Err(Errno::EAGAIN) => {}
                Err(error) if connected == Some(flow.peer) => return Err(error),
                Err(_) => {}
            }
        }
        Err(Errno::EAGAIN)
    }

    /// Whether a datagram, or an error, waits.
    pub fn readable(&self) -> bool {
        let flows = self.snapshot();
        flows.iter().any(|flow| flow.host.fd().is_ok() && flow.host.poll().contains(Events::IN))
    }

    /// Bytes of the next datagram.
    pub fn first_len(&self) -> usize {
        let mut nothing = [0u8; 1];
        for flow in self.snapshot() {
            let peek = flow.host.receive_datagram(&mut Sink::kernel(&mut nothing), true);
            if let Ok((_, length)) = peek {
                return length;
            }
        }
        0
    }
}
