//! What an instance may send of HTTP/2 besides answers: frames that cost the gateway work and bring no
//! client anything (RFC 9113 §10.5). Most of HTTP/2's floods are of these.

use std::time::Duration;
use tokio::time::Instant;

/// Such frames that an instance may send at once.
pub(super) const FRAMES_MAX: u64 = 10_000;
/// One more may come after each of these times.
const FRAME_EVERY: Duration = Duration::from_millis(1);
/// Frames that a request brings with it: heads, trailers, settings of its stream.
const FRAMES_OF_REQUEST: u64 = 16;
/// Frames with which an instance may answer a frame of a request's body: it gives the windows of the
/// stream and of the connection back, and measures the way.
const FRAMES_OF_DATA: u64 = 4;

/// Bytes of the head of a frame (RFC 9113 §4.1).
const HEAD: usize = 9;
/// Bytes of the preface of a client.
const PREFACE: usize = 24;
const DATA: u8 = 0;
const END_STREAM: u8 = 0x1;
const PADDED: u8 = 0x8;

/// Finds the heads of frames in what one side sends.
#[derive(Default)]
struct Cutter {
    /// The head of the frame that has begun.
    head: [u8; HEAD],
    head_len: usize,
    /// Bytes of its payload that are still to come.
    payload_left: u32,
}

/// The head of a frame.
#[derive(Clone, Copy)]
struct Head {
    len: u32,
    kind: u8,
    flags: u8,
}

impl Cutter {
    /// The next head in these bytes, which are consumed as far as it goes.
    fn next(&mut self, bytes: &mut &[u8]) -> Option<Head> {
        while !bytes.is_empty() {
            let is_payload = self.payload_left > 0;
            let wanted = if is_payload { self.payload_left as usize } else { HEAD - self.head_len };
            let (piece, rest) = bytes.split_at(wanted.min(bytes.len()));
            *bytes = rest;
            if is_payload {
                self.payload_left -= piece.len() as u32;
                continue;
            }
            self.head[self.head_len..][..piece.len()].copy_from_slice(piece);
            self.head_len += piece.len();
            if self.head_len == HEAD {
                let [high, middle, low, kind, flags, ..] = self.head;
                let len = u32::from_be_bytes([0, high, middle, low]);
                (self.head_len, self.payload_left) = (0, len);
                return Some(Head { len, kind, flags });
            }
        }
        None
    }
}

/// Follows a connection to an instance, frame by frame.
pub(super) struct Frames {
    theirs: Cutter,
    ours: Cutter,
    /// Bytes of the gateway's preface that are still to come (RFC 9113 §3.4).
    preface_left: usize,
    /// Frames that the instance may still send.
    allowance: u64,
    /// Up to when it was given more with time.
    refilled: Instant,
    /// Payload of all its DATA frames.
    data: u64,
}

/// It has sent more than it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flood;

impl Frames {
    pub fn new(now: Instant) -> Self {
        Self {
            theirs: Cutter::default(),
            ours: Cutter::default(),
            preface_left: PREFACE,
            allowance: FRAMES_MAX,
            refilled: now,
            data: 0,
        }
    }

    /// A request was sent.
    pub fn asked(&mut self) {
        self.earn(FRAMES_OF_REQUEST);
    }

    /// The gateway has sent these bytes.
    pub fn sent(&mut self, bytes: &[u8]) {
        let preface = self.preface_left.min(bytes.len());
        self.preface_left -= preface;
        let mut bytes = &bytes[preface..];
        while let Some(head) = self.ours.next(&mut bytes) {
            if head.kind == DATA {
                self.earn(FRAMES_OF_DATA);
            }
        }
    }

    /// Payload of all DATA frames that have begun, padded ones left out, which cost.
    pub fn data(&self) -> u64 {
        self.data
    }

    fn earn(&mut self, frames: u64) {
        self.allowance = (self.allowance + frames).min(FRAMES_MAX);
    }

    fn refill(&mut self, now: Instant) {
        let frames =
            now.saturating_duration_since(self.refilled).as_micros() / FRAME_EVERY.as_micros();
        let frames = u64::try_from(frames).unwrap_or(FRAMES_MAX).min(FRAMES_MAX);
        if frames > 0 {
            self.refilled = now;
            self.earn(frames);
        }
    }

    /// The instance has sent these bytes.
    ///
    /// # Errors
    /// It floods the gateway.
    pub fn read(&mut self, mut bytes: &[u8], now: Instant) -> Result<(), Flood> {
        self.refill(now);
        let mut read = Ok(());
        while let Some(Head { len, kind, flags }) = self.theirs.next(&mut bytes) {
            let is_answer = flags & PADDED == 0 && (len > 0 || flags & END_STREAM != 0);
            if kind == DATA && is_answer {
                self.data += u64::from(len);
            } else {
                match self.allowance.checked_sub(1) {
                    Some(left) => self.allowance = left,
                    None => read = Err(Flood),
                }
            }
        }
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PING: [u8; 17] = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];

    fn data(len: u32, flags: u8) -> Vec<u8> {
        let [_, high, middle, low] = len.to_be_bytes();
        let mut frame = vec![high, middle, low, DATA, flags, 0, 0, 0, 1];
        frame.resize(HEAD + len as usize, 7);
        frame
    }

    #[test]
    fn frames_are_counted_however_they_are_cut() {
        let now = Instant::now();
        let stream = [&PING[..], &data(5, 0), &data(0, 0), &PING, &data(3, PADDED)].concat();
        for step in [1, 2, 8, 9, 10, 1000] {
            let mut frames = Frames::new(now);
            stream.chunks(step).for_each(|piece| frames.read(piece, now).unwrap());
            assert_eq!((frames.allowance, frames.data()), (FRAMES_MAX - 4, 5), "{step}");
        }
    }

    #[test]
    fn a_flood_ends_and_answers_cost_nothing() {
        let now = Instant::now();
        for frame in [&PING[..], &data(0, 0), &data(2, PADDED)] {
            let mut frames = Frames::new(now);
            for _ in 0..FRAMES_MAX {
                frames.read(frame, now).unwrap();
            }
            assert_eq!(frames.read(frame, now), Err(Flood));
        }
        let mut frames = Frames::new(now);
        for _ in 0..2 * FRAMES_MAX {
            frames.read(&data(1, 0), now).unwrap();
            frames.read(&data(0, END_STREAM), now).unwrap();
        }
    }

    #[test]
    fn time_requests_and_their_bodies_allow_more_but_no_hoard() {
        let now = Instant::now();
        let mut frames = Frames::new(now);
        let spend = |frames: &mut Frames, now| {
            let mut count = 0;
            while frames.read(&PING, now).is_ok() {
                count += 1;
            }
            count
        };
        assert_eq!(spend(&mut frames, now), FRAMES_MAX);
        frames.asked();
        assert_eq!(spend(&mut frames, now), FRAMES_OF_REQUEST);
        frames.sent(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        data(40, 0).chunks(7).for_each(|piece| frames.sent(piece));
        // An answer to a PING earns nothing.
        frames.sent(&PING);
        assert_eq!(spend(&mut frames, now), FRAMES_OF_DATA);
        assert_eq!(spend(&mut frames, now + Duration::from_millis(5)), 5);
        assert_eq!(spend(&mut frames, now + Duration::from_secs(3600)), FRAMES_MAX);
    }
}
