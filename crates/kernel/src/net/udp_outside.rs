//! Datagrams to and from the outside.
//!
//! A sandbox cannot address datagrams on the host, so each destination of a
//! socket has a connected socket of the host: a flow. A flow that a thaw or the
//! resolver has ended is made anew by the next datagram.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::address::Endpoint;
use super::arrival::Arrival;
use super::host_poll::{HostFile, Kind};
use super::outside::source_address;
use super::socket::{Common, MessageFlags, Received};
use crate::errno::{Errno, Result};
use crate::fs::file::Events;
use crate::io::Sink;
use crate::ipc::seam;
use crate::platform::host;
use crate::sync::Lock;
use crate::task::wait::WaitQueue;

/// Most flows of one socket; the one that was used least recently goes.
const FLOWS_MAX: usize = 64;

/// A socket of the host for one destination.
struct Flow {
    peer: Endpoint,
    host: Arc<HostFile>,
}

impl Drop for Flow {
    fn drop(&mut self) {
        if let Ok(fd) = self.host.fd() {
            host::close(fd);
        }
    }
}

/// The flows of one socket, those used last at the end.
#[derive(Default)]
pub struct Flows {
    flows: Lock<Vec<Arc<Flow>>>,
}

impl Flows {
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
            let mut flows = self.flows.lock();
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
        let fd = seam::open_datagrams(to).map_err(|error| match error {
            Errno::EAGAIN => Errno::ENOBUFS,
            error => error,
        })?;
        let host = seam::host_file(fd, Kind::Datagram, queue.clone());
        let flow = Arc::new(Flow { peer: to, host });
        let oldest = {
            let mut flows = self.flows.lock();
            flows.push(flow.clone());
            (flows.len() > FLOWS_MAX).then(|| flows.remove(0))
        };
        drop(oldest);
        Ok(flow)
    }

    fn remove(&self, flow: &Arc<Flow>) {
        self.flows.lock().retain(|other| !Arc::ptr_eq(flow, other));
    }

    /// Forgets all flows but the one to `peer`.
    pub fn keep_only(&self, peer: Endpoint) {
        let flows = core::mem::take(&mut *self.flows.lock());
        let kept = flows.into_iter().filter(|flow| flow.peer == peer).collect();
        *self.flows.lock() = kept;
    }

    /// Ends all flows.
    pub fn clear(&self) {
        let flows = core::mem::take(&mut *self.flows.lock());
        drop(flows);
    }

    fn snapshot(&self) -> Vec<Arc<Flow>> {
        self.flows.lock().clone()
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
                    let to = source_address(flow.peer.ip).ok();
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
