//! Listeners that outlive their daemon: the monitor keeps those that a daemon has bound itself, so
//! that clients wait while the next one starts, and are not refused.

use crate::activation;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard};
use thaw_node::legacy::{LeftListener, ListenerNote};
use thaw_sandbox::{GuardedPort, KeptForSuccessor, PortGuard, Transport, keep_connection};

/// Listeners of this process, whose tasks end at any moment.
static LISTENERS: Mutex<Listeners> =
    Mutex::new(Listeners { left: Vec::new(), is_leaving: false, leaving: Vec::new() });

struct Listeners {
    /// Those of the daemon before this one that nobody has claimed yet.
    left: Vec<LeftListener>,
    /// This daemon leaves what it has to the next one.
    is_leaving: bool,
    /// Those whose tasks have ended since.
    leaving: Vec<KeptForSuccessor>,
}

fn listeners() -> MutexGuard<'static, Listeners> {
    LISTENERS.lock().expect("no holder panics")
}

/// What is held for a listener, as long as it listens.
#[derive(Debug)]
pub(crate) struct Held {
    _guarded: GuardedPort,
    kept: Option<KeptForSuccessor>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut listeners = listeners();
        if listeners.is_leaving {
            listeners.leaving.extend(self.kept.take());
        }
    }
}

/// Keeps sandboxes from the port of a socket, and the socket for the next daemon.
pub(super) fn hold(
    socket: BorrowedFd<'_>,
    (address, transport): (SocketAddr, Transport),
    kept: Option<KeptForSuccessor>,
) -> Held {
    let guarded = GuardedPort::new(transport, address.port(), PortGuard::IfWrittenOut);
    let kept = kept.or_else(|| keep(socket, address, transport));
    Held { _guarded: guarded, kept }
}

fn keep(
    socket: BorrowedFd<'_>,
    address: SocketAddr,
    transport: Transport,
) -> Option<KeptForSuccessor> {
    let note = ListenerNote { listener: address, is_udp: transport == Transport::Udp };
    let note = serde_json::to_string(&note).expect("plain data");
    keep_connection(socket, &[], &note).unwrap_or_else(|error| {
        tracing::debug!("{address} is not kept for the next daemon: {error}");
        None
    })
}

/// Takes in what the daemon before this one has left.
pub(super) fn inherit(left: Vec<LeftListener>) {
    listeners().left = left;
}

/// A socket at this address that the daemon before this one has left. That one may have been a
/// guest's: the socket itself says where it listens, and not the note.
pub(super) fn claim(
    address: SocketAddr,
    transport: Transport,
) -> Option<(OwnedFd, KeptForSuccessor)> {
    let wanted = ListenerNote { listener: address, is_udp: transport == Transport::Udp };
    let left = &mut listeners().left;
    let found = left.iter().position(|left| left.note == wanted)?;
    let LeftListener { socket, kept, .. } = left.swap_remove(found);
    match activation::listens_at(socket.as_fd(), address, transport) {
        Ok(true) => Some((socket, kept)),
        otherwise => {
            tracing::warn!(?otherwise, "what was left for {address} does not listen there");
            None
        }
    }
}

/// Closes those that nobody has claimed: no function wants them any more.
pub(super) fn close_unclaimed() {
    let unclaimed = std::mem::take(&mut listeners().left);
    drop(unclaimed);
}

/// From now on, listeners whose tasks end are the next daemon's.
pub(super) fn leave() {
    listeners().is_leaving = true;
}

/// No daemon gets them.
pub(super) fn stay() {
    let closed = {
        let mut listeners = listeners();
        listeners.is_leaving = false;
        std::mem::take(&mut listeners.leaving)
    };
    drop(closed);
}
