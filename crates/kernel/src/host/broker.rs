//! Requests to the host's broker: the paper's FS server (Catalyzer, §4.2).

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use thaw_abi::control::Reply;

use super::control;
use crate::errno::{Errno, Result};
use crate::platform::machine::HostFd;

/// Number of the last request of this boot.
static LAST_SEQUENCE: AtomicU64 = AtomicU64::new(0);

/// Asks the host without waiting: the answer comes as a message. Returns the
/// number of the request.
pub fn ask(kind: u32, body: &[u8]) -> u64 {
    let sequence = LAST_SEQUENCE.fetch_add(1, Ordering::Relaxed) + 1;
    control::send(kind, sequence, body, &[]);
    sequence
}

/// Asks the host and waits for the answer. The answer's tail replaces what is
/// in `reply`; its descriptor, if any, is returned. Errors that the host
/// answers with come back as such.
pub fn request(kind: u32, body: &[u8], tail: &[u8], reply: &mut Vec<u8>) -> Result<Option<HostFd>> {
    let sequence = LAST_SEQUENCE.fetch_add(1, Ordering::Relaxed) + 1;
    let message = loop {
        control::send(kind, sequence, body, tail);
        if let Some(message) = control::receive_reply(sequence) {
            break message;
        }
    };
    let (answer, rest) = message.split::<Reply>()?;
    let fd = message.fds().first().map(|&fd| HostFd::new(fd));
    if answer.errno != 0 {
        return Err(Errno(answer.errno));
    }
    reply.clear();
    reply.extend_from_slice(rest);
    Ok(fd)
}
