//! Keys of one direction of a connection, and the records that they seal and open.

use super::broken::Broken;
use super::inbox::HEADER;
use ring::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};
use rustls::{ConnectionTrafficSecrets, ExtractedSecrets, ProtocolVersion};
use std::io;
use std::ops::Range;
use zeroize::Zeroizing;

/// Records that keys of AES-GCM may seal (RFC 8446 §5.5). Those of ChaCha20-Poly1305 would run out of
/// sequence numbers before.
pub(super) const GCM_RECORDS_MAX: u64 = 1 << 24;
/// Most bytes within a record (RFC 8446 §5.1).
pub(super) const PLAIN_MAX: usize = 1 << 14;
/// Bytes of the tag of each cipher.
const TAG: usize = 16;
const NONCE: usize = 12;
/// Bytes of the nonce that a record of TLS 1.2 with AES-GCM begins with (RFC 5288 §3).
const EXPLICIT: usize = 8;

/// A version of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    Tls12,
    Tls13,
}

/// A cipher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cipher {
    Aes128Gcm,
    Aes256Gcm,
    ChaCha20Poly1305,
}

impl Cipher {
    fn algorithm(self) -> &'static aead::Algorithm {
        match self {
            Self::Aes128Gcm => &aead::AES_128_GCM,
            Self::Aes256Gcm => &aead::AES_256_GCM,
            Self::ChaCha20Poly1305 => &aead::CHACHA20_POLY1305,
        }
    }

    /// Bytes of its key.
    pub fn key_len(self) -> usize {
        self.algorithm().key_len()
    }
}

/// What a record is (RFC 8446 §5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind(pub u8);

impl Kind {
    pub const ALERT: Self = Self(21);
    pub const HANDSHAKE: Self = Self(22);
    pub const DATA: Self = Self(23);
}

/// The keys of one direction, and the number of the next record. Each number makes one nonce, so none is
/// used for two records that are sealed.
pub(super) struct Keys {
    pub version: Version,
    pub cipher: Cipher,
    pub key: Zeroizing<Vec<u8>>,
    pub iv: Zeroizing<[u8; NONCE]>,
    pub sequence: u64,
    aead: LessSafeKey,
}

impl Keys {
    /// `None`: the key is of another length.
    pub fn new(
        (version, cipher): (Version, Cipher),
        key: &[u8],
        iv: &[u8],
        sequence: u64,
    ) -> Option<Self> {
        let aead = LessSafeKey::new(UnboundKey::new(cipher.algorithm(), key).ok()?);
        let iv = Zeroizing::new(iv.try_into().ok()?);
        let key = Zeroizing::new(key.to_vec());
        Some(Self { version, cipher, key, iv, sequence, aead })
    }

    /// As rustls tells them.
    fn of(version: Version, sequence: u64, secrets: &ConnectionTrafficSecrets) -> Option<Self> {
        let (cipher, key, iv) = match secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (Cipher::Aes128Gcm, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (Cipher::Aes256Gcm, key, iv),
            ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => {
                (Cipher::ChaCha20Poly1305, key, iv)
            }
            _ => return None,
        };
        Self::new((version, cipher), key.as_ref(), iv.as_ref(), sequence)
    }

    /// Whether they are to seal nothing more, but an alert.
    pub fn are_worn_out(&self) -> bool {
        self.sequence >= self.records_max() - 1
    }

    fn records_max(&self) -> u64 {
        match self.cipher {
            Cipher::Aes128Gcm | Cipher::Aes256Gcm => GCM_RECORDS_MAX,
            Cipher::ChaCha20Poly1305 => u64::MAX,
        }
    }

    /// The number of the next record. There is no way back.
    fn advance(&mut self) -> Result<u64, Broken> {
        let sequence = self.sequence;
        self.sequence = sequence.checked_add(1).ok_or(Broken::WornOut)?;
        Ok(sequence)
    }

    /// RFC 8446 §5.3 and RFC 7905 §2. With AES-GCM in TLS 1.2 the last 8 bytes may be any that do not come
    /// twice (RFC 5288 §3): rustls makes them the same way, so these go on where it has ended.
    fn nonce(&self, sequence: u64) -> [u8; NONCE] {
        let mut nonce = *self.iv;
        let counter = &mut nonce[NONCE - 8..];
        counter.iter_mut().zip(sequence.to_be_bytes()).for_each(|(byte, of)| *byte ^= of);
        nonce
    }

    /// Bytes of the nonce that stand in each record.
    fn explicit(&self) -> usize {
        match (self.version, self.cipher) {
            (Version::Tls12, Cipher::Aes128Gcm | Cipher::Aes256Gcm) => EXPLICIT,
            _ => 0,
        }
    }

    /// Appends a record.
    ///
    /// # Errors
    /// The keys are worn out.
    pub fn seal(&mut self, kind: Kind, plain: &[u8], out: &mut Vec<u8>) -> Result<(), Broken> {
        debug_assert!(plain.len() <= PLAIN_MAX, "it fits in a record");
        if self.sequence >= self.records_max() {
            return Err(Broken::WornOut);
        }
        let sequence = self.advance()?;
        let explicit = self.explicit();
        // In TLS 1.3 the kind is within, and the record seems to be data (RFC 8446 §5.2).
        let (outer, inner): (Kind, &[u8]) = match self.version {
            Version::Tls12 => (kind, &[]),
            Version::Tls13 => (Kind::DATA, &[kind.0]),
        };
        let within = plain.len() + inner.len();
        let header = header(outer, explicit + within + TAG);
        let nonce = self.nonce(sequence);
        out.extend_from_slice(&header);
        out.extend_from_slice(&nonce[NONCE - explicit..]);
        let begin = out.len();
        out.extend_from_slice(plain);
        out.extend_from_slice(inner);
        let aad = Additional::of(self.version, header, sequence, within);
        let nonce = Nonce::assume_unique_for_key(nonce);
        let sealed = self.aead.seal_in_place_separate_tag(nonce, aad.aad(), &mut out[begin..]);
        let tag = sealed.expect("a record is short enough for each cipher");
        out.extend_from_slice(tag.as_ref());
        Ok(())
    }

    /// Decrypts a record where it is. Returns its kind, and where in it the plain text is.
    ///
    /// # Errors
    /// It is none of the client's, or not the next one.
    pub fn open(&mut self, record: &mut [u8]) -> Result<(Kind, Range<usize>), Broken> {
        let (header, body) = record.split_first_chunk_mut::<HEADER>().ok_or(Broken::NoRecord)?;
        let outer = Kind(header[0]);
        if self.version == Version::Tls13 && outer != Kind::DATA {
            return Err(Broken::Unexpected);
        }
        let sequence = self.advance()?;
        let explicit = self.explicit();
        let within = body.len().checked_sub(explicit + TAG).ok_or(Broken::Forged)?;
        let (told, sealed) = body.split_at_mut(explicit);
        let mut nonce = self.nonce(sequence);
        nonce[NONCE - explicit..].copy_from_slice(told);
        let aad = Additional::of(self.version, *header, sequence, within);
        let nonce = Nonce::assume_unique_for_key(nonce);
        let opened = self.aead.open_in_place(nonce, aad.aad(), sealed);
        let (kind, length) = self.within(outer, opened.map_err(|_| Broken::Forged)?)?;
        let begin = HEADER + explicit;
        Ok((kind, begin..begin + length))
    }

    /// The kind of a record, and how much of what was sealed is its content.
    fn within(&self, outer: Kind, opened: &[u8]) -> Result<(Kind, usize), Broken> {
        let (kind, length, max) = match self.version {
            Version::Tls12 => (outer, opened.len(), PLAIN_MAX),
            Version::Tls13 => {
                // Zeros fill it up behind the kind (RFC 8446 §5.4).
                let at = opened.iter().rposition(|byte| *byte != 0).ok_or(Broken::Unexpected)?;
                (Kind(opened[at]), at, PLAIN_MAX + 1)
            }
        };
        match opened.len() > max {
            true => Err(Broken::TooLong),
            false => Ok((kind, length)),
        }
    }
}

/// The header of a record with so many bytes behind it.
fn header(kind: Kind, length: usize) -> [u8; HEADER] {
    let [high, low] = u16::try_from(length).expect("records are shorter").to_be_bytes();
    [kind.0, 3, 3, high, low]
}

/// What a record's tag vouches for beside its content.
enum Additional {
    Tls12([u8; 13]),
    Tls13([u8; HEADER]),
}

impl Additional {
    /// RFC 5246 §6.2.3.3, with the length of the plain text, and RFC 8446 §5.2.
    fn of(version: Version, header: [u8; HEADER], sequence: u64, plain: usize) -> Self {
        match version {
            Version::Tls13 => Self::Tls13(header),
            Version::Tls12 => {
                let mut all = [0; 13];
                all[..8].copy_from_slice(&sequence.to_be_bytes());
                all[8..11].copy_from_slice(&header[..3]);
                let plain = u16::try_from(plain).expect("records are shorter");
                all[11..].copy_from_slice(&plain.to_be_bytes());
                Self::Tls12(all)
            }
        }
    }

    fn aad(&self) -> Aad<&[u8]> {
        Aad::from(match self {
            Self::Tls12(bytes) => bytes,
            Self::Tls13(bytes) => bytes,
        })
    }
}

/// The keys of a connection, to read and to write.
///
/// # Errors
/// Its version or its cipher is none of those that are known here.
pub(super) fn of(
    version: Option<ProtocolVersion>,
    secrets: ExtractedSecrets,
) -> io::Result<(Keys, Keys)> {
    let unknown = || io::Error::other("its keys are of an unknown kind");
    let version = match version {
        Some(ProtocolVersion::TLSv1_2) => Version::Tls12,
        Some(ProtocolVersion::TLSv1_3) => Version::Tls13,
        _ => return Err(unknown()),
    };
    let keys = |(sequence, secrets)| Keys::of(version, sequence, &secrets).ok_or_else(unknown);
    Ok((keys(secrets.rx)?, keys(secrets.tx)?))
}
