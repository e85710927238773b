//! The sandbox' own socket for requests about its volumes ([`VOLUME_SOCKET`]).
//!
//! One thread of the host reads, serves and replies there, and looks for the next request
//! before it sleeps. Here the reply is looked for before the virtual CPU sleeps. So most requests
//! wake nobody. Where the host gives no such socket, or has ended it, the control socket serves.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use thaw_abi::bind::{BIND_SYNC, BindRequest, RENEW_ASK, VOLUME_RENEW, VOLUME_SOCKET};
use thaw_abi::control::{MSG_BIND, MSG_REPLY};

use super::broker;
use super::control::{self, Message};
use crate::errno::{Errno, Result};
use crate::platform::machine::{Clocks, HostFd, HostFiles, Machine};
use crate::state::{OfBoot, kernel};
use crate::sync::StaticCell;

/// The socket of a host, by the host's number ([`Asked`]); none: the control socket serves. The kernel lock is
/// held from a request to its reply, so that there is one request at a time.
static SOCKET: StaticCell<Option<OfBoot<Given>>> = StaticCell::new(None);

/// What a host has given, and its number.
type Given = (u64, Option<HostFd>);

/// How long a reply is looked for without sleep, in nanoseconds: to be woken takes as long on a
/// virtual machine.
const EAGERNESS_NS: u64 = 100_000;
/// Requests after which a reply is looked for again, if the last look was in vain: there may be
/// no processor for the host's thread as long as this one is used.
const SLEEPS: u32 = 16;
static SLEEPS_LEFT: AtomicU32 = AtomicU32::new(0);

/// What became of a request.
pub struct Asked {
    /// The answer: a descriptor, if it has one.
    pub answer: Result<Option<HostFd>>,
    /// A host that may have served it is gone without a word.
    pub may_be_served: bool,
}

/// Why there is no reply over the socket.
enum Ended {
    /// The host has not read the request, or not served it and said so.
    NotServed,
    /// It has read it.
    Perhaps,
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
        match ask(socket, request.operation, [body, tail]) {
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

/// The reply to a request that is sent over the socket; an error within if it is that of another
/// one.
fn ask(
    socket: HostFd,
    operation: u32,
    parts: [&[u8]; 2],
) -> core::result::Result<Result<Message>, Ended> {
    let sequence = broker::next_sequence();
    control::send_to(socket, MSG_BIND, sequence, parts).map_err(|_| Ended::NotServed)?;
    // What waits for a disk takes long for sure.
    let message = match operation == BIND_SYNC {
        true => control::receive_from(socket, false),
        false => wait_for_reply(socket),
    };
    let message = message.map_err(|error| match error {
        // unix(7): what the other end has not read is lost.
        Errno::ECONNRESET => Ended::NotServed,
        _ => Ended::Perhaps,
    })?;
    let is_reply = message.kind == MSG_REPLY && message.sequence == sequence;
    Ok(if is_reply { Ok(message) } else { Err(Errno::EIO) })
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

fn wait_for_reply(socket: HostFd) -> Result<Message> {
    match look_for_reply(socket) {
        Err(Errno::EAGAIN) => control::receive_from(socket, false),
        received => received,
    }
}

/// Looks without sleep; `EAGAIN` if nothing has come, or it is not worth while.
fn look_for_reply(socket: HostFd) -> Result<Message> {
    let sleeps = SLEEPS_LEFT.load(Relaxed);
    if sleeps > 0 {
        SLEEPS_LEFT.store(sleeps - 1, Relaxed);
        return Err(Errno::EAGAIN);
    }
    let begun = Machine::monotonic_ns();
    loop {
        match control::receive_from(socket, true) {
            Err(Errno::EAGAIN) if Machine::monotonic_ns() - begun < EAGERNESS_NS => {}
            Err(Errno::EAGAIN) => {
                SLEEPS_LEFT.store(SLEEPS, Relaxed);
                return Err(Errno::EAGAIN);
            }
            received => return received,
        }
    }
}
