//! The sandbox' own socket for requests about its volumes ([`VOLUME_SOCKET`]).
//!
//! Where the host gives no such socket, or has ended it, the control socket serves.

use alloc::vec::Vec;

use thaw_abi::bind::{BIND_SYNC, BindRequest, RENEW_ASK, VOLUME_RENEW, VOLUME_SOCKET};
use thaw_abi::control::MSG_BIND;

use super::broker;
use super::own_socket::{Ended, Pace, Request};
use crate::errno::{Errno, Result};
use crate::platform::machine::{HostFd, HostFiles, Machine};
use crate::state::{OfBoot, kernel};
use crate::sync::StaticCell;

/// The socket of a host, by the host's number ([`Asked`]); none: the control socket serves. The kernel lock is
/// held from a request to its reply, so that there is one request at a time.
static SOCKET: StaticCell<Option<OfBoot<Given>>> = StaticCell::new(None);

/// What a host has given, and its number.
type Given = (u64, Option<HostFd>);

static PACE: Pace = Pace::new();

/// What became of a request.
pub struct Asked {
    /// The answer: a descriptor, if it has one.
    pub answer: Result<Option<HostFd>>,
    /// A host that may have served it is gone without a word.
    pub may_be_served: bool,
}

/// Asks about a volume and waits for the answer, as [`broker::request`]. One that `is_repeatable` may be
/// served twice. Errors are those that the host answers with; `ENOTCONN`: nobody has served it since the
/// last host is gone; `EIO`: it breaks the protocol.
pub fn request(
    request: &BindRequest,
    tail: &[u8],
    is_repeatable: bool,
    reply: &mut Vec<u8>,
) -> Asked {
    let body = bytemuck::bytes_of(request);
    if request.operation == VOLUME_RENEW {
        // The socket may be a former host's.
        let answer = broker::request(MSG_BIND, body, tail, reply);
        return Asked { answer, may_be_served: false };
    }
    let mut may_be_served = false;
    if let Some(socket) = socket(request.mount) {
        // What waits for a disk takes long for sure.
        let is_slow = request.operation == BIND_SYNC;
        match PACE.ask(socket, &Request { kind: MSG_BIND, parts: [body, tail], is_slow }) {
            Ok(message) => {
                let answer = message.and_then(|message| broker::take_answer(&message, reply));
                return Asked { answer, may_be_served };
            }
            Err(ended) => may_be_served = matches!(ended, Ended::Perhaps),
        }
        give_up(socket);
    }
    if !is_repeatable && has_another_host(request.mount) {
        return Asked { answer: Err(Errno::ENOTCONN), may_be_served };
    }
    let (answer, is_of_several) = broker::request_of_all(MSG_BIND, body, tail, reply);
    Asked { answer, may_be_served: may_be_served || is_of_several }
}

/// Whether the host that serves now is not the one that has served the volume before. A request over the
/// control socket does not tell whether a host that is gone has read it, so this is asked first.
fn has_another_host(mount: u32) -> bool {
    let request = BindRequest { mount, operation: VOLUME_RENEW, a: RENEW_ASK, b: 0, c: 0 };
    let mut reply = Vec::new();
    let asked = broker::request(MSG_BIND, bytemuck::bytes_of(&request), &[], &mut reply);
    asked.is_ok() && reply == 1_u64.to_ne_bytes()
}

/// The socket of the host that serves now. It is asked for it once, by the number of a volume.
fn socket(mount: u32) -> Option<HostFd> {
    let host = kernel().volumes.host();
    let known = SOCKET.borrow_mut().as_ref().and_then(|socket| socket.get().copied());
    if let Some((_, socket)) = known.filter(|(of, _)| *of == host) {
        return socket;
    }
    known.and_then(|(_, former)| former).into_iter().for_each(Machine::close);
    // Nobody uses the former one from here on.
    *SOCKET.borrow_mut() = None;
    let request = BindRequest { mount, operation: VOLUME_SOCKET, a: 0, b: 0, c: 0 };
    let body = bytemuck::bytes_of(&request);
    let asked = broker::request(MSG_BIND, body, &[], &mut Vec::new());
    let socket = asked.ok().flatten();
    *SOCKET.borrow_mut() = Some(OfBoot::new((host, socket)));
    socket
}

/// Closes the socket: the control socket serves until there is another host.
fn give_up(socket: HostFd) {
    *SOCKET.borrow_mut() = Some(OfBoot::new((kernel().volumes.host(), None)));
    Machine::close(socket);
}
