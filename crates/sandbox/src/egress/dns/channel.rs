//! One connection of a sandbox to the resolver.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use super::super::names::{ChannelSlot, Names};
use super::lookup;
use super::message::{Framing, Outcome, Parsed, Question, parse};

/// Largest question that is read, in bytes.
const QUESTION_MAX: usize = 4096;
/// Most questions of one connection that are read before others have their turn.
const TURN: usize = 4;

/// A connection. Its socket is the resolver's end, non-blocking.
pub struct Channel {
    socket: OwnedFd,
    framing: Framing,
    names: Arc<Names>,
    /// Bytes of a question that is not complete.
    partial: Mutex<Vec<u8>>,
    _slot: ChannelSlot,
}

/// Whether a connection goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goes {
    /// It does.
    On,
    /// It has ended, or must.
    NoFurther,
}

impl Channel {
    pub fn new(
        socket: OwnedFd,
        framing: Framing,
        names: Arc<Names>,
        slot: ChannelSlot,
    ) -> Arc<Self> {
        Arc::new(Self { socket, framing, names, partial: Mutex::default(), _slot: slot })
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reads and answers what has come in.
    pub fn serve(self: &Arc<Self>) -> Goes {
        for _ in 0..TURN {
            let mut buffer = [0; QUESTION_MAX];
            let len = match recv(&self.socket, &mut buffer, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Goes::NoFurther,
                Ok((len, _)) => len.min(QUESTION_MAX),
                Err(Errno::AGAIN | Errno::INTR) => return Goes::On,
                Err(_) => return Goes::NoFurther,
            };
            match self.framing {
                Framing::Packets => self.question(&buffer[..len]),
                Framing::Stream => {
                    let mut partial = self.partial.lock().unwrap_or_else(PoisonError::into_inner);
                    partial.extend_from_slice(&buffer[..len]);
                    while let Some(question) = take_message(&mut partial) {
                        self.question(&question);
                    }
                    if partial.len() > QUESTION_MAX {
                        return Goes::NoFurther;
                    }
                }
            }
        }
        Goes::On
    }

    fn question(self: &Arc<Self>, bytes: &[u8]) {
        let question = match parse(bytes) {
            Parsed::Question(question) => question,
            Parsed::Answer(answer) => return self.send(&answer),
            Parsed::Nothing => return,
        };
        let name = match self.names.at_once(question.name.as_deref()) {
            Ok(outcome) => return self.answer(&question, &outcome),
            Err(name) => name.to_owned(),
        };
        if !question.wants_address() {
            // The host's resolver is asked for addresses only.
            return self.answer(&question, &Outcome::Addresses(Vec::new()));
        }
        let Some(slot) = self.names.lookup_slot() else {
            return self.answer(&question, &Outcome::Failed);
        };
        let (channel, question) = (self.clone(), Arc::new(question));
        let asked = question.clone();
        let job = move || {
            let outcome = channel.names.look_up(&name);
            drop(slot);
            channel.answer(&asked, &outcome);
        };
        if lookup::submit(self.names.function(), job).is_err() {
            self.answer(&question, &Outcome::Failed);
        }
    }

    fn answer(&self, question: &Question, outcome: &Outcome) {
        if let Some(bytes) = question.answer(outcome, self.framing) {
            self.send(&bytes);
        }
    }

    /// Sends an answer. Who does not read loses it, or with a stream, which would
    /// be out of step then, the connection.
    fn send(&self, bytes: &[u8]) {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match self.framing {
            Framing::Packets => {
                let _ = send(&self.socket, bytes, flags);
            }
            Framing::Stream => {
                let mut framed = (bytes.len() as u16).to_be_bytes().to_vec();
                framed.extend_from_slice(bytes);
                if send(&self.socket, &framed, flags) != Ok(framed.len()) {
                    let _ = shutdown(&self.socket, Shutdown::Both);
                }
            }
        }
    }
}

/// Takes a complete message off the front of a stream's bytes.
fn take_message(bytes: &mut Vec<u8>) -> Option<Vec<u8>> {
    let [a, b, rest @ ..] = &bytes[..] else { return None };
    let len = usize::from(u16::from_be_bytes([*a, *b]));
    let message = rest.get(..len)?.to_vec();
    bytes.drain(..2 + len);
    Some(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_cut_into_messages() {
        let mut bytes = vec![0, 3, 1, 2];
        assert_eq!(take_message(&mut bytes), None);
        bytes.extend([3, 0, 1, 9, 0]);
        assert_eq!(take_message(&mut bytes), Some(vec![1, 2, 3]));
        assert_eq!(take_message(&mut bytes), Some(vec![9]));
        assert_eq!(take_message(&mut bytes), None);
        assert_eq!(bytes, [0]);
    }
}
