//! Messages of netlink(7): how requests and answers are written, whatever they are about.

use alloc::vec::Vec;

use super::incoming::message_charge;
use super::socket_diagnosis::Dump;
use crate::errno::{Errno, Result};

pub const NLMSG_ERROR: u16 = 2;
pub const NLMSG_DONE: u16 = 3;
/// The first number of a message that is not a control message.
const NLMSG_MIN_TYPE: u16 = 16;

pub const NLM_F_REQUEST: u16 = 0x1;
pub const NLM_F_MULTI: u16 = 0x2;
pub const NLM_F_ACK: u16 = 0x4;
/// `NLM_F_ROOT | NLM_F_MATCH`.
pub const NLM_F_DUMP: u16 = 0x300;
const NLM_F_CAPPED: u16 = 0x100;

/// `struct nlmsghdr`.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Header {
    pub len: u32,
    pub kind: u16,
    pub flags: u16,
    pub sequence: u32,
    pub port: u32,
}

/// Bytes of [`Header`].
pub const HEADER: usize = 16;

/// A message being written.
pub struct Message {
    bytes: Vec<u8>,
}

impl Message {
    pub fn new(kind: u16, flags: u16, request: &Header, port: u32) -> Self {
        let header = Header { len: 0, kind, flags, sequence: request.sequence, port };
        Self { bytes: bytemuck::bytes_of(&header).to_vec() }
    }

    pub fn body(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Adds an attribute (`struct rtattr`, rtnetlink(3)).
    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        self.bytes.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self
    }

    pub fn finish(mut self) -> Vec<u8> {
        let len = self.bytes.len() as u32;
        self.bytes[..4].copy_from_slice(&len.to_ne_bytes());
        self.bytes
    }
}

/// The end of an answer in several messages, and what has come of it.
pub fn done(request: &Header, port: u32, outcome: Result<()>) -> Vec<u8> {
    let code = outcome.map_or_else(|error| -error.0, |()| 0);
    Message::new(NLMSG_DONE, NLM_F_MULTI, request, port).body(&code.to_ne_bytes()).finish()
}

/// What a request gets.
pub enum Answer {
    /// It is merely acknowledged, if it asks for that.
    Nothing,
    /// These datagrams.
    Messages(Vec<Vec<u8>>),
    /// More than is written at once.
    Dump(Dump),
}

/// Carries out a request, of which it gets the header and the body; the last argument is the asker's port.
pub type Service = fn(&Header, &[u8], u32) -> Result<Answer>;

/// What requests get.
#[derive(Default)]
pub struct Answers {
    /// These datagrams.
    pub datagrams: Vec<Vec<u8>>,
    /// What is written when somebody reads.
    pub dump: Option<Dump>,
    /// Whether there are requests without an answer, since those before have used the room up.
    pub is_cut: bool,
}

/// What the requests in `bytes` get, until the datagrams have used up the `room` for them; `port` is the
/// asker's.
pub fn answer(mut bytes: &[u8], port: u32, room: usize, service: Service) -> Answers {
    let (mut answers, mut dump, mut used) = (Vec::new(), None, 0);
    while let Some((head, _)) = bytes.split_at_checked(HEADER) {
        let header: Header = bytemuck::pod_read_unaligned(head);
        let len = header.len as usize;
        if len < HEADER || len > bytes.len() {
            break;
        }
        if used >= room {
            return Answers { datagrams: answers, dump, is_cut: true };
        }
        let (request, before) = (&bytes[..len], answers.len());
        // Only requests are looked at, and control messages are none.
        let outcome = match header.flags & NLM_F_REQUEST {
            0 => Ok(Answer::Nothing),
            _ if header.kind < NLMSG_MIN_TYPE => Ok(Answer::Nothing),
            _ => service(&header, &request[HEADER..], port),
        };
        match outcome {
            Ok(Answer::Messages(found)) => answers.extend(found),
            Ok(Answer::Dump(new)) if dump.is_none() => dump = Some(new),
            Ok(Answer::Dump(_)) => answers.push(refuse(&header, request, port, Errno::EBUSY)),
            Ok(Answer::Nothing) if header.flags & NLM_F_ACK != 0 => {
                answers.push(acknowledge(&header, request, port));
            }
            Ok(Answer::Nothing) => {}
            Err(error) => answers.push(refuse(&header, request, port, error)),
        }
        used += answers[before..].iter().map(|bytes| message_charge(bytes.len())).sum::<usize>();
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or(&[]);
    }
    Answers { datagrams: answers, dump, is_cut: false }
}

/// `struct nlmsgerr` without an error: the header of the request comes back.
fn acknowledge(header: &Header, request: &[u8], port: u32) -> Vec<u8> {
    let message = Message::new(NLMSG_ERROR, NLM_F_CAPPED, header, port);
    message.body(&[0; 4]).body(&request[..HEADER]).finish()
}

/// `struct nlmsgerr`: the request comes back with an error.
fn refuse(header: &Header, request: &[u8], port: u32, error: Errno) -> Vec<u8> {
    let message = Message::new(NLMSG_ERROR, 0, header, port);
    message.body(&(-error.0).to_ne_bytes()).body(request).finish()
}

/// The attribute of this kind behind the first `fixed` bytes of a body.
pub fn attribute(body: &[u8], fixed: usize, wanted: u16) -> Option<&[u8]> {
    /// `NLA_TYPE_MASK`: without the bits that say how to read it.
    const TYPE_MASK: u16 = 0x3fff;
    let mut rest = body.get(fixed..)?;
    while let [a, b, c, d, ..] = *rest {
        let len = usize::from(u16::from_ne_bytes([a, b]));
        let value = rest.get(4..len)?;
        if u16::from_ne_bytes([c, d]) & TYPE_MASK == wanted {
            return Some(value);
        }
        rest = rest.get(len.next_multiple_of(4)..)?;
    }
    None
}

#[cfg(test)]
#[path = "netlink_message_tests.rs"]
pub(crate) mod tests;
