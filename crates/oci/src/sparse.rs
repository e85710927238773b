//! Sparse files in the formats of PAX, which GNU tar writes (its manual, "Storing Sparse Files"):
//! 0.0 and 0.1 say in the extended header where the data lie, 1.0 in front of the data.

use std::io::{self, Read};

/// Bytes that an archive is made of multiples of.
const BLOCK: usize = 512;
/// Most pieces of data of a file.
const PIECES_MAX: usize = 1 << 18;
/// Digits of a number in front of the data: as many as 2^64 has.
const DIGITS_MAX: usize = 20;

/// Data of a sparse file, and where in it they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    at: u64,
    len: u64,
}

impl Piece {
    fn end(self) -> Option<u64> {
        self.at.checked_add(self.len)
    }
}

/// What an extended header says of a sparse file.
#[derive(Debug, Default)]
pub(crate) struct SparseHeader {
    is_sparse: bool,
    /// 1.0: where the data lie is said in front of them.
    is_map_in_data: bool,
    /// Its own name: that of the entry is made up.
    name: Option<Vec<u8>>,
    size: Option<u64>,
    pieces: Vec<Piece>,
    /// Of 0.0: the place of the next piece.
    next_at: Option<u64>,
}

impl SparseHeader {
    /// Takes a record of the extended header, if it is one of these: `key` without `GNU.sparse.`
    ///
    /// # Errors
    /// It makes no sense.
    pub fn note(&mut self, key: &[u8], value: &[u8]) -> io::Result<()> {
        self.is_sparse = true;
        match key {
            b"major" => self.is_map_in_data = number(value)? >= 1,
            b"name" => self.name = Some(value.to_owned()),
            b"size" | b"realsize" => self.size = Some(number(value)?),
            b"offset" => self.next_at = Some(number(value)?),
            b"numbytes" => {
                let at = self.next_at.take().ok_or_else(|| bad("a length without a place"))?;
                self.add(Piece { at, len: number(value)? })?;
            }
            b"map" => {
                let numbers: Vec<_> = value.split(|&byte| byte == b',').collect();
                let (pairs, rest) = numbers.as_chunks::<2>();
                if !rest.is_empty() && value != b"" {
                    return Err(bad("a place without a length"));
                }
                for [at, len] in pairs {
                    self.add(Piece { at: number(at)?, len: number(len)? })?;
                }
            }
            // The number of pieces, and others that say nothing new.
            _ => {}
        }
        Ok(())
    }

    fn add(&mut self, piece: Piece) -> io::Result<()> {
        if self.pieces.len() == PIECES_MAX {
            return Err(bad("too many pieces"));
        }
        self.pieces.push(piece);
        Ok(())
    }

    /// Whether the entry is a sparse file in one of these formats.
    pub fn is_sparse(&self) -> bool {
        self.is_sparse
    }

    /// The name of the file, if the entry has another one.
    pub fn take_name(&mut self) -> Option<Vec<u8>> {
        self.name.take()
    }

    /// Bytes of the file, holes included.
    ///
    /// # Errors
    /// The header does not say it.
    pub fn size(&self) -> io::Result<u64> {
        self.size.ok_or_else(|| bad("no size"))
    }

    /// The file, whose `stored` bytes `source` has.
    ///
    /// # Errors
    /// The pieces do not fit the size or what is stored.
    pub fn expand<R: Read>(mut self, mut source: R, stored: u64) -> io::Result<Expanded<R>> {
        let size = self.size()?;
        let mut data = stored;
        if self.is_map_in_data {
            let map = self.read_map(&mut source)?;
            data = stored.checked_sub(map).ok_or_else(|| bad("no data"))?;
        }
        let (mut end, mut in_all) = (0, 0_u64);
        for piece in &self.pieces {
            if piece.at < end || piece.end().is_none_or(|end| end > size) {
                return Err(bad("pieces that overlap, or lie behind its end"));
            }
            end = piece.at + piece.len;
            // No more than `size`, since they do not overlap.
            in_all += piece.len;
        }
        if in_all != data {
            return Err(bad("pieces that are not as long as its data"));
        }
        self.pieces.reverse();
        Ok(Expanded { source, ahead: self.pieces, at: 0, size })
    }

    /// Reads where the data lie, in front of them; how many bytes that was.
    fn read_map(&mut self, source: &mut impl Read) -> io::Result<u64> {
        let mut map = MapReader { source, block: [0; BLOCK], next: BLOCK, read: 0 };
        let count = map.number()?;
        for _ in 0..count {
            let piece = Piece { at: map.number()?, len: map.number()? };
            self.add(piece)?;
        }
        Ok(map.read)
    }
}

/// Reads the lines in front of the data, which fill whole blocks.
struct MapReader<'a, R> {
    source: &'a mut R,
    block: [u8; BLOCK],
    next: usize,
    read: u64,
}

impl<R: Read> MapReader<'_, R> {
    fn number(&mut self) -> io::Result<u64> {
        let mut digits = Vec::new();
        loop {
            match self.byte()? {
                b'\n' => return number(&digits),
                digit if digits.len() < DIGITS_MAX => digits.push(digit),
                _ => return Err(bad("a number that is too long")),
            }
        }
    }

    fn byte(&mut self) -> io::Result<u8> {
        if self.next == BLOCK {
            self.source.read_exact(&mut self.block)?;
            self.read += BLOCK as u64;
            self.next = 0;
        }
        self.next += 1;
        Ok(self.block[self.next - 1])
    }
}

/// A sparse file with zeros in its holes.
#[derive(Debug)]
pub(crate) struct Expanded<R> {
    source: R,
    /// The pieces ahead, the next one last.
    ahead: Vec<Piece>,
    at: u64,
    size: u64,
}

impl<R: Read> Read for Expanded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.ahead.last().is_some_and(|piece| piece.len == 0) {
            self.ahead.pop();
        }
        let most = |len: u64, buffer: &[u8]| len.min(buffer.len() as u64) as usize;
        let until = self.ahead.last().map_or(self.size, |piece| piece.at);
        if self.at < until {
            let count = most(until - self.at, buffer);
            buffer[..count].fill(0);
            self.at += count as u64;
            return Ok(count);
        }
        let Some(piece) = self.ahead.last_mut() else { return Ok(0) };
        let count = most(piece.len, buffer);
        let count = self.source.read(&mut buffer[..count])?;
        piece.at += count as u64;
        piece.len -= count as u64;
        self.at += count as u64;
        Ok(count)
    }
}

fn number(text: &[u8]) -> io::Result<u64> {
    let digits = std::str::from_utf8(text).ok().filter(|text| !text.starts_with('+'));
    digits.and_then(|text| text.parse().ok()).ok_or_else(|| bad("something else than a number"))
}

fn bad(why: &str) -> io::Error {
    io::Error::other(format!("its header of a sparse file has {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(records: &[(&str, &str)]) -> io::Result<SparseHeader> {
        let mut header = SparseHeader::default();
        for (key, value) in records {
            header.note(key.as_bytes(), value.as_bytes())?;
        }
        Ok(header)
    }

    fn expanded(header: SparseHeader, stored: &[u8]) -> io::Result<Vec<u8>> {
        let mut file = Vec::new();
        header.expand(stored, stored.len() as u64)?.read_to_end(&mut file)?;
        Ok(file)
    }

    const EXPECTED: &[u8] = b"\0\0abc\0\0\0de\0";

    #[test]
    fn all_formats_are_read() {
        let pairs = [("offset", "2"), ("numbytes", "3"), ("offset", "8"), ("numbytes", "2")];
        let first = [&[("size", "11"), ("numblocks", "2")][..], &pairs].concat();
        assert_eq!(expanded(header(&first).unwrap(), b"abcde").unwrap(), EXPECTED);
        let mut second =
            header(&[("name", "dir/file"), ("size", "11"), ("map", "2,3,8,2,11,0")]).unwrap();
        assert_eq!(second.take_name().unwrap(), b"dir/file");
        assert_eq!(expanded(second, b"abcde").unwrap(), EXPECTED);
        let third = || header(&[("major", "1"), ("minor", "0"), ("realsize", "11")]).unwrap();
        let mut stored = b"2\n2\n3\n8\n2\n".to_vec();
        stored.resize(BLOCK, 0);
        stored.extend(b"abcde");
        assert_eq!(expanded(third(), &stored).unwrap(), EXPECTED);
        // A map of several blocks.
        let lines: String = (0..200).map(|piece| format!("{}\n1\n", piece * 2)).collect();
        let mut stored = format!("200\n{lines}").into_bytes();
        stored.resize(stored.len().next_multiple_of(BLOCK), 0);
        stored.extend([b'x'; 200]);
        let many = header(&[("major", "1"), ("realsize", "400")]).unwrap();
        assert_eq!(expanded(many, &stored).unwrap(), [b'x', 0].repeat(200));
        // Nothing but a hole.
        assert_eq!(expanded(header(&[("size", "3"), ("map", "")]).unwrap(), b"").unwrap(), [0; 3]);
    }

    #[test]
    fn headers_that_make_no_sense_are_refused() {
        for records in [
            &[("size", "11"), ("map", "2,3,8")][..],
            &[("size", "11"), ("map", "2,x")],
            &[("size", "+11")],
            &[("size", "99999999999999999999")],
            &[("numbytes", "3")],
        ] {
            header(records).unwrap_err();
        }
        for records in [
            // No size, pieces that overlap, that lie behind the end or beyond all, too little data.
            &[("map", "2,5")][..],
            &[("size", "11"), ("map", "2,3,4,2")],
            &[("size", "11"), ("map", "8,2,2,3")],
            &[("size", "6"), ("map", "2,5")],
            &[("size", "11"), ("map", "18446744073709551615,5")],
            &[("size", "11"), ("map", "2,4")],
            &[("size", "11"), ("map", "2,6")],
            &[("major", "1"), ("realsize", "11")],
        ] {
            expanded(header(records).unwrap(), b"abcde").unwrap_err();
        }
        let mut endless = vec![b'1'; BLOCK];
        endless.extend(b"\n");
        let map = || header(&[("major", "1"), ("realsize", "11")]).unwrap();
        expanded(map(), &endless).unwrap_err();
        // More pieces than there may be.
        let mut many = b"999999999\n".to_vec();
        many.extend(b"0\n0\n".repeat(PIECES_MAX + 200));
        many.resize(many.len().next_multiple_of(BLOCK), 0);
        let error = expanded(map(), &many).unwrap_err().to_string();
        assert!(error.contains("too many pieces"), "{error}");
    }
}
