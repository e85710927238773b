//! Files that are encrypted and authenticated: memory of instances on disk.
//!
//! ```text
//! plain   | 64 KiB    | 64 KiB    | … | rest      |
//! sealed  | 64 KiB+16 | 64 KiB+16 | … | rest + 16 |     AES-256-GCM (NIST SP 800-38D)
//! ```
//!
//! Each file has a key of its own, so the number of a chunk is its nonce, and a chunk of an
//! earlier file fits no later one. The length of the whole is authenticated with each chunk: none
//! can be changed, exchanged, left out or added.
//!
//! Keys of files that outlive the daemon are derived from an owner's ([`owner`]).

pub mod owner;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use rustix::fs::{MemfdFlags, Mode, fchmod, memfd_create};
use rustix::rand::GetRandomFlags;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use zeroize::Zeroizing;

/// Bytes that are encrypted at a time.
const CHUNK: usize = 64 << 10;
/// Bytes of the tag behind each chunk.
const TAG: usize = 16;
/// Bytes of a key.
const KEY_LEN: usize = 32;

/// Most files that are decrypted at a time: each takes a processor.
const UNSEALERS_MAX: usize = 4;
static UNSEALERS: Semaphore = Semaphore::const_new(UNSEALERS_MAX);
/// Most of them that are, or wait to be, of one tenant.
const UNSEALERS_OF_TENANT_MAX: usize = 2;

/// Those who decrypt files of one tenant. Its others wait here, and not in the line of the node,
/// where nobody ever has more than a file of each other tenant before him, twice.
#[derive(Debug)]
pub struct Unsealers(Arc<Semaphore>);

impl Default for Unsealers {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(UNSEALERS_OF_TENANT_MAX)))
    }
}

/// A place among those who decrypt.
#[derive(Debug)]
pub struct Unsealer {
    /// Given back first.
    _of_node: SemaphorePermit<'static>,
    _of_tenant: OwnedSemaphorePermit,
}

impl Unsealers {
    /// A place, to be kept until the file is there.
    pub async fn enter(&self) -> Unsealer {
        let of_tenant = self.0.clone().acquire_owned().await.expect("it is never closed");
        let of_node = UNSEALERS.acquire().await.expect("it is never closed");
        Unsealer { _of_node: of_node, _of_tenant: of_tenant }
    }
}

/// The key of one file, and the length of its content. It is overwritten at its end.
pub struct SealKey {
    /// In one place for its whole life: what is moved leaves a copy behind.
    key: Box<Zeroizing<[u8; KEY_LEN]>>,
    plain_len: u64,
}

impl std::fmt::Debug for SealKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SealKey").field("plain_len", &self.plain_len).finish_non_exhaustive()
    }
}

/// Encrypts a whole file into another one, which is empty, with a new key of the host's random
/// source, as long as it is wanted. Reads both as long as it takes: not for an async worker.
///
/// # Errors
/// The host's: the disk is full, among others. [`ErrorKind::Interrupted`]: it is not wanted any
/// more. The other file is of no use then.
pub fn seal(plain: &File, sealed: &File, is_wanted: &dyn Fn() -> bool) -> io::Result<SealKey> {
    let key = SealKey { key: random_key()?, plain_len: plain.metadata()?.len() };
    key.chunks(&key.about()).seal(plain, sealed, is_wanted)?;
    Ok(key)
}

impl SealKey {
    /// Decrypts a file into another one, which is empty, and verifies every byte of it. Chunks of
    /// zeros become holes. Not for an async worker.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`]: it is not the file that was encrypted with this key, as a whole
    /// and in order; the other file is of no use then. Others are the host's.
    pub fn unseal(&self, sealed: &File, plain: &File) -> io::Result<()> {
        self.chunks(&self.about()).unseal(sealed, plain)
    }

    /// Bytes of the encrypted file.
    pub fn sealed_len(&self) -> u64 {
        sealed_len(self.plain_len)
    }

    /// Bytes of the content.
    pub fn plain_len(&self) -> u64 {
        self.plain_len
    }

    fn about(&self) -> [u8; 8] {
        self.plain_len.to_le_bytes()
    }

    fn chunks<'a>(&self, about: &'a [u8]) -> Chunks<'a> {
        let key = UnboundKey::new(&AES_256_GCM, &self.key[..]).expect("a key of its length");
        Chunks { cipher: LessSafeKey::new(key), about, plain_len: self.plain_len, first_at: 0 }
    }
}

/// The chunks of one file under the key that is its own.
struct Chunks<'a> {
    cipher: LessSafeKey,
    /// Authenticated with each of them; the length of the content is in it.
    about: &'a [u8],
    plain_len: u64,
    /// Where the first one begins in the encrypted file.
    first_at: u64,
}

impl Chunks<'_> {
    fn seal(&self, plain: &File, sealed: &File, is_wanted: &dyn Fn() -> bool) -> io::Result<()> {
        let mut buffer = Zeroizing::new(vec![0; CHUNK + TAG]);
        for number in 0..chunk_count(self.plain_len) {
            if !is_wanted() {
                return Err(ErrorKind::Interrupted.into());
            }
            let len = chunk_len(self.plain_len, number);
            let (content, tag) = buffer.split_at_mut(len);
            plain.read_exact_at(content, number * CHUNK as u64)?;
            let made = self
                .cipher
                .seal_in_place_separate_tag(nonce(number), Aad::from(self.about), content)
                .map_err(|_| io::Error::other("a chunk could not be encrypted"))?;
            tag[..TAG].copy_from_slice(made.as_ref());
            sealed.write_all_at(&buffer[..len + TAG], self.sealed_at(number))?;
        }
        Ok(())
    }

    fn unseal(&self, sealed: &File, plain: &File) -> io::Result<()> {
        if Some(sealed.metadata()?.len()) != self.sealed_len() {
            return Err(damaged("its length is not what it was"));
        }
        plain.set_len(self.plain_len)?;
        let mut buffer = Zeroizing::new(vec![0; CHUNK + TAG]);
        for number in 0..chunk_count(self.plain_len) {
            let chunk = &mut buffer[..chunk_len(self.plain_len, number) + TAG];
            sealed.read_exact_at(chunk, self.sealed_at(number)).map_err(|error| {
                match error.kind() {
                    ErrorKind::UnexpectedEof => damaged("its length is not what it was"),
                    _ => error,
                }
            })?;
            let content = self
                .cipher
                .open_in_place(nonce(number), Aad::from(self.about), chunk)
                .map_err(|_| damaged("what is in it was changed"))?;
            if content.iter().any(|&byte| byte != 0) {
                plain.write_all_at(content, number * CHUNK as u64)?;
            }
        }
        Ok(())
    }

    /// Bytes of the encrypted file; `None`: no file has so many.
    fn sealed_len(&self) -> Option<u64> {
        let tags = chunk_count(self.plain_len).checked_mul(TAG as u64)?;
        self.plain_len.checked_add(tags)?.checked_add(self.first_at)
    }

    fn sealed_at(&self, number: u64) -> u64 {
        self.first_at + number * (CHUNK + TAG) as u64
    }
}

/// A file in memory for what was decrypted: one description to write to, and one that can only be
/// read.
///
/// # Errors
/// The host's.
pub fn memory_file() -> io::Result<(File, File)> {
    memory_file_with("thaw-unsealed", MemfdFlags::CLOEXEC)
}

/// The same that can be sealed against changes (fcntl(2), `F_ADD_SEALS`).
pub fn sealable_memory_file() -> io::Result<(File, File)> {
    memory_file_with("thaw-copy", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
}

fn memory_file_with(name: &str, flags: MemfdFlags) -> io::Result<(File, File)> {
    let write: File = memfd_create(name, flags)?.into();
    let read = File::open(format!("/proc/self/fd/{}", write.as_raw_fd()))?;
    // Nobody else opens it to write through a descriptor that can only be read.
    fchmod(&write, Mode::RUSR)?;
    Ok((write, read))
}

fn random_key() -> io::Result<Box<Zeroizing<[u8; KEY_LEN]>>> {
    let mut key = Box::new(Zeroizing::new([0; KEY_LEN]));
    // So few come at once (getrandom(2)).
    rustix::rand::getrandom(&mut key[..], GetRandomFlags::empty())?;
    Ok(key)
}

/// Bytes of the encrypted file of so many bytes.
pub fn sealed_len(plain_len: u64) -> u64 {
    plain_len + chunk_count(plain_len) * TAG as u64
}

fn chunk_count(plain_len: u64) -> u64 {
    plain_len.div_ceil(CHUNK as u64)
}

fn chunk_len(plain_len: u64, number: u64) -> usize {
    (plain_len - number * CHUNK as u64).min(CHUNK as u64) as usize
}

/// No key is used for two files.
fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("its encrypted file is damaged: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    use tokio::time::timeout;

    const SECRET: &[u8] = b"a secret that is looked for";

    fn always() -> bool {
        true
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

    /// Three whole chunks, of which the second is zero, and a rest.
    fn memory() -> Vec<u8> {
        let mut memory = vec![0; 3 * CHUNK + 100];
        for at in [0, 7, 2 * CHUNK, 3 * CHUNK + 20] {
            memory[at..at + SECRET.len()].copy_from_slice(SECRET);
        }
        memory
    }

    fn holds_secret(bytes: &[u8]) -> bool {
        bytes.windows(SECRET.len()).any(|window| window == SECRET)
    }

    #[test]
    fn what_was_sealed_comes_back_and_cannot_be_read_meanwhile() {
        for plain in [memory(), memory()[..CHUNK].to_vec(), SECRET.to_vec(), Vec::new()] {
            let sealed = file(b"");
            let key = seal(&file(&plain), &sealed, &always).unwrap();
            assert_eq!(content(&sealed).len() as u64, key.sealed_len());
            assert!(!holds_secret(&content(&sealed)));
            assert_eq!(holds_secret(&plain), !plain.is_empty());
            let (write, read) = memory_file().unwrap();
            key.unseal(&sealed, &write).unwrap();
            assert!(content(&read) == plain);
            read.write_all_at(b"x", 0).unwrap_err();
        }
    }

    #[test]
    fn no_change_of_a_sealed_file_goes_unnoticed() {
        let sealed = file(b"");
        let key = seal(&file(&memory()), &sealed, &always).unwrap();
        let whole = content(&sealed);
        let stride = CHUNK + TAG;
        let refused = |what: &str, bytes: &[u8]| {
            let error = key.unseal(&file(bytes), &file(b"")).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{what}: {error}");
        };
        for at in [0, CHUNK, stride + 5, 3 * stride, whole.len() - 1] {
            let mut flipped = whole.clone();
            flipped[at] ^= 1;
            refused("flipped", &flipped);
        }
        for len in [0, stride, 3 * stride, whole.len() - 1] {
            refused("cut off", &whole[..len]);
        }
        refused("longer", &[&whole[..], &[0]].concat());
        let mut exchanged = whole.clone();
        exchanged.copy_within(2 * stride..3 * stride, 0);
        refused("exchanged", &exchanged);
        let mut zeroed = whole.clone();
        zeroed[stride..2 * stride].fill(0);
        refused("zeroed", &zeroed);
        let stale = file(b"");
        let _other = seal(&file(&memory()), &stale, &always).unwrap();
        refused("of an earlier hibernation", &content(&stale));
        key.unseal(&sealed, &file(b"")).unwrap();
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = seal(&file(&memory()), &full, &always).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    }

    #[test]
    fn what_is_not_wanted_any_more_is_not_written() {
        let (sealed, left) = (file(b""), std::cell::Cell::new(2));
        let is_wanted = || left.replace(left.get() - 1) > 0;
        let error = seal(&file(&memory()), &sealed, &is_wanted).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Interrupted);
        assert_eq!(content(&sealed).len(), 2 * (CHUNK + TAG));
    }

    /// The only test that takes places of the node.
    #[tokio::test]
    async fn one_tenant_never_has_all_places() {
        let (many, other) = (Unsealers::default(), Unsealers::default());
        let first = [many.enter().await, many.enter().await];
        let at_once = std::time::Duration::ZERO;
        let mut third = Box::pin(many.enter());
        timeout(at_once, &mut third).await.unwrap_err();
        let others = [other.enter().await, other.enter().await];
        drop(others);
        // It waits for its own tenant.
        timeout(at_once, &mut third).await.unwrap_err();
        drop(first);
        drop(third.await);
        assert_eq!(UNSEALERS.available_permits(), UNSEALERS_MAX);
    }

    #[test]
    fn a_key_is_not_shown() {
        let key = seal(&file(SECRET), &file(b""), &always).unwrap();
        assert_eq!(format!("{key:?}"), format!("SealKey {{ plain_len: {}, .. }}", SECRET.len()));
    }
}
