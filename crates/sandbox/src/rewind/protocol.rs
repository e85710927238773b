//! Messages between the library and a rewinder. Both are this same executable, so there is no
//! version. The rewinder trusts its caller, who checks the length of what it says.

use bytemuck::{Pod, Zeroable, bytes_of, pod_read_unaligned};

use crate::text::printable;

/// Caller → rewinder: take down the state of the sandbox behind the pidfd that comes along, and
/// call it [`Request::key`].
pub const REQUEST_TAKE_DOWN: u32 = 1;
/// Caller → rewinder: put a sandbox back.
pub const REQUEST_REWIND: u32 = 2;
/// Caller → rewinder: a sandbox will not be put back any more. There is no answer.
pub const REQUEST_FORGET: u32 = 3;

/// Most bytes of an answer.
pub const PACKET_MAX: usize = 1024;

/// A request.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Request {
    /// `REQUEST_*`.
    pub kind: u32,
    /// Not used.
    pub reserved: u32,
    /// Which sandbox is meant.
    pub key: u64,
}

impl Request {
    /// Reads a packet; `None`: no caller sends such a one.
    pub fn parse(packet: &[u8]) -> Option<Self> {
        (packet.len() == size_of::<Self>()).then(|| pod_read_unaligned(packet))
    }
}

macro_rules! reasons {
    ($($reason:ident = $name:literal: $text:literal,)*) => {
        /// Why a sandbox was not put back, for statistics.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Reason { $(#[doc = $text] $reason,)* }

        impl Reason {
            const ALL: &[Self] = &[$(Self::$reason,)*];

            /// One word.
            pub fn name(self) -> &'static str {
                match self { $(Self::$reason => $name,)* }
            }

            /// The reason that [`Answer::reason`] holds.
            pub(crate) fn from_number(number: u32) -> Self {
                Self::ALL.get(number as usize).copied().unwrap_or(Self::Other)
            }
        }
    };
}

reasons! {
    Other = "other": "None of the others.",
    Rewinder = "rewinder": "There is nobody to do it.",
    Busy = "busy": "A request of the sandbox was being served, or it owes something.",
    Ended = "ended": "It has ended.",
    Processes = "processes": "It has several threads or processes.",
    Pages = "pages": "It has written too much.",
    Mappings = "mappings": "Its mappings cannot be put right, or it shares memory.",
    Text = "text": "The text of its kernel was changed.",
    Files = "files": "Its descriptors cannot be put right.",
}

/// It was done.
pub const OUTCOME_DONE: u32 = 1;
/// It was not, and the sandbox has ended, or is not known. The text says why.
pub const OUTCOME_REFUSED: u32 = 2;

/// An answer; text follows.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Answer {
    /// `OUTCOME_*`.
    pub outcome: u32,
    /// Why it was not done: a [`Reason`] as a number.
    pub reason: u32,
    /// Pages that are kept of the sandbox, or that were written back.
    pub pages: u64,
    /// Host calls that were made in its name.
    pub calls: u64,
    /// Processor time that a rewind took, in nanoseconds.
    pub nanoseconds: u64,
}

impl Answer {
    /// That it was done.
    pub fn done(pages: u64, calls: u64) -> Self {
        Self { outcome: OUTCOME_DONE, reason: 0, pages, calls, nanoseconds: 0 }
    }

    /// The packet with a text, of which as much is kept as fits.
    pub fn with_text(&self, text: &str) -> Vec<u8> {
        let room = PACKET_MAX - size_of::<Self>();
        [bytes_of(self), &text.as_bytes()[..text.len().min(room)]].concat()
    }

    /// The packet that refuses.
    pub fn refused(reason: Reason, why: &str) -> Vec<u8> {
        let refused = Self { outcome: OUTCOME_REFUSED, reason: reason as u32, ..Self::done(0, 0) };
        refused.with_text(why)
    }

    /// Reads a packet.
    pub fn parse(packet: &[u8]) -> Option<(Self, String)> {
        let (head, text) = packet.split_at_checked(size_of::<Self>())?;
        let answer: Self = pod_read_unaligned(head);
        let is_known = [OUTCOME_DONE, OUTCOME_REFUSED].contains(&answer.outcome);
        is_known.then(|| (answer, printable(text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_back_and_others_refused() {
        let (answer, text) = Answer::parse(&Answer::refused(Reason::Text, "why \x1b[2J")).unwrap();
        assert_eq!((answer.outcome, text.as_str()), (OUTCOME_REFUSED, "why \\x1b[2J"));
        assert_eq!(Reason::from_number(answer.reason), Reason::Text);
        assert_eq!(Reason::from_number(999), Reason::Other);
        assert_eq!(Answer::refused(Reason::Text, &"x".repeat(5000)).len(), PACKET_MAX);
        let good = Answer::done(3, 4).with_text("");
        assert_eq!(Answer::parse(&good).map(|(answer, _)| answer.pages), Some(3));
        assert!(Answer::parse(&good[1..]).is_none() && Answer::parse(&[9; 24]).is_none());
    }

    #[test]
    fn a_request_has_its_length() {
        let request = Request { kind: REQUEST_FORGET, reserved: 0, key: 7 };
        let bytes = bytes_of(&request);
        assert_eq!(Request::parse(bytes).map(|request| request.key), Some(7));
        assert!(Request::parse(&bytes[1..]).is_none() && Request::parse(&[0; 17]).is_none());
    }
}
