//! The bytes of a layer: read once, uncompressed, counted and hashed on both sides.

use sha2::{Digest as _, Sha256};
use std::cell::{Cell, RefCell};
use std::io::{self, Read, Seek, SeekFrom};
use std::rc::Rc;

/// Beginnings of compressed files.
const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// Hashes what is read through it.
pub(crate) struct Hashing<R> {
    inner: R,
    hasher: Rc<RefCell<Sha256>>,
}

impl<R> Hashing<R> {
    pub fn new(inner: R) -> (Self, Hash) {
        let hasher = Rc::new(RefCell::new(Sha256::new()));
        (Self { inner, hasher: hasher.clone() }, Hash(hasher))
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.hasher.borrow_mut().update(&buffer[..count]);
        Ok(count)
    }
}

/// The hash of what was read.
pub(crate) struct Hash(Rc<RefCell<Sha256>>);

impl Hash {
    /// As a digest, such as `sha256:…`.
    pub fn digest(&self) -> String {
        to_text(self.0.borrow().clone())
    }
}

/// Digest of some bytes.
pub fn digest(bytes: &[u8]) -> String {
    to_text(Sha256::new_with_prefix(bytes))
}

fn to_text(hasher: Sha256) -> String {
    let hex: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

/// Uncompresses what is compressed with gzip or zstd, as its first bytes say.
pub(crate) fn uncompressed<'a>(mut source: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut start = [0; 4];
    let mut len = 0;
    while len < start.len() {
        match source.read(&mut start[len..])? {
            0 => break,
            count => len += count,
        }
    }
    let whole = io::Cursor::new(start).take(len as u64).chain(source);
    if start.starts_with(GZIP) {
        return Ok(Box::new(flate2::read::MultiGzDecoder::new(whole)));
    }
    if start == ZSTD {
        return Ok(Box::new(zstd::Decoder::new(whole)?));
    }
    Ok(Box::new(whole))
}

/// Lets no more through than is allowed: a few compressed bytes may stand for very many.
pub struct Metered<R> {
    inner: R,
    left: Allowance,
}

/// How much more may be read.
#[derive(Clone, Debug)]
pub struct Allowance(Rc<Cell<u64>>);

impl Allowance {
    /// So many bytes.
    pub fn new(bytes: u64) -> Self {
        Self(Rc::new(Cell::new(bytes)))
    }

    /// From now on so many.
    pub fn set(&self, bytes: u64) {
        self.0.set(bytes);
    }

    /// Bytes that are left.
    pub fn left(&self) -> u64 {
        self.0.get()
    }
}

impl<R> Metered<R> {
    /// Bytes of `inner`, as far as they are allowed.
    pub fn new(inner: R, left: Allowance) -> Self {
        Self { inner, left }
    }
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.left.0.get();
        if left == 0 && !buffer.is_empty() {
            return Err(io::Error::other("it is longer than it may be"));
        }
        let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let count = self.inner.read(&mut buffer[..most])?;
        self.left.0.set(left - count as u64);
        Ok(count)
    }
}

/// Counts the zeros at the end of what is read through it: an archive of tar ends with some.
pub struct Trailing<R> {
    inner: R,
    zeros: Rc<Cell<u64>>,
}

impl<R> Trailing<R> {
    /// A reader, and the number of zeros at the end of what it has read, which may be set.
    pub fn new(inner: R) -> (Self, Rc<Cell<u64>>) {
        let zeros = Rc::new(Cell::new(0));
        (Self { inner, zeros: zeros.clone() }, zeros)
    }
}

impl<R: Read> Read for Trailing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.zeros.set(match buffer[..count].iter().rposition(|byte| *byte != 0) {
            Some(last) => (count - 1 - last) as u64,
            None => self.zeros.get() + count as u64,
        });
        Ok(count)
    }
}

/// Skipping costs nothing: nothing is read.
impl<R: Seek> Seek for Metered<R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn each_compression_is_known_by_its_beginning() {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(b"content").unwrap();
        let zstd = zstd::encode_all(&b"content"[..], 1).unwrap();
        for compressed in [gzip.finish().unwrap(), zstd, b"content".to_vec()] {
            let read = io::read_to_string(uncompressed(&compressed[..]).unwrap()).unwrap();
            assert_eq!(read, "content");
        }
        for short in [&b""[..], b"a", GZIP] {
            let _ = io::read_to_string(uncompressed(short).unwrap());
        }
    }

    #[test]
    fn no_more_is_read_than_allowed() {
        let left = Allowance::new(10);
        let mut metered = Metered::new(io::repeat(7), left.clone());
        assert!(io::copy(&mut metered, &mut io::sink()).is_err());
        left.set(3);
        assert_eq!(metered.read(&mut [0; 100]).unwrap(), 3);
    }

    #[test]
    fn what_is_read_is_hashed() {
        let (mut hashing, hash) = Hashing::new(&b"abc"[..]);
        io::copy(&mut hashing, &mut io::sink()).unwrap();
        assert_eq!(hash.digest(), digest(b"abc"));
        assert!(hash.digest().starts_with("sha256:ba7816bf8f01cfea"));
    }
}
