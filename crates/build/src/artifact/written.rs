//! Pieces that were fetched, and what is written of them for sandboxes that wait.

use super::pieces;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use thaw_home::partial::{Rows, parts};
use thaw_oci::artifact::{Naming, NamingRun, unpacked};
use thaw_oci::{PieceName, check_piece, has_piece};
use thaw_sandbox::{MovedFile, Segment};
use thaw_store::{Blob, Domain, Owner};

/// Why something could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WrittenError {
    /// A piece is not there any more, or is damaged; it has been removed.
    #[error("piece {0} of the function is damaged")]
    Piece(u32),
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

/// Writes what was asked for.
#[derive(Debug)]
pub struct Written {
    /// The function's directory.
    directory: PathBuf,
    pieces: PathBuf,
    owner: Owner,
    /// The contents, and by whose names they are named.
    contents: Vec<(Blob, Naming)>,
    segments: Vec<Segment>,
    /// Pieces that were unpacked last, by their digests.
    recent: Mutex<Vec<(String, Arc<Vec<u8>>)>>,
    /// The numbers of segments that are here.
    done: Mutex<BTreeSet<u32>>,
}

impl Written {
    /// Writes to these directories with the rights of `owner`.
    ///
    /// # Errors
    /// The document counts its contents wrong.
    pub fn new(
        (directory, pieces, owner): (PathBuf, PathBuf, Owner),
        contents: impl ExactSizeIterator<Item = Blob>,
        naming: &[NamingRun],
        segments: Vec<Segment>,
    ) -> Result<Self, String> {
        let count = contents.len();
        let namings =
            naming.iter().flat_map(|run| std::iter::repeat_n(&run.naming, run.count as usize));
        let contents: Vec<_> = contents.zip(namings.cloned()).collect();
        let named: u64 = naming.iter().map(|run| u64::from(run.count)).sum();
        match contents.len() == count && named == count as u64 {
            true => Ok(Self {
                directory,
                pieces,
                owner,
                contents,
                segments,
                recent: Mutex::default(),
                done: Mutex::default(),
            }),
            false => Err("its document counts its contents wrong".to_owned()),
        }
    }

    fn segment(&self, number: u32) -> Option<Segment> {
        self.segments.get((number as usize).checked_sub(self.contents.len())?).copied()
    }

    /// What is asked for by a number: a range of a file.
    fn range(&self, rows: &Rows, number: u32) -> Option<(MovedFile, Range<u64>)> {
        if let Some((blob, _)) = self.contents.get(number as usize) {
            return Some((MovedFile::Content(number), 0..blob.size));
        }
        let segment = self.segment(number)?;
        Some((segment.of, rows.segment(segment)?))
    }

    /// The pieces that are needed for a number; `None`: there is no such number.
    pub fn needs(&self, rows: &Rows, number: u32) -> Option<Range<u32>> {
        let (of, range) = self.range(rows, number)?;
        rows.pieces_of(of, &range)
    }

    /// Whether a piece is kept, which counts as used.
    ///
    /// # Errors
    /// This process may not look.
    pub fn has(&self, name: &PieceName) -> Result<bool, WrittenError> {
        self.acting(|| Ok(has_piece(&self.pieces, name)))
    }

    /// Keeps a piece whose digest is right.
    ///
    /// # Errors
    /// There is no room for it.
    pub fn keep(&self, name: &PieceName, bytes: &[u8]) -> Result<(), WrittenError> {
        self.acting(|| {
            pieces::keep(&self.pieces, name, bytes)
                .map_err(|error| cannot("keep a piece of the function in", &self.pieces, &error))
        })
    }

    /// Writes what was asked for by a number, whose pieces are all kept. It is written once: a guest may
    /// ask as often as it likes.
    ///
    /// # Errors
    /// A piece is damaged, a content is another one than its name says, or there is no room.
    pub fn write(&self, rows: &Rows, names: &[PieceName], number: u32) -> Result<(), WrittenError> {
        let missing = || WrittenError::Other("there is no such part of the function".to_owned());
        let (of, range) = self.range(rows, number).ok_or_else(missing)?;
        let contents = self.directory.join(parts::CONTENTS);
        let (path, whole) = match (of, self.contents.get(number as usize)) {
            (MovedFile::Image, _) => (self.directory.join(parts::IMAGE), None),
            (MovedFile::Content(_), Some(whole)) => {
                (contents.join(number.to_string()), Some(whole))
            }
            (MovedFile::Content(content), None) => (contents.join(format!("{content}.part")), None),
        };
        // A content got its name when it was whole. After a power failure its bytes may be missing.
        let is_done = match whole {
            Some((blob, _)) => fs::metadata(&path).is_ok_and(|found| found.len() == blob.size),
            None => self.done.lock().expect("no holder panics").contains(&number),
        };
        if is_done {
            return Ok(());
        }
        self.acting(|| match whole {
            Some((blob, naming)) => self.write_whole((rows, names), of, &path, (*blob, naming)),
            None => self.write_range((rows, names), of, range, &path),
        })?;
        if whole.is_none() {
            self.done.lock().expect("no holder panics").insert(number);
        }
        Ok(())
    }

    fn write_whole(
        &self,
        pieces: (&Rows, &[PieceName]),
        of: MovedFile,
        path: &Path,
        (blob, naming): (Blob, &Naming),
    ) -> Result<(), WrittenError> {
        let new = path.with_extension("new");
        let file = File::create(&new).map_err(|error| cannot("write to", &new, &error))?;
        self.copy(pieces, of, 0..blob.size, &file)?;
        drop(file);
        let file = File::open(&new).map_err(|error| cannot("read", &new, &error))?;
        let domain = match naming {
            Naming::Shared => Domain::shared(),
            Naming::Domain(name) => Domain::own(name),
            Naming::Private(name) => Domain::private(name),
        };
        let mut read = domain.naming(file);
        io::copy(&mut read, &mut io::sink()).map_err(|error| cannot("read", &new, &error))?;
        if read.blob() != blob {
            return Err(WrittenError::Other(format!(
                "the function is refused: content {} is not what its name says",
                blob.hash
            )));
        }
        fs::rename(&new, path).map_err(|error| cannot("write to", path, &error))
    }

    fn write_range(
        &self,
        pieces: (&Rows, &[PieceName]),
        of: MovedFile,
        range: Range<u64>,
        path: &Path,
    ) -> Result<(), WrittenError> {
        let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        let file = opened.map_err(|error| cannot("write to", path, &error))?;
        let len = pieces.0.len_of(of).unwrap_or(0);
        file.set_len(len).map_err(|error| cannot("write to", path, &error))?;
        self.copy(pieces, of, range, &file)
    }

    /// Copies a range of a file out of its pieces to the same place.
    fn copy(
        &self,
        (rows, names): (&Rows, &[PieceName]),
        of: MovedFile,
        range: Range<u64>,
        to: &File,
    ) -> Result<(), WrittenError> {
        let (Some(pieces), Some((_, start))) = (rows.pieces_of(of, &range), rows.place(of)) else {
            return Err(WrittenError::Other("there is no such part of the function".to_owned()));
        };
        for piece in pieces {
            let held = rows.range(piece);
            let bytes = self.unpack(&names[piece as usize], piece, held.end - held.start)?;
            let from = held.start.max(start + range.start);
            let end = held.end.min(start + range.end);
            let part = &bytes[(from - held.start) as usize..(end - held.start) as usize];
            to.write_all_at(part, from - start).map_err(|error| {
                cannot("write a part of the function to", &self.directory, &error)
            })?;
        }
        Ok(())
    }

    /// What a piece holds. One that is damaged, or cannot be read, is removed, so that it is fetched anew.
    fn unpack(&self, name: &PieceName, piece: u32, len: u64) -> Result<Arc<Vec<u8>>, WrittenError> {
        let mut recent = self.recent.lock().expect("no holder panics");
        let wrong = |why: String| WrittenError::Other(format!("the function is refused: {why}"));
        let other_length = || wrong("a piece is not as long as its document says".to_owned());
        if let Some((_, bytes)) = recent.iter().find(|(hex, _)| *hex == name.hex) {
            return if bytes.len() as u64 == len { Ok(bytes.clone()) } else { Err(other_length()) };
        }
        let path = self.pieces.join(&name.hex);
        let read = fs::read(&path);
        if read.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            // Another pull has removed it, and may just keep it anew.
            return Err(WrittenError::Piece(piece));
        }
        let Some(packed) = read.ok().filter(|packed| check_piece(name, packed).is_ok()) else {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(cannot("replace the damaged piece", &path, &error));
                }
                _ => return Err(WrittenError::Piece(piece)),
            }
        };
        let bytes = unpacked(&packed[..]).map_err(|error| wrong(error.to_string()))?;
        if bytes.len() as u64 != len {
            return Err(other_length());
        }
        let bytes = Arc::new(bytes);
        recent.truncate(RECENT - 1);
        recent.insert(0, (name.hex.clone(), bytes.clone()));
        Ok(bytes)
    }

    /// Does something with the rights of the owner.
    fn acting<T>(&self, act: impl FnOnce() -> Result<T, WrittenError>) -> Result<T, WrittenError> {
        let _acting = self
            .owner
            .act()
            .map_err(|error| cannot("act as the owner of", &self.directory, &error))?;
        act()
    }
}

/// Pieces that are kept unpacked: many files lie in one.
const RECENT: usize = 8;

fn cannot(action: &str, path: &Path, error: &io::Error) -> WrittenError {
    WrittenError::Other(match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            format!("no room is left in {}; free some with `thaw gc`", path.display())
        }
        _ => format!("cannot {action} {} ({error}); check its permissions", path.display()),
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use thaw_oci::artifact::{
        DOCUMENT_VERSION, FunctionDocument, ImagePart, IndexPart, PieceTable, packed,
    };
    use thaw_store::{ImageId, IndexId, KernelId, Name};

    pub struct Function {
        pub directory: tempfile::TempDir,
        pub document: FunctionDocument,
        pub rows: Rows,
        pub names: Vec<PieceName>,
        pub written: Written,
        packed: Vec<Vec<u8>>,
        files: Vec<Vec<u8>>,
    }

    fn blob(bytes: &[u8]) -> Blob {
        let mut named = Domain::shared().naming(bytes);
        io::copy(&mut named, &mut io::sink()).unwrap();
        named.blob()
    }

    /// An image of two pieces; contents of 3000, 20000 and 10 bytes in pieces of 8192 bytes, behind an
    /// index of 100. `lie`: what the index says of the first content is not true.
    pub fn function(lie: bool) -> Function {
        let directory = tempfile::tempdir().unwrap();
        let fill =
            |len: usize, seed: usize| (0..len).map(|at| (at * 7 + at / 256 + seed) as u8).collect();
        let files: Vec<Vec<u8>> = vec![fill(3000, 1), fill(20_000, 2), fill(10, 3)];
        let image: Vec<u8> = fill(0x3000, 4);
        let row = [vec![0; 100], files.concat()].concat();
        let cut = |bytes: &[u8]| bytes.chunks(8192).map(<[u8]>::to_vec).collect::<Vec<_>>();
        let (image, row) = (cut(&image), cut(&row));
        let lengths = |all: &[Vec<u8>]| all.iter().map(|piece| piece.len() as u32).collect();
        let document = FunctionDocument {
            version: DOCUMENT_VERSION,
            name: Name::new("shop").unwrap(),
            function: serde_json::Value::Null,
            index: IndexPart { id: IndexId([1; 32]), size: 100, contents: 0, naming: Vec::new() },
            image: ImagePart {
                id: ImageId([2; 32]),
                size: 0x3000,
                kernel: KernelId([3; 32]),
                cpu_features: [0; 8],
            },
            kernel: None,
            run: None,
            pieces: Some(PieceTable { files: lengths(&row), image: lengths(&image) }),
        };
        let rows = Rows::new(&document, files.iter().map(|file| file.len() as u64)).unwrap();
        let place = |name: &str| directory.path().join(name);
        fs::create_dir_all(place("function/contents")).unwrap();
        fs::create_dir(place("pieces")).unwrap();
        let mut blobs: Vec<_> = files.iter().map(|file| blob(file)).collect();
        if lie {
            blobs[0] = Blob { hash: blobs[1].hash, ..blobs[0] };
        }
        let naming = [NamingRun { naming: Naming::Shared, count: 3 }];
        let segments = vec![
            Segment { of: MovedFile::Image, piece: 1 },
            Segment { of: MovedFile::Content(1), piece: 3 },
        ];
        let places = (place("function"), place("pieces"), Owner::Caller);
        let written = Written::new(places, blobs.into_iter(), &naming, segments).unwrap();
        let packed: Vec<_> = image.iter().chain(&row).map(|piece| packed(piece).unwrap()).collect();
        let name = |bytes: &Vec<u8>| {
            let digest = thaw_oci::digest(bytes);
            let hex = digest.trim_start_matches("sha256:").to_owned();
            PieceName { hex, size: bytes.len() as u64 }
        };
        let names = packed.iter().map(name).collect();
        let function = Function { directory, document, rows, names, written, packed, files };
        function.keep_all();
        function
    }

    impl Function {
        fn keep_all(&self) {
            for (name, bytes) in self.names.iter().zip(&self.packed) {
                self.written.keep(name, bytes).unwrap();
            }
        }

        fn write(&self, number: u32) -> Result<Vec<u8>, WrittenError> {
            self.written.write(&self.rows, &self.names, number)?;
            let name = match number {
                3 => "image".to_owned(),
                4 => "contents/1.part".to_owned(),
                number => format!("contents/{number}"),
            };
            Ok(fs::read(self.directory.path().join("function").join(name)).unwrap())
        }
    }

    #[test]
    fn contents_and_segments_are_put_together_from_pieces() {
        let function = function(false);
        for number in [0, 1, 2] {
            assert_eq!(function.write(number).unwrap(), function.files[number as usize]);
        }
        // The second piece of the image, and holes where the first would be.
        let image = function.write(3).unwrap();
        assert_eq!((image.len(), &image[..8192]), (0x3000, &[0; 8192][..]));
        assert!(image[8192..].iter().any(|byte| *byte != 0));
        // Whole pages: a part of the piece after it comes along.
        let part = function.write(4).unwrap();
        let range = function.rows.segment(function.written.segment(4).unwrap()).unwrap();
        let range = range.start as usize..range.end as usize;
        assert_eq!(part[range.clone()], function.files[1][range]);
        assert_eq!(part.len(), 20_000);
        assert!(function.written.needs(&function.rows, 5).is_none());
        assert!(matches!(function.write(u32::MAX), Err(WrittenError::Other(_))));
    }

    #[test]
    fn contents_that_are_not_what_their_names_say_get_no_name() {
        let function = function(true);
        let error = function.write(0).unwrap_err().to_string();
        assert!(error.contains("is not what its name says"), "{error}");
        assert!(!function.directory.path().join("function/contents/0").exists());
        function.write(1).unwrap();
    }

    #[test]
    fn pieces_that_were_damaged_or_removed_are_fetched_again() {
        let function = function(false);
        let of_files = function.names.len() - 1;
        let path = |number: usize| {
            function.directory.path().join("pieces").join(&function.names[number].hex)
        };
        fs::write(path(1), b"damaged").unwrap();
        fs::remove_file(path(of_files)).unwrap();
        assert!(matches!(function.write(3), Err(WrittenError::Piece(1))));
        assert!(!path(1).exists(), "it is removed");
        assert!(
            matches!(function.write(2), Err(WrittenError::Piece(piece)) if piece as usize == of_files)
        );
        function.write(0).unwrap();
    }

    #[test]
    fn a_segment_is_written_once() {
        let function = function(false);
        for number in [3, 4] {
            let written = function.write(number).unwrap();
            function.written.recent.lock().unwrap().clear();
            for name in &function.names {
                let _ = fs::remove_file(function.directory.path().join("pieces").join(&name.hex));
            }
            assert_eq!(function.write(number).unwrap(), written, "no piece is read again");
            function.keep_all();
        }
    }

    /// A directory in the place of a piece stands for a file system that removes nothing.
    #[test]
    fn a_piece_that_can_neither_be_read_nor_replaced_is_told() {
        let function = function(false);
        let path = function.directory.path().join("pieces").join(&function.names[1].hex);
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let error = function.write(3).unwrap_err();
        assert!(matches!(error, WrittenError::Other(_)), "{error}");
    }

    #[test]
    fn documents_that_count_contents_wrong_are_refused() {
        let places = || (PathBuf::new(), PathBuf::new(), Owner::Caller);
        for count in [1, 3, u32::MAX] {
            let naming = [NamingRun { naming: Naming::Shared, count }];
            let blobs = vec![blob(b"a"), blob(b"b")];
            Written::new(places(), blobs.into_iter(), &naming, Vec::new()).unwrap_err();
        }
    }
}
