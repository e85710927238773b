//! The sandbox' own socket for requests about its volumes ([`VOLUME_SOCKET`]).
//!
//! One thread of the host reads, serves and replies there, and looks for the next request
//! before it sleeps. Here the reply is looked for before the virtual CPU sleeps. So most requests
//! wake nobody. Where the host gives no such socket, or has ended it, the control socket serves.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use thaw_abi::bind::{BIND_SYNC, BindRequest, VOLUME_SOCKET};
use thaw_abi::control::{MSG_BIND, MSG_REPLY};

use super::broker;
use super::control::{self, Message};
use crate::errno::{Errno, Result};
use crate::platform::machine::{Clocks, HostFd, HostFiles, Machine};
use crate::state::OfBoot;
use crate::sync::KernelCell;

/// The socket; `Some` of none: the control socket serves in this boot. The kernel lock is held
/// from a request to its reply, so that there is one request at a time.
static SOCKET: KernelCell<Option<OfBoot<Option<HostFd>>>> = KernelCell::new(None);

/// How long a reply is looked for without sleep, in nanoseconds: to be woken takes as long on a
/// virtual machine.
const EAGERNESS_NS: u64 = 100_000;
/// Requests after which a reply is looked for again, if the last look was in vain: there may be
/// no processor for the host's thread as long as this one is used.
const SLEEPS: u32 = 16;
static SLEEPS_LEFT: AtomicU32 = AtomicU32::new(0);

/// Asks about a volume and waits for the answer, as [`broker::request`].
///
/// # Errors
/// Those that the host answers with; `EIO`: it breaks the protocol.
pub fn request(request: &BindRequest, tail: &[u8], reply: &mut Vec<u8>) -> Result<Option<HostFd>> {
    let body = bytemuck::bytes_of(request);
    let asked = socket(request.mount).and_then(|socket| {
        let asked = ask(socket, request.operation, [body, tail]);
        // The host ends it in place of a reply only if nobody has served the request.
        asked.inspect_err(|_| give_up(socket)).ok()
    });
    match asked {
        Some(message) => broker::take_answer(&message?, reply),
        None => broker::request(MSG_BIND, body, tail, reply),
    }
}

/// The reply to a request that is sent over the socket; an error within if it is that of another
/// one.
///
/// # Errors
/// The host has ended the socket.
fn ask(socket: HostFd, operation: u32, parts: [&[u8]; 2]) -> Result<Result<Message>> {
    let sequence = broker::next_sequence();
    control::send_to(socket, MSG_BIND, sequence, parts)?;
    // What waits for a disk takes long for sure.
    let message = match operation == BIND_SYNC {
        true => control::receive_from(socket, false),
        false => wait_for_reply(socket),
    }?;
    let is_reply = message.kind == MSG_REPLY && message.sequence == sequence;
    Ok(if is_reply { Ok(message) } else { Err(Errno::EIO) })
}

/// The socket of this boot. The host is asked for it once, by the number of a volume.
fn socket(mount: u32) -> Option<HostFd> {
    let known = SOCKET.borrow_mut().as_ref().and_then(|socket| socket.get().copied());
    known.unwrap_or_else(|| {
        let request = BindRequest { mount, operation: VOLUME_SOCKET, a: 0, b: 0, c: 0 };
        let body = bytemuck::bytes_of(&request);
        let asked = broker::request(MSG_BIND, body, &[], &mut Vec::new());
        let socket = asked.ok().flatten();
        *SOCKET.borrow_mut() = Some(OfBoot::new(socket));
        socket
    })
}

/// Closes the socket: the control socket serves from now on.
fn give_up(socket: HostFd) {
    *SOCKET.borrow_mut() = Some(OfBoot::new(None));
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
