//! Files that are read again after they were hashed, piece by piece.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

/// Bytes of a piece.
const PIECE: usize = 128 << 10;

/// Hashes of the pieces of a file.
#[derive(Debug)]
pub(super) struct Pieces {
    len: u64,
    hashes: Vec<[u8; 32]>,
}

impl Pieces {
    /// Reads a file.
    ///
    /// # Errors
    /// The host's.
    pub fn of(file: &File) -> io::Result<Self> {
        let len = file.metadata()?.len();
        let mut buffer = vec![0; PIECE];
        let mut hashes = Vec::new();
        for at in (0..len).step_by(PIECE) {
            let piece = &mut buffer[..(len - at).min(PIECE as u64) as usize];
            file.read_exact_at(piece, at)?;
            hashes.push(*blake3::hash(piece).as_bytes());
        }
        Ok(Self { len, hashes })
    }
}

/// Reads the bytes of a file that it had when its pieces were hashed, and no others.
pub(super) struct PieceReader {
    file: File,
    pieces: Rc<Pieces>,
    /// The piece that was read last; `None`: none was.
    number: Option<usize>,
    buffer: Vec<u8>,
}

impl PieceReader {
    pub fn new(file: File, pieces: Rc<Pieces>) -> Self {
        Self { file, pieces, number: None, buffer: Vec::new() }
    }

    /// Fills the front of a buffer from `at` on; how much of it: nothing at the end of the file.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`]: there are other bytes now. The host's.
    pub fn read(&mut self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        if at >= self.pieces.len || buffer.is_empty() {
            return Ok(0);
        }
        let number = (at / PIECE as u64) as usize;
        if self.number != Some(number) {
            self.load(number)?;
        }
        let rest = &self.buffer[(at % PIECE as u64) as usize..];
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        Ok(count)
    }

    /// Fills a buffer; bytes behind the end of the file are zero.
    ///
    /// # Errors
    /// As of [`PieceReader::read`].
    pub fn read_padded(&mut self, buffer: &mut [u8], at: u64) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            // Beyond all files.
            let Some(next) = at.checked_add(done as u64) else { break };
            match self.read(&mut buffer[done..], next)? {
                0 => break,
                count => done += count,
            }
        }
        buffer[done..].fill(0);
        Ok(())
    }

    fn load(&mut self, number: usize) -> io::Result<()> {
        self.number = None;
        let at = number as u64 * PIECE as u64;
        self.buffer.resize((self.pieces.len - at).min(PIECE as u64) as usize, 0);
        match self.file.read_exact_at(&mut self.buffer, at) {
            // It was cut off.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(io::ErrorKind::InvalidData.into());
            }
            read => read?,
        }
        if *blake3::hash(&self.buffer).as_bytes() != self.pieces.hashes[number] {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.number = Some(number);
        Ok(())
    }
}
