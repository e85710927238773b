//! The sandbox' own socket for requests about directories of the host ([`MSG_FS_SOCKET`]): its root, and
//! those that are bound.
//!
//! Where the host gives no such socket, or has ended it since a request took too long, the control
//! socket serves.

use alloc::vec::Vec;

use thaw_abi::bind::{BIND_SYNC, BindRequest};
use thaw_abi::control::{MSG_BIND, MSG_FS_SOCKET};

use super::broker;
use super::own_socket::{Ended, Pace, Request};
use crate::errno::{Errno, Result};
use crate::platform::machine::{HostFd, HostFiles, Machine};
use crate::state::OfBoot;
use crate::sync::StaticCell;

/// The socket; none: the control socket serves. The kernel lock is held from a request to its reply, so
/// that there is one request at a time.
static SOCKET: StaticCell<Option<OfBoot<Option<HostFd>>>> = StaticCell::new(None);
static PACE: Pace = Pace::new();

/// Asks about files of the root directory and waits for the answer, as [`broker::request`].
pub fn request(kind: u32, body: &[u8], tail: &[u8], reply: &mut Vec<u8>) -> Result<Option<HostFd>> {
    ask(&Request { kind, parts: [body, tail], is_slow: false }, reply)
}

/// The same about a bound directory.
pub fn request_of_bound(
    request: &BindRequest,
    tail: &[u8],
    reply: &mut Vec<u8>,
) -> Result<Option<HostFd>> {
    let body = bytemuck::bytes_of(request);
    // What waits for a disk takes long for sure.
    let is_slow = request.operation == BIND_SYNC;
    ask(&Request { kind: MSG_BIND, parts: [body, tail], is_slow }, reply)
}

fn ask(request: &Request<'_>, reply: &mut Vec<u8>) -> Result<Option<HostFd>> {
    if let Some(socket) = socket() {
        match PACE.ask(socket, request) {
            Ok(message) => return broker::take_answer(&message?, reply),
            Err(ended) => {
                *SOCKET.borrow_mut() = Some(OfBoot::new(None));
                Machine::close(socket);
                if matches!(ended, Ended::Perhaps) {
                    wait_until_served();
                    return Err(Errno::EIO);
                }
            }
        }
    }
    let [body, tail] = request.parts;
    broker::request(request.kind, body, tail, reply)
}

/// Waits until the host answers at all. It refuses what is asked here. If nobody serves files any more,
/// the host ends the sandbox, and until then the guest must not go on with an error.
fn wait_until_served() {
    let _ = broker::request(MSG_FS_SOCKET, &[], &[], &mut Vec::new());
}

/// The socket, which the host is asked for once in a boot.
fn socket() -> Option<HostFd> {
    let known = SOCKET.borrow_mut().as_ref().and_then(|socket| socket.get().copied());
    if let Some(socket) = known {
        return socket;
    }
    let asked = broker::request(MSG_FS_SOCKET, &[], &[], &mut Vec::new());
    let socket = asked.ok().flatten();
    *SOCKET.borrow_mut() = Some(OfBoot::new(socket));
    socket
}
