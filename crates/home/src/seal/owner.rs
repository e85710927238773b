//! Files that are encrypted with a key which their owner keeps: checkpoints.
//!
//! ```text
//! | head, 64 bytes | chunks, as in the files of the module above |
//! ```
//!
//! The key of a file is derived from the owner's and a salt of its own (HKDF-SHA-256, RFC 5869).
//! The head is authenticated with each chunk, and so is whose file it is, by its name. The head
//! names the owner's key by an id, which says nothing else about the key.

use super::{Chunks, KEY_LEN, damaged};
use bytemuck::{Pod, Zeroable};
use ring::aead::{AES_256_GCM, LessSafeKey, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use rustix::rand::GetRandomFlags;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use zeroize::Zeroizing;

const MAGIC: [u8; 8] = *b"THAWSEAL";
const VERSION: u32 = 1;
/// Fewest bytes of an owner's key: as many as the keys have that are derived from it.
pub const KEY_MIN: usize = KEY_LEN;
/// Most bytes of it.
pub const KEY_MAX: usize = 4096;
/// Bytes of an id.
const ID_LEN: usize = 8;
/// What the derived values are for.
const FOR_FILES: &[u8] = b"thaw sealed file v1";
const FOR_IDS: &[u8] = b"thaw key id v1";

/// What a key can be told from others by, in hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyId([u8; ID_LEN]);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A key that is not written into any file. It is overwritten at its end.
pub struct OwnerKey {
    /// In one place for its whole life: what is moved leaves a copy behind.
    secret: Zeroizing<Vec<u8>>,
    id: KeyId,
}

impl fmt::Debug for OwnerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnerKey").field("id", &self.id).finish_non_exhaustive()
    }
}

/// A key that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// It could be guessed.
    #[error(
        "the key has {0} bytes, and at least {KEY_MIN} are needed; make one with `head -c 32 \
         /dev/urandom`"
    )]
    Short(usize),
    /// It is more than one.
    #[error("the key has more than {KEY_MAX} bytes; name a file that holds a key and nothing else")]
    Long,
}

impl OwnerKey {
    /// The key of these bytes, which nobody else can guess.
    ///
    /// # Errors
    /// There are too few or too many of them.
    pub fn new(secret: Zeroizing<Vec<u8>>) -> Result<Self, KeyError> {
        match secret.len() {
            len if len < KEY_MIN => return Err(KeyError::Short(len)),
            _ if secret.len() > KEY_MAX => return Err(KeyError::Long),
            _ => {}
        }
        let mut id = [0; ID_LEN];
        let derived = derive(&secret, &[]);
        let okm = derived.expand(&[FOR_IDS], IdLen).expect("so few bytes can be derived");
        okm.fill(&mut id).expect("it has that length");
        Ok(Self { secret, id: KeyId(id) })
    }

    /// What it can be told from others by.
    pub fn id(&self) -> KeyId {
        self.id
    }

    fn cipher(&self, salt: &[u8]) -> LessSafeKey {
        let derived = derive(&self.secret, salt);
        let okm = derived.expand(&[FOR_FILES], &AES_256_GCM);
        LessSafeKey::new(UnboundKey::from(okm.expect("so few bytes can be derived")))
    }
}

struct IdLen;

impl KeyType for IdLen {
    fn len(&self) -> usize {
        ID_LEN
    }
}

fn derive(secret: &[u8], salt: &[u8]) -> Prk {
    Salt::new(HKDF_SHA256, salt).extract(secret)
}

/// How an encrypted file begins.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Head {
    magic: [u8; 8],
    version: u32,
    reserved: u32,
    salt: [u8; 32],
    key: [u8; ID_LEN],
    plain_len: u64,
}

const HEAD_LEN: usize = size_of::<Head>();

/// Encrypts a whole file into another one, which is empty, as `name`, which nobody but its owner
/// gives to another file. Not for an async worker.
///
/// # Errors
/// The host's: the disk is full, among others. The other file is of no use then.
pub fn seal(key: &OwnerKey, name: &str, plain: &File, sealed: &File) -> io::Result<()> {
    let mut salt = [0; 32];
    // So few come at once (getrandom(2)).
    rustix::rand::getrandom(&mut salt, GetRandomFlags::empty())?;
    let plain_len = plain.metadata()?.len();
    let head = Head { magic: MAGIC, version: VERSION, reserved: 0, salt, key: key.id.0, plain_len };
    sealed.write_all_at(bytemuck::bytes_of(&head), 0)?;
    head.chunks(key, &head.about(name)).seal(plain, sealed, &|| true)
}

impl Head {
    /// That of a file; `None`: it is not encrypted so.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`]: this program does not know its version; others are the host's.
    pub fn read(file: &File) -> io::Result<Option<Self>> {
        let mut bytes = [0; HEAD_LEN];
        match file.read_exact_at(&mut bytes, 0) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        let head: Self = bytemuck::pod_read_unaligned(&bytes);
        match head.magic == MAGIC {
            false => Ok(None),
            true if head.version == VERSION => Ok(Some(head)),
            true => Err(damaged("this version of Thaw does not know its format")),
        }
    }

    /// Which key it needs.
    pub fn key(&self) -> KeyId {
        KeyId(self.key)
    }

    /// Bytes that decrypting `sealed`, whose head this is, takes.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`]: the file has not the length that its head says; others are the
    /// host's.
    pub fn plain_len(&self, sealed: &File) -> io::Result<u64> {
        // No file is longer than it is on disk.
        match self.plain_len <= sealed.metadata()?.len() {
            true => Ok(self.plain_len),
            false => Err(damaged("its length is not what it was")),
        }
    }

    /// Decrypts the file of this head and this name into another one, which is empty, and verifies
    /// every byte of it. Not for an async worker.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`]: it is not the file that was encrypted with this key as `name`, as
    /// a whole and in order; the other file is of no use then. Others are the host's.
    pub fn unseal(
        &self,
        key: &OwnerKey,
        name: &str,
        sealed: &File,
        plain: &File,
    ) -> io::Result<()> {
        self.chunks(key, &self.about(name)).unseal(sealed, plain)
    }

    fn about(&self, name: &str) -> Vec<u8> {
        [bytemuck::bytes_of(self), name.as_bytes()].concat()
    }

    fn chunks<'a>(&self, key: &OwnerKey, about: &'a [u8]) -> Chunks<'a> {
        let (cipher, plain_len) = (key.cipher(&self.salt), self.plain_len);
        Chunks { cipher, about, plain_len, first_at: HEAD_LEN as u64 }
    }
}

impl Serialize for KeyId {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for KeyId {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let digits = |at: usize| u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok();
        let mut id = [0; ID_LEN];
        for (at, byte) in id.iter_mut().enumerate() {
            let digits = digits(at).filter(|_| text.len() == 2 * ID_LEN);
            *byte = digits.ok_or_else(|| serde::de::Error::custom("not the id of a key"))?;
        }
        Ok(Self(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seal::{CHUNK, TAG};

    const SECRET: &[u8] = b"a secret that is looked for";

    fn key(byte: u8) -> OwnerKey {
        OwnerKey::new(Zeroizing::new(vec![byte; KEY_MIN])).unwrap()
    }

    fn file(content: &[u8]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(content, 0).unwrap();
        file
    }

    fn content(file: &File) -> Vec<u8> {
        let mut content = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut content, 0).unwrap();
        content
    }

    fn unseal(bytes: &[u8], key: &OwnerKey, name: &str) -> io::Result<Vec<u8>> {
        let (sealed, plain) = (file(bytes), file(b""));
        let head = Head::read(&sealed)?.expect("it is encrypted");
        head.plain_len(&sealed)?;
        head.unseal(key, name, &sealed, &plain)?;
        Ok(content(&plain))
    }

    fn memory() -> Vec<u8> {
        let mut memory = vec![0; 2 * CHUNK + 100];
        memory[7..7 + SECRET.len()].copy_from_slice(SECRET);
        memory
    }

    fn sealed() -> Vec<u8> {
        let sealed = file(b"");
        seal(&key(1), "a", &file(&memory()), &sealed).unwrap();
        content(&sealed)
    }

    #[test]
    fn only_the_key_gives_the_content_back() {
        let (first, second) = (sealed(), sealed());
        assert!(!first.windows(SECRET.len()).any(|window| window == SECRET));
        assert!(unseal(&first, &key(1), "a").unwrap() == memory());
        assert!(unseal(&second, &key(1), "a").unwrap() == memory());
        // Each file has a key of its own.
        assert!(first[HEAD_LEN..][..CHUNK] != second[HEAD_LEN..][..CHUNK]);
        assert_eq!(Head::read(&file(&first)).unwrap().unwrap().key(), key(1).id());
        for (key, name) in [(key(2), "a"), (key(1), "b"), (key(1), "")] {
            let error = unseal(&first, &key, name).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
        }
    }

    #[test]
    fn no_change_goes_unnoticed() {
        let whole = sealed();
        let refused = |what: &str, bytes: &[u8]| {
            let error = unseal(bytes, &key(1), "a").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{what}: {error}");
        };
        // The version, what is reserved, the salt, the id, the length, and a byte of each chunk.
        let chunk = |number: usize| HEAD_LEN + number * (CHUNK + TAG);
        for at in [8, 12, 16, 48, 56, 63, chunk(0), chunk(1), chunk(2), whole.len() - 1] {
            let mut flipped = whole.clone();
            flipped[at] ^= 1;
            refused(&format!("byte {at}"), &flipped);
        }
        for len in [HEAD_LEN, chunk(1), chunk(2), whole.len() - 1] {
            refused(&format!("{len} bytes"), &whole[..len]);
        }
        refused("longer", &[&whole[..], &[0]].concat());
        let mut endless = whole.clone();
        endless[56..64].fill(0xff);
        refused("as long as can be", &endless);
    }

    #[test]
    fn what_is_not_encrypted_has_no_head() {
        for bytes in [&b""[..], b"THAWSEAL", &[0; 4096], &memory()] {
            assert!(Head::read(&file(bytes)).unwrap().is_none());
        }
    }

    #[test]
    fn keys_have_a_length_and_an_id_that_can_be_written_down() {
        let of_len = |len| OwnerKey::new(Zeroizing::new(vec![1; len])).map(|key| key.id());
        assert_eq!(of_len(KEY_MIN - 1), Err(KeyError::Short(KEY_MIN - 1)));
        assert_eq!(of_len(KEY_MAX + 1), Err(KeyError::Long));
        assert_ne!(of_len(KEY_MIN), of_len(KEY_MAX));
        let id = of_len(KEY_MIN).unwrap();
        let text = serde_json::to_string(&id).unwrap();
        assert_eq!(text, format!("\"{id}\""));
        assert_eq!(serde_json::from_str::<KeyId>(&text).unwrap(), id);
        for bad in ["\"\"", "\"0102\"", "\"zz02030405060708\"", "\"010203040506070809\"", "\"é\""]
        {
            serde_json::from_str::<KeyId>(bad).unwrap_err();
        }
        assert_eq!(format!("{:?}", key(1)), format!("OwnerKey {{ id: {:?}, .. }}", key(1).id()));
    }
}
