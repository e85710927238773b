//! Pieces: what a function's parts are moved in.
//!
//! A section is one row of bytes. It is cut into pieces of at most [`PIECE_MAX`] bytes, and each is
//! compressed by itself (zstd). Registries keep a piece once, by its digest, so where to cut decides
//! how much two functions have in common: after a file whose content says so. Then a file that is
//! there in one function only changes the piece that it lies in, and the next ones are equal again.

use crate::error::OciError;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

/// Most bytes of a piece, before it is compressed.
pub const PIECE_MAX: usize = 4 << 20;
/// Bytes of a piece of many files, on average.
const PIECE_MEAN: u64 = 256 << 10;
/// How hard is compressed: higher levels take several times as long for a few percent.
const LEVEL: i32 = 3;
/// Binary logarithm of the largest window that is accepted: that of the longest piece.
const WINDOW_LOG_MAX: u32 = PIECE_MAX.ilog2();
/// Most bytes of a compressed piece (zstd.h, `ZSTD_COMPRESSBOUND`).
const PACKED_MAX: u64 = compressed_max(PIECE_MAX as u64);
/// Most bytes of a run: a prefetch file has 64 MiB at most, and the kernel's memory comes on top.
pub const RUN_MAX: u64 = 256 << 20;

const fn compressed_max(bytes: u64) -> u64 {
    bytes + (bytes >> 8) + 64
}

/// Most bytes of a compressed piece of a section.
pub(crate) const fn packed_max(section: super::Section) -> u64 {
    match section {
        super::Section::Run => compressed_max(RUN_MAX),
        _ => PACKED_MAX,
    }
}

/// A piece, not compressed.
pub type Piece = Vec<u8>;

/// Cuts a section.
#[derive(Debug, Default)]
pub struct Cutter {
    current: Piece,
}

impl Cutter {
    /// Adds bytes; `done` gets each piece that is full.
    ///
    /// # Errors
    /// Those of `done`.
    pub fn add<E>(
        &mut self,
        mut bytes: &[u8],
        done: &mut dyn FnMut(Piece) -> Result<(), E>,
    ) -> Result<(), E> {
        while !bytes.is_empty() {
            let room = PIECE_MAX - self.current.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.current.extend_from_slice(now);
            bytes = later;
            if self.current.len() == PIECE_MAX {
                self.cut(done)?;
            }
        }
        Ok(())
    }

    /// Before a file of `size` bytes: a file that does not fit into what is left begins a piece, so
    /// that where it is cut depends on nothing but the file.
    ///
    /// # Errors
    /// Those of `done`.
    pub fn begin_file<E>(
        &mut self,
        size: u64,
        done: &mut dyn FnMut(Piece) -> Result<(), E>,
    ) -> Result<(), E> {
        match self.current.len() as u64 + size > PIECE_MAX as u64 {
            true => self.cut(done),
            false => Ok(()),
        }
    }

    /// After a file: whether a piece ends here is said by the hash of its content, the more likely
    /// the longer it is. A long file ends a piece in any case.
    ///
    /// # Errors
    /// Those of `done`.
    pub fn end_file<E>(
        &mut self,
        size: u64,
        hash: &[u8; 32],
        done: &mut dyn FnMut(Piece) -> Result<(), E>,
    ) -> Result<(), E> {
        let [a, b, c, d, ..] = *hash;
        let chance = u64::from(u32::from_le_bytes([a, b, c, d]));
        // chance / 2³² < size / mean, without a fraction.
        match u128::from(chance) * u128::from(PIECE_MEAN) < u128::from(size) << 32 {
            true => self.cut(done),
            false => Ok(()),
        }
    }

    /// Ends a piece here, unless it would be empty.
    ///
    /// # Errors
    /// Those of `done`.
    pub fn cut<E>(&mut self, done: &mut dyn FnMut(Piece) -> Result<(), E>) -> Result<(), E> {
        match self.current.is_empty() {
            true => Ok(()),
            false => done(std::mem::take(&mut self.current)),
        }
    }
}

/// A piece as it travels.
///
/// # Errors
/// There is no memory.
pub fn packed(piece: &[u8]) -> io::Result<Vec<u8>> {
    zstd::bulk::compress(piece, LEVEL)
}

/// Reads what the pieces of a section hold, one after the other.
#[derive(Debug)]
pub struct PieceReader {
    files: std::vec::IntoIter<PathBuf>,
    current: io::Cursor<Piece>,
}

impl PieceReader {
    /// A reader of these files, in this order. They hold compressed pieces.
    pub fn new(files: Vec<PathBuf>) -> Self {
        Self { files: files.into_iter(), current: io::Cursor::default() }
    }

    /// Makes sure that nothing is left.
    ///
    /// # Errors
    /// Something is, or cannot be read.
    pub fn finish(mut self, section: super::Section) -> Result<(), OciError> {
        let what = || format!("the {section} of the function");
        match self.read(&mut [0]) {
            Ok(0) => Ok(()),
            Ok(_) => Err(OciError::document(what(), "it is longer than its document says")),
            Err(error) => Err(OciError::document(what(), error)),
        }
    }
}

impl Read for PieceReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = self.current.read(buffer)?;
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            let Some(file) = self.files.next() else { return Ok(0) };
            self.current = io::Cursor::new(unpacked(File::open(file)?)?);
        }
    }
}

/// What a compressed piece holds. A few bytes may stand for very many, so what is more than
/// [`PIECE_MAX`] is not even made.
///
/// # Errors
/// It is no piece, is empty, or is longer.
pub fn unpacked(packed: impl Read) -> io::Result<Piece> {
    let piece = unpacked_up_to(packed, PIECE_MAX as u64)?;
    match piece.len() {
        0 => Err(io::Error::other("a piece is empty")),
        len if len > PIECE_MAX => Err(io::Error::other("a piece is longer than 4 MiB")),
        _ => Ok(piece),
    }
}

/// What a compressed run of `len` bytes holds.
///
/// # Errors
/// It is no run, or is not as long.
pub fn unpacked_run(packed: impl Read, len: u64) -> io::Result<Vec<u8>> {
    let wrong = || io::Error::other("the run is not as long as its document says");
    let run = if len > RUN_MAX { return Err(wrong()) } else { unpacked_up_to(packed, len)? };
    if run.len() as u64 == len { Ok(run) } else { Err(wrong()) }
}

/// What is packed, or one byte more than `most` of it.
fn unpacked_up_to(packed: impl Read, most: u64) -> io::Result<Vec<u8>> {
    let mut decoder = zstd::Decoder::new(packed.take(compressed_max(most) + 1))?;
    decoder.window_log_max(WINDOW_LOG_MAX)?;
    let mut bytes = Vec::new();
    decoder.take(most + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    /// Pieces of files with these contents.
    fn pieces(files: &[Vec<u8>]) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut done = |piece: Piece| {
            pieces.push(piece);
            Ok::<_, Infallible>(())
        };
        let mut cutter = Cutter::default();
        for file in files {
            let size = file.len() as u64;
            cutter.begin_file(size, &mut done).unwrap();
            cutter.add(file, &mut done).unwrap();
            // Any hash does.
            let mut hash = [0; 32];
            hash[..4].copy_from_slice(&crate::layer::digest(file).as_bytes()[10..14]);
            hash[3] = hash[2].wrapping_mul(37);
            cutter.end_file(size, &hash, &mut done).unwrap();
        }
        cutter.cut(&mut done).unwrap();
        pieces
    }

    fn files(count: u32) -> Vec<Vec<u8>> {
        let file = |number: u32| number.to_le_bytes().repeat(500 + (number % 97) as usize * 50);
        (0..count).map(file).collect()
    }

    #[test]
    fn pieces_hold_all_bytes_in_order_and_have_a_bound() {
        let mut files = files(800);
        files.insert(300, vec![7; 3 * PIECE_MAX + 5]);
        let pieces = pieces(&files);
        assert_eq!(pieces.concat(), files.concat());
        assert!(pieces.iter().all(|piece| (1..=PIECE_MAX).contains(&piece.len())));
        let mean = pieces.iter().map(Vec::len).sum::<usize>() / pieces.len();
        assert!((100 << 10..2 << 20).contains(&mean), "{mean}");
    }

    #[test]
    fn one_more_file_changes_one_piece() {
        let files = files(2000);
        let mut more = files.clone();
        more.insert(1000, b"one more".repeat(100));
        let (before, after) = (pieces(&files), pieces(&more));
        let new = after.iter().filter(|piece| !before.contains(piece)).count();
        assert!(before.len() > 20 && new == 1, "{new} of {} are new", after.len());
    }

    fn written(pieces: &[Vec<u8>]) -> (tempfile::TempDir, PieceReader) {
        let directory = tempfile::tempdir().unwrap();
        let write = |(number, bytes): (usize, &Vec<u8>)| {
            let path = directory.path().join(number.to_string());
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let paths = pieces.iter().enumerate().map(write).collect();
        (directory, PieceReader::new(paths))
    }

    #[test]
    fn what_was_packed_is_read() {
        let pieces = pieces(&files(300));
        let all: Vec<_> = pieces.iter().map(|piece| packed(piece).unwrap()).collect();
        assert!(all.iter().all(|packed| packed.len() as u64 <= PACKED_MAX));
        let (_directory, mut reader) = written(&all);
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        assert_eq!(read, pieces.concat());
        reader.finish(super::super::Section::Files).unwrap();
        let (_directory, reader) = written(&all);
        let message = reader.finish(super::super::Section::Image).unwrap_err().to_string();
        assert!(message.contains("the image of the function") && message.contains("longer"));
    }

    #[test]
    fn bombs_are_not_unpacked() {
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], LEVEL).unwrap();
        assert!(bomb.len() < 64 << 10);
        let refused = |bytes: Vec<u8>| {
            let (_directory, mut reader) = written(&[bytes]);
            io::copy(&mut reader, &mut io::sink()).unwrap_err().to_string()
        };
        refused(bomb);
        let mut encoder = zstd::Encoder::new(Vec::new(), LEVEL).unwrap();
        encoder.window_log(20).unwrap();
        io::copy(&mut io::repeat(0).take(64 << 20), &mut encoder).unwrap();
        let message = refused(encoder.finish().unwrap());
        assert!(message.contains("longer than 4 MiB"), "{message}");
        let mut encoder = zstd::Encoder::new(Vec::new(), LEVEL).unwrap();
        encoder.window_log(27).unwrap();
        encoder.long_distance_matching(true).unwrap();
        io::copy(&mut io::repeat(0).take(64 << 20), &mut encoder).unwrap();
        refused(encoder.finish().unwrap());
        let empty = refused(zstd::bulk::compress(&[], LEVEL).unwrap());
        assert!(empty.contains("empty"), "{empty}");
        refused(b"no piece".to_vec());
    }

    #[test]
    fn runs_are_as_long_as_is_said() {
        let run = vec![5; 10 << 20];
        let packed = packed(&run).unwrap();
        let len = run.len() as u64;
        assert_eq!(unpacked_run(&packed[..], len).unwrap(), run);
        for wrong in [0, len - 1, len + 1, RUN_MAX + 1, u64::MAX] {
            let error = unpacked_run(&packed[..], wrong).unwrap_err().to_string();
            assert!(error.contains("not as long"), "{wrong}: {error}");
        }
        thaw_mutate::survive("function_run", &[&packed[..]], 200, |bytes| {
            drop(unpacked_run(bytes, len));
        });
    }

    #[test]
    fn pieces_of_any_bytes_are_survived() {
        let small = packed(&vec![3; 1000]).unwrap();
        let files = packed(&files(3).concat()).unwrap();
        thaw_mutate::survive("function_piece", &[&small[..], &files], 1000, |bytes| {
            drop(unpacked(bytes));
        });
    }
}
