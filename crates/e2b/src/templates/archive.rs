//! An archive that a client has uploaded, as the stream of tar that a sandbox gets. It may be packed
//! with gzip; how much comes of it has a bound.

use flate2::read::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Most bytes of the stream.
pub const UNPACKED_MAX: u64 = 16 << 30;

/// A stream of tar, in pieces.
pub type Stream = Box<dyn Read + Send>;

/// Whoever wants a stream. When it is dropped the stream ends with an error: there are archives
/// that a thread reads for minutes without anything for the sandbox, so it would not notice that
/// the build is over.
#[derive(Default)]
pub struct Reader(Arc<AtomicBool>);

impl Drop for Reader {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Reader {
    /// The stream of an archive.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn stream(&self, file: File) -> io::Result<Stream> {
        self.stream_of_at_most(file, UNPACKED_MAX)
    }

    fn stream_of_at_most(&self, mut file: File, most: u64) -> io::Result<Stream> {
        let mut magic = [0; 2];
        let is_packed = match file.read_exact(&mut magic) {
            Ok(()) => magic == [0x1f, 0x8b],
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => false,
            Err(error) => return Err(error),
        };
        file.rewind()?;
        let is_over = self.0.clone();
        let file = BufReader::new(Wanted { file, is_over });
        Ok(match is_packed {
            true => Box::new(Bounded { from: MultiGzDecoder::new(file), left: most }),
            false => Box::new(Bounded { from: file, left: most }),
        })
    }
}

/// A packed archive for as long as somebody wants it.
struct Wanted {
    file: File,
    is_over: Arc<AtomicBool>,
}

impl Read for Wanted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.is_over.load(Ordering::Relaxed) {
            true => Err(io::Error::other("nobody wants the files any more")),
            false => self.file.read(buffer),
        }
    }
}

/// A stream that fails where it is longer than it may be.
struct Bounded<R> {
    from: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(buffer)?;
        match self.left.checked_sub(count as u64) {
            Some(left) => {
                self.left = left;
                Ok(count)
            }
            None => Err(io::Error::other("the files are larger than is unpacked; copy less")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::Write;

    fn read(bytes: &[u8], most: u64) -> io::Result<Vec<u8>> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file.rewind().unwrap();
        let mut all = Vec::new();
        let reader = Reader::default();
        reader.stream_of_at_most(file, most)?.read_to_end(&mut all)?;
        Ok(all)
    }

    #[test]
    fn nobody_goes_on_reading_for_a_build_that_is_over() {
        // Ever so many packed files without contents: nothing comes out of them.
        let empty = GzEncoder::new(Vec::new(), Compression::best()).finish().unwrap();
        let opened = |reader: &Reader| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&empty.repeat(10_000)).unwrap();
            file.rewind().unwrap();
            reader.stream(file).unwrap()
        };
        let reader = Reader::default();
        assert_eq!(opened(&reader).read(&mut [0]).unwrap(), 0, "it is read to its end");
        let mut stream = opened(&reader);
        drop(reader);
        assert!(stream.read(&mut [0]).unwrap_err().to_string().contains("nobody wants"));
    }

    #[test]
    fn packed_and_plain_archives_are_read_up_to_a_bound() {
        let plain = vec![0; 100_000];
        let mut packer = GzEncoder::new(Vec::new(), Compression::best());
        packer.write_all(&plain).unwrap();
        let packed = packer.finish().unwrap();
        assert!(packed.len() < 1000);
        for bytes in [&plain, &packed] {
            assert_eq!(read(bytes, 100_000).unwrap(), plain);
            assert!(read(bytes, 99_999).unwrap_err().to_string().contains("larger"));
        }
        assert_eq!(read(b"", 0).unwrap(), b"");
        assert!(read(&packed[..packed.len() / 2], 100_000).is_err());
    }
}
