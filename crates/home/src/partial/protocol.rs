//! What the daemon and a fetcher say to each other: the daemon begins with the hash of the record
//! that it has read, and asks for numbers; each is answered once, in any order.

use std::io::{self, Read, Write};

/// Bytes of the hash with which a connection begins.
pub const RECORD_HASH: usize = 32;
/// Most bytes of a reason.
const REASON_MAX: usize = 1024;

/// The number of a content, or that of a segment behind those of the contents.
pub type Question = u32;

/// What became of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// What was asked for.
    pub number: Question,
    /// It is here, or one sentence that says why not.
    pub outcome: Result<(), String>,
}

/// Reads a question.
///
/// # Errors
/// The connection has ended.
pub fn read_question(from: &[u8; 4]) -> Question {
    u32::from_le_bytes(*from)
}

/// Adds the bytes of a reply.
pub fn write_reply(reply: &Reply, to: &mut Vec<u8>) {
    let reason = reply.outcome.as_ref().err().map_or("", String::as_str);
    let mut end = reason.len().min(REASON_MAX);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    let reason = &reason.as_bytes()[..end];
    to.extend_from_slice(&reply.number.to_le_bytes());
    to.push(reply.outcome.is_err().into());
    to.extend_from_slice(&(reason.len() as u16).to_le_bytes());
    to.extend_from_slice(reason);
}

/// Bytes of a reply without its reason.
const REPLY_HEAD: usize = 7;

/// Takes a reply from the front of what was received, if all of it is there.
///
/// # Errors
/// It makes no sense.
pub fn take_reply(received: &mut Vec<u8>) -> io::Result<Option<Reply>> {
    let Some((head, rest)) = received.split_first_chunk::<REPLY_HEAD>() else { return Ok(None) };
    let len = usize::from(u16::from_le_bytes([head[5], head[6]]));
    if len > REASON_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let Some(reason) = rest.get(..len) else { return Ok(None) };
    let number = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
    let outcome = match head[4] {
        0 => Ok(()),
        _ => Err(String::from_utf8_lossy(reason).into_owned()),
    };
    received.drain(..REPLY_HEAD + len);
    Ok(Some(Reply { number, outcome }))
}

/// Sends a question.
///
/// # Errors
/// The connection has ended, or the other side does not read.
pub fn ask(mut to: impl Write, number: Question) -> io::Result<()> {
    to.write_all(&number.to_le_bytes())
}

/// Adds what there is to read; `false`: the connection has ended.
///
/// # Errors
/// Nothing has come for as long as is waited, or the connection has broken.
pub fn receive(mut from: impl Read, received: &mut Vec<u8>) -> io::Result<bool> {
    let mut buffer = [0; 4096];
    let read = from.read(&mut buffer)?;
    received.extend_from_slice(&buffer[..read]);
    Ok(read > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_read_back_whatever_arrives_at_once() {
        let replies = [
            Reply { number: 7, outcome: Ok(()) },
            Reply { number: u32::MAX, outcome: Err("it is gone".to_owned()) },
            Reply { number: 1, outcome: Err("ü".repeat(REASON_MAX)) },
        ];
        let mut sent = Vec::new();
        replies.iter().for_each(|reply| write_reply(reply, &mut sent));
        for step in [1, 3, 5000] {
            let (mut received, mut found) = (Vec::new(), Vec::new());
            for part in sent.chunks(step) {
                received.extend_from_slice(part);
                while let Some(reply) = take_reply(&mut received).unwrap() {
                    found.push(reply);
                }
            }
            assert!(received.is_empty());
            assert_eq!(found[..2], replies[..2]);
            assert_eq!(found[2].outcome, Err("ü".repeat(REASON_MAX / 2)));
        }
    }

    #[test]
    fn replies_that_make_no_sense_are_refused() {
        let mut received = vec![0, 0, 0, 0, 1, 0xff, 0xff];
        take_reply(&mut received).unwrap_err();
        thaw_mutate::survive(
            "fetcher_reply",
            &[&[1, 0, 0, 0, 1, 2, 0, 65, 66][..]],
            1000,
            |bytes| {
                let mut received = bytes.to_vec();
                while let Ok(Some(_)) = take_reply(&mut received) {}
            },
        );
    }
}
