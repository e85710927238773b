//! Messages that come while the host reads the memory of a sandbox that does not run: nothing of
//! that memory may change, so they wait where no image holds anything.

use alloc::vec::Vec;

use super::control::{Kept, Message};

/// Bytes of them at most. What the host sends is bounded by the clients and processes that an
/// instance may have.
pub const WAITING_MAX: u64 = 256 << 20;
/// The least of them.
pub const WAITING_MIN: u64 = 16 << 20;

/// What precedes the descriptors and the body of a message.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Head {
    kind: u32,
    fd_count: u32,
    sequence: u64,
    body_len: u64,
}

/// Messages, one behind the other.
pub struct Waiting<'a> {
    room: &'a mut [u8],
    used: usize,
}

impl<'a> Waiting<'a> {
    /// None, in this room.
    pub fn new(room: &'a mut [u8]) -> Self {
        Self { room, used: 0 }
    }

    /// Adds a message; `false` if there is no room for it.
    pub fn add(&mut self, message: &Message) -> bool {
        let (fds, body) = (message.fds(), message.body());
        let head = Head {
            kind: message.kind,
            fd_count: fds.len() as u32,
            sequence: message.sequence,
            body_len: body.len() as u64,
        };
        let parts = [bytemuck::bytes_of(&head), bytemuck::cast_slice(fds), body];
        let Some(mut place) = self.room.get_mut(self.used..) else { return false };
        let len: usize = parts.iter().map(|part| part.len()).sum();
        if len > place.len() {
            return false;
        }
        for part in parts {
            let (here, rest) = place.split_at_mut(part.len());
            here.copy_from_slice(part);
            place = rest;
        }
        self.used += len;
        true
    }

    /// The messages, in the order in which they came. Uses the heap.
    pub fn into_kept(self) -> impl Iterator<Item = Kept> {
        let mut left = &self.room[..self.used];
        core::iter::from_fn(move || {
            let (head, rest) = left.split_at_checked(size_of::<Head>())?;
            let head: Head = bytemuck::pod_read_unaligned(head);
            let (fds, rest) = rest.split_at_checked(head.fd_count as usize * size_of::<i32>())?;
            let (body, rest) = rest.split_at_checked(head.body_len as usize)?;
            left = rest;
            let fds: Vec<i32> = fds.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
            Some(Kept { kind: head.kind, sequence: head.sequence, body: body.to_vec(), fds })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u32, body: &[u8], fds: &[i32]) -> Message {
        Message::kept(Kept {
            kind,
            sequence: u64::from(kind) + 1,
            body: body.to_vec(),
            fds: fds.to_vec(),
        })
    }

    #[test]
    fn messages_come_out_as_they_went_in() {
        let mut room = [0; 200];
        let mut waiting = Waiting::new(&mut room);
        let all: [(u32, &[u8], &[i32]); 3] =
            [(7, b"body", &[5, 6]), (8, b"", &[]), (9, b"x", &[1])];
        for (kind, body, fds) in all {
            assert!(waiting.add(&message(kind, body, fds)));
        }
        assert!(!waiting.add(&message(1, &[0; 200], &[])), "it does not fit");
        let out: Vec<_> = waiting.into_kept().collect();
        assert_eq!(out.len(), all.len());
        for (kept, (kind, body, fds)) in out.iter().zip(all) {
            assert_eq!((kept.kind, kept.sequence), (kind, u64::from(kind) + 1));
            assert_eq!((&kept.body[..], &kept.fds[..]), (body, fds));
        }
    }
}
