//! Requests to the host's broker: the paper's FS server (Catalyzer, §4.2).

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use thaw_abi::control::Reply;

use super::control::{self, Message};
use crate::errno::{Errno, Result};
use crate::platform::machine::HostFd;

/// Number of the last request of this boot.
static LAST_SEQUENCE: AtomicU64 = AtomicU64::new(0);

/// Asks the host without waiting: the answer comes as a message. Returns the
/// number of the request.
pub fn ask(kind: u32, body: &[u8]) -> u64 {
    let sequence = next_sequence();
    control::send(kind, sequence, body, &[]);
    sequence
}

/// A number for a request.
pub fn next_sequence() -> u64 {
    LAST_SEQUENCE.fetch_add(1, Ordering::Relaxed) + 1
}

/// Asks the host and waits for the answer. The answer's tail replaces what is
/// in `reply`; its descriptor, if any, is returned. Errors that the host
/// answers with come back as such.
pub fn request(kind: u32, body: &[u8], tail: &[u8], reply: &mut Vec<u8>) -> Result<Option<HostFd>> {
    request_of_all(kind, body, tail, reply).0
}

/// The same, and whether several hosts were asked, of which all but the last are gone.
pub fn request_of_all(
    kind: u32,
    body: &[u8],
    tail: &[u8],
    reply: &mut Vec<u8>,
) -> (Result<Option<HostFd>>, bool) {
    let (sequence, mut hosts) = (next_sequence(), 0);
    let message = loop {
        control::send(kind, sequence, body, tail);
        hosts += 1;
        if let Some(message) = control::receive_reply(sequence..sequence + 1) {
            break message;
        }
    };
    (take_answer(&message, reply), hosts > 1)
}

/// The descriptor of an answer, whose tail replaces what is in `reply`.
pub fn take_answer(message: &Message, reply: &mut Vec<u8>) -> Result<Option<HostFd>> {
    let (fd, rest) = read_answer(message)?;
    reply.clear();
    reply.extend_from_slice(rest);
    Ok(fd)
}

/// Asks for several descriptors at once, so that all of them take one wait; calls `take` with the
/// place in `kinds` of each as it comes. An error is the last one that the host answers with.
pub fn request_all(kinds: &[u32], mut take: impl FnMut(usize, HostFd)) -> Result<()> {
    let count = kinds.len() as u64;
    let first = LAST_SEQUENCE.fetch_add(count, Ordering::Relaxed) + 1;
    let sequences = first..first + count;
    let mut missing: Vec<u64> = sequences.clone().collect();
    let mut outcome = Ok(());
    while !missing.is_empty() {
        for &sequence in &missing {
            control::send(kinds[(sequence - first) as usize], sequence, &[], &[]);
        }
        while !missing.is_empty()
            && let Some(message) = control::receive_reply(sequences.clone())
        {
            missing.retain(|&sequence| sequence != message.sequence);
            match read_answer(&message).and_then(|(fd, _)| fd.ok_or(Errno::EIO)) {
                Ok(fd) => take((message.sequence - first) as usize, fd),
                Err(error) => outcome = Err(error),
            }
        }
    }
    outcome
}

/// The descriptor of an answer, if it has one, and its tail.
fn read_answer(message: &Message) -> Result<(Option<HostFd>, &[u8])> {
    let (answer, rest) = message.split::<Reply>()?;
    match answer.errno {
        0 => Ok((message.fds().first().map(|&fd| HostFd::new(fd)), rest)),
        errno => Err(Errno(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::machine::{HostFiles, Machine};
    use crate::testing::Sandbox;
    use thaw_abi::control::{MSG_MEMORY_FILE, MSG_WAKE_SOCKET};

    #[test]
    fn descriptors_that_are_asked_for_together_are_told_apart() {
        let _sandbox = Sandbox::new();
        let mut places = Vec::new();
        let mut take = |at, fd| {
            Machine::close(fd);
            places.push(at);
        };
        request_all(&[MSG_MEMORY_FILE; 3], &mut take).unwrap();
        request_all(&[], &mut take).unwrap();
        // The host of this test has no such socket; the file comes nevertheless.
        let refused = request_all(&[MSG_WAKE_SOCKET, MSG_MEMORY_FILE], &mut take);
        assert_eq!(refused, Err(Errno::EIO));
        assert_eq!(places, [0, 1, 2, 1]);
    }
}
