//! The state of a connection within TLS as bytes, for the next daemon. Keys are among them.

use super::inbox::Inbox;
use super::keys::{Cipher, Keys, Version};
use std::io;
use zeroize::Zeroizing;

/// Most bytes that wait to be sent: rustls keeps 64 KiB, and what it seals them with.
const UNSENT_MAX: usize = 128 << 10;

/// All that is to be known of a connection whose handshake is done.
pub(in crate::gateway) struct State {
    /// Of what the client sends.
    pub(super) read: Keys,
    /// Of what it is sent.
    pub(super) write: Keys,
    /// What was read and not decrypted.
    pub(super) inbox: Inbox,
    /// What was sealed and not sent.
    pub(super) unsent: Vec<u8>,
    /// The client was told that nothing more comes.
    pub(super) has_ended: bool,
    /// The client has said so.
    pub(super) peer_has_ended: bool,
}

impl State {
    /// The bytes: version, cipher and ends as a byte each; key, IV (12 bytes) and sequence number (8) of
    /// what is read and of what is written; what was read and not decrypted, and what was not sent, each
    /// behind its length (4). Numbers are little endian.
    pub fn to_bytes(&self) -> Zeroizing<Vec<u8>> {
        let held = self.inbox.held();
        let length = 256 + held.len() + self.unsent.len();
        // It does not grow, so that no copy of the keys is left where it was.
        let mut bytes = Zeroizing::new(Vec::with_capacity(length));
        bytes.push(match self.read.version {
            Version::Tls12 => 12,
            Version::Tls13 => 13,
        });
        bytes.push(match self.read.cipher {
            Cipher::Aes128Gcm => 1,
            Cipher::Aes256Gcm => 2,
            Cipher::ChaCha20Poly1305 => 3,
        });
        bytes.push(u8::from(self.has_ended) | u8::from(self.peer_has_ended) << 1);
        for keys in [&self.read, &self.write] {
            bytes.extend_from_slice(&keys.key);
            bytes.extend_from_slice(&*keys.iv);
            bytes.extend_from_slice(&keys.sequence.to_le_bytes());
        }
        for part in [held, &self.unsent] {
            bytes.extend_from_slice(&(part.len() as u32).to_le_bytes());
            bytes.extend_from_slice(part);
        }
        bytes
    }

    /// What [`Self::to_bytes`] has written.
    ///
    /// # Errors
    /// It was somebody else.
    pub fn from_bytes(bytes: &[u8]) -> io::Result<Self> {
        parse(bytes).ok_or_else(|| io::Error::other("the state of its TLS is not readable"))
    }
}

fn parse(mut bytes: &[u8]) -> Option<State> {
    let bytes = &mut bytes;
    let version = match byte(bytes)? {
        12 => Version::Tls12,
        13 => Version::Tls13,
        _ => return None,
    };
    let cipher = match byte(bytes)? {
        1 => Cipher::Aes128Gcm,
        2 => Cipher::Aes256Gcm,
        3 => Cipher::ChaCha20Poly1305,
        _ => return None,
    };
    let (has_ended, peer_has_ended) = match byte(bytes)? {
        ends @ 0..=3 => (ends & 1 != 0, ends & 2 != 0),
        _ => return None,
    };
    let read = keys(bytes, version, cipher)?;
    let write = keys(bytes, version, cipher)?;
    let inbox = Inbox::with(part(bytes)?)?;
    let unsent = part(bytes)?.to_vec();
    let is_whole = bytes.is_empty() && unsent.len() <= UNSENT_MAX;
    is_whole.then_some(State { read, write, inbox, unsent, has_ended, peer_has_ended })
}

fn keys(bytes: &mut &[u8], version: Version, cipher: Cipher) -> Option<Keys> {
    let key = bytes.split_off(..cipher.key_len())?;
    let iv = take::<12>(bytes)?;
    let sequence = u64::from_le_bytes(*take::<8>(bytes)?);
    Keys::new((version, cipher), key, iv, sequence)
}

fn part<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = u32::from_le_bytes(*take::<4>(bytes)?);
    bytes.split_off(..usize::try_from(length).ok()?)
}

fn byte(bytes: &mut &[u8]) -> Option<u8> {
    bytes.split_off_first().copied()
}

fn take<'a, const N: usize>(bytes: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    bytes.split_off(..N)?.try_into().ok()
}

#[cfg(test)]
impl State {
    /// One of a connection that never was.
    pub fn for_test() -> Self {
        let keys = |sequence| {
            let kind = (Version::Tls12, Cipher::Aes128Gcm);
            Keys::new(kind, &[7; 16], &[9; 12], sequence).expect("it is long enough")
        };
        let inbox = Inbox::with(b"half a record").expect("it is short");
        let (has_ended, peer_has_ended) = (true, false);
        let unsent = b"a record".to_vec();
        Self { read: keys(3), write: keys(u64::MAX), inbox, unsent, has_ended, peer_has_ended }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_read_as_it_was_written_or_not_at_all() {
        let bytes = State::for_test().to_bytes();
        let read = State::from_bytes(&bytes).unwrap();
        assert_eq!(*read.to_bytes(), *bytes);
        assert_eq!((read.read.sequence, read.write.sequence), (3, u64::MAX));
        assert_eq!(
            (read.inbox.held(), &read.unsent[..]),
            (&b"half a record"[..], &b"a record"[..])
        );
        assert!(read.has_ended && !read.peer_has_ended);
        for length in 0..bytes.len() {
            assert!(State::from_bytes(&bytes[..length]).is_err(), "{length}");
        }
        assert!(State::from_bytes(&[&bytes[..], b"x"].concat()).is_err());
        // Its version, its cipher, and which side has ended.
        for (place, wrong) in [(0, 11), (1, 0), (1, 4), (2, 4)] {
            let mut other = bytes.to_vec();
            other[place] = wrong;
            assert!(State::from_bytes(&other).is_err(), "{place}");
        }
    }

    #[test]
    fn more_than_a_connection_has_is_refused() {
        let too_much = |state: State| State::from_bytes(&state.to_bytes()).is_err();
        let unsent = vec![0; UNSENT_MAX + 1];
        assert!(too_much(State { unsent, ..State::for_test() }));
        let state = State { inbox: Inbox::default(), ..State::for_test() };
        let mut bytes = state.to_bytes().to_vec();
        let at = bytes.len() - b"a record".len() - 8;
        bytes.truncate(at);
        let held = vec![0; super::super::inbox::RECORD_MAX + 1];
        bytes.extend((held.len() as u32).to_le_bytes());
        bytes.extend(held);
        bytes.extend([0; 4]);
        assert!(State::from_bytes(&bytes).is_err());
    }
}
