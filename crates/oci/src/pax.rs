//! Extended headers of archives (pax(1)), whose values may have any bytes.
//!
//! The library that reads archives takes the end of a line for the end of a record, and values of
//! extended attributes have such bytes. So this reader keeps the header of the next entry as it is
//! ([`ExtendedHeader`]), and shows the library one without line ends in those values.

use std::cell::{Cell, RefCell};
use std::io::{self, Cursor, Read};
use std::ops::Range;
use std::rc::Rc;

/// Bytes that an archive is made of multiples of.
const BLOCK: usize = 512;
/// What the name of an extended attribute has before it, as star(1) and all that build images write
/// it. The value is as it is.
pub(crate) const XATTR: &[u8] = b"SCHILY.xattr.";

/// A record of an extended header: where its key and its value are.
struct Record {
    key: Range<usize>,
    value: Range<usize>,
    /// Where the next one begins.
    next: usize,
}

/// The record that begins at `at`; `None` at the end.
fn record(header: &[u8], at: usize) -> io::Result<Option<Record>> {
    let rest = &header[at..];
    if matches!(rest.first(), None | Some(b'\n')) {
        return Ok(None);
    }
    let bad = || io::Error::other("its extended header makes no sense");
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let len = std::str::from_utf8(&rest[..digits]).ok().and_then(|text| text.parse().ok());
    let len: usize = len.filter(|&len| digits + 2 < len).ok_or_else(bad)?;
    let body = rest.get(digits..len).ok_or_else(bad)?;
    let body = body.strip_prefix(b" ").and_then(|body| body.strip_suffix(b"\n")).ok_or_else(bad)?;
    let equals = body.iter().position(|&byte| byte == b'=').ok_or_else(bad)?;
    let start = at + digits + 1;
    let key = start..start + equals;
    Ok(Some(Record { value: key.end + 1..at + len - 1, key, next: at + len }))
}

/// Calls `each` with key and value of each record.
///
/// # Errors
/// It makes no sense, or `each` says so.
pub(crate) fn records(
    header: &[u8],
    mut each: impl FnMut(&[u8], &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut at = 0;
    while let Some(record) = record(header, at)? {
        each(&header[record.key], &header[record.value])?;
        at = record.next;
    }
    Ok(())
}

/// Makes each value of an extended attribute one line. The rest of a header that makes no sense stays
/// as it is.
fn without_line_ends(header: &mut [u8]) {
    let mut at = 0;
    while let Ok(Some(record)) = record(header, at) {
        if header[record.key].starts_with(XATTR) {
            let value = &mut header[record.value];
            value.iter_mut().filter(|byte| **byte == b'\n').for_each(|byte| *byte = b' ');
        }
        at = record.next;
    }
}

/// The extended header of an entry.
#[derive(Clone, Default)]
pub(crate) struct ExtendedHeader(Rc<Shared>);

#[derive(Default)]
struct Shared {
    /// Whether an entry's headers are read, and not its content.
    is_expected: Cell<bool>,
    bytes: RefCell<Vec<u8>>,
}

impl ExtendedHeader {
    /// From here on headers are read.
    pub fn expect(&self) {
        self.0.is_expected.set(true);
        self.0.bytes.take();
    }

    /// What was read since then; no headers follow.
    pub fn take(&self) -> Vec<u8> {
        self.0.is_expected.set(false);
        self.0.bytes.take()
    }
}

/// The bytes of an archive, of which extended headers are kept.
pub(crate) struct Headers<R> {
    inner: R,
    header: ExtendedHeader,
    /// Bytes that were given out.
    position: u64,
    /// A header that was read and is not given out yet.
    ahead: Cursor<Vec<u8>>,
}

impl<R: Read> Headers<R> {
    /// Keeps them in `header`.
    pub fn new(inner: R, header: ExtendedHeader) -> Self {
        Self { inner, header, position: 0, ahead: Cursor::default() }
    }

    /// Reads a header, and all of it if it is an extended one.
    fn look_ahead(&mut self) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(BLOCK);
        self.inner.by_ref().take(BLOCK as u64).read_to_end(&mut bytes)?;
        if let Some(len) = extended_len(&bytes) {
            let mut records = Vec::new();
            self.inner.by_ref().take(len).read_to_end(&mut records)?;
            self.header.0.bytes.replace(records.clone());
            without_line_ends(&mut records);
            bytes.extend(records);
        }
        self.ahead = Cursor::new(bytes);
        Ok(())
    }
}

/// Bytes of the records behind this block, if it begins an extended header.
fn extended_len(block: &[u8]) -> Option<u64> {
    let header = tar::Header::from_byte_slice(block.get(..BLOCK)?);
    let is_extended = header.entry_type().is_pax_local_extensions();
    header.entry_size().ok().filter(|_| is_extended)
}

impl<R: Read> Read for Headers<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // Headers are read one by one. What is skipped before them ends at a whole block.
        let is_header = self.header.0.is_expected.get()
            && buffer.len() == BLOCK
            && self.position.is_multiple_of(BLOCK as u64);
        if self.is_empty() && is_header {
            self.look_ahead()?;
        }
        let count = match self.is_empty() {
            true => self.inner.read(buffer)?,
            false => self.ahead.read(buffer)?,
        };
        self.position += count as u64;
        Ok(count)
    }
}

impl<R> Headers<R> {
    fn is_empty(&self) -> bool {
        self.ahead.position() == self.ahead.get_ref().len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(header: &[u8]) -> io::Result<Vec<(String, Vec<u8>)>> {
        let mut all = Vec::new();
        records(header, |key, value| {
            all.push((String::from_utf8_lossy(key).into_owned(), value.to_vec()));
            Ok(())
        })?;
        Ok(all)
    }

    #[test]
    fn values_have_any_bytes() {
        let mut header = b"30 SCHILY.xattr.user.a=1\n2=3\n\n11 mtime=5\n5 a=\n".to_vec();
        let expected = [
            ("SCHILY.xattr.user.a".to_owned(), b"1\n2=3\n".to_vec()),
            ("mtime".to_owned(), b"5".to_vec()),
            ("a".to_owned(), Vec::new()),
        ];
        assert_eq!(all(&header).unwrap(), expected);
        let len = header.len();
        without_line_ends(&mut header);
        assert_eq!(header.len(), len);
        assert_eq!(header.iter().filter(|byte| **byte == b'\n').count(), 3);
    }

    #[test]
    fn records_that_make_no_sense_are_refused() {
        for bad in
            ["x", "3", "99 a=b\n", "0 a=b\n", "5 a=b\n", "6 a=bc", "5 ab\n", " a=b\n", "6\ta=b\n"]
        {
            assert!(all(bad.as_bytes()).is_err(), "{bad:?}");
            let mut same = bad.as_bytes().to_vec();
            without_line_ends(&mut same);
            assert_eq!(same, bad.as_bytes());
        }
        assert!(all(b"99999999999999999999999 a=b\n").is_err());
        assert!(all(b"").unwrap().is_empty() && all(b"\n").unwrap().is_empty());
    }
}
